"""What the calls of attention pass around: which keys a query sees, where they lie, how far its softmax has got."""

from dataclasses import dataclass

import torch

from offload_runtime_kernels.kv_blocks import KVBlocks

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class QueryRows:
    """Which keys each query sees. Tensors on the compute device.

    `positions` [B, T] int32: the query's absolute position, negative for padding (its output is zero).
    `slots` [B] int32: each sequence's row of the cache. `max_length`: at least the largest position + 1.
    For a tree: `committed` [B] int32, tokens in the cache at their own positions, and `ancestors` [B, T, A] int32:
    where in the cache the key of the query's ancestor at position committed + i lies (itself included). Without a tree
    every key lies at its position.
    `used` [B] int32: how many of each sequence's rows count where whole sequences may be padding; None for all. None of
    them are more than `most_used`; None for any number.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    max_length: int
    committed: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    used: torch.Tensor | None = None
    most_used: int | None = None


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """What the attention of one layer has of its own.

    `scale` multiplies the dot products, usually D ** -0.5. `window`: tokens that a query sees, itself included; None
    for all. `soft_cap`: a logit becomes soft_cap * tanh(logit / soft_cap) before it is masked; None leaves it. `sinks`
    [H], on the compute device: of each query head a logit that takes part in the softmax and has no value.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def log2_scales(self) -> tuple[float, float | None]:
        """What kernels multiply by. Without a soft cap the first makes dot products logits in log2 units; with one the
        second makes them the exponent of `soft_capped`, and the first multiplies what comes of that."""
        if self.soft_cap is None:
            return self.scale * LOG2_E, None
        return self.soft_cap * LOG2_E, 2 * self.scale / self.soft_cap * LOG2_E


@dataclass(frozen=True)
class KeySource:
    """One of several places that hold keys of the same queries.

    `kv`: where they lie, in the queries' slots. `blocks`: absolute numbers of consecutive 256-token blocks in it that
    count; nothing is read of the others. `num_keys`: positions from here on hold no key; None for no such limit.
    `bounds` [B, 2] int32, contiguous, on the device: of each query's sequence the first of its blocks, from which
    `blocks` is then counted, and its own `num_keys`. None: the same for all.
    """

    kv: KVBlocks
    blocks: range
    num_keys: int | None = None
    bounds: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.blocks.step == 1 and self.blocks.start >= (self.kv.first_block if self.bounds is None else 0)
        assert self.bounds is None or (self.num_keys is None and self.bounds.is_contiguous())


@dataclass(frozen=True)
class AttentionState:
    """An online softmax on its way, in log2 units: what has been seen of the keys so far.

    `best` [B, T, H] fp32, the largest score, on a CPU the largest log-sum-exp of a split (-inf: no key seen yet);
    `total` [B, T, H] fp32, the sum of weights relative to `best`; `acc` [B, T, H, D] fp32, the weighted sum of values,
    not yet divided by `total`.
    Where `best` is -inf the other two mean nothing and are never read.
    """

    best: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor

    @classmethod
    def empty(cls, q: torch.Tensor) -> "AttentionState":
        """Of queries [B, T, H, D] that have not seen any key."""
        # One small fill and no more: this is enqueued for every layer of every pass.
        best = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
        return cls(best, torch.empty_like(best), torch.empty(q.shape, dtype=torch.float32, device=q.device))

    def __getitem__(self, batch_rows: slice) -> "AttentionState":
        """The state of some batch rows: views, so what is merged into them is merged into this."""
        return AttentionState(self.best[batch_rows], self.total[batch_rows], self.acc[batch_rows])
