"""Log-probabilities of what is said: the model's own, of the row that decided each token, whoever proposed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from offload_runtime import TokenLogprobs
from offload_runtime.engine import GenerationResult, Runtime
from offload_runtime.sampling import MOST_FILTERED_ROWS, token_logprobs
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401

COUNT = 16
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 3, "top_k": 30, "repetition_penalty": 1.4, "logit_bias": {9: -100}},
    {"presence_penalty": -1.5, "frequency_penalty": -1.0},  # says things again, as n-grams do
]


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Runtime]:
    with load(target, draft="none") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(plain: Runtime, target: Path) -> list[list[TokenLogprobs]]:
    """For each of the `WAYS`, by transformers' logits of prompt and answer."""
    model, prompt, found = LlamaForCausalLM.from_pretrained(target), plain.encode(PROMPT), []
    for way in WAYS:
        tokens = plain.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, **way).tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(dim=1)
        top = logprobs.topk(5, dim=1)
        found.append([
            TokenLogprobs(token, float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
            for token, row, ids, values in zip(tokens, logprobs, top.indices, top.values, strict=True)
        ])  # fmt: skip
    return found


def assert_close(found: Sequence[TokenLogprobs] | None, expected: Sequence[TokenLogprobs], count: int) -> None:
    """The same tokens and alternatives, of the same probabilities."""
    assert found is not None
    assert [one.token for one in found] == [one.token for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top[:count]]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top[:count]], abs=1e-4)


@pytest.mark.parametrize("proposals", ["none", "ngram", pytest.param("trees", marks=pytest.mark.slow)])
def test_they_are_those_of_the_models_own_logits(
    target: Path, draft: Path, expected: list[list[TokenLogprobs]], proposals: str
) -> None:
    chosen: Any = draft if proposals == "trees" else proposals
    nodes = 24 if proposals == "trees" else None
    gamma, per_pass = None if proposals == "none" else 5, list[float]()
    with load(target, draft=chosen, tree_nodes=nodes) as runtime:
        for way, rows, count in zip(WAYS, expected, (5, 0, 3), strict=True):
            result = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, logprobs=count, gamma=gamma, **way)
            assert_close(result.logprobs, rows, count)
            assert [one.token for one in result.logprobs or ()] == result.tokens
            per_pass.append(result.stats.tokens_per_pass)
    assert max(per_pass) > 1.2 or proposals == "none"


def test_of_a_batch_whoever_wants_them(target: Path, expected: list[list[TokenLogprobs]]) -> None:
    from offload_runtime import GenerationParams, SamplingParams

    params = [
        GenerationParams(COUNT, ignore_eos=True, gamma=5, logprobs=count, sampling=SamplingParams(**WAYS[way]))
        for way, count in ((0, 2), (1, None), (1, 5), (0, 0))
    ]
    with load(target, max_batch=4) as runtime:
        results: list[GenerationResult] = runtime.generate_batch([PROMPT] * 4, params=params)
    assert results[1].logprobs is None
    for result, way, count in ((results[0], 0, 2), (results[2], 1, 5), (results[3], 0, 0)):
        assert_close(result.logprobs, expected[way], count)


def test_of_a_stream_as_it_comes(plain: Runtime, expected: list[list[TokenLogprobs]]) -> None:
    """Those of an answer that a stop text ends, or somebody stops, are as many as its tokens."""
    stream = plain.stream(PROMPT, max_new_tokens=COUNT, ignore_eos=True, logprobs=3)
    seen = [len(stream.logprobs) for _ in stream]
    assert seen == sorted(seen) and seen[-1] == COUNT and len(set(seen)) > 5
    assert_close(stream.result.logprobs, expected[0], 3)
    stop = stream.result.text[3:5]
    stopped = plain.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, logprobs=3, stop=stop)
    assert 0 < len(stopped.tokens) < COUNT
    assert_close(stopped.logprobs, expected[0][: len(stopped.tokens)], 3)
    stream = plain.stream(PROMPT, max_new_tokens=COUNT, ignore_eos=True, logprobs=0)
    next(stream)
    stream.close()
    assert_close(stream.result.logprobs, expected[0][: len(stream.result.tokens)], 0)
    assert plain.generate(PROMPT, max_new_tokens=2).logprobs is None


@given(st.integers(1, 2 * MOST_FILTERED_ROWS + 1), st.integers(1, 9), st.integers(0, 20), st.integers(0, 999))
def test_the_likeliest_first_and_of_equals_the_lowest(rows: int, vocab_size: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (rows, vocab_size), generator=generator) * torch.tensor(0.5)
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -0.0
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[:, -1] = 0.25
    tokens = torch.randint(vocab_size, (rows,), generator=generator).tolist()
    found = token_logprobs(logits.to(torch.bfloat16), tokens, count)
    logprobs = logits.log_softmax(dim=1)
    for one, row, values, token in zip(found, logits.tolist(), logprobs, tokens, strict=True):
        order = sorted(range(vocab_size), key=lambda v: (-row[v], v))[:count]
        assert [v for v, _ in one.top] == order and one.token == token
        assert [one.logprob, *(value for _, value in one.top)] == values[[token, *order]].tolist()
