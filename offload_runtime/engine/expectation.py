"""What a run should have taken, by the figures of its machine: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from offload_runtime.engine.costs import draft_step_costs, lookahead_s, middle_step_costs, pass_costs
from offload_runtime.engine.emulation import emulation_of
from offload_runtime.engine.levels import PlacedLevels
from offload_runtime.engine.machines import known_figures
from offload_runtime.engine.run_plan import RunPlan
from offload_runtime.machine_profile import load_profile
from offload_runtime.memory import resolve_device
from offload_runtime.planner import MachineFigures, RoundCosts, predict_pass, predict_round, predict_step
from offload_runtime.speculation import Acceptance


class Played(Protocol):
    """What is asked of an answer: its tokens, its passes, and what was proposed in them."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def new_tokens(self) -> int: ...

    @property
    def passes(self) -> int: ...

    @property
    def acceptance(self) -> Sequence[Acceptance]: ...


@dataclass(frozen=True)
class Expectation:
    """What the figures of a runtime are held against.

    `machine` is None where nothing is known of it, and nothing is predicted. `emulated` names the machine that this one
    plays.
    """

    plan: RunPlan
    machine: MachineFigures | None = None
    emulated: str | None = None

    def seconds_per_pass(self, answers: Sequence[Played]) -> float | None:
        """Predicted seconds from pass to pass, proposals included, on average over the passes of a batch.

        Args:
            answers: All answers of the batch, which began together and ended each after its own passes.

        Returns:
            None where nothing is known of the machine, or nothing was passed.
        """
        machine = self.machine
        ends = sorted({0, *(answer.passes for answer in answers)})
        if machine is None or ends[-1] == 0:
            return None
        total_s = 0.0
        for begin, end in pairwise(ends):
            active = [answer for answer in answers if answer.passes > begin]
            total_s += (end - begin) * _round_s(self.plan.placed, active, machine)
        return total_s / ends[-1]


def _round_s(placed: PlacedLevels, answers: Sequence[Played], machine: MachineFigures) -> float:
    """Seconds of a round over these answers, each about halfway."""
    target, draft = replace(placed.plans.target, batch=len(answers)), placed.plans.draft
    if draft is not None:
        draft = replace(draft, batch=len(answers))
    placed = replace(placed, plans=replace(placed.plans, target=target, draft=draft))
    lengths = [answer.prompt_tokens + answer.new_tokens // 2 for answer in answers]
    rows = 1 + round(sum(_proposed_per_pass(answer) for answer in answers) / len(answers))
    length = min(sum(lengths) // len(lengths), target.context_tokens - rows)
    passed = pass_costs(placed, length_tokens=length, rows=rows)
    verify = predict_pass(passed, machine)
    # A step serves all of them, and who needs the most steps keeps the others waiting.
    drafting_s = max(_drafting_s(placed, answer, machine) for answer in answers)
    costs = RoundCosts(
        link_s=verify.copies_s, busy_s=max(verify.compute_s, verify.launch_s), bound_by=verify.bound_by,
        lookahead_s=lookahead_s(placed, passed, verify),
        gamma=1, draft_step_s=drafting_s,  # one step that takes as long as all of them
    )  # fmt: skip
    return predict_round(costs, 0.0).seconds


def _proposed_per_pass(answer: Played) -> float:
    """Proposals that a pass verified, on average."""
    return answer.acceptance[-1].proposed / answer.passes if answer.acceptance else 0.0


def _drafting_s(placed: PlacedLevels, answer: Played, machine: MachineFigures) -> float:
    """Seconds of proposing for one pass, by the steps that one answer of the batch took; n-grams take none."""
    draft, middle, steps = placed.plans.draft, placed.middle, _proposed_per_pass(answer)
    draft_step_s = 0.0 if draft is None else predict_step(draft_step_costs(draft), machine)
    if not steps or middle is None:
        return steps * draft_step_s
    if len(answer.acceptance) > 1:  # of the middle level, which says at least a token in every step
        steps = answer.acceptance[0].verifications / answer.passes
    gamma_draft = 0 if draft is None else middle.options.gamma_draft
    return steps * (predict_step(middle_step_costs(placed), machine) + gamma_draft * draft_step_s)


def planned_figures(plan: RunPlan, *, device: str, profile: str | None, emulate: str | None) -> MachineFigures | None:
    """The figures to predict a run with before anything of it is measured; arguments and errors as of `Runtime.load`.

    Returns:
        None where nothing is known of the machine. Of one that is played it is the link alone: what computes stays as
        fast as it is.
    """
    given = None if profile is None else load_profile(profile)
    machine = known_figures(given, resolve_device(device), plan.placed.plans.target.dtype)
    if machine is None or emulate is None:
        return machine
    return replace(machine, link_gbps=emulation_of(emulate).link_gbps)


def expect(
    plan: RunPlan, machine: MachineFigures | None, *, link_peak_gbps: float | None, emulated: str | None
) -> Expectation:
    """What a loaded runtime is held against: the link is as fast as it was measured, if anything is streamed."""
    if machine is not None and link_peak_gbps is not None:
        machine = replace(machine, link_gbps=link_peak_gbps)
    return Expectation(plan, machine, emulated)
