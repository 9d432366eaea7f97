"""`offload-runtime plan`: what a run would take and how fast it would be, from configuration files alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from offload_runtime.cli.terminal import ERROR_EXIT_CODE, error_line, only_json, status_line, write_json, write_text
from offload_runtime.config import RuntimeConfig
from offload_runtime.hardware import MachineProfile, list_profiles, load_profile

if TYPE_CHECKING:
    from offload_runtime.plan import PlanRequest, Refusal

_FALLBACK_PROFILE = "rtx4090"


def run_plan_command(
    config: RuntimeConfig,
    *,
    profile: str | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Print the plan as tables, or as one JSON object, and draw it where a picture is asked for.

    Raises `typer.Exit(2)` after saying what would fit when the run does not.
    """
    machine = choose_profile(profile)
    if picture is not None:
        from offload_runtime.cli.plan_picture import require_plotting

        require_plotting(picture)
    with only_json(as_json):
        from offload_runtime.plan import Refusal, forecast, machine_figures, plan_or_refuse, upgrades

        figures = machine_figures(machine)
        outcome = plan_or_refuse(plan_request(config), figures)
    if isinstance(outcome, Refusal):
        _refuse(outcome, machine, as_json=as_json)
    predicted = forecast(outcome, figures)
    gains = upgrades(outcome, predicted, figures)
    if picture is not None:
        from offload_runtime.cli.plan_picture import draw_plan

        draw_plan(outcome, predicted, picture, title=f"{config.target} on {machine.name}")
    from offload_runtime.cli.plan_render import plan_record, plan_tables, print_tables

    if as_json:
        write_json(plan_record(outcome, predicted, gains, machine=machine, target=config.target), sys.stdout)
        return
    print_tables(plan_tables(outcome, predicted, gains, machine=machine), sys.stdout)


def _refuse(refusal: Refusal, machine: MachineProfile, *, as_json: bool) -> NoReturn:
    """Say why it does not fit and what would."""
    from offload_runtime.cli.plan_render import refusal_lines, refusal_record

    if as_json:
        write_json(refusal_record(refusal, machine=machine), sys.stdout)
    else:
        write_text("".join(f"{line}\n" for line in refusal_lines(refusal)))
    error_line(refusal.problem)
    raise typer.Exit(ERROR_EXIT_CODE)


def choose_profile(name: str | None) -> MachineProfile:
    """The machine that is named; else the one profile that the user has saved, if it has a GPU to plan for; else a
    common card. What was not named is said on stderr."""
    if name is not None:
        return load_profile(name)
    own = [entry for entry in list_profiles() if not entry.shipped]
    found = load_profile(own[0].path) if len(own) == 1 else None
    if found is None or not found.gpus:
        found = load_profile(_FALLBACK_PROFILE)
    status_line(
        f"planning for {found.name}: choose with --profile, or measure this machine with "
        "`offload-runtime profile --save NAME`"
    )
    return found


def plan_request(config: RuntimeConfig) -> PlanRequest:
    """Read the configuration files of target and draft."""
    from offload_runtime.plan import PlanRequest, describe_pair

    target, draft = describe_pair(config.target, config.draft, config.speculation.mode)
    return PlanRequest.of(config, target, draft)
