"""The compute device: which one it is, a ledger of its memory with a hard limit, and small uploads to it; and the cards
that a model's layers are dealt out to, and how the rows of a pass cross from one to the next.

Everything is reserved up front. On CUDA the ledger also caps torch's allocator, so that a mistake in the arithmetic
ends in an error instead of in more memory than the user allowed. Small things that a pass or a step reads are packed
into one tensor, which a kernel brings past the copies that wait for the link.

A card is a device with a budget, a link, a copy queue and caches of its own. One device that is named twice makes two
cards.
"""

from __future__ import annotations

import contextlib
import gc
import os
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from offload_runtime_kernels.copy_words import copy_words

from offload_runtime.errors import BudgetError, DeviceError
from offload_runtime.sizes import GB, format_bytes, memory_name, size_option_down

# Context, cuBLAS and Triton modules of one process, when nothing was there to measure it by (H200, torch 2.11: 0.5 GB).
TYPICAL_CONTEXT_BYTES = 600_000_000
# More than any: what is beyond has come to other processes since their memory was looked at.
_MOST_CONTEXT_BYTES = 2 * GB
# Modules that load lazily, after the context has been measured.
LAZY_MODULE_BYTES = 200_000_000
_MOST_PROGRAMS = 4  # that are named in a message
_ALIGNED_WORDS, _ALIGNED_BYTES = 4, 16  # what vector loads want
Words = TypeVar("Words", torch.Tensor, np.ndarray[Any, Any])
_HELD_LOCK = Lock()  # around what `_held` gives, as several runtimes may share a device
# By their ids, of all runtimes on CUDA that are not closed. The lock is around every change and what follows from it; a
# finaliser may give a budget back in a thread that holds it.
_OPEN_BUDGETS: WeakValueDictionary[int, DeviceBudget] = WeakValueDictionary()
_BUDGETS_LOCK = RLock()


class DeviceBudget:
    """Ledger of device memory with a hard limit.

    Args:
        device: Where the memory is. On the CPU the ledger only counts, so that the same plans can be tried anywhere.
        limit_bytes: Most that this budget may take on the device, everything included that others do not claim; None:
            all that is free beside the open ones.
        other_bytes: On CUDA, what other processes already held before this one touched the device.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None, *, other_bytes: int | None = None) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.reservations: dict[str, int] = {}  # bytes by what they are for
        self.planned_bytes = 0  # what they will come to, context included, once that is known
        self.memory_name = memory_name(device.type)  # for messages
        self._other_bytes = self._claimed_bytes = 0
        self.context_bytes = 0
        self.available_bytes: int | None = None  # the most that a limit could be; None: not known
        # What torch's allocator may hold for this budget, and what it held before the first of the open ones.
        self._allowed_bytes = self._held_before_bytes = 0
        if device.type == "cuda":
            torch.zeros(1, device=device)  # creates the context
            gc.collect()
            with _BUDGETS_LOCK:
                limit_bytes = self._limit_cuda(limit_bytes, other_bytes)
        self.limit_bytes = limit_bytes
        self._peak_bytes = 0

    def _limit_cuda(self, limit_bytes: int | None, other_bytes: int | None) -> int:
        """Find out what is free, and hold torch's allocator to the limits of all open budgets together: what exceeds
        them raises instead of being taken. Returns the limit."""
        torch.cuda.empty_cache()  # what an earlier runtime's last tensors left with the allocator would count as ours
        torch.cuda.synchronize(self.device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        held_bytes = torch.cuda.memory_reserved(self.device)
        used_bytes = total_bytes - free_bytes - held_bytes
        if other_bytes is None:
            other_bytes = max(0, used_bytes - TYPICAL_CONTEXT_BYTES)
        self._other_bytes = min(max(other_bytes, used_bytes - _MOST_CONTEXT_BYTES), used_bytes)
        self.context_bytes = used_bytes - self._other_bytes + LAZY_MODULE_BYTES
        others = self._open()
        claimed_bytes = sum(max(one.planned_bytes, one.reserved_bytes) - one.context_bytes for one in others)
        self._claimed_bytes = claimed_bytes
        self.available_bytes = available_bytes = max(0, total_bytes - self._other_bytes - claimed_bytes)
        claims = f" (open runtimes claim {format_bytes(claimed_bytes)})" if claimed_bytes else ""
        if limit_bytes is None and claimed_bytes:
            self.memory_name += claims
        whose = f"that {self.device} has free{claims}"
        otherwise = self.what_to_close() if (limit_bytes or 0) > available_bytes else ""
        limit_bytes = within(
            "--vram", limit_bytes, available_bytes, whose, otherwise or "close what else uses the card"
        )
        self._allowed_bytes = max(0, limit_bytes - self.context_bytes)
        # What this process holds already belongs to other budgets' owners, within their limits, or to nobody's.
        self._held_before_bytes = others[0]._held_before_bytes if others else held_bytes
        _OPEN_BUDGETS[id(self)] = self
        self._cap_allocator()
        return limit_bytes

    def what_to_close(self) -> str:
        """For messages what else holds memory of a GPU, as something to do; empty where nothing is known to."""
        ours = [f"a runtime of this process (all claim {format_bytes(self._claimed_bytes)})"] * bool(
            self._claimed_bytes
        )
        holders = [*ours, *_other_programs(self.device)]
        return f"close one of these: {'; '.join(holders)}" if holders else ""

    def _open(self) -> list[DeviceBudget]:
        """All open budgets of this card."""
        # Only this copy of the table is made at once: going through it may run a finaliser that changes it.
        budgets = [reference() for reference in _OPEN_BUDGETS.valuerefs()]
        return [budget for budget in budgets if budget is not None and budget.device == self.device]

    def _cap_allocator(self) -> None:
        """Hold torch's allocator to the sum of what the open budgets of this card allow, or to nothing without any."""
        allowed = [budget._allowed_bytes for budget in self._open()]
        share = (self._held_before_bytes + sum(allowed)) / torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share) if allowed else 1.0, self.device)

    @property
    def reserved_bytes(self) -> int:
        """Sum of the ledger and of the CUDA context."""
        return self.context_bytes + sum(self.reservations.values())

    def reserve(self, name: str, nbytes: int) -> None:
        """Enter `nbytes` for `name`, or raise `BudgetError` when the limit would be exceeded."""
        if self.limit_bytes is not None and self.reserved_bytes + nbytes > self.limit_bytes:
            left, limit = format_bytes(max(0, self.limit_bytes - self.reserved_bytes)), format_bytes(self.limit_bytes)
            close = self.what_to_close() if self.limit_bytes == self.available_bytes else ""
            remedies = ["lower --context", "keep fewer layers resident"]
            remedies = [*remedies, close] if close else ["raise --vram", *remedies]
            raise BudgetError(
                f"{name} needs {format_bytes(nbytes)} of {self.memory_name} but {left} of {limit} is left: "
                f"{', '.join(remedies[:-1])} or {remedies[-1]}"
            )
        self.reservations[name] = self.reservations.get(name, 0) + nbytes

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        """Reserve and allocate a device buffer: uint8 [nbytes]."""
        self.reserve(name, nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{name}: {self.device} refused {format_bytes(nbytes)} although the budget allows it: "
                f"another program took the memory; {self.what_to_close() or 'close it'}, or lower --vram"
            ) from error

    def release(self) -> None:
        """Leave torch's allocator the cap of the budgets that are still open; the memory itself is given back by
        whoever holds it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            with _BUDGETS_LOCK:
                _OPEN_BUDGETS.pop(id(self), None)
                self._cap_allocator()

    def peak_bytes(self) -> int:
        """Return the most device memory seen: as the driver reports it on CUDA (context included), the ledger on the
        CPU."""
        if self.device.type == "cuda":
            with contextlib.suppress(torch.AcceleratorError):  # it has failed: what was seen before
                free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
                self._peak_bytes = max(self._peak_bytes, total_bytes - free_bytes - self._other_bytes)
        else:
            self._peak_bytes = max(self._peak_bytes, self.reserved_bytes)
        return self._peak_bytes


def within(option: str, asked_bytes: int | None, there_bytes: int, whose: str, otherwise: str) -> int:
    """Return what is asked for of some memory, or all of it. Raises `BudgetError` where there is less."""
    if asked_bytes is not None and asked_bytes > there_bytes:
        raise BudgetError(
            f"{option} {format_bytes(asked_bytes)} is more than the {format_bytes(there_bytes)} {whose}: lower it to "
            f"{size_option_down(there_bytes)}, or {otherwise}"
        )
    return there_bytes if asked_bytes is None else asked_bytes


def open_nvml() -> Any:
    """NVIDIA's management library, initialised. Whatever it raises means that nothing can be told."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def device_memory_in_use() -> dict[str, int]:
    """Return the bytes in use on each GPU, by its UUID, before this process touches any, from the driver; none when
    that cannot be told.

    Must be called before a CUDA context exists, since afterwards the context itself is counted.
    """
    if torch.cuda.is_initialized():
        return {}
    try:
        nvml = open_nvml()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        # Version 2 leaves out the driver's own reserve, as `cudaMemGetInfo` does.
        used = [int(nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used) for handle in handles]
        return dict(zip(map(nvml.nvmlDeviceGetUUID, handles), used, strict=True))
    except Exception:  # no driver library, or one that does not say: nothing to measure by
        return {}


def _other_programs(device: torch.device) -> list[str]:
    """Other processes that hold most of a GPU's memory, from the driver; none when that cannot be told."""
    try:
        nvml = open_nvml()
        card = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        listed = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)
        held = {one.pid: one.usedGpuMemory or 0 for found in listed for one in found(card) if one.pid != os.getpid()}
    except Exception:  # no driver library, or one that does not say
        return []
    programs = []
    for pid in sorted(held, key=lambda pid: -held[pid])[:_MOST_PROGRAMS]:
        name = "of an unknown name"
        with contextlib.suppress(nvml.NVMLError):  # of another user, or outside of a container
            name = os.path.basename(os.fsdecode(nvml.nvmlSystemGetProcessName(pid)))
        programs.append(f"pid {pid}, {name}, {format_bytes(held[pid])}")
    return programs


def device_memory_used_by_others(index: int, in_use: Mapping[str, int] | None = None) -> int | None:
    """Return the bytes of GPU `index` in what is `in_use`, by default now; None when that is not known."""
    found = device_memory_in_use() if in_use is None else in_use
    return found.get(f"GPU-{torch.cuda.get_device_properties(index).uuid}") if found else None


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one for a while: kernels, events and page-locking go where the current device is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def resolve_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device that exists.

    Raises:
        DeviceError: CUDA was asked for and is not there, or there is no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is not a device: use auto, cuda, cuda:N or cpu") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise DeviceError(f"device {name!r} is not supported: use cuda or cpu")
    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device is available to torch: use --device cpu, or install a CUDA build of torch")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} GPU(s)")
    return torch.device("cuda", index)


def resolve_devices(names: Sequence[str]) -> list[torch.device]:
    """Turn names of cards into devices that exist; `auto` alone is the first GPU and all that are of its kind, since
    others round in other ways. Errors as of `resolve_device`."""
    found = [resolve_device(name) for name in names]
    if tuple(names) == ("auto",) and found[0].type == "cuda":
        kinds = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found = [torch.device("cuda", index) for index, kind in enumerate(kinds) if kind == kinds[0]]
    return found


def packed_words(sizes: Iterable[int]) -> int:
    """Words that parts of so many integers take in one tensor."""
    return sum(-(-size // _ALIGNED_WORDS) * _ALIGNED_WORDS for size in sizes)


def pack(parts: Iterable[Sequence[int]]) -> torch.Tensor:
    """Return the integers of several parts in one tensor: int32 [packed_words], host. `unpack` finds the parts in
    it."""
    return torch.frombuffer(pack_words(parts), dtype=torch.int32)


def pack_words(parts: Iterable[Sequence[int]]) -> array[int]:
    """Return the same as an array, which is far quicker to a tensor than a list is."""
    words = array("i")
    for part in parts:
        words.extend(part)
        words.frombytes(bytes(-len(part) % _ALIGNED_WORDS * words.itemsize))
    return words


def unpack(packed: Words, sizes: Iterable[int]) -> list[Words]:
    """Return views of the parts of a packed tensor or array, by their numbers of integers; each begins at a multiple of
    16 bytes."""
    parts, start = list[Words](), 0
    for size in sizes:
        parts.append(packed[start : start + size])
        start += -(-size // _ALIGNED_WORDS) * _ALIGNED_WORDS
    return parts


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor of the host on the device, enqueued on the current stream; see `overwrite`."""
    if device.type != "cuda":
        return host
    target = torch.empty_like(host, device=device)
    overwrite(target, host)
    return target


def overwrite(target: torch.Tensor, host: torch.Tensor) -> None:
    """Write a small tensor of the host into one of the same shape and dtype, enqueued on its device's current stream.

    By a kernel, which reads page-locked memory: copies wait in the copy engine for all that were enqueued before them,
    36 ms behind three layers of 634 MB, where a kernel takes 0.2 ms (H200). A draft's step would wait for the pass.
    """
    assert target.dtype == host.dtype and target.shape == host.shape and not host.nbytes % 4
    if not target.is_cuda:
        target.copy_(host)
        return
    pinned, received = host.contiguous().pin_memory(), target
    if not target.is_contiguous():
        received = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    with current_device(target.device):  # which may be another card than the caller's
        copy_words(pinned.view(-1).view(torch.int32), received.view(-1).view(torch.int32))
    if received is not target:
        target.copy_(received)
    hold_pinned(pinned, target.device)


def hold_pinned(pinned: object, device: torch.device) -> None:
    """Keep page-locked memory until a device has done what its current stream has been given so far."""
    read = torch.cuda.Event()
    read.record(torch.cuda.current_stream(device))
    with _HELD_LOCK:
        held = _held(device)
        held.append((pinned, read))
        while held[0][1].query() and len(held) > 1:
            held.popleft()


@cache
def _held(device: torch.device) -> deque[tuple[object, torch.cuda.Event]]:
    """Page-locked tensors that kernels of a device may still be reading, the oldest first."""
    return deque()


# --- cards


@dataclass(frozen=True)
class Card:
    """One of the cards of a run, by its number."""

    number: int
    device: torch.device


class TransferBuffers:
    """Page-locked memory that rows pass through where cards do not reach each other's memory.

    All transfers of a piece of a pass go through one buffer: who writes it has computed from what was read there last.
    Made when it is first needed, and never given back, so that a CUDA graph may hold it.

    Args:
        peers: Whether GPUs that reach each other's memory copy there and leave this one alone.
    """

    def __init__(self, *, peers: bool = True) -> None:
        self.peers = peers
        self._buffers: dict[Hashable, list[torch.Tensor]] = {}  # the last one is the largest

    def of(self, piece: Hashable, words: int) -> torch.Tensor:
        """Return the buffer of a piece: int32 [words]."""
        made = self._buffers.setdefault(piece, [])
        if not made or len(made[-1]) < words:
            made.append(torch.empty(words, dtype=torch.int32, pin_memory=True))
        return made[-1][:words]


@dataclass(frozen=True)
class LayerPartition:
    """Says which card each layer of a model is on. The first card has what is not of any layer: embedding, head,
    tokens.

    `owners` are the numbers of the cards, by layer.
    """

    cards: tuple[Card, ...]
    owners: tuple[int, ...]
    transfer_buffers: TransferBuffers = field(default_factory=TransferBuffers, compare=False)

    @classmethod
    def of_one(cls, device: torch.device, num_layers: int) -> LayerPartition:
        """Return all layers on one card."""
        return cls((Card(0, device),), (0,) * num_layers)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Return the devices of the cards, each once, the first card's first."""
        return tuple(dict.fromkeys(card.device for card in self.cards))

    @property
    def in_blocks(self) -> bool:
        """Return whether there are several cards and the layers of each follow one another."""
        return len(self.cards) > 1 and are_blocks(self.owners)

    def card_of(self, layer: int) -> Card:
        """Return the card of a layer; behind the last one the first card."""
        return self.cards[self.owners[layer] if layer < len(self.owners) else 0]


def are_blocks(owners: Sequence[int]) -> bool:
    """Return whether the layers of each card follow one another, by the numbers of their cards."""
    return len(list(groupby(owners))) == len({*owners})


@dataclass(frozen=True)
class Transfer:
    """Tensors on their way from one card to another, packed so that all of them cross at once: uint8 on the source, or
    in page-locked memory (int32) where the target does not reach that; None where both are one card. `left` fires when
    they are there; None on one device."""

    tensors: Sequence[torch.Tensor]
    source: Card
    target: Card
    packed: torch.Tensor | None = None
    left: torch.cuda.Event | None = None


def transfer(
    tensors: Sequence[torch.Tensor], source: Card, target: Card, buffers: TransferBuffers, piece: Hashable = 0
) -> list[torch.Tensor]:
    """Return copies of tensors on `source` for `target`, or the same tensors if both are one card. Arguments are as of
    `send`."""
    return receive(send(tensors, source, target, buffers, piece))


def send(
    tensors: Sequence[torch.Tensor], source: Card, target: Card, buffers: TransferBuffers, piece: Hashable = 0
) -> Transfer:
    """Enqueue the first half of a transfer, behind what the current stream of `source` has to do. Never waits.

    Between devices that do not reach each other's memory the bytes go through page-locked memory, by kernels: in a copy
    queue they would wait behind a layer, 11 to 20 ms.

    Args:
        tensors: What crosses.
        source: Whose they are.
        target: Whose their copies will be.
        buffers: The run's.
        piece: The part of the pass: what crosses must have been computed from its last transfer, or come after that.
    """
    if source == target:
        return Transfer(tensors, source, target)
    with current_device(source.device):
        packed = _packed(tensors)
        if source.device == target.device:
            return Transfer(tensors, source, target, packed)
        if not (buffers.peers and reaches(source.device, target.device)):
            words = packed.view(torch.int32)
            packed = buffers.of(piece, len(words))
            copy_words(words, packed)
        left = torch.cuda.Event()
        left.record(torch.cuda.current_stream(source.device))
    return Transfer(tensors, source, target, packed, left)


def receive(sent: Transfer, destination: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Enqueue the second half, in front of what comes next on the current stream of `target`, and in nobody else's way,
    so that the source goes on with other rows meanwhile.

    Args:
        sent: What `send` returned.
        destination: Where it goes if it comes from another card: `aligned_bytes` of the target, uint8, whose last
            content it was computed from, if there was any. None: memory is taken, and is the allocator's again when the
            stream has come so far.
    """
    source, target, packed, left = sent.source, sent.target, sent.packed, sent.left
    if packed is None:
        return list(sent.tensors)
    with current_device(target.device):
        room = destination
        if room is None:
            room = torch.empty(packed.nbytes, dtype=torch.uint8, device=target.device)
        if left is not None:
            torch.cuda.current_stream(target.device).wait_event(left)
        if left is None:
            room.copy_(packed)
        elif packed.device.type == "cpu":
            copy_words(packed, room.view(torch.int32))
        else:
            with _behind(left, source.device, target.device, packed):
                room.copy_(packed, non_blocking=True)
        return _unpacked(room, sent.tensors)


@contextlib.contextmanager
def _behind(left: torch.cuda.Event, source: torch.device, target: torch.device, packed: torch.Tensor) -> Iterator[None]:
    """Around a copy to another device, which torch enqueues on the current stream of the source and orders with that of
    the target both ways: a stream of their own, behind `left`, keeps what else the source does out of it."""
    stream = _transfer_stream(source)
    stream.wait_event(left)
    packed.record_stream(stream)
    with torch.cuda.stream(stream), torch.cuda.device(target):
        yield


@cache
def _transfer_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def reaches(one: torch.device, other: torch.device) -> bool:
    """Return whether a GPU reads the memory of another one."""
    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)


def aligned_bytes(nbytes: int) -> int:
    """Return what a tensor of so many bytes takes on its way."""
    return -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors, those of each from a multiple of 16 on: uint8. One that fills its bytes is not
    copied."""
    parts = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        parts += [data, data.new_empty(-len(data) % _ALIGNED_BYTES)]
    parts = [part for part in parts if len(part)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpacked(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a packed tensor with the shapes and dtypes of others."""
    found, start = [], 0
    for tensor in like:
        found.append(packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += aligned_bytes(tensor.nbytes)
    return found
