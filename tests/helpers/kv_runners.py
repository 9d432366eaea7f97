"""Runners of one model with their KV cache here or there, to be compared, and host threads that come late."""

from __future__ import annotations

import threading
from typing import Any

import torch

from offload_runtime.runners import ModelRunner
from tests.helpers.assembly import Assembled, make_runner
from tests.helpers.models import random_model

CAPACITY = 1600


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
