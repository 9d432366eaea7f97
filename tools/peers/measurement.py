"""Timing of a peer that generates by transformers: one time stamp per round, and the JSON line in the end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from common import PeerOptions, options_from, refused
from harness import emit, provenance
from models import load_draft, open_device
from offloaded_cache import NOTE, MendedCache, offloaded_bytes, require_host_memory, return_outgrown_blocks
from runs import Asked, Run, answers, asked_generations, figures, num_differing_of
from timing import measure_link_gbps
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from offload_runtime.errors import BudgetError, NumericalError, OffloadError, OptionError
from offload_runtime.sizes import format_bytes


@dataclass
class RoundClock:
    """A streamer of transformers' `generate`: it notes when the tokens of each round are there, and how many.

    `generate` hands it the prompt first, then after every pass of the target what that pass added: one token, or under
    assisted generation the accepted ones and the target's own. They come as CPU tensors, so the device is done with
    them. (Stopping criteria would not do: some versions also ask them about what is only proposed.)

    `sample_memory` also notes the bytes in use on the device beyond the `others_bytes` of other programs, a query too
    slow for a measured generation.
    """

    device: torch.device
    sample_memory: bool
    others_bytes: int = 0
    stamps_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    driver_bytes: int = 0
    _prompt_seen: bool = False

    def put(self, value: torch.Tensor) -> None:
        """Takes int64 tokens on the CPU, of batch 1, in any shape."""
        assert value.device.type == "cpu"
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.stamps_s.append(time.perf_counter())
        self.counts.append(value.numel())
        if self.sample_memory and self.device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            self.driver_bytes = max(self.driver_bytes, total_bytes - free_bytes - self.others_bytes)

    def end(self) -> None:
        """Nothing is kept back."""


def read_in_chunks(model: PreTrainedModel, chunk: int) -> None:
    """From now on split longer inputs of the model into passes of `chunk` tokens over the same cache.

    transformers' own `prefill_chunk_size` does not reach assisted generation (5.17 and 5.23): there the target's first
    pass reads the whole prompt whatever the configuration says, and an assistant that is given the same configuration
    reads the whole text again before each of its proposals in 5.17.

    Only batch 1 without padding, and with a cache: as `generate` calls it. Each pass is a call of its own, so that what
    pages the weights sees as many passes. The last one is as long as the logits that are asked for, at least.
    """

    def split(module: PreTrainedModel, _: tuple[()], inputs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]] | None:
        count = inputs["input_ids"].shape[1]
        if count <= chunk:
            return None
        cache = inputs["cache" if "cache" in inputs else "past_key_values"]  # its name before transformers 5.24
        past = cache.get_seq_length()
        rest = max(inputs.get("logits_to_keep") or count, (count - 1) % chunk + 1)
        for start in range(0, count - rest, chunk):
            piece = _piece(inputs, past, start, min(start + chunk, count - rest))
            module(**piece | {"logits_to_keep": 1})
        return (), _piece(inputs, past, count - rest, count)

    # First of all hooks: those of a system that pages weights must see passes one by one, not one inside another.
    model.register_forward_pre_hook(split, with_kwargs=True, prepend=True)


def _piece(inputs: dict[str, Any], past: int, start: int, end: int) -> dict[str, Any]:
    """The model's inputs for some of the new tokens, of which `past` are before the first."""
    found = dict(inputs)
    for name, value in inputs.items():
        if name == "attention_mask" and value is not None:
            found[name] = value[:, : past + end]  # [1, S] int64
        elif name in ("input_ids", "position_ids") and value is not None:
            found[name] = value[:, start:end].clone(memory_format=torch.contiguous_format)  # [1, T] int64
        else:
            assert not isinstance(value, torch.Tensor), f"{name} may have one row per token, too"
    return found


@dataclass(frozen=True)
class Prepared:
    """A model whose decoder layers stream, ready for `generate`, and what its system is and was told.

    `bytes_per_pass` are the weights that cross the link in one pass, `pinned_bytes` those that lie in pinned memory
    (asked of the tensors, not of the settings). `static_cache` holds the keys and values of one generation after the
    other; None for a new cache that grows, each time.
    """

    system: str
    version: str
    model: PreTrainedModel
    bytes_per_pass: int
    pinned_bytes: int
    system_settings: dict[str, Any]
    notes: tuple[str, ...]
    static_cache: StaticCache | None = None


@dataclass(frozen=True)
class Measurement:
    """The measured generations of one setting, and how many of all, warm-ups included, were not as the others."""

    assistant_tokens: int | None
    runs: list[Run]
    differing: int

    @property
    def tok_per_s(self) -> float:
        """By which settings are compared."""
        return float(figures(self.runs, weight_bytes=0, peak_gbps=None)["tok_per_s"])


def generation_config(options: PeerOptions, new_tokens: int) -> GenerationConfig:
    """What every generation asks of transformers: the asked number of tokens, of all of the vocabulary.

    No padding token is named: transformers 5.23 would hide it from an assistant wherever it is in the prompt. With an
    assistant prompts are chunked by `read_in_chunks` instead.
    """
    config = GenerationConfig(max_new_tokens=new_tokens, use_cache=True)
    if options.draft is None:
        config.update(prefill_chunk_size=options.prefill_chunk)
    if options.temperature:
        config.update(do_sample=True, temperature=options.temperature, top_k=0, top_p=1.0)
    else:
        config.update(do_sample=False)
    return config


def set_assistant(draft: PreTrainedModel, tokens: int | None) -> None:
    """How far the draft goes: always so many tokens, or None for transformers' own schedule, which ends when unsure."""
    draft.generation_config = GenerationConfig()
    if tokens is not None:
        draft.generation_config.update(
            num_assistant_tokens=tokens, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )


def chunk_prompts(prepared: Prepared, draft: PreTrainedModel | None, options: PeerOptions) -> None:
    """Bound what a pass reads where the configuration does not: with an assistant."""
    if draft is not None and options.prefill_chunk is not None:
        for model in (prepared.model, draft):
            read_in_chunks(model, options.prefill_chunk)


def generate_once(
    prepared: Prepared, options: PeerOptions, asked: Asked, draft: PreTrainedModel | None, clock: RoundClock
) -> Run:
    """One generation."""
    ids = torch.tensor([asked.tokens], device=options.device)  # [1, T] int64
    # Our own cache object: by name the configuration would put the draft's keys on the host, too.
    config = prepared.model.config
    if prepared.static_cache is not None:
        cache: Cache = prepared.static_cache
        prepared.static_cache.reset()
    else:
        cache = MendedCache(config) if options.offloads_cache else DynamicCache(config=config)
    torch.manual_seed(options.seed)
    if options.device.type == "cuda":
        torch.cuda.synchronize(options.device)
    started_s = time.perf_counter()
    output = prepared.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=generation_config(options, asked.new_tokens),
        past_key_values=cache, assistant_model=draft, streamer=clock,
    )  # [1, T + new_tokens] int64  # fmt: skip
    tokens = tuple(output[0, ids.shape[1] :].tolist())
    if len(tokens) != asked.new_tokens or sum(clock.counts) != asked.new_tokens:
        raise NumericalError(
            f"{prepared.system} gave {len(tokens)} tokens in rounds of {clock.counts} where {asked.new_tokens} were "
            "asked for: these times would mean nothing"
        )
    if asked.measured and len(clock.counts) < 2:
        raise OptionError(f"all {asked.new_tokens} tokens came in the first round: raise --new-tokens")
    kv_bytes: int | None = 0
    if options.offloads_cache:
        kv_bytes = offloaded_bytes(
            options.source.config(), options.dtype.itemsize, prompt_tokens=len(asked.tokens), counts=clock.counts
        )
    return Run(asked.prompt, started_s, tuple(clock.stamps_s), tuple(clock.counts), tokens, kv_bytes)


def measure(
    prepared: Prepared, options: PeerOptions, draft: PreTrainedModel | None, tokens: int | None
) -> tuple[Measurement, int]:
    """Run the warm-up and the measured generations, every prompt in turn; also returns the driver's peak bytes."""
    if draft is not None:
        set_assistant(draft, tokens)
    runs, driver_bytes = [], 0
    for asked in asked_generations(options):
        clock = RoundClock(options.device, sample_memory=not asked.measured, others_bytes=options.others_bytes)
        runs.append(generate_once(prepared, options, asked, draft, clock))
        driver_bytes = max(driver_bytes, clock.driver_bytes)
    return Measurement(tokens, runs[options.warmup :], num_differing_of(options, runs)), driver_bytes


def peak_vram(options: PeerOptions, driver_bytes: int, context_bytes: int) -> dict[str, int] | None:
    """The most device memory that was in use; `context_bytes` were before anything was built."""
    if options.device.type != "cuda":
        return None
    reserved_bytes = torch.cuda.max_memory_reserved(options.device)
    return {
        "torch_allocated": torch.cuda.max_memory_allocated(options.device),
        "torch_reserved": reserved_bytes,
        # The driver is asked between tokens; a system that empties torch's cache within a pass held more in between.
        "driver": max(driver_bytes, context_bytes + reserved_bytes),
    }


def result_json(
    prepared: Prepared, options: PeerOptions, *, tried: Sequence[Measurement], peak_gbps: float | None
) -> dict[str, Any]:
    """The reported dictionary of the fastest setting that was tried; `peak_gbps` is a plain memcpy's (GB/s)."""
    best = max(tried, key=lambda measured: measured.tok_per_s)
    notes = list(prepared.notes)
    if options.offloads_cache:
        notes.append(NOTE)
    if options.kv_cache == "offloaded" and options.device.type != "cuda":
        notes.append("no GPU: keys and values are in host memory anyway, transformers' offloaded cache needs CUDA")
    if any(run.kv_bytes is None for run in best.runs):
        notes.append("GB/s and bound: weights only, because what the layers with sliding windows keep is not known")
    if options.draft is not None and options.prefill_chunk is not None:
        notes.append("assisted generation ignores prefill_chunk_size: a hook of ours splits what target and draft read")
    if best.differing:
        notes.append(
            f"SUSPECT: {best.differing} generations differ from others of the same prompt and seed; the system may "
            "compute on weights that have not arrived, and then its speed means nothing"
        )
    assistant = None
    if options.draft is not None:
        speeds = {str(measured.assistant_tokens or "auto"): measured.tok_per_s for measured in tried}
        assistant = {"tokens": best.assistant_tokens or "auto", "tok_per_s_by_tokens": speeds}
    return {
        "system": prepared.system, "version": prepared.version,
        **figures(best.runs, weight_bytes=prepared.bytes_per_pass, peak_gbps=peak_gbps),
        "assistant": assistant, "pinned_bytes": prepared.pinned_bytes,
        "settings": {
            **options.as_settings(), "attention": "sdpa", "kv_cache": options.kv_cache,
            "prefill_chunk": options.prefill_chunk, **prepared.system_settings,
        },
        "notes": notes, "differing_generations": best.differing, "tokens": answers(best.runs),
        **provenance(options.device, commit=options.commit),
    }  # fmt: skip


def measure_peer(prepare: Callable[[PeerOptions], Prepared], options: PeerOptions) -> dict[str, Any]:
    """Build, time and report one peer. Raises `BudgetError` when it does not fit the VRAM it was given."""
    if options.offloads_cache:
        require_host_memory(options)
    options, context_bytes = open_device(options)
    peak_gbps = measure_link_gbps(options.device)
    start_s = time.perf_counter()
    try:
        prepared = prepare(options)
        draft = load_draft(options)
        chunk_prompts(prepared, draft, options)
        note = return_outgrown_blocks(prepared.model, options) if options.offloads_cache else None
        prepared = replace(prepared, notes=(*prepared.notes, *([] if note is None else [note])))
        setup_s = time.perf_counter() - start_s
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(options.device)
        settings = options.assistant_tokens if draft is not None else (None,)
        measured = [measure(prepared, options, draft, tokens) for tokens in settings]
    except torch.OutOfMemoryError as error:
        limit = "all" if options.vram_bytes is None else format_bytes(options.vram_bytes)
        raise BudgetError(
            f"the model does not run in {limit} of VRAM with {options.resident_layers} resident layers: raise --vram "
            f"or lower --resident-layers or the prompt's tokens ({error})"
        ) from error
    result = result_json(prepared, options, tried=[one for one, _ in measured], peak_gbps=peak_gbps)
    driver_bytes = max(driver for _, driver in measured)
    return {**result, "peak_vram_bytes": peak_vram(options, driver_bytes, context_bytes), "setup_s": setup_s}


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
    try:
        arguments = parser.parse_args(argv)
        options = options_from(arguments)
        try:
            result = measure_peer(prepare_from(arguments), options)
        finally:
            if close is not None:
                close()
        emit(result, options.out)
    except OffloadError as error:
        return refused(error)
    return 0
