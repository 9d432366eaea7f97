"""Captured passes: in windows filled up to few shapes, the same bits as where each kernel is launched by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from offload_runtime.core import Batch, TokenTree
from offload_runtime.params import SamplingParams
from offload_runtime.runners import CapturedPasses, ModelRunner
from offload_runtime.runners.graphs import CAPTURED_ROWS
from offload_runtime.sampling import SlotSampling
from tests.helpers.assembly import prefill, verify
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.kv_runners import assemble, reset, same
from tests.helpers.models import random_tokens
from tests.helpers.sampling import numbered

GPU = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
DEVICES = [pytest.param({}, id="cpu"), pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)]
LENGTHS = (300, 41, 3)  # of the prompts; a block ends 256 - 44 tokens behind the first


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(params=["llama-gqa", "mistral-window", pytest.param("llama-dynamic", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest, device: dict[str, Any]) -> Iterator[ModelRunner]:
    made = assemble(request.param, batch=3, **device)
    yield made.runner
    made.close()


def captured(runner: ModelRunner) -> CapturedPasses:
    return CapturedPasses(runner.decoder, runner.streamer, runner.cache, runner.rope)


def read_prompts(runner: ModelRunner) -> None:
    for sequence, length in enumerate(LENGTHS):
        prefill(runner, sequence, random_tokens(length, seed=sequence))


def random_window(generator: random.Random, most: int) -> TokenTree:
    tokens = tuple(generator.randrange(100) for _ in range(generator.randint(1, most)))
    if generator.random() < 0.5:
        return TokenTree(tokens)
    return TokenTree(tokens, tuple(generator.randrange(-1, node) for node in range(len(tokens))))


def random_passes(seed: int) -> list[dict[int, TokenTree]]:
    generator, passes = random.Random(seed), []
    for _ in range(30):
        sequences = generator.sample(range(3), generator.randint(1, 3))
        passes.append({slot: random_window(generator, generator.choice((1, 3, 12))) for slot in sequences})
    return passes


def kv_of(runner: ModelRunner) -> list[torch.Tensor]:
    """Keys and values of everything that is committed."""
    found = []
    for layer in range(runner.decoder.config.num_layers):
        for sequence in range(3):
            positions = torch.arange(runner.cache.length(sequence), device=runner.rope.device)
            found += runner.cache.store(layer).at(positions.new_tensor([sequence]), positions)
    return [side.clone() for side in found]


def play(runner: ModelRunner, passes: Sequence[dict[int, TokenTree]]) -> list[torch.Tensor]:
    """Logits of passes behind each of which a path is committed, and the keys and values that they leave."""
    reset(runner)
    read_prompts(runner)
    found = []
    for windows in passes:
        found.append(verify(runner, windows).clone())
        for sequence, window in windows.items():
            path, last = list[int](), 0
            for node, parent in enumerate(window.parents):
                if node == 0 or parent == last:
                    path, last = [*path, node], node
            runner.cache.commit_path(sequence, path)
    return [*found, *kv_of(runner)]


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_captured_passes_say_what_others_say(runner: ModelRunner, seed: int) -> None:
    passes = random_passes(seed)
    expected = play(runner, passes)
    runner.captured = captured(runner)
    for _ in range(2):  # the second time most of them are replayed
        assert all(map(same, expected, play(runner, passes)))
    if runner.rope.device.type == "cuda":
        assert runner.captured.graphs.num_graphs > 3


WAYS = [SamplingParams(), SamplingParams(temperature=1.0, seed=2**40), SamplingParams(temperature=0.8, top_k=30)]


@pytest.mark.few(1)
@pytest.mark.parametrize("params", WAYS, ids=["greedy", "sampled", "filtered"])
def test_captured_passes_choose_what_their_logits_say(device: dict[str, Any], params: SamplingParams) -> None:
    """Rows that fill up windows are between those of tokens, and each token has its position's noise."""
    made = assemble("llama-gqa", batch=3, **device)
    runner = made.runner
    sampling = SlotSampling.of(numbered(params, 3), runner.rope.device)
    read_prompts(runner)
    passes = [{2: TokenTree((7,))}, *random_passes(3), {1: TokenTree((3,) * (CAPTURED_ROWS + 1))}]

    def taken(windows: dict[int, TokenTree]) -> dict[int, tuple[list[int], torch.Tensor]]:
        batch = runner.forward(Batch(windows), sampling)
        assert batch.tokens is not None
        tokens, rows = batch.tokens(), zip(windows.items(), batch.firsts, strict=True)
        parts = {slot: slice(first, first + len(window)) for (slot, window), first in rows}
        return {slot: (tokens[part], batch.logits[part].clone()) for slot, part in parts.items()}

    expected = [taken(windows) for windows in passes]
    runner.captured = captured(runner)
    for _ in range(3):
        for windows, said in zip(passes, expected, strict=True):
            verify(runner, dict([*windows.items()][:1]))  # nobody asks for its tokens
            for slot, (tokens, logits) in taken(windows).items():
                assert tokens == said[slot][0] and same(logits, said[slot][1])
    made.close()
