"""The KV cache in host memory gives the bits of the one on the device, whatever is streamed, cut back or grown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_runtime.copy.queue import ThreadCopyEngine
from offload_runtime.core import TokenTree
from offload_runtime.runners import ModelRunner
from tests.helpers.assembly import HostKV, prefill, verify
from tests.helpers.copy_hooks import before_each_copy
from tests.helpers.engine import one_thread, without_host_memory  # noqa: F401
from tests.helpers.kv_runners import CAPACITY, MODELS, assemble, delays, reset, same
from tests.helpers.models import random_tokens


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """The same model with its cache on the device, and on the host with some weights streamed too."""
    device = assemble(request.param)
    engine = ThreadCopyEngine(pace=before_each_copy(delays(1, 0.001, share=1)))
    host = assemble(request.param, host_kv=HostKV(resident_layers=(2,)), buffers=2, resident=(1,), engine=engine)
    yield device.runner, host.runner
    device.close()
    host.close()


@pytest.mark.slow
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
            assert same(*(prefill(runner, 0, random_tokens(count, seed=step)) for runner in pair))
        elif length:
            count = data.draw(st.integers(1, 40))
            if length + count > CAPACITY:
                continue
            window = TokenTree(tuple(random_tokens(count, seed=step)))
            assert same(*(verify(runner, {0: window}) for runner in pair))
            accepted = data.draw(st.integers(0, count))
            for cache in caches:
                cache.commit(0, accepted)
    assert caches[0].length(0) == caches[1].length(0)


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
        prefill(runner, 0, random_tokens(kept))

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(pair[1], 0, random_tokens(more, seed=1), stop)
    assert pair[1].cache.length(0) == kept
    window = TokenTree(tuple(random_tokens(9)))
    assert same(*(verify(runner, {0: window}) for runner in pair))
    assert same(*(prefill(runner, 0, random_tokens(400, seed=2)) for runner in pair))
    assert same(*(verify(runner, {0: window}) for runner in pair))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_bits_on_the_gpu(name: str) -> None:
    """In bf16, with weights and keys on their way at once."""
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    device = assemble(name, **gpu)
    host = assemble(name, host_kv=HostKV(buffers=3, resident_layers=(2,)), buffers=2, resident=(1,), **gpu)
    pair = (device.runner, host.runner)
    for runner in pair:
        prefill(runner, 0, random_tokens(700))
        prefill(runner, 1, random_tokens(300, seed=1))
    for step in range(12):
        windows = [TokenTree(tuple(random_tokens(count, seed=step))) for count in (1 + 3 * step, 40 - 3 * step)]
        assert same(*(verify(runner, dict(enumerate(windows))) for runner in pair))
        for runner in pair:
            runner.cache.commit(0, 1 + 3 * step)
            runner.cache.commit(1, 30 - 2 * step)
    parents = (-1, 0, 0, 1, 1, 2, 4, 6, 7)
    assert same(*(verify(runner, {0: TokenTree(tuple(random_tokens(9)), parents)}) for runner in pair))
    for runner in pair:
        runner.cache.truncate(0, 400)
        prefill(runner, 0, random_tokens(200, seed=3))
    assert same(*(verify(runner, {0: TokenTree((1, 2, 3))}) for runner in pair))
    device.close()
    host.close()
