"""What a run takes of the machine's memory, part by part, as it was placed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_runtime_kernels.attention import prefill_attention_name

from offload_runtime.engine.levels import PlacedLevels
from offload_runtime.engine.placing import Limits, memory_needs
from offload_runtime.engine.plans import ModelPlan
from offload_runtime.engine.staging_plan import arena_bytes, host_kv_bytes
from offload_runtime.planner import Placement

# Python, torch and the CUDA libraries of one process: an estimate, not counted by any ledger.
PROCESS_BYTES = 3_000_000_000
# In the order in which they are listed; they depend on what is staged.
_STREAMED_PARTS = (
    "streamed layers", "staged layers", "staging ring", "KV cache", "staged KV cache", "pieces to write KV through"
)  # fmt: skip


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one thing; `pinned` where they must be page-locked."""

    name: str
    nbytes: int
    pinned: bool = False


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run holds.

    `device` are the parts of device memory, `host` those of host memory once the models are loaded, at the longest
    context. `loading_bytes` of host memory are held while weights are read, before resident ones are given back.
    `device_type`: `cuda` or `cpu`.
    Trees of `tree_room` nodes have room; `tree_note` says why there is none where there could be.
    """

    placed: PlacedLevels
    device_limit_bytes: int | None
    device: tuple[MemoryPart, ...]
    host: tuple[MemoryPart, ...]
    loading_bytes: int
    device_type: str
    tree_room: int = 0
    tree_note: str = ""

    @property
    def device_bytes(self) -> int:
        """Peak of the device's memory."""
        return sum(part.nbytes for part in self.device)

    @property
    def prefill_attention(self) -> str:
        """Which attention works on prompts."""
        return prefill_attention_name(self.device_type)

    @property
    def pinned_bytes(self) -> int:
        """Peak of page-locked host memory."""
        return sum(part.nbytes for part in self.host if part.pinned)

    @property
    def host_bytes(self) -> int:
        """Peak of host memory."""
        return max(sum(part.nbytes for part in self.host), self.loading_bytes + PROCESS_BYTES)

    @property
    def resident_weight_layers(self) -> tuple[int, ...]:
        """Layers whose weights stay on the device."""
        return self.placed.placement.resident_layers

    @property
    def staged_weight_layers(self) -> tuple[int, ...]:
        """Layers whose weights are streamed from pageable memory."""
        return self.placed.placement.staged_layers

    @property
    def staged_kv_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values are streamed from pageable memory."""
        return self.placed.placement.staged_kv_layers

    @property
    def is_staged(self) -> bool:
        """Whether anything is streamed from pageable memory."""
        return bool(self.staged_weight_layers or self.staged_kv_layers)

    @property
    def resident_kv_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values stay on the device."""
        target = self.placed.plans.target
        return target.kv.resident_layers if target.kv.on_host else tuple(range(target.config.num_layers))


def describe_run(placed: PlacedLevels, limits: Limits, device_type: str, *, page_locks: bool | None = None) -> RunPlan:
    """List what was placed.

    Args:
        placed: Where everything goes.
        limits: Of the device, before anything of the run was taken.
        device_type: `cuda`, or `cpu`, where the device's memory is the host's.
        page_locks: Whether host memory that is streamed is page-locked; None: on CUDA.
    """
    plans = placed.plans
    device = _device_parts(placed, limits)
    needs, placement = memory_needs(plans, limits), placed.placement
    held_layers = len(placement.resident_layers) + placement.num_slots
    assert sum(part.nbytes for part in device) == needs.fixed_bytes + held_layers * needs.layer_bytes
    host = _host_parts(placed, pinned=device_type == "cuda" if page_locks is None else page_locks)
    if device_type == "cpu":
        host = (*host[:-1], MemoryPart("all that is on the device", sum(part.nbytes for part in device)), host[-1])
    return RunPlan(placed, limits.limit_bytes, device, host, plans.host_bytes, device_type)


def with_placement(plan: RunPlan, placement: Placement) -> RunPlan:
    """The plan with layers staged as `placement` says, the device's memory as it was."""
    if placement == plan.placed.placement:
        return plan
    placed = replace(plan.placed, placement=placement)
    kept = [part for part in plan.host if part.name not in _STREAMED_PARTS]
    return replace(plan, placed=placed, host=(*_streamed_parts(placed, pinned=True), *kept))


def _device_parts(placed: PlacedLevels, limits: Limits) -> tuple[MemoryPart, ...]:
    plans, placement = placed.plans, placed.placement
    target, draft = plans.target, plans.draft
    parts = [
        MemoryPart("CUDA context", limits.reserved_bytes),
        MemoryPart("embedding and head", target.shared_bytes),
        MemoryPart("resident layers", len(placement.resident_layers) * target.layer_bytes),
        MemoryPart("ring of layers", placement.num_slots * target.layer_bytes),
        *_kv_parts(target),
        MemoryPart("retrieval cache", plans.middle_bytes),
    ]
    if draft is not None:
        parts.append(MemoryPart("draft weights", draft.all_bytes - draft.kv_bytes))
        parts.append(MemoryPart("draft KV cache", draft.kv_bytes))
    parts.append(MemoryPart("CUDA graphs", plans.graph_bytes))
    parts.append(MemoryPart("workspace", memory_needs(plans, limits).workspace_bytes))
    return tuple(part for part in parts if part.nbytes)


def _kv_parts(target: ModelPlan) -> list[MemoryPart]:
    if not target.kv.on_host:
        return [MemoryPart("KV cache", target.kv_bytes)]
    needs, resident = target.host_kv_needs, len(target.kv.resident_layers)
    streamed = needs.num_layers - resident
    parts = [MemoryPart("KV of resident layers", resident * needs.layer_bytes)]
    if streamed:
        parts += [
            MemoryPart("open KV blocks", streamed * needs.open_bytes),
            MemoryPart("ring of KV pieces", target.kv.num_slots * target.kv.piece_bytes),
            MemoryPart("prefill workspace", target.prefill_workspace_bytes),
        ]
    return parts


def _host_parts(placed: PlacedLevels, *, pinned: bool) -> tuple[MemoryPart, ...]:
    return (*_streamed_parts(placed, pinned=pinned), MemoryPart("Python and libraries", PROCESS_BYTES))


def _streamed_parts(placed: PlacedLevels, *, pinned: bool) -> tuple[MemoryPart, ...]:
    """Host memory that is streamed, and what of it is staged."""
    target, placement, layer_bytes = placed.plans.target, placed.placement, arena_bytes(placed.plans.target)
    staged_bytes = len(placement.staged_layers) * layer_bytes
    staged_kv_bytes = len(placement.staged_kv_layers) * target.host_kv_needs.layer_bytes
    sizes = (
        (placement.num_streamed * layer_bytes - staged_bytes, pinned), (staged_bytes, False),
        (placement.staging_bytes, pinned),
        (host_kv_bytes(target) - staged_kv_bytes, pinned), (staged_kv_bytes, False),
        (placement.writeback_bytes, pinned),
    )  # fmt: skip
    parts = [MemoryPart(name, *size) for name, size in zip(_STREAMED_PARTS, sizes, strict=True)]
    return tuple(part for part in parts if part.nbytes)
