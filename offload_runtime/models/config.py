"""What a model is: its layers, and what they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from offload_runtime_kernels.kv_blocks import Rotation

from offload_runtime.models.experts import Experts
from offload_runtime.models.gated_delta import GatedDelta
from offload_runtime.models.layers import Attention, DecoderLayer, Tensor
from offload_runtime.options import require, require_positive


@dataclass(frozen=True)
class Rope:
    """A rotation of queries and keys: transformers' `rope_parameters`, and how many channels of a head they turn."""

    parameters: Mapping[str, Any]
    channels: int

    def rotation(self, *, first: int = 0, interleaved: bool = False) -> Rotation:
        """Return how a layer rotates by it, whose angles of a row begin with this one."""
        return Rotation(first, self.channels // 2, interleaved)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder: its layers from below, and what lies around them.

    Attributes:
        layers: They share the residual stream; each has a number and a size of heads of its own.
        ropes: The rotations of the layers, whose pairs of channels follow one another among a row's angles.
        embedding_multiplier: What embeddings are multiplied by, in the model's dtype; with `rounds_multiplier` it is
            itself rounded to that.
        logits_divisor, logits_cap: What logits are divided by; c of c tanh(logits / c).
        name: What proposals of such models are counted as.
        is_head: Whether such models draft from what their target's passes keep.
    """

    name: ClassVar[str] = "draft"
    is_head: ClassVar[bool] = False

    architecture: str
    layers: tuple[DecoderLayer, ...]
    vocab_size: int
    max_position_embeddings: int
    ropes: tuple[Rope, ...]
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    logits_divisor: float = 1.0
    logits_cap: float | None = None

    def __post_init__(self) -> None:
        for one in {*self.attentions.values()}:
            for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"):
                require_positive(name, getattr(one, name))
            uneven = f"{one.num_heads} query heads cannot share {one.num_kv_heads} KV heads evenly"
            require(one.num_heads % one.num_kv_heads == 0, uneven)
        for name in ("vocab_size", "max_position_embeddings"):
            require_positive(name, getattr(self, name))

    @property
    def is_part(self) -> bool:
        """Return whether other machines have the rest of the model."""
        return False

    @property
    def num_streams(self) -> int:
        """Return how many streams of its rows go to another machine, for a head to read, besides that of the last."""
        return 0

    @property
    def complete(self) -> ModelConfig:
        """Return the model that it is a part of, or itself."""
        return self

    @property
    def has_ends(self) -> bool:
        """Return whether it has what lies around the layers: embedding and head."""
        return True

    @cached_property
    def all_attentions(self) -> Mapping[int, Attention]:
        """Return the attentions by whose windows a sequence can be cut, wherever their layers are, by `own_number`."""
        return self.attentions

    @property
    def strides(self) -> tuple[range, ...]:
        """Return the layers between which rows stay on a machine, by their numbers here: all of them."""
        return (range(self.num_layers),)

    def own_number(self, layer: int) -> int:
        """Return the number here of a layer of the model that this is a part of: the same."""
        return layer

    @property
    def attention(self) -> Attention:
        """Return the attention of the first layer that has keys and values."""
        return next(iter(self.attentions.values()))

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Return how many channels are in the residual stream."""
        return self.attention.hidden_size

    @cached_property
    def num_angles(self) -> int:
        """Angles of a row: one for each pair of channels of each rotation."""
        return sum(rope.channels // 2 for rope in self.ropes)

    @cached_property
    def kv_elements(self) -> tuple[int, ...]:
        """Return the elements of the keys and values that each layer's cache keeps of a token."""
        return tuple(layer.attention.kv_elements(1) for layer in self.layers)

    @cached_property
    def attentions(self) -> dict[int, Attention]:
        """Return the attentions of the layers that keep keys and values, by their numbers."""
        found = ((number, layer.attention) for number, layer in enumerate(self.layers))
        return {number: one for number, one in found if isinstance(one, Attention)}

    @cached_property
    def deltas(self) -> dict[int, GatedDelta]:
        """Return the gated delta layers by their numbers."""
        found = ((number, layer.attention) for number, layer in enumerate(self.layers))
        return {number: one for number, one in found if isinstance(one, GatedDelta)}

    @cached_property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer in tokens; None where it has none."""
        return tuple(getattr(layer.attention, "window", None) for layer in self.layers)

    @cached_property
    def row_elements(self) -> int:
        """Return the elements that a row of a pass takes on its way through the largest layer, but for the residual
        stream."""
        return max(layer.row_elements for layer in set(self.layers))

    @cached_property
    def prompt_row_elements(self) -> int:
        """Return the elements that a row of a prompt takes in experts that many go through together, at most."""
        return max((one.prompt_row_elements for one in self.mixtures), default=0)

    @cached_property
    def mixtures(self) -> set[Experts]:
        """Return the kinds of blocks of experts that layers have."""
        return {layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)}

    @cached_property
    def crossing_bytes(self) -> int:
        """Return the bytes that a pass takes for each sequence whose rows go over the end of a gated delta layer's
        chunk."""
        return max((one.crossing_bytes for one in self.deltas.values()), default=0)

    def layer_prefix(self, number: int) -> str:
        """Return what stands before the names of a layer's tensors."""
        return f"model.layers.{number}."

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of keys and values that one token holds over all layers."""
        return sum(self.kv_elements) * element_bytes

    def shared_tensors(self) -> Iterator[Tensor]:
        """Return what lies around the layers, by whole names: `embedding` [V, H], `final_norm` [H], `lm_head` [V, H]
        unless it is the embedding."""
        vocabulary = (self.vocab_size, self.hidden_size)
        yield Tensor("embedding", "model.embed_tokens.weight", vocabulary)
        yield Tensor("final_norm", "model.norm.weight", vocabulary[1:])
        if not self.tie_word_embeddings:
            yield Tensor("lm_head", "lm_head.weight", vocabulary)
