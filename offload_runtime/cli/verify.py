"""`offload-runtime verify`: the proof, on this machine, that speculation changes nothing."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Column, Table

from offload_runtime.cli.generate import load_runtime
from offload_runtime.cli.options import VerifyOptions, refuse_early
from offload_runtime.cli.terminal import (
    INTERRUPTED_EXIT_CODE,
    ProgressBars,
    print_result,
    read_text,
    status_line,
)
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.options import require

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime
    from offload_runtime.verify import Fit, IdentityRun, VerificationReport

DEFECT_EXIT_CODE = 1
_MOST_FINDINGS = 10


def verify(options: VerifyOptions) -> None:
    """Prove on this machine that speculation changes nothing; exit code 1 when it does."""
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

    plan = QUICK if options.quick else FULL
    asked = {"tokens": options.tokens, "seeds": options.seeds}
    numbers: Any = {name: number for name, number in asked.items() if number is not None}
    plan = replace(plan, prompts={**plan.prompts, **extra}, **numbers)
    with (
        load_runtime(options, config, plan.encoded) as runtime,
        ProgressBars(enabled=not options.no_progress) as bars,
    ):
        report = verify(runtime, plan, on_progress=bars.update, on_expected=_say_how_long if options.quick else None)
        dealt = runtime.plan.num_cards > 1 and not report.interrupted
        several = decode_plainly(runtime, plan, bars.update, stage="several cards") if dealt else {}
    if several:
        with (
            load_runtime(options, one_card_config(config, runtime)) as first,
            ProgressBars(enabled=not options.no_progress) as bars,
        ):
            one = decode_plainly(first, plan, bars.update, stage="one card")
        report.runs.extend(compare_one_card(one, several, bitwise=report.bitwise))
    # What the report holds for: the promise is of one kind of GPU and one version of the libraries.
    versions = {"offload_runtime": __version__, "python": platform.python_version(), "torch": torch.__version__}
    record = {
        "target": config.target, "draft": config.draft, "quick": options.quick, "tokens": plan.tokens,
        "seeds": plan.seeds, **device_facts(runtime.devices),
        "dtype": str(runtime.dtype).removeprefix("torch."), "placement": runtime.placement, "versions": versions,
        "emulated": runtime.emulated,
    }  # fmt: skip
    print_result(
        {**record, **report.to_dict()}, [*report_tables(report), describe_machine(record)], as_json=options.as_json
    )
    if report.verdict == "defect":
        raise typer.Exit(DEFECT_EXIT_CODE)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _say_how_long(seconds: float) -> None:
    """Print how long a verification takes, as well as anybody can say."""
    about = f"{max(10, round(seconds, -1)):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    status_line(f"this takes about {about}; Ctrl-C ends it with what is there by then")


def one_card_config(config: RuntimeConfig, runtime: Runtime) -> RuntimeConfig:
    """Of a runtime on several cards, the same target on the first alone: with its memory and as many layers as fit."""
    from offload_runtime.hardware import load_profile

    limits, machine = config.vram, config.emulate
    if machine is not None:
        machine = replace(load_profile(machine), gpus=1)
    return replace(
        config, device=str(runtime.device), vram=limits[0] if isinstance(limits, tuple) else limits, draft="none",
        speculation=SpeculationOptions(), gamma=None, tree_nodes=None, resident_layers=None, trace=None,
        emulate=machine, context=runtime.context_tokens,
    )  # fmt: skip


def describe_machine(record: Mapping[str, Any]) -> str:
    """Return one line about what a report was found on: every card, the driver, and what was emulated."""
    names = [card["device"] + (f" ({card['device_name']})" if card["device_name"] else "") for card in record["cards"]]
    driver = f", driver {record['driver']}" if record["driver"] else ""
    emulated = f", emulating {record['emulated']}" if record["emulated"] else ""
    return f"on {' and '.join(names)}{driver}{emulated}, in {record['dtype']}"


def read_prompts(path: str) -> dict[str, str]:
    """Return the lines of a UTF-8 file (`-` is stdin) that are not blank, named by their numbers."""
    lines = enumerate(read_text(path, option="--prompts").splitlines(), start=1)
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
    """Return one row per proposer, or way of going on, and setting."""
    figures = (Column(name, justify="right") for name in ("runs", "tokens", "tokens per pass", "verdict"))
    table = Table("answers", "setting", *figures, title="beside plain decoding", title_justify="left")
    groups: dict[tuple[str, str], list[IdentityRun]] = {}
    for run in runs:
        groups.setdefault((run.proposer, run.setting), []).append(run)
    # By proposer; the settings of each stay in their order.
    for (proposer, setting), members in sorted(groups.items(), key=lambda group: group[0][0]):
        tokens, passes = sum(run.tokens for run in members), sum(run.passes for run in members)
        per_pass = (tokens - len(members)) / passes if passes else 0.0
        table.add_row(proposer, setting, str(len(members)), str(tokens), f"{per_pass:.2f}", _verdicts(members))
    return table


def _verdicts(runs: Iterable[IdentityRun]) -> str:
    """Return `identical`, or how many runs are not."""
    verdicts = [run.finding.verdict for run in runs]
    counts = [(verdicts.count(name), name) for name in ("defect", "near-tie")]
    found = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
    return ", ".join(found) or "identical"


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
    line = f"{finding.verdict}: {run.prompt}, {run.setting}, seed {run.seed}, {run.proposer}{windows}: "
    parts = []
    if finding.first_difference is not None:
        parts.append(f"token {finding.first_difference} of {run.tokens} is the first that differs")
    if (found := finding.mismatch) is not None:
        apart = f"the logits are {found.moved:.2g} apart and rounding explains {found.rounding:.2g}"
        parts.append(f"{found.token} instead of {found.plain_token} by a margin of {found.margin:.2g}, {apart}")
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
