"""How fast a planned run will be on a machine, and what more memory or a second card would bring."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_runtime.config import GB
from offload_runtime.engine.costs import pass_costs, prefill_costs
from offload_runtime.engine.planning import PlanRequest, plan_run, planned_speed
from offload_runtime.engine.run_plan import RunPlan
from offload_runtime.engine.speed import usual_acceptance
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.planner import (
    MachineFigures,
    PassPrediction,
    PrefillPrediction,
    RoundPrediction,
    predict_pass,
    predict_prefill,
)

ACCEPTANCES = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


@dataclass(frozen=True)
class RunForecast:
    """Predicted speed of a run at its full context, all sequences of a batch together.

    `plain` is a pass over one token of each sequence, `verify` one over a window of `proposals`: a chain, or a tree of
    `tree_nodes` no deeper than `gamma`. `usual` is a
    round at the usual acceptance of who proposes, what plans are compared by; `rounds` has an entry for each acceptance
    of `ACCEPTANCES` and is empty where nothing proposes. `draft_acceptance` is the middle level's of the draft's
    proposals; it and `middle_step_s` are None without a middle level.
    """

    context_tokens: int
    gamma: int
    tree_nodes: int
    plain: PassPrediction
    verify: PassPrediction
    prefill: PrefillPrediction
    draft_step_s: float
    middle_step_s: float | None
    plain_tok_per_s: float
    usual: RoundPrediction
    rounds: tuple[RoundPrediction, ...]
    draft_acceptance: float | None

    @property
    def proposals(self) -> int:
        """Proposed tokens that a pass verifies."""
        return self.tree_nodes or self.gamma

    @property
    def usual_tok_per_s(self) -> float:
        """Tokens per second at the usual acceptance, or of plain decoding."""
        return self.usual.tok_per_s


def forecast(plan: RunPlan, request: PlanRequest, machine: MachineFigures) -> RunForecast:
    """Predict a planned run."""
    placed, target = plan.placed, plan.placed.plans.target
    length, speed = target.context_tokens, planned_speed(request, machine)
    gamma = speed.gamma_of(placed)
    plain = predict_pass(pass_costs(placed, length_tokens=length - 1, rows=1), machine)
    rounds = [speed.round_at(placed, acceptance) for acceptance in ACCEPTANCES]
    drafts = placed.middle is not None and placed.plans.draft is not None
    return RunForecast(
        length, gamma, speed.tree_nodes_of(placed), plain, speed.verification(placed),
        predict_prefill(prefill_costs(placed, length), machine),
        speed.draft_step_s(placed), speed.middle_step_s(placed), target.batch / plain.seconds,
        speed.usual_round(placed), tuple(rounds) if gamma else (),
        usual_acceptance(placed.plans.draft) if drafts else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Upgrade:
    """What a change of the machine would bring: tokens per second before and after, at the usual acceptance."""

    what: str
    before_tok_per_s: float
    after_tok_per_s: float
    note: str = ""


def upgrades(current: RunForecast, request: PlanRequest, machine: MachineFigures) -> tuple[Upgrade, ...]:
    """One more GB of device memory, and a second card."""
    second = "if every layer's bytes were split over two cards and links: at best, tensor parallelism is not built yet"
    offers = (
        ("1 GB more device memory", *_with_vram(request, machine, GB), ""),
        ("a second card", *second_card(request, machine), second),
    )
    found: list[Upgrade] = []
    for what, asked, better, note in offers:
        try:
            faster = forecast(plan_run(asked, better), asked, better)
        except (BudgetError, OptionError):
            continue
        found.append(Upgrade(what, current.usual_tok_per_s, faster.usual_tok_per_s, note))
    return tuple(found)


def _with_vram(request: PlanRequest, machine: MachineFigures, more_bytes: int) -> tuple[PlanRequest, MachineFigures]:
    limit = request.vram_bytes
    larger = replace(machine, vram_bytes=machine.vram_bytes + more_bytes)
    return replace(request, vram_bytes=None if limit is None else limit + more_bytes), larger


def second_card(request: PlanRequest, machine: MachineFigures) -> tuple[PlanRequest, MachineFigures]:
    """The same run where every layer's bytes are split over two cards and links, and neither waits for the other: a
    bound of what tensor parallelism could bring."""
    limit = machine.vram_bytes if request.vram_bytes is None else request.vram_bytes
    asked, larger = _with_vram(request, machine, max(0, limit - machine.vram_reserved_bytes))
    twice = {dtype: 2 * tflops for dtype, tflops in machine.tflops.items()}
    return asked, replace(larger, link_gbps=2 * machine.link_gbps, hbm_gbps=2 * machine.hbm_gbps, tflops=twice)
