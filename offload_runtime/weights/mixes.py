"""How llama.cpp's quantiser stores each tensor of a Llama or Qwen in its usual mixes of formats."""

from __future__ import annotations

from offload_runtime.models.config import ModelConfig
from offload_runtime.weights.layout import checkpoint_tensors

# What most models are published in, the largest first.
MIXES = ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
# Query heads for each of keys from which on values are so few that they are kept in five bits: 70B's.
_SHARED_VALUES = 8
# Of blocks of 256 weights, which do not divide all rows, what stands for them there.
_WEIGHTS = 256
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def stored_kinds(config: ModelConfig, mix: str) -> dict[str, str]:
    """By transformers' name, how every matrix is stored.

    All but Q8_0 have the head, or a tied embedding, in six bits. Q4_K_M has so values and down projections of half of
    the layers, too: of the first and last eighth and every third one between (`use_more_bits` of llama.cpp's
    `llama-quant.cpp`); values of a 70B that are not have five.
    """
    assert mix in MIXES
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    found = dict[str, str]()
    for name, to in checkpoint_tensors(config).items():
        if len(to.shape) != 2:
            continue
        kind = mix.removesuffix("_M")
        if name == head and mix != "Q8_0":
            kind = "Q6_K"
        elif mix == "Q4_K_M" and name.endswith(("v_proj.weight", "down_proj.weight")):
            assert to.layer is not None
            if _more_bits(to.layer, config.num_layers):
                kind = "Q6_K"
            elif "v_proj" in name and config.attention.num_heads == _SHARED_VALUES * config.attention.num_kv_heads:
                kind = "Q5_K"
        found[name] = kind if to.shape[1] % _WEIGHTS == 0 else _SMALLER_BLOCKS.get(kind, kind)
    return found


def _more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
