"""Trees around a known continuation, which are accepted exactly as far as they are told to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.kv import DeviceKVCache, HostKVCache
from offload_runtime.params import SamplingParams
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import (
    Acceptance,
    DraftRequest,
    NgramProposer,
    Proposal,
    Proposer,
    StepResult,
)
from offload_runtime.speculation.ngram import Guesses
from tests.helpers.models import VOCAB_SIZE
from tests.helpers.sampling import Decoder, join_all, numbered, run_step


def pruned(tree: Proposal, count: int) -> Proposal:
    """The first `count` nodes: with every node the path to it stays."""
    return Proposal(tree.tokens[:count], tree.parents[:count], tree.sources[:count])


def of_paths(paths: Iterable[tuple[Sequence[int], str]], count: int) -> Proposal:
    """Paths with their sources, one joined to the other, until there are so many nodes."""
    tree = Proposal()
    for tokens, source in paths:
        tree = tree.joined(Proposal.chain(tokens, source), count)
    return tree


class Foreknown(NgramProposer):
    """N-grams of texts that go on as these do: they say so up to a depth that takes every value in turn, with a wrong
    branch behind each of the first tokens.

    Args:
        texts: Prompt and continuation of each sequence.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._texts, self.asked = texts, 0

    def guesses(self, request: DraftRequest, least: float) -> Guesses:
        self.asked += 1
        text, end = self._texts[request.slot], len(request.tokens)
        right = list(text[end : end + self.asked % 40])
        wrong = [[*right[:depth], token ^ 1, 5, 6] for depth, token in enumerate(right[:6])]
        tree = of_paths(((path[: request.gamma], "ngram") for path in [right, *wrong]), request.most_nodes)
        return Guesses(tree, [-1.0] * len(tree))


class Watched(Proposer):
    """Another proposer, of which is kept what it was asked for and what it proposed, round by round."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.name = inner, inner.name
        self.rounds: list[list[tuple[DraftRequest, Proposal]]] = []

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return self.inner.modes(texts)

    def join(self, slot: int, params: SamplingParams) -> None:
        self.inner.join(slot, params)

    def leave(self, slot: int) -> None:
        self.inner.leave(slot)

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        self.inner.prepare(slot, tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        asked = [replace(request, tokens=tuple(request.tokens)) for request in requests]  # a request's own list grows
        proposals = self.inner.propose(requests)
        self.rounds.append(list(zip(asked, proposals, strict=True)))
        return proposals

    def ahead(self, pending: Callable[[], bool]) -> None:
        self.inner.ahead(pending)

    def counts(self, slot: int) -> Sequence[Acceptance]:
        return self.inner.counts(slot)

    @property
    def proposals(self) -> list[Proposal]:
        """All of them."""
        return [proposal for played in self.rounds for _, proposal in played]


class TreeScript:
    """Proposes the true continuation up to a depth that takes every value in turn, among wrong branches that leave it
    at every depth, all in any order.

    Args:
        truth: Of every sequence, prompt and continuation.
        seed: Of lengths, branches and order.
        most_branches: Wrong paths of a tree.
    """

    name = "script"

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return ("tree",)

    def __init__(self, truth: Mapping[int, Sequence[int]], *, seed: int, most_branches: int = 6) -> None:
        self._truth = truth
        self._random = random.Random(seed)
        self._most_branches = most_branches
        self._rounds = 0
        self.agreeing: dict[int, int] = {}  # by sequence: depth to which the last tree is right

    def join(self, slot: int, params: SamplingParams) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def counts(self, slot: int) -> Sequence[Acceptance]:
        return ()

    def ahead(self, pending: Callable[[], bool]) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._rounds += 1
        return [self._tree(request) for request in requests]

    def _tree(self, request: DraftRequest) -> Proposal:
        right = list(self._truth[request.slot][len(request.tokens) : len(request.tokens) + request.gamma])
        agreed = (self._rounds + request.slot) % (len(right) + 1)
        trunk = right[:agreed]
        paths = [trunk]
        for _ in range(self._random.randint(1, self._most_branches)):
            at = self._random.randint(0, min(agreed, request.gamma - 1))
            wrong = [token for token in range(VOCAB_SIZE) if at >= len(right) or token != right[at]]
            tail = [self._random.randrange(VOCAB_SIZE) for _ in range(self._random.randint(0, request.gamma - at - 1))]
            paths.append([*trunk[:at], self._random.choice(wrong), *tail])
        self._random.shuffle(paths)
        tree = of_paths(((path, self.name) for path in paths), 1 << 30)
        if len(tree) > request.most_nodes:
            tree = pruned(tree, request.most_nodes)
            said = {path_of(tree, node) for node in range(len(tree))}
            agreed = max((depth for depth in range(1, agreed + 1) if tuple(trunk[:depth]) in said), default=0)
        self.agreeing[request.slot] = agreed
        return tree


def path_of(proposal: Proposal, node: int) -> tuple[int, ...]:
    """What a node says, from the committed end on."""
    parent = proposal.parents[node]
    return (*(path_of(proposal, parent) if parent >= 0 else ()), proposal.tokens[node])


def begin(
    runner: ModelRunner, prompts: Mapping[int, Sequence[int]], params: SamplingParams, proposer: Proposer
) -> dict[int, list[int]]:
    """Prompts, each with its first token; whatever the cache held is gone."""
    texts = {}
    join_all(proposer, numbered(params, len(prompts)))
    for sequence, prompt in prompts.items():
        runner.cache.truncate(sequence, 0)
        decoder = Decoder(runner, proposer, params, slot=sequence)
        texts[sequence] = [*prompt, decoder.first_token(runner.prefill(sequence, prompt))]
    return texts


def decode(
    runner: ModelRunner, prompts: Mapping[int, Sequence[int]], params: SamplingParams, proposer: Proposer, *,
    count: int, gamma: int = 0, nodes: int | None = None,
) -> tuple[dict[int, list[int]], list[dict[int, StepResult]]]:  # fmt: skip
    """Exactly `count` new tokens behind each prompt, in rounds of all sequences that need more, and the rounds."""
    texts, history = begin(runner, prompts, params, proposer), []
    while True:
        requests = [
            DraftRequest(sequence, text, min(gamma, missing - 1), nodes)
            for sequence, text in texts.items()
            if (missing := len(prompts[sequence]) + count - len(text)) > 0
        ]
        if not requests:
            return texts, history
        rounds = run_step(runner, params, proposer, requests)
        history.append({request.slot: played for request, played in zip(requests, rounds, strict=True)})
        for request, played in zip(requests, rounds, strict=True):
            texts[request.slot] += played.tokens
            assert runner.cache.length(request.slot) == len(texts[request.slot]) - 1


def plain(
    runner: ModelRunner, prompts: Mapping[int, Sequence[int]], params: SamplingParams, *, count: int
) -> dict[int, list[int]]:
    """Plain decoding of all sequences."""
    return decode(runner, prompts, params, Proposer(), count=count)[0]


def committed_kv(
    cache: DeviceKVCache | HostKVCache, num_layers: int, sequence: int, *, resident: Sequence[int] = ()
) -> torch.Tensor:
    """Committed keys and values of a sequence, wherever they are: [L, 2, H_kv, S, D], a copy on the host. Between
    passes; `resident` are the layers that a cache in host memory keeps on the device."""
    cache.begin_window((), ())  # behind a prefill a store shows one sequence, now all of them
    if isinstance(cache, HostKVCache):
        cache.writes.drain()
    length = cache.length(sequence)
    layers = []
    for layer in range(num_layers):
        on_host = length // BLOCK_TOKENS if isinstance(cache, HostKVCache) and layer not in resident else 0
        blocks = [_block(cache, layer, sequence, block, on_host) for block in range(-(-length // BLOCK_TOKENS))]
        layers.append(torch.cat(blocks, dim=2)[:, :, :length])
    return torch.stack(layers)


def _block(cache: DeviceKVCache | HostKVCache, layer: int, sequence: int, block: int, on_host: int) -> torch.Tensor:
    """[2, H_kv, 256, D], a copy on the host; of the first `on_host` blocks what is read is the host's own."""
    kv = cache.store(layer)
    if isinstance(cache, HostKVCache) and block < on_host:
        memory = cache.blocks.memory(layer, sequence, range(block, block + 1))
        return memory.view(kv.data.dtype).view(kv.data.shape[2:]).clone()
    return kv.data[sequence, block % kv.num_blocks].cpu().clone()


class BlockRecorder:
    """Keeps what an observer of a cache sees of each full block."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int, int], torch.Tensor] = {}  # (layer, sequence, block): [2, H_kv, 256, D]

    def on_blocks(self, layer: int, sequence: int, kv: KVBlocks, row: int, blocks: range) -> None:
        for block in blocks:
            self.seen[layer, sequence, block] = kv.data[row, (block - kv.first_block) % kv.num_blocks].cpu().clone()
