"""llama.cpp's own benchmark, which `offload-runtime bench` puts beside its figures: the same file, prompts as long, and
as many layers on the card as fit the same memory, which is found by trying."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_runtime.cli import terminal
from offload_runtime.cli.options import BenchOptions
from offload_runtime.errors import BudgetError, DeviceError, OffloadError, OptionError
from offload_runtime.sizes import format_bytes

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

_SAMPLE_S = 0.02
_MOST_PROBES = 8
_SHOWN_CHARACTERS = 600
_TIMEOUT_S = 3600.0
_ALL_LAYERS = 999


class DeviceMemoryWatch:
    """The most bytes of a card that were in use beyond those at the start, sampled by a thread in a `with`; 0 without a
    card."""

    def __init__(self, device: Any) -> None:
        self._device, self._ended, self.peak_bytes = device, threading.Event(), 0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _used_bytes(self) -> int:
        import torch

        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, self._used_bytes() - self._before_bytes)

    def __enter__(self) -> DeviceMemoryWatch:
        if self._device.type == "cuda":
            self._before_bytes = self._used_bytes()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._device.type == "cuda":
            self._thread.join()


def run_llama_bench(program: Path, words: Sequence[object], device: Any, timeout_s: float) -> tuple[list[Any], int]:
    """Run llama-bench, which loads the model anew.

    Returns:
        What it says of each of its tests, and the peak of the card's memory.

    Raises:
        OffloadError: It failed or took too long; OptionError: it cannot be run; DeviceError: it found no GPU.
    """
    try:
        with DeviceMemoryWatch(device) as watch:
            done = subprocess.run(
                [str(program), *map(str, words), "-o", "json"], capture_output=True, text=True, timeout=timeout_s,
                check=False,
            )  # fmt: skip
    except OSError as error:
        raise OptionError(f"{program} does not run ({error.strerror or error}): build llama.cpp") from error
    except subprocess.TimeoutExpired as error:
        raise OffloadError(f"llama-bench had no result within {timeout_s:g} s") from error
    said = done.stderr.strip()[-_SHOWN_CHARACTERS:]
    if done.returncode:
        raise OffloadError(f"llama-bench failed ({done.returncode}): {said}")
    try:
        tests = list(json.loads(done.stdout))
        no_gpu = device.type == "cuda" and not tests[0]["gpu_info"]
    except (ValueError, LookupError, TypeError) as error:
        raise OffloadError(f"llama-bench printed no results ({error!r}): {done.stdout[:_SHOWN_CHARACTERS]}") from error
    if no_gpu:
        why = f"build it with CUDA, or see why its library is not loaded ({said})"
        raise DeviceError(f"llama-bench found no GPU, only {tests[0]['backends']}: {why}")
    return tests, watch.peak_bytes


def fewest_on_cpu(probe: Callable[[int], int], most: int, count: int, each_bytes: int, limit_bytes: int) -> int | None:
    """Return how few of `count` layers of about `each_bytes` have to stay on the CPU; None where not even `most` of
    them are enough. `probe` says what the card holds with so many there, in bytes; it is asked a few times."""
    on_cpu = min(most, max(0, -(-(count * each_bytes - limit_bytes) // each_bytes)))
    least, fitting = 0, None
    for _ in range(_MOST_PROBES):
        peak_bytes = probe(on_cpu)
        if peak_bytes <= limit_bytes:
            fitting = on_cpu
            on_cpu = max(least, on_cpu - (limit_bytes - peak_bytes) // each_bytes)
        else:
            least, step = on_cpu + 1, -(-(peak_bytes - limit_bytes) // each_bytes)
            on_cpu = min(on_cpu + step, most if fitting is None else fitting - 1)
        if least > on_cpu or on_cpu == fitting:
            break
    return fitting


@dataclass(frozen=True)
class LlamaFigures:
    """Says what llama-bench has measured: tokens a second by the length of the prompt, and how it was asked."""

    prompt_tok_per_s: dict[int, float]
    tok_per_s: dict[int, float]
    about: dict[str, Any]


@dataclass(frozen=True)
class LlamaBench:
    """llama-bench, and the file that it is to measure."""

    program: Path
    model: Path

    @classmethod
    def found(cls, named: Path | None, target: str) -> LlamaBench:
        """Find both.

        Raises:
            OptionError: There is no llama-bench, or the target is no GGUF file.
            CheckpointError, HubError: As of `open_checkpoint`.
        """
        from offload_runtime.weights.header import is_gguf
        from offload_runtime.weights.sources import fetch_model, local_path

        program = shutil.which("llama-bench" if named is None else str(named))
        if program is None:
            where = "no llama-bench is in PATH" if named is None else f"{named} is no program"
            raise OptionError(f"--compare: {where}: name that of a build of llama.cpp with --llama-bench, or drop it")
        path = Path(target).expanduser()
        if not path.exists():
            path = local_path(target) or fetch_model(target)
        if path.is_dir():
            files = sorted(one for one in path.iterdir() if one.suffix.lower() == ".gguf")
            path = files[0] if len(files) == 1 else path
        if not (path.is_file() and is_gguf(path)):
            raise OptionError(f"--compare: llama.cpp reads GGUF files, and {target} is none: name one with --target")
        return cls(Path(program), path)

    def measure(self, runtime: Runtime, options: BenchOptions, limit_bytes: int | None) -> LlamaFigures:
        """Measure prompts and answers as the runtime's were, which is closed, with as many layers, or experts of
        layers, on the card as `limit_bytes` of it have room for; None is a CPU.

        Raises:
            BudgetError: Not even none of them fits; others as of `run_llama_bench`.
        """
        device, lengths = runtime.device, ",".join(map(str, options.lengths))
        threads = options.threads or os.cpu_count() or 1
        common: list[object] = ["-m", self.model, "-t", threads]
        layers = list[object](("-ngl", 0))
        placement = "on the CPU"
        if limit_bytes is not None:
            on_cpu, layers = self._placed(runtime, common, max(options.lengths) + options.tokens, limit_bytes)
            what = "layers' experts" if layers[-2] == "-ncmoe" else "layers"
            placement = f"{on_cpu} {what} on the CPU, as {format_bytes(limit_bytes)} of device memory are for either"
        terminal.status_line(f"llama-bench: {placement}")
        repeats = ("-r", options.repeats)
        prompts, prompts_bytes = run_llama_bench(
            self.program, [*common, *layers, "-p", lengths, "-n", 0, *repeats], device, _TIMEOUT_S
        )
        answers, answers_bytes = run_llama_bench(
            self.program, [*common, *layers, "-p", 0, "-n", options.tokens, "-d", lengths, *repeats], device, _TIMEOUT_S
        )
        try:
            prompt_tok_per_s = {int(one["n_prompt"]): float(one["avg_ts"]) for one in prompts}
            tok_per_s = {int(one["n_depth"]): float(one["avg_ts"]) for one in answers}
            missing = [one for one in options.lengths if one not in prompt_tok_per_s or one not in tok_per_s]
            version = prompts[0].get("build_commit")
        except (LookupError, TypeError, ValueError) as error:
            raise OffloadError(f"llama-bench printed other results than were asked for ({error!r})") from error
        if missing:
            raise OffloadError(f"llama-bench printed nothing for prompts of {missing[0]} tokens: take a newer one")
        about = {
            "program": self.program.name, "version": version, "options": [str(one) for one in layers],
            "threads": threads, "peak_device_bytes": max(prompts_bytes, answers_bytes),
            "in_words": f"llama.cpp {version}: {placement}",
        }  # fmt: skip
        return LlamaFigures(prompt_tok_per_s, tok_per_s, about)

    def _placed(
        self, runtime: Runtime, common: Sequence[object], context: int, limit_bytes: int
    ) -> tuple[int, list[object]]:
        """Return how few layers, or layers' experts of a mixture, have to stay on the CPU, and the options for that: by
        what trying takes, beginning from what the file's size lets expect. Raises `BudgetError`."""
        from offload_runtime.weights.gguf_header import read_gguf_header
        from offload_runtime.weights.local import weight_bytes

        count = runtime.config.num_layers
        each_bytes = max(1, weight_bytes(self.model) // count)
        is_mixture = any("_exps." in name for name in read_gguf_header(self.model).tensors)
        why = ""

        def options(on_cpu: int) -> list[object]:
            return ["-ngl", _ALL_LAYERS, "-ncmoe", on_cpu] if is_mixture else ["-ngl", count + 1 - on_cpu]

        def probe(on_cpu: int) -> int:
            nonlocal why
            words = [*common, *options(on_cpu), "-p", 0, "-n", 1, "-d", context - 1, "-r", 1]
            try:
                return run_llama_bench(self.program, words, runtime.device, _TIMEOUT_S)[1]
            except (OptionError, DeviceError):
                raise
            except OffloadError as error:  # want of memory has no form of its own
                why = f" ({error})"
                return limit_bytes + each_bytes

        fitting = fewest_on_cpu(probe, count if is_mixture else count + 1, count, each_bytes, limit_bytes)
        if fitting is None:
            short = f"llama.cpp does not fit {format_bytes(limit_bytes)} of device memory"
            raise BudgetError(f"{short}{why}: raise --vram, or drop --compare")
        return fitting, options(fitting)
