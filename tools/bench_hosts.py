"""Two machines that share a model, as two processes here with a card each, beside one card and beside what `plan` says.

    python tools/bench_hosts.py --shape llama3-70b --stored q4_k_m --emulate rtx4090 --out hosts-70b-q4-k-m.json
    python tools/bench_hosts.py --shape llama3-70b --layers 16 --stored bf16 --emulate rtx4090 --resident-layers 0 \\
        --requests 4 --new-tokens 13 --out hosts-70b-bf16.json

Starts two ranks by torchrun, which reach each other over `--interface`, and then one process by itself (`--parts`).
Each draws the same random weights. Measured are how long rows take there and back, on the host alone; plain answers;
those of a script that has `--accepted` tokens a pass right, which is what a draft of that acceptance is worth; and
`--requests` at once. Where both stream, layers are in as many strides as the first rank has chosen. Predicted is with
the figures of the cards that are here, and the link of the one that is emulated. Messages are as long as a 70B's:
16 KiB are a row of it.

What a part has measured is written to `--out` as it goes; a part that fails, or takes longer than `--timeout`, costs
the others nothing. Prints a table, each claim with its verdict, then one JSON line; exit code 1 when a claim is missed
or a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from common import SHAPES, random_source, resident_layers
from emulation import emulated
from harness import Check, check_out, finish, provenance, write_report, write_unfinished
from passes import scripted
from widening.stored import STORED

from offload_runtime.config import RuntimeConfig
from offload_runtime.engine import Runtime
from offload_runtime.engine.load import serve_own_layers
from offload_runtime.errors import OptionError
from offload_runtime.hardware import MachineProfile
from offload_runtime.hosts import started_as_one_of_several
from offload_runtime.hosts.group import HostGroup
from offload_runtime.hosts.measure import answer_round_trips, measure_round_trips
from offload_runtime.models.part import consecutive
from offload_runtime.options import require
from offload_runtime.params import SamplingParams
from offload_runtime.plan.hosts import SharedPlan, plan_shared, shared_request
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource

PARTS = ("hosts", "one")
_RANKS = 2
_WARM_UP_TOKENS = 4
_REPEATS = 3  # of a script: its first run captures graphs
_STDERR = 2  # which is not for figures
_END_S = 45.0  # in which torchrun ends its ranks
# Of what is planned, and of one machine.
_LEAST_SHARE, _MOST_PASSES, _LEAST_TIMES = 0.9, 1.1, 1.8


def device_of(options: argparse.Namespace) -> str:
    """The card of this process."""
    return "cpu" if options.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def config_of(options: argparse.Namespace) -> RuntimeConfig:
    """What each rank loads, and one card by itself. Errors as of `emulated` and `random_source`."""
    device, context = device_of(options), options.prompt_tokens + options.new_tokens + options.window
    source = random_source(
        options.shape, layers=options.layers, seed=options.seed, device=resolve_device(device), context_tokens=context,
        stored=options.stored,
    )  # fmt: skip
    several = {"interface": options.interface, "host_timeout_s": options.host_timeout}
    return RuntimeConfig(
        source, draft="none", dtype=options.dtype, context=context, max_batch=options.requests, weights="stored",
        max_gamma=options.window - 1, resident_layers=resident_layers(options.resident_layers, source),
        **(several if started_as_one_of_several() else {}),
        **emulated(options.emulate, device=device, vram=options.vram, dtype=options.dtype),
    )  # fmt: skip


def prompts_of(options: argparse.Namespace, source: CheckpointSource) -> list[list[int]]:
    """As many as are answered at once, of random tokens."""
    vocab_size, draw = source.config().vocab_size, random.Random(options.seed)
    return [[draw.randrange(vocab_size) for _ in range(options.prompt_tokens)] for _ in range(options.requests)]


def meet(options: argparse.Namespace) -> dict[int, float] | None:
    """Return how many seconds so many bytes take from the first rank to the other and back; None on the other. Raises
    `HostError`."""
    group = HostGroup(options.interface, options.host_timeout)
    try:
        group.exchange({})
        if group.rank:
            answer_round_trips(group)
            return None
        return measure_round_trips(group)[1]
    finally:
        group.close()


class Part:
    """What is measured of two ranks by the first of them, or of one card, written to a file as it goes.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._out, self.found = options, options.part, dict[str, Any]()

    def note(self, **found: Any) -> None:
        """Keep what was measured."""
        self.found |= found
        write_unfinished(self.found, self._out)

    def measure(self) -> None:
        """Do it all. Errors as of `Runtime.load`."""
        options, network = self._options, float("inf")
        if started_as_one_of_several():
            round_trip_s = meet(options)
            assert round_trip_s is not None, "the first rank measures"
            network = max(2 * nbytes / seconds for nbytes, seconds in round_trip_s.items())
            self.note(round_trip_s=round_trip_s, network_bytes_per_s=network)
        config, begun_s = config_of(options), time.perf_counter()
        assert isinstance(config.target, CheckpointSource)
        with Runtime.from_config(config) as runtime:
            shares = runtime.engine.shares
            layers = None if shares is None else [consecutive(own) for own in shares.layers]
            self.note(
                placement=runtime.placement, load_report=runtime.load_report, loaded_s=time.perf_counter() - begun_s,
                layers=None if layers is None else as_pairs(layers),
                **provenance(*runtime.devices, commit=options.commit),
            )  # fmt: skip
            self._answer(runtime, prompts_of(options, config.target))
            shared, captured = planned(config, runtime, network), runtime.engine.target.runner.captured
            self.note(captured_passes=0 if captured is None else captured.graphs.num_graphs)
        if shared is not None:
            self.note(predicted_tok_per_s=predicted(shared, options), planned_layers=as_pairs(shared.layer_ranges))
            self.note(predicted_pass_s=shared.pass_s(), predicted_pass_in_one_stride_s=shared.pass_s(strides=1))
        write_report(self.found, self._out)

    def _answer(self, runtime: Runtime, prompts: Sequence[list[int]]) -> None:
        options = self._options
        sampling = SamplingParams(options.temperature, seed=options.seed)

        def answered(asked: Sequence[list[int]], count: int) -> list[Any]:
            return runtime.generate_batch(
                asked, max_new_tokens=count, ignore_eos=True, temperature=options.temperature, seed=options.seed
            )

        for asked in (prompts[:1], prompts) if options.requests > 1 else (prompts,):
            answered(asked, _WARM_UP_TOKENS)  # compiles, and captures
            results = answered(asked, options.new_tokens)
            stats = [one.stats for one in results]
            found = {
                "tok_per_s": sum(one.tok_per_s for one in stats), "pass_s": stats[0].measured_s_per_pass,
                "first_token_s": max(one.time_to_first_token_s for one in stats),
                "bytes_per_pass": stats[0].bytes_per_pass, "link_idle_share": stats[0].link_idle_share,
                "tokens": [one.tokens for one in results],
            }  # fmt: skip
            self.note(**{"plain" if asked is not prompts or options.requests == 1 else "at once": found})
        answer = self.found["plain"]["tokens"][0]
        how = {"repeats": _REPEATS, "accepted": options.accepted, "window": options.window}
        self.note(script=scripted(runtime, prompts[0], answer, sampling, **how))


def as_pairs(layers: Sequence[Sequence[range]]) -> list[list[list[int]]]:
    """Of each rank where layers that follow one another begin and end."""
    return [[[one.start, one.stop] for one in own] for own in layers]


def planned(config: RuntimeConfig, runtime: Runtime, network_bytes_per_s: float) -> SharedPlan | None:
    """The plan of the machines that the runtime is on; None where nothing predicts how fast they are."""
    if not isinstance(config.profile, MachineProfile):
        return None
    if not started_as_one_of_several():
        everything = range(runtime.config.num_layers)
        return SharedPlan([config.profile], [runtime.plan], [everything], network_bytes_per_s)
    return plan_shared(shared_request(config), [config.profile] * _RANKS, network_bytes_per_s)


def predicted(shared: SharedPlan | None, options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of what is measured; nothing where there is no plan."""
    if shared is None:
        return {}

    def pass_s(batch: int, rows: int) -> float:
        plans = [replace(plan, target=replace(plan.target, batch=batch)) for plan in shared.plans]
        return replace(shared, plans=plans).pass_s(rows)

    every = {"plain": (1, 1), "at once": (options.requests, 1)} if options.requests > 1 else {"plain": (1, 1)}
    found = {name: batch / pass_s(batch, rows) for name, (batch, rows) in every.items()}
    return {**found, "script": options.accepted / pass_s(1, options.window)}


def run_part(options: argparse.Namespace, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Measure a part in processes of its own, whose errors are on standard error; return what there is of it, and its
    `error` where it is not whole."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        out, port = Path(folder) / "part.json", free.getsockname()[1]
        free.close()
        several = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", f"{_RANKS}", "--master-addr",
                   "127.0.0.1", "--master-port", f"{port}") if name == "hosts" else ()  # fmt: skip
        command = [sys.executable, *several, __file__, *words, "--part", str(out)]
        # torchrun gives each rank one thread of the CPU, and whoever loads wants more.
        threads = str(max(1, (os.cpu_count() or 1) // _RANKS))
        process = subprocess.Popen(command, env={"OMP_NUM_THREADS": threads, **os.environ}, stdout=_STDERR)
        try:
            code = process.wait(options.timeout)
            error = None if code == 0 else f"exit code {code}, and why is above"
        except subprocess.TimeoutExpired:
            error = f"no end within {options.timeout:g} s"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found if error is None else {**found, "error": error}


def lines(parts: dict[str, dict[str, Any]]) -> list[str]:
    """The figures for people."""
    found = list[str]()
    for nbytes, seconds in parts.get("hosts", {}).get("round_trip_s", {}).items():
        rows = int(nbytes) >> 14
        found.append(f"{rows:5} rows of a 70B there and back: {1e3 * seconds:8.3f} ms, so {500 * seconds:.3f} a hop")
    found.append(
        f"{'part':6} {'what':8} {'tokens/s':>10} {'predicted':>10} {'share':>7} {'pass, ms':>9} {'first, s':>9}"
    )
    for name, part in parts.items():
        for what in ("plain", "script", "at once"):
            if (row := part.get(what)) is None:
                continue
            planned_tok_per_s = part.get("predicted_tok_per_s", {}).get(what)
            cells = [
                (row["tok_per_s"], "10.2f"), (planned_tok_per_s, "10.2f"),
                (planned_tok_per_s and row["tok_per_s"] / planned_tok_per_s, "7.3f"),
                (1e3 * row["pass_s"], "9.2f"), (row.get("first_token_s"), "8.2f"),
            ]  # fmt: skip
            shown = (f"{'-':>{form.split('.')[0]}}" if number is None else f"{number:{form}}" for number, form in cells)
            found.append(f"{name:6} {what:8} {' '.join(shown)}")
        graphs = f"; {part['captured_passes']} passes are CUDA graphs" if "captured_passes" in part else ""
        found.append(f"{name:6} {part.get('error') or part['placement'] + graphs}")
    return found


def checks(parts: dict[str, dict[str, Any]]) -> list[Check]:
    """What is promised of two machines, as far as this run can judge it."""
    found, hosts, one = list[Check](), parts.get("hosts", {}), parts.get("one", {})
    for what, tok_per_s in hosts.get("predicted_tok_per_s", {}).items():
        if what in hosts:
            share = hosts[what]["tok_per_s"] / tok_per_s
            if hosts["plain"]["bytes_per_pass"] and what == "plain":
                found.append(Check("a streamed pass, times what is planned", 1 / share, _MOST_PASSES, at_least=False))
            else:
                found.append(Check(f"share of the planned tokens/s, {what}", share, _LEAST_SHARE, at_least=True))
    for part in (hosts, one):
        if "script" in part:
            differs = 0 if part["script"]["identical_to_plain"] else 1
            found.append(Check("answers by a script unlike the plain one", differs, 0, at_least=False))
        if "at once" in part:
            differs = 0 if part["at once"]["tokens"][0] == part["plain"]["tokens"][0] else 1
            found.append(Check("answers at once unlike the one alone", differs, 0, at_least=False))
    for what in ("plain", "at once"):
        if what in hosts and what in one:
            pairs = zip(hosts[what]["tokens"], one[what]["tokens"], strict=True)
            differing = sum(ours != theirs for ours, theirs in pairs)
            found.append(Check(f"answers unlike those of one card, {what}", differing, 0, at_least=False))
    if "at once" in hosts and "at once" in one:
        times = hosts["at once"]["tok_per_s"] / one["at once"]["tok_per_s"]
        found.append(Check("times the tokens/s of one card, at once", times, _LEAST_TIMES, at_least=True))
    return found


def make_parser() -> harness.Parser:
    """The options."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-70b", help="of random weights")
    parser.add_argument("--layers", type=int, help="cut the shape to so many (default: all)")
    parser.add_argument("--stored", choices=STORED, default="q4_k_m", help="how a file would have the weights")
    parser.add_argument("--dtype", choices=sorted(harness.DTYPES), default="bf16")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and answers")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--emulate", help="a machine with a smaller card for each process to play, by name or file")
    parser.add_argument("--vram", help="of each card (default: all that is free, or the emulated card's)")
    parser.add_argument("--resident-layers", default="auto", help="of each process: a number, or auto")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=25, help="of every answer")
    parser.add_argument("--requests", type=int, default=8, help="at once")
    parser.add_argument("--accepted", type=int, default=4, help="tokens a pass that a script has right")
    parser.add_argument("--window", type=int, default=8, help="tokens of the script's windows")
    parser.add_argument("--interface", default="lo", help="that the ranks reach each other over")
    parser.add_argument("--host-timeout", type=float, default=60.0, help="seconds that a rank may not be heard from")
    parser.add_argument("--parts", default=",".join(PARTS), help="what is measured, of: " + ", ".join(PARTS))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each part")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)  # of what is started: where its figures go
    return parser


def check(options: argparse.Namespace) -> list[str]:
    """Refuse what would fail only after minutes; return the parts. Raises `OptionError`, `StorageError`."""
    check_out(options.out)
    parts = [name for name in options.parts.split(",") if name]
    require(bool(parts), f"--parts names none: choose of {', '.join(PARTS)}")
    for name in parts:
        require(name in PARTS, f"--parts {name!r} is not known: choose of {', '.join(PARTS)}")
    harness.require_all_positive(options, "prompt_tokens", "requests", "accepted", "window", "timeout", "host_timeout")
    if options.new_tokens <= options.accepted or options.accepted >= options.window:
        short = f"--accepted is less than --new-tokens {options.new_tokens} and --window {options.window}"
        raise OptionError(f"{short}, not {options.accepted}")
    harness.check_machine(options.vram, options.emulate)
    if options.device != "cpu":
        resolve_device(f"cuda:{_RANKS - 1 if 'hosts' in parts else 0}")
    return parts


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = make_parser().parse_args(words)
    if options.part is not None:
        if started_as_one_of_several() and os.environ["RANK"] != "0":
            meet(options)
            serve_own_layers(config_of(options), say=harness.say)
        else:
            Part(options).measure()
        return 0
    names, parts = check(options), dict[str, dict[str, Any]]()
    report = {"benchmark": "hosts", "settings": harness.settings_of(options, without=("out", "commit", "part"))}
    for name in names:
        parts[name] = run_part(options, name, words)
        write_unfinished({**report, "parts": parts}, options.out)
    print(*lines(parts), sep="\n")
    code = finish({**report, "parts": parts}, checks(parts), options.out)
    return 1 if any("error" in part for part in parts.values()) else code


if __name__ == "__main__":
    sys.exit(main())
