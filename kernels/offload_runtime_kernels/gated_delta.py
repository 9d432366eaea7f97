"""The gated delta rule (arXiv 2412.06464) in chunks of 64 tokens at absolute positions: rolling back is a length.

    S <- e^g (S - beta k (k^T S)) + beta k v^T,   o = S^T q                                   token by token, in theory

A sequence has a state S at the beginning of a chunk, and of every token since then a row: its key k, its value v, its
decay G, the sum of g from the chunk's beginning to it, and a row t of the inverse of its chunk's triangular equation.
With j over the tokens of the chunk before i, or up to i for r, on i's own path where rows are a tree, and e_i the unit
vector of i:

    t_i = beta_i e_i - sum_j beta_i e^{G_i - G_j} (k_j . k_i) t_j
    r_i = sum_j e^{G_i - G_j} (k_j . q_i) t_j                       the result in terms of values
    o_i = sum_j r_ij v_j + (e^{G_i} q_i - sum_j r_ij e^{G_j} k_j)^T S
    u_i = sum_j t_ij v_j - (sum_j t_ij e^{G_j} k_j)^T S             of a full chunk, and the state behind it:
    S' = e^{G_63} S + sum_j e^{G_63 - G_j} k_j u_j^T

In the words of flash-linear-attention: `inverses` are rows of (I + A)^-1 diag(beta), `decays` the cumulative sums of g,
what is `solved` of a chunk its w and u, and states that are `passed` its h.

Most of the work knows nothing of the state. Sums over j of t, r and o are chains of fp32 multiply-adds in the order
of positions, to which rows of no concern add exact zeros. Sums over channels, and those of a full chunk, have the same
terms in any company: tensor cores add them, over three TF32 parts, in an order that is one for every tile. So a row's
bits depend on its path and its positions alone: prompts, however they are cut, windows and trees have the same, and
committed tokens leave nothing behind but rows. Trees may branch within a chunk; over a chunk's end leads one path. In
front of it all stands a short convolution over the inputs of a row and the few before it on its path, which are kept
with the rows for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from offload_runtime_kernels.gated_delta_triton import CHUNK_TOKENS, NORM_EPS, gated_delta_triton


class DeltaShape(NamedTuple):
    """Heads of keys (and queries) and of values, a multiple of them; the channels of each, and the tokens that the
    convolution reads. Value heads that share a key head are neighbours, or are `tiled`: the first ones of all key heads
    come first. Betas are sigmoids times `beta_scale`: 2 lets a state change its sign."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False
    beta_scale: float = 1.0

    @property
    def channels(self) -> int:
        """Of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def for_values(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or queries [n, H_k, D_k] as value heads have them: [n, H_v, D_k]."""
        group = self.value_heads // self.key_heads
        return x.repeat(1, group, 1) if self.tiled else x.repeat_interleave(group, dim=1)


@dataclass(frozen=True)
class DeltaMemory:
    """What a layer keeps of sequences, a memory row each, and of each its newest M tokens, at their cache positions
    modulo M: a multiple of 64, and enough for the open chunk, what a pass puts behind it, and the convolution.

    `states` [R, H_v, D_k, D_v] fp32; `keys` [R, M, H_k, D_k], normalised, `values` [R, M, H_v, D_v], and `inputs`
    [R, M, C] of the convolution, in the model's dtype; `decays` [R, M, H_v] and `inverses` [R, M, H_v, 64] fp32.
    """

    states: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    inverses: torch.Tensor
    inputs: torch.Tensor

    @classmethod
    def empty(
        cls, shape: DeltaShape, rows: int, tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> DeltaMemory:
        """Return zeros, which are the state of an empty sequence."""
        make, of_row = (lambda dtype, *sizes: torch.zeros(sizes, dtype=dtype, device=device)), (rows, tokens)
        return cls(
            make(torch.float32, rows, shape.value_heads, shape.key_dim, shape.value_dim),
            make(dtype, *of_row, shape.key_heads, shape.key_dim),
            make(dtype, *of_row, shape.value_heads, shape.value_dim),
            make(torch.float32, *of_row, shape.value_heads),
            make(torch.float32, *of_row, shape.value_heads, CHUNK_TOKENS), make(dtype, *of_row, shape.channels),
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        """M."""
        return self.keys.shape[1]


@dataclass(frozen=True)
class DeltaRows:
    """Where the T rows of each of B sequences stand; tensors on the compute device, int32.

    `memory_rows` [B]: whose they are. `starts` [B]: tokens that memory has; the rows come behind them. `bases` [B]: the
    chunk at whose beginning the state stands. `counts` [B]: rows that are there, the first ones. `positions` [B, T].
    Of trees `ancestors` [B, T, A], as of `attention.QueryRows`, row t's cache position being start + t. The rows begin
    in a chunk at most `lag` behind that of the state.
    """

    memory_rows: torch.Tensor
    starts: torch.Tensor
    bases: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor | None = None
    lag: int = 0


class DeltaWeights(NamedTuple):
    """What a layer has learnt besides its projections: the convolution's taps [C, taps], the oldest token's first, and
    of each value head the logarithm of its decay's rate and what is added to its time step, [H_v]."""

    taps: torch.Tensor
    log_rates: torch.Tensor
    time_steps: torch.Tensor


# Functions of doubles are rounded alike wherever an element stands among others; those of floats are not.
def _exp(x: torch.Tensor) -> torch.Tensor:
    return x.double().exp().float()


def _convolved(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """silu of the sum over taps, of tokens [n, taps, C]."""
    total = torch.zeros_like(x[:, 0], dtype=torch.float32)
    for tap in range(taps.shape[1]):
        total += x[:, tap].float() * taps[:, tap].float()
    rounded = total.to(x.dtype).double()
    return (rounded * torch.sigmoid(rounded)).to(x.dtype)


def _normed(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Vectors of length one, times `scale`, in the dtype of x."""
    square = torch.zeros_like(x[..., 0], dtype=torch.float64)
    for channel in range(x.shape[-1]):
        square += x[..., channel].double() ** 2
    return (x.double() * (torch.rsqrt(square + NORM_EPS) * scale)[..., None]).to(x.dtype)


def _dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products of vectors [n, H, D] and [m, H, D]: [n, m, H] fp32."""
    total = a.new_zeros(a.shape[0], b.shape[0], a.shape[1], dtype=torch.float32)
    for of_a, of_b in zip(a.float()[:, None].unbind(3), b.float().unbind(2), strict=True):
        total += of_a * of_b
    return total


def _chain(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add to [n, H, D] the products of rows of [n, J, H] and matrices [J, H, D] of each head, j by j."""
    for of_a, of_b in zip(a.float()[..., None].unbind(1), b.float().unbind(0), strict=True):
        total = total + of_a * of_b
    return total


def _times_state(total: torch.Tensor, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Add S^T x of vectors [n, H_v, D_k] to [n, H_v, D_v]."""
    return _chain(total, x.transpose(1, 2), state.transpose(0, 1))


def _folded(
    state: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, decays: torch.Tensor, inverses: torch.Tensor
) -> torch.Tensor:
    """The state behind a full chunk, of keys [64, H_v, D_k], values, decays and rows of inverses [64, H_v, 64]."""
    inverses = inverses.transpose(1, 2)
    of_keys = _chain(torch.zeros_like(keys, dtype=torch.float32), inverses, _exp(decays)[:, :, None] * keys.float())
    of_values = _chain(torch.zeros_like(values, dtype=torch.float32), inverses, values)
    u = _times_state(of_values, -of_keys, state)
    faded = keys.float() * _exp(decays[-1] - decays)[:, :, None]
    decayed = _exp(decays[-1])[:, None, None] * state
    return _chain(decayed.transpose(0, 1), faded.permute(2, 0, 1), u).transpose(0, 1)


def gated_delta_reference(
    inputs: torch.Tensor, gates: torch.Tensor, weights: DeltaWeights, memory: DeltaMemory, rows: DeltaRows,
    shape: DeltaShape, *, keeps: bool,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `gated_delta`, on a CPU."""
    batch, width = rows.positions.shape
    out = inputs.new_zeros(batch, width, shape.value_heads, shape.value_dim)
    inputs, gates = (one.view(batch, width, one.shape[1]) for one in (inputs, gates))
    for b in range(batch):
        at, start, base, count = (int(one[b]) for one in (rows.memory_rows, rows.starts, rows.bases, rows.counts))
        own = [start + t for t in range(count)]
        paths = [list(range(start, position + 1)) for position in own]
        if rows.ancestors is not None:
            own = rows.positions[b, :count].tolist()
            paths = [rows.ancestors[b, t, : own[t] - start + 1].tolist() for t in range(count)]
        one = _Sequence(memory, at, start, base, own, paths)
        out[b, :count] = one.run(inputs[b, :count], gates[b, :count], weights, shape, keeps=keeps)
    return out.view(batch * width, shape.value_heads * shape.value_dim)


@dataclass(eq=False)
class _Sequence:
    """One sequence of a pass: its rows' positions, and of each the cache positions from `start` to itself."""

    memory: DeltaMemory
    at: int
    start: int
    base: int
    positions: list[int]
    paths: list[list[int]]

    def run(
        self, inputs: torch.Tensor, gates: torch.Tensor, weights: DeltaWeights, shape: DeltaShape, *, keeps: bool
    ) -> torch.Tensor:  # fmt: skip
        memory, at, start, size = self.memory, self.at, self.start, self.memory.num_tokens
        count, (beta_logits, alpha) = len(inputs), gates.chunk(2, dim=1)

        def of_path(t: int, position: int, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            if position < start:
                return kept[at, position % size] if position >= 0 else torch.zeros_like(new[0])
            return new[self.paths[t][position - start] - start]

        taps = range(1 - shape.taps, 1)
        stacked = [
            torch.stack([of_path(t, p + tap, memory.inputs, inputs) for tap in taps])
            for t, p in enumerate(self.positions)
        ]
        mixed = _convolved(torch.stack(stacked), weights.taps) if count else inputs
        of_keys = shape.key_heads, shape.key_dim
        of_heads = of_keys, of_keys, (shape.value_heads, shape.value_dim)
        parts = mixed.split([heads * dim for heads, dim in of_heads], dim=1)
        q, k, v = (part.view(count, *sizes) for part, sizes in zip(parts, of_heads, strict=True))
        q, k = _normed(q, shape.key_dim**-0.5), _normed(k)
        beta = torch.sigmoid(beta_logits.double()).to(inputs.dtype).float() * shape.beta_scale
        rates = -_exp(weights.log_rates.float())
        steps = F.softplus((alpha.float() + weights.time_steps.float()).double()).float()
        gains, decays = rates * steps, torch.zeros(count, shape.value_heads)
        for t, position in enumerate(self.positions):
            before = of_path(t, position - 1, memory.decays, decays)
            decays[t] = gains[t] if position % CHUNK_TOKENS == 0 else before + gains[t]
        inverses, out = torch.zeros(count, shape.value_heads, CHUNK_TOKENS), torch.zeros_like(v)
        state, last = memory.states[at], max(self.positions, default=start - 1) + 1
        for first in range(self.base * CHUNK_TOKENS, last, CHUNK_TOKENS):
            chunk = range(first, first + CHUNK_TOKENS)
            here = [t for t, position in enumerate(self.positions) if position in chunk]
            old = [position % size for position in chunk if position < start]
            if here:
                own_q, own_k, old_k = (shape.for_values(one) for one in (q[here], k[here], memory.keys[at, old]))
                kept = old_k, memory.values[at, old], memory.decays[at, old], memory.inverses[at, old]
                inverses[here], out[here] = self._chunk(
                    state, own_q, own_k, v[here], beta[here], decays[here], here, kept
                )
            leads_on = [t for t, position in enumerate(self.positions) if position >= chunk.stop]
            if leads_on or (keeps and chunk.stop <= last):
                path = leads_on[0] if leads_on else count - 1
                keys, *rest = (
                    torch.stack([of_path(path, position, kept, new) for position in chunk])
                    for kept, new in (
                        (memory.keys, k), (memory.values, v), (memory.decays, decays), (memory.inverses, inverses),
                    )
                )  # fmt: skip
                state = _folded(state, shape.for_values(keys), *rest)
        if keeps:
            memory.states[at] = state
        for t in range(max(0, count - size), count):
            row = (start + t) % size
            memory.keys[at, row], memory.values[at, row], memory.decays[at, row] = k[t], v[t], decays[t]
            memory.inverses[at, row], memory.inputs[at, row] = inverses[t], inputs[t]
        return out

    def _chunk(
        self, state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor,
        decays: torch.Tensor, here: list[int],
        kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Rows of inverses [n, H_v, 64] and results [n, H_v, D_v] of rows in one chunk, of which memory has the keys,
        values, decays and rows of inverses of `kept`."""
        old_keys, old_values, old_decays, old_inverses = kept
        offsets = torch.tensor([self.positions[t] % CHUNK_TOKENS for t in here])
        inverses = torch.zeros(len(here), q.shape[1], CHUNK_TOKENS)
        inverses.scatter_(2, offsets[:, None, None].expand(-1, q.shape[1], 1), beta[:, :, None])
        reads, faded = torch.zeros_like(inverses), _exp(decays[:, None] - old_decays[None])
        inverses = _chain(inverses, -(beta[:, None] * faded * _dots(k, old_keys)), old_inverses)
        reads = _chain(reads, faded * _dots(q, old_keys), old_inverses)
        paths = [set(self.paths[i]) for i in here]
        on_path = torch.tensor([[self.start + j in path for j in here] for path in paths])[:, :, None]
        none = torch.zeros(())
        faded = _exp((decays[:, None] - decays[None]).where(on_path, none))
        below = on_path & ~torch.eye(len(here), dtype=torch.bool)[:, :, None]
        subtracted = (beta[:, None] * faded * _dots(k, k)).where(below, none)
        for j in range(len(here)):
            inverses = inverses - subtracted[:, j, :, None] * inverses[j]
        reads = _chain(reads, (faded * _dots(q, k)).where(on_path, none), inverses)
        old, keys = reads[:, :, : len(old_keys)].transpose(1, 2), _exp(decays)[:, :, None] * k.float()
        new = reads[:, :, offsets].transpose(1, 2).where(on_path, none)
        asked = _chain(_exp(decays)[:, :, None] * q.float(), -old, _exp(old_decays)[:, :, None] * old_keys.float())
        out = _chain(_chain(torch.zeros_like(v, dtype=torch.float32), old, old_values), new, v)
        return inverses, _times_state(out, _chain(asked, -new, keys), state).to(v.dtype)


def gated_delta(
    inputs: torch.Tensor, gates: torch.Tensor, weights: DeltaWeights, memory: DeltaMemory, rows: DeltaRows,
    shape: DeltaShape, *, keeps: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Run the rows of a pass through a layer, and keep what they leave behind in its memory.

    Args:
        inputs: [B * T, C]: what the convolution reads, of queries, keys and values.
        gates: [B * T, 2 H_v]: the logits of beta, and the time steps of the decay.
        weights: Of the layer.
        memory: Of the layer.
        rows: Which they are. Where they are no tree they may be more than memory has room for, of which it keeps the
            newest.
        shape: Of the layer.
        keeps: The rows are committed, and no tree: the state goes on to the beginning of their last chunk, or where
            that is full to its end.

    Returns:
        [B * T, H_v * D_v] in the dtype of the inputs; rows that are not there are undefined.
    """
    if inputs.is_cuda:
        return gated_delta_triton(inputs, gates, weights, memory, rows, shape, keeps=keeps)
    return gated_delta_reference(inputs, gates, weights, memory, rows, shape, keeps=keeps)


def fold(memory: DeltaMemory, rows: DeltaRows, shape: DeltaShape) -> None:
    """Bring states on to the end of their chunk, up to which memory has tokens: `rows` has none of its own."""
    make = memory.inputs.new_empty
    weights = DeltaWeights(make(shape.channels, shape.taps), make(shape.value_heads), make(shape.value_heads))
    no_rows = make(0, shape.channels), make(0, 2 * shape.value_heads)
    gated_delta(*no_rows, weights, memory, rows, shape, keeps=True)
