"""What a tree of candidates consists of: nodes, and behind each of them what a draft offers that is no node yet.

Plain data; `CandidateTree` owns it and keeps it in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Offer:
    """Children that are no nodes yet, the likeliest first, from place `next` on but for those that have become nodes
    otherwise. `last`, the newest node among those before, is likelier than all that are left, and not expanded."""

    tokens: Sequence[int]
    log_probabilities: Sequence[float]  # given the parent
    source: str
    next: int
    last: int


@dataclass(slots=True)
class Node:
    """`depth` and `log_probability` count from where the tree once began, so that a new root changes neither."""

    token: int
    parent: int
    depth: int
    log_probability: float
    source: str
    children: dict[int, int] = field(default_factory=dict)  # by token, the first that was added first
    expanded: bool = False
    slots: tuple[int, ...] = ()  # of the path to it, from below the root on; of nodes that have keys
    offer: Offer | None = None  # where there is something left of it
