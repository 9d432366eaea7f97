"""Locking block by block: refused at any of them, what was locked before stays, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from offload_runtime.stream import HostArena, Registrar


@pytest.mark.gpu
def test_a_refusal_by_cuda_does_not_fail_the_next_kernel() -> None:
    registrar = Registrar()
    arena = HostArena(1 << 20, name="layer 0")
    arena.pin(registrar)
    assert registrar.register(arena.buffer.data_ptr(), arena.nbytes) != 0  # it is locked already
    assert int(torch.ones(3, device="cuda").sum()) == 3
    arena.close()


@pytest.mark.gpu
def test_blocks_side_by_side_are_copied_in_pieces() -> None:
    from offload_runtime.stream.queue import COPY_PIECE_BYTES, CudaCopyEngine

    arena = HostArena(3 * COPY_PIECE_BYTES + 12345, name="layer 0")
    arena.buffer.copy_(torch.randint(0, 256, (arena.nbytes,), dtype=torch.uint8))
    assert arena.lock(Registrar(), COPY_PIECE_BYTES) == 0
    gpu = torch.zeros(arena.nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    engine = CudaCopyEngine(torch.device("cuda"))
    free, ready = engine.new_event(), engine.new_event()
    engine.enqueue(gpu, arena.buffer, free=free, ready=ready)
    engine.compute_wait(ready)
    assert torch.equal(gpu.cpu(), arena.buffer)
    engine.close()
    arena.close()
