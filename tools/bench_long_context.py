"""A long context: prefill, passes over a KV cache in host memory or on the GPU, plain decoding and TriForce.

    python tools/bench_long_context.py --source SmolLM2-135M.gguf --delta a.safetensors b.safetensors \\
        --shape llama2-7b --text novel.txt --context 122880 --kv host --vram 24GB --out tools/results/triforce-h200.json

The target is the source, its context stretched by the deltas, widened in memory to the shape; the draft is the
stretched source itself. Everything after one prefill is measured from the same cache, which is cut back in between.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import harness
from harness import check_out, emit, percentiles, provenance
from long_context.command import add_common_options, read_text, sources
from long_context.internals import (
    budget_of,
    bytes_written_back,
    engine_of,
    finish_writing_back,
    levels_of,
    pinned_bytes,
    proposer_of,
    runner_of,
    set_variant,
    target_cache,
)
from long_context.session import Session, compare
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from timing import measure_link_gbps

from offload_runtime.config import GB, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.kv import HostKVCache
from offload_runtime.memory import resolve_device
from offload_runtime.params import SamplingParams
from offload_runtime.speculation import Proposer
from offload_runtime.weights import ModelLayout


class Bench:
    """One runtime with a prompt in its cache."""

    def __init__(self, runtime: Runtime, prompt: Sequence[int]) -> None:
        self.runtime = runtime
        self.prompt = list(prompt)
        self.session = Session(runtime)
        self.first_token = 0

    @property
    def start(self) -> list[list[int]]:
        """The prompt and the token that follows it."""
        return [[*self.prompt, self.first_token]]

    def prefill(self) -> dict[str, Any]:
        """Time and bytes of the prompt's way into the cache."""
        runner, cache, engine = runner_of(self.runtime), target_cache(self.runtime), engine_of(self.runtime)
        config, before, written = runner.decoder.config, engine.bytes_copied, bytes_written_back(self.runtime)
        started = time.perf_counter()
        logits = self.session.fill(0, self.prompt)
        assert logits is not None, "the cache was empty"
        self.first_token = int(logits.argmax())
        self.session.synchronize()
        elapsed_s = time.perf_counter() - started
        finish_writing_back(cache)
        written = bytes_written_back(self.runtime) - written
        count = len(self.prompt)
        weights = runner.streamer.bytes_per_pass
        kv_bytes = config.kv_bytes_per_token(self.runtime.dtype.itemsize) * count
        # Two operations a weight and token, and four a channel and pair of tokens.
        matrices = config.num_layers * (
            config.hidden_size * (config.qkv_size + config.q_size) + 3 * config.hidden_size * config.intermediate_size
        )
        operations = 2 * matrices * count + 2 * config.num_layers * config.q_size * count * count
        return {
            "tokens": count,
            "s": elapsed_s,
            "link_bytes": engine.bytes_copied - before + written,
            "weights_and_kv_bytes": weights + (kv_bytes if written else 0),
            "operations": operations,
            "tflop_per_s": operations / elapsed_s / 1e12,
            "growing_host_memory_included": isinstance(cache, HostKVCache),
        }

    def windows(self, widths: Sequence[int], passes: int, peak_gbps: float | None) -> list[dict[str, Any]]:
        """Passes of the full target over windows."""
        rows = []
        for width in widths:
            times_s, nbytes = self.session.pass_times_s(self.start, width, passes)
            median = percentiles(times_s).median
            gbps = nbytes / median / GB
            rows.append(
                {
                    "window_tokens": width, "pass_s": percentiles(times_s).as_dict(), "bytes": nbytes,
                    "link_gbps": gbps if nbytes else None, "link_peak_gbps": peak_gbps,
                    "link_share": gbps / peak_gbps if nbytes and peak_gbps else None,
                }
            )  # fmt: skip
        return rows

    def decode(self, proposer: Proposer, params: SamplingParams, gamma: int, count: int) -> dict[str, Any]:
        """Decode `count` tokens behind the prompt."""
        done = self.session.decode(self.start, proposer, params, gamma=gamma, count=count)
        return {
            "gamma": gamma, "temperature": params.temperature, "tokens": done.num_tokens, "passes": done.passes,
            "tokens_per_pass": done.tokens_per_pass, "s_per_token": done.s_per_token,
            "s_per_pass": done.elapsed_s / done.passes, **done.acceptance(),
            "text": [self.first_token, *done.texts[0]],
        }  # fmt: skip

    def steps_ms(self, proposer: Proposer) -> dict[str, float]:
        """Times of single steps of the two inner levels, replayed as in decoding."""
        return self.session.step_times_ms(self.start, proposer, SamplingParams(0.6), gamma=24)

    def verifier_passes(
        self, proposer: Proposer, rows: Sequence[int], budget_tokens: int, hbm_gbps: float
    ) -> list[dict[str, Any]]:
        """Steps of the retrieval verifier over so many tokens, beside the time of reading all they touch once."""
        config, itemsize = runner_of(self.runtime).decoder.config, self.runtime.dtype.itemsize
        shared_bytes = (config.vocab_size + 1) * config.hidden_size * itemsize  # head and final norm
        layers_bytes = ModelLayout.plain(config, self.runtime.dtype).total_bytes - shared_bytes * (
            1 if config.tie_word_embeddings else 2
        )
        found = []
        for count in rows:
            set_variant(self.runtime, proposer, gamma_draft=count - 1, refresh_steps=1)
            steps_ms = self.session.step_times_ms(self.start, proposer, SamplingParams(0.6), gamma=64)
            recent = levels_of(proposer).verifier.cache.recent[0]  # type: ignore[union-attr]
            keys = budget_tokens + len(self.prompt) - recent.start * BLOCK_TOKENS
            nbytes = layers_bytes + shared_bytes + keys * config.kv_bytes_per_token(itemsize)
            hbm_ms = 1e3 * nbytes / (hbm_gbps * GB)
            times = steps_ms["verifier_step_ms"] / hbm_ms
            found.append({"tokens": count, **steps_ms, "bytes": nbytes, "hbm_ms": hbm_ms, "times_hbm": times})
        return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one dictionary.

    Raises:
        OptionError: The text is shorter than the context.
    """
    target, draft = sources(arguments)
    prompt = read_text(arguments, draft, arguments.context)[: arguments.context]
    peak_gbps = measure_link_gbps(resolve_device(arguments.device))
    options = SpeculationOptions(
        "triforce", arguments.draft_cache, budget_tokens=arguments.budget, chunk_size=arguments.chunk_size,
        gamma_draft=max([variant[0] for variant in arguments.variants] + [rows - 1 for rows in arguments.step_rows]),
        recent_tokens=arguments.recent,
    )  # fmt: skip
    started = time.perf_counter()
    runtime = Runtime.load(
        target, draft=draft if arguments.draft == "model" else "none", device=arguments.device, vram=arguments.vram,
        dtype=arguments.dtype, context=arguments.context + 1024, kv=arguments.kv, speculation=options,
        max_gamma=max(*(window - 1 for window in arguments.windows), *(gamma for *_, gamma in arguments.variants)),
    )  # fmt: skip
    print(f"loaded in {time.perf_counter() - started:.1f} s: {runtime.placement}", flush=True)
    with runtime:
        bench = Bench(runtime, prompt)
        report: dict[str, Any] = {"benchmark": "long_context", "placement": runtime.placement}
        report["prefill"] = bench.prefill()
        _show("prefill", report["prefill"])
        report["windows"] = bench.windows(arguments.windows, arguments.passes, peak_gbps)
        for row in report["windows"]:
            _show("pass", row)
        proposer = proposer_of(runtime)
        set_variant(runtime, proposer, gamma_draft=arguments.variants[0][0], refresh_steps=1)
        report["steps"] = bench.steps_ms(proposer)
        _show("steps", report["steps"])
        report["verifier_passes"] = bench.verifier_passes(
            proposer, arguments.step_rows, arguments.budget, arguments.hbm_gbps
        )
        for row in report["verifier_passes"]:
            _show("verifier pass", row)
        report["decoding"] = []
        for temperature in arguments.temperatures:
            params = SamplingParams(temperature, seed=1)
            plain = bench.decode(Proposer(), params, 0, arguments.plain_tokens)
            _show("plain", plain)
            for gamma_draft, refresh_steps, gamma in arguments.variants:
                set_variant(runtime, proposer, gamma_draft=gamma_draft, refresh_steps=refresh_steps)
                row = bench.decode(proposer, params, gamma, arguments.tokens)
                row |= {"gamma_draft": gamma_draft, "refresh_steps": refresh_steps}
                same = compare([plain["text"][1:]], [row["text"][1:]])  # both begin with the prefill's token
                row |= {"identical_to_plain": same.identical, "compared_tokens": same.num_tokens}
                row["times_plain"] = plain["s_per_token"] / row["s_per_token"]
                report["decoding"].append({**row, "plain_s_per_token": plain["s_per_token"]})
                _show("triforce", row)
        report["peak_vram_bytes"] = budget_of(runtime).peak_bytes()
        report["pinned_bytes"] = pinned_bytes(runtime)
    settings = harness.settings_of(arguments)
    return {**report, "settings": settings, **provenance(resolve_device(arguments.device), commit=arguments.commit)}


def _show(name: str, row: dict[str, Any]) -> None:
    shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items() if key != "text"}
    print(f"{name}: {json.dumps(shown)}", flush=True)


def _triples(text: str) -> list[tuple[int, int, int]]:
    triples = []
    for part in text.split(","):
        first, second, third = (int(number) for number in part.split(":"))
        triples.append((first, second, third))
    return triples


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = harness.bench_parser(__doc__)
    add_common_options(parser)
    parser.add_argument("--windows", type=harness.integers, default=[1, 17, 64])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument(
        "--variants", type=_triples, default=[(16, 1, 24), (16, 4, 24)],
        help="of TriForce: tokens of the draft, steps between refreshes and gamma, like 16:1:24,16:4:24",
    )  # fmt: skip
    parser.add_argument("--step-rows", type=harness.integers, default=[17], help="tokens of timed verifier passes")
    parser.add_argument("--hbm-gbps", type=float, default=4800.0, help="of the card, as its maker states (H200)")
    parser.add_argument("--temperatures", type=harness.floats, default=[0.6])
    return parser


@harness.one_line_errors
def main() -> int:
    """Measure and print; returns the exit code."""
    arguments = make_parser().parse_args()
    check_out(arguments.out)
    emit(run(arguments), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
