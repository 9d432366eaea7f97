"""What rows have chosen is told to the host, for which the device waits only where something chosen is not there.

ticket = 0, or the next one of `tickets` if place[choices[i]] < 0 for any i;    told[i] = ticket << 32 | choices[i]
wait until released is the ticket, or -1, unless that is 0;    out[i] = place[i]        for all i
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl

# Of what is told, the bits of a choice; the ticket is above them.
CHOICE_BITS = 32
# Told where nothing is, until something is.
NOTHING = -1
# What releases whoever waits, whatever its ticket.
ALL = -1

_TOLD_BLOCK, _PLACES_BLOCK = 128, 1024


def tell_choices_reference(
    choices: torch.Tensor, places: torch.Tensor, tickets: torch.Tensor, told: torch.Tensor
) -> None:
    """Plain torch version of `tell_choices`."""
    missing = bool((places[choices] < 0).any())
    tickets[0] += missing
    tickets[1] = missing * tickets[0]
    told.copy_(choices | tickets[1].long() << CHOICE_BITS)


def take_places_reference(
    tickets: torch.Tensor, released: torch.Tensor, places: torch.Tensor, out: torch.Tensor
) -> None:
    """Plain torch version of `take_places`, once the host has released the ticket."""
    assert int(tickets[1]) in (0, int(released)) or int(released) == ALL
    out.copy_(places)


# Of any alignment, so that one binary serves all.
@jit(do_not_specialize=("choices_ptr", "places_ptr", "told_ptr", "count"))
def _tell_kernel(choices_ptr, places_ptr, tickets_ptr, told_ptr, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    lowest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        within = first + lane < count
        choice = tl.load(choices_ptr + first + lane, mask=within, other=0)
        lowest = tl.minimum(lowest, tl.load(places_ptr + choice, mask=within, other=0, volatile=True))
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
        tl.store(told_ptr + first + lane, choice | (ticket.to(tl.int64) << 32), mask=within)


@jit(do_not_specialize=("places_ptr", "out_ptr", "count"))
def _take_kernel(tickets_ptr, released_ptr, places_ptr, out_ptr, count, BLOCK: tl.constexpr):
    ticket = tl.load(tickets_ptr + 1)
    released = tl.load(released_ptr, volatile=True)
    while (ticket != 0) & (released != ticket) & (released != -1):
        released = tl.load(released_ptr, volatile=True)
    lane = tl.arange(0, BLOCK)
    for first in range(0, count, BLOCK):
        within = first + lane < count
        tl.store(out_ptr + first + lane, tl.load(places_ptr + first + lane, mask=within, volatile=True), mask=within)


def tell_choices_triton(choices: torch.Tensor, places: torch.Tensor, tickets: torch.Tensor, told: torch.Tensor) -> None:
    """Triton version of `tell_choices`, of one warp."""
    require_triton("telling the host what rows have chosen")
    with torch.cuda.device_of(choices):
        _tell_kernel[(1,)](choices, places, tickets, told, len(choices), BLOCK=_TOLD_BLOCK, num_warps=1)


def take_places_triton(tickets: torch.Tensor, released: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Triton version of `take_places`, of one warp."""
    require_triton("waiting for the host")
    with torch.cuda.device_of(out):
        _take_kernel[(1,)](tickets, released, places, out, len(out), BLOCK=_PLACES_BLOCK, num_warps=1)


def tell_choices(choices: torch.Tensor, places: torch.Tensor, tickets: torch.Tensor, told: torch.Tensor) -> None:
    """Tell the host what rows have chosen, and whether the device will wait for it. Enqueued on the current stream; on
    a GPU what is on the host is page-locked.

    Args:
        choices: [N] int64: what was chosen, numbers of places.
        places: [E] int32, host: where each lies on the device; negative where it does not.
        tickets: [2] int32, beside the choices: the newest ticket, and that of these choices, which is 0 where nothing
            is missing.
        told: [N] int64, host: each becomes the choice and, above its `CHOICE_BITS`, the ticket of these choices. In
            whatever order: the host writes `NOTHING` before, and knows that all has been told when that is gone.
    """
    assert choices.dtype == told.dtype == torch.int64 and places.dtype == tickets.dtype == torch.int32
    assert choices.shape == told.shape and choices.ndim == places.ndim == 1 and tickets.shape == (2,)
    assert choices.is_contiguous() and told.is_contiguous() and places.is_contiguous()
    (tell_choices_triton if choices.is_cuda else tell_choices_reference)(choices, places, tickets, told)


def take_places(tickets: torch.Tensor, released: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Copy where everything lies, behind `tell_choices`, and if something was missing when the host has released its
    ticket. Enqueued on the current stream; on a GPU what is on the host is page-locked.

    Args:
        tickets: As of `tell_choices`.
        released: [1] int32, host: the ticket that need not wait any more, or `ALL`. On a CPU it must be there already.
        places: [E] int32, host.
        out: [E] int32, beside the tickets.
    """
    assert tickets.dtype == released.dtype == places.dtype == out.dtype == torch.int32
    assert places.shape == out.shape and tickets.shape == (2,) and released.shape == (1,)
    assert places.is_contiguous() and out.is_contiguous()
    (take_places_triton if out.is_cuda else take_places_reference)(tickets, released, places, out)
