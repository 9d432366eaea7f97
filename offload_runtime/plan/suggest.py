"""What a run could have instead: settings that fit where it does not, and what a larger machine would bring."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload_runtime.config import (
    GB,
    SpeculationOptions,
    format_bytes,
    format_bytes_up,
    idle_options,
    parse_bytes,
    size_option_down,
)
from offload_runtime.errors import BudgetError, ContextLengthError, OffloadError, OptionError
from offload_runtime.plan.forecast import RunForecast, forecast
from offload_runtime.plan.memory import RunPlan, make_plan
from offload_runtime.plan.placement import least_pinned_bytes
from offload_runtime.plan.request import MachineFigures, PlanRequest, limits_of, longest_context, resolve_context
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
        self._ample = replace(machine, ram_bytes=_MOST_BYTES, pinnable_bytes=None, vram_bytes=_MOST_BYTES)
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

    def _largest(self, request: PlanRequest, name: str, values: Sequence[Any]) -> Any | None:
        """The largest of ascending values of a setting whose plan fits; it is taken to fit for all smaller ones too."""
        index = bisect_left(
            values, True, key=lambda value: self._attempt("", replace(request, **{name: value}), self._machine) is None
        )
        return values[index - 1] if index else None

    def _least_vram(self, request: PlanRequest, machine: MachineFigures, sizes: Sequence[int]) -> int | None:
        """The least of ascending limits of device memory whose plan fits, as it is taken to for all larger ones."""

        def fits(size: int) -> bool:
            return self._attempt("", replace(request, vram_bytes=size), machine) is not None

        # The first is likely where what is short is another memory.
        index = 0 if sizes and fits(sizes[0]) else bisect_left(sizes, True, key=fits)
        return sizes[index] if index < len(sizes) else None

    def _single_changes(self) -> Iterator[tuple[str, PlanRequest]]:
        request, whole = self._request, self._machine.vram_bytes
        if request.vram_bytes is not None:
            # A limit that this card has where another was asked for: the least that is more, or nearly all of the card
            # where more was asked for than it has.
            sizes = range((request.vram_bytes // _VRAM_STEP + 1) * _VRAM_STEP, whole + 1, _VRAM_STEP)
            beyond = request.vram_bytes > whole
            vram_bytes = _whole_card(whole) if beyond else self._least_vram(request, self._machine, sizes)
            if vram_bytes is not None:
                option = format_bytes(vram_bytes).replace(" ", "")
                yield f"--vram {option}", replace(request, vram_bytes=vram_bytes)
        for name, values in (("context", self._contexts(request)), ("batch", range(1, request.batch))):
            value = self._largest(request, name, values)
            if value is not None:
                yield f"--{name} {value}", replace(request, **{name: value})
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
            smaller = [
                replace(options, budget_tokens=tokens)
                for tokens in budgets
                if _LEAST_BUDGET <= tokens < options.budget_tokens
            ]
            largest = self._largest(request, "speculation", smaller)
            if largest is not None:
                yield f"--budget-tokens {largest.budget_tokens}", replace(request, speculation=largest)
        if request.draft is not None:
            if options.draft_cache != "streaming":
                cached = replace(options, draft_cache="streaming")
                yield "--draft-cache streaming", replace(request, speculation=cached)
            yield _without_draft(request)

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

    def _smallest(self) -> Suggestion | None:
        """Every other setting as small as it goes, and the longest context that then fits."""
        request, changes = self._request, list[str]()
        for name, value in (("batch", 1), ("kv", "auto"), ("resident_layers", None)):
            if getattr(request, name) != value:
                request = replace(request, **{name: value})  # type: ignore[arg-type]
                changes.append(f"--{name.replace('_', '-')} {value or 'auto'}")
        if request.draft is not None:
            change, request = _without_draft(request)
            changes.append(change)
        ways = [(changes, request)]
        if request.vram_bytes is not None:
            whole = _whole_card(self._machine.vram_bytes)
            ways.append(([f"--vram {size_option_down(whole)}", *changes], replace(request, vram_bytes=whole)))
        for changes, request in ways:
            change, request = _without_idle_options(" ".join(changes), request)
            if (suggestion := self._attempt(change, request, self._machine)) is not None:
                return suggestion
            context = self._largest(request, "context", self._contexts(request))
            if context is not None:
                shorter = replace(request, context=context)
                return self._attempt(f"--context {context} {change}".rstrip(), shorter, self._machine)
        return None

    def _machines(self) -> Iterator[Suggestion]:
        """A machine with the least memory of each kind that the run needs; of a context that the model has."""
        unbounded, whole = replace(self._request, ram_bytes=None, pinned_bytes=None), self._machine.vram_bytes
        contexts, longest = [("", unbounded)], longest_context(unbounded.target.config())
        if unbounded.context != "auto" and int(unbounded.context) > longest:
            contexts.append((f"--context {longest} and ", replace(unbounded, context=longest)))
        limit = whole if unbounded.vram_bytes is None else min(unbounded.vram_bytes, whole)
        for prefix, request in contexts:
            # From what there is on, in steps.
            vram_bytes = self._least_vram(request, self._ample, range(limit, _MOST_BYTES, _BYTES_STEP))
            if vram_bytes is not None:
                yield from self._machine_for(replace(request, vram_bytes=vram_bytes), vram_bytes, limit, prefix)
                return

    def _machine_for(self, request: PlanRequest, vram_bytes: int, vram_limit: int, prefix: str) -> Iterator[Suggestion]:
        machine, asked_ram = self._machine, self._request.ram_bytes
        ram_limit = machine.ram_bytes if asked_ram is None else min(asked_ram, machine.ram_bytes)
        limits = [limit for limit in (machine.pinnable_bytes, self._request.pinned_bytes) if limit is not None]
        needed_pinned = _least(request, self._ample, least_pinned_bytes)
        larger_pinnable = max(min(limits), needed_pinned) if limits else None
        needed_host = _least(
            request, replace(self._ample, pinnable_bytes=larger_pinnable), lambda plan: plan.host_bytes
        )
        needed = {"device memory": vram_bytes, "host memory": needed_host, "page-locked memory": needed_pinned}
        allowed = [vram_limit, ram_limit, min(limits, default=needed_pinned)]
        self.short_bytes = {
            name: nbytes - limit
            for (name, nbytes), limit in zip(needed.items(), allowed, strict=True)
            if nbytes > limit
        }
        if not self.short_bytes:
            return
        if [*self.short_bytes] == ["device memory"] and not prefix and vram_bytes <= machine.vram_bytes:
            return  # this machine has it: an option's value, not another machine
        listed = " and ".join(f"{format_bytes_up(needed[name])} of {name}" for name in self.short_bytes)
        larger = replace(
            machine, vram_bytes=max(machine.vram_bytes, vram_bytes), ram_bytes=max(machine.ram_bytes, needed_host),
            pinnable_bytes=larger_pinnable,
        )  # fmt: skip
        asked = replace(request, ram_bytes=max(ram_limit, needed_host))
        suggestion = self._attempt(f"{prefix}{listed}", asked, larger)
        if suggestion is not None:
            yield suggestion


def _least(request: PlanRequest, machine: MachineFigures, needed_bytes: Callable[[RunPlan], int]) -> int:
    """The least of some memory without which no plan of a request can be, whatever the machine has of it.

    Raises:
        BudgetError, OptionError, ContextLengthError: It cannot be in any case.
    """
    limits, nodes = limits_of(machine, request), request.tree_nodes or 0
    plan = make_plan(request, limits, context=request.context, tree_nodes=nodes)
    chains, triforce, _ = find_candidates(plan)
    return min(map(needed_bytes, [*chains, *triforce]))


def _whole_card(vram_bytes: int) -> int:
    """Nearly all of a card: as much as is typed as it is printed."""
    return parse_bytes(size_option_down(vram_bytes))


def _without_draft(request: PlanRequest) -> tuple[str, PlanRequest]:
    """The change and the request with n-grams in the place of the draft model, which TriForce does not go with."""
    change, options = "--draft ngram", request.speculation
    if options.mode == "triforce":
        change, options = f"--speculation auto {change}", replace(options, mode="auto")
    return change, replace(request, draft=None, draft_name="ngram", speculation=options)


def _without_idle_options(change: str, request: PlanRequest) -> tuple[str, PlanRequest]:
    """A change and its request without what nothing looks at any more: on the command line it would be refused."""
    options, usual = request.speculation, SpeculationOptions()
    idle = idle_options(request.draft is not None, options.mode, options.draft_cache)
    names = [name for name in idle if getattr(options, name) != getattr(usual, name)]
    request = replace(request, speculation=replace(options, **{name: getattr(usual, name) for name in names}))
    if options.mode == "none" and request.gamma is not None:
        names, request = [*names, "gamma"], replace(request, gamma=None)
    dropped = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return f"{change} without {dropped}" if names else change, request


# --- what would make it faster


@dataclass(frozen=True)
class Upgrade:
    """What a change of the machine would bring: tokens per second before and after, at the usual acceptance."""

    what: str
    before_tok_per_s: float
    after_tok_per_s: float
    note: str = ""


def upgrades(plan: RunPlan, current: RunForecast, machine: MachineFigures) -> tuple[Upgrade, ...]:
    """One more GB of device memory, and a second card."""
    second = "if every layer's bytes were split over two cards and links: at best, tensor parallelism is not built yet"
    offers = (
        ("1 GB more device memory", *_with_vram(plan.request, machine, GB), ""),
        ("a second card", *second_card(plan.request, machine), second),
    )
    found: list[Upgrade] = []
    for what, request, better, note in offers:
        try:
            faster = forecast(plan_run(request, better), better)
        except (BudgetError, OptionError):
            continue
        found.append(Upgrade(what, current.usual_tok_per_s, faster.usual_tok_per_s, note))
    return tuple(found)


def _with_vram(request: PlanRequest, machine: MachineFigures, more_bytes: int) -> tuple[PlanRequest, MachineFigures]:
    limit = request.vram_bytes
    larger = replace(machine, vram_bytes=machine.vram_bytes + more_bytes)
    return replace(request, vram_bytes=None if limit is None else limit + more_bytes), larger


def second_card(request: PlanRequest, machine: MachineFigures) -> tuple[PlanRequest, MachineFigures]:
    """The same run where every layer's bytes are split over two cards and links, and neither waits for the other: a
    bound of what tensor parallelism could bring."""
    limit = machine.vram_bytes if request.vram_bytes is None else request.vram_bytes
    request, larger = _with_vram(request, machine, max(0, limit - machine.vram_reserved_bytes))
    twice = {dtype: 2 * tflops for dtype, tflops in machine.tflops.items()}
    return request, replace(larger, link_gbps=2 * machine.link_gbps, hbm_gbps=2 * machine.hbm_gbps, tflops=twice)
