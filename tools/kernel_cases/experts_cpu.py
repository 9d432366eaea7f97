"""Experts in host memory, computed there by threads for one row: GB/s of weights by encoding, by threads and by where
the weights lie, beside reading memory by as many threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle, islice
from typing import Any

import torch
from harness import percentiles
from kernel_cases.experts import GPT_OSS, QWEN3
from offload_runtime_kernels.experts_cpu import (
    ExpertsCpu,
    ExpertsLibrary,
    HostExperts,
    HostMatrix,
    load_experts_library,
    random_rows,
)

from offload_runtime.engine.load_model import expert_threads
from offload_runtime.files import user_directory
from offload_runtime.hardware.bench import measure_host_gbps, usable_cores
from offload_runtime.options import require
from offload_runtime.sizes import GB
from offload_runtime.stream.arena import HostArena, touch

_ENCODINGS = {"MXFP4": GPT_OSS, "Q4_K": QWEN3}
_THREADS, _AT_ONCE = (1, 2, 4, 8, 16), (1, 4)
_RAM_BYTES, _READ_S = 1 << 30, 0.2  # more than caches hold, and how long a case reads
_FIRST_CALLS = 8  # which wake threads, and fill caches


def _times_s(cpu: ExpertsCpu, layer: HostExperts, addresses: list[int], at_once: int) -> list[float]:
    """Seconds of calls for one row and `at_once` experts each, which are taken in turn."""
    width, dtype = layer.shape.hidden, cpu.library.dtype
    x, choices = torch.randn(1, width).to(dtype), torch.arange(at_once)[None]
    out = torch.empty(1, at_once, width, dtype=dtype)
    taken, times_s = cycle(addresses), list[float]()
    while sum(times_s) < _READ_S or len(times_s) <= _FIRST_CALLS:
        times_s.append(cpu.compute(layer, x, choices, out, list(enumerate(islice(taken, at_once)))).seconds)
    return times_s[_FIRST_CALLS:]


def _measure(encoding: str, library: ExpertsLibrary, read_gbps: dict[int, float]) -> Iterator[dict[str, Any]]:
    """A row a case of one encoding."""
    shape, make = _ENCODINGS[encoding], torch.Generator().manual_seed(0)
    parts = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    first, second = (random_rows(encoding, *sizes, make).view(-1) for sizes in parts)
    layer = HostExperts(library, shape, HostMatrix(encoding, 0), HostMatrix(encoding, first.nbytes))
    with closing(HostArena(_RAM_BYTES, name="experts")) as arena:
        touch([arena])
        experts = arena.buffer[: _RAM_BYTES // layer.expert_bytes * layer.expert_bytes].view(-1, layer.expert_bytes)
        experts.copy_(torch.cat([first, second]))
        addresses = [one.data_ptr() for one in experts]
        for threads, read in read_gbps.items():
            with ExpertsCpu(library, threads) as cpu:
                for where, several in (("caches", addresses[:1]), ("RAM", addresses)):
                    for at_once in _AT_ONCE if len(several) > 1 else (1,):
                        nbytes = at_once * layer.expert_bytes
                        yield {
                            "encoding": encoding, "instructions": library.instructions, "threads": threads,
                            "weights_in": where, "experts_a_call": at_once, "bytes_a_call": nbytes, "read_gbps": read,
                            "gbps": percentiles([nbytes / GB / one for one in _times_s(cpu, layer, several, at_once)]),
                        }  # fmt: skip


def measure_all(only: str) -> Iterator[dict[str, Any]]:
    """A row a case, each printed when it is there. Cases are those of encodings that have `only` in their names.

    Raises:
        OptionError: None has.
    """
    encodings = [one for one in _ENCODINGS if only in one]
    require(bool(encodings), f"--only {only!r} is in the name of none of {', '.join(_ENCODINGS)}")
    folder = user_directory("cache", holds="compiled code") / "experts"
    with ThreadPoolExecutor() as pool:  # of compilers
        libraries = [*pool.map(lambda one: load_experts_library(folder, torch.bfloat16, [one]), encodings)]
    threads = sorted({*(one for one in _THREADS if one <= usable_cores()), expert_threads()})
    read_gbps = {one: measure_host_gbps(_RAM_BYTES, one, budget_s=_READ_S) for one in threads}
    for encoding, library in zip(encodings, libraries, strict=True):
        for row in _measure(encoding, library, read_gbps):
            print(
                f"{encoding}, {library.instructions}, {row['threads']} threads, weights in {row['weights_in']}, "
                f"{row['experts_a_call']} experts a call: {row['gbps']['median']:.1f} GB/s "
                f"({row['gbps']['p20']:.1f} to {row['gbps']['p80']:.1f}); reading {row['read_gbps']:.1f}",
                flush=True,
            )
            yield row
