"""What a run that does not fit could have instead: other settings, a smaller format, a larger machine; all planned."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from offload_runtime.config import RuntimeConfig, SpeculationMode
from offload_runtime.errors import BudgetError, ContextLengthError, OffloadError, OptionError
from offload_runtime.plan.cost import tok_per_s
from offload_runtime.plan.memory import RunPlan, make_plan
from offload_runtime.plan.offers import (
    Change,
    FormatOffer,
    best_tok_per_s,
    formats_that_fit,
    plan_or_none,
    proposing,
    rounded,
    without_draft,
)
from offload_runtime.plan.request import NO_LIMIT_BYTES, MachineFigures, limits_of, longest_context, resolve_context
from offload_runtime.plan.search import find_candidates, most_sequences, plan_run
from offload_runtime.plan.staging import least_pinned_bytes
from offload_runtime.sizes import GB, format_bytes_up, parse_bytes, size_option_down

_CONTEXT_STEP = 256
_LEAST_BUDGET = 256
_BYTES_STEP = 10_000_000
# Of `--vram`: sizes that are typed as they are printed.
_VRAM_STEP = 100_000_000
Sizes: TypeAlias = int | tuple[int, ...]
Changed = TypeVar("Changed", RuntimeConfig, MachineFigures)


@dataclass(frozen=True)
class Suggestion:
    """Settings that fit: what to change, on the command line where it is an option, and the plan that follows."""

    change: str
    machine: MachineFigures
    plan: RunPlan


@dataclass(frozen=True)
class Refusal:
    """A run that does not fit: why, what is short (a name of memory to missing bytes), and what would fit: `formats` of
    the same model, and settings or machines for it as it is; `close` says what to close where that gives more VRAM."""

    problem: OffloadError
    short_bytes: dict[str, int]
    suggestions: tuple[Suggestion, ...]
    formats: tuple[FormatOffer, ...]
    machine: MachineFigures
    close: str = ""

    @property
    def remedies(self) -> list[str]:
        """What fits, a phrase each, with the speed to expect where the machine's figures are known."""
        found = [self._format(offer) for offer in self.formats]
        for one in self.suggestions:
            change = one.change.replace("a machine with ", "").replace("host memory", "RAM")
            change = re.sub(r"device memory", "VRAM", change)
            found.append(f"with {change} it fits{self._speed(one.plan, one.machine)}")
        found += [self.close] if self.close and "device memory" in self.short_bytes else []
        return found or ["no shorter context, smaller format or other option makes it fit: take a smaller model"]

    def _format(self, offer: FormatOffer) -> str:
        said = f"as {offer.mix} (about {offer.nbytes / GB:.0f} GB) it fits{self._speed(offer.plan, self.machine)}"
        if offer.drafted is None or not self.machine.is_known:
            return said
        assert offer.draft is not None
        faster = rounded(tok_per_s(offer.drafted, self.machine))
        return f"{said} plain, about {faster} with a {offer.draft.size} draft {offer.draft.example}"

    def _speed(self, plan: RunPlan, machine: MachineFigures) -> str:
        return f": {rounded(best_tok_per_s(plan, machine))} tokens/s" if machine.is_known else ""

    def error(self) -> OffloadError:
        """The problem and what would fit, in one sentence each."""
        if not isinstance(self.problem, BudgetError):
            return self.problem
        return type(self.problem)(f"{self.problem}. What would do: {'; '.join(self.remedies)}")


def plan_or_refuse(request: RuntimeConfig, machine: MachineFigures) -> RunPlan | Refusal:
    """Plan a run, or say what is short and what would fit, see `refusal`.

    Raises:
        OptionError: The request makes no sense on any machine.
    """
    try:
        return plan_run(request, machine)
    except (BudgetError, ContextLengthError, OptionError) as error:
        return refusal(error, request, machine)


@contextmanager
def remedies(request: RuntimeConfig, machine: MachineFigures, what_to_close: Callable[[], str]) -> Iterator[None]:
    """Add to a `BudgetError` from within what would fit the machine in place of the request, and what to close where
    all that is free is too little."""
    try:
        yield
    except BudgetError as error:
        close = what_to_close() if request.vram is None else ""
        raise replace(refusal(error, request, machine), close=close).error() from error


def refusal(error: OffloadError, request: RuntimeConfig, machine: MachineFigures) -> Refusal:
    """What would fit in place of a request that does not: settings of the run, one at a time or else all as small as
    they go; smaller formats where no setting suffices or the weights exceed the machine's RAM; and a larger machine.

    Raises:
        OptionError: The error itself, where the request makes no sense on any machine.
    """
    beyond, lowered = _within(request, machine)
    before = _typed(beyond)
    suggestions = [*_fitting([(before, lowered)], machine)] if beyond else []
    if not suggestions:
        suggestions += _fitting(_single_changes(lowered, machine), machine, before)
    if not suggestions:
        suggestions += islice(_fitting(_smallest(lowered, machine), machine, before), 1)
    short_bytes, larger = _larger_machine(beyond, lowered, machine)
    # Where the machine is short of RAM, settings that fit are so slow that a smaller file is worth telling of.
    too_large = not suggestions or ("host memory" in short_bytes and request.ram is None)
    formats = tuple(formats_that_fit(lowered, machine)) if too_large else ()
    suggestions += larger
    if not suggestions and isinstance(error, OptionError):
        raise error
    return Refusal(error, short_bytes, tuple(suggestions), formats, machine)


def _fitting(changes: Iterable[Change], machine: MachineFigures, before: str = "") -> Iterator[Suggestion]:
    """Of some changes, which come behind another one, those that fit, each tried when it is asked for."""
    for change, request in changes:
        if (plan := plan_or_none(request, machine)) is not None:
            yield Suggestion(f"{before} {change}".lstrip(), machine, plan)


# --- other settings


def _typed(options: Mapping[str, str]) -> str:
    return " ".join(f"{name} {value}" for name, value in options.items())


def _with(what: Changed, field: str, value: Any) -> Changed:
    return replace(what, **{field: value})


def _within(request: RuntimeConfig, machine: MachineFigures) -> tuple[dict[str, str], RuntimeConfig]:
    """Options that lower limits beyond what the machine has to nearly all of it, and the request that follows."""
    options, there = {}, {"vram": machine.vram_bytes, "ram": machine.ram_bytes, "pinned": machine.lockable_bytes}
    for name, there_bytes in there.items():
        asked = getattr(request, name)
        most_bytes = max(asked) if isinstance(asked, tuple) else asked
        if most_bytes is not None and most_bytes > there_bytes:
            whole = parse_bytes(size_option_down(there_bytes))
            lowered = _each(asked, partial(min, whole))
            options[f"--{name}"] = _sizes_option(lowered)
            request = _with(request, name, lowered)
    return options, request


def _each(sizes: Sizes, changed: Callable[[int], int]) -> Sizes:
    """One size changed, or each of several."""
    return tuple(map(changed, sizes)) if isinstance(sizes, tuple) else changed(sizes)


def _sizes_option(sizes: Sizes) -> str:
    """The same as an option's value."""
    return ",".join(map(size_option_down, sizes if isinstance(sizes, tuple) else (sizes,)))


def _largest(
    option: str, values: Sequence[int], changed: Callable[[int], RuntimeConfig], machine: MachineFigures
) -> Iterator[Change]:
    """The change to the last of an option's ascending values that fits, as all before it are taken to."""
    index = bisect_left(values, True, key=lambda value: plan_or_none(changed(value), machine) is None)
    if index:
        yield f"{option} {values[index - 1]}", changed(values[index - 1])


def _shorter(request: RuntimeConfig, machine: MachineFigures) -> Iterator[Change]:
    """The change to the longest context that fits, if it is shorter than what was asked for: whole blocks, and the
    longest that the model has when more was asked for."""
    config = request.target.config()
    longest = longest_context(config)
    asked = resolve_context(None, config, kv=request.kv) if request.context is None else request.context
    options, least = request.speculation, _CONTEXT_STEP
    if options.mode == "triforce" or (request.proposed_by == "the draft" and options.draft_cache == "retrieval"):
        least = -(-options.budget_tokens // _CONTEXT_STEP) * _CONTEXT_STEP  # of less they cannot retrieve as much
    contexts = [*range(least, min(asked, longest), _CONTEXT_STEP), *([longest] if asked > longest else [])]
    return _largest("--context", contexts, lambda tokens: replace(request, context=tokens), machine)


def _with_vram_of(request: RuntimeConfig, nbytes: int) -> RuntimeConfig:
    """The same where each card may take `nbytes`, or more where it may already."""
    asked = request.vram
    raised = tuple(max(nbytes, one) for one in asked) if isinstance(asked, tuple) else nbytes
    return replace(request, vram=raised)


def _least_vram(request: RuntimeConfig, machine: MachineFigures, sizes: Sequence[int]) -> int | None:
    """The least of ascending limits of a card's memory whose plan fits, as it is taken to for all larger ones."""

    def fits(size: int) -> bool:
        return plan_or_none(_with_vram_of(request, size), machine) is not None

    # The first is likely where what is short is another memory.
    index = 0 if sizes and fits(sizes[0]) else bisect_left(sizes, True, key=fits)
    return sizes[index] if index < len(sizes) else None


def _single_changes(request: RuntimeConfig, machine: MachineFigures) -> Iterator[Change]:
    if request.vram is not None:
        asked_bytes = min(request.vram) if isinstance(request.vram, tuple) else request.vram
        sizes = range((asked_bytes // _VRAM_STEP + 1) * _VRAM_STEP, machine.vram_bytes + 1, _VRAM_STEP)
        if (vram_bytes := _least_vram(request, machine, sizes)) is not None:
            raised = _with_vram_of(request, vram_bytes)
            assert raised.vram is not None
            yield f"--vram {_sizes_option(raised.vram)}", raised
    if request.encode == "none":
        yield "--encode auto", replace(request, encode="auto")
    yield from _shorter(request, machine)
    fewer = range(1, min(request.max_batch or 1, most_sequences(request, limits_of(machine, request)) + 1))
    yield from _largest("--batch", fewer, lambda sequences: replace(request, max_batch=sequences), machine)
    if request.kv != "auto":
        for place in ("auto", "gpu" if request.kv == "host" else "host"):
            yield f"--kv {place}", replace(request, kv=place)
    if request.resident_layers is not None:
        yield "--resident-layers auto", replace(request, resident_layers=None)
    options = request.speculation
    if options.mode == "triforce":
        mode: SpeculationMode = "none" if request.proposed_by == "none" else "chain"
        yield proposing(f"--speculation {mode}", request, request.draft, replace(options, mode=mode))
        budgets = [options.chunk_size << power for power in range(16)]
        yield from _largest(
            "--budget-tokens", [tokens for tokens in budgets if _LEAST_BUDGET <= tokens < options.budget_tokens],
            lambda tokens: replace(request, speculation=replace(options, budget_tokens=tokens)), machine,
        )  # fmt: skip
    if request.proposed_by == "the draft":
        if options.draft_cache != "streaming":
            streaming = replace(options, draft_cache="streaming")
            yield proposing("--draft-cache streaming", request, request.draft, streaming)
        yield without_draft(request)


def _smallest(request: RuntimeConfig, machine: MachineFigures) -> Iterator[Change]:
    """The change of every other setting to as small as it goes, then with the longest context that fits with that; and
    the same with all of the card where less was allowed."""
    changes: list[str] = []
    if request.max_batch not in (None, 1):
        changes, request = ["--batch 1"], replace(request, max_batch=1)
    if request.kv != "auto":
        changes, request = [*changes, "--kv auto"], replace(request, kv="auto")
    if request.resident_layers is not None:
        changes, request = [*changes, "--resident-layers auto"], replace(request, resident_layers=None)
    if request.proposed_by == "the draft":
        change, request = without_draft(request)
        changes.append(change)
    options = [(changes, request)]
    if request.vram is not None:
        whole = size_option_down(machine.vram_bytes)  # as much as is typed as it is printed
        options.append(([f"--vram {whole}", *changes], replace(request, vram=parse_bytes(whole))))
    for changes, request in options:
        yield " ".join(changes), request
        for change, shorter in _shorter(request, machine):
            yield " ".join([change, *changes]), shorter


# --- a larger machine


def _larger_machine(
    beyond: Mapping[str, str], request: RuntimeConfig, machine: MachineFigures
) -> tuple[dict[str, int], Iterable[Suggestion]]:
    """What is short, by the name of the memory, and the least of each kind that the run needs, if anything is enough,
    as options of the command line (`beyond` of a request that was lowered) where there are such limits and as a machine
    where that has less; of a context that the model has."""
    there, longest, options = limits_of(machine, request), longest_context(request.target.config()), dict(beyond)
    if request.context is not None and request.context > longest:
        options["--context"], request = str(longest), replace(request, context=longest)
    ample = replace(machine, ram_bytes=NO_LIMIT_BYTES, pinnable_bytes=None, vram_bytes=NO_LIMIT_BYTES)
    searched, vram_limit = replace(request, ram=None, pinned=None), there.device_bytes or 0
    vram_limit = min([vram_limit, *(card.device_bytes or 0 for card in there.further_cards)])
    # From what there is on, in steps.
    vram_bytes = _least_vram(searched, ample, range(vram_limit, NO_LIMIT_BYTES + 1, _BYTES_STEP))
    if vram_bytes is None:
        return {}, ()
    searched = _with_vram_of(searched, vram_bytes)
    needed_pinned = _least(searched, ample, least_pinned_bytes)
    allowed_pinned = NO_LIMIT_BYTES if there.pinned_bytes is None else there.pinned_bytes
    lockable = replace(ample, pinnable_bytes=max(allowed_pinned, needed_pinned))
    needed_host = _least(searched, lockable, lambda plan: plan.host_bytes)
    short_bytes, lacking, larger = {}, [], machine
    for memory, option, field, needed, allowed in (
        ("device memory", "vram", "vram_bytes", vram_bytes, vram_limit),
        ("host memory", "ram", "ram_bytes", needed_host, there.ram_bytes),
        ("page-locked memory", "pinned", "pinnable_bytes", needed_pinned, allowed_pinned),
    ):
        if needed <= allowed:
            continue
        kept_bytes = machine.vram_others_bytes if option == "vram" and request.vram is None else 0
        short_bytes[memory], size = needed - allowed, format_bytes_up(needed + kept_bytes)
        if (asked := getattr(request, option)) is not None:
            enough = parse_bytes(size)
            raised = _each(asked, partial(max, enough))
            options[f"--{option}"] = _sizes_option(raised)
            request = _with(request, option, raised)
        if parse_bytes(size) > (getattr(machine, field) or NO_LIMIT_BYTES):
            lacking.append(f"{size} of {memory}")
            larger = _with(larger, field, parse_bytes(size))
            if field == "ram_bytes" and machine.pinnable_bytes is not None:  # of what is added as much as there is
                larger = replace(larger, pinnable_bytes=machine.pinnable_bytes + larger.ram_bytes - machine.ram_bytes)
    if not lacking and (not short_bytes or [*short_bytes, *options] == ["device memory", "--vram"]):
        return short_bytes, ()  # a single change is enough and named already
    change = f"{_typed(options)} on a machine with {' and '.join(lacking)}" if lacking else _typed(options)
    return short_bytes, _fitting([(change.removeprefix(" on "), request)], larger)


def _least(request: RuntimeConfig, machine: MachineFigures, needed_bytes: Callable[[RunPlan], int]) -> int:
    """The least of some memory without which no plan of a request can be, whatever the machine has of it. Room for
    trees that nobody asked for is nothing that a run has to have.

    Raises:
        BudgetError, OptionError, ContextLengthError: It cannot be in any case.
    """
    limits, nodes = limits_of(machine, request), request.tree_nodes or 0
    return min(map(needed_bytes, find_candidates(make_plan(request, limits, tree_nodes=nodes))[0]))
