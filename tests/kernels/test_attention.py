"""Attention over the cache: the Triton kernels against plain torch, then the bits that must not depend on company."""

from dataclasses import replace

import pytest
import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.attention_triton import attention_triton
from offload_runtime_kernels.kv_blocks import KVBlocks

from tests.helpers.attention_cases import TREE_PARENTS, AttentionCase, chain_of_path, chain_rows, tree_path, tree_rows
from tests.helpers.kernel_conditions import UNIT_ROUNDOFF, assert_within, poisoned_outputs

BF16 = torch.bfloat16


def _run(
    case: AttentionCase, rows: QueryRows, *, window: int | None = None, prefill: bool = False, **limits: int
) -> torch.Tensor:
    with poisoned_outputs():
        return attention_triton(case.q, case.kv, rows, case.params(window), prefill=prefill, **limits)


def _check(case: AttentionCase, rows: QueryRows, *, window: int | None = None, prefill: bool = False) -> None:
    """Compare with the fp64 reference, with NaN everywhere that a query has no business to look."""
    out = _run(case.poisoned(rows), rows, window=window, prefill=prefill)
    # Weights are rounded to the dtype before they meet the values, and the result is rounded: each at most one
    # roundoff of the largest value, twice that for margin. In fp32 the scores' own error, about 1e-6 of a score of
    # up to 20, weighs more.
    atol = case.largest_value * (1e-5 if case.q.dtype == torch.float32 else 4 * UNIT_ROUNDOFF[case.q.dtype])
    assert_within(out, case.expected(rows, window), atol=atol)
    assert bool((out[rows.positions < 0] == 0).all())


def _ragged_case(group: int, head_dim: int, dtype: torch.dtype) -> tuple[AttentionCase, QueryRows]:
    """Two windows of different lengths and starts, on the last and first of three cached sequences."""
    rows = chain_rows((61, 3), (5, 2), slots=(2, 0))
    case = AttentionCase.random(
        batch=2, num_queries=5, num_kv_heads=2, group=group, head_dim=head_dim, capacity=90, cache_batch=3, dtype=dtype
    )
    return case, rows


@pytest.mark.few(2)
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_ragged_batch_matches_reference(group: int, head_dim: int, prefill: bool) -> None:
    case, rows = _ragged_case(group, head_dim, torch.float32)
    _check(case, rows, prefill=prefill)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("prefill", [False, True])
def test_soft_caps_and_sinks_match_the_reference(prefill: bool, window: int | None) -> None:
    case, rows = _ragged_case(3, 96, torch.float32)
    _check(case.capped_with_sinks(), rows, window=window, prefill=prefill)
    _check(replace(case, sinks=case.capped_with_sinks().sinks), rows, window=window, prefill=prefill)
    _check(replace(case, soft_cap=3.0), rows, window=window, prefill=prefill)


def test_soft_caps_and_sinks_of_trees_over_several_splits() -> None:
    rows = tree_rows(TREE_PARENTS, (300, 250), position_order=(3, 0, 8, 1, 7, 2, 5, 4, 6), slots=(1, 0))
    case = AttentionCase.random(batch=2, num_queries=9, num_kv_heads=1, group=3, head_dim=16, capacity=320)
    _check(case.capped_with_sinks(), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_ragged_batch_matches_reference_in_half_precision(group: int, head_dim: int, dtype: torch.dtype) -> None:
    case, rows = _ragged_case(group, head_dim, dtype)
    # Compiling is what takes long: windows of one sort in half of the cases, of the other in the other half.
    odd = (group // 2 + head_dim // 16 + (dtype == BF16)) % 2
    case = case if group == 3 else case.capped_with_sinks()
    for prefill, window in ((False, (None, 20)[odd]), (True, (20, None)[odd])):
        _check(case, rows, window=window, prefill=prefill)


@pytest.mark.few(2)
@pytest.mark.parametrize("start", [0, 254, 700])
def test_several_splits(start: int) -> None:
    rows = chain_rows((start,), (3,), max_length=start + 40)
    case = AttentionCase.random(batch=1, num_queries=3, num_kv_heads=1, group=3, head_dim=16, capacity=780)
    _check(case, rows)


def test_a_batch_member_of_padding_only() -> None:
    rows = chain_rows((300, 0), (2, 0))
    case = AttentionCase.random(batch=2, num_queries=2, num_kv_heads=1, group=2, head_dim=16, capacity=310)
    _check(case, rows)
    _check(case, rows, prefill=True)


@pytest.mark.few(3)
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("window", [1, 20, 64, 300])
def test_sliding_window(window: int, prefill: bool) -> None:
    rows = chain_rows((290, 17), (4, 3))
    case = AttentionCase.random(batch=2, num_queries=4, num_kv_heads=1, group=3, head_dim=16, capacity=300)
    _check(case, rows, window=window, prefill=prefill)


def test_prefill_does_not_read_tiles_behind_the_sliding_window() -> None:
    rows = chain_rows((600,), (4,))
    case = AttentionCase.random(batch=1, num_queries=4, num_kv_heads=1, group=3, head_dim=16, capacity=604)
    behind = case.kv.data.clone()
    behind[:, :2] = float("nan")
    out = _run(replace(case, kv=KVBlocks(behind)), rows, window=20, prefill=True)
    assert_within(out, case.expected(rows, 20), atol=1e-5 * case.largest_value)


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [None, 6, 70])
@pytest.mark.parametrize("committed", [(5, 60), (300, 250), (0, 256)])
def test_tree_matches_reference(committed: tuple[int, int], window: int | None) -> None:
    rows = tree_rows(TREE_PARENTS, committed, position_order=(3, 0, 8, 1, 7, 2, 5, 4, 6), slots=(1, 0))
    case = AttentionCase.random(batch=2, num_queries=9, num_kv_heads=1, group=3, head_dim=16, capacity=320)
    _check(case, rows, window=window)


# From here on: bitwise equality on the GPU in bf16, which is what makes speculation exact.


def _big_case(num_queries: int, *, batch: int = 1, capacity: int = 1400) -> AttentionCase:
    return AttentionCase.random(
        batch=batch, num_queries=num_queries, num_kv_heads=2, group=4, head_dim=128, capacity=capacity, dtype=BF16
    )


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("start", [0, 61, 250, 1000])
@pytest.mark.parametrize("width", [17, 64, 200])
def test_bits_do_not_depend_on_the_window(width: int, start: int, window: int | None) -> None:
    case = _big_case(200)
    together = _run(case.queries(slice(0, width)), chain_rows((start,), (width,)), window=window)
    for index in (0, 1, width // 2, width - 1):
        alone = _run(case.queries(slice(index, index + 1)), chain_rows((start + index,), (1,)), window=window)
        assert torch.equal(alone[:, 0], together[:, index]), f"query {index}"
    shifted = _run(case.queries(slice(5, width)), chain_rows((start + 5,), (width - 5,)), window=window)
    assert torch.equal(shifted, together[:, 5:])


@pytest.mark.gpu
def test_bits_do_not_depend_on_max_length_or_batch_mates() -> None:
    case = _big_case(17, batch=2)
    alone = AttentionCase(case.q[:1], case.kv)
    expected = _run(alone, chain_rows((530,), (17,)))
    for max_length in (600, 1024, 1400):
        assert torch.equal(_run(alone, chain_rows((530,), (17,), max_length=max_length)), expected)
    for mate in (0, 529, 1300):
        assert torch.equal(_run(case, chain_rows((530, mate), (17, 17)))[:1], expected)
    assert torch.equal(_run(case, chain_rows((530, 1), (17, 2)))[:1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("committed", [3, 60, 254, 1000])
def test_bits_of_a_path_do_not_depend_on_the_tree(committed: int) -> None:
    generator = torch.Generator().manual_seed(committed)
    num_nodes = 150
    parents = [int(torch.randint(-1, node, (1,), generator=generator)) if node else -1 for node in range(num_nodes)]
    position_order = torch.randperm(num_nodes, generator=generator).tolist()
    case = _big_case(num_nodes)
    out = _run(case, tree_rows(parents, (committed,), position_order=position_order))
    deepest = max(range(num_nodes), key=lambda node: len(tree_path(parents, node)))
    for node in (0, 7, 70, num_nodes - 1, deepest):
        path = tree_path(parents, node)
        chain = chain_of_path(case, path, committed, [committed + position_order[n] for n in path])
        chain_out = _run(chain, chain_rows((committed,), (len(path),)))
        assert torch.equal(out[:, path], chain_out), f"node {node}, depth {len(path)}"


def _check_windows_of(case: AttentionCase, widths: tuple[int, ...], window: int | None, *, step: int = 1) -> None:
    """Pieces of a prompt, and windows that begin at multiples of `step` in it, have the bits of the whole prompt."""
    length = case.q.shape[1]
    whole = _run(case, chain_rows((0,), (length,)), window=window, prefill=True)
    for width in widths:
        for start in (at // step * step for at in (0, 30, (length - width) // 2, 250, length - width)):
            part = slice(start, start + width)
            for prefill in (False, True):
                out = _run(case.queries(part), chain_rows((start,), (width,)), window=window, prefill=prefill)
                assert torch.equal(out, whole[:, part]), f"width {width}, start {start}, prefill {prefill}"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("group", "head_dim", "dtype"), [
    (1, 128, BF16), (4, 128, BF16), (7, 64, torch.float16), (3, 80, BF16), (20, 64, BF16), (2, 256, BF16),
    (8, 512, BF16), (2, 128, torch.float32),
])  # fmt: skip
def test_windows_are_as_prompts(group: int, head_dim: int, dtype: torch.dtype, plain: bool, window: int | None) -> None:
    case = AttentionCase.random(
        batch=1, num_queries=1200, num_kv_heads=2, group=group, head_dim=head_dim, capacity=1200, dtype=dtype
    )
    case = replace(case, q=2 * case.q)  # sharp enough for sums of few large weights
    case = case if plain else case.capped_with_sinks()
    _check_windows_of(case, (1, 5, 17, 64, 100, 512, 950), window)
