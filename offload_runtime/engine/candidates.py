"""Every way to place a run that could be the fastest: levels, the draft's cache, where keys, values and weights go."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from offload_runtime.config import SpeculationOptions, format_bytes, format_bytes_up
from offload_runtime.engine.levels import MiddlePlan, PlacedLevels
from offload_runtime.engine.making_plans import draft_alternatives
from offload_runtime.engine.placing import Limits, memory_needs, placements
from offload_runtime.engine.plans import Plans
from offload_runtime.engine.staging_plan import LockLimit, host_kv_bytes, least_pinned_bytes, place_staged
from offload_runtime.errors import BudgetError, OffloadError, OptionError
from offload_runtime.runners.graphs import step_graph_bytes


@dataclass(frozen=True)
class Asked:
    """What is to be placed and within which limits; `resident_layers` None leaves their number to us."""

    plans: Plans
    budget: Limits
    locking: LockLimit
    resident_layers: int | None
    kv: str
    options: SpeculationOptions

    def of_batch(self, sequences: int) -> Asked:
        """The same for another number of sequences."""
        plans = self.plans
        draft = None if plans.draft is None else replace(plans.draft, batch=sequences)
        return replace(self, plans=replace(plans, target=replace(plans.target, batch=sequences), draft=draft))


@dataclass(frozen=True)
class Candidates:
    """Ways without and with a middle level, and why there is none of these."""

    chains: tuple[PlacedLevels, ...]
    hierarchies: tuple[PlacedLevels, ...] = ()
    obstacle: str = ""

    @property
    def all(self) -> tuple[PlacedLevels, ...]:
        """Of both kinds."""
        return self.chains + self.hierarchies


def find_candidates(asked: Asked) -> Candidates:
    """All ways that fit, within device and page-locked memory; at least one.

    Raises:
        BudgetError: Nothing fits; OptionError: TriForce was asked for and cannot be here.
    """
    if asked.options.mode == "triforce":
        found = _hierarchies(asked)
        if isinstance(found, _Obstacle):
            raise found.error
        return Candidates((), found)
    chains = _chains(asked)
    if asked.options.mode != "auto" or asked.plans.draft is None:
        return Candidates(chains)
    if asked.plans.draft.tree_slots:
        return Candidates(chains, obstacle="the draft was asked for trees")
    found = _hierarchies(asked)
    return Candidates(chains, obstacle=found.reason) if isinstance(found, _Obstacle) else Candidates(chains, found)


def _chains(asked: Asked) -> tuple[PlacedLevels, ...]:
    placed: list[PlacedLevels] = []
    for plans in draft_alternatives(asked.plans, asked.options):
        try:
            found = placements(plans, asked.budget, asked.resident_layers, asked.kv)
        except BudgetError as error:
            refused = error
        else:
            placed += [PlacedLevels(*way) for way in found]
    if not placed:
        raise refused
    staged: list[PlacedLevels] = []
    for way in placed:
        with suppress(BudgetError):
            staged.append(_staged(way, asked.locking))
    if not staged:
        _staged(min(placed, key=least_pinned_bytes_of), asked.locking)  # whose refusal names the least
    return tuple(staged)


def _staged(placed: PlacedLevels, locking: LockLimit) -> PlacedLevels:
    placement = place_staged(placed.plans.target, placed.placement, locking.nbytes, locking.name)
    return replace(placed, placement=placement)


def least_pinned_bytes_of(placed: PlacedLevels) -> int:
    """Page-locked memory without which this cannot be: with less than all of it layers are staged, but not those that a
    middle level reads where they lie."""
    target = placed.plans.target
    return host_kv_bytes(target) if placed.middle is not None else least_pinned_bytes(target, placed.placement)


# --- with a middle level


@dataclass(frozen=True)
class _Obstacle:
    """Why there is no middle level: in a phrase where nobody asked for it, and as an error."""

    reason: str
    error: OffloadError


def _hierarchies(asked: Asked) -> tuple[PlacedLevels, ...] | _Obstacle:
    """With a middle level; where there is no way, what keeps the one that asks for the least from being one."""
    target, options = asked.plans.target, asked.options
    middle = MiddlePlan(target.config, target.dtype, options, target.context_tokens, target.batch)
    graph_bytes = step_graph_bytes(target.config) if asked.plans.graphs else 0
    found: list[PlacedLevels] = []
    for plans in draft_alternatives(asked.plans, options):
        enlarged = replace(
            plans, middle_bytes=middle.nbytes, lent_bytes=middle.lent_bytes, middle_graph_bytes=graph_bytes
        )
        for kv in ("gpu", "host") if asked.kv == "auto" else (asked.kv,):
            try:
                ways = placements(enlarged, asked.budget, asked.resident_layers, kv, whole_weights=True)
            except BudgetError as error:
                obstacle = _Obstacle(f"its {format_bytes(middle.nbytes)} do not fit the device", error)
                continue
            for way in (PlacedLevels(*way, middle) for way in ways):
                kept_out = _obstacle(way, asked)
                if kept_out is None:  # then nothing has to be staged
                    found.append(way)
                else:
                    obstacle = kept_out
    return tuple(found) or obstacle


def _obstacle(placed: PlacedLevels, asked: Asked) -> _Obstacle | None:
    kept_out = _what_keeps_triforce_out(placed, asked)
    if kept_out is not None:
        reason, remedies = kept_out
        said = f"no TriForce here: {reason}: {', '.join([*remedies, f'or use {_without_middle(placed)}'])}"
        return _Obstacle(reason, OptionError(said))
    target, locking = placed.plans.target, asked.locking
    kv_bytes = host_kv_bytes(target)
    if locking.nbytes is None or kv_bytes <= locking.nbytes:
        return None
    reason = (
        "it reads keys and values where they lie in host memory, which takes page-locked memory, and "
        f"{locking.name} page-locks {format_bytes(locking.nbytes)} of the {format_bytes_up(kv_bytes)} of the KV cache, "
        f"too little by {format_bytes_up(kv_bytes - locking.nbytes)}"
    )
    ways = f"lower --context (now {target.context_tokens}), raise --vram, or use {_without_middle(placed)}"
    return _Obstacle(reason, BudgetError(f"no TriForce here: {reason}: allow more with --pinned, {ways}"))


def _without_middle(placed: PlacedLevels) -> str:
    """Who has no draft has nobody to propose a chain."""
    return "--speculation none" if placed.plans.draft is None else "--speculation chain"


def _what_keeps_triforce_out(placed: PlacedLevels, asked: Asked) -> tuple[str, Sequence[str]] | None:
    """Why there cannot be a middle level where one was placed, and what would help; None when there can."""
    plans, placement, options = placed.plans, placed.placement, asked.options
    config, context, draft = plans.target.config, plans.target.context_tokens, plans.draft
    if options.budget_tokens > context:
        reason = f"a retrieval budget of {options.budget_tokens} tokens is more than the context of {context}"
        return reason, ["lower --budget-tokens", "raise --context"]
    if any(window is not None for window in config.layer_windows):
        return "it needs full attention, and this model has sliding windows", []
    if placement.num_streamed:
        streamed = f"{placement.num_streamed} of {config.num_layers} layers"
        if asked.resident_layers is not None:
            return f"{streamed} are streamed", ["drop --resident-layers"]
        missing = format_bytes_up(_missing_bytes(plans, asked.budget))
        return f"beside it {streamed} would be streamed", [f"raise --vram by {missing}", "lower --context"]
    if draft is not None and draft.streaming is None and draft.context_tokens < context:
        # Behind its last position the draft has nothing to say, and the middle level would wait for it.
        reason = f"the draft was made for {draft.context_tokens} tokens and the context has {context}"
        return reason, ["take --draft-cache streaming", "lower --context"]
    return None


def _missing_bytes(plans: Plans, budget: Limits) -> int:
    """Device memory that all layers of weights take beyond what there is, with no keys and values that could go."""
    assert budget.limit_bytes is not None
    target = replace(plans.target, kv=replace(plans.target.kv, resident_layers=()))
    fixed_bytes = memory_needs(replace(plans, target=target), budget).fixed_bytes
    return fixed_bytes + target.config.num_layers * target.layer_bytes - budget.limit_bytes
