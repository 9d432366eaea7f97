"""The copy queue: order, events, counters and failures, on a thread and on a CUDA stream."""

from __future__ import annotations

import pytest
import torch

from offload_runtime.errors import CopyError
from offload_runtime.stream import make_copy_engine
from offload_runtime.stream.queue import COPY_PIECE_BYTES, CudaCopyEngine, ThreadCopyEngine


def _bytes(value: int, nbytes: int = 1000) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_a_failed_copy_raises_on_every_later_use() -> None:
    engine = ThreadCopyEngine()
    free, ready = engine.new_event(), engine.new_event()
    engine.enqueue(_bytes(0, 10), _bytes(1, 11), free=free, ready=ready)  # sizes that do not match
    for use in (
        lambda: engine.compute_wait(ready),
        engine.drain,
        lambda: engine.enqueue(_bytes(0), _bytes(1), free=free, ready=ready),
    ):
        with pytest.raises(CopyError, match="load the runtime again") as caught:
            use()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert engine.bytes_copied == 0
    engine.close()


@pytest.mark.gpu
def test_cuda_copies_wait_for_free_and_compute_waits_for_ready() -> None:
    device = torch.device("cuda")
    engine = make_copy_engine(device)
    assert isinstance(engine, CudaCopyEngine)
    src = torch.full((1 << 20,), 2, dtype=torch.uint8).pin_memory()
    dst = torch.ones(1 << 20, dtype=torch.uint8, device=device)
    free, ready = engine.new_event(), engine.new_event()
    torch.cuda._sleep(20_000_000)
    before = dst.clone()  # the slow last read
    engine.compute_record(free)
    engine.enqueue(dst, src, free=free, ready=ready)
    engine.compute_wait(ready)
    after = dst.clone()
    assert bool((before == 1).all())
    assert bool((after == 2).all())
    engine.drain()
    assert engine.bytes_copied == 1 << 20
    assert engine.stall_seconds() > 0
    assert engine.copy_seconds() > 0


@pytest.mark.gpu
def test_cuda_copies_longer_than_a_piece_arrive_whole() -> None:
    engine = CudaCopyEngine(torch.device("cuda"))
    nbytes = 2 * COPY_PIECE_BYTES + 12345
    src = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).pin_memory()
    dst = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    engine.enqueue(dst, src, free=engine.new_event(), ready=engine.new_event())
    engine.close()
    assert torch.equal(dst.cpu(), src)


@pytest.mark.gpu
def test_a_failed_cuda_copy_is_typed() -> None:
    engine = CudaCopyEngine(torch.device("cuda"))
    dst = torch.zeros(10, dtype=torch.uint8, device="cuda")
    with pytest.raises(CopyError, match="load the runtime again"):
        engine.enqueue(dst, _bytes(1, 11).pin_memory(), free=engine.new_event(), ready=engine.new_event())
