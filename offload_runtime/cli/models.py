"""Commands about the models that are here: `offload-runtime list` says what runs and how fast, `pull` fetches one from
the hub, and `rm` deletes one that was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from offload_runtime.cli import terminal
from offload_runtime.cli.options import ListOptions, PullOptions, RmOptions
from offload_runtime.cli.plan import own_profile
from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import BudgetError, CheckpointError, OffloadError, OptionError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.sizes import counted, format_bytes

if TYPE_CHECKING:
    from offload_runtime.weights.local import LocalModel


def list_models(options: ListOptions) -> None:
    """List the models that are here: in the hub's cache, ollama's and LM Studio's folders."""
    named = options.profile
    machine = own_profile() if named is None else load_profile(named).require_gpu()
    with terminal.only_json(options.as_json):
        from offload_runtime.weights.local import local_models

        found = local_models()
        with terminal.ProgressBars(enabled=not options.as_json) as bars:
            records = []
            for number, model in enumerate(found, 1):
                bars.update("reading headers", number, len(found))
                records.append(_record(model, machine))
    record = {"models": records, "profile": None if machine is None else machine.name}
    terminal.print_result(record, _screen(records, machine), as_json=options.as_json)


def _record(model: LocalModel, machine: MachineProfile | None) -> dict[str, Any]:
    """Return what is known of a model by its headers, and how fast it would be on a machine without a draft."""
    from offload_runtime.weights.safetensors import require_files
    from offload_runtime.weights.sources import describe_model

    record = {
        "name": model.name, "owner": model.owner, "path": str(model.path), "bytes": model.size_bytes, "family": None,
        "stored_as": [], "refusal": None, "short": None, "tok_per_s": None,
    }  # fmt: skip
    try:
        if model.path.is_dir():
            require_files(model.path)
        described = describe_model(model.path)
        record["family"] = described.family
        record["stored_as"] = described.layout(described.native_dtype).main_kinds
        if machine is None:
            return record
        from offload_runtime.plan.report import best_tok_per_s
        from offload_runtime.plan.search import plan_run

        plan = plan_run(RuntimeConfig(described, draft="ngram"), machine)
    except BudgetError as error:
        return record | {"short": str(error)}
    except OffloadError as error:  # in its own words
        return record | {"refusal": str(error)}
    return record | {"tok_per_s": best_tok_per_s(plan, machine)}


def _screen(records: list[dict[str, Any]], machine: MachineProfile | None) -> list[Table | str]:
    """Return the table, what is wrong with those that do not run, and whose figures speeds are by."""
    if not records:
        return [
            "No models are here: fetch one with `offload-runtime pull org/name:Q4_K_M`, or name the path of another."
        ]
    from offload_runtime.plan.report import rounded

    here = Column("here", no_wrap=True)
    name, size = Column("model", overflow="fold"), Column("size", justify="right")
    table = terminal.narrow_table(name, "in", size, "stored as", "family", here)
    troubles = []
    for one in records:
        verdict = "supported" if one["tok_per_s"] is None else f"{rounded(one['tok_per_s'])} tokens/s"
        if trouble := one["refusal"] or one["short"]:
            troubles.append(terminal.one_line(f"{one['name']}: {trouble}"))
            verdict = "does not run" if one["refusal"] else "does not fit"
        stored = ", ".join(one["stored_as"])
        table.add_row(one["name"], one["owner"], format_bytes(one["bytes"]), stored, one["family"] or "", verdict)
    about = "no profile of this machine is kept: `offload-runtime profile --save NAME` has speeds predicted"
    if machine is not None:
        about = f"predicted without a draft, by the profile {machine.name}; `offload-runtime plan` says more"
    total = f"{counted(len(records), 'model')}, {format_bytes(sum(one['bytes'] for one in records))}; {about}"
    return [table, "", *troubles, total]


def pull(options: PullOptions) -> None:
    """Fetch a model of the hub, or what an earlier attempt has left of it, and print where it lies."""
    from offload_runtime.weights.local import weight_bytes
    from offload_runtime.weights.sources import fetch_model, refuse_early

    with terminal.only_json(True):  # the path alone
        path = fetch_model(options.model)
    terminal.status_line(f"{options.model} is here, {format_bytes(weight_bytes(path))} of weights:")
    terminal.write_text(f"{path}\n")
    refuse_early(path)  # what a GGUF file is a model of stands in it


def rm(options: RmOptions) -> None:
    """Delete a model of the hub's cache, or what the demo has fetched; those of other programs stay."""
    from offload_runtime.weights import hub

    what, directory, files = _meant(options.model)
    found = files or [one for one in directory.rglob("*") if one.is_file() and not one.is_symlink()]
    size = format_bytes(sum(one.stat().st_size for one in found if one.exists()))
    if not options.yes:
        print(f"Delete {what} ({size})? [y/N] ", end="", file=sys.stderr, flush=True)
        agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
        if not agreed:
            raise OptionError(f"{what} stays: answer y, or say --yes")
    if files:
        hub.delete_files(directory, files)
    else:
        hub.delete_repository(directory)
    terminal.status_line(f"deleted {what} ({size})")


def _meant(name: str) -> tuple[str, Path, list[Path]]:
    """Return what `rm` of a name deletes: in words, its directory, and the files of it, none for a whole repository.

    Raises:
        CheckpointError: There is none, or several.
        OptionError: It is another program's.
    """
    from offload_runtime.weights.gguf_header import gguf_parts
    from offload_runtime.weights.local import HUB, OLLAMA, OWN, find_local, hub_repositories
    from offload_runtime.weights.sources import without_prefix

    name, repositories = without_prefix(name), dict(hub_repositories())
    repo_id = next((one for one in repositories if one.lower() == name.lower()), None)
    if repo_id is not None:
        return f"{repo_id}, all that is here of it", repositories[repo_id], []
    if (model := find_local(name)) is None:
        raise CheckpointError(f"no model that is here is called {name}: `offload-runtime list` names them")
    if model.owner not in (HUB, OWN):
        how = f"with `ollama rm {model.name}`" if model.owner == OLLAMA else "there"
        raise OptionError(f"{model.name} is not of the hub's cache but {model.owner}'s: delete it {how}")
    if model.owner == OWN:
        return model.name, model.path.parent, [model.path]
    repo_id = model.name.partition(":")[0]
    if model.path.is_dir():
        return f"{repo_id}, all that is here of it", repositories[repo_id], []
    return model.name, repositories[repo_id], gguf_parts(model.path)
