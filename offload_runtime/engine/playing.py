"""A generation's rounds: what is asked of each is fixed or chosen, and what comes of it is learnt from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offload_runtime.config import SamplingParams
from offload_runtime.engine.parts import StreamParts
from offload_runtime.engine.windows import ChosenWindows, WindowSize
from offload_runtime.speculation import (
    PLAIN,
    Choice,
    Proposer,
    Round,
    Turn,
    drafting,
    play_round,
    size_for,
    size_within,
)
from offload_runtime.speculation.ngram import NGRAM

# A tree so deep is hardly ever cut where an answer ends.
_DEEP_ENOUGH = 16


@dataclass(frozen=True)
class Text:
    """A sequence that takes part in a round: all of its tokens, and how many new ones it may still have."""

    sequence: int
    tokens: Sequence[int]
    remaining: int

    @property
    def most_in_a_row(self) -> int:
        """Proposals behind each other: the target's own token always comes on top."""
        return self.remaining - 1


class RoundPlayer:
    """Plays the rounds of a generation.

    Args:
        parts: The runtime's machinery.
        proposer: Guesses.
        sampling: How tokens are chosen.
        windows: What to propose.
    """

    def __init__(
        self, parts: StreamParts, proposer: Proposer, sampling: SamplingParams, windows: WindowSize | ChosenWindows
    ) -> None:
        self._parts, self._proposer, self._sampling, self._windows = parts, proposer, sampling, windows
        self.window = ""  # of the last round, in words

    def play(self, texts: Sequence[Text]) -> list[Round]:
        """One round of these texts. Arguments and errors as of `play_round`."""
        if isinstance(self._windows, WindowSize):
            return self._play(texts, self._windows, self._fixed(self._windows), family=None)
        room = max(text.most_in_a_row for text in texts)
        limits = self._limits(self._windows.limits, texts) if room else {}
        started_s = self._parts.clock()
        # At the end of an answer there may be room for the target's own token alone.
        choice = self._parts.controller.choose(self._sampling, limits, **_sizes(texts)) if room else PLAIN
        window = self._windows.window(choice)
        rounds = self._play(texts, window, choice, family=choice.mode)
        seconds = self._parts.clock() - started_s
        self._learn(choice, window, texts, rounds, seconds)
        return rounds

    def _learn(
        self, choice: Choice, window: WindowSize, texts: Sequence[Text], rounds: Sequence[Round], seconds: float
    ) -> None:
        """Tell the controller how long a round took, and what it brought of the texts whose windows nothing cut short:
        it takes as long as the largest window."""
        able = [len(texts) == 1 or self._is_able(text, choice.mode) for text in texts]
        whole = [
            can and self._was_whole(text, played, window) for can, text, played in zip(able, texts, rounds, strict=True)
        ]
        told, size = [played for played, fits in zip(rounds, whole, strict=True) if fits], choice.size
        if not told and choice.mode == "chain":  # what was cut tells about smaller windows
            told = [played for played, can in zip(rounds, able, strict=True) if can and _drafted(played)]
            size = min((size_within(_drafted(played)) for played in told), default=size)
        self._parts.controller.observe(
            self._sampling, replace(choice, size=size), [_own(played, choice, size) for played in told],
            tokens=sum(len(played.tokens) for played in rounds) / len(rounds), seconds=seconds if any(whole) else None,
            **_sizes(texts),
        )  # fmt: skip

    def _limits(self, limits: Mapping[str, int], texts: Sequence[Text]) -> dict[str, int]:
        """By family that has anything to propose its largest window, as far as an answer and the cache have room.

        A batch is done with its longest answer, so one behind which a draft has no room is not kept waiting for others.
        """
        able = self._proposer.families({text.sequence: text.tokens for text in texts})
        most = max(text.remaining for text in texts)
        longest = [text for text in texts if text.remaining == most]
        # The last chain of an answer is cut where the answer ends: better than another pass for what is missing.
        rooms = {"chain": size_for(max(text.most_in_a_row for text in texts))}
        most_nodes = max(self._most_nodes(text) for text in texts)
        return {
            family: min(limits[family], rooms.get(family, most_nodes))
            for family in able
            if family in limits and (len(texts) == 1 or all(self._is_able(text, family) for text in longest))
        }

    def _most_nodes(self, text: Text) -> int:
        """Proposals behind a text that the target's cache has places for."""
        return self._parts.target.cache.max_tokens_with_draft - len(text.tokens)

    def _was_whole(self, text: Text, played: Round, window: WindowSize) -> bool:
        """Whether nothing cut a window short: neither the end of the answer nor that of a cache."""
        if window.tree_nodes is not None:
            return text.most_in_a_row >= min(_DEEP_ENOUGH, window.gamma) and self._most_nodes(text) >= window.tree_nodes
        return text.most_in_a_row >= window.gamma and _drafted(played) in (0, window.gamma)

    def _is_able(self, text: Text, family: str) -> bool:
        """Whether a draft that is able behind some of several texts has room behind this one."""
        return not Choice(family, 1).drafts or family in drafting(self._proposer).families({text.sequence: text.tokens})

    def _play(self, texts: Sequence[Text], window: WindowSize, choice: Choice, *, family: str | None) -> list[Round]:
        turns = [
            Turn(
                text.sequence,
                text.tokens,
                min(window.gamma, text.most_in_a_row),
                window.tree_nodes,
                family,
                thrifty=family is not None,
                beside=max(0, min(window.beside, text.most_in_a_row - window.gamma)),
            )
            for text in texts
        ]
        rounds = play_round(self._parts.target, self._sampling, self._proposer, turns)
        self.window = str(choice if any(turn.gamma for turn in turns) else PLAIN)
        if self._parts.traced is not None:
            self._parts.traced.decided(rounds, self.window)
        return rounds

    def _fixed(self, window: WindowSize) -> Choice:
        """What a window that was asked for would be if it had been chosen."""
        if not window.gamma:
            return PLAIN
        able = self._proposer.families({})
        if window.tree_nodes is not None and "chain" in able:
            return Choice("tree", window.tree_nodes)
        return Choice("chain", window.gamma) if "chain" in able else Choice("ngram", window.tree_nodes or window.gamma)


def _sizes(texts: Sequence[Text]) -> dict[str, int]:
    """What steps of these texts take their time by."""
    return {"num_sequences": len(texts), "context_tokens": max(len(text.tokens) for text in texts)}


def _drafted(played: Round) -> int:
    """Proposals of a draft, in a chain and the n-grams beside it."""
    return sum(source != NGRAM for source in played.proposal.sources)


def _own(played: Round, choice: Choice, size: int) -> Sequence[int]:
    """Which of the first `size` proposals were accepted; the n-grams beside a chain tell nothing about it."""
    if choice.mode != "chain":
        return played.path
    return [node for node in played.path if node < size and played.proposal.sources[node] != NGRAM]
