"""A question about a text that is too long for the card: its keys and values live in host memory.

Run as `python examples/long_context.py path/or/hub-id book.txt [draft model]`.
"""

import sys
from pathlib import Path

from offload_runtime import Runtime

target, book, draft = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "ngram"
with Runtime.load(target, draft=draft, kv="host") as runtime:
    text = runtime.encode(book.read_text(encoding="utf-8"))[: runtime.context_tokens - 64]
    result = runtime.generate(text, max_new_tokens=48)
    print(f"{len(text)} tokens read in {result.stats.time_to_first_token_s:.1f} s")
    print(result.text)
    print(f"{result.stats.tok_per_s:.1f} tokens/s, {result.stats.tokens_per_pass:.1f} a pass of the target")
