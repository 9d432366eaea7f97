"""How long a model takes to start: until its weights are in place, and until its first token.

    python tools/bench_start.py --target random-70b.gguf --emulate rtx4090 --cache warm --out start-70b.json
    python tools/bench_start.py --target wide-13b --vram 24GB --cache cold --out start-13b-cold.json

Before it the files are read into the page cache (`warm`), or dropped from it and read past it, by several threads, to
know the disk (`cold`). Weights may take 1.3 times what their bytes take at `--gbps`, or at the disk's own rate, and
the host memory is held against the plan's. Imports come before the clock. Ends with one JSON line; exit code 1 when a
bar is missed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
from harness import Check, check_machine, check_out, emit, provenance

from offload_runtime.config import ENCODE, GB, WEIGHTS
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.plan import RunPlan
from offload_runtime.weights.gguf import gguf_parts

_MOST_TIMES, _MOST_OFF = 1.3, 0.03
_THREADS = 8
_BLOCK_BYTES = 16 << 20
_MOST_DIRECT_BYTES = 6 << 30  # of the files, read to know the disk
_NO_WORDS = 64  # tokens of a prompt for a model without a language
Forget = Callable[[Sequence[Path]], str]
_PROMPT = "It is a truth universally acknowledged, that"


def files_of(target: Path) -> list[Path]:
    """The files that hold a model's weights.

    Raises:
        OptionError: There are none.
    """
    found = sorted(target.glob("*.safetensors")) if target.is_dir() else gguf_parts(target)
    if not found or not all(path.is_file() for path in found):
        raise OptionError(f"{target} has no weights: name a directory with safetensors, or a .gguf file")
    return found


class Reader:
    """Reads files in blocks by several threads, into memory that nobody looks at.

    Args:
        flags: Of opening, beside reading.
    """

    def __init__(self, flags: int = 0) -> None:
        self._flags = os.O_RDONLY | flags
        self._buffers = threading.local()

    def gbps(self, files: Sequence[Path], *, most_bytes: int | None = None) -> float:
        """Read them, or as much, spread over them; how fast that was in GB/s. Raises `OSError`."""
        blocks = [(path, at) for path in files for at in range(0, path.stat().st_size, _BLOCK_BYTES)]
        if most_bytes is not None:
            blocks = blocks[:: max(1, len(blocks) * _BLOCK_BYTES // most_bytes)]
        started_s = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as pool:
            nbytes = sum(pool.map(self._read, blocks))
        return nbytes / (time.perf_counter() - started_s) / GB

    def _read(self, block: tuple[Path, int]) -> int:
        if not hasattr(self._buffers, "pages"):
            self._buffers.pages = mmap.mmap(-1, _BLOCK_BYTES)  # aligned, as reading past the cache demands
        handle = os.open(block[0], self._flags)
        try:
            return os.preadv(handle, [self._buffers.pages], block[1])
        finally:
            os.close(handle)


def drop(files: Sequence[Path]) -> str:
    """Let the page cache forget the files; how: all that is cached, where we may, or these files."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "all caches dropped"
    except OSError:
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "these files dropped"


def prepare(files: Sequence[Path], cache: str, forget: Forget) -> dict[str, Any]:
    """Bring the page cache into the state that was asked for; the disk's rate, of a cold one, where it can be read past
    the cache."""
    if cache == "warm":
        return {"cache": cache, "how": "read before", "disk_gbps": None, "read_gbps": Reader().gbps(files)}
    forget(files)
    try:
        disk_gbps = Reader(os.O_DIRECT).gbps(files, most_bytes=_MOST_DIRECT_BYTES)
    except OSError:
        disk_gbps = None
    return {"cache": cache, "how": forget(files), "disk_gbps": disk_gbps, "read_gbps": None}


def peak_rss_bytes() -> int:
    """Of this process, so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def measure(options: argparse.Namespace, forget: Forget) -> dict[str, Any]:
    """Load once, say one token, and report."""
    files = files_of(options.target)
    nbytes, found = sum(path.stat().st_size for path in files), prepare(files, options.cache, forget)
    stamps_s, peaks_bytes, plans = dict[str, float](), dict[str, int](), list[RunPlan]()
    started_s = time.perf_counter()

    def stamp(stage: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            stamps_s[stage], peaks_bytes[stage] = time.perf_counter() - started_s, peak_rss_bytes()

    with Runtime.load(
        str(options.target), draft=options.draft, device=options.device, dtype=options.dtype, vram=options.vram,
        ram=options.ram, context=options.context, weights=options.weights, encode=options.encode,
        emulate=options.emulate, on_progress=stamp, on_plan=plans.append,
    ) as runtime:  # fmt: skip
        loaded_s = time.perf_counter() - started_s
        prompt = _PROMPT if runtime.tokenizer.get_vocab() else list(range(_NO_WORDS))
        next(iter(runtime.stream(prompt, max_new_tokens=2, ignore_eos=True)), None)
        first_token_s, peak_bytes, plan = time.perf_counter() - started_s, peak_rss_bytes(), plans[-1]
        gbps = found["disk_gbps"] or options.gbps
        return {
            "benchmark": "start", **found, "file_bytes": nbytes, "weights_s": stamps_s["target weights"],
            "loaded_s": loaded_s, "first_token_s": first_token_s, "stages_s": stamps_s,
            "bar_gbps": gbps, "bytes_s": nbytes / gbps / GB,
            "peak_rss_bytes": peak_bytes, "peak_rss_bytes_by_stage": peaks_bytes, "planned_host_bytes": plan.host_bytes,
            "planned_loading": {part.name: part.nbytes for part in plan.loading},
            "planned_host": {part.name: part.nbytes for part in plan.host},
            "placement": runtime.placement, "load_report": runtime.load_report,
            "settings": harness.settings_of(options), **provenance(*runtime.devices, commit=options.commit),
        }  # fmt: skip


def checks(report: dict[str, Any]) -> list[Check]:
    """What is promised of a start."""
    rate, times = f"{report['bar_gbps']:.1f} GB/s", report["weights_s"] / report["bytes_s"]
    off = abs(report["peak_rss_bytes"] / report["planned_host_bytes"] - 1)
    return [
        Check(f"times what the bytes take at {rate}", times, _MOST_TIMES, at_least=False),
        Check("share off the planned host memory", off, _MOST_OFF, at_least=False),
    ]


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="directory with safetensors, or a .gguf file")
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm")
    parser.add_argument("--gbps", type=float, default=5.0, help="of reading, where no disk is measured")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--vram", help="limit of device memory, like 24GB")
    parser.add_argument("--ram", help="limit of host memory, like 64GB")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--weights", choices=WEIGHTS, default="auto")
    parser.add_argument("--encode", choices=ENCODE, default="none")
    parser.add_argument("--emulate", help="a machine with a smaller card to play, by name or file")
    return parser


@harness.one_line_errors
def main(words: Sequence[str] | None = None, *, forget: Forget = drop) -> int:
    """Measure and print; returns the exit code. `forget` drops files from the page cache and says how."""
    options = make_parser().parse_args(words)
    check_out(options.out)
    check_machine(options.vram, options.emulate)
    if not options.gbps > 0:
        raise OptionError(f"--gbps must be more than 0, not {options.gbps}")
    report = measure(options, forget)
    verdicts = checks(report)
    print(
        f"{report['file_bytes'] / GB:.2f} GB, {report['how']}: weights in place after {report['weights_s']:.1f} s, "
        f"loaded after {report['loaded_s']:.1f} s, first token after {report['first_token_s']:.1f} s; peak RSS "
        f"{report['peak_rss_bytes'] / GB:.2f} GB, planned {report['planned_host_bytes'] / GB:.2f} GB",
        report["load_report"], report["placement"], *verdicts, sep="\n",
    )  # fmt: skip
    emit({**report, "checks": [verdict.as_dict() for verdict in verdicts]}, options.out)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
