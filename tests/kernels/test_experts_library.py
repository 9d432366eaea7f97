"""`expert_rows` of many rows by the library: what it computes, and on a GPU the bits of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from offload_runtime_kernels import experts as ops
from offload_runtime_kernels.experts import ExpertShape
from offload_runtime_kernels.experts_library import (
    LibraryCut,
    decode_experts,
    expert_rows_library,
    library_scratch_bytes,
)
from offload_runtime_kernels.experts_triton import expert_rows_triton
from offload_runtime_kernels.gguf_blocks import FORMATS

from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_experts import (
    BF16,
    CLAMPED,
    FP8,
    FP16,
    FP32,
    INT4,
    INT4_OF_ROWS,
    INT8,
    LARGE,
    NVFP4,
    SILU,
    UINT8,
    Problem,
    pooled,
    random_blocks,
)


def by_library(shape: ExpertShape, cut: LibraryCut | None = None, **options: Any) -> Callable[..., None]:
    """`expert_rows` by the library, in memory that is full of NaN."""
    cut = cut or LibraryCut.of(shape)
    scratch = torch.full((cut.nbytes,), 255, dtype=torch.uint8, device=KERNEL_DEVICE)
    return partial(expert_rows_library, scratch=scratch, cut=cut, **options)


# Groups of one expert, whose matrices are decoded in slices and whose rows are taken 64 at a time, and of all; there,
# experts of fewer rows are the kernel's.
@pytest.mark.parametrize(("shape", "small", "fewest_rows"), [(SILU, True, 1), (CLAMPED, False, 65)])
def test_is_what_the_reference_computes(shape: ExpertShape, small: bool, fewest_rows: int) -> None:
    shape = replace(shape, inner=48)
    problem = pooled(Problem.random(shape, 130, 3, FP32, bias=shape.limit is not None), [2, 1, -1, 3, 5, 0])
    cut = LibraryCut.of(shape)
    if small:
        cut = replace(LibraryCut.of(shape, matrix_bytes=4 * 64 * 48), rows=64)
        assert cut.items == 1 and cut.gate_up_rows < 2 * shape.inner and cut.nbytes < LibraryCut.of(shape).nbytes / 4
    there = problem.on(KERNEL_DEVICE)
    found = there.rows(by_library(shape, cut, compares=False, fewest_rows=fewest_rows)).cpu()
    expected = problem.rows()
    atol = 1e-5 * float(expected.nan_to_num().abs().max())
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5, equal_nan=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("kind", [*FORMATS, FP8, INT4, INT4_OF_ROWS, NVFP4, INT8, UINT8, "F16"], ids=str)
def test_experts_are_decoded_where_they_lie(kind: Any, dtype: torch.dtype) -> None:
    """A K that is no whole number of steps, where blocks are that small."""
    columns = 512 if kind in FORMATS and FORMATS[kind].weights > 32 else 288
    if kind == "F16":
        make = torch.Generator().manual_seed(0)
        matrices = ops.StoredMatrices.of(torch.randn(3, 40, columns, generator=make).to(KERNEL_DEVICE, FP16))
    else:
        matrices = random_blocks(kind, 3, 40, columns)
    table = torch.tensor([[9, 9, 9, 9], [2, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.int32, device=KERNEL_DEVICE)
    found = torch.full((2, 30, columns), torch.nan, device=KERNEL_DEVICE)
    decode_experts(matrices, found.to(dtype), table, 1, 8, found)
    expected = matrices.decoded(table[1:, 0].long(), dtype)[:, 8:38].float()
    assert torch.equal(found, expected)


def test_small_cards_have_room_for_it() -> None:
    mixtral, gpt_oss = ExpertShape(8, 6144, 16384), LARGE[1][0]
    for shape in (mixtral, replace(gpt_oss, num_experts=128), ExpertShape(128, 2048, 768)):
        assert 0 < library_scratch_bytes(shape, 1 << 20, 2) == library_scratch_bytes(shape, 1 << 15, 2) < 220e6
    assert library_scratch_bytes(gpt_oss, 1, 4) == 0


HEIGHTS = [1, 63, 64, 65, 300, 1500]


@pytest.mark.gpu
@pytest.mark.parametrize("fewest_rows", [1, 64])
@pytest.mark.parametrize(("shape", "num_chosen", "kinds", "dtype"), LARGE)
def test_has_the_bits_of_the_kernels(
    shape: ExpertShape, num_chosen: int, kinds: tuple[Any, Any], dtype: torch.dtype, fewest_rows: int
) -> None:
    problem = Problem.encoded(shape, 2400, num_chosen, dtype, kinds)
    # The first experts have one choice of so many rows; of the other rows all choices are other experts.
    choices = torch.stack([(torch.randperm(shape.num_experts - 6)[:num_chosen] + 6).sort().values for _ in range(2400)])
    first = 0
    for expert, count in enumerate(HEIGHTS):
        choices[first : first + count, 0] = expert
        first += count
    problem = replace(problem, choices=choices).on("cuda")
    expected = problem.rows(expert_rows_triton)
    run = by_library(shape, fewest_rows=fewest_rows)
    assert torch.equal(problem.rows(run), expected)
    assert torch.equal(problem.rows(partial(ops.expert_rows, scratch=run.keywords["scratch"])), expected)
    unchecked = problem.rows(partial(run, compares=False))
    torch.testing.assert_close(unchecked, expected, atol=1e-2 * float(expected.abs().max()), rtol=1e-2)
    if not torch.equal(unchecked, expected):
        pytest.skip("the kernels have done some or all: this device's library has other bits at some height")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q5_K", "IQ4_XS", INT4, INT4_OF_ROWS, INT8, UINT8], ids=str
)
def test_has_the_bits_of_the_kernels_in_other_formats(kind: Any) -> None:
    problem = Problem.encoded(ExpertShape(4, 512, 512), 600, 2, BF16, (kind, kind)).on("cuda")
    assert torch.equal(problem.rows(by_library(problem.shape, fewest_rows=1)), problem.rows(expert_rows_triton))


@pytest.mark.gpu
def test_a_setting_of_torch_changes_no_bit() -> None:
    problem = Problem.random(ExpertShape(8, 512, 512), 1024, 2, BF16).on("cuda")
    expected, run = problem.rows(expert_rows_triton), by_library(problem.shape, fewest_rows=1)
    assert torch.equal(problem.rows(run), expected)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert torch.equal(problem.rows(run), expected)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
