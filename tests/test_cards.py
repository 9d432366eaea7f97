"""Layers dealt out to several cards: what is refused, what is warned of, and what only two GPUs can show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.engine.load import choose_devices
from offload_runtime.errors import BudgetError
from offload_runtime.runners import StepGraphs
from offload_runtime.sizes import format_bytes
from offload_runtime.stream import Card, TransferBuffers, current_device, reaches, transfer
from tests.helpers.engine import PROMPT, one_thread  # noqa: F401 (an autouse fixture)

SPECULATION: dict[str, SpeculationOptions] = {
    "none": SpeculationOptions("none"),
    "chain": SpeculationOptions("chain"),
    "triforce": SpeculationOptions("triforce", budget_tokens=256, chunk_size=8, gamma_draft=4),
}


def test_keys_and_values_of_all_cards_must_fit_the_host(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for those of each card, and not for those of both."""
    tokens = [7] * 300
    with Runtime.load(target, device="cpu,cpu", draft="none", kv="host") as runtime:
        needed_bytes = runtime.plan.target.host_kv_bytes
        there = psutil.virtual_memory()
        monkeypatch.setattr(psutil, "virtual_memory", lambda: there._replace(available=needed_bytes - 1))
        said = rf"could not grow by {re.escape(format_bytes(needed_bytes))} .*: shorten the prompt"
        with pytest.raises(BudgetError, match=said):
            runtime.generate(tokens, max_new_tokens=2)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: there._replace(available=needed_bytes))
        assert len(runtime.generate(tokens, max_new_tokens=2, ignore_eos=True).tokens) == 2


def test_gpus_of_different_kinds_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ["RTX 4090", "RTX 3090", "RTX 4090"]
    for name, answer in (("is_available", lambda: True), ("device_count", lambda: 3)):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: kinds[getattr(device, "index", device)])
    for device, warned in (
        ("cuda:0,cuda:1,cuda:2", True),
        ("cuda:0,cuda:2", False),
        ("auto", False),
        ("cuda:1", False),
    ):
        caplog.clear()
        chosen = choose_devices(RuntimeConfig("model", device=device))
        assert len(chosen) == {"auto": 2}.get(device, device.count(",") + 1)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
        assert not warned or caplog.messages[0].startswith("RTX 3090 and RTX 4090: GPUs of different kinds round")


@pytest.mark.gpu
@pytest.mark.parametrize("peers", [True, False])
def test_a_step_over_two_gpus_is_a_graph(peers: bool) -> None:
    """Peer copies and kernels that go through page-locked memory alike, in order with what runs around its replays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here")
    one, other = (Card(number, torch.device("cuda", number)) for number in range(2))
    if peers and not reaches(one.device, other.device):
        pytest.skip("these GPUs do not reach each other")
    graphs, buffers = StepGraphs(one.device, [other.device]), TransferBuffers(peers=peers)
    here = torch.zeros(1 << 20, dtype=torch.int64, device=one.device)
    there = torch.zeros(1 << 20, dtype=torch.int64, device=other.device)

    def step() -> None:
        (moved,) = transfer([here], one, other, buffers)
        with current_device(other.device):
            there.mul_(3).add_(moved)
            doubled = there * 2
        (back,) = transfer([doubled], other, one, buffers)
        here.copy_(back + 1)

    expected_here = expected_there = 0
    for number in range(6):
        with current_device(other.device):
            there.add_(number)  # before the step, and after the one before
        graphs.run("step", step)
        expected_there = 3 * (expected_there + number) + expected_here
        expected_here = 2 * expected_there + 1
        here.add_(1)
        expected_here += 1
    assert graphs.num_graphs == 1
    assert bool((here == expected_here).all()) and bool((there == expected_there).all())


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("mode", SPECULATION)
def test_two_gpus_say_what_one_says(
    wide_target: Path, noisy_copy_of: Callable[[Path], Path], mode: str, kv: str
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here")
    options: dict[str, Any] = {"draft": "none" if mode == "none" else noisy_copy_of(wide_target), "kv": kv}
    options |= {"dtype": "bf16", "context": 2048, "max_batch": 3, "speculation": SPECULATION[mode]}
    asked: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.8}
    answers = []
    for device, stay in (("cuda:0", "auto"), ("cuda:0,cuda:1", "auto"), ("cuda:0,cuda:1", 0)):
        if mode == "triforce" and stay == 0:
            continue  # it needs all layers on the devices
        vram = ",".join(["4GB"] * len(device.split(",")))
        options |= {"device": device, "resident_layers": stay, "vram": vram}
        with Runtime.load(
            wide_target, **options | {"device": device, "resident_layers": stay, "vram": vram}
        ) as runtime:
            results = runtime.generate_batch([PROMPT, PROMPT[:20], [7] * 700], **asked)
            answers.append([result.tokens for result in results])
    assert all(answer == answers[0] for answer in answers)
