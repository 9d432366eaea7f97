"""How long a pass takes on a machine, from the bytes and operations that it asks for.

Each layer takes the longest of its bytes from HBM and its operations; copies of later layers, and of the next pass, run
meanwhile. So a pass takes the longer of all its copies and all its compute, and the host must have launched it by then.

What a kernel attains of the machine's peaks is measured on one H200 (tools/results/): the shares carry over to other
cards, the seconds come from the machine's own figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from offload_runtime.config import GB
from offload_runtime.errors import OptionError

TERA = 1e12
# cuBLAS over 7B's weights (3.76 ms at 64 rows) and attention over 120,000 keys, both of 4.3 TB/s.
_HBM_SHARE = 0.8
# Window-invariant attention: 72 to 80 of 650 TFLOP/s, whatever the heads. A prefill's: 325.
_WINDOW_ATTENTION_SHARE = 0.115
_PREFILL_ATTENTION_SHARE = 0.5
# Queries of a KV head are worked on in tiles of so many rows.
_ATTENTION_TILE_ROWS = 16
# A streamed 7B pass: 13.8 ms of host work for 32 layers of 14 launches, 20.7 ms with 26.
_HOST_LAYER_S = 180e-6
_HOST_LAUNCH_S = 18e-6
# Touching and locking new host memory: 63 GB in 16 s.
_GROWTH_GBPS = 4.0
DEFAULT_GRAPH_LAUNCH_US = 2.5
# A staged byte crosses the host's memory three times: read, written, read by the link. Two channels of DDR4-3200 carry
# 51 GB/s at best, so 17 of staged bytes; a share is left to everything else.
DEFAULT_STAGING_GBPS = 10.0


@dataclass(frozen=True)
class MachineFigures:
    """What the planner must know of a machine; figures of a GPU are of one of `gpus` equal cards.

    `vram_reserved_bytes` is what of `vram_bytes` no plan may use. `link_gbps` is host to device. `tflops` are dense
    matrix products by element type (bf16, fp16, fp32), `launch_us` a small kernel within a CUDA graph.
    `pinnable_bytes` None: as much as there is memory. `staging_gbps` is copying from pageable to page-locked memory
    while the link is busy.
    """

    name: str
    vram_bytes: int
    vram_reserved_bytes: int
    link_gbps: float
    hbm_gbps: float
    ram_bytes: int
    tflops: Mapping[str, float] = field(default_factory=dict)
    pinnable_bytes: int | None = None
    launch_us: float = DEFAULT_GRAPH_LAUNCH_US
    gpus: int = 1
    staging_gbps: float = DEFAULT_STAGING_GBPS

    def flops(self, dtype: str) -> float:
        """Operations per second of matrix products in `dtype`; 16-bit types stand for each other."""
        known = self.tflops.get(dtype)
        if known is None and dtype != "fp32":
            known = self.tflops.get("fp16" if dtype == "bf16" else "bf16")
        if known is None:
            raise OptionError(f"the profile {self.name} has no TFLOP/s for {dtype}: add tflops.{dtype} to it")
        return known * TERA

    @property
    def attained_hbm(self) -> float:
        """Bytes per second that kernels read."""
        return _HBM_SHARE * self.hbm_gbps * GB


@dataclass(frozen=True)
class LayerCosts:
    """What one layer of a pass asks for.

    `streamed_*_bytes` cross the link, `staged_*_bytes` of them out of pageable memory. `weight_bytes` and `kv_bytes`
    are read from HBM: weights once for each tile of rows. `attention_operations` are those of whole tiles of queries.
    """

    weight_bytes: int
    kv_bytes: int
    matrix_operations: float
    attention_operations: float
    streamed_weight_bytes: int = 0
    streamed_kv_bytes: int = 0
    launches: int = 0
    staged_weight_bytes: int = 0
    staged_kv_bytes: int = 0

    @property
    def streamed_bytes(self) -> int:
        """Weights and keys and values over the link."""
        return self.streamed_weight_bytes + self.streamed_kv_bytes

    @property
    def staged_bytes(self) -> int:
        """Of these, bytes that come out of pageable memory."""
        return self.staged_weight_bytes + self.staged_kv_bytes


@dataclass(frozen=True)
class PassCosts:
    """What a pass of `dtype` asks for: its layers and the head."""

    dtype: str
    layers: tuple[LayerCosts, ...]
    head: LayerCosts

    @cached_property
    def kinds(self) -> tuple[tuple[LayerCosts, int], ...]:
        """The layers with how many of each there are; most share one object with others."""
        counts = Counter(map(id, self.layers))
        by_id = {id(layer): layer for layer in self.layers}
        return tuple((layer, counts[key]) for key, layer in by_id.items())

    @property
    def streamed_bytes(self) -> int:
        """Bytes over the link."""
        return sum(count * layer.streamed_bytes for layer, count in self.kinds)

    @property
    def staged_bytes(self) -> int:
        """Of these, bytes that come out of pageable memory."""
        return sum(count * layer.staged_bytes for layer, count in self.kinds)


@dataclass(frozen=True)
class PassPrediction:
    """Seconds of a pass by cause, and which of them binds: `link`, `staging`, `HBM`, `arithmetic` or `launches`.

    `compute_s` sums over the layers the longer of HBM and arithmetic.
    """

    bytes_streamed: int
    link_s: float
    hbm_s: float
    arithmetic_s: float
    compute_s: float
    launch_s: float
    seconds: float
    bound_by: str
    staging_s: float = 0.0

    @property
    def copies_s(self) -> float:
        """Until everything has arrived: staging and link work side by side."""
        return max(self.link_s, self.staging_s)

    @property
    def unstaged_s(self) -> float:
        """What the pass would take if all that is streamed were page-locked."""
        return max(self.link_s, self.compute_s, self.launch_s)


def predict_pass(costs: PassCosts, machine: MachineFigures) -> PassPrediction:
    """How long a pass takes when the ring of copies runs across passes."""
    hbm_s = arithmetic_s = compute_s = 0.0
    flops = machine.flops(costs.dtype)
    for layer, count in (*costs.kinds, (costs.head, 1)):
        matrices = layer.weight_bytes / machine.attained_hbm, layer.matrix_operations / flops
        attention = (
            layer.kv_bytes / machine.attained_hbm, layer.attention_operations / (_WINDOW_ATTENTION_SHARE * flops)
        )  # fmt: skip
        hbm_s += count * (matrices[0] + attention[0])
        arithmetic_s += count * (matrices[1] + attention[1])
        compute_s += count * (max(matrices) + max(attention))
    link_s = costs.streamed_bytes / (machine.link_gbps * GB)
    staging_s = costs.staged_bytes / (machine.staging_gbps * GB)
    launches = sum(count * layer.launches for layer, count in costs.kinds)
    launch_s = len(costs.layers) * _HOST_LAYER_S + launches * _HOST_LAUNCH_S
    seconds = max(link_s, staging_s, compute_s, launch_s)
    by_cause = {link_s: "link", staging_s: "staging", launch_s: "launches"}
    bound_by = "link" if seconds == link_s else by_cause.get(seconds, _slower(hbm_s, arithmetic_s))
    return PassPrediction(
        costs.streamed_bytes, link_s, hbm_s, arithmetic_s, compute_s, launch_s, seconds, bound_by, staging_s
    )  # fmt: skip


@dataclass(frozen=True)
class StepCosts:
    """A step that is one CUDA graph: bytes from HBM, operations of matrix products, launches; bytes it fetches."""

    dtype: str
    hbm_bytes: int
    operations: float
    launches: int
    fetched_bytes: int = 0


def predict_step(costs: StepCosts, machine: MachineFigures) -> float:
    """Seconds of one step. What it fetches over the link, it waits for."""
    compute_s = max(costs.hbm_bytes / machine.attained_hbm, costs.operations / machine.flops(costs.dtype))
    return compute_s + costs.launches * machine.launch_us * 1e-6 + costs.fetched_bytes / (machine.link_gbps * GB)


@dataclass(frozen=True)
class PrefillCosts:
    """What a prompt asks for: each layer's weights once over the link, its keys and values once back.

    `hbm_bytes` are the weights, read for every piece of the prompt. `growth_bytes` of host memory are new and locked
    before the first layer. `staged_weight_bytes` of those over the link come out of pageable memory, and
    `staged_kv_bytes` go there, where new memory is touched by the threads that write.
    """

    dtype: str
    streamed_weight_bytes: int
    written_kv_bytes: int
    hbm_bytes: int
    matrix_operations: float
    attention_operations: float
    growth_bytes: int = 0
    staged_weight_bytes: int = 0
    staged_kv_bytes: int = 0


@dataclass(frozen=True)
class PrefillPrediction:
    """Time to the first token by cause; host memory grows before the first layer, everything else overlaps."""

    link_bytes: int
    link_s: float
    compute_s: float
    growth_s: float
    seconds: float
    bound_by: str
    staging_s: float = 0.0


def predict_prefill(costs: PrefillCosts, machine: MachineFigures) -> PrefillPrediction:
    """How long a prompt takes. The link is taken to carry both directions one after the other."""
    flops = machine.flops(costs.dtype)
    hbm_s = costs.hbm_bytes / machine.attained_hbm
    arithmetic_s = costs.matrix_operations / flops + costs.attention_operations / (_PREFILL_ATTENTION_SHARE * flops)
    compute_s = max(hbm_s, arithmetic_s)
    link_bytes = costs.streamed_weight_bytes + costs.written_kv_bytes
    link_s, growth_s = link_bytes / (machine.link_gbps * GB), costs.growth_bytes / (_GROWTH_GBPS * GB)
    staging_s = (costs.staged_weight_bytes + costs.staged_kv_bytes) / (machine.staging_gbps * GB)
    work_s = max(link_s, staging_s, compute_s)
    bound_by = "link" if link_s > compute_s else _slower(hbm_s, arithmetic_s)
    if staging_s > max(link_s, compute_s):
        bound_by = "staging"
    if growth_s > work_s:
        bound_by = "host memory"
    return PrefillPrediction(link_bytes, link_s, compute_s, growth_s, growth_s + work_s, bound_by, staging_s)


def attention_operations(*, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Operations of a window's attention in one layer, queries filled up to whole tiles."""
    rows = queries * heads // kv_heads
    tiles = -(-rows // _ATTENTION_TILE_ROWS)
    return 4 * tiles * _ATTENTION_TILE_ROWS * kv_heads * head_dim * keys


def _slower(hbm_s: float, arithmetic_s: float) -> str:
    return "HBM" if hbm_s >= arithmetic_s else "arithmetic"
