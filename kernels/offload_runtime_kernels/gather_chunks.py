"""Bring newly chosen chunks of keys and values into a small device cache, straight from the blocks they lie in.

A chunk that is chosen again stays where it is. The j-th newly chosen chunk takes the j-th place that is free: first the
assignment (one program per head, looking up the old list in the new), then the copies. A block is addressed by a
pointer, so it may lie in device memory or in page-locked host memory, which the GPU reads over the link. A head's
chunk is contiguous in a block, keys and values each: 2 KiB for 8 tokens of 128 channels in 16 bits.
"""

from dataclasses import dataclass

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.chunk_summaries import is_chunk_size
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

_BLOCK = tl.constexpr(BLOCK_TOKENS)
_ALIGNMENT = 16  # bytes of the widest load
# Programs of a head that share its copies: enough for a tenth of 512 places in one go, few where nothing moves.
_GATHER_PROGRAMS = 64


@dataclass(frozen=True)
class BlockTable:
    """Where the blocks of one layer lie: for kernels by address, for plain torch as tensors.

    `pointers` [B, N] int64 on the device that gathers; the addresses must be valid there: its own memory, or
    page-locked host memory. `blocks[b][n]` is the tensor [2, H_kv, 256, D] itself, which is thereby kept alive (but not
    page-locked: that is its owner's). Whoever moves or unlocks a block puts its new place here first.
    """

    pointers: torch.Tensor
    blocks: list[dict[int, torch.Tensor]]

    @classmethod
    def empty(cls, batch: int, capacity_blocks: int, device: torch.device) -> "BlockTable":
        """A table of `batch` sequences of at most `capacity_blocks` blocks, none of them known yet."""
        return cls(torch.zeros(batch, capacity_blocks, dtype=torch.int64, device=device), [{} for _ in range(batch)])

    def rows(self, start: int, stop: int) -> "BlockTable":
        """The table of sequences `start` to `stop`, not a copy."""
        return BlockTable(self.pointers[start:stop], self.blocks[start:stop])

    def put(self, slot: int, first_block: int, run: torch.Tensor) -> None:
        """Enter consecutive blocks of a sequence.

        Args:
            sequence: Batch row.
            first_block: Absolute number of the first.
            run: [n, 2, H_kv, 256, D], every block contiguous and aligned to 16 bytes.

        Enqueues on the current stream (one launch), never synchronises.
        """
        count, step = run.shape[0], run.stride(0) * run.element_size()
        assert first_block + count <= self.pointers.shape[1], "more blocks than the table has room for"
        assert run.shape[3] == BLOCK_TOKENS and run[0].is_contiguous()
        assert run.data_ptr() % _ALIGNMENT == 0 and (count == 1 or (step > 0 and step % _ALIGNMENT == 0))
        here = self.pointers[slot, first_block : first_block + count]
        if count == 1:
            here.fill_(run.data_ptr())
        else:
            torch.arange(run.data_ptr(), run.data_ptr() + count * step, step, out=here)
        for number, block in enumerate(run.unbind(0), start=first_block):
            self.blocks[slot][number] = block


def _assign_reference(
    selected: torch.Tensor, resident: torch.Tensor, used: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Free places and the chunks that come into them, [B, H_kv, K] each, in order; -1 for no place and no chunk."""
    wanted = selected >= 0
    place = torch.arange(resident.shape[2], device=resident.device)
    inside = place < wanted.sum(-1, keepdim=True)  # chosen chunks fill the first places without a gap
    same = (resident[..., :, None] == selected[..., None, :]) & inside[..., :, None] & wanted[..., None, :]
    free, new = ~same.any(-1), wanted & ~same.any(-2)
    if used is not None:
        free, new = (lists & (used > 0)[:, None, None] for lists in (free, new))
    places = (~free).byte().argsort(dim=-1, stable=True).where(place < free.sum(-1, keepdim=True), -1)
    order = (~new).byte().argsort(dim=-1, stable=True)
    arrivals = selected.gather(-1, order).where(place < new.sum(-1, keepdim=True), -1)
    return places, arrivals


def gather_chunks_reference(
    selected: torch.Tensor, resident: torch.Tensor, source: BlockTable, data: KVBlocks, *, chunk_size: int,
    used: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `gather_chunks`."""
    places, arrivals = _assign_reference(selected, resident, used)
    for b, h, j in (places >= 0).nonzero().tolist():
        place, chunk = int(places[b, h, j]), int(arrivals[b, h, j])
        resident[b, h, place] = chunk
        if chunk < 0:
            continue
        block, first = divmod(chunk * chunk_size, BLOCK_TOKENS)
        into_block, into = divmod(place * chunk_size, BLOCK_TOKENS)
        data.data[b, into_block, :, h, into : into + chunk_size] = source.blocks[b][block][
            :, h, first : first + chunk_size
        ]
    return (arrivals >= 0).sum(-1, dtype=torch.int32)


# A kernel is made for where its pointers are aligned, and how many sequences and places there are decides about these.
_ANYWHERE = ("resident_ptr", "places_ptr", "arrivals_ptr")


@jit(do_not_specialize=("used_ptr", "num_places", *_ANYWHERE))
def _assign_kernel(
    selected_ptr, resident_ptr, used_ptr, present_ptr, places_ptr, arrivals_ptr, num_free_ptr, num_moved_ptr,
    num_places, NUM_KV_HEADS: tl.constexpr, K_BLOCK: tl.constexpr, STEPS: tl.constexpr, HAS_USED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    selected_ptr += head * num_places
    resident_ptr += head * num_places
    present_ptr += head * num_places
    lane = tl.arange(0, K_BLOCK)
    selected = tl.load(selected_ptr + lane, mask=lane < num_places, other=-1)
    resident = tl.load(resident_ptr + lane, mask=lane < num_places, other=-1)
    count = tl.sum((selected >= 0).to(tl.int32), axis=0)
    tl.store(present_ptr + lane, tl.zeros([K_BLOCK], dtype=tl.int32), mask=lane < num_places)
    # How many chosen chunks lie before each resident one: the selection is in order, so it is halved step by step.
    before = tl.zeros([K_BLOCK], dtype=tl.int32)
    for step in tl.static_range(STEPS):
        probe = before + (K_BLOCK >> step) - 1
        other = tl.load(selected_ptr + probe, mask=probe < count, other=2147483647)
        before = tl.where(other < resident, before + (K_BLOCK >> step), before)
    found = tl.load(selected_ptr + before, mask=before < count, other=-2) == resident
    # A chunk in a place that is no longer in use has to move into one that is.
    kept = found & (lane < count) & (resident >= 0)
    tl.debug_barrier()  # the zeros before the ones, and the ones before they are read by other threads
    tl.store(present_ptr + before, tl.full([K_BLOCK], 1, tl.int32), mask=kept)
    tl.debug_barrier()
    present = tl.load(present_ptr + lane, mask=lane < num_places, other=0)
    free = ((lane < num_places) & (kept == 0)).to(tl.int32)
    moved = ((selected >= 0) & (present == 0)).to(tl.int32)
    if HAS_USED:  # without a free place nothing moves
        stays = (tl.load(used_ptr + head // NUM_KV_HEADS) == 0).to(tl.int32)
        free *= 1 - stays
        moved *= 1 - stays
    num_free = tl.sum(free, axis=0)
    num_moved = tl.sum(moved, axis=0)
    # Only the first `num_free` of both lists are read; of the arrivals those behind the last are -1.
    tl.store(places_ptr + head * num_places + tl.cumsum(free, axis=0) - 1, lane, mask=free > 0)
    arrivals_ptr += head * num_places
    tl.store(arrivals_ptr + tl.cumsum(moved, axis=0) - 1, selected, mask=moved > 0)
    tl.store(arrivals_ptr + lane, tl.full([K_BLOCK], -1, tl.int32), mask=(lane >= num_moved) & (lane < num_free))
    tl.store(num_free_ptr + head, num_free)
    tl.store(num_moved_ptr + head, num_moved)


@jit(do_not_specialize=("pointers_ptr", "num_places", "pointers_stride", *_ANYWHERE))
def _gather_kernel(
    pointers_ptr, data_ptr, resident_ptr, places_ptr, arrivals_ptr, num_free_ptr, num_places, pointers_stride,
    stride_batch, stride_block, stride_kv,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    batch = head // NUM_KV_HEADS
    in_block = (head % NUM_KV_HEADS) * (_BLOCK * HEAD_DIM)
    lane = tl.arange(0, LANES)
    inside = lane < CHUNK * HEAD_DIM
    for j in range(tl.program_id(1), tl.load(num_free_ptr + head), tl.num_programs(1)):
        place = tl.load(places_ptr + head * num_places + j)
        chunk = tl.load(arrivals_ptr + head * num_places + j)
        tl.store(resident_ptr + head * num_places + place, chunk)
        if chunk >= 0:
            token = chunk * CHUNK
            address = tl.load(pointers_ptr + batch * pointers_stride + token // _BLOCK)
            # What the compiler cannot know of an address from memory, and needs for 16-byte loads.
            block = tl.multiple_of(address.to(data_ptr.dtype), ALIGNMENT)
            source = block + in_block + (token % _BLOCK) * HEAD_DIM + lane
            keys = tl.load(source, mask=inside)
            values = tl.load(source + NUM_KV_HEADS * _BLOCK * HEAD_DIM, mask=inside)
            cache_position = (place * CHUNK).to(tl.int64)
            target = data_ptr + batch * stride_batch + (cache_position // _BLOCK) * stride_block + in_block
            target += (cache_position % _BLOCK) * HEAD_DIM + lane
            tl.store(target, keys, mask=inside)
            tl.store(target + stride_kv, values, mask=inside)


def gather_chunks_triton(
    selected: torch.Tensor, resident: torch.Tensor, source: BlockTable, data: KVBlocks, *, chunk_size: int,
    used: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `gather_chunks`: two launches."""
    require_triton("gather_chunks")
    batch, num_kv_heads, num_places = selected.shape
    head_dim = data.head_dim
    heads = batch * num_kv_heads
    present, places, arrivals = torch.empty(3, heads, num_places, dtype=torch.int32, device=selected.device)
    num_free = torch.empty(heads, dtype=torch.int32, device=selected.device)
    num_moved = torch.empty(batch, num_kv_heads, dtype=torch.int32, device=selected.device)
    block, lanes = triton.next_power_of_2(num_places), triton.next_power_of_2(chunk_size * head_dim)
    with torch.cuda.device_of(data.data):
        _assign_kernel[(heads,)](
            selected, resident, resident if used is None else used, present, places, arrivals, num_free, num_moved,
            num_places, NUM_KV_HEADS=num_kv_heads, K_BLOCK=block, STEPS=block.bit_length(),
            HAS_USED=used is not None, num_warps=4,
        )  # fmt: skip
        _gather_kernel[(heads, min(num_places, _GATHER_PROGRAMS))](
            source.pointers, data.data, resident, places, arrivals, num_free, num_places,
            source.pointers.stride(0), *data.data.stride()[:3],
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, CHUNK=chunk_size, LANES=lanes, ALIGNMENT=_ALIGNMENT,
            num_warps=max(1, min(8, lanes * data.data.element_size() // (32 * _ALIGNMENT))),
        )  # fmt: skip
    return num_moved


def gather_chunks(
    selected: torch.Tensor, resident: torch.Tensor, source: BlockTable, data: KVBlocks, *, chunk_size: int,
    used: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Make `data` hold the selected chunks, moving only those that it does not hold yet.

    Args:
        selected: [B, H_kv, K] int32, contiguous: chunks of each head in ascending order, none twice, then -1 for
            none; they fill the first places, as many as there are, without a gap.
        resident: [B, H_kv, K] int32, contiguous, updated in place: the chunk in every place, -1 for none.
        source: Where the blocks of those chunks lie.
        data: [B, at least K * chunk_size / 256, 2, H_kv, 256, D], written in place; place i is the tokens from
            i * chunk_size on. Its `first_block` is 0.
        chunk_size: Tokens of a chunk, a power of two up to 64.
        used: [B] int32 on the device: 0 leaves a sequence as it is, whatever was selected. None: all are served.

    Returns:
        [B, H_kv] int32 on the device: chunks that were moved.

    Enqueues on the current stream and never synchronises; on the CPU it is done on return. Blocks must be complete and
    must not change before it is done.
    """
    batch, num_kv_heads, num_places = selected.shape
    assert selected.dtype == resident.dtype == torch.int32 and resident.shape == selected.shape
    assert selected.is_contiguous() and resident.is_contiguous() and is_chunk_size(chunk_size)
    assert data.first_block == 0 and data.num_blocks * BLOCK_TOKENS >= num_places * chunk_size
    assert data.data.shape[0] == batch == source.pointers.shape[0] and data.num_kv_heads == num_kv_heads
    assert used is None or (used.shape == (batch,) and used.dtype == torch.int32 and used.is_contiguous())
    run = gather_chunks_triton if data.data.is_cuda else gather_chunks_reference
    return run(selected, resident, source, data, chunk_size=chunk_size, used=used)
