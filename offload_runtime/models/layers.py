"""The layers of decoders: what tensors each has, what it keeps of every token, and what it computes.

A family (`models/llama.py` and so on) says which layers a model has; packing, loading, placement, caches and plans
order and add up what these declare. Everything works on flat rows [N, H], and nothing that a row computes depends on
the others of its pass or on how many there are, except through the keys and values that it is meant to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from offload_runtime_kernels.attention import AttentionParams, QueryRows
from offload_runtime_kernels.experts import StoredMatrices
from offload_runtime_kernels.gated_delta import DeltaMemory, DeltaRows
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, HeadNorm, KVBlocks, RopeRows, Rotation, rope_store
from offload_runtime_kernels.linear import Activation
from offload_runtime_kernels.rms_norm import rms_norm
from offload_runtime_kernels.window_steps import StepRows


class Tensor(NamedTuple):
    """A tensor of a checkpoint, by its name below the layer's, whose rows follow those of earlier tensors of the same
    `packed` name: what has one name is one matrix in memory. It may be kept in a `dtype` of its own, whatever the model
    computes in. It is in the layer's block, or in that of one `expert` of the layer, by its number."""

    packed: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Work:
    """What a layer, or a part of it, does for rows of one sequence.

    Attributes:
        product_operations: Of products with matrices.
        attention_operations: Of products of queries with the keys and values that they see.
        kv_elements: Elements of keys and values that are read.
        expert_operations: Of products with the matrices of experts, which are multiply-adds in fp32.
    """

    product_operations: int
    attention_operations: int = 0
    kv_elements: int = 0
    expert_operations: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.product_operations + other.product_operations, self.attention_operations + other.attention_operations,
            self.kv_elements + other.kv_elements, self.expert_operations + other.expert_operations,
        )  # fmt: skip


class Weight(Protocol):
    """A tensor in memory, however it is stored; see `weights.encoding.Weight`."""

    @property
    def dense(self) -> torch.Tensor:
        """The decoded tensor in the dtype that the model computes in."""

    def slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Decoded rows of a matrix [M, K] in turn, each time with the number of the first of them."""

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Decoded rows of a matrix [M, K]: [N, K] for integers [N] on its device."""

    def linear(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: Activation | None = None
    ) -> torch.Tensor:
        """x W^T + b, added to a residual or gated."""


Weights = Mapping[str, Weight]  # by packed name


class ExpertStore(NamedTuple):
    """Where the experts of a layer are that a pass multiplies with.

    Attributes:
        matrices: By packed name, those of the experts that are in buffers on the layer's card.
        fetch: Takes rows [N, H], the experts that each has chosen, [N, k] int64, and what these make of the rows,
            [N, k, H], all on the card. It fetches experts in rounds and yields in each the buffer of each of the
            layer's experts, [E] int32, -1 of those that are in none. Behind the last one it writes the results of
            experts that are in no round.
        scratch: uint8, of `Experts.scratch_bytes`, where experts of many rows are decoded; None where none are.
    """

    matrices: Mapping[str, StoredMatrices]
    fetch: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Iterator[torch.Tensor]]
    scratch: torch.Tensor | None = None


class LayerWeights(dict[str, Weight]):
    """A layer's packed tensors by name, and its `experts`, if it has any."""

    experts: ExpertStore


class QueryGrowth(NamedTuple):
    """Queries are multiplied by 1 + beta ln(1 + floor(position / length))."""

    beta: float
    length: int


@dataclass(frozen=True, eq=False)
class DeltaPaths:
    """How the N rows of a step, of which some may lie beside others, become the W rows of each of P paths, which a
    gated delta layer reads as sequences by themselves; int64 on the compute device.

    Attributes:
        taken: [P * W]: the rows of paths, by their number in the step; or in the memory, if there is one.
        own: [N]: which row of a path each row of the step is.
        memory: What rows brought that later ones may stand behind: inputs [M, C] and decays [M, 2 H_v].
        kept: [N]: where the rows of the step are to be in there.
    """

    taken: torch.Tensor
    own: torch.Tensor
    memory: tuple[torch.Tensor, ...] = ()
    kept: torch.Tensor | None = None

    def of_rows(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Return what the step's rows brought of the layer's inputs and decays, of all rows of the paths."""
        if self.kept is None:
            return [part.index_select(0, self.taken) for part in parts]
        for memory, new in zip(self.memory, parts, strict=True):
            memory.index_copy_(0, self.kept, new)
        return [memory.index_select(0, self.taken) for memory in self.memory]


class DeltaPass(NamedTuple):
    """What a gated delta layer has of sequences, where the rows of a pass stand, whether they are committed already,
    and the paths that they are on, where they do not stand one behind the other as they are."""

    memory: DeltaMemory
    rows: DeltaRows
    keeps: bool
    paths: DeltaPaths | None = None


class LayerCache(Protocol):
    """What an attention layer needs of a KV cache: a place for new keys and values, and attention over all that its
    queries see."""

    def store(self, layer: int) -> KVBlocks:
        """Where the rows of the running pass write their keys and values."""

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows, params: AttentionParams) -> torch.Tensor:
        """Attention of the rotated queries [B, T, H, D] (their own keys are stored): [B, T, H, D]."""

    def delta(self, layer: int, rows: Rows) -> DeltaPass:
        """What a gated delta layer is about."""


@dataclass(frozen=True)
class Rows:
    """The B x T rows of a pass as a layer sees them, in device tensors; absent rows have position -1.

    Attributes:
        tokens: [B * T] int32.
        query: Positions and slots of the rows, [B, T].
        rope: How they are rotated, and where keys and values go.
        prompt: Of a piece of a prompt the slot, and the tokens before it.
        hidden: Of a head's pass what its target, or the head itself, made of the token before each row's: [B * T,
            width] in the model's dtype. Of a drafter of blocks the context of as many tokens before these, whose keys
            and values go where further rows of `rope` say.
    """

    tokens: torch.Tensor
    query: QueryRows
    rope: RopeRows
    prompt: tuple[int, int] | None = None
    hidden: torch.Tensor | None = None

    @classmethod
    def of_step(cls, step: StepRows, slots: torch.Tensor, *, max_length: int) -> Rows:
        """Return rows whose tokens and positions only the device knows; fit for a CUDA graph.

        Args:
            step: The rows; negative positions are padding.
            slots: [B] int32, device, 0 to B - 1.
            max_length: At least the largest position or cache position + 1.
        """
        query = QueryRows(step.positions, slots, max_length, step.committed, step.ancestors, step.used, step.most_used)
        return cls(
            step.tokens, query, RopeRows(step.cos, step.sin, step.positions.view(-1), step.cache_positions, step.slots)
        )

    @property
    def num_rows(self) -> int:
        """B * T."""
        return self.tokens.shape[0]


def projections(packed: str, rows: Mapping[str, int], columns: int, *, bias: bool = False) -> Iterator[Tensor]:
    """Matrices that are stacked, by their modules' names, and their biases where they have some."""
    yield from (Tensor(packed, f"{name}.weight", (count, columns)) for name, count in rows.items())
    if bias:
        yield from (Tensor(f"{packed}_bias", f"{name}.bias", (count,)) for name, count in rows.items())


def product_operations(tensors: Iterable[Tensor], rows: int) -> int:
    """Operations of the products of rows with the matrices among some tensors, two for each element."""
    return 2 * rows * sum(math.prod(tensor.shape) for tensor in tensors if len(tensor.shape) == 2)


@dataclass(frozen=True)
class RowNorm:
    """How all norms of a model's rows are made; `rms_norm` says what the fields mean. Norms of each head are never
    centred."""

    eps: float
    offset: float | None = None
    centred: bool = False

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None, add: bool = False
    ) -> torch.Tensor:
        """Normed rows [N, H], in new memory, or written to `out` or added to it."""
        return rms_norm(x, weight, self.eps, offset=self.offset, centred=self.centred, out=out, add=add)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary positions.

    Attributes:
        hidden_size: Channels of the residual stream, H.
        num_heads, num_kv_heads, head_dim: Query heads, heads of keys and values, channels of each, D.
        norm: How all rows of the model are normed, around its blocks too.
        scale: What the dot products of queries and keys are multiplied by; 0 stands for D ** -0.5.
        soft_cap: What logits are capped at softly, by a tanh; None leaves them.
        sinks: Whether each query head has a learnt logit that takes part in its softmax and has no value.
        window: Tokens that a sliding window reaches; None attends to all.
        rotation: How queries and keys are rotated; None: not at all.
        qkv_bias, o_bias: Which projections have biases.
        qk_norm: Whether queries and keys are normed before they are rotated, each head by itself or all together.
        v_norm: Whether each head's values are normed, without a weight.
        values_are_keys: Whether values are the keys before they are normed and rotated.
        query_growth: How queries grow with their positions, if they do.
        fused: Whether a checkpoint has queries, keys and values as one matrix.
        gated: Whether the projection has a gate behind each head's queries, whose sigmoid multiplies what attention
            gives.
        input_size: Channels of the rows that are projected, E; 0 stands for H.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: RowNorm
    scale: float = 0.0
    soft_cap: float | None = None
    sinks: bool = False
    window: int | None = None
    rotation: Rotation | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    v_norm: bool = False
    values_are_keys: bool = False
    query_growth: QueryGrowth | None = None
    fused: bool = False
    gated: bool = False
    input_size: int = 0

    def __post_init__(self) -> None:
        if not self.scale:
            object.__setattr__(self, "scale", float(self.head_dim**-0.5))
        if not self.input_size:
            object.__setattr__(self, "input_size", self.hidden_size)

    @property
    def q_size(self) -> int:
        """Channels of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all key heads together; the values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection of queries, keys and values."""
        return (1 + self.gated) * self.q_size + (1 if self.values_are_keys else 2) * self.kv_size

    def kv_elements(self, context: int) -> int:
        """Elements of the keys and values that a cache keeps of `context` tokens of a sequence."""
        return 2 * self.kv_size * context

    @property
    def kv_block_shape(self) -> tuple[int, int, int, int]:
        """Shape of a block: keys and values, their heads, tokens, channels."""
        return 2, self.num_kv_heads, BLOCK_TOKENS, self.head_dim

    def saved_tensors(self, dtype: torch.dtype, *, whole: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what is saved of a block: keys and values, where a window slides only of a whole one."""
        return [(self.kv_block_shape, dtype)] if whole or self.window is None else []

    def first_whole(self, length: int) -> int:
        """The first token that is reached from behind the first `length`; none where a block always is whole."""
        return length if self.window is None else max(0, length + 1 - self.window)

    def reserved_tokens(self, context: int, pass_rows: int | None) -> int:
        """Tokens, whole blocks of them, that a cache on the device has room for: the context, or what a sliding window
        reaches from any of the rows that a pass may have of a sequence. None: the cache keeps all that it is given."""
        blocks = -(-context // BLOCK_TOKENS)
        if self.window is not None and pass_rows is not None:  # which begin and end anywhere in a block
            blocks = min(blocks, -(-(self.window + pass_rows) // BLOCK_TOKENS) + 1)
        return blocks * BLOCK_TOKENS

    def work(self, rows: int, context: int) -> Work:
        """What is done for the last `rows` of `context` tokens, each of which sees its own key and those before it."""
        before, window = context - rows, self.window or context
        unlimited = min(rows, max(0, window - before))  # rows that see all before them
        seen = unlimited * before + unlimited * (unlimited + 1) // 2 + (rows - unlimited) * window
        read = self.kv_elements(min(context, window + rows))
        return Work(product_operations(self.tensors(), rows), 4 * self.q_size * seen, read)

    @property
    def row_elements(self) -> int:
        """Elements that a row takes on its way: the projection, rotated queries, what attention gives, and a copy."""
        return (1 + self.gated) * self.qkv_size + 3 * self.q_size

    def tensors(self) -> Iterator[Tensor]:
        """`qkv` [qkv_size, E], `o` [H, q_size], their biases, `q_norm` and `k_norm` [D] or of all heads, `sinks` [query
        heads]."""
        qkv = {"q_proj": (1 + self.gated) * self.q_size, "k_proj": self.kv_size}
        qkv |= {} if self.values_are_keys else {"v_proj": self.kv_size}
        rows = {f"self_attn.{name}": count for name, count in qkv.items()}
        rows = {"self_attn.qkv_proj": self.qkv_size} if self.fused else rows
        yield from projections("qkv", rows, self.input_size, bias=self.qkv_bias)
        for name, size in (("q", self.q_size), ("k", self.kv_size)) if self.qk_norm else ():
            shape = (self.head_dim if self.qk_norm == "head" else size,)
            yield Tensor(f"{name}_norm", f"self_attn.{name}_norm.weight", shape)
        if self.sinks:
            yield Tensor("sinks", "self_attn.sinks", (self.num_heads,))
        yield from projections("o", {"self_attn.o_proj": self.hidden_size}, self.q_size, bias=self.o_bias)

    def forward(self, layer: int, x: torch.Tensor, weights: Weights, rows: Rows, cache: LayerCache) -> torch.Tensor:
        """Project, rotate, store keys and values, and attend: [N, E] -> [N, q_size], before the output projection."""
        qkv, norm, gate = weights["qkv"].linear(x), None, None
        if self.gated:  # behind each head's queries
            q, kv = qkv[:, : 2 * self.q_size].view(-1, self.num_heads, 2, self.head_dim), qkv[:, 2 * self.q_size :]
            qkv, gate = torch.cat((q[:, :, 0].flatten(1), kv), dim=1), torch.sigmoid(q[:, :, 1]).flatten(1)
        if self.qk_norm == "head":
            q_norm, k_norm = weights["q_norm"].dense, weights["k_norm"].dense
            norm = HeadNorm(q_norm, k_norm, self.norm.eps, self.norm.offset, self.v_norm)
        elif self.qk_norm == "all":
            q, k, _ = qkv.split((self.q_size, self.kv_size, self.kv_size), dim=1)
            for name, part in (("q_norm", q), ("k_norm", k)):
                self.norm(part, weights[name].dense, out=part)
        shared = self.values_are_keys
        q = rope_store(qkv, rows.rope, cache.store(layer), self.rotation, norm, values_are_keys=shared)
        if self.query_growth is not None:
            beta, length = self.query_growth
            growth = 1 + beta * (rows.rope.positions.clamp_min(0) // length + 1).log()
            q = q.mul_(growth.to(q.dtype)[:, None, None])
        q = q.view(*rows.query.positions.shape, self.num_heads, self.head_dim)
        sinks = weights["sinks"].dense if self.sinks else None
        params = AttentionParams(self.scale, self.window, self.soft_cap, sinks)
        out = cache.attend(layer, q, rows.query, params).reshape(rows.num_rows, -1).contiguous()
        return out if gate is None else out.mul_(gate)


@dataclass(frozen=True)
class GatedMLP:
    """activation(x W_gate) * (x W_up), projected back.

    Attributes:
        hidden_size, intermediate_size: Channels outside and inside.
        activation: Of the gate.
        bias: Whether all three projections have biases.
        fused: Whether a checkpoint has gate and up as one matrix.
    """

    hidden_size: int
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    fused: bool = False

    def work(self, rows: int) -> Work:
        """What is done for `rows`."""
        return Work(product_operations(self.tensors(), rows))

    @property
    def row_elements(self) -> int:
        """Elements that a row takes on its way: gate and up, and their product."""
        return 3 * self.intermediate_size

    def tensors(self) -> Iterator[Tensor]:
        """`gate_up` [2I, H], gate rows first, `down` [H, I], and their biases."""
        rows = {"mlp.gate_proj": self.intermediate_size, "mlp.up_proj": self.intermediate_size}
        rows = {"mlp.gate_up_proj": 2 * self.intermediate_size} if self.fused else rows
        yield from projections("gate_up", rows, self.hidden_size, bias=self.bias)
        yield from projections("down", {"mlp.down_proj": self.hidden_size}, self.intermediate_size, bias=self.bias)

    def forward(
        self, x: torch.Tensor, weights: LayerWeights, rows: Rows, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what comes of rows x [N, H], [N, H]; with a residual stream this, to which it has been added."""
        return weights["down"].linear(weights["gate_up"].linear(x, gated=self.activation), residual=residual)


class TokenMixer(Protocol):
    """What lets a layer's tokens know of those before them: attention, or a recurrence."""

    @property
    def hidden_size(self) -> int:
        """Channels of the residual stream, H."""

    @property
    def norm(self) -> RowNorm:
        """How all rows of the model are normed."""

    @property
    def row_elements(self) -> int:
        """Elements that a row takes on its way."""

    def kv_elements(self, context: int) -> int:
        """Elements of the keys and values that a cache keeps of `context` tokens of a sequence."""

    def saved_tensors(self, dtype: torch.dtype, *, whole: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what is saved of a block, which is whole or not."""

    def first_whole(self, length: int) -> int:
        """The first token whose block has to be whole for a text to go on behind its first `length` tokens."""

    def work(self, rows: int, context: int) -> Work:
        """What is done for the last `rows` of `context` tokens."""

    def tensors(self) -> Iterator[Tensor]:
        """Those of a checkpoint, `o`, the output projection, the last."""

    def forward(self, layer: int, x: torch.Tensor, weights: Weights, rows: Rows, cache: LayerCache) -> torch.Tensor:
        """Results before the output projection: [N, H] -> [N, columns of `o`]."""


class RowMixer(Protocol):
    """What a layer does with each row by itself: a gated MLP, or some of many."""

    @property
    def row_elements(self) -> int:
        """Elements that a row takes on its way."""

    def work(self, rows: int) -> Work:
        """What is done for `rows`."""

    def tensors(self) -> Iterator[Tensor]:
        """Those of a checkpoint."""

    def forward(
        self, x: torch.Tensor, weights: LayerWeights, rows: Rows, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what comes of rows x [N, H], [N, H]; with a residual stream this, to which it has been added. It
        may be x itself."""


class Norms(NamedTuple):
    """The norms of a layer by their modules' names, which are their packed names too; None where there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


USUAL_NORMS = Norms()


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and an MLP, each normed before or after it or both, and added to the residual stream.

    Attributes:
        attention, mlp: The two blocks.
        norms: What is normed.
        parallel: Whether the MLP reads what attention does, so that it has no norm of its own before it.
        residual_multiplier: What a block's result is multiplied by before it is added.
        scaled: Whether the layer ends by multiplying the residual stream by a learnt number.
    """

    attention: TokenMixer
    mlp: RowMixer
    norms: Norms = USUAL_NORMS
    parallel: bool = False
    residual_multiplier: float = 1.0
    scaled: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Those of both blocks, and the norms [H] around them."""
        shape, (before, after, before_mlp, after_mlp) = (self.attention.hidden_size,), self.norms
        yield from (Tensor(name, f"{name}.weight", shape) for name in (before,) if name)
        yield from self.attention.tensors()
        yield from (Tensor(name, f"{name}.weight", shape) for name in (after, before_mlp) if name)
        yield from self.mlp.tensors()
        yield from (Tensor(name, f"{name}.weight", shape) for name in (after_mlp,) if name)
        if self.scaled:
            yield Tensor("layer_scalar", "layer_scalar", (1,))

    def work(self, rows: int, context: int) -> Work:
        """What the layer does for the last `rows` of `context` tokens of a sequence."""
        return self.attention.work(rows, context) + self.mlp.work(rows)

    @property
    def row_elements(self) -> int:
        """Elements that a row takes on its way through the layer, but for the residual stream."""
        return 3 * self.attention.hidden_size + self.attention.row_elements + self.mlp.row_elements

    def forward(self, layer: int, residual: torch.Tensor, weights: LayerWeights, rows: Rows, cache: LayerCache) -> None:
        """Add to the residual stream, and write the rows' keys and values into the cache.

        Args:
            layer: The layer's number in the model.
            residual: [N, H].
            weights: The layer's packed tensors.
            rows: The pass.
            cache: Where keys and values live.
        """
        self.mix(residual, weights, rows, self.attend(layer, residual, weights, rows, cache))

    def attend(
        self, layer: int, residual: torch.Tensor, weights: LayerWeights, rows: Rows, cache: LayerCache
    ) -> torch.Tensor | None:
        """Do the first part of `forward`, attention's. Return what the MLP reads, [N, H], where that is what attention
        has read; None where it reads the residual stream."""
        x = self.attention_input(residual, weights, rows)
        out, after = self.attention.forward(layer, x, weights, rows, cache), self.norms.after_attention
        self._add(residual, partial(weights["o"].linear, out), after, weights)
        return x if self.parallel else None

    def mix(self, residual: torch.Tensor, weights: LayerWeights, rows: Rows, x: torch.Tensor | None = None) -> None:
        """Do the second part, that of the MLP; `x` is what `attend` has returned."""
        (_, _, before_mlp, after_mlp), normed = self.norms, self.attention.norm
        if x is None:
            x = residual if before_mlp is None else normed(residual, weights[before_mlp].dense)
        self._add(residual, partial(self.mlp.forward, x, weights, rows), after_mlp, weights)
        if self.scaled:
            residual.mul_(weights["layer_scalar"].dense)

    def attention_input(self, residual: torch.Tensor, weights: LayerWeights, rows: Rows) -> torch.Tensor:
        """Return what attention reads, [N, H], of the residual stream."""
        before = self.norms.before_attention
        return residual if before is None else self.attention.norm(residual, weights[before].dense)

    def _add(
        self, residual: torch.Tensor, block: Callable[..., torch.Tensor], norm: str | None, weights: Weights
    ) -> None:
        """Norm and multiply a block's result, and add it to the residual stream; the block itself adds what is neither
        normed nor multiplied."""
        if norm is None and self.residual_multiplier == 1:
            block(residual=residual)
            return
        out = block()
        if norm is None:
            residual.add_(out if self.residual_multiplier == 1 else out.mul_(self.residual_multiplier))
        else:
            self.attention.norm(out, weights[norm].dense, out=residual, add=True)
