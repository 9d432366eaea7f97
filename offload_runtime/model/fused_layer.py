"""A pass of few rows that promises no bits, in few launches: the steps of a draft and of the middle level.

Five kernels a layer besides attention: norms, residual and SwiGLU are part of the products. What a layer adds goes
straight into the residual stream, so nothing else is carried from one layer to the next.
"""

from __future__ import annotations

import torch
from offload_runtime_kernels.few_row_linear import MOST_ROWS, RowNorm, few_row_linear
from offload_runtime_kernels.rms_norm import add_rms_norm
from offload_runtime_kernels.swiglu import swiglu

from offload_runtime.model.decoder import Decoder, LayerCache, Weights
from offload_runtime.model.linear import tiled_linear
from offload_runtime.model.rows import PassRows


def fused_embed(decoder: Decoder, rows: PassRows) -> torch.Tensor:
    """The residual stream at the bottom: [N, H], no padding."""
    return decoder.embedding.index_select(0, rows.tokens)


def fused_decoder_layer(
    decoder: Decoder, index: int, weights: Weights, residual: torch.Tensor, rows: PassRows, cache: LayerCache
) -> None:
    """One layer. Adds to the residual stream and writes the rows' keys and values into the cache.

    Args:
        decoder: The model.
        index: Which layer.
        weights: Its packed tensors (see `weights.layout`).
        residual: [N, H]; updated in place.
        rows: The pass.
        cache: Where keys and values live.
    """
    eps = decoder.config.rms_norm_eps
    qkv = _linear(residual, weights["qkv"], bias=weights.get("qkv_bias"), norm=RowNorm(weights["input_norm"], eps))
    mixed = decoder.attend(index, weights, qkv, rows, cache)
    _linear(mixed, weights["o"], bias=weights.get("o_bias"), residual=residual)
    activation = _linear(
        residual, weights["gate_up"], bias=weights.get("gate_up_bias"), norm=RowNorm(weights["post_norm"], eps),
        gated=True,
    )  # fmt: skip
    _linear(activation, weights["down"], bias=weights.get("down_bias"), residual=residual)


def fused_head(decoder: Decoder, residual: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] of a residual stream [N, H] in the model's dtype."""
    return _linear(residual, decoder.lm_head, norm=RowNorm(decoder.final_norm, decoder.config.rms_norm_eps))


def _linear(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, norm: RowNorm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`few_row_linear`, or the same in ordinary kernels where there are too many rows for it."""
    if x.shape[0] <= MOST_ROWS:
        return few_row_linear(x, weight, bias=bias, norm=norm, residual=residual, gated=gated)
    if norm is not None:
        x = add_rms_norm(x, None, norm.weight, norm.eps)
    y = tiled_linear(x, weight, bias, x.shape[0])
    if gated:
        y = swiglu(y)
    return y if residual is None else residual.add_(y)
