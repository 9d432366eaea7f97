"""Answers shown: the figures below them, what was reached beside its bound, and plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offload_runtime.cli.options import AnswerOptions
from offload_runtime.config import format_bytes

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, GenerationStats, Runtime

_PROPOSERS = {"ngram": "n-grams'", "draft": "draft's", "middle": "middle level's"}
_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def answer_line(result: GenerationResult, *more: str) -> str:
    """Return what was reached in one line, with what else there is to tell; an interrupted answer says so."""
    stopped = ["stopped"] if result.finish_reason == "interrupted" else []
    return " · ".join([*stopped, *speed_figures(result.stats), *more])


def speed_figures(stats: GenerationStats) -> list[str]:
    """Return what was reached, each figure beside its bound: tokens/s, tokens per pass, acceptance (of each level, by
    depth and by source), windows, link, prediction.

    Figures of an emulated machine begin with its name.
    """
    figures = [f"{stats.tok_per_s:.1f} tokens/s", f"{stats.tokens_per_pass:.2f} tokens per pass"]
    if stats.emulated:
        figures.insert(0, f"emulating {stats.emulated}")
    levels = [level for level in reversed(stats.acceptance) if level.proposed]
    if levels:
        shares = [f"{level.rate:.2f} of the {_PROPOSERS[level.proposed_by]}" for level in levels]
        figures.append(_listed("accepted", shares))
    if stats.accepted_by_depth:
        figures.append(_listed("by depth", stats.accepted_by_depth))
    if len(stats.accepted_by_source) > 1:
        counts = [f"{count} {_PROPOSERS.get(source, source)}" for source, count in stats.accepted_by_source.items()]
        figures.append(_listed("by source", counts))
    if set(stats.windows) - {"plain"}:
        figures.append(_listed("windows", [f"{count} x {name}" for name, count in stats.windows.items()], most=4))
    if stats.link_gbps is not None:
        idle = "" if stats.link_idle_share is None else f", idle {100 * stats.link_idle_share:.1f} %"
        figures.append(f"link {link_figure(stats)}{idle}")
    if stats.hidden_draft_share is not None:
        figures.append(f"drafting hidden {100 * stats.hidden_draft_share:.1f} %")
    predicted_s, measured_s = stats.predicted_s_per_pass, stats.measured_s_per_pass
    if predicted_s and measured_s:
        off = 100 * (measured_s / predicted_s - 1)
        figures.append(f"predicted {predicted_s:.3g} s a pass, measured {measured_s:.3g} ({off:+.1f} %)")
    return figures


def _listed(name: str, items: Sequence[object], *, most: int = 8) -> str:
    """Return the first `most` of several figures behind their name."""
    shown = [str(item) for item in items[:most]] + ["..."] * (len(items) > most)
    return f"{name} {', '.join(shown)}"


def memory_figures(stats: GenerationStats) -> list[str]:
    """Return what else there is to tell of an answer: lengths, times and memory."""
    figures = [
        f"prompt of {stats.prompt_tokens} tokens, first token after {stats.time_to_first_token_s:.2f} s",
        f"answer of {stats.new_tokens} tokens in {stats.passes} passes",
        f"{format_bytes(stats.bytes_per_pass)} streamed per pass, {stats.stall_s:.2f} s spent waiting for the link",
        f"peak of {format_bytes(stats.peak_vram_bytes)} of device memory, {format_bytes(stats.pinned_bytes)} pinned",
    ]
    if stats.pageable_bytes:
        figures.append(f"{format_bytes(stats.pageable_bytes)} staged from pageable memory")
    return figures


def link_figure(stats: GenerationStats) -> str:
    """Return the link's speed beside its measured peak, such as `54.1 of 55.5 GB/s (97 %)`."""
    if stats.link_gbps is None:
        return "nothing streamed"
    if not stats.link_peak_gbps:
        return f"{stats.link_gbps:.1f} GB/s"
    share = 100 * stats.link_gbps / stats.link_peak_gbps
    return f"{stats.link_gbps:.1f} of {stats.link_peak_gbps:.1f} GB/s ({share:.0f} %)"


def answer_record(result: GenerationResult) -> dict[str, Any]:
    """Return what `--json` prints of one answer."""
    return {**vars(result), "stats": result.stats.to_dict()}


def run_record(runtime: Runtime, options: AnswerOptions) -> dict[str, Any]:
    """Return what `--json` prints of the run, which all its answers share."""
    dtype = _DTYPE_NAMES[str(runtime.dtype).removeprefix("torch.")]
    asked = {"target": options.target, "draft": options.draft, "seed": options.seed}
    return {**asked, "device": str(runtime.device), "dtype": dtype, "emulated": runtime.emulated}
