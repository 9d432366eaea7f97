"""Our decoder against transformers, every family in fp32; then the bits that must not depend on company, on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from offload_runtime.core import TokenTree
from offload_runtime.runners import ModelRunner
from offload_runtime.weights import open_checkpoint
from tests.helpers.assembly import make_runner, prefill, verify
from tests.helpers.models import (
    BUILDERS,
    LENGTH_DEPENDENT_BUILDERS,
    SHORT_LENGTH,
    all_logits,
    cached_logits,
    random_model,
    random_tokens,
    tree_logits,
)

BF16 = torch.bfloat16
CUDA = torch.device("cuda")
# The oracle computes on the CPU: sums in another order, and the GPU's exponential is good to 2 units in the last place.
GPU_ERROR = 5e-5
# Two roots, a bushy and a deep branch, listed so that no path is a contiguous run.
PARENTS = (-1, -1, 0, 1, 0, 2, 5, 3, 6)


def _assert_logits(actual: torch.Tensor, expected: torch.Tensor, *, most: float = 1e-5) -> None:
    """Raise unless the largest difference, relative to the largest logit, is below `most`."""
    assert actual.shape == expected.shape
    error = float((actual.cpu() - expected).abs().max() / expected.abs().max())
    assert error < most, f"relative error {error:.1e}"


def _window_logits(runner: ModelRunner, tokens: Sequence[int], sequence: int = 0) -> torch.Tensor:
    return verify(runner, {sequence: TokenTree(tuple(tokens))})


def _step_logits(runner: ModelRunner, tokens: Sequence[int], sequence: int = 0) -> torch.Tensor:
    """Logits of tokens decoded one by one, each committed: [T, V]."""
    logits = []
    for token in tokens:
        logits.append(_window_logits(runner, [token], sequence)[0])
        runner.cache.commit(sequence, 1)
    return torch.stack(logits)


@pytest.mark.parametrize("name", BUILDERS)
def test_matches_transformers(name: str, tmp_path: Path) -> None:
    """From files: one window over everything, then prefill, single steps, windows of several tokens, rollback."""
    model, tokens = random_model(name), random_tokens(50)
    expected = all_logits(model, tokens)
    model.save_pretrained(tmp_path)
    made = make_runner(open_checkpoint(tmp_path), buffers=2)
    runner = made.runner
    _assert_logits(_window_logits(runner, tokens), expected)
    _assert_logits(prefill(runner, 0, tokens[:37]), expected[36:37])
    _assert_logits(_step_logits(runner, tokens[37:40]), expected[37:40])
    _assert_logits(_window_logits(runner, tokens[40:]), expected[40:])
    # Rejected: other tokens were tried, then the last committed ones are taken back and come again.
    _window_logits(runner, random_tokens(9, seed=5))
    runner.cache.truncate(0, 33)
    _assert_logits(_window_logits(runner, tokens[33:45]), expected[33:45])
    runner.cache.commit(0, 4)
    _assert_logits(prefill(runner, 0, tokens[37:50]), expected[49:50])
    made.close()


@pytest.mark.parametrize("prompt_length", [SHORT_LENGTH - 4, SHORT_LENGTH, SHORT_LENGTH + 11])
@pytest.mark.parametrize("name", LENGTH_DEPENDENT_BUILDERS)
def test_length_dependent_rope_matches_transformers_across_the_boundary(name: str, prompt_length: int) -> None:
    model, tokens = random_model(name), random_tokens(prompt_length + 9)
    expected = cached_logits(model, [tokens[:prompt_length], *([token] for token in tokens[prompt_length:])])
    made = make_runner(model)
    _assert_logits(prefill(made.runner, 0, tokens[:prompt_length]), expected[:1])
    _assert_logits(_step_logits(made.runner, tokens[prompt_length:]), expected[1:])
    made.runner.cache.truncate(0, prompt_length)  # the same steps as one window
    _assert_logits(_window_logits(made.runner, tokens[prompt_length:]), expected[1:])
    made.close()


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen3", "smollm3"])
def test_tree_matches_transformers_with_a_dense_mask(name: str) -> None:
    model = random_model(name)
    prompts = [random_tokens(23), random_tokens(6, seed=1)]
    nodes = random_tokens(len(PARENTS), seed=2)
    made = make_runner(model)
    for sequence, prompt in enumerate(prompts):
        prefill(made.runner, sequence, prompt)
    window = getattr(model.config, "sliding_window", None) if name == "mistral-window" else None
    # Beside the tree a shorter chain: rows of one pass may differ in kind.
    logits = verify(made.runner, {0: TokenTree(tuple(nodes), PARENTS), 1: TokenTree(tuple(nodes[:4]))})
    _assert_logits(logits[: len(nodes)], tree_logits(model, prompts[0], nodes, PARENTS, window=window))
    _assert_logits(logits[len(nodes) :], all_logits(model, prompts[1] + nodes[:4])[-4:])
    made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDERS)
def test_matches_transformers_on_the_gpu(name: str) -> None:
    model, tokens = random_model(name), random_tokens(50)
    expected = all_logits(model, tokens)
    made = make_runner(model, buffers=2, device=CUDA)
    _assert_logits(prefill(made.runner, 0, tokens[:37]), expected[36:37], most=GPU_ERROR)
    _assert_logits(_window_logits(made.runner, tokens[37:]), expected[37:], most=GPU_ERROR)
    tree = verify(made.runner, {0: TokenTree((*tokens[37:46], 5), (-1, 0, 1, 2, 3, 4, 5, 6, 7, 7))})
    _assert_logits(tree[:9], expected[37:46], most=GPU_ERROR)
    made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-gqa", "llama-biases", "mistral-window", "qwen3", "smollm3"])
def test_window_tree_and_residency_do_not_change_a_bit_on_the_gpu(name: str) -> None:
    model, tokens = random_model(name), random_tokens(300)

    def make(buffers: int) -> ModelRunner:
        runner = make_runner(
            model, buffers=buffers, chunk_tokens=128, capacity_tokens=512, device=CUDA, dtype=BF16
        ).runner
        prefill(runner, 0, tokens[:250])
        return runner

    stepped = _step_logits(make(0), tokens[250:])
    runner = make(2)
    assert torch.equal(_window_logits(runner, tokens[250:]), stepped)
    # The same tokens as one path of a tree, between wrong guesses: wrong, right, wrong, right, ...
    parents = [-1, -1]
    for depth in range(1, 30):
        parents += [2 * depth - 1, 2 * depth - 1]
    nodes = [tokens[250 + index // 2] if index % 2 else 5 for index in range(60)]
    tree = verify(runner, {0: TokenTree(tuple(nodes), tuple(parents))})
    assert torch.equal(tree[1::2], stepped[:30])
