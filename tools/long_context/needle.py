"""A needle in a novel: whether the target finds it, and how often a retrieval verifier agrees with it on the way.

The manner of TriForce's table of cache policies (arXiv 2404.11912): a policy that loses the needle agrees on nothing
of the answer. Whether the *model* finds it is another matter, and reported beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from long_context.internals import Rig, levels_of, runner_of
from long_context.policies import CHUNK_POLICIES
from long_context.rows import Setting
from long_context.session import Session, compare

from offload_runtime.errors import OptionError
from offload_runtime.model import Window
from offload_runtime.params import SamplingParams
from offload_runtime.runners import GuessTree, WindowInput
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.speculation import Proposer

NUMBER = " 48213"
REST = ". Remember it: 48213 is the pass number."
NEEDLE = f" The pass number of Mr. Knightley is{NUMBER}{REST}"
QUESTION = "\n\nWhat is the pass number of Mr. Knightley? The pass number of Mr. Knightley is"
_SEEDS = range(1, 9)
# The needle is put behind the next full stop, which a novel has at least so often.
_LONGEST_SENTENCE_TOKENS = 200


@dataclass(frozen=True)
class Haystack:
    """Token ids: what the target has read, question included, and the right answer, which begins with the number."""

    prompt: list[int]
    answer: list[int]
    number_tokens: int


def make_haystack(tokenizer: Any, text: Sequence[int], context_tokens: int, depth: float) -> Haystack:
    """Hide the needle in the text.

    Args:
        tokenizer: Of the model.
        text: The novel.
        context_tokens: Of the whole prompt.
        depth: Where the needle begins, as a share of the novel.

    Raises:
        OptionError: Needle and question do not fit.
    """
    needle, question = _encode(tokenizer, NEEDLE), _encode(tokenizer, QUESTION)
    novel_tokens = context_tokens - len(needle) - len(question)
    if novel_tokens < 1:
        raise OptionError(
            f"needle and question of {len(needle) + len(question)} tokens leave nothing of a context of "
            f"{context_tokens}: raise --context"
        )
    novel = list(text[:novel_tokens])
    place = _sentence_end(tokenizer, novel, int(depth * novel_tokens))
    prompt = [*novel[:place], *needle, *novel[place:], *question]
    return Haystack(prompt, _encode(tokenizer, NUMBER + REST), len(_encode(tokenizer, NUMBER)))


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def _sentence_end(tokenizer: Any, novel: Sequence[int], place: int) -> int:
    """The first place at or after `place` that follows a full stop; `place` itself where none is near."""
    for index in range(place, min(place + _LONGEST_SENTENCE_TOKENS, len(novel))):
        if tokenizer.decode([novel[index]]).rstrip().endswith("."):
            return index + 1
    return place


class NeedleTest:
    """Measures rows of the needle.

    Args:
        session: The target's cache.
        rig: Makes the levels.
        text: The novel.
        seeds: Of the noise that agreement is counted with, beside greedily.
    """

    def __init__(self, session: Session, rig: Rig, text: Sequence[int], *, seeds: Sequence[int] = _SEEDS) -> None:
        self._session = session
        self._rig = rig
        self._text = text
        self._seeds = seeds

    def measure(self, setting: Setting) -> dict[str, Any]:
        """One depth, all policies.

        Raises:
            OptionError, BudgetError: The setting cannot be.
        """
        session, tokenizer = self._session, self._session.runtime.tokenizer
        hay = make_haystack(tokenizer, self._text, setting.context_tokens, setting.depth)
        samplings = [SamplingParams(), *(SamplingParams(setting.temperature or 1.0, seed=seed) for seed in self._seeds)]
        logits = self._answer_logits(hay)  # [T, V]
        said = [_samples(logits, params, len(hay.prompt)) for params in samplings]
        log_p = logits.float().log_softmax(-1).gather(1, torch.tensor(hay.answer, device=logits.device)[:, None])
        count = len(hay.answer)
        plain = session.decode([hay.prompt], Proposer(), SamplingParams(), gamma=0, count=count)
        plain_text = tokenizer.decode(list(plain.texts[0][:count]))
        policies = {}
        for policy in CHUNK_POLICIES:
            own = replace(setting, policy=policy)
            policies[policy] = self._measure_policy(hay, own, samplings, said, plain.texts)
        return {
            "prompt_tokens": len(hay.prompt), "answer_tokens": count,
            "found": NUMBER.strip() in plain_text, "plain_text": plain_text,
            "number_log_probability": float(log_p[: hay.number_tokens].sum()),
            "answer_log_probability": float(log_p.sum()), "answer_most_likely": _equal_share([said[0]], [hay.answer]),
            "policies": policies,
            "identical_to_plain": all(found["identical_to_plain"] for found in policies.values()),
        }  # fmt: skip

    def _measure_policy(
        self, hay: Haystack, setting: Setting, samplings: Sequence[SamplingParams], said: Sequence[Sequence[int]],
        plain: Sequence[Sequence[int]],
    ) -> dict[str, Any]:  # fmt: skip
        """Agreement on the right answer, whatever the target would say, and acceptance over what it does say."""
        proposer = self._rig.build(setting.options, setting.policy)
        guesses = [self._verifier_tokens(hay, proposer, params) for params in samplings]
        number = slice(hay.number_tokens)
        found = self._session.decode(
            [hay.prompt], proposer, SamplingParams(), gamma=setting.gamma, count=len(hay.answer)
        )
        return {
            "agreement": _equal_share(guesses, said),
            "agreement_number": _equal_share([row[number] for row in guesses], [row[number] for row in said]),
            "agreement_greedy": _equal_share(guesses[:1], said[:1]),
            "right_number_greedy": _equal_share([guesses[0][number]], [hay.answer[number]]),
            "acceptance_judged": found.acceptance()["acceptance_judged"],
            "tokens_per_pass": found.tokens_per_pass,
            "identical_to_plain": compare(plain, found.texts).identical,
        }

    def _answer_logits(self, hay: Haystack) -> torch.Tensor:
        """The full target's logits for every token of the answer behind those before it: [T, V] on the device."""
        self._session.go_to([hay.prompt])
        window = Window((hay.prompt[-1], *hay.answer[:-1]))
        return runner_of(self._session.runtime).verify([window], [0]).clone()

    def _verifier_tokens(self, hay: Haystack, proposer: Proposer, params: SamplingParams) -> list[int]:
        """What the retrieval verifier says at every token of the answer behind the right ones before it, chunks
        chosen anew each time. Their keys are its own, as in drafting."""
        self._session.go_to([hay.prompt])
        proposer.join(0, params)
        levels, length = levels_of(proposer), len(hay.prompt)
        verifier, window = levels.verifier, levels.window
        assert verifier is not None and window is not None, "a hierarchy"
        verifier.begin({0: length}, {0: len(hay.answer)})
        nothing = GuessTree((), window.device)
        known, tokens = [hay.prompt[-2], hay.prompt[-1], *hay.answer], []
        for number in range(len(hay.answer)):
            end = length + number
            window.upload({0: WindowInput(known[number : number + 2], end, end + 1, end + 1)})
            verifier.step(nothing, refresh=True)
            tokens += window.read()[0].between(end, end + 1)
        return tokens


def _samples(logits: torch.Tensor, params: SamplingParams, first_position: int) -> list[int]:
    """Tokens that the target chooses by logits [T, V] of successive positions."""
    positions = torch.arange(len(logits), device=logits.device) + first_position
    slots = SlotSampling.of([params], logits.device)
    tokens: list[int] = sample(logits, slots, positions, torch.zeros_like(positions)).tolist()
    return tokens


def _equal_share(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    """Share of equal tokens of rows of equal lengths."""
    pairs = [pair for one, other in zip(left, right, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
