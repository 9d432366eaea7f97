"""`gather_chunks`: after every update the cache holds what a gather from scratch would, and only new chunks moved."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from offload_runtime_kernels import gather_chunks as ops
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.stream.arena import HostArena
from tests.helpers.kernel_conditions import KERNEL_DEVICE, poisoned_outputs, random_tensor

NUM_BLOCKS = 3
RUNS = [pytest.param(ops.gather_chunks_reference, id="reference"), pytest.param(ops.gather_chunks_triton, id="triton")]


@dataclass
class Setup:
    """Sequences of three blocks, and a cache of K places: a layer of `layers`, all of which are NaN."""

    full: torch.Tensor  # [B, NUM_BLOCKS, 2, H_kv, 256, D]
    source: ops.BlockTable
    layers: torch.Tensor  # [B, 2, N, 2, H_kv, 256, D], of which `data` is the first
    resident: torch.Tensor  # [B, H_kv, K] int32
    chunk_size: int

    @property
    def data(self) -> KVBlocks:
        """The cache."""
        return KVBlocks(self.layers[:, 0])


def _setup(
    *, batch: int = 2, num_kv_heads: int = 2, head_dim: int = 16, chunk_size: int = 8, places: int = 40,
    dtype: torch.dtype = torch.float32,
) -> Setup:  # fmt: skip
    full = random_tensor(batch, NUM_BLOCKS, 2, num_kv_heads, BLOCK_TOKENS, head_dim, seed=1, dtype=dtype)
    source = ops.BlockTable.empty(batch, NUM_BLOCKS + 1, KERNEL_DEVICE)
    for sequence in range(batch):
        source.put(sequence, 0, full[sequence, :2])  # a run,
        source.put(sequence, 2, full[sequence, 2:])  # and a single block
    blocks = -(-places * chunk_size // BLOCK_TOKENS)
    # Layers side by side, so that neither sequences nor blocks of one of them are next to each other.
    layers = torch.full((batch, 2, blocks, 2, num_kv_heads, BLOCK_TOKENS, head_dim), float("nan"), dtype=dtype)
    resident = torch.full((batch, num_kv_heads, places), -1, dtype=torch.int32, device=KERNEL_DEVICE)
    return Setup(full, source, layers.to(KERNEL_DEVICE), resident, chunk_size)


def _selection(setup: Setup, count: list[int], draw: random.Random, *, keep: float) -> torch.Tensor:
    """Random chunks for every head, `count[b]` of them, of which a share `keep` are resident already if there are."""
    batch, num_kv_heads, places = setup.resident.shape
    chunks = NUM_BLOCKS * BLOCK_TOKENS // setup.chunk_size
    rows = []
    for b in range(batch):
        for h in range(num_kv_heads):
            old = [chunk for chunk in setup.resident[b, h].tolist() if chunk >= 0]
            kept = draw.sample(old, min(len(old), int(keep * count[b])))
            others = [chunk for chunk in range(chunks) if chunk not in old]
            kept += draw.sample(others, min(len(others), count[b] - len(kept)))
            kept += draw.sample([chunk for chunk in old if chunk not in kept], count[b] - len(kept))
            rows.append(sorted(kept) + [-1] * (places - count[b]))
    selected = torch.tensor(rows, dtype=torch.int32, device=KERNEL_DEVICE)
    return selected.view(batch, num_kv_heads, places)


def _place(data: torch.Tensor, h: int, first_token: int, chunk_size: int) -> torch.Tensor:
    """[2, chunk_size, D] of one sequence's blocks [N, 2, H_kv, 256, D]"""
    tokens = slice(first_token % BLOCK_TOKENS, first_token % BLOCK_TOKENS + chunk_size)
    return data[first_token // BLOCK_TOKENS, :, h, tokens]


def _update_and_check(setup: Setup, selected: torch.Tensor, run: Callable[..., torch.Tensor]) -> None:
    size, batch, num_kv_heads = setup.chunk_size, *setup.resident.shape[:2]
    before = setup.resident.clone()
    # Places that hold a chunk which stays are marked: whoever fetches it again wipes the mark out.
    for b, h, place in (before >= 0).nonzero().tolist():
        _place(setup.data.data[b], h, place * size, size)[:, 0, 0] = 77.0
    with poisoned_outputs():
        moved = run(selected, setup.resident, setup.source, setup.data, chunk_size=size)
    for b in range(batch):
        for h in range(num_kv_heads):
            old, new, want = before[b, h].tolist(), setup.resident[b, h].tolist(), selected[b, h].tolist()
            count = sum(chunk >= 0 for chunk in want)
            assert sorted(new[:count]) == want[:count] and set(new[count:]) <= {-1}
            fetched = 0
            for place, chunk in enumerate(new[:count]):
                expected = _place(setup.full[b], h, chunk * size, size).clone()
                if old[place] == chunk:
                    expected[:, 0, 0] = 77.0
                else:
                    fetched += 1
                actual = _place(setup.data.data[b], h, place * size, size)
                assert torch.equal(actual, expected)
                actual.copy_(_place(setup.full[b], h, chunk * size, size))  # the mark off again
            assert int(moved[b, h]) == fetched
            needed = set(want[:count]) - set(old[:count])
            assert fetched == len(needed), "a chunk was fetched that was there"


def _run_updates(setup: Setup, run: Callable[..., torch.Tensor], counts: list[list[int]]) -> None:
    draw = random.Random(5)
    for count in counts:
        for keep in (0.8, 1.0, 0.0):
            _update_and_check(setup, _selection(setup, count, draw, keep=keep), run)


@pytest.mark.few(2)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("chunk_size", "places"), [(8, 40), (2, 33), (64, 4)])
def test_repeated_updates(chunk_size: int, places: int, run: Callable[..., torch.Tensor]) -> None:
    _run_updates(_setup(chunk_size=chunk_size, places=places), run, [[places, places]] * 2)


def _to_pinned_blocks(setup: Setup) -> list[HostArena]:
    """Move every block but the last of each sequence into page-locked memory of its own."""
    arenas = []
    for sequence in range(setup.full.shape[0]):
        blocks = setup.full[sequence, :2]
        arenas.append(HostArena(blocks.numel() * blocks.element_size(), name="test blocks"))
        arenas[-1].pin()
        host = arenas[-1].buffer[: blocks.numel() * blocks.element_size()].view(blocks.dtype).view(blocks.shape)
        host.copy_(blocks)
        setup.source.put(sequence, 0, host)
    return arenas


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reads_page_locked_host_memory(dtype: torch.dtype) -> None:
    shapes = ((3, 64, 8, 64), (2, 80, 2, 100), (1, 96, 64, 5), (4, 128, 8, 64))
    for num_kv_heads, head_dim, chunk_size, places in shapes:
        setup = _setup(num_kv_heads=num_kv_heads, head_dim=head_dim, chunk_size=chunk_size, places=places, dtype=dtype)
        arenas = _to_pinned_blocks(setup)
        _run_updates(setup, ops.gather_chunks, [[places, 1], [places, places]])
        for arena in arenas:
            arena.close()


@pytest.mark.gpu
def test_many_places_in_a_graph() -> None:
    setup = _setup(batch=1, num_kv_heads=4, head_dim=128, chunk_size=2, places=300, dtype=torch.bfloat16)
    arenas = _to_pinned_blocks(setup)
    _update_and_check(setup, _selection(setup, [300], random.Random(2), keep=0.0), ops.gather_chunks)
    selected = _selection(setup, [300], random.Random(3), keep=0.9)
    resident_before = setup.resident.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gather_chunks(selected, setup.resident, setup.source, setup.data, chunk_size=2)
    assert torch.equal(setup.resident, resident_before)
    _update_and_check(setup, selected, lambda *_, **__: _replay(graph, selected, resident_before))
    for arena in arenas:
        arena.close()


def _replay(graph: torch.cuda.CUDAGraph, selected: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Run the captured update; how many chunks had to move is counted from the lists."""
    graph.replay()
    return (~(selected[..., :, None] == before[..., None, :]).any(-1)).sum(-1)
