"""The tests see what they are there for: lines that are broken on purpose, each in a copy of its own, turn them red."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.mutants import Outcome, TestProcess, copy_of_packages
from tests.mutations import MUTATIONS, Mutation

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants run in forks")


@pytest.fixture(scope="module")
def process() -> Iterator[TestProcess]:
    made = TestProcess()
    yield made
    made.close()


def run_in(process: TestProcess, directory: Path, tests: tuple[str, ...]) -> Outcome:
    """Run tests of a copy, having made sure that it is the copy which they import."""
    outcome = process.run(directory, tests)
    assert outcome.modules, outcome.output
    foreign = [module for module in outcome.modules if not Path(module).is_relative_to(directory)]
    assert not foreign, "not the copy's"
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_line_is_seen(mutation: Mutation, process: TestProcess, tmp_path: Path) -> None:
    copy = copy_of_packages(tmp_path, path=mutation.path, old=mutation.old, new=mutation.new)
    outcome = run_in(process, copy, mutation.tests)
    # 1 is "some tests failed"; anything else, such as a file that cannot be imported, proves nothing.
    assert outcome.exit_code == 1, outcome.output
    assert sorted(outcome.failed) == sorted(mutation.tests), f"{outcome.passed} did not see it: {outcome.output}"


@pytest.mark.slow
def test_without_a_broken_line_the_same_tests_pass(process: TestProcess, tmp_path: Path) -> None:
    tests = tuple(sorted({test for mutation in MUTATIONS for test in mutation.tests}))
    outcome = run_in(process, copy_of_packages(tmp_path), tests)
    assert (outcome.exit_code, outcome.failed) == (0, []), outcome.output
    assert sorted(outcome.passed) == list(tests)
