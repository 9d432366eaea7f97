"""Spares the windows of a runtime long garbage collections.

A full collection goes through everything that torch and transformers made when they were imported: 0.2 s, most of a
pass over streamed weights. The many nodes of trees bring one about every few passes, and when it comes at the end of a
pass, the next one begins late.
"""

from __future__ import annotations

import gc
import threading

# Fewer are collected in a few milliseconds.
_MANY_OBJECTS = 50_000

# Of the process, as its garbage collector is.
_lock = threading.RLock()  # a collection may end a runtime that was dropped
_asking: set[OldObjects] = set()
_frozen_here = False


class OldObjects:
    """What there was before one runtime. Where the program has frozen most of it itself, its own choice stands. (Some
    versions of Python begin with a few frozen objects.)"""

    def set_aside(self) -> None:
        """Until `take_back`, let collections leave out what there is now, or was when the first of several runtimes
        asked."""
        # What loading would import.
        from transformers import AutoTokenizer, LlamaConfig  # noqa: F401

        global _frozen_here
        with _lock:
            if (
                not _asking
                and (objects := len(gc.get_objects())) > _MANY_OBJECTS
                and gc.get_freeze_count() < objects  # goes through all that are frozen
            ):
                gc.collect()
                _frozen_here = True  # first: after an interrupt between the two `take_back` knows of it
                gc.freeze()
            _asking.add(self)

    def take_back(self) -> None:
        """Let collections see everything again, unless other runtimes live. Does no harm twice, or without
        `set_aside`."""
        global _frozen_here
        with _lock:
            _asking.discard(self)
            if not _asking and _frozen_here:
                gc.unfreeze()
                _frozen_here = False
