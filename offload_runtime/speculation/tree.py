"""The candidates behind a text: what a draft and n-grams have said so far, of which the most probable are proposed."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush, heappushpop
from itertools import count as numbers
from itertools import islice
from math import inf
from operator import neg

import torch

from offload_runtime.core import DraftBudget, TokenTree
from offload_runtime.params import SamplingParams
from offload_runtime.runners import DraftKVState
from offload_runtime.runners.graphs import MOST_DEPTH, MOST_GREEDY_STEPS
from offload_runtime.speculation.draft_tree import Asked, Branch, ChildProbabilities, Children, DraftTree, StepWorth
from offload_runtime.speculation.ngram import NgramProposer
from offload_runtime.speculation.step import Budgets, Proposer, Texts


@dataclass(slots=True)
class Offer:
    """Children, of which those that are no nodes yet become nodes one by one, the likeliest first. `last`, the newest
    node among them, is likelier than all that are left, and not expanded."""

    log_probabilities: dict[int, float]  # by token, given the parent; the likeliest first
    source: str
    last: int


@dataclass(slots=True)
class Node:
    """A candidate. `depth` and `log_probability` count from where the tree once began, so that a new root changes
    neither; `CandidateTree` says what they are from the root on."""

    token: int
    parent: int
    depth: int
    log_probability: float
    source: str  # who thought of it first; of the root nobody
    children: dict[int, int] = field(default_factory=dict)  # by token, the first that was added first
    expanded: bool = False  # whether it has been asked what follows it
    places: tuple[int, ...] = ()  # of the keys of the path to it, from below the root on; of nodes that are expanded
    offer: Offer | None = None  # where there may be something left of it


class CandidateTree:
    """Candidates behind a text.

    Args:
        token: The text's last one, the root.

    Attributes:
        nodes: By their numbers, to be read.
        root: The number of the root.
        places: Those that hold keys of nodes, to be read.
    """

    def __init__(self, token: int) -> None:
        self._made = 0
        self._begin(token)

    def _begin(self, token: int) -> None:
        """A root and nothing else."""
        self.root = self._made
        self._made += 1
        self._keep({self.root: Node(token, -1, 0, 0.0, "")})

    def _keep(self, nodes: dict[int, Node]) -> None:
        """Only these are left, the root among them. Order those that wait to be expanded; what is deeper than anybody
        has looked is set aside."""
        self.nodes = nodes
        self.places = {node.places[-1] for node in nodes.values() if node.places}
        self._first_free = 0
        # What a raised probability or an expansion leaves behind in here is recognised when it comes up.
        self._frontier = [(-node.log_probability, key) for key, node in nodes.items() if not node.expanded]
        heapify(self._frontier)
        self._deeper: list[tuple[float, int]] = []
        self._reach = self.nodes[self.root].depth

    def free_places(self, count: int) -> list[int]:
        """The first so many that hold keys of no living candidate."""
        while self._first_free in self.places:
            self._first_free += 1
        return list(islice((place for place in numbers(self._first_free) if place not in self.places), count))

    def depth(self, node: int) -> int:
        """Its distance from the root."""
        return self.nodes[node].depth - self.nodes[self.root].depth

    def log_probability(self, node: int) -> float:
        """That the text goes on as its path does."""
        return self.nodes[node].log_probability - self.nodes[self.root].log_probability

    def add(self, parent: int, token: int, log_probability: float, source: str) -> int:
        """What may follow a node; if that is there already, the larger of the two probabilities counts.

        Args:
            parent: The node.
            token: What follows.
            log_probability: That it does, if the text goes that far; at most 0.
            source: Who says so.

        Returns:
            The child.
        """
        child = self._child(parent, token)
        if child is None:
            return self._make(parent, token, log_probability, source)
        self._raise(child, parent, log_probability)
        return child

    def offer(self, parent: int, tokens: Sequence[int], log_probabilities: Sequence[float], source: str) -> list[float]:
        """As `add` for each of these tokens, for a node that has had no offer. They are all different, the likeliest
        first.

        Returns:
            Log-probabilities of the paths that end with those that were not there.
        """
        above = self.nodes[parent]
        assert above.offer is None, "a node is expanded once"
        new = dict(zip(tokens, log_probabilities, strict=True))
        for token in [token for token in tokens if token in above.children]:
            self._raise(above.children[token], parent, new.pop(token))
        if new:
            token = next(iter(new))
            above.offer = Offer(new, source, last=self._make(parent, token, new[token], source))
        # To the last bit what `log_probability` will say of the nodes: a candidate is not more probable than itself.
        root = self.nodes[self.root].log_probability
        return [above.log_probability + log_probability - root for log_probability in new.values()]

    def _child(self, parent: int, token: int) -> int | None:
        """The node that says this behind another one, where anybody has thought of it."""
        above = self.nodes[parent]
        offer = above.offer
        if token in above.children or offer is None or token not in offer.log_probabilities:
            return above.children.get(token)
        return self._make(parent, token, offer.log_probabilities[token], offer.source)

    def _make(self, parent: int, token: int, log_probability: float, source: str) -> int:
        assert log_probability <= 0
        above = self.nodes[parent]
        node, self._made = self._made, self._made + 1
        self.nodes[node] = Node(token, parent, above.depth + 1, above.log_probability + log_probability, source)
        above.children[token] = node
        self._wait(node)
        return node

    def _make_sibling(self, node: int) -> int | None:
        """The likeliest of the children that were only offered so far is a node now, if it is the one that is to be
        asked for after this node."""
        parent = self.nodes[node].parent
        above = self.nodes.get(parent)
        if above is None or above.offer is None or above.offer.last != node:
            return None
        offer = above.offer
        for token, log_probability in offer.log_probabilities.items():
            if token not in above.children:
                offer.last = self._make(parent, token, log_probability, offer.source)
                return offer.last
        above.offer = None
        return None

    def _raise(self, top: int, parent: int, log_probability: float) -> None:
        """Make a node and all below it more probable, if this is more than it has, given its parent."""
        by = self.nodes[parent].log_probability + log_probability - self.nodes[top].log_probability
        below = [top] if by > 0 else []
        while below:
            node = self.nodes[below[-1]]
            # Never above its parent by a rounding.
            raised = min(node.log_probability + by, self.nodes[node.parent].log_probability)
            moved, node.log_probability = raised > node.log_probability, raised
            if moved and not node.expanded:  # else it was rounded away, and the node waits already
                self._wait(below[-1])
            below[-1:] = node.children.values()

    def _wait(self, key: int) -> None:
        """Put a node among those that may be expanded next."""
        heappush(self._frontier, (-self.nodes[key].log_probability, key))

    def set_expanded(self, node: int, place: int | None) -> None:
        """What follows a node has been added, and its keys are in a place, or at their own place (None: the root's).

        Parents come before their children.
        """
        expanded = self.nodes[node]
        expanded.expanded = True
        if place is not None:
            assert place not in self.places, "two candidates share a place"
            expanded.places = (*self.nodes[expanded.parent].places, place)
            self.places.add(place)
        self._make_sibling(node)

    def next_to_expand(self, count: int, depth: int) -> list[int]:
        """The most probable nodes that have not been expanded, parents before their children.

        Args:
            count: Most nodes.
            depth: Greatest depth.
        """
        limit = self.nodes[self.root].depth + depth
        if limit > self._reach:
            for entry in self._deeper:
                heappush(self._frontier, entry)
            self._deeper.clear()
        self._reach = limit
        picked: list[tuple[float, int]] = []
        while self._frontier and len(picked) < count:
            entry = heappop(self._frontier)
            node = self.nodes.get(entry[1])
            if node is None or node.expanded or node.log_probability != -entry[0]:
                continue
            if node.depth > limit:
                self._deeper.append(entry)
            else:
                picked.append(entry)
                self._make_sibling(entry[1])
        for entry in picked:
            heappush(self._frontier, entry)
        return [key for _, key in picked]

    def best(self, count: int, depth: int) -> tuple[TokenTree, list[int]]:
        """The most probable candidates, with each the path to it, and their nodes.

        Args:
            count: Most candidates.
            depth: Greatest depth.
        """
        limit = self.nodes[self.root].depth + depth
        chosen: dict[int, int] = {self.root: -1}
        heap: list[tuple[float, int]] = []
        last = self.root
        while len(chosen) <= count:
            if self.nodes[last].depth < limit:
                for child in self.nodes[last].children.values():
                    heappush(heap, (-self.nodes[child].log_probability, child))
            if not heap:
                break
            last = heappop(heap)[1]
            sibling = self._make_sibling(last)
            if sibling is not None:
                heappush(heap, (-self.nodes[sibling].log_probability, sibling))
            chosen[last] = len(chosen) - 1
        nodes = list(chosen)[1:]
        found = [self.nodes[node] for node in nodes]
        tokens, sources = tuple(node.token for node in found), tuple(node.source for node in found)
        return TokenTree(tokens, tuple(chosen[node.parent] for node in found), sources), nodes

    def walk(self, tokens: Sequence[int], start: int | None = None) -> list[int]:
        """The nodes below `start` (None: the root) of a path that begins as these tokens do, as far as there is one."""
        path: list[int] = []
        node = self.root if start is None else start
        for token in tokens:
            if (child := self._child(node, token)) is None:
                break
            path.append(child)
            node = child
        return path

    def follow(self, tokens: Sequence[int]) -> bool:
        """The text has gone on: keep what was guessed behind it and let go of everything else.

        Args:
            tokens: New ones of the text; the last becomes the root, and has its keys at their own place.

        Returns:
            Whether the path was there; else only the new root is.
        """
        path = self.walk(tokens)
        if len(path) < len(tokens):
            self._begin(tokens[-1])
            return False
        if not path:
            return True
        self.root = path[-1]
        above = len(self.nodes[self.root].places)
        kept: dict[int, Node] = {}
        below = [self.root]
        while below:
            key = below.pop()
            node = kept[key] = self.nodes[key]
            node.places = node.places[above:]  # of a text without end they would become ever more
            below.extend(node.children.values())
        self._keep(kept)
        return True


@dataclass
class GrownTree:
    """A sequence's tree, and the text that it stands behind, whose last token is the root."""

    text: list[int]
    budget: DraftBudget
    tree: CandidateTree
    children: dict[int, Children] = field(default_factory=dict)  # by node, what the draft said

    def window(self) -> tuple[TokenTree, list[int]]:
        """Return the most probable candidates that may be proposed, and their nodes."""
        return self.tree.best(self.budget.size, self.budget.gamma)

    def placed(self, nodes: Sequence[int], further: int) -> tuple[dict[int, int | None], list[int]]:
        """A free place for every one of these nodes, None for the root, whose keys have a place, and so many more for a
        greedy path behind the last of them."""
        others = [node for node in nodes if node != self.tree.root]
        places = self.tree.free_places(len(others) + further)
        placed = dict(zip(others, places, strict=False))
        return {node: placed.get(node) for node in nodes}, places[len(others) :]

    def asked(self, placed: Mapping[int, int | None], greedy_steps: Sequence[int]) -> Asked:
        """What a step is to find out about nodes that have been given their places only now, parents first, and about
        the greedy path behind the last of them."""
        tree, paths = self.tree, dict[int, tuple[int, ...]]()
        for node, place in placed.items():
            above = tree.nodes[node].parent
            assert place is None or above in paths or tree.nodes[above].expanded, "what comes before a node has keys"
            paths[node] = (
                () if place is None else (*(paths[above] if above in paths else tree.nodes[above].places), place)
            )
        return Asked(self.text, [Branch(tree.nodes[node].token, path) for node, path in paths.items()], greedy_steps)


# Less probable than this is not drafted past a window: it would hardly ever be of use.
_NEGLIGIBLE = math.log(1e-4)
# Children less probable than this, given their parent, are not worth the host's time; the first is always kept.
_LEAST_CHANCE = math.log(2e-3)
# How probable the best child of a node is before anything is known, and how many nodes this looks back on.
_FIRST_RATE, _RATE_MEMORY = 0.75, 50
# A window is expected to reach down to about as improbable nodes as the one before: to so many times less, at first.
_MARGIN = math.log(2)


class TreeDraftProposer(Proposer):
    """Grows trees for requests that ask for them, and leaves the others to a proposer of chains.

    On CUDA all of the draft's work is on a stream of its own, which waits for the target's only when a request joins:
    draft and target share nothing that either of them writes.

    Args:
        chains: Of the same draft.
        model: Of the same draft.
        device: Where it computes.
        ngrams: Whose guesses join the trees, told who joins by whoever shares them (`WithNgrams`); None for nobody's.
        worth: Says when a step is not worth the wait any more; None for one that knows of no link.

    Attributes:
        trees: By slot what has grown behind its text; nothing where an interruption may have left it half made.
        probabilities: What the draft's scores are worth.
    """

    name = "draft"

    def __init__(
        self, chains: Proposer, model: DraftTree, *, device: torch.device, ngrams: NgramProposer | None,
        worth: StepWorth | None = None,
    ) -> None:  # fmt: skip
        self._chains, self.model, self.ngrams = chains, model, ngrams
        self._worth = worth or StepWorth()
        self._device = device
        self._stream = _drafting_stream(device) if device.type == "cuda" else None
        self._joined: set[int] = set()
        # How tokens of whoever joined while nobody else was there are chosen, but for the noise: how scores differ.
        self._sampling: SamplingParams | None = None
        self.probabilities = ChildProbabilities()
        self.trees: dict[int, GrownTree] = {}
        self._lengths: dict[int, int] = {}  # by sequence, of the text behind which was last proposed
        # By sequence, log-probability of the least probable node that its next window may have, by the last one's.
        self._expected: dict[int, float] = {}
        self._going_on: list[int] = []  # sequences whose windows are being verified
        self._best_rate = _FIRST_RATE  # how probable the best child of a node is

    @property
    def draft_state(self) -> DraftKVState | None:
        return self._chains.draft_state

    def modes(self, texts: Texts) -> Sequence[str]:
        return ("chain", "tree") if self._chains.modes(texts) else ()

    def join(self, slot: int, params: SamplingParams) -> None:
        self._drop(slot)
        self._worth.pause()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if not self._joined and params.without_noise != self._sampling:
            self.probabilities, self._best_rate = ChildProbabilities(), _FIRST_RATE  # other scores
            self._worth.forget()
            self._sampling = params.without_noise
        self._joined.add(slot)
        with self._at_work():
            self.model.join(slot, params)
            self._chains.join(slot, params)

    def leave(self, slot: int) -> None:
        self._drop(slot)
        with self._at_work():
            self.model.leave(slot)
            self._chains.leave(slot)

    def _drop(self, slot: int) -> None:
        """Nothing is known of a slot's sequence."""
        self._joined.discard(slot)
        for by_slot in (self.trees, self._expected, self._lengths):
            by_slot.pop(slot, None)
        self._going_on = [other for other in self._going_on if other != slot]

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        with self._at_work():
            self._chains.prepare(slot, tokens)

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        chains = {slot: budget for slot, budget in budgets.items() if budget.tree_nodes is None}
        self._going_on, proposals = [], dict[int, TokenTree]()
        with self._at_work():
            lengths = {slot: len(texts[slot]) for slot in budgets}
            self._worth.begin(sum(length - self._lengths.get(slot, length) for slot, length in lengths.items()))
            self._lengths |= lengths
            if chains:
                for slot in chains:
                    self.trees.pop(slot, None)
                proposals = self._chains.propose(texts, chains)
            if going_on := [slot for slot in budgets if slot not in chains]:
                for slot in going_on:
                    self._follow(slot, texts[slot], budgets[slot])
                self._fill_windows(going_on)
                proposals |= {slot: self.trees[slot].window()[0] for slot in going_on}
                self._going_on = going_on
        return proposals

    def ahead(self, pending: Callable[[], bool]) -> None:
        """Expand the trees past their windows, one step at a time, as far as there are places for what is found."""
        with self._at_work():
            while self._going_on and pending():
                started_s = time.perf_counter()
                # So deep that a window behind the deepest of this one is full.
                asked, greedy_steps = self._next_step(
                    dict.fromkeys(self._going_on, _NEGLIGIBLE), lambda gamma: 2 * gamma
                )
                if not asked:
                    return
                self._expand(asked, greedy_steps)
                self._worth.stepped(time.perf_counter() - started_s, 1 + greedy_steps, hidden=True)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Around work of the draft: on its own stream, and what is cut off is not trusted afterwards."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException:
                self._forget()
                raise

    def _forget(self) -> None:
        self.trees.clear()
        self._going_on = []
        self._worth.pause()

    def _follow(self, slot: int, text: Sequence[int], budget: DraftBudget) -> None:
        """Let a tree stand behind a text: what is left of the one before, or a new one, with what n-grams say."""
        before = self.trees.pop(slot, None)
        one = GrownTree(list(text), budget, CandidateTree(text[-1]))
        if before is not None and one.text[: len(before.text)] == before.text:
            new = one.text[len(before.text) :]
            path = before.tree.walk(new)
            self._learn(before, new, path)
            if self._adopt(slot, before, new, path) and before.tree.follow(new):
                one.tree = before.tree
                one.children = {node: children for node, children in before.children.items() if node in one.tree.nodes}
        if self.ngrams is not None:
            self._add_ngrams(slot, one)
        self.trees[slot] = one

    def _learn(self, before: GrownTree, new: Sequence[int], path: Sequence[int]) -> None:
        """What the target has said tells how much scores are worth: behind the root, and behind each node of the path
        that came true, it was the child of some rank, or none of them."""
        for node, token in zip([before.tree.root, *path], new, strict=False):
            children = before.children.get(node)
            if children is not None:
                rank = children.tokens.index(token) if token in children.tokens else None
                self.probabilities.observe(children.scores, rank)

    def _adopt(self, slot: int, before: GrownTree, new: Sequence[int], path: Sequence[int]) -> bool:
        """Bring the keys of the path that came true to their places, as far as it was expanded.

        Returns:
            Whether the keys before it are at theirs, without which the tree is of no use.
        """
        tree = before.tree
        if tree.nodes[tree.root].expanded and not self.model.holds(slot, before.text):
            return False
        # Nodes that were not expanded have none.
        places = max((tree.nodes[node].places for node in path), key=len, default=())
        if places:
            self.model.adopt(slot, new[: len(places)], places)
        return True

    def _add_ngrams(self, slot: int, one: GrownTree) -> None:
        """Let what followed earlier occurrences of the text's ending take part, as far as a window reaches down."""
        assert self.ngrams is not None
        guesses = self.ngrams.guesses(slot, one.text, one.budget, max(_NEGLIGIBLE, self._expected.get(slot, -inf)))
        guess, nodes = guesses.tree, [one.tree.root]
        for token, parent, chance in zip(guess.tokens, guess.parents, guesses.log_probabilities, strict=True):
            nodes.append(one.tree.add(nodes[parent + 1], token, chance, self.ngrams.name))

    def _fill_windows(self, slots: Sequence[int]) -> None:
        """Expand until no node that could still be has a chance to be among the most probable of its window; for
        cost-aware requests only as long as what a step may add is worth the time."""
        # By sequence a heap of the largest log-probabilities, as many as its window holds: what is to be among them has
        # to exceed the first one, which is -inf as long as there are fewer.
        best: dict[int, list[float]] = {}
        for slot, one in ((slot, self.trees[slot]) for slot in slots):
            found = [one.tree.log_probability(node) for node in one.window()[1]]
            best[slot] = [-inf] * (one.budget.size - len(found)) + sorted(found)
        guessed = True
        while True:
            started_s = time.perf_counter()
            expected = self._expected if guessed else {}
            thresholds = {slot: max(window[0], expected.get(slot, -inf)) for slot, window in best.items()}
            # Children are less probable than their parent.
            asked, greedy_steps = self._next_step(thresholds, lambda gamma: gamma - 1)
            # All its children together are at most as probable as a node, and each new one drives out another.
            gain = sum(
                chance - math.exp(best[slot][0])
                for slot, nodes in asked.items() for chance in self._chances(slot, nodes, greedy_steps)
            )  # fmt: skip
            # Without a first step nothing is proposed and no step is timed, so that this would never change.
            cost_aware = all(
                self.trees[slot].budget.cost_aware and self.trees[slot].tree.root not in nodes
                for slot, nodes in asked.items()
            )
            if not asked or (cost_aware and not self._worth.pays(gain, 1 + greedy_steps)):
                if not guessed:
                    break
                guessed = False  # a step takes as long for all that could be in a window
                continue
            for slot, found in self._expand(asked, greedy_steps).items():
                for log_probability in found:
                    heappushpop(best[slot], log_probability)
            # All that delays the pass: choosing what to ask and noting the answers, too.
            self._worth.stepped(time.perf_counter() - started_s, 1 + greedy_steps)
        self._expected |= {slot: window[0] - _MARGIN for slot, window in best.items() if window[0] > -inf}

    def _next_step(
        self, thresholds: Mapping[int, float], deepest: Callable[[int], int]
    ) -> tuple[dict[int, list[int]], int]:
        """What the next step is about: by sequence the most probable nodes to expand, as many as a step and the places
        take, of those above its threshold; or the first of them, and the length of a greedy path behind it.

        Args:
            thresholds: Log-probabilities by sequence, of all whose trees take part.
            deepest: From a request's gamma to the depth of nodes that may be expanded.
        """
        asked: dict[int, list[int]] = {}
        depths: dict[int, int] = {}
        width = self.model.width(len(thresholds))
        for slot, threshold in thresholds.items():
            one = self.trees[slot]
            # The keys of a node that is expanded need a position.
            depth = depths[slot] = min(deepest(one.budget.gamma), self.model.room(len(one.text)), MOST_DEPTH)
            # The root needs no place, but is expanded alone or first.
            count = min(width, self.model.num_places - len(one.tree.places))
            nodes = one.tree.next_to_expand(count, depth) if depth >= 0 else []
            if promising := [node for node in nodes if one.tree.log_probability(node) > threshold]:
                asked[slot] = promising
        greedy_steps = self._greedy_steps(asked, thresholds, depths)
        return {slot: nodes[:1] if greedy_steps else nodes for slot, nodes in asked.items()}, greedy_steps

    def _greedy_steps(
        self, asked: Mapping[int, Sequence[int]], thresholds: Mapping[int, float], depths: Mapping[int, int]
    ) -> int:
        """Nodes behind the most probable one of each sequence, best child after best child, that the next step had
        better be about; 0 where it had better be about all that is asked.

        The steps of a greedy path follow each other without the host, and are about a single row: a chain's take 0.52
        ms each, where one about 32 nodes takes 2.5 with what the host does (135M draft, H200). So an accurate draft
        gets deep and an inaccurate one wide.
        """
        length = MOST_GREEDY_STEPS
        for slot, (node, *_) in asked.items():
            tree = self.trees[slot].tree
            margin = thresholds[slot] - tree.log_probability(node)
            length = min(length, depths[slot] - tree.depth(node), self.model.num_places - len(tree.places) - 1)
            length = min(length, math.floor(min(MOST_GREEDY_STEPS, margin / math.log(self._best_rate))))
        if not asked or length <= 0:
            return 0
        greedy_s, step_s = self._worth.seconds(1 + length), self._worth.seconds(1)
        if greedy_s is None or step_s is None:
            return length if greedy_s is None else 0  # find out how long it takes
        deep = sum(sum(self._chances(slot, nodes[:1], length)) for slot, nodes in asked.items())
        wide = sum(sum(self._chances(slot, nodes, 0)) for slot, nodes in asked.items())
        return length if deep / greedy_s > wide / step_s else 0

    def _chances(self, slot: int, nodes: Sequence[int], greedy_steps: int) -> list[float]:
        """Probabilities of what a step is about: of these nodes and of what is on the greedy path behind each."""
        firsts = [math.exp(self.trees[slot].tree.log_probability(node)) for node in nodes]
        return [first * self._best_rate**level for first in firsts for level in range(1 + greedy_steps)]

    def _expand(self, asked: Mapping[int, Sequence[int]], greedy_steps: int) -> dict[int, list[float]]:
        """Ask the draft what follows some nodes of each sequence, and so many behind the last of them, in one go, and
        put it into the trees.

        Returns:
            By sequence the log-probabilities of the candidates that are new and not too deep for the window.
        """
        placed = {slot: self.trees[slot].placed(nodes, greedy_steps) for slot, nodes in asked.items()}
        answers = self.model.expand(
            {slot: self.trees[slot].asked(places, further) for slot, (places, further) in placed.items()}
        )
        found: dict[int, list[float]] = {}
        for slot, (places, further) in placed.items():
            answered = iter(answers[slot])
            found[slot] = []
            node, children = -1, Children([], [])
            for (node, place), children in zip(places.items(), answered, strict=False):
                found[slot] += self._note(slot, node, place, children)
            for place, behind in zip(further, answered, strict=False):
                if not children.tokens:  # logits of NaN: what follows is nothing
                    break
                (node,) = self.trees[slot].tree.walk(children.tokens[:1], node)
                children = behind
                found[slot] += self._note(slot, node, place, children)
        return found

    def _note(self, slot: int, node: int, place: int | None, children: Children) -> list[float]:
        """Put what follows a node into its tree: the log-probabilities of what is new there and not too deep."""
        one = self.trees[slot]
        chances = self.probabilities.log_probabilities(children.scores)
        if chances:
            self._best_rate += (math.exp(chances[0]) - self._best_rate) / _RATE_MEMORY
        count = max(min(1, len(chances)), bisect_right(chances, -_LEAST_CHANCE, key=neg))
        new = one.tree.offer(node, children.tokens[:count], chances[:count], self.name)
        one.children[node] = children
        one.tree.set_expanded(node, place)
        return new if one.tree.depth(node) < one.budget.gamma else []


@cache
def _drafting_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all runtimes: libraries keep a workspace for every stream that they have ever worked on."""
    return torch.cuda.Stream(device)
