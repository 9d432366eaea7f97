"""transformers' offloaded KV cache: made to compute what it should, what it costs the link, and host memory.

Until 5.19 it brings the next layer's keys and values to the device without waiting for what the device still does: the
copy of the same keys to the host may not have been made, and the memory that is written to may still be read. Where the
host runs ahead, as in the passes over a long prompt's chunks, answers become noise (5.20 waits). In all versions, 5.23
included, dropping rejected proposals leaves strided views of the layers' keys on the host, which torch first copies
there, to memory that is not page-locked: ten times as long as the link takes.

While one layer computes, the next one's keys and values are copied to the device, all of them; after its new ones were
joined to them, all go back to the host. So a pass brings every layer once as long as it was before, and returns it as
long as it has become. Proposals that were rejected go there and back once, which is not counted here: as many tokens as
an assistant proposes, of a whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from common import PeerOptions
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from offload_runtime.errors import BudgetError
from offload_runtime.hardware.bench import read_host_info
from offload_runtime.models.config import ModelConfig
from offload_runtime.sizes import format_bytes

NOTE = "transformers' offloaded cache, mended: its copies wait for each other, and cropped layers are copied whole"
# More than any round of decoding reads, proposals included.
_LEAST_PIECE_TOKENS = 256


class MendedCache(DynamicCache):
    """An offloaded cache whose copies wait for each other, and whose cropped layers cross the link as they were.

    Args:
        config: transformers' configuration of the model.
    """

    layers: list[Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config=config, offloading=True)
        self.layers = [WholeLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join [B, H, T, D] new keys and values of a layer to its old ones, and begin to fetch the next layer's."""
        self.prefetch_stream.wait_stream(torch.cuda.default_stream(key_states.device))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class WholeLayer(DynamicLayer):
    """Keys and values of a layer that are fetched in one copy, what was cropped included, and cut on the device."""

    keys: torch.Tensor
    values: torch.Tensor
    uncropped: tuple[torch.Tensor, torch.Tensor] | None = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens."""
        if self.uncropped is None and self.is_initialized:
            self.uncropped = self.keys, self.values
        super().crop(tokens_to_remove)

    def prefetch(self) -> None:
        """Bring all to the device, then leave out what was dropped."""
        if self.is_initialized and self.keys.device != self.device and self.uncropped is not None:
            length = self.keys.shape[-2]
            self.keys, self.values = (
                whole.to(self.device, non_blocking=True)[..., :length, :] for whole in self.uncropped
            )
        else:
            super().prefetch()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join [B, H, T, D] new keys and values to the old ones."""
        self.uncropped = None
        return super().update(key_states, value_states, *args, **kwargs)


def offloaded_bytes(config: ModelConfig, itemsize: int, *, prompt_tokens: int, counts: Sequence[int]) -> int | None:
    """Bytes of keys and values that came to the device in all passes but the first, which reads the prompt.

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
    tokens, length = 0, prompt_tokens + counts[0] - 1  # the newest token is read by the pass behind it
    for count in counts[1:]:
        tokens += length
        length += count
    return tokens * config.kv_bytes_per_token(itemsize)


def pinned_bytes(config: ModelConfig, itemsize: int, tokens: int) -> int:
    """Page-locked bytes of the keys and values of so many tokens: torch rounds each tensor up to a power of two."""
    tensor_bytes = config.attention.kv_size * itemsize * tokens
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
