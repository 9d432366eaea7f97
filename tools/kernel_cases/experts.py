"""Routed experts of a layer at the shapes of gpt-oss-120b and Qwen3-30B-A3B, all in the device's memory.

Choices are drawn evenly, so that few tokens share experts. The reference decodes one expert after the other and
multiplies by cuBLAS in fp32, the same chain of multiply-adds. The bound is the longer of reading what is chosen once
and of multiply-adds at the rate of cuBLAS's products in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases.case import DEVICE, Case, Cases, random_bf16
from offload_runtime_kernels.experts import ExpertShape, StoredMatrices, combine_experts, expert_rows
from offload_runtime_kernels.experts_cpu import random_rows
from offload_runtime_kernels.experts_decoded import expert_rows_decoded
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
ROWS = (1, 4, 8, 16, 64, 1024, 2048, 8192)
_INPUTS = 8  # choices of their own, of experts that caches do not hold


def make_matrices(kind: str | ScaledFormat, experts: int, rows: int, columns: int) -> StoredMatrices:
    """Random ones, whose products are about as large as what they multiply."""
    stored = random_rows(kind, experts * rows, columns, torch.Generator(DEVICE).manual_seed(0))
    return StoredMatrices(stored.view(experts, -1), kind, rows, columns)


@dataclass(frozen=True)
class Layer:
    """A layer's experts, and `_INPUTS` choices of some rows."""

    model: str
    x: torch.Tensor
    choices: torch.Tensor
    weights: torch.Tensor
    gate_up: StoredMatrices
    down: StoredMatrices
    biases: dict[str, torch.Tensor | None]

    @classmethod
    def of(cls, model: str, rows: int) -> Layer:
        """Make one with random values."""
        shape, num_chosen, kinds = MODELS[model]
        drawn = torch.rand(_INPUTS, rows, shape.num_experts, device=DEVICE).topk(num_chosen, dim=-1)
        widths = {"gate_up_bias": 2 * shape.inner, "down_bias": shape.hidden}
        return cls(
            model, random_bf16(rows, shape.hidden), drawn.indices.sort(dim=-1).values, drawn.values.softmax(dim=-1),
            make_matrices(kinds[0], shape.num_experts, 2 * shape.inner, shape.hidden),
            make_matrices(kinds[1], shape.num_experts, shape.hidden, shape.inner),
            {name: random_bf16(shape.num_experts, width) if shape.limit else None for name, width in widths.items()},
        )  # fmt: skip

    @cached_property
    def chosen(self) -> list[list[int]]:
        """Experts that each of the choices has."""
        return [one.unique().tolist() for one in self.choices]

    def by_kernels(self, index: int, run: Callable[..., None] = expert_rows) -> torch.Tensor:
        """What comes of the rows."""
        shape = MODELS[self.model][0]
        y = self.x.new_empty(*self.choices[index].shape, shape.hidden)
        run(self.x, self.choices[index], self.gate_up, self.down, shape, out=y, buffers=None, **self.biases)
        return combine_experts(y, self.weights[index])

    def by_expert(self, index: int) -> torch.Tensor:
        """About the same by plain torch, one expert after the other."""
        out, every = torch.zeros_like(self.x), torch.arange(MODELS[self.model][0].num_experts, device=DEVICE)

        def product(rows: torch.Tensor, matrices: StoredMatrices, number: int) -> torch.Tensor:
            [matrix] = matrices.decoded(every[number : number + 1], torch.bfloat16)
            return F.linear(rows.float(), matrix.float()).bfloat16()

        for number in self.chosen[index]:
            token, choice = (self.choices[index] == number).nonzero(as_tuple=True)
            gate, up = product(self.x[token], self.gate_up, number).chunk(2, dim=-1)
            y = product(F.silu(gate) * up, self.down, number) * self.weights[index][token, choice, None]
            out.index_add_(0, token, y.bfloat16())
        return out

    def case(self, kernel: Callable[[int], object], **options: Any) -> Case:
        """Time a kernel with these rows."""
        shape, num_chosen, _ = MODELS[self.model]
        options["configuration"] = {
            "model": self.model, "rows": len(self.x), "experts": sum(map(len, self.chosen)) / _INPUTS,
            **options["configuration"],
        }  # fmt: skip
        expert_bytes = self.gate_up.data.shape[1] + self.down.data.shape[1]
        return Case(
            kernel=kernel, num_inputs=_INPUTS, moved_bytes=sum(map(len, self.chosen)) * expert_bytes // _INPUTS,
            operations=len(self.x) * num_chosen * 6 * shape.inner * shape.hidden, fp32=True, **options,
        )  # fmt: skip


def make_experts(model: str, rows: int) -> Case:
    """A layer's experts of so many rows, by our kernels."""
    layer = Layer.of(model, rows)
    return layer.case(layer.by_kernels, configuration={}, reference=layer.by_expert, reference_in_graph=False)


def make_decoded(model: str, rows: int, mib: int) -> Case:
    """The same where they are decoded first, into so much memory; the reference is kernels that decode on the way."""
    layer, scratch = Layer.of(model, rows), torch.empty(mib << 20, dtype=torch.uint8, device=DEVICE)
    by_decoded = partial(layer.by_kernels, run=partial(expert_rows_decoded, scratch=scratch))
    bits = torch.equal(by_decoded(0), layer.by_kernels(0))
    return layer.case(
        by_decoded, reference=layer.by_kernels, configuration={"decoded": f"{mib} MiB", "same bits": bits}
    )


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
    "experts_decoded": [
        partial(make_decoded, model, rows, mib)
        for model in MODELS
        if "bf16" not in model
        for rows, mib in ((512, 256), (1024, 256), (2048, 256), (8192, 64), (8192, 256))
    ],
    "router": [partial(make_router, rows) for rows in (1, 16, 8192)],
}
