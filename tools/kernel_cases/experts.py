"""Routed experts of a layer at the shapes of gpt-oss-120b and Qwen3-30B-A3B, all in the device's memory.

Choices are drawn evenly, so that few tokens share experts. The reference decodes one expert after the other and
multiplies by cuBLAS in fp32, the same chain of multiply-adds. The bound is the longer of reading what is chosen once
and of multiply-adds at the rate of cuBLAS's products in fp32.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from kernel_cases.case import DEVICE, Case, Cases, random_bf16
from offload_runtime_kernels.experts import ExpertShape, StoredMatrices, experts
from offload_runtime_kernels.experts_cpu import random_rows
from offload_runtime_kernels.router import choose_experts
from offload_runtime_kernels.scaled_rows import ScaledFormat

# By model: the shape, the experts of a token, and how both matrices are stored.
GPT_OSS, QWEN3 = ExpertShape(128, 2880, 2880, limit=7.0), ExpertShape(128, 2048, 768)
FP8, INT4 = ScaledFormat("FP8", 1, 128, torch.float32), ScaledFormat("uint4", 1, 128, torch.bfloat16, 8)
MODELS: dict[str, tuple[ExpertShape, int, tuple[str | ScaledFormat, str | ScaledFormat]]] = {
    "gpt-oss-120b in MXFP4": (GPT_OSS, 4, ("MXFP4", "MXFP4")),
    "Qwen3-30B-A3B in Q4_K_M": (QWEN3, 8, ("Q4_K", "Q6_K")),
    "Qwen3-30B-A3B in Q8_0": (QWEN3, 8, ("Q8_0", "Q8_0")),
    "Qwen3-30B-A3B in FP8": (QWEN3, 8, (FP8, FP8)),
    "Qwen3-30B-A3B in INT4": (QWEN3, 8, (INT4, INT4)),
    "Qwen3-30B-A3B in bf16": (QWEN3, 8, ("BF16", "BF16")),
}
ROWS = (1, 4, 8, 16, 64, 1024, 8192)
_INPUTS = 8  # choices of their own, of experts that caches do not hold


def make_matrices(kind: str | ScaledFormat, experts: int, rows: int, columns: int) -> StoredMatrices:
    """Random ones, whose products are about as large as what they multiply."""
    stored = random_rows(kind, experts * rows, columns, torch.Generator(DEVICE).manual_seed(0))
    return StoredMatrices(stored.view(experts, -1), kind, rows, columns)


def make_experts(model: str, rows: int) -> Case:
    """A layer's experts of so many rows."""
    shape, num_chosen, kinds = MODELS[model]
    gate_up = make_matrices(kinds[0], shape.num_experts, 2 * shape.inner, shape.hidden)
    down = make_matrices(kinds[1], shape.num_experts, shape.hidden, shape.inner)
    x = random_bf16(rows, shape.hidden)
    drawn = torch.rand(_INPUTS, rows, shape.num_experts, device=DEVICE).topk(num_chosen, dim=-1)
    choices, weights = drawn.indices.sort(dim=-1).values, drawn.values.softmax(dim=-1)
    biases = (
        {"gate_up_bias": random_bf16(128, 2 * shape.inner), "down_bias": random_bf16(128, shape.hidden)}
        if shape.limit
        else {}
    )
    chosen = [one.unique().tolist() for one in choices]
    expert_bytes = gate_up.data.shape[1] + down.data.shape[1]
    moved_bytes = sum(map(len, chosen)) * expert_bytes // _INPUTS
    (first, second), every = (gate_up, down), torch.arange(shape.num_experts, device=DEVICE)

    def product(rows: torch.Tensor, matrices: StoredMatrices, number: int) -> torch.Tensor:
        [matrix] = matrices.decoded(every[number : number + 1], torch.bfloat16)
        return F.linear(rows.float(), matrix.float()).bfloat16()

    def reference(index: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in chosen[index]:
            token, choice = (choices[index] == number).nonzero(as_tuple=True)
            gate, up = product(x[token], first, number).chunk(2, dim=-1)
            y = product(F.silu(gate) * up, second, number) * weights[index][token, choice, None]
            out.index_add_(0, token, y.bfloat16())
        return out

    return Case(
        configuration={"model": model, "rows": rows, "experts": sum(map(len, chosen)) / _INPUTS},
        kernel=lambda index: experts(x, choices[index], weights[index], gate_up, down, shape, **biases),
        reference=reference, num_inputs=_INPUTS, moved_bytes=moved_bytes,
        operations=rows * num_chosen * 6 * shape.inner * shape.hidden, fp32=True, reference_in_graph=False,
    )  # fmt: skip


def make_router(rows: int) -> Case:
    """Qwen3's choice of so many rows; the reference is torch's softmax and sorts."""
    logits = random_bf16(_INPUTS, rows, QWEN3.num_experts)

    def reference(index: int) -> torch.Tensor:
        scores = logits[index].float().softmax(dim=-1)
        choices = scores.sort(dim=-1, descending=True, stable=True).indices[:, :8].sort(dim=-1).values
        weights = scores.gather(1, choices)
        return (weights / weights.sum(dim=-1, keepdim=True)).bfloat16().float()

    return Case(
        configuration={"rows": rows},
        kernel=lambda index: choose_experts(logits[index], 8, scores="softmax", normed=True, dtype=torch.bfloat16),
        reference=reference, num_inputs=_INPUTS, moved_bytes=rows * (2 * QWEN3.num_experts + 12 * 8),
    )  # fmt: skip


CASES: Cases = {
    "experts": [partial(make_experts, model, rows) for model in MODELS for rows in ROWS],
    "router": [partial(make_router, rows) for rows in (1, 16, 8192)],
}
