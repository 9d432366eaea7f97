"""What every measurement of a long context is asked: the models, the text, where things live, how to propose."""

from __future__ import annotations

import argparse
from pathlib import Path

from widening.checkpoint import in_shape
from widening.stretched import StretchedCheckpoint

from offload_runtime.config import SpeculationOptions
from offload_runtime.memory import resolve_device
from offload_runtime.weights import CheckpointSource, open_checkpoint

STRETCH = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 16.0, "original_max_position_embeddings": 8192}
STRETCHED_TOKENS = 131072


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Models, text, placement and the hierarchy's options."""
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--delta", type=Path, nargs="*", default=[])
    parser.add_argument("--shape", default="llama2-7b", help="or none: the stretched source itself")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=122880)
    parser.add_argument("--kv", default="host")
    parser.add_argument("--vram")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--draft", default="model", choices=("model", "none"))
    parser.add_argument("--draft-cache", default="streaming")
    parser.add_argument("--recent", type=int, default=512)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--chunk-size", type=int, default=SpeculationOptions.chunk_size)
    parser.add_argument("--policy", default="retrieval")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--plain-tokens", type=int, default=8)


def sources(arguments: argparse.Namespace) -> tuple[CheckpointSource, CheckpointSource]:
    """Target and draft: the stretched source widened in memory, and the stretched source itself.

    Raises:
        CheckpointError, OptionError: The files do not go together, or there is no such shape.
    """
    small = StretchedCheckpoint(
        open_checkpoint(arguments.source), arguments.delta, rope=STRETCH, max_position_embeddings=STRETCHED_TOKENS
    )
    return in_shape(small, arguments.shape, arguments.noise, device=resolve_device(arguments.device)), small
