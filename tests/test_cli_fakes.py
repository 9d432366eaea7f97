"""A runtime without a model, for the tests of the command line: answers as told, remembers what it was asked."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner, Result

from offload_runtime import engine
from offload_runtime.cli.app import app
from offload_runtime.cli.chat_commands import COMMANDS
from offload_runtime.cli.chat_session import ChatSession
from offload_runtime.cli.options import ChatOptions
from offload_runtime.config import RuntimeConfig
from offload_runtime.engine import GenerationResult, GenerationStats, TokenEvent
from offload_runtime.engine.sessions import read_conversation
from offload_runtime.errors import BudgetError, ContextLengthError, OptionError
from offload_runtime.files import write_atomically
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.speculation.step import Acceptance


def invoke(words: Sequence[str], stand_ins: dict[str, Any], *, room: Any = engine, **options: Any) -> Result:
    """What the program says where `stand_ins` stand in for attributes of a room, by their names."""
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in stand_ins.items():
            patch.setattr(room, name, stand_in)
        return CliRunner().invoke(app, words, **options)


def make_stats(**changes: Any) -> GenerationStats:
    """Figures of a streamed run, with some of them changed."""
    figures: dict[str, Any] = {
        "prompt_tokens": 7, "new_tokens": 3, "time_to_first_token_s": 0.25, "tok_per_s": 12.5, "passes": 2,
        "tokens_per_pass": 1.5, "bytes_per_pass": 2_000_000_000, "link_gbps": 20.0, "link_peak_gbps": 25.0,
        "stall_s": 0.5, "peak_vram_bytes": 3_000_000_000, "pinned_bytes": 4_000_000_000,
        "measured_s_per_pass": 0.12, "predicted_s_per_pass": None,
        "link_idle_share": 0.04,
        "acceptance": (Acceptance("draft", "retrieval", 5, 20, 13), Acceptance("retrieval", "target", 2, 10, 9)),
    }  # fmt: skip
    return GenerationStats(**{**figures, **changes})


def press_ctrl_c() -> None:
    """Send this process what a terminal sends at Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def full_host(*, at_piece: int) -> Callable[[int], None]:
    """What a runtime meets when memory runs out before this piece; 0 is the prefill."""

    def before_piece(number: int) -> None:
        if number == at_piece:
            raise BudgetError("the host is full")

    return before_piece


@dataclass
class FakeStream:
    """An answer of fixed pieces; `held_back` shows in the result of a stopped answer only.

    `before_piece` is called with each piece's number before it is given out, and with 0 while in prefill.
    """

    pieces: Sequence[str]
    token_ids: list[int]
    held_back: str
    before_piece: Callable[[int], None]
    on_prefill: Callable[[int, int], None]
    settle: Callable[[str], None]
    finish_reason: str
    stats: GenerationStats
    result: GenerationResult | None = None
    given: list[str] = field(default_factory=list)
    prompt: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._iterator = self._run()

    def tokens(self) -> Iterator[TokenEvent]:
        return (TokenEvent(-1, piece, "target") for piece in self._iterator)

    def _run(self) -> Iterator[str]:
        self.before_piece(0)
        for done in (1, 2):
            self.on_prefill(done, 2)
        for number, piece in enumerate(self.pieces, start=1):
            self.before_piece(number)
            self.given.append(piece)
            yield piece
        self._finish(self.finish_reason, "")

    def close(self) -> None:
        self._iterator.close()
        if self.result is None:
            self._finish("interrupted", self.held_back)

    def _finish(self, reason: str, rest: str) -> None:
        text = "".join(self.given) + rest
        self.result = GenerationResult(self.token_ids, text, reason, self.stats)
        self.settle(text)


class FakeRuntime:
    """The runtime that is loaded in these tests; one object serves a whole test and keeps every request."""

    def __init__(self) -> None:
        self.loads: list[RuntimeConfig] = []
        self.requests: list[tuple[Any, GenerationParams]] = []
        self.speculated: list[bool] = []  # of each streamed request
        self.closed = False
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.load_report = "loaded 1.0 GB in 1.0 s (1.0 GB/s)"
        self.placement = "1 of 2 layers resident"
        self.tokenizer: Any = SimpleNamespace(added_tokens_decoder={})
        self.config = SimpleNamespace(kv_bytes_per_token=lambda element_bytes: 1000 * element_bytes)
        self.stats = make_stats()
        self.context_tokens = 100
        self.sampling_defaults: dict[str, float] = {}  # of the model's makers
        self.pieces: Sequence[str] = ("Hel", "lo")
        self.prompt: Sequence[int] = ()
        self.plain_tokens = [1, 2, 3]
        self.speculative_tokens = [1, 2, 3]
        self.held_back = ""
        self.finish_reason = "stop"
        self.checks: list[Callable[[Any], object] | None] = []  # of prompts, as loading was given them
        self.load_error: Exception | None = None
        self.answer_error: Exception | None = None
        self.memory_lasts_for = -1  # answers of a batch
        self.before_piece: Callable[[int], None] = lambda number: None

    def from_config(
        self, config: RuntimeConfig, *, on_progress: Callable[[str, int, int], None],
        on_plan: Callable[[Any], None] | None, check: Callable[[Any], object] | None,
    ) -> FakeRuntime:  # fmt: skip
        self.loads.append(config)
        self.checks.append(check)
        on_progress("target weights", 1, 2)
        if self.load_error is not None:
            raise self.load_error
        return self

    def stream(
        self, prompt: Any, *, params: GenerationParams, on_prefill: Callable[[int, int], None], speculate: bool = True,
        settle: Callable[[str], None] = lambda text: None,
    ) -> FakeStream:  # fmt: skip
        self.requests.append((prompt, params))
        self.speculated.append(speculate)
        print("a library that cannot keep quiet")
        if self.answer_error is not None:
            raise self.answer_error
        tokens = self.speculative_tokens if speculate else self.plain_tokens
        return FakeStream(
            self.pieces,
            tokens,
            self.held_back,
            self.before_piece,
            on_prefill,
            settle,
            self.finish_reason,
            self.stats,
            prompt=self.prompt,
        )

    def generate_batch(
        self, prompts: list[Any], *, params: GenerationParams, on_prefill: Callable[[int, int], None],
        on_progress: Callable[[int, int], None], should_stop: Callable[[], bool],
    ) -> list[GenerationResult]:  # fmt: skip
        """Answer i is done in pass i + 1, which `before_piece` is called with; in pass 0 the prompts are read."""
        self.requests += [(prompt, params) for prompt in prompts]
        print("a library that cannot keep quiet")
        if self.answer_error is not None:
            raise self.answer_error
        self.before_piece(0)
        on_prefill(1, 2)
        results: list[GenerationResult] = []
        for number in range(len(prompts)):
            if number == self.memory_lasts_for:
                results.append(GenerationResult(self.plain_tokens, "half", "interrupted", self.stats))
                raise BudgetError("the host is full", results)
            on_progress(number, len(prompts))
            self.before_piece(number + 1)
            stopped = should_stop()
            text, reason = ("half", "interrupted") if stopped else (f"answer {number}", self.finish_reason)
            results.append(GenerationResult(self.plain_tokens, text, reason, self.stats))
        return results

    def conversation(self, system: str | None, *, template_options: None) -> FakeConversation:
        return FakeConversation(self, system)

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


class FakeConversation:
    """Messages without a model: one word is one token; a context that is full refuses."""

    def __init__(self, runtime: FakeRuntime, system: str | None) -> None:
        self._runtime = runtime
        self.messages: list[dict[str, str]] = []
        self.num_regenerated = 0
        self.set_system(system)

    @property
    def num_tokens(self) -> int:
        return sum(len(message["content"].split()) for message in self.messages)

    def say(self, text: str, **options: Any) -> FakeStream:
        if self.num_tokens + len(text.split()) > self._runtime.context_tokens:
            raise ContextLengthError("the context\nis full: start over with /reset")

        def settle(answer: str) -> None:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

        return self._runtime.stream(text, settle=settle, **options)

    def regenerate(self, params: GenerationParams, **options: Any) -> FakeStream:
        if not any(message["role"] == "user" for message in self.messages):
            raise OptionError("the conversation has no message yet")
        self.num_regenerated += 1
        return self.edit(self.messages[-2]["content"], params=params, **options)

    def edit(self, text: str, **options: Any) -> FakeStream:
        before = self.messages[:-2]

        def settle(answer: str) -> None:
            self.messages = [*before, {"role": "user", "content": text}, {"role": "assistant", "content": answer}]

        return self._runtime.stream(text, settle=settle, **options)

    @property
    def state(self) -> list[dict[str, str]]:
        return [*self.messages]

    def go_back(self, state: list[dict[str, str]]) -> None:
        self.messages = state

    def undo(self) -> str:
        *self.messages, question, _ = self.messages
        return question["content"]

    def reset(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def set_system(self, text: str | None) -> None:
        self.messages = [] if text is None else [{"role": "system", "content": text}]

    def save(self, path: Path) -> None:
        content = json.dumps({"version": 1, "messages": self.messages})
        write_atomically(path, content, remedy="nothing was changed, choose another place")

    def load(self, path: Path) -> int:
        self.messages = read_conversation(path)["messages"]
        return self.num_tokens


def at_a_terminal(runtime: FakeRuntime, *answers: str) -> tuple[ChatSession, list[str]]:
    """A session with somebody who answers its questions, and the questions."""
    asked, given = list[str](), iter(answers)
    options = ChatOptions(config=RuntimeConfig("some/model"), params=GenerationParams(sampling=SamplingParams(0.7)))
    conversation: Any = FakeConversation(runtime, None)
    session = ChatSession(cast(Any, runtime), conversation, options, sys.stdout, COMMANDS)

    def ask(question: str) -> str:
        asked.append(question)
        return next(given)

    session.ask = ask
    return session, asked
