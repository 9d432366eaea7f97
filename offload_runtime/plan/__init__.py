"""What a run would hold where and how fast it would be; pure arithmetic.

A `RuntimeConfig` says what is asked for, a `MachineProfile` of which machine, and `MemoryLimits` what may be taken of
it. `sizes` adds up what a run holds, `search` places it: `plan_run` (or `find_plan`, on a machine that is here) gives a
`RunPlan`. `cost` says how long it takes, and `report` what that means and what would fit where a run does not. Layers,
caches and runners say how large they are; this room reads no weights, and knows neither the engine nor who proposes.
"""

from offload_runtime.plan.cost import PassTime, pass_time, prefill_time
from offload_runtime.plan.model import ModelPlan, Parts, Placement
from offload_runtime.plan.report import Refusal, forecast, plan_or_refuse, upgrades
from offload_runtime.plan.search import find_plan, plan_run, with_staging_rings
from offload_runtime.plan.sizes import RunPlan, common_figures, describe_models
from offload_runtime.stream.device import memory_name
