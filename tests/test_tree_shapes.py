"""Shapes of steps over trees: few, each large enough for the steps that it is for, and all captured at load."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.model import PassShape
from offload_runtime.runners.graphs import MOST_DEPTH, MOST_GRAPHS, captured_shape, captured_shapes

CAPACITY_TOKENS = 8000
NEAR_BOUNDARIES = st.builds(
    lambda block, before: min(max(1, block * BLOCK_TOKENS - before), CAPACITY_TOKENS),
    st.integers(0, 31),
    st.integers(-5, 260),
)


@given(length=NEAR_BOUNDARIES, path=st.integers(0, MOST_DEPTH), rows=st.integers(1, 32), count=st.integers(1, 5))
@example(length=1, path=0, rows=1, count=1)  # the root alone
def test_every_step_about_a_text_fits_a_shape_that_was_captured(length: int, path: int, rows: int, count: int) -> None:
    width = 32 // count
    rows, reach = min(rows, width), min(length + path, CAPACITY_TOKENS)
    shape = captured_shape(PassShape(count, rows, path, reach), width=width, capacity_tokens=CAPACITY_TOKENS)
    assert shape.reach >= reach and shape.width >= rows and shape.depth >= path
    assert shape in captured_shapes(count, width=width, capacity_tokens=CAPACITY_TOKENS)


def test_what_is_captured_at_load_is_kept() -> None:
    """Else graphs would drive each other out, and be captured again and again."""
    for count in (1, 3):
        assert len(captured_shapes(count, width=32 // count, capacity_tokens=131072)) <= MOST_GRAPHS
    assert len(captured_shapes(1, width=32, capacity_tokens=2048)) == 4
    # Of each reach few rows, as many as there may be, and spines.
    assert 3 * len(captured_shapes(1, width=32, capacity_tokens=131072)) // 2 < MOST_GRAPHS
