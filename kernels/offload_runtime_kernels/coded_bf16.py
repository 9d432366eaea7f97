"""bf16 matrices in 12 bits an element, without loss: the lower byte as it is, the upper one in four bits.

The upper byte is the sign and seven bits of the exponent, for which three bits are an index in a table of eight:

    seven bits = table[index];    listed apart for exceptions, whose index is 0

The first four of a table are the row's most frequent ones, the others those of 256 columns beside these. Seven bits
have the exponents of two neighbouring powers of two, so that tables hold nearly all that trained weights have: of a
million Gaussian ones one is an exception, of Student's t with three degrees of freedom 60 are. A GPU looks four bytes
up in eight in one instruction.

Rows are stored one after the other, each by itself: any of them can be decoded alone, and all take the same bytes,
which are known before a weight is read. With K columns and room for E exceptions, a row is

    low       K        lower bytes
    index     K / 2    words of eight indices and signs
    table     K / 64   of each 256 columns the second half of the table
    column    2 E      of each exception, uint16
    change    E        of each of them: the seven bits, exclusive or the first of the table
    first half of all tables, count: the last five bytes; `count` of the E exceptions are there

The first two planes are in the order in which a warp hands weights to the matrix units: of each 32 bytes eight belong
to one of four lanes, and of a word the first and third, the second and fourth are neighbours. So a lane makes whole
words of the result out of whole words of both planes, in one and a half operations an element, and none moves between
lanes. Of each 64 columns in a word of `index`, bits 0 to 2 of four half-bytes are the indices of one word of `low`, of
the other four those of the word 32 columns behind it; bit 3 of the odd half-bytes are the signs of the first, of the
even ones those of the second.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.gguf_blocks import TILE, picked_bytes, units_at, within
from offload_runtime_kernels.scaled_rows import exchange

CODED = "12-bit BF16"  # what it is called
_SPAN = 64  # columns whose indices lie in the same 32 bytes
_SHARED = 4  # of a table of eight, what all tables of a row have
_TILE_BYTES = 4  # of each 256 columns: what their table has besides
_TAIL_BYTES = _SHARED + 1
# Bits of a word and how far above them those are that they change places with: they bring the indices of its bytes'
# lower halves side by side, and those of the upper ones.
_EXCHANGES = ((0x00700070, 4), (0x00007700, 8))
_MOST_COLUMNS = 1 << 16
_MOST_EXCEPTIONS = 255
_ALIGNMENT_BYTES = 16  # of rows, for vector loads
_DECODED_ROWS = 16  # of a program
_REFERENCE_ELEMENTS = 1 << 20  # decoded at a time
_CODED_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 21}  # at a time: some 60 MB of a GPU, which is waited for each time


class CodedRow(NamedTuple):
    """How a row lies in `nbytes`; there is `room` for exceptions."""

    columns: int
    room: int
    nbytes: int

    @classmethod
    def of(cls, columns: int) -> "CodedRow | None":
        """None where rows of so many columns are not coded: 64 must divide them, and code take fewer bytes."""
        tiles = -(-columns // TILE)
        tables_end = columns + columns // 2 + _TILE_BYTES * tiles
        least = tables_end + 3 * (6 + 3 * tiles // 8) + _TAIL_BYTES
        nbytes = -(-least // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if columns % _SPAN or columns > _MOST_COLUMNS or nbytes >= 2 * columns:
            return None
        return cls(columns, min(_MOST_EXCEPTIONS, (nbytes - tables_end - _TAIL_BYTES) // 3), nbytes)

    @property
    def tiles(self) -> int:
        """Stretches of 256 columns, the last of which may be shorter."""
        return -(-self.columns // TILE)

    @property
    def list_start(self) -> int:
        """The first byte of the exceptions."""
        return self.columns + self.columns // 2 + _TILE_BYTES * self.tiles


def _in_lanes(stored: torch.Tensor, together: int) -> torch.Tensor:
    """Bytes of a plane [R, N], of which those of so many units lie together in each lane, in the order of the columns:
    [R, ..., unit, word, upper pair, lane, column of the pair]."""
    return stored.view(len(stored), -1, 4, together, 2, 2, 2).permute(0, 1, 3, 4, 6, 2, 5)


def _planes(stored: torch.Tensor, row: CodedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first two planes of coded rows, in the order of the columns."""
    low, index = stored[:, : row.columns], stored[:, row.columns : row.columns + row.columns // 2]
    return _in_lanes(low, 2), _in_lanes(index, 1)


def _tables(stored: torch.Tensor, row: CodedRow) -> torch.Tensor:
    """View of the second halves of tables uint8 [R, tiles, 4]."""
    return stored[:, row.columns + row.columns // 2 : row.list_start].unflatten(1, (-1, _TILE_BYTES))


def _exceptions(stored: torch.Tensor, row: CodedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of coded rows uint8 [R, nbytes]: the columns of exceptions int16 [R, room] and their changes uint8."""
    middle = row.list_start + 2 * row.room
    return stored[:, row.list_start : middle].view(torch.int16), stored[:, middle : middle + row.room]


def _most_frequent(histogram: torch.Tensor, count: int) -> torch.Tensor:
    """Of each row the values that occur most often; of several as frequent ones the lowest, on every device."""
    lowest_first = torch.arange(127, -1, -1, device=histogram.device)
    return (histogram * 128 + lowest_first).topk(count, dim=-1).indices


def _indices(upper: torch.Tensor, row: CodedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Of seven bits [R, K] the tables [R, tiles, 8], and where in its table each is: uint8 [R, K], 8 for exceptions."""
    count = len(upper)
    tile = torch.arange(row.columns, device=upper.device) // TILE
    tile = tile + row.tiles * torch.arange(count, device=upper.device)[:, None]
    key = tile * 128 + upper
    histogram = torch.bincount(key.view(-1), minlength=128 * row.tiles * count).view(count, row.tiles, 128)
    shared = _most_frequent(histogram.sum(1), _SHARED)[:, None].expand(-1, row.tiles, -1)
    own = _most_frequent(histogram.scatter(2, shared, -1), 8 - _SHARED)
    table = torch.cat((shared, own), dim=2)
    place = torch.full((count, row.tiles, 128), 8, dtype=torch.uint8, device=upper.device)
    place.scatter_(2, table, torch.arange(8, dtype=torch.uint8, device=upper.device).expand_as(table))
    return table.to(torch.uint8), place.view(-1)[key]


def _exchange_indices(stored: torch.Tensor, row: CodedRow, exchanges: Iterable[tuple[int, int]]) -> None:
    words = stored[:, row.columns : row.columns + row.columns // 2].view(torch.int32)
    for mask, shift in exchanges:
        exchange(words, mask, shift)


def _encode(values: torch.Tensor, row: CodedRow, out: torch.Tensor) -> int:
    count, bits = len(values), values.view(torch.int16)
    upper = (bits >> 8).to(torch.uint8) & 127
    table, index = _indices(upper, row)
    out.zero_()
    low, in_index = _planes(out, row)
    low.copy_(bits.to(torch.uint8).view(low.shape))
    lower, higher = (index & 7).view(count, -1, 2, _SPAN // 2).unbind(2)
    lower_sign, higher_sign = (bits < 0).to(torch.uint8).view(count, -1, 2, _SPAN // 2).unbind(2)
    in_index.copy_((lower | higher_sign << 3 | higher << 4 | lower_sign << 7).reshape(in_index.shape))
    _exchange_indices(out, row, _EXCHANGES)
    _tables(out, row).copy_(table[:, :, _SHARED:])
    at, column = (index == 8).nonzero(as_tuple=True)
    listed = torch.bincount(at, minlength=count)
    place = torch.arange(len(at), device=at.device) - (listed.cumsum(0) - listed)[at]  # among those of its row
    fits = place < row.room
    at, column, place = at[fits], column[fits], place[fits]
    exceptions, changes = _exceptions(out, row)
    exceptions[at, place] = column.to(torch.int16)  # wraps
    changes[at, place] = upper[at, column] ^ table[at, 0, 0]
    out[:, -_TAIL_BYTES:-1] = table[:, 0, :_SHARED]
    out[:, -1] = listed.clamp(max=row.room).to(torch.uint8)
    return int((listed > row.room).sum())


def encode_rows(values: torch.Tensor, row: CodedRow, out: torch.Tensor, device: torch.device) -> int:
    """Code rows with torch's operations, a piece at a time.

    Args:
        values: bf16 [R, columns], contiguous, on any device.
        row: How a row lies in its bytes.
        out: uint8 [R, nbytes], contiguous, on any device; written.
        device: Where to work.

    Returns:
        Rows that have more exceptions than room, of which `out` cannot be decoded. All is written.
    """
    assert values.dtype == torch.bfloat16 and values.is_contiguous() and values.shape[1] == row.columns
    assert out.dtype == torch.uint8 and out.is_contiguous() and out.shape == (len(values), row.nbytes)
    step, failed = max(1, _CODED_ELEMENTS[device.type] // row.columns), 0
    for rows, coded in zip(values.split(step), out.split(step), strict=True):
        made = torch.empty_like(coded, device=device)
        failed += _encode(rows.to(device), row, made)
        coded.copy_(made)
    if out.is_cuda:
        torch.cuda.current_stream(out.device).synchronize()
    return failed


def _decode_reference(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    count, columns = out.shape
    stored = stored.clone()
    _exchange_indices(stored, row, reversed(_EXCHANGES))
    low, index = _planes(stored, row)
    found = index.reshape(count, -1, _SPAN // 2)
    index = torch.stack((found & 7, found >> 4 & 7), 2).view(count, columns)
    signs = torch.stack((found & 128, found << 4 & 128), 2).view(count, columns)
    table = torch.cat((stored[:, None, -_TAIL_BYTES:-1].expand(-1, row.tiles, -1), _tables(stored, row)), dim=2)
    tile = torch.arange(columns, device=stored.device) // TILE * 8
    upper = table.flatten(1).gather(1, tile + index.long())
    at, place = (torch.arange(row.room, device=stored.device) < stored[:, -1:]).nonzero(as_tuple=True)
    exceptions, changes = _exceptions(stored, row)
    upper[at, exceptions[at, place].long() & 0xFFFF] ^= changes[at, place]
    upper |= signs
    out.view(torch.uint8).view(count, columns, 2).copy_(torch.stack((low.reshape(count, columns), upper), dim=2))


def decode_rows_reference(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    """Plain torch version of `decode_rows`."""
    step = max(1, _REFERENCE_ELEMENTS // row.columns)
    for rows, part in zip(stored.split(step), out.view(torch.int16).split(step), strict=True):
        _decode_reference(rows, row, part)


# --- kernels; a tensor [R, 8] has two words of each of the four lanes of a row


@jit
def load_coded(row_ptr, tile, columns, WHOLE: tl.constexpr, ROWS: tl.constexpr):
    """What is stored of a tile of rows: words of the first two planes, and the second half of its table [R, 1].
    `row_ptr` is [R, 1] of uint8; with `WHOLE` the columns are whole tiles. Behind the last one are others' weights."""
    low = units_at(row_ptr, tile, columns, 256, WHOLE, ROWS)
    index_ptr = (row_ptr + columns).to(tl.pointer_type(tl.uint32)) + tl.arange(0, 8)[None, :]
    index = ()  # type: tuple[object, ...]
    for unit in tl.static_range(4):
        index += (tl.load(index_ptr + within(tile * 4 + unit, columns // 64, WHOLE) * 8),)
    table_ptr = (row_ptr + columns + columns // 2).to(tl.pointer_type(tl.uint32))
    return low, index, tl.load(table_ptr + tile)


@jit
def _changed(uppers, column, change):
    """Upper bytes of a tile, of which one in every row is changed; `column` within the tile, both [R, 1]."""
    word = column // 32 * 8 + column % 8 // 2 * 2 + column % 32 // 16
    change = change << (8 * (column % 2 * 2 + column % 16 // 8))
    found = ()  # type: tuple[object, ...]
    for unit in tl.static_range(8):
        found += (uppers[unit] ^ tl.where(unit * 8 + tl.arange(0, 8)[None, :] == word, change, 0),)
    return found


@jit
def uppers_of(index, table, tail, row_ptr, list_start, room, most, tile):
    """Words [R, 8] with the upper bytes of a tile, unit after unit. `tail` are the first half of tables and the count
    of exceptions of rows [R, 1], which have at most so many; where that is known to be none, nothing looks for any."""
    shared, count = tail
    found = ()  # type: tuple[object, ...]
    for unit in tl.static_range(4):
        words = index[unit]
        selector = words & 0x77777777
        found += (
            picked_bytes(shared, table, selector) | (words & 0x80808080),
            picked_bytes(shared, table, selector >> 16) | ((words << 4) & 0x80808080),
        )
    # As a condition, the loop is no part of the one around it, whose loads the compiler takes ahead of their use where
    # no loop is inside.
    if most > 0:
        column_ptr = (row_ptr + list_start).to(tl.pointer_type(tl.uint16))
        for place in range(most):
            there = place < count
            column = tl.load(column_ptr + place, mask=there, other=0).to(tl.uint32)
            change = tl.load(row_ptr + list_start + 2 * room + place, mask=there, other=0).to(tl.uint32)
            found = _changed(found, column % 256, tl.where(column // 256 == tile, change, 0))
    return found


@jit
def tail_of(row_ptr, row_bytes):
    """The first half of tables, and how many exceptions there are, of rows: uint32 [R, 1] each."""
    end_ptr = row_ptr + row_bytes
    shared = tl.load(end_ptr - 5).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        shared |= tl.load(end_ptr - 5 + byte).to(tl.uint32) << (8 * byte)
    return shared, tl.load(end_ptr - 1).to(tl.uint32)


@jit
def _elements(low, upper):
    """[R, 8, 2, 2] bits of words of lower and of upper bytes: column of a pair, upper pair."""
    even, odd = picked_bytes(low, upper, 0x6240), picked_bytes(low, upper, 0x7351)
    even = tl.join(even.to(tl.uint16), (even >> 16).to(tl.uint16))
    return tl.join(even, tl.join(odd.to(tl.uint16), (odd >> 16).to(tl.uint16)))


@jit
def half_of(low, uppers, HALF: tl.constexpr, ROWS: tl.constexpr):
    """[R, 2, 2, 2, 2, 4, 2]: bits of 128 columns, a half of a tile, of which each lane has those of its index in the
    dimension of four."""
    first: tl.constexpr = 4 * HALF
    found = tl.join(_elements(low[first], uppers[first]), _elements(low[first + 1], uppers[first + 1]))
    others = tl.join(_elements(low[first + 2], uppers[first + 2]), _elements(low[first + 3], uppers[first + 3]))
    # Rows, lane, word; column of a pair, upper pair; unit, of two.
    found = tl.reshape(tl.join(found, others), [ROWS, 4, 2, 2, 2, 2, 2])
    return tl.permute(found, (0, 6, 5, 2, 4, 1, 3))


@jit(do_not_specialize=("num_rows", "list_start", "room"))
def _decode_rows_kernel(
    stored_ptr, out_ptr, num_rows, columns, list_start, room, row_bytes, WHOLE: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    tile = tl.program_id(1)
    # What lies behind the last row reads that row and stores nothing.
    row_ptr = stored_ptr + tl.minimum(row, num_rows - 1) * row_bytes
    tail = tail_of(row_ptr, row_bytes)
    low, index, table = load_coded(row_ptr, tile, columns, WHOLE, ROWS)
    uppers = uppers_of(index, table, tail, row_ptr, list_start, room, tl.max(tail[1]), tile)
    bits = tl.join(half_of(low, uppers, 0, ROWS), half_of(low, uppers, 1, ROWS))
    bits = tl.reshape(tl.permute(bits, (0, 7, 1, 2, 3, 4, 5, 6)), [ROWS, 256])
    column = tile * 256 + tl.arange(0, 256)[None, :]
    tl.store(out_ptr + row * columns + column, bits, mask=(row < num_rows) & (column < columns))


def decode_rows_triton(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    """Triton version of `decode_rows`."""
    require_triton("decoding 12-bit weights")
    with torch.cuda.device_of(stored):
        _decode_rows_kernel[(triton.cdiv(len(stored), _DECODED_ROWS), row.tiles)](
            stored, out.view(torch.uint16), len(stored), row.columns, row.list_start, row.room, row.nbytes,
            WHOLE=row.columns % TILE == 0, ROWS=_DECODED_ROWS, num_warps=2,
        )  # fmt: skip


def decode_rows(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    """Decode whole rows, enqueued on the current stream of the device.

    Args:
        stored: uint8 [R, nbytes], contiguous, at an address that 16 divides.
        row: How a row lies in its bytes.
        out: bf16 [R, columns], contiguous; every element is written.
    """
    assert stored.dtype == torch.uint8 and stored.is_contiguous() and stored.shape[1] == row.nbytes
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == (len(stored), row.columns)
    (decode_rows_triton if stored.is_cuda else decode_rows_reference)(stored, row, out)
