"""Copy a few integers between page-locked host memory and the device by a kernel, past all that waits for the link.

target[i] = source[i]        for all i < N
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

_BLOCK = 1024


def copy_words_reference(source: torch.Tensor, target: torch.Tensor) -> None:
    """Plain torch version of `copy_words`."""
    target.copy_(source)


# Of any alignment, so that one binary serves all.
@jit(do_not_specialize=("source_ptr", "target_ptr", "count"))
def _copy_words_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + index, tl.load(source_ptr + index, mask=index < count), mask=index < count)


def copy_words_triton(source: torch.Tensor, target: torch.Tensor) -> None:
    """Triton version of `copy_words`."""
    require_triton("copying from host memory")
    with torch.cuda.device_of(target if target.is_cuda else source):
        _copy_words_kernel[(triton.cdiv(len(source), _BLOCK),)](source, target, len(source), BLOCK=_BLOCK, num_warps=4)


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy int32 [N], contiguous, to `target` [N], enqueued on the current stream.

    Where one side is on a GPU, whose stream it is then, the other may be page-locked host memory. What is read must
    stay as it is until the stream has come that far.
    """
    assert source.dtype == target.dtype == torch.int32 and source.shape == target.shape and source.ndim == 1
    assert source.is_contiguous() and target.is_contiguous()
    (copy_words_triton if source.is_cuda or target.is_cuda else copy_words_reference)(source, target)
