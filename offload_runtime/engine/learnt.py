"""What a runtime has learnt about proposing, kept from one generation to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from offload_runtime.config import SamplingParams
from offload_runtime.speculation import Choice, Chooser, RoundTimes, guessed_cost

# Contexts shorter than this take a pass equally long; beyond, every doubling is timed anew.
_SHORT_TOKENS = 1024

# Seconds of a round of so many sequences of so many tokens each.
Foreseen = Callable[[Choice, int, int], float]


class Learnt:
    """How often proposals are accepted, by the way tokens are sampled, and how long rounds take, by their texts.

    Args:
        limits: By family its largest window.
        foreseen: Times to begin with; None where the machine is not known.
        streamed: Whether a pass brings anything over the link.
    """

    def __init__(self, limits: Mapping[str, int], foreseen: Foreseen | None = None, *, streamed: bool = False) -> None:
        self._limits, self._foreseen, self._streamed = dict(limits), foreseen, streamed
        self._choosers: dict[SamplingParams, Chooser] = {}
        self._times: dict[tuple[int, int], RoundTimes] = {}

    def chooser(self, sampling: SamplingParams) -> Chooser:
        """Of texts that are sampled in this way, whatever the seed."""
        key = replace(sampling, seed=0)
        if key not in self._choosers:
            self._choosers[key] = Chooser(self._limits)
        return self._choosers[key]

    def times(self, num_sequences: int, length_tokens: int) -> RoundTimes:
        """Of rounds about so many sequences, the longest of which has so many tokens."""
        octave = (length_tokens // _SHORT_TOKENS).bit_length()
        found = self._times.get((num_sequences, octave))
        if found is None:
            found = self._times[num_sequences, octave] = self._begun(num_sequences, octave)
        return found

    def _begun(self, num_sequences: int, octave: int) -> RoundTimes:
        """From those of the nearest length that was timed, or as foreseen."""
        timed = [length for number, length in self._times if number == num_sequences]
        timed = [length for length in timed if self._times[num_sequences, length].is_timed]
        nearest = min(timed, key=lambda length: abs(length - octave), default=octave)
        known, foreseen = self._times.get((num_sequences, nearest)), self._foreseen
        if foreseen is None:
            if known is None:
                return RoundTimes(partial(guessed_cost, streamed=self._streamed))
            return RoundTimes(known.seconds, sure=known.knows_plain)

        def expected_s(choice: Choice) -> float:
            """Longer texts take passes longer and leave drafting as it is; shorter ones may leave a small part of what
            was measured, so that there its proportion to what was foreseen is kept."""
            seconds = foreseen(choice, num_sequences, _typical_tokens(octave))
            if known is None:
                return seconds
            before_s = foreseen(choice, num_sequences, _typical_tokens(nearest))
            known_s = known.seconds(choice)
            return known_s + (seconds - before_s) if seconds > before_s else known_s * seconds / before_s

        return RoundTimes(expected_s, sure=True)


def _typical_tokens(octave: int) -> int:
    """A length in the middle of an octave."""
    return _SHORT_TOKENS * 3 << octave >> 2
