"""The gated delta rule at the shape of a layer of Qwen3.6-27B, beside the chunk kernels of flash-linear-attention.

The bound is of reading the state and what rows bring, and of the products with the state in fp32 on the cores that are
no matrix units. The reference, which has neither the convolution nor rows to keep, needs `pip install
flash-linear-attention`.
"""

from __future__ import annotations

from functools import partial

import torch
from kernel_cases.case import DEVICE, Case, Cases, num_inputs, random_bf16
from offload_runtime_kernels.gated_delta import DeltaMemory, DeltaRows, DeltaShape, DeltaWeights, gated_delta

_SHAPE = DeltaShape(16, 48, 128, 128, 4)
_START, _MEMORY_TOKENS = 40, 640


def make_gated_delta(rows: int, *, tree: bool = False) -> Case:
    """`rows` rows: a prompt from 1024 on, else a window behind 40 tokens of a chunk."""
    prompt, heads = rows >= 1024, _SHAPE.value_heads
    state_bytes = heads * _SHAPE.key_dim * _SHAPE.value_dim * 4
    moved_bytes = state_bytes * (2 if prompt else 1) + rows * 2 * (_SHAPE.channels + 2 * heads * _SHAPE.value_dim)
    count = num_inputs(moved_bytes)
    inputs, gates = random_bf16(count, rows, _SHAPE.channels), random_bf16(count, rows, 2 * heads)
    rates = torch.rand(heads, device=DEVICE).log()
    weights = DeltaWeights(random_bf16(_SHAPE.channels, _SHAPE.taps), rates, torch.zeros_like(rates))
    memory = DeltaMemory.empty(_SHAPE, 1, _MEMORY_TOKENS, torch.bfloat16, DEVICE)
    start, depths = 0 if prompt else _START, [*range(rows)]
    ancestors = None
    if tree:  # a binary one
        paths = [[0]]
        for node in range(1, rows):
            paths.append([*paths[(node - 1) // 2], node])
        depths = [len(path) - 1 for path in paths]
        padded = [[start + one for one in path] + [0] * (max(depths) + 1 - len(path)) for path in paths]
        ancestors = torch.tensor([padded], dtype=torch.int32, device=DEVICE)

    def words(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    positions = words(*(start + depth for depth in depths)).view(1, rows)
    where = DeltaRows(words(0), words(start), words(0), words(rows), positions, ancestors)
    q, k = (torch.randn(1, rows, _SHAPE.key_heads, 128, device=DEVICE).bfloat16() for _ in range(2))
    v, g = torch.randn(1, rows, heads, 128, device=DEVICE).bfloat16(), -torch.rand(1, rows, heads, device=DEVICE)

    def reference(index: int) -> object:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q, k, v, g=g, beta=g.abs().bfloat16(), use_qk_l2norm_in_kernel=True)

    return Case(
        configuration={"rows": rows, "tree": tree},
        kernel=lambda i: gated_delta(inputs[i], gates[i], weights, memory, where, _SHAPE, keeps=prompt),
        reference=reference, num_inputs=count, moved_bytes=moved_bytes,
        operations=6 * rows * heads * _SHAPE.key_dim * _SHAPE.value_dim, reference_in_graph=False,
    )  # fmt: skip


CASES: Cases = {
    "gated_delta": [
        *(partial(make_gated_delta, rows) for rows in (1, 16, 64, 256, 1024, 8192)),
        *(partial(make_gated_delta, rows, tree=True) for rows in (16, 64, 256)),
    ],
}
