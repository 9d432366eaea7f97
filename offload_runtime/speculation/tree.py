"""The candidates behind a text, what a draft and n-grams have said so far, and the drafter that lets them grow while a
pass runs and proposes the most probable ones.

`ModelDrafter` decides which nodes the next step of the draft is about, a `DraftRunner` says what follows them, and a
`CandidateTree` keeps what was found.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heappushpop
from itertools import count as numbers
from itertools import islice
from math import inf
from operator import neg

import torch

from offload_runtime.core import DraftBudget, TokenTree
from offload_runtime.params import SamplingParams
from offload_runtime.runners.graphs import MOST_GREEDY_STEPS
from offload_runtime.speculation.draft import Asked, ChildProbabilities, Children, DraftRunner, drafting_stream
from offload_runtime.speculation.ngram import NgramDrafter
from offload_runtime.speculation.step import Budgets, Drafter, StepWorth, Texts, chains_where


@dataclass(slots=True)
class Node:
    """Is a candidate. Its depth and log-probability count from where the tree once began, so that a new root changes
    neither; `CandidateTree` says what they are from the root on."""

    token: int
    parent: int
    depth: int
    log_probability: float
    source: str  # who has proposed it first; empty for the root
    children: dict[int, int] = field(default_factory=dict)  # by token, in the order in which they were added
    said: Children | None = None  # what the draft said behind it; None where it was not asked
    places: tuple[int, ...] = ()  # of the keys of the path to it, from below the root on; of nodes that are expanded
    # Log-probabilities of further children by token, the likeliest first. They become nodes one by one, as a tree of
    # thousands of nodes would have eight times as many; `last`, the newest of them, is likelier than those left.
    offered: dict[int, float] = field(default_factory=dict)
    last: int = -1


class CandidateTree:
    """Keeps the candidates behind a text.

    Args:
        token: The text's last one, the root.
        source: Who expands nodes.

    Attributes:
        text: What they are behind.
        budget: What may be proposed of it.
        nodes: By their numbers, to be read.
        root: The number of the root.
        places: Those that hold keys of nodes, to be read.
        expected: Log-probability of the least probable node that the window may have, by the last one's.
    """

    text: list[int]
    budget: DraftBudget

    def __init__(self, token: int, source: str) -> None:
        self._made, self._source, self.expected = 0, source, -inf
        self.begin(token)

    def begin(self, token: int) -> None:
        """Begin anew with a root and nothing else."""
        self.root = self._made
        self._made += 1
        self._keep({self.root: Node(token, -1, 0, 0.0, "")})

    def _keep(self, nodes: dict[int, Node]) -> None:
        """Keep only these nodes, the root among them, and order those that wait to be expanded."""
        self.nodes = nodes
        self.places = {node.places[-1] for node in nodes.values() if node.places}
        self._first_free = 0
        # What a raised probability or an expansion leaves behind in here is recognised when it comes up.
        self._frontier = [(-node.log_probability, key) for key, node in nodes.items() if node.said is None]
        heapify(self._frontier)

    def free_places(self, count: int) -> list[int]:
        """Return the first so many places that hold keys of no living candidate."""
        while self._first_free in self.places:
            self._first_free += 1
        return list(islice((place for place in numbers(self._first_free) if place not in self.places), count))

    def depth(self, node: int) -> int:
        """Return a node's distance from the root."""
        return self.nodes[node].depth - self.nodes[self.root].depth

    def log_probability(self, node: int) -> float:
        """Return how probable it is that the text goes on as a node's path does."""
        return self.nodes[node].log_probability - self.nodes[self.root].log_probability

    def add(self, parent: int, token: int, log_probability: float, source: str) -> int:
        """Add what may follow a node, and return it; if it is there already, the larger of the two probabilities
        counts, which are those given the parent."""
        child = self._child(parent, token)
        if child is None:
            return self._make(parent, token, log_probability, source)
        self._raise(child, parent, log_probability)
        return child

    def expand(self, key: int, place: int | None, said: Children, log_probabilities: Sequence[float]) -> list[float]:
        """Add what the draft says behind a node.

        Args:
            key: The node, whose parent was expanded before.
            place: Where its keys are; None for the root, whose keys are where the text's are.
            said: What may follow, all different and the likeliest first.
            log_probabilities: Of each that is worth it, given the node.

        Returns:
            Log-probabilities of the paths that end with those that were not there.
        """
        node = self.nodes[key]
        assert node.said is None and place not in self.places, "a node is expanded once, and has a place of its own"
        new = dict(zip(said.tokens, log_probabilities, strict=False))
        for token in node.children.keys() & new:
            self._raise(node.children[token], key, new.pop(token))
        # To the last bit what `log_probability` will say of the nodes: a candidate is not more probable than itself.
        root = self.nodes[self.root].log_probability
        found = [node.log_probability + log_probability - root for log_probability in new.values()]
        node.said, node.offered = said, new
        if place is not None:
            node.places = (*self.nodes[node.parent].places, place)
            self.places.add(place)
        if new:
            self._take_offer(key)
        self._make_sibling(key)
        return found

    def _child(self, parent: int, token: int) -> int | None:
        """Return the node that says this behind another one, where there is one."""
        above = self.nodes[parent]
        if token in above.offered:
            return self._make(parent, token, above.offered.pop(token), self._source)
        return above.children.get(token)

    def _make(self, parent: int, token: int, log_probability: float, source: str) -> int:
        assert log_probability <= 0
        above = self.nodes[parent]
        node, self._made = self._made, self._made + 1
        self.nodes[node] = Node(token, parent, above.depth + 1, above.log_probability + log_probability, source)
        above.children[token] = node
        heappush(self._frontier, (-self.nodes[node].log_probability, node))
        return node

    def _take_offer(self, parent: int) -> int:
        """Make the likeliest of the children that were only offered so far a node, and return it."""
        above = self.nodes[parent]
        token = next(iter(above.offered))
        above.last = self._make(parent, token, above.offered.pop(token), self._source)
        return above.last

    def _make_sibling(self, node: int) -> int | None:
        """Make the node that is to be asked for after this one, if its parent still has one to offer."""
        above = self.nodes.get(self.nodes[node].parent)
        if above is None or above.last != node or not above.offered:
            return None
        return self._take_offer(self.nodes[node].parent)

    def _raise(self, top: int, parent: int, log_probability: float) -> None:
        """Make a node and all below it more probable, if this is more than it has, given its parent."""
        by = self.nodes[parent].log_probability + log_probability - self.nodes[top].log_probability
        below = [top] if by > 0 else []
        while below:
            key = below.pop()
            node = self.nodes[key]
            # Never above its parent by a rounding.
            raised = min(node.log_probability + by, self.nodes[node.parent].log_probability)
            moved, node.log_probability = raised > node.log_probability, raised
            if moved and node.said is None:  # else it was rounded away, and the node waits already
                heappush(self._frontier, (-raised, key))
            below.extend(node.children.values())

    def next_to_expand(self, count: int, depth: int, least: float, *, behind_parents: bool = False) -> list[int]:
        """Return the most probable nodes that have not been expanded, at most `count`, none deeper than `depth` and all
        more probable than `least` (a logarithm), parents before their children; or only those `behind_parents` that
        have been."""
        root, picked, deeper = self.nodes[self.root], list[tuple[float, int]](), list[tuple[float, int]]()
        limit, frontier = root.depth + depth, self._frontier
        while frontier and len(picked) < count and -frontier[0][0] - root.log_probability > least:
            entry = heappop(frontier)
            node = self.nodes.get(entry[1])
            if node is None or node.said is not None or node.log_probability != -entry[0]:
                continue
            above = self.nodes.get(node.parent)
            if node.depth > limit or (behind_parents and above is not None and above.said is None):
                deeper.append(entry)
            else:
                picked.append(entry)
                self._make_sibling(entry[1])
        for entry in (*picked, *deeper):
            heappush(frontier, entry)
        return [key for _, key in picked]

    def window(self) -> tuple[TokenTree, list[int]]:
        """Return the most probable candidates that may be proposed, with each the path to it, and their nodes."""
        count, limit = self.budget.size, self.nodes[self.root].depth + self.budget.gamma
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
        """Return the nodes below `start` (None: the root) of a path that begins as these tokens do, as far as there is
        one."""
        path: list[int] = []
        node: int | None = self.root if start is None else start
        for token in tokens:
            assert node is not None
            if (node := self._child(node, token)) is None:
                break
            path.append(node)
        return path

    def follow(self, path: Sequence[int]) -> None:
        """Let the text go on down a path, at least a node: keep what was guessed behind it and let go of everything
        else. Its end becomes the root, and has its keys where the text's are."""
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

    def placed(self, nodes: Sequence[int], further: int) -> tuple[dict[int, int | None], list[int]]:
        """Return a free place for every one of these nodes, None for the root, whose keys have a place, and so many
        more for a greedy path behind the last of them."""
        others = [node for node in nodes if node != self.root]
        places = self.free_places(len(others) + further)
        placed = dict(zip(others, places, strict=False))
        return {node: placed.get(node) for node in nodes}, places[len(others) :]

    def asked(self, placed: Mapping[int, int | None], greedy_places: Sequence[int]) -> Asked:
        """Return what a step is to find out about nodes that have been given their places only now, parents first, and
        about the greedy path behind the last of them."""
        nodes, paths = self.nodes, dict[int, tuple[int, ...]]()
        for node, place in placed.items():
            above = nodes[node].parent
            assert place is None or above in paths or nodes[above].said is not None, "what comes before a node has keys"
            paths[node] = () if place is None else (*(paths[above] if above in paths else nodes[above].places), place)
        return Asked(self.text, [(nodes[node].token, path) for node, path in paths.items()], greedy_places)


# Less probable than this is not drafted past a window: it would hardly ever be of use.
NEGLIGIBLE = math.log(1e-4)
# Children less probable than this, given their parent, are not worth the host's time; the first is always kept.
_LEAST_CHANCE = math.log(2e-3)
# How probable the best child of a node is before anything is known, and how many nodes this looks back on.
_FIRST_RATE, _RATE_MEMORY = 0.75, 50
# A window is expected to reach down to about as improbable nodes as the one before: to so many times less, at first. So
# a tenth of the rows are not asked about, in as many steps, and the host has a tenth less to do (SmolLM2 and a copy
# with 12 % of noise, trees of 64 nodes).
_MARGIN = math.log(2)


class ModelDrafter(Drafter):
    """Proposes what a draft says: grows trees for sequences whose budgets may branch, where its cache has room for
    them, and chains for the others.

    Where trees grow all of the draft's work on CUDA is on a stream of its own, which waits for the target's only when a
    request joins: draft and target share nothing that either of them writes. A copy that shares the target's cache also
    waits, before it proposes, for the keys that the last pass has moved to their places. If they share a pool of
    experts the draft is on the target's stream, and does not go on beside a pass: that one has ended for the host,
    which acts in all of its layers, when it has ended for the device but for a layer.

    Args:
        runner: Of the draft.
        ngrams: Whose guesses join the trees; `WithNgrams` tells them who joins.
        worth: Says when a step is not worth the wait any more.

    Attributes:
        trees: By slot what has grown behind its text; nothing where an interruption may have left it half made.
        probabilities: What the draft's scores are worth.
    """

    def __init__(self, runner: DraftRunner, *, ngrams: NgramDrafter, worth: StepWorth) -> None:
        self.runner, self._ngrams, self._worth = runner, ngrams, worth
        self.draft_state = runner.draft_state
        self.name: str = runner.name
        own_streams = runner.device.type == "cuda" and runner.num_places > 0 and not runner.on_demand
        self._streams = [drafting_stream(device) for device in runner.devices if own_streams]
        self._joined: set[int] = set()
        # How tokens are chosen, but for the noise, since a request joined that was alone: how scores differ.
        self._sampling: SamplingParams | None = None
        self.probabilities, self._best_rate = ChildProbabilities(), _FIRST_RATE  # the latter of a node's best child
        self.trees: dict[int, CandidateTree] = {}
        self._verified: list[int] = []  # slots whose windows are being verified

    def modes(self, texts: Texts) -> Sequence[str]:
        modes = chains_where(self.runner.room, texts)
        return (*modes, "tree") if modes and self.runner.num_places else modes

    def join(self, slot: int, params: SamplingParams) -> None:
        self._drop(slot)
        self._worth.pause()
        self._follow_target()
        if not self._joined and params.without_noise != self._sampling:
            self.probabilities, self._best_rate = ChildProbabilities(), _FIRST_RATE  # other scores
            self._worth.forget()
            self._sampling = params.without_noise
        self._joined.add(slot)
        with self._at_work():
            self.runner.join(slot, params)

    def leave(self, slot: int) -> None:
        self._drop(slot)
        with self._at_work():
            self.runner.leave(slot)

    def _drop(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self._joined.discard(slot)
        self.trees.pop(slot, None)
        self._verified = [other for other in self._verified if other != slot]

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        with self._at_work():
            self.runner.prepare(slot, tokens)

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        if slot in self._joined:  # else another text is decoded plainly there
            self._follow_target()
            for stream in self._streams[:1]:
                hidden.record_stream(stream)
            with self._at_work():
                self.runner.observe(slot, position, tokens, hidden)

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        grows, empty = self.runner.num_places > 0, dict.fromkeys(budgets, TokenTree())
        budgets = {slot: budget for slot, budget in budgets.items() if self.runner.texts.knows(slot, texts[slot])}
        chains = {slot: budget for slot, budget in budgets.items() if budget.tree_nodes is None or not grows}
        self._verified, proposals = [], dict[int, TokenTree]()
        if self.runner.shares_kv:
            self._follow_target()
        with self._at_work():
            grown = [slot for slot in budgets if slot in self.trees]
            self._worth.begin(sum(len(texts[slot]) - len(self.trees[slot].text) for slot in grown))
            if chains:
                for slot in chains:
                    self.trees.pop(slot, None)
                proposals = self._chains(texts, chains)
            if branching := [slot for slot in budgets if slot not in chains]:
                for slot in branching:
                    self._follow(slot, texts[slot], budgets[slot])
                self._fill_windows(branching)
                proposals |= {slot: self.trees[slot].window()[0] for slot in branching}
                self._verified = branching
        return empty | proposals

    def _chains(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        """Return chains; they end with the context, and where logits are NaN."""
        room = self.runner.room
        counts = {slot: min(budget.longest_chain, room(len(texts[slot]))) for slot, budget in budgets.items()}
        asked = {slot: count for slot, count in counts.items() if count > 0}
        found = self.runner.chains(texts, asked) if asked else {}
        return {slot: TokenTree.chain(found.get(slot, ()), self.name) for slot in budgets}

    def ahead(self, pending: Callable[[], bool]) -> None:
        """Expand the trees past their windows, one step at a time, as far as there are places for what is found."""
        with self._at_work():
            # A pass that reads a prompt may run after one that was about nothing that was proposed.
            known = [slot for slot in self._verified if self.runner.texts.knows(slot, self.trees[slot].text)]
            self._verified = known
            while self._verified and not self.runner.on_demand and pending():
                started_s = time.perf_counter()
                # So deep that a window behind the deepest of this one is full.
                asked, greedy_steps = self._next_step(
                    dict.fromkeys(self._verified, NEGLIGIBLE), lambda gamma: 2 * gamma
                )
                if not asked:
                    return
                self._expand(asked, greedy_steps)
                self._worth.stepped(time.perf_counter() - started_s, 1 + greedy_steps, hidden=True)

    def _follow_target(self) -> None:
        """Let the draft wait for what the target has been given so far."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Put the draft's work on its own stream of each device; what is cut off is not trusted afterwards."""
        with ExitStack() as undo:
            for stream in reversed(self._streams):  # with the last one its device becomes the current one
                undo.enter_context(torch.cuda.stream(stream))
            try:
                yield
            except BaseException:
                self.trees.clear()
                self._verified = []
                self._worth.pause()
                raise

    def _follow(self, slot: int, text: Sequence[int], budget: DraftBudget) -> None:
        """Let a tree stand behind a text: what is left of the one before, or a new one, with what n-grams say."""
        text, tree = list(text), self.trees.pop(slot, None)
        if tree is None or text[: len(tree.text)] != tree.text:
            tree = CandidateTree(text[-1], self.name)
        else:
            new = text[len(tree.text) :]
            path = tree.walk(new)
            # Behind the root and each node of the path that came true the target has said some child, or none of them.
            for node, token in zip([tree.root, *path], new, strict=False):
                if (said := tree.nodes[node].said) is not None:
                    self.probabilities.observe(said, token)
            if not self._adopt(slot, tree, new, path) or len(path) < len(new):
                tree.begin(text[-1])
            elif path:
                tree.follow(path)
        tree.text, tree.budget = text, budget
        # What followed earlier occurrences of the text's ending, as far as a window reaches down.
        guesses, nodes = self._ngrams.guesses(slot, text, budget, max(NEGLIGIBLE, tree.expected)), [tree.root]
        guess = guesses.tree
        for token, parent, chance in zip(guess.tokens, guess.parents, guesses.log_probabilities, strict=True):
            nodes.append(tree.add(nodes[parent + 1], token, chance, self._ngrams.name))
        self.trees[slot] = tree

    def _adopt(self, slot: int, tree: CandidateTree, new: Sequence[int], path: Sequence[int]) -> bool:
        """Bring the keys of the path that came true to their places, as far as it was expanded.

        Returns:
            Whether the keys before it are at theirs, without which the tree is of no use, or will be.
        """
        runner, asked = self.runner, tree.nodes[tree.root].said is not None
        if asked and not runner.rereads and not runner.texts.holds(slot, tree.text):
            return False
        # Nodes that were not expanded have none.
        places = max((tree.nodes[node].places for node in path), key=len, default=())
        if places:
            runner.adopt(slot, new, places)
        return True

    def _fill_windows(self, slots: Sequence[int]) -> None:
        """Expand until no node that could still be has a chance to be among the most probable of its window; where
        budgets are aware of the cost only as long as what a step may add is worth the time."""
        # By slot a heap of the largest log-probabilities, as many as its window holds: what is to be among them has to
        # exceed the first one, which is -inf as long as there are fewer.
        best: dict[int, list[float]] = {}
        for slot, tree in ((slot, self.trees[slot]) for slot in slots):
            found = [tree.log_probability(node) for node in tree.window()[1]]
            best[slot] = [-inf] * (tree.budget.size - len(found)) + sorted(found)
        guessed = True
        while True:
            started_s = time.perf_counter()
            thresholds = {
                slot: max(window[0], self.trees[slot].expected if guessed else -inf) for slot, window in best.items()
            }
            # Children are less probable than their parent.
            asked, greedy_steps = self._next_step(thresholds, lambda gamma: gamma - 1)
            # Without a first step nothing is proposed and no step is timed, so that this would never change.
            cost_aware = all(
                self.trees[slot].budget.cost_aware and self.trees[slot].root not in nodes
                for slot, nodes in asked.items()
            )
            # All its children together are at most as probable as a node, and each new one drives out another.
            gains = (
                chance - math.exp(best[slot][0])
                for slot, nodes in asked.items() for chance in self._chances(slot, nodes, greedy_steps)
            )  # fmt: skip
            if not asked or (cost_aware and not self._worth.pays(sum(gains), 1 + greedy_steps)):
                if not guessed:
                    break
                guessed = False  # a step takes as long for all that could be in a window
                continue
            for slot, found in self._expand(asked, greedy_steps).items():
                for log_probability in found:
                    heappushpop(best[slot], log_probability)
            # All that delays the pass: choosing what to ask and noting the answers, too.
            self._worth.stepped(time.perf_counter() - started_s, 1 + greedy_steps)
        for slot, window in best.items():
            if window[0] > -inf:
                self.trees[slot].expected = window[0] - _MARGIN

    def _next_step(
        self, thresholds: Mapping[int, float], deepest: Callable[[int], int]
    ) -> tuple[dict[int, list[int]], int]:
        """Return what the next step is about: by slot the most probable nodes to expand, as many as a step and the
        places take, of those above its threshold; or the first of them, and the length of a greedy path behind it.

        Args:
            thresholds: Log-probabilities by slot, of all whose trees take part.
            deepest: From a budget's gamma to the depth of nodes that may be expanded.
        """
        asked, depths, width = dict[int, list[int]](), dict[int, int](), self.runner.width(len(thresholds))
        for slot, threshold in thresholds.items():
            tree = self.trees[slot]
            # The keys of a node that is expanded need a position.
            most_depth = min(self.runner.room(len(tree.text)) - 1, self.runner.most_depth)
            depth = depths[slot] = min(deepest(tree.budget.gamma), most_depth)
            # The root needs no place, but is expanded alone or first.
            count = min(width, self.runner.num_places - len(tree.places))
            level = self.runner.hidden is not None
            if depth >= 0 and (nodes := tree.next_to_expand(count, depth, threshold, behind_parents=level)):
                asked[slot] = nodes
        greedy_steps = self._greedy_steps(asked, thresholds, depths)
        return {slot: nodes[:1] if greedy_steps else nodes for slot, nodes in asked.items()}, greedy_steps

    def _greedy_steps(
        self, asked: Mapping[int, Sequence[int]], thresholds: Mapping[int, float], depths: Mapping[int, int]
    ) -> int:
        """Return how many nodes behind the most probable one of each sequence, best child after best child, the next
        step had better be about; 0 where it had better be about all that is asked.

        The steps of a greedy path follow each other without the host, and are about a single row: a chain's take 0.52
        ms each, where one about 32 nodes takes 2.5 with what the host does (135M draft, H200). So an accurate draft
        gets deep and an inaccurate one wide.
        """
        length = MOST_GREEDY_STEPS
        for slot, (node, *_) in asked.items():
            tree = self.trees[slot]
            margin = thresholds[slot] - tree.log_probability(node)
            length = min(length, depths[slot] - tree.depth(node), self.runner.num_places - len(tree.places) - 1)
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
        """Return probabilities of these nodes and of what is on a greedy path behind each."""
        firsts = [math.exp(self.trees[slot].log_probability(node)) for node in nodes]
        return [first * self._best_rate**level for first in firsts for level in range(1 + greedy_steps)]

    def _expand(self, asked: Mapping[int, Sequence[int]], greedy_steps: int) -> dict[int, list[float]]:
        """Ask the draft what follows some nodes of each sequence, and so many behind the last of them, in one go, and
        put it into the trees.

        Returns:
            By slot the log-probabilities of the candidates that are new and not too deep for the window.
        """
        placed = {slot: self.trees[slot].placed(nodes, greedy_steps) for slot, nodes in asked.items()}
        answers = self.runner.expand(
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
                (node,) = self.trees[slot].walk(children.tokens[:1], node)
                children = behind
                found[slot] += self._note(slot, node, place, children)
        return found

    def _note(self, slot: int, node: int, place: int | None, children: Children) -> list[float]:
        """Put what follows a node into its tree; return the log-probabilities of what is new there and not too deep."""
        tree, chances = self.trees[slot], self.probabilities.log_probabilities(children.scores)
        if chances:
            self._best_rate += (math.exp(chances[0]) - self._best_rate) / _RATE_MEMORY
        count = max(min(1, len(chances)), bisect_right(chances, -_LEAST_CHANCE, key=neg))
        new = tree.expand(node, place, children, chances[:count])
        return new if tree.depth(node) < tree.budget.gamma else []
