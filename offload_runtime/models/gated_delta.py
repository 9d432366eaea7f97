"""Gated delta layers, the linear attention of hybrids: a sequence leaves a state behind, and rows since then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


class DeltaModules(NamedTuple):
    """Says what checkpoints call the modules of a layer.

    Attributes:
        inputs: Makes what the convolution reads: queries, keys and values, or each of them.
        gate: Makes the gates of results. None: `inputs` does that too, of one key head after the other: its query, its
            key, the values that share it and their gates.
        decays: Makes the logits of beta and the time steps: either, or both of one key head after the other.
        head_norm, out: Norms results, and projects them back.
    """

    inputs: tuple[str, ...] = ("in_proj_qkv",)
    gate: str | None = "in_proj_z"
    decays: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    head_norm: str = "norm"
    out: str = "out_proj"


USUAL_MODULES = DeltaModules()


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule behind a short convolution, whose results are normed head by head and gated.

    Attributes:
        hidden_size: Channels of the residual stream, H.
        norm: How all rows of the model are normed, around its blocks too.
        shape: Heads and their channels.
        head_eps: The epsilon of the norm of heads, which has no offset.
        modules: Where a checkpoint has what.
        exact_rates: Whether `A_log` is kept in fp32, whatever the model computes in.
    """

    hidden_size: int
    norm: RowNorm
    shape: DeltaShape
    head_eps: float
    modules: DeltaModules = USUAL_MODULES
    exact_rates: bool = False

    @property
    def out_size(self) -> int:
        """Return how many channels the results of all heads have."""
        return self.shape.value_heads * self.shape.value_dim

    def kv_elements(self, context: int) -> int:
        """None: nothing is kept of every token."""
        return 0

    def saved_tensors(self, dtype: torch.dtype, *, whole: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of what is saved of a whole block: the state behind it, and the inputs of the
        convolution before there."""
        shape = self.shape
        state = (shape.value_heads, shape.key_dim, shape.value_dim), torch.float32
        return [state, ((shape.taps - 1, shape.channels), dtype)] if whole else []

    def first_whole(self, length: int) -> int:
        """Return the last token: a text goes on behind the state that is saved with its block."""
        return max(0, length - 1)

    @property
    def row_elements(self) -> int:
        """Return the elements that a row takes on its way: inputs, gates, results, and what kernels pass on, much of it
        fp32."""
        shape = self.shape
        wide = 2 * shape.value_heads * (CHUNK_TOKENS + 1) + self.crossing_bytes // (4 * CHUNK_TOKENS)
        return 2 * shape.channels + 4 * self.out_size + 2 * wide

    @property
    def crossing_bytes(self) -> int:
        """Return the bytes that a pass takes for each chunk whose end it goes over: the state there, and what the
        chunk's inverse makes of its keys and values."""
        dims, shape = self.shape.key_dim + self.shape.value_dim, self.shape
        return 4 * shape.value_heads * (shape.key_dim * shape.value_dim + CHUNK_TOKENS * dims)

    def work(self, rows: int, context: int) -> Work:
        """Return what is done for the last `rows` of a sequence, however many tokens come before them."""
        shape = self.shape
        state = shape.value_heads * shape.key_dim * shape.value_dim
        of_chunk = shape.value_heads * CHUNK_TOKENS * (shape.key_dim + shape.value_dim)
        return Work(product_operations(self.tensors(), rows), rows * (6 * state + 2 * of_chunk), 2 * state)

    def tensors(self) -> Iterator[Tensor]:
        """`delta_inputs` [C, H], or with gates of key heads [C + H_v D_v, H], or else `delta_gate` [H_v D_v, H];
        `delta_decays` [2 H_v, H], the convolution's taps [C, 1, taps], `A_log` and `dt_bias` [H_v], `delta_norm` [D_v],
        `o` [H, H_v D_v]."""
        shape, modules, of_module = self.shape, self.modules, "linear_attn"
        of_keys = shape.key_heads * shape.key_dim
        gate_size = 0 if modules.gate else self.out_size
        parts = (of_keys, of_keys, self.out_size) if len(modules.inputs) > 1 else (shape.channels + gate_size,)
        matrices = {"delta_inputs": dict(zip(modules.inputs, parts, strict=True))}
        matrices |= {"delta_gate": {modules.gate: self.out_size}} if modules.gate else {}
        of_decays = 2 * shape.value_heads // len(modules.decays)
        matrices["delta_decays"] = dict.fromkeys(modules.decays, of_decays)
        for packed, rows in matrices.items():
            named = {f"{of_module}.{name}": count for name, count in rows.items()}
            yield from projections(packed, named, self.hidden_size)
        yield Tensor("taps", f"{of_module}.conv1d.weight", (shape.channels, 1, shape.taps))
        yield Tensor("A_log", f"{of_module}.A_log", (shape.value_heads,), torch.float32 if self.exact_rates else None)
        yield Tensor("dt_bias", f"{of_module}.dt_bias", (shape.value_heads,))
        yield Tensor("delta_norm", f"{of_module}.{modules.head_norm}.weight", (shape.value_dim,))
        yield from projections("o", {f"{of_module}.{modules.out}": self.hidden_size}, self.out_size)

    def forward(self, layer: int, x: torch.Tensor, weights: Weights, rows: Rows, cache: LayerCache) -> torch.Tensor:
        """[N, H] -> [N, H_v D_v], before the output projection."""
        of_pass = cache.delta(layer, rows)
        taps, *rest = (weights[name].dense for name in ("taps", "A_log", "dt_bias"))
        learnt = DeltaWeights(taps.flatten(1), *rest)
        inputs, decays = weights["delta_inputs"].linear(x), weights["delta_decays"].linear(x)
        if len(self.modules.decays) == 1:
            heads = decays.view(rows.num_rows, self.shape.key_heads, 2, -1)
            decays = heads.transpose(1, 2).reshape(rows.num_rows, -1)
        if self.modules.gate:
            gate = weights["delta_gate"].linear(x)
        else:
            inputs, gate = self._of_key_heads(inputs)
        if of_pass.paths is not None:
            inputs, decays = of_pass.paths.of_rows(inputs, decays)
        out = gated_delta(inputs, decays, learnt, of_pass.memory, of_pass.rows, self.shape, keeps=of_pass.keeps)
        if of_pass.paths is not None:
            out = out.index_select(0, of_pass.paths.own)
        heads, gate = (one.reshape(-1, self.shape.value_dim) for one in (out, gate))
        return rms_norm(heads, weights["delta_norm"].dense, self.head_eps, gate=gate).view(rows.num_rows, -1)

    def _of_key_heads(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the convolution reads, and gates, from those of each key head."""
        shape, num_rows = self.shape, len(inputs)
        sizes = (shape.key_dim, shape.key_dim, *[self.out_size // shape.key_heads] * 2)
        *qkv, gate = (part.flatten(1) for part in inputs.view(num_rows, shape.key_heads, -1).split(sizes, dim=2))
        return torch.cat(qkv, dim=1), gate
