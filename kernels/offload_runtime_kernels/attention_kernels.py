"""The Triton kernels of attention: splits of the keys, and the merge of what the splits found. See `attention`."""

from offload_runtime_kernels._jit import jit, tl


# Specialising on these would compile another binary for a window of one token than for one of seventeen, for a batch
# row than for a batch, for a ring than for a piece. The strides stay: they are always multiples of 16 elements, which
# wide loads need to know, and of one type whatever their size.
@jit(
    do_not_specialize=(
        "positions_ptr", "sequences_ptr", "committed_ptr", "ancestors_ptr", "bounds_ptr", "num_queries", "first_query",
        "end_query",
        "num_rows", "first_split", "first_partial", "num_ancestors", "sliding_window", "num_keys", "direct",
        "first_block", "num_blocks",
    )
)  # fmt: skip
def attention_kernel(
    q_ptr, kv_ptr, out_ptr, lse_ptr, final_ptr, positions_ptr, sequences_ptr, committed_ptr, ancestors_ptr, bounds_ptr,
    num_queries, first_query, end_query, num_rows, first_split, first_partial, num_ancestors, sliding_window, num_keys,
    direct, scale_log2e, first_block, num_blocks,
    stride_sequence: "tl.int64", stride_block: "tl.int64", stride_value: "tl.int64",
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLIT_KV: tl.constexpr, TREE: tl.constexpr,
    WINDOWED: tl.constexpr, BOUNDED: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch = (tl.program_id(1) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    split = first_split + tl.program_id(2)
    partial_split = split - first_partial
    if BOUNDED:
        split += tl.load(bounds_ptr + 2 * batch)
        num_keys = tl.load(bounds_ptr + 2 * batch + 1)

    lane = tl.arange(0, ROWS)
    if TREE:  # one query a program: its ancestors are its own
        query = first_query + program + tl.zeros([ROWS], dtype=tl.int32)
        group = lane
        row_valid = lane < GROUP
    else:
        query = first_query + (program * ROWS + lane) // GROUP
        group = (program * ROWS + lane) % GROUP
        row_valid = query < end_query
    head = kv_head * GROUP + group
    channel = tl.arange(0, D_BLOCK)
    channel_valid = channel < HEAD_DIM
    row = batch * num_queries + query  # [ROWS] flat query index
    row_offset = (row * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    q = tl.load(
        q_ptr + row_offset[:, None] + channel[None, :], mask=row_valid[:, None] & channel_valid[None, :], other=0.0
    )
    position = tl.load(positions_ptr + row, mask=row_valid, other=-1)  # [ROWS]
    end = tl.minimum(tl.max(position, axis=0) + 1, num_keys)
    begin = 0
    if SPLIT_KV:
        begin = split * SPLIT
        end = tl.minimum(end, begin + SPLIT)
    if WINDOWED:
        first_seen = tl.min(tl.where(position >= 0, position, 2147483647), axis=0) - sliding_window + 1
        begin = tl.maximum(begin, (first_seen // TILE) * TILE)

    sequence = tl.load(sequences_ptr + batch).to(tl.int64)
    base = kv_ptr + sequence * stride_sequence + kv_head * (SPLIT * HEAD_DIM)
    committed = 0
    if TREE:
        committed = tl.load(committed_ptr + batch)

    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, D_BLOCK], dtype=tl.float32)
    for start in range(begin, end, TILE):
        key_position = start + tl.arange(0, TILE)
        key_valid = key_position < end
        if TREE:
            tentative = key_valid & (key_position >= committed)
            ancestor = (batch * num_queries + first_query + program) * num_ancestors + (key_position - committed)
            slot = tl.where(tentative, tl.load(ancestors_ptr + ancestor, mask=tentative, other=0), key_position)
            block = ((slot // SPLIT - first_block) % num_blocks).to(tl.int64)
            k_ptrs = base + (block * stride_block + (slot % SPLIT) * HEAD_DIM)[:, None] + channel[None, :]
        else:  # a tile lies in one block
            block = ((start // SPLIT - first_block) % num_blocks).to(tl.int64)
            tile = base + block * stride_block + (start % SPLIT) * HEAD_DIM
            k_ptrs = tile + tl.arange(0, TILE)[:, None] * HEAD_DIM + channel[None, :]
        load_mask = key_valid[:, None] & channel_valid[None, :]
        k = tl.load(k_ptrs, mask=load_mask, other=0.0)
        v = tl.load(k_ptrs + stride_value, mask=load_mask, other=0.0)
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
        partial_row = batch * (end_query - first_query) + (query - first_query)
        split_rows = partial_split.to(tl.int64) * num_rows + partial_row
        partial = (split_rows * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        # The only split of a query needs no merge. No constant, so that it is the same instructions that make it; a
        # merge would add the first split to a positive zero.
        to_final = direct + tl.zeros([ROWS], dtype=tl.int32) != 0
        final = (out + 0.0).to(final_ptr.dtype.element_ty)
        tl.store(final_ptr + row_offset[:, None] + channel[None, :], final, mask=out_mask & to_final[:, None])
        tl.store(out_ptr + partial[:, None] + channel[None, :], out, mask=out_mask & (to_final[:, None] == 0))
        lse = tl.where(total == 0.0, float("-inf"), best + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse_ptr + split_rows * (NUM_KV_HEADS * GROUP) + head, lse, mask=row_valid & (to_final == 0))
    else:
        tl.store(out_ptr + row_offset[:, None] + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=out_mask)


# `carried` and `finish` are no constants, and products are fused by name: merging in one call or in several runs the
# same instructions.
@jit(
    do_not_specialize=(
        "best_ptr", "total_ptr", "num_splits", "num_rows", "num_queries", "first_query", "end_query", "carried",
        "finish",
    )
)  # fmt: skip
def merge_kernel(
    partial_ptr, lse_ptr, best_ptr, total_ptr, acc_ptr, out_ptr,
    num_splits, num_rows, num_queries, first_query, end_query, carried, finish,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, D_BLOCK)
    inside = channel < HEAD_DIM
    part_queries = end_query - first_query
    state = ((row // part_queries) * num_queries + first_query + row % part_queries) * NUM_HEADS + head
    best = tl.load(best_ptr + state, mask=carried != 0, other=float("-inf"))
    total = tl.load(total_ptr + state, mask=best > float("-inf"), other=0.0)
    # Lane by lane: the interpreter turns a broadcast truth value into an integer, which is no mask.
    seen = best + tl.zeros([D_BLOCK], dtype=tl.float32) > float("-inf")
    acc = tl.load(acc_ptr + state * HEAD_DIM + channel, mask=inside & seen, other=0.0)
    for split in range(num_splits):
        index = (split * num_rows + row) * NUM_HEADS + head
        lse = tl.load(lse_ptr + index)
        part = tl.load(partial_ptr + index * HEAD_DIM + channel, mask=inside, other=0.0)  # does not wait for `lse`
        part = tl.where(lse + tl.zeros_like(acc) > float("-inf"), part, 0.0)
        new_best = tl.maximum(best, lse)
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - pivot)
        weight = tl.exp2(lse - pivot)
        acc = tl.fma(acc, shrink + tl.zeros_like(acc), part * weight)
        total = tl.fma(total, shrink, weight)
        best = new_best
    finishing = finish + tl.zeros_like(channel) != 0
    out = acc / tl.where(total == 0.0, 1.0, total)
    target = state * HEAD_DIM + channel
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=inside & finishing)
    tl.store(acc_ptr + target, acc, mask=inside & (finish + tl.zeros_like(channel) == 0))
    tl.store(best_ptr + state, best, mask=finish == 0)
    tl.store(total_ptr + state, total, mask=finish == 0)


# Splits by the handful: their loads wait for nothing but each other, where the merge above waits for each in turn.
@jit(do_not_specialize=("num_splits", "num_rows", "num_queries", "first_query", "end_query"))
def join_kernel(
    partial_ptr, lse_ptr, out_ptr, num_splits, num_rows, num_queries, first_query, end_query,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, D_BLOCK)
    inside = channel < HEAD_DIM
    best = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.full([], 0.0, dtype=tl.float32)
    acc = tl.zeros([D_BLOCK], dtype=tl.float32)
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        there = split < num_splits
        index = (split.to(tl.int64) * num_rows + row) * NUM_HEADS + head
        lse = tl.load(lse_ptr + index, mask=there, other=float("-inf"))
        part = tl.load(
            partial_ptr + index[:, None] * HEAD_DIM + channel[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(lse - pivot)
        shrink = tl.exp2(best - pivot)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
        best = new_best
    out = acc / tl.where(total == 0.0, 1.0, total)
    part_queries = end_query - first_query
    query = (row // part_queries) * num_queries + first_query + row % part_queries
    target = (query * NUM_HEADS + head) * HEAD_DIM + channel
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=inside)
