"""What was there before a runtime is out of the garbage collector's sight, and only as long as the runtime lives."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_runtime.copy.cpu import ThreadCopyEngine
from offload_runtime.engine import Runtime
from offload_runtime.engine.old_objects import OldObjects
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


@pytest.mark.usefixtures("hardly_anything_frozen")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_loading_brings_them_back(target: Path, error: type[BaseException]) -> None:
    seen_then = []

    def stop(*_: object) -> None:
        seen_then.append(seen())
        raise error("stop")

    for hook in ("on_plan", "on_progress"):
        with pytest.raises(error, match="stop"):
            Runtime.load(target, draft="none", device="cpu", **{hook: stop})
        assert seen_then.pop() < IMPORTED < seen()
    with load(target, draft="none"):
        assert seen() < IMPORTED
        with pytest.raises(error, match="stop"):
            Runtime.load(target, draft="none", device="cpu", on_plan=stop)
        assert seen() < IMPORTED, "the other one lives"
    assert seen() > IMPORTED


@pytest.mark.usefixtures("hardly_anything_frozen")
def test_a_runtime_that_could_not_be_closed_properly_brings_them_back(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = ThreadCopyEngine.close

    def interrupted(engine: ThreadCopyEngine) -> None:
        close(engine)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ThreadCopyEngine, "close", interrupted)
        runtime = Runtime.load(target, draft="none", device="cpu")
        assert seen() < IMPORTED
        with pytest.raises(KeyboardInterrupt):
            runtime.close()
    assert seen() > IMPORTED


@pytest.mark.usefixtures("hardly_anything_frozen")
def test_to_take_back_twice_or_nothing_harms_nobody_else() -> None:
    one, other, never = OldObjects(), OldObjects(), OldObjects()
    one.set_aside()
    one.set_aside()
    other.set_aside()
    for _ in range(2):
        never.take_back()
        one.take_back()
        assert seen() < IMPORTED
    other.take_back()
    assert seen() > IMPORTED
    never.take_back()
    never.set_aside()
    assert seen() < IMPORTED
    never.take_back()
    assert seen() > IMPORTED


def test_an_error_in_what_was_asked_for_does_not_wait_for_transformers(tmp_path: Path) -> None:
    """Its import takes seconds."""
    program = (
        "import sys; from offload_runtime import Runtime; from offload_runtime.errors import CheckpointError\n"
        "try: Runtime.load(sys.argv[1], device='cpu')\n"
        "except CheckpointError: print({'torch', 'transformers'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "none")]
    root = Path(__file__).resolve().parents[1]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert said == "{'torch'}\n"


def test_what_the_program_froze_itself_stays_frozen(target: Path) -> None:
    assert gc.get_freeze_count() > IMPORTED
    with load(target, draft="none"):
        pass
    assert gc.get_freeze_count() > IMPORTED
