"""Shapes of the steps of a `DraftTree`: on CUDA few of them, as every one is a graph, and those that come next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.runners.step_graph import graph_reach

# Deepest node below the text.
MOST_DEPTH = 256
# On CUDA a step is about few rows of a sequence or as many as there may be, and counts ancestors up to one of these.
_FEW_ROWS = 8
DEPTHS = (128, MOST_DEPTH)
# Keys that all queries of a program read together come in so many blocks at least: in few, reading them for each query
# on its own takes as long.
LEAST_SHARED_BLOCKS = 4


@dataclass(frozen=True)
class StepShape:
    """All that the pass of a step depends on besides device memory.

    Attributes:
        batch: Sequences.
        rows: Of each of them.
        depth: Most ancestors that a row may have.
        reach: Most tokens of a text and a path behind it.
        committed: Tokens that every text has at least.
    """

    batch: int
    rows: int
    depth: int
    reach: int
    committed: int

    @property
    def kind(self) -> tuple[int, int, int, bool, bool]:
        """Steps of a kind are made of the same kernels."""
        return self.batch, self.rows, self.depth, self.reach > BLOCK_TOKENS, self.committed >= BLOCK_TOKENS


@dataclass(frozen=True)
class StepShapes:
    """The shapes that there are.

    Args:
        capacity_tokens: Of a text and a path behind it.
        rounded: Up to few shapes, for graphs; False takes them as they are.
    """

    capacity_tokens: int
    rounded: bool

    def fitting(self, batch: int, rows: int, depth: int, reach: int, committed: int, *, width: int) -> StepShape:
        """The shape of a step: as `StepShape` says, in tokens; `width` rows of a sequence are the most."""
        if not self.rounded:
            return StepShape(batch, rows, depth, reach, committed)
        rows = min(_FEW_ROWS, width) if rows <= _FEW_ROWS else width
        depth = next(most for most in DEPTHS if depth <= most)
        return StepShape(batch, rows, depth, *self._span(reach, committed))

    def expected(self, lengths: Sequence[int], further: int, *, width: int, deepest: int) -> Iterator[StepShape]:
        """What steps are like about texts of these lengths, now and until they have `further` more tokens.

        Args:
            lengths: In tokens, up to the capacity.
            further: In tokens.
            width: Most rows of a sequence.
            deepest: Ancestors that rows have at the most.
        """
        shortest, longest = min(lengths), max(lengths)
        # Deeper than a tree ever is, there would be more of them than graphs are kept.
        further = min(further, MOST_DEPTH, self.capacity_tokens - longest)
        for depth, least in zip(DEPTHS, (0, *DEPTHS), strict=False):  # the root alone has no path
            if depth > deepest:
                return
            spans = dict.fromkeys(
                self._span(min(longest + more + path, self.capacity_tokens), shortest + more)
                for more in range(further + 1)
                for path in (least, depth)
            )
            for reach, committed in spans:
                for rows in (width, 1):
                    yield self.fitting(len(lengths), rows, depth, reach, committed, width=width)

    def samples(self) -> Iterator[tuple[int, int]]:
        """A text's length and a path's behind it, in tokens, for every kind of steps about one text."""
        for path in (1, *(shorter + 1 for shorter in DEPTHS[:-1])):
            for length in (1, BLOCK_TOKENS, LEAST_SHARED_BLOCKS * BLOCK_TOKENS):
                if length + path <= self.capacity_tokens:
                    yield length, path

    def _span(self, reach: int, committed: int) -> tuple[int, int]:
        reach = graph_reach(reach, self.capacity_tokens)
        quarter = max(LEAST_SHARED_BLOCKS, reach // BLOCK_TOKENS // 4) * BLOCK_TOKENS
        return reach, committed // quarter * quarter
