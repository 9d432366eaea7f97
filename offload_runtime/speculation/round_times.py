"""How long rounds take, by who proposes and how much: measured as they are played. No clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from offload_runtime.speculation.window_sizes import PLAIN, SIZES, Choice, steps_within

# Seconds of a round, or None where nothing is known of it.
Foreseen = Callable[[Choice], float | None]

# Newest times of a choice that count.
_MEMORY = 32
# A first time so much longer than expected may have captured a graph or compiled a kernel: it is measured again.
_SUSPICIOUS = 1.5

# Of a round, in whatever unit: only proportions count.
Foreseen = Callable[[Choice], float]


def guessed_cost(choice: Choice) -> float:
    """Plain rounds that a round may take where nobody knows the machine: the draft's steps cost, rows hardly do."""
    per_proposal = {"chain": 0.04, "tree": 0.01}
    return 1 + 0.002 * choice.size + per_proposal.get(choice.family, 0.0) * choice.size


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
        self._means: dict[Choice, float] = {}
        self._suspected: set[Choice] = set()
        self._curves: dict[tuple[str, int], list[float]] = {}

    def observe(self, choice: Choice, seconds: float) -> None:
        """A round was played."""
        samples = self._samples.get(choice)
        if samples is None:
            if self._means and choice not in self._suspected and seconds > _SUSPICIOUS * self.seconds(choice):
                self._suspected.add(choice)
                return
            samples = self._samples[choice] = deque(maxlen=_MEMORY)
        samples.append(seconds)
        self._means[choice] = _mean_of_most(samples)
        self._curves = {key: curve for key, curve in self._curves.items() if choice != PLAIN and key[0] != choice.family}

    def seconds(self, choice: Choice) -> float:
        """To be expected of a choice of `SIZES`."""
        return self.curve(choice.family, choice.size)[-1]

    def cost(self, choice: Choice, seconds: float | None) -> float:
        """Plain rounds that a round took; what was exceptionally long counts as what is usual.

        Args:
            choice: Of the round, which was observed.
            seconds: Of the round; None where it was none of the usual ones.
        """
        curve = self.curve(choice.family, choice.size)
        plain_s, usual_s = self._means.get(PLAIN, curve[0]), curve[-1]
        return (usual_s if seconds is None or seconds > _SUSPICIOUS * usual_s else seconds) / plain_s

    @property
    def knows_plain(self) -> bool:
        """Whether others can be held against plain decoding: what was foreseen is sure, or it was played twice, as a
        single time may be an exception."""
        return self._sure or len(self._samples.get(PLAIN, ())) > 1

    def curve(self, family: str, largest: int) -> list[float]:
        """Seconds of windows of each size of a family, beginning with plain decoding, never falling.

        Times of sizes between those played are in proportion to what was foreseen.
        """
        steps = steps_within(largest)
        known = self._curves.get((family, steps))
        if known is None:
            known = self._curves[family, steps] = self._drawn(family, steps)
        return known

    def _drawn(self, family: str, steps: int) -> list[float]:
        choices = [PLAIN, *(Choice(family, size) for size in SIZES[1 : steps + 1])]
        foreseen = [self._foresee(choice) for choice in choices]
        played = [step for step, choice in enumerate(choices) if choice in self._means]
        if not played:
            return foreseen
        rising = _never_falling(
            [self._means[choices[step]] for step in played], [len(self._samples[choices[step]]) for step in played]
        )
        return _in_proportion(dict(zip(played, rising, strict=True)), foreseen)

    def _foresee(self, choice: Choice) -> float:
        if choice not in self._foreseen:
            self._foreseen[choice] = self._foreseen_of(choice)
        return self._foreseen[choice]


def _mean_of_most(samples: Sequence[float]) -> float:
    """Mean without the longest and the shortest quarter; of few, without the longest."""
    quarter = len(samples) // 4
    ordered = sorted(samples)
    kept = ordered[quarter : max(1, len(ordered) - max(1, quarter))]
    return sum(kept) / len(kept)


def _never_falling(means: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The closest that never falls: larger windows take no less time, so what says otherwise is noise."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, members
    for mean, weight in zip(means, weights, strict=True):
        pools.append((mean, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, left, before), (low, right, after) = pools.pop(-2), pools.pop()
            pools.append(((high * left + low * right) / (left + right), left + right, before + after))
    return [mean for mean, _, members in pools for _ in range(members)]


def _in_proportion(times: Mapping[int, float], foreseen: Sequence[float]) -> list[float]:
    """Foreseen times, by the proportion that the played ones next to them have to what was foreseen of these."""
    played = sorted(times)
    ratios = {step: times[step] / foreseen[step] for step in played}
    drawn: list[float] = []
    for step, seconds in enumerate(foreseen):
        before = max((at for at in played if at <= step), default=played[0])
        after = min((at for at in played if at >= step), default=played[-1])
        drawn.append(seconds * _between(before, after, step, ratios))
    return drawn


def _between(before: int, after: int, step: int, values: Mapping[int, float]) -> float:
    """On the line between two steps."""
    if before >= after:
        return values[before]
    share = (SIZES[step] - SIZES[before]) / (SIZES[after] - SIZES[before])
    return values[before] + share * (values[after] - values[before])
