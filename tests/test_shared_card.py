"""A card that several runtimes share: torch's allocator is held to what those allow that are open, and to nothing
behind the last of them, loads that were refused included. And a card whose kernels cannot read what is page-locked."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, ContextLengthError, DeviceError, OptionError
from offload_runtime.sizes import GB
from offload_runtime.stream import DeviceBudget
from tests.helpers.engine import refuse_weights

CARD = torch.device("cuda", 0)
CONTEXT_GB = 0.8  # of our own: what is in use, and modules that will be loaded


class Card:
    """A GPU of 24 GB where there is none, on which this process has made a context of 0.6 GB."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held_gb = 0.0  # by torch's allocator
        self.others_gb = 0.0
        self.share, self.num_caps = 1.0, 0  # that it may hold at most, and how often that was said
        answers: dict[str, Any] = {"is_available": True, "device_count": 1, "current_device": 0}
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        for name in ("empty_cache", "synchronize"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        patch.setattr(torch.cuda, "device", nullcontext)
        facts = type("Facts", (), {"uuid": "1", "name": "Card", "total_memory": 24 * GB, "major": 8, "minor": 9})
        for name, answer in (("get_device_properties", facts), ("get_device_name", "Card")):
            patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        patch.setattr(torch, "zeros", lambda *_, device: None)
        patch.setattr(
            torch.cuda, "mem_get_info", lambda *_: (round((23.4 - self.held_gb - self.others_gb) * GB), 24 * GB)
        )
        patch.setattr(torch.cuda, "memory_reserved", lambda *_: round(self.held_gb * GB))
        patch.setattr(torch.cuda, "set_per_process_memory_fraction", self.cap)

    def cap(self, share: float, device: torch.device) -> None:
        assert device == CARD
        self.share, self.num_caps = share, self.num_caps + 1

    @property
    def capped_gb(self) -> float:
        return round(24 * self.share, 6)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    gc.collect()  # budgets that nobody has any more
    return Card(monkeypatch)


def test_a_second_runtime_has_what_the_first_leaves(card: Card) -> None:
    first = DeviceBudget(CARD, 20 * GB)
    first.reserve("weights", 4 * GB)
    second = DeviceBudget(CARD, None)
    assert second.limit_bytes == 20 * GB
    first.planned_bytes = round((11 + CONTEXT_GB) * GB)  # it still reads its weights
    with pytest.raises(BudgetError, match=r"14\.0 GB is more than the 13\.0 GB .*\(open runtimes claim 11\.0 GB\)"):
        DeviceBudget(CARD, 14 * GB)
    second.reserve("weights", 13 * GB)
    assert DeviceBudget(CARD, None).limit_bytes == 0
    for budget in (first, second):
        budget.release()
    assert DeviceBudget(CARD, None).limit_bytes == 24 * GB


def test_a_model_that_does_not_fit_beside_another_says_so(card: Card, target: Path) -> None:
    first = DeviceBudget(CARD, None)
    first.reserve("weights", round(23.1 * GB))
    with pytest.raises(BudgetError, match=r"\(open runtimes claim 23\.1 GB\) of 900\.0 MB is too small by") as refused:
        Runtime.load(target, device="cuda")
    assert "close one of these: a runtime of this process (all claim 23.1 GB)" in " ".join(str(refused.value).split())
    first.release()
    again = DeviceBudget(CARD, GB)
    with pytest.raises(BudgetError, match=r"needs 2\.0 GB of device memory but 200\.0 MB of .* left: raise --vram"):
        again.reserve("weights", 2 * GB)
    again.release()


def test_a_refusal_names_who_holds_the_card(card: Card, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [
        types.SimpleNamespace(pid=pid, usedGpuMemory=size * GB) for pid, size in ((77, 3), (os.getpid(), 1), (88, 19))
    ]
    answers: dict[str, Any] = {
        "Init": None, "DeviceGetHandleByUUID": None, "DeviceGetComputeRunningProcesses": held,
        "DeviceGetGraphicsRunningProcesses": [], "SystemGetProcessName": "/usr/bin/game",
    }  # fmt: skip
    driver = {f"nvml{name}": lambda *_, answer=answer: answer for name, answer in answers.items()}
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(**driver, NVMLError=RuntimeError))
    card.others_gb = 23.2
    named = r"close one of these: pid 88, game, 19\.0 GB; pid 77, game, 3\.0 GB"
    with pytest.raises(BudgetError, match=r"(?s)is too small by .*\. What would do: .*" + named):
        Runtime.load(target, device="cuda")
    with pytest.raises(BudgetError, match=r"(?s)lower it to .*, or " + named):
        Runtime.load(target, device="cuda", vram="20GB")
    with pytest.raises(BudgetError, match=r"What would do: with [0-9.]+ GB of VRAM") as refused:
        Runtime.load(target, device="cuda", vram="1MB")
    assert "close one" not in str(refused.value)  # there is more that it may take


def refuse(_: object) -> None:
    """As a callback of loading."""
    raise OptionError("not this one")


REFUSALS = {
    "by the plan": ({"context": 10**9}, (ContextLengthError, BudgetError)),
    "by who asked": ({"on_plan": refuse}, OptionError),
}


@pytest.mark.parametrize("refusal", list(REFUSALS))
def test_a_refused_load_leaves_no_cap(card: Card, target: Path, refusal: str) -> None:
    options, error = REFUSALS[refusal]
    with pytest.raises(error):
        Runtime.load(target, device="cuda", vram=8 * GB, **options)
    assert card.share == 1.0 and card.num_caps == 2


class Driver:
    """CUDA's driver, which says of the card that kernels can use host pointers, that they cannot, or nothing."""

    def __init__(self, answer: int, code: int = 0) -> None:
        self._answer, self._code = answer, code

    def cuDeviceGetAttribute(self, answer: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (91, 0)
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = self._answer
        return self._code


@pytest.mark.gpu
@pytest.mark.parametrize("readable", [True, False])
def test_retrieval_needs_a_card_that_reads_arenas(
    target: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    options: dict[str, Any] = {"device": "cuda", "kv": "host", "draft": "none", "context": 512}
    options["speculation"] = SpeculationOptions("triforce", budget_tokens=256)
    if not readable:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(0))
        with pytest.raises(DeviceError, match="cannot read page-locked host memory"):
            Runtime.load(target, on_progress=refuse_weights, **options)
        return
    with Runtime.load(target, **options) as runtime:
        assert runtime.generate([5] * 400, max_new_tokens=4, ignore_eos=True).stats.new_tokens == 4


@pytest.mark.gpu
@pytest.mark.alone
def test_closing_one_runtime_leaves_the_cap_of_the_other(target: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "vram": 3 * GB, "resident_layers": "auto"}
    device = torch.device("cuda", 0)
    with Runtime.load(target, **options):
        Runtime.load(target, **options).close()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * GB, dtype=torch.uint8, device=device)
        with pytest.raises(BudgetError):
            Runtime.load(target, **{**options, "vram": 1 << 50})
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * GB, dtype=torch.uint8, device=device)
    assert torch.empty(4 * GB, dtype=torch.uint8, device=device).nbytes == 4 * GB
