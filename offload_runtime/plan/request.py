"""What a run is asked for: the models, how they are to be run, and the limits that the user sets.

`Runtime.load` and `offload-runtime plan` fill the same request, so that a plan and a run cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offload_runtime.config import (
    ModelConfig,
    RuntimeConfig,
    SpeculationOptions,
    check_options,
    check_proposals,
    require_positive,
)
from offload_runtime.errors import ContextLengthError, DeviceError, OptionError
from offload_runtime.weights import ModelDescription, describe_model

KV_PLACES = ("auto", "gpu", "host")
# Sizes of trees for which room is planned unasked: a pass verifies them at hardly any cost where everything is on the
# device, and beside what is streamed, the more of it the more.
TREE_ROOMS = (32, 256, 512, 1024)
# Reserved where nobody says how much, and nothing grows on the host.
AUTO_CONTEXT_TOKENS = 8192
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class PlanRequest:
    """What `Runtime.load` is asked for, or would be.

    `draft_name` is `ngram`, `none` or anything else for the model `draft`. `vram_bytes`, `ram_bytes` and `pinned_bytes`
    None allow all of the machine's. `tree_nodes` as of `Runtime.load`. `device_type`: `cuda` or `cpu`.
    """

    target: ModelDescription
    draft_name: str = "ngram"
    draft: ModelDescription | None = None
    dtype: str = "auto"
    context: int | str = "auto"
    kv: str = "auto"
    batch: int = 1
    resident_layers: int | None = None
    gamma: int | None = None
    max_gamma: int = 63
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    pinned_bytes: int | None = None
    tree_nodes: int | None = None
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        require_positive("batch", self.batch)
        assert (self.draft is not None) == (self.draft_name not in ("ngram", "none"))

    @classmethod
    def of(
        cls, config: RuntimeConfig, target: ModelDescription, draft: ModelDescription | None, *,
        device_type: str = "cuda",
    ) -> PlanRequest:  # fmt: skip
        """What a configuration asks for of its models."""
        return cls(
            target, config.proposed_by, draft, dtype=config.dtype, context=config.context, kv=config.kv,
            batch=config.max_batch, resident_layers=config.resident_layers, gamma=config.gamma,
            max_gamma=config.max_gamma, speculation=config.speculation, vram_bytes=config.vram_bytes,
            ram_bytes=config.ram_bytes, pinned_bytes=config.pinned_bytes, tree_nodes=config.tree_nodes,
            device_type=device_type,
        )  # fmt: skip

    @property
    def proposer(self) -> str:
        """Who proposes, in words."""
        return self.draft_name if self.draft is None else "the draft"

    @property
    def proposes(self) -> bool:
        """Whether anybody but a retrieval verifier proposes at all."""
        return self.draft_name != "none" and self.speculation.mode != "none"

    def check(self) -> None:
        """Refuse options that contradict each other or would be ignored. Raises `OptionError`."""
        check_options(
            self.proposer, self.speculation.mode, tree_nodes=self.tree_nodes, gamma=self.gamma,
            max_gamma=self.max_gamma,
        )  # fmt: skip


def describe_pair(target: str, draft: str, mode: str) -> tuple[ModelDescription, ModelDescription | None]:
    """Read the configuration files of a target and of what may be a draft model.

    Args:
        target: As of `Runtime.load`.
        draft: The same.
        mode: Of `SpeculationOptions`.

    Raises:
        OptionError: One of the two is left out by the other; errors as of `describe_model`.
    """
    has_draft = draft not in ("ngram", "none")
    check_proposals("the draft" if has_draft else draft, mode)
    return describe_model(target), describe_model(draft) if has_draft else None


def resolve_dtype(name: str, source: ModelDescription, device_type: str) -> torch.dtype:
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


def resolve_context(context: int | str, config: ModelConfig, *, kv: str) -> int:
    """Tokens to reserve for: asked for, or the model's maximum, up to 8192 unless the KV cache grows on the host."""
    if context == "auto":
        longest = config.max_position_embeddings
        return longest if kv == "host" else min(longest, AUTO_CONTEXT_TOKENS)
    try:
        tokens = int(context)
    except ValueError:
        raise OptionError(f"context must be auto or a number of tokens, not {context!r}") from None
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
    rope, longest = config.rope_parameters, config.max_position_embeddings
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        return max(longest, int(original * rope["factor"]))
    return int(longest * rope["factor"]) if rope["rope_type"] == "dynamic" else longest


def check_window(window: int, config: ModelConfig) -> None:
    """Refuse windows that no text has room for, before memory is reckoned for them. Raises `OptionError`."""
    proposed, longest = window - 1, longest_context(config)
    if proposed > max(longest, *TREE_ROOMS):
        raise OptionError(
            f"{proposed} proposals in a window are more than the {longest} tokens that the model was made for: lower "
            "--gamma or --tree-nodes"
        )
