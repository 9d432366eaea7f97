"""How fast a planned run will be on a machine, and what more memory or a second card would bring."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_runtime.config import GB
from offload_runtime.engine.costs import (
    draft_step_costs,
    lookahead_bytes,
    middle_step_costs,
    pass_costs,
    prefill_costs,
)
from offload_runtime.engine.loading import default_gamma
from offload_runtime.engine.planning import PlanRequest, plan_run
from offload_runtime.engine.run_plan import RunPlan
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.planner import (
    MachineFigures,
    PassPrediction,
    PrefillPrediction,
    RoundCosts,
    RoundPrediction,
    predict_pass,
    predict_prefill,
    predict_round,
    predict_step,
)

ACCEPTANCES = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
# Of the draft's proposals by the middle level: 1.5 of 4 were, 120,000 tokens of a novel at T = 0.6.
DRAFT_ACCEPTANCE = 0.65
# At which two machines are compared.
USUAL_ACCEPTANCE = 0.9


@dataclass(frozen=True)
class RunForecast:
    """Predicted speed of a run at its full context, all sequences of a batch together.

    `plain` is a pass over one token of each sequence, `verify` one over a window of `gamma` proposals. `rounds` has an
    entry for each acceptance of `ACCEPTANCES`; it is empty where nothing proposes. `middle_step_s` is None without a
    middle level.
    """

    context_tokens: int
    gamma: int
    plain: PassPrediction
    verify: PassPrediction
    prefill: PrefillPrediction
    draft_step_s: float
    middle_step_s: float | None
    plain_tok_per_s: float
    rounds: tuple[RoundPrediction, ...]

    @property
    def usual_tok_per_s(self) -> float:
        """Tokens per second at the usual acceptance, or of plain decoding."""
        usual = [row.tok_per_s for row in self.rounds if row.acceptance == USUAL_ACCEPTANCE]
        return usual[0] if usual else self.plain_tok_per_s


def forecast(plan: RunPlan, request: PlanRequest, machine: MachineFigures) -> RunForecast:
    """Predict a planned run."""
    placed, target = plan.placed, plan.placed.plans.target
    gamma, length = _gamma(plan, request), target.context_tokens
    plain = predict_pass(pass_costs(placed, length_tokens=length - 1, rows=1), machine)
    verify = predict_pass(pass_costs(placed, length_tokens=length - gamma - 1, rows=gamma + 1), machine)
    draft, middle = placed.plans.draft, placed.middle
    draft_step_s = 0.0 if draft is None else predict_step(draft_step_costs(draft), machine)
    middle_step_s = None if middle is None else predict_step(middle_step_costs(placed), machine)
    costs = RoundCosts(
        link_s=verify.copies_s,
        busy_s=max(verify.compute_s, verify.launch_s),
        bound_by=verify.bound_by,
        lookahead_s=lookahead_bytes(placed) / (machine.link_gbps * GB),
        gamma=gamma,
        draft_step_s=draft_step_s,
        middle_step_s=middle_step_s,
        gamma_draft=0 if middle is None or draft is None else middle.options.gamma_draft,
        batch=target.batch,
    )
    rounds = [predict_round(costs, acceptance, draft_acceptance=DRAFT_ACCEPTANCE) for acceptance in ACCEPTANCES]
    return RunForecast(
        length, gamma, plain, verify, predict_prefill(prefill_costs(placed, length), machine), draft_step_s,
        middle_step_s, target.batch / plain.seconds, tuple(rounds) if gamma else (),
    )  # fmt: skip


def _gamma(plan: RunPlan, request: PlanRequest) -> int:
    """Tokens proposed for a pass, at most what the context has room for."""
    placed = plan.placed
    proposes = request.speculation.mode != "none" and (request.draft_name != "none" or placed.middle is not None)
    if not proposes:
        return 0
    gamma = default_gamma("cuda", placed) if request.gamma is None else request.gamma
    return max(0, min(gamma, request.max_gamma, placed.plans.target.context_tokens - 2))


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
        ("a second card", *_second_card(request, machine), second),
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


def _second_card(request: PlanRequest, machine: MachineFigures) -> tuple[PlanRequest, MachineFigures]:
    limit = machine.vram_bytes if request.vram_bytes is None else request.vram_bytes
    asked, larger = _with_vram(request, machine, max(0, limit - machine.vram_reserved_bytes))
    twice = {dtype: 2 * tflops for dtype, tflops in machine.tflops.items()}
    return asked, replace(larger, link_gbps=2 * machine.link_gbps, hbm_gbps=2 * machine.hbm_gbps, tflops=twice)
