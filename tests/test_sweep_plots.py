"""Pictures of sweeps: what is measured with its bound as a line, the same bytes again, and what the documents show."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sweep as sweep_tool
from sweep import FAMILIES, main, plan
from sweeping.family import family_of, flag
from sweeping.pictures import draw, panels_of, picture_base
from sweeping.streamed_weights import points_among

from offload_runtime.errors import OptionError, StorageError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "tools" / "results").glob("sweep-*.json"))
CHARTS = ROOT / "docs" / "charts"
NAMES = [path.stem for path in RESULTS]
ABOUT = {"benchmark": "sweep", "measured_on": "a card", "commit": "abc1234"}
SETTINGS = {
    "target": "None", "shape": "tiny", "layers": "None", "source": "None", "dtype": "bf16", "prompt_tokens": "512",
    "resident_layers": "0", "temperature": "0.6", "tokens": "64", "vram": "None", "emulate": "None",
}  # fmt: skip
WINDOWS = [
    {"value": str(width), "window_tokens": width, "pass_s": {"median": 0.25}, "bound_s": 0.2, "bound_by": "link",
     "tok_per_s": width / 0.25, "bound_tok_per_s": width / 0.2}
    for width in (1, 64)
]  # fmt: skip
SHARES = [
    {"value": value, "resident_layers": layers, "resident_share": layers / 8, "plain_s_per_token": seconds,
     "bound_s": seconds / 2, "bound_by": cause, "drafted": {"tok_per_s": 3 / seconds, "bound_tok_per_s": 9 / seconds}}
    for value, layers, seconds, cause in (("1", 8, 0.01, "memory"), ("0", 0, 0.4, "link"))
]  # fmt: skip


@pytest.fixture(autouse=True)
def matplotlib_is_there() -> None:
    pytest.importorskip("matplotlib")


def report_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def lines_of(sweep: str, rows: list[dict[str, Any]], panel: int) -> dict[str, list[float]]:
    """The lines of a panel: label to heights, from left to right."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    draw_panel, chosen = panels_of(sweep, rows)[panel]
    draw_panel(axes, chosen)
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


BOUND = "bound: what pass time and acceptance allow"


def test_speed_ups_and_their_bound_are_lines_in_ascending_order() -> None:
    rows = [
        {"value": value, "times_plain": speed, "bound_times_plain": speed + 0.5}
        for value, speed in (("120K", 3.0), ("4K", 1.0), ("8K", 2.0))
    ]
    lines = lines_of("context", rows, 0)
    assert lines["measured"] == [1.0, 2.0, 3.0] and lines[BOUND] == [1.5, 2.5, 3.5]
    assert lines["plain decoding of the same"] == [1.0, 1.0]


def test_names_are_bars_below_pieces_of_the_bound() -> None:
    rows = [{"value": value, "times_plain": 1.0, "bound_times_plain": 2.0} for value in ("topk", "chain")]
    assert lines_of("policy", rows, 0)[BOUND] == [2.0, 2.0]


def test_both_kinds_of_gamma_have_their_own_panel() -> None:
    rows = [
        {"value": value, "times_plain": speed, "bound_times_plain": 9.0}
        for value, speed in (("8", 2.0), ("d2", 4.0), ("4", 1.0), ("d1", 3.0))
    ]
    assert [lines_of("gamma", rows, panel)["measured"] for panel in (0, 1)] == [[1.0, 2.0], [3.0, 4.0]]


def test_windows_and_shares_have_their_bounds() -> None:
    assert lines_of("window", WINDOWS, 0) == {"measured": [0.25, 0.25], "bound: bytes / link": [0.2, 0.2]}
    assert lines_of("window", WINDOWS, 1) == {"measured": [4.0, 256.0], "bound": [5.0, 320.0]}
    plain = lines_of("resident", SHARES, 0)
    assert plain == {"plain decoding": [0.4, 0.01], "bound: bytes / link, then bytes / memory": [0.2, 0.005]}
    speeds = lines_of("resident", SHARES, 1)
    assert speeds["with the draft, windows chosen"] == pytest.approx([7.5, 300])
    assert speeds["its bound: as many tokens a pass, no drafting"] == pytest.approx([22.5, 900])
    without = [{name: value for name, value in row.items() if name != "drafted"} for row in SHARES]
    assert set(lines_of("resident", without, 1)) == {"plain decoding", "its bound"}


@pytest.mark.few(1)
@pytest.mark.parametrize(("sweep", "rows"), [("window", WINDOWS), ("resident", SHARES)])
def test_one_call_draws_both_formats_the_same_again(sweep: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    report = {**ABOUT, "sweep": sweep, "settings": SETTINGS, "rows": rows}
    first, again = draw(report, tmp_path / "a-0.5"), draw(report, tmp_path / "b.svg")
    assert [path.name for path in first] == ["a-0.5.png", "a-0.5.svg"]
    assert [path.name for path in again] == ["b.png", "b.svg"]
    assert first[0].read_bytes().startswith(b"\x89PNG")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    svg = first[1].read_text()
    assert "a card, commit abc1234: tiny shape, random weights, bf16" in svg and "<dc:date>" not in svg


def test_draw_makes_pictures_of_files_and_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needle = next(path for path in RESULTS if "needle" in path.name)
    assert main(["draw", str(needle), "--out", str(tmp_path / "new"), "--formats", "svg"]) == 0
    (picture,) = (tmp_path / "new").iterdir()
    assert picture.name == needle.stem + ".svg" and capsys.readouterr().out.strip() == str(picture)
    assert "bound: the full cache itself" in picture.read_text()


def test_what_cannot_be_drawn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "plan.json"
    for content, message in (("{}", "no result of a sweep"), ('{"benchmark": "plan", "rows": []}', "but of 'plan'")):
        other.write_text(content)
        assert main(["draw", str(other), "--out", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    assert main(["draw", str(tmp_path / "absent.json"), "--out", str(tmp_path)]) == 2
    assert "No such file" in capsys.readouterr().err
    other.write_bytes(b"\x1f\x8b" * 20_000)
    assert main(["draw", str(other), "--out", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err) < 300
    other.write_text('{"benchmark": "sweep_long_context", "sweep": "temperature", "rows": [{"value": "0.6"}]}')
    assert main(["draw", str(other), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {other} says nothing of ")
    empty = {**ABOUT, "sweep": "window", "settings": SETTINGS, "rows": []}
    with pytest.raises(OptionError, match="measure some first"):
        draw(empty, tmp_path / "a")
    with pytest.raises(OptionError, match="drawn as png and svg"):
        picture_base(tmp_path / "a.pdf")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be drawn"):
        draw({**empty, "rows": WINDOWS}, tmp_path / "file" / "a", formats=("svg",))


@pytest.mark.parametrize("words", [["temperature", "--source", "s", "--text", "t"], ["window", "--shape", "tiny"]])
def test_plots_need_matplotlib_before_anything_is_measured(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*words, "--device", "cpu", "--plot", "t"]) == 2
    assert "offload-runtime[plots]" in capsys.readouterr().err


@pytest.mark.parametrize("path", RESULTS, ids=NAMES)
def test_files_go_on_with_the_command_that_wrote_them(path: Path) -> None:
    """Also those that were written when the front door had another name."""
    report = report_of(path)
    sweep, settings = report["sweep"], report["settings"]
    family = family_of([sweep], FAMILIES)
    words = ["--out", str(path), "--values", ",".join(row["value"] for row in report["rows"])]
    for name, value in settings.items():
        ignored = sweep in family.unused.get(name, ())
        if value not in ("None", "") and not ignored:
            words += [flag(name), *value.split(", ")]
    arguments, before = family.parse([sweep], words), path.read_bytes()
    if "num_layers" in report["rows"][0]:  # the small model is not at hand, and only the layers of its shape are asked
        points = points_among(sweep, arguments, report["rows"][0]["num_layers"])
        family = replace(family, points=lambda *_: points)
    ((file, missing),) = plan(family, [sweep], arguments, {name: report[name] for name in ("machine", "commit")})
    assert not missing and not file.num_outdated and len(file.rows) == len(report["rows"])
    assert path.read_bytes() == before


@pytest.mark.parametrize("path", RESULTS, ids=NAMES)
def test_every_result_has_its_chart(path: Path) -> None:
    """Of the same rows: `python tools/sweep.py draw tools/results/sweep-*.json --out docs/charts --formats svg`."""
    chart, report = CHARTS / f"{path.stem}.svg", report_of(path)
    assert chart.stat().st_size < 100_000
    text = chart.read_text(encoding="utf-8")
    assert f"{report['measured_on']}, commit {report['commit']}:" in text
    for row in report["rows"]:
        if "times_plain" in row:
            assert re.search(rf">{row['times_plain']:.2f}( x)?<", text), row["value"]
        for policy in row.get("policies", {}).values():
            assert f">{policy['agreement']:.0%}<" in text, row["value"]


def test_the_document_shows_every_chart_and_no_other() -> None:
    document = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(charts/([\w.-]+)\.svg\)", document)
    assert sorted(shown) == NAMES == sorted(path.stem for path in CHARTS.glob("sweep-*.svg"))
    linked = re.findall(r"\]\(\.\./tools/results/([\w.-]+)\.json\)", document)
    assert set(NAMES) <= set(linked) and all((ROOT / "tools" / "results" / f"{name}.json").exists() for name in linked)


def documented_commands() -> list[list[str]]:
    """The words of every command of the document, as a shell would hand them on."""
    document = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for name, value in re.findall(r"^    ([A-Z]+)='(.+)'$", document, re.MULTILINE):
        document = document.replace(f"${name}", value)
    return [shlex.split(words) for words in re.findall(r"^    python tools/sweep\.py (.+)$", document, re.MULTILINE)]


def test_the_documented_commands_are_those_of_the_results() -> None:
    """Every command is understood, and rows of the file that it names were measured by it."""
    known, swept, files = {name for family in FAMILIES for name in family.sweeps}, set(), set()
    for words in documented_commands():
        if words[0] == "draw":
            continue
        names = [word for word in words if word in known]
        family = family_of(names, FAMILIES)
        arguments = family.parse(names, words[len(names) :])
        swept |= set(names)
        for name in names:
            path = ROOT / str(arguments.out).format(sweep=name)
            if path.exists():  # a curve is documented before it is measured
                unused = [option for option, sweeps in family.unused.items() if name in sweeps]
                said = sweep_tool.conditions_of(arguments)
                measured = report_of(path)["settings"]
                assert said.keys() == measured.keys()
                assert {key for key in said if said[key] != measured[key]} <= set(unused)
                files.add(path)
    assert swept == known
    assert files == set(RESULTS)
