"""Several prompts at once, each with options of its own; number i says what `generate(noise_id=i)` says."""

import argparse

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", help="a directory, a GGUF file or a hub id")
parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
arguments = parser.parse_args()

from offload_runtime import GenerationParams, Runtime, SamplingParams  # noqa: E402 (--help needs none of it)

prompts = ["The capital of France is", "def fibonacci(n):", "Dear Sir or Madam,"]
options = [
    GenerationParams(max_new_tokens=24),
    GenerationParams(max_new_tokens=32, stop=("\n\n",)),
    GenerationParams(max_new_tokens=24, sampling=SamplingParams(temperature=0.8, seed=7)),
]
with Runtime.load(arguments.target, device=arguments.device, max_batch=len(prompts)) as runtime:
    for prompt, result in zip(prompts, runtime.generate_batch(prompts, params=options), strict=True):
        print(f"== {prompt}{result.text} ({result.finish_reason})")
