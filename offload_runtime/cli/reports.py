"""Commands that say what holds on this machine, in tables: `offload-runtime profile` measures it, and keeps the figures
for planning; `offload-runtime verify` proves that speculation changes nothing on it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Column, Table

from offload_runtime.cli import terminal
from offload_runtime.cli.generate import load_runtime
from offload_runtime.cli.hosts import has_layers_for_another
from offload_runtime.cli.options import ProfileOptions, VerifyOptions, refuse_early
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.hardware import check_name, profile_to_mapping, profile_toml, save_profile
from offload_runtime.hosts import started_as_one_of_several
from offload_runtime.options import require
from offload_runtime.sizes import counted, format_bytes

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime
    from offload_runtime.hardware import MachineProfile
    from offload_runtime.hardware.measure import GpuReport, MachineReport
    from offload_runtime.verify import Fit, VerificationReport
    from offload_runtime.verify.equality import IdentityRun

_NOT_MEASURED = "not measured"
_SILENT_S = 30.0  # after which another machine counts as gone


def profile(options: ProfileOptions) -> None:
    """Measure this machine in half a minute: links, memories, arithmetic, and what holds it back."""
    if options.interface is not None or started_as_one_of_several():
        _profile_network(options)
        return
    if options.save is not None:
        check_name(options.save)  # before a minute of measuring, not after it
    from offload_runtime.hardware.measure import advise, measure_machine

    with terminal.only_json(options.as_json), terminal.ProgressBars(enabled=not options.no_progress) as bars:
        report = measure_machine(options.device, quick=options.quick, full=options.full, on_progress=bars.update)
    advice = advise(report)
    saved: str | None = None
    try:
        saved = None if options.save is None else str(save_profile(report.profile, options.save))
    finally:  # what cannot be saved is told behind the figures: they have cost a minute, nothing of them may be lost
        plain = {"profile": profile_to_mapping(report.profile), "seconds": round(report.seconds, 3)}
        record = {**asdict(report), **plain, "matters": advice, "saved": saved}
        terminal.print_result(record, machine_tables(report, advice), as_json=options.as_json)
        if not options.as_json:
            terminal.write_text("\n" + (profile_toml(report.profile) if saved is None else f"saved to {saved}\n"))


def _profile_network(options: ProfileOptions) -> None:
    """Measure how long rows take from the first of several machines to each other one and back."""
    from offload_runtime.hosts.group import HostGroup, num_ranks
    from offload_runtime.hosts.measure import answer_round_trips, measure_round_trips

    num_ranks(options.interface)
    group = HostGroup(options.interface, _SILENT_S)
    try:
        names = [one["host"] for one in group.exchange({})]
        if group.rank:
            answer_round_trips(group)
            return
        times = measure_round_trips(group)
    finally:
        group.close()
    table = Table("bytes", *(Column(f"{names[peer]}, there and back", justify="right") for peer in times))
    for nbytes in times[1]:
        table.add_row(format_bytes(nbytes), *(f"{1e3 * found[nbytes]:.3g} ms" for found in times.values()))
    rates = {peer: max(2 * nbytes / seconds for nbytes, seconds in found.items()) for peer, found in times.items()}
    gbit = f"{8e-9 * min(rates.values()):.2g}Gb"
    record = {"round_trips": [{"rank": peer, "host": names[peer], "seconds": found} for peer, found in times.items()]}
    terminal.print_result(record | {"network": gbit}, [table, f"for plan: --network {gbit}"], as_json=options.as_json)


def machine_tables(report: MachineReport, advice: list[str]) -> list[Table | str]:
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
    profile, host = report.profile, report.host
    rows = [] if report.gpu is None else _gpu_rows(profile, report.gpu)
    rows += [
        ("CPU", f"{host.cpu_name}, {host.cores} logical cores"),
        ("RAM", f"{format_bytes(profile.ram_bytes)}, {format_bytes(host.available_bytes)} free"),
        ("host memory, reading", _rate(profile.host_gbps, " GB/s")),
    ]
    if report.gpu is not None:
        rows.append(("host memory, copying beside the link", _rate(profile.staging_gbps, " GB/s")))
    for row in rows:
        table.add_row(*row)
    return [table, *missing, heading, *(f"  - {line}" for line in advice)]


def _gpu_rows(profile: MachineProfile, gpu: GpuReport) -> list[tuple[str, str]]:
    count = f"{profile.gpus} x " if profile.gpus > 1 else ""
    link, peak, pcie = gpu.nvml.link, "", _NOT_MEASURED
    if link is not None:
        peak = f" of {link.peak_gbps:.1f}"
        most = f"at most generation {link.generation_max} x{link.width_max}"
        pcie = f"generation {link.generation} x{link.width} while busy ({most})"
    return [
        ("GPU", f"{count}{profile.gpu_name}"),
        ("VRAM", f"{format_bytes(profile.vram_bytes or 0)}, {format_bytes(gpu.free_bytes)} free"),
        ("PCIe", pcie),
        ("link to the device", _rate(profile.link_gbps, f"{peak} GB/s")),
        ("link back", _rate(profile.link_back_gbps, f"{peak} GB/s")),
        ("HBM, read + write", _rate(profile.hbm_gbps, " GB/s")),
        ("matrix products", _figures(profile.tflops, "TFLOP/s")),
        ("stored weights, decoded", _figures(profile.decode_gweights_per_s, "Gweights/s")),
        ("kernel in a CUDA graph", _rate(profile.graph_launch_us, " us")),
        *(_card_rows(profile, gpu) if profile.gpus > 1 else []),
        ("can be pinned", _NOT_MEASURED if profile.pinnable_bytes is None else format_bytes(profile.pinnable_bytes)),
    ]


def _card_rows(profile: MachineProfile, gpu: GpuReport) -> list[tuple[str, str]]:
    """Return what each link carries alone, what a further card brings, and how rows cross from card to card."""
    alone, total_gbps = gpu.links_alone_gbps, sum(profile.links_at_once_gbps)
    at_once = f"{total_gbps:.1f} GB/s, {total_gbps / max(alone):.2f} x one" if alone and total_gbps else _NOT_MEASURED
    route = "peer to peer" if gpu.peer_to_peer else "through page-locked host memory"
    transfers = f"{_rate(profile.transfer_us, ' us')}, many at {_rate(profile.transfer_gbps, ' GB/s')}, {route}"
    return [
        ("link of each card alone", _figures({f"card {number}": gbps for number, gbps in enumerate(alone)}, "GB/s")),
        ("links, all at once", at_once),
        ("rows from card to card", transfers),
    ]


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


DEFECT_EXIT_CODE = 1
_MOST_FINDINGS = 10


def verify(options: VerifyOptions) -> None:
    """Prove on this machine that speculation changes nothing; exit code 1 when it does."""
    if has_layers_for_another(options):
        return
    config = options.config
    extra = {} if options.prompts is None else read_prompts(options.prompts)
    mode = config.speculation.mode
    require(mode != "none", "--speculation none leaves nothing to verify: leave it out")
    proposed = config.draft != "none" or mode == "triforce"
    require(proposed, "--draft none leaves nothing to verify: name a draft model or ngram")
    refuse_early(config)
    import torch

    from offload_runtime import __version__
    from offload_runtime.engine.runtime import device_facts
    from offload_runtime.verify import FULL, QUICK, compare_one_card, decode_plainly, verify

    def say_how_long(seconds: float) -> None:
        about = f"{max(10, round(seconds, -1)):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
        terminal.status_line(f"this takes about {about}; Ctrl-C ends it with what is there by then")

    plan = QUICK if options.quick else FULL
    asked = {"tokens": options.tokens, "seeds": options.seeds}
    numbers: Any = {name: number for name, number in asked.items() if number is not None}
    plan = replace(plan, prompts={**plan.prompts, **extra}, **numbers)
    with (
        load_runtime(options, config, plan.encoded) as runtime,
        terminal.ProgressBars(enabled=not options.no_progress, or_lines=True) as bars,
    ):
        report = verify(runtime, plan, on_progress=bars.update, on_expected=say_how_long)
        dealt = runtime.plan.num_cards > 1 and not report.interrupted
        several = decode_plainly(runtime, plan, bars.update, stage="several cards") if dealt else {}
    if several:
        with (
            load_runtime(options, one_card_config(config, runtime)) as first,
            terminal.ProgressBars(enabled=not options.no_progress, or_lines=True) as bars,
        ):
            one = decode_plainly(first, plan, bars.update, stage="one card")
        report.runs.extend(compare_one_card(one, several, bitwise=report.bitwise))
    # What the report holds for: the promise is of one kind of GPU and one version of the libraries.
    versions = {"offload_runtime": __version__, "python": platform.python_version(), "torch": torch.__version__}
    record = {
        "target": config.target, "draft": config.draft, "quick": options.quick, "tokens": plan.tokens,
        "seeds": plan.seeds, **device_facts(runtime.devices),
        "dtype": str(runtime.dtype).removeprefix("torch."), "placement": runtime.placement, "versions": versions,
    }  # fmt: skip
    terminal.print_result(
        {**record, **report.to_dict()}, [*report_tables(report), describe_machine(record)], as_json=options.as_json
    )
    if report.verdict == "defect":
        raise typer.Exit(DEFECT_EXIT_CODE)
    if report.interrupted:
        raise typer.Exit(terminal.INTERRUPTED_EXIT_CODE)


def one_card_config(config: RuntimeConfig, runtime: Runtime) -> RuntimeConfig:
    """Return the same target on the first card of several alone: with its memory and as many layers as fit."""
    limits = config.vram
    return replace(
        config, device=str(runtime.device), vram=limits[0] if isinstance(limits, tuple) else limits, draft="none",
        speculation=SpeculationOptions(), gamma=None, tree_nodes=None, resident_layers=None, trace=None,
        context=runtime.context_tokens,
    )  # fmt: skip


def describe_machine(record: Mapping[str, Any]) -> str:
    """Return one line about what a report was found on: every card and the driver."""
    names = [card["device"] + (f" ({card['device_name']})" if card["device_name"] else "") for card in record["cards"]]
    driver = f", driver {record['driver']}" if record["driver"] else ""
    return f"on {' and '.join(names)}{driver}, in {record['dtype']}"


def read_prompts(path: str) -> dict[str, str]:
    """Return the lines of a UTF-8 file (`-` is stdin) that are not blank, named by their numbers."""
    lines = enumerate(terminal.read_text(path, option="--prompts").splitlines(), start=1)
    prompts = {f"line {number}": line for number, line in lines if line.strip()}
    require(bool(prompts), f"--prompts {path} has no prompts: write one a line, or leave the option out")
    return prompts


def report_tables(report: VerificationReport) -> list[Table | str]:
    """Return both tables, the findings in words and the verdict."""
    findings = [describe_finding(run) for run in report.runs if run.finding.verdict != "identical"]
    more = [f"and {len(findings) - _MOST_FINDINGS} more: --json lists them all"] * (len(findings) > _MOST_FINDINGS)
    lines = [*findings[:_MOST_FINDINGS], *more]
    return [identity_table(report.runs), fit_table(report.fits, report.level), *lines, verdict_line(report)]


def identity_table(runs: Sequence[IdentityRun]) -> Table:
    """Return one row per drafter, or way of going on, and setting."""
    figures = (Column(name, justify="right") for name in ("runs", "tokens", "tokens per pass", "verdict"))
    table = Table("answers", "setting", *figures, title="beside plain decoding", title_justify="left")
    groups: dict[tuple[str, str], list[IdentityRun]] = {}
    for run in runs:
        groups.setdefault((run.drafter, run.setting), []).append(run)
    # By drafter; the settings of each stay in their order.
    for (drafter, setting), members in sorted(groups.items(), key=lambda group: group[0][0]):
        tokens, passes = sum(run.tokens for run in members), sum(run.passes for run in members)
        per_pass = (tokens - len(members)) / passes if passes else 0.0
        counts = Counter(run.finding.verdict for run in members)
        found = [counted(counts[name], name) for name in ("defect", "near-tie") if counts[name]]
        verdict = ", ".join(found) or "identical"
        table.add_row(drafter, setting, str(len(members)), str(tokens), f"{per_pass:.2f}", verdict)
    return table


def fit_table(fits: Sequence[Fit], level: float) -> Table:
    """Return one row per test of fit."""
    figures = (Column(name, justify="right") for name in ("draws", "chi-square", "freedom", "p", "verdict"))
    title = f"sampled tokens beside the target's probabilities (p below {level:.1e} is a defect)"
    table = Table("test", *figures, title=title, title_justify="left")
    for fit in fits:
        usual = "defect" if fit.p_value < level else "fits" if fit.freedom else "one cell"
        verdict = f"defect: {fit.impossible} impossible" if fit.impossible else usual
        table.add_row(fit.name, str(fit.draws), f"{fit.statistic:.1f}", str(fit.freedom), f"{fit.p_value:.2g}", verdict)
    return table


def describe_finding(run: IdentityRun) -> str:
    """Return one line about a run that is not identical."""
    finding = run.finding
    windows = "" if run.gamma is None else f", gamma {run.gamma}"
    line = f"{finding.verdict}: {run.prompt}, {run.setting}, seed {run.seed}, {run.drafter}{windows}: "
    parts = []
    if finding.first_difference is not None:
        parts.append(f"token {finding.first_difference} of {run.tokens} is the first that differs")
    if (found := finding.mismatch) is not None:
        apart = f"the logits are {found.moved:.2g} apart and rounding explains {found.rounding:.2g}"
        parts.append(f"{found.token} instead of {found.plain_token}, which moved by {found.swing:.2g}: {apart}")
    if finding.differing_logit_rows:
        parts.append(f"{finding.differing_logit_rows} rows of logits differ")
    if finding.foreign_tokens:
        parts.append(f"{finding.foreign_tokens} tokens do not follow from their logits, seed and position")
    return line + "; ".join(parts)


def verdict_line(report: VerificationReport) -> str:
    """Return the verdict in one line."""
    runs, fits = len(report.runs), len(report.fits)
    if report.interrupted and not runs:
        return "stopped before anything was compared"
    if report.verdict == "defect":
        bad = f"{len(report.bad_runs)} of {runs} generations differ from plain decoding"
        return f"defect: {bad}, {len(report.bad_fits)} of {fits} tests of the sampled tokens fail"
    tokens = sum(run.tokens for run in report.runs)
    same = "the same tokens as plain decoding" + (" from bitwise the same logits" if report.bitwise else "")
    if report.verdict == "near-ties":
        count = sum(run.finding.verdict == "near-tie" for run in report.runs)
        same = f"plain decoding's tokens but for {count} near-ties that rounding explains"
    sampled = "no test of sampled tokens was made"
    if fits:
        least = min(fit.p_value for fit in report.fits)
        sampled = f"sampled tokens follow the target's probabilities ({fits} tests, least p {least:.2g})"
    verdict = f"stopped early, {report.verdict} so far" if report.interrupted else report.verdict
    return f"{verdict}: {runs} generations, {tokens} tokens: {same}; {sampled}"
