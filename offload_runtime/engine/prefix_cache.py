"""The prefix cache: slots keep the keys and values of requests that have ended, and the longest beginning of a prompt
that one of them still holds is not read again.

By one arithmetic what is kept has the bits of what would be computed anew. A slot without a running request costs no
pass anything: passes attend to, and stream, the keys and values of the requests that they are about.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from offload_runtime.engine.load_model import LoadedModel


class _Held(NamedTuple):
    """The tokens of a slot's newest request, which grow while it runs, and of these the prompt's. The target's cache
    holds as many of them as its length says."""

    tokens: Sequence[int] = ()
    prompt_tokens: int = 0


class PrefixCache:
    """Which tokens' keys and values the slots of the target's cache hold.

    Args:
        target: Whose cache it is.
        num_slots: Of the cache. They are taken for empty, whatever they hold.
    """

    def __init__(self, target: LoadedModel, num_slots: int) -> None:
        self._target = target
        self._slots = dict.fromkeys(range(num_slots), _Held())  # the least recently used one comes first

    def join(self, sequence: Sequence[int], free: Collection[int]) -> tuple[int, int]:
        """A request of this prompt begins, whose tokens `sequence` will have.

        Args:
            sequence: The prompt.
            free: Slots without a running request.

        Returns:
            The slot that holds the longest beginning of the prompt, of equals the one that was used least recently, and
            how many tokens it keeps: the last one of a prompt is always read, for its logits.
        """
        kept = {slot: self._num_shared(slot, sequence) for slot in self._slots if slot in free}
        slot = max(kept, key=lambda one: kept[one])
        self.forget(slot)  # until the cache has no more than what is shared
        self._target.runner.cache.truncate(slot, kept[slot])
        self._hold(slot, _Held(sequence, len(sequence)))
        return slot, kept[slot]

    def leave(self, slot: int) -> None:
        """The slot's request has ended."""
        self._hold(slot, self._slots[slot])

    def forget(self, slot: int) -> None:
        """What the slot holds is of no use."""
        self._slots[slot] = _Held()

    def _hold(self, slot: int, held: _Held) -> None:
        del self._slots[slot]
        self._slots[slot] = held

    def _num_shared(self, slot: int, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt, but for its last, that a slot holds rotated as this prompt wants them."""
        (tokens, prompt_tokens), rope = self._slots[slot], self._target.rope
        if rope.frequency_set(prompt_tokens) != rope.frequency_set(len(prompt)):
            return 0
        most = min(self._target.runner.cache.length(slot), len(tokens), len(prompt) - 1)
        return next((place for place in range(most) if tokens[place] != prompt[place]), most)
