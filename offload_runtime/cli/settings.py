"""The way of the command line's options into the frozen configuration.

Everything that can be judged without the model is judged here, before a byte of it is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload_runtime.cli.options import ChunkPolicyName, Device, DraftCache, Dtype, KVPlace, SpeculationMode
from offload_runtime.cli.user_text import user_path
from offload_runtime.config import (
    GenerationParams,
    RuntimeConfig,
    SamplingParams,
    SpeculationOptions,
    idle_options,
    parse_bytes,
    require_positive,
)
from offload_runtime.errors import OptionError


def load_options(
    *,
    target: str,
    draft: str,
    device: Device,
    dtype: Dtype,
    vram: str | None,
    ram: str | None,
    pinned: str | None,
    resident_layers: str,
    context: str,
    kv: KVPlace,
    gamma: str,
    speculation: SpeculationOptions,
    max_batch: int = 1,
    emulate: str | None = None,
    profile: str | None = None,
    tree_nodes: str = "auto",
    trace: str | None = None,
) -> RuntimeConfig:
    """Turn the strings of the command line into the configuration; raises `OptionError` naming the option."""
    chosen_gamma, nodes = count_or_chosen("--gamma", gamma, least=1), count_or_chosen("--tree-nodes", tree_nodes)
    reserved_tokens = _count_or_auto("--context", context)
    if isinstance(reserved_tokens, int):
        require_positive("--context", reserved_tokens)
    layers = _count_or_auto("--resident-layers", resident_layers)
    return RuntimeConfig(
        target=target,
        draft=draft,
        device=device.value,
        dtype=dtype.value,
        vram_bytes=None if vram is None else parse_bytes(vram),
        ram_bytes=None if ram is None else parse_bytes(ram),
        pinned_bytes=None if pinned is None else parse_bytes(pinned),
        resident_layers=None if isinstance(layers, str) else layers,
        context=reserved_tokens,
        kv=kv.value,
        speculation=speculation,
        max_batch=max_batch,
        gamma=chosen_gamma,
        max_gamma=max(RuntimeConfig.max_gamma, chosen_gamma or 0),
        # A gamma alone asks for chains, and room for trees would be of no use.
        tree_nodes=0 if nodes is None and chosen_gamma is not None else nodes,
        emulate=emulate,
        profile=profile,
        trace=None if trace is None else user_path(trace),
    )


def speculation_options(
    *,
    draft: str,
    mode: SpeculationMode,
    draft_cache: DraftCache,
    sink_tokens: int | None,
    recent_tokens: int | None,
    chunk_size: int | None,
    budget_tokens: int | None,
    policy: ChunkPolicyName | None,
    refresh_steps: int | None,
    gamma_draft: int | None,
) -> SpeculationOptions:
    """Collect how tokens are proposed; raises `OptionError` for an option that would do nothing beside the others.

    None stands for an option that was not given and gets the default of `SpeculationOptions`.
    """
    numbers = {
        "sink_tokens": sink_tokens, "recent_tokens": recent_tokens, "chunk_size": chunk_size,
        "budget_tokens": budget_tokens, "refresh_steps": refresh_steps, "gamma_draft": gamma_draft,
    }  # fmt: skip
    given: dict[str, Any] = {name: number for name, number in numbers.items() if number is not None}
    given |= {} if policy is None else {"policy": policy.value}
    given |= {} if draft_cache == DraftCache.auto else {"draft_cache": draft_cache.value}
    idle = idle_options(
        draft not in ("ngram", "none"), mode.value, draft_cache.value, None if policy is None else policy.value
    )
    for name, why in idle.items():
        if name in given:
            raise OptionError(f"--{name.replace('_', '-')} {given[name]} does nothing {why}")
    return replace(SpeculationOptions(mode.value), **given)


def generation_params(
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    gamma: str,
    stop: list[str] | None,
    ignore_eos: bool,
) -> GenerationParams:
    """Collect what one answer is asked for; raises `OptionError` for values that make no sense."""
    given_gamma = count_or_chosen("--gamma", gamma, least=1)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    return GenerationParams(
        max_new_tokens=max_new_tokens, stop=tuple(stop or ()), gamma=given_gamma, ignore_eos=ignore_eos,
        sampling=sampling,
    )  # fmt: skip


def count_or_chosen(name: str, text: str, *, least: int = 0) -> int | None:
    """Read a count of at least `least`; None for `auto`, which chooses as it runs."""
    count = _count_or_auto(name, text)
    if isinstance(count, str):
        return None
    if count < least:
        raise OptionError(f"{name} must be at least {least}, or auto, not {count}")
    return count


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
