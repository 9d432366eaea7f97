"""Shared-noise sampling: logits to tokens, with Gumbel noise that every device computes to the same bit.

    token(row) = lowest v maximising  fl32(logits[row, v] * fl32(1 / T)) + gumbel(seed, noise_id, position[row], v)

The last step of every pass, of the draft and of the target alike. T, seed and noise_id belong to the request that holds
the row's slot and lie in device memory (`noise_keys`), so that rows of different requests share a launch and a captured
graph serves every request; T = 0 is a plain argmax. The noise is Philox4x32-10 (Salmon et al., SC'11), key = (seed low,
seed high), counter = (v // 4, position, noise_id, 0); word v % 4 of the output is token v's x, and

    w = min(fl32((x + 0.5) * 2^-32), 1 - 2^-24),    E = -log1p(-w),    gumbel = -log(E).

libm and libdevice logarithms differ in their last bits, so the logarithm here is made of IEEE-exact operations only:
add, subtract, multiply, conversions and integer arithmetic, never fused (`enable_fp_fusion=False`). The result is
within 2e-7 of float64, relative or absolute, whichever is smaller.

No `from __future__ import annotations` in this file: Triton reads the annotations of its kernels.
"""
# mypy: disable-error-code="no-untyped-def"
# (the arguments of Triton functions are the compiler's values and have no Python type)

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# Minimax fit of (log(1 + x) - x) / x^2 on [sqrt(1/2) - 1, sqrt(2) - 1], error 3e-8 of log(1 + x), rounded to fp32.
_LOG_Q = (-0.49999991059303284, 0.3333391845226288, -0.25001800060272217, 0.19963185489177704,
          -0.1656985580921173, 0.14906546473503113, -0.14308913052082062, 0.08767735213041306)  # fmt: skip
# log(2) = hi + lo; hi has 10 bits, so exponent * hi is exact. The exponent stays in place in the word, hence 2^-23.
_LN2_HI = 0.693359375 * 2.0**-23
_LN2_LO = -0.00021219444170128554 * 2.0**-23
_SQRT_HALF_BITS = 0x3F3504F3
_ONE_BITS = 0x3F800000
_EXPONENT_MASK = -(1 << 23)
_BELOW_ONE = 1.0 - 2.0**-24
# The reference makes the noise of so many counters (of four words) at a time: int64 buffers that fit a CPU's cache.
_REFERENCE_COUNTERS = 32768

_M0, _M1 = tl.constexpr(_MULTIPLIERS[0]), tl.constexpr(_MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(_WEYL[0]), tl.constexpr(_WEYL[1])
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5, _Q6, _Q7 = (tl.constexpr(q) for q in _LOG_Q)
_HI, _LO = tl.constexpr(_LN2_HI), tl.constexpr(_LN2_LO)
_SQRT_HALF, _ONE = tl.constexpr(_SQRT_HALF_BITS), tl.constexpr(_ONE_BITS)
_EXPONENT, _CLAMP = tl.constexpr(_EXPONENT_MASK), tl.constexpr(_BELOW_ONE)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


def inverse_temperature(temperature: float) -> float:
    """Round 1 / `temperature` to fp32 once, on the host, so that every device multiplies by the same number.

    At least 2^-126: a factor of zero would turn an excluded token's -inf into NaN.
    """
    assert temperature > 0, "temperature 0 is greedy and has no inverse"
    rounded: float = struct.unpack("f", struct.pack("f", 1.0 / temperature))[0]
    return max(rounded, 2.0**-126)


def noise_keys(requests: Sequence[tuple[float, int, int]]) -> Tensor:
    """What the kernels read of each slot: (temperature, seed, noise_id) of S requests -> [S, 4] int32 on the CPU.

    A row is 1 / T (the bits of an fp32, 0 for greedy), the seed's low and high word, and the noise id.
    `seed` is in [0, 2^64), `noise_id` in [0, 2^32).
    """
    rows = []
    for temperature, seed, noise_id in requests:
        assert 0 <= seed < 1 << 64, f"seed {seed} does not fit 64 bits"
        assert 0 <= noise_id < 1 << 32, f"noise id {noise_id} does not fit 32 bits"
        scale = struct.unpack("I", struct.pack("f", inverse_temperature(temperature) if temperature else 0.0))[0]
        rows.append([scale, seed & _MASK32, seed >> 32, noise_id])
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(torch.int32)  # keeps the low 32 bits


def _row_keys(keys: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """1 / T [R, 1] fp32, and the words of seed and noise id, [R, 1] int64 in [0, 2^32) each."""
    rows = keys[slots.to(torch.int64)]
    words = rows.to(torch.int64).bitwise_and_(_MASK32)
    return (rows[:, :1].contiguous().view(torch.float32), *words[:, 1:].split(1, dim=1))


def philox4x32_reference(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 in torch: four counter words and two of the key, int64 in [0, 2^32) and broadcastable -> four
    output words alike.

    int64 products wrap, but their 64 bits are those of the unsigned product; what the arithmetic shift and the unmasked
    low word leave above bit 32 is cut once, after the xors.
    """
    c0, c1, c2, c3 = counter
    rounds = torch.arange(10, device=c0.device)
    k0s, k1s = ((one[..., None] + weyl * rounds & _MASK32).unbind(-1) for one, weyl in zip(key, _WEYL, strict=True))
    for k0, k1 in zip(k0s, k1s, strict=True):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_MASK32)
        c2 = ((p0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_MASK32)
        c1, c3 = p1, p0
    return c0, c1 & _MASK32, c2, c3 & _MASK32


def _log_reference(x: Tensor, exponent_bits: Tensor) -> Tensor:
    """log((1 + x) * 2^e), x fp32 in [sqrt(1/2) - 1, sqrt(2) - 1], `exponent_bits` = e * 2^23 int32."""
    q = x * _LOG_Q[7]
    for coefficient in _LOG_Q[6:0:-1]:
        q.add_(coefficient).mul_(x)
    q.add_(_LOG_Q[0]).mul_(x).mul_(x)
    exponent = exponent_bits.to(torch.float32)
    q.add_(exponent * _LN2_LO).add_(x)
    return q.add_(exponent.mul_(_LN2_HI))


def gumbel_from_words_reference(words: Tensor) -> Tensor:
    """Turn uniform words (int64 in [0, 2^32), any shape) into Gumbel noise, fp32, same shape."""
    w = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_max_(_BELOW_ONE)
    u = 1 - w
    exponent = u.view(torch.int32).sub_(_SQRT_HALF_BITS).bitwise_and_(_EXPONENT_MASK)
    scale = (_ONE_BITS - exponent).view(torch.float32)
    # x = (1 - w) * scale - 1 written so that a tiny w is not lost in 1 - w: exactly -w where scale is 1.
    x = scale.sub(1).sub_(w.mul_(scale))
    # 0 - y, not -y: compilers write either for Triton's minus, and they differ in the sign of zero.
    e = torch.rsub(_log_reference(x, exponent), 0.0)
    bits = e.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS).bitwise_and_(_EXPONENT_MASK)
    bits.sub_(exponent)
    return torch.rsub(_log_reference(e.sub_(1), exponent), 0.0)


def gumbel_noise_reference(positions: Tensor, slots: Tensor, keys: Tensor, *, vocab_size: int) -> Tensor:
    """Noise of every token: positions, slots [R] int32/int64, keys [S, 4] -> [R, V] fp32, on their device."""
    num_rows, num_counters = positions.shape[0], -(-vocab_size // 4)
    _, *seed, noise_id = _row_keys(keys, slots)
    c1 = positions.to(torch.int64).bitwise_and(_MASK32).unsqueeze(1)
    c3 = torch.zeros((1, 1), dtype=torch.int64, device=positions.device)
    noise = torch.empty((num_rows, num_counters, 4), dtype=torch.float32, device=positions.device)
    step = max(1024, _REFERENCE_COUNTERS // max(num_rows, 1))
    for start in range(0, num_counters, step):
        stop = min(start + step, num_counters)
        c0 = torch.arange(start, stop, dtype=torch.int64, device=positions.device).unsqueeze(0)
        words = torch.stack(philox4x32_reference((c0, c1, noise_id, c3), (seed[0], seed[1])), dim=-1)
        noise[:, start:stop] = gumbel_from_words_reference(words)
    return noise.view(num_rows, num_counters * 4)[:, :vocab_size].contiguous()


def gumbel_perturb_reference(logits: Tensor, positions: Tensor, slots: Tensor, keys: Tensor) -> Tensor:
    """logits / T + gumbel (fp32 logits at T = 0): logits [R, V] floating, positions, slots [R] -> [R, V] fp32."""
    scores = logits.to(torch.float32, copy=True)
    scale = _row_keys(keys, slots)[0]
    sampled = (scale[:, 0] != 0).nonzero()[:, 0]
    if len(sampled):
        noise = gumbel_noise_reference(positions[sampled], slots[sampled], keys, vocab_size=logits.shape[1])
        scores[sampled] = scores[sampled].mul_(scale[sampled]).add_(noise)
    return scores


def gumbel_argmax_reference(logits: Tensor, positions: Tensor, slots: Tensor, keys: Tensor) -> Tensor:
    """Sample in plain torch, see `gumbel_argmax`."""
    # max returns the first of equal values and NaN if there is one; NaN > -inf is false.
    best, tokens = gumbel_perturb_reference(logits, positions, slots, keys).max(dim=1)
    return torch.where(best > -torch.inf, tokens, -1)


@jit
def _log(x, exponent_bits):
    q = x * _Q7
    q = (q + _Q6) * x
    q = (q + _Q5) * x
    q = (q + _Q4) * x
    q = (q + _Q3) * x
    q = (q + _Q2) * x
    q = (q + _Q1) * x
    q = (q + _Q0) * x * x
    exponent = exponent_bits.to(tl.float32)
    return q + exponent * _LO + x + exponent * _HI


@jit
def _gumbel(words):
    w = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _CLAMP)
    exponent = ((1.0 - w).to(tl.int32, bitcast=True) - _SQRT_HALF) & _EXPONENT
    # Not `_ONE - exponent`: the interpreter keeps a constexpr whose right operand is a tensor.
    scale = (-(exponent - _ONE)).to(tl.float32, bitcast=True)
    e = 0.0 - _log((scale - 1.0) - w * scale, exponent)
    bits = e.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF) & _EXPONENT
    return 0.0 - _log((bits - exponent).to(tl.float32, bitcast=True) - 1.0, exponent)


@jit
def _noise(counters, position, key):
    """Noise of tokens 4 * counters[0] to 4 * counters[-1] + 3, in order: counters [N] uint32 -> [4 * N] fp32; `key`
    points to the slot's row of `noise_keys`."""
    # 64-bit keys and products, cut to 32: Triton's debug mode traps 32-bit wraparound.
    k0 = tl.load(key + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    k1 = tl.load(key + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    c0 = counters
    c1 = tl.zeros_like(counters) + position
    c2 = tl.zeros_like(counters) + tl.load(key + 3).to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(counters)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * _M0
        p1 = c2.to(tl.uint64) * _M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1.to(tl.uint32)
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0 + _W0) & 0xFFFFFFFF
        k1 = (k1 + _W1) & 0xFFFFFFFF
    # interleave puts its arguments side by side: (0 2) and (1 3) become 0 1 2 3, the four words of a counter in a row.
    return tl.interleave(tl.interleave(_gumbel(c0), _gumbel(c2)), tl.interleave(_gumbel(c1), _gumbel(c3)))


@jit
def _perturb_kernel(logits, positions, slots, keys, out, vocab_size, stride,
                    HAS_LOGITS: tl.constexpr, COUNTERS: tl.constexpr):  # fmt: skip
    """out[row, v] = logits[row, v] / T + gumbel, one program for a row and 4 * COUNTERS tokens."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COUNTERS
    v = first * 4 + tl.arange(0, 4 * COUNTERS)
    key = keys + 4 * tl.load(slots + row).to(tl.int64)
    inverse_t = tl.load(key).to(tl.float32, bitcast=True)
    if HAS_LOGITS:
        score = tl.load(logits + row * stride + v, mask=v < vocab_size, other=0.0).to(tl.float32)
    else:
        score = tl.zeros([4 * COUNTERS], tl.float32)
    if inverse_t != 0.0:
        noise = _noise((first + tl.arange(0, COUNTERS)).to(tl.uint32), tl.load(positions + row).to(tl.uint32), key)
        score = score * inverse_t + noise
    tl.store(out + row * vocab_size + v, score, mask=v < vocab_size)


@jit
def _block_argmax_kernel(logits, positions, slots, keys, best, best_token, vocab_size, stride,
                         COUNTERS: tl.constexpr):  # fmt: skip
    """best, best_token[row, block] = maximum of the block's scores (NaN if it holds one) and its lowest index."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COUNTERS
    v = first * 4 + tl.arange(0, 4 * COUNTERS)
    key = keys + 4 * tl.load(slots + row).to(tl.int64)
    inverse_t = tl.load(key).to(tl.float32, bitcast=True)
    score = tl.load(logits + row * stride + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
    if inverse_t != 0.0:
        noise = _noise((first + tl.arange(0, COUNTERS)).to(tl.uint32), tl.load(positions + row).to(tl.uint32), key)
        score = score * inverse_t + noise
    is_nan = score != score
    score = tl.where(is_nan, float("-inf"), score)
    maximum = tl.max(score, axis=0)
    token = tl.min(tl.where(score == maximum, v, _NO_TOKEN), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    partial = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + partial, tl.where(has_nan, float("nan"), maximum))
    tl.store(best_token + partial, token)


@jit
def _merge_kernel(best, best_token, tokens, num_blocks, BLOCKS: tl.constexpr):
    """tokens[row] = lowest token among the blocks with the row's maximum; -1 for NaN or nothing above -inf."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    score = tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    token = tl.load(best_token + row * num_blocks + block, mask=block < num_blocks, other=0x7FFFFFFF)
    is_nan = score != score
    score = tl.where(is_nan, float("-inf"), score)
    maximum = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == maximum, token, _NO_TOKEN), axis=0)
    broken = (tl.max(is_nan.to(tl.int32), axis=0) > 0) | (maximum == float("-inf"))
    tl.store(tokens + row, tl.where(broken, -1, chosen).to(tl.int64))


# Tokens of one program / 4. 1024 tokens: 8 for each of 128 threads, so that Philox's state stays in registers.
_COUNTERS_PER_PROGRAM = 256


def _check(logits: Tensor | None, positions: Tensor, slots: Tensor, keys: Tensor) -> None:
    assert keys.ndim == 2 and keys.shape[1] == 4 and keys.dtype == torch.int32, "keys are [S, 4] int32, of noise_keys"
    for name, rows in (("positions", positions), ("slots", slots)):
        assert rows.ndim == 1 and rows.dtype in (torch.int32, torch.int64), f"{name}: [R] int32/int64, not {rows.dtype}"
    for name, rows in (("positions", positions), ("slots", slots), ("keys", keys)):
        assert rows.is_contiguous() and rows.device == positions.device, f"{name}: contiguous, all on one device"
    assert positions.shape == slots.shape, f"{positions.shape[0]} positions, {slots.shape[0]} slots"
    if logits is not None:
        assert logits.ndim == 2 and logits.shape[0] == positions.shape[0], f"logits [R, V], not {tuple(logits.shape)}"
        assert logits.shape[1] > 0 and logits.stride(1) == 1, "logits need a token and contiguous rows"
        assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), f"logits are {logits.dtype}"
        assert logits.device == positions.device, f"logits on {logits.device}, positions on {positions.device}"


def _launch_perturb(
    logits: Tensor | None, positions: Tensor, slots: Tensor, keys: Tensor, *, vocab_size: int
) -> Tensor:
    require_triton("gumbel_perturb")
    out = torch.empty((positions.shape[0], vocab_size), dtype=torch.float32, device=positions.device)
    if out.numel() == 0:
        return out
    source = out if logits is None else logits
    grid = (out.shape[0], triton.cdiv(vocab_size, 4 * _COUNTERS_PER_PROGRAM))
    with torch.cuda.device_of(out):
        _perturb_kernel[grid](
            source, positions, slots, keys, out, vocab_size, source.stride(0),
            HAS_LOGITS=logits is not None, COUNTERS=_COUNTERS_PER_PROGRAM, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def gumbel_noise_triton(positions: Tensor, slots: Tensor, keys: Tensor, *, vocab_size: int) -> Tensor:
    """Noise by the Triton kernel, see `gumbel_noise`; none of the slots is greedy."""
    return _launch_perturb(None, positions, slots, keys, vocab_size=vocab_size)


def gumbel_perturb_triton(logits: Tensor, positions: Tensor, slots: Tensor, keys: Tensor) -> Tensor:
    """Perturbed logits by the Triton kernel, see `gumbel_perturb`."""
    return _launch_perturb(logits, positions, slots, keys, vocab_size=logits.shape[1])


def gumbel_argmax_triton(logits: Tensor, positions: Tensor, slots: Tensor, keys: Tensor) -> Tensor:
    """Sample by the Triton kernels (noise and block maxima in one pass, then the merge), see `gumbel_argmax`."""
    require_triton("gumbel_argmax")
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, 4 * _COUNTERS_PER_PROGRAM)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    best_token = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):
        _block_argmax_kernel[(num_rows, num_blocks)](
            logits, positions, slots, keys, best, best_token, vocab_size, logits.stride(0),
            COUNTERS=_COUNTERS_PER_PROGRAM, enable_fp_fusion=False,
        )  # fmt: skip
        _merge_kernel[(num_rows,)](best, best_token, tokens, num_blocks, BLOCKS=triton.next_power_of_2(num_blocks))
    return tokens


def gumbel_noise(positions: Tensor, slots: Tensor, keys: Tensor, *, vocab_size: int) -> Tensor:
    """Gumbel noise of every token; Triton on CUDA, torch on the CPU, bit for bit the same.

    positions, slots: [R] int32/int64, contiguous. keys: [S, 4] int32 (`noise_keys`), none of those asked for greedy.
    Returns [R, V] fp32 on their device.
    """
    _check(None, positions, slots, keys)
    run = gumbel_noise_triton if positions.is_cuda else gumbel_noise_reference
    return run(positions, slots, keys, vocab_size=vocab_size)


def gumbel_perturb(logits: Tensor, positions: Tensor, slots: Tensor, keys: Tensor) -> Tensor:
    """logits / T + gumbel, whose argmax `gumbel_argmax` takes (T = 0: the logits); same arguments, -> [R, V] fp32."""
    _check(logits, positions, slots, keys)
    run = gumbel_perturb_triton if logits.is_cuda else gumbel_perturb_reference
    return run(logits, positions, slots, keys)


def gumbel_argmax(logits: Tensor, positions: Tensor, slots: Tensor, keys: Tensor) -> Tensor:
    """Choose a token for every row; Triton on CUDA, torch on the CPU, bit for bit the same.

    logits: [R, V] bf16, fp16 or fp32, contiguous rows, any row stride; -inf excludes a token.
    positions, slots: [R] int32/int64; the position is the absolute one of the token being chosen.
    keys: [S, 4] int32, temperature, seed and noise id of every slot (`noise_keys`). All tensors on one device.
    Enqueues on the current stream and never synchronises.
    Returns [R] int64, the lowest index of the maximum; -1 for a row with NaN or with nothing above -inf.
    """
    _check(logits, positions, slots, keys)
    run = gumbel_argmax_triton if logits.is_cuda else gumbel_argmax_reference
    return run(logits, positions, slots, keys)
