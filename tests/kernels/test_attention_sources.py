"""Attention over several caches at once: the softmax is that of all their keys in one row.

Everything runs on the CPU path and in Triton's interpreter without a GPU, natively with one.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from offload_runtime_kernels.attention import KeySource, QueryRows, attend_sources
from offload_runtime_kernels.attention_sources import attend_sources_triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from tests.helpers import attention_cases as cases
from tests.helpers.kernel_conditions import KERNEL_DEVICE, UNIT_ROUNDOFF, assert_within, poisoned_outputs

Attend = Callable[..., torch.Tensor]
versions = pytest.mark.parametrize("attend", [attend_sources, attend_sources_triton], ids=["public", "triton"])

# Retrieved keys, and the newest two blocks of a sequence in whose second one the queries lie.
RECENT, START = range(5, 7), 6 * BLOCK_TOKENS + 20
FAR = (1 << 31) - 1  # where no key ends


def _case(
    num_queries: int, *, batch: int = 1, num_kv_heads: int = 2, group: int = 2, head_dim: int = 16,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> cases.AttentionCase:  # fmt: skip
    return cases.AttentionCase.random(
        batch=batch, num_queries=num_queries, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim,
        capacity=7 * BLOCK_TOKENS, dtype=dtype, seed=seed,
    )  # fmt: skip


def _front(case: cases.AttentionCase, num_keys: int) -> KVBlocks:
    """The first keys of a case's cache, NaN behind them."""
    data = case.kv.data.clone()
    places = torch.arange(data.shape[1] * BLOCK_TOKENS, device=KERNEL_DEVICE).view(1, -1, 1, 1, BLOCK_TOKENS, 1)
    return KVBlocks(data.masked_fill(places >= num_keys, float("nan")))


def _retrieval(case: cases.AttentionCase, num_keys: int) -> list[KeySource]:
    """Retrieved keys, which are another cache's, before the newest blocks in a ring."""
    other = _case(1, batch=case.kv.data.shape[0], num_kv_heads=case.kv.num_kv_heads, head_dim=case.kv.head_dim,
                  dtype=case.q.dtype, seed=7)  # fmt: skip
    far = KeySource(_front(other, num_keys), range(-(-num_keys // BLOCK_TOKENS)), num_keys=num_keys)
    return [far, KeySource(cases.ring(case.kv, RECENT, 3), RECENT)]


def _expected(case: cases.AttentionCase, sources: Sequence[KeySource], rows: QueryRows) -> torch.Tensor:
    """In fp64, query by query, over the visible keys of all sources in a row: [B, T, H, D]."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=KERNEL_DEVICE)
    for b in range(case.q.shape[0]):
        for t, position in enumerate(rows.positions[b].tolist()):
            found: list[torch.Tensor] = []
            for source in sources:
                limit = position + 1 if source.num_keys is None else source.num_keys
                end = min(position + 1, limit, source.blocks.stop * BLOCK_TOKENS)
                places = cases.int32(list(range(source.blocks.start * BLOCK_TOKENS, end)))
                found.append(torch.stack(source.kv.at(rows.slots[b], places)).double())  # [2, S, H_kv, D]
            k, v = torch.cat(found, dim=1)
            if len(k):
                q = case.q[b, t].double().unflatten(0, (k.shape[1], -1))  # [H_kv, G, D]
                logits = (torch.einsum("hgd,shd->hgs", q, k) * case.params().scale).flatten(0, 1)
                if case.soft_cap is not None:
                    logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
                if case.sinks is not None:
                    logits = torch.cat((logits, case.sinks.double()[:, None]), dim=1)
                weights = logits.softmax(-1)[:, : len(k)].unflatten(0, q.shape[:2])
                out[b, t] = torch.einsum("hgs,shd->hgd", weights, v).flatten(0, 1)
    return out


def _run(attend: Attend, case: cases.AttentionCase, sources: Sequence[KeySource], rows: QueryRows) -> torch.Tensor:
    with poisoned_outputs():
        return attend(case.q, sources, rows, case.params())


def _check(attend: Attend, case: cases.AttentionCase, sources: Sequence[KeySource], rows: QueryRows) -> torch.Tensor:
    out = _run(attend, case, sources, rows)
    assert out.dtype == case.q.dtype
    # Weights and result are rounded to the dtype; fp32 adds the order of a few thousand terms.
    atol = 1e-5 if case.q.dtype == torch.float32 else 3 * UNIT_ROUNDOFF[case.q.dtype]
    assert_within(out, _expected(case, sources, rows), atol=atol * case.largest_value)
    return out


@pytest.mark.few(2)
@versions
@pytest.mark.parametrize("num_keys", [8, 256, 300])
@pytest.mark.parametrize(("num_queries", "num_kv_heads", "group"), [(1, 3, 1), (5, 2, 2), (17, 1, 4), (3, 1, 20)])
def test_retrieved_keys(attend: Attend, num_queries: int, num_kv_heads: int, group: int, num_keys: int) -> None:
    case = _case(num_queries, num_kv_heads=num_kv_heads, group=group)
    _check(attend, case, _retrieval(case, num_keys), cases.chain_rows((START,), (num_queries,)))


@pytest.mark.parametrize("attend", [
    attend_sources, attend_sources_triton, partial(attend_sources_triton, enough_programs=1),
], ids=["public", "triton", "triton in one part"])  # fmt: skip
def test_soft_caps_and_sinks(attend: Attend) -> None:
    case = _case(5, head_dim=96).capped_with_sinks()
    _check(attend, case, _retrieval(case, 300), cases.chain_rows((START,), (5,)))
    rows = cases.chain_rows((START,), (5,))
    rows.positions[0, 3:] = -1
    assert bool((_check(attend, case, _retrieval(case, 8), rows)[0, 3:] == 0).all())


@pytest.mark.few(1)
@versions
@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 2), (1, 4)])
def test_a_tree_gives_each_path_what_a_chain_gives(attend: Attend, num_kv_heads: int, group: int) -> None:
    """Beside retrieved keys, across the end of a block, with padding among the rows, and a sequence stands still."""
    committed = 6 * BLOCK_TOKENS - 10
    case = _case(len(cases.TREE_PARENTS) + 1, batch=2, num_kv_heads=num_kv_heads, group=group)
    tree = cases.tree_rows(
        cases.TREE_PARENTS, (committed, committed), position_order=[3 * node for node in range(len(cases.TREE_PARENTS))]
    )
    assert tree.ancestors is not None
    positions = torch.cat((tree.positions, cases.int32([[-1], [-1]])), dim=1)
    positions[1] = -1
    ancestors = torch.cat((tree.ancestors, torch.zeros_like(tree.ancestors[:, :1])), dim=1)
    rows = QueryRows(positions, tree.slots, 7 * BLOCK_TOKENS, tree.committed, ancestors)
    far_case = _case(1, batch=2, num_kv_heads=num_kv_heads, seed=7)
    far = _bounded(far_case, [(0, 300), (0, 300)], 2, 2)
    near = KeySource(cases.ring(case.kv, RECENT, 3), range(2), bounds=cases.int32([[5, FAR], [5, FAR]]))
    out = _run(attend, case, [far, near], rows)
    assert bool((out[0, -1] == 0).all() and (out[1] == 0).all())
    for node in range(len(cases.TREE_PARENTS)):
        path = cases.tree_path(cases.TREE_PARENTS, node)
        chain = cases.chain_of_path(case, path, committed, [committed + 3 * above for above in path])
        last = cases.AttentionCase(chain.q[:, -1:].contiguous(), chain.kv)
        own = [KeySource(KVBlocks(far.kv.data[:1]), range(2), num_keys=300), KeySource(chain.kv, RECENT)]
        expected = _expected(last, own, cases.chain_rows((committed + len(path) - 1,), (1,)))
        assert_within(out[:1, node : node + 1], expected, atol=1e-5 * case.largest_value)


def _bounded(case: cases.AttentionCase, bounds: Sequence[tuple[int, int]], num_blocks: int, places: int) -> KeySource:
    """The first `num_blocks` blocks of each sequence from its own first one on, in a ring; NaN wherever no key is."""
    data = case.kv.data.new_full((len(bounds), places, *case.kv.data.shape[2:]), float("nan"))
    for b, (first, num_keys) in enumerate(bounds):
        for block in range(first, min(first + num_blocks, case.kv.num_blocks)):
            here = data[b, block % places]
            here.copy_(case.kv.data[b, block])
            here[:, :, max(0, num_keys - block * BLOCK_TOKENS) :] = float("nan")
    return KeySource(KVBlocks(data), range(num_blocks), bounds=cases.int32([list(pair) for pair in bounds]))


def _one_by_one(case: cases.AttentionCase, sources: Sequence[KeySource], rows: QueryRows) -> torch.Tensor:
    """In fp64: each sequence before what its bounds say, without bounds."""
    out = []
    for b in range(len(case.q)):
        own: list[KeySource] = []
        for source in sources:
            assert source.bounds is not None
            first, count = source.bounds[b].tolist()
            own.append(KeySource(KVBlocks(source.kv.data[b : b + 1]), range(first, first + len(source.blocks)), count))
        one = cases.AttentionCase(case.q[b : b + 1], KVBlocks(case.kv.data[b : b + 1]))
        out.append(_expected(one, own, QueryRows(rows.positions[b : b + 1], cases.int32([0]), rows.max_length)))
    return torch.cat(out)


@pytest.mark.few(1)
@versions
@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 1), (1, 4)])
def test_every_sequence_has_bounds_of_its_own(attend: Attend, num_kv_heads: int, group: int) -> None:
    """Long, short, without far keys, and standing still: together each gets what it gets alone."""
    case = _case(3, batch=4, num_kv_heads=num_kv_heads, group=group)
    far_case = _case(1, batch=4, num_kv_heads=num_kv_heads, seed=7)
    rows = cases.chain_rows((START, START - 900, 300, -1), (3, 2, 3, 1), max_length=7 * BLOCK_TOKENS)
    rows.positions[3] = -1
    far = _bounded(far_case, [(0, 520), (0, 96), (0, 0), (0, 0)], 3, 3)
    sources = [far, _bounded(case, [(5, FAR), (1, FAR), (0, FAR), (0, 0)], 2, 4)]
    with poisoned_outputs():
        out = attend(case.q, sources, rows, case.params())
    assert_within(out, _one_by_one(case, sources, rows), atol=1e-5 * case.largest_value)
    assert bool((out[3] == 0).all())


@pytest.mark.few(1)
@versions
def test_more_rows_than_a_program_takes(attend: Attend) -> None:
    case = _case(17, num_kv_heads=1, group=5)
    _check(attend, case, _retrieval(case, 300), cases.chain_rows((START,), (17,)))


# From here on: natively, at the shapes of real models.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_queries", [1, 5, 17])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(32, 1), (8, 8)])
def test_half_precision(num_kv_heads: int, group: int, num_queries: int, dtype: torch.dtype) -> None:
    case = _case(num_queries, num_kv_heads=num_kv_heads, group=group, head_dim=128, dtype=dtype)
    for num_keys in (1000, 1536):
        _check(attend_sources_triton, case, _retrieval(case, num_keys), cases.chain_rows((START,), (num_queries,)))
    _check(attend_sources_triton, case, [KeySource(case.kv, range(6, 7))], cases.chain_rows((START,), (num_queries,)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(32, 1), (8, 4)])
def test_in_a_graph_bounds_may_move(num_kv_heads: int, group: int, dtype: torch.dtype) -> None:
    """Of several sequences at the shapes of real models, as they are replayed."""
    case = _case(5, batch=3, num_kv_heads=num_kv_heads, group=group, head_dim=128, dtype=dtype)
    far_case = _case(1, batch=3, num_kv_heads=num_kv_heads, head_dim=128, dtype=dtype, seed=7)
    far = KeySource(far_case.kv, range(4), bounds=cases.int32([[0, 1024], [0, 0], [0, 40]]))
    near = KeySource(case.kv, range(3), bounds=cases.int32([[4, FAR], [0, FAR], [2, FAR]]))
    rows = cases.chain_rows((START, 300, 1000), (5, 5, 5), max_length=7 * BLOCK_TOKENS)
    attend_sources(case.q, [far, near], rows, case.params())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_sources(case.q, [far, near], rows, case.params())
    moves = [
        ((START, 300, 1000), [[0, 1024], [0, 0], [0, 40]], [[4, FAR], [0, FAR], [2, FAR]]),
        ((700, START - 9, 20), [[0, 8], [0, 900], [0, 0]], [[1, FAR], [4, FAR], [0, FAR]]),
        ((-1, 255, START), [[0, 0], [0, 0], [0, 1000]], [[0, 0], [0, FAR], [5, FAR]]),
    ]
    for starts, far_bounds, near_bounds in moves:
        offsets = torch.arange(5, device=KERNEL_DEVICE)
        positions = torch.stack([offsets + start if start >= 0 else offsets * 0 - 1 for start in starts])
        rows.positions.copy_(positions)
        assert far.bounds is not None and near.bounds is not None
        far.bounds.copy_(cases.int32(far_bounds))
        near.bounds.copy_(cases.int32(near_bounds))
        graph.replay()
        expected = _one_by_one(case, [far, near], rows)
        assert_within(out, expected, atol=3 * UNIT_ROUNDOFF[dtype] * case.largest_value)
