"""The prefix cache: slots keep the keys and values of requests that have ended, and the longest beginning of a prompt
that one of them still holds is not read again. Stores hold blocks that slots have lost, one in host memory, one in a
directory, which outlives the process; they give them back to a prompt of which they know more than any slot.

By one arithmetic what is kept has the bits of what would be computed anew. A slot without a running request costs no
pass anything: passes attend to, and stream, the keys and values of the requests that they are about.

Stores have the target's blocks, and the draft's where its cache holds all of a text; of a head, whose rows each read
the token behind theirs, too, the last row of a block may have read another than the text has, which costs a proposal at
most. What a retrieval verifier knows of chunks is made anew of each block as it comes; a streaming draft reads the few
tokens that it holds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from offload_runtime_kernels.gated_delta import CHUNK_TOKENS
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.cache.delta import ANCHOR_TOKENS
from offload_runtime.cache.saved_blocks import BlockFiles, BlockLayout, BlockStore, block_names, first_whole_block
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.errors import BudgetError, HostError, SessionError, StorageError
from offload_runtime.models.config import ModelConfig
from offload_runtime.options import require
from offload_runtime.plan.sizes import RunPlan
from offload_runtime.runners.draft_kv import DraftKVState
from offload_runtime.sizes import GB, format_bytes
from offload_runtime.weights.checkpoint import CheckpointSource

# To be raised with every change by which the target's keys and values get other bits: what was saved before is refused.
_ARITHMETIC, _RECURRENCE = 1, 2
# What a server's blocks may take where nobody says how much.
_SERVER_BYTES = 64 * GB


def prefix_files(directory: Path, most_bytes: int | None = None) -> BlockFiles:
    """Open the blocks of a server, which no other one may use meanwhile. Raises `StorageError`."""
    remedy = "choose another directory for --sessions"
    return BlockFiles(directory, remedy=remedy, most_bytes=most_bytes or _SERVER_BYTES)


def require_stores(plan: RunPlan, prefix_cache_bytes: int, sessions_bytes: int | None) -> None:
    """Refuse stores that would be of no use to a run, or not hold any block of it. Raises `OptionError`."""
    require(prefix_cache_bytes >= 0, f"prefix_cache_bytes must not be negative, not {prefix_cache_bytes}")
    on_host = prefix_cache_bytes and plan.target.on_host
    require(not on_host, "a prefix cache does nothing where the KV cache is in host memory: drop --prefix-cache")
    block_bytes = plan.target.kv_block_bytes
    for name, nbytes in (("--prefix-cache", prefix_cache_bytes or None), ("--sessions-size", sessions_bytes)):
        if nbytes is not None:
            why = f"{name} of {format_bytes(nbytes)} holds none of the blocks of 256 tokens"
            require(nbytes >= block_bytes, f"{why}, of {format_bytes(block_bytes)} each: raise it, or drop it")


@dataclass(frozen=True)
class SavedCache:
    """Is a model's cache, whose blocks go to stores and come from there.

    Attributes:
        model: Whose it is.
        source: Its checkpoint.
        draft_state: What it holds, of a draft's; None of the target's.
        reads: The target's checkpoint, of a head, whose rows are made of what that has made.
        locks: Whether memory may be page-locked for blocks on their way.
    """

    model: LoadedModel
    source: CheckpointSource
    draft_state: DraftKVState | None = None
    reads: CheckpointSource | None = None
    locks: bool = False

    @classmethod
    def of(
        cls, plan: RunPlan, target: LoadedModel, draft: LoadedModel | None, draft_state: DraftKVState | None
    ) -> dict[str, SavedCache]:
        """Return the caches whose blocks are saved: `target`, and `draft` where there is one."""
        caches = dict[str, SavedCache]()
        for name, model, source, state in (
            ("target", target, plan.request.target, None), ("draft", draft, plan.request.draft, draft_state),
        ):  # fmt: skip
            if model is not None and (name == "target" or state is not None):
                assert isinstance(source, CheckpointSource), "a runtime that is loaded has opened its checkpoints"
                locks = model.rope.device.type == "cuda" and plan.request.pinned is None
                reads = plan.request.target if model.config.is_head else None
                caches[name] = cls(model, source, state, reads, locks)
        return caches

    @property
    def config(self) -> ModelConfig:
        """Return the model's, also where other machines have some of its layers."""
        return self.model.config.complete

    @cached_property
    def made_with(self) -> Mapping[str, str]:
        """Return all that its keys and values depend on, besides tokens and frequencies. Raises `CheckpointError` where
        the model's files cannot be read any more."""
        device, cpu = self.model.rope.device, torch.backends.cpu.get_cpu_capability()
        made_with = {
            "model": self.source.fingerprint,
            "dtype": str(self.model.plan.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {cpu}",
            "arithmetic": f"{_ARITHMETIC}, torch {torch.__version__}",
        } | ({} if self.draft_state is None else {"cache": self.model.plan.cache})  # fmt: skip
        if self.reads is not None:
            made_with["reads"] = self.reads.fingerprint
        recurrence = {"chunk size": f"{CHUNK_TOKENS} tokens", "recurrence": str(_RECURRENCE)}
        return made_with | (recurrence if self.config.deltas else {})

    def kind(self, store: BlockStore) -> str:
        """Return what tells its keys and values from those of others in a store; raises as `made_with`. Nothing is read
        for one that is this runtime's alone."""
        return json.dumps(self.made_with) if store.lasts else "target" if self.draft_state is None else "draft"

    def num_held(self, slot: int, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of a text a slot holds, which has this text or, in a draft's cache, any."""
        if self.draft_state is not None:
            return self.draft_state.num_held(slot, tokens)
        cache = self.model.runner.cache
        return cache.saves(slot, min(cache.length(slot), len(tokens)))

    @cached_property
    def layouts(self) -> list[BlockLayout]:
        """Return the layouts of a block that has what every longer text needs alone, and of one that is whole."""
        dtype = self.model.plan.dtype
        return [BlockLayout.of(self.config, dtype, whole=whole, locks=self.locks) for whole in (False, True)]

    def blocks(
        self, store: BlockStore, tokens: Sequence[int], prompt_tokens: int, slot: int, held: int
    ) -> dict[str, BlockLayout]:  # fmt: skip
        """Return the blocks of a text by their names, and what is to be in them: whole are those that it takes to go on
        behind the text, and where a slot that has its first `held` tokens has the anchor at a block's end that any text
        keeps."""
        first_whole, found = first_whole_block(self.config, len(tokens)), dict[str, BlockLayout]()
        for block, name in enumerate(self.names(store, tokens, prompt_tokens)):
            end, whole = (block + 1) * BLOCK_TOKENS, block >= first_whole
            if self.config.deltas and not end % ANCHOR_TOKENS and end <= held:
                whole = whole or self.model.runner.cache.saves(slot, end) == end
            found[name] = self.layouts[whole]
        return found

    def find(self, store: BlockStore, tokens: Sequence[int], prompt_tokens: int) -> list[str]:
        """Return the leading full blocks of a text that a store has, as many as bring it back; this uses them."""
        names = self.names(store, tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS], prompt_tokens)
        config, whole = self.config, self.layouts[True]
        names = names[: store.find(names)]
        while not all(store.holds(one, whole) for one in names[first_whole_block(config, len(names) * BLOCK_TOKENS) :]):
            names.pop()
        return names

    def names(self, store: BlockStore, tokens: Sequence[int], prompt_tokens: int) -> list[str]:
        """Return what the blocks of a text are called, whose prompt had so many tokens."""
        # How a draft was rotated changes no token.
        frequencies = self.model.rope.frequency_set(prompt_tokens) if self.draft_state is None else 0
        return block_names(f"{self.kind(store)} {frequencies}", tokens)

    def save(self, store: BlockStore, slot: int, blocks: Mapping[str, BlockLayout], length: int) -> None:
        """Save those blocks of a slot's first `length` tokens that are not there yet. Raises as `BlockStore.save`."""
        if not all(store.holds(name, layout) for name, layout in blocks.items()):
            self._synchronize()
        store.save(blocks, partial(self.model.runner.save_block, slot, length=length))

    def restore(self, store: BlockStore, slot: int, tokens: Sequence[int], names: Sequence[str]) -> None:
        """Bring a slot, which holds some of these tokens or none, to all of them. What came before an error stays.
        Raises as `BlockStore.read`, and `ContextLengthError`."""
        self._synchronize()  # what is queued for the slot would write over it
        cache = self.model.runner.cache
        if self.draft_state is not None:
            self.draft_state.catch_up(slot, ())
        while rest := cache.length(slot) % BLOCK_TOKENS:
            cache.truncate(slot, cache.length(slot) - rest)
        self.model.runner.begin_restore(slot, len(tokens))
        try:
            for saved in store.read(names[cache.length(slot) // BLOCK_TOKENS :], self.layouts):
                self.model.runner.restore_block(slot, saved, min(BLOCK_TOKENS, len(tokens) - cache.length(slot)))
        finally:
            if self.draft_state is not None:
                self.draft_state.restored(slot, tokens[: cache.length(slot)])

    def _synchronize(self) -> None:
        for device in self.model.runner.decoder.partition.devices:
            if device.type == "cuda":  # a draft has a stream of its own
                torch.cuda.synchronize(device)


class _Held(NamedTuple):
    """Holds the tokens of a slot's newest request, which grow while it runs, and of these the prompt's. The target's
    cache holds as many of them as its length says."""

    tokens: Sequence[int] = ()
    prompt_tokens: int = 0


class PrefixCache:
    """Knows which tokens' keys and values the slots of the target's cache and stores hold. What a store cannot take, or
    has damaged, is told to the log: a request is never refused for it.

    Args:
        target: Whose cache it is.
        num_slots: Of the cache. They are taken for empty, whatever they hold.
        stores: Of blocks that they have lost.
        caches: Whose blocks these are, by `SavedCache.of`.

    Raises:
        CheckpointError: As of `SavedCache.made_with`, where a store outlives the process.
    """

    def __init__(
        self, target: LoadedModel, num_slots: int, stores: Sequence[BlockStore] = (), caches: Sequence[SavedCache] = ()
    ) -> None:
        self._target = target
        # The target's come last, to stay where there is not room for all.
        self._saved = [(store, one) for store in stores for one in caches[::-1]]
        for store, one in self._saved:
            one.kind(store)  # what cannot be read is refused now
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
        text, length = sequence[:-1], len(sequence)
        found = [(store.snapshot(), one, one.find(store, text, length)) for store, one in self._saved]
        self._save(slot, kept[slot])  # which may drive out what was found
        self.forget(slot)  # until the cache has no more than what is shared
        cache.truncate(slot, kept[slot])
        for store, one, names in found:
            tokens = sequence[: len(names) * BLOCK_TOKENS]
            if one.num_held(slot, sequence) < len(tokens) <= one.model.runner.cache.capacity_tokens:
                try:
                    one.restore(store, slot, tokens, names)
                except SessionError as error:
                    logging.getLogger(__name__).warning("%s: it is deleted, and read again", error)
                    store.delete([names[one.model.runner.cache.length(slot) // BLOCK_TOKENS]])
                except (StorageError, BudgetError) as error:
                    logging.getLogger(__name__).warning("%s", error)
        cache.truncate(slot, cache.length(slot))  # a block that was not there may be one that windows reach
        self._hold(slot, _Held(sequence, len(sequence)))
        return slot, cache.length(slot)

    def leave(self, slot: int) -> None:
        """The slot's request has ended."""
        self._hold(slot, self._slots[slot])

    def forget(self, slot: int) -> None:
        """Forget what the slot holds, which is of no use."""
        self._slots[slot] = _Held()

    def save_all(self) -> None:
        """Let the stores that outlive the process have what slots hold, and the others nothing any more."""
        self._saved = [(store, one) for store, one in self._saved if store.lasts]
        try:
            for slot in self._slots:
                self._save(slot)
        except HostError as error:
            logging.getLogger(__name__).warning("what slots hold is not saved: %s", error)

    def find(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Return the slot that holds the longest beginning of a text, how many tokens it has of that, and how many the
        prompt had by which they are rotated."""
        kept = {slot: self._num_equal(slot, tokens) for slot in self._slots}
        slot = max(kept, key=lambda one: kept[one])
        return slot, kept[slot], self._slots[slot].prompt_tokens

    def clear(self, tokens: Sequence[int], prompt_tokens: int) -> int:
        """Empty the slot that was used least recently, for a text that is brought there from elsewhere; which it is."""
        slot = next(iter(self._slots))
        self._target.runner.cache.truncate(slot, 0)
        self._hold(slot, _Held(tokens, prompt_tokens))
        return slot

    def _save(self, slot: int, kept: int = 0) -> None:
        """Let the stores have a slot's full blocks if any but those of the first `kept` tokens are lost."""
        tokens, prompt_tokens = self._slots[slot]
        for store, one in self._saved:
            cache = one.model.runner.cache
            length, blocks = len(tokens), dict[str, BlockLayout]()
            while (held := cache.keeps(slot, one.num_held(slot, tokens[:length]))) > kept:
                if not (rest := held % BLOCK_TOKENS):
                    blocks = one.blocks(store, tokens[:held], prompt_tokens, slot, held)
                    rest = held - store.num_fitting(blocks) * BLOCK_TOKENS
                length = held - rest
                if not rest:
                    break
            if held > kept:
                try:
                    one.save(store, slot, blocks, held)
                except (StorageError, BudgetError) as error:
                    logging.getLogger(__name__).warning("%s", error)

    def _hold(self, slot: int, held: _Held) -> None:
        # At once: an interruption must not lose a slot.
        self._slots = {**{other: one for other, one in self._slots.items() if other != slot}, slot: held}

    def _num_shared(self, slot: int, prompt: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt, but for its last, a slot holds rotated as this prompt wants
        them."""
        prompt_tokens, rope = self._slots[slot].prompt_tokens, self._target.rope
        if rope.frequency_set(prompt_tokens) != rope.frequency_set(len(prompt)):
            return 0
        return self._num_equal(slot, prompt[:-1])

    def _num_equal(self, slot: int, text: Sequence[int]) -> int:
        """Return how many leading tokens of a text a slot holds, and could go on behind."""
        tokens = self._slots[slot].tokens
        most = min(self._target.runner.cache.length(slot), len(tokens), len(text))
        equal = next((place for place in range(most) if tokens[place] != text[place]), most)
        return self._target.runner.cache.keeps(slot, equal)
