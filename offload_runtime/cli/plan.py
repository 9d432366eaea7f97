"""`offload-runtime plan`: whether a model fits, how fast it will be and what would bring more, before it is loaded.

The first screen is the answer; `--explain` adds how it comes about, and `--json` has all of it as plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Column, Table

from offload_runtime.cli import terminal
from offload_runtime.cli.options import PlanOptions, refuse_early
from offload_runtime.cli.plan_details import draw_plan, plan_tables, require_plotting
from offload_runtime.config import RuntimeConfig
from offload_runtime.hardware import MachineProfile, list_profiles, load_profile, own_directory
from offload_runtime.options import require
from offload_runtime.sizes import GB, format_bytes

if TYPE_CHECKING:
    from offload_runtime.plan import MemoryPart, PassTime, Refusal, RunForecast, RunPlan, Upgrade

_COMMON_PROFILE = "rtx4090"  # what is planned for where nobody says


def plan(options: PlanOptions) -> None:
    """Say before anything is loaded what a run would hold where, how fast it would be, or what would fit instead."""
    config, picture = options.config, options.plot
    no_cpu = "nothing predicts how fast a CPU is: drop --device cpu to plan for a GPU, such as --profile rtx4090"
    require(config.devices[0] != "cpu", no_cpu)
    machine = choose_profile(config.profile)
    about = machine_lines(machine, config, named=config.profile is not None)
    if picture is not None:
        require_plotting(picture)
    refuse_early(config)
    with terminal.only_json(options.as_json):
        from offload_runtime import plan as planning

        figures = planning.machine_figures(machine)
        request = planning.describe_models(config)
        note = planning.note_on_draft(request)
        if config.finds_draft:
            request, note = planning.with_found_draft(request, config.target, figures)
        outcome = planning.plan_or_refuse(request, figures)
    if isinstance(outcome, planning.Refusal):
        lines = [*refusal_lines(outcome, explain=options.explain), *about]
        terminal.print_result(refusal_record(outcome, machine), lines, as_json=options.as_json)
        raise outcome.problem
    predicted = planning.forecast(outcome, figures)
    undrafted = planning.undrafted_tok_per_s(outcome, figures)
    gains = planning.upgrades(outcome, predicted, figures)
    if picture is not None:
        draw_plan(outcome, predicted, picture, title=f"{config.target} on {machine.name}")
    record = {**plan_record(outcome, predicted, gains), "target": config.target, "profile": machine.name}
    record |= {"draft_note": note or None, "undrafted_tok_per_s": undrafted}
    answer = [*answer_lines(outcome, predicted, undrafted), *drafting_lines(note)]
    screen = [*answer, *gain_lines(gains), *memory_lines(outcome), *about]
    if options.explain:
        screen += ["", *plan_tables(outcome, predicted, machine=machine)]
    terminal.print_result(record, screen, as_json=options.as_json)


def choose_profile(name: str | None) -> MachineProfile:
    """The machine that is named; else the one profile that the user has saved, if it has a GPU to plan for; else a
    common card."""
    if name is not None:
        return load_profile(name)
    own = [path for path in list_profiles().values() if path.parent == own_directory()]
    found = load_profile(own[0]) if len(own) == 1 else None
    return found if found is not None and found.gpus else load_profile(_COMMON_PROFILE)


# --- the first screen


def answer_lines(plan: RunPlan, predicted: RunForecast, undrafted_tok_per_s: float) -> list[str]:
    """The answer: that it fits, how fast it will be, with and without a draft, and why not faster."""
    from offload_runtime.plan import rounded

    plain, usual = predicted.plain_tok_per_s, predicted.usual.tok_per_s
    wait_s = predicted.prefill.seconds
    after = f"{wait_s:.0f}" if wait_s >= 10 else f"{wait_s:.1f}" if wait_s >= 1 else f"{wait_s:.2f}"
    first = f"first token after {after} s at {_context(predicted.context_tokens)}"
    lines = [f"Fits. About {rounded(max(plain, usual))} tokens/s; {first}."]
    if plan.draft is not None or plan.has_verifier:
        drafted = plan.draft is not None
        who, without = ("the draft", "without a draft") if drafted else ("its pass over retrieved tokens", "plain")
        share = f"if the model accepts {predicted.usual.acceptance:.0%} of what {who} proposes, as is usual"
        lines.append(f"That is {share}; {rounded(undrafted_tok_per_s)} tokens/s {without}.")
    if plan.streamed_bytes:
        what = (
            "weights"
            if not predicted.plain.kv_bytes
            else "weights and KV cache"
            if predicted.plain.weight_bytes
            else "KV cache"
        )
        lines.append(
            f"Each pass brings {format_bytes(plan.streamed_bytes)} of {what} from RAM, for which the card has no room."
        )
    return lines


def drafting_lines(note: str) -> list[str]:
    """Who was found to draft, or what would draft better, where the user left that open."""
    return [f"{note[0].upper()}{note[1:]}."] if note else []


def _context(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens} tokens"


def gain_lines(gains: Sequence[Upgrade]) -> list[Table | str]:
    """What would bring more, each with the speed that it brings; nothing where nothing would."""
    from offload_runtime.plan import rounded

    if not gains:
        return []
    table = _table("for more", "tokens/s")
    for gain in gains:
        table.add_row(gain.what + (f", {gain.note}" if gain.note else ""), rounded(gain.after_tok_per_s))
    return ["", table]


# What a part of a plan is to its user, by a word in its name; the first that is found counts.
_USES = {
    "draft": "draft", "KV": "KV cache", "retriev": "KV cache", "CUDA context": "CUDA", "layers": "weights",
    "embedding": "weights", "staging": "weights", "Python": "Python, PyTorch",
}  # fmt: skip


def memory_lines(plan: RunPlan) -> list[Table | str]:
    """What is held where, in GB."""
    card, ram = _by_use(plan.device), _by_use(plan.host)
    cards = plan.num_cards
    table = _table("GB", "card" if cards == 1 else f"{cards} cards", "RAM")
    for use in dict.fromkeys([*card, *ram]):
        table.add_row(use, _gigabytes(card[use]), _gigabytes(ram[use]))
    table.add_section()
    table.add_row("together", _gigabytes(plan.device_bytes), _gigabytes(plan.host_bytes))
    table.add_row("there is", _gigabytes(plan.limits.all_device_bytes or 0), _gigabytes(plan.limits.ram_bytes))
    return ["", table]


def machine_lines(machine: MachineProfile, config: RuntimeConfig, *, named: bool) -> list[str]:
    """Whose figures these are, and how to get others where the user has not named a machine."""
    sizes = f"{format_bytes(machine.vram_bytes or 0)} and {format_bytes(machine.ram_bytes)} of RAM"
    if machine.vram_others_bytes and config.vram is None:
        sizes += f"; {format_bytes(machine.vram_others_bytes)} are left to the desktop"
    lines = ["", f"for {machine.gpu_name} with {sizes}; details with --explain"]
    how = "another with --profile NAME, this machine's own after `offload-runtime profile --save NAME`"
    return lines if named else [*lines, f"by the profile {machine.name}; {how}"]


def _by_use(parts: Iterable[MemoryPart]) -> Counter[str]:
    found = Counter[str]()
    for part in parts:
        found[next((use for word, use in _USES.items() if word in part.name), "work space")] += part.nbytes
    return found


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / GB:.1f}" if nbytes else ""


def _table(*columns: str) -> Table:
    headers = (Column(name, justify="right" if number else "left") for number, name in enumerate(columns))
    return Table(*headers, box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)


def refusal_lines(refusal: Refusal, *, explain: bool) -> list[str]:
    """That it does not fit, and what would; with `explain` also what that takes."""
    short = " and ".join(f"{format_bytes(nbytes)} of {_memory(name)}" for name, nbytes in refusal.short_bytes.items())
    lines = [
        f"Does not fit: {short} short." if short else "Does not fit.",
        *(f"  {remedy}" for remedy in refusal.remedies),
    ]
    for one in refusal.suggestions if explain else ():
        device, host, pinned = map(format_bytes, (one.plan.device_bytes, one.plan.host_bytes, one.plan.pinned_bytes))
        lines.append(f"{one.change}: {device} of device memory, {host} of host memory, {pinned} of it page-locked")
    return lines


def _memory(name: str) -> str:
    return {"device memory": "VRAM", "host memory": "RAM"}.get(name, name)


# --- plain values for JSON: bytes, seconds and tokens, as the names say


def plan_record(plan: RunPlan, predicted: RunForecast, gains: Sequence[Upgrade]) -> dict[str, Any]:
    """What `--json` prints of a run that fits."""
    record = asdict(predicted)
    del record["plain"], record["verify"]
    record["pass"] = {"plain": _pass_record(predicted.plain), "verify": _pass_record(predicted.verify)}
    record["by_acceptance"] = record.pop("steps")
    upgrades = [asdict(gain) for gain in gains]
    return {"fits": True, **record, **memory_record(plan), "batch": plan.target.batch, "upgrades": upgrades}


def _pass_record(time: PassTime) -> dict[str, Any]:
    names = ("bytes_streamed", "link_s", "hbm_s", "arithmetic_s", "compute_s", "launch_s", "seconds", "bound_by")
    transfers = ("transfer_s",) if time.transfer_s else ()  # of one card there are none
    return {name: getattr(time, name) for name in (*names, "staging_s", *transfers)}


def memory_record(plan: RunPlan) -> dict[str, Any]:
    """What a run holds, and where each layer is."""
    placement, resident_kv = plan.placement, plan.resident_kv_layers
    device = {"limit_bytes": plan.limits.all_device_bytes, "peak_bytes": plan.device_bytes}
    host = {"peak_bytes": plan.host_bytes, "pinned_bytes": plan.pinned_bytes, "loading_bytes": plan.loading_bytes}
    layers = {
        "weights_resident": placement.resident_layers, "weights_staged": placement.staged_layers,
        "weights_streamed": placement.streamed_layers, "kv_resident": resident_kv,
        "kv_staged": placement.staged_kv_layers,
        "kv_streamed": [layer for layer in range(placement.num_layers) if layer not in resident_kv],
    }  # fmt: skip
    cards = [] if plan.num_cards == 1 else [_card_record(card) for card in plan.cards]
    return {
        "device_memory": {**device, "parts": [asdict(part) for part in plan.device]},
        **({"cards": cards} if cards else {}),
        "host_memory": {**host, "parts": [asdict(part) for part in plan.host]},
        "stored_bytes": plan.target.layout.bytes_by_kind,
        "layers": {**{name: list(which) for name, which in layers.items()}, "ring_buffers": placement.num_buffers},
        "draft_cache": None if plan.draft is None else plan.draft.cache,
        "retrieval_verifier": plan.has_verifier,
        "why_no_retrieval_verifier": None if plan.has_verifier else plan.reason or None,
    }


def _card_record(card: RunPlan) -> dict[str, Any]:
    """What one of several cards holds, of which layers, and what a pass streams to it."""
    return {
        "layers": list(card.target.layers), "weights_resident": list(card.placement.resident_layers),
        "kv_resident": list(card.resident_kv_layers), "ring_buffers": card.placement.num_buffers,
        "streamed_bytes": card.streamed_bytes, "limit_bytes": card.limits.device_bytes,
        "peak_bytes": card.device_bytes, "parts": [asdict(part) for part in card.device],
    }  # fmt: skip


def refusal_record(refusal: Refusal, machine: MachineProfile) -> dict[str, Any]:
    """What `--json` prints for a run that does not fit."""
    nearest = [{"change": nearest.change, **memory_record(nearest.plan)} for nearest in refusal.suggestions]
    about = {"fits": False, "profile": machine.name, "problem": str(refusal.error())}
    formats = [{"format": offer.mix, "nbytes": offer.nbytes, **memory_record(offer.plan)} for offer in refusal.formats]
    return {**about, "short_bytes": refusal.short_bytes, "nearest": nearest, "formats": formats}
