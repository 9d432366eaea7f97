"""Our decoder against transformers, every family in fp32; then the bits that must not depend on company, on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from offload_runtime.core import TokenTree
from offload_runtime.runners import ModelRunner
from tests.helpers.assembly import make_runner, prefill, verify
from tests.helpers.models import (
    BUILDERS,
    LENGTH_DEPENDENT_BUILDERS,
    SHORT_LENGTH,
    all_logits,
    cached_logits,
    random_model,
    random_tokens,
)

CUDA = torch.device("cuda")
# The oracle computes on the CPU: sums in another order, and the GPU's exponential is good to 2 units in the last place.
GPU_ERROR = 5e-5
# Two roots, a bushy and a deep branch, listed so that no path is a contiguous run.


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
