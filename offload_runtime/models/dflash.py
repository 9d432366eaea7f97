"""DFlash: a drafter that guesses a whole block of tokens in one pass of a few layers (z-lab/dflash, versions 1 and 2).

    context of a token = hidden_norm(fc [tap 0, tap 1, ...])
    block = [the text's last token, mask, ..., mask], at the positions behind those of the context

Every layer makes keys and values of the text from its context, which no layer changes, so that they are written once.
The rows of a block attend to these, and to one another, usually without a mask; the row of a mask says what stands in
its place. Version 2 convolves the rows of a block around attention and MLP, and chooses among the best tokens of each
place by pairs of them: how well a token follows the one that was chosen before it, as the row of its place sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from offload_runtime_kernels.attention import AttentionParams, QueryRows
from offload_runtime_kernels.kv_blocks import HeadNorm, RopeRows, rope_store
from typing_extensions import Self

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import Fields
from offload_runtime.models import qwen3
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.heads import HeadConfig
from offload_runtime.models.layers import Attention, DecoderLayer, LayerCache, LayerWeights, Rows, Tensor, Weights
from offload_runtime.models.reading import mlp_of, num_layers, rope, windows_by_type
from offload_runtime.models.registry import Head

_SECOND = "DFlash2DraftModel"  # all others are of the first version
_MOST_BLOCK, _MOST_CANDIDATES, _MOST_LAYERS = 64, 128, 1 << 8
# What transformers and vLLM take of a Qwen 3 that leaves it out.
_DEFAULTS = {
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    **qwen3.FAMILY.defaults,
}  # fmt: skip
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # whose frequencies are the same at any length


@dataclass(frozen=True)
class BlockAttention(Attention):
    """Attention of the rows of blocks, all of one width T and each a sequence's, to its context and to one another.

    Attributes:
        causal: Whether a row sees none of the block's rows behind it. Where it does not and a window slides, `window`
            is what all rows of a block together reach: T - 1 more than each of them.
    """

    causal: bool = False

    def forward(self, layer: int, x: torch.Tensor, weights: Weights, rows: Rows, cache: LayerCache) -> torch.Tensor:
        """Compute what all attention does; with the context that the rows bring, if any, in one product."""
        together = x if rows.hidden is None else torch.cat((x, rows.hidden))
        q = self.store(layer, together, weights, rows.rope, cache)[: rows.num_rows]
        q = q.view(*rows.query.positions.shape, self.num_heads, self.head_dim)
        params = AttentionParams(self.scale, self.window, None, weights["sinks"].dense if self.sinks else None)
        return cache.attend(layer, q, self._seen(rows.query), params).reshape(rows.num_rows, -1)

    def tensors(self) -> Iterator[Tensor]:
        """Return what all attention has; checkpoints have another name for sinks."""
        for part in super().tensors():
            yield part._replace(name="self_attn.attention_sink_bias") if part.packed == "sinks" else part

    def _seen(self, query: QueryRows) -> QueryRows:
        """Return which keys the rows see: where nothing is masked those that the block's last row does."""
        positions = query.positions
        if self.causal:
            return query
        end = positions.amax(1, keepdim=True)
        if self.window is None:
            return replace(query, positions=torch.where(positions < 0, positions, end))
        # A row's window begins by its own position and ends with the block: listed key by key.
        first = (positions - self.window + positions.shape[1]).clamp_min(0)
        most = min(self.window, query.max_length)
        keys = first[..., None] + torch.arange(most, dtype=torch.int32, device=positions.device)
        return QueryRows(
            torch.where(positions < 0, positions, end - first), query.slots, most,
            committed=torch.zeros_like(query.slots), ancestors=keys.minimum(end[..., None]),
        )  # fmt: skip

    def store(self, layer: int, x: torch.Tensor, weights: Weights, rope: RopeRows, cache: LayerCache) -> torch.Tensor:
        """Write the keys and values of rows of a block, or of the context of tokens, [N, H], into the cache, where
        `rope` says that they stand. Returns their queries, [N, query heads, D], which a context has no use for."""
        norm = HeadNorm(weights["q_norm"].dense, weights["k_norm"].dense, self.norm.eps)
        return rope_store(weights["qkv"].linear(x), rope, cache.store(layer), self.rotation, norm)


@dataclass(frozen=True)
class BlockConvolution:
    """Short causal convolutions over the rows of a block before and behind a part of a layer, whose kernels are learnt
    and, by groups of channels, made from the rows that the part reads:

        out[t] = sum over i < K of  (base[i] + made[t, i]) * x[t - i]

    Attributes:
        name: Of the module.
        hidden_size, kernel_size, group_size: Channels H, taps K, and channels of a group.
    """

    name: str
    hidden_size: int
    kernel_size: int
    group_size: int

    def tensors(self) -> Iterator[Tensor]:
        """Both kernels' learnt part [2, K, H], and what makes the rest of them, [2 K groups, H]."""
        groups = self.hidden_size // self.group_size
        yield Tensor(f"{self.name}_base", f"{self.name}.base_kernel", (2, self.kernel_size, self.hidden_size))
        made = (2 * self.kernel_size * groups, self.hidden_size)
        yield Tensor(self.name, f"{self.name}.kernel_projection.weight", made)

    def kernels(self, x: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernels before and behind the part, [N, K, H] each, of the rows [N, H] that it reads."""
        made = weights[self.name].linear(x).unflatten(1, (2, self.kernel_size, -1))
        before, behind = (weights[f"{self.name}_base"].dense + made.repeat_interleave(self.group_size, dim=3)).unbind(1)
        return before, behind


def _convolved(x: torch.Tensor, kernel: torch.Tensor, width: int) -> torch.Tensor:
    """Return rows [N, H] of blocks of so many, convolved with their kernels [N, K, H]."""
    blocks, out = x.view(-1, width, x.shape[1]), x * kernel[:, 0]
    for back in range(1, kernel.shape[1]):
        out.addcmul_(F.pad(blocks[:, :-back], (0, 0, back, 0)).view_as(x), kernel[:, back])
    return out


@dataclass(frozen=True)
class ConvolvedLayer(DecoderLayer):
    """A layer of version 2, both of whose parts have convolutions around them."""

    around_attention: BlockConvolution = field(kw_only=True)
    around_mlp: BlockConvolution = field(kw_only=True)

    def tensors(self) -> Iterator[Tensor]:
        """Return the tensors of the layer, and of its convolutions."""
        yield from super().tensors()
        yield from self.around_attention.tensors()
        yield from self.around_mlp.tensors()

    @property
    def row_elements(self) -> int:
        """Return the elements that a row takes on its way: the kernels of both, and what they make."""
        return super().row_elements + 6 * self.around_mlp.kernel_size * self.attention.hidden_size

    def forward(self, layer: int, residual: torch.Tensor, weights: LayerWeights, rows: Rows, cache: LayerCache) -> None:
        """Compute what a `DecoderLayer` does, of whole blocks."""
        (norm, _, mlp_norm, _), width = self.norms, rows.query.positions.shape[1]
        assert norm is not None and mlp_norm is not None
        x = self.attention.norm(residual, weights[norm].dense)
        before, behind = self.around_attention.kernels(x, weights)
        x = self.attention.forward(layer, _convolved(x, before, width), weights, rows, cache)
        residual.add_(_convolved(weights["o"].linear(x), behind, width))
        x = self.attention.norm(residual, weights[mlp_norm].dense)
        before, behind = self.around_mlp.kernels(x, weights)
        x = self.mlp.forward(_convolved(x, before, width), weights, rows)
        residual.add_(_convolved(x, behind, width))


class Selector(NamedTuple):
    """Says how version 2 chooses: among so many `candidates` of each place, by factors of so many channels (`rank`)."""

    candidates: int
    rank: int


@dataclass(frozen=True)
class DFlashConfig(HeadConfig):
    """What is kept of a row is the sum that `fc` makes of all taps, before it is normed.

    Attributes:
        block_size: Rows of a block, T: the last token and T - 1 masks, each a proposal.
        mask_token: What stands for tokens that are to be found.
        selector: Of version 2.
        target_layers: Those of the target that it was made for, where it says so.
    """

    name: ClassVar[str] = "dflash"
    block_size: int = field(kw_only=True)
    mask_token: int = field(kw_only=True)
    selector: Selector | None = None
    target_layers: int | None = None

    def fitted(self, target: ModelConfig) -> Self:
        """Return the head as it is beside its target, which must have as many layers as the one that it was made
        for."""
        found = super().fitted(target)
        if self.target_layers not in (None, target.num_layers):
            raise CheckpointError(
                f"the {self.title} head was made for a target of {self.target_layers} layers, and it has "
                f"{target.num_layers}: take the head that was made for this target, or --draft auto"
            )
        return found

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor, shared: Weights) -> torch.Tensor:
        """Return the embedded tokens: the context is for attention alone."""
        return embedded

    def context(self, kept: torch.Tensor, shared: Weights) -> torch.Tensor:
        """Return what layers make keys and values of tokens from, [N, H], of what is kept of them."""
        return self.attention.norm(kept, shared["hidden_norm"].dense)

    def pair_scores(
        self, normed: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor, shared: Weights
    ) -> torch.Tensor:
        """Return what version 2 adds to the logits of candidates.

        Args:
            normed: [N, H], the rows of places.
            before: [N, P] int64, what may stand before each.
            tokens: [N, C] int64, the candidates for each.
            shared: What lies around the layers.

        Returns:
            [N, P, C] fp32, of each pair.
        """
        predecessors, successors = (
            shared[name].rows(index.flatten()).view(*index.shape, -1)
            for name, index in (("predecessors", before), ("successors", tokens))
        )
        return (shared["selector"].linear(normed)[:, None] * predecessors @ successors.mT).float()

    def own_tensors(self) -> Iterator[Tensor]:
        """`fc` [H, taps * T], `hidden_norm` and `final_norm` [H]; of version 2 what pairs are scored by: `selector`
        [rank, H], `predecessors` and `successors` [V, rank]."""
        size = self.hidden_size
        yield Tensor("fc", "fc.weight", (size, len(self.taps) * self.target_size))
        yield Tensor("hidden_norm", "hidden_norm.weight", (size,))
        yield Tensor("final_norm", "norm.weight", (size,))
        if self.selector is not None:
            rank, where = self.selector.rank, "candidate_selector."
            yield Tensor("selector", f"{where}hidden_projection.weight", (rank, size))
            for name in ("predecessor", "successor"):
                yield Tensor(f"{name}s", f"{where}{name}_codebook", (self.vocab_size, rank))


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer: of those that `layer_types` say, or of all with `use_swa`."""
    every, count = fields.flag("use_swa"), num_layers(fields)
    sizes = [fields.integer(name) for name in ("swa_window_size", "sliding_window") if name in fields]
    if every and not sizes:
        fields.refuse("sliding_window", None, "the tokens that a window reaches")
    found = windows_by_type(fields, [every] * count, sizes[0] if sizes else None)
    return (sizes[0],) * count if every and not any(found) else found


def _layers(own: Fields, block_size: int) -> tuple[DecoderLayer, ...]:
    """Return the layers, Qwen 3's but for what their attention sees."""
    plain, kinds = qwen3.attention(own), own.items("architectures", str)
    assert plain.rotation is not None
    sinks = own.flag("attention_sink_bias", own.flag("add_swa_attention_sink_bias"))
    rotation = plain.rotation._replace(interleaved=not own.flag("is_neox_style", True))
    stated = {one.name: getattr(plain, one.name) for one in dataclass_fields(plain)}
    attention, found = BlockAttention(**{**stated, "rotation": rotation, "sinks": sinks}), list[DecoderLayer]()
    slides = [kind == "sliding_attention" for kind in own.items("layer_types", str)] or [False] * num_layers(own)
    for window, sliding in zip(_windows(own), slides, strict=False):
        causal = own.flag("is_causal", own.flag("causal", sliding))
        reach = window if window is None or causal else window + block_size - 1
        layer = DecoderLayer(replace(attention, window=reach, causal=causal), mlp_of(own))
        found.append(_convolved_layer(own, layer, block_size) if _SECOND in kinds else layer)
    return tuple(found)


def _convolved_layer(own: Fields, layer: DecoderLayer, block_size: int) -> ConvolvedLayer:
    size = layer.attention.hidden_size
    taps, group = own.integer("conv_kernel_size", at_most=block_size), own.integer("conv_group_size", at_most=size)
    if size % group:
        own.refuse("conv_group_size", group, f"a divisor of hidden_size {size}")
    of_attention, of_mlp = (BlockConvolution(f"{part}_conv", size, taps, group) for part in ("attention", "mlp"))
    return ConvolvedLayer(layer.attention, layer.mlp, around_attention=of_attention, around_mlp=of_mlp)


def _config(fields: Fields, names: Collection[str]) -> DFlashConfig:
    """Read a configuration, whose `dflash_config` goes before what is said around it."""
    if "transformer_layer_config" in fields:
        raise CheckpointError(
            f"{fields.where} is a DFlash head in the format of speculators, whose versions number the target's layers "
            "differently: take one with a dflash_config, such as z-lab's, or --draft auto"
        )
    stated = {name: value for name, value in fields.values.items() if value is not None}
    own = Fields(fields.where, {**_DEFAULTS, **stated, **fields.mapping("dflash_config")})
    if not own.flag("use_aux_hidden_state", True):
        own.refuse("use_aux_hidden_state", False, "true (the target's hidden states go through fc)")
    if own.integer("draft_vocab_size", own.integer("vocab_size")) != own.integer("vocab_size"):
        own.refuse("draft_vocab_size", own.values["draft_vocab_size"], "as many tokens as in vocab_size")
    block_size = own.integer("block_size", 16, at_least=2, at_most=_MOST_BLOCK)
    mask = own.integer("mask_token_id", at_least=0)
    vocab_size, target_size = own.integer("vocab_size"), own.integer("target_hidden_size", own.integer("hidden_size"))
    if mask >= vocab_size:
        own.refuse("mask_token_id", mask, f"a token below vocab_size {vocab_size}")
    layers_read = own.items("target_layer_ids", int, at_least=0, at_most=_MOST_LAYERS)
    if not layers_read or sorted({*layers_read}) != layers_read:
        own.refuse("target_layer_ids", layers_read or None, "an ascending list of the target's layers that it reads")
    selector = None
    if _SECOND in own.items("architectures", str):
        selector = Selector(own.integer("selector_top_k", at_most=_MOST_CANDIDATES), own.integer("selector_rank"))
    parts = {"embed_tokens.weight": "embedding", "lm_head.weight": "lm_head"}
    cap = own.number("final_logit_softcapping", 0.0, at_least=0)
    layers = _layers(own, block_size)
    return DFlashConfig(
        architecture="DFlashDraftModel", layers=layers, vocab_size=vocab_size,
        max_position_embeddings=own.integer("max_position_embeddings"),
        ropes=(rope(own, qwen3.attention(own).head_dim, types=_ROPE_TYPES),),
        embedding_multiplier=own.number("input_embedding_scale", 1.0),
        logits_divisor=1 / own.number("output_multiplier", own.number("logit_scale", 1.0), at_least=1e-6),
        logits_cap=cap or None, target_size=target_size, taps=tuple(layer + 1 for layer in layers_read),
        owned=frozenset(part for name, part in parts.items() if name in names), block_size=block_size, mask_token=mask,
        selector=selector, target_layers=own.integer("num_target_layers", 0, at_least=0) or None,
    )  # fmt: skip


HEAD = Head(_config, renamed=str)
