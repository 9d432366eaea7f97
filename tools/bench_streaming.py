"""Streaming of weights side by side: this runtime, tuned DeepSpeed ZeRO-Inference, accelerate `cpu_offload`.

    python tools/bench_streaming.py --shape llama2-7b --vram 24GB --out tools/results/streaming-h200.json

Every system runs in its own process with the same weights, prompt, dtype and VRAM; a system that is not installed is
reported as missing. Prints a table, each claim with its verdict, then one JSON line; exit code 1 when a claim is
missed or a system failed.

    python tools/bench_streaming.py --systems ours --shape llama3-70b --stored q4_k_m --emulate rtx4090 \\
        --resident-layers auto --windows 1,17,256 --new-tokens 32 --scripted 10,15 --repeats 1

Weights as files store them (`--stored`), or coded (`--encode always`), are held against what the profile predicts, and
a script says what a draft is worth that is right so often.

    python tools/bench_streaming.py --systems ours --shape qwen3.6-27b --stored q8_0 --emulate rtx4090 --vram 22GB \\
        --context 8192 --resident-layers auto --windows 1,64,256 --new-tokens 41 --scripted 8,20 --repeats 1 \\
        --warmup-new-tokens 2 --timeout 500

A hybrid's 10 GB a pass, in Q8_0 or `fp8`.

    python tools/bench_streaming.py --systems ours --target 70b.gguf --emulate rtx4090 --resident-layers auto --cold

Of a `--target` in files it also says how long they take to be in place, and how much memory the host needs for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import harness
from common import PASSED_ON, add_run_options, as_words
from harness import Check, check_out, finish
from ours_runtime import add_plain_options, add_single_options
from systems import SYSTEMS as COMPARED
from systems import System, link_bound, measured, run_system, table, times_ours_over

from offload_runtime.errors import OptionError
from offload_runtime.sizes import GB
from offload_runtime.stream.device import resolve_device

_OF_OURS = (
    "windows", "passes", "weights", "encode", "kv", "emulate", "devices", "scripted", "scripted_window", "cold",
    "context",
)  # fmt: skip
SYSTEMS = {
    "ours": System("ours_runtime.py", ("--draft", "none"), takes=_OF_OURS), "deepspeed": COMPARED["deepspeed"],
    "accelerate": replace(COMPARED["accelerate"], options=("--no-pin",)), "accelerate-pinned": COMPARED["accelerate"],
}  # fmt: skip

# How many times the tokens per second of these systems is claimed.
BARS = {"deepspeed": 1.15, "accelerate": 5.0}
# Of the link: what a pass of many rows decodes before its products may show a little.
_WIDE_TOKENS, _LEAST_SHARE, _LEAST_WIDE_SHARE = 17, 0.97, 0.95
_MOST_OFF = 0.05  # of what was predicted


def window_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    """Our passes over wider windows, what they read, and what a script brings."""
    ours = measured(results).get("ours", {})
    lines = []
    read_bytes = ours.get("weights", {}).get("read_bytes_per_pass", 0)
    for row in ours.get("windows", []):
        share = f"{row['link_share']:.1%}" if row["link_share"] else "-"
        bf16_gbps = 2 * ours["weights"]["streamed_elements"] / row["pass_s"]["median"] / GB  # if nothing were coded
        predicted = f", predicted {row['predicted_s']:.4f} s ({row['share_off']:+.1%})" if row["predicted_s"] else ""
        lines.append(
            f"  window {row['window_tokens']:5}: pass {row['pass_s']['median']:.4f} s{predicted}, link "
            f"{row['link_gbps']:.1f} GB/s = {share} of peak ({bf16_gbps:.1f} in 16 bits), weights read "
            f"at {read_bytes / row['pass_s']['median'] / GB:.0f} GB/s, host launch {row['host_launch_share']:.1%} of it"
        )
    for row in ours.get("scripted", []):
        bound = f", {row['share_of_bound']:.1%} of {row['bound_tok_per_s']:.2f}" if row["bound_tok_per_s"] else ""
        tokens = f"{row['accepted_per_pass']:3} tokens a pass of {row['window_tokens']}"
        lines.append(f"  {tokens}: {row['tok_per_s']:.2f} tok/s{bound}")
    if ours.get("start"):
        start, done = ours["start"], ours["start"]["stages_s"].get("target weights")
        lines.append(
            f"  {start['load_report']}; weights in place after {'-' if done is None else f'{done:.1f}'} s, ready after "
            f"{start['loaded_s']:.1f} s; peak RSS {start['peak_rss_bytes'] / GB:.2f} GB, planned "
            f"{start['planned_host_bytes'] / GB:.2f} GB"
        )
    if ours.get("weights"):
        kinds = ", ".join(
            f"{nbytes / GB:.2f} GB in {kind}" for kind, nbytes in ours["weights"]["bytes_by_kind"].items()
        )
        lines.append(f"  weights: {kinds}; {ours['placement']}")
        copy_gbps = ours["weights"].get("copy_gbps")
        if copy_gbps:
            passes_per_s = ours["tok_per_s"] / ours["tokens_per_pass"]
            gbps = ours["weights"]["read_bytes_per_pass"] * passes_per_s / GB
            lines.append(f"  answers read weights at {gbps:.0f} GB/s = {gbps / copy_gbps:.1%} of copies on the card")
    return lines


def checks(results: dict[str, dict[str, Any]]) -> list[Check]:
    """The claims that this run can judge: those about systems and figures that it measured."""
    ours = measured(results).get("ours")
    if ours is None:
        return []
    found = []
    for row in ours["windows"]:
        width = row["window_tokens"]
        if row["link_share"]:
            bar = _LEAST_SHARE if width <= _WIDE_TOKENS else _LEAST_WIDE_SHARE
            found.append(Check(f"link share of the peak, window {width}", row["link_share"], bar, at_least=True))
        if row["predicted_s"] is not None:
            claim = f"share off what was predicted, window {width}"
            found.append(Check(claim, abs(row["share_off"]), _MOST_OFF, at_least=False))
        if ours["bytes_per_pass"]:  # else the launch of a pass hides behind nothing
            claim = f"host launch share of a pass, window {width}"
            found.append(Check(claim, row["host_launch_share"], 0.10, at_least=False))
    for row in ours.get("scripted", []):
        claim = f"answers unlike the script, {row['accepted_per_pass']} tokens a pass"
        found.append(Check(claim, 0 if row["identical_to_plain"] else 1, 0, at_least=False))
        if row["share_of_bound"] is not None:
            claim = f"share of what the link allows at {row['accepted_per_pass']} tokens a pass"
            found.append(Check(claim, row["share_of_bound"], _LEAST_WIDE_SHARE, at_least=True))
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
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--target", help="checkpoint: a directory or a .gguf file; see widen_model.py")
    model.add_argument("--shape", help="made in memory: random weights of this shape (llama2-7b)")
    add_run_options(parser)
    add_single_options(parser)
    parser.set_defaults(windows=(1, 17, 128, 1024))
    add_plain_options(parser)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one system")
    return parser


@harness.one_line_errors
def main(argv: Sequence[str] | None = None, *, run: Callable[..., dict[str, Any]] = run_system) -> int:
    """Run the chosen systems one after the other, each by `run`."""
    arguments = make_parser().parse_args(argv)
    check_out(arguments.out)
    names = [name for name in arguments.systems.split(",") if name]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise OptionError(f"unknown system {unknown[0]!r}: choose of {', '.join(SYSTEMS)}")
    resolve_device(arguments.device)
    common = as_words(arguments, ["target", "shape", "prompt_tokens", *PASSED_ON])
    own: dict[str, Sequence[str]] = {name: as_words(arguments, [name]) for name in _OF_OURS}
    results = {name: run(SYSTEMS[name], common, own, draft=None, timeout_s=arguments.timeout) for name in names}
    report = {
        "benchmark": "streaming", "results": results, "times_ours_over": times_ours_over(results),
        "bound": link_bound(results), "agreement": None,
    }  # fmt: skip
    print(table(report), *window_lines(results), sep="\n")
    code = finish(report, checks(results), arguments.out)
    return 1 if len(measured(results)) < len(results) else code


if __name__ == "__main__":
    sys.exit(main())
