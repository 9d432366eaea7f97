"""`chunk_scores`: kernels and plain torch against one head, one row, one chunk at a time."""

from collections.abc import Callable

import pytest
import torch
from offload_runtime_kernels import chunk_scores as ops
from offload_runtime_kernels.chunk_summaries import ChunkSummaries

from tests.helpers.kernel_conditions import KERNEL_DEVICE, assert_within, poisoned_outputs, random_tensor

SCALE = 0.3


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=KERNEL_DEVICE)


def _inputs(
    num_heads: int, num_kv_heads: int, head_dim: int, *, rows: int, chunks: int, batch: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Queries that are part of a wider tensor, and means that are part of a longer one."""
    q = random_tensor(batch, rows + 2, num_heads, head_dim, seed=1, dtype=dtype)[:, 1 : rows + 1]
    means = random_tensor(batch, num_kv_heads, chunks + 3, head_dim, seed=2, dtype=dtype)[:, :, :chunks]
    return q, means


def _summaries(means: torch.Tensor) -> ChunkSummaries:
    """Something that decodes to numbers of the same size, in a longer tensor, with spreads up to 2."""
    codes = (means * 25).round().clamp(-127, 127).to(torch.int8)
    units = random_tensor(*means.shape[:3], seed=7).abs() * 0.02 + 0.03
    spreads = random_tensor(*means.shape[:3], seed=8).abs().clamp_max(2.0)
    return ChunkSummaries(codes.contiguous(), torch.stack((units, spreads), -1).half())


def _expected(q: torch.Tensor, kept: torch.Tensor | ChunkSummaries, counts: list[int], used: list[int]) -> torch.Tensor:
    """The definition, in fp64."""
    if isinstance(kept, ChunkSummaries):
        unit, spread = kept.factors.double().unbind(-1)
        means = kept.codes.double() * unit[..., None]
    else:
        means, spread = kept, torch.zeros(kept.shape[:3], dtype=torch.float64)
    batch, num_rows, num_heads, _ = q.shape
    num_kv_heads, chunks = means.shape[1:3]
    group = num_heads // num_kv_heads
    scores = torch.zeros(batch, num_kv_heads, chunks, dtype=torch.float64)
    for b in range(batch):
        if counts[b] == 0:
            continue
        for head in range(num_heads):
            for row in range(min(used[b], num_rows)):
                query = q[b, row, head].double().cpu()
                logits = means[b, head // group, : counts[b]].double().cpu() @ query * SCALE
                above = ops.SPREAD_WEIGHT * SCALE**2 * query.square().sum()
                logits += above * spread[b, head // group, : counts[b]].cpu()
                scores[b, head // group, : counts[b]] += logits.softmax(0) / (group * used[b])
    return scores


SCORERS = [pytest.param(ops.chunk_scores_reference, id="reference"), pytest.param(ops.chunk_scores_triton, id="triton")]


@pytest.mark.few(2)
@pytest.mark.parametrize("run", SCORERS)
@pytest.mark.parametrize(("rows", "chunks"), [(1, 5), (2, 4500), (3, 130), (17, 66)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 16), (7, 1, 80), (4, 2, 96)])
def test_scores_match_the_definition(
    num_heads: int, num_kv_heads: int, head_dim: int, rows: int, chunks: int, run: Callable[..., torch.Tensor]
) -> None:
    q, means = _inputs(num_heads, num_kv_heads, head_dim, rows=rows, chunks=chunks, batch=1)
    means[:, :, -1] += q[:, 0, :: num_heads // num_kv_heads]  # the largest logit may come last
    with poisoned_outputs():
        scores = run(q, means, _ints(chunks), scale=SCALE)
    # Dot products of up to 96 terms in fp32 are off by a few 1e-6, and so, relatively, is their exponential.
    assert_within(scores.cpu(), _expected(q, means, [chunks], [rows]), atol=1e-30, rtol=3e-5)


@pytest.mark.parametrize("run", SCORERS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 16), (7, 1, 80), (4, 2, 96)])
def test_summary_scores(num_heads: int, num_kv_heads: int, head_dim: int, run: Callable[..., torch.Tensor]) -> None:
    q, means = _inputs(num_heads, num_kv_heads, head_dim, rows=5, chunks=150, batch=2)
    summaries, counts, used = _summaries(means), [150, 70], [5, 2]
    with poisoned_outputs():
        scores = run(q, summaries, _ints(*counts), scale=SCALE, rows_used=_ints(*used))
    assert_within(scores.cpu(), _expected(q, summaries, counts, used), atol=1e-30, rtol=5e-5)
    longer = ChunkSummaries(*(torch.constant_pad_nd(one, (0, 0, 0, 9)) for one in (summaries.codes, summaries.factors)))
    assert_within(
        ops.chunk_scores(q, longer, counts, scale=SCALE, rows_used=_ints(*used)), scores.double(), atol=1e-12, rtol=3e-5
    )


@pytest.mark.parametrize("run", SCORERS)
def test_ragged_rows_and_queries_that_do_not_count(run: Callable[..., torch.Tensor]) -> None:
    q, means = _inputs(6, 2, 16, rows=4, chunks=140, batch=5)
    counts, used = [140, 3, 0, 65, 9], [4, 1, 2, 3, 0]
    expected = _expected(q, means, counts, used)
    for b in range(5):  # whatever does not count may hold anything
        means[b, :, counts[b] :] = float("nan")
        q[b, used[b] :] = float("nan")
    with poisoned_outputs():
        scores = run(q, means, _ints(*counts), scale=SCALE, rows_used=_ints(*used))
    assert_within(scores.cpu(), expected, atol=1e-30, rtol=3e-5)
    sums = scores.sum(-1).cpu()
    assert_within(sums[[0, 1, 3]], torch.ones(3, 2, dtype=torch.float64), atol=1e-5)
    assert bool((scores[[2, 4]] == 0).all()) and bool((scores[1, :, 3:] == 0).all())


@pytest.mark.parametrize("run", SCORERS)
def test_extreme_logits_stay_finite(run: Callable[..., torch.Tensor]) -> None:
    q, means = _inputs(2, 2, 16, rows=2, chunks=200, batch=1)
    means[0, :, 150] = 1000 * q[0, 0, :]  # the first query sees nothing else
    scores = run(q, means, _ints(200), scale=SCALE)
    assert bool(scores.isfinite().all()) and bool((scores[0, :, 150] >= 0.5).all())
    assert_within(scores.cpu(), _expected(q, means, [200], [2]), atol=1e-6, rtol=1e-3)


def test_parts_of_the_workspace_give_the_same_bits() -> None:
    q, means = _inputs(6, 3, 16, rows=3, chunks=70, batch=2)
    counts = _ints(70, 33)
    whole = ops.chunk_scores_triton(q, means, counts, scale=SCALE)
    for heads in (1, 4):
        workspace_bytes = heads * 3 * 2 * 128 * 4  # of 6, with rows of two tiles of 64
        with poisoned_outputs():
            parts = ops.chunk_scores_triton(q, means, counts, scale=SCALE, workspace_bytes=workspace_bytes)
        assert torch.equal(parts, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_half_precision(dtype: torch.dtype) -> None:
    shapes = ((32, 32, 128, 17, 3000), (32, 8, 128, 32, 1500), (9, 3, 64, 7, 5000), (8, 8, 80, 1, 129))
    for num_heads, num_kv_heads, head_dim, rows, chunks in shapes:
        q, means = _inputs(num_heads, num_kv_heads, head_dim, rows=rows, chunks=chunks, batch=2, dtype=dtype)
        counts, used = _ints(chunks, chunks // 3), _ints(rows, (rows + 1) // 2)
        with poisoned_outputs():
            scores = ops.chunk_scores_triton(q, means, counts, scale=SCALE, rows_used=used)
        # Products of 16-bit numbers are exact in fp32, so only the sums and the exponential differ.
        expected = ops.chunk_scores_reference(q, means, counts, scale=SCALE, rows_used=used)
        assert_within(scores, expected, atol=1e-12, rtol=2e-4)
        summaries = _summaries(means.float())
        scores = ops.chunk_scores_triton(q, summaries, counts, scale=SCALE, rows_used=used)
        expected = ops.chunk_scores_reference(q, summaries, counts, scale=SCALE, rows_used=used)
        assert_within(scores, expected, atol=1e-12, rtol=5e-4)
