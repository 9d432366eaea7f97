"""Runners of one model with their KV cache here or there, to be compared, and host threads that come late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload_runtime.model import Window
from offload_runtime.params import SamplingParams
from offload_runtime.runners import CapturedPasses, ModelRunner
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import PromptRequest, Proposer, run_step
from tests.helpers.assembly import Assembled, make_runner
from tests.helpers.models import random_model, random_tokens

CAPACITY = 1600
MODELS = ["llama", "llama-gqa", "mistral-window"]


def assemble(name: str, **options: Any) -> Assembled:
    """A runner of a model of that name with room for `CAPACITY` tokens."""
    return make_runner(random_model(name), capacity_tokens=CAPACITY, **options)


def require_tokens_of_captured_passes(
    params: Sequence[SamplingParams], prepare: Callable[[SlotSampling, list[list[int]], int], None]
) -> None:
    """Windows of two slots decide for the same tokens captured or not, and again; `prepare` is told of the sampling,
    the prompts, and the first token of both windows."""
    made = assemble("llama-gqa", batch=2)
    runner, prompts = made.runner, [random_tokens(30, seed=seed) for seed in range(2)]
    layers = runner.streamer.resident_layers()
    assert layers is not None
    windows = [Window((5, 6, 7, 7), (-1, 0, 0, 2)), Window((5, 6, 6))]
    found = []
    for captured in (None, CapturedPasses(runner.decoder, layers, runner.cache, runner.rows)):
        runner.captured, sampling = captured, SlotSampling.of(params, torch.device("cpu"))
        for slot, prompt in enumerate(prompts):
            runner.cache.truncate(slot, 0)
            run_step(runner, sampling, Proposer(), [], prompts=[PromptRequest(slot, prompt)])
        prepare(sampling, prompts, 5)
        found.append([runner.decide(windows, [0, 1], sampling).tokens() for _ in range(2)])
    assert found[0] == found[1] and found[0][0] == found[0][1]
    made.close()


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
        for sequence in range(3):
            runner.cache.truncate(sequence, 0)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, and nothing of it undefined."""
    return torch.equal(left, right) and bool(left.isfinite().all())
