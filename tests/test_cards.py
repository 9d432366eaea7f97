"""Layers dealt out to several cards, so that no card's copies take longest and each card fits; and a card that several
runtimes share, whose allocator is held to what those allow that are open."""

import ctypes
import gc
import json
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.engine.load import choose_devices
from offload_runtime.errors import BudgetError, ContextLengthError, DeviceError, OffloadError, OptionError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.plan.report import Refusal, forecast, plan_or_refuse
from offload_runtime.plan.search import plan_run
from offload_runtime.plan.sizes import RunPlan
from offload_runtime.runners.graphs import StepGraphs
from offload_runtime.sizes import GB, format_bytes, parse_bytes
from offload_runtime.stream.device import Card, DeviceBudget, TransferBuffers, current_device, reaches, transfer
from offload_runtime.weights.checkpoint import DescribedModel
from offload_runtime.weights.sources import describe_model
from tests.helpers.engine import PROMPT, refuse_weights
from tests.helpers.planning import CONFIGS, machines, plan_or_none, requests
from tests.test_planning import check_limits

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


def test_gpus_of_other_kinds_are_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kinds = ["RTX 4090", "RTX 3090", "RTX 4090"]
    for name, answer in (("is_available", lambda: True), ("device_count", lambda: 3)):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: kinds[getattr(device, "index", device)])
    for device, warns in (("cuda:0,cuda:1,cuda:2", True), ("cuda:0,cuda:2", False), ("auto", False), ("cuda:1", False)):
        caplog.clear()
        chosen = choose_devices(RuntimeConfig("model", device=device))
        assert len(chosen) == {"auto": 2}.get(device, device.count(",") + 1)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * warns
        assert not warns or caplog.messages[0].startswith("RTX 3090 and RTX 4090: GPUs of different kinds round")


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
def test_two_gpus_say_the_same(wide_target: Path, noisy_copy_of: Callable[[Path], Path], mode: str, kv: str) -> None:
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
        with Runtime.load(wide_target, **options | {"device": device, "resident_layers": stay, "vram": vram}) as loaded:
            results = loaded.generate_batch([PROMPT, PROMPT[:20], [7] * 700], **asked)
            answers.append([result.tokens for result in results])
    assert all(answer == answers[0] for answer in answers)


ONE = replace(load_profile("rtx4090"), ram_bytes=400 * GB, pinnable_bytes=None)
TWO = replace(ONE, gpus=2)


def model(name: str) -> DescribedModel:
    return describe_model(CONFIGS / name)


def plan_on_all(request: RuntimeConfig, machine: MachineProfile) -> RunPlan:
    return plan_run(naming_all(request, machine), machine)


def naming_all(request: RuntimeConfig, machine: MachineProfile) -> RuntimeConfig:
    """The same, of all cards of a machine."""
    return replace(request, device=",".join(f"cuda:{card}" for card in range(machine.gpus)))


def counts(plan: RunPlan) -> list[int]:
    return [len(one.layers) for one in plan.target.placements]


def streamed(plan: RunPlan) -> list[int]:
    return [card.streamed_bytes for card in plan.cards]


@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_equal_cards_share_layers_and_bytes_alike(kv: str) -> None:
    request = RuntimeConfig(model("llama-2-7b"), "none", context=4096, kv=kv, resident_layers=0)
    plan = plan_on_all(request, TWO)
    assert counts(plan) == [16, 16]
    assert plan.target.placements[0].layers == tuple(range(0, 32, 2))  # in turn
    assert plan.target.placements[1].layers == tuple(range(1, 32, 2))
    first, second = streamed(plan)
    assert first == second == plan_on_all(request, ONE).streamed_bytes / 2
    assert plan.placement.resident_layers == () and plan.placement.num_buffers == 6


def test_a_card_that_is_too_small_is_named() -> None:
    request = RuntimeConfig(model("llama-2-13b"), "none", context=2048, vram=(20 * GB, GB))
    with pytest.raises(BudgetError, match=r"device memory on card 1 of 1\.0 GB is too small by") as refused:
        plan_on_all(request, TWO)
    named = re.search(r": ([0-9.]+ GB) is the least", str(refused.value))
    assert named is not None
    enough = replace(request, vram=(20 * GB, parse_bytes(named[1])))
    assert plan_on_all(enough, TWO).num_cards == 2
    outcome = plan_or_refuse(naming_all(request, TWO), TWO)
    assert isinstance(outcome, Refusal)
    assert any("of VRAM" in change.what for change in outcome.changes)
    with pytest.raises(BudgetError, match="on card 0"):
        plan_on_all(replace(request, vram=(GB, 20 * GB)), TWO)


def test_layers_are_dealt_in_turn_where_blocks_of_them_do_not_fit() -> None:
    """The first half of the layers keeps all keys and values, the second a window's: blocks of them are unequal."""
    fields = json.loads((CONFIGS / "qwen2.5-0.5b" / "config.json").read_text())
    fields |= {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 12}
    target = DescribedModel(model_config_from_json(fields, "windows"), torch.bfloat16)
    request = RuntimeConfig(target, "none", context=32768, kv="gpu", max_batch=16)
    plan = plan_on_all(request, replace(TWO, vram_bytes=5 * GB, vram_others_bytes=None))
    assert all(card.limits.device_bytes and card.device_bytes <= card.limits.device_bytes for card in plan.cards)
    assert plan.target.placements[0].layers == tuple(range(0, 24, 2))


@given(requests(), machines(), st.integers(2, 4))
def test_cards_fit_and_every_byte_counts_once(request: RuntimeConfig, machine: MachineProfile, cards: int) -> None:
    several = replace(machine, gpus=cards)
    plan = plan_or_none(naming_all(request, several), several)
    if plan is None:
        return
    assert plan.num_cards == cards
    dealt = sorted(layer for one in plan.target.placements for layer in one.layers)
    assert dealt == list(range(len(plan.placement.layers)))
    check_limits(plan, machine)
    assert plan.device_bytes == sum(card.device_bytes for card in plan.cards)
    assert plan.streamed_bytes == sum(card.streamed_bytes for card in plan.cards)
    host = Counter[str]()
    for card in plan.cards:
        host.update(card.host)
    host["Python and libraries"] //= cards  # once for all
    host["rows between cards"] = plan.transfer_bytes  # none of a card alone
    assert host == plan.host
    assert request.pinned is None or plan.pinned_bytes <= request.pinned
    predicted = forecast(plan, several)
    assert predicted.plain.bytes_streamed == plan.streamed_bytes
    planned_bytes = plan.streamed_bytes - predicted.plain.expert_bytes  # what nothing has to choose first
    assert 0 < predicted.plain.lookahead_s <= predicted.plain.copies_s or not planned_bytes


@given(requests(), machines())
def test_a_second_card_never_refuses(request: RuntimeConfig, machine: MachineProfile) -> None:
    """What fits one card fits two, but for what a second ring takes of page-locked memory."""
    request = replace(request, pinned=None, speculation=SpeculationOptions(request.speculation.mode))
    machine = replace(machine, pinnable_bytes=None)
    if plan_or_none(request, machine) is None or request.target.config().num_layers < 2:
        return
    try:
        plan_on_all(request, replace(machine, gpus=2))
    except OffloadError as error:
        pytest.fail(str(error))


CARD = torch.device("cuda", 0)
CONTEXT_GB = 0.8  # of our own: what is in use, and modules that will be loaded


class SharedCard:
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


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SharedCard:
    gc.collect()  # budgets that nobody has any more
    return SharedCard(monkeypatch)


def test_a_second_runtime_has_what_the_first_leaves(card: SharedCard) -> None:
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


def test_a_model_that_does_not_fit_beside_another_says_so(card: SharedCard, target: Path) -> None:
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


def test_a_refusal_names_who_holds_the_card(card: SharedCard, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [types.SimpleNamespace(pid=pid, usedGpuMemory=gb * GB) for pid, gb in ((77, 3), (os.getpid(), 1), (88, 19))]
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
def test_a_refused_load_leaves_no_cap(card: SharedCard, target: Path, refusal: str) -> None:
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
def test_retrieval_needs_cards_that_read_arenas(target: Path, monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
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
