"""When a proposer of trees takes steps and what it keeps of them, by a draft that says a script."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from offload_runtime.params import SamplingParams
from offload_runtime.speculation import DraftRequest, StepWorth, TreeDraftProposer
from offload_runtime.speculation.calibration import ChildProbabilities
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import random_tokens
from tests.helpers.scripted_trees import SteadySteps, SureModel, steps, sure_proposer


def test_with_full_agreement_nothing_is_left_to_draft() -> None:
    script = random_tokens(200, seed=9)
    model = SureModel(script)
    proposer, length = sure_proposer(model), 10
    for request in range(6):
        before = model.steps
        proposal = proposer.propose([DraftRequest(0, script[:length], 4, 4)])[0]
        assert list(proposal.tokens) == script[length : length + 4] and proposal.is_chain
        assert model.steps - before == (1 if request == 0 else 0), "a spine of four nodes"
        proposer.ahead(steps(50)(torch.empty(0)))
        length += 5  # all four, and the target's own
    # Half of it: what was drafted past the rejection is gone, and one spine says what follows.
    before = model.steps
    proposer.propose([DraftRequest(0, script[:length], 4, 4)])
    text = [*script[: length + 2], 3]
    assert list(proposer.propose([DraftRequest(0, text, 4, 4)])[0].tokens) == script[length + 3 : length + 7]
    assert model.steps - before == 1


def test_an_accurate_draft_gets_deep_and_an_inaccurate_one_wide() -> None:
    script = random_tokens(200, seed=12)
    deepest = []
    for scores in ((9.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        proposer = sure_proposer(SureModel(script, scores))
        proposer.propose([DraftRequest(0, script[:10], 30, 30)])
        proposal = proposer.propose([DraftRequest(0, script[:12], 30, 30)])[0]
        deepest.append(max(proposal.depths))
    assert deepest[0] > 12 and deepest[1] < 8


def test_running_ahead_ends_with_the_pass_and_with_its_slots() -> None:
    script = random_tokens(200, seed=10)
    model = SureModel(script)
    proposer = sure_proposer(model)
    proposer.ahead(lambda: True)  # nothing has been proposed
    assert model.steps == 0
    proposer.propose([DraftRequest(0, script[:10], 4, 4)])
    before, asked = model.steps, 0

    def pending() -> bool:
        nonlocal asked
        asked += 1
        assert model.steps == before + asked - 1, "asked between any two steps"
        return asked <= 3

    proposer.ahead(pending)
    assert (asked, model.steps) == (4, before + 3)
    proposer.ahead(lambda: True)  # and comes to an end by itself
    assert model.steps <= before + SureModel.num_slots


def test_a_rejected_window_leaves_the_other_branch() -> None:
    """The second child comes true: it was expanded ahead, and its window needs fewer steps."""
    script = random_tokens(200, seed=11)
    model = SureModel(script, (0.1, 0.05, 0.0))  # nothing is sure
    proposer = sure_proposer(model)
    proposer.propose([DraftRequest(0, script[:10], 2, 12)])
    proposer.ahead(steps(1)(torch.empty(0)))
    before = model.steps
    proposal = proposer.propose([DraftRequest(0, [*script[:10], 90], 1, 3)])[0]
    assert set(proposal.tokens) == {script[11], 90, 91} and model.steps == before


def test_all_that_the_target_says_is_learnt_from() -> None:
    class Told(ChildProbabilities):
        def observe(self, scores: Sequence[float], child: int | None) -> None:
            told.append(child)

    script = random_tokens(200, seed=18)
    proposer, told = sure_proposer(SureModel(script)), list[int | None]()
    proposer.probabilities = Told()
    proposer.propose([DraftRequest(0, script[:10], 4, 8)])
    proposer.propose([DraftRequest(0, [*script[:13], 90], 4, 8)])  # three of the first children, then a second one
    assert told == [0, 0, 0, 1]
    proposer.propose([DraftRequest(0, [*script[:13], 90, 5], 4, 8)])  # and one that nobody thought of
    assert told == [0, 0, 0, 1, None]
    proposer.join(0, SamplingParams())
    proposer.propose([DraftRequest(0, script[:40], 4, 8)])  # somebody else's text teaches nothing
    assert len(told) == 5


class Demanding(SteadySteps):
    """One to which a step is worth its time from some gain on; keeps what it was asked."""

    def __init__(self, least_gain: float) -> None:
        super().__init__()
        self._least_gain, self.gains = least_gain, list[float]()

    def pays(self, gain: float, levels: int = 1) -> bool:
        self.gains.append(gain)
        return gain >= self._least_gain


def demanding(model: SureModel, least_gain: float) -> tuple[TreeDraftProposer, Demanding]:
    worth = Demanding(least_gain)
    return sure_proposer(model, worth), worth


def test_a_cost_aware_request_takes_the_steps_that_pay() -> None:
    script = random_tokens(200, seed=19)
    sizes = []
    for least_gain in (0.0, 0.8, 2.0):
        model = SureModel(script)
        proposer, worth = demanding(model, least_gain)
        sizes.append(len(proposer.propose([DraftRequest(0, script[:10], 8, 30, cost_aware=True)])[0]))
        assert worth.gains and model.steps == 1 + sum(gain >= least_gain for gain in worth.gains)
    assert sizes[0] == 30 > sizes[1] == sizes[2] == 24, "a first spine of eight nodes is taken in any case"
    proposer, worth = demanding(SureModel(script), 2.0)
    assert len(proposer.propose([DraftRequest(0, script[:10], 8, 30)])[0]) == 30 and not worth.gains, (
        "what was asked for"
    )


def test_what_a_smaller_window_held_does_not_end_a_larger_one() -> None:
    """Only the likeliest nodes are expanded at first; that they do not pay says nothing about all that there are."""
    script = random_tokens(200, seed=20)
    proposer, worth = demanding(SureModel(script), 0.7)
    proposer.propose([DraftRequest(0, script[:10], 8, 1, cost_aware=True)])  # a bar that few nodes reach
    proposer.propose([DraftRequest(0, script[:40], 8, 30, cost_aware=True)])
    refused = [gain for gain in worth.gains if gain < 0.7]
    assert len(refused) > 1 and worth.gains[-1] == refused[-1]
    later = worth.gains[worth.gains.index(refused[0]) :]
    assert any(gain >= 0.7 for gain in later), "more nodes at once were worth a step"


def test_what_chains_between_trees_bring_counts_too() -> None:
    script = random_tokens(200, seed=21)
    now_s = 0.0
    worth = StepWorth(clock=lambda: now_s)
    proposer = sure_proposer(SureModel(script), worth)
    for request, nodes in enumerate([8, 8, 8, None, None, None, 8, 8]):
        proposer.propose([DraftRequest(0, script[: 10 + 5 * request], 4, nodes, cost_aware=True)])
        if request:
            assert worth.tok_per_s == pytest.approx(5 / 0.2)
        now_s += 0.2


def test_a_step_takes_what_delays_the_pass() -> None:
    """Noting what the draft said is part of it; steps behind a pass delay nothing."""

    class Slow(ChildProbabilities):
        def log_probabilities(self, scores: Sequence[float]) -> list[float]:
            time.sleep(0.01)
            return super().log_probabilities(scores)

    class Timed(SteadySteps):
        def stepped(self, seconds: float, levels: int = 1, *, hidden: bool = False) -> None:
            if not hidden:
                taken_s.append(seconds)

    taken_s = list[float]()
    script = random_tokens(200, seed=22)
    model = SureModel(script)
    proposer = sure_proposer(model, Timed())
    proposer.probabilities = Slow()
    proposer.propose([DraftRequest(0, script[:10], 4, 4)])
    assert len(taken_s) == model.steps == 1 and min(taken_s) > 0.039, "four nodes were noted"
    proposer.ahead(steps(3)(torch.empty(0)))
    assert model.steps > 1 and len(taken_s) == 1
