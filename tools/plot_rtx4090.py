"""The README's chart: tokens a second on an emulated RTX 4090, by draft, from tools/results.

Run as `python tools/plot_rtx4090.py docs/charts/rtx4090.svg`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

from systems import require_matplotlib

RESULTS = Path(__file__).parent / "results"
DRAFTS = {0.02: "a close draft\n(noise 0.02)", 0.05: "a usual one\n(0.05)", 0.1: "a poor one\n(0.1)"}


def emulated_speeds() -> dict[tuple[float, str], float]:
    """Tokens a second by the draft's noise and the prompt, with windows as they are chosen at T = 0.6."""
    found = defaultdict[tuple[float, str], list[float]](list)
    for line in (RESULTS / "commits-h200.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chosen = row.get("bench") == "trees" and row["how"] == "auto" and row["commit"] != "08ad60b"
        if chosen and row["link"].startswith("emulated"):
            found[row["noise"], row["prompt"]].append(row["tok_per_s"])
    return {case: mean(speeds) for case, speeds in found.items()}


def plain_speed() -> float:
    """Tokens a second of plain decoding over the same layers."""
    rows = json.loads((RESULTS / "trees-noise-0.05-h200.json").read_text(encoding="utf-8"))["streamed"]
    return 1 / float(mean(row["s_per_pass"] for row in rows if row["how"] == "plain"))


def main() -> None:
    """Draw it."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    speeds, plain = emulated_speeds(), plain_speed()
    with rc_context({"svg.hashsalt": "offload_runtime", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for at, (prompt, colour) in enumerate({"prose": "#3b6ea5", "code": "#7fb069"}.items()):
            places = [place + 0.38 * (at - 0.5) for place in range(1, 1 + len(DRAFTS))]
            bars = axes.bar(places, [speeds[noise, prompt] for noise in DRAFTS], 0.36, label=prompt, color=colour)
            axes.bar_label(bars, fmt="%.0f")
        axes.bar_label(axes.bar([0], [plain], 0.36, color="#999999"), fmt="%.1f")
        axes.set_xticks(range(1 + len(DRAFTS)), ["plain decoding", *DRAFTS.values()])
        axes.set_ylabel("tokens/s")
        axes.set_title("Llama-2-13B shape in bf16 on an RTX 4090 (emulated), T = 0.6", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(sys.argv[1], metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
