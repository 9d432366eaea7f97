"""What the cases of kernel benchmarks are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness  # noqa: F401 (finds the package, installed or not)
import torch

DEVICE = torch.device("cuda")
HEAD_DIM = 128
_CACHE_BYTES = 256_000_000  # inputs that are taken in turn add up to more than any cache holds


@dataclass(frozen=True)
class Case:
    """One shape. `kernel` and `reference` take the number of the input to work on, below `num_inputs`."""

    configuration: dict[str, Any]
    kernel: Callable[[int], object]
    reference: Callable[[int], object]
    num_inputs: int
    moved_bytes: int
    operations: int = 0
    fp32: bool = False  # whether these are multiply-adds in fp32, and not in bf16
    reference_in_graph: bool = True  # False where the reference waits for the device, which a graph cannot hold
    stored_bytes: int = 0  # of what is decoded, where that is told by the second
    over_link: bool = False  # whether what moves comes over the link, and not within the device's memory
    close: Callable[[], None] | None = None  # gives back what the garbage collector does not


Cases = Mapping[str, Sequence[partial[Case]]]  # by operation; only the one that is timed is made


def num_inputs(input_bytes: int) -> int:
    """Inputs of `input_bytes` each that together are larger than the caches, at least two, at most 64."""
    return min(64, max(2, -(-_CACHE_BYTES // input_bytes)))


def random_bf16(*shape: int) -> torch.Tensor:
    """Gaussian values of `shape` in bf16 on the GPU."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
