"""A model whose layers several machines share: what each says of itself, who gets which layers, and how both the first
rank and the others load theirs.

The first rank plans as if its own layers were all of the model, and what is the same for all is what it has planned:
context, requests at once, rows of a window. Each of the others plans its layers with its own memory. Where the first
one's are streamed it plans again, if all are predicted to be faster in strides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import offload_runtime_kernels
import torch

from offload_runtime.config import RuntimeConfig
from offload_runtime.engine.engine import Engine
from offload_runtime.errors import HostError, OffloadError
from offload_runtime.hardware import MachineProfile
from offload_runtime.hardware.bench import read_host_info
from offload_runtime.hosts.group import HostGroup, own_card
from offload_runtime.hosts.link import DONE, FAILED, LOAD, Link, Orders
from offload_runtime.hosts.measure import answer_echoes, round_trip_s
from offload_runtime.hosts.shares import Shares, require_same
from offload_runtime.hosts.stage import RemoteStage, error_text, serve_passes, streams_for
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.part import PartConfig, in_words
from offload_runtime.options import require
from offload_runtime.plan import cost
from offload_runtime.plan.hosts import (
    LayerRoom,
    best_strides,
    deal,
    links_of,
    pass_seconds,
    request_of_stage,
    shared_request,
    sizes_behind,
    sizes_of,
    usual_rows,
)
from offload_runtime.plan.sizes import DTYPE_NAMES, RunPlan, common_figures, resolve_dtype
from offload_runtime.sizes import counted
from offload_runtime.stream.device import device_memory_in_use, resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.sources import open_checkpoint, open_draft

# What has to be the same in all ranks for the bits of one machine, and what it is called.
_SAME = {
    "version": "version of offload-runtime", "torch": "version of torch", "device": "device",
    "dtype": "element type (--dtype)", "model": "file of the target",
}  # fmt: skip


class _DealAgain(Exception):
    """Ends loading before anything is read: the layers of all ranks are to be dealt out anew, in so many `strides`."""

    def __init__(self, strides: int) -> None:
        super().__init__()
        self.strides = strides


class LoadPart(Protocol):
    """Loads a runtime of what a configuration asks for; `in_use` as of `device_memory_in_use`."""

    def __call__(
        self, config: RuntimeConfig, *, on_plan: Callable[[RunPlan], None] | None, in_use: Mapping[str, int]
    ) -> Engine: ...


def check_request(config: RuntimeConfig) -> RuntimeConfig:
    """Refuse what ranks do not do together, before anything is opened; return the configuration of this one.

    Raises:
        OptionError: As it says.
    """
    return replace(shared_request(config), device=own_card(config.device))


def _check_model(config: ModelConfig, ranks: int) -> None:
    """Refuse more ranks than there are layers. Raises `OptionError`."""
    many = f"{ranks} ranks share {counted(config.num_layers, 'layer')}"
    require(config.num_layers >= ranks, f"{many}, and each needs one: start fewer")


def _check_shares(config: ModelConfig, dealt: Sequence[Sequence[int]], group: HostGroup) -> None:
    """Refuse shares of a hybrid's layers that are not models by themselves. Raises `OptionError`."""
    deltas, first = config.deltas, dealt[0]
    has_states = not deltas or min(deltas) in first
    require(has_states, f"layer {min(deltas, default=0)} has states, and rank 0 ends before: give it more memory")
    for rank, own in enumerate(dealt):
        what = f"{group.name(rank)} has layers {in_words(own)}, all of which have states alone"
        remedy = "give it more memory, or start fewer ranks"
        require(not config.attentions.keys().isdisjoint(own), f"{what}, and needs one with keys and values: {remedy}")


def share_layers(
    config: RuntimeConfig, source: CheckpointSource,
    known_figures: Callable[[torch.device, torch.dtype], MachineProfile | None],
) -> Shares:  # fmt: skip
    """Meet the other ranks, and deal the layers out by what each has free and how fast its link is.

    Args:
        config: As of `check_request`.
        source: The opened target, of which this rank has its own copy.
        known_figures: Returns those of this machine, None where nothing is known of it; errors as of `Runtime.load`.

    Raises:
        HostError: They cannot be reached, or one has ended.
        OptionError: What has to be the same differs; or the model is of a kind that they do not share.
    """
    in_use = {} if config.device_type == "cpu" else device_memory_in_use()
    device = resolve_device(config.device)
    group = HostGroup(config.interface, config.host_timeout_s)
    try:
        _check_model(source.config(), group.size)
        dtype = resolve_dtype(config.dtype, source, config.device_type)
        figures = known_figures(device, dtype)
        taken_bytes = 0 if group.rank else _first_bytes(config, source, dtype)
        facts = group.exchange(
            {
                "version": _code(),
                "torch": torch.__version__,
                "device": _device_name(device),
                "dtype": DTYPE_NAMES[dtype],
                "model": source.fingerprint,
                "ram_bytes": config.ram or read_host_info().available_bytes,
                "free_bytes": max(0, _free_bytes(config, device, in_use) - taken_bytes),
                "link_gbps": None if figures is None else figures.link_gbps,
            }
        )
        require_same(facts, _SAME)
        rooms = [LayerRoom(one["free_bytes"], one["ram_bytes"], one["link_gbps"]) for one in facts]
        dealt = partial(deal, source.layout(dtype).layer_bytes, rooms)
        _check_shares(source.config(), dealt(1), group)
    except BaseException as error:
        group.say_end(str(error) or type(error).__name__)
        group.close()
        raise
    return Shares(group, source, config, in_use, figures, facts, dealt).in_strides(1)


def _code() -> str:
    """Return what tells this version of the program, kernels included, from every other one."""
    found = hashlib.blake2b(digest_size=8)
    for folder in (Path(__file__).parents[1], Path(offload_runtime_kernels.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _device_name(device: torch.device) -> str:
    """Return the type of a device by which its bits are told."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"


def _first_bytes(config: RuntimeConfig, source: CheckpointSource, dtype: torch.dtype) -> int:
    """Return the bytes of weights that the first rank has besides layers: what lies around these, and a draft."""
    layout = source.layout(dtype)
    named = config.proposed_by == "the draft"
    draft = open_draft(config.draft, source, open_checkpoint, config.target) if named else None
    draft_bytes = 0 if draft is None else draft.layout(dtype).total_bytes
    return layout.shared.total_bytes + layout.embedding.total_bytes + draft_bytes


def _free_bytes(config: RuntimeConfig, device: torch.device, in_use: Mapping[str, int]) -> int:
    """Return the memory that a rank may take for its layers: of its card, or of a CPU of the host."""
    if device.type == "cpu":
        return config.ram or read_host_info().available_bytes
    (limit_bytes,) = config.vram_of_cards(1)
    if limit_bytes is not None:
        return limit_bytes
    about = torch.cuda.get_device_properties(device)
    return int(about.total_memory) - in_use.get(f"GPU-{about.uuid}", 0)


def load_first(shares: Shares, load: LoadPart, on_plan: Callable[[RunPlan], None] | None) -> Engine:
    """Load the first rank's layers while the others load theirs. Closing the engine's resources ends them.

    Raises:
        HostError: Another rank has ended, or its layers do not fit there.
        OffloadError: As of `load_runtime`; the others then end as well.
    """
    group, orders = shares.group, Orders(Link(shares.group, 1, shares.group.timeout_s))
    try:
        try:
            engine = _load_before(shares, load, orders, on_plan)
        except _DealAgain as again:
            shares = shares.in_strides(again.strides)
            engine = _load_before(shares, load, orders, on_plan)
    except BaseException as error:
        group.say_end(f"it could not load its layers ({error})" if isinstance(error, OffloadError) else "stopped")
        orders.close()
        group.close()
        raise
    RemoteStage(orders, engine.target.runner)
    engine.resources.callback(group.close)
    engine.resources.callback(orders.close)
    engine.shares = shares
    return engine


def _load_before(
    shares: Shares, load: LoadPart, orders: Orders, on_plan: Callable[[RunPlan], None] | None,
    order: Mapping[str, Any] | None = None,
) -> Engine:  # fmt: skip
    """Load a rank's layers, and let the ranks behind do so, as soon as these are planned; wait for them, too. The
    `order` is the first rank's; None: this is the first, and makes it. Raises `_DealAgain` where that has planned
    consecutive layers, and all are predicted to be faster in strides."""
    first_plan = dict[str, Any]()

    def planned(plan: RunPlan) -> None:
        own = order or sizes_of(plan)
        if not first_plan:  # and not planned again, without what cannot be coded
            is_open = order is None and shares.strides == 1
            if is_open and (strides := _best_strides(shares, orders, plan)) > 1:
                raise _DealAgain(strides)
            first_plan.update(own)
            orders.ask(LOAD, sizes_behind(own, plan.target.config))
        assert first_plan == own
        if on_plan is not None:
            on_plan(plan)

    engine = load(shares.config, on_plan=planned, in_use=shares.in_use)
    orders.next_answer()
    return engine


def _best_strides(shares: Shares, orders: Orders, plan: RunPlan) -> int:
    """Return in how many strides layers are best dealt out by what the first rank has planned for consecutive ones and
    by how long rows take to the next rank and back. The copies of all take as long; a ring is sooner full of a faster
    link."""
    if not plan.streamed_bytes:
        return 1
    target, rows = plan.target, usual_rows(plan)
    trip_s = round_trip_s(orders, target.batch * rows * target.config.hidden_size * target.dtype.itemsize)
    own = cost.full_pass(plan, shares.figures or common_figures(), rows=rows)
    links = links_of([one["link_gbps"] for one in shares.facts])
    passes = [replace(own, lookahead_s=own.lookahead_s * links[0] / link) for link in links]
    seconds = partial(pass_seconds, passes, (shares.group.size - 1) * trip_s)
    return best_strides(target.config.complete, shares.deal, seconds)


def serve_layers(shares: Shares, load: LoadPart, say: Callable[[str], None]) -> None:
    """Have layers for the ranks before until these end: plan and load what the first one asks for, then run passes.

    Args:
        shares: As of `share_layers`; this is not the first rank.
        load: Loads them.
        say: Is told what lives where.

    Raises:
        OffloadError: What failed here, which the rank before was told; `HostError` where another one is gone.
    """
    group = shares.group
    before = Link(group, group.rank - 1, None)
    orders = Orders(Link(group, group.rank + 1, group.timeout_s)) if group.rank + 1 < group.size else None
    order = answer_echoes(before)
    if order.kind != LOAD:  # the first rank was stopped before it had planned
        before.send(DONE, {})
        raise HostError(f"{before.peer_name} has ended before it had layers for this one: start all ranks again")
    shares = shares.in_strides(order.says["strides"])
    config = request_of_stage(shares.config, order.says)
    try:
        engine = _load_behind(replace(shares, config=config), load, before, orders, order.says)
        with engine.resources:
            if orders is not None:
                RemoteStage(orders, engine.target.runner)
            part = engine.target.plan.config
            if isinstance(part, PartConfig) and part.taps:
                engine.target.runner.taps = streams_for(part.taps, part.hidden_size)
            say(f"ready: {shares.in_words}")
            before.send(DONE, {})
            serve_passes(before, engine.target.runner)
    finally:
        if orders is not None:
            orders.close()


def _load_behind(
    shares: Shares, load: LoadPart, before: Link, orders: Orders | None, order: Mapping[str, Any]
) -> Engine:
    """Load the layers of a rank that is not the first, as that has ordered, and tell the rank before when they are
    planned, and what has failed. Raises `OffloadError`."""
    has_reported = False

    def planned(plan: RunPlan) -> None:
        nonlocal has_reported
        if not has_reported:
            before.send(DONE, {})
        has_reported = True

    try:
        with before.beats(), before.at_work():
            if orders is None:
                return load(shares.config, on_plan=planned, in_use=shares.in_use)
            return _load_before(shares, load, orders, planned, order)
    except OffloadError as error:
        before.send(FAILED, {"error": error_text(before, error)})
        raise
