"""Exact inference of language models and contexts that do not fit the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_runtime.params import GenerationParams, SamplingParams

if TYPE_CHECKING:
    from offload_runtime.engine import (
        AsyncTokenStream,
        Conversation,
        EndEvent,
        ErrorEvent,
        GenerationResult,
        GenerationStats,
        Runtime,
        Scheduler,
        SchedulerCounters,
        Ticket,
        TokenEvent,
        TokenLogprobs,
        TokenStream,
    )

__version__ = "0.2.0"
__all__ = [
    "AsyncTokenStream", "Conversation", "EndEvent", "ErrorEvent", "GenerationParams", "GenerationResult",
    "GenerationStats", "Runtime", "SamplingParams", "Scheduler", "SchedulerCounters", "Ticket", "TokenEvent",
    "TokenLogprobs", "TokenStream", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: `offload-runtime --help` and the errors do without.
    if name in __all__:
        from offload_runtime import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
