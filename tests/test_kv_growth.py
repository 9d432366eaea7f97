"""Host memory of a KV cache is made and page-locked while the first layers of a prompt are worked on already."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offload_runtime.errors import BudgetError
from offload_runtime.kv import HostKVCache
from offload_runtime.model import Window
from tests.helpers.assembly import Assembled, HostKV
from tests.helpers.engine import one_thread, raising  # noqa: F401 (an autouse fixture)
from tests.helpers.kv_runners import assemble, same
from tests.helpers.models import random_tokens
from tests.helpers.page_locking import LimitedRegistrar

NO_LIMIT = 1 << 40
PROMPT, MORE = random_tokens(600), random_tokens(900, seed=1)
WINDOW = Window(tuple(random_tokens(9, seed=2)))


class SlowRegistrar(LimitedRegistrar):
    """Locks nothing from its call number `held_call` on before it is told to."""

    def __init__(self, held_call: int, refuse_calls: tuple[int, ...] = ()) -> None:
        super().__init__(NO_LIMIT, refuse_calls=refuse_calls)
        self._held_call, self.may_go_on = held_call, threading.Event()

    def register(self, address: int, nbytes: int) -> int:
        assert self.num_calls < self._held_call or self.may_go_on.wait(30)
        return super().register(address, nbytes)


def expected() -> list[torch.Tensor]:
    made = assemble("llama-gqa")
    found = [made.runner.prefill(0, PROMPT), made.runner.verify([WINDOW], [0]).clone()]
    found += [made.runner.prefill(0, MORE), made.runner.verify([WINDOW], [0])]
    made.close()
    return found


@pytest.mark.slow
def test_layers_are_computed_while_memory_of_others_is_locked() -> None:
    registrar = SlowRegistrar(held_call=2)
    made, done = assemble("llama-gqa", host_kv=HostKV(registrar=registrar)), list[tuple[int, int]]()

    def on_layer(layers: int, _: int) -> None:
        done.append((layers, registrar.num_calls))
        if layers == 2:
            registrar.may_go_on.set()

    found = [made.runner.prefill(0, PROMPT, on_layer)]
    assert done[1] == (2, 2) and done[-1] == (4, 4), "two layers were done when only their memory was locked"
    found += [made.runner.verify([WINDOW], [0]).clone(), made.runner.prefill(0, MORE)]
    found.append(made.runner.verify([WINDOW], [0]))
    assert all(map(same, found, expected()))
    assert made.runner.cache.pinned_bytes == registrar.locked_bytes > 0
    made.close()
    assert not registrar.locked and not any(one.name.startswith("kv-growth") for one in threading.enumerate())


@pytest.mark.few(1)
@pytest.mark.parametrize("refused", [4, 6, 7])
def test_memory_that_is_refused_in_the_middle_of_a_prompt_costs_nothing_else(refused: int) -> None:
    """Calls 0 to 3 lock what the first prompt takes, one a layer."""
    registrar = LimitedRegistrar(NO_LIMIT, refuse_calls=(refused,))
    made, want = assemble("llama-gqa", host_kv=HostKV(registrar=registrar)), expected()
    runner = made.runner
    assert same(runner.prefill(0, PROMPT), want[0])
    locked_bytes = registrar.locked_bytes
    with pytest.raises(BudgetError, match=r"could not grow by .*: shorten the prompt or close other programs"):
        runner.prefill(0, MORE)
    assert runner.cache.length(0) == len(PROMPT)
    assert same(runner.verify([WINDOW], [0]), want[1])
    assert registrar.locked_bytes == locked_bytes, "what the refused prompt had locked is given back"
    assert same(runner.prefill(0, MORE), want[2]) and same(runner.verify([WINDOW], [0]), want[3])
    made.close()
    assert not registrar.locked


def test_an_interrupted_prompt_leaves_memory_that_the_next_one_uses() -> None:
    registrar = SlowRegistrar(held_call=1)
    made, want = assemble("llama-gqa", host_kv=HostKV(registrar=registrar)), expected()

    def stop(layers: int, _: int) -> None:
        registrar.may_go_on.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.runner.prefill(0, PROMPT, stop)
    assert same(made.runner.prefill(0, PROMPT), want[0])
    assert registrar.num_calls == 4
    made.close()
    assert not registrar.locked


def interrupted(*, refused: tuple[int, ...] = ()) -> tuple[Assembled, SlowRegistrar]:
    """A runner whose prompt was given up behind its first layer, while the memory of the second is waited for."""
    registrar = SlowRegistrar(held_call=1, refuse_calls=refused)
    made = assemble("llama-gqa", host_kv=HostKV(registrar=registrar))
    with pytest.raises(KeyboardInterrupt):
        made.runner.prefill(0, PROMPT, raising(KeyboardInterrupt(), after=0, then=print))
    return made, registrar


@pytest.mark.slow
def test_memory_that_an_interrupted_prompt_was_refused_is_nothing_to_a_shorter_one() -> None:
    made, registrar = interrupted(refused=(2,))
    cache, want = made.runner.cache, expected()
    assert isinstance(cache, HostKVCache)
    tables = [cache.block_table(layer) for layer in range(4)]
    made.runner.prefill(0, PROMPT[:9], lambda layers, _: registrar.may_go_on.set() if layers == 4 else None)
    made.runner.verify([WINDOW], [0])
    assert not registrar.locked, "what was locked for the longer prompt is given back"
    cache.truncate(0, 0)
    assert same(made.runner.prefill(0, PROMPT), want[0]) and same(made.runner.verify([WINDOW], [0]), want[1])
    for layer, table in enumerate(tables):
        places = {block: memory.data_ptr() for block, memory in table.blocks[0].items()}
        blocks = {block: cache.blocks.memory(layer, 0, range(block, block + 1)).data_ptr() for block in range(2)}
        assert blocks.items() <= places.items(), "tables know where blocks are"
    made.close()
    assert not registrar.locked


@pytest.mark.slow
def test_an_interruption_before_all_layers_are_asked_for_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, want = assemble("llama-gqa", host_kv=HostKV()), expected()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        submit = raising(KeyboardInterrupt(), after=2, then=ThreadPoolExecutor.submit)
        patch.setattr(ThreadPoolExecutor, "submit", lambda *args: submit(*args))
        made.runner.cache.begin_prefill(0, len(PROMPT))
    assert same(made.runner.prefill(0, PROMPT), want[0])
    made.close()


def test_closing_waits_for_no_more_than_one_layer() -> None:
    made, registrar = interrupted()
    threading.Timer(0.5, registrar.may_go_on.set).start()
    made.close()
    assert registrar.num_calls == 2 and not registrar.locked
