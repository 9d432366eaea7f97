"""The options of the command line, one frozen dataclass a command, and their way into the frozen configuration.

Everything that can be judged without the model is judged here, before a byte of it is loaded.
"""
# ruff: noqa: RUF009 (what the calls below return describes an option and is never a value)

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, Literal, get_type_hints

import typer
from typer.models import OptionInfo

from offload_runtime.cli.terminal import read_text, shortened, user_path
from offload_runtime.config import (
    RuntimeConfig,
    SpeculationOptions,
    count_or_auto,
    idle_options,
    parse_bytes,
    parse_sizes,
    require,
    require_unicode,
)
from offload_runtime.errors import OptionError
from offload_runtime.hardware import load_profile
from offload_runtime.params import GenerationParams, SamplingParams

Device = Literal["auto", "cuda", "cpu"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]


# How options are grouped in the help, in this order; those of one command alone come first, and have no group.
_GROUPS = (None, "Model", "Sampling", "Speculation (none of it changes the output)", "Machine", "Limits", "Output")
_model, _sampling, _proposing, _machine, _limits = (
    partial(typer.Option, rich_help_panel=group) for group in _GROUPS[1:6]
)
# Of an option that takes no value typer would say that it is a <bool>.
_switch = partial(typer.Option, False, metavar="")


# --- how options are read: typer sees texts, and callbacks make values of them. What these raise is the program's own
# error, while what a `parser` raises would be told in typer's words.


def _count(
    option: Callable[..., Any], help: str, *, least: int = 0, metavar: str = "N|auto", names: tuple[str, ...] = ()
) -> Any:
    """An option for a count of at least `least`, by the field's name or `names`; None for `auto`, which leaves it to
    the runtime."""

    def read(param: typer.CallbackParam, text: str) -> int | None:
        return count_or_auto(param.opts[0], text, least=least)

    return option("auto", *names, metavar=metavar, parser=str, callback=read, help=help)


def _given(read: Callable[[str], Any]) -> Callable[[str | None], Any]:
    """A callback that reads the text of an option, and leaves one alone that was not given."""
    return lambda text: None if text is None else read(text)


def _unicode(param: typer.CallbackParam, given: Any) -> Any:
    """Leave one text or several alone, if they are text."""
    for text in [given] if isinstance(given, str) else given or ():
        require_unicode(param.opts[0], text)
    return given


def _biases(param: typer.CallbackParam, given: list[str] | None) -> list[tuple[int, float]] | None:
    """Token ids with their biases."""
    pairs = []
    for text in given or ():
        match = re.fullmatch(r"([0-9]{1,10})=([+-]?[0-9]{1,9}(?:\.[0-9]*)?)", text.strip())
        require(match is not None, f"{param.opts[0]} {text!r} is not a bias: write it like 1234=-100")
        assert match is not None
        pairs.append((int(match[1]), float(match[2])))
    return pairs or None


def _template_options(param: typer.CallbackParam, given: list[str] | None) -> list[tuple[str, Any]]:
    """Names and values of options of a chat template: values are JSON, or else texts."""
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        require(
            bool(name and equals), f"{param.opts[0]} {text!r} is not an option: write it like enable_thinking=false"
        )
        require(name not in found, f"{param.opts[0]} gives {name} twice: give it once")
        require_unicode(param.opts[0], text)
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return list(found.items())


def _schema(param: typer.CallbackParam, file: str | None) -> str | None:
    """The text of a schema."""
    return None if file is None else read_text(file, option=param.opts[0])


def _devices(param: typer.CallbackParam, text: str) -> str:
    """Leave names of devices alone that can be some, wherever they are."""
    for name in text.split(","):
        is_device = re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", name.strip()) is not None
        require(is_device, f"{param.opts[0]} {name!r} is not a device: use auto, cuda, cuda:N or cpu, or cuda:0,cuda:1")
    return text


_text = partial(typer.Option, None, metavar="TEXT", callback=_unicode)
_memory = partial(_machine, None, metavar="SIZE", parser=str, callback=_given(parse_bytes))
_memory_of_cards = partial(_machine, None, metavar="SIZE[,SIZE]", parser=str, callback=_given(parse_sizes))
_machine_profile = partial(_machine, None, metavar="NAME|FILE")
_file = partial(typer.Option, None, metavar="FILE", parser=str, callback=_given(user_path))


def _tuning(name: str, help: str) -> Any:
    """The field of `SpeculationOptions` by this name."""
    default = getattr(SpeculationOptions, name)
    return _count(_proposing, help if default is None else f"{help} auto: {default}.", least=1)


def _threads(param: typer.CallbackParam, count: int | None) -> int | None:
    """Leave a number of threads alone that this machine can run."""
    there = os.cpu_count() or 1
    fine = count is None or 1 <= count <= there
    require(fine, f"{param.opts[0]} {count} is not 1 to {there}: this machine has {there} logical cores")
    return count


# What several commands take; a call names the command's own default.
_THREADS = _machine(
    None, metavar="N", callback=_threads, help="CPU threads to compute with; by itself, as many as PyTorch takes."
)
_DEVICE = _machine("auto", help="Where the target runs.")
_DEVICES = partial(_machine, "auto", "--device", "--devices", metavar="DEVICE[,DEVICE]", callback=_devices)
_TEMPLATE_OPTIONS: Any = _model(
    None, "--template-option", metavar="NAME=VALUE", callback=_template_options,
    help="For the model's chat template, such as enable_thinking=false; may be repeated.",
)  # fmt: skip
_DTYPE = _machine("auto", help="What is computed in; auto: the checkpoint's own on a GPU, fp32 on a CPU.")
_SEED = _sampling(0, min=0, metavar="N", help="The same seed gives the same tokens.")
_print = partial(_switch, rich_help_panel="Output")
_PROFILE = _machine_profile(
    help="Choose and predict by these figures; left out, by a profile of this GPU, your own or a shipped one."
)
_SPECIAL_TOKENS = _switch("--allow-special-tokens", rich_help_panel="Model", help="Messages may spell control tokens.")
_TRACE = _file(rich_help_panel="Output", help="Write when what ran, for ui.perfetto.dev and tools/timeline.py.")
_JSON = _print("--json", help="One JSON object on stdout and nothing else.")
_NO_PROGRESS = _print("--no-progress", help="No progress bars on stderr.")
_GAMMA = _count(_proposing, "Tokens to propose per pass, in a row; auto chooses who proposes and how much.", least=1)
_max_new_tokens = partial(_sampling, min=1, metavar="N", help="Longest answer, in tokens.")
_temperature = partial(_sampling, min=0.0, metavar="T", help="How freely tokens are drawn; 0 is greedy decoding.")
_top_k = partial(_sampling, min=0, metavar="K", help="Keep the K likeliest tokens; 0 is off.")
_top_p = partial(_sampling, metavar="P", help="Keep the likeliest tokens that hold P; 1 is off.")
_min_p = partial(_sampling, metavar="P", help="Drop tokens below P times the likeliest; 0 is off.")
_repetition_penalty = partial(
    _sampling, metavar="R", help="Divide positive logits of tokens that prompt or answer have, 0.1 to 10; 1 is off."
)
# Of a chat with a model whose makers name none.
CHAT_TEMPERATURE = 0.7


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is run, how tokens are proposed and how much memory may be used: as `plan` has to know it."""

    target: str = _model(..., metavar="MODEL", help="Directory, GGUF file or id on the hub.")
    draft: str = _model(
        "auto",
        metavar="MODEL|auto|ngram|none",
        help="What proposes tokens: a small model, the text's own n-grams, or nothing. Never changes the output. auto: "
        "a small model of the same family beside the target or in the hub's cache, where that is predicted to be "
        "faster, else n-grams.",
    )
    context: int | None = _count(_model, "Tokens of context to reserve.", least=1, metavar="TOKENS|auto")
    kv: Literal["auto", "gpu", "host"] = _model(
        "auto", help="Where the KV cache lives: on the GPU, or paged from host memory; auto: what is predicted faster."
    )
    weights: Literal["auto", "stored", "decoded"] = _model(
        "auto",
        help="Matrices of quantised files: as stored, decoded before every product, or decoded as they are loaded; "
        "auto: what is predicted to be faster.",
    )
    speculation: Literal["auto", "none", "chain", "triforce"] = _proposing(
        "auto",
        metavar="MODE",
        help="none: nothing proposes. chain: the draft proposes. triforce: between draft and target the target checks "
        "over retrieved tokens. auto: what is predicted to be faster.",
    )
    draft_cache: Literal["auto", "full", "retrieval", "streaming"] = _proposing(
        "auto",
        metavar="HOW",
        help="full: all tokens. retrieval: of all tokens those that its queries choose. streaming: first and newest "
        "tokens only. auto: what is predicted to be faster, of the last and one that suits the context.",
    )
    sink_tokens: int | None = _tuning("sink_tokens", "First tokens a streaming cache keeps.")
    recent_tokens: int | None = _tuning("recent_tokens", "Newest tokens a streaming cache keeps.")
    chunk_size: int | None = _tuning("chunk_size", "Tokens that are retrieved together.")
    budget_tokens: int | None = _tuning("budget_tokens", "Tokens retrieved per KV head.")
    refresh_steps: int | None = _tuning(
        "refresh_steps", "Steps of TriForce from retrieval to retrieval. auto: 1 with --kv host, else 4."
    )
    gamma_draft: int | None = _tuning("gamma_draft", "Tokens the draft proposes to a step of TriForce, as a tree.")
    tree_nodes: int | None = _count(
        _proposing,
        "Tokens to propose per pass in all, as a tree, no more of them in a row than --gamma N says. 0: chains only. "
        "auto chooses; beside --gamma N it stands for chains.",
    )
    dtype: Dtype = _DTYPE
    encode: Literal["none", "auto", "always"] = _machine(
        "none",
        metavar="HOW",
        help="Keep bf16 weights of the target in 12 bits, which changes no bit of them. auto: where that is predicted "
        "to be faster, or to fit.",
    )
    vram_bytes: Any = _memory_of_cards(
        "--vram", help="Most GPU memory to use, such as 24GB or 20GiB: of each card, or one after the other: 22GB,24GB."
    )
    ram_bytes: int | None = _memory("--ram", help="Most host memory to use; by itself, what there is.")
    pinned_bytes: int | None = _memory(
        "--pinned",
        help="Most of it to page-lock; weights and KV beyond it are staged: slower. By itself, what the system gives.",
    )
    resident_layers: int | None = _count(_machine, "Layers that stay on the device; others are streamed every pass.")

    @cached_property
    def config(self) -> RuntimeConfig:
        """What a runtime is loaded with; raises `OptionError` for what contradicts itself."""
        options = _by_name(self, RuntimeConfig)  # with what commands add, such as --gamma and --device
        gamma = options.get("gamma")
        if gamma is not None:
            options["max_gamma"] = max(RuntimeConfig.max_gamma, gamma)
            # A gamma alone asks for chains, and room for trees would be of no use.
            options["tree_nodes"] = self.tree_nodes or 0
        options["speculation"] = self._speculation()
        return RuntimeConfig(**options)

    def _speculation(self) -> SpeculationOptions:
        """How tokens are proposed; raises `OptionError` for an option that would do nothing beside the others."""
        options = _by_name(self, SpeculationOptions)
        given = {name: value for name, value in options.items() if value not in (None, "auto")}
        idle = idle_options(self.draft not in ("auto", "ngram", "none"), self.speculation, self.draft_cache)
        for name, why in idle.items():
            require(name not in given, f"--{name.replace('_', '-')} {given.get(name)} does nothing {why}")
        return replace(SpeculationOptions(self.speculation), **given)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """What `plan` takes."""

    max_batch: int = typer.Option(1, "--batch", min=1, metavar="N", help="Prompts that are answered at once.")
    gamma: int | None = _GAMMA
    device: str = _DEVICES(help="Cards to plan for, such as cuda:0,cuda:1; auto: all that the machine has.")
    profile: str | None = _machine_profile(help="The machine to plan for, such as rtx4090; left out, your own.")
    plot: Path | None = _file(help="Draw the plan as bars, such as plan.png or plan.svg.")
    explain: bool = _print("--explain", help="Say also what lives where, what a pass costs, and speed by acceptance.")
    as_json: bool = _JSON


@dataclass(frozen=True, kw_only=True)
class LoadOptions(RunOptions):
    """What a command that loads a model takes."""

    device: str = _DEVICES(
        help="Where the target runs: auto, cuda, cuda:1 or cpu; or several cards that its layers are dealt out to: "
        "cuda:0,cuda:1."
    )
    threads: int | None = _THREADS
    emulate: str | None = _machine_profile(help="Play a smaller card, such as rtx4090: its memory and link are limits.")


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(LoadOptions):
    """What a command that answers takes: also how tokens are sampled, and what is told of the run."""

    gamma: int | None = _GAMMA
    max_new_tokens: int = _max_new_tokens(256)
    temperature: float = _temperature(0.0)
    top_k: int = _top_k(0)
    top_p: float = _top_p(1.0)
    min_p: float = _min_p(0.0)
    presence_penalty: float = _sampling(0.0, metavar="X", help="Take X from tokens that the answer has, -2 to 2.")
    frequency_penalty: float = _sampling(0.0, metavar="X", help="Take X for each time that the answer has a token.")
    repetition_penalty: float = _repetition_penalty(1.0)
    logit_bias: list[str] | None = _sampling(
        None, metavar="ID=BIAS", callback=_biases, help="Add -100 to 100 to a token's logit; may be repeated."
    )
    logprobs: int | None = _sampling(
        None, metavar="N", help="With --json tell every token's log-probability, and the N likeliest, up to 20."
    )
    json_schema: str | None = _sampling(
        None, metavar="FILE", callback=_schema, help="The answer is JSON that the schema in this file allows."
    )
    seed: int = _SEED
    stop: list[str] | None = _text(rich_help_panel="Sampling", help="End at this text; may be repeated.")
    stop_token_ids: list[int] | None = _sampling(None, min=0, metavar="ID", help="End at this token; may be repeated.")
    min_tokens: int = _sampling(0, min=0, metavar="N", help="Shortest answer, in tokens: nothing ends it before.")
    ignore_eos: bool = _switch("--ignore-eos", rich_help_panel="Sampling", help="Go on past the end-of-text token.")
    profile: str | None = _PROFILE
    allow_special_tokens: bool = _SPECIAL_TOKENS
    explain: bool = _print("--explain", help="Say what lives where before loading, and all figures after the answer.")
    trace: Path | None = _TRACE
    as_json: bool = _JSON
    no_progress: bool = _NO_PROGRESS

    @cached_property
    def params(self) -> GenerationParams:
        """What one answer is asked for; raises `OptionError` for values that make no sense."""
        sampling = {name: value for name, value in _by_name(self, SamplingParams).items() if value is not None}
        fine = self.logprobs is None or self.as_json
        require(fine, f"--logprobs {self.logprobs} does nothing without --json, which prints them: add it, or drop it")
        return GenerationParams(
            self.max_new_tokens, tuple(self.stop or ()), self.gamma, self.ignore_eos, SamplingParams(**sampling),
            logprobs=self.logprobs, min_tokens=self.min_tokens, stop_token_ids=self.stop_token_ids or (),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnswerOptions):
    """What `generate` takes."""

    prompt: str | None = _text(help="What to continue or answer.")
    prompt_file: list[str] | None = typer.Option(
        None,
        metavar="FILE",
        help="The same from a UTF-8 file; - is stdin. Repeated, the prompts are answered as one batch; the first draws "
        "the noise that it would draw alone, each other one its own.",
    )
    chat: bool = _switch("--chat", help="Send the prompt through the model's chat template.")
    template_options: list[str] | None = _TEMPLATE_OPTIONS

    @property
    def max_batch(self) -> int:
        """Prompts that are answered at once."""
        return max(1, len(self.prompt_file or ()))


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnswerOptions):
    """What `chat` takes: longer answers, sampled as the model's makers want it where the user names nothing else."""

    max_new_tokens: int = _max_new_tokens(1024)
    temperature: float = _temperature(
        None,
        help="How freely tokens are drawn; 0 is greedy decoding. By itself this, K, both P and the repetition penalty "
        f"are those of the model's generation_config.json, else {CHAT_TEMPERATURE} and none.",
    )
    top_k: int = _top_k(None)
    top_p: float = _top_p(None)
    min_p: float = _min_p(None)
    repetition_penalty: float = _repetition_penalty(None)
    template_options: list[str] | None = _TEMPLATE_OPTIONS
    system: str | None = _text(help="What the model is told before the first turn.")
    session: Path | None = _file(help="Go on from this file if it is there, and save to it after every answer.")

    def with_defaults(self, named: Mapping[str, float]) -> tuple[ChatOptions, str | None]:
        """The same with what the user left open, as the model's makers `named` it or else the command's own; and a line
        that says so."""
        taken: dict[str, Any] = {name: value for name, value in named.items() if getattr(self, name) is None}
        line: str | None = None
        own: dict[str, Any] = {"temperature": CHAT_TEMPERATURE} if self.temperature is None else {}
        if taken:
            words = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in taken.items())
            line = f"sampling as the model's generation_config.json has it: {words}"
            line += "" if "temperature" in taken or not own else f"; it leaves temperature open: {CHAT_TEMPERATURE}"
        elif own:
            line = f"sampling at temperature {CHAT_TEMPERATURE}: the model's files name no defaults"
        return replace(self, **{**own, **taken}), line


# What a chat may change between two answers: fields of its options, by their names on the command line.
SAMPLING_OPTIONS = {
    one.name.replace("_", "-"): one.name
    for one in fields(ChatOptions)
    if isinstance(one.default, OptionInfo) and one.default.rich_help_panel == "Sampling"
}


def sampling_values(options: ChatOptions) -> dict[str, str]:
    """How tokens are sampled, by `SAMPLING_OPTIONS`, as the command line has it."""

    def written(value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, list | tuple):
            pairs = [f"{one[0]}={one[1]:g}" if isinstance(one, tuple) else repr(one) for one in value]
            return " ".join(pairs) or "none"
        if isinstance(value, float):
            return f"{value:g}"
        return "none" if value is None else shortened(str(value))

    values = {name: getattr(options, field) for name, field in SAMPLING_OPTIONS.items()}
    off = SamplingParams()  # what is left open stands for
    return {
        name: written(getattr(off, SAMPLING_OPTIONS[name], None) if value is None else value)
        for name, value in values.items()
    }


def with_sampling_option(options: ChatOptions, name: str, text: str) -> ChatOptions:
    """The same but for one of `SAMPLING_OPTIONS`, read as on the command line; a switch is `on` or `off`, what may be
    repeated is added to, and `none` takes back what may be left out. Raises `OptionError`."""
    require(name in SAMPLING_OPTIONS, f"{name} is not an option of sampling: there are {', '.join(SAMPLING_OPTIONS)}")
    field, read = SAMPLING_OPTIONS[name], list[ChatOptions]()
    before = getattr(options, field)
    words = [f"--{name}={text}"]
    if isinstance(before, bool):
        require(text in ("on", "off"), f"{name} is on or off, not {text!r}")
        words = [f"--{name}"] if text == "on" else []
    elif text == "none":
        words = []

    def keep(options: ChatOptions) -> None:
        read.append(options)

    command = typer.Typer(add_completion=False)
    command.command()(with_options(keep))
    try:
        command(["--target", "", *words], standalone_mode=False)
    except typer.BadParameter as error:
        raise OptionError(f"{name} {text!r}: {error.message}") from error
    value = getattr(read[0], field)
    change: dict[str, Any] = {field: [*(before or ()), *value] if isinstance(value, list) else value}
    changed = replace(options, **change)
    _ = changed.params  # which judges it
    return changed


@dataclass(frozen=True, kw_only=True)
class ServeOptions(LoadOptions):
    """What `serve` takes."""

    host: str = typer.Option("127.0.0.1", metavar="HOST", help="Where to listen; elsewhere than here it needs a key.")
    port: int = typer.Option(8000, metavar="PORT", help="0 picks a free one and says which.")
    api_key: str | None = typer.Option(
        None, metavar="KEY", callback=_unicode, help="What requests have to bring; or set OFFLOAD_RUNTIME_API_KEY."
    )
    served_model_name: list[str] | None = typer.Option(
        None, metavar="NAME", callback=_unicode,
        help="What the model is called, in place of the last part of --target; repeated, it has several names.",
    )  # fmt: skip
    allowed_host: list[str] | None = typer.Option(
        None, metavar="NAME", help="Another name of this machine; repeatable."
    )
    cors_origin: list[str] | None = typer.Option(
        None, metavar="ORIGIN", help="Let pages of https://chat.example ask; may be repeated."
    )
    grace_s: float = typer.Option(
        30.0, "--grace", min=0.0, metavar="SECONDS", help="How long answers may go on after Ctrl-C or SIGTERM."
    )
    max_batch: int | None = _count(
        _limits,
        "Requests that are answered at once; auto: as many, up to 16, as fit without streaming more than one does.",
        names=("--max-requests",), least=1,
    )  # fmt: skip
    max_waiting: int = _limits(64, min=0, metavar="N", help="Requests that may wait; further ones get a 429.")
    prefix_cache_bytes: int | None = _limits(
        None, "--prefix-cache", metavar="SIZE", parser=str, callback=_given(parse_bytes),
        help="Host memory, beyond --ram, for keys and values that a slot loses to another prompt.",
    )  # fmt: skip
    sessions: Path | None = _file(
        metavar="DIR", help="Keep what was read of prompts in this directory, for the next process."
    )
    sessions_bytes: int | None = _limits(
        None, "--sessions-size", metavar="SIZE", parser=str, callback=_given(parse_bytes),
        help="What --sessions may hold, 64GB by itself; what was used least recently goes first.",
    )  # fmt: skip
    max_tokens: int | None = _limits(
        None, min=1, metavar="N", help="Longest answer; by itself, what the context holds."
    )
    max_body_bytes: int = _limits(
        "8MB", "--max-body", metavar="SIZE", parser=str, callback=parse_bytes, help="Largest body of a request."
    )
    max_seconds: float = _limits(
        3600.0, min=0.001, metavar="SECONDS", help="After this long, waiting included, an answer ends as it is."
    )
    gamma: int | None = _GAMMA
    profile: str | None = _PROFILE
    allow_special_tokens: bool = _SPECIAL_TOKENS
    explain: bool = _print("--explain", help="Say what lives where before loading.")
    trace: Path | None = _TRACE
    no_progress: bool = _NO_PROGRESS


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(LoadOptions):
    """What `verify` takes."""

    prompts: str | None = typer.Option(None, metavar="FILE", help="More prompts, one a line of UTF-8; - is stdin.")
    tokens: int | None = typer.Option(
        None, metavar="N", help="Tokens of every generation compared: 64, or 16 with --quick."
    )
    seeds: int | None = typer.Option(None, metavar="N", help="Seeds of every test of fit: 256, or 64 with --quick.")
    quick: bool = _switch("--quick", help="Fewer prompts, settings and seeds.")
    as_json: bool = _JSON
    no_progress: bool = _NO_PROGRESS


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What `profile` takes."""

    save: str | None = typer.Option(None, metavar="NAME", help="Keep the profile by this name, over one that has it.")
    device: str = _DEVICES(
        help="What to measure: cards of one kind, such as cuda:0,cuda:1, or cpu, without a GPU; auto: the first GPU "
        "and all of its kind, if there is one."
    )
    quick: bool = _switch("--quick", help="About ten seconds, rougher and without the disk.")
    full: bool = _switch("--full", help="Find how much memory can be pinned by pinning nearly all that is free.")
    disk_file: Path | None = _file(help="Read this to measure the disk, instead of a temporary file.")
    as_json: bool = _JSON
    no_progress: bool = _NO_PROGRESS


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `demo` takes."""

    prompt: str | None = _text(help="Ask this instead of the text to rewrite.")
    max_new_tokens: int = _max_new_tokens(96)
    temperature: float = _temperature(0.0)
    seed: int = _SEED
    gamma: int | None = _GAMMA
    device: Device = _DEVICE
    dtype: Dtype = _DTYPE
    threads: int | None = _THREADS
    no_progress: bool = _NO_PROGRESS

    @cached_property
    def params(self) -> GenerationParams:
        """What both answers are asked for; raises `OptionError` for values that make no sense."""
        sampling = SamplingParams(self.temperature, seed=self.seed)
        return GenerationParams(self.max_new_tokens, gamma=self.gamma, sampling=sampling)


def refuse_early(config: RuntimeConfig) -> None:
    """Refuse before torch is imported, which takes seconds, what can be told without it: a profile that is not there, a
    path with nothing there, a model of a family that does not run. Errors as of `Runtime.load`."""
    from offload_runtime.weights.sources import refuse_early as refuse_model

    for machine in (config.profile, config.emulate):
        if machine is not None:
            load_profile(machine)
    for model in (config.target, config.draft):
        if model not in ("ngram", "none", "auto"):
            refuse_model(model)


def with_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Make of a command that takes one of the dataclasses above a function of its fields, as typer reads options."""
    options = get_type_hints(command)["options"]

    @wraps(command)
    def run(**given: Any) -> None:
        command(options(**given))

    asked = inspect.signature(options).parameters.values()
    by_group = sorted(asked, key=lambda option: _GROUPS.index(option.default.rich_help_panel))
    run.__signature__ = inspect.Signature(by_group)  # type: ignore[attr-defined]
    run.__annotations__ = get_type_hints(options)
    return run


def _by_name(options: object, config: type) -> dict[str, Any]:
    """The values of those options that are fields of a configuration by the same name."""
    return {field.name: getattr(options, field.name) for field in fields(config) if hasattr(options, field.name)}
