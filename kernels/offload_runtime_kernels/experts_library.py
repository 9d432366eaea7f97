"""Routed experts of many rows by the library's products in fp32, with the bits of `experts_triton`.

What an element of a product is, one chain of multiply-adds over ascending columns, is also what the library computes in
fp32 as long as it cuts nothing along the columns. So experts are decoded into memory, rounded to the run's dtype and
stored in fp32, a group of them at a time, and their rows, gathered in fp32, multiplied there. A group has about as many
rows of each expert, filled up to one height; of every height and shape the first product that a process does is one of
heavy-tailed values, compared with that of the kernel. What the library does in another order is left to the kernel, and
so are experts of few rows, for which decoding takes longer than multiplying.

The host has to know how many rows each expert has, for which it waits: this is for prompts, and never in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.experts_triton import FEW_TOKENS, ExpertTile, Routes, expert_rows_triton, gated_in_fp32
from offload_runtime_kernels.gguf_blocks import FORMATS, KIND_DTYPES, decode_half, load_tile, units_at
from offload_runtime_kernels.linear import has_bits_of_rule
from offload_runtime_kernels.scaled_rows import STEP, ScaledFormat, ScaledRow, decoded_half, shared_words_at

if TYPE_CHECKING:
    from offload_runtime_kernels.experts import ExpertShape, StoredMatrices

# Experts of at least so many rows are multiplied by the library, in passes that have so many of an expert on average.
LIBRARY_ROWS = 128
# Rows of a product are filled up to a multiple of this, which bounds how many heights have to be compared.
_HEIGHT_STEP = 64
_SLICE_STEP = 64  # likewise rows of a part of a matrix
_MOST_HEIGHT = 1024  # of more rows of an expert a group has the first ones
# What a group takes at most: decoded matrices, and rows. Of gpt-oss-120b's experts, two, and 1408 rows.
_MATRIX_BYTES, _ROW_BYTES = 128 << 20, 64 << 20
_TOKENS_TOGETHER = 1024  # of those experts that are left to the kernels, which takes memory by the token
_DECODED_ROWS, _COLUMNS_TOGETHER = 32, 1024
_COMPARED = ExpertTile(32, 64, 16, 4, 3)  # how the kernel's products in fp32 are cut: larger tiles take more registers


@dataclass(frozen=True)
class LibraryCut:
    """What is done at a time.

    Attributes:
        items: Most experts of a group.
        gate_up_rows, down_rows: Most rows of a matrix that are decoded together; fewer than all only of one expert.
        rows: Most rows of a group, those that fill it up included.
        matrix_bytes: Of decoded matrices.
        row_bytes: Of a row: what is multiplied, its products, and what the activation makes of them, all in fp32.
    """

    items: int
    gate_up_rows: int
    down_rows: int
    rows: int
    matrix_bytes: int
    row_bytes: int

    @classmethod
    def of(cls, shape: ExpertShape, *, matrix_bytes: int = _MATRIX_BYTES) -> LibraryCut:
        """Cut what experts of a shape do, with so much memory for decoded matrices."""
        largest = 4 * max(2 * shape.inner * shape.hidden, shape.hidden * shape.inner)
        items = min(shape.num_experts, max(1, matrix_bytes // largest))
        gate_up_rows, down_rows = (
            min(height, max(1, matrix_bytes // (4 * _SLICE_STEP * width)) * _SLICE_STEP)
            for height, width in _sizes(shape)
        )
        taken = 4 * items * max(gate_up_rows * shape.hidden, down_rows * shape.inner)
        row_bytes = 4 * (shape.hidden + max(2 * shape.inner, shape.hidden) + shape.inner)
        rows = min(max(1, _ROW_BYTES // row_bytes // _HEIGHT_STEP) * _HEIGHT_STEP, items * _MOST_HEIGHT)
        return cls(items, gate_up_rows, down_rows, rows, -(-taken // 16) * 16, row_bytes)

    @property
    def height(self) -> int:
        """Most rows of one expert."""
        return min(self.rows, _MOST_HEIGHT)

    @property
    def nbytes(self) -> int:
        """What a group takes."""
        return self.matrix_bytes + self.rows * self.row_bytes


def _sizes(shape: ExpertShape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of both matrices."""
    return (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)


def library_scratch_bytes(shape: ExpertShape, tokens: int, num_chosen: int) -> int:
    """Return the bytes of memory in which passes of up to so many tokens are multiplied by the library; 0 where they
    never are."""
    return LibraryCut.of(shape).nbytes if tokens * num_chosen >= LIBRARY_ROWS * shape.num_experts else 0


class _Item(NamedTuple):
    """Rows of an expert: the buffer that it lies in, and which of the sorted rows they are; a row of the table."""

    buffer: int
    expert: int
    start: int
    num_rows: int


class _Group(NamedTuple):
    """Items that are multiplied together: their numbers in the table, and the height they are filled up to."""

    first: int
    items: Sequence[_Item]
    height: int


def _groups(items: Sequence[_Item], cut: LibraryCut) -> Iterator[_Group]:
    """Cut items, of which the one with most rows comes first, into groups."""
    first = 0
    while first < len(items):
        height = -(-items[first].num_rows // _HEIGHT_STEP) * _HEIGHT_STEP
        own = items[first : first + max(1, min(cut.items, cut.rows // height))]
        yield _Group(first, own, height)
        first += len(own)


# --- kernels
#
# Program axis 1 (of the decoding kernel 2) is the item of a group, whose row of the table says what it is about.


@jit(do_not_specialize=("first", "start", "num_rows"))
def _decode_kernel(
    pool_ptr, x_ptr, table_ptr, out_ptr, first, start, num_rows, buffer_stride, K: tl.constexpr, FORM: tl.constexpr,
    ROW: tl.constexpr, BLOCKS: tl.constexpr, ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decode rows of each item's matrix, from `start` on, rounded to the dtype of x, into [items, num_rows, K] fp32."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    item, step = tl.program_id(2), tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = step * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    written = (row < num_rows) & (column < K)
    # What lies behind the last row reads that row and stores nothing.
    read = (start + tl.minimum(row, num_rows - 1)).to(tl.int64)
    w_ptr = pool_ptr + tl.load(table_ptr + 4 * (first + item)).to(tl.int64) * buffer_stride
    if ROW is not None:
        number: tl.constexpr = ROW.number
        scale: tl.constexpr = ROW.scale_type
        w_ptrs = w_ptr + read * ROW_BYTES
        units = units_at(w_ptrs, step, ROW.numbers_bytes, 16 * ROW.bits, K % COLUMNS == 0, ROWS)
        at = step // ROW.steps if ROW.group > 0 else 0
        scale_ptrs, zero_ptrs = w_ptrs + ROW.numbers_bytes, w_ptrs + ROW.zeros_at
        shared = shared_words_at(scale_ptrs, zero_ptrs, at, ROW.bits, ROW.zeros, ROW.group, scale, ROWS, COLUMNS)
        w = decoded_half(
            units, shared, 0, number, ROW.bits, ROW.zero, ROW.zeros, ROW.group, scale, dtype, ROWS, True
        )  # fmt: skip
    elif FORM is None:
        w = tl.load(w_ptr + read * K + column, mask=written, other=0.0).to(dtype)
    else:
        planes = load_tile(w_ptr + read * ROW_BYTES, step, BLOCKS, FORM, K % COLUMNS == 0, ROWS)
        w = tl.join(decode_half(planes, 0, FORM, ROWS, dtype, True), decode_half(planes, 1, FORM, ROWS, dtype, True))
        w = tl.reshape(tl.permute(w, (0, 7, 1, 2, 3, 4, 5, 6)), [ROWS, COLUMNS])
    out_ptrs = out_ptr + (item * num_rows + row).to(tl.int64) * K + column
    tl.store(out_ptrs, w.to(tl.float32), mask=written)


@jit(do_not_specialize=("first", "height"))
def _gather_kernel(
    x_ptr, order_ptr, table_ptr, out_ptr, first, height, K: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the rows of x that items have, in fp32, [items, height, K]; behind the last one it comes again."""
    item, i = tl.program_id(1), tl.program_id(0)
    table_ptr += 4 * (first + item)
    wanted = tl.load(table_ptr + 2) + tl.minimum(i, tl.load(table_ptr + 3) - 1)
    token = tl.load(order_ptr + wanted).to(tl.int64) // NUM_CHOSEN
    for at in range(0, K, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * K + column, mask=column < K, other=0.0)
        tl.store(out_ptr + (item * height + i).to(tl.int64) * K + column, x.to(tl.float32), mask=column < K)


@jit(do_not_specialize=("first", "height"))
def _gated_kernel(
    sums_ptr, x_ptr, table_ptr, bias_ptr, out_ptr, first, height, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what the second matrices multiply, rounded to the dtype of x, in fp32, of sums [items, height, 2 WIDTH]."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    item = tl.program_id(1)
    row = (item * height + tl.program_id(0)).to(tl.int64)
    sums_ptr += row * 2 * WIDTH
    if HAS_BIAS:
        bias_ptr += tl.load(table_ptr + 4 * (first + item) + 1).to(tl.int64) * 2 * WIDTH
    for at in range(0, WIDTH, BLOCK):
        column = at + tl.arange(0, BLOCK)
        gate = tl.load(sums_ptr + column, mask=column < WIDTH, other=0.0)
        up = tl.load(sums_ptr + WIDTH + column, mask=column < WIDTH, other=0.0)
        if HAS_BIAS:
            gate += tl.load(bias_ptr + 2 * column, mask=column < WIDTH, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + 2 * column + 1, mask=column < WIDTH, other=0.0).to(tl.float32)
        h = gated_in_fp32(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, LIMIT, ALPHA)
        tl.store(out_ptr + row * WIDTH + column, h.to(dtype).to(tl.float32), mask=column < WIDTH)


@jit(do_not_specialize=("first", "height"))
def _scatter_kernel(
    sums_ptr, order_ptr, table_ptr, bias_ptr, out_ptr, first, height, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write results, of sums [items, height, WIDTH], to the rows that they are of."""
    item, i = tl.program_id(1), tl.program_id(0)
    table_ptr += 4 * (first + item)
    if i < tl.load(table_ptr + 3):
        row = tl.load(order_ptr + tl.load(table_ptr + 2) + i).to(tl.int64)
        sums_ptr += (item * height + i).to(tl.int64) * WIDTH
        if HAS_BIAS:
            bias_ptr += tl.load(table_ptr + 1).to(tl.int64) * WIDTH
        for at in range(0, WIDTH, BLOCK):
            column = at + tl.arange(0, BLOCK)
            y = tl.load(sums_ptr + column, mask=column < WIDTH, other=0.0)
            if HAS_BIAS:
                y += tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=column < WIDTH)


# --- launches


def decode_experts(
    matrices: StoredMatrices, x: torch.Tensor, table: torch.Tensor, first: int, start: int, out: torch.Tensor
) -> None:
    """Write rows of the matrices of some experts, from `start` on, as the dtype of x has them, [items, rows, K] fp32.

    Args:
        matrices: Of all experts.
        x: Of the dtype; nothing of it is read.
        table: int32 [items, 4]: in its first column the buffers, from the item `first` on.
    """
    num_items, num_rows, columns = out.shape
    how, pool, row, form = matrices.encoding, matrices.data, None, None
    if isinstance(how, ScaledFormat):
        row = ScaledRow.of(how, columns)
    elif how in FORMATS:
        form = FORMATS[how]
    else:
        pool = pool.view(KIND_DTYPES[how])
    together = STEP if row else 256
    grid = (triton.cdiv(num_rows, _DECODED_ROWS), triton.cdiv(columns, together), num_items)
    _decode_kernel[grid](
        pool, x, table, out, first, start, num_rows, pool.stride(0), K=columns, FORM=form, ROW=row,
        BLOCKS=form and form.num_blocks(columns), ROW_BYTES=matrices.row_bytes, ROWS=_DECODED_ROWS, COLUMNS=together,
        num_warps=4,
    )  # fmt: skip


def _has_bits_of_kernel(
    rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, spare: torch.Tensor, matrices: StoredMatrices
) -> bool:
    """Whether the library's products of rows [items, height, K] with weights [items, N, K] have the bits of the
    kernel's. All is fp32, and what the first such product of a process is done with is overwritten.

    Args:
        out: [items, height, N], where products are written; of at least as many elements as rows.
        spare: Other memory, of at least as many elements as a row of `out` of each item.
    """
    (num_items, height, columns), num_rows = rows.shape, weights.shape[1]

    def agrees() -> bool:
        generator = torch.Generator(rows.device).manual_seed(0)
        weights.normal_(generator=generator)
        rows.normal_(generator=generator).exp_()  # heavy-tailed, so that sums in another order are others
        rows.mul_(torch.randn(columns, generator=generator, device=rows.device))
        torch.bmm(rows, weights.mT, out=out)
        choices = torch.arange(num_items, device=rows.device).repeat_interleave(height)[:, None]
        routes, together = Routes.of(choices, num_items), spare.numel() // (num_items * height)
        for start in range(0, num_rows, together):
            some = weights[:, start : start + together]
            stored = replace(
                matrices, data=some.flatten(1).view(torch.uint8), encoding="F32", rows=some.shape[1], columns=columns
            )
            expected = spare[: num_items * height * stored.rows].view(num_items, height, -1)
            routes.product(rows.view(-1, columns), stored, None, None, expected, tile=_COMPARED)
            if not torch.equal(out[:, :, start : start + together], expected):
                return False
        return True

    return has_bits_of_rule(("experts", rows.device, *rows.shape, *weights.shape, out.stride(1)), agrees)


def expert_rows_library(
    x: torch.Tensor, choices: torch.Tensor, gate_up: StoredMatrices, down: StoredMatrices, shape: ExpertShape, *,
    buffers: torch.Tensor | None, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, out: torch.Tensor,
    scratch: torch.Tensor, cut: LibraryCut | None = None, fewest_rows: int = LIBRARY_ROWS, compares: bool = True,
) -> None:  # fmt: skip
    """Version of `expert_rows` by the library; waits for the current stream once, and enqueues everything on it.

    Args:
        scratch: uint8, of at least the bytes of `cut`, at an address that 16 divides; what shares it is enqueued on the
            same stream.
        cut: Overrides what is done at a time.
        fewest_rows: Of an expert that the library multiplies.
        compares: Whether the library's bits are compared with the kernel's; False: its products are taken as they are.
    """
    require_triton("experts")
    assert len(choices) > FEW_TOKENS, "rows are sorted"
    cut = cut or LibraryCut.of(shape)
    with torch.cuda.device_of(x):
        one = _LibraryPass(x, Routes.of(choices, shape.num_experts), gate_up, down, shape, cut, scratch)
        words = one.routes.starts if buffers is None else torch.cat((one.routes.starts, buffers))
        numbers = words.tolist()
        starts = numbers[: shape.num_experts + 1]
        places = numbers[shape.num_experts + 1 :] or [*range(shape.num_experts)]
        items, left = list[_Item](), set[int]()
        for expert, (buffer, (start, end)) in enumerate(zip(places, pairwise(starts), strict=True)):
            if buffer < 0 or start == end:
                continue
            if end - start < fewest_rows:
                left.add(expert)
                continue
            firsts = range(start, end, cut.height)
            items += (_Item(buffer, expert, first, min(cut.height, end - first)) for first in firsts)
        items.sort(key=lambda item: item.num_rows, reverse=True)
        table = _uploaded(items or [(0, 0, 0, 0)], x.device)
        for group in _groups(items, cut):
            if compares and not one.agrees(group):
                left.update(item.expert for item in group.items)
            else:
                one.multiply(group, table, gate_up_bias, down_bias, out)
        if left:
            own = _uploaded([buffer if expert in left else -1 for expert, buffer in enumerate(places)], x.device)
            for first in range(0, len(x), _TOKENS_TOGETHER):
                some = slice(first, first + _TOKENS_TOGETHER)
                expert_rows_triton(
                    x[some], choices[some], gate_up, down, shape, buffers=own, gate_up_bias=gate_up_bias,
                    down_bias=down_bias, out=out[some],
                )  # fmt: skip


def _uploaded(numbers: Sequence[object], device: torch.device) -> torch.Tensor:
    """Numbers as int32 on a device, without waiting for it."""
    found = torch.tensor(numbers, dtype=torch.int32)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


@dataclass(frozen=True, eq=False)
class _LibraryPass:
    """Rows, sorted by expert, and memory for what is done with them a group at a time."""

    x: torch.Tensor
    routes: Routes
    gate_up: StoredMatrices
    down: StoredMatrices
    shape: ExpertShape
    cut: LibraryCut
    scratch: torch.Tensor

    def __post_init__(self) -> None:
        assert self.scratch.dtype == torch.uint8 and self.scratch.nbytes >= self.cut.nbytes

    def agrees(self, group: _Group) -> bool:
        """Whether the library has the bits of all products of a group."""
        rows, sums, h = self._rows(group)
        gate_up = self._slices(group, self.gate_up, self.cut.gate_up_rows, sums)
        down = self._slices(group, self.down, self.cut.down_rows, sums)
        return all(
            _has_bits_of_kernel(rows, weights, out, h.view(-1), self.gate_up) for _, weights, out in gate_up
        ) and all(_has_bits_of_kernel(h, weights, out, rows.view(-1), self.down) for _, weights, out in down)

    def multiply(
        self, group: _Group, table: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write what the experts of a group make of their rows."""
        x, order, shape, (first, items, height) = self.x, self.routes.order, self.shape, group
        rows, sums, h = self._rows(group)
        grid, num_chosen = (height, len(items)), self.routes.choices.shape[1]
        # Triton wants a pointer for every argument; an unused one may point anywhere.
        _gather_kernel[grid](
            x, order, table, rows, first, height, K=shape.hidden, NUM_CHOSEN=num_chosen, BLOCK=_COLUMNS_TOGETHER,
            num_warps=4,
        )  # fmt: skip
        self._multiply(group, table, rows, self.gate_up, self.cut.gate_up_rows, sums)
        _gated_kernel[grid](
            sums, x, table, x if gate_up_bias is None else gate_up_bias, h, first, height, WIDTH=shape.inner,
            HAS_BIAS=gate_up_bias is not None, LIMIT=shape.limit, ALPHA=shape.alpha, BLOCK=_COLUMNS_TOGETHER,
            num_warps=4,
        )  # fmt: skip
        self._multiply(group, table, h, self.down, self.cut.down_rows, sums)
        _scatter_kernel[grid](
            sums, order, table, x if down_bias is None else down_bias, out, first, height, WIDTH=shape.hidden,
            HAS_BIAS=down_bias is not None, BLOCK=_COLUMNS_TOGETHER, num_warps=4,
        )  # fmt: skip

    def _rows(self, group: _Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Memory for what is multiplied, [items, height, H], for products, and for what the activation makes of them,
        [items, height, I]: all fp32, behind the decoded matrices."""
        count, (hidden, inner) = len(group.items) * group.height, (self.shape.hidden, self.shape.inner)
        memory = self.scratch[self.cut.matrix_bytes : self.cut.nbytes].view(torch.float32)
        sizes = [count * hidden, count * max(2 * inner, hidden), count * inner]
        rows, sums, h = memory[: sum(sizes)].split(sizes)
        shape = len(group.items), group.height
        return rows.view(*shape, hidden), sums, h.view(*shape, inner)

    def _slices(
        self, group: _Group, matrices: StoredMatrices, most: int, memory: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return memory for decoded rows of the group's matrices, [items, rows, K] fp32, and of the products
        [items, height, N] in `memory` those with them; and which is the first of the rows. All slices of the matrices
        lie in the same memory, one after the other."""
        num_items, height, columns = len(group.items), group.height, matrices.columns
        out = memory[: num_items * height * matrices.rows].view(num_items, height, -1)
        for start in range(0, matrices.rows, most):
            own = out[:, :, start : start + most]
            sizes = num_items, own.shape[2], columns
            weights = self.scratch[: 4 * sizes[0] * sizes[1] * sizes[2]].view(torch.float32).view(sizes)
            yield start, weights, own

    def _multiply(
        self, group: _Group, table: torch.Tensor, rows: torch.Tensor, matrices: StoredMatrices, most: int,
        memory: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write the products of rows [items, height, K] with the group's matrices, [items, height, N] fp32."""
        for start, weights, out in self._slices(group, matrices, most, memory):
            decode_experts(matrices, self.x, table, group.first, start, weights)
            torch.bmm(rows, weights.mT, out=out)
