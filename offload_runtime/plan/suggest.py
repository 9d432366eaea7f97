"""When a run does not fit: the nearest settings that do, each of them planned to be sure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload_runtime.config import (
    SpeculationOptions,
    format_bytes,
    format_bytes_up,
    idle_options,
    parse_bytes,
    size_option_down,
)
from offload_runtime.errors import BudgetError, ContextLengthError, OffloadError, OptionError
from offload_runtime.plan.machine import MachineFigures, limits_of
from offload_runtime.plan.memory import RunPlan, make_plan
from offload_runtime.plan.placement import least_pinned_bytes
from offload_runtime.plan.request import PlanRequest, longest_context, resolve_context
from offload_runtime.plan.search import find_candidates, plan_run

_CONTEXT_STEP = 256
_LEAST_BUDGET = 256
_MOST_BYTES = 1 << 43
_BYTES_STEP = 10_000_000
# Of `--vram`: sizes that are typed as they are printed.
_VRAM_STEP = 100_000_000


@dataclass(frozen=True)
class Suggestion:
    """Settings that fit: what to change, on the command line where it is an option, and the plan that follows."""

    change: str
    machine: MachineFigures
    plan: RunPlan


@dataclass(frozen=True)
class Refusal:
    """A run that does not fit: why, what is short (a name of memory to missing bytes), and what would fit."""

    problem: OffloadError
    short_bytes: dict[str, int]
    suggestions: tuple[Suggestion, ...]


def plan_or_refuse(request: PlanRequest, machine: MachineFigures) -> RunPlan | Refusal:
    """Plan a run, or say what is short and what would fit.

    Raises:
        OptionError: The request makes no sense on any machine.
    """
    try:
        return plan_run(request, machine)
    except (BudgetError, ContextLengthError, OptionError) as error:
        search = _Search(request, machine)
        suggestions = tuple(search.suggestions())
        if not suggestions and isinstance(error, OptionError):
            raise
        return Refusal(error, search.short_bytes, suggestions)


class _Search:
    """Changes one setting at a time, then several."""

    def __init__(self, request: PlanRequest, machine: MachineFigures) -> None:
        # Room that nobody asked for is nothing that a run has to have: what fits without it fits.
        self._tree_nodes = request.tree_nodes
        self._request = replace(request, tree_nodes=request.tree_nodes or 0)
        self._machine = machine
        self.short_bytes: dict[str, int] = {}

    def suggestions(self) -> Iterator[Suggestion]:
        """What fits, settings of the run before changes of the machine."""
        found = False
        for change, request in self._single_changes():
            suggestion = self._attempt(*_without_idle_options(change, request), self._machine)
            if suggestion is not None:
                found = True
                yield suggestion
        if not found and (suggestion := self._smallest()) is not None:
            yield suggestion
        yield from self._machines()

    def _attempt(self, change: str, request: PlanRequest, machine: MachineFigures) -> Suggestion | None:
        request = replace(request, tree_nodes=self._tree_nodes)
        try:
            return Suggestion(change, machine, plan_run(request, machine))
        except (BudgetError, ContextLengthError, OptionError):
            return None

    def _single_changes(self) -> Iterator[tuple[str, PlanRequest]]:
        request = self._request
        vram_bytes = self._least_option()
        if vram_bytes is not None:
            yield f"--vram {_option(vram_bytes)}", replace(request, vram_bytes=vram_bytes)
        context = self._largest(self._contexts(request), lambda tokens: replace(request, context=tokens))
        if context is not None:
            yield f"--context {context}", replace(request, context=context)
        batch = self._largest(range(1, request.batch), lambda count: replace(request, batch=count))
        if batch is not None:
            yield f"--batch {batch}", replace(request, batch=batch)
        for place in ("auto", "host", "gpu"):
            if request.kv not in ("auto", place):
                yield f"--kv {place}", replace(request, kv=place)
        if request.resident_layers is not None:
            yield "--resident-layers auto", replace(request, resident_layers=None)
        yield from self._speculation_changes()

    def _speculation_changes(self) -> Iterator[tuple[str, PlanRequest]]:
        request, options = self._request, self._request.speculation
        if options.mode == "triforce":
            mode = "none" if request.draft_name == "none" else "chain"
            yield f"--speculation {mode}", replace(request, speculation=replace(options, mode=mode))
            budgets = [options.chunk_size << power for power in range(16)]
            budgets = [tokens for tokens in budgets if _LEAST_BUDGET <= tokens < options.budget_tokens]
            budget = self._largest(
                budgets, lambda tokens: replace(request, speculation=replace(options, budget_tokens=tokens))
            )
            if budget is not None:
                yield f"--budget-tokens {budget}", replace(request, speculation=replace(options, budget_tokens=budget))
        if request.draft is not None:
            if options.draft_cache != "streaming":
                cached = replace(options, draft_cache="streaming")
                yield "--draft-cache streaming", replace(request, speculation=cached)
            yield _without_draft(request)

    def _least_option(self) -> int | None:
        """A limit of device memory that this card has and that fits, where another was asked for: the least that is
        more, or nearly all of the card where more was asked for than it has."""
        asked, whole = self._request.vram_bytes, self._machine.vram_bytes
        if asked is None:
            return None
        if asked > whole:
            return parse_bytes(size_option_down(whole))
        sizes = range((asked // _VRAM_STEP + 1) * _VRAM_STEP, whole + 1, _VRAM_STEP)
        index = bisect_left(sizes, True, key=self._fits)
        return sizes[index] if index < len(sizes) else None

    def _fits(self, vram_bytes: int) -> bool:
        return self._attempt("", replace(self._request, vram_bytes=vram_bytes), self._machine) is not None

    def _contexts(self, request: PlanRequest) -> Sequence[int]:
        """Contexts below the asked one: whole blocks, and the longest that the model has when more was asked for."""
        config = request.target.config()
        longest = longest_context(config)
        asked = resolve_context("auto", config, kv=request.kv) if request.context == "auto" else int(request.context)
        options, least = request.speculation, _CONTEXT_STEP
        if options.mode == "triforce" or (request.draft is not None and options.draft_cache == "retrieval"):
            least = -(-options.budget_tokens // _CONTEXT_STEP) * _CONTEXT_STEP  # of less they cannot retrieve as much
        if asked > longest:
            return [*range(least, longest, _CONTEXT_STEP), longest]
        return range(least, asked, _CONTEXT_STEP)

    def _largest(self, values: Sequence[int], change: Callable[[int], PlanRequest]) -> int | None:
        """The largest of ascending values whose plan fits; what fits is taken to fit for all smaller ones too."""
        index = bisect_left(values, True, key=lambda value: self._attempt("", change(value), self._machine) is None)
        return values[index - 1] if index else None

    def _smallest(self) -> Suggestion | None:
        """Every other setting as small as it goes, and the longest context that then fits."""
        request = self._request
        changes: list[str] = []
        if request.batch > 1:
            request, changes = replace(request, batch=1), [*changes, "--batch 1"]
        if request.kv != "auto":
            request, changes = replace(request, kv="auto"), [*changes, "--kv auto"]
        if request.resident_layers is not None:
            request, changes = replace(request, resident_layers=None), [*changes, "--resident-layers auto"]
        if request.draft is not None:
            change, request = _without_draft(request)
            changes = [*changes, change]
        whole_card = parse_bytes(size_option_down(self._machine.vram_bytes))
        for sized, limit in (([], request.vram_bytes), ([f"--vram {size_option_down(whole_card)}"], whole_card)):
            suggestion = self._smallest_within(replace(request, vram_bytes=limit), [*sized, *changes])
            if suggestion is not None or request.vram_bytes is None:
                return suggestion
        return None

    def _smallest_within(self, request: PlanRequest, changes: list[str]) -> Suggestion | None:
        change, request = _without_idle_options(" ".join(changes), request)
        suggestion = self._attempt(change, request, self._machine)
        if suggestion is not None:
            return suggestion
        context = self._largest(self._contexts(request), lambda tokens: replace(request, context=tokens))
        if context is None:
            return None
        return self._attempt(f"--context {context} {change}".rstrip(), replace(request, context=context), self._machine)

    def _machines(self) -> Iterator[Suggestion]:
        """A machine with the least memory of each kind that the run needs; of a context that the model has."""
        for prefix, request in self._possible_contexts():
            unbounded = replace(request, ram_bytes=None, pinned_bytes=None)
            vram_bytes = self._least_vram(unbounded)
            if vram_bytes is not None:
                yield from self._machine_for(replace(unbounded, vram_bytes=vram_bytes), vram_bytes, prefix)
                return

    def _possible_contexts(self) -> Iterator[tuple[str, PlanRequest]]:
        request, longest = self._request, longest_context(self._request.target.config())
        yield "", request
        if request.context != "auto" and int(request.context) > longest:
            yield f"--context {longest} and ", replace(request, context=longest)

    @property
    def _vram_limit(self) -> int:
        asked = self._request.vram_bytes
        return self._machine.vram_bytes if asked is None else min(asked, self._machine.vram_bytes)

    @property
    def _pinned_limit(self) -> int | None:
        limits = (self._machine.pinnable_bytes, self._request.pinned_bytes)
        return min((limit for limit in limits if limit is not None), default=None)

    def _machine_for(self, request: PlanRequest, vram_bytes: int, prefix: str) -> Iterator[Suggestion]:
        machine, pinnable, asked_ram = self._machine, self._pinned_limit, self._request.ram_bytes
        ram_limit = machine.ram_bytes if asked_ram is None else min(asked_ram, machine.ram_bytes)
        needed_pinned = _least(request, self._ample, least_pinned_bytes)
        larger_pinnable = None if pinnable is None else max(pinnable, needed_pinned)
        needed_host = _least(
            request, replace(self._ample, pinnable_bytes=larger_pinnable), lambda plan: plan.host_bytes
        )
        kinds = [
            ("device memory", vram_bytes, self._vram_limit),
            ("host memory", needed_host, ram_limit),
            ("page-locked memory", needed_pinned, needed_pinned if pinnable is None else pinnable),
        ]
        self.short_bytes = {name: needed - limit for name, needed, limit in kinds if needed > limit}
        if not self.short_bytes:
            return
        if [*self.short_bytes] == ["device memory"] and not prefix and vram_bytes <= machine.vram_bytes:
            return  # this machine has it: an option's value, not another machine
        needed_by = {name: needed for name, needed, _ in kinds}
        listed = " and ".join(f"{format_bytes_up(needed_by[name])} of {name}" for name in self.short_bytes)
        larger = replace(
            machine, vram_bytes=max(machine.vram_bytes, vram_bytes), ram_bytes=max(machine.ram_bytes, needed_host),
            pinnable_bytes=larger_pinnable,
        )  # fmt: skip
        asked = replace(request, ram_bytes=max(ram_limit, needed_host))
        suggestion = self._attempt(f"{prefix}{listed}", asked, larger)
        if suggestion is not None:
            yield suggestion

    @property
    def _ample(self) -> MachineFigures:
        return replace(self._machine, ram_bytes=_MOST_BYTES, pinnable_bytes=None, vram_bytes=_MOST_BYTES)

    def _least_vram(self, request: PlanRequest) -> int | None:
        """The least device memory that fits, from what there is on, in steps; None when no amount does."""

        def fits(size_bytes: int) -> bool:
            return self._attempt("", replace(request, vram_bytes=size_bytes), self._ample) is not None

        if fits(self._vram_limit):
            return self._vram_limit
        sizes = range(self._vram_limit, _MOST_BYTES, _BYTES_STEP)
        index = bisect_left(sizes, True, key=fits)
        return sizes[index] if index < len(sizes) else None


def _least(request: PlanRequest, machine: MachineFigures, needed_bytes: Callable[[RunPlan], int]) -> int:
    """The least of some memory without which no plan of a request can be, whatever the machine has of it.

    Raises:
        BudgetError, OptionError, ContextLengthError: It cannot be in any case.
    """
    limits, nodes = limits_of(machine, request), request.tree_nodes or 0
    plan = make_plan(request, limits, context=request.context, tree_nodes=nodes)
    return min(map(needed_bytes, find_candidates(plan).all))


def _option(size_bytes: int) -> str:
    """Bytes as an option's value."""
    return format_bytes(size_bytes).replace(" ", "")


def _without_draft(request: PlanRequest) -> tuple[str, PlanRequest]:
    """The change and the request with n-grams in the place of the draft model, which TriForce does not go with."""
    change, options = "--draft ngram", request.speculation
    if options.mode == "triforce":
        change, options = f"--speculation auto {change}", replace(options, mode="auto")
    return change, replace(request, draft=None, draft_name="ngram", speculation=options)


def _without_idle_options(change: str, request: PlanRequest) -> tuple[str, PlanRequest]:
    """A change and its request without what nothing looks at any more: on the command line it would be refused."""
    options, usual = request.speculation, SpeculationOptions()
    idle = idle_options(request.draft is not None, options.mode, options.draft_cache, options.policy)
    names = [name for name in idle if getattr(options, name) != getattr(usual, name)]
    request = replace(request, speculation=replace(options, **{name: getattr(usual, name) for name in names}))
    if options.mode == "none" and request.gamma is not None:
        names, request = [*names, "gamma"], replace(request, gamma=None)
    dropped = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return f"{change} without {dropped}" if names else change, request
