"""The options of the command line, declared once for all commands."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from offload_runtime.config import SpeculationOptions


class Device(str, Enum):
    """Where the target runs."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Dtype(str, Enum):
    """The element type that the target computes in."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_MODEL, _SAMPLING, _MACHINE, _OUTPUT = "Model", "Sampling", "Machine", "Output"

TargetOption = Annotated[
    str,
    typer.Option("--target", metavar="MODEL", rich_help_panel=_MODEL, help="Directory, GGUF file or id on the hub."),
]
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="MODEL|ngram|none",
        rich_help_panel=_MODEL,
        help="What proposes tokens: a small model, the text's own n-grams, or nothing. Never changes the output.",
    ),
]


class KVPlace(str, Enum):
    """Where the target's KV cache lives."""

    auto = "auto"
    gpu = "gpu"
    host = "host"


KVOption = Annotated[
    KVPlace,
    typer.Option(
        "--kv",
        rich_help_panel=_MODEL,
        help="Where the KV cache lives: on the GPU, or paged from host memory; auto: what is predicted to be faster.",
    ),
]


class SpeculationMode(str, Enum):
    """How tokens are proposed."""

    auto = "auto"
    none = "none"
    chain = "chain"
    triforce = "triforce"


class DraftCache(str, Enum):
    """What the draft keeps of the text."""

    auto = "auto"
    full = "full"
    retrieval = "retrieval"
    streaming = "streaming"


class ChunkPolicyName(str, Enum):
    """How the middle level's tokens are retrieved."""

    retrieval = "retrieval"
    topk = "topk"
    streaming = "streaming"


_SPECULATION = "Speculation (none of it changes the output)"
SpeculationOption = Annotated[
    SpeculationMode,
    typer.Option(
        "--speculation",
        rich_help_panel=_SPECULATION,
        help="chain: the draft proposes. triforce: between draft and target the target checks over retrieved tokens. "
        "auto: what is predicted to be faster.",
    ),
]
DraftCacheOption = Annotated[
    DraftCache,
    typer.Option(
        "--draft-cache",
        rich_help_panel=_SPECULATION,
        help="full: all tokens. retrieval: of all tokens those that its queries choose. streaming: first and newest "
        "tokens only. auto: what is predicted to be faster, of the last and one that suits the context.",
    ),
]


def _tuning(*names: str, meaning: str) -> Any:
    """One of `SpeculationOptions`, called as its field is; what that is by itself is shown as the default."""
    usual = getattr(SpeculationOptions(), names[0].removeprefix("--").replace("-", "_"))
    return typer.Option(*names, rich_help_panel=_SPECULATION, show_default=str(usual), help=meaning)


SinkTokensOption = Annotated[int | None, _tuning("--sink-tokens", meaning="First tokens a streaming cache keeps.")]
RecentTokensOption = Annotated[int | None, _tuning("--recent-tokens", meaning="Newest tokens a streaming cache keeps.")]
ChunkSizeOption = Annotated[int | None, _tuning("--chunk-size", meaning="Tokens that are retrieved together.")]
BudgetTokensOption = Annotated[
    int | None, _tuning("--budget-tokens", "--retrieval-budget", meaning="Tokens retrieved per KV head.")
]
GammaDraftOption = Annotated[
    int | None, _tuning("--gamma-draft", meaning="Tokens the draft proposes to the middle level.")
]
PolicyOption = Annotated[
    ChunkPolicyName | None,
    _tuning(
        "--policy",
        meaning="What the middle level sees. topk (exact scores) and streaming (first and newest) are for comparing.",
    ),
]
RefreshStepsOption = Annotated[
    int | None, _tuning("--refresh-steps", meaning="Retrieve anew every so many steps of the middle level.")
]
ContextOption = Annotated[
    str,
    typer.Option("--context", metavar="TOKENS|auto", rich_help_panel=_MODEL, help="Tokens of context to reserve."),
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", min=1, rich_help_panel=_SAMPLING, help="Longest answer, in tokens.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, rich_help_panel=_SAMPLING, help="0 is greedy decoding.")
]
TopKOption = Annotated[
    int, typer.Option("--top-k", min=0, rich_help_panel=_SAMPLING, help="Keep the K likeliest tokens; 0 is off.")
]
TopPOption = Annotated[
    float, typer.Option("--top-p", rich_help_panel=_SAMPLING, help="Keep the likeliest tokens that hold P; 1 is off.")
]
MinPOption = Annotated[
    float,
    typer.Option("--min-p", rich_help_panel=_SAMPLING, help="Drop tokens below P times the likeliest; 0 is off."),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, rich_help_panel=_SAMPLING, help="The same seed gives the same tokens.")
]
GammaOption = Annotated[
    str,
    typer.Option(
        "--gamma",
        metavar="N|auto",
        rich_help_panel=_SPECULATION,
        help="Tokens to propose per pass, one behind the other. auto chooses who proposes and how much, pass by pass, "
        "by what was accepted and how long it took.",
    ),
]
TreeNodesOption = Annotated[
    str,
    typer.Option(
        "--tree-nodes",
        metavar="N|auto",
        rich_help_panel=_SPECULATION,
        help="Tokens to propose per pass in all, as a tree, no more of them in a row than --gamma N says. 0: chains "
        "only. auto chooses; beside --gamma N it stands for chains.",
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", rich_help_panel=_SAMPLING, help="End at this text; may be repeated."),
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", rich_help_panel=_SAMPLING, help="Go on past the end-of-text token.")
]
DeviceOption = Annotated[Device, typer.Option("--device", rich_help_panel=_MACHINE, help="Where the target runs.")]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", rich_help_panel=_MACHINE, help="auto: the checkpoint's own on a GPU, fp32 on a CPU.")
]
VramOption = Annotated[
    str | None,
    typer.Option(
        "--vram", metavar="SIZE", rich_help_panel=_MACHINE, help="Most GPU memory to use, such as 24GB or 20GiB."
    ),
]
RamOption = Annotated[
    str | None,
    typer.Option(
        "--ram", metavar="SIZE", rich_help_panel=_MACHINE, help="Most host memory to use; by itself, what there is."
    ),
]
PinnedOption = Annotated[
    str | None,
    typer.Option(
        "--pinned",
        metavar="SIZE",
        rich_help_panel=_MACHINE,
        help="Most of it to page-lock; weights and KV beyond it are staged: slower. By itself, what the system gives.",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        rich_help_panel=_MACHINE,
        help="The machine to plan for, such as rtx4090; left out, your own saved profile.",
    ),
]
EmulateOption = Annotated[
    str | None,
    typer.Option(
        "--emulate",
        metavar="NAME|FILE",
        rich_help_panel=_MACHINE,
        help="Play a smaller card, such as rtx4090: its memory is the limit, and copies keep its link's bandwidth.",
    ),
]
FiguresOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        rich_help_panel=_MACHINE,
        help="Choose what is left to be chosen, and predict, by these figures; left out, by a profile of this GPU, "
        "your own or a shipped one.",
    ),
]
ResidentLayersOption = Annotated[
    str,
    typer.Option(
        "--resident-layers",
        metavar="N|auto",
        rich_help_panel=_MACHINE,
        help="Layers that stay on the device; the others are streamed over the link in every pass.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="One JSON object on stdout and nothing else.")
]
ExplainOption = Annotated[
    bool, typer.Option("--explain", rich_help_panel=_OUTPUT, help="Say on stderr what lives where, before loading.")
]
TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        rich_help_panel=_OUTPUT,
        help="Write when what was copied, computed and drafted, for ui.perfetto.dev and tools/timeline.py.",
    ),
]
NoProgressOption = Annotated[
    bool, typer.Option("--no-progress", rich_help_panel=_OUTPUT, help="No progress bars on stderr.")
]
