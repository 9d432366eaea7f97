"""Attention of a few queries (a window) or many (prefill) over a cache, independent of everything but the query itself.

    out[t] = softmax(scale * q[t] . K[visible(t)]) V[visible(t)]
    visible(t) = positions <= positions[t] (and in the sliding window)

The keys are cut at *absolute* positions: tiles of 64, splits of 256 tokens. Each split of a query is one online softmax
over its tiles in order, and the splits are merged in order. A masked key contributes an exact zero, so the bits of
out[t] depend on the query's position, its own vector and the keys it sees: not on the other queries of the window, not
on how long the cache is, not on which program it shares. In a tree, the keys of a query's ancestors are gathered into
the places that their positions have in a plain sequence, so a path through a tree gives the bits of a chain.

Prefill runs the same loop without splits: as independent of how the prompt is cut into pieces.
"""

from dataclasses import dataclass, replace

import torch

from offload_runtime_kernels._jit import jit, tl, triton

TILE_TOKENS = 64
SPLIT_TOKENS = 256
# Few rows per program for windows (the smallest that the matrix units take), many for prefill.
_WINDOW_ROWS = 16
_PREFILL_ROWS = 64
# Most workspace for partial results of splits; windows whose splits would take more are done in parts.
WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True)
class QueryRows:
    """Which keys each query sees. Tensors on the compute device.

    `positions` [B, T] int32: the query's absolute position, negative for padding (its output is zero).
    `sequences` [B] int32: the cache's batch row. `max_length`: at least the largest position + 1.
    For a tree: `committed` [B] int32, tokens in the cache at their own slots, `min_committed` the least of them, and
    `ancestors` [B, T, A] int32: the slot of the query's ancestor at position committed + i (itself included). Without
    a tree every key lies in the slot of its position.
    """

    positions: torch.Tensor
    sequences: torch.Tensor
    max_length: int
    committed: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    min_committed: int = 0


def attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: QueryRows, *, scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `attention`, through a dense mask over slots."""
    batch, num_queries, num_heads, _ = q.shape
    length = min(rows.max_length, k_cache.shape[1]) if rows.ancestors is None else k_cache.shape[1]
    sequences = rows.sequences.long()
    k = k_cache[sequences, :length].transpose(1, 2)  # [B, H_kv, S, D]
    v = v_cache[sequences, :length].transpose(1, 2)
    positions = rows.positions[..., None]  # [B, T, 1]
    slots = torch.arange(length, device=q.device)
    if rows.ancestors is None or rows.committed is None:
        key_positions = slots.expand(batch, num_queries, length)
    else:
        committed = rows.committed[:, None, None]
        hidden = torch.iinfo(torch.int32).max
        key_positions = torch.where(slots < committed, slots, hidden).expand(batch, num_queries, length).clone()
        depth = torch.arange(rows.ancestors.shape[2], device=q.device)
        ancestor_positions = committed + depth  # [B, 1, A]
        used = ancestor_positions <= positions
        b, t, a = used.nonzero(as_tuple=True)
        key_positions[b, t, rows.ancestors[b, t, a].long()] = ancestor_positions.expand_as(used)[b, t, a]
    visible = key_positions <= positions
    if sliding_window is not None:
        visible &= key_positions > positions - sliding_window
    padding = rows.positions < 0
    visible |= padding[..., None]  # a row without any key would be NaN
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=visible[:, None], scale=scale, enable_gqa=num_heads != k.shape[1]
    )
    return out.transpose(1, 2).masked_fill(padding[..., None, None], 0)


# Specialising on these would compile another binary for a window of one token than for one of seventeen.
@jit(do_not_specialize=("num_queries", "num_rows", "first_split", "num_ancestors"))
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, positions_ptr, sequences_ptr, committed_ptr, ancestors_ptr,
    num_queries, num_rows, first_split, num_ancestors, sliding_window, scale_log2e,
    cache_stride_sequence, cache_stride_slot,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLIT_KV: tl.constexpr, TREE: tl.constexpr,
    WINDOWED: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    batch = (tl.program_id(1) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    split = first_split + tl.program_id(2)

    lane = tl.arange(0, ROWS)
    if TREE:  # one query a program: its ancestors are its own
        query = block + tl.zeros([ROWS], dtype=tl.int32)
        group = lane
        row_valid = lane < GROUP
    else:
        query = (block * ROWS + lane) // GROUP
        group = (block * ROWS + lane) % GROUP
        row_valid = query < num_queries
    head = kv_head * GROUP + group
    channel = tl.arange(0, D_BLOCK)
    channel_valid = channel < HEAD_DIM
    row = batch * num_queries + query  # [ROWS] flat query index
    row_offset = (row * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    q = tl.load(
        q_ptr + row_offset[:, None] + channel[None, :], mask=row_valid[:, None] & channel_valid[None, :], other=0.0
    )
    position = tl.load(positions_ptr + row, mask=row_valid, other=-1)  # [ROWS]
    end = tl.max(position, axis=0) + 1
    begin = 0
    if SPLIT_KV:
        begin = split * SPLIT
        end = tl.minimum(end, begin + SPLIT)
    if WINDOWED:
        first_seen = tl.min(tl.where(position >= 0, position, 2147483647), axis=0) - sliding_window + 1
        begin = tl.maximum(begin, (first_seen // TILE) * TILE)

    sequence = tl.load(sequences_ptr + batch).to(tl.int64)
    k_base = k_ptr + sequence * cache_stride_sequence + kv_head * HEAD_DIM
    v_base = v_ptr + sequence * cache_stride_sequence + kv_head * HEAD_DIM
    committed = 0
    if TREE:
        committed = tl.load(committed_ptr + batch)

    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, D_BLOCK], dtype=tl.float32)
    for start in range(begin, end, TILE):
        key_position = start + tl.arange(0, TILE)
        key_valid = key_position < end
        slot = key_position
        if TREE:
            tentative = key_valid & (key_position >= committed)
            ancestor = (batch * num_queries + block) * num_ancestors + (key_position - committed)
            slot = tl.where(tentative, tl.load(ancestors_ptr + ancestor, mask=tentative, other=0), slot)
        offset = slot.to(tl.int64) * cache_stride_slot
        load_mask = key_valid[:, None] & channel_valid[None, :]
        k = tl.load(k_base + offset[:, None] + channel[None, :], mask=load_mask, other=0.0)
        v = tl.load(v_base + offset[:, None] + channel[None, :], mask=load_mask, other=0.0)
        if FP32_DOT:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
        else:
            scores = tl.dot(q, tl.trans(k)) * scale_log2e
        visible = (key_position[None, :] <= position[:, None]) & key_valid[None, :]
        if WINDOWED:
            visible = visible & (key_position[None, :] > position[:, None] - sliding_window)
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(best - pivot)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        if FP32_DOT:
            acc = tl.dot(weights, v, acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc)
        best = new_best

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_mask = row_valid[:, None] & channel_valid[None, :]
    if SPLIT_KV:
        split_rows = split.to(tl.int64) * num_rows + row
        partial = (split_rows * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(out_ptr + partial[:, None] + channel[None, :], out, mask=out_mask)
        lse = tl.where(total == 0.0, float("-inf"), best + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse_ptr + split_rows * (NUM_KV_HEADS * GROUP) + head, lse, mask=row_valid)
    else:
        tl.store(out_ptr + row_offset[:, None] + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=out_mask)


@jit(do_not_specialize=("num_splits", "num_rows"))
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, num_splits, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, D_BLOCK)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros([D_BLOCK], dtype=tl.float32)
    for split in range(num_splits):
        index = (split * num_rows + row) * NUM_HEADS + head
        lse = tl.load(lse_ptr + index)
        # Lane by lane: the interpreter turns a broadcast truth value into an integer, which is no mask.
        seen = lse + tl.zeros_like(acc) > float("-inf")
        part = tl.load(partial_ptr + index * HEAD_DIM + channel, mask=(channel < HEAD_DIM) & seen, other=0.0)
        new_best = tl.maximum(best, lse)
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - pivot)
        weight = tl.exp2(lse - pivot)
        acc = acc * shrink + part * weight
        total = total * shrink + weight
        best = new_best
    out = acc / tl.where(total == 0.0, 1.0, total)
    target = out_ptr + (row * NUM_HEADS + head) * HEAD_DIM + channel
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=channel < HEAD_DIM)


@dataclass(frozen=True)
class _Launch:
    """Arguments that the launches of one call share."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: QueryRows
    scale: float
    sliding_window: int | None

    def run(
        self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, positions: torch.Tensor,
        ancestors: torch.Tensor | None, *, splits: range | None,
    ) -> None:  # fmt: skip
        """Enqueue one launch over `splits` (None: the whole range in one loop) on the current stream."""
        batch, num_queries, num_heads, head_dim = q.shape
        num_kv_heads = self.k_cache.shape[2]
        group = num_heads // num_kv_heads
        tree = ancestors is not None
        if splits is None:
            rows_per_program = _PREFILL_ROWS
        else:
            rows_per_program = max(_WINDOW_ROWS, triton.next_power_of_2(group))
        blocks = num_queries if tree else triton.cdiv(num_queries * group, rows_per_program)
        unused = self.rows.sequences
        # By head and dtype alone, so that the bits do not depend on the pass: what fits 100 KB of shared memory.
        channels = max(16, triton.next_power_of_2(head_dim))
        wide = channels * q.element_size() >= 512
        _attention_kernel[(blocks, batch * num_kv_heads, len(splits) if splits is not None else 1)](
            q, self.k_cache, self.v_cache, out, lse, positions, self.rows.sequences,
            self.rows.committed if tree else unused, ancestors if tree else unused,
            num_queries, batch * num_queries, splits.start if splits is not None else 0,
            ancestors.shape[2] if ancestors is not None else 0,
            self.sliding_window or 0, self.scale * 1.4426950408889634,
            self.k_cache.stride(0), self.k_cache.stride(1),
            NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
            D_BLOCK=channels, ROWS=rows_per_program, TILE=TILE_TOKENS if channels * q.element_size() <= 512 else 32,
            SPLIT=SPLIT_TOKENS, SPLIT_KV=splits is not None, TREE=tree, WINDOWED=self.sliding_window is not None,
            FP32_DOT=q.dtype == torch.float32, num_warps=4,
            num_stages=1 if wide else 2,
        )  # fmt: skip


def _window_part(launch: _Launch, q: torch.Tensor, out: torch.Tensor, part: slice) -> None:
    """Split, then merge, the queries of `part`: writes out[:, part]."""
    rows = launch.rows
    batch, _, num_heads, head_dim = q.shape
    q_part = q[:, part].contiguous()
    positions = rows.positions[:, part].contiguous()
    num_rows = batch * q_part.shape[1]
    num_splits = triton.cdiv(rows.max_length, SPLIT_TOKENS)
    partial = torch.empty(num_splits, num_rows, num_heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_splits, num_rows, num_heads, dtype=torch.float32, device=q.device)
    shared = num_splits if rows.ancestors is None else rows.min_committed // SPLIT_TOKENS
    if shared:
        launch.run(q_part, partial, lse, positions, None, splits=range(shared))
    if rows.ancestors is not None and shared < num_splits:
        ancestors = rows.ancestors[:, part].contiguous()
        launch.run(q_part, partial, lse, positions, ancestors, splits=range(shared, num_splits))
    merged = torch.empty_like(q_part)
    _merge_kernel[(num_rows, num_heads)](
        partial, lse, merged, num_splits, num_rows,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, D_BLOCK=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    out[:, part] = merged


def attention_triton(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: QueryRows, *, scale: float,
    sliding_window: int | None = None, prefill: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `attention`."""
    batch, num_queries, num_heads, head_dim = q.shape
    assert q.is_contiguous() and rows.positions.is_contiguous()
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[2:] == (head_dim, 1)
    assert num_heads % k_cache.shape[2] == 0 and rows.positions.shape == (batch, num_queries)
    assert rows.ancestors is None or (not prefill and rows.committed is not None)
    launch = _Launch(k_cache, v_cache, rows, scale, sliding_window)
    out = torch.empty_like(q)
    if prefill:
        launch.run(q, out, out, rows.positions, None, splits=None)
        return out
    num_splits = triton.cdiv(rows.max_length, SPLIT_TOKENS)
    query_bytes = num_splits * batch * num_heads * (head_dim + 1) * 4
    step = max(1, WORKSPACE_BYTES // query_bytes)
    for start in range(0, num_queries, step):
        _window_part(launch, q, out, slice(start, min(start + step, num_queries)))
    return out


def attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: QueryRows, *, scale: float,
    sliding_window: int | None = None, prefill: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attend from rotated queries to the cache, the queries' own keys included (they are written before).

    Args:
        q: [B, T, H, D], contiguous.
        k_cache: [at least B, S, H_kv, D], rotated keys; heads contiguous. What lies beyond a query's own reach is
            never used, but must be finite within `max_length`.
        v_cache: The same for values.
        rows: Which keys each query sees.
        scale: Multiplies the dot products, usually D ** -0.5.
        sliding_window: Tokens that a query sees, itself included; None for all.
        prefill: Choose the variant for many queries. Its bits differ from the other's; both are independent of how
            the queries are grouped.

    Returns:
        [B, T, H, D] in the dtype of `q`; zero for padding rows.
    """
    if q.is_cuda:
        return attention_triton(q, k_cache, v_cache, rows, scale=scale, sliding_window=sliding_window, prefill=prefill)
    if prefill or rows.ancestors is not None:
        return attention_reference(q, k_cache, v_cache, rows, scale=scale, sliding_window=sliding_window)
    # torch sums in another order for other numbers of queries and keys, which in bf16 shows in every other text: one
    # query at a time over just the keys up to its position, so that a window cannot change its bits.
    return torch.cat(
        [
            attention_reference(
                q[:, t : t + 1], k_cache, v_cache, _only_query(rows, t), scale=scale, sliding_window=sliding_window
            )
            for t in range(q.shape[1])
        ],
        dim=1,
    )


def _only_query(rows: QueryRows, index: int) -> QueryRows:
    """The rows of query `index` alone; reads its position, so for tensors on the CPU."""
    positions = rows.positions[:, index : index + 1]
    return replace(rows, positions=positions, max_length=max(1, int(positions.max()) + 1))
