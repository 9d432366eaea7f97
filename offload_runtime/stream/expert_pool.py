"""The experts that are in a card's memory, and how those come there that a pass turns out to need: fetched on demand.

Experts are units of bytes, in page-locked host memory and in a pool of equal buffers on the card. In a pass of few rows
the card looks up itself where each layer's choices are, and waits for the host only where some are not in the pool:
these are copied into the buffers that were used least recently. The host comes behind, and takes note of what was used.
In a pass that needs most experts of a layer all that are missing are prefetched while the layer before computes; the
buffers that they take are the first ones to be used again, so that the rest of the pool keeps what it has. A pool of
all experts holds them for ever, and the host takes no part.

One thread at a time uses a pool, and one stream reads its buffers.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from offload_runtime_kernels.copy_words import copy_words
from offload_runtime_kernels.experts_cpu import HostExperts
from offload_runtime_kernels.host_choices import ALL, CHOICE_BITS, NOTHING, await_buffers, report_choices

from offload_runtime.errors import DeviceError
from offload_runtime.stream.copy_engine import CopyEngine
from offload_runtime.stream.cpu_experts import MOST_CPU_ROWS, AskedRows, CpuExperts

EXPERTS = "experts"
# A pass prefetches whole layers if it has so many times as many choices as a layer has experts: at least 1 - e^-2 of
# them would be chosen.
_CHOICES_OF_ALL = 2
# Looks for what the card reports, after which it is asked whether it still works.
_LOOKS = 4096


class ExpertUnits(NamedTuple):
    """Says how many experts a layer has, and how many of them a row chooses."""

    num_experts: int
    chosen: int


class PoolCounts(NamedTuple):
    """Counts the experts that layers of passes of few rows have wanted, each once whatever the rows; of these the ones
    that were in the pool; the bytes of all experts that were begun to be copied; and those that the CPU has
    computed."""

    wanted: int = 0
    found: int = 0
    bytes_begun: int = 0
    computed: int = 0
    cpu_bytes: int = 0
    cpu_s: float = 0.0


class ExpertPool:
    """Holds the experts of a card's layers, or some of them.

    Args:
        buffers: uint8 [S, bytes of the largest expert], on the card. Where all experts are there, those of the first
            layer come first, by their numbers.
        layers: Those of the card that have experts, by their numbers, in the order of a pass; those of a head, whose
            passes are others, have numbers behind them.
        engine: Copies what is missing; None where nothing is.
        most_choices: Of the rows that a layer is given at once.
        cpu: Computes some of what is missing; None: all of it is fetched.
    """

    def __init__(
        self, buffers: torch.Tensor, layers: Mapping[int, ExpertUnits], engine: CopyEngine | None = None, *,
        most_choices: int = 0, cpu: CpuExperts | None = None,
    ) -> None:  # fmt: skip
        self.buffers, self.engine, self.cpu, self._counts = buffers, engine, cpu, PoolCounts()
        self._device, self._on_card = buffers.device, buffers.is_cuda
        self._layers, most_chosen = layers, max(one.chosen for one in layers.values())
        # By layer the bytes of each expert, host; not where all are in the pool, and until they are added.
        self._units = dict[int, tuple[torch.Tensor, ...]]()
        locked, most = buffers.is_cuda and engine is not None, max(one.num_experts for one in layers.values())
        # By layer and expert the number of the buffer that has it, or -1, for the card to look up; and the same as it
        # was given to a pass that looks nothing up, on the host and on the card.
        self._table = torch.full((len(layers), most), -1, dtype=torch.int32, pin_memory=locked)
        self._buffers_of_host = torch.full_like(self._table, -1, pin_memory=locked)
        self._numbers = [memoryview(row) for row in self._table.numpy()]  # the table by layer, to be written
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._whole_layer: int | None = None  # the one whose experts are all in the pool, prefetched
        if engine is None:
            first = 0
            for buffers_of, one in zip(self._buffers_of_host, layers.values(), strict=True):
                buffers_of[: one.num_experts] = torch.arange(first, first + one.num_experts)
                first += one.num_experts
        self._buffers_of = self._buffers_of_host.to(buffers.device, copy=True)
        if engine is None:
            return
        assert len(buffers) >= most_chosen, "there is room for what a row chooses"
        # By layer what the card has reported, NOTHING until it has. The newest ticket of what it waits for and that of
        # the last layer, and the one that the host has released.
        self._reported_host = torch.full((len(layers), most_choices), NOTHING, dtype=torch.int64, pin_memory=locked)
        self._reported = self._reported_host.numpy()
        self._tickets = torch.zeros(2, dtype=torch.int32, device=buffers.device)
        self._released_host = torch.zeros(1, dtype=torch.int32, pin_memory=locked)
        self._released: Any = self._released_host.numpy()
        self._has_given_up = False
        # Buffers by layer and expert, the least recently used first.
        self._cached: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = [*range(len(buffers))]
        self._prefetches_layers = False  # whether the running pass does
        self._pass = range(0)  # the numbers of its layers
        self._arriving: dict[int, dict[int, int]] = {}  # by layer, buffers of experts on their way
        self._demand_ready, self._always_free, self._prefetched_ready = (engine.new_event() for _ in range(3))
        # One buffer is for an expert that the CPU computes and the idle link prefetches for later passes.
        self._reserved = int(cpu is not None and len(buffers) > most_chosen)
        self._room = len(buffers) - self._reserved
        self._prefetched: dict[tuple[int, int], int] = {}
        # Of each layer: what was prefetched has arrived; what was enqueued has read its buffers.
        self._layer_ready, self._layer_free = ({layer: engine.new_event() for layer in layers} for _ in range(2))

    @property
    def is_whole(self) -> bool:
        """Return whether all experts are there."""
        return self.engine is None

    def add(self, layer: int, host: torch.Tensor, on_cpu: HostExperts | None = None) -> None:
        """Let a layer's experts be fetched from host memory, uint8 [E, bytes of one], or computed on the CPU there."""
        self._units[layer] = host.unbind()
        if self.cpu is not None and on_cpu is not None:
            self.cpu.add(layer, on_cpu, host)

    def held(self, layer: int) -> torch.Tensor:
        """Return the buffers of a layer's experts, by their numbers, in a pool of all: uint8 [E, bytes of a buffer]."""
        assert self.is_whole
        first = int(self._buffers_of_host[self._row_of[layer], 0])
        return self.buffers[first : first + self._layers[layer].num_experts]

    @property
    def host_unit(self) -> torch.Tensor | None:
        """Return one of the experts in host memory; None where there are none yet."""
        return next((units[0] for units in self._units.values()), None)

    @property
    def counts(self) -> PoolCounts:
        """Return what has been counted so far."""
        work = (0, 0.0) if self.cpu is None else self.cpu.total
        return self._counts._replace(cpu_bytes=work[0], cpu_s=work[1])

    def reset_counts(self) -> None:
        """Count from here on: what is run at load says nothing of texts."""
        self._counts = PoolCounts()

    @property
    def bytes_begun(self) -> int:
        """Return bytes of all experts that were begun to be copied."""
        return self._counts.bytes_begun

    def prefetches_layers(self, rows: int) -> bool:
        """Return whether a pass of so many rows prefetches all experts of each layer, before any are chosen."""
        layers = self._layers.values()
        return not self.is_whole and all(
            rows * one.chosen >= _CHOICES_OF_ALL * one.num_experts and one.num_experts <= len(self.buffers)
            for one in layers
        )

    def can_capture(self, rows: int) -> bool:
        """Return whether a pass of so many rows needs the host once a layer at most, since the pool has room for all
        that they may choose."""
        layers = self._layers.values()
        if self.is_whole:
            return True
        return not self.prefetches_layers(rows) and all(self._fits(one, rows * one.chosen) for one in layers)

    def _fits(self, units: ExpertUnits, choices: int) -> bool:
        """Return whether the pool has room for all experts of a layer that so many choices may name."""
        return min(units.num_experts, choices) <= self._room

    # --- a pass

    def begin_pass(self, rows: int, layers: range) -> None:
        """Begin a pass of so many rows through layers of these numbers. What an interrupted one has left on its way is
        dropped: copies are made in order, so that a buffer's next one cannot overtake it."""
        if self.engine is None:
            return
        if self._has_given_up:
            self._wait_for_card()
            self._reported.fill(NOTHING)
            self._released[0], self._has_given_up = 0, False
        self._arriving.clear()
        if len(self._free) + len(self._cached) + len(self._prefetched) < len(self.buffers):
            self._free = [*{*range(len(self.buffers))}.difference(self._cached.values(), self._prefetched.values())]
        looked_up = not self._prefetches_layers
        self._whole_layer, self._prefetches_layers, self._pass = None, self.prefetches_layers(rows), layers
        if self._prefetches_layers:
            if looked_up:
                self._wait_for_card()  # the pass before may still look up what is about to go
            if self._prefetched:
                self._take_prefetched()
        for free in self._layer_free.values() if self._prefetches_layers else ():
            self.engine.compute_record(free)  # behind the passes before this one

    def enter(self, layer: int) -> None:
        """Begin a layer. In a pass that prefetches layers, what is enqueued from now on finds all of its experts."""
        engine = self.engine
        if engine is None or not self._prefetches_layers or layer not in self._layers:
            return
        engine.wait(self._layer_free[layer])  # the card may still fetch the buffers' numbers of the pass before
        self._prefetch_layer(layer, keep=(layer,))
        engine.compute_wait(self._layer_ready[layer])
        for expert, buffer in self._arriving.pop(layer).items():
            self._hold(layer, expert, buffer)
            self._cached.move_to_end((layer, expert), last=False)  # the first to go, once this layer has been computed
        host, buffers = self._buffers_of_layer(layer)
        host.copy_(self._table[self._row_of[layer], : len(host)])
        copy_words(host, buffers)
        self._whole_layer = layer

    def leave(self, layer: int) -> None:
        """End a layer, all of which has been enqueued: the next one's experts come while it is computed.

        Not before the layer is enqueued, which a queue that has no room for further copies would hold up. Where copies
        came first three quarters of the link's time were not hidden, whether layers took as long as their copies or
        four times that (8192 and 32768 tokens, an H200).
        """
        if self.engine is None or self._whole_layer != layer:
            return
        self.engine.compute_record(self._layer_free[layer])
        self._whole_layer = None
        following = next(islice(self._layers, self._row_of[layer] + 1, None), None)
        if following is not None and following in self._pass:
            self._prefetch_layer(following, keep=(layer, following))

    def _prefetch_layer(self, layer: int, *, keep: Collection[int]) -> None:
        """Begin to copy what is missing of a layer, into free buffers and those of layers that are not to be kept."""
        arriving = self._arriving.setdefault(layer, {})
        missing = [
            n for n in range(self._layers[layer].num_experts) if n not in arriving and (layer, n) not in self._cached
        ]
        others = [key for key in self._cached if key[0] not in keep][: max(0, len(missing) - len(self._free))]
        buffers = [(self._free.pop(), self._always_free) for _ in range(min(len(missing), len(self._free)))]
        buffers += [(self._drop(key), self._layer_free[key[0]]) for key in others]
        taken = dict[Any, dict[int, int]]()
        for expert, (buffer, free) in zip(missing, buffers, strict=False):
            taken.setdefault(free, {})[expert] = buffer
        for free, some in taken.items():
            self._copy(layer, some, free, self._layer_ready[layer])
            arriving.update(some)

    def _copy(self, layer: int, buffers: Mapping[int, int], free: Any, ready: Any) -> None:
        """Begin to copy experts into a buffer each."""
        assert self.engine is not None
        units, counts = self._units[layer], self._counts
        size = len(units[0])
        copies = [(self.buffers[buffer, :size], units[expert]) for expert, buffer in buffers.items()]
        self.engine.enqueue_all(copies, free=free, ready=ready, label=(EXPERTS, (layer,)))
        self._counts = counts._replace(bytes_begun=counts.bytes_begun + len(copies) * size)

    def _buffers_of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffer of each expert of a layer, [E] int32: on the host, and on the card."""
        row, count = self._row_of[layer], self._layers[layer].num_experts
        return self._buffers_of_host[row, :count], self._buffers_of[row, :count]

    def _hold(self, layer: int, expert: int, buffer: int) -> None:
        """Note that a buffer has an expert, the one that was used last."""
        self._cached[layer, expert] = self._numbers[self._row_of[layer]][expert] = buffer

    def _drop(self, key: tuple[int, int] | None = None) -> int:
        """Let go of an expert, None: the one that was not used for longest, and return its buffer."""
        key = next(iter(self._cached)) if key is None else key
        self._numbers[self._row_of[key[0]]][key[1]] = -1
        return self._cached.pop(key)

    # --- on demand

    def fetch(
        self, layer: int, x: torch.Tensor, choices: torch.Tensor, y: torch.Tensor,
        host_action: Callable[[Callable[[], None], Callable[[], None]], None],
    ) -> Iterator[torch.Tensor]:  # fmt: skip
        """Fetch the experts that rows of a layer have chosen, in rounds of as many as there are buffers for, and yield
        the buffer of each expert in a round; see `ExpertStore.fetch` of `models.layers`. Where `can_capture` says so
        there is one round, and the host acts once."""
        host, buffers = self._buffers_of_layer(layer)
        if self.is_whole or self._whole_layer == layer:
            yield buffers
            return
        row, number = self._row_of[layer], choices.numel()
        table, reported = self._table[row, : len(host)], self._reported_host[row, :number]
        cpu = self.cpu if len(x) <= MOST_CPU_ROWS else None
        asked = None if cpu is None else cpu.asked(*choices.shape)
        if cpu is not None:
            cpu.fetch_rows(x)
        remaining, fits = list[int](), self._fits(self._layers[layer], number)
        action = partial(self._act_on_choices, layer, self._reported[row, :number], remaining, asked, fits=fits)
        try:
            report_choices(choices.view(-1), table, self._tickets, reported)
            host_action(action, self.give_up)
            await_buffers(self._tickets, self._released_host, table if fits else host, buffers)
        except BaseException:
            self.give_up()
            raise
        yield buffers
        while remaining:
            self._wait_for_card()
            self._fetch_round(layer, remaining)
            copy_words(host, buffers)
            yield buffers
        if cpu is not None:
            cpu.give_results(y, self._tickets[1:])

    def _act_on_choices(
        self, layer: int, reported: Any, remaining: list[int], asked: AskedRows | None, *, fits: bool
    ) -> None:  # fmt: skip
        """Act on what rows of a layer have chosen, when it is `reported`: have the CPU compute some of what is missing,
        if it is `asked`, and fetch the first round of the `remaining` experts, which is all of them if they fit.

        Where something is missing the card waits for this, and mostly the link, while the CPU's threads fill the
        caches: an operation of torch takes some ten times as long as it does alone, so that there are none.
        """
        assert self.engine is not None
        chosen, ticket = self._choices_of(reported)
        cpu, new = None if asked is None else self.cpu, None
        if cpu is not None:
            cpu.finish()  # which the card has waited for
        if self._prefetched and self.engine.is_done(self._prefetched_ready):
            self._take_prefetched()
        remaining[:] = dict.fromkeys(chosen)
        wanted, missing = len(remaining), [one for one in remaining if (layer, one) not in self._cached]
        computed = self._for_cpu(layer, missing, cpu) if cpu is not None and missing else []
        if asked is not None and cpu is not None:
            cpu.begin(layer, asked, chosen, computed)
        if computed:
            remaining[:] = [expert for expert in remaining if expert not in computed]
        self._fetch_round(layer, remaining, writes=not fits)
        if computed and cpu is not None and cpu.share is None and self._reserved and not self._prefetched:
            # What the CPU was given is prefetched by the link, which is idle, for later tokens.
            new = {computed[0]: self._free.pop() if self._free else self._drop()}
        self._released[0] = ticket  # behind the table, as processors of x86 keep the order of what they write
        counts = self._counts
        self._counts = PoolCounts(
            counts.wanted + wanted, counts.found + wanted - len(missing), counts.bytes_begun,
            counts.computed + len(computed),
        )  # fmt: skip
        if new is not None:  # card and CPU have their work by now
            self._copy(layer, new, self._always_free, self._prefetched_ready)
            self._prefetched = {(layer, expert): buffer for expert, buffer in new.items()}

    def _choices_of(self, reported: Any) -> tuple[list[int], int]:
        """Return what is `reported`, numpy's int64 [N k], when all of it is, and the ticket of a card that waits, or 0;
        then there is nothing again. Raises `DeviceError` where the card has stopped."""
        looks = 0
        while reported[-1] == NOTHING or (reported == NOTHING).any():
            has_stopped = looks > _LOOKS and torch.cuda.current_stream(self._device).query()
            if has_stopped and (reported == NOTHING).any():
                raise DeviceError(f"{self._device} has stopped in the middle of a pass: load the runtime again")
            looks = 0 if looks > _LOOKS else looks + 1
            time.sleep(0)  # others may run meanwhile
        words = reported.tolist()
        reported.fill(NOTHING)
        return [word & (1 << CHOICE_BITS) - 1 for word in words], words[0] >> CHOICE_BITS

    def give_up(self) -> None:
        """Let the card go on to the end of a pass in which the host cannot act any more, whatever comes of it: nothing
        that is enqueued waits for the host until the next pass begins."""
        self._has_given_up = True
        self._released[0] = ALL

    def _for_cpu(self, layer: int, missing: list[int], cpu: CpuExperts) -> list[int]:
        """Return which of the missing experts of a layer the CPU is to compute."""
        prefetched = self._prefetched
        missing.sort(key=lambda expert: (layer, expert) in prefetched)  # those on their way come last
        by_link = len(missing) - cpu.split(layer, len(missing), queued=len(prefetched))
        if any((layer, expert) in prefetched for expert in missing[:by_link]):
            self._take_prefetched()
        return missing[by_link:]

    def _fetch_round(self, layer: int, remaining: list[int], *, writes: bool = True) -> None:
        """Take those of the `remaining` experts that are in the pool, and fetch as many others as there are buffers
        for; the buffers of the round are written for the card, unless it looks them up. It reads none meanwhile."""
        assert self.engine is not None
        cached, room = self._cached, self._room
        here = [expert for expert in remaining if (layer, expert) in cached][:room]
        for expert in here:
            cached.move_to_end((layer, expert))
        if len(here) < len(remaining) and len(here) < room:
            missing = [expert for expert in remaining if (layer, expert) not in cached][: room - len(here)]
            short = len(missing) - len(self._free)
            self._free += [self._drop() for _ in range(short)]
            fetched = dict(zip(missing, self._free[::-1], strict=False))
            self._copy(layer, fetched, self._always_free, self._demand_ready)
            self.engine.host_wait(self._demand_ready)
            del self._free[-len(fetched) :]
            for expert, buffer in fetched.items():
                self._hold(layer, expert, buffer)
            here += missing
        remaining[:] = [] if len(here) == len(remaining) else [one for one in remaining if one not in here]
        if writes:
            host, _ = self._buffers_of_layer(layer)
            host.fill_(-1)
            for expert in here:
                host[expert] = cached[layer, expert]

    def _take_prefetched(self) -> None:
        """Make the prefetched expert one of the pool's, when it is there."""
        assert self.engine is not None
        self.engine.host_wait(self._prefetched_ready)
        for (layer, expert), buffer in self._prefetched.items():
            self._hold(layer, expert, buffer)
        self._prefetched.clear()

    def _wait_for_card(self) -> None:
        """Wait for what the current stream has to do."""
        if self._on_card:
            torch.cuda.current_stream(self._device).synchronize()
