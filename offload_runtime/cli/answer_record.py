"""Answers as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offload_runtime.config import GenerationParams, RuntimeConfig

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, Runtime

_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def result_record(
    result: GenerationResult, *, runtime: Runtime, config: RuntimeConfig, params: GenerationParams
) -> dict[str, Any]:
    """Return what `--json` prints for one answer."""
    return {**_answer_record(result), **_run_record(runtime, config, params)}


def batch_record(
    names: Sequence[str], results: Sequence[GenerationResult], *, runtime: Runtime, config: RuntimeConfig,
    params: GenerationParams,
) -> dict[str, Any]:  # fmt: skip
    """Return what `--json` prints for the answers of a batch, each with the name of its prompt."""
    answers = [{"name": name, **_answer_record(result)} for name, result in zip(names, results, strict=True)]
    return {"results": answers, **_run_record(runtime, config, params)}


def _answer_record(result: GenerationResult) -> dict[str, Any]:
    return {
        "tokens": list(result.tokens),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }


def _run_record(runtime: Runtime, config: RuntimeConfig, params: GenerationParams) -> dict[str, Any]:
    """Return what all answers of a run share."""
    return {
        "target": config.target,
        "draft": config.draft,
        "device": str(runtime.device),
        "dtype": _DTYPE_NAMES[str(runtime.dtype).removeprefix("torch.")],
        "seed": params.sampling.seed,
        "emulated": runtime.emulated,
    }
