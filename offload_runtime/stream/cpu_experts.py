"""What the CPU computes of a layer's missing experts, where they lie, while the link brings the others.

Both get so much that they end together, by what was measured of them lately: a split that was calibrated before has
been eight times slower elsewhere. The device asks and threads answer, so that nothing waits for Python. Where an expert
is computed changes no bit.
"""

from __future__ import annotations

import numpy as np
import torch
from offload_runtime_kernels.copy_words import copy_words
from offload_runtime_kernels.expert_buffers import BufferTables, CpuShare
from offload_runtime_kernels.experts_cpu import ExpertsCpu, HostExperts, Mailbox, Work
from offload_runtime_kernels.host_rows import take_host_rows

from offload_runtime.sizes import GB
from offload_runtime.stream.copy_engine import CopyEngine

# Rows up to which the CPU is asked: it decodes weights once for four of them.
MOST_CPU_ROWS = 32
# Each measurement counts as much as all later ones of so many bytes, at the beginning a guess does.
_REMEMBERED_BYTES, _GUESSED_GBPS = 2 * GB, 20.0
# Of layers that miss something one in so many asks a CPU that is too slow, so that it is measured again.
_ASKED_AGAIN = 64


class Rate:
    """Averages how many bytes a second something does."""

    def __init__(self) -> None:
        self._nbytes, self._seconds = _REMEMBERED_BYTES / 8, _REMEMBERED_BYTES / 8 / (_GUESSED_GBPS * GB)
        self._total = 0, 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Take up what has been done in all, since the last call or `skip`."""
        more, more_s = nbytes - self._total[0], seconds - self._total[1]
        if more_s > 0:
            kept = 1 - min(1.0, more / _REMEMBERED_BYTES)
            self._nbytes, self._seconds = kept * self._nbytes + more, kept * self._seconds + more_s
            self._total = nbytes, seconds

    def skip(self, nbytes: int, seconds: float) -> None:
        """Leave out what has been done in all since the last call."""
        self._total = nbytes, seconds

    def seconds(self, nbytes: int) -> float:
        """Return how long so many bytes are expected to take."""
        return nbytes * self._seconds / self._nbytes


class CpuExperts:
    """Has the CPU compute experts of a card's layers for passes of few rows.

    Args:
        threads: That compute; several cards may share them.
        fixed_share: Of the missing experts, that of the CPU; None: by rates measured while serving.
        engine: Brings experts.
        tables: Of the card's pool.
        num_chosen: Most experts of a row.
        x: Like the rows of a pass: their dtype, width and device.

    Attributes:
        share: What the card leaves to the CPU.
    """

    def __init__(
        self, threads: ExpertsCpu, fixed_share: float | None, engine: CopyEngine, tables: BufferTables, *,
        num_chosen: int, x: torch.Tensor,
    ) -> None:  # fmt: skip
        self._threads, self._fixed_share, self._engine = threads, fixed_share, engine
        (layers, width), count, on_card = tables.buffers.shape, MOST_CPU_ROWS * num_chosen, x.is_cuda
        self._x_host, self._y_host = (
            torch.zeros(rows, x.shape[1], dtype=x.dtype, pin_memory=on_card) for rows in (MOST_CPU_ROWS, count)
        )
        self._ready = torch.zeros(1, dtype=torch.int32, pin_memory=on_card)
        self._shares_host = torch.zeros(1 + width, pin_memory=on_card)
        self.share = CpuShare(
            torch.zeros(1 + width, device=x.device), torch.zeros(1, device=x.device),
            torch.zeros(2, dtype=torch.int32, device=x.device),
            torch.zeros(count, dtype=torch.int32, device=x.device),
            torch.zeros(1 + count, dtype=torch.int64, pin_memory=on_card),
        )  # fmt: skip
        self._missing = np.arange(1 + width)
        if fixed_share is not None:
            self.share.shares.copy_(torch.from_numpy(fixed_share * self._missing))
        self._link, self._cpu, self._expert_bytes = Rate(), Rate(), 0
        self._mailbox = Mailbox(layers, self.share.report, self._x_host, self._y_host, self._ready)
        threads.serve(self._mailbox)

    @property
    def total(self) -> Work:
        """Return all that has been computed so far."""
        return self._mailbox.total

    def add(self, row: int, experts: HostExperts, num_chosen: int, host: torch.Tensor) -> None:
        """Let a layer's experts, of a row of the tables, be computed where they lie, uint8 [E, bytes of one]."""
        self._mailbox.add(row, experts, num_chosen, host)
        self._expert_bytes = max(self._expert_bytes, host.shape[1])

    def fetch_rows(self, x: torch.Tensor) -> None:
        """Bring the rows of a layer, [N, H], to host memory, enqueued on the current stream."""
        copy_words(_words(x), _words(self._x_host[: len(x)]))

    def give_results(self, y: torch.Tensor) -> None:
        """Write what was computed to `y` [N, k, H], when it is there; other rows are left as they are. Enqueued on the
        current stream, which waits for the CPU: until then it does what was enqueued before."""
        rows = y.view(-1, y.shape[-1]).view(torch.int32)
        source = self._y_host[: len(rows)].view(torch.int32)
        take_host_rows(self.share.tickets[1:], self._ready, self.share.asked[: len(rows)], source, rows)

    def begin_pass(self) -> None:
        """Set how much of what is missing the card asks for, by what was measured lately, and wake who answers."""
        self._threads.wake()
        if self._fixed_share is not None or not self._expert_bytes:
            return
        self._cpu.note(*self._mailbox.total)
        link_s, cpu_s = (rate.seconds(self._expert_bytes) for rate in (self._link, self._cpu))
        few = np.floor(self._missing * link_s / (link_s + cpu_s))
        needed_s, more_s = (np.maximum((self._missing - n) * link_s, n * cpu_s) for n in (few, few + 1))
        best = few + ((more_s < needed_s) & (few < self._missing))
        shares, before = np.where(best > 0, best, 1 / _ASKED_AGAIN), self._shares_host.numpy()
        if (shares != before).any():
            # A pass may be running, whose kernels' warps must all read the same: they read what a kernel has written.
            before[:] = shares
            copy_words(_words(self._shares_host), _words(self.share.shares))

    def measure_link(self, *, begins: bool) -> None:
        """Begin to measure the link, or end it: while whole layers are prefetched nothing else is on it."""
        (self._link.skip if begins else self._link.note)(self._engine.bytes_copied, self._engine.copy_seconds())


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32)
