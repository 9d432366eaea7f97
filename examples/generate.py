"""One answer, what it took, and the same without speculation."""

import argparse

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", help="a directory, a GGUF file or a hub id")
parser.add_argument("--draft", default="auto", help="auto, a small model of the same family, ngram or none")
parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
parser.add_argument("--prompt", default="Once upon a time")
arguments = parser.parse_args()

from offload_runtime import Runtime  # noqa: E402 (--help needs none of it)

sampling = {"max_new_tokens": 48, "temperature": 0.6, "seed": 1}
with Runtime.load(arguments.target, draft=arguments.draft, device=arguments.device) as runtime:
    print(runtime.placement)
    result = runtime.generate(arguments.prompt, **sampling)
    plain = runtime.generate(arguments.prompt, speculate=False, **sampling)
    print(result.text)
    print(f"{result.stats.tok_per_s:.1f} tokens/s, {result.stats.tokens_per_pass:.1f} a pass")
    print(f"without speculation {plain.stats.tok_per_s:.1f} tokens/s; the same tokens: {plain.tokens == result.tokens}")
