"""How long a session takes to save and to load, beside what the disk itself takes for as many bytes.

    python tools/bench_sessions.py --shape llama3-8b --tokens 32768 --kv gpu --directory DIR --out sessions-h200.json

A text of so many tokens is read; then, `--times` over, it is saved where nothing is, saved again with an answer more,
and loaded from a page cache that has forgotten it. The disk's own rates are those of writing as many files of that size
until the disk has them, by one thread or by eight, whichever is faster, and of reading the session past the cache by
eight. What is said behind the session is what is said without, and only what is new is read. Ends with one JSON line;
exit code 1 where less than 70 % of the disk's rate are reached, or an answer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
from bench_start import Reader, drop
from common import SHAPES, random_source
from harness import Check, check_out, emit, percentiles, provenance

from offload_runtime.config import GB
from offload_runtime.engine import Runtime
from offload_runtime.memory import resolve_device
from offload_runtime.params import GenerationParams
from offload_runtime.weights import open_checkpoint

_LEAST_SHARE = 0.7
_ANSWER_TOKENS, _NEW_TOKENS = 16, 100  # of each turn
_RECORD: dict[str, Any] = {"version": 1, "messages": []}


def disk_write_gbps(directory: Path, sizes: Sequence[int], threads: int) -> float:
    """Write files of these sizes until the disk has them."""
    content = memoryview(random.Random(0).randbytes(max(sizes)))

    def write(number: int) -> Path:
        path = directory / f"{number}.raw"
        with path.open("wb") as file:
            file.write(content[: sizes[number]])
            file.flush()
            os.fsync(file.fileno())
        return path

    started_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        paths = list(pool.map(write, range(len(sizes))))
    gbps = sum(sizes) / (time.perf_counter() - started_s) / GB
    for path in paths:
        path.unlink()
    return gbps


def disk_read_gbps(files: Sequence[Path]) -> float:
    """Read files that the page cache has forgotten, past it where that can be done."""
    drop(files)
    try:
        return Reader(os.O_DIRECT).gbps(files)
    except OSError:
        return Reader().gbps(files)


class Bench:
    """A runtime that holds a text, and where that is saved.

    Args:
        runtime: Loaded.
        directory: For the session, on the disk that is measured.
        tokens: Of the text.
    """

    def __init__(self, runtime: Runtime, directory: Path, tokens: int) -> None:
        self._runtime, self._directory, self._path = runtime, directory, directory / "session"
        chance = random.Random(0)
        draw = [chance.randrange(runtime.config.vocab_size) for _ in range(tokens + _NEW_TOKENS)]
        self._prompt, self._new = draw[:tokens], draw[tokens:]
        self.samples = defaultdict[str, list[float]](list)
        self.session_bytes = self.kept_tokens = self.differing = 0

    def run(self) -> None:
        """Save, save again, and load."""
        owner = object()
        text = [*self._prompt, *self._answer(self._prompt, owner)[0]]
        shutil.rmtree(f"{self._path}.kv", ignore_errors=True)
        os.sync()
        save_s = self._seconds(lambda: self._save(text, owner))
        following = [*text, *self._new]
        expected, _ = self._answer(following, owner)
        self.samples["save_again_s"].append(self._seconds(lambda: self._save([*following, *expected], owner)))
        self._save(text, owner)
        os.sync()
        files = sorted(Path(f"{self._path}.kv").glob("*.kv"))
        sizes = [file.stat().st_size for file in files]
        self.session_bytes = sum(sizes)
        write_gbps = max(disk_write_gbps(self._directory, sizes, threads) for threads in (1, 8))
        self._runtime.generate(self._prompt[:8], max_new_tokens=1)  # nothing is kept of the text
        read_gbps = disk_read_gbps(files)
        drop(files)
        record, later = json.loads(self._path.read_text()), object()
        load_s = self._seconds(lambda: self._runtime.load_session(self._path, record, owner=later))
        found, self.kept_tokens = self._answer(following, later)
        self.differing += found != expected
        for name, seconds, disk_gbps in (("save", save_s, write_gbps), ("load", load_s, read_gbps)):
            gbps = self.session_bytes / seconds / GB
            figures = {"s": seconds, "gbps": gbps, "disk_gbps": disk_gbps, "share": gbps / disk_gbps}
            for unit, figure in figures.items():
                self.samples[f"{name}_{unit}"].append(figure)
            print(f"{name}: {seconds:.2f} s, {gbps:.2f} of {disk_gbps:.2f} GB/s", flush=True)

    def _answer(self, tokens: list[int], owner: object) -> tuple[list[int], int]:
        """What is said behind a text, and how many tokens of it were not read again."""
        stream = self._runtime.start(tokens, GenerationParams(_ANSWER_TOKENS, ignore_eos=True), owner=owner)
        for _ in stream:
            pass
        return stream.result.tokens, stream.result.stats.kept_tokens

    def _save(self, tokens: list[int], owner: object) -> None:
        self._runtime.save_session(self._path, _RECORD, "", tuple(tokens), owner=owner)

    def _seconds(self, work: Callable[[], object]) -> float:
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load, save and load sessions, and report."""
    context = options.tokens + 2 * _ANSWER_TOKENS + _NEW_TOKENS
    source = open_checkpoint(options.model) if options.model else random_source(
        options.shape, layers=options.layers, seed=0, device=resolve_device(options.device), context_tokens=context
    )  # fmt: skip
    with (
        Runtime.load(
            source, draft="none", device=options.device, dtype=options.dtype, kv=options.kv, context=context
        ) as runtime,
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
    ):
        bench = Bench(runtime, Path(directory), options.tokens)
        for _ in range(options.times):
            bench.run()
        return {
            "benchmark": "sessions", "session_bytes": bench.session_bytes, "kept_tokens": bench.kept_tokens,
            "differing": bench.differing, "placement": runtime.placement,
            **{name: percentiles(figures).as_dict() for name, figures in bench.samples.items()},
            "settings": harness.settings_of(options), **provenance(*runtime.devices, commit=options.commit),
        }  # fmt: skip


def checks(report: dict[str, Any]) -> list[Check]:
    """What is promised of sessions."""
    return [
        Check("of the disk's rate while saving", report["save_share"]["median"], _LEAST_SHARE, at_least=True),
        Check("of the disk's rate while loading", report["load_share"]["median"], _LEAST_SHARE, at_least=True),
        Check("answers that differ behind a loaded session", report["differing"], 0, at_least=False),
    ]


@harness.one_line_errors
def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--model", help="checkpoint (directory, GGUF or hub id)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=32768, help="of the session")
    parser.add_argument("--kv", choices=("gpu", "host"), default="gpu")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--directory", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args(words)
    check_out(options.out)
    harness.require_all_positive(options, "tokens", "times")
    if bool(options.model) == bool(options.shape):
        parser.error("give either --model or --shape")
    report = measure(options)
    verdicts = checks(report)
    for verdict in verdicts:
        print(verdict)
    emit({**report, "checks": [verdict.as_dict() for verdict in verdicts]}, options.out)
    return int(not all(verdict.holds for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
