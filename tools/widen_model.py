"""A benchmark model: a small real Llama, stretched to a longer context, embedded exactly into the shape of a large one.

    python tools/widen_model.py --source demo --shape llama2-7b --noise 0.05 --out wide-7b
    python tools/widen_model.py --source demo --delta part-0.safetensors part-1.safetensors --out stretched \\
        --rope '{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}'
    python tools/widen_model.py --source demo --shape llama-68m --random --out draft-68m
    python tools/widen_model.py --source demo --shape llama2-13b --noise 0.05 --stored q8_0 --out wide-13b.gguf
    python tools/widen_model.py --source demo --shape llama2-70b --random --vocab-size 128256 --stored q4_k_m \\
        --out random-70b.gguf
    python tools/widen_model.py --source demo --shape qwen3.6-27b --random --vocab-size 248320 --stored q8_0 \\
        --out random-27b.gguf
    python tools/widen_model.py --shape gpt-oss-120b --random --vocab-size 32768 --max-position 16384 --stored mxfp4 \\
        --out random-120b.gguf

The result is a safetensors directory that transformers loads too, with the MTP layer of a source that carries one
(`train_head.py`), widened with it. `--delta` applies a sparse fine-tune: files of new
values, not differences, under transformers' names, which take the place of the source's; `--rope` is another rotary
embedding. In a `--shape` the model costs what a large one does and has the small one's vocabulary, tokenizer and
language, so the small model drafts for it; `--noise` sets how often the draft is right. With `--random` it has the
vocabulary and the tokenizer only: a draft of which just the time of a step is measured; in a file without a `--source`
tokens are numbers that mean nothing, and weights are those of `bench_experts.py` of the same sizes and seed. Benchmarks
that need no files fill their memory from `widening.stretched.StretchedCheckpoint` and
`widening.checkpoint.WidenedCheckpoint` directly.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
from harness import DTYPES, say
from widening.checkpoint import WidenedCheckpoint
from widening.convert import convert_to_safetensors
from widening.gguf_file import packed_kinds, write_gguf
from widening.made import random_model
from widening.shapes import SHAPES, shape_named
from widening.stored import STORED, mix_named, stored_model
from widening.stretched import StretchedCheckpoint

from offload_runtime.errors import OptionError
from offload_runtime.sizes import format_bytes
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.neighbours import stored_kinds
from offload_runtime.weights.sources import fetch_demo_model, open_checkpoint

_REMEDY = """write it like '{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}'"""


def _percent_reporter() -> Callable[[int, int], None]:
    """A line for every five percent of the bytes."""
    shown = -1

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal shown
        step = 20 * done_bytes // total_bytes
        if step > shown:
            shown = step
            say(f"written {format_bytes(done_bytes)} of {format_bytes(total_bytes)}")

    return report


def open_source(reference: str) -> CheckpointSource:
    """The model that `--source` names; `demo` is fetched.

    Raises:
        CheckpointError, HubError, UnsupportedArchitectureError: As `open_checkpoint` and `fetch_demo_model`.
    """
    return open_checkpoint(fetch_demo_model(on_progress=say) if reference == "demo" else reference)


def parse_rope(text: str | None) -> dict[str, Any] | None:
    """transformers' rope parameters out of the command line.

    Raises:
        OptionError: No JSON object.
    """
    if text is None:
        return None
    try:
        rope = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--rope is not valid JSON ({error}): {_REMEDY}") from error
    if not isinstance(rope, dict):
        raise OptionError(f"--rope is not a JSON object but {text}: {_REMEDY}")
    return rope


def made_model(arguments: argparse.Namespace) -> CheckpointSource:
    """What the options describe, nothing of it computed yet but headers.

    Raises:
        OptionError: Options do not go together; errors as of the checkpoints.
    """
    if arguments.source is None:
        return stored_model(
            shape_named(arguments.shape, arguments.layers), arguments.stored, arguments.seed,
            vocab_size=arguments.vocab_size, context_tokens=arguments.max_position,
            reference=f"random {arguments.shape}",
        )  # fmt: skip
    source, rope = open_source(arguments.source), parse_rope(arguments.rope)
    stretched = source
    if arguments.delta or rope is not None or arguments.max_position is not None:
        stretched = StretchedCheckpoint(
            source, arguments.delta, rope=rope, max_position_embeddings=arguments.max_position
        )
    if arguments.shape is None:
        if arguments.noise or arguments.random:
            raise OptionError("--noise and --random are of a --shape: name one, or leave them out")
        if stretched is source and arguments.stored is None:
            raise OptionError("nothing would be made: name a --shape, or --delta, --rope, --max-position or --stored")
        return stretched
    shape, device = shape_named(arguments.shape, arguments.layers), resolve_device(arguments.device)
    if not arguments.random:
        return WidenedCheckpoint(stretched, shape, arguments.noise, arguments.seed, device=device)
    if arguments.noise or stretched is not source:
        raise OptionError("--random has no use for --noise, --delta, --rope and --max-position: leave them out")
    vocab_size, context = arguments.vocab_size or source.config().vocab_size, source.config().max_position_embeddings
    if vocab_size < source.config().vocab_size:
        raise OptionError(f"--vocab-size {vocab_size} is less than the source's {source.config().vocab_size}: raise it")
    reference = f"random weights under the vocabulary of {source.reference}"
    if arguments.stored is not None:
        return stored_model(
            shape, arguments.stored, arguments.seed, vocab_size=vocab_size, context_tokens=context,
            reference=reference, words=source,
        )  # fmt: skip
    return random_model(
        shape, arguments.seed, vocab_size=vocab_size, words=source, device=device, context_tokens=context,
        reference=reference,
    )  # fmt: skip


def check(arguments: argparse.Namespace) -> None:
    """Refuse what other options leave without effect. Raises `OptionError`."""
    if arguments.vocab_size is not None and not (arguments.random and arguments.shape):
        raise OptionError("--vocab-size is of --random weights of a --shape: leave it out")
    if arguments.layers is not None and arguments.shape is None:
        raise OptionError("--layers cuts a --shape: name one, or leave it out")
    if arguments.source is None:
        needed = ("shape", "random", "stored", "vocab_size", "max_position")
        if missing := [name for name in needed if not getattr(arguments, name)]:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise OptionError(f"without a --source a model has random weights and no words: give {options}, too")
        if arguments.delta or arguments.rope or arguments.noise:
            raise OptionError("--delta, --rope and --noise are of a --source: name one, or leave them out")
    if arguments.stored is None:
        return
    if arguments.dtype is not None:
        raise OptionError(f"--dtype {arguments.dtype} is of safetensors: leave it out, or --stored")
    if arguments.out.suffix != ".gguf":
        raise OptionError(f"--stored writes one file: name it like {arguments.out}.gguf")
    if arguments.source not in (None, "demo") and Path(arguments.source).suffix != ".gguf":
        raise OptionError("--stored takes the tokenizer out of a GGUF file: name one with --source, or leave it out")


def write(arguments: argparse.Namespace) -> Path:
    """Make and write what the options describe; errors as of `made_model` and what writes."""
    check(arguments)
    made, on_progress = made_model(arguments), _percent_reporter()
    if arguments.stored is None:
        dtype = DTYPES[arguments.dtype or "bf16"]
        return convert_to_safetensors(made, arguments.out, dtype=dtype, on_progress=on_progress)
    if made.read_mtp() is not None:
        raise OptionError(f"{arguments.source} carries an MTP layer, which --stored does not write: leave it out")
    mix, config = mix_named(arguments.stored), made.config()
    assert mix is not None
    kinds = stored_kinds(config, mix) if arguments.random else packed_kinds(config, mix)
    words = fetch_demo_model() if arguments.source == "demo" else arguments.source and Path(arguments.source)
    return write_gguf(made, arguments.out, kinds, words=words, on_progress=on_progress)


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for what the user can mend."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--source", help="safetensors directory, .gguf file, hub id, or demo")
    parser.add_argument("--delta", type=Path, nargs="+", default=[], help="safetensors files of new values")
    parser.add_argument("--rope", help="transformers' rope_parameters as JSON; rope_theta may be left out")
    parser.add_argument("--max-position", type=int, help="longest context (default: what the rope scaling reaches)")
    parser.add_argument("--shape", help=", ".join(SHAPES) + "; left out, the source's own")
    parser.add_argument("--layers", type=int, help="cut the --shape to so many (default: all)")
    parser.add_argument("--noise", type=float, default=0.0, help="relative, on the small model's matrices")
    parser.add_argument("--random", action="store_true", help="random weights, only the source's vocabulary")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and of the surplus")
    parser.add_argument("--vocab-size", type=int, help="of --random: more rows than the source's vocabulary")
    parser.add_argument(
        "--stored", choices=[name for name in STORED if mix_named(name)], help="one GGUF file of this mix of formats"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the written safetensors (bf16)")
    parser.add_argument("--device", default="auto", help="where surplus random numbers are drawn: auto, cuda or cpu")
    parser.add_argument("--out", type=Path, required=True, help="a new directory, or file of --stored")
    arguments = parser.parse_args(argv)
    # Through the exception handlers, which remove what is half-written.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print(write(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
