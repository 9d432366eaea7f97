"""What a run would take and how fast it would be, before anything is loaded: a directory with a config.json is enough.

Run as `python examples/plan.py path/or/hub-id [profile]`.
"""

import sys

from offload_runtime.config import RuntimeConfig, format_bytes
from offload_runtime.hardware import load_profile
from offload_runtime.plan import Refusal, describe_models, forecast, machine_figures, plan_or_refuse

target, profile = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "rtx4090"
figures = machine_figures(load_profile(profile))
for context in (2048, 8192):
    plan = plan_or_refuse(describe_models(RuntimeConfig(target=target, context=context)), figures)
    if isinstance(plan, Refusal):
        print(f"{context} tokens: {plan.problem}")
        continue
    layers = f"{len(plan.placement.streamed_layers)} of {plan.placement.num_layers} layers over the link"
    speed = forecast(plan, figures).plain.seconds
    print(f"{context} tokens: {layers}, {format_bytes(plan.streamed_bytes)} a pass in {speed:.3f} s")
