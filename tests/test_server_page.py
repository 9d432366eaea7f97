"""The page to chat with, as somebody at a browser uses it: Debian's Chromium, headless."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_page import BROWSER, Tab, ask

from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import MODEL, Served, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(BROWSER) is None, reason=f"needs {BROWSER}, there is none on the PATH"),
]

KEY = "a secret key"


@pytest.fixture(scope="module")
def served(
    long_target: Path, noisy_copy_of: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:  # fmt: skip
    """A model whose answers have no end, streamed over the link, with a draft, a key, and room for one answer."""
    endless = Path(shutil.copytree(long_target, tmp_path_factory.mktemp("page") / "endless"))
    (endless / "generation_config.json").unlink()
    settings = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps({**settings, "eos_token_id": None}))
    options: dict[str, Any] = {"draft": noisy_copy_of(long_target), "gamma": 3, "tree_nodes": 0, "resident_layers": 0}
    options |= {"context": 16384, "max_batch": 1}
    with serving(endless, load_options=options, api_key=KEY, max_waiting=0) as served:
        yield served


@pytest.fixture
def tab(served: Served) -> Iterator[Tab]:
    """The page, which has been given its key."""
    with Tab(served.url) as tab:
        tab.wait_for("document.querySelector('#notice').textContent.includes('needs its API key')")
        tab.type("wrong")
        tab.press("Enter")
        tab.wait_for("document.querySelector('#notice').textContent.includes('not the API key')")
        tab.press("Tab", shift=True)
        tab.evaluate("document.querySelector('#key').select()")
        tab.type(KEY)
        tab.press("Enter")
        tab.wait_for(f"document.title === '{MODEL}'")
        tab.problems.clear()  # refusals are errors to the console
        yield tab


def texts(tab: Tab, selector: str) -> list[str]:
    """What the elements say."""
    found: list[str] = tab.evaluate(f"[...document.querySelectorAll('{selector}')].map((one) => one.textContent)")
    return found


def choose(tab: Tab, *, tokens: int, seed: int) -> None:
    """Set the longest answer and the seed, and go back to where messages are written."""
    tab.click("form summary")
    for selector, number in (("#tokens", tokens), ("#seed", seed)):
        tab.click(selector)
        tab.type(str(number))
    tab.click("#text")


def test_a_conversation(tab: Tab, served: Served) -> None:
    def answer_to(*texts: str) -> str:
        roles = ("user", "assistant") * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        answer = served.chat(messages=messages, max_tokens=30, temperature=0.7, seed=1).json()
        return str(answer["choices"][0]["message"]["content"])

    first = "the quick <b>brown</b> fox\njumps over"
    choose(tab, tokens=30, seed=1)
    tab.type("the quick <b>brown</b> fox")
    tab.press("Enter", shift=True)
    ask(tab, "jumps over")
    ask(tab, "and on")
    assert texts(tab, ".user .said") == [first, "and on"]
    assert tab.evaluate("document.querySelectorAll('.said :not(span)').length") == 0
    answers, figures = texts(tab, ".assistant .said"), texts(tab, ".figures")
    assert answers == [answer_to(first), answer_to(first, answers[0], "and on")]
    for source in ("draft", "target"):  # half a character is a token without a text
        coloured = len(texts(tab, f".message:nth-child(2) .said .{source}"))
        assert 0 < coloured <= int(texts(tab, f".message:nth-child(2) .figures .{source}")[0].split()[-1])
    measured = re.compile(r"\d tokens a pass · link \d+ % used · .* seed 1 · token limit reached$")
    assert len(figures) == 2 and all(map(measured.search, figures))
    tab.click("#new")
    assert not texts(tab, ".message")
    ask(tab, "and on")
    assert texts(tab, ".assistant .said") == [answer_to("and on")]
    assert not tab.problems
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), { text: 'document.title = 1' }))"
    )
    assert tab.evaluate("document.title") == MODEL and "Content Security Policy" in tab.problems[-1]


def test_an_answer_is_stopped_and_what_is_refused_is_not_lost(tab: Tab, served: Served) -> None:
    choose(tab, tokens=15000, seed=1)
    for stop in (lambda: tab.press("Escape"), lambda: tab.click("#stop")):
        tab.click("#new")
        tab.type("the")
        tab.press("Enter")
        tab.wait_for("document.querySelectorAll('.assistant .said span').length > 20")
        stop()
        tab.wait_for("document.querySelector('#stop').disabled")
        assert texts(tab, ".figures")[0].endswith("stopped")
        while served.scheduler.counters.running:
            time.sleep(0.01)
    assert not tab.problems
    endless = {"prompt": "the", "max_tokens": 15000, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=endless):
        ask(tab, "say this later")
        assert "try again" in texts(tab, "#notice")[0]
    assert tab.evaluate("document.querySelector('#text').value") == "say this later"
    assert len(texts(tab, ".message")) == 2
