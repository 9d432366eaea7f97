"""Room for trees where nobody said how much: none, some or much of it, whichever is predicted to be the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offload_runtime.engine.choice import comparison
from offload_runtime.engine.making_plans import TREE_ROOMS
from offload_runtime.engine.run_plan import RunPlan
from offload_runtime.engine.speed import Speed
from offload_runtime.errors import BudgetError, OptionError

# Proposals of n-grams for which there may be room: texts that repeat themselves, an edited file above all, go on for so
# long, and nothing else does.
_COPIED = 256


def with_tree_room(asked: int | None, planned: Callable[[int], RunPlan], speed: Speed, *, ram_bytes: int) -> RunPlan:
    """A plan with room for trees. As fast with more device memory or faster, if `planned` is for every room.

    Args:
        asked: Nodes of a window; 0 for no room, None for what suits the run.
        planned: Plans a run with room for so many nodes; raises what planning raises.
        speed: Predicts it.
        ram_bytes: Host memory that may be used.

    Raises:
        BudgetError, OptionError, ContextLengthError: As `planned`; never because of room that was not asked for.
    """
    if asked is not None:
        return replace(planned(asked), tree_room=asked)
    lean = planned(0)
    if speed.gamma is not None:
        return lean
    if lean.placed.plans.draft is None:
        return _with_room_for_copies(lean, planned, speed, ram_bytes)
    found, refused = [lean], ""
    # A tree has to fit behind the text: room for more than half of the context is hardly ever used.
    most = max(TREE_ROOMS[0], lean.placed.plans.target.context_tokens // 2)
    for nodes in (room for room in TREE_ROOMS if room <= most):
        try:
            roomy = _fitting(nodes, planned, max(ram_bytes, lean.host_bytes))
        except OptionError:  # of a draft's cache that cannot grow trees, or has no positions for larger ones
            if len(found) == 1:
                refused = "the draft's KV cache has no places for branches (--draft-cache full or streaming has)"
            break
        if roomy is not None:
            found.append(roomy)
    # The first of equals: the least room.
    best = max(found, key=lambda plan: speed(plan.placed))
    if best.tree_room:
        reason = lean.placed.reason
        if lean.placed.middle is not None:
            reason = f"predicted to be slower: {comparison(speed(lean.placed), speed(best.placed), speed)}"
        return replace(best, placed=replace(best.placed, reason=reason))
    if best.placed.middle is not None:
        return best
    return replace(best, tree_note=f"no trees: {refused or 'room for them would cost more than they bring'}")


def _with_room_for_copies(lean: RunPlan, planned: Callable[[int], RunPlan], speed: Speed, ram_bytes: int) -> RunPlan:
    """The same for n-grams, which have much to say only where a text repeats itself: if nothing is slower for it."""
    if not speed.proposes or lean.placed.middle is not None:
        return lean
    roomy = _fitting(_COPIED, planned, max(ram_bytes, lean.host_bytes))
    return lean if roomy is None or speed(roomy.placed) < speed(lean.placed) else roomy


def _fitting(nodes: int, planned: Callable[[int], RunPlan], ram_bytes: int) -> RunPlan | None:
    """The plan with room for so many nodes; None where they do not fit the device's memory or so much of the host's."""
    try:
        roomy = planned(nodes)
    except BudgetError:
        return None
    return replace(roomy, tree_room=nodes) if roomy.host_bytes <= ram_bytes else None


def describe_tree_room(plan: RunPlan) -> str:
    """A phrase with its separator; nothing where trees are out of the question."""
    if plan.tree_note:
        return f"; {plan.tree_note}"
    return f"; trees of up to {plan.tree_room} nodes" if plan.tree_room else ""
