"""The tree of candidates against one that is kept as a plain list of paths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.speculation import CandidateTree, StepWorth
from offload_runtime.speculation.calibration import ChildProbabilities, MatchRates
from tests.helpers.tree_drafts import path_of

Path = tuple[int, ...]

# Sums of these are exact, so that equals are equals in every order.
_CHANCES = st.integers(-5 << 10, 0).map(lambda steps: steps / 1024)


@dataclass
class Entry:
    """A candidate by the book; `chance` is given its parent."""

    chance: float
    source: str
    slot: int | None = None
    expanded: bool = False
    offered: bool = False


class ListedTree:
    """Every candidate under its whole path, the root's empty one included."""

    def __init__(self) -> None:
        self.entries: dict[Path, Entry] = {(): Entry(0.0, "")}

    def add(self, path: Path, chance: float, source: str) -> None:
        known = self.entries.setdefault(path, Entry(chance, source))
        known.chance = max(known.chance, chance)

    def log_probability(self, path: Path) -> float:
        return math.fsum(self.entries[path[: end + 1]].chance for end in range(len(path)))

    def follow(self, tokens: Path) -> bool:
        count = len(tokens)
        if tokens not in self.entries:
            self.entries = {(): Entry(0.0, "")}
            return False
        self.entries = {path[count:]: entry for path, entry in self.entries.items() if path[:count] == tokens}
        if tokens:
            self.entries[()].slot = None
        return True


def node_of(tree: CandidateTree, path: Path) -> int:
    nodes = tree.walk(path)
    assert len(nodes) == len(path)
    return nodes[-1] if nodes else tree.root


def compare(tree: CandidateTree, listed: ListedTree, draw: st.DataObject) -> None:
    """Everything that can be asked of both; last what makes nodes of all that is offered."""
    taken = {entry.slot for entry in listed.entries.values() if entry.slot is not None}
    assert len(tree.slots) == len(taken)
    assert tree.free_slots(5) == [slot for slot in range(len(taken) + 5) if slot not in taken][:5]
    count, depth = draw.draw(st.integers(0, 12)), draw.draw(st.integers(0, 5))
    waiting = sorted(
        (listed.log_probability(path) for path, entry in listed.entries.items()
         if not entry.expanded and len(path) <= depth), reverse=True
    )  # fmt: skip
    picked = tree.next_to_expand(count, depth)
    assert len(set(picked)) == len(picked) and all(not tree.nodes[node].expanded for node in picked)
    assert [tree.log_probability(node) for node in picked] == pytest.approx(waiting[:count], abs=1e-9)
    ranked = sorted((listed.log_probability(path) for path in listed.entries if 0 < len(path) <= depth), reverse=True)
    proposal, nodes = tree.best(count, depth)
    assert [tree.log_probability(node) for node in nodes] == pytest.approx(ranked[:count], abs=1e-9)
    assert len(set(nodes)) == len(nodes) == len(proposal)
    for index, node in enumerate(nodes):  # a `Proposal` checks by itself that parents come first
        parent = proposal.parents[index]
        assert path_of(tree, node) == (*(path_of(tree, nodes[parent]) if parent >= 0 else ()), proposal.tokens[index])
        assert proposal.sources[index] == tree.nodes[node].source and tree.depth(node) <= depth
    for path, entry in listed.entries.items():
        node = node_of(tree, path)
        assert tree.depth(node) == len(path) and path_of(tree, node) == path
        assert tree.log_probability(node) == pytest.approx(listed.log_probability(path), abs=1e-9)
        assert tree.nodes[node].expanded == entry.expanded
        slots = tuple(listed.entries[path[: end + 1]].slot for end in range(len(path)))
        assert tree.nodes[node].slots == (slots if entry.expanded else ())
        assert not path or tree.nodes[node].source == entry.source


@given(st.data())
def test_a_tree_is_what_a_list_of_paths_says(draw: st.DataObject) -> None:
    tree, listed = CandidateTree(7), ListedTree()
    for _ in range(draw.draw(st.integers(1, 8))):
        for _ in range(draw.draw(st.integers(0, 10))):
            path = draw.draw(st.sampled_from(sorted(listed.entries)))
            token = draw.draw(st.integers(0, 3))
            chance, source = draw.draw(_CHANCES), draw.draw(st.sampled_from("ab"))
            listed.add((*path, token), chance, source)
            child = tree.add(node_of(tree, path), token, chance, source)
            assert path_of(tree, child) == (*path, token)
        for path in draw.draw(st.lists(st.sampled_from(sorted(listed.entries)), max_size=3, unique=True)):
            entry = listed.entries[path]
            if not entry.offered:
                entry.offered = True
                tokens = draw.draw(st.lists(st.integers(0, 5), max_size=5, unique=True))
                chances = sorted((draw.draw(_CHANCES) for _ in tokens), reverse=True)
                new = [listed.log_probability(path) + chance for token, chance in zip(tokens, chances, strict=True)
                       if (*path, token) not in listed.entries]  # fmt: skip
                assert tree.offer(node_of(tree, path), tokens, chances, "c") == pytest.approx(new, abs=1e-9)
                for token, chance in zip(tokens, chances, strict=True):
                    listed.add((*path, token), chance, "c")
        for node in tree.next_to_expand(draw.draw(st.integers(0, 4)), 3):
            slot = None if node == tree.root else draw.draw(st.sampled_from(tree.free_slots(3)))
            entry = listed.entries[path_of(tree, node)]
            entry.expanded, entry.slot = True, slot
            tree.set_expanded(node, slot)
        compare(tree, listed, draw)
        if draw.draw(st.booleans()):
            known = draw.draw(st.sampled_from(sorted(listed.entries)))
            tokens = (*known, *draw.draw(st.lists(st.integers(0, 3), max_size=1)))
            assert tree.follow(tokens) == listed.follow(tokens)
            assert tree.nodes[tree.root].token == (tokens[-1] if tokens else tree.nodes[tree.root].token)
            compare(tree, listed, draw)


@dataclass
class Twins:
    """A tree that is offered children and one that has all of them at once, each with numbers of its own. `known` are
    nodes of the first, under their paths from where both began; what was only offered is never looked for."""

    chance: random.Random
    exact: bool  # no two candidates are equally probable
    lazy: CandidateTree = field(default_factory=lambda: CandidateTree(0))
    eager: CandidateTree = field(default_factory=lambda: CandidateTree(0))
    above: Path = ()  # of the root
    known: dict[Path, int] = field(default_factory=dict)
    offered: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.known[()] = self.lazy.root

    def drawn_chance(self) -> float:
        """Sums of these are exact too."""
        return -self.chance.randrange(1, 1 << 40) / (1 << 38) if self.exact else -self.chance.randrange(8) / 2

    def drawn_path(self) -> Path:
        return self.chance.choice(sorted(self.known))

    def in_eager(self, path: Path) -> int:
        return self.eager.root if path == self.above else self.eager.walk(path[len(self.above) :])[-1]

    def learn(self, node: int) -> Path:
        path = (*self.above, *path_of(self.lazy, node))
        assert self.known.setdefault(path, node) == node
        return path

    def add(self) -> None:
        """Something that may have been offered, but not looked for, may be there, or not."""
        path, token, said = self.drawn_path(), self.chance.randrange(7), self.drawn_chance()
        self.learn(self.lazy.add(self.known[path], token, said, "b"))
        self.eager.add(self.in_eager(path), token, said, "b")

    def offer(self, path: Path) -> None:
        if path in self.offered:
            return
        self.offered.add(path)
        tokens = self.chance.sample(range(7), self.chance.randrange(7))
        chances = sorted((self.drawn_chance() for _ in tokens), reverse=True)
        above = self.in_eager(path)
        before = list(self.eager.nodes[above].children.values())
        added = [self.eager.add(above, token, said, "a") for token, said in zip(tokens, chances, strict=True)]
        expected = [self.eager.log_probability(node) for node in added if node not in before]
        assert self.lazy.offer(self.known[path], tokens, chances, "a") == expected

    def expand(self, path: Path) -> None:
        """Parents come before their children."""
        above = path == self.above or self.lazy.nodes[self.known[path[:-1]]].expanded
        if self.lazy.nodes[self.known[path]].expanded or not above:
            return
        (slot,) = self.lazy.free_slots(1)
        for tree, node in ((self.lazy, self.known[path]), (self.eager, self.in_eager(path))):
            tree.set_expanded(node, None if path == self.above else slot)

    def offer_any(self) -> None:
        self.offer(self.drawn_path())

    def expand_any(self) -> None:
        self.expand(self.drawn_path())

    def same(self, ours: list[int], theirs: list[int]) -> list[Path]:
        """Of equally probable ones either tree may have taken any."""
        assert list(map(self.lazy.log_probability, ours)) == list(map(self.eager.log_probability, theirs))
        paths = [self.learn(node) for node in ours]
        if self.exact:
            assert paths == [(*self.above, *path_of(self.eager, node)) for node in theirs]
            assert [self.lazy.nodes[node].source for node in ours] == [self.eager.nodes[node].source for node in theirs]
        return paths

    def ask(self) -> None:
        """For what is to be expanded next; some of it is, before or after it has been offered children."""
        count, depth = self.chance.randrange(6), self.chance.randrange(6)
        for path in self.same(self.lazy.next_to_expand(count, depth), self.eager.next_to_expand(count, depth)):
            if self.chance.random() < 0.7:
                for step in self.chance.sample([self.offer, self.expand], 2):
                    step(path)

    def window(self) -> None:
        count, depth = self.chance.randrange(12), self.chance.randrange(6)
        self.same(self.lazy.best(count, depth)[1], self.eager.best(count, depth)[1])

    def follow(self) -> None:
        """Mostly something that is there, which may only have been offered."""
        node, tokens = self.eager.root, list[int]()
        while (below := self.eager.nodes[node].children) and self.chance.random() < 0.6:
            node = self.chance.choice(list(below.values()))
            tokens.append(self.eager.nodes[node].token)
        if self.chance.random() < 0.1:
            tokens.append(self.chance.randrange(7))
        assert self.lazy.follow(tokens) == self.eager.follow(tokens)
        self.above = (*self.above, *tokens)
        self.known = {path: node for path, node in self.known.items() if node in self.lazy.nodes}
        self.known[self.above] = self.lazy.root


@pytest.mark.parametrize("exact", [True, False], ids=["distinct", "ties"])
@pytest.mark.parametrize("seed", range(60))
def test_what_is_offered_comes_up_as_if_it_had_been_there(seed: int, exact: bool) -> None:
    chance = random.Random(seed)
    twins = Twins(chance, exact)
    steps = [twins.ask, twins.window, twins.add, twins.offer_any, twins.expand_any, twins.follow]
    for _ in range(150):
        chance.choices(steps, [8, 3, 4, 2, 2, 1])[0]()


def test_what_an_offer_says_of_candidates_is_what_the_tree_will_say() -> None:
    """To the last bit: else the least probable one of a window would be more probable than itself, and a step made for
    nothing."""
    chance = random.Random(5)
    tree = CandidateTree(0)
    for token in range(1, 200):
        tree.set_expanded(tree.root, None)
        child = tree.add(tree.root, token, -chance.random(), "a")
        said = tree.offer(child, [1, 2, 3], sorted((-chance.random() for _ in range(3)), reverse=True), "a")
        assert said == [tree.log_probability(tree.walk([below], child)[0]) for below in (1, 2, 3)]
        assert tree.follow([token])


def test_a_node_that_became_likelier_takes_its_branch_with_it() -> None:
    tree = CandidateTree(1)
    rare, likely = tree.add(tree.root, 5, -3.0, "a"), tree.add(tree.root, 6, -1.0, "a")
    below = tree.add(rare, 7, -0.25, "a")
    tree.set_expanded(tree.root, None)
    assert tree.next_to_expand(3, 9) == [likely, rare, below]
    assert tree.add(tree.root, 5, -0.5, "b") == rare and tree.nodes[rare].source == "a"
    assert tree.next_to_expand(3, 9) == [rare, below, likely]
    assert tree.log_probability(below) == -0.75
    assert tree.add(tree.root, 5, -2.0, "b") == rare and tree.log_probability(rare) == -0.5


def test_what_is_offered_becomes_nodes_when_likelier_ones_have_been_asked_for() -> None:
    tree = CandidateTree(1)
    tree.set_expanded(tree.root, None)
    assert tree.offer(tree.root, [5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0], "a") == [-1.0, -2.0, -3.0, -4.0]
    children = tree.nodes[tree.root].children  # by token
    first = children[5]
    assert tree.next_to_expand(0, 9) == [] and list(children) == [5]
    assert tree.next_to_expand(1, 9) == [first] and list(children) == [5, 6]
    tree.set_expanded(first, 0)
    assert tree.offer(first, [9, 5], [-0.5, -3.5], "a") == [-1.5, -4.5]
    assert [tree.log_probability(node) for node in tree.next_to_expand(3, 9)] == [-1.5, -2.0, -3.0]
    # Too deep ones bring up no others, and one of several that others thought of too is the same.
    assert tree.next_to_expand(1, 1) == [children[6]]
    likelier = tree.add(tree.root, 8, -0.25, "b")
    assert tree.nodes[likelier].source == "a" and tree.next_to_expand(9, 1)[0] == likelier
    proposal, nodes = tree.best(9, 9)
    assert proposal.tokens == (8, 5, 9, 6, 7, 5) and nodes[0] == likelier and len(children) == 4


def test_a_raise_that_is_rounded_away_makes_nobody_wait_twice() -> None:
    tree = CandidateTree(1)
    likely = tree.add(tree.root, 5, -1.0, "a")
    below = tree.add(likely, 6, -16.0, "a")
    tree.set_expanded(tree.root, None)
    tree.add(tree.root, 5, math.nextafter(-1.0, 0.0), "b")
    assert tree.next_to_expand(9, 9) == [likely, below]


def test_a_text_without_end_costs_no_more_and_more() -> None:
    """A tree that always comes true is never begun anew."""
    tree = CandidateTree(0)
    tree.set_expanded(tree.root, None)
    for token in range(1, 500):
        for child in (token, -token):
            tree.set_expanded(tree.add(tree.root, child, -0.5, "a"), tree.free_slots(1)[0])
        assert tree.follow([token]) and tree.nodes[tree.root].expanded
        assert not tree.slots and tree.nodes[tree.root].slots == ()
    child = tree.add(tree.root, 7, -0.5, "a")
    tree.set_expanded(child, 3)
    assert tree.nodes[child].slots == (3,)
    assert max(len(tree.nodes[node].slots) for node in tree.nodes) == 1, "only of what is below the root"


@pytest.mark.parametrize(("sharpness", "missed", "scale"), [(0.4, 0.1, 1.0), (2.5, 0.35, 1.0), (0.03, 0.1, 10.0)])
def test_probabilities_converge_to_what_happens(sharpness: float, missed: float, scale: float) -> None:
    """A target that says a child with probabilities of a softmax of unknown sharpness, or none of them."""
    import random

    chance = random.Random(3)
    learnt = ChildProbabilities()
    for _ in range(4000):
        scores = sorted((chance.gauss(0, 3 * scale) for _ in range(8)), reverse=True)
        said = None
        if chance.random() >= missed:
            said = chance.choices(range(8), [math.exp(sharpness * score) for score in scores])[0]
        learnt.observe(scores, said)
    assert learnt.missed == pytest.approx(missed, abs=0.1)
    assert learnt.sharpness == pytest.approx(sharpness, rel=0.25)
    # And so a path of three is right as often as it is said to be.
    hits, expected = 0, 0.0
    for _ in range(3000):
        right, log_probability = True, 0.0
        for _ in range(3):
            scores = sorted((chance.gauss(0, 3 * scale) for _ in range(8)), reverse=True)
            log_probability += learnt.log_probabilities(scores)[0]
            said = chance.choices(range(8), [math.exp(sharpness * score) for score in scores])[0]
            right = right and chance.random() >= missed and said == 0
        hits += right
        expected += math.exp(log_probability)
    assert hits / expected == pytest.approx(1, abs=0.3)


def test_probabilities_are_some_whatever_is_said() -> None:
    learnt = ChildProbabilities()
    for said in (None, 0, 1):
        for _ in range(2000):
            learnt.observe([900.0, -900.0], said)
            learnt.observe([], None)
            chances = learnt.log_probabilities([900.0, -900.0])
            assert all(chance < 0 for chance in chances) and sum(map(math.exp, chances)) < 1
    assert learnt.log_probabilities([]) == []


def test_rates_of_matches_follow_what_comes_true() -> None:
    rates = MatchRates()
    at_first = [rates.rate(matched) for matched in range(1, 200)]
    assert at_first == sorted(at_first) and 0 < at_first[0] < at_first[-1] < 1
    rates.observe(5, False)
    assert 0.9 * at_first[4] < rates.rate(5) < at_first[4], "one guess tells little"
    for request in range(1000):
        rates.observe(5, request % 4 == 0)
    assert rates.rate(4) == rates.rate(5) == pytest.approx(0.25, abs=0.05)
    assert [rates.rate(matched) for matched in (1, 2, 3, *range(6, 200))] == [*at_first[:3], *at_first[5:]]
    assert [math.exp(log) for log in rates.logs(5)] == pytest.approx([rates.rate(5), 1 - rates.rate(5)])
    for _ in range(200):
        rates.observe(5, True)
    assert rates.rate(5) > 0.6, "texts change their nature"
    for _ in range(5000):
        rates.observe(500, True)
        rates.observe(1, False)
    assert rates.rate(128) == rates.rate(500) < 1 and rates.rate(1) > 0, "never certain"


class Watched:
    """A `StepWorth` and the hands of its clock."""

    def __init__(self, free_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.worth = StepWorth(free_s, lambda: self.now_s)

    def stepped(self, *times_s: float) -> None:
        """Steps that took so long, each often enough to be believed."""
        for seconds in times_s:
            for _ in range(3):
                self.worth.stepped(seconds)

    def rounds(self, count: int, *, tokens: int, seconds: float) -> None:
        """So many, each of which gave so many tokens, and the beginning of another one."""
        for _ in range(count):
            self.now_s += seconds
            self.worth.begin(tokens)

    def least_gain(self) -> float:
        """From which on a step pays."""
        return min((gain / 100 for gain in range(1000) if self.worth.pays(gain / 100)), default=math.inf)


def test_a_step_pays_where_it_adds_more_than_its_time_is_worth() -> None:
    watched = Watched()
    assert watched.least_gain() == 0  # find out how long a step takes
    watched.rounds(1, tokens=0, seconds=0.0)
    watched.stepped(0.01)
    assert watched.least_gain() == math.inf, "nobody knows what time is worth"
    watched.rounds(4, tokens=6, seconds=0.2)
    assert watched.worth.tok_per_s == pytest.approx(30) and watched.least_gain() == pytest.approx(0.3, abs=0.011)
    watched.rounds(20, tokens=2, seconds=0.2)
    assert watched.least_gain() == pytest.approx(0.1, abs=0.011)
    watched.worth.pause()  # another answer
    watched.rounds(1, tokens=50, seconds=9.0)
    assert watched.least_gain() == pytest.approx(0.1, abs=0.011)
    watched.worth.forget()  # tokens are chosen in another way
    watched.rounds(1, tokens=50, seconds=9.0)
    assert watched.least_gain() == math.inf
    watched.rounds(1, tokens=6, seconds=0.2)
    assert watched.least_gain() == pytest.approx(0.3, abs=0.011)


def test_while_the_link_is_busy_any_step_pays() -> None:
    watched = Watched(free_s=0.05)
    watched.stepped(0.01)
    watched.rounds(1, tokens=0, seconds=0.0)
    assert watched.least_gain() == 0
    watched.now_s += 0.045
    assert watched.least_gain() == math.inf, "half of a step would delay the pass"
    watched.rounds(3, tokens=6, seconds=0.2)
    assert watched.least_gain() == 0
    watched.now_s += 0.045  # half of a step would delay the pass
    assert watched.least_gain() == pytest.approx(0.15, abs=0.011)
    watched.now_s += 0.015
    assert watched.least_gain() == pytest.approx(0.3, abs=0.011)


def test_how_long_a_spine_takes_is_known_apart() -> None:
    watched = Watched()
    assert watched.worth.seconds(1) is watched.worth.seconds(8) is None
    for seconds in (0.5, 0.006, 0.007):  # the first one has loaded what it needs
        watched.worth.stepped(seconds, 8)
    assert watched.worth.seconds(8) == pytest.approx(0.006) and watched.worth.seconds(4) == pytest.approx(0.003)
    assert watched.worth.seconds(1) is None
    watched.worth.stepped(9.0, 8, hidden=True)  # a pass ran beside it
    assert watched.worth.seconds(8) == pytest.approx(0.006)
    watched.worth.stepped(0.012, 8)
    assert 0.006 < watched.worth.seconds(8) < 0.008  # type: ignore[operator]


def test_exceptional_steps_and_rounds_do_not_decide_for_long() -> None:
    watched = Watched()
    watched.stepped(2.0)  # other programs were busy
    watched.rounds(5, tokens=6, seconds=0.2)
    watched.worth.stepped(0.01)
    assert watched.least_gain() == pytest.approx(0.3, abs=0.011)
    watched.worth.stepped(3.0)
    watched.worth.stepped(0.01)
    assert watched.least_gain() < 0.5
    for _ in range(20):
        watched.worth.stepped(0.01)
    # Somebody read for a minute, which says nothing about the time that a token takes.
    watched.rounds(1, tokens=6, seconds=60.0)
    watched.rounds(5, tokens=6, seconds=0.2)
    assert watched.least_gain() == pytest.approx(0.3, rel=0.25)
    # Rounds that are slower for good are believed.
    watched.rounds(40, tokens=6, seconds=2.0)
    assert watched.least_gain() == pytest.approx(0.03, abs=0.011)
    # Others were played meanwhile, and nobody counted what they brought.
    watched.worth.pause()
    watched.rounds(1, tokens=0, seconds=20.0)
    assert watched.worth.tok_per_s == pytest.approx(3, rel=0.01)
