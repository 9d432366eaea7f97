"""The options of the command line, one frozen dataclass a command: those of configurations, and a command's own.

All are declared as `offload_runtime.options` has them; typer's are made of that. Everything that can be judged without
the model is judged here, before a byte of it is loaded.
"""
# ruff: noqa: RUF009 (what the calls below return describes an option and is never a value)

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_origin, get_type_hints

import typer

from offload_runtime.cli.settings import Settings
from offload_runtime.cli.terminal import read_text, shortened, user_path, write_text
from offload_runtime.config import RuntimeConfig, ServerConfig, card_names, idle_options
from offload_runtime.hardware import load_profile
from offload_runtime.options import (
    GROUPS,
    MACHINE,
    MODEL,
    OUTPUT,
    SAMPLING,
    Option,
    OptionField,
    option,
    option_fields,
    require,
    require_unicode,
    validate,
)
from offload_runtime.params import GenerationParams
from offload_runtime.sizes import parse_count, size_option_down

if TYPE_CHECKING:
    from offload_runtime.engine.request import PromptRoom

# Of a chat with a model whose makers name none.
CHAT_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Part:
    """A part of a command's options is a configuration: `only` some of its options, or all but those `without`.

    `changed` says what default or words an option has here, and `fixed` are values that nobody can choose.
    """

    without: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def options(self, kind: Any) -> list[OptionField]:
        """Return the options of a configuration, and of those within it, that the command line has."""
        found: list[OptionField] = []
        for one in option_fields(kind):
            if is_dataclass(one.hint):
                found += self.options(one.hint)
            elif one.option is not None and self._has(one.name):
                found.append(one.changed(**self.changed.get(one.name, {})))
        return [one for one in found if one.option is not None and one.option.flag is not None]

    def made(self, kind: Any, given: Mapping[str, Any]) -> Any:
        """Make the configuration that was asked for, and those within it."""
        values = dict(self.fixed)
        for one in option_fields(kind):
            if is_dataclass(one.hint):
                values[one.name] = self.made(one.hint, given)
            elif given.get(one.name) is not None and self._has(one.name):
                values.setdefault(one.name, given[one.name])
        return kind(**{one.name: values[one.name] for one in option_fields(kind) if one.name in values})

    def _has(self, name: str) -> bool:
        return name not in self.without if self.only is None else name in self.only


def _part(**about: Any) -> Any:
    """Make the field of a command's options for a configuration; `about` are attributes of `Part`."""
    return field(metadata={"part": Part(**about)})


_json: Any = partial(option, False, "One JSON object on stdout and nothing else.", OUTPUT, flag="--json")
_no_progress: Any = partial(option, False, "No progress bars on stderr.", OUTPUT)
_explain: Any = partial(option, False, group=OUTPUT)
_model_argument: Any = partial(option, MISSING, argument=True, metavar="MODEL")
_file: Any = partial(option, None, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """`plan` takes these options."""

    config: RuntimeConfig = _part(
        without=("trace", "allow_special_tokens", "interface", "host_timeout_s", "profile"),
        changed={
            "max_batch": {"help": "Prompts that are answered at once.", "flag": "--batch", "auto": False},
            "device": {"help": "Cards to plan for, such as cuda:0,cuda:1; auto: all that the machine has."},
        },
    )  # fmt: skip
    profiles: list[str] | None = option(
        None, "The machine to plan for, such as rtx4090; left out, your own. Several, one a time, share the model.",
        MACHINE, flag="--profile", metavar="NAME|FILE", repeated=True,
    )  # fmt: skip
    network: str | None = option(
        None, "How fast the network between several machines is in bits a second, such as 2.5Gb.", MACHINE,
        metavar="SPEED",
    )  # fmt: skip
    plot: Path | None = _file("Draw the plan as bars, such as plan.png or plan.svg.")
    explain: bool = _explain("Say also what lives where, what a pass costs, and speed by acceptance.")
    as_json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A command that loads a model takes these options."""

    config: RuntimeConfig = _part()
    threads: int | None = option(
        None, "CPU threads to compute with; by itself, as many as PyTorch takes.", MACHINE, metavar="N"
    )
    explain: bool = False
    as_json: bool = False
    no_progress: bool = _no_progress()

    def __post_init__(self) -> None:
        there, count = os.cpu_count() or 1, self.threads
        fine = count is None or 1 <= count <= there
        require(fine, f"--threads {count} is not 1 to {there}: this machine has {there} logical cores")


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(LoadOptions):
    """A command that answers takes these options."""

    params: GenerationParams = _part(without=("tree_nodes",))
    template_options: list[tuple[str, Any]] | None = option(
        None, "For the model's chat template, such as enable_thinking=false; may be repeated.", MODEL,
        flag="--template-option", metavar="NAME=VALUE", repeated=True,
    )  # fmt: skip
    explain: bool = _explain("Say what lives where before loading, and all figures after the answer.")
    as_json: bool = _json()

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for name, _ in self.template_options or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"--template-option gives {twice} twice: give it once")
        count = self.params.logprobs
        fine = count is None or self.as_json
        require(fine, f"--logprobs {count} does nothing without --json, which prints them: add it, or drop it")

    @property
    def for_template(self) -> dict[str, Any]:
        """Return the options of the chat template by name."""
        return dict(self.template_options or ())

    def check(self, room: PromptRoom) -> None:
        """Refuse what a model cannot do or does not read."""
        room.check(self.params)
        if self.template_options:
            room.chat_template.require_options(self.for_template)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnswerOptions):
    """`generate` takes these options."""

    prompt: str | None = option(None, "What to continue or answer.", metavar="TEXT")
    prompt_file: list[str] | None = _file(
        "The same from a UTF-8 file; - is stdin. Repeated, the prompts are answered as one batch; the first draws the "
        "noise that it would draw alone, each other one its own.", repeated=True,
    )  # fmt: skip
    chat: bool = option(False, "Send the prompt through the model's chat template.")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnswerOptions):
    """`chat` takes these options: answers are longer, and sampled as the model's makers want it where the user has
    `chosen` nothing."""

    params: GenerationParams = _part(
        without=("tree_nodes",),
        changed={
            "max_new_tokens": {"default": 1024},
            "temperature": {
                "default": None, "help": "How freely tokens are drawn. By itself this, K, both P and the repetition "
                f"penalty are those of the model's generation_config.json, else {CHAT_TEMPERATURE} and none.",
            },
            **{name: {"default": None} for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
        },
    )  # fmt: skip
    system: str | None = option(None, "What the model is told before the first turn.", metavar="TEXT")
    session: Path | None = _file("Go on from this file if it is there, and save to it after every answer.")
    chosen: frozenset[str] = frozenset()

    def with_defaults(self, named: Mapping[str, float]) -> tuple[ChatOptions, str | None]:
        """Return the same with what the user left open, as the model's makers `named` it or else the command's own; and
        a line that says so."""
        taken = {name: value for name, value in named.items() if name not in self.chosen}
        own: dict[str, float] = {} if "temperature" in self.chosen else {"temperature": CHAT_TEMPERATURE}
        line: str | None = None
        if taken:
            words = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in taken.items())
            line = f"sampling as the model's generation_config.json has it: {words}"
            line += "" if "temperature" in taken or not own else f"; it leaves temperature open: {CHAT_TEMPERATURE}"
        elif own:
            line = f"sampling at temperature {CHAT_TEMPERATURE}: the model's files name no defaults"
        return replace(self, params=self.params.changed(**{**own, **taken})), line


@dataclass(frozen=True, kw_only=True)
class ServeOptions(LoadOptions):
    """`serve` takes these options."""

    config: RuntimeConfig = _part(
        without=("target",), fixed={"target": "the first of --target"},
        changed={"max_batch": {"default": None, "flag": "--max-requests", "group": "Limits"}},
    )  # fmt: skip
    server: ServerConfig = _part()
    targets: list[str] | None = option(
        None, "Directory, GGUF file, id on the hub, or a name of `offload-runtime list`; repeated, each is loaded when "
        "it is asked for, one at a time. By itself all that are here.", MODEL, flag="--target", metavar="MODEL",
        repeated=True,
    )  # fmt: skip
    served_model_name: list[str] | None = option(
        None, "What the model is called, in place of --target, of a path the last part; repeated, it has several "
        "names. With several models one for each.", metavar="NAME", repeated=True,
    )  # fmt: skip
    explain: bool = _explain("Say what lives where before loading.")

    def __post_init__(self) -> None:
        super().__post_init__()
        config, given, count = self.config, self.served_model_name, len(self.targets or ())
        drafts = config.draft if count != 1 and config.draft not in ("auto", "mtp", "self", "ngram", "none") else None
        remedy = "take auto, mtp, self, ngram or none, or serve it alone"
        require(drafts is None, f"--draft {drafts} drafts for one model, and there are {count or 'several'}: {remedy}")
        why = "--trace is of one model that stays: name one --target, and drop --keep-alive"
        require(self.has_one_that_stays or config.trace is None, why)
        fine = given is None or ((count == 1 or len(given) == count) and count > 0)
        named = f"{len(given or ())} --served-model-name for {count or 'no named'} models"
        require(fine, f"{named}: give one for each --target, in their order")
        names = [name for names in self.names for name in names]
        twice = next((name for name in names if names.count(name) > 1), None)
        fine = count == 1 or twice is None
        require(fine, f"two models are called {twice!r}: name them with --served-model-name, one for each")

    @property
    def has_one_that_stays(self) -> bool:
        """Return whether there is one model, which is always loaded."""
        return self.targets is not None and len(self.targets) == 1 and self.server.keep_alive is None

    @property
    def configs(self) -> list[RuntimeConfig]:
        """Return what each model is loaded with."""
        return [replace(self.config, target=target) for target in self.targets or ()]

    @property
    def names(self) -> list[list[str]]:
        """Return what each model is called: as it was named, and of a path never the whole."""
        if self.served_model_name is not None:
            given = self.served_model_name
            return [given] if len(self.targets or ()) == 1 else [[name] for name in given]
        paths = [(one, os.path.abspath(os.path.expanduser(one))) for one in self.targets or ()]
        return [[Path(path).name.removesuffix(".gguf") if os.path.exists(path) else one] for one, path in paths]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(LoadOptions):
    """`verify` takes these options."""

    config: RuntimeConfig = _part(without=("gamma", "profile", "allow_special_tokens", "trace"))
    prompts: str | None = _file("More prompts, one a line of UTF-8; - is stdin.")
    tokens: int | None = option(None, "Tokens of every generation compared: 64, or 10 with --quick.", metavar="N")
    seeds: int | None = option(None, "Seeds of every test of fit: 256, or 32 with --quick.", metavar="N")
    quick: bool = option(False, "Fewer prompts, settings and seeds.")
    as_json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class BenchOptions(LoadOptions):
    """`bench` takes these options."""

    config: RuntimeConfig = _part(
        without=("trace", "allow_special_tokens"),
        changed={"context": {"help": "Tokens of context to reserve; auto: what the longest prompt and answer take."}},
    )  # fmt: skip
    prompt_tokens: str = option("512,4096", "Lengths of prompts, such as 512,32K.", metavar="N[,N]")
    tokens: int = option(64, "Tokens of every answer.", least=2, metavar="N")
    repeats: int = option(3, "Answers of each kind, of which the median counts.", least=1, metavar="N")
    text: str | None = _file("What prompts are the beginning of, UTF-8; by itself Python's own documentation.")
    compare: bool = option(False, "Measure llama.cpp, too, with as much VRAM, by its llama-bench.")
    llama_bench: Path | None = _file("The llama-bench to compare with; by itself the one in PATH.")
    out: Path | None = _file("Write the JSON here, too.", group=OUTPUT)
    as_json: bool = _json()

    def __post_init__(self) -> None:
        super().__post_init__()
        validate(self)
        longest = max(self.lengths) + self.tokens
        context = self.config.context
        fine = context is None or context >= longest
        require(fine, f"prompts and answers take {longest} tokens, and --context is {context}: raise it, or drop it")
        fine = self.compare or self.llama_bench is None
        require(fine, "--llama-bench does nothing without --compare: add it, or drop this")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of prompts, each once."""
        try:
            found = sorted({parse_count(one) for one in self.prompt_tokens.split(",")})
        except ValueError:
            found = [0]
        shown = f"--prompt-tokens {shortened(self.prompt_tokens)}"
        require(found[0] > 0, f"{shown} is no list of lengths: write it like 512,4K, each at least 1")
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """`profile` takes these options."""

    save: str | None = option(None, "Keep the profile by this name, over one that has it.", metavar="NAME")
    device: str = option(
        "auto", "What to measure: GPUs of one kind, such as cuda:0,cuda:1, or cpu, without any; auto: the first GPU "
        "and all of its kind, if there is one.", MACHINE, flag="--device --devices", metavar="DEVICE[,DEVICE]",
    )  # fmt: skip
    quick: bool = option(False, "About ten seconds, rougher.")
    full: bool = option(False, "Find how much memory can be pinned by pinning nearly all that is free.")
    interface: str | None = option(
        None, "Measure only the network between machines on each of which torchrun has started the command, over this "
        "interface.", MACHINE, metavar="NAME",
    )  # fmt: skip
    as_json: bool = _json()
    no_progress: bool = _no_progress()

    def __post_init__(self) -> None:
        card_names(self.device)
        fine = self.interface is None or not (self.save or self.full or self.quick)
        require(fine, "--interface measures the network, which no profile has: drop --save, --full and --quick")


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """`list` takes these options."""

    profile: str | None = option(
        None, "The machine to predict speeds for, such as rtx4090; left out, your own.", MACHINE, metavar="NAME|FILE"
    )  # fmt: skip
    as_json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """`pull` takes these options."""

    model: str = _model_argument("What to fetch: org/name, or of GGUF files org/name:Q4_K_M.")


@dataclass(frozen=True, kw_only=True)
class RmOptions:
    """`rm` takes these options."""

    model: str = _model_argument("What to delete, by a name of `offload-runtime list`.")
    yes: bool = option(False, "Delete without asking.", flag="--yes -y")


@dataclass(frozen=True, kw_only=True)
class DemoOptions(LoadOptions):
    """`demo` takes these options; its `config` has the target once that was fetched."""

    config: RuntimeConfig = _part(
        only=("device", "dtype", "max_gamma"), changed={"device": {"help": "Where the target runs."}},
        fixed={"target": "the demo model", "draft": "ngram", "resident_layers": 0},
    )  # fmt: skip
    params: GenerationParams = _part(
        only=("max_new_tokens", "temperature", "seed", "gamma"), changed={"max_new_tokens": {"default": 96}}
    )
    prompt: str | None = option(None, "Ask this instead of the text to rewrite.", metavar="TEXT")


def refuse_early(config: RuntimeConfig) -> None:
    """Refuse before torch is imported, which takes seconds, what can be told without it: a profile that is not there, a
    path with nothing there, a model of a family that does not run. Errors as of `Runtime.load`."""
    from offload_runtime.weights.sources import refuse_early as refuse_model

    if config.profile is not None:
        load_profile(config.profile)
    for model in (config.target, config.draft):
        if model not in ("mtp", "self", "ngram", "none", "auto"):
            refuse_model(model)


# --- how options are read: typer sees texts, and callbacks make values of them, so that what is wrong is said in our
# words


def _bias(name: str, text: str) -> tuple[int, float]:
    """Read a token id with its bias."""
    match = re.fullmatch(r"([0-9]{1,10})=([+-]?[0-9]{1,9}(?:\.[0-9]*)?)", text.strip())
    require(match is not None, f"{name} {text!r} is not a bias: write it like 1234=-100")
    assert match is not None
    return int(match[1]), float(match[2])


def _template_option(name: str, text: str) -> tuple[str, Any]:
    """Read name and value of an option of a chat template; a value is JSON, or else a text."""
    key, equals, value = require_unicode(name, text).partition("=")
    require(bool(key and equals), f"{name} {text!r} is not an option: write it like enable_thinking=false")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def _token(name: str, text: str) -> int:
    """Read a token id."""
    token: int = OptionField(name, int, None, Option("", least=0)).read(name, text)
    return token


_READERS: dict[str, Callable[[str, str], Any]] = {
    "logit_bias": _bias, "template_options": _template_option, "stop_token_ids": _token,
    "json_schema": lambda name, file: read_text(file, option=name),
    **dict.fromkeys(("prompt", "stop", "system", "api_key", "served_model_name"), require_unicode),
}  # fmt: skip


def read_option(one: OptionField, name: str, text: str) -> Any:
    """Turn what was typed for an option, or for one of several, into its value. Raises `OptionError` by this name."""
    if one.name in _READERS:
        return _READERS[one.name](name, text)
    return user_path(text) if Path in one.types else one.read(name, text)


def _typer_option(one: OptionField) -> inspect.Parameter:
    """Describe an option as typer wants it."""
    about = one.option
    assert about is not None and about.flag is not None
    names = about.flag.split() or [f"--{one.name.replace('_', '-')}"]
    annotation: Any = str | None
    default: Any = None if one.default in (None, ()) else str(one.default)
    metavar: str | None = about.metavar or "N"
    if one.default is MISSING:
        annotation, default = str, ...
    elif one.hint is bool:
        annotation, default, metavar = bool, False, ""  # typer would say <bool>
    elif get_origin(one.hint) is Literal:
        annotation, metavar = one.hint, about.metavar
    elif about.repeated:
        annotation = list[str] | None
    elif about.auto and one.default == one.automatic:
        default, metavar = "auto", about.metavar or "N|auto"
    elif about.size and one.default is not None:
        default = size_option_down(one.default)

    def read(context: typer.Context, param: typer.CallbackParam, given: Any) -> Any:
        context.obj.texts[param.name] = given
        if not isinstance(given, str | list | tuple) or get_origin(one.hint) is Literal:
            return given
        read_one = partial(read_option, one, context.obj.name(context, param))
        return read_one(given) if isinstance(given, str) else [read_one(text) for text in given] or None

    said: Any = {"metavar": metavar, "help": one.description, "callback": read}
    if about.argument:
        made = typer.Argument(default, **said)
    else:
        made = typer.Option(default, *names, rich_help_panel=about.group, **said)
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=made, annotation=annotation)


def _settings_options(options: Mapping[str, OptionField]) -> list[inspect.Parameter]:
    """Describe what every command has: the file that says what the command line does not, and how to see what is
    said."""

    def read(context: typer.Context, file: str | None) -> None:  # before other options are
        context.obj = Settings.of(context, None if file is None else user_path(file), options)
        context.default_map = context.obj.values

    file = typer.Option(
        None, "--config", metavar="FILE", is_eager=True, callback=read, rich_help_panel=OUTPUT,
        help="Settings, in place of config.toml in the user's own directory.",
    )  # fmt: skip
    printing = typer.Option(
        False, "--print-config", metavar="", rich_help_panel=OUTPUT,
        help="Print every option as it is now, as such a file, with where it was said, and leave.",
    )  # fmt: skip
    made = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    return [
        made("command_line", annotation=typer.Context), made("config", default=file, annotation=str | None),
        made("print_config", default=printing, annotation=bool),
    ]  # fmt: skip


def _options_of(command: type) -> dict[str, OptionField]:
    """Return all options of a command, by name."""
    found: dict[str, OptionField] = {}
    for one, own in zip(option_fields(command), fields(command), strict=True):
        part = own.metadata.get("part")
        for each in [one] if part is None else part.options(one.hint):
            if each.option is not None:
                found.setdefault(each.name, each)
    return found


def _settled(given: dict[str, Any]) -> dict[str, Any]:
    """Complete what a command line says with what one option means for others; raises `OptionError` for one that would
    do nothing beside the others."""
    gamma = given.get("gamma")
    if isinstance(gamma, int):
        given["max_gamma"] = max(RuntimeConfig.max_gamma, gamma)
        if given.get("tree_nodes") == "auto":  # a gamma alone asks for chains, and room for trees would be of no use
            given["tree_nodes"] = 0
    if "draft_cache" in given:
        has_draft = given["draft"] not in ("auto", "self", "ngram", "none")
        for name, why in idle_options(has_draft, given["mode"], given["draft_cache"]).items():
            require(given[name] == "auto", f"--{name.replace('_', '-')} {given[name]} does nothing {why}")
    return given


def with_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Make of a command that takes one of the dataclasses above a function of their options, as typer reads them."""
    kind = get_type_hints(command)["options"]
    options = _options_of(kind)

    @wraps(command)
    def run(command_line: typer.Context, config: None, print_config: bool, **given: Any) -> None:
        chosen = frozenset(name for name, value in given.items() if value is not None)
        given, made = _settled(given), {"chosen": chosen} if "chosen" in kind.__dataclass_fields__ else {}
        for one, own in zip(option_fields(kind), fields(kind), strict=True):
            if (part := own.metadata.get("part")) is not None:
                made[one.name] = part.made(one.hint, given)
            elif given.get(one.name) is not None:
                made[one.name] = given[one.name]
        asked = kind(**made)
        if print_config:
            secrets = {name for name, one in options.items() if one.option is not None and one.option.secret}
            write_text(command_line.obj.to_toml(command_line, secrets))
        else:
            command(asked)

    by_group = sorted(options.values(), key=lambda one: GROUPS.index(one.option.group))  # type: ignore[union-attr]
    parameters = [*(_typer_option(one) for one in by_group), *_settings_options(options)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


# --- what a chat may change between two answers, by its names on the command line

SAMPLING_OPTIONS = {
    (one.option.flag or one.name).removeprefix("--").replace("_", "-"): one
    for one in _options_of(ChatOptions).values()
    if one.option is not None and one.option.group == SAMPLING
}


def sampling_values(params: GenerationParams) -> dict[str, str]:
    """Say how tokens are sampled, by `SAMPLING_OPTIONS`, as the command line has it."""

    def written(value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            pairs = [f"{one[0]}={one[1]:g}" if isinstance(one, tuple) else repr(one) for one in value]
            return " ".join(pairs) or "none"
        if isinstance(value, float):
            return f"{value:g}"
        return "none" if value is None else shortened(str(value))

    return {name: written(params.value(one.name)) for name, one in SAMPLING_OPTIONS.items()}


def with_sampling_option(options: ChatOptions, name: str, text: str) -> ChatOptions:
    """Change one of `SAMPLING_OPTIONS`, read as on the command line; a switch is `on` or `off`, what may be
    repeated is added to, and `none` takes back what was said. Raises `OptionError`."""
    require(name in SAMPLING_OPTIONS, f"{name} is not an option of sampling: there are {', '.join(SAMPLING_OPTIONS)}")
    one = SAMPLING_OPTIONS[name]
    assert one.option is not None
    if one.hint is bool:
        require(text in ("on", "off"), f"{name} is on or off, not {text!r}")
        value: Any = text == "on"
    elif text == "none":
        value = GenerationParams().value(one.name) if one.default is None else one.default
    else:
        value = read_option(one, name, text)
        value = (*options.params.value(one.name), value) if one.option.repeated else value
    return replace(options, params=options.params.changed(**{one.name: value}))
