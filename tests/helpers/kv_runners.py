"""Runners of one model with their KV cache here or there, to be compared, and host threads that come late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from offload_runtime.runners import ModelRunner
from tests.helpers.assembly import Assembled, make_runner
from tests.helpers.models import random_model

CAPACITY = 1600
MODELS = ["llama", "llama-gqa", "mistral-window"]


def assemble(name: str, **options: Any) -> Assembled:
    """A runner of a model of that name with room for `CAPACITY` tokens."""
    return make_runner(random_model(name), capacity_tokens=CAPACITY, **options)


def delays(seed: int, most_s: float = 0.002, share: float = 0.3) -> Callable[[], None]:
    """A hook that sleeps up to `most_s` at a `share` of its calls."""
    generator = random.Random(seed)

    def sleep() -> None:
        if generator.random() < share:
            time.sleep(generator.uniform(0, most_s))

    return sleep


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
