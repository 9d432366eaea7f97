"""What the measurements of a comparison say together: agreement of tokens, the bound of the link, table and chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comparing.systems import measured, outcome

from offload_runtime.config import GB
from offload_runtime.errors import OptionError, StorageError

FORMATS = (".png", ".svg")
REFERENCES = ("ours-plain", "resident")
_HEAD = (
    f"{'system':28} {'tok/s':>8} {'ours is':>8} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'TTFT s':>7} "
    f"{'tok/pass':>8} {'GB/s':>6} {'VRAM GB':>8}  same tokens"
)
# Of what two systems expect behind a prompt; rounding in 16 bits leaves 0.9 and more.
_LEAST_IN_COMMON = 0.5
# Without these a row would be misread.
_SHOWN_NOTES = ("SUSPECT", "GB/s and bound")


def leading_agreement(expected: Sequence[int], said: Sequence[int]) -> int:
    """How many tokens two answers begin with in common."""
    for index, (one, other) in enumerate(zip(expected, said, strict=False)):
        if one != other:
            return index
    return min(len(expected), len(said))


def agreements(results: Mapping[str, dict[str, Any]], *, greedy: bool) -> dict[str, Any] | None:
    """How far systems' answers begin as those of a reference do, which decodes without speculation.

    Args:
        results: Of all systems.
        greedy: Whether all say the likeliest token. Else only those are compared that draw the reference's noise.

    Returns:
        `reference`; of the `systems` that are compared `leading` tokens by prompt `of` the reference's; and, of all,
        what they expect behind the prompts `in_common` with it. None without a reference.
    """
    found = measured(dict(results))
    reference = next((name for name in REFERENCES if name in found), None)
    if reference is None:
        return None
    expected, software = found[reference]["tokens"], found[reference]["system"]
    in_common = {name: _in_common(found[reference], result) for name, result in found.items()}
    found = {name: result for name, result in found.items() if greedy or result["system"] == software}
    systems = {
        name: {
            "leading": [leading_agreement(one, other) for one, other in zip(expected, result["tokens"], strict=True)],
            "of": [len(one) for one in expected],
        }
        for name, result in found.items()
    }
    return {"reference": reference, "systems": systems, "in_common": in_common}


def _in_common(reference: Mapping[str, Any], result: Mapping[str, Any]) -> list[float]:
    """By prompt, the probability of the next token that two systems agree on, as a share of the tokens that the
    reference names: sum of min(p, q) over sum of p."""
    shares = []
    for one, other in zip(reference["next_token"], result["next_token"], strict=True):
        said = dict(zip(other["tokens"], other["probabilities"], strict=True))
        pairs = [(p, said.get(token, 0.0)) for token, p in zip(one["tokens"], one["probabilities"], strict=True)]
        shares.append(sum(min(p, q) for p, q in pairs) / sum(p for p, _ in pairs))
    return shares


def link_bound(results: Mapping[str, dict[str, Any]]) -> dict[str, float] | None:
    """The most tokens per second that any system can give that streams these bytes for every token.

    The bytes are those of plain decoding here, or the fewest that any system streams where it was not run; the
    bandwidth is the highest that any process measured. None where nothing is streamed or no link was measured; systems
    of which only the weights are known do not count, whose keys and values cross the link as well.
    """
    found = measured(dict(results))
    streaming = {name: one for name, one in found.items() if one["bytes_per_pass"] and one["bound"]}
    counted = [one["bytes_per_pass"] for one in streaming.values() if one["streamed"]["kv"] is not None]
    if not counted:
        return None
    plain = streaming.get("ours-plain")
    nbytes = plain["bytes_per_pass"] if plain else min(counted)
    peak_gbps = max(one["bound"]["link_gbps"] for one in streaming.values())
    return {"bytes_per_pass": nbytes, "link_gbps": peak_gbps, "tok_per_s": peak_gbps * GB / nbytes}


def times_ours_over(results: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """How many times the tokens per second of each other system; of `ours-plain` where `ours` was not run."""
    found = measured(dict(results))
    ours = next((name for name in ("ours", "ours-plain") if name in found), None)
    if ours is None:
        return {}
    return {
        name: found[ours]["tok_per_s"] / result["tok_per_s"] for name, result in found.items() if name != ours
    }  # fmt: skip


def _agreement_text(agreement: Mapping[str, Any] | None, name: str) -> str:
    if agreement is None:
        return "-"
    if name == agreement["reference"]:
        return "reference"
    row = agreement["systems"].get(name)
    return "other noise" if row is None else f"{sum(row['leading'])} of {sum(row['of'])}"


def _suspicion(agreement: Mapping[str, Any] | None, name: str) -> list[str]:
    """A line for a system that must compute something else than the reference does."""
    least = 1.0 if agreement is None else min(agreement["in_common"][name], default=1.0)
    if agreement is None or least >= _LEAST_IN_COMMON:
        return []
    return [
        f"  SUSPECT: of the token behind a prompt it expects {100 * least:.0f} % as {agreement['reference']} does; it "
        "computes something else, and neither its answers nor how often proposals are accepted mean anything"
    ]


def table(report: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = [_HEAD]
    for name, result in report["results"].items():
        if "tok_per_s" not in result:
            lines.append(f"{name:28} {outcome(result)}")
            continue
        times = report["times_ours_over"].get(name)
        token_ms = " ".join(f"{1e3 * result['token_s'][share]:8.1f}" for share in ("p50", "p90", "p99"))
        vram = result["peak_vram_bytes"]
        lines.append(
            f"{name:28} {result['tok_per_s']:8.3f} {'' if times is None else f'{times:.2f} x':>8} {token_ms} "
            f"{result['time_to_first_token_s']:7.2f} {result['tokens_per_pass']:8.2f} {result['link_gbps']:6.1f} "
            f"{'-' if vram is None else format(vram['driver'] / GB, '.2f'):>8}  "
            f"{_agreement_text(report['agreement'], name)}"
        )
        lines += [f"  {note}" for note in result["notes"] if note.startswith(_SHOWN_NOTES)]
        lines += _suspicion(report["agreement"], name)
    bound = report["bound"]
    if bound is not None:
        lines.append(
            f"one token a pass: at most {bound['tok_per_s']:.3f} tok/s, {bound['bytes_per_pass'] / GB:.2f} GB over a "
            f"link of {bound['link_gbps']:.1f} GB/s"
        )
    return "\n".join(lines)


def succeeded(results: Mapping[str, dict[str, Any]]) -> bool:
    """Whether every system ran that is installed and has what it needs, and something did."""
    return bool(measured(dict(results))) and not any("error" in result for result in results.values())


def require_matplotlib() -> None:
    """Refuse before minutes are spent on measuring.

    Raises:
        OptionError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise OptionError("the chart needs matplotlib: pip install 'offload-runtime[plots]', or --no-chart")


def draw(report: Mapping[str, Any], base: Path) -> list[Path]:
    """Draw a report twice, as PNG and as SVG beside each other.

    Args:
        report: As `compare.py` writes it.
        base: The files' name; an ending is replaced.

    Returns:
        The two files.

    Raises:
        StorageError: They cannot be written.
    """
    from matplotlib.figure import Figure

    found = measured(dict(report["results"]))
    speeds = {name: result["tok_per_s"] for name, result in found.items()}
    figure = Figure(figsize=(7.2, 1.5 + 0.42 * len(speeds)), layout="constrained")
    axes = figure.add_subplot()
    colours = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in speeds]
    bars = axes.barh(list(speeds), list(speeds.values()), color=colours)
    # The line of the bound crosses some of the labels.
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.bar_label(bars, [f"{speed:.3g}" for speed in speeds.values()], padding=4, bbox=white)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("tokens per second")
    axes.set_title(report["title"], fontsize="medium")
    bound = report["bound"]
    if bound is not None:
        label = f"bytes / link, one token a pass: {bound['tok_per_s']:.3g}"
        axes.axvline(bound["tok_per_s"], color="tab:red", linestyle="--", label=label)
        figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    paths = [base.with_suffix(ending) for ending in FORMATS]
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"{paths[0].with_suffix('')} cannot be drawn ({error}): name another --out") from error
    return paths
