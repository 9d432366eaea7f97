"""An emulated link: copies take as long as its bandwidth says, and are the same bytes."""

from __future__ import annotations

import pytest
import torch

from offload_runtime.copy import make_copy_engine, measure_link_gbps
from offload_runtime.copy.queue import LinkPace, host_pace

MS = 1_000_000


class Clock:
    """A clock that stands still but for sleeping, which it oversleeps, and for what the test adds."""

    def __init__(self, oversleep_ns: int = 0) -> None:
        self.now_ns = 10**12
        self.slept_ns = 0
        self._oversleep_ns = oversleep_ns

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.slept_ns += round(seconds * 1e9)
        self.now_ns += round(seconds * 1e9) + self._oversleep_ns


def _copy(pace: LinkPace, clock: Clock, nbytes: int, *, takes_ns: int = 0) -> None:
    pace(0)
    clock.now_ns += takes_ns
    pace(nbytes)


def test_copies_take_what_their_bytes_take_whatever_they_took() -> None:
    clock = Clock()
    pace, begun = host_pace(2.0, clock_ns=clock, sleep=clock.sleep), clock.now_ns
    for takes_ns in (0, MS, 9 * MS):
        _copy(pace, clock, 20_000_000, takes_ns=takes_ns)  # 10 ms at 2 GB/s
    assert clock.now_ns - begun == 30 * MS
    assert clock.slept_ns == 20 * MS


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("mib", [4, 64, 200])
@pytest.mark.parametrize("back", [False, True])
def test_a_paced_gpu_link_is_within_two_percent(mib: int, back: bool) -> None:
    nbytes, device = mib << 20, torch.device("cuda")
    host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).pin_memory()
    gpu = torch.zeros(nbytes, dtype=torch.uint8, device=device) if not back else host.to(device)
    torch.cuda.synchronize()
    dst, src = (torch.zeros_like(host).pin_memory(), gpu) if back else (gpu, host)
    engine = make_copy_engine(device, pace_gbps=6.0)
    assert measure_link_gbps(engine, dst, src, repeats=max(4, 128 // mib)) == pytest.approx(6.0, rel=0.02)
    engine.close()
    assert torch.equal(dst.cpu(), host)
