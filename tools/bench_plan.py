"""Hold plans against runs: predicted and measured time of a pass, and the memory used of the memory allowed.

    python tools/bench_plan.py [--profile h200] [--emulate rtx4090] [--out FILE] [--commit HASH]

Four settings of a Llama-2-7B shape with fewer layers (weights streamed, half of them resident, KV streamed, both
streamed), each as it is and on an emulated card, over windows of 1 and 17 tokens behind a full context. The limit of
device memory is what the setting needs and little more. Predictions come from the profile alone: nothing measured in
the run enters them. Prints a table, then one JSON line; exit code 1 when a pass is off by more than 10 %, or a peak is
above its limit or below 90 % of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from harness import check_out, emit, percentiles, provenance
from long_context.internals import budget_of
from long_context.session import Session
from widening.made import UntrainedLlama, repeated_llama
from widening.shapes import SHAPES, WideShape, shape_named

from offload_runtime.config import GB, RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.hardware import Emulation, load_profile
from offload_runtime.hardware.host_bench import read_host_info
from offload_runtime.memory import DeviceBudget, current_device, device_memory_used_by_others, resolve_device
from offload_runtime.plan import (
    MachineFigures,
    common_figures,
    find_plan,
    limits_here,
    machine_figures,
    pass_time,
)

TIME_TOLERANCE, LEAST_USED = 0.10, 0.90  # what is promised
_PLAIN = SpeculationOptions("none")
_MAX_GAMMA = 63
_ROOM_TOKENS = 64  # of the context, for the windows


@dataclass(frozen=True)
class Setting:
    """What is where: of `layers` so many resident, and the KV cache of `context` tokens on the device or not."""

    name: str
    layers: int
    resident: int
    context: int
    kv: str


def settings_of(shape: str) -> tuple[Setting, ...]:
    """The four settings, small enough for a shape's purpose."""
    few, many, short, long = (8, 8, 2048, 4096) if shape == "tiny" else (8, 16, 16384, 32768)
    return (
        Setting("weights streamed", many, 0, short, "gpu"),
        Setting("half the weights streamed", many, many // 2, short, "gpu"),
        Setting("KV streamed", few, few, long, "host"),
        Setting("both streamed", few, 0, long, "host"),
    )


def limit_bytes(setting: Setting, source: UntrainedLlama, device: torch.device) -> int:
    """Device memory that the setting needs, and a quarter of a layer."""
    budget = DeviceBudget(device, None)
    limits = limits_here(None, None, read_host_info(), page_locks=device.type == "cuda")
    limits = replace(limits, reserved_bytes=budget.reserved_bytes)
    budget.release()
    request = RuntimeConfig(
        source, "none", context=setting.context, kv=setting.kv, resident_layers=setting.resident,
        max_gamma=_MAX_GAMMA, speculation=_PLAIN, device=device.type,
    )  # fmt: skip
    plan = find_plan(request, common_figures(), limits)
    return plan.device_bytes + plan.target.layer_bytes // 4


def measure_setting(
    setting: Setting, shape: WideShape, options: argparse.Namespace, machine: MachineFigures,
    emulation: Emulation | None, others_bytes: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for every window."""
    device = resolve_device(options.device)
    source = repeated_llama(replace(shape, num_layers=setting.layers), context_tokens=setting.context)
    vram = limit_bytes(setting, source, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with Runtime.load(
        source, draft="none", device=options.device, vram=vram, resident_layers=setting.resident,
        context=setting.context, kv=setting.kv, speculation=_PLAIN, max_gamma=_MAX_GAMMA,
        emulate=None if emulation is None else options.emulate,
    ) as runtime:  # fmt: skip
        assert setting.kv == "gpu" or not runtime.plan.resident_kv_layers, "the limit leaves room for keys and values"
        if emulation is not None:
            machine = replace(machine, link_gbps=emulation.link_gbps)
        length = setting.context - _ROOM_TOKENS
        tokens = torch.randint(0, runtime.config.vocab_size, (length + 1,), generator=torch.Generator().manual_seed(0))
        session, start = Session(runtime), [tokens.tolist()]
        rows = []
        for width in options.windows:
            times_s, nbytes = session.pass_times_s(start, width, options.passes)
            predicted = pass_time(runtime.plan, machine, length_tokens=length, rows=width)
            measured = percentiles(times_s)
            rows.append(
                {
                    "setting": setting.name, "emulated": runtime.emulated, "window_tokens": width,
                    "layers": setting.layers, "context_tokens": setting.context,
                    "predicted_s": predicted.seconds, "bound_by": predicted.bound_by,
                    "measured_s": measured.as_dict(), "share_off": measured.median / predicted.seconds - 1,
                    "predicted_bytes": predicted.bytes_streamed, "measured_bytes": nbytes,
                    "link_gbps": nbytes / measured.median / GB,
                }
            )  # fmt: skip
        memory = _memory(runtime, device, others_bytes)
        placement = runtime.placement
        del session  # it holds what the runtime gives back now
    for row in rows:
        yield {**row, **memory, "placement": placement}


def _memory(runtime: Runtime, device: torch.device, others_bytes: int) -> dict[str, Any]:
    """Peak of device memory, by the driver and by the allocator (by the ledger on a CPU), and its limit."""
    budget = budget_of(runtime)
    driver_bytes = budget.peak_bytes()
    allocator_bytes = None
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        driver_bytes = total_bytes - free_bytes - others_bytes
        allocator_bytes = torch.cuda.max_memory_reserved(device)
    limit = budget.limit_bytes
    assert limit is not None
    return {
        "limit_bytes": limit, "peak_bytes": driver_bytes, "allocator_peak_bytes": allocator_bytes,
        "used_share": driver_bytes / limit,
    }  # fmt: skip


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What does not keep its promise."""
    found = []
    for row in rows:
        name = f"{row['setting']}, window {row['window_tokens']}, {row['emulated'] or 'not emulated'}"
        if abs(row["share_off"]) > TIME_TOLERANCE:
            found.append(f"{name}: the pass is off by {row['share_off']:+.1%}")
        if row["measured_bytes"] != row["predicted_bytes"]:
            found.append(f"{name}: {row['measured_bytes']} bytes and not {row['predicted_bytes']}")
        if not LEAST_USED <= row["used_share"] <= 1:
            found.append(f"{name}: {row['used_share']:.1%} of the memory allowed was used")
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one dictionary; prints the table."""
    device = resolve_device(options.device)
    # Before anything else touches the GPU: afterwards our own context would count as somebody else's memory.
    others = device_memory_used_by_others(device.index) if device.type == "cuda" else None
    machine, emulation = machine_figures(load_profile(options.profile)), load_profile(options.emulate).emulation()
    shape = shape_named(options.shape)
    rows = []
    print(
        f"{'setting':>26} {'emulated':>9} {'window':>6} {'predicted s':>11} {'measured s':>10} {'off':>7} {'GB/s':>6} "
        f"{'peak of GB':>13} {'used':>6}  bound by"
    )
    with current_device(device):
        for setting in settings_of(options.shape):
            for played in (None, emulation):
                for row in measure_setting(setting, shape, options, machine, played, others or 0):
                    rows.append(row)
                    print(
                        f"{row['setting']:>26} {row['emulated'] or '-':>9} {row['window_tokens']:6} "
                        f"{row['predicted_s']:11.4f} {row['measured_s']['median']:10.4f} {row['share_off']:+7.1%} "
                        f"{row['link_gbps']:6.1f} {row['peak_bytes'] / GB:6.2f} {row['limit_bytes'] / GB:6.2f} "
                        f"{row['used_share']:6.1%}  {row['bound_by']}",
                        flush=True,
                    )
    return {
        "benchmark": "plan",
        "rows": rows,
        "failures": failures(rows),
        "other_programs_bytes": others,
        "configuration": {
            "shape": options.shape, "profile": options.profile, "emulate": Path(options.emulate).stem,
            "windows": options.windows, "passes": options.passes, "weights": "repeated random numbers",
        },
        **provenance(device, commit=options.commit),
    }  # fmt: skip


@harness.one_line_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama2-7b")
    parser.add_argument("--profile", default="h200", help="the machine to predict for, by name or file")
    parser.add_argument("--emulate", default="rtx4090", help="the smaller machine, by name or file")
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 17])
    parser.add_argument("--passes", type=int, default=10, help="timed passes of each window")
    options = parser.parse_args(arguments)
    check_out(options.out)
    result = measure(options)
    emit(result, options.out)
    print(*result["failures"], sep="\n", file=sys.stderr)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
