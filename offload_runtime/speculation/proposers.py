"""Where guesses come from: the context itself (prompt lookup) or a small draft model.

A proposer is shown the whole sequence each time and finds out by itself what of its earlier guesses was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offload_runtime.config import SamplingParams
from offload_runtime.runners import DraftModel, DraftRunner
from offload_runtime.speculation.acceptance import Acceptance


class Proposer(Protocol):
    """Guesses what the target will say."""

    @property
    def name(self) -> str | None:
        """Whose guesses they are, as in `Acceptance.proposed_by`; None where there are none."""

    def start(self, params: SamplingParams) -> None:
        """Called before a generation with the way its tokens will be chosen."""

    def prepare(self, tokens: Sequence[int]) -> None:
        """The sequence begins with `tokens`: do now what would hold up the first proposals."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`; none when there is no idea."""

    def counts(self) -> Sequence[Acceptance]:
        """What levels of its own have decided since `start`, the first level first. May wait for the device."""


class NoProposer:
    """Plain decoding."""

    name = None

    def start(self, params: SamplingParams) -> None:
        pass

    def prepare(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return []

    def counts(self) -> Sequence[Acceptance]:
        return ()


class NgramProposer:
    """Prompt lookup: what followed the last occurrence of the sequence's own ending.

    The longest of `max_ngram` to `min_ngram` ending tokens that occurred before decides (Saxena, "Prompt Lookup
    Decoding", 2023). An index of all n-grams grows with the sequence, so a lookup does not search.
    """

    name = "ngram"

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        # n-gram -> index of the token after its latest occurrence that something follows
        self._followers: dict[tuple[int, ...], int] = {}

    def start(self, params: SamplingParams) -> None:
        pass

    def prepare(self, tokens: Sequence[int]) -> None:
        self._catch_up(tokens)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        self._catch_up(tokens)
        for size in self._sizes:
            if len(tokens) <= size:
                continue
            start = self._followers.get(tuple(self._tokens[-size:]))
            if start is not None:
                return self._copy_from(start, count)
        return []

    def counts(self) -> Sequence[Acceptance]:
        return ()

    def _copy_from(self, start: int, count: int) -> list[int]:
        """Tokens from `start` on; past the end the guess repeats itself, as text that loops does."""
        period = len(self._tokens) - start
        return [self._tokens[start + offset % period] for offset in range(count)]

    def _catch_up(self, tokens: Sequence[int]) -> None:
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


class DraftProposer:
    """A small model on the compute device guesses with the target's own noise; see `DraftModel`.

    Args:
        draft: Runner of the small model; row `sequence` of its cache belongs to the proposer.
        vocab_size: Of the target; what the draft's padded vocabulary has beyond it is never proposed.
        draft_vocab_size: Rows of the draft's embedding.
        sequence: The target's sequence (keys the noise).
    """

    name = "draft"

    def __init__(self, draft: DraftRunner, *, vocab_size: int, draft_vocab_size: int, sequence: int = 0) -> None:
        self.model = DraftModel(draft, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, sequence=sequence)

    def start(self, params: SamplingParams) -> None:
        self.model.start(params)

    def prepare(self, tokens: Sequence[int]) -> None:
        self.model.prepare(tokens)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return self.model.propose(tokens, count)

    def counts(self) -> Sequence[Acceptance]:
        return ()
