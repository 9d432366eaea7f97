"""One round of speculation: propose, verify in one pass of the target, accept by equality.

The target's own sample at each position is *the* token (shared-noise sampling); a proposal only decides whether the
pass could already use it. So the output is the same for every proposer, and none at all. A tree is walked from its root
by the target's samples: the child that says what the target says behind a node, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from offload_runtime.config import SamplingParams
from offload_runtime.errors import NumericalError
from offload_runtime.model import Window
from offload_runtime.sampling import sample
from offload_runtime.speculation.proposer import Proposer, Turn
from offload_runtime.speculation.tree import Proposal


class Cache(Protocol):
    """What a round needs of the target's cache."""

    @property
    def max_tokens_with_draft(self) -> int:
        """Most tokens of a sequence, tentative ones included."""

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""

    def commit_path(self, sequence: int, rows: Sequence[int]) -> None:
        """Make these rows of a sequence's window part of it: the path from its root, in order."""


class Target(Protocol):
    """What a round needs of the target."""

    @property
    def cache(self) -> Cache:
        """Where its keys and values are."""

    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        """Logits [B, T, V] of one pass over a window per sequence."""


@dataclass(frozen=True)
class Round:
    """What one pass gave one sequence: `tokens` are the target's, and `path` the nodes of the proposal that agreed."""

    tokens: list[int]
    proposal: Proposal
    path: tuple[int, ...]

    @property
    def num_proposed(self) -> int:
        """Proposals that were verified, all branches included."""
        return len(self.proposal)

    @property
    def num_accepted(self) -> int:
        """Of these, those that agreed: new tokens but for the target's last one."""
        return len(self.path)

    @property
    def accepted_sources(self) -> list[str]:
        """Who proposed what was accepted, token by token."""
        return [self.proposal.sources[node] for node in self.path]


def accepted_path(proposal: Proposal, samples: Sequence[int]) -> list[int]:
    """The nodes that equal the target's samples, from the committed end on.

    Args:
        proposal: Chain or tree.
        samples: The target's token behind the committed end, then behind each node.
    """
    path: list[int] = []
    last = -1
    # Once through is enough: children come after their parents, and no two of them say the same.
    for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        if parent == last and token == samples[last + 1]:
            path.append(node)
            last = node
    return path


Watch = Callable[[torch.Tensor], Callable[[], bool]]


def still_computing(logits: torch.Tensor) -> Callable[[], bool]:
    """Whether a pass that was just enqueued on the current stream is still running; asking waits for nothing.

    On the CPU it never is: a pass is over when its logits are there, so what is drafted then delays the next one.
    """
    if not logits.is_cuda:
        return lambda: False
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(logits.device))
    return lambda: not done.query()


def play_round(
    target: Target, params: SamplingParams, proposer: Proposer, turns: Sequence[Turn], *,
    watch: Watch = still_computing,
) -> list[Round]:  # fmt: skip
    """Propose for all sequences at once, verify all in one pass of the target, and commit for each what agrees.

    While the pass runs the proposer goes on.

    Args:
        target: Verifies windows.
        params: How it chooses tokens.
        proposer: Guesses.
        turns: One of each sequence that takes part.
        watch: From the logits of a pass to the question whether it is still running.

    Returns:
        For each turn at least one new token: those accepted and the target's next one.

    Raises:
        NumericalError: The target's logits of a sequence are NaN; nothing was committed.
    """
    cache = target.cache
    for turn in turns:
        committed = cache.length(turn.sequence)
        assert committed == len(turn.tokens) - 1, "the target must have seen all tokens but the last"
    proposals = _proposals(proposer, [_fitting(turn, cache.max_tokens_with_draft) for turn in turns])
    windows = [_window(turn.tokens[-1], proposal) for turn, proposal in zip(turns, proposals, strict=True)]
    logits = target.verify(windows, [turn.sequence for turn in turns])  # [B, T, V]
    if any(proposals):
        proposer.ahead(watch(logits))
    samples = _sample_windows(logits, params, turns, proposals)
    rounds = []
    for turn, proposal, row in zip(turns, proposals, samples, strict=True):
        path = accepted_path(proposal, row)
        new_tokens = [row[0], *(row[node + 1] for node in path)]
        _require_numbers(new_tokens, len(turn.tokens))
        rounds.append(Round(new_tokens, proposal, tuple(path)))
    for turn, played in zip(turns, rounds, strict=True):
        cache.commit_path(turn.sequence, [0, *(node + 1 for node in played.path)])
    return rounds


def _fitting(turn: Turn, max_tokens_with_draft: int) -> Turn:
    """A turn whose tree the cache has room for: close to the end of a context its branches may not all fit."""
    room = max_tokens_with_draft - len(turn.tokens)
    if turn.tree_nodes is None or turn.tree_nodes <= room:
        return turn
    return replace(turn, tree_nodes=max(room, 0))


def _proposals(proposer: Proposer, turns: Sequence[Turn]) -> list[Proposal]:
    """What is proposed to each turn; who may not have any proposals is not asked about."""
    asked = [turn for turn in turns if turn.gamma > 0 and turn.most_nodes > 0]
    answers = proposer.propose(asked) if asked else []
    proposed = {turn.sequence: proposal for turn, proposal in zip(asked, answers, strict=True)}
    for turn in asked:
        proposal = proposed[turn.sequence]
        deepest = max(proposal.depths, default=0)
        assert len(proposal) <= turn.room and deepest <= turn.gamma + turn.beside, "too many proposals"
    return [proposed.get(turn.sequence, Proposal()) for turn in turns]


def _window(root: int, proposal: Proposal) -> Window:
    """The last known token with what is proposed behind it; only branches make it a tree."""
    tokens = (root, *proposal.tokens)
    return Window(tokens) if proposal.is_chain else Window(tokens, (-1, *(parent + 1 for parent in proposal.parents)))


def _sample_windows(
    logits: torch.Tensor, params: SamplingParams, turns: Sequence[Turn], proposals: Sequence[Proposal]
) -> list[list[int]]:
    """The token behind each row of logits [B, T, V], with the noise of its own position; -1 for NaN.

    Siblings stand at the same position, and so share its noise.
    """
    first, sequences = [len(turn.tokens) for turn in turns], [turn.sequence for turn in turns]
    if all(proposal.is_chain for proposal in proposals):
        return _sample_rows(logits, params, first, sequences)
    width = logits.shape[1]
    positions: list[int] = []
    for start, proposal in zip(first, proposals, strict=True):
        own = [start, *(start + depth for depth in proposal.depths)]
        positions += own + [start] * (width - len(own))
    return _sample_at(logits, params, _upload(positions, logits.device), sequences)


def _sample_rows(
    logits: torch.Tensor, params: SamplingParams, first_positions: Sequence[int], sequences: Sequence[int]
) -> list[list[int]]:
    """Tokens at each sequence's first position and those after it, one for each row of logits [B, T, V]; -1 for NaN."""
    offsets = torch.arange(logits.shape[1], device=logits.device)
    return _sample_at(logits, params, torch.cat([offsets + first for first in first_positions]), sequences)


def _sample_at(
    logits: torch.Tensor, params: SamplingParams, positions: torch.Tensor, sequences: Sequence[int]
) -> list[list[int]]:
    """Tokens at positions [B * T], one for each row of logits [B, T, V]; -1 for NaN. Waits for the device."""
    batch, count, vocab_size = logits.shape
    owners = torch.cat([torch.full_like(positions[:count], sequence) for sequence in sequences])
    tokens: list[int] = sample(logits.reshape(batch * count, vocab_size), params, positions, owners).tolist()
    return [tokens[row * count : (row + 1) * count] for row in range(batch)]


def _upload(numbers: list[int], device: torch.device) -> torch.Tensor:
    """int64 on the device, on the current stream; without page-locked memory the host would wait for the pass."""
    there = torch.tensor(numbers)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there


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
        watch: As for `play_round`.
    """

    def __init__(
        self, target: Target, proposer: Proposer, params: SamplingParams, *, sequence: int = 0,
        watch: Watch = still_computing,
    ) -> None:  # fmt: skip
        self._target = target
        self._proposer = proposer
        self._params = params
        self._sequence = sequence
        self._watch = watch

    def prepare(self, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """While a prompt is read: have what would hold up the first proposals done.

        Args:
            tokens: The prompt.
            logits: Of the pass that reads it.
        """
        self._proposer.prepare(self._sequence, tokens)
        self._proposer.ahead(self._watch(logits))

    def first_token(self, logits: torch.Tensor) -> int:
        """The token that follows a prefill, from the last row's logits [1, V]."""
        position = self._target.cache.length(self._sequence)
        tokens = _sample_rows(logits[None], self._params, [position], [self._sequence])[0]
        _require_numbers(tokens, position)
        return tokens[0]

    def round(self, tokens: Sequence[int], gamma: int, tree_nodes: int | None = None) -> Round:
        """Propose up to `gamma` tokens in a row behind `tokens`, verify them in one pass and commit what agrees.

        Args:
            tokens: The whole sequence so far; its last token is not in the target's cache yet.
            gamma: Most tokens to propose in a row.
            tree_nodes: Most tokens to propose in all; None for a chain.

        Returns:
            At least one new token: those accepted and the target's next one.

        Raises:
            NumericalError: The target's logits are NaN; nothing was committed.
        """
        turn = Turn(self._sequence, tokens, gamma, tree_nodes)
        return play_round(self._target, self._params, self._proposer, [turn], watch=self._watch)[0]
