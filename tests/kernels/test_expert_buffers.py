"""Experts in a pool of buffers: what is found, fetched, left to the CPU and let go of, by kernels as by plain torch."""

from functools import partial

import pytest
import torch
from offload_runtime_kernels import expert_buffers as ops

from tests.helpers.kernel_conditions import KERNEL_DEVICE

LAYERS, EXPERTS, CHOSEN, BYTES = 3, 20, 4, 48
NAMES = ("place_experts", "release_experts", "fetch_experts")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if KERNEL_DEVICE.type == "cuda" else tensor


def wait() -> None:
    if KERNEL_DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Pool:
    """Buffers, and what is in them by one version of the operations."""

    def __init__(self, version: str, buffers: int, most: int = 0, share: float | None = None) -> None:
        self.place, self.release, self.fetch = (getattr(ops, name + version) for name in NAMES)
        self.tables = ops.BufferTables.of(KERNEL_DEVICE, layers=LAYERS, experts=EXPERTS, buffers=buffers)
        self.room = buffers - most
        self.data = torch.zeros(buffers, BYTES + 16, dtype=torch.uint8, device=KERNEL_DEVICE)
        draw = torch.Generator().manual_seed(0)
        self.host = [
            on_host(torch.randint(256, (EXPERTS, BYTES), generator=draw, dtype=torch.uint8)) for _ in range(LAYERS)
        ]
        self.cpu = None
        if share is not None:
            words = torch.zeros(1 + 16 * CHOSEN, dtype=torch.int64)
            int32 = partial(torch.zeros, dtype=torch.int32, device=KERNEL_DEVICE)
            shares = share * torch.arange(EXPERTS + 1, device=KERNEL_DEVICE)
            credit = torch.zeros(1, device=KERNEL_DEVICE)
            self.cpu = ops.CpuShare(shares, credit, int32(2), int32(16 * CHOSEN), on_host(words))

    def rounds(self, layer: int, choices: torch.Tensor) -> set[int]:
        """Go through a layer, and return whose results there are. What is in flight is not there before `arrive`."""
        given, done, tables, wanted = choices.to(KERNEL_DEVICE), set[int](), self.tables, experts_of(choices)
        for number in range(-(-min(EXPERTS, choices.numel()) // self.room)):
            self.place(
                given, tables, layer, experts=EXPERTS, room=self.room, unit_bytes=BYTES, cpu=self.cpu,
                is_first=number == 0,
            )  # fmt: skip
            self.fetch(tables.fetched, self.host[layer], self.data)
            wait()
            for expert, buffer in enumerate(tables.found.tolist()):
                if buffer >= 0:
                    assert torch.equal(self.data[buffer, :BYTES].cpu(), self.host[layer][expert])
                    assert tables.owners[buffer] == layer * EXPERTS + expert and expert in wanted
                    done.add(expert)
            if number == 0 and self.cpu is not None and self.cpu.tickets[1]:
                asked = self.asked(choices, layer)
                assert not asked & done
                done |= asked
        return done

    def in_background(self, layer: int) -> dict[int, int]:
        """The buffers of what a layer fetches so."""
        experts, buffers = self.tables.background[layer].tolist()
        return dict(zip(experts[1 : 1 + experts[0]], buffers[1 : 1 + experts[0]], strict=True))

    def arrive(self, layers: range) -> None:
        for layer in layers:
            self.fetch(self.tables.background[layer], self.host[layer], self.data)
            self.release(self.tables, layer)
        wait()

    def asked(self, choices: torch.Tensor, layer: int) -> set[int]:
        """What the CPU is asked for, as the report says."""
        assert self.cpu is not None
        report, ticket = self.cpu.report.tolist(), int(self.cpu.tickets[1])
        assert report[0] == ticket << 32 | layer << 16 | len(choices)
        words = report[1 : 1 + choices.numel()]
        marks = [word >> 31 & 1 for word in words]
        assert {word >> 32 for word in words} == {ticket}
        assert [word & (1 << 31) - 1 for word in words] == [one & (1 << 31) - 1 for one in choices.flatten().tolist()]
        assert self.cpu.asked[: len(marks)].tolist() == marks
        return {word & (1 << 31) - 1 for word in words if word >> 31 & 1}


def drawn(seed: int) -> list[tuple[int, torch.Tensor]]:
    """Choices of a few passes."""
    make, found = torch.Generator().manual_seed(seed), list[tuple[int, torch.Tensor]]()
    for turn in range(5):
        for layer in range(LAYERS):
            rows = (1, 1, 3, 16)[turn % 4]
            choices = torch.rand(rows, EXPERTS, generator=make).topk(CHOSEN).indices.sort().values
            choices[1::3] = -1  # rows that only fill up
            found.append((layer, choices))
    return found


def experts_of(choices: torch.Tensor) -> set[int]:
    """What the rows have chosen."""
    return {*choices.flatten().tolist()} - {-1}


@pytest.mark.few(9)
@pytest.mark.parametrize("version", ["_reference", "_triton"])
@pytest.mark.parametrize("buffers", [CHOSEN, 30, LAYERS * EXPERTS])
@pytest.mark.parametrize("share", [None, 0.4, 1.0])
def test_all_that_is_wanted_comes(version: str, buffers: int, share: float | None) -> None:
    pool = Pool(version, buffers, share=share)
    for layer, choices in drawn(1):
        assert pool.rounds(layer, choices) == experts_of(choices)
    counts = dict(zip(("rounds", "wanted", "found", "bytes", "asked"), pool.tables.counts.tolist(), strict=True))
    assert counts["wanted"] == sum(len(experts_of(choices)) for _, choices in drawn(1))
    assert pool.tables.counts_host.tolist() == [*counts.values()]
    missing = counts["wanted"] - counts["found"]
    assert counts["bytes"] == BYTES * (missing - counts["asked"])  # nothing in the background
    assert counts["asked"] == pytest.approx((share or 0.0) * missing, abs=1)
    if buffers == LAYERS * EXPERTS and share is None:
        assert missing == LAYERS * EXPERTS


@pytest.mark.parametrize("version", ["_reference", "_triton"])
def test_the_least_recently_used_go(version: str) -> None:
    """Of those that were used at the same time any may go."""
    pool, used = Pool(version, 30), dict[tuple[int, int], int]()
    for turn, (layer, choices) in enumerate(drawn(2)):
        if choices.numel() > 30:
            continue
        pool.rounds(layer, choices)
        wanted = {(layer, expert) for expert in experts_of(choices)}
        there = {(layer, expert) for layer, expert in pool.tables.buffers.ge(0).nonzero().tolist()}
        gone, stayed = used.keys() - there, (used.keys() & there) - wanted
        assert wanted <= there and len(there) == min(30, len(used.keys() | wanted))
        assert not gone or not stayed or max(used[one] for one in gone) <= min(used[one] for one in stayed)
        used = {one: turn if one in wanted else used[one] for one in there}


@pytest.mark.few(6)
@pytest.mark.parametrize("version", ["_reference", "_triton"])
@pytest.mark.parametrize(("buffers", "most"), [(CHOSEN + 2, 2), (30, 3), (30, 7)])
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_what_the_cpu_computes_is_found_once_it_has_arrived(
    version: str, buffers: int, most: int, share: float
) -> None:
    pool, found = Pool(version, buffers, most=most, share=share), 0
    passes = drawn(3)
    for first in range(0, len(passes), LAYERS):
        in_flight = dict[int, int]()
        for layer, choices in passes[first : first + LAYERS]:
            assert pool.rounds(layer, choices) == experts_of(choices)
            in_flight |= {buffer: layer * EXPERTS + expert for expert, buffer in pool.in_background(layer).items()}
            waiting = (pool.tables.used == ops.NEVER).nonzero().flatten().tolist()
            assert {*waiting} == in_flight.keys() and len(waiting) == pool.tables.in_flight.item() <= most
            assert all(pool.tables.owners[buffer] == owner for buffer, owner in in_flight.items())
        pool.arrive(range(LAYERS))
        assert not (pool.tables.used == ops.NEVER).any() and pool.tables.in_flight.item() == 0
        for buffer, owner in in_flight.items():
            layer, expert = divmod(owner, EXPERTS)
            assert pool.tables.buffers[layer, expert] == buffer
            assert torch.equal(pool.data[buffer, :BYTES].cpu(), pool.host[layer][expert])
        found += len(in_flight)
    assert found > most


def test_tickets_begin_again() -> None:
    for version in ("_reference", "_triton"):
        pool = Pool(version, CHOSEN, share=1.0)
        assert pool.cpu is not None
        pool.cpu.tickets[0] = 0x7FFFFFFF
        for layer, choices in drawn(5)[:2]:
            pool.rounds(layer, choices)
        assert pool.cpu.tickets.tolist() == [2, 2]
