"""Layers that differ in how they are stored, and so in size: same bits, wherever they are and however they come."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import GB, ModelConfig, RuntimeConfig
from offload_runtime.copy import CopyQueues, make_copy_engine
from offload_runtime.engine.load_model import OpenCard, load_model
from offload_runtime.errors import BudgetError
from offload_runtime.memory import PAGE_BYTES, Card, DeviceBudget
from offload_runtime.model import Window
from offload_runtime.plan import MachineFigures, RunPlan, plan_run
from offload_runtime.plan.cost import pass_time
from offload_runtime.plan.placement import place_layers
from offload_runtime.plan.staging import place_staged
from offload_runtime.weights import CheckpointSource, DescribedModel, ModelLayout, layer_layout, load_weights
from offload_runtime.weights.encoding import Encoding, Fill, Weight
from offload_runtime.weights.layout import shared_layout
from offload_runtime.weights.staging import Staging
from tests.helpers.assembly import in_memory, make_runner
from tests.helpers.models import load_plain, random_model, random_tokens
from tests.helpers.planning import PROPERTY

MACHINE = MachineFigures("some", 200 * GB, GB, 25.0, 1000.0, 900 * GB, {"bf16": 165.0, "fp32": 80.0})
CPU = torch.device("cpu")


@dataclass(frozen=True)
class UpperHalves(Encoding):
    """Of float32 elements the upper 16 bits, which are bf16: half the bytes, decoded for every product."""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return Encoding(torch.bfloat16).nbytes(shape)

    def weight(
        self, stored: torch.Tensor, shape: tuple[int, ...], bias: torch.Tensor | None, scratch: torch.Tensor | None
    ) -> DecodedWeight:
        return DecodedWeight(stored.view(torch.bfloat16).view(shape), bias)


@dataclass(frozen=True, eq=False)
class DecodedWeight(Weight):
    @property
    def dense(self) -> torch.Tensor:
        return self.stored.float()

    def fill(self, row_start: int, row_end: int, fill: Fill, staging: Staging) -> int:
        rows = torch.empty(row_end - row_start, *self.stored.shape[1:])
        fill(rows, staging)
        self.stored[row_start:row_end] = rows
        return self.stored[row_start:row_end].nbytes


def mixed(config: ModelConfig, halved: tuple[tuple[str, ...], ...]) -> ModelLayout:
    """A layout whose layer i holds the matrices `halved[i]` (behind the end of the tuple none) in 16 bits."""
    names = [halved[index] if index < len(halved) else () for index in range(config.num_layers)]
    layers = [layer_layout(config, torch.float32, dict.fromkeys(each, UpperHalves(torch.float32))) for each in names]
    return ModelLayout(torch.float32, tuple(layers), shared_layout(config, torch.float32))


HALVED = (("gate_up", "down"), (), ("qkv", "o", "gate_up", "down"), ("down",))


@pytest.fixture(scope="module", params=["llama", "llama-biases", "qwen3"])
def source(request: pytest.FixtureRequest) -> CheckpointSource:
    """A model whose weights 16 bits hold."""
    model = random_model(request.param)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return in_memory(model)


def logits(
    source: CheckpointSource, layout: ModelLayout | None, slots: int, resident: tuple[int, ...] | None
) -> torch.Tensor:
    """Of a prompt and a window behind it."""
    made = make_runner(source, slots=slots, resident=resident, layout=layout)
    tokens = random_tokens(30)
    prefill = made.runner.prefill(0, tokens[:20])
    window = made.runner.verify([Window(tuple(tokens[20:]))], [0])
    if slots:
        made.engine.drain()
        sizes = made.weights.layout.layer_bytes
        streamed = [nbytes for index, nbytes in enumerate(sizes) if index not in (resident or ())]
        ahead = sum(streamed[: min(slots, len(streamed))])
        assert made.engine.bytes_copied == 2 * sum(streamed) + ahead
    made.close()
    return torch.cat([prefill, window])


@pytest.mark.parametrize(("slots", "resident"), [(0, None), (2, None), (1, (1, 2)), (2, (0,))])
def test_bits_do_not_depend_on_how_a_layer_is_stored(
    source: CheckpointSource, slots: int, resident: tuple[int, ...] | None
) -> None:
    layout = mixed(source.config(), HALVED)
    assert len(set(layout.layer_bytes)) == 4
    assert torch.equal(logits(source, layout, slots, resident), logits(source, None, 0, None))


def test_loading_fills_and_counts_what_is_stored(source: CheckpointSource) -> None:
    layout, seen = mixed(source.config(), HALVED), list[tuple[int, int]]()
    plain = load_plain(source, torch.float32)
    weights = load_weights(source, layout, on_progress=lambda *pair: seen.append(pair))
    assert seen[-1] == (layout.total_bytes,) * 2 and seen == sorted(seen)
    assert layout.total_bytes < plain.layout.total_bytes
    for layer in (None, *range(source.config().num_layers)):
        stored = weights.views(layer)
        for name, weight in plain.views(layer).items():
            assert torch.equal(stored[name].dense, weight.dense)
            halved = layer is not None and name in HALVED[layer]
            assert stored[name].stored.nbytes * (2 if halved else 1) == weight.stored.nbytes


def planned(config: ModelConfig, layout: ModelLayout, *, resident: int | None = None) -> RunPlan:
    """Of a model by itself with everything on the device, its weights in another layout."""
    request = RuntimeConfig(
        DescribedModel(config, torch.float32), "none", dtype="fp32", context=64, kv="gpu", resident_layers=resident
    )
    plan = plan_run(replace(request, resident_layers=None), MACHINE)
    return replace(plan, request=request, target=replace(plan.target, layout=layout))


def test_a_plan_of_unlike_layers_is_loaded(source: CheckpointSource) -> None:
    """The ring holds the largest layer, each resident layer takes its own bytes, each copy brings them."""
    layout = mixed(source.config(), HALVED)
    plan = planned(source.config(), layout, resident=2)
    plan = place_layers(replace(plan, limits=replace(plan.limits, device_bytes=None)))
    assert (plan.placement.resident_layers, plan.placement.num_slots) == ((1, 3), 2)
    budget, engine, undo = DeviceBudget(CPU, None), make_copy_engine(CPU), ExitStack()
    card = OpenCard(Card(0, CPU), budget, CopyQueues(engine))
    model = load_model(source, plan.target, [card], name="target", registrar=None, on_progress=None, undo=undo)
    sizes, reserved = layout.layer_bytes, dict(budget.reservations)
    assert (reserved["target: ring"], reserved["target: resident layers"]) == (2 * max(sizes), sizes[1] + sizes[3])
    assert model.runner.streamer.bytes_per_pass == sizes[0] + sizes[2]
    tokens = random_tokens(30)
    found = torch.cat([model.runner.prefill(0, tokens[:20]), model.runner.verify([Window(tuple(tokens[20:]))], [0])])
    torch.testing.assert_close(found, logits(source, None, 0, None), rtol=1e-5, atol=1e-5)
    undo.close()


SHAPE = ModelConfig(
    "LlamaForCausalLM", 512, 1024, 12, 8, 8, 64, 1000, 4096, 1e-5, {"rope_type": "default", "rope_theta": 1e4},
    layer_windows=(None,) * 12,
)  # fmt: skip


@PROPERTY
@given(
    st.lists(st.sampled_from([(), ("down",), ("qkv", "o", "gate_up", "down")]), min_size=12, max_size=12),
    st.integers(-4, 100),
)
def test_unlike_layers_fill_a_budget_and_no_more(halved: list[tuple[str, ...]], percent: int) -> None:
    layout = mixed(SHAPE, tuple(halved))
    whole = planned(SHAPE, layout)
    target, sizes = whole.target, layout.layer_bytes
    available = whole.fixed_bytes + sum(sizes) * percent // 100
    plan = replace(whole, limits=replace(whole.limits, device_bytes=available))
    if available < whole.fixed_bytes + 2 * max(sizes):
        with pytest.raises(BudgetError, match="too small"):
            place_layers(plan)
        return
    placed = place_layers(plan)
    placement = placed.placement
    assert placed.device_bytes <= available and placed.device_bytes == placed.fixed_bytes + target.held_bytes(placement)
    assert placed.streamed_bytes == sum(sizes[layer] for layer in placement.streamed_layers)
    assert pass_time(placed, MACHINE, length_tokens=10, rows=4).weight_bytes == placed.streamed_bytes
    if placement.streamed_layers:
        assert available - placed.device_bytes < 3 * max(sizes)
        pages = [-(-nbytes // PAGE_BYTES) * PAGE_BYTES for nbytes in sizes]
        limit = sum(pages[layer] for layer in placement.streamed_layers) - 1
        staged = place_staged(placed.target, limit, "the test")
        locked = sum(pages[layer] for layer in placement.streamed_layers if layer not in staged.staged_layers)
        assert staged.staged_layers and locked + staged.ring_bytes <= limit
