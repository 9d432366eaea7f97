"""A KV cache in pageable host memory gives the bits of one on the device, whatever comes late, is cut, or fails."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_runtime.copy import StagingWriteEngine
from offload_runtime.copy.queue import CudaCopyEngine, ThreadCopyEngine
from offload_runtime.errors import BudgetError, CopyError
from offload_runtime.kv import BlockLocking, HostBlocks, HostKVCache
from offload_runtime.memory import HostArena, PageableMemory, Registrar
from offload_runtime.model import Window
from offload_runtime.runners import ModelRunner
from tests.helpers.assembly import CPU, HostKV, StagedKV
from tests.helpers.copy_hooks import before_each_copy
from tests.helpers.engine import failing, one_thread, raising  # noqa: F401 (an autouse fixture)
from tests.helpers.kv_runners import CAPACITY, MODELS, assemble, copying_threads, delays, reset, same
from tests.helpers.models import random_tokens

# Three of the host's layers; layer 2 stays on the device.
HALF, ALL = (1,), (0, 1, 3)


def host_kv(layers: tuple[int, ...], **options: Any) -> HostKV:
    return HostKV(resident_layers=(2,), staged=StagedKV(layers, **options))


Pair = tuple[ModelRunner, ModelRunner]


@pytest.fixture(scope="module", params=MODELS)
def on_device(request: pytest.FixtureRequest) -> Iterator[tuple[str, ModelRunner]]:
    device = assemble(request.param)
    yield request.param, device.runner
    device.close()


@pytest.fixture(scope="module", params=[HALF, ALL], ids=["half", "all"])
def pair(
    request: pytest.FixtureRequest, on_device: tuple[str, ModelRunner]
) -> Iterator[Pair]:  # fmt: skip
    """The same model with its cache on the device, and on the host, staged, with weights streamed between."""
    name, device = on_device
    staged = host_kv(request.param, before_fill=delays(1), before_landing=delays(2), pieces=3)
    engine = ThreadCopyEngine(pace=before_each_copy(delays(3, 0.001)))
    host = assemble(name, host_kv=staged, slots=2, resident=(1,), engine=engine)
    yield device, host.runner
    host.close()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Copying threads that a test began end with it."""
    before = copying_threads()
    yield
    assert copying_threads() == before


def prefill(pair: Pair, count: int, *, seed: int = 0, sequence: int = 0) -> None:
    assert same(*(runner.prefill(sequence, random_tokens(count, seed=seed)) for runner in pair))


def decode(pair: Pair, count: int, *, seed: int = 0, accept: int = 0) -> None:
    window = Window(tuple(random_tokens(count, seed=seed)))
    assert same(*(runner.verify([window], [0]) for runner in pair))
    for runner in pair:
        runner.cache.commit(0, accept)


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [5, 256, 700, 1024])
def test_decoding_across_blocks_and_continuing(pair: Pair, length: int) -> None:
    reset(*pair)
    prefill(pair, length)
    for step in range(8):
        decode(pair, 40, seed=step, accept=37)
    prefill(pair, 200, seed=1)
    decode(pair, 9)


@pytest.mark.few(1)
def test_ragged_batches(pair: Pair) -> None:
    reset(*pair)
    for sequence, length in enumerate((300, 40, 770)):
        prefill(pair, length, seed=sequence, sequence=sequence)
    windows = [Window(tuple(random_tokens(count, seed=count))) for count in (9, 3, 17)]
    for sequences in ([0, 1, 2], [2, 0, 1], [2], [1, 2]):
        chosen = [windows[sequence] for sequence in sequences]
        device, host = (runner.verify(chosen, sequences) for runner in pair)
        assert same(device, host)
        for runner in pair:
            for sequence in sequences:
                runner.cache.commit(sequence, 2 + sequence)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_of_prompts_windows_and_cuts(pair: Pair, data: st.DataObject) -> None:
    reset(*pair)
    for step in range(data.draw(st.integers(1, 7))):
        length = pair[0].cache.length(0)
        action = data.draw(st.sampled_from(["prefill", "interrupted", "window", "cut"]))
        count = data.draw(st.integers(1, 600))
        if action == "cut":
            for runner in pair:
                runner.cache.truncate(0, min(count, length))
        elif length + count > CAPACITY - 50:
            continue
        elif action == "prefill":
            prefill(pair, count, seed=step)
        elif action == "interrupted":
            interrupt_prefill(pair[1], count, after_layers=data.draw(st.integers(1, 4)))
        else:
            tokens = min(count, 40)
            decode(pair, tokens, seed=step, accept=data.draw(st.integers(0, tokens)))
    assert pair[0].cache.length(0) == pair[1].cache.length(0)


def interrupt_prefill(runner: ModelRunner, count: int, *, after_layers: int) -> None:
    def stop(done: int, total: int) -> None:
        if done == after_layers:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.prefill(0, random_tokens(count, seed=77), stop)


@pytest.mark.usefixtures("nothing_left")
def test_each_block_crosses_the_link_once_each_way() -> None:
    staged = assemble("llama", host_kv=host_kv(ALL, pieces=5))
    cache, writes = staged.runner.cache, staged.writeback
    assert isinstance(cache, HostKVCache) and writes is not None
    block = cache.blocks.block_bytes
    staged.runner.prefill(0, random_tokens(1100))
    writes.drain()
    assert writes.bytes_copied == 3 * 4 * block
    for _ in range(3):
        staged.runner.verify([Window((1, 2))], [0])
    staged.engine.drain()
    ahead = 2 * block  # the ring of two slots
    assert staged.engine.bytes_copied == 3 * 3 * 4 * block + ahead
    assert cache.blocks.pinned_bytes == 0 and cache.pinned_bytes == 0
    staged.close()


def test_pageable_memory_is_known_as_long_as_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes to lie at its address afterwards may be page-locked."""
    pageable = PageableMemory()
    locking = BlockLocking(None, pageable, (0, 2))
    blocks = HostBlocks(range(3), 4096, batch=2, most_blocks=9, locking=locking, device=CPU)
    blocks.grow(0, 4)
    blocks.grow(1, 5)
    assert pageable.nbytes == 2 * 9 * 4096 and blocks.nbytes == 3 * 9 * 4096
    assert [pageable.locked_bytes(blocks.memory(layer, 1, range(2, 5))) for layer in range(3)] == [0, 3 * 4096, 0]
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", raising(OSError("no more"), after=2, then=mmap.mmap))  # of the system
        with pytest.raises(BudgetError, match="could not grow"):
            blocks.grow(0, 5)
    assert pageable.nbytes == 2 * 9 * 4096 and blocks.num_blocks(0) == 4
    blocks.close()
    assert pageable.nbytes == 0


# --- who may write when


class Gate:
    """Holds threads that call it while it is shut, and knows how many."""

    def __init__(self) -> None:
        self.held = 0
        self._open = threading.Event()
        self._open.set()

    def __call__(self) -> None:
        self.held += not self._open.is_set()
        assert self._open.wait(30)

    def wait_until_held(self) -> None:
        deadline = time.perf_counter() + 30
        while not self.held:
            assert time.perf_counter() < deadline
            time.sleep(0.001)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@pytest.mark.usefixtures("nothing_left")
def test_nothing_is_cut_to_be_written_anew_while_it_is_read() -> None:
    """The schedule runs ahead: a pass that will never be has asked for blocks that the next text replaces."""
    gate = Gate()
    staged = assemble("llama", host_kv=host_kv(ALL, before_fill=gate))
    runner = staged.runner
    runner.prefill(0, random_tokens(700))
    runner.verify([Window((1,))], [0])
    runner.verify([Window((1,))], [0])  # leaves the next pass's first pieces behind
    staged.engine.drain()
    gate.shut()
    runner.cache.truncate(0, 700)  # whoever has planned a pass has to plan again
    next(runner.streamer.layers())
    gate.wait_until_held()
    cut = threading.Thread(target=runner.cache.truncate, args=(0, 520))
    cut.start()
    cut.join(10)
    assert not cut.is_alive()  # full blocks stay: nothing to wait for
    cut = threading.Thread(target=runner.cache.truncate, args=(0, 300))
    cut.start()
    cut.join(0.3)
    assert cut.is_alive() and runner.cache.length(0) == 520
    gate.open()
    cut.join(30)
    assert not cut.is_alive() and runner.cache.length(0) == 300
    staged.close()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_a_landing_is_not_overtaken_by_what_is_written_there_next() -> None:
    """A prompt is given up while its blocks are still landing, late, and other ones take their place."""
    first = True

    def late() -> None:
        nonlocal first
        if first:
            first = False
            time.sleep(0.5)

    device = assemble("llama")
    host = assemble("llama", host_kv=host_kv(ALL, pieces=12, threads=4, before_landing=late))
    interrupt_prefill(host.runner, 600, after_layers=1)
    pair = (device.runner, host.runner)
    for step in range(20):  # the first block leaves the ring on the way
        decode(pair, 40, seed=step, accept=38)
    device.close()
    host.close()


# --- what fails


@pytest.mark.few(1)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("after", [0, 7, 60, 200])
@pytest.mark.parametrize("where", ["before_fill", "before_landing"])
def test_a_failure_is_typed_and_keeps_what_is_committed(where: str, after: int) -> None:
    hooks: dict[str, Any] = {where: failing(after)}
    staged = assemble("llama", host_kv=host_kv(ALL, **hooks))
    runner, committed = staged.runner, 0
    with pytest.raises(CopyError, match=r"the memory is gone.*load the runtime again"):
        runner.prefill(0, random_tokens(600))
        committed = 600
        for step in range(300):
            runner.verify([Window(tuple(random_tokens(40, seed=step)))], [0])
            runner.cache.commit(0, 3)
            committed += 3
    assert committed <= runner.cache.length(0) <= committed + 3
    with pytest.raises(CopyError, match="load the runtime again"):
        for _ in range(3):
            runner.verify([Window((1, 2))], [0])
    with suppress(CopyError):
        runner.cache.truncate(0, 0)  # does not wait for reads that nobody makes any more
    started = time.perf_counter()
    staged.close()
    assert time.perf_counter() - started < 10


@pytest.mark.few(1)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("moment", ["prefill", "commit", "verify"])
def test_closing_in_the_middle_of_everything_ends(moment: str) -> None:
    slow = {"before_fill": delays(1, 0.02, 1.0), "before_landing": delays(2, 0.02, 1.0)}
    staged = assemble("llama", host_kv=host_kv(ALL, **slow))
    runner = staged.runner
    if moment == "prefill":
        interrupt_prefill(runner, 500, after_layers=2)
    else:
        runner.prefill(0, random_tokens(500))
        runner.verify([Window(tuple(random_tokens(20)))], [0])
        runner.cache.commit(0, 15)  # a full block
        if moment == "verify":
            next(runner.streamer.layers())
    started = time.perf_counter()
    staged.close()
    assert time.perf_counter() - started < 10


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [HALF, ALL], ids=["half", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_on_the_gpu_staged(name: str, layers: tuple[int, ...]) -> None:
    """In bf16, everything late, with weights on their way between."""
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    device = assemble(name, **gpu)
    late = host_kv(layers, before_fill=delays(1), before_landing=delays(2), pieces=3)
    host = assemble(name, host_kv=late, slots=2, resident=(1,), **gpu)
    pair = (device.runner, host.runner)
    prefill(pair, 700)
    prefill(pair, 300, seed=1, sequence=1)
    for step in range(12):
        windows = [Window(tuple(random_tokens(count, seed=step))) for count in (1 + 3 * step, 40 - 3 * step)]
        assert same(*(runner.verify(windows, [0, 1]) for runner in pair))
        for runner in pair:
            runner.cache.commit(0, 1 + 3 * step)
            runner.cache.commit(1, 30 - 2 * step)
    for kept in (400, 130):
        for runner in pair:
            runner.cache.truncate(0, kept)
        interrupt_prefill(host.runner, 500, after_layers=2)
        prefill(pair, 200, seed=3)
        decode(pair, 3, accept=2)
        decode(pair, 40, seed=1, accept=40)
    device.close()
    host.close()


@pytest.mark.gpu
@pytest.mark.alone
def test_writing_to_pageable_memory_is_pipelined_on_the_gpu() -> None:
    """What a prompt writes, all of it pageable: what has been read may be overwritten before it has landed."""
    gpu, nbytes, pieces, piece_bytes = torch.device("cuda"), 256 << 20, 8, 16 << 20
    host, ring = HostArena(nbytes, name="blocks"), HostArena(pieces * piece_bytes, name="ring")
    pageable = PageableMemory()
    ring.pin(Registrar())
    pageable.enter(host.buffer)
    engine = StagingWriteEngine(
        CudaCopyEngine(gpu), list(ring.buffer.view(pieces, -1)), pageable, num_threads=4
    )  # fmt: skip
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=gpu)
    read, written = engine.new_event(), engine.new_event()
    for _ in range(3):
        source.add_(1)
        engine.compute_record(read)
        started = time.perf_counter()
        for start in range(0, nbytes, piece_bytes):
            part = slice(start, start + piece_bytes)
            engine.enqueue(host.buffer[part], source[part], free=read, ready=written)
        engine.compute_wait(written)
        expected = source.cpu()
        source.zero_()  # it has been read
        engine.wait(written)
        print(f"written to pageable memory: {nbytes / (time.perf_counter() - started) / 1e9:.1f} GB/s")
        assert engine.is_done(written) and torch.equal(host.buffer, expected)
    engine.close()
    ring.close()
    host.close()
