"""`compact_rows`: rows of a path land on their positions, whole, in every layer, and nothing else changes."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_runtime_kernels.compact_rows import compact_rows_reference, compact_rows_triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from tests.helpers.kernel_conditions import KERNEL_DEVICE, random_tensor

Compact = Callable[[KVBlocks, torch.Tensor, int], None]
compacts = pytest.mark.parametrize("compact", [compact_rows_reference, compact_rows_triton])


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=KERNEL_DEVICE)


def _memory(num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of two sequences, of which one is worked on: [L, 2, N, 2, H_kv, 256, D]."""
    return random_tensor(num_layers, 2, num_blocks, 2, num_kv_heads, BLOCK_TOKENS, head_dim, seed=1, dtype=dtype)


def _expected(memory: torch.Tensor, sources: Sequence[int], first: int, first_block: int = 0) -> torch.Tensor:
    """Row by row, out of a copy."""
    out = memory.clone()
    num_blocks = memory.shape[2]
    for offset, source in enumerate(sources):
        target = first + offset
        to, of = ((place // BLOCK_TOKENS - first_block) % num_blocks for place in (target, source))
        out[:, 1, to, :, :, target % BLOCK_TOKENS] = memory[:, 1, of, :, :, source % BLOCK_TOKENS]
    return out


def _check(
    compact: Compact, sources: Sequence[int], first: int, *, num_blocks: int, first_block: int = 0, head_dim: int = 16,
    num_kv_heads: int = 2, num_layers: int = 3, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    memory = _memory(num_layers, num_blocks, num_kv_heads, head_dim, dtype)
    expected = _expected(memory, sources, first, first_block)
    compact(KVBlocks(memory[:, 1], first_block), _ints(sources), first)
    assert torch.equal(memory, expected)
    assert torch.equal(memory[:, 0], expected[:, 0])


# More rows than a program has in flight; targets that are sources of the move before, and of the one long before.
PATHS = {
    "one": ([9], 4),
    "every second": (list(range(6, 90, 2)), 5),
    "all by one": (list(range(8, 80)), 7),
    "all by many": (list(range(100, 170)), 7),
    "mostly where they belong": ([11, 13, 14, 15, 40], 11),
}


@pytest.mark.few(4)
@compacts
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(16, 2), (80, 1), (128, 3)])
def test_a_path_lands_where_it_belongs(compact: Compact, name: str, head_dim: int, num_kv_heads: int) -> None:
    sources, first = PATHS[name]
    _check(compact, sources, first, num_blocks=1, head_dim=head_dim, num_kv_heads=num_kv_heads)


@compacts
def test_blocks_pieces_and_rings(compact: Compact) -> None:
    """Across the end of a block; in a piece that begins later; around a ring."""
    sources = list(range(2 * BLOCK_TOKENS - 3, 2 * BLOCK_TOKENS + 60, 3))
    first = 2 * BLOCK_TOKENS - 5
    _check(compact, sources, first, num_blocks=4)
    _check(compact, sources, first, num_blocks=3, first_block=1)
    for num_blocks in (2, 3):  # block 1 is the last of its ring of two and comes before block 0 of three
        _check(compact, sources, first, num_blocks=num_blocks)
    far = BLOCK_TOKENS * 1000
    _check(compact, [far + source for source in sources], far + first, num_blocks=3)


@compacts
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_path(compact: Compact, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 600))
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=80))
    sources, slot = [], first - 1
    for gap in gaps:
        slot += 1 + gap
        sources.append(slot)
    _check(compact, sources, first, num_blocks=slot // BLOCK_TOKENS + 1, head_dim=4, num_kv_heads=1, num_layers=2)


@compacts
def test_sources_behind_all_targets_may_come_in_any_order(compact: Compact) -> None:
    """Nodes of a tree lie where there was room for them."""
    sources = [900, 514, 901, 513, 700, *range(899, 820, -2)]
    _check(compact, sources, 250, num_blocks=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_every_thread_has_read_before_any_writes(dtype: torch.dtype, head_dim: int) -> None:
    """Long chains of targets that are sources, in many programs at once, over and over."""
    for sources, first in PATHS.values():
        for _ in range(5):
            _check(
                compact_rows_triton, sources, first, num_blocks=1, head_dim=head_dim, num_kv_heads=8, num_layers=32,
                dtype=dtype,
            )  # fmt: skip
