"""The Triton kernels of attention: splits of the keys, the merge of what they found, and both in one. See `attention`.

All of them share `_attend_tile` and `_merge_split`, which say in full how numbers are rounded: a multiplication that is
added to something is a `tl.fma`, and the sum of a row of weights is a product with ones, so that it does not depend on
which thread holds which key. What is left to the hardware is the order in which a matrix instruction adds up 16
products: on an H200 those of prompts (wgmma) and of windows (mma) had the same bits, on Ada both are the same one.
"""

from offload_runtime_kernels._jit import gdc_launch_dependents, gdc_wait, jit, tl
from offload_runtime_kernels.attention_state import LOG2_E

# Columns of the ones that weights are summed by: the fewest that the matrix units take.
_SUM_COLUMNS = tl.constexpr(8)
_LOG2_E = tl.constexpr(LOG2_E)


@jit
def soft_capped(raw, cap_log2e):
    """Return dot products as logits in units of the soft cap, by tanh(x) = 1 - 2 / (1 + e^2x), or as they are."""
    if cap_log2e is not None:
        inverse = 1.0 / (tl.exp2(raw * cap_log2e) + 1.0)
        raw = tl.fma(inverse, tl.full(raw.shape, -2.0, dtype=tl.float32), tl.full(raw.shape, 1.0, dtype=tl.float32))
    return raw


@jit
def attended(best, total, acc, sinks_ptr, head, there):
    """Return the attention of rows [R, D] that have seen all their keys; zero without any. The sink of a row's head,
    where there are sinks, takes part once everything else has: best [R], total [R], acc [R, D]."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=there, other=0.0).to(tl.float32) * _LOG2_E
        pivot = tl.maximum(best, sink)
        shrink = tl.exp2(best - pivot)
        total = tl.fma(total, shrink, tl.exp2(sink - pivot))
        acc = acc * shrink[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@jit
def _attend_tile(
    q, k_ptrs, stride_value, loaded, visible, best, total, acc, scale_log2e, cap_log2e, MASKED: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the online softmax of a split: best [ROWS], total [ROWS, 8], acc [ROWS, D]."""
    if MASKED or PADDED:
        k = tl.load(k_ptrs, mask=loaded, other=0.0)
        v = tl.load(k_ptrs + stride_value, mask=loaded, other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(k_ptrs + stride_value)
    raw = soft_capped(tl.dot(q, tl.trans(k), input_precision="ieee"), cap_log2e)
    if MASKED:
        raw = tl.where(visible, raw, float("-inf"))
    new_best = tl.maximum(best, tl.max(raw, axis=1) * scale_log2e)
    pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.exp2(best - pivot)
    weights = tl.exp2(tl.fma(raw, tl.zeros_like(raw) + scale_log2e, tl.zeros_like(raw) - pivot[:, None])).to(v.dtype)
    ones = tl.full([k.shape[0], _SUM_COLUMNS], 1.0, dtype=v.dtype)
    total = tl.dot(weights, ones, total * shrink[:, None], input_precision="ieee")
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    return new_best, total, acc


@jit
def _merge_split(best, total, acc, split_best, split_total, split_acc):
    """Merge a split into what has been seen of some rows: best [R], total [R], acc [R, D]."""
    new_best = tl.maximum(best, split_best)
    pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.exp2(best - pivot)
    weight = tl.exp2(split_best - pivot)
    total = tl.fma(total, shrink, split_total * weight)
    acc = tl.fma(acc, tl.zeros_like(acc) + shrink[:, None], split_acc * weight[:, None])
    return new_best, total, acc


@jit
def _first_seen(position, sliding_window):
    """Return the first key in the sliding window of any row that is there; it may be negative."""
    return tl.min(tl.where(position >= 0, position, 2147483646), axis=0) - sliding_window + 1


@jit
def _visible(key, position, end, sliding_window, WINDOWED: tl.constexpr):
    """Return which row sees which key: [ROWS, TILE]."""
    visible = (key[None, :] <= position[:, None]) & (key < end)[None, :]
    if WINDOWED:
        visible = visible & (key[None, :] > position[:, None] - sliding_window)
    return visible


@jit
def _attend_split(
    q, base_ptrs, channel_valid, position, first, begin, end, sliding_window, scale_log2e, cap_log2e, committed,
    ancestor_ptr, first_block, num_blocks, stride_block, stride_value,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, TREE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Attend to keys `begin` to `end` of the split that begins at position `first`: best [ROWS], total [ROWS], acc
    [ROWS, D]. In a tree, keys behind the `committed` ones lie at the positions of the query's ancestors."""
    best = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    total = tl.zeros([q.shape[0], _SUM_COLUMNS], dtype=tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], dtype=tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        key = first + start + tl.arange(0, TILE)
        key_valid = key < first + end
        cache_position, block = key, first // SPLIT  # a tile lies in one block
        if TREE:
            tentative = key_valid & (key >= committed)
            cache_position = tl.where(tentative, tl.load(ancestor_ptr + key - committed, mask=tentative, other=0), key)
            block = cache_position[:, None] // SPLIT
        offset = ((block - first_block) % num_blocks).to(tl.int64) * stride_block
        best, total, acc = _attend_tile(
            q, base_ptrs + offset + (cache_position % SPLIT)[:, None] * HEAD_DIM, stride_value,
            key_valid[:, None] & channel_valid[None, :],
            _visible(key, position, first + end, sliding_window, WINDOWED), best, total, acc, scale_log2e, cap_log2e,
            MASKED, q.shape[1] != HEAD_DIM,
        )  # fmt: skip
    return best, tl.max(total, axis=1), acc  # all columns are the same


# Specialising on these would compile another binary for a window of one token than for one of seventeen, for a batch
# row than for a batch, for a ring than for a piece. The strides stay: they are always multiples of 16 elements, which
# wide loads need to know, and of one type whatever their size.
@jit(
    do_not_specialize=(
        "total_ptr", "positions_ptr", "slots_ptr", "committed_ptr", "ancestors_ptr", "num_queries", "first_query",
        "end_query", "num_rows", "first_split", "end_split", "tree_splits", "num_ancestors", "sliding_window",
        "from_window", "direct", "sinks_ptr", "first_block", "num_blocks",
    )
)  # fmt: skip
def split_kernel(
    q_ptr, kv_ptr, best_ptr, total_ptr, acc_ptr, out_ptr, positions_ptr, slots_ptr, committed_ptr, ancestors_ptr,
    num_queries, first_query, end_query, num_rows, first_split, end_split, tree_splits, num_ancestors, sliding_window,
    from_window, direct, scale_log2e, cap_log2e, sinks_ptr, first_block, num_blocks,
    stride_slot: "tl.int64", stride_block: "tl.int64", stride_value: "tl.int64",
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, TREE: tl.constexpr,
    WINDOWED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    program = tl.program_id(0)
    batch = (tl.program_id(1) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    # Only the device knows where a tree begins: the splits that may hold keys of it are those from here on.
    committed = tl.load(committed_ptr + batch)
    first_of_tree = committed // SPLIT

    lane = tl.arange(0, ROWS)
    if TREE:  # one query a program: its ancestors are its own
        split = first_of_tree + tl.program_id(2)
        query = first_query + program + tl.zeros([ROWS], dtype=tl.int32)
        group = lane
        row_valid = lane < GROUP
    else:
        split = first_split + tl.program_id(2)
        query = first_query + (program * ROWS + lane) // GROUP
        group = (program * ROWS + lane) % GROUP
        row_valid = query < end_query
    row = batch * num_queries + query  # [ROWS] flat query index
    own = split + tl.zeros([ROWS], dtype=tl.int32)  # as the row counts the splits
    if WINDOWED:  # from the first one on that its window reaches, if so few programs do for long contexts
        position = tl.load(positions_ptr + row, mask=row_valid, other=-1)
        origin = tl.maximum(position - sliding_window + 1, 0) // SPLIT * from_window
        least = tl.min(tl.where(position >= 0, origin, 2147483647), axis=0)
        least = tl.where(least == 2147483647, 0, least)
        if not TREE:
            split += least
            own += least
        own -= tl.where(position >= 0, origin, least)
    if TREE or WINDOWED:
        row_valid = row_valid & (own >= first_split) & (own < end_split)
    if not TREE:
        from_tree = split - first_of_tree + tl.zeros([ROWS], dtype=tl.int32)
        row_valid = row_valid & ((from_tree < 0) | (from_tree >= tree_splits))
    head = kv_head * GROUP + group
    channel = tl.arange(0, D_BLOCK)
    channel_valid = channel < HEAD_DIM
    row_offset = (row * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    row_mask = row_valid[:, None] & channel_valid[None, :]
    q = tl.load(q_ptr + row_offset[:, None] + channel[None, :], mask=row_mask, other=0.0)
    position = tl.load(positions_ptr + row, mask=row_valid, other=-1)  # [ROWS]
    first = split * SPLIT
    begin, end = 0, tl.minimum(tl.max(position, axis=0) + 1 - first, SPLIT)
    if WINDOWED:
        begin = tl.maximum(0, (_first_seen(position, sliding_window) - first) // TILE * TILE)

    slot = tl.load(slots_ptr + batch).to(tl.int64)
    base_ptrs = kv_ptr + slot * stride_slot + kv_head * (SPLIT * HEAD_DIM) + channel[None, :]
    ancestor_ptr = ancestors_ptr + (batch * num_queries + first_query + program) * num_ancestors
    best, total, acc = _attend_split(
        q, base_ptrs, channel_valid, position, first, begin, end, sliding_window, scale_log2e, cap_log2e, committed,
        ancestor_ptr, first_block, num_blocks, stride_block, stride_value, HEAD_DIM, TILE, SPLIT, STAGES, TREE, True,
        WINDOWED,
    )  # fmt: skip

    if OVERLAP:
        gdc_launch_dependents()
    partial_row = batch * (end_query - first_query) + (query - first_query)
    partial = ((own - first_split).to(tl.int64) * num_rows + partial_row) * (NUM_KV_HEADS * GROUP) + head
    # The only split of a query needs no merge. No constant, so that it is the same instructions that make it; a merge
    # would add the first split to a positive zero.
    to_final = direct + tl.zeros([ROWS], dtype=tl.int32) != 0
    final = attended(best, total, acc + 0.0, sinks_ptr, head, row_valid).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row_offset[:, None] + channel[None, :], final, mask=row_mask & to_final[:, None])
    kept = row_valid & (to_final == 0)
    tl.store(acc_ptr + partial[:, None] * HEAD_DIM + channel[None, :], acc, mask=row_mask & kept[:, None])
    tl.store(best_ptr + partial, best, mask=kept)
    tl.store(total_ptr + partial, total, mask=kept)


@jit(
    do_not_specialize=(
        "positions_ptr", "slots_ptr", "num_queries", "sliding_window", "sinks_ptr", "first_block", "num_blocks",
    )
)  # fmt: skip
def prefill_kernel(
    q_ptr, kv_ptr, out_ptr, positions_ptr, slots_ptr, num_queries, sliding_window, scale_log2e, cap_log2e, sinks_ptr,
    first_block, num_blocks, stride_slot: "tl.int64", stride_block: "tl.int64", stride_value: "tl.int64",
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys first
    batch = (tl.program_id(1) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    lane = program * ROWS + tl.arange(0, ROWS)
    query, head = lane // GROUP, kv_head * GROUP + lane % GROUP
    row_valid = query < num_queries
    channel = tl.arange(0, D_BLOCK)
    channel_valid = channel < HEAD_DIM
    row = batch * num_queries + query
    row_offset = (row * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    row_mask = row_valid[:, None] & channel_valid[None, :]
    q = tl.load(q_ptr + row_offset[:, None] + channel[None, :], mask=row_mask, other=0.0)
    position = tl.load(positions_ptr + row, mask=row_valid, other=-1)
    end = tl.max(position, axis=0) + 1
    begin = 0
    # Splits that all rows see from end to end, most of a long prompt, need no masks.
    whole = tl.maximum(0, tl.minimum(_first_seen(position, 0), end)) // SPLIT
    if WINDOWED:
        begin = tl.maximum(0, _first_seen(position, sliding_window) // TILE * TILE)
        whole = begin // SPLIT
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    base_ptrs = kv_ptr + slot * stride_slot + kv_head * (SPLIT * HEAD_DIM) + channel[None, :]

    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, D_BLOCK], dtype=tl.float32)
    for split in range(0 if WINDOWED else whole):
        split_best, split_total, split_acc = _attend_split(
            q, base_ptrs, channel_valid, position, split * SPLIT, 0, SPLIT, sliding_window, scale_log2e, cap_log2e, 0,
            kv_ptr, first_block, num_blocks, stride_block, stride_value, HEAD_DIM, TILE, SPLIT, STAGES, False, False,
            WINDOWED,
        )  # fmt: skip
        best, total, acc = _merge_split(best, total, acc, split_best, split_total, split_acc)
    for split in range(whole, tl.cdiv(end, SPLIT)):
        first = split * SPLIT
        split_best, split_total, split_acc = _attend_split(
            q, base_ptrs, channel_valid, position, first, tl.maximum(begin - first, 0), tl.minimum(end - first, SPLIT),
            sliding_window, scale_log2e, cap_log2e, 0, kv_ptr, first_block, num_blocks, stride_block, stride_value,
            HEAD_DIM, TILE, SPLIT, STAGES, False, True, WINDOWED,
        )  # fmt: skip
        best, total, acc = _merge_split(best, total, acc, split_best, split_total, split_acc)
    out = attended(best, total, acc, sinks_ptr, head, row_valid)
    out = tl.where(position[:, None] >= 0, out, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row_offset[:, None] + channel[None, :], out, mask=row_mask)


# `carried` and `finish` are no constants: merging in one call or in several runs the same instructions.
@jit(
    do_not_specialize=(
        "split_total_ptr", "best_ptr", "total_ptr", "sinks_ptr", "num_splits", "num_rows", "num_queries", "first_query",
        "end_query", "carried", "finish",
    )
)  # fmt: skip
def merge_kernel(
    split_best_ptr, split_total_ptr, split_acc_ptr, best_ptr, total_ptr, acc_ptr, out_ptr, sinks_ptr,
    num_splits, num_rows, num_queries, first_query, end_query, carried, finish,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, D_BLOCK)[None, :]
    inside = channel < HEAD_DIM
    one = tl.zeros([1], dtype=tl.int32)
    part_queries = end_query - first_query
    state = ((row // part_queries) * num_queries + first_query + row % part_queries) * NUM_HEADS + head + one
    at = state[:, None] * HEAD_DIM + channel
    best = tl.load(best_ptr + state, mask=one + carried != 0, other=float("-inf"))
    seen = best > float("-inf")
    total = tl.load(total_ptr + state, mask=seen, other=0.0)
    # Lane by lane: the interpreter turns a broadcast truth value into an integer, which is no mask.
    acc = tl.load(acc_ptr + at, mask=inside & (best[:, None] + tl.zeros_like(channel) > float("-inf")), other=0.0)
    for split in tl.range(0, num_splits, num_stages=STAGES):
        index = (split * num_rows + row) * NUM_HEADS + head + one
        split_best = tl.load(split_best_ptr + index)
        split_total = tl.load(split_total_ptr + index)
        split_acc = tl.load(split_acc_ptr + index[:, None] * HEAD_DIM + channel, mask=inside, other=0.0)
        best, total, acc = _merge_split(best, total, acc, split_best, split_total, split_acc)
    if OVERLAP:
        gdc_launch_dependents()
    finishing = inside & (finish + tl.zeros_like(channel) != 0)
    kept = finish + one == 0
    out = attended(best, total, acc, sinks_ptr, head + one, one == 0)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=finishing)
    tl.store(acc_ptr + at, acc, mask=inside & (finish + tl.zeros_like(channel) == 0))
    tl.store(best_ptr + state, best, mask=kept)
    tl.store(total_ptr + state, total, mask=kept)
