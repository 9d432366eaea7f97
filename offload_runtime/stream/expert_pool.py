"""The experts that are in a card's memory, and how those that a pass turns out to need come there: the demand lane.

Experts are units of bytes, in page-locked host memory and in a pool of equal buffers on the card. In a pass of few rows
the host looks at each layer's choice, finds what is there, and has the rest copied into the buffers that were used
least recently. In a pass that needs most experts of a layer all that are missing are brought before it is asked for
them, while the layer before computes; the buffers that they take are the first ones to be used again, so that the rest
of the pool keeps what it has. A pool of all experts holds them for ever, and nobody asks the host.

One thread at a time uses a pool, and one stream reads its buffers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from offload_runtime_kernels.copy_words import copy_words

from offload_runtime.stream.copy_engine import CopyEngine
from offload_runtime.stream.cpu_experts import MOST_CPU_ROWS, CpuExperts

EXPERTS = "experts"
# A pass brings all experts of its layers if it has so many times as many choices of each: 1 - e^-2 of them, at the
# least, would be chosen.
_CHOICES_OF_ALL = 2


class ExpertUnits(NamedTuple):
    """Has the experts of a layer: how many there are, how many of them a row chooses, and uint8 [E, bytes of one],
    host; None where all are in the pool."""

    num_experts: int
    chosen: int
    host: torch.Tensor | None


class PoolCounts(NamedTuple):
    """Counts the experts that layers of passes of few rows have wanted, each once whatever the rows; of these the ones
    that were in the pool; the bytes of all experts that were begun to be copied; and those that the CPU has
    computed."""

    wanted: int = 0
    found: int = 0
    bytes_begun: int = 0
    computed: int = 0


class ExpertPool:
    """Holds the experts of a card's layers, or some of them.

    Args:
        buffers: uint8 [S, bytes of the largest expert], on the card. Where all experts are there, those of the first
            layer come first, by their numbers.
        layers: Those of the card that have experts, by their numbers, in the order of a pass.
        engine: Copies what is missing; None where nothing is.
        most_choices: Of the rows that a layer is given at once.
        cpu: Computes some of what is missing; None: it is all brought.
    """

    def __init__(
        self, buffers: torch.Tensor, layers: Mapping[int, ExpertUnits], engine: CopyEngine | None = None, *,
        most_choices: int = 0, cpu: CpuExperts | None = None,
    ) -> None:  # fmt: skip
        self.buffers, self.engine, self.cpu, self.counts = buffers, engine, cpu, PoolCounts()
        self._layers, most_chosen = layers, max(one.chosen for one in layers.values())
        locked, most = buffers.is_cuda and engine is not None, max(one.num_experts for one in layers.values())
        # Of each layer and expert, the buffer that a pass is to find it in: where the host writes it, and on the card.
        self._buffers_of_host = torch.full((len(layers), most), -1, dtype=torch.int32, pin_memory=locked)
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._whole_layer: int | None = None  # all of whose experts are there, by a pass of many rows
        if engine is None:
            first = 0
            for buffers_of, one in zip(self._buffers_of_host, layers.values(), strict=True):
                buffers_of[: one.num_experts] = torch.arange(first, first + one.num_experts)
                first += one.num_experts
        self._buffers_of = self._buffers_of_host.to(buffers.device, copy=True)
        if engine is None:
            return
        assert len(buffers) >= most_chosen, "there is room for what a row chooses"
        self._choices_host = torch.zeros(most_choices, dtype=torch.int64, pin_memory=locked)
        # Buffers by layer and expert; those come first that were used least recently.
        self._at: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = [*range(len(buffers))]
        self._brings_all = False  # the running pass does
        self._coming: dict[int, dict[int, int]] = {}  # by layer, buffers of experts that were not waited for
        self._demanded, self._never, self._late_ready = (engine.new_event() for _ in range(3))
        # A buffer for what the CPU has computed and the link brings without a hurry, for later passes.
        self._spare = int(cpu is not None and len(buffers) > most_chosen)
        self._late: dict[tuple[int, int], int] = {}
        # Of each layer: what was brought for it is there; what has been enqueued of it has read its buffers.
        self._brought, self._read = ({layer: engine.new_event() for layer in layers} for _ in range(2))

    @property
    def is_whole(self) -> bool:
        """Return whether all experts are there."""
        return self.engine is None

    @property
    def host_unit(self) -> torch.Tensor:
        """Return one of the experts in host memory, of a pool that is not whole."""
        host = next(iter(self._layers.values())).host
        assert host is not None
        return host[0]

    @property
    def bytes_begun(self) -> int:
        """Return bytes of all experts that were begun to be copied."""
        return self.counts.bytes_begun

    def brings_all(self, rows: int) -> bool:
        """Return whether a pass of so many rows brings all experts of its layers, before it knows its choices."""
        layers = self._layers.values()
        return not self.is_whole and all(
            rows * one.chosen >= _CHOICES_OF_ALL * one.num_experts and one.num_experts <= len(self.buffers)
            for one in layers
        )

    def looks_once(self, rows: int) -> bool:
        """Return whether the host looks once at most at what so many rows choose of a layer, for which all there is
        room."""
        layers = self._layers.values()
        if self.is_whole:
            return True
        room = len(self.buffers) - self._spare
        return not self.brings_all(rows) and all(min(one.num_experts, rows * one.chosen) <= room for one in layers)

    # --- a pass

    def begin_pass(self, rows: int) -> None:
        """Begin a pass of so many rows. What an interrupted one has left on its way is dropped: copies are made in
        order, so that a buffer's next one cannot overtake it."""
        if self.engine is None:
            return
        self._coming.clear()
        if len(self._free) + len(self._at) + len(self._late) < len(self.buffers):
            self._free = [*{*range(len(self.buffers))}.difference(self._at.values(), self._late.values())]
        self._whole_layer, self._brings_all = None, self.brings_all(rows)
        if self._brings_all and self._late:
            self._take_late()
        for read in self._read.values() if self._brings_all else ():
            self.engine.compute_record(read)  # by passes before this one

    def enter(self, layer: int) -> None:
        """Come to a layer: what a pass of many rows brings is there for what is enqueued from now on, and the next
        layer's is on its way."""
        engine = self.engine
        if engine is None or not self._brings_all or layer not in self._layers:
            return
        engine.wait(self._read[layer])  # the card may still fetch the buffers' numbers of the pass before
        self._bring_missing(layer, keep=(layer,))
        engine.compute_wait(self._brought[layer])
        for expert, buffer in self._coming.pop(layer).items():
            self._at[layer, expert] = buffer
            self._at.move_to_end((layer, expert), last=False)  # the first to go, once this layer has been computed
        self._write_buffers(layer, range(self._layers[layer].num_experts))
        copy_words(*self._buffers_of_layer(layer))
        self._whole_layer = layer
        following = next(islice(self._layers, self._row_of[layer] + 1, None), None)
        if following is not None:
            self._bring_missing(following, keep=(layer, following))

    def leave(self, layer: int) -> None:
        """Leave a layer, all of which has been enqueued."""
        if self.engine is not None and self._whole_layer == layer:
            self.engine.compute_record(self._read[layer])
            self._whole_layer = None

    def _bring_missing(self, layer: int, *, keep: Collection[int]) -> None:
        """Begin to copy what is missing of a layer, as far as there are buffers of others than the layers to keep."""
        coming = self._coming.setdefault(layer, {})
        missing = [n for n in range(self._layers[layer].num_experts) if n not in coming and (layer, n) not in self._at]
        others = [key for key in self._at if key[0] not in keep][: max(0, len(missing) - len(self._free))]
        buffers = [(self._free.pop(), self._never) for _ in range(min(len(missing), len(self._free)))]
        buffers += [(self._at.pop(key), self._read[key[0]]) for key in others]
        for expert, (buffer, read) in zip(missing, buffers, strict=False):
            self._copy(layer, expert, buffer, read, self._brought[layer])
            coming[expert] = buffer

    def _copy(self, layer: int, expert: int, buffer: int, free: Any, ready: Any) -> None:
        """Begin to copy an expert into a buffer."""
        units, counts = self._layers[layer], self.counts
        assert self.engine is not None and units.host is not None
        source = units.host[expert]
        to, label = self.buffers[buffer, : source.nbytes], (EXPERTS, (layer, expert))
        self.engine.enqueue(to, source, free=free, ready=ready, label=label)
        self.counts = counts._replace(bytes_begun=counts.bytes_begun + source.nbytes)

    def _buffers_of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffer of each expert of a layer, [E] int32: on the host, and on the card."""
        row, count = self._row_of[layer], self._layers[layer].num_experts
        return self._buffers_of_host[row, :count], self._buffers_of[row, :count]

    def _write_buffers(self, layer: int, experts: Collection[int]) -> None:
        """Write where some experts of a layer are, for the card to fetch; the others have none."""
        buffers = self._buffers_of_host[self._row_of[layer]].numpy()
        buffers.fill(-1)
        for expert in experts:
            buffers[expert] = self._at[layer, expert]

    # --- what a layer chooses

    def present(
        self, layer: int, x: torch.Tensor, choices: torch.Tensor, y: torch.Tensor,
        between: Callable[[Callable[[], None]], None],
    ) -> Iterator[torch.Tensor]:  # fmt: skip
        """Yield the buffers of some of the experts `choices` of a layer after the other; see `ExpertStore.present` of
        `models.layers`. There is one turn where `looks_once` says so, which may be captured in two graphs."""
        host, buffers = self._buffers_of_layer(layer)
        if self.is_whole or self._whole_layer == layer:
            yield buffers
            return
        chosen, cpu = self._choices_host[: choices.numel()], self.cpu if len(x) <= MOST_CPU_ROWS else None
        copy_words(choices.view(-1).view(torch.int32), chosen.view(torch.int32))
        if cpu is not None:
            cpu.fetch_rows(x)
        left = list[int]()
        between(partial(self._look, layer, chosen.view(choices.shape), left, cpu))
        if cpu is not None:
            cpu.give_results(y)
        while True:
            copy_words(host, buffers)
            yield buffers
            if not left:
                return
            between(partial(self._give_turns, layer, left))

    def _look(self, layer: int, chosen: torch.Tensor, left: list[int], cpu: CpuExperts | None) -> None:
        """See what a layer has chosen, [N, k] int64, host; have the CPU compute some of what is missing, and give some
        of the rest a turn."""
        self._wait_for_card()
        assert self.engine is not None
        if self._late and (cpu is None or self.engine.is_done(self._late_ready)):
            self._take_late()
        left[:] = dict.fromkeys(chosen.view(-1).tolist())
        missing = [expert for expert in left if (layer, expert) not in self._at]
        computed = list[int]()
        if cpu is not None and missing:
            host = self._layers[layer].host
            assert host is not None
            missing.sort(key=lambda expert: (layer, expert) in self._late)  # which are on their way without a hurry
            by_link = len(missing) - cpu.split(len(missing), host.shape[1], queued=len(self._late))
            computed = missing[by_link:]
            if any((layer, expert) in self._late for expert in missing[:by_link]):
                self._take_late()
        counts = self.counts
        self.counts = counts._replace(
            wanted=counts.wanted + len(left), found=counts.found + len(left) - len(missing),
            computed=counts.computed + len(computed),
        )  # fmt: skip
        left[:] = [expert for expert in left if expert not in computed]
        if cpu is None or not computed:
            self._give_turns(layer, left)
            return
        units = self._layers[layer].host
        assert units is not None
        cpu.begin(layer, chosen, [(expert, units[expert]) for expert in computed])
        self._give_turns(layer, left)
        if self._spare and not self._late and cpu.share is None:  # the link brings one for those that come after
            buffer = self._free.pop() if self._free else self._at.popitem(last=False)[1]
            self._copy(layer, computed[0], buffer, self._never, self._late_ready)
            self._late[layer, computed[0]] = buffer
        cpu.finish()

    def _give_turns(self, layer: int, left: list[int]) -> None:
        """Give those of the experts that are `left` a turn that are there, and as many others as there are buffers
        for; these are there for what is enqueued from now on."""
        assert self.engine is not None
        self._wait_for_card()  # which may still read any buffer, and their numbers
        room = len(self.buffers) - self._spare
        here = [expert for expert in left if (layer, expert) in self._at][:room]
        for expert in here:
            self._at.move_to_end((layer, expert))
        missing = [expert for expert in left if (layer, expert) not in self._at][: room - len(here)]
        if missing:
            short = len(missing) - len(self._free)
            self._free += [self._at.popitem(last=False)[1] for _ in range(short)]
            brought = {(layer, one): buffer for one, buffer in zip(missing, self._free[::-1], strict=False)}
            for (_, expert), buffer in brought.items():
                self._copy(layer, expert, buffer, self._never, self._demanded)
            self.engine.compute_wait(self._demanded)
            del self._free[-len(brought) :]
            self._at.update(brought)
        turns = {*here, *missing}
        left[:] = [expert for expert in left if expert not in turns]
        self._write_buffers(layer, turns)

    def _take_late(self) -> None:
        """Take up what has come late, or wait for it."""
        assert self.engine is not None
        self.engine.compute_wait(self._late_ready)
        self._at.update(self._late)
        self._late.clear()

    def _wait_for_card(self) -> None:
        """Wait for what the current stream has to do."""
        if self.buffers.is_cuda:
            torch.cuda.current_stream(self.buffers.device).synchronize()
