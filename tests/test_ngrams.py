"""Prompt lookup: what followed earlier occurrences of the text's own ending, as by search, without searching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import SamplingParams
from offload_runtime.speculation import NgramLookup, NgramProposer, Proposal, Turn

MOST_OCCURRENCES = 16


def starts_by_search(tokens: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
    """Where continuations begin: longest ending first, the latest of its occurrences, then those with the commoner next
    token, then the later ones; of many the newest only."""
    for size in sizes:
        ending = list(tokens[-size:])
        found = [
            start + size
            for start in range(len(tokens) - size - 1, -1, -1)
            if len(ending) == size and list(tokens[start : start + size]) == ending
        ][:MOST_OCCURRENCES]
        common = Counter(tokens[start] for start in found)
        yield from found[:1]
        yield from sorted(found[1:], key=lambda start: (-common[tokens[start]], -start))


def ngram_reference(tokens: Sequence[int], depth: int, nodes: int, *, max_ngram: int, min_ngram: int) -> Proposal:
    """By search; a continuation repeats itself past the end."""
    tree = Proposal()
    for start in starts_by_search(tokens, range(max_ngram, min_ngram - 1, -1)):
        text = list(tokens)
        for offset in range(depth):
            text.append(text[start + offset])
        tree = tree.merged(Proposal.chain(text[len(tokens) :], "ngram")).pruned(nodes)
    return tree


@st.composite
def growing_sequences(draw: st.DrawFn) -> list[list[int]]:
    """The sequences that a proposer is shown: each the last one grown, cut, cut and grown, or another one."""
    token = st.integers(0, 3)
    shown = [draw(st.lists(token, min_size=1, max_size=20))]
    for _ in range(draw(st.integers(1, 8))):
        kept = draw(st.sampled_from([len(shown[-1]), draw(st.integers(0, len(shown[-1]))), 0]))
        shown.append(shown[-1][:kept] + draw(st.lists(token, min_size=int(kept == 0), max_size=9)))
    return shown


@given(growing_sequences(), st.integers(1, 12), st.integers(0, 20), st.integers(1, 4), st.integers(0, 3))
def test_a_lookup_equals_a_search(shown: list[list[int]], depth: int, branches: int, min_ngram: int, more: int) -> None:
    sizes = {"max_ngram": min_ngram + more, "min_ngram": min_ngram}
    lookup, nodes = NgramLookup(**sizes), depth + branches
    for before, tokens in zip([[], *shown], shown, strict=False):
        if tokens[: len(before)] != before:
            lookup.begin(tokens)
        assert lookup.propose(tokens, depth, nodes) == ngram_reference(tokens, depth, nodes, **sizes)
    assert NgramLookup(**sizes).propose(shown[-1], depth, nodes) == ngram_reference(shown[-1], depth, nodes, **sizes)


@given(st.lists(st.integers(0, 1), min_size=60, max_size=90), st.integers(1, 4))
def test_of_many_occurrences_the_newest_are_looked_at(tokens: list[int], depth: int) -> None:
    expected = ngram_reference(tokens, depth, 1000, max_ngram=4, min_ngram=2)
    assert NgramLookup().propose(tokens, depth, 1000) == expected


@given(growing_sequences(), st.integers(1, 12))
def test_with_room_for_a_chain_only_it_is_what_followed_last(shown: list[list[int]], count: int) -> None:
    tokens = shown[-1]
    found = NgramLookup().propose(tokens, count, count)
    start = next(starts_by_search(tokens, (4, 3, 2)), None)
    text = list(tokens)
    for offset in range(count if start is not None else 0):
        text.append(text[start + offset])  # type: ignore[operator]
    assert found == Proposal.chain(text[len(tokens) :], "ngram")


def test_one_continuation_stays_a_chain_however_much_room_there_is() -> None:
    assert NgramLookup().propose([1, 2, 3, 1, 2], 4, 60) == Proposal.chain([3, 1, 2, 3], "ngram")


def test_continuations_are_ranked_and_merged() -> None:
    # Behind 1 2 came 3 4 twice, then 5, last 6; what came last stands first, then what came often.
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 5, 7, 1, 2, 6, 8, 1, 2]
    found = NgramLookup(max_ngram=2).propose(tokens, 2, 12)
    assert (found.tokens, found.parents) == ((6, 8, 3, 4, 5, 7), (-1, 0, -1, 2, -1, 4))
    assert NgramLookup(max_ngram=2).propose(tokens, 2, 3).tokens == (6, 8, 3)


def test_a_sequence_that_was_cut_between_generations_is_noticed() -> None:
    """Where its newest tokens do not show it."""
    proposer, params = NgramProposer(), SamplingParams()
    before, after = [1, 2, 9, 1, 2, 5, 5, 5, 5, 5, 1, 2], [1, 2, 8, 1, 2, 7, 7, 5, 5, 5, 5, 1, 2]
    proposer.start(params)
    assert proposer.propose([Turn(0, before, 1)])[0].tokens == (5,)
    proposer.start(params)
    assert proposer.propose([Turn(0, after, 1)])[0].tokens == (7,)
    assert proposer.propose([Turn(0, after[:5], 1)])[0].tokens == (8,)


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
    proposer.start(SamplingParams())
    proposer.prepare(0, text)
    for added in range(1, 6):
        text += [token % 50 for token in range(len(text), len(text) + added)]
        text.read = 0
        assert proposer.propose([Turn(0, text, 8, 30)])[0]
        assert text.read < 40
    assert len(text) == 20_015


def test_what_is_shown_stays_as_it_was() -> None:
    tokens = [1, 2, 3, 1, 2]
    assert NgramLookup().propose(tokens, 4, 4).tokens == (3, 1, 2, 3)
    assert tokens == [1, 2, 3, 1, 2]


def test_every_sequence_is_looked_up_in_its_own_text() -> None:
    proposer, texts = NgramProposer(), {2: [7, 8, 9, 7, 8], 0: [1, 2, 3, 1, 2]}
    proposer.prepare(2, texts[2][:3])
    turns = [Turn(sequence, tokens, count) for (sequence, tokens), count in zip(texts.items(), (2, 1), strict=True)]
    assert [proposal.tokens for proposal in proposer.propose(turns)] == [(9, 7), (3,)]
    others = proposer.propose([Turn(0, texts[2], 1), Turn(1, [7, 8, 7], 1)])
    assert [proposal.tokens for proposal in others] == [(9,), ()]
