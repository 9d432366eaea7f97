"""What notebooks and `help` show of the Python API."""

import html
import inspect
import pydoc
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import offload_runtime as rt
from offload_runtime.config import RuntimeConfig
from tests.helpers.engine import PROMPT, load
from tests.test_cli_fakes import make_stats

TARGET = "two_layer_target"


@pytest.mark.parametrize("where", ["asked for", "in a notebook", "elsewhere"])
def test_bars_are_shown_in_notebooks_and_where_they_are_asked_for(
    two_layer_target: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "in a notebook":
        shell = SimpleNamespace(config={"IPKernelApp": {}})
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    progress: list[tuple[int, int]] = []
    options = {"progress": True} if where == "asked for" else {}
    with load(two_layer_target, context=256, **options) as runtime:
        runtime.generate(PROMPT, max_new_tokens=9, ignore_eos=True, on_prefill=lambda *layers: progress.append(layers))
    shown = capsys.readouterr().err
    stages = ("target weights: ", "prompt: ", "answer: ", " tokens/s")
    assert [stage in shown for stage in stages] == [where != "elsewhere"] * 4
    assert progress == [(1, 2), (2, 2)]


def test_an_answer_shows_itself_and_no_markup_of_the_models() -> None:
    result = rt.GenerationResult([1, 2], "a <script>\nb & c", "stop", make_stats())
    shown = result._repr_html_()
    assert "a &lt;script&gt;\nb &amp; c</div>" in shown and "<script" not in shown
    assert "2 tokens (stop) · 12.5 tokens/s · 1.5 tokens a pass · first token 0.25 s · link 20.0 of 25.0 GB/s" in shown
    sure = rt.TokenLogprobs(1, 0.0, ((1, 0.0),), "a <b>", ("a <b>",))
    unsure = rt.TokenLogprobs(2, -0.6931471805599453, ((3, -0.69), (4, -1.6)), ' "c', (" e", "<d>"))
    shown = replace(result, logprobs=(sure, unsure))._repr_html_()
    spans = re.findall(r'<span title="([^"]*)" style="background: rgba\(255, 140, 0, ([\d.]+)\)">(.*?)</span>', shown)
    assert [(float(alpha), html.unescape(text)) for _, alpha, text in spans] == [(0.0, "a <b>"), (0.25, ' "c')]
    assert html.unescape(spans[1][0]).splitlines() == ["' \"c' 50.0 %", "' e' 50.2 %", "'<d>' 20.2 %"]
    assert html.unescape(spans[0][0]).splitlines() == ["'a <b>' 100.0 %"]


def test_help_and_completion_know_every_option() -> None:
    loading = inspect.signature(rt.Runtime.load).parameters
    assert {one.name for one in fields(RuntimeConfig)} <= loading.keys() and loading["vram"].default is None
    assert "target: str | Path | CheckpointSource, *, " in pydoc.plain(pydoc.render_doc(rt.Runtime.load))
    answering = {"max_new_tokens", "temperature", "seed", "stop", "logprobs", "json_schema", "grammar"}
    calls = (rt.Runtime.generate, rt.Runtime.stream, rt.Runtime.astream, rt.Runtime.agenerate, rt.Conversation.say)
    for call in calls:
        assert answering <= inspect.signature(call).parameters.keys()
        assert "    max_new_tokens: Longest answer, in tokens." in pydoc.plain(pydoc.render_doc(call))
