"""The sweeps over a long context: their models and options, and one runtime for all rows that can share it."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from long_context.internals import Rig
from long_context.needle import NeedleTest
from long_context.rows import SWEEPS, Lengths, Point, RowMeasurement, Setting, points_of
from long_context.session import Session
from sweeping.family import Family, Work, print_cells, refuse_idle
from widening.checkpoint import in_shape
from widening.stretched import StretchedCheckpoint

from offload_runtime.config import ModelConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.kv.retrieval import retrieved_bytes, summaries_bytes
from offload_runtime.memory import resolve_device
from offload_runtime.runners import MOST_LEVELS, most_guess_rows
from offload_runtime.runners.retrieval_verifier import verifier_step_bytes
from offload_runtime.weights import CheckpointSource, open_checkpoint

STRETCH = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 16.0, "original_max_position_embeddings": 8192}
STRETCHED_TOKENS = 131072
# Of a needle's answer, its window of the target at least.
_LEAST_MAX_GAMMA = 63
_UNUSED = {
    "temperature": frozenset({"temperature"}),
    "budget": frozenset({"budget"}),
    "chunk_size": frozenset({"chunk"}),
    "policy": frozenset({"policy", "needle"}),
    "context": frozenset({"batch"}),
    "tokens": frozenset({"needle"}),
    "plain_tokens": frozenset({"needle"}),
    "starts": frozenset({"needle"}),
    "other_text": frozenset({"needle"}),
    "draw": frozenset({"needle"}),
    "chain_gamma": frozenset(SWEEPS) - {"policy"},
}


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Models, text, placement and the hierarchy's options."""
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--delta", type=Path, nargs="*", default=[])
    parser.add_argument("--shape", default="llama2-7b", help="or none: the stretched source itself")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=122880)
    parser.add_argument("--kv", default="host")
    parser.add_argument("--vram")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--draft", default="model", choices=("model", "none"))
    parser.add_argument("--draft-cache", default="streaming")
    parser.add_argument("--recent", type=int, default=512)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--chunk-size", type=int, default=SpeculationOptions.chunk_size)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--plain-tokens", type=int, default=8)


def sources(arguments: argparse.Namespace) -> tuple[CheckpointSource, CheckpointSource]:
    """Target and draft: the stretched source widened in memory, and the stretched source itself.

    Raises:
        CheckpointError, OptionError: The files do not go together, or there is no such shape.
    """
    small = StretchedCheckpoint(
        open_checkpoint(arguments.source), arguments.delta, rope=STRETCH, max_position_embeddings=STRETCHED_TOKENS
    )
    return in_shape(small, arguments.shape, arguments.noise, device=resolve_device(arguments.device)), small


def add_options(parser: argparse.ArgumentParser) -> None:
    """Models, text, placement, and the hierarchy that is varied."""
    add_common_options(parser)
    parser.set_defaults(kv="gpu", tokens=64, plain_tokens=None, chunk_size=SpeculationOptions().chunk_size)
    parser.add_argument("--policy", default="retrieval")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--gamma", type=int, default=24, help="tokens proposed to a pass of the target")
    parser.add_argument(
        "--gamma-draft",
        type=int,
        default=SpeculationOptions.gamma_draft,
        help="tokens proposed to a step of the retrieval verifier",
    )
    parser.add_argument("--refresh-steps", type=int, help="by itself as of the runtime")
    parser.add_argument("--chain-gamma", type=int, default=8, help="tokens that the draft alone proposes to a pass")
    parser.add_argument("--starts", type=int, default=4, help="places in the texts that a row is measured from")
    parser.add_argument("--other-text", type=Path, nargs="+", default=[], help="which have their share of them")
    parser.add_argument("--draw", type=int, metavar="SEED", help="draw them, and where a text begins, by this seed")


def settle(arguments: argparse.Namespace, given: frozenset[str]) -> None:
    """Refuse what other options leave without effect; plain decoding is short where a token of it takes a second.

    Raises:
        OptionError: An option would be ignored.
    """
    idle = {}
    if arguments.shape == "none":
        idle["noise"] = "with --shape none, where the source itself is the target: drop it"
    if arguments.draft_cache not in ("auto", "streaming"):
        idle["recent"] = f"with --draft-cache {arguments.draft_cache}: drop it, or take --draft-cache streaming"
    if arguments.draft == "none":
        why = "with --draft none: drop it, or take --draft model"
        idle |= dict.fromkeys(("gamma_draft", "draft_cache", "recent", "chain_gamma"), why)
    refuse_idle(idle, given)
    harness.check_machine(arguments.vram, emulate=None)
    if arguments.refresh_steps is None:
        on_host = arguments.kv == "host"
        arguments.refresh_steps = SpeculationOptions().steps_between_choices(on_host=on_host)
    if arguments.plain_tokens is None:
        arguments.plain_tokens = 8 if arguments.kv == "host" and arguments.device != "cpu" else arguments.tokens


def base_setting(arguments: argparse.Namespace) -> Setting:
    """What the options say of everything that a sweep may vary."""
    options = SpeculationOptions(
        "triforce", arguments.draft_cache, recent_tokens=arguments.recent, chunk_size=arguments.chunk_size,
        budget_tokens=arguments.budget, gamma_draft=arguments.gamma_draft, refresh_steps=arguments.refresh_steps,
    )  # fmt: skip
    return Setting(
        options, arguments.temperature, arguments.context, arguments.gamma, arguments.chain_gamma,
        policy=arguments.policy,
    )  # fmt: skip


def sweep_points(sweep: str, arguments: argparse.Namespace) -> list[Point]:
    """The rows of a sweep.

    Raises:
        OptionError: A value makes no sense, or does not go with the other options.
    """
    found = points_of(sweep, base_setting(arguments), arguments.values)
    for point in found:
        check_point(sweep, point, arguments)
    return found


def check_point(sweep: str, point: Point, arguments: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes.

    Raises:
        OptionError: It does not go with the other options.
    """
    setting = point.setting
    if sweep != "batch" and setting.context_tokens > arguments.context:
        raise OptionError(f"{sweep} {point.label} is more than --context {arguments.context}: raise it")
    if sweep != "needle" and arguments.starts >= setting.context_tokens:
        raise OptionError(
            f"{arguments.starts} --starts are more places than there are in {setting.context_tokens} tokens: lower it, "
            "or raise --context"
        )
    if arguments.draft == "none" and (setting.options.mode == "chain" or point.label.startswith("d")):
        raise OptionError(f"{sweep} {point.label} varies the draft, and there is none: take --draft model")


def load(arguments: argparse.Namespace, points: Sequence[Point], *, reserve_tokens: int) -> Runtime:
    """A runtime that has room for every point, one after the other."""
    target, draft = sources(arguments)
    batch = points[0].setting.batch
    context = max(point.setting.context_tokens for point in points) + reserve_tokens
    hierarchies = [point.setting.options for point in points if point.setting.options.mode == "triforce"]
    # A chain alone still needs options that a runtime can be loaded with.
    largest = max(
        hierarchies or [base_setting(arguments).options],
        key=lambda options: _verifier_bytes(target.config(), options, context, batch),
    )
    gamma_draft = max(point.setting.options.gamma_draft for point in points)
    options = replace(largest, gamma_draft=gamma_draft)
    started_s = time.perf_counter()
    runtime = Runtime.load(
        target, draft=draft if arguments.draft == "model" else "none", device=arguments.device, vram=arguments.vram,
        dtype=arguments.dtype, context=context, kv=arguments.kv, speculation=options, max_batch=batch,
        max_gamma=max(_LEAST_MAX_GAMMA if batch == 1 else 1, *(point.setting.window for point in points)),
    )  # fmt: skip
    print(f"loaded in {time.perf_counter() - started_s:.1f} s: {runtime.placement}", flush=True)
    return runtime


def _verifier_bytes(config: ModelConfig, options: SpeculationOptions, context: int, batch: int) -> int:
    """What the hierarchy of some options takes of the device, in bf16."""
    chunk_size, dtype = options.chunk_size, torch.bfloat16
    retrieved = retrieved_bytes(
        config, dtype, budget_tokens=options.budget_tokens, chunk_size=chunk_size, batch=batch
    )  # fmt: skip
    summaries = summaries_bytes(config, chunk_size=chunk_size, capacity_tokens=context, batch=batch)
    rows, far_chunks = most_guess_rows(options.gamma_draft, batch, others=1 + MOST_LEVELS), context // chunk_size
    return retrieved + summaries + verifier_step_bytes(
        config, dtype.itemsize, batch=batch, rows=rows, far_chunks=far_chunks
    )  # fmt: skip


def read_text(arguments: argparse.Namespace, small: CheckpointSource, needed_tokens: int) -> list[int]:
    """Token ids of the text, by the small model's tokenizer; loads no weights. Raises as `harness.read_tokens`."""
    return harness.read_tokens(arguments.text, "--text", small.tokenizer(), needed_tokens, lower="--context")


def stretches(tokens: Sequence[int], length: int, count: int) -> list[list[int]]:
    """`count` different stretches of the text; they overlap where it is too short for others."""
    step = min(length, (len(tokens) - length) // (count - 1)) if count > 1 else 0
    if count > 1 and step < 1:
        raise OptionError(f"{count} different stretches of {length} tokens need more text than {len(tokens)} tokens")
    return [list(tokens[number * step : number * step + length]) for number in range(count)]


def read_texts(
    arguments: argparse.Namespace, small: CheckpointSource, settings: Sequence[Setting]
) -> dict[str, list[int]]:
    """Token ids of all texts by the names of their files, each from a drawn place on where places are drawn. Raises as
    `harness.read_tokens`."""
    tokenizer, found = small.tokenizer(), dict[str, list[int]]()
    needed_tokens = max(setting.context_tokens for setting in settings)
    whole_tokens = max(setting.context_tokens * setting.batch for setting in settings)  # where nothing overlaps
    for option, paths in (("--text", [arguments.text]), ("--other-text", arguments.other_text)):
        for path in paths:
            found[path.name] = harness.read_tokens(path, option, tokenizer, needed_tokens, lower="--context")
    if arguments.draw is not None:
        drawn = random.Random(arguments.draw)
        found = {name: text[drawn.randrange(max(1, len(text) - whole_tokens)) :] for name, text in found.items()}
    return found


def run_points(arguments: argparse.Namespace, work: Sequence[Work], texts: Mapping[str, Sequence[int]]) -> None:
    """Load one runtime and measure all missing rows of some sweeps with it."""
    points = [point for _, missing in work for point in missing]
    if not points:
        return
    lengths = Lengths(arguments.tokens, arguments.plain_tokens, arguments.starts, arguments.draw)
    # All new tokens may be one sequence's.
    reserve = points[0].setting.batch * max(lengths.tokens, lengths.plain_tokens) + 512
    with load(arguments, points, reserve_tokens=reserve) as runtime:
        measure_rows(arguments, runtime, work, lengths, texts)  # on its return nothing holds on to the runtime's memory


def measure_rows(
    arguments: argparse.Namespace, runtime: Runtime, work: Sequence[Work], lengths: Lengths,
    texts: Mapping[str, Sequence[int]],
) -> None:  # fmt: skip
    """Measure all missing rows of some sweeps, each written when it is there."""
    settings = [point.setting for _, missing in work for point in missing]
    batch, context = settings[0].batch, max(setting.context_tokens for setting in settings)
    session, rig = Session(runtime, batch=batch), Rig(runtime)
    read = {name: stretches(text, context, batch) for name, text in texts.items()}
    rows, needle = RowMeasurement(session, rig, read, lengths), NeedleTest(session, rig, next(iter(texts.values())))
    for file, missing in work:
        for number, point in enumerate(missing):
            started_s = time.perf_counter()
            row = (needle if file.sweep == "needle" else rows).measure(point.setting)
            row = {"value": point.label, **row, "measured_in_s": time.perf_counter() - started_s}
            row["loaded"] = runtime.placement  # with the most that any row of the command takes
            file.add(row)
            print_row(file.sweep, row, heading=number == 0)


def measure(arguments: argparse.Namespace, work: Sequence[Work]) -> None:
    """All missing rows: with one runtime, but each of `batch` with its own."""
    settings = [point.setting for _, missing in work for point in missing]
    if not settings:
        return
    # Refused before anything is loaded.
    _, small = sources(arguments)
    texts = read_texts(arguments, small, settings)
    for setting, text in product(settings, texts.values()):
        stretches(text, setting.context_tokens, setting.batch)
    run_points(arguments, [part for part in work if part[0].sweep != "batch"], texts)
    for file, missing in work:
        for point in missing if file.sweep == "batch" else ():
            run_points(arguments, [(file, [point])], texts)


def print_row(sweep: str, row: Mapping[str, Any], *, heading: bool) -> None:
    """Print a row at once, below the columns' names where asked.

    Times are of plain decoding and of a token; `accepted` is the share of what the target was proposed; of a needle
    the log-probability of its number and each policy's agreement with the full cache.
    """
    if sweep == "needle":
        agreed = {name: _share(found["agreement"]) for name, found in row["policies"].items()}
        cells = {"found": str(row["found"]), "log p": f"{row['number_log_probability']:.2f}", **agreed}
    else:
        times = [place["times_plain"] for place in row["places"]]
        cells = {
            "plain ms": f"{1e3 * row['plain_s_per_token']:.2f}", "ms/token": f"{1e3 * row['s_per_token']:.2f}",
            "times": f"{row['times_plain']:.2f}", "worst": f"{min(times):.2f}", "best": f"{max(times):.2f}",
            "bound": f"{row['bound_times_plain']:.2f}",
            "tok/pass": f"{row['tokens_per_pass']:.2f}", "accepted": _share(row["acceptance"]),
            "draft's/step": _share(row["draft_accepted_per_step"]),
        }  # fmt: skip
    print_cells(sweep, row["value"], {**cells, "identical": str(row["identical_to_plain"])}, heading=heading)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


LONG_CONTEXT = Family("Over a long context", SWEEPS, add_options, _UNUSED, settle, sweep_points, measure)
