"""A draft of trees that says a script, and passes that are over after so many questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from offload_runtime.config import SamplingParams
from offload_runtime.runners import Asked, Children
from offload_runtime.speculation import NoProposer, TreeDraftProposer
from offload_runtime.speculation.step import Watch


def steps(count: int) -> Watch:
    """A pass that is still running as often as it is asked `count` times."""

    def watch(logits: torch.Tensor) -> Callable[[], bool]:
        left = iter([True] * count)
        return lambda: next(left, False)

    return watch


class SureModel:
    """A tree model that says `script` first of all, whatever the path; counts its steps."""

    num_slots = 40

    def __init__(self, script: Sequence[int], *, unready: int = 0) -> None:
        self._script, self.steps, self._unready = list(script), 0, unready
        self.made_ready: list[tuple[list[int], int]] = []
        self._texts: dict[int, list[int]] = {}

    def room(self, length: int) -> int:
        return 1000 - length

    def width(self, num_sequences: int) -> int:
        return 8

    def start(self, params: SamplingParams) -> None:
        pass

    def holds(self, sequence: int, tokens: Sequence[int]) -> bool:
        return self._texts.get(sequence) == list(tokens)

    def adopt(self, sequence: int, tokens: Sequence[int], slots: Sequence[int]) -> None:
        self._texts[sequence] = [*self._texts[sequence], *tokens]

    def get_ready(self, lengths: Sequence[int], further: int) -> bool:
        self.made_ready.append((list(lengths), further))
        return len(self.made_ready) <= self._unready

    def expand(self, asked: Mapping[int, Asked]) -> dict[int, list[Children]]:
        self.steps += 1
        said = {}
        for sequence, one in asked.items():
            self._texts[sequence] = list(one.text)
            assert all(slot < self.num_slots for branch in one.branches for slot in branch.slots)
            places = [len(one.text) + len(branch.slots) for branch in one.branches]
            said[sequence] = [Children([self._script[place], 90, 91], [3.0, 0.0, 0.0]) for place in places]
        return said


def sure_proposer(model: SureModel) -> TreeDraftProposer:
    """One that has started, of one sequence."""
    proposer = TreeDraftProposer(NoProposer(), model, device=torch.device("cpu"), ngrams=None)
    proposer.start([SamplingParams()])
    return proposer
