"""Where guesses come from: the context itself (prompt lookup) or a small draft model.

A proposer is shown the whole sequence each time and finds out by itself what of its earlier guesses was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from offload_runtime.config import SamplingParams
from offload_runtime.model import PassRows, Window
from offload_runtime.sampling import sample


class Proposer(Protocol):
    """Guesses what the target will say."""

    def start(self, params: SamplingParams) -> None:
        """Called before a generation with the way its tokens will be chosen."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`; none when there is no idea."""


class NoProposer:
    """Plain decoding."""

    def start(self, params: SamplingParams) -> None:
        pass

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return []


class NgramProposer:
    """Prompt lookup: what followed the last occurrence of the sequence's own ending.

    The longest of `max_ngram` to `min_ngram` ending tokens that occurred before decides (Saxena, "Prompt Lookup
    Decoding", 2023). An index of all n-grams grows with the sequence, so a lookup does not search.
    """

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        # n-gram -> index of the token after its latest occurrence that something follows
        self._followers: dict[tuple[int, ...], int] = {}

    def start(self, params: SamplingParams) -> None:
        pass

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        self._catch_up(tokens)
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


class DraftCache(Protocol):
    """What a draft needs of its own cache."""

    capacity_tokens: int

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""

    def commit(self, sequence: int, count: int) -> None:
        """Make tentative tokens part of a sequence."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forget everything behind `length` tokens."""


class Draft(Protocol):
    """What a `DraftProposer` needs of the runner of a small model."""

    @property
    def cache(self) -> Any:
        """A `DraftCache`."""

    def prefill(
        self, sequence: int, tokens: Sequence[int], on_layer: Callable[[int, int], None] | None = None
    ) -> torch.Tensor:
        """Put tokens into the cache; logits [1, V] of the last."""

    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        """Logits [B, T, V] of a pass over windows; commits nothing."""

    def chain_rows(self, sequence: int, count: int) -> list[PassRows]:
        """Rows for `count` one-token passes behind the committed tokens."""

    def run_rows(self, rows: PassRows) -> torch.Tensor:
        """Logits [1, 1, V] of a pass over prepared rows."""


class DraftProposer:
    """A small model on the compute device guesses with the target's own noise.

    Args:
        draft: Runner of the small model; its cache's sequence 0 belongs to the proposer.
        vocab_size: Of the target; what the draft's padded vocabulary has beyond it is never proposed.
        draft_vocab_size: Rows of the draft's embedding.
        sequence: The target's sequence (keys the noise).
    """

    # More new tokens than this go through the draft as a prompt.
    _WINDOW_TOKENS = 32

    def __init__(self, draft: Draft, *, vocab_size: int, draft_vocab_size: int, sequence: int = 0) -> None:
        self._draft = draft
        self._params = SamplingParams()
        self._vocab_size = vocab_size
        self._last_token = draft_vocab_size - 1
        self._sequence = sequence
        self._cached: list[int] = []  # the tokens that the draft's cache holds

    def start(self, params: SamplingParams) -> None:
        self._params = params

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        cache: DraftCache = self._draft.cache
        count = min(count, cache.capacity_tokens - len(tokens) + 1)  # the last guess needs no place
        if count <= 0:
            return []
        logits = self._catch_up(tokens)
        position = torch.arange(len(tokens), len(tokens) + count, device=logits.device)
        sequence = torch.full_like(position, self._sequence)
        guesses = [self._choose(logits, position[:1], sequence[:1])]
        for step, rows in enumerate(self._draft.chain_rows(0, count - 1) if count > 1 else (), start=1):
            token = guesses[-1].clamp_min(0)  # -1 marks NaN logits and is no row of the embedding
            logits = self._draft.run_rows(replace(rows, tokens=token.to(rows.tokens.dtype)))[0]
            one = slice(step, step + 1)
            guesses.append(self._choose(logits, position[one], sequence[one]))
        cache.commit(0, count - 1)
        proposals: list[int] = torch.cat(guesses).tolist()  # the only wait for the device
        self._cached += proposals[:-1]
        bad = next((index for index, token in enumerate(proposals) if token < 0), count)
        return proposals[:bad]  # a draft with NaN logits has nothing to say

    def _catch_up(self, tokens: Sequence[int]) -> torch.Tensor:
        """Bring the draft's cache to all of `tokens`; logits [1, V] of the last one."""
        known = min(_common_prefix(self._cached, tokens), len(tokens) - 1)
        self._cached = self._cached[:known]  # first, so that an interruption never leaves it longer than the cache
        self._draft.cache.truncate(0, known)
        # The target's padded vocabulary may be the longer one; what the draft guesses behind such a token is no matter.
        new = [min(token, self._last_token) for token in tokens[known:]]
        if len(new) > self._WINDOW_TOKENS:
            logits = self._draft.prefill(0, new)
        else:
            logits = self._draft.verify([Window(tuple(new))], [0])[0, -1:]
            self._draft.cache.commit(0, len(new))
        self._cached = list(tokens)
        return logits

    def _choose(self, logits: torch.Tensor, position: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
        """[1] int64 on the device."""
        return sample(logits[:, : self._vocab_size], self._params, position, sequence)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(left), len(right))
    if list(left[:length]) == list(right[:length]):
        return length
    return next(index for index in range(length) if left[index] != right[index])
