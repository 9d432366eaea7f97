"""Where the keys and values of a sequence's positions lie: blocks of 256 tokens, in one layout everywhere. And the
kernel that rotates queries and keys and puts keys and values there, in one pass over the fused projection:

    out[i] = x[i] * cos - x[j] * sin;    out[j] = x[j] * cos + x[i] * sin

for each pair of channels i and j = i + R/2, or 2i and 2i + 1 where they are interleaved, of the R that are rotated; the
others pass. It is computed in fp32 and rounded once. Optionally each head of q and k goes through an RMSNorm over D
first (Qwen3), and each of v through one without a weight (Gemma 4). Rows whose position is negative are padding: their
query is zero and nothing of them enters the cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from offload_runtime_kernels._jit import gdc_launch_dependents, gdc_wait, jit, overlap_options, tl, triton
from offload_runtime_kernels.rms_norm import rms_norm_reference, weighted

BLOCK_TOKENS = 256
_BLOCK = tl.constexpr(BLOCK_TOKENS)


@dataclass(frozen=True)
class KVBlocks:
    """Blocks of one layer's keys and values.

    `data` [B, N, 2, H_kv, 256, D], keys before values, the last three dimensions contiguous. The key of position p of
    batch row b lies in data[b, (p // 256 - first_block) % N, 0, :, p % 256]: N blocks may be a whole sequence, a piece
    of one that begins at `first_block`, or a ring that the newest blocks go around in.
    """

    data: torch.Tensor
    first_block: int = 0

    def __post_init__(self) -> None:
        assert self.data.ndim == 6 and self.data.shape[2] == 2 and self.data.shape[4] == BLOCK_TOKENS
        assert self.data.stride()[3:] == (BLOCK_TOKENS * self.head_dim, self.head_dim, 1)

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.data.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        return self.data.shape[3]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.data.shape[5]

    def at(self, slots: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions, each [..., H_kv, D], a copy; the shapes of the arguments broadcast."""
        slots, positions = slots.long(), positions.long()
        block = (positions // BLOCK_TOKENS - self.first_block) % self.num_blocks
        cache_position = positions % BLOCK_TOKENS
        keys, values = self.data[slots, block, :, :, cache_position].unbind(-3)
        return keys, values


class Rotation(NamedTuple):
    """Which angles of a row rotate the heads of a layer: `pairs` of them from column `first` on, each for two channels
    of the beginning of the head, which are neighbours where it is `interleaved` and half of these channels apart where
    it is not."""

    first: int
    pairs: int
    interleaved: bool = False


@dataclass(frozen=True)
class RopeRows:
    """Where each of N rows stands: all tensors on the compute device.

    `cos`, `sin`: [N, P] fp32, the angles of all rotations of the model; `positions` [N] int32, negative for padding;
    `cache_positions` [N] int32, where its key and value go, counted like positions; `slots` [N] int32, the cache's
    batch row.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    cache_positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm over each head of the queries and keys: `q_weight`, `k_weight` [D], `eps` and `offset` as of `rms_norm`;
    with `of_values` over each of the values too, without a weight."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    offset: float | None = None
    of_values: bool = False


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """The first channels of x [N, H, D] by angles [N, R/2]."""
    turned, passed = x.float().split((2 * cos.shape[1], x.shape[2] - 2 * cos.shape[1]), dim=-1)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    first, second = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
    return torch.cat((turned, passed), dim=-1).to(x.dtype)


def rope_store_reference(
    qkv: torch.Tensor, rows: RopeRows, kv: KVBlocks, rotation: Rotation | None, head_norm: HeadNorm | None = None, *,
    values_are_keys: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `rope_store`."""
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    num_rows = rows.positions.shape[0]
    heads = qkv[:num_rows].view(num_rows, -1, head_dim)
    num_heads = heads.shape[1] - (1 if values_are_keys else 2) * num_kv_heads
    qk, v = heads[:, : num_heads + num_kv_heads], heads[:, -num_kv_heads:]
    if head_norm is not None:
        norms = ((qk[:, :num_heads], head_norm.q_weight), (qk[:, num_heads:], head_norm.k_weight))
        qk = torch.cat([rms_norm_reference(x, w, head_norm.eps, head_norm.offset) for x, w in norms], dim=1)
        v = rms_norm_reference(v, None, head_norm.eps) if head_norm.of_values else v
    if rotation is not None:
        angles = slice(rotation.first, rotation.first + rotation.pairs)
        qk = _rotate(qk, rows.cos[:, angles], rows.sin[:, angles], interleaved=rotation.interleaved)
    q, k = qk.split((num_heads, num_kv_heads), dim=1)
    real = rows.positions >= 0
    stored = slice(None) if real.all() else real
    # torch will not write by index through an expanded dimension; batch rows of stride 0 are all the first.
    data = kv.data[:1] if kv.data.stride(0) == 0 else kv.data
    slots, cache_positions = rows.slots[stored].long() % data.shape[0], rows.cache_positions[stored].long()
    block = (cache_positions // BLOCK_TOKENS - kv.first_block) % kv.num_blocks
    data[slots, block, :, :, cache_positions % BLOCK_TOKENS] = torch.stack((k, v), dim=1)[stored]
    return q.contiguous() if stored is not real else torch.where(real[:, None, None], q, 0)


# Specialising on where blocks begin and how many they are would only compile it again.
@jit(do_not_specialize=("first_block", "num_blocks"))
def _rope_store_kernel(
    qkv_ptr, q_ptr, kv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    positions_ptr, cache_positions_ptr, slots_ptr, stride_angle,
    stride_slot: "tl.int64", stride_block: "tl.int64", stride_values: "tl.int64", first_block, num_blocks, eps, offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    NORMS_VALUES: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, HALF_BLOCK)
    inside = lanes < half
    if INTERLEAVED:
        first_channel, second_channel = 2 * lanes, 2 * lanes + 1
    elif PAIRS == 0 or half == PAIRS:
        first_channel, second_channel = lanes, half + lanes
    else:  # the pairs that are rotated, and behind them those that are not
        first_channel = tl.where(lanes < PAIRS, lanes, PAIRS + lanes)
        second_channel = tl.where(lanes < PAIRS, PAIRS + lanes, half + lanes)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    if VALUES_ARE_KEYS:
        source = qkv_ptr + (row * (NUM_HEADS + NUM_KV_HEADS) + head - tl.where(is_value, NUM_KV_HEADS, 0)) * HEAD_DIM
    else:
        source = qkv_ptr + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    first = tl.load(source + first_channel, mask=inside, other=0.0)
    second = tl.load(source + second_channel, mask=inside, other=0.0)
    dtype = first.dtype
    # Compared lane by lane: the interpreter turns a broadcast truth value into an integer, which is no mask.
    real = inside & (tl.load(positions_ptr + row) + tl.zeros_like(lanes) >= 0)
    if not is_value:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0)) / HEAD_DIM + eps)
            weight_ptr = q_weight_ptr if head < NUM_HEADS else k_weight_ptr
            x_weight = tl.load(weight_ptr + first_channel, mask=inside, other=0.0)
            y_weight = tl.load(weight_ptr + second_channel, mask=inside, other=0.0)
            x = weighted(x * scale, x_weight, offset, dtype, ROUNDS_FIRST)
            y = weighted(y * scale, y_weight, offset, dtype, ROUNDS_FIRST)
        if PAIRS > 0:
            turned = lanes < PAIRS
            cos = tl.load(cos_ptr + row * stride_angle + lanes, mask=turned, other=1.0)
            sin = tl.load(sin_ptr + row * stride_angle + lanes, mask=turned, other=0.0)
            rotated = x * cos - y * sin
            y = y * cos + x * sin
            x = rotated
        first, second = x.to(dtype), y.to(dtype)
    elif NORMS_VALUES:
        x, y = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0)) / HEAD_DIM + eps)
        first, second = (x * scale).to(dtype), (y * scale).to(dtype)
    if head < NUM_HEADS:
        target = q_ptr + (row * NUM_HEADS + head) * HEAD_DIM
        zero = tl.zeros_like(first)
        tl.store(target + first_channel, tl.where(real, first, zero), mask=inside)
        tl.store(target + second_channel, tl.where(real, second, zero), mask=inside)
    else:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        cache_position = tl.load(cache_positions_ptr + row)
        block = ((cache_position // _BLOCK - first_block) % num_blocks).to(tl.int64)
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        target = kv_ptr + slot * stride_slot + block * stride_block
        target += tl.where(is_value, stride_values, 0)
        target += (kv_head * _BLOCK + cache_position % _BLOCK) * HEAD_DIM
        tl.store(target + first_channel, first, mask=real)
        tl.store(target + second_channel, second, mask=real)


def rope_store_triton(
    qkv: torch.Tensor, rows: RopeRows, kv: KVBlocks, rotation: Rotation | None, head_norm: HeadNorm | None = None, *,
    values_are_keys: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `rope_store`."""
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    num_rows = rows.positions.shape[0]
    num_heads = qkv.shape[1] // head_dim - (1 if values_are_keys else 2) * num_kv_heads
    q = qkv.new_empty(num_rows, num_heads, head_dim)
    first, pairs, interleaved = rotation or Rotation(0, 0)
    # Triton wants a pointer for every argument; an unused one may point anywhere.
    norm = head_norm or HeadNorm(qkv, qkv, 0.0)
    _rope_store_kernel[(num_rows, num_heads + 2 * num_kv_heads)](
        qkv, q, kv.data, rows.cos[:, first:], rows.sin[:, first:], norm.q_weight, norm.k_weight,
        rows.positions, rows.cache_positions, rows.slots, rows.cos.stride(0), *kv.data.stride()[:3], kv.first_block,
        kv.num_blocks, norm.eps, norm.offset or 0.0,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2), PAIRS=pairs, INTERLEAVED=interleaved,
        HAS_NORM=head_norm is not None, ROUNDS_FIRST=norm.offset is None, NORMS_VALUES=norm.of_values,
        VALUES_ARE_KEYS=values_are_keys, num_warps=1, **overlap_options(qkv.device),
    )  # fmt: skip
    return q


def rope_store(
    qkv: torch.Tensor, rows: RopeRows, kv: KVBlocks, rotation: Rotation | None, head_norm: HeadNorm | None = None, *,
    values_are_keys: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Rotate q and k of a fused projection and write k and v where the rows belong.

    Args:
        qkv: [at least N, (H + 2 H_kv) D], contiguous: all query heads, then key heads, then value heads; with
            `values_are_keys` without these, as they are the keys before they are normed and rotated.
        rows: Where each of the N rows stands; no two real rows may name the same place of the same slot.
        kv: Where keys and values lie, in the dtype of `qkv`; written in place.
        rotation: How heads are rotated; None for layers that do not.
        head_norm: RMSNorm of each head before the rotation, or None.

    Returns:
        The rotated queries [N, H, D]; zero for padding rows.
    """
    assert qkv.is_contiguous() and qkv.shape[0] >= len(rows.positions) and qkv.dtype == kv.data.dtype
    assert kv.head_dim % 2 == 0
    run = rope_store_triton if qkv.is_cuda else rope_store_reference
    return run(qkv, rows, kv, rotation, head_norm, values_are_keys=values_are_keys)
