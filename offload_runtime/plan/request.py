"""What a run is asked for and what it may take: models, element type, context, limits of memory.

A request is the `RuntimeConfig` that `Runtime.load` takes, with a `DescribedModel` (an opened checkpoint is one) for
each model. A machine is the `MachineProfile` of one that need not be here. So a plan and a run cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import BudgetError, ContextLengthError, OptionError
from offload_runtime.hardware import MachineProfile, load_profile, shipped_directory
from offload_runtime.models.config import ModelConfig
from offload_runtime.options import require
from offload_runtime.stream import LAZY_MODULE_BYTES, TYPICAL_CONTEXT_BYTES, within
from offload_runtime.weights import DescribedModel, describe_model, share_vocabulary

# Sizes of trees for which room is planned unasked: a pass verifies them at hardly any cost where everything is on the
# device, and beside what is streamed, the more of it the more.
TREE_ROOMS = (32, 256, 512, 1024)
# Reserved where nobody says how much, and nothing grows on the host.
AUTO_CONTEXT_TOKENS = 8192
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# What is planned for where nothing else is known, and its name where plans are only compared by it.
COMMON_PROFILE, USUAL_CARD = "rtx4090", "a usual card"


class ShortageError(BudgetError):
    """A memory is too small for a plan: `memory` names it, by `missing_bytes`."""

    def __init__(self, message: str, memory: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.memory, self.missing_bytes = memory, missing_bytes


def describe_models(config: RuntimeConfig) -> RuntimeConfig:
    """The same request, of models that are known by their configuration files. Errors as of `describe_model` and
    `share_vocabulary`."""
    request = replace(config, target=describe_model(config.target), draft=config.proposed_by)
    if request.draft != "the draft":
        return request
    draft = describe_model(config.draft)
    share_vocabulary(request.target, draft)
    return replace(request, draft=draft)


def common_figures() -> MachineProfile:
    """The machine to choose by where nothing is known of the one that is there."""
    return replace(load_profile(shipped_directory() / f"{COMMON_PROFILE}.toml"), name=USUAL_CARD)


def resolve_dtype(name: str, source: DescribedModel, device_type: str) -> torch.dtype:
    """Turn `auto`, `bf16`, `fp16` or `fp32` into a dtype; `auto` is the model's own on a GPU and fp32 on a CPU."""
    if name == "auto":
        return source.native_dtype if device_type == "cuda" else torch.float32
    return next(dtype for dtype, known in DTYPE_NAMES.items() if known == name)


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


# --- limits


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

    `ram_bytes` are of the host, and of these `pinned_bytes` page-locked, if `page_locks` says that the device's copies
    need that at all; `transfers_through_host` that rows pass through it from card to card. The names say whose limits
    these are, for messages.
    """

    cards: tuple[CardLimit, ...]
    ram_bytes: int
    ram_name: str
    pinned_bytes: int | None
    pinned_name: str
    page_locks: bool = True
    device_name: str = "device memory"
    transfers_through_host: bool = False

    @property
    def device_bytes(self) -> int | None:
        """What all cards may take together; None where one has no limit."""
        found = [card.device_bytes for card in self.cards if card.device_bytes is not None]
        return sum(found) if len(found) == len(self.cards) else None

    def of_card(self, card: int) -> MemoryLimits:
        """The same of one of several cards alone, whose name says which it is."""
        return replace(self, cards=self.cards[card : card + 1], device_name=f"{self.device_name} on card {card}")


def limits_of(machine: MachineProfile, request: RuntimeConfig) -> MemoryLimits:
    """What a run may take of a machine that need not be here: of the cards that are named, or of all of them.

    Raises:
        BudgetError: More device, host or page-locked memory is asked for than there is.
        OptionError: More cards are named than there are, or not as many limits as cards.
    """
    name, other = machine.require_gpu().name, "choose another --profile"
    names = [f"cuda:{card}" for card in range(machine.gpus)] if request.device == "auto" else request.devices
    fine = len(names) <= machine.gpus or request.device_type == "cpu"
    require(fine, f"--devices names {len(names)} cards and {name} has {machine.gpus}: name fewer, or {other}")
    assert machine.vram_bytes is not None
    reserved_bytes = machine.vram_reserved_bytes or TYPICAL_CONTEXT_BYTES + LAZY_MODULE_BYTES
    cards = []
    for asked, ratio in zip(request.vram_of_cards(len(names)), machine.link_ratios(names), strict=True):
        device_bytes = within("--vram", asked, machine.vram_bytes, f"of a card of {name}", other)
        others_bytes = machine.vram_others_bytes or 0 if asked is None else 0
        cards.append(CardLimit(device_bytes - others_bytes, reserved_bytes, ratio))
    ram_bytes = within("--ram", request.ram, machine.ram_bytes, f"of {name}", other)
    pinned_bytes, pinned_name = machine.pinnable_bytes, name
    if request.pinned is not None:
        pinned_name, there_bytes = "--pinned", machine.pinnable_bytes or machine.ram_bytes
        pinned_bytes = within(pinned_name, request.pinned, there_bytes, f"that {name} page-locks", other)
    ram_name = "--ram" if ram_bytes < machine.ram_bytes else "the host memory"
    return MemoryLimits(
        tuple(cards), ram_bytes, ram_name, pinned_bytes, pinned_name,
        transfers_through_host=request.device_type != "cpu",
    )  # fmt: skip
