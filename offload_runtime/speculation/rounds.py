"""One round of speculation: propose, verify in one pass of the target, accept by equality.

The target's own sample at each position is *the* token (shared-noise sampling); a proposal only decides whether the
pass could already use it. So the output is the same for every proposer, and none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload_runtime.config import SamplingParams
from offload_runtime.errors import NumericalError
from offload_runtime.model import Window
from offload_runtime.sampling import sample
from offload_runtime.speculation.proposers import Proposer, Turn


class Cache(Protocol):
    """What a round needs of the target's cache."""

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""

    def commit(self, sequence: int, count: int) -> None:
        """Make tentative tokens part of a sequence."""


class Target(Protocol):
    """What a round needs of the target."""

    @property
    def cache(self) -> Cache:
        """Where its keys and values are."""

    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        """Logits [B, T, V] of one pass over a window per sequence."""


@dataclass(frozen=True)
class Round:
    """What one pass gave one sequence: `tokens` are the target's, `num_proposed` and `num_accepted` the proposals."""

    tokens: list[int]
    num_proposed: int
    num_accepted: int


def count_accepted(proposals: Sequence[int], samples: Sequence[int]) -> int:
    """How many leading proposals equal the target's samples."""
    for index, (proposal, token) in enumerate(zip(proposals, samples, strict=False)):
        if proposal != token:
            return index
    return min(len(proposals), len(samples))


def play_round(target: Target, params: SamplingParams, proposer: Proposer, turns: Sequence[Turn]) -> list[Round]:
    """Propose for all sequences at once, verify all in one pass of the target, and commit for each what agrees.

    Returns:
        For each turn at least one new token: those accepted and the target's next one.

    Raises:
        NumericalError: The target's logits of a sequence are NaN; nothing was committed.
    """
    cache = target.cache
    for turn in turns:
        committed = cache.length(turn.sequence)
        assert committed == len(turn.tokens) - 1, "the target must have seen all tokens but the last"
    asked = [turn for turn in turns if turn.gamma > 0]
    answers = proposer.propose(asked) if asked else []
    guessed = {turn.sequence: guesses for turn, guesses in zip(asked, answers, strict=True)}
    proposals = [guessed.get(turn.sequence, []) for turn in turns]
    windows = [Window((turn.tokens[-1], *guesses)) for turn, guesses in zip(turns, proposals, strict=True)]
    logits = target.verify(windows, [turn.sequence for turn in turns])  # [B, T, V]
    first = [len(turn.tokens) for turn in turns]
    samples = _sample_rows(logits, params, first, [turn.sequence for turn in turns])
    rounds = []
    for turn, guesses, row in zip(turns, proposals, samples, strict=True):
        accepted = count_accepted(guesses, row)
        new_tokens = row[: accepted + 1]
        _require_numbers(new_tokens, len(turn.tokens))
        rounds.append(Round(new_tokens, len(guesses), accepted))
    for turn, played in zip(turns, rounds, strict=True):
        cache.commit(turn.sequence, len(played.tokens))
    return rounds


def _sample_rows(
    logits: torch.Tensor, params: SamplingParams, first_positions: Sequence[int], sequences: Sequence[int]
) -> list[list[int]]:
    """Tokens at each sequence's first position and those after it, one for each row of logits [B, T, V]; -1 for NaN."""
    batch, count, vocab_size = logits.shape
    offsets = torch.arange(count, device=logits.device)
    positions = torch.cat([offsets + first for first in first_positions])
    owners = torch.cat([torch.full_like(offsets, sequence) for sequence in sequences])
    tokens: list[int] = sample(logits.reshape(batch * count, vocab_size), params, positions, owners).tolist()
    return [tokens[row * count : (row + 1) * count] for row in range(batch)]


def _require_numbers(tokens: Sequence[int], first_position: int) -> None:
    """Of tokens that plain decoding would choose too: what follows a rejected proposal is nobody's output."""
    if any(token < 0 for token in tokens):
        raise NumericalError(
            f"the target's logits at position {first_position + tokens.index(-1)} are NaN: the checkpoint is "
            "damaged, or its weights overflow this dtype (try --dtype bf16 or fp32)"
        )


class SpeculativeDecoder:
    """Decodes one sequence round by round.

    Args:
        target: Verifies windows; its committed tokens are all of `tokens` but the last.
        proposer: Guesses.
        params: How the target, and with the same noise the draft, choose tokens.
        sequence: Batch row in the target's cache, and the noise's sequence.
    """

    def __init__(self, target: Target, proposer: Proposer, params: SamplingParams, *, sequence: int = 0) -> None:
        self._target = target
        self._proposer = proposer
        self._params = params
        self._sequence = sequence

    def first_token(self, logits: torch.Tensor) -> int:
        """The token that follows a prefill, from the last row's logits [1, V]."""
        position = self._target.cache.length(self._sequence)
        tokens = _sample_rows(logits[None], self._params, [position], [self._sequence])[0]
        _require_numbers(tokens, position)
        return tokens[0]

    def round(self, tokens: Sequence[int], gamma: int) -> Round:
        """Propose up to `gamma` tokens behind `tokens`, verify them in one pass and commit what agrees.

        Args:
            tokens: The whole sequence so far; its last token is not in the target's cache yet.
            gamma: Most tokens to propose.

        Returns:
            At least one new token: those accepted and the target's next one.

        Raises:
            NumericalError: The target's logits are NaN; nothing was committed.
        """
        return play_round(self._target, self._params, self._proposer, [Turn(self._sequence, tokens, gamma)])[0]
