"""Any history of requests that are let in, stepped, cancelled and left, and of servings that save blocks and load them,
leaves every answer as it is alone."""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime import GenerationParams, Runtime, SamplingParams
from offload_runtime.engine.request import Request
from tests.test_scheduler import CONTEXT, SPECULATION, Task, assert_as_alone, loaded

TARGET = "two_layer_target"
SLOTS, STORED_BLOCKS = 2, 2
LENGTHS = (1, 20, 257, 300, 520)  # of prompts: within a block of the cache, and over one and two
MOST_BLOCKS = 2  # of a prompt and its answer
GRAMMARS: dict[int, dict[str, Any]] = {
    1: {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    2: {"grammar": 'start: ("the " WORD ", ")~1..2 "."\nWORD: /[a-z]{2,5}/'},
}


class Served(RuleBasedStateMachine):
    """Requests that come and go between two steps of anybody's, and one serving after the other on a directory."""

    def __init__(self, runtime: Runtime, tasks: Sequence[Task], directory: Path) -> None:
        super().__init__()
        self._runtime, self._tasks, self._directory = runtime, tasks, directory
        models = [model for model in (runtime.engine.target, runtime.engine.draft) if model is not None]
        of_blocks = [model.plan.kv_block_bytes for model in models]
        self._stored_bytes = STORED_BLOCKS * of_blocks[0]
        # What slots hold when a serving ends, each block with its checksum, and no block more.
        self._saved_bytes = SLOTS * MOST_BLOCKS * sum(nbytes + 100 for nbytes in of_blocks)
        self._open()

    def _open(self) -> None:
        self._serving = self._runtime.serving(
            prefix_cache_bytes=self._stored_bytes, sessions=self._directory, sessions_bytes=self._saved_bytes
        )
        self._engine, self._asked = self._serving.__enter__(), dict[Request, Task]()

    def _ask(self, task: Task) -> Request:
        request = self._runtime.request(task.prompt, task.params, speculate=task.speculate)
        self._asked[request] = task
        self._engine.add(request)
        return request

    @property
    def _live(self) -> list[Request]:
        return [request for request in self._asked if request.result is None]

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self._ask(data.draw(st.sampled_from(self._tasks)))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Requests that share nothing with others take the slots, whose blocks go to the store and out of it."""
        for task in data.draw(st.permutations([task for task in self._tasks if task.params.max_new_tokens == 1])):
            self._ask(task)

    @rule(steps=st.sampled_from([1, 2, 3, 8, 40]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self._engine.has_requests:
                assert not any(output.error for output in self._engine.step())

    @precondition(lambda self: self._live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self._live))
        self._engine.cancel(request)
        self._asked[request] = replace(self._asked[request], cancelled_after=0)

    @precondition(lambda self: self._asked)
    @rule()
    def save_and_load(self) -> None:
        """Whoever came last is asked again: whole blocks of its prompt are there, all but the last token."""
        newest, task = [*self._asked.items()][-1]
        self._close()
        self._open()
        if newest.tokens:  # else it may never have had a slot
            again = self._ask(task)
            self.step(1)
            assert again.num_kept == (len(task.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @invariant()
    def tokens_are_those_of_the_answer_alone(self) -> None:
        for request, task in self._asked.items():
            assert [*request.tokens] == task.alone.tokens[: len(request.tokens)]

    def teardown(self) -> None:
        self._close()

    def _close(self) -> None:
        while self._engine.has_requests:
            self.step(1)
        self._serving.__exit__(None, None, None)
        for request, task in self._asked.items():
            assert request.result is not None
            assert_as_alone(task, request.result)
        assert sum(file.stat().st_size for file in self._directory.glob("*.kv")) <= self._saved_bytes


def make_tasks(runtime: Runtime, windows: Sequence[dict[str, Any]]) -> list[Task]:
    """Requests whose prompts share beginnings of all lengths, and two that share nothing with any."""
    chance, vocabulary = random.Random(4), runtime.config.vocab_size
    text, *others = ([chance.randrange(3, vocabulary) for _ in range(CONTEXT)] for _ in range(3))
    asked = []
    for number in range(10):
        grammar, penalty = GRAMMARS.get(number % 5, {}), 1.5 * (number % 5 == 4)
        sampling = SamplingParams((0.0, 0.8)[number % 2], seed=number, presence_penalty=penalty, **grammar)
        prompt = text[: chance.choice(LENGTHS)] + [7 + number] * (number % 3)
        window = windows[number % len(windows)]
        most, ignores = chance.randint(2, 12), not grammar
        asked.append((prompt, GenerationParams(most, sampling=sampling, ignore_eos=ignores, **window)))
    asked += [(other[:520], GenerationParams(1, ignore_eos=True)) for other in others]
    return [
        Task(prompt, params, number % 4 != 3, runtime.generate(prompt, params=params, speculate=number % 4 != 3))
        for number, (prompt, params) in enumerate(asked)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("proposals", ["ngram", "tree"])
def test_any_history_of_requests(target: Path, draft: Path, tmp_path: Path, proposals: str) -> None:
    options, windows = SPECULATION[proposals]
    with loaded(target, **{"draft": draft, **options}, kv="gpu", max_batch=SLOTS) as runtime:
        tasks = make_tasks(runtime, windows)
        run_state_machine_as_test(
            lambda: Served(runtime, tasks, Path(tempfile.mkdtemp(dir=tmp_path))),
            settings=settings(
                max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )  # fmt: skip
        # The runtime is given back.
        assert runtime.generate(tasks[0].prompt, params=tasks[0].params).tokens == tasks[0].alone.tokens
