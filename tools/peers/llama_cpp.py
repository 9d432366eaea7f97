"""Measure llama.cpp on a mixture of experts of which the first layers' experts are in host memory (`--n-cpu-moe`), by
its own benchmark, llama-bench: tokens and a prompt under a limit of VRAM.

    python tools/widen_model.py --shape gpt-oss-120b --random --vocab-size 32768 --max-position 16384 --stored mxfp4 \\
        --out random-120b.gguf
    python tools/peers/llama_cpp.py --llama-bench build/bin/llama-bench --target random-120b.gguf --vram 22GB \\
        --threads 16 --out llama-cpp.json
    python tools/bench_experts.py --shape gpt-oss-120b --vram 22GB --prompts 2048 --out experts.json

Both have the same weights, routers included, and rows of random tokens, so experts are chosen by the same law; where
llama.cpp computes an expert does not depend on how often it is chosen. As few layers' experts as the limit allows are
in host memory: of one run with all of them there the VRAM is measured, and what the limit leaves is filled. Each way of
having them there (`--way`) is measured with that number: page-locked, so that prompts go over the link to the card, or
packed again for the CPU's kernels, which then computes prompts, too. VRAM is what the driver counts, context and all;
a number whose peak is beyond the limit is raised. Prints a line a run, then one JSON line.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A plain script: the rest of the tools is in the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import torch
from harness import check_out, emit, integers, percentiles, provenance, write_unfinished

from offload_runtime.cli.llama_bench import run_llama_bench
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.sizes import format_bytes, parse_bytes
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.gguf_header import read_gguf_header

WAYS = ("--load-mode none", "--load-mode none --no-host 1")
_PROBE = "--load-mode mmap"  # page-locks nothing, so it is there soon


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises `OptionError`, and `StorageError` where `--out` cannot be written."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--llama-bench", type=Path, required=True, help="that of a build of llama.cpp with CUDA")
    parser.add_argument("--target", type=Path, required=True, help="a .gguf file of a mixture of experts")
    parser.add_argument("--vram", default="all", help="of the device's memory, context and buffers included")
    parser.add_argument(
        "--n-cpu-moe", type=integers, default=(),
        help="layers whose experts are in host memory, comma-separated (default: as few as --vram allows)",
    )  # fmt: skip
    parser.add_argument(
        "--way",
        action="append",
        default=[],
        help=f"further options of llama-bench, in one word; may be repeated (default: {' and '.join(map(repr, WAYS))})",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU (default: all cores)")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ubatch", type=int, default=2048, help="tokens of a prompt that a pass reads")
    parser.add_argument("--repeats", type=int, default=5, help="measured times of each, after one that is not")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    options = parser.parse_args(argv)
    options.way = tuple(options.way) or WAYS
    harness.require_all_positive(options, "threads", "prompt_tokens", "new_tokens", "ubatch", "repeats")
    check_out(options.out)
    return options


def expert_bytes_by_layer(path: Path) -> list[int]:
    """Of each layer that has experts, their bytes.

    Raises:
        OptionError: There are none; errors as of reading a file's header.
    """
    found = Counter[int]()
    for name, tensor in read_gguf_header(path).tensors.items():
        if name.endswith("_exps.weight"):
            found[int(name.split(".")[1])] += tensor.nbytes
    if not found:
        raise OptionError(f"{path} is no mixture of experts: name another --target")
    return [found[layer] for layer in sorted(found)]


def run_bench(
    options: argparse.Namespace, n_cpu_moe: int, way: str, *, new_tokens: int, repeats: int
) -> dict[str, Any]:  # fmt: skip
    """One run of llama-bench, which loads the model anew.

    Returns:
        Its own words for both tests, and the peak of VRAM (`vram_bytes`, 0 without a GPU).

    Raises:
        OffloadError: It failed or took too long; DeviceError: it found no GPU.
    """
    device = torch.device(options.device)
    tests = ("-p", options.prompt_tokens, "-n", new_tokens, "-r", repeats, "-t", options.threads)
    sizes = ("-b", max(options.ubatch, options.prompt_tokens), "-ub", options.ubatch)
    layers = ("-ngl", 999 if device.type == "cuda" else 0, "-ncmoe", n_cpu_moe)
    words = ["-m", options.target, *tests, *sizes, *layers, *shlex.split(way)]
    (prompt, decoding), vram_bytes = run_llama_bench(options.llama_bench, words, device, options.timeout)
    return {"prompt": prompt, "decoding": decoding, "vram_bytes": vram_bytes}


def fewest_on_cpu(options: argparse.Namespace, layer_bytes: Sequence[int], limit_bytes: int) -> int:
    """How few of the first layers' experts have to be in host memory, by the VRAM that is used with all of them there.

    Raises:
        BudgetError: Even that is too much.
    """
    count = len(layer_bytes)
    used_bytes = run_bench(options, count, _PROBE, new_tokens=1, repeats=1)["vram_bytes"]
    if used_bytes > limit_bytes:
        raise BudgetError(
            f"with all experts in host memory llama.cpp takes {format_bytes(used_bytes)} of VRAM, and --vram is "
            f"{format_bytes(limit_bytes)}: raise it, or lower --ubatch"
        )
    while count and used_bytes + layer_bytes[count - 1] <= limit_bytes:
        count -= 1
        used_bytes += layer_bytes[count]
    return count


def row_of(run: dict[str, Any], n_cpu_moe: int, way: str, limit_bytes: int) -> dict[str, Any]:
    """The figures of a run."""
    prompt, decoding = run["prompt"], run["decoding"]
    return {
        "n_cpu_moe": n_cpu_moe, "way": way, "vram_bytes": run["vram_bytes"], "fits": run["vram_bytes"] <= limit_bytes,
        "tok_per_s": percentiles(decoding["samples_ts"]), "prompt_tok_per_s": percentiles(prompt["samples_ts"]),
        "prompt_s": prompt["n_prompt"] / percentiles(prompt["samples_ts"])["median"],
    }  # fmt: skip


def measure(options: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way and number; `report` gets what llama.cpp says of itself. Raises what a run does."""
    limit_bytes = sys.maxsize if options.vram == "all" else parse_bytes(options.vram)
    layer_bytes, rows = expert_bytes_by_layer(options.target), list[dict[str, Any]]()
    if beyond := [count for count in options.n_cpu_moe if count > len(layer_bytes)]:
        raise OptionError(f"--n-cpu-moe {beyond[0]}: only {len(layer_bytes)} layers have experts")
    counts = options.n_cpu_moe or (fewest_on_cpu(options, layer_bytes, limit_bytes),)
    for way in options.way:
        for count in counts:
            while True:
                run = run_bench(options, count, way, new_tokens=options.new_tokens, repeats=options.repeats)
                rows.append(row_of(run, count, way, limit_bytes))
                print(describe(rows[-1]), flush=True)
                about = {name: run["prompt"][name] for name in ("backends", "gpu_info", "cpu_info")}
                report |= {"version": run["prompt"]["build_commit"], "llama_cpp": about}
                write_unfinished(report | {"rows": rows}, options.out)
                if rows[-1]["fits"] or options.n_cpu_moe or count == len(layer_bytes):
                    break
                count += 1
    return rows


def describe(row: dict[str, Any]) -> str:
    """One line of a run's figures."""
    speed, prompt = row["tok_per_s"]["median"], row["prompt_tok_per_s"]["median"]
    beyond = "" if row["fits"] else ", beyond --vram"
    return (
        f"{row['n_cpu_moe']} layers' experts in host memory, {row['way']}: {speed:.2f} tokens/s, a prompt at "
        f"{prompt:.0f} tokens/s, {format_bytes(row['vram_bytes'])} of VRAM{beyond}"
    )


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = parse(argv)
    report: dict[str, Any] = {
        "system": "llama.cpp", "settings": harness.settings_of(options),
        "routing": "by the file's own routers, of random tokens",
        **provenance(resolve_device(options.device), commit=options.commit),
    }  # fmt: skip
    rows = measure(options, report)
    fitting = [row for row in rows if row["fits"]]
    best = {
        name: max(fitting, key=lambda row: row[name]["median"], default=None)
        for name in ("tok_per_s", "prompt_tok_per_s")
    }
    emit(report | {"rows": rows, "best": best}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
