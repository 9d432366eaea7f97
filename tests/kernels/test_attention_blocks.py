"""Attention in pieces: however a cache is cut, and wherever its blocks lie, the bits are those of the whole.

Everything runs on the CPU path and in Triton's interpreter without a GPU, natively with one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations, pairwise

import pytest
import torch
from offload_runtime_kernels import attention as ops
from offload_runtime_kernels.attention_triton import attend_blocks_triton, attention_triton, finish_attention_triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from tests.helpers.attention_cases import TREE_PARENTS, AttentionCase, chain_rows, piece, ring, tree_rows
from tests.helpers.kernel_conditions import assert_within, poisoned_outputs


@dataclass(frozen=True)
class Version:
    """One implementation: the public functions on whatever device there is, or the Triton kernels by name."""

    whole: Callable[..., torch.Tensor]
    attend: Callable[..., None]
    finish: Callable[[torch.Tensor, ops.AttentionState, ops.AttentionParams], torch.Tensor]

    def pieces(
        self, case: AttentionCase, rows: ops.QueryRows, pieces: list[tuple[KVBlocks, range]], window: int | None = None
    ) -> torch.Tensor:
        """Attend to blocks where they lie, one piece after the other."""
        with poisoned_outputs():
            state = ops.AttentionState.empty(case.q)
            for kv, blocks in pieces:
                self.attend(case.q, kv, rows, blocks, state, case.params(window))
            return self.finish(case.q, state, case.params())

    def all_at_once(self, case: AttentionCase, rows: ops.QueryRows, window: int | None = None) -> torch.Tensor:
        with poisoned_outputs():
            return self.whole(case.q, case.kv, rows, case.params(window))


PUBLIC = Version(ops.attention, ops.attend_blocks, ops.finish_attention)
TRITON = Version(attention_triton, attend_blocks_triton, finish_attention_triton)
versions = pytest.mark.parametrize("version", [PUBLIC, TRITON], ids=["public", "triton"])

# Windows over two and a bit blocks, with rows of padding.
STARTS, COUNTS, BLOCKS = (530, 254), (5, 3), 3


def _case(num_queries: int = 5, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> AttentionCase:
    return AttentionCase.random(
        batch=batch, num_queries=num_queries, num_kv_heads=2, group=3, head_dim=16, capacity=4 * BLOCK_TOKENS,
        dtype=dtype,
    )  # fmt: skip


def _cuts(end: int) -> Iterator[list[range]]:
    """Every way to cut blocks 0 to `end` - 1 into consecutive ranges."""
    inner = range(1, end)
    for marks in chain.from_iterable(combinations(inner, count) for count in range(end)):
        edges = (0, *marks, end)
        yield [range(a, b) for a, b in pairwise(edges)]


@pytest.mark.slow
@versions
@pytest.mark.parametrize("window", [None, 300])
def test_cutting_at_any_block_boundary_changes_no_bit(version: Version, window: int | None) -> None:
    case, rows = _case(), chain_rows(STARTS, COUNTS, max_length=700)
    case = case.poisoned(rows)
    expected = version.all_at_once(case, rows, window)
    assert_within(expected, _case().expected(rows, window), atol=1e-5 * _case().largest_value)
    for cut in _cuts(BLOCKS):
        out = version.pieces(case, rows, [(piece(case.kv, blocks), blocks) for blocks in cut], window)
        assert torch.equal(out, expected), f"cut {cut}"
        assert bool((out[rows.positions < 0] == 0).all())


@versions
def test_sinks_take_part_once_however_the_keys_are_cut(version: Version) -> None:
    case, rows = _case().capped_with_sinks(), chain_rows((260, 254), COUNTS)
    expected = version.all_at_once(case, rows)
    assert_within(expected, case.expected(rows), atol=1e-5 * case.largest_value)
    out = version.pieces(case, rows, [(piece(case.kv, blocks), blocks) for blocks in (range(1), range(1, 2))])
    assert torch.equal(out, expected)
    assert bool((out[rows.positions < 0] == 0).all())
    alone = chain_rows((100, 251), (4, 5))  # the only block is not merged
    assert torch.equal(version.all_at_once(case, alone), version.pieces(case, alone, [(case.kv, range(1))]))


@pytest.mark.few(1)
@versions
@pytest.mark.parametrize("window", [None, 70])
def test_a_tree_behind_pieces_and_a_ring_has_the_bits_of_the_whole(version: Version, window: int | None) -> None:
    case = _case(len(TREE_PARENTS), batch=1)
    rows = tree_rows(TREE_PARENTS, (764,), position_order=(3, 0, 8, 1, 7, 2, 5, 4, 6))  # across blocks 2 and 3
    expected = version.all_at_once(case, rows, window)
    assert_within(expected, case.expected(rows, window), atol=1e-5 * case.largest_value)
    for cut in _cuts(2):
        pieces = [(piece(case.kv, blocks), blocks) for blocks in cut]
        newest = ring(case.kv, range(2, 4), 3)
        out = version.pieces(case, rows, [*pieces, (newest, range(2, 3)), (newest, range(3, 4))], window)
        assert torch.equal(out, expected), f"cut {cut}"


@pytest.mark.few(1)
@versions
@pytest.mark.parametrize("window", [None, 40])
def test_a_window_in_the_only_block_has_the_bits_of_a_merge(version: Version, window: int | None) -> None:
    case = _case()
    for rows in (chain_rows((100, 251), (4, 5)), chain_rows((0, 30), (1, 5))):
        expected = version.pieces(case, rows, [(case.kv, range(1))], window)
        assert torch.equal(version.all_at_once(case, rows, window), expected)
        assert_within(expected, case.expected(rows, window), atol=1e-5 * case.largest_value)
    tree_case = _case(len(TREE_PARENTS), batch=1)
    tree = tree_rows(TREE_PARENTS, (200,), position_order=(3, 0, 8, 1, 7, 2, 5, 4, 6))
    expected = version.pieces(tree_case, tree, [(tree_case.kv, range(1))], window)
    assert torch.equal(version.all_at_once(tree_case, tree, window), expected)


@pytest.mark.few(2)
@versions
@pytest.mark.parametrize("window", [1, 70])
def test_splits_that_are_counted_from_the_window_have_the_bits_of_all(version: Version, window: int) -> None:
    case, rows = _case().capped_with_sinks(), chain_rows((740, 509), (5, 4))  # the second one's reach over a block
    expected = version.pieces(case, rows, [(case.kv, range(3))], window)
    assert torch.equal(version.all_at_once(case, rows, window), expected)
    assert_within(expected, case.expected(rows, window), atol=1e-5 * case.largest_value)


# From here on: natively, in bf16.


def _big_case(num_queries: int) -> AttentionCase:
    return AttentionCase.random(
        batch=1, num_queries=num_queries, num_kv_heads=2, group=4, head_dim=128, capacity=3000, dtype=torch.bfloat16
    )


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("width", [1, 17, 64])
def test_bits_of_pieces_and_rings_in_bf16(width: int, window: int | None) -> None:
    case, rows = _big_case(width), chain_rows((2900,), (width,))
    last = -(-(2900 + width) // BLOCK_TOKENS)
    expected = TRITON.all_at_once(case, rows, window)
    for step in (1, 3, 8):
        cut = [range(start, min(start + step, 10)) for start in range(0, 10, step)]
        pieces = [(piece(case.kv, blocks), blocks) for blocks in cut]
        out = TRITON.pieces(case, rows, [*pieces, (ring(case.kv, range(10, last), 3), range(10, last))], window)
        assert torch.equal(out, expected), f"step {step}"


@pytest.mark.gpu
def test_bits_of_a_tree_behind_pieces_in_bf16() -> None:
    case, rows = _big_case(len(TREE_PARENTS)), tree_rows(TREE_PARENTS, (2810,))
    expected = TRITON.all_at_once(case, rows)
    pieces = [(piece(case.kv, blocks), blocks) for blocks in (range(4), range(4, 5), range(5, 9))]
    newest = ring(case.kv, range(9, 12), 4)
    assert torch.equal(TRITON.pieces(case, rows, [*pieces, (newest, range(9, 12))]), expected)


@pytest.mark.gpu
def test_attending_in_pieces_can_be_captured_in_a_graph() -> None:
    case, rows = _big_case(17), chain_rows((2900,), (17,))
    pieces = [(piece(case.kv, blocks), blocks) for blocks in (range(4), range(4, 12))]
    expected = TRITON.pieces(case, rows, pieces)

    def run() -> torch.Tensor:
        state = ops.AttentionState.empty(case.q)
        for kv, blocks in pieces:
            ops.attend_blocks(case.q, kv, rows, blocks, state, case.params())
        return ops.finish_attention(case.q, state, case.params())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    graph.replay()
    assert torch.equal(out, expected)
