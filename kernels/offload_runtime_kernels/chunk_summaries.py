"""A few bytes about the keys of every chunk: what the retrieval cache is chosen by.

    mean[c] = (k[c * chunk_size] + k[c * chunk_size + 1] + ...) / chunk_size          keys of one head, in this order
    scale[c] = max over channels of |mean[c]| / 127;   codes[c] = round(mean[c] / scale[c])
    spread[c] = mean over channels of the variance of the chunk's keys

TriForce (arXiv 2404.11912, section 4) keeps the means in the model's dtype and chunks of 8 tokens. Coded in 8 bits the
means choose as well, so that chunks of 4 tokens fit the same memory; and how far the keys lie from their mean says how
much the best of them may exceed it (see `chunk_scores`). Both together recover most of what separates the means from
exact scores: agreement with the full cache at 120,000 tokens and a budget of 4096 is 0.908 for means of 8, 0.922 for
means of 4, 0.943 with the spread, 0.958 for exact scores (SmolLM2-135M stretched to 128K, a novel, T = 0.6).

Sums are taken in fp32 in the order of the positions. A summary's bits depend on its own keys only. The codes lie head
by head, [B, H_kv, C, D], because scoring reads all chunks of one head in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

MAX_CHUNK_TOKENS = 64
# Bytes of a chunk's scale and spread.
FACTOR_BYTES = 4
_BLOCK = tl.constexpr(BLOCK_TOKENS)
_LARGEST_CODE = 127
_LARGEST_SPREAD = 65504.0  # of fp16


@dataclass(frozen=True)
class ChunkSummaries:
    """Of C chunks of B sequences: `codes` [B, H_kv, C, D] int8, `factors` [B, H_kv, C, 2] fp16 (scale, spread).

    The last two dimensions of both are contiguous.
    """

    codes: torch.Tensor
    factors: torch.Tensor

    def __post_init__(self) -> None:
        head_dim = self.codes.shape[3]
        assert self.codes.dtype == torch.int8 and self.factors.dtype == torch.float16
        assert self.factors.shape == (*self.codes.shape[:3], 2)
        assert self.codes.stride()[2:] == (head_dim, 1) and self.factors.stride()[2:] == (2, 1)

    def rows(self, start: int, stop: int) -> ChunkSummaries:
        """The summaries of sequences `start` to `stop`, not a copy."""
        return ChunkSummaries(self.codes[start:stop], self.factors[start:stop])

    def first(self, count: int) -> ChunkSummaries:
        """The first chunks of every sequence, not a copy."""
        return ChunkSummaries(self.codes[:, :, :count], self.factors[:, :, :count])


def is_chunk_size(chunk_size: int) -> bool:
    """Whether chunks of so many tokens are supported: a power of two up to 64, so that blocks are whole chunks."""
    return 0 < chunk_size <= MAX_CHUNK_TOKENS and chunk_size & (chunk_size - 1) == 0


def chunk_summaries_reference(kv: KVBlocks, blocks: range, out: ChunkSummaries, *, chunk_size: int) -> None:
    """Plain torch version of `chunk_summaries`."""
    batch = kv.data.shape[0]
    for block in blocks:
        keys = kv.data[:, (block - kv.first_block) % kv.num_blocks, 0].float()  # [B, H_kv, 256, D]
        chunks = keys.unflatten(2, (-1, chunk_size))
        total, squares = chunks[:, :, :, 0], chunks[:, :, :, 0].square()
        for token in range(1, chunk_size):
            total, squares = total + chunks[:, :, :, token], squares + chunks[:, :, :, token].square()
        mean = total / chunk_size
        spread = (squares / chunk_size - mean.square()).clamp_min(0.0).mean(-1).clamp_max(_LARGEST_SPREAD)
        scale = (mean.abs().amax(-1) / _LARGEST_CODE).half()
        divisor = torch.where(scale == 0, 1.0, scale.float())[..., None]
        codes = (mean / divisor + 0.5).floor().clamp(-_LARGEST_CODE, _LARGEST_CODE)
        here = slice(block * (BLOCK_TOKENS // chunk_size), (block + 1) * (BLOCK_TOKENS // chunk_size))
        out.codes[:batch, :, here] = codes.to(torch.int8)
        out.factors[:batch, :, here] = torch.stack((scale, spread.half()), -1)


@jit(do_not_specialize=("start_block", "first_block", "num_blocks"))
def _chunk_summaries_kernel(
    data_ptr, codes_ptr, factors_ptr, start_block, first_block, num_blocks, stride_batch, stride_block,
    codes_stride_batch, codes_stride_head, factors_stride_batch, factors_stride_head,
    HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    # A program summarises CHUNKS chunks of one block and head.
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
    total = tl.zeros([CHUNKS, D_BLOCK], dtype=tl.float32)
    squares = tl.zeros([CHUNKS, D_BLOCK], dtype=tl.float32)
    for token in range(CHUNK):
        key = tl.load(keys + offset + token * HEAD_DIM, mask=inside, other=0.0).to(tl.float32)
        total += key
        squares += key * key
    # A power of two, so multiplying by the inverse is exact and no division.
    mean = total * (1.0 / CHUNK)
    spread = tl.sum(tl.maximum(squares * (1.0 / CHUNK) - mean * mean, 0.0), axis=1) / HEAD_DIM
    spread = tl.minimum(spread, 65504.0)
    scale = tl.div_rn(tl.max(tl.abs(mean), axis=1), 127.0 + tl.zeros([CHUNKS], dtype=tl.float32)).to(tl.float16)
    divisor = tl.where(scale.to(tl.float32) == 0.0, 1.0, scale.to(tl.float32))
    codes = tl.floor(tl.div_rn(mean, divisor[:, None] + tl.zeros_like(mean)) + 0.5)
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    number = block.to(tl.int64) * (_BLOCK // CHUNK) + chunk
    target = codes_ptr + batch * codes_stride_batch + head * codes_stride_head + number[:, None] * HEAD_DIM
    tl.store(target + channel[None, :], codes.to(tl.int8), mask=inside)
    target = factors_ptr + batch * factors_stride_batch + head * factors_stride_head + number * 2
    tl.store(target, scale)
    tl.store(target + 1, spread.to(tl.float16))


def chunk_summaries_triton(kv: KVBlocks, blocks: range, out: ChunkSummaries, *, chunk_size: int) -> None:
    """Triton version of `chunk_summaries`."""
    require_triton("chunk_summaries")
    batch, _, _, num_kv_heads, _, head_dim = kv.data.shape
    # At most so many a program that their sums (fp32) stay in registers.
    chunks = min(BLOCK_TOKENS // chunk_size, 32)
    programs = len(blocks) * (BLOCK_TOKENS // (chunk_size * chunks))
    with torch.cuda.device_of(out.codes):
        _chunk_summaries_kernel[(programs, num_kv_heads, batch)](
            kv.data, out.codes, out.factors, blocks.start, kv.first_block, kv.num_blocks, kv.data.stride(0),
            kv.data.stride(1), *out.codes.stride()[:2], *out.factors.stride()[:2],
            HEAD_DIM=head_dim, D_BLOCK=triton.next_power_of_2(head_dim), CHUNK=chunk_size, CHUNKS=chunks,
        )  # fmt: skip


def chunk_summaries(kv: KVBlocks, blocks: range, out: ChunkSummaries, *, chunk_size: int) -> None:
    """Summarise every chunk of whole blocks.

    Args:
        kv: Keys and values; every block of `blocks` must be among them, and full.
        blocks: Absolute block numbers, consecutive.
        out: Of at least B sequences, on the keys' device. Written in place at the chunks of `blocks`, from
            `blocks.start * 256 / chunk_size` on, for rows below B.
        chunk_size: Tokens of a chunk, a power of two from 2 to 64.

    Enqueues on the current stream and never synchronises.
    """
    batch, _, _, num_kv_heads, _, head_dim = kv.data.shape
    codes = out.codes
    assert is_chunk_size(chunk_size) and blocks.step == 1 and len(blocks) <= kv.num_blocks
    assert codes.shape[0] >= batch and codes.shape[1] == num_kv_heads and codes.shape[3] == head_dim
    if not blocks:
        return
    assert codes.shape[2] >= blocks.stop * (BLOCK_TOKENS // chunk_size), "more chunks than there is room for"
    run = chunk_summaries_triton if codes.is_cuda else chunk_summaries_reference
    run(kv, blocks, out, chunk_size=chunk_size)
