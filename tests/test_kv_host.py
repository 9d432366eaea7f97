"""The KV cache in host memory gives the bits of the one on the device, whatever is streamed, cut back or grown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_runtime.copy.queue import ThreadCopyEngine
from offload_runtime.errors import BudgetError, ContextLengthError
from offload_runtime.model import Window
from offload_runtime.runners import ModelRunner
from tests.helpers.assembly import HostKV
from tests.helpers.copy_hooks import before_each_copy
from tests.helpers.engine import one_thread, without_host_memory  # noqa: F401
from tests.helpers.kv_runners import CAPACITY, MODELS, assemble, delays, reset, same
from tests.helpers.models import random_tokens


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """The same model with its cache on the device, and on the host with some weights streamed too."""
    device = assemble(request.param)
    engine = ThreadCopyEngine(pace=before_each_copy(delays(1, 0.001, share=1)))
    host = assemble(request.param, host_kv=HostKV(resident_layers=(2,)), slots=2, resident=(1,), engine=engine)
    yield device.runner, host.runner
    device.close()
    host.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("length", [5, 255, 256, 257, 700, 1024])
def test_decoding_behind_prompts_of_any_length(pair: tuple[ModelRunner, ModelRunner], length: int) -> None:
    reset(*pair)
    prompt = random_tokens(length)
    assert same(*(runner.prefill(0, prompt) for runner in pair))
    for step in range(6):
        window = Window(tuple(random_tokens(1 + 7 * step, seed=step)))
        assert same(*(runner.verify([window], [0]) for runner in pair))
        for runner in pair:
            runner.cache.commit(0, 1 + 5 * step)


def test_trees(pair: tuple[ModelRunner, ModelRunner]) -> None:
    reset(*pair)
    for runner in pair:
        runner.prefill(0, random_tokens(510))
    parents = (-1, 0, 0, 1, 1, 2, 4, 6, 7)
    assert same(*(runner.verify([Window(tuple(random_tokens(9)), parents)], [0]) for runner in pair))


def test_prompts_of_all_lengths_are_read_in_the_same_memory() -> None:
    """However full the device is: there need be no second piece of memory for a longer prompt."""
    made, places = assemble("llama", host_kv=HostKV()), list[int]()
    runner = made.runner

    def on_layer(done: int, layers: int) -> None:
        places.append(runner.cache.store(done - 1).data.data_ptr())

    for length in (300, 600, 500):
        runner.prefill(0, random_tokens(length), on_layer)
        runner.cache.truncate(0, 0)
    assert len(places) > 3 and len(set(places)) == 1
    made.close()


@pytest.mark.slow
def test_ragged_batches(pair: tuple[ModelRunner, ModelRunner]) -> None:
    reset(*pair)
    for sequence, length in enumerate((300, 40, 770)):
        assert same(*(runner.prefill(sequence, random_tokens(length, seed=sequence)) for runner in pair))
    windows = [Window(tuple(random_tokens(count, seed=count))) for count in (9, 3, 17)]
    for sequences in ([0, 1, 2], [2, 0, 1], [2], [1, 2]):
        chosen = [windows[sequence] for sequence in sequences]
        device, host = (runner.verify(chosen, sequences) for runner in pair)
        assert len(device) == sum(len(window.tokens) for window in chosen) and same(device, host)
        for runner in pair:
            for sequence in sequences:
                runner.cache.commit(sequence, 2 + sequence)


@pytest.mark.few(1)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_of_windows_commits_and_cuts(pair: tuple[ModelRunner, ModelRunner], data: st.DataObject) -> None:
    reset(*pair)
    caches = [runner.cache for runner in pair]
    for step in range(data.draw(st.integers(1, 7))):
        length = caches[0].length(0)
        action = data.draw(st.sampled_from(["prefill", "window", "cut"]))
        if action == "cut":
            kept = data.draw(st.integers(0, length))
            for cache in caches:
                cache.truncate(0, kept)
        elif action == "prefill":
            count = data.draw(st.integers(1, 600))
            if length + count > CAPACITY - 50:
                continue
            assert same(*(runner.prefill(0, random_tokens(count, seed=step)) for runner in pair))
        elif length:
            count = data.draw(st.integers(1, 40))
            if length + count > CAPACITY:
                continue
            window = Window(tuple(random_tokens(count, seed=step)))
            assert same(*(runner.verify([window], [0]) for runner in pair))
            accepted = data.draw(st.integers(0, count))
            for cache in caches:
                cache.commit(0, accepted)
    assert caches[0].length(0) == caches[1].length(0)


@pytest.mark.few(3)
@pytest.mark.parametrize("more", [1, 200, 300])
def test_a_cut_behind_what_a_short_prefill_went_on_from(pair: tuple[ModelRunner, ModelRunner], more: int) -> None:
    """A sliding window need not reach the block before, which is kept all the same."""
    reset(*pair)
    for runner in pair:
        runner.prefill(0, random_tokens(265))
        runner.prefill(0, random_tokens(more, seed=1))
        runner.cache.truncate(0, 1)
    assert same(*(runner.verify([Window((7,))], [0]) for runner in pair))
    assert same(*(runner.prefill(0, random_tokens(3, seed=2)) for runner in pair))


def test_only_full_blocks_cross_the_link_and_each_is_written_once() -> None:
    with_writes = assemble("llama", host_kv=HostKV(piece_blocks=3, slots=3))
    runner, engine, writes = with_writes.runner, with_writes.engine, with_writes.writeback
    assert writes is not None
    block = runner.cache.blocks.block_bytes  # type: ignore[attr-defined]
    layers = runner.streamer.num_layers
    runner.prefill(0, random_tokens(1100))
    writes.drain()
    assert writes.bytes_copied == layers * 4 * block and runner.streamer.bytes_begun == 0
    for number in range(1, 4):
        runner.verify([Window((1, 2))], [0])
        assert runner.streamer.bytes_begun == number * layers * 4 * block
    for _ in range(6):
        runner.verify([Window(tuple(random_tokens(40)))], [0])
        runner.cache.commit(0, 40)
    writes.drain()
    assert writes.bytes_copied == layers * 5 * block
    engine.drain()
    with_writes.close()


def test_a_prefill_that_goes_on_reads_what_there_is_once_and_writes_what_is_new() -> None:
    """However many pieces the prompt is worked on in."""
    made = assemble("llama", host_kv=HostKV(piece_blocks=2, slots=3), resident=(0, 2), slots=2)
    runner, streamer, writes = made.runner, made.runner.streamer, made.writeback
    assert writes is not None
    block = runner.cache.blocks.block_bytes  # type: ignore[attr-defined]
    layers, weights = streamer.num_layers, streamer.bytes_per_pass
    assert weights > 0 and runner.chunk_tokens < 100
    runner.prefill(0, random_tokens(700))
    writes.drain()
    assert (streamer.bytes_begun, writes.bytes_copied) == (weights, layers * 2 * block)
    runner.prefill(0, random_tokens(900, seed=1))
    writes.drain()
    read, written = streamer.bytes_begun - weights, writes.bytes_copied - layers * 2 * block
    assert (read, written) == (weights + layers * 2 * block, layers * 4 * block)
    made.engine.drain()
    made.close()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kept", "more"), [(600, 100), (600, 500), (600, 1000), (512, 500), (512, 900), (300, 1100), (40, 300), (40, 1060)]
)
def test_an_interrupted_prefill_leaves_the_session_as_it_was(
    pair: tuple[ModelRunner, ModelRunner], kept: int, more: int
) -> None:
    """Wherever in the ring its last blocks come to lie."""
    reset(*pair)
    for runner in pair:
        runner.prefill(0, random_tokens(kept))

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair[1].prefill(0, random_tokens(more, seed=1), stop)
    assert pair[1].cache.length(0) == kept
    window = Window(tuple(random_tokens(9)))
    assert same(*(runner.verify([window], [0]) for runner in pair))
    assert same(*(runner.prefill(0, random_tokens(400, seed=2)) for runner in pair))
    assert same(*(runner.verify([window], [0]) for runner in pair))


def test_memory_that_is_refused_while_growing_keeps_what_is_committed(
    pair: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    reset(*pair)
    pair[1].cache.blocks.close()  # type: ignore[attr-defined]  # what earlier tests grew would do
    for runner in pair:
        runner.prefill(0, random_tokens(250))
    window = Window(tuple(random_tokens(30)))
    with monkeypatch.context() as patch:
        without_host_memory(patch)
        with pytest.raises(BudgetError, match="could not grow"):
            pair[1].verify([window], [0])
        with pytest.raises(BudgetError, match="could not grow"):
            pair[1].prefill(0, random_tokens(100))
        assert pair[1].cache.length(0) == 250
        assert same(*(runner.verify([Window((3, 4))], [0]) for runner in pair))  # fits the open block
    assert same(*(runner.verify([window], [0]) for runner in pair))


@pytest.mark.few(1)
def test_a_context_that_is_full(pair: tuple[ModelRunner, ModelRunner]) -> None:
    reset(*pair)
    for runner in pair:
        runner.prefill(0, random_tokens(CAPACITY - 3))
        runner.verify([Window(tuple(range(1, 9)))], [0])  # what is only tentative may use the rest of the last block
        reach = runner.cache.max_tokens_with_draft
        assert reach == -(-CAPACITY // 256) * 256 > CAPACITY
        with pytest.raises(ContextLengthError, match=f"{reach + 1} tokens do not fit the {reach}"):
            runner.verify([Window(tuple(range(1, reach - CAPACITY + 5)))], [0])
        with pytest.raises(ContextLengthError, match=f"{CAPACITY + 1} tokens do not fit the {CAPACITY}"):
            runner.prefill(0, [1, 2, 3, 4])


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_bits_on_the_gpu(name: str) -> None:
    """In bf16, with weights and keys on their way at once."""
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    device = assemble(name, **gpu)
    host = assemble(name, host_kv=HostKV(slots=3, resident_layers=(2,)), slots=2, resident=(1,), **gpu)
    pair = (device.runner, host.runner)
    for runner in pair:
        runner.prefill(0, random_tokens(700))
        runner.prefill(1, random_tokens(300, seed=1))
    for step in range(12):
        windows = [Window(tuple(random_tokens(count, seed=step))) for count in (1 + 3 * step, 40 - 3 * step)]
        assert same(*(runner.verify(windows, [0, 1]) for runner in pair))
        for runner in pair:
            runner.cache.commit(0, 1 + 3 * step)
            runner.cache.commit(1, 30 - 2 * step)
    parents = (-1, 0, 0, 1, 1, 2, 4, 6, 7)
    assert same(*(runner.verify([Window(tuple(random_tokens(9)), parents)], [0]) for runner in pair))
    for runner in pair:
        runner.cache.truncate(0, 400)
        runner.prefill(0, random_tokens(200, seed=3))
    assert same(*(runner.verify([Window((1, 2, 3))], [0]) for runner in pair))
    device.close()
    host.close()
