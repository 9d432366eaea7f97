"""OLMo hybrid: three of four layers are gated delta layers, normed before their blocks, the fourth is one of OLMo 2."""

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.gated_delta import DeltaModules, GatedDelta
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.olmo2 import layer_of
from offload_runtime.models.qwen3_5_text import delta_of, linear_layers
from offload_runtime.models.reading import attention_of, decoder, num_layers, rope
from offload_runtime.models.registry import Family

_MODULES = DeltaModules(("q_proj", "k_proj", "v_proj"), "g_proj", ("b_proj", "a_proj"), "o_norm", "o_proj")
_HEAD_EPS = 1e-5  # whatever that of the other norms is


def _with_heads(fields: Fields) -> Fields:
    """What the configuration says, and the sizes of heads that it leaves out."""
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    key_heads = fields.integer("linear_num_key_heads", num_heads)
    key_dim = fields.integer("linear_key_head_dim", 3 * hidden // (4 * key_heads))
    sizes = {
        "linear_num_key_heads": key_heads, "linear_num_value_heads": num_heads, "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
    }  # fmt: skip
    return Fields(fields.where, {**fields.values, **{name: sizes[name] for name in sizes if name not in fields}})


def _model(fields: Fields) -> ModelConfig:
    layer, count, stated = layer_of(fields), num_layers(fields), fields.mapping("rope_parameters")
    rotates = stated.get("rope_theta", fields.values["rope_theta"]) is not None  # those that were published do not
    rotary = rope(fields, attention_of(fields).head_dim, None if rotates else {"rope_theta": 10000.0})
    fields, norm = _with_heads(fields), layer.attention.norm
    shape = delta_of(fields, beta_scale=2.0 if fields.flag("linear_allow_neg_eigval") else 1.0)
    # transformers keeps A_log in fp32 here, and of Qwen's models in the run's dtype.
    delta = GatedDelta(layer.attention.hidden_size, norm, shape, _HEAD_EPS, _MODULES, exact_rates=True)
    others = dict.fromkeys(linear_layers(fields, min(4, count)), DecoderLayer(delta, layer.mlp))
    return decoder(fields, layer, rotations=None if rotates else [None] * count, ropes=(rotary,), others=others)


FAMILY = Family(
    _model, {"max_position_embeddings": 65536, "eos_token_id": 100257},
    joined={
        "input_layernorm.weight": ("attention_layer_norm.weight",),
        "post_attention_layernorm.weight": ("feedforward_layer_norm.weight",),
        "conv1d.weight": ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
    },
)  # fmt: skip
