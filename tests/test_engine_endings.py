"""How an answer ends: stop strings, a closed stream, Ctrl-C; and several threads that call one runtime, whose calls
wait for one another."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.params import GenerationParams
from tests.helpers.engine import PROMPT, load, raising

COUNT = 24


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    """The target again, so that windows are accepted whole and every end is in the middle of one."""
    return target


@pytest.fixture(scope="module")
def runtime(target: Path, draft: Path) -> Iterator[Runtime]:
    """Windows do not depend on how long anything takes."""
    with load(target, draft=draft, resident_layers=2, tree_nodes=24) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def said(runtime: Runtime) -> list[int]:
    """What plain decoding says to the prompt."""
    result = runtime.generate(PROMPT, max_new_tokens=COUNT, speculate=False, ignore_eos=True)
    assert result.finish_reason == "length"
    assert runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True).stats.tokens_per_pass > 4
    return result.tokens


def assert_usable(runtime: Runtime, said: list[int]) -> None:
    """The next generations are as if nothing had happened."""
    for speculate in (True, False):
        assert runtime.generate(PROMPT, max_new_tokens=12, ignore_eos=True, speculate=speculate).tokens == said[:12]


def test_streamed_pieces_hold_back_what_may_be_a_stop_string(runtime: Runtime, said: list[int]) -> None:
    text = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True).text
    for stop in (text[10:16], text[3], text[7:16]):  # across many tokens, and within one
        stream = runtime.stream(PROMPT, max_new_tokens=COUNT, ignore_eos=True, stop=[stop, "never said"])
        shown = ""
        for piece in stream:
            shown += piece
            assert text[: text.index(stop)].startswith(shown)
        tokens = stream.result.tokens
        assert shown == stream.result.text == text[: text.index(stop)] and tokens == said[: len(tokens)]
        # Not a token more than the stop string needs.
        assert stop not in runtime.generate(PROMPT, max_new_tokens=max(1, len(tokens) - 1), ignore_eos=True).text[:-1]


@pytest.mark.few(2)
@pytest.mark.parametrize("pieces", [0, 1, 2, 5])
def test_closing_in_the_middle(runtime: Runtime, said: list[int], pieces: int) -> None:
    stream = runtime.stream(PROMPT, max_new_tokens=COUNT, ignore_eos=True)
    shown = [next(stream) for _ in range(pieces)]
    stream.close()
    stream.close()
    result = stream.result
    assert result.finish_reason == "interrupted"
    assert result.tokens == said[: len(result.tokens)] and len(result.tokens) >= pieces
    assert result.text.startswith("".join(shown))
    assert list(stream) == []
    assert_usable(runtime, said)


@pytest.mark.few(2)
@pytest.mark.parametrize("layers", [1, 2, 4, 5])
def test_ctrl_c_during_prefill(runtime: Runtime, said: list[int], layers: int) -> None:
    stream = runtime.stream(PROMPT, max_new_tokens=COUNT, on_prefill=raising(KeyboardInterrupt(), after=layers - 1))
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    stream.close()
    assert (stream.result.tokens, stream.result.text, stream.result.finish_reason) == ([], "", "interrupted")
    assert_usable(runtime, said)


OTHER = "the lazy dog and the quick"
ASKED: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
GONE = "another generation has begun on this runtime since, or it was closed"
INSIDE = "this runtime is in the middle of a call"


@pytest.fixture(scope="module")
def shared(target: Path) -> Iterator[Runtime]:
    with load(target, max_batch=2, resident_layers=1, context=128) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(shared: Runtime) -> dict[str, list[int]]:
    return {prompt: shared.generate(prompt, **ASKED).tokens for prompt in (PROMPT, OTHER)}


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call in another thread returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def calls_of(shared: Runtime) -> dict[str, Callable[[str], list[int]]]:
    """Every way to get the tokens behind a prompt at one go."""
    params = GenerationParams(12, ignore_eos=True)
    return {
        "generate": lambda prompt: shared.generate(prompt, **ASKED).tokens,
        "batch": lambda prompt: shared.generate_batch([prompt, OTHER], **ASKED)[0].tokens,
        "replay": lambda prompt: shared.replay(shared.encode(prompt), params, drafter=None)[0].tokens,
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("call", ["generate", "batch", "replay", "start", "say", "logits"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_overtaken_streams_fail(shared: Runtime, expected: dict[str, list[int]], call: str, elsewhere: bool) -> None:
    stream = shared.stream(PROMPT, **ASKED)
    next(stream)
    others: dict[str, Callable[[], Any]] = {name: lambda one=one: one(OTHER) for name, one in calls_of(shared).items()}
    others["start"] = lambda: list(shared.stream(OTHER, **ASKED))
    others["say"] = lambda: list(shared.conversation().say("the fox", **ASKED))
    others["logits"] = lambda: list(shared.logits(shared.encode(OTHER), [[1, 2]]))
    answer = in_thread(others[call]) if elsewhere else others[call]()
    assert call not in calls_of(shared) or answer == expected[OTHER]
    with pytest.raises(OptionError, match=GONE):
        next(stream)
    stream.close()
    assert stream.result.finish_reason == "interrupted" and 0 < stream.result.stats.new_tokens < 12


def test_a_callback_asks_for_nothing(shared: Runtime, expected: dict[str, list[int]]) -> None:
    asked: list[str] = []

    def callback(*_: object) -> bool:
        for call in (*calls_of(shared).values(), lambda text: shared.stream(text, **ASKED), lambda _: shared.close()):
            with pytest.raises(OptionError, match=INSIDE):
                call(OTHER)
        asked.append(shared.tokenizer.decode(shared.encode(OTHER)))  # touches nothing of the pass
        return False

    hooks = {"on_prefill": callback, "on_progress": callback, "should_stop": callback}
    assert shared.generate_batch([PROMPT], **ASKED, **hooks)[0].tokens == expected[PROMPT]
    assert set(asked) == {OTHER} and len(asked) > 12


def test_close_waits_for_the_answer_of_another_thread(target: Path, expected: dict[str, list[int]]) -> None:
    shared = Runtime.load(target, device="cpu", resident_layers=1, context=128)
    begun, closing = threading.Event(), threading.Event()

    def should_stop() -> bool:
        begun.set()
        assert closing.wait(60)
        return False

    def close() -> None:
        closing.set()
        shared.close()

    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(lambda: shared.generate_batch([PROMPT], **ASKED, should_stop=should_stop)[0])
        assert begun.wait(60)
        closed = pool.submit(close)
        assert answer.result(60).tokens == expected[PROMPT]
        closed.result(60)
    with pytest.raises(OptionError, match="this runtime is closed"):
        shared.generate(PROMPT, **ASKED)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_half_consumed_stream_of_a_closed_runtime(target: Path, elsewhere: bool) -> None:
    shared = Runtime.load(target, device="cpu", resident_layers=1, context=128)
    stream = shared.stream(PROMPT, **ASKED)
    next(stream)
    if elsewhere:
        in_thread(shared.close)
    else:
        shared.close()
    with pytest.raises(OptionError, match=GONE):
        next(stream)


def test_an_interrupted_call_leaves_the_runtime_to_others(shared: Runtime, expected: dict[str, list[int]]) -> None:
    with pytest.raises(KeyboardInterrupt):
        shared.generate(PROMPT, **ASKED, on_prefill=raising(KeyboardInterrupt(), after=0))
    assert in_thread(lambda: shared.generate(PROMPT, **ASKED).tokens) == expected[PROMPT]
    assert shared.generate(OTHER, **ASKED).tokens == expected[OTHER]
