"""A benchmark model: a small real Llama embedded exactly into the shape, and the cost, of a large one.

    python tools/widen_model.py --source demo --shape llama2-7b --noise 0.05 --out wide-7b
    python tools/widen_model.py --source DIRECTORY --shape llama3-8b --context-rope yarn:16 --out wide-8b-128k

The result is a safetensors directory that transformers loads too. It has the small model's vocabulary, tokenizer and
language, so the small model drafts for it; `--noise` sets how often the draft is right. Benchmarks that need no
files fill their memory from `widening.checkpoint.WidenedCheckpoint` directly.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "kernels")]
sys.path.append(str(ROOT))

from widening.checkpoint import WidenedCheckpoint  # noqa: E402
from widening.shapes import SHAPES, shape_named  # noqa: E402

from offload_runtime.config import format_bytes  # noqa: E402
from offload_runtime.errors import OffloadError  # noqa: E402
from offload_runtime.memory import resolve_device  # noqa: E402
from offload_runtime.weights import convert_to_safetensors, fetch_demo_model, open_checkpoint  # noqa: E402

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _percent_reporter() -> Callable[[int, int], None]:
    """A line for every five percent of the bytes."""
    shown = -1

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal shown
        step = 20 * done_bytes // total_bytes
        if step > shown:
            shown = step
            _report(f"written {format_bytes(done_bytes)} of {format_bytes(total_bytes)}")

    return report


def _terminated(number: int, frame: object) -> NoReturn:
    """Leave through the exception handlers, which remove what is half-written."""
    sys.exit(128 + number)


def widen(arguments: argparse.Namespace) -> Path:
    """Write the widened model; returns its directory."""
    shape = shape_named(arguments.shape)
    device = resolve_device(arguments.device)
    demo = arguments.source == "demo"
    source = open_checkpoint(fetch_demo_model(on_progress=_report) if demo else arguments.source)
    widened = WidenedCheckpoint(
        source, shape, arguments.noise, arguments.seed, context_rope=arguments.context_rope, device=device
    )
    return convert_to_safetensors(
        widened, arguments.out, dtype=_DTYPES[arguments.dtype], on_progress=_percent_reporter()
    )


def main() -> int:
    """Returns the exit code: 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="safetensors directory, .gguf file, hub id, or demo")
    parser.add_argument("--shape", required=True, help=", ".join(SHAPES))
    parser.add_argument("--noise", type=float, default=0.0, help="relative, on the small model's matrices")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and of the surplus")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the written weights")
    parser.add_argument("--context-rope", help="scale a source without scaling to a longer context, e.g. yarn:16")
    parser.add_argument("--device", default="auto", help="where surplus random numbers are drawn: auto, cuda or cpu")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        print(widen(arguments))
    except OffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
