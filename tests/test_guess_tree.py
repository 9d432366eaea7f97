"""The tree that a draft proposes to the retrieval verifier: which one is best, and what its steps are about."""

from __future__ import annotations

import itertools

import pytest
import torch

from offload_runtime.runners import (
    MOST_LEVELS,
    GuessTree,
    expected_accepted,
    likely_parents,
    most_guess_rows,
    num_guesses,
)
from tests.helpers.attention_cases import tree_path

CPU = torch.device("cpu")


def every_tree(nodes: int) -> list[tuple[int, ...]]:
    """All trees of so many nodes, level by level, as often as they can be written."""
    found = []
    for parents in itertools.product(*(range(-1, node) for node in range(nodes))):
        depths = [len(tree_path(parents, node)) for node in range(nodes)]
        if depths == sorted(depths):
            found.append(parents)
    return found


@pytest.mark.parametrize("acceptance", [0.3, 0.65, 0.9])
@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_no_tree_of_as_many_levels_accepts_more(nodes: int, acceptance: float) -> None:
    best = likely_parents(nodes, acceptance)
    levels = max(len(tree_path(best, node)) for node in range(nodes))
    others = [
        expected_accepted(parents, acceptance)
        for parents in every_tree(nodes)
        if max(len(tree_path(parents, node)) for node in range(nodes)) <= levels
    ]
    assert expected_accepted(best, acceptance) == pytest.approx(max(others))


def test_expected_are_those_of_chains_and_siblings() -> None:
    assert expected_accepted((-1, 0, 1), 0.8) == pytest.approx(0.8 + 0.64 + 0.512)
    # Of what the first child leaves over the next one has three tenths, and so on.
    assert expected_accepted((-1, -1, -1), 0.6) == pytest.approx(0.6 + 0.4 * 0.3 + 0.28 * 0.3)
    assert expected_accepted((-1, -1, 1), 0.6) == pytest.approx(0.6 + 0.12 + 0.12 * 0.6)
    assert expected_accepted((), 0.6) == 0


def test_a_draft_that_is_right_goes_deep_and_one_that_is_not_goes_wide() -> None:
    assert likely_parents(4, 0.8) == (-1, 0, 1, 2)
    assert likely_parents(4, 0.1) == (-1, -1, -1, -1)
    assert max(len(tree_path(likely_parents(24, 0.99), node)) for node in range(24)) == MOST_LEVELS


@pytest.mark.parametrize(("most", "batch"), [(24, 1), (24, 3), (24, 10), (3, 10)])
def test_steps_have_the_rows_that_are_planned(most: int, batch: int) -> None:
    verified = drafted = 0
    for count, acceptance in itertools.product(range(1, batch + 1), (0.3, 0.65, 0.8, 0.99)):
        tree = GuessTree(likely_parents(num_guesses(most, count), acceptance), CPU)
        verified = max(verified, count * len(tree.verified.slots))
        drafted = max(drafted, *(count * len(level.slots) for level in tree.drafted))
    planned = most_guess_rows(most, batch, others=1 + MOST_LEVELS)
    assert verified <= planned <= verified + batch * MOST_LEVELS, "no more than levels that a tree may not have"
    assert drafted <= most_guess_rows(most, batch, others=2)


def test_what_steps_of_a_tree_are_about() -> None:
    tree = GuessTree((-1, -1, 0, 0, 1, 3), CPU)
    assert (len(tree), tree.num_levels, tree.num_known) == (6, 3, 5)
    assert tree.levels == [range(2), range(2, 5), range(5, 6)]
    known, *levels = tree.drafted
    assert (known.slots.tolist(), known.positions.tolist()) == ([-5, -4, -3, -2, -1],) * 2
    assert [(level.slots.tolist(), level.positions.tolist()) for level in levels] == [([0, 1], [0, 0]), ([3], [1])]
    assert [level.ancestors.tolist() for level in levels if level.ancestors is not None] == [[[0], [1]], [[0, 3]]]
    # Two children of the newest token; two of node 0 and one of node 1, of two each; one of node 3.
    assert [(most, places.tolist()) for most, places in tree.chosen] == [(2, [0, 1]), (2, [0, 1, 2]), (1, [0])]
    verified = tree.verified
    assert verified.slots.tolist() == [-1, 0, 1, 2, 3, 4, 5, -4, -3, -2]
    assert verified.positions.tolist() == [-1, 0, 0, 1, 1, 1, 2, -4, -3, -2]
    assert (verified.counted, verified.first) == (1, -4) and verified.ancestors is not None
    trunk = [-4, -3, -2, -1]
    ways = [trunk, *([*trunk, *tree_path(tree.parents, node)] for node in range(6)), *(trunk[:n] for n in (1, 2, 3))]
    assert [row[: len(way)] for row, way in zip(verified.ancestors.tolist(), ways, strict=True)] == ways
    assert tree.links.parents.tolist() == [0, 0, 1, 1, 2, 4] and tree.links.depths.tolist() == [1, 1, 2, 2, 2, 3]
    assert tree.links.paths.tolist() == [1, 2, 1 + 4, 1 + 8, 2 + 16, 1 + 8 + 32]


def test_without_guesses_only_the_newest_token_is_verified() -> None:
    tree = GuessTree((), CPU)
    assert (len(tree), tree.num_levels, tree.drafted, tree.levels) == (0, 0, [], [])
    assert (tree.verified.slots.tolist(), tree.verified.first) == ([-1], -1)


def test_nodes_that_are_not_level_by_level_are_refused() -> None:
    with pytest.raises(AssertionError):
        GuessTree((-1, 0, -1), CPU)
