"""What a draft's cache holds of each text: brought up to what is known now, however the text got there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_runtime.cache.device import StreamingDraftCache, kept_positions
from offload_runtime.cache.retrieval import RetrievedDraftCache
from offload_runtime.core import Batch, TokenTree
from offload_runtime.runners.model_runner import ModelRunner

# More new tokens than this go through the draft as a prompt; chunks are chosen by as many queries at the most.
CATCH_UP_TOKENS = 32
# The draft's first step feeds up to so many tokens that the host knows already: what a verified window brought may be
# new to its cache.
REWRITTEN_TOKENS = 2


class DraftKVState:
    """Knows the texts of all sequences as far as the draft has read them.

    Passes are about one sequence: steps leave almost nothing to catch up with. Everything is enqueued on the current
    stream.

    Args:
        runner: Of the small model.
        batch: Sequences.

    Attributes:
        streaming: The cache, where it lets go of tokens; None where it keeps all of them.
        starts: Of every sequence, the tokens that a streaming cache has let go of, so that indices in it are so much
            smaller than positions.
        rope_shifts: Of every sequence, how much further keys are rotated than their indices say.
        last_token: The largest token of the draft's vocabulary, which the target's may go beyond: it is fed in place of
            what is.
        is_shifted: Whether indices in the cache are smaller than positions.
    """

    def __init__(self, runner: ModelRunner, *, batch: int) -> None:
        self._runner = runner
        self.streaming = cache = runner.cache if isinstance(runner.cache, StreamingDraftCache) else None
        self._chooses = isinstance(runner.cache, RetrievedDraftCache)
        self.starts: Sequence[int] = [0] * batch if cache is None else cache.starts
        self.rope_shifts: Sequence[int] = [0] * batch if cache is None else cache.rope_shifts
        self.last_token = runner.decoder.config.vocab_size - 1
        self.is_shifted = cache is not None
        # The leading tokens whose keys the cache holds, or held before it let go of them.
        self._cached: list[list[int]] = [[] for _ in range(batch)]
        self._agreed = [0] * batch  # of every sequence, how many of these have been found to be the text's

    def warm_up(self) -> None:
        """Compile the kernels, with every way to cut a product, that only read prompts. Leaves the cache empty."""

    def text_to_warm_up(self, slot: int, length: int) -> list[int]:
        """Return a text of so many tokens, of which a slot knows all that there is to know."""
        return [0] * length

    def join(self, slot: int) -> None:
        """Let another text begin in a slot, which only grows until the next one does."""
        self._agreed[slot] = 0

    def start_for(self, length: int) -> int:
        """Return what a streaming cache has let go of once a text has `length` tokens."""
        return 0 if self.streaming is None else self.streaming.start_for(length)

    def num_kept(self, length: int) -> int:
        """Return the tokens that the cache keeps of a text of `length`."""
        return length - self.start_for(length)

    def knows(self, slot: int, tokens: Sequence[int]) -> bool:
        """Return whether there is all that it takes to catch up with a text."""
        return True

    def first_needed(self, slot: int, tokens: Sequence[int]) -> int:
        """Return the first token of a prompt that the target has to read, again if need be, for proposals behind it."""
        return len(tokens)

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Take the target's hidden states of tokens from `position` on, [n, W], and the tokens that follow each, in
        place of whatever there was: heads read them."""

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        """Read a prompt, as far as it can be before anything is asked for."""
        self.catch_up(slot, tokens)

    @torch.inference_mode()
    def catch_up(self, slot: int, tokens: Sequence[int], most: int = REWRITTEN_TOKENS) -> Sequence[int]:
        """Bring the cache to all of `tokens` but the last one, or up to `most` of the last, which a step feeds itself.
        Where the rows of the step choose chunks they are `most` if the text has so many: rows that only fill up would
        count as well (a draft that is its target, 128 of 2,600 tokens, T = 0.7: 24 passes in place of 21).

        Returns:
            These.
        """
        fewest = most if self._chooses else 1
        kept = min(self._num_shared(slot, tokens), max(0, len(tokens) - fewest))
        target = max(kept, len(tokens) - most)
        if self.streaming is not None and (start := self.start_for(len(tokens))):
            target = max(target, start + self.streaming.sink_tokens)  # sinks are fed when they move, and never again
        self._bring(slot, tokens, kept, target)
        return tokens[target:]

    @torch.inference_mode()
    def move_on(self, slot: int) -> None:
        """Let a streaming cache that holds a whole text let go of what it does not keep of one of this length."""
        tokens = self._cached[slot]
        self._bring(slot, tokens, len(tokens), len(tokens))

    def holds(self, slot: int, tokens: Sequence[int]) -> bool:
        """Return whether the cache has the keys of exactly these tokens."""
        return self._num_shared(slot, tokens) == len(tokens) == len(self._cached[slot])

    def num_missing(self, slot: int, tokens: Sequence[int]) -> int:
        """Return how many of a text's last tokens the cache has no keys of."""
        return len(tokens) - self._num_shared(slot, tokens)

    def num_held(self, slot: int, tokens: Sequence[int]) -> int:
        """Return the leading tokens of a text that the cache holds the keys of, all of which it has kept."""
        if self.starts[slot]:
            return 0
        self._agreed[slot], cache = 0, self._runner.cache  # it may be another text
        return cache.saves(slot, min(self._num_shared(slot, tokens), cache.length(slot)))

    def restored(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that the cache has been given the keys of these tokens, and of no others; states may be missing."""
        kept = self._runner.cache.truncate(slot, len(tokens))
        self._cached[slot], self._agreed[slot] = list(tokens[:kept]), 0

    def _num_shared(self, slot: int, tokens: Sequence[int]) -> int:
        """Return the leading tokens of a text whose keys the cache holds. What was compared before is not looked at
        again: a text of 120K tokens would take longer than a step."""
        cached = self._cached[slot]
        length = min(len(cached), len(tokens))
        places = range(min(self._agreed[slot], length), length)
        self._agreed[slot] = next((place for place in places if cached[place] != tokens[place]), length)
        return self._agreed[slot]

    def _bring(self, slot: int, tokens: Sequence[int], kept: int, target: int) -> None:
        """Bring the cache to the first `target` of `tokens`, of which it keeps the first `kept`."""
        # First, so that an interruption never leaves it longer than the cache.
        cached, self._cached[slot] = self._cached[slot], []
        del cached[kept:]
        start, sink_tokens = self.start_for(len(tokens)), 0 if self.streaming is None else self.streaming.sink_tokens
        # A streaming cache has let go of what it should hold, or would be fed too much at a time; a prompt, of which it
        # lets go of nothing, is rotated by its indices.
        too_far = start > 0 and (kept < start + sink_tokens or len(tokens) - kept > CATCH_UP_TOKENS)
        if too_far or start < self.starts[slot]:
            # It is prefilled with what it keeps, and nothing else.
            assert self.streaming is not None
            self.streaming.reset(slot, start)
            positions = kept_positions(target, start, sink_tokens)
            if positions:
                self._prefill(slot, [tokens[position] for position in positions])
        else:
            if start > self.starts[slot]:
                self._let_go(slot, cached, start)
            self._set_length(slot, kept)
            kept = self._runner.cache.length(slot) + self.starts[slot]  # a cache may keep less
            del cached[kept:]
            self._cached[slot] = cached
            self._feed(slot, tokens[kept:target])
        cached += tokens[kept:target]
        self._cached[slot], self._agreed[slot] = cached, target

    def learned(self, slot: int, newest: Sequence[int]) -> None:
        """Note that steps have written the keys of `newest`, the tokens behind those that the cache had caught up
        to."""
        self._set_length(slot, len(self._cached[slot]) + len(newest))
        self._cached[slot] += newest

    def _set_length(self, slot: int, length: int) -> None:
        """Let the cache hold the sequence's first `length` tokens, whose keys have been written."""
        cache, length = self._runner.cache, length - self.starts[slot]
        if length <= cache.length(slot):
            cache.truncate(slot, length)  # which also clears what a prompt that broke off has left
        else:
            cache.commit(slot, length - cache.length(slot))

    def _let_go(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Move a streaming cache on, and compute its sinks where they now belong."""
        cache = self.streaming
        assert cache is not None
        self._set_length(slot, len(tokens))
        cache.move(slot, start)
        cache.begin_window([slot], [0])  # over what is in the cache already
        self._run(slot, tokens[: cache.sink_tokens], 0)

    def _feed(self, slot: int, tokens: Sequence[int]) -> None:
        """Put tokens behind those in the cache."""
        cache = self._runner.cache
        if len(tokens) > CATCH_UP_TOKENS:
            self._prefill(slot, tokens)
        elif tokens:
            cache.begin_window([slot], [len(tokens)])
            self._run(slot, tokens, cache.length(slot))
            cache.commit(slot, len(tokens))

    def _prefill(self, slot: int, tokens: Sequence[int]) -> None:
        """Read tokens as a prompt."""
        self._runner.forward(Batch(prompts={slot: self._clamped(tokens)}))

    def _run(self, slot: int, tokens: Sequence[int], committed: int) -> None:
        """Write the keys of tokens in a row at these positions of the cache."""
        chain = TokenTree(tuple(self._clamped(tokens)))
        self._runner.write_rows(self._runner.rows([chain], [committed], [slot], rope_shift=self.rope_shifts[slot]))

    def _clamped(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens as the draft knows them: the target's padded vocabulary may be the longer one; what is
        guessed behind such a token is no matter."""
        return [min(token, self.last_token) for token in tokens]


class TargetKVState:
    """Knows texts by the KV cache of the target, which a drafter of the same layers shares: there is nothing to catch
    up with. It has what steps ask of a `DraftKVState`.

    A text's last token, the root, has no keys there before a pass has read it, which writes them while the drafter goes
    on. So trees have all of theirs in spare positions, and committed keys are only read. The rows of a chain are behind
    the committed tokens: it grows between passes, and the next one writes them before it reads them.

    Args:
        runner: Of the copies.
        batch: Sequences.
    """

    is_shifted = False

    def __init__(self, runner: ModelRunner, *, batch: int) -> None:
        self._cache = runner.cache
        self.last_token = runner.decoder.config.vocab_size - 1
        self.starts = self.rope_shifts = (0,) * batch
        # Of every sequence the tokens of the text whose last one has keys in the root's spare position.
        self._lengths_at_root = [0] * batch

    def warm_up(self) -> None:
        """Do nothing: it reads no prompts."""

    def text_to_warm_up(self, slot: int, length: int) -> list[int]:
        self._cache.truncate(slot, 0)
        self._cache.commit(slot, length - 1)
        return [0] * length

    def join(self, slot: int) -> None:
        self._lengths_at_root[slot] = 0

    def num_kept(self, length: int) -> int:
        return length

    def knows(self, slot: int, tokens: Sequence[int]) -> bool:
        return self._cache.length(slot) == len(tokens) - 1

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        """Do nothing: the target reads the prompt."""

    def catch_up(self, slot: int, tokens: Sequence[int], most: int = REWRITTEN_TOKENS) -> Sequence[int]:
        """Return the last token: the target has all others, and the states behind these. Empties the cache where there
        are none."""
        if not tokens:
            self._cache.truncate(slot, 0)
        self._cache.renew(slot)
        return tokens[-1:]

    def holds(self, slot: int, tokens: Sequence[int]) -> bool:
        return self._lengths_at_root[slot] == len(tokens)

    def learned(self, slot: int, newest: Sequence[int]) -> None:
        """Note that a step has put the keys of a text's last token into the root's position."""
        self._lengths_at_root[slot] = self._cache.length(slot) + len(newest)
