"""Time updating the retrieved chunks of a layer, from page-locked host memory and from device memory.

    python tools/bench_gather_chunks.py [--commit HASH]

The bound is the bytes of the chunks that move over the link (its own memcpy peak), or over the device's copy bandwidth,
read and written. Beside it the plain way, for the same chunks: torch's indexing where the blocks are, then a copy, with
the list of what to move given to it for free. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import script  # noqa: F401 (finds the package, installed or not)
import torch
from bench_gumbel_argmax import graph_times_ms, measure_copy_gbps
from bench_report import emit, measure_link_gbps, percentiles, provenance
from offload_runtime_kernels.gather_chunks import BlockTable, gather_chunks
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import GB
from offload_runtime.memory import HostArena

DEVICE = torch.device("cuda")
HEAD_DIM, CHUNK_SIZE, BUDGET_CHUNKS, NUM_BLOCKS = 128, 8, 512, 480
NUM_SELECTIONS = 16  # taken in turn, so that what moves was not read a moment ago
CHUNKS_PER_BLOCK = BLOCK_TOKENS // CHUNK_SIZE


def make_selections(num_kv_heads: int, num_new: int) -> torch.Tensor:
    """[NUM_SELECTIONS, 1, H_kv, K] int32 on the CPU, each with `num_new` chunks that the one before did not have."""
    stay = BUDGET_CHUNKS - num_new
    rows = []
    for _ in range(num_kv_heads):
        order = torch.randperm(NUM_BLOCKS * CHUNKS_PER_BLOCK, dtype=torch.int32)
        changing = order[stay : stay + NUM_SELECTIONS * num_new].view(NUM_SELECTIONS, num_new)
        rows.append(torch.cat([order[:stay].expand(NUM_SELECTIONS, stay), changing], dim=1).sort(dim=1).values)
    return torch.stack(rows, dim=1)[:, None].contiguous()


def make_blocks(num_kv_heads: int, *, pinned: bool) -> tuple[torch.Tensor, HostArena | None]:
    """[NUM_BLOCKS, 2, H_kv, 256, D] bf16 of one sequence, and what holds it when it is in host memory."""
    shape = (NUM_BLOCKS, 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM)
    if not pinned:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE), None
    arena = HostArena(2 * torch.Size(shape).numel(), name="blocks")
    arena.pin()
    blocks = arena.buffer.view(torch.bfloat16).view(shape)
    return blocks.copy_(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)), arena


def plain_gather(blocks: torch.Tensor, chunks: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Bring `chunks` [H_kv, n] of every head to the device by indexing and one copy."""
    runs = blocks.unflatten(3, (CHUNKS_PER_BLOCK, CHUNK_SIZE)).flatten(4)  # [N, 2, H_kv, 32, chunk]
    heads = torch.arange(blocks.shape[2], device=blocks.device)[:, None].expand_as(chunks).flatten()
    flat = chunks.flatten().long().to(blocks.device)
    block, within = flat // CHUNKS_PER_BLOCK, flat % CHUNKS_PER_BLOCK
    return lambda: runs[block, :, heads, within].to(DEVICE)


def synchronous_times_ms(run: Callable[[], object], *, repeats: int) -> list[float]:
    """Milliseconds of one `run` with the host's share, `repeats` times."""
    run()
    times_ms = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times_ms.append(start.elapsed_time(stop))
    return times_ms


def measure_case(num_kv_heads: int, num_new: int, *, pinned: bool, gbps: float) -> dict[str, Any]:
    """One layer's update in which `num_new` chunks of every head move."""
    blocks, arena = make_blocks(num_kv_heads, pinned=pinned)
    source = BlockTable.empty(1, NUM_BLOCKS, DEVICE)
    source.put(0, 0, blocks)
    on_host = make_selections(num_kv_heads, num_new)
    selections = on_host.to(DEVICE)
    resident = torch.full_like(selections[0], -1)
    places = torch.zeros(
        1, BUDGET_CHUNKS // CHUNKS_PER_BLOCK, 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM, dtype=torch.bfloat16,
        device=DEVICE,
    )  # fmt: skip
    data, turn = KVBlocks(places), iter(range(1 << 62))

    def update() -> torch.Tensor:
        return gather_chunks(selections[next(turn) % NUM_SELECTIONS], resident, source, data, chunk_size=CHUNK_SIZE)

    update()  # the first fills every place; `graph_times_ms` runs once more before it captures, and then goes around
    times = percentiles(graph_times_ms(update, calls=NUM_SELECTIONS, repeats=20))
    moved_bytes = num_kv_heads * num_new * 2 * CHUNK_SIZE * HEAD_DIM * 2
    bound_ms = moved_bytes * (1 if pinned else 2) / (gbps * GB) * 1e3
    plain = percentiles(synchronous_times_ms(plain_gather(blocks, on_host[0, 0, :, :num_new]), repeats=10))
    if arena is not None:
        arena.close()
    return {
        "memory": "pinned" if pinned else "device", "num_kv_heads": num_kv_heads, "new_chunks": num_new,
        "moved_bytes": moved_bytes, "update_ms": times.as_dict(), "plain_ms": plain.as_dict(), "bound_ms": bound_ms,
        "moved_gbps": moved_bytes / (times.median / 1e3) / GB,
    }  # fmt: skip


def print_table(cases: Sequence[dict[str, Any]]) -> None:
    """One line a case."""
    print(f"{'memory':>7} {'KV heads':>8} {'new':>4} {'update ms':>10} {'bound ms':>9} {'GB/s':>7} {'plain ms':>9}")
    for case in cases:
        print(
            f"{case['memory']:>7} {case['num_kv_heads']:8} {case['new_chunks']:4} {case['update_ms']['median']:10.4f} "
            f"{case['bound_ms']:9.4f} {case['moved_gbps']:7.1f} {case['plain_ms']['median']:9.4f}"
        )


def main() -> None:
    """Measure every case, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="commit to report where the tree has no git")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this times CUDA kernels and torch sees no CUDA device: run it on a machine with one")
    copy_gbps, link_gbps = measure_copy_gbps(), measure_link_gbps(DEVICE)
    assert link_gbps is not None
    cases = [
        measure_case(num_kv_heads, num_new, pinned=pinned, gbps=link_gbps if pinned else copy_gbps)
        for pinned in (True, False)
        for num_kv_heads in (32, 8)
        for num_new in (0, 10, 51, 512)
    ]
    print_table(cases)
    configuration = {
        "dtype": "bf16", "head_dim": HEAD_DIM, "chunk_size": CHUNK_SIZE, "budget_chunks": BUDGET_CHUNKS,
        "timing": "CUDA graph, selections taken in turn",
    }  # fmt: skip
    emit(
        {
            "benchmark": "gather_chunks", **provenance(DEVICE, commit=arguments.commit), "configuration": configuration,
            "copy_gbps": copy_gbps, "link_gbps": link_gbps, "cases": cases,
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
