"""Weights that are read once and lent to one runtime after the other, each with other layers on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from offload_runtime.engine import load_model as assembly
from offload_runtime.errors import BudgetError
from offload_runtime.memory import HostArena, Registrar
from offload_runtime.weights import CheckpointSource, HostWeights, ModelLayout, load_weights
from offload_runtime.weights.loader import Progress


class LentArena:
    """A `HostArena` whose memory stays when it is closed: its owner gives it back."""

    def __init__(self, owned: HostArena) -> None:
        self._owned = owned
        self.name, self.nbytes, self.buffer = owned.name, owned.nbytes, owned.buffer

    @property
    def pinned_bytes(self) -> int:
        """Bytes whose pages are locked."""
        return self._owned.pinned_bytes

    @property
    def pinned(self) -> bool:
        """Whether all pages are locked."""
        return self._owned.pinned

    def unpin(self) -> None:
        """Refused: the next runtime may stream what this one would stage.

        Raises:
            BudgetError: Always.
        """
        raise BudgetError(
            f"not all layers may be page-locked here, so that {self.name} would be staged: lower --layers or take a "
            "smaller model (WSL2 and Windows lock at most about half of the RAM)"
        )

    def close(self) -> None:
        """Let go of the memory, which stays as it is."""
        self.buffer = torch.empty(0, dtype=torch.uint8)


class KeptWeights:
    """Reads each checkpoint when it is first asked for, and lends what it has read.

    Touching 13 GB of fresh memory takes 5 s and locking it half a second more; lent weights take neither. Each loading
    still counts on as much memory as it would read, so twice the weights must have room.

    Args:
        target: Whose layers are streamed: all are page-locked from the start, whatever the first runtime streams.
    """

    def __init__(self, target: CheckpointSource) -> None:
        self._target = target
        self._kept: dict[int, tuple[CheckpointSource, HostWeights]] = {}  # the source, so that its id stays taken

    def read(
        self, source: CheckpointSource, dtype: torch.dtype, *, layout: ModelLayout | None = None,
        pin: Collection[int] = (), blockwise: Registrar | None = None, on_progress: Progress | None = None,
    ) -> HostWeights:  # fmt: skip
        """As `load_weights`, which it stands for.

        Raises:
            BudgetError: The system refuses to page-lock all layers of the target.
        """
        if id(source) not in self._kept:
            wanted = set(pin)
            if source is self._target and blockwise is not None:
                wanted = set(range(source.config().num_layers))
            weights = load_weights(
                source, dtype, layout=layout, pin=wanted, blockwise=blockwise, on_progress=on_progress
            )
            self._kept[id(source)] = source, weights
            _require_locked(weights, wanted)
        weights = self._kept[id(source)][1]
        assert weights.layout.dtype == dtype, "a command has one dtype"
        lent: Any = [LentArena(arena) for arena in (weights.shared, *weights.layers)]
        return replace(weights, shared=lent[0], layers=lent[1:])

    def close(self) -> None:
        """Give all memory back; every runtime that it was lent to is closed."""
        for _, weights in self._kept.values():
            weights.close()
        self._kept.clear()


def _require_locked(weights: HostWeights, wanted: Collection[int]) -> None:
    """Refuse weights of which the system locked a part only: rows with other layers resident would stage others."""
    locked = sum(weights.layers[index].pinned for index in wanted)
    if locked < len(wanted):
        raise BudgetError(
            f"the system page-locks {locked} of {len(wanted)} layers: lower --layers, or raise the limit of locked "
            "memory (ulimit -l; WSL2 and Windows lock at most about half of the RAM)"
        )


@contextmanager
def kept_weights(target: CheckpointSource) -> Iterator[KeptWeights]:
    """Runtimes that are loaded inside take what has been read already."""
    kept, read = KeptWeights(target), assembly.load_weights
    assembly.load_weights = kept.read  # type: ignore[assignment]
    try:
        yield kept
    finally:
        assembly.load_weights = read
        kept.close()
