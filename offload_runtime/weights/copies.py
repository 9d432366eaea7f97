"""Copies of layers in few bits, which draft for the layers that they are of.

The block of a copy has the tensors of the layer, matrices in 4 bits and all else as it is. It stays on the device, and
is made of the layer as that comes from the checkpoint. Of bf16, Q8_0 and FP8 what crosses the link in every pass is
then what is left given the copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

import torch
from offload_runtime_kernels.linear import Activation
from offload_runtime_kernels.low_bit_copy import COPY, quantise
from offload_runtime_kernels.low_bit_encode import encode_fp8_rest, encode_q8_rest, encode_rest
from offload_runtime_kernels.low_bit_rest import (
    BF16,
    FP8,
    LEAST_OWN_COLUMNS,
    Q8_0,
    decode_rest,
    rest_bytes,
    used_bytes,
)
from offload_runtime_kernels.scaled_rows import BITS, ScaledFormat, ScaledRows

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import LayerWeights, Weight
from offload_runtime.weights.encoding import (
    Encoding,
    Format,
    GgufBlocks,
    NotCodable,
    Part,
    Scaled,
    aligned,
    scale_tensors,
    scaled_bytes,
    scaled_rows,
)
from offload_runtime.weights.layout import ModelLayout, PackedLayout, TensorSpec, checkpoint_tensors

COPY_BITS = BITS[COPY.number]
# Of the device, to code a piece of a matrix: 8 million weights, in Q8_0 about six bytes for each.
MAKING_BYTES = 64 << 20


def rows_of_copy(copy: torch.Tensor, shape: tuple[int, ...], start: int, end: int) -> ScaledRows:
    """Return some rows of a matrix' copy, whose bytes are uint8, without copying."""
    return scaled_rows(copy, COPY, *shape).some(slice(start, end))


@dataclass(frozen=True)
class RestOfCopy(Format):
    """Has what is left of rows of a matrix given their copy, the `base`: of such in bf16, in Q8_0 or, by its `form`, in
    FP8, whose scales come first; in the room that a plan has for it, or in the `stored_bytes` that it has turned out to
    take."""

    kind: str = field(init=False)
    of_kind: str
    form: ScaledFormat | None = None
    stored_bytes: int | None = None
    base: ScaledRows | None = field(default=None, compare=False, repr=False)
    has_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", f"{self.of_kind} given copies")

    @classmethod
    def of(cls, how: Format) -> RestOfCopy | None:
        """Return what is left of what is stored so; None where it is in no such format."""
        if isinstance(how, Scaled):
            fp8 = how.form.number == FP8 and how.form.columns % LEAST_OWN_COLUMNS == 0 and not how.form.ordered
            return cls(FP8, how.form) if fp8 else None
        if isinstance(how, GgufBlocks):
            return cls(Q8_0) if how.kind == Q8_0 else None
        return cls(BF16) if how == Format(BF16) else None

    def nbytes(self, rows: int, columns: int) -> int:
        if self.stored_bytes is not None:
            return self.stored_bytes
        return self._scale_bytes(rows, columns) + rest_bytes(rows, columns, self.of_kind)

    def given(self, base: torch.Tensor, shape: tuple[int, ...], start: int, end: int) -> RestOfCopy:
        return replace(self, base=rows_of_copy(base, shape, start, end))

    def decode(self, stored: torch.Tensor, rows: int, start: int, out: torch.Tensor) -> None:
        assert self.base is not None, "it is seen with its copy"
        ahead, scales = self._scale_bytes(rows, out.shape[1]), None
        if self.form is not None:
            scales = scale_tensors(stored, self.form, rows, out.shape[1]).scales
        decode_rest(stored[ahead:], self.base, start, out, self.of_kind, scales, self.form)

    def store(self, whole: torch.Tensor, shape: tuple[int, int], copy: ScaledRows, out: torch.Tensor) -> RestOfCopy:
        """Write what is left of rows.

        Args:
            whole: How they are stored without their copy, uint8.
            shape: Their number, and columns.
            copy: Of these rows, on the same device.
            out: uint8 [nbytes], on any device; written.

        Returns:
            How it is stored. Raises `NotCodable` where there is no room for it.
        """
        rows, columns = shape
        ahead = self._scale_bytes(*shape)
        room = out[ahead:]
        if self.form is not None:
            out[:ahead].copy_(whole[scaled_bytes(self.form, *shape) - ahead :][:ahead])
            fits = encode_fp8_rest(scaled_rows(whole, self.form, *shape), self.form, columns, copy, room)
        elif self.of_kind == Q8_0:
            row_bytes = GgufBlocks(Q8_0).row_bytes(columns)
            fits = encode_q8_rest(whole[: rows * row_bytes].view(rows, row_bytes), columns, copy, room)
        else:
            fits = encode_rest(whole[: 2 * rows * columns].view(torch.bfloat16).view(shape), copy, room)
        if not fits:
            raise NotCodable
        return replace(self, stored_bytes=ahead + used_bytes(room, rows))

    def _scale_bytes(self, rows: int, columns: int) -> int:
        """Return those in front: what a matrix of FP8 has behind its numbers."""
        if self.form is None:
            return 0
        return scaled_bytes(self.form, rows, columns) - aligned(rows * self.form.row_bytes(columns))


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
