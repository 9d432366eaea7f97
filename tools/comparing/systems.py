"""The systems that are compared: which script measures each, with which options, and running it in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from our_options import NO_MODEL

PEERS = Path(__file__).resolve().parents[1] / "peers"
_NO_ROOM_CODE = 3  # a peer's exit code where there is not enough memory for what was asked
_SHOWN_CHARACTERS = 600


@dataclass(frozen=True)
class System:
    """One row of a comparison.

    Attributes:
        script: In `tools/peers`.
        options: Of its own.
        package: Must be installed.
        install: How to.
        takes: Which of the comparison's options it is given beside those of all systems.
        needs_draft: Whether it does nothing without a draft model.
        whole_model: Whether it wants the whole model on the device, and is left out where that does not fit.
    """

    script: str
    options: tuple[str, ...] = ()
    package: str | None = None
    install: str = ""
    takes: tuple[str, ...] = ()
    needs_draft: bool = False
    whole_model: bool = False


_DEEPSPEED = "DS_BUILD_OPS=0 pip install 'offload-runtime[deepspeed]'"
_ACCELERATE = "pip install accelerate"
_OURS_PLAIN = ("kv", "context")
_OURS_WITHOUT_TREES = (*_OURS_PLAIN, "draft", "speculation", "gamma", "budget_tokens", "draft_cache")
_OURS = (*_OURS_WITHOUT_TREES, "tree_nodes")
_TRANSFORMERS = ("kv_cache", "prefill_chunk")

SYSTEMS = {
    "ours-plain": System("ours_runtime.py", ("--draft", "none"), takes=_OURS_PLAIN),
    "ours": System("ours_runtime.py", takes=_OURS),
    "ours-chains": System(
        "ours_runtime.py", ("--tree-nodes", "0"), takes=_OURS_WITHOUT_TREES, needs_draft=True
    ),
    "deepspeed": System("deepspeed_zero.py", package="deepspeed", install=_DEEPSPEED, takes=_TRANSFORMERS),
    "deepspeed-assistant": System(
        "deepspeed_zero.py", package="deepspeed", install=_DEEPSPEED,
        takes=(*_TRANSFORMERS, "draft", "assistant_tokens"), needs_draft=True,
    ),
    "accelerate": System("accelerate_offload.py", package="accelerate", install=_ACCELERATE, takes=_TRANSFORMERS),
    "transformers-offloaded-cache": System(
        "accelerate_offload.py", ("--kv-cache", "offloaded", "--resident-layers", "auto"), package="accelerate",
        install=_ACCELERATE, takes=("prefill_chunk",),
    ),
    "resident": System(
        "accelerate_offload.py", ("--whole", "--vram", "all"), takes=("prefill_chunk",), whole_model=True
    ),
}  # fmt: skip


def run_script(script: str, options: Sequence[str], timeout_s: float) -> tuple[dict[str, Any], int | None]:
    """Run one of the peers' scripts in its own process.

    Returns:
        Its JSON, or `{"error": …}` with the end of what it printed; and its exit code, None where time was up.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(PEERS / script), *options, "--out", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {timeout_s:.0f} s"}, None
        if out.exists():
            result: dict[str, Any] = json.loads(out.read_text())
            return result, done.returncode
        printed = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        return {"error": printed[-_SHOWN_CHARACTERS:].removeprefix("error: ")}, done.returncode


def left_out(system: System, *, draft: str | None) -> dict[str, str] | None:
    """Why a system is not run at all: `{"missing": …}` or `{"skipped": …}`; None where it is."""
    if system.package is not None and find_spec(system.package) is None:
        return {"missing": f"{system.package} is not installed: {system.install}"}
    if system.needs_draft and draft in NO_MODEL:
        return {"skipped": "no draft model: name one with --draft"}
    return None


def run_system(
    system: System, common: Sequence[str], own: dict[str, Sequence[str]], *, draft: str | None, timeout_s: float
) -> dict[str, Any]:
    """Measure one system.

    Args:
        system: Which.
        common: Options of all systems.
        own: Further options by the name under which a system takes them.
        draft: The draft model, if there is one.
        timeout_s: For all of it.

    Returns:
        Its JSON, or one of `{"error": …}`, `{"missing": …}`, `{"skipped": …}`.
    """
    reason = left_out(system, draft=draft)
    if reason is not None:
        return reason
    given = [option for name in system.takes for option in own.get(name, ())]
    # Its own options come last: they overrule those of all systems.
    result, code = run_script(system.script, [*common, *given, *system.options], timeout_s)
    if "error" in result and system.whole_model and code == _NO_ROOM_CODE:
        return {"skipped": result["error"].splitlines()[-1].removeprefix("error: ")}
    return result


def outcome(result: dict[str, Any]) -> str:
    """What became of a system, in a line: its speed, or why there is none."""
    if "tok_per_s" in result:
        return f"{result['tok_per_s']:.3f} tok/s"
    reason = next(iter(result))
    return f"{reason}: {result[reason].splitlines()[-1]}"


def measured(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that gave figures."""
    return {name: result for name, result in results.items() if "tok_per_s" in result}
