"""`tools/timeline.py` on real traces of a small model, and on files that are none."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import timeline
import trace_spans

from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)

ROOT = Path(__file__).resolve().parents[1]

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def trace(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with load(target, draft=draft, resident_layers=1, kv="host", trace=path) as runtime:
        runtime.generate(PROMPT * 16, max_new_tokens=20, ignore_eos=True, gamma=3)
    return path


def words_of(drawn: Path) -> str:
    """The text of an SVG, a line for each piece of it."""
    return "\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", drawn.read_text()))


def write_made_up(path: Path, *, about: dict[str, object]) -> Path:
    """A trace of four passes of a tenth of a second each, with as much between them."""

    def span(row: str, name: str, start_ms: int, end_ms: int, **args: object) -> dict[str, object]:
        return {
            "ph": "X",
            "cat": row,
            "name": name,
            "ts": 1e3 * start_ms,
            "dur": 1e3 * (end_ms - start_ms),
            "args": args,
        }

    events = []
    for number in range(4):
        at, told = 200 * number, {"kind": "verify", "tokens": [1 + 3 * number], "accepted": [number]}
        events += [
            span("draft", "propose", at + 20, at + 100),
            span("draft", "tree step", at + 30, at + 60),
            span("passes", f"verify {number}", at + 100, at + 200, **{"pass": number}, **told),
            span("link", "weights of layer 0", at + 40, at + 140, kind="weights", layer=0, bytes=1_000_000_000),
            span("stalls", "wait for the link", at + 100, at + 140),
            span("compute", "layer 0", at + 140, at + 190, layer=0),
        ]
    record = {"otherData": {"offload_runtime_trace": 1, **about}, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    return path


def test_a_picture_says_what_is_what(tmp_path: Path) -> None:
    placement = "26 of 40 layers resident; KV cache 1.7 GB; emulating rtx4090: link paced to 25 GB/s"
    about: dict[str, object] = {"device": "cuda:0", "device_name": "NVIDIA H200", "dtype": "torch.bfloat16"}
    path = write_made_up(tmp_path / "trace.json.gz", about={**about, "emulated": "rtx4090", "placement": placement})
    out = tmp_path / "passes.svg"
    assert timeline.main([str(path), "--passes", "0-2", "--out", str(out)]) == 0
    words = words_of(out).splitlines()
    for word in (
        "passes", "link to the GPU", "target", "draft", "verify 0: 1 token", "verify 1: 4 tokens, 1 accepted",
        "verify 2: 7 tokens, 2 accepted", "weights for the next pass", "link idle", "target computes",
        "target waits for the link", "steps of the draft", "proposing, host included", "ms",
        "NVIDIA H200, bfloat16; emulating rtx4090: link paced to 25 GB/s; 26 of 40 layers resident",
        "580 ms: link 3.0 GB at 10 GB/s, idle 48.3 %; compute 25.9 %; stalls 20.7 %",
    ):  # fmt: skip
        assert word in words
    assert not {"weights for this pass", "link back", "verify 3: 10 tokens, 3 accepted"} & set(words)
    two = {**about, "cards": [{"device": f"cuda:{card}", "device_name": f"card {card}"} for card in (0, 1)]}
    told = trace_spans.read_trace(write_made_up(tmp_path / "two.json.gz", about=two)).machine()
    assert told == "card 0 and card 1, bfloat16"
    told = trace_spans.read_trace(write_made_up(tmp_path / "older.json.gz", about={"emulated": "rtx4090"})).machine()
    assert told == "emulating rtx4090"
    assert trace_spans.read_trace(write_made_up(tmp_path / "silent.json.gz", about={})).machine() == ""


@pytest.mark.slow
def test_passes_are_drawn_with_their_totals(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "passes.svg"
    assert timeline.main([str(trace), "--passes", "2-3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"{out}\n") and "link " in printed
    words = words_of(out)
    told = trace_spans.read_trace(trace)
    assert told.about["device"] == "cpu" and told.about["device_name"] is None
    assert told.machine() in words and "cpu, float32; 1 of " in words
    assert printed.splitlines()[0].removeprefix("verify 2 to verify 3, ") in words
    assert timeline.main([str(trace)]) == 0
    assert trace.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "verify 2 to verify 4" in words_of_title(trace, tmp_path)
    assert timeline.main([str(trace), "--passes", "0", "--out", str(out)]) == 0
    assert "prefill 0 of trace.json" in words_of(out)


def test_each_card_has_a_link_and_a_target(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, cut = tmp_path / "cards.json", tmp_path / "cards.svg", tmp_path / "cut.json.gz"
    with Runtime.load(target, device="cpu,cpu", draft="none", resident_layers=0, trace=path) as runtime:
        runtime.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        numbers = [share.layers for share in runtime.plan.target.shares]
    assert trace_spans.read_trace(path).machine().startswith("cpu and cpu, float32; 0 of 5 layers")
    ways = ["--passes", "2-4", "--title", "two cards"]
    assert timeline.main([str(path), *ways, "--out", str(out), "--cut", str(cut)]) == 0
    words, printed = words_of(out).splitlines(), capsys.readouterr().out.splitlines()
    labels = [f"{row}, card {card}" for card in (0, 1) for row in ("link to the GPU", "target")]
    assert [word for word in words if word in ("passes", "link to the GPU", "target", *labels)] == ["passes", *labels]
    for card in (0, 1):
        (line,) = [line for line in printed if line.startswith(f"card {card}: link ")]
        assert line in words and "GB/s, idle " in line
    events = trace_spans.read_trace(path).events
    for card, layers in enumerate(numbers):
        own = trace_spans.of_card(events, card)
        assert {one.args["layer"] for one in own if one.row in ("link", "compute") and "layer" in one.args} == {*layers}
        # Of every copy is known which pass it is for, by the layers of its card.
        window = (0.0, max(event.end_s for event in events))
        assert {"weights for this pass", "weights for the next pass"} & {*timeline.bars_of("link", own, window)}
    assert timeline.main([str(cut), *ways, "--out", str(tmp_path / "cut.svg")]) == 0
    assert words_of(tmp_path / "cut.svg") == words_of(out)


def test_the_totals_of_a_card_are_of_its_own_link() -> None:
    event = trace_spans.Event
    passes = [event("passes", "verify 1", 10.0, 14.0, {"pass": 1, "kind": "verify", "tokens": [1]})]
    events = [
        *passes,
        event("draft", "propose", 9.0, 10.0, {}),
        event("link", "weights of layer 0", 10.0, 13.0, {"bytes": 300, "kind": "weights"}),
        event("link", "weights of layer 1", 9.5, 10.5, {"bytes": 50, "kind": "weights"}, 1),
        event("compute", "layer 0", 10.0, 11.0, {"layer": 0}),
        event("compute", "layer 1", 11.0, 13.0, {"layer": 1}, 1),
        event("stalls", "wait for the link", 12.0, 12.5, {}, 1),
    ]
    totals = trace_spans.totals_of(events, passes, (9.0, 14.0))
    card = trace_spans.CardTotals
    assert totals.cards == (card(300.0, 3.0, 1.0, 0.0), card(50.0, 1.0, 1.5, 0.5))
    assert totals.hidden_draft_s == 0.5  # behind the second card's copy
    assert totals.caption().splitlines()[:3] == [
        "5000 ms",
        "card 0: link 300 B at 1e-07 GB/s, idle 40.0 %; compute 20.0 %; stalls 0.0 %",
        "card 1: link 50 B at 5e-08 GB/s, idle 80.0 %; compute 30.0 %; stalls 10.0 %",
    ]


def words_of_title(trace: Path, tmp_path: Path) -> str:
    assert timeline.main([str(trace), "--out", str(tmp_path / "some.svg")]) == 0
    return words_of(tmp_path / "some.svg")


@pytest.mark.slow
def test_a_picture_is_the_same_each_time_and_has_a_panel_for_each_range(trace: Path, tmp_path: Path) -> None:
    ways = ["--passes", "1-2,4", "--title", "A & B"]
    for name in ("once", "again"):
        assert timeline.main([str(trace), *ways, "--out", str(tmp_path / f"{name}.svg")]) == 0
    once = (tmp_path / "once.svg").read_bytes()
    assert once == (tmp_path / "again.svg").read_bytes() and b"<dc:date>" not in once
    words = words_of(tmp_path / "once.svg").splitlines()
    assert words.count("ms") == 2 and "A &amp; B" in words
    assert len([word for word in words if re.fullmatch(r"#[124]|verify [124]: .*", word)]) == 3


@pytest.mark.slow
def test_a_cut_out_draws_and_counts_like_the_whole_trace(trace: Path, tmp_path: Path) -> None:
    cut, out = tmp_path / "cut.json.gz", tmp_path / "whole.svg"
    ways = ["--passes", "2-3,5", "--title", "both"]
    assert timeline.main([str(trace), *ways, "--out", str(out), "--cut", str(cut)]) == 0
    assert timeline.main([str(cut), *ways, "--out", str(tmp_path / "cut.svg")]) == 0
    assert out.read_bytes() == (tmp_path / "cut.svg").read_bytes()
    kept = json.loads(gzip.decompress(cut.read_bytes()))
    whole = json.loads(trace.read_text())
    assert kept["otherData"] == whole["otherData"]
    passes = [span["args"]["pass"] for span in kept["traceEvents"] if span.get("cat") == "passes"]
    assert passes == [1, 2, 3, 4, 5] and len(kept["traceEvents"]) < len(whole["traceEvents"])
    again = tmp_path / "again.json.gz"
    assert timeline.main([str(cut), *ways, "--out", str(out), "--cut", str(again)]) == 0
    assert again.read_bytes() == cut.read_bytes()
    assert timeline.main([str(cut), "--passes", "1-9", "--out", str(out)]) == 2
    # A compressed trace's picture is named like that of the trace itself.
    assert timeline.picture_path(cut, None) == tmp_path / "cut.png"


def test_copies_are_told_apart_by_the_pass_that_they_are_for(trace: Path) -> None:
    events = [
        trace_spans.Event("passes", "verify 1", 10.0, 14.0, {"pass": 1, "kind": "verify", "tokens": [1]}),
        trace_spans.Event("passes", "verify 2", 15.0, 18.0, {"pass": 2, "kind": "verify", "tokens": [1]}),
        trace_spans.Event("link", "weights of layer 1", 9.0, 11.0, {"layer": 1, "kind": "weights", "bytes": 1}),
        trace_spans.Event("link", "kv of layer 1", 11.0, 11.5, {"layer": 1, "kind": "kv", "bytes": 1}),
        trace_spans.Event("link", "weights of layer 3", 11.5, 11.7, {"layer": 3, "kind": "weights", "bytes": 1}),
        trace_spans.Event("compute", "layer 1", 11.2, 11.8, {"layer": 1}),
        trace_spans.Event("stalls", "wait for the link", 11.3, 11.5, {}),
        trace_spans.Event("compute", "layer 3", 12.0, 12.5, {"layer": 3}),
        trace_spans.Event("link", "weights of layer 1", 11.7, 14.5, {"layer": 1, "kind": "weights", "bytes": 1}),
        trace_spans.Event("compute", "layer 1", 16.0, 16.5, {"layer": 1}),
        trace_spans.Event("link", "weights of layer 3", 16.0, 17.0, {"layer": 3, "kind": "weights", "bytes": 1}),
        trace_spans.Event("link", "measurement", 17.5, 18.0, {"kind": "measurement", "bytes": 1}),
    ]
    window = 9.0, 18.0
    assert timeline.bars_of("link", events, window) == {
        "weights for the next pass": [(9.0, 11.0), (11.7, 14.5), (16.0, 17.0)],
        "kv for this pass": [(11.0, 11.5)],
        "weights for this pass": [(11.5, 11.7)],
        "measurement": [(17.5, 18.0)],
        "link idle": [(14.5, 16.0), (17.0, 17.5)],
    }
    assert timeline.bars_of("target", events, window) == {
        "target waits for the link": [(11.3, 11.5)],
        "target computes": [(11.2, 11.3), (11.5, 11.8), (12.0, 12.5), (16.0, 16.5)],
    }


def test_totals_are_those_of_the_trace(trace: Path) -> None:
    events = trace_spans.read_trace(trace).events
    passes = [event for event in events if event.row == "passes"]
    everything = trace_spans.totals_of(events, passes, (0.0, max(event.end_s for event in events)))
    copies = [event for event in events if event.row == "link"]
    (card,) = everything.cards
    assert card.link_bytes == pytest.approx(sum(event.args["bytes"] for event in copies))
    assert card.link_s == pytest.approx(sum(event.end_s - event.start_s for event in copies))
    layers = sum(event.end_s - event.start_s for event in events if event.row == "compute")
    assert 0 < card.compute_s <= layers < everything.seconds
    assert everything.checked_tokens == sum(sum(one.args["tokens"]) for one in passes)
    # No pass hides drafting on a CPU; copies, which have a thread, may.
    assert 0 <= everything.hidden_draft_s <= everything.draft_s and everything.draft_s > 0


def test_totals_are_clipped_and_counted_once() -> None:
    event = trace_spans.Event
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
    window = trace_spans.window_of(events, passes)
    assert window == (9.0, 14.0)
    totals = trace_spans.totals_of(events, passes, window)
    assert totals == trace_spans.Totals(
        seconds=5.0, cards=(trace_spans.CardTotals(link_bytes=400.0, link_s=4.0, compute_s=1.5, stall_s=0.5),),
        draft_s=1.5, hidden_draft_s=1.5, checked_tokens=4, accepted_tokens=2,
    )  # fmt: skip
    assert "idle 20.0 %; compute 30.0 %; stalls 10.0 %\ndrafting 30.0 %, 100 % hidden" in totals.caption()


def test_where_nothing_is_streamed_no_link_is_idle() -> None:
    passes = [
        trace_spans.Event("passes", "verify 1", 1.0, 2.0, {"pass": 1, "kind": "verify", "tokens": [4], "accepted": [2]})
    ]
    events = [*passes, trace_spans.Event("draft", "propose", 0.2, 0.7, {})]
    totals = trace_spans.totals_of(events, passes, (0.1, 2.0))
    assert totals.caption().startswith("1900 ms: nothing streamed; compute 0.0 %") and "0 % hidden" in totals.caption()
    assert "-0" not in totals.caption() and timeline.bars_of("link", events, (0.1, 2.0)) == {}


def test_what_is_no_trace_is_refused(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(trace.read_text())
    files = {
        "truncated": trace.read_text()[:-40],
        "list": "[]",
        "chrome": json.dumps({"traceEvents": record["traceEvents"]}),
        "newer": json.dumps({**record, "otherData": {"offload_runtime_trace": 2}}),
        "damaged": json.dumps({**record, "traceEvents": [{"ph": "X"}]}),
        "deep": "[" * 200_000,
        "bare": json.dumps({**record, "traceEvents": [{**spanned, "args": {}} for spanned in record["traceEvents"]]}),
    }
    words = {
        "truncated": "not JSON", "list": "is no trace of", "chrome": "is no trace of", "newer": "of version 2",
        "damaged": "is no trace of", "deep": "not JSON", "bare": "is no trace of", "flipped": "not JSON",
    }  # fmt: skip
    packed = bytearray(gzip.compress(trace.read_bytes()))
    packed[len(packed) // 2 : len(packed) // 2 + 100] = bytes(100)
    for name, content in {**{name: text.encode() for name, text in files.items()}, "flipped": bytes(packed)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(trace_spans.TraceError, match=words[name]):
            trace_spans.read_trace(tmp_path / name)
        assert timeline.main([str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 600
    with pytest.raises(trace_spans.TraceError, match="No such file"):
        trace_spans.read_trace(tmp_path / "absent")
    assert not list(tmp_path.glob("*.png"))


def test_passes_and_places_that_are_not_there_are_refused(trace: Path, tmp_path: Path) -> None:
    events = trace_spans.read_trace(trace).events
    for asked in ("3-2", "a", "-1", "1-2-3", ""):
        with pytest.raises(OptionError, match="is no range"):
            trace_spans.choose_passes(events, asked)
    with pytest.raises(trace_spans.TraceError, match=r"the trace has the passes 0 to \d+"):
        trace_spans.choose_passes(events, "1-999")
    with pytest.raises(trace_spans.TraceError, match="has no passes"):
        trace_spans.choose_passes([], None)
    with pytest.raises(OptionError, match="must end in one of"):
        timeline.picture_path(trace, str(tmp_path / "picture.doc"))
    assert timeline.main([str(trace), "--out", str(tmp_path / "absent" / "p.png")]) == 2


def test_a_cut_never_takes_the_place_of_its_trace(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, link = trace.read_bytes(), tmp_path / "link.json"
    link.symlink_to(trace)
    for cut in (trace, link):
        assert timeline.main([str(trace), "--out", str(tmp_path / "p.png"), "--cut", str(cut)]) == 2
        assert "is the trace itself" in capsys.readouterr().err
    assert trace.read_bytes() == whole and not (tmp_path / "p.png").exists()
