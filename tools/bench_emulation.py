"""Measure an emulated link: back-to-back copies by size, forth and back, against the profile's bandwidth.

    python tools/bench_emulation.py [--emulate rtx4090] [--out FILE] [--commit HASH]

Every size is timed by the host's clock from the first call to the last byte, launches included. On a GPU also what a
stream that keeps a pace takes from others: matrix products alone, beside copies at full speed and beside paced copies.
Prints a table, then one JSON line; exit code 1 when a size of 4 MiB and more is off by more than 2 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import harness
import torch
from harness import check_out, emit, percentiles, provenance

from offload_runtime.config import GB
from offload_runtime.copy import CopyEngine, make_copy_engine
from offload_runtime.engine.load import measure_link_both_ways
from offload_runtime.hardware import Emulation, load_profile
from offload_runtime.memory import HostArena, current_device, resolve_device

SIZES_MIB = (1, 4, 16, 64, 256)
LEAST_MIB, TOLERANCE = 4, 0.02  # what is promised
_ROUND_S = 0.1  # of copies, on the emulated link
_PRODUCT, _PRODUCTS = 4096, 50


def copy_all(engine: CopyEngine, dst: torch.Tensor, src: torch.Tensor, count: int) -> None:
    """Queue `count` copies, one behind the other."""
    free, ready = engine.new_event(), engine.new_event()
    for _ in range(count):
        engine.enqueue(dst, src, free=free, ready=ready)


def measure_gbps(engine: CopyEngine, dst: torch.Tensor, src: torch.Tensor, gbps: float, repeats: int) -> list[float]:
    """GB/s of rounds of back-to-back copies that take a tenth of a second and at least four copies each."""
    count = max(4, round(_ROUND_S * gbps * GB / src.nbytes))
    copy_all(engine, dst, src, 2)
    engine.drain()
    found = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        copy_all(engine, dst, src, count)
        engine.drain()
        found.append(count * src.nbytes / (time.perf_counter() - started_s) / GB)
    return found


def measure_sizes(
    emulation: Emulation, device: torch.device, sizes_mib: Sequence[float], repeats: int
) -> Iterator[dict[str, Any]]:
    """A row for every size and direction."""
    longest = max(round(size * (1 << 20)) for size in sizes_mib)
    gpu = torch.zeros(longest, dtype=torch.uint8, device=device)
    with closing(HostArena(longest, name="copies to measure")) as arena:
        host = arena.buffer[:longest].fill_(1)
        if device.type == "cuda":
            arena.pin()
        for direction, gbps, dst, src in (
            ("to the device", emulation.link_gbps, gpu, host),
            ("back", emulation.link_back_gbps, host, gpu),
        ):
            with closing(make_copy_engine(device, pace_gbps=gbps)) as engine:
                for size in sizes_mib:
                    part = slice(0, round(size * (1 << 20)))
                    found = percentiles(measure_gbps(engine, dst[part], src[part], gbps, repeats))
                    yield {
                        "direction": direction, "copy_mib": size, "gbps": found.as_dict(), "profile_gbps": gbps,
                        "share_off": found.median / gbps - 1,
                    }  # fmt: skip


def measure_products(emulation: Emulation, device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds of matrix products alone, beside copies at full speed, and beside paced ones."""
    matrix = torch.randn(_PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=device)
    target = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    found = {}
    with closing(HostArena(target.nbytes, name="copies to measure")) as arena:
        host = arena.buffer[: target.nbytes].fill_(1)
        arena.pin()
        for name, gbps in (("alone", None), ("beside_copies", None), ("beside_paced_copies", emulation.link_gbps)):
            with closing(make_copy_engine(device, pace_gbps=gbps)) as engine:
                times_ms = []
                for _ in range(repeats + 1):
                    if name != "alone":
                        copy_all(engine, target, host, 40)  # longer than the products
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    for _ in range(_PRODUCTS):
                        matrix @ matrix
                    end.record()
                    end.synchronize()
                    engine.drain()
                    times_ms.append(start.elapsed_time(end))
            found[f"{name}_ms"] = percentiles(times_ms[1:]).median
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one dictionary; prints the table."""
    device, emulation = resolve_device(options.device), load_profile(options.emulate).emulation()
    rows = []
    with current_device(device):
        there, back = measure_link_both_ways(device)
        print(f"{emulation.name} on {device}, whose link carries {there:.1f} GB/s and {back:.1f} back")
        print(f"{'direction':>13} {'MiB':>7} {'GB/s':>9} {'profile':>9} {'off':>8}")
        for row in measure_sizes(emulation, device, options.sizes, options.repeats):
            rows.append(row)
            print(
                f"{row['direction']:>13} {row['copy_mib']:7g} {row['gbps']['median']:9.4g} {row['profile_gbps']:9.4g} "
                f"{row['share_off']:+8.2%}",
                flush=True,
            )
        products = measure_products(emulation, device, options.repeats) if device.type == "cuda" else None
    if products is not None:
        print(", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in products.items()))
    return {
        "benchmark": "emulation",
        "emulated": emulation.name,
        "link_gbps": there,
        "link_back_gbps": back,
        "rows": rows,
        "products": products,
        "tolerance": TOLERANCE,
        "holds": all(abs(row["share_off"]) <= TOLERANCE for row in rows if row["copy_mib"] >= LEAST_MIB),
        "configuration": {"sizes_mib": options.sizes, "repeats": options.repeats},
        **provenance(device, commit=options.commit),
    }


@harness.one_line_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--emulate", default="rtx4090", help="a profile's name or file")
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES_MIB), help="MiB of one copy")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    check_out(options.out)
    result = measure(options)
    emit(result, options.out)
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
