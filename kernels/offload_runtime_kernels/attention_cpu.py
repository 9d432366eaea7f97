"""Attention on the CPU: the dense reference, and windows whose bits do not depend on their company.

torch sums in another order for other numbers of queries and keys, for other alignments of a matrix, and in other
threads, which in 16 bits shows in every other text. So a window works on one query and one block of keys at a time: the
query's position alone says which shapes there are, how they are aligned and how threads share them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from offload_runtime_kernels.attention_state import AttentionState, KeySource, QueryRows
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

_LOG2_E = 1.4426950408889634
_ALIGNMENT_BYTES = 64  # of every torch allocation on the CPU
# Of keys and values of paths that are looked up at once, counted as fp32.
GATHERED_BYTES = 16 << 20


def _dense(kv: KVBlocks, sequences: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions 0 to `length` - 1 of sequences [B]: each [B, H_kv, length, D]."""
    numbers = torch.arange(-(-length // BLOCK_TOKENS), device=kv.data.device)
    blocks = kv.data[sequences.long()[:, None], (numbers - kv.first_block) % kv.num_blocks]  # [B, N, 2, H_kv, 256, D]
    k, v = (side.transpose(1, 2).flatten(2, 3)[:, :, :length] for side in blocks.unbind(2))
    return k, v


def attention_reference(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, *, scale: float, sliding_window: int | None = None
) -> torch.Tensor:
    """Plain torch version of `attention`, through a dense mask. Every position below `max_length` must be finite."""
    batch, num_queries, num_heads, head_dim = q.shape
    positions = rows.positions  # [B, T]
    key_positions = torch.arange(rows.max_length, device=q.device)
    if rows.ancestors is None or rows.committed is None:
        k, v = _dense(kv, rows.sequences, rows.max_length)
    else:  # every query has keys of its own: each is a batch member
        depth = (key_positions - rows.committed[:, None]).clamp(0, rows.ancestors.shape[2] - 1)  # [B, S]
        ancestors = rows.ancestors.gather(2, depth.long()[:, None].expand(-1, num_queries, -1))
        slots = torch.where(key_positions < rows.committed[:, None, None], key_positions, ancestors).flatten(0, 1)
        k, v = kv.at(rows.sequences.repeat_interleave(num_queries)[:, None], slots)
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B T, H_kv, S, D]
        q, positions = q.reshape(batch * num_queries, 1, num_heads, head_dim), positions.reshape(-1, 1)
    visible = key_positions <= positions[..., None]
    if sliding_window is not None:
        visible &= key_positions > positions[..., None] - sliding_window
    padding = positions < 0
    visible |= padding[..., None]  # a row without any key would be NaN
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=visible[:, None], scale=scale, enable_gqa=num_heads != k.shape[1]
    )
    out = out.transpose(1, 2).masked_fill(padding[..., None, None], 0)
    return out.reshape(batch, num_queries, num_heads, head_dim)


def attend_blocks_cpu(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState, *, scale: float,
    sliding_window: int | None = None, num_keys: int | None = None, gathered_bytes: int = GATHERED_BYTES,
) -> None:  # fmt: skip
    """CPU version of `attend_blocks`; reads positions on the host, and keys of a tree's paths so many bytes a time."""
    heads = q.float().unflatten(2, (kv.num_kv_heads, -1))  # [B, T, H_kv, G, D]
    committed = rows.committed.tolist() if rows.ancestors is not None and rows.committed is not None else None
    for b, (sequence, positions) in enumerate(zip(rows.sequences.tolist(), rows.positions.tolist(), strict=True)):
        ends = [position + 1 if num_keys is None else min(position + 1, num_keys) for position in positions]
        begins = [0 if sliding_window is None else max(0, p + 1 - sliding_window) for p in positions]
        first = max(blocks.start, min(begins) // BLOCK_TOKENS)
        queries = [query.clone() for query in heads[b].unbind()]  # each as aligned as any
        for block in range(first, min(blocks.stop, -(-max(ends) // BLOCK_TOKENS))):
            start = block * BLOCK_TOKENS
            keys = _fp32_block(kv.data[sequence, (block - kv.first_block) % kv.num_blocks])
            seen = {
                t: slice(max(begin - start, 0), min(end - start, BLOCK_TOKENS))
                for t, (begin, end) in enumerate(zip(begins, ends, strict=True))
                if begin - start < BLOCK_TOKENS and max(begin, start) < end
            }
            committed_here = BLOCK_TOKENS if committed is None else max(0, committed[b] - start)
            own = _keys_of_queries(keys, kv, rows, b, seen, committed_here, start, gathered_bytes)
            splits = [
                _split(queries[t], block_keys[:, :, part], scale)
                for (t, part), block_keys in zip(seen.items(), own, strict=True)
            ]
            _merge_splits(state, b, list(seen), splits)


def finish_attention_cpu(q: torch.Tensor, state: AttentionState) -> torch.Tensor:
    """CPU version of `finish_attention`."""
    unseen = state.best == float("-inf")
    return (state.acc / state.total[..., None]).masked_fill_(unseen[..., None], 0).to(q.dtype)


def attend_sources_cpu(q: torch.Tensor, sources: Sequence[KeySource], rows: QueryRows, *, scale: float) -> torch.Tensor:
    """CPU version of `attend_sources`; reads positions on the host."""
    assert rows.ancestors is None
    state = AttentionState.empty(q)
    for source in sources:
        own = rows if source.sequences is None else replace(rows, sequences=source.sequences)
        if source.bounds is None:
            attend_blocks_cpu(q, source.kv, own, source.blocks, state, scale=scale, num_keys=source.num_keys)
            continue
        for b, (first, num_keys) in enumerate(source.bounds.tolist()):
            row, blocks = slice(b, b + 1), range(first + source.blocks.start, first + source.blocks.stop)
            one = replace(own, positions=own.positions[row], sequences=own.sequences[row])
            attend_blocks_cpu(q[row], source.kv, one, blocks, state[row], scale=scale, num_keys=num_keys)
    return finish_attention_cpu(q, state)


def _fp32_block(block: torch.Tensor) -> torch.Tensor:
    """A block [2, H_kv, 256, D] in fp32, aligned: only a copy where it has to be."""
    # A split's own result is not rounded to 16 bits before it is merged, and 16-bit products are slow on most CPUs.
    block = block.float()
    return block if block.data_ptr() % _ALIGNMENT_BYTES == 0 else block.clone()


def _keys_of_queries(
    keys: torch.Tensor, kv: KVBlocks, rows: QueryRows, b: int, seen: Mapping[int, slice], committed: int, start: int,
    gathered_bytes: int,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """The block `keys` [2, H_kv, 256, D] of positions from `start` on, as each query sees it.

    Its path stands behind the `committed` ones, as if that were a plain sequence. Paths share a buffer: be done with
    one before the next is asked for.
    """
    branching = [t for t, part in seen.items() if part.stop > committed]
    if not branching:
        for _ in seen:
            yield keys
        return
    assert rows.ancestors is not None and rows.committed is not None
    path = torch.empty_like(keys)  # lies in memory as the block does
    path[:, :, :committed] = keys[:, :, :committed]
    depth = start - int(rows.committed[b])  # of the block's first position
    most = max(seen[t].stop for t in branching)
    at_once = max(1, gathered_bytes // ((most - committed) * keys[:, :, 0].nbytes))
    gathered: dict[int, torch.Tensor] = {}
    for t, part in seen.items():
        if part.stop <= committed:
            yield keys
            continue
        if t not in gathered:
            group = branching[branching.index(t) :][:at_once]
            slots = rows.ancestors[b, group, committed + depth : most + depth]  # behind a path's end they say nothing
            paths = torch.stack(kv.at(rows.sequences[b], slots), dim=1)  # [n, 2, S, H_kv, D]
            gathered = dict(zip(group, paths.transpose(2, 3).unbind(), strict=True))
        path[:, :, committed : part.stop] = gathered[t][:, :, : part.stop - committed]
        yield path


def _split(q: torch.Tensor, keys: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query [H_kv, G, D] over n keys and values [2, H_kv, n, D], fp32: [H, D], log-sum-exp [H]."""
    # Heads of a group as queries of one head, which need no mask. This operator rather than the public one because it
    # also returns the log-sum-exp.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], keys[None, 0], keys[None, 1], 0.0, False, attn_mask=None, scale=scale
    )
    return out.flatten(0, 2), lse.flatten()


def _merge_splits(
    state: AttentionState, b: int, queries: list[int], splits: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Merge a split of each of some queries, in place: the arithmetic of the GPU's merge kernel."""
    if not queries:
        return
    part, lse = (torch.stack(side) for side in zip(*splits, strict=True))  # [n, H, D], [n, H]
    lse *= _LOG2_E
    # Views, or copies of some rows.
    at = slice(None) if len(queries) == state.best.shape[1] else torch.tensor(queries, device=lse.device)
    best, total, acc = (one[b][at] for one in (state.best, state.total, state.acc))
    fresh = best[:, 0] == float("-inf")  # of all heads alike: they see the same positions
    if fresh.all():
        best, total, acc = lse, torch.ones_like(lse), part
    else:
        new_best = torch.maximum(best, lse)
        # Query by query: of how many numbers are asked for at once decides how they are rounded.
        shrink, weight = (torch.stack([torch.exp2(one) for one in side - new_best]) for side in (best, lse))
        merged = total * shrink + weight, acc * shrink[..., None] + part * weight[..., None]
        # Of what is fresh nothing but `best` has been written yet.
        best, total, acc = new_best, merged[0].masked_fill(fresh[:, None], 1), merged[1]
        acc[fresh] = part[fresh]
    state.best[b][at], state.total[b][at], state.acc[b][at] = best, total, acc
