"""How large a window a generation may propose: what was asked for, against what the runtime was loaded for."""

from __future__ import annotations

from dataclasses import dataclass

from offload_runtime.config import GenerationParams
from offload_runtime.errors import OptionError
from offload_runtime.speculation import NoProposer, Proposer


@dataclass(frozen=True)
class WindowSize:
    """Most tokens to propose per round and sequence: `gamma` in a row and `tree_nodes` in all, None for chains."""

    gamma: int
    tree_nodes: int | None = None


@dataclass(frozen=True)
class WindowLimits:
    """What windows were planned for.

    Attributes:
        max_gamma: Largest gamma to be asked for.
        most_nodes: Proposals that a window has room for.
        default: Where nothing is asked for.
    """

    max_gamma: int
    most_nodes: int
    default: WindowSize

    def settle(self, params: GenerationParams, proposer: Proposer) -> WindowSize:
        """What a generation proposes.

        Raises:
            OptionError: More than there is room for, or something that this proposer would ignore.
        """
        gamma = self.default.gamma if params.gamma is None else params.gamma
        nodes = self.default.tree_nodes if params.tree_nodes is None else params.tree_nodes
        if gamma > self.max_gamma:
            raise OptionError(f"gamma {gamma} exceeds the {self.max_gamma} this runtime was loaded for (max_gamma)")
        if isinstance(proposer, NoProposer) and params.gamma is not None:
            raise OptionError("gamma does nothing without a draft: drop it or choose --draft ngram")
        if nodes is not None and nodes > self.most_nodes:
            raise OptionError(
                f"tree_nodes {nodes} exceeds the {self.most_nodes} that a window of this runtime has room for: load it "
                f"with tree_nodes={nodes} (--tree-nodes {nodes})"
            )
        if params.tree_nodes is not None and not proposer.makes_trees:
            raise OptionError(
                f"tree_nodes {nodes} does nothing where nobody proposes branches: drop it, choose --draft ngram, or "
                f"load a draft model with tree_nodes={nodes} (--tree-nodes {nodes}), which makes room for them"
            )
        return WindowSize(gamma, nodes)
