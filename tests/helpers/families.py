"""Random small models of every family, as transformers makes them, and as llama.cpp's converter would write them."""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf

from tests.helpers.engine import byte_level_tokenizer

VOCABULARY = 320
NO_TOKENS = [f"t{index}" for index in range(VOCABULARY)]  # of no kind of tokenizer
F32 = gguf.GGMLQuantizationType.F32
SWITCH = 400  # tokens from which on longrope's models turn otherwise: more than any test has


def _alike(draw: random.Random) -> dict[str, Any]:
    """Sizes that all families have."""
    num_kv_heads, head_dim = draw.choice((1, 2, 3)), draw.choice((8, 16, 24))
    num_heads = num_kv_heads * draw.choice((1, 2, 3))
    return {
        "vocab_size": VOCABULARY, "hidden_size": num_heads * head_dim, "intermediate_size": draw.choice((56, 80, 96)),
        "num_hidden_layers": draw.choice((2, 3, 5)), "num_attention_heads": num_heads, "head_dim": head_dim,
        "num_key_value_heads": num_kv_heads, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 0, "tie_word_embeddings": draw.random() < 0.5, "rms_norm_eps": draw.choice((1e-6, 1e-4)),
    }  # fmt: skip


def _theta(draw: random.Random) -> float:
    return draw.choice((500.0, 10000.0, 1e6))


def _plain_heads(sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if name != "head_dim"}


def _any_width(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """Heads that together are not as wide as the residual stream."""
    return sizes | {"hidden_size": sizes["num_attention_heads"] * draw.choice((8, 12, 20))}


def _scaled(draw: random.Random) -> dict[str, Any]:
    """A rotation of any kind that all families have whose configurations say one for all layers."""
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "factor": 8.0, **llama3},
    ]  # fmt: skip
    return {**draw.choice(kinds), "rope_theta": _theta(draw)}


def _llama(draw: random.Random) -> Any:
    biases = {name: draw.random() < 0.3 for name in ("attention_bias", "mlp_bias")}
    return hf.LlamaConfig(**_any_width(draw, _alike(draw)), **biases, rope_parameters=_scaled(draw))


def _mistral(draw: random.Random) -> Any:
    window = draw.choice((5, 40))
    return hf.MistralConfig(**_any_width(draw, _alike(draw)), sliding_window=window, rope_parameters=_scaled(draw))


def _qwen2(draw: random.Random) -> Any:
    return hf.Qwen2Config(**_plain_heads(_alike(draw)), rope_parameters=_scaled(draw))


def _qwen3(draw: random.Random) -> Any:
    return hf.Qwen3Config(**_any_width(draw, _alike(draw)), rope_parameters=_scaled(draw))


def _smollm3(draw: random.Random) -> Any:
    return hf.SmolLM3Config(**_plain_heads(_alike(draw)), no_rope_layer_interval=4, rope_parameters=_scaled(draw))


def _olmo2(draw: random.Random) -> Any:
    rope = draw.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}))
    return hf.Olmo2Config(
        **_plain_heads(_alike(draw)), attention_bias=draw.random() < 0.3,
        rope_parameters={**rope, "rope_theta": _theta(draw)},
    )  # fmt: skip


def _olmo3(draw: random.Random) -> Any:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.1386294}
    theta, full = _theta(draw), draw.choice(({"rope_type": "default"}, yarn))
    rope = {"full_attention": {**full, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta}}  # fmt: skip
    return hf.Olmo3Config(
        **_plain_heads(_alike(draw)) | {"num_hidden_layers": 5}, sliding_window=draw.choice((7, 33)),
        rope_parameters=rope,
    )  # fmt: skip


def _granite(draw: random.Random) -> Any:
    return hf.GraniteConfig(
        **_plain_heads(_alike(draw)), attention_multiplier=draw.choice((0.1, 0.3)), embedding_multiplier=6.0,
        residual_multiplier=draw.choice((1.0, 0.4)), logits_scaling=draw.choice((1.0, 4.0)),
        attention_bias=draw.random() < 0.3, mlp_bias=draw.random() < 0.3,
        rope_parameters={"rope_type": "default", "rope_theta": _theta(draw)},
    )  # fmt: skip


def _gemma2(draw: random.Random) -> Any:
    return hf.Gemma2Config(
        **_any_width(draw, _alike(draw)) | {"tie_word_embeddings": True}, sliding_window=draw.choice((5, 40)),
        query_pre_attn_scalar=draw.choice((8, 16, 24)), attn_logit_softcapping=draw.choice((2.0, 50.0)),
        final_logit_softcapping=draw.choice((3.0, 30.0)),
        rope_parameters={"rope_type": "default", "rope_theta": _theta(draw)},
    )  # fmt: skip


def _gemma3_text(draw: random.Random) -> Any:
    full = draw.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}))
    rope = {"full_attention": {**full, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    return hf.Gemma3TextConfig(
        **_any_width(draw, _alike(draw)) | {"num_hidden_layers": draw.choice((3, 7)), "tie_word_embeddings": True},
        sliding_window=draw.choice((5, 40)), query_pre_attn_scalar=draw.choice((8, 16, 24)), rope_parameters=rope,
    )  # fmt: skip


def _glm4(draw: random.Random) -> Any:
    rope = {"rope_type": "default", "rope_theta": _theta(draw), "partial_rotary_factor": draw.choice((0.25, 0.5))}
    return hf.Glm4Config(**_any_width(draw, _alike(draw)), rope_parameters=rope, attention_bias=draw.random() < 0.5)


def _cohere2(draw: random.Random) -> Any:
    sizes = _plain_heads(_alike(draw)) | {"num_hidden_layers": 5, "tie_word_embeddings": True}
    return hf.Cohere2Config(
        **sizes, layer_norm_eps=draw.choice((1e-5, 1e-2)), logit_scale=draw.choice((0.25, 0.8)),
        sliding_window=draw.choice((5, 40)), attention_bias=draw.random() < 0.3,
        rope_parameters={"rope_type": "default", "rope_theta": _theta(draw)},
    )  # fmt: skip


def _phi3(draw: random.Random) -> Any:
    sizes, share = _plain_heads(_alike(draw)), draw.choice((1.0, 0.75, 0.5))
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    rope: dict[str, Any] = {"rope_type": "default"}
    if draw.random() < 0.5:
        pairs = int(head_dim * share) // 2
        rope = {"rope_type": "longrope", "short_factor": [draw.uniform(1, 2) for _ in range(pairs)],
                "long_factor": [draw.uniform(2, 9) for _ in range(pairs)]}  # fmt: skip
    return hf.Phi3Config(
        **sizes, original_max_position_embeddings=SWITCH, sliding_window=draw.choice((None, 19)),
        rope_parameters={**rope, "rope_theta": _theta(draw), "partial_rotary_factor": share},
    )  # fmt: skip


def _ministral3(draw: random.Random) -> Any:
    rope = {
        "rope_type": "yarn", "rope_theta": _theta(draw), "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": draw.choice((0.1, 0.7)),
    }  # fmt: skip
    return hf.Ministral3Config(**_any_width(draw, _alike(draw)), rope_parameters=rope)


def _gemma4_text(draw: random.Random) -> Any:
    sizes, shared = _any_width(draw, _alike(draw)), draw.random() < 0.7
    rope = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    return hf.Gemma4TextConfig(
        **sizes | {"num_hidden_layers": draw.choice((3, 7)), "tie_word_embeddings": True}, rope_parameters=rope,
        sliding_window=draw.choice((5, 40)), hidden_size_per_layer_input=0, attention_k_eq_v=shared,
        global_head_dim=draw.choice((32, 48)), num_global_key_value_heads=1 if shared else None,
        final_logit_softcapping=draw.choice((None, 30.0)),
    )  # fmt: skip


def _hybrid(
    draw: random.Random, adapted: Callable[[random.Random, dict[str, Any]], dict[str, Any]] = _any_width
) -> dict[str, Any]:
    """Sizes of hybrids, and which of their layers attend."""
    key_heads, num_layers = draw.choice((1, 2)), draw.choice((3, 4, 6))
    kinds = [draw.choice(("linear_attention", "full_attention")) for _ in range(num_layers - 2)]
    return adapted(draw, _alike(draw)) | {
        "num_hidden_layers": num_layers, "layer_types": ["linear_attention", *kinds, "full_attention"],
        "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * draw.choice((1, 2, 3)),
        "linear_key_head_dim": draw.choice((32, 64)), "linear_value_head_dim": draw.choice((32, 64)),
        "linear_conv_kernel_dim": draw.choice((3, 4)), "attention_bias": draw.random() < 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": _theta(draw), "partial_rotary_factor": 0.5},
    }  # fmt: skip


def _qwen3_5_text(draw: random.Random) -> Any:
    return hf.Qwen3_5TextConfig(**_hybrid(draw))


def _qwen3_next(draw: random.Random) -> Any:
    sizes = _experts(draw, _hybrid(draw)) | {"shared_expert_intermediate_size": draw.choice((16, 48))}
    sparse = draw.choice(({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"num_experts": 0}))
    return hf.Qwen3NextConfig(**sizes | sparse, norm_topk_prob=draw.random() < 0.7)


def _qwen3_5_moe_text(draw: random.Random) -> Any:
    sizes = _experts(draw, _hybrid(draw)) | {"shared_expert_intermediate_size": draw.choice((16, 48))}
    return hf.Qwen3_5MoeTextConfig(**sizes)


def _glm4_moe(draw: random.Random) -> Any:
    sizes = _experts(draw, _any_width(draw, _alike(draw)), "n_routed_experts")
    rope = {"rope_type": "default", "rope_theta": _theta(draw), "partial_rotary_factor": draw.choice((0.25, 0.5))}
    return hf.Glm4MoeConfig(
        **sizes, first_k_dense_replace=draw.choice((0, 1)), n_shared_experts=draw.choice((1, 2)),
        norm_topk_prob=draw.random() < 0.7, routed_scaling_factor=draw.choice((1.0, 2.5)),
        use_qk_norm=draw.random() < 0.5, attention_bias=draw.random() < 0.5, rope_parameters=rope,
    )  # fmt: skip


def _experts(draw: random.Random, sizes: dict[str, Any], count: str = "num_experts") -> dict[str, Any]:
    """Experts that are no wider than usual MLPs."""
    number = draw.choice((3, 4, 8))
    return sizes | {
        "num_hidden_layers": len(sizes.get("layer_types", ())) or draw.choice((2, 3)),
        "moe_intermediate_size": draw.choice((24, 32, 40)), count: number,
        "num_experts_per_tok": draw.choice((1, 2, 3)),
    }  # fmt: skip


def _qwen3_moe(draw: random.Random) -> Any:
    sizes = _experts(draw, _any_width(draw, _alike(draw)))
    return hf.Qwen3MoeConfig(
        **sizes, norm_topk_prob=draw.random() < 0.7, rope_parameters=_scaled(draw),
        **draw.choice(({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]})),
    )  # fmt: skip


def _mixtral(draw: random.Random) -> Any:
    sizes = _experts(draw, _any_width(draw, _alike(draw)), "num_local_experts")
    del sizes["moe_intermediate_size"]
    return hf.MixtralConfig(**sizes, sliding_window=draw.choice((None, 40)), rope_parameters=_scaled(draw))


def _olmo_hybrid(draw: random.Random) -> Any:
    theta = draw.choice((None, 10000.0))
    return hf.OlmoHybridConfig(**_hybrid(draw, lambda _, sizes: _plain_heads(sizes)) | {
        "linear_allow_neg_eigval": draw.random() < 0.7, "linear_key_head_dim": draw.choice((32, 96)),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    })  # fmt: skip


def _gpt_oss(draw: random.Random) -> Any:
    sizes = _experts(draw, _any_width(draw, _alike(draw)), "num_local_experts") | {"num_hidden_layers": 3}
    del sizes["moe_intermediate_size"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False,
            "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": _theta(draw)}  # fmt: skip
    return hf.GptOssConfig(**sizes, sliding_window=draw.choice((5, 40)), rope_parameters=yarn)


CONFIGURATIONS: dict[str, Callable[[random.Random], Any]] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "smollm3": _smollm3, "olmo2": _olmo2,
    "olmo3": _olmo3, "granite": _granite, "gemma2": _gemma2, "gemma3_text": _gemma3_text, "gemma4_text": _gemma4_text,
    "glm4": _glm4, "cohere2": _cohere2, "phi3": _phi3, "ministral3": _ministral3,
    "qwen3_5_text": _qwen3_5_text, "qwen3_next": _qwen3_next, "olmo_hybrid": _olmo_hybrid, "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral, "qwen3_5_moe_text": _qwen3_5_moe_text, "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
}  # fmt: skip
# llama.cpp's architectures, most of which have the same name, of families that are read from its files.
ARCHITECTURES = {family: family for family in CONFIGURATIONS if family != "olmo_hybrid"} | {
    "mistral": "llama", "olmo3": "olmo2", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "ministral3": "mistral3",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "glm4_moe": "glm4moe", "qwen3_moe": "qwen3moe",
    "mixtral": "llama", "qwen3_next": "qwen3next", "gpt_oss": "gpt-oss",
}  # fmt: skip


# What llama.cpp rotates by neighbouring channels, and transformers by halves.
INTERLEAVED = ("llama", "mistral", "smollm3", "granite", "ministral3", "mixtral")
# What configurations say that files do not, by llama.cpp's knowledge of a family.
KNOWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_next": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 4},
}  # fmt: skip


_HYBRIDS = ("qwen3_5", "qwen3_next")


def family_config(family: str, seed: int) -> Any:
    """A random configuration, as transformers has it."""
    return CONFIGURATIONS[family](random.Random(f"{family} {seed}"))


def family_model(family: str, seed: int, **changes: Any) -> Any:
    """A transformers model in fp32 of a random configuration, but for some `changes`, whose every parameter matters."""
    config = family_config(family, seed)
    for name, value in changes.items():
        setattr(config, name, value)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    generator, first = torch.Generator().manual_seed(seed), 0.0 if family.startswith(("gemma2", "gemma3")) else 1.0
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.1 * torch.randn(1, generator=generator))
            elif name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(first + 0.2 * noise)
            elif "embed_tokens" in name or name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)
            if name.endswith("A_log"):
                parameter.copy_(-4 + noise)  # states matter for some hundreds of tokens
    return model


def _scaling(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
    if kind := kinds.get(rope["rope_type"]):
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == gguf.RopeScalingType.YARN:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(32.0)
            if "attention_factor" in rope:  # as OLMo 3's says the one that all have
                writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def _metadata(writer: gguf.GGUFWriter, family: str, config: Any, drafting: int) -> dict[str, Any]:
    """What is written of a family besides sizes; returns small tensors."""
    rope = dict(config.rope_parameters)
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    _scaling(writer, full)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if family == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    elif family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    elif family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif family == "cohere2":
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    elif family in ("glm4", "glm4_moe", "phi3"):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * full["partial_rotary_factor"]))
    elif family == "gemma4_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_key_length_swa(_layer_sizes(config)[0].head_dim)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_embedding_length_per_layer_input(0)
        writer.add_shared_kv_layers(0)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        pairs = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
        turned = pairs // 4
        return {"rope_freqs.weight": [1.0] * turned + [1e30] * (pairs - turned)}
    elif family == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if count := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", 0) or config.intermediate_size)
    if family == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if size := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(size)
    if family.startswith(_HYBRIDS):
        return _metadata_of_hybrid(writer, config, drafting)
    if full["rope_type"] != "longrope":
        return {}
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    scale = config.max_position_embeddings / config.original_max_position_embeddings
    writer.add_rope_scaling_attn_factors((1 + np.log(scale) / np.log(config.original_max_position_embeddings)) ** 0.5)
    return {f"rope_factors_{kind}.weight": full[f"{kind}_factor"] for kind in ("short", "long")}


def _metadata_of_hybrid(writer: gguf.GGUFWriter, config: Any, drafting: int) -> dict[str, Any]:
    """What is written of hybrids."""
    recurs, count = [kind == "linear_attention" for kind in config.layer_types], config.num_hidden_layers
    interval = recurs.index(False) + 1
    writer.add_full_attention_interval(interval)
    if recurs != [(layer + 1) % interval != 0 for layer in range(count)]:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", [*recurs, *[False] * drafting])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    return {}


def _of_hybrid(name: str, values: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of a hybrid's tensor. Of value heads the first ones of all key heads come first,
    in rows, channels of the convolution and columns of the output; Qwen3-Next's stay where they are, and only gates are
    taken apart, which the first files had not; here those of an odd number of layers."""
    module, delta, part = name.partition("linear_attn.")
    if not delta or part == "norm.weight":
        return {name: values + 1 if module.endswith("norm.weight") else values}
    if part.startswith("conv1d"):
        values = values.squeeze(1)
    called, values = name.replace("dt_bias", "dt_proj.bias"), -np.exp(values) if part == "A_log" else values
    if part.startswith("in_proj_qkvz") and not config.num_hidden_layers % 2:
        shared = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        heads = values.reshape(config.linear_num_key_heads, -1, values.shape[-1])
        ends = np.cumsum((config.linear_key_head_dim, config.linear_key_head_dim, shared))
        *qkv, gates = (part.reshape(-1, values.shape[-1]) for part in np.split(heads, ends, axis=1))
        return {called.replace("qkvz", "qkv"): np.concatenate(qkv), called.replace("qkvz", "z"): gates}
    if config.model_type == "qwen3_next":
        return {called: values}
    rows = values.T if part.startswith("out_proj") else values
    both, channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim, rows[:0]
    if part.startswith(("conv1d", "in_proj_qkv")):  # those of queries and keys stay where they are
        channels, rows = rows[:both], rows[both:]
    heads = rows.reshape(config.linear_num_key_heads, -1, len(rows) // config.linear_num_value_heads, *rows.shape[1:])
    rows = np.concatenate((channels, heads.swapaxes(0, 1).reshape(rows.shape)))
    return {called: np.ascontiguousarray(rows.T if part.startswith("out_proj") else rows)}


def _layer_sizes(config: Any) -> list[Any]:
    """The configuration of each layer, which are one where all are alike."""
    count = config.num_hidden_layers
    if isinstance(config, hf.Gemma4TextConfig):
        return [config.per_layer_config[layer] for layer in range(count)]
    return [config] * count


def interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """What llama.cpp's converter does to queries and keys: channels j and j + D/2 of a head become neighbours."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _unstacked(parameters: Iterable[tuple[str, torch.Tensor]], config: Any) -> list[tuple[str, torch.Tensor]]:
    """The parameters, of experts gates and ups apart, which take turns in gpt-oss's columns."""
    found, transposed = list[tuple[str, torch.Tensor]](), config.model_type == "gpt_oss"
    for name, parameter in parameters:
        stem, of_experts, part = name.partition(".experts.")
        part, bias, _ = part.partition("_bias")
        if of_experts and part.endswith("_proj"):
            end = ".bias" if bias else ".weight"
            parameter = parameter.transpose(1, 2) if transposed and not bias else parameter
            halves = [parameter]
            if part == "gate_up_proj":
                halves = [parameter[:, at::2] for at in (0, 1)] if transposed else [*parameter.chunk(2, dim=1)]
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            found += zip((f"{stem}.experts.{one}{end}" for one in parts), halves, strict=True)
        else:
            found.append((name, parameter))
    return found


def _of_nextn(name: str) -> str | None:
    """What a tensor around a layer that guesses further tokens is called."""
    found = re.fullmatch(r"model.layers.(\d+).(eh_proj|enorm|hnorm|embed_tokens|shared_head.(?:norm|head))(.*)", name)
    return f"blk.{found[1]}.nextn.{found[2].replace('.', '_')}{found[3]}" if found else None


def write_family(
    path: Path, family: str, model: Any, *, kind: gguf.GGMLQuantizationType = F32, tokens: Sequence[str] = NO_TOKENS,
    mtp: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Path:  # fmt: skip
    """A model as llama.cpp's converter writes it, which shifts the norms of Gemma, and interleaves the rows of queries
    and keys of what it rotates by neighbouring channels; matrices as one `kind` where their rows are whole blocks. The
    tensors of a layer that guesses further tokens are named by `model.layers.N`."""
    config, arch = model.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, arch)
    head_dim = model.model.layers[-1].self_attn.head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + bool(mtp))
    if mtp:
        writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = [layer.num_key_value_heads for layer in _layer_sizes(config)]
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else kv_heads[0])
    if hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(_layer_sizes(config)[0], "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_tokenizer_model("none")
    writer.add_token_list(tokens)
    writer.add_eos_token_id(1)
    vectors = _metadata(writer, family, config, drafting=bool(mtp))
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":  # whose parameters are not in a file, but by what each frequency is divided
        plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        vectors = {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).tolist()}
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers + bool(mtp))
    ends = ("layer_scalar", "correction_bias")
    scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(ends)]
    for name, parameter in [*_unstacked(model.named_parameters(), config), *scalars, *_unstacked(mtp.items(), config)]:
        values = parameter.detach().numpy()
        if family.startswith(("gemma2", "gemma3")) and name.endswith("norm.weight"):
            values = values + 1
        if family in INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = interleaved(values, head_dim)
        name += ".weight" if name.endswith(("layer_scalar", "sinks")) else ""
        name = name.replace("_correction_bias", "_correction.bias")
        parts = _of_hybrid(name, values, config) if family.startswith(_HYBRIDS) else {name: values}
        for name, values in parts.items():
            quant = kind if values.ndim > 1 and values.shape[-1] % 32 == 0 and not name.endswith("bias") else F32
            stored = _of_nextn(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored, f"llama.cpp's {arch} has no {name}"
            writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), quant), raw_dtype=quant)
    for name, vector in vectors.items():
        writer.add_tensor(name, np.array(vector, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_stored(directory: Path, family: str, model: Any) -> Path:
    """The same in blocks that suit the family, with a tokenizer beside the file."""
    tokenizer = byte_level_tokenizer()
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    kind = gguf.GGMLQuantizationType.MXFP4 if family == "gpt_oss" else gguf.GGMLQuantizationType.Q8_0
    tokenizer.save_pretrained(directory)
    return write_family(directory / "m.gguf", family, model, kind=kind, tokens=[*words, *NO_TOKENS[len(words) :]])
