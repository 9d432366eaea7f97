"""`gather_rows`: the bytes of every row, of any length, from host memory that no copy engine reads."""

import pytest
import torch
from offload_runtime_kernels.gather_rows import gather_rows, gather_rows_reference, gather_rows_triton

from tests.helpers.kernel_conditions import KERNEL_DEVICE


@pytest.mark.parametrize("gather", [gather_rows_reference, gather_rows_triton, gather_rows])
@pytest.mark.parametrize(("columns", "dtype"), [
    (1, torch.uint8), (34, torch.uint8), (5440, torch.uint8), (576, torch.bfloat16), (3, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("count", [1, 5, 300])
def test_rows_are_those_of_the_matrix(gather: object, columns: int, dtype: torch.dtype, count: int) -> None:
    matrix = torch.randint(0, 256, (70, columns * dtype.itemsize), dtype=torch.uint8).view(dtype)
    index = torch.randint(0, 70, (count,), dtype=torch.int32)
    index[-1] = 69
    source = matrix.pin_memory() if KERNEL_DEVICE.type == "cuda" else matrix
    found = gather(source, index.to(KERNEL_DEVICE))  # type: ignore[operator]
    assert found.device == KERNEL_DEVICE and found.dtype == dtype
    assert torch.equal(found.cpu().view(torch.uint8), matrix[index.long()].view(torch.uint8))
