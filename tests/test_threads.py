"""Several threads call one runtime: calls wait for one another, and what cannot go on is refused in words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.params import GenerationParams
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)

OTHER = "the lazy dog and the quick"
ASKED: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
GONE = "another generation has begun on this runtime since, or it was closed"
INSIDE = "this runtime is in the middle of a call"


@pytest.fixture(scope="module")
def runtime(target: Path) -> Iterator[Runtime]:
    with load(target, max_batch=2, resident_layers=1, context=128) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(runtime: Runtime) -> dict[str, list[int]]:
    return {prompt: runtime.generate(prompt, **ASKED).tokens for prompt in (PROMPT, OTHER)}


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call in another thread returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def calls_of(runtime: Runtime) -> dict[str, Callable[[str], list[int]]]:
    """Every way to get the tokens behind a prompt at one go."""
    params = GenerationParams(12, ignore_eos=True)
    return {
        "generate": lambda prompt: runtime.generate(prompt, **ASKED).tokens,
        "batch": lambda prompt: runtime.generate_batch([prompt, OTHER], **ASKED)[0].tokens,
        "replay": lambda prompt: runtime.replay(runtime.encode(prompt), params, drafter=None)[0].tokens,
    }


@pytest.mark.slow
def test_whole_calls_wait_for_one_another(runtime: Runtime, expected: dict[str, list[int]]) -> None:
    calls, both = list(calls_of(runtime).values()), (PROMPT, OTHER)
    start = threading.Barrier(4)

    def worker(number: int) -> bool:
        start.wait(60)
        prompts = [both[(number + step) % 2] for step in range(6)]
        return all(calls[step % 3](prompt) == expected[prompt] for step, prompt in enumerate(prompts))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(worker, range(4))) == [True] * 4


@pytest.mark.few(4)
@pytest.mark.parametrize("call", ["generate", "batch", "replay", "start", "say", "logits"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_half_consumed_stream_is_refused_once_another_call_began(
    runtime: Runtime, expected: dict[str, list[int]], call: str, elsewhere: bool
) -> None:
    stream = runtime.stream(PROMPT, **ASKED)
    next(stream)
    others: dict[str, Callable[[], Any]] = {name: lambda one=one: one(OTHER) for name, one in calls_of(runtime).items()}
    others["start"] = lambda: list(runtime.stream(OTHER, **ASKED))
    others["say"] = lambda: list(runtime.conversation().say("the fox", **ASKED))
    others["logits"] = lambda: list(runtime.logits(runtime.encode(OTHER), [[1, 2]]))
    answer = in_thread(others[call]) if elsewhere else others[call]()
    assert call not in calls_of(runtime) or answer == expected[OTHER]
    with pytest.raises(OptionError, match=GONE):
        next(stream)
    stream.close()
    assert stream.result.finish_reason == "interrupted" and 0 < stream.result.stats.new_tokens < 12


def test_a_callback_asks_for_nothing(runtime: Runtime, expected: dict[str, list[int]]) -> None:
    asked: list[str] = []

    def callback(*_: object) -> bool:
        for call in (
            *calls_of(runtime).values(),
            lambda prompt: runtime.stream(prompt, **ASKED),
            lambda _: runtime.close(),
        ):
            with pytest.raises(OptionError, match=INSIDE):
                call(OTHER)
        asked.append(runtime.tokenizer.decode(runtime.encode(OTHER)))  # touches nothing of the pass
        return False

    hooks = {"on_prefill": callback, "on_progress": callback, "should_stop": callback}
    assert runtime.generate_batch([PROMPT], **ASKED, **hooks)[0].tokens == expected[PROMPT]
    assert set(asked) == {OTHER} and len(asked) > 12


def test_close_waits_for_the_answer_of_another_thread(target: Path, expected: dict[str, list[int]]) -> None:
    runtime = Runtime.load(target, device="cpu", resident_layers=1, context=128)
    begun, closing = threading.Event(), threading.Event()

    def should_stop() -> bool:
        begun.set()
        assert closing.wait(60)
        return False

    def close() -> None:
        closing.set()
        runtime.close()

    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(lambda: runtime.generate_batch([PROMPT], **ASKED, should_stop=should_stop)[0])
        assert begun.wait(60)
        closed = pool.submit(close)
        assert answer.result(60).tokens == expected[PROMPT]
        closed.result(60)
    with pytest.raises(OptionError, match="this runtime is closed"):
        runtime.generate(PROMPT, **ASKED)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_half_consumed_stream_of_a_closed_runtime(target: Path, elsewhere: bool) -> None:
    runtime = Runtime.load(target, device="cpu", resident_layers=1, context=128)
    stream = runtime.stream(PROMPT, **ASKED)
    next(stream)
    if elsewhere:
        in_thread(runtime.close)
    else:
        runtime.close()
    with pytest.raises(OptionError, match=GONE):
        next(stream)


def test_an_interrupted_call_leaves_the_runtime_to_others(runtime: Runtime, expected: dict[str, list[int]]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.generate(PROMPT, **ASKED, on_prefill=interrupted)
    assert in_thread(lambda: runtime.generate(PROMPT, **ASKED).tokens) == expected[PROMPT]
    assert runtime.generate(OTHER, **ASKED).tokens == expected[OTHER]
