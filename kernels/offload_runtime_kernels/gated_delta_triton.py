"""Triton version of `gated_delta`: convolution, decays, products of keys, the chunks one after the other, what is kept.

Only the chunks' kernel is sequential, a program for some channels of a value head: the products of keys and queries are
made before it by as many programs as there are tiles. Row numbers t count a sequence's rows of the pass, offsets p the
tokens of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

if TYPE_CHECKING:
    from offload_runtime_kernels.gated_delta import DeltaMemory, DeltaRows, DeltaShape, DeltaWeights

CHUNK_TOKENS, NORM_EPS = 64, 1e-6
_CHUNK = tl.constexpr(CHUNK_TOKENS)
_STEP = tl.constexpr(32)  # of sums, which are unrolled so far
_FEW = tl.constexpr(16)
# Most rows of tiles of 16, and of such products; channels of a value head, and of a kept row, that a program has.
_FEW_ROWS, _MANY_ROWS, _BLOCK, _COPIED = 16, 256, 32, 1024


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


@jit(do_not_specialize=("width", "depth", "num_tokens"))
def _convolution_kernel(
    inputs_ptr, kept_ptr, taps_ptr, q_ptr, k_ptr, v_ptr, rows_ptr, starts_ptr, counts_ptr, positions_ptr, ancestors_ptr,
    width, depth, num_tokens, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    b = row // width
    t = row % width
    if t < tl.load(counts_ptr + b):
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        is_value = head >= 2 * KEY_HEADS
        dim = tl.where(is_value, VALUE_DIM, KEY_DIM)
        first = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
        lane = tl.arange(0, BLOCK)
        inside = lane < dim
        start = tl.load(starts_ptr + b)
        position = tl.load(positions_ptr + row)
        kept_ptr += tl.load(rows_ptr + b).to(tl.int64) * num_tokens * channels + first
        inputs_ptr += b.to(tl.int64) * width * channels + first
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            at = position - (TAPS - 1) + tap
            if at >= start:
                source = (
                    inputs_ptr + _row_on_path(ancestors_ptr + b * width * depth, t, at, start, depth, TREE) * channels
                )
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


@jit(do_not_specialize=("width", "depth", "num_tokens"))
def _decays_kernel(
    gates_ptr, log_rates_ptr, time_steps_ptr, kept_ptr, decays_ptr, betas_ptr, rows_ptr, starts_ptr, counts_ptr,
    positions_ptr, ancestors_ptr, width, depth, num_tokens, beta_scale, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    b = row // width
    t = row % width
    if t < tl.load(counts_ptr + b):
        lane = tl.arange(0, BLOCK)
        inside = lane < HEADS
        start = tl.load(starts_ptr + b)
        position = tl.load(positions_ptr + row)
        first = position // _CHUNK * _CHUNK
        rate = -tl.exp(tl.load(log_rates_ptr + lane, mask=inside, other=0.0).to(tl.float32))
        time_step = tl.load(time_steps_ptr + lane, mask=inside, other=0.0).to(tl.float32)
        at = tl.load(rows_ptr + b).to(tl.int64) * num_tokens + tl.maximum(start - 1, 0) % num_tokens
        total = tl.load(kept_ptr + at * HEADS + lane, mask=inside & (lane * 0 + start > first), other=0.0)
        for place in range(tl.maximum(first, start), position + 1):
            other = _row_on_path(ancestors_ptr + b * width * depth, t, place, start, depth, TREE)
            alpha = tl.load(gates_ptr + ((b * width + other) * 2 + 1) * HEADS + lane, mask=inside, other=0.0)
            total += rate * _softplus(alpha.to(tl.float32) + time_step)
        tl.store(decays_ptr + row * HEADS + lane, total, mask=inside)
        beta = tl.load(gates_ptr + row * 2 * HEADS + lane, mask=inside, other=0.0)
        sigmoid = (1.0 / (1.0 + tl.exp(-beta.to(tl.float32)))).to(beta.dtype)
        tl.store(betas_ptr + row * HEADS + lane, sigmoid.to(tl.float32) * beta_scale, mask=inside)


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
    valid, below, KEY_DIM: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """What each value head of a key head, which lie so far `APART`, has of the products of rows [I] and keys [J], from
    pointers to either."""
    kk = tl.zeros([ROWS, OTHERS], dtype=tl.float32)
    qk = tl.zeros([ROWS, OTHERS], dtype=tl.float32)
    for first in range(0, KEY_DIM, _STEP):
        channel = first + tl.arange(0, _STEP)
        keys = tl.load(key_rows[None, :] + channel[:, None], mask=there[None, :], other=0.0).to(tl.float32)
        k = tl.load(k_rows[:, None] + channel[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        q = tl.load(q_rows[:, None] + channel[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        kk = tl.dot(k, keys, kk, input_precision="ieee")
        qk = tl.dot(q, keys, qk, input_precision="ieee")
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
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, TILED: tl.constexpr, ROWS: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    tile, b, key_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    apart: tl.constexpr = KEY_HEADS if TILED else 1
    head = key_head if TILED else key_head * group  # the first of those that share it
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
                betas_ptr + of_head, of_head[:, None] * _CHUNK + p[None, :], inside, old, valid, valid, KEY_DIM, group,
                apart, ROWS, _CHUNK,
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
                valid & (other[None, :] < t[:, None]), KEY_DIM, group, apart, ROWS, ROWS,
            )  # fmt: skip


@jit
def _contributions(
    products_ptr, values_ptr, positions_ptr, ancestors_ptr, of_products, others, rows, end, positions, chunk, inside,
    first_row, start, depth, head, columns, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Of rows [I] in a chunk the products with those of `others` [J] before `end` that are on their paths, themselves
    included, and the pseudo-values of these: [I, J] and [J, columns]."""
    there = others < end
    other_positions = tl.load(positions_ptr + first_row + others, mask=there, other=-64)
    there = there & (other_positions // _CHUNK == chunk)
    valid = inside[:, None] & there[None, :]
    if TREE:
        valid = _on_path(ancestors_ptr, rows, others, positions, other_positions, start, depth, valid)
    else:
        valid = valid & (others[None, :] <= rows[:, None])
    products = tl.load(products_ptr + of_products + (other_positions % _CHUNK)[None, :], mask=valid, other=0.0)
    of_others = ((first_row + others).to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUE_DIM + columns[None, :]
    return products, tl.load(values_ptr + of_others, mask=there[:, None], other=0.0)


@jit(do_not_specialize=("width", "depth", "num_tokens"))
def _chunks_kernel(
    q_ptr, k_ptr, v_ptr, decays_ptr, betas_ptr, subtracted_ptr, added_ptr, values_ptr, recalled_ptr, out_ptr,
    states_ptr, folded_ptr, kept_keys_ptr, kept_values_ptr, kept_decays_ptr, rows_ptr, starts_ptr, bases_ptr,
    counts_ptr, positions_ptr, ancestors_ptr, width, depth, num_tokens,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH_BLOCK: tl.constexpr, TREE: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    b, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    start = tl.load(starts_ptr + b)
    count = tl.load(counts_ptr + b)
    memory_row = tl.load(rows_ptr + b).to(tl.int64)
    column = part * BLOCK + tl.arange(0, BLOCK)
    step, few = tl.arange(0, _STEP), tl.arange(0, _FEW)
    own_step: tl.constexpr = _STEP if ROWS > 16 else ROWS
    # The state lies in memory; what it becomes within a pass that may be undone lies elsewhere.
    state_ptr = states_ptr + (memory_row * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    next_ptr = state_ptr
    if not KEEPS:
        next_ptr = folded_ptr + (b * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    ancestors_ptr += b * width * depth
    stop = start + count
    if TREE:
        all_rows = tl.arange(0, WIDTH_BLOCK)
        all_positions = tl.load(positions_ptr + b * width + all_rows, mask=all_rows < count, other=-64)
        stop = tl.maximum(tl.max(all_positions, axis=0) + 1, start)
    for chunk in range(tl.load(bases_ptr + b), tl.cdiv(stop, _CHUNK)):
        chunk_start = chunk * _CHUNK
        num_old = tl.minimum(tl.maximum(start - chunk_start, 0), _CHUNK)
        begin = 0
        end = count
        if not TREE:
            begin = tl.maximum(chunk_start - start, 0)
            end = tl.minimum(count, chunk_start + _CHUNK - start)
        # What the state and the tokens that memory has contribute to many rows at once,
        for first in range(begin, end, ROWS):
            t = first + tl.arange(0, ROWS)
            inside = t < end
            row = (b * width + t).to(tl.int64)
            inside = inside & (tl.load(positions_ptr + row, mask=inside, other=-64) // _CHUNK == chunk)
            of_keys = (row * KEY_HEADS + key_head) * KEY_DIM
            of_values = (row[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
            u = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            recalled = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            for channel in range(0, KEY_DIM, _STEP):
                state = tl.load(state_ptr + (channel + step)[:, None] * VALUE_DIM + column[None, :])
                of_channel = of_keys[:, None] + (channel + step)[None, :]
                k = tl.load(k_ptr + of_channel, mask=inside[:, None], other=0.0).to(tl.float32)
                q = tl.load(q_ptr + of_channel, mask=inside[:, None], other=0.0).to(tl.float32)
                u = tl.dot(k, state, u, input_precision="ieee")
                recalled = tl.dot(q, state, recalled, input_precision="ieee")
            v = tl.load(v_ptr + of_values, mask=inside[:, None], other=0.0)
            fading = tl.exp(tl.load(decays_ptr + row * VALUE_HEADS + head, mask=inside, other=0.0))[:, None]
            beta = tl.load(betas_ptr + row * VALUE_HEADS + head, mask=inside, other=0.0)
            u = beta[:, None] * (v.to(tl.float32) - fading * u)
            for p in range(0, num_old, _STEP):
                old = p + step < num_old
                at = memory_row * num_tokens + (chunk_start + p + step) % num_tokens
                of_old = (at[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
                values = tl.load(kept_values_ptr + of_old, mask=old[:, None], other=0.0)
                places = (row[:, None] * VALUE_HEADS + head) * _CHUNK + (p + step)[None, :]
                subtracted = tl.load(subtracted_ptr + places, mask=inside[:, None] & old[None, :], other=0.0)
                u = tl.dot(-subtracted, values, u, input_precision="ieee")
            tl.store(values_ptr + of_values, u, mask=inside[:, None])
            tl.store(recalled_ptr + of_values, fading * recalled, mask=inside[:, None])
        tl.debug_barrier()  # between stores of this program and its loads
        # then what rows contribute to each other, one after the other within a few,
        for first in range(begin, end, _FEW):
            t = first + few
            inside = t < end
            row = (b * width + t).to(tl.int64)
            position = tl.load(positions_ptr + row, mask=inside, other=-64)
            inside = inside & (position // _CHUNK == chunk)
            of_values = (row[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
            of_products = (row[:, None] * VALUE_HEADS + head) * _CHUNK
            u = tl.load(values_ptr + of_values, mask=inside[:, None], other=0.0)
            for other_first in range(begin, first, _FEW):
                subtracted, values = _contributions(
                    subtracted_ptr, values_ptr, positions_ptr, ancestors_ptr, of_products, other_first + few, t, first,
                    position, chunk, inside, b * width, start, depth, head, column, VALUE_HEADS, VALUE_DIM, TREE,
                )  # fmt: skip
                u = tl.dot(-subtracted, values, u, input_precision="ieee")
            subtracted, _ = _contributions(
                subtracted_ptr, values_ptr, positions_ptr, ancestors_ptr, of_products, t, t, end, position, chunk,
                inside, b * width, start, depth, head, column, VALUE_HEADS, VALUE_DIM, TREE,
            )  # fmt: skip
            subtracted = tl.where(few[None, :] < few[:, None], subtracted, 0.0)
            for j in range(tl.minimum(_FEW, end - first)):
                own_u = tl.sum(tl.where((few == j)[:, None], u, 0.0), axis=0)
                factor = tl.sum(tl.where((few == j)[None, :], subtracted, 0.0), axis=1)
                u = u - factor[:, None] * own_u[None, :]
            tl.store(values_ptr + of_values, u, mask=inside[:, None])
            tl.debug_barrier()
        # and what all of it contributes to results.
        for first in range(begin, end, ROWS):
            t = first + tl.arange(0, ROWS)
            inside = t < end
            row = (b * width + t).to(tl.int64)
            position = tl.load(positions_ptr + row, mask=inside, other=-64)
            inside = inside & (position // _CHUNK == chunk)
            of_values = (row[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
            of_products = (row[:, None] * VALUE_HEADS + head) * _CHUNK
            out = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            for p in range(0, num_old, _STEP):
                old = p + step < num_old
                at = memory_row * num_tokens + (chunk_start + p + step) % num_tokens
                of_old = (at[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
                values = tl.load(kept_values_ptr + of_old, mask=old[:, None], other=0.0)
                known = inside[:, None] & old[None, :]
                added = tl.load(added_ptr + of_products + (p + step)[None, :], mask=known, other=0.0)
                out = tl.dot(added, values, out, input_precision="ieee")
            for other_first in range(begin, tl.minimum(first + ROWS, end), own_step):
                added, values = _contributions(
                    added_ptr, values_ptr, positions_ptr, ancestors_ptr, of_products,
                    other_first + tl.arange(0, own_step), t, end, position, chunk, inside, b * width, start, depth,
                    head, column, VALUE_HEADS, VALUE_DIM, TREE,
                )  # fmt: skip
                out = tl.dot(added, values, out, input_precision="ieee")
            out += tl.load(recalled_ptr + of_values, mask=inside[:, None], other=0.0)
            tl.store(out_ptr + of_values, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        goes_on = stop > chunk_start + _CHUNK
        if KEEPS:
            goes_on = stop >= chunk_start + _CHUNK
        if goes_on:
            leads_on = 0
            if TREE:
                leads_on = tl.min(tl.where(all_positions // _CHUNK == chunk + 1, all_rows, WIDTH_BLOCK), axis=0)
            if num_old == _CHUNK:
                at = memory_row * num_tokens + (chunk_start + _CHUNK - 1) % num_tokens
                last_g = tl.load(kept_decays_ptr + at * VALUE_HEADS + head)
            else:
                last = _row_on_path(ancestors_ptr, leads_on, chunk_start + _CHUNK - 1, start, depth, TREE)
                last_g = tl.load(decays_ptr + (b * width + last).to(tl.int64) * VALUE_HEADS + head)
            for channel in range(0, KEY_DIM, _STEP):
                of_state = (channel + step)[:, None] * VALUE_DIM + column[None, :]
                state = tl.exp(last_g) * tl.load(state_ptr + of_state)
                for p in range(0, _CHUNK, _STEP):
                    position = chunk_start + p + step
                    old = position < start
                    new = position >= start
                    row = b * width + tl.where(new, position - start, 0)
                    if TREE:
                        place = ancestors_ptr + leads_on * depth + tl.where(new, position - start, 0)
                        row = b * width + tl.where(new, tl.load(place, mask=new, other=0) - start, 0)
                    of_new = row.to(tl.int64)
                    of_old = memory_row * num_tokens + position % num_tokens
                    g = tl.load(decays_ptr + of_new * VALUE_HEADS + head, mask=new, other=0.0)
                    g += tl.load(kept_decays_ptr + of_old * VALUE_HEADS + head, mask=old, other=0.0)
                    lane = (channel + step)[:, None]
                    place = ((of_new * KEY_HEADS + key_head) * KEY_DIM)[None, :] + lane
                    keys = tl.load(k_ptr + place, mask=new[None, :], other=0.0).to(tl.float32)
                    place = ((of_old * KEY_HEADS + key_head) * KEY_DIM)[None, :] + lane
                    keys += tl.load(kept_keys_ptr + place, mask=old[None, :], other=0.0).to(tl.float32)
                    place = ((of_new * VALUE_HEADS + head) * VALUE_DIM)[:, None] + column[None, :]
                    values = tl.load(values_ptr + place, mask=new[:, None], other=0.0)
                    place = ((of_old * VALUE_HEADS + head) * VALUE_DIM)[:, None] + column[None, :]
                    values += tl.load(kept_values_ptr + place, mask=old[:, None], other=0.0)
                    faded = keys * tl.exp(last_g - g)[None, :]
                    state = tl.dot(faded, values, state, input_precision="ieee")
                tl.store(next_ptr + of_state, state)
            tl.debug_barrier()
            state_ptr = next_ptr


@jit
def _copy_row(source_ptr, target_ptr, row, at, column, WIDTH: tl.constexpr):
    inside = column < WIDTH
    tl.store(target_ptr + at * WIDTH + column, tl.load(source_ptr + row * WIDTH + column, mask=inside), mask=inside)


@jit(do_not_specialize=("width", "num_tokens", "skipped"))
def _keep_kernel(
    inputs_ptr, k_ptr, values_ptr, decays_ptr, kept_inputs_ptr, kept_keys_ptr, kept_values_ptr, kept_decays_ptr,
    rows_ptr, starts_ptr, counts_ptr, width, num_tokens, skipped,
    CHANNELS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, b = skipped + tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if t < tl.load(counts_ptr + b):
        row = (b * width + t).to(tl.int64)
        at = tl.load(rows_ptr + b).to(tl.int64) * num_tokens + (tl.load(starts_ptr + b) + t) % num_tokens
        _copy_row(inputs_ptr, kept_inputs_ptr, row, at, column, CHANNELS)
        _copy_row(k_ptr, kept_keys_ptr, row, at, column, KEY_SIZE)
        _copy_row(values_ptr, kept_values_ptr, row, at, column, VALUE_SIZE)
        _copy_row(decays_ptr, kept_decays_ptr, row, at, column, HEADS)


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
    values, recalled = (torch.empty_like(v, dtype=torch.float32) for _ in range(2))
    decays, betas = values.new_empty(2, num_rows, shape.value_heads)
    subtracted, added = values.new_empty(2, num_rows, shape.value_heads, CHUNK_TOKENS)
    where = (rows.memory_rows, rows.starts, rows.counts, rows.positions, ancestors)
    heads = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads, "KEY_DIM": shape.key_dim}
    tile_rows = _FEW_ROWS if width <= _FEW_ROWS else CHUNK_TOKENS
    with torch.cuda.device_of(inputs):
        if width:
            _convolution_kernel[(num_rows, 2 * shape.key_heads + shape.value_heads)](
                inputs, memory.inputs, weights.taps, q, k, v, *where, width, depth, num_tokens, NORM_EPS,
                shape.key_dim**-0.5, VALUE_DIM=shape.value_dim, TAPS=shape.taps, TREE=tree,
                BLOCK=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)), num_warps=1, **heads,
            )  # fmt: skip
            _decays_kernel[(num_rows,)](
                gates, weights.log_rates, weights.time_steps, memory.decays, decays, betas, *where, width, depth,
                num_tokens, shape.beta_scale, HEADS=shape.value_heads, TREE=tree, num_warps=1,
                BLOCK=triton.next_power_of_2(shape.value_heads),
            )  # fmt: skip
            few = _FEW_ROWS if width <= _MANY_ROWS else CHUNK_TOKENS
            tiles = (
                triton.cdiv(width, few)
                if tree
                else triton.cdiv(width + CHUNK_TOKENS - 1, CHUNK_TOKENS) * (CHUNK_TOKENS // few)
            )
            _products_kernel[(tiles, batch, shape.key_heads)](
                q, k, memory.keys, decays, memory.decays, betas, subtracted, added, *where, width, depth, num_tokens,
                TILED=shape.tiled, ROWS=few, TREE=tree, num_warps=4, **heads,
            )  # fmt: skip
        # What a state becomes on the way, where the rows may be undone.
        folded = memory.states if keeps else memory.states.new_empty(batch, *memory.states.shape[1:])
        _chunks_kernel[(batch, shape.value_heads, shape.value_dim // _BLOCK)](
            q, k, v, decays, betas, subtracted, added, values, recalled, out, memory.states, folded, memory.keys,
            memory.values, memory.decays, rows.memory_rows, rows.starts, rows.bases, rows.counts, rows.positions,
            ancestors, width, depth, num_tokens, VALUE_DIM=shape.value_dim, TILED=shape.tiled, BLOCK=_BLOCK,
            ROWS=tile_rows, WIDTH_BLOCK=triton.next_power_of_2(max(1, width)), TREE=tree, KEEPS=keeps, num_warps=4,
            **heads,
        )  # fmt: skip
        skipped = max(0, width - num_tokens)
        widest = max(shape.channels, shape.value_heads * shape.value_dim)
        if width:
            _keep_kernel[(width - skipped, batch, triton.cdiv(widest, _COPIED))](
                inputs, k, values, decays, memory.inputs, memory.keys, memory.values, memory.decays, rows.memory_rows,
                rows.starts, rows.counts, width, num_tokens, skipped, CHANNELS=shape.channels,
                KEY_SIZE=shape.key_heads * shape.key_dim, VALUE_SIZE=shape.value_heads * shape.value_dim,
                HEADS=shape.value_heads, BLOCK=_COPIED, num_warps=4,
            )  # fmt: skip
    return out.view(num_rows, shape.value_heads * shape.value_dim)
