"""Models that take turns on one machine: how long loading and unloading take, and whether memory comes back.

    python tools/bench_models.py --models llama3-8b@q8_0 llama2-7b --emulate rtx4090 --minutes 8 --out models.json
    python tools/bench_models.py --models ./coder.gguf ./chat.gguf --minutes 8 --clients 4

The server of `offload-runtime serve` in this process, over HTTP. Each model is a checkpoint, or a shape with random
weights, `@` and one of the formats that `widen_model.py --stored` has where it is not bf16. Clients ask for one or
another, for `--minutes`; some leave in the middle (`--disconnects`). Every answer is set beside the first one to the
same question, log-probabilities to the last bit. Memory of process and card is looked at every second, and whenever a
model has been unloaded, which is what it is judged by: in the second half of the turns it may not grow.

Prints a line a turn, each claim with its verdict, then one JSON line; exit code 1 when a claim is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import harness
import httpx
import psutil
import torch
from bench_serving import MemoryWatch, mb_per_minute, shares
from common import SHAPES, random_source
from emulation import emulated
from harness import Check, check_out, finish, percentile, provenance, say

from offload_runtime.config import ServerConfig
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.server.app import Server
from offload_runtime.server.turns import OfferedModel
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.sources import open_checkpoint

_QUESTIONS = 8  # to each model
_MOST_GROWTH = {"rss_bytes": 100e6, "device_bytes": 20e6, "threads": 2, "files": 2}  # of what is left without a model


class Turns:
    """Loads models as a server asks for them, and notes what is left of each when it is gone.

    Args:
        options: Of the command line.
        sources: By name.
    """

    def __init__(self, options: argparse.Namespace, sources: dict[str, CheckpointSource]) -> None:
        self._options, self._sources = options, sources
        self._started_s, self.notes = time.perf_counter(), list[dict[str, Any]]()
        self.placements = dict[str, list[str]]()  # all that a model has had
        self.devices: tuple[torch.device, ...] = (resolve_device(options.device),)

    def offered(self) -> list[OfferedModel]:
        """What the server says of the models."""
        found = []
        for name, source in self._sources.items():
            layout = source.layout(source.native_dtype)
            found.append(OfferedModel.described(
                [name], source.tokenizer(), architecture=source.config().architecture, stored_as=layout.stored_as,
                weight_bytes=layout.total_bytes, defaults={}, context_tokens=self._options.context,
            ))  # fmt: skip
        return found

    @contextmanager
    def load(self, model: OfferedModel) -> Iterator[Runtime]:
        """A model, until its turn is over."""
        options, (name,) = self._options, model.names
        machine = emulated(options.emulate, device=options.device, vram=options.vram, dtype=options.dtype)
        began_s = time.perf_counter()
        runtime = Runtime.load(
            self._sources[name], draft=options.draft, context=options.context, dtype=options.dtype,
            max_batch=options.clients, **machine,
        )  # fmt: skip
        with runtime:
            loaded_s = time.perf_counter()
            plan, placements = runtime.plan, self.placements.setdefault(name, [])
            placements += [] if runtime.placement in placements else [runtime.placement]
            yield runtime
            over_s = time.perf_counter()
        del runtime
        process, now_s = psutil.Process(), time.perf_counter()
        left: dict[str, Any] = {
            "rss_bytes": process.memory_info().rss, "threads": process.num_threads(), "files": process.num_fds(),
        }  # fmt: skip
        if self.devices[0].type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.devices[0])
            left["device_bytes"] = total_bytes - free_bytes
        self.notes.append({
            "model": name, "s": now_s - self._started_s, "load_s": loaded_s - began_s, "answers_s": over_s - loaded_s,
            "unload_s": now_s - over_s, "pinned_bytes": plan.pinned_bytes, "planned_device_bytes": plan.device_bytes,
            "left": left,
        })  # fmt: skip
        took = f"loaded in {loaded_s - began_s:.1f} s, unloaded in {now_s - over_s:.1f} s"
        parts = [f"{key.removesuffix('_bytes')} {one / 1e6:.0f} MB" for key, one in left.items() if "bytes" in key]
        parts += [f"{left[key]} {key}" for key in ("threads", "files")]
        say(f"{now_s - self._started_s:7.1f} s  {name}: {took}, left {', '.join(parts)}")


def ask(url: str, name: str, number: int, options: argparse.Namespace, *, leaves: bool) -> dict[str, Any]:
    """One question: its answer's fingerprint, how long it took, and the model's waiting in it."""
    draw = random.Random(f"{options.seed} {name} {number}")
    prompt = [draw.randrange(3, 250) for _ in range(options.prompt_tokens)]
    body = {
        "model": name, "prompt": prompt, "max_tokens": options.new_tokens, "ignore_eos": True, "seed": number,
        "temperature": 1.0, "logprobs": 0, "stream": leaves,
    }  # fmt: skip
    asked_s = time.perf_counter()
    with httpx.Client(base_url=url, timeout=None, trust_env=False) as http:
        if leaves:
            with http.stream("POST", "/v1/completions", json=body) as response:
                next(line for line in response.iter_lines() if line.startswith("data: "))
            return {"model": name, "number": number, "left": True}
        response = http.post("/v1/completions", json=body)
    seconds = time.perf_counter() - asked_s
    if response.status_code != 200:
        return {"model": name, "number": number, "error": response.text[:300]}
    (choice,) = response.json()["choices"]
    logprobs = json.dumps(choice["logprobs"]["token_logprobs"])
    return {"model": name, "number": number, "seconds": seconds, "own_s": choice["x_stats"]["seconds"],
            "logprobs": logprobs}  # fmt: skip


def client(url: str, names: Sequence[str], options: argparse.Namespace, own: int, end_s: float) -> list[dict[str, Any]]:
    """Ask until the end, mostly for the model that was asked for last."""
    draw, found, name = random.Random(f"{options.seed} {own}"), list[dict[str, Any]](), names[own % len(names)]
    while time.perf_counter() < end_s:
        name = draw.choice(names) if draw.random() < options.changes else name
        leaves = draw.random() < options.disconnects
        found.append(ask(url, name, draw.randrange(_QUESTIONS), options, leaves=leaves))
    return found


def measure(options: argparse.Namespace, sources: dict[str, CheckpointSource]) -> dict[str, Any]:
    """Everything, as one dictionary."""
    turns, over = Turns(options, sources), threading.Event()
    config = ServerConfig(port=0, keep_alive=options.keep_alive, max_waiting=4 * options.clients, grace_s=0.0)
    with (
        MemoryWatch(turns.devices) as memory,
        Server(config, models=turns.offered()) as server,
        ThreadPoolExecutor(options.clients + 1) as pool,
    ):
        end_s = time.perf_counter() + 60 * options.minutes
        asking = partial(client, server.url, [*sources], options, end_s=end_s)
        clients = [pool.submit(asking, own) for own in range(options.clients)]
        pool.submit(lambda: wait(clients)).add_done_callback(lambda ended: over.set())
        server.serve_in_turns(turns.load, over.is_set)
        answers = [answer for one in clients for answer in one.result()]
    return {
        "benchmark": "models", "turns": turns.notes, "placements": turns.placements, **figures(answers, turns.notes),
        "memory": memory.samples, "mb_per_minute": mb_per_minute(memory.samples),
        "settings": harness.settings_of(options), **provenance(*turns.devices, commit=options.commit),
    }  # fmt: skip


def figures(answers: Sequence[dict[str, Any]], notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came of the requests, and by how much what is left without a model has grown."""
    whole = [answer for answer in answers if "logprobs" in answer]
    first: dict[tuple[str, int], str] = {}
    unlike = sum(first.setdefault((one["model"], one["number"]), one["logprobs"]) != one["logprobs"] for one in whole)
    waited_s = [one["seconds"] - one["own_s"] for one in whole]
    # The first turns bring what stays: kernels, libraries' own memory, what the allocator of made weights keeps.
    late = [note["left"] for note in notes[len(notes) // 2 :]]
    growth = {name: late[-1][name] - late[0][name] for name in late[0]} if len(late) > 1 else {}
    return {
        "finished": len(whole), "left": sum("left" in one for one in answers), "unlike_first": unlike,
        "asked_again": len(whole) - len(first), "errors": [one["error"] for one in answers if "error" in one],
        "waited_s": shares(waited_s),
        "load_s": percentile([one["load_s"] for one in notes], 0.5) if notes else None,
        "unload_s": percentile([one["unload_s"] for one in notes], 0.5) if notes else None,
        "compared_turns": len(late), "growth": growth,
    }  # fmt: skip


def checks(report: dict[str, Any]) -> list[Check]:
    """What is promised of models that take turns."""
    found = [
        Check("requests that failed", len(report["errors"]), 0, at_least=False),
        Check("answers to a question asked before", report["asked_again"], 1, at_least=True),
        Check("of these, unlike the first one", report["unlike_first"], 0, at_least=False),
        Check("turns whose memory is compared", report["compared_turns"], 2, at_least=True),
    ]
    for name, grown in report["growth"].items():
        found.append(Check(f"growth of {name} without a model", grown, _MOST_GROWTH[name], at_least=False))
    return found


def make_parser() -> harness.Parser:
    """The options."""
    parser = harness.bench_parser(__doc__, device="auto")
    parser.add_argument("--models", nargs="+", required=True, help=f"checkpoints, or of {', '.join(sorted(SHAPES))}")
    parser.add_argument("--layers", type=int, help="of shapes, so many (all)")
    parser.add_argument("--emulate", help="a machine with a smaller card to play, by name or file")
    parser.add_argument("--vram", help="cap of the process on the card")
    parser.add_argument("--draft", default="auto", help="of all: auto, mtp, self, ngram or none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=2, help="at once")
    parser.add_argument("--changes", type=float, default=0.25, help="share of questions before which a client changes")
    parser.add_argument("--disconnects", type=float, default=0.1, help="share of clients that leave in the middle")
    parser.add_argument("--keep-alive", default="5m")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def opened(options: argparse.Namespace) -> dict[str, CheckpointSource]:
    """The models by name. Raises `OptionError`, and what opening a checkpoint does."""
    check_out(options.out)
    harness.require_all_positive(options, "context", "clients", "prompt_tokens", "new_tokens")
    if len({*options.models}) < 2 or options.minutes <= 0:
        raise OptionError("--models are two or more different ones, and --minutes more than 0")
    if not all(0 <= share <= 1 for share in (options.changes, options.disconnects)):
        raise OptionError("--changes and --disconnects are shares from 0 to 1")
    found = {}
    for given in options.models:
        name, _, stored = given.partition("@")
        if name in SHAPES:
            device = resolve_device(options.device)
            found[given] = random_source(
                name, layers=options.layers, seed=options.seed, device=device, stored=stored or None,
                context_tokens=options.context,
            )  # fmt: skip
        else:
            found[Path(given).name] = open_checkpoint(given)
    return found


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Hold the turns and print; returns the exit code."""
    options = make_parser().parse_args(argv)
    report = measure(options, opened(options))
    return finish(report, checks(report), options.out)


if __name__ == "__main__":
    sys.exit(main())
