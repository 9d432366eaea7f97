"""Decoding of stored matrices, at the shapes of Llama-2-7B and Llama-3-70B, and products with them as they are stored,
at those of Llama-3-8B.

The bound of decoding is reading what is stored and writing it decoded, that of a product reading what is stored. The
reference of a product decodes the matrix into memory and multiplies there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from kernel_cases.case import DEVICE, Case, Cases, num_inputs, random_bf16
from offload_runtime_kernels.coded_bf16 import CodedRow, decode_rows_reference, decode_rows_triton, encode_rows
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks_reference, decode_blocks_triton, pack_rows
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.linear import linear_triton
from offload_runtime_kernels.low_bit_copy import COPY, quantise
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import (
    ScaledFormat,
    ScaledRows,
    decode_scaled_reference,
    decode_scaled_triton,
    pack_numbers,
)

from offload_runtime.weights.encoding import Format, RestOfCopy, Scaled, format_of, scaled_bytes, scaled_rows

Decode = Callable[[torch.Tensor, torch.Tensor], object]
# Of down, and of gate and up together.
_SHAPES = ((4096, 11008), (57344, 8192))
# Of products: qkv, o, gate and up together, down.
_PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
_PRODUCT_KINDS, _PRODUCT_ROWS = ("Q4_K", "Q8_0", "Q4_0", "Q6_K", "MXFP4"), (1, 8, 16)
# Of AWQ and GPTQ, of compressed-tensors, FP8 of blocks and of rows, and int8.
_SCALED = (
    ScaledFormat("uint4", 1, 128, torch.float16, 1, zeros=True), ScaledFormat("uint4", 1, 128, torch.bfloat16, 8),
    ScaledFormat("FP8", 128, 128, torch.float32), ScaledFormat("FP8", 1, 1 << 16, torch.bfloat16),
    ScaledFormat("int8", 1, 1 << 16, torch.bfloat16),
)  # fmt: skip


def decoding_case(
    about: dict[str, Any], stored: torch.Tensor, m: int, k: int, kernel: Decode, reference: Decode
) -> Case:
    """Decoding of matrices [m, k], of which each is one of `stored`."""
    out = torch.empty(m, k, dtype=torch.bfloat16, device=DEVICE)
    return Case(
        configuration={**about, "m": m, "k": k}, kernel=lambda i: kernel(stored[i], out),
        reference=lambda i: reference(stored[i], out), num_inputs=len(stored),
        moved_bytes=stored[0].nbytes + out.nbytes, stored_bytes=stored[0].nbytes, reference_in_graph=False,
    )  # fmt: skip


def product_case(
    about: dict[str, Any], stored: Any, nbytes: int, shape: tuple[int, int, int],
    kernel: Callable[[torch.Tensor, Any, torch.Tensor], object], decode: Callable[[Any, torch.Tensor], object],
) -> Case:  # fmt: skip
    """A product of rows with a matrix of `nbytes` as it is stored; `shape` is [rows, m, k]."""
    rows, m, k = shape
    x, out, decoded = random_bf16(rows, k), random_bf16(rows, m), random_bf16(m, k)

    def decode_and_multiply(i: int) -> None:
        decode(stored[i], decoded)
        linear_triton(x, decoded, out)

    return Case(
        configuration={**about, "rows": rows, "m": m, "k": k}, kernel=lambda i: kernel(x, stored[i], out),
        reference=decode_and_multiply, num_inputs=len(stored), moved_bytes=nbytes, operations=2 * rows * m * k,
    )  # fmt: skip


def random_rows(kind: str, m: int, k: int) -> torch.Tensor:
    """Matrices [m, k] of random bytes, more than the caches hold: uint8 [inputs, m, row_bytes]."""
    row_bytes = FORMATS[kind].row_bytes(k)
    return torch.randint(256, (num_inputs(m * row_bytes), m, row_bytes), dtype=torch.uint8, device=DEVICE)


def make_decode_blocks(kind: str, m: int, k: int) -> Case:
    """A matrix [m, k] of random bytes."""
    form = FORMATS[kind]
    return decoding_case(
        {"encoding": kind}, random_rows(kind, m, k), m, k, lambda one, out: decode_blocks_triton(one, form, out),
        lambda one, out: decode_blocks_reference(one, form, out),
    )  # fmt: skip


def make_gguf_linear(kind: str, rows: int, m: int, k: int) -> Case:
    """A product of `rows` rows with a matrix [m, k] of random bytes."""
    form, stored = FORMATS[kind], random_rows(kind, m, k)
    return product_case(
        {"encoding": kind}, stored, stored[0].nbytes, (rows, m, k),
        lambda x, one, out: gguf_linear_triton(x, one, form, out),
        lambda one, out: decode_blocks_triton(one, form, out),
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
    return decoding_case(
        {"encoding": "12-bit BF16"}, stored, m, k, lambda one, out: decode_rows_triton(one, row, out),
        lambda one, out: decode_rows_reference(one, row, out),
    )  # fmt: skip


def make_coded_linear(rows: int, m: int, k: int) -> Case:
    """A product of `rows` rows with a matrix [m, k] of Gaussian weights."""
    row, stored = coded_rows(m, k)
    return product_case(
        {"encoding": "12-bit BF16"}, stored, stored[0].nbytes, (rows, m, k),
        lambda x, one, out: coded_linear_triton(x, one, row, out), lambda one, out: decode_rows_triton(one, row, out),
    )  # fmt: skip


def make_scaled_linear(form: ScaledFormat, rows: int, m: int, k: int) -> Case:
    """A product of `rows` rows with a matrix [m, k] of random numbers with Gaussian scales."""
    nbytes = scaled_bytes(form, m, k)
    stored = torch.randint(256, (num_inputs(nbytes), nbytes), dtype=torch.uint8, device=DEVICE)
    matrices = [scaled_rows(each, form, m, k) for each in stored]
    for each in matrices:
        each.scales.normal_(std=0.02)
    scale = f"{str(form.scale).removeprefix('torch.')} of {form.rows}x{min(form.columns, k)}"
    return product_case(
        {"encoding": form.number, "scale": scale, "zeros": form.zeros}, matrices, nbytes, (rows, m, k),
        lambda x, one, out: scaled_linear_triton(x, one, form, out),
        lambda one, out: decode_scaled_triton(one, form, 0, out),
    )  # fmt: skip


def copies(m: int, k: int) -> tuple[torch.Tensor, list[ScaledRows]]:
    """4-bit copies of matrices [m, k] of Gaussian weights, made on the device, more than the caches hold."""
    nbytes = scaled_bytes(COPY, m, k)
    stored = torch.empty(num_inputs(nbytes), nbytes, dtype=torch.uint8, device=DEVICE)
    matrices = [scaled_rows(each, COPY, m, k) for each in stored]
    quantise((0.02 * torch.randn(m, k, device=DEVICE)).bfloat16(), matrices[0])
    stored[1:] = stored[0]  # fitting takes longer
    return stored, matrices


def make_decode_copy(m: int, k: int) -> Case:
    """The 4-bit copy of a matrix [m, k]."""
    stored, _ = copies(m, k)
    return decoding_case(
        {"encoding": "copy"}, stored, m, k,
        lambda one, out: decode_scaled_triton(scaled_rows(one, COPY, m, k), COPY, 0, out),
        lambda one, out: decode_scaled_reference(scaled_rows(one, COPY, m, k), COPY, 0, out),
    )  # fmt: skip


def stored_gaussian(kind: str, m: int, k: int) -> tuple[torch.Tensor, Format]:
    """The bytes of a Gaussian matrix [m, k] in bf16, in Q8_0, or in FP8 with scales of 128 x 128, and their format."""
    how = format_of(ScaledFormat("FP8", 128, 128, torch.float32) if kind == "FP8" else kind)
    values = 0.02 * torch.randn(m, k, device=DEVICE)
    whole = torch.empty(how.nbytes(m, k), dtype=torch.uint8, device=DEVICE)
    if isinstance(how, Scaled):
        matrix, blocks = scaled_rows(whole, how.form, m, k), values.view(m // 128, 128, k // 128, 128)
        matrix.scales.copy_(blocks.abs().amax((1, 3)) / 448)
        numbers = (blocks / matrix.scales[:, None, :, None]).view(m, k).to(torch.float8_e4m3fn)
        pack_numbers(numbers.view(torch.uint8), how.form, matrix.numbers)
    elif kind == "Q8_0":
        groups = values.view(m, -1, 32)
        d = (groups.abs().amax(2, keepdim=True) / 127).half()
        numbers = (groups / d.float()).round().clamp(-127, 127).to(torch.int8)
        rows = torch.cat((d.view(torch.uint8), numbers.view(torch.uint8)), dim=2).flatten(1)
        pack_rows(rows, FORMATS[kind], k, whole.view(m, -1))
    else:
        whole.view(torch.bfloat16).copy_(values.view(-1))
    return whole, how


def make_decode_rest(kind: str, m: int, k: int) -> Case:
    """A Gaussian matrix [m, k] out of its 4-bit copy and what is left of it, told by the bytes of the latter."""
    (whole, how), (stored, matrices) = stored_gaussian(kind, m, k), copies(m, k)
    out, rest = torch.empty(m, k, dtype=torch.bfloat16, device=DEVICE), RestOfCopy.of(how)
    assert rest is not None
    how.decode(whole, m, 0, out)
    quantise(out, matrices[0])
    stored[1:] = stored[0]
    rests = torch.empty(len(matrices), rest.nbytes(m, k), dtype=torch.uint8, device=DEVICE)
    kept = rest.store(whole, (m, k), matrices[0], rests[0])
    rests[1:] = rests[0]
    hows, nbytes = [replace(kept, base=base) for base in matrices], kept.nbytes(m, k)

    def decode_whole(i: int) -> None:
        how.decode(whole, m, 0, out)

    return Case(
        configuration={"encoding": f"{kind} given copies", "m": m, "k": k},
        kernel=lambda i: hows[i].decode(rests[i], m, 0, out), reference=decode_whole, num_inputs=len(rests),
        moved_bytes=scaled_bytes(COPY, m, k) + nbytes + out.nbytes, stored_bytes=nbytes,
    )  # fmt: skip


def make_copy_linear(rows: int, m: int, k: int) -> Case:
    """A product of `rows` rows with the 4-bit copy of a matrix [m, k]."""
    stored, matrices = copies(m, k)
    return product_case(
        {"encoding": "copy"}, matrices, stored[0].nbytes, (rows, m, k),
        lambda x, one, out: scaled_linear_triton(x, one, COPY, out),
        lambda one, out: decode_scaled_triton(one, COPY, 0, out),
    )  # fmt: skip


CASES: Cases = {
    "decode_blocks": [partial(make_decode_blocks, kind, *shape) for kind in FORMATS for shape in _SHAPES],
    "decode_copy": [partial(make_decode_copy, *shape) for shape in _SHAPES],
    "decode_rest": [
        partial(make_decode_rest, kind, *shape) for kind, shape in product(("BF16", "Q8_0", "FP8"), _SHAPES)
    ],
    "decode_coded": [partial(make_decode_coded, *shape) for shape in _SHAPES],
    "gguf_linear": [
        partial(make_gguf_linear, kind, rows, *shape)
        for kind, rows, shape in product(_PRODUCT_KINDS, _PRODUCT_ROWS, _PRODUCTS)
    ],
    "copy_linear": [partial(make_copy_linear, rows, *shape) for rows, shape in product(_PRODUCT_ROWS, _PRODUCTS)],
    "coded_linear": [partial(make_coded_linear, rows, *shape) for rows, shape in product(_PRODUCT_ROWS, _PRODUCTS)],
    "scaled_linear": [
        partial(make_scaled_linear, form, rows, *shape)
        for form, rows, shape in product(_SCALED, _PRODUCT_ROWS, _PRODUCTS)
    ],
}
