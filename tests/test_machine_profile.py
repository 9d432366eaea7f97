"""Machine profiles: what a file may say, where they are found, how a machine is measured, the advice that follows, what
`offload-runtime profile` prints of it; and a smaller machine played by this one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import emulated
from typer.testing import Result

from offload_runtime import hardware
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, DeviceError, OptionError, ProfileError, StorageError
from offload_runtime.hardware.bench import HostInfo, NvmlAnswer, PcieLink, measure_decode_gweights_per_s
from offload_runtime.hardware.measure import GpuReport, MachineReport, advise, measure_machine
from tests.test_cli_fakes import invoke

GIB = 1 << 30
DECODED = {"Q4_0", "Q8_0", "Q4_K", "Q6_K", "INT4", "INT8", "FP8", "12-bit BF16"}
SHIPPED = ("h200", "rtx3090", "rtx4090", "rtx4090-x2")


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty configuration directory of the test's own; returns where profiles go in it."""
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))
    return tmp_path / "config" / "profiles"


def card(**changes: Any) -> dict[str, Any]:
    """The tables of a profile of one card, with some keys changed."""
    table = {
        "name": "mine", "source": "a test", "gpus": 1, "gpu_name": "Some GPU", "vram_bytes": 24 * GIB,
        "ram_bytes": 64 * GIB, "link_gbps": 25.0, "hbm_gbps": 1000,
    }  # fmt: skip
    return table | changes


# What a profile may say.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"link_gbs": 3}, "link_gbs is not a key of a profile: did you mean link_gbps? allowed are name, source, gpus"),
        ({"wheels": 4}, "wheels is not a key of a profile: allowed are name, source, gpus"),
        ({"link_gbps": "fast"}, "link_gbps must be of type float | None, not 'fast'"),
        ({"link_gbps": float("nan")}, "link_gbps must be in [1e-06, 1e+06], not nan"),
        ({"vram_bytes": 24.5}, "vram_bytes must be of type int | None, not 24.5"),
        ({"vram_bytes": 10**400}, "vram_bytes must be in [1, 1.1259e+15]"),
        ({"gpu_name": "two\nlines"}, "gpu_name must be one line of 1 to 1000 characters"),
        ({"source": ""}, "source must be one line"),
        ({"tflops": {"int3": 1.0}}, "tflops has the key 'int3', and each must be bf16|fp16|fp32"),
        ({"tflops": {"bf16": -1.0}}, "tflops['bf16'] must be in [1e-06, 1e+06], not -1.0"),
        ({"gpus": 2, "links_at_once_gbps": [25.0, 0]}, "links_at_once_gbps[2] must be in [1e-06, 1e+06], not 0"),
        ({"gpus": 2, "links_at_once_gbps": [25.0] * 3}, "links_at_once_gbps has 3 figures and gpus = 2: give one for"),
        ({"links_at_once_gbps": [25.0]}, "links_at_once_gbps has 1 figures and gpus = 1: give one for each of several"),
        ({"gpus": 0}, "gpus = 0 cannot have gpu_name, vram_bytes, link_gbps, hbm_gbps"),
        ({"vram_bytes": None}, "gpus = 1 needs gpu_name and vram_bytes"),
        ({"vram_reserved_bytes": 25 * GIB}, "vram_reserved_bytes = 26843545600 exceeds vram_bytes"),
        ({"pinnable_bytes": 65 * GIB}, "pinnable_bytes = 69793218560 exceeds ram_bytes"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(changes: dict[str, Any], words: str) -> None:
    hardware.profile_from_mapping(card())
    with pytest.raises(ProfileError) as caught:
        hardware.profile_from_mapping(card(**changes))
    assert words in str(caught.value)


# Where profiles are found.


def test_the_shipped_profiles_are_there_and_plausible() -> None:
    assert tuple(n for n, p in hardware.list_profiles().items() if p.parent == hardware.shipped_directory()) == SHIPPED
    for name in SHIPPED:
        profile = hardware.load_profile(name)
        assert profile.name == name
        assert profile.gpus == (2 if name.endswith("-x2") else 1)
        assert profile.link_gbps and profile.hbm_gbps and profile.vram_bytes and profile.vram_reserved_bytes
        generation = 5 if name == "h200" else 4
        link = PcieLink(generation, 16, generation, 16)
        assert profile.pinnable_bytes and 0.6 * link.peak_gbps < profile.link_gbps < link.peak_gbps
        assert 10 * profile.link_gbps < profile.hbm_gbps < 10_000
        assert 20 * GIB < profile.vram_bytes - profile.vram_reserved_bytes < 200 * GIB
        assert profile.ram_bytes // 2 < profile.pinnable_bytes < profile.ram_bytes
        assert 50 < profile.tflops["bf16"] < 1000
        assert set(profile.decode_gweights_per_s) == DECODED
    assert hardware.load_profile("rtx4090").vram_bytes == 24564 << 20


def test_saved_profiles_are_listed_and_hide_shipped_ones(own: Path) -> None:
    mine = hardware.profile_from_mapping(card(link_gbps=12.5))
    assert hardware.save_profile(mine, "box") == own / "box.toml"
    assert hardware.save_profile(mine, "rtx4090") == own / "rtx4090.toml"
    assert hardware.load_profile("box") == replace(mine, name="box")
    assert hardware.load_profile("rtx4090").link_gbps == 12.5
    assert [(name, path.parent == hardware.shipped_directory()) for name, path in hardware.list_profiles().items()] == [
        ("box", False), ("h200", True), ("rtx3090", True), ("rtx4090", False), ("rtx4090-x2", True),
    ]  # fmt: skip
    hardware.save_profile(replace(mine, link_gbps=13.0), "box")
    assert hardware.load_profile("box").link_gbps == 13.0
    for name in ("h200", "rtx4090-x2"):  # every kind of figure
        hardware.save_profile(hardware.load_profile(name), "copy")
        assert hardware.load_profile("copy") == replace(hardware.load_profile(name), name="copy")
    assert sorted(path.name for path in own.iterdir()) == ["box.toml", "copy.toml", "rtx4090.toml"]


def test_an_unknown_name_gets_the_list_and_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"'rtx4900': did you mean rtx4090\? there are h200, rtx3090, rtx4090, rtx4"):
        hardware.load_profile("rtx4900")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x.toml", "sp ace", "a" * 65, "ä", "a\n"])
def test_names_that_cannot_be_loaded_again_are_refused(name: str, own: Path) -> None:
    with pytest.raises(ProfileError, match="is not a name for a profile"):
        hardware.save_profile(hardware.profile_from_mapping(card()), name)
    assert not own.exists()


@pytest.mark.parametrize(("content", "words"), [
    (b'name = "x"\nlink_gbps = = 3\n', "is not TOML: .*line 2"), (b'name = "\xff"\n', r"is not UTF-8 text \(byte 8\)"),
    (b'name = "x"\nsource = "x"\ngpus = 0\nram_bytes = "64 GB"\n', "ram_bytes must be of type int"),
    (None, "cannot be read: No such file"),
])  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    for given_as in (path, str(path)):
        with pytest.raises(ProfileError, match=f"^{path}.*{words}"):
            hardware.load_profile(given_as)


def test_a_profile_that_cannot_be_written_says_where_and_how_out(own: Path) -> None:
    own.parent.mkdir()
    own.write_text("a file in the way")
    with pytest.raises(StorageError, match=r"box.toml cannot be written .* set OFFLOAD_RUNTIME_CONFIG"):
        hardware.save_profile(hardware.profile_from_mapping(card()), "box")


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
    hardware.save_profile(profile, "cpu-box")
    assert hardware.load_profile("cpu-box") == replace(profile, name="cpu-box")


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
    profile = hardware.MachineProfile("mine", "a test", ram_bytes=host.ram_bytes, **card)
    return MachineReport(profile, host, missing or {}, gpu, 1.0)


def test_a_good_machine_gets_no_advice() -> None:
    assert advise(report()) == []
    assert advise(report(gpus=2, alone=(25.0, 25.1), links_at_once_gbps=(24.0, 23.9))) == []


@pytest.mark.parametrize(("fault", "words"), [
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
])  # fmt: skip
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
    assert set(profile.tflops) == set(hardware.DTYPES)
    assert profile.tflops["bf16"] > profile.tflops["fp32"] > 1
    assert profile.graph_launch_us and 0.1 < profile.graph_launch_us < 100
    assert profile.host_gbps and 0.1 < profile.staging_gbps < profile.host_gbps
    assert not any(getattr(profile, key) for key in of_several)
    if found.gpu.nvml.link is not None:
        assert profile.link_gbps < found.gpu.nvml.link.peak_gbps
    hardware.save_profile(profile, "measured")
    assert hardware.load_profile("measured") == replace(profile, name="measured")


PROFILE = hardware.MachineProfile(
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

    def __call__(self, device: str, *, on_progress: Any, **options: Any) -> MachineReport:
        self.asked.append((device, options))
        on_progress("link", 0, 1)
        print("noise")
        return self.report


@pytest.fixture
def measuring() -> FakeMeasuring:
    return FakeMeasuring()


def profile(measuring: FakeMeasuring, *arguments: str) -> Result:
    stand_in = {"measure_machine": measuring}
    return invoke(["profile", *arguments], stand_in, room=hardware.measure, env={"COLUMNS": "140"})


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
    assert result.stdout.endswith("\n\n" + hardware.profile_toml(PROFILE))


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
    loaded = hardware.load_profile("box")
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
    assert result.stdout.endswith("\n\n" + hardware.profile_toml(PROFILE))
    assert "box.toml cannot be written" in result.stderr


TARGET = "deep_target"  # its keys and values take more memory than a ring for them
MB, NUM_LAYERS = 1_000_000, 10
# Slow enough for a layer of the checkpoint (83 kB) to take far longer than a thread oversleeps.
TOY = hardware.MachineProfile(
    "toy", "made up", 1, 10**9, gpu_name="toy", vram_bytes=400 * MB, vram_reserved_bytes=50 * MB, link_gbps=0.01,
    link_back_gbps=0.005, hbm_gbps=1000.0, tflops={"fp32": 1.0, "bf16": 1.0},
)  # fmt: skip
PROMPT = [7 + index % 200 for index in range(300)]  # more than a block, so that one is written back


def _generate(runtime: Runtime) -> list[int]:
    return runtime.generate(PROMPT, max_new_tokens=4, ignore_eos=True, temperature=0.8, seed=3).tokens


def test_more_than_the_emulated_card_has_is_refused() -> None:
    words = r"--vram 1.0 GB is more than the 400.0 MB of an emulated toy: lower it to 400.0MB, or emulate a larger card"
    with pytest.raises(BudgetError, match=words):
        emulated(TOY, device="cpu", vram="1GB")
    assert emulated(TOY, device="cpu")["vram"] == 350 * MB
    assert emulated(TOY, device="cpu", vram="390MB")["vram"] == 390 * MB  # as others are taken to have less


def test_a_card_that_is_not_smaller_is_refused_with_figures() -> None:
    for changes, words in (
        ({"vram_bytes": 10**15, "vram_reserved_bytes": None}, r"toy cannot .* it has 1000\.0 TB .* cpu has [0-9.]+ GB"),
        ({"link_gbps": 9e5}, r"link carries 9e\+05 GB/s to the device and that of cpu [0-9.e+]+: emulate"),
        ({"link_back_gbps": 9e5}, r"link carries 9e\+05 GB/s back to the host"),
    ):
        with pytest.raises(DeviceError, match=words):
            emulated(replace(TOY, **changes), device="cpu")


@pytest.mark.gpu
def test_the_tokens_of_a_gpu_do_not_change_with_the_pace(target: Path) -> None:
    card = replace(TOY, vram_bytes=4000 * MB)  # 4 ms a layer, of 41 kB
    options: dict[str, Any] = {"dtype": "bf16", "kv": "host", "resident_layers": 0, "draft": "ngram"}
    with Runtime.load(target, device="cuda", **options) as plain:
        expected = _generate(plain)
    with Runtime.load(target, **options, **emulated(card, device="cuda")) as runtime:
        assert _generate(runtime) == expected
        peak = runtime.engine.target.link_peak_gbps
        assert (
            peak is not None and card.link_gbps is not None and peak <= 1.001 * card.link_gbps
        )  # a busy host oversleeps
