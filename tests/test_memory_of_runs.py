"""Device memory of whole runs on a GPU: what allocator and driver report at the peak is within what was planned."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.sizes import GB

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
    names = ("both streamed, n-grams", "a draft's trees", "a draft that retrieves", "TriForce", "TriForce for three")
    for _ in range(2):  # what libraries take once for all stays after the first time
        for run in (RUNS[name] for name in names):
            options = {"draft": draft, "device": "cuda", "dtype": "bf16", "context": CONTEXT, **run}
            with Runtime.load(target, **options) as runtime:
                runtime.generate(PROMPT[:1200], max_new_tokens=8, ignore_eos=True)
        left.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert left[0] == left[1]
