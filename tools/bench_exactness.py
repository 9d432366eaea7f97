"""Is speculation exact to the last bit? Decode with and without it and compare tokens and the logits behind them.

    python tools/bench_exactness.py --model SmolLM2.gguf --tokens 1000 --temperatures 0,0.6,1.0
    python tools/bench_exactness.py --shape llama2-7b
    python tools/bench_exactness.py --shape llama2-7b --devices cuda:0,cuda:0 --vram 16GB --context 60000

The plain run decodes one token a pass. The speculative runs get their guesses from a script that knows the plain run's
tokens and is right with a given probability, so that windows of every length are accepted, cut and rolled back, however
little the model's text can be guessed. A real n-gram proposer runs too. The plain run keeps all layers on one device;
two more speculative runs stream every layer, and keep keys and values in host memory (those that `--vram` has no room
for at `--context`), on all of `--devices`. Each token's logits are compared bit by bit.
Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from common import random_source
from harness import check_out, emit, provenance
from long_context.internals import runner_of

from offload_runtime.engine import Runtime
from offload_runtime.memory import resolve_device
from offload_runtime.params import SamplingParams
from offload_runtime.runners import ModelRunner
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import DraftRequest, NgramProposer, PromptRequest, Proposer, run_step
from offload_runtime.verify.equality import ScriptedProposer, differing_rows
from offload_runtime.weights import CheckpointSource, open_checkpoint

_RANDOM_TOKENS = 64


def decode(
    runner: ModelRunner, prompt: list[int], proposer: Proposer, params: SamplingParams, *, gamma: int, count: int
) -> dict[str, Any]:
    """Generate `count` tokens; their ids, the logits behind them, and passes."""
    runner.cache.truncate(0, 0)
    proposer.join(0, params)
    started, passes, rows = time.perf_counter(), 0, list[torch.Tensor]()
    sampling = SlotSampling.of([params], runner.rows.rope.device)

    def step(asked: Sequence[DraftRequest], prompts: Sequence[PromptRequest] = ()) -> list[int]:
        (result,) = run_step(
            runner, sampling, proposer, asked, prompts=prompts, on_logits=lambda _, new: rows.append(new.cpu())
        )  # fmt: skip
        return result.tokens

    tokens = [*prompt, *step([], [PromptRequest(0, prompt)])]
    while len(tokens) - len(prompt) < count:
        tokens += step([DraftRequest(0, tokens, gamma)])
        passes += 1
    elapsed_s = time.perf_counter() - started
    return {"tokens": tokens[len(prompt) :][:count], "rows": torch.cat(rows)[:count], "passes": passes, "s": elapsed_s}


def compare(plain: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Counts of differing tokens and rows of logits."""
    differing = differing_rows(plain["rows"], other["rows"])
    return {
        "tokens": len(plain["tokens"]),
        "differing_tokens": sum(a != b for a, b in zip(plain["tokens"], other["tokens"], strict=True)),
        "differing_logit_rows": len(differing),
        "first_difference": differing[0] if differing else None,
        "passes": other["passes"],
        "plain_passes": plain["passes"],
    }


def run_model(
    resident: Runtime, streamed: Runtime, kv_on_host: Runtime, prompt: list[int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """All temperatures and proposers for one model in its three placements."""
    where = {
        id(resident): "resident",
        id(streamed): f"streamed, cards: {len(streamed.devices)}",
        id(kv_on_host): f"KV on host, cards: {len(kv_on_host.devices)}",
    }
    rows = []
    vocab_size = resident.config.vocab_size
    for temperature in (float(part) for part in arguments.temperatures.split(",")):
        params = SamplingParams(temperature=temperature, seed=arguments.seed)
        plain = decode(runner_of(resident), prompt, Proposer(), params, gamma=0, count=arguments.tokens)
        runs: list[tuple[str, Runtime, Proposer, int]] = [("ngram", resident, NgramProposer(), 16)]
        for accuracy, gamma, model in ((0.8, 8, resident), (0.95, 40, resident), (0.99, 200, resident),
                                       (0.97, 200, streamed), (0.97, 200, kv_on_host)):  # fmt: skip
            script = ScriptedProposer(prompt + plain["tokens"], vocab_size, accuracy=accuracy, seed=arguments.seed)
            runs.append((f"script {accuracy}", model, script, gamma))
        for name, model, proposer, gamma in runs:
            speculative = decode(runner_of(model), prompt, proposer, params, gamma=gamma, count=arguments.tokens)
            row = {
                "temperature": temperature, "proposer": name, "gamma": gamma, "where": where[id(model)],
                "streamed_layers": model.config.num_layers if model is streamed else 0, **compare(plain, speculative),
            }  # fmt: skip
            rows.append(row)
            print(
                f"T={temperature} {name:12} gamma {gamma:3} {row['where']}: "
                f"{row['differing_tokens']} tokens and {row['differing_logit_rows']} logit rows of {row['tokens']} "
                f"differ; {row['passes']} passes ({plain['s']:.1f} s plain, {speculative['s']:.1f} s)",
                flush=True,
            )
    return rows


def opened(arguments: argparse.Namespace) -> tuple[str, CheckpointSource, list[int]]:
    """The model, what it is called, and a prompt."""
    if arguments.model:
        source = open_checkpoint(arguments.model)
        return Path(arguments.model).name, source, source.tokenizer().encode(arguments.prompt)
    device = resolve_device(arguments.device)
    made = random_source(
        arguments.shape, layers=arguments.layers, seed=0, device=device, context_tokens=arguments.context
    )
    prompt = torch.randint(made.config().vocab_size, (_RANDOM_TOKENS,), generator=torch.Generator().manual_seed(0))
    return f"random {arguments.shape}", made, prompt.tolist()


def load(
    arguments: argparse.Namespace, source: CheckpointSource, resident_layers: int, *, device: str,
    vram: str | None = None, kv: str = "gpu",
) -> Runtime:  # fmt: skip
    """A runtime of the target alone."""
    return Runtime.load(
        source, draft="none", device=device, dtype=arguments.dtype, resident_layers=resident_layers, kv=kv, vram=vram,
        context=max(arguments.tokens + 512, arguments.context if kv == "host" else 0), max_gamma=255,
    )  # fmt: skip


@harness.one_line_errors
def main() -> int:
    """Run and report."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--model", help="checkpoint (directory, GGUF or hub id)")
    parser.add_argument("--shape", help="random weights of this shape instead")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompt", default="The history of the steam engine began when")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--temperatures", default="0,0.6,1.0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--devices", help="of the runs that stream (default: --device)")
    parser.add_argument("--vram", help="device memory of the runs that stream, like 16GB of each card")
    parser.add_argument("--context", type=int, default=0, help="tokens to plan the run with KV on the host for")
    arguments = parser.parse_args()
    check_out(arguments.out)
    if bool(arguments.model) == bool(arguments.shape):
        parser.error("give either --model or --shape")
    device = resolve_device(arguments.device)
    name, source, prompt = opened(arguments)
    layers, cards, vram = source.config().num_layers, arguments.devices or arguments.device, arguments.vram
    with (
        load(arguments, source, layers, device=arguments.device) as resident,
        load(arguments, source, 0, device=cards, vram=vram) as streamed,
        load(arguments, source, layers, device=cards, vram=vram, kv="host") as kv_on_host,
    ):
        print(kv_on_host.placement)
        rows = run_model(resident, streamed, kv_on_host, prompt, arguments)
    failed = any(row["differing_tokens"] or row["differing_logit_rows"] for row in rows)
    report = {"benchmark": "exactness", "model": name, "dtype": arguments.dtype}
    emit({**report, "rows": rows, "exact": not failed, **provenance(device, commit=arguments.commit)}, arguments.out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
