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
        """In proportion to those of the nearest length that was timed, or to what is foreseen."""
        others = [length for number, length in self._times if number == num_sequences]
        if others:
            known = self._times[num_sequences, min(others, key=lambda length: abs(length - octave))]
            return RoundTimes(known.seconds, sure=known.knows_plain)
        if self._foreseen is None:
            return RoundTimes(partial(guessed_cost, streamed=self._streamed))
        foreseen, length_tokens = self._foreseen, _SHORT_TOKENS * 3 << octave >> 2
        return RoundTimes(lambda choice: foreseen(choice, num_sequences, length_tokens), sure=True)
