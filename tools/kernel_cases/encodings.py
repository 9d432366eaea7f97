"""Decoding of stored matrices, at the shapes of Llama-2-7B and Llama-3-70B.

The bound is reading what is stored and writing it decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from kernel_cases.case import DEVICE, Case, num_inputs
from offload_runtime_kernels.coded_bf16 import CodedRow, decode_rows_reference, decode_rows_triton, encode_rows
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


def make_decode_coded(m: int, k: int) -> Case:
    """A matrix [m, k] of Gaussian weights in 12 bits, coded on the device."""
    row = CodedRow.of(k)
    assert row is not None
    count = num_inputs(m * row.nbytes)
    stored = torch.empty(count, m, row.nbytes, dtype=torch.uint8, device=DEVICE)
    for each in stored:
        failed = encode_rows((0.02 * torch.randn(m, k, device=DEVICE)).bfloat16(), row, each, each.device)
        assert failed == 0, f"{failed} rows have no room for their exceptions"
    out = torch.empty(m, k, dtype=torch.bfloat16, device=DEVICE)
    return Case(
        configuration={"encoding": "12-bit BF16", "m": m, "k": k},
        kernel=lambda i: decode_rows_triton(stored[i], row, out),
        reference=lambda i: decode_rows_reference(stored[i], row, out),
        num_inputs=count,
        moved_bytes=stored[0].nbytes + out.nbytes,
        stored_bytes=stored[0].nbytes,
        reference_in_graph=False,
    )


def decode_blocks() -> Iterator[Callable[[], Case]]:
    """All cases."""
    yield from (partial(make_decode_blocks, kind, *shape) for kind in FORMATS for shape in _SHAPES)


def decode_coded() -> Iterator[Callable[[], Case]]:
    """All cases."""
    yield from (partial(make_decode_coded, *shape) for shape in _SHAPES)
