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
from offload_runtime.speculation.proposers import Proposer


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
        tokens = self._sample(logits, position)
        self._require_numbers(tokens, position)
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
        cache = self._target.cache
        committed = cache.length(self._sequence)
        assert committed == len(tokens) - 1, "the target must have seen all tokens but the last"
        proposals = self._proposer.propose(tokens, gamma) if gamma > 0 else []
        window = Window((tokens[-1], *proposals))
        logits = self._target.verify([window], [self._sequence])  # [1, T, V]
        samples = self._sample(logits[0], committed + 1)
        accepted = count_accepted(proposals, samples)
        new_tokens = samples[: accepted + 1]
        self._require_numbers(new_tokens, committed + 1)
        cache.commit(self._sequence, accepted + 1)
        return Round(new_tokens, len(proposals), accepted)

    def _sample(self, logits: torch.Tensor, first_position: int) -> list[int]:
        """Tokens at `first_position` and the positions after it, one for each row of logits [T, V]; -1 for NaN."""
        count = logits.shape[0]
        positions = torch.arange(first_position, first_position + count, device=logits.device)
        sequences = torch.full_like(positions, self._sequence)
        tokens: list[int] = sample(logits, self._params, positions, sequences).tolist()
        return tokens

    @staticmethod
    def _require_numbers(tokens: Sequence[int], first_position: int) -> None:
        """Of tokens that plain decoding would choose too: what follows a rejected proposal is nobody's output."""
        if any(token < 0 for token in tokens):
            raise NumericalError(
                f"the target's logits at position {first_position + tokens.index(-1)} are NaN: the checkpoint is "
                "damaged, or its weights overflow this dtype (try --dtype bf16 or fp32)"
            )
