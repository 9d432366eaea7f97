"""Plans of a model whose layers several machines share: who gets which, and how fast that is.

Machines work on a pass one after the other, each on its own layers, and rows go from one to the next and back the same
way. So the seconds of a pass are those of all of them and of the network; what each streams, it streams by itself. Of
the pieces of a prompt each machine that streams nothing has another one at a time.

Where a machine streams, its ring fills while others work, and then its link is idle. In strides of a few layers in
turn, of about two rings each, all links are busy, and a pass takes as long as the copies of one machine; but rows are
on the way once for each stride.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import BudgetError
from offload_runtime.hardware import MachineProfile
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.part import PartConfig, consecutive, in_words
from offload_runtime.options import require
from offload_runtime.plan import cost
from offload_runtime.plan.model import ModelPlan
from offload_runtime.plan.search import RING_BUFFERS, plan_run
from offload_runtime.plan.sizes import RunPlan, limits_of, resolve_dtype
from offload_runtime.sizes import counted
from offload_runtime.weights.checkpoint import DescribedModel

# From a machine's last kernel to the next one's first: rows to the host, a message, rows to the card. An assumption.
_MESSAGE_S = 0.3e-3
# Of a machine's RAM what layers may take, beside everything else that is there.
_RAM_SHARE = 0.85
# So much longer a pass may take in fewer strides: how long rows are on the way is known the least.
_AS_FAST = 1.02
_OTHER_DRAFT = "name a draft model, or take --draft ngram"


@dataclass(frozen=True)
class LayerRoom:
    """Says what room a machine has for layers of a model, on its card and in RAM, and how fast its link is; None where
    that is not known."""

    free_bytes: int
    ram_bytes: int
    link_gbps: float | None


def links_of(gbps: Sequence[float | None]) -> list[float]:
    """Return how fast the links of machines are; all alike where one is not known."""
    known = [one for one in gbps if one is not None]
    return known if len(known) == len(gbps) else [1.0] * len(gbps)


def _shares(layer_bytes: Sequence[int], rooms: Sequence[LayerRoom]) -> list[float]:
    """Return what each machine is to have of the layers, in proportion: to what its card has free, where all layers
    fit. Else each fills its card but for a ring, and what is left is streamed, in proportion to the links, since a pass
    waits for whose copies take longest, as far as there is RAM."""
    if sum(layer_bytes) <= sum(room.free_bytes for room in rooms):
        return [max(1.0, room.free_bytes) for room in rooms]
    shares = [max(1.0, room.free_bytes - RING_BUFFERS * max(layer_bytes)) for room in rooms]
    links, left = links_of([room.link_gbps for room in rooms]), sum(layer_bytes) - sum(shares)
    order = sorted(range(len(rooms)), key=lambda one: rooms[one].ram_bytes / links[one])  # whose RAM is full first
    for place, one in enumerate(order):
        share = links[one] / sum(map(links.__getitem__, order[place:]))
        streamed = min(_RAM_SHARE * rooms[one].ram_bytes, share * left)
        shares[one], left = shares[one] + streamed, left - streamed
    return shares


def deal(layer_bytes: Sequence[int], rooms: Sequence[LayerRoom], strides: int = 1) -> list[tuple[int, ...]]:
    """Return the layers of each machine, by the room that they find there. Where all fit the cards they then fit
    everywhere, and where they do not the copies of all take as long, if there is the RAM. They are consecutive, or come
    in so many strides of at least one layer, the first of each machine before the second of any."""
    ranks, num_layers, below = len(rooms), len(layer_bytes), [0, *accumulate(layer_bytes)]
    shares = _shares(layer_bytes, rooms)
    dealt, first = [list[int]() for _ in shares], 0
    for number in range(strides * ranks):
        rank, left = number % ranks, strides * ranks - 1 - number
        wanted = below[-1] * shares[rank] * (number // ranks + 1) / (strides * sum(shares))
        wanted += below[first] - sum(layer_bytes[layer] for layer in dealt[rank])
        ends = range(first + 1, num_layers - left + 1) if left else (num_layers,)
        end = min(ends, key=lambda one: abs(below[one] - wanted))
        dealt[rank] += range(first, end)
        first = end
    return [tuple(layers) for layers in dealt]


def are_models(config: ModelConfig, dealt: Sequence[Sequence[int]]) -> bool:
    """Return whether each share of a model's layers has keys and values, and the first one states if any has: it says
    to where sequences are cut."""
    has_states = not config.deltas or not config.deltas.keys().isdisjoint(dealt[0])
    return has_states and not any(config.attentions.keys().isdisjoint(own) for own in dealt)


def best_strides(
    config: ModelConfig, dealt: Callable[[int], Sequence[Sequence[int]]], pass_s: Callable[[int], float]
) -> int:
    """Return in how few strides the layers of a model are to be dealt out, so that a pass takes the least time, or next
    to it, by who has which in so many, and what a pass is predicted to take."""
    possible = [
        strides
        for strides in range(1, 1 + min(map(len, dealt(1))))
        if strides == 1 or not config.deltas or are_models(config, dealt(strides))
    ]
    least_s = min(map(pass_s, possible))
    return next(strides for strides in possible if pass_s(strides) <= _AS_FAST * least_s)


def pass_seconds(passes: Sequence[cost.PassTime], network_s: float, strides: int) -> float:
    """Return the seconds of a pass through the layers of machines.

    Args:
        passes: Over those of each.
        network_s: That rows are on the way once through all.
        strides: In so many, each of which takes a machine as long as it computes, or as for the copies that its ring
            had no room for while others worked.
    """
    strides_s = sum(max(one.busy_s, one.copies_s - strides * one.lookahead_s) for one in passes) + strides * network_s
    return max(strides_s, *(one.copies_s for one in passes)) + sum(one.demand_s for one in passes)


def usual_rows(plan: RunPlan) -> int:
    """Return the rows of a sequence in the passes of a plan, whose layers some machine has."""
    return 1 + (cost.tree_nodes(plan) or cost.gamma(plan))


def shared_request(config: RuntimeConfig) -> RuntimeConfig:
    """Refuse what several machines do not do together, before anything is opened; return what the first one is asked
    for, whose draft, where nobody has named one, would be chosen by predictions that know one machine.

    Raises:
        OptionError: As it says.
    """
    for fine, what, remedy in (
        (config.speculation.mode != "triforce", "--speculation triforce reads the keys of all layers", "take chain"),
        (not config.drafts_itself, "--draft self copies layers", _OTHER_DRAFT),
        (config.trace is None, "--trace sees one machine", "drop it"),
    ):
        require(fine, f"{what}, which does not go over several machines yet: {remedy}")
    mode = config.speculation.mode
    if mode == "auto" and config.proposed_by == "the draft":
        mode = "chain"
    is_open = isinstance(config.draft, str) and config.draft == "auto" and mode != "none"
    return replace(
        config, kv="host" if config.kv == "host" else "gpu", draft="ngram" if is_open else config.draft,
        speculation=replace(config.speculation, mode=mode),
    )  # fmt: skip


def sizes_of(plan: RunPlan) -> dict[str, Any]:
    """Return what the other machines have as the first one has it, whose plan this is."""
    target, head = plan.target, plan.draft.head if plan.draft is not None else None
    return {
        "strides": len(target.config.strides), "context": target.context_tokens, "batch": target.batch,
        "window": target.window_tokens, "kv": plan.request.kv, "taps": () if head is None else head.taps,
        "proposes": plan.drafter != "none",
    }  # fmt: skip


def request_of_stage(config: RuntimeConfig, sizes: Mapping[str, Any]) -> RuntimeConfig:
    """Return what a machine that is not the first loads: its own limits and its part of the model, which is the target,
    and `sizes_of` the first one's plan. Where that proposes, it gets ready for windows of n-grams, trees as well."""
    source = config.target
    assert isinstance(source, DescribedModel)
    part = source.model_config
    assert isinstance(part, PartConfig)
    taps = tuple(map(part.own_number, sizes["taps"]))
    return replace(
        config, target=replace(source, model_config=replace(part, taps=taps)),
        draft="ngram" if sizes["proposes"] else "none", speculation=SpeculationOptions(), tree_nodes=None, gamma=None,
        max_gamma=sizes["window"] - 1, context=sizes["context"], max_batch=sizes["batch"], kv=sizes["kv"],
    )  # fmt: skip


def sizes_behind(sizes: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return what machines have behind one whose part of the model this is: a head reads what is there alone."""
    return {**sizes, "taps": [tap for tap in sizes["taps"] if config.own_number(tap) < 0]}


def parse_network(text: str) -> float:
    """Return the bytes a second of a network such as `2.5Gb` or `100Mb`, whose unit is bits a second. Raises
    `OptionError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([GM])b(?:it)?(?:/s)?", text)
    require(found is not None and float(found[1]) > 0, f"--network {text!r} is not a speed such as 2.5Gb or 100Mb")
    assert found is not None
    return float(found[1]) * {"G": 1e9, "M": 1e6}[found[2]] / 8


@dataclass(frozen=True)
class SharedPlan:
    """A run on several machines, one card each.

    Attributes:
        machines: The figures of each.
        plans: Of each, whose target is its part.
        layers: Of the model, by machine.
        network_bytes_per_s: Of what connects them.
    """

    machines: Sequence[MachineProfile]
    plans: Sequence[RunPlan]
    layers: Sequence[Sequence[int]]
    network_bytes_per_s: float

    @property
    def target(self) -> ModelPlan:
        """Return what the first machine has of it, with the context and the requests at once that all have."""
        return self.plans[0].target

    def network_s(self, rows: int, rows_back: int) -> float:
        """Return the seconds in which so many rows go through the network, and so many come back, of each stride once
        per machine."""
        nbytes = (rows + rows_back) * self.target.config.hidden_size * self.target.dtype.itemsize
        return (len(self.plans) - 1) * (2 * _MESSAGE_S + nbytes / self.network_bytes_per_s)

    def passes(self, rows: int = 1) -> list[cost.PassTime]:
        """Return a pass of each machine over windows of so many rows at the end of the context."""
        each = zip(self.plans, self.machines, strict=True)
        return [cost.full_pass(plan, machine, rows=rows) for plan, machine in each]

    @property
    def layer_ranges(self) -> list[list[range]]:
        """Return the layers of each machine that follow one another."""
        return [consecutive(own) for own in self.layers]

    @property
    def layers_in_words(self) -> list[str]:
        """Return the same for people, in as little room as a table has."""
        return [in_words(own) if self.strides == 1 else f"{len(own)} in turn" for own in self.layers]

    @property
    def strides(self) -> int:
        """Return in how many strides layers are dealt out; 1: those of a machine are consecutive."""
        return len(self.target.config.strides)

    def pass_network_s(self, rows: int = 1) -> float:
        """Return the seconds that rows of a pass over windows of so many are on the way, there and back."""
        all_rows = rows * self.target.batch
        return self.strides * self.network_s(all_rows, all_rows)

    def pass_s(self, rows: int = 1, *, strides: int | None = None) -> float:
        """Return the seconds of a pass over windows of so many rows, or what it would be in so many strides."""
        strides = strides or self.strides
        return pass_seconds(self.passes(rows), self.pass_network_s(rows) / self.strides, strides)

    @property
    def plain_tok_per_s(self) -> float:
        """Return the tokens per second of all requests, without proposals."""
        return self.target.batch / self.pass_s()

    @property
    def usual_tok_per_s(self) -> float:
        """Return the same with proposals of which as many are accepted as is usual, where anybody proposes."""
        first = self.plans[0]
        if usual_rows(first) == 1:
            return self.plain_tok_per_s
        step = cost.predict_step(first, self.machines[0])
        seconds = self.pass_s(usual_rows(first)) + max(0.0, step.drafting_s - step.hidden_s)
        return self.target.batch * step.tokens / seconds

    @property
    def first_token_s(self) -> float:
        """Return the seconds until a prompt that fills the context is read."""
        tokens, each = self.target.context_tokens, zip(self.plans, self.machines, strict=True)
        times, abreast = [cost.prefill_time(plan, machine, tokens) for plan, machine in each], 1.0
        read_s = sum(one.seconds for one in times)
        if self.strides > 1:  # each copies while others compute
            read_s = max(sum(one.compute_s for one in times), *(one.seconds for one in times))
        if not any(plan.streamed_bytes or plan.target.num_experts for plan in self.plans):  # else layer by layer
            pieces, machines = -(-tokens // self.target.chunk_tokens), len(self.plans)
            abreast = machines * pieces / (pieces + machines - 1)
        network_s = (self.strides - 1) * self.network_s(tokens, tokens) + self.network_s(tokens, 1)
        return read_s / abreast + self.target.batch * network_s


def plan_shared(request: RuntimeConfig, machines: Sequence[MachineProfile], network_bytes_per_s: float) -> SharedPlan:
    """Deal out the layers of a described model by what each machine has free, in as many strides as make passes fast,
    and plan each part.

    Raises:
        BudgetError: One of them has too little memory, and which.
        OptionError: As of `plan_run`, or there are fewer layers than machines.
    """
    model = request.target
    assert isinstance(model, DescribedModel)
    require(request.device in ("auto", "cuda"), f"--devices {request.device}: each of several machines has one card")
    request = replace(request, device="cuda")
    many = f"{len(machines)} machines share {counted(model.config().num_layers, 'layer')}"
    require(model.config().num_layers >= len(machines), f"{many}, and each needs one: name fewer")
    layout = model.layout(resolve_dtype(request.dtype, model, "cuda"))
    draft = request.draft if isinstance(request.draft, DescribedModel) else None
    around_bytes = layout.shared.total_bytes + layout.embedding.total_bytes
    around_bytes += 0 if draft is None else draft.layout(resolve_dtype(request.dtype, draft, "cuda")).total_bytes
    rooms = list[LayerRoom]()
    for machine in machines:
        limits = limits_of(machine, request)
        (card,) = limits.cards[:1]
        free_bytes = (card.device_bytes or 0) - card.reserved_bytes - (0 if rooms else around_bytes)
        rooms.append(LayerRoom(free_bytes, limits.ram_bytes, machine.link_gbps))

    dealt = partial(deal, layout.layer_bytes, rooms)

    def planned(strides: int) -> SharedPlan:
        layers, plans, sizes = dealt(strides), list[RunPlan](), dict[str, Any]()
        for number, (machine, own) in enumerate(zip(machines, layers, strict=True)):
            part = replace(model, model_config=PartConfig.of(model.config(), own))
            config = replace(request, target=part if not number else replace(part, read_mtp=lambda: None))
            try:
                plans.append(plan_run(request_of_stage(config, sizes) if plans else config, machine))
            except BudgetError as error:
                raise BudgetError(f"machine {number + 1} ({machine.name}): {error}") from error
            sizes = sizes_behind(sizes or sizes_of(plans[0]), plans[-1].target.config)
        return SharedPlan(machines, plans, layers, network_bytes_per_s)

    shared = planned(1)
    rows = usual_rows(shared.plans[0])
    seconds = partial(pass_seconds, shared.passes(rows), shared.pass_network_s(rows))
    strides = best_strides(model.config(), dealt, seconds)
    return shared if strides == 1 else planned(strides)
