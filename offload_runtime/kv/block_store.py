"""Blocks of keys and values that slots have lost, in ordinary host memory, found by the tokens up to their ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

# A block of a sequence: by layer its keys and values, [2, H_kv, 256, D], host.
SavedBlock = Mapping[int, torch.Tensor]


class _Key(NamedTuple):
    """What a block is found by: the block before it, or the kind of the chain that it begins, and its own tokens."""

    before: Hashable
    tokens: tuple[int, ...]


class _Held(NamedTuple):
    """A block, and a number that no other one has or ever had."""

    number: int
    block: SavedBlock


class BlockStore:
    """Holds blocks up to a limit; those that were used least recently go first.

    Sequences with the same beginning share the blocks of that, and tokens are compared one by one, never by a hash
    alone. A block is used whenever one behind it is, so what goes first has none behind it.

    Args:
        most_blocks: That it holds, at least one.
    """

    def __init__(self, most_blocks: int) -> None:
        assert most_blocks > 0
        self._most_blocks, self._numbers = most_blocks, count()
        self._held: dict[_Key, _Held] = {}  # the least recently used one comes first

    def find(self, kind: Hashable, tokens: Sequence[int]) -> list[SavedBlock]:
        """The leading blocks of a sequence that are held; this uses them.

        Args:
            kind: Of its keys and values: those of another kind are others.
            tokens: Of the sequence.
        """
        chain = self._chain(kind, tokens)
        self._use(chain)
        return [self._held[key].block for key in chain]

    def put(self, kind: Hashable, tokens: Sequence[int], save: Callable[[int], SavedBlock]) -> None:
        """Hold the whole blocks of a sequence, from the first one on as many as the limit allows.

        Args:
            kind: As of `find`.
            tokens: Of the sequence.
            save: Copies a block, by its index. Called for those that are not held.
        """
        chain = self._chain(kind, tokens)
        self._use(chain)
        try:
            for index in range(len(chain), min(len(tokens) // BLOCK_TOKENS, self._most_blocks)):
                if len(self._held) >= self._most_blocks:  # of the chain there are fewer
                    del self._held[next(iter(self._held))]
                key = self._key(kind, tokens, index, chain)
                self._held[key] = _Held(next(self._numbers), save(index))
                chain.append(key)
        finally:
            self._use(chain)

    def _chain(self, kind: Hashable, tokens: Sequence[int]) -> list[_Key]:
        """The leading blocks of a sequence that are held."""
        chain: list[_Key] = []
        for index in range(len(tokens) // BLOCK_TOKENS):
            key = self._key(kind, tokens, index, chain)
            if key not in self._held:
                break
            chain.append(key)
        return chain

    def _key(self, kind: Hashable, tokens: Sequence[int], index: int, chain: Sequence[_Key]) -> _Key:
        """Of block `index`, which follows the blocks of a chain."""
        before = self._held[chain[-1]].number if chain else ("first", kind)
        return _Key(before, tuple(tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]))

    def _use(self, chain: Sequence[_Key]) -> None:
        """These were used most recently, the first one last."""
        for key in reversed(chain):
            self._held[key] = self._held.pop(key)
