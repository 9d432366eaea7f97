"""Copies of matrices in 4 bits, which draft for them: groups of 64 columns that share a scale and a centre.

    copy = bf16( (q - 7.5) * s + c )

with s and c in bf16, a form of `scaled_rows`, whose decoding and products are a copy's. Scales and centres have the
least squared error, weighted by the mean squares of what columns are multiplied with where these are known: copies of
SmolLM2 weighted so say 84 and 90 % of its tokens (prose and code), those from a group's least value to its largest 73
and 83 %. (q - 7.5) * s is exact in fp32, and pairs are chosen so that its sum with c is, too: a multiply-add, also in
bf16, and a multiplication with an addition give the same bits, on every device.
"""

import torch
from torch.nn import functional

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.scaled_rows import MIDDLE, ScaledFormat, ScaledRows, pack_numbers

GROUP = 64
COPY = ScaledFormat("uint4", 1, GROUP, torch.bfloat16, centres=True)
# Of a group's range; what lies outside is clipped. Least squares make up for what is between two of them.
CLIPPED_TO = (1.0, 0.9, 0.8, 0.7)
LARGEST = 2.0**125  # that a copy has; a sum of 2^126 and its half step is still finite
_LEAST_WEIGHT = 1e-6  # of the mean one; zeros would leave numbers free
# Where 4 + 8 bits of products and 8 of centres no longer fit into the 24 of a sum; a copy misses neither.
_LEAST_CENTRE, _LEAST_SCALE = 2.0**-10, 2.0**-13
_ELEMENTS = 1 << 17  # that are fitted together by torch, in the cache
_PROGRAM_GROUPS = 16  # of a row


def _numbers(x: torch.Tensor, middle: float, scales: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """The nearest numbers, in fp32; 0 where a scale is zero."""
    steps = (x - centres.float()) / scales.float()
    return steps.add_(middle).round_().nan_to_num_(0.0).clamp_(0.0, 2 * middle)


def _in_bf16(scales: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs as they are kept: with neither where the other makes it too small to be seen."""
    scales, centres = scales.bfloat16(), centres.bfloat16()
    sizes, distances = scales.float(), centres.float().abs()
    return (
        torch.where(sizes < distances * _LEAST_SCALE, 0.0, scales),
        torch.where(distances < sizes * _LEAST_CENTRE, 0.0, centres),
    )


def _least_squares(
    x: torch.Tensor, numbers: torch.Tensor, middle: float, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and centres with the least weighted squared error: [..., 1] each. NaN of a group whose numbers are all
    the same."""
    a = numbers - middle
    weighted = a * weights
    squares, products = (weighted * a).sum(-1, keepdim=True), (weighted * x).sum(-1, keepdim=True)
    total, numbers_sum = weights.sum(-1, keepdim=True), weighted.sum(-1, keepdim=True)
    x_sum = (weights * x).sum(-1, keepdim=True)
    scales = (total * products - numbers_sum * x_sum) / (total * squares - numbers_sum.square())
    return scales, (x_sum - scales * numbers_sum) / total


def _fit_inside(x: torch.Tensor, middle: float, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and centres of groups within [-1, 1]: clipped in turn, each refined by least squares."""
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    half, centre = (high - low) / 2, (high + low) / 2
    best = _in_bf16(half / middle, centre)

    def error(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = _numbers(x, middle, *pair)
        wrong = (numbers - middle).mul_(pair[0].float()).add_(pair[1].float()).sub_(x)
        return numbers, wrong.square_().mul_(weights).sum(-1, keepdim=True)

    _, least = error(best)
    for clip in CLIPPED_TO:
        tried = _in_bf16(half * (clip / middle), centre)
        for _ in range(2):
            numbers, found = error(tried)
            # NaN is not less than anything: a group that cannot be refined stays as it is.
            better = (found < least) & (tried[0] > 0)
            least = torch.where(better, found, least)
            best = torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1])
            tried = _in_bf16(*_least_squares(x, numbers, middle, weights))
    return best


def fit(
    values: torch.Tensor, weights: torch.Tensor, middle: float = MIDDLE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers uint8, scales and centres in bf16 of groups.

    Args:
        values: [R, groups, columns of a group] of any float dtype; infinities and NaN count as zeros.
        weights: [groups, columns of a group] fp32, positive.
        middle: Half the largest number.

    Returns:
        [R, groups, columns of a group], and twice [R, groups, 1].
    """
    x = values.float().nan_to_num(0.0, 0.0, 0.0).clamp_(-LARGEST, LARGEST)
    largest = x.abs().amax(-1, keepdim=True)
    inside = torch.where(largest > 0, x / largest, 0.0)  # squares of small weights would be zeros
    scales, centres = _fit_inside(inside, middle, weights)
    scales, centres = _in_bf16(scales.float() * largest, centres.float() * largest)
    return _numbers(x, middle, scales, centres).to(torch.uint8), scales, centres


def relative_weights(importance: torch.Tensor) -> torch.Tensor:
    """Importances of columns, fp32 [K], as far as sums of products stay within fp32, and none of them zero."""
    return (importance.float() / importance.float().mean()).clamp_min(_LEAST_WEIGHT)


def quantise_reference(values: torch.Tensor, out: ScaledRows, weights: torch.Tensor) -> None:
    """Make a copy with torch's operations, a piece at a time; arguments as of `quantise_triton`."""
    columns = values.shape[1]
    missing = -columns % GROUP
    # What fills up the last group has the value of its last column, and no weight.
    weights = functional.pad(weights, (0, missing)).view(-1, GROUP)
    step = max(1, _ELEMENTS // columns)
    for start in range(0, len(values), step):
        some = slice(start, start + step)
        padded = functional.pad(values[some], (0, missing), "replicate").unflatten(1, (-1, GROUP))
        numbers, scales, centres = fit(padded, weights)
        numbers = numbers.flatten(1)
        pairs = (numbers[:, 0::2] | numbers[:, 1::2] << 4)[:, : COPY.file_bytes(columns)]
        pack_numbers(pairs.contiguous(), COPY, out.numbers[some])
        out.scales[some].copy_(scales.squeeze(2))
        out.zeros[some].view(COPY.scale).copy_(centres.squeeze(2))


# --- the kernel: a program fits groups of a row, [G, 64]; what is one of a group is [G, 1]


@jit
def _in_bf16_of(scales, centres):
    """Return what `_in_bf16` does, in fp32; of NaN anything."""
    bits = scales.to(tl.uint32, bitcast=True)
    sizes = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).to(tl.float32, bitcast=True)
    bits = centres.to(tl.uint32, bitcast=True)
    centres = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).to(tl.float32, bitcast=True)
    distances = tl.abs(centres)
    scales = tl.where(sizes < distances * 0.0001220703125, 0.0, sizes)
    return scales, tl.where(distances < sizes * 0.0009765625, 0.0, centres)


@jit
def _numbers_of(x, scales, centres):
    """Return the nearest numbers, in fp32."""
    steps = (x - centres) / scales + 7.5
    steps = tl.where(steps == steps, steps, 0.0)
    return tl.floor(tl.minimum(tl.maximum(steps, 0.0), 15.0) + 0.5)


@jit
def _sum_of(x):
    return tl.sum(x, 1)[:, None]


@jit
def _fitted(x, weights):
    """Return what `_fit_inside` does."""
    high, low = tl.max(x, 1)[:, None], tl.min(x, 1)[:, None]
    half, centre = (high - low) / 2, (high + low) / 2
    total, x_sum = _sum_of(weights), _sum_of(weights * x)
    best, best_centre = _in_bf16_of(half / 7.5, centre)
    wrong = (_numbers_of(x, best, best_centre) - 7.5) * best + best_centre - x
    least = _sum_of(wrong * wrong * weights)
    for clip in tl.static_range(4):
        tried, tried_centre = _in_bf16_of(half * ((1.0 - 0.1 * clip) / 7.5), centre)
        for refined in tl.static_range(2):
            a = _numbers_of(x, tried, tried_centre) - 7.5
            wrong = a * tried + tried_centre - x
            found = _sum_of(wrong * wrong * weights)
            better = (found < least) & (tried > 0)
            least = tl.where(better, found, least)
            best, best_centre = tl.where(better, tried, best), tl.where(better, tried_centre, best_centre)
            if refined == 0:
                weighted = a * weights
                numbers_sum = _sum_of(weighted)
                slope = (total * _sum_of(weighted * x) - numbers_sum * x_sum) / (
                    total * _sum_of(weighted * a) - numbers_sum * numbers_sum
                )
                tried, tried_centre = _in_bf16_of(slope, (x_sum - slope * numbers_sum) / total)
    return best, best_centre


@jit
def _quantise_kernel(
    values_ptr, weights_ptr, numbers_ptr, scales_ptr, centres_ptr, columns, number_words, row_scales, G: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group, column = tl.program_id(1) * G + tl.arange(0, G)[:, None], tl.arange(0, 64)[None, :]
    k = group * 64 + column
    # What fills up a group has the value of the last column, and no weight.
    x = tl.load(values_ptr + row * columns + tl.minimum(k, columns - 1)).to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    x = tl.minimum(tl.maximum(x, -4.253529586511731e37), 4.253529586511731e37)
    weights = tl.load(weights_ptr + k, mask=k < columns, other=0.0)
    largest = tl.max(tl.abs(x), 1)[:, None]
    scales, centres = _fitted(tl.where(largest > 0, x / largest, 0.0), weights)
    scales, centres = _in_bf16_of(scales * largest, centres * largest)
    real, at = group * 64 < columns, row * row_scales + group
    tl.store(scales_ptr + at, (scales.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16), mask=real)
    tl.store(centres_ptr + at, (centres.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16), mask=real)
    # Units as `pack_numbers` makes them: a word has every fourth pair of 32 columns.
    numbers = _numbers_of(x, scales, centres).to(tl.int32) << (column // 8 % 4 * 4 + column % 2 * 16)
    words = tl.reshape(tl.sum(tl.sum(tl.reshape(numbers, [G, 2, 4, 4, 2]), 4), 2), [G, 8])
    i = tl.arange(0, 8)[None, :]
    at = group // 2 * 16 + group % 2 * 2 + i // 4 + i % 4 * 4
    tl.store(numbers_ptr + row * number_words + at, words, mask=at < number_words)


def quantise_triton(values: torch.Tensor, out: ScaledRows, weights: torch.Tensor) -> None:
    """Make a copy, as near as that of `quantise_reference`, by a kernel.

    Args:
        values: As of `quantise`.
        out: Likewise; what lies between rows of scales is zero.
        weights: fp32 [K], positive.
    """
    require_triton("copies of weights")
    height, columns = values.shape
    words = out.numbers.shape[1] // 4
    with torch.cuda.device_of(values):
        _quantise_kernel[(height, triton.cdiv(words // 8, _PROGRAM_GROUPS))](
            values, weights, out.numbers.view(torch.int32), out.scales.view(torch.uint16), out.zeros.view(torch.uint16),
            columns, words, out.scales.stride(0), G=_PROGRAM_GROUPS,
        )  # fmt: skip


def quantise(values: torch.Tensor, out: ScaledRows, importance: torch.Tensor | None = None) -> None:
    """Make a copy of a matrix, enqueued on the current stream.

    Args:
        values: [M, K] of any float dtype, contiguous; the last group is shorter where 64 does not divide K. Of
            infinities and NaN the copy has zeros.
        out: What a copy [M, K] is stored in, of the form `COPY`, on the same device; written.
        importance: [K]: squares of what columns are multiplied with, added up or their means; None: all alike.
    """
    assert values.is_contiguous()
    columns, device = values.shape[1], values.device
    weights = torch.ones(columns, device=device) if importance is None else relative_weights(importance.to(device))
    for rows in (out.scales, out.zeros):  # with what lies between them
        rows.as_strided((len(rows), rows.stride(0)), rows.stride()).zero_()
    (quantise_triton if values.is_cuda else quantise_reference)(values, out, weights)
