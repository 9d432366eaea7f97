"""The prefix cache: slots keep the keys and values of requests that have ended, and the longest beginning of a prompt
that one of them still holds is not read again. A store in host memory, if there is one, holds blocks that slots have
lost, and gives them back to a prompt of which it knows more than any slot; so does a directory, which outlives the
process.

By one arithmetic what is kept has the bits of what would be computed anew. A slot without a running request costs no
pass anything: passes attend to, and stream, the keys and values of the requests that they are about.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.cache import BlockLayout, BlockStore
from offload_runtime.cache.saved_blocks import SavedBlock
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.engine.sessions import SavedPrefixes
from offload_runtime.errors import BudgetError
from offload_runtime.stream import check_host_memory


class _Held(NamedTuple):
    """The tokens of a slot's newest request, which grow while it runs, and of these the prompt's. The target's cache
    holds as many of them as its length says."""

    tokens: Sequence[int] = ()
    prompt_tokens: int = 0


class PrefixCache:
    """Which tokens' keys and values the slots of the target's cache and a store hold.

    Args:
        target: Whose cache it is.
        num_slots: Of the cache. They are taken for empty, whatever they hold.
        store: Of blocks that they have lost, where the cache is on the device; None for none.
        prefixes: The same on disk.
    """

    def __init__(
        self, target: LoadedModel, num_slots: int, store: BlockStore | None = None,
        prefixes: SavedPrefixes | None = None,
    ) -> None:  # fmt: skip
        self._target, self._store, self._prefixes = target, store, prefixes
        self._slots = dict.fromkeys(range(num_slots), _Held())  # the least recently used one comes first

    def join(self, sequence: Sequence[int], free: Collection[int]) -> tuple[int, int]:
        """A request of this prompt begins, whose tokens `sequence` will have.

        Args:
            sequence: The prompt.
            free: Slots without a running request.

        Returns:
            The slot that holds the longest beginning of the prompt, of equals the one that was used least recently, and
            how many tokens it has of it now: the last one of a prompt is always read, for its logits.
        """
        kept = {slot: self._num_shared(slot, sequence) for slot in self._slots if slot in free}
        slot, cache = max(kept, key=lambda one: kept[one]), self._target.runner.cache
        stored: Sequence[SavedBlock] = ()
        if self._store is not None:
            stored = self._store.find(self._target.rope.frequency_set(len(sequence)), sequence[:-1])
        self._save(slot, kept[slot])  # which may drive out what was found
        self.forget(slot)  # until the cache has no more than what is shared
        cache.truncate(slot, kept[slot])
        if len(stored) * BLOCK_TOKENS > kept[slot]:
            whole = cache.truncate(slot, kept[slot] // BLOCK_TOKENS * BLOCK_TOKENS) // BLOCK_TOKENS
            cache.begin_restore(slot, len(stored) * BLOCK_TOKENS)
            for block in stored[whole:]:
                cache.restore_block(slot, block, BLOCK_TOKENS)
        if self._prefixes is not None:
            self._prefixes.restore(slot, sequence)
        self._hold(slot, _Held(sequence, len(sequence)))
        return slot, cache.length(slot)

    def leave(self, slot: int) -> None:
        """The slot's request has ended."""
        self._hold(slot, self._slots[slot])

    def forget(self, slot: int) -> None:
        """What the slot holds is of no use."""
        self._slots[slot] = _Held()

    def save_all(self) -> None:
        """Let the directory have what slots hold, if there is one."""
        for slot, (tokens, prompt_tokens) in self._slots.items():
            if self._prefixes is not None:
                self._prefixes.save(slot, tokens, prompt_tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        """The slot that holds the longest beginning of a text, how many tokens it has of that, and how many the prompt
        had by which they are rotated."""
        kept = {slot: self._num_equal(slot, tokens) for slot in self._slots}
        slot = max(kept, key=lambda one: kept[one])
        return slot, kept[slot], self._slots[slot].prompt_tokens

    def clear(self, tokens: Sequence[int], prompt_tokens: int) -> int:
        """Empty the slot that was used least recently, for a text that is brought there from elsewhere; which it is."""
        slot = next(iter(self._slots))
        self._target.runner.cache.truncate(slot, 0)
        self._hold(slot, _Held(tokens, prompt_tokens))
        return slot

    def _save(self, slot: int, kept: int) -> None:
        """Let the store and the directory have a slot's blocks if any but those of the first `kept` tokens are lost, as
        long as there is host memory."""
        (tokens, prompt_tokens), cache, target = self._slots[slot], self._target.runner.cache, self._target
        held = cache.keeps(slot, min(cache.length(slot), len(tokens)) // BLOCK_TOKENS * BLOCK_TOKENS)

        def save(block: int, whole: bool) -> SavedBlock:
            layout = BlockLayout.of(target.config, target.plan.dtype, whole=whole)
            check_host_memory(layout.nbytes, what="the prefix cache")
            saved = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
            cache.save_block(slot, block, saved)
            return saved

        if held <= kept:
            return
        if self._store is not None:
            with suppress(BudgetError):
                self._store.put(target.rope.frequency_set(prompt_tokens), tokens[:held], save)
        if self._prefixes is not None:
            self._prefixes.save(slot, tokens, prompt_tokens)

    def _hold(self, slot: int, held: _Held) -> None:
        # At once: an interruption must not lose a slot.
        self._slots = {**{other: one for other, one in self._slots.items() if other != slot}, slot: held}

    def _num_shared(self, slot: int, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt, but for its last, that a slot holds rotated as this prompt wants them."""
        prompt_tokens, rope = self._slots[slot].prompt_tokens, self._target.rope
        if rope.frequency_set(prompt_tokens) != rope.frequency_set(len(prompt)):
            return 0
        return self._num_equal(slot, prompt[:-1])

    def _num_equal(self, slot: int, text: Sequence[int]) -> int:
        """Leading tokens of a text that a slot holds, and could go on behind."""
        tokens = self._slots[slot].tokens
        most = min(self._target.runner.cache.length(slot), len(tokens), len(text))
        equal = next((place for place in range(most) if tokens[place] != text[place]), most)
        return self._target.runner.cache.keeps(slot, equal)
