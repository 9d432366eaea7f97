"""What windows bring, by their size: learnt from every window that is verified. Pure data, no clock."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from offload_runtime.speculation.window_sizes import SIZES, steps_within

# Rounds that a mean looks back on; as it forgets by degrees, it holds about twice as many. Texts change their nature.
_MEMORY = 32
# What is expected before anything is seen counts as much of a round: three rounds without a hit settle it.
_FIRST_WEIGHT = 0.25
# A family that sits out is forgotten faster, so that a few rounds tell when it has become good.
_IDLE_MEMORY = 24
_LEAST_WEIGHT = 5.0
# Over so many rounds accepted proposals are compared with those that were expected; that they are so much fewer, or as
# much more, is no chance.
_WATCHED, _DOUBTFUL, _LEAST_EXPECTED = 8, 0.4, 0.3
# What the smaller sizes let expect of a larger one counts as so many rounds of it.
_FORESEEN_WEIGHT = 4.0
_MOST_RATIO = 0.98


class Gains:
    """How many proposals of a family the target accepts.

    The first proposals of a window are those of a smaller one, so a window tells about all sizes up to its own. Kept is
    for each step from one of `SIZES` to the next how many of the proposals between them are accepted, on average.

    Args:
        largest: Most proposals of a window.
        first: How often the first proposal is expected to be accepted before any was seen.
        in_depth: Whether proposals stand behind each other, so that they are accepted geometrically less often;
            otherwise they are ordered by probability, which falls like 1 / number.
    """

    def __init__(self, largest: int, *, first: float, in_depth: bool) -> None:
        self.steps = steps_within(largest)
        self._in_depth = in_depth
        self._means = [first] + [0.0] * (self.steps - 1)
        self._weights = [_FIRST_WEIGHT] + [0.0] * (self.steps - 1)
        self._last_round = 0
        self._curve: list[float] | None = None
        self._kept = 1.0  # of what was expected of the newest windows
        self.num_rounds = 0  # observed

    def observe(self, size: int, windows: Sequence[Sequence[int]], *, number: int) -> None:
        """Windows of up to `size` proposals were verified.

        Args:
            size: Proposals asked for, on the grid; what was not proposed counts as rejected.
            windows: Of each sequence the numbers of those accepted, in the order in which they were proposed.
            number: Of the round, counted over all families.
        """
        idle = number - self._last_round - 1
        if idle > 0 and self.num_rounds:
            kept = (1 - 1 / _IDLE_MEMORY) ** idle
            self._weights = [max(weight * kept, min(weight, _LEAST_WEIGHT)) for weight in self._weights]
        self._watch(size, sum(len(path) for path in windows) / len(windows))
        self._last_round, self._curve = number, None
        self.num_rounds += 1
        hits = [0] * (self.steps + 1)
        for path in windows:
            for node in path:
                hits[min(bisect_right(SIZES, node) - 1, self.steps)] += 1
        seen = min(steps_within(size), self.steps)
        for step in range(seen):
            weight = self._weights[step] = min(self._weights[step] + 1, _MEMORY)
            self._means[step] += (hits[step] / len(windows) - self._means[step]) / weight
        for step in range(seen, self.steps):
            self._weights[step] *= 1 - 1 / _MEMORY

    def _watch(self, size: int, accepted: float) -> None:
        """Where windows bring much less or more than expected, what comes next counts for more than what was."""
        expected = self.curve()[min(steps_within(size), self.steps)]
        self._kept += (accepted / max(expected, _LEAST_EXPECTED) - self._kept) / _WATCHED
        if not _DOUBTFUL < self._kept < 1 / _DOUBTFUL:
            self._weights = [min(weight, _LEAST_WEIGHT) for weight in self._weights]
            self._kept = 1.0

    @property
    def first_rate(self) -> float:
        """How often the first proposal is accepted."""
        return self._means[0]

    def curve(self) -> list[float]:
        """Accepted proposals to be expected of a window of each size, beginning with none of size 0."""
        if self._curve is None:
            steps = list(self._means[:1])
            for step in range(1, self.steps):
                weight = self._weights[step]
                foreseen = (_geometrically if self._in_depth else _harmonically)(steps)
                steps.append((weight * self._means[step] + _FORESEEN_WEIGHT * foreseen) / (weight + _FORESEEN_WEIGHT))
            self._curve = [0.0, *accumulate(steps)]
        return self._curve


def _geometrically(steps: Sequence[float]) -> float:
    """Accepted proposals of the next step, where each proposal stands behind the one before."""
    count = len(steps)
    # What stands later is never accepted more often.
    last = min(mean / (SIZES[step + 1] - SIZES[step]) for step, mean in enumerate(steps))
    at = _middle(count - 1)
    ratio = (last / steps[0]) ** (1 / (at - _middle(0))) if count > 1 and last > 0 else last
    ratio = min(ratio, _MOST_RATIO)
    return last * sum(ratio ** (node - at) for node in range(SIZES[count], SIZES[count + 1]))


def _harmonically(steps: Sequence[float]) -> float:
    """The same where proposals are ordered by how probable they are."""
    count = len(steps)
    begin = max(0, count - 2)
    per_ratio = sum(steps[begin:]) / math.log((1 + SIZES[count]) / (1 + SIZES[begin]))
    return per_ratio * math.log((1 + SIZES[count + 1]) / (1 + SIZES[count]))


def _middle(step: int) -> float:
    """Number of the proposal in the middle of a step."""
    return (SIZES[step] + SIZES[step + 1] - 1) / 2
