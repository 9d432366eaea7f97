"""`gguf_linear`: the product of rows with GGUF blocks against the product of the decoded matrix."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from offload_runtime_kernels.encoded_linear import MOST_ROWS, EncodedTile
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks_reference
from offload_runtime_kernels.gguf_linear import gguf_linear_triton

from tests.helpers import encoded_products
from tests.helpers.encoded_products import TILES, assert_close
from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_gguf_blocks import blocks_of, in_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Below and above what is cut otherwise: so many rows of W that each program has rows of its own.
SHORT, TALL = 72, 8200
# What is added has code of its own, which no format changes: each of these takes four times as long to compile.
FUSED = ("Q4_K", "Q5_0")


def matrix(kind: str, height: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks of ordinary scales: stored rows, and the decoded ones."""
    form = FORMATS[kind]
    blocks_a_row = columns // form.weights
    blocks = blocks_of(kind, height * blocks_a_row, (0x1A2B, 0x93C5, 0x9001, 0x1800))[256:]
    stored = in_rows(kind, blocks, blocks_a_row)
    out = torch.empty(height, columns, dtype=dtype)
    decode_blocks_reference(stored, form, out)
    return stored.to(KERNEL_DEVICE), out.to(KERNEL_DEVICE)


def products(
    kind: str, stored: torch.Tensor, decoded: torch.Tensor, num_rows: int, *, bias: bool, add: bool,
    tile: EncodedTile | None = TILES[0],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """With blocks, and with the decoded matrix."""
    return encoded_products.products(
        lambda x, out, **fused: gguf_linear_triton(x, stored, FORMATS[kind], out, **fused), decoded, num_rows,
        bias=bias, add=add, tile=tile,
    )  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_those_of_the_decoded_matrix(kind: str, dtype: torch.dtype) -> None:
    """A K that is no whole number of tiles, or of steps, and rows of W that are no whole number of programs'."""
    columns = 768 if FORMATS[kind].weights == 256 else 544
    assert_close(*products(kind, *matrix(kind, SHORT, columns, dtype), 3, bias=True, add=True))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q2_K", "IQ4_NL"])
def test_rows_of_w_may_be_the_second_operand(kind: str) -> None:
    columns = 768 if FORMATS[kind].weights == 256 else 544
    assert_close(*products(kind, *matrix(kind, SHORT, columns, FP32), 9, bias=True, add=True, tile=TILES[1]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q6_K"])
def test_products_of_more_rows_than_eight_are_those_of_the_decoded_matrix(kind: str) -> None:
    """Of the first operand with 16 rows of x, nothing added, and of the tile that the wrapper takes by itself."""
    columns = 256 if kind != "Q5_0" else 160
    for tile in (TILES[0], None):
        assert_close(*products(kind, *matrix(kind, SHORT, columns, FP32), 9, bias=False, add=False, tile=tile))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", FORMATS)
def test_products_have_the_bits_of_the_decoded_matrix(kind: str, dtype: torch.dtype) -> None:
    """Of every way to cut them; a K that is no multiple of a tile, and ones of an odd and an even number of blocks that
    are no whole tiles."""
    for height, columns in product((SHORT, TALL), (1024, 768) if FORMATS[kind].weights == 256 else (1024, 544, 576)):
        stored, decoded = matrix(kind, height, columns, dtype)
        for num_rows in (1, 5, 8, 9, MOST_ROWS):
            bias, add = kind in FUSED and num_rows in (1, 8), kind in FUSED and num_rows in (8, 9)
            for tile in TILES if kind in FUSED or num_rows == 5 else TILES[:1]:
                found, expected = products(kind, stored, decoded, num_rows, bias=bias, add=add, tile=tile)
                assert torch.equal(found, expected), (height, num_rows, columns, tile)


def test_weights_behind_the_last_column_are_no_infinities() -> None:
    """One block of large weights in fp16, and others whose numbers would be too large with its scale."""
    stored = torch.zeros(1, 20, 18, dtype=torch.uint8)  # numbers are -8
    stored[0, 18, 2:] = 0xFF
    stored.view(torch.float16)[0, :, 0] = 2.0**-10
    stored.view(torch.float16)[0, 18, 0] = 9000.0
    rows = in_rows("Q4_0", stored.view(20, 18), 20).to(KERNEL_DEVICE)
    out, x = torch.empty(1, 1, dtype=FP16, device=KERNEL_DEVICE), torch.full((1, 640), 2.0**-12, dtype=FP16)
    gguf_linear_triton(x.to(KERNEL_DEVICE), rows, FORMATS["Q4_0"], out)
    assert float(out) == pytest.approx(32 * 63000 * 2.0**-12, rel=1e-3)
