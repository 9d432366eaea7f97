"""Sweeps over streamed weights on tiny models: what is streamed, and what bounds it."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sweep import main
from sweeping.streamed_weights import RowMeasurement, Speeds, bound_of, resident_points, window_points
from widening.shapes import shape_named

from tests.helpers.engine import NUM_LAYERS, load, one_thread  # noqa: F401 (an autouse fixture)

TEXT = "the quick brown fox jumps over the lazy dog and the pass streams on. a link, a layer, a slot; "
ON_CPU = ["--device", "cpu", "--dtype", "fp32", "--commit", "abc", "--prompt-tokens", "12"]
SPEEDS = Speeds(memory_gbps=4000.0, flops=8e14, memcpy_gbps=50.0)
# Of shape tiny in fp32: the matrices, and two norms in blocks of 256 bytes.
LAYER_BYTES = 4 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160) + 2 * 256


@pytest.fixture(scope="module")
def models(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Target, draft and text."""
    text = tmp_path_factory.mktemp("text") / "novel.txt"
    text.write_text(TEXT * 5)
    return target, draft, text


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["value"]: row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.slow
def test_windows_of_a_shape(tmp_path: Path) -> None:
    out = tmp_path / "w.json"
    command = ["window", "--shape", "tiny", "--passes", "2", "--resident-layers", "3", "--out", str(out), *ON_CPU]
    assert main([*command, "--values", "1,40"]) == 0
    before = rows_of(out)
    assert main([*command, "--values", "40,2,1"]) == 0
    rows = rows_of(out)
    assert list(rows) == ["1", "2", "40"]
    assert {value: rows[value] for value in before} == before, "measured again"
    for value, row in rows.items():
        assert row["window_tokens"] == int(value) and row["num_layers"] == 8 and row["resident_layers"] == 3
        assert row["bytes_per_pass"] == 5 * LAYER_BYTES
        assert row["tok_per_s"] == pytest.approx(int(value) / row["pass_s"]["median"])
        assert row["bound_s"] * (1 + 1e-9) >= 5 * LAYER_BYTES / (row["link_peak_gbps"] * 1e9)
        assert row["share_of_bound"] == row["bound_s"] / row["pass_s"]["median"]


def test_windows_are_as_wide_as_they_say(models: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are wider than the prompt is long."""
    widths: list[int] = []
    with load(models[0], draft="none", context=64) as runtime:
        runner = runtime.parts.target.runner
        verify = runner.verify

        def noted(windows: Any, *rest: Any) -> torch.Tensor:
            widths.extend(len(window.tokens) for window in windows)
            return verify(windows, *rest)

        monkeypatch.setattr(runner, "verify", noted)
        rows = RowMeasurement(runtime, SPEEDS, resident_layers=NUM_LAYERS, prompt=range(5, 17))
        assert rows.window(30, 1)["window_tokens"] == 30
    assert set(widths) == {30}


@pytest.mark.slow
def test_shares_of_a_checkpoint_with_a_draft(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, draft, text = models
    out = tmp_path / "r.json"
    command = [
        "resident", "--target", str(target), "--source", str(draft), "--text", str(text), "--tokens", "12",
        "--plain-tokens", "5", "--out", str(out), *ON_CPU,
    ]  # fmt: skip
    assert main([*command, "--values", "0.6,0,1"]) == 0
    assert json.loads(out.read_text())["settings"]["target"] == target.name  # not where it lies
    rows = rows_of(out)
    assert {value: row["resident_layers"] for value, row in rows.items()} == {"0": 0, "0.6": 3, "1": NUM_LAYERS}
    streamed = {value: row["bytes_per_pass"] for value, row in rows.items()}
    assert streamed["1"] == 0 and streamed["0.6"] * 5 == streamed["0"] * 2 > 0
    for row in rows.values():
        assert row["identical_to_plain"] and row["compared_tokens"] == 5
        assert row["plain_tokens"] == 5 and row["drafted"]["tokens"] == 12
        assert sum(row["drafted"]["windows"].values()) == row["drafted"]["passes"] and "the draft" in row["loaded"]
        assert row["drafted"]["times_plain"] == row["drafted"]["tok_per_s"] * row["plain_s_per_token"]
    assert rows["1"]["bound_by"] != "link" and rows["1"]["link_peak_gbps"] is None


def test_another_text_than_plain_decoding_fails_the_command(
    models: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whenever it was measured."""
    target, draft, text = models
    out = tmp_path / "r.json"
    options = ["--target", str(target), "--source", str(draft), "--text", str(text), "--out", str(out), *ON_CPU]
    short = ["--tokens", "4", "--plain-tokens", "2"]
    assert main(["resident", "--values", "1", *options, *short]) == 0
    report = json.loads(out.read_text())
    report["rows"][0]["identical_to_plain"] = False
    out.write_text(json.dumps(report))
    assert main(["resident", "--values", "1", *options, *short]) == 1
    assert "1 of 1 rows are there already" in capsys.readouterr().out


def test_the_bound_is_the_longest_of_three() -> None:
    from widening.made import repeated_llama

    config = repeated_llama(shape_named("llama2-7b"), context_tokens=4096).config()
    layer = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096)

    def bound(resident: int, width: float) -> Any:
        link_gbps = None if resident == 32 else 50.0
        return bound_of(
            config, torch.bfloat16, SPEEDS, resident_layers=resident, window_tokens=width, link_gbps=link_gbps
        )

    assert (bound(0, 1).bound_by, bound(0, 1).seconds) == ("link", pytest.approx(32 * layer / 50e9))
    assert bound(24, 1).seconds == pytest.approx(8 * layer / 50e9)  # nothing is added for what stays
    assert bound(32, 1).bound_by == "memory"
    assert bound(32, 1).seconds == pytest.approx((32 * layer + 2 * 32000 * 4096) / 4e12)
    operations = 2 * 1024 * (32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096)
    assert (bound(32, 1024).bound_by, bound(32, 1024).seconds) == ("compute", pytest.approx(operations / 8e14))


def test_speeds_count_bytes_both_ways_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))  # a timing takes a second
    found = Speeds.measured(torch.device("cpu"), torch.float32)
    assert found == Speeds(memory_gbps=pytest.approx(4 * 2 * (64 << 20) / 1e9), flops=2 * 2 * 512**3, memcpy_gbps=None)


def test_shares_and_windows_as_words() -> None:
    points = resident_points(["1", "1/4", "0.5"], num_layers=30)
    assert [(point.label, point.resident_layers) for point in points] == [("1/4", 8), ("0.5", 15), ("1", 30)]
    assert [point.resident_layers for point in resident_points(None, num_layers=32)] == list(range(0, 33, 4))
    assert [point.window_tokens for point in window_points(None, resident_layers=0, num_layers=2)][-1] == 1024
    assert window_points(["1K"], resident_layers=2, num_layers=2)[0].window_tokens == 1024


SHAPE = ["--shape", "tiny"]
SMALL = ["--source", "small"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["window"], "name the model to stream"),
        (["window", *SHAPE, "--target", "t"], "name the model to stream"),
        (["window", "--shape", "llama9"], "shape 'llama9' is not known"),
        (["window", *SHAPE, "--layers", "0"], "layers must be at least 1"),
        (["window", *SHAPE, "--values", "0"], "at least the token that is known"),
        (["window", *SHAPE, "--values", "few"], "'few' is not a number of tokens"),
        (["window", *SHAPE, "--resident-layers", "9"], "from 0 to the 8 layers of the model, not 9"),
        (["window", *SHAPE, "--passes", "0"], "passes must be at least 1"),
        (["window", *SHAPE, "--draft", "none"], "--draft would be ignored by window: drop it; it is used by resident"),
        (
            ["window", *SHAPE, "--starts", "2"],
            "unrecognized arguments: --starts 2; --help lists the options",
        ),
        (["window", *SHAPE, "--pases", "2"], "unrecognized arguments: --pases 2"),
        (["resident", *SHAPE, "--passes", "2"], "--passes would be ignored by resident: drop it; it is used by window"),
        (["resident", *SHAPE, "--values", "1/8,0.13"], "1/8 and 0.13 of 8 layers are both 1"),
        (["resident", *SHAPE, "--values", "9/8"], "from 0 to 1, not 9/8"),
        (["resident", *SHAPE, "--values", "half"], "'half' is no share of the layers"),
        (["resident", *SHAPE, "--noise", "0.1"], "--noise would be ignored without --source"),
        (["resident", *SHAPE, "--tokens", "9"], "--tokens would be ignored without a draft"),
        (["resident", *SHAPE, "--text", "t"], "--text would be ignored without --source"),
        (["resident", *SHAPE, "--draft", "model"], "--draft model needs the small model"),
        (["resident", *SHAPE, *SMALL], "a draft needs a text"),
        (["resident", "--target", "t", "--layers", "2"], "--layers would be ignored with --target"),
        (
            ["resident", "--target", "t", *SMALL, "--draft", "none"],
            "--source would be ignored with --target and",
        ),
        (["window", "temperature", *SHAPE], "window and temperature take different models"),
        (["window", *SHAPE, "--vram", "lots"], "'lots' is not a size"),
        (["window", *SHAPE, "--emulate", "rtx9"], "there is no profile 'rtx9'"),
        (["window", *SHAPE, "--out", "/"], "--out / is a directory"),
        (["window", *SHAPE, "--out", "/proc/x.json"], "/proc/x.json cannot be written"),
        (["window", *SHAPE, "--passes", "few"], "argument --passes: invalid int value"),
        (["resident", *SHAPE, "--temperature", "nan"], "temperature must be 0 (greedy) or a positive number"),
        (["window", "window", *SHAPE], "window is asked for twice"),
        (["windows", *SHAPE], "'windows' is no sweep"),
        (SHAPE, "name a sweep first"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main([*words, "--device", "cpu", "--commit", "abc"]) == 2
    told = capsys.readouterr().err
    assert message in told and "loaded in" not in told


def test_what_does_not_fit_is_said_with_the_way_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = ["resident", *SHAPE, "--vram", "302MB", "--plain-tokens", "2", "--out", str(out), *ON_CPU]
    assert main([*command, "--values", "0,1"]) == 2
    said = capsys.readouterr().err
    assert "1 with 8 resident layers" in said and "--vram" in said and "name other --values" in said
    assert list(rows_of(out)) == ["0"]  # what fits was measured and is kept


def test_a_text_that_cannot_be_read_is_refused_before_anything_is_loaded(
    models: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft, _ = models
    assert (
        main(["resident", "--target", str(target), "--source", str(draft), "--text", "/", "--values", "1", *ON_CPU])
        == 2
    )
    told = capsys.readouterr().err
    assert "/ cannot be read (Is a directory): name another --text" in told and "loaded in" not in told


def test_a_text_shorter_than_the_prompt_is_refused(
    models: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    target, draft, _ = models
    short = tmp_path / "short.txt"
    short.write_text("the")
    options = ["--target", str(target), "--source", str(draft), "--text", str(short), *ON_CPU]
    assert main(["resident", "--values", "1", *options]) == 2
    told = capsys.readouterr().err
    assert "short.txt has 1 tokens and 12 are needed: lower --prompt-tokens" in told and "loaded in" not in told


@pytest.mark.gpu
def test_layers_on_a_gpu_come_from_the_same_pages(tmp_path: Path) -> None:
    out = tmp_path / "{sweep}.json"
    command = ["--shape", "llama2-7b", "--layers", "4", "--prompt-tokens", "64", "--commit", "abc", "--out", str(out)]
    assert main(["window", "resident", *command, "--passes", "8", "--plain-tokens", "24"]) == 2  # eighths of 4 layers
    assert main(["resident", *command, "--values", "0,1/4,1", "--plain-tokens", "24"]) == 0
    assert main(["window", *command, "--values", "1,300", "--passes", "8", "--resident-layers", "1"]) == 0
    layer_bytes = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096)
    rows = rows_of(tmp_path / "resident.json")
    assert [row["bytes_per_pass"] for row in rows.values()] == [4 * layer_bytes, 3 * layer_bytes, 0]
    assert [row["bound_by"] for row in rows.values()] == ["link", "link", "memory"]
    for row in (*rows.values(), *rows_of(tmp_path / "window.json").values()):
        assert 0 < row["share_of_bound"] < 1.1  # up to a ring of layers was there before the first pass
