"""Move the keys and values of a path through a tree to where their positions belong, in all layers at once.

    data[:, first + i] = data[:, sources[i]]        for all i, in place, as if all were read before any is written

Sources ascend, and none lies before its target. So a target may be the source of an earlier move and never of a later
one: whoever moves several in a row has read all it still needs. Where all sources lie behind the last target, nothing
is both, and any order will do. A program moves everything of one head of a layer's keys or values, a handful of rows at
a time: it reads them, waits until all of its threads have, and writes them.
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

_BLOCK = tl.constexpr(BLOCK_TOKENS)
# Rows that a program has in flight: 64 registers a thread at 128 channels in 16 bits.
_ROWS = 32


def compact_rows_reference(kv: KVBlocks, sources: torch.Tensor, first: int) -> None:
    """Plain torch version of `compact_rows`."""
    cache_positions = sources.long()
    targets = torch.arange(first, first + cache_positions.shape[0], device=cache_positions.device)
    places = ((targets // BLOCK_TOKENS - kv.first_block) % kv.num_blocks, targets % BLOCK_TOKENS)
    block = (cache_positions // BLOCK_TOKENS - kv.first_block) % kv.num_blocks
    # Reading by index copies, so nothing is overwritten before it is read.
    kv.data[:, places[0], :, :, places[1]] = kv.data[:, block, :, :, cache_positions % BLOCK_TOKENS]


# None of these numbers is the same twice.
@jit(do_not_specialize=("sources_ptr", "count", "first", "first_block", "num_blocks"))
def _compact_rows_kernel(
    kv_ptr, sources_ptr, count, first, first_block, num_blocks,
    stride_layer: "tl.int64", stride_block: "tl.int64", stride_values: "tl.int64",
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) % NUM_KV_HEADS
    base = kv_ptr + layer * stride_layer + (tl.program_id(1) // NUM_KV_HEADS) * stride_values
    base += head * (_BLOCK * HEAD_DIM)
    channel = tl.arange(0, D_BLOCK)
    for begin in range(0, count, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (channel < HEAD_DIM)[None, :]
        source, target = tl.load(sources_ptr + row, mask=row < count, other=0), first + row
        from_block = ((source // _BLOCK - first_block) % num_blocks).to(tl.int64)
        to_block = ((target // _BLOCK - first_block) % num_blocks).to(tl.int64)
        from_row = base + from_block * stride_block + (source % _BLOCK) * HEAD_DIM
        to_row = base + to_block * stride_block + (target % _BLOCK) * HEAD_DIM
        moved = tl.load(from_row[:, None] + channel[None, :], mask=mask, other=0.0)
        # A target may be another thread's source.
        tl.debug_barrier()
        tl.store(to_row[:, None] + channel[None, :], moved, mask=mask)


def compact_rows_triton(kv: KVBlocks, sources: torch.Tensor, first: int) -> None:
    """Triton version of `compact_rows`."""
    require_triton("compact_rows")
    num_layers, head_dim = kv.data.shape[0], kv.head_dim
    assert sources.dtype == torch.int32 and sources.is_contiguous()
    _compact_rows_kernel[(num_layers, 2 * kv.num_kv_heads)](
        kv.data, sources, sources.shape[0], first, kv.first_block, kv.num_blocks, *kv.data.stride()[:3],
        NUM_KV_HEADS=kv.num_kv_heads, HEAD_DIM=head_dim, D_BLOCK=triton.next_power_of_2(head_dim), ROWS=_ROWS,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def compact_rows(kv: KVBlocks, sources: torch.Tensor, first: int) -> None:
    """Move keys and values of one sequence to consecutive positions, in place, on the current stream: one launch.

    Args:
        kv: One sequence's blocks in every layer: its batch rows are the layers.
        sources: [N] int32, the device of `kv`: the positions to move, ascending, `sources[i]` at least `first` + i; or
            in any order, and all of them behind `first` + N - 1.
        first: Position that the first one moves to.
    """
    run = compact_rows_triton if kv.data.is_cuda else compact_rows_reference
    run(kv, sources, first)
