"""How an answer ends: end of sequence and stop strings in the middle of a window, a closed stream, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.engine import Runtime
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.errors import OptionError
from offload_runtime.runners import Decoder, ModelRunner
from offload_runtime.weights import Weight
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)

COUNT = 32


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    """The target again, so that windows are accepted whole and every end is in the middle of one."""
    return target


@pytest.fixture(scope="module")
def runtime(target: Path, draft: Path) -> Iterator[Runtime]:
    """Windows do not depend on how long anything takes."""
    with load(target, draft=draft, resident_layers=2, tree_nodes=60) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def said(runtime: Runtime) -> list[int]:
    """What plain decoding says to the prompt."""
    result = runtime.generate(PROMPT, max_new_tokens=COUNT, speculate=False, ignore_eos=True)
    assert result.finish_reason == "length"
    assert runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True).stats.tokens_per_pass > 5
    return result.tokens


@contextmanager
def working_with(runtime: Runtime, **others: Any) -> Iterator[None]:
    """Generations that begin meanwhile work with other parts."""
    before = {name: getattr(runtime.engine, name) for name in others}
    vars(runtime.engine).update(others)
    try:
        yield
    finally:
        vars(runtime.engine).update(before)


def ctrl_c(after: int) -> Callable[..., None]:
    """A hook whose user presses Ctrl-C once, when it has been called so many times."""
    calls = iter(range(after + 1))

    def hook(*_: object) -> None:
        if next(calls, None) == after:
            raise KeyboardInterrupt

    return hook


class InterruptedDecoder(Decoder):
    """The maths of a model, with a hook of every layer, called before it."""

    def __init__(self, model: LoadedModel, hook: Callable[..., None]) -> None:
        own = model.runner.decoder
        shared = {"embedding": own.embedding, "lm_head": own.lm_head, "final_norm": Weight(own.final_norm)}
        super().__init__(model.config, shared)
        self._hook = hook

    def layer(self, *args: Any) -> None:
        self._hook()
        super().layer(*args)


def interrupted(model: LoadedModel, after: int) -> LoadedModel:
    """The same model, in which Ctrl-C comes once: within the layer that follows so many."""
    runner = model.runner
    decoder = InterruptedDecoder(model, ctrl_c(after))
    return replace(model, runner=ModelRunner(decoder, runner.streamer, runner.cache, runner.rope, runner.chunk_tokens))


def first_places(said: list[int]) -> list[int]:
    """Where a token occurs for the first time."""
    return [place for place, token in enumerate(said) if token not in said[:place]]


def assert_usable(runtime: Runtime, said: list[int]) -> None:
    """The next generations are as if nothing had happened."""
    for speculate in (True, False):
        assert runtime.generate(PROMPT, max_new_tokens=12, ignore_eos=True, speculate=speculate).tokens == said[:12]


@pytest.mark.slow
def test_a_token_that_ends_the_answer_anywhere_in_a_window(runtime: Runtime, said: list[int]) -> None:
    places = first_places(said)
    assert len(places) >= 8
    for number, place in enumerate(places):
        result = runtime.generate(PROMPT, max_new_tokens=COUNT, stop_token_ids=[said[place]], gamma=7)
        assert result.tokens == said[: place + 1]
        assert result.finish_reason == "stop"
        # What the window committed behind the end is of no answer that goes on from here.
        on = runtime.generate([*runtime.encode(PROMPT), *result.tokens], max_new_tokens=2, ignore_eos=True)
        assert on.tokens[: COUNT - place - 1] == said[place + 1 : place + 3]
        if number % 5:
            continue
        # The token itself is no text, even when it is an ordinary one.
        before = runtime.generate(PROMPT, max_new_tokens=place, ignore_eos=True, gamma=7).text if place else ""
        assert result.text == before
        again = runtime.generate(PROMPT, max_new_tokens=min(COUNT, place + 10), ignore_eos=True, gamma=7)
        assert again.tokens == said[: place + 10]


@pytest.mark.slow
def test_stop_strings_anywhere(runtime: Runtime, said: list[int]) -> None:
    text = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True).text
    assert len(text) > COUNT / 2
    tried = 0
    for length in (1, 3, 9):  # within a token, across two, across many
        for start in range(1, len(text) - length, 5):
            stop = text[start : start + length]
            if "\ufffd" in stop:
                continue
            result = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, stop=[stop, "never said"])
            assert result.finish_reason == "stop"
            assert result.text == text[: text.index(stop)]
            assert result.tokens == said[: len(result.tokens)]
            # Not a token more than the stop string needs.
            shorter = runtime.tokenizer.decode([*runtime.encode(PROMPT), *result.tokens[:-1]], skip_special_tokens=True)
            assert stop not in shorter.removeprefix(PROMPT)
            tried += 1
    assert tried > 6, "the text is short"
    assert_usable(runtime, said)


def test_streamed_pieces_hold_back_what_may_be_a_stop_string(runtime: Runtime) -> None:
    text = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True).text
    stop = text[10:16]
    stream = runtime.stream(PROMPT, max_new_tokens=COUNT, ignore_eos=True, stop=stop)
    shown = ""
    for piece in stream:
        shown += piece
        assert text[: text.index(stop)].startswith(shown)
    assert shown == stream.result.text == text[: text.index(stop)]


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
    stream = runtime.stream(PROMPT, max_new_tokens=COUNT, on_prefill=ctrl_c(layers - 1))
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    stream.close()
    assert (stream.result.tokens, stream.result.text, stream.result.finish_reason) == ([], "", "interrupted")
    assert_usable(runtime, said)


def assert_interrupted(runtime: Runtime, said: list[int], interrupt: Callable[[], None] = lambda: None) -> None:
    """Ctrl-C, which `interrupt` prepares behind the first piece, costs nothing that was said, and the runtime."""
    stream = runtime.stream(PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=3)
    next(stream)
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    stream.close()
    result = stream.result
    assert result.finish_reason == "interrupted"
    assert 1 <= len(result.tokens) < COUNT and result.tokens == said[: len(result.tokens)]


@pytest.mark.few(1)
@pytest.mark.parametrize("after", [0, 2, 4, 7, 13])
def test_ctrl_c_in_a_layer_of_the_target(runtime: Runtime, said: list[int], after: int) -> None:
    target = runtime.engine.target
    with working_with(runtime, target=interrupted(target, target.config.num_layers + after)):  # behind the prompt
        assert_interrupted(runtime, said)
        assert_usable(runtime, said)
    assert_usable(runtime, said)


@pytest.mark.slow
def test_a_second_generation_ends_the_first_without_harm(runtime: Runtime, said: list[int]) -> None:
    first = runtime.stream(PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=1)
    next(first)
    never_begun = runtime.stream(PROMPT, max_new_tokens=COUNT)
    second = runtime.stream(PROMPT + " and", max_new_tokens=COUNT, ignore_eos=True)
    expected = next(second)
    for stale in (first, never_begun):
        with pytest.raises(OptionError, match="another generation"):
            list(stale)
        stale.close()
        assert stale.result.tokens == said[: len(stale.result.tokens)]
    rest = expected + "".join(second)
    assert rest == runtime.generate(PROMPT + " and", max_new_tokens=COUNT, ignore_eos=True).text
    assert second.result.finish_reason == "length"
    assert_usable(runtime, said)
