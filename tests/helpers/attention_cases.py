"""Attention problems for kernel tests: caches with NaN where nothing may be read, windows, trees and their chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from offload_runtime_kernels.attention import QueryRows, attention_reference

from tests.helpers.kernel_conditions import KERNEL_DEVICE, random_tensor

# A tree of nine nodes: two roots, a bushy and a deep branch, listed so that no path is a contiguous run.
TREE_PARENTS = (-1, -1, 0, 1, 0, 2, 5, 3, 6)


def int32(values: object) -> torch.Tensor:
    """A nested list as an int32 tensor on the kernel device."""
    return torch.tensor(values, dtype=torch.int32, device=KERNEL_DEVICE)


@dataclass(frozen=True)
class AttentionCase:
    """`q` [B, T, H, D]; `k_cache`, `v_cache` [B_cache, S, H_kv, D]."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    @property
    def scale(self) -> float:
        """Sharper than D^-0.5, so that single keys matter and a wrongly masked one is seen."""
        return 2.0 * self.q.shape[-1] ** -0.5

    @classmethod
    def random(
        cls, *, batch: int, num_queries: int, num_kv_heads: int, group: int, head_dim: int, capacity: int,
        cache_batch: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
    ) -> AttentionCase:  # fmt: skip
        """Gaussian queries and caches."""
        q = random_tensor(batch, num_queries, num_kv_heads * group, head_dim, seed=seed, dtype=dtype)
        shape = (cache_batch or batch, capacity, num_kv_heads, head_dim)
        k = random_tensor(*shape, seed=seed + 1, dtype=dtype)
        v = random_tensor(*shape, seed=seed + 2, dtype=dtype)
        return cls(q, k, v)

    def poisoned(self, rows: QueryRows) -> AttentionCase:
        """The same with NaN in every slot from `max_length` on and in every sequence that the rows do not name."""
        k, v = self.k_cache.clone(), self.v_cache.clone()
        named = set(rows.sequences.tolist())
        for cache in (k, v):
            cache[:, rows.max_length :] = float("nan")
            for sequence in set(range(cache.shape[0])) - named:
                cache[sequence] = float("nan")
        return AttentionCase(self.q, k, v)

    def expected(self, rows: QueryRows, sliding_window: int | None = None) -> torch.Tensor:
        """The reference in fp64: [B, T, H, D]."""
        return attention_reference(
            self.q.double(), self.k_cache.double(), self.v_cache.double(), rows, scale=self.scale,
            sliding_window=sliding_window,
        )  # fmt: skip


def chain_rows(
    starts: Sequence[int], counts: Sequence[int], *, sequences: Sequence[int] | None = None, max_length: int = 0
) -> QueryRows:
    """Windows of `counts[b]` tokens from position `starts[b]` on, padded to the longest with position -1."""
    width = max(counts)
    positions = [
        [start + index if index < count else -1 for index in range(width)]
        for start, count in zip(starts, counts, strict=True)
    ]
    longest = max(max(row) for row in positions) + 1
    return QueryRows(int32(positions), int32(list(sequences or range(len(starts)))), max(longest, max_length))


def tree_path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def tree_rows(
    parents: Sequence[int], committed: Sequence[int], *, slot_order: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None, order: Sequence[int] | None = None,
) -> QueryRows:  # fmt: skip
    """The same tree behind every sequence.

    Args:
        parents: Of each node, -1 for roots.
        committed: Tokens before the tree, per sequence.
        slot_order: Node i lies in slot committed + slot_order[i]; by default in order.
        sequences: Batch rows of the cache.
        order: Which node each query is; by default node t is query t.
    """
    slot_order = slot_order or range(len(parents))
    paths = [tree_path(parents, node) for node in (order or range(len(parents)))]
    depth = max(len(path) for path in paths)
    ancestors = [[[c + slot_order[n] for n in path] + [0] * (depth - len(path)) for path in paths] for c in committed]
    positions = [[c + len(path) - 1 for path in paths] for c in committed]
    return QueryRows(
        int32(positions), int32(list(sequences or range(len(committed)))), max(map(max, positions)) + 1,
        committed=int32(list(committed)), ancestors=int32(ancestors), min_committed=min(committed),
    )  # fmt: skip


def chain_of_path(case: AttentionCase, path: Sequence[int], committed: int, slots: Sequence[int]) -> AttentionCase:
    """The one-sequence case in which the nodes of `path`, lying in `slots`, are a plain sequence."""
    index = torch.tensor(list(path), device=KERNEL_DEVICE)
    source = torch.tensor(list(slots), device=KERNEL_DEVICE)
    k, v = case.k_cache[:1].clone(), case.v_cache[:1].clone()
    k[:, committed : committed + len(path)] = case.k_cache[:1, source]
    v[:, committed : committed + len(path)] = case.v_cache[:1, source]
    return AttentionCase(case.q[:1, index].contiguous(), k, v)
