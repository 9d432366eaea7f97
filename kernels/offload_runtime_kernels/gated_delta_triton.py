"""Triton version of `gated_delta`: convolution and decays, products of keys, rows of inverses, the states one after the
other, results, what is kept.

Only the states' kernel goes from chunk to chunk, a program for some channels of a value head, and does nothing but
products with the state; all else is made by as many programs as there are chunks or tiles. Row numbers t count a
sequence's rows of the pass, offsets p the tokens of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

if TYPE_CHECKING:
    from offload_runtime_kernels.gated_delta import DeltaMemory, DeltaRows, DeltaShape, DeltaWeights

CHUNK_TOKENS, NORM_EPS = 64, 1e-6
_CHUNK = tl.constexpr(CHUNK_TOKENS)
# Sums whose terms are the same in whatever company a row comes, over channels and over the tokens of a full chunk, are
# those of tensor cores: the order in which these add is one for every tile. Of others, which skip what is not on the
# path of a row, each is a chain of multiply-adds.
_FIXED, _CHAIN = tl.constexpr("tf32x3"), tl.constexpr("ieee")
# Tokens that chains are unrolled to, as more does not fit into registers; rows, of which each is subtracted from those
# behind it; decays that are loaded at once, and heads that a program has of them.
_STEP, _FEW, _AHEAD, _DECAYS = (tl.constexpr(size) for size in (16, 16, 8, 32))
# Most rows of tiles of 16, and of passes that leave some of a card without a program; channels that a program has of
# few rows and of states, and of many rows; channels of a kept row that one copies.
_FEW_ROWS, _MANY_ROWS, _BLOCK, _WIDE_BLOCK, _COPIED = 16, 256, 32, 64, 1024


@jit
def _softplus(x):
    """log(1 + e^x), as exact for small results as for large ones."""
    small = tl.exp(-tl.abs(x))
    one = 1.0 + small
    log1p = tl.where(one == 1.0, small, tl.log(one) * (small / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@jit
def _row_on_path(ancestors_ptr, t, position, start, depth, TREE: tl.constexpr):
    """The row that stands at a position, which is not before `start`, on the path to row t."""
    row = position - start
    if TREE:
        row = tl.load(ancestors_ptr + t * depth + row) - start
    return row


@jit
def _convolve(
    inputs_ptr, kept_ptr, taps_ptr, q_ptr, k_ptr, v_ptr, ancestors_ptr, row, head, memory_row, start, position, b, t,
    width, depth, num_tokens, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Make a row's query, key or value of one head."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    is_value = head >= 2 * KEY_HEADS
    dim = tl.where(is_value, VALUE_DIM, KEY_DIM)
    first = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
    lane = tl.arange(0, BLOCK)
    inside = lane < dim
    kept_ptr += memory_row * num_tokens * channels + first
    inputs_ptr += b.to(tl.int64) * width * channels + first
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = position - (TAPS - 1) + tap
        if at >= start:
            source = inputs_ptr + _row_on_path(ancestors_ptr, t, at, start, depth, TREE) * channels
        else:
            source = kept_ptr + (tl.maximum(at, 0) % num_tokens) * channels
        x = tl.load(source + lane, mask=inside & (lane * 0 + at >= 0), other=0.0).to(tl.float32)
        total += x * tl.load(taps_ptr + (first + lane) * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    dtype = q_ptr.dtype.element_ty
    total = total.to(dtype).to(tl.float32)
    mixed = (total / (1.0 + tl.exp(-total))).to(dtype)
    if is_value:
        out = v_ptr + (row.to(tl.int64) * VALUE_HEADS + head - 2 * KEY_HEADS) * VALUE_DIM
        tl.store(out + lane, mixed, mask=inside)
    else:
        vector = mixed.to(tl.float32)
        norm = tl.rsqrt(tl.sum(vector * vector, axis=0) + eps)
        is_key = head >= KEY_HEADS
        out = tl.where(is_key, k_ptr, q_ptr) + (row.to(tl.int64) * KEY_HEADS + head % KEY_HEADS) * KEY_DIM
        tl.store(out + lane, (vector * (norm * tl.where(is_key, 1.0, scale))).to(dtype), mask=inside)


@jit
def _decay(
    gates_ptr, log_rates_ptr, time_steps_ptr, kept_ptr, decays_ptr, betas_ptr, ancestors_ptr, row, memory_row, start,
    position, b, width, t, depth, num_tokens, beta_scale, first_head, HEADS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Make a row's decays since the beginning of its chunk, and its betas, of some heads."""
    lane = first_head + tl.arange(0, _DECAYS)
    inside = lane < HEADS
    first = position // _CHUNK * _CHUNK
    rate = -tl.exp(tl.load(log_rates_ptr + lane, mask=inside, other=0.0).to(tl.float32))
    time_step = tl.load(time_steps_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    at = memory_row * num_tokens + tl.maximum(start - 1, 0) % num_tokens
    total = tl.load(kept_ptr + at * HEADS + lane, mask=inside & (lane * 0 + start > first), other=0.0)
    for begin in range(tl.maximum(first, start), position + 1, _AHEAD):
        for ahead in tl.static_range(_AHEAD):
            place = tl.minimum(begin + ahead, position)
            other = _row_on_path(ancestors_ptr, t, place, start, depth, TREE)
            alpha = tl.load(gates_ptr + ((b * width + other) * 2 + 1) * HEADS + lane, mask=inside, other=0.0)
            gain = rate * _softplus(alpha.to(tl.float32) + time_step)
            total += tl.where(begin + ahead <= position, gain, 0.0)
    tl.store(decays_ptr + row * HEADS + lane, total, mask=inside)
    beta = tl.load(gates_ptr + row * 2 * HEADS + lane, mask=inside, other=0.0)
    sigmoid = (1.0 / (1.0 + tl.exp(-beta.to(tl.float32)))).to(beta.dtype)
    tl.store(betas_ptr + row * HEADS + lane, sigmoid.to(tl.float32) * beta_scale, mask=inside)


@jit(do_not_specialize=("width", "depth", "num_tokens"))
def _inputs_kernel(
    inputs_ptr, kept_ptr, taps_ptr, q_ptr, k_ptr, v_ptr, gates_ptr, log_rates_ptr, time_steps_ptr, kept_decays_ptr,
    decays_ptr, betas_ptr, rows_ptr, starts_ptr, counts_ptr, positions_ptr, ancestors_ptr, width, depth, num_tokens,
    eps, scale, beta_scale, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    t, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if t < tl.load(counts_ptr + b):
        row = b * width + t
        start, position = tl.load(starts_ptr + b), tl.load(positions_ptr + row)
        memory_row = tl.load(rows_ptr + b).to(tl.int64)
        ancestors_ptr += b * width * depth
        decayed = head - 2 * KEY_HEADS - VALUE_HEADS  # programs behind those of heads
        if decayed >= 0:
            _decay(
                gates_ptr, log_rates_ptr, time_steps_ptr, kept_decays_ptr, decays_ptr, betas_ptr, ancestors_ptr, row,
                memory_row, start, position, b, width, t, depth, num_tokens, beta_scale, decayed * _DECAYS, VALUE_HEADS,
                TREE,
            )  # fmt: skip
        else:
            _convolve(
                inputs_ptr, kept_ptr, taps_ptr, q_ptr, k_ptr, v_ptr, ancestors_ptr, row, head, memory_row, start,
                position, b, t, width, depth, num_tokens, eps, scale, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
                BLOCK, TAPS, TREE,
            )  # fmt: skip


@jit
def _on_path(ancestors_ptr, rows, others, positions, other_positions, start, depth, inside):
    """Which of `others` [J] are on the paths to `rows` [I], themselves included, and in the same chunk: [I, J]."""
    near = inside & (other_positions[None, :] <= positions[:, None])
    near = near & (other_positions[None, :] // _CHUNK == positions[:, None] // _CHUNK)
    place = tl.where(near, other_positions[None, :] - start, 0)
    return near & (
        tl.load(ancestors_ptr + rows[:, None] * depth + place, mask=near, other=0) == start + others[None, :]
    )


@jit
def _store_products(
    q_rows, k_rows, key_rows, subtracted_ptr, added_ptr, g_ptr, other_g_ptr, beta_ptr, places, inside, there,
    valid, below, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr,
    ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """What each value head of a key head, which lie so far `APART`, has of the products of rows [I] and keys [J], from
    pointers to either."""
    kk = tl.zeros([ROWS, OTHERS], dtype=tl.float32)
    qk = tl.zeros([ROWS, OTHERS], dtype=tl.float32)
    for first in range(0, KEY_DIM, KEY_BLOCK):
        channel = first + tl.arange(0, KEY_BLOCK)
        keys = tl.load(key_rows[None, :] + channel[:, None], mask=there[None, :], other=0.0).to(tl.float32)
        k = tl.load(k_rows[:, None] + channel[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        q = tl.load(q_rows[:, None] + channel[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        kk = tl.dot(k, keys, kk, input_precision=_FIXED)
        qk = tl.dot(q, keys, qk, input_precision=_FIXED)
    for one in range(0, GROUP * APART, APART):
        g = tl.load(g_ptr + one, mask=inside, other=0.0)
        beta = tl.load(beta_ptr + one, mask=inside, other=0.0)
        other_g = tl.load(other_g_ptr + one, mask=there, other=0.0)
        faded = tl.exp(tl.where(valid, g[:, None] - other_g[None, :], 0.0))
        tl.store(subtracted_ptr + places + one * _CHUNK, (beta[:, None] * faded) * kk, mask=below)
        tl.store(added_ptr + places + one * _CHUNK, faded * qk, mask=valid)


@jit(do_not_specialize=("width", "depth", "num_tokens"))
def _products_kernel(
    q_ptr, k_ptr, kept_keys_ptr, decays_ptr, kept_decays_ptr, betas_ptr, subtracted_ptr, added_ptr, rows_ptr,
    starts_ptr, counts_ptr, positions_ptr, ancestors_ptr, width, depth, num_tokens,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    TILED: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    tile, b, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Of the value heads that share a key head a program has the first ones or the next, `HEADS` of them.
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    apart: tl.constexpr = KEY_HEADS if TILED else 1
    key_head = part // (group // HEADS)
    head = (key_head if TILED else key_head * group) + part % (group // HEADS) * HEADS * apart
    start = tl.load(starts_ptr + b)
    count = tl.load(counts_ptr + b)
    first_chunk = start // _CHUNK
    # Tiles are of one chunk, but for trees.
    begin = tile * ROWS
    begin_others = 0
    end = count
    if not TREE:
        tiles: tl.constexpr = _CHUNK // ROWS
        chunk = first_chunk + tile // tiles
        begin_others = tl.maximum(chunk * _CHUNK - start, 0)
        begin = begin_others + tile % tiles * ROWS
        end = tl.minimum(count, (chunk + 1) * _CHUNK - start)
    if begin < end:
        t, p = begin + tl.arange(0, ROWS), tl.arange(0, _CHUNK)
        inside = t < end
        row = (b * width + t).to(tl.int64)
        position = tl.load(positions_ptr + row, mask=inside, other=0)
        of_row = (row * KEY_HEADS + key_head) * KEY_DIM
        of_head = row * VALUE_HEADS + head
        ancestors_ptr += b * width * depth
        # Tokens of the open chunk that memory has.
        open_tokens = start % _CHUNK
        if (open_tokens > 0) & (TREE | (begin_others == 0)):
            old = p < open_tokens
            at = tl.load(rows_ptr + b).to(tl.int64) * num_tokens + (first_chunk * _CHUNK + p) % num_tokens
            valid = inside[:, None] & old[None, :] & (position[:, None] // _CHUNK == first_chunk)
            _store_products(
                q_ptr + of_row, k_ptr + of_row, kept_keys_ptr + (at * KEY_HEADS + key_head) * KEY_DIM,
                subtracted_ptr, added_ptr, decays_ptr + of_head, kept_decays_ptr + at * VALUE_HEADS + head,
                betas_ptr + of_head, of_head[:, None] * _CHUNK + p[None, :], inside, old, valid, valid, KEY_DIM,
                KEY_BLOCK, HEADS, apart, ROWS, _CHUNK,
            )  # fmt: skip
        # Rows of the pass: those of the tile, and of a tree of all before it.
        for first in range(begin_others, tl.minimum(begin + ROWS, end), ROWS):
            other = first + tl.arange(0, ROWS)
            there = other < end
            other_row = (b * width + other).to(tl.int64)
            other_position = tl.load(positions_ptr + other_row, mask=there, other=0)
            valid = inside[:, None] & there[None, :]
            if TREE:
                valid = _on_path(ancestors_ptr, t, other, position, other_position, start, depth, valid)
            else:
                valid = valid & (other[None, :] <= t[:, None])
            _store_products(
                q_ptr + of_row, k_ptr + of_row, k_ptr + (other_row * KEY_HEADS + key_head) * KEY_DIM,
                subtracted_ptr, added_ptr, decays_ptr + of_head,
                decays_ptr + other_row * VALUE_HEADS + head, betas_ptr + of_head,
                of_head[:, None] * _CHUNK + (other_position % _CHUNK)[None, :], inside, there, valid,
                valid & (other[None, :] < t[:, None]), KEY_DIM, KEY_BLOCK, HEADS, apart, ROWS, ROWS,
            )  # fmt: skip


@jit
def _others(
    positions_ptr, ancestors_ptr, others, rows, end, positions, chunk, inside, first_row, start, depth,
    TREE: tl.constexpr,
):  # fmt: skip
    """Which of `others` [J] before `end` are on the paths to rows [I] in a chunk, themselves included: [I, J]; and of
    the others their rows of the pass, whether they are in the chunk, and their offsets there."""
    there = others < end
    row = (first_row + others).to(tl.int64)
    other_positions = tl.load(positions_ptr + row, mask=there, other=-64)
    there = there & (other_positions // _CHUNK == chunk)
    valid = inside[:, None] & there[None, :]
    if TREE:
        valid = _on_path(ancestors_ptr, rows, others, positions, other_positions, start, depth, valid)
    else:
        valid = valid & (others[None, :] <= rows[:, None])
    return valid, row, there, other_positions % _CHUNK


@jit
def _kept_tokens(memory_row, chunk_start, offsets, num_tokens):
    """Where memory has the tokens of a chunk at some offsets."""
    return memory_row * num_tokens + (chunk_start + offsets) % num_tokens


@jit(do_not_specialize=("width", "depth", "num_tokens"))
def _inverses_kernel(
    subtracted_ptr, added_ptr, betas_ptr, kept_inverses_ptr, rows_ptr, starts_ptr, counts_ptr, positions_ptr,
    ancestors_ptr, width, depth, num_tokens, HEADS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """In place of a row's products with keys its rows of inverses, and of its results in terms of values."""
    number, b, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + b)
    count = tl.load(counts_ptr + b)
    memory_row = tl.load(rows_ptr + b).to(tl.int64)
    chunk = start // _CHUNK + number
    chunk_start = chunk * _CHUNK
    num_old = tl.maximum(start - chunk_start, 0)
    begin = 0
    end = count
    if not TREE:
        begin = tl.maximum(chunk_start - start, 0)
        end = tl.minimum(count, chunk_start + _CHUNK - start)
    ancestors_ptr += b * width * depth
    step, few, column = tl.arange(0, _STEP), tl.arange(0, _FEW), tl.arange(0, _CHUNK)
    for first in range(begin, end, _FEW):
        t = first + few
        row = (b * width + t).to(tl.int64)
        position = tl.load(positions_ptr + row, mask=t < end, other=-64)
        inside = (t < end) & (position // _CHUNK == chunk)
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            of_row = (row[:, None] * HEADS + head) * _CHUNK
            beta = tl.load(betas_ptr + row * HEADS + head, mask=inside, other=0.0)
            inverse = tl.where(column[None, :] == (position % _CHUNK)[:, None], beta[:, None], 0.0)
            read = tl.zeros([_FEW, _CHUNK], dtype=tl.float32)
            for p in range(0, num_old, _STEP):
                old = p + step < num_old
                at = _kept_tokens(memory_row, chunk_start, p + step, num_tokens)
                kept = tl.load(
                    kept_inverses_ptr + (at[:, None] * HEADS + head) * _CHUNK + column[None, :], mask=old[:, None],
                    other=0.0,
                )  # fmt: skip
                known = inside[:, None] & old[None, :]
                subtracted = tl.load(subtracted_ptr + of_row + (p + step)[None, :], mask=known, other=0.0)
                inverse = tl.dot(-subtracted, kept, inverse, input_precision=_CHAIN)
                added = tl.load(added_ptr + of_row + (p + step)[None, :], mask=known, other=0.0)
                read = tl.dot(added, kept, read, input_precision=_CHAIN)
            for other_first in range(begin, first, _FEW):
                other = other_first + few
                valid, other_row, there, offset = _others(
                    positions_ptr, ancestors_ptr, other, t, first, position, chunk, inside, b * width, start, depth,
                    TREE,
                )  # fmt: skip
                made = tl.load(
                    subtracted_ptr + (other_row[:, None] * HEADS + head) * _CHUNK + column[None, :],
                    mask=there[:, None], other=0.0,
                )  # fmt: skip
                subtracted = tl.load(subtracted_ptr + of_row + offset[None, :], mask=valid, other=0.0)
                inverse = tl.dot(-subtracted, made, inverse, input_precision=_CHAIN)
                added = tl.load(added_ptr + of_row + offset[None, :], mask=valid, other=0.0)
                read = tl.dot(added, made, read, input_precision=_CHAIN)
            valid, other_row, there, offset = _others(
                positions_ptr, ancestors_ptr, t, t, end, position, chunk, inside, b * width, start, depth, TREE
            )
            below = valid & (few[None, :] < few[:, None])
            subtracted = tl.load(subtracted_ptr + of_row + offset[None, :], mask=below, other=0.0)
            added = tl.load(added_ptr + of_row + offset[None, :], mask=valid, other=0.0)
            for j in range(tl.minimum(_FEW, end - first)):
                one = tl.sum(tl.where((few == j)[:, None], inverse, 0.0), axis=0)
                factor = tl.sum(tl.where((few == j)[None, :], subtracted, 0.0), axis=1)
                inverse = inverse - factor[:, None] * one[None, :]
            read = tl.dot(added, inverse, read, input_precision=_CHAIN)
            tl.debug_barrier()  # between this program's loads and its stores, and these and its next loads
            tl.store(subtracted_ptr + of_row + column[None, :], inverse, mask=inside[:, None])
            tl.store(added_ptr + of_row + column[None, :], read, mask=inside[:, None])
            tl.debug_barrier()


@jit
def _rows_of_path(ancestors_ptr, leads_on, positions, new, first_row, start, depth, TREE: tl.constexpr):
    """The rows of the pass at some positions, as far as they are `new`, on the path to row `leads_on`."""
    row = tl.where(new, positions - start, 0)
    if TREE:
        row = tl.where(new, tl.load(ancestors_ptr + leads_on * depth + row, mask=new, other=0) - start, 0)
    return (first_row + row).to(tl.int64)


@jit
def _load_of_path(ptr, kept_ptr, rows, kept_rows, new, size, columns):
    """Of each token what the pass has, or what memory has, which lies so far apart: [tokens, columns] fp32."""
    of_token = tl.where(new, ptr + rows * size, kept_ptr + kept_rows * size)
    return tl.load(of_token[:, None] + columns[None, :]).to(tl.float32)


@jit
def _decays_of_path(ptr, kept_ptr, rows, kept_rows, new, HEADS: tl.constexpr):
    """The decays of one head of each token."""
    return tl.load(tl.where(new, ptr + rows * HEADS, kept_ptr + kept_rows * HEADS))


@jit
def _solved(
    ptr, kept_ptr, columns, decays_ptr, kept_decays_ptr, inverses_ptr, kept_inverses_ptr, ancestors_ptr, leads_on,
    memory_row, chunk_start, first_row, start, depth, num_tokens, SIZE: tl.constexpr, HEADS: tl.constexpr,
    DECAYED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """What the inverse of a full chunk makes of some columns of its values, or of its keys as they are `DECAYED`, rows
    of which lie `SIZE` apart: [64, BLOCK]. All pointers are to one head."""
    p = tl.arange(0, _CHUNK)
    new = chunk_start + p >= start
    rows = _rows_of_path(ancestors_ptr, leads_on, chunk_start + p, new, first_row, start, depth, TREE)
    kept = _kept_tokens(memory_row, chunk_start, p, num_tokens)
    inverse = _load_of_path(inverses_ptr, kept_inverses_ptr, rows, kept, new, HEADS * _CHUNK, p)
    tokens = _load_of_path(ptr, kept_ptr, rows, kept, new, SIZE, columns)
    if DECAYED:
        tokens = tl.exp(_decays_of_path(decays_ptr, kept_decays_ptr, rows, kept, new, HEADS))[:, None] * tokens
    return tl.dot(inverse, tokens, input_precision=_FIXED)


@jit
def _num_full(
    positions_ptr, b, start, base, count, width, WIDTH_BLOCK: tl.constexpr, TREE: tl.constexpr, KEEPS: tl.constexpr
):  # fmt: skip
    """How many chunks from `base` on are full, and where rows are not kept have some behind them."""
    stop = start + count
    if TREE:
        t = tl.arange(0, WIDTH_BLOCK)
        stop = tl.maximum(tl.max(tl.load(positions_ptr + b * width + t, mask=t < count, other=-1), axis=0) + 1, start)
    if not KEEPS:
        stop = tl.maximum(stop - 1, 0)
    return tl.maximum(stop // _CHUNK - base, 0)


@jit
def _leads_on(positions_ptr, b, count, chunk, width, WIDTH_BLOCK: tl.constexpr, TREE: tl.constexpr):
    """The first row of a tree that is in a chunk, to whose beginning one path leads; of others any."""
    t = 0
    if TREE:
        all_t = tl.arange(0, WIDTH_BLOCK)
        position = tl.load(positions_ptr + b * width + all_t, mask=all_t < count, other=-64)
        t = tl.min(tl.where(position // _CHUNK == chunk, all_t, WIDTH_BLOCK), axis=0)
    return t


@jit(do_not_specialize=("width", "depth", "num_tokens"))
def _solve_kernel(
    k_ptr, v_ptr, decays_ptr, inverses_ptr, kept_keys_ptr, kept_values_ptr, kept_decays_ptr, kept_inverses_ptr,
    solved_ptr, rows_ptr, starts_ptr, bases_ptr, counts_ptr, positions_ptr, ancestors_ptr, width, depth, num_tokens,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, TREE: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Make of full chunks what their inverses make of keys, and behind these of values."""
    number, b, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dims: tl.constexpr = KEY_DIM + VALUE_DIM
    head = part // (dims // BLOCK)
    first = part % (dims // BLOCK) * BLOCK
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    start = tl.load(starts_ptr + b)
    base = tl.load(bases_ptr + b)
    count = tl.load(counts_ptr + b)
    if number < _num_full(positions_ptr, b, start, base, count, width, WIDTH_BLOCK, TREE, KEEPS):
        memory_row = tl.load(rows_ptr + b).to(tl.int64)
        ancestors_ptr += b * width * depth
        leads_on = _leads_on(positions_ptr, b, count, base + number + 1, width, WIDTH_BLOCK, TREE)
        column = first + tl.arange(0, BLOCK)
        row = ((b * tl.num_programs(0) + number).to(tl.int64) * VALUE_HEADS + head) * _CHUNK + tl.arange(0, _CHUNK)
        of_solved = row[:, None] * dims + column[None, :]
        if first < KEY_DIM:
            solved = _solved(
                k_ptr + key_head * KEY_DIM, kept_keys_ptr + key_head * KEY_DIM, column, decays_ptr + head,
                kept_decays_ptr + head, inverses_ptr + head * _CHUNK, kept_inverses_ptr + head * _CHUNK, ancestors_ptr,
                leads_on, memory_row, (base + number) * _CHUNK, b * width, start, depth, num_tokens,
                KEY_HEADS * KEY_DIM, VALUE_HEADS, True, TREE,
            )  # fmt: skip
            tl.store(solved_ptr + of_solved, solved)
        else:
            solved = _solved(
                v_ptr + head * VALUE_DIM, kept_values_ptr + head * VALUE_DIM, column - KEY_DIM, decays_ptr + head,
                kept_decays_ptr + head, inverses_ptr + head * _CHUNK, kept_inverses_ptr + head * _CHUNK, ancestors_ptr,
                leads_on, memory_row, (base + number) * _CHUNK, b * width, start, depth, num_tokens,
                VALUE_HEADS * VALUE_DIM, VALUE_HEADS, False, TREE,
            )  # fmt: skip
            tl.store(solved_ptr + of_solved, solved)


@jit(do_not_specialize=("width", "depth", "num_tokens", "num_states"))
def _states_kernel(
    k_ptr, decays_ptr, kept_keys_ptr, kept_decays_ptr, solved_ptr, states_ptr, passed_ptr, rows_ptr, starts_ptr,
    bases_ptr, counts_ptr, positions_ptr, ancestors_ptr, width, depth, num_tokens, num_states,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, TILED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, TREE: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """Bring states on from chunk to chunk, and leave what each chunk begins with, but for the first one where states
    are not kept."""
    b, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    start = tl.load(starts_ptr + b)
    base = tl.load(bases_ptr + b)
    count = tl.load(counts_ptr + b)
    memory_row = tl.load(rows_ptr + b).to(tl.int64)
    ancestors_ptr += b * width * depth
    first_row = b * width
    p, step = tl.arange(0, _CHUNK), tl.arange(0, KEY_BLOCK)
    column = part * BLOCK + tl.arange(0, BLOCK)
    dims: tl.constexpr = KEY_DIM + VALUE_DIM
    of_chunk: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    of_states = step[:, None] * VALUE_DIM + column[None, :]
    k_ptr += key_head * KEY_DIM
    kept_keys_ptr += key_head * KEY_DIM
    decays_ptr += head
    kept_decays_ptr += head
    states_ptr += (memory_row * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    passed_ptr += (b.to(tl.int64) * num_states * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    source_ptr = states_ptr
    target_ptr = passed_ptr
    if KEEPS:
        for first in range(0, KEY_DIM, KEY_BLOCK):
            tl.store(passed_ptr + first * VALUE_DIM + of_states, tl.load(states_ptr + first * VALUE_DIM + of_states))
        target_ptr += of_chunk
    for number in range(_num_full(positions_ptr, b, start, base, count, width, WIDTH_BLOCK, TREE, KEEPS)):
        chunk_start = (base + number) * _CHUNK
        leads_on = _leads_on(positions_ptr, b, count, base + number + 1, width, WIDTH_BLOCK, TREE)
        row = ((b * num_states + number).to(tl.int64) * VALUE_HEADS + head) * _CHUNK + p
        u = tl.load(solved_ptr + row[:, None] * dims + (KEY_DIM + column)[None, :])
        end = chunk_start + _CHUNK - 1
        last = _rows_of_path(ancestors_ptr, leads_on, end, end >= start, first_row, start, depth, TREE)
        last_at = _kept_tokens(memory_row, chunk_start, _CHUNK - 1, num_tokens)
        last_g = _decays_of_path(decays_ptr, kept_decays_ptr, last, last_at, end >= start, VALUE_HEADS)
        new = chunk_start + p >= start
        at = _rows_of_path(ancestors_ptr, leads_on, chunk_start + p, new, first_row, start, depth, TREE)
        kept_at = _kept_tokens(memory_row, chunk_start, p, num_tokens)
        faded = tl.exp(last_g - _decays_of_path(decays_ptr, kept_decays_ptr, at, kept_at, new, VALUE_HEADS))
        for first in range(0, KEY_DIM, KEY_BLOCK):
            of_keys = tl.load(solved_ptr + row[:, None] * dims + (first + step)[None, :])
            state = tl.load(source_ptr + first * VALUE_DIM + of_states)
            u = tl.dot(-of_keys, state, u, input_precision=_FIXED)
        for first in range(0, KEY_DIM, KEY_BLOCK):
            keys = _load_of_path(k_ptr, kept_keys_ptr, at, kept_at, new, KEY_HEADS * KEY_DIM, first + step)
            state = tl.exp(last_g) * tl.load(source_ptr + first * VALUE_DIM + of_states)
            state = tl.dot(tl.trans(keys * faded[:, None]), u, state, input_precision=_FIXED)
            tl.store(target_ptr + first * VALUE_DIM + of_states, state)
        source_ptr = target_ptr
        target_ptr += of_chunk
        tl.debug_barrier()  # between stores of this program and its loads
    if KEEPS:
        for first in range(0, KEY_DIM, KEY_BLOCK):
            tl.store(states_ptr + first * VALUE_DIM + of_states, tl.load(source_ptr + first * VALUE_DIM + of_states))


@jit
def _tile_of_rows(
    positions_ptr, tile, b, start, count, width, ROWS: tl.constexpr, TREE: tl.constexpr
):  # fmt: skip
    """A tile of rows, which is what a chunk has of them, but for trees: where rows on their paths may begin, itself,
    behind which row it ends, and the first and the last chunk in it."""
    begin = 0
    first = tile * ROWS
    end = count
    first_chunk = start // _CHUNK + tile
    last_chunk = first_chunk
    if TREE:
        t = first + tl.arange(0, ROWS)
        position = tl.load(positions_ptr + b * width + t, mask=t < end, other=-64)
        last_chunk = tl.max(position, axis=0) // _CHUNK
        first_chunk = tl.min(tl.where(t < end, position, last_chunk * _CHUNK), axis=0) // _CHUNK
        end = tl.minimum(end, first + ROWS)
    else:
        begin = tl.maximum(first_chunk * _CHUNK - start, 0)
        first = begin
        end = tl.minimum(end, (first_chunk + 1) * _CHUNK - start)
    return begin, first, end, first_chunk, last_chunk


@jit(do_not_specialize=("width", "depth", "num_tokens"))
def _asked_kernel(
    q_ptr, k_ptr, decays_ptr, reads_ptr, asked_ptr, kept_keys_ptr, kept_decays_ptr, rows_ptr, starts_ptr, counts_ptr,
    positions_ptr, ancestors_ptr, width, depth, num_tokens, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, TILED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """What rows ask the state that their chunk begins with: their queries, less what they read of keys behind it."""
    tile, b, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = part // (KEY_DIM // BLOCK)
    channel = part % (KEY_DIM // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    start = tl.load(starts_ptr + b)
    memory_row = tl.load(rows_ptr + b).to(tl.int64)
    ancestors_ptr += b * width * depth
    begin, first, end, first_chunk, last_chunk = _tile_of_rows(
        positions_ptr, tile, b, start, tl.load(counts_ptr + b), width, ROWS, TREE
    )
    step, t = tl.arange(0, _STEP), first + tl.arange(0, ROWS)
    row = (b * width + t).to(tl.int64)
    reads_ptr += ((row * VALUE_HEADS + head) * _CHUNK)[:, None]
    if first < end:
        position = tl.load(positions_ptr + row, mask=t < end, other=-64)
        for chunk in range(first_chunk, last_chunk + 1):
            chunk_start = chunk * _CHUNK
            inside = (t < end) & (position // _CHUNK == chunk)
            num_old = tl.maximum(start - chunk_start, 0)
            place = ((row * KEY_HEADS + key_head) * KEY_DIM)[:, None] + channel[None, :]
            q = tl.load(q_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
            asked = tl.exp(tl.load(decays_ptr + row * VALUE_HEADS + head, mask=inside, other=0.0))[:, None] * q
            for p in range(0, num_old, _STEP):
                old = p + step < num_old
                at = _kept_tokens(memory_row, chunk_start, p + step, num_tokens)
                read = tl.load(reads_ptr + (p + step)[None, :], mask=inside[:, None] & old[None, :], other=0.0)
                of_token = ((at * KEY_HEADS + key_head) * KEY_DIM)[:, None] + channel[None, :]
                keys = tl.load(kept_keys_ptr + of_token, mask=old[:, None], other=0.0).to(tl.float32)
                g = tl.load(kept_decays_ptr + at * VALUE_HEADS + head, mask=old, other=0.0)
                asked = tl.dot(-read, tl.exp(g)[:, None] * keys, asked, input_precision=_CHAIN)
            for other in range(begin, end, _STEP):
                valid, other_row, there, offset = _others(
                    positions_ptr, ancestors_ptr, other + step, t, end, position, chunk, inside, b * width, start,
                    depth, TREE,
                )  # fmt: skip
                read = tl.load(reads_ptr + offset[None, :], mask=valid, other=0.0)
                of_token = ((other_row * KEY_HEADS + key_head) * KEY_DIM)[:, None] + channel[None, :]
                keys = tl.load(k_ptr + of_token, mask=there[:, None], other=0.0).to(tl.float32)
                g = tl.load(decays_ptr + other_row * VALUE_HEADS + head, mask=there, other=0.0)
                asked = tl.dot(-read, tl.exp(g)[:, None] * keys, asked, input_precision=_CHAIN)
            place = ((row * VALUE_HEADS + head) * KEY_DIM)[:, None] + channel[None, :]
            tl.store(asked_ptr + place, asked, mask=inside[:, None])


@jit(do_not_specialize=("width", "depth", "num_tokens", "num_states"))
def _results_kernel(
    asked_ptr, v_ptr, reads_ptr, out_ptr, kept_values_ptr, states_ptr, passed_ptr, rows_ptr, starts_ptr, bases_ptr,
    counts_ptr, positions_ptr, ancestors_ptr, width, depth, num_tokens, num_states,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TREE: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """What rows read of the values of their chunk, and the answer of the state that it begins with."""
    tile, b, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = part // (VALUE_DIM // BLOCK)
    column = part % (VALUE_DIM // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts_ptr + b)
    base = tl.load(bases_ptr + b)
    memory_row = tl.load(rows_ptr + b).to(tl.int64)
    ancestors_ptr += b * width * depth
    begin, first, end, first_chunk, last_chunk = _tile_of_rows(
        positions_ptr, tile, b, start, tl.load(counts_ptr + b), width, ROWS, TREE
    )
    step, t = tl.arange(0, _STEP), first + tl.arange(0, ROWS)
    row = (b * width + t).to(tl.int64)
    reads_ptr += ((row * VALUE_HEADS + head) * _CHUNK)[:, None]
    asked_ptr += ((row * VALUE_HEADS + head) * KEY_DIM)[:, None]
    if first < end:
        position = tl.load(positions_ptr + row, mask=t < end, other=-64)
        for chunk in range(first_chunk, last_chunk + 1):
            chunk_start = chunk * _CHUNK
            inside = (t < end) & (position // _CHUNK == chunk)
            num_old = tl.maximum(start - chunk_start, 0)
            out = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            for p in range(0, num_old, _STEP):
                old = p + step < num_old
                at = _kept_tokens(memory_row, chunk_start, p + step, num_tokens)
                read = tl.load(reads_ptr + (p + step)[None, :], mask=inside[:, None] & old[None, :], other=0.0)
                of_token = ((at * VALUE_HEADS + head) * VALUE_DIM)[:, None] + column[None, :]
                values = tl.load(kept_values_ptr + of_token, mask=old[:, None], other=0.0).to(tl.float32)
                out = tl.dot(read, values, out, input_precision=_CHAIN)
            for other in range(begin, end, _STEP):
                valid, other_row, there, offset = _others(
                    positions_ptr, ancestors_ptr, other + step, t, end, position, chunk, inside, b * width, start,
                    depth, TREE,
                )  # fmt: skip
                read = tl.load(reads_ptr + offset[None, :], mask=valid, other=0.0)
                of_token = ((other_row * VALUE_HEADS + head) * VALUE_DIM)[:, None] + column[None, :]
                values = tl.load(v_ptr + of_token, mask=there[:, None], other=0.0).to(tl.float32)
                out = tl.dot(read, values, out, input_precision=_CHAIN)
            number = b * num_states + chunk - base
            if KEEPS:
                state_ptr = passed_ptr
            else:
                state_ptr = tl.where(chunk == base, states_ptr, passed_ptr)
                number = tl.where(chunk == base, memory_row, number - 1)
            state_ptr += (number.to(tl.int64) * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
            for channels in range(0, KEY_DIM, KEY_BLOCK):
                channel = channels + tl.arange(0, KEY_BLOCK)
                asked = tl.load(asked_ptr + channel[None, :], mask=inside[:, None], other=0.0)
                state = tl.load(state_ptr + channel[:, None] * VALUE_DIM + column[None, :])
                out = tl.dot(asked, state, out, input_precision=_FIXED)
            place = ((row * VALUE_HEADS + head) * VALUE_DIM)[:, None] + column[None, :]
            tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@jit
def _copy_row(source_ptr, target_ptr, row, at, column, WIDTH: tl.constexpr):
    inside = column < WIDTH
    tl.store(target_ptr + at * WIDTH + column, tl.load(source_ptr + row * WIDTH + column, mask=inside), mask=inside)


@jit(do_not_specialize=("width", "num_tokens", "skipped"))
def _keep_kernel(
    inputs_ptr, k_ptr, v_ptr, decays_ptr, inverses_ptr, kept_inputs_ptr, kept_keys_ptr, kept_values_ptr,
    kept_decays_ptr, kept_inverses_ptr, rows_ptr, starts_ptr, counts_ptr, width, num_tokens, skipped,
    CHANNELS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, b = skipped + tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if t < tl.load(counts_ptr + b):
        row = (b * width + t).to(tl.int64)
        at = tl.load(rows_ptr + b).to(tl.int64) * num_tokens + (tl.load(starts_ptr + b) + t) % num_tokens
        _copy_row(inputs_ptr, kept_inputs_ptr, row, at, column, CHANNELS)
        _copy_row(k_ptr, kept_keys_ptr, row, at, column, KEY_SIZE)
        _copy_row(v_ptr, kept_values_ptr, row, at, column, VALUE_SIZE)
        _copy_row(decays_ptr, kept_decays_ptr, row, at, column, HEADS)
        _copy_row(inverses_ptr, kept_inverses_ptr, row, at, column, HEADS * _CHUNK)


def gated_delta_triton(
    inputs: torch.Tensor, gates: torch.Tensor, weights: DeltaWeights, memory: DeltaMemory, rows: DeltaRows,
    shape: DeltaShape, *, keeps: bool,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `gated_delta`."""
    require_triton("gated_delta")
    batch, width = rows.positions.shape
    num_rows, tree = batch * width, rows.ancestors is not None
    assert inputs.is_contiguous() and gates.is_contiguous() and inputs.shape == (num_rows, shape.channels)
    assert not (tree and keeps)
    num_tokens, depth = memory.num_tokens, rows.ancestors.shape[2] if rows.ancestors is not None else 0
    ancestors = rows.positions if rows.ancestors is None else rows.ancestors
    q, k = (inputs.new_empty(num_rows, shape.key_heads, shape.key_dim) for _ in range(2))
    v, out = (inputs.new_empty(num_rows, shape.value_heads, shape.value_dim) for _ in range(2))
    decays, betas = memory.decays.new_empty(2, num_rows, shape.value_heads)
    # A row's products beta e^{G_i - G_j} k_i . k_j and e^{G_i - G_j} q_i . k_j, which `_inverses_kernel` overwrites by
    # its t and r (see `gated_delta`).
    subtracted, added = decays.new_empty(2, num_rows, shape.value_heads, CHUNK_TOKENS)
    where = (rows.memory_rows, rows.starts, rows.counts, rows.positions, ancestors)
    where_from = (rows.memory_rows, rows.starts, rows.bases, rows.counts, rows.positions, ancestors)
    dims = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads, "KEY_DIM": shape.key_dim}
    both = {**dims, "VALUE_DIM": shape.value_dim, "TILED": shape.tiled}
    # Blocks of channels divide those of a head, which may be three times a power of two.
    key_block, value_block = (min(_WIDE_BLOCK, dim & -dim) for dim in (shape.key_dim, shape.value_dim))
    num_chunks = triton.cdiv(width + CHUNK_TOKENS - 1, CHUNK_TOKENS)  # that rows may lie in
    # Chunks that may become full, and how many states are made on the way.
    num_full = rows.lag + (num_chunks if keeps else num_chunks - 1)
    num_states = num_full + 1 if keeps else num_full
    how = {"WIDTH_BLOCK": triton.next_power_of_2(max(1, width)), "TREE": tree, "KEEPS": keeps}
    four = {"num_warps": 4, "num_stages": 1}  # loads ahead would take the room of other programs
    with torch.cuda.device_of(inputs):
        if width:
            parts = 2 * shape.key_heads + shape.value_heads + triton.cdiv(shape.value_heads, _DECAYS.value)
            _inputs_kernel[(width, parts, batch)](
                inputs, memory.inputs, weights.taps, q, k, v, gates, weights.log_rates, weights.time_steps,
                memory.decays, decays, betas, *where, width, depth, num_tokens, NORM_EPS, shape.key_dim**-0.5,
                shape.beta_scale, VALUE_DIM=shape.value_dim, TAPS=shape.taps, TREE=tree, num_warps=1,
                BLOCK=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)), **dims,
            )  # fmt: skip
            each = shape.value_heads // shape.key_heads if width > _MANY_ROWS else 1
            tiles = triton.cdiv(width, _FEW_ROWS) if tree else num_chunks * (CHUNK_TOKENS // _FEW_ROWS)
            _products_kernel[(tiles, batch, shape.value_heads // each)](
                q, k, memory.keys, decays, memory.decays, betas, subtracted, added, *where, width, depth, num_tokens,
                KEY_BLOCK=key_block, TILED=shape.tiled, HEADS=each, ROWS=_FEW_ROWS, TREE=tree, **dims, **four,
            )  # fmt: skip
            _inverses_kernel[(num_chunks, batch, shape.value_heads)](
                subtracted, added, betas, memory.inverses, *where, width, depth, num_tokens, HEADS=shape.value_heads,
                TREE=tree, num_warps=4 if width <= _MANY_ROWS else 1, num_stages=1,
            )  # fmt: skip
        passed = memory.states
        if num_full:
            passed = memory.states.new_empty(batch, num_states, *memory.states.shape[1:])
            channels, block = shape.key_dim + shape.value_dim, min(key_block, value_block)
            solved = decays.new_empty(batch, num_states, shape.value_heads, CHUNK_TOKENS, channels)
            _solve_kernel[(num_states, batch, shape.value_heads * (channels // block))](
                k, v, decays, subtracted, memory.keys, memory.values, memory.decays, memory.inverses, solved,
                *where_from, width, depth, num_tokens, BLOCK=block, **both, **how, **four,
            )  # fmt: skip
            _states_kernel[(batch, shape.value_heads, shape.value_dim // _BLOCK)](
                k, decays, memory.keys, memory.decays, solved, memory.states, passed, *where_from, width, depth,
                num_tokens, num_states, KEY_BLOCK=key_block, BLOCK=_BLOCK, **both, **how, **four,
            )  # fmt: skip
            del solved  # what follows may take its memory
        if width:
            tile_rows = _FEW_ROWS if width <= _FEW_ROWS else CHUNK_TOKENS
            tiles = triton.cdiv(width, tile_rows) if tree else num_chunks
            most = _BLOCK if width <= CHUNK_TOKENS else _WIDE_BLOCK
            asked, block = decays.new_empty(num_rows, shape.value_heads, shape.key_dim), min(most, key_block)
            _asked_kernel[(tiles, batch, shape.value_heads * (shape.key_dim // block))](
                q, k, decays, added, asked, memory.keys, memory.decays, *where, width, depth, num_tokens, BLOCK=block,
                TILED=shape.tiled, ROWS=tile_rows, TREE=tree, **dims, **four,
            )  # fmt: skip
            block = min(most, value_block)
            _results_kernel[(tiles, batch, shape.value_heads * (shape.value_dim // block))](
                asked, v, added, out, memory.values, memory.states, passed, *where_from, width, depth, num_tokens,
                num_states, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
                KEY_BLOCK=key_block, BLOCK=block, ROWS=tile_rows, TREE=tree, KEEPS=keeps, **four,
            )  # fmt: skip
            skipped = max(0, width - num_tokens)
            widest = max(shape.channels, shape.value_heads * max(shape.value_dim, CHUNK_TOKENS))
            _keep_kernel[(width - skipped, batch, triton.cdiv(widest, _COPIED))](
                inputs, k, v, decays, subtracted, memory.inputs, memory.keys, memory.values, memory.decays,
                memory.inverses, rows.memory_rows, rows.starts, rows.counts, width, num_tokens, skipped,
                CHANNELS=shape.channels, KEY_SIZE=shape.key_heads * shape.key_dim,
                VALUE_SIZE=shape.value_heads * shape.value_dim, HEADS=shape.value_heads, BLOCK=_COPIED, num_warps=4,
            )  # fmt: skip
    return out.view(num_rows, shape.value_heads * shape.value_dim)
