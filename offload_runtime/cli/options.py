"""The options of the command line, declared once for all commands, and their way into the frozen configuration.

A command takes whole groups of them: `with_option_groups` turns each parameter that is one of the dataclasses below
into that dataclass's options. Everything that can be judged without the model is judged here, before a byte of it is
loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from typing import Annotated, Any, Literal, get_type_hints

import typer

from offload_runtime.cli.terminal import user_path
from offload_runtime.config import (
    GenerationParams,
    RuntimeConfig,
    SamplingParams,
    SpeculationOptions,
    idle_options,
    parse_bytes,
    require_positive,
)
from offload_runtime.errors import OptionError

Device = Literal["auto", "cuda", "cpu"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]
KVPlace = Literal["auto", "gpu", "host"]
SpeculationMode = Literal["auto", "none", "chain", "triforce"]
DraftCache = Literal["auto", "full", "retrieval", "streaming"]
ChunkPolicy = Literal["retrieval", "topk", "streaming"]

_model, _sampling, _machine, _output, _proposing = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Model", "Sampling", "Machine", "Output", "Speculation (none of it changes the output)")
)


def _tuning(*names: str, help: str) -> Any:
    """One of `SpeculationOptions`, called as its field is; what that is by itself is shown as the default."""
    usual = getattr(SpeculationOptions(), names[0].removeprefix("--").replace("-", "_"))
    return _proposing(*names, show_default=str(usual), help=help)


DeviceOption = Annotated[Device, _machine("--device", help="Where the target runs.")]
DtypeOption = Annotated[Dtype, _machine("--dtype", help="auto: the checkpoint's own on a GPU, fp32 on a CPU.")]
MaxNewTokensOption = Annotated[int, _sampling("--max-new-tokens", min=1, help="Longest answer, in tokens.")]
TemperatureOption = Annotated[float, _sampling("--temperature", min=0.0, help="0 is greedy decoding.")]
SeedOption = Annotated[int, _sampling("--seed", min=0, help="The same seed gives the same tokens.")]
GammaOption = Annotated[
    str,
    _proposing(
        "--gamma",
        metavar="N|auto",
        help="Tokens to propose per pass, one behind the other. auto chooses who proposes and how much, pass by pass, "
        "by what was accepted and how long it took.",
    ),
]
JsonOption = Annotated[bool, _output("--json", help="One JSON object on stdout and nothing else.")]
NoProgressOption = Annotated[bool, _output("--no-progress", help="No progress bars on stderr.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is run, how tokens are proposed and how much memory may be used: as `plan` has to know it."""

    target: Annotated[str, _model("--target", metavar="MODEL", help="Directory, GGUF file or id on the hub.")]
    draft: Annotated[
        str,
        _model(
            "--draft",
            metavar="MODEL|ngram|none",
            help="What proposes tokens: a small model, the text's own n-grams, or nothing. Never changes the output.",
        ),
    ] = "ngram"
    context: Annotated[str, _model("--context", metavar="TOKENS|auto", help="Tokens of context to reserve.")] = "auto"
    kv: Annotated[
        KVPlace,
        _model(
            "--kv",
            help="Where the KV cache lives: on the GPU, or paged from host memory; auto: what is predicted to be "
            "faster.",
        ),
    ] = "auto"
    speculation: Annotated[
        SpeculationMode,
        _proposing(
            "--speculation",
            help="chain: the draft proposes. triforce: between draft and target the target checks over retrieved "
            "tokens. auto: what is predicted to be faster.",
        ),
    ] = "auto"
    draft_cache: Annotated[
        DraftCache,
        _proposing(
            "--draft-cache",
            help="full: all tokens. retrieval: of all tokens those that its queries choose. streaming: first and "
            "newest tokens only. auto: what is predicted to be faster, of the last and one that suits the context.",
        ),
    ] = "auto"
    sink_tokens: Annotated[int | None, _tuning("--sink-tokens", help="First tokens a streaming cache keeps.")] = None
    recent_tokens: Annotated[
        int | None, _tuning("--recent-tokens", help="Newest tokens a streaming cache keeps.")
    ] = None  # fmt: skip
    chunk_size: Annotated[int | None, _tuning("--chunk-size", help="Tokens that are retrieved together.")] = None
    budget_tokens: Annotated[
        int | None, _tuning("--budget-tokens", "--retrieval-budget", help="Tokens retrieved per KV head.")
    ] = None
    policy: Annotated[
        ChunkPolicy | None,
        _tuning(
            "--policy",
            help="What the middle level sees. topk (exact scores) and streaming (first and newest) are for comparing.",
        ),
    ] = None
    refresh_steps: Annotated[
        int | None, _tuning("--refresh-steps", help="Retrieve anew every so many steps of the middle level.")
    ] = None
    gamma_draft: Annotated[
        int | None, _tuning("--gamma-draft", help="Tokens the draft proposes to the middle level.")
    ] = None
    tree_nodes: Annotated[
        str,
        _proposing(
            "--tree-nodes",
            metavar="N|auto",
            help="Tokens to propose per pass in all, as a tree, no more of them in a row than --gamma N says. 0: "
            "chains only. auto chooses; beside --gamma N it stands for chains.",
        ),
    ] = "auto"
    dtype: DtypeOption = "auto"
    vram: Annotated[
        str | None, _machine("--vram", metavar="SIZE", help="Most GPU memory to use, such as 24GB or 20GiB.")
    ] = None
    ram: Annotated[
        str | None, _machine("--ram", metavar="SIZE", help="Most host memory to use; by itself, what there is.")
    ] = None
    pinned: Annotated[
        str | None,
        _machine(
            "--pinned",
            metavar="SIZE",
            help="Most of it to page-lock; weights and KV beyond it are staged: slower. By itself, what the system "
            "gives.",
        ),
    ] = None
    resident_layers: Annotated[
        str,
        _machine(
            "--resident-layers",
            metavar="N|auto",
            help="Layers that stay on the device; the others are streamed over the link in every pass.",
        ),
    ] = "auto"

    def config(self, *, gamma: str = "auto", max_batch: int = 1) -> RuntimeConfig:
        """What a runtime is loaded with; raises `OptionError` naming the option."""
        chosen_gamma, nodes = (
            count_or_chosen("--gamma", gamma, least=1),
            count_or_chosen("--tree-nodes", self.tree_nodes),
        )
        context = count_or_chosen("--context", self.context)
        if context is not None:
            require_positive("--context", context)
        vram, ram, pinned = (None if size is None else parse_bytes(size) for size in (self.vram, self.ram, self.pinned))
        return RuntimeConfig(
            target=self.target, draft=self.draft, dtype=self.dtype, vram_bytes=vram, ram_bytes=ram, pinned_bytes=pinned,
            resident_layers=count_or_chosen("--resident-layers", self.resident_layers),
            context="auto" if context is None else context, kv=self.kv, speculation=self._speculation(),
            max_batch=max_batch, gamma=chosen_gamma, max_gamma=max(RuntimeConfig.max_gamma, chosen_gamma or 0),
            # A gamma alone asks for chains, and room for trees would be of no use.
            tree_nodes=0 if nodes is None and chosen_gamma is not None else nodes,
        )  # fmt: skip

    def _speculation(self) -> SpeculationOptions:
        """How tokens are proposed; raises `OptionError` for an option that would do nothing beside the others."""
        tuned = (
            "sink_tokens",
            "recent_tokens",
            "chunk_size",
            "budget_tokens",
            "refresh_steps",
            "gamma_draft",
            "policy",
        )
        given = {name: getattr(self, name) for name in tuned if getattr(self, name) is not None}
        given |= {} if self.draft_cache == "auto" else {"draft_cache": self.draft_cache}
        idle = idle_options(self.draft not in ("ngram", "none"), self.speculation, self.draft_cache, self.policy)
        for name, why in idle.items():
            if name in given:
                raise OptionError(f"--{name.replace('_', '-')} {given[name]} does nothing {why}")
        return replace(SpeculationOptions(self.speculation), **given)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(RunOptions):
    """What a command that loads a model takes."""

    device: DeviceOption = "auto"
    emulate: Annotated[
        str | None,
        _machine(
            "--emulate",
            metavar="NAME|FILE",
            help="Play a smaller card, such as rtx4090: its memory is the limit, and copies keep its link's bandwidth.",
        ),
    ] = None

    def config(self, *, gamma: str = "auto", max_batch: int = 1) -> RuntimeConfig:
        """What a runtime is loaded with; raises `OptionError` naming the option."""
        config = super().config(gamma=gamma, max_batch=max_batch)
        return replace(config, device=self.device, emulate=self.emulate)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(LoadOptions):
    """What a command that answers takes: also how tokens are sampled, and what is said of the run."""

    gamma: GammaOption = "auto"
    max_new_tokens: MaxNewTokensOption = 256
    temperature: TemperatureOption = 0.0
    top_k: Annotated[int, _sampling("--top-k", min=0, help="Keep the K likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[float, _sampling("--top-p", help="Keep the likeliest tokens that hold P; 1 is off.")] = 1.0
    min_p: Annotated[float, _sampling("--min-p", help="Drop tokens below P times the likeliest; 0 is off.")] = 0.0
    seed: SeedOption = 0
    stop: Annotated[
        list[str] | None, _sampling("--stop", metavar="TEXT", help="End at this text; may be repeated.")
    ] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on past the end-of-text token.")] = False
    profile: Annotated[
        str | None,
        _machine(
            "--profile",
            metavar="NAME|FILE",
            help="Choose what is left to be chosen, and predict, by these figures; left out, by a profile of this GPU, "
            "your own or a shipped one.",
        ),
    ] = None
    explain: Annotated[bool, _output("--explain", help="Say on stderr what lives where, before loading.")] = False
    trace: Annotated[
        str | None,
        _output(
            "--trace",
            metavar="FILE",
            help="Write when what was copied, computed and drafted, for ui.perfetto.dev and tools/timeline.py.",
        ),
    ] = None
    as_json: JsonOption = False
    no_progress: NoProgressOption = False

    def loading(self, max_batch: int = 1) -> RuntimeConfig:
        """What the runtime is loaded with; raises `OptionError` naming the option."""
        config = self.config(gamma=self.gamma, max_batch=max_batch)
        return replace(config, profile=self.profile, trace=None if self.trace is None else user_path(self.trace))

    def params(self) -> GenerationParams:
        """What one answer is asked for; raises `OptionError` for values that make no sense."""
        sampling = SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        return GenerationParams(
            max_new_tokens=self.max_new_tokens, stop=tuple(self.stop or ()), ignore_eos=self.ignore_eos,
            gamma=count_or_chosen("--gamma", self.gamma, least=1), sampling=sampling,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnswerOptions):
    """What a chat takes: longer answers, less alike."""

    max_new_tokens: MaxNewTokensOption = 1024
    temperature: TemperatureOption = 0.7


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: each parameter that is one of the dataclasses stands for its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            options.append(parameter.replace(annotation=hints[name]))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = parameter.empty if field.default is MISSING else field.default
            kind = parameter.KEYWORD_ONLY
            options.append(inspect.Parameter(field.name, kind, annotation=types[field.name], default=default))

    @wraps(command)
    def run(**given: Any) -> None:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**made, **given)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def count_or_chosen(name: str, text: str, *, least: int = 0) -> int | None:
    """Read a count of at least `least`; None for `auto`, which leaves it to the runtime."""
    if text == "auto":
        return None
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise OptionError(f"{name} must be a count or auto, not {text!r}")
    if count < least:
        raise OptionError(f"{name} must be at least {least}, or auto, not {count}")
    return count
