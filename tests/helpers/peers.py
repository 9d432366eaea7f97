"""A tiny target for the systems that are compared, the options of a peer, and what a result must have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate_offload
from common import options_from, peer_parser

PROMPT_TOKENS, NEW_TOKENS = 12, 10
# Warm-ups that are shorter than what is measured.
SHORT = ("--warmup-prompt-tokens", "3", "--warmup-new-tokens", "2")


def peer_options(target: Path, *others: str) -> Any:
    """A peer's options on the CPU."""
    given = ["--target", str(target), "--device", "cpu", "--dtype", "fp32", "--prompt-tokens", str(PROMPT_TOKENS)]
    given += ["--new-tokens", str(NEW_TOKENS), "--repeats", "1", *others]
    return options_from(peer_parser("").parse_args(given))


def prepare(options: Any) -> Any:
    return accelerate_offload.prepare(options, pin=True)


def draft_of(target: Path) -> tuple[str, str]:
    """The small model that `widened_target` was made from."""
    return "--draft", str(target.with_name("short_target"))


def one_result(tok_per_s: float, nbytes: int, kv: int | None, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """As far as the report reads it."""
    return {
        "system": "peer", "tok_per_s": tok_per_s, "token_s": {"p50": 0.5, "p90": 0.25, "p99": 0.125},
        "time_to_first_token_s": 3.0, "tokens_per_pass": 1.5, "link_gbps": 50.0, "bytes_per_pass": nbytes,
        "streamed": {"weights": 1, "kv": kv, "kv_to_host": kv}, "peak_vram_bytes": None, "notes": list(notes),
        "tokens": [[1, 2, 3]], "next_token": [{"tokens": [1], "probabilities": [0.5]}], "bound": {"link_gbps": 60.0},
    }  # fmt: skip
