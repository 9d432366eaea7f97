"""A draft of trees that says a script, and passes that are over after so many questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from offload_runtime.params import SamplingParams
from offload_runtime.runners import Asked, Children
from offload_runtime.speculation import Proposer, StepWorth, TreeDraftProposer
from offload_runtime.speculation.step import Watch


def steps(count: int) -> Watch:
    """A pass that is still running as often as it is asked `count` times."""

    def watch(logits: torch.Tensor) -> Callable[[], bool]:
        left = iter([True] * count)
        return lambda: next(left, False)

    return watch


class SureModel:
    """A tree model that says `script` first of all, whatever the path, with these scores; counts its steps."""

    num_slots = 40

    def __init__(self, script: Sequence[int], scores: Sequence[float] = (3.0, 0.0, 0.0)) -> None:
        self._script, self._scores, self.steps = list(script), list(scores), 0
        self._texts: dict[int, list[int]] = {}

    def room(self, length: int) -> int:
        return 1000 - length

    def width(self, num_sequences: int) -> int:
        return 8

    def join(self, sequence: int, params: SamplingParams) -> None:
        pass

    def holds(self, sequence: int, tokens: Sequence[int]) -> bool:
        return self._texts.get(sequence) == list(tokens)

    def adopt(self, sequence: int, tokens: Sequence[int], slots: Sequence[int]) -> None:
        self._texts[sequence] = [*self._texts[sequence], *tokens]

    def expand(self, asked: Mapping[int, Asked]) -> dict[int, list[Children]]:
        self.steps += 1
        said = {}
        for sequence, one in asked.items():
            self._texts[sequence] = list(one.text)
            slots = [slot for branch in one.branches for slot in branch.slots] + list(one.spine)
            assert all(slot < self.num_slots for slot in slots)
            places = [len(one.text) + len(branch.slots) for branch in one.branches]
            places += range(places[-1] + 1, places[-1] + 1 + len(one.spine))
            said[sequence] = [Children([self._script[place], 90, 91], self._scores) for place in places]
        return said


class SteadySteps(StepWorth):
    """One whose steps always take as long: one about many nodes as long as five of a spine."""

    def seconds(self, levels: int) -> float | None:
        return 0.001 * (levels if levels > 1 else 5)


def sure_proposer(model: SureModel, worth: StepWorth | None = None) -> TreeDraftProposer:
    """One that has started, of one sequence."""
    proposer = TreeDraftProposer(
        Proposer(), model, device=torch.device("cpu"), ngrams=None, worth=worth or SteadySteps()
    )  # fmt: skip
    proposer.join(0, SamplingParams())
    return proposer
