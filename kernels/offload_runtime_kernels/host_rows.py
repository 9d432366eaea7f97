"""Rows that the host's threads write while the device works: it waits for them, and no launch has to.

wait until ready is not 0;    target[i] = source[i]        for all i where wanted[i] is not 0
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

_BLOCK = 1024


def take_host_rows_reference(
    ready: torch.Tensor, wanted: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:  # fmt: skip
    """Plain torch version of `take_host_rows`, once they are ready."""
    assert ready.item()
    some = wanted.nonzero()[:, 0]
    target[some.to(target.device)] = source[some].to(target.device)


@jit
def _wait_kernel(ready_ptr):
    ready = tl.load(ready_ptr, volatile=True)
    while ready == 0:
        ready = tl.load(ready_ptr, volatile=True)


@jit
def _take_kernel(wanted_ptr, source_ptr, target_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    taken = word < tl.where(tl.load(wanted_ptr + row) != 0, WORDS, 0)
    tl.store(target_ptr + row * WORDS + word, tl.load(source_ptr + row * WORDS + word, mask=taken), mask=taken)


def take_host_rows_triton(
    ready: torch.Tensor, wanted: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:  # fmt: skip
    """Triton version of `take_host_rows`. One warp waits, behind which the others start."""
    require_triton("taking rows of host memory")
    rows, words = target.shape
    with torch.cuda.device_of(target):
        _wait_kernel[(1,)](ready, num_warps=1)
        _take_kernel[rows, triton.cdiv(words, _BLOCK)](wanted, source, target, WORDS=words, BLOCK=_BLOCK, num_warps=4)


def take_host_rows(ready: torch.Tensor, wanted: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy some rows, when they are ready; enqueued on the current stream.

    Args:
        ready: [1] int32, host: not 0 once `source` is written. On a CPU it must be so already.
        wanted: [R] int32, host: not 0 where a row is to be copied.
        source: [R, W] int32, host, contiguous. What is on the host is page-locked where the target is on a GPU.
        target: [R, W] int32, contiguous. Other rows are left as they are.
    """
    assert ready.dtype == wanted.dtype == source.dtype == target.dtype == torch.int32
    assert source.shape == target.shape and len(wanted) == len(target) and ready.shape == (1,)
    assert source.is_contiguous() and target.is_contiguous() and wanted.is_contiguous()
    (take_host_rows_triton if target.is_cuda else take_host_rows_reference)(ready, wanted, source, target)
