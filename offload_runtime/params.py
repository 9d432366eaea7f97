"""What one answer is asked for: how its tokens are sampled, when it ends, and how much is proposed."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, TypeVar, cast

from offload_runtime.errors import OptionError
from offload_runtime.options import (
    SAMPLING,
    SPECULATION,
    documented,
    is_of_type,
    option,
    require,
    require_type,
    require_unicode,
    validate,
)

# Tokens of a request whose logits may be moved by a bias.
MOST_BIASED = 1024
# Alternatives to a token whose probabilities are told, as of OpenAI's interface.
MOST_LOGPROBS = 20
# Tokens of a request that end its answer beside the model's own.
MOST_STOP_TOKENS = 128
# Of a schema or a grammar: the largest ones of so many characters are compiled in about a second.
MOST_GRAMMAR_CHARACTERS = 1 << 17
_LARGEST_EXACT = 1 << 53
_LEAST_TEMPERATURE = 1e-3  # below which logits cannot be divided by it
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
# Keywords of a schema whose values have names of the user's as their keys.
_KEYED_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


@documented()
@dataclass(frozen=True)
class SamplingParams:
    """Says how a token is chosen from logits: a pure function of (logits, the sequence's own tokens, seed, noise_id,
    position).

    Logits are worked on in vLLM's order: bias, repetition (CTRL, arXiv 1909.05858, section 4.1), frequency, presence,
    temperature, then the filters `top_k`, `top_p` and `min_p`, which never exclude the most likely token. What leaves a
    schema or a grammar is excluded before the filters. Requests with the same seed and different `noise_id`s draw
    independent noise.

    `logit_bias` may be given as a mapping, and is a tuple of (token id, bias) in ascending order then; `json_schema`
    may be an object, and is its text then. The temperature is 0 where it was below 0.001 or `top_p` was 0.
    """

    temperature: float = option(
        0.0, "How freely tokens are drawn.", SAMPLING, least=0, below=math.inf, note="0 is greedy", metavar="T",
        http=True,
    )  # fmt: skip
    top_k: int = option(0, "Keep the K likeliest tokens.", SAMPLING, least=0, note="0 is off", metavar="K", http=True)
    top_p: float = option(
        1.0, "Keep the likeliest tokens that hold P.", SAMPLING, least=0, most=1, note="1 is off", metavar="P",
        http=True,
    )  # fmt: skip
    min_p: float = option(
        0.0, "Drop tokens below P times the likeliest.", SAMPLING, least=0, most=1, note="0 is off", metavar="P",
        http=True,
    )  # fmt: skip
    seed: int = option(0, "The same seed gives the same tokens.", SAMPLING, least=0, below=1 << 64, metavar="N")
    noise_id: int = option(0, "One answer of several to the same seed.", least=0, below=1 << 32, flag=None)
    presence_penalty: float = option(
        0.0, "Take X from tokens that the answer has.", SAMPLING, least=-2, most=2, note="0 is off", metavar="X",
        http=True,
    )  # fmt: skip
    frequency_penalty: float = option(
        0.0, "Take X for each time that the answer has a token.", SAMPLING, least=-2, most=2, note="0 is off",
        metavar="X", http=True,
    )  # fmt: skip
    repetition_penalty: float = option(
        1.0, "Divide positive logits of tokens that prompt or answer have, and multiply negative ones.", SAMPLING,
        least=0.1, most=10, note="1 is off", metavar="R", http=True,
    )  # fmt: skip
    logit_bias: Mapping[int, float] | Sequence[Sequence[float]] = option(
        (), "Add -100 (ban it) to 100 to a token's logit; may be repeated.", SAMPLING, metavar="ID=BIAS", repeated=True
    )
    json_schema: Mapping[str, Any] | str | None = option(
        None, "The answer is JSON that this schema allows.", SAMPLING, metavar="FILE"
    )
    grammar: str | None = option(
        None, "The answer is what this grammar allows, in llguidance's variant of Lark.", flag=None
    )

    def __post_init__(self) -> None:
        validate(self)
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        once = None in (self.json_schema, self.grammar)
        require(once, "json_schema and grammar both say what an answer is: drop one of them")
        if self.grammar is not None:
            _require_short("grammar", self.grammar)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.temperature < _LEAST_TEMPERATURE or self.top_p == 0:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> bool:
        """Return whether sampling is a plain argmax."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Return whether any of top-k, top-p, min-p restricts the allowed tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Return `logit_bias` as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def has_grammar(self) -> bool:
        """Return whether a schema or a grammar says which tokens may come."""
        return self.json_schema is not None or self.grammar is not None

    @property
    def penalised(self) -> bool:
        """Return whether logits depend on the tokens before them."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def without_noise(self) -> SamplingParams:
        """Return what two requests share that choose alike: everything but the noise."""
        return replace(self, seed=0, noise_id=0)

    @cached_property
    def filters_alone(self) -> SamplingParams:
        """Return what two requests share whose filters exclude the same tokens of the same logits."""
        if not self.filtered:
            return SamplingParams()
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)


def _bias_pairs(given: Mapping[int, float] | Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    """Bring a logit bias into the form that it is kept in. Raises `OptionError`."""
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
    """Bring a JSON schema into the form that it is kept in. Raises `OptionError`."""
    if given is None:
        return None
    try:
        text = given if isinstance(given, str) else json.dumps(dict(given))
        _require_short("json_schema", text)
        value = json.loads(text)
        require_exact_numbers(value)
    except OptionError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"json_schema is not JSON: {error}") from error
    require(isinstance(value, dict), 'json_schema is not an object such as {"type": "object"}')
    return text


def require_exact_numbers(schema: Any, *, is_value: bool = False, is_named: bool = False) -> None:
    """Raise `OptionError` for a schema with integers in a `const` or `enum` that answers could not have exactly, or
    with bounds that they could lie outside of.

    They are taken for the nearest double, so that an answer would have another one: 2**53 in place of 2**53 + 1.

    Args:
        schema: Or a part of one.
        is_value: It is within a `const` or an `enum`.
        is_named: Its keys are names, as those of `properties` are, and not keywords.
    """
    if is_value and isinstance(schema, int) and abs(schema) > _LARGEST_EXACT:
        raise OptionError(
            f"json_schema has the integer {reprlib.repr(schema)} as a const or in an enum, and only those up to 2**53 "
            "are kept exactly: make it a text"
        )
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        is_bound = not is_value and not is_named and key in _BOUNDS and is_of_type(value, int | float)
        if is_bound and _is_loose(key, value):
            raise OptionError(
                f"json_schema has the {key} {reprlib.repr(value)}, and beyond 2**53 bounds are rounded, so that "
                "answers could lie outside: give an inclusive one that is a multiple of 1024, or leave it out"
            )
        names = not is_named and not is_value and key in _KEYED_BY_NAME
        require_exact_numbers(value, is_value=is_value or (not is_named and key in ("const", "enum")), is_named=names)
    for item in schema if isinstance(schema, list) else ():
        require_exact_numbers(item, is_value=is_value)


def _is_loose(key: str, bound: float) -> bool:
    """Return whether answers could exceed a bound that is taken for the nearest double; integers end at 2**63 - 1."""
    if abs(bound) < _LARGEST_EXACT or (key.endswith("aximum") and bound >= (1 << 63) - 1):
        return False
    return key.startswith("exclusive") or abs(bound) > 1 << 64 or int(float(bound)) != bound


def _require_short(name: str, text: str) -> None:
    """Raise `OptionError` for a schema or a grammar that is too long, or no text."""
    require_unicode(name, text)
    fine = len(text) <= MOST_GRAMMAR_CHARACTERS
    require(fine, f"{name} has {len(text)} characters: at most {MOST_GRAMMAR_CHARACTERS} are taken")


@documented()
@dataclass(frozen=True)
class GenerationParams:
    """One answer is asked for with these options, in the words of `Runtime.stream`.

    `stop` may be given as a string or any sequence of them, and is a tuple then. Nothing ends the answer before it has
    `min_tokens`: no end token of the model, no stop token and no stop string. Log-probabilities are those of the
    model's own distribution, before bias, penalties, temperature and filters.
    """

    max_new_tokens: int = option(256, "Longest answer, in tokens.", SAMPLING, least=1, metavar="N")
    stop: str | Sequence[str] = option(
        (), "End at this text; may be repeated.", SAMPLING, metavar="TEXT", repeated=True
    )
    gamma: int | None = option(
        None, "Most tokens to propose per pass in a row. None chooses, by what was measured so far.", SPECULATION,
        least=1, auto=True,
    )  # fmt: skip
    ignore_eos: bool = option(False, "Go on past the end-of-text token.", SAMPLING, http=True)
    sampling: SamplingParams = SamplingParams()
    tree_nodes: int | None = option(
        None, "Most tokens to propose per pass in all, branches included; 0 for chains only. None chooses, unless "
        "gamma is given, which then stands for chains.", least=0, flag=None,
    )  # fmt: skip
    logprobs: int | None = option(
        None, "Tell every token's log-probability, and the N likeliest; on the command line with --json.", SAMPLING,
        least=0, most=MOST_LOGPROBS, metavar="N",
    )  # fmt: skip
    min_tokens: int = option(
        0, "Shortest answer, in tokens: nothing ends it before.", SAMPLING, least=0, metavar="N", http=True
    )
    stop_token_ids: Sequence[int] = option(
        (), "End at this token, whatever --ignore-eos says; may be repeated.", SAMPLING, metavar="ID", repeated=True
    )
    prompt_logprobs: int | None = option(
        None, "The same as logprobs of the prompt, all of which is read then.", least=0, most=MOST_LOGPROBS, flag=None
    )

    def __post_init__(self) -> None:
        validate(self)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        # A lone string is not to be taken for a sequence of characters.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        require(all(self.stop), "an empty stop string would end every answer at once")
        most, fine = self.max_new_tokens, self.min_tokens <= self.max_new_tokens
        require(fine, f"min_tokens {self.min_tokens} is more than the {most} that are allowed (max_new_tokens)")
        ends = self.sampling.has_grammar and self.min_tokens > 0
        require(not ends, "a json_schema or grammar says when an answer ends: drop min_tokens")
        given = len(self.stop_token_ids)
        require(given <= MOST_STOP_TOKENS, f"stop_token_ids has {given} tokens: {MOST_STOP_TOKENS} at most")
        require(all(0 <= token < 1 << 31 for token in self.stop_token_ids), "stop_token_ids has one below 0")
        endless = self.ignore_eos and self.sampling.has_grammar
        require(not endless, "ignore_eos does nothing where a json_schema or grammar says when an answer ends: drop it")

    def changed(self, **options: Any) -> GenerationParams:
        """Return the same with some options changed, those of `sampling` too. Raises `OptionError`."""
        sampling = {name: options.pop(name) for name in SamplingParams.__dataclass_fields__ if name in options}
        return replace(self, **options, sampling=replace(self.sampling, **sampling))

    def value(self, name: str) -> Any:
        """Return the value of an option, which may be one of `sampling`."""
        return getattr(self if hasattr(self, name) else self.sampling, name)


OneOrMany = TypeVar("OneOrMany", bound=GenerationParams | Sequence[GenerationParams])


def params_once(
    by_name: Mapping[str, Any], params: OneOrMany | None, *, max_new_tokens: int = GenerationParams.max_new_tokens,
    kind: Any = GenerationParams | None,
) -> GenerationParams | OneOrMany:  # fmt: skip
    """Return the options of a call, which were given by name or all of them as `params`, of this `kind`;
    `max_new_tokens` is its usual number.

    Raises:
        OptionError: They were given in both ways, are of another kind, or make no sense.
        TypeError: There is no option of that name.
    """
    require_type("params", params, kind)
    if params is not None:
        require(not by_name, "options are given twice, by name and as params: put all of them into params")
        return params
    names = [*GenerationParams.__dataclass_fields__, *SamplingParams.__dataclass_fields__]
    names.remove("sampling")
    if unknown := [name for name in by_name if name not in names]:
        raise TypeError(f"{unknown[0]!r} is no option of an answer: there are {', '.join(names)}")
    return GenerationParams().changed(**{"max_new_tokens": max_new_tokens, **by_name})


def params_of_each(
    params: GenerationParams | Sequence[GenerationParams], noise_ids: Sequence[int] | None, count: int
) -> list[GenerationParams]:
    """Return the options of each of `count` requests that are answered together.

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
