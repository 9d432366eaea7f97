"""Measuring a machine: the host, the GPU, the reasons for what cannot be had, and the advice that follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.errors import DeviceError, OptionError
from offload_runtime.hardware import DTYPES, MachineProfile, bench, load_profile, save_profile
from offload_runtime.hardware.bench import HostInfo, NvmlAnswer, PcieLink, measure_decode_gweights_per_s
from offload_runtime.hardware.measure import GpuReport, MachineReport, advise, measure_machine

GIB = 1 << 30


@pytest.fixture(autouse=True)
def own_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty configuration directory of the test's own."""
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))


# The host as the system tells it.


HOST = HostInfo("Some CPU", 16, 64 * GIB, 48 * GIB, 8 << 20, wsl=False)


# Measuring.


@pytest.mark.slow
def test_measuring_without_a_gpu_gives_the_host_and_reasons_for_the_rest() -> None:
    steps: list[tuple[str, int, int]] = []
    report = measure_machine("cpu", quick=True, on_progress=lambda *step: steps.append(step))
    profile = report.profile
    assert report.gpu is None
    assert profile.gpus == 0
    assert profile.host_gbps is not None
    assert 0.1 < profile.host_gbps < 10_000
    assert steps == [(stage, done, 1) for stage in ("host memory",) for done in (0, 1)]
    for key in ("link_gbps", "hbm_gbps", "tflops", "pinnable_bytes"):
        assert report.missing[key] == "--device cpu leaves the GPU out"
    assert "torch" in profile.source
    assert any("no GPU was measured" in line for line in advise(report))
    save_profile(profile, "cpu-box")
    assert load_profile("cpu-box") == replace(profile, name="cpu-box")


def test_links_are_measured_side_by_side() -> None:
    benches = [bench.LinkBench(torch.device("cpu"), back=back) for back in (False, True)]
    rates_gbps = bench.measure_links_gbps(benches, bench.spent(0.1))
    assert len(rates_gbps) == 2 and all(0.01 < gbps < 1000 for gbps in rates_gbps)
    for one in benches:
        one.engine.close()


# Several cards.


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(OptionError, match="'tpu' is not a device"):
        measure_machine(device="tpu")
    with pytest.raises(OptionError, match="--device cpu,cpu names a device twice: name each once"):
        measure_machine(device="cpu,cpu")
    with pytest.raises(DeviceError, match="cuda:99 cannot be measured"):
        measure_machine(device="cuda:99")
    with pytest.raises(OptionError, match="--full tries how much memory can be page-locked, which needs a GPU"):
        measure_machine(device="cpu", full=True)


# NVML and advice.


GOOD_LINK = PcieLink(4, 16, 4, 16)


def report(
    *, link: PcieLink | None = GOOD_LINK, host: HostInfo = HOST, missing: dict[str, str] | None = None,
    names: tuple[str, ...] = ("Some GPU",), capability: tuple[int, int] = (8, 0), free_bytes: int = 23 * GIB,
    alone: tuple[float, ...] = (), **figures: Any,
) -> MachineReport:  # fmt: skip
    """A measured machine without a fault, but for what is given."""
    nvml = NvmlAnswer("580.1", link, "" if link else "NVML is not available: no library")
    gpu = GpuReport(names, capability, free_bytes, nvml, alone)
    card = {"gpus": 1, "gpu_name": "Some GPU", "vram_bytes": 24 * GIB, "link_gbps": 25.0, **figures}
    profile = MachineProfile("mine", "a test", ram_bytes=host.ram_bytes, **card)
    return MachineReport(profile, host, missing or {}, gpu, 1.0)


def test_a_good_machine_gets_no_advice() -> None:
    assert advise(report()) == []
    assert advise(report(gpus=2, alone=(25.0, 25.1), links_at_once_gbps=(24.0, 23.9))) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"link": PcieLink(4, 4, 4, 16), "link_gbps": 6.4}, "runs at x4 and could do x16: move it to another slot"),
        ({"link": PcieLink(3, 16, 4, 16), "link_gbps": 12.5}, "PCIe 3 while it copies and could do PCIe 4"),
        ({"link_gbps": 11.0}, "reach 11.0 of the link's 31.5 GB/s"),
        (
            {"gpus": 2, "alone": (25.0, 25.0), "links_at_once_gbps": (13.0, 13.1)},
            "carry 50.0 GB/s one by one and 26.1 at once: they share lanes, a chipset's link or slow host memory",
        ),
        (
            {"gpus": 2, "alone": (25.0, 6.4), "links_at_once_gbps": (25.0, 6.4)},
            "the links of the cards carry 25.0 and 6.4 GB/s: a card with a slow one gets fewer layers to stream",
        ),
        ({"link": None}, "cannot be told: NVML is not available: no library"),
        ({"free_bytes": 20 * GIB}, "4.3 GB of 25.8 GB VRAM was taken before"),
        ({"capability": (7, 5)}, "(compute capability 7.5) has no bf16 matrix units: use --dtype fp16"),
        ({"names": ("Some GPU", "Old GPU")}, "not part of this profile: Old GPU"),
        ({"missing": {"pinnable_bytes": "refused: raise the limit"}}, "refused: raise the limit"),
        ({"pinnable_bytes": 8 << 20}, "refuses to lock more than 8.4 MB: raise the limit (ulimit -l)"),
        ({"host": replace(HOST, wsl=True)}, "WSL2), which locks about half of the 68.7 GB"),
        ({"host": replace(HOST, available_bytes=5 * GIB)}, "only 5.4 GB of 68.7 GB RAM is free"),
        ({"host": replace(HOST, huge_pages=False)}, "huge pages are off, without which memory"),
    ],
)
def test_each_fault_gets_its_own_line(fault: dict[str, Any], words: str) -> None:
    (line,) = advise(report(**fault))
    assert words in line


@pytest.mark.gpu
@pytest.mark.alone
def test_blocks_are_decoded_at_plausible_rates() -> None:
    found = measure_decode_gweights_per_s(torch.device("cuda"), budget_s=0.2)
    assert set(found) == {"Q4_0", "Q8_0", "Q4_K", "Q6_K", "INT4", "INT8", "FP8", "12-bit BF16"}
    assert all(100 < gweights_per_s < 20_000 for gweights_per_s in found.values()), found
    assert max(found.values()) < 4 * min(found.values())


@pytest.mark.gpu
@pytest.mark.alone
def test_measuring_two_cards_gives_plausible_figures() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    found = measure_machine("cuda:0,cuda:1", quick=True)
    gpu, profile = found.gpu, found.profile
    assert gpu is not None and profile.gpus == 2 and not {"transfer_us", "links_at_once_gbps"} & {*found.missing}
    assert profile.link_gbps is not None and profile.transfer_us is not None and profile.transfer_gbps is not None
    assert all(0.8 * profile.link_gbps < gbps < 1.2 * profile.link_gbps for gbps in gpu.links_alone_gbps)
    assert 0 < sum(profile.links_at_once_gbps) < 1.1 * sum(gpu.links_alone_gbps)
    assert 0.5 < profile.transfer_us < 1000 and 1 < profile.transfer_gbps < 10_000


@pytest.mark.gpu
@pytest.mark.alone
def test_measuring_a_gpu_gives_plausible_figures() -> None:
    found = measure_machine(device="cuda:0", quick=True)
    profile = found.profile
    of_several = {"links_at_once_gbps", "transfer_us", "transfer_gbps"}
    assert {*found.missing} == {"decode_gweights_per_s"}, found.missing  # left out of what is quick
    assert found.gpu is not None
    assert profile.gpu_name == torch.cuda.get_device_name(0)
    assert profile.vram_bytes and profile.vram_reserved_bytes and profile.pinnable_bytes
    assert 0 < profile.vram_reserved_bytes < profile.vram_bytes
    assert 0 < found.gpu.free_bytes < profile.vram_bytes
    assert profile.link_gbps and profile.link_back_gbps and profile.hbm_gbps and profile.staging_gbps
    assert 1 < profile.link_gbps < 1000 and 1 < profile.link_back_gbps < 1000
    assert 2 * profile.link_gbps < profile.hbm_gbps < 20_000
    assert set(profile.tflops) == set(DTYPES)
    assert profile.tflops["bf16"] > profile.tflops["fp32"] > 1
    assert profile.graph_launch_us and 0.1 < profile.graph_launch_us < 100
    assert profile.host_gbps and 0.1 < profile.staging_gbps < profile.host_gbps
    assert not any(getattr(profile, key) for key in of_several)
    if found.gpu.nvml.link is not None:
        assert profile.link_gbps < found.gpu.nvml.link.peak_gbps
    save_profile(profile, "measured")
    assert load_profile("measured") == replace(profile, name="measured")
