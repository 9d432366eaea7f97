"""The experts that are in a card's memory, and how those come there that a pass turns out to need: fetched on demand.

Experts are units of bytes, in page-locked host memory and in a pool of equal buffers on the card. In a pass of few rows
the card does all of that itself: it looks up each layer's choices, and brings what is missing into the buffers that
were not used for longest. The host takes no part, so that passes are launched as if all experts were there. What the
CPU computes is fetched in the background, on a stream of its own, and is there at the end of the pass.
In a pass that needs most experts of a layer all that are missing are prefetched by the host while the layer before
computes, past kernels that compute; the buffers that they take are the first ones to be used again, so that the rest
of the pool keeps what it has. Meanwhile the tables are the host's.

One thread at a time uses a pool, and one stream reads its buffers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from operator import sub
from typing import Any, NamedTuple

import torch
from offload_runtime_kernels.copy_words import copy_words
from offload_runtime_kernels.expert_buffers import NEVER, BufferTables, fetch_experts, place_experts, release_experts
from offload_runtime_kernels.experts_cpu import HostExperts

from offload_runtime.stream.copy_engine import CopyEngine, LinkPace
from offload_runtime.stream.cpu_experts import MOST_CPU_ROWS, CpuExperts

EXPERTS = "experts"
# A pass prefetches whole layers if it has so many times as many choices as a layer has experts: at least 1 - e^-2 of
# them would be chosen.
_CHOICES_OF_ALL = 2
# Of what the CPU computes so many may be in flight: a pass ends when they have arrived.
_MOST_IN_FLIGHT = 2


class ExpertUnits(NamedTuple):
    """Says how many experts a layer has, and how many of them a row chooses."""

    num_experts: int
    chosen: int


class PoolCounts(NamedTuple):
    """Counts the experts that layers of passes of few rows have wanted, each once whatever the rows; of these the ones
    that were in the pool; the bytes of all experts that were brought; and those that the CPU was asked for, with what
    it has read of them."""

    wanted: int = 0
    found: int = 0
    fetched_bytes: int = 0
    computed: int = 0
    cpu_bytes: int = 0
    cpu_s: float = 0.0


class ResidentExperts:
    """Has all experts of a card's layers there.

    Args:
        buffers: uint8 [S, bytes of the largest expert], on the card, one after the other: those of the first layer by
            their numbers, those of the next one, and so on.
        layers: As of an `ExpertPool`.

    Attributes:
        held: Of each layer the buffers of its experts, by their numbers: uint8 [E, bytes of a buffer].
    """

    def __init__(self, buffers: torch.Tensor, layers: Mapping[int, ExpertUnits]) -> None:
        self.buffers = buffers
        numbers = torch.arange(len(buffers), dtype=torch.int32, device=buffers.device)
        counts = [one.num_experts for one in layers.values()]
        self._numbers = dict(zip(layers, numbers.split(counts), strict=True))
        self.held = dict(zip(layers, buffers.split(counts), strict=True))

    def fetch(self, layer: int, x: torch.Tensor, choices: torch.Tensor, y: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the buffer of each expert of a layer; see `ExpertStore.fetch` of `models.layers`."""
        yield self._numbers[layer]


class ExpertPool:
    """Holds some of the experts of a card's layers.

    Args:
        buffers: uint8 [S, bytes of the largest expert], on the card.
        layers: Those of the card that have experts, by their numbers, in the order of a pass; those of a head, whose
            passes are others, have numbers behind them.
        engine: Copies what is prefetched.
        pace: Slows down what kernels fetch, on the stream that they are on.
        make_cpu: Makes of the pool's tables what computes some of what is missing; None: all of it is fetched.
    """

    def __init__(
        self, buffers: torch.Tensor, layers: Mapping[int, ExpertUnits], engine: CopyEngine, *,
        pace: LinkPace | None = None, make_cpu: Callable[[BufferTables], CpuExperts] | None = None,
    ) -> None:  # fmt: skip
        self.buffers, self.engine, self._layers, self._pace = buffers, engine, layers, pace
        self._layer_of, self._row_of = [*layers], {layer: row for row, layer in enumerate(layers)}
        self._rows = [*layers.values()]
        self._width = max(one.num_experts for one in self._rows)
        self._tables = BufferTables.of(buffers.device, layers=len(layers), experts=self._width, buffers=len(buffers))
        self._whole_layer: int | None = None  # the one whose experts are all in the pool, prefetched
        self.cpu = None if make_cpu is None else make_cpu(self._tables)
        most_chosen, on_card = max(one.chosen for one in self._rows), buffers.is_cuda
        assert len(buffers) >= most_chosen, "there is room for what a row chooses"
        # By row of the tables the experts in host memory, uint8 [E, bytes of one], and the same as units.
        self._host, self._units = dict[int, torch.Tensor](), dict[int, tuple[torch.Tensor, ...]]()
        self._room = len(buffers)
        if self.cpu is not None:
            self._room -= min(_MOST_IN_FLIGHT, len(buffers) - most_chosen)
        self._background_stream = torch.cuda.Stream(buffers.device) if on_card else None
        self._in_background = set[int]()  # rows of what may be on its way there
        # While the host has the tables: buffers by owner, layer times width plus expert, the least recently used first,
        # and those of none; of the card's layers the numbers as they are fetched.
        self._cached: OrderedDict[int, int] | None = None
        self._free = list[int]()
        self._pass = range(0)  # the numbers of its layers
        self._arriving: dict[int, dict[int, int]] = {}  # by row, buffers of experts on their way
        self._numbers = torch.full((len(layers), self._width), -1, dtype=torch.int32, pin_memory=on_card)
        self._always_free = engine.new_event()
        # Of each row: what was prefetched has arrived; what was enqueued has read its buffers.
        self._layer_ready, self._layer_free = ([engine.new_event() for _ in layers] for _ in range(2))
        self._bytes_prefetched, self._before = 0, PoolCounts()
        self._is_placed = False  # the tables may say of experts that they are there which are still to be fetched

    def add(self, layer: int, host: torch.Tensor, on_cpu: HostExperts | None = None) -> None:
        """Let a layer's experts be fetched from host memory, uint8 [E, bytes of one], or computed on the CPU there."""
        row = self._row_of[layer]
        self._host[row], self._units[row] = host, host.unbind()
        if self.cpu is not None and on_cpu is not None:
            self.cpu.add(row, on_cpu, self._rows[row].chosen, host)

    @property
    def host_unit(self) -> torch.Tensor | None:
        """Return one of the experts in host memory; None where there are none yet."""
        return next((units[0] for units in self._units.values()), None)

    @property
    def counts(self) -> PoolCounts:
        """Return what has been counted so far."""
        return PoolCounts(*map(sub, self._counted(), self._before))

    def _counted(self) -> PoolCounts:
        _, wanted, found, fetched, computed = self._tables.counts_host.tolist()
        work = (0, 0.0) if self.cpu is None else self.cpu.total
        return PoolCounts(wanted, found, fetched + self._bytes_prefetched, computed, *work)

    def reset_counts(self) -> None:
        """Count from here on: what is run at load says nothing of texts."""
        self._wait_for_card()
        self._before = self._counted()

    def prefetches_layers(self, rows: int) -> bool:
        """Return whether a pass of so many rows prefetches all experts of each layer, before any are chosen."""
        return all(
            rows * one.chosen >= _CHOICES_OF_ALL * one.num_experts and one.num_experts <= len(self.buffers)
            for one in self._rows
        )

    # --- a pass

    def begin_pass(self, rows: int, layers: range) -> None:
        """Begin a pass of so many rows through layers of these numbers; not while it is captured. What an interrupted
        one has left on its way is dropped: copies are made in order, so that a buffer's next one cannot overtake
        it."""
        if self.buffers.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._whole_layer, self._pass = None, layers
        self.end_pass()  # an interrupted one
        if self._is_placed:
            self._forget()
        if self.prefetches_layers(rows):
            self._begin_prefetching()
            for free in self._layer_free:
                self.engine.compute_record(free)  # behind the passes before this one
            return
        if self._cached is not None:
            self._end_prefetching()
        if self.cpu is not None:
            self.cpu.begin_pass()

    def end_pass(self) -> None:
        """End a pass: what follows on the current stream finds what is on its way."""
        if not self._in_background:
            return
        if self._background_stream is not None:
            torch.cuda.current_stream(self.buffers.device).wait_stream(self._background_stream)
        self._in_background.clear()

    def enter(self, layer: int) -> None:
        """Begin a layer. In a pass that prefetches layers, what is enqueued from now on finds all of its experts."""
        engine = self.engine
        if self._cached is None or layer not in self._layers:
            return
        row = self._row_of[layer]
        engine.wait(self._layer_free[row])  # the card may still fetch the buffers' numbers of the pass before
        self._prefetch_layer(row, keep=(row,))
        engine.compute_wait(self._layer_ready[row])
        for expert, buffer in self._arriving.pop(row).items():
            self._cached[row * self._width + expert] = buffer
            self._cached.move_to_end(row * self._width + expert, last=False)  # goes first once this has been computed
        numbers = [self._cached[row * self._width + expert] for expert in range(self._rows[row].num_experts)]
        self._numbers[row, : len(numbers)] = torch.tensor(numbers)
        copy_words(self._numbers[row], self._tables.buffers[row])
        self._whole_layer = layer

    def leave(self, layer: int) -> None:
        """End a layer, all of which has been enqueued: the next one's experts come while it is computed.

        Not before the layer is enqueued, which a queue that has no room for further copies would hold up. Where copies
        came first three quarters of the link's time were not hidden, whether layers took as long as their copies or
        four times that (8192 and 32768 tokens, an H200).
        """
        if self._whole_layer != layer:
            return
        row = self._row_of[layer]
        self.engine.compute_record(self._layer_free[row])
        self._whole_layer = None
        following = next(islice(self._layers, row + 1, None), None)
        if following is not None and following in self._pass:
            self._prefetch_layer(row + 1, keep=(row, row + 1))

    def _forget(self) -> None:
        """Let go of all experts, as a pass was interrupted between what the tables say and what it was to fetch."""
        self._wait_for_card()
        self._cached, self._is_placed = OrderedDict(), False

    def _begin_prefetching(self) -> None:
        """Take the tables from the card, unless the host has them."""
        self._arriving.clear()
        if self._cached is None:
            self._wait_for_card()
            if self.cpu is not None:
                self.cpu.measure_link(begins=True)
            owners, used = self._tables.owners.tolist(), self._tables.used.tolist()
            held = sorted((when, owner, n) for n, (when, owner) in enumerate(zip(used, owners, strict=True)))
            self._cached = OrderedDict((owner, n) for _, owner, n in held if owner >= 0)
        taken = set(self._cached.values())
        self._free = [n for n in range(len(self.buffers)) if n not in taken]

    def _end_prefetching(self) -> None:
        """Give the tables back to the card. Copies of an interrupted pass must not come behind what it fetches."""
        assert self._cached is not None
        self.engine.drain()
        self._arriving.clear()
        if self.cpu is not None:
            self.cpu.measure_link(begins=False)
        tables, now = self._tables, int(self._tables.counts_host[0])
        owners, used = torch.full((len(self.buffers),), -1, dtype=torch.int32), torch.full((len(self.buffers),), -NEVER)
        for age, (owner, buffer) in enumerate(reversed(self._cached.items())):
            owners[buffer], used[buffer] = owner, now - age
        numbers = torch.full((tables.buffers.numel(),), -1, dtype=torch.int32)
        for owner, buffer in self._cached.items():
            numbers[owner] = buffer
        for target, source in ((tables.owners, owners), (tables.used, used), (tables.buffers.view(-1), numbers)):
            target.copy_(source)
        tables.in_flight.zero_()
        self._cached = None

    def _prefetch_layer(self, row: int, *, keep: Collection[int]) -> None:
        """Begin to copy what is missing of a layer, into free buffers and those of layers that are not to be kept."""
        assert self._cached is not None
        arriving, cached, first = self._arriving.setdefault(row, {}), self._cached, row * self._width
        missing = [n for n in range(self._rows[row].num_experts) if n not in arriving and first + n not in cached]
        others = (owner for owner in cached if owner // self._width not in keep)
        buffers = [(self._free.pop(), self._always_free) for _ in range(min(len(missing), len(self._free)))]
        for owner in [*islice(others, len(missing) - len(buffers))]:
            buffers.append((cached.pop(owner), self._layer_free[owner // self._width]))
        taken = dict[Any, dict[int, int]]()
        for expert, (buffer, free) in zip(missing, buffers, strict=False):
            taken.setdefault(free, {})[expert] = buffer
        units, label = self._units[row], (EXPERTS, (self._layer_of[row],))
        for free, some in taken.items():
            copies = [(self.buffers[buffer, : len(units[0])], units[expert]) for expert, buffer in some.items()]
            self.engine.enqueue(copies, free=free, ready=self._layer_ready[row], label=label)
            self._bytes_prefetched += len(copies) * len(units[0])
            arriving.update(some)

    # --- on demand

    def fetch(self, layer: int, x: torch.Tensor, choices: torch.Tensor, y: torch.Tensor) -> Iterator[torch.Tensor]:
        """Fetch the experts that rows of a layer have chosen, in rounds of as many as there are buffers for, and yield
        the buffer of each expert in a round; see `ExpertStore.fetch` of `models.layers`."""
        row, units, tables = self._row_of[layer], self._layers[layer], self._tables
        if self._whole_layer == layer:
            yield tables.buffers[row, : units.num_experts]
            return
        host, cpu = self._host[row], self.cpu if len(x) <= MOST_CPU_ROWS else None
        if row in self._in_background:
            self.end_pass()
        if cpu is not None:
            cpu.fetch_rows(x)
        for number in range(-(-min(units.num_experts, choices.numel()) // self._room)):
            self._is_placed, is_first = True, number == 0
            place_experts(
                choices, tables, row, experts=units.num_experts, room=self._room, unit_bytes=host.shape[1],
                cpu=None if cpu is None else cpu.share, is_first=is_first,
            )  # fmt: skip
            self._fetch(tables.fetched, tables.fetched_bytes, host)
            if cpu is not None and is_first:
                self._fetch_in_background(row)
            self._is_placed = False
            yield tables.found[: units.num_experts]
        if cpu is not None:
            cpu.give_results(y)

    def _fetch_in_background(self, row: int) -> None:
        """Copy what a layer has left to the CPU, while the current stream goes on."""
        stream, tables = self._background_stream, self._tables
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.buffers.device))
        self._in_background.add(row)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._fetch(tables.background[row], tables.background_bytes[row], self._host[row], in_background=True)
            release_experts(tables, row)

    def _fetch(
        self, experts: torch.Tensor, nbytes: torch.Tensor, host: torch.Tensor, *, in_background: bool = False
    ) -> None:  # fmt: skip
        """Copy experts of a layer as tables say, on the current stream."""
        if self._pace is not None:
            self._pace(nbytes, begins=True)
        fetch_experts(experts, host, self.buffers, in_background=in_background)
        if self._pace is not None:
            self._pace(nbytes)

    def _wait_for_card(self) -> None:
        """Wait for what the current stream has to do."""
        if self.buffers.is_cuda:
            torch.cuda.current_stream(self.buffers.device).synchronize()
