"""Measure this runtime as a user loads it, with a draft or without one, on the model and the prompts of the peers.

    python tools/peers/ours_runtime.py --target wide-13b --draft SmolLM2.gguf --gamma 12 --out ours.json

`--windows` also times single passes over wider windows, and how long the host needs to launch them, beside what the
machine's profile predicts. `--scripted 10,15` decodes once more with proposals of which so many a pass are right, as
the plain answer before says: what a draft of that acceptance is worth if drafting costs nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from common import PeerOptions, check_context, model_name, options_from, peer_parser, refused
from long_context.internals import (
    budget_of,
    bytes_written_back,
    levels_of,
    link_peak_gbps,
    pinned_bytes,
    proposer_of,
    request_for,
    runner_of,
    slot_sampling,
    steps_for,
)
from long_context.session import target_acceptance
from passes import NO_SINGLES, Singles, add_script_options, peaks_gbps, scripted, time_window, weight_bytes_of
from runs import (
    Asked,
    KVTraffic,
    NextToken,
    Run,
    answers,
    asked_generations,
    expectations,
    figures,
    num_differing_of,
)

from harness import check_machine, emit, integers, provenance  # isort: skip (`common` sets the path)

from offload_runtime.config import (
    DRAFT_CACHES,
    ENCODE,
    SPECULATION_MODES,
    WEIGHTS,
    ModelConfig,
    RuntimeConfig,
    SpeculationOptions,
    idle_options,
)
from offload_runtime.engine import Runtime
from offload_runtime.engine.generate import device_errors
from offload_runtime.errors import OffloadError, OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.plan.request import check_window, longest_context
from offload_runtime.speculation import Acceptance, PromptRequest, StepResult, run_step
from offload_runtime.weights import open_checkpoint

_DEFAULT_MAX_GAMMA = 63  # of `Runtime.load`
# Behind the longest answer: windows are cut where the context ends.
_ROOM_TOKENS = 256
# What `--draft` may say instead of a model.
NO_MODEL = (None, "ngram", "none")


@dataclass(frozen=True)
class OurOptions:
    """See `Runtime.load` and its `generate`; None leaves it to the runtime."""

    draft: str
    speculation: str
    gamma: int | None
    tree_nodes: int | None
    kv: str
    budget_tokens: int | None = None
    draft_cache: str | None = None
    context: int | None = None
    weights: str = "auto"
    encode: str = "none"
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

    def check(self, target: ModelConfig, resident_layers: int | None) -> None:
        """Refuse what no runtime could be loaded with. Raises `OptionError`.

        Args:
            target: The model.
            resident_layers: Of it, on the device; None is as many as fit.
        """
        check_window(1 + max(self.gamma or 0, self.tree_nodes or 0), target)
        if self.speculation == "triforce" and resident_layers not in (None, target.num_layers):
            raise OptionError(
                f"--speculation triforce needs all {target.num_layers} layers on the device, --resident-layers is "
                f"{resident_layers}: take --resident-layers auto"
            )

    def as_speculation(self) -> SpeculationOptions:
        """How tokens are proposed. Raises `OptionError` for values that cannot be."""
        defaults = SpeculationOptions()
        return SpeculationOptions(
            self.speculation,
            defaults.draft_cache if self.draft_cache is None else self.draft_cache,
            budget_tokens=defaults.budget_tokens if self.budget_tokens is None else self.budget_tokens,
        )


def add_our_options(parser: argparse.ArgumentParser) -> None:
    """Those that `compare.py` and `ours_runtime.py` have in common."""
    parser.add_argument(
        "--context", type=int,
        help="of `ours`: tokens that its KV cache reserves, for prompt, answer and proposals behind it; those of the "
        "peers grow (default: what the longest takes, and 256 more)",
    )  # fmt: skip
    parser.add_argument("--speculation", choices=SPECULATION_MODES, help="of `ours` (auto)")
    parser.add_argument("--gamma", type=int, help="of `ours`: most tokens proposed in a row")
    parser.add_argument("--tree-nodes", type=int, help="of `ours`: most tokens proposed in all, as a tree")
    parser.add_argument("--budget-tokens", type=int, help="of `ours`: tokens of a retrieval cache, of each layer")
    parser.add_argument("--draft-cache", choices=DRAFT_CACHES, help="of `ours`: the draft's own KV cache")
    parser.add_argument("--weights", choices=WEIGHTS, help="of `ours`: how a quantised file's are kept (auto)")
    parser.add_argument("--encode", choices=ENCODE, help="of `ours`: whether bf16 is kept in 12 bits (none)")
    parser.add_argument("--emulate", help="of `ours`: a machine with a smaller card to play, by name or file")
    parser.add_argument("--devices", help="of `ours`, instead of --device: several cards, like cuda:0,cuda:1")
    parser.add_argument(
        "--kv", choices=("auto", "gpu", "host"), default="auto",
        help="where the KV cache of `ours` lives; compare.py with host: those of the peers, too",
    )  # fmt: skip


def our_options(arguments: argparse.Namespace) -> OurOptions:
    """What the command line says. Raises `OptionError`."""
    return OurOptions(
        draft=arguments.draft or "ngram",
        speculation=arguments.speculation or "auto",
        gamma=arguments.gamma,
        tree_nodes=arguments.tree_nodes,
        kv=arguments.kv,
        budget_tokens=arguments.budget_tokens,
        draft_cache=arguments.draft_cache,
        context=arguments.context,
        weights=arguments.weights or "auto",
        encode=arguments.encode or "none",
        emulate=arguments.emulate,
        devices=arguments.devices,
    )


@dataclass(frozen=True)
class Played:
    """One generation, and what was proposed in it."""

    run: Run
    rounds: tuple[StepResult, ...]
    windows: Mapping[str, int]
    levels: tuple[Acceptance, ...]


def load(options: PeerOptions, own: OurOptions, *, widest: int = 1) -> Runtime:
    """The runtime, within the peers' memory and with as many resident layers; its windows may be `widest` tokens."""
    return Runtime.load(
        options.source,
        draft=own.draft,
        device=own.devices or str(options.device),
        dtype=options.dtype_name,
        vram=options.vram_bytes,
        resident_layers="auto" if options.resident_layers is None else options.resident_layers,
        context=reserved_tokens(options, own) + (widest if widest > _ROOM_TOKENS else 0),
        kv=own.kv,
        speculation=own.as_speculation(),
        max_gamma=max(own.gamma or 0, _DEFAULT_MAX_GAMMA, widest - 1),
        tree_nodes=own.tree_nodes,
        weights=own.weights,
        encode=own.encode,
        emulate=own.emulate,
    )


def reserved_tokens(options: PeerOptions, own: OurOptions) -> int:
    """Tokens of the KV cache. Raises `OptionError` if they are fewer than prompt and answer."""
    needed = options.context_tokens
    if own.context is None:
        models = [options.source, *([open_checkpoint(own.draft)] if own.has_model else [])]
        return max(needed, min(needed + _ROOM_TOKENS, *(longest_context(model.config()) for model in models)))
    check_context(own.context, "the prompt", needed)
    return own.context


def generate(runtime: Runtime, options: PeerOptions, own: OurOptions, asked: Asked) -> Played:
    """One generation, round by round as `Runtime.generate` does it, but for the text."""
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)
    params = GenerationParams(asked.new_tokens, gamma=own.gamma, sampling=sampling)
    runner, known, slots = runner_of(runtime), asked.tokens, slot_sampling(runtime)
    request = request_for(runtime, known, params)
    proposer, steps = steps_for(runtime, request)
    runner.cache.truncate(0, 0)
    if options.device.type == "cuda":
        torch.cuda.synchronize(options.device)
    started_s = time.perf_counter()
    slots.assign(0, sampling)
    proposer.join(0, sampling)
    behind = list[torch.Tensor]()
    prompt = PromptRequest(0, known, speculate=proposer.name is not None)
    (first,) = run_step(runner, slots, proposer, [], prompts=[prompt], on_logits=lambda _, new: behind.append(new))
    request.sequence += first.tokens
    stamps_s, counts, rounds = [time.perf_counter()], [1], list[StepResult]()
    before, tally = link_bytes(runtime), request.tally
    while request.room >= 0:
        (result,) = steps.run([request])
        request.sequence += result.tokens
        rounds.append(result)
        stamps_s.append(time.perf_counter())
        counts.append(len(result.tokens))
    after, weight_bytes = link_bytes(runtime), len(rounds) * runner.streamer.bytes_per_pass
    kv = KVTraffic(after.to_device - before.to_device - weight_bytes, after.to_host - before.to_host)
    levels = () if proposer.name is None else tally.levels(proposer.name, proposer.counts(0))
    said, expected = tuple(request.tokens), NextToken.of(behind[0][0])
    run = Run(asked.prompt, started_s, tuple(stamps_s), tuple(counts), said, kv, expected)
    return Played(run, tuple(rounds), dict(tally.windows.most_common()), levels)


def link_bytes(runtime: Runtime) -> KVTraffic:
    """Bytes so far: of all passes begun, weights included, and of what was written to the host."""
    return KVTraffic(runner_of(runtime).streamer.bytes_begun, bytes_written_back(runtime))


def speculation_figures(played: Sequence[Played]) -> dict[str, Any]:
    """Of all generations together: what the target accepted, which windows were played, and every level's acceptance,
    the target's last."""
    windows: Counter[str] = Counter()
    levels: dict[tuple[str, str], Acceptance] = {}
    for one in played:
        windows.update(one.windows)
        for level in one.levels:
            key = level.proposed_by, level.verified_by
            levels[key] = level if key not in levels else added(levels[key], level)
    return {
        **target_acceptance([round_ for one in played for round_ in one.rounds]),
        "windows": dict(windows.most_common()),
        "levels": [
            {**asdict(level), "rate": level.rate, "accepted_per_verification": level.accepted_per_verification}
            for level in levels.values()
        ],
    }


def added(one: Acceptance, other: Acceptance) -> Acceptance:
    """Two counts of the same level."""
    return replace(
        one,
        verifications=one.verifications + other.verifications,
        proposed=one.proposed + other.proposed,
        accepted=one.accepted + other.accepted,
    )


def measure(options: PeerOptions, own: OurOptions, singles: Singles = NO_SINGLES) -> dict[str, Any]:
    """Load, time and report."""
    windows, passes = singles.windows, singles.passes
    memcpy_gbps, copy_gbps = peaks_gbps(options.device) if windows else (None, None)
    started_s = time.perf_counter()
    with load(options, own, widest=singles.widest) as runtime:
        setup_s = time.perf_counter() - started_s
        with device_errors(runtime.device):
            # A link that is played is slower than the machine's own.
            there = (link_peak_gbps(runtime), memcpy_gbps if own.emulate is None else None)
            peaks = [gbps for gbps in there if gbps is not None]
            rows = [
                time_window(runtime, options.prompts[0], width, passes, max(peaks, default=None)) for width in windows
            ]
            played = [generate(runtime, options, own, asked) for asked in asked_generations(options)]
            known = [one.run for one in played[options.warmup :]]
            scripts = [
                scripted(
                    runtime, options.prompts[known[0].prompt], known[0].tokens, options, accepted=accepted,
                    window=singles.scripted_window,
                )
                for accepted in singles.accepted
            ]  # fmt: skip
        runs, counted = [one.run for one in played], played[options.warmup :]
        measured = [one.run for one in counted]
        budget, weight_bytes = budget_of(runtime), runner_of(runtime).streamer.bytes_per_pass
        vram = {"driver": budget.peak_bytes(), "reserved": budget.reserved_bytes}
        single = {"windows": rows, "bytes_per_token": weight_bytes, "memcpy_gbps": memcpy_gbps} if windows else {}
        return {
            "system": "offload_runtime",
            **single,
            **({"scripted": scripts} if singles.accepted else {}),
            "weights": {**weight_bytes_of(runtime), "copy_gbps": copy_gbps},
            **figures(measured, weight_bytes=weight_bytes, peak_gbps=link_peak_gbps(runtime)),
            "speculation": speculation_figures(counted),
            "peak_vram_bytes": vram if options.device.type == "cuda" else None,
            "pinned_bytes": pinned_bytes(runtime),
            "vram_limit_bytes": budget.limit_bytes,
            "placement": runtime.placement,
            "settings": {**options.as_settings(), **vars(own), "draft": model_name(own.draft)},
            "notes": notes_on(runtime, measured),
            "differing_generations": num_differing_of(options, runs),
            "tokens": answers(measured),
            "next_token": expectations(measured),
            "setup_s": setup_s,
            **provenance(*runtime.devices, commit=options.commit),
        }


def notes_on(runtime: Runtime, runs: Sequence[Run]) -> list[str]:
    """What the figures leave out."""
    on_host = any(run.kv is not None and run.kv.to_device for run in runs)
    if on_host and levels_of(proposer_of(runtime)).verifier is not None:
        return ["GB/s and bound: without the chunks that the retrieval verifier gathers straight from host memory"]
    return []


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
    parser.add_argument("--windows", type=integers, default=(), help="widths of windows to time, comma-separated")
    parser.add_argument("--passes", type=int, default=8, help="timed passes of each")
    add_script_options(parser)
    try:
        arguments = parser.parse_args(argv)
        own = own_options(arguments)
        options = options_from(arguments)
        singles = Singles(arguments.windows, arguments.passes, arguments.scripted, arguments.scripted_window)
        emit(measure(options, own, singles), options.out)
    except OffloadError as error:
        return refused(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
