"""Plans with heads that draft: what they take and bring, what `--draft auto` takes first, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import CheckpointError, OptionError, VocabularyMismatchError
from offload_runtime.hardware import load_profile
from offload_runtime.plan import describe_models, forecast, plan_run
from offload_runtime.sizes import GB
from offload_runtime.weights import checkpoint_tensors
from tests.helpers.families import family_config

CONFIGS = Path(__file__).parent / "data" / "configs"
CARD = load_profile("rtx4090")
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 5120, "intermediate_size": 27648,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
    "vocab_size": 152064, "draft_vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def described(directory: Path, **settings: Any) -> str:
    """A directory with a configuration alone, by default Qwen2.5-32B's with an MTP layer."""
    usual = json.loads((CONFIGS / "qwen2.5-32b" / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings if "architectures" in settings else usual | settings))
    return str(directory)


def test_an_mtp_layer_takes_what_it_does_not_share(tmp_path: Path) -> None:
    target = described(tmp_path / "target")
    plan = plan_run(describe_models(RuntimeConfig(target, "mtp", context=8192, tree_nodes=0)), CARD)
    draft, size, layer_bytes = plan.draft, plan.target.config.hidden_size, plan.target.layout.layer_bytes[0]
    assert draft is not None
    fc_bytes, lm_head_bytes = 2 * size * size * 2, plan.target.layout.head.total_bytes
    assert 0 <= plan.device["draft weights"] - layer_bytes - fc_bytes < 1 << 20
    assert plan.device["draft KV cache"] == draft.kv_bytes_of((0,), 8192)
    assert plan.device["hidden states for the draft"] < 1 << 21, "those of a prompt are where its rows were"
    read_s = (layer_bytes + fc_bytes + lm_head_bytes) / (CARD.require_gpu().hbm_gbps or 0) / GB
    assert 1 < forecast(plan, CARD).draft_step_s / read_s < 1.4
    said = CliRunner().invoke(app, _plan(target, "mtp")).stdout
    assert "of what the MTP head proposes, which is assumed, not measured" in " ".join(said.split())


def test_a_heads_experts_are_in_the_targets_pool(tmp_path: Path) -> None:
    """On the device where all fit, else as those of its layers, unless a buffer that holds one is larger for it."""
    experts, size = 32, 3 * 1024 * 512 * 2
    changes: dict[str, Any] = {
        "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 6, "num_experts": experts,
        "num_local_experts": experts, "mlp_only_layers": [], "decoder_sparse_step": 1, "torch_dtype": "bfloat16",
        "architectures": ["Qwen3MoeForCausalLM"], "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    target = described(tmp_path / "target", **family_config("qwen3_moe", 0).to_dict() | changes)
    asked = describe_models(RuntimeConfig(target, "mtp", context=512, kv="gpu", max_batch=1, tree_nodes=0))
    whole, pooled = (plan_run(replace(asked, expert_pool=pool), CARD) for pool in (None, 50 * size))
    fewer = plan_run(replace(asked, draft="none", expert_pool=50 * size), CARD)
    assert whole.device["experts"] == 7 * experts * size and "experts in host memory" not in whole.host
    assert pooled.device["experts"] == 50 * size and pooled.host["experts in host memory"] == 7 * experts * size
    assert whole.device["draft weights"] == pooled.device["draft weights"] < experts * size
    assert "room for 50 of 224 experts with the head's" in pooled.target.experts_in_words
    assert pooled.target.expected_hits < fewer.target.expected_hits and pooled.streamed_bytes > fewer.streamed_bytes
    missed_bytes = pooled.target.head_experts[0].chosen * size * (1 - pooled.target.expected_hits)
    whole_s, pooled_s = (forecast(plan, CARD).draft_step_s for plan in (whole, pooled))
    assert pooled_s - whole_s == pytest.approx(missed_bytes / ((CARD.link_gbps or 0) * GB))
    small = replace(asked.target, kinds=dict.fromkeys(checkpoint_tensors(asked.target.config()), "Q4_0"))
    apart = plan_run(replace(asked, target=small, expert_pool=50 * size), CARD)
    assert apart.device["draft weights"] > experts * size and not apart.target.head_experts


def _plan(target: str, *draft: str) -> list[str]:
    return ["plan", "--target", target, "--profile", "rtx4090", *(["--draft", *draft] if draft else [])]


def test_an_eagle3_head_has_an_embedding_and_fewer_logits(tmp_path: Path) -> None:
    target, head = described(tmp_path / "target"), described(tmp_path / "head", **EAGLE3)
    plan = plan_run(describe_models(RuntimeConfig(target, f"{head},ngram", context=8192)), CARD)
    assert plan.draft is not None and plan.draft.context_tokens == 8192  # beyond what it was trained with
    assert plan.draft.layout.head.total_bytes == 32000 * 5120 * 2
    assert plan.draft.layout.embedding.total_bytes == 152064 * 5120 * 2
    assert plan.device["hidden states for the draft"] >= 8192 * 5120 * 2


def test_what_a_head_reads_of_a_second_card_passes_through_host_memory(tmp_path: Path) -> None:
    target, head = described(tmp_path / "target"), described(tmp_path / "head", **EAGLE3)
    through_host = {
        draft: plan_run(
            describe_models(RuntimeConfig(target, draft, context=8192, device="cuda:0,cuda:1")), replace(CARD, gpus=2)
        ).host["rows between cards"]
        for draft in (head, "none")
    }
    assert through_host[head] >= through_host["none"] + 8192 * 5120 * 2


def test_what_a_model_carries_drafts_by_itself(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, _plan(described(tmp_path / "target"), "auto"))
    assert "Drafting with the MTP layer that it carries, predicted to be" in result.stdout
    without = CliRunner().invoke(app, _plan(described(tmp_path / "without", mtp_num_hidden_layers=0), "auto"))
    assert without.exit_code == 0 and "MTP" not in without.stdout


def test_a_copy_without_what_its_model_has_says_what_would_be_better(tmp_path: Path) -> None:
    settings = family_config("qwen3_5_text", 0).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    result = CliRunner().invoke(app, _plan(described(tmp_path / "target", **settings), "auto"))
    assert "a copy of the model that has its MTP layers would draft better" in result.stdout


@pytest.mark.parametrize(("settings", "options", "error", "message"), [
    ({"mtp_num_hidden_layers": 0}, {}, OptionError, "carries no MTP layers, which copies"),
    ({}, {"mode": "triforce"}, OptionError, "triforce: the MTP head drafts from what passes of the target keep"),
    ({}, {"draft_cache": "retrieval"}, OptionError, "--draft-cache retrieval: the MTP head has few layers"),
    ({}, {"draft_cache": "streaming"}, OptionError, "--draft-cache streaming: the MTP head has few layers"),
    ({}, {"recent_tokens": 64}, OptionError, "--recent-tokens does nothing with the MTP head"),
    (
        {"draft": {"vocab_size": 151936}},
        {},
        VocabularyMismatchError,
        "head is about 151936 tokens and the target has 152064",
    ),
    ({"draft": {"hidden_size": 4096}}, {}, CheckpointError, "reads rows of 4096 channels, and the target's have"),
])  # fmt: skip
def test_what_a_head_cannot_do_is_refused(
    settings: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    draft = settings.pop("draft", None)
    named = "mtp" if draft is None else described(tmp_path / "head", **EAGLE3 | draft)
    asked = RuntimeConfig(described(tmp_path / "target", **settings), named, speculation=SpeculationOptions(**options))
    with pytest.raises(error, match=message):
        plan_run(describe_models(asked), CARD)


def test_ngrams_join_one_drafter_however_they_are_named() -> None:
    for named in ("mtp", "mtp,ngram", "ngram, mtp", "auto,ngram", "ngram,ngram", "a,b/c"):
        expected = {"auto,ngram": "auto", "ngram,ngram": "ngram", "a,b/c": "a,b/c"}.get(named, "mtp")
        assert RuntimeConfig("m", named).draft == expected
    for named in ("mtp,eagle3-head", "none,ngram", "ngram,mtp,auto"):
        with pytest.raises(OptionError, match=f"--draft {named}: one drafts, and n-grams join it"):
            RuntimeConfig("m", named)
