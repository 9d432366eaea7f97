"""What was there before a runtime is out of the garbage collector's sight, and only as long as the runtime lives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from tests.helpers.engine import load

# Torch and transformers alone make this many objects.
IMPORTED = 100_000


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """What the suite keeps out of the garbage collector's sight is back in it."""
    gc.unfreeze()
    yield
    assert not gc.get_freeze_count()
    gc.freeze()


def test_old_objects_are_out_of_the_garbage_collectors_sight_while_a_runtime_lives(
    target: Path, nothing_frozen: None
) -> None:
    with load(target, draft="none") as first:
        assert gc.get_freeze_count() > IMPORTED
        with load(target, draft="none"):
            first.close()
            assert gc.get_freeze_count() > IMPORTED
    assert not gc.get_freeze_count()
    dropped = Runtime.load(target, draft="none", device="cpu")
    assert gc.get_freeze_count() > IMPORTED
    del dropped
    gc.collect()
    assert not gc.get_freeze_count()
    with pytest.raises(OptionError, match="context"):
        Runtime.load(target, draft="none", device="cpu", context=0)


def test_what_the_program_froze_itself_stays_frozen(target: Path) -> None:
    assert gc.get_freeze_count() > IMPORTED
    with load(target, draft="none"):
        pass
    assert gc.get_freeze_count() > IMPORTED
