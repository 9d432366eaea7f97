"""A Llama of any shape whose weights cost no time to make: one block of Gaussian numbers, over and over."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from widening.gaussian import fill_gaussian, named_generator
from widening.shapes import WideShape
from wordless_llama import WordlessLlama

_BLOCK_ELEMENTS = 1 << 20
VOCAB_SIZE = 32000


def repeated_llama(shape: WideShape, *, context_tokens: int, vocab_size: int = VOCAB_SIZE) -> WordlessLlama:
    """Weights without a language.

    Args:
        shape: Of the decoder.
        context_tokens: Longest context.
        vocab_size: Rows of embedding and head.
    """
    hf_config = LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=context_tokens, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    block = torch.empty(_BLOCK_ELEMENTS, dtype=torch.bfloat16)
    fill_gaussian(block, named_generator(torch.device("cpu"), "repeated"), mean=0.0)

    def fill(name: str, out: torch.Tensor) -> None:
        if out.dim() == 1:  # Llama's only vectors are norms
            out.fill_(1)
            return
        for part in out.view(-1).split(_BLOCK_ELEMENTS):
            part.copy_(block[: part.numel()])

    return WordlessLlama(hf_config, fill, reference="repeated random weights")
