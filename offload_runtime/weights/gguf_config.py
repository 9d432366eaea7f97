"""From GGUF metadata to a transformers configuration.

transformers' own reader takes the base of the rotary frequencies and drops their scaling; here the scaling types of
the format are translated too, and what cannot be expressed is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.weights.gguf_file import GgufHeader

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
# llama.cpp rotates neighbouring channels for these, so its converter interleaved the rows of q and k.
PERMUTED_ARCHITECTURES = ("llama", "smollm3")

# Reads the float32 values of a small stored tensor.
ReadValues = Callable[[str], list[float]]


@dataclass(frozen=True)
class GgufMetadata:
    """Typed access to the metadata of one architecture."""

    path: Path
    arch: str
    values: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `<arch>.<key>`; a per-layer list counts when all layers agree."""
        value = self.values.get(f"{self.arch}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedArchitectureError(
                    f"{self.path}: {self.arch}.{key} differs between layers, which is not supported: use another model"
                )
            return value[0]
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """A required number, or one with a default."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise CheckpointError(f"{self.path} lacks a valid {self.arch}.{key} in its metadata: convert it again")
        return value

    def token_ids(self) -> tuple[int | None, list[int]]:
        """Begin-of-sequence id and all ids that end an answer (end of sequence, of turn, of message)."""
        ids: list[int] = []
        for name in ("eos", "eot", "eom"):
            value = self.values.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(value, int) and value not in ids:
                ids.append(value)
        bos = self.values.get("tokenizer.ggml.bos_token_id")
        return (bos if isinstance(bos, int) else None), ids


def _attention_factor(meta: GgufMetadata, default: float) -> float:
    """llama.cpp multiplies the usual factor by its own one, under either of two keys."""
    return default * float(meta.number("rope.scaling.attn_factor", meta.number("rope.scaling.yarn_attn_factor", 1.0)))


def _explicit_factors(
    base: dict[str, Any], *, short: list[float], long: list[float], attention: float
) -> dict[str, Any]:
    """Divisors per frequency, which transformers calls longrope."""
    factors = {"short_factor": short, "long_factor": long, "factor": 1.0, "attention_factor": attention}
    return {**base, "rope_type": "longrope", **factors}


def _rope_parameters(meta: GgufMetadata, header: GgufHeader, read_values: ReadValues) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_theta": float(meta.number("rope.freq_base", 10000.0))}
    kind = meta.get("rope.scaling.type", "none")
    original = {"original_max_position_embeddings": int(
        meta.number("rope.scaling.original_context_length", meta.number("context_length")))}  # fmt: skip
    if "rope_factors_long.weight" in header.tensors and "rope_factors_short.weight" in header.tensors:
        short, long = read_values("rope_factors_short.weight"), read_values("rope_factors_long.weight")
        return _explicit_factors({**base, **original}, short=short, long=long, attention=_attention_factor(meta, 1.0))
    if "rope_freqs.weight" in header.tensors:
        # Llama 3's scaling, stored as its divisors; the parameters they came from are not in the file.
        divisors = read_values("rope_freqs.weight")
        return _explicit_factors({**base, **original}, short=divisors, long=divisors, attention=1.0)
    if kind == "none":
        return {**base, "rope_type": "default"}
    factor = float(meta.number("rope.scaling.factor"))
    if kind == "linear":
        return {**base, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return {
            **base, **original, "rope_type": "yarn", "factor": factor,
            "attention_factor": _attention_factor(meta, usual),
            "beta_fast": float(meta.number("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(meta.number("rope.scaling.yarn_beta_slow", 1.0)),
        }  # fmt: skip
    raise UnsupportedArchitectureError(
        f"{meta.path}: RoPE scaling {kind!r} is not supported: use a model with none, linear, yarn or longrope"
    )


def read_metadata(path: Path, header: GgufHeader) -> GgufMetadata:
    """Check that the file holds a model the decoder implements.

    Raises:
        UnsupportedArchitectureError: Another architecture, a mixture of experts, or a model split into several files.
    """
    arch = header.metadata.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{path}: GGUF architecture {arch!r} is not supported: use one of {', '.join(GGUF_ARCHITECTURES)} "
            "(Mistral models are stored as llama)"
        )
    meta = GgufMetadata(path, arch, header.metadata)
    if meta.get("expert_count", 0):
        raise UnsupportedArchitectureError(f"{path}: mixtures of experts are not supported: use a dense model")
    if header.metadata.get("split.count", 1) > 1:
        raise UnsupportedArchitectureError(
            f"{path} is one of {header.metadata['split.count']} files: merge them with llama.cpp's "
            "`llama-gguf-split --merge` first"
        )
    return meta


def _shape_settings(meta: GgufMetadata, header: GgufHeader) -> dict[str, Any]:
    """The sizes, from the metadata; the vocabulary's from the embedding, which may be padded."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{meta.path} has no token_embd.weight: it is not a language model's weights")
    heads, hidden = int(meta.number("attention.head_count")), int(meta.number("embedding_length"))
    num_layers = int(meta.number("block_count"))
    if heads < 1 or not 1 <= num_layers <= len(header.tensors):
        raise CheckpointError(
            f"{meta.path}: {heads} heads and {num_layers} layers with {len(header.tensors)} tensors cannot be right: "
            "download it again"
        )
    rotated = int(meta.number("rope.dimension_count", meta.number("attention.key_length", hidden // heads)))
    head_dim = int(meta.number("attention.key_length", rotated))
    if rotated != head_dim or meta.number("attention.value_length", head_dim) != head_dim:
        raise UnsupportedArchitectureError(
            f"{meta.path}: heads of {head_dim} channels of which {rotated} are rotated, or values of another size, "
            "are not supported: choose another model"
        )
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(meta.number("feed_forward_length")),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.number("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(meta.number("context_length")),
        "rms_norm_eps": float(meta.number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def hf_config_from_gguf(meta: GgufMetadata, header: GgufHeader, read_values: ReadValues) -> Any:
    """Build the transformers configuration that describes the file.

    Args:
        meta: The checked metadata.
        header: The same file's header.
        read_values: Reads a small tensor, for the rotary factors.

    Raises:
        CheckpointError: A needed entry is missing or impossible.
        UnsupportedArchitectureError: Something the decoder does not implement.
    """
    import transformers

    bos, eos = meta.token_ids()
    try:
        settings = _shape_settings(meta, header)
        rope = _rope_parameters(meta, header, read_values)
    except (ValueError, OverflowError) as error:  # a damaged header can hold infinities
        raise CheckpointError(f"{meta.path} has impossible metadata ({error}): download it again") from error
    settings |= {
        "rope_parameters": rope,
        "bos_token_id": bos,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": meta.values.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    window = meta.get("attention.sliding_window", 0)
    family = meta.arch
    if family == "llama" and window:  # only Mistral has windows among what is stored as llama
        family = "mistral"
        settings["sliding_window"] = int(window)
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
    settings["architectures"] = [f"{names[family]}ForCausalLM"]
    if family in ("llama", "qwen3", "smollm3"):
        settings["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if family in ("llama", "smollm3"):
        settings["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    try:
        return getattr(transformers, f"{names[family]}Config")(**settings)
    except Exception as error:  # its validation raises errors of several libraries
        raise CheckpointError(f"{meta.path}: transformers refused the file's metadata: {error}") from error
