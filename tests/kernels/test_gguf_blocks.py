"""`decode_blocks`: every format against the gguf package and the kernel against the reference, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks_reference, decode_blocks_triton

from tests.helpers.kernel_conditions import KERNEL_DEVICE

# Of inf * 0 and of what fp16 has no room for, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # what the package itself can pack
# 0, subnormal, the least normal, ordinary, the largest.
SCALES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x1A2B, 0xB3C5, 0x3C00, 0xC4D1, 0x7BFF, 0xFBFF)
NOT_FINITE = (0x7C00, 0xFC00, 0x7E00, 0xFC01)


def blocks_of(kind: str, count: int, scales: tuple[int, ...] = SCALES) -> torch.Tensor:
    """uint8 [256 + count, nbytes]: every byte in every place, then random ones; with `scales` by turns."""
    form, generator = FORMATS[kind], np.random.default_rng(len(kind) + count)
    same = np.repeat(np.arange(256, dtype=np.uint8)[:, None], form.nbytes, axis=1)
    blocks = np.concatenate((same, generator.integers(0, 256, (count, form.nbytes), dtype=np.uint8)))
    for at in (form.d, form.m):
        if at is not None:
            chosen = generator.choice(np.array(scales, dtype=np.uint16), (len(blocks), 1))
            blocks[:, at : at + 2] = chosen.view(np.uint8)
    return torch.from_numpy(blocks)


def by_package(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """fp32 [blocks, weights]."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def by_reference(kind: str, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((len(blocks), FORMATS[kind].weights), float("nan"), dtype=dtype)
    decode_blocks_reference(blocks, FORMATS[kind], out)
    return out


def by_kernel(kind: str, blocks: torch.Tensor, dtype: torch.dtype, *, offset: int = 0) -> torch.Tensor:
    """The blocks lie `offset` bytes into an allocation; what lies behind the result must stay as it is."""
    form = FORMATS[kind]
    room = torch.zeros(offset + blocks.numel(), dtype=torch.uint8, device=KERNEL_DEVICE)
    room[offset:] = blocks.flatten()
    out = torch.full((len(blocks) + 3, form.weights), 7.0, dtype=dtype, device=KERNEL_DEVICE)
    decode_blocks_triton(room[offset:], form, out[: len(blocks)])
    assert bool((out[len(blocks) :] == 7.0).all())
    return out[: len(blocks)].cpu()


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The sign of a zero counts, the payload of a NaN does not."""
    bits = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    numbers = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[numbers].view(bits), expected[numbers].view(bits))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", FORMATS)
def test_reference_is_the_packages_formula(kind: str) -> None:
    form = FORMATS[kind]
    assert (form.weights, form.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for scales in (SCALES, SCALES + NOT_FINITE):
        # More than are decoded at a time.
        blocks = blocks_of(kind, 800, scales)
        expected = by_package(kind, blocks)
        assert bool(expected.isfinite().all()) == (scales == SCALES)
        for dtype in (FP32, BF16, FP16):
            assert_same_bits(by_reference(kind, blocks, dtype), expected.to(dtype))


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_that_the_package_packed(kind: str) -> None:
    values = np.random.default_rng(0).standard_t(3, (96, 256)).astype(np.float32)
    blocks = torch.from_numpy(gguf.quantize(values, gguf.GGMLQuantizationType[kind])).view(-1, FORMATS[kind].nbytes)
    expected = by_package(kind, blocks)
    assert_same_bits(by_reference(kind, blocks, FP32), expected)
    assert_same_bits(by_kernel(kind, blocks, FP32), expected)
    error = (expected.view(values.shape) - torch.from_numpy(values)).abs().mean()
    assert float(error) < 0.2 * float(np.abs(values).mean())  # and it is what was packed


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=pytest.mark.gpu)])
def test_kernel_has_the_bits_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    """A last program that is not full, one block alone, and blocks at an address that is even and no more."""
    blocks = blocks_of(kind, 131, SCALES + NOT_FINITE)
    expected = by_reference(kind, blocks, dtype)
    assert_same_bits(by_kernel(kind, blocks, dtype), expected)
    assert_same_bits(by_kernel(kind, blocks[300:301], dtype), expected[300:301])
    assert_same_bits(by_kernel(kind, blocks[:17], dtype, offset=2), expected[:17])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_of_real_models(kind: str) -> None:
    """gate and up of Llama-3-70B, and a matrix of more weights than 32 bits count: blocks that come again and again."""
    form = FORMATS[kind]
    once = blocks_of(kind, 1 << 14)
    expected = by_reference(kind, once, BF16).to(KERNEL_DEVICE)
    for weights in (57344 * 8192, (1 << 31) + (1 << 16)):
        times = -(-weights // expected.numel())
        out = torch.empty(times, *expected.shape, dtype=BF16, device=KERNEL_DEVICE)
        decode_blocks_triton(once.to(KERNEL_DEVICE).repeat(times, 1), form, out)
        assert all(torch.equal(part.view(torch.int16), expected.view(torch.int16)) for part in out)
