"""Frozen configuration: what a model looks like, how tokens are sampled, what the user asked for.

Plain values only (the standard library and nothing else), so that the planner and the tests can build them freely.
Each dataclass validates itself when made; a wrong value raises `OptionError` before anything is loaded.
"""

from __future__ import annotations

import json
import math
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
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from offload_runtime.errors import OptionError, StorageError

GB = 1_000_000_000
GIB = 1 << 30
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": GB, "tb": 10**12}
_SIZE_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": GIB}
_MOST_BYTES = 10**18  # no machine has as much memory


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
    require(fine, f"a size must be positive and less than {format_bytes(_MOST_BYTES)}, not {shown}")
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
        descriptor, partial = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name[:50]}-", suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines([content.encode()] if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, real)
        except BaseException:
            os.unlink(partial)
            raise


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


# Tokens of a request whose logits may be moved by a bias.
MOST_BIASED = 1024
# Alternatives to a token whose probabilities are told, as of OpenAI's interface.
MOST_LOGPROBS = 20
# Of a schema or a grammar: the largest ones of so many characters are compiled in about a second.
MOST_GRAMMAR_CHARACTERS = 1 << 17


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits: a pure function of (logits, the sequence's own tokens, seed, noise_id,
    position).

    What is done to logits, in vLLM's order: `logit_bias` is added to the tokens that it names (-100 bans one, 100 wants
    no other). `repetition_penalty` divides positive logits of tokens that occur in prompt or answer, and multiplies
    negative ones (CTRL, arXiv 1909.05858, section 4.1; 1 is off). `frequency_penalty` is subtracted from a token's
    logit as often as it occurs in the answer so far, `presence_penalty` once if it occurs there at all (0 is off). Then
    comes the temperature, then the filters.

    `temperature` 0 is greedy, whatever the filters: they never exclude the most likely token. `top_k` 0, `top_p` 1 and
    `min_p` 0 switch the filters off; they apply in this order after the temperature, as in transformers. Requests with
    the same seed and different `noise_id`s draw independent noise.

    `logit_bias` may be given as a mapping, and is a tuple of (token id, bias) in ascending order then.

    The whole answer is JSON that `json_schema` allows, given as its text or its value and a text then, or whatever
    `grammar` does, in llguidance's variant of Lark. Tokens that would leave it are excluded before the filters.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    noise_id: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[Sequence[float]] = ()
    json_schema: Mapping[str, Any] | str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        require_types(self)
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        once = None in (self.json_schema, self.grammar)
        require(once, "json_schema and grammar both say what an answer is: drop one of them")
        if self.grammar is not None:
            _require_short("grammar", self.grammar)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        temperature = self.temperature
        require(0 <= temperature < math.inf, f"temperature must be 0 (greedy) or a positive number, not {temperature}")
        require(not 0 < temperature < 1e-3, f"temperature {temperature} is too small to divide by: use 0 for greedy")
        require(self.top_k >= 0, f"top_k must be 0 (off) or positive, not {self.top_k}")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}")
        require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}")
        require(0 <= self.seed < 1 << 64, f"seed must be in [0, 2**64), not {self.seed}")
        require(0 <= self.noise_id < 1 << 32, f"noise_id must be in [0, 2**32), not {self.noise_id}")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            require(-2 <= penalty <= 2, f"{name} must be in [-2, 2], not {penalty}")
        penalty = self.repetition_penalty
        require(0.1 <= penalty <= 10, f"repetition_penalty must be in [0.1, 10] (1 is off), not {penalty}")

    @property
    def greedy(self) -> bool:
        """Whether sampling is a plain argmax."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether any of top-k, top-p, min-p restricts the allowed tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def has_grammar(self) -> bool:
        """Whether a schema or a grammar says which tokens may come."""
        return self.json_schema is not None or self.grammar is not None

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def without_noise(self) -> SamplingParams:
        """What two requests share that choose alike: everything but the noise."""
        return replace(self, seed=0, noise_id=0)

    @cached_property
    def filters_alone(self) -> SamplingParams:
        """What two requests share whose filters exclude the same tokens of the same logits."""
        if not self.filtered:
            return SamplingParams()
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)


def _bias_pairs(given: Mapping[int, float] | Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    """A logit bias as it is kept. Raises `OptionError`."""
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    for pair in pairs:
        fine = len(pair) == 2 and isinstance(pair[0], Integral)
        require(fine, f"logit_bias is of token ids, each with its bias, not {reprlib.repr(pair)}")
        token, bias = pair
        require(0 <= token < 1 << 31, f"logit_bias of token {token}: a token id is at least 0")
        require(-100 <= bias <= 100, f"logit_bias of token {token} must be in [-100, 100], not {bias}")
    biases = {int(token): float(bias) for token, bias in pairs}
    require(len(biases) == len(pairs), "logit_bias names a token twice: give each its one bias")
    require(len(biases) <= MOST_BIASED, f"logit_bias names {len(biases)} tokens: {MOST_BIASED} at most")
    return tuple(sorted(biases.items()))


def _schema_text(given: Mapping[str, Any] | str | None) -> str | None:
    """A JSON schema as it is kept. Raises `OptionError`."""
    if given is None:
        return None
    try:
        text = given if isinstance(given, str) else json.dumps(dict(given))
        _require_short("json_schema", text)
        value = json.loads(text)
    except (TypeError, RecursionError, json.JSONDecodeError) as error:
        raise OptionError(f"json_schema is not JSON: {error}") from error
    require(isinstance(value, dict), 'json_schema is not an object such as {"type": "object"}')
    return text


def _require_short(name: str, text: str) -> None:
    """Raise `OptionError` for a schema or a grammar that is too long, or no text."""
    require_unicode(name, text)
    fine = len(text) <= MOST_GRAMMAR_CHARACTERS
    require(fine, f"{name} has {len(text)} characters: at most {MOST_GRAMMAR_CHARACTERS} are taken")


@dataclass(frozen=True)
class GenerationParams:
    """What one answer is asked for, in the words of `Runtime.stream`.

    `stop` may be given as a string or any sequence of them, and is a tuple then. `gamma` tokens are proposed in a row
    and `tree_nodes` in all, which 0 limits to chains; what is None is chosen. With `logprobs`, the log-probability of
    every token is told, and so many of the likeliest ones (0 to 20) beside it: of the model's own distribution, before
    bias, penalties, temperature and filters.
    """

    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()
    gamma: int | None = None
    ignore_eos: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tree_nodes: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        require_types(self)
        # A lone string is not to be taken for a sequence of characters.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        require_positive("max_new_tokens", self.max_new_tokens)
        require_positive("gamma", self.gamma)
        require_positive("tree_nodes", self.tree_nodes, least=0)
        require(all(self.stop), "an empty stop string would end every answer at once")
        endless = self.ignore_eos and self.sampling.has_grammar
        require(not endless, "ignore_eos does nothing where a json_schema or grammar says when an answer ends: drop it")
        fine = self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS
        require(fine, f"logprobs must be in [0, {MOST_LOGPROBS}], not {self.logprobs}")


OneOrMany = TypeVar("OneOrMany", bound=GenerationParams | Sequence[GenerationParams])


def params_once(
    by_name: GenerationParams, params: OneOrMany | None, *, max_new_tokens: int = GenerationParams.max_new_tokens,
    kind: Any = GenerationParams | None,
) -> GenerationParams | OneOrMany:  # fmt: skip
    """The options of a call, which were given by name or all of them as `params`, of this `kind`; `max_new_tokens` is
    its usual number.

    Raises:
        OptionError: They were given in both ways, or are of another kind.
    """
    require_type("params", params, kind)
    once = params is None or by_name == GenerationParams(max_new_tokens)
    require(once, "options are given twice, by name and as params: put all of them into params")
    return by_name if params is None else params


def params_of_each(
    params: GenerationParams | Sequence[GenerationParams], noise_ids: Sequence[int] | None, count: int
) -> list[GenerationParams]:
    """The options of each of `count` requests that are answered together.

    Args:
        params: Of all of them, or of each.
        noise_ids: Of each; None counts them from that of `params`, or takes those that a sequence of them has.
        count: Requests.

    Raises:
        OptionError: There are not as many of something.
    """
    if isinstance(params, GenerationParams):
        first = params.sampling.noise_id
        params, noise_ids = [params] * count, range(first, first + count) if noise_ids is None else noise_ids
    fine = is_of_type(params, Sequence[GenerationParams])
    require(fine, "params is a GenerationParams for all prompts, or a sequence with one for each of them")
    require(len(params) == count, f"{len(params)} params for {count} prompts: give one for each, or one for all")
    if noise_ids is None:
        noise_ids = [one.sampling.noise_id for one in params]
    require_type("noise_ids", noise_ids, Sequence[int])
    given = len(noise_ids)
    require(given == count, f"{given} noise_ids for {count} prompts: give one for each, or none at all")
    samplings = [replace(one.sampling, noise_id=noise_id) for one, noise_id in zip(params, noise_ids, strict=True)]
    return [replace(one, sampling=sampling) for one, sampling in zip(params, samplings, strict=True)]


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

    `target` and `draft` are names or opened checkpoints; `emulate` and `profile` name machines or are their profiles.
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
        wanted = {"target": "a directory, a GGUF file or a hub id such as org/name", "draft": "a model, ngram or none"}
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
        """Who proposes, in words: `ngram`, `none`, or `the draft` for a model."""
        return self.draft if self.draft in ("ngram", "none") else "the draft"
