"""The options of the command line, declared once, and their way into the frozen configuration.

Everything that can be judged without the model is judged here, before a byte of it is loaded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from offload_runtime.config import GenerationParams, SamplingParams, SpeculationOptions, parse_bytes, require_positive
from offload_runtime.errors import OptionError


class Device(str, Enum):
    """Where the target runs."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Dtype(str, Enum):
    """The element type that the target computes in."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_MODEL, _SAMPLING, _MACHINE, _OUTPUT = "Model", "Sampling", "Machine", "Output"

TargetOption = Annotated[
    str,
    typer.Option("--target", metavar="MODEL", rich_help_panel=_MODEL, help="Directory, GGUF file or id on the hub."),
]
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="MODEL|ngram|none",
        rich_help_panel=_MODEL,
        help="What proposes tokens: a small model, the text's own n-grams, or nothing. Never changes the output.",
    ),
]


class KVPlace(str, Enum):
    """Where the target's KV cache lives."""

    auto = "auto"
    gpu = "gpu"
    host = "host"


KVOption = Annotated[
    KVPlace,
    typer.Option(
        "--kv", rich_help_panel=_MODEL, help="Where the KV cache lives: on the GPU, or paged from pinned host memory."
    ),
]


class SpeculationMode(str, Enum):
    """How tokens are proposed."""

    auto = "auto"
    none = "none"
    chain = "chain"
    triforce = "triforce"


class DraftCache(str, Enum):
    """What the draft keeps of the text."""

    auto = "auto"
    full = "full"
    streaming = "streaming"


_SPECULATION = "Speculation (none of it changes the output)"
SpeculationOption = Annotated[
    SpeculationMode,
    typer.Option(
        "--speculation",
        rich_help_panel=_SPECULATION,
        help="chain: the draft proposes. triforce: between draft and target the target checks over retrieved tokens.",
    ),
]
DraftCacheOption = Annotated[
    DraftCache,
    typer.Option("--draft-cache", rich_help_panel=_SPECULATION, help="streaming: first and newest tokens only."),
]
SinkTokensOption = Annotated[
    int, typer.Option("--sink-tokens", rich_help_panel=_SPECULATION, help="First tokens a streaming cache keeps.")
]
RecentTokensOption = Annotated[
    int, typer.Option("--recent-tokens", rich_help_panel=_SPECULATION, help="Newest tokens a streaming cache keeps.")
]
ChunkSizeOption = Annotated[
    int, typer.Option("--chunk-size", rich_help_panel=_SPECULATION, help="Tokens that are retrieved together.")
]
BudgetTokensOption = Annotated[
    int,
    typer.Option(
        "--budget-tokens", "--retrieval-budget", rich_help_panel=_SPECULATION, help="Tokens retrieved per KV head."
    ),
]
GammaDraftOption = Annotated[
    int,
    typer.Option("--gamma-draft", rich_help_panel=_SPECULATION, help="Tokens the draft proposes to the middle level."),
]
ContextOption = Annotated[
    str,
    typer.Option("--context", metavar="TOKENS|auto", rich_help_panel=_MODEL, help="Tokens of context to reserve."),
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", min=1, rich_help_panel=_SAMPLING, help="Longest answer, in tokens.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, rich_help_panel=_SAMPLING, help="0 is greedy decoding.")
]
TopKOption = Annotated[
    int, typer.Option("--top-k", min=0, rich_help_panel=_SAMPLING, help="Keep the K likeliest tokens; 0 is off.")
]
TopPOption = Annotated[
    float, typer.Option("--top-p", rich_help_panel=_SAMPLING, help="Keep the likeliest tokens that hold P; 1 is off.")
]
MinPOption = Annotated[
    float,
    typer.Option("--min-p", rich_help_panel=_SAMPLING, help="Drop tokens below P times the likeliest; 0 is off."),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, rich_help_panel=_SAMPLING, help="The same seed gives the same tokens.")
]
GammaOption = Annotated[
    int | None,
    typer.Option(
        "--gamma",
        min=1,
        rich_help_panel=_SAMPLING,
        help="Most tokens to propose per pass; left out, what suits device and draft.",
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", rich_help_panel=_SAMPLING, help="End at this text; may be repeated."),
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", rich_help_panel=_SAMPLING, help="Go on past the end-of-text token.")
]
DeviceOption = Annotated[Device, typer.Option("--device", rich_help_panel=_MACHINE, help="Where the target runs.")]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", rich_help_panel=_MACHINE, help="auto: the checkpoint's own on a GPU, fp32 on a CPU.")
]
VramOption = Annotated[
    str | None,
    typer.Option(
        "--vram", metavar="SIZE", rich_help_panel=_MACHINE, help="Most GPU memory to use, such as 24GB or 20GiB."
    ),
]
ResidentLayersOption = Annotated[
    str,
    typer.Option(
        "--resident-layers",
        metavar="N|auto",
        rich_help_panel=_MACHINE,
        help="Layers that stay on the device; the others are streamed over the link in every pass.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="One JSON object on stdout and nothing else.")
]
NoProgressOption = Annotated[
    bool, typer.Option("--no-progress", rich_help_panel=_OUTPUT, help="No progress bars on stderr.")
]


@dataclass(frozen=True)
class LoadOptions:
    """What `Runtime.load` is asked for. `vram_bytes` None means all that is free.

    `max_gamma` is the deepest window to make room for; the default is the runtime's own.
    """

    target: str
    draft: str = "ngram"
    device: str = "auto"
    dtype: str = "auto"
    vram_bytes: int | None = None
    resident_layers: int | str = "auto"
    context: int | str = "auto"
    kv: str = "auto"
    max_gamma: int = 63
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)

    def __post_init__(self) -> None:
        if not self.target.strip():
            raise OptionError("--target is empty: give a directory, a GGUF file or a hub id such as org/name")
        if not self.draft.strip():
            raise OptionError("--draft is empty: give a model, ngram or none")


def load_options(
    *,
    target: str,
    draft: str,
    device: Device,
    dtype: Dtype,
    vram: str | None,
    resident_layers: str,
    context: str,
    kv: KVPlace,
    gamma: int | None,
    speculation: SpeculationOptions | None = None,
) -> LoadOptions:
    """Turn the strings of the command line into `LoadOptions`; raises `OptionError` naming the option."""
    reserved_tokens = _count_or_auto("--context", context)
    if isinstance(reserved_tokens, int):
        require_positive("--context", reserved_tokens)
    return LoadOptions(
        target=target,
        draft=draft,
        device=device.value,
        dtype=dtype.value,
        vram_bytes=None if vram is None else parse_bytes(vram),
        resident_layers=_count_or_auto("--resident-layers", resident_layers),
        context=reserved_tokens,
        kv=kv.value,
        speculation=speculation or SpeculationOptions(),
        max_gamma=max(LoadOptions.max_gamma, gamma or 0),
    )


def generation_params(
    *,
    draft: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    gamma: int | None,
    stop: list[str] | None,
    ignore_eos: bool,
) -> GenerationParams:
    """Collect what one answer is asked for; raises `OptionError` for values that make no sense together."""
    if gamma is not None and draft == "none":
        raise OptionError(f"--gamma {gamma} does nothing with --draft none: drop it or name a draft")
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    return GenerationParams(
        max_new_tokens=max_new_tokens, stop=tuple(stop or ()), gamma=gamma, ignore_eos=ignore_eos, sampling=sampling
    )


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Return the prompt of exactly one of `--prompt` and `--prompt-file` (`-` is stdin), byte for byte as written."""
    if (prompt is None) == (prompt_file is None):
        given = "both" if prompt is not None else "neither"
        raise OptionError(f"{given} of --prompt and --prompt-file was given: give exactly one of them")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        raw = sys.stdin.buffer.read() if prompt_file == "-" else user_path(prompt_file).read_bytes()
    except OSError as error:
        raise OptionError(f"--prompt-file {prompt_file} cannot be read: {error.strerror or error}") from error
    return decode_utf8(raw, "stdin" if prompt_file == "-" else f"--prompt-file {prompt_file}")


def user_path(text: str) -> Path:
    """Return the path that a user wrote, with `~` replaced; raises `OptionError` when that stands for nothing."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise OptionError(f"{text} cannot be found ({error}): write the path without ~") from error


def decode_utf8(raw: bytes, source: str) -> str:
    """Decode text that a user supplied, without a byte-order mark; raises `OptionError` naming `source`."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise OptionError(
            f"{source} is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}; convert it, for example with iconv"
        ) from error


def _count_or_auto(name: str, text: str) -> int | str:
    """Read a count that may be left to the planner."""
    if text == "auto":
        return text
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise OptionError(f"{name} must be a count or auto, not {text!r}")
    return count
