"""Timing of a prepared peer: generations, one time stamp per token, and the JSON line in the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import PeerOptions, open_device, options_from, prompt_ids
from transformers import LlamaForCausalLM

from bench_report import emit, measure_link_gbps, percentiles, provenance  # isort: skip (`common` sets the path)

from offload_runtime.config import GB, format_bytes
from offload_runtime.errors import BudgetError, NumericalError, OffloadError


@dataclass(frozen=True)
class Prepared:
    """A model whose decoder layers stream, ready for `generate`, and what its system is and was told.

    `bytes_per_token` are the weights that cross the link in one pass, `pinned_bytes` those that lie in pinned memory
    (asked of the tensors, not of the settings).
    """

    system: str
    version: str
    model: LlamaForCausalLM
    bytes_per_token: int
    pinned_bytes: int
    prefetch: dict[str, Any]
    system_settings: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Measurement:
    """Raw samples of the measured generations; warm-up generations count for `generations` and the peak only.

    `step_s` holds the decode steps of all measured generations, `first_token_s` one value for each of them.
    """

    step_s: list[float]
    first_token_s: list[float]
    generations: list[list[int]]
    peak_vram_bytes: dict[str, int] | None

    @property
    def num_differing(self) -> int:
        """Generations unlike the first. All are greedy over the same weights and prompt, so there should be none."""
        return sum(tokens != self.generations[0] for tokens in self.generations)


@dataclass
class TokenClock:
    """A stopping criterion that never stops: it notes when each token is complete on the device.

    `generate` calls it once per new token. `sample_memory` also notes the bytes in use on the whole device, a query too
    slow for a measured generation.
    """

    device: torch.device
    sample_memory: bool
    times_s: list[float] = field(default_factory=list)
    driver_bytes: int = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Takes `input_ids` [B, S] int64; returns [B] bool, all False (the signature is transformers')."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.sample_memory:
                free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
                self.driver_bytes = max(self.driver_bytes, total_bytes - free_bytes)
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate_once(prepared: Prepared, options: PeerOptions, clock: TokenClock) -> tuple[float, list[int]]:
    """One greedy generation of `new_tokens`; returns the time it started and the new tokens."""
    ids = prompt_ids(options)  # [1, T] int64, on the device
    if options.device.type == "cuda":
        torch.cuda.synchronize(options.device)
    start_s = time.perf_counter()
    output = prepared.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.new_tokens,
        do_sample=False,
        use_cache=True,
        stopping_criteria=[clock],
    )  # [1, T + new_tokens] int64
    tokens = output[0, ids.shape[1] :].tolist()
    if len(tokens) != options.new_tokens or len(clock.times_s) != options.new_tokens:
        raise NumericalError(
            f"{prepared.system} gave {len(tokens)} tokens and {len(clock.times_s)} time stamps where "
            f"{options.new_tokens} were asked for: these times would mean nothing"
        )
    return start_s, tokens


def measure(prepared: Prepared, options: PeerOptions, *, context_bytes: int) -> Measurement:
    """Run the warm-up and the measured generations. `context_bytes` of VRAM were in use before anything was built.

    A decode step lasts from one token being complete on the device to the next one; the first token, which ends the
    prefill, is counted apart.
    """
    on_gpu = options.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(options.device)
    result = Measurement([], [], [], None)
    driver_bytes = 0
    for run in range(options.warmup + options.repeats):
        warming = run < options.warmup
        clock = TokenClock(options.device, sample_memory=warming)
        start_s, tokens = generate_once(prepared, options, clock)
        result.generations.append(tokens)
        driver_bytes = max(driver_bytes, clock.driver_bytes)
        if not warming:
            result.first_token_s.append(clock.times_s[0] - start_s)
            result.step_s.extend(b - a for a, b in zip(clock.times_s, clock.times_s[1:], strict=False))
    if not on_gpu:
        return result
    reserved_bytes = torch.cuda.max_memory_reserved(options.device)
    peak = {
        "torch_allocated": torch.cuda.max_memory_allocated(options.device),
        "torch_reserved": reserved_bytes,
        # The driver is asked between tokens; a system that empties torch's cache within a pass held more in between.
        "driver": max(driver_bytes, context_bytes + reserved_bytes),
    }
    return Measurement(result.step_s, result.first_token_s, result.generations, peak)


def result_json(
    prepared: Prepared, options: PeerOptions, *, measured: Measurement, setup_s: float, peak_gbps: float | None
) -> dict[str, Any]:
    """The reported dictionary. Rates come from the median step: `tok_per_s` is its inverse, `link_gbps` bytes over it.

    `bound` is the same pass at the speed of a plain pinned memcpy, measured in this process as `peak_gbps` (GB/s; None
    without a GPU), and the share of it that was reached.
    """
    step = percentiles(measured.step_s)
    link_gbps = prepared.bytes_per_token / step.median / GB
    notes = list(prepared.notes)
    differing = measured.num_differing
    if differing:
        notes.append(
            f"SUSPECT: {differing} of {len(measured.generations)} greedy generations differ from the first; the system "
            "may compute on weights that have not arrived, and then its speed means nothing"
        )
    bound = None
    if peak_gbps is not None:
        bound = {
            "link_gbps": peak_gbps,
            "s_per_token": prepared.bytes_per_token / (peak_gbps * GB),
            "share": link_gbps / peak_gbps,
        }
    return {
        "system": prepared.system,
        "version": prepared.version,
        "s_per_token": step.as_dict(),
        "tok_per_s": 1 / step.median,
        "time_to_first_token_s": percentiles(measured.first_token_s).median,
        "link_gbps": link_gbps,
        "bytes_per_token": prepared.bytes_per_token,
        "pinned_bytes": prepared.pinned_bytes,
        "bound": bound,
        "peak_vram_bytes": measured.peak_vram_bytes,
        "settings": {**options.as_settings(), **prepared.system_settings},
        "prefetch": prepared.prefetch,
        "notes": notes,
        "differing_generations": differing,
        "tokens": measured.generations[-1],
        "setup_s": setup_s,
        **provenance(options.device, commit=options.commit),
    }


def measure_peer(prepare: Callable[[PeerOptions], Prepared], options: PeerOptions) -> dict[str, Any]:
    """Build, time and report one peer. Raises `BudgetError` when it does not fit the VRAM it was given."""
    context_bytes = open_device(options)
    peak_gbps = measure_link_gbps(options.device)
    start_s = time.perf_counter()
    try:
        prepared = prepare(options)
        setup_s = time.perf_counter() - start_s
        measured = measure(prepared, options, context_bytes=context_bytes)
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the model does not run in {format_bytes(options.vram_bytes)} of VRAM with {options.resident_layers} "
            f"resident layers: raise --vram or lower --resident-layers or --prompt-tokens ({error})"
        ) from error
    return result_json(prepared, options, measured=measured, setup_s=setup_s, peak_gbps=peak_gbps)


def run_peer(
    parser: argparse.ArgumentParser,
    prepare_from: Callable[[argparse.Namespace], Callable[[PeerOptions], Prepared]],
    *,
    close: Callable[[], None] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """A peer's `main`: parse `argv`, measure, `close` the system, print the JSON line last; returns the exit code.

    `prepare_from` turns the parsed arguments of the peer's own system into the function that builds it.
    """
    arguments = parser.parse_args(argv)
    try:
        options = options_from(arguments)
        try:
            result = measure_peer(prepare_from(arguments), options)
        finally:
            if close is not None:
                close()
        emit(result, options.out)
    except OffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
