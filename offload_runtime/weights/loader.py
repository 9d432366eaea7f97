"""From a checkpoint to packed host arenas, without ever holding the model twice.

Each tensor is read straight into the rows of the arena where it will stay; a layer to be streamed is page-locked as
soon as its last tensor has arrived, while other threads go on reading.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from offload_runtime.config import GB, ModelConfig
from offload_runtime.memory import HostArena, Registrar
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import NotCodable, Weight
from offload_runtime.weights.fields import shortened
from offload_runtime.weights.layout import Destination, ModelLayout, checkpoint_tensors

# Page faults of fresh arenas and the copy out of the page cache keep one core busy: from a warm cache four threads
# read 1.7 to 1.9 GB/s on a two-core machine where one reads 1.3.
_READ_THREADS = 4

_CPU = torch.device("cpu")

Progress = Callable[[int, int], None]


class MatricesNotCodable(Exception):
    """Some matrices are none that their encoding has room for: `names`, as transformers calls them."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(f"{len(names)} matrices cannot be coded: {shortened(sorted(names))}")
        self.names = names


@dataclass
class HostWeights:
    """All weights of a model in host memory; the owner of the arenas.

    Attributes:
        layout: How the blocks are packed; its bytes are without the rounding of the arenas to pages.
        layers: One arena per decoder layer.
        shared: Embedding, final norm and lm_head.
        load_seconds: Wall-clock time of reading, converting and page-locking.
    """

    config: ModelConfig
    layout: ModelLayout
    layers: list[HostArena]
    shared: HostArena
    load_seconds: float = 0.0

    @property
    def load_gbps(self) -> float:
        """Packed bytes per second of loading, in GB/s."""
        return self.layout.total_bytes / GB / self.load_seconds if self.load_seconds > 0 else 0.0

    def block(self, layer: int | None) -> torch.Tensor:
        """The packed bytes of a layer, or with None of the shared block: uint8, host."""
        arena = self.shared if layer is None else self.layers[layer]
        return arena.buffer[: self.layout.block(layer).total_bytes]

    def views(self, layer: int | None) -> dict[str, Weight]:
        """Packed name to weight in host memory for a layer, or with None for the shared block."""
        return self.layout.block(layer).views(self.block(layer))

    def close(self) -> None:
        """Unlock and give back all arenas. Nothing may be copying from them any more."""
        for arena in (self.shared, *self.layers):
            arena.close()


def load_weights(
    source: CheckpointSource,
    layout: ModelLayout,
    *,
    pin: Collection[int] = (),
    registrar: Registrar | None = None,
    on_progress: Progress | None = None,
    coding_device: torch.device = _CPU,
) -> HostWeights:
    """Read a checkpoint into packed host arenas.

    Args:
        source: An opened checkpoint.
        layout: How its blocks are packed, and the dtype that the model computes in; stored values are converted.
        pin: Indices of the layers to page-lock: those that are streamed. The shared block never is.
        registrar: Locks them block by block, until the system refuses; what it has not locked then stays pageable.
        on_progress: Called from this thread with (bytes written, bytes of all weights).
        coding_device: Where matrices are coded that are not kept as they are in the file.

    Raises:
        MatricesNotCodable: Of some that the layout codes; says which. Nothing stays allocated.
        CheckpointError: A file ended early.
        BudgetError: Not enough memory. Nothing stays allocated.
    """
    started = time.perf_counter()
    shared = HostArena(layout.shared.total_bytes, name="embedding and lm_head")
    layers = [HostArena(nbytes, name=f"layer {index}") for index, nbytes in enumerate(layout.layer_bytes)]
    weights = HostWeights(source.config(), layout, layers, shared)
    try:
        _fill(weights, source, set(pin), registrar, on_progress, coding_device)
    except BaseException:
        weights.close()
        raise
    if on_progress is not None:
        on_progress(layout.total_bytes, layout.total_bytes)  # the alignment between tensors counts too
    weights.load_seconds = time.perf_counter() - started
    return weights


def _fill(
    weights: HostWeights, source: CheckpointSource, to_lock: set[int], registrar: Registrar | None,
    on_progress: Progress | None, coding_device: torch.device,
) -> None:  # fmt: skip
    """Read every tensor into its rows, and lock layers that are complete."""
    destinations = checkpoint_tensors(weights.config)
    assert destinations.keys() == source.fills.keys(), f"{source.reference} reads other tensors than the model has"
    left = Counter(destination.layer for destination in destinations.values())
    blocks = {layer: weights.views(layer) for layer in left}
    done_bytes = 0
    with ThreadPoolExecutor(min(_READ_THREADS, os.cpu_count() or 1), thread_name_prefix="load") as pool:
        jobs: dict[Future[int], tuple[str, Destination]] = {}
        not_codable = set[str]()
        try:
            for name, fill in source.fills.items():
                to = destinations[name]
                fill_rows = blocks[to.layer][to.packed].fill
                jobs[pool.submit(fill_rows, to.row_start, to.row_end, fill, coding_device)] = name, to
            for job in as_completed(jobs):
                name, to = jobs[job]
                try:
                    done_bytes += job.result()
                except NotCodable:
                    not_codable.add(name)
                    continue
                left[to.layer] -= 1
                if left[to.layer] == 0 and to.layer in to_lock:
                    assert registrar is not None
                    if weights.layers[to.layer].lock(registrar):
                        to_lock.clear()  # it has refused once: asking again only costs the system
                if on_progress is not None:
                    on_progress(done_bytes, weights.layout.total_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if not_codable:
        raise MatricesNotCodable(frozenset(not_codable))
