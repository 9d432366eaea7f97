"""Small random transformers models of every family, and their logits: the oracle of the decoder's tests."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.layout import Destination, ModelLayout
from offload_runtime.weights.loader import HostWeights, load_weights

VOCAB_SIZE = 101
# Where `dynamic` and `longrope` change their frequencies in the models below.
SHORT_LENGTH = 24


def model_config_from_transformers(hf_config: Any) -> ModelConfig:
    """Ours of a transformers configuration object."""
    return model_config_from_json(hf_config.to_dict(), "config.json")


def load_plain(source: CheckpointSource, dtype: torch.dtype, **options: Any) -> HostWeights:
    """Weights stored in the dtype that they are computed in; options of `load_weights`."""
    return load_weights(source, ModelLayout.of(source.config(), dtype), **options)


def assert_a_gpu_loads_the_same(source: CheckpointSource, layout: ModelLayout) -> None:
    """All bytes are those that a CPU loads, wherever the blocks stay."""
    expected, everything = load_weights(source, layout), (None, *range(len(layout.layers)))
    for held in ((), everything, everything[::2]):
        onto = {layer: torch.zeros(layout.block(layer).total_bytes, dtype=torch.uint8, device="cuda") for layer in held}
        weights = load_weights(source, layout, onto=onto, coding_device=torch.device("cuda", 0))
        for layer in everything:
            block = onto[layer].cpu() if layer in onto else weights.block(layer)
            assert torch.equal(block, expected.block(layer)), layer
        weights.close()
    expected.close()


def _sizes(**others: Any) -> dict[str, Any]:
    """Arguments that all configurations share, overridden by `others`."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    return {**common, **others}


def _rope(rope_type: str, **others: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **others}


def _of(family: str, **others: Any) -> Any:
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**_sizes(**others)))


_llama = partial(_of, "Llama")


def _half_dim_factors(low: float, high: float) -> list[float]:
    """One factor per rotary pair of a head of 12."""
    return [low + (high - low) * index / 5 for index in range(6)]


BUILDERS: dict[str, Callable[[], Any]] = {
    "llama-gqa": lambda: _llama(num_key_value_heads=2),
    "llama-gqa3-wide-heads": lambda: _llama(num_attention_heads=6, num_key_value_heads=2, head_dim=20),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "mistral-window": lambda: _of("Mistral", num_key_value_heads=2, sliding_window=9, head_dim=12),
    "qwen2": lambda: _of("Qwen2", num_key_value_heads=2),
    "qwen2-window": lambda: _of(
        "Qwen2", num_key_value_heads=1, use_sliding_window=True, sliding_window=7, max_window_layers=2
    ),
    "qwen3": lambda: _of("Qwen3", num_key_value_heads=2, head_dim=32),
    "smollm3": lambda: _of("SmolLM3", num_key_value_heads=2, no_rope_layer_interval=2, tie_word_embeddings=True),
}

# Their frequencies depend on the length of the sequence, so one forward pass over everything is no oracle for decoding.
LENGTH_DEPENDENT_BUILDERS: dict[str, Callable[[], Any]] = {
    "llama-dynamic": lambda: _llama(max_position_embeddings=SHORT_LENGTH, rope_parameters=_rope("dynamic", factor=3.0)),
    "llama-longrope": lambda: _llama(rope_parameters=_rope(
        "longrope", factor=512 / SHORT_LENGTH, original_max_position_embeddings=SHORT_LENGTH,
        short_factor=_half_dim_factors(1.0, 1.5), long_factor=_half_dim_factors(2.0, 8.0),
    )),
}  # fmt: skip


def random_model(name: str, *, seed: int = 0) -> Any:
    """A transformers model in fp32 whose every parameter matters.

    transformers starts biases at 0, norms at 1 and matrices so small that attention is uniform: an error in any of
    them would not be seen.
    """
    model = (BUILDERS | LENGTH_DEPENDENT_BUILDERS)[name]().eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed_tokens" in key or key.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)
    return model


def random_tokens(count: int, *, seed: int = 0) -> list[int]:
    """`count` token ids of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


@torch.no_grad()
def all_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' logits at every position of one forward pass: [T, V] fp32."""
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


@torch.no_grad()
def cached_logits(model: Any, pieces: Sequence[Sequence[int]]) -> torch.Tensor:
    """transformers' logits of the last token of each piece, fed one after the other through its cache: [P, V]."""
    past, logits = None, []
    for piece in pieces:
        out = model(torch.tensor([list(piece)]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits[0, -1])
    return torch.stack(logits)


def rows_of(destination: Destination, weights: HostWeights) -> torch.Tensor:
    """What a checkpoint tensor has become in host memory."""
    views = weights.views(destination.layer, destination.expert)
    return views[destination.packed].dense[destination.row_start : destination.row_end]
