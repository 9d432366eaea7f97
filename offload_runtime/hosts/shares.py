"""Who has which layers of a model that several machines share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import OptionError
from offload_runtime.hardware import MachineProfile
from offload_runtime.hosts.group import HostGroup
from offload_runtime.models.part import in_words
from offload_runtime.sizes import counted, format_bytes
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.part import part_of


@dataclass(frozen=True)
class Shares:
    """Says which layers each rank has, and what this one found out on its way.

    Attributes:
        group: Of the ranks.
        source: The whole target.
        config: Of what this rank loads, its layers of that.
        in_use: Of its GPUs, before it touched any.
        figures: Those of this machine, where they are known.
        facts: What each rank has said of itself.
        deal: Says who has which layers in so many strides.
        strides: In how many they are dealt out.
    """

    group: HostGroup
    source: CheckpointSource
    config: RuntimeConfig
    in_use: Mapping[str, int]
    figures: MachineProfile | None
    facts: Sequence[Mapping[str, Any]]
    deal: Callable[[int], Sequence[Sequence[int]]]
    strides: int = 1

    @property
    def layers(self) -> Sequence[Sequence[int]]:
        """Return those of each rank, in ascending order."""
        return self.deal(self.strides)

    def in_strides(self, strides: int) -> Shares:
        """Return the same with layers dealt out in so many strides."""
        own = part_of(self.source, self.deal(strides)[self.group.rank])
        return replace(self, config=replace(self.config, target=own), strides=strides)

    @property
    def in_words(self) -> str:
        """Say who has what."""
        each = (
            f"{counted(len(layers), 'layer')} ({in_words(layers)}) on {self.group.name(rank)}, "
            f"{one['device']} with {format_bytes(one['free_bytes'])}"
            for rank, (layers, one) in enumerate(zip(self.layers, self.facts, strict=True))
        )
        return "; ".join(each)


def require_same(facts: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> None:
    """Refuse ranks of which one says something else than the first about what has to be the same, whose `names` people
    know. Raises `OptionError`, which says who has what."""
    first = facts[0]
    for key, what in names.items():
        for rank, one in enumerate(facts):
            if one[key] != first[key]:
                raise OptionError(
                    f"rank {rank} ({one['host']}) has another {what} than rank 0 ({first['host']}): {one[key]}, not "
                    f"{first[key]}; its bits would be others than those of one machine"
                )
