"""From a checkpoint to packed blocks, without ever holding the model twice.

Each tensor is read to where it belongs, in host memory straight into the rows of an arena, which is page-locked as soon
as its last tensor has arrived, while other threads go on reading. What belongs on a device, or is made there, passes
through memory of its thread, a piece at a time (`Staging`).
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from offload_runtime_kernels.gguf_blocks import FORMATS
from offload_runtime_kernels.scaled_rows import ScaledFormat

from offload_runtime.fields import shortened
from offload_runtime.models.config import ModelConfig
from offload_runtime.sizes import GB
from offload_runtime.stream.arena import PIECE_BYTES, HostArena, Registrar, Staging
from offload_runtime.weights import quantised
from offload_runtime.weights.checkpoint import CheckpointSource, DescribedModel
from offload_runtime.weights.encoding import NotCodable, Weight
from offload_runtime.weights.layout import EMBEDDING, Destination, ModelLayout, checkpoint_tensors

# Page faults of fresh arenas and the copy out of the page cache keep a core busy with 1 to 3 GB/s. Where torch makes
# something of what is read in host memory, it has threads of its own in each of these.
_READ_THREADS, _CODING_THREADS = 16, 4

_CPU = torch.device("cpu")

Progress = Callable[[int, int], None]


class MatricesNotCodable(Exception):
    """Some matrices are none that their encoding has room for: `names`, as transformers calls them."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(f"{len(names)} matrices cannot be coded: {shortened(sorted(names))}")
        self.names = names


def _num_threads(model: DescribedModel, layout: ModelLayout, device: torch.device) -> int:
    """Return the threads that read a model, of whose rows those that change are made on `device`."""
    kinds = {*model.kinds.values()}
    on_cpu = layout.has_coded or any(isinstance(kind, ScaledFormat) for kind in kinds)
    if device.type == "cpu":  # where blocks of a GGUF file are decoded as they are read
        on_cpu |= bool(kinds.intersection(FORMATS).difference(layout.bytes_by_kind))
    return _CODING_THREADS if on_cpu else _READ_THREADS


def passing_bytes(model: DescribedModel, layout: ModelLayout) -> int:
    """Return host memory that weights pass through at the most: a piece of each thread, the bf16 of matrices that are
    coded, and what of quantised ones is read as a whole."""
    if not layout.has_coded and not any(isinstance(form, ScaledFormat) for form in model.kinds.values()):
        return _READ_THREADS * PIECE_BYTES
    whole = list[int]()
    for name, to in checkpoint_tensors(model.config()).items():
        if isinstance(form := model.kinds.get(name), ScaledFormat):
            whole.append(quantised.passing_bytes(form, to.shape))
        if layout.has_coded and to.is_matrix:
            whole.append(math.prod(to.shape) * layout.dtype.itemsize)
    if not whole:
        return _READ_THREADS * PIECE_BYTES
    return _CODING_THREADS * PIECE_BYTES + sum(sorted(whole)[-_CODING_THREADS:])


@dataclass
class HostWeights:
    """Holds what of a model's weights stays in host memory; the owner of the arenas.

    Attributes:
        layout: How the blocks are packed; its bytes are without the rounding of the arenas to pages.
        arenas: By decoder layer, that of None has final norm and lm_head, and `EMBEDDING`'s an embedding of its own.
        experts: Those of the layers' experts, one behind the other.
        load_seconds: Wall-clock time of reading, converting, copying and page-locking.
    """

    config: ModelConfig
    layout: ModelLayout
    arenas: dict[int | None, HostArena]
    experts: dict[int, HostArena]
    load_seconds: float = 0.0

    @property
    def load_gbps(self) -> float:
        """Return the packed bytes per second of loading, in GB/s."""
        return self.layout.total_bytes / GB / self.load_seconds if self.load_seconds > 0 else 0.0

    @property
    def layers(self) -> dict[int, HostArena]:
        """Return the arenas of decoder layers."""
        return {layer: arena for layer, arena in self.arenas.items() if layer not in (None, EMBEDDING)}

    def block(self, layer: int | None) -> torch.Tensor:
        """Return the packed bytes of a layer, or with None of the shared block: uint8, host."""
        return self.arenas[layer].buffer[: self.layout.block(layer).total_bytes]

    def experts_of(self, layer: int) -> torch.Tensor:
        """Return the packed bytes of a layer's experts: uint8 [E, bytes of one], host."""
        of_layer = self.layout.experts[layer]
        return self.experts[layer].buffer[: of_layer.total_bytes].view(of_layer.num_experts, -1)

    def views(self, layer: int | None, expert: int | None = None) -> dict[str, Weight]:
        """Return the packed name to weight in host memory for a layer or one of its experts, or with None for the
        shared block."""
        if layer is not None and expert is not None:
            return self.layout.experts[layer].block.views(self.experts_of(layer)[expert])
        return self.layout.block(layer).views(self.block(layer))

    def close(self) -> None:
        """Unlock and give back all arenas. Nothing may be copying from them any more."""
        for arena in (*self.arenas.values(), *self.experts.values()):
            arena.close()


def load_weights(
    source: CheckpointSource,
    layout: ModelLayout,
    *,
    onto: Mapping[int | None, torch.Tensor] | None = None,
    experts_onto: Mapping[int, torch.Tensor] | None = None,
    pin: Collection[int] = (),
    registrar: Registrar | None = None,
    pinned_bytes: int | None = None,
    on_progress: Progress | None = None,
    coding_device: torch.device = _CPU,
    later: Collection[int] = (),
) -> HostWeights:
    """Read a checkpoint into packed blocks.

    Args:
        source: An opened checkpoint.
        layout: How its blocks are packed, and the dtype that the model computes in; stored values are converted.
        onto: Where blocks belong that do not stay in host memory, by layer, that of None the shared one: uint8 of
            their bytes, on any device.
        experts_onto: The same of layers' experts: uint8 [E, at least the bytes of one]. Others are page-locked where
            there is a registrar.
        pin: Blocks to page-lock: layers that are streamed, and an embedding whose rows are read on the host.
        registrar: Locks the embedding first, in one piece, layers as they are complete, and what weights pass through
            on their way to a GPU, until the system refuses; layers that it has not locked in the end stay pageable.
        pinned_bytes: Most of both that is page-locked at once; None: no limit.
        on_progress: Called from this thread with (bytes written, bytes of all weights).
        coding_device: Where matrices are coded, or brought in order, that are not kept as they are in the file; on its
            default stream.
        later: Layers of which only the memory is made.

    Raises:
        MatricesNotCodable: Of some that the layout codes; says which. Nothing stays allocated.
        CheckpointError: A file ended early.
        BudgetError: Not enough memory, or the embedding or experts could not be locked. Nothing stays allocated.
    """
    started, onto, experts_onto = time.perf_counter(), onto or {}, experts_onto or {}
    names: dict[int | None, str] = {None: "lm_head", EMBEDDING: "the embedding"}
    names |= {layer: f"layer {layer}" for layer in range(len(layout.layers))}
    kept = {layer: name for layer, name in names.items() if layer not in onto and layout.block(layer).tensors}
    arenas = {layer: HostArena(layout.block(layer).total_bytes, name=name) for layer, name in kept.items()}
    experts = {
        layer: HostArena(one.total_bytes, name=f"the experts of {names[layer]}")
        for layer, one in layout.experts.items()
        if layer not in experts_onto
    }
    weights = HostWeights(source.config(), layout, arenas, experts)
    locked = [*(arenas[one] for one in pin), *experts.values()]
    left_bytes = math.inf if pinned_bytes is None else max(0, pinned_bytes - sum(one.nbytes for one in locked))
    try:
        if EMBEDDING in pin:
            arenas[EMBEDDING].pin(registrar)
        with Staging(coding_device, registrar, left_bytes) as staging:
            refused = _lock(weights, {*pin} & {*later}, registrar)
            to_lock = {*pin} - {*later}
            refused += _fill(
                weights, source, onto, experts_onto, to_lock, registrar, on_progress, staging, frozenset(later)
            )
        if staging.locked_bytes:  # which the system may have refused those for
            _lock(weights, refused, registrar)
    except BaseException:
        weights.close()
        raise
    if on_progress is not None:
        on_progress(layout.total_bytes, layout.total_bytes)  # the alignment between tensors counts too
    weights.load_seconds = time.perf_counter() - started
    return weights


class LayerReader(AbstractContextManager["LayerReader"]):
    """Reads layers of a checkpoint as a whole, one after the other.

    Args:
        source: An opened checkpoint.
        layout: How its layers are packed.
        device: Where they are read to.
        registrar: Page-locks what they pass through; None: it stays pageable.
    """

    def __init__(
        self, source: CheckpointSource, layout: ModelLayout, device: torch.device, registrar: Registrar | None
    ) -> None:
        self._fills, self._layout = source.fills, layout
        self._names = defaultdict[int | None, list[tuple[str, Destination]]](list)
        for name, to in checkpoint_tensors(source.config()).items():
            self._names[to.layer].append((name, to))
        self._staging = Staging(device, registrar)
        most = min(_num_threads(source, layout, device), os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(most, "load")

    def read(self, layer: int, memory: torch.Tensor, scratch: torch.Tensor | None = None) -> dict[str, Weight]:
        """Read a layer to uint8 [at least its bytes], on the device. Returns its weights, of which what is encoded is
        decoded into the scratch. Raises `CheckpointError`: a file ended early."""
        views = self._layout.layers[layer].views(memory, scratch)

        @torch.inference_mode()  # a mode of the thread; the memory may come from a thread that is in it
        def fill(name: str, to: Destination) -> None:
            views[to.packed].fill(to.row_start, to.row_end, self._fills[name], self._staging)

        jobs = [self._pool.submit(fill, *one) for one in self._names[layer]]
        for job in jobs:
            job.result()
        return views

    def packed_in(self, layer: int, packed: str) -> list[str]:
        """Return the tensors of the checkpoint that one packed tensor is made of."""
        return [name for name, to in self._names[layer] if to.packed == packed]

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._staging.__exit__()


def _block_of(to: Destination) -> tuple[int | None, bool]:
    """Return the layer of a block, and whether it is that of its experts."""
    return to.layer, to.expert is not None


def _lock(weights: HostWeights, layers: Collection[int], registrar: Registrar | None) -> list[int]:
    """Page-lock layers until the system refuses: asking again only costs it. Returns those that are not locked."""
    left = sorted(layers)
    while left and registrar is not None and not weights.arenas[left[0]].lock(registrar):
        del left[0]
    return left


def _fill(
    weights: HostWeights, source: CheckpointSource, onto: Mapping[int | None, torch.Tensor],
    experts_onto: Mapping[int, torch.Tensor], to_lock: set[int], registrar: Registrar | None,
    on_progress: Progress | None, staging: Staging, later: Collection[int | None],
) -> list[int]:  # fmt: skip
    """Read every tensor into its rows, but for those of layers that come `later`, and lock layers that are complete.
    Returns those that are not locked."""
    destinations = checkpoint_tensors(weights.config)
    assert destinations.keys() == source.fills.keys(), f"{source.reference} reads other tensors than the model has"
    names = defaultdict[tuple[int | None, bool], list[str]](list)  # in the order of the files, but block by block
    for name in source.fills:
        if destinations[name].layer not in later:
            names[_block_of(destinations[name])].append(name)
    left = {block: len(found) for block, found in names.items()}
    jobs: dict[Future[int], str] = {}
    not_codable, refused, done_bytes = set[str](), list[int](), 0
    most = _num_threads(source, weights.layout, staging.device)
    with ThreadPoolExecutor(min(most, os.cpu_count() or 1), "load") as pool:
        try:
            for (layer, of_experts), found in names.items():
                views: dict[int | None, dict[str, Weight]]
                if of_experts and layer is not None:
                    block, memory = weights.layout.experts[layer].block, experts_onto.get(layer)
                    each = weights.experts_of(layer) if memory is None else memory
                    views = {number: block.views(one) for number, one in enumerate(each)}
                else:
                    memory = onto[layer] if layer in onto else weights.block(layer)
                    views = {None: weights.layout.block(layer).views(memory)}
                for name in found:
                    to = destinations[name]
                    fill_rows = views[to.expert][to.packed].fill
                    jobs[pool.submit(fill_rows, to.row_start, to.row_end, source.fills[name], staging)] = name
            for job in as_completed(jobs):
                name = jobs[job]
                layer, of_experts = complete = _block_of(destinations[name])
                left[complete] -= 1
                try:
                    done_bytes += job.result()
                except NotCodable:
                    not_codable.add(name)
                if left[complete] or registrar is None or layer is None:
                    pass
                elif of_experts and layer in weights.experts:
                    weights.experts[layer].pin(registrar)
                elif not of_experts and layer in to_lock:
                    # Once it has refused, only at the end, when pieces are no longer locked.
                    refused += [layer] if refused else _lock(weights, [layer], registrar)
                if on_progress is not None:
                    on_progress(done_bytes, weights.layout.total_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if not_codable:
        raise MatricesNotCodable(frozenset(not_codable))
    return refused
