"""Decoding of stored matrices, at the shapes of Llama-2-7B and Llama-3-70B, and products with them as they are stored,
at those of Llama-3-8B.

The bound of decoding is reading what is stored and writing it decoded, that of a product reading what is stored. The
reference of a product decodes the matrix into memory and multiplies there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from kernel_cases.case import DEVICE, Case, Cases, num_inputs, random_bf16
from offload_runtime_kernels.coded_bf16 import CODED, CodedRow, decode_rows_reference, decode_rows_triton, encode_rows
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

from offload_runtime.weights.copies import RestOfCopy
from offload_runtime.weights.encoding import Format, Scaled, format_of, scaled_bytes, scaled_rows

# Of down, and of gate and up together.
_SHAPES = ((4096, 11008), (57344, 8192))
# Of products: qkv, o, gate and up together, down.
_PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
_PRODUCT_KINDS, _ROWS = ("Q4_K", "Q8_0", "Q4_0", "Q6_K", "MXFP4"), (1, 8, 16)
_COPY = "copy"
# Of AWQ and GPTQ, of compressed-tensors, FP8 of blocks and of rows, and int8.
_SCALED = (
    ScaledFormat("uint4", 1, 128, torch.float16, 1, zeros=True), ScaledFormat("uint4", 1, 128, torch.bfloat16, 8),
    ScaledFormat("FP8", 128, 128, torch.float32), ScaledFormat("FP8", 1, 1 << 16, torch.bfloat16),
    ScaledFormat("int8", 1, 1 << 16, torch.bfloat16),
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """Matrices [m, k] of `nbytes` each as they are stored, more than the caches hold, and what works on one of them."""

    about: dict[str, Any]
    matrices: Sequence[Any] | torch.Tensor
    nbytes: int
    decode: Callable[[Any, torch.Tensor], object]
    decode_reference: Callable[[Any, torch.Tensor], object]
    product: Callable[[torch.Tensor, Any, torch.Tensor], object]  # of rows with a matrix


def stored_in(encoding: str | ScaledFormat, m: int, k: int) -> Stored:
    """Matrices in one of GGUF's formats, in `CODED`, as a `_COPY`, or as numbers with scales."""
    if isinstance(encoding, ScaledFormat):
        return scaled(encoding, m, k)
    return {CODED: coded, _COPY: copy}.get(encoding, partial(blocks, encoding))(m, k)


def blocks(kind: str, m: int, k: int) -> Stored:
    """Blocks of random bytes."""
    form = FORMATS[kind]
    shape = m, form.row_bytes(k)
    matrices = torch.randint(256, (num_inputs(math.prod(shape)), *shape), dtype=torch.uint8, device=DEVICE)
    return Stored(
        {"encoding": kind}, matrices, matrices[0].nbytes, lambda one, out: decode_blocks_triton(one, form, out),
        lambda one, out: decode_blocks_reference(one, form, out),
        lambda x, one, out: gguf_linear_triton(x, one, form, out),
    )  # fmt: skip


def coded(m: int, k: int) -> Stored:
    """Gaussian weights in 12 bits, coded on the device."""
    row = CodedRow.of(k)
    assert row is not None
    matrices = torch.empty(num_inputs(m * row.nbytes), m, row.nbytes, dtype=torch.uint8, device=DEVICE)
    for each in matrices:
        failed = encode_rows((0.02 * torch.randn(m, k, device=DEVICE)).bfloat16(), row, each, each.device)
        assert failed == 0, f"{failed} rows have no room for their exceptions"
    return Stored(
        {"encoding": CODED}, matrices, matrices[0].nbytes, lambda one, out: decode_rows_triton(one, row, out),
        lambda one, out: decode_rows_reference(one, row, out),
        lambda x, one, out: coded_linear_triton(x, one, row, out),
    )  # fmt: skip


def scaled(form: ScaledFormat, m: int, k: int) -> Stored:
    """Random numbers with Gaussian scales."""
    nbytes = scaled_bytes(form, m, k)
    stored = torch.randint(256, (num_inputs(nbytes), nbytes), dtype=torch.uint8, device=DEVICE)
    matrices = [scaled_rows(each, form, m, k) for each in stored]
    for each in matrices:
        each.scales.normal_(std=0.02)
    scale = f"{str(form.scale).removeprefix('torch.')} of {form.rows}x{min(form.columns, k)}"
    return of_scaled({"encoding": form.number, "scale": scale, "zeros": form.zeros}, matrices, nbytes, form)


def of_scaled(about: dict[str, Any], matrices: Sequence[ScaledRows], nbytes: int, form: ScaledFormat) -> Stored:
    """Numbers with scales."""
    return Stored(
        about, matrices, nbytes, lambda one, out: decode_scaled_triton(one, form, 0, out),
        lambda one, out: decode_scaled_reference(one, form, 0, out),
        lambda x, one, out: scaled_linear_triton(x, one, form, out),
    )  # fmt: skip


def copies(m: int, k: int) -> tuple[torch.Tensor, list[ScaledRows]]:
    """4-bit copies of matrices [m, k] of Gaussian weights, made on the device, more than the caches hold."""
    nbytes = scaled_bytes(COPY, m, k)
    stored = torch.empty(num_inputs(nbytes), nbytes, dtype=torch.uint8, device=DEVICE)
    matrices = [scaled_rows(each, COPY, m, k) for each in stored]
    quantise((0.02 * torch.randn(m, k, device=DEVICE)).bfloat16(), matrices[0])
    stored[1:] = stored[0]  # fitting takes longer
    return stored, matrices


def copy(m: int, k: int) -> Stored:
    """4-bit copies."""
    stored, matrices = copies(m, k)
    return of_scaled({"encoding": _COPY}, matrices, stored[0].nbytes, COPY)


def make_decode(encoding: str, m: int, k: int) -> Case:
    """Decoding of a matrix [m, k]."""
    stored, out = stored_in(encoding, m, k), torch.empty(m, k, dtype=torch.bfloat16, device=DEVICE)
    return Case(
        configuration={**stored.about, "m": m, "k": k}, kernel=lambda i: stored.decode(stored.matrices[i], out),
        reference=lambda i: stored.decode_reference(stored.matrices[i], out), num_inputs=len(stored.matrices),
        moved_bytes=stored.nbytes + out.nbytes, stored_bytes=stored.nbytes, reference_in_graph=False,
    )  # fmt: skip


def make_linear(encoding: str | ScaledFormat, rows: int, m: int, k: int) -> Case:
    """A product of `rows` rows with a matrix [m, k] as it is stored."""
    stored = stored_in(encoding, m, k)
    x, out, decoded = random_bf16(rows, k), random_bf16(rows, m), random_bf16(m, k)

    def decode_and_multiply(i: int) -> None:
        stored.decode(stored.matrices[i], decoded)
        linear_triton(x, decoded, out)

    return Case(
        configuration={**stored.about, "rows": rows, "m": m, "k": k},
        kernel=lambda i: stored.product(x, stored.matrices[i], out), reference=decode_and_multiply,
        num_inputs=len(stored.matrices), moved_bytes=stored.nbytes, operations=2 * rows * m * k,
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


def _linear(*encodings: str | ScaledFormat) -> list[partial[Case]]:
    return [partial(make_linear, one, rows, *shape) for one, rows, shape in product(encodings, _ROWS, _PRODUCTS)]


CASES: Cases = {
    "decode_blocks": [partial(make_decode, kind, *shape) for kind in FORMATS for shape in _SHAPES],
    "decode_copy": [partial(make_decode, _COPY, *shape) for shape in _SHAPES],
    "decode_rest": [
        partial(make_decode_rest, kind, *shape) for kind, shape in product(("BF16", "Q8_0", "FP8"), _SHAPES)
    ],
    "decode_coded": [partial(make_decode, CODED, *shape) for shape in _SHAPES],
    "gguf_linear": _linear(*_PRODUCT_KINDS), "copy_linear": _linear(_COPY), "coded_linear": _linear(CODED),
    "scaled_linear": _linear(*_SCALED),
}  # fmt: skip
