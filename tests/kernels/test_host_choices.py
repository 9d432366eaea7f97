"""`report_choices`, `await_buffers`: the device tells the host what was chosen, and waits only for what is missing."""

import threading

import pytest
import torch
from offload_runtime_kernels.host_choices import (
    ALL,
    CHOICE_BITS,
    NOTHING,
    await_buffers,
    await_buffers_reference,
    await_buffers_triton,
    report_choices,
    report_choices_reference,
    report_choices_triton,
)

from tests.helpers.kernel_conditions import KERNEL_DEVICE

WAYS = [(report_choices_reference, await_buffers_reference), (report_choices_triton, await_buffers_triton)]
EXPERTS = 1500


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if KERNEL_DEVICE.type == "cuda" else tensor


def wait() -> None:
    if KERNEL_DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("way", [*WAYS, (report_choices, await_buffers)])
@pytest.mark.parametrize("count", [1, 4, 300])
def test_choices_are_reported_and_table_taken(way: tuple, count: int) -> None:  # type: ignore[type-arg]
    if way is WAYS[0] and KERNEL_DEVICE.type == "cuda":
        pytest.skip("the references are for one device")
    report, await_ = way
    table = on_host(torch.arange(EXPERTS, dtype=torch.int32))
    choices = torch.randint(EXPERTS, (count,), generator=torch.Generator().manual_seed(count))
    tickets = torch.zeros(2, dtype=torch.int32, device=KERNEL_DEVICE)
    reported, released = on_host(torch.full((count,), NOTHING)), on_host(torch.zeros(1, dtype=torch.int32))
    out = torch.empty(EXPERTS, dtype=torch.int32, device=KERNEL_DEVICE)
    for number, missing in enumerate((False, True, True, False)):
        reported.fill_(NOTHING)
        table[choices[-1]] = -1 if missing else 7
        report(choices.to(KERNEL_DEVICE), table, tickets, reported)
        wait()
        ticket = number if missing else 0
        assert torch.equal(reported & (1 << CHOICE_BITS) - 1, choices) and (reported >> CHOICE_BITS == ticket).all()
        released[0] = ALL if number == 2 else ticket
        await_(tickets, released, table, out)
        assert torch.equal(out.cpu(), table) and tickets.tolist() == [min(number, 2), ticket]


@pytest.mark.gpu
@pytest.mark.parametrize("release", [1, ALL])
def test_the_device_waits_until_the_host_has_what_is_missing(release: int) -> None:
    table = on_host(torch.arange(EXPERTS, dtype=torch.int32))
    choices = torch.tensor([3, 1400], device="cuda")
    reported, released = on_host(torch.full((2,), NOTHING)), on_host(torch.zeros(1, dtype=torch.int32))
    out = torch.empty(EXPERTS, dtype=torch.int32, device="cuda")
    tickets = torch.zeros(2, dtype=torch.int32, device="cuda")
    done = torch.cuda.Event()
    report_choices(choices, table, tickets, reported)  # compiles
    await_buffers(tickets, released, table, out)
    done.record()
    done.synchronize()
    table[3] = -1
    report_choices(choices, table, tickets, reported)
    await_buffers(tickets, released, table, out)
    done.record()
    while (reported >> CHOICE_BITS != 1).any():
        pass
    assert not done.query()

    def answer() -> None:
        table[3] = 11
        released[0] = release

    threading.Timer(0.05, answer).start()
    done.synchronize()
    assert out[3] == 11 and out[1400] == 1400
