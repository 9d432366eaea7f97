"""Host memory: what a run may take of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import format_bytes, format_bytes_up
from offload_runtime.engine.run_plan import PROCESS_BYTES, MemoryPart, RunPlan
from offload_runtime.engine.staging_plan import LockLimit
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.hardware.host_info import HostInfo

# Stays with the system and with other programs when nobody says how much may be taken.
_KEPT_SHARE, _MOST_KEPT_BYTES = 16, 2 << 30
# Less is no context that anybody left it to the runtime to choose.
_LEAST_CONTEXT_TOKENS = 2048


@dataclass(frozen=True)
class HostLimits:
    """Most host memory of a run, this process included, and of that most page-locked memory (None: what the system
    allows), where the device's copies need it at all. The names say whose limits these are, and `ram_way` how to have
    more, for messages."""

    ram_bytes: int
    ram_name: str
    ram_way: str
    pinned_bytes: int | None
    pinned_name: str
    page_locks: bool

    @property
    def locking(self) -> LockLimit:
        """The limit of page-locked memory."""
        return LockLimit(self.pinned_bytes if self.page_locks else None, self.pinned_name)


def host_limits(asked_ram: int | None, asked_pinned: int | None, host: HostInfo, *, page_locks: bool) -> HostLimits:
    """Limits of a run on this machine.

    Args:
        asked_ram: What the user allows of host memory, at most what is available; None for that but for a reserve.
        asked_pinned: The same of page-locked memory; None for what can be registered.
        host: This machine.
        page_locks: Whether the device's copies need page-locked memory at all.

    Raises:
        OptionError: A limit of page-locked memory where there is none to lock.
    """
    if asked_pinned is not None and not page_locks:
        raise OptionError("--pinned does nothing on a CPU, where no memory is page-locked: drop it")
    # Python and the libraries have taken most of theirs by now.
    there_bytes, ram_way = host.available_bytes + PROCESS_BYTES, "allow more with --ram"
    if asked_ram is None:
        kept_bytes = min(host.ram_bytes // _KEPT_SHARE, _MOST_KEPT_BYTES, host.available_bytes)
        ram_bytes = there_bytes - kept_bytes
        ram_name = f"the available host memory ({format_bytes(kept_bytes)} stay with the system)"
    elif asked_ram > there_bytes:  # more than the system gives would end this process
        ram_bytes, ram_name, ram_way = there_bytes, "the available host memory", "close other programs"
    else:
        ram_bytes, ram_name = asked_ram, "--ram"
    if asked_pinned is None and host.wsl:  # Windows' driver locks about half of what the virtual machine has
        return HostLimits(ram_bytes, ram_name, ram_way, host.ram_bytes // 2, "WSL", page_locks)
    return HostLimits(ram_bytes, ram_name, ram_way, asked_pinned, "--pinned", page_locks)


def check_ram(plan: RunPlan, limit_bytes: int, name: str, way: str) -> None:
    """Refuse a plan that takes more host memory than `limit_bytes`, this process included.

    Args:
        plan: Of a run.
        limit_bytes: Of host memory.
        name: Whose limit it is, for the message.
        way: How to have more, for the message.

    Raises:
        BudgetError: Says of what, by how much, and what would help.
    """
    if plan.host_bytes <= limit_bytes:
        return
    target = plan.placed.plans.target
    loading = plan.loading_bytes + PROCESS_BYTES == plan.host_bytes
    parts = (MemoryPart("weights while they are read", plan.loading_bytes), plan.host[-1]) if loading else plan.host
    ways = [] if loading or not plan.placed.placement.num_streamed else ["raise --vram, which keeps more layers there"]
    if target.kv.on_host and not loading:
        ways.append(f"lower --context (now {target.context_tokens})")
    if plan.placed.plans.draft is not None:
        ways.append("take a smaller draft")
    ways += ["choose a 16-bit --dtype or a smaller model", f"or {way}"]
    raise BudgetError(
        f"{name} of {format_bytes(limit_bytes)} is too small by {format_bytes_up(plan.host_bytes - limit_bytes)} "
        f"({listed(parts)}): {', '.join(ways)}"
    )


def planned_within(limit_bytes: int, context: int | str, planned: Callable[[int | str], RunPlan]) -> RunPlan:
    """A plan of the context asked for, or where it is `auto` of the longest one that host memory has room for.

    Args:
        limit_bytes: Of host memory.
        context: `auto`, or tokens.
        planned: Plans a context; raises what planning raises.
    """
    plan = planned(context)
    # More than once: with another context other layers may find room on the device, and their keys and values leave
    # less of a token to host memory.
    while context == "auto" and (shorter := _shorter_context(plan, limit_bytes)) is not None:
        plan = planned(shorter)
    return plan


def _shorter_context(plan: RunPlan, limit_bytes: int) -> int | None:
    """Tokens whose KV cache fits host memory, where the whole context's does not and nobody asked for all of it.

    Returns:
        A number of whole blocks, at least `_LEAST_CONTEXT_TOKENS`; None where a shorter context is no way out.
    """
    target = plan.placed.plans.target
    if not target.kv.on_host or plan.host_bytes <= limit_bytes:
        return None
    token_bytes = target.batch * target.config.kv_bytes_per_token(target.dtype.itemsize)
    fewer = -(-(plan.host_bytes - limit_bytes) // token_bytes)
    tokens = (target.context_tokens - fewer) // BLOCK_TOKENS * BLOCK_TOKENS
    return tokens if tokens >= _LEAST_CONTEXT_TOKENS else None


def listed(parts: Sequence[MemoryPart]) -> str:
    """The parts in words."""
    return ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in parts)
