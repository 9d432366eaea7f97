"""Attention problems for kernel tests: caches with NaN where nothing may be read, pieces, rings, trees, chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from offload_runtime_kernels.attention import AttentionParams, QueryRows, attention_reference
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from tests.helpers.kernel_conditions import KERNEL_DEVICE, random_tensor

# A tree of nine nodes: two roots, a bushy and a deep branch, listed so that no path is a contiguous run.
TREE_PARENTS = (-1, -1, 0, 1, 0, 2, 5, 3, 6)


def int32(values: object) -> torch.Tensor:
    """A nested list as an int32 tensor on the kernel device."""
    return torch.tensor(values, dtype=torch.int32, device=KERNEL_DEVICE)


@dataclass(frozen=True)
class AttentionCase:
    """`q` [B, T, H, D]; `kv` of B_cache sequences, all blocks there."""

    q: torch.Tensor
    kv: KVBlocks
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    def params(self, window: int | None = None) -> AttentionParams:
        """A scale sharper than D^-0.5, so that single keys matter and a wrongly masked one is seen."""
        return AttentionParams(2.0 * self.q.shape[-1] ** -0.5, window, self.soft_cap, self.sinks)

    def capped_with_sinks(self) -> AttentionCase:
        """The same where large logits are cut by more than half, and sinks weigh as much as a few large logits do."""
        sinks = random_tensor(self.q.shape[2], seed=9, dtype=self.q.dtype).to(self.q.device)
        return replace(self, soft_cap=3.0, sinks=3 + sinks)

    @property
    def largest_value(self) -> float:
        """Of all cached values, in magnitude."""
        return float(self.kv.data[:, :, 1].abs().max())

    @classmethod
    def random(
        cls, *, batch: int, num_queries: int, num_kv_heads: int, group: int, head_dim: int, capacity: int,
        cache_batch: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
    ) -> AttentionCase:  # fmt: skip
        """Gaussian queries and caches of at least `capacity` tokens."""
        q = random_tensor(batch, num_queries, num_kv_heads * group, head_dim, seed=seed, dtype=dtype)
        blocks = -(-capacity // BLOCK_TOKENS)
        shape = (cache_batch or batch, blocks, 2, num_kv_heads, BLOCK_TOKENS, head_dim)
        return cls(q, KVBlocks(random_tensor(*shape, seed=seed + 1, dtype=dtype)))

    def poisoned(self, rows: QueryRows) -> AttentionCase:
        """The same with NaN in every slot from `max_length` on that is no tree's and in every sequence not named."""
        length = self.kv.num_blocks * BLOCK_TOKENS
        clean = torch.zeros(self.kv.data.shape[0], length, dtype=torch.bool, device=KERNEL_DEVICE)
        for b, slot in enumerate(rows.slots.tolist()):
            clean[slot, : rows.max_length] = True
            if rows.ancestors is not None:
                clean[slot, rows.ancestors[b].flatten().long()] = True
        spread = clean.view(-1, self.kv.num_blocks, 1, 1, BLOCK_TOKENS, 1)
        return replace(self, kv=KVBlocks(self.kv.data.masked_fill(~spread, float("nan"))))

    def expected(self, rows: QueryRows, window: int | None = None) -> torch.Tensor:
        """The reference in fp64: [B, T, H, D]."""
        kv = KVBlocks(self.kv.data.double())
        return attention_reference(self.q.double(), kv, rows, self.params(window))

    def queries(self, queries: slice) -> AttentionCase:
        """The same cache before some of the queries only."""
        return replace(self, q=self.q[:, queries].contiguous())


def piece(kv: KVBlocks, blocks: range) -> KVBlocks:
    """Only `blocks` of a whole cache, in memory of their own."""
    return KVBlocks(kv.data[:, blocks.start : blocks.stop].contiguous(), blocks.start)


def ring(kv: KVBlocks, blocks: range, num_blocks: int) -> KVBlocks:
    """`blocks` of a whole cache in a ring of `num_blocks`; NaN in the places that are left."""
    data = kv.data.new_full((kv.data.shape[0], num_blocks, *kv.data.shape[2:]), float("nan"))
    for block in blocks:
        data[:, block % num_blocks] = kv.data[:, block]
    return KVBlocks(data)


def chain_rows(
    starts: Sequence[int], counts: Sequence[int], *, slots: Sequence[int] | None = None, max_length: int = 0
) -> QueryRows:
    """Windows of `counts[b]` tokens from position `starts[b]` on, padded to the longest with position -1."""
    width = max(counts)
    positions = [
        [start + index if index < count else -1 for index in range(width)]
        for start, count in zip(starts, counts, strict=True)
    ]
    longest = max(max(row) for row in positions) + 1
    return QueryRows(int32(positions), int32(list(slots or range(len(starts)))), max(longest, max_length))


def tree_path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def tree_rows(
    parents: Sequence[int], committed: Sequence[int], *, position_order: Sequence[int] | None = None,
    slots: Sequence[int] | None = None, order: Sequence[int] | None = None,
) -> QueryRows:  # fmt: skip
    """The same tree behind every sequence.

    Args:
        parents: Of each node, -1 for roots.
        committed: Tokens before the tree, per sequence.
        position_order: Node i lies in slot committed + position_order[i]; by default in order.
        sequences: Batch rows of the cache.
        order: Which node each query is; by default node t is query t.
    """
    position_order = position_order or range(len(parents))
    paths = [tree_path(parents, node) for node in (order or range(len(parents)))]
    depth = max(len(path) for path in paths)
    ancestors = [
        [[c + position_order[n] for n in path] + [0] * (depth - len(path)) for path in paths] for c in committed
    ]
    positions = [[c + len(path) - 1 for path in paths] for c in committed]
    return QueryRows(
        int32(positions), int32(list(slots or range(len(committed)))), max(map(max, positions)) + 1,
        committed=int32(list(committed)), ancestors=int32(ancestors),
    )  # fmt: skip


def chain_of_path(case: AttentionCase, path: Sequence[int], committed: int, buffers: Sequence[int]) -> AttentionCase:
    """The one-sequence case in which the nodes of `path`, lying in `slots`, are a plain sequence."""
    index = torch.tensor(list(path), device=KERNEL_DEVICE)
    source = torch.tensor(list(buffers), device=KERNEL_DEVICE)
    target = torch.arange(committed, committed + len(path), device=KERNEL_DEVICE)
    data = case.kv.data[:1].clone()
    for side, moved in enumerate(case.kv.at(torch.zeros_like(source), source)):
        data[0, target // BLOCK_TOKENS, side, :, target % BLOCK_TOKENS] = moved
    return AttentionCase(case.q[:1, index].contiguous(), KVBlocks(data))
