"""Shapes of steps over trees: what is asked for has been expected."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.runners.graphs import DEPTHS, MOST_DEPTH, MOST_GRAPHS, StepShape, StepShapes

CAPACITY_TOKENS = 4096
NEAR_BOUNDARIES = st.builds(
    lambda block, before: min(max(1, block * BLOCK_TOKENS - before), CAPACITY_TOKENS),
    st.integers(0, 16),
    st.integers(-5, 150),
)


@given(
    lengths=st.lists(NEAR_BOUNDARIES, min_size=1, max_size=3), more=st.integers(0, 63),
    path=st.integers(0, DEPTHS[0]), rows=st.integers(1, 32), further=st.integers(0, 63),
)  # fmt: skip
@example(lengths=[BLOCK_TOKENS], more=0, path=0, rows=1, further=0)  # the root alone
def test_what_is_asked_of_texts_that_grow_was_expected(
    lengths: list[int], more: int, path: int, rows: int, further: int
) -> None:
    shapes = StepShapes(CAPACITY_TOKENS, rounded=True)
    width = 32 // len(lengths)
    more = min(more, further, CAPACITY_TOKENS - max(lengths))
    reach = min(max(lengths) + more + path, CAPACITY_TOKENS)
    asked = shapes.fitting(len(lengths), min(rows, width), max(path, 1), reach, min(lengths) + more, width=width)
    assert asked.reach >= reach and asked.rows >= min(rows, width) and asked.depth >= path
    assert asked.committed <= min(lengths) + more
    expected = set(shapes.expected(lengths, further, width=width, deepest=DEPTHS[0]))
    assert asked in expected and len(expected) <= 8


@pytest.mark.parametrize("deepest", DEPTHS)
def test_deeper_steps_than_there_are_are_not_expected(deepest: int) -> None:
    shapes = StepShapes(CAPACITY_TOKENS, rounded=True)
    assert {shape.depth for shape in shapes.expected([500], 30, width=32, deepest=deepest)} == {
        depth for depth in DEPTHS if depth <= deepest
    }


@given(st.lists(NEAR_BOUNDARIES, min_size=1, max_size=3), st.integers(0, 5000))
@example([238], 3000)
def test_what_is_expected_is_kept(lengths: list[int], further: int) -> None:
    """Else graphs of what is expected would drive each other out, and be captured again and again."""
    shapes = StepShapes(2 * CAPACITY_TOKENS, rounded=True)
    assert len(set(shapes.expected(lengths, further, width=10, deepest=MOST_DEPTH))) <= MOST_GRAPHS


def test_without_graphs_a_step_is_as_large_as_it_is() -> None:
    shape = StepShapes(CAPACITY_TOKENS, rounded=False).fitting(2, 3, 5, 77, 70, width=16)
    assert shape == StepShape(2, 3, 5, 77, 70)


def test_kinds_tell_what_needs_other_kernels_apart() -> None:
    shapes, spans = StepShapes(CAPACITY_TOKENS, rounded=True), ((100, 10), (300, 10), (700, 600), (1700, 1600))
    kinds = {
        shapes.fitting(1, rows, depth, reach, committed, width=32).kind
        for rows in (1, 32) for depth in (3, 200) for reach, committed in spans
    }  # fmt: skip
    assert len(kinds) == 2 * 2 * 3
