"""The sweeps over streamed weights: passes over wider windows, and decoding with a share of the layers on the device.

Every row stands beside the least that it could take: the longest of the bytes over the link, the weights over the
memory's bandwidth, and the operations over the speed of matrix products, as this machine reaches them by themselves.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from harness import check_machine, percentiles, read_tokens, require_all_positive
from long_context.internals import link_peak_gbps, runner_of
from long_context.session import Session
from sweeping.family import Family, ResultFile, Sweep, Work, print_cells, refuse_idle, tokens
from timing import measure_copy_gbps, measure_link_gbps, measure_matmul_flops
from widening.checkpoint import in_shape
from widening.made import repeated_llama
from widening.shapes import shape_named

from offload_runtime.config import GB, ModelConfig, SpeculationOptions
from offload_runtime.engine import GenerationResult, GenerationStats, Runtime
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.memory import resolve_device
from offload_runtime.params import SamplingParams
from offload_runtime.plan import resolve_dtype
from offload_runtime.speculation import Proposer
from offload_runtime.weights import CheckpointSource, layer_layout, open_checkpoint

SWEEPS = {
    "window": Sweep("tokens in the window of a pass", tuple(str(1 << power) for power in range(11))),
    "resident": Sweep(
        "share of the layers that stay on the GPU",
        ("0", "1/8", "1/4", "3/8", "1/2", "5/8", "3/4", "7/8", "1"),
    ),
}  # fmt: skip
_MAX_GAMMA = 63  # of `Runtime.load`
_SEED = 1
# Of the context, behind prompt and answer: a tree of the draft's may reach beyond the last token that is asked for.
_ROOM_TOKENS = 288
# Before anything of a draft is timed: kernels are compiled, graphs captured, and windows chosen by what was measured.
_WARM_UP_TOKENS = 40
# Of a model that is made without a language; nothing of the model depends on it.
_LONGEST_CONTEXT_TOKENS = 1 << 17
_ONLY_RESIDENT = ("source", "noise", "draft", "text", "tokens", "plain_tokens", "temperature")
_UNUSED = dict.fromkeys(_ONLY_RESIDENT, frozenset({"window"})) | {
    "passes": frozenset({"resident"}), "resident_layers": frozenset({"resident"}),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One row.

    Attributes:
        label: Its value as on the command line.
        window_tokens: Tokens in the window of a pass; None where windows are chosen.
        resident_layers: Layers that stay on the device.
    """

    label: str
    window_tokens: int | None
    resident_layers: int


@dataclass(frozen=True)
class Models:
    """Opened models; `draft` is None where there is none."""

    target: CheckpointSource
    draft: CheckpointSource | None

    @property
    def config(self) -> ModelConfig:
        """Of the target."""
        return self.target.config()


@dataclass(frozen=True)
class Speeds:
    """What the device does at best.

    Attributes:
        memory_gbps: A copy within its memory, read and write together.
        flops: Operations per second of a large product of matrices in the dtype of the weights.
        memcpy_gbps: A copy from page-locked memory; None without a link.
    """

    memory_gbps: float
    flops: float
    memcpy_gbps: float | None

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> Speeds:
        """Measure them; takes a second."""
        return cls(measure_copy_gbps(device), measure_matmul_flops(device, dtype), measure_link_gbps(device))


@dataclass(frozen=True)
class Bound:
    """The least that a pass takes, by the longest of its parts, `link`, `memory` or `compute`, which go on beside each
    other: a sum could be beaten."""

    seconds: float
    bound_by: str


def bound_of(
    config: ModelConfig, dtype: torch.dtype, speeds: Speeds, *, resident_layers: int, window_tokens: float,
    link_gbps: float | None,
) -> Bound:  # fmt: skip
    """What the machine's speeds allow. Attention and its keys are left out: behind a short prompt they are little.

    Args:
        config: Of the model.
        dtype: Of its weights, each read once, head included.
        speeds: Of the device.
        resident_layers: Layers that do not come over the link.
        window_tokens: For which every weight is multiplied.
        link_gbps: Peak of back-to-back copies; None where nothing is streamed.
    """
    layout, head = layer_layout(config, dtype), config.vocab_size * config.hidden_size
    matrices = sum(math.prod(spec.shape) for spec in layout.tensors if len(spec.shape) == 2)
    link_bytes = (config.num_layers - resident_layers) * layout.total_bytes
    memory_bytes = config.num_layers * layout.total_bytes + head * dtype.itemsize
    assert not link_bytes or link_gbps is not None
    parts_s = {
        "link": link_bytes / (link_gbps * GB) if link_gbps else 0.0,
        "memory": memory_bytes / (speeds.memory_gbps * GB),
        "compute": 2 * window_tokens * (config.num_layers * matrices + head) / speeds.flops,
    }
    bound_by = max(parts_s, key=lambda part: parts_s[part])
    return Bound(parts_s[bound_by], bound_by)


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
    require_all_positive(arguments, "prompt_tokens", "tokens", "plain_tokens", "passes")
    SamplingParams(temperature=arguments.temperature)
    check_machine(arguments.vram, arguments.emulate)


def open_models(arguments: argparse.Namespace) -> Models:
    """Target and draft as the options name them; reads no weights but of the small model's files.

    Raises:
        CheckpointError, OptionError: A model is not there, or the options do not go together.
    """
    small = None if arguments.source is None else open_checkpoint(arguments.source)
    draft = small if arguments.draft == "model" else None
    if arguments.target is not None:
        return Models(open_checkpoint(arguments.target), draft)
    if small is None:
        shape = shape_named(arguments.shape, arguments.layers)
        return Models(repeated_llama(shape, context_tokens=_LONGEST_CONTEXT_TOKENS), draft)
    device = resolve_device(arguments.device)
    try:
        target = in_shape(small, arguments.shape, arguments.noise, layers=arguments.layers, device=device)
    except OptionError as error:
        raise OptionError(f"--source cannot be widened to --shape {arguments.shape}: {error}") from error
    return Models(target, draft)


def sweep_points(sweep: str, arguments: argparse.Namespace) -> list[Point]:
    """The rows of a sweep; opens the model, and reads no weights of it.

    Raises:
        OptionError: A value makes no sense; CheckpointError: there is no such model.
    """
    return points_among(sweep, arguments, open_models(arguments).config.num_layers)


def points_among(sweep: str, arguments: argparse.Namespace, num_layers: int) -> list[Point]:
    """The same of a model of `num_layers`."""
    if sweep == "resident":
        return resident_points(arguments.values, num_layers=num_layers)
    return window_points(arguments.values, resident_layers=arguments.resident_layers, num_layers=num_layers)


def window_points(values: Sequence[str] | None, *, resident_layers: int, num_layers: int) -> list[Point]:
    """The rows of `window`.

    Raises:
        OptionError: A value is no number of tokens, or there are not that many layers.
    """
    if not 0 <= resident_layers <= num_layers:
        raise OptionError(f"--resident-layers is from 0 to the {num_layers} layers of the model, not {resident_layers}")
    points = [Point(text, tokens(text), resident_layers) for text in values or SWEEPS["window"].values]
    for point in points:
        if point.window_tokens is None or point.window_tokens < 1:
            raise OptionError(f"a window has at least the token that is known, not {point.label} tokens")
    return points


def resident_points(values: Sequence[str] | None, *, num_layers: int) -> list[Point]:
    """The rows of `resident`, the smallest share first: what does not fit the device any more comes last.

    Raises:
        OptionError: A value is no share, or two of them are the same number of layers.
    """
    points = sorted(
        (Point(text, None, round(share(text) * num_layers)) for text in values or SWEEPS["resident"].values),
        key=lambda point: point.resident_layers,
    )
    for point, following in pairwise(points):
        if point.resident_layers == following.resident_layers:
            raise OptionError(
                f"{point.label} and {following.label} of {num_layers} layers are both {point.resident_layers}: name "
                "other --values"
            )
    return points


def share(text: str) -> Fraction:
    """`3/8` or `0.375`.

    Raises:
        OptionError: It is no share from 0 to 1.
    """
    try:
        found = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise OptionError(f"{text!r} is no share of the layers: write it like 3/8 or 0.375") from None
    if not 0 <= found <= 1:
        raise OptionError(f"a share of the layers is from 0 to 1, not {text}")
    return found


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
    tokenizer = models.target.tokenizer()
    return read_tokens(arguments.text, "--text", tokenizer, count, lower="--prompt-tokens")[:count]


def measure(arguments: argparse.Namespace, work: Sequence[Work]) -> None:
    """All missing rows, each written when it is there."""
    if not any(missing for _, missing in work):
        return
    models, device = open_models(arguments), resolve_device(arguments.device)
    prompt = prompt_of(arguments, models)  # refused before anything is made or loaded
    # Before a runtime holds the allocator to a limit.
    speeds = Speeds.measured(device, resolve_dtype(arguments.dtype, models.target, device.type))
    for file, missing in work:
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
            print_row(file.sweep, row, heading=file.num_added == 1)


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
            models.target, draft=(models.draft if drafts else None) or "none", device=arguments.device,
            dtype=arguments.dtype, vram=arguments.vram, resident_layers=resident_layers,
            context=arguments.prompt_tokens + behind + 1, kv="gpu",
            speculation=SpeculationOptions("chain" if drafts else "none"), max_gamma=max(_MAX_GAMMA, widest - 1),
            emulate=arguments.emulate,
        )  # fmt: skip
    except BudgetError as error:
        labels = ", ".join(point.label for point in points)
        what = f"{labels} with {resident_layers} resident layers"
        raise BudgetError(f"{what}: {error}; or name other --values") from error
    with runtime:
        print(f"loaded in {time.perf_counter() - started_s:.1f} s: {runtime.placement}", file=sys.stderr, flush=True)
        yield runtime


class RowMeasurement:
    """Measures rows of one runtime.

    Args:
        runtime: To work with.
        speeds: Of the machine.
        resident_layers: Layers of the target that stay on the device.
        prompt: Token ids.
    """

    def __init__(self, runtime: Runtime, speeds: Speeds, *, resident_layers: int, prompt: Sequence[int]) -> None:
        self._runtime, self._speeds, self._resident_layers = runtime, speeds, resident_layers
        self._prompt = list(prompt)
        self._bytes_per_pass = runner_of(runtime).streamer.bytes_per_pass
        # Of back-to-back copies into the ring, or of a plain one if that is faster; of an emulated link the former.
        self._link_gbps = link_peak_gbps(runtime)
        if self._link_gbps is not None and runtime.emulated is None:
            self._link_gbps = max(self._link_gbps, speeds.memcpy_gbps or 0.0)

    def window(self, width: int, passes: int) -> dict[str, Any]:
        """Passes over windows of `width` tokens, each followed by reading their best tokens back."""
        times_s, _ = Session(self._runtime).pass_times_s([self._prompt], width, passes)
        seconds, bound = percentiles(times_s), self._bound(width)
        return {
            **self._about(), "window_tokens": width, "pass_s": seconds.as_dict(),
            # If the target agreed with everything that it is shown.
            "tok_per_s": width / seconds.median,
            "link_gbps": self._bytes_per_pass / seconds.median / GB,
            "bound_s": bound.seconds, "bound_by": bound.bound_by, "bound_tok_per_s": width / bound.seconds,
            "share_of_bound": bound.seconds / seconds.median,
        }  # fmt: skip

    def resident(self, *, temperature: float, plain_tokens: int, drafted_tokens: int | None) -> dict[str, Any]:
        """Plain decoding and, unless `drafted_tokens` is None, so many tokens with the draft and chosen windows."""
        params = SamplingParams(temperature, seed=_SEED)
        session = Session(self._runtime)
        plain = session.decode([self._prompt], Proposer(), params, gamma=0, count=plain_tokens)
        bound = self._bound(1)
        row: dict[str, Any] = {
            **self._about(), "plain_s_per_token": plain.s_per_token, "plain_tokens": plain.num_tokens,
            "bound_s": bound.seconds, "bound_by": bound.bound_by, "share_of_bound": bound.seconds / plain.s_per_token,
        }  # fmt: skip
        if drafted_tokens is None:
            return row
        self._answer(temperature, min(_WARM_UP_TOKENS, drafted_tokens))
        found = self._answer(temperature, drafted_tokens)
        # Not what was timed: a session decodes the prompt's last token in a window, an answer begins with what reading
        # the prompt gave, in taller matrix products whose last bits are others.
        same = self._answer(temperature, plain_tokens, speculate=False).tokens
        common = min(len(found.tokens), len(same))
        return {
            **row, "drafted": self._drafted(found.stats, plain.s_per_token), "compared_tokens": common,
            "identical_to_plain": found.tokens[:common] == same[:common],
        }  # fmt: skip

    def _answer(self, temperature: float, count: int, *, speculate: bool = True) -> GenerationResult:
        """So many tokens behind the prompt."""
        return self._runtime.generate(
            self._prompt, max_new_tokens=count, temperature=temperature, seed=_SEED, ignore_eos=True,
            speculate=speculate,
        )  # fmt: skip

    def _drafted(self, stats: GenerationStats, plain_s: float) -> dict[str, Any]:
        """With the draft: the bound takes as many tokens a pass as were accepted, and no time for drafting."""
        bound_tok_per_s = stats.tokens_per_pass / self._bound(stats.tokens_per_pass).seconds
        return {
            "tokens": stats.new_tokens, "passes": stats.passes, "tokens_per_pass": stats.tokens_per_pass,
            "tok_per_s": stats.tok_per_s, "times_plain": stats.tok_per_s * plain_s,
            "bound_tok_per_s": bound_tok_per_s, "share_of_bound": stats.tok_per_s / bound_tok_per_s,
            "windows": stats.windows, "accepted_by_source": stats.accepted_by_source,
            "link_idle_share": stats.link_idle_share,
        }  # fmt: skip

    def _about(self) -> dict[str, Any]:
        num_layers = self._runtime.config.num_layers
        return {
            "resident_layers": self._resident_layers, "num_layers": num_layers,
            "resident_share": self._resident_layers / num_layers, "bytes_per_pass": self._bytes_per_pass,
            "link_peak_gbps": self._link_gbps, "memory_gbps": self._speeds.memory_gbps,
            "tflops": self._speeds.flops / 1e12,
        }  # fmt: skip

    def _bound(self, window_tokens: float) -> Bound:
        return bound_of(
            self._runtime.config, self._runtime.dtype, self._speeds, resident_layers=self._resident_layers,
            window_tokens=window_tokens, link_gbps=self._link_gbps,
        )  # fmt: skip


def print_row(sweep: str, row: Mapping[str, Any], *, heading: bool) -> None:
    """Print a row at once, below the columns' names where asked."""
    bound = {"bound": f"{row['bound_s']:.4f}", "by": row["bound_by"], "share": f"{row['share_of_bound']:.1%}"}
    if sweep == "window":
        cells = {
            "s/pass": f"{row['pass_s']['median']:.4f}", **bound, "link GB/s": f"{row['link_gbps']:.1f}",
            "tok/s": f"{row['tok_per_s']:.1f}",
        }  # fmt: skip
    else:
        cells = {
            "layers": f"{row['resident_layers']}/{row['num_layers']}", "s/token": f"{row['plain_s_per_token']:.4f}",
            **bound,
        }  # fmt: skip
        if "drafted" in row:
            drafted = row["drafted"]
            cells |= {
                "tok/pass": f"{drafted['tokens_per_pass']:.1f}", "tok/s": f"{drafted['tok_per_s']:.1f}",
                "at most": f"{drafted['bound_tok_per_s']:.1f}", "identical": str(row["identical_to_plain"]),
            }  # fmt: skip
    print_cells(sweep, row["value"], cells, heading=heading)


STREAMED_WEIGHTS = Family("Over streamed weights", SWEEPS, add_options, _UNUSED, settle, sweep_points, measure)
