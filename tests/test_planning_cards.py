"""Plans of several cards: layers are dealt out so that no card's copies take longest, and each card fits."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import BudgetError, OffloadError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.plan import Refusal, RunPlan, forecast, plan_or_refuse, plan_run
from offload_runtime.sizes import GB, parse_bytes
from offload_runtime.weights import DescribedModel, describe_model
from tests.helpers.planning import CONFIGS, machines, plan_or_none, requests

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
    assert any("of VRAM" in way.what for way in outcome.changes)
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
    for card in plan.cards:
        assert card.limits.device_bytes is not None
        assert card.device_bytes <= card.limits.device_bytes <= machine.vram_bytes
    assert plan.device_bytes == sum(card.device_bytes for card in plan.cards)
    assert plan.streamed_bytes == sum(card.streamed_bytes for card in plan.cards)
    host = Counter[str]()
    for card in plan.cards:
        host.update(card.host)
    host["Python and libraries"] //= cards  # once for all
    host["rows between cards"] = plan.transfer_bytes  # none of a card alone
    assert host == plan.host
    assert plan.host_bytes <= machine.ram_bytes
    assert machine.pinnable_bytes is None or plan.pinned_bytes <= machine.pinnable_bytes
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
