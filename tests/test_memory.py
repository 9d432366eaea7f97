"""Page-locked host arenas, host memory that is not there, and whole runs on a GPU: what allocator and driver report at
the peak is within what was planned."""

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError
from offload_runtime.sizes import GB
from offload_runtime.stream.arena import HostArena, check_host_memory

CPU = torch.device("cpu")
MIB = 1 << 20


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


TARGET = "wide_target"
CONTEXT = 6000
PROMPT = [3 + (7 * i * i + i // 5) % 290 for i in range(5000)]
LEVELS: dict[str, Any] = {"recent_tokens": 512, "budget_tokens": 1024, "gamma_draft": 4}
MODULE_BYTES = 32 << 20  # of kernels that the first run has loaded and the second finds in its context
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none", "kv": "gpu"},
    "weights streamed": {"draft": "none", "kv": "gpu", "resident_layers": 0},
    "KV streamed": {"draft": "none", "kv": "host"},
    "both streamed, n-grams": {"draft": "ngram", "kv": "host", "resident_layers": 1},
    "a draft's chain": {"kv": "gpu", "speculation": SpeculationOptions("chain", "full", **LEVELS)},
    "a draft's trees": {"kv": "gpu", "tree_nodes": 200, "speculation": SpeculationOptions("chain", "full", **LEVELS)},
    "a draft that retrieves": {"kv": "host", "speculation": SpeculationOptions("chain", "retrieval", **LEVELS)},
    "a copy's trees": {"draft": "self", "kv": "gpu", "resident_layers": 2, "tree_nodes": 200},
    "TriForce": {"kv": "host", "speculation": SpeculationOptions("triforce", "streaming", **LEVELS)},
    "TriForce for three": {
        "kv": "gpu", "max_batch": 3, "speculation": SpeculationOptions("triforce", "full", **LEVELS),
    },
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_at_its_limit_stays_within_it(target: Path, draft: Path, name: str) -> None:
    options: dict[str, Any] = {"draft": draft, "device": "cuda", "dtype": "bf16", "context": CONTEXT, **RUNS[name]}
    with Runtime.load(target, **options) as runtime:
        limit_bytes = runtime.plan.device_bytes + MODULE_BYTES
        options["resident_layers"] = len(runtime.plan.placement.resident_layers)
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    prompts = [PROMPT, PROMPT[:4000], PROMPT[::-1]][: options.get("max_batch", 1)]
    with Runtime.load(target, vram=limit_bytes, **options) as runtime:
        assert 0.9 * limit_bytes < runtime.plan.device_bytes <= limit_bytes < 6 * GB
        for filters in ({}, {"top_p": 0.9, "top_k": 40}):  # filters sort the vocabulary, in memory of their own
            runtime.generate_batch(prompts, max_new_tokens=40, ignore_eos=True, temperature=0.8, seed=1, **filters)
        budget = runtime.engine.budgets[0]
        allocator_bytes = torch.cuda.max_memory_reserved() - before_bytes
        assert allocator_bytes <= limit_bytes - budget.context_bytes
        assert budget.peak_bytes() <= limit_bytes


@pytest.mark.gpu
@pytest.mark.alone
def test_a_closed_runtime_leaves_no_device_memory(target: Path, draft: Path) -> None:
    left = []
    # With everything that a runtime may have. The others are parts of these.
    names = (
        "both streamed, n-grams", "a draft's trees", "a copy's trees", "a draft that retrieves", "TriForce",
        "TriForce for three",
    )  # fmt: skip
    for _ in range(2):  # what libraries take once for all stays after the first time
        for run in (RUNS[name] for name in names):
            options = {"draft": draft, "device": "cuda", "dtype": "bf16", "context": CONTEXT, **run}
            with Runtime.load(target, **options) as runtime:
                runtime.generate(PROMPT[:1200], max_new_tokens=8, ignore_eos=True)
        left.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert left[0] == left[1]
