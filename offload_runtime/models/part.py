"""Consecutive layers of a model, which one of several machines has: a model of its own to plans, caches and loaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import Attention, Tensor


@dataclass(frozen=True)
class PartConfig(ModelConfig):
    """Describes some layers of a `whole` model, from its layer `first` on. The part with the first of them has what
    lies around the layers, too; in the others rows come from another machine and go back there, so that in place of
    logits they have channels of the residual stream. A head, which is where the first part is, reads the streams below
    the layers `taps`, by their numbers here, and those of the parts behind."""

    whole: ModelConfig | None = None
    first: int = 0
    taps: tuple[int, ...] = ()

    @classmethod
    def of(cls, whole: ModelConfig, layers: range) -> PartConfig:
        """Return the part of a model that has these of its layers."""
        values = {one.name: getattr(whole, one.name) for one in fields(ModelConfig)}
        values["layers"] = whole.layers[layers.start : layers.stop]
        if layers.start:
            values |= {"vocab_size": whole.hidden_size, "tie_word_embeddings": True}
        return cls(**values, whole=whole, first=layers.start)

    @property
    def is_part(self) -> bool:
        """Return whether other machines have the rest of the model: yes."""
        return True

    @property
    def has_ends(self) -> bool:
        """Return whether it has what lies around the layers."""
        return not self.first

    @property
    def num_streams(self) -> int:
        """Return how many streams of its rows go to another machine, for a head to read, besides that of the last."""
        return len(self.taps)

    @property
    def complete(self) -> ModelConfig:
        """Return the model that it is a part of."""
        assert self.whole is not None
        return self.whole

    @cached_property
    def all_attentions(self) -> Mapping[int, Attention]:
        """Return those of the whole model: to how many tokens a sequence can be cut is the same on all machines."""
        return {layer - self.first: one for layer, one in self.complete.attentions.items()}

    def layer_prefix(self, number: int) -> str:
        """Return what stands before the names of a layer's tensors."""
        return super().layer_prefix(self.first + number)

    def shared_tensors(self) -> Iterator[Tensor]:
        """Return what lies around the layers, if that is here."""
        return super().shared_tensors() if self.has_ends else iter(())
