"""A smaller machine played by this one: its memory is the limit, its link the pace, its tokens the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulation import emulated

from offload_runtime.cache import HostKVCache, block_bytes
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, DeviceError
from offload_runtime.hardware import MachineProfile, save_profile
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)

TARGET = "deep_target"  # its keys and values take more memory than a ring for them
MB, NUM_LAYERS = 1_000_000, 10
# Slow enough for a layer of the checkpoint (83 kB) to take far longer than a thread oversleeps.
TOY = MachineProfile(
    "toy", "made up", 1, 10**9, gpu_name="toy", vram_bytes=400 * MB, vram_reserved_bytes=50 * MB, link_gbps=0.01,
    link_back_gbps=0.005, hbm_gbps=1000.0, tflops={"fp32": 1.0, "bf16": 1.0},
)  # fmt: skip
PROMPT = [7 + index % 200 for index in range(300)]  # more than a block, so that one is written back


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))


def _generate(runtime: Runtime) -> list[int]:
    return runtime.generate(PROMPT, max_new_tokens=4, ignore_eos=True, temperature=0.8, seed=3).tokens


@pytest.mark.slow
def test_an_emulated_run_is_slower_says_so_and_has_the_same_tokens(target: Path) -> None:
    with load(target, kv="host", resident_layers=0, draft="none") as plain:
        expected = _generate(plain)
        needed_bytes = plain.plan.device_bytes  # without a limit all keys and values stay on the host
    save_profile(replace(TOY, vram_bytes=needed_bytes + 100_000, vram_reserved_bytes=None), "toy")
    options: dict[str, Any] = {"kv": "host", "resident_layers": 0, "draft": "none"}
    with Runtime.load(target, **options, **emulated("toy", device="cpu")) as runtime:
        assert runtime.plan.resident_kv_layers == ()
        assert runtime.plan.limits.device_bytes == needed_bytes + 100_000
        result = runtime.generate(PROMPT, max_new_tokens=4, ignore_eos=True, temperature=0.8, seed=3)
        cache = runtime.engine.target.runner.cache
        assert isinstance(cache, HostKVCache)
        cache.writes.drain()
        (written,) = cache.writes.engines
        assert written.bytes_copied == NUM_LAYERS * block_bytes(runtime.config, runtime.dtype, 0)
        # A copy may make good what the one before it overslept: 5 of 10 ms at the most.
        assert written.copy_seconds() >= written.bytes_copied / 0.005e9 - 0.005 * NUM_LAYERS
    assert result.tokens == expected
    peak = result.stats.link_peak_gbps
    assert peak is not None and 0 < peak <= 0.02  # of such a copy


def test_more_than_the_emulated_card_has_is_refused() -> None:
    words = (
        r"--vram 1\.0 GB is more than the 400\.0 MB of an emulated toy: lower it to 400\.0MB, or emulate a larger card"
    )
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
