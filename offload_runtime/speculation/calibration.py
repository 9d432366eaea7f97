"""How much a guess is worth, learnt as it runs: probabilities from a draft's scores, how often n-grams come true."""

from __future__ import annotations

import math
from collections.abc import Sequence

# A draft may be anything from useless to certain, and one window of surprises must not settle it.
_LEAST_SHARPNESS, _MOST_SHARPNESS = 0.02, 50.0
_MOST_STEP = 0.5  # of the sharpness' logarithm, by one observation
_LEAST_MISSED, _MOST_MISSED = 0.005, 0.95
_LEAST_RATE, _MOST_RATE = 0.01, 0.95
# Observations that a running mean looks back on; a window brings about ten, and texts change their nature.
_MEMORY = 200


class ChildProbabilities:
    """Probabilities of a node's children from the draft's scores for them.

        p[i] = (1 - missed) * softmax(sharpness * scores)[i]

    `missed` is the probability that the target says something else than any of them. Both follow what the target says:
    `missed` as a running mean, `sharpness` by steps along the gradient of the log-likelihood,
    d/ds log p[i] = scores[i] - E[scores], in units of its own variance, so that neither the scale of the scores nor
    their number matters.

    Args:
        sharpness: To begin with.
        missed: To begin with.
    """

    def __init__(self, sharpness: float = 1.0, missed: float = 0.15) -> None:
        self.sharpness = sharpness
        self.missed = missed
        self._curvature = 0.0  # running mean of the variance of sharpness * scores
        self._told = 0  # observations of a child
        self._asked = 0  # observations

    def log_probabilities(self, scores: Sequence[float]) -> list[float]:
        """Of children with these finite scores, given their parent."""
        if not scores:
            return []
        best = max(scores)
        weights = [math.exp(self.sharpness * (score - best)) for score in scores]
        rest = math.log1p(-self.missed) - math.log(sum(weights))
        return [self.sharpness * (score - best) + rest for score in scores]

    def observe(self, scores: Sequence[float], said: int | None) -> None:
        """The target has said the child with this index, or none of them (None)."""
        if not scores:
            return
        self._asked += 1
        self.missed += ((said is None) - self.missed) / min(self._asked + 10, _MEMORY)
        self.missed = min(max(self.missed, _LEAST_MISSED), _MOST_MISSED)
        if said is None or len(scores) == 1:
            return
        best = max(scores)
        weights = [math.exp(self.sharpness * (score - best)) for score in scores]
        total = sum(weights)
        # Relative to the best score, in units of the sharpness: of the order of one whatever the scale.
        scaled = [self.sharpness * (score - best) for score in scores]
        mean = sum(weight * value for weight, value in zip(weights, scaled, strict=True)) / total
        variance = sum(weight * (value - mean) ** 2 for weight, value in zip(weights, scaled, strict=True)) / total
        self._told += 1
        memory = min(self._told, _MEMORY)
        self._curvature += (variance - self._curvature) / memory
        step = (scaled[said] - mean) / (max(self._curvature, 1e-2) * (memory + 10))
        logarithm = math.log(self.sharpness) + min(max(step, -_MOST_STEP), _MOST_STEP)
        self.sharpness = min(max(math.exp(logarithm), _LEAST_SHARPNESS), _MOST_SHARPNESS)


class HitRate:
    """How often guesses of a kind have come true lately."""

    def __init__(self, rate: float = 0.3) -> None:
        self.rate = rate
        self._told = 0

    def observe(self, hit: bool) -> None:
        """One more guess has been decided."""
        self._told += 1
        self.rate += (hit - self.rate) / min(self._told + 5, _MEMORY)
        self.rate = min(max(self.rate, _LEAST_RATE), _MOST_RATE)

    def log_probability(self, before: int) -> float:
        """Of a guess, if `before` others about the same place are right more often."""
        return math.log(self.rate) + before * math.log1p(-self.rate)
