"""Sampling of rows whose slots differ in nothing but their noise ids, as a batch of one prompt's requests does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from offload_runtime_kernels.gumbel_argmax import gumbel_noise, noise_keys

from offload_runtime import sampling, speculation
from offload_runtime.model import Window
from offload_runtime.params import SamplingParams
from offload_runtime.runners import decided
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import DraftRequest, Proposer, StepResult, still_computing


def numbered(params: SamplingParams, count: int) -> list[SamplingParams]:
    """One request's options for `count` requests, of noise ids 0, 1, …"""
    return [replace(params, noise_id=number) for number in range(count)]


def slots_of(params: SamplingParams, count: int = 1, device: Any = "cpu") -> SlotSampling:
    """The slots of `numbered` requests."""
    return SlotSampling.of(numbered(params, count), torch.device(device))


def _enough(params: SamplingParams | Sequence[SamplingParams], slots: torch.Tensor) -> SlotSampling:
    requests = numbered(params, int(slots.max()) + 1) if isinstance(params, SamplingParams) else params
    return SlotSampling.of(requests, slots.device)


def sample(logits: torch.Tensor, params: Any, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`sampling.sample` for one request's options, or those of each slot."""
    return sampling.sample(logits, _enough(params, slots), positions, slots)


def perturbed_logits(logits: torch.Tensor, params: Any, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`sampling.perturbed_logits`, likewise."""
    return sampling.perturbed_logits(logits, _enough(params, slots), positions, slots)


def noise(seed: int, positions: torch.Tensor, noise_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] fp32, the noise of one seed."""
    keys = noise_keys([(1.0, seed, number) for number in range(int(noise_ids.max()) + 1)]).to(positions.device)
    return gumbel_noise(positions, noise_ids, keys, vocab_size=vocab_size)


def run_step(target: Any, params: Any, proposer: Proposer, requests: Sequence[DraftRequest], **options: Any) -> Any:
    """`speculation.run_step` for one request's options, numbered, or those of each slot."""
    return speculation.run_step(target, slots_for(target, params), proposer, requests, **options)


def slots_for(target: Any, params: Any) -> SlotSampling:
    """Slots where a target's logits will be, for one request's options, numbered, or those of each slot; waits for the
    device."""
    norm: torch.Tensor | None = getattr(getattr(target, "decoder", None), "final_norm", None)
    device = torch.device("cpu") if norm is None else norm.device
    return SlotSampling.of(numbered(params, 8) if isinstance(params, SamplingParams) else params, device)


class Decoder:
    """Decodes one slot step by step, as the token loop does it.

    Args:
        target: Verifies windows; its committed tokens are all but the last.
        proposer: Guesses.
        params: How target and draft choose tokens.
        slot: Batch row in the target's cache.
        watch: As for `run_step`.
    """

    def __init__(
        self, target: Any, proposer: Proposer, params: SamplingParams, *, slot: int = 0, watch: Any = still_computing
    ) -> None:
        self._target, self._proposer, self._slot, self._watch = target, proposer, slot, watch
        self._params = numbered(params, slot + 1)

    def prepare(self, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """Have the proposer do what would hold up the first proposals."""
        self._proposer.prepare(self._slot, tokens)
        self._proposer.ahead(self._watch(logits))

    def first_token(self, logits: torch.Tensor) -> int:
        """The token behind a prefill."""
        committed = self._target.cache.length(self._slot) - 1
        sampling = slots_for(self._target, self._params)
        (token,) = decided(logits, sampling, [Window((0,))], [self._slot], [committed]).tokens()
        return token

    def step(self, tokens: Sequence[int], gamma: int, tree_nodes: int | None = None) -> StepResult:
        """One step behind `tokens`."""
        request = DraftRequest(self._slot, tokens, gamma, tree_nodes)
        (result,) = run_step(self._target, self._params, self._proposer, [request], watch=self._watch)
        return result
