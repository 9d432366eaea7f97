"""Machine profiles: what a file may say, and where profiles are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.errors import ProfileError, StorageError
from offload_runtime.hardware import list_profiles, load_profile, profile_from_mapping, save_profile, shipped_directory
from offload_runtime.hardware.bench import PcieLink

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
    profile_from_mapping(card())
    with pytest.raises(ProfileError) as caught:
        profile_from_mapping(card(**changes))
    assert words in str(caught.value)


def test_a_profile_of_an_earlier_version_is_read_without_what_no_plan_reads_any_more() -> None:
    former = {"disk_gbps": 4.3, "pcie_width": 16, "cpu": {"name": "x", "cores": 4}, "link_by_copy_mib": {"1": 49.1}}
    assert profile_from_mapping(card(**former)) == profile_from_mapping(card())


# Where profiles are found.


def test_the_shipped_profiles_are_there_and_plausible() -> None:
    assert tuple(name for name, path in list_profiles().items() if path.parent == shipped_directory()) == SHIPPED
    for name in SHIPPED:
        profile = load_profile(name)
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
    assert load_profile("rtx4090").vram_bytes == 24564 << 20


def test_saved_profiles_are_listed_and_hide_shipped_ones(own: Path) -> None:
    mine = profile_from_mapping(card(link_gbps=12.5))
    assert save_profile(mine, "box") == own / "box.toml"
    assert save_profile(mine, "rtx4090") == own / "rtx4090.toml"
    assert load_profile("box") == replace(mine, name="box")
    assert load_profile("rtx4090").link_gbps == 12.5
    assert [(name, path.parent == shipped_directory()) for name, path in list_profiles().items()] == [
        ("box", False), ("h200", True), ("rtx3090", True), ("rtx4090", False), ("rtx4090-x2", True),
    ]  # fmt: skip
    save_profile(replace(mine, link_gbps=13.0), "box")
    assert load_profile("box").link_gbps == 13.0
    for name in ("h200", "rtx4090-x2"):  # every kind of figure
        save_profile(load_profile(name), "copy")
        assert load_profile("copy") == replace(load_profile(name), name="copy")
    assert sorted(path.name for path in own.iterdir()) == ["box.toml", "copy.toml", "rtx4090.toml"]


def test_an_unknown_name_gets_the_list_and_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"'rtx4900': did you mean rtx4090\? there are h200, rtx3090, rtx4090, rtx4"):
        load_profile("rtx4900")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x.toml", "sp ace", "a" * 65, "ä", "a\n"])
def test_names_that_cannot_be_loaded_again_are_refused(name: str, own: Path) -> None:
    with pytest.raises(ProfileError, match="is not a name for a profile"):
        save_profile(profile_from_mapping(card()), name)
    assert not own.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'name = "x"\nlink_gbps = = 3\n', "is not TOML: .*line 2"),
        (b'name = "\xff"\n', r"is not UTF-8 text \(byte 8\)"),
        (b'name = "x"\nsource = "x"\ngpus = 0\nram_bytes = "64 GB"\n', "ram_bytes must be of type int"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    for given_as in (path, str(path)):
        with pytest.raises(ProfileError, match=f"^{path}.*{words}"):
            load_profile(given_as)


def test_a_profile_that_cannot_be_written_says_where_and_how_out(own: Path) -> None:
    own.parent.mkdir()
    own.write_text("a file in the way")
    with pytest.raises(StorageError, match=r"box.toml cannot be written .* set OFFLOAD_RUNTIME_CONFIG"):
        save_profile(profile_from_mapping(card()), "box")
