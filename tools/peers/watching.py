"""What watches transformers' `generate`: when tokens come, and what is expected behind the prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor


@dataclass
class RoundClock:
    """A streamer of transformers' `generate`: it notes when the tokens of each round are there, and how many.

    `generate` hands it the prompt first, then after every pass of the target what that pass added: one token, or under
    assisted generation the accepted ones and the target's own. They come as CPU tensors, so the device is done with
    them. (Stopping criteria would not do: some versions also ask them about what is only proposed.)

    `sample_memory` also notes the bytes in use on the device beyond the `others_bytes` of other programs, a query too
    slow for a measured generation.
    """

    device: torch.device
    sample_memory: bool
    others_bytes: int = 0
    stamps_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    driver_bytes: int = 0
    _prompt_seen: bool = False

    def put(self, value: torch.Tensor) -> None:
        """Takes int64 tokens on the CPU, of batch 1, in any shape."""
        assert value.device.type == "cpu"
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.stamps_s.append(time.perf_counter())
        self.counts.append(value.numel())
        if self.sample_memory and self.device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            self.driver_bytes = max(self.driver_bytes, total_bytes - free_bytes - self.others_bytes)

    def end(self) -> None:
        """Nothing is kept back."""


class BehindPrompt(LogitsProcessor):
    """A logits processor of transformers' `generate` that changes nothing: it notes the row behind the prompt.

    An assistant is handed it as well, and is asked first: the target's row is the last of that length.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self.logits: torch.Tensor | None = None  # [V]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Tokens [1, T] and logits [1, V]; returns the latter."""
        if input_ids.shape[1] == self._prompt_tokens:
            self.logits = scores[0].clone()
        return scores
