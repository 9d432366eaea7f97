"""What target and draft will take, decided before anything large is read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import GB, ModelConfig, SpeculationOptions
from offload_runtime.errors import ContextLengthError, DeviceError, OptionError
from offload_runtime.kv_cache import block_bytes, kv_cache_bytes, num_blocks, prefill_workspace_bytes, ring_blocks
from offload_runtime.kv_cache.retrieved_draft import retrieved_draft_bytes
from offload_runtime.kv_cache.windowed import streaming_cache_bytes, streaming_capacity_tokens
from offload_runtime.model.linear import padded_rows
from offload_runtime.planner import HostKVNeeds, workspace_bytes
from offload_runtime.runners import PassShape, step_activation_bytes, step_graph_bytes, tree_buffer_bytes, tree_slots
from offload_runtime.runners.tree_rows import STEP_ROWS
from offload_runtime.weights import ModelDescription, layer_layout, packed_bytes, shared_layout

# Heights of the matrix products; they depend on nothing but the model and the kind of device, or the bits would depend
# on the placement. On a GPU 64 rows cost what one costs (the products of a 7B model: 3.76 ms at 64 rows, 3.57 ms at 1,
# 5.6 ms at 256; H200). A model of 8 GB and more is streamed on the cards this is for, its passes take hundreds of
# milliseconds, and 256 rows keep a window of 1024 tokens at 26 launches a layer, which the launch queue of 1024 holds.
# On a CPU every row costs.
_SMALL_TARGET_SHAPE = PassShape(64, 512, 1024)
_LARGE_TARGET_SHAPE = PassShape(256, 512, 1024)
_LARGE_TARGET_BYTES = 8 * GB
_CPU_TARGET_SHAPE = PassShape(8, 64, 256)
# A draft promises no bits, so its heights only have to be quick.
_DRAFT_SHAPES = {"cuda": PassShape(8, 256, 1024), "cpu": PassShape(1, 64, 256)}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_AUTO_CONTEXT_TOKENS = 8192
# Large enough for the link's peak, small enough that a ring of them costs little.
_KV_PIECE_BYTES = 32 << 20
_KV_SLOTS = 4
KV_PLACES = ("auto", "gpu", "host")


def resolve_dtype(name: str, source: ModelDescription, device: torch.device) -> torch.dtype:
    """Turn `auto`, `bf16`, `fp16` or `fp32` into a dtype; `auto` is the model's own on a GPU and fp32 on a CPU."""
    if name == "auto":
        return source.native_dtype if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise OptionError(f"dtype must be auto, bf16, fp16 or fp32, not {name!r}")
    return _DTYPES[name]


def require_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a dtype that the device, which must be there, does not compute in."""
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise DeviceError(f"{torch.cuda.get_device_name(device)} does not compute in bf16: use --dtype fp16")


def resolve_context(context: int | str, config: ModelConfig, *, kv: str) -> int:
    """Tokens to reserve for: asked for, or the model's maximum, up to 8192 unless the KV cache grows on the host."""
    if context == "auto":
        longest = config.max_position_embeddings
        return longest if kv == "host" else min(longest, _AUTO_CONTEXT_TOKENS)
    try:
        tokens = int(context)
    except ValueError:
        raise OptionError(f"context must be auto or a number of tokens, not {context!r}") from None
    if tokens < 2:
        raise OptionError(f"context must hold at least a token of the prompt and a new one: 2, not {tokens}")
    longest = longest_context(config)
    if tokens > longest:
        raise ContextLengthError(
            f"a context of {tokens} tokens is more than the {longest} that the model was made for: lower --context, or "
            "set a RoPE scaling in the model's config.json"
        )
    return tokens


def longest_context(config: ModelConfig) -> int:
    """Tokens that the model's positions reach, its RoPE scaling included."""
    rope, longest = config.rope_parameters, config.max_position_embeddings
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        return max(longest, int(original * rope["factor"]))
    return int(longest * rope["factor"]) if rope["rope_type"] == "dynamic" else longest


@dataclass(frozen=True)
class KVPlan:
    """Where the target's KV cache lives: on the device, or in host memory but for `resident_layers`.

    `piece_bytes` and `num_slots` describe its ring on the link; `open_blocks` is the size of its ring of newest blocks.
    A prefill may borrow `lent_bytes` of memory that only decoding uses.
    """

    on_host: bool = False
    resident_layers: tuple[int, ...] = ()
    piece_bytes: int = 0
    num_slots: int = 0
    open_blocks: int = 0
    lent_bytes: int = 0


@dataclass(frozen=True)
class StreamingPlan:
    """A draft's cache of sinks and recent tokens; see `StreamingDraftCache`."""

    sink_tokens: int
    recent_tokens: int
    window_tokens: int


@dataclass(frozen=True)
class RetrievalPlan:
    """What a draft's steps read of its cache; see `RetrievedDraftCache`."""

    budget_tokens: int
    chunk_size: int


@dataclass(frozen=True)
class ModelPlan:
    """One model's bytes before it is loaded."""

    config: ModelConfig
    dtype: torch.dtype
    shape: PassShape
    context_tokens: int
    window_tokens: int
    batch: int = 1
    streaming: StreamingPlan | None = None
    kv: KVPlan = field(default_factory=KVPlan)
    retrieval: RetrievalPlan | None = None
    tree_nodes: int = 0  # most nodes of the trees that a draft grows

    @property
    def tree_slots(self) -> int:
        """Of a draft that grows trees: places for what may become part of a sequence."""
        return tree_slots(self.tree_nodes) if self.tree_nodes else 0

    @cached_property
    def layer_bytes(self) -> int:
        """One packed layer."""
        return layer_layout(self.config, self.dtype).total_bytes

    @cached_property
    def shared_bytes(self) -> int:
        """Embedding, final norm and head."""
        return shared_layout(self.config, self.dtype).total_bytes

    @property
    def whole_kv_bytes(self) -> int:
        """The KV cache of the whole context, wherever it is."""
        return kv_cache_bytes(
            self.config, self.dtype, capacity_tokens=self.context_tokens, batch=self.batch, spare_slots=self.tree_slots
        )

    @property
    def kv_bytes(self) -> int:
        """What the KV cache takes of the device."""
        if self.streaming is not None:
            return streaming_cache_bytes(
                self.config, self.dtype, sink_tokens=self.streaming.sink_tokens,
                recent_tokens=self.streaming.recent_tokens, window_tokens=self.streaming.window_tokens,
                batch=self.batch,
            )  # fmt: skip
        if self.retrieval is not None:
            return retrieved_draft_bytes(
                self.config, self.dtype, capacity_tokens=self.context_tokens,
                budget_tokens=self.retrieval.budget_tokens, chunk_size=self.retrieval.chunk_size, batch=self.batch,
            )  # fmt: skip
        if not self.kv.on_host:
            return self.whole_kv_bytes
        needs, resident = self.host_kv_needs, len(self.kv.resident_layers)
        streamed = self.config.num_layers - resident
        shared = needs.shared_bytes if streamed else 0
        return resident * needs.layer_bytes + streamed * needs.open_bytes + shared

    @property
    def prefill_workspace_bytes(self) -> int:
        """What a prefill reserves for one layer's keys and values, when it cannot borrow as much."""
        needed_bytes = prefill_workspace_bytes(self.config, self.dtype, self.context_tokens)
        return 0 if self.kv.lent_bytes >= needed_bytes else needed_bytes

    @property
    def host_kv_needs(self) -> HostKVNeeds:
        """Bytes of the parts of a KV cache in host memory."""
        block = block_bytes(self.config, self.dtype)
        return HostKVNeeds(
            num_layers=self.config.num_layers,
            layer_bytes=self.batch * num_blocks(self.context_tokens) * block,
            open_bytes=self.batch * self.kv.open_blocks * block,
            shared_bytes=self.prefill_workspace_bytes + self.kv.num_slots * self.kv.piece_bytes,
        )

    def streamed_kv_blocks(self, reach: int | None, length_tokens: int) -> int:
        """Blocks of one sequence that a pass behind `length_tokens` tokens streams for a layer whose cache is on the
        host: the full ones that its window of `reach` tokens reaches."""
        first = 0 if reach is None else max(0, length_tokens - reach) // BLOCK_TOKENS
        return length_tokens // BLOCK_TOKENS - first

    def with_kv_on_host(self, lent_bytes: int) -> ModelPlan:
        """The same model with its KV cache in host memory, no layer of it resident."""
        block = block_bytes(self.config, self.dtype)
        blocks = max(1, min(_KV_PIECE_BYTES // block, num_blocks(self.context_tokens)))
        kv = KVPlan(True, (), blocks * block, _KV_SLOTS, ring_blocks(self.window_tokens), lent_bytes)
        return replace(self, kv=kv)

    @property
    def workspace_bytes(self) -> int:
        """Activations of the largest pass."""
        return workspace_bytes(
            self.config, self.dtype.itemsize, context_tokens=self.context_tokens,
            chunk_rows=min(self.shape.prefill_chunk_tokens, padded_rows(self.context_tokens, self.shape.prefill_rows)),
            window_rows=padded_rows(self.batch * self.window_tokens, self.shape.window_rows),
            sampled_rows=self.batch * self.window_tokens,
        )  # fmt: skip

    @property
    def all_bytes(self) -> int:
        """Everything on the device, all layers resident, without a workspace."""
        return self.config.num_layers * self.layer_bytes + self.shared_bytes + self.kv_bytes


@dataclass(frozen=True)
class Plans:
    """Plans of target and draft."""

    target: ModelPlan
    draft: ModelPlan | None
    middle_bytes: int = 0
    lent_bytes: int = 0  # of these, what a prefill may borrow
    graphs: bool = False  # whether the device runs steps as CUDA graphs
    middle_graph_bytes: int = 0

    @property
    def graph_bytes(self) -> int:
        """CUDA graphs of the draft's and the middle level's steps."""
        draft = self.draft
        if not self.graphs or draft is None:
            return self.middle_graph_bytes
        rows = 2 * draft.batch  # the first step of a draft feeds two tokens
        activations = step_activation_bytes(draft.config, draft.dtype.itemsize, rows=rows)
        return self.middle_graph_bytes + step_graph_bytes(draft.config) + activations + self._tree_step_bytes

    @property
    def _tree_step_bytes(self) -> int:
        """What steps over trees take besides: graphs in a pool of their own, on a stream of their own."""
        draft = self.draft
        if draft is None or not draft.tree_slots:
            return 0
        rows = max(STEP_ROWS, draft.batch)
        activations = step_activation_bytes(draft.config, draft.dtype.itemsize, rows=rows)
        buffers = tree_buffer_bytes(draft.config, draft.dtype.itemsize, batch=draft.batch)
        return step_graph_bytes(draft.config) + activations + buffers

    @property
    def host_bytes(self) -> int:
        """Host memory that both models' weights take while they are loaded."""
        plans = [self.target] if self.draft is None else [self.target, self.draft]
        return sum(packed_bytes(plan.config, plan.dtype) for plan in plans)


def make_plans(
    target: ModelDescription, draft: ModelDescription | None, dtype: str, device: torch.device, *,
    context: int | str, window: int, kv: str, options: SpeculationOptions, batch: int = 1,
    tree_nodes: int | None = None,
) -> Plans:  # fmt: skip
    """What both models will take, the draft's trees of up to `tree_nodes` included. Asks nothing of the device. Raises
    `OptionError`, `ContextLengthError`."""
    if kv not in KV_PLACES:
        raise OptionError(f"kv must be {', '.join(KV_PLACES[:-1])} or {KV_PLACES[-1]}, not {kv!r}")
    torch_dtype = resolve_dtype(dtype, target, device)
    tokens = resolve_context(context, target.config(), kv=kv)
    plan = target_plan(target.config(), torch_dtype, device, context=tokens, window=window, batch=batch)
    graphs = device.type == "cuda"
    if draft is None:
        return Plans(plan, None, graphs=graphs)
    return Plans(
        plan,
        draft_plan(
            draft.config(),
            torch_dtype,
            device,
            context=tokens,
            window=window,
            batch=batch,
            options=options,
            tree_nodes=tree_nodes,
        ),
        graphs=graphs,
    )


def target_plan(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, context: int, window: int, batch: int = 1
) -> ModelPlan:
    """Plan of a target."""
    if device.type == "cpu":
        shape = _CPU_TARGET_SHAPE
    else:
        shape = _LARGE_TARGET_SHAPE if packed_bytes(config, dtype) >= _LARGE_TARGET_BYTES else _SMALL_TARGET_SHAPE
    return ModelPlan(config, dtype, shape, context, window, batch)


def draft_plan(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    context: int,
    window: int,
    options: SpeculationOptions,
    batch: int = 1,
    tree_nodes: int | None = None,
) -> ModelPlan:
    """Plan of a draft model. A full cache ends where the draft's own positions do, and has room for trees.

    Raises:
        OptionError: The cache that was asked for needs positions that the draft does not have, or would retrieve more
            than there can be; or trees were asked for and the cache is not a full one.
    """
    longest = longest_context(config)
    plan = ModelPlan(config, dtype, _DRAFT_SHAPES[device.type], context, window, batch)
    kind = options.draft_cache
    if kind == "auto":
        kind = "full" if context <= min(longest, _AUTO_CONTEXT_TOKENS) else "retrieval"
        kind = "streaming" if context > longest or (kind == "retrieval" and options.budget_tokens > context) else kind
    if tree_nodes is not None and kind != "full":
        raise OptionError(
            f"--tree-nodes {tree_nodes} needs a draft with a full KV cache, and in a context of {context} tokens this "
            f"one has a {kind} cache: use --draft-cache full, lower --context, or drop --tree-nodes"
        )
    if kind == "streaming":
        return _with_streaming_cache(plan, options)
    if kind == "full":
        return replace(plan, context_tokens=min(context, longest), tree_nodes=tree_nodes or 0)
    if context > longest:
        raise OptionError(
            f"a retrieval cache keeps the positions of all {context} tokens of the context, and the draft was made for "
            f"{longest}: use --draft-cache streaming, lower --context, or set a RoPE scaling in the draft's config.json"
        )
    if options.budget_tokens > context:
        raise OptionError(
            f"a draft that retrieves {options.budget_tokens} of at most {context} tokens reserves memory for nothing: "
            "lower --budget-tokens, raise --context, or use --draft-cache full"
        )
    return replace(plan, retrieval=RetrievalPlan(options.budget_tokens, options.chunk_size))


def draft_alternatives(plans: Plans, options: SpeculationOptions) -> tuple[Plans, ...]:
    """The plans with each cache that their draft may get: where that is left to us, a streaming one besides what it
    was planned with, which takes memory that layers or the KV cache of the target could have."""
    draft = plans.draft
    if draft is None or options.draft_cache != "auto" or draft.streaming is not None or draft.tree_slots:
        return (plans,)
    if _streamed_tokens(draft, options) >= draft.context_tokens:
        return (plans,)
    return plans, replace(plans, draft=_with_streaming_cache(replace(draft, retrieval=None), options))


def _with_streaming_cache(plan: ModelPlan, options: SpeculationOptions) -> ModelPlan:
    """A draft with a cache of sinks and recent tokens, whatever the context."""
    kept, longest = _streamed_tokens(plan, options), longest_context(plan.config)
    if kept > longest:
        raise OptionError(
            f"a streaming draft cache of {kept} tokens (sinks, recent tokens and the window) is more than the "
            f"{longest} that the draft was made for: lower --recent-tokens by {kept - longest}"
        )
    reach = _streaming_window(plan, options)
    return replace(plan, streaming=StreamingPlan(options.sink_tokens, _recent_tokens(plan, options), reach))


def _recent_tokens(plan: ModelPlan, options: SpeculationOptions) -> int:
    """Newest tokens that a streaming cache keeps: there are no more of them than the context has."""
    return min(options.recent_tokens, max(2, plan.context_tokens))


def _streamed_tokens(plan: ModelPlan, options: SpeculationOptions) -> int:
    """Tokens that a streaming cache has room for."""
    recent_tokens = _recent_tokens(plan, options)
    return streaming_capacity_tokens(options.sink_tokens, recent_tokens, _streaming_window(plan, options))


def _streaming_window(plan: ModelPlan, options: SpeculationOptions) -> int:
    """Steps of a middle level may go beyond what is asked for."""
    return plan.window_tokens + 2 * options.gamma_draft + 2
