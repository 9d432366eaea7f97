"""Page-locking of host memory, block by block: it can stop where the system refuses, and what was locked stays so."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

# WSL2 and Windows lock only a part of the memory: of an arena that does not fit, whole blocks are locked all the same.
# A multiple of the pieces that copies are made in: no copy may reach across two registrations.
LOCK_BLOCK_BYTES = 1 << 30


class Registrar(Protocol):
    """Locks pages for full-speed asynchronous copies. Addresses and sizes are multiples of the page size."""

    def register(self, address: int, nbytes: int) -> int:
        """Lock `nbytes` from `address` on; returns CUDA's error code, 0 for success."""

    def unregister(self, address: int) -> None:
        """Unlock what was locked from `address` on, in one piece."""


class CudaRegistrar:
    """Locks pages for all GPUs of this process."""

    def register(self, address: int, nbytes: int) -> int:
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code != 0:
            # CUDA keeps the code of the failed call for this thread's next kernel launch, which would raise it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
        return code

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


def make_registrar(device: torch.device) -> Registrar | None:
    """What locks pages for copies to `device`; None for a CPU, which reads any memory as fast."""
    return CudaRegistrar() if device.type == "cuda" else None


class LockedPages:
    """The locked blocks of one range of memory; they lie side by side from its beginning on.

    Args:
        address: Of the range, a multiple of the page size.
        nbytes: Its size, a multiple of the page size.
        registrar: Who locks.
    """

    def __init__(self, address: int, nbytes: int, registrar: Registrar) -> None:
        self.locked_bytes = 0
        self._address = address
        self._nbytes = nbytes
        self._registrar = registrar
        self._blocks: list[int] = []

    def lock(self, block_bytes: int) -> int:
        """Lock what is not locked yet in blocks of `block_bytes`; returns the code of a refusal, or 0."""
        while self.locked_bytes < self._nbytes:
            address = self._address + self.locked_bytes
            nbytes = min(block_bytes, self._nbytes - self.locked_bytes)
            code = self._registrar.register(address, nbytes)
            if code != 0:
                return code
            self._blocks.append(address)
            self.locked_bytes += nbytes
        return 0

    def unlock(self) -> None:
        """Unlock all blocks."""
        while self._blocks:
            self._registrar.unregister(self._blocks.pop())
        self.locked_bytes = 0
