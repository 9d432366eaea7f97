"""From what was asked for, or left open, to the plans of target and draft: element type, context, heights, caches."""

from __future__ import annotations

from dataclasses import replace

import torch

from offload_runtime.config import GB, ModelConfig, SpeculationOptions
from offload_runtime.engine.plans import ModelPlan, Plans, RetrievalPlan, StreamingPlan
from offload_runtime.errors import ContextLengthError, DeviceError, OptionError
from offload_runtime.kv.streaming import streaming_capacity_tokens
from offload_runtime.runners import PassShape
from offload_runtime.runners.draft_tree_steps import MOST_DEPTH, STEP_ROWS
from offload_runtime.weights import ModelDescription, packed_bytes

# Heights of the matrix products; they depend on nothing but the model and the kind of device, or the bits would depend
# on the placement. On a GPU 64 rows cost what one costs (the products of a 7B model: 3.76 ms at 64 rows, 3.57 ms at 1,
# 5.6 ms at 256; H200). A model of 8 GB and more is streamed on the cards this is for, its passes take hundreds of
# milliseconds, and 256 rows keep a window of 1024 tokens at 26 launches a layer, which the launch queue of 1024 holds.
# On a CPU every row costs.
_SMALL_TARGET_SHAPE = PassShape(64, 512, 1024)
_LARGE_TARGET_SHAPE = PassShape(256, 512, 1024)
_LARGE_TARGET_BYTES = 8 * GB
_CPU_TARGET_SHAPE = PassShape(8, 64, 256)
# A draft promises no bits, so its heights only have to be quick.
_DRAFT_SHAPES = {"cuda": PassShape(8, 256, 1024), "cpu": PassShape(1, 64, 256)}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Nodes of trees for which room is planned unasked: a pass verifies them at hardly any cost where everything is on the
# device, and beside what is streamed, the more of it the more.
TREE_ROOMS = (32, 256, 512, 1024)
_AUTO_CONTEXT_TOKENS = 8192
KV_PLACES = ("auto", "gpu", "host")


def resolve_dtype(name: str, source: ModelDescription, device: torch.device) -> torch.dtype:
    """Turn `auto`, `bf16`, `fp16` or `fp32` into a dtype; `auto` is the model's own on a GPU and fp32 on a CPU."""
    if name == "auto":
        return source.native_dtype if device.type == "cuda" else torch.float32
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
        return longest if kv == "host" else min(longest, _AUTO_CONTEXT_TOKENS)
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


def make_plans(
    target: ModelDescription, draft: ModelDescription | None, dtype: str, device: torch.device, *,
    context: int | str, window: int, kv: str, options: SpeculationOptions, batch: int = 1,
    tree_nodes: int | None = None,
) -> Plans:  # fmt: skip
    """What both models will take, the draft's trees of up to `tree_nodes` included. Asks nothing of the device. Raises
    `OptionError`, `ContextLengthError`."""
    if kv not in KV_PLACES:
        raise OptionError(f"kv must be {', '.join(KV_PLACES[:-1])} or {KV_PLACES[-1]}, not {kv!r}")
    torch_dtype = resolve_dtype(dtype, target, device)
    tokens = resolve_context(context, target.config(), kv=kv)
    check_window(window, target.config())
    plan = target_plan(target.config(), torch_dtype, device, context=tokens, window=window, batch=batch)
    graphs = device.type == "cuda"
    if draft is None:
        return Plans(plan, None, graphs=graphs)
    return Plans(
        plan,
        draft_plan(
            draft.config(),
            torch_dtype,
            device,
            context=tokens,
            window=window,
            batch=batch,
            options=options,
            tree_nodes=tree_nodes,
        ),
        graphs=graphs,
    )


def target_plan(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, context: int, window: int, batch: int = 1
) -> ModelPlan:
    """Plan of a target."""
    if device.type == "cpu":
        shape = _CPU_TARGET_SHAPE
    else:
        shape = _LARGE_TARGET_SHAPE if packed_bytes(config, dtype) >= _LARGE_TARGET_BYTES else _SMALL_TARGET_SHAPE
    return ModelPlan(config, dtype, shape, context, window, batch)


def draft_plan(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    context: int,
    window: int,
    options: SpeculationOptions,
    batch: int = 1,
    tree_nodes: int | None = None,
) -> ModelPlan:
    """Plan of a draft model. A full cache ends where the draft's own positions do.

    Raises:
        OptionError: The cache that was asked for needs positions that the draft does not have, or would retrieve more
            than there can be; or trees were asked for and the cache is one of retrieved chunks.
    """
    longest = longest_context(config)
    plan = ModelPlan(
        config, dtype, _DRAFT_SHAPES[device.type], context, window, batch, step_rows=max(STEP_ROWS, batch)
    )  # fmt: skip
    kind = options.draft_cache
    if kind == "auto":
        if context <= min(longest, _AUTO_CONTEXT_TOKENS):
            kind = "full"
        else:
            retrieves = context <= longest and options.budget_tokens <= context and tree_nodes is None
            kind = "retrieval" if retrieves else "streaming"
    if tree_nodes is not None and kind == "retrieval":
        raise OptionError(
            f"--tree-nodes {tree_nodes} needs a draft whose KV cache holds whole branches, not retrieved chunks: use "
            "--draft-cache streaming or full, or drop --tree-nodes"
        )
    plan = replace(plan, tree_nodes=tree_nodes or 0)
    if kind == "streaming":
        return _with_streaming_cache(plan, options)
    if kind == "full":
        return replace(plan, context_tokens=min(context, longest))
    if context > longest:
        raise OptionError(
            f"a retrieval cache keeps the positions of all {context} tokens of the context, and the draft was made for "
            f"{longest}: use --draft-cache streaming, lower --context, or set a RoPE scaling in the draft's config.json"
        )
    if options.budget_tokens > context:
        raise OptionError(
            f"a draft that retrieves {options.budget_tokens} of at most {context} tokens reserves memory for nothing: "
            "lower --budget-tokens, raise --context, or use --draft-cache full"
        )
    return replace(plan, retrieval=RetrievalPlan(options.budget_tokens, options.chunk_size))


def draft_alternatives(plans: Plans, options: SpeculationOptions) -> tuple[Plans, ...]:
    """The plans with each cache that their draft may get: where that is left to us, a streaming one besides what it
    was planned with, which takes memory that layers or the KV cache of the target could have."""
    draft = plans.draft
    if draft is None or options.draft_cache != "auto" or draft.streaming is not None or draft.tree_slots:
        return (plans,)
    if _streamed_tokens(draft, options) >= draft.context_tokens:
        return (plans,)
    return plans, replace(plans, draft=_with_streaming_cache(replace(draft, retrieval=None), options))


def _with_streaming_cache(plan: ModelPlan, options: SpeculationOptions) -> ModelPlan:
    """A draft with a cache of sinks and recent tokens, whatever the context."""
    kept, longest = _streamed_tokens(plan, options), longest_context(plan.config)
    if kept > longest:
        raise OptionError(
            f"a streaming draft cache of {kept} tokens (sinks, recent tokens and the window) is more than the "
            f"{longest} that the draft was made for: lower --recent-tokens by {kept - longest}"
        )
    reach = _streaming_window(plan, options)
    return replace(plan, streaming=StreamingPlan(options.sink_tokens, _recent_tokens(plan, options), reach))


def _recent_tokens(plan: ModelPlan, options: SpeculationOptions) -> int:
    """Newest tokens that a streaming cache keeps: there are no more of them than the context has."""
    return min(options.recent_tokens, max(2, plan.context_tokens))


def _streamed_tokens(plan: ModelPlan, options: SpeculationOptions) -> int:
    """Tokens that a streaming cache has room for."""
    recent_tokens = _recent_tokens(plan, options)
    return streaming_capacity_tokens(options.sink_tokens, recent_tokens, _streaming_window(plan, options))


def _streaming_window(plan: ModelPlan, options: SpeculationOptions) -> int:
    """Tokens in a row behind a text: where trees are grown no more than they are deep, so that longer chains are cut;
    steps of a middle level may go beyond what is asked for."""
    in_a_row = min(plan.window_tokens, MOST_DEPTH + 1) if plan.tree_nodes else plan.window_tokens
    return in_a_row + 2 * options.gamma_draft + 2
