"""What each level of speculation accepts: counted by the runtime, and by dense attention over what each level sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from offload_runtime.config import ModelConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.kv import HostKVCache
from offload_runtime.kv.retrieval import RetrievalPolicy
from offload_runtime.memory import DeviceBudget
from offload_runtime.params import SamplingParams
from offload_runtime.plan.cost import USUAL_ACCEPTANCE
from offload_runtime.runners import likely_parents
from offload_runtime.speculation import Acceptance, NgramLookup
from tests.helpers.dense_levels import DenseDraft, DenseLlama, DenseVerifier, decode, replay
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.test_cli_fakes import make_stats

TARGET = "two_layer_target"
CAPACITY, COUNT, GAMMA, GAMMA_DRAFT = 1024, 36, 7, 12
BUDGET, CHUNK, SINKS = 192, 8, 16
# The tree for a draft that sees everything.
PARENTS = likely_parents(GAMMA_DRAFT, USUAL_ACCEPTANCE["full"])
# On the way the newest blocks move on: from 768 tokens on there is another one to choose chunks from.
PROMPT = [3 + (7 * i * i + i // 5) % 290 for i in range(740)]
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.8, seed=3)]
Shared = dict[SamplingParams, tuple[list[int], DenseLlama]]
Levels = tuple[Acceptance, Acceptance]  # of the draft, of the retrieval verifier
Book = Callable[[int, SamplingParams, ModelConfig], Levels]


@pytest.fixture(scope="module")
def plain(target: Path) -> Shared:
    """Plain decoding by the book: prompt and answer, and the model with all keys."""
    made = {}
    for params in SAMPLINGS:
        model = dense(target)
        made[params] = decode(model, PROMPT, COUNT, params), model
    return made


def dense(directory: Path) -> DenseLlama:
    return DenseLlama(LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32), CAPACITY)


def generate(runtime: Runtime, params: SamplingParams, **options: Any) -> Any:
    """Full blocks are on the host before every pass: how long they take decides how much counts as recent."""
    cache = runtime.parts.target.runner.cache

    def wait_for_writes() -> bool:
        if isinstance(cache, HostKVCache):
            cache.writes.drain()
        return False

    (result,) = runtime.generate_batch(
        [PROMPT], max_new_tokens=COUNT, temperature=params.temperature, seed=params.seed, gamma=GAMMA, ignore_eos=True,
        should_stop=wait_for_writes, **options,
    )  # fmt: skip
    return result


def make_policy(config: ModelConfig) -> RetrievalPolicy:
    return RetrievalPolicy(
        config, torch.float32, budget_tokens=BUDGET, chunk_size=CHUNK, capacity_tokens=CAPACITY, batch=1,
        budget=DeviceBudget(torch.device("cpu"), None),
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_the_book(target: Path, draft: Path, plain: Shared) -> Book:
    """What both levels accept, by refreshing and sampling; wherever keys and values lie."""

    found: dict[tuple[int, SamplingParams], Levels] = {}

    def find(refresh_steps: int, params: SamplingParams, config: ModelConfig) -> Levels:
        if (known := found.get((refresh_steps, params))) is not None:
            return known
        truth, full = plain[params]
        guesser = DenseDraft(dense(draft), params)
        verifier = DenseVerifier(
            full, dense(target), make_policy(config), chunk_size=CHUNK, refresh_steps=refresh_steps,
            params=params,
        )  # fmt: skip
        outer = replay(
            truth, len(PROMPT), lambda tokens, count: verifier.propose(tokens, count, guesser, PARENTS),
            gamma=GAMMA, proposed_by="retrieval",
        )  # fmt: skip
        inner = Acceptance("draft", "retrieval", verifier.steps, verifier.steps * GAMMA_DRAFT, verifier.accepted)
        found[refresh_steps, params] = inner, outer
        return inner, outer

    return find


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refresh_steps", "kv"), [(1, "gpu"), (1, "host"), (4, "host")]
)  # fmt: skip
def test_triforce(target: Path, draft: Path, plain: Shared, by_the_book: Book, refresh_steps: int, kv: str) -> None:
    options = SpeculationOptions(
        "triforce", "full", SINKS, chunk_size=CHUNK, budget_tokens=BUDGET, gamma_draft=GAMMA_DRAFT,
        refresh_steps=refresh_steps,
    )  # fmt: skip
    with load(target, draft=draft, context=CAPACITY, kv=kv, speculation=options) as runtime:
        for params in SAMPLINGS:
            expected = by_the_book(refresh_steps, params, runtime.config)
            result = generate(runtime, params)
            assert result.tokens == plain[params][0][len(PROMPT) :]
            assert result.stats.acceptance == expected
            assert all(0 < level.accepted < level.proposed for level in expected)


@pytest.mark.slow
def test_a_chain(target: Path, draft: Path, plain: Shared) -> None:
    with load(target, draft=draft, context=CAPACITY) as runtime:
        for params in SAMPLINGS:
            truth, _ = plain[params]
            guesser = DenseDraft(dense(draft), params)
            expected = replay(truth, len(PROMPT), guesser.guess, gamma=GAMMA, proposed_by="draft")
            result = generate(runtime, params)
            assert (result.tokens, result.stats.acceptance) == (truth[len(PROMPT) :], (expected,))
            assert 0 < expected.accepted < expected.proposed
            assert generate(runtime, params, speculate=False).stats.acceptance == ()


def test_n_grams_have_no_idea_in_some_rounds(target: Path, plain: Shared) -> None:
    truth, _ = plain[SAMPLINGS[0]]
    lookup = NgramLookup()
    expected = replay(
        truth, len(PROMPT), lambda tokens, count: list(lookup.chain(tokens, count).tokens), gamma=GAMMA,
        proposed_by="ngram",
    )  # fmt: skip
    with load(target, context=CAPACITY) as runtime:
        stats = generate(runtime, SAMPLINGS[0]).stats
    assert stats.acceptance == (expected,)
    assert stats.passes > expected.verifications > 0


@pytest.fixture(scope="module")
def runtime(target: Path, draft: Path) -> Iterator[Runtime]:
    options = SpeculationOptions(
        "triforce", chunk_size=CHUNK, budget_tokens=BUDGET, gamma_draft=GAMMA_DRAFT, refresh_steps=1
    )  # fmt: skip
    with load(target, draft=draft, context=CAPACITY, kv="gpu", speculation=options, max_batch=2) as runtime:
        yield runtime


@pytest.mark.slow
def test_every_generation_and_every_answer_of_a_batch_has_its_own_figures(runtime: Runtime) -> None:
    other = PROMPT[100:]
    alone = [runtime.generate(prompt, max_new_tokens=24, gamma=1, ignore_eos=True).stats for prompt in (PROMPT, other)]
    # With a proposal a round none ends because others have enough.
    together = runtime.generate_batch([PROMPT, other], max_new_tokens=24, gamma=1, ignore_eos=True)
    assert [result.stats.acceptance for result in together] == [stats.acceptance for stats in alone]
    assert alone[0].acceptance != alone[1].acceptance and len(alone[0].acceptance) == 2
    assert runtime.generate(PROMPT, max_new_tokens=1, gamma=GAMMA).stats.acceptance == (
        Acceptance("draft", "retrieval", 0, 0, 0), Acceptance("retrieval", "target", 0, 0, 0)
    )  # fmt: skip


def test_a_stream_tells_no_figures_of_another(runtime: Runtime) -> None:
    """One that ends before it began, and one that another generation has overtaken."""
    idle = runtime.stream(PROMPT, max_new_tokens=8)
    idle.close()
    assert idle.result.stats.acceptance == ()
    overtaken = runtime.stream(PROMPT, max_new_tokens=24, gamma=GAMMA, ignore_eos=True)
    for _ in range(3):
        next(overtaken)
    runtime.generate(PROMPT[::-1], max_new_tokens=8, ignore_eos=True)
    overtaken.close()
    (level,) = overtaken.result.stats.acceptance
    assert level.verified_by == "target"


def test_rates() -> None:
    level = Acceptance("draft", "retrieval", 4, 12, 6)
    assert make_stats(acceptance=(level,)).to_dict()["acceptance"] == [
        {
            "proposed_by": "draft", "verified_by": "retrieval", "verifications": 4, "proposed": 12, "accepted": 6,
            "rate": 0.5, "accepted_per_verification": 1.5,
        }
    ]  # fmt: skip
    nothing = Acceptance("draft", "retrieval", 0, 0, 0)
    assert (nothing.rate, nothing.accepted_per_verification) == (0.0, 0.0)
