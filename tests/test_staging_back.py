"""The way back through the pieces: whatever is late, it lands where it belongs before it is said to be there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_runtime.copy import StagingWriteEngine
from offload_runtime.copy.queue import ThreadCopyEngine
from offload_runtime.errors import CopyError
from offload_runtime.memory import PageableMemory
from tests.helpers.copy_hooks import before_each_copy
from tests.helpers.kv_runners import delays

PIECE_BYTES = 64
BLOCK_BYTES = 5 * PIECE_BYTES + 8
NUM_BLOCKS = 7


class _LockedTargetsOnly(ThreadCopyEngine):
    """Insists that what it writes to is page-locked, as CUDA needs it."""

    def __init__(self, *, before_copy: Callable[[], None] | None) -> None:
        super().__init__(pace=before_each_copy(before_copy))
        self.pageable = PageableMemory()

    def enqueue(self, dst: torch.Tensor, src: torch.Tensor, **events: object) -> None:
        assert dst.nbytes == src.nbytes > 0
        assert self.pageable.locked_bytes(dst) == dst.nbytes, "pageable"
        super().enqueue(dst, src, **events)  # type: ignore[arg-type]


class Writing:
    """Blocks on a device, as many on the host, every other one of them pageable, and the queue between them."""

    def __init__(
        self, *, pieces: int = 3, threads: int = 2, before_landing: Callable[[], None] | None = None,
        before_copy: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.device = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        self.host = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8) for _ in range(NUM_BLOCKS)]
        below = _LockedTargetsOnly(before_copy=before_copy)
        for block in self.host[::2]:
            below.pageable.enter(block)
        ring = torch.zeros(pieces, PIECE_BYTES, dtype=torch.uint8)
        self.engine = StagingWriteEngine(
            below, list(ring), below.pageable, num_threads=threads, before_move=before_landing
        )
        self._read = self.engine.new_event()

    def send(self, block: int, ready: object, value: int) -> torch.Tensor:
        """Compute a block, send it to the host, and return what has to arrive there."""
        generator = torch.Generator().manual_seed(value)
        content = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=generator)
        self.device[block] = content
        self.engine.compute_record(self._read)
        self.engine.enqueue(self.host[block], self.device[block], free=self._read, ready=ready)
        return content


@contextmanager
def writing(**options: object) -> Iterator[Writing]:
    before = threading.active_count()
    made = Writing(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.engine.close()
    assert threading.active_count() == before


@settings(max_examples=25, deadline=None)
@given(
    pieces=st.integers(1, 8), threads=st.integers(1, 5), seed=st.integers(0, 99),
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=12), how=st.sampled_from(["wait", "ask"]),
)  # fmt: skip
def test_what_is_done_has_landed(pieces: int, threads: int, seed: int, blocks: list[int], how: str) -> None:
    """Events of one copy each and one that is used again and again; a source is written anew once it was read."""
    with writing(pieces=pieces, threads=threads, before_landing=delays(seed), before_copy=delays(seed + 1)) as sent:
        common, engine = sent.engine.new_event(), sent.engine
        for number, block in enumerate(blocks):
            own = engine.new_event()
            expected = sent.send(block, own if number % 2 else common, number)
            ready = own if number % 2 else common
            engine.compute_wait(ready)
            sent.device[block] = 0  # it has been read
            if how == "wait":
                engine.wait(ready)
            else:
                while not engine.is_done(ready):
                    time.sleep(0)
            assert torch.equal(sent.host[block], expected)
        assert engine.bytes_copied == len(blocks) * BLOCK_BYTES


@settings(max_examples=20, deadline=None)
@given(pieces=st.integers(1, 8), threads=st.integers(1, 5), seed=st.integers(0, 99))
def test_many_at_once_and_drained(pieces: int, threads: int, seed: int) -> None:
    with writing(pieces=pieces, threads=threads, before_landing=delays(seed), before_copy=delays(seed + 1)) as sent:
        ready = sent.engine.new_event()
        expected = [sent.send(block, ready, block) for block in range(NUM_BLOCKS)]
        sent.engine.drain()
        assert all(torch.equal(*pair) for pair in zip(sent.host, expected, strict=True))
        assert sent.engine.is_done(ready)


@pytest.mark.parametrize("block", [0, 1])
def test_an_event_is_not_done_before_its_copy_has_landed(block: int) -> None:
    gate = threading.Event()
    with writing(pieces=12, before_landing=lambda: bool(gate.wait(10)) or None) as sent:
        ready = sent.engine.new_event()
        assert sent.engine.is_done(ready)  # never used
        sent.send(0, ready, 1)
        sent.send(block, ready, 2)
        sent.engine.compute_wait(ready)  # the sources have been read, which is all that the device can see
        assert not sent.engine.is_done(ready)
        drained = threading.Thread(target=sent.engine.drain)
        drained.start()
        drained.join(0.1)
        assert drained.is_alive()
        gate.set()
        drained.join(10)
        assert sent.engine.is_done(ready)


def test_page_locked_targets_do_not_wait_for_a_thread() -> None:
    with writing(before_landing=_fail) as sent:
        ready = sent.engine.new_event()
        expected = sent.send(1, ready, 1)
        sent.engine.wait(ready)
        assert torch.equal(sent.host[1], expected)


def _fail() -> None:
    raise OSError("the memory is gone")


@pytest.mark.parametrize("where", ["before_landing", "before_copy"])
def test_a_failure_is_raised_wherever_somebody_waits(where: str) -> None:
    with writing(pieces=2, **{where: _fail}) as sent:
        ready = sent.engine.new_event()
        with pytest.raises(CopyError, match=r"the memory is gone.*load the runtime again"):
            sent.send(0, ready, 1)  # more parts than there are pieces
        for wait in (sent.engine.drain, lambda: sent.engine.wait(ready), lambda: sent.engine.is_done(ready)):
            with pytest.raises(CopyError, match="load the runtime again"):
                wait()


def test_closing_while_somebody_waits_for_a_piece() -> None:
    gate = threading.Event()
    with writing(pieces=1, before_landing=lambda: bool(gate.wait(10)) or None) as sent:
        ready = sent.engine.new_event()

        def send() -> None:
            with suppress(CopyError, RuntimeError):  # the queue is closed
                sent.send(0, ready, 1)

        sender = threading.Thread(target=send)
        sender.start()
        sender.join(0.1)
        assert sender.is_alive()
        closer = threading.Thread(target=sent.engine.close)
        closer.start()
        gate.set()
        for thread in (sender, closer):
            thread.join(10)
            assert not thread.is_alive()


def test_a_queue_that_its_own_thread_closes_ends_all_the_same() -> None:
    """As the garbage collector does when it finds a dropped runtime there."""
    with writing(before_landing=lambda: sent.engine.close()) as sent:
        ready = sent.engine.new_event()
        with suppress(CopyError, RuntimeError):  # the queue is closed
            sent.send(0, ready, 1)
        deadline = time.perf_counter() + 10
        while any(thread.name.startswith("staging") for thread in threading.enumerate()):
            assert time.perf_counter() < deadline
            time.sleep(0.01)


def test_pageable_memory_is_found_by_any_slice() -> None:
    memory, known = torch.zeros(1000, dtype=torch.uint8), PageableMemory()
    known.enter(memory[600:800])
    known.enter(memory[100:300])
    known.enter(memory[0:0])
    cases = {(0, 100): 100, (0, 101): 100, (100, 300): 0, (299, 300): 0, (300, 600): 300, (500, 700): 100,
             (700, 750): 0, (800, 1000): 200}  # fmt: skip
    assert {case: known.locked_bytes(memory[slice(*case)]) for case in cases} == cases
    known.forget(memory[100:300])
    assert known.locked_bytes(memory[100:300]) == 200 and known.locked_bytes(memory[600:700]) == 0
