"""`encode_rest` and `decode_rest`: every bit comes back, by the reference and by the kernel."""

from itertools import product

import pytest
import torch
from offload_runtime_kernels import low_bit_rest
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks_reference
from offload_runtime_kernels.low_bit_encode import (
    CodedRows,
    encode_fp8_rest,
    encode_q8_rest,
    encode_rest,
    rest_words_reference,
    rest_words_triton,
)
from offload_runtime_kernels.low_bit_rest import (
    FP8,
    Q8_0,
    decode_rest_reference,
    decode_rest_triton,
    rest_bytes,
    used_bytes,
)
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows, decode_scaled_reference

from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_coded_bf16 import MATRICES, assert_same_bits, gaussian
from tests.kernels.test_gguf_blocks import assert_same_bits as assert_same_bits_of
from tests.kernels.test_gguf_blocks import blocks_of, in_rows
from tests.kernels.test_low_bit_copy import copy_of
from tests.kernels.test_scaled_rows import made, on_device, stored_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # of what fp16 has no room for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# From which row on, and to what; the interpreter has no arithmetic in bf16.
PARTS = [(0, FP32), (1, FP16), *([(0, BF16), (1, BF16)] if KERNEL_DEVICE.type == "cuda" else [])]
# A group, shorter ones, tiles that end within one and within a group, several tiles.
SHAPES = ((5, 64), (3, 40), (4, 200), (3, 576), (2, 1280))


def coded(values: torch.Tensor, nbytes: int | None = None) -> tuple[torch.Tensor, ScaledRows]:
    """In so many bytes, or as many as a plan has."""
    copy = copy_of(values)
    stored = torch.full((nbytes or rest_bytes(*values.shape),), 255, dtype=torch.uint8, device=values.device)
    assert encode_rest(values, copy, stored)
    return stored, copy


def check(values: torch.Tensor, nbytes: int | None = None) -> None:
    """By the reference and by the kernel, all rows and those behind the first; what lies behind the result stays."""
    values = values.to(KERNEL_DEVICE)
    stored, copy = coded(values, nbytes)
    for decode in (decode_rest_reference, decode_rest_triton):
        for start in (0, 1):
            out = torch.full(values.shape, 7.0, dtype=BF16, device=KERNEL_DEVICE)
            decode(stored, copy, start, out[: len(values) - start])
            assert_same_bits(out[: len(values) - start], values[start:])
            assert bool((out[len(values) - start :] == 7.0).all())


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MATRICES)
def test_every_bit_comes_back(name: str, shape: tuple[int, int]) -> None:
    """Whatever room it takes: each weight at most 32 bits."""
    check(MATRICES[name](*shape), rest_bytes(*shape) + 4 * shape[0] * shape[1])


@pytest.mark.parametrize("name", ["heavy-tailed", "zero"])
def test_what_a_plan_has_room_for(name: str) -> None:
    values = MATRICES[name](4, 1024)
    stored, _ = coded(values)
    check(values, used_bytes(stored, 4))
    assert rest_bytes(4096, 4096) < 8.6 / 8 * 4096 * 4096


def test_what_has_no_room_is_said_to() -> None:
    for name in ("infinite", "NaN payloads"):
        values = MATRICES[name](8, 256)
        assert not encode_rest(values, copy_of(values), torch.empty(rest_bytes(8, 256), dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_decoded_to_other_dtypes(dtype: torch.dtype) -> None:
    values = gaussian(5, 200)
    stored, copy = coded(values.to(KERNEL_DEVICE))
    for decode in (decode_rest_reference, decode_rest_triton):
        out = torch.full(values.shape, 7.0, dtype=dtype, device=KERNEL_DEVICE)
        decode(stored, copy, 0, out)
        assert torch.equal(out.cpu(), values.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MATRICES)
def test_a_gpu_writes_what_a_cpu_does(name: str) -> None:
    """Given the same copy."""
    values = MATRICES[name](130, 4096)
    copy, stored = copy_of(values), torch.empty(5 * 130 * 4096, dtype=torch.uint8)
    assert encode_rest(values, copy, stored)
    moved, found = copy_of(values.to(KERNEL_DEVICE)), stored.to(KERNEL_DEVICE)
    for to, one in zip(moved, copy, strict=True):
        to.copy_(one)
    found.fill_(255)
    assert encode_rest(values.to(KERNEL_DEVICE), moved, found)
    used = used_bytes(stored, 130)
    assert torch.equal(found[:524].cpu(), stored[:524]) and torch.equal(found[768:used].cpu(), stored[768:used])


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(4096, 11008), (57344, 8192)])
def test_matrices_of_real_models(rows: int, columns: int) -> None:
    values = (0.02 * torch.randn(rows, columns, device=KERNEL_DEVICE)).bfloat16()
    check(values)


def q8_rows(values: torch.Tensor) -> torch.Tensor:
    """Rows as a GGUF file has them in Q8_0, [R, K / 32, 34] uint8, of fp32."""
    blocks = values.unflatten(1, (-1, 32))
    d = (blocks.abs().amax(2, keepdim=True) / 127).half()
    numbers = (blocks / d.float()).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((d.view(torch.uint8), numbers.view(torch.uint8)), dim=2)


def check_q8(blocks: torch.Tensor, nbytes: int | None = None) -> None:
    """By the reference and by the kernel, all rows and those behind the first, against what the blocks say."""
    stored, shape = in_rows("Q8_0", blocks.flatten(0, 1), blocks.shape[1]), (len(blocks), 32 * blocks.shape[1])
    values = torch.empty(shape)
    decode_blocks_reference(stored, FORMATS["Q8_0"], values)
    copy = copy_of(values.to(KERNEL_DEVICE))
    rest = torch.full((nbytes or rest_bytes(*shape, Q8_0),), 255, dtype=torch.uint8, device=KERNEL_DEVICE)
    assert encode_q8_rest(stored.to(KERNEL_DEVICE), shape[1], copy, rest)
    for decode, (start, dtype) in product((decode_rest_reference, decode_rest_triton), PARTS):
        expected = torch.empty(shape, dtype=dtype)
        decode_blocks_reference(stored, FORMATS["Q8_0"], expected)
        out = torch.full(shape, 7.0, dtype=dtype, device=KERNEL_DEVICE)
        decode(rest, copy, start, out[: len(out) - start], Q8_0)
        assert_same_bits_of(out[: len(out) - start].cpu(), expected[start:])
        assert bool((out[len(out) - start :] == 7.0).all())


@pytest.mark.parametrize("columns", [96, *(pytest.param(one, marks=pytest.mark.slow) for one in (32, 576))])
def test_q8_numbers_come_back(columns: int) -> None:
    """In the room that a plan has, and whatever bytes and scales are in blocks."""
    for name in ("Gaussian", "heavy-tailed"):
        check_q8(q8_rows(MATRICES[name](5, columns).float()))
    blocks = blocks_of("Q8_0", 3 * columns // 32, (0x0000, 0x8001, 0x1A2B, 0x93C5, 0x3C00, 0x7BFF))[256:]
    check_q8(blocks.view(3, -1, 34), rest_bytes(3, columns, Q8_0) + 12 * columns)


def test_q8_has_room() -> None:
    assert rest_bytes(4096, 4096, Q8_0) < 5.6 / 8 * 4096 * 4096


def fp8_matrix(values: torch.Tensor, form: ScaledFormat) -> ScaledRows:
    """fp32 [M, K] with the scales that its blocks need."""
    height, columns = values.shape
    down, across = form.scales(height, columns)
    rows, groups = torch.arange(height) // form.rows, torch.arange(columns) // form.columns
    scales = torch.zeros(down, across)
    index = rows[:, None] * across + groups
    scales.view(-1).scatter_reduce_(0, index.flatten(), values.abs().flatten(), "amax")
    scales = (scales / 448).to(form.scale)
    numbers = (values / scales[rows][:, groups].float()).nan_to_num(0.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored_rows(form, numbers.view(torch.uint8), scales, scales[:0].view(torch.uint8), torch.empty(0))


def check_fp8(whole: ScaledRows, form: ScaledFormat, columns: int, nbytes: int | None = None) -> None:
    """By the reference and by the kernel, all rows and those behind the first, against what the numbers say."""
    shape = (len(whole.numbers), columns)
    values, moved = torch.empty(shape), on_device(whole)
    decode_scaled_reference(whole, form, 0, values)
    copy = copy_of(values.to(KERNEL_DEVICE))
    rest = torch.full((nbytes or rest_bytes(*shape, FP8),), 255, dtype=torch.uint8, device=KERNEL_DEVICE)
    assert encode_fp8_rest(moved, form, columns, copy, rest)
    for decode, (start, dtype) in product((decode_rest_reference, decode_rest_triton), PARTS):
        expected = torch.empty(shape, dtype=dtype)
        decode_scaled_reference(whole, form, 0, expected)
        out = torch.full(shape, 7.0, dtype=dtype, device=KERNEL_DEVICE)
        decode(rest, copy, start, out[: len(out) - start], FP8, moved.scales, form)
        assert_same_bits_of(out[: len(out) - start].cpu(), expected[start:])
        assert bool((out[len(out) - start :] == 7.0).all())


@pytest.mark.slow
@pytest.mark.parametrize("form", [
    ScaledFormat("FP8", 4, 32, FP32), ScaledFormat("FP8", 128, 128, FP32), ScaledFormat("FP8", 1, 1 << 16, FP16),
    pytest.param(ScaledFormat("FP8", 1, 1 << 16, BF16), marks=pytest.mark.gpu),
])  # fmt: skip
def test_fp8_numbers_come_back(form: ScaledFormat) -> None:
    """In the room that a plan has, and whatever bytes and scales are in a matrix."""
    for name, columns in (("Gaussian", 576), ("heavy-tailed", 200), ("zero", 40)):
        check_fp8(fp8_matrix(MATRICES[name](5, columns).float(), form), form, columns)
    check_fp8(made(form, 5, 256), form, 256, 5 * 256 * 5 + 1024)


@pytest.mark.parametrize("columns", [128, 96])
def test_kernels_code_what_the_reference_does(columns: int) -> None:
    """Rows that are not the first ones of their matrix, with exceptions."""
    values, of_blocks = MATRICES["heavy-tailed"](3, columns), ScaledFormat("FP8", 4, 32, FP32)
    values[1, ::5] *= 300
    blocks, whole = q8_rows(values.float()), fp8_matrix(values.repeat(2, 1).float(), of_blocks)
    scales = blocks[:, :, :2].contiguous().view(FP16).flatten(1)
    patterns = torch.tensor([0, 1, 8, 127, 128, 200, 255], dtype=torch.uint8)[torch.arange(3 * columns) % 7]
    alone = ScaledFormat("FP8", 1, 32, FP16)
    for kind, numbers, own, form in (
        (low_bit_rest.BF16, values.view(torch.int16), scales, alone),
        (Q8_0, blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1), scales, alone),
        (FP8, patterns.view(3, columns), whole.scales, of_blocks),
    ):
        rows = CodedRows(kind, numbers, copy_of(values), own, 2 if kind == FP8 else 0, form)
        moved = rows._replace(
            numbers=numbers.to(KERNEL_DEVICE), copy=on_device(rows.copy), scales=own.to(KERNEL_DEVICE)
        )
        for found, expected in zip(rest_words_triton(moved), rest_words_reference(rows), strict=True):
            assert torch.equal(found.cpu().int(), expected.int())


def test_fp8_has_room() -> None:
    assert rest_bytes(4096, 4096, FP8) < 5.1 / 8 * 4096 * 4096
