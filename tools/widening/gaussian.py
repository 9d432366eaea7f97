"""Random numbers of made-up weights: seeded by words, drawn wherever it is fastest."""

from __future__ import annotations

import hashlib

import torch

_STD = 0.02
_CHUNK_ELEMENTS = 1 << 22  # random numbers drawn at a time: 16 MiB of fp32


def named_generator(device: torch.device, *words: object) -> torch.Generator:
    """A generator seeded by words, so that each tensor's numbers depend on its name alone."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fill_gaussian(out: torch.Tensor, generator: torch.Generator, *, mean: float) -> None:
    """Numbers of std 0.02 around `mean`, made on the generator's device, into a host tensor of any shape and dtype."""
    flat = out.view(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        numbers = torch.randn(part.numel(), generator=generator, device=generator.device)
        part.copy_(numbers.mul_(_STD).add_(mean).to(out.dtype))
