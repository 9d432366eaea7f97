"""Some layers of a model, which one of several machines has: a model of its own to plans, caches and loaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import Attention, Tensor


def consecutive(numbers: Sequence[int]) -> list[range]:
    """Return the ranges of numbers that follow one another, of some in ascending order."""
    breaks = [place for place, (one, two) in enumerate(pairwise(numbers), 1) if two != one + 1]
    return [range(numbers[start], numbers[end - 1] + 1) for start, end in pairwise([0, *breaks, len(numbers)])]


def in_words(numbers: Sequence[int]) -> str:
    """Return which layers of a model a machine has."""
    strides = len(consecutive(numbers))
    return f"{numbers[0]} to {numbers[-1]}" + (f" in {strides} strides" if strides > 1 else "")


@dataclass(frozen=True)
class PartConfig(ModelConfig):
    """Describes some layers of a `whole` model, by their `numbers` there: consecutive ones, or strides of a few in turn
    with other machines'. The part with the first of them has what lies around the layers, too; in the others rows come
    from another machine and go back there, so that in place of logits they have channels of the residual stream. A
    head, which is where the first part is, reads the streams below the layers `taps`, by their numbers here, negative
    ones for those of the parts behind."""

    whole: ModelConfig | None = None
    numbers: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()

    @classmethod
    def of(cls, whole: ModelConfig, numbers: Sequence[int]) -> PartConfig:
        """Return the part of a model that has these of its layers."""
        values = {one.name: getattr(whole, one.name) for one in fields(ModelConfig)}
        values["layers"] = tuple(whole.layers[number] for number in numbers)
        if numbers[0]:
            values |= {"vocab_size": whole.hidden_size, "tie_word_embeddings": True}
        return cls(**values, whole=whole, numbers=tuple(numbers))

    @property
    def is_part(self) -> bool:
        """Return whether other machines have the rest of the model: yes."""
        return True

    @property
    def has_ends(self) -> bool:
        """Return whether it has what lies around the layers."""
        return not self.numbers[0]

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
        return {self.own_number(layer): one for layer, one in self.complete.attentions.items()}

    @cached_property
    def strides(self) -> tuple[range, ...]:
        """Return the layers between which rows stay here, by their numbers here."""
        ends = accumulate(map(len, consecutive(self.numbers)), initial=0)
        return tuple(range(*pair) for pair in pairwise(ends))

    def own_number(self, layer: int) -> int:
        """Return the number here of a layer of the whole model, or of what is behind its last one; a negative one where
        that is on another machine."""
        if layer == self.complete.num_layers and self.numbers[-1] == layer - 1:
            return self.num_layers
        return self.numbers.index(layer) if layer in self.numbers else -1 - layer

    def layer_prefix(self, number: int) -> str:
        """Return what stands before the names of a layer's tensors."""
        return super().layer_prefix(self.numbers[number])

    def shared_tensors(self) -> Iterator[Tensor]:
        """Return what lies around the layers, if that is here."""
        return super().shared_tensors() if self.has_ends else iter(())
