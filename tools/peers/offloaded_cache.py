"""What transformers' offloaded KV cache costs the link, told from the lengths of its passes, and host memory.

`DynamicCache(offloading=True)` (5.17 and 5.23): while one layer computes, the next one's keys and values are copied to
the device, all of them; after its new ones were joined to them, all go back to the host. So a pass brings every layer
once as long as it was before, and returns it as long as it has become. Proposals that were rejected go there and back
once (`mended_cache`), which is not counted here: as many tokens as an assistant proposes, of a whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from common import PeerOptions
from runs import KVTraffic
from transformers import PreTrainedModel

from offload_runtime.config import ModelConfig, format_bytes
from offload_runtime.errors import BudgetError
from offload_runtime.hardware.host_info import read_host_info

# More than any round of decoding reads, proposals included.
_LEAST_PIECE_TOKENS = 256


def offloaded_traffic(
    config: ModelConfig, itemsize: int, *, prompt_tokens: int, counts: Sequence[int]
) -> KVTraffic | None:
    """Of all passes but the first, which reads the prompt.

    Args:
        config: The model's shape.
        itemsize: Bytes of one number of keys and values.
        prompt_tokens: Of the prompt.
        counts: Tokens that each round gave.

    Returns:
        None for a model with sliding windows: what their layers keep depends on more than lengths.
    """
    if any(window is not None for window in config.layer_windows):
        return None
    per_token = config.kv_bytes_per_token(itemsize)
    to_device = to_host = 0
    length = prompt_tokens + counts[0] - 1  # the newest token is read by the pass behind it
    for count in counts[1:]:
        to_device += length * per_token
        length += count
        to_host += length * per_token
    return KVTraffic(to_device, to_host)


def pinned_bytes(config: ModelConfig, itemsize: int, tokens: int) -> int:
    """Page-locked bytes of the keys and values of so many tokens: torch rounds each tensor up to a power of two."""
    tensor_bytes = config.kv_size * itemsize * tokens
    return 2 * config.num_layers * (1 << (tensor_bytes - 1).bit_length())


def require_host_memory(options: PeerOptions) -> None:
    """Refuse a cache that this machine cannot hold, before anything is loaded.

    Raises:
        BudgetError: Less memory is there than the cache takes when it doubles for the last time.
    """
    needed_bytes, ram_bytes = 3 * _cache_bytes(options) // 2, read_host_info().ram_bytes
    if needed_bytes > ram_bytes:
        raise BudgetError(
            f"transformers' offloaded KV cache takes up to {format_bytes(needed_bytes)} of page-locked memory, this "
            f"machine has {format_bytes(ram_bytes)}: lower --prompt-tokens, or leave this system out"
        )


def return_outgrown_blocks(model: PreTrainedModel, options: PeerOptions) -> str | None:
    """See to it that a cache that grows chunk by chunk fits host memory; says what was done about it, None for nothing.

    torch keeps page-locked blocks that a growing cache has left behind for others of the same size, which never come:
    in the end they are as much again as the cache itself. Where that is not free they are returned before each pass
    over a piece of the prompt; then at most half as much is left over.
    """
    if 2 * _cache_bytes(options) <= read_host_info().available_bytes:
        return None
    model.register_forward_pre_hook(_return_blocks, with_kwargs=True)
    return "page-locked blocks that the growing cache has left are returned between the pieces of a prompt"


def _cache_bytes(options: PeerOptions) -> int:
    return pinned_bytes(options.source.config(), options.dtype.itemsize, options.context_tokens)


def _return_blocks(model: PreTrainedModel, _: tuple[()], inputs: dict[str, Any]) -> None:
    """Not before passes of a few tokens: decoding needs its spare blocks again."""
    if inputs["input_ids"].shape[1] >= _LEAST_PIECE_TOKENS:
        torch._C._host_emptyCache()
