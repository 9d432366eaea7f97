"""How fast tokens usually come: what plans are compared by, before anything is loaded and in a forecast.

Who proposes decides as much as the bytes of a pass do, since every proposal that is accepted saves one. So a level
counts with the acceptance that it usually finds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from offload_runtime.engine.costs import draft_step_costs, lookahead_bytes, middle_step_costs, pass_costs
from offload_runtime.engine.levels import PlacedLevels
from offload_runtime.engine.plans import ModelPlan
from offload_runtime.planner import (
    MachineFigures,
    PassCosts,
    PassPrediction,
    RoundCosts,
    RoundPrediction,
    predict_pass,
    predict_round,
    predict_step,
)
from offload_runtime.runners.draft_tree_steps import STEP_ROWS
from offload_runtime.speculation import LinkTimes

# Of what a level proposes, the share that the next one accepts while all before are right. The middle level: 0.93 to
# 0.97 (4096 of 120,000 tokens of a novel, T = 0.6). A draft of the target's family: 0.83 on code, less on prose; where
# it keeps the first and newest tokens only a tenth less, and behind long texts another tenth (0.65 on that novel; a
# model agrees with itself 0.81 of the time at 8K, 0.69 at 32K, 0.77 at 120K). N-grams: 1.2 tokens a pass (prose and
# code, T = 0 to 1.2).
USUAL_ACCEPTANCE: Mapping[str, float] = MappingProxyType(
    {"middle": 0.95, "full": 0.8, "retrieval": 0.8, "streaming": 0.72, "streaming, far": 0.65, "n-grams": 0.15}
)
_FAR_TOKENS = 8192
# Proposed tokens per pass when nothing is asked for. While weights are streamed a wider window costs nothing; on a CPU
# every row does.
_DEFAULT_GAMMA = {
    ("cuda", "ngram"): 16, ("cuda", "model"): 8, ("cuda", "triforce"): 12, ("cuda", "triforce, streamed"): 24,
}  # fmt: skip
_CPU_DEFAULT_GAMMA = 7
# Levels of a tree that are drafted before its pass; what was drafted beside the pass before is there already.
_PATH_STEPS = 4
# Of the time in which the rings fill up behind a pass, what goes by until its tokens are known and, from the launch of
# the next one, until a slot is free again: 10 ms with 200 tokens in a window, 18 with 1000 (13B shape on an H200).
_BETWEEN_S = 0.015


def default_gamma(device_type: str, placed: PlacedLevels) -> int:
    """Tokens proposed per pass when nothing is asked for."""
    source = "ngram" if placed.plans.draft is None else "model"
    if placed.middle is not None:
        source = "triforce, streamed" if placed.plans.target.kv.on_host else "triforce"
    return _DEFAULT_GAMMA.get((device_type, source), _CPU_DEFAULT_GAMMA)


def tree_steps(nodes: float) -> float:
    """Steps of a draft that grow a tree before its pass: one for every level of the most probable path that is not
    there yet, and one for every so many nodes."""
    return _PATH_STEPS + nodes / STEP_ROWS


def _slack_s(passed: PassPrediction) -> float:
    """By how much something else takes longer than the copies of a pass; 0 or less where they bind it."""
    return max(passed.compute_s, passed.launch_s) - passed.copies_s


def lookahead_s(placed: PlacedLevels, costs: PassCosts, passed: PassPrediction) -> float:
    """Seconds in which the rings fill up at the pace of the pass's copies, which staging may keep below the link's."""
    return passed.copies_s * lookahead_bytes(placed, costs) / costs.streamed_bytes if costs.streamed_bytes else 0.0


def draft_level(draft: ModelPlan | None) -> str:
    """What a draft is called by its cache; None stands for n-grams."""
    if draft is None:
        return "n-grams"
    if draft.streaming is not None:
        return "streaming"
    return "full" if draft.retrieval is None else "retrieval"


def usual_acceptance(draft: ModelPlan | None) -> float:
    """Of a draft's proposals at its full context; None stands for n-grams."""
    level = draft_level(draft)
    if draft is not None and level == "streaming" and draft.context_tokens > _FAR_TOKENS:
        level = "streaming, far"
    return USUAL_ACCEPTANCE[level]


@dataclass(frozen=True)
class Speed:
    """Predicts tokens per second of placed levels at the full context, all sequences of a batch together.

    `device_type` (`cuda` or `cpu`) and `gamma` (None: the default) say how many tokens a pass verifies, at most
    `max_gamma`; `proposes` whether anybody but a middle level proposes at all.
    """

    machine: MachineFigures
    device_type: str
    proposes: bool
    gamma: int | None = None
    max_gamma: int = 63

    def __call__(self, placed: PlacedLevels) -> float:
        """Tokens per second at the usual acceptance."""
        return self.usual_round(placed).tok_per_s

    def tree_nodes_of(self, placed: PlacedLevels) -> int:
        """Nodes of the trees that are proposed; 0 for chains."""
        draft = placed.plans.draft
        if draft is None or placed.middle is not None:
            return 0
        return min(draft.tree_nodes, max(0, placed.plans.target.context_tokens - 2))

    def gamma_of(self, placed: PlacedLevels) -> int:
        """Tokens proposed for a pass in a row, at most what the context has room for."""
        if not (self.proposes or placed.middle is not None):
            return 0
        gamma = self.gamma
        if gamma is None:
            gamma = self.max_gamma if self.tree_nodes_of(placed) else default_gamma(self.device_type, placed)
        return max(0, min(gamma, self.max_gamma, placed.plans.target.context_tokens - 2))

    def verification(self, placed: PlacedLevels) -> PassPrediction:
        """A pass over a window of proposals."""
        return self._pass_and_round(placed)[0]

    def draft_step_s(self, placed: PlacedLevels) -> float:
        """Seconds of a step of the draft; 0 without one."""
        draft = placed.plans.draft
        return 0.0 if draft is None else predict_step(draft_step_costs(draft), self.machine)

    def middle_step_s(self, placed: PlacedLevels) -> float | None:
        """Seconds of a step of the middle level; None without one."""
        return None if placed.middle is None else predict_step(middle_step_costs(placed), self.machine)

    def link_times(self, placed: PlacedLevels, link_gbps: float | None, *, widest: int = 0) -> LinkTimes:
        """How long the link is busy with passes, and behind them.

        Args:
            placed: What lives where.
            link_gbps: As measured; None where nothing is streamed.
            widest: Rows of the widest window, if it is wider than what is usual.
        """
        if link_gbps is None:
            return LinkTimes()
        machine, length = replace(self.machine, link_gbps=link_gbps), placed.plans.target.context_tokens - 1

        def predicted(rows: int) -> tuple[PassCosts, PassPrediction]:
            costs = pass_costs(placed, length_tokens=length - rows + 1, rows=rows)
            return costs, predict_pass(costs, machine)

        costs, passed = predicted(1)
        free_s = max(0.0, lookahead_s(placed, costs, passed) - _BETWEEN_S)
        widest = max(widest, self.tree_nodes_of(placed) + 1, self.gamma_of(placed) + 1)
        # Windows of sizes like these are what is played.
        rows = [*range(1, min(widest, 32)), *range(32, widest, 32), widest]
        bound = bisect_right(rows, 0.0, key=lambda rows: _slack_s(predicted(rows)[1]))
        return LinkTimes(free_s, passed.copies_s, rows[bound - 1] if bound else 0)

    def round_at(self, placed: PlacedLevels, acceptance: float) -> RoundPrediction:
        """A round whose proposals the target accepts with this probability."""
        draft_acceptance = usual_acceptance(placed.plans.draft)
        return predict_round(self._pass_and_round(placed)[1], acceptance, draft_acceptance=draft_acceptance)

    def usual_round(self, placed: PlacedLevels) -> RoundPrediction:
        """The same at the usual acceptance of who proposes."""
        draft = placed.plans.draft
        return self.round_at(placed, usual_acceptance(draft) if placed.middle is None else USUAL_ACCEPTANCE["middle"])

    def _pass_and_round(self, placed: PlacedLevels) -> tuple[PassPrediction, RoundCosts]:
        target, nodes = placed.plans.target, self.tree_nodes_of(placed)
        window = nodes or self.gamma_of(placed)
        costs = pass_costs(placed, length_tokens=target.context_tokens - window - 1, rows=window + 1)
        verify, middle = predict_pass(costs, self.machine), placed.middle
        return verify, RoundCosts(
            link_s=verify.copies_s,
            busy_s=max(verify.compute_s, verify.launch_s),
            bound_by=verify.bound_by,
            lookahead_s=lookahead_s(placed, costs, verify),
            gamma=self.gamma_of(placed),
            draft_step_s=self.draft_step_s(placed),
            middle_step_s=self.middle_step_s(placed),
            gamma_draft=0 if middle is None or placed.plans.draft is None else middle.options.gamma_draft,
            batch=target.batch,
            tree_nodes=nodes,
            tree_steps=tree_steps(nodes),
        )
