"""What a run would hold where and how fast it would be; pure arithmetic.

A `RuntimeConfig` says what is asked for and a `MachineFigures` where. `plan_run` (or `find_plan`, on a machine that is
here) places everything: a `RunPlan`. `pass_time` and `predicted_step_s` say how long it takes, `forecast` what
that means in tokens per second, and `plan_or_refuse` what would fit where it does not. Who allocates a tensor says how
large it is; this room adds up, reads no weights, and knows neither the engine nor who proposes.
"""

from offload_runtime.memory import memory_name, within
from offload_runtime.plan.cost import PassTime, link_slack, pass_time, predicted_step_s, prefill_time, tok_per_s
from offload_runtime.plan.drafts import note_on_draft, plan_fastest_draft, with_found_draft
from offload_runtime.plan.forecast import (
    RunForecast,
    describe_draft_cache,
    describe_speculation,
    describe_staging,
    forecast,
)
from offload_runtime.plan.memory import MemoryPart, ModelPlan, Placement, RunPlan
from offload_runtime.plan.offers import Upgrade, rounded, undrafted_tok_per_s, upgrades
from offload_runtime.plan.request import (
    COMMON_PROFILE,
    CardLimit,
    MachineFigures,
    MemoryLimits,
    common_figures,
    describe_models,
    device_type_of,
    figures_here,
    known_figures,
    limits_here,
    machine_figures,
    require_dtype,
    resolve_dtype,
)
from offload_runtime.plan.search import as_many_cards_as_help, check_host_memory, find_plan, plan_run
from offload_runtime.plan.staging import place_staged, with_staging_rings
from offload_runtime.plan.suggest import Refusal, plan_or_refuse, remedies
