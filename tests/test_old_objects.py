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


@pytest.fixture(params=[0, 375])
def hardly_anything_frozen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the suite keeps out of sight is back in it; some versions of Python begin with a few frozen objects."""
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: request.param)
    yield
    gc.freeze()


def seen() -> int:
    """Objects that a collection goes through."""
    return len(gc.get_objects())


@pytest.mark.usefixtures("hardly_anything_frozen")
def test_old_objects_are_out_of_sight_while_a_runtime_lives(target: Path) -> None:
    with load(target, draft="none") as first:
        assert seen() < IMPORTED
        with load(target, draft="none"):
            first.close()
            assert seen() < IMPORTED
    assert seen() > IMPORTED
    dropped = Runtime.load(target, draft="none", device="cpu")
    assert seen() < IMPORTED
    del dropped
    gc.collect()
    assert seen() > IMPORTED
    with pytest.raises(OptionError, match="context"):
        Runtime.load(target, draft="none", device="cpu", context=0)
    assert seen() > IMPORTED


def test_what_the_program_froze_itself_stays_frozen(target: Path) -> None:
    assert gc.get_freeze_count() > IMPORTED
    with load(target, draft="none"):
        pass
    assert gc.get_freeze_count() > IMPORTED
