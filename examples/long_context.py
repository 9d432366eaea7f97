"""A question about a text that is too long for the card: its keys and values live in host memory."""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", help="a directory, a GGUF file or a hub id")
parser.add_argument("book", type=Path, help="a text in UTF-8")
parser.add_argument("--draft", default="auto", help="auto, a small model of the same family, ngram or none")
parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
arguments = parser.parse_args()

from offload_runtime import Runtime  # noqa: E402 (--help needs none of it)

with Runtime.load(arguments.target, draft=arguments.draft, device=arguments.device, kv="host") as runtime:
    text = runtime.encode(arguments.book.read_text(encoding="utf-8"))[: runtime.context_tokens - 64]
    result = runtime.generate(text, max_new_tokens=48)
    print(f"{len(text)} tokens read in {result.stats.time_to_first_token_s:.1f} s")
    print(result.text)
    print(f"{result.stats.tok_per_s:.1f} tokens/s, {result.stats.tokens_per_pass:.1f} a pass of the target")
