"""Rotary position embedding: frequencies from transformers' own initialisers, angles in fp32.

`dynamic` and `longrope` frequencies depend on a sequence length. A row then uses max(its position + 1, the length of
the prompt it was prefilled with): what plain decoding through transformers uses, and independent of the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_runtime.models.config import ModelConfig, Rope
from offload_runtime.stream.device import upload


class _Frequencies:
    """Those of one rotation: [R/2] fp32 on the host, of a sequence of a length."""

    def __init__(self, rope: Rope, config: ModelConfig) -> None:
        self._parameters = dict(rope.parameters)
        self.kind: str = self._parameters["rope_type"]
        # Not at the top: transformers takes longer to import than a plan may take, and a model's own class much longer.
        from transformers import PreTrainedConfig

        self._hf_config = PreTrainedConfig(
            hidden_size=rope.channels, num_attention_heads=1, num_key_value_heads=1, head_dim=rope.channels,
            max_position_embeddings=config.max_position_embeddings, rope_parameters=self._parameters,
        )  # fmt: skip
        original = self._parameters.get("original_max_position_embeddings")
        lengths = {"dynamic": config.max_position_embeddings, "longrope": original}
        self.short_length: int | None = lengths.get(self.kind)  # above this length the frequencies change

    def of(self, length: int | None) -> tuple[torch.Tensor, float]:
        """They, and what cosines and sines are multiplied by: the attention scaling."""
        if self.kind == "default":  # transformers keeps this one inside each model
            exponents = torch.arange(0, self._hf_config.head_dim, 2, dtype=torch.float) / self._hf_config.head_dim
            return 1.0 / (float(self._parameters["rope_theta"]) ** exponents), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, scaling = ROPE_INIT_FUNCTIONS[self.kind](self._hf_config, torch.device("cpu"), seq_len=length)
        return inv_freq.float(), float(scaling)


class RopeTable:
    """Cosines and sines of a model's rotary embeddings: P pairs of channels, of all of its rotations in a row.

    Args:
        config: The model's shape and rope parameters.
        device: Where the angles are computed.
        fixed_length: Always use the frequencies of a sequence of so many tokens, for a cache that never holds more.

    Attributes:
        device: Where the angles are computed.
        scaling: What cosines and sines are multiplied by, [P] fp32, device.
    """

    def __init__(self, config: ModelConfig, device: torch.device, *, fixed_length: int | None = None) -> None:
        self.device = device
        self._each = [_Frequencies(rope, config) for rope in config.ropes]
        self._fixed_length = fixed_length
        found = [one.of(None) for one in self._each]
        self.scaling = upload(torch.cat([torch.full_like(inv_freq, scaling) for inv_freq, scaling in found]), device)
        self._inv_freq = upload(torch.cat([inv_freq for inv_freq, _ in found]), device)  # [P] fp32, device
        if fixed_length is not None:
            self._inv_freq = self._made(fixed_length)

    def frequencies(self, length: int) -> torch.Tensor:
        """Return the frequencies of a sequence of `length` tokens: [P] fp32, device. Never waits for the device."""
        return self._made(length) if self.frequency_set(length) else self._inv_freq

    def angles(self, positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines for every row.

        Args:
            positions: [N] int32, device; negative for padding.
            inv_freq: [P] or [N, P] fp32, device: the frequencies of all rows, or those of each.

        Returns:
            cos, sin: [N, P] fp32, device, multiplied by the attention scaling.
        """
        angle = positions.clamp_min(0).float()[:, None] * inv_freq
        return angle.cos() * self.scaling, angle.sin() * self.scaling

    def frequency_set(self, length: int) -> int:
        """Return which frequencies a prompt of `length` tokens is rotated with: equal numbers mean equal
        frequencies."""
        if self._fixed_length is not None:
            return 0
        longer = {one.kind for one in self._each if one.short_length is not None and length > one.short_length}
        return length if "dynamic" in longer else len(longer)

    def row_frequencies(self, host_positions: Sequence[int], prompt_length: int) -> torch.Tensor:
        """Return the frequencies of rows: [P] fp32, device, or [N, P] where rows differ.

        Args:
            host_positions: Of the rows, on the host; negative for padding.
            prompt_length: Length of the sequence a prefill reaches; 0 for a decoding window.
        """
        if not self.frequency_set(max(max(host_positions, default=0) + 1, prompt_length)):
            return self._inv_freq
        lengths = [max(position + 1, prompt_length) for position in host_positions]
        sets = [self.frequency_set(length) for length in lengths]
        length_of_set = dict(zip(sets, lengths, strict=True))
        tables = torch.stack([self.frequencies(length) for length in length_of_set.values()])
        row_of_set = {number: row for row, number in enumerate(length_of_set)}
        return tables[torch.tensor([row_of_set[number] for number in sets], device=self.device)]

    def _made(self, length: int) -> torch.Tensor:
        return upload(torch.cat([one.of(length)[0] for one in self._each]), self.device)


class RowFrequencies:
    """Frequencies of several rows, each of a sequence of a length of its own, in a tensor that never moves: captured
    steps read it.

    Args:
        rope: Of the model.
        rows: How many there are.

    Attributes:
        tensor: [R, P] fp32, device.
    """

    def __init__(self, rope: RopeTable, rows: int) -> None:
        self._rope, self._sets = rope, [0] * rows
        self.tensor = rope.frequencies(1).repeat(rows, 1)

    def set(self, row: int, length: int) -> None:
        """Rotate a row from now on as a sequence of `length` tokens is. Enqueued on the current stream."""
        chosen = self._rope.frequency_set(length)
        if chosen != self._sets[row]:
            self.tensor[row].copy_(self._rope.frequencies(length))
            self._sets[row] = chosen

    def set_rows(self, positions: Sequence[int]) -> None:
        """Rotate the first rows from now on as the last ones of sequences that end at these positions; negative ones
        are padding."""
        if not self._rope.frequency_set(max(positions, default=0) + 1) and not any(self._sets):
            return  # as of all texts that are not long
        for row, position in enumerate(positions):
            if position >= 0:
                self.set(row, position + 1)
