"""`offload-runtime plan`: whether a model fits, how fast it will be and what would bring more, before it is loaded.

The first screen is the answer; `--explain` adds how it comes about (as `generate`, `chat` and `serve` do before they
load), `--json` has all of it as plain values, and `--plot` draws what is held where.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from offload_runtime.cli import terminal
from offload_runtime.cli.options import PlanOptions, refuse_early
from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import OptionError
from offload_runtime.files import regular_file, write_atomically
from offload_runtime.hardware import MachineProfile, list_profiles, load_profile, own_directory
from offload_runtime.options import require
from offload_runtime.sizes import GB, format_bytes, memory_name

if TYPE_CHECKING:
    from offload_runtime.plan.cost import PassTime
    from offload_runtime.plan.hosts import SharedPlan
    from offload_runtime.plan.model import Parts
    from offload_runtime.plan.report import Change, Refusal, RunForecast
    from offload_runtime.plan.sizes import RunPlan

_COMMON_PROFILE = "rtx4090"  # what is planned for where nobody says


def plan(options: PlanOptions) -> None:
    """Say before anything is loaded what a run would hold where, how fast it would be, or what would fit instead."""
    config, picture, names = options.config, options.plot, options.profiles or []
    no_cpu = "nothing predicts how fast a CPU is: drop --device cpu to plan for a GPU, such as --profile rtx4090"
    require(config.device_type != "cpu", no_cpu)
    if len(names) > 1:
        _plan_several(options, [load_profile(name).require_gpu() for name in names])
        return
    require(options.network is None, "--network does nothing for one machine: name several with --profile, or drop it")
    # Without a name the user's own, or else a common card.
    machine = (load_profile(names[0]) if names else own_profile() or load_profile(_COMMON_PROFILE)).require_gpu()
    about = machine_lines(machine, config, named=bool(names))
    if picture is not None:
        require_plotting(picture)
    refuse_early(config)
    with terminal.only_json(options.as_json):
        from offload_runtime.plan import report
        from offload_runtime.plan.sizes import describe_models

        request = describe_models(config)
        note = report.note_on_draft(request)
        if config.finds_draft:
            request, note = report.with_found_draft(request, config.target, machine)
        outcome = report.plan_or_refuse(request, machine)
    if isinstance(outcome, report.Refusal):
        lines = [*refusal_lines(outcome), *about]
        terminal.print_result(refusal_record(outcome, machine), lines, as_json=options.as_json)
        raise outcome.problem
    predicted, gains = report.forecast(outcome, machine), report.upgrades(outcome, machine)
    undrafted = report.undrafted_tok_per_s(outcome, machine)
    if picture is not None:
        draw_plan(outcome, picture, title=f"{config.target} on {machine.name}")
    record = {**plan_record(outcome, predicted, gains), "target": config.target, "profile": machine.name}
    record |= {"draft_note": note or None, "undrafted_tok_per_s": undrafted}
    screen: list[Table | str] = [*answer_lines(outcome, predicted, undrafted)]
    screen += [f"{note[0].upper()}{note[1:]}."] if note else []
    screen += [*gain_lines(gains), *memory_lines(outcome), *about]
    if options.explain:
        screen += ["", f"machine: {machine.name} ({machine.source})"]
        screen += [*memory_tables(outcome), *time_tables(outcome, predicted)]
    terminal.print_result(record, screen, as_json=options.as_json)


def _plan_several(options: PlanOptions, machines: Sequence[MachineProfile]) -> None:
    """Say how fast machines would be that share the model, each with some of its layers."""
    config = options.config
    require(options.network is not None, "several --profile share the model: say how fast --network between them is")
    require(options.plot is None, "--plot draws one machine: name one --profile, or drop it")
    refuse_early(config)
    with terminal.only_json(options.as_json):
        from offload_runtime.plan import hosts, report
        from offload_runtime.plan.sizes import describe_models

        network = hosts.parse_network(options.network or "")
        request = describe_models(hosts.shared_request(config))
        shared = hosts.plan_shared(request, machines, network)
        alone = report.plan_or_refuse(replace(request, device="cuda"), machines[0])
    alone_tok_per_s = None if isinstance(alone, report.Refusal) else report.best_tok_per_s(alone, machines[0])
    record = shared_record(shared, alone_tok_per_s) | {"target": config.target, "network": options.network}
    screen: list[Table | str] = [*shared_lines(shared, alone_tok_per_s, options.network or "")]
    if options.explain:
        for number, (plan, machine) in enumerate(zip(shared.plans, machines, strict=True), 1):
            screen += ["", f"machine {number}: {machine.name} ({machine.source})", *memory_tables(plan)]
    terminal.print_result(record, screen, as_json=options.as_json)


def shared_lines(shared: SharedPlan, alone_tok_per_s: float | None, network: str) -> list[Table | str]:
    """Return how fast machines are together, what each has, and what the first would do alone."""
    from offload_runtime.plan.report import rounded

    plain, best = shared.plain_tok_per_s, max(shared.plain_tok_per_s, shared.usual_tok_per_s)
    requests = f" of {shared.target.batch} requests together" if shared.target.batch > 1 else ""
    wait, tokens = f"{shared.first_token_s:.2g}", shared.target.context_tokens
    alone = "it does not fit" if alone_tok_per_s is None else f"about {rounded(alone_tok_per_s)} tokens/s"
    pass_ms, network_ms = 1e3 * shared.pass_s(), 1e3 * shared.pass_network_s()
    table = _table("machine", "layers", "resident", "streamed a pass", "card", "RAM", "pass, ms")
    each = zip(shared.machines, shared.plans, shared.layers_in_words, shared.passes(), strict=True)
    for machine, plan, layers, own in each:
        table.add_row(
            machine.name, layers, str(len(plan.placement.resident_layers)),
            format_bytes(own.bytes_streamed), format_bytes(plan.device_bytes), format_bytes(plan.host_bytes),
            f"{1e3 * own.seconds:.3g}",
        )  # fmt: skip
    return [
        f"Fits on {len(shared.plans)} machines. About {rounded(best)} tokens/s{requests}, {rounded(plain)} plain; "
        f"first token after {wait} s at {tokens} tokens.",
        f"Of a plain pass of {pass_ms:.3g} ms rows are on the way for {network_ms:.2g} ms ({network} a second).",
        *([] if shared.strides == 1 else [
            f"Layers are dealt out in {shared.strides} strides, so that links are busy while others compute: in one, a "
            f"pass would take {1e3 * shared.pass_s(strides=1):.3g} ms."
        ]),
        f"On the first machine alone {alone}.", "", table,
    ]  # fmt: skip


def shared_record(shared: SharedPlan, alone_tok_per_s: float | None) -> dict[str, Any]:
    """Return what `--json` prints of a model that machines share."""
    each = zip(shared.machines, shared.plans, shared.layer_ranges, shared.passes(), strict=True)
    return {
        "fits": True, "plain_tok_per_s": shared.plain_tok_per_s, "usual_tok_per_s": shared.usual_tok_per_s,
        "alone_tok_per_s": alone_tok_per_s, "first_token_s": shared.first_token_s, "batch": shared.target.batch,
        "context_tokens": shared.target.context_tokens, "pass_s": shared.pass_s(),
        "network_s": shared.pass_network_s(), "strides": shared.strides,
        "pass_in_one_stride_s": shared.pass_s(strides=1),
        "machines": [
            memory_record(plan)
            | {"profile": machine.name, "pass": _pass_record(own)}
            | {"model_layers": [[one.start, one.stop] for one in ranges]}
            for machine, plan, ranges, own in each
        ],
    }  # fmt: skip


def own_profile() -> MachineProfile | None:
    """Return the one profile that the user has saved, if it has a GPU to plan for."""
    own = [path for path in list_profiles().values() if path.parent == own_directory()]
    found = load_profile(own[0]) if len(own) == 1 else None
    return found if found is not None and found.gpus else None


# --- the first screen


def answer_lines(plan: RunPlan, predicted: RunForecast, undrafted_tok_per_s: float) -> list[str]:
    """Return the answer: that it fits, how fast it will be, with and without a draft, and why not faster."""
    from offload_runtime.plan.report import rounded

    plain, usual, wait_s = predicted.plain_tok_per_s, predicted.usual, predicted.prefill.seconds
    after = f"{wait_s:.0f}" if wait_s >= 10 else f"{wait_s:.1f}" if wait_s >= 1 else f"{wait_s:.2f}"
    tokens = predicted.context_tokens
    context = f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens} tokens"
    speed = rounded(max(plain, usual.tok_per_s))
    lines = [f"Fits. About {speed} tokens/s; first token after {after} s at {context}."]
    if plan.draft is not None or plan.has_verifier:
        who = "its pass over retrieved tokens" if plan.draft is None else plan.drafter_in_words
        without = "plain" if plan.draft is None else "without a draft"
        assumed = plan.draft is not None and plan.draft.acceptance_is_assumed
        how = "which is assumed, not measured" if assumed else "as is usual"
        share = f"if the model accepts {usual.acceptance:.0%} of what {who} proposes, {how}"
        lines.append(f"That is {share}; {rounded(undrafted_tok_per_s)} tokens/s {without}.")
    if plan.streamed_bytes:
        one = predicted.plain
        brought = {"weights": one.weight_bytes, "KV cache": one.kv_bytes, "experts": one.expert_bytes}
        what = " and ".join(name for name, nbytes in brought.items() if nbytes)
        no_room = f"{format_bytes(plan.streamed_bytes)} of {what} from RAM, for which the card has no room"
        lines.append(f"Each pass brings {no_room}.")
    if plan.target.host_experts:
        lines.append(f"There is {plan.target.experts_in_words}.")
    if by_hits := predicted.plain_tok_per_s_by_hits:
        speeds = ", ".join(f"{rounded(speed)} at {100 * hits:.0f} %" for hits, speed in by_hits.items())
        lines.append(f"Plain decoding by hits: {speeds}, in tokens/s.")
    return lines


def gain_lines(gains: Sequence[Change]) -> list[Table | str]:
    """Return what would bring more, each with the speed that it brings; nothing where nothing would."""
    from offload_runtime.plan.report import rounded

    table = _table("for more", "tokens/s")
    table.columns[0].no_wrap = False
    for gain in gains:
        table.add_row(gain.what, rounded(gain.tok_per_s))
    return ["", table] if gains else []


# What a part of a plan is to its user, by a word in its name; the first that is found counts.
_USES = {
    "draft": "draft", "KV": "KV cache", "retriev": "KV cache", "CUDA context": "CUDA", "layers": "weights",
    "embedding": "weights", "head": "weights", "staging": "weights", "experts": "experts", "Python": "Python, PyTorch",
    "states": "states",
}  # fmt: skip


def memory_lines(plan: RunPlan) -> list[Table | str]:
    """Return what is held where, in GB."""
    cards = plan.num_cards
    table = _table("GB", "card" if cards == 1 else f"{cards} cards", "RAM")

    def by_use(parts: Parts) -> Counter[str]:
        found = Counter[str]()
        for name, nbytes in parts.items():
            found[next((use for word, use in _USES.items() if word in name), "work space")] += nbytes
        return found

    card, ram = by_use(plan.device), by_use(plan.host)
    rows = [(use, card[use], ram[use]) for use in dict.fromkeys([*card, *ram])]
    rows.append(("together", plan.device_bytes, plan.host_bytes))
    rows.append(("there is", plan.limits.device_bytes or 0, plan.limits.ram_bytes))
    for name, *sizes in rows:
        if name == "together":
            table.add_section()
        table.add_row(name, *(f"{nbytes / GB:.1f}" if nbytes else "" for nbytes in sizes))
    return ["", table]


def machine_lines(machine: MachineProfile, config: RuntimeConfig, *, named: bool) -> list[str]:
    """Whose figures these are, and how to get others where the user has not named a machine."""
    sizes = f"{format_bytes(machine.vram_bytes or 0)} and {format_bytes(machine.ram_bytes)} of RAM"
    if machine.vram_others_bytes and config.vram is None:
        sizes += f"; {format_bytes(machine.vram_others_bytes)} are left to the desktop"
    lines = ["", f"for {machine.gpu_name} with {sizes}; details with --explain"]
    how = "another with --profile NAME, this machine's own after `offload-runtime profile --save NAME`"
    return lines if named else [*lines, f"by the profile {machine.name}; {how}"]


def refusal_lines(refusal: Refusal) -> list[str]:
    """Say that it does not fit, and what would."""
    words = {"device memory": "VRAM", "host memory": "RAM"}
    short = [f"{format_bytes(nbytes)} of {words.get(name, name)}" for name, nbytes in refusal.short_bytes.items()]
    answer = f"Does not fit: {' and '.join(short)} short." if short else "Does not fit."
    return [answer, *(f"  {remedy}" for remedy in refusal.remedies)]


def _table(*columns: str, title: str | None = None, headed: bool = True) -> Table:
    """Return a table of figures behind a column of names."""
    headers = [
        Column(name, justify="left" if not number or name == "bound by" else "right", no_wrap="," not in name)
        for number, name in enumerate(columns)
    ]
    return terminal.narrow_table(*headers, title=title, headed=headed)


# --- what --explain adds


def print_explanation(plan: RunPlan) -> None:
    """Print on stderr what a run holds where and, where the machine's figures are known, how long a pass and a prompt
    that fills the context take."""
    from offload_runtime.engine.load import planned_figures
    from offload_runtime.plan.report import forecast

    machine = planned_figures(plan)
    terminal.print_tables(memory_tables(plan), sys.stderr)
    if machine is None:
        terminal.status_line("nothing is predicted: no figures of this machine are known")
    else:
        tables = time_tables(plan, forecast(plan, machine))[:1]
        terminal.print_tables([f"by the figures of {machine.name}:", *tables], sys.stderr)


def memory_tables(plan: RunPlan) -> list[Table | str]:
    """Return what is resident and what is streamed, and what is held where, part by part."""
    from offload_runtime.plan.report import describe_plan

    words, target = describe_plan(plan), plan.target
    words.append(f"a pass behind {target.context_tokens - 1} tokens streams {format_bytes(plan.streamed_bytes)}")
    words.append(f"weights: {target.placed_layout.stored_as}")
    for number, card in enumerate(plan.cards if plan.num_cards > 1 else ()):
        kept = f", and the KV cache of {len(card.resident_kv_layers)}" if target.on_host else ""
        where = f"{len(card.placement.resident_layers)} of {len(card.target.layers)} layers resident{kept}"
        words.append(f"card {number}: {where}; a pass streams {format_bytes(card.streamed_bytes)} to it")
    memory = memory_name(plan.request.device_type)
    device = [(name, *(card.device[name] for card in plan.cards)) for name in plan.device]
    device.append(("peak", *(card.device_bytes for card in plan.cards)))
    device.append(("limit", *(card.limits.device_bytes or 0 for card in plan.cards)))
    host = [(name, nbytes, plan.page_locked[name]) for name, nbytes in plan.host.items()]
    host += [("peak", plan.host_bytes, plan.pinned_bytes), ("limit", plan.limits.ram_bytes, 0)]
    columns = [""] if plan.num_cards == 1 else [f"card {number}" for number in range(plan.num_cards)]
    tables = [_bytes_table(memory, columns, device), _bytes_table("host memory", ["", "page-locked"], host)]
    return [*words, *tables]


def _bytes_table(title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Table:
    """Return sizes by name, all in the unit of what is held at the most; what there is nothing of stays empty."""
    peak = max(nbytes for name, *sizes in rows for nbytes in sizes if name == "peak")
    unit, scale = next((unit, scale) for unit, scale in (("GB", GB), ("MB", 10**6), ("kB", 1000)) if peak >= scale)
    table = _table("", *columns, title=f"\n{title}, in {unit}", headed=any(columns))
    for name, *sizes in rows:
        if name == "peak":
            table.add_section()
        if any(sizes):
            table.add_row(name, *(f"{nbytes / scale:.2f}" if nbytes else "" for nbytes in sizes))
    return table


def time_tables(plan: RunPlan, predicted: RunForecast) -> list[Table | str]:
    """Return what passes, steps and prompts take by cause, and the speed by the target's acceptance."""
    columns = ("", "whole", "link", "experts", "HBM", "arithmetic", "launch", "staging", "bound by")
    causes = _table(*columns, title=f"\npredicted at {predicted.context_tokens} tokens of context, in ms")
    passes = [("pass, 1 token", predicted.plain)]
    passes += [(f"pass, {predicted.proposals + 1} tokens", predicted.verify)] if predicted.gamma else []
    for name, time in passes:
        copies = (time.seconds, time.link_s, time.demand_s)
        parts = (*copies, time.hbm_s, time.arithmetic_s, time.launch_s, time.staging_s)
        causes.add_row(name, *map(_ms, parts), time.bound_by)
    if plan.draft is not None:
        causes.add_row("draft step", _ms(predicted.draft_step_s))
    if predicted.verifier_step_s is not None:
        causes.add_row("verifier step", _ms(predicted.verifier_step_s))
    prefill = predicted.prefill
    whole, link, compute, staging = map(_ms, (prefill.seconds, prefill.link_s, prefill.compute_s, prefill.staging_s))
    causes.add_row("to first token", whole, link, "", "", compute, "", staging, prefill.bound_by)
    if not predicted.steps:
        return [causes]
    grown = " in a tree (of a node's first child)" if predicted.tree_nodes else ""
    speeds = _table(
        "accepted", "tokens a pass", "drafting, ms", "hidden, ms", "round, ms", "tokens/s", "bound by",
        title=f"\ntokens/s by the target's acceptance of {predicted.proposals} proposals{grown}",
    )  # fmt: skip
    plain = predicted.plain
    speeds.add_row("plain", "1.00", "", "", _ms(plain.seconds), f"{predicted.plain_tok_per_s:.2f}", plain.bound_by)
    rows = {row.acceptance: row for row in (*predicted.steps, predicted.usual)}  # the usual one may be among them
    usual = "assumed" if plan.draft is not None and plan.draft.acceptance_is_assumed else "usual"
    for row in sorted(rows.values(), key=lambda row: row.acceptance):
        name = f"{row.acceptance:.2f}" + (f" ({usual})" if row is predicted.usual else "")
        times = map(_ms, (row.drafting_s, row.hidden_s, row.seconds))
        speeds.add_row(name, f"{row.tokens:.2f}", *times, f"{row.tok_per_s:.2f}", row.bound_by)
    return [causes, speeds]


def _ms(seconds: float) -> str:
    """Return milliseconds for a column; nothing where it takes no time."""
    return terminal.figure(1000 * seconds) if seconds else ""


# --- plain values for JSON: bytes, seconds and tokens, as the names say


def plan_record(plan: RunPlan, predicted: RunForecast, gains: Sequence[Change]) -> dict[str, Any]:
    """Return what `--json` prints of a run that fits."""
    record = asdict(predicted)
    del record["plain"], record["verify"]
    record["pass"] = {"plain": _pass_record(predicted.plain), "verify": _pass_record(predicted.verify)}
    record["by_acceptance"] = record.pop("steps")
    before = max(predicted.plain_tok_per_s, predicted.usual.tok_per_s)
    upgrades = [{"what": gain.what, "before_tok_per_s": before, "after_tok_per_s": gain.tok_per_s} for gain in gains]
    return {"fits": True, **record, **memory_record(plan), "batch": plan.target.batch, "upgrades": upgrades}


def _pass_record(time: PassTime) -> dict[str, Any]:
    return {**asdict(time), **{name: getattr(time, name) for name in ("bytes_streamed", "seconds", "bound_by")}}


def memory_record(plan: RunPlan) -> dict[str, Any]:
    """Return what a run holds, and where each layer is; of several cards also what each has of it."""
    placement, resident_kv = plan.placement, plan.resident_kv_layers
    device = {"limit_bytes": plan.limits.device_bytes, "peak_bytes": plan.device_bytes}
    layers = {
        "weights_resident": placement.resident_layers, "weights_staged": placement.staged_layers,
        "weights_streamed": placement.streamed_layers, "kv_resident": resident_kv,
        "kv_staged": placement.staged_kv_layers,
        "kv_streamed": [layer for layer in plan.kv_layers if layer not in resident_kv],
    }  # fmt: skip
    return {
        "device_memory": {**device, "parts": _parts_record(plan.device)},
        **({"cards": [memory_record(card) for card in plan.cards]} if plan.num_cards > 1 else {}),
        "host_memory": {
            "peak_bytes": plan.host_bytes, "pinned_bytes": plan.pinned_bytes,
            "loading_bytes": plan.loading.total(), "parts": _parts_record(plan.host, plan.page_locked),
        },
        "stored_bytes": plan.target.placed_layout.bytes_by_kind,
        "experts": plan.target.num_experts, "expert_buffers": placement.pool_buffers,
        "layers": {**{name: list(which) for name, which in layers.items()}, "ring_buffers": placement.num_buffers},
        "draft_cache": None if plan.draft is None else plan.draft.cache,
        "retrieval_verifier": plan.has_verifier,
        "why_no_retrieval_verifier": None if plan.has_verifier else plan.reason or None,
    }  # fmt: skip


def _parts_record(parts: Parts, pinned: Collection[str] = ()) -> list[dict[str, Any]]:
    return [{"name": name, "nbytes": nbytes, "pinned": name in pinned} for name, nbytes in parts.items()]


def refusal_record(refusal: Refusal, machine: MachineProfile) -> dict[str, Any]:
    """Return what `--json` prints for a run that does not fit."""
    nearest = [{"change": one.what, "tok_per_s": one.tok_per_s, **memory_record(one.plan)} for one in refusal.changes]
    problem = {"fits": False, "profile": machine.name, "problem": str(refusal.error())}
    return {**problem, "short_bytes": refusal.short_bytes, "nearest": nearest}


# --- the picture: stacked bars of what is held where


def require_plotting(path: Path, option: str = "--plot") -> None:
    """Refuse a picture that could not be drawn, before anything is planned.

    Raises:
        OptionError: matplotlib is not installed, or the file's ending is none of its formats.
        StorageError: What is there is not a regular file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise OptionError(f"{option} needs matplotlib: pip install 'offload-runtime[plots]'") from error
    formats = FigureCanvasAgg.get_supported_filetypes()
    fine = path.suffix.removeprefix(".").lower() in formats
    require(fine, f"{option} {path} must end in one of {', '.join(sorted(formats))}")
    regular_file(path, remedy=f"choose another place for {option}")


def draw_plan(plan: RunPlan, path: Path, *, title: str) -> None:
    """Draw the parts of device and host memory on top of each other, with the limits; the ending chooses the format.
    Raises `StorageError` where the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    limits = (plan.limits.device_bytes, plan.limits.ram_bytes)
    for place, (parts, limit_bytes) in enumerate(zip((plan.device, plan.host), limits, strict=True)):
        top_gb = 0.0
        for name, nbytes in parts.items():
            size_gb, hatch = nbytes / GB, "//" if place == 1 and name in plan.page_locked else None
            label = f"{name}: {size_gb:.3g} GB"
            axes.bar(place, size_gb, bottom=top_gb, edgecolor="white", hatch=hatch, label=label)
            top_gb += size_gb
        if limit_bytes is not None:
            axes.hlines(limit_bytes / GB, place - 0.4, place + 0.4, colors="black", linestyles="dashed")
    cards = f" of {plan.num_cards} cards" if plan.num_cards > 1 else ""
    axes.set_xticks([0, 1], [f"device memory{cards}", "host memory (hatched: page-locked)"])
    axes.set_ylabel("GB")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)  # beside the bars: it would hide what is high
    axes.set_title(title)
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".").lower())
    write_atomically(path, [picture.getvalue()], remedy="choose another place for --plot")
