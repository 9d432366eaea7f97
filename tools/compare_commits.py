"""Two commits side by side: the trees of both run the same benchmarks with their own tools, in turn or, `--at-once`,
each on a card of its own, which they swap with every repeat.

    python tools/compare_commits.py --base ../before --source SmolLM2-135M.gguf --text novel.txt --code FILE \\
        --cases streamed-7b,resident-8b-q4 --repeats 2 --out comparison.json

Prints how fast this tree is in terms of the other, figure by figure, then one JSON line; exit code 1 when a figure is
more than 2 % slower, or a benchmark failed in one tree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import Check, emit, write_unfinished

_HERE = Path(__file__).resolve().parent.parent
_PATHS = (".", "kernels", "tools", "tools/peers")
_OURS = "bench_streaming.py --systems ours --repeats 1"
_RESIDENT = "bench_streaming.py --systems ours --resident-layers auto --windows 1 --new-tokens 256 --repeats 5"
_PASS, _SPEED = "results.ours.windows.0.pass_s.median", "results.ours.tok_per_s"
_WIDENED = "--source {source} --text {text}"
# What runs, and where its figures stand in the JSON: tokens a second, or seconds.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "streamed-7b": (f"{_OURS} --shape llama2-7b --resident-layers 0 --windows 1 --new-tokens 8", (_PASS, _SPEED)),
    "resident-7b": (f"{_RESIDENT} --shape llama2-7b", (_PASS, _SPEED)),
    "resident-8b-q4": (f"{_RESIDENT} --shape llama3-8b --stored q4_k_m", (_PASS, _SPEED)),
    "trees-13b": (
        f"bench_drafters.py {_WIDENED} --code {{code}} --shape llama2-13b --emulate rtx4090 --kinds prose --places 1 "
        "--drafters none noise=0.05 --gammas 16 --nodes 256 --temperatures 0.6 --plain-tokens 4",
        ("rows.0.tok_per_s", "rows.1.tok_per_s", "rows.3.tok_per_s"),
    ),
    "long-7b": (
        f"bench_long_context.py {_WIDENED} --delta {{delta}} --shape llama2-7b --context 120000 --kv host --vram 24GB "
        "--tokens 80 --plain-tokens 3 --windows 1 --passes 2 --temperatures 0.6",
        ("prefill.s", "windows.0.pass_s.median", "decoding.0.s_per_token"),
    ),
    "serving-13b": (
        f"bench_serving.py {_WIDENED} --shape llama2-13b --noise 0.05 --draft none --emulate rtx4090 "
        "--vram 23.8GB --context 320 --requests 16 --minutes 0.5 --prompt-tokens 64,128,256 --new-tokens 64",
        ("rows.0.tok_per_s",),
    ),
    "cards-13b": (
        f"{_OURS} --shape llama2-13b --resident-layers 0 --devices cuda:0,cuda:1 --vram 24GB --windows 1 "
        "--new-tokens 8", (_PASS, _SPEED),
    ),
    "start-70b": (
        f"{_OURS} --target {{target}} --emulate rtx4090 --resident-layers auto --windows 1 --new-tokens 2 --cold",
        ("results.ours.start.loaded_s",),
    ),
    "import": ("import", ("s",)),
}  # fmt: skip


def figure(report: Any, path: str) -> float:
    """What stands in a report at a path of keys and numbers. Raises `RuntimeError` where nothing does."""
    found = report
    for name in path.split("."):
        if name not in found if isinstance(found, dict) else int(name) >= len(found):
            raise RuntimeError(f"there is no {path} in {str(report)[:400]}")
        found = found[int(name)] if isinstance(found, list) else found[name]
    return float(found)


def run(tree: Path, words: list[str], timeout_s: float, card: int | None = None) -> dict[str, Any]:
    """The last line that a tree's tool prints, which sees one card or (None) all; of `import` how long the command line
    takes to know its options.

    Raises:
        RuntimeError: It printed no JSON.
    """
    environment = {
        **os.environ,
        **({} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)}),
        "PYTHONPATH": os.pathsep.join(str(tree / part) for part in _PATHS),
    }
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    own = [sys.executable, "-m", "offload_runtime", "--help"]
    command = own if words == ["import"] else [sys.executable, str(tree / "tools" / words[0]), *words[1:]]
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, timeout=timeout_s)
    if words == ["import"]:
        return {"s": time.perf_counter() - began}
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        raise RuntimeError(f"{' '.join(command)} printed no JSON:\n{done.stderr[-800:]}") from None


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the other tree")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, of: " + ", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=2, help="runs of each tree")
    parser.add_argument("--at-once", action="store_true", help="run both trees at a time, on cards 0 and 1")
    parser.add_argument(
        "--timeout", type=float, default=200.0, help="seconds for one run, in which kernels are compiled anew"
    )
    for name in ("source", "text", "code", "delta", "target"):
        parser.add_argument(f"--{name}", default="", help="of the benchmarks")
    options = parser.parse_args()
    trees, rows, checks = (("base", options.base.resolve()), ("ours", _HERE)), [], []
    ran: dict[str, dict[str, Any]] = {}  # where each tree ran, and which it is
    for case in options.cases.split(","):
        command, paths = CASES[case]
        words = [word for part in command.split() for word in part.format(**vars(options)).split()]
        found: dict[str, dict[str, list[float]]] = {path: {"base": [], "ours": []} for path in paths}
        for turn in range(options.repeats):
            order = trees if turn % 2 == 0 else trees[::-1]
            cards = range(len(order)) if options.at_once else [None] * len(order)
            with ThreadPoolExecutor(len(order) if options.at_once else 1) as runs:
                reports = {
                    name: runs.submit(run, tree, words, options.timeout, card)
                    for (name, tree), card in zip(order, cards, strict=True)
                }
            for name, future in reports.items():
                try:
                    report = future.result()
                    ran[name] = {key: report[key] for key in ("machine", "versions", "commit") if key in report}
                    for path in paths:
                        found[path][name].append(figure(report, path))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    checks.append(Check(f"{case} failed in {name}: {error}", 1, 0, at_least=False))
                    print(checks[-1], flush=True)
        for path, figures in found.items():
            if not (figures["base"] and figures["ours"]):
                continue
            ratio = median(figures["ours"]) / median(figures["base"])
            speed = ratio if path.endswith("tok_per_s") else 1 / ratio
            rows.append({"case": case, "figure": path, **figures, "times_base": speed})
            checks.append(Check(f"{case} {path} {figures}, times base", speed, 0.98, at_least=True))
            print(checks[-1], flush=True)
        write_unfinished({"benchmark": "commits", "trees": ran, "rows": rows}, options.out)
    emit({"benchmark": "commits", "trees": ran, "rows": rows, "checks": [one.as_dict() for one in checks]}, options.out)
    return 0 if all(one.holds for one in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
