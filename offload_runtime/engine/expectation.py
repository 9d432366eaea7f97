"""What a run should have taken, by the figures of its machine: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from offload_runtime.engine.load import emulation_of
from offload_runtime.engine.request import Request
from offload_runtime.hardware import load_profile
from offload_runtime.memory import resolve_device
from offload_runtime.plan import MachineFigures, RunPlan, drafting_s, known_figures, pass_time, step_time
from offload_runtime.speculation import Choice


@dataclass(frozen=True)
class Expectation:
    """What the figures of a runtime are held against.

    `machine` is None where nothing is known of it, and nothing is predicted. `emulated` names the machine that this one
    plays.
    """

    plan: RunPlan
    machine: MachineFigures | None = None
    emulated: str | None = None

    def seconds_per_pass(self, answers: Sequence[Request]) -> float | None:
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
            total_s += (end - begin) * _step_of(self.plan, active, machine)
        return total_s / ends[-1]

    def seconds_of_step(self, choice: Choice, num_sequences: int, length_tokens: int) -> float:
        """Predicted seconds of a step about so many sequences of so many tokens each; the machine must be known."""
        assert self.machine is not None
        proposing_s = 0.0
        if choice.drafts:
            nodes = choice.size if choice.mode == "tree" else 0
            proposing_s = drafting_s(
                self.plan.of_batch(num_sequences), self.machine, gamma=choice.size, tree_nodes=nodes
            )  # fmt: skip
        return _step_s(self.plan, [length_tokens] * num_sequences, 1 + choice.size, proposing_s, self.machine)


def _step_of(plan: RunPlan, answers: Sequence[Request], machine: MachineFigures) -> float:
    """Seconds of a step over these answers, each about halfway."""
    lengths = [answer.prompt_tokens + answer.new_tokens // 2 for answer in answers]
    rows = 1 + round(sum(_proposed_per_pass(answer) for answer in answers) / len(answers))
    # A step serves all of them, and who needs the most steps keeps the others waiting.
    proposing_s = max(_drafting_s(plan.of_batch(len(answers)), answer, machine) for answer in answers)
    return _step_s(plan, lengths, rows, proposing_s, machine)


def _step_s(plan: RunPlan, lengths: Sequence[int], rows: int, proposing_s: float, machine: MachineFigures) -> float:
    """Seconds of a step of a window of `rows` tokens behind each of these lengths, and `proposing_s` of proposing."""
    length = max(0, min(sum(lengths) // len(lengths), plan.target.context_tokens - rows))
    return step_time(pass_time(plan.of_batch(len(lengths)), machine, length_tokens=length, rows=rows), proposing_s)


def _proposed_per_pass(answer: Request) -> float:
    """Proposals that a pass verified, on average."""
    return answer.acceptance[-1].proposed / answer.passes if answer.acceptance else 0.0


def _asked_per_pass(answer: Request, mode: str) -> tuple[float, float]:
    """Of all passes the share whose windows were of a mode (see `Choice`), and proposals asked for in these by pass,
    the others counted too."""
    sizes = [(int(name.split()[1]), count) for name, count in answer.windows.items() if name.startswith(f"{mode} ")]
    return (
        sum(count for _, count in sizes) / answer.passes,
        sum(size * count for size, count in sizes) / answer.passes,
    )


def _drafting_s(plan: RunPlan, answer: Request, machine: MachineFigures) -> float:
    """Seconds of proposing for one pass, by the steps that one answer of the batch took; n-grams take none."""
    steps = _proposed_per_pass(answer)
    if not steps or plan.verifier is None:
        trees, nodes = _asked_per_pass(answer, "tree")
        _, chains = _asked_per_pass(answer, "chain") if answer.windows else (0.0, steps)
        if nodes + chains > steps:  # less was proposed than asked for
            nodes, chains = (steps * asked / (nodes + chains) for asked in (nodes, chains))
        grown_s = trees * drafting_s(plan, machine, gamma=0, tree_nodes=nodes / trees) if trees else 0.0
        return grown_s + drafting_s(plan, machine, gamma=chains)
    if len(answer.acceptance) > 1:  # of the retrieval verifier, which says at least a token in every step
        steps = answer.acceptance[0].verifications / answer.passes
    return drafting_s(plan, machine, gamma=steps, verifier_steps=steps)


def planned_figures(plan: RunPlan, *, device: str, profile: str | None, emulate: str | None) -> MachineFigures | None:
    """The figures to predict a run with before anything of it is measured; arguments and errors as of `Runtime.load`.

    Returns:
        None where nothing is known of the machine. Of one that is played it is the link alone: what computes stays as
        fast as it is.
    """
    given = None if profile is None else load_profile(profile)
    machine = known_figures(given, resolve_device(device), plan.target.dtype)
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
