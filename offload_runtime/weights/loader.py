"""From a checkpoint to packed host arenas, without ever holding the model twice.

Each tensor is read straight into the rows of the arena where it will stay; a layer to be streamed is page-locked as
soon as its last tensor has arrived, while other threads go on reading.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from offload_runtime.config import GB, ModelConfig
from offload_runtime.errors import CheckpointError
from offload_runtime.memory import HostArena, Registrar
from offload_runtime.weights.checkpoint import CheckpointSource, Fill, Shard
from offload_runtime.weights.layout import (
    Destination,
    PackedLayout,
    checkpoint_tensors,
    layer_layout,
    packed_bytes,
    shared_layout,
)

# Page faults of fresh arenas and the copy out of the page cache keep one core busy: from a warm cache four threads
# read 1.7 to 1.9 GB/s on a two-core machine where one reads 1.3.
_READ_THREADS = 4
_RANDOM_CHUNK_ELEMENTS = 1 << 24  # bounds the float32 copy of a chunk to 64 MiB
_RANDOM_STD = 0.02

Progress = Callable[[int, int], None]


@dataclass
class HostWeights:
    """All weights of a model in host memory; the owner of the arenas.

    Attributes:
        layers: One arena per decoder layer, laid out by `layer_layout`.
        shared: Embedding, final norm and lm_head, laid out by `shared_layout`.
        load_seconds: Wall-clock time of reading, converting and page-locking.
    """

    config: ModelConfig
    layer_layout: PackedLayout
    shared_layout: PackedLayout
    layers: list[HostArena]
    shared: HostArena
    load_seconds: float = 0.0

    @classmethod
    def allocate(cls, config: ModelConfig, dtype: torch.dtype) -> HostWeights:
        """Make empty arenas for a model.

        Raises:
            BudgetError: The system has not that much memory.
        """
        per_layer, shared = layer_layout(config, dtype), shared_layout(config, dtype)
        arenas: list[HostArena] = []
        try:
            arenas.append(HostArena(shared.total_bytes, name="embedding and lm_head"))
            for index in range(config.num_layers):
                arenas.append(HostArena(per_layer.total_bytes, name=f"layer {index}"))
        except BaseException:
            for arena in arenas:
                arena.close()
            raise
        return cls(config, per_layer, shared, arenas[1:], arenas[0])

    @property
    def total_bytes(self) -> int:
        """Bytes of all packed blocks, without the rounding of the arenas to pages."""
        return self.layer_layout.total_bytes * len(self.layers) + self.shared_layout.total_bytes

    @property
    def load_gbps(self) -> float:
        """Packed bytes per second of loading, in GB/s."""
        return self.total_bytes / GB / self.load_seconds if self.load_seconds > 0 else 0.0

    def arena(self, layer: int | None) -> HostArena:
        """The arena of a layer, or with None the shared one."""
        return self.shared if layer is None else self.layers[layer]

    def views(self, layer: int | None) -> dict[str, torch.Tensor]:
        """Packed name to host view for a layer, or with None for the shared block."""
        layout = self.shared_layout if layer is None else self.layer_layout
        return layout.views(self.arena(layer).buffer)

    def close(self) -> None:
        """Unlock and give back all arenas. Nothing may be copying from them any more."""
        for arena in (self.shared, *self.layers):
            arena.close()


class _Filling:
    """Which tensors are still to come, and the page-locking of blocks that are complete."""

    def __init__(
        self, weights: HostWeights, source: CheckpointSource, *, pin: Collection[int], blockwise: Registrar | None
    ) -> None:
        self._weights = weights
        self._source = source
        self._blockwise = blockwise
        self._pin = frozenset(pin)
        self._todo = checkpoint_tensors(weights.config)
        self._left = Counter(destination.layer for destination in self._todo.values())

    def take(self, shard: Shard) -> list[tuple[Destination, Fill]]:
        """Tick the tensors of a shard off, refusing one that comes twice or that nobody asked for."""
        jobs: list[tuple[Destination, Fill]] = []
        for name, fill in shard.tensors:
            destination = self._todo.pop(name, None)
            if destination is None:
                raise CheckpointError(f"{shard.path}: {name} is there twice or is not needed: the source is broken")
            jobs.append((destination, fill))
        return jobs

    def arrived(self, layer: int | None) -> None:
        """Count a tensor as written; with its last one a layer that is to be page-locked is."""
        self._left[layer] -= 1
        if self._left[layer] == 0 and layer in self._pin:
            arena = self._weights.arena(layer)
            if self._blockwise is None:
                arena.pin()
            elif not arena.pin_blocks(self._blockwise):
                self._pin = frozenset()  # it has refused once: asking again only costs the system

    def check_complete(self) -> None:
        """Raise unless every element of every block has been written."""
        if self._todo:
            first = next(iter(self._todo))
            raise CheckpointError(
                f"{self._source.reference} never delivered {len(self._todo)} tensors ({first}, ...): it changed while "
                "it was read; load it again"
            )
        assert not any(self._left.values()), "a tensor was taken but not written"


def _wait_all(jobs: Iterable[tuple[Future[None], Destination, int]], done: Callable[[Destination, int], None]) -> None:
    """Report jobs as they end; on the first failure drop those that have not started, and raise it."""
    table = {future: (destination, nbytes) for future, destination, nbytes in jobs}
    try:
        for future in as_completed(table):
            future.result()
            done(*table[future])
    except BaseException:
        for future in table:
            future.cancel()
        raise


def load_weights(
    source: CheckpointSource,
    dtype: torch.dtype,
    *,
    pin: Collection[int] = (),
    blockwise: Registrar | None = None,
    on_progress: Progress | None = None,
) -> HostWeights:
    """Read a checkpoint into packed host arenas.

    Args:
        source: An opened checkpoint.
        dtype: Of the packed weights; stored values are converted.
        pin: Indices of the layers to page-lock: those that are streamed. The shared block never is.
        blockwise: Locks them block by block, until the system refuses; what it has not locked then stays pageable.
            None locks with CUDA, everything or nothing.
        on_progress: Called from this thread with (bytes written, bytes of all weights).

    Raises:
        CheckpointError: A file ended early or a tensor never came.
        BudgetError: Not enough memory, or the system refuses to lock that much (unless `blockwise`). Nothing stays
            allocated.
    """
    started = time.perf_counter()
    weights = HostWeights.allocate(source.config(), dtype)
    try:
        filling = _Filling(weights, source, pin=pin, blockwise=blockwise)
        blocks = {layer: weights.views(layer) for layer in (None, *range(len(weights.layers)))}
        done_bytes = 0

        def written(destination: Destination, nbytes: int) -> None:
            nonlocal done_bytes
            done_bytes += nbytes
            filling.arrived(destination.layer)
            if on_progress is not None:
                on_progress(done_bytes, weights.total_bytes)

        with ThreadPoolExecutor(min(_READ_THREADS, os.cpu_count() or 1), thread_name_prefix="load") as pool:
            for shard in source.shards():
                targets = [(destination, fill, destination.of(blocks[destination.layer]))
                           for destination, fill in filling.take(shard)]  # fmt: skip
                _wait_all(((pool.submit(fill, out), to, out.nbytes) for to, fill, out in targets), written)
        filling.check_complete()
    except BaseException:
        weights.close()
        raise
    if on_progress is not None:
        on_progress(weights.total_bytes, weights.total_bytes)  # the alignment between tensors counts too
    weights.load_seconds = time.perf_counter() - started
    return weights


def _fill_random(out: torch.Tensor, generator: torch.Generator, *, mean: float) -> None:
    """Gaussian values of std 0.02 around `mean`, made on the generator's device in chunks, into a host tensor."""
    flat = out.view(-1)
    for start in range(0, flat.numel(), _RANDOM_CHUNK_ELEMENTS):
        part = flat[start : start + _RANDOM_CHUNK_ELEMENTS]
        noise = torch.randn(part.numel(), generator=generator, device=generator.device, dtype=torch.float32)
        part.copy_(noise.mul_(_RANDOM_STD).add_(mean).to(out.dtype))


def random_weights(
    config: ModelConfig, dtype: torch.dtype, *, pin: bool, seed: int, device: torch.device
) -> HostWeights:
    """Weights without a checkpoint, for benchmarks and tests: std 0.02, norms around 1.

    Args:
        config: The model's shape.
        dtype: Of the packed weights.
        pin: Page-lock the arenas (needs CUDA).
        seed: The same seed on the same kind of device gives the same weights.
        device: Where the numbers are made; a GPU is many times faster.
    """
    started = time.perf_counter()
    weights = HostWeights.allocate(config, dtype)
    try:
        generator = torch.Generator(device=device).manual_seed(seed)
        for layer in (None, *range(config.num_layers)):
            for name, tensor in weights.views(layer).items():
                _fill_random(tensor, generator, mean=1.0 if name.endswith("_norm") else 0.0)
            if pin:
                weights.arena(layer).pin()
    except BaseException:
        weights.close()
        raise
    assert weights.total_bytes == packed_bytes(config, dtype)
    weights.load_seconds = time.perf_counter() - started
    return weights
