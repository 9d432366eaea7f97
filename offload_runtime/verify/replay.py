"""Generations with the logits behind every token, for proofs: what was said, and what the target thought of it.

They run through the runtime's own token loop; only the target is replaced by one that keeps its logits, and the
proposer by the one under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch

from offload_runtime.config import SamplingParams
from offload_runtime.engine.runtime import Runtime
from offload_runtime.engine.traced import TracedTarget
from offload_runtime.kv import KVCache
from offload_runtime.model import Window
from offload_runtime.runners import ModelRunner
from offload_runtime.sampling import sample
from offload_runtime.speculation import (
    Acceptance,
    DraftProposer,
    NgramProposer,
    NoProposer,
    Proposal,
    Proposer,
    TreeDraftProposer,
    TriForceProposer,
    Turn,
    drafting,
)

# Of the windows of a script with room for trees.
_CHAIN_SHARE = 0.25


class ScriptedProposer:
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

    def families(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return ("chain", "tree")

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        assert num_sequences == 1, "the script is one sequence's"

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        return [self._propose(turn) for turn in turns]

    def ahead(self, pending: Callable[[], bool]) -> None:
        pass

    def _propose(self, turn: Turn) -> Proposal:
        chain = self._guess(len(turn.tokens), self._random.randint(1, turn.longest_chain))
        room = turn.most_nodes - len(chain)
        if turn.tree_nodes is None or room <= 0 or self._random.random() < _CHAIN_SHARE:
            return Proposal.chain(chain, self.name)
        paths = [(chain, self.name)]
        for _ in range(self._random.randint(0, room)):
            at = self._random.randrange(turn.gamma)
            branch = [*chain[:at], self._random.randrange(self._vocab_size)]
            branch += self._guess(len(turn.tokens) + len(branch), turn.gamma - len(branch))
            del branch[self._random.randint(1, len(branch)) :]
            paths.insert(self._random.randint(0, len(paths)), (branch, self.name))
        return Proposal.of_paths(paths, turn.most_nodes)

    def _guess(self, start: int, count: int) -> list[int]:
        return [
            token if self._random.random() < self._accuracy else self._random.randrange(self._vocab_size)
            for token in self._script[start : start + count]
        ]

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        return ()


class RecordingCache:
    """What a token loop does to a target's cache, of which a recording target hears what is committed.

    Args:
        cache: The target's.
        on_path: Called with the rows of a window that are committed.
    """

    def __init__(self, cache: KVCache, on_path: Callable[[Sequence[int]], None]) -> None:
        self._cache, self._on_path = cache, on_path
        self.length, self.truncate, self.max_tokens_with_draft = (
            cache.length,
            cache.truncate,
            cache.max_tokens_with_draft,
        )

    @property
    def pinned_bytes(self) -> int:
        """As `KVCache.pinned_bytes`."""
        return self._cache.pinned_bytes

    def commit_path(self, sequence: int, rows: Sequence[int]) -> None:
        """As `KVCache.commit_path`."""
        self._on_path(rows)
        self._cache.commit_path(sequence, rows)


class RecordingTarget:
    """Passes prompts and windows on to a runner and keeps, on the host, the row of logits behind each new token.

    Which rows of a window those are shows in what is committed to the cache. One sequence only.
    """

    def __init__(self, runner: ModelRunner | TracedTarget) -> None:
        self._runner = runner
        self._rows: list[torch.Tensor] = []  # each [T, V] in the model's dtype, on the host
        self.cache = RecordingCache(runner.cache, self._keep)
        self._window: torch.Tensor | None = None  # [T, V] of the last pass, on the host
        self.streamer = runner.streamer

    def prefill(
        self, sequence: int, tokens: Sequence[int], on_layer: Callable[[int, int], None] | None = None
    ) -> torch.Tensor:
        """As `ModelRunner.prefill`."""
        logits = self._runner.prefill(sequence, tokens, on_layer)
        self._rows.append(logits.to("cpu", copy=True))
        return logits

    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        """As `ModelRunner.verify`, but waits for the device."""
        assert list(sequences) == [0], "one sequence is recorded, the first"
        logits = self._runner.verify(windows, sequences)
        # At once, so that the next pass finds the device memory that it would find without a recording.
        self._window = logits[0].cpu()
        return logits

    def rows(self) -> torch.Tensor:
        """[N, V] in the model's dtype, on the host: one row for every token so far."""
        return torch.cat(self._rows)

    def _keep(self, rows: Sequence[int]) -> None:
        assert self._window is not None, "a window is committed once"
        self._rows.append(self._window[list(rows)])  # a copy, or one row would keep its whole window alive
        self._window = None


@dataclass(frozen=True)
class Transcript:
    """One generation.

    Attributes:
        tokens: What was said.
        rows: [N, V] in the model's dtype, on the host: the target's logits that each token was chosen from.
        passes: Passes of the target after prefill.
    """

    tokens: list[int]
    rows: torch.Tensor
    passes: int


def transcribe(
    runtime: Runtime, prompt: Sequence[int], sampling: SamplingParams, *, count: int, proposer: Proposer | None = None,
    gamma: int | None = None, tree_nodes: int | None = None,
) -> Transcript:  # fmt: skip
    """Generate `count` tokens and keep the logits behind them: count * V * itemsize bytes of host memory.

    Args:
        runtime: Its current generation, if any, ends.
        prompt: Token ids.
        sampling: How tokens are chosen.
        count: New tokens; the end-of-sequence token does not end it.
        proposer: Guesses in place of the runtime's own; None decodes plainly, one token a pass.
        gamma: Most tokens proposed per pass in a row, only with a proposer.
        tree_nodes: The same in all, only with one that proposes branches.
    """
    with _observed(runtime, proposer) as target:
        result = runtime.generate(
            list(prompt), max_new_tokens=count, temperature=sampling.temperature, top_k=sampling.top_k,
            top_p=sampling.top_p, min_p=sampling.min_p, seed=sampling.seed, gamma=gamma,
            speculate=proposer is not None, ignore_eos=True, tree_nodes=tree_nodes,
        )  # fmt: skip
        return Transcript(result.tokens, target.rows(), result.stats.passes)


@contextmanager
def _observed(runtime: Runtime, proposer: Proposer | None) -> Iterator[RecordingTarget]:
    """Let the runtime work with a recording target and another proposer, and give it its own back afterwards."""
    own = runtime._parts
    target = RecordingTarget(own.target)
    # The token loop asks no more of its target than the recording one has.
    runtime._parts = replace(own, target=cast(ModelRunner, target), proposer=proposer or own.proposer)
    try:
        yield target
    finally:
        runtime._parts = own


def forced_rows(runtime: Runtime, prompt: Sequence[int], answers: Iterable[Sequence[int]]) -> Iterator[torch.Tensor]:
    """The logits behind every token of given answers, from one plain pass over each: nothing is proposed or accepted.

    Yields [N, V] in the model's dtype, on the host, for an answer of N tokens. Ends the runtime's current generation;
    no other may begin before the last answer.
    """
    # Afterwards the target's cache holds the prompt and nothing else.
    first = transcribe(runtime, prompt, SamplingParams(), count=1).rows
    target = runtime._parts.target
    assert target.cache.length(0) == len(prompt)
    for answer in answers:
        behind = target.verify([Window(tuple(answer[:-1]))], [0])[0]
        yield torch.cat([first, behind.cpu()])


def loaded_proposers(runtime: Runtime) -> dict[str, Proposer]:
    """The proposers to test on a runtime: n-gram lookup, and the runtime's own if it is another."""
    own = drafting(runtime._parts.proposer)
    names: dict[type, str] = {DraftProposer: "draft", TreeDraftProposer: "draft", TriForceProposer: "triforce"}
    if type(own) in names:
        return {"ngram": NgramProposer(), names[type(own)]: own}
    assert isinstance(own, NgramProposer | NoProposer), f"{type(own).__name__} would go untested"
    return {"ngram": NgramProposer()}


def differing_rows(left: torch.Tensor, right: torch.Tensor) -> list[int]:
    """Indices of rows [N, V] (one dtype, on the host) that are not the same to the last bit."""
    bits = torch.int16 if left.element_size() == 2 else torch.int32
    differ = (left.view(bits) != right.view(bits)).any(-1)
    indices: list[int] = differ.nonzero().flatten().tolist()
    return indices


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter one included; None when all are equal."""
    shorter = min(len(left), len(right)) if len(left) != len(right) else None
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), shorter)


def resample(rows: torch.Tensor, sampling: SamplingParams, first_position: int) -> list[int]:
    """The tokens that rows of logits [N, V] stand for, at `first_position` and the positions after it."""
    positions = torch.arange(first_position, first_position + rows.shape[0], device=rows.device)
    tokens: list[int] = sample(rows, sampling, positions, torch.zeros_like(positions)).tolist()
    return tokens
