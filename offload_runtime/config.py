"""Frozen configuration: what a runtime is loaded with.

Plain values only, so that the planner and the tests can build them freely. Each dataclass validates itself when made;
a wrong value raises `OptionError` before anything is loaded.
"""

import ipaddress
import re
import reprlib
from dataclasses import KW_ONLY, MISSING, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from offload_runtime.errors import OptionError
from offload_runtime.options import LIMITS, MACHINE, MODEL, OUTPUT, SPECULATION, documented, option, require, validate
from offload_runtime.sizes import counted, parse_duration_s

SpeculationMode = Literal["auto", "none", "chain", "triforce"]
DraftCache = Literal["auto", "full", "retrieval", "streaming"]
KVPlace = Literal["auto", "gpu", "host"]
WeightStorage = Literal["auto", "stored", "decoded"]
Encode = Literal["none", "auto", "always"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]

# With the newest known token and those whose keys are written anew, a step of the retrieval verifier has 32 rows.
MOST_GAMMA_DRAFT = 24
# Where a token may come from, by the names that statistics and the server's API have: what people call it.
SOURCES = {
    "ngram": "n-grams", "draft": "draft", "self": "the model's own copy", "mtp": "MTP", "eagle3": "EAGLE-3",
    "dflash": "DFlash", "retrieval": "TriForce", "target": "target",
}  # fmt: skip


def card_names(device: str) -> tuple[str, ...]:
    """Return the names of the cards that a `device` such as `cuda:0,cuda:1` stands for; raises `OptionError` for what
    is none, and for cards of different kinds."""
    names = tuple(name.strip() for name in device.split(","))
    require(all(names), f"device {device!r} has an empty name: write it like cuda:0, or cuda:0,cuda:1")
    for name in names:
        fine = re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", name) is not None
        require(fine, f"device {name!r} is not a device: use auto, cuda, cuda:N or cpu, or cuda:0,cuda:1")
    kinds = {name.split(":")[0] for name in names}
    alone = len(names) == 1 or "auto" not in kinds
    require(alone, f"device {device!r} has auto among others: name every card, or auto alone")
    require(len(kinds) == 1, f"device {device!r} mixes {' and '.join(sorted(kinds))}: name cards of one kind")
    return names


@documented()
@dataclass(frozen=True)
class SpeculationOptions:
    """These options say how tokens are proposed; none changes the output.

    The retrieval verifier of TriForce is the target over `budget_tokens` of each layer and KV head, in chunks of
    `chunk_size`. A draft that retrieves does so with the same two.
    """

    mode: SpeculationMode = option(
        "auto", "none: nothing proposes. chain: the draft proposes. triforce: between draft and target the target "
        "checks over retrieved tokens. auto: what is predicted to be faster.", SPECULATION, flag="--speculation",
        metavar="MODE",
    )  # fmt: skip
    draft_cache: DraftCache = option(
        "auto", "full: all tokens. retrieval: of all tokens those that its queries choose. streaming: first and newest "
        "tokens only. auto: what is predicted to be faster, of the last and one that suits the context.", SPECULATION,
        metavar="HOW",
    )  # fmt: skip
    sink_tokens: int = option(16, "First tokens a streaming cache keeps.", SPECULATION, least=1, most=256, auto=True)
    recent_tokens: int = option(512, "Newest tokens a streaming cache keeps.", SPECULATION, least=2, auto=True)
    chunk_size: int = option(4, "Tokens that are retrieved together.", SPECULATION, least=2, auto=True)
    budget_tokens: int = option(4096, "Tokens retrieved per KV head.", SPECULATION, least=1, auto=True)
    gamma_draft: int = option(
        MOST_GAMMA_DRAFT, "Tokens the draft proposes to a step of TriForce, as a tree.", SPECULATION, least=1,
        most=MOST_GAMMA_DRAFT, auto=True,
    )  # fmt: skip
    refresh_steps: int | None = option(
        None, "Steps of TriForce from retrieval to retrieval. auto: 1 with --kv host, else 4.", SPECULATION, least=1,
        auto=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        validate(self)
        chunks_of_budget(self.budget_tokens, self.chunk_size)

    def steps_between_choices(self, *, on_host: bool) -> int:
        """Return `refresh_steps`, of a target whose keys are in host memory or not."""
        return self.refresh_steps or (1 if on_host else 4)


def idle_options(has_draft: bool, mode: str, draft_cache: str) -> dict[str, str]:
    """Find fields of `SpeculationOptions` that nothing would look at, and why, with the way out.

    `has_draft` says whether a model drafts; the others are such fields.
    """
    idle: dict[str, str] = {}
    if mode in ("none", "chain"):
        why = f"with --speculation {mode}, which has no retrieval verifier: drop it, or take --speculation triforce"
        idle |= dict.fromkeys(("chunk_size", "budget_tokens", "refresh_steps", "gamma_draft"), why)
    elif mode == "auto" and not has_draft:
        why = "without a draft model, because auto takes no retrieval verifier then: name one with --draft, or take "
        why += "--speculation triforce --draft none"
        idle |= dict.fromkeys(("chunk_size", "budget_tokens", "refresh_steps"), why)
    if has_draft and mode != "none" and draft_cache in ("auto", "retrieval"):  # a draft's own cache may be of chunks
        idle = {name: why for name, why in idle.items() if name not in ("chunk_size", "budget_tokens")}
    if draft_cache not in ("auto", "streaming"):
        why = f"with --draft-cache {draft_cache}: drop it, or take --draft-cache streaming"
        idle |= dict.fromkeys(("sink_tokens", "recent_tokens"), why)
    if not has_draft:
        why = "without a draft model: drop it, or name one with --draft"
        idle |= dict.fromkeys(("gamma_draft", "draft_cache", "sink_tokens", "recent_tokens"), why)
    return idle


def chunks_of_budget(budget_tokens: int, chunk_size: int) -> int:
    """Return how many chunks make up a retrieval budget.

    Raises:
        OptionError: The chunk size is not supported, or the budget is not a number of whole chunks.
    """
    fine = chunk_size in (2, 4, 8, 16, 32, 64)
    require(fine, f"a chunk of {chunk_size} tokens is not supported: use a power of two from 2 to 64")
    whole = max(1, budget_tokens // chunk_size) * chunk_size
    uneven = f"a retrieval budget of {budget_tokens} tokens is not made of whole chunks of {chunk_size}: use {whole}"
    require(budget_tokens == whole, uneven)
    return budget_tokens // chunk_size


def _without_ngrams(draft: str) -> str:
    """Return who drafts of a list of several, which n-grams join by themselves.

    Raises:
        OptionError: Others than n-grams are to draft together, or nobody with somebody.
    """
    names = [name.strip() for name in draft.split(",")]
    others = [name for name in names if name != "ngram"]
    if len(names) == 1 or not {"ngram", "mtp", "self", "auto", "none"}.intersection(names):
        return draft
    fine = len(others) < 2 and "none" not in others
    require(fine, f"--draft {draft}: one drafts, and n-grams join it: name one, such as mtp or mtp,ngram")
    return others[0] if others else "ngram"


@documented()
@dataclass(frozen=True)
class RuntimeConfig:
    """A runtime is loaded with these options of `Runtime.load`, the command line and the tools.

    `target` and `draft` may be opened checkpoints, `profile` one of a machine. A card that `device`
    names twice is two logical cards. Limits of memory are in bytes, or texts such as `24GB`; None allows what there
    is.
    """

    target: Any = option(
        MISSING, "Directory, GGUF file, id on the hub, or a name of `offload-runtime list`.", MODEL, metavar="MODEL"
    )
    draft: Any = option(
        "auto", "What proposes tokens: a small model, a head that was made for the target (EAGLE-3, DFlash), the MTP "
        "layers that it carries (mtp), a copy of its streamed layers in 4 bits (self), the text's own n-grams, or "
        "nothing. Never changes the output. auto: its MTP "
        "layers, or a head or a small model beside the target or in the hub's cache that fits it, or the copy, where "
        "that is predicted to be faster, else n-grams, which join whatever drafts (mtp,ngram).", MODEL,
        metavar="MODEL|auto|mtp|self|ngram|none",
    )  # fmt: skip
    _: KW_ONLY  # itself, not its name, which `get_type_hints` of Python 3.10 would refuse
    context: int | None = option(
        None, "Tokens of context to reserve, such as 8192 or 128K. auto: the model's maximum, at most 8192 with the KV "
        "cache on the GPU.", MODEL, least=1, auto=True, metavar="TOKENS|auto",
    )  # fmt: skip
    kv: KVPlace = option(
        "auto", "Where the KV cache lives: on the GPU, or paged from host memory; auto: what is predicted faster.",
        MODEL,
    )  # fmt: skip
    weights: WeightStorage = option(
        "auto", "Matrices of quantised files: as stored, decoded before every product, or decoded as they are loaded; "
        "auto: what is predicted to be faster.", MODEL,
    )  # fmt: skip
    allow_special_tokens: bool = option(False, "Messages may spell control tokens.", MODEL)
    speculation: SpeculationOptions = option(SpeculationOptions(), "How tokens are proposed.", flag=None)
    tree_nodes: int | None = option(
        None, "Tokens to propose per pass in all, as a tree, no more of them in a row than --gamma N says. 0: chains "
        "only. auto chooses; beside --gamma N it stands for chains.", SPECULATION, least=0, auto=True,
    )  # fmt: skip
    gamma: int | None = option(
        None, "Tokens to propose per pass, in a row; auto chooses who proposes and how much.", SPECULATION, least=1,
        auto=True,
    )  # fmt: skip
    max_gamma: int = option(
        63, "Longest chain that there is room for, and largest gamma that may be asked for.", least=1, flag=None
    )
    max_batch: int | None = option(
        1, "Requests that are answered at once; auto: as many, up to 16, as fit without streaming more than one does.",
        least=1, auto=True, flag=None,
    )  # fmt: skip
    device: str = option(
        "auto", "Where the target runs: auto, cuda, cuda:1 or cpu; or several cards that its layers are dealt out to: "
        "cuda:0,cuda:1.", MACHINE, flag="--device --devices", metavar="DEVICE[,DEVICE]",
    )  # fmt: skip
    dtype: Dtype = option("auto", "What is computed in; auto: the checkpoint's own on a GPU, fp32 on a CPU.", MACHINE)
    encode: Encode = option(
        "none", "Keep bf16 weights of the target in 12 bits, which changes no bit of them. auto: where that is "
        "predicted to be faster, or to fit.", MACHINE, metavar="HOW",
    )  # fmt: skip
    vram: int | tuple[int, ...] | None = option(
        None, "Most GPU memory to use, such as 24GB or 20GiB: of each card, or one after the other: 22GB,24GB.",
        MACHINE, size=True, metavar="SIZE[,SIZE]",
    )  # fmt: skip
    ram: int | None = option(
        None, "Most host memory to use; by itself, what there is.", MACHINE, size=True, metavar="SIZE"
    )
    pinned: int | None = option(
        None, "Most of it to page-lock; weights and KV beyond it are staged: slower. By itself, what the system gives.",
        MACHINE, size=True, metavar="SIZE",
    )  # fmt: skip
    resident_layers: int | None = option(
        None, "Layers that stay on the device; others are streamed every pass.", MACHINE, least=0, auto=True
    )
    expert_pool: int | None = option(
        None, "Memory of each card for the experts of a mixture, those that were used last; auto: what is left of it. "
        "What has no room stays in host memory and comes when it is needed.", MACHINE, size=True, auto=True,
        metavar="SIZE|auto",
    )  # fmt: skip
    cpu_share: float | None = option(
        None, "Share of the experts that a token needs and the card has not which the CPU computes where they lie. "
        "auto: so much that it ends with the link, by rates measured meanwhile; none with --device cpu.", MACHINE,
        least=0, most=1, auto=True, metavar="SHARE|auto",
    )  # fmt: skip
    forget_hits: bool = option(
        False, "Keep nothing of how often experts were on the card, which later plans of the model expect again.",
        MACHINE,
    )  # fmt: skip
    profile: Any = option(
        None, "Choose and predict by these figures; left out, by a profile of this GPU, your own or a shipped one.",
        MACHINE, metavar="NAME|FILE",
    )  # fmt: skip
    pace: Any = option(None, "Makes for a device what slows its link down, to it and back: two `LinkPace`.", flag=None)
    interface: str | None = option(
        None, "Network interface over which machines that share the model reach each other, such as eth1 or wg0, where "
        "torchrun has started the command on each; by itself, what GLOO_SOCKET_IFNAME names.", MACHINE, metavar="NAME",
    )  # fmt: skip
    host_timeout_s: float = option(
        30.0, "How long such a machine may not be heard from.", MACHINE, flag="--host-timeout", least=0.1,
        metavar="SECONDS",
    )  # fmt: skip
    trace: Path | None = option(
        None, "Write when what ran, for ui.perfetto.dev and tools/timeline.py.", OUTPUT, metavar="FILE"
    )

    def __post_init__(self) -> None:
        if isinstance(self.draft, str):
            object.__setattr__(self, "draft", _without_ngrams(self.draft))
        wanted = {
            "target": "a directory, a GGUF file or a hub id such as org/name",
            "draft": "a model, mtp, self, ngram or none",
        }
        for name, what in wanted.items():
            value = getattr(self, name)
            require(not isinstance(value, str) or bool(value.strip()), f"--{name} is empty: give {what}")
            if not isinstance(value, str | Path) and not hasattr(value, "config"):  # to show a model takes long
                raise OptionError(f"{name} must be {what}, not {reprlib.repr(value)}")
        paced = self.pace is None or callable(self.pace)
        require(paced, f"pace must be a function of a device, not {reprlib.repr(self.pace)}")
        validate(self)
        names = self.devices  # refuses those that are none, and cards of different kinds
        if self.device != "auto":
            self.vram_of_cards(len(names))
        self._check_proposals()

    def _check_proposals(self) -> None:
        """Refuse a draft that the mode leaves out, or a mode without what it needs; then proposals that there is no
        room for, or that nobody would make."""
        draft, mode, gamma, nodes = self.proposed_by, self.speculation.mode, self.gamma, self.tree_nodes
        ngrams = mode == "triforce" and draft == "ngram"
        require(not ngrams, "TriForce does not draft with n-grams: name a model with --draft, or take --draft none")
        fine = mode != "triforce" or not self.drafts_itself
        require(fine, "--draft self has no step over retrieved tokens: drop --speculation triforce, or name a model")
        idle = mode == "none" and draft == "the draft"
        require(not idle, "--speculation none would leave the draft model idle: drop one of the two")
        idle = mode == "chain" and draft == "none"
        require(not idle, "--speculation chain has nobody to propose: name a draft, or take --speculation none")
        if nodes and (draft == "none" or mode in ("none", "triforce")):
            why = f"--speculation {mode}" if mode in ("none", "triforce") else "--draft none"
            remedy = "drop it, or take --speculation chain with --draft ngram or a model"
            raise OptionError(f"--tree-nodes {nodes} does nothing with {why}: {remedy}")
        if gamma is None:
            return
        fits = gamma <= self.max_gamma
        require(fits, f"gamma {gamma} exceeds the room for {self.max_gamma} proposals: raise max_gamma with it")
        require(mode != "none", f"--gamma {gamma} does nothing with --speculation none: drop one of the two")
        proposed = draft != "none" or mode == "triforce"
        require(proposed, f"--gamma {gamma} does nothing with --draft none: drop it or name a draft")

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Return the names of the cards; `auto` stands for one."""
        return card_names(self.device)

    @property
    def device_type(self) -> str:
        """Return where the target runs, on one card or several: `cuda` or `cpu`."""
        return "cpu" if self.devices[0] == "cpu" else "cuda"

    def vram_of_cards(self, num_cards: int) -> tuple[int | None, ...]:
        """Return what is allowed of each of `num_cards` cards. Raises `OptionError` for as many figures as there are
        not."""
        limits = self.vram
        if not isinstance(limits, tuple):
            return (limits,) * num_cards
        cards = f"{'is' if num_cards == 1 else 'are'} {counted(num_cards, 'card')}"
        why = f"--vram has {counted(len(limits), 'size')} and there {cards}"
        require(len(limits) == num_cards, f"{why}: give one size for each card, or one for all")
        return limits

    @property
    def proposed_by(self) -> str:
        """Say who proposes: `ngram`, `none`, or `the draft` for a model that is named, for `mtp` and for `self`."""
        own = {"auto": "ngram", "ngram": "ngram", "none": "none"}  # of auto as long as no model was found
        return own.get(self.draft, "the draft") if isinstance(self.draft, str) else "the draft"

    @property
    def drafts_itself(self) -> bool:
        """Return whether copies of the target's own layers draft."""
        return self.draft == "self"

    @property
    def drafter(self) -> str:
        """Return what stands for the draft until its checkpoint is opened; what is none stays as it is."""
        return "self" if self.drafts_itself else self.proposed_by

    @property
    def finds_draft(self) -> bool:
        """Return whether a small model may draft that nobody has named."""
        return isinstance(self.draft, str) and self.draft == "auto" and self.speculation.mode in ("auto", "chain")


_KEEP_ALIVE = "5m"  # as ollama has it
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@documented()
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """These options say where the server listens, who may ask, and for how much.

    Reading the body of a request may take a tenth of `max_seconds`.
    """

    host: str = option("127.0.0.1", "Where to listen; elsewhere than here it needs a key.", metavar="HOST")
    port: int = option(8000, "0 picks a free one and says which.", least=0, most=65535, metavar="PORT")
    api_key: str | None = option(
        None, "What requests have to bring; or set OFFLOAD_RUNTIME_API_KEY.", metavar="KEY", secret=True
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "Another name of this machine; repeatable.", flag="--allowed-host", metavar="NAME", repeated=True
    )
    cors_origins: tuple[str, ...] = option(
        (), "Let pages of https://chat.example ask; may be repeated.", flag="--cors-origin", metavar="ORIGIN",
        repeated=True,
    )  # fmt: skip
    grace_s: float = option(
        30.0, "How long answers may go on after Ctrl-C or SIGTERM.", flag="--grace", least=0, metavar="SECONDS"
    )
    keep_alive: str | None = option(
        None, "How long a model stays that nobody asks for, such as 5m or 1h30m; 0: no longer than it answers; -1: "
        "until another one is asked for. By itself 5m with several models, and with one for ever.", metavar="DURATION",
    )  # fmt: skip
    max_waiting: int = option(64, "Requests that may wait; further ones get a 429.", LIMITS, least=0, metavar="N")
    prefix_cache_bytes: int | None = option(
        None, "Host memory, beyond --ram, for keys and values that a slot loses to another prompt.", LIMITS,
        flag="--prefix-cache", size=True, metavar="SIZE",
    )  # fmt: skip
    sessions: Path | None = option(
        None, "Keep what was read of prompts in this directory, for the next process.", metavar="DIR"
    )
    sessions_bytes: int | None = option(
        None, "What --sessions may hold, 64GB by itself; what was used least recently goes first.", LIMITS,
        flag="--sessions-size", size=True, metavar="SIZE",
    )  # fmt: skip
    max_tokens: int | None = option(
        None, "Longest answer; by itself, what the context holds.", LIMITS, least=1, metavar="N"
    )
    max_body_bytes: int = option(
        8_000_000, "Largest body of a request.", LIMITS, flag="--max-body", size=True, metavar="SIZE"
    )
    max_seconds: float = option(
        3600.0, "After this long, waiting included, an answer ends as it is.", LIMITS, least=0.001, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        validate(self)
        for origin in self.cors_origins:
            fine = origin.startswith(("http://", "https://")) and origin.count("/") == 2
            require(fine, f"{origin!r} is not an origin: write it like https://chat.example")
        key = self.api_key
        fine = key is None or (key.isascii() and key.isprintable() and key == key.strip() != "")
        require(fine, "an API key is a word of printable ASCII characters")
        needed = f"listening at {self.host} lets other machines ask: give --api-key or OFFLOAD_RUNTIME_API_KEY"
        require(self.is_loopback or key is not None, needed)
        _ = self.keep_alive_s  # which refuses what is no duration
        fine = self.sessions is not None or self.sessions_bytes is None
        require(fine, "--sessions-size does nothing without --sessions: add it, or drop this")

    @property
    def keep_alive_s(self) -> float:
        """Return how long one of several models stays that nobody asks for, infinite for ever."""
        return parse_duration_s(_KEEP_ALIVE if self.keep_alive is None else self.keep_alive, "--keep-alive")

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches the server."""
        return self.host == "localhost" or getattr(_address(self.host), "is_loopback", False)

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header names this server. An address always does where all are listened at: only a name
        can be made to stand for another machine's."""
        name = header.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]  # without the port
        if name in _LOOPBACK_NAMES | {self.host.lower()} | {host.lower() for host in self.allowed_hosts}:
            return True
        return getattr(_address(self.host), "is_unspecified", False) and _address(name) is not None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
