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

from offload_runtime_kernels.scaled_rows import MIDDLE, ScaledFormat, ScaledRows, pack_numbers

GROUP = 64
COPY = ScaledFormat("uint4", 1, GROUP, torch.bfloat16, centres=True)
# Of a group's range; what lies outside is clipped. Least squares make up for what is between two of them.
CLIPPED_TO = (1.0, 0.9, 0.8, 0.7)
LARGEST = 2.0**125  # that a copy has; a sum of 2^126 and its half step is still finite
_LEAST_WEIGHT = 1e-6  # of the mean one; zeros would leave numbers free
# Where 4 + 8 bits of products and 8 of centres no longer fit into the 24 of a sum; a copy misses neither.
_LEAST_CENTRE, _LEAST_SCALE = 2.0**-10, 2.0**-13
_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}  # that are fitted together, in the cache


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


def quantise(values: torch.Tensor, out: ScaledRows, importance: torch.Tensor | None = None) -> None:
    """Make a copy of a matrix with torch's operations, a piece at a time, enqueued on the current stream.

    Args:
        values: [M, K] of any float dtype; the last group is shorter where 64 does not divide K. Of infinities and NaN
            the copy has zeros.
        out: What a copy [M, K] is stored in, of the form `COPY`, on the same device; written.
        importance: [K]: mean squares of what columns are multiplied with; None: all alike.
    """
    columns, device = values.shape[1], values.device
    missing = -columns % GROUP
    weights = torch.ones(columns, device=device) if importance is None else relative_weights(importance.to(device))
    # What fills up the last group has the value of its last column, and no weight.
    weights = functional.pad(weights, (0, missing)).view(-1, GROUP)
    for rows in (out.scales, out.zeros):  # with what lies between them
        rows.as_strided((len(rows), rows.stride(0)), rows.stride()).zero_()
    step = max(1, _ELEMENTS[device.type] // columns)
    for start in range(0, len(values), step):
        some = slice(start, start + step)
        padded = functional.pad(values[some], (0, missing), "replicate").unflatten(1, (-1, GROUP))
        numbers, scales, centres = fit(padded, weights)
        numbers = numbers.flatten(1)
        pairs = (numbers[:, 0::2] | numbers[:, 1::2] << 4)[:, : COPY.file_bytes(columns)]
        pack_numbers(pairs.contiguous(), COPY, out.numbers[some])
        out.scales[some].copy_(scales.squeeze(2))
        out.zeros[some].view(COPY.scale).copy_(centres.squeeze(2))
