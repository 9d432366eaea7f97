"""Where guesses come from: the context itself (prompt lookup) or a small draft model.

A proposer is shown the whole sequences each time and finds out by itself what of its earlier guesses was kept. It
serves all sequences of a round at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offload_runtime.config import SamplingParams
from offload_runtime.runners import DraftModel, DraftRunner
from offload_runtime.speculation.acceptance import Acceptance


@dataclass(frozen=True)
class Turn:
    """What one sequence brings to a round.

    `tokens` is the whole sequence so far, whose last token is not in the target's cache yet; up to `gamma` more are
    proposed. `sequence` is its batch row in every cache, and the noise's sequence.
    """

    sequence: int
    tokens: Sequence[int]
    gamma: int


class Proposer(Protocol):
    """Guesses what the target will say, for several sequences at once."""

    @property
    def name(self) -> str | None:
        """Whose guesses they are, as in `Acceptance.proposed_by`; None where there are none."""

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        """Called before a generation with the way its tokens will be chosen: of sequences 0 to `num_sequences` - 1."""

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence begins with `tokens`: do now what would hold up the first proposals."""

    def propose(self, turns: Sequence[Turn]) -> list[list[int]]:
        """For each turn up to `gamma` (at least 1) tokens that may follow; none when there is no idea.

        The turns are of different sequences, in any order; sequences without one have finished or wait.
        """

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        """What levels of its own have decided about a sequence since `start`, the first level first. May wait for the
        device."""


class NoProposer:
    """Plain decoding."""

    name = None

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        pass

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, turns: Sequence[Turn]) -> list[list[int]]:
        return [[] for _ in turns]

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        return ()


class NgramLookup:
    """Prompt lookup in one sequence: what followed the last occurrence of the sequence's own ending.

    The longest of `max_ngram` to `min_ngram` ending tokens that occurred before decides (Saxena, "Prompt Lookup
    Decoding", 2023). An index of all n-grams grows with the sequence, so a lookup does not search.
    """

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        # n-gram -> index of the token after its latest occurrence that something follows
        self._followers: dict[tuple[int, ...], int] = {}

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens that may follow `tokens`, or none."""
        self.catch_up(tokens)
        for size in self._sizes:
            if len(tokens) <= size:
                continue
            start = self._followers.get(tuple(self._tokens[-size:]))
            if start is not None:
                return self._copy_from(start, count)
        return []

    def _copy_from(self, start: int, count: int) -> list[int]:
        """Tokens from `start` on; past the end the guess repeats itself, as text that loops does."""
        period = len(self._tokens) - start
        return [self._tokens[start + offset % period] for offset in range(count)]

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Enter what is new into the index."""
        known = len(self._tokens)
        if list(tokens[:known]) != self._tokens:  # another sequence, or one that was cut
            # In this order: whatever interrupts it, no follower is known that the tokens do not have.
            self._followers.clear()
            self._tokens.clear()
            known = 0
        for index in range(known, len(tokens)):
            # The n-grams that end right before `index` now have a follower.
            for size in self._sizes:
                if index >= size:
                    self._followers[tuple(self._tokens[index - size : index])] = index
            self._tokens.append(tokens[index])


class NgramProposer:
    """An `NgramLookup` for every sequence."""

    name = "ngram"

    def __init__(self) -> None:
        self._lookups: defaultdict[int, NgramLookup] = defaultdict(NgramLookup)

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        pass

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        self._lookups[sequence].catch_up(tokens)

    def propose(self, turns: Sequence[Turn]) -> list[list[int]]:
        return [self._lookups[turn.sequence].propose(turn.tokens, turn.gamma) for turn in turns]

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        return ()


class DraftProposer:
    """A small model on the compute device guesses with the target's own noise; see `DraftModel`.

    Args:
        draft: Runner of the small model; the rows of its cache are the target's sequences.
        vocab_size: Of the target; what the draft's padded vocabulary has beyond it is never proposed.
        draft_vocab_size: Rows of the draft's embedding.
        batch: Sequences.
    """

    name = "draft"

    def __init__(self, draft: DraftRunner, *, vocab_size: int, draft_vocab_size: int, batch: int = 1) -> None:
        self.model = DraftModel(draft, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, batch=batch)

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        self.model.start(params, num_sequences)

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        self.model.prepare(sequence, tokens)

    def propose(self, turns: Sequence[Turn]) -> list[list[int]]:
        texts = {turn.sequence: turn.tokens for turn in turns}
        guesses = self.model.propose(texts, {turn.sequence: turn.gamma for turn in turns})
        return [guesses[turn.sequence] for turn in turns]

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        return ()
