"""Host arenas of exact size, and a device ledger that refuses before memory runs out."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import BudgetError, ContextLengthError, DeviceError
from offload_runtime.kv import DeviceKVCache, kv_cache_bytes
from offload_runtime.memory import PAGE_BYTES, DeviceBudget, HostArena, check_host_memory, resolve_device, touch

CPU = torch.device("cpu")
MIB = 1 << 20


def _config() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=8, vocab_size=50, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, PAGE_BYTES + 1, 5 * MIB + 3])
def test_arenas_are_rounded_to_pages_and_no_further(nbytes: int) -> None:
    arena = HostArena(nbytes, name="layer 0")
    assert nbytes <= arena.nbytes < nbytes + PAGE_BYTES
    assert arena.buffer.nbytes == arena.buffer.untyped_storage().nbytes() == arena.nbytes
    assert arena.buffer.data_ptr() % PAGE_BYTES == 0
    assert not arena.pinned


def test_views_outlive_a_closed_arena() -> None:
    arena = HostArena(MIB, name="layer 0")
    view = arena.buffer[100:200]
    view.fill_(7)
    arena.close()
    arena.close()
    assert arena.buffer.numel() == 0
    assert int(view.sum()) == 700


def test_a_closed_arena_gives_its_pages_back() -> None:
    process = psutil.Process()
    arena = HostArena(256 * MIB, name="layer 0")
    arena.buffer.fill_(7)
    held = process.memory_info().rss
    arena.close()
    assert process.memory_info().rss < held - 200 * MIB


@torch.inference_mode()
def test_touched_arenas_have_their_pages() -> None:
    """Made in inference mode, as a cache grows."""
    process = psutil.Process()
    arenas = [HostArena(nbytes, name="layer 0") for nbytes in (100 * MIB, 28 * MIB + 5)]
    held = process.memory_info().rss
    touch(arenas)
    assert process.memory_info().rss > held + 120 * MIB
    assert not any(bool(arena.buffer.any()) for arena in arenas)


def test_an_impossible_arena_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match=r"layer 7 needs 1152921.5 TB of host memory .* choose a smaller model"):
        HostArena(1 << 60, name="layer 7")


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


def test_without_a_limit_the_ledger_only_counts() -> None:
    budget = DeviceBudget(CPU, None)
    budget.reserve("everything", 1 << 50)
    assert budget.limit_bytes is None
    assert budget.peak_bytes() == 1 << 50


def test_devices_that_do_not_exist_are_refused() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name, reason in (
        ("abacus", "is not a device"),
        ("meta", "is not supported"),
        ("cuda:99", "cuda:99|no CUDA device"),
    ):
        with pytest.raises(DeviceError, match=reason):
            resolve_device(name)


def test_the_kv_cache_is_reserved_in_full_and_says_when_it_is_full() -> None:
    config = _config()
    needed_bytes = kv_cache_bytes(config, torch.float32, capacity_tokens=10, batch=2)
    assert needed_bytes == 2 * 2 * 8 * 3 * 256 * 2 * 4  # K and V, heads, channels, layers, a block, sequences, fp32
    with pytest.raises(BudgetError, match="KV cache needs"):
        DeviceKVCache(config, torch.float32, capacity_tokens=10, batch=2, budget=DeviceBudget(CPU, needed_bytes - 1))
    budget = DeviceBudget(CPU, needed_bytes)
    cache = DeviceKVCache(config, torch.float32, capacity_tokens=10, batch=2, budget=budget)
    assert budget.reserved_bytes == needed_bytes
    data = cache.store(2).data
    assert data.shape == (2, 1, 2, 2, 256, 8)
    assert not bool(data.any())
    cache.commit(1, 7)
    cache.begin_window([1], [249])  # what is only tentative may use the rest of the block
    with pytest.raises(ContextLengthError, match="257 tokens do not fit the 256"):
        cache.begin_window([1], [250])
    with pytest.raises(ContextLengthError, match="11 tokens do not fit the 10"):
        cache.begin_prefill(1, 4)
    cache.truncate(1, 2)
    assert (cache.length(0), cache.length(1)) == (0, 2)
    cache.begin_window([0, 1], [10, 8])


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
