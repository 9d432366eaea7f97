"""How long rounds take, by who proposes and how much: measured as they are played. No clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from offload_runtime.speculation.window_sizes import PLAIN, SIZES, Choice, steps_within

# Newest times of a choice that count.
_MEMORY = 32
# A first time so much longer than expected may have captured a graph or compiled a kernel: it is believed when the next
# one is as long. Fewer times than enough do not count where others say otherwise; of many the mean counts.
_SUSPICIOUS, _ENOUGH, _MANY = 1.5, 3, 10
# Times that are so much longer than the middle one are exceptions, as long as they are at most one of so many.
_EXCEPTIONAL, _EXCEPTIONS = 2.5, 5
# Where larger windows take so much more time than was foreseen, each proposal does.
_STEEPER = 1.25

# Of a round, in whatever unit: only proportions count.
Foreseen = Callable[[Choice], float]


def guessed_cost(choice: Choice, *, streamed: bool = False) -> float:
    """Plain rounds that a round may take where nobody knows the machine.

    The steps of a draft cost, rows hardly do; beside what is streamed neither costs much.
    """
    per_proposal = {"chain": 0.042, "tree": 0.012}.get(choice.family, 0.002)
    return 1 + (per_proposal / 10 if streamed else per_proposal) * choice.size


class RoundTimes:
    """Seconds of rounds, from before anything is proposed until the target's tokens are on the host.

    Args:
        foreseen: Times to expect of what was not played yet.
        sure: Whether they come from figures of the machine, so that plain decoding need not be played to hold others
            against it.
    """

    def __init__(self, foreseen: Foreseen = guessed_cost, *, sure: bool = False) -> None:
        self._foreseen_of, self._sure = foreseen, sure
        self._foreseen: dict[Choice, float] = {}
        self._samples: dict[Choice, deque[float]] = {}
        self._usual: dict[Choice, float] = {}
        self._suspected: dict[Choice, float] = {}
        self._confirmed: set[Choice] = set()
        self._steps: dict[str, int] = {}
        self._curves: dict[str, list[float]] = {}

    def observe(self, choice: Choice, seconds: float) -> None:
        """A round was played."""
        samples = self._samples.get(choice)
        if samples is None:
            if self._usual and choice not in self._suspected and seconds > _SUSPICIOUS * self.seconds(choice):
                self._suspected[choice] = seconds
                return
            samples = self._samples[choice] = deque(maxlen=_MEMORY)
            if choice in self._suspected:
                samples.append(self._suspected.pop(choice))
                self._confirmed.add(choice)
        samples.append(seconds)
        self._usual[choice] = _mean_but_exceptions(samples)
        if choice != PLAIN and PLAIN in self._usual:
            self._curves.pop(choice.family, None)
        else:  # all are held against plain decoding
            self._curves.clear()

    def seconds(self, choice: Choice) -> float:
        """To be expected of a choice of `SIZES`."""
        return self.curve(choice.family, choice.size)[steps_within(choice.size)]

    def cost(self, choice: Choice, seconds: float | None) -> float:
        """Plain rounds that a round took, at least one, exceptions not counted as such.

        Args:
            choice: Of the round, which was observed.
            seconds: Of the round; None where it was none of the usual ones.
        """
        usual_s = self.seconds(choice)
        plain_s = self._usual.get(PLAIN, self._curves[choice.family][0])
        if seconds is None or seconds > (_EXCEPTIONAL if choice in self._samples else _SUSPICIOUS) * usual_s:
            seconds = usual_s
        return max(1.0, seconds / plain_s)

    def doubts(self, choice: Choice) -> bool:
        """Whether its only time is one that may be an exception."""
        return choice in self._suspected

    def has_played(self, choice: Choice) -> bool:
        """Whether its time is measured."""
        return choice in self._samples

    @property
    def is_timed(self) -> bool:
        """Whether any round was played."""
        return bool(self._usual)

    @property
    def is_sure(self) -> bool:
        """Whether times were foreseen from figures of the machine, or from times of other rounds."""
        return self._sure

    @property
    def knows_plain(self) -> bool:
        """Whether others can be held against plain decoding: what was foreseen is sure, or it was played twice, as a
        single time may be an exception."""
        return self._sure or len(self._samples.get(PLAIN, ())) > 1

    def curve(self, family: str, largest: int) -> list[float]:
        """Seconds of windows of each size of a family up to `largest` or beyond, beginning with plain decoding, never
        falling.

        Times of sizes between those played are in proportion to what was foreseen.
        """
        steps = steps_within(largest)
        if steps > self._steps.get(family, -1):
            self._steps[family] = steps
            self._curves.pop(family, None)
        known = self._curves.get(family)
        if known is None:
            known = self._curves[family] = self._drawn(family, self._steps[family])
        return known

    def _drawn(self, family: str, steps: int) -> list[float]:
        choices = [PLAIN, *(Choice(family, size) for size in SIZES[1 : steps + 1])]
        foreseen = [self._foresee(choice) for choice in choices]
        played = [step for step, choice in enumerate(choices) if choice in self._usual]
        if not played:
            ratio = self._plain_s() / foreseen[0]
            return [ratio * seconds for seconds in foreseen]
        times = {step: self._usual[choices[step]] for step in played}
        counts = {step: len(self._samples[choices[step]]) for step in played}
        dear = family == "tree"
        weak = [step for step in played if counts[step] < _ENOUGH and choices[step] not in self._confirmed]
        for step in weak:
            others = {other: seconds for other, seconds in times.items() if other != step}
            if others and times[step] > _SUSPICIOUS * _in_proportion(others, foreseen, dear=dear)[step]:
                times = others
        rising = _never_falling(list(times.values()), [counts[step] for step in times])
        return _in_proportion(dict(zip(times, rising, strict=True)), foreseen, dear=dear)

    def _plain_s(self) -> float:
        """Of plain decoding, which was not played: by what has been played of others, the fastest in proportion."""
        return min((self.curve(choice.family, choice.size)[0] for choice in self._usual), default=self._foresee(PLAIN))

    def _foresee(self, choice: Choice) -> float:
        if choice not in self._foreseen:
            self._foreseen[choice] = self._foreseen_of(choice)
        return self._foreseen[choice]


def _mean_but_exceptions(samples: Sequence[float]) -> float:
    """The mean without a few that are far too long; of hardly any samples the shorter of the middle ones.

    Not the median of all: how long it takes to grow a tree depends on what is left of the one before.
    """
    ordered = sorted(samples)
    middle = ordered[(len(samples) - 1) // 2]
    if len(samples) < _MANY:
        return middle
    for _ in range(max(1, len(samples) // _EXCEPTIONS)):
        if ordered[-1] > _EXCEPTIONAL * middle:
            ordered.pop()
    return sum(ordered) / len(ordered)


def _never_falling(means: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The closest that never falls: larger windows take no less time, so what says otherwise is noise."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, members
    for mean, weight in zip(means, weights, strict=True):
        pools.append((mean, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, left, before), (low, right, after) = pools.pop(-2), pools.pop()
            pools.append(((high * left + low * right) / (left + right), left + right, before + after))
    return [mean for mean, _, members in pools for _ in range(members)]


def _in_proportion(times: Mapping[int, float], foreseen: Sequence[float], *, dear: bool) -> list[float]:
    """Foreseen times, by the proportion that the played ones next to them have to what was foreseen of these. Beyond
    the largest it is the proportion of what proposals take, where that is clearly more.

    Args:
        times: Of what was played, by step of `SIZES`.
        foreseen: Of every step.
        dear: The first proposal takes longer than further ones do.
    """
    played = sorted(times)
    ratios = [times[step] / foreseen[step] for step in played]
    proposing = [step for step in played if step > 0]
    is_known = len(proposing) > 1 or (dear and bool(proposing))
    first, last = (proposing if is_known else played)[0], played[-1]
    steepness, more = ratios[-1], foreseen[last] - foreseen[first]
    if more > 0 and times[last] / foreseen[last] > _STEEPER * times[first] / foreseen[first]:
        steepness = (times[last] - times[first]) / more
    drawn: list[float] = []
    after = 0  # of the played ones, the first that is no smaller
    for step, seconds in enumerate(foreseen):
        while after < len(played) and played[after] < step:
            after += 1
        if after == len(played):
            drawn.append(times[last] + steepness * (seconds - foreseen[last]))
            continue
        if after == 0:
            ratio = ratios[0]
        else:
            low, high = SIZES[played[after - 1]], SIZES[played[after]]
            share = (SIZES[step] - low) / (high - low)
            ratio = ratios[after - 1] + share * (ratios[after] - ratios[after - 1])
        drawn.append(seconds * ratio)
    return drawn
