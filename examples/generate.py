"""One answer, and what it took.

Run as `python examples/generate.py path/or/hub-id [draft model]`.
"""

import sys

from offload_runtime import Runtime

target, draft = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "ngram"
with Runtime.load(target, draft=draft) as runtime:
    print(runtime.placement)
    result = runtime.generate("Once upon a time", max_new_tokens=48, temperature=0.6, seed=1)
    plain = runtime.generate("Once upon a time", max_new_tokens=48, temperature=0.6, seed=1, speculate=False)
    print(result.text)
    print(f"{result.stats.tok_per_s:.1f} tokens/s, {result.stats.tokens_per_pass:.1f} a pass")
    print(f"without speculation {plain.stats.tok_per_s:.1f} tokens/s; the same tokens: {plain.tokens == result.tokens}")
