"""Apply a sparse fine-tune: a checkpoint with the tensors of delta files instead of its own, and another RoPE.

    python tools/stretch_model.py --source demo --delta part-0.safetensors part-1.safetensors \\
        --rope '{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}' --out stretched

A delta file holds new values, not differences, under transformers' names. The result is a safetensors directory that
transformers loads too; `widening.stretched.StretchedCheckpoint` is the same without files, and can be widened.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import harness
from harness import DTYPES
from widen_model import SOURCE_HELP, open_source, remove_partial_output_on_sigterm, write_checkpoint
from widening.stretched import StretchedCheckpoint

from offload_runtime.errors import OptionError

_WAY_OUT = """write it like '{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}'"""


def parse_rope(text: str | None) -> dict[str, Any] | None:
    """transformers' rope parameters out of the command line.

    Raises:
        OptionError: No JSON object.
    """
    if text is None:
        return None
    try:
        rope = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--rope is not valid JSON ({error}): {_WAY_OUT}") from error
    if not isinstance(rope, dict):
        raise OptionError(f"--rope is not a JSON object but {text}: {_WAY_OUT}")
    return rope


def _stretched(arguments: argparse.Namespace) -> StretchedCheckpoint:
    """What the options describe, nothing of it read yet but headers."""
    rope = parse_rope(arguments.rope)
    return StretchedCheckpoint(
        open_source(arguments.source), arguments.delta, rope=rope, max_position_embeddings=arguments.max_position
    )


@harness.one_line_errors
def main() -> int:
    """Returns the exit code: 2 for what the user can mend."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--source", required=True, help=SOURCE_HELP)
    parser.add_argument("--delta", type=Path, nargs="+", default=[], help="safetensors files of new values")
    parser.add_argument("--rope", help="transformers' rope_parameters as JSON; rope_theta may be left out")
    parser.add_argument("--max-position", type=int, help="longest context (default: what the rope scaling reaches)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the written weights")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    arguments = parser.parse_args()
    remove_partial_output_on_sigterm()
    print(write_checkpoint(_stretched(arguments), arguments.out, arguments.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
