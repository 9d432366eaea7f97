"""What a head's cache holds of each text, and the hidden states that its rows read.

The row about a token reads what the target made of the token before it, which a pass brings, or behind proposals what
the head itself gave there. So a text is known as far as the target has read it, and a row is in the cache, or waits for
the next step that feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from offload_runtime.core import TokenTree
from offload_runtime.runners.draft_kv import CATCH_UP_TOKENS, REWRITTEN_TOKENS, DraftKVState
from offload_runtime.runners.model_runner import ModelRunner

# Tokens that the first step of a chain feeds: what was accepted is read again, and few rows cost as much as one.
HEAD_CATCH_UP_TOKENS = 8
# Of every sequence what the head gave behind the text's last token, in a step over a tree and in a chain.
_OWN_ROWS = 2
Ints = TypeVar("Ints", int, torch.Tensor)


def hidden_store_rows(batch: int, num_places: int) -> int:
    """Return the rows of a `HiddenStore`, arguments as there."""
    return batch * (_OWN_ROWS + num_places + CATCH_UP_TOKENS) + 1


class HiddenStore:
    """Holds hidden states on the device, in a tensor that never moves. Each has a number, on the device where slots and
    places are.

    Args:
        rows: Where they are: [hidden_store_rows, width].
        batch: Sequences.
        num_places: Nodes of a sequence's tree that can have keys at a time.

    Attributes:
        rows: As given, zeros at first.
        width: Of each.
        unused: The number of one that nobody reads.
        chains: [batch] int64: by sequence what a chain's last step gave.
    """

    def __init__(self, rows: torch.Tensor, *, batch: int, num_places: int) -> None:
        assert len(rows) == hidden_store_rows(batch, num_places)
        self.rows, self.width, self.unused = rows.zero_(), rows.shape[1], len(rows) - 1
        self._stride, self._first_of_text = (len(rows) - 1) // batch, _OWN_ROWS + num_places
        self.chains = torch.arange(1, len(rows), self._stride, device=rows.device)

    def of_root(self, slot: int) -> int:
        """Return what stands for the text's last token, in rows about what may follow it."""
        return slot * self._stride

    def of_place(self, slot: Ints, place: Ints) -> Ints:
        """Return what stands for a node."""
        return slot * self._stride + _OWN_ROWS + place

    def of_text(self, slot: Ints, position: Ints) -> Ints:
        """Return what the target made of a token, one of the last `CATCH_UP_TOKENS` that were written."""
        return slot * self._stride + self._first_of_text + position % CATCH_UP_TOKENS

    def text(self, slot: int, position: int, count: int) -> list[torch.Tensor]:
        """Return what stands for tokens in a row, in up to two parts."""
        first, end = self.of_text(slot, 0), self.of_text(slot, 0) + CATCH_UP_TOKENS
        at = self.of_text(slot, position)
        assert count <= CATCH_UP_TOKENS
        return [self.rows[at : min(at + count, end)], self.rows[first : max(first, first + at + count - end)]]


class HeadKVState(DraftKVState):
    """Knows the texts of all sequences as far as the target has read them, and which rows the head's cache has.

    The cache holds rows about all tokens but the first, or about those behind the first of which the target's hidden
    state was known, as `starts` says. Rows are told by `observe`, behind `prepare`; they wait in the store while they
    are few, for a step that feeds them.

    Args:
        runner: Of the head.
        batch: Sequences.
        hidden: What its rows read.
    """

    def __init__(self, runner: ModelRunner, *, batch: int, hidden: HiddenStore) -> None:
        super().__init__(runner, batch=batch)
        self._hidden, self.is_shifted = hidden, True
        self._starts = self.starts = [1] * batch
        self._prompts: list[Sequence[int]] = [()] * batch
        # The tokens behind those that the cache has, whose rows only have to be fed.
        self._waiting: list[list[int]] = [[] for _ in range(batch)]

    def knows(self, slot: int, tokens: Sequence[int]) -> bool:
        return self._starts[slot] < len(tokens) == len(self._cached[slot]) + len(self._waiting[slot])

    def first_needed(self, slot: int, tokens: Sequence[int]) -> int:
        self._agreed[slot] = 0
        known = self.num_known(slot, tokens)
        return known - 1 if known > self._starts[slot] else len(tokens)

    def num_known(self, slot: int, tokens: Sequence[int]) -> int:
        """Return the leading tokens of a text of which rows are in the cache or wait, or are before the first row."""
        cached, waiting, cache = self._cached[slot], self._waiting[slot], self._runner.cache
        shared = self._num_shared(slot, tokens)
        if shared < len(cached):
            return shared
        if shared < len(tokens) and cache.length(slot) + self._starts[slot] > shared:
            cached.append(tokens[shared])  # it was restored, and so was the row about whatever came next
            shared += 1
        pairs = enumerate(zip(waiting, tokens[shared:], strict=False))
        most = min(len(waiting), len(tokens) - shared)
        return shared + next((place for place, (one, other) in pairs if one != other), most)

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        self._prompts[slot] = tokens
        known, cached = self.num_known(slot, tokens), self._cached[slot]
        if known < self._starts[slot]:
            self._restart(slot, 1)
            return
        del self._waiting[slot][max(0, known - len(cached)) :]
        del cached[known:]
        self._set_length(slot, len(cached))

    def _restart(self, slot: int, start: int) -> None:
        """Begin with the row about token `start` of a prompt."""
        # First, so that an interruption never leaves it longer than the cache.
        self._cached[slot], self._waiting[slot] = [], []
        self._runner.cache.truncate(slot, 0)
        self._starts[slot], self._agreed[slot] = start, 0
        self._cached[slot] = list(self._prompts[slot][:start])

    @torch.inference_mode()
    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Take the target's hidden states of tokens from `position` on, [n, width], and the tokens that follow each.

        What lies behind these is forgotten. If those of tokens before it are not known the head begins anew here.
        """
        if position >= len(self._cached[slot]) + len(self._waiting[slot]):
            if position >= len(self._prompts[slot]):
                return
            self._restart(slot, position + 1)
        cached, waiting = self._cached[slot], self._waiting[slot]
        del waiting[max(0, position + 1 - len(cached)) :]
        known = max(0, len(cached) - 1 - position)  # the target has read again what is in the cache
        tokens, hidden = tokens[known:], hidden[known:]
        if len(cached) + len(waiting) + len(tokens) - self._starts[slot] > self._runner.cache.capacity_tokens:
            return
        if len(waiting) + len(tokens) > CATCH_UP_TOKENS:
            parts = [*self._hidden.text(slot, len(cached) - 1, len(waiting)), hidden[:-1]]
            self._read(slot, [*waiting, *tokens[:-1]], torch.cat(parts))
            tokens, hidden = tokens[-1:], hidden[-1:]
        if tokens:
            parts = self._hidden.text(slot, len(cached) + len(waiting) - 1, len(tokens))
            for part, new in zip(parts, hidden.split([*map(len, parts)]), strict=True):
                part.copy_(new)
            waiting += tokens

    @torch.inference_mode()
    def catch_up(self, slot: int, tokens: Sequence[int], most: int = REWRITTEN_TOKENS) -> Sequence[int]:
        """As of a draft: of a text that it `knows`, or of none."""
        if not tokens:
            self._prompts[slot] = ()
            self._restart(slot, 1)
            return ()
        assert self.knows(slot, tokens)
        cached, waiting = self._cached[slot], self._waiting[slot]
        if (count := len(tokens) - most - len(cached)) > 0:
            self._read(slot, waiting[:count], torch.cat(self._hidden.text(slot, len(cached) - 1, count)))
        if len(cached) == len(tokens):  # steps ask about the last token
            waiting.append(cached.pop())
        self._set_length(slot, len(cached))
        return tokens[len(cached) :]

    def learned(self, slot: int, newest: Sequence[int]) -> None:
        super().learned(slot, newest)
        del self._waiting[slot][: len(newest)]

    def num_held(self, slot: int, tokens: Sequence[int]) -> int:
        """Return how many rows of a text the cache has, from its first one on, with those that waited."""
        if self._starts[slot] > 1:
            return 0
        cached, waiting = self._cached[slot], self._waiting[slot]
        if waiting:
            if self._hidden.rows.is_cuda:  # drafting has a stream of its own
                torch.cuda.synchronize(self._hidden.rows.device)
            self._read(slot, waiting[:], torch.cat(self._hidden.text(slot, len(cached) - 1, len(waiting))))
        self._agreed[slot] = 0
        return max(0, min(self._num_shared(slot, tokens) - 1, self._runner.cache.length(slot)))

    @torch.inference_mode()
    def _read(self, slot: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Put the rows about tokens behind those in the cache, of which the first ones waited."""
        cache, runner, size = self._runner.cache, self._runner, self._runner.chunk_tokens
        self._set_length(slot, len(self._cached[slot]))
        for first in range(0, len(tokens), size):
            piece = tokens[first : first + size]
            cache.begin_window([slot], [len(piece)], [slot])
            rows = runner.rows([TokenTree(tuple(self._clamped(piece)))], [cache.length(slot)], [slot])
            runner.write_rows(replace(rows, hidden=hidden[first : first + size]))
            self.learned(slot, piece)
