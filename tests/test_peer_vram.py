"""The device memory of peers: the cap is theirs alone, whatever other programs hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import common
import pytest
import torch
from common import PeerOptions
from measurement import RoundClock
from vram import free_bytes, open_device

from offload_runtime.config import GB
from offload_runtime.errors import BudgetError, DeviceError
from tests.helpers.engine import write_checkpoint
from tests.helpers.peers import peer_options

CUDA = torch.device("cuda", 0)


class Card:
    """A GPU of 24 GB where there is none, of which `used_gb` are in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used_gb: int) -> None:
        self.used_gb = used_gb
        self.allocator_share: list[float] = []
        for name, answer in (("is_available", True), ("device_count", 1), ("set_device", None), ("synchronize", None)):
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: ((24 - self.used_gb) * GB, 24 * GB))
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.allocator_share.append)


@pytest.fixture
def options(tmp_path: Path) -> PeerOptions:
    """Of a peer that may take 8 GB of the first GPU."""
    made = peer_options(write_checkpoint(tmp_path / "small"))
    return replace(made, device=CUDA, vram_bytes=8 * GB)


def test_what_others_hold_does_not_count(monkeypatch: pytest.MonkeyPatch, options: PeerOptions) -> None:
    card = Card(monkeypatch, used_gb=10)
    beside = replace(options, others_bytes=9 * GB)
    assert open_device(beside) == GB and card.allocator_share == [pytest.approx(7 / 24)]
    assert free_bytes(beside) == 7 * GB
    clock = RoundClock(CUDA, sample_memory=True, others_bytes=9 * GB)
    card.used_gb = 13
    for tokens in (torch.ones(1, 5), torch.ones(1)):
        clock.put(tokens.long())
    assert clock.driver_bytes == 4 * GB
    assert free_bytes(beside) == 4 * GB  # 4 of its 8 are taken
    assert free_bytes(replace(beside, vram_bytes=None)) == 11 * GB
    with pytest.raises(BudgetError, match=r"10\.0 GB of VRAM is in use before .* the cap is 8\.0 GB"):
        card.used_gb = 10
        open_device(options)


def test_no_more_than_the_others_leave(monkeypatch: pytest.MonkeyPatch, options: PeerOptions) -> None:
    card = Card(monkeypatch, used_gb=21)
    crowded = replace(options, others_bytes=20 * GB)
    assert open_device(crowded) == GB and card.allocator_share == [pytest.approx(3 / 24)]
    assert free_bytes(crowded) == 3 * GB
    with pytest.raises(DeviceError, match="cuda:1 is not there: this machine has 1 CUDA devices"):
        open_device(replace(crowded, device=torch.device("cuda", 1)))


def test_others_are_measured_before_anything_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small")
    asked = ["--target", str(small), "--prompt-tokens", "4"]

    def others(*more: str) -> int:
        arguments = common.peer_parser("").parse_args([*asked, *more])
        return common.options_from(arguments).others_bytes

    Card(monkeypatch, used_gb=0)
    monkeypatch.setattr(common, "device_memory_used_by_others", lambda index: (index + 3) * GB)
    assert others("--device", "cuda:0") == 3 * GB
    assert others("--device", "cuda:1") == 0  # which is not there, as `open_device` says
    assert others("--device", "cpu") == 0
    monkeypatch.setattr(common, "device_memory_used_by_others", lambda index: None)
    assert others("--device", "cuda") == 0
