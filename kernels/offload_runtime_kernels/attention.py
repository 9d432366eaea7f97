"""Attention of a few queries (a window) or many (prefill) over a cache, independent of everything but the query itself.

    out[t] = softmax(scale * q[t] . K[visible(t)]) V[visible(t)]
    visible(t) = positions <= positions[t] (and in the sliding window)

The keys are cut at *absolute* positions: tiles of 64, splits of 256 tokens, the blocks of the cache. Each split of a
query is one online softmax over its tiles in order, and the splits are merged in order. A masked key contributes an
exact zero, so the bits of out[t] depend on the query's position, its own vector and the keys it sees: not on the other
queries of the window, not on how long the cache is, not on which program it shares. In a tree, the keys of a query's
ancestors are gathered into the places that their positions have in a plain sequence, so a path through a tree gives the
bits of a chain. The merge can stop after any split and go on later from its state (`attend_blocks`), so the cache may
come in pieces.

Prefill runs the same loop without splits: as independent of how the prompt is cut into pieces.
"""

from dataclasses import dataclass

import torch

from offload_runtime_kernels._jit import jit, tl, triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

TILE_TOKENS = 64
SPLIT_TOKENS = BLOCK_TOKENS
_SPLIT = tl.constexpr(SPLIT_TOKENS)
_LOG2E = 1.4426950408889634
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


@dataclass(frozen=True)
class AttentionState:
    """Where the merge of splits has got to: maximum and sum in powers of two, and the weighted values.

    `best`, `total` [B, T, H], `acc` [B, T, H, D], fp32. A slice of it is some sequences' part, not a copy.
    """

    best: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor

    @classmethod
    def empty(cls, q: torch.Tensor) -> "AttentionState":
        """The state of queries [B, T, H, D] that have seen no key."""
        best = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
        acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        return cls(best, torch.zeros_like(best), acc)

    def __getitem__(self, rows: slice) -> "AttentionState":
        return AttentionState(self.best[rows], self.total[rows], self.acc[rows])


def _key_positions(rows: QueryRows, slots: torch.Tensor) -> torch.Tensor:
    """Position of the key in each slot as each query sees it, out of reach where it sees none: [B, T, S]."""
    batch, num_queries = rows.positions.shape
    if rows.ancestors is None or rows.committed is None:
        return slots.expand(batch, num_queries, len(slots))
    committed = rows.committed[:, None, None]
    positions = rows.positions[..., None]
    hidden = torch.iinfo(torch.int32).max
    found = torch.where(slots < committed, slots, hidden).expand(batch, num_queries, len(slots)).clone()
    depth = torch.arange(rows.ancestors.shape[2], device=slots.device)
    ancestor_positions = committed + depth  # [B, 1, A]
    used = ancestor_positions <= positions
    b, t, a = used.nonzero(as_tuple=True)
    found[b, t, rows.ancestors[b, t, a].long()] = ancestor_positions.expand_as(used)[b, t, a]
    return found


def attention_reference(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, *, scale: float, sliding_window: int | None = None
) -> torch.Tensor:
    """Plain torch version of `attention`, through a dense mask over slots."""
    num_heads = q.shape[2]
    # What a tree's queries see may lie behind the largest position.
    reach = rows.max_length if rows.ancestors is None else rows.max_length + rows.positions.shape[1]
    length = min(reach, (kv.first_block + kv.num_blocks) * SPLIT_TOKENS)
    slots = torch.arange(length, device=q.device)
    k, v = (part.transpose(1, 2) for part in kv.at(rows.sequences[:, None], slots))  # [B, H_kv, S, D]
    positions = rows.positions[..., None]  # [B, T, 1]
    key_positions = _key_positions(rows, slots)
    visible = key_positions <= positions
    if sliding_window is not None:
        visible &= key_positions > positions - sliding_window
    padding = rows.positions < 0
    visible |= padding[..., None]  # a row without any key would be NaN
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=visible[:, None], scale=scale, enable_gqa=num_heads != k.shape[1]
    )
    return out.transpose(1, 2).masked_fill(padding[..., None, None], 0)


def attend_blocks_reference(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState, *, scale: float,
    sliding_window: int | None = None, num_keys: int | None = None,
) -> None:  # fmt: skip
    """Plain torch version of `attend_blocks`: query by query, block by block, so that no bit depends on the others."""
    positions = rows.positions.tolist()
    for b, row in enumerate(positions):
        for t, position in enumerate(row):
            if position >= 0:
                _attend_one(
                    q[b, t], kv, rows, (b, t, position), blocks, (state.best[b, t], state.total[b, t], state.acc[b, t]),
                    scale=scale, sliding_window=sliding_window, num_keys=num_keys,
                )  # fmt: skip


def _attend_one(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, query: tuple[int, int, int], blocks: range,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, scale: float, sliding_window: int | None,
    num_keys: int | None,
) -> None:  # fmt: skip
    """Merge what query [H, D] sees of the blocks into its state."""
    b, t, position = query
    end = position + 1 if num_keys is None else min(position + 1, num_keys)
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    blocks = range(max(blocks.start, first // SPLIT_TOKENS), min(blocks.stop, -(-end // SPLIT_TOKENS)))
    if not blocks:
        return
    slots = torch.arange(blocks.start * SPLIT_TOKENS, blocks.stop * SPLIT_TOKENS)
    inside = (slots >= first) & (slots < end)
    if rows.ancestors is not None and rows.committed is not None:
        committed = int(rows.committed[b])
        tentative = inside & (slots >= committed)
        slots = slots.clone()
        slots[tentative] = rows.ancestors[b, t, : int(tentative.sum())].long()
    # Slots out of reach are read as the first one: whatever lies there meets no weight, and must not be NaN.
    k, v = kv.at(rows.sequences[b], torch.where(inside, slots, slots[inside][0]))  # [S, H_kv, D]
    grouped = q.view(k.shape[1], -1, k.shape[2]).float()  # [H_kv, G, D]
    for start in range(0, len(slots), SPLIT_TOKENS):  # one product a block: a batched one sums by its own size
        part = slice(start, start + SPLIT_TOKENS)
        scores = torch.matmul(grouped, k[part].permute(1, 2, 0).float()) * (scale * _LOG2E)  # [H_kv, G, 256]
        scores.masked_fill_(~inside[part], float("-inf"))
        best = scores.amax(-1)
        weights = torch.exp2(scores - best[..., None])
        acc = torch.matmul(weights, v[part].transpose(0, 1).float())  # [H_kv, G, D]
        _merge(state, best.flatten(), weights.sum(-1).flatten(), acc.flatten(0, 1))


def _merge(
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor], best: torch.Tensor, total: torch.Tensor, acc: torch.Tensor
) -> None:
    """Merge a split ([H], [H], [H, D]) into a state of the same shapes."""
    state_best, state_total, state_acc = state
    new_best = torch.maximum(state_best, best)
    kept, added = torch.exp2(state_best - new_best), torch.exp2(best - new_best)
    state_total.mul_(kept).add_(total * added)
    state_acc.mul_(kept[:, None]).add_(acc * added[:, None])
    state_best.copy_(new_best)


# Specialising on these would compile another binary for a window of one token than for one of seventeen.
@jit(
    do_not_specialize=(
        "num_queries", "num_rows", "first_split", "num_ancestors", "num_keys", "first_block", "num_blocks",
        "stride_sequence", "stride_block", "stride_values",
    )
)  # fmt: skip
def _attention_kernel(
    q_ptr, kv_ptr, out_ptr, lse_ptr, positions_ptr, sequences_ptr, committed_ptr, ancestors_ptr,
    num_queries, num_rows, first_split, num_ancestors, num_keys, first_block, num_blocks, sliding_window, scale_log2e,
    stride_sequence, stride_block, stride_values,
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
    end = tl.minimum(tl.max(position, axis=0) + 1, num_keys)
    begin = 0
    if SPLIT_KV:
        begin = split * SPLIT
        end = tl.minimum(end, begin + SPLIT)
    if WINDOWED:
        first_seen = tl.min(tl.where(position >= 0, position, 2147483647), axis=0) - sliding_window + 1
        begin = tl.maximum(begin, (first_seen // TILE) * TILE)

    sequence = tl.load(sequences_ptr + batch).to(tl.int64)
    base = kv_ptr + sequence * stride_sequence + kv_head * (_SPLIT * HEAD_DIM)
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
            ancestor = (batch * num_queries + block) * num_ancestors + (key_position - committed)
            slot = tl.where(tentative, tl.load(ancestors_ptr + ancestor, mask=tentative, other=0), key_position)
            place = ((slot // _SPLIT - first_block) % num_blocks).to(tl.int64)
            offset = place * stride_block + (slot % _SPLIT) * HEAD_DIM
        else:  # a tile lies in one block
            place = ((start // _SPLIT - first_block) % num_blocks).to(tl.int64)
            offset = place * stride_block + (key_position % _SPLIT) * HEAD_DIM
        load_mask = key_valid[:, None] & channel_valid[None, :]
        k = tl.load(base + offset[:, None] + channel[None, :], mask=load_mask, other=0.0)
        v = tl.load(base + stride_values + offset[:, None] + channel[None, :], mask=load_mask, other=0.0)
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
        split_rows = tl.program_id(2).to(tl.int64) * num_rows + row
        partial = (split_rows * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(out_ptr + partial[:, None] + channel[None, :], out, mask=out_mask)
        lse = tl.where(total == 0.0, float("-inf"), best + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse_ptr + split_rows * (NUM_KV_HEADS * GROUP) + head, lse, mask=row_valid)
    else:
        tl.store(out_ptr + row_offset[:, None] + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=out_mask)


@jit(do_not_specialize=("num_splits", "num_rows"))
def _merge_kernel(
    partial_ptr, lse_ptr, best_ptr, total_ptr, acc_ptr, out_ptr, num_splits, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, FROM_STATE: tl.constexpr,
    TO_STATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, D_BLOCK)
    place = row * NUM_HEADS + head
    best = float("-inf")
    total = 0.0
    acc = tl.zeros([D_BLOCK], dtype=tl.float32)
    if FROM_STATE:
        best = tl.load(best_ptr + place)
        total = tl.load(total_ptr + place)
        acc = tl.load(acc_ptr + place * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=0.0)
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
    if TO_STATE:
        tl.store(best_ptr + place, best)
        tl.store(total_ptr + place, total)
        tl.store(acc_ptr + place * HEAD_DIM + channel, acc, mask=channel < HEAD_DIM)
    else:
        # Rounded as torch rounds it, for `finish_attention`.
        out = tl.div_rn(acc, tl.where(total == 0.0, 1.0, total) + tl.zeros_like(acc))
        tl.store(out_ptr + place * HEAD_DIM + channel, out.to(out_ptr.dtype.element_ty), mask=channel < HEAD_DIM)


@dataclass(frozen=True)
class _Launch:
    """Arguments that the launches of one call share."""

    kv: KVBlocks
    rows: QueryRows
    scale: float
    sliding_window: int | None
    num_keys: int = 2**31 - 1

    def run(
        self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, positions: torch.Tensor,
        ancestors: torch.Tensor | None, *, splits: range | None,
    ) -> None:  # fmt: skip
        """Enqueue one launch over `splits` (None: the whole range in one loop) on the current stream."""
        batch, num_queries, num_heads, head_dim = q.shape
        num_kv_heads = self.kv.num_kv_heads
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
            q, self.kv.data, out, lse, positions, self.rows.sequences,
            self.rows.committed if tree else unused, ancestors if tree else unused,
            num_queries, batch * num_queries, splits.start if splits is not None else 0,
            ancestors.shape[2] if ancestors is not None else 0,
            self.num_keys, self.kv.first_block, self.kv.num_blocks,
            self.sliding_window or 0, self.scale * _LOG2E, *self.kv.data.stride()[:3],
            NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
            D_BLOCK=channels, ROWS=rows_per_program, TILE=TILE_TOKENS if channels * q.element_size() <= 512 else 32,
            SPLIT=SPLIT_TOKENS, SPLIT_KV=splits is not None, TREE=tree, WINDOWED=self.sliding_window is not None,
            FP32_DOT=q.dtype == torch.float32, num_warps=4,
            num_stages=1 if wide else 2,
        )  # fmt: skip


def _window_part(
    launch: _Launch, q: torch.Tensor, part: slice, splits: range, state: AttentionState | None, out: torch.Tensor | None
) -> None:
    """Split, then merge, the queries of `part` over `splits`: into the state, or from nothing into out[:, part]."""
    rows = launch.rows
    batch, _, num_heads, head_dim = q.shape
    q_part = q[:, part].contiguous()
    positions = rows.positions[:, part].contiguous()
    num_rows = batch * q_part.shape[1]
    partial = torch.empty(len(splits), num_rows, num_heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(len(splits), num_rows, num_heads, dtype=torch.float32, device=q.device)
    common = splits.stop if rows.ancestors is None else min(rows.min_committed // SPLIT_TOKENS, splits.stop)
    shared, own = range(splits.start, max(common, splits.start)), range(max(common, splits.start), splits.stop)
    if shared:
        launch.run(q_part, partial, lse, positions, None, splits=shared)
    if own:
        assert rows.ancestors is not None
        ancestors = rows.ancestors[:, part].contiguous()
        launch.run(q_part, partial[len(shared) :], lse[len(shared) :], positions, ancestors, splits=own)
    if state is None:
        merged = torch.empty_like(q_part)
        held = (lse, lse, lse)
    else:
        merged = q_part
        held = tuple(tensor[:, part].contiguous() for tensor in (state.best, state.total, state.acc))
    _merge_kernel[(num_rows, num_heads)](
        partial, lse, *held, merged, len(splits), num_rows,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, D_BLOCK=triton.next_power_of_2(head_dim),
        FROM_STATE=state is not None, TO_STATE=state is not None, num_warps=1,
    )  # fmt: skip
    if state is not None:
        for tensor, new in zip((state.best, state.total, state.acc), held, strict=True):
            if tensor[:, part].data_ptr() != new.data_ptr():
                tensor[:, part] = new
    elif out is not None:
        out[:, part] = merged


def _parts(q: torch.Tensor, num_splits: int) -> list[slice]:
    """Queries in parts whose partial results fit the workspace."""
    batch, num_queries, num_heads, head_dim = q.shape
    step = max(1, WORKSPACE_BYTES // (num_splits * batch * num_heads * (head_dim + 1) * 4))
    return [slice(start, min(start + step, num_queries)) for start in range(0, num_queries, step)]


def _check(q: torch.Tensor, kv: KVBlocks, rows: QueryRows) -> None:
    batch, num_queries, num_heads, _ = q.shape
    assert q.is_contiguous() and rows.positions.is_contiguous()
    assert num_heads % kv.num_kv_heads == 0 and rows.positions.shape == (batch, num_queries)
    assert rows.ancestors is None or rows.committed is not None


def attention_triton(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, *, scale: float, sliding_window: int | None = None,
    prefill: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `attention`."""
    _check(q, kv, rows)
    assert rows.ancestors is None or not prefill
    launch = _Launch(kv, rows, scale, sliding_window)
    out = torch.empty_like(q)
    if prefill:
        launch.run(q, out, out, rows.positions, None, splits=None)
        return out
    splits = range(triton.cdiv(rows.max_length, SPLIT_TOKENS))
    for part in _parts(q, len(splits)):
        _window_part(launch, q, part, splits, None, out)
    return out


def attend_blocks_triton(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState, *, scale: float,
    sliding_window: int | None = None, num_keys: int | None = None,
) -> None:  # fmt: skip
    """Triton version of `attend_blocks`."""
    _check(q, kv, rows)
    launch = _Launch(kv, rows, scale, sliding_window, 2**31 - 1 if num_keys is None else num_keys)
    for part in _parts(q, len(blocks)):
        _window_part(launch, q, part, blocks, state, None)


def attend_blocks(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState, *, scale: float,
    sliding_window: int | None = None, num_keys: int | None = None,
) -> None:  # fmt: skip
    """Attend to some blocks and merge what they give into the state.

    Called with consecutive ranges that cover everything, then finished, this gives the bits of `attention`.

    Args:
        q: [B, T, H, D], contiguous.
        kv: Where the blocks lie; those that are not in `blocks` need not be there.
        rows: Which keys each query sees, by absolute positions.
        blocks: Absolute numbers of consecutive blocks.
        state: Of these queries; updated in place.
        scale: Multiplies the dot products.
        sliding_window: Tokens that a query sees, itself included; None for all.
        num_keys: There are no keys at this position and behind it; None: up to each query's own.

    Enqueues on the current stream and never synchronises.
    """
    if not blocks:
        return
    run = attend_blocks_triton if q.is_cuda else attend_blocks_reference
    run(q, kv, rows, blocks, state, scale=scale, sliding_window=sliding_window, num_keys=num_keys)


def finish_attention(q: torch.Tensor, rows: QueryRows, state: AttentionState) -> torch.Tensor:
    """[B, T, H, D] in the dtype of `q`: what the state amounts to; zero for padding rows."""
    total = torch.where(state.total == 0, 1.0, state.total)
    return (state.acc / total[..., None]).to(q.dtype).masked_fill_((rows.positions < 0)[..., None, None], 0)


def attention(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, *, scale: float, sliding_window: int | None = None,
    prefill: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attend from rotated queries to the cache, the queries' own keys included (they are written before).

    Args:
        q: [B, T, H, D], contiguous.
        kv: Rotated keys, and values. What lies beyond a query's own reach is never used, but must be finite within
            `max_length`.
        rows: Which keys each query sees.
        scale: Multiplies the dot products, usually D ** -0.5.
        sliding_window: Tokens that a query sees, itself included; None for all.
        prefill: Choose the variant for many queries. Its bits differ from the other's; both are independent of how
            the queries are grouped.

    Returns:
        [B, T, H, D] in the dtype of `q`; zero for padding rows.
    """
    if q.is_cuda:
        return attention_triton(q, kv, rows, scale=scale, sliding_window=sliding_window, prefill=prefill)
    if prefill:
        return attention_reference(q, kv, rows, scale=scale, sliding_window=sliding_window)
    state = AttentionState.empty(q)
    blocks = range(-(-rows.max_length // SPLIT_TOKENS))
    attend_blocks_reference(q, kv, rows, blocks, state, scale=scale, sliding_window=sliding_window)
    return finish_attention(q, rows, state)
