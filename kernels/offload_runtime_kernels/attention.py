"""Attention of a few queries (a window) or many (prefill) over a cache, independent of everything but the query itself.

    out[t] = softmax(scale * q[t] . K[visible(t)]) V[visible(t)]
    visible(t) = positions <= positions[t] (and in the sliding window)

where a layer may cap its logits softly, and have a sink: one more logit of the softmax, without a value.

The keys are cut at *absolute* positions: tiles of 64, splits of 256 tokens, which are also the blocks that keys lie
in. Each split of a query is one online softmax over its tiles in order, and the splits are merged in order. A masked
key contributes an exact zero, so the bits of out[t] depend on the query's position, its own vector and the keys it
sees: not on the other queries of the window, not on how long the cache is, not on which program it shares. In a tree,
the keys of a query's ancestors are gathered into the places that their positions have in a plain sequence, so a path
through a tree gives the bits of a chain. Splits may come in several calls (`attend_blocks`), as pieces of a cache that
does not fit: what passes between them is what the merge keeps anyway, and one binary of each kernel serves whole
caches, pieces and rings. Sinks are merged once, behind everything else.

Where no bits are promised, all keys of a query may also come from several caches in one call (`attend_sources`).

Prompts are no exception: where there are enough queries to keep a GPU busy, one program does all splits of a query and
merges them itself, in the same order by the same arithmetic. So what was kept of a prompt, and what is read anew, have
the same bits, however either was cut into pieces. That is why no other flash kernels take its place where they are
installed: their sums depend on the cut, and tokens would with them.

On the CPU torch sums in another order for other numbers of queries and keys, for other alignments of a matrix, and in
other threads, which in 16 bits shows in every other text. So it is always given eight places for queries and one whole
block of keys: the query's position alone says which place is its own and how threads share the work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from offload_runtime_kernels.attention_sources import attend_sources_triton
from offload_runtime_kernels.attention_state import LOG2_E, AttentionParams, AttentionState, KeySource, QueryRows
from offload_runtime_kernels.attention_triton import (
    attend_blocks_triton,
    attention_triton,
    finish_attention_triton,
)
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

__all__ = [
    "AttentionParams",
    "AttentionState",
    "KeySource",
    "QueryRows",
    "attend_blocks",
    "attend_sources",
    "attention",
    "finish_attention",
]

# Queries whose positions divided by this give the same are computed at once; a block of keys is a multiple of it.
_TILE_QUERIES = 8
# Of keys and values of paths that are looked up at once, counted as fp32.
GATHERED_BYTES = 16 << 20


def _dense(kv: KVBlocks, slots: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions 0 to `length` - 1 of sequences [B]: each [B, H_kv, length, D]."""
    numbers = torch.arange(-(-length // BLOCK_TOKENS), device=kv.data.device)
    blocks = kv.data[slots.long()[:, None], (numbers - kv.first_block) % kv.num_blocks]  # [B, N, 2, H_kv, 256, D]
    k, v = (side.transpose(1, 2).flatten(2, 3)[:, :, :length] for side in blocks.unbind(2))
    return k, v


def attention_reference(q: torch.Tensor, kv: KVBlocks, rows: QueryRows, params: AttentionParams) -> torch.Tensor:
    """Plain torch version of `attention`, through a dense mask. Every position below `max_length` must be finite."""
    batch, num_queries, num_heads, head_dim = q.shape
    positions = rows.positions  # [B, T]
    key_positions = torch.arange(rows.max_length, device=q.device)
    if rows.ancestors is None or rows.committed is None:
        k, v = _dense(kv, rows.slots, rows.max_length)
    else:  # every query has keys of its own: each is a batch member
        depth = (key_positions - rows.committed[:, None]).clamp(0, rows.ancestors.shape[2] - 1)  # [B, S]
        ancestors = rows.ancestors.gather(2, depth.long()[:, None].expand(-1, num_queries, -1))
        cache_positions = torch.where(key_positions < rows.committed[:, None, None], key_positions, ancestors).flatten(
            0, 1
        )
        k, v = kv.at(rows.slots.repeat_interleave(num_queries)[:, None], cache_positions)
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B T, H_kv, S, D]
        q, positions = q.reshape(batch * num_queries, 1, num_heads, head_dim), positions.reshape(-1, 1)
    visible = key_positions <= positions[..., None]
    if params.window is not None:
        visible &= key_positions > positions[..., None] - params.window
    padding = positions < 0
    visible |= padding[..., None]  # a row without any key would be NaN
    q, mask = q.transpose(1, 2), torch.where(visible, 0.0, float("-inf")).to(q.dtype)[:, None]
    if params.soft_cap is not None:  # the capped logits stand in the mask, and there are no others
        logits = q @ k.repeat_interleave(num_heads // k.shape[1], dim=1).transpose(2, 3) * params.scale
        q, mask = torch.zeros_like(q), mask + params.soft_cap * torch.tanh(logits / params.soft_cap)
    if params.sinks is not None:  # keys and values of zeros, whose logits stand in the mask
        k, v = (torch.nn.functional.pad(side, (0, 0, 0, 1)) for side in (k, v))
        mask = mask.expand(-1, num_heads, -1, -1)
        mask = torch.cat((mask, params.sinks.to(mask.dtype)[:, None, None].expand_as(mask[..., :1])), dim=3)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=params.scale, enable_gqa=num_heads != k.shape[1]
    )
    out = out.transpose(1, 2).masked_fill(padding[..., None, None], 0)
    return out.reshape(batch, num_queries, num_heads, head_dim)


def attend_blocks_cpu(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState | torch.Tensor,
    params: AttentionParams, *, num_keys: int | None = None, gathered_bytes: int = GATHERED_BYTES,
) -> None:  # fmt: skip
    """CPU version of `attend_blocks`; reads positions on the host, and keys of a tree's paths so many bytes a time.

    In place of a state there may be the attention itself, [B, T, H, D], of queries that see nothing else.
    """
    committed = rows.committed.tolist() if rows.ancestors is not None and rows.committed is not None else None
    heads = (kv.num_kv_heads, q.shape[2] // kv.num_kv_heads)
    for b, (slot, positions) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        layout = _Layout.of(tuple(positions), params.window, num_keys, *heads, tree=committed is not None)
        if not layout.reach:
            continue
        tiles = _Tiles(layout, q[b])
        if isinstance(state, AttentionState):
            tiles.load(state, b)
        end = max(keys.stop for keys in layout.reach)
        first = max(blocks.start, min(keys.start for keys in layout.reach) // BLOCK_TOKENS)
        for block in range(first, min(blocks.stop, -(-end // BLOCK_TOKENS))):
            start = block * BLOCK_TOKENS
            committed_here = BLOCK_TOKENS if committed is None else max(0, committed[b] - start)
            data = kv.data[slot, (block - kv.first_block) % kv.num_blocks]
            # A copy in fp32, aligned as any, with zeros behind the tokens that there are: a split's own result is not
            # rounded to 16 bits before it is merged, and 16-bit products are slow on most CPUs.
            keys, length = torch.zeros(data.shape), min(end - start, committed_here)
            keys[:, :, :length] = data[:, :, :length]
            for at, own in _keys_of_tiles(layout, keys, kv, rows, b, committed_here, start, gathered_bytes):
                tiles.attend(at, own, start, params)
        tiles.store(state, b, params)


def _attended(params: AttentionParams, best: torch.Tensor, total: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """The attention [..., H, D] of queries that have seen all their keys; the sinks come last."""
    if params.sinks is not None:
        # Row by row: of neighbours, how many there are decides how they are rounded.
        with_sink = torch.stack((best, (params.sinks.float() * LOG2_E).expand_as(best)), dim=-1)
        shrink, weight = (torch.exp2(one) for one in (with_sink - with_sink.amax(-1, keepdim=True)).unbind(-1))
        total, acc = total * shrink + weight, acc * shrink[..., None]
    return acc / total[..., None]


def finish_attention_cpu(q: torch.Tensor, state: AttentionState, params: AttentionParams) -> torch.Tensor:
    """CPU version of `finish_attention`."""
    out = _attended(params, state.best, state.total, state.acc)
    return out.masked_fill_((state.best == float("-inf"))[..., None], 0).to(q.dtype)


def attend_sources_cpu(
    q: torch.Tensor, sources: Sequence[KeySource], rows: QueryRows, params: AttentionParams
) -> torch.Tensor:
    """CPU version of `attend_sources`; reads positions on the host."""
    state = AttentionState.empty(q)
    for source in sources:
        if source.bounds is None:
            attend_blocks_cpu(q, source.kv, rows, source.blocks, state, params, num_keys=source.num_keys)
            continue
        for b, (first, num_keys) in enumerate(source.bounds.tolist()):
            row, blocks = slice(b, b + 1), range(first + source.blocks.start, first + source.blocks.stop)
            parts = ("positions", "slots", "committed", "ancestors")
            one = replace(rows, **{name: part[row] for name in parts if (part := getattr(rows, name)) is not None})
            attend_blocks_cpu(q[row], source.kv, one, blocks, state[row], params, num_keys=num_keys)
    return finish_attention_cpu(q, state, params)


@dataclass(frozen=True)
class _Layout:
    """The queries of one sequence in tiles of eight, each in the place that its position gives it, in that order.

    A place that has no query of its own holds the tile's first one once more, and what comes of that is not used.

    Attributes:
        queries: [Q], those that are not padding.
        source: [N, H_kv, 8 * G], which of [T * H] each place holds.
        target: [Q, H], which of [N * H_kv * 8 * G] are the queries' own.
        start, stop: [N, 8 * G, 1], the first key that each place sees, if not all see the first there is, and the
            first behind it that it does not see.
        reach: The keys that any of a tile sees.
    """

    queries: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    start: torch.Tensor | None
    stop: torch.Tensor
    reach: list[range]

    @staticmethod
    @lru_cache(maxsize=32)  # all layers of a pass ask for the same
    def of(
        positions: tuple[int, ...], window: int | None, num_keys: int | None, num_kv_heads: int, group: int, *,
        tree: bool,
    ) -> "_Layout":  # fmt: skip
        """That of queries at such positions; each has a tile of its own in a tree, or where siblings show it is one."""
        queries = sorted((t for t, position in enumerate(positions) if position >= 0), key=positions.__getitem__)
        alone = tree or len({positions[t] for t in queries}) < len(queries)
        tiles: dict[tuple[int, int], list[int]] = {}
        for t in queries:
            tile = tiles.setdefault((positions[t] // _TILE_QUERIES, t if alone else 0), [t] * _TILE_QUERIES)
            tile[positions[t] % _TILE_QUERIES] = t
        places = torch.tensor(list(tiles.values()), dtype=torch.int64).view(len(tiles), _TILE_QUERIES)
        position = torch.tensor(positions)[places]
        source = places[:, None, :, None] * num_kv_heads * group + torch.arange(num_kv_heads * group).view(-1, 1, group)
        is_own = position % _TILE_QUERIES == torch.arange(_TILE_QUERIES)
        target = torch.arange(source.numel()).view(source.shape).transpose(1, 2)[is_own]
        position = position.repeat_interleave(group, dim=1)[..., None]
        stop = (position + 1).clamp(0, num_keys)
        start = None if window is None else (position + 1 - window).clamp(min=0)
        starts = [0] * len(tiles) if start is None else start.amin((1, 2)).tolist()
        reach = list(map(range, starts, stop.amax((1, 2)).tolist()))
        return _Layout(places[is_own], source.flatten(2), target.flatten(1), start, stop, reach)


class _Tiles:
    """The queries [T, H, D] of one sequence, in tiles, and their softmax so far."""

    def __init__(self, layout: _Layout, q: torch.Tensor) -> None:
        self._layout = layout
        self._q = self._spread(q).float()
        self._sums: tuple[torch.Tensor, ...] | None = None  # the largest log-sum-exp, the total, the values

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] in their places: [N, H_kv, 8 * G, ...]."""
        return values.flatten(0, 1)[self._layout.source]

    def _gathered(self, places: torch.Tensor) -> torch.Tensor:
        """[N, H_kv, 8 * G, ...] of the queries themselves: [Q, H, ...]."""
        return places.flatten(0, 2)[self._layout.target]

    def load(self, state: AttentionState, b: int) -> None:
        """Begin with what has been seen of the queries of batch row b."""
        best = self._spread(state.best[b])
        fresh = best == float("-inf")
        if not fresh.all():
            total, acc = self._spread(state.total[b]), self._spread(state.acc[b])
            self._sums = best, total.masked_fill_(fresh, 0.0), acc.masked_fill_(fresh[..., None], 0.0)

    def store(self, state: AttentionState | torch.Tensor, b: int, params: AttentionParams) -> None:
        """Write what has been seen now, or the attention itself."""
        if self._sums is None:
            return
        if isinstance(state, AttentionState):
            for kept, own in zip((state.best, state.total, state.acc), self._sums, strict=True):
                kept[b][self._layout.queries] = self._gathered(own)
        else:
            out = _attended(params, *map(self._gathered, self._sums))
            state[b][self._layout.queries] = out.to(state.dtype)

    def attend(self, at: slice, keys: torch.Tensor, start: int, params: AttentionParams) -> None:
        """Merge a split, keys [2, n, H_kv, 256, D] that begin at position `start`, into n tiles."""
        layout = self._layout
        key = torch.arange(start, start + BLOCK_TOKENS)
        visible = key < layout.stop[at]  # [n, 8 * G, 256]
        if layout.start is not None:
            visible &= key >= layout.start[at]
        mask = torch.where(visible, 0.0, float("-inf"))[:, None]
        q, scale = self._q[at], params.scale
        if params.soft_cap is not None:  # capped logits stand in the mask, each tile's computed by itself
            factor = scale / params.soft_cap
            capped = [torch.tanh(one @ k.mT * factor) * params.soft_cap for one, k in zip(q, keys[0], strict=True)]
            q, mask = torch.zeros_like(q), mask + torch.stack(capped)
        # Heads of a group as queries of one head. This operator rather than the public one because it also returns the
        # log-sum-exp. It computes every tile and head by itself.
        part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, *keys, 0.0, False, attn_mask=mask, scale=scale
        )
        lse.mul_(LOG2_E)
        if layout.start is not None:  # some places of a tile may see nothing of a block that others see
            unseen = ~visible.any(-1)[:, None]
            lse, part = lse.masked_fill_(unseen, float("-inf")), part.masked_fill_(unseen[..., None], 0.0)
        if self._sums is None and len(lse) == len(self._q):  # what a merge with nothing comes to
            self._sums = lse, torch.ones_like(lse), part + 0.0
            return
        if self._sums is None:
            empty = torch.zeros(self._q.shape[:3])
            self._sums = empty - torch.inf, empty, torch.zeros_like(self._q)
        best, total, acc = self._sums
        both = torch.stack((best[at], lse), dim=-1)
        best[at] = new_best = both.amax(-1)
        both -= new_best.clamp(min=torch.finfo(torch.float32).min)[..., None]  # of nothing seen -inf stays, not NaN
        # Every other number is computed by itself; of neighbours, how many there are decides how they are rounded.
        shrink, weight = (torch.exp2(one) for one in both.unbind(-1))
        total[at].mul_(shrink).add_(weight)
        acc[at].mul_(shrink[..., None]).add_(part.mul_(weight[..., None]))


def _keys_of_tiles(
    layout: _Layout, keys: torch.Tensor, kv: KVBlocks, rows: QueryRows, b: int, committed: int, start: int,
    gathered_bytes: int,
) -> Iterator[tuple[slice, torch.Tensor]]:  # fmt: skip
    """The block `keys` [2, H_kv, 256, D] of positions from `start` on, as tiles see it: [2, n, H_kv, 256, D] of n.

    A path stands behind the `committed` keys, as if that were a plain sequence. Paths share a buffer: be done with some
    before others are asked for.
    """
    seeing = [n for n, seen in enumerate(layout.reach) if seen.start < start + BLOCK_TOKENS and start < seen.stop]
    first, end = (seeing[0], seeing[-1] + 1) if seeing else (0, 0)
    branching = next((n for n in seeing if min(layout.reach[n].stop - start, BLOCK_TOKENS) > committed), end)
    if first < branching:
        yield slice(first, branching), keys[:, None].expand(-1, branching - first, -1, -1, -1)
    if branching == end:
        return
    assert rows.ancestors is not None and rows.committed is not None
    at_once = min(end - branching, max(1, gathered_bytes // keys.nbytes))
    paths = keys[:, None].repeat(1, at_once, 1, 1, 1)
    for tile in range(branching, end, at_once):
        at = slice(tile, min(tile + at_once, end))
        # Each query has a tile of its own. Behind a path's end the slots say nothing: its last key stands there.
        own = (layout.stop[at, 0] - start).clamp(max=BLOCK_TOKENS)
        position = torch.minimum(torch.arange(committed, int(own[-1])), own - 1)  # [n, S], in the block
        cache_positions = rows.ancestors[b, layout.queries[at, None], position + start - rows.committed[b]]
        for side, gathered in zip(paths, kv.at(rows.slots[b], cache_positions), strict=True):  # [n, S, H_kv, D]
            side[: len(own), :, committed : committed + position.shape[1]] = gathered.transpose(1, 2)
        yield at, paths[:, : len(own)]


def _check(q: torch.Tensor, kv: KVBlocks, rows: QueryRows) -> None:
    assert q.is_contiguous() and rows.positions.is_contiguous() and rows.positions.shape == q.shape[:2]
    assert q.shape[2] % kv.num_kv_heads == 0 and q.shape[3] == kv.head_dim and q.dtype == kv.data.dtype
    assert rows.ancestors is None or (rows.committed is not None and rows.ancestors.is_contiguous())


def attention(q: torch.Tensor, kv: KVBlocks, rows: QueryRows, params: AttentionParams) -> torch.Tensor:
    """Attend from rotated queries to the cache, the queries' own keys included (they are written before).

    Args:
        q: [B, T, H, D], contiguous.
        kv: At least B batch rows of rotated keys, and values, in the dtype of `q`. What lies beyond a query's own
            reach is never used, but must be finite within `max_length`; blocks out of every query's sliding window
            are not read.
        rows: Which keys each query sees.
        params: The layer's.

    Returns:
        [B, T, H, D] in the dtype of `q`; zero for padding rows.
    """
    assert kv.first_block == 0, "a piece of a sequence is not all that a query sees"
    _check(q, kv, rows)
    if q.is_cuda:
        return attention_triton(q, kv, rows, params)
    out, blocks = torch.zeros_like(q), range(-(-rows.max_length // BLOCK_TOKENS))
    attend_blocks_cpu(q, kv, rows, blocks, out, params)
    return out


def attend_blocks(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState, params: AttentionParams
) -> None:
    """Merge what queries see of some blocks into their softmax, in place.

    Called for consecutive ranges, however they are cut, and then finished, it gives bitwise what `attention` gives.
    Enqueues on the current stream and neither waits for the device nor looks at its data.

    Args:
        q: [B, T, H, D], contiguous.
        kv: Holds the keys and values of `blocks` in the dtype of `q`; other blocks are not read, but by a tree's
            rows, whose ancestors may lie anywhere in it. Must be finite as for `attention`.
        rows: Which keys each query sees; `sequences` are batch rows of `kv`.
        blocks: Absolute numbers of consecutive 256-token blocks; those beyond `max_length` hold nothing.
        state: Of `q`, contiguous; blocks before these have been merged already.
        params: The layer's; sinks wait for `finish_attention`.
    """
    assert blocks.step == 1 and blocks.start >= kv.first_block
    _check(q, kv, rows)
    run = attend_blocks_triton if q.is_cuda else attend_blocks_cpu
    run(q, kv, rows, blocks, state, params)


def finish_attention(q: torch.Tensor, state: AttentionState, params: AttentionParams) -> torch.Tensor:
    """The attention of queries that have seen all their keys: [B, T, H, D] in the dtype of `q`, zero for padding rows,
    which have seen nothing.

    Args:
        q: [B, T, H, D], contiguous.
        state: What `attend_blocks` made of them; not changed.
        params: The layer's.
    """
    return (finish_attention_triton if q.is_cuda else finish_attention_cpu)(q, state, params)


def attend_sources(
    q: torch.Tensor, sources: Sequence[KeySource], rows: QueryRows, params: AttentionParams
) -> torch.Tensor:
    """Attend to the keys of several caches as if they were one: sum over all of them, one softmax.

    A key is visible when its position in its own source is at most the query's and below the source's key limit: a
    source of other keys than those of the positions, such as retrieved ones, needs fewer of them than there are
    positions before the window. The order of the sources decides the order of sums, so the bits are not those of
    `attention`. Enqueues a launch for every two sources and one more on the current stream; fit for a CUDA graph.

    Args:
        q: [B, T, H, D], contiguous.
        sources: Hold keys and values in the dtype of `q`, finite as for `attention`; those without blocks count for
            nothing.
        rows: The queries' positions and slots. The keys of a tree are the newest ones of the last source, at most 64
            from `committed` on.
        params: The layer's, without a window.

    Returns:
        [B, T, H, D] in the dtype of `q`; zero for padding rows and where no source has a key.
    """
    assert params.window is None, "a window of positions, which retrieved keys do not lie at"
    return (attend_sources_triton if q.is_cuda else attend_sources_cpu)(q, sources, rows, params)
