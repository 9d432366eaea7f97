"""How large a window a generation may propose: what was asked for, against what the runtime was loaded for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload_runtime.config import GenerationParams
from offload_runtime.errors import OptionError
from offload_runtime.speculation import Choice, NoProposer, Proposer, makes_trees


@dataclass(frozen=True)
class WindowSize:
    """Most tokens to propose per round and sequence: `gamma` in a row and `tree_nodes` in all, None for chains, and
    `beside` a chain so many more that cost nothing."""

    gamma: int
    tree_nodes: int | None = None
    beside: int = 0


@dataclass(frozen=True)
class ChosenWindows:
    """Windows that are chosen round by round: by family the most proposals."""

    limits: Mapping[str, int]
    branches: bool = True  # whether there may be any
    free: int = 0  # proposals of a window that make no pass longer

    def window(self, choice: Choice) -> WindowSize:
        """What a choice asks for: of what may branch so many in all, as many of them in a row as turn out likely."""
        if self.branches and choice.may_branch:
            return WindowSize(choice.size, choice.size)
        beside = max(0, self.free - choice.size) if self.branches and choice.mode == "chain" else 0
        return WindowSize(choice.size, beside=beside)


@dataclass(frozen=True)
class WindowLimits:
    """What windows were planned for.

    Attributes:
        max_gamma: Largest gamma to be asked for, and longest chain.
        most_nodes: Proposals that a window has room for.
        gamma: What was asked for when loading, and is proposed where nothing else is; None where windows are chosen.
        tree_nodes: What was asked for when loading, and is proposed where nothing else is; None where windows are
            chosen.
        tree_room: Nodes of a tree that may be chosen; 0 where there is no room for trees of a draft.
        free: Proposals of a window that make no pass longer, as the link takes longer than all of them.
    """

    max_gamma: int
    most_nodes: int
    gamma: int | None = None
    tree_nodes: int | None = None
    tree_room: int = 0
    free: int = 0

    @property
    def by_family(self) -> dict[str, int]:
        """Largest windows that can ever be chosen."""
        looked_up = max(self.max_gamma, self.tree_room)
        limits = {"ngram": looked_up, "unigram": looked_up, "chain": self.max_gamma, "tree": self.tree_room}
        return {family: largest for family, largest in limits.items() if largest}

    def settle(self, params: GenerationParams, proposer: Proposer) -> WindowSize | ChosenWindows:
        """What a generation proposes.

        Raises:
            OptionError: More than there is room for, or something that this proposer would ignore.
        """
        gamma = self.gamma if params.gamma is None else params.gamma
        nodes = self.tree_nodes if params.tree_nodes is None else params.tree_nodes
        if gamma is not None and gamma > self.max_gamma:
            raise OptionError(f"gamma {gamma} exceeds the {self.max_gamma} this runtime was loaded for (max_gamma)")
        if isinstance(proposer, NoProposer) and params.gamma is not None:
            raise OptionError("gamma does nothing without a draft: drop it or choose --draft ngram")
        if nodes is not None and nodes > self.most_nodes:
            raise OptionError(
                f"tree_nodes {nodes} exceeds the {self.most_nodes} that a window of this runtime has room for: load it "
                f"with tree_nodes={nodes} (--tree-nodes {nodes})"
            )
        if params.tree_nodes and not makes_trees(proposer):
            raise OptionError(
                f"tree_nodes {nodes} does nothing where nobody proposes branches: drop it, choose --draft ngram, or "
                f"load a draft model with tree_nodes={nodes} (--tree-nodes {nodes}), which makes room for them"
            )
        return self._settled(gamma, nodes, proposer)

    def _settled(self, gamma: int | None, nodes: int | None, proposer: Proposer) -> WindowSize | ChosenWindows:
        if isinstance(proposer, NoProposer):
            return WindowSize(0)
        if nodes:
            return WindowSize(nodes if gamma is None else gamma, nodes)
        if gamma is not None:
            return WindowSize(gamma)
        limits = {family: self.by_family[family] for family in proposer.families({}) if family in self.by_family}
        if nodes == 0:
            limits = {family: min(largest, self.max_gamma) for family, largest in limits.items() if family != "tree"}
        # Trees are filled by who makes them.
        free = 0 if "tree" in limits else self.free
        return ChosenWindows(limits, branches=nodes != 0, free=free)
