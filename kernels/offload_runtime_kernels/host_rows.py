"""Rows that the host's threads write while the device works: it waits for them, and no launch has to.

unless ticket is 0:    wait until ready is ticket, or -1;    target[i] = source[i]    for all i with wanted[i] not 0
"""

import time

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

# What lets the device go on whatever it waits for, when the threads have ended.
ENDED = -1
_ENDED = tl.constexpr(ENDED)

_BLOCK = 1024


def take_host_rows_reference(
    ticket: torch.Tensor, ready: torch.Tensor, wanted: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:  # fmt: skip
    """Plain torch version of `take_host_rows`: the host waits."""
    if not ticket.item():
        return
    while ready.item() not in (ticket.item(), ENDED):
        time.sleep(0)
    some = wanted.nonzero()[:, 0]
    target[some] = source[some.cpu()].to(target.device)


@jit
def _wait_kernel(ticket_ptr, ready_ptr):
    ticket = tl.load(ticket_ptr)
    ready = tl.load(ready_ptr, mask=ticket != 0, other=0, volatile=True)  # a look over the link takes microseconds
    while (ticket != 0) & (ready != ticket) & (ready != _ENDED):
        ready = tl.load(ready_ptr, volatile=True)


@jit
def _take_kernel(ticket_ptr, wanted_ptr, source_ptr, target_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(ticket_ptr) == 0:
        return
    taken = word < tl.where(tl.load(wanted_ptr + row) != 0, WORDS, 0)
    tl.store(target_ptr + row * WORDS + word, tl.load(source_ptr + row * WORDS + word, mask=taken), mask=taken)


def take_host_rows_triton(
    ticket: torch.Tensor, ready: torch.Tensor, wanted: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:  # fmt: skip
    """Triton version of `take_host_rows`. One warp waits, behind which the others start."""
    require_triton("taking rows of host memory")
    rows, words = target.shape
    with torch.cuda.device_of(target):
        _wait_kernel[(1,)](ticket, ready, num_warps=1)
        grid = rows, triton.cdiv(words, _BLOCK)
        _take_kernel[grid](ticket, wanted, source, target, WORDS=words, BLOCK=_BLOCK, num_warps=4)


def take_host_rows(
    ticket: torch.Tensor, ready: torch.Tensor, wanted: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:  # fmt: skip
    """Copy some rows, when they are ready; enqueued on the current stream.

    Args:
        ticket: [1] int32, beside the target: 0 where there are none to wait for, whatever the others say.
        ready: [1] int32, host: the ticket, once `source` is written, or `ENDED`.
        wanted: [R] int32, beside the target: not 0 where a row is to be copied.
        source: [R, W] int32, host, contiguous. What is on the host is page-locked where the target is on a GPU.
        target: [R, W] int32, contiguous. Other rows are left as they are.
    """
    assert ticket.dtype == ready.dtype == wanted.dtype == source.dtype == target.dtype == torch.int32
    assert source.shape == target.shape and len(wanted) == len(target) and ticket.shape == ready.shape == (1,)
    assert source.is_contiguous() and target.is_contiguous() and wanted.is_contiguous()
    (take_host_rows_triton if target.is_cuda else take_host_rows_reference)(ticket, ready, wanted, source, target)
