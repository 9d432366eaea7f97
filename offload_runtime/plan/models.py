"""The models of a run before they are loaded: what of each is where, and its sizes.

Who allocates a tensor says how large it is (`kv`, `runners`, `weights`); here it is only added up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import ModelConfig, SpeculationOptions
from offload_runtime.errors import OptionError
from offload_runtime.kv import (
    KV_RING_SLOTS,
    block_bytes,
    kv_cache_bytes,
    kv_piece_bytes,
    num_blocks,
    ring_blocks,
)
from offload_runtime.kv.device import streaming_capacity_tokens
from offload_runtime.kv.retrieval import retrieved_draft_bytes
from offload_runtime.memory import PAGE_BYTES
from offload_runtime.plan.request import (
    AUTO_CONTEXT_TOKENS,
    longest_context,
)
from offload_runtime.runners import PassShape, tree_slots
from offload_runtime.runners.graphs import MOST_DEPTH, STEP_ROWS
from offload_runtime.runners.target import draft_shape, target_shape, workspace_bytes
from offload_runtime.sampling import MOST_FILTERED_ROWS
from offload_runtime.weights import ModelLayout, packed_bytes


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one thing; `pinned` where they must be page-locked."""

    name: str
    nbytes: int
    pinned: bool = False


@dataclass(frozen=True)
class Placement:
    """Where the layers of a model are: which stay on the device, and how many slots the others pass through.

    `staged_layers` are those of the others whose host memory is not page-locked; they cross a ring of `staging_bytes`
    of page-locked memory on their way. `resident_kv_layers` and `staged_kv_layers` are the same of a KV cache on the
    host, which crosses `writeback_bytes` on its way there.
    """

    resident_layers: tuple[int, ...]
    num_slots: int
    num_layers: int
    staged_layers: tuple[int, ...] = ()
    staging_bytes: int = 0
    resident_kv_layers: tuple[int, ...] = ()
    staged_kv_layers: tuple[int, ...] = ()
    writeback_bytes: int = 0

    @property
    def num_streamed(self) -> int:
        """Layers whose weights cross the link in every pass."""
        return self.num_layers - len(self.resident_layers)

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        """Layers whose weights cross the link in every pass."""
        return tuple(index for index in range(self.num_layers) if index not in self.resident_layers)


def all_resident(num_layers: int) -> Placement:
    """Every layer on the device, nothing streamed."""
    return Placement(tuple(range(num_layers)), 0, num_layers)


@dataclass(frozen=True)
class ModelPlan:
    """One model of a run, before it is loaded. `layout` is how its weights lie in memory.

    `cache` is `full` (on the device), `host` (in host memory, but for the layers that the placement keeps) or, of a
    draft, `retrieval` or `streaming`, whose sizes are those of `options`. A prefill may borrow `borrowable_bytes` of
    memory that only decoding uses.
    """

    config: ModelConfig
    layout: ModelLayout
    shape: PassShape
    context_tokens: int
    window_tokens: int
    batch: int
    placement: Placement
    cache: str = "full"
    options: SpeculationOptions = field(default_factory=SpeculationOptions)
    borrowable_bytes: int = 0
    tree_nodes: int = 0  # most nodes of the trees that a draft grows
    step_rows: int | None = None  # of a draft, which proposes step by step; None: windows are verified

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.layout.dtype

    @property
    def on_host(self) -> bool:
        """Whether the KV cache lives in host memory."""
        return self.cache == "host"

    @property
    def tree_slots(self) -> int:
        """Of a draft that grows trees: places for what may become part of a sequence."""
        return tree_slots(self.tree_nodes) if self.tree_nodes else 0

    # --- weights

    @property
    def layer_bytes(self) -> int:
        """The largest packed layer, which a slot of the ring holds."""
        return max(self.layout.layer_bytes)

    def bytes_of_layers(self, layers: Iterable[int]) -> int:
        """Some packed layers."""
        each = self.layout.layer_bytes
        return sum(each[layer] for layer in layers)

    def host_bytes_of_layers(self, layers: Iterable[int]) -> int:
        """Some packed layers in host memory, which is given out in whole pages."""
        each = self.layout.layer_bytes
        return sum(-(-each[layer] // PAGE_BYTES) * PAGE_BYTES for layer in layers)

    def held_bytes(self, placement: Placement) -> int:
        """What a placement takes of the device: the layers that stay, and the ring."""
        return self.bytes_of_layers(placement.resident_layers) + placement.num_slots * self.layer_bytes

    @property
    def host_layer_bytes(self) -> int:
        """The largest layer in host memory."""
        return -(-self.layer_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def layer_elements(self) -> int:
        """Elements of a layer's matrices; layers differ in how these are stored only."""
        return self.layout.layers[0].matrix_elements

    @property
    def shared_bytes(self) -> int:
        """Embedding, final norm and head."""
        return self.layout.shared.total_bytes

    # --- keys and values

    @property
    def kv_layers_on_host(self) -> tuple[int, ...]:
        """Layers whose keys and values are in host memory."""
        if not self.on_host:
            return ()
        return tuple(i for i in range(self.config.num_layers) if i not in self.placement.resident_kv_layers)

    @property
    def kv_layer_bytes(self) -> int:
        """Keys and values of one layer, of the whole context."""
        return self.batch * num_blocks(self.context_tokens) * block_bytes(self.config, self.dtype)

    @property
    def host_kv_bytes(self) -> int:
        """Host memory of the keys and values of the whole context that are not on the device."""
        return len(self.kv_layers_on_host) * self.kv_layer_bytes

    @property
    def open_kv_bytes(self) -> int:
        """On the device, of a layer whose cache is on the host: its newest blocks."""
        return self.batch * ring_blocks(self.window_tokens) * block_bytes(self.config, self.dtype)

    @property
    def kv_piece_bytes(self) -> int:
        """A slot of the ring that a cache on the host is streamed through."""
        return kv_piece_bytes(self.config, self.dtype, self.context_tokens)

    @property
    def kv_ring_bytes(self) -> int:
        """All slots of that ring."""
        return KV_RING_SLOTS * self.kv_piece_bytes

    @property
    def prefill_workspace_bytes(self) -> int:
        """What a prefill reserves for one layer's keys and values, when it cannot borrow as much."""
        needed_bytes = num_blocks(self.context_tokens) * block_bytes(self.config, self.dtype)
        return 0 if self.borrowable_bytes >= needed_bytes else needed_bytes

    @property
    def whole_kv_bytes(self) -> int:
        """The KV cache of the whole context, wherever it is."""
        return kv_cache_bytes(
            self.config, self.dtype, capacity_tokens=self.context_tokens, batch=self.batch, spare_slots=self.tree_slots
        )

    @property
    def kv_bytes(self) -> int:
        """What the KV cache takes of the device."""
        return sum(part.nbytes for part in self.kv_parts)

    @property
    def kv_parts(self) -> tuple[MemoryPart, ...]:
        """The same part by part."""
        if not self.on_host:
            return (MemoryPart("KV cache", self._device_kv_bytes),)
        parts = [MemoryPart("KV of resident layers", len(self.placement.resident_kv_layers) * self.kv_layer_bytes)]
        if streamed := len(self.kv_layers_on_host):
            parts += [
                MemoryPart("open KV blocks", streamed * self.open_kv_bytes),
                MemoryPart("ring of KV pieces", self.kv_ring_bytes),
                MemoryPart("prefill workspace", self.prefill_workspace_bytes),
            ]
        return tuple(parts)

    @property
    def _device_kv_bytes(self) -> int:
        options = self.options
        if self.cache == "streaming":
            return kv_cache_bytes(
                self.config, self.dtype, capacity_tokens=self.streaming_tokens, batch=self.batch,
                spare_slots=self.tree_slots,
            )  # fmt: skip
        if self.cache == "retrieval":
            return retrieved_draft_bytes(
                self.config, self.dtype, capacity_tokens=self.context_tokens, budget_tokens=options.budget_tokens,
                chunk_size=options.chunk_size, batch=self.batch,
            )  # fmt: skip
        return self.whole_kv_bytes

    @property
    def recent_tokens(self) -> int:
        """Newest tokens that a streaming cache keeps: there are no more of them than the context has."""
        return min(self.options.recent_tokens, max(2, self.context_tokens))

    @property
    def streaming_window_tokens(self) -> int:
        """Tokens in a row behind a text: where trees are grown no more than they are deep, so that longer chains are
        cut; steps of a retrieval verifier may go beyond what is asked for."""
        in_a_row = min(self.window_tokens, MOST_DEPTH + 1) if self.tree_nodes else self.window_tokens
        return in_a_row + 2 * self.options.gamma_draft + 2

    @property
    def streaming_tokens(self) -> int:
        """Tokens that a streaming cache has room for."""
        window_tokens = self.streaming_window_tokens
        return streaming_capacity_tokens(self.options.sink_tokens, self.recent_tokens, window_tokens)

    def streamed_kv_blocks(self, reach: int | None, length_tokens: int) -> int:
        """Blocks of one sequence that a pass behind `length_tokens` tokens streams for a layer whose cache is on the
        host: the full ones that its window of `reach` tokens reaches."""
        first = 0 if reach is None else max(0, length_tokens - reach) // BLOCK_TOKENS
        return length_tokens // BLOCK_TOKENS - first

    def kv_blocks_by_layer(self) -> list[int]:
        """Blocks of one sequence that each layer streams at the full context, when its cache is on the host."""
        length, windows = self.context_tokens - 1, self.config.layer_windows
        of_window = {reach: self.streamed_kv_blocks(reach, length) for reach in set(windows)}
        return [of_window[reach] for reach in windows]

    # --- both, and what passes take

    @property
    def workspace_bytes(self) -> int:
        """Activations of the largest pass."""
        # A tree's step keeps its logits beside those that the pass makes.
        rows = self.batch * self.window_tokens if self.step_rows is None else 2 * self.step_rows
        sampled_rows = min(rows, max(MOST_FILTERED_ROWS, self.step_rows or 0))
        return workspace_bytes(
            self.config, self.dtype.itemsize, self.shape, context_tokens=self.context_tokens, rows=rows,
            sampled_rows=sampled_rows,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """All weights, wherever they are."""
        return self.layout.total_bytes


def target_plan(
    config: ModelConfig, dtype: torch.dtype, device_type: str, *, context: int, window: int, batch: int = 1
) -> ModelPlan:
    """Plan of a target, nothing of it placed yet."""
    layout = ModelLayout.plain(config, dtype)
    # By the weights as they are computed with: no bit may depend on how they are stored.
    shape = target_shape(packed_bytes(config, dtype), device_type)
    return ModelPlan(config, layout, shape, context, window, batch, all_resident(config.num_layers))


def draft_plan(
    config: ModelConfig, dtype: torch.dtype, device_type: str, *, context: int, window: int,
    options: SpeculationOptions, batch: int = 1, tree_nodes: int | None = None,
) -> ModelPlan:  # fmt: skip
    """Plan of a draft model. A full cache ends where the draft's own positions do.

    Raises:
        OptionError: The cache that was asked for needs positions that the draft does not have, or would retrieve more
            than there can be; or trees were asked for and the cache is one of retrieved chunks.
    """
    longest, cache = longest_context(config), options.draft_cache
    if cache == "auto":
        if context <= min(longest, AUTO_CONTEXT_TOKENS):
            cache = "full"
        else:
            retrieves = context <= longest and options.budget_tokens <= context and tree_nodes is None
            cache = "retrieval" if retrieves else "streaming"
    if tree_nodes is not None and cache == "retrieval":
        raise OptionError(
            f"--tree-nodes {tree_nodes} needs a draft whose KV cache holds whole branches, not retrieved chunks: use "
            "--draft-cache streaming or full, or drop --tree-nodes"
        )
    plan = ModelPlan(
        config, ModelLayout.plain(config, dtype), draft_shape(device_type), context, window, batch,
        all_resident(config.num_layers), cache, options, tree_nodes=tree_nodes or 0, step_rows=max(STEP_ROWS, batch),
    )  # fmt: skip
    if cache == "streaming":
        return with_streaming_cache(plan)
    if cache == "full":
        return replace(plan, context_tokens=min(context, longest))
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
    return plan


def with_streaming_cache(draft: ModelPlan) -> ModelPlan:
    """A draft with a cache of sinks and recent tokens, whatever the context. Raises `OptionError`."""
    kept, longest = draft.streaming_tokens, longest_context(draft.config)
    if kept > longest:
        raise OptionError(
            f"a streaming draft cache of {kept} tokens (sinks, recent tokens and the window) is more than the "
            f"{longest} that the draft was made for: lower --recent-tokens by {kept - longest}"
        )
    return replace(draft, cache="streaming")
