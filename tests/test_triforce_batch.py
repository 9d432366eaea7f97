"""Levels that serve several sequences in one step: plain decoding's tokens, and what each sequence gets alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.params import SamplingParams
from offload_runtime.runners import DeviceWindow
from offload_runtime.speculation import DraftRequest, Proposal
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.levels_together import Task, play, stored, verifier_of
from tests.helpers.sampling import join_all, numbered
from tests.helpers.trees import Watched

CONTEXT, GAMMA_DRAFT = 900, 2
TEXT = [3 + (7 * i * i + i // 5) % 290 for i in range(1000)]
# Far context or none, at the end of a block and off it, and hardly a text at all.
PROMPTS = [TEXT[:760], TEXT[100:850], TEXT[40:552], [5], TEXT[300:330], TEXT[17:700]]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.6, "seed": 3},
]
SMALL: dict[str, Any] = {
    "budget_tokens": 96, "chunk_size": 8, "recent_tokens": 64, "sink_tokens": 4, "gamma_draft": GAMMA_DRAFT,
    "refresh_steps": 1,  # at every step, as sequences that come and go shift the others
}  # fmt: skip
COMBINATIONS = [
    ("full", "mha", "gpu"), ("full", "gqa", "host"), ("streaming", "gqa", "host"), ("streaming", "mha", "gpu"),
    ("retrieval", "gqa", "gpu"), ("retrieval", "mha", "host"),
]  # fmt: skip
CACHES = ("full", "streaming", "retrieval")


@pytest.fixture(scope="module")
def models(
    two_layer_target: Path, mha_target: Path, noisy_copy_of: Callable[[Path], Path]
) -> dict[str, tuple[Path, Path]]:
    """Targets with and without shared KV heads, and a draft of each."""
    return {name: (path, noisy_copy_of(path)) for name, path in (("gqa", two_layer_target), ("mha", mha_target))}


def batches(
    runtime: Runtime, sampling: dict[str, Any], sizes: tuple[int, ...], **options: Any
) -> list[list[list[int]]]:
    asked = {"max_new_tokens": 10, "ignore_eos": True, **sampling, **options}
    return [[result.tokens for result in runtime.generate_batch(PROMPTS[:size], **asked)] for size in sizes]


@pytest.fixture(scope="module")
def expected(models: dict[str, tuple[Path, Path]]) -> dict[str, list[list[list[int]]]]:
    """Plain decoding of all prompts, by target and way of sampling."""
    made = {}
    for name, (target, _) in models.items():
        with load(target, draft="none", context=CONTEXT, max_batch=6) as runtime:
            made[name] = [batches(runtime, sampling, (6,))[0] for sampling in SAMPLINGS]
    return made


def check(runtime: Runtime, truth: list[list[list[int]]]) -> None:
    for number, (sampling, tokens) in enumerate(zip(SAMPLINGS, truth, strict=True)):
        sizes = (1, 3, 6) if number == 1 else (6,)
        for size, said in zip(sizes, batches(runtime, sampling, sizes, gamma=5), strict=True):
            assert said == tokens[:size]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "heads", "kv"), COMBINATIONS)
def test_triforce_says_what_plain_decoding_says(
    models: dict[str, tuple[Path, Path]], expected: dict[str, list[list[list[int]]]], cache: str, heads: str,
    kv: str,
) -> None:  # fmt: skip
    options = SpeculationOptions("triforce", cache, **SMALL)
    target, draft = models[heads]
    with load(target, draft=draft, context=CONTEXT, kv=kv, speculation=options, max_batch=6) as runtime:
        check(runtime, expected[heads])


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_a_chain_says_what_plain_decoding_says(
    models: dict[str, tuple[Path, Path]], expected: dict[str, list[list[list[int]]]], cache: str
) -> None:
    target, draft = models["gqa"]
    options = SpeculationOptions("chain", cache, budget_tokens=96, chunk_size=8, recent_tokens=64, sink_tokens=4)
    with load(target, draft=draft, context=CONTEXT, speculation=options, max_batch=6) as runtime:
        check(runtime, expected["gqa"])


@pytest.mark.slow
def test_a_retrieval_verifier_without_a_draft(
    models: dict[str, tuple[Path, Path]], expected: dict[str, list[list[list[int]]]]
) -> None:
    options = SpeculationOptions("triforce", budget_tokens=96, chunk_size=8, refresh_steps=3)
    with load(models["gqa"][0], draft="none", context=CONTEXT, kv="host", speculation=options, max_batch=6) as runtime:
        check(runtime, expected["gqa"])


# Other counts and gammas for each: sequences end one after the other and seldom have enough at the same time.
TASKS = {
    0: Task(PROMPTS[0], 24, 9), 1: Task(PROMPTS[1], 14, 4), 2: Task(PROMPTS[3], 14, 1), 3: Task(PROMPTS[2], 12, 12),
    4: Task(PROMPTS[4], 3, 7),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "params"),
    [
        ("full", SamplingParams(0.6, seed=3)), ("streaming", SamplingParams(0.6, seed=3)),
        ("retrieval", SamplingParams()), ("retrieval", SamplingParams(0.6, seed=3)), ("full", SamplingParams()),
    ],
    ids=str,
)  # fmt: skip
def test_each_sequence_is_proposed_what_it_is_proposed_alone(
    models: dict[str, tuple[Path, Path]], cache: str, params: SamplingParams
) -> None:
    """Round by round, and every level accepts the same, though all others work in the same steps. Rounds that end as
    half of the others have enough bring as much as those that ask for no more."""
    options = SpeculationOptions("triforce", cache, **SMALL)
    target, draft = models["mha"]
    loaded: dict[str, Any] = {"draft": draft, "context": CONTEXT, "kv": "gpu", "speculation": options, "max_batch": 6}
    with load(target, **loaded) as runtime:
        together = play(runtime, TASKS, params, num_sequences=5)
    with load(target, **loaded) as runtime:
        alone = {}
        for sequence, task in TASKS.items():
            gammas = tuple(map(len, together[sequence].proposals))
            assert max(gammas, default=0) <= task.gamma
            alone |= play(runtime, {sequence: replace(task, gammas=(*gammas, 0))}, params, num_sequences=5)
    assert any(len({len(one) for one in played.proposals[:-1]}) > 1 for played in together.values()), "some were cut"
    for sequence in TASKS:
        assert together[sequence] == alone[sequence], f"sequence {sequence}"
    accepted = {played.counts[0].accepted / max(1, played.counts[0].proposed) for played in together.values()}
    assert len(accepted) > 2, "ragged"


class Launches(Watched):
    """Steps that were launched, and those that each sequence took, by rounds.

    Args:
        runtime: Loaded with a trace, which tells of the steps; it proposes to the runtime from now on.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.parts.proposer)
        assert runtime.parts.recorder is not None, "load it with trace="
        self.launched: list[tuple[int, int, list[int]]] = []  # of the draft, of the verifier, of each sequence
        self._recorder, self._verifier = runtime.parts.recorder, verifier_of(runtime)
        runtime.parts = replace(runtime.parts, proposer=self)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._recorder.settle()
        first, before = len(self._recorder.spans), self._verifier.counts
        proposals = super().propose(requests)
        self._recorder.settle()
        spans = self._recorder.spans[first:]
        drafted = sum(span.args["steps"] for span in spans if span.name == "draft steps")
        verified = sum(span.name == "verifier step" for span in spans)
        taken = [after[0] - earlier[0] for after, earlier in zip(self._verifier.counts, before, strict=True)]
        self.launched.append((drafted, verified, taken))
        return proposals


def reads_by_round(window: DeviceWindow, launches: Launches, patch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the host will look at the window of the levels in each round of `launches`."""
    rounds, read = Counter[int](), window.read

    def counted() -> Any:
        rounds[len(launches.launched)] += 1
        return read()

    patch.setattr(window, "read", counted)
    return rounds


@pytest.mark.slow
def test_a_batch_takes_the_steps_that_half_of_it_needs(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv": "gpu", "max_batch": 6, "trace": tmp_path / "trace.json"}
    options["speculation"] = SpeculationOptions("triforce", "streaming", **SMALL)
    target, draft = models["gqa"]
    with load(target, draft=draft, context=CONTEXT, **options) as runtime:
        launches = Launches(runtime)
        play(runtime, TASKS, SamplingParams(0.6, seed=3), num_sequences=5)
    for drafted, verified, taken in launches.launched:
        assert verified == max(taken) and drafted == GAMMA_DRAFT * verified
    assert sum(len([count for count in taken if count]) > 2 for _, _, taken in launches.launched) > 3
    for (_, verified, taken), asked in zip(launches.launched, launches.rounds, strict=True):
        enough = sum(len(proposal) == request.gamma for request, proposal in asked)
        assert 2 * enough >= len(asked) and 2 * sum(count < verified for count in taken if count) < len(asked)
    assert any(len(proposal) < request.gamma for asked in launches.rounds for request, proposal in asked)
    together = sum(verified for _, verified, _ in launches.launched)
    assert together < 0.75 * sum(sum(taken) for _, _, taken in launches.launched), "there was something to share"


def test_levels_that_always_agree_take_no_step_too_many(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that is the target, under a retrieval verifier that sees everything."""
    options: dict[str, Any] = {"kv": "gpu", "max_batch": 6, "trace": tmp_path / "trace.json"}
    options["speculation"] = SpeculationOptions("triforce", "full", budget_tokens=768, gamma_draft=GAMMA_DRAFT)
    target, _ = models["gqa"]
    with load(target, draft=target, context=CONTEXT, **options) as runtime:
        window, launches = verifier_of(runtime).window, Launches(runtime)
        reads = reads_by_round(window, launches, monkeypatch)
        played = play(runtime, TASKS, SamplingParams(0.6, seed=3), num_sequences=5)
    for (_, verified, taken), asked in zip(launches.launched, launches.rounds, strict=True):
        needed = [-(-request.gamma // (GAMMA_DRAFT + 1)) for request, _ in asked]
        assert verified == sorted(needed)[-(-len(needed) // 2) - 1], "as many as half of them need"
        assert [taken[request.slot] for request, _ in asked] == [min(steps, verified) for steps in needed]
    assert set(reads.values()) == {1}, "the host knows how many steps that takes at the least"
    assert all(played[sequence].counts[0].rate == 1 for sequence in TASKS)


@pytest.mark.few(1)
@pytest.mark.parametrize("cache", CACHES)
def test_nothing_of_a_sequence_that_waits_is_touched(models: dict[str, tuple[Path, Path]], cache: str) -> None:
    """While others are proposed for; and of one that has enough only what it would have done alone."""
    options = SpeculationOptions("triforce", cache, **SMALL)
    target, draft = models["gqa"]
    with load(target, draft=draft, context=CONTEXT, kv="gpu", speculation=options, max_batch=3) as runtime:
        parts, params = runtime.parts, SamplingParams(0.6, seed=3)
        join_all(parts.proposer, numbered(params, 3))
        for sequence in range(3):
            parts.target.runner.prefill(sequence, PROMPTS[sequence][:-1])
        texts = PROMPTS[:3]
        parts.proposer.propose([DraftRequest(sequence, texts[sequence], 4) for sequence in range(3)])
        before, counts = [stored(runtime, sequence) for sequence in range(3)], verifier_of(runtime).counts
        parts.proposer.propose([DraftRequest(1, texts[1], 12)])
        after = [stored(runtime, sequence) for sequence in range(3)]
        for sequence in (0, 2):
            assert all((left == right).all() for left, right in zip(before[sequence], after[sequence], strict=True))
        assert not all((left == right).all() for left, right in zip(before[1], after[1], strict=True))
        steps = [now[0] - then[0] for now, then in zip(verifier_of(runtime).counts, counts, strict=True)]
        assert steps[0] == steps[2] == 0 < steps[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "kv", "cache"), [(768, "gpu", "full"), (760, "gpu", "full"), (762, "host", "retrieval")]
)
def test_a_sequence_at_the_end_of_the_context_waits_for_the_others(
    models: dict[str, tuple[Path, Path]], context: int, kv: str, cache: str
) -> None:
    count = 20
    prompts = [TEXT[: context - count], TEXT[100:400], TEXT[300:915]]
    target, draft = models["mha"]
    options = SpeculationOptions("triforce", cache, **{**SMALL, "gamma_draft": 5})
    with (
        load(target, draft="none", context=context, max_batch=3) as plain,
        load(target, draft=draft, context=context, kv=kv, speculation=options, max_batch=3) as runtime,
    ):
        for sampling in SAMPLINGS:
            asked = {"max_new_tokens": count, "ignore_eos": True, **sampling}
            truth = [result.tokens for result in plain.generate_batch(prompts, **asked)]
            results = runtime.generate_batch(prompts, gamma=12, **asked)
            assert [result.tokens for result in results] == truth
            idle = [result.stats.passes - result.stats.acceptance[-1].verifications for result in results]
            # Where the context is whole blocks its last five tokens leave no room for a step of six, which else may use
            # the rest of the last block. The last round of any answer asks for nothing.
            assert (idle[0] >= 4) == (context == 768) and idle[1] <= 1
            assert results[0].stats.acceptance[-1].proposed > 0


@pytest.mark.slow
def test_answers_that_end_early_leave_the_others_alone(models: dict[str, tuple[Path, Path]]) -> None:
    options = SpeculationOptions("triforce", "streaming", **SMALL)
    target, draft = models["gqa"]
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.6, "seed": 3, "ignore_eos": True}
    with (
        load(target, draft="none", context=CONTEXT, max_batch=6) as plain,
        load(target, draft=draft, context=CONTEXT, kv="host", speculation=options, max_batch=6) as runtime,
    ):
        truth = plain.generate_batch(PROMPTS, **asked)
        # What some answer says somewhere in its middle ends those that say it.
        stop = truth[1].text[8:10]
        ended = plain.generate_batch(PROMPTS, stop=stop, **asked)
        assert len({len(result.tokens) for result in ended}) > 1 and max(len(result.tokens) for result in ended) == 40
        for _ in range(2):  # the second batch finds what the first one left behind
            said = runtime.generate_batch(PROMPTS, stop=stop, **asked)
            assert [result.tokens for result in said] == [result.tokens for result in ended]


def test_a_single_prompt_takes_no_rows_for_others(models: dict[str, tuple[Path, Path]]) -> None:
    options = SpeculationOptions("triforce", "full", **SMALL)
    target, draft = models["gqa"]
    with load(target, draft=draft, context=CONTEXT, kv="gpu", speculation=options, max_batch=4) as runtime:
        window = verifier_of(runtime).window
        for prompts in (1, 3, 1):
            rows = list[int]()
            runtime.generate_batch(
                PROMPTS[:prompts], max_new_tokens=6, ignore_eos=True,
                on_progress=lambda *_, rows=rows: rows.append(window.num_rows),
            )  # fmt: skip
            assert rows[0] == prompts and rows[-1] == 1, "and none for those that have finished"
        runtime.generate_batch(PROMPTS[:2], max_new_tokens=6)
        runtime.generate(PROMPTS[0], max_new_tokens=6)
        assert window.num_rows == 1


@pytest.mark.slow
def test_a_retrieval_verifier_that_sees_everything_is_right_about_every_sequence(
    models: dict[str, tuple[Path, Path]],
) -> None:
    """It has the target's noise of each sequence: nothing is ever rejected but by rounding. With a draft some rounds
    are cut, as half of the others have enough."""
    options = SpeculationOptions("triforce", budget_tokens=768, gamma_draft=GAMMA_DRAFT)
    for draft_name in ("none", "model"):
        target, draft = models["gqa"]
        chosen = draft if draft_name == "model" else "none"
        with load(target, draft=chosen, context=CONTEXT, kv="gpu", speculation=options, max_batch=6) as runtime:
            for sampling in SAMPLINGS:
                results = runtime.generate_batch(PROMPTS, max_new_tokens=26, ignore_eos=True, gamma=12, **sampling)
                passes = [result.stats.passes for result in results]  # 25 tokens after the first, 13 a pass
                cut = draft_name == "model"
                assert sorted(passes)[: 2 if cut else 5] == [2] * (2 if cut else 5), "a near-tie may cost a pass"
                assert max(passes) <= 3 + cut
                judged = [result.stats.acceptance[-1] for result in results]
                assert sum(level.accepted for level in judged) >= 0.9 * sum(level.proposed for level in judged)


ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "fp32", "context": CONTEXT, "max_batch": 6}


@pytest.fixture(scope="module")
def expected_on_gpu(models: dict[str, tuple[Path, Path]]) -> dict[str, list[list[list[list[int]]]]]:
    """Plain decoding of batches of all sizes, by target and way of sampling."""
    made = {}
    for name, (target, _) in models.items():
        with Runtime.load(target, draft="none", **ON_GPU) as runtime:
            made[name] = [batches(runtime, sampling, (1, 2, 3, 6)) for sampling in SAMPLINGS]
    return made


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "heads", "kv"), COMBINATIONS)
def test_replays_say_what_plain_decoding_says(
    models: dict[str, tuple[Path, Path]], expected_on_gpu: dict[str, list[list[list[list[int]]]]], cache: str,
    heads: str, kv: str,
) -> None:  # fmt: skip
    """On a GPU, where all but the first steps are replays, in batches of changing sizes."""
    options = SpeculationOptions("triforce", cache, **SMALL)
    target, draft = models[heads]
    truth = expected_on_gpu[heads]
    with Runtime.load(target, draft=draft, kv=kv, speculation=options, **ON_GPU) as runtime:
        for _ in range(2):
            assert [batches(runtime, sampling, (1, 2, 3, 6), gamma=5) for sampling in SAMPLINGS] == truth


@pytest.mark.gpu
def test_steps_of_a_batch_never_wait_and_need_few_graphs(models: dict[str, tuple[Path, Path]]) -> None:
    options = SpeculationOptions("triforce", "full", **SMALL)
    target, draft = models["mha"]
    with Runtime.load(
        target, draft=draft, device="cuda", dtype="fp32", context=CONTEXT, kv="host", speculation=options, max_batch=6
    ) as runtime:
        params = SamplingParams(0.6, seed=3)
        alone = {}
        for sequence, task in TASKS.items():
            alone |= play(runtime, {sequence: task}, params, num_sequences=5)
        together = play(runtime, TASKS, params, num_sequences=5)
        for sequence in TASKS:
            assert together[sequence].tokens == alone[sequence].tokens
        # With far keys or without, and up to four recent blocks: whose they are makes no difference.
        assert 0 < verifier_of(runtime).graphs.num_graphs <= 8
        join_all(runtime.parts.proposer, numbered(params, 3))
        for sequence in range(3):
            runtime.parts.target.runner.prefill(sequence, PROMPTS[sequence][:-1])
            runtime.parts.proposer.prepare(sequence, PROMPTS[sequence])
        requests = [DraftRequest(sequence, PROMPTS[sequence], 9) for sequence in range(3)]
        for _ in range(3):  # compiled, captured, replayed
            runtime.parts.proposer.propose(requests)
        window = verifier_of(runtime).window
        read = window.read

        def allowed() -> Any:
            torch.cuda.set_sync_debug_mode("default")
            try:
                return read()
            finally:
                torch.cuda.set_sync_debug_mode("error")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(window, "read", allowed)
            torch.cuda.set_sync_debug_mode("error")
            try:
                answers = runtime.parts.proposer.propose(requests)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert [len(answer) for answer in answers] == [9, 9, 9]
