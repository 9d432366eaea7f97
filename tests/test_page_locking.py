"""Locking block by block: refused at any of them, what was locked before stays, and nothing is left behind."""

from __future__ import annotations

import gc

import pytest
import torch

from offload_runtime.memory import PAGE_BYTES, HostArena, Registrar
from tests.helpers.page_locking import REFUSED, LimitedRegistrar

NO_LIMIT = 1 << 60


@pytest.mark.parametrize("refuse_call", [None, 0, 1, 2, 3, 4])
def test_what_was_locked_before_a_refusal_stays(refuse_call: int | None) -> None:
    """Five blocks, the last of them shorter."""
    registrar = LimitedRegistrar(NO_LIMIT, refuse_calls=() if refuse_call is None else (refuse_call,))
    arena = HostArena(9 * PAGE_BYTES, name="layer 0")
    start, blocks = arena.buffer.data_ptr(), 5 if refuse_call is None else refuse_call
    assert arena.lock(registrar, 2 * PAGE_BYTES) == (0 if refuse_call is None else REFUSED)
    expected = min(2 * blocks, 9) * PAGE_BYTES
    assert arena.pinned_bytes == registrar.locked_bytes == expected
    assert sorted(registrar.locked) == [start + 2 * block * PAGE_BYTES for block in range(blocks)]
    assert arena.lock(registrar, 2 * PAGE_BYTES) == 0  # it goes on where it was refused
    assert arena.pinned_bytes == registrar.locked_bytes == 9 * PAGE_BYTES
    arena.unpin()
    arena.unpin()
    assert arena.pinned_bytes == 0 and not registrar.locked


@pytest.mark.parametrize("closed", [True, False])
def test_an_arena_that_goes_leaves_nothing_locked(closed: bool) -> None:
    registrar = LimitedRegistrar(NO_LIMIT)
    arena = HostArena(8 * PAGE_BYTES, name="layer 0")
    arena.lock(registrar)
    if closed:
        arena.close()
        assert not arena.pinned
    del arena
    gc.collect()
    assert not registrar.locked


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
    from offload_runtime.copy.queue import COPY_PIECE_BYTES, CudaCopyEngine

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
