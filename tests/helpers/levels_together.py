"""Rounds of several sequences on a loaded runtime, each asked for its own number of tokens, together or one alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from offload_runtime.engine import Runtime
from offload_runtime.params import SamplingParams
from offload_runtime.runners.retrieval_verifier import RetrievalVerifier
from offload_runtime.speculation import (
    Acceptance,
    DraftRequest,
    Proposal,
    Proposer,
    TriForceProposer,
    drafting,
)
from tests.helpers.sampling import Decoder, join_all, numbered, run_step


@dataclass(frozen=True)
class Task:
    """One sequence: `count` new tokens behind a prompt, in rounds of up to `gamma` proposals, or `gammas` of each."""

    prompt: list[int]
    count: int
    gamma: int
    gammas: tuple[int, ...] = ()

    def most(self, number: int) -> int:
        """Proposals of the round of this number."""
        return self.gammas[number] if self.gammas else self.gamma


@dataclass
class Played:
    """What became of a sequence: its tokens, the proposals of every round, what the inner levels counted."""

    tokens: list[int]
    proposals: list[list[int]] = field(default_factory=list)
    counts: tuple[Acceptance, ...] = ()


class Recorder:
    """A proposer that keeps what another one says."""

    def __init__(self, inner: Proposer, played: Mapping[int, Played]) -> None:
        self.name = inner.name
        self.join, self.prepare, self.counts = inner.join, inner.prepare, inner.counts
        self._inner, self._played = inner, played

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        answers = self._inner.propose(requests)
        for request, answer in zip(requests, answers, strict=True):
            assert len(answer) <= request.gamma and answer.is_chain
            self._played[request.slot].proposals.append(list(answer.tokens))
        return answers

    def ahead(self, pending: Callable[[], bool]) -> None:
        self._inner.ahead(pending)


def play(
    runtime: Runtime, tasks: Mapping[int, Task], params: SamplingParams, *, num_sequences: int
) -> dict[int, Played]:
    """Decode these sequences to their ends, each with the noise of its number."""
    target, proposer = runtime.parts.target.runner, runtime.parts.proposer
    played = {sequence: Played([]) for sequence in tasks}
    join_all(proposer, numbered(params, num_sequences))
    for sequence, task in tasks.items():
        target.cache.truncate(sequence, 0)
        decoder = Decoder(target, proposer, params, slot=sequence)
        first = decoder.first_token(target.prefill(sequence, task.prompt))
        proposer.prepare(sequence, task.prompt)
        played[sequence].tokens.append(first)
    for number in count():
        requests = [
            DraftRequest(sequence, task.prompt + played[sequence].tokens, min(task.most(number), missing - 1))
            for sequence, task in tasks.items()
            if (missing := task.count - len(played[sequence].tokens)) > 0
        ]
        if not requests:
            break
        rounds = run_step(target, params, Recorder(proposer, played), requests)
        for request, one in zip(requests, rounds, strict=True):
            played[request.slot].tokens += one.tokens
    for sequence in tasks:
        played[sequence].counts = tuple(proposer.counts(sequence))
        target.cache.truncate(sequence, 0)
    return played


def verifier_of(runtime: Runtime) -> RetrievalVerifier:
    """The retrieval verifier."""
    proposer = drafting(runtime.parts.proposer)
    assert isinstance(proposer, TriForceProposer) and isinstance(proposer.verifier, RetrievalVerifier)
    return proposer.verifier


def stored(runtime: Runtime, sequence: int) -> list[torch.Tensor]:
    """All that the levels hold of a sequence: keys and values of target and draft, retrieved chunks, their places."""
    target, draft, chunks = runtime.parts.target, runtime.parts.draft, verifier_of(runtime).cache.chunks
    layers = range(runtime.config.num_layers)
    found = [target.runner.cache.store(layer).data[sequence] for layer in layers]
    if draft is not None:
        found += [
            draft.runner.cache.store(layer).data[sequence] for layer in range(draft.runner.decoder.config.num_layers)
        ]
    for layer in layers:
        found += [chunks.blocks(layer).data[sequence], chunks.resident[layer, sequence]]
    return [tensor.clone() for tensor in found]
