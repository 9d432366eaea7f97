"""Streaming of weights side by side: this runtime, tuned DeepSpeed ZeRO-Inference, accelerate `cpu_offload`.

    python tools/bench_streaming.py --shape llama2-7b --vram 24GB --out tools/results/streaming-h200.json

Every system runs in its own process with the same weights, prompt, dtype and VRAM; a system that is not installed is
reported as missing. Prints a table, each claim with its verdict, then one JSON line; exit code 1 when a claim is
missed or a system failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import harness
from common import PASSED_ON, add_run_options, as_words
from harness import check_out, emit
from systems import SYSTEMS as COMPARED
from systems import System, link_bound, measured, run_system, table, times_ours_over

from offload_runtime.errors import OptionError
from offload_runtime.memory import resolve_device

SYSTEMS = {
    "ours": System("ours_runtime.py", ("--draft", "none"), takes=("windows",)),
    "deepspeed": COMPARED["deepspeed"],
    "deepspeed-deep": replace(COMPARED["deepspeed"], options=("--prefetch-layers", "4", "--live-layers", "8")),
    "accelerate": replace(COMPARED["accelerate"], options=("--no-pin",)),
    "accelerate-pinned": COMPARED["accelerate"],
}

# How many times the tokens per second of these systems is claimed.
BARS = {"deepspeed": 1.15, "accelerate": 5.0}


def window_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    """Our passes over wider windows."""
    lines = []
    for row in measured(results).get("ours", {}).get("windows", []):
        share = f"{row['link_share']:.1%}" if row["link_share"] else "-"
        lines.append(
            f"  window {row['window_tokens']:5}: pass {row['pass_s']['median']:.4f} s, link {row['link_gbps']:.1f} GB/s"
            f" = {share} of peak, host launch {row['host_launch_share']:.1%} of the pass"
        )
    return lines


@dataclass(frozen=True)
class Check:
    """One claim of the README: what was measured, the bar, and on which side of it the figure must be."""

    claim: str
    measured: float
    bar: float
    at_least: bool

    @property
    def holds(self) -> bool:
        """Whether the claim holds in this run."""
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar

    def __str__(self) -> str:
        """One line for people."""
        return f"{'ok' if self.holds else 'MISSED':6} {self.claim}: {self.measured:.4g} (bar {self.bar:g})"


def checks(results: dict[str, dict[str, Any]]) -> list[Check]:
    """The claims that this run can judge: those about systems and figures that it measured."""
    ours = measured(results).get("ours")
    if ours is None:
        return []
    found = []
    for row in ours["windows"]:
        width = row["window_tokens"]
        if row["link_share"]:
            found.append(Check(f"link share of the peak, window {width}", row["link_share"], 0.97, at_least=True))
        found.append(
            Check(f"host launch share of a pass, window {width}", row["host_launch_share"], 0.10, at_least=False)
        )
    driver = (ours["peak_vram_bytes"] or {}).get("driver")
    if driver:
        limit = ours["vram_limit_bytes"] / 1e9
        found.append(Check("peak VRAM as the driver sees it, GB", driver / 1e9, limit, at_least=False))
    found.append(Check("generations that differ", ours["differing_generations"], 0, at_least=False))
    for name, times in times_ours_over(results).items():
        if name in BARS:
            found.append(Check(f"times the tokens per second of {name}", times, BARS[name], at_least=True))
    return found


def make_parser() -> harness.Parser:
    """The options."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated, of: " + ", ".join(SYSTEMS))
    parser.add_argument("--shape", default="llama2-7b")
    add_run_options(parser)
    parser.add_argument("--windows", default="1,17,128,1024", help="of ours: widths of single passes")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one system")
    return parser


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen systems one after the other."""
    arguments = make_parser().parse_args(argv)
    check_out(arguments.out)
    names = [name for name in arguments.systems.split(",") if name]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise OptionError(f"unknown system {unknown[0]!r}: choose of {', '.join(SYSTEMS)}")
    resolve_device(arguments.device)
    common = as_words(arguments, ["shape", "prompt_tokens", *PASSED_ON])
    own: dict[str, Sequence[str]] = {"windows": as_words(arguments, ["windows"])}
    results = {name: run_system(SYSTEMS[name], common, own, draft=None, timeout_s=arguments.timeout) for name in names}
    verdicts = checks(results)
    report = {
        "benchmark": "streaming",
        "results": results,
        "times_ours_over": times_ours_over(results),
        "bound": link_bound(results),
        "agreement": None,
        "checks": [{**asdict(check), "holds": check.holds} for check in verdicts],
    }
    print(table(report), *window_lines(results), *verdicts, sep="\n")
    emit(report, arguments.out)
    failed = len(measured(results)) < len(results)
    return 1 if failed or not all(check.holds for check in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
