"""Kernels that go over rows: norms, gates, rotations, the choice of tokens, at the shapes of 7B and 70B Llamas.

Bounds are: of RMSNorm reading rows and writing them once; of gates reading gate and up and writing the result; of the
rotation reading the fused projection and writing queries, keys and values; of the choice reading the logits.
"""

from __future__ import annotations

from functools import partial

import torch
from kernel_cases.case import DEVICE, HEAD_DIM, Case, Cases, num_inputs, random_bf16
from offload_runtime_kernels.gumbel_argmax import gumbel_argmax_reference, gumbel_argmax_triton, noise_keys
from offload_runtime_kernels.kv_blocks import (
    BLOCK_TOKENS,
    KVBlocks,
    RopeRows,
    Rotation,
    rope_store_reference,
    rope_store_triton,
)
from offload_runtime_kernels.linear import gated_product_reference, gated_product_triton
from offload_runtime_kernels.rms_norm import rms_norm_reference, rms_norm_triton

_ROWS = (1, 64, 512, 4096)


def make_rms_norm(rows: int, width: int) -> Case:
    """`rows` rows of `width` channels."""
    moved_bytes = 2 * rows * width * 2
    count = num_inputs(moved_bytes)
    x, weight = random_bf16(count, rows, width), random_bf16(width)
    return Case(
        configuration={"rows": rows, "width": width}, kernel=lambda i: rms_norm_triton(x[i], weight, 1e-5),
        reference=lambda i: rms_norm_reference(x[i], weight, 1e-5), num_inputs=count, moved_bytes=moved_bytes,
    )  # fmt: skip


def make_gated(rows: int, width: int) -> Case:
    """`rows` rows of `width` gates and as many ups."""
    moved_bytes = 3 * rows * width * 2
    count = num_inputs(moved_bytes)
    gate_up = random_bf16(count, rows, 2 * width)
    return Case(
        configuration={"rows": rows, "width": width}, kernel=lambda i: gated_product_triton(gate_up[i], "silu"),
        reference=lambda i: gated_product_reference(gate_up[i], "silu"), num_inputs=count, moved_bytes=moved_bytes,
    )  # fmt: skip


def make_rope_store(rows: int, num_heads: int, num_kv_heads: int) -> Case:
    """`rows` rows of one sequence. The reference selects them with a boolean index, which waits for the device."""
    channels = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    moved_bytes = 2 * rows * channels * 2 + rows * HEAD_DIM * 4
    count = num_inputs(moved_bytes)
    qkv = random_bf16(count, rows, channels)
    kv = KVBlocks(random_bf16(1, -(-rows // BLOCK_TOKENS), 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM))
    angle = torch.rand(rows, HEAD_DIM // 2, device=DEVICE)
    places = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    rotation = Rotation(0, HEAD_DIM // 2)
    where = RopeRows(angle.cos(), angle.sin(), places, places, torch.zeros_like(places))
    return Case(
        configuration={"rows": rows, "num_heads": num_heads, "num_kv_heads": num_kv_heads},
        kernel=lambda i: rope_store_triton(qkv[i], where, kv, rotation),
        reference=lambda i: rope_store_reference(qkv[i], where, kv, rotation), num_inputs=count,
        moved_bytes=moved_bytes, reference_in_graph=False,
    )  # fmt: skip


def make_gumbel_argmax(rows: int, vocab: int, temperature: float) -> Case:
    """A token for each of `rows` rows of logits.

    Greedy shows how near the memory side comes to the bound; the difference to a temperature is the price of the noise.
    """
    count = num_inputs(rows * vocab * 2)
    logits = random_bf16(count, rows, vocab).mul_(3)
    positions = torch.arange(rows, device=DEVICE)
    slots, keys = torch.zeros_like(positions), noise_keys([(temperature, 1, 0)]).to(DEVICE)
    return Case(
        configuration={"rows": rows, "vocab": vocab, "temperature": temperature},
        kernel=lambda i: gumbel_argmax_triton(logits[i], positions, slots, keys),
        reference=lambda i: gumbel_argmax_reference(logits[i], positions, slots, keys), num_inputs=count,
        moved_bytes=logits[0].nbytes, reference_in_graph=False,
    )  # fmt: skip


CASES: Cases = {
    "rms_norm": [partial(make_rms_norm, rows, width) for width in (4096, 8192) for rows in _ROWS],
    "gated": [partial(make_gated, rows, 11008) for rows in _ROWS],
    "rope_store": [partial(make_rope_store, rows, *heads) for heads in ((32, 32), (64, 8)) for rows in _ROWS],
    "gumbel_argmax": [
        partial(make_gumbel_argmax, rows, vocab, temperature)
        for vocab in (32_000, 151_936) for rows in (1, 17, 64, 512) for temperature in (0.0, 0.7)
    ],
}  # fmt: skip
