"""What the CPU computes of a layer's missing experts, where they lie, while the link brings the others.

Both get so much that they end together, by what was measured of them lately: a split that was calibrated before has
been eight times slower elsewhere. Where an expert is computed changes no bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from offload_runtime_kernels.copy_words import copy_words
from offload_runtime_kernels.experts_cpu import ExpertsCpu, HostExperts, HostRows, Work
from offload_runtime_kernels.host_rows import take_host_rows

from offload_runtime.sizes import GB
from offload_runtime.stream.copy_engine import CopyEngine

# Rows up to which the CPU is asked: it decodes weights once for four of them.
MOST_CPU_ROWS = 32
# Each measurement counts as much as all later ones of so many bytes, at the beginning a guess does.
_REMEMBERED_BYTES, _GUESSED_GBPS = 2 * GB, 20.0
_ASKED_AGAIN = 64  # of layers that miss something, so that a CPU that has had nothing to do is measured again


class Rate:
    """Averages how many bytes a second something does."""

    def __init__(self) -> None:
        self._nbytes, self._seconds = _REMEMBERED_BYTES / 8, _REMEMBERED_BYTES / 8 / (_GUESSED_GBPS * GB)

    def note(self, nbytes: int, seconds: float) -> None:
        """Take up what was measured."""
        kept = 1 - min(1.0, nbytes / _REMEMBERED_BYTES)
        self._nbytes, self._seconds = kept * self._nbytes + nbytes, kept * self._seconds + seconds

    def seconds(self, nbytes: int) -> float:
        """Return how long so many bytes are expected to take."""
        return nbytes * self._seconds / self._nbytes


class AskedRows(NamedTuple):
    """Has rows of a layer in host memory, and in numpy's arrays their choices, [N k] int64, and of each whether the CPU
    computes it, [N k] int32, both to be written."""

    rows: HostRows
    choices: Any
    computed: Any


class HostLayer(NamedTuple):
    """Has a layer's experts as the CPU computes them, and where they lie: the address of the first one, from one to the
    next, and the bytes of one."""

    experts: HostExperts
    address: int
    step: int
    nbytes: int


class CpuExperts:
    """Has the CPU compute experts of a card's layers for passes of few rows.

    Args:
        threads: That compute; several cards may share them.
        share: Of the missing experts, that of the CPU; None: by rates measured while serving.
        engine: Brings the others.
        num_chosen: Most experts of a row.
        x: Like the rows of a pass: their dtype, width and device.

    Attributes:
        total: All that has been computed so far.
    """

    def __init__(
        self, threads: ExpertsCpu, share: float | None, engine: CopyEngine, *, num_chosen: int, x: torch.Tensor
    ) -> None:  # fmt: skip
        self._threads, self.share, self._engine = threads, share, engine
        self._layers, self.total = dict[int, HostLayer](), Work(0, 0.0)
        self._x_host, y_host = (
            torch.zeros(rows, x.shape[1], dtype=x.dtype, pin_memory=x.is_cuda)
            for rows in (MOST_CPU_ROWS, MOST_CPU_ROWS * num_chosen)
        )
        self._y_host = y_host.view(-1)
        # By row and choice whether the CPU computes it, and whether it has computed all of them.
        self._computed = torch.zeros(len(y_host), dtype=torch.int32, pin_memory=x.is_cuda)
        self._ready = torch.ones(1, dtype=torch.int32, pin_memory=x.is_cuda)
        self._marks = self._computed.numpy()  # the same
        self._choices = torch.zeros(len(y_host), dtype=torch.int64)
        self._rates = {"link": Rate(), "CPU": Rate()}
        self._copied = engine.bytes_copied, engine.copy_seconds()
        self._owed, self._idle, self._is_busy, self._is_marked = 0.0, 0, False, False

    def add(self, layer: int, experts: HostExperts, host: torch.Tensor) -> None:
        """Let a layer's experts be computed where they lie, uint8 [E, bytes of one]."""
        self._layers[layer] = HostLayer(experts, host.data_ptr(), host.stride(0), host.shape[1])

    def fetch_rows(self, x: torch.Tensor) -> None:
        """Bring the rows of a layer, [N, H], to host memory, enqueued on the current stream."""
        copy_words(_words(x), _words(self._x_host[: len(x)]))

    def give_results(self, y: torch.Tensor, asked: torch.Tensor) -> None:
        """Write what was computed to `y` [N, k, H], when it is there; other rows are left as they are. Enqueued on the
        current stream, which waits for the CPU: until then it does what was enqueued before. Nothing was computed where
        `asked` [1] int32, beside y, is 0."""
        if not y.is_cuda:
            self.finish()
        rows = y.view(-1, y.shape[-1]).view(torch.int32)
        source = self._y_host[: y.numel()].view(len(rows), -1).view(torch.int32)
        take_host_rows(asked, self._ready, self._computed[: len(rows)], source, rows)

    def split(self, layer: int, count: int, *, queued: int) -> int:
        """Return how many of so many missing experts of a layer the CPU is to compute, while so many are on the link
        already."""
        if self.share is not None:
            self._owed += self.share * count
            taken = int(self._owed + 1e-9)
            self._owed -= taken
            return taken
        nbytes, seconds = self._engine.bytes_copied, self._engine.copy_seconds()
        if seconds > self._copied[1]:
            self._rates["link"].note(nbytes - self._copied[0], seconds - self._copied[1])
            self._copied = nbytes, seconds
        nbytes = self._layers[layer].nbytes
        link_s, cpu_s = (self._rates[name].seconds(nbytes) for name in ("link", "CPU"))

        def needed_s(computed: int) -> float:
            brought_s = (count - computed + queued) * link_s if computed < count else 0.0
            return max(brought_s, computed * cpu_s)

        best = min(range(count + 1), key=needed_s)
        self._idle = 0 if best else self._idle + 1
        if self._idle == _ASKED_AGAIN:
            self._idle = 0
            return 1
        return best

    def asked(self, rows: int, num_chosen: int) -> AskedRows:
        """Return what `begin` needs to know of so many rows with so many choices each."""
        count, width = rows * num_chosen, self._x_host.shape[1]
        choices, out = self._choices[:count], self._y_host[: count * width].view(rows, num_chosen, width)
        of_host = HostRows(self._x_host[:rows], choices.view(rows, num_chosen), out, self._ready)
        return AskedRows(of_host, choices.numpy(), self._computed[:count].numpy())

    def begin(self, layer: int, asked: AskedRows, chosen: Sequence[int], computed: Sequence[int]) -> None:
        """Begin with some experts of a layer, or none, for the rows that were fetched. The card has come as far.

        Args:
            layer: Its number.
            asked: The rows.
            chosen: Their choices, row after row.
            computed: Those experts.
        """
        self.finish()  # of a pass that was interrupted
        if self._is_marked:
            self._marks.fill(0)
        self._is_marked = bool(computed)
        if not computed:
            return
        asked.choices[:] = chosen
        asked.computed[:] = [one in computed for one in chosen]
        experts, address, step, _ = self._layers[layer]
        units = [(number, address + number * step) for number in computed]
        self._is_busy, on_done = True, partial(self._note, layer, time.perf_counter())
        self._threads.submit(experts, asked.rows, units, on_done=on_done)

    def finish(self) -> None:
        """Wait until the CPU has computed what it was given."""
        if self._is_busy:
            self._threads.wait()

    def _note(self, layer: int, began_s: float, work: Work) -> None:
        """Take up what was measured of a layer's experts."""
        self._is_busy, self.total = False, Work(self.total.nbytes + work.nbytes, self.total.seconds + work.seconds)
        self._rates["CPU"].note(work.nbytes, work.seconds)
        if (log := self._engine.log) is not None:
            log.computed(layer, began_s, began_s + work.seconds, bytes=work.nbytes)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32)
