"""Guesses from the context itself: what followed earlier occurrences of its own ending (prompt lookup)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from offload_runtime.config import SamplingParams
from offload_runtime.speculation.acceptance import Acceptance
from offload_runtime.speculation.proposal import Proposal
from offload_runtime.speculation.proposers import Turn

# Earlier occurrences of an ending that are looked at, however many there are.
_MOST_OCCURRENCES = 16


class NgramLookup:
    """Prompt lookup in one sequence (Saxena, "Prompt Lookup Decoding", 2023): endings of `max_ngram` to `min_ngram`
    tokens that occurred before, the longest first.

    An index of all n-grams grows with the sequence, so a lookup does not search: every n-gram knows its latest
    occurrence, and every occurrence the one before.
    """

    name = "ngram"

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        # n-gram -> index of the token after its latest occurrence that something follows
        self._followers: dict[tuple[int, ...], int] = {}
        # For each size, by index of a token: the index behind the occurrence before of the n-gram that ends there.
        self._earlier: dict[int, list[int]] = {size: [] for size in self._sizes}

    def propose(self, tokens: Sequence[int], depth: int, nodes: int) -> Proposal:
        """Continuations of `tokens` that the text has seen, merged.

        The first is what followed the latest occurrence of the longest known ending, to its full depth; others, as long
        as there is room, what followed its other occurrences, those with the commoner next token first and of these
        the later ones, and so on with shorter endings.

        Args:
            tokens: As for `catch_up`.
            depth: Most tokens in a row; a continuation that reaches the end of the text repeats itself.
            nodes: Most tokens in all.
        """
        self.catch_up(tokens)
        return Proposal.of_paths(((self._copy_from(start, depth), self.name) for start in self._starts()), nodes)

    def has_idea(self) -> bool:
        """Whether the ending of what is known occurred before."""
        return next(self._starts(), None) is not None

    def _starts(self) -> Iterator[int]:
        """Where the continuations of the sequence's endings begin, the most promising first."""
        told = set()
        for size in self._sizes:
            for start in self._ranked(size):
                if start not in told:
                    told.add(start)
                    yield start

    def _ranked(self, size: int) -> Iterator[int]:
        """The same of its ending of one size."""
        latest = self._followers.get(tuple(self._tokens[-size:])) if len(self._tokens) > size else None
        if latest is None:
            return
        yield latest
        others: list[int] = []
        start = self._earlier[size][latest]
        while start >= 0 and len(others) < _MOST_OCCURRENCES - 1:
            others.append(start)
            start = self._earlier[size][start]
        common = Counter(self._tokens[start] for start in (latest, *others))
        yield from sorted(others, key=lambda start: -common[self._tokens[start]])

    def _copy_from(self, start: int, count: int) -> list[int]:
        """Tokens from `start` on; past the end the guess repeats itself, as text that loops does."""
        period = len(self._tokens) - start
        return [self._tokens[start + offset % period] for offset in range(count)]

    def begin(self, tokens: Sequence[int]) -> None:
        """Compare everything that is known with a sequence that may be another one or have been cut, and enter what is
        new."""
        known = len(self._tokens)
        if list(tokens[:known]) != self._tokens:
            self._forget()
        self._enter(tokens)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Enter what is new of a sequence that has only grown since the last call.

        So that a round costs what it adds, its newest known tokens alone are compared: where it is another sequence or
        was cut all the same, they mostly tell, and where they do not, guesses are worse until `begin`.
        """
        known = len(self._tokens)
        first = max(0, known - self._sizes.start)
        if len(tokens) < known or list(tokens[first:known]) != self._tokens[first:]:
            self._forget()
        self._enter(tokens)

    def _forget(self) -> None:
        # In this order: whatever interrupts it, no follower is known that the tokens do not have.
        self._followers.clear()
        self._tokens.clear()

    def _enter(self, tokens: Sequence[int]) -> None:
        for index in range(len(self._tokens), len(tokens)):
            # The n-grams that end right before `index` now have a follower.
            for size in self._sizes:
                earlier = self._earlier[size]
                del earlier[index:]  # of what was forgotten, or an entry that was interrupted
                before = -1
                if index >= size:
                    ngram = tuple(self._tokens[index - size : index])
                    before = self._followers.get(ngram, -1)
                    self._followers[ngram] = index
                earlier.append(before if before < index else -1)
            self._tokens.append(tokens[index])


class NgramProposer:
    """An `NgramLookup` for every sequence."""

    name = NgramLookup.name

    def __init__(self) -> None:
        self._lookups: defaultdict[int, NgramLookup] = defaultdict(NgramLookup)
        self._known: set[int] = set()  # sequences that have only grown since they were compared

    def families(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        for sequence, tokens in texts.items():
            self.prepare(sequence, tokens)
        known = not texts or any(self._lookups[sequence].has_idea() for sequence in texts)
        return (self.name,) if known else ()

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        self._known.clear()

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        lookup = self._lookups[sequence]
        if sequence in self._known:
            lookup.catch_up(tokens)
            return
        lookup.begin(tokens)
        self._known.add(sequence)

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        proposals = []
        for turn in turns:
            self.prepare(turn.sequence, turn.tokens)
            proposals.append(self._lookups[turn.sequence].propose(turn.tokens, turn.gamma, turn.most_nodes))
        return proposals

    def ahead(self, pending: Callable[[], bool]) -> None:
        pass

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        return ()
