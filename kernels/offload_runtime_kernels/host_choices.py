"""What rows have chosen is reported to the host, for which the device waits only where something chosen is not there.

ticket = 0, or the next one of `tickets` if table[choices[i]] < 0 for any i;    reported[i] = ticket << 32 | choices[i]
wait until released is the ticket, or -1, unless that is 0;    out[i] = table[i]        for all i
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl

# Of what is reported, the bits of a choice; the ticket is above them.
CHOICE_BITS = 32
# What is in place of a report until there is one.
NOTHING = -1
# What releases the device, whatever it waits for.
ALL = -1

_REPORTED_BLOCK, _TABLE_BLOCK = 128, 1024


def report_choices_reference(
    choices: torch.Tensor, table: torch.Tensor, tickets: torch.Tensor, reported: torch.Tensor
) -> None:
    """Plain torch version of `report_choices`."""
    missing = bool((table[choices] < 0).any())
    tickets[0] += missing
    tickets[1] = missing * tickets[0]
    reported.copy_(choices | tickets[1].long() << CHOICE_BITS)


def await_buffers_reference(
    tickets: torch.Tensor, released: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> None:
    """Plain torch version of `await_buffers`, once the host has released the ticket."""
    assert int(tickets[1]) in (0, int(released)) or int(released) == ALL
    out.copy_(table)


# Of any alignment, so that one binary serves all.
@jit(do_not_specialize=("choices_ptr", "table_ptr", "reported_ptr", "count"))
def _report_kernel(choices_ptr, table_ptr, tickets_ptr, reported_ptr, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    lowest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        within = first + lane < count
        choice = tl.load(choices_ptr + first + lane, mask=within, other=0)
        lowest = tl.minimum(lowest, tl.load(table_ptr + choice, mask=within, other=0, volatile=True))
    last = tl.load(tickets_ptr)
    following = tl.where(last == 0x7FFFFFFF, 1, last + 1)
    missing = tl.min(lowest, 0) < 0
    ticket = tl.where(missing, following, 0)
    tl.debug_barrier()  # all have read the last one
    tl.store(tickets_ptr, tl.where(missing, following, last))
    tl.store(tickets_ptr + 1, ticket)
    for first in range(0, count, BLOCK):
        within = first + lane < count
        choice = tl.load(choices_ptr + first + lane, mask=within, other=0)
        tl.store(reported_ptr + first + lane, choice | (ticket.to(tl.int64) << 32), mask=within)


@jit(do_not_specialize=("table_ptr", "out_ptr", "count"))
def _await_kernel(tickets_ptr, released_ptr, table_ptr, out_ptr, count, BLOCK: tl.constexpr):
    ticket = tl.load(tickets_ptr + 1)
    released = tl.load(released_ptr, volatile=True)
    while (ticket != 0) & (released != ticket) & (released != -1):
        released = tl.load(released_ptr, volatile=True)
    lane = tl.arange(0, BLOCK)
    for first in range(0, count, BLOCK):
        within = first + lane < count
        tl.store(out_ptr + first + lane, tl.load(table_ptr + first + lane, mask=within, volatile=True), mask=within)


def report_choices_triton(
    choices: torch.Tensor, table: torch.Tensor, tickets: torch.Tensor, reported: torch.Tensor
) -> None:
    """Triton version of `report_choices`: one warp does it."""
    require_triton("reporting choices to the host")
    with torch.cuda.device_of(choices):
        _report_kernel[(1,)](choices, table, tickets, reported, len(choices), BLOCK=_REPORTED_BLOCK, num_warps=1)


def await_buffers_triton(tickets: torch.Tensor, released: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Triton version of `await_buffers`: one warp waits."""
    require_triton("waiting for the host")
    with torch.cuda.device_of(out):
        _await_kernel[(1,)](tickets, released, table, out, len(out), BLOCK=_TABLE_BLOCK, num_warps=1)


def report_choices(choices: torch.Tensor, table: torch.Tensor, tickets: torch.Tensor, reported: torch.Tensor) -> None:
    """Report to the host what rows have chosen, and whether the device will wait for it. Enqueued on the current
    stream; on a GPU what is on the host is page-locked.

    Args:
        choices: [N] int64: what was chosen, by number.
        table: [E] int32, host: the buffer on the device that has each; negative where none has.
        tickets: [2] int32, beside the choices: the newest ticket, and that of these choices, which is 0 where nothing
            is missing.
        reported: [N] int64, host: each becomes the choice and, above its `CHOICE_BITS`, the ticket of these choices, in
            any order: the host writes `NOTHING` before, and knows that all has been reported when that is gone.
    """
    assert choices.dtype == reported.dtype == torch.int64 and table.dtype == tickets.dtype == torch.int32
    assert choices.shape == reported.shape and choices.ndim == table.ndim == 1 and tickets.shape == (2,)
    assert choices.is_contiguous() and reported.is_contiguous() and table.is_contiguous()
    (report_choices_triton if choices.is_cuda else report_choices_reference)(choices, table, tickets, reported)


def await_buffers(tickets: torch.Tensor, released: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the table, behind `report_choices`, and if something was missing once the host has released its ticket.
    Enqueued on the current stream; on a GPU what is on the host is page-locked.

    Args:
        tickets: As of `report_choices`.
        released: [1] int32, host: the ticket that need not wait any more, or `ALL`. On a CPU it must be there already.
        table: [E] int32, host.
        out: [E] int32, beside the tickets.
    """
    assert tickets.dtype == released.dtype == table.dtype == out.dtype == torch.int32
    assert table.shape == out.shape and tickets.shape == (2,) and released.shape == (1,)
    assert table.is_contiguous() and out.is_contiguous()
    (await_buffers_triton if out.is_cuda else await_buffers_reference)(tickets, released, table, out)
