"""Runners of one model with their KV cache here or there, to be compared, and host threads that come late."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from offload_runtime.runners import ModelRunner
from offload_runtime.weights import open_checkpoint
from tests.helpers.assembly import Assembled, HostKV, make_runner
from tests.helpers.families import family_model
from tests.helpers.models import random_model

CAPACITY = 1600
# One of each kind of layers and of each place of what they need: a model, and options of `make_runner`.
RUNNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "resident": ("llama-gqa", {}), "streamed": ("llama-gqa", {"buffers": 2}),
    "host KV": ("llama-gqa", {"host_kv": HostKV()}), "windows": ("mistral-window", {}),
    "hybrid": ("qwen3_5_text", {}), "mixture": ("qwen3_moe", {}),
    "streamed mixture": ("qwen3_moe", {"buffers": 2, "pool_buffers": 6}),
}  # fmt: skip


def runner_of(kind: str, directory: Path, **options: Any) -> Assembled:
    """One of `RUNNERS`; a directory is for mixtures, whose experts are stored one by one."""
    name, own = RUNNERS[kind]
    model = random_model(name) if "-" in name else family_model(name, 1)
    if name.endswith("moe"):
        model.save_pretrained(directory)
        model = open_checkpoint(directory)
    return make_runner(model, **own, **options)


def assemble(name: str, **options: Any) -> Assembled:
    """A runner of a model of that name with room for `CAPACITY` tokens."""
    return make_runner(random_model(name), capacity_tokens=CAPACITY, **options)


def copying_threads() -> set[threading.Thread]:
    """Those of the copy engines, staging ones included."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(("staging", "copy-engine"))}


def reset(*runners: ModelRunner) -> None:
    """Empty the caches."""
    for runner in runners:
        for slot in range(3):
            runner.cache.truncate(slot, 0)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, and nothing of it undefined."""
    return torch.equal(left, right) and bool(left.isfinite().all())
