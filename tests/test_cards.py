"""Layers dealt out to several cards, here devices that are named more than once: the same tokens and logits as one
card, and nobody who works for one touches another's tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from offload_runtime.config import RuntimeConfig, SpeculationOptions, format_bytes
from offload_runtime.engine import Runtime
from offload_runtime.engine.load import choose_devices, load_runtime
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.memory import (
    Card,
    HopBuffers,
    hop,
    on_card,
    reaches,
)
from offload_runtime.plan import MachineFigures, RunPlan, find_plan
from offload_runtime.plan.memory import LayerShare, Placement
from offload_runtime.plan.request import MemoryLimits
from offload_runtime.runners import StepGraphs
from tests.helpers.cards import CardWatch
from tests.helpers.engine import PROMPT, one_thread, write_checkpoint, write_noisy_copy  # noqa: F401

TRIFORCE = SpeculationOptions("triforce", budget_tokens=256, chunk_size=8, gamma_draft=4)
# Of five layers, each card's: two in turn, two unequal ones, three, and two in blocks.
DEALS = [(0, 1, 0, 1, 0), (1, 1, 0, 1, 1), (1, 2, 2, 0, 1)]
BLOCKS = (0, 0, 0, 1, 1)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "plain, streamed": {"draft": "none", "resident_layers": 0},
    "n-grams, half streamed": {"resident_layers": 2},
    "n-grams, KV on the host": {"kv": "host", "resident_layers": 2},
    "chain": {"draft": "model", "speculation": SpeculationOptions("chain"), "tree_nodes": 0},
    "tree": {"draft": "model", "tree_nodes": 16, "resident_layers": 1},
    "TriForce": {"draft": "model", "speculation": TRIFORCE},
    "TriForce, KV on the host": {"draft": "model", "speculation": TRIFORCE, "kv": "host"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noisy_copy(target, tmp_path_factory.mktemp("draft") / "noisy")


@pytest.fixture
def watch() -> Iterator[CardWatch]:
    with CardWatch() as watching:
        yield watching


def dealt(
    owners: tuple[int, ...],
    device: str = "cpu",
    *,
    find_plan: Callable[..., RunPlan] = find_plan,
    keeps_kv: bool = True,
) -> Any:
    """As `find_plan` of one card, with its layers dealt out so, and all of a KV cache on the host there without
    `keeps_kv`."""

    def find(request: RuntimeConfig, machine: MachineFigures, limits: MemoryLimits) -> RunPlan:
        plan = find_plan(replace(request, device=device), machine, replace(limits, further_cards=()))
        whole, shares = plan.placement, list[LayerShare]()
        for card in range(max(owners) + 1):
            layers = tuple(layer for layer, owner in enumerate(owners) if owner == card)
            resident, kv = (
                tuple(number for number, layer in enumerate(layers) if layer in kept)
                for kept in (whole.resident_layers, whole.resident_kv_layers if keeps_kv else ())
            )
            slots = min(whole.num_slots, len(layers) - len(resident))
            shares.append(LayerShare(layers, Placement(resident, slots, len(layers), resident_kv_layers=kv)))
        cards = plan.target.with_shares(shares).cards
        slots = [card.overlapped_kv_slots(len(cards)) for card in cards]
        shares = [replace(share, kv_ring_slots=ring) for share, ring in zip(shares, slots, strict=True)]
        return replace(plan, target=plan.target.with_shares(shares), limits=limits, request=request)

    return find


def load(target: Path, owners: tuple[int, ...] = (), **options: Any) -> Runtime:
    """On one card, or with the layers dealt out."""
    cards = max(owners, default=0) + 1
    config = RuntimeConfig(target=target, device=",".join(["cpu"] * cards), **options)
    return Runtime(load_runtime(config, find=dealt(owners)) if owners else load_runtime(config))


def answers(runtime: Runtime) -> list[list[int]]:
    """Of a prompt, greedy and sampled; of a batch, if there is room for one."""
    said = [
        runtime.generate(PROMPT, max_new_tokens=16, ignore_eos=True, temperature=temperature).tokens
        for temperature in (0.0, 0.8)
    ]
    if runtime.plan.request.max_batch > 1:
        prompts = [PROMPT, PROMPT[:20], "a link, a layer"]
        said += [one.tokens for one in runtime.generate_batch(prompts, max_new_tokens=12, temperature=0.7)]
    return said


def test_keys_and_values_of_all_cards_must_fit_the_host(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for those of each card, and not for those of both."""
    tokens = [7] * 300
    with load(target, DEALS[0], draft="none", kv="host") as runtime:
        needed_bytes = runtime.plan.target.host_kv_bytes
        there = psutil.virtual_memory()
        monkeypatch.setattr(psutil, "virtual_memory", lambda: there._replace(available=needed_bytes - 1))
        said = rf"could not grow by {re.escape(format_bytes(needed_bytes))} .*: shorten the prompt"
        with pytest.raises(BudgetError, match=said):
            runtime.generate(tokens, max_new_tokens=2)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: there._replace(available=needed_bytes))
        assert len(runtime.generate(tokens, max_new_tokens=2, ignore_eos=True).tokens) == 2


def test_an_interrupted_turn_leaves_all_cards_alike(target: Path) -> None:
    """Whatever came first on one card is cut off there before the next answer."""
    with load(target, DEALS[0], resident_layers=1) as runtime:
        expected = runtime.generate(PROMPT, max_new_tokens=16, ignore_eos=True).tokens
        caches = [share.cache for share in runtime.parts.target.shares]
        for card in (0, 1):
            commit = caches[card].commit
            caches[card].commit = _interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                runtime.generate(PROMPT, max_new_tokens=16, ignore_eos=True)
            caches[card].commit = commit  # type: ignore[method-assign]
            assert runtime.generate(PROMPT, max_new_tokens=16, ignore_eos=True).tokens == expected


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


# --- hops, and the watch itself


@pytest.mark.parametrize(
    ("device", "message"),
    [("cpu,", "empty name"), ("cpu,cuda", "mixes cpu and cuda"), ("auto,cpu", "auto among others")],
)
def test_names_that_are_no_cards_are_refused(target: Path, device: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Runtime.load(target, device=device)


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
        chosen = choose_devices(RuntimeConfig("model", device=device), None)
        assert len(chosen) == {"auto": 2}.get(device, device.count(",") + 1)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
        assert not warned or caplog.messages[0].startswith("RTX 3090 and RTX 4090: GPUs of different kinds round")


# --- GPUs


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft whose heads GPU kernels take."""
    directory = tmp_path_factory.mktemp("wide")
    target = write_checkpoint(directory / "target", hidden_size=512, context=2048)
    return target, write_noisy_copy(target, directory / "draft")


@pytest.mark.gpu
@pytest.mark.parametrize("peers", [True, False])
def test_a_step_over_two_gpus_is_a_graph(peers: bool) -> None:
    """Peer copies and kernels that go through page-locked memory alike, in order with what runs around its replays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here")
    one, other = (Card(number, torch.device("cuda", number)) for number in range(2))
    if peers and not reaches(one.device, other.device):
        pytest.skip("these GPUs do not reach each other")
    graphs, buffers = StepGraphs(one.device, [other.device]), HopBuffers(peers=peers)
    here = torch.zeros(1 << 20, dtype=torch.int64, device=one.device)
    there = torch.zeros(1 << 20, dtype=torch.int64, device=other.device)

    def step() -> None:
        (moved,) = hop([here], one, other, buffers)
        with on_card(other):
            there.mul_(3).add_(moved)
            doubled = there * 2
        (back,) = hop([doubled], other, one, buffers)
        here.copy_(back + 1)

    expected_here = expected_there = 0
    for number in range(6):
        with on_card(other):
            there.add_(number)  # before the step, and after the one before
        graphs.run("step", step)
        expected_there = 3 * (expected_there + number) + expected_here
        expected_here = 2 * expected_there + 1
        here.add_(1)
        expected_here += 1
    assert graphs.num_graphs == 1
    assert bool((here == expected_here).all()) and bool((there == expected_there).all())


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0,cuda:0", "cuda:0,cuda:1"])
@pytest.mark.parametrize(
    ("way", "owners"), [*((way, DEALS[0]) for way in WAYS), ("plain", BLOCKS), ("TriForce", BLOCKS)]
)
def test_gpus_say_what_one_says(wide: tuple[Path, Path], way: str, owners: tuple[int, ...], device: str) -> None:
    """One that is named twice, and two of a kind."""
    if device.endswith("1") and torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here")
    target, draft = wide
    options = {name: draft if value == "model" else value for name, value in WAYS[way].items()}
    options |= {"target": target, "dtype": "bf16", "vram_bytes": 4_000_000_000}
    with Runtime(load_runtime(RuntimeConfig(device="cuda:0", **options))) as runtime:
        expected = answers(runtime)
    with Runtime(load_runtime(RuntimeConfig(device=device, **options), find=dealt(owners, "cuda"))) as runtime:
        assert answers(runtime) == expected
