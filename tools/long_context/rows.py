"""What is swept over a long context, and how a row of it is measured: plain decoding and speculation from the same
starts, beside the bound that single times give."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness import percentiles
from long_context.internals import Rig
from long_context.policies import CHUNK_POLICIES, chunk_policy
from long_context.session import Decoding, Session, compare, together
from sweeping.family import Sweep, tokens

from offload_runtime.config import SpeculationOptions
from offload_runtime.errors import OptionError
from offload_runtime.params import SamplingParams
from offload_runtime.speculation import Proposer

CHAIN = "chain"
_SEED = 1
# Starts are at most so far apart. No multiple of a block, so that blocks end where they may.
_MOST_STRIDE_TOKENS = 997
_PASSES = 5


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
    "policy": Varied("who chooses the chunks; chain: no retrieval verifier", (*CHUNK_POLICIES, CHAIN), _with_policy),
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


@dataclass(frozen=True)
class Lengths:
    """How much is decoded for a row: `tokens` and, plainly, `plain_tokens` of a sequence behind each of the starts, of
    which each text has its share. `draw` is the seed that they are drawn by; None for those at equal distances."""

    tokens: int
    plain_tokens: int
    starts: int
    draw: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "plain_tokens", "starts"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")


def starts_of(
    texts: Sequence[Sequence[int]], context_tokens: int, count: int, draw: int | None = None
) -> list[list[list[int]]]:
    """Known tokens of each sequence for `count` starts a little before the end of the context, the longest first.

    All are in its last sixteenth, or drawn by a seed from its last eighth: each row's first start finds the rest of the
    text in the cache.
    """
    stride = max(1, min(_MOST_STRIDE_TOKENS, context_tokens // (16 * count)))
    ends = [context_tokens - stride * (number + 1) for number in range(count)]
    if draw is not None:
        ends = random.Random(draw).sample(range(context_tokens - context_tokens // 8, context_tokens), count)
    return [[list(text[:end]) for text in texts] for end in sorted(ends, reverse=True)]


class RowMeasurement:
    """Measures rows of one runtime.

    Args:
        session: Its cache.
        rig: Its proposer.
        texts: By name, what each sequence reads, as long as the longest context.
        lengths: How much to decode.
    """

    def __init__(
        self, session: Session, rig: Rig, texts: Mapping[str, Sequence[Sequence[int]]], lengths: Lengths
    ) -> None:
        self._session = session
        self._rig = rig
        self._texts = texts
        self._lengths = lengths
        self._plain: dict[tuple[float, int], list[Decoding]] = {}
        self._passes_s: dict[tuple[int, int], float] = {}

    def measure(self, setting: Setting) -> dict[str, Any]:
        """One row.

        Raises:
            OptionError, BudgetError: The setting cannot be.
        """
        count, draw = -(-self._lengths.starts // len(self._texts)), self._lengths.draw
        places = [
            (name, start)
            for name, texts in self._texts.items()
            for start in starts_of(texts, setting.context_tokens, count, draw)
        ]
        starts = [start for _, start in places]
        params, session = SamplingParams(setting.temperature, seed=_SEED), self._session
        plainly = self._decode_plainly(setting, starts)
        plain = together(plainly)
        pass_s = self._pass_s(setting, starts[-1])
        proposer = self._rig.build(setting.options, setting.policy)
        decoded = [
            session.decode(start, proposer, params, gamma=setting.window, count=self._lengths.tokens)
            for start in starts
        ]
        found = together(decoded)
        steps_ms = session.step_times_ms(starts[-1], proposer, params, gamma=setting.window)
        same = compare(plain.texts, found.texts)
        row = {
            "plain_s_per_token": plain.s_per_token, "s_per_token": found.s_per_token,
            "times_plain": plain.s_per_token / found.s_per_token, "tokens": found.num_tokens, "passes": found.passes,
            "tokens_per_pass": found.tokens_per_pass, **found.acceptance(), "pass_s": pass_s, **steps_ms,
            "places": [
                {
                    "text": name, "tokens": len(start[0]), "s_per_token": one.s_per_token,
                    "tokens_per_pass": one.tokens_per_pass, "plain_s_per_token": alone.s_per_token,
                    "times_plain": alone.s_per_token / one.s_per_token,
                }
                for (name, start), one, alone in zip(places, decoded, plainly, strict=True)
            ],
        }  # fmt: skip
        return {
            **row, **bound(row, setting), "identical_to_plain": same.identical, "compared_tokens": same.num_tokens,
            "first_difference": same.first_difference,
        }  # fmt: skip

    def _decode_plainly(self, setting: Setting, starts: Sequence[Sequence[Sequence[int]]]) -> list[Decoding]:
        """From each of the starts."""
        key = setting.temperature, setting.context_tokens
        if key not in self._plain:
            params, proposer = SamplingParams(setting.temperature, seed=_SEED), Proposer()
            self._plain[key] = [
                self._session.decode(start, proposer, params, gamma=0, count=self._lengths.plain_tokens)
                for start in starts
            ]
        return self._plain[key]

    def _pass_s(self, setting: Setting, start: Sequence[Sequence[int]]) -> float:
        """Median of passes over full windows."""
        key = setting.context_tokens, setting.window + 1
        if key not in self._passes_s:
            times_s, _ = self._session.pass_times_s(start, setting.window + 1, _PASSES)
            self._passes_s[key] = percentiles(times_s).median
        return self._passes_s[key]


def bound(row: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """What the times of single passes and steps would allow if nothing else took time.

    tokens/s = tokens per pass / (time of a pass + steps per pass * time of a step), a step of the retrieval verifier
    with the draft's before it or, in a chain, a step of the draft.
    """
    if setting.options.mode == "chain":
        steps, step_ms = row["draft_steps_per_pass"], row["draft_step_ms"]
    else:
        assert setting.options.refresh_steps is not None, "the command has chosen it"
        share = 1 / setting.options.refresh_steps
        steps = row["verifier_steps_per_pass"]
        step_ms = share * row["verifier_step_with_refresh_ms"] + (1 - share) * row["verifier_step_ms"]
        step_ms += row.get("draft_steps", 0) * row.get("draft_step_ms", 0.0)
    bound_s = (row["pass_s"] + 1e-3 * steps * step_ms) / row["tokens_per_pass"]
    return {
        "step_ms": step_ms,
        "bound_tok_per_s": 1 / bound_s,
        "bound_times_plain": row["plain_s_per_token"] / bound_s,
        "share_of_bound": bound_s / row["s_per_token"],
    }
