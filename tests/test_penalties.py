"""Bias and penalties: as transformers' processors make them, and plain decoding's tokens whatever proposes them; and
log-probabilities of what is said: the model's own, of the row that decided each token, whoever proposed it."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from transformers.generation import logits_process as processors

from offload_runtime import TokenLogprobs
from offload_runtime.core import TokenTree
from offload_runtime.engine import GenerationResult, Runtime
from offload_runtime.errors import OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.runners.model_runner import paths_below_roots
from offload_runtime.sampling import MOST_FILTERED_ROWS, SlotSampling, sample, token_logprobs
from offload_runtime.verify.equality import ScriptedDrafter, transcribe
from tests.helpers.assembly import tokens_behind
from tests.helpers.engine import PROMPT, load, refuse_weights
from tests.helpers.models import random_tokens
from tests.helpers.sampling import noise, warped

COUNT = 12
# The second repeats itself wherever it can, so that n-grams are often right; the third has filters as well.
PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.4, "logit_bias": {7: -100, 11: 2.5}},
    {"presence_penalty": -1.5, "frequency_penalty": -1.0},
    {"frequency_penalty": 1.0, "repetition_penalty": 0.8, "top_p": 0.9},
]
TEMPERATURES: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}]
SAMPLINGS = [{**penalties, **temperature} for penalties in PENALTIES for temperature in TEMPERATURES]
some_samplings = pytest.mark.parametrize(
    "chosen", [pytest.param([0, 3], id="some"), pytest.param(range(len(SAMPLINGS)), id="all", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def expected(plain: Runtime) -> list[list[int]]:
    """Plain decoding's tokens for each of `SAMPLINGS`, which all differ."""
    tokens = [plain.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, **options).tokens for options in SAMPLINGS]
    assert len({tuple(one) for one in tokens}) == len(SAMPLINGS)
    return tokens


def of_transformers(model: LlamaForCausalLM, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Plain decoding with the processors of transformers, in the order of vLLM, and our noise."""
    tokens = list(prompt)
    for _ in range(COUNT):
        ids = torch.tensor([tokens])
        logits = model(ids).logits[:, -1].float()
        if params.biases:
            bias = {(token,): value for token, value in params.biases}
            logits = processors.SequenceBiasLogitsProcessor(bias)(ids, logits)
        if params.repetition_penalty != 1:
            logits = processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, logits)
        for token, times in Counter(tokens[len(prompt) :]).items():
            logits[0, token] -= params.frequency_penalty * times
            logits[0, token] -= params.presence_penalty
        if params.temperature:
            logits = warped(logits, params)
            logits += noise(params.seed, torch.tensor([len(tokens)]), torch.tensor([0]), logits.shape[1])
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def test_tokens_are_those_of_transformers_processors(plain: Runtime, target: Path, expected: list[list[int]]) -> None:
    model = LlamaForCausalLM.from_pretrained(target)
    for options, tokens in zip(SAMPLINGS, expected, strict=True):
        assert of_transformers(model, plain.encode(PROMPT), SamplingParams(**options)) == tokens


@some_samplings
def test_paths_count_their_own(plain: Runtime, target: Path, expected: list[list[int]], chosen: Sequence[int]) -> None:
    """A drafter that is mostly right, with wrong branches in any order: a row that counted another's tokens, or missed
    its own, would say something else."""
    prompt = plain.encode(PROMPT)
    with load(target, tree_nodes=60) as runtime:
        for index in chosen:
            params = GenerationParams(
                COUNT, ignore_eos=True, sampling=SamplingParams(**SAMPLINGS[index]), gamma=12, tree_nodes=40
            )
            script = ScriptedDrafter([*prompt, *expected[index]], 320, accuracy=0.95, seed=3)
            found = transcribe(runtime, prompt, params, script)
            assert found.tokens == expected[index] and found.passes < 8


def test_a_turn_counts_earlier_ones_as_prompt(plain: Runtime) -> None:
    """Those whose keys and values were kept, as if all of it was read anew."""
    sampling = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0)
    params, owner = GenerationParams(8, ignore_eos=True, sampling=sampling), object()
    turns = [plain.encode(PROMPT)]
    for _ in range(2):
        stream = plain.start(turns[-1], params, owner=owner)
        assert list(stream)
        turns.append([*turns[-1], *stream.result.tokens, 5, 6, 7])
    for turn, after in pairwise(turns):
        assert plain.generate(turn, params=params).tokens == after[len(turn) : -3]


def test_a_bias_bans_and_forces(plain: Runtime) -> None:
    usual = plain.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens
    banned = plain.generate(PROMPT, max_new_tokens=8, ignore_eos=True, logit_bias={usual[3]: -100})
    assert banned.tokens[:3] == usual[:3] and usual[3] not in banned.tokens
    assert plain.generate(PROMPT, max_new_tokens=4, ignore_eos=True, logit_bias={33: 100}).tokens == [33] * 4


def test_a_bias_of_a_token_that_is_none(target: Path, plain: Runtime) -> None:
    with pytest.raises(OptionError, match="logit_bias of token 320 is outside the vocabulary of 320"):
        plain.generate(PROMPT, logit_bias={320: 1.0})
    params = GenerationParams(sampling=SamplingParams(logit_bias={320: 1.0}))
    with pytest.raises(OptionError, match="outside the vocabulary"):
        Runtime.load(target, device="cpu", on_progress=refuse_weights, check=lambda room: room.check(params))


GPU_PARAMS = [
    SamplingParams(0.8, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3, seed=4),
    SamplingParams(frequency_penalty=-1.1, logit_bias={5: 3.3, 31_999: -100}),
    SamplingParams(0.7, top_p=0.9, repetition_penalty=0.7, logit_bias={0: 1.7}),
    SamplingParams(1.0, seed=2),
]


def played(device: str) -> tuple[torch.Tensor, list[int]]:
    """Logits as they are sampled from, and the tokens, of four slots in windows that are filtered in two parts."""
    generator = torch.Generator().manual_seed(8)
    sampling = SlotSampling.of(GPU_PARAMS, torch.device(device))
    prompts = torch.randint(500, (4, 200), generator=generator).tolist()
    windows = [TokenTree(tuple(random_tokens(12, seed=slot)), (-1, *range(5), 0, 6, 7, 8, 2, 10)) for slot in range(4)]
    logits = (3 * torch.randn(48, 32_000, generator=generator)).bfloat16().to(device)
    for slot, prompt in enumerate(prompts):
        sampling.adjustments.begin(slot, prompt)
        sampling.adjustments.see(slot, [*prompt, *random_tokens(40, seed=slot), windows[slot].tokens[0]])
    tokens = tokens_behind(logits, sampling, dict(enumerate(windows)), [241] * 4)
    owners = torch.arange(4, device=device).repeat_interleave(12)
    paths = torch.tensor(paths_below_roots(windows), device=device).view(48, -1)
    return sampling.adjustments.apply(logits, owners, paths).cpu(), tokens


@pytest.mark.gpu
def test_penalties_are_the_same_on_the_cpu_and_the_gpu() -> None:
    (expected, said), (found, tokens) = played("cpu"), played("cuda")
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32)) and tokens == said


@pytest.mark.gpu
def test_a_bias_is_part_of_a_cuda_graph() -> None:
    """As drafts sample; the next request's own is in the tensors that the graph reads."""
    logits, rows = torch.randn(3, 32_000, device="cuda"), torch.arange(3, device="cuda")
    slots, sampling = torch.zeros_like(rows), SlotSampling.of(GPU_PARAMS[1:2], torch.device("cuda"))
    sample(logits, sampling, rows, slots)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, sampling, rows, slots)
    for token in (7, 31_000):
        sampling.assign(0, SamplingParams(logit_bias={token: 100}))
        graph.replay()
        assert tokens.tolist() == [token] * 3


SCORED = 16
SCORED_SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 3, "top_k": 30, "repetition_penalty": 1.4, "logit_bias": {9: -100}},
    {"presence_penalty": -1.5, "frequency_penalty": -1.0},  # says things again, as n-grams do
]


@pytest.fixture(scope="module")
def scores(plain: Runtime, target: Path) -> list[list[TokenLogprobs]]:
    """For each of the `SCORED_SAMPLINGS`, by transformers' logits of prompt and answer."""
    model, prompt, found = LlamaForCausalLM.from_pretrained(target), plain.encode(PROMPT), []
    for options in SCORED_SAMPLINGS:
        tokens = plain.generate(PROMPT, max_new_tokens=SCORED, ignore_eos=True, **options).tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(dim=1)
        top = logprobs.topk(5, dim=1)
        found.append([
            TokenLogprobs(token, float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
            for token, row, ids, values in zip(tokens, logprobs, top.indices, top.values, strict=True)
        ])  # fmt: skip
    return found


def assert_close(found: Sequence[TokenLogprobs] | None, scores: Sequence[TokenLogprobs], count: int) -> None:
    """The same tokens and alternatives, of the same probabilities."""
    assert found is not None
    assert [one.token for one in found] == [one.token for one in scores]
    for one, other in zip(found, scores, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top[:count]]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top[:count]], abs=1e-4)


@pytest.mark.parametrize("proposals", ["none", "ngram", pytest.param("trees", marks=pytest.mark.slow)])
def test_they_are_the_models_own(target: Path, draft: Path, scores: list[list[TokenLogprobs]], proposals: str) -> None:
    chosen: Any = draft if proposals == "trees" else proposals
    nodes = 24 if proposals == "trees" else None
    gamma, per_pass = None if proposals == "none" else 5, list[float]()
    with load(target, draft=chosen, tree_nodes=nodes) as runtime:
        for options, rows, count in zip(SCORED_SAMPLINGS, scores, (5, 0, 3), strict=True):
            found = runtime.generate(
                PROMPT, max_new_tokens=SCORED, ignore_eos=True, logprobs=count, gamma=gamma, **options
            )
            assert_close(found.logprobs, rows, count)
            assert [one.token for one in found.logprobs or ()] == found.tokens
            per_pass.append(found.stats.tokens_per_pass)
    assert max(per_pass) > 1.2 or proposals == "none"


def test_of_a_batch_whoever_wants_them(target: Path, scores: list[list[TokenLogprobs]]) -> None:
    params = [
        GenerationParams(
            SCORED, ignore_eos=True, gamma=5, logprobs=count, sampling=SamplingParams(**SCORED_SAMPLINGS[index])
        )
        for index, count in ((0, 2), (1, None), (1, 5), (0, 0))
    ]
    with load(target, max_batch=4) as runtime:
        results: list[GenerationResult] = runtime.generate_batch([PROMPT] * 4, params=params)
    assert results[1].logprobs is None
    for result, index, count in ((results[0], 0, 2), (results[2], 1, 5), (results[3], 0, 0)):
        assert_close(result.logprobs, scores[index], count)


def test_of_a_stream_as_it_comes(plain: Runtime, scores: list[list[TokenLogprobs]]) -> None:
    """Those of an answer that a stop text ends, or somebody stops, are as many as its tokens."""
    stream = plain.stream(PROMPT, max_new_tokens=SCORED, ignore_eos=True, logprobs=3)
    seen = [len(stream.logprobs) for _ in stream]
    assert seen == sorted(seen) and seen[-1] == SCORED and len(set(seen)) > 5
    assert_close(stream.result.logprobs, scores[0], 3)
    stop = stream.result.text[3:5]
    stopped = plain.generate(PROMPT, max_new_tokens=SCORED, ignore_eos=True, logprobs=3, stop=stop)
    assert 0 < len(stopped.tokens) < SCORED
    assert_close(stopped.logprobs, scores[0][: len(stopped.tokens)], 3)
    stream = plain.stream(PROMPT, max_new_tokens=SCORED, ignore_eos=True, logprobs=0)
    next(stream)
    stream.close()
    assert_close(stream.result.logprobs, scores[0][: len(stream.result.tokens)], 0)
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
