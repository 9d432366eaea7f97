"""How an answer ends: end of sequence and stop strings in the middle of a window, a closed stream, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload_runtime.engine import Runtime
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


def ctrl_c(after: int) -> Callable[..., None]:
    """A hook whose user presses Ctrl-C once, when it has been called so many times."""
    calls = iter(range(after + 1))

    def hook(*_: object) -> None:
        if next(calls, None) == after:
            raise KeyboardInterrupt

    return hook


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
    stream = runtime.stream(PROMPT, max_new_tokens=COUNT, on_prefill=ctrl_c(layers - 1))
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    stream.close()
    assert (stream.result.tokens, stream.result.text, stream.result.finish_reason) == ([], "", "interrupted")
    assert_usable(runtime, said)
