"""What this machine does at best, measured beside the rows: the bounds of a pass come from nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from timing import measure_copy_gbps, measure_link_gbps, measure_matmul_flops

from offload_runtime.config import GB, ModelConfig
from offload_runtime.weights import layer_layout


@dataclass(frozen=True)
class Speeds:
    """Of the device, but for the link.

    Attributes:
        memory_gbps: A copy within the device's memory, read and write together.
        flops: Operations per second of a large product of matrices in the dtype of the weights.
        memcpy_gbps: A copy from page-locked memory; None without a link.
    """

    memory_gbps: float
    flops: float
    memcpy_gbps: float | None

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> Speeds:
        """Measure them; takes a second."""
        return cls(measure_copy_gbps(device), measure_matmul_flops(device, dtype), measure_link_gbps(device))


@dataclass(frozen=True)
class PassNeeds:
    """What a pass cannot do without, whoever computes it.

    Attributes:
        link_bytes: Over the link.
        memory_bytes: Weights, each read once, layers and head.
        operations: Of the products with them, for every token of the window.
    """

    link_bytes: int
    memory_bytes: int
    operations: float

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, *, resident_layers: int, window_tokens: float) -> PassNeeds:
        """By the model's shape. Attention and its keys are left out: behind a short prompt they are little."""
        layer_bytes, head = layer_layout(config, dtype).total_bytes, config.vocab_size * config.hidden_size
        elements = config.num_layers * _matrix_elements(config, dtype) + head
        return cls(
            link_bytes=(config.num_layers - resident_layers) * layer_bytes,
            memory_bytes=config.num_layers * layer_bytes + head * dtype.itemsize,
            operations=2 * window_tokens * elements,
        )


def _matrix_elements(config: ModelConfig, dtype: torch.dtype) -> int:
    """Weights in the matrices of a layer."""
    return sum(math.prod(spec.shape) for spec in layer_layout(config, dtype).tensors if len(spec.shape) == 2)


@dataclass(frozen=True)
class Bound:
    """The least that a pass takes: the longest of its parts, which go on beside each other."""

    link_s: float
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """Of a pass."""
        return max(self.link_s, self.memory_s, self.compute_s)

    @property
    def bound_by(self) -> str:
        """`link`, `memory` or `compute`."""
        return max(("link", "memory", "compute"), key=lambda name: getattr(self, f"{name}_s"))


def bound_of(needs: PassNeeds, speeds: Speeds, link_peak_gbps: float | None) -> Bound:
    """What the machine's speeds allow.

    Layers arrive while others compute, so nothing is added up: a sum could be beaten.

    Args:
        needs: Of the pass.
        speeds: Of the device.
        link_peak_gbps: Of back-to-back copies; None where nothing is streamed.
    """
    assert (needs.link_bytes == 0) or link_peak_gbps is not None
    return Bound(
        link_s=needs.link_bytes / (link_peak_gbps * GB) if link_peak_gbps else 0.0,
        memory_s=needs.memory_bytes / (speeds.memory_gbps * GB),
        compute_s=needs.operations / speeds.flops,
    )
