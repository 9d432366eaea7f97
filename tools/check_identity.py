"""The tokens and logits of this commit, to be compared bit by bit with another's; and with transformers' tokens.

    python tools/check_identity.py --out before.json
    python tools/check_identity.py --against before.json

Drafts: none (every layer streamed), n-grams, and a noisy copy of the model, greedily and at temperature 1. Logits are
those of one plain pass over the answer, told by their SHA-256. Against another commit both have to be the same on the
same kind of machine; in fp32 greedy tokens are compared with transformers' `generate` too. Prints a line a case, then
one JSON line; exit code 1 on any difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from harness import check_out, emit, provenance
from widening.checkpoint import noisy_copy
from widening.convert import convert_to_safetensors

from offload_runtime.engine import Runtime, fetch_demo_model
from offload_runtime.errors import OptionError
from offload_runtime.memory import resolve_device
from offload_runtime.weights import CheckpointSource, open_checkpoint

PROMPTS = {
    "prose": "The history of the steam engine began when",
    "code": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n",
}
TEMPERATURES = (0.0, 1.0)


def rows_of(options: argparse.Namespace, model: CheckpointSource) -> Iterator[dict[str, Any]]:
    """A row for each draft, prompt and temperature."""
    drafts: dict[str, tuple[Any, Any]] = {
        "none": ("none", 0),
        "ngram": ("ngram", "auto"),
        "noisy copy": (noisy_copy(model, options.noise), 1),
    }
    for name, (draft, resident_layers) in drafts.items():
        with Runtime.load(
            model, draft=draft, resident_layers=resident_layers, device=options.device, dtype=options.dtype,
            context=options.tokens + 128, kv=options.kv,
        ) as runtime:  # fmt: skip
            for (text, prompt), temperature in product(PROMPTS.items(), TEMPERATURES):
                tokens = runtime.generate(
                    prompt, max_new_tokens=options.tokens, ignore_eos=True, temperature=temperature
                ).tokens
                (logits,) = runtime.logits(runtime.encode(prompt), [tokens])
                stored = logits.contiguous().view(torch.uint8).cpu().numpy().tobytes()
                yield {
                    "draft": name, "prompt": text, "temperature": temperature, "tokens": list(tokens),
                    "logits_sha256": hashlib.sha256(stored).hexdigest(),
                }  # fmt: skip


def transformers_rows(options: argparse.Namespace, model: CheckpointSource) -> Iterator[dict[str, Any]]:
    """Greedy tokens of transformers in fp32, on past the end of the sequence."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = convert_to_safetensors(model, Path(folder) / "model", dtype=torch.float32)
        oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(options.device).eval()
        oracle.generation_config.eos_token_id = None
        for text, prompt in PROMPTS.items():
            ids = torch.tensor([AutoTokenizer.from_pretrained(path).encode(prompt)], device=oracle.device)
            out = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.tokens, do_sample=False
            )
            yield {
                "draft": "transformers", "prompt": text, "temperature": 0.0,
                "tokens": out[0, ids.shape[1] :].tolist(),
            }  # fmt: skip


def differences(rows: Sequence[dict[str, Any]], against: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as plain decoding's in these rows, and not as in those of another commit."""
    plain = {(row["prompt"], row["temperature"]): row for row in rows if row["draft"] == "none"}
    before = {(row["draft"], row["prompt"], row["temperature"]): row for row in against}
    found = []
    for row in rows:
        where = f"{row['draft']}, {row['prompt']}, T = {row['temperature']}"
        expected = plain[row["prompt"], row["temperature"]]["tokens"]
        if row["tokens"] != expected:
            found.append(
                f"{where}: from token {harness.leading_agreement(expected, row['tokens'])} on unlike plain decoding"
            )
        other = before.get((row["draft"], row["prompt"], row["temperature"]), {} if not against else {"tokens": None})
        found += [f"{where}: other {name} than before" for name in other if other[name] != row.get(name)]
    return found


def read_rows(path: Path | None, settings: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of another commit. Raises `OptionError` where they are none, or of other settings."""
    if path is None:
        return []
    text = harness.read_text(path, "--against")
    try:
        found = json.loads(text)
        rows, asked = [*found["rows"]], found["settings"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(
            f"{path} is no result of check_identity ({type(error).__name__}): name another file"
        ) from error
    if asked != settings:
        raise OptionError(f"{path} was made with other options, {asked}: give these, not {settings}")
    return rows


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare and print; returns the exit code."""
    parser = harness.bench_parser(__doc__, device="cpu")
    parser.add_argument("--model", default="demo", help="checkpoint, by default the demonstration model")
    parser.add_argument("--tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--noise", type=float, default=0.05, help="relative, of the draft's weights")
    parser.add_argument("--dtype", choices=("auto", *harness.DTYPES), default="auto")
    parser.add_argument("--kv", choices=("auto", "gpu", "host"), default="auto")
    parser.add_argument("--against", type=Path, metavar="FILE", help="what --out has written at another commit")
    options = parser.parse_args(argv)
    check_out(options.out)
    harness.require_all_positive(options, "tokens")
    settings = harness.settings_of(options, without=("out", "commit", "against"))
    settings["model"] = Path(options.model).name
    against = read_rows(options.against, settings)
    device = resolve_device(options.device)
    model = open_checkpoint(fetch_demo_model(on_progress=print) if options.model == "demo" else options.model)
    rows = list[dict[str, Any]]()
    for row in rows_of(options, model):
        rows.append(row)
        print(f"{row['draft']}, {row['prompt']}, T = {row['temperature']}: {row['logits_sha256'][:16]}", flush=True)
    if options.dtype == "fp32" or (options.dtype == "auto" and device.type == "cpu"):
        rows += transformers_rows(options, model)
    found = differences(rows, against)
    print(*found, sep="\n")
    where = provenance(device, commit=options.commit)
    report = {"benchmark": "identity", "settings": settings, "rows": rows, "differences": found, **where}
    emit(report, options.out)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
