"""`tell_choices`, `take_places`: the host is told what was chosen, and waited for only where some of it is missing."""

import threading

import pytest
import torch
from offload_runtime_kernels.host_choices import (
    ALL,
    CHOICE_BITS,
    NOTHING,
    take_places,
    take_places_reference,
    take_places_triton,
    tell_choices,
    tell_choices_reference,
    tell_choices_triton,
)

from tests.helpers.kernel_conditions import KERNEL_DEVICE

WAYS = [(tell_choices_reference, take_places_reference), (tell_choices_triton, take_places_triton)]
PLACES = 1500


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if KERNEL_DEVICE.type == "cuda" else tensor


def wait() -> None:
    if KERNEL_DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("way", [*WAYS, (tell_choices, take_places)])
@pytest.mark.parametrize("count", [1, 4, 300])
def test_choices_are_told_and_places_taken(way: tuple, count: int) -> None:  # type: ignore[type-arg]
    if way is WAYS[0] and KERNEL_DEVICE.type == "cuda":
        pytest.skip("the references are for one device")
    tell, take = way
    places = on_host(torch.arange(PLACES, dtype=torch.int32))
    choices = torch.randint(PLACES, (count,), generator=torch.Generator().manual_seed(count))
    tickets = torch.zeros(2, dtype=torch.int32, device=KERNEL_DEVICE)
    told, released = on_host(torch.full((count,), NOTHING)), on_host(torch.zeros(1, dtype=torch.int32))
    out = torch.empty(PLACES, dtype=torch.int32, device=KERNEL_DEVICE)
    for number, missing in enumerate((False, True, True, False)):
        told.fill_(NOTHING)
        places[choices[-1]] = -1 if missing else 7
        tell(choices.to(KERNEL_DEVICE), places, tickets, told)
        wait()
        ticket = number if missing else 0
        assert torch.equal(told & (1 << CHOICE_BITS) - 1, choices) and (told >> CHOICE_BITS == ticket).all()
        released[0] = ALL if number == 2 else ticket
        take(tickets, released, places, out)
        assert torch.equal(out.cpu(), places) and tickets.tolist() == [min(number, 2), ticket]


@pytest.mark.gpu
@pytest.mark.parametrize("release", [1, ALL])
def test_the_device_waits_until_the_host_has_what_is_missing(release: int) -> None:
    places = on_host(torch.arange(PLACES, dtype=torch.int32))
    choices = torch.tensor([3, 1400], device="cuda")
    told, released = on_host(torch.full((2,), NOTHING)), on_host(torch.zeros(1, dtype=torch.int32))
    out = torch.empty(PLACES, dtype=torch.int32, device="cuda")
    tickets = torch.zeros(2, dtype=torch.int32, device="cuda")
    done = torch.cuda.Event()
    tell_choices(choices, places, tickets, told)  # compiles
    take_places(tickets, released, places, out)
    done.record()
    done.synchronize()
    places[3] = -1
    tell_choices(choices, places, tickets, told)
    take_places(tickets, released, places, out)
    done.record()
    while (told >> CHOICE_BITS != 1).any():
        pass
    assert not done.query()

    def answer() -> None:
        places[3] = 11
        released[0] = release

    threading.Timer(0.05, answer).start()
    done.synchronize()
    assert out[3] == 11 and out[1400] == 1400
