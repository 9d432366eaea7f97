"""The bench of the controller: a whole run with small models, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_controller
import pytest

from offload_runtime.hardware import MachineProfile, profile_toml
from tests.helpers.engine import one_thread, write_checkpoint  # noqa: F401 (one_thread is an autouse fixture)

# A link so slow that room for large trees pays as soon as anything is streamed.
SLOW_LINK = MachineProfile(
    "slow", "made up", 1, 10**9, gpu_name="none", vram_bytes=10**9, link_gbps=0.001, link_back_gbps=0.001,
    hbm_gbps=100.0, tflops={"fp32": 1.0},
)  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog and the quick brown fox sleeps " * 3


def run(folder: Path, *words: str) -> dict[str, Any]:
    """A bench of two prompts in `folder`, with a target whose layers but for one are streamed."""
    model = write_checkpoint(folder / "model")
    for name in ("prose", "code"):
        (folder / f"{name}.txt").write_text(f"{name} {TEXT}")
    code = bench_controller.main([
        "--source", str(model), "--prompt-file", str(folder / "prose.txt"), "--prompt-file", str(folder / "code.txt"),
        "--shape", "none", "--device", "cpu", "--dtype", "fp32", "--resident-layers", "1", "--context", "384",
        "--prompt-tokens", "20", "--tokens", "16", "--plain-tokens", "8", "--out", str(folder / "out.json"), *words,
    ])  # fmt: skip
    assert code == 0
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return report


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "slow.toml"
    profile.write_text(profile_toml(SLOW_LINK))
    report = run(
        tmp_path, "--noises", "0.02,1", "--gammas", "3,5", "--nodes", "8,32", "--repeats", "3",
        "--profile", str(profile), "--commit", "abc",
    )  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert report == json.loads(printed[-1]) and "incomplete" not in report
    assert report["commit"] == "abc" and report["settings"]["prompt_file"] == ["prose.txt", "code.txt"]
    names = ["controller", "chain 3", "chain 5", "tree 8", "tree 32", "plain"]
    cases = [(noise, prompt) for noise in (0.02, 1.0) for prompt in ("prose", "code")]
    found = [(row["noise"], row["prompt"], row["window"]) for row in report["rows"]]
    assert found == [(*case, name) for case in cases for name in names]
    for row in report["rows"]:
        assert row["identical"] and len(row["tok_per_s_of_answers"]) == 3
        assert row["tok_per_s_p20"] <= row["tok_per_s"] <= row["tok_per_s_p80"]
        assert row["tokens"] == (8 if row["window"] == "plain" else 16)
        if row["window"] != "controller":
            assert set(row["windows"]) <= {row["window"], "plain"}  # where a single token is left
    for (noise, prompt), ratio in zip(cases, report["ratios"], strict=True):
        speeds = {
            row["window"]: row["tok_per_s"]
            for row in report["rows"]
            if (row["noise"], row["prompt"]) == (noise, prompt)
        }
        chosen = speeds.pop("controller")
        assert (ratio["noise"], ratio["prompt"], ratio["fixed"]) == (noise, prompt, names[1:])
        assert ratio["best_tok_per_s"] == speeds[ratio["best"]] == max(speeds.values())
        assert ratio["ratio"] == pytest.approx(chosen / max(speeds.values()))


def test_windows_without_room_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tmp_path, "--noises", "0.02", "--gammas", "4", "--nodes", "4000")
    assert [row["window"] for row in report["rows"]] == ["controller", "chain 4", "plain"] * 2
    assert "tree 4000 is left out: tree_nodes 4000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--source", "absent"], "absent does not exist"),
        (["--prompt-file", "absent"], "absent cannot be read"),
        (["--prompt-file", "text"], "two --prompt-file have the same name"),
        (["--prompt-file", "empty"], "empty is empty"),
        (["--gammas", "", "--nodes", ""], "--gammas and --nodes are both empty"),
        (["--gammas", "0"], "--gammas must be at least 1, not 0"),
        (["--nodes", "-1"], "--nodes must be at least 1, not -1"),
        (["--noises", "nan"], "--noises must be 0 or positive numbers, not nan"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--plain-tokens", "1"], "--tokens and --plain-tokens must be at least 2"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--profile", "foo"], "there is no profile 'foo'"),
        (["--shape", "foo"], "shape 'foo' is not known"),
        (["--out", "."], "--out . is a directory"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("text", "a"), ("empty", "")):
        (tmp_path / name).write_text(content)
    given = ["--source", "absent", "--prompt-file", "text", "--device", "cpu", *words]
    assert bench_controller.main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and told in line
    assert {path.name for path in tmp_path.iterdir()} == {"text", "empty"}
