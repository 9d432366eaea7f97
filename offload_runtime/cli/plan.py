"""`offload-runtime plan`: what a run would take and how fast it would be, from configuration files alone."""

from __future__ import annotations

import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from offload_runtime.cli.terminal import ERROR_EXIT_CODE, error_line, status_line, write_json, write_text
from offload_runtime.config import RuntimeConfig
from offload_runtime.hardware import MachineProfile, list_profiles, load_profile

if TYPE_CHECKING:
    from offload_runtime.engine.nearest import Refusal
    from offload_runtime.engine.planning import PlanRequest

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
    with ExitStack() as stack:
        if as_json:
            # Libraries print to stdout now and then; a reader of JSON must not meet it.
            stack.enter_context(redirect_stdout(sys.stderr))
        from offload_runtime.engine.forecast import forecast, upgrades
        from offload_runtime.engine.levels import describe_speculation
        from offload_runtime.engine.machines import machine_figures
        from offload_runtime.engine.nearest import Refusal, plan_or_refuse
        from offload_runtime.engine.planning import ram_limit_bytes
        from offload_runtime.engine.tree_room import describe_tree_room

        figures, request = machine_figures(machine), plan_request(config)
        outcome = plan_or_refuse(request, figures)
    if isinstance(outcome, Refusal):
        _refuse(outcome, machine, as_json=as_json)
    predicted = forecast(outcome, request, figures)
    gains = upgrades(predicted, request, figures)
    if picture is not None:
        from offload_runtime.cli.plan_picture import draw_plan

        draw_plan(outcome, predicted, picture, title=f"{config.target} on {machine.name}")
    if as_json:
        from offload_runtime.cli.plan_record import plan_record

        write_json(plan_record(outcome, predicted, gains, machine=machine, target=config.target), sys.stdout)
        return
    from offload_runtime.cli.plan_tables import plan_tables, print_tables

    tables = plan_tables(
        outcome, predicted, gains, machine=machine,
        ram_limit_bytes=ram_limit_bytes(request, figures),
        speculation=describe_speculation(
            config.draft if request.draft is None else "the draft", outcome.placed, config.speculation
        )
        + describe_tree_room(outcome),
    )  # fmt: skip
    print_tables(tables, sys.stdout)


def _refuse(refusal: Refusal, machine: MachineProfile, *, as_json: bool) -> NoReturn:
    """Say why it does not fit and what would."""
    if as_json:
        from offload_runtime.cli.plan_record import refusal_record

        write_json(refusal_record(refusal, machine=machine), sys.stdout)
    else:
        from offload_runtime.cli.plan_tables import refusal_lines

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
    from offload_runtime.engine.planning import PlanRequest, describe_pair

    target, draft = describe_pair(config.target, config.draft, config.speculation.mode)
    return PlanRequest(
        target=target,
        draft_name=config.draft,
        draft=draft,
        dtype=config.dtype,
        context=config.context,
        kv=config.kv,
        batch=config.max_batch,
        resident_layers=config.resident_layers,
        gamma=config.gamma,
        tree_nodes=config.tree_nodes,
        max_gamma=config.max_gamma,
        speculation=config.speculation,
        vram_bytes=config.vram_bytes,
        ram_bytes=config.ram_bytes,
        pinned_bytes=config.pinned_bytes,
    )
