"""One GPU for all workers that run tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_card(*, alone: bool, directory: Path | None = None) -> Iterator[None]:
    """Use the machine's GPU beside others who ask like this, or alone; `directory` is where they find each other.

    Who wants it alone keeps nobody from taking it, and waits until nobody happens to.
    """
    import fcntl  # there is none where there is no fork

    with open((directory or Path(tempfile.gettempdir())) / f"offload-runtime-gpu-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that outlives the test may have it, too
