"""An embedding that is not the head: on the host where that makes room for layers, and read there by every pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload_runtime.config import RuntimeConfig
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError
from offload_runtime.hardware import load_profile
from offload_runtime.plan import describe_models, plan_run
from offload_runtime.stream import Registrar
from tests.helpers.engine import byte_level_tokenizer, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.page_locking import LimitedRegistrar, load_locked_by
from tests.helpers.planning import CONFIGS
from tests.test_weights_gguf import write

PROMPT = [3 + 7 * i * i % 290 for i in range(300)]
# Rows, columns, and what is left over: of a GPU the driver's share is not the same for two runs.
SIZES = {"cpu": (2048, 64, 0), "cuda": (131072, 512, 34 << 20)}
CASES = [("cpu", "plain"), *(pytest.param("cuda", how, marks=pytest.mark.gpu) for how in ("plain", "coded", "Q8_0"))]


def tokens_of(runtime: Runtime) -> list[int]:
    return list(runtime.generate(PROMPT, max_new_tokens=24, temperature=0.8, seed=3, ignore_eos=True).tokens)


@pytest.mark.parametrize(("device", "stored"), CASES)
def test_tokens_and_sizes_are_those_of_a_plan_that_has_it_on_the_host(device: str, stored: str, tmp_path: Path) -> None:
    vocab_size, columns, slack_bytes = SIZES[device]
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=columns, intermediate_size=2 * columns, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # so that tokens depend on what was read
        model.model.embed_tokens.weight.normal_(0, 0.5)
    byte_level_tokenizer().save_pretrained(tmp_path)
    path = write(tmp_path / "m.gguf", model, kind="Q8_0", vocabulary={}) if stored == "Q8_0" else tmp_path
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    asked: dict[str, Any] = {"device": device, "context": 512, "draft": "ngram", "tree_nodes": 16, "kv": "gpu"}
    asked |= {"dtype": "bf16" if device == "cuda" else "fp32", "encode": "always" if stored == "coded" else "none"}
    asked |= {"weights": "stored"} if stored == "Q8_0" else {}
    for resident in (None, 0):  # whole passes are captured where nothing is streamed
        with Runtime.load(path, resident_layers=resident, **asked) as runtime:
            expected, plan = tokens_of(runtime), runtime.plan
            assert "embedding" not in plan.host and "embedding and head" in plan.device
        own_bytes = plan.target.layout.embedding.total_bytes
        limit_bytes = plan.device_bytes - own_bytes + slack_bytes
        asked_less = {**asked, "resident_layers": resident, "vram": limit_bytes}
        registrar = LimitedRegistrar(1 << 60, real=Registrar() if device == "cuda" else None)
        with load_locked_by(registrar, path, **asked_less) as runtime:
            assert tokens_of(runtime) == tokens_of(runtime) == expected
            smaller, budget = runtime.plan, runtime.engine.budgets[0]
            assert bool(smaller.placement.streamed_layers) == (resident == 0)
            assert smaller.captured_bytes == plan.captured_bytes
            assert 0 <= smaller.host["embedding"] - own_bytes < 4096 and "embedding and head" not in smaller.device
            assert budget.reserved_bytes <= smaller.device_bytes <= limit_bytes
            assert budget.reservations["target: head"] == smaller.device["head"]
            assert own_bytes <= runtime.engine.target.pinned_bytes == registrar.locked_bytes == smaller.pinned_bytes
        assert not registrar.locked
        with pytest.raises(BudgetError, match=r"could not page-lock .* for the embedding .* lower --pinned"):
            load_locked_by(LimitedRegistrar(4096), path, **asked_less)


def test_a_plan_has_it_where_a_pass_brings_less() -> None:
    card = load_profile("rtx4090")

    def planned(name: str, **options: Any) -> Any:
        asked: dict[str, Any] = {"draft": "none", "context": 8192, "kv": "gpu", **options}
        return plan_run(describe_models(RuntimeConfig(str(CONFIGS / name), **asked)), card)

    def nowhere_else(plan: Any) -> bool:
        return "embedding" not in plan.host and "embedding and head" in plan.device

    streamed, kept = planned("llama-3.1-8b", vram="12GB"), planned("llama-3.1-8b", vram="12GB", pinned="1GB")
    embedding_bytes = 128256 * 4096 * 2
    assert streamed.page_locked["embedding"] == streamed.host["embedding"] == embedding_bytes
    assert streamed.device["head"] == embedding_bytes + 8192  # and the last norm
    assert nowhere_else(kept) and kept.is_staged  # it may not be page-locked
    assert kept.streamed_bytes - streamed.streamed_bytes >= 2 * streamed.target.layer_bytes
    assert nowhere_else(planned("llama-3.1-8b")) and not planned("llama-3.1-8b").streamed_bytes
    assert nowhere_else(planned("llama-3.2-1b", vram="3GB"))  # which is the head too
