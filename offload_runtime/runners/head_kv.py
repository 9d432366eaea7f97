"""What the caches of heads hold of each text, and the hidden states that their rows read.

A text is known as far as the target has read it: of its tokens from some first one on there is a row in the cache, or
the target's hidden state waits for the next step, which makes its row besides its own. The row of a head is about the
token behind that, and behind proposals it reads what the head itself gave; that of a block drafter has no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from offload_runtime_kernels.kv_blocks import RopeRows
from offload_runtime_kernels.linear import LIBRARY_ROWS

from offload_runtime.core import TokenTree
from offload_runtime.models.dflash import BlockAttention, DFlashConfig
from offload_runtime.runners.draft_kv import CATCH_UP_TOKENS, REWRITTEN_TOKENS, DraftKVState
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.model_runner import WARM_UP_ROWS, ModelRunner

# Tokens that the first step of a chain feeds: what was accepted is read again, and few rows cost as much as one.
HEAD_CATCH_UP_TOKENS = 8
# Of every sequence what the head gave behind the text's last token, in a step over a tree and in a chain.
_OWN_ROWS = 2
Ints = TypeVar("Ints", int, torch.Tensor)


def hidden_store_rows(batch: int, num_places: int) -> int:
    """Return the rows of a `HiddenStore`, arguments as there."""
    return batch * (_OWN_ROWS + num_places + CATCH_UP_TOKENS) + 1


class HiddenStore:
    """Holds hidden states on the device, in a tensor that never moves. Each has a number, on the device where slots and
    places are.

    Args:
        decoder: Of the head.
        batch: Sequences.
        num_places: Nodes of a sequence's tree that can have keys at a time.

    Attributes:
        rows: All of them, [hidden_store_rows, width].
        unused: The number of one that nobody reads.
        chains: [batch] int64: by sequence what a chain's last step gave.
    """

    def __init__(self, decoder: HeadDecoder, *, batch: int, num_places: int) -> None:
        size = hidden_store_rows(batch, num_places), decoder.config.width
        self.rows, self.unused = decoder.final_norm.new_zeros(size), size[0] - 1
        self._stride, self._first_of_text = self.unused // batch, _OWN_ROWS + num_places
        self.chains = torch.arange(1, size[0], self._stride, device=self.rows.device)

    def of_root(self, slot: int) -> int:
        """Return what stands for the text's last token, in rows about what may follow it."""
        return slot * self._stride

    def of_place(self, slot: Ints, place: Ints) -> Ints:
        """Return what stands for a node."""
        return slot * self._stride + _OWN_ROWS + place

    def of_text(self, slot: Ints, position: Ints) -> Ints:
        """Return what the target made of a token, one of the last `CATCH_UP_TOKENS` that were written."""
        return slot * self._stride + self._first_of_text + position % CATCH_UP_TOKENS

    def text(self, slot: int, position: int, count: int) -> list[torch.Tensor]:
        """Return what stands for tokens in a row, in up to two parts."""
        first, end = self.of_text(slot, 0), self.of_text(slot, 0) + CATCH_UP_TOKENS
        at = self.of_text(slot, position)
        assert count <= CATCH_UP_TOKENS
        return [self.rows[at : min(at + count, end)], self.rows[first : max(first, first + at + count - end)]]


class HeadKVState(DraftKVState):
    """Knows of which tokens of all texts there are the target's hidden states: of all that it has read while it was
    asked to keep them, but for those before the first one of which it was not.

    Indices in the cache count from that one. A row of a head is about the token behind its hidden state: there is none
    about a text's first token. Everything is enqueued on the current stream.

    Args:
        runner: Of the head.
        batch: Sequences.
        most_waiting: Hidden states of a sequence that may wait for a step.
        ahead: By how much the token that a row is about is behind that of its hidden state.

    Attributes:
        hidden: What rows read.
        starts: Of every sequence the first token that there is a row about.
        num_waiting: Of every sequence how many hidden states, the newest, wait.
    """

    def __init__(self, runner: ModelRunner, *, batch: int, most_waiting: int = CATCH_UP_TOKENS, ahead: int = 1) -> None:
        super().__init__(runner, batch=batch)
        assert isinstance(runner.decoder, HeadDecoder)
        self._decoder, self._most_waiting, self._ahead = runner.decoder, most_waiting, ahead
        self.is_shifted = True
        self.hidden = HiddenStore(runner.decoder, batch=batch, num_places=len(runner.cache.spare_positions))
        self.starts = self._starts = [ahead] * batch
        self.num_waiting = [0] * batch

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels that keep what the target's passes say and read prompts, with every way to cut a product.
        Empties the cache."""
        cache, rows, decoder = self._runner.cache, self.hidden.rows, self._decoder
        longest = max(1, min(self._runner.chunk_tokens, cache.capacity_tokens))
        self._forget(0, 0)
        for count in sorted({longest, *(rows for rows in (*WARM_UP_ROWS, *LIBRARY_ROWS["cuda"]) if rows < longest)}):
            x, hidden = (rows.new_zeros(count, size) for size in (decoder.config.target_size, rows.shape[1]))
            for number, _ in enumerate(decoder.config.taps):
                decoder.tap(number, x, hidden)
            self._write(0, [0] * count, hidden)
            cache.truncate(0, 0)

    def text_to_warm_up(self, slot: int, length: int) -> list[int]:
        text, rows = super().text_to_warm_up(slot, length), self.hidden.rows
        self.prepare(slot, text)
        end = self.end(slot)
        self.observe(slot, end, text[end + 1 :], rows.new_zeros(length - 1 - end, rows.shape[1]))
        return text

    def _waiting(self, slot: int) -> list[torch.Tensor]:
        """Return the hidden states that wait, [n, W], in parts."""
        return self.hidden.text(slot, self.first_waiting(slot), self.num_waiting[slot])

    @torch.inference_mode()
    def _write(self, slot: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Put rows behind those in the cache: hidden states [n, W], and the tokens that follow each."""
        cache, runner, size = self._runner.cache, self._runner, self._runner.chunk_tokens
        for first in range(0, len(tokens), size):
            piece = tokens[first : first + size]
            cache.begin_window([slot], [len(piece)], [slot])
            rows = runner.rows([TokenTree(tuple(self._clamped(piece)))], [cache.length(slot)], [slot])
            runner.write_rows(replace(rows, hidden=hidden[first : first + size]))
            cache.commit(slot, len(piece))

    def end(self, slot: int) -> int:
        """Return the position behind the last token that is known."""
        return self.first_waiting(slot) + self.num_waiting[slot]

    def _first(self, slot: int) -> int:
        return self._starts[slot] - self._ahead

    def first_waiting(self, slot: int) -> int:
        """Return the position behind the last token that there is a row of in the cache."""
        return self._first(slot) + self._runner.cache.length(slot)

    def knows(self, slot: int, tokens: Sequence[int]) -> bool:
        return self._first(slot) < self.end(slot) == len(tokens) - 1

    def holds(self, slot: int, tokens: Sequence[int]) -> bool:
        return self._first(slot) < self.first_waiting(slot) == len(tokens) - 1

    def first_needed(self, slot: int, tokens: Sequence[int]) -> int:
        known = self.num_known(slot, tokens)
        return known if known > self._first(slot) else len(tokens)

    def num_known(self, slot: int, tokens: Sequence[int]) -> int:
        """Return the leading tokens of a text that are known, or come before those that are."""
        self._agreed[slot], shared = 0, self._num_shared(slot, tokens)
        # The last row that was restored has read whatever came next.
        if shared > self.first_waiting(slot) or shared == len(self._cached[slot]):
            return min(shared, self.end(slot))
        return max(0, shared - self._ahead)

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        self._forget(slot, self.num_known(slot, tokens))
        self._cached[slot] = list(tokens)

    def _forget(self, slot: int, end: int) -> None:
        """Know no token from position `end` on; none at all where what is before it is not known."""
        cache, kept = self._runner.cache, end - self._first(slot)
        if not 0 < kept <= cache.length(slot) + self.num_waiting[slot]:
            kept = 0
        self.num_waiting[slot] = max(0, min(self.num_waiting[slot], kept - cache.length(slot)))
        if kept < cache.length(slot) and cache.truncate(slot, kept) < kept:
            cache.truncate(slot, 0)  # windows reach what is not there any more
        if self.end(slot) == self._first(slot):
            self._starts[slot] = end + self._ahead

    @torch.inference_mode()
    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        self._forget(slot, position)
        text, waiting, count = self._cached[slot], self.num_waiting[slot], len(hidden)
        text[position + 1 :] = tokens
        if self._runner.cache.length(slot) + waiting + count > self._runner.cache.capacity_tokens:
            return  # there is nothing to propose any more
        if waiting + count > self._most_waiting:
            parts, self.num_waiting[slot] = [*self._waiting(slot), hidden[:-1]], 0
            self._write(slot, text[position + 1 - waiting : position + count], torch.cat(parts))
            position, hidden = position + count - 1, hidden[-1:]
        parts = self.hidden.text(slot, position, len(hidden))
        for part, new in zip(parts, hidden.split([*map(len, parts)]), strict=True):
            part.copy_(new)
        self.num_waiting[slot] += len(hidden)

    def catch_up(self, slot: int, tokens: Sequence[int], most: int = REWRITTEN_TOKENS) -> Sequence[int]:
        """Bring the cache to a text that it `knows`, as a draft does, or to none."""
        if not tokens:
            self._forget(slot, 0)
            return ()
        assert self.knows(slot, tokens)
        if self.num_waiting[slot] > most:
            self._write_first(slot, self.num_waiting[slot] - most)
        if not self.num_waiting[slot]:  # steps ask about the last token
            self._runner.cache.truncate(slot, self._runner.cache.length(slot) - 1)
            self.num_waiting[slot] = 1
        return tokens[-self.num_waiting[slot] :]

    def _write_first(self, slot: int, count: int) -> None:
        """Make rows of so many hidden states that wait, the oldest."""
        first, hidden, left = self.first_waiting(slot), torch.cat(self._waiting(slot)), self.num_waiting[slot] - count
        self.num_waiting[slot] = 0  # first, so that an interruption never leaves more than there is
        self._write(slot, self._cached[slot][first + 1 : first + 1 + count], hidden[:count])
        self.num_waiting[slot] = left

    def learned(self, slot: int, newest: Sequence[int]) -> None:
        """Note that a step has written the rows of as many of the hidden states that waited."""
        self.num_waiting[slot] -= len(newest)
        self._runner.cache.commit(slot, len(newest))

    def num_held(self, slot: int, tokens: Sequence[int]) -> int:
        """Return how many rows of a text the cache has, from its first one on, with those that waited. The last one may
        have read another token behind the text than comes there, which costs a proposal at most."""
        if self._first(slot):
            return 0
        if self.num_waiting[slot]:
            self._synchronize()
            self._write_first(slot, self.num_waiting[slot])
            self._synchronize()
        self._agreed[slot] = 0  # it may be another text
        return min(self._num_shared(slot, tokens), self._runner.cache.length(slot))

    def _synchronize(self) -> None:
        """Wait for the device: drafting may have a stream of its own, and other texts go on there."""
        if (device := self._runner.rope.device).type == "cuda":
            torch.cuda.synchronize(device)

    def restored(self, slot: int, tokens: Sequence[int]) -> None:
        self._runner.cache.truncate(slot, len(tokens))
        self._starts[slot], self.num_waiting[slot], self._cached[slot] = self._ahead, 0, list(tokens)


class BlockKVState(HeadKVState):
    """Knows the texts of a drafter of blocks: keys and values of the context that the target's passes keep of tokens,
    in rows about these themselves. A block brings as many of what waits as it has rows.

    Args:
        runner: Of the drafter.
        batch: Sequences.
    """

    def __init__(self, runner: ModelRunner, *, batch: int) -> None:
        config = runner.decoder.config
        assert isinstance(config, DFlashConfig)
        super().__init__(runner, batch=batch, most_waiting=min(config.block_size, CATCH_UP_TOKENS), ahead=0)
        self._config = config

    @torch.inference_mode()
    def _write(self, slot: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        cache, count = self._runner.cache, len(hidden)
        cache.begin_window([slot], [count])
        positions = torch.arange(count, dtype=torch.int32, device=hidden.device) + cache.length(slot)
        rope = self.rope_rows(positions, torch.full_like(positions, slot))
        context = self._config.context(hidden, self._decoder.shared)
        for index, weights in self._runner.streamer.layers(count):
            attention = self._config.layers[index].attention
            assert isinstance(attention, BlockAttention)
            attention.store(index, context, weights, rope, cache)
        cache.commit(slot, count)

    def rope_rows(self, positions: torch.Tensor, slots: torch.Tensor) -> RopeRows:
        """Return where rows stand [N], in the cache and by what they are rotated; negative positions are padding."""
        rope = self._runner.rope
        return RopeRows(*rope.angles(positions, rope.frequencies(1)), positions, positions.clamp_min(0), slots)
