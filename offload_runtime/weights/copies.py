"""Copies of layers in few bits, which draft for the layers that they are of.

The block of a copy has the tensors of the layer, matrices in 4 bits and all else as it is. It is made of the layer
while that passes through the ring, and stays on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from offload_runtime_kernels.linear import Activation
from offload_runtime_kernels.low_bit_copy import COPY, quantise
from offload_runtime_kernels.scaled_rows import BITS

from offload_runtime.models.layers import Weight
from offload_runtime.weights.encoding import Encoding, Scaled, aligned, scaled_rows
from offload_runtime.weights.layout import ModelLayout, PackedLayout, TensorSpec

COPY_BITS = BITS[COPY.number]
# What it takes to fit the groups of a piece of a matrix: about a dozen tensors of 4 million elements in fp32.
MAKING_BYTES = 192 << 20


def copied(layout: ModelLayout) -> ModelLayout:
    """Return how copies of all layers lie in memory. What lies around the layers is not copied."""

    @cache  # layers that are alike are one
    def copy(block: PackedLayout) -> PackedLayout:
        specs, offset_bytes = list[TensorSpec](), 0
        for spec in block.tensors:
            how = spec.encoding
            if len(spec.shape) == 2:
                how = Encoding.of(layout.dtype, [(spec.shape[0], Scaled(COPY))])
            specs.append(replace(spec, offset_bytes=offset_bytes, encoding=how))
            offset_bytes += aligned(specs[-1].nbytes)
        return PackedLayout(tuple(specs), offset_bytes)

    return replace(layout, layers=tuple(map(copy, layout.layers)))


class ObservedWeight:
    """A matrix [M, K] that notes by what it is multiplied, while a copy of it is made.

    Args:
        weight: The matrix.
    """

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._squares, self._rows = torch.zeros(()), 0  # the former [K], once there are rows

    @property
    def dense(self) -> torch.Tensor:
        """The decoded matrix."""
        return self._weight.dense

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Decoded rows, as of a `Weight`."""
        return self._weight.rows(index)

    def linear(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: Activation | None = None
    ) -> torch.Tensor:
        """The product, as of a `Weight`."""
        squares = x.float().square().sum(0)
        self._squares, self._rows = squares + self._squares.to(squares), self._rows + len(x)
        return self._weight.linear(x, residual=residual, gated=gated)

    @property
    def importance(self) -> torch.Tensor | None:
        """Mean squares of what its columns were multiplied with, fp32 [K]; None where they were zeros or not
        finite, or there were none."""
        mean = self._squares / max(1, self._rows)
        return mean if self._rows and bool((mean.isfinite()).all() & (mean > 0).any()) else None


def observed(weights: Mapping[str, Weight], copy: PackedLayout) -> dict[str, Weight]:
    """Return the weights of a layer, of which a copy will be made, with matrices that note what they are multiplied
    with."""
    matrices = {spec.name for spec in copy.tensors if spec.encoding.parts}
    return {name: ObservedWeight(one) if name in matrices else one for name, one in weights.items()}


def make_copy(weights: Mapping[str, Weight], copy: PackedLayout, out: torch.Tensor) -> None:
    """Make the copy of a layer, enqueued on the current stream.

    Args:
        weights: Of the layer, on the copy's device; those of `observed` weigh errors by what they have noted.
        copy: How it lies in memory.
        out: Its block, uint8 [total_bytes], device; written.
    """
    views = copy.views(out)
    for spec in copy.tensors:
        weight = weights[spec.name]
        if not spec.encoding.parts:
            views[spec.name].dense.copy_(weight.dense)
            continue
        stored, importance = out[spec.offset_bytes :][: spec.nbytes], None
        if isinstance(weight, ObservedWeight):
            importance = weight.importance
        quantise(weight.dense, scaled_rows(stored, COPY, *spec.shape), importance)
