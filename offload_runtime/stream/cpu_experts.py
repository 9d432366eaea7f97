"""What the CPU computes of a layer's missing experts, where they lie, while the link brings the others.

Both get so much that they end together, by what was measured of them lately: a split that was calibrated before has
been eight times slower elsewhere. Where an expert is computed changes no bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from offload_runtime_kernels.copy_words import copy_words
from offload_runtime_kernels.experts_cpu import ExpertsCpu, HostExperts

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


class CpuExperts:
    """Has the CPU compute experts of a card's layers for passes of few rows.

    Args:
        threads: That compute; several cards may share them.
        share: Of the missing experts, that of the CPU; None: by rates measured while serving.
        engine: Brings the others.
        num_chosen: Most experts of a row.
        x: Like the rows of a pass: their dtype, width and device.

    Attributes:
        layers: What they compute with, by layer.
    """

    def __init__(
        self, threads: ExpertsCpu, share: float | None, engine: CopyEngine, *, num_chosen: int, x: torch.Tensor
    ) -> None:  # fmt: skip
        self._threads, self.share, self._engine = threads, share, engine
        self.layers = dict[int, HostExperts]()
        self._x_host, y_host = (
            torch.zeros(rows, x.shape[1], dtype=x.dtype, pin_memory=x.is_cuda)
            for rows in (MOST_CPU_ROWS, MOST_CPU_ROWS * num_chosen)
        )
        self._y_host = y_host.view(-1)
        self._rates = {"link": Rate(), "CPU": Rate()}
        self._copied = engine.bytes_copied, engine.copy_seconds()
        self._owed, self._idle = 0.0, 0
        self._began: tuple[int, float] | None = None  # of what is computed: its layer, and when

    def fetch_rows(self, x: torch.Tensor) -> None:
        """Bring the rows of a layer, [N, H], to host memory, enqueued on the current stream."""
        copy_words(_words(x), _words(self._x_host[: len(x)]))

    def give_results(self, y: torch.Tensor) -> None:
        """Write what was computed to `y` [N, k, H], enqueued on the current stream; other rows get what lies there."""
        copy_words(_words(self._y_host[: y.numel()]), _words(y))

    def split(self, count: int, unit_bytes: int, *, queued: int) -> int:
        """Return how many of so many missing experts the CPU is to compute, while so many are on the link already."""
        if self.share is not None:
            self._owed += self.share * count
            taken = int(self._owed + 1e-9)
            self._owed -= taken
            return taken
        nbytes, seconds = self._engine.bytes_copied, self._engine.copy_seconds()
        if seconds > self._copied[1]:
            self._rates["link"].note(nbytes - self._copied[0], seconds - self._copied[1])
            self._copied = nbytes, seconds
        link_s, cpu_s = (self._rates[name].seconds(unit_bytes) for name in ("link", "CPU"))

        def needed_s(computed: int) -> float:
            brought_s = (count - computed + queued) * link_s if computed < count else 0.0
            return max(brought_s, computed * cpu_s)

        best = min(range(count + 1), key=needed_s)
        self._idle = 0 if best else self._idle + 1
        if self._idle == _ASKED_AGAIN:
            self._idle = 0
            return 1
        return best

    def begin(self, layer: int, choices: torch.Tensor, units: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Begin with some experts of a layer for the rows that were fetched.

        Args:
            layer: Its number.
            choices: [N, k] int64, host.
            units: The number and the bytes of each expert, host.
        """
        self.finish()  # of a pass that was interrupted
        rows = len(choices)
        out = self._y_host[: choices.numel() * self._x_host.shape[1]].view(*choices.shape, -1)
        wanted = [(number, unit.data_ptr()) for number, unit in units]
        self._began = layer, time.perf_counter()
        self._threads.submit(self.layers[layer], self._x_host[:rows], choices, wanted, out)

    def finish(self) -> None:
        """Wait until the CPU has computed what it was given."""
        if self._began is not None:
            work, (layer, began_s) = self._threads.wait(), self._began
            self._began = None
            self._rates["CPU"].note(work.nbytes, work.seconds)
            if self._engine.log is not None:
                self._engine.log.computed(layer, began_s, time.perf_counter(), bytes=work.nbytes, seconds=work.seconds)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32)
