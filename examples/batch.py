"""Several prompts at once, each with options of its own; number i says what `generate(noise_id=i)` says.

Run as `python examples/batch.py path/or/hub-id`.
"""

import sys

from offload_runtime import GenerationParams, Runtime, SamplingParams

prompts = ["The capital of France is", "def fibonacci(n):", "Dear Sir or Madam,"]
options = [
    GenerationParams(max_new_tokens=24),
    GenerationParams(max_new_tokens=32, stop=("\n\n",)),
    GenerationParams(max_new_tokens=24, sampling=SamplingParams(temperature=0.8, seed=7)),
]
with Runtime.load(sys.argv[1], max_batch=len(prompts)) as runtime:
    for prompt, result in zip(prompts, runtime.generate_batch(prompts, params=options), strict=True):
        print(f"== {prompt}{result.text} ({result.finish_reason})")
