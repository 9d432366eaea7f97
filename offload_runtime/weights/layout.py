"""How weights lie in memory: every layer one contiguous block, q, k, v fused and gate, up fused, and each of its
experts another one, all of one layout.

First stop on the token's journey: the copy engine moves a whole layer as one large copy because of this layout, and
the decoder sees the same bytes through weights. Layers may differ in how their matrices are stored, and so in size.
Nothing here reads a file; a checkpoint source only has to know which of its tensors fills which rows of which packed
tensor (`checkpoint_tensors`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from offload_runtime_kernels.coded_bf16 import CODED, CodedRow
from offload_runtime_kernels.experts import StoredMatrices, row_bytes
from offload_runtime_kernels.experts_cpu import HostMatrix
from offload_runtime_kernels.gguf_blocks import DTYPE_KINDS
from offload_runtime_kernels.scaled_rows import ScaledFormat

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.experts import Experts
from offload_runtime.models.layers import DecoderLayer, Tensor
from offload_runtime.sizes import format_bytes
from offload_runtime.weights.encoding import CodedBf16, Encoding, Format, Weight, aligned, format_of

# What stands for the number of a layer where a block is that of an embedding which is not the head: passes read few of
# its rows, so that it may stay on the host.
EMBEDDING = -1
# Decoded at a time at least, of a larger head: all of SmolLM2's, so that its steps take fewer kernels.
_HEAD_SLICE_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorSpec:
    """One packed tensor: where it starts in its block, what shape it has and how it is stored."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    encoding: Encoding

    @property
    def nbytes(self) -> int:
        """Return those of the stored tensor."""
        return self.encoding.nbytes(self.shape)

    @property
    def decoded_bytes(self) -> int:
        """Return those of what it is decoded to before a product."""
        return self.encoding.decoded_bytes(self.shape)


class RegisterRead(NamedTuple):
    """Weights stored as one `kind`, which a GPU's products of few rows read as stored and decode in registers. One
    launch multiplies rows of up to two kinds, and is counted in `launches` of the first."""

    kind: str
    nbytes: int
    weights: int
    launches: int


@dataclass(frozen=True)
class PackedLayout:
    """Ordered tensors in one block; each starts on a multiple of 256 bytes, and so does the end. A layer may have
    `experts` beside it."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    experts: ExpertBlocks | None = None

    @classmethod
    def of(
        cls, placed: Mapping[str, Destination], encode: Callable[[dict[str, Destination]], Encoding]
    ) -> PackedLayout:
        """Lay tensors of a checkpoint out in the order given; those of one packed name are encoded as one."""
        stacks = defaultdict[str, dict[str, Destination]](dict)
        for name, to in placed.items():
            stacks[to.packed][name] = to
        lasts = ((packed, parts, [*parts.values()][-1]) for packed, parts in stacks.items())
        return cls.packed(
            TensorSpec(packed, (to.row_end, *to.shape[1:]), 0, encode(parts)) for packed, parts, to in lasts
        )

    @classmethod
    def packed(cls, tensors: Iterable[TensorSpec]) -> PackedLayout:
        """Lay tensors out one behind the other, wherever they were."""
        specs, offset_bytes = list[TensorSpec](), 0
        for spec in tensors:
            specs.append(replace(spec, offset_bytes=offset_bytes))
            offset_bytes += aligned(spec.nbytes)
        return cls(tuple(specs), offset_bytes)

    @cached_property
    def matrix_elements(self) -> int:
        """Return the elements of the matrices that a row is multiplied with, but for experts: two operations each."""
        return sum(math.prod(spec.shape) for spec in self.tensors if len(spec.shape) == 2)

    @cached_property
    def encoded_bytes(self) -> int:
        """Return how many of `total_bytes` are decoded before a product."""
        return sum(spec.nbytes for spec in self.tensors if spec.encoding.parts)

    @cached_property
    def decoded_bytes(self) -> int:
        """Return what that is decoded to."""
        return sum(spec.decoded_bytes for spec in self.tensors)

    @cached_property
    def num_decodings(self) -> int:
        """Return the kernels that this takes."""
        return sum(len(spec.encoding.parts) for spec in self.tensors)

    @cached_property
    def register_reads(self) -> tuple[RegisterRead, ...]:
        """Return what a GPU's products of few rows decode in registers, by kind."""
        weights, nbytes, launches = Counter[str](), Counter[str](), Counter[str]()
        for spec in self.tensors:
            if found := spec.encoding.weights_in_registers(spec.shape):
                weights.update(found)
                nbytes.update(spec.encoding.bytes_by_kind(spec.shape))
                launches.update([*found][::2])
        return tuple(RegisterRead(kind, nbytes[kind], count, launches[kind]) for kind, count in weights.items())

    @cached_property
    def without_register_reads(self) -> PackedLayout:
        """Return the rest of the block, for its sums: its tensors lie apart."""
        rest = tuple(spec for spec in self.tensors if not spec.encoding.weights_in_registers(spec.shape))
        left_bytes = self.total_bytes - sum(read.nbytes for read in self.register_reads)
        return replace(self, tensors=rest, total_bytes=left_bytes)

    def moved_bytes(self, slices: int = 1, *, rows: int, passes: int = 1, expert_passes: int = 1) -> int:
        """Return what `passes` passes of so many rows read and write of the block that is on the device, when their
        products read each matrix `slices` times together and what is encoded is decoded into memory. Experts are read
        as often as `expert_passes` says."""
        decoding_bytes = passes * (self.encoded_bytes + self.decoded_bytes)
        of_experts = round(self.experts.used(rows) * self.experts.block.total_bytes) if self.experts else 0
        read_bytes = slices * (self.total_bytes - self.encoded_bytes + self.decoded_bytes)
        return decoding_bytes + read_bytes + expert_passes * of_experts

    def stored(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name the bytes of each tensor in a block, uint8, without copying."""
        return {spec.name: buffer[spec.offset_bytes : spec.offset_bytes + spec.nbytes] for spec in self.tensors}

    def views(
        self, buffer: torch.Tensor, scratch: torch.Tensor | None = None, bases: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Weight]:
        """Name the parts of a block without copying.

        Args:
            buffer: uint8 [at least total_bytes], host or device, starting where the block starts.
            scratch: uint8, for matrices that are decoded; see `Encoding.weight`.
            bases: By packed name, the stored copies of matrices of which the block has what is left.

        Returns:
            Packed name to weight; that of a matrix knows its bias.
        """
        assert buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.numel() >= self.total_bytes, (
            f"a block of {self.total_bytes} bytes cannot be seen through {buffer.dtype} {tuple(buffer.shape)}"
        )
        found: dict[str, Weight] = {}
        every = self.stored(buffer)
        for spec in sorted(self.tensors, key=lambda spec: len(spec.shape)):  # biases before their matrices
            bias = found.get(f"{spec.name}_bias")
            bias_dense, base = None if bias is None else bias.dense, (bases or {}).get(spec.name)
            found[spec.name] = spec.encoding.weight(every[spec.name], spec.shape, bias_dense, scratch, base)
        return found


@dataclass(frozen=True)
class ExpertBlocks:
    """The experts of a layer: `num_experts` of one layout, of which a row has `chosen`. They are `as_stored`, or take
    the model's dtype, as matrices that are one in memory are stored in several formats, or in one that experts are not
    multiplied in."""

    block: PackedLayout
    num_experts: int
    chosen: int
    as_stored: bool

    @property
    def total_bytes(self) -> int:
        """Return bytes of all of them."""
        return self.num_experts * self.block.total_bytes

    def used(self, rows: int) -> float:
        """Return how many of them so many rows have, if each has any."""
        return self.num_experts * (1 - (1 - self.chosen / self.num_experts) ** rows)

    @property
    def places(self) -> dict[str, HostMatrix]:
        """Return how each matrix of an expert is stored, and where in its block."""
        found = dict[str, HostMatrix]()
        for spec in self.block.tensors:
            (kind,) = [how.expert_encoding for _, how in spec.encoding.parts] or [DTYPE_KINDS[spec.encoding.dtype]]
            assert kind is not None
            found[spec.name] = HostMatrix(kind, spec.offset_bytes)
        return found

    def matrices(self, buffers: torch.Tensor) -> dict[str, StoredMatrices]:
        """Name the matrices of experts that lie in buffers, uint8 [S, at least the bytes of one], without copying."""
        found = dict[str, StoredMatrices]()
        for spec, (kind, start) in zip(self.block.tensors, self.places.values(), strict=True):
            end = start + spec.shape[0] * row_bytes(kind, spec.shape[1])
            found[spec.name] = StoredMatrices(buffers[:, start:end], kind, *spec.shape)
        return found


@dataclass(frozen=True)
class ModelLayout:
    """The blocks of a model: one for each layer, with its experts, one of what all layers share, and that of an
    `embedding` which is not the head, else empty. `dtype` is what it computes in; `lent` the target's `lm_head`, where
    that is a drafting head's, too."""

    dtype: torch.dtype
    layers: tuple[PackedLayout, ...]
    shared: PackedLayout
    embedding: PackedLayout
    lent: TensorSpec | None = None

    @classmethod
    def of(
        cls, config: ModelConfig, dtype: torch.dtype, kinds: Mapping[str, str | ScaledFormat] | None = None, *,
        coded: bool = False, uncoded: Collection[str] = (),
    ) -> ModelLayout:  # fmt: skip
        """Lay out matrices as a checkpoint stores them, where that takes fewer bytes than `dtype`, and all else in it.

        Args:
            config: The model's shape.
            dtype: What it computes in.
            kinds: How checkpoint tensors are stored, as of `format_of`, by transformers' name; others in `dtype`.
            coded: Whether matrices that would be kept in bf16 are kept in 12 bits.
            uncoded: But for these, by transformers' name.
        """
        plain = Format(DTYPE_KINDS[dtype])

        def smallest(name: str, columns: int, *, of_expert: bool = False) -> Format:
            found = format_of((kinds or {}).get(name, plain.kind))
            found = found.of_experts(columns) if of_expert else found
            return min(plain, found, key=lambda one: one.row_bytes(columns)) if found.has_rows else found

        def encode(parts: dict[str, Destination]) -> Encoding:
            first = next(iter(parts.values()))
            if not first.is_matrix or first.dtype:
                return Encoding(first.dtype or dtype)
            columns = first.shape[1]
            found = Encoding.of(dtype, [(to.shape[0], smallest(name, columns)) for name, to in parts.items()])
            if found.parts or not coded or dtype != torch.bfloat16 or CodedRow.of(columns) is None:
                return found
            code = CodedBf16()
            return Encoding.of(dtype, [(to.shape[0], plain if one in uncoded else code) for one, to in parts.items()])

        @cache  # plain layers that are alike are one: plans make layouts again and again
        def block(layer: DecoderLayer, number: int | None) -> PackedLayout:
            placed = _placed_layer(layer, number, "" if number is None else config.layer_prefix(number))
            found = PackedLayout.of({name: to for name, to in placed.items() if to.expert is None}, encode)
            if not isinstance(layer.mlp, Experts):
                return found
            of_experts = {name: to for name, to in placed.items() if to.expert is not None}

            stored = defaultdict[str, set[Format]](set)  # by packed name, how those of all of them are
            for name, to in of_experts.items():
                stored[to.packed].add(smallest(name, to.shape[1], of_expert=True))
            kept = {
                packed: how if how.expert_encoding and not others else plain
                for packed, (how, *others) in stored.items()
            }

            def encode_experts(parts: dict[str, Destination]) -> Encoding:
                """Of one, by how all of them are stored: in one format that experts have, or else in `dtype`."""
                packed, *_ = (to.packed for to in parts.values())
                return Encoding.of(dtype, [(sum(to.shape[0] for to in parts.values()), kept[packed])])

            one = PackedLayout.of({name: to for name, to in of_experts.items() if to.expert == 0}, encode_experts)
            as_stored = all(hows == {kept[packed]} for packed, hows in stored.items())
            return replace(found, experts=ExpertBlocks(one, layer.mlp.num_experts, layer.mlp.chosen, as_stored))

        blocks = (block(layer, number if kinds or coded else None) for number, layer in enumerate(config.layers))
        placed = _shared(config)
        shared, embedding = (
            PackedLayout.of({name: to for name, to in placed.items() if to.layer == number}, encode)
            for number in (None, EMBEDDING)
        )
        return cls(dtype, tuple(blocks), shared, embedding)

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """Return for each layer the first one that is stored alike."""
        firsts: dict[PackedLayout, int] = {}
        return tuple(firsts.setdefault(block, layer) for layer, block in enumerate(self.layers))

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Return bytes of each layer's block, without its experts."""
        return tuple(layer.total_bytes for layer in self.layers)

    @cached_property
    def experts(self) -> dict[int, ExpertBlocks]:
        """Return those of the layers that have some."""
        return {number: layer.experts for number, layer in enumerate(self.layers) if layer.experts}

    @property
    def total_bytes(self) -> int:
        """Return bytes of all blocks."""
        of_experts = sum(one.total_bytes for one in self.experts.values())
        return sum(self.layer_bytes) + of_experts + self.shared.total_bytes + self.embedding.total_bytes

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """Return bytes by the names of how they are stored, the most first."""
        found = Counter[str]()
        blocks = [(block, 1) for block in (*self.layers, self.shared, self.embedding)]
        for block, count in blocks + [(one.block, one.num_experts) for one in self.experts.values()]:
            for spec in block.tensors:
                of_one = spec.encoding.bytes_by_kind(spec.shape)
                found.update({kind: count * nbytes for kind, nbytes in of_one.items()})
        return dict(found.most_common())

    @property
    def main_kinds(self) -> list[str]:
        """Return those of `bytes_by_kind` that hold a hundredth of all or more."""
        return [kind for kind, nbytes in self.bytes_by_kind.items() if 100 * nbytes >= self.total_bytes]

    @cached_property
    def has_coded(self) -> bool:
        """Return whether some matrices are in the 12-bit code."""
        return CODED in self.bytes_by_kind

    @property
    def stored_as(self) -> str:
        """Return `bytes_by_kind` in words."""
        return ", ".join(f"{format_bytes(nbytes)} in {kind}" for kind, nbytes in self.bytes_by_kind.items())

    @cached_property
    def without_register_reads(self) -> ModelLayout:
        """Return it without the matrices of layers that a GPU's products of few rows decode in registers."""
        return replace(self, layers=tuple(layer.without_register_reads for layer in self.layers))

    def with_layers(self, other: ModelLayout, layers: Iterable[int]) -> ModelLayout:
        """Return it with some layers as another layout has them."""
        taken = {*layers}
        pairs = zip(self.layers, other.layers, strict=True)
        return replace(self, layers=tuple(pair[number in taken] for number, pair in enumerate(pairs)))

    def scratch_bytes(self, device_type: str, layers: Iterable[int], *, head: bool) -> int:
        """Return bytes of the largest matrix of some layers, and of the head, that is decoded before a product; a GPU
        decodes the head in slices."""
        head_bytes = self.head.decoded_bytes if head else 0
        if device_type == "cuda":
            head_bytes = min(head_bytes, _HEAD_SLICE_BYTES)
        return max(head_bytes, *map(self._layer_scratch_bytes.__getitem__, layers))

    @cached_property
    def _layer_scratch_bytes(self) -> tuple[int, ...]:
        """Return those of each layer's largest: plans ask for it thousands of times."""
        return tuple(max(spec.decoded_bytes for spec in layer.tensors) for layer in self.layers)

    def multiplied(self, layers: Iterable[int], *, head: bool) -> list[tuple[PackedLayout, int]]:
        """Return the blocks that a pass over some layers multiplies with, and how many are alike; what lies around
        them by itself."""
        counts = Counter(map(self.layer_kinds.__getitem__, layers))
        found = [(self.layers[first], count) for first, count in counts.items()]
        return [*found, *((block, 1) for block in (self.around, self.head) if block.tensors and head)]

    @cached_property
    def around(self) -> PackedLayout:
        """Return the other matrices that lie around the layers, which drafting heads have."""
        heads = ("lm_head", "embedding", "d2t")
        specs = tuple(spec for spec in self.shared.tensors if len(spec.shape) == 2 and spec.name not in heads)
        return PackedLayout(specs, sum(spec.nbytes for spec in specs))

    @cached_property
    def head(self) -> PackedLayout:
        """Return the `lm_head`, or the embedding where it is tied, or what is lent; nothing where it is elsewhere."""
        specs = {spec.name: spec for spec in self.shared.tensors}
        spec = self.lent or specs.get("lm_head") or specs.get("embedding")
        return PackedLayout((), 0) if spec is None else PackedLayout((spec,), spec.nbytes)

    def block(self, layer: int | None) -> PackedLayout:
        """Return the block of a layer, with None the shared one, or `EMBEDDING`'s."""
        return self.shared if layer is None else self.embedding if layer == EMBEDDING else self.layers[layer]


@dataclass(frozen=True)
class Destination:
    """Says where one checkpoint tensor goes: rows `[row_start, row_end)` of a packed tensor.

    `layer` is None for what all layers share (final norm, and lm_head or the embedding that it is), and `EMBEDDING` for
    an embedding of its own. `shape` is the checkpoint tensor's; `dtype` the one that it is kept in, where it is not the
    model's; `expert` the number of the layer's expert whose it is, None for the layer's own block.
    """

    layer: int | None
    packed: str
    row_start: int
    row_end: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    expert: int | None

    @property
    def is_matrix(self) -> bool:
        """Return whether products are with it, so that it may be stored in fewer bits: not the biases of experts."""
        return len(self.shape) == 2 and not self.packed.endswith("biases")


def _placed(parts: Iterable[Tensor], layer: int | None = None, prefix: str = "") -> dict[str, Destination]:
    """Return where each part goes, by transformers' name, which begins so: below those of the same packed name before
    it."""
    filled: Counter[tuple[str, int | None]] = Counter()
    placed: dict[str, Destination] = {}
    for packed, name, shape, dtype, expert in parts:
        start = filled[packed, expert]
        filled[packed, expert] = end = start + shape[0]
        placed[prefix + name] = Destination(layer, packed, start, end, shape, dtype, expert)
    return placed


@lru_cache(maxsize=128)  # plans of several formats ask for all experts of all layers again and again
def _placed_layer(layer: DecoderLayer, number: int | None, prefix: str) -> Mapping[str, Destination]:
    """Return where each part of a layer goes, by transformers' name."""
    return MappingProxyType(_placed(layer.tensors(), number, prefix))


def _shared(config: ModelConfig) -> dict[str, Destination]:
    """Return where what lies around the layers goes, by transformers' name."""
    placed, tied = _placed(config.shared_tensors()), config.tie_word_embeddings
    return {
        name: replace(to, layer=EMBEDDING) if to.packed == "embedding" and not tied else to
        for name, to in placed.items()
    }


def checkpoint_tensors(config: ModelConfig) -> dict[str, Destination]:
    """Return every checkpoint tensor the model needs, by transformers' name, and where it goes.

    Together the destinations cover every element of every packed tensor exactly once.
    """
    table = _shared(config)
    for number, layer in enumerate(config.layers):
        table |= _placed_layer(layer, number, config.layer_prefix(number))
    return table
