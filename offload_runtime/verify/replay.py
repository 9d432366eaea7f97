"""Generations with the logits behind every token, for proofs: what was said, and what the target thought of it.

They run through the runtime's own token loop, with the proposer under test in place of its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch

from offload_runtime.config import GenerationParams, SamplingParams
from offload_runtime.engine.runtime import Runtime
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.speculation import NGRAM, DraftRequest, NgramProposer, Proposal, Proposer, drafting

# Of the windows of a script with room for trees.
_CHAIN_SHARE = 0.25


class ScriptedProposer(Proposer):
    """Proposes a known continuation, in windows of every length, each token wrong with probability `1 - accuracy`.

    So windows are accepted, cut and rolled back everywhere, however little a model's text can be guessed. Where there
    is room for more than a chain it also proposes wrong branches around it, in any order that a tree can have.

    Args:
        script: Prompt and continuation.
        vocab_size: Wrong tokens are drawn from it.
        accuracy: Probability of proposing the script's own token.
        seed: Of the mistakes and the lengths.
    """

    def __init__(self, script: Sequence[int], vocab_size: int, *, accuracy: float, seed: int) -> None:
        self._script = list(script)
        self._vocab_size = vocab_size
        self._accuracy = accuracy
        self._random = random.Random(seed)

    name = "script"

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return ("chain", "tree")

    def start(self, slots: Sequence[SamplingParams]) -> None:
        assert len(slots) == 1, "the script is one request's"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Proposal:
        chain = self._guess(len(request.tokens), self._random.randint(1, request.longest_chain))
        room = request.most_nodes - len(chain)
        if request.tree_nodes is None or room <= 0 or self._random.random() < _CHAIN_SHARE:
            return Proposal.chain(chain, self.name)
        paths = [(chain, self.name)]
        for _ in range(self._random.randint(0, room)):
            at = self._random.randrange(request.gamma)
            branch = [*chain[:at], self._random.randrange(self._vocab_size)]
            branch += self._guess(len(request.tokens) + len(branch), request.gamma - len(branch))
            del branch[self._random.randint(1, len(branch)) :]
            paths.insert(self._random.randint(0, len(paths)), (branch, self.name))
        return Proposal.of_paths(paths, request.most_nodes)

    def _guess(self, start: int, count: int) -> list[int]:
        return [
            token if self._random.random() < self._accuracy else self._random.randrange(self._vocab_size)
            for token in self._script[start : start + count]
        ]


@dataclass(frozen=True)
class Transcript:
    """One generation.

    Attributes:
        tokens: What was said.
        rows: [N, V] in the model's dtype, on the host: the target's logits that each token was chosen from.
        sampling: How they were chosen.
        first_position: Of the first token.
        passes: Passes of the target after prefill.
    """

    tokens: list[int]
    rows: torch.Tensor
    sampling: SamplingParams
    first_position: int
    passes: int

    @cached_property
    def foreign_tokens(self) -> int:
        """Tokens that are not what the host, sampling once more at absolute positions, makes of their logits."""
        again = resample(self.rows, self.sampling, self.first_position)
        return sum(a != b for a, b in zip_longest(again, self.tokens))


def transcribe(
    runtime: Runtime, prompt: Sequence[int], params: GenerationParams, proposer: Proposer | None = None
) -> Transcript:
    """Generate and keep the logits behind every token: tokens * V * itemsize bytes of host memory.

    Args:
        runtime: Its current generation, if any, ends.
        prompt: Token ids.
        params: What to generate; where tokens are counted it should ignore the end of the text.
        proposer: Guesses in place of the runtime's own; None decodes plainly, one token a pass.
    """
    rows: list[torch.Tensor] = []

    def keep(_: object, logits: torch.Tensor) -> None:
        # On the host at once, so that the next pass finds the device memory that it would find without a recording.
        rows.append(logits.to("cpu", copy=True))

    result = runtime.replay(list(prompt), params, proposer=proposer, on_logits=keep)
    return Transcript(result.tokens, torch.cat(rows), params.sampling, len(prompt), result.stats.passes)


def loaded_proposers(runtime: Runtime) -> dict[str, Proposer]:
    """The proposers to test on a runtime: n-gram lookup, and the runtime's own if it is another."""
    own = drafting(runtime.parts.proposer)
    proposers: dict[str, Proposer] = {NGRAM: NgramProposer()}
    if own.name not in (None, NGRAM):
        proposers["triforce" if own.name == "retrieval" else "draft"] = own
    return proposers


def differing_rows(left: torch.Tensor, right: torch.Tensor) -> list[int]:
    """Indices of rows [N, V] (one dtype, on the host) that are not the same to the last bit."""
    bits = torch.int16 if left.element_size() == 2 else torch.int32
    return (left.view(bits) != right.view(bits)).any(-1).nonzero().flatten().tolist()


def resample(rows: torch.Tensor, sampling: SamplingParams, first_position: int) -> list[int]:
    """The tokens that rows of logits [N, V] stand for, at `first_position` and the positions after it."""
    positions = torch.arange(first_position, first_position + rows.shape[0], device=rows.device)
    slots = SlotSampling.of([sampling], rows.device)
    return sample(rows, slots, positions, torch.zeros_like(positions)).tolist()
