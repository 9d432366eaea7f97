"""Products of experts' rows with matrices as they are stored, blocks of GGUF, numbers with scales, or elements:
`experts_triton` says which rows.

A thread decodes rows of a matrix of its own, so that of few rows of x it has what it multiplies them with: nothing of a
weight goes through shared memory. What is stored is loaded by neighbouring threads, and shared memory hands it on. So
it is with elements too: what threads read across the rows of a tile of them lies in the same banks of shared memory.
"""

from __future__ import annotations

from offload_runtime_kernels._jit import jit, tl
from offload_runtime_kernels.encoded_linear import INTERPRETED
from offload_runtime_kernels.gguf_blocks import decode_half, in_one_lane, load_half, load_tile, units_at
from offload_runtime_kernels.scaled_rows import decoded_half, shared_words_at

# More rows of x than these share what is decoded through shared memory.
_ROWS_ALONE = tl.constexpr(4)


@jit
def _rounded(w, DTYPE: tl.constexpr):
    """fp32 numbers as they are in `DTYPE`. Triton does not see through this: where it does, it brings them through
    shared memory to the threads that have them."""
    if INTERPRETED:
        found = w.to(DTYPE).to(tl.float32)
    elif DTYPE.is_bf16():  # one instruction: the upper of two, with zero below it
        found = tl.inline_asm_elementwise(
            "{.reg .f32 z; mov.f32 z, 0f00000000; cvt.rn.bf16x2.f32 $0, $1, z;}", "=r,r", [w], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    elif DTYPE.is_fp16():
        found = tl.inline_asm_elementwise(
            "{.reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.f32.f16 $0, h;}", "=r,r", [w], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        tl.static_assert(DTYPE.is_fp32())
        found = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=tl.float32, is_pure=True, pack=1)
    return found


@jit
def _halves(w, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Weights [BLOCK, ...] of so many columns as those of the first half and of the second."""
    return tl.split(tl.permute(tl.reshape(w, [BLOCK, 2, COLUMNS // 2]), (0, 2, 1)))


@jit
def _add_products(sums, x_ptrs, at, w, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Add those of so many columns, from `at` on."""
    k = at + tl.arange(0, COLUMNS)[None, :]
    found = ()  # type: tuple[object, ...]
    for part in tl.static_range(len(sums)):
        if K % 256 == 0:
            x = tl.load(x_ptrs[part] + k)
        else:
            x = tl.load(x_ptrs[part] + k, mask=k < K, other=0.0)
        found += (tl.dot(x.to(tl.float32), w, sums[part], input_precision="ieee"),)
    return found


@jit
def _add_decoded(
    sums, x_ptrs, at, w, DTYPE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add products with decoded weights [BLOCK, ...] of so many columns, `BLOCK_K` at a time."""
    if COLUMNS > BLOCK_K:
        half: tl.constexpr = COLUMNS // 2
        first, second = _halves(w, BLOCK, COLUMNS)
        sums = _add_decoded(sums, x_ptrs, at, first, DTYPE, K, BLOCK, BLOCK_K, half)
        sums = _add_decoded(sums, x_ptrs, at + half, second, DTYPE, K, BLOCK, BLOCK_K, half)
    else:
        w = tl.trans(tl.reshape(w, [BLOCK, COLUMNS]))
        sums = _add_products(sums, x_ptrs, at, _rounded(w, DTYPE), K, COLUMNS)
    return sums


@jit
def block_products(
    x_ptr, row, w_ptrs, DTYPE: tl.constexpr, FORM: tl.constexpr, BLOCKS: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the products [ROWS, BLOCK] of rows of x, of which [ROWS] says the numbers, with rows of blocks in planes,
    [BLOCK, 1] pointers to uint8."""
    x_ptrs, sums = _begun(x_ptr, row, K, ROWS, BLOCK)
    # Of these numbers bf16 has all, so that they need not be rounded.
    dtype: tl.constexpr = tl.float32 if FORM.e2m1 and DTYPE.is_bf16() else DTYPE
    if ROWS <= _ROWS_ALONE:
        for tile in tl.range(0, (K + 255) // 256, num_stages=STAGES):
            planes = load_tile(w_ptrs, tile, BLOCKS, FORM, K % 256 == 0, BLOCK, True)
            first = decode_half(planes, 0, FORM, BLOCK, tl.float32, False)
            w = tl.join(first, decode_half(planes, 1, FORM, BLOCK, tl.float32, False))
            w = tl.permute(w, (0, 7, 1, 2, 3, 4, 5, 6))
            sums = _add_decoded(sums, x_ptrs, tile * 256, w, dtype, K, BLOCK, BLOCK_K, 256)
    else:
        # What is repeated has to fit the cache of instructions, of which a step's multiply-adds are most.
        for step in tl.range(0, (K + 127) // 128, num_stages=STAGES):
            planes = load_half(w_ptrs, step, BLOCKS, FORM, K % 256 == 0, BLOCK)
            if step % 2 == 0:
                w = decode_half(planes, 0, FORM, BLOCK, tl.float32, False)
            else:
                w = decode_half(planes, 1, FORM, BLOCK, tl.float32, False)
            sums = _add_decoded(sums, x_ptrs, step * 128, w, dtype, K, BLOCK, BLOCK_K, 128)
    return _ended(sums, ROWS, BLOCK)


@jit
def scaled_products(
    x_ptr, row, w_ptrs, DTYPE: tl.constexpr, ROW: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`block_products` with rows of numbers that have their scales behind them, as a `ScaledRow` says."""
    x_ptrs, sums = _begun(x_ptr, row, K, ROWS, BLOCK)
    number: tl.constexpr = ROW.number
    scale: tl.constexpr = ROW.scale_type
    scale_ptrs, zero_ptrs = w_ptrs + ROW.numbers_bytes, w_ptrs + ROW.zeros_at
    first = ()  # type: tuple[object, ...]
    if ROW.group == 0:
        first = shared_words_at(scale_ptrs, zero_ptrs, 0, ROW.zero_bits, 0, scale, BLOCK, 128, True)
    for step in tl.range(0, (K + 127) // 128, num_stages=STAGES):
        units = units_at(w_ptrs, step, ROW.numbers_bytes, 16 * ROW.bits, K % 128 == 0, BLOCK, True)
        shared = first
        if ROW.group > 0:
            at = step // ROW.steps
            shared = shared_words_at(scale_ptrs, zero_ptrs, at, ROW.zero_bits, ROW.group, scale, BLOCK, 128, True)
        w = decoded_half(
            units, shared, 0, number, ROW.bits, ROW.zero, ROW.zero_bits, ROW.group, scale, tl.float32, BLOCK, False
        )  # fmt: skip
        sums = _add_decoded(sums, x_ptrs, step * 128, w, DTYPE, K, BLOCK, BLOCK_K, 128)
    return _ended(sums, ROWS, BLOCK)


@jit
def element_products(
    x_ptr, row, w_ptrs, DTYPE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`block_products` with elements of any dtype, [BLOCK, 1] pointers, in steps of twice `BLOCK_K` columns."""
    x_ptrs, sums = _begun(x_ptr, row, K, ROWS, BLOCK)
    k = tl.arange(0, 2 * BLOCK_K)[None, :]
    for at in tl.range(0, K, 2 * BLOCK_K, num_stages=STAGES):
        if K % (2 * BLOCK_K) == 0:
            w = tl.load(w_ptrs + at + k)
        else:
            w = tl.load(w_ptrs + at + k, mask=at + k < K, other=0.0)
        w = in_one_lane(w, BLOCK, 2 * BLOCK_K).to(DTYPE).to(tl.float32)
        sums = _add_decoded(sums, x_ptrs, at, w, tl.float32, K, BLOCK, BLOCK_K, 2 * BLOCK_K)
    return _ended(sums, ROWS, BLOCK)


@jit
def _begun(x_ptr, row, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the rows of x, and their sums: of few rows each by itself."""
    x_ptrs, sums = (), ()  # type: tuple[object, ...], tuple[object, ...]
    if ROWS <= _ROWS_ALONE:
        for part in tl.static_range(ROWS):
            own = tl.sum(tl.where(tl.arange(0, ROWS) == part, row, 0))
            x_ptrs += (x_ptr + own.to(tl.int64) * K,)
            sums += (tl.zeros([1, BLOCK], dtype=tl.float32),)
    else:
        x_ptrs += (x_ptr + row.to(tl.int64)[:, None] * K,)
        sums += (tl.zeros([ROWS, BLOCK], dtype=tl.float32),)
    return x_ptrs, sums


@jit
def _ended(sums, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """All sums, [ROWS, BLOCK]."""
    found = sums[0]
    if ROWS == 2:
        found = tl.join(sums[0], sums[1])
    elif ROWS == 4:
        found = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    if ROWS == 2 or ROWS == 4:
        found = tl.trans(tl.reshape(found, [BLOCK, ROWS]))
    return found
