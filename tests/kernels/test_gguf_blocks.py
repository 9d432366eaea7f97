"""`decode_blocks`: every format against the gguf package and the kernel against the reference, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from offload_runtime_kernels import gguf_blocks as ops

from tests.helpers.kernel_conditions import KERNEL_DEVICE

# Of inf * 0 and of what fp16 has no room for, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")  # what the package itself can pack
# 0, subnormal, the least normal, ordinary, the largest.
SCALES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x1A2B, 0xB3C5, 0x3C00, 0xC4D1, 0x7BFF, 0xFBFF)
NOT_FINITE = (0x7C00, 0xFC00, 0x7E00, 0xFC01)


def blocks_of(kind: str, count: int, scales: tuple[int, ...] = SCALES) -> torch.Tensor:
    """uint8 [256 + count, nbytes]: every byte in every place, then random ones; with `scales` by turns; of powers
    of two first those that kernels take, and then the scales'."""
    form, generator = ops.FORMATS[kind], np.random.default_rng(len(kind) + count)
    same = np.repeat(np.arange(256, dtype=np.uint8)[:, None], form.nbytes, axis=1)
    blocks = np.concatenate((same, generator.integers(0, 256, (count, form.nbytes), dtype=np.uint8)))
    for at in form.file_halves:
        blocks[:, at : at + 2] = generator.choice(np.array(scales, dtype=np.uint16), (len(blocks), 1)).view(np.uint8)
    if form.e2m1:
        blocks[241:, 0] = (generator.choice(np.array(scales), len(blocks) - 241) >> 10 & 31) + 112
    return torch.from_numpy(blocks)


def by_package(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """fp32 [blocks, weights]."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def in_rows(kind: str, blocks: torch.Tensor, blocks_a_row: int = 1) -> torch.Tensor:
    """uint8 [R, row_bytes]: so many blocks of a file after another as a row."""
    form = ops.FORMATS[kind]
    rows = blocks.reshape(-1, blocks_a_row * form.nbytes)
    out = torch.full((len(rows), form.row_bytes(blocks_a_row * form.weights)), 255, dtype=torch.uint8)
    ops.pack_rows(rows, form, blocks_a_row * form.weights, out)
    return out


def by_reference(kind: str, blocks: torch.Tensor, dtype: torch.dtype, blocks_a_row: int = 1) -> torch.Tensor:
    """[blocks, weights]."""
    stored = in_rows(kind, blocks, blocks_a_row)
    out = torch.full((len(stored), blocks_a_row * ops.FORMATS[kind].weights), float("nan"), dtype=dtype)
    ops.decode_blocks_reference(stored, ops.FORMATS[kind], out)
    return out.view(len(blocks), -1)


def by_kernel(kind: str, blocks: torch.Tensor, dtype: torch.dtype, blocks_a_row: int = 1) -> torch.Tensor:
    """The same; what lies behind the result must stay as it is."""
    stored = in_rows(kind, blocks, blocks_a_row).to(KERNEL_DEVICE)
    columns = blocks_a_row * ops.FORMATS[kind].weights
    out = torch.full((len(stored) + 3, columns), 7.0, dtype=dtype, device=KERNEL_DEVICE)
    ops.decode_blocks_triton(stored, ops.FORMATS[kind], out[: len(stored)])
    assert bool((out[len(stored) :] == 7.0).all())
    return out[: len(stored)].view(len(blocks), -1).cpu()


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The sign of a zero counts, the payload of a NaN does not."""
    bits = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    numbers = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[numbers].view(bits), expected[numbers].view(bits))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ops.FORMATS)
def test_reference_is_the_packages_formula(kind: str) -> None:
    form = ops.FORMATS[kind]
    assert (form.weights, form.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for scales in (SCALES, SCALES + NOT_FINITE):
        # More than are decoded at a time.
        blocks = blocks_of(kind, 800, scales)
        expected = by_package(kind, blocks)
        assert bool(expected.isfinite().all()) == (scales == SCALES or form.e2m1)
        for dtype in (FP32, BF16, FP16):
            assert_same_bits(by_reference(kind, blocks, dtype), expected.to(dtype))


def test_every_power_of_mxfp4_is_the_packages() -> None:
    """Of 0 and of 255 too, and where the largest numbers are infinite."""
    blocks = torch.randint(256, (256, 17), dtype=torch.uint8)
    blocks[:, 0] = torch.arange(256)
    blocks[:, 1:9] = torch.arange(0x10, 0x100, 0x1E, dtype=torch.uint8)
    expected = by_package("MXFP4", blocks)
    assert float(expected[0].abs().max()) > 0 and bool(expected[255].isinf().any())
    assert_same_bits(by_reference("MXFP4", blocks, FP32), expected)


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_that_the_package_packed(kind: str) -> None:
    values = np.random.default_rng(0).standard_t(3, (16, 256)).astype(np.float32)
    blocks = torch.from_numpy(gguf.quantize(values, gguf.GGMLQuantizationType[kind])).view(-1, ops.FORMATS[kind].nbytes)
    expected = by_package(kind, blocks)
    assert_same_bits(by_reference(kind, blocks, FP32), expected)
    assert_same_bits(by_kernel(kind, blocks, FP32), expected)
    error = (expected.view(values.shape) - torch.from_numpy(values)).abs().mean()
    assert float(error) < 0.2 * float(np.abs(values).mean())  # and it is what was packed


@pytest.mark.parametrize("kind", ops.FORMATS)
def test_a_packed_row_has_the_bytes_of_its_blocks_and_zeros(kind: str) -> None:
    for blocks_a_row in (1, 2, 5):
        blocks = blocks_of(kind, 4).view(-1, ops.FORMATS[kind].nbytes)[:250]
        rows = in_rows(kind, blocks, blocks_a_row)
        padding = rows.shape[1] - blocks_a_row * ops.FORMATS[kind].nbytes
        assert 0 <= padding < 3 * ops.FORMATS[kind].nbytes + 16  # of four blocks that are loaded together
        expected = torch.nn.functional.pad(blocks.reshape(len(rows), -1), (0, padding))
        assert torch.equal(rows.sort(dim=1).values, expected.sort(dim=1).values)
        unpacked = ops.unpack_rows(rows, ops.FORMATS[kind], blocks_a_row * ops.FORMATS[kind].weights)
        assert torch.equal(unpacked, blocks.reshape(len(rows), -1))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ops.FORMATS)
@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=pytest.mark.gpu)])
def test_kernel_has_the_bits_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Rows of whole tiles, of one block, and of some that neither a tile nor a unit of two blocks divides; a last
    program that is not full, and a row alone. Layouts differ in where bytes are: all blocks are in the first."""
    blocks = blocks_of(kind, 17 * 24 - 256, SCALES + NOT_FINITE)
    whole_tile = 256 // ops.FORMATS[kind].weights
    for blocks_a_row in (2 * whole_tile, 1, 17 if whole_tile > 1 else 3):
        some = blocks[: len(blocks) // blocks_a_row * blocks_a_row]
        if blocks_a_row != 2 * whole_tile:
            rows = some.view(-1, blocks_a_row, some.shape[1])
            some = rows[:: -(-len(rows) // 40)].flatten(0, 1)  # two programs at most
        expected = by_reference(kind, some, dtype, blocks_a_row)
        assert_same_bits(by_kernel(kind, some, dtype, blocks_a_row), expected)
        one_row = slice(3 * blocks_a_row, 4 * blocks_a_row)
        assert_same_bits(by_kernel(kind, some[one_row], dtype, blocks_a_row), expected[one_row])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ops.FORMATS)
def test_matrices_of_real_models(kind: str) -> None:
    """gate and up of Llama-3-70B, and a matrix of more weights than 32 bits count: rows that come again and again."""
    form = ops.FORMATS[kind]
    blocks_a_row = 8192 // form.weights
    once = in_rows(kind, blocks_of(kind, 64 * blocks_a_row - 256), blocks_a_row).to(KERNEL_DEVICE)
    expected = torch.empty(64, 8192, dtype=BF16)
    ops.decode_blocks_reference(once.cpu(), form, expected)
    expected = expected.to(KERNEL_DEVICE)
    for height in (57344, (1 << 18) + 64):
        out = torch.empty(height, 8192, dtype=BF16, device=KERNEL_DEVICE)
        ops.decode_blocks_triton(once.repeat(height // 64, 1), form, out)
        assert all(torch.equal(part.view(torch.int16), expected.view(torch.int16)) for part in out.split(64))
