"""Packed layouts and the translation of transformers' configurations."""

import pytest
import torch
import transformers

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.weights import ModelLayout, checkpoint_tensors
from tests.helpers.models import model_config_from_transformers

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


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (tiny("Llama", hidden_act="gelu"), "gelu"),
        (tiny("Llama", partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (tiny("Llama", rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}), "proportional"),
        (tiny("Qwen2", layer_types=["chunked_attention"] * 5), "chunked_attention"),
    ],
    ids=["activation", "partial", "rope", "layer_types"],
)
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


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "factor": "2"}, "factor '2'"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor 0.5"),
        (LONGROPE | {"long_factor": [2.0] * 5}, "long_factor is 5 numbers, expected 6"),
        (LONGROPE | {"short_factor": 1.0}, "short_factor 1.0, where a list"),
        (LONGROPE | {"short_factor": [1.0] * 5 + [0.0]}, "short_factor 0.0"),
        ({"rope_type": "default", "rope_theta": 0.0}, "rope_theta 0.0"),
    ],
)
def test_impossible_rope_parameters_are_refused(rope, message):
    hf_config = tiny("Llama")
    hf_config.rope_parameters = {"rope_theta": 1e4} | rope
    with pytest.raises(CheckpointError, match=message):
        model_config_from_transformers(hf_config)
