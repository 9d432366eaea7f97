"""Spares the windows of a runtime long garbage collections.

A full collection goes through everything that torch and transformers made when they were imported: 0.2 s, most of a
pass over streamed weights. The many nodes of trees bring one about every few passes, and when it comes at the end of a
pass, the next one begins late.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.RLock()  # a collection may end a runtime that was dropped
_runtimes = 0
_frozen_here = False


def set_aside() -> None:
    """Until `take_back`, let collections leave out what there is now; where the program has frozen most of it itself,
    its own choice stands. (Some versions of Python begin with a few frozen objects.)"""
    # What loading would import.
    from transformers import AutoTokenizer, LlamaConfig  # noqa: F401

    global _runtimes, _frozen_here
    with _lock:
        if not _runtimes and gc.get_freeze_count() < len(gc.get_objects()):
            gc.collect()
            gc.freeze()
            _frozen_here = True
        _runtimes += 1


def take_back() -> None:
    """Undo a `set_aside`; the last one undoes the first."""
    global _runtimes, _frozen_here
    with _lock:
        _runtimes -= 1
        if not _runtimes and _frozen_here:
            gc.unfreeze()
            _frozen_here = False
