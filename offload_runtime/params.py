"""What one answer is asked for: how its tokens are sampled, when it ends, and how much is proposed."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, TypedDict, TypeVar, cast

from offload_runtime.config import is_of_type, require, require_positive, require_type, require_types, require_unicode
from offload_runtime.errors import OptionError

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


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits: a pure function of (logits, the sequence's own tokens, seed, noise_id,
    position).

    What is done to logits, in vLLM's order: `logit_bias` is added to the tokens that it names (-100 bans one, 100 wants
    no other). `repetition_penalty` divides positive logits of tokens that occur in prompt or answer, and multiplies
    negative ones (CTRL, arXiv 1909.05858, section 4.1; 1 is off). `frequency_penalty` is subtracted from a token's
    logit as often as it occurs in the answer so far, `presence_penalty` once if it occurs there at all (0 is off). Then
    comes the temperature, then the filters.

    `temperature` 0 is greedy, whatever the filters: they never exclude the most likely token. So is one below 0.001,
    which logits cannot be divided by, and `top_p` 0: the temperature is 0 then. `top_k` 0, `top_p` 1 and
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
        require(self.top_k >= 0, f"top_k must be 0 (off) or positive, not {self.top_k}")
        require(0 <= self.top_p <= 1, f"top_p must be in [0, 1], not {self.top_p}")
        if temperature < _LEAST_TEMPERATURE or self.top_p == 0:
            object.__setattr__(self, "temperature", 0.0)
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
    """Whether answers could lie outside a bound that is taken for the nearest double. No integer is above 2**63 - 1."""
    if abs(bound) < _LARGEST_EXACT or (key.endswith("aximum") and bound >= (1 << 63) - 1):
        return False
    return key.startswith("exclusive") or abs(bound) > 1 << 64 or int(float(bound)) != bound


def _require_short(name: str, text: str) -> None:
    """Raise `OptionError` for a schema or a grammar that is too long, or no text."""
    require_unicode(name, text)
    fine = len(text) <= MOST_GRAMMAR_CHARACTERS
    require(fine, f"{name} has {len(text)} characters: at most {MOST_GRAMMAR_CHARACTERS} are taken")


@dataclass(frozen=True)
class GenerationParams:
    """What one answer is asked for, in the words of `Runtime.stream`.

    `stop` may be given as a string or any sequence of them, and is a tuple then. `stop_token_ids` end the answer as the
    model's own end tokens do, and all of these may not come before the answer has `min_tokens`; nor does a stop string
    end it before. `gamma` tokens are proposed in a row
    and `tree_nodes` in all, which 0 limits to chains; what is None is chosen. With `logprobs`, the log-probability of
    every token is told, and so many of the likeliest ones (0 to 20) beside it: of the model's own distribution, before
    bias, penalties, temperature and filters. `prompt_logprobs` is the same of the prompt, all of which is read then.
    """

    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()
    gamma: int | None = None
    ignore_eos: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tree_nodes: int | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        require_types(self)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        # A lone string is not to be taken for a sequence of characters.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        require_positive("max_new_tokens", self.max_new_tokens)
        require_positive("gamma", self.gamma)
        require_positive("tree_nodes", self.tree_nodes, least=0)
        require(all(self.stop), "an empty stop string would end every answer at once")
        require_positive("min_tokens", self.min_tokens, least=0)
        most, fine = self.max_new_tokens, self.min_tokens <= self.max_new_tokens
        require(fine, f"min_tokens {self.min_tokens} is more than the {most} that are allowed (max_new_tokens)")
        ends = self.sampling.has_grammar and self.min_tokens > 0
        require(not ends, "a json_schema or grammar says when an answer ends: drop min_tokens")
        given = len(self.stop_token_ids)
        require(given <= MOST_STOP_TOKENS, f"stop_token_ids has {given} tokens: {MOST_STOP_TOKENS} at most")
        require(all(0 <= token < 1 << 31 for token in self.stop_token_ids), "stop_token_ids has one below 0")
        endless = self.ignore_eos and self.sampling.has_grammar
        require(not endless, "ignore_eos does nothing where a json_schema or grammar says when an answer ends: drop it")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            fine = value is None or 0 <= value <= MOST_LOGPROBS
            require(fine, f"{name} must be in [0, {MOST_LOGPROBS}], not {value}")


OneOrMany = TypeVar("OneOrMany", bound=GenerationParams | Sequence[GenerationParams])


class GenerationOptions(TypedDict, total=False):
    """The options of an answer by name, as `Runtime.stream` and its like take them; what is left out is as in
    `GenerationParams` and `SamplingParams`, whose fields they are.

    Attributes:
        max_new_tokens: Tokens to generate unless the model ends earlier.
        temperature: 0 is greedy, and so is anything below 0.001.
        top_k: Only the k most likely tokens; 0 is off.
        top_p: Only the most likely tokens that hold this probability together; 1 is off, 0 is greedy.
        min_p: Only tokens at least this likely relative to the most likely one; 0 is off.
        seed: Of the sampling noise.
        noise_id: Of the sampling noise as well: one answer of several to the same seed, in [0, 2**32).
        stop: A string, or several, that end the text.
        gamma: Most tokens proposed per pass in a row; None chooses round by round, by what was measured so far.
        tree_nodes: Most tokens proposed per pass in all, branches included; 0 for chains only. None chooses, unless
            `gamma` is given, which then stands for chains, or the runtime was loaded for a number.
        ignore_eos: Go on after the end-of-sequence token.
        min_tokens: The answer has so many tokens before what ends it may come: the end-of-sequence token, one of
            `stop_token_ids` or a stop string.
        stop_token_ids: Tokens that end the answer as well, whatever `ignore_eos` says; their text is not part of it.
        presence_penalty: Subtracted from the logit of every token that the answer has already, -2 to 2; 0 is off.
        frequency_penalty: The same as often as the answer has it.
        repetition_penalty: Divides positive logits of tokens that prompt or answer have already, and multiplies
            negative ones, 0.1 to 10; 1 is off.
        logit_bias: By token id what is added to its logit, -100 (ban it) to 100; comes before the penalties, and all of
            them before the temperature.
        logprobs: 0 to 20: the result has every token's log-probability by the model's own distribution, before all of
            these options, and so many of the likeliest tokens beside it (`TokenLogprobs`).
        prompt_logprobs: The same of the prompt's tokens behind the first. The whole prompt is read for it, a window
            after the other.
        json_schema: The answer is JSON that this schema allows, an object or its text, unless `max_new_tokens` cuts it;
            `{"type": "object"}` is any object. Needs the extra `[schemas]`.
        grammar: The same by a grammar in llguidance's variant of Lark.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    noise_id: int
    stop: str | Sequence[str]
    gamma: int | None
    tree_nodes: int | None
    ignore_eos: bool
    min_tokens: int
    stop_token_ids: Sequence[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | Sequence[Sequence[float]]
    logprobs: int | None
    prompt_logprobs: int | None
    json_schema: Mapping[str, Any] | str | None
    grammar: str | None


def params_once(
    by_name: GenerationOptions, params: OneOrMany | None, *, max_new_tokens: int = GenerationParams.max_new_tokens,
    kind: Any = GenerationParams | None,
) -> GenerationParams | OneOrMany:  # fmt: skip
    """The options of a call, which were given by name or all of them as `params`, of this `kind`; `max_new_tokens` is
    its usual number.

    Raises:
        OptionError: They were given in both ways, are of another kind, or make no sense.
        TypeError: There is no option of that name.
    """
    require_type("params", params, kind)
    if params is not None:
        require(not by_name, "options are given twice, by name and as params: put all of them into params")
        return params
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, **by_name}
    if unknown := sorted(given.keys() - GenerationOptions.__annotations__.keys()):
        names = ", ".join(GenerationOptions.__annotations__)
        raise TypeError(f"{unknown[0]!r} is no option of an answer: there are {names}")
    sampling = {one.name: given.pop(one.name) for one in fields(SamplingParams) if one.name in given}
    return GenerationParams(**given, sampling=SamplingParams(**sampling))


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
