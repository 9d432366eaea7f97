"""`decode_scaled`: numbers against their definitions, and the kernel against the reference, bit for bit."""

from itertools import cycle, product

import pytest
import torch
from offload_runtime_kernels import scaled_rows as ops

from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_gguf_blocks import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # of what fp16 has no room for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Scales that are zero, subnormal, ordinary and the largest: bits of fp16, and of bf16 and fp32's upper half.
SCALES = {
    FP16: (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x1A2B, 0x3C00, 0xC4D1, 0x7BFF),
    BF16: (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x3C2B, 0x3F80, 0xC0D1, 0x7F7F),
    FP32: (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x3C2B, 0x3F80, 0xC0D1, 0x7F7F),
}
# Rows and columns of a matrix, and of what shares a scale: all, a row, groups, an odd number of groups, blocks that the
# last ones do not fill, chunks of one and two columns.
SHAPES = (
    ((24, 64), (24, 64)), ((24, 96), (1, 96)), ((24, 128), (1, 32)), ((24, 96), (1, 32)), ((40, 72), (32, 32)),
    ((24, 9), (1, 3)), ((16, 10), (1, 10)),
)  # fmt: skip


def e4m3(byte: int) -> float:
    """By the definition: a sign, four bits of exponent with bias 7, three of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


NUMBERS = {
    "FP8": e4m3, "int8": lambda byte: float(byte - 256 if byte > 127 else byte), "uint8": float, "uint4": float,
    "E2M1": lambda n: (-1.0 if n & 8 else 1.0) * (n & 1 | 2 * (n & 6 != 0)) * 2.0 ** (max(n >> 1 & 3, 1) - 2),
}  # fmt: skip


def apart(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Rows that lie so far from one another, with zeros between."""
    wide = torch.zeros(len(rows), row_bytes // rows.itemsize, dtype=rows.dtype)[:, : rows.shape[1]]
    return wide.copy_(rows)


def stored_rows(
    form: ops.ScaledFormat, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> ops.ScaledRows:
    """Of numbers in the order of columns, and what of the others the format has."""
    columns = numbers.shape[1] * 8 // ops.BITS[form.number]
    scale_bytes, zero_bytes = form.scale_row_bytes(columns)
    units = torch.empty(len(numbers), form.row_bytes(columns), dtype=torch.uint8)
    ops.pack_numbers(numbers, form, units)
    return ops.ScaledRows(
        units, apart(scales, scale_bytes), apart(zeros, zero_bytes) if form.zeros else zeros[:0, :0],
        groups if form.ordered else groups[:0],
    )  # fmt: skip


def moved(rows: torch.Tensor) -> torch.Tensor:
    """With what lies between rows."""
    if rows.dim() == 1 or rows.numel() == 0:
        return rows.to(KERNEL_DEVICE)
    whole = rows.as_strided((len(rows), rows.stride(0)), rows.stride())
    return whole.to(KERNEL_DEVICE)[:, : rows.shape[1]]


def on_device(stored: ops.ScaledRows) -> ops.ScaledRows:
    return ops.ScaledRows(*map(moved, stored))


def made(form: ops.ScaledFormat, rows: int, columns: int) -> ops.ScaledRows:
    """Every byte, and every scale."""
    down, across = form.scales(rows, columns)
    generator = torch.Generator().manual_seed(rows * columns)
    chosen = torch.randint(len(SCALES[form.scale]), (down, across), generator=generator)
    bits = torch.tensor(SCALES[form.scale], dtype=torch.int64)[chosen]
    if form.scale == FP32:
        scales = ((bits << 16) + torch.randint(1 << 16, bits.shape, generator=generator)).to(torch.int32).view(FP32)
    else:
        scales = bits.to(torch.int16).view(form.scale)
    numbers = torch.arange(rows * form.file_bytes(columns)).mul(167).to(torch.uint8).view(rows, -1)
    zeros = torch.randint(256, (down, form.file_bytes(across)), generator=generator, dtype=torch.uint8)
    groups = torch.randint(across, (columns,), generator=generator, dtype=torch.int32)
    return stored_rows(form, numbers, scales, zeros, groups)


def by_definition(stored: ops.ScaledRows, form: ops.ScaledFormat, rows: int, columns: int) -> torch.Tensor:
    """An element at a time, in the dtype of the scales; products of those of 16 bits are exact in fp32."""

    numbers = ops.unpack_numbers(stored.numbers, form, columns)

    def number(tensor: torch.Tensor, row: int, at: int) -> float:
        if ops.BITS[form.number] == 4:
            return NUMBERS[form.number](int(tensor[row, at // 2]) >> 4 * (at % 2) & 15)
        return NUMBERS[form.number](int(tensor[row, at]))

    out = torch.empty(rows, columns, dtype=torch.float64)
    for row, column in product(range(rows), range(columns)):
        group = int(stored.groups[column]) if form.ordered else column // form.columns
        zero = form.zero + (number(stored.zeros, row // form.rows, group) if form.zeros else 0.0)
        scale = float(stored.scales[row // form.rows, group])
        out[row, column] = (number(numbers, row, column) - zero) * scale
    return out.float().to(form.scale)


def formats(scale: torch.dtype, shape: tuple[int, int], block: tuple[int, int]) -> list[ops.ScaledFormat]:
    found = [ops.ScaledFormat("FP8", *block, scale), ops.ScaledFormat("int8", *block, scale)]
    found += [ops.ScaledFormat("int8", *block, scale, zeros=True), ops.ScaledFormat("uint8", *block, scale, 128)]
    if shape[1] % 2 == 0:
        found += [ops.ScaledFormat("uint4", *block, scale, 8), ops.ScaledFormat("uint4", *block, scale, 1, zeros=True)]
        found += [
            ops.ScaledFormat("uint4", *block, scale, zeros=True, ordered=True),
            ops.ScaledFormat("E2M1", *block, scale),
        ]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("scale", [FP16, BF16, FP32])
def test_reference_is_the_definition(scale: torch.dtype) -> None:
    for shape, block in SHAPES:
        for form in formats(scale, shape, block):
            stored = made(form, *shape)
            expected = by_definition(stored, form, *shape)
            for dtype in (FP32, BF16, FP16):
                out = torch.full(shape, 7.0, dtype=dtype)
                ops.decode_scaled_reference(stored, form, 0, out)
                assert_same_bits(out, expected.to(dtype))


# The interpreter cuts off what bf16 has no room for, where a GPU rounds.
@pytest.mark.few(2)
@pytest.mark.parametrize("scale", [FP16, FP32, pytest.param(BF16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=pytest.mark.gpu)])
def test_kernel_has_the_bits_of_the_reference(scale: torch.dtype, dtype: torch.dtype) -> None:
    """Of whole matrices and of rows out of their middle; what lies behind the result stays as it is."""
    whole = cycle((True, False))  # by turns: an odd number of formats has each, with one shape or another
    for shape, block in SHAPES:
        for form in formats(scale, shape, block):
            first, last = (0, shape[0]) if next(whole) else (5, 12)
            stored = made(form, *shape)
            expected = torch.empty(last - first, shape[1], dtype=dtype)
            ops.decode_scaled_reference(stored, form, first, expected)
            out = torch.full((last - first + 3, shape[1]), 7.0, dtype=dtype, device=KERNEL_DEVICE)
            ops.decode_scaled_triton(on_device(stored), form, first, out[: last - first])
            assert_same_bits(out[: last - first].cpu(), expected)
            assert bool((out[last - first :] == 7.0).all())


def test_kernel_reads_scales_in_bf16() -> None:
    """Of powers of two, whose products need no rounding."""
    for form in formats(BF16, (24, 128), (1, 32)):
        stored = made(form, 24, 128)
        stored.scales.copy_(torch.ldexp(torch.ones(stored.scales.shape), torch.arange(96).view(24, 4) - 48))
        expected = torch.empty(24, 128)
        ops.decode_scaled_reference(stored, form, 0, expected)
        out = torch.full((24, 128), 7.0, device=KERNEL_DEVICE)
        ops.decode_scaled_triton(on_device(stored), form, 0, out)
        assert_same_bits(out.cpu(), expected)


@pytest.mark.parametrize("number", ["uint8", "uint4"])
def test_numbers_come_back_from_units(number: str) -> None:
    """Whole units, and rows that end within one."""
    form = ops.ScaledFormat(number, 1, 32, FP16)
    for columns in (2, 30, 64, 128, 130, 576):
        numbers = torch.randint(256, (9, form.file_bytes(columns)), dtype=torch.uint8)
        units = torch.full((9, form.row_bytes(columns)), 7, dtype=torch.uint8)
        ops.pack_numbers(numbers, form, units)
        assert torch.equal(ops.unpack_numbers(units, form, columns), numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("number", ops.BITS)
def test_matrices_of_real_models(number: str) -> None:
    """gate and up of Llama-3-70B, and rows of a matrix of more weights than 32 bits count."""
    zero = 0 if number in ("FP8", "E2M1") else 8
    form = ops.ScaledFormat(number, 1, 128, FP16, zero, zeros=number == "uint4")
    for rows, columns, start in ((57344, 8192, 0), ((1 << 31) // 4096 + 16, 4096, 1 << 18)):
        once = made(form, 64, columns)
        repeated = on_device(once)[:3]  # of which every row is as long as it is said to be
        stored = ops.ScaledRows(*(each.repeat(rows // 64 + 1, 1)[:rows] for each in repeated), once[3])
        out = torch.empty(rows - start, columns, dtype=BF16, device=KERNEL_DEVICE)
        ops.decode_scaled_triton(stored, form, start, out)
        expected = torch.empty(64, columns, dtype=BF16)
        ops.decode_scaled_reference(once, form, 0, expected)
        whole, expected = out[: (rows - start) // 64 * 64].view(-1, 64, columns), expected.to(KERNEL_DEVICE)
        assert all(torch.allclose(part, expected, rtol=0.0, atol=0.0, equal_nan=True) for part in whole)
