"""What only this runtime is asked, and what of it makes no sense."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from offload_runtime.config import (
    DRAFT_CACHES,
    SPECULATION_MODES,
    GenerationParams,
    ModelConfig,
    SpeculationOptions,
    check_options,
    idle_options,
)
from offload_runtime.errors import OptionError
from offload_runtime.plan import check_window

# What `--draft` may say instead of a model.
NO_MODEL = (None, "ngram", "none")


@dataclass(frozen=True)
class OurOptions:
    """See `Runtime.load` and its `generate`; None leaves it to the runtime."""

    draft: str
    speculation: str
    gamma: int | None
    tree_nodes: int | None
    kv: str
    budget_tokens: int | None = None
    draft_cache: str | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        idle = idle_options(self.has_model, self.speculation, self.draft_cache or "auto")
        for name in ("budget_tokens", "draft_cache"):
            if getattr(self, name) is not None and name in idle:
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name)} does nothing {idle[name]}")
        self.as_speculation()
        kind = "the draft" if self.has_model else self.draft
        check_options(kind, self.speculation, tree_nodes=self.tree_nodes, gamma=None, max_gamma=1)
        GenerationParams(gamma=self.gamma, tree_nodes=self.tree_nodes)

    @property
    def has_model(self) -> bool:
        """Whether the draft is a model."""
        return self.draft not in NO_MODEL

    def check(self, target: ModelConfig, resident_layers: int | None) -> None:
        """Refuse what no runtime could be loaded with. Raises `OptionError`.

        Args:
            target: The model.
            resident_layers: Of it, on the device; None is as many as fit.
        """
        check_window(1 + max(self.gamma or 0, self.tree_nodes or 0), target)
        if self.speculation == "triforce" and resident_layers not in (None, target.num_layers):
            raise OptionError(
                f"--speculation triforce needs all {target.num_layers} layers on the device, --resident-layers is "
                f"{resident_layers}: take --resident-layers auto"
            )

    def as_speculation(self) -> SpeculationOptions:
        """How tokens are proposed. Raises `OptionError` for values that cannot be."""
        defaults = SpeculationOptions()
        return SpeculationOptions(
            self.speculation,
            defaults.draft_cache if self.draft_cache is None else self.draft_cache,
            budget_tokens=defaults.budget_tokens if self.budget_tokens is None else self.budget_tokens,
        )


def add_our_options(parser: argparse.ArgumentParser) -> None:
    """Those that `compare.py` and `ours_runtime.py` have in common."""
    parser.add_argument(
        "--context", type=int,
        help="of `ours`: tokens that its KV cache reserves, for prompt, answer and proposals behind it; those of the "
        "peers grow (default: what the longest takes, and 256 more)",
    )  # fmt: skip
    parser.add_argument("--speculation", choices=SPECULATION_MODES, help="of `ours` (auto)")
    parser.add_argument("--gamma", type=int, help="of `ours`: most tokens proposed in a row")
    parser.add_argument("--tree-nodes", type=int, help="of `ours`: most tokens proposed in all, as a tree")
    parser.add_argument("--budget-tokens", type=int, help="of `ours`: tokens of a retrieval cache, of each layer")
    parser.add_argument("--draft-cache", choices=DRAFT_CACHES, help="of `ours`: the draft's own KV cache")
    parser.add_argument(
        "--kv", choices=("auto", "gpu", "host"), default="auto",
        help="where the KV cache of `ours` lives; compare.py with host: those of the peers, too",
    )  # fmt: skip


def our_options(arguments: argparse.Namespace) -> OurOptions:
    """What the command line says. Raises `OptionError`."""
    return OurOptions(
        draft=arguments.draft or "ngram",
        speculation=arguments.speculation or "auto",
        gamma=arguments.gamma,
        tree_nodes=arguments.tree_nodes,
        kv=arguments.kv,
        budget_tokens=arguments.budget_tokens,
        draft_cache=arguments.draft_cache,
        context=arguments.context,
    )
