"""Whether a model fits and how fast it would be, from a config.json or a GGUF header alone."""

import argparse

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", help="a directory, a GGUF file or a hub id")
parser.add_argument("--profile", default="rtx4090", help="the machine to plan for")
parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192], help="tokens of context")
arguments = parser.parse_args()

from offload_runtime.config import RuntimeConfig  # noqa: E402 (--help needs none of it)
from offload_runtime.errors import OffloadError  # noqa: E402
from offload_runtime.hardware import load_profile  # noqa: E402
from offload_runtime.plan.report import Refusal, forecast, plan_or_refuse  # noqa: E402
from offload_runtime.plan.sizes import describe_models  # noqa: E402
from offload_runtime.sizes import format_bytes  # noqa: E402 (--help needs none of it)

figures = load_profile(arguments.profile)
for context in arguments.contexts:
    try:
        plan = plan_or_refuse(describe_models(RuntimeConfig(target=arguments.target, context=context)), figures)
    except OffloadError as error:  # such as more tokens than the model knows
        print(f"{context} tokens: {error}")
        continue
    if isinstance(plan, Refusal):
        print(f"{context} tokens: {plan.error()}")
        continue
    layers = f"{len(plan.placement.streamed_layers)} of {len(plan.placement.layers)} layers over the link"
    speed = forecast(plan, figures).plain.seconds
    print(f"{context} tokens: {layers}, {format_bytes(plan.streamed_bytes)} a pass in {speed:.3f} s")
