"""Answers shown: the figures below them, what was reached beside its bound, and plain values for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_runtime.cli.options import AnswerOptions

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, GenerationStats, Runtime

_PROPOSERS = {"ngram": "n-grams'", "draft": "draft's", "middle": "middle level's"}
_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SHOWN_DEPTHS = 8
_SHOWN_WINDOWS = 4


def answer_line(result: GenerationResult, *more: str) -> str:
    """Return what was reached in one line, with what else there is to tell; an interrupted answer says so."""
    stopped = ["stopped"] if result.finish_reason == "interrupted" else []
    return " · ".join([*stopped, *speed_figures(result.stats), *more])


def speed_figures(stats: GenerationStats) -> list[str]:
    """Return what was reached, each figure beside its bound: tokens/s, tokens per pass, acceptance (of each level, by
    depth and by source), windows, link, prediction.

    Figures of an emulated machine begin with its name.
    """
    idle, hidden = share_figure(stats.link_idle_share), share_figure(stats.hidden_draft_share)
    figures = [
        f"emulating {stats.emulated}" if stats.emulated else "",
        f"{stats.tok_per_s:.1f} tokens/s",
        f"{stats.tokens_per_pass:.2f} tokens per pass",
        acceptance_figure(stats),
        depth_figure(stats),
        source_figure(stats),
        window_figure(stats),
        "" if stats.link_gbps is None else f"link {link_figure(stats)}{f', idle {idle}' if idle else ''}",
        f"drafting hidden {hidden}" if hidden else "",
        prediction_figure(stats),
    ]
    return [figure for figure in figures if figure]


def prediction_figure(stats: GenerationStats) -> str:
    """Return the predicted time of a pass beside the measured one; nothing where none was predicted or none passed."""
    predicted_s, measured_s = stats.predicted_s_per_pass, stats.measured_s_per_pass
    if not predicted_s or not measured_s:
        return ""
    off = 100 * (measured_s / predicted_s - 1)
    return f"predicted {predicted_s:.3g} s a pass, measured {measured_s:.3g} ({off:+.1f} %)"


def acceptance_figure(stats: GenerationStats) -> str:
    """Return what share of each level's proposals was accepted, the last level first; nothing if there were none."""
    levels = [level for level in reversed(stats.acceptance) if level.proposed]
    shares = [f"{level.rate:.2f} of the {_PROPOSERS[level.proposed_by]}" for level in levels]
    return f"accepted {', '.join(shares)}" if shares else ""


def share_figure(share: float | None) -> str:
    """Return a share as a percentage; nothing where it is not known."""
    return "" if share is None else f"{100 * share:.1f} %"


def depth_figure(stats: GenerationStats) -> str:
    """Return in how many passes a first proposal was accepted, a second one behind it, and so on; nothing if never."""
    shown = stats.accepted_by_depth[:_SHOWN_DEPTHS]
    more = ", ..." if len(stats.accepted_by_depth) > len(shown) else ""
    return f"by depth {', '.join(map(str, shown))}{more}" if shown else ""


def source_figure(stats: GenerationStats) -> str:
    """Return who proposed what was accepted, where it was more than one."""
    shares = [f"{count} {_PROPOSERS.get(source, source)}" for source, count in stats.accepted_by_source.items()]
    return f"by source {', '.join(shares)}" if len(shares) > 1 else ""


def window_figure(stats: GenerationStats) -> str:
    """Return how many passes verified which windows, the most frequent first; nothing without proposals."""
    shown = list(stats.windows.items())[:_SHOWN_WINDOWS]
    if not shown or set(stats.windows) == {"plain"}:
        return ""
    more = ", ..." if len(stats.windows) > len(shown) else ""
    return f"windows {', '.join(f'{count} x {window}' for window, count in shown)}{more}"


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
