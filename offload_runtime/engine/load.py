"""From a `RuntimeConfig` to a loaded runtime: open, plan, reserve, load.

Also the line about what was loaded: what is resident, what is streamed and how, what is reserved.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from threading import Lock

import torch
from offload_runtime_kernels._jit import triton_available

from offload_runtime import hardware
from offload_runtime.config import RuntimeConfig
from offload_runtime.engine.channels import has_channels
from offload_runtime.engine.engine import Engine, device_errors
from offload_runtime.engine.load_copies import load_copies
from offload_runtime.engine.load_hosts import check_request, load_first, serve_layers, share_layers
from offload_runtime.engine.load_model import LoadedModel, LoadProgress, OpenCard, capture_passes, load_models
from offload_runtime.engine.proposing import largest_windows, make_drafter
from offload_runtime.engine.request import PromptRoom
from offload_runtime.errors import BudgetError, DeviceError, OffloadError, OptionError
from offload_runtime.files import require_writable
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.hardware.bench import read_host_info
from offload_runtime.hosts.group import HostGroup, num_ranks, own_rank
from offload_runtime.hosts.shares import Shares
from offload_runtime.options import require
from offload_runtime.plan import cost, report, search
from offload_runtime.plan.sizes import (
    DTYPE_NAMES,
    PROCESS_BYTES,
    CardLimit,
    MemoryLimits,
    RunPlan,
    common_figures,
    resolve_dtype,
)
from offload_runtime.sampling import SlotSampling
from offload_runtime.sizes import format_bytes
from offload_runtime.speculation.controller import Controller
from offload_runtime.stream import arena
from offload_runtime.stream.copy_engine import CopyEngine, CopyQueues, LinkPace
from offload_runtime.stream.device import (
    DeviceBudget,
    current_device,
    device_memory_in_use,
    device_memory_used_by_others,
    reaches,
    resolve_device,
    resolve_devices,
    within,
)
from offload_runtime.stream.queue import make_copy_engine
from offload_runtime.trace import LINK, LINK_BACK, REMEDY, CopyLog, TraceRecorder
from offload_runtime.weights.checkpoint import CheckpointSource, share_vocabulary
from offload_runtime.weights.loader import MatricesNotCodable
from offload_runtime.weights.neighbours import FoundDraft, find_drafts
from offload_runtime.weights.sources import open_checkpoint, open_draft

# With these words torch begins the names of graphics cards.
_MAKERS = ("NVIDIA", "AMD", "Intel")
# Stays with the system and with other programs when nobody says how much may be taken.
_KEPT_SHARE, _MOST_KEPT_BYTES = 16, 2 << 30
_PLANNING = Lock()  # a card is planned for before the next one looks at what is left of it


def choose_devices(config: RuntimeConfig) -> list[torch.device]:
    """Return the devices of the cards that there may be: those of `resolve_devices`. Warns of GPUs of several kinds.
    Raises `DeviceError` where one is not there."""
    found = resolve_devices(config.devices)
    kinds = {torch.cuda.get_device_name(one) for one in found if one.type == "cuda"}
    if len(kinds) > 1:
        logging.getLogger(__name__).warning(
            "%s: GPUs of different kinds round differently, so that answers may differ from those of one card and with "
            "the layers that each has; name cards of one kind for the same bits",
            " and ".join(sorted(kinds)),
        )
    return found


def _known_figures(profile: MachineProfile | None, device: torch.device, dtype: torch.dtype) -> MachineProfile | None:
    """Return the machine to predict with: the profile given, or one that knows this GPU. Nothing is known of a CPU, of
    which figures of a graphics card say nothing.

    Raises:
        OptionError: The profile leaves out what is needed, or the target runs on a CPU and it is of a graphics card.
    """
    if profile is None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        return None if name is None else hardware.profile_of_gpu(name, DTYPE_NAMES[dtype])
    of_card = device.type == "cpu" and (profile.gpu_name or "").startswith(_MAKERS)
    remedy = "drop --profile, and nothing is predicted"
    require(not of_card, f"the figures of {profile.name} are of an {profile.gpu_name}, not of a CPU: {remedy}")
    profile.require_gpu().flops(DTYPE_NAMES[dtype])
    return profile


def planned_figures(plan: RunPlan) -> MachineProfile | None:
    """Return the machine to predict a run with before anything of it is measured, None where nothing is known of it;
    errors as of `Runtime.load`."""
    given = None if plan.request.profile is None else load_profile(plan.request.profile)
    return _known_figures(given, resolve_device(plan.request.devices[0]), plan.target.dtype)


def _limits_here(config: RuntimeConfig, *, page_locks: bool) -> MemoryLimits:
    """Return the host memory that a run may take of this machine; that of the device is known when it has been opened.
    `page_locks` says whether the device's copies need page-locked memory at all.

    Raises:
        BudgetError: More host memory is asked for than is available: it would end this process.
        OptionError: A limit of page-locked memory where there is none to lock.
    """
    host, pinned_bytes, pinned_name = read_host_info(), config.pinned, "--pinned"
    if pinned_bytes is not None and not page_locks:
        raise OptionError("--pinned does nothing on a CPU, where no memory is page-locked: drop it")
    # Python and the libraries have taken most of theirs by now.
    there_bytes = host.available_bytes + PROCESS_BYTES
    if config.ram is None:
        kept_bytes = min(host.ram_bytes // _KEPT_SHARE, _MOST_KEPT_BYTES, host.available_bytes)
        ram_bytes = there_bytes - kept_bytes
        ram_name = f"the available host memory ({format_bytes(kept_bytes)} stay with the system)"
    else:
        ram_name, whose = "--ram", "of host memory available here"
        ram_bytes = within(ram_name, config.ram, there_bytes, whose, "close other programs")
    if pinned_bytes is None and host.wsl and page_locks:  # Windows' driver locks about half of the virtual machine's
        pinned_bytes, pinned_name = host.ram_bytes // 2, "WSL"
    return MemoryLimits((), ram_bytes, ram_name, pinned_bytes, pinned_name, page_locks)


def describe_placement(model: LoadedModel, plan: RunPlan, budgets: Sequence[DeviceBudget]) -> str:
    """Return one line: what the plan says of itself, what the CPU computes, and what is reserved."""
    sizes = []
    for budget in budgets:
        limit = f" of {format_bytes(budget.limit_bytes)}" if budget.limit_bytes is not None else ""
        sizes.append(f"{format_bytes(budget.reserved_bytes)}{limit}")
    reserved = f"{' and '.join(sizes)} of {budgets[0].memory_name} reserved"
    return "; ".join(filter(None, [*report.describe_plan(plan), model.cpu.in_words, reserved]))


def load_runtime(
    config: RuntimeConfig, *, on_progress: LoadProgress | None = None,
    on_plan: Callable[[RunPlan], None] | None = None, check: Callable[[PromptRoom], object] | None = None,
) -> Engine:  # fmt: skip
    """Open, plan, reserve and load. Arguments and errors as of `Runtime.load`.

    Whether a matrix can be coded is known when it has been read: where some cannot, everything is planned and loaded
    once more.
    """
    if num_ranks(config.interface) == 1:
        return _load_here(config, on_progress=on_progress, on_plan=on_plan, check=check)
    require(own_rank() == 0, "the first rank alone answers: the others have layers for it (`serve_own_layers`)")
    load = partial(_load_here, on_progress=on_progress, check=check)
    return load_first(_share(config), load, on_plan)


def serve_own_layers(
    config: RuntimeConfig, *, say: Callable[[str], None], on_start: Callable[[HostGroup], None] | None = None
) -> None:
    """Have layers for the first of several ranks, of which this is another one, until that ends.

    Args:
        config: What was asked for here; the first rank's is what counts but for device and memory.
        say: Is told what lives where.
        on_start: Is given the group of the ranks once they have met.

    Raises:
        HostError: Another rank is gone.
        OffloadError: As of `Runtime.load`; the first rank's ends by the same.
    """
    shares = _share(config)
    if on_start is not None:
        on_start(shares.group)
    try:
        serve_layers(shares, partial(_load_here, on_progress=None, check=None), say)
    except OffloadError as error:
        shares.group.say_end(str(error))
        raise
    finally:
        shares.group.close()


def _share(config: RuntimeConfig) -> Shares:
    """Meet the other ranks. Raises as `share_layers`."""
    config = check_request(config)
    profile = None if config.profile is None else load_profile(config.profile)
    return share_layers(config, _opened(config.target), partial(_known_figures, profile))


def _load_here(
    config: RuntimeConfig, *, on_progress: LoadProgress | None, on_plan: Callable[[RunPlan], None] | None,
    check: Callable[[PromptRoom], object] | None, in_use: Mapping[str, int] | None = None,
) -> Engine:  # fmt: skip
    """Load what is on this machine; `in_use` as of `device_memory_in_use`, where that was asked before."""
    load = partial(_load, on_progress=on_progress, on_plan=on_plan, check=check, in_use=in_use)
    try:
        return load(config)
    except MatricesNotCodable as error:
        uncoded = error.names  # and not the error, whose frames hold what was loaded
    source = _opened(config.target)
    return load(replace(config, target=replace(source, uncoded=source.uncoded | uncoded)))


def _opened(model: str | Path | CheckpointSource) -> CheckpointSource:
    """Open a checkpoint, and read everything that can be wrong about it, short of tokenizer and weights."""
    return open_checkpoint(model) if isinstance(model, str | Path) else model


def _opened_draft(config: RuntimeConfig, target: CheckpointSource, name: object) -> CheckpointSource | None:
    """Open the draft that a user has named beside a target of this name; None where that is none."""
    if config.proposed_by != "the draft" or config.drafts_itself:
        return None
    found = open_draft(config.draft, target, open_checkpoint, name)
    assert isinstance(found, CheckpointSource), "what a checkpoint carries is read as it is"
    return found


def _load(
    config: RuntimeConfig, *, on_progress: LoadProgress | None, on_plan: Callable[[RunPlan], None] | None,
    check: Callable[[PromptRoom], object] | None, in_use: Mapping[str, int] | None,
) -> Engine:  # fmt: skip
    """Raises `MatricesNotCodable` for what the plan codes and cannot be."""
    if config.trace is not None:
        require_writable(config.trace, remedy=REMEDY)
    profile = None if config.profile is None else load_profile(config.profile)
    # Before anything else touches the GPUs: afterwards our own context would count as somebody else's memory.
    if in_use is None:
        in_use = {} if config.devices[0] == "cpu" else device_memory_in_use()
    devices = choose_devices(config)
    device = devices[0]
    if device.type == "cuda" and not triton_available:
        raise DeviceError("the GPU kernels need Triton, which is not installed: pip install triton, or --device cpu")
    registrar = arena.registrar_for(device)
    limits = _limits_here(config, page_locks=registrar is not None)
    limits_bytes = config.vram_of_cards(len(devices))
    twice = device.type == "cuda" and len({*devices}) < len(devices) and None in limits_bytes
    require(not twice, f"device {config.device!r} names a GPU twice: say with --vram what each of the two may take")
    with device_errors(device), ExitStack() as undo:
        name, target_source = getattr(config.target, "reference", config.target), _opened(config.target)
        draft_source = _opened_draft(config, target_source, name)
        drafts = find_drafts(name, target_source, open_checkpoint) if config.finds_draft else None
        with ThreadPoolExecutor(1, "tokenizer") as pool, _PLANNING:
            # While a CUDA context is made: 128,000 tokens take 0.3 s, and what is imported for them another 0.5.
            reading = pool.submit(target_source.tokenizer)
            comparing = None if draft_source is None else pool.submit(share_vocabulary, target_source, draft_source)
            dtype = resolve_dtype(config.dtype, target_source, device.type)
            for one in devices:
                too_old = one.type == "cuda" and torch.cuda.get_device_capability(one) < (8, 0)
                if too_old and dtype == torch.bfloat16:
                    name_of_gpu = torch.cuda.get_device_name(one)
                    raise DeviceError(f"{name_of_gpu} does not compute in bf16: use --dtype fp16")
            own_figures = _known_figures(profile, device, dtype)
            figures = own_figures or common_figures()  # what plans are compared by
            draft = draft_source or config.drafter
            others = [
                device_memory_used_by_others(one.index, in_use) if one.type == "cuda" else None for one in devices
            ]
            cards = list(zip(devices, limits_bytes, others, strict=True))
            request = replace(config, target=target_source, draft=draft)
            plan, budgets = _plan_cards(request, figures, limits, cards, drafts, undo)
        tokenizer, shared = reading.result(), None if comparing is None else comparing.result()
        room = PromptRoom(
            tokenizer, plan.target.config, plan.target.context_tokens, config.allow_special_tokens,
            target_source.generation_fields, frozenset(target_source.generation_eos(tokenizer)),
            has_channels(tokenizer),
        )  # fmt: skip
        for found in drafts or ():
            if isinstance(found.model, CheckpointSource) and found.model is plan.request.draft:
                draft_source, shared = found.model, found.shared
        if on_plan is not None:
            on_plan(plan)
        if check is not None:
            check(room)
        with _with_remedies(plan.request, figures, plan.limits, budgets):
            search.check_host_memory(plan)
        undo.callback(gc.collect)  # before the budget's end, so that nothing is left of a runtime that is closed
        # A full collection looks through all that torch and transformers made when they were imported: 0.2 s, most
        # of a pass over streamed weights, and the many nodes of trees bring one about every few passes.
        gc.collect()
        gc.freeze()
        undo.callback(gc.unfreeze)
        recorder = TraceRecorder(device) if config.trace is not None else None
        recorders = [recorder and recorder.of_card(number, one.device) for number, one in enumerate(budgets)]
        open_cards = list[OpenCard]()
        for budget, own, log in zip(budgets, plan.cards, recorders, strict=True):
            budget.reserve("workspace", own.workspace_bytes)
            if graph_bytes := own.graph_bytes + own.captured_bytes:
                budget.reserve("CUDA graphs", graph_bytes)
            if own.hidden_bytes:
                budget.reserve("hidden states for the draft", own.hidden_bytes)
            with current_device(budget.device):  # what paces a copy is launched once
                d2h, demand = plan.target.on_host, bool(own.target.host_experts)
                queues = _make_queues(budget.device, config.pace, log, undo, d2h=d2h, demand=demand)
            open_cards.append(OpenCard(budget, queues))
        # Windows of n-grams, and what they add to chains, may branch without room for a draft's trees.
        proposes = plan.drafter != "none" or plan.has_verifier
        branches = plan.drafter == "ngram" or (proposes and config.tree_nodes != 0)
        target, loaded_draft = load_models(
            target_source, draft_source, plan, open_cards, shared=shared, registrar=registrar, on_progress=on_progress,
            undo=undo,
        )  # fmt: skip
        if plan.draft is not None and plan.draft.is_copy:
            target = load_copies(target_source, target, open_cards, on_progress=on_progress)
        free_s, free_rows, batch = 0.0, 0, plan.target.batch
        if target.link_peak_gbps is not None:  # of what is streamed, or of experts
            pairs = zip(plan.cards, target.cards, strict=True)
            links = sum(card.limits.cards[0].link_ratio for card, one in pairs if one.link_peak_gbps is not None)
            figures = replace(figures, link_gbps=target.link_peak_gbps / links)
            free_s, free_rows = cost.link_slack(plan, figures, widest=config.max_gamma + 1)
        drafter = make_drafter(
            plan, target, loaded_draft, budgets, trees=branches, recorder=recorder, free_s=free_s, free_rows=free_rows
        )  # fmt: skip
        free, demand = max(0, min(config.max_gamma, free_rows - 1)), plan.target.pool_share < 1
        largest = largest_windows(config.max_gamma, plan.tree_room, brings_experts=demand)
        sampling = SlotSampling(batch, device)
        if target.runner.captured is not None:
            widest = 1 if plan.drafter == "none" else 1 + max(largest.values(), default=0)
            capture_passes(target.runner, sampling, widest=widest, trees=branches)
        for card in target.cards:
            if card.pool is not None:
                card.pool.reset_counts()
        placed = replace(plan, target=target.plan)
        # Without figures of this machine plans are only compared.
        # Nor are they those of several.
        is_known = own_figures is not None and not plan.target.config.is_part
        known_cost = None if not is_known else partial(cost.predicted_step_s, placed, figures)
        target.runner.recorder = recorder
        target.runner.streamer.recorders = recorders
        return Engine(
            target, loaded_draft, room, drafter, sampling, tuple(budgets), free,
            controller=Controller(
                largest, known_cost, streamed=target.link_peak_gbps is not None and not demand
            ),
            plan=placed, cost=known_cost,
            recorder=recorder, resources=undo.pop_all(),
        )  # fmt: skip


def _plan_cards(
    request: RuntimeConfig, figures: MachineProfile, limits: MemoryLimits,
    cards: Sequence[tuple[torch.device, int | None, int | None]], drafts: Sequence[FoundDraft] | None, undo: ExitStack,
) -> tuple[RunPlan, list[DeviceBudget]]:  # fmt: skip
    """Open the cards and plan for them: for all, or where nobody has named them for as many as help; with whoever
    drafts fastest, of the `drafts` that were found and n-grams, unless that is None. Gives the plan and the ledgers of
    its cards, which `undo` closes.

    `cards` has of each its device, most of its memory that the run may take (None: all that is free), and what others
    have of it (None: not known).

    Raises:
        BudgetError, OptionError: As of `find_plan`.
    """
    budgets = list[DeviceBudget]()
    ratios = figures.link_ratios([str(device) for device, *_ in cards])

    def planned(count: int) -> RunPlan:
        for device, limit_bytes, other_bytes in cards[len(budgets) : count]:
            with device_errors(device):
                budgets.append(DeviceBudget(device, limit_bytes, other_bytes=other_bytes))
            undo.callback(budgets[-1].release)
            budgets[-1].planned_bytes = limit_bytes or 0  # until it is planned: a GPU may be named twice
        devices, sizes = {budget.device for budget in budgets[:count]}, request.vram
        if isinstance(sizes, tuple):
            sizes = sizes[:count] if count > 1 else sizes[0]
        limited = zip(budgets[:count], ratios, strict=False)
        own = replace(
            limits, device_name=budgets[0].memory_name,
            cards=tuple(CardLimit(one.limit_bytes, one.reserved_bytes, ratio) for one, ratio in limited),
            transfers_through_host=any(not reaches(one, other) for one, other in permutations(devices, 2)),
        )  # fmt: skip
        asked = replace(request, device=",".join([budgets[0].device.type] * count), vram=sizes)
        may_grow = is_open and count < len(cards)  # a further card may have room
        with nullcontext() if may_grow else _with_remedies(asked, figures, own, budgets[:count]):
            if drafts is None:
                return search.find_plan(asked, figures, own)
            return report.plan_fastest_draft(asked, drafts, lambda one: search.find_plan(one, figures, own), figures)

    is_open = request.device == "auto"
    plan = search.as_many_cards_as_help(planned, len(cards), figures) if is_open else planned(len(cards))
    for number, budget in enumerate(budgets):
        if number < plan.num_cards:
            budget.planned_bytes = plan.cards[number].device_bytes
        else:
            budget.release()
    return plan, budgets[: plan.num_cards]


@contextmanager
def _with_remedies(
    request: RuntimeConfig, figures: MachineProfile, limits: MemoryLimits, budgets: Sequence[DeviceBudget]
) -> Iterator[None]:
    """Add to a `BudgetError` from within what would fit in place of the request, and what else holds memory of these
    cards where all that is free is too little."""
    try:
        yield
    except BudgetError as error:
        close = "; ".join(filter(None, (budget.what_to_close() for budget in budgets))) if request.vram is None else ""
        vram_bytes = max((one.available_bytes or 0 for one in budgets), default=0) or figures.vram_bytes
        there = replace(
            figures, ram_bytes=read_host_info().ram_bytes, pinnable_bytes=None, vram_bytes=vram_bytes,
            vram_others_bytes=None, vram_reserved_bytes=None,
        )  # fmt: skip
        refused = report.refusal(error, request, there, limits)
        raise refused.error(close if "device memory" in refused.short_bytes else "") from error


def _make_queues(
    device: torch.device, pace: Callable[[torch.device], tuple[LinkPace, LinkPace]] | None,
    recorder: TraceRecorder | None, undo: ExitStack, *, d2h: bool, demand: bool,
) -> CopyQueues:  # fmt: skip
    """Return the copy queues, each at the pace that the configuration asks for and logged to a trace; `d2h` says
    whether one leads to the host, and `demand` whether there is one for experts. `undo` closes them."""

    def make(row: str, pace: LinkPace | None) -> CopyEngine:
        engine = make_copy_engine(device, pace=pace, log=None if recorder is None else CopyLog(recorder, row))
        undo.callback(engine.close)
        return engine

    there, back = (None, None) if pace is None else pace(device)
    asked = None if pace is None or not demand else pace(device)[0]
    return CopyQueues(
        make(LINK, there), make(LINK_BACK, back) if d2h else None, make(LINK, asked) if demand else None, asked
    )  # fmt: skip
