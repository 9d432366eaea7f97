"""Means of the keys of every chunk: what the retrieval cache is chosen by (TriForce, arXiv 2404.11912, section 4).

    out[b, h, c] = (k[c * chunk_size] + k[c * chunk_size + 1] + ...) / chunk_size      keys of head h, in this order

The sum is taken in fp32 in the order of the positions and rounded once to the keys' dtype, so a mean's bits depend on
its own keys only. The means lie head by head, [B, H_kv, C, D], because scoring reads all chunks of one head in a row.
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

MAX_CHUNK_TOKENS = 64
_BLOCK = tl.constexpr(BLOCK_TOKENS)


def is_chunk_size(chunk_size: int) -> bool:
    """Whether chunks of so many tokens are supported: a power of two up to 64, so that blocks are whole chunks."""
    return 0 < chunk_size <= MAX_CHUNK_TOKENS and chunk_size & (chunk_size - 1) == 0


def chunk_means_reference(kv: KVBlocks, blocks: range, out: torch.Tensor, *, chunk_size: int) -> None:
    """Plain torch version of `chunk_means`."""
    batch = kv.data.shape[0]
    for block in blocks:
        keys = kv.data[:, (block - kv.first_block) % kv.num_blocks, 0].float()  # [B, H_kv, 256, D]
        chunks = keys.unflatten(2, (-1, chunk_size))
        total = chunks[:, :, :, 0]
        for token in range(1, chunk_size):
            total = total + chunks[:, :, :, token]
        first = block * (BLOCK_TOKENS // chunk_size)
        out[:batch, :, first : first + chunks.shape[2]] = (total / chunk_size).to(out.dtype)


@jit(do_not_specialize=("start_block", "first_block", "num_blocks"))
def _chunk_means_kernel(
    data_ptr, out_ptr, start_block, first_block, num_blocks, stride_batch, stride_block, out_stride_batch,
    out_stride_head, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    # A program makes CHUNKS means of one block and head.
    parts: tl.constexpr = _BLOCK // (CHUNK * CHUNKS)
    block = start_block + tl.program_id(0) // parts
    chunk = (tl.program_id(0) % parts) * CHUNKS + tl.arange(0, CHUNKS)  # within the block
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, D_BLOCK)
    # Compared element by element: the interpreter turns a broadcast truth value into an integer, which is no mask.
    inside = channel[None, :] + tl.zeros([CHUNKS, D_BLOCK], dtype=tl.int32) < HEAD_DIM
    place = ((block - first_block) % num_blocks).to(tl.int64)
    keys = data_ptr + batch * stride_batch + place * stride_block + head * (_BLOCK * HEAD_DIM)
    offset = (chunk * (CHUNK * HEAD_DIM))[:, None] + channel[None, :]
    total = tl.load(keys + offset, mask=inside, other=0.0).to(tl.float32)
    for token in range(1, CHUNK):
        total += tl.load(keys + offset + token * HEAD_DIM, mask=inside, other=0.0).to(tl.float32)
    first = block.to(tl.int64) * (_BLOCK // CHUNK)
    target = out_ptr + batch * out_stride_batch + head * out_stride_head + (first + chunk)[:, None] * HEAD_DIM
    # A power of two, so multiplying by the inverse is exact and no division.
    tl.store(target + channel[None, :], (total * (1.0 / CHUNK)).to(out_ptr.dtype.element_ty), mask=inside)


def chunk_means_triton(kv: KVBlocks, blocks: range, out: torch.Tensor, *, chunk_size: int) -> None:
    """Triton version of `chunk_means`."""
    require_triton("chunk_means")
    batch, _, _, num_kv_heads, _, head_dim = kv.data.shape
    # At most so many means a program that their sums (fp32) stay in registers.
    chunks = min(BLOCK_TOKENS // chunk_size, 32)
    programs = len(blocks) * (BLOCK_TOKENS // (chunk_size * chunks))
    with torch.cuda.device_of(out):
        _chunk_means_kernel[(programs, num_kv_heads, batch)](
            kv.data, out, blocks.start, kv.first_block, kv.num_blocks, kv.data.stride(0), kv.data.stride(1),
            out.stride(0), out.stride(1), HEAD_DIM=head_dim, D_BLOCK=triton.next_power_of_2(head_dim),
            CHUNK=chunk_size, CHUNKS=chunks,
        )  # fmt: skip


def chunk_means(kv: KVBlocks, blocks: range, out: torch.Tensor, *, chunk_size: int) -> None:
    """Write the mean key of every chunk of whole blocks.

    Args:
        kv: Keys and values; every block of `blocks` must be among them, and full.
        blocks: Absolute block numbers, consecutive.
        out: [at least B, H_kv, C, D], in the keys' dtype and on their device, the last two dimensions contiguous.
            Written in place at the chunks of `blocks`, from `blocks.start * 256 / chunk_size` on, for rows below B.
        chunk_size: Tokens of a chunk, a power of two from 1 (copies the keys) to 64.

    Enqueues on the current stream and never synchronises.
    """
    batch, _, _, num_kv_heads, _, head_dim = kv.data.shape
    assert is_chunk_size(chunk_size) and blocks.step == 1 and len(blocks) <= kv.num_blocks
    assert out.shape[0] >= batch and out.shape[1] == num_kv_heads and out.shape[3] == head_dim
    assert out.dtype == kv.data.dtype and out.stride()[2:] == (head_dim, 1)
    if not blocks:
        return
    assert out.shape[2] >= blocks.stop * (BLOCK_TOKENS // chunk_size), "more chunks than there is room for"
    run = chunk_means_triton if out.is_cuda else chunk_means_reference
    run(kv, blocks, out, chunk_size=chunk_size)
