"""What target and draft will take, in bytes, before anything large is read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import ModelConfig
from offload_runtime.kv import block_bytes, kv_cache_bytes, num_blocks, prefill_workspace_bytes, ring_blocks
from offload_runtime.kv.retrieval_cache import retrieved_draft_bytes
from offload_runtime.kv.streaming import streaming_cache_bytes
from offload_runtime.model.linear import padded_rows
from offload_runtime.planner import HostKVNeeds, workspace_bytes
from offload_runtime.runners import PassShape, step_activation_bytes, step_graph_bytes, tree_buffer_bytes, tree_slots
from offload_runtime.runners.draft_tree_steps import STEP_ROWS
from offload_runtime.sampling import MOST_FILTERED_ROWS
from offload_runtime.weights import PackedLayout, layer_layout, packed_bytes, shared_layout

# Large enough for the link's peak, small enough that a ring of them costs little.
_KV_PIECE_BYTES = 32 << 20
_KV_SLOTS = 4


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
    step_rows: int | None = None  # of a draft, which proposes step by step; None: windows are verified

    @property
    def tree_slots(self) -> int:
        """Of a draft that grows trees: places for what may become part of a sequence."""
        return tree_slots(self.tree_nodes) if self.tree_nodes else 0

    @cached_property
    def layer_layout(self) -> PackedLayout:
        """How each layer lies in memory."""
        return layer_layout(self.config, self.dtype)

    @property
    def layer_bytes(self) -> int:
        """One packed layer."""
        return self.layer_layout.total_bytes

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
                batch=self.batch, spare_slots=self.tree_slots,
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
        # A tree's step keeps its logits beside those that the pass makes.
        rows = self.batch * self.window_tokens if self.step_rows is None else 2 * self.step_rows
        return workspace_bytes(
            self.config, self.dtype.itemsize, context_tokens=self.context_tokens,
            chunk_rows=min(self.shape.prefill_chunk_tokens, padded_rows(self.context_tokens, self.shape.prefill_rows)),
            window_rows=padded_rows(rows, self.shape.window_rows),
            sampled_rows=min(rows, max(MOST_FILTERED_ROWS, self.step_rows or 0)),
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
