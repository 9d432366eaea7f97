"""What a run would hold where and how fast it would be; pure arithmetic.

A `RuntimeConfig` says what is asked for, a `MachineProfile` of which machine, and `MemoryLimits` what may be taken of
it. `sizes` adds up what a run holds, `search` places it: `plan_run` (or `find_plan`, on a machine that is here) gives a
`RunPlan`. `cost` says how long it takes, and `report` what that means and what would fit where a run does not. Layers,
caches and runners say how large they are; this room reads no weights, and knows neither the engine nor who proposes.
"""

from offload_runtime.plan.cost import PassTime, link_slack, pass_time, predicted_step_s, prefill_time
from offload_runtime.plan.model import ModelPlan, Parts, Placement
from offload_runtime.plan.report import (
    Change,
    Refusal,
    RunForecast,
    forecast,
    note_on_draft,
    plan_fastest_draft,
    plan_or_refuse,
    refusal,
    rounded,
    undrafted_tok_per_s,
    upgrades,
    with_found_draft,
)
from offload_runtime.plan.search import (
    as_many_cards_as_help,
    check_host_memory,
    find_plan,
    place_staged,
    plan_run,
    with_staging_rings,
)
from offload_runtime.plan.sizes import (
    CardLimit,
    MemoryLimits,
    RunPlan,
    check_experts,
    common_figures,
    describe_models,
    resolve_dtype,
)
from offload_runtime.stream import memory_name
