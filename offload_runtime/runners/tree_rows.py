"""The rows of a step of a `DraftTree`, and how they lie in the one tensor that tells the device about them.

Pure arithmetic but for `cut`, which captured steps run too. On the way of a tree of candidates to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_runtime.config import ModelConfig
from offload_runtime.runners.tree_shapes import MOST_DEPTH, StepShape

# Rows of a step: what the products of few rows take.
STEP_ROWS = 32
# Children of a node: the target's token is among a draft's best four 0.97 of the time in code, 0.80 in prose (T = 0.6).
CHILDREN = 8
_ROW_PARTS = 4  # token, position, slot, sequence
_LINE_PARTS = 4  # sequence, committed, start, RoPE shift
_ALIGNED_WORDS = 4


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


def packed(lines: Sequence[StepLine], shape: StepShape) -> tuple[list[int], list[int]]:
    """Rows filled up to the shape: their positions, -1 for what only fills up, and all that `cut` finds again."""
    batch, rows, depth = shape.batch, shape.rows, shape.depth
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
    flat: list[int] = []
    of_lines = [(line.sequence, line.committed, line.start, line.rope_shift) for line in lines]
    for part in (*columns, *map(list, zip(*of_lines, strict=True)), ancestors):
        flat += part + [0] * (-len(part) % _ALIGNED_WORDS)
    assert len(flat) == input_words(batch, batch * rows, depth)
    return columns[1], flat


def _aligned(words: int) -> int:
    return -(-words // _ALIGNED_WORDS) * _ALIGNED_WORDS


def input_words(batch: int, rows: int, depth: int) -> int:
    """Words of the inputs of a step about `rows` rows in all."""
    return _ROW_PARTS * _aligned(rows) + _LINE_PARTS * _aligned(batch) + _aligned(rows * depth)


def cut(inputs: torch.Tensor, shape: StepShape) -> list[torch.Tensor]:
    """The parts of a step's inputs: tokens, positions, slots and sequences by row, sequences, committed, starts and
    RoPE shifts by line, ancestors."""
    rows = shape.batch * shape.rows
    sizes = [rows] * _ROW_PARTS + [shape.batch] * _LINE_PARTS + [rows * shape.depth]
    parts, offset = [], 0
    for size in sizes:
        parts.append(inputs[offset : offset + size])
        offset += _aligned(size)
    return parts


def tree_slots(tree_nodes: int) -> int:
    """Spare slots of each sequence for proposals of `tree_nodes`.

    Nodes of a window, mostly as many as it has, and many times as many of what is drafted past it while it is
    verified: a pass of a streamed target leaves time for thousands. A draft of 30 layers had used up 8 times as many as
    a window's (256) after two thirds of a pass of 0.29 s.
    """
    return 12 * tree_nodes + STEP_ROWS


def tree_buffer_bytes(config: ModelConfig, element_bytes: int, *, batch: int) -> int:
    """Device bytes of a `DraftTree` besides the cache and what a step computes on its way."""
    rows = max(STEP_ROWS, batch)
    words = input_words(batch, rows, MOST_DEPTH) + rows * 2 * CHILDREN + rows * config.head_dim // 2
    return 4 * words + rows * config.vocab_size * element_bytes
