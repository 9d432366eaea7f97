"""Prompt lookup: what followed earlier occurrences of the text's own ending, as by search, without searching."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.params import SamplingParams
from offload_runtime.speculation import (
    DraftRequest,
    NgramLookup,
    NgramProposer,
    Proposal,
    Proposer,
    WithNgrams,
    accepted_path,
)
from offload_runtime.speculation.calibration import MatchRates
from tests.helpers.trees import pruned

MOST_OCCURRENCES = 32


def starts_by_search(tokens: Sequence[int]) -> dict[int, int]:
    """Where continuations begin, and of each how much matches: the newest occurrences of the last three, two and one
    tokens."""
    found: set[int] = set()
    for size in (3, 2, 1):
        ending = list(tokens[-size:])
        found |= set(
            [
                start + size
                for start in range(len(tokens) - size - 1, -1, -1)
                if len(ending) == size and list(tokens[start : start + size]) == ending
            ][:MOST_OCCURRENCES]
        )
    return {start: matched_by_search(tokens, start) for start in found}


def matched_by_search(tokens: Sequence[int], start: int) -> int:
    before, ending = list(tokens[:start]), list(tokens)
    return max(matched for matched in range(start + 1) if before[start - matched :] == ending[len(ending) - matched :])


def continued(tokens: Sequence[int], start: int, depth: int) -> tuple[int, ...]:
    """What follows a start; it repeats itself past the end."""
    text = list(tokens)
    for offset in range(depth):
        text.append(text[start + offset])
    return tuple(text[len(tokens) :])


def chances_by_search(tokens: Sequence[int], depth: int, rates: MatchRates) -> dict[tuple[int, ...], float]:
    """Of all paths their probability: at each node the longest match decides, and a child comes if those of longer
    matches, or of later ones, do not."""
    starts = starts_by_search(tokens)
    texts = {start: continued(tokens, start, depth) for start in starts}
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(depth):
        for path in [path for path in chances if len(path) == length]:
            through = [start for start in starts if texts[start][:length] == path]
            ranked = sorted(through, key=lambda start: (starts[start], start), reverse=True)
            others = chances[path]
            for token in dict.fromkeys(texts[start][length] for start in ranked):
                matched = max(starts[start] for start in through if texts[start][length] == token)
                rate = rates.rate(min(matched, 128) + length)
                chances[(*path, token)] = others * rate
                others *= 1 - rate
    del chances[()]
    return chances


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    """Of every node the tokens down to it."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@st.composite
def growing_sequences(draw: st.DrawFn) -> list[list[int]]:
    """The sequences that a proposer is shown: each the last one grown, cut, cut and grown, or another one."""
    token = st.integers(0, 3)
    shown = [draw(st.lists(token, min_size=1, max_size=20))]
    for _ in range(draw(st.integers(1, 8))):
        kept = draw(st.sampled_from([len(shown[-1]), draw(st.integers(0, len(shown[-1]))), 0]))
        shown.append(shown[-1][:kept] + draw(st.lists(token, min_size=int(kept == 0), max_size=9)))
    return shown


@given(growing_sequences(), st.integers(1, 6), st.integers(1, 40))
def test_a_tree_holds_the_most_probable_continuations(shown: list[list[int]], depth: int, nodes: int) -> None:
    rates = MatchRates()
    lookup = NgramLookup(rates)
    for before, tokens in zip([[], *shown], shown, strict=False):
        if tokens[: len(before)] != before:
            lookup.catch_up(tokens, anew=True)
        guesses = lookup.tree(tokens, depth, nodes)
        expected = chances_by_search(tokens, depth, rates)
        paths = paths_of(guesses.proposal)
        assert len(set(paths)) == len(paths) == min(nodes, len(expected))
        assert set(guesses.proposal.sources) <= {"ngram"}
        found = [expected[path] for path in paths]
        assert found == pytest.approx(sorted(expected.values(), reverse=True)[: len(found)])
        for path, chance, given_parent in zip(paths, found, guesses.log_probabilities, strict=True):
            assert given_parent == pytest.approx(math.log(chance / expected.get(path[:-1], 1.0)))


@given(growing_sequences(), st.integers(1, 40))
def test_a_smaller_tree_is_the_beginning_of_a_larger_one(shown: list[list[int]], nodes: int) -> None:
    small, large = (NgramLookup().tree(shown[-1], 1000, count).proposal for count in (nodes, 60))
    assert small == pruned(large, nodes)


@given(st.lists(st.integers(0, 1), min_size=60, max_size=160), st.integers(1, 3))
def test_of_many_occurrences_the_newest_are_looked_at(tokens: list[int], depth: int) -> None:
    found = NgramLookup().tree(tokens, depth, 1000).proposal
    assert set(paths_of(found)) == set(chances_by_search(tokens, depth, MatchRates()))


@given(growing_sequences(), st.integers(1, 12))
def test_a_chain_is_what_followed_the_longest_match(shown: list[list[int]], count: int) -> None:
    tokens = shown[-1]
    starts = starts_by_search(tokens)
    best = max(starts, key=lambda start: (starts[start], start), default=None)
    expected = () if best is None else continued(tokens, best, count)
    assert NgramLookup().chain(tokens, count) == Proposal.chain(expected, "ngram")


def test_one_continuation_stays_a_chain_however_much_room_there_is() -> None:
    assert NgramLookup().tree([1, 2, 3, 1, 2], 4, 60).proposal == Proposal.chain([3, 1, 2, 3], "ngram")


def test_continuations_are_ranked_and_merged() -> None:
    # Behind 1 2 came 3 twice, once as now behind 9; then 5, last 6.
    tokens = [9, 1, 2, 3, 4, 0, 1, 2, 3, 7, 0, 1, 2, 5, 0, 1, 2, 6, 9, 1, 2]
    found = NgramLookup().tree(tokens, 2, 12).proposal
    assert paths_of(found)[:2] == [(3,), (3, 4)]
    assert set(paths_of(found)) == {(3,), (3, 4), (3, 7), (6,), (6, 9), (5,), (5, 0)}
    assert paths_of(found).index((6,)) < paths_of(found).index((5,)), "the later one first"


def test_what_is_too_improbable_is_left_out() -> None:
    tokens = [1, 5, 2, 5, 3, 5, 4, 5]
    rate = MatchRates().rate(1)
    chances = [rate * (1 - rate) ** rank for rank in range(3)]
    for count in range(4):
        least = 0.0 if not count else math.log(chances[count - 1]) - 1e-6
        found = NgramLookup().tree(tokens, 1, 60, least=least).proposal
        assert found.tokens == (4, 3, 2)[:count]
    cost_aware, patient = (
        NgramProposer().propose([DraftRequest(0, tokens, 60, 60, cost_aware=cost_aware)])[0]
        for cost_aware in (True, False)
    )
    assert 3 < len(cost_aware) < len(patient) == 60


def test_a_match_is_worth_what_such_matches_were() -> None:
    """In a text that goes round, whose endings match ever longer; then in one in which nothing comes again."""
    rates = MatchRates()
    lookup, at_first = NgramLookup(rates), rates.rate(128)
    text = [token % 40 for token in range(60)]
    for _ in range(300):
        lookup.chain(text, 1)
        text.append((text[-1] + 1) % 40)
    assert rates.rate(128) > at_first
    unmoved = [rates.rate(matched) for matched in (1, 2, 12)]
    assert unmoved == [MatchRates().rate(matched) for matched in (1, 2, 12)], "matches were longer from the first on"
    text, lookup = [0], NgramLookup(rates)
    for number in range(1, 400):
        lookup.chain(text, 1)
        text += [number, 0]
    assert rates.rate(1) < 0.02 and [rates.rate(matched) for matched in (2, 12)] == unmoved[1:]


def test_of_a_guess_all_is_learnt_from_up_to_its_first_mistake() -> None:
    at_first, rates = MatchRates(), MatchRates()
    lookup, text = NgramLookup(rates), [9, 1, 2, 3, 4, 5, 6, 0, 8, 1, 2]
    lookup.chain(text, 4)
    lookup.catch_up(text)  # as often as it is asked
    lookup.catch_up([*text, 3, 4, 7, 6])
    changes = [rates.rate(matched) - at_first.rate(matched) for matched in (1, 2, 3, 4, 6)]
    assert changes[1] > 0 and changes[2] > 0 and changes[3] < 0 and changes[0] == changes[4] == 0
    rates = MatchRates()
    lookup = NgramLookup(rates)
    lookup.chain([1, 1, 1, 1], 9)
    lookup.catch_up([1] * 9)  # further than the text went
    assert all(rates.rate(matched) > at_first.rate(matched) for matched in (3, 4, 6))


def test_nothing_is_learnt_of_what_others_wrote() -> None:
    rates = MatchRates()
    lookup = NgramLookup(rates)
    for _ in range(50):
        lookup.chain([1, 2, 3, 1, 2], 1)
        said = [1, 2, 3, 1, 2, 9, 9]  # a generation later: the user has written something
        lookup.catch_up(said, anew=True)
        lookup.chain(said, 1)
        lookup.catch_up([], anew=True)
        lookup.chain([1, 2, 3, 1, 2], 1)
        lookup.catch_up([8, 7, 6, 5, 4, 3, 2])  # another sequence
        lookup.catch_up([], anew=True)
    assert rates.rate(2) == MatchRates().rate(2)


def test_a_sequence_that_was_cut_between_generations_is_noticed() -> None:
    """Where its newest tokens do not show it."""
    proposer, params = NgramProposer(), SamplingParams()
    before, after = [1, 2, 9, 1, 2, 5, 5, 5, 5, 5, 1, 2], [1, 2, 8, 1, 2, 7, 7, 5, 5, 5, 5, 1, 2]
    proposer.join(0, params)
    assert proposer.propose([DraftRequest(0, before, 1)])[0].tokens == (5,)
    proposer.join(0, params)
    assert proposer.propose([DraftRequest(0, after, 1)])[0].tokens == (7,)
    assert proposer.propose([DraftRequest(0, after[:5], 1)])[0].tokens == (8,)


class CountingList(list[int]):
    """A text that counts the tokens that are read of it."""

    read = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        found = super().__getitem__(index)  # type: ignore[index]
        self.read += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()


def test_a_round_reads_what_is_new_and_not_the_text() -> None:
    text = CountingList(token % 50 for token in range(20_000))
    proposer = NgramProposer()
    proposer.join(0, SamplingParams())
    proposer.prepare(0, text)
    for added in range(1, 6):
        text += [token % 50 for token in range(len(text), len(text) + added)]
        text.read = 0
        assert proposer.propose([DraftRequest(0, text, 8, 30)])[0]
        assert text.read < 40
    assert len(text) == 20_015


class CutOff(list[int]):
    """A text whose reader is interrupted at its last token."""

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        if index == len(self) - 1:
            raise KeyboardInterrupt
        return super().__getitem__(index)  # type: ignore[index]


def test_after_an_interrupted_entry_nothing_follows_that_did_not_come_to_be() -> None:
    known = [1, 2, 1]
    for longer in ([*known, 2], [*known, 2, 1]):
        lookup = NgramLookup()
        lookup.catch_up(known, anew=True)
        with pytest.raises(KeyboardInterrupt):
            lookup.catch_up(CutOff(longer))
        text = longer[:-1]
        lookup.catch_up(text, anew=True)  # the same prompt once more
        for proposal in (lookup.chain(text, 3), lookup.tree(text, 3, 9).proposal):
            assert set(proposal.tokens) <= set(known)
        lookup.catch_up([*longer, 1, 2], anew=True)
        found = lookup.tree([*longer, 1, 2], 4, 60).proposal
        assert found.tokens[:2] == NgramLookup().tree([*longer, 1, 2], 4, 60).proposal.tokens[:2]


def test_what_is_shown_stays_as_it_was() -> None:
    tokens = [1, 2, 3, 1, 2]
    assert NgramLookup().chain(tokens, 4).tokens == NgramLookup().tree(tokens, 4, 4).proposal.tokens == (3, 1, 2, 3)
    assert tokens == [1, 2, 3, 1, 2]


def test_every_sequence_is_looked_up_in_its_own_text() -> None:
    proposer, texts = NgramProposer(), {2: [7, 8, 9, 7, 8], 0: [1, 2, 3, 1, 2]}
    proposer.prepare(2, texts[2][:3])
    requests = [
        DraftRequest(sequence, tokens, count) for (sequence, tokens), count in zip(texts.items(), (2, 1), strict=True)
    ]
    assert [proposal.tokens for proposal in proposer.propose(requests)] == [(9, 7), (3,)]
    assert proposer.propose([DraftRequest(0, texts[0], 2, 9)])[0].tokens == (3, 1), "as deep as a turn says"
    others = proposer.propose([DraftRequest(0, texts[2], 1), DraftRequest(1, [7, 8, 9], 1)])
    assert [proposal.tokens for proposal in others] == [(9,), ()]


class Chains(Proposer):
    """A draft that has nothing to say."""

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return ("chain",)


def test_families_say_how_much_of_the_endings_occurred_before() -> None:
    known, weak, new = [1, 2, 3, 1, 2], [1, 2, 3, 2], [1, 2, 3, 4]
    for texts, expected in (
        ([known], "ngram"), ([weak], "unigram"), ([new], None), ([new, weak], "unigram"), ([weak, known], "ngram")
    ):  # fmt: skip
        proposer = NgramProposer()
        assert proposer.modes(dict(enumerate(texts))) == (() if expected is None else (expected,))
    assert set(NgramProposer().modes({})) == {"ngram", "unigram"}
    draft = WithNgrams(Chains(), NgramProposer())
    assert list(draft.modes({0: known})) == ["ngram", "chain"] and list(draft.modes({0: weak})) == ["chain"]


class Sevens(Chains):
    """A draft that always says seven."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal.chain([7] * request.longest_chain, "draft") for request in requests]


def test_what_a_text_said_before_takes_the_room_beside_a_chain() -> None:
    draft = WithNgrams(Sevens(), NgramProposer(), alone=False)
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    assert list(draft.modes({0: text})) == ["chain"]
    alone, further = (
        draft.propose([DraftRequest(0, text, 2, mode="chain", cost_aware=True, extra_nodes=count)])[0]
        for count in (0, 5)
    )
    assert alone == Proposal.chain([7, 7], "draft")
    assert len(further) == 7 and further.sources == ("draft",) * 2 + ("ngram",) * 5
    # Further down than the chain, from where the text ends.
    assert accepted_path(further, [3, 0, 0, 4, 5, 6, 9, 0]) == [2, 3, 4, 5, 6]
    assert further.depths[2:] == (1, 2, 3, 4, 5)
    new = draft.propose([DraftRequest(0, [11, 12, 13], 2, mode="chain", cost_aware=True, extra_nodes=5)])[0]
    assert new == alone
