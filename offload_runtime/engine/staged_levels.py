"""Everything placed within both memories: on the device by its budget, in host memory by what can be page-locked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_runtime.config import SpeculationOptions, format_bytes, format_bytes_up
from offload_runtime.engine.hierarchy import PlacedLevels, place_batch
from offload_runtime.engine.placing import Limits
from offload_runtime.engine.plans import Plans
from offload_runtime.engine.staging_plan import host_kv_bytes, place_staged
from offload_runtime.errors import BudgetError


@dataclass(frozen=True)
class LockLimit:
    """Most page-locked memory (None: no limit), and whose limit it is, for messages."""

    nbytes: int | None
    name: str


def place_and_stage(
    plans: Plans, budget: Limits, locking: LockLimit, *, resident_layers: int | None, kv: str,
    options: SpeculationOptions,
) -> PlacedLevels:  # fmt: skip
    """Place everything and stage what cannot be page-locked.

    A middle level that would have to read what is staged gives way where nobody asked for it.

    Raises:
        BudgetError: It does not fit, or TriForce was asked for and its keys and values cannot be page-locked.
        OptionError: As `place_batch`.
    """
    staged = _stage(place_batch(plans, budget, resident_layers, kv, options), locking)
    if staged.middle is None or not staged.placement.staged_kv_layers:
        return staged
    assert locking.nbytes is not None
    kv_bytes = host_kv_bytes(staged.plans.target)
    reason = (
        "it reads keys and values where they lie in host memory, which takes page-locked memory, and "
        f"{locking.name} page-locks {format_bytes(locking.nbytes)} of the {format_bytes_up(kv_bytes)} of the KV cache, "
        f"too little by {format_bytes_up(kv_bytes - locking.nbytes)}"
    )
    if options.mode == "triforce":
        raise BudgetError(
            f"no TriForce here: {reason}: allow more with --pinned, lower --context (now "
            f"{staged.plans.target.context_tokens}), raise --vram, or use --speculation chain"
        )
    without = place_batch(plans, budget, resident_layers, kv, replace(options, mode="chain"))
    return replace(_stage(without, locking), reason=reason)


def _stage(placed: PlacedLevels, locking: LockLimit) -> PlacedLevels:
    placement = place_staged(placed.plans.target, placed.placement, locking.nbytes, locking.name)
    return replace(placed, placement=placement)
