"""What is taken of all that fits: what is predicted to be the fastest. A plan and a run choose here alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_runtime.config import format_bytes, format_bytes_up
from offload_runtime.engine.candidates import Asked, Candidates, find_candidates
from offload_runtime.engine.levels import PlacedLevels
from offload_runtime.engine.placing import link_bytes
from offload_runtime.engine.run_plan import RunPlan, describe_run
from offload_runtime.engine.speed import Speed
from offload_runtime.errors import BudgetError, OptionError


@dataclass(frozen=True)
class HostMemory:
    """Most host memory to use, and whether what is streamed from it is page-locked (None: on CUDA)."""

    ram_bytes: int
    page_locks: bool | None = None


def choose(asked: Asked, host: HostMemory, speed: Speed) -> RunPlan:
    """The fastest of all ways to place a run; one that host memory has room for, if there is one.

    Each way is as fast with more device memory or faster, and none is lost by it, so that the fastest of them is too.

    Raises:
        BudgetError: Nothing fits the device or what can be page-locked; says for how many sequences something would.
        OptionError: TriForce was asked for and cannot be here.
    """
    found = _of_batch(asked)
    hierarchy = _fastest(found.hierarchies, asked, host, speed)
    chain = _fastest(found.chains, asked, host, speed)
    if hierarchy is None or chain is None:
        one = chain or hierarchy
        assert one is not None
        return _because(one, found.obstacle)
    speeds = speed(hierarchy.placed), speed(chain.placed)
    compared = comparison(*speeds, speed)
    if hierarchy.host_bytes > max(host.ram_bytes, chain.host_bytes):
        missing = format_bytes_up(hierarchy.host_bytes - host.ram_bytes)
        return _because(chain, f"it takes {missing} more than the {format_bytes(host.ram_bytes)} of host memory")
    if chain.host_bytes > host.ram_bytes or speeds[0] > speeds[1]:
        return _because(hierarchy, f"predicted to be faster: {compared}")
    return _because(chain, f"predicted to be slower: {compared}")


def _of_batch(asked: Asked) -> Candidates:
    """What fits, or for how many sequences there is room."""

    def fails(sequences: int) -> bool:
        try:
            find_candidates(asked.of_batch(sequences))
        except (BudgetError, OptionError):
            return True
        return False

    batch = asked.plans.target.batch
    try:
        return find_candidates(asked)
    except (BudgetError, OptionError) as error:
        fitting = bisect_left(range(1, batch), True, key=fails)
        if not fitting:
            raise
        raise type(error)(f"{error}; {fitting} prompts at once would fit, {batch} do not") from error


def _fastest(ways: Sequence[PlacedLevels], asked: Asked, host: HostMemory, speed: Speed) -> RunPlan | None:
    """Of equally fast ones that whose passes bring the fewest bytes, and the first of those. Where host memory has room
    for none, what takes the least of it."""
    ranked = sorted(ways, key=lambda way: (-speed(way), link_bytes(way.plans, way.placement)))
    plans: list[RunPlan] = []
    for way in ranked:
        plans.append(describe_run(way, asked.budget, speed.device_type, page_locks=host.page_locks))
        if plans[-1].host_bytes <= host.ram_bytes:
            return plans[-1]
    return min(plans, key=lambda plan: plan.host_bytes, default=None)


def _because(plan: RunPlan, reason: str) -> RunPlan:
    return replace(plan, placed=replace(plan.placed, reason=reason))


def comparison(one: float, other: float, speed: Speed) -> str:
    """Two predictions in tokens/s, and by whose figures."""
    return f"{_digits(one)} against {_digits(other)} tokens/s by the figures of {speed.machine.name}"


def _digits(tok_per_s: float) -> str:
    """Three digits, or all before the point."""
    return f"{tok_per_s:.3g}" if tok_per_s < 100 else f"{tok_per_s:.0f}"
