"""What a run should have taken, by the figures of its machine: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch

from offload_runtime.config import GB
from offload_runtime.engine.costs import DTYPE_NAMES, draft_step_costs, lookahead_bytes, middle_step_costs, pass_costs
from offload_runtime.engine.emulation import emulation_of
from offload_runtime.engine.forecast import DRAFT_ACCEPTANCE
from offload_runtime.engine.hierarchy import PlacedLevels
from offload_runtime.engine.planning import machine_figures
from offload_runtime.engine.run_plan import RunPlan
from offload_runtime.errors import OptionError, ProfileError
from offload_runtime.machine_profile import MachineProfile, list_profiles, load_profile
from offload_runtime.memory import resolve_device
from offload_runtime.planner import (
    MachineFigures,
    RoundCosts,
    expected_tokens,
    predict_pass,
    predict_round,
    predict_step,
)
from offload_runtime.runners.draft_tree import STEP_ROWS
from offload_runtime.speculation import PLAIN, Acceptance, Choice

# Levels of a tree that are drafted before its pass, to begin with.
_PATH_STEPS = 4


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
    verify = predict_pass(pass_costs(placed, length_tokens=length, rows=rows), machine)
    costs = RoundCosts(
        link_s=verify.copies_s, busy_s=max(verify.compute_s, verify.launch_s), bound_by=verify.bound_by,
        lookahead_s=lookahead_bytes(placed) / (machine.link_gbps * GB),
        gamma=1, draft_step_s=drafting_s,  # one step that takes as long as all of them
    )  # fmt: skip
    return predict_round(costs, 0.0).seconds


def _choice_drafting_s(placed: PlacedLevels, choice: Choice, machine: MachineFigures) -> float:
    """Seconds of proposing what was chosen; n-grams take none."""
    draft, middle = placed.plans.draft, placed.middle
    if choice == PLAIN or choice.family == "ngram":
        return 0.0
    draft_step_s = 0.0 if draft is None else predict_step(draft_step_costs(draft), machine)
    if choice.family == "tree":
        # A step for every level of the most probable path, and for every so many nodes.
        return draft_step_s * (_PATH_STEPS + choice.size / STEP_ROWS)
    if middle is None:
        return choice.size * draft_step_s
    gamma_draft = 0 if draft is None else middle.options.gamma_draft
    steps = choice.size / expected_tokens(DRAFT_ACCEPTANCE, gamma_draft)
    return steps * (predict_step(middle_step_costs(placed), machine) + gamma_draft * draft_step_s)


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


def known_figures(profile: MachineProfile | None, device: torch.device, dtype: torch.dtype) -> MachineFigures | None:
    """Figures of the machine to predict with: of the profile given, or of one that knows this GPU.

    The user's own profiles come before those that are shipped. Nothing is known of a CPU unless it is given.

    Args:
        profile: What to go by; None looks for one.
        device: Where the target runs.
        dtype: Of the target, in which the machine's arithmetic has to be known.

    Raises:
        OptionError: The profile leaves out what is needed.
    """
    if profile is not None:
        return _figures(profile, dtype)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for entry in sorted(list_profiles(), key=lambda entry: entry.shipped):
        try:
            found = load_profile(entry.path)
            if found.gpu_name == name:
                return _figures(found, dtype)
        except (ProfileError, OptionError):  # nobody asked for this one
            continue
    return None


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


def _figures(profile: MachineProfile, dtype: torch.dtype) -> MachineFigures:
    figures = machine_figures(profile)
    figures.flops(DTYPE_NAMES[str(dtype)])
    return figures


def expect(
    plan: RunPlan, machine: MachineFigures | None, *, link_peak_gbps: float | None, emulated: str | None
) -> Expectation:
    """What a loaded runtime is held against: the link is as fast as it was measured, if anything is streamed."""
    if machine is not None and link_peak_gbps is not None:
        machine = replace(machine, link_gbps=link_peak_gbps)
    return Expectation(plan, machine, emulated)
