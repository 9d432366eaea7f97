"""The systems that are compared, run in processes of their own, and what their measurements say together."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import NO_ROOM_CODE
from harness import leading_agreement
from ours_runtime import NO_MODEL

from offload_runtime.sizes import GB

PEERS = Path(__file__).resolve().parent / "peers"
_SHOWN_CHARACTERS = 600
REFERENCES = ("ours-plain", "resident")
_HEAD = (
    f"{'system':28} {'tok/s':>8} {'ours is':>8} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'TTFT s':>7} "
    f"{'tok/pass':>8} {'GB/s':>6} {'VRAM GB':>8}  same tokens"
)
# Without these a row would be misread.
_SHOWN_NOTES = ("SUSPECT", "GB/s and bound")


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
_OURS_PLAIN = ("kv", "context", "weights", "encode", "emulate", "devices")
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
    "resident-compiled": System("accelerate_offload.py", ("--compiled", "--vram", "all"), whole_model=True),
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
    if "error" in result and system.whole_model and code == NO_ROOM_CODE:
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


def agreements(results: Mapping[str, dict[str, Any]], *, greedy: bool) -> dict[str, Any] | None:
    """How far systems' answers begin as those of a reference do, which decodes without speculation.

    Args:
        results: Of all systems.
        greedy: Whether all say the likeliest token. Else only those are compared that draw the reference's noise.

    Returns:
        `reference`; and of the `systems` that are compared `leading` tokens by prompt `of` the reference's. None
        without a reference.
    """
    found = measured(dict(results))
    reference = next((name for name in REFERENCES if name in found), None)
    if reference is None:
        return None
    expected, software = found[reference]["tokens"], found[reference]["system"]
    found = {name: result for name, result in found.items() if greedy or result["system"] == software}
    systems = {
        name: {
            "leading": [leading_agreement(one, other) for one, other in zip(expected, result["tokens"], strict=True)],
            "of": [len(one) for one in expected],
        }
        for name, result in found.items()
    }
    return {"reference": reference, "systems": systems}


def link_bound(results: Mapping[str, dict[str, Any]]) -> dict[str, float] | None:
    """The most tokens per second that any system can give that streams these bytes for every token.

    The bytes are those of plain decoding here, or the fewest that any system streams where it was not run; the
    bandwidth is the highest that any process measured. None where nothing is streamed or no link was measured; systems
    of which only the weights are known do not count, whose keys and values cross the link as well.
    """
    found = measured(dict(results))
    streaming = {name: one for name, one in found.items() if one["bytes_per_pass"] and one["bound"]}
    counted = [one["bytes_per_pass"] for one in streaming.values() if one["streamed"]["kv"] is not None]
    if not counted:
        return None
    plain = streaming.get("ours-plain")
    nbytes = plain["bytes_per_pass"] if plain else min(counted)
    peak_gbps = max(one["bound"]["link_gbps"] for one in streaming.values())
    return {"bytes_per_pass": nbytes, "link_gbps": peak_gbps, "tok_per_s": peak_gbps * GB / nbytes}


def times_ours_over(results: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """How many times the tokens per second of each other system; of `ours-plain` where `ours` was not run."""
    found = measured(dict(results))
    ours = next((name for name in ("ours", "ours-plain") if name in found), None)
    if ours is None:
        return {}
    return {
        name: found[ours]["tok_per_s"] / result["tok_per_s"] for name, result in found.items() if name != ours
    }  # fmt: skip


def _agreement_text(agreement: Mapping[str, Any] | None, name: str) -> str:
    if agreement is None:
        return "-"
    if name == agreement["reference"]:
        return "reference"
    row = agreement["systems"].get(name)
    return "other noise" if row is None else f"{sum(row['leading'])} of {sum(row['of'])}"


def table(report: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = [_HEAD]
    for name, result in report["results"].items():
        if "tok_per_s" not in result:
            lines.append(f"{name:28} {outcome(result)}")
            continue
        times = report["times_ours_over"].get(name)
        token_ms = " ".join(f"{1e3 * result['token_s'][share]:8.1f}" for share in ("p50", "p90", "p99"))
        vram = result["peak_vram_bytes"]
        lines.append(
            f"{name:28} {result['tok_per_s']:8.3f} {'' if times is None else f'{times:.2f} x':>8} {token_ms} "
            f"{result['time_to_first_token_s']:7.2f} {result['tokens_per_pass']:8.2f} {result['link_gbps']:6.1f} "
            f"{'-' if vram is None else format(vram['driver'] / GB, '.2f'):>8}  "
            f"{_agreement_text(report['agreement'], name)}"
        )
        lines += [f"  {note}" for note in result["notes"] if note.startswith(_SHOWN_NOTES)]
    bound = report["bound"]
    if bound is not None:
        lines.append(
            f"one token a pass: at most {bound['tok_per_s']:.3f} tok/s, {bound['bytes_per_pass'] / GB:.2f} GB over a "
            f"link of {bound['link_gbps']:.1f} GB/s"
        )
    return "\n".join(lines)
