"""The draft model as proposer: its guesses are its own plain decoding under the target's noise, after any history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_runtime.model import PassRows, Window
from offload_runtime.params import SamplingParams
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import DraftProposer, DraftRequest
from tests.helpers.assembly import make_runner
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.sampling import Decoder, Verifier, join_all, numbered, sample

SHORT_CONTEXT = 48
PARAMS = [SamplingParams(), SamplingParams(temperature=0.6, seed=5), SamplingParams(temperature=1.0, seed=6)]


def runners(capacity_tokens: int) -> Iterator[ModelRunner]:
    """A small random model with all layers resident."""
    made = make_runner(random_model("llama", seed=7), capacity_tokens=capacity_tokens)
    yield made.runner
    made.close()


@pytest.fixture(scope="module")
def draft() -> Iterator[ModelRunner]:
    yield from runners(240)


@pytest.fixture(scope="module")
def short_draft() -> Iterator[ModelRunner]:
    yield from runners(SHORT_CONTEXT)


def make_proposer(
    draft: ModelRunner, params: SamplingParams, *, sequence: int = 0, vocab_size: int = VOCAB_SIZE
) -> DraftProposer:
    """A proposer that starts with an empty cache."""
    draft.cache.truncate(sequence, 0)
    proposer = DraftProposer(draft, vocab_size=vocab_size, batch=sequence + 1)
    join_all(proposer, numbered(params, sequence + 1))
    return proposer


def propose(proposer: DraftProposer, tokens: Sequence[int], count: int) -> list[int]:
    """What follows `tokens`, the one sequence there is."""
    proposal = proposer.propose([DraftRequest(0, tokens, count)])[0]
    assert proposal.is_chain and set(proposal.sources) <= {"draft"}
    return list(proposal.tokens)


def plain_decoding(
    runner: ModelRunner, tokens: Sequence[int], count: int, params: SamplingParams, *, noise_sequence: int = 0
) -> list[int]:
    """`count` tokens that `runner` itself would say behind `tokens`, one pass a token, in its cache's last sequence."""
    row, said = 2, []
    runner.cache.truncate(row, 0)
    logits = runner.prefill(row, tokens)
    for position in range(len(tokens), len(tokens) + count):
        place = torch.tensor([position])
        said += sample(logits, params, place, torch.full_like(place, noise_sequence)).tolist()
        logits = runner.verify([Window((said[-1],))], [row])
        runner.cache.commit(row, 1)
    return said


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, list[int], int]]:
    """Rounds: guesses accepted (-1: another sequence begins), tokens that then came, how many to guess."""
    token = st.integers(0, VOCAB_SIZE - 1)
    rounds = [(-1, draw(st.lists(token, min_size=1, max_size=50)), draw(st.integers(1, 7)))]
    for _ in range(draw(st.integers(1, 4))):
        accepted = draw(st.integers(-1, 7))
        new = draw(st.lists(token, min_size=1, max_size=draw(st.sampled_from([1, 2, 40]))))
        rounds.append((accepted, new, draw(st.integers(1, 7))))
    return rounds


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(histories(), st.sampled_from(PARAMS))
def test_guesses_are_plain_decoding_after_any_history(
    draft: ModelRunner, rounds: list[tuple[int, list[int], int]], params: SamplingParams
) -> None:
    proposer = make_proposer(draft, params)
    tokens: list[int] = []
    guesses: list[int] = []
    for accepted, new, count in rounds:
        if accepted < 0:
            proposer.join(0, params)
            tokens = new
        else:
            tokens = [*tokens, *guesses[:accepted], *new]
        guesses = propose(proposer, tokens, count)
        assert guesses == plain_decoding(draft, tokens, count, params)
        # The last guess was never fed: exactly the others wait in the cache.
        assert draft.cache.length(0) == len(tokens) + count - 1


def test_a_cut_sequence_and_one_that_is_shown_twice(draft: ModelRunner) -> None:
    proposer, tokens = make_proposer(draft, PARAMS[1]), random_tokens(45, seed=3)
    for length in (45, 45, 20, 44, 1, 45):
        assert propose(proposer, tokens[:length], 4) == plain_decoding(draft, tokens[:length], 4, PARAMS[1])


def test_the_way_of_sampling_may_change_between_generations(draft: ModelRunner) -> None:
    proposer, tokens = make_proposer(draft, PARAMS[0]), random_tokens(12, seed=4)
    said: set[tuple[int, ...]] = set()
    for params in (*PARAMS, SamplingParams(temperature=1.0, seed=7), SamplingParams(temperature=1.5, top_k=3)):
        proposer.join(0, params)
        said.add(tuple(propose(proposer, tokens, 6)))
        assert tuple(plain_decoding(draft, tokens, 6, params)) in said
    assert len(said) == 5


def test_a_draft_with_a_shorter_context_guesses_as_far_as_it_reaches(
    draft: ModelRunner, short_draft: ModelRunner
) -> None:
    proposer, tokens = make_proposer(short_draft, PARAMS[1]), random_tokens(SHORT_CONTEXT + 20, seed=8)
    for length in (40, 44, 47, 48, 49, 60, 30, 46):
        guesses = propose(proposer, tokens[:length], 6)
        # A guess has to be fed before the next one is made, only the last one needs no place.
        assert len(guesses) == max(0, min(6, SHORT_CONTEXT - length + int(length <= SHORT_CONTEXT)))
        assert guesses == plain_decoding(draft, tokens[:length], 6, PARAMS[1])[: len(guesses)]


def test_tokens_beyond_either_vocabulary(draft: ModelRunner) -> None:
    tokens = random_tokens(10, seed=9)
    proposer = make_proposer(draft, PARAMS[2], vocab_size=20)
    assert all(max(propose(proposer, tokens[:length], 6)) < 20 for length in range(1, 10))
    proposer = make_proposer(draft, PARAMS[2], vocab_size=VOCAB_SIZE + 50)
    padding = VOCAB_SIZE + 30  # a row of the target's embedding that the draft does not have
    assert len(propose(proposer, [*tokens, padding], 4)) == 4
    assert propose(proposer, [*tokens, *tokens], 4) == plain_decoding(draft, tokens + tokens, 4, PARAMS[2])


class NanDraft:
    """A draft whose logits of the token at position 12 are NaN the first time."""

    def __init__(self, runner: ModelRunner) -> None:
        self.cache, self.streamer, self.rows = runner.cache, runner.streamer, runner.rows
        self.prefill, self.run_rows = runner.prefill, runner.run_rows
        self.decoder = copy(runner.decoder)
        self.decoder.attend = self._attend
        self._true_attend = runner.decoder.attend
        self._broken = False

    def _attend(self, index: int, weights: Any, qkv: torch.Tensor, rows: PassRows, cache: Any) -> torch.Tensor:
        mixed = self._true_attend(index, weights, qkv, rows, cache)
        # Behind the last layer's keys, so that none of them are NaN.
        if self._broken or index + 1 < self.decoder.config.num_layers or int(rows.query.positions.max()) != 11:
            return mixed
        self._broken = True
        return mixed * float("nan")


def test_a_draft_with_nan_says_what_it_can(draft: ModelRunner) -> None:
    draft.cache.truncate(0, 0)
    tokens = random_tokens(10, seed=10)
    proposer = DraftProposer(NanDraft(draft), vocab_size=VOCAB_SIZE)
    assert propose(proposer, tokens, 5) == plain_decoding(draft, tokens, 2, PARAMS[0])
    assert propose(proposer, tokens, 5) == plain_decoding(draft, tokens, 5, PARAMS[0])


class InterruptedDraft:
    """A draft, and the streamer of its weights, whose passes are interrupted whenever `countdown` reaches zero."""

    countdown = -1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.cache, self.decoder, self.prefill = runner.cache, runner.decoder, runner.prefill
        self.rows, self.num_streamed = runner.rows, runner.streamer.num_streamed

    @property
    def streamer(self) -> InterruptedDraft:
        return self

    def layers(self) -> Any:
        self._count()
        return self._runner.streamer.layers()

    def run_rows(self, rows: PassRows) -> torch.Tensor:
        self._count()
        return self._runner.run_rows(rows)

    def _count(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            raise KeyboardInterrupt


def test_an_interruption_anywhere_leaves_no_wrong_keys(draft: ModelRunner) -> None:
    draft.cache.truncate(0, 0)
    interrupted = InterruptedDraft(draft)
    proposer = DraftProposer(interrupted, vocab_size=VOCAB_SIZE)
    tokens = random_tokens(20, seed=15)
    for countdown in (1, 2, 3, 5, 1, 4):
        tokens = [*tokens[:-6], *random_tokens(9, seed=len(tokens))]
        interrupted.countdown = countdown
        proposer.join(0, PARAMS[0])
        with pytest.raises(KeyboardInterrupt):
            propose(proposer, tokens, 6)
        shorter = tokens[:-2]
        assert propose(proposer, shorter, 6) == plain_decoding(draft, shorter, 6, PARAMS[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("gamma", "sequence"), [(1, 0), (5, 0), (12, 1)])
def test_a_draft_that_is_the_target_gets_everything_accepted(
    draft: ModelRunner, temperature: float, gamma: int, sequence: int
) -> None:
    # The same noise at the same position of the same sequence, or else the two disagree at once.
    params = SamplingParams(temperature=temperature, seed=11)
    proposer = make_proposer(draft, params, sequence=sequence)
    prompt = random_tokens(37, seed=12)
    row = 2  # the draft has rows 0 and 1
    target = OneSequence(draft, row)
    decoder = Decoder(target, proposer, params, slot=sequence)
    draft.cache.truncate(row, 0)
    tokens = [*prompt, decoder.first_token(draft.prefill(row, prompt))]
    for _ in range(8):
        result = decoder.step(tokens, gamma)
        assert (len(result.proposal), len(result.path)) == (gamma, gamma)
        tokens += result.tokens
    # In the same row, which the target needs no more.
    assert tokens == prompt + plain_decoding(draft, prompt, len(tokens) - 37, params, noise_sequence=sequence)


class OneSequence(Verifier):
    """A target whose keys and values lie in one row of a shared cache, whatever sequence the noise is keyed with."""

    def __init__(self, runner: ModelRunner, row: int) -> None:
        self._runner, self._row = runner, row

    @property
    def cache(self) -> OneSequence:
        return self

    def length(self, sequence: int) -> int:
        return self._runner.cache.length(self._row)

    @property
    def max_tokens_with_draft(self) -> int:
        return self._runner.cache.max_tokens_with_draft

    def commit_path(self, sequence: int, rows: Sequence[int]) -> None:
        self._runner.cache.commit_path(self._row, rows)

    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        return self._runner.verify(windows, [self._row])


def test_a_prepared_prompt_is_not_worked_on_again(draft: ModelRunner) -> None:
    tokens = random_tokens(60, seed=21)
    proposer = make_proposer(draft, PARAMS[0])
    proposer.prepare(0, tokens[:50])
    assert draft.cache.length(0) == 48, "all but what a first step feeds itself"
    assert propose(proposer, tokens[:51], 6) == plain_decoding(draft, tokens[:51], 6, PARAMS[0])
    longest = draft.cache.capacity_tokens
    make_proposer(draft, PARAMS[0]).prepare(0, random_tokens(longest + 1, seed=22))  # no room to propose, and no error
