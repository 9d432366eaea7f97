"""Attention on the CPU: the dense reference, and what has the same bits for windows and prompts.

torch sums in another order for other numbers of queries and keys, for other alignments of a matrix, and in other
threads, which in 16 bits shows in every other text. So it is always given eight places for queries and one whole block
of keys: the query's position alone says which place is its own and how threads share the work.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from offload_runtime_kernels.attention_state import AttentionState, KeySource, QueryRows
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

_LOG2_E = 1.4426950408889634
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
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState | torch.Tensor, *,
    scale: float, sliding_window: int | None = None, num_keys: int | None = None, gathered_bytes: int = GATHERED_BYTES,
) -> None:  # fmt: skip
    """CPU version of `attend_blocks`; reads positions on the host, and keys of a tree's paths so many bytes a time.

    In place of a state there may be the attention itself, [B, T, H, D], of queries that see nothing else.
    """
    heads = q.float().unflatten(2, (kv.num_kv_heads, -1))  # [B, T, H_kv, G, D]
    committed = rows.committed.tolist() if rows.ancestors is not None and rows.committed is not None else None
    for b, (sequence, positions) in enumerate(zip(rows.sequences.tolist(), rows.positions.tolist(), strict=True)):
        seen = {
            t: range(
                0 if sliding_window is None else max(0, position + 1 - sliding_window),
                position + 1 if num_keys is None else min(position + 1, num_keys),
            )
            for t, position in enumerate(positions)
            if position >= 0
        }
        if not seen:
            continue
        # Siblings of a tree stand at one position.
        alone = committed is not None or len({positions[t] for t in seen}) < len(seen)
        tiles = _Tiles(heads[b], positions, seen, alone=alone)
        if isinstance(state, AttentionState):
            tiles.load(state, b)
        end = max(keys.stop for keys in seen.values())
        first = max(blocks.start, min(keys.start for keys in seen.values()) // BLOCK_TOKENS)
        for block in range(first, min(blocks.stop, -(-end // BLOCK_TOKENS))):
            start = block * BLOCK_TOKENS
            committed_here = BLOCK_TOKENS if committed is None else max(0, committed[b] - start)
            data = kv.data[sequence, (block - kv.first_block) % kv.num_blocks]
            keys = _fp32_block(data, min(end - start, committed_here))
            for chosen, own in _keys_of_tiles(tiles, keys, kv, rows, b, committed_here, start, gathered_bytes):
                tiles.attend(chosen, own, start, scale)
        if isinstance(state, AttentionState):
            tiles.store(state, b)
        else:
            state[b][tiles.queries] = tiles.result().to(state.dtype)


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


class _Tiles:
    """The queries of one sequence by eight, each in the place that its position gives it, and their softmax so far.

    Args:
        q: [T, H_kv, G, D] fp32.
        positions: Of the T queries.
        keys: Of each query that sees any, which.
        alone: Each query has a tile of its own.
    """

    def __init__(self, q: torch.Tensor, positions: Sequence[int], keys: Mapping[int, range], *, alone: bool) -> None:
        numbers: dict[tuple[int, int], int] = {}
        tiles = [numbers.setdefault((positions[t] // _TILE_QUERIES, t if alone else 0), len(numbers)) for t in keys]
        places = [tile * _TILE_QUERIES + positions[t] % _TILE_QUERIES for t, tile in zip(keys, tiles, strict=True)]
        self.queries, self._places, self._group = torch.tensor(list(keys)), torch.tensor(places), q.shape[2]
        # The keys that each place sees. Where there is no query all are seen, as nothing but NaN would come of none.
        self._seen = [range(1 << 31)] * (_TILE_QUERIES * len(numbers))
        self.reach = [range(0)] * len(numbers)  # the keys that any of a tile sees
        for place, tile, seen in zip(places, tiles, keys.values(), strict=True):
            reach = self.reach[tile] or seen
            self._seen[place] = seen
            self.reach[tile] = range(min(reach.start, seen.start), max(reach.stop, seen.stop))
        self._q = self._spread(q[self.queries])
        self._best = self._q.new_full(self._q.shape[:3], float("-inf"))
        self._total, self._acc = torch.zeros_like(self._best), torch.zeros_like(self._q)
        self._fresh = True  # nothing has been seen yet

    def _spread(self, values: torch.Tensor, empty: float = 0.0) -> torch.Tensor:
        """[queries, H_kv, G, ...] in their places: [tiles, H_kv, 8 * G, ...]."""
        spread = values.new_full((len(self._seen), *values.shape[1:]), empty)
        spread[self._places] = values
        return spread.unflatten(0, (-1, _TILE_QUERIES)).transpose(1, 2).flatten(2, 3)

    def _gathered(self, spread: torch.Tensor) -> torch.Tensor:
        """[tiles, H_kv, 8 * G, ...] of the queries: [queries, H, ...]."""
        places = spread.unflatten(2, (_TILE_QUERIES, self._group)).transpose(1, 2).flatten(0, 1)
        return places[self._places].flatten(1, 2)

    def load(self, state: AttentionState, b: int) -> None:
        """Begin with what has been seen of the queries of batch row b."""
        best = state.best[b][self.queries]
        fresh = best == float("-inf")
        if fresh.all():
            return
        total = state.total[b][self.queries].masked_fill(fresh, 0.0)
        acc = state.acc[b][self.queries].masked_fill(fresh[..., None], 0.0)
        grouped = (one.unflatten(1, (-1, self._group)) for one in (best, total, acc))
        self._best, self._total, self._acc = map(self._spread, grouped, (float("-inf"), 0.0, 0.0))
        self._fresh = False

    def store(self, state: AttentionState, b: int) -> None:
        """Write what has been seen now."""
        for kept, own in ((state.best, self._best), (state.total, self._total), (state.acc, self._acc)):
            kept[b][self.queries] = self._gathered(own)

    def result(self) -> torch.Tensor:
        """The attention of the queries that there are: [queries, H, D] fp32."""
        return self._gathered(self._acc / self._total[..., None])

    def attend(self, chosen: list[int], keys: torch.Tensor, start: int, scale: float) -> None:
        """Merge a split, whose keys [2, H_kv, 256, D] begin at position `start`, into the chosen tiles."""
        seen = [self._seen[tile * _TILE_QUERIES + place] for tile in chosen for place in range(_TILE_QUERIES)]
        shape = (len(chosen), 1, _TILE_QUERIES, 1)
        bounds = torch.tensor([[keys.start - start, keys.stop - start] for keys in seen]).view(*shape, 2)
        key = torch.arange(BLOCK_TOKENS)
        visible = (bounds[..., 0] <= key) & (key < bounds[..., 1])  # [n, 1, 8, 256]
        mask = torch.where(visible, 0.0, float("-inf")).repeat_interleave(self._group, dim=2)
        whole = len(chosen) == len(self.reach)
        at = slice(None) if whole else chosen
        # Heads of a group as queries of one head. This operator rather than the public one because it also returns the
        # log-sum-exp. It computes every tile and head by itself.
        part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self._q[at], *keys[:, None].expand(-1, len(chosen), -1, -1, -1), 0.0, False, attn_mask=mask, scale=scale
        )
        lse = lse * _LOG2_E
        unseen = [not (keys.start < start + BLOCK_TOKENS and start < keys.stop) for keys in seen]
        if any(unseen):
            none = torch.tensor(unseen).view(shape).repeat_interleave(self._group, dim=2)  # [n, 1, 8 G, 1]
            lse, part = lse.masked_fill(none[..., 0], float("-inf")), part.masked_fill(none, 0.0)
        if whole and self._fresh:  # what a merge with nothing comes to
            new_best, total, acc = lse, (lse > float("-inf")).float(), part + 0.0
        else:
            best, total, acc = self._best[at], self._total[at], self._acc[at]
            new_best = torch.maximum(best, lse)
            pivot = new_best.masked_fill(new_best == float("-inf"), 0.0)
            # Tile by tile: of how many numbers are asked for at once decides how they are rounded.
            shrink, weight = (torch.stack([torch.exp2(one) for one in side - pivot]) for side in (best, lse))
            total, acc = total * shrink + weight, acc * shrink[..., None] + part * weight[..., None]
        self._best[at], self._total[at], self._acc[at], self._fresh = new_best, total, acc, False


def _fp32_block(block: torch.Tensor, length: int) -> torch.Tensor:
    """A copy of a block [2, H_kv, 256, D] in fp32, aligned as any, with zeros behind its first `length` tokens.

    A split's own result is not rounded to 16 bits before it is merged, and 16-bit products are slow on most CPUs.
    """
    copy = torch.zeros(block.shape)
    copy[:, :, :length] = block[:, :, :length]
    return copy


def _keys_of_tiles(
    tiles: _Tiles, keys: torch.Tensor, kv: KVBlocks, rows: QueryRows, b: int, committed: int, start: int,
    gathered_bytes: int,
) -> Iterator[tuple[list[int], torch.Tensor]]:  # fmt: skip
    """The block `keys` [2, H_kv, 256, D] of positions from `start` on, as tiles see it, and which of them do.

    A path stands behind the `committed` keys, as if that were a plain sequence. Paths share a buffer: be done with one
    before the next is asked for.
    """
    stops = {
        tile: min(reach.stop - start, BLOCK_TOKENS)
        for tile, reach in enumerate(tiles.reach)
        if reach.start < start + BLOCK_TOKENS and start < reach.stop
    }
    branching = [tile for tile, stop in stops.items() if stop > committed]
    together = [tile for tile, stop in stops.items() if stop <= committed]
    if together:
        yield together, keys
    if not branching:
        return
    assert rows.ancestors is not None and rows.committed is not None
    path = keys.clone()
    depth = start - int(rows.committed[b])  # of the block's first position
    most = max(stops[tile] for tile in branching)
    at_once = max(1, gathered_bytes // ((most - committed) * keys[:, :, 0].nbytes))
    for first in range(0, len(branching), at_once):
        group = branching[first : first + at_once]
        # Each query has a tile of its own. Behind a path's end the slots say nothing.
        slots = rows.ancestors[b, tiles.queries[group], committed + depth : most + depth]
        paths = torch.stack(kv.at(rows.sequences[b], slots), dim=1).transpose(2, 3)  # [n, 2, H_kv, S, D]
        for tile, gathered in zip(group, paths, strict=True):
            path[:, :, committed : stops[tile]] = gathered[:, :, : stops[tile] - committed]
            yield [tile], path
