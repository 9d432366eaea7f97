"""Sampling of rows whose slots differ in nothing but their noise ids, as a batch of one prompt's requests does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from offload_runtime_kernels.gumbel_argmax import gumbel_noise, noise_keys
from transformers.generation import logits_process as warpers

from offload_runtime import sampling
from offload_runtime.params import SamplingParams
from offload_runtime.sampling import SlotSampling


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


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits [R, V] after transformers' temperature and filters."""
    found = warpers.TemperatureLogitsWarper(params.temperature)(None, logits)
    for make, value, off in (
        (warpers.TopKLogitsWarper, params.top_k, 0), (warpers.TopPLogitsWarper, params.top_p, 1.0),
        (warpers.MinPLogitsWarper, params.min_p, 0.0),
    ):  # fmt: skip
        found = found if value == off else make(value)(None, found)
    return found


def noise(seed: int, positions: torch.Tensor, noise_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] fp32, the noise of one seed."""
    keys = noise_keys([(1.0, seed, number) for number in range(int(noise_ids.max()) + 1)]).to(positions.device)
    return gumbel_noise(positions, noise_ids, keys, vocab_size=vocab_size)
