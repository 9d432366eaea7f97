"""Any history of requests that are let in, stepped, cancelled and left, and of schedulers that save blocks and load
them, leaves every answer as it is alone."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime import (
    EndEvent,
    ErrorEvent,
    GenerationParams,
    Runtime,
    SamplingParams,
    Scheduler,
    Ticket,
    TokenEvent,
)
from offload_runtime.errors import QueueFullError
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.test_scheduler import CONTEXT, SPECULATION, Task, assert_as_alone, loaded

TARGET = "two_layer_target"
SLOTS, MAX_WAITING, STORED_BLOCKS = 2, 2, 2
LENGTHS = (1, 20, 257, 300, 520)  # of prompts: within a block of the cache, and over one and two
MOST_BLOCKS = 2  # of a prompt and its answer
GRAMMARS: dict[int, dict[str, Any]] = {
    1: {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    2: {"grammar": 'start: ("the " WORD ", ")~1..2 "."\nWORD: /[a-z]{2,5}/'},
}


class Gate:
    """Where the scheduler's thread waits at every token until it is let go on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed, self._is_held, self._is_open = 0, False, False

    def wait(self) -> None:
        with self._changed:
            self._is_held = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed or self._is_open, 60)
            self._allowed, self._is_held = self._allowed - 1, False

    def look(self) -> None:
        """Something has happened that others wait for."""
        with self._changed:
            self._changed.notify_all()

    def let(self, tokens: int, is_idle: Callable[[], bool]) -> None:
        """Let so many tokens pass, and wait until the thread is held at the next one or has nothing to do."""
        with self._changed:
            self._allowed += tokens
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: (self._is_held and not self._allowed) or is_idle(), 60)
            self._allowed = 0

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class Client:
    """Who has asked: what it has heard, and how many tokens that may be."""

    def __init__(self, task: Task, gate: Gate) -> None:
        self.task, self._gate = task, gate
        self.tokens: list[int] = []
        self.end: EndEvent | ErrorEvent | None = None
        self.ticket: Ticket | None = None
        self.is_gone = False  # it leaves at the next event
        self.is_over = self.is_told_more = False  # nothing may come any more, and something did
        self.most_tokens = task.params.max_new_tokens
        self.kept_tokens: int | None = None  # where it is known how many there must be

    def __call__(self, event: TokenEvent | EndEvent | ErrorEvent) -> None:
        self.is_told_more = self.is_over  # what is raised here would cost the request, and not the test
        if self.is_gone or not isinstance(event, TokenEvent):
            self.is_over = True
            self.end = event if isinstance(event, EndEvent | ErrorEvent) else None
            self._gate.look()
            if self.is_gone:
                raise ConnectionError("the client has gone")
            return
        self.tokens.append(event.token)
        self._gate.wait()


class Served(RuleBasedStateMachine):
    """A scheduler, the next one on its directory, and clients that come and go between two tokens of anybody's."""

    def __init__(self, runtime: Runtime, tasks: Sequence[Task], directory: Path) -> None:
        super().__init__()
        self._runtime, self._tasks, self._directory = runtime, tasks, directory
        models = [model for model in (runtime.engine.target, runtime.engine.draft) if model is not None]
        of_blocks = [model.plan.kv_block_bytes for model in models]
        self._stored_bytes = STORED_BLOCKS * of_blocks[0]
        # What slots hold when the scheduler is closed, each block with its checksum, and no block more.
        self._saved_bytes = SLOTS * MOST_BLOCKS * sum(nbytes + 100 for nbytes in of_blocks)
        self._open()

    def _open(self) -> None:
        self._gate, self._clients = Gate(), list[Client]()
        self._scheduler = Scheduler(
            self._runtime, max_waiting=MAX_WAITING, prefix_cache_bytes=self._stored_bytes,
            sessions=self._directory, sessions_bytes=self._saved_bytes,
        )  # fmt: skip

    @property
    def _live(self) -> list[Client]:
        return [client for client in self._clients if not client.is_over]

    def _settle(self, tokens: int = 0) -> None:
        self._gate.let(tokens, lambda: not self._live)

    def _ask(self, task: Task) -> None:
        client, num_live = Client(task, self._gate), len(self._live)
        try:
            client.ticket = self._scheduler.submit(task.prompt, task.params, on_event=client, speculate=task.speculate)
        except QueueFullError:
            assert num_live == SLOTS + MAX_WAITING
            return
        self._clients.append(client)
        self._settle()

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self._ask(data.draw(st.sampled_from(self._tasks)))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Two requests that share nothing with others take the slots, whose blocks go to the store and out of it."""
        for task in data.draw(st.permutations([task for task in self._tasks if task.params.max_new_tokens == 1])):
            self._ask(task)

    @precondition(lambda self: self._live)
    @rule(tokens=st.sampled_from([1, 2, 3, 8, 40]))
    def step(self, tokens: int) -> None:
        self._settle(tokens)

    @precondition(lambda self: self._live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self._live))
        assert client.ticket is not None
        client.ticket.cancel()
        client.most_tokens = min(client.most_tokens, len(client.tokens))

    @precondition(lambda self: self._live)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self._live)).is_gone = True

    @precondition(lambda self: self._clients)
    @rule()
    def save_and_load(self) -> None:
        """Whoever came last is asked again: whole blocks of its prompt are there, all but the last token."""
        newest = self._clients[-1]
        self._close()
        self._open()
        if newest.tokens:  # else it may never have had a slot
            self._ask(newest.task)
            self._clients[0].kept_tokens = (len(newest.task.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @invariant()
    def tokens_are_those_of_the_answer_alone(self) -> None:
        for client in self._clients:
            assert client.tokens == client.task.alone.tokens[: len(client.tokens)]
            assert len(client.tokens) <= client.most_tokens

    def teardown(self) -> None:
        self._close()

    def _close(self) -> None:
        self._gate.open()
        self._scheduler.close(grace_s=60)
        self.tokens_are_those_of_the_answer_alone()
        for client in self._clients:
            assert client.is_over and not client.is_told_more
            if client.is_gone:
                continue
            assert isinstance(client.end, EndEvent)
            result = client.end.result
            assert result.tokens == client.tokens
            assert client.kept_tokens in (None, result.stats.kept_tokens)
            if result.finish_reason == "interrupted":
                assert len(client.tokens) == client.most_tokens < len(client.task.alone.tokens)
            else:
                assert_as_alone(client.task, result)
        counters = self._scheduler.counters
        assert (counters.running, counters.waiting, counters.finished) == (0, 0, len(self._clients))
        assert self._scheduler.failure is None
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
