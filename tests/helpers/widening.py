"""Tiny Llamas to widen, tiny large shapes, and what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from widening.checkpoint import WidenedCheckpoint
from widening.convert import convert_to_safetensors
from widening.shapes import WideShape

from offload_runtime.weights import CheckpointSource, checkpoint_tensors
from tests.helpers.models import VOCAB_SIZE

MHA = WideShape(96, 160, 4, 12, 12, 32)
GQA = WideShape(80, 130, 5, 16, 4, 24)
SAME_HEADS = WideShape(64, 100, 3, 8, 8, 8)
OF_FAMILY = WideShape(96, 130, 5, 6, 3, 32)  # for the Llama of `family_model`


def randomise(model: Any) -> Any:
    """Every parameter matters: attention that is not uniform, norms that differ, a residual stream that eps bends."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_((0.1 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5) * noise)
    return model.eval()


def small_model(**others: Any) -> Any:
    """Six query heads over two KV heads of eight channels, three layers, and an eps that is not negligible."""
    settings = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 42, "intermediate_size": 72, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-3, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    return randomise(LlamaForCausalLM(LlamaConfig(**(settings | others))))


class _NothingToSave:
    def save_pretrained(self, directory: Path) -> None:
        """These models have no tokenizer."""


def write(widened: WidenedCheckpoint, directory: Path) -> Path:
    """Write several fp32 shards, without a tokenizer."""
    return convert_to_safetensors(
        widened.as_source(tokenizer=_NothingToSave), directory, dtype=torch.float32, max_shard_bytes=200_000
    )


def tensors_of(source: CheckpointSource) -> dict[str, torch.Tensor]:
    """All tensors in fp32, by transformers' name; what no fill has written is NaN."""
    shapes = {name: to.shape for name, to in checkpoint_tensors(source.config()).items()}
    result = {}
    for name, fill in source.fills.items():
        result[name] = torch.full(shapes[name], float("nan"))
        fill(result[name])
    return result
