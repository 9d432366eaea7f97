"""Attention on the CPU: the dense reference, and what has the same bits for windows and prompts.

torch sums in another order for other numbers of queries and keys, for other alignments of a matrix, and in other
threads, which in 16 bits shows in every other text. So it is always given eight places for queries and one whole block
of keys: the query's position alone says which place is its own and how threads share the work.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from offload_runtime_kernels.attention_state import AttentionState, KeySource, QueryRows
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

_LOG2_E = 1.4426950408889634
_ALIGNMENT_BYTES = 64  # of every torch allocation on the CPU
# Queries whose positions divided by this give the same are computed at once; a block of keys is a multiple of it.
_TILE_QUERIES = 8
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
        keys_seen = {
            t: range(
                0 if sliding_window is None else max(0, position + 1 - sliding_window),
                position + 1 if num_keys is None else min(position + 1, num_keys),
            )
            for t, position in enumerate(positions)
            if position >= 0
        }
        tiles = _tiles(heads[b], positions, keys_seen, alone=committed is not None)
        first = max(blocks.start, min((seen.start for seen in keys_seen.values()), default=0) // BLOCK_TOKENS)
        end = max((seen.stop for seen in keys_seen.values()), default=0)
        for block in range(first, min(blocks.stop, -(-end // BLOCK_TOKENS))):
            start = block * BLOCK_TOKENS
            committed_here = BLOCK_TOKENS if committed is None else max(0, committed[b] - start)
            data = kv.data[sequence, (block - kv.first_block) % kv.num_blocks]
            keys = _fp32_block(data, min(end - start, committed_here))
            seeing = [tile for tile in tiles if tile.sees(start)]
            paths = _keys_of_paths(keys, kv, rows, b, seeing, committed_here, start, gathered_bytes)
            for tile, own in zip(seeing, paths, strict=True):
                tile.attend(own, start, state, b, scale)


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


@dataclass(frozen=True)
class _Tile:
    """Queries that are computed at once.

    `q` [1, H_kv, 8 * G, D] fp32, a position's queries in its own place; `queries` their numbers and `places` where they
    are; `begins` and `ends` [8, 1] the keys that each place sees, all keys where there is no query.
    """

    q: torch.Tensor
    queries: list[int]
    places: list[int]
    begins: torch.Tensor
    ends: torch.Tensor
    keys: range  # that any of them sees

    def sees(self, start: int) -> bool:
        """Whether any key of the block that begins at `start` is seen."""
        return self.keys.start < start + BLOCK_TOKENS and start < self.keys.stop

    def attend(self, keys: torch.Tensor, start: int, state: AttentionState, b: int, scale: float) -> None:
        """Merge the block `keys` [2, H_kv, 256, D], fp32, whose first position is `start`, into batch row b."""
        key = torch.arange(start, start + BLOCK_TOKENS)
        visible = (self.begins <= key) & (key < self.ends)  # [8, 256]
        group = self.q.shape[2] // _TILE_QUERIES
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf")).repeat_interleave(group, dim=0)
        # Heads of a group as queries of one head. This operator rather than the public one because it also returns the
        # log-sum-exp.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.q, keys[None, 0], keys[None, 1], 0.0, False, attn_mask=mask[None, None], scale=scale
        )
        part = out[0].unflatten(1, (_TILE_QUERIES, group)).transpose(0, 1).flatten(1, 2)  # [8, H, D]
        parts = lse[0].unflatten(1, (_TILE_QUERIES, group)).transpose(0, 1).flatten(1, 2)  # [8, H]
        seen = visible.any(dim=1).tolist()
        chosen = [(t, place) for t, place in zip(self.queries, self.places, strict=True) if seen[place]]
        places = [place for _, place in chosen]
        _merge_split(state, b, [t for t, _ in chosen], part[places], parts[places])


def _tiles(q: torch.Tensor, positions: Sequence[int], keys: Mapping[int, range], *, alone: bool) -> list[_Tile]:
    """The queries [T, H_kv, G, D] of one sequence, those that have `keys`, by eight or each alone."""
    groups = defaultdict[tuple[int, int], list[int]](list)
    for t in keys:
        groups[positions[t] // _TILE_QUERIES, t if alone else 0].append(t)
    tiles = []
    for queries in groups.values():
        places = [positions[t] % _TILE_QUERIES for t in queries]
        spread = q.new_zeros(_TILE_QUERIES, *q.shape[1:])
        spread[places] = q[queries]
        bounds = torch.tensor([[0], [1 << 31]]).repeat(1, _TILE_QUERIES)
        bounds[:, places] = torch.tensor([[keys[t].start for t in queries], [keys[t].stop for t in queries]])
        reach = range(min(keys[t].start for t in queries), max(keys[t].stop for t in queries))
        placed = spread.transpose(0, 1).flatten(1, 2)[None].contiguous()
        tiles.append(_Tile(placed, queries, places, bounds[0, :, None], bounds[1, :, None], reach))
    return tiles


def _fp32_block(block: torch.Tensor, length: int) -> torch.Tensor:
    """A block [2, H_kv, 256, D] in fp32, aligned, with zeros behind its first `length` tokens: a copy if it has to be.

    A split's own result is not rounded to 16 bits before it is merged, and 16-bit products are slow on most CPUs.
    """
    if length < BLOCK_TOKENS:
        whole = torch.zeros(block.shape)
        whole[:, :, :length] = block[:, :, :length]
        return whole
    block = block.float()
    return block if block.data_ptr() % _ALIGNMENT_BYTES == 0 else block.clone()


def _keys_of_paths(
    keys: torch.Tensor, kv: KVBlocks, rows: QueryRows, b: int, tiles: Sequence[_Tile], committed: int, start: int,
    gathered_bytes: int,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """The block `keys` [2, H_kv, 256, D] of positions from `start` on, as each tile sees it.

    A path stands behind the `committed` keys, as if that were a plain sequence. Paths share a buffer: be done with one
    before the next is asked for.
    """
    stops = {tile.queries[0]: min(tile.keys.stop - start, BLOCK_TOKENS) for tile in tiles}
    branching = [t for t, stop in stops.items() if stop > committed]
    if not branching:
        yield from (keys for _ in tiles)
        return
    assert rows.ancestors is not None and rows.committed is not None
    path = keys.clone()
    depth = start - int(rows.committed[b])  # of the block's first position
    most = max(stops[t] for t in branching)
    at_once = max(1, gathered_bytes // ((most - committed) * keys[:, :, 0].nbytes))
    gathered: dict[int, torch.Tensor] = {}
    for t, stop in stops.items():
        if stop <= committed:
            yield keys
            continue
        if t not in gathered:
            group = branching[branching.index(t) :][:at_once]
            slots = rows.ancestors[b, group, committed + depth : most + depth]  # behind a path's end they say nothing
            paths = torch.stack(kv.at(rows.sequences[b], slots), dim=1)  # [n, 2, S, H_kv, D]
            gathered = dict(zip(group, paths.transpose(2, 3).unbind(), strict=True))
        path[:, :, committed:stop] = gathered[t][:, :, : stop - committed]
        yield path


def _merge_split(state: AttentionState, b: int, queries: list[int], part: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge a split of some queries of batch row b, in place: its result [n, H, D] and log-sum-exp [n, H]."""
    lse = lse * _LOG2_E
    at = torch.tensor(queries)
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
