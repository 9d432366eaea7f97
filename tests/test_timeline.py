"""`tools/timeline.py` on real traces of a small model, and on files that are none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from offload_runtime.errors import OptionError, TraceError
from tests.helpers.engine import PROMPT, load, one_thread, write_checkpoint, write_noisy_copy  # noqa: F401

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import timeline

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    target = write_checkpoint(folder / "target")
    draft = write_noisy_copy(target, folder / "draft", noise=0.05)
    with load(target, draft=draft, resident_layers=1, kv="host", trace=folder / "trace.json") as runtime:
        runtime.generate(PROMPT * 16, max_new_tokens=20, ignore_eos=True, gamma=3)
    return folder / "trace.json"


def words_of(picture: Path) -> str:
    """The text of an SVG, which matplotlib keeps beside the outlines of its letters."""
    lines = picture.read_text().splitlines()
    return "\n".join(line.strip() for line in lines if line.strip().startswith("<!--"))


def test_passes_are_drawn_with_their_totals(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "passes.svg"
    assert timeline.main([str(trace), "--passes", "2-3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"{out}\n") and "link " in printed
    words = words_of(out)
    for word in ("link", "compute", "draft", "stalls", "weights", "verify 2: 4 tokens", "verify 3: 4 tokens"):
        assert word in words
    assert "verify 4" not in words and printed.splitlines()[0] in words
    assert timeline.main([str(trace)]) == 0
    assert trace.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "verify 2 to verify 4" in words_of_title(trace, tmp_path)
    assert timeline.main([str(trace), "--passes", "0", "--out", str(out)]) == 0
    assert "prefill 0" in words_of(out)


def words_of_title(trace: Path, tmp_path: Path) -> str:
    assert timeline.main([str(trace), "--out", str(tmp_path / "some.svg")]) == 0
    return words_of(tmp_path / "some.svg")


def test_totals_are_those_of_the_trace(trace: Path) -> None:
    events = timeline.read_trace(trace)
    passes = [event for event in events if event.row == "passes"]
    everything = timeline.totals_of(events, passes, (0.0, max(event.end_s for event in events)))
    copies = [event for event in events if event.row == "link"]
    assert everything.link_bytes == pytest.approx(sum(event.args["bytes"] for event in copies))
    assert everything.link_s == pytest.approx(sum(event.end_s - event.start_s for event in copies))
    layers = sum(event.end_s - event.start_s for event in events if event.row == "compute")
    assert 0 < everything.compute_s <= layers < everything.seconds
    assert everything.checked_tokens == sum(sum(one.args["tokens"]) for one in passes)
    assert everything.hidden_draft_s == pytest.approx(0.0, abs=1e-9) and everything.draft_s > 0


def test_totals_are_clipped_and_counted_once() -> None:
    event = timeline.Event
    passes = [event("passes", "verify 1", 10.0, 14.0, {"pass": 1, "kind": "verify", "tokens": [4], "accepted": [2]})]
    events = [
        *passes,
        event("draft", "propose", 7.0, 8.0, {}),
        event("draft", "propose", 9.0, 10.5, {}),
        event("draft", "draft steps", 9.2, 10.4, {}),
        event("link", "weights of layer 0", 8.0, 10.0, {"bytes": 200, "kind": "weights"}),
        event("link", "weights of layer 1", 10.0, 13.0, {"bytes": 300, "kind": "weights"}),
        event("compute", "layer 0", 10.0, 12.0, {"layer": 0}),
        event("stalls", "wait for the link", 11.0, 11.5, {}),
    ]
    events.append(event("passes", "verify 0", 7.5, 8.5, {"pass": 0, "kind": "verify", "tokens": [1]}))
    window = timeline.window_of(events, passes)
    assert window == (9.0, 14.0)
    totals = timeline.totals_of(events, passes, window)
    assert totals == timeline.Totals(
        seconds=5.0, link_bytes=400.0, link_s=4.0, compute_s=1.5, stall_s=0.5, draft_s=1.5, hidden_draft_s=0.5,
        checked_tokens=4, accepted_tokens=2,
    )  # fmt: skip
    assert "idle 20.0 %; compute 30.0 %; stalls 10.0 %\ndrafting 30.0 %, 33 % hidden" in totals.caption()


def test_what_is_no_trace_is_refused(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(trace.read_text())
    files = {
        "truncated": trace.read_text()[:-40],
        "list": "[]",
        "chrome": json.dumps({"traceEvents": record["traceEvents"]}),
        "newer": json.dumps({**record, "otherData": {"offload_runtime_trace": 2}}),
        "damaged": json.dumps({**record, "traceEvents": [{"ph": "X"}]}),
    }
    words = {
        "truncated": "not JSON", "list": "is no trace of", "chrome": "is no trace of", "newer": "of version 2",
        "damaged": "is no trace of",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(TraceError, match=words[name]):
            timeline.read_trace(tmp_path / name)
        assert timeline.main([str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(TraceError, match="No such file"):
        timeline.read_trace(tmp_path / "absent")
    assert not list(tmp_path.glob("*.png"))


def test_passes_and_places_that_are_not_there_are_refused(trace: Path, tmp_path: Path) -> None:
    events = timeline.read_trace(trace)
    for asked in ("3-2", "a", "-1", "1-2-3", ""):
        with pytest.raises(OptionError, match="is no range"):
            timeline.choose_passes(events, asked)
    with pytest.raises(TraceError, match=r"the trace has the passes 0 to \d+"):
        timeline.choose_passes(events, "1-999")
    with pytest.raises(TraceError, match="has no passes"):
        timeline.choose_passes([], None)
    with pytest.raises(OptionError, match="must end in one of"):
        timeline.picture_path(trace, str(tmp_path / "picture.doc"))
    assert timeline.main([str(trace), "--out", str(tmp_path / "absent" / "p.png")]) == 2
