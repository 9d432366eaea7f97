"""TriForce's hierarchy as a proposer: a small draft, checked by the target over a small retrieved cache, proposes.

Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding",
arXiv 2404.11912. Every level samples with the same noise and is checked by equality with the next, so nothing needs a
correction: the full target decides in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offload_runtime.config import SamplingParams
from offload_runtime.speculation.acceptance import Acceptance


class Window(Protocol):
    """The tokens that the device knows, `capacity` at the most."""

    capacity: int

    def upload(self, known: Sequence[int], end: int) -> None:
        """Begin anew with the last known tokens."""

    def read_all(self) -> tuple[int, list[int]]:
        """How many tokens are known, and the last of them."""


class FirstLevel(Protocol):
    """The small draft."""

    def start(self, params: SamplingParams) -> None:
        """Choose tokens this way from now on."""

    def prepare(self, tokens: Sequence[int]) -> None:
        """Bring the cache to `tokens` early, where it has room for them."""

    def room(self, length: int) -> int:
        """Most tokens that can be proposed behind `length`."""

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Bring the cache to all of `tokens` but the last two."""

    def steps(self, count: int, *, longest: int) -> None:
        """Enqueue `count` guesses behind the window's end, which is at most `longest`."""

    def learned(self, newest: Sequence[int]) -> None:
        """Steps have written the keys of `newest`, the tokens behind those that the cache had caught up to."""


class MiddleLevel(Protocol):
    """The target over its retrieved cache."""

    @property
    def counts(self) -> tuple[int, int]:
        """Steps since `start`, and proposals that they accepted. Waits for the device."""

    def start(self, params: SamplingParams) -> None:
        """Choose tokens this way from now on, for another sequence."""

    def begin(self, length: int, count: int) -> bool:
        """Steps will put up to `count` tokens behind `length`; whether chunks must be chosen anew."""

    def step(self, num_proposals: int, *, refresh: bool) -> None:
        """Enqueue one verification that moves the window's end."""


class TriForceProposer:
    """Proposes what draft and middle level agree on.

    Args:
        window: Shared by both levels.
        middle: The target over retrieved chunks.
        draft: The small model; None lets the middle level decode by itself, a token a step.
        gamma_draft: Tokens that the draft proposes to each step of the middle level.
        refresh_steps: The chunks are chosen anew by the queries of every so many steps.
        capacity_tokens: Of the target's cache.
    """

    name = "middle"
    # The first step of a draft feeds two tokens, and a window without a draft needs one.
    _KNOWN_TOKENS = 2

    def __init__(
        self, window: Window, middle: MiddleLevel, draft: FirstLevel | None, *, gamma_draft: int, refresh_steps: int,
        capacity_tokens: int,
    ) -> None:  # fmt: skip
        assert refresh_steps > 0 and (gamma_draft > 0) == (draft is not None)
        self._window = window
        self._middle = middle
        self._draft = draft
        self._gamma = gamma_draft
        self._refresh_steps = refresh_steps
        self._capacity_tokens = capacity_tokens
        self._num_steps = 0

    def start(self, params: SamplingParams) -> None:
        self._middle.start(params)
        if self._draft is not None:
            self._draft.start(params)
        self._num_steps = 0

    def prepare(self, tokens: Sequence[int]) -> None:
        if self._draft is not None:
            self._draft.prepare(tokens)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Run both levels until they agree on `count` tokens; the host reads the window a few times on the way."""
        length = len(tokens)
        # The last step may write the keys of proposals beyond what is asked for.
        count = min(count, self._capacity_tokens - length - self._gamma - 1)
        count = min(count, self._window.capacity - self._KNOWN_TOKENS - self._gamma - 1)
        if self._draft is not None:
            count = min(count, self._draft.room(length) - self._gamma - 1)
        if count <= 0:
            return []
        grown = self._middle.begin(length, count + self._gamma + 1)
        if self._draft is not None:
            self._draft.catch_up(tokens)
        known = list(tokens[-self._KNOWN_TOKENS :])
        self._window.upload(known, length)
        end, said = length, known
        refresh = grown
        while end < length + count:
            longest = end
            for _ in range(max(1, (length + count - end) // (self._gamma + 1))):
                if self._draft is not None:
                    self._draft.steps(self._gamma, longest=longest)
                self._middle.step(self._gamma, refresh=refresh or self._num_steps % self._refresh_steps == 0)
                self._num_steps += 1
                longest += self._gamma + 1
                refresh = False
            end, said = self._window.read_all()
        proposals = said[len(known) :]
        if self._draft is not None:
            self._draft.learned(said[: end - length])
        proposals = proposals[:count]
        bad = next((index for index, token in enumerate(proposals) if token < 0), len(proposals))
        return proposals[:bad]  # a level with NaN logits has nothing to say

    def counts(self) -> Sequence[Acceptance]:
        """What the middle level decided about the draft's proposals, those behind what was asked for included."""
        if self._draft is None:
            return ()
        steps, accepted = self._middle.counts
        return (Acceptance("draft", "middle", steps, steps * self._gamma, accepted),)
