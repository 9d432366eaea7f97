"""Triton kernels of `attend_sources`: two caches in one launch, and the join of what its programs found.

The tiles of both caches are counted through as if they lay behind one another, and cut into as many parts as keep the
multiprocessors busy. So the bits depend on how many keys and rows there are: for passes that promise no bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_runtime_kernels._jit import (
    gdc_launch_dependents,
    gdc_wait,
    is_roomy,
    jit,
    overlap_options,
    require_triton,
    tl,
    triton,
)
from offload_runtime_kernels.attention_kernels import attended, soft_capped
from offload_runtime_kernels.attention_state import LOG2_E, AttentionParams, KeySource, QueryRows
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

# Programs that keep 128 (RTX 4090) or 132 (H200) multiprocessors busy: two each.
_ENOUGH_PROGRAMS = 256
# Query rows of a program: the fewest that the matrix units take, and what registers do.
_LEAST_ROWS, _MOST_ROWS = 16, 64
# Parts that one program of a join reads at a time: 64 registers a thread at 128 channels.
_JOINED_PARTS = 16
_NO_LIMIT = (1 << 31) - 1
_LOG2_E = tl.constexpr(LOG2_E)


@jit(
    do_not_specialize=(
        "positions_ptr", "committed_ptr", "ancestors_ptr", "slots_ptr", "bounds_a_ptr",
        "bounds_b_ptr", "num_queries", "tiles_a", "tiles", "span", "first_a", "first_b", "limit_a", "limit_b",
        "first_block_a", "first_block_b", "blocks_a", "blocks_b", "sinks_ptr",
    )
)  # fmt: skip
def _sources_kernel(
    q_ptr, a_ptr, b_ptr, out_ptr, lse_ptr, positions_ptr, committed_ptr, ancestors_ptr, slots_ptr,
    bounds_a_ptr, bounds_b_ptr, num_queries, tiles_a, tiles, span, first_a, first_b, limit_a, limit_b,
    first_block_a, first_block_b, blocks_a, blocks_b, scale_log2e, cap_log2e, sinks_ptr,
    a_stride_slot: "tl.int64", a_stride_block: "tl.int64", a_stride_value: "tl.int64",
    b_stride_slot: "tl.int64", b_stride_block: "tl.int64", b_stride_value: "tl.int64",
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, BOUNDED_A: tl.constexpr, BOUNDED_B: tl.constexpr,
    DEPTH: tl.constexpr, ONE_PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    batch = (tl.program_id(1) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    part = tl.program_id(2)
    lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, head = lane // GROUP, kv_head * GROUP + lane % GROUP
    row_valid = query < num_queries
    channel = tl.arange(0, D_BLOCK)
    channel_valid = channel < HEAD_DIM
    row = batch * num_queries + query
    row_offset = (row * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    mask = row_valid[:, None] & channel_valid[None, :]
    q = tl.load(q_ptr + row_offset[:, None] + channel[None, :], mask=mask, other=0.0)
    position = tl.load(positions_ptr + row, mask=row_valid, other=-1)
    reach = tl.max(position, axis=0) + 1
    if DEPTH > 0:  # a bit for each of a row's ancestors, counted from the first slot of the tree on
        committed = tl.load(committed_ptr + batch)
        reach = tl.where(reach > 0, committed + 64, 0)  # nothing of a sequence that stands still
        above = tl.zeros([ROWS], dtype=tl.int64)
        for level in tl.static_range(DEPTH):
            there = row_valid & (committed + level <= position)
            cache_position = tl.load(ancestors_ptr + row * DEPTH + level, mask=there, other=0) - committed
            above |= tl.where(there, tl.full([ROWS], 1, dtype=tl.int64) << cache_position.to(tl.int64), 0)
    if BOUNDED_A:
        first_a += tl.load(bounds_a_ptr + 2 * batch) * (BLOCK // TILE)
        limit_a = tl.load(bounds_a_ptr + 2 * batch + 1)
    if BOUNDED_B:
        first_b += tl.load(bounds_b_ptr + 2 * batch) * (BLOCK // TILE)
        limit_b = tl.load(bounds_b_ptr + 2 * batch + 1)
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    base_a = a_ptr + slot * a_stride_slot + kv_head * (BLOCK * HEAD_DIM)
    base_b = b_ptr + slot * b_stride_slot + kv_head * (BLOCK * HEAD_DIM)

    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, D_BLOCK], dtype=tl.float32)
    for tile in tl.range(part * span, tl.minimum((part + 1) * span, tiles), num_stages=STAGES):
        in_a = tile < tiles_a
        start = tl.where(in_a, first_a + tile, first_b + tile - tiles_a) * TILE
        end = tl.minimum(reach, tl.where(in_a, limit_a, limit_b))
        block = (start // BLOCK - tl.where(in_a, first_block_a, first_block_b)) % tl.where(in_a, blocks_a, blocks_b)
        base = tl.where(in_a, base_a, base_b) + block.to(tl.int64) * tl.where(in_a, a_stride_block, b_stride_block)
        k_ptrs = base + (start % BLOCK) * HEAD_DIM + tl.arange(0, TILE)[:, None] * HEAD_DIM + channel[None, :]
        key_position = start + tl.arange(0, TILE)
        load_mask = (key_position < end)[:, None] & channel_valid[None, :]
        k = tl.load(k_ptrs, mask=load_mask, other=0.0)
        v = tl.load(k_ptrs + tl.where(in_a, a_stride_value, b_stride_value), mask=load_mask, other=0.0)
        scores = soft_capped(tl.dot(q, tl.trans(k), input_precision="ieee"), cap_log2e) * scale_log2e
        visible = key_position[None, :] <= position[:, None]
        if DEPTH > 0:
            place = (key_position - committed).to(tl.int64)
            bit = (above[:, None] >> tl.minimum(tl.maximum(place, 0), 63)[None, :]) & 1
            visible = tl.where(place[None, :] < 0, visible, bit != 0)
        visible &= (key_position < end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(best - pivot)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        best = new_best

    if OVERLAP:
        gdc_launch_dependents()
    if ONE_PART:
        out = attended(best, total, acc, sinks_ptr, head, row_valid)
        tl.store(out_ptr + row_offset[:, None] + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        num_rows = tl.num_programs(1) // NUM_KV_HEADS * num_queries
        index = (part.to(tl.int64) * num_rows + row) * (NUM_KV_HEADS * GROUP) + head
        tl.store(out_ptr + index[:, None] * HEAD_DIM + channel[None, :], out, mask=mask)
        lse = tl.where(total == 0.0, float("-inf"), best + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse_ptr + index, lse, mask=row_valid)


# By the handful: the loads wait for nothing but each other.
@jit(do_not_specialize=("sinks_ptr", "num_parts", "num_rows"))
def _join_kernel(
    partial_ptr, lse_ptr, out_ptr, sinks_ptr, num_parts, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, D_BLOCK)
    inside = channel < HEAD_DIM
    best = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.full([], 0.0, dtype=tl.float32)
    if sinks_ptr is not None:
        best, total = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E, total + 1.0
    acc = tl.zeros([D_BLOCK], dtype=tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = part < num_parts
        index = (part.to(tl.int64) * num_rows + row) * NUM_HEADS + head
        lse = tl.load(lse_ptr + index, mask=there, other=float("-inf"))
        found = tl.load(
            partial_ptr + index[:, None] * HEAD_DIM + channel[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(lse - pivot)
        shrink = tl.exp2(best - pivot)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(found * weight[:, None], axis=0)
        best = new_best
    if OVERLAP:
        gdc_launch_dependents()
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (row * NUM_HEADS + head) * HEAD_DIM + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _Cut:
    """How the keys are cut: `tile` of them in a step, `stages` steps loaded ahead; at most `rows` of the queries."""

    tile: int
    stages: int
    rows: int = _MOST_ROWS


def _cut(q: torch.Tensor, channels: int) -> _Cut:
    """What fits shared memory: 99 KB on consumer cards, two programs of it on roomy ones."""
    if q.element_size() == 4:
        return _Cut(16, 2, rows=min(_MOST_ROWS, 4096 // channels))
    if channels >= 256:
        return _Cut(8192 // channels, 2, rows=16384 // channels)
    return _Cut(64, 3) if is_roomy(q.device) else _Cut(32, 3)


@dataclass(frozen=True)
class _Keys:
    """One source as the kernel counts it: `tiles` from tile `first` on."""

    source: KeySource
    first: int
    tiles: int

    @classmethod
    def of(cls, source: KeySource, rows: QueryRows, tile: int) -> "_Keys":
        """Tiles in which a query may see a key; with bounds, which the device knows, as many as there may be."""
        start, stop = source.blocks.start * BLOCK_TOKENS, source.blocks.stop * BLOCK_TOKENS
        if source.bounds is None:
            stop = min(stop, rows.max_length, _NO_LIMIT if source.num_keys is None else source.num_keys)
        return cls(source, start // tile, max(0, triton.cdiv(stop - start, tile)))


def _checked(q: torch.Tensor, kv: KVBlocks) -> KVBlocks:
    assert q.shape[2] % kv.num_kv_heads == 0 and q.shape[3] == kv.head_dim and q.dtype == kv.data.dtype
    assert all(stride % 16 == 0 for stride in kv.data.stride()[:3]) and kv.data.data_ptr() % 16 == 0
    return kv


def sources_workspace_bytes(head_dim: int) -> int:
    """Most device bytes that `attend_sources` takes for what its programs found."""
    return 4 * _ENOUGH_PROGRAMS * _MOST_ROWS * (head_dim + 1)


def attend_sources_triton(
    q: torch.Tensor, sources: Sequence[KeySource], rows: QueryRows, params: AttentionParams, *,
    enough_programs: int = _ENOUGH_PROGRAMS,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `attend_sources`: one launch for every two sources, and one that joins what was found."""
    require_triton("attend_sources")
    committed, ancestors = rows.committed, rows.ancestors
    assert ancestors is None or (ancestors.is_contiguous() and committed is not None)
    assert q.is_contiguous() and rows.positions.is_contiguous() and rows.positions.shape == q.shape[:2]
    batch, num_queries, num_heads, head_dim = q.shape
    channels = max(16, triton.next_power_of_2(head_dim))
    cut = _cut(q, channels)
    there = [keys for keys in (_Keys.of(source, rows, cut.tile) for source in sources) if keys.tiles]
    if not there:
        return torch.zeros_like(q)
    num_kv_heads = _checked(q, there[0].source.kv).num_kv_heads
    group_rows = num_queries * (num_heads // num_kv_heads)
    rows_per_program = max(_LEAST_ROWS, min(cut.rows, triton.next_power_of_2(group_rows)))
    programs = triton.cdiv(group_rows, rows_per_program) * batch * num_kv_heads
    tiles = sum(keys.tiles for keys in there)
    span = triton.cdiv(tiles, max(1, enough_programs // programs))
    pairs = [there[index : index + 2] for index in range(0, len(there), 2)]
    parts = [triton.cdiv(sum(keys.tiles for keys in pair), span) for pair in pairs]
    out, num_parts = torch.empty_like(q), sum(parts)
    partial, lse = out, out  # one part is the whole answer; a pointer that is not used may point anywhere
    if num_parts > 1:
        partial = torch.empty(num_parts, batch * num_queries, num_heads, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    before = 0
    for pair, count in zip(pairs, parts, strict=True):
        a, b = pair[0], pair[-1]  # a source alone is its own neighbour, of which nothing is read
        _sources_kernel[(programs // (batch * num_kv_heads), batch * num_kv_heads, count)](
            q, a.source.kv.data, _checked(q, b.source.kv).data, partial[before:] if num_parts > 1 else out,
            lse[before:] if num_parts > 1 else out, rows.positions,
            *(rows.positions if part is None else part for part in (committed, ancestors)),
            rows.slots, *(rows.slots if keys.source.bounds is None else keys.source.bounds for keys in (a, b)),
            num_queries, a.tiles, sum(keys.tiles for keys in pair), span, a.first, b.first,
            *(_NO_LIMIT if keys.source.num_keys is None else keys.source.num_keys for keys in (a, b)),
            *(keys.source.kv.first_block for keys in (a, b)), *(keys.source.kv.num_blocks for keys in (a, b)),
            *params.log2_scales, params.sinks, *a.source.kv.data.stride()[:3], *b.source.kv.data.stride()[:3],
            NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, D_BLOCK=channels,
            ROWS=rows_per_program, TILE=cut.tile, BLOCK=BLOCK_TOKENS, STAGES=cut.stages,
            BOUNDED_A=a.source.bounds is not None, BOUNDED_B=b.source.bounds is not None,
            DEPTH=0 if ancestors is None else ancestors.shape[2], ONE_PART=num_parts == 1, num_warps=4,
            **overlap_options(q.device),
        )  # fmt: skip
        before += count
    if num_parts > 1:
        _join_kernel[(batch * num_queries, num_heads)](
            partial, lse, out, params.sinks, num_parts, batch * num_queries, NUM_HEADS=num_heads, HEAD_DIM=head_dim,
            D_BLOCK=channels, PARTS=_JOINED_PARTS, num_warps=1, **overlap_options(q.device),
        )  # fmt: skip
    return out
