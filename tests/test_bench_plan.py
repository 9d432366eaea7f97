"""The benchmarks of plans and of emulation, on a tiny shape without a GPU: what they measure is what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_emulation
import bench_plan
import pytest

from offload_runtime.hardware import MachineProfile, profile_toml
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)

TOY = MachineProfile(
    "toy", "made up", 1, 10**9, gpu_name="toy", vram_bytes=400_000_000, link_gbps=0.5, link_back_gbps=0.25,
    hbm_gbps=10.0, tflops={"fp32": 0.05},
)  # fmt: skip


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profiles") / "toy.toml"
    path.write_text(profile_toml(TOY))
    return str(path)


@pytest.fixture(scope="module")
def report(toy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("out") / "plan.json"
    common = ["--device", "cpu", "--shape", "tiny", "--profile", toy, "--emulate", toy, "--passes", "1"]
    # This machine is not the profile's: passes are off, and that is no error of the benchmark.
    assert bench_plan.main([*common, "--windows", "1", "--out", str(out), "--commit", "abc"]) in (0, 1)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_every_setting_is_run_plain_and_emulated(report: dict[str, Any]) -> None:
    cases = [(row["setting"], row["emulated"]) for row in report["rows"]]
    names = ["weights streamed", "half the weights streamed", "KV streamed", "both streamed"]
    assert cases == [(name, emulated) for name in names for emulated in (None, "toy")]
    assert report["commit"] == "abc" and report["configuration"]["emulate"] == "toy"


@pytest.mark.slow
def test_what_a_setting_streams_is_what_its_name_says(report: dict[str, Any]) -> None:
    rows = {row["setting"]: row for row in report["rows"] if row["emulated"]}
    layer, context = 4 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 160 + 2 * 64), 4096
    keys_and_values = 8 * 2 * 32 * 4 * (context - 256)  # all blocks but the open one
    assert rows["weights streamed"]["measured_bytes"] == 8 * layer
    assert rows["half the weights streamed"]["measured_bytes"] == 4 * layer
    assert rows["KV streamed"]["measured_bytes"] == keys_and_values
    assert rows["both streamed"]["measured_bytes"] == keys_and_values + 8 * layer
    for row in report["rows"]:
        assert row["measured_bytes"] == row["predicted_bytes"]
        assert row["measured_s"]["median"] > 0 and row["predicted_s"] > 0
        assert 0.9 * row["limit_bytes"] < row["peak_bytes"] <= row["limit_bytes"]


def test_every_broken_promise_is_named() -> None:
    row = {
        "setting": "s", "window_tokens": 1, "emulated": None, "share_off": 0.1, "measured_bytes": 5,
        "predicted_bytes": 5, "used_share": 0.9,
    }  # fmt: skip
    assert bench_plan.failures([row]) == []
    for changes, words in (
        ({"share_off": -0.11}, "off by -11.0%"),
        ({"predicted_bytes": 6}, "5 bytes and not 6"),
        ({"used_share": 0.89}, "89.0% of the memory"),
        ({"used_share": 1.01}, "101.0% of the memory"),
    ):
        (found,) = bench_plan.failures([row, {**row, **changes}])
        assert words in found


def test_the_paced_link_is_measured_both_ways(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--emulate", toy, "--sizes", "0.5", "2", "--repeats", "1"]
    assert bench_emulation.main([*arguments, "--out", str(tmp_path / "emulation.json")]) == 0
    found = json.loads((tmp_path / "emulation.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    cases = [(row["direction"], row["copy_mib"], row["profile_gbps"]) for row in found["rows"]]
    assert cases == [
        ("to the device", 0.5, 0.5), ("to the device", 2, 0.5), ("back", 0.5, 0.25), ("back", 2, 0.25),
    ]  # fmt: skip
    for row in found["rows"]:  # never faster than the profile, but for 5 ms of 100
        assert row["share_off"] == row["gbps"]["median"] / row["profile_gbps"] - 1 < 0.06
    assert (found["emulated"], found["holds"], found["products"]) == ("toy", True, None)


def test_an_unknown_card_is_reported_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_emulation.main(["--device", "cpu", "--emulate", "no-such-card"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no profile 'no-such-card'")
