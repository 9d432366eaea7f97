"""What a run should have taken, by the figures of its machine: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from offload_runtime.engine.request import Request
from offload_runtime.plan import MachineFigures, RunPlan, drafting_s, pass_time, step_time
from offload_runtime.speculation import Choice


@dataclass(frozen=True)
class Expectation:
    """What the figures of a runtime are held against: its plan, and the machine's figures, with the link as fast as it
    was measured. `machine` is None where nothing is known of it, and nothing is predicted."""

    plan: RunPlan
    machine: MachineFigures | None = None

    def seconds_per_pass(self, answers: Sequence[Request]) -> float | None:
        """Predicted seconds from pass to pass, proposals included, on average over the passes of a batch.

        Args:
            answers: All answers of the batch, which began together and ended each after its own passes.

        Returns:
            None where nothing is known of the machine, or nothing was passed.
        """
        ends = sorted({0, *(answer.passes for answer in answers)})
        if self.machine is None or ends[-1] == 0:
            return None
        total_s = 0.0
        for begin, end in pairwise(ends):
            active = [answer for answer in answers if answer.passes > begin]
            lengths = [answer.prompt_tokens + answer.new_tokens // 2 for answer in active]  # each about halfway
            rows = 1 + round(sum(map(_proposed_per_pass, active)) / len(active))
            # A step serves all of them, and who needs the most steps keeps the others waiting.
            plan = self.plan.of_batch(len(active))
            proposing_s = max(_drafting_s(plan, answer, self.machine) for answer in active)
            total_s += (end - begin) * self._step_s(plan, sum(lengths) // len(active), rows, proposing_s)
        return total_s / ends[-1]

    def seconds_of_step(self, choice: Choice, num_sequences: int, length_tokens: int) -> float:
        """Predicted seconds of a step about so many sequences of so many tokens each; the machine must be known."""
        assert self.machine is not None
        plan, proposing_s = self.plan.of_batch(num_sequences), 0.0
        if choice.drafts:
            nodes = choice.size if choice.mode == "tree" else 0
            proposing_s = drafting_s(plan, self.machine, gamma=choice.size, tree_nodes=nodes)
        return self._step_s(plan, length_tokens, 1 + choice.size, proposing_s)

    def _step_s(self, plan: RunPlan, length_tokens: int, rows: int, proposing_s: float) -> float:
        """Seconds of a step of `plan`'s sequences, each with a window of `rows` tokens, and of proposing."""
        assert self.machine is not None
        length_tokens = max(0, min(length_tokens, plan.target.context_tokens - rows))
        return step_time(pass_time(plan, self.machine, length_tokens=length_tokens, rows=rows), proposing_s)


def _proposed_per_pass(answer: Request) -> float:
    """Proposals that a pass verified, on average."""
    return answer.acceptance[-1].proposed / answer.passes if answer.acceptance else 0.0


def _asked_per_pass(answer: Request, mode: str) -> tuple[float, float]:
    """Of all passes the share whose windows were of a mode (see `Choice`), and proposals asked for in these by pass,
    the others counted too."""
    sizes = [(int(name.split()[1]), count) for name, count in answer.windows.items() if name.startswith(f"{mode} ")]
    asked = sum(size * count for size, count in sizes)
    return sum(count for _, count in sizes) / answer.passes, asked / answer.passes


def _drafting_s(plan: RunPlan, answer: Request, machine: MachineFigures) -> float:
    """Seconds of proposing for one pass, by the steps that one answer of the batch took; n-grams take none."""
    steps = _proposed_per_pass(answer)
    if not steps or not plan.has_verifier:
        trees, nodes = _asked_per_pass(answer, "tree")
        _, chains = _asked_per_pass(answer, "chain") if answer.windows else (0.0, steps)
        if nodes + chains > steps:  # less was proposed than asked for
            nodes, chains = (steps * asked / (nodes + chains) for asked in (nodes, chains))
        grown_s = trees * drafting_s(plan, machine, gamma=0, tree_nodes=nodes / trees) if trees else 0.0
        return grown_s + drafting_s(plan, machine, gamma=chains)
    if len(answer.acceptance) > 1:  # of the retrieval verifier, which says at least a token in every step
        steps = answer.acceptance[0].verifications / answer.passes
    return drafting_s(plan, machine, gamma=steps, verifier_steps=steps)
