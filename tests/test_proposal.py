"""Proposals: tries of guesses, made of paths and pruned without losing what they say, and the target's walk in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.speculation import Proposal, accepted_path
from tests.helpers.trees import of_paths

Path = tuple[int, ...]


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Tries in which depth and width take turns."""
    tokens: list[int] = []
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 14))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, 3))
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    return Proposal(tuple(tokens), tuple(parents), ("a",) * len(tokens))


def path_of(proposal: Proposal, node: int) -> Path:
    """What a node says, from the committed end on."""
    parent = proposal.parents[node]
    return (*(path_of(proposal, parent) if parent >= 0 else ()), proposal.tokens[node])


def said(proposal: Proposal) -> list[Path]:
    return [path_of(proposal, node) for node in range(len(proposal))]


@given(st.lists(st.integers(0, 3), max_size=8))
def test_a_chain(tokens: list[int]) -> None:
    chain = Proposal.chain(tokens, "draft")
    assert said(chain) == [tuple(tokens[: end + 1]) for end in range(len(tokens))]
    assert chain.is_chain and len(chain) == len(tokens) and set(chain.sources) <= {"draft"}
    assert chain.depths == tuple(range(1, len(tokens) + 1))


@given(proposals())
def test_depths_and_what_is_a_chain(tree: Proposal) -> None:
    assert list(tree.depths) == [len(path) for path in said(tree)]
    assert tree.is_chain == (sorted(tree.depths) == list(range(1, len(tree) + 1)))


paths_of_tokens = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6)


@given(paths_of_tokens, st.integers(0, 14))
def test_paths_become_one_trie_until_there_is_no_more_room(paths: list[list[int]], count: int) -> None:
    tree = of_paths(((path, str(number)) for number, path in enumerate(paths)), count)
    first: dict[Path, str] = {}  # who said it
    for number, path in enumerate(paths):
        for end in range(1, len(path) + 1):
            first.setdefault(tuple(path[:end]), str(number))
    assert list(zip(said(tree), tree.sources, strict=True)) == list(first.items())[:count]


@given(proposals(), proposals(), st.integers(0, 30))
def test_joined_is_what_either_says_the_others_last(one: Proposal, other: Proposal, count: int) -> None:
    other = Proposal(other.tokens, other.parents, ("b",) * len(other))
    both = one.joined(other, count)
    assert said(both)[: len(one)] == said(one) and both.sources == ("a",) * len(one) + ("b",) * (len(both) - len(one))
    new = [path for path in said(other) if path not in said(one)]
    room = max(0, count - len(one))
    assert len(both) - len(one) == min(room, len(new)) and set(said(both)[len(one) :]) <= set(new)


@given(proposals(), st.data())
def test_the_walk_ends_where_no_child_says_what_the_target_says(tree: Proposal, data: st.DataObject) -> None:
    samples = data.draw(st.lists(st.integers(0, 3), min_size=len(tree) + 1, max_size=len(tree) + 1))
    path = accepted_path(tree, samples)
    expected: list[int] = []
    while True:
        at = expected[-1] if expected else -1
        children = [node for node, parent in enumerate(tree.parents) if parent == at]
        right = [node for node in children if tree.tokens[node] == samples[at + 1]]
        if not right:
            break
        expected += right
    assert path == expected == sorted(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Proposal((1, 1), (-1, -1), ("a", "b")),
        lambda: Proposal((1, 2), (1, -1), ("a", "a")),
        lambda: Proposal((1,), (0,), ("a",)),
        lambda: Proposal((1, 2), (-1, -2), ("a", "a")),
        lambda: Proposal((1, 2), (-1,), ("a", "a")),
    ],
)
def test_what_is_no_trie_is_refused(make: Callable[[], Proposal]) -> None:
    with pytest.raises(AssertionError):
        make()
