"""Does every draft give the very tokens of plain decoding? A matrix of drafts, temperatures, filters and seeds.

    python tools/check_identity.py --out tools/results/identity-cpu.json
    python tools/check_identity.py --device cuda --tokens 512

Drafts: none (one token a pass, every layer streamed), n-gram lookup, and a noisy copy of the model. At temperature 0
and in fp32 the plain tokens are compared with transformers' `generate` too. Exit code 1 on any difference.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from harness import check_out, emit, leading_agreement, provenance
from widening.checkpoint import write_noisy_copy
from widening.convert import convert_to_safetensors

from offload_runtime.engine import GenerationResult, Runtime, fetch_demo_model
from offload_runtime.memory import resolve_device
from offload_runtime.weights import open_checkpoint

PROMPTS = {
    "prose": "The history of the steam engine began when",
    "code": (
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n\n"
        "def factorial(n):\n"
    ),
}
TEMPERATURES = (0.0, 0.6, 1.0, 1.2)
FILTERED_TOP_P = 0.9


@dataclass(frozen=True)
class Case:
    """One plain generation that all drafts have to repeat."""

    prompt: str
    temperature: float
    top_p: float
    seed: int


def matrix(num_seeds: int) -> list[Case]:
    """Every case; greedy decoding has neither seeds nor filters."""
    sampled = itertools.product(TEMPERATURES[1:], (1.0, FILTERED_TOP_P), range(num_seeds))
    settings = [(0.0, 1.0, 0), *sampled]
    return [Case(prompt, *setting) for prompt in PROMPTS for setting in settings]


def answers(runtime: Runtime, cases: Sequence[Case], *, count: int) -> Iterator[GenerationResult]:
    """The runtime's tokens for every case."""
    for case in cases:
        how = {name: value for name, value in asdict(case).items() if name != "prompt"}
        yield runtime.generate(PROMPTS[case.prompt], max_new_tokens=count, ignore_eos=True, **how)


def transformers_tokens(model: Path, prompt: str, *, count: int, device: torch.device) -> list[int]:
    """Greedy tokens of transformers in fp32, on past the end of the sequence."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    oracle.generation_config.eos_token_id = None
    ids = torch.tensor([AutoTokenizer.from_pretrained(model).encode(prompt)], device=device)
    out = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def compare(
    case: Case, draft: str, plain: GenerationResult, tokens: Sequence[int], tokens_per_pass: float = 1.0
) -> dict[str, Any]:
    """One row of the report; prints it."""
    same = leading_agreement(plain.tokens, tokens)
    at = None if same == len(plain.tokens) == len(tokens) else same
    print(
        f"{case.prompt:6} T={case.temperature:<4} top_p={case.top_p:<4} seed {case.seed}  {draft:12} "
        f"{tokens_per_pass:5.2f} tokens a pass  {len(tokens)} tokens "
        + ("identical" if at is None else f"DIFFER from token {at} on"),
        flush=True,
    )
    return {
        **asdict(case), "draft": draft, "tokens": len(tokens), "tokens_per_pass": round(tokens_per_pass, 3),
        "identical": at is None, "first_difference": at,
    }  # fmt: skip


def run(model: Path, noisy: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All drafts over all cases."""
    cases = matrix(arguments.seeds)
    device = resolve_device(arguments.device)
    load: dict[str, Any] = {"device": arguments.device, "dtype": arguments.dtype, "context": arguments.tokens + 128}
    rows = []
    with Runtime.load(model, draft="none", resident_layers=0, **load) as runtime:
        dtype = runtime.dtype
        plain = []
        for number, answer in enumerate(answers(runtime, cases, count=arguments.tokens), start=1):
            plain.append(answer)
            print(f"plain decoding: {number} of {len(cases)} cases", flush=True)
    greedy = [(case, answer) for case, answer in zip(cases, plain, strict=True) if case.temperature == 0]
    if dtype == torch.float32:
        for case, answer in greedy:
            tokens = transformers_tokens(model, PROMPTS[case.prompt], count=arguments.tokens, device=device)
            rows.append(compare(case, "transformers", answer, tokens))
    else:
        print(f"transformers is not compared: its {dtype} sums have another order")
    for name, draft, resident in (("ngram", "ngram", "auto"), ("noisy copy", noisy, 7)):
        with Runtime.load(model, draft=draft, resident_layers=resident, **load) as runtime:
            for case, expected, answer in zip(
                cases, plain, answers(runtime, cases, count=arguments.tokens), strict=True
            ):
                rows.append(compare(case, name, expected, answer.tokens, answer.stats.tokens_per_pass))
    return rows


@harness.one_line_errors
def main() -> int:
    """Run and report."""
    parser = harness.bench_parser(__doc__, device="cpu")
    parser.add_argument("--model", type=Path, help="safetensors directory; by default the demonstration model")
    parser.add_argument("--tokens", type=int, default=128, help="of every generation")
    parser.add_argument("--seeds", type=int, default=3, help="for every temperature above 0")
    parser.add_argument("--noise", type=float, default=0.05, help="relative, of the draft's weights")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    check_out(arguments.out)
    # Before the run: the tree may change while it goes on.
    where = provenance(resolve_device(arguments.device), commit=arguments.commit)
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model
        if model is None:
            demo = fetch_demo_model(on_progress=print)
            model = convert_to_safetensors(open_checkpoint(demo), Path(scratch) / demo.stem)
        noisy = write_noisy_copy(model, Path(scratch) / "noisy", noise=arguments.noise)
        rows = run(model, noisy, arguments)
    exact = all(row["identical"] for row in rows)
    report = {"benchmark": "identity", "model": model.name, "noise": arguments.noise, "dtype": arguments.dtype}
    emit({**report, "rows": rows, "exact": exact, **where}, arguments.out)
    return int(not exact)


if __name__ == "__main__":
    sys.exit(main())
