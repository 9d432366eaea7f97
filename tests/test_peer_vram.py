"""The device memory of peers: the cap is theirs alone, whatever other programs hold."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import PeerOptions
from measurement import RoundClock
from models import free_bytes, open_device

from offload_runtime.config import GB
from offload_runtime.errors import BudgetError, DeviceError
from tests.helpers.peers import peer_options

CUDA = torch.device("cuda", 0)


class Card:
    """A GPU of 24 GB where there is none, of which `used_gb` are in use, `others_gb` of them before CUDA begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used_gb: int, others_gb: int | None) -> None:
        self.used_gb, self._others_gb, self._begun = used_gb, others_gb, False
        self.allocator_share: list[float] = []
        for name, answer in (("is_available", True), ("device_count", 1)):
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        for name in ("set_device", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, self.begin)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: ((24 - self.used_gb) * GB, 24 * GB))
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.allocator_share.append)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self._begun)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1"))
        nvml: dict[str, Any] = {"nvmlInit": self.ask, "nvmlShutdown": lambda: None, "nvmlMemory_v2": 2}
        nvml |= {"nvmlDeviceGetCount": lambda: 1, "nvmlDeviceGetHandleByIndex": lambda index: index}
        nvml["nvmlDeviceGetUUID"] = lambda _: "GPU-1"
        nvml["nvmlDeviceGetMemoryInfo"] = lambda *_: SimpleNamespace(used=(self._others_gb or 0) * GB)
        monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))

    def begin(self, *_: object) -> None:
        """CUDA makes its context."""
        self._begun = True

    def ask(self) -> None:
        """What others hold may not be told at all."""
        if self._others_gb is None:
            raise OSError("no driver")


@pytest.fixture
def options(target: Path) -> PeerOptions:
    """Of a peer that may take 8 GB of the first GPU."""
    made = peer_options(target)
    return replace(made, device=CUDA, vram_bytes=8 * GB)


def test_what_others_hold_does_not_count(monkeypatch: pytest.MonkeyPatch, options: PeerOptions) -> None:
    card = Card(monkeypatch, used_gb=10, others_gb=9)
    opened, context_bytes = open_device(options)
    assert context_bytes == GB and card.allocator_share == [pytest.approx(7 / 24)]
    assert free_bytes(opened) == 7 * GB
    clock = RoundClock(CUDA, sample_memory=True, others_bytes=opened.others_bytes)
    card.used_gb = 13
    for tokens in (torch.ones(1, 5), torch.ones(1)):
        clock.put(tokens.long())
    assert clock.driver_bytes == 4 * GB
    assert free_bytes(opened) == 4 * GB  # 4 of its 8 are taken
    assert free_bytes(replace(opened, vram_bytes=None)) == 11 * GB


def test_no_more_than_the_others_leave(monkeypatch: pytest.MonkeyPatch, options: PeerOptions) -> None:
    card = Card(monkeypatch, used_gb=21, others_gb=20)
    opened, context_bytes = open_device(options)
    assert context_bytes == GB and card.allocator_share == [pytest.approx(3 / 24)]
    assert free_bytes(opened) == 3 * GB
    with pytest.raises(DeviceError, match="cuda:1 is not there: this machine has 1 CUDA devices"):
        open_device(replace(options, device=torch.device("cuda", 1)))


def test_others_that_end_meanwhile_raise_no_cap(monkeypatch: pytest.MonkeyPatch, options: PeerOptions) -> None:
    card = Card(monkeypatch, used_gb=1, others_gb=9)
    assert open_device(options)[1] == 0 and card.allocator_share == [pytest.approx(8 / 24)]


def test_where_others_cannot_be_told_all_counts(monkeypatch: pytest.MonkeyPatch, options: PeerOptions) -> None:
    Card(monkeypatch, used_gb=10, others_gb=None)
    with pytest.raises(BudgetError, match=r"10\.0 GB of VRAM is in use before .* the cap is 8\.0 GB"):
        open_device(options)
