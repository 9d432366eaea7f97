"""The way of the command line's options into the frozen configuration.

Everything that can be judged without the model is judged here, before a byte of it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offload_runtime.cli.options import Device, Dtype, KVPlace
from offload_runtime.config import GenerationParams, SamplingParams, SpeculationOptions, parse_bytes, require_positive
from offload_runtime.errors import OptionError


@dataclass(frozen=True)
class LoadOptions:
    """What `Runtime.load` is asked for. `vram_bytes` None means all that is free.

    `max_gamma` is the deepest window to make room for; the default is the runtime's own.
    """

    target: str
    draft: str = "ngram"
    device: str = "auto"
    dtype: str = "auto"
    vram_bytes: int | None = None
    resident_layers: int | str = "auto"
    context: int | str = "auto"
    kv: str = "auto"
    max_gamma: int = 63
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)

    def __post_init__(self) -> None:
        if not self.target.strip():
            raise OptionError("--target is empty: give a directory, a GGUF file or a hub id such as org/name")
        if not self.draft.strip():
            raise OptionError("--draft is empty: give a model, ngram or none")


def load_options(
    *,
    target: str,
    draft: str,
    device: Device,
    dtype: Dtype,
    vram: str | None,
    resident_layers: str,
    context: str,
    kv: KVPlace,
    gamma: int | None,
    speculation: SpeculationOptions | None = None,
) -> LoadOptions:
    """Turn the strings of the command line into `LoadOptions`; raises `OptionError` naming the option."""
    reserved_tokens = _count_or_auto("--context", context)
    if isinstance(reserved_tokens, int):
        require_positive("--context", reserved_tokens)
    return LoadOptions(
        target=target,
        draft=draft,
        device=device.value,
        dtype=dtype.value,
        vram_bytes=None if vram is None else parse_bytes(vram),
        resident_layers=_count_or_auto("--resident-layers", resident_layers),
        context=reserved_tokens,
        kv=kv.value,
        speculation=speculation or SpeculationOptions(),
        max_gamma=max(LoadOptions.max_gamma, gamma or 0),
    )


def generation_params(
    *,
    draft: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    gamma: int | None,
    stop: list[str] | None,
    ignore_eos: bool,
) -> GenerationParams:
    """Collect what one answer is asked for; raises `OptionError` for values that make no sense together."""
    if gamma is not None and draft == "none":
        raise OptionError(f"--gamma {gamma} does nothing with --draft none: drop it or name a draft")
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    return GenerationParams(
        max_new_tokens=max_new_tokens, stop=tuple(stop or ()), gamma=gamma, ignore_eos=ignore_eos, sampling=sampling
    )


def _count_or_auto(name: str, text: str) -> int | str:
    """Read a count that may be left to the planner."""
    if text == "auto":
        return text
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise OptionError(f"{name} must be a count or auto, not {text!r}")
    return count
