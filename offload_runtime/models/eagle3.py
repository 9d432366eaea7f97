"""EAGLE-3: a checkpoint of its own, of a Llama's layers, that reads several places of the target's residual stream."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from typing_extensions import Self

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.heads import HeadConfig
from offload_runtime.models.layers import DecoderLayer, LayerWeights, Rows, Tensor, Weights
from offload_runtime.models.reading import attention_of, mlp_of, num_layers, rope
from offload_runtime.models.registry import Head

# What tools write of norms, of which only these values run.
_USUAL_FLAGS = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
_LAYER_IDS, _USUAL_TAPS = "eagle_aux_hidden_state_layer_ids", 3
_DEFAULTS = {"num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
             "max_position_embeddings": 2048}  # fmt: skip


@dataclass(frozen=True)
class FirstLayer(DecoderLayer):
    """The first layer, whose attention reads the embedded tokens beside the residual stream, 2H channels of a row.

    Attributes:
        normed_residual: Whether the residual stream itself is normed there, and not only what attention reads of it.
    """

    normed_residual: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Return the norm of the residual stream before those of every layer: `input_layernorm` is the embedding's."""
        yield Tensor("hidden_norm", "hidden_norm.weight", (self.attention.hidden_size,))
        yield from super().tensors()

    @property
    def row_elements(self) -> int:
        """Return the elements that a row takes on its way: as in every layer, and both inputs, normed and joined."""
        return super().row_elements + 4 * self.attention.hidden_size

    def attention_input(self, residual: torch.Tensor, weights: LayerWeights, rows: Rows) -> torch.Tensor:
        """Return both, normed: [N, 2H]. The `embedding` is among the weights."""
        norm, embedded = self.attention.norm, weights["embedding"].rows(rows.tokens)
        hidden = norm(residual, weights["hidden_norm"].dense)
        if self.normed_residual:
            residual.copy_(hidden)
        return torch.cat((norm(embedded, weights["input_layernorm"].dense), hidden), dim=1)


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """What is kept of a row is h, in which all taps are joined; rows about the tokens that follow read the residual
    stream before the final norm in its place:

        h = fc [tap 0, tap 1, tap 2], from which the layers go on

    Attributes:
        draft_vocab_size: Tokens that it has logits of; `d2t` says which.
        fused: Whether there is such an `fc`; else h is the only tap.
        norms_taps: Whether each is normed first, as in EAGLE 3.1.
        norms_all: Whether they are together. Only that norm's weights are applied: by how much all of a row are scaled
            is lost in the first layer, which norms h as well (`FirstLayer.normed_residual`).
        keeps_normed: Whether rows about the tokens that follow read the stream behind the final norm, likewise.
    """

    name: ClassVar[str] = "eagle3"
    draft_vocab_size: int = field(kw_only=True)
    fused: bool = True
    norms_taps: bool = False
    norms_all: bool = False
    keeps_normed: bool = False

    def tap(self, number: int, x: torch.Tensor, shared: Weights, out: torch.Tensor) -> None:
        """Add this tap's product with its columns of `fc`."""
        if self.norms_taps:
            x = self.attention.norm(x, shared[f"fc_norm_{number}"].dense)
        if self.norms_all:
            x = x * shared["input_norm"].dense.view(-1, self.target_size)[number]
        if self.fused:
            super().tap(number, x, shared, out)
        else:
            out.copy_(x)

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor, shared: Weights) -> torch.Tensor:
        """Return what is kept: layers add to it."""
        return hidden.clone()

    def leave(self, residual: torch.Tensor, shared: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normed rows, and these or the stream."""
        normed, _ = super().leave(residual, shared)
        return normed, normed if self.keeps_normed else residual

    @property
    def logit_size(self) -> int:
        """Return how many tokens the head has logits of."""
        return self.draft_vocab_size

    def fitted(self, target: ModelConfig) -> Self:
        """Return the head as it is beside its target; what its configuration leaves out are the taps that EAGLE-3 was
        published with, or where there is no `fc` the target's last rows."""
        count = target.num_layers
        usual = (2, count // 2, count - 3) if self.fused else (count,)
        return super(Eagle3Config, replace(self, taps=self.taps or usual)).fitted(target)

    def own_tensors(self) -> Iterator[Tensor]:
        """`fc` [H, taps * T]; norms of taps [T]; `final_norm` [H]; `d2t` [draft tokens], by how much the target's
        number of a token is larger than the head's."""
        count = len(self.taps) or (_USUAL_TAPS if self.fused else 1)
        if self.fused:
            yield Tensor("fc", "fc.weight", (self.hidden_size, count * self.target_size))
        for number in range(count if self.norms_taps else 0):
            yield Tensor(f"fc_norm_{number}", f"fc_norm.{number}.weight", (self.target_size,))
        if self.norms_all:
            yield Tensor("input_norm", "input_norm.weight", (count * self.target_size,))
        yield Tensor("final_norm", "norm.weight", (self.hidden_size,))
        if self.draft_vocab_size != self.vocab_size:
            yield Tensor("d2t", "d2t", (self.draft_vocab_size,), torch.int64)


def _config(fields: Fields, names: Collection[str]) -> Eagle3Config:
    """Read a configuration, which of one format is nested: of layers, and what is around them."""
    stated = {name: value for name, value in fields.values.items() if value is not None}
    fields = Fields(fields.where, {**_DEFAULTS, **fields.mapping("transformer_layer_config"), **stated})
    own = Fields(f"{fields.where}'s eagle_config", fields.mapping("eagle_config"))
    for name, usual in _USUAL_FLAGS.items():
        if own.flag(name, usual) is not usual:
            own.refuse(name, not usual, str(usual).lower())
    bias, count = fields.flag("attention_bias"), num_layers(fields)
    attention = replace(attention_of(fields), qkv_bias=bias, o_bias=bias)
    later = DecoderLayer(attention, replace(mlp_of(fields), bias=fields.flag("mlp_bias")))
    wide = replace(attention, input_size=2 * attention.hidden_size)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    normed, norms_all, norms_taps, keeps_normed = (own.flag(name, fields.flag(name)) for name in flags)
    if norms_all and not normed:
        fields.refuse("norm_before_residual", False, "true (beside norm_before_fc)")
    first = FirstLayer(wide, later.mlp, normed_residual=normed)
    # One format counts the layers below which the stream is read, the other those whose output it is.
    taps = fields.items(_LAYER_IDS, int, at_least=0) or [one + 1 for one in own.items(_LAYER_IDS, int, at_least=0)]
    size, parts = fields.integer("vocab_size"), {"embed_tokens.weight": "embedding", "lm_head.weight": "lm_head"}
    known = fields.integer("draft_vocab_size", size, at_most=size)
    owned = {part for name, part in parts.items() if name in names or not names}
    owned |= {"lm_head"} if known < size else set()  # the target's says more
    return Eagle3Config(
        architecture="LlamaForCausalLMEagle3", layers=(first, *[later] * (count - 1)), vocab_size=size,
        max_position_embeddings=fields.integer("max_position_embeddings"), ropes=(rope(fields, attention.head_dim),),
        target_size=fields.integer("target_hidden_size", attention.hidden_size), taps=tuple(taps),
        draft_vocab_size=known, fused=own.flag("use_aux_hidden_state", default=True), owned=frozenset(owned),
        norms_taps=norms_taps, norms_all=norms_all, keeps_normed=keeps_normed,
    )  # fmt: skip


def _renamed(name: str) -> str | None:
    """Return what a tensor is called here: `t2d` says nothing that `d2t` does not, and the verifier is the target."""
    name = re.sub(r"^(?:model\.)?(?:midlayer\.)", "layers.0.", name).removeprefix("model.")
    return None if name == "t2d" or name.startswith("verifier_") else name


HEAD = Head(_config, _renamed)
