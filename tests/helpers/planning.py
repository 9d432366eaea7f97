"""Requests and machines of all kinds for property tests of plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, ContextLengthError, OptionError
from offload_runtime.hardware import MachineProfile
from offload_runtime.models.mtp import MtpConfig
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.plan import search
from offload_runtime.plan.search import find_plan, plan_run
from offload_runtime.plan.sizes import MemoryLimits, RunPlan
from offload_runtime.sizes import GB
from offload_runtime.weights.checkpoint import DescribedModel

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"


@st.composite
def models(draw: st.DrawFn, *, most_layers: int = 48) -> DescribedModel:
    """A model of any size up to 70B, some with sliding windows, some with experts."""
    kv_heads, group = draw(st.sampled_from([32, 8, 2, 1])), draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(most_layers // 2, most_layers) | st.integers(1, 4))
    head_dim = draw(st.sampled_from([128, 64]))
    count = draw(st.sampled_from([0, 0, 16, 128]))
    slides, first = draw(st.sampled_from([(False, 0), (True, 0), (True, layers // 2)]))
    described = {
        "model_type": "qwen2", "hidden_size": kv_heads * group * head_dim,
        "intermediate_size": draw(st.sampled_from([512, 2048, 14336])), "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": draw(st.sampled_from([1000, 32000, 128256])), "max_position_embeddings": 131072,
        "use_sliding_window": slides, "sliding_window": 4096, "max_window_layers": first,
    }  # fmt: skip
    if count:
        described |= {"model_type": "qwen3_moe", "num_experts": count, "moe_intermediate_size": 512}
    return DescribedModel(model_config_from_json(described, "drawn"), torch.bfloat16)


@st.composite
def requests(draw: st.DrawFn) -> RuntimeConfig:
    """What somebody might ask for; most of it makes sense."""
    target, who = draw(models()), draw(st.sampled_from(["ngram", "a model", "a model", "a head", "self"]))
    modes = {"ngram": ["auto", "none"], "self": ["auto", "chain"]}
    mode = draw(st.sampled_from(modes.get(who, ["auto", "chain", "triforce"])))
    draft: Any = draw(models(most_layers=4)) if who == "a model" else who
    return RuntimeConfig(
        target=target,
        draft=DescribedModel(MtpConfig.of(target.config()), target.native_dtype) if who == "a head" else draft,
        context=draw(st.integers(2, 8192) | st.integers(20_000, 131072)),
        kv=draw(st.sampled_from(["host", "auto", "gpu"])),
        max_batch=draw(st.sampled_from([1, 1, 2, 5])),
        resident_layers=draw(st.sampled_from([None, None, None, 0, 1])),
        speculation=SpeculationOptions(mode),
        vram=draw(limits(2 * GB, 40 * GB)),
        ram=draw(limits(6 * GB, 600 * GB)),
        pinned=draw(limits(GB // 10, 300 * GB)),
    )


def limits(least_bytes: int, most_bytes: int) -> st.SearchStrategy[int | None]:
    """What somebody allows of some memory; mostly all of it."""
    return st.one_of(st.none(), st.none(), st.none(), st.integers(least_bytes, most_bytes))


def made_up_machine(vram_bytes: int = 24 * GB, ram_bytes: int = 64 * GB, **figures: Any) -> MachineProfile:
    """A machine with one card and usual figures, or others."""
    usual = {"vram_reserved_bytes": GB, "link_gbps": 25.0, "hbm_gbps": 1000.0, "tflops": {"bf16": 165.0}}
    card: dict[str, Any] = {"gpu_name": "a card", "vram_bytes": vram_bytes, **usual, **figures}
    return MachineProfile("some", "made up", 1, ram_bytes, **card)


@st.composite
def machines(draw: st.DrawFn) -> MachineProfile:
    """Machines of all sizes."""
    ram_bytes = draw(st.integers(8 * GB, 500 * GB))
    return made_up_machine(
        draw(st.integers(3 * GB, 12 * GB) | st.integers(16 * GB, 80 * GB)), ram_bytes,
        link_gbps=draw(st.floats(3, 60)), hbm_gbps=draw(st.floats(200, 5000)),
        pinnable_bytes=draw(st.none() | st.integers(4 * GB, min(300 * GB, ram_bytes))),
    )  # fmt: skip


def plan_or_none(request: RuntimeConfig, machine: MachineProfile) -> RunPlan | None:
    try:
        return plan_run(request, machine)
    except (BudgetError, OptionError, ContextLengthError):
        return None


def without_limit(request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits) -> RunPlan:
    """The plan as on a CPU, for device memory without a limit: no layer of a cache on the host stays on a GPU only
    because there is room for all of a small model's."""
    assert request.vram is None, "a limit that was asked for would be ignored"
    cards = tuple(replace(card, device_bytes=None) for card in limits.cards)
    return find_plan(request, machine, replace(limits, cards=cards))


def load_streaming_kv(target: Path, **options: Any) -> Runtime:
    """A runtime that streams all of a cache on the host. Options as of `RuntimeConfig`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "find_plan", without_limit)
        return Runtime.from_config(RuntimeConfig(target, **options))
