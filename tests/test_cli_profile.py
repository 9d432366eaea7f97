"""`offload-runtime profile`: options, table, TOML, JSON, saving, and what may go wrong, without measuring."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload_runtime.errors import DeviceError
from offload_runtime.hardware import MachineProfile, load_profile, measure, profile_toml
from offload_runtime.hardware.bench import HostInfo, NvmlAnswer, PcieLink
from offload_runtime.hardware.measure import GpuReport, MachineReport
from tests.test_cli_fakes import app_of

PROFILE = MachineProfile(
    "this-machine", "a test", 2, 64 * 10**9, gpu_name="Some GPU", vram_bytes=24 * 10**9, link_gbps=6.4, hbm_gbps=1008.0,
    graph_launch_us=1.25, pinnable_bytes=32 * 10**9, host_gbps=60.0, staging_gbps=17.5, tflops={"bf16": 165.2},
    decode_gweights_per_s={"Q4_K": 3470.0, "Q6_K": 2960.0}, links_at_once_gbps=(6.0, 5.5), transfer_us=31.0,
)  # fmt: skip
LINK = PcieLink(generation=4, width=4, generation_max=4, width_max=16)
REPORT = MachineReport(
    PROFILE, HostInfo("Some CPU", 16, 64 * 10**9, 48 * 10**9, None, wsl=True),
    {"link_back_gbps": "refused", "transfer_gbps": "refused"},
    GpuReport(("Some GPU", "Some GPU"), (8, 9), 23 * 10**9, NvmlAnswer("580.1", LINK, ""), (6.4, 6.3), True), 61.25,
)  # fmt: skip


class FakeMeasuring:
    """Stands for `measure_machine`: prints to stdout as a library might, and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.report = REPORT
        self.error: Exception | None = None

    def __call__(self, device: str, *, on_progress: Any, **options: Any) -> MachineReport:
        self.asked.append((device, options))
        on_progress("link", 0, 1)
        print("noise")
        if self.error is not None:
            raise self.error
        return self.report


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMeasuring:
    fake = FakeMeasuring()
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))
    return fake


def profile(measuring: FakeMeasuring, *arguments: str) -> Result:
    app = app_of(SimpleNamespace(measure_machine=measuring), measure)
    return CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "140"})


def test_table_reasons_advice_and_toml_are_printed(measuring: FakeMeasuring) -> None:
    result = profile(measuring)
    assert result.exit_code == 0, result.stderr
    assert measuring.asked == [("auto", {"quick": False, "full": False})]
    for words in (
        "measured in 61 s", "2 x Some GPU", "24.0 GB, 23.0 GB free",
        "generation 4 x4 while busy (at most generation 4 x16)", "6.4 of 7.9 GB/s", "1008 GB/s", "bf16 165 TFLOP/s",
        "Q4_K 3470 · Q6_K 2960 Gweights/s", "1.2 us", "can be pinned", "32.0 GB", "card 0 6.4 · card 1 6.3 GB/s",
        "11.5 GB/s, 1.80 x one", "31.0 us, many at not measured, peer to peer", "Some CPU, 16 logical cores",
        "60.0 GB/s", "17.5 GB/s", "not measured: link_back_gbps, transfer_gbps (refused)",
        "what matters:", "  - the card runs at x4 and could do x16: move it to another slot",
        "  - this is Linux under Windows (WSL2)",
    ):  # fmt: skip
        assert words in result.stdout
    assert result.stdout.endswith("\n\n" + profile_toml(PROFILE))


def test_options_reach_the_measurement(measuring: FakeMeasuring) -> None:
    assert profile(measuring, "--device", "cuda:0,cuda:1", "--quick", "--full").exit_code == 0
    assert measuring.asked == [("cuda:0,cuda:1", {"quick": True, "full": True})]
    refused = profile(measuring, "--device", "cuda:0,tpu")
    assert refused.exit_code == 2 and "'tpu' is not a device" in refused.stderr and len(measuring.asked) == 1


def test_saving_says_where_and_can_be_loaded(measuring: FakeMeasuring, tmp_path: Path) -> None:
    result = profile(measuring, "--save", "box")
    assert result.exit_code == 0
    assert result.stdout.endswith(f"\nsaved to {tmp_path / 'config/profiles/box.toml'}\n")
    assert "[tflops]" not in result.stdout
    loaded = load_profile("box")
    assert (loaded.name, loaded.tflops) == ("box", PROFILE.tflops)


def test_json_is_one_object_and_nothing_else(measuring: FakeMeasuring, tmp_path: Path) -> None:
    record = json.loads(profile(measuring, "--json", "--save", "box").stdout)
    assert record["profile"]["decode_gweights_per_s"] == {"Q4_K": 3470.0, "Q6_K": 2960.0}
    assert record["missing"] == dict(REPORT.missing)
    assert "runs at x4" in record["matters"][0]
    assert record["gpu"]["nvml"]["link"] == {"generation": 4, "width": 4, "generation_max": 4, "width_max": 16}
    assert record["host"]["wsl"] is True
    assert record["saved"] == str(tmp_path / "config/profiles/box.toml")
    assert json.loads(profile(measuring, "--json").stdout)["saved"] is None


def test_a_bad_name_is_refused_before_a_minute_of_measuring(measuring: FakeMeasuring) -> None:
    result = profile(measuring, "--save", "a/b")
    assert (result.exit_code, result.stdout, measuring.asked) == (2, "", [])
    assert "error: 'a/b' is not a name for a profile" in result.stderr


def test_what_was_measured_is_not_lost_when_it_cannot_be_saved(measuring: FakeMeasuring, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file in the way")
    result = profile(measuring, "--save", "box")
    assert result.exit_code == 2
    assert result.stdout.endswith("\n\n" + profile_toml(PROFILE))
    assert "box.toml cannot be written" in result.stderr


def test_typed_errors_end_the_command_in_one_line(measuring: FakeMeasuring) -> None:
    measuring.error = DeviceError("there is no cuda:7")
    result = profile(measuring, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == "error: there is no cuda:7"
