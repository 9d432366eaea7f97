"""`expert_rows` of many rows, whose experts are decoded first: what it computes, and on a GPU the bits of the kernels
that decode on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from offload_runtime_kernels import experts as ops
from offload_runtime_kernels.experts import ExpertShape
from offload_runtime_kernels.experts_decoded import decode_experts, decoding_bytes, expert_rows_decoded
from offload_runtime_kernels.experts_triton import expert_rows_triton
from offload_runtime_kernels.gguf_blocks import FORMATS

from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_experts import (
    BF16,
    FP8,
    FP16,
    FP32,
    INT4,
    INT4_OF_ROWS,
    INT8,
    LARGE,
    NVFP4,
    UINT8,
    Problem,
    pooled,
    random_blocks,
)


def decoded_first(shape: ExpertShape, dtype: torch.dtype, experts: int) -> Callable[..., None]:
    """`expert_rows` in memory for so many experts' larger matrices, full of NaN."""
    nbytes = experts * 2 * shape.inner * shape.hidden * dtype.itemsize
    scratch = torch.full((nbytes,), 255, dtype=torch.uint8, device=KERNEL_DEVICE)
    return partial(expert_rows_decoded, scratch=scratch)


@pytest.mark.parametrize(("experts", "kinds"), [(4, ("MXFP4", "Q8_0")), (1, (INT4, INT4))], ids=str)
def test_is_what_the_reference_computes(experts: int, kinds: tuple[Any, Any]) -> None:
    """Of a pool whose buffers are in an order of their own, one expert nowhere, in groups, the last of fewer; and where
    one of two matrices is elements."""
    shape = ExpertShape(6, 64, 64, limit=7.0 if experts > 1 else None)
    problem = Problem.encoded(shape, 130, 3, FP32, kinds)
    if experts == 1:
        problem = replace(problem, down=problem.decoded().down)
    problem = pooled(problem, [2, 1, -1, 3, 5, 0])
    found = problem.on(KERNEL_DEVICE).rows(decoded_first(shape, FP32, experts)).cpu()
    expected = problem.rows()
    atol = 1e-5 * float(expected.nan_to_num().abs().max())
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5, equal_nan=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("kind", [*FORMATS, FP8, INT4, INT4_OF_ROWS, NVFP4, INT8, UINT8], ids=str)
def test_experts_are_decoded_where_they_lie(kind: Any, dtype: torch.dtype) -> None:
    """A K that is no whole number of steps, where blocks are that small; nothing of an expert without rows, and of one
    that lies nowhere."""
    columns = 512 if kind in FORMATS and FORMATS[kind].weights > 32 else 288
    matrices = random_blocks(kind, 3, 40, columns)
    buffers, starts = (
        torch.tensor(numbers, dtype=torch.int32, device=KERNEL_DEVICE)
        for numbers in ([1, 2, -1, 1, 0], [0, 1, 3, 4, 4, 9])
    )
    found = torch.full((4, 40, columns), torch.nan, dtype=dtype, device=KERNEL_DEVICE)
    decode_experts(matrices, buffers, starts, 1, found)
    expected = matrices.decoded(torch.tensor([2, 0], device=KERNEL_DEVICE), dtype)
    assert torch.equal(found[[0, 3]], expected) and bool(found[[1, 2]].isnan().all())


def test_memory_is_as_much_as_pays() -> None:
    mixtral, gpt_oss = ExpertShape(8, 4096, 14336), replace(LARGE[1][0], num_experts=128)
    for shape in (mixtral, gpt_oss, ExpertShape(128, 2048, 768)):
        assert 200e6 < decoding_bytes(shape, 1 << 20, 2, 2) == decoding_bytes(shape, 1 << 15, 2, 2) < 270e6
    assert decoding_bytes(gpt_oss, 1, 4, 2) == 0  # few rows
    assert decoding_bytes(ExpertShape(8, 6144, 16384), 1 << 20, 2, 2) == 0  # large experts
    assert decoding_bytes(ExpertShape(8, 64, 64), 1 << 20, 2, 2) == 8 * 2 * 64 * 64 * 2  # all of them


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "num_chosen", "kinds", "dtype"), LARGE)
def test_has_the_bits_of_kernels_that_decode_on_the_way(
    shape: ExpertShape, num_chosen: int, kinds: tuple[Any, Any], dtype: torch.dtype
) -> None:
    problem = Problem.encoded(shape, 2400, num_chosen, dtype, kinds)
    # The first experts have one choice of so many rows; of the other rows all choices are other experts.
    choices = torch.stack([(torch.randperm(shape.num_experts - 6)[:num_chosen] + 6).sort().values for _ in range(2400)])
    first = 0
    for expert, count in enumerate([1, 63, 64, 65, 300, 1500]):
        choices[first : first + count, 0] = expert
        first += count
    problem = replace(problem, choices=choices).on("cuda")
    expected = problem.rows(expert_rows_triton)
    for experts in (3, shape.num_experts):
        run = decoded_first(shape, dtype, experts)
        assert torch.equal(problem.rows(run), expected)
        assert torch.equal(problem.rows(partial(ops.expert_rows, scratch=run.keywords["scratch"])), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q5_K", "IQ4_XS", INT4, INT4_OF_ROWS, INT8, UINT8], ids=str
)
def test_has_these_bits_in_other_formats(kind: Any) -> None:
    problem = Problem.encoded(ExpertShape(4, 512, 512), 600, 2, BF16, (kind, kind)).on("cuda")
    run = decoded_first(problem.shape, BF16, 2)
    assert torch.equal(problem.rows(run), problem.rows(expert_rows_triton))
