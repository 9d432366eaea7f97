"""Which levels speculation gets: what `auto` takes and why it does without TriForce, and what is refused early."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.config import SpeculationOptions, parse_bytes
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, OffloadError, OptionError
from offload_runtime.hardware import load_profile
from tests.helpers.engine import load, one_thread, refuse_weights  # noqa: F401 (an autouse fixture)

TARGET = "long_target"
CARD = load_profile("rtx4090")
CONTEXT, DRAFT_CONTEXT = 700, 512
SMALL: dict[str, Any] = {"sink_tokens": 4, "recent_tokens": 64, "budget_tokens": 128, "gamma_draft": 3}


def changed_copy(model: Path, directory: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other settings."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


@pytest.fixture(scope="module")
def short_draft(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft whose positions end before the context does."""
    return changed_copy(draft, tmp_path_factory.mktemp("short"), max_position_embeddings=DRAFT_CONTEXT)


@pytest.fixture(scope="module")
def windowed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target as a Mistral with a sliding window."""
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100}
    return changed_copy(target, tmp_path_factory.mktemp("windowed"), **changes)


def refused(kind: type[OffloadError], target: Path, **options: Any) -> str:
    with pytest.raises(kind) as caught, load(target, context=CONTEXT, on_progress=refuse_weights, **options):
        pass
    return str(caught.value)


def least_vram(target: Path, **options: Any) -> int:
    """What a refusal names as the least budget."""
    named = re.search(r"([0-9.]+ [kMG]?B) is the least", refused(BudgetError, target, vram="1MB", **options))
    assert named is not None
    return parse_bytes(named[1])


def placement(target: Path, mode: str = "auto", draft_cache: str = "auto", **options: Any) -> str:
    """What the runtime says about who proposes."""
    speculation = SpeculationOptions(mode, draft_cache, **SMALL)
    with load(target, context=CONTEXT, speculation=speculation, tree_nodes=0, **options) as runtime:
        return runtime.placement.rpartition("; ")[2]


def test_auto_takes_triforce_or_says_why_not(target: Path, draft: Path, one_layer_draft: Path, windowed: Path) -> None:
    assert placement(target, draft=draft, kv="host").startswith("TriForce: the draft, then the target")
    assert placement(target, draft=draft, kv="gpu").startswith("TriForce: the draft, then the target")
    not_triforce = "proposals from the draft (not TriForce: {})"
    slower = placement(target, draft=one_layer_draft, kv="gpu", profile=replace(CARD, hbm_gbps=0.1))
    compared = re.search(r"predicted to be slower: ([0-9.]+) against ([0-9.]+) tokens/s by the .* of rtx4090", slower)
    assert compared is not None and float(compared[1]) < float(compared[2])
    assert slower == not_triforce.format(compared[0])
    streamed = placement(target, draft=draft, kv="host", resident_layers=2)
    assert streamed == not_triforce.format("3 of 5 layers are streamed")
    assert "this model has sliding windows" in placement(windowed, draft=draft, kv="host")
    with load(target, draft=draft, context=CONTEXT, kv="host") as runtime:  # the default budget of 4096 tokens
        assert "(not TriForce: a retrieval budget of 4096 tokens is more than the context of 700)" in runtime.placement


def test_a_draft_that_ends_before_the_context_is_refused(target: Path, short_draft: Path) -> None:
    """It would have nothing to say there, and the retrieval verifier would wait for it."""
    message = refused(
        OptionError, target, draft=short_draft, kv="host", speculation=SpeculationOptions("triforce", "full", **SMALL)
    )
    assert "the draft was made for 512 tokens and the context has 700" in message
    assert "--draft-cache streaming" in message


def test_layers_that_are_streamed_leave_no_room_for_triforce(target: Path, draft: Path) -> None:
    """What the refusal asks for is enough."""
    options: dict[str, Any] = {"draft": draft, "kv": "host", "speculation": SpeculationOptions("triforce", **SMALL)}
    least = least_vram(target, **options)
    message = refused(BudgetError, target, vram=least, **options)
    assert re.search(r"beside it \d of 5 layers would be streamed: raise --vram by ", message)
    more = re.search(r"raise --vram by ([0-9.]+ [kMG]?B)", message)
    assert more is not None
    with load(target, context=CONTEXT, vram=least + parse_bytes(more[1]), **options) as runtime:
        assert runtime.plan.has_verifier
    asked = refused(OptionError, target, resident_layers=2, **options)
    assert "3 of 5 layers are streamed: drop --resident-layers" in asked


@pytest.mark.parametrize("mode", ["auto", "triforce"])
def test_a_batch_that_does_not_fit_is_told_how_many_would(target: Path, draft: Path, mode: str) -> None:
    options: dict[str, Any] = {
        "draft": draft, "kv": "gpu", "speculation": SpeculationOptions(mode, **SMALL), "tree_nodes": 0
    }  # fmt: skip
    with load(target, context=CONTEXT, max_batch=2, **options) as runtime:
        vram = runtime.parts.budget.reserved_bytes + 10_000
    message = refused(BudgetError, target, max_batch=40, vram=vram, **options)
    named = re.search(r"; ([0-9]+) prompts at once would fit, 40 do not$", " ".join(message.split()))
    assert named is not None
    fitting = int(named[1])
    assert fitting >= 2
    Runtime.load(target, device="cpu", context=CONTEXT, max_batch=fitting, vram=vram, **options).close()
    message = refused(OffloadError, target, max_batch=fitting + 1, vram=vram, **options)
    assert " ".join(message.split()).endswith(f"; {fitting} prompts at once would fit, {fitting + 1} do not")
