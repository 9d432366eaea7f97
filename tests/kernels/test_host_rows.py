"""`take_host_rows`: the rows that are wanted, no others, and none before they are ready."""

import threading

import pytest
import torch
from offload_runtime_kernels.host_rows import ENDED, take_host_rows, take_host_rows_reference, take_host_rows_triton

from tests.helpers.kernel_conditions import KERNEL_DEVICE

ROWS, WORDS = 5, 1500


def given(ready: int, ticket: int = 1) -> list[torch.Tensor]:
    """The ticket of rows, on the device, and page-locked that of those that are ready; two of five that are wanted, on
    the device, and page-locked all rows."""
    rows = torch.arange(ROWS * WORDS, dtype=torch.int32).view(ROWS, WORDS) - 9
    of_device = [torch.tensor(one, dtype=torch.int32, device=KERNEL_DEVICE) for one in ([ticket], [0, 1, 0, 0, 7])]
    there = torch.tensor([ready], dtype=torch.int32), rows
    locked = [one.pin_memory() if KERNEL_DEVICE.type == "cuda" else one for one in there]
    return [of_device[0], locked[0], of_device[1], locked[1]]


@pytest.mark.parametrize("take", [take_host_rows_reference, take_host_rows_triton, take_host_rows])
def test_rows_that_are_wanted_and_no_others(take: object) -> None:
    target = torch.full((ROWS, WORDS), -5, dtype=torch.int32, device=KERNEL_DEVICE)
    take(*given(0, ticket=0), target)  # type: ignore[operator]
    assert (target == -5).all()
    for ready in (1, ENDED):
        *others, source = given(ready)
        take(*others, source, target)  # type: ignore[operator]
    assert torch.equal(target[[1, 4]].cpu(), source[[1, 4]]) and (target[[0, 2, 3]] == -5).all()


@pytest.mark.gpu
def test_the_device_waits_until_rows_are_ready() -> None:
    target = torch.zeros(ROWS, WORDS, dtype=torch.int32, device="cuda")
    ticket, ready, wanted, source = given(1)
    take_host_rows(ticket, ready, wanted, source, target)  # compiles
    torch.cuda.synchronize()
    ready.zero_()
    target.zero_()
    expected = source.clone()
    source.zero_()
    take_host_rows(ticket, ready, wanted, source, target)
    done = torch.cuda.Event()
    done.record()

    def write() -> None:
        source.copy_(expected)
        ready.fill_(1)

    assert not done.query()
    threading.Timer(0.05, write).start()
    done.synchronize()
    assert torch.equal(target[[1, 4]].cpu(), expected[[1, 4]])
