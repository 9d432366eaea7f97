"""Room for trees where nobody said how much: as much as is likely to be of use, and never at the cost of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offload_runtime.engine.placing import link_bytes
from offload_runtime.engine.run_plan import RunPlan
from offload_runtime.errors import BudgetError

# Nodes that a pass verifies at hardly any cost: beside what is streamed, and where everything is on the device.
_STREAMED_NODES, _RESIDENT_NODES = 256, 32
# A pass may stream so many times as much for it: trees bring more than that.
_MOST_STREAMED = 1.1


def with_tree_room(
    asked: int | None, planned: Callable[[int], RunPlan], *, draft: str, mode: str, ram_bytes: int
) -> RunPlan:
    """A plan with room for trees.

    Args:
        asked: Nodes of a window; 0 for no room, None for what suits the run.
        planned: Plans a run with room for so many nodes; raises what planning raises.
        draft: `ngram`, `none`, or anything else for a model.
        mode: Of `SpeculationOptions`.
        ram_bytes: Host memory that may be used.

    Raises:
        BudgetError, OptionError, ContextLengthError: As `planned`; never because of room that was not asked for.
    """
    if asked is not None:
        return replace(planned(asked), tree_room=asked)
    lean = planned(0)
    if draft == "none" or mode in ("none", "triforce") or lean.placed.middle is not None:
        return lean
    if (model := lean.placed.plans.draft) is not None and not model.has_full_cache:
        return replace(lean, tree_note="no trees: they need a draft with a full KV cache (--draft-cache full)")
    streamed_bytes = _streamed_bytes(lean)
    for nodes in (_STREAMED_NODES, _RESIDENT_NODES) if streamed_bytes else (_RESIDENT_NODES,):
        try:
            roomy = planned(nodes)
        except BudgetError:
            continue
        if (
            _streamed_bytes(roomy) <= _MOST_STREAMED * streamed_bytes
            and roomy.host_bytes <= max(ram_bytes, lean.host_bytes)
            and _num_staged(roomy) <= _num_staged(lean)
        ):
            # Trees did not decide about TriForce.
            placed = replace(roomy.placed, reason=lean.placed.reason)
            return replace(roomy, placed=placed, tree_room=nodes)
    return replace(lean, tree_note="no trees: room for them would push layers off the device (--tree-nodes N insists)")


def _streamed_bytes(plan: RunPlan) -> int:
    return link_bytes(plan.placed.plans, plan.placed.placement)


def _num_staged(plan: RunPlan) -> int:
    return len(plan.staged_weight_layers) + len(plan.staged_kv_layers)


def describe_tree_room(plan: RunPlan) -> str:
    """A phrase with its separator; nothing where trees are out of the question."""
    if plan.tree_note:
        return f"; {plan.tree_note}"
    return f"; trees of up to {plan.tree_room} nodes" if plan.tree_room else ""
