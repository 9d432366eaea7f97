"""kill -9 in the middle of a save: what was there before is whole, and the next save goes through as if nothing was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import write_report
from safetensors.torch import load_file

from offload_runtime.config import write_atomically
from offload_runtime.hardware import MachineProfile, list_profiles, load_profile
from offload_runtime.hardware.profile import save_profile, shipped_directory
from offload_runtime.trace import Trace, write_trace
from tests.helpers.engine import write_noisy_copy

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
OF_A_PROFILE = """
from offload_runtime.hardware import load_profile
from offload_runtime.hardware.profile import save_profile
save_profile(load_profile("rtx3090"), "mine")
"""
OF_A_TRACE = """
from offload_runtime.trace import Trace, write_trace
write_trace(Path(sys.argv[1]), Trace([], 0.0, 0), {"run": "killed"})
"""
OF_A_NOISY_COPY = """
from widening.checkpoint import write_noisy_copy
write_noisy_copy(Path(sys.argv[1]), Path(sys.argv[2]), noise=0.1)
"""


OF_A_CONVERSATION = """
from offload_runtime.config import write_atomically
write_atomically(Path(sys.argv[1]), '{"run": "killed"}', way_out="")
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


def test_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path))
    before: MachineProfile = replace(load_profile("rtx4090"), name="mine")
    save_profile(before, "mine")
    kill_while(OF_A_PROFILE)
    remains = [path for path in (tmp_path / "profiles").iterdir() if path.name != "mine.toml"]
    assert len(remains) == 1 and load_profile("mine") == before
    shipped = {path.stem for path in shipped_directory().glob("*.toml")}
    assert set(list_profiles()) == {"mine"} | shipped, "what is left is no profile"
    after = replace(load_profile("h200"), name="mine")
    save_profile(after, "mine")
    assert load_profile("mine") == after


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
        (OF_A_CONVERSATION, lambda path, record: write_atomically(path, json.dumps(record), way_out="")),
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


def test_a_noisy_copy(one_layer_draft: Path, tmp_path: Path) -> None:
    source, out = one_layer_draft, tmp_path / "out"
    kill_while(OF_A_NOISY_COPY, source, out)
    assert not out.exists() and len(list(tmp_path.iterdir())) == 1
    write_noisy_copy(source, out, noise=0.1)
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    original, noisy = (load_file(directory / "model.safetensors") for directory in (source, out))
    assert noisy.keys() == original.keys()
    assert not any(torch.equal(noisy[name], weight) for name, weight in original.items() if "norm" not in name)
