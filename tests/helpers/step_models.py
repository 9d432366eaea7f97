"""Steps that are only arithmetic: what they cost, how often proposals are right, what a controller makes of both."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from offload_runtime.params import SamplingParams
from offload_runtime.speculation.controller import PLAIN, SIZES, Choice, Controller

Cost = Callable[[Choice], float]
WAY = SamplingParams()


class Source(Protocol):
    """How often proposals are right."""

    def accepted(self, size: int) -> float:
        """Of a window of so many, on average."""

    def draw(self, size: int, chance: random.Random) -> Sequence[int]:
        """The numbers of those that one window's target accepts."""


@dataclass(frozen=True)
class InARow:
    """Each right with the same probability while all before it are."""

    rate: float

    def accepted(self, size: int) -> float:
        return sum(self.rate**depth for depth in range(1, size + 1))

    def draw(self, size: int, chance: random.Random) -> Sequence[int]:
        count = 0
        while count < size and chance.random() < self.rate:
            count += 1
        return range(count)


@dataclass(frozen=True)
class ByProbability:
    """Number i right with a probability like 1 / i."""

    scale: float

    def _rate(self, number: int) -> float:
        return min(0.95, self.scale / (number + 1.5))

    def accepted(self, size: int) -> float:
        return sum(self._rate(number) for number in range(size))

    def draw(self, size: int, chance: random.Random) -> Sequence[int]:
        return [number for number in range(size) if chance.random() < self._rate(number)]


@dataclass(frozen=True)
class Text:
    """What is right in it, and in what share of it, which comes and goes, n-grams have an idea."""

    sources: Mapping[str, Source]
    idea_share: float = 0.0


def resident(choice: Choice) -> float:
    """Seconds of a round of a target on the device."""
    drafting_s = {"chain": 0.0007 * choice.size, "tree": 0.0007 * (2 + choice.size / 8)}
    return 0.020 + 0.00005 * choice.size + drafting_s.get(choice.mode, 0.0)


def streamed(choice: Choice) -> float:
    """The same where layers are streamed and drafting is hidden."""
    return max(0.300, 0.300 * choice.size / 512)


def dear(choice: Choice) -> float:
    """The same of a hierarchy over keys on the device, whose steps read the target's weights as passes do."""
    return 0.0228 + (0.0036 * choice.size if choice.drafts else 0.0)


@dataclass
class Played:
    """Rounds as they should have gone on average: of each its choice, seconds and tokens."""

    rounds: list[tuple[Choice, float, float]] = field(default_factory=list)
    said: list[int] = field(default_factory=list)  # tokens of each round, as luck would have it
    ideas: list[bool] = field(default_factory=list)  # of each round, whether n-grams had one

    def speed(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per second."""
        rounds = self.rounds[first:last]
        return sum(tokens for *_, tokens in rounds) / sum(seconds for _, seconds, _ in rounds)

    def share(self, name: str, first: int = 0) -> float:
        """Of rounds that this family played."""
        return sum(choice.mode == name for choice, *_ in self.rounds[first:]) / len(self.rounds[first:])


def play(
    texts: Sequence[tuple[Text, int]], cost: Cost, limits: Mapping[str, int], *, seed: int, controller: Controller,
    noise: float = 0.1, outliers: float = 0.02,
) -> Played:  # fmt: skip
    """Rounds of one text after the other, so many of each; times are told with noise, and some are far too long."""
    chance, played = random.Random(seed), Played()
    has_idea = False
    for text, count in texts:
        for _ in range(count):
            if chance.random() < 0.1:
                has_idea = chance.random() < text.idea_share
            able = {mode: largest for mode, largest in limits.items() if mode != "ngram" or has_idea}
            played.ideas.append(has_idea)
            choice = controller.choose(WAY, able)
            source = text.sources.get(choice.mode)
            path = source.draw(choice.size, chance) if source is not None else ()
            seconds = cost(choice)
            told_s = seconds * max(0.3, chance.gauss(1, noise))
            if chance.random() < outliers:
                told_s *= chance.uniform(3, 20)
            paths = [path] if choice != PLAIN else []
            controller.observe(WAY, choice, paths, tokens=1 + len(path), seconds=told_s)
            played.said.append(1 + len(path))
            played.rounds.append((choice, seconds, 1 + (source.accepted(choice.size) if source is not None else 0.0)))
    return played


def best_fixed(text: Text, cost: Cost, limits: Mapping[str, int], *, idea_share: float = 0.0) -> float:
    """Tokens per second of the best choice for all rounds, found by trying all; plain where n-grams have no idea, which
    they have in `idea_share` of the rounds."""
    speeds = [1 / cost(PLAIN)]
    for mode, largest in limits.items():
        share = idea_share if mode == "ngram" else 1.0
        for size in SIZES[1:]:
            if size <= largest:
                choice = Choice(mode, size)
                tokens = 1 + share * text.sources[mode].accepted(size)
                speeds.append(tokens / (share * cost(choice) + (1 - share) * cost(PLAIN)))
    return max(speeds)
