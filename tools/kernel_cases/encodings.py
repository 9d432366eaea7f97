"""Decoding of stored matrices, at the shapes of Llama-2-7B and Llama-3-70B, and products with them as they are stored,
at those of Llama-3-8B.

The bound of decoding is reading what is stored and writing it decoded, that of a product reading what is stored. The
reference of a product decodes the matrix into memory and multiplies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from kernel_cases.case import DEVICE, Case, num_inputs, random_bf16
from offload_runtime_kernels.coded_bf16 import CodedRow, decode_rows_reference, decode_rows_triton, encode_rows
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks_reference, decode_blocks_triton
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.linear import linear_triton
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows, decode_scaled_triton

from offload_runtime.weights.encodings.scaled_rows import scaled_bytes, scaled_rows

# Of down, and of gate and up together.
_SHAPES = ((4096, 11008), (57344, 8192))
# Of products: qkv, o, gate and up together, down.
_PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
_PRODUCT_KINDS, _PRODUCT_ROWS = ("Q4_K", "Q8_0", "Q4_0", "Q6_K"), (1, 8, 16)
# Of AWQ and GPTQ, of compressed-tensors, FP8 of blocks and of rows, and int8.
_SCALED = (
    ScaledFormat("uint4", 1, 128, torch.float16, 1, zeros=True), ScaledFormat("uint4", 1, 128, torch.bfloat16, 8),
    ScaledFormat("FP8", 128, 128, torch.float32), ScaledFormat("FP8", 1, 1 << 16, torch.bfloat16),
    ScaledFormat("int8", 1, 1 << 16, torch.bfloat16),
)  # fmt: skip


def random_rows(kind: str, m: int, k: int) -> torch.Tensor:
    """Matrices [m, k] of random bytes, more than the caches hold: uint8 [inputs, m, row_bytes]."""
    row_bytes = FORMATS[kind].row_bytes(k)
    return torch.randint(256, (num_inputs(m * row_bytes), m, row_bytes), dtype=torch.uint8, device=DEVICE)


def make_decode_blocks(kind: str, m: int, k: int) -> Case:
    """A matrix [m, k] of random bytes."""
    form, stored = FORMATS[kind], random_rows(kind, m, k)
    out = torch.empty(m, k, dtype=torch.bfloat16, device=DEVICE)
    return Case(
        configuration={"encoding": kind, "m": m, "k": k}, kernel=lambda i: decode_blocks_triton(stored[i], form, out),
        reference=lambda i: decode_blocks_reference(stored[i], form, out), num_inputs=len(stored),
        moved_bytes=stored[0].nbytes + out.nbytes, stored_bytes=stored[0].nbytes, reference_in_graph=False,
    )  # fmt: skip


def make_gguf_linear(kind: str, rows: int, m: int, k: int) -> Case:
    """A product of `rows` rows with a matrix [m, k] of random bytes."""
    form, stored = FORMATS[kind], random_rows(kind, m, k)
    x, out, decoded = random_bf16(rows, k), random_bf16(rows, m), random_bf16(m, k)

    def decode_and_multiply(i: int) -> None:
        decode_blocks_triton(stored[i], form, decoded)
        linear_triton(x, decoded, out)

    return Case(
        configuration={"encoding": kind, "rows": rows, "m": m, "k": k},
        kernel=lambda i: gguf_linear_triton(x, stored[i], form, out), reference=decode_and_multiply,
        num_inputs=len(stored), moved_bytes=stored[0].nbytes, operations=2 * rows * m * k,
    )  # fmt: skip


def coded_rows(m: int, k: int) -> tuple[CodedRow, torch.Tensor]:
    """Matrices [m, k] of Gaussian weights in 12 bits, coded on the device, more than the caches hold."""
    row = CodedRow.of(k)
    assert row is not None
    stored = torch.empty(num_inputs(m * row.nbytes), m, row.nbytes, dtype=torch.uint8, device=DEVICE)
    for each in stored:
        failed = encode_rows((0.02 * torch.randn(m, k, device=DEVICE)).bfloat16(), row, each, each.device)
        assert failed == 0, f"{failed} rows have no room for their exceptions"
    return row, stored


def make_decode_coded(m: int, k: int) -> Case:
    """A matrix [m, k] of Gaussian weights."""
    row, stored = coded_rows(m, k)
    out = torch.empty(m, k, dtype=torch.bfloat16, device=DEVICE)
    return Case(
        configuration={"encoding": "12-bit BF16", "m": m, "k": k},
        kernel=lambda i: decode_rows_triton(stored[i], row, out),
        reference=lambda i: decode_rows_reference(stored[i], row, out), num_inputs=len(stored),
        moved_bytes=stored[0].nbytes + out.nbytes, stored_bytes=stored[0].nbytes, reference_in_graph=False,
    )  # fmt: skip


def make_coded_linear(rows: int, m: int, k: int) -> Case:
    """A product of `rows` rows with a matrix [m, k] of Gaussian weights."""
    row, stored = coded_rows(m, k)
    x, out, decoded = random_bf16(rows, k), random_bf16(rows, m), random_bf16(m, k)

    def decode_and_multiply(i: int) -> None:
        decode_rows_triton(stored[i], row, decoded)
        linear_triton(x, decoded, out)

    return Case(
        configuration={"encoding": "12-bit BF16", "rows": rows, "m": m, "k": k},
        kernel=lambda i: coded_linear_triton(x, stored[i], row, out), reference=decode_and_multiply,
        num_inputs=len(stored), moved_bytes=stored[0].nbytes, operations=2 * rows * m * k,
    )  # fmt: skip


def random_numbers(form: ScaledFormat, m: int, k: int) -> list[ScaledRows]:
    """Matrices [m, k] of random numbers with Gaussian scales, more than the caches hold."""
    nbytes = scaled_bytes(form, m, k)
    stored = torch.randint(256, (num_inputs(nbytes), nbytes), dtype=torch.uint8, device=DEVICE)
    found = [scaled_rows(each, form, m, k) for each in stored]
    for each in found:
        each.scales.normal_(std=0.02)
    return found


def make_scaled_linear(form: ScaledFormat, rows: int, m: int, k: int) -> Case:
    """A product of `rows` rows with a matrix [m, k] of random numbers."""
    stored = random_numbers(form, m, k)
    x, out, decoded = random_bf16(rows, k), random_bf16(rows, m), random_bf16(m, k)

    def decode_and_multiply(i: int) -> None:
        decode_scaled_triton(stored[i], form, 0, decoded)
        linear_triton(x, decoded, out)

    scale = f"{str(form.scale).removeprefix('torch.')} of {form.rows}x{min(form.columns, k)}"
    return Case(
        configuration={
            "encoding": form.number, "scale": scale, "zeros": form.zeros, "rows": rows, "m": m, "k": k,
        },
        kernel=lambda i: scaled_linear_triton(x, stored[i], form, out), reference=decode_and_multiply,
        num_inputs=len(stored), moved_bytes=scaled_bytes(form, m, k), operations=2 * rows * m * k,
    )  # fmt: skip


def decode_blocks() -> Iterator[Callable[[], Case]]:
    """All cases."""
    yield from (partial(make_decode_blocks, kind, *shape) for kind in FORMATS for shape in _SHAPES)


def gguf_linear() -> Iterator[Callable[[], Case]]:
    """All cases."""
    for kind, rows in product(_PRODUCT_KINDS, _PRODUCT_ROWS):
        yield from (partial(make_gguf_linear, kind, rows, *shape) for shape in _PRODUCTS)


def decode_coded() -> Iterator[Callable[[], Case]]:
    """All cases."""
    yield from (partial(make_decode_coded, *shape) for shape in _SHAPES)


def coded_linear() -> Iterator[Callable[[], Case]]:
    """All cases."""
    yield from (partial(make_coded_linear, rows, *shape) for rows in _PRODUCT_ROWS for shape in _PRODUCTS)


def scaled_linear() -> Iterator[Callable[[], Case]]:
    """All cases."""
    for form, rows in product(_SCALED, _PRODUCT_ROWS):
        yield from (partial(make_scaled_linear, form, rows, *shape) for shape in _PRODUCTS)
