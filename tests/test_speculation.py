"""Rounds of speculation: whatever is proposed, the tokens and the logits behind them are those of plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.errors import NumericalError
from offload_runtime.model import Window
from offload_runtime.params import SamplingParams
from offload_runtime.runners import Decision, ModelRunner, decided
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import (
    Acceptance,
    DraftRequest,
    PromptRequest,
    Proposal,
    Proposer,
    accepted_path,
)
from tests.helpers.assembly import make_runner
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.sampling import Decoder, Verifier, join_all, numbered, run_step

GREEDY = SamplingParams()
PARAMS = [GREEDY, SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.0, top_p=0.9, seed=4)]


class ScriptedProposer:
    """Proposes the known continuation with a wrong token at offset `wrong_at` of every window (None: all right)."""

    name = "script"

    def __init__(self, script: Sequence[int], wrong_at: int | None) -> None:
        self._script = list(script)
        self._wrong_at = wrong_at

    def join(self, slot: int, params: SamplingParams) -> None:
        pass

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal.chain(self._guess(len(request.tokens), request.gamma), self.name) for request in requests]

    def ahead(self, pending: Callable[[], bool]) -> None:
        pass

    def _guess(self, length: int, count: int) -> list[int]:
        guesses = self._script[length : length + count]
        if self._wrong_at is not None and self._wrong_at < len(guesses):
            guesses[self._wrong_at] = (guesses[self._wrong_at] + 1) % VOCAB_SIZE
        return guesses

    def counts(self, slot: int) -> Sequence[Acceptance]:
        return ()


class RecordingTarget(Verifier):
    """Passes windows on and keeps the logits."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.cache = runner.cache
        self.logits: list[torch.Tensor] = []

    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        logits = self._runner.verify(windows, sequences)
        self.logits.append(logits.clone())
        return logits


def decode(
    runner: ModelRunner, prompt: list[int], proposer: Proposer, params: SamplingParams, *, gamma: int, count: int,
    sequence: int = 0,
) -> tuple[list[int], torch.Tensor, list[int]]:  # fmt: skip
    """Prompt and at least `count` new tokens, the logits [N, V] behind those of the rounds, accepted per round."""
    runner.cache.truncate(sequence, 0)
    target = RecordingTarget(runner)
    decoder = Decoder(target, proposer, params, slot=sequence)
    join_all(proposer, numbered(params, sequence + 1))
    tokens = [*prompt, decoder.first_token(runner.prefill(sequence, prompt))]
    rows, accepted = [], []
    while len(tokens) - len(prompt) < count:
        result = decoder.step(tokens, gamma)
        tokens += result.tokens
        rows.append(target.logits.pop()[: len(result.tokens)])
        accepted.append(len(result.path))
        assert len(result.tokens) == len(result.path) + 1 <= len(result.proposal) + 1 <= gamma + 1
        assert runner.cache.length(sequence) == len(tokens) - 1
    return tokens, torch.cat(rows), accepted


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    """A small random model, two of its layers in a ring."""
    model = random_model("llama-gqa")
    made = make_runner(model, slots=2, resident=(0, 2), capacity_tokens=160)
    yield made.runner
    made.close()


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=7))
def test_of_a_chain_the_common_beginning_is_accepted(proposals: list[int], samples: list[int]) -> None:
    samples = [*samples, *[9] * (len(proposals) + 1 - len(samples))]
    path = accepted_path(Proposal.chain(proposals, "x"), samples)
    count = len(path)
    assert path == list(range(count)) and proposals[:count] == samples[:count]
    assert count == len(proposals) or proposals[count] != samples[count]


@pytest.mark.few(1)
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_rejection_at_every_place_of_the_window_changes_nothing(runner: ModelRunner, params: SamplingParams) -> None:
    prompt = random_tokens(21, seed=1)
    plain, plain_logits, _ = decode(runner, prompt, Proposer(), params, gamma=0, count=40)
    assert len(set(plain[21:])) > 5
    # Windows narrower than, equal to and wider than a tile of the matrix products.
    for gamma in (1, 2, 7, 8, 17):
        for wrong_at in (*range(gamma), None):
            proposer = ScriptedProposer(plain, wrong_at)
            tokens, logits, accepted = decode(runner, prompt, proposer, params, gamma=gamma, count=24)
            assert tokens == plain[: len(tokens)]
            # Bit for bit on CUDA; the CPU's attention sums in another order for another number of queries.
            torch.testing.assert_close(logits, plain_logits[: len(logits)], atol=1e-4, rtol=0)
            assert accepted[0] == (gamma if wrong_at is None else wrong_at)


def test_other_sequences_of_the_cache_have_other_noise_and_stay_untouched(runner: ModelRunner) -> None:
    params, prompt = PARAMS[1], random_tokens(9, seed=2)
    first, _, _ = decode(runner, prompt, Proposer(), params, gamma=0, count=14)
    second, _, _ = decode(runner, prompt, ScriptedProposer(first, None), params, gamma=5, count=12, sequence=2)
    assert second[:9] == first[:9] and second[9:21] != first[9:21]
    again, _, accepted = decode(runner, prompt, ScriptedProposer(first, None), params, gamma=5, count=11)
    assert again == first[: len(again)] and accepted == [5, 5]


class FakeTarget(Verifier):
    """Says what it is told: logits [1, T, V] for one window."""

    class Cache:
        """Only a length."""

        def __init__(self, length: int) -> None:
            self._length = length

        def length(self, sequence: int) -> int:
            return self._length

        max_tokens_with_draft = 100

        def commit_path(self, sequence: int, rows: Sequence[int]) -> None:
            self._length += len(rows)

    def __init__(self, committed: int, logits: torch.Tensor) -> None:
        self.cache = self.Cache(committed)
        self._logits = logits

    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        return self._logits[: len(windows[0].tokens)]


@pytest.mark.parametrize("nan_row", [0, 1, 2, 3])
def test_nan_counts_only_where_plain_decoding_would_meet_it(nan_row: int) -> None:
    logits = torch.eye(6)[:4] * 5  # row t says token t
    logits[nan_row] = float("nan")
    target = FakeTarget(2, logits)
    proposer = ScriptedProposer([9, 9, 9, 0, 5, 2], None)  # token 1 is right in the second place, 5 is not
    decoder = Decoder(target, proposer, GREEDY)
    if nan_row < 2:
        with pytest.raises(NumericalError, match=f"position {3 + nan_row} .*--dtype"):
            decoder.step([9, 9, 9], 3)
        assert target.cache.length(0) == 2
    else:
        assert decoder.step([9, 9, 9], 3).tokens == [0, 1]
        assert target.cache.length(0) == 4


def test_nan_behind_the_prompt(runner: ModelRunner) -> None:
    class Broken:
        cache = runner.cache

        def decide(self, windows: Any, slots: Any, sampling: SlotSampling, *rest: Any) -> Decision:
            logits = runner.decide(windows, slots, sampling, *rest).logits
            return decided(torch.full_like(logits, math.nan), sampling, [Window((0,))], [0], [20])

    runner.cache.truncate(0, 0)
    with pytest.raises(NumericalError, match="position 21 are NaN"):
        run_step(Broken(), GREEDY, Proposer(), [], prompts=[PromptRequest(0, random_tokens(21))])
    assert runner.cache.length(0) == 0, "the step may be taken again"
