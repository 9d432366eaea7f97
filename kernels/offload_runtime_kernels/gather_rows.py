"""Rows of a matrix in page-locked host memory, read by a kernel over the link: the device alone knows which.

out[i] = matrix[index[i]]        for all i < N
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

_BLOCK = 1024
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather_rows_reference(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Plain torch version of `gather_rows`."""
    return matrix.index_select(0, index.to(matrix.device)).to(index.device)


# A pass has any number of rows, and its tokens may lie anywhere.
@jit(do_not_specialize=("index_ptr",))
def _gather_rows_kernel(matrix_ptr, index_ptr, out_ptr, row_words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < row_words
    source = matrix_ptr + tl.load(index_ptr + row).to(tl.int64) * row_words + word
    tl.store(out_ptr + row * row_words + word, tl.load(source, mask=inside), mask=inside)


def gather_rows_triton(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Triton version of `gather_rows`."""
    require_triton("reading rows of host memory")
    out = torch.empty(len(index), *matrix.shape[1:], dtype=matrix.dtype, device=index.device)
    row_bytes = matrix.shape[1] * matrix.element_size()
    word = next(dtype for dtype in _WORDS if row_bytes % dtype.itemsize == 0)
    row_words = row_bytes // word.itemsize
    grid = (len(index), triton.cdiv(row_words, _BLOCK))
    with torch.cuda.device_of(index):
        _gather_rows_kernel[grid](matrix.view(word), index, out.view(word), row_words, BLOCK=_BLOCK, num_warps=4)
    return out


def gather_rows(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows of a matrix [M, K], contiguous, by their numbers [N], integers: [N, K] on the device of `index`.

    Where that is a GPU the matrix may be in page-locked host memory, registered in one piece. It is enqueued on the
    current stream and fit for a CUDA graph; what is read must stay as it is until the stream has come that far.
    """
    assert matrix.ndim == 2 and matrix.is_contiguous() and index.ndim == 1 and index.is_contiguous()
    return (gather_rows_triton if index.is_cuda else gather_rows_reference)(matrix, index)
