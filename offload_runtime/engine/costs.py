"""What passes, steps and a prefill ask of the machine, as everything was placed: bytes and operations, no seconds."""

from __future__ import annotations

import math
from functools import cache

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.engine.levels import PlacedLevels
from offload_runtime.engine.plans import ModelPlan
from offload_runtime.kv import block_bytes
from offload_runtime.kv.retrieval import summaries_bytes
from offload_runtime.model.linear import padded_rows
from offload_runtime.planner import LayerCosts, PassCosts, PrefillCosts, StepCosts, attention_operations
from offload_runtime.weights import PackedLayout

DTYPE_NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
# Launches of a layer: norms, rotation, attention in two, activation, four products each once a tile; more in a step.
_LAYER_LAUNCHES = 10
_PRODUCTS = 4
_PIECE_LAUNCHES = 3
_STEP_LAUNCHES = 12  # head, sampling, moving the window
_CHOICE_LAUNCHES = 4
# A third of the chunks change from step to step, half of them are kept by the margin of what is held.
_FETCHED_SHARE = 1 / 6


def dtype_name(plan: ModelPlan) -> str:
    """bf16, fp16 or fp32."""
    return DTYPE_NAMES[str(plan.dtype)]


def pass_costs(placed: PlacedLevels, *, length_tokens: int, rows: int) -> PassCosts:
    """A pass of the target over windows of `rows` tokens behind `length_tokens` committed ones in every sequence."""
    target, placement = placed.plans.target, placed.placement
    height = padded_rows(target.batch * rows, target.shape.window_rows)
    on_device, staged_weights = set(placement.resident_layers), set(placement.staged_layers)
    kv_on_device, staged_kv = set(target.kv.resident_layers), set(placement.staged_kv_layers)

    @cache  # layers are alike but for a few kinds
    def layer_costs(reach: int | None, weights: bool, kv: bool, weights_staged: bool, kv_staged: bool) -> LayerCosts:
        return _layer_costs(
            target, length_tokens, rows, reach=reach, weights=weights, kv=kv, weights_staged=weights_staged,
            kv_staged=kv_staged,
        )  # fmt: skip

    layers = [
        layer_costs(
            reach, layer not in on_device, target.kv.on_host and layer not in kv_on_device, layer in staged_weights,
            layer in staged_kv,
        )
        for layer, reach in enumerate(target.config.layer_windows)
    ]  # fmt: skip
    return PassCosts(dtype_name(target), tuple(layers), _head_costs(target, height))


def _layer_costs(
    target: ModelPlan, length_tokens: int, rows: int, *, reach: int | None, weights: bool, kv: bool,
    weights_staged: bool, kv_staged: bool,
) -> LayerCosts:  # fmt: skip
    """A layer that sees `reach` tokens (None: all) and of which weights and KV are streamed, or staged, or neither."""
    config, layout, tile = target.config, target.layer_layout, target.shape.window_rows
    height = padded_rows(target.batch * rows, tile)
    blocks = target.streamed_kv_blocks(reach, length_tokens) if kv else 0
    kv_bytes = target.batch * blocks * block_bytes(config, target.dtype)
    length = length_tokens + rows
    keys = length if reach is None else min(reach, length)
    pieces = -(-blocks * BLOCK_TOKENS * _kv_token_bytes(target) // target.kv.piece_bytes) if blocks else 0
    return LayerCosts(
        weight_bytes=height // tile * layout.total_bytes,
        kv_bytes=target.batch * keys * _kv_token_bytes(target),
        matrix_operations=2 * _elements(layout) * height,
        attention_operations=target.batch * attention_operations(
            queries=rows, keys=keys, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim
        ),
        streamed_weight_bytes=layout.total_bytes if weights else 0,
        streamed_kv_bytes=kv_bytes,
        launches=_LAYER_LAUNCHES + _PRODUCTS * height // tile + _PIECE_LAUNCHES * target.batch * pieces,
        staged_weight_bytes=layout.total_bytes if weights_staged else 0,
        staged_kv_bytes=kv_bytes if kv_staged else 0,
    )  # fmt: skip


def _kv_token_bytes(plan: ModelPlan) -> int:
    """Keys and values of a token in one layer."""
    return 2 * plan.config.kv_size * plan.dtype.itemsize


def _elements(layout: PackedLayout) -> int:
    """Elements of the layer's matrices: two operations each for every row."""
    return sum(math.prod(spec.shape) for spec in layout.tensors if len(spec.shape) == 2)


def _head_costs(plan: ModelPlan, rows: int) -> LayerCosts:
    elements = plan.config.vocab_size * plan.config.hidden_size
    return LayerCosts(elements * plan.dtype.itemsize, 0, 2 * elements * rows, 0)


def draft_step_costs(draft: ModelPlan) -> StepCosts:
    """One step of the draft, for all sequences of a batch together."""
    head = _head_costs(draft, draft.batch)
    kept = draft.context_tokens
    if draft.streaming is not None:
        kept = draft.streaming.sink_tokens + draft.streaming.recent_tokens
    elif draft.retrieval is not None:
        kept = min(kept, draft.retrieval.budget_tokens + 2 * BLOCK_TOKENS)
    layers = draft.config.num_layers
    elements = layers * _elements(draft.layer_layout)
    return StepCosts(
        dtype_name(draft),
        hbm_bytes=layers * (draft.layer_bytes + draft.batch * kept * _kv_token_bytes(draft)) + head.weight_bytes,
        operations=2 * draft.batch * elements + head.matrix_operations,
        launches=_LAYER_LAUNCHES * layers + _STEP_LAUNCHES,
    )


def middle_step_costs(placed: PlacedLevels) -> StepCosts:
    """One step of the middle level, for all sequences of a batch together, with its share of choosing and fetching
    chunks."""
    target, middle = placed.plans.target, placed.middle
    assert middle is not None
    options, layers = middle.options, target.config.num_layers
    rows = target.batch * (1 + (options.gamma_draft if placed.plans.draft is not None else 0))
    head = _head_costs(target, rows)
    held_bytes = target.batch * layers * options.budget_tokens * _kv_token_bytes(target)
    scored_bytes = summaries_bytes(
        target.config, chunk_size=options.chunk_size, capacity_tokens=target.context_tokens, batch=target.batch
    )
    recent_bytes = target.batch * layers * 2 * BLOCK_TOKENS * _kv_token_bytes(target)
    operations = 2 * rows * layers * _elements(target.layer_layout) + head.matrix_operations
    fetched_bytes = _FETCHED_SHARE * held_bytes / options.refresh_steps if target.kv.on_host else 0
    return StepCosts(
        dtype_name(target),
        hbm_bytes=layers * target.layer_bytes + head.weight_bytes + held_bytes + recent_bytes
        + scored_bytes // options.refresh_steps,
        operations=operations,
        launches=layers * (_LAYER_LAUNCHES + _PRODUCTS + _CHOICE_LAUNCHES // options.refresh_steps) + _STEP_LAUNCHES,
        fetched_bytes=round(fetched_bytes),
    )  # fmt: skip


def prefill_costs(placed: PlacedLevels, prompt_tokens: int) -> PrefillCosts:
    """Prompts of `prompt_tokens` in every sequence, one after the other."""
    target, config = placed.plans.target, placed.plans.target.config
    tiles = -(-prompt_tokens // target.shape.prefill_rows)
    elements = config.num_layers * _elements(target.layer_layout)
    attention = 0
    for reach in config.layer_windows:
        seen = prompt_tokens if reach is None else min(reach, prompt_tokens)
        attention += 4 * config.q_size * (prompt_tokens * seen - seen * seen // 2)
    host_layers = config.num_layers - len(target.kv.resident_layers) if target.kv.on_host else 0
    layer_written = target.batch * (prompt_tokens // BLOCK_TOKENS) * block_bytes(config, target.dtype)
    staged_kv_bytes = len(placed.placement.staged_kv_layers) * layer_written
    return PrefillCosts(
        dtype_name(target),
        streamed_weight_bytes=target.batch * placed.placement.num_streamed * target.layer_bytes,
        written_kv_bytes=host_layers * layer_written,
        hbm_bytes=target.batch * tiles * config.num_layers * target.layer_bytes,
        matrix_operations=2 * target.batch * elements * prompt_tokens,
        attention_operations=target.batch * attention,
        growth_bytes=host_layers * layer_written - staged_kv_bytes,
        staged_weight_bytes=target.batch * len(placed.placement.staged_layers) * target.layer_bytes,
        staged_kv_bytes=staged_kv_bytes,
    )


def lookahead_bytes(placed: PlacedLevels, costs: PassCosts) -> int:
    """Bytes that the rings take while nothing computes: of each kind, no more than a pass brings."""
    target = placed.plans.target
    weights = sum(count * layer.streamed_weight_bytes for layer, count in costs.kinds)
    kv = sum(count * layer.streamed_kv_bytes for layer, count in costs.kinds)
    rings = placed.placement.num_slots * target.layer_bytes, target.kv.num_slots * target.kv.piece_bytes
    return min(weights, rings[0]) + min(kv, rings[1])
