"""`offload-runtime bench`: how fast this machine reads prompts and answers, plainly and with who drafts, beside what is
predicted, and beside llama.cpp where that is asked for."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from offload_runtime.cli import terminal
from offload_runtime.cli.generate import load_runtime, machine_line
from offload_runtime.cli.hosts import has_layers_for_another
from offload_runtime.cli.llama_bench import LlamaBench
from offload_runtime.cli.options import BenchOptions, refuse_early
from offload_runtime.config import RuntimeConfig
from offload_runtime.files import require_writable, write_atomically
from offload_runtime.options import require
from offload_runtime.sizes import format_bytes, memory_name

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, GenerationStats, Runtime
    from offload_runtime.engine.request import PromptRoom
    from offload_runtime.plan.sizes import RunPlan

_WARM_UP_TOKENS = 8
_CONTEXT_STEP = 256
_REMEDY = "name another file with --out"


@dataclass(frozen=True)
class BenchRow:
    """Figures of one kind of answers to a prompt of one length, medians of several; None where nothing is known.

    Attributes:
        by: Who answers: `plain`, who drafts, or `llama.cpp`.
        prompt_tokens: The length.
        prompt_tok_per_s: Tokens of the prompt over the time to the first token, and as predicted.
        tok_per_s: Tokens after the first over their time, and as predicted for as many tokens a pass.
        tokens_per_pass: Of the target.
        link_share: What was brought over the link, of its measured peak.
        memory_share: What the target's passes read of the card's memory, of its measured bandwidth.
    """

    by: str
    prompt_tokens: int
    prompt_tok_per_s: float | None
    tok_per_s: float
    predicted_prompt_tok_per_s: float | None = None
    predicted_tok_per_s: float | None = None
    tokens_per_pass: float | None = None
    link_share: float | None = None
    memory_share: float | None = None


def bench(options: BenchOptions) -> None:
    """Measure prompts and answers of a few lengths on this machine, beside what is predicted."""
    if has_layers_for_another(options):
        return
    config, longest = options.config, max(options.lengths)
    if options.out is not None:
        require_writable(options.out, remedy=_REMEDY)
    refuse_early(config)
    text = _python_text() if options.text is None else terminal.read_text(options.text, option="--text")
    peer = LlamaBench.found(options.llama_bench, config.target) if options.compare else None
    config = _with_context(config, longest + options.tokens)
    tokens = list[int]()

    def check(room: PromptRoom) -> None:
        tokens.extend(room.encode(text)[:longest])
        lower = "lower --prompt-tokens, or name a longer --text"
        require(len(tokens) == longest, f"the text has {len(tokens)} tokens and {longest} are needed: {lower}")

    def check_plan(plan: RunPlan) -> None:
        require(peer is None or plan.num_cards == 1, "--compare is for one card: name it with --device")

    with load_runtime(options, config, check, check_plan) as runtime:
        rows, differing, peak_bytes = measure(runtime, tokens, options)
        record = _record(runtime, options, peak_bytes)
    if peer is not None:
        limit_bytes = None
        if runtime.device.type == "cuda":
            allowed_bytes = runtime.plan.limits.cards[0].device_bytes if config.vram is not None else None
            limit_bytes = max(peak_bytes, allowed_bytes or 0)
        found = peer.measure(runtime, options, limit_bytes)
        record["llama_cpp"] = found.about
        for length in options.lengths:
            at = rows.index(next(row for row in reversed(rows) if row.prompt_tokens == length)) + 1
            speeds = (found.prompt_tok_per_s[length], found.tok_per_s[length])
            rows.insert(at, BenchRow("llama.cpp", length, *speeds))
    record |= {"differing": differing, "rows": [asdict(row) for row in rows]}
    if options.out is not None:
        write_atomically(options.out, json.dumps(record, indent=1) + "\n", remedy=_REMEDY)
    terminal.print_result(record, _screen(rows, record), as_json=options.as_json)


def _with_context(config: RuntimeConfig, needed: int) -> RuntimeConfig:
    """Reserve as much context as is needed, where the user has named none. Raises `OptionError` where the model has
    less."""
    from offload_runtime.weights.sources import describe_model

    if config.context is not None:
        return config
    most = describe_model(config.target).config().max_position_embeddings
    lower = f"prompts and answers take {needed} tokens, and the model has {most}: lower --prompt-tokens"
    require(needed <= most, lower)
    return replace(config, context=min(most, -(-needed // _CONTEXT_STEP) * _CONTEXT_STEP))


def _python_text() -> str:
    """Return a text of half a million characters that every Python has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def measure(runtime: Runtime, tokens: Sequence[int], options: BenchOptions) -> tuple[list[BenchRow], int, int]:
    """Answer prompts that are the beginning of some tokens, greedily: of each length plainly, then with who drafts, in
    turns.

    Returns:
        A row for each length and kind, how many answers with a draft were not the plain one, and the most bytes of the
        device that were in use.
    """
    plan, drafted = runtime.plan, runtime.plan.drafter != "none" or runtime.plan.has_verifier
    who = "n-grams" if plan.drafter == "ngram" else plan.drafter_in_words
    kinds = {"plain": False} | ({"TriForce" if plan.has_verifier else who: True} if drafted else {})
    rows, differing, peak_bytes, done = list[BenchRow](), 0, 0, 0
    total = len(options.lengths) * len(kinds) * options.repeats
    with terminal.ProgressBars(enabled=not options.no_progress) as bars:
        for length in options.lengths:
            prompt = list(tokens[:length])
            results: dict[str, list[GenerationResult]] = {kind: [] for kind in kinds}
            for speculate in kinds.values():  # compiles kernels, captures graphs
                runtime.generate(prompt, max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True, speculate=speculate)
            for _ in range(options.repeats):
                for kind, speculate in kinds.items():
                    one = runtime.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True, speculate=speculate)
                    results[kind].append(one)
                    bars.update("measuring", done := done + 1, total)
            rows += [_row(runtime, kind, length, [one.stats for one in of]) for kind, of in results.items()]
            plain = results["plain"][0].tokens
            differing += sum(one.tokens != plain for of in results.values() for one in of)
            peak_bytes = max(peak_bytes, *(one.stats.peak_vram_bytes for of in results.values() for one in of))
    return rows, differing, peak_bytes


def _row(runtime: Runtime, kind: str, length: int, stats: Sequence[GenerationStats]) -> BenchRow:
    from offload_runtime.engine.load import planned_figures
    from offload_runtime.plan import cost

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    first_s, speed = median([one.time_to_first_token_s for one in stats]), median([one.tok_per_s for one in stats])
    assert first_s is not None and speed is not None
    per_pass = median([one.tokens_per_pass for one in stats])
    measured_s = median([one.measured_s_per_pass for one in stats])
    predicted_s = median([one.predicted_s_per_pass for one in stats])
    machine = planned_figures(runtime.plan)
    prompt_s = memory_s = None
    if machine is not None:
        prompt_s = cost.prefill_time(runtime.plan, machine, length).seconds
        memory_s = cost.pass_time(runtime.plan, machine, length_tokens=length, rows=1).hbm_s
    links = [one.link_gbps / one.link_peak_gbps if one.link_gbps and one.link_peak_gbps else None for one in stats]
    return BenchRow(
        kind, length, length / first_s, speed, None if not prompt_s else length / prompt_s,
        None if not predicted_s or per_pass is None else per_pass / predicted_s, per_pass, median(links),
        None if memory_s is None or not measured_s else memory_s / measured_s,
    )  # fmt: skip


def _record(runtime: Runtime, options: BenchOptions, peak_bytes: int) -> dict[str, Any]:
    """Return where the figures come from: the machine, the model, what lives where."""
    from offload_runtime import __version__
    from offload_runtime.engine.load import planned_figures
    from offload_runtime.engine.runtime import device_facts

    machine, plan = planned_figures(runtime.plan), runtime.plan
    return {
        "target": options.config.target, "draft": options.config.draft, **device_facts(runtime.devices),
        "machine": machine_line(runtime.device.type), "version": __version__, "profile": machine and machine.name,
        "dtype": str(runtime.dtype).removeprefix("torch."), "placement": runtime.placement,
        "context_tokens": runtime.context_tokens, "new_tokens": options.tokens, "repeats": options.repeats,
        "text": options.text, "peak_device_bytes": peak_bytes, "planned_device_bytes": plan.device_bytes,
        "pinned_bytes": plan.pinned_bytes, "host_bytes": plan.host_bytes, "streamed_bytes": plan.streamed_bytes,
        "llama_cpp": None,
    }  # fmt: skip


def _screen(rows: Sequence[BenchRow], record: dict[str, Any]) -> list[Table | str]:
    """Return the table, and below it what the figures are of."""
    prediction_note = "" if record["profile"] is None else "\n(predicted)"
    names = (f"prompt/s{prediction_note}", f"tokens/s{prediction_note}", "tokens\na pass", "link", "memory")
    columns = [Column("prompt", justify="right"), Column("answered by")]
    columns += [Column(name, justify="right") for name in names]
    table = terminal.narrow_table(*columns)

    def figure(value: float | None, predicted: float | None = None) -> str:
        found = "" if value is None else terminal.figure(value)
        return found if predicted is None else f"{found} ({terminal.figure(predicted)})"

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f} %"

    last = 0
    for row in rows:
        table.add_row(
            str(row.prompt_tokens) if row.prompt_tokens != last else "", row.by,
            figure(row.prompt_tok_per_s, row.predicted_prompt_tok_per_s),
            figure(row.tok_per_s, row.predicted_tok_per_s), figure(row.tokens_per_pass), share(row.link_share),
            share(row.memory_share),
        )  # fmt: skip
        last = row.prompt_tokens
    memory = memory_name(record["device"].split(":")[0])
    held = (
        f"{format_bytes(record['peak_device_bytes'])} of {memory}, {format_bytes(record['pinned_bytes'])} page-locked"
    )
    lines = [record["machine"], f"{record['placement']}; {held}"]
    if record["profile"] is not None:
        lines.append(f"predicted by the figures of {record['profile']}")
    lines.append("link: of its peak when the model was loaded; memory: what the target's passes read, of its bandwidth")
    if record["llama_cpp"] is not None:
        lines.append(record["llama_cpp"]["in_words"])
    if record["differing"]:
        lines.append(f"{record['differing']} answers with a draft differ from plain ones: ask `offload-runtime verify`")
    return [table, "", *lines]
