"""What the cache of a drafter of blocks holds of each text: keys and values of the context that the target's passes
keep of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from offload_runtime_kernels.kv_blocks import RopeRows

from offload_runtime.models.dflash import BlockAttention, DFlashConfig
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.head_kv import HiddenKVState
from offload_runtime.runners.model_runner import ModelRunner


class BlockKVState(HiddenKVState):
    """Knows the texts of a drafter of blocks, whose rows are context without tokens.

    Args:
        runner: Of the drafter.
        batch: Sequences.

    Attributes:
        waiting: [batch, rows of a block, width], the newest hidden states of each text, in a tensor that never moves.
    """

    def __init__(self, runner: ModelRunner, *, batch: int) -> None:
        decoder = runner.decoder
        assert isinstance(decoder, HeadDecoder) and isinstance(decoder.head_config, DFlashConfig)
        self._decoder, self._config = decoder, decoder.head_config
        size, capacity = self._config.block_size, runner.cache.max_tokens_with_draft
        super().__init__(runner, batch=batch, most_waiting=size, capacity_tokens=capacity)
        shape = batch, size, self._config.width
        self.waiting = torch.zeros(shape, dtype=decoder.final_norm.dtype, device=runner.rope.device)

    def _waiting(self, slot: int) -> list[torch.Tensor]:
        return [self.waiting[slot, : self.num_waiting[slot]]]

    def _wait(self, slot: int, position: int, hidden: torch.Tensor) -> None:
        self.waiting[slot, self.num_waiting[slot] :][: len(hidden)] = hidden

    @torch.inference_mode()
    def _write(self, slot: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        cache, count = self._runner.cache, len(hidden)
        cache.begin_window([slot], [count])
        positions = torch.arange(count, dtype=torch.int32, device=hidden.device) + cache.length(slot)
        rope, context = self.rope_rows(positions, torch.full_like(positions, slot)), self.context(hidden)
        for index, weights in self._runner.streamer.layers(count):
            attention = self._config.layers[index].attention
            assert isinstance(attention, BlockAttention)
            attention.store(index, context, weights, rope, cache)
        cache.commit(slot, count)

    def context(self, kept: torch.Tensor) -> torch.Tensor:
        """Return what layers make keys and values from, [N, H], of what is kept of tokens [N, W]."""
        return self._config.context(kept, self._decoder.shared)

    def rope_rows(self, positions: torch.Tensor, slots: torch.Tensor) -> RopeRows:
        """Return where rows stand [N], in the cache and by what they are rotated; negative positions are padding."""
        rope = self._runner.rope
        return RopeRows(*rope.angles(positions, rope.frequencies(1)), positions, positions.clamp_min(0), slots)
