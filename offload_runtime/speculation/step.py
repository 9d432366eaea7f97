"""One step of speculation: ask a proposer, verify in one pass of the target, accept by equality.

The target's own sample at each position is *the* token (shared-noise sampling); a proposal only decides whether the
pass could already use it. So the output is the same for every proposer, and none at all. A tree is walked from its root
by the target's samples: the child that says what the target says behind a node, and so on. Proposals that a request's
grammar forbids are not verified: the target never says them.

A proposer is shown the whole sequences each time and finds out by itself what of its earlier guesses was kept. It
serves all requests of a step at once. The rows of a pass are a flat list, each with its request's slot and position, so
that windows of any lengths, of requests with options of their own, share it. What was decided is counted by who
proposed it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload_runtime.errors import NumericalError, OffloadError
from offload_runtime.grammar import GrammarMatcher
from offload_runtime.memory import upload
from offload_runtime.params import SamplingParams
from offload_runtime.runners import Decision, DraftKVState, ModelRunner, OnLayer, Prompt
from offload_runtime.runners.rows import Window
from offload_runtime.sampling import SlotSampling, TokenLogprobs, token_logprobs
from offload_runtime.speculation.tree import NOTHING, Proposal
from offload_runtime.trace import TraceRecorder


@dataclass(frozen=True)
class DraftRequest:
    """What is to be proposed to one request in one step.

    Attributes:
        slot: Its batch row in every cache, which says how its tokens are sampled, too.
        tokens: The whole sequence so far; the last token is not in the target's cache yet.
        gamma: Most tokens to propose in a row.
        tree_nodes: Most tokens to propose in all; None for a chain.
        mode: Who is to propose where there are several (see `Choice`); None leaves it to the proposer.
        cost_aware: Fewer where more are not worth the time that it takes to think of them.
        extra_nodes: So many more may join a chain, as branches or further down, which cost nothing.
    """

    slot: int
    tokens: Sequence[int]
    gamma: int
    tree_nodes: int | None = None
    mode: str | None = None
    cost_aware: bool = False
    extra_nodes: int = 0

    @property
    def most_nodes(self) -> int:
        """Most proposals in all, but for those that cost nothing."""
        return self.gamma if self.tree_nodes is None else self.tree_nodes

    @property
    def room(self) -> int:
        """Most proposals in all."""
        return self.most_nodes + self.extra_nodes

    @property
    def longest_chain(self) -> int:
        """Most proposals of one that makes chains."""
        return min(self.gamma, self.most_nodes)


@dataclass(frozen=True)
class PromptRequest:
    """A request whose prompt is read, of which the target's cache has the beginning.

    Attributes:
        slot: As of a `DraftRequest`.
        tokens: The whole prompt.
        speculate: Whether it will be proposed to: the proposer is to `prepare` it.
    """

    slot: int
    tokens: Sequence[int]
    speculate: bool = False


@dataclass(frozen=True)
class Acceptance:
    """What one level decided about the proposals of another.

    Attributes:
        proposed_by: `ngram`, `draft` or `retrieval` (the target over retrieved chunks).
        verified_by: `retrieval` or `target`.
        verifications: Windows of at least one proposal that were verified.
        proposed: Proposals in them, all branches of trees included.
        accepted: Of these, those that agreed, up to the first of a window that did not.
    """

    proposed_by: str
    verified_by: str
    verifications: int
    proposed: int
    accepted: int

    @property
    def rate(self) -> float:
        """Accepted of the proposed; 0 when nothing was."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def accepted_per_verification(self) -> float:
        """Proposals that a verification brought, its own token not counted."""
        return self.accepted / self.verifications if self.verifications else 0.0


class Proposer:
    """Guesses what the target will say, for several sequences at once. As it is, it never has any idea, and the target
    decodes plainly."""

    # Whose guesses they are, as in `Acceptance.proposed_by`; None where there are none.
    name: str | None = None

    @property
    def draft_state(self) -> DraftKVState | None:
        """What the cache of its draft holds of every slot; None without a draft model."""
        return None

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        """The ways to propose (see `Choice`) that have any idea of what follows one of these texts, which are all there
        are of some sequences, and room for it; of no texts all ways that there are."""
        return ()

    def join(self, slot: int, params: SamplingParams) -> None:
        """A request takes a slot: a sequence begins there, only grows, and its tokens will be chosen so."""

    def leave(self, slot: int) -> None:
        """A slot's request has ended, if there was one: nothing is asked about it until another one joins."""

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        """A slot's sequence begins with `tokens`: do now what would hold up the first proposals."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """For each request tokens that may follow, up to `gamma` (at least 1) in a row and `most_nodes` (at least 1)
        in all; none when there is no idea.

        The requests are of different slots, in any order; slots without one have finished or wait.
        """
        return [NOTHING] * len(requests)

    def ahead(self, pending: Callable[[], bool]) -> None:
        """What was proposed is being verified, or a prompt read that was prepared for: go on for as long as `pending`
        says yes, asked between short steps."""

    def counts(self, slot: int) -> Sequence[Acceptance]:
        """What levels of its own have decided about a slot since it was joined, the first level first. May wait for
        the device."""
        return ()


def makes_trees(proposer: Proposer) -> bool:
    """Whether guesses may branch where a request has room for more than a chain, whoever else may be asked for."""
    able = proposer.modes({})
    return "tree" in able or ("ngram" in able and "chain" not in able)


def chains_where(room: Callable[[int], int], texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
    """`modes` of who makes chains, up to `room(length)` tokens behind a text of so many."""
    return ("chain",) if not texts or any(room(len(tokens)) > 0 for tokens in texts.values()) else ()


@dataclass(frozen=True)
class StepResult:
    """What one pass gave one request: `tokens` are the target's, and `path` the nodes of the proposal that agreed, one
    for each of the tokens but the last; `logprobs` are the tokens', and `logits` [n, V] the rows that they were chosen
    from, where they were asked for. Nodes of the proposal that a grammar forbids were not in the pass, and did not
    agree."""

    tokens: list[int]
    proposal: Proposal
    path: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    logits: torch.Tensor | None = None

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


class Tally:
    """Counts what the target decided in the rounds of one generation.

    Attributes:
        accepted_by_depth: Proposals accepted as the first of their round (0), as the second, and so on, in this order.
        accepted_by_source: Proposals accepted by who made them first.
        proposed_by_source: Proposals by the same.
        windows: Rounds by what was asked for.
    """

    def __init__(self) -> None:
        self.accepted_by_depth: Counter[int] = Counter()
        self.accepted_by_source: Counter[str] = Counter()
        self.proposed_by_source: Counter[str] = Counter()
        self.windows: Counter[str] = Counter()
        self._verifications = 0
        self._verified: Counter[str] = Counter()  # windows by who has proposed any of it

    def add(self, sources: Sequence[str], accepted_sources: Sequence[str], *, window: str) -> None:
        """One round of one sequence: of its proposals, and of those that were accepted, who made them, in order; and
        what was asked for, in words."""
        self.windows[window] += 1
        if not sources:
            return
        self._verifications += 1
        self._verified.update(set(sources))
        self.proposed_by_source.update(sources)
        self.accepted_by_depth.update(range(len(accepted_sources)))
        self.accepted_by_source.update(accepted_sources)

    def levels(self, proposed_by: str, inner: Sequence[Acceptance]) -> tuple[Acceptance, ...]:
        """All levels, the target's last. A draft's proposals are all of its windows, n-grams among them; of a
        hierarchy they are those that it made.

        Args:
            proposed_by: Who proposed to the target.
            inner: The levels before, as `Proposer.counts` tells them.
        """
        proposed, accepted = self.proposed_by_source, self.accepted_by_source
        counts = self._verifications, proposed.total(), accepted.total()
        if proposed_by == "retrieval":
            counts = self._verified[proposed_by], proposed[proposed_by], accepted[proposed_by]
        return (*inner, Acceptance(proposed_by, "target", *counts))


def still_computing(logits: torch.Tensor) -> Callable[[], bool]:
    """Whether a pass that was just enqueued on the current stream is still running; asking waits for nothing.

    On the CPU it never is: a pass is over when its logits are there, so what is drafted then delays the next one.
    """
    if not logits.is_cuda:
        return lambda: False
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(logits.device))
    return lambda: not done.query()


def run_step(
    target: ModelRunner, sampling: SlotSampling, proposer: Proposer, requests: Sequence[DraftRequest], *,
    recorder: TraceRecorder | None = None, logprobs: Mapping[int, int] | None = None,
    prompts: Sequence[PromptRequest] = (), on_layer: OnLayer | None = None, with_logits: bool = False,
) -> list[StepResult]:  # fmt: skip
    """Propose for all requests at once, verify all in one pass of the target, and commit for each what agrees.

    The same pass may read prompts, behind each of which the target says one token. While it runs the proposer goes on.

    Args:
        target: Verifies windows.
        sampling: How it chooses the tokens of every slot.
        proposer: Guesses.
        requests: One for each slot that takes part, unless its prompt is read.
        recorder: Of a trace, if there is one.
        logprobs: By slot that wants its tokens' log-probabilities, how many likeliest tokens to tell beside each.
        prompts: As many as `ModelRunner.read` reads in a pass.
        on_layer: As of that.
        with_logits: Whether the results have the logits that their tokens were chosen from.

    Returns:
        For each request at least one new token: those accepted and the target's next one. Behind these, the first token
        of each prompt.

    Raises:
        NumericalError: The target's logits of a request are NaN; nothing was committed, for none of them.
        GrammarError: A request's grammar leaves no token; likewise.
    """
    cache, matchers = target.cache, sampling.matchers
    for request in requests:
        committed = cache.length(request.slot)
        assert committed == len(request.tokens) - 1, "the target must have seen all tokens but the last"
        if sampling.adjustments.penalised:
            sampling.adjustments.see(request.slot, request.tokens)
    proposals = _proposals(proposer, [_fitting(request, cache.max_tokens_with_draft) for request in requests], recorder)
    slots = [request.slot for request in requests]
    pruned = [_pruned(proposal, matchers.get(slot)) for slot, proposal in zip(slots, proposals, strict=True)]
    windows = [_window(request.tokens[-1], kept) for request, (kept, _) in zip(requests, pruned, strict=True)]
    starts = {prompt.slot: cache.length(prompt.slot) for prompt in prompts}
    if sampling.adjustments.penalised:
        for prompt in prompts:
            sampling.adjustments.begin(prompt.slot, prompt.tokens)
    unread = [Prompt(prompt.slot, prompt.tokens[starts[prompt.slot] :]) for prompt in prompts]
    results, paths, count = list[StepResult](), list[list[int]](), len(requests)  # of each window the rows that decided
    try:
        decision = target.decide(windows, slots, sampling, unread, on_layer)
        prepared = [prompt for prompt in prompts if prompt.speculate]
        for prompt in prepared:
            with recorder.span("prepare", host=True, tokens=[len(prompt.tokens)]) if recorder else nullcontext():
                proposer.prepare(prompt.slot, prompt.tokens)
        if prepared or any(proposals):
            draft_ahead(proposer, still_computing(decision.logits), recorder)
        samples, firsts = decision.tokens(), decision.firsts[:count]
        for request, proposal, (kept, nodes), first in zip(requests, proposals, pruned, firsts, strict=True):
            path = accepted_path(kept, samples[first : first + 1 + len(kept)])
            paths.append([0, *(node + 1 for node in path)])
            new_tokens = [samples[first + row] for row in paths[-1]]
            _require_tokens(new_tokens, len(request.tokens), request.slot, matchers.get(request.slot))
            results.append(StepResult(new_tokens, proposal, tuple(nodes[node] for node in path)))
        for prompt, first in zip(prompts, decision.firsts[count:], strict=True):
            paths.append([0])
            _require_tokens([samples[first]], len(prompt.tokens), prompt.slot, matchers.get(prompt.slot))
            results.append(StepResult([samples[first]], NOTHING, ()))
        slots += starts
        if logprobs:
            results = _with_logprobs(decision, slots, results, paths, logprobs)
    except (OffloadError, torch.OutOfMemoryError):  # whose prompts were read takes the step again
        for slot, start in starts.items():
            cache.truncate(slot, start)
        raise
    if with_logits:
        decided = zip(results, decision.firsts, paths, strict=True)
        results = [
            replace(result, logits=decision.logits[[first + row for row in rows]]) for result, first, rows in decided
        ]
    for slot, rows in zip(slots, paths, strict=True):
        if slot not in starts:
            cache.commit_path(slot, rows)
    return results


def draft_ahead(proposer: Proposer, pending: Callable[[], bool], recorder: TraceRecorder | None) -> None:
    """Let a proposer go on while a pass is running; a trace sees it from the host, as the device does it beside."""
    started_s = time.perf_counter()
    proposer.ahead(pending)
    if recorder is not None:
        recorder.add_host("draft ahead", started_s, time.perf_counter(), {})


def _with_logprobs(
    decision: Decision, slots: Sequence[int], results: Sequence[StepResult], paths: Sequence[Sequence[int]],
    wanted: Mapping[int, int],
) -> list[StepResult]:  # fmt: skip
    """The same with the log-probabilities of the tokens of those that want them, by the rows that decided them."""
    rows, tokens = list[int](), list[int]()
    for slot, first, result, path in zip(slots, decision.firsts, results, paths, strict=True):
        if slot in wanted:
            rows += [first + row for row in path]
            tokens += result.tokens
    if not rows:
        return list(results)
    logits = decision.logits[upload(torch.tensor(rows, dtype=torch.int32), decision.logits.device)]
    found = iter(token_logprobs(logits, tokens, max(wanted.values())))
    return [
        replace(result, logprobs=[next(found).first(wanted[slot]) for _ in result.tokens]) if slot in wanted else result
        for slot, result in zip(slots, results, strict=True)
    ]


def _fitting(request: DraftRequest, max_tokens_with_draft: int) -> DraftRequest:
    """A request whose tree the cache has room for: close to the end of a context its branches may not all fit."""
    room = max_tokens_with_draft - len(request.tokens)
    if request.tree_nodes is None or request.tree_nodes <= room:
        return request
    return replace(request, tree_nodes=max(room, 0))


def _proposals(proposer: Proposer, requests: Sequence[DraftRequest], recorder: TraceRecorder | None) -> list[Proposal]:
    """What is proposed to each request; who may not have any proposals is not asked about.

    A trace sees one span for all requests, with how many proposals each had room for and how many it was given.
    """
    asked = [request for request in requests if request.gamma > 0 and request.most_nodes > 0]
    if not asked:
        return [NOTHING] * len(requests)
    with recorder.span("propose", host=True) if recorder else nullcontext(dict[str, Any]()) as args:
        answers = proposer.propose(asked)
        args |= {"asked": [request.room for request in asked], "proposed": [len(answer) for answer in answers]}
    proposed: dict[int, Proposal] = {}
    for request, proposal in zip(asked, answers, strict=True):
        deepest = max(proposal.depths, default=0)
        fits = len(proposal) <= request.room and deepest <= request.gamma + request.extra_nodes
        assert fits, "too many proposals"
        proposed[request.slot] = proposal
    return [proposed.get(request.slot, NOTHING) for request in requests]


def _pruned(proposal: Proposal, matcher: GrammarMatcher | None) -> tuple[Proposal, Sequence[int]]:
    """What of a proposal a grammar allows, and which of its nodes these are."""
    if matcher is None or not proposal:
        return proposal, range(len(proposal))
    nodes = matcher.allowed(proposal.tokens, proposal.parents)
    return proposal.part(nodes), nodes


def _window(root: int, proposal: Proposal) -> Window:
    """The last known token with what is proposed behind it; only branches make it a tree."""
    tokens = (root, *proposal.tokens)
    return Window(tokens) if proposal.is_chain else Window(tokens, (-1, *(parent + 1 for parent in proposal.parents)))


def _require_tokens(
    tokens: Sequence[int], first_position: int, slot: int, matcher: GrammarMatcher | None
) -> None:  # fmt: skip
    """Of tokens that plain decoding would choose too: what follows a rejected proposal is nobody's output."""
    if -1 in tokens:
        if matcher is not None:
            matcher.require_next(tokens[: tokens.index(-1)], slot)
        raise NumericalError(
            f"the target's logits at position {first_position + tokens.index(-1)} are NaN: the checkpoint is "
            "damaged, or its weights overflow this dtype (try --dtype bf16 or fp32)",
            slot,
        )
