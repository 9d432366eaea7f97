"""TriForce on a small model: the tokens of plain decoding, whatever the levels say."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.engine.build_proposer import make_proposer
from offload_runtime.errors import OptionError
from offload_runtime.speculation import WithNgrams, drafting
from offload_runtime.verify.equality import loaded_proposers
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.trees import Foreknown, Watched
from tests.test_chosen_windows import WorkClock, window_widths

TARGET = "long_target"
CONTEXT, COUNT, BRIEFLY = 700, 28, 14
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.6, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4},
]
PROMPT = [3 + (7 * i * i + i // 5) % 290 for i in range(500)]
SMALL = {"budget_tokens": 128, "chunk_size": 8, "recent_tokens": 64, "sink_tokens": 4, "gamma_draft": 3}


def generate(runtime: Runtime, **options: Any) -> list[list[int]]:
    """Without a gamma of their own, in windows that do not depend on how long anything takes."""
    gamma = None if runtime.parts.proposer.name is None else 12
    asked = {"max_new_tokens": COUNT, "ignore_eos": True, "gamma": gamma, **options}
    results = [runtime.generate(PROMPT, **asked, **sampling) for sampling in SAMPLINGS]
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    with load(target, draft="none", context=CONTEXT) as runtime:
        return generate(runtime)


@pytest.fixture(scope="module", params=["gpu", "host"])
def runtime(request: pytest.FixtureRequest, target: Path, draft: Path) -> Iterator[Runtime]:
    options = SpeculationOptions("triforce", "streaming", **SMALL)
    with load(target, draft=draft, context=CONTEXT, kv=request.param, speculation=options) as runtime:
        yield runtime


@pytest.mark.few(1)
@pytest.mark.parametrize("gamma", [None, 1, 5, 40])
def test_the_tokens_are_those_of_plain_decoding(runtime: Runtime, expected: list[list[int]], gamma: int | None) -> None:
    said = generate(runtime, gamma=gamma, max_new_tokens=BRIEFLY)
    assert said == [tokens[:BRIEFLY] for tokens in expected]


def wait_for_link(runtime: Runtime, *, free: int) -> None:
    """As if the link took longer than windows of so many proposals: n-grams may fill them."""
    own = runtime.parts
    proposer = make_proposer(own.plan, own.target, own.draft, own.budgets, recorder=own.recorder, free_rows=free + 1)
    runtime.parts = replace(own, proposer=proposer, windows=replace(own.windows, free=free))


@pytest.mark.slow
def test_what_n_grams_add_changes_no_token(
    target: Path, draft: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """Where passes wait for the link they fill windows, which are accepted along other branches than a chain; never
    beyond the end of a context or an answer."""
    sources: set[str] = set()
    options: dict[str, Any] = {"context": len(PROMPT) + COUNT, "kv": "host", "trace": tmp_path / "trace.json"}
    options["speculation"] = SpeculationOptions("triforce", "streaming", **SMALL)
    with load(target, draft=draft, **options) as runtime:
        wait_for_link(runtime, free=63)
        WorkClock(runtime, step_s=0.06)  # so dear that chains leave room
        own, before = runtime.parts, 0
        for sampling, said in zip(SAMPLINGS, expected, strict=True):
            known = Foreknown([[*PROMPT, *said]])
            runtime.parts = replace(own, proposer=WithNgrams(drafting(own.proposer), known, alone=False))
            result = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, **sampling)
            widths = window_widths(runtime)[before:]
            before += len(widths)
            assert result.tokens == said and 8 < max(widths) < COUNT
            assert result.stats.passes < 0.5 * COUNT
            sources |= set(result.stats.accepted_by_source)
    assert {"ngram", "retrieval"} <= sources


@pytest.mark.slow
def test_n_grams_of_a_text_that_repeats_itself_get_no_rounds_of_their_own(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"context": CONTEXT, "kv": "host", "trace": tmp_path / "trace.json"}
    options["speculation"] = SpeculationOptions("triforce", "streaming", refresh_steps=4, **SMALL)
    with load(target, draft=draft, **options) as runtime:
        wait_for_link(runtime, free=63)
        WorkClock(runtime, step_s=0.002)
        stats = runtime.generate(PROMPT[:50] * 10, max_new_tokens=40, ignore_eos=True).stats
        widths = window_widths(runtime)
        assert runtime.parts.proposer.modes({0: [1, 2, 3, 1, 2]}) == ("chain",)
    assert {name.split()[0] for name in stats.windows} <= {"chain", "plain"}
    # Beside what the retrieval verifier proposed.
    assert sum(width - 1 for width in widths) > stats.acceptance[-1].proposed > 0


def test_closing_lets_go_of_every_level(target: Path, draft: Path) -> None:
    options = SpeculationOptions("triforce", "streaming", **SMALL)
    with load(target, draft=draft, context=CONTEXT, kv="host", speculation=options) as runtime:
        runtime.generate(PROMPT, max_new_tokens=4)
        kept = [weakref.ref(model.runner.decoder) for model in (runtime.parts.target, runtime.parts.draft) if model]
    assert len(kept) == 2 and not any(ref() for ref in kept)


@pytest.mark.slow
@pytest.mark.parametrize("draft_name", ["none", "model"])
def test_with_a_draft_and_without(target: Path, draft: Path, expected: list[list[int]], draft_name: str) -> None:
    options = SpeculationOptions("triforce", "full", refresh_steps=3, **SMALL)
    chosen = draft if draft_name == "model" else "none"
    with load(target, draft=chosen, context=CONTEXT, kv="host", speculation=options) as runtime:
        said = generate(runtime, gamma=12, max_new_tokens=BRIEFLY)
        assert said == [tokens[:BRIEFLY] for tokens in expected]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_retrieval_verifier_that_sees_everything_is_right_in_every_generation(target: Path, device: str) -> None:
    """Also where steps are replays of what an earlier generation captured, and chunks are chosen in some steps only."""
    options = SpeculationOptions("triforce", budget_tokens=512, refresh_steps=3)
    with Runtime.load(
        target, draft="none", device=device, dtype="fp32", context=CONTEXT, kv="host", speculation=options
    ) as runtime:
        for seed in (1, 1, 2, 1):
            result = runtime.generate(
                PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=19, temperature=0.6, seed=seed
            )
            assert result.stats.passes <= 3  # a near-tie may cost one of the two that are needed


@pytest.mark.slow
def test_a_budget_that_holds_everything_makes_the_retrieval_verifier_right(
    target: Path, expected: list[list[int]]
) -> None:
    options = SpeculationOptions("triforce", budget_tokens=512)
    with load(target, draft="none", context=CONTEXT, kv="host", speculation=options) as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=19)
    assert result.tokens == expected[0]
    assert result.stats.passes == 2  # 39 tokens after the first, 20 a pass


@pytest.mark.parametrize("with_draft", [False, True])
def test_beside_each_of_its_tokens_the_retrieval_verifier_proposes_the_next_best(
    target: Path, draft: Path, with_draft: bool, tmp_path: Path
) -> None:
    """A verifier that sees everything says what the target says: of that the second likeliest."""
    options = SpeculationOptions("triforce", "streaming" if with_draft else "auto", **{**SMALL, "budget_tokens": 512})
    levels = {"draft": draft if with_draft else "none", "kv": "host", "speculation": options, "trace": tmp_path / "t"}
    asked = {"max_new_tokens": COUNT, "ignore_eos": True}
    with load(target, draft="none", context=CONTEXT) as plain:
        likeliest = plain.generate(PROMPT, logprobs=2, **asked).logprobs
        assert likeliest is not None
    with load(target, context=CONTEXT, **levels) as runtime:
        wait_for_link(runtime, free=32)
        WorkClock(runtime, step_s=0.002)
        watched = Watched(drafting(runtime.parts.proposer))
        runtime.parts = replace(runtime.parts, proposer=watched)
        result = runtime.generate(PROMPT, **asked)
    seconds = [one.top[1][0] for one in likeliest]
    branches = 0
    for request, proposal in (made for played in watched.rounds for made in played):
        chain = proposal.parents.index(-1, 1) if -1 in proposal.parents[1:] else len(proposal)
        assert proposal.parents[:chain] == tuple(range(-1, chain - 1)) and len(proposal) <= 32
        for token, parent in zip(proposal.tokens[chain:], proposal.parents[chain:], strict=True):
            place = len(request.tokens) - len(PROMPT) + parent + 1
            assert token == seconds[place] != result.tokens[place]
            branches += 1
    assert branches > 4


@pytest.mark.slow
def test_prompts_in_a_row_on_one_runtime(target: Path, draft: Path) -> None:
    """Long, other, short and long again: nothing retrieved for one is taken for another's."""
    prompts = [PROMPT, PROMPT[::-1][:300], PROMPT[:20], PROMPT[100:] + PROMPT[:100]]
    options = SpeculationOptions("triforce", "streaming", **SMALL)
    with (
        load(target, draft="none", context=CONTEXT) as plain,
        load(target, draft=draft, context=CONTEXT, kv="host", speculation=options) as runtime,
    ):
        for prompt in prompts:
            asked = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.6, "seed": 5}
            assert runtime.generate(prompt, **asked).tokens == plain.generate(prompt, **asked).tokens


def test_what_triforce_cannot_do_is_refused_before_loading(target: Path) -> None:
    with pytest.raises(OptionError, match="4096 tokens is more than the context of 700"):
        load(target, draft="none", context=CONTEXT, speculation=SpeculationOptions("triforce")).__enter__()


def test_verify_knows_the_hierarchy(target: Path, draft: Path) -> None:
    options = SpeculationOptions("triforce", "streaming", **SMALL)
    with load(target, draft=draft, context=CONTEXT, kv="host", speculation=options) as runtime:
        assert set(loaded_proposers(runtime)) == {"ngram", "triforce"}
