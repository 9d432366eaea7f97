"""The bench of trees: what acceptance predicts, and a whole run with small models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import bench_trees
import pytest

from offload_runtime.hardware import MachineProfile, profile_toml
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)

# A link so slow that room for large trees pays as soon as anything is streamed.
SLOW_LINK = MachineProfile(
    "slow", "made up", 1, 10**9, gpu_name="none", vram_bytes=10**9, link_gbps=0.001, link_back_gbps=0.001,
    hbm_gbps=100.0, tflops={"fp32": 1.0},
)  # fmt: skip


@pytest.mark.slow
def test_a_whole_run(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "slow.toml"
    profile.write_text(profile_toml(SLOW_LINK))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and the quick brown fox sleeps " * 3)
    out = tmp_path / "trees.json"
    code = bench_trees.main([
        "--source", str(target), "--text", str(text), "--code", str(text), "--shape", "none", "--noises", "0.05",
        "--temperatures", "0.6", "--sizes", "1,6", "--nodes", "4,8,999", "--depth", "5", "--gammas", "3",
        "--device", "cpu", "--prompt-tokens", "20", "--tokens", "16", "--size-tokens", "16", "--context", "96",
        "--dtype", "fp32", "--resident-layers", "1", "--profile", str(profile), "--out", str(out),
    ])  # fmt: skip
    assert code == 0
    report, printed = json.loads(out.read_text()), capsys.readouterr()
    assert "incomplete" not in report and report == json.loads(printed.out.splitlines()[-1])
    assert "tree 999 is left out: tree_nodes 999 exceeds" in printed.err
    assert [row["how"] for row in report["streamed"]] == ["plain", "auto", "chain 3", "tree 4", "tree 8"] * 2
    assert all(row["bytes_per_pass"] > 0 and row["link_idle_share"] is not None for row in report["streamed"])
    proposed = [row for row in report["streamed"] if row["how"] != "plain"]
    assert all(row["identical"] for row in (*proposed, *report["sizes"]))
    assert [row["identical_tokens"] for row in proposed] == [8, 16, 16, 16] * 2
    for prompt, ratio in zip(("prose", "code"), report["auto"], strict=True):
        speeds = {row["how"]: row["tok_per_s"] for row in report["streamed"] if row["prompt"] == prompt}
        fixed = {how: speeds[how] for how in ("chain 3", "tree 4", "tree 8")}
        assert ratio["prompt"] == prompt and ratio["fixed"] == list(fixed)
        assert ratio["ratio"] == speeds["auto"] / max(fixed.values()) == speeds["auto"] / speeds[ratio["best"]]
    assert [row["nodes"] for row in report["sizes"]] == [1, 6] * 2
    assert all(1 <= row["predicted_tokens_per_pass"] <= 1 + min(5, row["nodes"]) for row in report["sizes"])
    assert all(0.5 < sum(row["hits_by_rank"]) <= 1 for row in report["sizes"])


def test_rows_are_in_the_file_as_soon_as_they_are_measured(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops the bench then, and the file says that it was stopped."""
    out = tmp_path / "trees.json"
    row = {
        "noise": 0.05, "temperature": 0.0, "prompt": "prose", "how": "plain", "tokens_per_pass": 1.0, "tok_per_s": 1.0,
        "s_per_pass": 1.0,
    }  # fmt: skip

    def measure(*_: object) -> Iterator[dict[str, object]]:
        for number in range(2):
            yield row | {"number": number}
            found = json.loads(out.read_text())
            assert [one["number"] for one in found["streamed"]] == [*range(number + 1)] and found["incomplete"]
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    for name in ("t", "c"):
        Path(name).write_text("a")
    given = ["--source", str(target), "--text", "t", "--code", "c", "--device", "cpu", "--commit", "abc"]
    with pytest.raises(KeyboardInterrupt):
        bench_trees.main([*given, "--out", str(out)], measures={"streamed": measure})
    found = json.loads(out.read_text())
    assert found["streamed"] == [row | {"number": number} for number in range(2)] and found["sizes"] == []
    assert found["incomplete"] is True and found["commit"] == "abc" and found["settings"]["text"] == "t"
    assert {path.name for path in tmp_path.iterdir()} == {"t", "c", "trees.json"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--source", "absent"], "absent does not exist"),
        (["--text", "absent"], "absent cannot be read (No such file or directory): name another --text"),
        (["--code", "."], ". cannot be read (Is a directory): name another --code"),
        (["--code", "bytes"], "bytes is not UTF-8 text (byte 0xff at offset 1)"),
        (["--text", "empty"], "empty is empty: name a text to begin with by --text"),
        (["--parts", "foo"], "--parts 'foo' is not measured here: take streamed,sizes"),
        (["--sizes", ""], "--sizes is empty"),
        (["--sizes", "4,0"], "--sizes must be at least 1, not 0"),
        (["--nodes", "-1"], "--nodes must be at least 1, not -1"),
        (["--nodes", "x"], "argument --nodes"),
        (["--noises", "0.1,-1"], "--noises must be 0 or positive numbers, not -1.0"),
        (["--noises", "nan"], "--noises must be 0 or positive numbers, not nan"),
        (["--temperatures", "0,-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--tokens", "0"], "--tokens must be at least 1, not 0"),
        (["--plain-tokens", "0"], "--plain-tokens must be at least 1"),
        (["--gammas", "0"], "--gammas must be at least 1"),
        (["--prompt-tokens", "-2"], "--prompt-tokens must be at least 1"),
        (["--vram", "x"], "'x' is not a size"),
        (["--emulate", "foo"], "there is no profile 'foo'"),
        (["--shape", "foo"], "shape 'foo' is not known"),
        (["--dtype", "fp64"], "argument --dtype"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--out", "."], "--out . is a directory"),
        (["--out", "empty/c.json"], "empty/c.json cannot be written"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("text", b"a"), ("empty", b""), ("bytes", b"a\xff")):
        (tmp_path / name).write_bytes(content)
    given = ["--source", "absent", "--text", "text", "--code", "text", "--device", "cpu", *words]
    assert bench_trees.main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and told in line
    assert {path.name for path in tmp_path.iterdir()} == {"text", "empty", "bytes"}
