"""A configuration read without transformers says what transformers reads in it, and what cannot be is refused."""

import json
import reprlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.models.rope import RopeTable
from offload_runtime.weights.layout import ModelLayout, checkpoint_tensors
from offload_runtime.weights.sources import describe_model, open_checkpoint
from tests.helpers.models import BUILDERS, model_config_from_transformers

CONFIGS = Path(__file__).parent / "data" / "configs"
NAMES = sorted(path.name for path in CONFIGS.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_shipped_configurations(name: str) -> None:
    ours = describe_model(CONFIGS / name).config()
    assert ours == model_config_from_transformers(AutoConfig.from_pretrained(CONFIGS / name))


def written(directory: Path, base: str, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """A copy of a shipped configuration with other fields."""
    raw = json.loads((CONFIGS / base / "config.json").read_text())
    raw = {key: value for key, value in {**raw, **changes}.items() if key not in without}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def test_a_checkpoint_with_weights_is_described_as_it_is_opened(tmp_path: Path) -> None:
    BUILDERS["llama-gqa"]().save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    for reference in (tmp_path, str(tmp_path / "model.safetensors")):
        described = describe_model(reference)
        assert (described.config(), described.native_dtype) == (opened.config(), opened.native_dtype)


MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, UnsupportedArchitectureError, "Llama, "),
    ({"quantization_config": {"quant_method": "hqq"}}, CheckpointError, r"quantised \('hqq'\)"),
    ({"hidden_size": None}, CheckpointError, "no usable hidden_size"),
    ({"max_position_embeddings": "long"}, CheckpointError, "max_position_embeddings 'long', where an integer"),
    ({"rope_scaling": {"rope_type": "linear"}}, CheckpointError, "factor"),
    ({"num_key_value_heads": 5}, CheckpointError, "impossible model"),
    ({**MIXTRAL, "num_experts": 4}, CheckpointError, "num_local_experts 8, where the 4 of num_experts is needed"),
    ({**MIXTRAL, "num_experts": "8"}, CheckpointError, "num_experts '8', where an integer"),
])  # fmt: skip
def test_what_cannot_be_planned(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        describe_model(written(tmp_path, "llama-2-7b", **changes))


HUGE = [0, -1, 10**6, 2**63, 10**400, 1.5, True, "x" * 5000, ["\n"] * 5000, {"a": {"b": "c" * 5000}}]
DAMAGED = [
    *({name: value} for name in ("num_hidden_layers", "num_key_value_heads", "head_dim") for value in HUGE),
    *({"hidden_size": 2**63, name: value} for name in ("vocab_size", "intermediate_size") for value in HUGE[:3]),
    *({"rope_scaling": value} for value in ("yarn" * 2000, ["yarn"], 7, {"rope_type": ["x" * 5000]})),
    *({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, name: value}}
      for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings", "mscale")
      for value in (0, -1, "4" * 5000, float("inf"), 1e300)),
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": "x"}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2, "high_freq_factor": 2}},
    *({"sliding_window": value, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
      for value in (0, -4096, "wide", [1], 2**63)),
    *({name: value} for name in ("rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias", "eos_token_id",
                                 "architectures", "model_type", "max_position_embeddings") for value in HUGE[-3:]),
    {"eos_token_id": [2, "x" * 5000]}, {"eos_token_id": True}, {"quantization_config": "x" * 5000},
    {"layer_types": ["x" * 5000] * 5000, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    {"no_rope_layers": [1, "x"], "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]},
    {"no_rope_layer_interval": 0, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]},
]  # fmt: skip


@pytest.mark.parametrize("changes", DAMAGED, ids=lambda changes: reprlib.repr(changes))
def test_damaged_configurations_are_refused_briefly(changes: dict[str, Any], tmp_path: Path) -> None:
    """Before anything of a size that they name is made, and without echoing kilobytes."""
    with pytest.raises(CheckpointError) as refusal:
        describe_model(written(tmp_path, "llama-2-7b", **changes))
    lines = str(refusal.value).splitlines()
    assert len(lines) <= 2 and max(map(len, lines)) <= 300


def test_rotations_of_what_is_accepted_are_finite(tmp_path: Path) -> None:
    bases = [{"rope_theta": 1.001}, {"rope_theta": 10**30}]
    for changes in ({}, {"attention_factor": 1e6}, {"beta_fast": 1e-6, "beta_slow": 1e6}, *bases):
        rope = {"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 2, **changes}
        config = describe_model(written(tmp_path, "llama-2-7b", rope_scaling=rope)).config()
        table = RopeTable(config, torch.device("cpu"))
        cos, sin = table.angles(torch.tensor([0, 1, 4095], dtype=torch.int32), table.frequencies(4096))
        assert torch.isfinite(cos).all() and torch.isfinite(sin).all()


SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def tiny(family: str, **overrides) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{family}Config")(**(SIZES | overrides))


def test_tied_embeddings_drop_the_head_and_its_bytes():
    tied, untied = (model_config_from_transformers(tiny("Llama", tie_word_embeddings=flag)) for flag in (True, False))
    layouts = [ModelLayout.of(config, torch.bfloat16) for config in (untied, tied)]
    difference = layouts[0].total_bytes - layouts[1].total_bytes
    assert difference == 96 * 48 * 2
    assert "lm_head.weight" not in checkpoint_tensors(tied)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (7, (7,)), ([3, 5], (3, 5))]
)  # fmt: skip
def test_eos_ids_in_all_their_forms(value, expected):
    assert model_config_from_transformers(tiny("Llama", eos_token_id=value)).eos_token_ids == expected


@pytest.mark.parametrize(("hf_config", "message"), [
    (tiny("Llama", hidden_act="gelu"), "gelu"),
    (tiny("Llama", partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    (tiny("Llama", rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}), "proportional"),
    (tiny("Qwen2", layer_types=["chunked_attention"] * 5), "chunked_attention"),
], ids=["activation", "partial", "rope", "layer_types"])  # fmt: skip
def test_unimplemented_options_are_refused(hf_config, message):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        model_config_from_transformers(hf_config)


def test_contradictions_are_refused():
    with pytest.raises(CheckpointError, match="switches the sliding window off"):
        model_config_from_transformers(tiny("Qwen2", layer_types=["sliding_attention"] * 5))
    with pytest.raises(CheckpointError, match="3 KV heads"):
        model_config_from_transformers(tiny("Llama", num_key_value_heads=3))


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "factor": 2.0,
            "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(("rope", "message"), [
    ({"rope_type": "linear", "factor": "2"}, "factor '2'"), ({"rope_type": "dynamic", "factor": 0.5}, "factor 0.5"),
    (LONGROPE | {"long_factor": [2.0] * 5}, "long_factor is 5 numbers, expected 6"),
    (LONGROPE | {"short_factor": 1.0}, "short_factor 1.0, where a list"),
    (LONGROPE | {"short_factor": [1.0] * 5 + [0.0]}, "short_factor 0.0"),
    ({"rope_type": "default", "rope_theta": 0.0}, "rope_theta 0.0"),
])  # fmt: skip
def test_impossible_rope_parameters_are_refused(rope, message):
    hf_config = tiny("Llama")
    hf_config.rope_parameters = {"rope_theta": 1e4} | rope
    with pytest.raises(CheckpointError, match=message):
        model_config_from_transformers(hf_config)
