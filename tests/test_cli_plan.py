"""`offload-runtime plan`: tables, JSON and picture of what fits, and a way out where it does not."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from offload_runtime.hardware import MachineProfile, load_profile, save_profile
from offload_runtime.plan.cost import USUAL_ACCEPTANCE
from offload_runtime.sizes import parse_bytes
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)

CONFIGS = Path(__file__).parent / "data" / "configs"


@pytest.fixture(autouse=True)
def no_profiles_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))


def plan(target: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--target", str(CONFIGS / target), *arguments])


def planned(target: str, *arguments: str) -> dict[str, Any]:
    result = plan(target, "--json", "--profile", "rtx4090", *arguments)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_json_has_the_same_in_bytes_and_seconds() -> None:
    record = planned("llama-2-13b", "--context", "4096")
    memory, layers = record["device_memory"], record["layers"]
    assert record["fits"] and record["profile"] == "rtx4090" and record["context_tokens"] == 4096
    assert sum(part["nbytes"] for part in memory["parts"]) == memory["peak_bytes"] <= memory["limit_bytes"]
    assert sorted(layers["weights_resident"] + layers["weights_streamed"]) == list(range(40))
    assert sorted(layers["kv_resident"] + layers["kv_streamed"]) == list(range(40))
    verify = record["pass"]["verify"]
    assert verify["bound_by"] == "link" and verify["seconds"] == pytest.approx(verify["bytes_streamed"] / 25e9)
    assert [row["acceptance"] for row in record["by_acceptance"]] == [0.7, 0.8, 0.85, 0.9, 0.95, 0.98]
    assert record["usual"]["acceptance"] == USUAL_ACCEPTANCE["n-grams"]
    assert record["upgrades"]
    assert all(gain["after_tok_per_s"] > 1.1 * gain["before_tok_per_s"] for gain in record["upgrades"])


def test_options_reach_the_plan() -> None:
    plain = planned("llama-3.1-8b", "--draft", "none", "--context", "8192", "--resident-layers", "8", "--kv", "gpu")
    assert len(plain["layers"]["weights_resident"]) == 8 and plain["by_acceptance"] == [] and plain["gamma"] == 0
    batch = planned("llama-3.1-8b", "--batch", "3", "--context", "8192", "--gamma", "7", "--vram", "23GB")
    assert (batch["batch"], batch["gamma"], batch["device_memory"]["limit_bytes"]) == (3, 7, 23 * 10**9)
    wide = planned("llama-3.1-8b", "--dtype", "fp32", "--context", "4096")
    assert wide["pass"]["verify"]["bytes_streamed"] > plain["pass"]["verify"]["bytes_streamed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "rtx9999"), "rtx9999"),
        (("--ram", "much"), "--ram 'much' is not a size"),
        (("--ram", "1GB"), "--ram of 1.0 GB is too small"),
        (("--ram", "500GB", "--dtype", "fp32", "--context", "131072", "--batch", "4"), "the 68.7 GB of rtx4090: lower"),
        pytest.param(
            ("--pinned", "1MB", "--vram", "9GB", "--context", "2048"),
            "--pinned page-locks 1.0 MB at most",
            marks=pytest.mark.slow,
        ),
        (("--vram", "90GB"), "more than the 25.8 GB of a card of rtx4090: lower it to 25.7GB"),
        (("--speculation", "triforce"), "does not draft with n-grams"),
        (("--draft", "none", "--gamma", "4"), "--gamma 4 does nothing with --draft none"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    profile = () if "--profile" in arguments else ("--profile", "rtx4090")
    result = plan("llama-3.1-8b", *profile, *arguments)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


@pytest.mark.slow
def test_staging_and_what_it_costs_are_said() -> None:
    arguments = ("llama-3.1-8b", "--profile", "rtx4090", "--vram", "8GB", "--context", "2048", "--pinned", "4GB")
    result = plan(*arguments, "--explain")
    assert result.exit_code == 0, result.stderr
    said = re.search(r"(\d+) of (\d+) streamed layers are staged from pageable memory", result.stdout)
    assert said is not None and 0 < int(said[1]) < int(said[2])
    assert "staging ring" in result.stdout
    record = json.loads(plan(*arguments, "--json").stdout)
    assert len(record["layers"]["weights_staged"]) == int(said[1])
    assert record["host_memory"]["pinned_bytes"] <= 4 * 10**9
    predicted = record["pass"]["plain"]
    assert predicted["bound_by"] == "staging" and predicted["seconds"] == predicted["staging_s"] > predicted["link_s"]


def test_without_a_profile_the_users_own_or_a_common_card() -> None:
    common = plan("llama-3.1-8b", "--context", "4096")
    assert common.stderr == "" and common.stdout.startswith("Fits.")  # the answer comes first
    assert "for NVIDIA GeForce RTX 4090 with 25.8 GB" in common.stdout and "by the profile rtx4090; " in common.stdout
    refused = plan("llama-3.1-70b")
    assert refused.stdout.startswith("Does not fit") and "by the profile rtx4090; " in refused.stdout
    save_profile(load_profile("h200"), "mine")
    own = plan("llama-3.1-8b", "--context", "4096")
    assert "by the profile mine; " in own.stdout and "for NVIDIA H200 with" in own.stdout
    assert "by the profile" not in plan("llama-3.1-8b", "--context", "4096", "--profile", "mine").stdout
    save_profile(MachineProfile("bare", "measured", 0, 10**9), "mine")
    assert "by the profile rtx4090; " in plan("llama-3.1-8b", "--context", "4096").stdout


def test_generate_explains_before_it_loads(target: Path, tmp_path: Path) -> None:
    arguments = ["generate", "--target", str(target), "--prompt", "the quick", "--max-new-tokens", "2"]
    options = ["--device", "cpu", "--context", "256", "--resident-layers", "2", "--draft", "none", "--json"]
    result = CliRunner().invoke(app, [*arguments, *options, "--explain"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"]
    for text in ("weights: 2 of 5 layers on the device (1, 3), 3 streamed (0, 2, 4)", "ring of layers", "workspace"):
        assert text in result.stderr
    assert "\nmemory, in MB" in result.stderr and "device memory" not in result.stderr  # a CPU has only one
    assert result.stderr.index("ring of layers") < result.stderr.index("2 of 5 layers resident")
    assert "ring of layers" not in CliRunner().invoke(app, [*arguments, *options]).stderr
    assert "nothing is predicted: no figures of this machine are known" in result.stderr
    assert "rtx4090" not in result.stderr
    toy = tmp_path / "toy.toml"
    toy.write_text(
        'name = "toy"\nsource = "made up"\ngpus = 1\nram_bytes = 1000000000\ngpu_name = "toy"\n'
        "vram_bytes = 400000000\nlink_gbps = 0.0001\nhbm_gbps = 10.0\ntflops = {fp32 = 0.05}\n"
    )
    known = CliRunner().invoke(app, [*arguments, *options, "--explain", "--profile", str(toy)])
    assert "by the figures of toy:" in known.stderr and "predicted at 256 tokens of context" in known.stderr
    said = re.search(r"pass, 1 token +([0-9]+) .* link *\n", known.stderr)
    streamed = re.search(r"a pass behind 255 tokens streams ([0-9.]+ kB)", known.stderr)
    assert said is not None and streamed is not None
    assert float(said[1]) == pytest.approx(parse_bytes(streamed[1]) / 100, rel=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", "cuda:0,cuda:1,cuda:2"), "--devices names 3 cards and rtx4090-x2 has 2"),
        (("--vram", "20GB,20GB,20GB"), "--vram has 3 sizes and there are 2 cards"),
        (("--device", "cpu"), "nothing predicts how fast a CPU is"),
        (("--vram", "24GB,2GB", "--context", "2048", "--devices", "cuda:0,cuda:1"), "on card 1 of 2.0 GB is too small"),
    ],
)
def test_cards_that_cannot_be_planned_for(options: tuple[str, ...], said: str) -> None:
    result = plan("llama-3.1-70b", *options, "--profile", "rtx4090-x2")
    assert result.exit_code == 2 and said in result.stderr


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    result = plan("llama-2-13b", "--context", "4096", "--profile", "rtx4090", "--plot", str(path))
    drawn = path.read_text()
    assert result.exit_code == 0 and drawn.startswith("<?xml")
    for text in ("resident layers", "workspace", "device memory", "streamed layers"):
        assert f"<!-- {text}" in drawn  # matplotlib writes each label as a comment beside its outlines


def test_a_picture_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--context", "4096", "--profile", "rtx4090", "--plot")
    assert "must end in one of" in plan("llama-3.1-8b", *arguments, str(tmp_path / "plan.doc")).stderr
    nowhere = plan("llama-3.1-8b", *arguments, str(tmp_path / "no" / "plan.png"))
    assert nowhere.exit_code == 2 and "cannot be written (No such file" in nowhere.stderr
    fifo = tmp_path / "fifo.png"
    os.mkfifo(fifo)
    assert "fifo.png is not a regular file" in plan("llama-3.1-8b", *arguments, str(fifo)).stderr
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert "pip install 'offload-runtime[plots]'" in plan("llama-3.1-8b", *arguments, "x.png").stderr
