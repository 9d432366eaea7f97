"""Copies of layers in few bits, which draft for the layers that they are of.

The block of a copy has the tensors of the layer, matrices in 4 bits and all else as it is. It stays on the device, and
is made of the layer as that comes from the checkpoint. Of bf16, Q8_0 and FP8 what crosses the link in every pass is
then what is left given the copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache

import torch
from offload_runtime_kernels.linear import Activation
from offload_runtime_kernels.low_bit_copy import COPY, quantise
from offload_runtime_kernels.scaled_rows import BITS

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import LayerWeights, Weight
from offload_runtime.weights.encoding import (
    Encoding,
    Format,
    NotCodable,
    Part,
    RestOfCopy,
    Scaled,
    aligned,
    rows_of_copy,
)
from offload_runtime.weights.layout import ModelLayout, PackedLayout, TensorSpec, checkpoint_tensors

COPY_BITS = BITS[COPY.number]
# What it takes to code a piece of a matrix: 8 million weights, in Q8_0 about six times as bytes.
MAKING_BYTES = 64 << 20


def copy_layout(layout: ModelLayout) -> ModelLayout:
    """Return how copies of all layers lie in memory. What lies around the layers is not copied."""

    @cache  # layers that are alike are one
    def copy(block: PackedLayout) -> PackedLayout:
        return PackedLayout.packed(
            replace(spec, encoding=Encoding.of(layout.dtype, [(spec.shape[0], Scaled(COPY))]))
            if len(spec.shape) == 2 else spec
            for spec in block.tensors
        )  # fmt: skip

    return replace(layout, layers=tuple(map(copy, layout.layers)))


def rest_layout(layout: ModelLayout, config: ModelConfig, uncoded: Collection[str]) -> ModelLayout | None:
    """Return how the rest of layers lies in memory, given their copies: what is left of matrices in bf16, Q8_0 or FP8,
    all else as it is.

    Args:
        layout: How they lie as they are.
        config: The model's shape.
        uncoded: Matrices for which there is no room, by transformers' name; they stay as they are.

    Returns:
        None where no matrix is in one of these.
    """
    whole = dict[int | None, set[str]]()
    for name, to in checkpoint_tensors(config).items():
        if name in uncoded:
            whole.setdefault(to.layer, set()).add(to.packed)

    @cache  # layers that are alike are one
    def of_block(block: PackedLayout, kept: frozenset[str]) -> PackedLayout:
        return PackedLayout.packed(
            spec if spec.name in kept or len(spec.shape) != 2 else rest(spec) for spec in block.tensors
        )

    def rest(spec: TensorSpec) -> TensorSpec:
        """Return what is left of a matrix, or all of it where that takes no more, or nothing says what is left."""
        hows = [(rows, RestOfCopy.of(how)) for rows, how in spec.encoding.formats(spec.shape)]
        rests = [(rows, how) for rows, how in hows if how is not None]
        if len(rests) < len(hows):
            return spec
        return min(spec, replace(spec, encoding=Encoding.of(layout.dtype, rests)), key=lambda one: one.nbytes)

    pairs = enumerate(layout.layers)
    layers = tuple(of_block(block, frozenset(whole.get(number, ()))) for number, block in pairs)
    return None if layers == layout.layers else replace(layout, layers=layers)


class ObservedWeight:
    """A matrix [M, K] that notes by what it is multiplied, while a copy of it is made.

    Args:
        weight: The matrix.
    """

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._squares = torch.zeros(())  # [K], once there are rows

    @property
    def dense(self) -> torch.Tensor:
        """Return the decoded matrix."""
        return self._weight.dense

    def slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Return all decoded rows, as a `Weight` does."""
        return self._weight.slices()

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return decoded rows, as a `Weight` does."""
        return self._weight.rows(index)

    def linear(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: Activation | None = None
    ) -> torch.Tensor:
        """Return the product, as a `Weight` does."""
        squares = x.float().square().sum(0)
        self._squares = squares + self._squares.to(squares)
        return self._weight.linear(x, residual=residual, gated=gated)

    @property
    def importance(self) -> torch.Tensor | None:
        """Sums of squares of what its columns were multiplied with, fp32 [K]; None where they are zeros or not finite,
        or there are none."""
        return self._squares if bool(self._squares.isfinite().all() & (self._squares > 0).any()) else None


def observed(weights: Mapping[str, Weight], copy: PackedLayout) -> LayerWeights:
    """Return the weights of a layer, of which a copy will be made, with matrices that note what they are multiplied
    with."""
    matrices = {spec.name for spec in copy.tensors if spec.encoding.parts}
    return LayerWeights((name, ObservedWeight(one) if name in matrices else one) for name, one in weights.items())


def make_copy(weights: Mapping[str, Weight], copy: PackedLayout, out: torch.Tensor) -> None:
    """Make the copy of a layer, enqueued on the current stream.

    Args:
        weights: Of the layer, `observed`, on the copy's device; errors are weighed by what they have noted.
        copy: How it lies in memory.
        out: Its block, uint8 [total_bytes], device; written.
    """
    views = copy.views(out)
    for spec in copy.tensors:
        weight = weights[spec.name]
        if not isinstance(weight, ObservedWeight):
            views[spec.name].dense.copy_(weight.dense)
            continue
        stored, importance = out[spec.offset_bytes :][: spec.nbytes], weight.importance
        for start, rows in weight.slices():
            quantise(rows, rows_of_copy(stored, spec.shape, start, start + len(rows)), importance)


def store_rest(
    whole: PackedLayout, memory: torch.Tensor, copies: Mapping[str, torch.Tensor], rest: PackedLayout, out: torch.Tensor
) -> tuple[PackedLayout, set[str]]:
    """Store the rest of a layer given its copy, each tensor behind the one before it.

    Args:
        whole: How the layer lies in memory as it is.
        memory: Where, uint8 on the copy's device.
        copies: The bytes of the copy by packed name, uint8.
        rest: How the rest lies in memory at most.
        out: uint8 [total_bytes of that], host; written.

    Returns:
        How it has come to lie there, and the packed matrices for which there was no room, which are not stored.
    """
    specs, refused, offset_bytes, stored = list[TensorSpec](), set[str](), 0, whole.stored(memory)
    for was, spec in zip(whole.tensors, rest.tensors, strict=True):
        found, room = replace(spec, offset_bytes=offset_bytes), out[offset_bytes:][: spec.nbytes]
        if was.encoding == spec.encoding:
            room.copy_(stored[spec.name])
        else:
            parts = was.encoding.split(stored[spec.name], was.shape)
            try:
                found = replace(found, encoding=_store_parts(spec, parts, copies[spec.name], room))
            except NotCodable:
                refused.add(spec.name)
        specs.append(found)
        offset_bytes += aligned(found.nbytes)
    return PackedLayout(tuple(specs), offset_bytes), refused


def _store_parts(spec: TensorSpec, parts: list[Part], copy: torch.Tensor, out: torch.Tensor) -> Encoding:
    """Store what is left of a matrix' parts and return how; raises `NotCodable` where there is no room for it."""
    (_, columns), hows, at = spec.shape, list[tuple[int, Format]](), 0
    for (rows, how), part in zip(spec.encoding.parts, parts, strict=True):
        assert isinstance(how, RestOfCopy)
        base = rows_of_copy(copy, spec.shape, part.start, part.end)
        kept = how.store(part.stored, (rows, columns), base, out[at:][: how.nbytes(rows, columns)])
        hows.append((rows, kept))
        at += aligned(kept.nbytes(rows, columns))
    return Encoding.of(spec.encoding.dtype, hows)
