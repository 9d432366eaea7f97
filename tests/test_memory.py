"""Host arenas of exact size, and a device ledger that refuses before memory runs out."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch

from offload_runtime.errors import BudgetError
from offload_runtime.stream import DeviceBudget, HostArena, check_host_memory

CPU = torch.device("cpu")
MIB = 1 << 20


def test_the_ledger_adds_up_to_the_last_byte() -> None:
    budget = DeviceBudget(CPU, 1000)
    budget.reserve("slots", 600)
    assert (budget.reserved_bytes, budget.limit_bytes) == (600, 1000)
    with pytest.raises(BudgetError, match=r"KV cache needs 401 B of memory but 400 B of 1.0 kB is left: raise"):
        budget.reserve("KV cache", 401)
    assert budget.reserved_bytes == 600  # a refused reservation leaves nothing behind
    assert budget.allocate("KV cache", 400).nbytes == 400
    assert (budget.reserved_bytes, budget.peak_bytes()) == (1000, 1000)
    with pytest.raises(BudgetError, match="0 B of"):
        budget.allocate("one more", 1)
    assert budget.reservations == {"slots": 600, "KV cache": 400}


@pytest.mark.gpu
def test_a_pinned_arena_is_copied_asynchronously() -> None:
    arena = HostArena(64 * MIB, name="layer 0")
    arena.buffer.fill_(3)
    arena.pin()
    assert arena.pinned and arena.buffer.is_pinned()
    gpu = torch.empty(arena.nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about a tenth of a second
    gpu.copy_(arena.buffer, non_blocking=True)
    assert not torch.cuda.current_stream().query(), "the copy waited for the device: the pages are not locked"
    torch.cuda.synchronize()
    assert bool((gpu == 3).all())
    arena.close()
    assert not arena.pinned


@pytest.mark.gpu
@pytest.mark.alone
def test_the_allocator_is_held_to_the_limit() -> None:
    device = torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()
    limit_bytes = DeviceBudget(device, None).context_bytes + 512 * MIB
    budget = DeviceBudget(device, limit_bytes)
    try:
        kept = budget.allocate("slots", 300 * MIB)
        with pytest.raises(BudgetError, match="KV cache needs"):
            budget.allocate("KV cache", 300 * MIB)
        with pytest.raises(torch.OutOfMemoryError):  # past the ledger, as a mistake in its arithmetic would
            torch.empty(400 * MIB, dtype=torch.uint8, device=device)
        assert kept.nbytes == 300 * MIB
        assert budget.peak_bytes() <= limit_bytes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
def test_a_limit_beyond_the_card_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"is more than the .* has free"):
        DeviceBudget(torch.device("cuda", 0), 1 << 50)


def test_weights_larger_than_the_host_memory(tmp_path: Path) -> None:
    check_host_memory(MIB, cgroup=tmp_path)
    with pytest.raises(BudgetError, match="close other programs"):
        check_host_memory(2 * psutil.virtual_memory().total, cgroup=tmp_path)


def test_weights_larger_than_what_the_container_may_use(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{60 * MIB}\n")
    check_host_memory(40 * MIB, cgroup=tmp_path)
    with pytest.raises(BudgetError, match=r"41\.9 MB is available"):
        check_host_memory(41 * MIB, cgroup=tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    check_host_memory(41 * MIB, cgroup=tmp_path)
