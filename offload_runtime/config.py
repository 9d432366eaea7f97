"""Frozen configuration: what a model looks like, how tokens are sampled, what the user asked for.

Plain values only (the standard library and nothing else), so that the planner and the tests can build them freely.
Each dataclass validates itself when made; a wrong value raises `OptionError` before anything is loaded.
"""

from __future__ import annotations

import os
import re
import reprlib
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from offload_runtime.errors import OptionError, StorageError

GB = 1_000_000_000
GIB = 1 << 30
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": GB, "tb": 10**12}
_SIZE_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": GIB}
_MOST_BYTES = 10**18  # no machine has as much memory
_MOST_OF_NAME = 50  # that a file's temporary one has of its name


def parse_bytes(text: str | float) -> int:
    """Turn `"24GB"`, `"512MiB"` or a number of bytes into an integer. Decimal units unless written with an `i`."""
    number, unit, shown = text, "", reprlib.repr(text)  # a word may be of any length
    if not isinstance(number, Real):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
        if match is None or match[2].lower() not in _SIZE_UNITS:
            raise OptionError(f"{shown} is not a size: write it like 24GB, 512MiB or a number of bytes")
        number, unit = float(match[1]), match[2].lower()
    size = number * _SIZE_UNITS[unit]
    fine = size < _MOST_BYTES and round(size) > 0
    way_out = "write it like 24GB, or drop it for all that there is"
    require(fine, f"a size must be positive and less than {format_bytes(_MOST_BYTES)}, not {shown}: {way_out}")
    return round(size)  # 4.1 * 10**6 is a little less than what was meant


def parse_sizes(text: str | float | Sequence[str | float]) -> int | tuple[int, ...]:
    """The same of one size, or of several: a sequence, or one text with commas such as `"22GB,24GB"`."""
    if isinstance(text, str):
        sizes = tuple(map(parse_bytes, text.split(",")))
        return sizes if len(sizes) > 1 else sizes[0]
    return tuple(map(parse_bytes, text)) if isinstance(text, Sequence) else parse_bytes(text)


def format_bytes(size_bytes: float) -> str:
    """Write bytes for people: `13.5 GB`, `256.0 MB`, in decimal units as the link's bandwidth is."""
    for unit, scale in (("TB", 10**12), ("GB", GB), ("MB", 10**6), ("kB", 10**3)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def _last_digit(size_bytes: int) -> int:
    """Bytes that the last digit of `format_bytes` stands for."""
    return max(1, 10 ** (3 * ((len(str(size_bytes)) - 1) // 3) - 1))


def format_bytes_up(size_bytes: int) -> str:
    """Like `format_bytes`, but never less than what it stands for: a user types it back."""
    step = _last_digit(size_bytes)
    return format_bytes(-(-size_bytes // step) * step)


def size_option_down(size_bytes: int) -> str:
    """Bytes as an option's value, `12.3GB`, and never more than what it stands for: the user types it as a limit."""
    step = _last_digit(size_bytes)
    return format_bytes(size_bytes // step * step).replace(" ", "")


# Where the XDG specification puts a kind of files in the user's home.
_IN_HOME = {"config": ".config", "cache": ".cache", "state": ".local/state"}


def user_directory(kind: str, *, holds: str) -> Path:
    """The user's own directory for one kind of files.

    Our environment variable OFFLOAD_RUNTIME_KIND names it above all else. Otherwise it lies in the platform's directory
    for such files: that of APPDATA (settings) or LOCALAPPDATA on Windows, elsewhere that of XDG_KIND_HOME or, where
    this is not set, the usual one in the user's home.

    Args:
        kind: `config`, `cache` or `state`.
        holds: What is kept there, for the message.

    Raises:
        StorageError: The user has no home directory and no variable names another place.
    """
    variable, windows = f"OFFLOAD_RUNTIME_{kind.upper()}", "APPDATA" if kind == "config" else "LOCALAPPDATA"
    try:
        if chosen := os.environ.get(variable):
            return Path(chosen).expanduser()
        if sys.platform == "win32" and (platform := os.environ.get(windows)):
            return Path(platform) / "offload-runtime"
        base = os.environ.get(f"XDG_{kind.upper()}_HOME")
        return (Path(base) if base else Path.home() / _IN_HOME[kind]) / "offload-runtime"
    except RuntimeError as error:  # pathlib's way to say so
        raise StorageError(f"no directory for {holds} ({error}): set {variable} to an absolute path") from error


@contextmanager
def writing(path: Path, way_out: str) -> Iterator[None]:
    """Say of a file that the system refuses to write why, and what the user can do instead (`way_out`).

    Raises:
        StorageError: For every OSError within, and for a path that none can be, of a NUL or half a character.
    """
    try:
        yield
    except (OSError, ValueError) as why:
        raise StorageError(f"{path} cannot be written ({getattr(why, 'strerror', None) or why}): {way_out}") from why


def regular_file(path: Path, *, way_out: str) -> Path:
    """The place of a file that may be written: what symbolic links lead to, and nothing yet or a regular file.

    Raises:
        StorageError: A device, a FIFO, a socket or a directory is there, which a file in its place would destroy, or
            the file that standard output or standard error goes to; or no file can have this name.
    """
    with writing(path, way_out), suppress(FileNotFoundError):
        real = Path(os.path.realpath(path))
        there = real.lstat()
        if not stat.S_ISREG(there.st_mode):
            raise StorageError(f"{path} is not a regular file, and stays as it is: {way_out}")
        for number, stream in ((1, "standard output"), (2, "standard error")):
            with suppress(OSError):  # a closed stream goes nowhere
                if os.path.samestat(there, os.fstat(number)):
                    raise StorageError(f"{path} is where {stream} goes: {way_out}")
    return real


def write_atomically(path: Path, content: str | Iterable[bytes | memoryview], *, way_out: str) -> None:
    """Write a regular file, text as UTF-8, so that a reader sees the old one or the whole new one, never a part.

    Symbolic links stay, and what they lead to is written. What is not text comes in pieces.

    Raises:
        StorageError: The disk is full or the place cannot be written, with the `way_out`; what was there is then
            untouched.
    """
    real = regular_file(path, way_out=way_out)
    with writing(path, way_out):
        # In the same directory, because a rename is atomic only within one file system; a name has 255 bytes at most.
        prefix = f".{real.name[:_MOST_OF_NAME]}-"
        descriptor, partial = tempfile.mkstemp(dir=real.parent, prefix=prefix, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines([content.encode()] if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, real)
        except BaseException:
            os.unlink(partial)
            raise


def delete_leftovers(real: Path) -> None:
    """Delete what processes that were killed in `write_atomically` have left of a file that nobody is writing now, as
    far as the system lets us. Those of a long name stay: they may be another file's."""
    ours = re.compile(rf"\.{re.escape(real.name)}-[a-z0-9_]{{8}}\.part")  # as tempfile names them
    with suppress(OSError):
        for entry in os.scandir(real.parent):
            if len(real.name) < _MOST_OF_NAME and ours.fullmatch(entry.name):
                os.unlink(entry)


def require(fine: bool, message: str) -> None:
    """Raise `OptionError` with this message unless all is `fine`."""
    if not fine:
        raise OptionError(message)


def require_type(name: str, value: object, hint: Any) -> None:
    """Raise `OptionError` unless a value is of an annotated type."""
    if not is_of_type(value, hint):
        wanted = str(hint).replace("collections.abc.", "") if get_args(hint) else hint.__name__
        raise OptionError(f"{name} must be of type {wanted}, not {reprlib.repr(value)}")


_NUMBERS = {int: Integral, float: Real}  # numpy's as well
# Every choice of a token that has noise of its own has parameters of its own.
_types_of: Callable[[type], Mapping[str, Any]] = cache(get_type_hints)


def is_of_type(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; True is no number, and a text is no sequence."""
    parts = get_args(hint)
    if isinstance(hint, UnionType):
        return any(is_of_type(value, one) for one in parts)
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            return False
        return all(is_of_type(key, parts[0]) and is_of_type(item, parts[1]) for key, item in value.items())
    if parts:
        listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return listed and all(is_of_type(item, parts[0]) for item in value)
    if hint is Any or isinstance(value, bool):
        return hint in (Any, bool)
    return isinstance(value, _NUMBERS.get(hint, hint))


def require_types(options: object) -> None:
    """Raise `OptionError` unless every field of a dataclass is of its annotated type."""
    for name, hint in _types_of(type(options)).items():
        require_type(name, getattr(options, name), hint)


def count_or_auto(name: str, value: Any, *, least: int = 0) -> int | None:
    """A number, which may be typed; None for `auto`. Raises `OptionError` for anything else."""
    try:
        count = None if value == "auto" else int(str(value))  # neither 1.5 nor True
    except ValueError:
        count = -1
    require(count is None or count >= least, f"{name} must be auto or a count of at least {least}, not {value!r}")
    return count


def require_unicode(name: str, text: str) -> None:
    """Raise `OptionError` for a byte of a command line that is not UTF-8, or half of a pair in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        raise OptionError(f"{name} is not Unicode text: {what}: write it in UTF-8") from error


def card_names(device: str) -> tuple[str, ...]:
    """Names of the cards that a `device` such as `cuda:0,cuda:1` stands for; raises `OptionError` for none, and for
    cards of different kinds."""
    names = tuple(name.strip() for name in device.split(","))
    require(all(names), f"device {device!r} has an empty name: write it like cuda:0, or cuda:0,cuda:1")
    kinds = {name.split(":")[0] for name in names}
    alone = len(names) == 1 or "auto" not in kinds
    require(alone, f"device {device!r} has auto among others: name every card, or auto alone")
    require(len(kinds) == 1, f"device {device!r} mixes {' and '.join(sorted(kinds))}: name cards of one kind")
    return names


def require_positive(name: str, value: int | None, *, least: int = 1) -> None:
    """Raise `OptionError` unless `value` is at least `least` and no more than a machine counts to, or left open."""
    require(value is None or value >= least, f"{name} must be at least {least}, not {value}")
    require(value is None or value < 1 << 63, f"{name} must be less than 2**63")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and flags of one decoder of the Llama family.

    `layer_windows[i]` is the sliding window of layer i in tokens (None: full attention), `layer_rope[i]` says whether
    layer i rotates its queries and keys. `rope_parameters` is transformers' dictionary of the same name.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    layer_rope: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "max_position_embeddings"):  # fmt: skip
            require_positive(name, getattr(self, name))
        uneven = f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
        require(self.num_heads % self.num_kv_heads == 0, uneven)
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if not self.layer_rope:
            object.__setattr__(self, "layer_rope", (True,) * self.num_layers)

    @cached_property
    def attention_scale(self) -> float:
        """What the dot products of queries and keys are multiplied by."""
        return float(self.head_dim**-0.5)

    @property
    def q_size(self) -> int:
        """Channels of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all key heads together (the values have as many)."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k, v projection."""
        return self.q_size + 2 * self.kv_size

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V that one token holds over all layers."""
        return 2 * self.kv_size * self.num_layers * element_bytes

    def of_layers(self, layers: Sequence[int]) -> ModelConfig:
        """The same of some of the layers, which are numbered anew."""
        windows, rope = tuple(self.layer_windows[i] for i in layers), tuple(self.layer_rope[i] for i in layers)
        return replace(self, num_layers=len(layers), layer_windows=windows, layer_rope=rope)


SPECULATION_MODES = ("auto", "none", "chain", "triforce")
ENCODE = ("none", "auto", "always")
WEIGHTS = ("auto", "stored", "decoded")
DRAFT_CACHES = ("auto", "full", "retrieval", "streaming")
# With the newest known token and those whose keys are written anew, a step of the retrieval verifier has 32 rows.
MOST_GAMMA_DRAFT = 24


@dataclass(frozen=True)
class SpeculationOptions:
    """How tokens are proposed. None of it changes the output.

    `mode`: `chain` proposes from the draft, `triforce` puts the target over retrieved chunks between draft and target,
    `auto`, with a draft model, takes the one that is predicted to be faster. `draft_cache`: the draft's own cache,
    `full`, `retrieval` (all of it, of which steps read chunks of their choice) or `streaming` (`sink_tokens` first and
    `recent_tokens` newest tokens); `auto` takes the last or, where the draft's positions allow it, `full` up to 8192
    tokens and `retrieval` beyond them, by what is predicted as well. Of the retrieval verifier: `budget_tokens` per
    layer and KV head in chunks of `chunk_size`, chosen every `refresh_steps` of its steps (None: at each where the
    target's keys are in host memory, so that passes take long, else at every fourth); the draft proposes `gamma_draft`
    tokens to each step, as a tree. A draft that retrieves does so with the same `budget_tokens` and
    `chunk_size`.
    """

    mode: str = "auto"
    draft_cache: str = "auto"
    sink_tokens: int = 16
    recent_tokens: int = 512
    chunk_size: int = 4
    budget_tokens: int = 4096
    gamma_draft: int = 24
    refresh_steps: int | None = None

    def __post_init__(self) -> None:
        require_types(self)
        choices = ("speculation", self.mode, SPECULATION_MODES), ("draft_cache", self.draft_cache, DRAFT_CACHES)
        for name, value, allowed in choices:
            require(value in allowed, f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")
        for name in ("sink_tokens", "recent_tokens", "budget_tokens", "gamma_draft"):
            require_positive(name, getattr(self, name))
        if self.refresh_steps is not None:
            require_positive("refresh_steps", self.refresh_steps)
        most = MOST_GAMMA_DRAFT
        require(self.gamma_draft <= most, f"gamma_draft must be at most {most}, not {self.gamma_draft}")
        require(self.sink_tokens <= 256, f"sink_tokens must be at most 256, not {self.sink_tokens}")
        require(self.recent_tokens >= 2, f"recent_tokens must be at least 2, not {self.recent_tokens}")
        chunks_of_budget(self.budget_tokens, self.chunk_size)

    def steps_between_choices(self, *, on_host: bool) -> int:
        """`refresh_steps`, of a target whose keys are in host memory or not."""
        return self.refresh_steps or (1 if on_host else 4)


def idle_options(has_draft: bool, mode: str, draft_cache: str) -> dict[str, str]:
    """Fields of `SpeculationOptions` that nothing would look at, and why, with the way out.

    `has_draft` says whether a model drafts; the others are such fields.
    """
    idle: dict[str, str] = {}
    if mode in ("none", "chain"):
        why = f"with --speculation {mode}, which has no retrieval verifier: drop it, or take --speculation triforce"
        idle |= dict.fromkeys(("chunk_size", "budget_tokens", "refresh_steps", "gamma_draft"), why)
    elif mode == "auto" and not has_draft:
        why = "without a draft model, because auto takes no retrieval verifier then: name one with --draft, or take "
        why += "--speculation triforce --draft none"
        idle |= dict.fromkeys(("chunk_size", "budget_tokens", "refresh_steps"), why)
    if has_draft and mode != "none" and draft_cache in ("auto", "retrieval"):  # a draft's own cache may be of chunks
        idle = {name: why for name, why in idle.items() if name not in ("chunk_size", "budget_tokens")}
    if draft_cache not in ("auto", "streaming"):
        why = f"with --draft-cache {draft_cache}: drop it, or take --draft-cache streaming"
        idle |= dict.fromkeys(("sink_tokens", "recent_tokens"), why)
    if not has_draft:
        why = "without a draft model: drop it, or name one with --draft"
        idle |= dict.fromkeys(("gamma_draft", "draft_cache", "sink_tokens", "recent_tokens"), why)
    return idle


def chunks_of_budget(budget_tokens: int, chunk_size: int) -> int:
    """Chunks that make up a retrieval budget.

    Raises:
        OptionError: The chunk size is not supported, or the budget is not a number of whole chunks.
    """
    fine = chunk_size in (2, 4, 8, 16, 32, 64)
    require(fine, f"a chunk of {chunk_size} tokens is not supported: use a power of two from 2 to 64")
    whole = max(1, budget_tokens // chunk_size) * chunk_size
    uneven = f"a retrieval budget of {budget_tokens} tokens is not made of whole chunks of {chunk_size}: use {whole}"
    require(budget_tokens == whole, uneven)
    return budget_tokens // chunk_size


@dataclass(frozen=True)
class RuntimeConfig:
    """What a runtime is loaded with: the keywords of `Runtime.load`, made by it, the command line and the tools alike.

    `target` and `draft` are names or opened checkpoints (the draft `auto`: what is found, or n-grams); `emulate` and
    `profile` name machines or are their profiles.
    `device` names the cards that the target's layers are dealt out to, with commas between them; one that is named
    twice is two logical cards. Limits are in bytes, and None allows what there is; `vram_bytes` are of each card, or
    one figure for each. `resident_layers` None keeps as many as fit, `context` None
    is what suits the model and the place of its KV cache, and `max_batch` None as many sequences as fit without
    streaming more than one does. `gamma` is what a pass proposes where nothing else is asked
    for (None chooses) and `max_gamma` the longest chain to make room for. `tree_nodes` None leaves trees to the
    runtime, 0 makes no room for any. `encode` says whether matrices of the target that would be in bf16 are kept in 12
    bits, without loss: `none`, all of them (`always`), or where that is predicted to be faster or to fit (`auto`).
    `allow_special_tokens` makes control tokens of what spells them in chat messages.
    """

    target: Any
    draft: Any = "ngram"
    device: str = "auto"
    dtype: str = "auto"
    vram_bytes: int | tuple[int, ...] | None = None
    ram_bytes: int | None = None
    pinned_bytes: int | None = None
    resident_layers: int | None = None
    context: int | None = None
    kv: str = "auto"
    weights: str = "auto"
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    max_batch: int | None = 1
    max_gamma: int = 63
    gamma: int | None = None
    tree_nodes: int | None = None
    emulate: Any = None
    profile: Any = None
    trace: Path | None = None
    allow_special_tokens: bool = False
    encode: str = "none"

    def __post_init__(self) -> None:
        wanted = {
            "target": "a directory, a GGUF file or a hub id such as org/name",
            "draft": "a model, ngram or none",
        }
        for name, what in wanted.items():
            value = getattr(self, name)
            require(not isinstance(value, str) or bool(value.strip()), f"--{name} is empty: give {what}")
            is_model = isinstance(value, str | Path) or hasattr(value, "config")
            require(is_model, f"{name} must be {what}, not {reprlib.repr(value)}")
        require_types(self)
        require(self.kv in ("auto", "gpu", "host"), f"kv must be auto, gpu or host, not {self.kv!r}")
        require(self.weights in WEIGHTS, f"weights must be auto, stored or decoded, not {self.weights!r}")
        require(self.encode in ENCODE, f"encode must be {', '.join(ENCODE[:-1])} or {ENCODE[-1]}, not {self.encode!r}")
        for name in ("max_batch", "max_gamma", "gamma"):
            require_positive(name, getattr(self, name))
        for name in ("context", "tree_nodes"):
            require_positive(name, getattr(self, name), least=0)
        self._check_devices()
        self._check_proposals()

    def _check_devices(self) -> None:
        """Refuse names that are none, cards of different kinds, and limits of more or fewer cards than there are."""
        names = self.devices
        if isinstance(self.vram_bytes, list | tuple):
            object.__setattr__(self, "vram_bytes", tuple(self.vram_bytes))
        if self.device != "auto" and self.emulate is None:  # a machine that is played has its own number of cards
            self.vram_of_cards(len(names))

    def _check_proposals(self) -> None:
        """Refuse a draft that the mode leaves out, or a mode without what it needs; then proposals that there is no
        room for, or that nobody would make."""
        draft, mode, gamma, nodes = self.proposed_by, self.speculation.mode, self.gamma, self.tree_nodes
        ngrams = mode == "triforce" and draft == "ngram"
        require(not ngrams, "TriForce does not draft with n-grams: name a model with --draft, or take --draft none")
        idle = mode == "none" and draft == "the draft"
        require(not idle, "--speculation none would leave the draft model idle: drop one of the two")
        if mode == "chain" and draft == "none":
            raise OptionError("--speculation chain has nobody to propose: name a draft, or take --speculation none")
        if nodes and (draft == "none" or mode in ("none", "triforce")):
            why = f"--speculation {mode}" if mode in ("none", "triforce") else "--draft none"
            way_out = "drop it, or take --speculation chain with --draft ngram or a model"
            raise OptionError(f"--tree-nodes {nodes} does nothing with {why}: {way_out}")
        if gamma is None:
            return
        fits = gamma <= self.max_gamma
        require(fits, f"gamma {gamma} exceeds the room for {self.max_gamma} proposals: raise max_gamma with it")
        require(mode != "none", f"--gamma {gamma} does nothing with --speculation none: drop one of the two")
        proposed = draft != "none" or mode == "triforce"
        require(proposed, f"--gamma {gamma} does nothing with --draft none: drop it or name a draft")

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the cards; `auto` stands for one."""
        return card_names(self.device)

    def vram_of_cards(self, num_cards: int) -> tuple[int | None, ...]:
        """What is allowed of each of `num_cards` cards. Raises `OptionError` for as many figures as there are not."""
        limits = self.vram_bytes
        if not isinstance(limits, tuple):
            return (limits,) * num_cards
        sizes, cards = f"size{'s' * (len(limits) != 1)}", f"{'is' if num_cards == 1 else 'are'} {num_cards} card"
        why = f"--vram has {len(limits)} {sizes} and there {cards}{'s' * (num_cards != 1)}"
        require(len(limits) == num_cards, f"{why}: give one size for each card, or one for all")
        return limits

    @property
    def proposed_by(self) -> str:
        """Who proposes, in words: `ngram`, `none`, or `the draft` for a model that is named."""
        own = {"auto": "ngram", "ngram": "ngram", "none": "none"}  # of auto as long as no model was found
        return own.get(self.draft, "the draft") if isinstance(self.draft, str) else "the draft"

    @property
    def finds_draft(self) -> bool:
        """Whether a small model may draft that nobody has named."""
        return isinstance(self.draft, str) and self.draft == "auto" and self.speculation.mode in ("auto", "chain")
