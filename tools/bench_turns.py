"""Does it matter how keys and values came to be? Turns behind what was kept, batches and pieces of prompts, bit by bit.

    python tools/bench_turns.py --model SmolLM2.gguf --turns 1000 --answers 1000 --prompts 300
    python tools/bench_turns.py --shape llama2-7b --layers 8

*Turns*: conversations of four turns keep their keys and values; every later turn is said again from the beginning.
*Answers*: batches of 2 to 8, whose answers are then given alone. *Prompts* of up to `--longest` tokens are read in one
piece and in pieces. Tokens, the logits behind them, and keys and values where they are on the device are compared.
Weights are resident and streamed, keys and values on the device and on the host, temperatures take turns.
Exit code 1 when anything differs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import harness
import torch
from common import random_source
from harness import check_out, emit, floats, provenance
from long_context.internals import runner_of

from offload_runtime.engine import Runtime
from offload_runtime.kv import DeviceKVCache
from offload_runtime.memory import resolve_device
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.verify.equality import Transcript, differing_rows, transcribe
from offload_runtime.weights import CheckpointSource, open_checkpoint

_TURNS, _MOST_BATCH, _MOST_NEW = 4, 8, 60
PLACES = tuple(product(("resident", "streamed"), ("gpu", "host")))


@dataclass
class Count:
    """What was compared in one way, and what differed of it."""

    compared: int = 0
    differing_tokens: int = 0
    differing_logit_rows: int = 0
    differing_keys_and_values: int = 0

    def add(self, expected: Transcript, other: Transcript, kv: Sequence[list[torch.Tensor]] = ()) -> None:
        """Compare two generations, and the keys and values that both have left."""
        self.compared += 1
        self.differing_tokens += expected.tokens != other.tokens
        self.differing_logit_rows += len(differing_rows(expected.rows, other.rows))
        self.differing_keys_and_values += bool(kv) and not all(map(torch.equal, *kv))

    @property
    def differing(self) -> int:
        """Of all kinds together."""
        return self.differing_tokens + self.differing_logit_rows + self.differing_keys_and_values


def keys_and_values(runtime: Runtime, length: int) -> list[torch.Tensor]:
    """Return those of the first sequence's first `length` tokens as integers, layer by layer; none from the host."""
    cache = runner_of(runtime).cache
    if not isinstance(cache, DeviceKVCache):
        return []
    positions = torch.arange(length, device=runtime.device)
    layers = (
        cache.store(layer).at(torch.zeros_like(positions), positions) for layer in range(runtime.config.num_layers)
    )
    return [side.view(torch.int16 if side.itemsize == 2 else torch.int32).clone() for pair in layers for side in pair]


class Bench:
    """One runtime, and what it is asked for.

    Args:
        runtime: Loaded for batches of 8.
        seed: Of prompts and noise.
        tokens: Of every answer.
        temperatures: They take turns.
    """

    def __init__(self, runtime: Runtime, *, seed: int, tokens: int, temperatures: Sequence[float]) -> None:
        self._runtime, self._tokens, self._temperatures = runtime, tokens, temperatures
        self._random = random.Random(seed)

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(self._runtime.config.vocab_size) for _ in range(count)]

    def _params(self, number: int) -> GenerationParams:
        sampling = SamplingParams(self._temperatures[number % len(self._temperatures)], seed=number)
        return GenerationParams(self._tokens, ignore_eos=True, sampling=sampling)

    def turns(self, count: int) -> Count:
        """Conversations, until as many turns behind kept ones have been compared."""
        found, runtime = Count(), self._runtime
        while found.compared < count:
            owner, text, said = object(), self._draw(200), list[tuple[list[int], Transcript, list[torch.Tensor]]]()
            for turn in range(_TURNS):
                params = self._params(found.compared + turn)
                answer = transcribe(runtime, text, params, runtime.parts.proposer, owner=owner)
                said.append((text, answer, keys_and_values(runtime, len(text) + self._tokens - 1)))
                text = [*text, *answer.tokens, *self._draw(self._random.randint(1, _MOST_NEW))]
            for text, answer, kept in said[1 : 1 + count - found.compared]:
                params = replace(self._params(0), sampling=answer.params.sampling)
                fresh = transcribe(runtime, text, params)
                found.add(fresh, answer, [kept, keys_and_values(runtime, len(text) + self._tokens - 1)])
        return found

    def answers(self, count: int) -> Count:
        """Batches of 2 to 8, each answer then alone: of the last one the logits, of all the tokens."""
        found, runtime = Count(), self._runtime
        while found.compared < count:
            size = min(self._random.randint(2, _MOST_BATCH), runtime.plan.target.batch)
            prompts = [self._draw(self._random.randint(1, 300)) for _ in range(size)]
            params = self._params(found.compared)
            together = runtime.generate_batch(prompts, params=params, noise_ids=[0] * size)
            last = transcribe(runtime, prompts[-1], params, runtime.parts.proposer, mates=prompts[:-1])
            for prompt, result in zip(prompts[: count - found.compared], together, strict=False):
                alone = transcribe(runtime, prompt, params)
                if prompt is prompts[-1]:
                    found.add(alone, last)
                else:
                    found.add(alone, replace(alone, tokens=result.tokens))
        return found

    def prompts(self, count: int, longest: int) -> Count:
        """Prompts in one piece and in pieces, and what is said behind them."""
        found, runtime = Count(), self._runtime
        own = runtime.parts
        for number in range(count):
            text = self._draw(int(longest ** self._random.uniform(0.3, 1.0)))
            pieces = self._random.randint(1, 2 * own.target.runner.chunk_tokens)
            runs = []
            for step in (len(text), pieces):
                runner = replace(own.target.runner, chunk_tokens=step)
                runtime.parts = replace(own, target=replace(own.target, runner=runner))
                said = transcribe(runtime, text, replace(self._params(number), max_new_tokens=2))
                runs.append((said, keys_and_values(runtime, len(text))))
            runtime.parts = own
            found.add(runs[0][0], runs[1][0], [kv for _, kv in runs])
        return found


def context_of(arguments: Any) -> int:
    """Return the tokens that the longest sequence needs."""
    return int(max(arguments.longest + 2, _TURNS * (arguments.tokens + _MOST_NEW) + 200, 300 + arguments.tokens))


def measure(place: tuple[str, str], arguments: Any) -> list[dict[str, Any]]:
    """A row for each way, with weights, keys and values where `place` says."""
    (weights, kv), number = place, PLACES.index(place)
    with Runtime.load(
        open_source(arguments), draft="ngram", device=arguments.device, dtype=arguments.dtype, kv=kv,
        context=context_of(arguments),
        resident_layers=0 if weights == "streamed" else "auto", max_batch=_MOST_BATCH,
    ) as runtime:  # fmt: skip
        bench = Bench(runtime, seed=number, tokens=arguments.tokens, temperatures=arguments.temperatures)
        shares = [-(-total // len(PLACES)) for total in (arguments.turns, arguments.answers, arguments.prompts)]
        counts = {
            "turns": bench.turns(shares[0]), "answers": bench.answers(shares[1]),
            "prompts": bench.prompts(shares[2], arguments.longest),
        }  # fmt: skip
    for way, found in counts.items():
        print(f"{weights:8} weights, KV on {kv:4}: {found.differing} of {found.compared} {way} differ", flush=True)
    return [{"weights": weights, "kv": kv, "way": way, **asdict(found)} for way, found in counts.items()]


def open_source(arguments: Any) -> CheckpointSource:
    """Return the checkpoint or the random weights that are asked for. Raises `OptionError`, `CheckpointError`."""
    if arguments.model:
        return open_checkpoint(arguments.model)
    return random_source(
        arguments.shape, layers=arguments.layers, seed=0, device=resolve_device(arguments.device),
        context_tokens=context_of(arguments),
    )  # fmt: skip


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run and report."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--model", help="checkpoint (directory, GGUF or hub id)")
    parser.add_argument("--shape", help="random weights of this shape instead")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--longest", type=int, default=20_000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--temperatures", type=floats, default=(0.0, 0.7, 1.0))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device, a place each")
    arguments = parser.parse_args(argv)
    check_out(arguments.out)
    if bool(arguments.model) == bool(arguments.shape):
        parser.error("give either --model or --shape")
    name = Path(arguments.model).name if arguments.model else f"random {arguments.shape}"
    run = partial(measure, arguments=arguments)
    if arguments.jobs > 1:
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(run, PLACES))
    else:
        found = list(map(run, PLACES))
    rows = list(chain.from_iterable(found))
    names = ("differing_tokens", "differing_logit_rows", "differing_keys_and_values")
    failed = any(row[figure] for row in rows for figure in names)
    report = {"benchmark": "turns", "model": name, "dtype": arguments.dtype, "answer_tokens": arguments.tokens}
    report |= {"rows": rows, "exact": not failed}
    emit(report | provenance(resolve_device(arguments.device), commit=arguments.commit), arguments.out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
