"""Logits to tokens: the last step of every pass, of draft and target alike, as a pure function.

    token = argmax over allowed v of  logits[v] / T + gumbel(seed, noise_id, position, v)          (T = 0: plain argmax)

The noise and the argmax live in `offload_runtime_kernels.gumbel_argmax`. What they depend on besides the logits belongs
to the request that holds a row's slot: `SlotSampling`. Here are the filters that say which tokens are
allowed: top-k, then top-p, then min-p, after the temperature, in transformers' order. Floating sums depend on their
order and therefore on the device, so the filters weigh tokens by integers: floor(exp(scaled - max) * 2^40), with an
exponential of IEEE-exact operations and sums in int64. The CPU and the GPU then allow the same tokens, always.

Everything here is enqueued on the current stream, nothing synchronises with the host, and no shape depends on data, so
that a draft step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from offload_runtime_kernels import gumbel_argmax as noise_ops
from torch import Tensor

from offload_runtime.config import SamplingParams
from offload_runtime.memory import overwrite

# A weight of 2^40 for the most likely token resolves probabilities of 1e-12, and 2^22 such tokens still fit an int64.
_WEIGHT_BITS = 40
_MAX_VOCAB_SIZE = 1 << 22
# Ways to sample of which each runs kernels of its own.
DIFFERENT_WAYS = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))
# Rows that are filtered together when a token is chosen for each.
MOST_FILTERED_ROWS = 32
_LEAST_PART_ROWS = 2
# Below exp(-30) a weight is less than 2^-3, that is 0.
_LOWEST_EXPONENT = -30.0
_LOG2_E = 1.4426950216293335
# log(2) = hi + lo; hi has 10 bits, so the product with a small integer is exact.
_LN2_HI = 0.693359375
_LN2_LO = -0.00021219444170128554
# Minimax fit of (exp(r) - 1 - r) / r^2 on |r| <= log(2) / 2, error 3e-9 of exp(r), rounded to fp32.
_EXP_Q = (0.5, 0.1666651964187622, 0.04166620597243309, 0.008368886075913906, 0.0013950448483228683)


def _weights(scaled: Tensor, maximum: Tensor) -> Tensor:
    """floor(exp(scaled - maximum) * 2^40): scaled [R, N] fp32, maximum [R, 1] fp32 -> [R, N] int64.

    A row with NaN or an infinite maximum gets the weights 0 and 2^40 only: what a NaN becomes as an integer differs
    between devices.
    """
    difference = torch.where(scaled < maximum, scaled - maximum, 0.0).clamp_min_(_LOWEST_EXPONENT)
    exponent = (difference * _LOG2_E).round_()
    r = difference.sub_(exponent * _LN2_HI).sub_(exponent * _LN2_LO)
    q = r * _EXP_Q[-1]
    for coefficient in _EXP_Q[-2:0:-1]:
        q.add_(coefficient).mul_(r)
    value = q.add_(_EXP_Q[0]).mul_(r).mul_(r).add_(r).add_(1.0)
    # 2^(exponent + 40) made from its bits, a power of two whose product is exact.
    power = exponent.to(torch.int32).add_(127 + _WEIGHT_BITS).bitwise_left_shift_(23).view(torch.float32)
    return value.mul_(power).to(torch.int64)


def _smallest_allowed(scaled: Tensor, maximum: Tensor, params: SamplingParams) -> Tensor:
    """Threshold of top-k, then top-p: scaled [R, V] fp32, maximum [R, 1] fp32 -> [R, 1] fp32, ties with it included."""
    vocab_size = scaled.shape[1]
    kept = min(params.top_k or vocab_size, vocab_size)
    ordered = scaled.topk(kept, dim=1).values if kept < vocab_size else scaled.sort(dim=1, descending=True).values
    if params.top_p == 1:
        return ordered[:, -1:]
    # Ties with the k-th largest are part of the total too, and are not all in `ordered`.
    total = _weights(scaled, maximum).mul_(scaled >= ordered[:, -1:]).sum(dim=1, keepdim=True)
    # One fp64 product, correctly rounded wherever it is computed; rounding up must not ask for more than there is.
    required = total.double().mul_(params.top_p).ceil_().to(torch.int64).minimum(total)
    before_cutoff = _weights(ordered, maximum).cumsum(dim=1) < required
    cutoff = before_cutoff.sum(dim=1, keepdim=True).clamp_max_(kept - 1)
    return ordered.gather(1, cutoff)


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Set to -inf what top-k, top-p and min-p exclude; bit for bit the same on the CPU and on CUDA.

    logits: [R, V] fp32, -inf for tokens excluded already. At a threshold all ties are kept, and always one token.
    Returns [R, V] fp32: the logits as they were (not scaled) where allowed. A row with NaN is returned unchanged.
    """
    assert logits.ndim == 2 and logits.dtype == torch.float32, f"logits: [R, V] fp32, not {logits.dtype}"
    assert logits.shape[1] <= _MAX_VOCAB_SIZE, f"a vocabulary of {logits.shape[1]} overflows the integer sums"
    if not params.filtered:
        return logits
    scaled = logits * noise_ops.inverse_temperature(params.temperature)
    maximum = scaled.amax(dim=1, keepdim=True)
    excluded = torch.zeros_like(scaled, dtype=torch.bool)
    if params.top_k or params.top_p < 1:
        excluded |= scaled < _smallest_allowed(scaled, maximum, params)
    if params.min_p > 0:
        excluded |= _weights(scaled, maximum) < math.ceil(params.min_p * 2**_WEIGHT_BITS)
    return logits.masked_fill(excluded.logical_and_(~maximum.isnan()), -torch.inf)


def _filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """`filter_logits` of any floating dtype, a few rows at a time: weights in int64 and a sort take up to 37 bytes a
    logit, where 24 are planned for."""
    rows = min(max(_LEAST_PART_ROWS, len(logits) // 4), MOST_FILTERED_ROWS)
    allowed = torch.empty_like(logits, dtype=torch.float32)
    for part, filtered in zip(logits.split(rows), allowed.split(rows), strict=True):
        filtered.copy_(filter_logits(part.float(), params))
    return allowed


class SlotSampling:
    """How the tokens of every slot are chosen: a slot is a batch row of the caches, held by one request at a time.

    Temperature, seed and noise id lie in a device tensor that never moves, so that CUDA graphs may hold it; only
    `filters` decides which kernels run.

    Args:
        num_slots: How many there are; each is greedy until it is assigned.
        device: Where the logits are.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.keys = noise_ops.noise_keys([(0.0, 0, 0)] * num_slots).to(device)  # [S, 4] int32
        self._kind = torch.zeros(num_slots, dtype=torch.int32, device=device)  # [S]: index into `filters`
        self._kinds: dict[int, SamplingParams] = {}  # of the slots that are held, how they filter
        self.filters: tuple[SamplingParams, ...] = ()

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SlotSampling:
        """Slots 0, 1, … that choose their tokens these ways."""
        slots = cls(len(params), device)
        for slot, one in enumerate(params):
            slots.assign(slot, one)
        return slots

    def assign(self, slot: int, params: SamplingParams) -> None:
        """From here on a slot chooses its tokens this way; the others go on as before. Enqueued on the current stream.

        `filters` then holds the different filters of the slots that are held, each with its temperature: what a
        captured graph depends on. It is empty where no token is ever excluded.
        """
        assert slot < len(self.keys), f"slot {slot} of {len(self.keys)}"
        keys = noise_ops.noise_keys([(params.temperature, params.seed, params.noise_id)])
        overwrite(self.keys[slot : slot + 1], keys)
        self._kinds[slot] = params.without_noise if params.filtered else SamplingParams()
        self._number_filters()

    def release(self, slot: int) -> None:
        """Nobody holds a slot any more, if anybody did: its filters are not run for the others."""
        if self._kinds.pop(slot, None) is not None:
            self._number_filters()

    def _number_filters(self) -> None:
        """Tell the device which of the filters is whose, where there are several."""
        kinds = dict(sorted(self._kinds.items()))
        self.filters = tuple(dict.fromkeys(kinds.values())) if any(one.filtered for one in kinds.values()) else ()
        if len(self.filters) > 1:
            numbers = [self.filters.index(kinds[slot]) if slot in kinds else 0 for slot in range(len(self._kind))]
            overwrite(self._kind, torch.tensor(numbers, dtype=torch.int32))

    def allowed(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Logits [R, V] with -inf where the filters of the row's slot exclude a token (slots: [R])."""
        if not self.filters:
            return logits
        if len(self.filters) == 1:
            return _filtered(logits, self.filters[0])
        kinds, allowed = self._kind[slots.long()][:, None], logits.float()
        for number, params in enumerate(self.filters):
            if params.filtered:
                allowed = torch.where(kinds == number, _filtered(logits, params), allowed)
        return allowed


def sample(logits: Tensor, sampling: SlotSampling, positions: Tensor, slots: Tensor) -> Tensor:
    """Choose one token a row.

    logits: [R, V] bf16, fp16 or fp32, contiguous rows. positions: [R] int32/int64, the absolute position of the token
    being chosen (not of the token that was fed). slots: [R] int32/int64, whose request the row is of. One device.
    Returns [R] int64: the tokens, lowest index first among equals; -1 for a row with NaN or without any token above
    -inf, from which the caller raises `NumericalError` when it reads the tokens anyway.
    """
    if sampling.filters and len(logits) > MOST_FILTERED_ROWS:
        parts = zip(*(tensor.split(MOST_FILTERED_ROWS) for tensor in (logits, positions, slots)), strict=True)
        return torch.cat([sample(rows, sampling, *whose) for rows, *whose in parts])
    return noise_ops.gumbel_argmax(sampling.allowed(logits, slots), positions, slots, sampling.keys)


def perturbed_logits(logits: Tensor, sampling: SlotSampling, positions: Tensor, slots: Tensor) -> Tensor:
    """Allowed logits / T + gumbel, of which `sample` takes the argmax and a tree its top-k children.

    Arguments as `sample`. Returns [R, V] fp32, -inf where not allowed; the logits themselves at temperature 0.
    """
    return noise_ops.gumbel_perturb(sampling.allowed(logits, slots), positions, slots, sampling.keys)
