"""What a run holds: its models with their caches and layers, part by part, in bytes of the device and of the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from offload_runtime_kernels.attention import prefill_attention_name

from offload_runtime.config import ModelConfig, RuntimeConfig, SpeculationOptions
from offload_runtime.errors import OptionError
from offload_runtime.kv import (
    block_bytes,
    kv_cache_bytes,
)
from offload_runtime.kv.retrieval import retrieved_bytes, summaries_bytes
from offload_runtime.plan.models import MemoryPart, ModelPlan, Placement, draft_plan, target_plan
from offload_runtime.plan.request import (
    KV_PLACES,
    PROCESS_BYTES,
    MemoryLimits,
    check_window,
    resolve_context,
    resolve_dtype,
)
from offload_runtime.runners import draft_graph_bytes, step_graph_bytes
from offload_runtime.runners.retrieval_verifier import verifier_step_bytes


@dataclass(frozen=True)
class VerifierPlan:
    """The retrieval verifier between draft and target, in bytes of the device: retrieved chunks, what they are
    chosen by, and what steps need."""

    config: ModelConfig
    dtype: torch.dtype
    options: SpeculationOptions
    context_tokens: int
    batch: int

    @property
    def nbytes(self) -> int:
        """All of it but the graphs of its steps."""
        options = self.options
        return self.step_bytes + retrieved_bytes(
            self.config, self.dtype, budget_tokens=options.budget_tokens, chunk_size=options.chunk_size,
            batch=self.batch,
        ) + summaries_bytes(
            self.config, chunk_size=options.chunk_size, capacity_tokens=self.context_tokens, batch=self.batch
        )  # fmt: skip

    @property
    def step_bytes(self) -> int:
        """The window and what a step computes on its way, of all sequences."""
        options = self.options
        far_chunks = self.context_tokens // options.chunk_size
        return verifier_step_bytes(
            self.config, self.dtype.itemsize, batch=self.batch, rows=options.gamma_draft + 1, far_chunks=far_chunks
        )

    @property
    def borrowable_bytes(self) -> int:
        """Of the retrieved chunks, what a prefill may borrow; nothing where another sequence may be decoding."""
        if self.batch > 1:
            return 0
        return kv_cache_bytes(self.config, self.dtype, capacity_tokens=self.options.budget_tokens, batch=1)


@dataclass(frozen=True)
class RunPlan:
    """A run as it was asked for and as it is placed: what lives where, in bytes.

    `verifier` is None where the draft proposes to the target itself; `reason` says why, when `auto` decided it. Trees
    of `tree_room` nodes have room; `tree_note` says why there is none where there could be.
    """

    request: RuntimeConfig
    limits: MemoryLimits
    target: ModelPlan
    draft: ModelPlan | None = None
    verifier: VerifierPlan | None = None
    tree_room: int = 0
    tree_note: str = ""
    reason: str = ""

    @property
    def device_type(self) -> str:
        """Of the target's device: `cuda` or `cpu`."""
        return "cpu" if self.request.device == "cpu" else "cuda"

    @property
    def proposer(self) -> str:
        """Who proposes, if it is not the retrieval verifier: `none`, `ngram` or `the draft`."""
        return "none" if self.request.speculation.mode == "none" else self.request.proposed_by

    @property
    def placement(self) -> Placement:
        """Of the target's layers."""
        return self.target.placement

    def with_placement(self, placement: Placement) -> RunPlan:
        """The same with the target's layers elsewhere."""
        return replace(self, target=replace(self.target, placement=placement))

    def of_batch(self, sequences: int) -> RunPlan:
        """The same for another number of sequences."""
        draft = None if self.draft is None else replace(self.draft, batch=sequences)
        return replace(self, target=replace(self.target, batch=sequences), draft=draft)

    # --- of the device

    @cached_property
    def device(self) -> tuple[MemoryPart, ...]:
        """Device memory, part by part."""
        target, draft, placement = self.target, self.draft, self.placement
        parts = [
            MemoryPart("CUDA context", self.limits.reserved_bytes),
            MemoryPart("embedding and head", target.shared_bytes),
            MemoryPart("resident layers", target.bytes_of_layers(placement.resident_layers)),
            MemoryPart("ring of layers", placement.num_slots * target.layer_bytes),
            *target.kv_parts,
            MemoryPart("retrieval cache", 0 if self.verifier is None else self.verifier.nbytes),
        ]
        if draft is not None:
            parts += [MemoryPart("draft weights", draft.weight_bytes), MemoryPart("draft KV cache", draft.kv_bytes)]
        parts += [MemoryPart("CUDA graphs", self.graph_bytes), MemoryPart("workspace", self.workspace_bytes)]
        return tuple(part for part in parts if part.nbytes)

    @property
    def device_bytes(self) -> int:
        """Peak of the device's memory."""
        return sum(part.nbytes for part in self.device)

    @property
    def fixed_bytes(self) -> int:
        """Of these, everything but the target's layers of weights."""
        return self.device_bytes - self.target.held_bytes(self.placement)

    @property
    def workspace_bytes(self) -> int:
        """Activations of both models."""
        if self.draft is None:
            return self.target.workspace_bytes
        # Draft and target take turns on one stream and share the allocator's blocks, unless the draft runs beside a
        # pass.
        each = self.target.workspace_bytes, self.draft.workspace_bytes
        return sum(each) if self.draft.tree_slots else max(each)

    @property
    def graph_bytes(self) -> int:
        """CUDA graphs of the draft's and the verifier's steps."""
        if self.device_type == "cpu":
            return 0
        nbytes = 0 if self.verifier is None else step_graph_bytes(self.target.config)
        draft = self.draft
        if draft is None:
            return nbytes
        trees = draft.tree_slots > 0
        return nbytes + draft_graph_bytes(draft.config, draft.dtype.itemsize, batch=draft.batch, trees=trees)

    # --- of the host

    @cached_property
    def host(self) -> tuple[MemoryPart, ...]:
        """Host memory once the models are loaded, at the longest context, part by part."""
        target, placement, pinned = self.target, self.placement, self.limits.page_locks
        staged_bytes = target.host_bytes_of_layers(placement.staged_layers)
        streamed_bytes = target.host_bytes_of_layers(placement.streamed_layers)
        staged_kv_bytes = len(placement.staged_kv_layers) * target.kv_layer_bytes
        parts = [
            MemoryPart("streamed layers", streamed_bytes - staged_bytes, pinned),
            MemoryPart("staged layers", staged_bytes),
            MemoryPart("staging ring", placement.staging_bytes, pinned),
            MemoryPart("KV cache", target.host_kv_bytes - staged_kv_bytes, pinned),
            MemoryPart("staged KV cache", staged_kv_bytes),
            MemoryPart("pieces to write KV through", placement.writeback_bytes, pinned),
        ]
        if self.device_type == "cpu":  # whose memory is the host's
            parts.append(MemoryPart("all that is on the device", self.device_bytes))
        parts.append(MemoryPart("Python and libraries", PROCESS_BYTES))
        return tuple(part for part in parts if part.nbytes)

    @property
    def loading_bytes(self) -> int:
        """Host memory held while weights are read, before resident ones are given back."""
        return self.target.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)

    @cached_property
    def host_bytes(self) -> int:
        """Peak of host memory."""
        return max(sum(part.nbytes for part in self.host), self.loading_bytes + PROCESS_BYTES)

    @property
    def pinned_bytes(self) -> int:
        """Peak of page-locked host memory."""
        return sum(part.nbytes for part in self.host if part.pinned)

    # --- what of it moves, and how

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a pass at the full context brings over the link."""
        target, blocks = self.target, self.target.kv_blocks_by_layer()
        streamed = sum(blocks[layer] for layer in target.kv_layers_on_host)
        kv_bytes = target.batch * streamed * block_bytes(target.config, target.dtype)
        return target.bytes_of_layers(self.placement.streamed_layers) + kv_bytes

    @property
    def resident_kv_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values stay on the device."""
        return self.placement.resident_kv_layers if self.target.on_host else tuple(range(self.placement.num_layers))

    @property
    def is_staged(self) -> bool:
        """Whether anything is streamed from pageable memory."""
        return bool(self.placement.staged_layers or self.placement.staged_kv_layers)

    @property
    def prefill_attention(self) -> str:
        """Which attention works on prompts."""
        return prefill_attention_name(self.device_type)


def make_plan(request: RuntimeConfig, limits: MemoryLimits, *, context: int | str, tree_nodes: int) -> RunPlan:
    """What both models will take with room for trees of `tree_nodes`, nothing placed yet. Asks nothing of the device.

    Raises:
        OptionError, ContextLengthError: Of the request's element type, context, window or caches.
    """
    if request.kv not in KV_PLACES:
        raise OptionError(f"kv must be {', '.join(KV_PLACES[:-1])} or {KV_PLACES[-1]}, not {request.kv!r}")
    config, window = request.target.config(), max(request.max_gamma, tree_nodes) + 1
    device_type = "cpu" if request.device == "cpu" else "cuda"
    dtype = resolve_dtype(request.dtype, request.target, device_type)
    tokens = resolve_context(context, config, kv=request.kv)
    check_window(window, config)
    target = target_plan(config, dtype, device_type, context=tokens, window=window, batch=request.max_batch)
    draft = None
    if request.proposed_by == "the draft":
        draft = draft_plan(
            request.draft.config(), dtype, device_type, context=tokens, window=window, options=request.speculation,
            batch=request.max_batch, tree_nodes=tree_nodes or None,
        )  # fmt: skip
    return RunPlan(request, limits, target, draft, tree_room=tree_nodes)
