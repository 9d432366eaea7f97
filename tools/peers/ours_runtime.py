"""Measure this runtime as a user loads it, with a draft or without one, on the model and the prompts of the peers.

    python tools/peers/ours_runtime.py --target wide-13b --draft SmolLM2.gguf --gamma 12 --out ours.json

`--windows` also times single passes over wider windows, and how long the host needs to launch them, beside what the
machine's profile predicts. `--scripted 10,15` decodes once more with proposals of which so many a pass are right, as
the plain answer before says: what a draft of that acceptance is worth if drafting costs nothing. `start` says when the
weights were in place and how much memory the host needed, with `--cold` of files that are in no page cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch
from common import PeerOptions, check_context, model_name, options_from, peer_parser, refused
from passes import predicted_pass, scripted, time_window, weight_bytes_of
from runs import Asked, Run, answers, asked_generations, figures, num_differing_of

from emulation import emulated  # isort: skip
from harness import check_machine, emit, integers, provenance  # isort: skip (`common` sets the path)
from timing import Answer, measure_copy_gbps, measure_link_gbps, timed_answer  # isort: skip

from offload_runtime.config import (
    DraftCache,
    Encode,
    KVPlace,
    RuntimeConfig,
    SpeculationMode,
    SpeculationOptions,
    WeightStorage,
    idle_options,
)
from offload_runtime.engine import Runtime, Scheduler
from offload_runtime.engine.load_model import LoadProgress
from offload_runtime.errors import OffloadError, OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.plan.sizes import longest_context
from offload_runtime.weights.sources import open_checkpoint

# Behind the longest answer: windows are cut where the context ends.
_ROOM_TOKENS = 256
_GATHERS = "GB/s and bound: without the chunks that the retrieval verifier gathers straight from host memory"
# What `--draft` may say instead of a model.
NO_MODEL = (None, "self", "ngram", "none")


@dataclass(frozen=True)
class OurOptions:
    """See `Runtime.load` and its `generate`; None leaves it to the runtime."""

    draft: str = "ngram"
    speculation: SpeculationMode = "auto"
    gamma: int | None = None
    tree_nodes: int | None = None
    kv: KVPlace = "auto"
    budget_tokens: int | None = None
    draft_cache: str | None = None
    context: int | None = None
    weights: WeightStorage = "auto"
    encode: Encode = "none"
    emulate: str | None = None
    devices: str | None = None

    def __post_init__(self) -> None:
        idle = idle_options(self.has_model, self.speculation, self.draft_cache or "auto")
        for name in ("budget_tokens", "draft_cache"):
            if getattr(self, name) is not None and name in idle:
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name)} does nothing {idle[name]}")
        RuntimeConfig(
            "the target", self.draft, device=self.devices or "auto", speculation=self.as_speculation(),
            tree_nodes=self.tree_nodes, weights=self.weights, encode=self.encode,
        )  # fmt: skip
        check_machine(None, self.emulate)
        GenerationParams(gamma=self.gamma, tree_nodes=self.tree_nodes)

    @property
    def has_model(self) -> bool:
        """Whether the draft is a model."""
        return self.draft not in NO_MODEL

    def as_speculation(self) -> SpeculationOptions:
        """How tokens are proposed. Raises `OptionError` for values that cannot be."""
        given: dict[str, Any] = {"draft_cache": self.draft_cache, "budget_tokens": self.budget_tokens}
        return SpeculationOptions(self.speculation, **{name: one for name, one in given.items() if one is not None})


def add_plain_options(parser: argparse.ArgumentParser) -> None:
    """What this runtime takes whatever drafts."""
    parser.add_argument(
        "--context", type=int,
        help="of `ours`: tokens that its KV cache reserves, for prompt, answer and proposals behind it; those of the "
        "peers grow (default: what the longest takes, and 256 more)",
    )  # fmt: skip
    parser.add_argument(
        "--weights", choices=get_args(WeightStorage), help="of `ours`: how a quantised file's are kept (auto)"
    )
    parser.add_argument("--encode", choices=get_args(Encode), help="of `ours`: whether bf16 is kept in 12 bits (none)")
    parser.add_argument("--emulate", help="of `ours`: a machine with a smaller card to play, by name or file")
    parser.add_argument("--devices", help="of `ours`, instead of --device: several cards, like cuda:0,cuda:1")
    parser.add_argument(
        "--kv", choices=("auto", "gpu", "host"), default="auto",
        help="where the KV cache of `ours` lives; compare.py with host: those of the peers, too",
    )  # fmt: skip


def add_our_options(parser: argparse.ArgumentParser) -> None:
    """What this runtime takes, and transformers does not."""
    add_plain_options(parser)
    parser.add_argument("--speculation", choices=get_args(SpeculationMode), help="of `ours` (auto)")
    parser.add_argument("--gamma", type=int, help="of `ours`: most tokens proposed in a row")
    parser.add_argument("--tree-nodes", type=int, help="of `ours`: most tokens proposed in all, as a tree")
    parser.add_argument("--budget-tokens", type=int, help="of `ours`: tokens of a retrieval cache, of each layer")
    parser.add_argument("--draft-cache", choices=get_args(DraftCache), help="of `ours`: the draft's own KV cache")


def add_single_options(parser: argparse.ArgumentParser) -> None:
    """Those that `bench_streaming.py` and `ours_runtime.py` have in common."""
    parser.add_argument("--windows", type=integers, default=(), help="of ours: widths of single passes, like 1,17")
    parser.add_argument("--passes", type=int, default=8, help="of ours: timed passes of each")
    parser.add_argument(
        "--scripted", type=integers, default=(), help="of ours: tokens a pass that a script has right, like 10,15"
    )
    parser.add_argument("--scripted-window", type=int, default=64, help="of ours: tokens of the script's windows")
    parser.add_argument("--cold", action="store_true", help="of ours: drop the files of --target from the page cache")


def our_options(arguments: argparse.Namespace) -> OurOptions:
    """What the command line says. Raises `OptionError`."""
    given = {field.name: getattr(arguments, field.name) for field in fields(OurOptions)}
    return OurOptions(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Singles:
    """What is timed beside whole answers: of every one of `windows` so many `passes`, and a script of which so many
    tokens are `accepted` a pass, over windows of `scripted_window`."""

    windows: Sequence[int] = ()
    passes: int = 1
    accepted: Sequence[int] = ()
    scripted_window: int = 1

    @property
    def widest(self) -> int:
        """Tokens of the widest window."""
        return max([1, *self.windows, *([self.scripted_window] if self.accepted else [])])


NO_SINGLES = Singles()


def load(options: PeerOptions, own: OurOptions, *, widest: int = 1, on_progress: LoadProgress | None = None) -> Runtime:
    """The runtime, within the peers' memory and with as many resident layers; its windows may be `widest` tokens."""
    return Runtime.load(
        options.source, draft=own.draft, dtype=options.dtype_name,
        resident_layers="auto" if options.resident_layers is None else options.resident_layers,
        context=reserved_tokens(options, own) + (widest if widest > _ROOM_TOKENS else 0), kv=own.kv,
        speculation=own.as_speculation(), max_gamma=max(own.gamma or 0, RuntimeConfig.max_gamma, widest - 1),
        tree_nodes=own.tree_nodes, weights=own.weights, encode=own.encode,
        **emulated(
            own.emulate, device=own.devices or str(options.device), vram=options.vram_bytes, dtype=options.dtype_name
        ),
        on_progress=on_progress,
    )  # fmt: skip


def reserved_tokens(options: PeerOptions, own: OurOptions) -> int:
    """Tokens of the KV cache. Raises `OptionError` if they are fewer than prompt and answer."""
    needed = options.context_tokens
    if own.context is None:
        models = [options.source, *([open_checkpoint(own.draft)] if own.has_model else [])]
        return max(needed, min(needed + _ROOM_TOKENS, *(longest_context(model.config()) for model in models)))
    check_context(own.context, "the prompt", needed)
    return own.context


def sampling_of(options: PeerOptions) -> SamplingParams:
    """How tokens are chosen."""
    return SamplingParams(temperature=options.temperature, seed=options.seed)


def generate(runtime: Runtime, options: PeerOptions, own: OurOptions, asked: Asked) -> Answer:
    """One generation; a scheduler of its own, so that nothing of the prompt is there from before."""
    params = GenerationParams(asked.new_tokens, gamma=own.gamma, ignore_eos=True, sampling=sampling_of(options))
    with Scheduler(runtime) as scheduler:
        return timed_answer(scheduler, asked.tokens, params)


def run_of(answer: Answer, asked: Asked, weight_bytes: int) -> Run:
    """An answer as those of the peers are told."""
    stats = answer.result.stats
    kv_bytes = stats.passes * (stats.bytes_per_pass - weight_bytes)
    tokens = tuple(answer.result.tokens)
    return Run(asked.prompt, answer.asked_s, answer.stamps_s, answer.counts, tokens, kv_bytes)


def speculation_figures(counted: Sequence[Answer]) -> dict[str, Any]:
    """Of all generations together: which windows were asked for, what the target accepted in how many passes by depth
    and by who proposed it, and every level's acceptance, the target's last."""
    windows, sources, depths, levels = Counter[str](), Counter[str](), Counter[int](), dict[tuple[str, str], Any]()
    for stats in (one.result.stats for one in counted):
        windows.update(stats.windows)
        sources.update(stats.accepted_by_source)
        depths.update(dict(enumerate(stats.accepted_by_depth)))
        for level in stats.acceptance:
            found = levels.setdefault((level.proposed_by, level.verified_by), Counter())
            found.update(verifications=level.verifications, proposed=level.proposed, accepted=level.accepted)
    return {
        "windows": dict(windows.most_common()), "accepted_by_source": dict(sources),
        "accepted_by_depth": [depths[depth] for depth in sorted(depths)],
        "levels": [
            {
                "proposed_by": by, "verified_by": to, **counts,
                "rate": counts["accepted"] / counts["proposed"] if counts["proposed"] else 0.0,
            }
            for (by, to), counts in levels.items()
        ],
    }  # fmt: skip


def peaks_gbps(device: torch.device) -> tuple[float | None, float | None]:
    """Of a memcpy to the device, and of copies within it; None without a GPU. Nothing of what they took stays."""
    if device.type != "cuda":
        return None, None
    found = measure_link_gbps(device), measure_copy_gbps(device)
    torch.cuda.empty_cache()
    return found


def forget(target: Path) -> None:
    """Let the page cache drop a model's files.

    Raises:
        OptionError: There are none here.
    """
    files = [path for path in (sorted(target.iterdir()) if target.is_dir() else [target]) if path.is_file()]
    if not files:
        raise OptionError(f"--cold is of files, and {target} is none here: name a directory or a .gguf file")
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(options: PeerOptions, own: OurOptions, singles: Singles = NO_SINGLES) -> dict[str, Any]:
    """Load, time and report."""
    windows, stages_s = singles.windows, dict[str, float]()
    memcpy_gbps, copy_gbps = peaks_gbps(options.device) if windows else (None, None)
    started_s = time.perf_counter()

    def stamp(stage: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            stages_s[stage] = time.perf_counter() - started_s

    with load(options, own, widest=singles.widest, on_progress=stamp) as runtime:
        setup_s, weights = time.perf_counter() - started_s, weight_bytes_of(runtime)
        start = {
            "stages_s": stages_s, "loaded_s": setup_s, "load_report": runtime.load_report,
            "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "planned_host_bytes": runtime.plan.host_bytes,
        }  # fmt: skip
        rows = window_rows(runtime, options, singles, None if own.emulate else memcpy_gbps)
        asked = asked_generations(options)
        generated = [generate(runtime, options, own, one) for one in asked]
        counted, weight_bytes = generated[options.warmup :], weights["streamed_bytes_per_pass"]
        runs = [run_of(a, one, weight_bytes) for a, one in zip(generated, asked, strict=True)]
        measured, last = runs[options.warmup :], counted[-1].result.stats
        scripts = [
            scripted(
                runtime, options.prompts[measured[0].prompt], measured[0].tokens, sampling_of(options),
                repeats=options.repeats, accepted=accepted, window=singles.scripted_window,
            )
            for accepted in singles.accepted
        ]  # fmt: skip
        is_cuda, has_verifier = options.device.type == "cuda", runtime.plan.has_verifier
        return {
            "system": "offload_runtime",
            **({"windows": rows, "bytes_per_token": weight_bytes, "memcpy_gbps": memcpy_gbps} if windows else {}),
            **({"scripted": scripts} if singles.accepted else {}),
            "weights": {**weights, "copy_gbps": copy_gbps}, "start": start,
            **figures(measured, weight_bytes=weight_bytes, peak_gbps=last.link_peak_gbps),
            "speculation": speculation_figures(counted),
            "peak_vram_bytes": {"driver": last.peak_vram_bytes} if is_cuda else None,
            "pinned_bytes": last.pinned_bytes, "vram_limit_bytes": runtime.plan.limits.device_bytes,
            "placement": runtime.placement,
            "settings": {**options.as_settings(), **asdict(own), "draft": model_name(own.draft)},
            "notes": [_GATHERS] if has_verifier and runtime.plan.target.kv_layers_on_host else [],
            "differing_generations": num_differing_of(options, runs),
            "tokens": answers(measured), "setup_s": setup_s,
            **provenance(*runtime.devices, commit=options.commit),
        }  # fmt: skip


def window_rows(
    runtime: Runtime, options: PeerOptions, singles: Singles, memcpy_gbps: float | None
) -> list[dict[str, Any]]:
    """Single passes, each beside the faster of back-to-back copies and of a plain memcpy: of an emulated link, which is
    slower than the machine's own, beside the former."""
    if not singles.windows:
        return []
    prompt = options.prompts[0]
    plain = runtime.generate(list(prompt), max_new_tokens=4, ignore_eos=True, speculate=False).stats
    peak_gbps = max((gbps for gbps in (plain.link_peak_gbps, memcpy_gbps) if gbps), default=None)
    rows = []
    for width in singles.windows:
        row = time_window(runtime, prompt, width, singles.passes, nbytes=plain.bytes_per_pass, peak_gbps=peak_gbps)
        rows.append(row | predicted_pass(runtime, len(prompt), width, row["pass_s"]["median"]))
    return rows


def own_options(arguments: argparse.Namespace) -> OurOptions:
    """Check what peers have and this runtime does not. Raises `OptionError`."""
    if arguments.kv_cache != "device" or arguments.assistant_tokens != "auto" or arguments.prefill_chunk is not None:
        raise OptionError(
            "--kv-cache, --assistant-tokens and --prefill-chunk are transformers': take --kv and --gamma, and leave "
            "the last one out"
        )
    return our_options(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = peer_parser("Measure offload_runtime on the peers' model and prompts.")
    add_our_options(parser)
    add_single_options(parser)
    try:
        arguments = parser.parse_args(argv)
        own = own_options(arguments)
        options = options_from(arguments)
        if arguments.cold:
            forget(Path(arguments.target or ""))
        singles = Singles(arguments.windows, arguments.passes, arguments.scripted, arguments.scripted_window)
        emit(measure(options, own, singles), options.out)
    except OffloadError as error:
        return refused(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
