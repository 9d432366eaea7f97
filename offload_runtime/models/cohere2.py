"""Cohere 2, Command R7B and Command A: attention and MLP read one LayerNorm; three layers of four slide, and only those
rotate, neighbouring channels."""

from collections.abc import Collection
from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer, Norms, RowNorm
from offload_runtime.models.reading import attention_of, decoder, mlp_of, num_layers, refuse_set, rope, windows_by_type
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    refuse_set(fields, "use_qk_norm", "norm queries and keys")
    plain, bias = attention_of(fields), fields.flag("attention_bias")
    eps = fields.number("layer_norm_eps", at_least=0, at_most=1)
    attention = replace(plain, norm=RowNorm(eps, 0.0, centred=True), qkv_bias=bias, o_bias=bias)
    layer = DecoderLayer(attention, mlp_of(fields), Norms(before_mlp=None), parallel=True)
    period, rotary = fields.integer("sliding_window_pattern", 4), rope(fields, plain.head_dim)
    slides = [bool((number + 1) % period) for number in range(num_layers(fields))]
    windows = windows_by_type(fields, slides, fields.integer("sliding_window"))
    rotations = [None if window is None else rotary.rotation(interleaved=True) for window in windows]
    model = decoder(fields, layer, windows=windows, rotations=rotations, ropes=(rotary,))
    return replace(model, logits_divisor=1 / fields.number("logit_scale", at_least=1e-9))


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, float]:
    eps = fields.number("attention.layer_norm_epsilon")
    return {"layer_norm_eps": eps, "logit_scale": fields.number("logit_scale")}


FAMILY = Family(
    _model,
    {
        "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "eos_token_id": 255001, "tie_word_embeddings": True,
        "sliding_window": 4096, "logit_scale": 0.0625,
    },
    text_sizes={
        "vocab_size": 256000, "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64,
        "intermediate_size": 22528,
    },
    of_gguf=_of_gguf,
)  # fmt: skip
