"""bf16 matrices in 12 bits an element, without loss: the lower byte as it is, the upper one in four bits.

The upper byte is the sign and seven bits of the exponent, of which three bits have an index:

    seven bits = first + index + (delta if index > 0 else 0);    listed apart for exceptions, whose index is 0

`first` and `delta` are the row's own, those with the fewest exceptions: either delta is 0, so that eight values of the
seven bits follow one another, which are 16 exponents, side by side as trained weights have them; or first is 0, for
rows with many zeros, and seven values follow one another elsewhere. Additions decode them, where any eight would take
a table.

Rows are stored one after the other, each by itself: any of them can be decoded alone, and all take the same bytes,
which are known before a weight is read. With K columns and room for E exceptions, a row is

    low       K        lower bytes
    index     K / 2    sign above index, of columns 64 n + i in the lower half of a byte, of 64 n + 32 + i in the upper
    near      K / 64   of each 256 columns two exceptions, uint16: column within them, change; 0 where there is none
    column    2 E      of each further exception, uint16
    change    E        of each of them: the seven bits, exclusive or first
    delta, first, count, the last three bytes; `count` of the E exceptions are there

The first two planes are in the order in which a warp hands weights to the matrix units: of each 32 bytes eight belong
to one of four lanes, and of a word the first and third, the second and fourth are neighbours. So a lane makes whole
words of the result out of whole words of both planes, in three operations an element, and none moves between lanes.
The mean of exceptions in Gaussian rows is 0.007 % of the columns, in those of Student's t with three degrees of freedom
0.04 %.
"""

from typing import NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.gguf_blocks import units_at, within

CODED = "12-bit BF16"  # what it is called
_SPAN = 64  # columns whose indices lie in the same 32 bytes
_TILE = 256
_NEAR = 2  # exceptions of a tile beside it
_FAR = 8  # further ones of a row, for which there is room at the least
_TAIL_BYTES = 3
_MOST_COLUMNS = 1 << 16
_MOST_EXCEPTIONS = 255
_ALIGNMENT_BYTES = 16  # of rows, for vector loads
_DECODED_ROWS = 16  # of a program
_REFERENCE_ELEMENTS = 1 << 20  # decoded at a time
_CODED_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 22}  # at a time: some 60 MB of a GPU, which is waited for each time


class CodedRow(NamedTuple):
    """How a row lies in `nbytes`; there is `room` for exceptions beside the two of every tile."""

    columns: int
    room: int
    nbytes: int

    @classmethod
    def of(cls, columns: int) -> "CodedRow | None":
        """None where rows of so many columns are not coded: 64 must divide them, and code take fewer bytes."""
        near_end = columns + columns // 2 + 2 * _NEAR * -(-columns // _TILE)
        nbytes = -(-(near_end + 3 * _FAR + _TAIL_BYTES) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if columns % _SPAN or columns > _MOST_COLUMNS or nbytes >= 2 * columns:
            return None
        return cls(columns, min(_MOST_EXCEPTIONS, (nbytes - near_end - _TAIL_BYTES) // 3), nbytes)

    @property
    def tiles(self) -> int:
        """Stretches of 256 columns, the last of which may be shorter."""
        return -(-self.columns // _TILE)

    @property
    def far_start(self) -> int:
        """The first byte of the further exceptions."""
        return self.columns + self.columns // 2 + 2 * _NEAR * self.tiles


def _in_lanes(stored: torch.Tensor, together: int) -> torch.Tensor:
    """Bytes of a plane [R, N], of which those of so many units lie together in each lane, in the order of the columns:
    [R, ..., unit, word, upper pair, lane, column of the pair]."""
    return stored.view(len(stored), -1, 4, together, 2, 2, 2).permute(0, 1, 3, 4, 6, 2, 5)


def _planes(stored: torch.Tensor, row: CodedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first two planes of coded rows, in the order of the columns."""
    low, index = stored[:, : row.columns], stored[:, row.columns : row.columns + row.columns // 2]
    return _in_lanes(low, 2), _in_lanes(index, 1)


def _exceptions(stored: torch.Tensor, row: CodedRow) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of coded rows uint8 [R, nbytes]: near ones int16 [R, tiles, 2], columns of the further ones int16 [R, room]
    and their changes uint8 [R, room]."""
    start = row.far_start
    near = stored[:, row.columns + row.columns // 2 : start].view(torch.int16).unflatten(1, (-1, _NEAR))
    columns = stored[:, start : start + 2 * row.room].view(torch.int16)
    return near, columns, stored[:, start + 2 * row.room : start + 3 * row.room]


def _ranks(group: torch.Tensor, count: int) -> torch.Tensor:
    """Of ascending numbers of groups below `count` the place of each within its group."""
    sizes = torch.bincount(group, minlength=count)
    return torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group]


def _windows(upper: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """first and delta of rows of seven bits [R, K], with the fewest exceptions: uint8 [R, 1] each. Of several that have
    as few, the lowest, on every device."""
    number = torch.arange(len(upper), dtype=torch.int32, device=upper.device)[:, None]
    histogram = torch.bincount((number * 128 + upper).view(-1), minlength=128 * len(upper)).view(-1, 128)
    below = torch.nn.functional.pad(histogram.cumsum(1), (1, 0))
    together = below[:, 8:] - below[:, :-8]
    with_zeros = histogram[:, :1] + below[:, 9:] - below[:, 2:-7]
    order = torch.arange(128, 7, -1, device=upper.device)
    covered, first = (together * 256 + order).max(1, keepdim=True)
    covered_with_zeros, delta = (with_zeros * 256 + order[1:]).max(1, keepdim=True)
    zeros = covered_with_zeros // 256 > covered // 256
    return (first * ~zeros).to(torch.uint8), ((delta + 1) * zeros).to(torch.uint8)


def _encode(values: torch.Tensor, row: CodedRow, out: torch.Tensor) -> int:
    count, bits = len(values), values.view(torch.int16)
    upper = (bits >> 8).to(torch.uint8) & 127
    first, delta = _windows(upper)
    index = upper - first - delta  # wraps
    index *= index < 8
    out.zero_()
    low, in_index = _planes(out, row)
    low.copy_(bits.to(torch.uint8).view(low.shape))
    lower, higher = (index | (bits < 0).to(torch.uint8) << 3).view(count, -1, 2, _SPAN // 2).unbind(2)
    in_index.copy_((lower | higher << 4).reshape(in_index.shape))
    at, column = ((index == 0) & (upper != first)).nonzero(as_tuple=True)
    change = (upper ^ first)[at, column]
    near, far_columns, far_changes = _exceptions(out, row)
    tile = column // _TILE
    place = _ranks(at * row.tiles + tile, count * row.tiles)
    beside = place < _NEAR
    slots = (column % _TILE | change.long() << 8).to(torch.int16)  # wraps
    near[at[beside], tile[beside], place[beside]] = slots[beside]
    at, column, change = at[~beside], column[~beside], change[~beside]
    further, place = torch.bincount(at, minlength=count), _ranks(at, count)
    fits = place < row.room
    at, column, place = at[fits], column[fits], place[fits]
    far_columns[at, place] = column.to(torch.int16)  # wraps
    far_changes[at, place] = change[fits]
    out[:, -3:] = torch.cat((delta, first, further.clamp(max=row.room).to(torch.uint8)[:, None]), dim=1)
    return int((further > row.room).sum())


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
    low, index = _planes(stored, row)
    nibbles = index.reshape(count, -1, _SPAN // 2)
    nibbles = torch.stack((nibbles & 15, nibbles >> 4), 2).view(count, columns)
    index, (delta, first, further) = nibbles & 7, stored[:, -3:].split(1, dim=1)
    upper = first + index + delta * (index != 0)
    near, far_columns, far_changes = _exceptions(stored, row)
    at, tile, place = near.nonzero(as_tuple=True)
    slots = near[at, tile, place].long()
    upper[at, tile * _TILE + (slots & 255)] ^= (slots >> 8 & 255).to(torch.uint8)
    at, place = (torch.arange(row.room, device=stored.device) < further).nonzero(as_tuple=True)
    upper[at, far_columns[at, place].long() & 0xFFFF] ^= far_changes[at, place]
    upper |= nibbles >> 3 << 7
    out.view(torch.uint8).view(count, columns, 2).copy_(torch.stack((low.reshape(count, columns), upper), dim=2))


def decode_rows_reference(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    """Plain torch version of `decode_rows`."""
    step = max(1, _REFERENCE_ELEMENTS // row.columns)
    for rows, part in zip(stored.split(step), out.view(torch.int16).split(step), strict=True):
        _decode_reference(rows, row, part)


# --- kernels; a tensor [R, 8] has two words of each of the four lanes of a row


@jit
def load_coded(row_ptr, tile, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """What is stored of a tile of rows: words of the first two planes, and the word with its two exceptions [R, 1].
    `row_ptr` is [R, 1] of uint8; behind a row's last column are others' weights."""
    low = units_at(row_ptr, tile, COLUMNS, 256, COLUMNS % 256 == 0, ROWS)
    index_ptr = (row_ptr + COLUMNS).to(tl.pointer_type(tl.uint32)) + tl.arange(0, 8)[None, :]
    index = ()  # type: tuple[object, ...]
    for unit in tl.static_range(4):
        index += (tl.load(index_ptr + within(tile * 4 + unit, COLUMNS // 64, COLUMNS % 256 == 0) * 8),)
    near_ptr = (row_ptr + COLUMNS + COLUMNS // 2).to(tl.pointer_type(tl.uint32))
    return low, index, tl.load(near_ptr + tile)


@jit
def _uppers(index, signs, first, delta):
    """Four upper bytes in a word, of words that have three bits of index, and signs above others; all uint32."""
    there = ((index + 0x07070707) >> 3) & 0x01010101
    return (index + first * 0x01010101 + there * delta) | (signs & 0x80808080)


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
def uppers_of(
    index, near, row_ptr, tail, most, tile, FAR_START: tl.constexpr, ROOM: tl.constexpr, FAR: tl.constexpr
):  # fmt: skip
    """Words [R, 8] with the upper bytes of a tile, unit after unit. `tail` are delta, first and the count of further
    exceptions of rows [R, 1], which have at most so many, if any: `FAR`."""
    delta, first, count = tail
    found = ()  # type: tuple[object, ...]
    for unit in tl.static_range(4):
        words = index[unit]
        found += (
            _uppers(words & 0x07070707, words << 4, first, delta),
            _uppers((words >> 4) & 0x07070707, words, first, delta),
        )
    found = _changed(found, near & 255, (near >> 8) & 255)
    found = _changed(found, (near >> 16) & 255, near >> 24)
    # With the second condition, which always holds, the loop is no part of the one around it, whose loads the compiler
    # takes ahead of their use where no loop is inside.
    if FAR and most > 0:
        column_ptr = (row_ptr + FAR_START).to(tl.pointer_type(tl.uint16))
        for place in range(most):
            there = place < count
            column = tl.load(column_ptr + place, mask=there, other=0).to(tl.uint32)
            change = tl.load(row_ptr + FAR_START + 2 * ROOM + place, mask=there, other=0).to(tl.uint32)
            found = _changed(found, column % 256, tl.where(column // 256 == tile, change, 0))
    return found


@jit
def tail_of(row_ptr, ROW_BYTES: tl.constexpr):
    """delta, first and count of rows, uint32 [R, 1] each."""
    delta = tl.load(row_ptr + ROW_BYTES - 3).to(tl.uint32)
    return delta, tl.load(row_ptr + ROW_BYTES - 2).to(tl.uint32), tl.load(row_ptr + ROW_BYTES - 1).to(tl.uint32)


@jit
def _elements(low, upper):
    """[R, 8, 2, 2] bits of words of lower and of upper bytes: column of a pair, upper pair."""
    even = (low & 0x00FF00FF) | ((upper << 8) & 0xFF00FF00)
    odd = ((low >> 8) & 0x00FF00FF) | (upper & 0xFF00FF00)
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


@jit(do_not_specialize=("num_rows",))
def _decode_rows_kernel(
    stored_ptr, out_ptr, num_rows, COLUMNS: tl.constexpr, FAR_START: tl.constexpr, ROOM: tl.constexpr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    tile = tl.program_id(1)
    # What lies behind the last row reads that row and stores nothing.
    row_ptr = stored_ptr + tl.minimum(row, num_rows - 1) * ROW_BYTES
    tail = tail_of(row_ptr, ROW_BYTES)
    low, index, near = load_coded(row_ptr, tile, COLUMNS, ROWS)
    uppers = uppers_of(index, near, row_ptr, tail, tl.max(tail[2]), tile, FAR_START, ROOM, True)
    bits = tl.join(half_of(low, uppers, 0, ROWS), half_of(low, uppers, 1, ROWS))
    bits = tl.reshape(tl.permute(bits, (0, 7, 1, 2, 3, 4, 5, 6)), [ROWS, 256])
    column = tile * 256 + tl.arange(0, 256)[None, :]
    tl.store(out_ptr + row * COLUMNS + column, bits, mask=(row < num_rows) & (column < COLUMNS))


def decode_rows_triton(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    """Triton version of `decode_rows`."""
    require_triton("decoding 12-bit weights")
    with torch.cuda.device_of(stored):
        _decode_rows_kernel[(triton.cdiv(len(stored), _DECODED_ROWS), row.tiles)](
            stored, out.view(torch.uint16), len(stored), COLUMNS=row.columns, FAR_START=row.far_start, ROOM=row.room,
            ROW_BYTES=row.nbytes, ROWS=_DECODED_ROWS, num_warps=2,
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
