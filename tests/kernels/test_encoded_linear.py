"""`coded_linear`, `gguf_linear` and `scaled_linear`: the product of rows with a matrix as it is stored, in 12-bit bf16,
in GGUF blocks or in small numbers that have scales, against the product of the decoded matrix."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from offload_runtime_kernels.coded_bf16 import CodedRow, encode_rows
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.encoded_linear import MOST_ROWS, EncodedTile
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks_reference
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.linear import linear_triton
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import ScaledFormat, columns_of_scale, decode_scaled_reference

from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_coded_bf16 import gaussian, sprinkled
from tests.kernels.test_gguf_blocks import blocks_of, in_rows
from tests.kernels.test_scaled_rows import on_device, stored_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# With rows of W as the first operand of the matrix units, and as the second.
TILES = (EncodedTile(32, 2, 3, True), EncodedTile(32, 4, 4, False))
# Below and above what is cut otherwise: no whole number of programs' rows, and so many that each has rows of its own.
SHORT, TALL = 72, 8200
# Of a few magnitudes that no window of Gaussian weights has, so that sums stay ordinary.
UNUSUAL = torch.tensor([1e-30, -3e-20, 2.0, -7.0, 0.0, 1e-38], dtype=BF16)


class Stored(NamedTuple):
    """A matrix as it is stored: what multiplies rows with it, and what it is decoded to, [M, K]."""

    multiply: Callable[..., None]
    decoded: torch.Tensor


def of_blocks(kind: str, height: int, columns: int, dtype: torch.dtype, *, behind: str | None = None) -> Stored:
    """Random GGUF blocks of ordinary scales, and as many rows of another kind behind them."""
    found, decoded = [], []
    for name in (kind, behind) if behind else (kind,):
        form = FORMATS[name]
        blocks_a_row = columns // form.weights
        blocks = blocks_of(name, height * blocks_a_row, (0x1A2B, 0x93C5, 0x9001, 0x1800))[256:]
        stored, out = in_rows(name, blocks, blocks_a_row), torch.empty(height, columns, dtype=dtype)
        decode_blocks_reference(stored, form, out)
        found.append((stored.to(KERNEL_DEVICE), form))
        decoded.append(out.to(KERNEL_DEVICE))
    rest = {"behind": found[1]} if behind else {}
    return Stored(partial(_multiply, gguf_linear_triton, *found[0], **rest), torch.cat(decoded))


def of_coded(exceptions: int, height: int, columns: int, dtype: torch.dtype) -> Stored:
    """12-bit bf16, of whose weights so many a row are no usual ones."""
    values, row = sprinkled(gaussian(height, columns), UNUSUAL, exceptions), CodedRow.of(columns)
    assert row is not None
    stored = torch.empty(height, row.nbytes, dtype=torch.uint8)
    assert encode_rows(values, row, stored, stored.device) == 0
    multiply = partial(_multiply, coded_linear_triton, stored.to(KERNEL_DEVICE), row)
    return Stored(multiply, values.to(KERNEL_DEVICE, dtype))


def of_scaled(form: ScaledFormat, height: int, columns: int, dtype: torch.dtype) -> Stored:
    """Random numbers with ordinary scales, and some that are subnormal in fp16."""
    (down, across), generator = form.scales(height, columns), torch.Generator().manual_seed(columns)
    numbers = torch.randint(256, (height, form.file_bytes(columns)), generator=generator, dtype=torch.uint8)
    if form.number == "FP8":
        numbers[numbers & 0x7F == 0x7F] = 0x7E
    exponents = torch.randint(-16, -4, (down, 1), generator=generator)
    scales = torch.randn(down, across, generator=generator) * 2.0**exponents
    zeros = torch.randint(256, (down, form.file_bytes(across)), generator=generator, dtype=torch.uint8)
    stored = stored_rows(form, numbers, scales.to(form.scale), zeros, torch.empty(0, dtype=torch.int32))
    out = torch.empty(height, columns, dtype=dtype)
    decode_scaled_reference(stored, form, 0, out)
    return Stored(partial(_multiply, scaled_linear_triton, on_device(stored), form), out.to(KERNEL_DEVICE))


def _multiply(
    by: Callable[..., None], stored: object, form: object, x: torch.Tensor, out: torch.Tensor, **fused: object
) -> None:
    by(x, stored, form, out, **fused)


def products(
    one: Stored, num_rows: int, *, bias: bool, add: bool, tile: EncodedTile | None = TILES[0]
) -> tuple[torch.Tensor, torch.Tensor]:
    """With what is stored, as columns of a wider tensor whose others must stay, and with what is decoded: [N, M]."""
    (height, columns), dtype = one.decoded.shape, one.decoded.dtype
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, columns, generator=generator) * torch.randn(num_rows, columns, generator=generator).exp()
    x = x.to(KERNEL_DEVICE, dtype)
    added = torch.randn(height, generator=generator).to(KERNEL_DEVICE, dtype) if bias else None
    before = torch.randn(num_rows, height, generator=generator).to(KERNEL_DEVICE, dtype)
    wide = torch.full((num_rows, height + 32), float("nan"), dtype=dtype, device=KERNEL_DEVICE)
    found, expected = wide[:, 16 : 16 + height], before.clone()
    if add:
        found.copy_(before)
    one.multiply(x, found, bias=added, add=add, tile=tile)
    assert bool(wide[:, :16].isnan().all()) and bool(wide[:, 16 + height :].isnan().all())
    linear_triton(x, one.decoded, expected, bias=added, add=add)
    return found.contiguous(), expected


def check_close(one: Stored, num_rows: int = 3, *, tile: EncodedTile | None = TILES[0], fused: bool = True) -> None:
    """In the interpreter, whose sums take another order with every shape of a tile: roundings apart."""
    found, expected = products(one, num_rows, bias=fused, add=fused, tile=tile)
    half = found.dtype == FP16  # two roundings to 11 bits, of the product and of the sum
    tolerance = 2.0**-10 if half else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=float(expected.abs().max()) * tolerance)


# Every number, with a scale for all, rows, blocks and groups, and with each kind of zeros; those of 4 bits, which are
# decoded otherwise, with every group. 1024 stands for all columns.
SCALED = {
    "FP8 of a tensor": ScaledFormat("FP8", SHORT, 1024, FP16), "FP8 of rows": ScaledFormat("FP8", 1, 1024, BF16),
    "FP8 of blocks": ScaledFormat("FP8", 32, 128, FP32), "int8 of rows": ScaledFormat("int8", 1, 1024, FP16),
    "int8 with zeros": ScaledFormat("int8", 1, 1024, FP32, zeros=True),
    "int8 of long groups": ScaledFormat("int8", 1, 512, BF16, zeros=True),
    "uint8 of groups": ScaledFormat("uint8", 1, 32, FP16, 128),
    "uint8 with zeros": ScaledFormat("uint8", 1, 64, FP16, 1, zeros=True),
    "uint4 of rows": ScaledFormat("uint4", 1, 1024, FP16, 8),
    "uint4 of rows with zeros": ScaledFormat("uint4", 1, 1024, BF16, zeros=True),
    "uint4 of groups": ScaledFormat("uint4", 1, 128, BF16, 8),
    "uint4 of groups with zeros": ScaledFormat("uint4", 1, 128, FP16, 1, zeros=True),
    "uint4 of small groups": ScaledFormat("uint4", 1, 32, FP16, 1, zeros=True),
    "uint4 of middling groups": ScaledFormat("uint4", 1, 64, FP32, zeros=True),
    "uint4 of long groups": ScaledFormat("uint4", 1, 256, FP16, 8),
}  # fmt: skip
INTERPRETED = [name for name, form in SCALED.items() if form.scale != BF16]  # the interpreter has no arithmetic in bf16
# What is added has code of its own, which no format changes: each of these takes four times as long to compile.
FUSED = ("Q4_K", "Q5_0", "uint4 of groups", "FP8 of blocks")


def columns_of(kind: str) -> int:
    """A K that is no whole number of tiles, or of steps."""
    return 768 if FORMATS[kind].weights == 256 else 544


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("kind", FORMATS)
def test_products_with_blocks(kind: str, dtype: torch.dtype) -> None:
    check_close(of_blocks(kind, SHORT, columns_of(kind), dtype))


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("name", INTERPRETED)
def test_products_with_scaled_numbers(name: str, dtype: torch.dtype) -> None:
    check_close(of_scaled(SCALED[name], SHORT, 544, dtype))


@pytest.mark.few(1)
# None that is listed but by chance, in some rows, and in all programs'.
@pytest.mark.parametrize("exceptions", [0, 2, 9])
def test_products_with_12_bits(exceptions: int) -> None:
    for columns, num_rows, tile in ((256, 3, TILES[0]), (576, 9, None)):
        check_close(of_coded(exceptions, SHORT, columns, FP32), num_rows, tile=tile)


@pytest.mark.parametrize("tile", TILES)
def test_rows_of_two_kinds_are_one_product(tile: EncodedTile) -> None:
    check_close(of_blocks("Q4_K", SHORT, columns_of("Q4_K"), FP32, behind="Q6_K"), tile=tile)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q2_K", "IQ4_NL"])
def test_rows_of_w_may_be_the_second_operand(kind: str) -> None:
    check_close(of_blocks(kind, SHORT, columns_of(kind), FP32), 9, tile=TILES[1])


@pytest.mark.parametrize("name", ["uint4 of small groups", "FP8 of blocks"])
def test_rows_of_scaled_w_may_be_the_second_operand(name: str) -> None:
    check_close(of_scaled(SCALED[name], SHORT, 544, FP32), 9, tile=TILES[1])


def check_bits(name: str, one: Stored, num_rows: int) -> None:
    """Of every way to cut them."""
    bias, add = name in FUSED and num_rows in (1, 8), name in FUSED and num_rows in (8, 9)
    for tile in TILES if name in FUSED or num_rows == 5 else TILES[:1]:
        found, expected = products(one, num_rows, bias=bias, add=add, tile=tile)
        assert torch.equal(found, expected), (num_rows, one.decoded.shape, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", FORMATS)
def test_products_with_blocks_have_the_bits_of_the_decoded_matrix(kind: str, dtype: torch.dtype) -> None:
    """A K that is no multiple of a tile, and ones of an odd and an even number of blocks that are no whole tiles."""
    for height, columns in product((SHORT, TALL), (1024, 768) if FORMATS[kind].weights == 256 else (1024, 544, 576)):
        one = of_blocks(kind, height, columns, dtype)
        for num_rows in (1, 5, 8, 9, MOST_ROWS):
            check_bits(kind, one, num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q5_K", "Q4_K"), ("Q8_0", "Q5_0")])
def test_products_with_rows_of_two_kinds_have_the_bits_of_the_decoded_matrix(kinds: tuple[str, str]) -> None:
    for height, columns in product((SHORT, TALL), (1024, 768)):
        one = of_blocks(kinds[0], height, columns, BF16, behind=kinds[1])
        for num_rows in (1, 8, 9, MOST_ROWS):
            check_bits(kinds[0], one, num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", SCALED)
def test_products_with_scaled_numbers_have_the_bits_of_the_decoded_matrix(name: str, dtype: torch.dtype) -> None:
    """Of whole tiles, and of a K that ends within one, and within a unit."""
    for columns in (1024, 768, 544):
        one = of_scaled(SCALED[name], SHORT, columns, dtype)
        for num_rows in (1, 5, 8, 9, MOST_ROWS):
            check_bits(name, one, num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("exceptions", [0, 2, 9])
@pytest.mark.parametrize("columns", [576, 1024, 4096])
def test_products_with_12_bits_have_the_bits_of_the_matrix(columns: int, exceptions: int) -> None:
    for height in (SHORT, TALL):
        one = of_coded(exceptions, height, columns, BF16)
        for num_rows, tile in product((1, 8, 9, MOST_ROWS), (*TILES, None)):
            found, expected = products(one, num_rows, bias=num_rows in (1, 9), add=num_rows in (8, 9), tile=tile)
            assert torch.equal(found, expected), (height, num_rows, tile)


def test_blocks_behind_the_last_column_are_no_infinities() -> None:
    """One block of large weights in fp16, and others whose numbers would be too large with its scale."""
    stored = torch.zeros(1, 20, 18, dtype=torch.uint8)  # numbers are -8
    stored[0, 18, 2:] = 0xFF
    stored.view(torch.float16)[0, :, 0] = 2.0**-10
    stored.view(torch.float16)[0, 18, 0] = 9000.0
    rows = in_rows("Q4_0", stored.view(20, 18), 20).to(KERNEL_DEVICE)
    out, x = torch.empty(1, 1, dtype=FP16, device=KERNEL_DEVICE), torch.full((1, 640), 2.0**-12, dtype=FP16)
    gguf_linear_triton(x.to(KERNEL_DEVICE), rows, FORMATS["Q4_0"], out)
    assert float(out) == pytest.approx(32 * 63000 * 2.0**-12, rel=1e-3)


@pytest.mark.parametrize("zeros", [False, True])
def test_numbers_behind_the_last_column_are_no_infinities(zeros: bool) -> None:
    """Numbers below the least real one would be, in fp16 with a large scale."""
    form = ScaledFormat("uint4", 1, 1024, FP16, 0 if zeros else 8, zeros=zeros)
    numbers, stored_zeros = torch.full((1, 272), 0xFF, dtype=torch.uint8), torch.full((1, 1), 8, dtype=torch.uint8)
    scales = torch.full((1, 1), 9000.0, dtype=FP16)
    stored = on_device(stored_rows(form, numbers, scales, stored_zeros, torch.empty(0, dtype=torch.int32)))
    out, x = torch.empty(1, 1, dtype=FP16, device=KERNEL_DEVICE), torch.full((1, 544), 2.0**-12, dtype=FP16)
    scaled_linear_triton(x.to(KERNEL_DEVICE), stored, form, out)
    assert float(out) == pytest.approx(544 * 63000 * 2.0**-12, rel=1e-3)


def test_what_is_multiplied_as_it_is_stored() -> None:
    """Not columns in an order of their own, nor groups that tiles do not divide."""
    form = ScaledFormat("uint4", 1, 128, FP16)
    expected = {32: 32, 64: 64, 128: 128, 256: 256, 768: 256, 4096: 0, 16: None, 96: None, 384: None}
    for columns, group in expected.items():
        assert columns_of_scale(form._replace(columns=columns), 4096) == group
    assert columns_of_scale(form._replace(ordered=True), 4096) is None
