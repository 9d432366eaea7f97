"""Holds a stream up until a slower link would have carried its bytes: the GPU's own clock, no host involved.

    deadline = deadline + duration,  or now  if that is more than `slack` ago;   wait until now >= deadline

Launched with duration 0 before copies and with bytes / bandwidth behind each of them; where only the device knows the
bytes and there are none, nothing waits. Streams that share a link share the deadline, which each moves by itself.
Because durations are added to the deadline and not to the time of the launch, the few microseconds between a kernel
and a copy do not add up; a link that idled longer than `slack`, or was slower than what is emulated, gets nothing of
that back.

One program of one warp, which sleeps between looks at the clock: it takes a block's place on one SM and hardly any of
its cycles.
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl

# What a kernel before and one behind a copy leave idle, with room to spare; a pause of the schedule is longer.
SLACK_NS = 20_000


def pace_link_reference(deadline_ns: int, now_ns: int, duration_ns: int, *, slack_ns: int = SLACK_NS) -> int:
    """The next deadline, all on one clock, in nanoseconds: `pace_link` without the waiting."""
    following = deadline_ns + duration_ns
    return now_ns if now_ns - following > slack_ns else following


@jit
def _read_clock(clock_ptr, TICK: tl.constexpr):
    """Nanoseconds: of the GPU, or (`TICK` > 0) of a clock in memory that each look moves on by so much."""
    if TICK > 0:
        now = tl.atomic_add(clock_ptr, TICK)
    else:
        now = tl.inline_asm_elementwise(
            "{ nanosleep.u32 100; mov.u64 $0, %globaltimer; }", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    return now


@jit(do_not_specialize=("bytes_ptr", "duration_ns"))
def _pace_link_kernel(
    deadline_ptr, clock_ptr, bytes_ptr, duration_ns, byte_ns, HAS_BYTES: tl.constexpr, SLACK: tl.constexpr,
    TICK: tl.constexpr,
):  # fmt: skip
    waits = True
    if HAS_BYTES:
        nbytes = tl.load(bytes_ptr)
        waits = nbytes > 0
        duration_ns = (nbytes.to(tl.float64) * byte_ns).to(tl.int64)
    deadline = tl.atomic_add(deadline_ptr, duration_ns.to(tl.int64)) + duration_ns
    now = _read_clock(clock_ptr, TICK)
    if now - deadline > SLACK:
        tl.atomic_max(deadline_ptr, now)
        deadline = now
    while waits & (now < deadline):
        now = _read_clock(clock_ptr, TICK)


def pace_link(
    deadline_ns: torch.Tensor, duration_ns: int = 0, *, nbytes: torch.Tensor | None = None, byte_ns: float = 0.0,
    clock: torch.Tensor | None = None, tick_ns: int = 0,
) -> None:  # fmt: skip
    """Hold the current stream up until `duration_ns` behind the deadline, which moves there; see above.

    Args:
        deadline_ns: [1] int64 on the stream's device: nanoseconds of the GPU's clock, 0 at first. One link's own.
        duration_ns: What the bytes copied since the last call would have taken; 0 before the first copy.
        nbytes: [1] int64, device: these bytes, where the host does not know them, which take `byte_ns` each; before the
            first copy its own, with a `byte_ns` of 0.
        clock: [1] int64, device, to go by instead of the GPU's clock.
        tick_ns: By how much each look moves `clock` on; positive exactly if there is one.

    Raises:
        RuntimeError: Triton is not installed.
    """
    require_triton("pacing the link")
    assert deadline_ns.dtype == torch.int64 and deadline_ns.shape == (1,)
    assert (clock is None) == (tick_ns == 0)
    _pace_link_kernel[(1,)](
        deadline_ns, deadline_ns if clock is None else clock, deadline_ns if nbytes is None else nbytes, duration_ns,
        byte_ns, HAS_BYTES=nbytes is not None, SLACK=SLACK_NS, TICK=tick_ns, num_warps=1,
    )  # fmt: skip
