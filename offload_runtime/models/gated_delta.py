"""Gated delta layers, the linear attention of hybrids: a sequence leaves a state behind, and rows since then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from offload_runtime_kernels.gated_delta import CHUNK_TOKENS, DeltaShape, DeltaWeights, gated_delta
from offload_runtime_kernels.rms_norm import rms_norm

from offload_runtime.models.layers import (
    LayerCache,
    RowNorm,
    Rows,
    Tensor,
    Weights,
    Work,
    product_operations,
    projections,
)


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule behind a short convolution, whose results are normed head by head and gated.

    Attributes:
        hidden_size: Channels of the residual stream, H.
        norm: How all rows of the model are normed, around its blocks too; results of heads with the same epsilon, but
            without an offset.
        shape: Heads and their channels.
    """

    hidden_size: int
    norm: RowNorm
    shape: DeltaShape

    @property
    def out_size(self) -> int:
        """Channels of the results of all heads."""
        return self.shape.value_heads * self.shape.value_dim

    def kv_elements(self, context: int) -> int:
        """None: nothing is kept of every token."""
        return 0

    def saved_tensors(self, dtype: torch.dtype, *, whole: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what is saved of a whole block: the state behind it, and the inputs of the convolution
        before there."""
        shape = self.shape
        state = (shape.value_heads, shape.key_dim, shape.value_dim), torch.float32
        return [state, ((shape.taps - 1, shape.channels), dtype)] if whole else []

    @property
    def row_elements(self) -> int:
        """Elements that a row takes on its way: inputs, gates, results, and what kernels pass on, much of it fp32."""
        wide = 2 * self.out_size + 2 * self.shape.value_heads * (CHUNK_TOKENS + 1)
        return 2 * self.shape.channels + 4 * self.out_size + 2 * wide

    def work(self, rows: int, context: int) -> Work:
        """What is done for the last `rows` of a sequence, however many tokens come before them."""
        shape = self.shape
        state = shape.value_heads * shape.key_dim * shape.value_dim
        of_chunk = shape.value_heads * CHUNK_TOKENS * (shape.key_dim + shape.value_dim)
        return Work(product_operations(self.tensors(), rows), rows * (6 * state + 2 * of_chunk), 2 * state)

    def tensors(self) -> Iterator[Tensor]:
        """`delta_qkv` [C, H], `delta_z` [H_v D_v, H], `delta_gates` [2 H_v, H], the convolution's taps [C, 1, taps],
        `A_log` and `dt_bias` [H_v], `delta_norm` [D_v], `o` [H, H_v D_v]."""
        shape, of_module = self.shape, "linear_attn"
        yield from projections("delta_qkv", {f"{of_module}.in_proj_qkv": shape.channels}, self.hidden_size)
        yield from projections("delta_z", {f"{of_module}.in_proj_z": self.out_size}, self.hidden_size)
        gates = {f"{of_module}.in_proj_{name}": shape.value_heads for name in ("b", "a")}
        yield from projections("delta_gates", gates, self.hidden_size)
        yield Tensor("taps", f"{of_module}.conv1d.weight", (shape.channels, 1, shape.taps))
        yield from (Tensor(name, f"{of_module}.{name}", (shape.value_heads,)) for name in ("A_log", "dt_bias"))
        yield Tensor("delta_norm", f"{of_module}.norm.weight", (shape.value_dim,))
        yield from projections("o", {f"{of_module}.out_proj": self.hidden_size}, self.out_size)

    def forward(self, layer: int, x: torch.Tensor, weights: Weights, rows: Rows, cache: LayerCache) -> torch.Tensor:
        """[N, H] -> [N, H_v D_v], before the output projection."""
        memory, delta_rows, keeps = cache.delta(layer, rows)
        taps, *rest = (weights[name].dense for name in ("taps", "A_log", "dt_bias"))
        learnt = DeltaWeights(taps.flatten(1), *rest)
        inputs, gates = weights["delta_qkv"].linear(x), weights["delta_gates"].linear(x)
        out = gated_delta(inputs, gates, learnt, memory, delta_rows, self.shape, keeps=keeps)
        heads, gate = out.view(-1, self.shape.value_dim), weights["delta_z"].linear(x).view(-1, self.shape.value_dim)
        return rms_norm(heads, weights["delta_norm"].dense, self.norm.eps, gate=gate).view(rows.num_rows, -1)
