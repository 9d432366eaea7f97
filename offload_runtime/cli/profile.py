"""`offload-runtime profile`: measure this machine, say what matters, and keep the figures for planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from offload_runtime.cli.options import ProfileOptions
from offload_runtime.cli.terminal import ProgressBars, only_json, print_result, write_text
from offload_runtime.hardware import check_name, profile_to_mapping, profile_toml, save_profile
from offload_runtime.sizes import format_bytes

if TYPE_CHECKING:
    from offload_runtime.hardware import MachineProfile
    from offload_runtime.hardware.measure import CardsReport, GpuReport, MachineReport

_NOT_MEASURED = "not measured"


def profile(options: ProfileOptions) -> None:
    """Measure this machine in about a minute: link, memories, arithmetic, disk, and what holds it back."""
    if options.save is not None:
        check_name(options.save)  # before a minute of measuring, not after it
    from offload_runtime.hardware.measure import advise, measure_machine

    with only_json(options.as_json), ProgressBars(enabled=not options.no_progress) as bars:
        report = measure_machine(
            options.device, quick=options.quick, full=options.full, disk_file=options.disk_file, on_progress=bars.update
        )
    advice = advise(report)
    saved: str | None = None
    try:
        saved = None if options.save is None else str(save_profile(report.profile, options.save))
    finally:  # what cannot be saved is told behind the figures: they have cost a minute, nothing of them may be lost
        plain = {"profile": profile_to_mapping(report.profile), "seconds": round(report.seconds, 3)}
        record = {**asdict(report), **plain, "matters": advice, "saved": saved}
        print_result(record, report_tables(report, advice), as_json=options.as_json)
        if not options.as_json:
            write_text("\n" + (profile_toml(report.profile) if saved is None else f"saved to {saved}\n"))


def report_tables(report: MachineReport, advice: list[str]) -> list[Table | str]:
    """Return the table with one row per figure, its bound beside it where one is known; what could not be measured and
    why, and what matters."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in report.missing.items():
        by_reason.setdefault(reason, []).append(key)
    missing = [f"not measured: {', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]
    heading = "\nwhat matters:" if advice else "\nnothing holds this machine back"
    title = f"this machine, measured in {report.seconds:.0f} s"
    columns = Column("what", no_wrap=True), Column("figure", overflow="fold")
    table = Table(*columns, title=title, title_justify="left", show_header=False)
    gpu_rows = [] if report.gpu is None else _gpu_rows(report.profile, report.gpu)
    card_rows = [] if report.cards is None else _card_rows(report.cards)
    for name, figure in [*gpu_rows, *card_rows, *_host_rows(report)]:
        table.add_row(name, figure)
    return [table, *missing, heading, *(f"  - {line}" for line in advice)]


def _gpu_rows(profile: MachineProfile, gpu: GpuReport) -> list[tuple[str, str]]:
    count = f"{profile.gpus} x " if profile.gpus > 1 else ""
    link, peak, pcie = gpu.nvml.link, "", _NOT_MEASURED
    if link is not None:
        peak = f" of {link.peak_gbps:.1f}"
        most = f"at most generation {link.generation_max} x{link.width_max}"
        pcie = f"generation {link.generation} x{link.width} while busy ({most})"
    by_size = {f"{key * 1024:g} KiB" if key < 1 else f"{key:g} MiB": v for key, v in profile.link_by_copy_mib.items()}
    launch = f"{_rate(profile.launch_us, ' us')} from Python, {_rate(profile.graph_launch_us, ' us')} in a CUDA graph"
    return [
        ("GPU", f"{count}{profile.gpu_name}"),
        ("VRAM", f"{format_bytes(profile.vram_bytes or 0)}, {format_bytes(gpu.free_bytes)} free"),
        ("PCIe", pcie),
        ("link to the device", _rate(profile.link_gbps, f"{peak} GB/s")),
        ("link back", _rate(profile.link_back_gbps, f"{peak} GB/s")),
        ("link, both at once", _rate(profile.link_both_gbps, " GB/s each")),
        ("link by size of copy", _figures(by_size, "GB/s")),
        ("HBM, read + write", _rate(profile.hbm_gbps, " GB/s")),
        ("matrix products", _figures(profile.tflops, "TFLOP/s")),
        ("stored weights, decoded", _figures(profile.decode_gweights_per_s, "Gweights/s")),
        ("prompts by the library", _library(profile.library_rows)),
        ("kernel launch", launch),
        ("can be pinned", _NOT_MEASURED if profile.pinnable_bytes is None else format_bytes(profile.pinnable_bytes)),
        ("pinning", _rate(profile.pin_gbps, " GB/s")),
    ]


def _card_rows(cards: CardsReport) -> list[tuple[str, str]]:
    """Return what each link carries alone, what a further card brings, and how long rows are on their way."""
    labels = [f"card {number} ({device})" for number, device in enumerate(cards.devices)]
    together = "both" if len(labels) == 2 else f"all {len(labels)}"
    alone, total_gbps = cards.links_alone_gbps, sum(cards.links_at_once_gbps)
    at_once = _NOT_MEASURED
    if alone and cards.on_one_device:
        at_once = f"{total_gbps:.1f} GB/s, of logical cards that share a device and its link"
    elif alone:
        at_once = f"{total_gbps:.1f} GB/s, {total_gbps / max(alone):.2f} x one"
    route = "peer to peer" if cards.peer_to_peer else "through page-locked host memory"
    rows = [
        ("link of each card alone", _figures(dict(zip(labels, alone, strict=False)), "GB/s")),
        (f"links, {together} at once", at_once),
        (
            "transfer from card to card",
            _transfers(cards.transfer_us_by_kib, "within one device" if cards.on_one_device else route),
        ),
    ]
    if cards.transfer_us_through_host:
        rows.append(
            ("the same without peers", _transfers(cards.transfer_us_through_host, "through page-locked host memory"))
        )
    return rows


def _transfers(us_by_kib: Mapping[float, float], route: str) -> str:
    sizes = {f"{key:g} KiB" if key < 1024 else f"{key / 1024:g} MiB": us for key, us in us_by_kib.items()}
    return _figures(sizes, f"us, {route}")


def _host_rows(report: MachineReport) -> list[tuple[str, str]]:
    profile, cpu = report.profile, report.host.cpu
    features = f" ({', '.join(cpu.features)})" if cpu.features else ""
    by_threads = {f"{key} thread{'s' if key > 1 else ''}": v for key, v in profile.host_by_threads.items()}
    busy = f"{_rate(profile.host_gbps_while_link_busy, ' GB/s')}, link "
    busy += _rate(profile.link_gbps_while_host_busy, " GB/s")
    return [
        ("CPU", f"{cpu.name}, {cpu.cores} logical cores{features}"),
        ("RAM", f"{format_bytes(profile.ram_bytes)}, {format_bytes(report.host.available_bytes)} free"),
        ("host memory, reading", _figures(by_threads, "GB/s")),
        *([] if report.gpu is None else [("the same beside copies", busy)]),
        ("disk, reading", _rate(profile.disk_gbps, " GB/s")),
    ]


def _library(rows: Mapping[str, int]) -> str:
    """Return for how many shapes of matrices the library's products have our own ones' bits, and for which not."""
    if not rows:
        return _NOT_MEASURED
    ours = [shape for shape, least in rows.items() if not least]
    listed = f", not of {', '.join(ours)}" if ours else ""
    return f"{len(rows) - len(ours)} of {len(rows)} products have the bits of ours{listed}"


def _rate(figure: float | None, unit: str) -> str:
    """Return three digits and the unit."""
    return _NOT_MEASURED if figure is None else f"{_digits(figure)}{unit}"


def _figures(figures: Mapping[Any, float], unit: str) -> str:
    """Return several figures of one unit with what each belongs to."""
    listed = " · ".join(f"{name} {_digits(figure)}" for name, figure in figures.items())
    return f"{listed} {unit}" if listed else _NOT_MEASURED


def _digits(figure: float) -> str:
    """Return a number of about three digits, without an exponent."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 1 else f"{figure:.2f}"
