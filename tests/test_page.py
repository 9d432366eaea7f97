"""The page to chat with, as a user has it: in Chromium, where one is installed."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.config import ServerConfig
from offload_runtime.errors import UnavailableError
from offload_runtime.server.app import Server
from tests.helpers.engine import load, with_template
from tests.helpers.server import MODEL, Spoken, Turns, speaking

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow, pytest.mark.no_cover,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt install chromium)"),
]  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
ANSWER = """A **slice** does it, as [the manual](https://docs.python.org/3/) says:

```python
def reverse(text):
    return text[::-1]
```

| way | time |
|:--|--:|
| `slice` | 1.2 ms |
"""
Page, Expect = Any, Any


def pieces(text: str) -> list[str]:
    """A text as tokens."""
    return re.findall(r"\s*\S+|\s+$", text)


@pytest.fixture(scope="module")
def directory(two_layer_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(two_layer_target, tmp_path_factory.mktemp("page") / "model", TEMPLATE)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Spoken]:
    with speaking(directory) as spoken:
        yield spoken


@pytest.fixture
def spoken(server: Spoken) -> Spoken:
    """Which answers with `ANSWER`."""
    server.scripted.pieces, server.scripted.sources = pieces(ANSWER), ["target"]
    server.scripted.error, server.scripted.finish_reason = None, "stop"
    return server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which Chromium has not for root
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


Opening = Callable[..., Page]


@pytest.fixture
def opening(browser: Any, server: Spoken) -> Iterator[Opening]:
    """Opens pages of browsers that have seen nothing yet; at the end none of them has broken a policy, or failed."""
    contexts, wrong = [], list[str]()

    def opened(url: str = server.url, *, width: int = 1280, touch: bool = False, scheme: str = "light") -> Page:
        contexts.append(browser.new_context(
            viewport={"width": width, "height": 800}, has_touch=touch, is_mobile=touch, color_scheme=scheme,
            permissions=["clipboard-read", "clipboard-write"],
        ))  # fmt: skip
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Policy" in message.text else None)
        page.on(
            "request", lambda request: None if request.url.startswith((url, "blob:")) else wrong.append(request.url)
        )
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def page(opening: Opening, spoken: Spoken) -> Page:
    """Whose model is there."""
    return ready(opening(spoken.url))


def ready(page: Page) -> Page:
    sync_api.expect(page.locator("#model")).to_have_text(MODEL)
    return page


def expect(page: Page, selector: str) -> Expect:
    return sync_api.expect(page.locator(selector))


def say(page: Page, text: str) -> None:
    """Send a message, and wait for all of its answer."""
    page.fill("#text", text)
    page.press("#text", "Enter")
    is_answered(page)


def is_answered(page: Page) -> None:
    expect(page, "#send").to_be_visible()
    expect(page, "[aria-busy=true]").to_have_count(0)


def act(page: Page, name: str, message: str = ".message:last-child") -> None:
    page.locator(message).get_by_role("button", name=name, exact=True).click()


# --- answers


def test_markdown_has_code_to_copy_tables_and_links(page: Page) -> None:
    say(page, "How do I **reverse** a text?")
    expect(page, ".user .said").to_have_text("How do I **reverse** a text?")
    expect(page, ".prose strong").to_have_text("slice")
    expect(page, ".prose td[align=right]").to_have_text("1.2 ms")
    expect(page, ".prose a").to_have_attribute("rel", "noopener noreferrer")
    assert "monospace" in page.locator(".code pre code").evaluate("code => getComputedStyle(code).fontFamily")
    page.locator(".code").get_by_role("button", name="Copy").click()
    expect(page, ".code button").to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def reverse(text):\n    return text[::-1]"
    act(page, "Copy")
    page.locator(".actions").get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER


HOSTILE = """<img src=x onerror="window.isHurt = true"> <script>window.isHurt = true</script>

<style>body { display: none }</style>

![a picture](https://elsewhere.example/x.png) [here](javascript:window.isHurt=true) [data](data:text/html,x)

<a href="#" onclick="window.isHurt = true">there</a> <form action="https://elsewhere.example/"><input name="key"></form>
"""


def test_what_an_answer_says_is_no_page(page: Page, spoken: Spoken) -> None:
    spoken.scripted.pieces = pieces(HOSTILE)
    say(page, "<img src=x onerror='window.isHurt = true'>")
    expect(page, ".said.prose").to_contain_text("<script>window.isHurt = true</script>")
    for link in page.locator(".prose a").all():
        assert (link.get_attribute("href") or "https://").startswith("https://")
    assert page.locator(".message :is(img, script, style, form, input, [onclick], [onerror])").count() == 0
    assert not page.evaluate("window.isHurt") and page.locator("body").is_visible()


def test_what_is_there_stays_while_more_comes(page: Page, spoken: Spoken) -> None:
    spoken.scripted.finish_reason = ""
    page.fill("#text", "Go")
    page.press("#text", "Enter")
    expect(page, ".code").to_be_visible()
    page.locator(".code").evaluate("code => { window.first = code; }")
    act(page, "Stop", "#form")
    expect(page, ".figures").to_contain_text("stopped")
    spoken.scripted.finish_reason, spoken.scripted.pieces = "stop", ["And", " more", "."]
    act(page, "Continue")
    is_answered(page)
    expect(page, ".said.prose").to_contain_text("And more.")
    assert page.evaluate("window.first.isConnected")


def test_thinking_is_folded(page: Page, spoken: Spoken) -> None:
    spoken.scripted.pieces = pieces(f"<think>\nPerhaps a slice?\n</think>\n\n{ANSWER}")
    say(page, "How?")
    expect(page, ".thinking summary").to_contain_text("Thought")
    assert not page.locator(".thinking .prose").is_visible()
    page.click(".thinking summary")
    expect(page, ".thinking .prose").to_have_text("Perhaps a slice?")
    assert "Perhaps" not in page.locator(".said.prose").inner_text()


def test_who_proposed_what_is_a_toggle_with_those_that_took_part(page: Page, spoken: Spoken) -> None:
    thought = "<think>\nPerhaps so?\n</think>\n\n"
    spoken.scripted.pieces, spoken.scripted.sources = pieces(f"{thought}One two three four."), ["ngram", "mtp"]
    say(page, "How?")
    assert page.locator(".message .ngram").count() == 0 and not page.locator("#legend").is_visible()
    page.click("#sources")
    expect(page, "#legend summary").to_have_text(re.compile(r"n-grams 4 +MTP 4"))
    page.click("#legend summary")
    expect(page, "#legend dt").to_have_text(["n-grams", "MTP"])
    expect(page, ".said .ngram").to_have_text(["One", " three"])
    expect(page, ".said .mtp").to_have_text([" two", " four."])
    page.click(".thinking summary")
    expect(page, ".thinking .prose").to_have_text("Perhaps so?")
    expect(page, ".thinking .mtp").to_have_text(["Perhaps"])
    page.click("#sources")
    expect(page, ".said.prose p").to_have_text("One two three four.")


def test_figures_and_the_context_that_is_used_are_told(page: Page, spoken: Spoken) -> None:
    say(page, "How?")
    expect(page, ".figures").to_have_text(
        re.compile(r"12\.5 tokens/s · 1\.5 tokens a pass · link 80 % · .* · seed \d+")
    )
    used = len(spoken.scripted.prompts[-1]) + len(pieces(ANSWER))
    expect(page, "#context").to_have_text(f"{used} of 512 tokens")


# --- turns


def test_regenerating_and_editing_lose_nothing(page: Page, spoken: Spoken) -> None:
    say(page, "How?")
    seed = spoken.scripted.params[-1].sampling.seed
    spoken.scripted.pieces = ["By", " hand."]
    act(page, "Regenerate")
    is_answered(page)
    expect(page, ".said.prose").to_have_text("By hand.")
    assert spoken.scripted.params[-1].sampling.seed != seed
    act(page, "The one before")
    expect(page, ".said.prose strong").to_have_text("slice")
    act(page, "Edit", ".user")
    page.fill(".editor textarea", "How by hand?")
    act(page, "Send", ".editor")
    is_answered(page)
    assert (
        spoken.prompt.endswith("user\nHow by hand?<|im_end|>\n<|im_start|>assistant\n") and "How?" not in spoken.prompt
    )
    expect(page, ".said").to_have_text(["How by hand?", "By hand."])
    act(page, "The one before", ".user")
    expect(page, ".user .said").to_have_text("How?")
    expect(page, ".assistant .turns").to_contain_text("2 / 2")


def test_an_answer_that_was_cut_goes_on_as_it_was_changed(page: Page, spoken: Spoken) -> None:
    spoken.scripted.pieces, spoken.scripted.finish_reason = pieces("<think>\nHm\n</think>\n\nIt is"), "length"
    say(page, "Hot?")
    expect(page, ".figures").to_contain_text("the longest answer, or the context, was reached")
    seed, spoken.scripted.pieces = spoken.scripted.params[-1].sampling.seed, [" cold", "."]
    act(page, "Edit")
    page.fill(".editor textarea", "It was")
    act(page, "Save", ".editor")
    spoken.scripted.finish_reason = "stop"
    act(page, "Continue")
    is_answered(page)
    assert spoken.prompt.endswith("<|im_start|>assistant\n<think>\nHm\n</think>\n\nIt was")
    assert spoken.scripted.params[-1].sampling.seed == seed
    expect(page, ".said.prose").to_have_text("It was cold.")
    assert page.get_by_role("button", name="Continue").count() == 0


def test_an_answer_is_stopped_by_escape(page: Page, spoken: Spoken) -> None:
    spoken.scripted.pieces, spoken.scripted.finish_reason = ["Well"], ""
    page.fill("#text", "How?")
    page.press("#text", "Enter")
    expect(page, ".said.prose").to_have_text("Well")
    page.keyboard.press("Escape")
    expect(page, ".figures").to_have_text("stopped")
    is_answered(page)


def test_errors_are_told_and_it_can_be_tried_again(page: Page, spoken: Spoken) -> None:
    spoken.scripted.pieces, spoken.scripted.error = [], UnavailableError("the card has gone")
    say(page, "How?")
    expect(page, ".error:visible").to_have_text("the card has gone")
    spoken.scripted.pieces, spoken.scripted.error = ["So", "."], None
    act(page, "Try again")
    is_answered(page)
    expect(page, ".said.prose").to_have_text("So.")
    say(page, "word " * 600)
    expect(page, ".error:visible").to_contain_text("the context 512: shorten it")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    act(page, "Try again")
    expect(page, ".error:visible").to_have_text("the server cannot be reached")


# --- settings


def test_settings_are_those_of_the_requests(page: Page, spoken: Spoken) -> None:
    page.click("#open-settings")
    placeholders = {
        name: page.locator(f"[name={name}]").get_attribute("placeholder") for name in ("temperature", "top_p")
    }
    assert placeholders == {"temperature": "1", "top_p": "1"}
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=top_p]", "1.5")
    page.click("#done")
    expect(page, "#settings").to_be_visible()  # the browser says what may be
    for name, value in {"top_p": "0.5", "temperature": "0.25", "seed": "7", "max_tokens": "9"}.items():
        page.fill(f"[name={name}]", value)
    page.select_option("[name=enable_thinking]", "off")
    page.click("#done")
    expect(page, "#num-changed").to_have_text("6")
    say(page, "How?")
    asked = spoken.scripted.params[-1]
    assert (asked.max_new_tokens, asked.sampling.seed) == (9, 7)
    assert asked.sampling == replace(asked.sampling, temperature=0.25, top_p=0.5, top_k=0)
    assert "system\nBe brief.<|im_end|>" in spoken.prompt and spoken.prompt.endswith("</think>\n\n")
    act(page, "Regenerate")
    is_answered(page)
    assert spoken.scripted.params[-1].sampling.seed == 8
    page.click("#new")
    page.click("#open-settings")
    assert page.input_value("[name=system]") == "Be brief."
    page.click("#reset")
    page.click("#done")
    expect(page, "#num-changed").to_be_hidden()


# --- conversations


def test_conversations_are_kept_renamed_exported_and_deleted(page: Page, spoken: Spoken) -> None:
    say(page, "How do I reverse a text?")
    page.click("#new")
    expect(page, ".message").to_have_count(0)
    say(page, "And a list?")
    expect(page, "#conversations a").to_have_text(["And a list?", "How do I reverse a text?"])
    page.reload()
    expect(page, ".user .said").to_have_text("And a list?")
    page.click("#conversations a >> nth=1")
    expect(page, ".prose strong").to_have_text("slice")
    act(page, "Rename", "#sidebar")
    page.keyboard.type("Texts")
    page.keyboard.press("Enter")
    expect(page, "[aria-current]").to_have_text("Texts")
    with page.expect_download() as download:
        act(page, "Export", "#sidebar")
    text = Path(download.value.path()).read_text()
    assert download.value.suggested_filename == "Texts.md"
    seed = spoken.scripted.params[-2].sampling.seed
    assert text.startswith(f"# Texts\n\n## You\n\nHow do I reverse a text?\n\n## Answer ({MODEL}, seed {seed})\n\n")
    assert "```python" in text
    act(page, "Delete", "#sidebar")
    act(page, "Keep", "#sidebar")
    act(page, "Delete", "#sidebar")
    act(page, "Delete", "#sidebar")
    expect(page, "#conversations a").to_have_text(["And a list?"])
    page.reload()
    ready(page)
    expect(page, "#conversations a").to_have_text(["And a list?"])


def test_tabs_show_what_the_other_has_changed(page: Page) -> None:
    say(page, "How?")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other, ".said").to_have_count(2)
    say(other, "And then?")
    expect(page, ".said").to_have_count(4)
    act(other, "Delete", "#sidebar")
    act(other, "Delete", "#sidebar")
    expect(page, "#conversations a").to_have_count(0)
    expect(page, ".said").to_have_count(0)


def test_an_answer_comes_while_another_conversation_is_shown(page: Page, spoken: Spoken) -> None:
    spoken.scripted.finish_reason = ""
    page.fill("#text", "How?")
    page.press("#text", "Enter")
    expect(page, ".prose strong").to_be_visible()
    page.click("#new")
    expect(page, "a.running").to_have_count(1)
    spoken.scripted.finish_reason = "stop"
    say(page, "And now?")
    page.click("a.running")
    expect(page, "#stop").to_be_visible()
    page.click("#stop")
    expect(page, "a.running").to_have_count(0)
    page.reload()
    expect(page, ".figures").to_have_text("stopped")


def test_with_a_key_nothing_is_kept(directory: Path, opening: Opening) -> None:
    with speaking(directory, api_key="secret") as spoken:
        spoken.scripted.pieces = ["So", "."]
        page = opening(spoken.url)
        expect(page, "#notice").to_have_text("this server needs its API key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page, "#notice").to_have_text("this is not the API key of this server")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        ready(page)
        say(page, "How?")
        expect(page, ".said.prose").to_have_text("So.")
        expect(page, "#kept").to_contain_text("gone when this page is closed")
        assert page.evaluate("indexedDB.databases()") == [] and page.evaluate("localStorage.length") == 0
        page.reload()
        expect(page, "#asks-key").to_be_visible()
        expect(page, "#conversations a").to_have_count(0)


def test_the_page_waits_for_the_model(two_layer_target: Path, opening: Opening) -> None:
    with Server(ServerConfig(port=0, grace_s=0.0)) as server:
        page = opening(server.url)
        expect(page, "#status").to_have_text("the server is loading")
        expect(page, "#send").to_be_disabled()
        with load(two_layer_target, draft="none") as runtime, server.serving(runtime, MODEL):
            say(ready(page), "the quick brown fox")
            expect(page, ".assistant .figures").to_contain_text("tokens a pass")
            expect(page, "#status").to_be_hidden()


def test_a_conversation_is_with_one_of_several_models(
    two_layer_target: Path, one_layer_draft: Path, opening: Opening
) -> None:
    with Turns({"one": two_layer_target, "two": one_layer_draft}) as turns:
        page = opening(turns.url)
        page.click("#open-settings")
        page.fill("[name=max_tokens]", "2")
        page.click("#done")
        turns.may_load.clear()
        page.select_option("#model-choice", "two")
        page.fill("#text", "the fox")
        page.press("#text", "Enter")
        expect(page, ".assistant .hint").to_contain_text("loading two")
        turns.may_load.set()
        is_answered(page)
        expect(page, ".figures").to_have_text(re.compile("^two · "))
        expect(page, "#model-choice option").to_have_text(["one", "two (loaded)"])
        page.select_option("#model-choice", "one")
        act(page, "Regenerate")
        is_answered(page)
        expect(page, ".figures").to_have_text(re.compile("^one · "))
        page.reload()
        expect(page, "#model-choice").to_have_value("one")


# --- how it looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_360_pixels_everything_is_in_reach(opening: Opening, spoken: Spoken, scheme: str) -> None:
    page = ready(opening(width=360, touch=True, scheme=scheme))
    spoken.scripted.pieces = pieces(ANSWER + "\n```\n" + "a long line " * 20 + "\n```\n" + "x" * 200)
    page.fill("#text", "How?")
    page.press("#text", "Enter")  # a new line where there is no keyboard of keys
    assert page.input_value("#text") == "How?\n"
    page.tap("#send")
    is_answered(page)
    page.tap("#sources")
    page.tap("#sources")
    page.tap("#menu")
    expect(page, "#conversations a").to_have_text(["How?"])
    page.tap("#new")
    expect(page, "#sidebar").to_be_hidden()
    page.tap("#menu")
    page.tap("#conversations a")
    expect(page, ".message").to_have_count(2)
    page.tap("#open-settings")
    expect(page, "#done").to_be_in_viewport()
    page.tap("#done")
    beyond = (
        "e => e.getBoundingClientRect().right > innerWidth && e.checkVisibility() && !e.closest('pre, .table, .unseen')"
    )
    wide = page.evaluate(
        f"[...document.querySelectorAll('body *')].filter({beyond}).map(e => e.outerHTML.slice(0, 99))"
    )
    assert not wide
    for selector in ("html", "#messages"):  # what is long is broken, or scrolled by itself
        assert page.locator(selector).evaluate("e => e.scrollWidth <= e.clientWidth"), selector


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(opening: Opening, spoken: Spoken, scheme: str) -> None:
    page = ready(opening(scheme=scheme))
    spoken.scripted.sources = ["ngram", "draft", "retrieval", "target"]
    say(page, "How?")
    page.click("#sources")
    texts = ".user .said, .said .ngram, .said .draft, .said .retrieval, .figures, #send, h1, #keys, .actions button"
    for selector in texts.split(", "):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector


# As WCAG 2 has it. What lies behind may be partly transparent; a canvas reads any colour of CSS.
CONTRAST = """selector => {
    const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    const element = document.querySelector(selector);
    const behind = [];
    for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const luminance = colours => {
        for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
        const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map(byte => byte / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [one, other] = [luminance(behind), luminance([...behind, getComputedStyle(element).color])];
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}"""
