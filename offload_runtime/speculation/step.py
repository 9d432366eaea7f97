"""One step of speculation: ask a drafter, verify in one pass of the target, accept by equality.

The target's own sample at each position is *the* token (shared-noise sampling); a proposal only decides whether the
pass could already use it. So the output is the same for every drafter, and none at all. A tree is walked from its root
by the target's samples: the child that says what the target says behind a node, and so on. Proposals that a request's
grammar forbids are not verified: the target never says them.

A drafter is shown the whole sequences each time and finds out by itself what of its earlier guesses was kept. It
serves all requests of a step at once. The rows of a pass are a flat list, each with its request's slot and position, so
that windows of any lengths, of requests with options of their own, share it. What was decided is counted by who
proposed it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from offload_runtime.core import Batch, DraftBudget, TokenTree
from offload_runtime.errors import NumericalError, OffloadError
from offload_runtime.grammar import GrammarMatcher
from offload_runtime.params import SamplingParams
from offload_runtime.runners.draft_kv import DraftKVState
from offload_runtime.runners.model_runner import ModelRunner, OnLayer
from offload_runtime.sampling import SlotSampling, TokenLogprobs, token_logprobs
from offload_runtime.stream.device import upload
from offload_runtime.trace import TraceRecorder

Texts = Mapping[int, Sequence[int]]  # whole sequences, by slot
Budgets = Mapping[int, DraftBudget]  # what may be proposed to some of them, by slot


# Share of what was measured before that counts on with every round, or step.
_KEPT = 0.8
# A step this much slower than another has compiled or captured something, and is no measure of the next one; a round so
# much longer than those before has waited for the reader of the text.
_OUTLIER = 4.0
# Measurements of a step until its time is known.
_TIMED_STEPS = 3


@dataclass(frozen=True)
class Acceptance:
    """Counts what one level decided about the proposals of another.

    Attributes:
        proposed_by: `ngram`, `draft`, `self` (a copy of the target), `retrieval` (the target over retrieved chunks) or
            the name of a head (`mtp`).
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
        """Return the share of the proposals that was accepted; 0 when there were none."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def accepted_per_verification(self) -> float:
        """Return how many proposals a verification brought, its own token not counted."""
        return self.accepted / self.verifications if self.verifications else 0.0


class Drafter:
    """Guesses what the target will say, for several sequences at once. As it is, it never has any idea, and the target
    decodes plainly.

    Attributes:
        name: Whose guesses they are, as in `Acceptance.proposed_by`; None where there are none.
        draft_state: What the cache of its draft holds of every slot; None without a draft model.
    """

    name: str | None = None
    draft_state: DraftKVState | None = None

    def modes(self, texts: Texts) -> Sequence[str]:
        """Return the modes (see `DraftBudget`) that have any idea of what follows one of these texts, which are all
        there are of some sequences, and room for it; of no texts all modes that there are."""
        return ()

    def first_guess(self, slot: int, tokens: Sequence[int]) -> tuple[str, int] | None:
        """Return what would be proposed first behind a sequence by a mode that costs nothing, with the mode; None where
        there is no idea."""
        return None

    def join(self, slot: int, params: SamplingParams) -> None:
        """Let a sequence begin in a slot, which only grows, and whose tokens will be chosen so."""

    def leave(self, slot: int) -> None:
        """End a slot's sequence, if there is one: nothing is asked about it until another one joins."""

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        """Do what would hold up the first proposals behind a sequence that begins with `tokens`."""

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Take what the target's pass kept of tokens of a slot that are committed now, from `position` on, on the
        current stream: of the prompts that were prepared for, a piece after the other, and of what was accepted.

        Args:
            slot: Of a sequence that has joined, or of one that is decoded plainly.
            position: Of the first of them.
            tokens: Those that follow each of them.
            hidden: [n, width], as `ModelRunner.taps` gives it. Nothing is written there later.
        """

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        """Return tokens that may follow, for each slot that has a budget, of at least one token; none where there is no
        idea. Slots without one have finished or wait."""
        return dict.fromkeys(budgets, TokenTree())

    def ahead(self, pending: Callable[[], bool]) -> None:
        """Go on while what was proposed is verified, or a prompt read that was prepared for, for as long as `pending`
        says yes, which is asked between short steps."""

    def counts(self, slot: int) -> Sequence[Acceptance]:
        """Return what levels of its own have decided about a slot since it was joined, the first level first. May wait
        for the device."""
        return ()


def makes_trees(drafter: Drafter) -> bool:
    """Return whether guesses may branch where a request has room for more than a chain."""
    able = drafter.modes({})
    return "tree" in able or ("ngram" in able and "chain" not in able)


def chains_where(room: Callable[[int], int], texts: Texts) -> Sequence[str]:
    """Return the modes of a drafter of chains, of up to `room(length)` tokens behind a text of so many."""
    return ("chain",) if not texts or any(room(len(tokens)) > 0 for tokens in texts.values()) else ()


@dataclass(frozen=True)
class StepOutput:
    """Holds what one pass gave one request.

    Attributes:
        tokens: The target's.
        proposal: What was proposed. Nodes that a grammar forbids were not in the pass, and did not agree.
        path: The nodes of the proposal that agreed, one for each of the tokens but the last.
        logprobs: Of the tokens, where they were asked for.
        logits: [n, V], the rows that the tokens were chosen from, where they were asked for.
    """

    tokens: list[int]
    proposal: TokenTree
    path: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    logits: torch.Tensor | None = None

    @property
    def accepted_sources(self) -> list[str]:
        """Return the sources of what was accepted, token by token."""
        return [self.proposal.sources[node] for node in self.path]


def accepted_path(proposal: TokenTree, samples: Sequence[int]) -> list[int]:
    """Return the nodes that equal the target's samples, from the committed end on.

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
        """Count one round of one sequence: who made its proposals and those that were accepted, in order, and what was
        asked for, in words."""
        self.windows[window] += 1
        if not sources:
            return
        self._verifications += 1
        self._verified.update(set(sources))
        self.proposed_by_source.update(sources)
        self.accepted_by_depth.update(range(len(accepted_sources)))
        self.accepted_by_source.update(accepted_sources)

    def levels(self, proposed_by: str, inner: Sequence[Acceptance]) -> tuple[Acceptance, ...]:
        """Return all levels, the target's last. A draft's proposals are all of its windows, n-grams among them; of a
        hierarchy they are those that it made.

        Args:
            proposed_by: Who proposed to the target.
            inner: The levels before, as `Drafter.counts` tells them.
        """
        proposed, accepted = self.proposed_by_source, self.accepted_by_source
        counts = self._verifications, proposed.total(), accepted.total()
        if proposed_by == "retrieval":
            counts = self._verified[proposed_by], proposed[proposed_by], accepted[proposed_by]
        return (*inner, Acceptance(proposed_by, "target", *counts))


class StepWorth:
    """Says whether another step of drafting pays while no pass runs: the tokens that it adds to a window against those
    that the time it takes is worth, at the rate at which tokens have come lately.

    Args:
        free_s: Seconds behind a pass in which drafting delays nothing: the link brings what the next one begins with.
    """

    def __init__(self, free_s: float = 0.0) -> None:
        self._free_s = free_s
        # Of a step, and of each of several that follow each other without the host, and how often it was measured.
        self._level_s: dict[bool, tuple[float, int]] = {}
        self._began_s: float | None = None
        self.forget()

    @property
    def tok_per_s(self) -> float | None:
        """Return the tokens a second of all sequences together, lately; None as long as nothing is known."""
        return self._new_tokens / self._round_s if self._round_s > 0 else None

    def forget(self) -> None:
        """Forget what was measured: what comes next is nothing like it."""
        self.pause()
        self._new_tokens, self._round_s, self._rounds = 0.0, 0.0, 0.0  # all decayed

    def pause(self) -> None:
        """Note that the next round to begin does not follow the last one."""
        self._began_s = None

    def begin(self, new_tokens: int) -> None:
        """Begin the proposals of another round; the round before gave so many tokens."""
        now_s = time.perf_counter()
        if self._began_s is not None:
            round_s, weight = now_s - self._began_s, 1.0
            if self._rounds and round_s * self._rounds > _OUTLIER * self._round_s:
                weight = _OUTLIER * self._round_s / (self._rounds * round_s)
            self._new_tokens = _KEPT * self._new_tokens + weight * new_tokens
            self._round_s = _KEPT * self._round_s + weight * round_s
            self._rounds = _KEPT * self._rounds + 1
        self._began_s = now_s

    def seconds(self, levels: int) -> float | None:
        """Return how long so many steps that follow each other without the host take; None while that is unknown."""
        level_s, count = self._level_s.get(levels > 1, (0.0, 0))
        return levels * level_s if count >= _TIMED_STEPS else None

    def stepped(self, seconds: float, levels: int = 1, *, hidden: bool = False) -> None:
        """Note how long so many steps of drafting took; `hidden` behind a pass, where they take no less than
        alone."""
        known_s, count = self._level_s.get(levels > 1, (math.inf, 0))
        level_s = seconds / levels
        if count < _TIMED_STEPS or _OUTLIER * level_s < known_s:
            known_s = min(known_s, level_s)  # the first ones load what they need
        elif not hidden:
            known_s += (1 - _KEPT) * (min(level_s, _OUTLIER * known_s) - known_s)
        self._level_s[levels > 1] = known_s, count + 1

    def pays(self, gain: float, levels: int = 1) -> bool:
        """Return whether so many steps should be made that are expected to add `gain` tokens to what the next pass
        gives.

        As long as no rate is known only those that delay nothing are: first windows that were drafted to their end
        took 0.30 and 0.13 s, where 17 tokens came every 0.2 s (135M draft of a 13B target, H200).
        """
        step_s, rate = self.seconds(levels), self.tok_per_s
        if self._began_s is None or step_s is None:
            return True
        late_s = time.perf_counter() + step_s - self._began_s - self._free_s
        return late_s <= 0 if rate is None else gain >= rate * min(step_s, late_s)


def run_step(
    target: ModelRunner, sampling: SlotSampling, drafter: Drafter, texts: Texts, budgets: Budgets, *,
    recorder: TraceRecorder | None = None, logprobs: Mapping[int, int] | None = None,
    prepared: Collection[int] = (), on_layer: OnLayer | None = None, with_logits: bool = False, goes_on: bool = False,
) -> dict[int, StepOutput]:  # fmt: skip
    """Propose for all sequences at once, verify all in one pass of the target, and commit for each what agrees.

    The same pass may read prompts, behind each of which the target says one token. While it runs the drafter goes on.

    Args:
        target: Verifies.
        sampling: How it chooses the tokens of every slot.
        drafter: Guesses.
        texts: The whole sequences of the slots that take part. Of those without a budget the prompt is read, of which
            the target's cache has the beginning; it has all tokens of the others but the last.
        budgets: What may be proposed.
        recorder: Of a trace, if there is one.
        logprobs: By slot that wants its tokens' log-probabilities, how many likeliest tokens to name with each.
        prepared: Slots whose prompts the drafter is to `prepare`, as something will be proposed behind them.
        on_layer: As of a `Batch`.
        with_logits: Whether the results have the logits that their tokens were chosen from.
        goes_on: Whether the next step is likely to be a plain one of the same slots.

    Returns:
        For each slot at least one new token: those accepted and the target's next one.

    Raises:
        NumericalError: The target's logits of a sequence are NaN; nothing was committed, for none of them.
        GrammarError: A request's grammar leaves no token; likewise.
    """
    cache, adjustments = target.cache, sampling.adjustments
    starts = {slot: cache.length(slot) for slot in texts if slot not in budgets}
    for slot in budgets:
        assert cache.length(slot) == len(texts[slot]) - 1, "the target must have seen all tokens but the last"
    if adjustments.penalised:
        for slot in budgets:
            adjustments.see(slot, texts[slot])
        for slot in starts:
            adjustments.begin(slot, texts[slot])
    proposals = _proposals(drafter, texts, _fitting(texts, budgets, cache.max_tokens_with_draft), recorder)
    proposals = {slot: proposals.get(slot, TokenTree()) for slot in budgets}
    pruned = {
        slot: _pruned(proposal, sampling.matchers.get(slot), len(texts[slot]), cache.chunk_tokens)
        for slot, proposal in proposals.items()
    }
    batch = Batch(
        {slot: kept.behind(texts[slot][-1]) for slot, (kept, _) in pruned.items()},
        {slot: texts[slot][start:] for slot, start in starts.items()}, on_layer,
    )  # fmt: skip
    results, rows = dict[int, StepOutput](), dict[int, list[int]]()  # by slot, and those of the pass that decided
    try:
        target.forward(batch, sampling)
        for slot in prepared:
            with recorder.span("prepare", host=True, tokens=[len(texts[slot])]) if recorder else nullcontext():
                drafter.prepare(slot, texts[slot])
        if prepared or any(proposals.values()):
            _draft_ahead(drafter, batch.logits, recorder)
        if goes_on and not (logprobs or with_logits or starts or any(proposals.values())):
            target.go_ahead()
        assert batch.tokens is not None
        samples = batch.tokens()
        for slot, first in zip(batch.slots, batch.firsts, strict=True):
            kept, nodes = pruned.get(slot, (TokenTree(), ()))
            path = accepted_path(kept, samples[first : first + 1 + len(kept)])
            rows[slot] = [first, *(first + 1 + node for node in path)]
            new_tokens = [samples[row] for row in rows[slot]]
            _require_tokens(new_tokens, len(texts[slot]), slot, sampling.matchers.get(slot))
            proposal = proposals.get(slot, TokenTree())
            results[slot] = StepOutput(new_tokens, proposal, tuple(nodes[node] for node in path))
        if logprobs:
            results |= _with_logprobs(batch.logits, results, rows, logprobs)
        for slot, hidden in batch.hidden.items():
            if slot in budgets:
                path = [row - rows[slot][0] for row in rows[slot]]
                drafter.observe(slot, len(texts[slot]) - 1, results[slot].tokens, _of_path(hidden[0], path))
            elif slot in prepared:
                following = [*texts[slot][starts[slot] + 1 :], *results[slot].tokens]
                for piece, last in zip(hidden, accumulate(map(len, hidden)), strict=True):
                    first = last - len(piece)
                    drafter.observe(slot, starts[slot] + first, following[first:last], piece)
    except (OffloadError, torch.OutOfMemoryError):  # those whose prompts were read take the step again
        for slot, start in starts.items():
            cache.truncate(slot, start)
        raise
    if with_logits:
        results = {slot: replace(result, logits=batch.logits[rows[slot]]) for slot, result in results.items()}
    for slot, first in zip(batch.trees, batch.firsts, strict=False):
        cache.commit_path(slot, [row - first for row in rows[slot]])
    return results


def _draft_ahead(drafter: Drafter, logits: torch.Tensor, recorder: TraceRecorder | None) -> None:
    """Let a drafter go on while the pass that was just enqueued is running; a trace sees it from the host.

    On the CPU a pass is over when its logits are there, so what is drafted then would delay the next one.
    """
    started_s, done = time.perf_counter(), None
    if logits.is_cuda:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(logits.device))
    drafter.ahead(lambda: done is not None and not done.query())
    if recorder is not None:
        recorder.add_host("draft ahead", started_s, time.perf_counter(), {})


def _of_path(hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """Return copies of some rows, ascending from 0 on."""
    if path[-1] < len(path):
        return hidden[: len(path)].clone()
    return hidden[upload(torch.tensor(path, dtype=torch.int32), hidden.device)]


def _with_logprobs(
    logits: torch.Tensor,
    results: Mapping[int, StepOutput],
    rows: Mapping[int, Sequence[int]],
    wanted: Mapping[int, int],
) -> dict[int, StepOutput]:
    """Return the results of those that want them with their tokens' log-probabilities, by the rows that decided."""
    chosen = [row for slot in wanted for row in rows[slot]]
    tokens = [token for slot in wanted for token in results[slot].tokens]
    index = upload(torch.tensor(chosen, dtype=torch.int32), logits.device)
    found = iter(token_logprobs(logits[index], tokens, max(wanted.values())))
    return {
        slot: replace(results[slot], logprobs=[next(found).first(most) for _ in results[slot].tokens])
        for slot, most in wanted.items()
    }


def _fitting(texts: Texts, budgets: Budgets, max_tokens_with_draft: int) -> Budgets:
    """Return the budgets that allow anything, as far as the cache has room: close to the end of a context the branches
    of a tree may not all fit."""
    found = dict[int, DraftBudget]()
    for slot, budget in budgets.items():
        room = max(0, max_tokens_with_draft - len(texts[slot]))
        if budget.tree_nodes is not None and budget.tree_nodes > room:
            budget = replace(budget, tree_nodes=room)
        if budget.longest_chain > 0:
            found[slot] = budget
    return found


def _proposals(
    drafter: Drafter, texts: Texts, budgets: Budgets, recorder: TraceRecorder | None
) -> dict[int, TokenTree]:
    """Return what is proposed. A trace sees one span for all, with the most that could be and what was."""
    if not budgets:
        return {}
    with recorder.span("propose", host=True) if recorder else nullcontext(dict[str, Any]()) as args:
        proposals = drafter.propose(texts, budgets)
        most = {slot: budget.size + budget.extra_nodes for slot, budget in budgets.items()}
        args |= {"asked": [*most.values()], "proposed": [len(proposals[slot]) for slot in budgets]}
    for slot, budget in budgets.items():
        depth = 1 + max(proposals[slot].depths, default=-1)
        assert len(proposals[slot]) <= most[slot] and depth <= budget.gamma + budget.extra_nodes, "too many proposals"
    return proposals


def _pruned(
    proposal: TokenTree, matcher: GrammarMatcher | None, first: int, chunk_tokens: int | None
) -> tuple[TokenTree, Sequence[int]]:
    """Return what of a proposal, whose first tokens stand at position `first`, a grammar allows and the target can
    verify, of which chunks may be left by one path only, and which of its nodes these are. Here alone, where proposals
    of all drafters meet: a tree of 64 nodes that grew with the ends of chunks in mind would have 0.0 to 0.3 % more
    tokens a pass (of four distributions of children, at all places of an end)."""
    nodes: Sequence[int] = range(len(proposal))
    if matcher is not None and proposal:
        nodes = matcher.allowed(proposal.tokens, proposal.parents)
    kept = proposal if len(nodes) == len(proposal) else proposal.part(nodes)
    if chunk_tokens is not None and not kept.is_chain:
        inner = kept.through_gates(first, chunk_tokens)
        kept, nodes = kept.part(inner), [nodes[node] for node in inner]
    return kept, nodes


def _require_tokens(tokens: Sequence[int], first_position: int, slot: int, matcher: GrammarMatcher | None) -> None:
    """Raise where tokens that plain decoding would choose too are none: what follows a rejected proposal is no
    output."""
    if -1 in tokens:
        if matcher is not None:
            matcher.require_next(tokens[: tokens.index(-1)], slot)
        raise NumericalError(
            f"the target's logits at position {first_position + tokens.index(-1)} are NaN: the checkpoint is "
            "damaged, or its weights overflow this dtype (try --dtype bf16 or fp32)",
            slot,
        )
