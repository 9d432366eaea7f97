"""What the measured peers share before anything is measured: options, the model, the prompts and refusals.

Every peer reads the same weights through the same reader, lets its system page the decoder layers from host memory, and
hands the model to `measurement.run_peer`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

# The peers are run as plain scripts: the rest of the tools is in the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness import DTYPES, Parser, add_report_options
from widening.checkpoint import WidenedCheckpoint
from widening.made import random_model
from widening.shapes import WideShape, shape_named
from widening.stored import STORED, stored_model

from offload_runtime.config import Dtype
from offload_runtime.errors import BudgetError, ContextLengthError, OffloadError, OptionError
from offload_runtime.options import require_positive
from offload_runtime.params import SamplingParams
from offload_runtime.sizes import parse_bytes
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.sources import open_checkpoint

# DeepSpeed prefetches once it has recorded a pass, ours captures graphs: the first generations are cold.
WARMUPS = 2
# What a process says by its exit code: an error, or that there is not enough memory for what was asked.
ERROR_CODE, NO_ROOM_CODE = 2, 3
# Beyond this prompt transformers reads it in chunks unless told otherwise: the activations of 120K tokens at once leave
# no room for layers beside them in 24 GB.
LONG_PROMPT_TOKENS, DEFAULT_PREFILL_CHUNK = 8192, 4096


@dataclass(frozen=True)
class Shape:
    """A model with a vocabulary and a context of its own; `--layers` may cut the decoder."""

    decoder: WideShape
    vocab_size: int
    max_position_embeddings: int


SHAPES = {
    "tiny": Shape(shape_named("tiny", 4), 256, 1024),
    "llama-68m": Shape(shape_named("llama-68m"), 32000, 2048),
    "llama2-7b": Shape(shape_named("llama2-7b"), 32000, 4096),
    "llama2-13b": Shape(shape_named("llama2-13b"), 32000, 4096),
    "llama3-8b": Shape(shape_named("llama3-8b"), 128256, 8192),
    "llama3-70b": Shape(shape_named("llama2-70b"), 128256, 8192),
    "tiny-hybrid": Shape(shape_named("tiny-hybrid"), 256, 1024),
    "qwen3.5-0.8b": Shape(shape_named("qwen3.5-0.8b"), 248320, 262144),
    "qwen3.6-27b": Shape(shape_named("qwen3.6-27b"), 248320, 262144),
    "tiny-mixture": Shape(shape_named("tiny-mixture"), 256, 1024),
    "qwen3-30b-a3b": Shape(shape_named("qwen3-30b-a3b"), 151936, 40960),
    "gpt-oss-20b": Shape(shape_named("gpt-oss-20b"), 201088, 131072),
    "gpt-oss-120b": Shape(shape_named("gpt-oss-120b"), 201088, 131072),
}


def random_source(
    name: str,
    *,
    layers: int | None,
    seed: int,
    device: torch.device,
    context_tokens: int = 0,
    stored: str | None = None,
) -> CheckpointSource:
    """Random weights of one of `SHAPES`, cut to `layers` and drawn on `device`, or `stored` as files have them, one of
    `widening.stored.STORED`. Raises `OptionError`.

    They are for `context_tokens` where the shape itself is for fewer.
    """
    shape, decoder = SHAPES[name], _decoder(name, layers)
    how: dict[str, Any] = {
        "vocab_size": shape.vocab_size, "context_tokens": max(context_tokens, shape.max_position_embeddings),
        "reference": f"random {name} in {stored}" if stored else f"random {name}",
    }  # fmt: skip
    if stored is not None:
        return stored_model(decoder, stored, seed, **how)
    return random_model(decoder, seed, **how, device=device).as_source()


def _decoder(name: str, layers: int | None) -> WideShape:
    if layers is None:
        return SHAPES[name].decoder
    require_positive("layers", layers)
    return replace(SHAPES[name].decoder, num_layers=layers)


_DEFAULT_SHAPE = "llama2-7b"


@dataclass(frozen=True)
class PeerOptions:
    """One measurement, as the command line asked for it.

    `source` is the target. `draft` names a draft model, and `assistant_tokens` how many tokens transformers' assisted
    generation lets it propose, each setting measured (None: transformers' own schedule). `vram_bytes` None is all of
    the device; `resident_layers` None as many as fit it. Of warm-ups, `warmup_prompt_tokens` says how much of a prompt
    they read and `warmup_new_tokens` how much they generate; None is all. `prefill_chunk_asked` tokens of a prompt are
    read at a time by transformers, 0 for all of it at once, None for what suits its length. `others_bytes` are held on
    the device by other programs, a desktop's above all, and do not count; `open_device` measures them.
    """

    source: CheckpointSource
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    warmup: int
    repeats: int
    dtype_name: Dtype
    vram_bytes: int | None
    resident_layers: int | None
    device: torch.device
    seed: int
    temperature: float
    kv_cache: str
    draft: str | None
    assistant_tokens: tuple[int | None, ...]
    commit: str | None
    out: Path | None
    warmup_prompt_tokens: int | None = None
    warmup_new_tokens: int | None = None
    prefill_chunk_asked: int | None = None
    others_bytes: int = 0

    @property
    def offloads_cache(self) -> bool:
        """Whether keys and values cross the link: transformers' offloaded cache needs CUDA."""
        return self.kv_cache == "offloaded" and self.device.type == "cuda"

    def __post_init__(self) -> None:
        require_positive("repeats", self.repeats)
        if self.new_tokens < 2:
            raise OptionError(f"new_tokens must be at least 2, not {self.new_tokens}: the first one times the prefill")
        if self.warmup < WARMUPS:
            raise OptionError(f"warmup must be at least {WARMUPS}, not {self.warmup}: the first ones are cold")
        if self.resident_layers is not None and not 0 <= self.resident_layers <= self.layers:
            raise OptionError(
                f"resident_layers is from 0 to the model's {self.layers}, or auto, not {self.resident_layers}"
            )
        if not self.prompts or not all(self.prompts):
            raise OptionError("a prompt has no tokens: name files with text, or more --prompt-tokens")
        self._check_warmups(shortest_tokens=min(len(prompt) for prompt in self.prompts))
        if self.prefill_chunk_asked is not None and self.prefill_chunk_asked < 0:
            raise OptionError(f"prefill_chunk is at least 1, or 0 for whole prompts, not {self.prefill_chunk_asked}")
        needed, limit = self.context_tokens, self.source.config().max_position_embeddings
        if needed > limit:
            asked = f"prompt and new tokens need {needed} positions, {self.source.reference} has {limit}"
            raise ContextLengthError(f"{asked}: lower --prompt-tokens or --new-tokens")
        SamplingParams(temperature=self.temperature, seed=self.seed)

    def _check_warmups(self, *, shortest_tokens: int) -> None:
        """Refuse warm-ups that would be longer than what is measured, or of nothing."""
        tokens, count = self.warmup_prompt_tokens, self.warmup_new_tokens
        if tokens is not None and not 1 <= tokens <= shortest_tokens:
            raise OptionError(
                f"warmup_prompt_tokens is from 1 to the shortest prompt's {shortest_tokens}, not {tokens}"
            )
        if count is not None and not 2 <= count <= self.new_tokens:
            raise OptionError(f"warmup_new_tokens is from 2 to the {self.new_tokens} of new_tokens, not {count}")

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""
        return self.source.config().num_layers

    @property
    def context_tokens(self) -> int:
        """Of the longest prompt and its answer."""
        return max(len(prompt) for prompt in self.prompts) + self.new_tokens

    @property
    def shortens_warmups(self) -> bool:
        """Whether warm-ups read or generate less than what is measured."""
        return self.warmup_prompt_tokens is not None or self.warmup_new_tokens is not None

    @property
    def prefill_chunk(self) -> int | None:
        """Tokens of a prompt that transformers reads at a time; None for all of it at once."""
        if self.prefill_chunk_asked is not None:
            return self.prefill_chunk_asked or None
        longest = max(len(prompt) for prompt in self.prompts)
        return DEFAULT_PREFILL_CHUNK if longest > LONG_PROMPT_TOKENS else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the KV cache."""
        return DTYPES[self.dtype_name]

    def as_settings(self) -> dict[str, Any]:
        """The options as JSON values, for the report."""
        return {
            "target": model_name(self.source.reference), "draft": model_name(self.draft), "layers": self.layers,
            "prompt_tokens": [len(p) for p in self.prompts],
            "new_tokens": self.new_tokens, "warmup": self.warmup,
            "warmup_prompt_tokens": self.warmup_prompt_tokens, "warmup_new_tokens": self.warmup_new_tokens,
            "repeats": self.repeats, "dtype": self.dtype_name,
            "vram_bytes": self.vram_bytes, "resident_layers": self.resident_layers, "seed": self.seed, "batch": 1,
            "temperature": self.temperature, "eos": "disabled",
        }  # fmt: skip


def model_name(reference: str | None) -> str | None:
    """What a report calls a model: no directories, which mean nothing elsewhere."""
    return None if reference is None else Path(reference).name


def check_context(context: int | None, name: str, needed: int) -> None:
    """Refuse a prompt that takes, with its answer, `needed` tokens where fewer are reserved. Raises `OptionError`."""
    if context is not None and needed > context:
        raise OptionError(
            f"{name} and the answer are {needed} tokens, --context is {context}: raise it, or lower --prompt-tokens"
        )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model beside `--target` and `--shape`, where it runs, and how its tokens are drawn; and of the report."""
    parser.add_argument("--layers", type=int, help="cut the shape to so many decoder layers (default: all)")
    parser.add_argument("--source", help="of the shape: a small model whose language it speaks, made in memory")
    parser.add_argument("--noise", type=float, help="of the shape with --source: relative, on its matrices (0)")
    parser.add_argument(
        "--stored", choices=STORED,
        help="of the shape: random blocks of a mix of GGUF's formats, squares of FP8, or matrices of heavy-tailed bf16",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vram", default="24GB", help="cap of a process on the device with CUDA's context, or all")
    parser.add_argument("--resident-layers", default="0", help="layers kept on the device: a number, all or auto")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script without a GPU")
    parser.add_argument("--draft", help="draft model, whole on the device; ours takes n-grams without one")
    add_report_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What every system is told, by its own script or by one that compares them."""
    add_model_options(parser)
    parser.add_argument("--prompt-tokens", type=int, help="so many random tokens (512), or of each text the first ones")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=WARMUPS, help="generations discarded before the measured ones")
    parser.add_argument("--warmup-prompt-tokens", type=int, help="these read only so much of a prompt (default: all)")
    parser.add_argument("--warmup-new-tokens", type=int, help="and generate only so much (default: --new-tokens)")
    parser.add_argument("--repeats", type=int, default=3, help="measured generations of every prompt")
    parser.add_argument(
        "--prefill-chunk", type=int,
        help="tokens of a prompt that transformers reads at a time, 0 for all of it (default: "
        f"{DEFAULT_PREFILL_CHUNK} of prompts beyond {LONG_PROMPT_TOKENS})",
    )  # fmt: skip


# Of these, what goes on to every script as it was given.
PASSED_ON = (
    "layers", "source", "noise", "stored", "new_tokens", "temperature", "seed", "vram", "resident_layers", "dtype",
    "device", "warmup", "warmup_prompt_tokens", "warmup_new_tokens", "repeats", "commit",
)  # fmt: skip


def as_words(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Options as they are typed, but for those that were not given."""
    words = list[str]()
    for name in names:
        value = getattr(arguments, name)
        if value in (None, False, ()):
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += ["--" + name.replace("_", "-"), *([] if value is True else [text])]
    return words


def peer_parser(description: str) -> Parser:
    """The options that every peer takes; a script adds those of its own system."""
    parser = Parser(description=description)
    parser.add_argument("--target", help="checkpoint: a directory, a .gguf file or a hub id")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="instead: random weights of this shape (llama2-7b)")
    parser.add_argument("--prompts", type=Path, help="JSON file with a list of lists of token ids")
    add_run_options(parser)
    parser.add_argument("--kv-cache", choices=("device", "offloaded"), default="device", help="of transformers")
    parser.add_argument("--assistant-tokens", default="auto", help="numbers of proposals to try: auto,4,8")
    return parser


def options_from(arguments: argparse.Namespace) -> PeerOptions:
    """Check the common options. Raises `OptionError`, `ContextLengthError`, and what opening a checkpoint does."""
    try:
        device = torch.device(arguments.device)
    except RuntimeError as error:
        raise OptionError(f"--device {arguments.device!r} is not a device: use cuda, cuda:N or cpu") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    shape, prompt_tokens = SHAPES[arguments.shape or _DEFAULT_SHAPE], arguments.prompt_tokens or 0
    is_long = prompt_tokens > shape.max_position_embeddings
    # With room for answers and windows.
    source = source_from(arguments, device, context_tokens=2 * prompt_tokens if is_long else 0)
    given = vars(arguments) | {
        "source": source, "prompts": _prompts(arguments, source), "dtype_name": arguments.dtype, "device": device,
        "vram_bytes": None if arguments.vram == "all" else parse_bytes(arguments.vram),
        "resident_layers": resident_layers(arguments.resident_layers, source),
        "assistant_tokens": _assistant_tokens(arguments.assistant_tokens),
        "prefill_chunk_asked": arguments.prefill_chunk,
    }  # fmt: skip
    return PeerOptions(**{field.name: given[field.name] for field in fields(PeerOptions) if field.name in given})


def source_from(
    arguments: argparse.Namespace, device: torch.device, *, context_tokens: int = 0
) -> CheckpointSource:  # fmt: skip
    """The model that `--target` names or a shape makes, which is drawn on `device`; a random one is for at least
    `context_tokens`. Raises `OptionError`, and what opening a checkpoint does."""
    if arguments.target is not None:
        of_shapes = (arguments.shape, arguments.layers, arguments.source, arguments.noise, arguments.stored)
        if any(one is not None for one in of_shapes):
            raise OptionError("--target is a whole model: leave out --shape, --layers, --source, --noise and --stored")
        return open_checkpoint(arguments.target)
    shape, layers, stored = arguments.shape or _DEFAULT_SHAPE, arguments.layers, arguments.stored
    if arguments.source is not None:
        if stored is not None:
            raise OptionError("--stored is of random weights: write a model with a language by widen_model.py --stored")
        small = open_checkpoint(arguments.source)
        noise, decoder = arguments.noise or 0.0, _decoder(shape, layers)
        return WidenedCheckpoint(small, decoder, noise, arguments.seed, device=device).as_source()
    if arguments.noise is not None:
        raise OptionError("--noise falls on the matrices of a small model: name one with --source, or leave it out")
    return random_source(
        shape, layers=layers, seed=arguments.seed, device=device, stored=stored, context_tokens=context_tokens
    )


def _prompts(arguments: argparse.Namespace, source: CheckpointSource) -> tuple[tuple[int, ...], ...]:
    """Those of the file, or one of random tokens: the same ones for every peer and every machine."""
    if arguments.prompts is not None:
        if arguments.prompt_tokens is not None:
            raise OptionError("--prompts has prompts of its own lengths: leave out --prompt-tokens")
        return tuple(tuple(prompt) for prompt in json.loads(arguments.prompts.read_text()))
    count = 512 if arguments.prompt_tokens is None else arguments.prompt_tokens
    require_positive("prompt_tokens", count)
    generator = torch.Generator("cpu").manual_seed(arguments.seed)
    return (tuple(torch.randint(source.config().vocab_size, (1, count), generator=generator)[0].tolist()),)


def resident_layers(text: str, source: CheckpointSource) -> int | None:
    """How many of the target's layers `--resident-layers` keeps on the device; None for as many as fit."""
    if text == "auto":
        return None
    if text != "all" and not text.isdecimal():
        raise OptionError(f"--resident-layers: {text!r} is not a number, all or auto")
    return source.config().num_layers if text == "all" else int(text)


def _assistant_tokens(text: str) -> tuple[int | None, ...]:
    parts = text.split(",")
    if not all(part == "auto" or (part.isdecimal() and int(part)) for part in parts):
        raise OptionError(f"--assistant-tokens: {text!r} is no list of numbers and auto, such as auto,4,8")
    return tuple(None if part == "auto" else int(part) for part in parts)


def refused(error: OffloadError) -> int:
    """Say in one line on stderr why there is no result; returns the exit code, one of its own where memory is short."""
    print(f"error: {error}", file=sys.stderr)
    return NO_ROOM_CODE if isinstance(error, BudgetError) else ERROR_CODE
