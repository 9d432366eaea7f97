"""What the cache of a drafter of blocks holds of each text: keys and values of the context that the target's passes
keep of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from offload_runtime_kernels.kv_blocks import RopeRows

from offload_runtime.models.dflash import BlockAttention, DFlashConfig
from offload_runtime.runners.draft_kv import REWRITTEN_TOKENS, DraftKVState
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.model_runner import ModelRunner


class BlockKVState(DraftKVState):
    """Knows of which tokens of all texts the context is kept: of all that the target has read while it was asked to
    keep it, but for those before the first one of which it was not.

    The cache counts from the first token whose context is kept. The newest tokens wait for a step, which writes their
    keys and values with its own; everything is enqueued on the current stream.

    Args:
        runner: Of the drafter.
        batch: Sequences.

    Attributes:
        waiting: [batch, rows of a block, width], the newest of what was kept of each text, in a tensor that never
            moves.
        num_waiting: How much of it there is, by sequence.
        firsts: Of every sequence the tokens before those in the cache.
    """

    def __init__(self, runner: ModelRunner, *, batch: int) -> None:
        super().__init__(runner, batch=batch)
        decoder = runner.decoder
        assert isinstance(decoder, HeadDecoder) and isinstance(decoder.head_config, DFlashConfig)
        self._decoder, self._config = decoder, decoder.head_config
        shape = batch, self._config.block_size, self._config.width
        self.waiting = torch.zeros(shape, dtype=decoder.final_norm.dtype, device=runner.rope.device)
        self.num_waiting, self.firsts = [0] * batch, [0] * batch
        self._texts: list[Sequence[int]] = [[]] * batch

    def end(self, slot: int) -> int:
        """Return the position behind the last token whose context is kept."""
        return self.firsts[slot] + self._runner.cache.length(slot) + self.num_waiting[slot]

    def knows(self, slot: int, tokens: Sequence[int]) -> bool:
        return self.end(slot) == len(tokens) - 1

    def first_needed(self, slot: int, tokens: Sequence[int]) -> int:
        known = self._num_known(slot, tokens)
        return known if known > self.firsts[slot] else len(tokens)

    def _num_known(self, slot: int, tokens: Sequence[int]) -> int:
        """Return the leading tokens of a text whose context is kept, or is before what is kept."""
        text, most = self._texts[slot], min(len(self._texts[slot]), len(tokens))
        if text is not tokens and text[:most] != tokens[:most]:  # as a whole: a prompt may have 120K tokens
            most = next((place for place in range(most) if text[place] != tokens[place]), most)
        return min(most, self.end(slot))

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        self.forget(slot, self._num_known(slot, tokens))
        self._texts[slot] = tokens

    def follow(self, slot: int, text: Sequence[int]) -> None:
        """Note what the text is, which has only grown."""
        self._texts[slot] = text

    def catch_up(self, slot: int, tokens: Sequence[int], most: int = REWRITTEN_TOKENS) -> Sequence[int]:
        """As of a draft, of no text."""
        assert not tokens, "only the target's passes say more"
        self.forget(slot, 0)
        return ()

    def num_held(self, slot: int, tokens: Sequence[int]) -> int:
        if self.firsts[slot]:
            return 0
        self._write(slot, self._taken(slot))
        return self._num_known(slot, tokens)

    def restored(self, slot: int, tokens: Sequence[int]) -> None:
        self._runner.cache.truncate(slot, len(tokens))
        self.firsts[slot], self.num_waiting[slot], self._texts[slot] = 0, 0, list(tokens)

    def forget(self, slot: int, end: int) -> None:
        """Keep the context of no token from position `end` on; of none where what is before it is not known."""
        cache, kept = self._runner.cache, end - self.firsts[slot]
        if not 0 < kept <= cache.length(slot) + self.num_waiting[slot]:
            kept = 0
        self.num_waiting[slot] = max(0, min(self.num_waiting[slot], kept - cache.length(slot)))
        if kept < cache.length(slot) and cache.truncate(slot, kept) < kept:
            cache.truncate(slot, 0)  # windows reach what is not there any more
        if self.end(slot) == self.firsts[slot]:
            self.firsts[slot] = end

    @torch.inference_mode()
    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Take what is kept of the target's rows, [N, W], about the tokens of a slot from a position on, in place of
        whatever there was of these. Beyond what the cache has room for there is nothing to propose."""
        self.forget(slot, position)
        waiting, count = self.num_waiting[slot], len(hidden)
        if waiting + count <= self._config.block_size:
            self.waiting[slot, waiting : waiting + count] = hidden
            self.num_waiting[slot] += count
        elif self._runner.cache.length(slot) + waiting + count <= self._runner.cache.max_tokens_with_draft:
            self._write(slot, self._taken(slot))
            self._write(slot, hidden.to(self.waiting.dtype))

    def _taken(self, slot: int) -> torch.Tensor:
        """Return what waits, which then does not any more."""
        found, self.num_waiting[slot] = self.waiting[slot, : self.num_waiting[slot]], 0
        return found

    def written(self, slot: int) -> None:
        """Note that a step has written what waited."""
        self._runner.cache.commit(slot, len(self._taken(slot)))

    @torch.inference_mode()
    def _write(self, slot: int, kept: torch.Tensor) -> None:
        """Put tokens behind those in the cache."""
        cache, count = self._runner.cache, len(kept)
        if not count:
            return
        cache.begin_window([slot], [count])
        positions = torch.arange(count, dtype=torch.int32, device=kept.device) + cache.length(slot)
        rope, context = self.rope_rows(positions, torch.full_like(positions, slot)), self.context(kept)
        for index, weights in self._runner.streamer.layers(count):
            attention = self._config.layers[index].attention
            assert isinstance(attention, BlockAttention)
            attention.store(index, context, weights, rope, cache)
        cache.commit(slot, count)

    def context(self, kept: torch.Tensor) -> torch.Tensor:
        """Return what layers make keys and values from, [N, H], of what is kept of tokens [N, W]."""
        return self._config.context(kept, self._decoder.shared)

    def rope_rows(self, positions: torch.Tensor, slots: torch.Tensor) -> RopeRows:
        """Return where rows stand [N], in the cache and by what they are rotated; negative positions are padding."""
        rope = self._runner.rope
        return RopeRows(*rope.angles(positions, rope.frequencies(1)), positions, positions.clamp_min(0), slots)
