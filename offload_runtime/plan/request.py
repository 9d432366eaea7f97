"""What a run is asked for, and of which machine: models, options, the user's limits, and the machine's figures.

A request is the `RuntimeConfig` that `Runtime.load` takes, with a `DescribedModel` (an opened checkpoint is one) for
each model and the device that was chosen, a GPU unless it is `cpu`. So a plan and a run cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from offload_runtime.config import RuntimeConfig
from offload_runtime.copy import MOST_THREADS
from offload_runtime.errors import ContextLengthError, DeviceError, OptionError, ProfileError
from offload_runtime.hardware import MachineProfile, list_profiles, load_profile, own_directory
from offload_runtime.hardware.host_bench import HostInfo
from offload_runtime.hardware.profile import shipped_directory
from offload_runtime.memory import LAZY_MODULE_BYTES, TYPICAL_CONTEXT_BYTES, within
from offload_runtime.models.config import ModelConfig
from offload_runtime.options import require
from offload_runtime.sizes import GB, format_bytes
from offload_runtime.weights import DescribedModel, describe_model, share_vocabulary

# Sizes of trees for which room is planned unasked: a pass verifies them at hardly any cost where everything is on the
# device, and beside what is streamed, the more of it the more.
TREE_ROOMS = (32, 256, 512, 1024)
# Reserved where nobody says how much, and nothing grows on the host.
AUTO_CONTEXT_TOKENS = 8192
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# What is planned for where nothing else is known.
COMMON_PROFILE = "rtx4090"
# Python, torch and the CUDA libraries of one process, which no ledger counts; and how much of it there is while weights
# are read, before kernels are compiled and library modules are loaded (H200, torch 2.11, a 70B in Q4_K_M: 1.62 GB where
# all of it was on the card, 1.57 beside streamed layers; 0.81 and 0.82 while it was read).
PROCESS_BYTES = 1_620_000_000
LOADING_PROCESS_BYTES = 840_000_000
_GIGA, _TERA = 1e9, 1e12
NO_LIMIT_BYTES = 1 << 43
# cuBLAS over 7B's weights (3.76 ms at 64 rows) and attention over 120,000 keys, both of 4.3 TB/s.
_HBM_SHARE = 0.8
# Of the rate at which products decode back to back, what they reach in a pass, between other kernels. With it an 8B in
# Q4_K_M and in Q8_0, whole on an H200, is predicted to take 5 % less and 2 % more time than it did.
_DECODE_SHARE = 0.9
_DEFAULT_GRAPH_LAUNCH_US = 2.5
# A few rows through mapped page-locked memory, written by a kernel of one card and read by one of the other.
# Assumed where it was not measured.
_DEFAULT_TRANSFER_US = 30.0
# A staged byte crosses the host's memory three times: read, written, read by the link. Two channels of DDR4-3200 carry
# 51 GB/s at best, so 17 of staged bytes; a share is left to everything else.
_DEFAULT_STAGING_GBPS = 10.0
# With these words torch begins the names of graphics cards.
_MAKERS = ("NVIDIA", "AMD", "Intel")
# Stays with the system and with other programs when nobody says how much may be taken.
_KEPT_SHARE, _MOST_KEPT_BYTES = 16, 2 << 30


def describe_models(config: RuntimeConfig) -> RuntimeConfig:
    """The same request, of models that are known by their configuration files. Errors as of `describe_model` and
    `share_vocabulary`."""
    request = replace(config, target=describe_model(config.target), draft=config.proposed_by)
    if request.draft != "the draft":
        return request
    draft = describe_model(config.draft)
    share_vocabulary(request.target, draft)
    return replace(request, draft=draft)


def device_type_of(request: RuntimeConfig) -> str:
    """Where a plan's target runs, on one card or several: `cuda` or `cpu`."""
    return "cpu" if request.devices[0] == "cpu" else "cuda"


def resolve_dtype(name: str, source: DescribedModel, device_type: str) -> torch.dtype:
    """Turn `auto`, `bf16`, `fp16` or `fp32` into a dtype; `auto` is the model's own on a GPU and fp32 on a CPU."""
    if name == "auto":
        return source.native_dtype if device_type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise OptionError(f"dtype must be auto, bf16, fp16 or fp32, not {name!r}")
    return _DTYPES[name]


def require_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a dtype that the device, which must be there, does not compute in."""
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise DeviceError(f"{torch.cuda.get_device_name(device)} does not compute in bf16: use --dtype fp16")


def resolve_context(tokens: int | None, config: ModelConfig, *, kv: str) -> int:
    """Tokens to reserve for: asked for, or the model's maximum, up to 8192 unless the KV cache grows on the host."""
    if tokens is None:
        longest = config.max_position_embeddings
        return longest if kv == "host" else min(longest, AUTO_CONTEXT_TOKENS)
    if tokens < 2:
        raise OptionError(f"context must hold at least a token of the prompt and a new one: 2, not {tokens}")
    longest = longest_context(config)
    if tokens > longest:
        raise ContextLengthError(
            f"a context of {tokens} tokens is more than the {longest} that the model was made for: lower --context, or "
            "set a RoPE scaling in the model's config.json"
        )
    return tokens


def longest_context(config: ModelConfig) -> int:
    """Tokens that the model's positions reach, its RoPE scaling included."""
    longest = config.max_position_embeddings
    for rope in (rope.parameters for rope in config.ropes):
        if rope["rope_type"] == "yarn":
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            longest = max(longest, int(original * rope["factor"]))
        elif rope["rope_type"] == "dynamic":
            longest = max(longest, int(config.max_position_embeddings * rope["factor"]))
    return longest


def check_window(window: int, config: ModelConfig) -> None:
    """Refuse windows that no text has room for, before memory is reckoned for them. Raises `OptionError`."""
    proposed, longest = window - 1, longest_context(config)
    if proposed > max(longest, *TREE_ROOMS):
        raise OptionError(
            f"{proposed} proposals in a window are more than the {longest} tokens that the model was made for: lower "
            "--gamma or --tree-nodes"
        )


# --- the machine


@dataclass(frozen=True)
class MachineFigures:
    """What is known of a machine; figures of a GPU are of one of `num_cards` equal cards.

    Of `vram_bytes` other programs have `vram_others_bytes`, unless the user says with `--vram` what a run may take, and
    `vram_reserved_bytes` of a run are its CUDA context's. `link_gbps` is host to device. `tflops` are dense
    matrix products by element type (bf16, fp16, fp32), `launch_us` a small kernel within a CUDA graph.
    `pinnable_bytes` None: as much as there is memory. `staging_gbps` is copying from pageable to page-locked memory
    while the link is busy. Rows that cross from card to card take `transfer_us` and their bytes at `transfer_gbps`
    (None: as fast as the link); all links together carry no more than `host_gbps`, if that is known, and each of them
    `links_at_once_gbps` while all are busy, by CUDA's number of the card, where that was measured.
    `decode_gweights_per_s` are weights that products of few rows decode in registers, in 1e9 a second, by how they are
    stored. Figures that are not `is_known` to be of the machine only compare plans: nothing is predicted by them.
    """

    name: str
    vram_bytes: int
    vram_reserved_bytes: int
    link_gbps: float
    hbm_gbps: float
    ram_bytes: int
    tflops: Mapping[str, float] = field(default_factory=dict)
    pinnable_bytes: int | None = None
    launch_us: float = _DEFAULT_GRAPH_LAUNCH_US
    staging_gbps: float = _DEFAULT_STAGING_GBPS
    decode_gweights_per_s: Mapping[str, float] = field(default_factory=dict)
    num_cards: int = 1
    transfer_us: float = _DEFAULT_TRANSFER_US
    transfer_gbps: float | None = None
    host_gbps: float | None = None
    links_at_once_gbps: tuple[float, ...] = ()
    vram_others_bytes: int = 0
    is_known: bool = True

    @property
    def lockable_bytes(self) -> int:
        """Most that can be page-locked."""
        return self.ram_bytes if self.pinnable_bytes is None else self.pinnable_bytes

    def flops(self, dtype: torch.dtype) -> float:
        """Operations per second of matrix products in `dtype`; 16-bit types stand for each other."""
        name = DTYPE_NAMES[dtype]
        alike = {"bf16": "fp16", "fp16": "bf16"}.get(name, name)
        tflops = self.tflops.get(name, self.tflops.get(alike))
        if tflops is None:
            raise OptionError(f"the profile {self.name} has no TFLOP/s for {name}: add tflops.{name} to it")
        return tflops * _TERA

    def decode_rate(self, kind: str) -> float:
        """Weights per second that products of few rows decode in registers. A kind that was not measured is taken for
        the slowest that was; if none was, only memory bounds them."""
        rates = self.decode_gweights_per_s
        return _DECODE_SHARE * _GIGA * rates.get(kind, min(rates.values(), default=math.inf))

    def transfer_s(self, nbytes: int) -> float:
        """Seconds of one transfer of so many bytes from card to card."""
        return self.transfer_us * 1e-6 + nbytes / ((self.transfer_gbps or self.link_gbps) * GB)

    def link_ratios(self, names: Sequence[str]) -> tuple[float, ...]:
        """How fast the links of cards are, of the machine's first one's, by their names: those with a number (`cuda:1`)
        by that, others in turn. All alike where nothing is known of one of them."""
        tails = [name.partition(":")[2] for name in names]
        numbers = [int(tail) if tail.isdecimal() else number for number, tail in enumerate(tails)]
        if max(numbers) >= len(self.links_at_once_gbps):
            return (1.0,) * len(names)
        return tuple(self.links_at_once_gbps[one] / self.links_at_once_gbps[0] for one in numbers)

    def with_link(self, gbps: float) -> MachineFigures:
        """The same with a link of `gbps` to each card."""
        return replace(self, link_gbps=gbps, links_at_once_gbps=())

    @property
    def attained_hbm(self) -> float:
        """Bytes per second that kernels read."""
        return _HBM_SHARE * self.hbm_gbps * GB


def machine_figures(profile: MachineProfile) -> MachineFigures:
    """What planning needs of a profile.

    Raises:
        OptionError: The profile has no GPU, or leaves out a figure that cannot be done without.
    """
    if not profile.gpus or profile.vram_bytes is None:
        raise OptionError(f"the profile {profile.name} has no GPU to plan for: choose another with --profile")
    if profile.link_gbps is None or profile.hbm_gbps is None:
        missing = [name for name in ("link_gbps", "hbm_gbps") if getattr(profile, name) is None]
        raise OptionError(f"the profile {profile.name} does not know {', '.join(missing)}: add it, or measure again")
    reserved_bytes = profile.vram_reserved_bytes or TYPICAL_CONTEXT_BYTES + LAZY_MODULE_BYTES
    return MachineFigures(
        profile.name, profile.vram_bytes, reserved_bytes, profile.link_gbps, profile.hbm_gbps, profile.ram_bytes,
        profile.tflops, profile.pinnable_bytes, profile.graph_launch_us or _DEFAULT_GRAPH_LAUNCH_US,
        _staging_gbps(profile), profile.decode_gweights_per_s, profile.gpus, profile.transfer_us or
        _DEFAULT_TRANSFER_US, profile.transfer_gbps, sum(profile.links_at_once_gbps) or profile.host_gbps,
        profile.links_at_once_gbps, vram_others_bytes=profile.vram_others_bytes or 0,
    )  # fmt: skip


def _staging_gbps(profile: MachineProfile) -> float:
    """Copying within host memory while the link is busy: half of what threads read then, since it writes as much."""
    read_gbps = profile.host_gbps_while_link_busy
    if read_gbps is None and profile.host_gbps is not None and profile.link_gbps is not None:
        read_gbps = max(profile.host_gbps - profile.link_gbps, profile.host_gbps / 4)
    if read_gbps is None:
        return _DEFAULT_STAGING_GBPS
    of_threads = [gbps for threads, gbps in profile.host_by_threads.items() if threads <= MOST_THREADS]
    return min([read_gbps, max(of_threads, default=read_gbps)]) / 2


def known_figures(profile: MachineProfile | None, device: torch.device, dtype: torch.dtype) -> MachineFigures | None:
    """Figures of the machine to predict with: of the profile given, or of one that knows this GPU.

    The user's own profiles come before those that are shipped. Nothing is known of a CPU, of which
    figures of a graphics card say nothing.

    Args:
        profile: What to go by; None looks for one.
        device: Where the target runs.
        dtype: Of the target, in which the machine's arithmetic has to be known.

    Raises:
        OptionError: The profile leaves out what is needed, or the target runs on a CPU and it is of a graphics card.
    """
    if profile is not None:
        of_card = device.type == "cpu" and (profile.gpu_name or "").startswith(_MAKERS)
        remedy = "drop --profile, and nothing is predicted"
        require(not of_card, f"the figures of {profile.name} are of an {profile.gpu_name}, not of a CPU: {remedy}")
        figures = machine_figures(profile)
        figures.flops(dtype)
        return figures
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for path in sorted(list_profiles().values(), key=lambda path: path.parent != own_directory()):
            with suppress(ProfileError, OptionError):  # nobody asked for this one
                found = load_profile(path)
                if found.gpu_name == name:
                    return known_figures(found, device, dtype)
    return None


def common_figures() -> MachineFigures:
    """Figures to choose by where nothing is known of the machine."""
    figures = machine_figures(load_profile(shipped_directory() / f"{COMMON_PROFILE}.toml"))
    return replace(figures, name="this machine", is_known=False)


@dataclass(frozen=True)
class CardLimit:
    """Most memory that a run may take of one card, None for no limit, and what of it is taken already; `link_ratio` is
    the bandwidth of its link over that of the machine's first card."""

    device_bytes: int | None
    reserved_bytes: int
    link_ratio: float = 1.0


@dataclass(frozen=True)
class MemoryLimits:
    """Most memory that a run may take, this process included; None: no limit.

    `device_bytes`, `reserved_bytes` and `link_ratio` are those of the first card, as a `CardLimit` has them, and
    `further_cards` those of the others; `ram_bytes` of the host, and of these `pinned_bytes` page-locked, if
    `page_locks` says that the device's copies need that at all, and `transfers_through_host` that rows pass through it
    from card to card. The names say whose limits these are, for messages.
    """

    device_bytes: int | None
    reserved_bytes: int
    ram_bytes: int
    ram_name: str
    pinned_bytes: int | None
    pinned_name: str
    page_locks: bool = True
    device_name: str = "device memory"
    further_cards: tuple[CardLimit, ...] = ()
    link_ratio: float = 1.0
    transfers_through_host: bool = False

    @property
    def num_cards(self) -> int:
        """That the layers may be dealt out to."""
        return 1 + len(self.further_cards)

    @property
    def bytes_of_cards(self) -> tuple[int | None, ...]:
        """What each card may take at the most."""
        return (self.device_bytes, *(card.device_bytes for card in self.further_cards))

    @property
    def all_device_bytes(self) -> int | None:
        """What all cards may take together; None where one has no limit."""
        found = [nbytes for nbytes in self.bytes_of_cards if nbytes is not None]
        return sum(found) if len(found) == self.num_cards else None

    def of_card(self, card: int) -> MemoryLimits:
        """The same of one card alone, whose name says which of several it is."""
        own, name = self.further_cards[card - 1] if card else self, self.device_name
        return replace(
            self, device_bytes=own.device_bytes, reserved_bytes=own.reserved_bytes, link_ratio=own.link_ratio,
            further_cards=(), device_name=f"{name} on card {card}" if self.further_cards else name,
        )  # fmt: skip


def limits_of(machine: MachineFigures, request: RuntimeConfig) -> MemoryLimits:
    """What a run may take of a machine that need not be here: of the cards that are named, or of all of them.

    Raises:
        BudgetError: More device, host or page-locked memory is asked for than there is.
        OptionError: More cards are named than there are, or not as many limits as cards.
    """
    name, other = machine.name, "choose another --profile"
    named = machine.num_cards if request.device == "auto" else len(request.devices)
    fine = named <= machine.num_cards or device_type_of(request) == "cpu"
    require(fine, f"--devices names {named} cards and {name} has {machine.num_cards}: name fewer, or {other}")
    asked = request.vram_of_cards(named)
    whose = f"of a card of {name}"
    free_bytes = machine.vram_bytes - machine.vram_others_bytes
    device_bytes, *further_bytes = (
        free_bytes if one is None else within("--vram", one, machine.vram_bytes, whose, other) for one in asked
    )
    names = [f"cuda:{card}" for card in range(named)] if request.device == "auto" else request.devices
    ratios = machine.link_ratios(names)
    ram_bytes = within("--ram", request.ram, machine.ram_bytes, f"of {name}", other)
    pinned_bytes, pinned_name = machine.pinnable_bytes, name
    if request.pinned is not None:
        pinned_name, whose = "--pinned", f"that {name} page-locks"
        pinned_bytes = within(pinned_name, request.pinned, machine.lockable_bytes, whose, other)
    ram_name = "--ram" if ram_bytes < machine.ram_bytes else "the host memory"
    return MemoryLimits(
        device_bytes, machine.vram_reserved_bytes, ram_bytes, ram_name, pinned_bytes, pinned_name,
        further_cards=tuple(
            CardLimit(nbytes, machine.vram_reserved_bytes, ratio)
            for nbytes, ratio in zip(further_bytes, ratios[1:], strict=True)
        ),
        link_ratio=ratios[0], transfers_through_host=device_type_of(request) != "cpu",
    )  # fmt: skip


def figures_here(figures: MachineFigures, there: MemoryLimits) -> MachineFigures:
    """The figures of a machine that has the memory that is there, and no more."""
    vram_bytes = max(NO_LIMIT_BYTES if nbytes is None else nbytes for nbytes in there.bytes_of_cards)
    return replace(
        figures, name="this machine", vram_bytes=vram_bytes, vram_reserved_bytes=there.reserved_bytes,
        vram_others_bytes=0, ram_bytes=there.ram_bytes, pinnable_bytes=there.pinned_bytes, num_cards=there.num_cards,
    )  # fmt: skip


def limits_here(asked_ram: int | None, asked_pinned: int | None, host: HostInfo, *, page_locks: bool) -> MemoryLimits:
    """Host memory that a run may take of this machine; that of the device is known when it has been opened.

    Args:
        asked_ram: What the user allows of host memory; None for what is available but for a reserve.
        asked_pinned: The same of page-locked memory; None for what can be registered.
        host: This machine.
        page_locks: Whether the device's copies need page-locked memory at all.

    Raises:
        BudgetError: More host memory is asked for than is available: it would end this process.
        OptionError: A limit of page-locked memory where there is none to lock.
    """
    if asked_pinned is not None and not page_locks:
        raise OptionError("--pinned does nothing on a CPU, where no memory is page-locked: drop it")
    # Python and the libraries have taken most of theirs by now.
    there_bytes = host.available_bytes + PROCESS_BYTES
    if asked_ram is None:
        kept_bytes = min(host.ram_bytes // _KEPT_SHARE, _MOST_KEPT_BYTES, host.available_bytes)
        ram_bytes = there_bytes - kept_bytes
        ram_name = f"the available host memory ({format_bytes(kept_bytes)} stay with the system)"
    else:
        ram_name, whose = "--ram", "of host memory available here"
        ram_bytes = within(ram_name, asked_ram, there_bytes, whose, "close other programs")
    pinned_bytes, pinned_name = asked_pinned, "--pinned"
    if asked_pinned is None and host.wsl and page_locks:  # Windows' driver locks about half of the virtual machine's
        pinned_bytes, pinned_name = host.ram_bytes // 2, "WSL"
    return MemoryLimits(None, 0, ram_bytes, ram_name, pinned_bytes, pinned_name, page_locks)
