"""From a `RuntimeConfig` to a loaded runtime: open, plan, reserve, load; on a machine that plays another one, too.

Also the line about what was loaded: what is resident, what is streamed and how, what is reserved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from offload_runtime.config import RuntimeConfig, format_bytes
from offload_runtime.copy import CopyEngine, CopyQueues, make_copy_engine, measure_link_gbps
from offload_runtime.engine import load_model as assembly
from offload_runtime.engine.build_proposer import make_proposer
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.engine.request import PromptRoom
from offload_runtime.engine.steps import WindowLimits
from offload_runtime.errors import BudgetError, DeviceError, OptionError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.hardware.host_bench import read_host_info
from offload_runtime.memory import DeviceBudget, HostArena, current_device, device_memory_used_by_others, resolve_device
from offload_runtime.plan import (
    MachineFigures,
    ModelPlan,
    RunPlan,
    check_host_memory,
    common_figures,
    describe_draft_cache,
    describe_speculation,
    describe_staging,
    find_plan,
    known_figures,
    limits_here,
    link_times,
    require_dtype,
    resolve_dtype,
)
from offload_runtime.speculation import LinkTimes, Proposer
from offload_runtime.trace import LINK, LINK_BACK, CopyLog, TraceRecorder, make_clock, require_writable

# Of the link's peak is measured that much too little at times; pacing is no better than that either.
_LINK_TOLERANCE = 0.02
_PROBE_BYTES = 64 << 20


@dataclass(frozen=True)
class Emulation:
    """What is emulated: `whole_vram_bytes` is all of the card's memory, `vram_bytes` what of it a program can have.

    `link_gbps` is host to device, `link_back_gbps` device to host, in GB/s.
    """

    name: str
    whole_vram_bytes: int
    vram_bytes: int
    link_gbps: float
    link_back_gbps: float

    def limit_bytes(self, asked_bytes: int | None) -> int:
        """The limit of device memory, where `asked_bytes` is one as well."""
        return self.vram_bytes if asked_bytes is None else min(asked_bytes, self.vram_bytes)


def emulation_of(profile: str | Path | MachineProfile) -> Emulation:
    """What to emulate of a machine; a link of unknown speed back is as fast as it is forth.

    Args:
        profile: The name of a profile, its file, or the profile itself.

    Raises:
        ProfileError: There is no such profile; OptionError: it says too little of a GPU.
    """
    found = profile if isinstance(profile, MachineProfile) else load_profile(profile)
    if not found.gpus or found.vram_bytes is None or found.link_gbps is None:
        raise OptionError(
            f"the profile {found.name} cannot be emulated: it needs a GPU with vram_bytes and link_gbps: choose "
            "another with --emulate"
        )
    back_gbps = found.link_gbps if found.link_back_gbps is None else found.link_back_gbps
    # A reserve holds a context, and a run on a GPU counts its own again: it has some 0.8 GB less than the card would.
    usable_bytes = found.vram_bytes - (found.vram_reserved_bytes or 0)
    return Emulation(found.name, found.vram_bytes, usable_bytes, found.link_gbps, back_gbps)


def require_memory(emulation: Emulation, device: torch.device) -> None:
    """Refuse a card with more memory than `device` has.

    Raises:
        DeviceError: It has.
    """
    if device.type == "cuda":
        there_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        there_bytes = psutil.virtual_memory().total
    if emulation.whole_vram_bytes > there_bytes:
        raise DeviceError(
            f"{emulation.name} cannot be emulated here: it has {format_bytes(emulation.whole_vram_bytes)} of device "
            f"memory and {device} has {format_bytes(there_bytes)}: emulate a smaller card"
        )


def require_link(emulation: Emulation, device: torch.device) -> None:
    """Measure the link of `device` in both directions and refuse a card whose link is faster.

    Takes 64 MiB on the device for a moment, and some 20 ms.

    Raises:
        DeviceError: It is faster.
    """
    there = measure_link_both_ways(device)
    pairs = (emulation.link_gbps, there[0], "to the device"), (emulation.link_back_gbps, there[1], "back to the host")
    for wanted_gbps, there_gbps, direction in pairs:
        if wanted_gbps > there_gbps * (1 + _LINK_TOLERANCE):
            raise DeviceError(
                f"{emulation.name} cannot be emulated here: its link carries {wanted_gbps:.3g} GB/s {direction} and "
                f"that of {device} was measured at {there_gbps:.3g} GB/s: emulate a card with a slower link"
            )


def measure_link_both_ways(device: torch.device, *, nbytes: int = _PROBE_BYTES) -> tuple[float, float]:
    """Peak of the link in GB/s to the device and back, as fast as it goes, with copies of `nbytes` bytes."""
    host = HostArena(nbytes, name="a measurement of the link")
    engine: CopyEngine = make_copy_engine(device)
    try:
        host.buffer.fill_(1)  # pages that were never touched are all one page of zeros
        if device.type == "cuda":
            host.pin()
        gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # what had this memory before may still be in use
        h2d_gbps = measure_link_gbps(engine, gpu, host.buffer[:nbytes])
        d2h_gbps = measure_link_gbps(engine, host.buffer[:nbytes], gpu)
    finally:
        engine.close()
        host.close()
    del gpu
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return h2d_gbps, d2h_gbps


def describe_emulation(emulation: Emulation, plan: RunPlan) -> str:
    """One phrase for the line that says what lives where."""
    unpaced = plan.verifier is not None and plan.target.on_host
    return (
        f"emulating {emulation.name}: link paced to {emulation.link_gbps:g} GB/s, {emulation.link_back_gbps:g} back"
        + (" (but not the gathers of retrieved chunks)" if unpaced else "")
    )


def describe_placement(model: LoadedModel, plan: RunPlan, budget: DeviceBudget) -> str:
    """One line: what is resident, what is streamed, through how many slots."""
    placement, streamed = model.placement, model.placement.num_streamed
    where = f"{len(placement.resident_layers)} of {placement.num_layers} layers resident"
    if streamed:
        nbytes = model.runner.streamer.bytes_per_pass
        where += f", {streamed} streamed ({format_bytes(nbytes)} a pass) through {placement.num_slots} slots"
    if placement.staged_layers or placement.staged_kv_layers:
        where += f"; {describe_staging(placement)}"
    limit = f" of {format_bytes(budget.limit_bytes)}" if budget.limit_bytes is not None else ""
    cache = describe_draft_cache(plan)
    return (
        f"{where}; {_describe_kv(plan.target)}; "
        f"{format_bytes(budget.reserved_bytes)}{limit} of device memory reserved{f'; {cache}' if cache else ''}"
    )


def _describe_kv(plan: ModelPlan) -> str:
    where = f"KV cache {format_bytes(plan.whole_kv_bytes)} for {plan.context_tokens} tokens"
    if not plan.on_host:
        return where
    kept = plan.placement.resident_kv_layers
    resident = f" but for {len(kept)} layers" if kept else ""
    return f"{where}, in host memory{resident} as it grows, {format_bytes(plan.kv_bytes)} of it on the device"


@dataclass(frozen=True)
class LoadedRuntime:
    """What a `Runtime` works with; it closes the models and the engine and releases the budget.

    `proposer` serves up to `batch` sequences at once, in `windows`; `placement` says in a line what lives where, and
    `plan` in bytes. `machine` is what is known of this one, and `emulated` the name of
    the one that it plays. `recorder` is told what the copy queues and steps of
    proposers do.
    """

    sources: assembly.Sources
    models: assembly.LoadedModels
    proposer: Proposer
    batch: int
    budget: DeviceBudget
    engine: CopyEngine
    windows: WindowLimits
    placement: str
    plan: RunPlan
    machine: MachineFigures | None
    emulated: str | None = None
    recorder: TraceRecorder | None = None


def load_runtime(
    config: RuntimeConfig, *, on_progress: assembly.LoadProgress | None = None,
    on_plan: Callable[[RunPlan], None] | None = None, check: Callable[[PromptRoom], object] | None = None,
) -> LoadedRuntime:  # fmt: skip
    """Open, plan, reserve and load. Arguments and errors as of `Runtime.load`."""
    kind, options = config.proposed_by, config.speculation
    max_gamma, batch, limit_bytes = config.max_gamma, config.max_batch, config.vram_bytes
    if config.trace is not None:
        require_writable(config.trace)
    emulation = None if config.emulate is None else emulation_of(config.emulate)
    profile = load_profile(config.profile) if isinstance(config.profile, str | Path) else config.profile
    chosen = resolve_device(config.device)
    # Before anything else touches the GPU: afterwards our own context would count as somebody else's memory.
    others = device_memory_used_by_others(chosen.index) if chosen.type == "cuda" else None
    assembly.require_kernels(chosen)
    page_locks = assembly.make_registrar(chosen) is not None
    limits = limits_here(config.ram_bytes, config.pinned_bytes, read_host_info(), page_locks=page_locks)
    if emulation is not None:
        require_memory(emulation, chosen)
        limit_bytes = emulation.limit_bytes(limit_bytes)
    with current_device(chosen):
        if options.mode == "none":
            kind = "none"
        sources = assembly.open_sources(config.target, config.draft if kind == "the draft" else None)
        budget = DeviceBudget(chosen, limit_bytes, other_bytes=others)

        torch_dtype = resolve_dtype(config.dtype, sources.target, chosen.type)
        require_dtype(torch_dtype, chosen)
        machine = known_figures(profile, chosen, torch_dtype)
        figures = _figures(machine, emulation)
        draft = config.draft if sources.draft is None else sources.draft
        request = replace(config, target=sources.target, draft=draft, device=chosen.type)
        limits = replace(limits, device_bytes=budget.limit_bytes, reserved_bytes=budget.reserved_bytes)
        plan = find_plan(request, figures, limits)
        if on_plan is not None:
            on_plan(plan)
        if check is not None:
            check(PromptRoom(sources.tokenizer, plan.target.config, plan.target.context_tokens))
        check_host_memory(plan)
        assembly.reserve_workspace(plan, budget)
        recorder = TraceRecorder(make_clock(chosen)) if config.trace is not None else None
        with _given_back_on_failure(budget) as on_failure:
            # A full collection looks through all that torch and transformers made when they were imported: 0.2 s, most
            # of a pass over streamed weights, and the many nodes of trees bring one about every few passes.
            gc.collect()
            gc.freeze()
            on_failure.callback(gc.unfreeze)
            if emulation is not None:
                require_link(emulation, chosen)
            pace_gbps = None if emulation is None else emulation.link_gbps
            h2d = _make_queue(budget.device, pace_gbps, recorder, LINK, on_failure)
            d2h = None
            if plan.target.on_host:
                pace_gbps = None if emulation is None else emulation.link_back_gbps
                d2h = _make_queue(budget.device, pace_gbps, recorder, LINK_BACK, on_failure)
            # Windows of n-grams, and what they add to chains, may branch without room for a draft's trees.
            branches = kind == "ngram" or ((kind != "none" or plan.verifier is not None) and config.tree_nodes != 0)
            queues = CopyQueues(h2d, d2h)
            models = assembly.load_models(sources, plan, budget, queues, on_progress=on_progress, trees=branches)
            on_failure.callback(models.target.close)
            on_failure.callback(models.target.engine.close)  # first: what may be copying goes before its memory
            link, link_gbps = LinkTimes(), models.target.link_peak_gbps
            if link_gbps is not None:
                link = LinkTimes(*link_times(plan, replace(figures, link_gbps=link_gbps), widest=max_gamma + 1))
            proposer = make_proposer(kind, models, plan.verifier, budget, batch=batch, recorder=recorder, link=link)
            windows = WindowLimits(
                max_gamma, max(max_gamma, plan.tree_room), gamma=config.gamma, tree_nodes=config.tree_nodes,
                tree_room=plan.tree_room,
                free=max(0, min(max_gamma, link.most_rows - 1)),
            )  # fmt: skip
            return LoadedRuntime(
                sources, models, proposer, batch, budget, models.target.engine,
                windows=windows,
                placement=f"{describe_placement(models.target, plan, budget)}; {describe_speculation(plan)}"
                + ("" if emulation is None else f"; {describe_emulation(emulation, plan)}"),
                plan=plan.with_placement(models.target.placement), machine=machine,
                emulated=None if emulation is None else emulation.name, recorder=recorder,
            )  # fmt: skip


def _figures(machine: MachineFigures | None, emulation: Emulation | None) -> MachineFigures:
    """What plans are compared by: the figures that are known, or common ones, with the link that is played."""
    figures = common_figures() if machine is None else machine
    return figures if emulation is None else replace(figures, link_gbps=emulation.link_gbps)


def _make_queue(
    device: torch.device, pace_gbps: float | None, recorder: TraceRecorder | None, row: str, on_failure: ExitStack
) -> CopyEngine:
    """A queue of copies one way, which is closed where loading fails. Arguments as of `make_copy_engine`."""
    log = None if recorder is None else CopyLog(recorder, row)
    engine = make_copy_engine(device, pace_gbps=pace_gbps, log=log)
    on_failure.callback(engine.close)
    return engine


@contextmanager
def _given_back_on_failure(budget: DeviceBudget) -> Iterator[ExitStack]:
    """Give the device memory back when loading fails, and first do what is put on the stack."""
    on_failure = ExitStack()
    on_failure.callback(budget.release)
    try:
        yield on_failure
    except BaseException as error:
        on_failure.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise BudgetError(
                f"the device memory allowed did not suffice ({error}): raise --vram or lower --context"
            ) from error
        raise
