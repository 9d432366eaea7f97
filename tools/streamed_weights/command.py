"""The sweeps over streamed weights: their options, and weights that are read once for all rows."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
from harness import check_machine, read_text
from streamed_weights.kept import kept_weights
from streamed_weights.rows import RowMeasurement
from streamed_weights.sources import Models, open_models
from streamed_weights.speeds import Speeds
from streamed_weights.sweeps import SWEEPS, Point, resident_points, window_points
from streamed_weights.table import print_heading, print_row
from sweeping.family import Family, Work, refuse_idle
from sweeping.results import ResultFile

from offload_runtime.config import SamplingParams, SpeculationOptions, require_positive
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.memory import resolve_device
from offload_runtime.plan import resolve_dtype

_MAX_GAMMA = 63  # of `Runtime.load`
# Of the context, behind prompt and answer: a tree of the draft's may reach beyond the last token that is asked for.
_ROOM_TOKENS = 288
_ONLY_RESIDENT = ("source", "noise", "draft", "text", "tokens", "plain_tokens", "temperature")
_UNUSED = dict.fromkeys(_ONLY_RESIDENT, frozenset({"window"})) | {
    "passes": frozenset({"resident"}), "resident_layers": frozenset({"resident"}),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, the draft, placement, and how much is measured."""
    parser.add_argument("--target", type=Path, help="what to stream: a directory, a .gguf file, or org/name on the hub")
    parser.add_argument("--shape", help="instead: a model of this shape made in memory (llama2-7b; tiny to try it out)")
    parser.add_argument("--layers", type=int, help="of the shape, instead of all")
    parser.add_argument("--source", type=Path, help="small model: it drafts, and a shape made in memory speaks as it")
    parser.add_argument("--noise", type=float, default=0.05, help="on what the shape takes from the small model")
    parser.add_argument("--draft", choices=("model", "none"), help="the small model, where there is one, or nothing")
    parser.add_argument("--text", type=Path, help="what the prompt is the beginning of; else it is random")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="decoded with the draft")
    parser.add_argument("--plain-tokens", type=int, default=16, help="decoded without it")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--passes", type=int, default=8, help="timed passes of each window")
    parser.add_argument("--resident-layers", type=int, default=0, help="that stay on the device beside the windows")
    parser.add_argument("--vram")
    parser.add_argument("--emulate", help="a machine with a smaller card to play, by a profile's name or file")
    parser.add_argument("--dtype", default="bf16")


def settle(arguments: argparse.Namespace, given: frozenset[str]) -> None:
    """Refuse what makes no sense together; the small model drafts where there is one.

    Raises:
        OptionError: An option is missing, would be ignored, or makes no sense; ProfileError: there is no such machine.
    """
    if (arguments.target is None) == (arguments.shape is None):
        raise OptionError("name the model to stream: --target CHECKPOINT, or --shape NAME for one made in memory")
    if arguments.draft is None:
        arguments.draft = "none" if arguments.source is None else "model"
    idle = {}
    if arguments.target is not None:
        idle["layers"] = "with --target, which has its own layers: drop it"
        idle["noise"] = "with --target, which is taken as it is: drop it"
        if arguments.draft == "none":
            idle["source"] = "with --target and without a draft: drop it, or take --draft model"
    if arguments.source is None:
        idle["noise"] = "without --source, whose matrices it falls on: drop it"
        if arguments.shape is not None:
            idle["text"] = "without --source: the model has no language"
    if arguments.draft == "none":
        idle["tokens"] = "without a draft: drop it, or name a small model with --source"
    refuse_idle(idle, given)
    if arguments.draft == "model" and arguments.source is None:
        raise OptionError("--draft model needs the small model: name it with --source")
    if arguments.draft == "model" and arguments.text is None:
        raise OptionError("a draft needs a text to go on with: name one with --text, or take --draft none")
    for option in ("prompt_tokens", "tokens", "plain_tokens", "passes"):
        require_positive(option.replace("_", "-"), getattr(arguments, option))
    SamplingParams(temperature=arguments.temperature)
    check_machine(arguments.vram, arguments.emulate)


def sweep_points(sweep: str, arguments: argparse.Namespace) -> list[Point]:
    """The rows of a sweep; opens the model, and reads no weights of it.

    Raises:
        OptionError: A value makes no sense; CheckpointError: there is no such model.
    """
    num_layers = open_models(arguments).config.num_layers
    if sweep == "resident":
        return resident_points(arguments.values, num_layers=num_layers)
    return window_points(arguments.values, resident_layers=arguments.resident_layers, num_layers=num_layers)


def measure(arguments: argparse.Namespace, work: Sequence[Work]) -> None:
    """All missing rows, each written when it is there."""
    if not any(missing for _, missing in work):
        return
    models, device = open_models(arguments), resolve_device(arguments.device)
    prompt = prompt_of(arguments, models)  # refused before anything is made or loaded
    # Before a runtime holds the allocator to a limit.
    speeds = Speeds.measured(device, resolve_dtype(arguments.dtype, models.target, device))
    with kept_weights(models.target):
        for file, missing in work:
            print_heading(file.sweep)
            for _, group in groupby(missing, key=lambda point: point.resident_layers):
                measure_rows(arguments, models, speeds, file, list(group), prompt)


def measure_rows(
    arguments: argparse.Namespace, models: Models, speeds: Speeds, file: ResultFile, points: Sequence[Point],
    prompt: Sequence[int],
) -> None:  # fmt: skip
    """Rows of one sweep that keep the same layers on the device."""
    with loaded(arguments, models, points) as runtime:
        rows = RowMeasurement(runtime, speeds, resident_layers=points[0].resident_layers, prompt=prompt)
        for point in points:
            started_s = time.perf_counter()
            if point.window_tokens is not None:
                row = rows.window(point.window_tokens, arguments.passes)
            else:
                row = rows.resident(
                    temperature=arguments.temperature, plain_tokens=arguments.plain_tokens,
                    drafted_tokens=arguments.tokens if models.draft is not None else None,
                )  # fmt: skip
            row = {"value": point.label, **row, "measured_in_s": time.perf_counter() - started_s}
            row["loaded"] = runtime.placement
            file.add(row)
            print_row(file.sweep, row)


@contextmanager
def loaded(arguments: argparse.Namespace, models: Models, points: Sequence[Point]) -> Iterator[Runtime]:
    """A runtime with the points' layers on the device, and room for their windows.

    Raises:
        BudgetError: They do not fit.
    """
    resident_layers, drafts = points[0].resident_layers, models.draft is not None and points[0].window_tokens is None
    widest = max(point.window_tokens or 1 for point in points)
    behind = max(widest, arguments.plain_tokens)
    if drafts:
        behind = max(behind, arguments.tokens) + _ROOM_TOKENS
    started_s = time.perf_counter()
    try:
        runtime = Runtime.load(
            models.target, draft=models.draft if drafts else "none", device=arguments.device, dtype=arguments.dtype,
            vram=arguments.vram, resident_layers=resident_layers, context=arguments.prompt_tokens + behind + 1,
            kv="gpu", speculation=SpeculationOptions("chain" if drafts else "none"),
            max_gamma=max(_MAX_GAMMA, widest - 1), emulate=arguments.emulate,
        )  # fmt: skip
    except BudgetError as error:
        labels = ", ".join(point.label for point in points)
        what = f"{labels} with {resident_layers} resident layers"
        raise BudgetError(f"{what}: {error}; or name other --values") from error
    with runtime:
        print(f"loaded in {time.perf_counter() - started_s:.1f} s: {runtime.placement}", file=sys.stderr, flush=True)
        yield runtime


def prompt_of(arguments: argparse.Namespace, models: Models) -> list[int]:
    """The beginning of the text, or random token ids.

    Raises:
        OptionError: The text is too short.
    """
    count = arguments.prompt_tokens
    if arguments.text is None:
        generator = torch.Generator().manual_seed(0)
        random: list[int] = torch.randint(0, models.config.vocab_size, (count,), generator=generator).tolist()
        return random
    tokens: list[int] = models.target.tokenizer().encode(read_text(arguments.text, "--text"))
    if len(tokens) < count:
        raise OptionError(
            f"{arguments.text.name} has {len(tokens)} tokens and the prompt {count}: lower --prompt-tokens or take a "
            "longer text"
        )
    return tokens[:count]


STREAMED_WEIGHTS = Family("Over streamed weights", SWEEPS, add_options, _UNUSED, settle, sweep_points, measure)
