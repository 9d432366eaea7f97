"""From a `RuntimeConfig` to a loaded runtime: open, plan, reserve, load; on a machine that plays another one, too.

Also the line about what was loaded: what is resident, what is streamed and how, what is reserved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

import psutil
import torch

from offload_runtime import plan as planning
from offload_runtime.config import RuntimeConfig, format_bytes
from offload_runtime.copy import CopyEngine, CopyQueues, make_copy_engine, measure_link_gbps
from offload_runtime.engine import load_model as assembly
from offload_runtime.engine.build_proposer import make_proposer
from offload_runtime.engine.generate import device_errors
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.engine.request import PromptRoom
from offload_runtime.engine.steps import RuntimeParts, WindowLimits
from offload_runtime.errors import DeviceError
from offload_runtime.hardware import Emulation, load_profile
from offload_runtime.hardware.host_bench import read_host_info
from offload_runtime.memory import DeviceBudget, HostArena, Registrar, device_memory_used_by_others, resolve_device
from offload_runtime.plan import MachineFigures, ModelPlan, RunPlan
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import Choice, Controller
from offload_runtime.trace import LINK, LINK_BACK, CopyLog, TraceRecorder, require_writable
from offload_runtime.weights import MatricesNotCodable, open_checkpoint

# Of the link's peak is measured that much too little at times; pacing is no better than that either.
_LINK_TOLERANCE = 0.02
_PROBE_BYTES = 64 << 20
_PLANNING = Lock()  # a card is planned for before the next one looks at what is left of it


def require_memory(emulation: Emulation, device: torch.device) -> None:
    """Refuse a card with more memory than `device` has.

    Raises:
        DeviceError: It has.
    """
    on_gpu = device.type == "cuda"
    there_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    if emulation.whole_vram_bytes > there_bytes:
        sizes = format_bytes(emulation.whole_vram_bytes), format_bytes(there_bytes)
        why = f"it has {sizes[0]} of device memory and {device} has {sizes[1]}"
        raise DeviceError(f"{emulation.name} cannot be emulated here: {why}: emulate a smaller card")


def require_link(emulation: Emulation, device: torch.device) -> None:
    """Measure the link of `device` in both directions and refuse a card whose link is faster.

    Takes 64 MiB on the device for a moment, and some 20 ms.

    Raises:
        DeviceError: It is faster.
    """
    wanted = (emulation.link_gbps, emulation.link_back_gbps)
    ways = zip(wanted, measure_link_both_ways(device), ("to the device", "back to the host"), strict=True)
    for wanted_gbps, there_gbps, direction in ways:
        if wanted_gbps > there_gbps * (1 + _LINK_TOLERANCE):
            why = f"its link carries {wanted_gbps:.3g} GB/s {direction} and that of {device} {there_gbps:.3g}"
            raise DeviceError(f"{emulation.name} cannot be emulated here: {why}: emulate a card with a slower link")


def measure_link_both_ways(device: torch.device, *, nbytes: int = _PROBE_BYTES) -> tuple[float, float]:
    """Peak of the link in GB/s to the device and back, as fast as it goes, with copies of `nbytes` bytes."""
    arena = HostArena(nbytes, name="a measurement of the link")
    with closing(arena) as host, closing(make_copy_engine(device)) as engine:
        host.buffer.fill_(1)  # pages that were never touched are all one page of zeros
        gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            host.pin()
            torch.cuda.current_stream(device).synchronize()  # what had this memory before may still be in use
        h2d_gbps = measure_link_gbps(engine, gpu, host.buffer[:nbytes])
        d2h_gbps = measure_link_gbps(engine, host.buffer[:nbytes], gpu)
    del gpu
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return h2d_gbps, d2h_gbps


def planned_figures(plan: RunPlan) -> MachineFigures | None:
    """The figures to predict a run with before anything of it is measured; errors as of `Runtime.load`.

    Returns:
        None where nothing is known of the machine. Of one that is played it is the link alone: what computes stays as
        fast as it is.
    """
    asked = plan.request
    given = None if asked.profile is None else load_profile(asked.profile)
    machine = planning.known_figures(given, resolve_device(asked.device), plan.target.dtype)
    if machine is None or asked.emulate is None:
        return machine
    return replace(machine, link_gbps=load_profile(asked.emulate).emulation().link_gbps)


def describe_placement(model: LoadedModel, plan: RunPlan, budget: DeviceBudget, emulation: Emulation | None) -> str:
    """One line: what is resident, what is streamed and how, what is reserved, who drafts, and what is emulated."""
    placement, streamed = model.placement, len(model.placement.streamed_layers)
    where = f"{len(placement.resident_layers)} of {placement.num_layers} layers resident"
    if streamed:
        nbytes = model.runner.streamer.bytes_per_pass
        where += f", {streamed} streamed ({format_bytes(nbytes)} a pass) through {placement.num_slots} slots"
    limit = f" of {format_bytes(budget.limit_bytes)}" if budget.limit_bytes is not None else ""
    reserved = f"{format_bytes(budget.reserved_bytes)}{limit} of {budget.memory_name} reserved"
    drafts = planning.describe_draft_cache(plan), planning.describe_speculation(plan)
    parts = [where, planning.describe_staging(placement), _describe_kv(plan.target), reserved, *drafts]
    if emulation is not None:
        unpaced = " (but not the gathers of retrieved chunks)" if plan.has_verifier and plan.target.on_host else ""
        pace = f"{emulation.link_gbps:g} GB/s, {emulation.link_back_gbps:g} back"
        parts.append(f"emulating {emulation.name}: link paced to {pace}{unpaced}")
    return "; ".join(part for part in parts if part)


def _describe_kv(plan: ModelPlan) -> str:
    where = f"KV cache {format_bytes(plan.whole_kv_bytes)} for {plan.context_tokens} tokens"
    if not plan.on_host:
        return where
    kept = plan.placement.resident_kv_layers
    resident = f" but for {len(kept)} layers" if kept else ""
    return f"{where}, in host memory{resident} as it grows, {format_bytes(plan.kv_bytes)} of it on the device"


def load_runtime(
    config: RuntimeConfig, *, on_progress: assembly.LoadProgress | None = None,
    on_plan: Callable[[RunPlan], None] | None = None, check: Callable[[PromptRoom], object] | None = None,
    registrar: Registrar | None = None, find: Callable[..., RunPlan] = planning.find_plan,
) -> RuntimeParts:  # fmt: skip
    """Open, plan, reserve and load. Arguments and errors as of `Runtime.load`.

    `registrar` page-locks in place of the system, which may lock less, and `find` makes the plan. Whether a matrix can
    be coded is known when it has been read: where some cannot, everything is planned and loaded once more.
    """
    load = partial(_load, on_progress=on_progress, on_plan=on_plan, check=check, registrar=registrar, find=find)
    try:
        return load(config)
    except MatricesNotCodable as error:
        uncoded = error.names  # and not the error, whose frames hold what was loaded
    source = open_checkpoint(config.target) if isinstance(config.target, str | Path) else config.target
    return load(replace(config, target=replace(source, uncoded=source.uncoded | uncoded)))


def _load(
    config: RuntimeConfig, *, on_progress: assembly.LoadProgress | None, on_plan: Callable[[RunPlan], None] | None,
    check: Callable[[PromptRoom], object] | None, registrar: Registrar | None, find: Callable[..., RunPlan],
) -> RuntimeParts:  # fmt: skip
    """Raises `MatricesNotCodable` for what the plan codes and cannot be."""
    if config.trace is not None:
        require_writable(config.trace)
    emulation = None if config.emulate is None else load_profile(config.emulate).emulation()
    profile = None if config.profile is None else load_profile(config.profile)
    device = resolve_device(config.device)
    # Before anything else touches the GPU: afterwards our own context would count as somebody else's memory.
    others = device_memory_used_by_others(device.index) if device.type == "cuda" else None
    assembly.require_kernels(device)
    # A CPU reads any memory as fast.
    registrar = registrar or (Registrar() if device.type == "cuda" else None)
    locks = registrar is not None
    limits = planning.limits_here(config.ram_bytes, config.pinned_bytes, read_host_info(), page_locks=locks)
    (limit_bytes,) = config.vram_of_cards(1)
    if emulation is not None:
        require_memory(emulation, device)
        whose, other = f"of an emulated {emulation.name}", "emulate a larger card"
        limit_bytes = planning.within("--vram", limit_bytes, emulation.vram_bytes, whose, other)
    with device_errors(device), ExitStack() as undo:
        draft_model = config.draft if config.proposed_by == "the draft" else None
        target_source, draft_source = assembly.open_sources(config.target, draft_model)
        eos_token_ids = frozenset(target_source.generation_eos())
        with ThreadPoolExecutor(1, "tokenizer") as pool, _PLANNING:
            # While a CUDA context is made: 128,000 tokens take 0.3 s, and what is imported for them another 0.5.
            reading = pool.submit(assembly.read_tokenizer, target_source, draft_source)
            budget = DeviceBudget(device, limit_bytes, other_bytes=others)
            undo.callback(budget.release)
            dtype = planning.resolve_dtype(config.dtype, target_source, device.type)
            planning.require_dtype(dtype, device)
            own_figures = planning.known_figures(profile, device, dtype)
            figures = planning.common_figures() if own_figures is None else own_figures  # what plans are compared by
            if emulation is not None:
                figures = replace(figures, link_gbps=emulation.link_gbps)
            draft = config.draft if draft_source is None else draft_source
            request = replace(config, target=target_source, draft=draft, device=device.type)
            limits = replace(limits, device_name=budget.memory_name, device_way=budget.way_out)
            limits = replace(limits, device_bytes=budget.limit_bytes, reserved_bytes=budget.reserved_bytes)
            plan = find(request, figures, limits)
            budget.planned_bytes = plan.device_bytes
        tokenizer = reading.result()
        if on_plan is not None:
            on_plan(plan)
        if check is not None:
            model = plan.target
            check(PromptRoom(tokenizer, model.config, model.context_tokens, config.allow_special_tokens))
        planning.check_host_memory(plan)
        budget.reserve("workspace", plan.workspace_bytes)
        if graph_bytes := plan.graph_bytes + plan.captured_bytes:
            budget.reserve("CUDA graphs", graph_bytes)
        undo.callback(gc.collect)  # before the budget's end, so that nothing is left of a runtime that is closed
        # A full collection looks through all that torch and transformers made when they were imported: 0.2 s, most
        # of a pass over streamed weights, and the many nodes of trees bring one about every few passes.
        gc.collect()
        gc.freeze()
        undo.callback(gc.unfreeze)
        if emulation is not None:
            require_link(emulation, device)
        recorder = TraceRecorder(device) if config.trace is not None else None
        queues = _make_queues(device, emulation, recorder, undo, d2h=plan.target.on_host)
        # Windows of n-grams, and what they add to chains, may branch without room for a draft's trees.
        proposes = plan.proposer != "none" or plan.has_verifier
        branches = plan.proposer == "ngram" or (proposes and config.tree_nodes != 0)
        target, drafter = assembly.load_models(
            target_source, draft_source, plan, budget, queues, registrar=registrar, on_progress=on_progress,
            trees=branches, undo=undo,
        )  # fmt: skip
        free_s, free_rows, batch = 0.0, 0, config.max_batch
        if target.link_peak_gbps is not None:
            figures = replace(figures, link_gbps=target.link_peak_gbps)
            free_s, free_rows = planning.link_slack(plan, figures, widest=config.max_gamma + 1)
        proposer = make_proposer(plan, target, drafter, budget, recorder=recorder, free_s=free_s, free_rows=free_rows)
        free = max(0, min(config.max_gamma, free_rows - 1))
        windows = WindowLimits(config.max_gamma, config.gamma, config.tree_nodes, plan.tree_room, free)
        placed = plan.with_placement(target.placement)

        def cost(choice: Choice, num_sequences: int, length_tokens: int) -> float:
            return planning.predicted_step_s(
                placed, figures, proposals=choice.size, drafted=choice.drafts, in_tree=choice.mode == "tree",
                num_sequences=num_sequences, length_tokens=length_tokens,
            )  # fmt: skip

        known_cost = None if own_figures is None else cost  # without figures of this machine only plans are compared
        target.runner.recorder = target.runner.streamer.recorder = recorder
        return RuntimeParts(
            target, drafter, tokenizer, eos_token_ids, proposer, SlotSampling(batch, device), budget, windows,
            controller=Controller(windows.by_mode, known_cost, streamed=target.link_peak_gbps is not None),
            plan=placed, cost=known_cost, placement=describe_placement(target, plan, budget, emulation),
            emulated=None if emulation is None else emulation.name,
            recorder=recorder, resources=undo.pop_all(),
        )  # fmt: skip


def _make_queues(
    device: torch.device, emulation: Emulation | None, recorder: TraceRecorder | None, undo: ExitStack, *, d2h: bool
) -> CopyQueues:
    """The copy queues, paced as the link that is played and logged to a trace; `d2h` says whether one leads to the
    host. `undo` closes them."""

    def make(pace_gbps: float | None, row: str) -> CopyEngine:
        log = None if recorder is None else CopyLog(recorder, row)
        engine = make_copy_engine(device, pace_gbps=pace_gbps, log=log)
        undo.callback(engine.close)
        return engine

    h2d = make(None if emulation is None else emulation.link_gbps, LINK)
    return CopyQueues(h2d, make(None if emulation is None else emulation.link_back_gbps, LINK_BACK) if d2h else None)
