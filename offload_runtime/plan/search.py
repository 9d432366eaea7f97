"""The plan of a run: of every way to place it that fits, the one that is predicted to be the fastest.

Searched are the levels of speculation, the draft's cache, where keys, values and weights go, room for trees where
nobody said how much, and the context where host memory has to hold it. A plan and a run search here alike. Each way is
as fast with more device memory or faster, and none is lost by it, so that the fastest of them is too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import RuntimeConfig, format_bytes, format_bytes_up
from offload_runtime.errors import BudgetError, OffloadError, OptionError
from offload_runtime.plan.forecast import tok_per_s
from offload_runtime.plan.memory import RunPlan, VerifierPlan, make_plan
from offload_runtime.plan.models import MemoryPart, all_resident, with_streaming_cache
from offload_runtime.plan.placement import least_pinned_bytes, place_staged, placements
from offload_runtime.plan.request import PROCESS_BYTES, TREE_ROOMS, MachineFigures, MemoryLimits, limits_of

# Proposals of n-grams for which there may be room: texts that repeat themselves, an edited file above all, go on for so
# long, and nothing else does.
_COPIED = 256
# Less is no context that anybody left it to the runtime to choose.
_LEAST_CONTEXT_TOKENS = 2048


def plan_run(request: RuntimeConfig, machine: MachineFigures) -> RunPlan:
    """Place everything on a machine that need not be here.

    Raises:
        BudgetError: Device, host or page-locked memory is short; says of what, by how much, and what would help.
        OptionError, ContextLengthError: As `Runtime.load`.
    """
    plan = find_plan(request, machine, limits_of(machine, request))
    check_host_memory(plan)
    return plan


def find_plan(request: RuntimeConfig, machine: MachineFigures, limits: MemoryLimits) -> RunPlan:
    """The fastest plan within device and page-locked memory, and within host memory if there is one; of the context
    asked for, or where it is `auto` of the longest one that host memory has room for. Errors as of `plan_run`."""
    plan = _with_tree_room(request, machine, limits, request.context)
    # More than once: with another context other layers may find room on the device, and their keys and values leave
    # less of a token to host memory.
    while request.context == "auto" and (shorter := _shorter_context(plan)) is not None:
        plan = _with_tree_room(request, machine, limits, shorter)
    return plan


def check_host_memory(plan: RunPlan) -> None:
    """Refuse a plan that takes more host memory than there may be, this process included.

    Raises:
        BudgetError: Says of what, by how much, and what would help.
    """
    limits, target = plan.limits, plan.target
    if plan.host_bytes <= limits.ram_bytes:
        return
    loading = plan.loading_bytes + PROCESS_BYTES == plan.host_bytes
    parts = (MemoryPart("weights while they are read", plan.loading_bytes), plan.host[-1]) if loading else plan.host
    ways = [] if loading or not plan.placement.num_streamed else ["raise --vram, which keeps more layers there"]
    if target.on_host and not loading:
        ways.append(f"lower --context (now {target.context_tokens})")
    if plan.draft is not None:
        ways.append("take a smaller draft")
    ways += ["choose a 16-bit --dtype or a smaller model", f"or {limits.ram_way}"]
    listed = ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in parts)
    raise BudgetError(
        f"{limits.ram_name} of {format_bytes(limits.ram_bytes)} is too small by "
        f"{format_bytes_up(plan.host_bytes - limits.ram_bytes)} ({listed}): {', '.join(ways)}"
    )


def _shorter_context(plan: RunPlan) -> int | None:
    """Tokens whose KV cache fits host memory, where the whole context's does not and nobody asked for all of it.

    Returns:
        A number of whole blocks, at least `_LEAST_CONTEXT_TOKENS`; None where a shorter context is no way out.
    """
    target, missing_bytes = plan.target, plan.host_bytes - plan.limits.ram_bytes
    if not target.on_host or missing_bytes <= 0:
        return None
    fewer = -(-missing_bytes // (target.batch * target.config.kv_bytes_per_token(target.dtype.itemsize)))
    tokens = (target.context_tokens - fewer) // BLOCK_TOKENS * BLOCK_TOKENS
    return tokens if tokens >= _LEAST_CONTEXT_TOKENS else None


# --- room for trees


def _with_tree_room(
    request: RuntimeConfig, machine: MachineFigures, limits: MemoryLimits, context: int | str
) -> RunPlan:
    """A plan with room for trees: as much as is asked for, or none, some or much of it, whichever is predicted to be
    the fastest. As fast with more device memory or faster, if the plan is for every room.

    Raises:
        BudgetError, OptionError, ContextLengthError: Never because of room that was not asked for.
    """

    def planned(nodes: int) -> RunPlan:
        return _fastest_plan(make_plan(request, limits, context=context, tree_nodes=nodes), machine)

    if request.tree_nodes is not None:
        return planned(request.tree_nodes)
    lean = planned(0)
    copies = lean.draft is None  # of n-grams, which have much to say only where a text repeats itself
    if request.gamma is not None or (copies and (lean.verifier is not None or lean.proposer == "none")):
        return lean
    # A tree has to fit behind the text: room for more than half of the context is hardly ever used.
    most = max(TREE_ROOMS[0], lean.target.context_tokens // 2)
    found, refused = [lean], ""
    for nodes in (_COPIED,) if copies else [room for room in TREE_ROOMS if room <= most]:
        try:
            roomy = planned(nodes)
        except BudgetError:
            continue
        except OptionError:  # of a draft's cache that cannot grow trees, or has no positions for larger ones
            if len(found) == 1:
                refused = "the draft's KV cache has no places for branches (--draft-cache full or streaming has)"
            break
        if roomy.host_bytes <= max(limits.ram_bytes, lean.host_bytes):
            found.append(roomy)
    if copies:
        return max(reversed(found), key=lambda plan: tok_per_s(plan, machine))  # room that makes nothing slower
    # The first of equals: the least room.
    best = max(found, key=lambda plan: tok_per_s(plan, machine))
    if best.tree_room:
        reason = lean.reason
        if lean.verifier is not None:
            reason = f"predicted to be slower: {_comparison(lean, best, machine)}"
        return replace(best, reason=reason)
    if best.verifier is not None:
        return best
    return replace(best, tree_note=f"no trees: {refused or 'room for them would cost more than they bring'}")


# --- the fastest way


def _fastest_plan(plan: RunPlan, machine: MachineFigures) -> RunPlan:
    """The fastest of all ways to place a plan; one that host memory has room for, if there is one.

    Raises:
        BudgetError: Nothing fits the device or what can be page-locked; says for how many sequences something would.
        OptionError: TriForce was asked for and cannot be here.
    """
    chains, with_verifier, obstacle = _of_batch(plan)
    triforce, chain = _fastest(with_verifier, machine), _fastest(chains, machine)
    if triforce is None or chain is None:
        one = chain or triforce
        assert one is not None
        return replace(one, reason=obstacle)
    ram_bytes, compared = plan.limits.ram_bytes, _comparison(triforce, chain, machine)
    if triforce.host_bytes > max(ram_bytes, chain.host_bytes):
        missing = format_bytes_up(triforce.host_bytes - ram_bytes)
        return replace(chain, reason=f"it takes {missing} more than the {format_bytes(ram_bytes)} of host memory")
    if chain.host_bytes > ram_bytes or tok_per_s(triforce, machine) > tok_per_s(chain, machine):
        return replace(triforce, reason=f"predicted to be faster: {compared}")
    return replace(chain, reason=f"predicted to be slower: {compared}")


def _of_batch(plan: RunPlan) -> tuple[Sequence[RunPlan], Sequence[RunPlan], str]:
    """What fits, or for how many sequences there is room."""

    def fails(sequences: int) -> bool:
        try:
            find_candidates(plan.of_batch(sequences))
        except (BudgetError, OptionError):
            return True
        return False

    batch = plan.target.batch
    try:
        return find_candidates(plan)
    except (BudgetError, OptionError) as error:
        fitting = bisect_left(range(1, batch), True, key=fails)
        if not fitting:
            raise
        raise type(error)(f"{error}; {fitting} prompts at once would fit, {batch} do not") from error


def _fastest(ways: Sequence[RunPlan], machine: MachineFigures) -> RunPlan | None:
    """Of equally fast ones that whose passes bring the fewest bytes, and the first of those. Where host memory has room
    for none, what takes the least of it."""
    ranked = sorted(ways, key=lambda way: (-tok_per_s(way, machine), way.streamed_bytes))
    fitting = (way for way in ranked if way.host_bytes <= way.limits.ram_bytes)
    return next(fitting, None) or min(ranked, key=lambda way: way.host_bytes, default=None)


def _comparison(one: RunPlan, other: RunPlan, machine: MachineFigures) -> str:
    """Two predictions in tokens/s, and by whose figures."""
    # Three digits, or all before the point.
    speeds = (tok_per_s(plan, machine) for plan in (one, other))
    digits = [f"{speed:.3g}" if speed < 100 else f"{speed:.0f}" for speed in speeds]
    return f"{' against '.join(digits)} tokens/s by the figures of {machine.name}"


# --- all ways


def find_candidates(plan: RunPlan) -> tuple[Sequence[RunPlan], Sequence[RunPlan], str]:
    """All ways to place a plan that fit, within device and page-locked memory; at least one.

    Returns:
        Ways without and with a retrieval verifier, and why there is none of these.

    Raises:
        BudgetError: Nothing fits; OptionError: TriForce was asked for and cannot be here.
    """
    mode, draft = plan.request.speculation.mode, plan.draft
    if mode == "triforce":
        ways, obstacle = _triforce(plan)
        if not ways and obstacle is not None:
            raise obstacle.error
        return (), ways, ""
    chains = _chains(plan)
    if mode != "auto" or draft is None:
        return chains, (), ""
    if draft.tree_slots:
        return chains, (), "the draft was asked for trees"
    ways, obstacle = _triforce(plan)
    return chains, ways, "" if obstacle is None else obstacle.reason


def _draft_alternatives(plan: RunPlan) -> tuple[RunPlan, ...]:
    """The plan with each cache that its draft may get: where that is left to us, a streaming one besides what it was
    planned with, which takes memory that layers or the KV cache of the target could have."""
    draft = plan.draft
    if draft is None or draft.options.draft_cache != "auto" or draft.cache == "streaming" or draft.tree_slots:
        return (plan,)
    if draft.streaming_tokens >= draft.context_tokens:
        return (plan,)
    return plan, replace(plan, draft=with_streaming_cache(draft))


def _chains(plan: RunPlan) -> Sequence[RunPlan]:
    placed: list[RunPlan] = []
    for way in _draft_alternatives(plan):
        try:
            placed += placements(way, plan.request.kv)
        except BudgetError as error:
            refused = error
    if not placed:
        raise refused
    staged: list[RunPlan] = []
    for way in placed:
        with suppress(BudgetError):
            staged.append(_staged(way))
    return staged or [_staged(min(placed, key=least_pinned_bytes))]  # whose refusal names the least


def _staged(plan: RunPlan) -> RunPlan:
    return plan.with_placement(place_staged(plan.target, plan.limits.pinned_bytes, plan.limits.pinned_name))


# --- with a retrieval verifier


@dataclass(frozen=True)
class _Obstacle:
    """Why there is no retrieval verifier: in a phrase where nobody asked for it, and as an error."""

    reason: str
    error: OffloadError


def _triforce(plan: RunPlan) -> tuple[Sequence[RunPlan], _Obstacle | None]:
    """Ways with a retrieval verifier; where there is none, what keeps the one that asks for the least from being."""
    target, kv = plan.target, plan.request.kv
    verifier = VerifierPlan(
        target.config, target.dtype, plan.request.speculation, target.context_tokens, target.batch
    )  # fmt: skip
    found: list[RunPlan] = []
    obstacle: _Obstacle | None = None
    for alternative in _draft_alternatives(plan):
        for place in ("gpu", "host") if kv == "auto" else (kv,):
            try:
                ways = placements(replace(alternative, verifier=verifier), place, whole_weights=True)
            except BudgetError as error:
                obstacle = _Obstacle(f"its {format_bytes(verifier.nbytes)} do not fit the device", error)
                continue
            kept_out = [_obstacle(way) for way in ways]
            found += [way for way, one in zip(ways, kept_out, strict=True) if one is None]  # nothing has to be staged
            obstacle = next((one for one in reversed(kept_out) if one is not None), obstacle)
    return found, None if found else obstacle


def _obstacle(plan: RunPlan) -> _Obstacle | None:
    """Why there cannot be a retrieval verifier where one was placed, and what would help; None where there can."""
    kept_out = _what_keeps_triforce_out(plan)
    if kept_out is None:
        return None
    kind, reason, ways = kept_out
    # Who has no draft has nobody to propose a chain.
    without = f"or use --speculation {'none' if plan.draft is None else 'chain'}"
    return _Obstacle(reason, kind(f"no TriForce here: {reason}: {', '.join([*ways, without])}"))


def _what_keeps_triforce_out(plan: RunPlan) -> tuple[type[OffloadError], str, Sequence[str]] | None:
    """The kind of error, the reason in a phrase, and the ways out."""
    target, draft, limits, budget_tokens = plan.target, plan.draft, plan.limits, plan.request.speculation.budget_tokens
    context, layers = target.context_tokens, target.config.num_layers
    if budget_tokens > context:
        reason = f"a retrieval budget of {budget_tokens} tokens is more than the context of {context}"
        return OptionError, reason, ["lower --budget-tokens", "raise --context"]
    if any(window is not None for window in target.config.layer_windows):
        return OptionError, "it needs full attention, and this model has sliding windows", []
    if plan.placement.num_streamed:
        streamed = f"{plan.placement.num_streamed} of {layers} layers"
        if plan.request.resident_layers is not None:
            return OptionError, f"{streamed} are streamed", ["drop --resident-layers"]
        # With no keys and values on the device that could go.
        assert limits.device_bytes is not None
        lean = plan.with_placement(all_resident(layers))
        missing = format_bytes_up(lean.device_bytes - limits.device_bytes)
        ways = [f"raise --vram by {missing}", "lower --context"]
        return OptionError, f"beside it {streamed} would be streamed", ways
    if draft is not None and draft.cache != "streaming" and draft.context_tokens < context:
        # Behind its last position the draft has nothing to say, and the verifier would wait for it.
        reason = f"the draft was made for {draft.context_tokens} tokens and the context has {context}"
        return OptionError, reason, ["take --draft-cache streaming", "lower --context"]
    if limits.pinned_bytes is not None and target.host_kv_bytes > limits.pinned_bytes:
        reason = (
            "it reads keys and values where they lie in host memory, which takes page-locked memory, and "
            f"{limits.pinned_name} page-locks {format_bytes(limits.pinned_bytes)} of the "
            f"{format_bytes_up(target.host_kv_bytes)} of the KV cache, too little by "
            f"{format_bytes_up(target.host_kv_bytes - limits.pinned_bytes)}"
        )
        return BudgetError, reason, ["allow more with --pinned", f"lower --context (now {context})", "raise --vram"]
    return None
