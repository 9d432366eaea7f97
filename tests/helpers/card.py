"""One GPU for all workers that run tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_card(*, alone: bool, directory: Path | None = None) -> Iterator[None]:
    """Use the machine's GPU beside others who ask like this, or alone; `directory` is where they find each other."""
    import fcntl  # there is none where there is no fork

    name = (directory or Path(tempfile.gettempdir())) / f"offload-runtime-gpu-{os.getuid()}"
    with open(f"{name}.next", "w") as turn, open(f"{name}.lock", "w") as lock:
        # Who waits for the card to be free keeps others from taking it.
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that outlives the test may have it, too
