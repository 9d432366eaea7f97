"""Long prompts in chunks, where transformers' own `prefill_chunk_size` does not reach: assisted generation.

There (5.17 and 5.23) the target's first pass reads the whole prompt whatever the configuration says, and an assistant
that is given the same configuration reads the whole text again before each of its proposals in 5.17.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def read_in_chunks(model: PreTrainedModel, chunk: int) -> None:
    """From now on split longer inputs of the model into passes of `chunk` tokens over the same cache.

    Only batch 1 without padding, and with a cache: as `generate` calls it. Each pass is a call of its own, so that what
    pages the weights sees as many passes. The last one is as long as the logits that are asked for, at least.
    """

    def split(module: PreTrainedModel, _: tuple[()], inputs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]] | None:
        count = inputs["input_ids"].shape[1]
        if count <= chunk:
            return None
        past = inputs["past_key_values"].get_seq_length()
        rest = max(inputs.get("logits_to_keep") or count, (count - 1) % chunk + 1)
        for start in range(0, count - rest, chunk):
            piece = _piece(inputs, past, start, min(start + chunk, count - rest))
            module(**piece | {"logits_to_keep": 1})
        return (), _piece(inputs, past, count - rest, count)

    # First of all hooks: those of a system that pages weights must see passes one by one, not one inside another.
    model.register_forward_pre_hook(split, with_kwargs=True, prepend=True)


def _piece(inputs: dict[str, Any], past: int, start: int, end: int) -> dict[str, Any]:
    """The model's inputs for some of the new tokens, of which `past` are before the first."""
    found = dict(inputs)
    for name, value in inputs.items():
        if name == "attention_mask" and value is not None:
            found[name] = value[:, : past + end]  # [1, S] int64
        elif name in ("input_ids", "position_ids") and value is not None:
            found[name] = value[:, start:end].clone(memory_format=torch.contiguous_format)  # [1, T] int64
        else:
            assert not isinstance(value, torch.Tensor), f"{name} may have one row per token, too"
    return found
