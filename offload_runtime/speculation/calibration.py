"""How much a guess is worth, learnt as it runs: probabilities from a draft's scores, how often n-grams come true."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Sequence

# A draft may be anything from useless to certain, and one window of surprises must not settle it.
_LEAST_SHARPNESS, _MOST_SHARPNESS = 0.02, 50.0
_MOST_STEP = 0.5  # of the sharpness' logarithm, by one observation
_LEAST_MISSED, _MOST_MISSED = 0.005, 0.95
_LEAST_RATE, _MOST_RATE = 0.01, 0.995
# Matches of so many tokens, and up to as many as the next, come true alike; as in source code, to begin with, which is
# believed like so many observations.
_MATCHED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_RATES_AT_FIRST = (0.2, 0.42, 0.5, 0.6, 0.7, 0.77, 0.84, 0.88, 0.92, 0.96, 0.98, 0.99)
_TRUST = 20
LONGEST_MATCH = _MATCHED[-1]  # longer ones are worth no more
# Observations that a running mean looks back on; a window brings about ten, and texts change their nature.
_MEMORY = 200
# Share of what was measured before that counts on with every round, or step.
_KEPT = 0.8
# A step this much slower than another has compiled or captured something, and is no measure of the next one; a round so
# much longer than those before has waited for whoever reads the text.
_OUTLIER = 4.0
# Measurements of a step until its time is known.
_ENOUGH = 3


class ChildProbabilities:
    """Probabilities of a node's children from the draft's scores for them.

        p[i] = (1 - missed) * softmax(sharpness * scores)[i]

    `missed` is the probability that the target says something else than any of them. Both follow what the target says:
    `missed` as a running mean, `sharpness` by steps along the gradient of the log-likelihood,
    d/ds log p[i] = scores[i] - E[scores], in units of its own variance, so that neither the scale of the scores nor
    their number matters.
    """

    def __init__(self) -> None:
        self.sharpness, self.missed = 1.0, 0.15
        self._curvature = 0.0  # running mean of the variance of sharpness * scores
        self._observed = 0  # observations of a child
        self._asked = 0  # observations

    def log_probabilities(self, scores: Sequence[float]) -> list[float]:
        """Of children with these finite scores, given their parent."""
        if not scores:
            return []
        best = max(scores)
        weights = [math.exp(self.sharpness * (score - best)) for score in scores]
        rest = math.log1p(-self.missed) - math.log(sum(weights))
        return [self.sharpness * (score - best) + rest for score in scores]

    def observe(self, scores: Sequence[float], child: int | None) -> None:
        """The target has said the child with this index, or none of them (None)."""
        if not scores:
            return
        self._asked += 1
        self.missed += ((child is None) - self.missed) / min(self._asked + 10, _MEMORY)
        self.missed = min(max(self.missed, _LEAST_MISSED), _MOST_MISSED)
        if child is None or len(scores) == 1:
            return
        best = max(scores)
        weights = [math.exp(self.sharpness * (score - best)) for score in scores]
        total = sum(weights)
        # Relative to the best score, in units of the sharpness: of the order of one whatever the scale.
        scaled = [self.sharpness * (score - best) for score in scores]
        mean = sum(weight * value for weight, value in zip(weights, scaled, strict=True)) / total
        variance = sum(weight * (value - mean) ** 2 for weight, value in zip(weights, scaled, strict=True)) / total
        self._observed += 1
        memory = min(self._observed, _MEMORY)
        self._curvature += (variance - self._curvature) / memory
        step = (scaled[child] - mean) / (max(self._curvature, 1e-2) * (memory + 10))
        logarithm = math.log(self.sharpness) + min(max(step, -_MOST_STEP), _MOST_STEP)
        self.sharpness = min(max(math.exp(logarithm), _LEAST_SHARPNESS), _MOST_SHARPNESS)


class MatchRates:
    """How often what followed an earlier occurrence of a text's ending follows again, by the tokens that match.

    Of one token it is one time in five, of a hundred nearly always. Kept by classes of lengths, each a running mean.
    """

    def __init__(self) -> None:
        self._rates = list(_RATES_AT_FIRST)
        self._observed = [_TRUST] * len(self._rates)
        self._logs = [(math.log(rate), math.log1p(-rate)) for rate in self._rates]

    def observe(self, matched: int, hit: bool) -> None:
        """What followed a match of so many tokens, at least one, has come true or not."""
        at = bisect_right(_MATCHED, matched) - 1
        self._observed[at] = min(self._observed[at] + 1, _MEMORY)
        rate = self._rates[at] + (hit - self._rates[at]) / self._observed[at]
        rate = self._rates[at] = min(max(rate, _LEAST_RATE), _MOST_RATE)
        self._logs[at] = math.log(rate), math.log1p(-rate)

    def rate(self, matched: int) -> float:
        """That what followed so many tokens follows again."""
        return self._rates[bisect_right(_MATCHED, matched) - 1]

    def logs(self, matched: int) -> tuple[float, float]:
        """Log-probabilities that it does and that it does not."""
        return self._logs[bisect_right(_MATCHED, matched) - 1]


class StepWorth:
    """Whether another step of drafting pays while no pass runs: the tokens that it adds to a window against those that
    the time it takes is worth, at the rate at which tokens have come lately.

    Args:
        free_s: Seconds behind a pass in which drafting delays nothing: the link brings what the next one begins with.
    """

    def __init__(self, free_s: float = 0.0) -> None:
        self._free_s = free_s
        # Of a step, and of each of several that follow each other without the host, and how often it was measured.
        self._level_s: dict[bool, tuple[float, int]] = {}
        self._began_s: float | None = None
        self.forget()

    @property
    def tok_per_s(self) -> float | None:
        """Of all sequences together, lately; None as long as nothing is known."""
        return self._new_tokens / self._round_s if self._round_s > 0 else None

    def forget(self) -> None:
        """What comes next is nothing like what was before."""
        self.pause()
        self._new_tokens, self._round_s, self._rounds = 0.0, 0.0, 0.0  # all decayed

    def pause(self) -> None:
        """The next round to begin is not behind the last one."""
        self._began_s = None

    def begin(self, new_tokens: int) -> None:
        """Proposals for another round begin; the round before gave so many tokens."""
        now_s = time.perf_counter()
        if self._began_s is not None:
            round_s, weight = now_s - self._began_s, 1.0
            if self._rounds and round_s * self._rounds > _OUTLIER * self._round_s:
                weight = _OUTLIER * self._round_s / (self._rounds * round_s)
            self._new_tokens = _KEPT * self._new_tokens + weight * new_tokens
            self._round_s = _KEPT * self._round_s + weight * round_s
            self._rounds = _KEPT * self._rounds + 1
        self._began_s = now_s

    def seconds(self, levels: int) -> float | None:
        """How long so many steps that follow each other without the host take; None as long as nobody knows."""
        level_s, count = self._level_s.get(levels > 1, (0.0, 0))
        return levels * level_s if count >= _ENOUGH else None

    def stepped(self, seconds: float, levels: int = 1, *, hidden: bool = False) -> None:
        """So many steps of drafting took so long; `hidden` behind a pass, beside which they take no less than alone."""
        known_s, count = self._level_s.get(levels > 1, (math.inf, 0))
        level_s = seconds / levels
        if count < _ENOUGH or _OUTLIER * level_s < known_s:
            known_s = min(known_s, level_s)  # the first ones load what they need
        elif not hidden:
            known_s += (1 - _KEPT) * (min(level_s, _OUTLIER * known_s) - known_s)
        self._level_s[levels > 1] = known_s, count + 1

    def pays(self, gain: float, levels: int = 1) -> bool:
        """Whether so many steps should be made that are expected to add `gain` tokens to what the next pass gives.

        As long as no rate is known only those that delay nothing are: first windows that were drafted to their end
        took 0.30 and 0.13 s, where 17 tokens came every 0.2 s (135M draft of a 13B target, H200).
        """
        step_s, rate = self.seconds(levels), self.tok_per_s
        if self._began_s is None or step_s is None:
            return True
        late_s = time.perf_counter() + step_s - self._began_s - self._free_s
        return late_s <= 0 if rate is None else gain >= rate * min(step_s, late_s)
