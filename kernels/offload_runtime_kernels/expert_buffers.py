"""Experts in a pool of buffers on the device, which looks up itself what rows have chosen and fetches what is missing
from page-locked host memory: nothing waits for the host, and graphs can hold all of it.

A round of a layer has a time of its own, and so has a buffer, of when it was used last. In a round
    what is wanted and in a buffer                   is used now
    the first ones of those that are missing         are left to the CPU, as many as it has credit for
    those behind them, as far as there is room       are fetched into the buffers that were not used for longest
    others                                           are wanted in the next round

What is left to the CPU gets a buffer, too, as far as a round needs fewer than there are, and is fetched there in the
background while the pass goes on: nothing takes the buffer until `release_experts`, before which the layer must not ask
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.encoded_linear import INTERPRETED

# When a buffer was used that nothing may take.
NEVER = 1 << 62
# Of what is reported to the host: the ticket is above these bits, below it the layer and the tokens, or whether the
# CPU is asked for a choice, and the choice.
TICKET_BITS, LAYER_BITS, ASKED_BIT = 32, 16, 31
# What is counted: rounds, which are the time, experts that were wanted, those that were in a buffer, bytes that were
# fetched, and experts that the CPU was asked for.
NUM_COUNTS = 5

_CHOICES, _LANES = 64, 1024
# Programs and words a step of each: enough bytes on their way to fill a link; fewer in the background.
_PROGRAMS, _BACKGROUND_PROGRAMS, _STEP_WORDS = 64, 16, 4096
_LAST_TICKET = _CHOICE_BITS = 0x7FFFFFFF
_NEVER, _NEWEST, _CHOICE = tl.constexpr(NEVER), tl.constexpr(_LAST_TICKET), tl.constexpr(_CHOICE_BITS)
_NUM_COUNTS = tl.constexpr(NUM_COUNTS)
_TICKET, _LAYER, _ASKED = tl.constexpr(TICKET_BITS), tl.constexpr(LAYER_BITS), tl.constexpr(ASKED_BIT)


class CpuShare(NamedTuple):
    """Says which missing experts are left to the CPU, and how it learns of them.

    Attributes:
        shares: [E + 1] fp32, beside the tables: by the number of missing experts how many of them it should compute.
        credit: [1] fp32, likewise: the part of an expert that is left of them.
        tickets: [2] int32, likewise: the newest ticket, and that of this layer, which is 0 where nothing is asked.
        asked: [N k] int32, likewise: of each choice whether the CPU computes it; older where nothing is asked.
        report: [1 + N k] int64, host: the ticket, the layer and the tokens, and of each choice the ticket, whether it
            is asked for, and what it is, in any order of time.
    """

    shares: torch.Tensor
    credit: torch.Tensor
    tickets: torch.Tensor
    asked: torch.Tensor
    report: torch.Tensor


@dataclass(frozen=True)
class BufferTables:
    """Says what is in the S buffers of a pool that serves L layers of up to E experts; on the device.

    Attributes:
        buffers: [L, E] int32: the buffer of each expert; -1 where none has it.
        owners: [S] int32: layer times E plus expert; -1 where there is none.
        used: [S] int64: when each was used last, `NEVER` of those that nothing may take.
        found: [E] int32: the buffers of those that this round is about; -1 of others, and of those left to the CPU.
        wanted: [E] int32: not 0 of what the next round of a layer is about.
        fetched: [2, 1 + E] int32: how many experts this round fetches, which, and, in the second row, into which
            buffers.
        fetched_bytes: [1] int64: of these.
        background: [L, 2, 1 + E] int32: the same of what each layer has left to the CPU and fetches in the background.
        background_bytes: [L, 1] int64: of these.
        in_flight: [1] int32: the buffers of all that is on its way.
        counts: [`NUM_COUNTS`] int64.
        counts_host: The same in page-locked memory.
    """

    buffers: torch.Tensor
    owners: torch.Tensor
    used: torch.Tensor
    found: torch.Tensor
    wanted: torch.Tensor
    fetched: torch.Tensor
    fetched_bytes: torch.Tensor
    background: torch.Tensor
    background_bytes: torch.Tensor
    in_flight: torch.Tensor
    counts: torch.Tensor
    counts_host: torch.Tensor

    @classmethod
    def of(cls, device: torch.device, *, layers: int, experts: int, buffers: int) -> BufferTables:
        """Return tables of empty buffers."""
        counts_host = torch.zeros(NUM_COUNTS, dtype=torch.int64, pin_memory=device.type == "cuda")
        int32, int64 = (torch.zeros(0, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
        return cls(
            int32.new_full((layers, experts), -1), int32.new_full((buffers,), -1), int64.new_zeros(buffers),
            int32.new_full((experts,), -1), int32.new_zeros(experts), int32.new_zeros(2, 1 + experts),
            int64.new_zeros(1), int32.new_zeros(layers, 2, 1 + experts), int64.new_zeros(layers, 1),
            int32.new_zeros(1), int64.new_zeros(NUM_COUNTS), counts_host,
        )  # fmt: skip


# --- plain torch


def place_experts_reference(
    choices: torch.Tensor, tables: BufferTables, layer: int, *, experts: int, room: int, unit_bytes: int,
    cpu: CpuShare | None, is_first: bool,
) -> None:  # fmt: skip
    """Plain torch version of `place_experts`."""
    of_layer, flat = tables.buffers[layer], choices.flatten().tolist()
    wanted = sorted({*flat} - {-1}) if is_first else tables.wanted.nonzero().flatten().tolist()
    missing = [expert for expert in wanted if of_layer[expert] < 0]
    found = [expert for expert in wanted if of_layer[expert] >= 0]
    now, asked, background = int(tables.counts[0]) + 1, list[int](), list[int]()
    tables.used[of_layer[found].long()] = now
    tables.found.fill_(-1)
    tables.found[found] = of_layer[found]
    if cpu is not None and is_first:
        if missing:
            cpu.credit.add_(float(cpu.shares[len(missing)]))
        asked = missing[: int(cpu.credit + 1e-5)]
        background = asked[: len(tables.owners) - int(tables.in_flight) - max(room, len(found))]
        cpu.credit.sub_(len(asked))
        tables.in_flight.add_(len(background))
        last = int(cpu.tickets[0])
        ticket = 1 if last == _LAST_TICKET else last + 1
        cpu.tickets.copy_(torch.tensor([ticket if asked else last, ticket if asked else 0]))
        if asked:
            marks = [int(choice in asked) for choice in flat]
            cpu.asked[: len(flat)] = torch.tensor(marks, dtype=torch.int32)
            for at, (choice, mark) in enumerate(zip(flat, marks, strict=True), 1):
                cpu.report[at] = ticket << TICKET_BITS | mark << ASKED_BIT | choice & _CHOICE_BITS
            cpu.report[0] = ticket << TICKET_BITS | layer << LAYER_BITS | len(choices)
        tables.background[layer, 0, 0], tables.background_bytes[layer] = len(background), len(background) * unit_bytes
    fetched = missing[len(asked) :][: max(0, room - len(found))]
    tables.fetched[0, 0], tables.fetched_bytes[0] = len(fetched), len(fetched) * unit_bytes
    for some, into, when in ((background, tables.background[layer], NEVER), (fetched, tables.fetched, now)):
        for number, expert in enumerate(some, 1):
            buffer = int(tables.used.argmin())
            assert tables.used[buffer] < now, "there is room"
            if (owner := int(tables.owners[buffer])) >= 0:
                tables.buffers.view(-1)[owner] = -1
            of_layer[expert], tables.used[buffer] = buffer, when
            tables.owners[buffer] = layer * tables.buffers.shape[1] + expert
            into[0, number], into[1, number] = expert, buffer
    tables.found[fetched] = of_layer[fetched]
    tables.wanted.zero_()
    tables.wanted[missing[len(asked) + len(fetched) :]] = 1
    of_first = (len(wanted), len(found)) if is_first else (0, 0)
    nbytes = (len(fetched) + len(background)) * unit_bytes
    tables.counts.add_(torch.tensor([1, *of_first, nbytes, len(asked)], device=tables.counts.device))
    tables.counts_host.copy_(tables.counts)


def release_experts_reference(tables: BufferTables, layer: int) -> None:
    """Plain torch version of `release_experts`."""
    count = int(tables.background[layer, 0, 0])
    tables.used[tables.background[layer, 1, 1 : 1 + count].long()] = tables.counts[0]
    tables.in_flight.sub_(count)


def fetch_experts_reference(fetched: torch.Tensor, host: torch.Tensor, pool: torch.Tensor) -> None:
    """Plain torch version of `fetch_experts`."""
    count = int(fetched[0, 0])
    for expert, buffer in fetched[:, 1 : 1 + count].T.tolist():
        pool[buffer, : host.shape[1]] = host[expert]


# --- Triton


@jit
def _oldest(used_ptr, num_buffers, LANES: tl.constexpr):
    """Of each lane's buffers, [LANES], when the one was used that was not used for longest, and which one that is."""
    lane = tl.arange(0, LANES)
    when = tl.full([LANES], _NEVER, tl.int64)
    which = tl.zeros([LANES], tl.int32)
    for first in range(0, num_buffers, LANES):
        buffer = first + lane
        used = tl.load(used_ptr + buffer, mask=buffer < num_buffers, other=_NEVER)
        which = tl.where(used < when, buffer, which)
        when = tl.minimum(used, when)
    return when, which


@jit
def _fence():
    """Let the host find what the device has written before, kernels before this one too, once it finds what follows."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("{ fence.acq_rel.sys; mov.u32 $0, 0; }", "=r", [], tl.int32, False, 1)


# Of any alignment, so that one binary serves all.
@jit(
    do_not_specialize=(
        "choices_ptr", "background_ptr", "background_bytes_ptr", "layer", "count", "tokens", "num_buffers", "room",
        "unit_bytes",
    )
)  # fmt: skip
def _place_kernel(
    choices_ptr, buffers_ptr, owners_ptr, used_ptr, found_ptr, wanted_ptr, fetched_ptr, fetched_bytes_ptr,
    background_ptr, background_bytes_ptr, in_flight_ptr, counts_ptr, counts_host_ptr, shares_ptr, credit_ptr,
    tickets_ptr, asked_ptr, report_ptr, layer, count, tokens, num_buffers, room, unit_bytes,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr, LANES: tl.constexpr,
    FIRST: tl.constexpr, ASKS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, BLOCK)
    real = expert < EXPERTS
    if FIRST:
        wanted = tl.zeros([BLOCK], tl.int32)
        for first in range(0, count, CHOICES):
            at = first + tl.arange(0, CHOICES)
            choice = tl.load(choices_ptr + at, mask=at < count, other=-1).to(tl.int32)
            wanted = tl.maximum(wanted, tl.max((choice[:, None] == expert[None, :]).to(tl.int32), axis=0))
    else:
        wanted = tl.load(wanted_ptr + expert, mask=real, other=0)
    buffer = tl.load(buffers_ptr + layer * WIDTH + expert, mask=real, other=-1)
    is_found = (wanted > 0) & (buffer >= 0)
    is_missing = ((wanted > 0) & (buffer < 0)).to(tl.int32)
    found, missing = tl.sum(is_found.to(tl.int32)), tl.sum(is_missing)
    now = tl.load(counts_ptr) + 1
    tl.store(used_ptr + buffer, now, mask=is_found)
    tl.store(found_ptr + expert, tl.where(is_found, buffer, -1), mask=real)
    rank = tl.cumsum(is_missing) - is_missing
    num_asked, num_background = 0, 0
    if ASKS:
        credit = tl.load(credit_ptr) + tl.load(shares_ptr + missing, mask=missing > 0, other=0.0)
        num_asked = tl.minimum((credit + 1e-5).to(tl.int32), missing)  # none where a rounded sum left less than none
        in_flight = tl.atomic_add(in_flight_ptr, 0)  # all warps have the same, whatever arrives meanwhile
        num_background = tl.minimum(num_asked, num_buffers - in_flight - tl.maximum(room, found))
        last = tl.load(tickets_ptr)
        following = tl.where(last == _NEWEST, 1, last + 1)
        tl.debug_barrier()  # all have read the last ones
        tl.store(credit_ptr, credit - num_asked)
        tl.atomic_add(in_flight_ptr, num_background)
        tl.store(background_ptr, num_background)
        tl.store(background_bytes_ptr, num_background.to(tl.int64) * unit_bytes)
        tl.store(tickets_ptr, tl.where(num_asked > 0, following, last))
        tl.store(tickets_ptr + 1, tl.where(num_asked > 0, following, 0))
        if num_asked > 0:
            is_asked = is_missing * (rank < num_asked).to(tl.int32)
            ticket = following.to(tl.int64) << _TICKET
            for first in range(0, count, CHOICES):
                at = first + tl.arange(0, CHOICES)
                choice = tl.load(choices_ptr + at, mask=at < count, other=-1).to(tl.int32)
                asked = tl.max((choice[:, None] == expert[None, :]).to(tl.int32) * is_asked[None, :], axis=1)
                tl.store(asked_ptr + at, asked, mask=at < count)
                word = (asked.to(tl.int64) << _ASKED) | (choice & _CHOICE)
                tl.store(report_ptr + 1 + at, ticket | word, mask=at < count)
            _fence()
            tl.store(report_ptr, ticket | (layer << _LAYER) | tokens)
    num_fetched = tl.minimum(missing - num_asked, tl.maximum(room - found, 0))
    tl.debug_barrier()  # all have read what is wanted, of few experts each warp by itself
    tl.store(wanted_ptr + expert, is_missing * (rank >= num_asked + num_fetched).to(tl.int32), mask=real)
    taken, num_taken = 0, num_background + num_fetched
    lane = tl.arange(0, LANES)
    while taken < num_taken:
        tl.debug_barrier()  # what was used now has been written
        when, which = _oldest(used_ptr, num_buffers, LANES)
        first_used = tl.min(when, axis=0)
        while (taken < num_taken) & (first_used < now):
            at_lane = tl.argmin(when, axis=0)
            target = tl.sum(tl.where(lane == at_lane, which, 0))
            in_background = taken < num_background
            number = tl.where(in_background, taken, taken - num_background)
            wanted_rank = tl.where(in_background, taken, num_asked + number)
            own = tl.sum(tl.where((is_missing > 0) & (rank == wanted_rank), expert, 0))
            before = tl.load(owners_ptr + target)
            tl.store(buffers_ptr + before, -1, mask=before >= 0)
            tl.store(buffers_ptr + layer * WIDTH + own, target)
            tl.store(owners_ptr + target, layer * WIDTH + own)
            tl.store(used_ptr + target, tl.where(in_background, _NEVER, now))
            tl.store(found_ptr + own, target, mask=taken >= num_background)
            into = tl.where(in_background, background_ptr, fetched_ptr) + 1 + number
            tl.store(into, own)
            tl.store(into + WIDTH + 1, target)
            when = tl.where(lane == at_lane, _NEVER, when)
            first_used = tl.min(when, axis=0)
            taken += 1
    tl.store(fetched_ptr, num_fetched)
    nbytes = num_fetched.to(tl.int64) * unit_bytes
    tl.store(fetched_bytes_ptr, nbytes)
    nbytes += tl.cast(num_background, tl.int64) * unit_bytes
    part = tl.arange(0, 8)
    more = tl.where(part == 0, 1, 0).to(tl.int64)
    if FIRST:
        more = tl.where(part == 1, found + missing, tl.where(part == 2, found, more))
    more = tl.where(part == 3, nbytes, tl.where(part == 4, num_asked, more))
    counts = tl.load(counts_ptr + part, mask=part < _NUM_COUNTS, other=0) + more
    tl.debug_barrier()  # all have read what time it is
    tl.store(counts_ptr + part, counts, mask=part < _NUM_COUNTS)
    tl.store(counts_host_ptr + part, counts, mask=part < _NUM_COUNTS)


@jit(do_not_specialize=("background_ptr",))
def _release_kernel(background_ptr, used_ptr, in_flight_ptr, counts_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    count, number = tl.load(background_ptr), tl.arange(0, BLOCK)
    buffer = tl.load(background_ptr + WIDTH + 2 + number, mask=number < count, other=0)
    tl.store(used_ptr + buffer, tl.load(counts_ptr), mask=number < count)
    tl.debug_barrier()  # who finds that they are not in flight must find when they were used
    tl.atomic_add(in_flight_ptr, -count)


@jit(do_not_specialize=("fetched_ptr",))
def _fetch_kernel(
    fetched_ptr, host_ptr, pool_ptr, host_words, pool_words, words, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    count, steps = tl.load(fetched_ptr), tl.cdiv(words, BLOCK)
    for step in range(tl.program_id(0), count * steps, tl.num_programs(0)):
        expert = tl.load(fetched_ptr + 1 + step // steps).to(tl.int64)
        buffer = tl.load(fetched_ptr + WIDTH + 2 + step // steps).to(tl.int64)
        word = step % steps * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(host_ptr + expert * host_words + word, mask=word < words)
        tl.store(pool_ptr + buffer * pool_words + word, x, mask=word < words)


def place_experts_triton(
    choices: torch.Tensor, tables: BufferTables, layer: int, *, experts: int, room: int, unit_bytes: int,
    cpu: CpuShare | None, is_first: bool,
) -> None:  # fmt: skip
    """Triton version of `place_experts`: one program does it."""
    require_triton("experts on demand")
    one = tables
    asks = cpu if cpu is not None and is_first else None
    # Triton wants a pointer for every argument; an unused one may point anywhere.
    asking = (one.counts,) * 5 if asks is None else asks
    with torch.cuda.device_of(one.buffers):
        _place_kernel[(1,)](
            choices, one.buffers, one.owners, one.used, one.found, one.wanted, one.fetched, one.fetched_bytes,
            one.background[layer], one.background_bytes[layer], one.in_flight, one.counts, one.counts_host, *asking,
            layer, choices.numel(), len(choices), len(one.owners), room, unit_bytes, EXPERTS=experts,
            WIDTH=one.buffers.shape[1], BLOCK=triton.next_power_of_2(experts), CHOICES=_CHOICES, LANES=_LANES,
            FIRST=is_first, ASKS=asks is not None, num_warps=4,
        )  # fmt: skip


def release_experts_triton(tables: BufferTables, layer: int) -> None:
    """Triton version of `release_experts`."""
    require_triton("experts on demand")
    background, width = tables.background[layer], tables.buffers.shape[1]
    with torch.cuda.device_of(background):
        _release_kernel[(1,)](
            background, tables.used, tables.in_flight, tables.counts, WIDTH=width, BLOCK=triton.next_power_of_2(width),
            num_warps=1,
        )  # fmt: skip


def fetch_experts_triton(
    fetched: torch.Tensor, host: torch.Tensor, pool: torch.Tensor, *, in_background: bool = False
) -> None:
    """Triton version of `fetch_experts`."""
    require_triton("experts on demand")
    of_host, of_pool = host.view(torch.int32), pool.view(torch.int32)
    with torch.cuda.device_of(pool):
        _fetch_kernel[(_BACKGROUND_PROGRAMS if in_background else _PROGRAMS,)](
            fetched, of_host, of_pool, of_host.stride(0), of_pool.stride(0), of_host.shape[1],
            WIDTH=fetched.shape[1] - 1, BLOCK=_STEP_WORDS, num_warps=8,
        )  # fmt: skip


# --- either


def place_experts(
    choices: torch.Tensor, tables: BufferTables, layer: int, *, experts: int, room: int, unit_bytes: int,
    cpu: CpuShare | None = None, is_first: bool = True,
) -> None:  # fmt: skip
    """Find buffers for a round of what rows of a layer have chosen, as the module says, and say what is to be fetched,
    now or in the background. Enqueued on the current stream; on a GPU what is on the host is page-locked.

    Args:
        choices: [N, k] int64 on the device, -1 of rows that only fill up.
        tables: Of the pool.
        layer: Its row there.
        experts: How many it has.
        room: Buffers that a round may be about; others may wait for what is in flight.
        unit_bytes: Of an expert.
        cpu: What is left to the CPU; None: all that is missing is fetched.
        is_first: Of the rounds of these choices. Others neither look at these nor leave anything to the CPU.
    """
    assert choices.dtype == torch.int64 and choices.is_contiguous() and choices.ndim == 2
    assert experts <= tables.buffers.shape[1] and layer < 1 << 31 - LAYER_BITS
    place = place_experts_triton if choices.is_cuda else place_experts_reference
    place(choices, tables, layer, experts=experts, room=room, unit_bytes=unit_bytes, cpu=cpu, is_first=is_first)


def release_experts(tables: BufferTables, layer: int) -> None:
    """Let go of the buffers of what a layer has fetched in the background, which has arrived: they are used now.
    Enqueued on the current stream; layers may be placed on another one meanwhile."""
    (release_experts_triton if tables.used.is_cuda else release_experts_reference)(tables, layer)


def fetch_experts(
    fetched: torch.Tensor, host: torch.Tensor, pool: torch.Tensor, *, in_background: bool = False
) -> None:
    """Copy experts as the last `place_experts` says. Enqueued on the current stream.

    Args:
        fetched: `fetched` of the pool's tables, or the `background` of a layer.
        host: uint8 [E, bytes of one], a multiple of 16, page-locked on a GPU: those of the layer.
        pool: uint8 [S, at least as many], the buffers.
        in_background: Whether other kernels compute meanwhile.
    """
    assert host.dtype == pool.dtype == torch.uint8 and host.shape[1] <= pool.shape[1]
    if pool.is_cuda:
        fetch_experts_triton(fetched, host, pool, in_background=in_background)
    else:
        fetch_experts_reference(fetched, host, pool)
