"""Blocks of keys and values that slots have lost, in ordinary host memory, found by the tokens up to their ends.

Of a layer with a sliding window a saved text has what that reaches from the text's end: a cache need not have what is
before that. So a block is *whole*, or has the layers alone that attend to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.models.config import ModelConfig

# A block of a sequence: by layer its keys and values, [2, H_kv, 256, D], host.
SavedBlock = Mapping[int, torch.Tensor]


def first_whole_block(config: ModelConfig, length: int) -> int:
    """Return the first block that has to be whole for a text to go on behind its first `length` tokens."""
    reach = max((window for window in config.layer_windows if window is not None), default=length + 1)
    return max(0, length + 1 - reach) // BLOCK_TOKENS


def num_restorable(config: ModelConfig, whole: Sequence[bool]) -> int:
    """Return how many leading blocks of a text bring it back, of which these are whole."""
    counts = range(len(whole), 0, -1)
    return next((n for n in counts if all(whole[first_whole_block(config, n * BLOCK_TOKENS) : n])), 0)


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
        config: The model's shape.
        most_blocks: That it holds, at least one.
    """

    def __init__(self, config: ModelConfig, most_blocks: int) -> None:
        assert most_blocks > 0
        self._config, self._most_blocks, self._numbers = config, most_blocks, count()
        self._held: dict[_Key, _Held] = {}  # the least recently used one comes first

    def find(self, kind: Hashable, tokens: Sequence[int]) -> list[SavedBlock]:
        """The leading blocks that are held of a sequence and bring it back; this uses them.

        Args:
            kind: Of its keys and values: those of another kind are others.
            tokens: Of the sequence.
        """
        chain = self._chain(kind, tokens)
        blocks = [self._held[key].block for key in chain]
        count = num_restorable(self._config, [len(block) == self._config.num_layers for block in blocks])
        self._use(chain[:count])
        return blocks[:count]

    def put(self, kind: Hashable, tokens: Sequence[int], save: Callable[[int, bool], SavedBlock]) -> None:
        """Hold the full blocks of a sequence, from the first one on as many as the limit allows.

        Args:
            kind: As of `find`.
            tokens: Of the sequence.
            save: Copies a block, by its index, whole or not. Called for those that are not held so.
        """
        chain = self._chain(kind, tokens)
        self._use(chain)
        first_whole, held = first_whole_block(self._config, len(tokens)), len(chain)
        try:
            for index in range(min(len(tokens) // BLOCK_TOKENS, self._most_blocks)):
                whole = index >= first_whole
                if index >= held:
                    if len(self._held) >= self._most_blocks:  # of the chain there are fewer
                        del self._held[next(iter(self._held))]
                    key = self._key(kind, tokens, index, chain)
                    self._held[key] = _Held(next(self._numbers), save(index, whole))
                    chain.append(key)
                elif whole and len(self._held[chain[index]].block) < self._config.num_layers:
                    self._held[chain[index]] = self._held[chain[index]]._replace(block=save(index, whole))
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
