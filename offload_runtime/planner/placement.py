"""What lives where on the device: pure arithmetic on bytes, before anything is loaded.

Fixed parts come first (embedding and head, KV cache, draft, workspace). What is left of the budget holds the ring and
as many resident layers as fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_runtime.config import ModelConfig, format_bytes, format_bytes_up
from offload_runtime.errors import BudgetError, OptionError

# Two slots would stall on every layer boundary; the fourth and later ones only bridge longer pauses between passes.
RING_SLOTS = 3
# Fragmentation of the allocator and rounding of its blocks, as a share of the workspace.
_WORKSPACE_MARGIN = 1.25
# cuBLAS takes 32 MiB a handle on Hopper, 8 MiB elsewhere; once for the compute stream, once for cublasLt.
_LIBRARY_WORKSPACE_BYTES = 72 << 20


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of the parts of one runtime on its device.

    `context_bytes` is what CUDA itself takes, `middle_bytes` what the level between draft and target retrieves,
    `graph_bytes` the CUDA graphs of both.
    """

    layer_bytes: int
    num_layers: int
    shared_bytes: int
    kv_bytes: int
    draft_bytes: int
    workspace_bytes: int
    context_bytes: int = 0
    middle_bytes: int = 0
    graph_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Everything but the layers of the target."""
        levels_bytes = self.draft_bytes + self.middle_bytes + self.graph_bytes
        return self.shared_bytes + self.kv_bytes + levels_bytes + self.workspace_bytes + self.context_bytes


@dataclass(frozen=True)
class Placement:
    """Which layers stay on the device and how many slots the others pass through.

    `staged_layers` are those of the others whose host memory is not page-locked; they cross a ring of `staging_bytes`
    of page-locked memory on their way. `staged_kv_layers` are the same of a KV cache on the host, which crosses
    `writeback_bytes` on its way there.
    """

    resident_layers: tuple[int, ...]
    num_slots: int
    num_layers: int
    staged_layers: tuple[int, ...] = ()
    staging_bytes: int = 0
    staged_kv_layers: tuple[int, ...] = ()
    writeback_bytes: int = 0

    @property
    def num_streamed(self) -> int:
        """Layers that cross the link in every pass."""
        return self.num_layers - len(self.resident_layers)

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        """Layers that cross the link in every pass."""
        return tuple(index for index in range(self.num_layers) if index not in self.resident_layers)

    def with_pinned(self, count: int) -> Placement:
        """The same with `count` of the streamed layers page-locked, so that they and staged ones alternate."""
        streamed = self.streamed_layers
        pinned = {streamed[place] for place in spread(count, len(streamed))}
        return replace(self, staged_layers=tuple(index for index in streamed if index not in pinned))


def all_resident(num_layers: int) -> Placement:
    """Every layer on the device, nothing streamed."""
    return Placement(tuple(range(num_layers)), 0, num_layers)


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of `num_layers` indices, evenly spread: a resident layer computes while the link fills the ring."""
    return tuple(sorted({(2 * index + 1) * num_layers // (2 * count) for index in range(count)})) if count else ()


def place_layers(needs: MemoryNeeds, available_bytes: int | None, resident_layers: int | None) -> Placement:
    """Choose resident layers and ring.

    Args:
        needs: Bytes of the parts.
        available_bytes: What the device may give to all of them together; None for no limit.
        resident_layers: Asked by the user; None chooses the most that fit.

    Raises:
        BudgetError: Not even a ring of two slots fits, or the asked resident layers do not.
        OptionError: More resident layers were asked for than the model has.
    """
    layers = needs.num_layers
    if resident_layers is not None and not 0 <= resident_layers <= layers:
        raise OptionError(f"resident layers must be between 0 and {layers}, the model's layers, not {resident_layers}")
    spare_bytes = None if available_bytes is None else available_bytes - needs.fixed_bytes
    if resident_layers is None and (spare_bytes is None or layers * needs.layer_bytes <= spare_bytes):
        return all_resident(layers)
    if spare_bytes is None:
        assert resident_layers is not None
        return _placement(resident_layers, layers, RING_SLOTS)
    most = spare_bytes // needs.layer_bytes  # layers and slots together
    if resident_layers is not None:
        slots = min(RING_SLOTS, layers - resident_layers)
        if resident_layers + min(2, slots) > most:
            raise _too_small(needs, available_bytes or 0, resident_layers)
        return _placement(resident_layers, layers, min(slots, most - resident_layers))
    if most < min(2, layers):
        raise _too_small(needs, available_bytes or 0, 0)
    slots = min(RING_SLOTS, most)
    return _placement(most - slots, layers, slots)


@dataclass(frozen=True)
class HostKVNeeds:
    """Device bytes of a KV cache whose blocks live in host memory.

    `layer_bytes`: a layer that stays on the device after all; `open_bytes`: the newest blocks of one that does not;
    `shared_bytes`: the ring on the link and the workspace of a prefill, unless every layer stays.
    """

    num_layers: int
    layer_bytes: int
    open_bytes: int
    shared_bytes: int


def place_kv_layers(needs: HostKVNeeds, spare_bytes: int | None) -> tuple[int, ...]:
    """Layers whose KV cache stays on the device, evenly spread: as many as fit into what is left of the budget.

    Args:
        needs: Bytes of the parts.
        spare_bytes: What is left with no layer resident; None for no limit, where all stay on the host, as asked.
    """
    if spare_bytes is None:
        return ()
    if needs.num_layers * (needs.layer_bytes - needs.open_bytes) - needs.shared_bytes <= spare_bytes:
        return tuple(range(needs.num_layers))
    each = needs.layer_bytes - needs.open_bytes
    count = needs.num_layers if each <= 0 else max(0, min(needs.num_layers - 1, spare_bytes // each))
    return spread(count, needs.num_layers)


def _placement(resident: int, layers: int, slots: int) -> Placement:
    return Placement(spread(resident, layers), min(slots, layers - resident), layers)


def _too_small(needs: MemoryNeeds, available_bytes: int, resident: int) -> BudgetError:
    ring = min(2, needs.num_layers - resident)
    least_bytes = needs.fixed_bytes + (resident + ring) * needs.layer_bytes
    parts = [
        ("CUDA context", needs.context_bytes),
        ("embedding and head", needs.shared_bytes),
        ("KV cache", needs.kv_bytes),
        ("draft model", needs.draft_bytes),
        ("retrieval cache", needs.middle_bytes),
        ("CUDA graphs", needs.graph_bytes),
        ("workspace", needs.workspace_bytes),
        (f"{resident} resident layers", resident * needs.layer_bytes),
        (f"a ring of {ring} layers", ring * needs.layer_bytes),
    ]
    listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes)
    ways = ["raise --vram", "lower --context"]
    if needs.middle_bytes:
        ways.append(f"lower --budget-tokens or use --speculation {'chain' if needs.draft_bytes else 'none'}")
    elif needs.draft_bytes:
        ways.append("use a smaller draft or --draft ngram")
    if resident:
        ways.append("keep fewer layers resident")
    return BudgetError(
        f"the device budget of {format_bytes(available_bytes)} is too small by "
        f"{format_bytes(least_bytes - available_bytes)}: {format_bytes_up(least_bytes)} is the least ({listed}): "
        f"{', '.join(ways)}"
    )


def workspace_bytes(
    config: ModelConfig,
    element_bytes: int,
    *,
    context_tokens: int,
    chunk_rows: int,
    window_rows: int,
    sampled_rows: int,
) -> int:
    """Activations of the largest pass, before the allocator's rounding.

    Args:
        config: The model's shape.
        element_bytes: Of its dtype.
        context_tokens: Longest prompt (its residual stream is held through a layer-major prefill).
        chunk_rows: Rows of a prefill piece.
        window_rows: Rows of a decoding window, padded.
        sampled_rows: Of these, rows that tokens are sampled from at once.
    """
    stream = context_tokens * config.hidden_size
    rows = max(chunk_rows, window_rows)
    chunk = rows * (3 * config.hidden_size + config.qkv_size + 3 * config.q_size + 3 * config.intermediate_size)
    angles = 4 * context_tokens * config.head_dim // 2 * 4  # cos, sin and their making, fp32
    # fp32 copies while sampling with filters
    logits = window_rows * config.vocab_size * element_bytes + sampled_rows * config.vocab_size * 6 * 4
    attention = 2 * (64 << 20)  # partial results of split attention, see kernels.attention.WORKSPACE_BYTES
    total = (stream + chunk) * element_bytes + angles + logits + attention
    return int(_WORKSPACE_MARGIN * total) + _LIBRARY_WORKSPACE_BYTES
