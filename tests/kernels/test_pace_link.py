"""What holds a stream to an emulated link's pace: the kernel by a clock that the test turns, and by the GPU's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_runtime_kernels.pace_link import SLACK_NS, pace_link, pace_link_reference

from tests.helpers.kernel_conditions import KERNEL_DEVICE

TICK_NS = 5000


def _int64(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=KERNEL_DEVICE)


# Around the deadline, around the slack behind it, long idle, and beyond 32 bits.
@pytest.mark.parametrize("begun_ns", [0, 3_000_000_000])
@pytest.mark.parametrize("late_ns", [-60_000, -1, 0, 1, SLACK_NS, SLACK_NS + 1, 5_000_000_000])
@pytest.mark.parametrize("duration_ns", [0, 40_000])
def test_the_deadline_moves_as_the_reference_says_and_is_kept(begun_ns: int, late_ns: int, duration_ns: int) -> None:
    now_ns = begun_ns + duration_ns + late_ns
    deadline, clock = _int64(begun_ns), _int64(now_ns)
    pace_link(deadline, duration_ns, clock=clock, tick_ns=TICK_NS)
    expected = pace_link_reference(begun_ns, now_ns, duration_ns)
    assert deadline.item() == expected
    # Each look moves the clock on: one finds it late enough, and none comes behind that one.
    looks = 1 + max(0, -(-(expected - now_ns) // TICK_NS))
    assert clock.item() == now_ns + looks * TICK_NS


@pytest.mark.parametrize("byte_ns", [0.0, 2.5])
def test_bytes_that_only_the_device_knows_take_their_time_and_none_wait_for_nothing(byte_ns: float) -> None:
    begun_ns, now_ns = 3_000_000_000, 2_999_950_000
    for nbytes in (0, 16_000):
        deadline, clock = _int64(begun_ns), _int64(now_ns)
        pace_link(deadline, nbytes=_int64(nbytes), byte_ns=byte_ns, clock=clock, tick_ns=TICK_NS)
        assert deadline.item() == begun_ns + round(nbytes * byte_ns)
        assert clock.item() == (deadline.item() + TICK_NS if nbytes else now_ns + TICK_NS)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 2 * SLACK_NS)), min_size=1, max_size=20))
def test_no_sequence_of_copies_is_faster_than_the_link(copies: list[tuple[int, int]]) -> None:
    # Each copy begins a pause after the one before was through, and may itself take longer than it should.
    begun = now = deadline = 10**9
    for duration, pause in copies:
        now += pause
        deadline = pace_link_reference(deadline, now, 0)
        deadline = pace_link_reference(deadline, now, duration)
        now = max(now, deadline)
        assert deadline >= now - SLACK_NS, "credit for a pause longer than the slack"
    assert now - begun >= sum(duration for duration, _ in copies)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_stream_is_held_up_for_as_long_as_asked() -> None:
    deadline = torch.zeros(1, dtype=torch.int64, device="cuda")
    pace_link(deadline, 0)  # compiles, and starts the clock
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    pace_link(deadline, 0)
    for _ in range(10):
        pace_link(deadline, 2_000_000)
    end.record()
    end.synchronize()
    assert 19.9 < start.elapsed_time(end) < 21.0
