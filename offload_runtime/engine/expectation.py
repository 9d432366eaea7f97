"""What a run should have taken, by the figures of its machine: predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from offload_runtime.engine.costs import draft_step_costs, middle_step_costs, pass_costs
from offload_runtime.engine.emulation import emulation_of
from offload_runtime.engine.levels import PlacedLevels
from offload_runtime.engine.machines import known_figures
from offload_runtime.engine.run_plan import RunPlan
from offload_runtime.engine.speed import lookahead_s, tree_steps, usual_acceptance
from offload_runtime.hardware import load_profile
from offload_runtime.memory import resolve_device
from offload_runtime.planner import (
    MachineFigures,
    RoundCosts,
    expected_tokens,
    predict_pass,
    predict_round,
    predict_step,
)
from offload_runtime.speculation import Acceptance, Choice


class Played(Protocol):
    """What is asked of an answer: its tokens, its passes, and what was proposed in them (see `GenerationStats`)."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def new_tokens(self) -> int: ...

    @property
    def passes(self) -> int: ...

    @property
    def acceptance(self) -> Sequence[Acceptance]: ...

    @property
    def windows(self) -> Mapping[str, int]: ...


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

    def seconds_of_round(self, choice: Choice, num_sequences: int, length_tokens: int) -> float:
        """Predicted seconds of a round about so many sequences of so many tokens each; the machine must be known."""
        assert self.machine is not None
        placed, machine = self.plan.placed, self.machine
        drafting_s = _choice_drafting_s(_of_batch(placed, num_sequences), choice, machine)
        return _pass_and_drafting_s(placed, [length_tokens] * num_sequences, 1 + choice.size, drafting_s, machine)


def _round_s(placed: PlacedLevels, answers: Sequence[Played], machine: MachineFigures) -> float:
    """Seconds of a round over these answers, each about halfway."""
    lengths = [answer.prompt_tokens + answer.new_tokens // 2 for answer in answers]
    rows = 1 + round(sum(_proposed_per_pass(answer) for answer in answers) / len(answers))
    # A step serves all of them, and who needs the most steps keeps the others waiting.
    drafting_s = max(_drafting_s(_of_batch(placed, len(answers)), answer, machine) for answer in answers)
    return _pass_and_drafting_s(placed, lengths, rows, drafting_s, machine)


def _of_batch(placed: PlacedLevels, num_sequences: int) -> PlacedLevels:
    """The same for so many sequences."""
    target, draft = replace(placed.plans.target, batch=num_sequences), placed.plans.draft
    if draft is not None:
        draft = replace(draft, batch=num_sequences)
    return replace(placed, plans=replace(placed.plans, target=target, draft=draft))


def _pass_and_drafting_s(
    placed: PlacedLevels, lengths: Sequence[int], rows: int, drafting_s: float, machine: MachineFigures
) -> float:
    """Seconds of a round of a window of `rows` tokens behind each of these lengths, and `drafting_s` of proposing."""
    placed = _of_batch(placed, len(lengths))
    length = max(0, min(sum(lengths) // len(lengths), placed.plans.target.context_tokens - rows))
    passed = pass_costs(placed, length_tokens=length, rows=rows)
    verify = predict_pass(passed, machine)
    costs = RoundCosts(
        link_s=verify.copies_s, busy_s=max(verify.compute_s, verify.launch_s), bound_by=verify.bound_by,
        lookahead_s=lookahead_s(placed, passed, verify),
        gamma=1, draft_step_s=drafting_s,  # one step that takes as long as all of them
    )  # fmt: skip
    return predict_round(costs, 0.0).seconds


def _choice_drafting_s(placed: PlacedLevels, choice: Choice, machine: MachineFigures) -> float:
    """Seconds of proposing what was chosen; n-grams take none."""
    draft, middle = placed.plans.draft, placed.middle
    if not choice.drafts:
        return 0.0
    draft_step_s = 0.0 if draft is None else predict_step(draft_step_costs(draft), machine)
    if choice.family == "tree":
        return draft_step_s * tree_steps(choice.size)
    if middle is None:
        return choice.size * draft_step_s
    gamma_draft = 0 if draft is None else middle.options.gamma_draft
    steps = choice.size / expected_tokens(usual_acceptance(draft), gamma_draft)
    return steps * (predict_step(middle_step_costs(placed), machine) + gamma_draft * draft_step_s)


def _proposed_per_pass(answer: Played) -> float:
    """Proposals that a pass verified, on average."""
    return answer.acceptance[-1].proposed / answer.passes if answer.acceptance else 0.0


def _asked_per_pass(answer: Played, family: str) -> tuple[float, float]:
    """Of all passes the share whose windows were of a family (see `Choice`), and proposals asked for in these by pass,
    the others counted too."""
    sizes = [(int(name.split()[1]), count) for name, count in answer.windows.items() if name.startswith(f"{family} ")]
    return (
        sum(count for _, count in sizes) / answer.passes,
        sum(size * count for size, count in sizes) / answer.passes,
    )


def _drafting_s(placed: PlacedLevels, answer: Played, machine: MachineFigures) -> float:
    """Seconds of proposing for one pass, by the steps that one answer of the batch took; n-grams take none."""
    draft, middle, steps = placed.plans.draft, placed.middle, _proposed_per_pass(answer)
    draft_step_s = 0.0 if draft is None else predict_step(draft_step_costs(draft), machine)
    if not steps or middle is None:
        trees, nodes = _asked_per_pass(answer, "tree")
        _, chains = _asked_per_pass(answer, "chain") if answer.windows else (0.0, steps)
        if nodes + chains > steps:  # less was proposed than asked for
            nodes, chains = (steps * asked / (nodes + chains) for asked in (nodes, chains))
        grown = trees * tree_steps(nodes / trees) if trees else 0.0
        return (grown + chains) * draft_step_s
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
