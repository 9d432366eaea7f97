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
"""

from collections.abc import Sequence

import torch

from offload_runtime_kernels.attention_cpu import (
    attend_blocks_cpu,
    attend_sources_cpu,
    finish_attention_cpu,
)
from offload_runtime_kernels.attention_sources import attend_sources_triton
from offload_runtime_kernels.attention_state import AttentionParams, AttentionState, KeySource, QueryRows
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
    if q.is_cuda:
        return attention_triton(q, kv, rows, params)
    out, blocks = torch.zeros_like(q), range(-(-rows.max_length // BLOCK_TOKENS))
    attend_blocks_cpu(q, kv, rows, blocks, out, params)
    return out


def attend_blocks(
    q: torch.Tensor, kv: KVBlocks, rows: QueryRows, blocks: range, state: AttentionState, params: AttentionParams, *,
    num_keys: int | None = None,
) -> None:  # fmt: skip
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
        num_keys: Positions from here on hold no key; None for no such limit.
    """
    assert blocks.step == 1 and blocks.start >= kv.first_block
    run = attend_blocks_triton if q.is_cuda else attend_blocks_cpu
    run(q, kv, rows, blocks, state, params, num_keys=num_keys)


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
        rows: The queries' positions, and batch rows where a source has none of its own. The slots of a tree are the
            newest ones of the last source, at most 64 from `committed` on.
        params: The layer's, without a window.

    Returns:
        [B, T, H, D] in the dtype of `q`; zero for padding rows and where no source has a key.
    """
    assert params.window is None, "a window of positions, which retrieved keys do not lie at"
    return (attend_sources_triton if q.is_cuda else attend_sources_cpu)(q, sources, rows, params)
