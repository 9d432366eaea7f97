"""What is swept over a long context: the values of each sweep, and what one row is measured under."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from long_context.policies import CHUNK_POLICIES, chunk_policy
from sweeping.family import Sweep, tokens

from offload_runtime.config import SamplingParams, SpeculationOptions
from offload_runtime.errors import OptionError

CHAIN = "chain"


@dataclass(frozen=True)
class Setting:
    """Everything that a sweep may change. `chain_gamma` is the window where the draft is alone with the target."""

    options: SpeculationOptions
    temperature: float
    context_tokens: int
    gamma: int
    chain_gamma: int
    batch: int = 1
    depth: float = 0.5  # of the needle, as a share of the context
    policy: str = "retrieval"

    def __post_init__(self) -> None:
        for name in ("context_tokens", "gamma", "chain_gamma", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")
        SamplingParams(temperature=self.temperature)
        chunk_policy(self.policy)
        if not 0 <= self.depth <= 1:
            raise OptionError(f"the needle's depth is a share of the context from 0 to 1, not {self.depth}")

    @property
    def window(self) -> int:
        """Most tokens that are proposed to a pass of the target."""
        return self.chain_gamma if self.options.mode == CHAIN else self.gamma


@dataclass(frozen=True)
class Point:
    """One row of a sweep."""

    label: str
    setting: Setting


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{text!r} is not a number") from None


def _at_temperature(base: Setting, text: str) -> Setting:
    return replace(base, temperature=_number(text))


def _with_budget(base: Setting, text: str) -> Setting:
    return replace(base, options=replace(base.options, budget_tokens=tokens(text)))


def _with_chunks(base: Setting, text: str) -> Setting:
    return replace(base, options=replace(base.options, chunk_size=tokens(text)))


def _in_context(base: Setting, text: str) -> Setting:
    return replace(base, context_tokens=tokens(text))


def _with_gamma(base: Setting, text: str) -> Setting:
    if text.startswith("d"):
        return replace(base, options=replace(base.options, gamma_draft=tokens(text[1:])))
    return replace(base, gamma=tokens(text))


def _with_policy(base: Setting, text: str) -> Setting:
    if text == CHAIN:
        return replace(base, options=replace(base.options, mode=CHAIN))
    return replace(base, policy=text)


def _in_batch(base: Setting, text: str) -> Setting:
    number, _, length = text.partition("x")
    return replace(base, batch=tokens(number), context_tokens=tokens(length))


def _at_depth(base: Setting, text: str) -> Setting:
    return replace(base, depth=_number(text))


@dataclass(frozen=True)
class Varied(Sweep):
    """A sweep, and what a value of it means."""

    apply: Callable[[Setting, str], Setting]


SWEEPS = {
    "temperature": Varied("temperature", ("0", "0.2", "0.4", "0.6", "0.8", "1.0", "1.2"), _at_temperature),
    "budget": Varied("retrieved tokens a layer and head", ("1K", "2K", "3K", "4K", "6K", "8K"), _with_budget),
    "chunk": Varied("tokens in a chunk", ("2", "4", "8", "16", "32", "64"), _with_chunks),
    "context": Varied("tokens of context", ("120K", "64K", "32K", "16K", "8K", "4K"), _in_context),
    "gamma": Varied(
        "tokens proposed to a pass of the target",
        ("4", "8", "12", "16", "24", "32", "48", "d1", "d2", "d3", "d4", "d5", "d6", "d7", "d8"), _with_gamma,
    ),
    "batch": Varied("sequences x tokens of context", ("2x56K", "6x19K", "10x12K"), _in_batch),
    "policy": Varied("who chooses the chunks; chain: no middle level", (*CHUNK_POLICIES, CHAIN), _with_policy),
    "needle": Varied("depth of the needle, as a share of the context", ("0.9", "0.5", "0.1"), _at_depth),
}  # fmt: skip


def points_of(sweep: str, base: Setting, values: Sequence[str] | None) -> list[Point]:
    """The rows of a sweep, in the order in which they are measured.

    Longer contexts come before shorter ones, and deeper needles before those that more text follows: each row then
    finds most of its text in the cache.

    Args:
        sweep: One of `SWEEPS`.
        base: What is not varied.
        values: As on the command line; None for all.

    Raises:
        OptionError: A value makes no sense.
    """
    points = [Point(value, SWEEPS[sweep].apply(base, value)) for value in values or SWEEPS[sweep].values]
    if sweep == "context":
        points.sort(key=lambda point: -point.setting.context_tokens)
    if sweep == "needle":
        points.sort(key=lambda point: -point.setting.depth)
    return points
