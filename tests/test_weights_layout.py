"""Packed layouts and the translation of transformers' configurations."""

import itertools

import pytest
import torch
import transformers

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.weights import ModelLayout, checkpoint_tensors, layer_layout
from offload_runtime.weights.layout import PackedLayout, shared_layout
from tests.helpers.models import model_config_from_transformers, rows_of

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def tiny(family: str, **overrides) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{family}Config")(**(SIZES | overrides))


VARIANTS = [
    tiny("Llama"),
    tiny("Llama", head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    tiny("Mistral", sliding_window=7),
    tiny("Mistral", sliding_window=None, head_dim=24),
    tiny("Qwen2"),
    tiny("Qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=3, tie_word_embeddings=True),
    tiny("Qwen3", head_dim=16),
    tiny("Qwen3", head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    tiny("SmolLM3"),
    tiny("SmolLM3", use_sliding_window=True, sliding_window=6, attention_bias=True, mlp_bias=True),
    tiny("SmolLM3", no_rope_layers=[0, 1, 1, 0, 1]),
]


def build(hf_config: transformers.PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(hf_config)


@pytest.mark.parametrize("hf_config", VARIANTS, ids=lambda c: c.model_type)
def test_every_parameter_of_transformers_model_has_a_place(hf_config):
    model = build(hf_config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: d.shape for name, d in checkpoint_tensors(model_config_from_transformers(hf_config)).items()}
    assert found == expected


@pytest.mark.parametrize("hf_config", VARIANTS, ids=lambda c: c.model_type)
def test_flags_agree_with_transformers_modules(hf_config):
    config = model_config_from_transformers(hf_config)
    for index, layer in enumerate(build(hf_config).model.layers):
        attention = layer.self_attn
        window = getattr(attention, "sliding_window", getattr(hf_config, "sliding_window", None))
        assert config.layer_windows[index] == window
        assert config.layer_rope[index] == bool(getattr(attention, "use_rope", True))
        assert config.head_dim == attention.head_dim
        assert config.qkv_bias == (attention.v_proj.bias is not None)
        assert config.o_bias == (attention.o_proj.bias is not None)
        assert config.mlp_bias == (layer.mlp.up_proj.bias is not None)
        assert config.qk_norm == hasattr(attention, "q_norm")
    assert config.rope_parameters["rope_theta"] == hf_config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("hf_config", VARIANTS, ids=lambda c: c.model_type)
def test_destinations_cover_every_element_once(hf_config):
    config = model_config_from_transformers(hf_config)
    blocks = {None: shared_layout(config, torch.float32)}
    blocks |= dict.fromkeys(range(config.num_layers), layer_layout(config, torch.float32))
    views = {key: layout.views(torch.zeros(layout.total_bytes, dtype=torch.uint8)) for key, layout in blocks.items()}
    for destination in checkpoint_tensors(config).values():
        part = rows_of(destination, views[destination.layer])
        assert tuple(part.shape) == destination.shape and part.is_contiguous()
        part += 1
    assert all(bool((tensor.dense == 1).all()) for block in views.values() for tensor in block.values())


def test_fused_order_and_names():
    config = model_config_from_transformers(tiny("Qwen3", head_dim=16, attention_bias=True))
    table = checkpoint_tensors(config)
    rows = {name: (d.packed, d.row_start, d.row_end) for name, d in table.items() if name.startswith("model.layers.1.")}
    prefix = "model.layers.1."
    assert rows[prefix + "self_attn.q_proj.weight"] == ("qkv", 0, 64)
    assert rows[prefix + "self_attn.k_proj.weight"] == ("qkv", 64, 96)
    assert rows[prefix + "self_attn.v_proj.bias"] == ("qkv_bias", 96, 128)
    assert rows[prefix + "mlp.gate_proj.weight"] == ("gate_up", 0, 80)
    assert rows[prefix + "mlp.up_proj.weight"] == ("gate_up", 80, 160)
    assert [spec.name for spec in layer_layout(config, torch.bfloat16).tensors] == [
        "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "post_norm", "gate_up", "down",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_alignment_and_sizes(dtype):
    layout = PackedLayout.build({"a": (3,), "b": (5, 7), "c": (128,)}, dtype)
    assert all(spec.offset_bytes % 256 == 0 for spec in layout.tensors) and layout.total_bytes % 256 == 0
    for first, second in itertools.pairwise(layout.tensors):
        assert first.offset_bytes + first.nbytes <= second.offset_bytes
    buffer = torch.zeros(layout.total_bytes + 4096, dtype=torch.uint8)  # arenas are rounded up to pages
    views = layout.views(buffer)
    views["b"].dense.fill_(1)
    assert views["b"].dense.dtype == dtype and views["b"].dense.shape == (5, 7)
    assert views["b"].stored.nbytes == layout.tensors[1].nbytes == 35 * dtype.itemsize
    assert buffer.view(dtype).sum() == 35, "views must write through to the buffer"
    with pytest.raises(AssertionError, match="cannot be seen"):
        layout.views(buffer[: layout.total_bytes - 1])


def test_tied_embeddings_drop_the_head_and_its_bytes():
    tied, untied = (model_config_from_transformers(tiny("Llama", tie_word_embeddings=flag)) for flag in (True, False))
    layouts = [ModelLayout.plain(config, torch.bfloat16) for config in (untied, tied)]
    difference = layouts[0].total_bytes - layouts[1].total_bytes
    assert difference == 96 * 48 * 2
    assert "lm_head.weight" not in checkpoint_tensors(tied)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (7, (7,)), ([3, 5], (3, 5))]
)  # fmt: skip
def test_eos_ids_in_all_their_forms(value, expected):
    assert model_config_from_transformers(tiny("Llama", eos_token_id=value)).eos_token_ids == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e5, "original_max_position_embeddings": 32},
        {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "original_max_position_embeddings": 64,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
         "original_max_position_embeddings": 64, "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_scalings_are_passed_on(rope):
    config = model_config_from_transformers(tiny("Llama", rope_parameters=dict(rope)))
    assert {key: config.rope_parameters[key] for key in rope} == rope


def test_rope_scaling_of_older_configs_is_standardised():
    old = tiny("Llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 3.0})
    rope = model_config_from_transformers(old).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 3.0, 5e5)


def test_other_architectures_are_refused_with_the_supported_ones():
    with pytest.raises(UnsupportedArchitectureError, match=r"gpt2.*LlamaForCausalLM.*SmolLM3ForCausalLM"):
        model_config_from_transformers(transformers.GPT2Config())
    classifier = tiny("Llama", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(UnsupportedArchitectureError, match="LlamaForSequenceClassification"):
        model_config_from_transformers(classifier)


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


def test_result_is_the_plain_dataclass():
    config = model_config_from_transformers(tiny("Llama"))
    assert isinstance(config, ModelConfig) and type(config.rope_parameters) is dict


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "factor": 2.0,
            "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "factor": "2"}, "factor '2'"),
        ({"rope_type": "linear", "factor": 0}, "factor 0,"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor 0.5"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor inf"),
        (LONGROPE | {"long_factor": [2.0] * 5}, "long_factor is 5 numbers, expected 6"),
        (LONGROPE | {"short_factor": 1.0}, "short_factor 1.0, where a list"),
        (LONGROPE | {"short_factor": [1.0] * 5 + [0.0]}, "short_factor 0.0"),
        (LONGROPE | {"short_factor": [1.0] * 5 + ["1"]}, "short_factor '1'"),
        ({"rope_type": "default", "rope_theta": 0.0}, "rope_theta 0.0"),
    ],
)
def test_impossible_rope_parameters_are_refused(rope, message):
    hf_config = tiny("Llama")
    hf_config.rope_parameters = {"rope_theta": 1e4} | rope
    with pytest.raises(CheckpointError, match=message):
        model_config_from_transformers(hf_config)
