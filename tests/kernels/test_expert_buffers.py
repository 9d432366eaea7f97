"""Experts in a pool of buffers: what is found, fetched, left to the CPU and let go of, by kernels as by plain torch."""

from functools import partial

import pytest
import torch
from offload_runtime_kernels import expert_buffers as ops

from tests.helpers.kernel_conditions import KERNEL_DEVICE

LAYERS, EXPERTS, CHOSEN, BYTES = 3, 20, 4, 48
NAMES = ("place_experts", "adopt_experts", "fetch_experts")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if KERNEL_DEVICE.type == "cuda" else tensor


def wait() -> None:
    if KERNEL_DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Pool:
    """Buffers, and what is in them by one version of the operations."""

    def __init__(self, version: str, buffers: int, spare: int = 0, share: float | None = None) -> None:
        self.place, self.adopt, self.fetch = (getattr(ops, name + version) for name in NAMES)
        self.tables = ops.BufferTables.of(KERNEL_DEVICE, layers=LAYERS, experts=EXPERTS, buffers=buffers)
        self.tables.used[:spare] = ops.NEVER
        self.room = buffers - spare
        self.data = torch.zeros(buffers, BYTES + 16, dtype=torch.uint8, device=KERNEL_DEVICE)
        draw = torch.Generator().manual_seed(0)
        self.host = [
            on_host(torch.randint(256, (EXPERTS, BYTES), generator=draw, dtype=torch.uint8)) for _ in range(LAYERS)
        ]
        self.questions = None
        if share is not None:
            words = torch.zeros(1 + 16 * CHOSEN, dtype=torch.int64)
            int32 = partial(torch.zeros, dtype=torch.int32, device=KERNEL_DEVICE)
            shares, owed = on_host(share * torch.arange(EXPERTS + 1)), torch.zeros(1, device=KERNEL_DEVICE)
            self.questions = ops.CpuQuestions(shares, owed, int32(2), int32(16 * CHOSEN), on_host(words))

    def rounds(self, layer: int, choices: torch.Tensor) -> set[int]:
        """Go through a layer, and return whose results there are."""
        given, done, tables = choices.to(KERNEL_DEVICE), set[int](), self.tables
        for number in range(-(-min(EXPERTS, choices.numel()) // self.room)):
            self.place(
                given, tables, layer, experts=EXPERTS, room=self.room, unit_bytes=BYTES, questions=self.questions,
                is_first=number == 0,
            )  # fmt: skip
            self.fetch(tables, self.host[layer], self.data)
            wait()
            here = tables.buffers[layer].tolist()
            for expert, buffer in enumerate(here):
                if buffer >= 0:
                    assert torch.equal(self.data[buffer, :BYTES].cpu(), self.host[layer][expert])
                    assert tables.owners[buffer] == layer * EXPERTS + expert
            done |= {expert for expert in set(choices.flatten().tolist()) if here[expert] >= 0}
            if number == 0 and self.questions is not None and self.questions.tickets[1]:
                done |= self.asked(choices, layer)
        return done

    def asked(self, choices: torch.Tensor, layer: int) -> set[int]:
        """What the CPU is asked for, as the report says."""
        assert self.questions is not None
        report, ticket = self.questions.report.tolist(), int(self.questions.tickets[1])
        assert report[0] == ticket << 32 | layer << 16 | len(choices)
        words = report[1 : 1 + choices.numel()]
        marks = [word >> 31 & 1 for word in words]
        assert {word >> 32 for word in words} == {ticket}
        assert [word & (1 << 31) - 1 for word in words] == choices.flatten().tolist()
        assert self.questions.asked[: len(marks)].tolist() == marks
        return {word & (1 << 31) - 1 for word in words if word >> 31 & 1}


def drawn(seed: int) -> list[tuple[int, torch.Tensor]]:
    """Choices of a few passes."""
    make, found = torch.Generator().manual_seed(seed), list[tuple[int, torch.Tensor]]()
    for turn in range(5):
        for layer in range(LAYERS):
            rows = (1, 1, 3, 16)[turn % 4]
            found.append((layer, torch.rand(rows, EXPERTS, generator=make).topk(CHOSEN).indices.sort().values))
    return found


@pytest.mark.parametrize("version", ["_reference", "_triton"])
@pytest.mark.parametrize("buffers", [CHOSEN, 30, LAYERS * EXPERTS])
@pytest.mark.parametrize("share", [None, 0.4, 1.0])
def test_all_that_is_wanted_comes(version: str, buffers: int, share: float | None) -> None:
    pool = Pool(version, buffers, share=share)
    for layer, choices in drawn(1):
        assert pool.rounds(layer, choices) == set(choices.flatten().tolist())
    counts = dict(zip(("rounds", "wanted", "found", "bytes", "asked"), pool.tables.counts.tolist(), strict=True))
    assert counts["wanted"] == sum(len(choices.unique()) for _, choices in drawn(1))
    assert counts["bytes"] == BYTES * (counts["wanted"] - counts["found"] - counts["asked"])
    assert pool.tables.counts_host.tolist() == [*counts.values()]
    missing = counts["wanted"] - counts["found"]
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
        wanted = {(layer, expert) for expert in choices.flatten().tolist()}
        there = {(layer, expert) for layer, expert in pool.tables.buffers.ge(0).nonzero().tolist()}
        gone, stayed = used.keys() - there, (used.keys() & there) - wanted
        assert wanted <= there and len(there) == min(30, len(used.keys() | wanted))
        assert not gone or not stayed or max(used[one] for one in gone) <= min(used[one] for one in stayed)
        used = {one: turn if one in wanted else used[one] for one in there}


@pytest.mark.parametrize("version", ["_reference", "_triton"])
def test_what_arrives_is_exchanged_unless_it_is_there(version: str) -> None:
    pool = Pool(version, 30, spare=2)
    for layer, choices in drawn(3):
        pool.rounds(layer, choices)
    buffers, host = pool.tables.buffers, pool.host[1]
    absent = int((buffers[1] < 0).nonzero()[0])
    present = int((buffers[2] >= 0).nonzero()[0])
    before, oldest = int(buffers[2, present]), int(pool.tables.used.min())
    pool.data[0, :BYTES] = host[absent].to(KERNEL_DEVICE)
    arrived = on_host(torch.tensor([[EXPERTS + absent, 0], [2 * EXPERTS + present, 1]], dtype=torch.int32))
    spare = on_host(torch.zeros(2, dtype=torch.int32))
    pool.adopt(arrived, pool.tables, spare)
    wait()
    given, kept = spare.tolist()
    assert kept == 1 and buffers[2, present] == before and buffers[1, absent] == 0
    assert given > 1 and not (buffers == given).any() and pool.tables.owners[given] == -1 and oldest >= 0
    for layer, choices in drawn(4):  # nothing takes a spare buffer
        assert pool.rounds(layer, choices) == set(choices.flatten().tolist())
        assert not torch.isin(buffers, spare.to(KERNEL_DEVICE)).any()


def test_tickets_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("_reference", "_triton"):
        pool = Pool(version, CHOSEN, share=1.0)
        assert pool.questions is not None
        pool.questions.tickets[0] = 0x7FFFFFFF
        for layer, choices in drawn(5)[:2]:
            pool.rounds(layer, choices)
        assert pool.questions.tickets.tolist() == [2, 2]
