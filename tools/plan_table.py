"""Plans of well-known models: in short on one and two cards, then at several contexts on several machines, in Markdown.

python tools/plan_table.py --out docs/plans.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import harness
from gguf_mix import stored_kinds
from harness import check_out
from offload_runtime_kernels.encoded_linear import MOST_ROWS

from offload_runtime.config import GIB, RuntimeConfig, format_bytes
from offload_runtime.hardware import load_profile
from offload_runtime.plan import (
    MachineFigures,
    Refusal,
    RunForecast,
    RunPlan,
    forecast,
    machine_figures,
    plan_or_refuse,
    plan_run,
)
from offload_runtime.plan.cost import USUAL_ACCEPTANCE
from offload_runtime.plan.suggest import second_card
from offload_runtime.weights import DescribedModel, describe_model

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "data" / "configs"
CONTEXTS = (4096, 32768, 131072)
# Beyond 4096 tokens the rows of Llama 2 are its published extensions by YaRN.
EXTENDED = {"llama-2-7b": "llama-2-7b-128k", "llama-2-13b": "llama-2-13b-128k"}


@dataclass(frozen=True)
class Row:
    """A target, by the folder of its configuration, and what drafts for it; each stored as in a mix of GGUF files, or
    in 16 bits."""

    name: str
    target: str
    draft: str
    mix: str | None = None
    draft_mix: str | None = None

    def models(self) -> tuple[DescribedModel, DescribedModel]:
        """Target and draft."""
        return _described(self.target, self.mix), _described(self.draft, self.draft_mix)


def _described(folder: str, mix: str | None) -> DescribedModel:
    model = describe_model(CONFIGS / folder)
    return model if mix is None else replace(model, kinds=stored_kinds(model.config(), mix))


ROWS = (
    Row("Llama-2-7B", "llama-2-7b", "llama-68m"),
    Row("Llama-2-13B", "llama-2-13b", "llama-68m"),
    Row("Llama-2-70B", "llama-2-70b", "llama-68m"),
    Row("Llama-3.1-8B", "llama-3.1-8b", "llama-3.2-1b"),
    Row("Llama-3.1-70B", "llama-3.1-70b", "llama-3.2-1b"),
    Row("Qwen2.5-32B", "qwen2.5-32b", "qwen2.5-0.5b"),
)
SHORT_ROWS = (
    Row("Llama-2-13B", "llama-2-13b", "tinyllama-1.1b"),
    Row("Llama-3.1-8B", "llama-3.1-8b", "llama-3.2-1b"),
    Row("Qwen2.5-32B", "qwen2.5-32b", "qwen2.5-0.5b"),
    Row("Llama-3.1-70B", "llama-3.1-70b", "llama-3.2-1b"),
)
QUANTISED_ROWS = (
    Row("Llama-3.1-8B", "llama-3.1-8b", "llama-3.2-1b", "Q8_0", "Q8_0"),
    Row("Llama-3.1-8B", "llama-3.1-8b", "llama-3.2-1b", "Q4_K_M", "Q8_0"),
    Row("Qwen2.5-32B", "qwen2.5-32b", "qwen2.5-0.5b", "Q8_0", "Q8_0"),
    Row("Qwen2.5-32B", "qwen2.5-32b", "qwen2.5-0.5b", "Q4_K_M", "Q8_0"),
    Row("Llama-3.1-70B", "llama-3.1-70b", "llama-3.2-1b", "Q8_0", "Q8_0"),
    Row("Llama-3.1-70B", "llama-3.1-70b", "llama-3.2-1b", "Q4_K_M", "Q8_0"),
)
SHORT_PROFILE, SHORT_CONTEXT = "rtx4090", 2048
# What models of 70B need is more than most desktops have: the table says how much that is.
_SHORT_RAM_BYTES = 256 * GIB
QUANTISED_HEADER = (
    "| model | stored as | RAM | plain: layers that stay | s / pass | tokens/s | draft, in Q8_0 | layers that stay | "
    "s / pass | tokens/s with chains | with trees |\n"
    "|---|---|---:|---:|---:|---:|---|---:|---:|---:|---:|"
)
SHORT_HEADER = (
    "| model | cards | RAM | plain: layers that stay | s / pass | tokens/s | draft | layers that stay | s / pass | "
    "tokens/s with chains | with trees |\n"
    "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|"
)
HEADER = (
    "| model | context | weights on the card | KV on the card | VRAM | pinned | a pass streams | s / pass | bound by | "
    "first token, s | tokens/s plain | with the draft |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|"
)
_VERIFIER, _WHOLE, _STREAMING, _FAR = (
    USUAL_ACCEPTANCE[level] for level in ("verifier", "full", "streaming", "streaming, far")
)
INTRODUCTION = f"""# Plans

Everything on this page is **predicted**, from configuration files and the published figures of a card; nothing of it
was run. `python tools/plan_table.py --out docs/plans.md` writes it.

## Predicted: one RTX 4090, and two

A context of {SHORT_CONTEXT} tokens in 16 bits, on [the profile of an RTX 4090](../profiles/{SHORT_PROFILE}.toml), but
with as much RAM as the model takes. It is assumed that {_WHOLE} of a draft's first choices are what the target
says. How many of yours are depends on models, text and temperature: `plan` has a table by acceptance, and
[the results](results.md) say what was measured. Two cards have the layers dealt out to them: both links carry at once,
the cards compute one after the other, and a hop of a few rows from one to the other is assumed to take 30 us
(`offload-runtime profile` measures it on a machine with several cards).

"""
QUANTISED = f"""
## Predicted: quantised, on one RTX 4090 with 64 GB

The same context and draft's luck, weights kept and streamed as llama.cpp's quantiser stores them, unless decoding them
once when loading is predicted to be faster. Products of up to {MOST_ROWS} rows decode them in registers, at rates
scaled from an H200's by multiprocessors and clock; of more rows, into memory first, so that trees may not be worth
their room: their column is empty then. RAM is the profile's. What is published for llama.cpp, whose processor computes
the layers that the card has no room for, is 2 to 6 tokens/s for a 70B in four bits on a card of 24 GB.

"""
DETAILS = f"""
## At several contexts

What `offload-runtime plan` says. A draft
(Llama-68M, Llama-3.2-1B, Qwen2.5-0.5B) proposes to the target or to TriForce's retrieval verifier, whichever is
predicted to be faster. The last column takes {_VERIFIER} of the retrieval verifier's proposals to be right,
{_WHOLE} of a draft's that sees the whole text (of the first child of a node, where it grows trees), and
{_STREAMING} of one that sees only its beginning and its end ({_FAR} in contexts beyond 8192 tokens).
Llama 2 beyond 4096 tokens is its YaRN extension to 128K where there is one. The arithmetic is that of
`offload_runtime/plan`, whose passes are within 10 % of those measured on an H200 (`tests/test_plan_prediction.py`).
Host memory holds what is streamed: what stays on the card goes there as it is read. Of two cards VRAM and what a pass
streams are those of both.
"""


def short_lines() -> Iterator[str]:
    """The table of one card and two."""
    yield SHORT_HEADER
    one = replace(machine_figures(load_profile(SHORT_PROFILE)), ram_bytes=_SHORT_RAM_BYTES, pinnable_bytes=None)
    for row in SHORT_ROWS:
        for cards in (1, 2):
            yield short_row(row, cards, one)


def short_row(row: Row, cards: int, machine: MachineFigures) -> str:
    """One line: plain decoding with nothing else on the card, then a draft model that proposes chains or trees."""
    return _line([row.name, str(cards)], row, cards, machine)


def quantised_lines() -> Iterator[str]:
    """The table of one card and models that are quantised."""
    yield QUANTISED_HEADER
    machine = machine_figures(load_profile(SHORT_PROFILE))
    for row in QUANTISED_ROWS:
        target, draft = row.models()
        outcome = plan_or_refuse(RuntimeConfig(target, draft, context=SHORT_CONTEXT), machine)
        head = [row.name, row.mix or ""]
        if isinstance(outcome, Refusal):
            yield f"| {' | '.join(head)} | {_what_would(outcome)} |" + " |" * 8
        else:
            yield _line(head, row, 1, machine)


def _line(head: Sequence[str], row: Row, cards: int, machine: MachineFigures) -> str:
    target, draft = row.models()
    plain = _planned(RuntimeConfig(target, "none", context=SHORT_CONTEXT), cards, machine)
    drafting = RuntimeConfig(target, draft, context=SHORT_CONTEXT)
    chains = _planned(replace(drafting, tree_nodes=0), cards, machine)
    trees = _planned(drafting, cards, machine)
    cells = [
        *head,
        format_bytes(max(plan.host_bytes for plan, _ in (plain, chains, trees))),
        layers(plain[0].placement.resident_layers, plain[0]),
        f"{plain[1].plain.seconds:.3f}",
        f"{plain[1].plain_tok_per_s:.2f}",
        row.draft,
        layers(trees[0].placement.resident_layers, trees[0]),
        f"{trees[1].verify.seconds:.3f}",
        f"{chains[1].usual.tok_per_s:.1f}",
        f"{trees[1].usual.tok_per_s:.1f}" if trees[0].tree_room else "",
    ]
    return f"| {' | '.join(cells)} |"


def _what_would(outcome: Refusal) -> str:
    return f"does not fit. What would: {'; '.join(proposal.change for proposal in outcome.suggestions)}"


def _planned(request: RuntimeConfig, cards: int, machine: MachineFigures) -> tuple[RunPlan, RunForecast]:
    """A plan that must fit, and how fast it is."""
    if cards == 2:
        request, machine = second_card(request, machine)
    plan = plan_run(request, machine)
    return plan, forecast(plan, machine)


def table_lines(profile: str) -> Iterator[str]:
    """The table of one machine."""
    yield HEADER
    for row in ROWS:
        for context in CONTEXTS:
            yield table_row(row, context, profile)


def table_row(row: Row, context: int, profile: str) -> str:
    """One line: the plan, or why there is none and what would fit."""
    machine = machine_figures(load_profile(profile))
    folder = EXTENDED.get(row.target, row.target) if context > 4096 else row.target
    request = RuntimeConfig(describe_model(CONFIGS / folder), describe_model(CONFIGS / row.draft), context=context)
    outcome = plan_or_refuse(request, machine)
    head = f"| {row.name} | {context} | "
    if isinstance(outcome, Refusal):
        return f"{head}{_what_would(outcome)} |" + " |" * 9
    predicted = forecast(outcome, machine)
    cells = [
        layers(outcome.placement.resident_layers, outcome),
        layers(outcome.resident_kv_layers, outcome),
        format_bytes(outcome.device_bytes),
        format_bytes(outcome.pinned_bytes),
        format_bytes(predicted.verify.bytes_streamed),
        f"{predicted.verify.seconds:.3f}",
        predicted.verify.bound_by,
        f"{predicted.prefill.seconds:.1f}",
        f"{predicted.plain_tok_per_s:.2f}",
        f"{predicted.usual.tok_per_s:.1f}" + (" (TriForce)" if outcome.has_verifier else ""),
    ]
    return head + " | ".join(cells) + " |"


def layers(resident: Sequence[int], plan: RunPlan) -> str:
    """How many of the layers."""
    return f"{len(resident)} of {plan.placement.num_layers}"


@harness.one_line_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables; returns the exit code: 2 for what the user can mend."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write; stdout when left out")
    parser.add_argument("--profiles", nargs="+", default=["rtx4090", "rtx4090-x2"])
    options = parser.parse_args(arguments)
    check_out(options.out)
    short, quantised = "\n".join(short_lines()), "\n".join(quantised_lines())
    parts = [f"{INTRODUCTION}{short}\n{QUANTISED}{quantised}\n{DETAILS}"]
    for profile in options.profiles:
        found = load_profile(profile)
        cards, each = (f", its {found.gpus} cards", " each") if found.gpus > 1 else ("", "")
        memory = f"{format_bytes(found.vram_bytes or 0)} of VRAM{each}, {format_bytes(found.ram_bytes)} of RAM"
        parts.append(f"### {profile}{cards}: {memory}, link {found.link_gbps:g} GB/s{each}\n")
        parts.append("\n".join(table_lines(profile)) + "\n")
    text = "\n".join(parts)
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
