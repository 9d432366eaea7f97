"""What is done to logits before the temperature: a request's logit bias, then its penalties for tokens it has already.

    x[v] += bias[v]
    x[v]  = x[v] / r  if x[v] > 0 else  x[v] * r,     for v in prompt or answer           (repetition, CTRL)
    x[v] -= frequency * (times that v is in the answer)  +  presence * (v is in the answer)

In vLLM's order. The answer of a row ends where the row's token is chosen: the tokens that are known, and then those of
the row's own path through its window. So a row's logits are those of plain decoding, whatever else is proposed. Before
an answer has as many tokens as it must have, what would end it is -inf.

Counts are integers and everything else is IEEE-exact, each operation rounded by itself, so that the CPU and the GPU
have the same bits. Nothing here synchronises with the host, and nothing is computed where nobody asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from offload_runtime.memory import overwrite, pack, unpack, upload
from offload_runtime.params import MOST_BIASED, SamplingParams


class LogitAdjustments:
    """Bias and penalties of every slot, and how often each slot's tokens occur.

    The counts take 5 bytes a slot and entry of the vocabulary on the device, from the first penalty on.

    Args:
        num_slots: How many there are; none has any until it is assigned.
        device: Where the logits are.

    Attributes:
        first_ends: By slot whose answer must have some tokens, the position from which on it may end, and what it ends
            with. It binds the target alone, as penalties do.
        biased: Whether any slot has a bias. Its tensors never move, so that CUDA graphs may hold them.
        penalised: Whether any slot has penalties. Those are never part of a graph.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.biased = self.penalised = False
        self.first_ends: dict[int, tuple[int, Tensor]] = {}
        self._num_slots, self._device = num_slots, device
        self._of_slots: dict[int, SamplingParams] = {}  # of those that are held
        self._repeats = False  # whether any slot has a repetition penalty
        self._bias: tuple[Tensor, Tensor] | None = None  # [S, MOST_BIASED] int32 tokens and fp32 biases, 0 behind them
        self._penalties: Tensor | None = None  # [S, 3] fp32: repetition, frequency, presence
        self._counts: tuple[Tensor, Tensor] | None = None  # [S, V]: int32 times in the answer; bool in the prompt
        self._num_seen: dict[int, int] = {}  # by slot, tokens that are counted or wait for it
        self._new_prompts: dict[int, set[int]] = {}
        self._new_tokens: dict[int, list[int]] = {}

    def assign(self, slot: int, params: SamplingParams) -> None:
        """From here on a slot has these; what is counted of it stays until it begins anew. Enqueued on the current
        stream."""
        self._of_slots[slot] = params
        self._look_at_slots()
        if params.biases and self._bias is None:
            shape = self._num_slots, MOST_BIASED
            self._bias = _zeros(shape, torch.int32, self._device), _zeros(shape, torch.float32, self._device)
        if self._bias is not None:
            for kept, item in zip(self._bias, (0, 1), strict=True):
                row = [pair[item] for pair in params.biases] + [0] * (MOST_BIASED - len(params.biases))
                overwrite(kept[slot], torch.tensor(row, dtype=kept.dtype))
        if params.penalised and self._penalties is None:
            self._penalties = _zeros((self._num_slots, 3), torch.float32, self._device)
            self._penalties[:, 0] = 1.0
        if self._penalties is not None:
            each = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            overwrite(self._penalties[slot], torch.tensor(each, dtype=torch.float32))

    def forbid_ends(self, slot: int, before: int, tokens: Collection[int]) -> None:
        """A slot's answer may not have any of these tokens at positions below `before`."""
        self.first_ends[slot] = before, upload(torch.tensor(sorted(tokens), dtype=torch.int64), self._device)

    def release(self, slot: int) -> None:
        """Nobody holds a slot any more."""
        self._of_slots.pop(slot, None)
        self.first_ends.pop(slot, None)
        for kept in (self._num_seen, self._new_prompts, self._new_tokens):
            kept.pop(slot, None)
        self._look_at_slots()

    def _look_at_slots(self) -> None:
        self.biased = any(one.biases for one in self._of_slots.values())
        self.penalised = any(one.penalised for one in self._of_slots.values())
        self._repeats = any(one.repetition_penalty != 1 for one in self._of_slots.values())

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        """A slot's sequence begins with these tokens, which are none of its answer."""
        if self._of_slots[slot].penalised:
            self._num_seen[slot] = len(prompt)
            self._new_prompts[slot], self._new_tokens[slot] = set(prompt), []

    def see(self, slot: int, tokens: Sequence[int]) -> None:
        """A slot's whole sequence, which has grown; what is new is of its answer."""
        if self._of_slots[slot].penalised:
            assert slot in self._num_seen, "penalties are counted from the prompt on"
            self._new_tokens[slot] += tokens[self._num_seen[slot] :]
            self._num_seen[slot] = len(tokens)

    def apply(
        self, logits: Tensor, slots: Tensor, paths: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Logits as they are sampled from.

        Args:
            logits: [R, V] bf16, fp16 or fp32; stays as it is.
            slots: [R] int32/int64.
            paths: [R, A] int32: what the sequence goes on with behind the tokens that were seen, to each row; -1 where
                there is less. None leaves penalties out.
            positions: [R] of the tokens being chosen; None lets answers end.

        Returns:
            [R, V] fp32, or `logits` where nobody has bias or penalties.
        """
        if self.biased:
            logits = self._with_bias(logits.float(), slots.long())
        if self.penalised and paths is not None:
            logits = self._with_penalties(logits.float(), slots.long(), paths)
        if positions is not None:
            for slot, (before, tokens) in self.first_ends.items():
                is_early = (slots == slot).logical_and_(positions < before)[:, None]
                ends = logits.index_select(1, tokens).masked_fill(is_early, -torch.inf)
                logits = logits.index_copy(1, tokens, ends)
        return logits

    def _with_bias(self, logits: Tensor, slots: Tensor) -> Tensor:
        assert self._bias is not None
        tokens, biases = self._bias[0][slots].long(), self._bias[1][slots]  # [R, MOST_BIASED]
        last = logits.shape[1] - 1  # of a draft, which may have fewer tokens than the target
        return logits.scatter_add(1, tokens.clamp_max(last), biases.masked_fill(tokens > last, 0.0))

    def _with_penalties(self, logits: Tensor, slots: Tensor, paths: Tensor) -> Tensor:
        """At most 22 bytes a logit besides the logits, where plans have 24 for rows that are sampled together."""
        assert self._penalties is not None
        answered, prompted = self._counted(logits.shape[1])
        repetition, frequency, presence = self._penalties[slots].split(1, dim=1)  # [R, 1]
        counts = answered[slots].scatter_add_(1, paths.clamp_min(0).long(), (paths >= 0).int())  # [R, V]
        if self._repeats:
            found = prompted[slots].logical_or_(counts > 0)
            # A tensor divides a tensor: by a number CUDA would multiply with its inverse.
            penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(found, penalised, logits)
            del found, penalised
        # The product is rounded before it is subtracted, as nothing fuses the two.
        logits = logits - counts * frequency
        return logits.sub_((counts > 0) * presence)

    def _counted(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Counts of all tokens that were seen, in one upload where some are new."""
        if self._counts is None:
            shape = self._num_slots, vocab_size
            self._counts = _zeros(shape, torch.int32, self._device), _zeros(shape, torch.bool, self._device)
        answered, prompted = self._counts
        for slot in self._new_prompts:
            answered[slot].zero_()
            prompted[slot].zero_()
        of_prompts = [slot * vocab_size + token for slot, new in self._new_prompts.items() for token in new]
        of_answers = [slot * vocab_size + token for slot, new in self._new_tokens.items() for token in new]
        if of_prompts or of_answers:
            sizes = [len(of_prompts), len(of_answers)]
            marked, counted = unpack(upload(pack([of_prompts, of_answers]), self._device), sizes)
            prompted.view(-1).index_fill_(0, marked.long(), True)
            answered.view(-1).scatter_add_(0, counted.long(), torch.ones_like(counted))
        self._new_prompts, self._new_tokens = {}, {slot: [] for slot in self._num_seen}
        return self._counts


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that may be written to in inference mode and outside of it, wherever it is made."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)
