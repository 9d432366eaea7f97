"""Plans of a model whose layers several machines share: who gets which, and how fast that is.

Machines work on a pass one after the other, each on its own layers, and rows go from one to the next and back the same
way. So the seconds of a pass are those of all of them and of the network; what each streams, it streams by itself. Of
the pieces of a prompt each machine that streams nothing has another one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import BudgetError
from offload_runtime.hardware import MachineProfile
from offload_runtime.models.part import PartConfig
from offload_runtime.options import require
from offload_runtime.plan import cost
from offload_runtime.plan.model import ModelPlan
from offload_runtime.plan.search import plan_run
from offload_runtime.plan.sizes import RunPlan, limits_of, resolve_dtype
from offload_runtime.sizes import counted
from offload_runtime.weights.checkpoint import DescribedModel

# From a machine's last kernel to the next one's first: rows to the host, a message, rows to the card. An assumption.
_MESSAGE_S = 0.3e-3
_OTHER_DRAFT = "name a draft model, or take --draft ngram"


def deal(layer_bytes: Sequence[int], free_bytes: Sequence[int]) -> list[range]:
    """Return the layers of each rank: consecutive ones, at least one, of as large a share of all bytes as it has of the
    free memory. Where all fit they then fit everywhere, and where they do not as much of each is streamed."""
    ranks, num_layers = len(free_bytes), len(layer_bytes)
    shares = [max(1, free) for free in free_bytes]
    below = [0, *accumulate(layer_bytes)]
    ends = [0]
    for rank, share in enumerate(accumulate(shares[:-1])):
        wanted = below[-1] * share / sum(shares)
        end = min(range(num_layers + 1), key=lambda one: abs(below[one] - wanted))
        ends.append(min(max(end, ends[-1] + 1), num_layers - (ranks - 1 - rank)))
    return [range(start, end) for start, end in pairwise([*ends, num_layers])]


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
        "context": target.context_tokens, "batch": target.batch, "window": target.window_tokens,
        "kv": plan.request.kv, "taps": () if head is None else head.taps, "proposes": plan.drafter != "none",
    }  # fmt: skip


def request_of_stage(config: RuntimeConfig, sizes: Mapping[str, Any]) -> RuntimeConfig:
    """Return what a machine that is not the first loads: its own limits and its part of the model, which is the target,
    and `sizes_of` the first one's plan. Where that proposes, it gets ready for windows of n-grams, trees as well."""
    source = config.target
    assert isinstance(source, DescribedModel)
    part = source.model_config
    assert isinstance(part, PartConfig)
    taps = tuple(tap - part.first for tap in sizes["taps"] if tap >= part.first)
    return replace(
        config, target=replace(source, model_config=replace(part, taps=taps)),
        draft="ngram" if sizes["proposes"] else "none", speculation=SpeculationOptions(), tree_nodes=None, gamma=None,
        max_gamma=sizes["window"] - 1, context=sizes["context"], max_batch=sizes["batch"], kv=sizes["kv"],
    )  # fmt: skip


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
    layers: Sequence[range]
    network_bytes_per_s: float

    @property
    def target(self) -> ModelPlan:
        """Return what the first machine has of it, with the context and the requests at once that all have."""
        return self.plans[0].target

    def network_s(self, rows: int, rows_back: int) -> float:
        """Return the seconds in which so many rows go through the network, and so many come back, of each once per
        machine."""
        nbytes = (rows + rows_back) * self.target.config.hidden_size * self.target.dtype.itemsize
        return (len(self.plans) - 1) * (2 * _MESSAGE_S + nbytes / self.network_bytes_per_s)

    def passes(self, rows: int = 1) -> list[cost.PassTime]:
        """Return a pass of each machine over windows of so many rows at the end of the context."""
        each = zip(self.plans, self.machines, strict=True)
        return [cost.full_pass(plan, machine, rows=rows) for plan, machine in each]

    def pass_s(self, rows: int = 1) -> float:
        """Return the seconds of a pass over windows of so many rows."""
        all_rows = rows * self.target.batch
        return sum(one.seconds for one in self.passes(rows)) + self.network_s(all_rows, all_rows)

    @property
    def plain_tok_per_s(self) -> float:
        """Return the tokens per second of all requests, without proposals."""
        return self.target.batch / self.pass_s()

    @property
    def usual_tok_per_s(self) -> float:
        """Return the same with proposals of which as many are accepted as is usual, where anybody proposes."""
        first = self.plans[0]
        if not (proposed := cost.tree_nodes(first) or cost.gamma(first)):
            return self.plain_tok_per_s
        step = cost.predict_step(first, self.machines[0])
        seconds = self.pass_s(proposed + 1) + max(0.0, step.drafting_s - step.hidden_s)
        return self.target.batch * step.tokens / seconds

    @property
    def first_token_s(self) -> float:
        """Return the seconds until a prompt that fills the context is read."""
        each = zip(self.plans, self.machines, strict=True)
        read_s = sum(cost.prefill_time(plan, machine, self.target.context_tokens).seconds for plan, machine in each)
        abreast = 1.0
        if not any(plan.streamed_bytes or plan.target.num_experts for plan in self.plans):  # else layer by layer
            pieces, machines = -(-self.target.context_tokens // self.target.chunk_tokens), len(self.plans)
            abreast = machines * pieces / (pieces + machines - 1)
        return read_s / abreast + self.target.batch * self.network_s(self.target.context_tokens, 1)


def plan_shared(request: RuntimeConfig, machines: Sequence[MachineProfile], network_bytes_per_s: float) -> SharedPlan:
    """Deal out the layers of a described model by what each machine has free, and plan each part.

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
    free_bytes = list[int]()
    for machine in machines:
        (card,) = limits_of(machine, request).cards[:1]
        free_bytes.append((card.device_bytes or 0) - card.reserved_bytes - (0 if free_bytes else around_bytes))
    layers, plans = deal(layout.layer_bytes, free_bytes), list[RunPlan]()
    for number, (machine, own) in enumerate(zip(machines, layers, strict=True)):
        part = replace(model, model_config=PartConfig.of(model.config(), own))
        config = replace(request, target=part if not number else replace(part, read_mtp=lambda: None))
        try:
            asked = request_of_stage(config, sizes_of(plans[0])) if plans else config
            plans.append(plan_run(asked, machine))
        except BudgetError as error:
            raise BudgetError(f"machine {number + 1} ({machine.name}): {error}") from error
    return SharedPlan(machines, plans, layers, network_bytes_per_s)
