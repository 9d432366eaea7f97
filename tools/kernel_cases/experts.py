"""Routed experts of a layer at the shapes of gpt-oss-120b and Qwen3-30B-A3B, all in the device's memory.

Choices are drawn evenly, so that few tokens share experts. The reference is cuBLAS, one expert after the other. The
bound is the longer of reading what is chosen once and of multiplying by matrix units, which these products do not use.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from kernel_cases.case import DEVICE, Case, Cases, random_bf16
from offload_runtime_kernels.experts import ExpertShape, StoredMatrices, experts

# By model: the shape and the experts of a token.
MODELS = {
    "gpt-oss-120b": (ExpertShape(128, 2880, 2880, limit=7.0), 4),
    "Qwen3-30B-A3B": (ExpertShape(128, 2048, 768), 8),
}
_INPUTS = 8  # choices of their own, of experts that caches do not hold


def make_experts(model: str, rows: int) -> Case:
    """A layer's experts of so many rows."""
    shape, choices = MODELS[model]
    gate_up = random_bf16(shape.num_experts, 2 * shape.inner, shape.hidden).mul_(shape.hidden**-0.5)
    down = random_bf16(shape.num_experts, shape.hidden, shape.inner).mul_(shape.inner**-0.5)
    x = random_bf16(rows, shape.hidden)
    drawn = torch.rand(_INPUTS, rows, shape.num_experts, device=DEVICE).topk(choices, dim=-1)
    numbers, weights = drawn.indices.sort(dim=-1).values, drawn.values.softmax(dim=-1)
    chosen = [one.unique().tolist() for one in numbers]
    stored = StoredMatrices.of(gate_up), StoredMatrices.of(down)
    expert_bytes = 2 * 3 * shape.inner * shape.hidden

    def reference(index: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in chosen[index]:
            token, choice = (numbers[index] == number).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up[number]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, down[number]) * weights[index][token, choice, None]
            out.index_add_(0, token, y.bfloat16())
        return out

    return Case(
        configuration={"model": model, "rows": rows, "experts": sum(map(len, chosen)) / _INPUTS},
        kernel=lambda index: experts(x, numbers[index], weights[index], *stored, shape), reference=reference,
        num_inputs=_INPUTS, moved_bytes=sum(map(len, chosen)) * expert_bytes // _INPUTS,
        operations=rows * choices * expert_bytes, reference_in_graph=False,
    )  # fmt: skip


CASES: Cases = {"experts": [partial(make_experts, model, rows) for model in MODELS for rows in (1, 8, 64, 1024)]}
