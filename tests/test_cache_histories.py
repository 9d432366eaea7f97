"""Any history of growing, proposing, verifying and rolling back leaves in a cache what a plain list says it holds."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.cache.device import StreamingDraftCache, block_bytes, kept_positions
from offload_runtime.cache.host import HostKVCache
from offload_runtime.cache.host_io import HostKVCard
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.stream.device import DeviceBudget
from offload_runtime.stream.queue import ThreadCopyEngine
from tests.helpers.reordering import before_each_copy

CPU = torch.device("cpu")
LAYERS, HEADS, BATCH, CAPACITY = 2, 2, 2, 800
SHAPE = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": HEADS, "vocab_size": 50, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIG = model_config_from_json(SHAPE, "the smallest model")
# The second layer has heads of its own.
CONFIG = replace(CONFIG, layers=(CONFIG.layers[0], replace(CONFIG.layers[1], attention=replace(
    CONFIG.layers[1].attention, num_heads=6, num_kv_heads=3, head_dim=8))))  # fmt: skip
BLOCK_BYTES = [block_bytes(CONFIG, torch.float32, layer) for layer in range(LAYERS)]


class Marks:
    """Keys and values that tell which token they are of: every token gets a number that none had before."""

    def __init__(self) -> None:
        self._newest = 0

    def new(self, count: int) -> list[int]:
        self._newest += count
        return list(range(self._newest - count + 1, self._newest + 1))


def put(data: torch.Tensor, layer: int, buffers: Sequence[int], marks: Sequence[int]) -> None:
    """Write keys and values of tokens to slots of one sequence's blocks [N, 2, H_kv, 256, D]; values are negative."""
    place, mark = torch.tensor(buffers, dtype=torch.int64), torch.tensor(marks, dtype=data.dtype)
    sides = torch.stack((mark, -mark), 1)[:, :, None, None] + layer / 8
    data[place // BLOCK_TOKENS % len(data), :, :, place % BLOCK_TOKENS] = sides.expand(-1, -1, *data.shape[2::2])


def held(data: torch.Tensor, layer: int, count: int) -> list[int]:
    """The tokens of the first `count` positions of one sequence's blocks, after every number of each was looked at."""
    flat = data.transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, :count] - layer / 8  # [2, H_kv, S, D]
    marks = flat[0, 0, :, 0].clone()
    assert torch.equal(flat, torch.stack((marks, -marks))[:, None, :, None].expand_as(flat).contiguous())
    return [int(mark) for mark in marks]


class PlayedOnHost:
    """A cache in host memory that grows by windows, and the tokens that its one sequence should hold."""

    WINDOW = 150

    def __init__(self, engine: ThreadCopyEngine | None = None) -> None:
        self.engine = engine or ThreadCopyEngine()
        self.cache = HostKVCache(
            CONFIG, torch.float32, capacity_tokens=4 * CAPACITY, batch=1, window_tokens=self.WINDOW,
            cards=[HostKVCard(DeviceBudget(CPU, None), self.engine, max(BLOCK_BYTES))],
        )  # fmt: skip
        self.expected: list[int] = []
        self._marks = Marks()

    def _ring(self, layer: int, block: int) -> torch.Tensor:
        """Where the ring has a block, or would have it: [1, 2, H_kv, 256, D]."""
        data = self.cache.store(layer).data[0]
        return data[block % data.shape[0]][None]

    def window(self, count: int, accepted: int) -> None:
        """A window of `count` tokens, the first `accepted` of which stay."""
        self.cache.begin_window([0], [count])
        first = self.cache.length(0)
        marks = self._marks.new(count)
        for layer in range(LAYERS):
            for position, mark in enumerate(marks, first):
                block = position // BLOCK_TOKENS
                put(self._ring(layer, block), layer, [position % BLOCK_TOKENS], [mark])
        self.cache.commit(0, accepted)
        self.expected += marks[:accepted]

    def grow(self, length: int) -> None:
        """Windows that are accepted in full, up to a length."""
        while (missing := length - len(self.expected)) > 0:
            self.window(min(missing, self.WINDOW), min(missing, self.WINDOW))

    def cut(self, length: int) -> None:
        self.cache.truncate(0, length)
        del self.expected[length:]

    def check(self, *, on_host: int) -> None:
        """A pass that streams the first `on_host` blocks finds these there, and everything else in the ring."""
        assert self.cache.length(0) == len(self.expected)
        for block in range(-(-len(self.expected) // BLOCK_TOKENS)):
            own = self.expected[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            for layer in range(LAYERS):
                ring = self._ring(layer, block)
                host = self.cache.blocks.memory(layer, 0, range(block, block + 1)) if block < on_host else None
                there = ring.view(-1).view(torch.uint8) if host is None else host
                assert held(there.view(torch.float32).view(ring.shape), layer, len(own)) == own

    def check_all(self) -> None:
        """What may be streamed now, and the least that a pass must stream."""
        self.cache.begin_window([0], [1])  # as a pass does
        snapshot = self.cache.snapshot()
        assert self.cache.is_valid(snapshot)
        self.check(on_host=snapshot.blocks[0])
        least = next(n for n in range(99) if self.cache.is_valid(replace(snapshot, blocks=(n,))))
        self.check(on_host=least)


@pytest.fixture
def on_host() -> Iterator[PlayedOnHost]:
    played = PlayedOnHost()
    yield played
    played.cache.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("kept", [1500, 1030, 700, 256, 255, 5])
def test_a_cut_behind_what_the_ring_holds(on_host: PlayedOnHost, kept: int) -> None:
    on_host.grow(1700)
    on_host.engine.drain()
    on_host.check_all()
    on_host.cut(kept)
    on_host.check_all()
    on_host.grow(kept + 400)
    on_host.check_all()


def test_a_block_that_is_written_anew_is_not_taken_for_there() -> None:
    """Its write is late, and what is on the host is still what was cut."""
    gate = threading.Event()
    gate.set()

    def wait() -> None:
        assert gate.wait(30)

    played = PlayedOnHost(ThreadCopyEngine(pace=before_each_copy(wait)))
    played.grow(1000)
    played.engine.drain()
    played.check_all()
    gate.clear()
    played.cut(700)
    played.grow(800)
    played.check_all()
    gate.set()
    played.engine.drain()
    played.check_all()
    played.cache.close()


@settings(max_examples=20, deadline=None)
@given(
    sinks=st.integers(1, BLOCK_TOKENS),
    recent=st.integers(2, 200),
    steps=st.lists(st.tuples(st.sampled_from(["grow", "cut", "jump"]), st.integers(0, 300)), max_size=20),
)
@example(sinks=4, recent=2, steps=[("grow", 300)] * 3)  # blocks are let go of
def test_any_history_of_a_window_over_a_text(sinks: int, recent: int, steps: list[tuple[str, int]]) -> None:
    """Sinks and recent tokens stand where `kept_positions` says, at indices without a gap."""
    cache = StreamingDraftCache(
        CONFIG, torch.float32, sink_tokens=sinks, recent_tokens=recent, window_tokens=16, batch=BATCH,
        budgets=[DeviceBudget(CPU, None)],
    )  # fmt: skip
    text, marks, begun = list[int](), Marks(), 0

    def write(positions: Sequence[int]) -> None:
        cache.begin_prefill(1, len(positions))
        first = cache.length(1)
        for layer in range(LAYERS):
            put(cache.store(layer).data[0], layer, range(first, first + len(positions)), [text[p] for p in positions])
        cache.commit(1, len(positions))

    for action, amount in steps:
        if action == "cut":  # as far as it need not begin anew
            lowest = 0 if not cache.starts[1] else cache.starts[1] + sinks + recent
            del text[max(lowest, len(text) - amount) :]
            cache.truncate(1, min(cache.length(1), len(text) - cache.starts[1]))
            if cache.start_for(len(text)) != cache.starts[1]:
                continue
        elif action == "jump" or len(text) + 1 - cache.starts[1] > cache.capacity_tokens:
            text += marks.new(amount)
            begun = cache.start_for(len(text))
            cache.reset(1, begun)
            write(kept_positions(len(text), cache.starts[1], sinks))
        else:
            for _ in range(amount):
                text += marks.new(1)
                if (start := cache.start_for(len(text))) > cache.starts[1]:
                    cache.move(1, start)
                    cache.begin_window([1], [0])
                    for layer in range(LAYERS):  # the sinks are computed anew
                        put(cache.store(layer).data[1], layer, range(sinks), text[:sinks])
                write([len(text) - 1])
        kept = kept_positions(len(text), cache.starts[1], sinks)
        assert cache.length(1) == len(kept) <= cache.capacity_tokens
        assert cache.starts[1] == 0 or len(kept) - sinks >= recent
        assert cache.rope_shifts[1] == cache.starts[1] - begun, "keys are rotated as far as when it began"
        for layer in range(LAYERS):
            cache.begin_window((), ())
            assert held(cache.store(layer).data[1], layer, len(kept)) == [text[position] for position in kept]
        assert cache.length(0) == 0
