"""kill -9 in the middle of a save: what was there before is whole, and the next save goes through as if nothing was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import write_report

from offload_runtime.files import write_atomically
from offload_runtime.trace import Trace, write_trace

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="no SIGKILL there")]

# The process ends where everything has been written and nothing has been renamed yet.
KILLED = """
import os, signal, sys
from pathlib import Path
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = Path.rename = die
"""
OF_A_TRACE = """
from offload_runtime.trace import Trace, write_trace
write_trace(Path(sys.argv[1]), Trace([], 0.0, 0), {"run": "killed"})
"""
OF_A_CONVERSATION = """
from offload_runtime.files import write_atomically
write_atomically(Path(sys.argv[1]), '{"run": "killed"}', remedy="")
"""
OF_A_REPORT = """
from harness import write_report
write_report({"run": "killed"}, Path(sys.argv[1]))
"""


def kill_while(what: str, *arguments: Path) -> None:
    """Run a save in a process that is killed at its very end."""
    path = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "tools"))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED + what, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, Trace([], 0.0, 0), {"run": "before"})
    kill_while(OF_A_TRACE, path)
    assert json.loads(path.read_text())["otherData"]["run"] == "before"
    assert len(list(tmp_path.iterdir())) == 2  # and what is left
    write_trace(path, Trace([], 0.0, 0), {"run": "after"})
    assert json.loads(path.read_text())["otherData"]["run"] == "after"


@pytest.mark.parametrize(
    ("killed", "save"),
    [
        (OF_A_CONVERSATION, lambda path, record: write_atomically(path, json.dumps(record), remedy="")),
        (OF_A_REPORT, lambda path, record: write_report(record, path)),
    ],
    ids=["conversation", "report"],
)
def test_a_record(killed: str, save: Callable[[Path, dict[str, str]], None], tmp_path: Path) -> None:
    """A saved conversation, and the rows that a benchmark has measured so far."""
    path = tmp_path / "record.json"
    save(path, {"run": "before"})
    kill_while(killed, path)
    assert json.loads(path.read_text()) == {"run": "before"}
    assert len(list(tmp_path.iterdir())) == 2  # and what is left
    save(path, {"run": "after"})
    assert json.loads(path.read_text()) == {"run": "after"}
