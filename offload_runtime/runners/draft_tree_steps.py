"""Shapes of the steps of a `DraftTree`: on CUDA few of them, as every one is a graph, and those that come next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import ModelConfig
from offload_runtime.memory import packed_words
from offload_runtime.runners.graphs import graph_reach, step_activation_bytes, step_graph_bytes

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


# Rows of a step: what the products of few rows take.
STEP_ROWS = 32
# Children of a node: the target's token is among a draft's best four 0.97 of the time in code, 0.80 in prose (T = 0.6).
CHILDREN = 8
_ROW_PARTS = 4  # token, position, slot, sequence
_LINE_PARTS = 4  # sequence, committed, start, RoPE shift


@dataclass(frozen=True)
class StepLine:
    """The rows of one sequence in a step: `known` tokens that are only fed, then `asked` nodes.

    Positions, slots and `committed` are the cache's: the text's less `start`. Keys are rotated `rope_shift` further.
    """

    sequence: int
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    paths: list[list[int]]
    known: int
    committed: int
    start: int
    rope_shift: int


def step_inputs(lines: Sequence[StepLine], shape: StepShape) -> list[list[int]]:
    """What the device is told of a step, rows filled up to the shape: tokens, positions (-1 for what only fills up),
    slots and sequences by row, sequences, committed, starts and RoPE shifts by line, ancestors."""
    rows, depth = shape.rows, shape.depth
    columns: list[list[int]] = [[] for _ in range(_ROW_PARTS)]
    ancestors: list[int] = []
    for line in lines:
        padding = rows - len(line.tokens)
        parts = (line.tokens, line.positions, line.slots, [line.sequence] * len(line.tokens))
        for column, part, filler in zip(columns, parts, (0, -1, 0, line.sequence), strict=True):
            column += part + [filler] * padding
        for path in line.paths:
            ancestors += path + [0] * (depth - len(path))
        ancestors += [0] * (depth * padding)
    of_lines = [(line.sequence, line.committed, line.start, line.rope_shift) for line in lines]
    return [*columns, *map(list, zip(*of_lines, strict=True)), ancestors]


def input_sizes(batch: int, rows: int, depth: int) -> list[int]:
    """Integers of each part of the inputs of a step about `rows` rows in all."""
    return [rows] * _ROW_PARTS + [batch] * _LINE_PARTS + [rows * depth]


def tree_slots(tree_nodes: int) -> int:
    """Spare slots of each sequence for proposals of `tree_nodes`.

    Nodes of a window, mostly as many as it has, and many times as many of what is drafted past it while it is
    verified: a pass of a streamed target leaves time for thousands. A draft of 30 layers had used up 8 times as many as
    a window's (256) after two thirds of a pass of 0.29 s.
    """
    return 12 * tree_nodes + STEP_ROWS


def draft_graph_bytes(config: ModelConfig, element_bytes: int, *, batch: int, trees: bool) -> int:
    """Device bytes of the CUDA graphs of a draft's steps; `trees`: also of those that grow trees, on a stream and in a
    pool of their own."""
    rows = 2 * batch  # the first step of a draft feeds two tokens
    nbytes = step_graph_bytes(config) + step_activation_bytes(config, element_bytes, rows=rows)
    if trees:
        nbytes += step_graph_bytes(config) + tree_buffer_bytes(config, element_bytes, batch=batch)
        nbytes += step_activation_bytes(config, element_bytes, rows=max(STEP_ROWS, batch))
    return nbytes


def tree_buffer_bytes(config: ModelConfig, element_bytes: int, *, batch: int) -> int:
    """Device bytes of a `DraftTree` besides the cache and what a step computes on its way."""
    rows = max(STEP_ROWS, batch)
    words = packed_words(input_sizes(batch, rows, MOST_DEPTH)) + rows * 2 * CHILDREN + rows * config.head_dim // 2
    return 4 * words + rows * config.vocab_size * element_bytes
