"""Decoding of stored matrices, at the shapes of Llama-2-7B and Llama-3-70B.

The bound is reading what is stored and writing it decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from kernel_cases.case import DEVICE, Case, num_inputs
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks_reference, decode_blocks_triton

# Of down, and of gate and up together.
_SHAPES = ((4096, 11008), (57344, 8192))


def make_decode_blocks(kind: str, m: int, k: int) -> Case:
    """A matrix [m, k] of random bytes."""
    form = FORMATS[kind]
    stored_bytes = m * k // form.weights * form.nbytes
    count = num_inputs(stored_bytes)
    stored = torch.randint(256, (count, stored_bytes), dtype=torch.uint8, device=DEVICE)
    out = torch.empty(m, k, dtype=torch.bfloat16, device=DEVICE)
    return Case(
        configuration={"encoding": kind, "m": m, "k": k},
        kernel=lambda i: decode_blocks_triton(stored[i], form, out),
        reference=lambda i: decode_blocks_reference(stored[i], form, out),
        num_inputs=count,
        moved_bytes=stored_bytes + out.nbytes,
        stored_bytes=stored_bytes,
        reference_in_graph=False,
    )


def decode_blocks() -> Iterator[Callable[[], Case]]:
    """All cases."""
    yield from (partial(make_decode_blocks, kind, *shape) for kind in FORMATS for shape in _SHAPES)
