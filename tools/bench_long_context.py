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
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "kernels")]
sys.path.append(str(ROOT))

from bench_report import emit, measure_link_gbps, percentiles, provenance  # noqa: E402
from widening.checkpoint import WidenedCheckpoint  # noqa: E402
from widening.shapes import SHAPES  # noqa: E402
from widening.stretched import StretchedCheckpoint  # noqa: E402

from offload_runtime.config import GB, SamplingParams, SpeculationOptions  # noqa: E402
from offload_runtime.engine import Runtime  # noqa: E402
from offload_runtime.errors import OffloadError  # noqa: E402
from offload_runtime.kv_cache import HostKVCache  # noqa: E402
from offload_runtime.model import Window  # noqa: E402
from offload_runtime.speculation import NoProposer, Proposer, SpeculativeDecoder, TriForceProposer  # noqa: E402
from offload_runtime.weights import CheckpointSource, open_checkpoint  # noqa: E402

STRETCH = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 16.0, "original_max_position_embeddings": 8192}
STRETCHED_TOKENS = 131072


def sources(arguments: argparse.Namespace) -> tuple[CheckpointSource, CheckpointSource]:
    """Target and draft."""
    small = StretchedCheckpoint(
        open_checkpoint(arguments.source), arguments.delta, rope=STRETCH, max_position_embeddings=STRETCHED_TOKENS
    )
    if arguments.shape == "none":
        return small, small
    device = torch.device(arguments.device)
    return WidenedCheckpoint(small, SHAPES[arguments.shape], arguments.noise, device=device), small


class Bench:
    """One runtime with a prompt in its cache."""

    def __init__(self, runtime: Runtime, prompt: Sequence[int]) -> None:
        self.runtime = runtime
        self.prompt = list(prompt)
        self.runner = runtime._models.target.runner
        self.engine = runtime._parts.engine
        self.cuda = runtime.device.type == "cuda"
        self.first_token = 0

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def back(self) -> None:
        """Cut the cache to the prompt."""
        self.runner.cache.truncate(0, len(self.prompt))
        self.synchronize()

    def prefill(self) -> dict[str, Any]:
        """Time and bytes of the prompt's way into the cache."""
        cache, config = self.runner.cache, self.runner.decoder.config
        before = self.engine.bytes_copied
        written = cache._writeback.bytes_copied if isinstance(cache, HostKVCache) else 0
        started = time.perf_counter()
        logits = self.runner.prefill(0, self.prompt)
        tokens = SpeculativeDecoder(self.runner, NoProposer(), SamplingParams()).first_token(logits)
        self.synchronize()
        elapsed_s = time.perf_counter() - started
        self.first_token = tokens
        if isinstance(cache, HostKVCache):
            cache._writeback.drain()
            written = cache._writeback.bytes_copied - written
        count = len(self.prompt)
        weights = self.runner.streamer.bytes_per_pass
        kv_bytes = config.kv_bytes_per_token(self.runtime.dtype.itemsize) * count
        # Two operations a weight and token, and four a channel and pair of tokens.
        matrices = config.num_layers * (
            config.hidden_size * (config.qkv_size + config.q_size) + 3 * config.hidden_size * config.intermediate_size
        )
        operations = 2 * matrices * count + 2 * config.num_layers * config.q_size * count * count
        return {
            "tokens": count,
            "s": elapsed_s,
            "link_bytes": self.engine.bytes_copied - before + written,
            "weights_and_kv_bytes": weights + (kv_bytes if written else 0),
            "operations": operations,
            "tflop_per_s": operations / elapsed_s / 1e12,
            "growing_host_memory_included": isinstance(cache, HostKVCache),
        }

    def windows(self, widths: Sequence[int], passes: int, peak_gbps: float | None) -> list[dict[str, Any]]:
        """Passes of the full target over windows."""
        rows = []
        for width in widths:
            self.back()
            window, times_s, nbytes = Window(tuple(self.prompt[:width])), [], 0
            for number in range(passes + 2):
                before, started = self.runner.streamer.bytes_begun, time.perf_counter()
                self.runner.verify([window], [0])[0].argmax(-1).tolist()
                if number >= 2:
                    times_s.append(time.perf_counter() - started)
                    nbytes = self.runner.streamer.bytes_begun - before
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
        self.back()
        proposer.start(params)
        decoder = SpeculativeDecoder(self.runner, proposer, params)
        tokens = [*self.prompt, self.first_token]
        decoder.round(tokens, gamma)  # captures graphs, fetches chunks
        self.back()
        middle = proposer._middle if isinstance(proposer, TriForceProposer) else None
        before = middle.counts if middle is not None else (0, 0)
        started, passes = time.perf_counter(), 0
        while len(tokens) - len(self.prompt) <= count:
            tokens += decoder.round(tokens, gamma).tokens
            passes += 1
        elapsed_s = time.perf_counter() - started
        new = len(tokens) - len(self.prompt) - 1
        steps, accepted = middle.counts if middle is not None else (0, 0)
        steps, accepted = steps - before[0], accepted - before[1]
        return {
            "gamma": gamma, "temperature": params.temperature, "tokens": new, "passes": passes,
            "tokens_per_pass": new / passes, "s_per_token": elapsed_s / new, "s_per_pass": elapsed_s / passes,
            "middle_steps_per_pass": steps / passes, "draft_accepted_per_step": accepted / steps if steps else None,
            "text": tokens[len(self.prompt) :],
        }  # fmt: skip

    def steps_ms(self, proposer: TriForceProposer, repeats: int = 20) -> dict[str, float]:
        """Times of single steps of the two inner levels, replayed as in decoding."""
        self.back()
        proposer.start(SamplingParams(0.6))
        SpeculativeDecoder(self.runner, proposer, SamplingParams(0.6)).round([*self.prompt, self.first_token], 24)
        self.back()
        tokens, gamma, found = [*self.prompt, self.first_token], proposer._gamma, {}
        middle, draft = proposer._middle, proposer._draft
        for name, refresh in (("middle_step_ms", False), ("middle_step_with_refresh_ms", True)):
            times_ms = []
            middle.begin(len(tokens), 64)
            for _ in range(repeats):
                proposer._window.upload(tokens[-2:], len(tokens))
                self.synchronize()
                started = time.perf_counter()
                middle.step(gamma, refresh=refresh)
                self.synchronize()
                times_ms.append(1e3 * (time.perf_counter() - started))
            found[name] = percentiles(times_ms).median
        if draft is not None:
            draft.catch_up(tokens)
            times_ms = []
            for _ in range(repeats):
                proposer._window.upload(tokens[-2:], len(tokens))
                self.synchronize()
                started = time.perf_counter()
                draft.steps(gamma, longest=len(tokens))
                self.synchronize()
                times_ms.append(1e3 * (time.perf_counter() - started) / gamma)
            found["draft_step_ms"] = percentiles(times_ms).median
        return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one dictionary."""
    peak_gbps = measure_link_gbps(torch.device(arguments.device))
    target, draft = sources(arguments)
    options = SpeculationOptions(
        "triforce", arguments.draft_cache, budget_tokens=arguments.budget, chunk_size=arguments.chunk_size,
        gamma_draft=max(variant[0] for variant in arguments.variants), policy=arguments.policy,
        recent_tokens=arguments.recent,
    )  # fmt: skip
    started = time.perf_counter()
    runtime = Runtime.load(
        target, draft=draft if arguments.draft == "model" else "none", device=arguments.device, vram=arguments.vram,
        dtype=arguments.dtype, context=arguments.context + 1024, kv=arguments.kv, speculation=options, max_gamma=127,
    )  # fmt: skip
    print(f"loaded in {time.perf_counter() - started:.1f} s: {runtime.placement}", flush=True)
    with runtime:
        text = arguments.text.read_text(encoding="utf-8")
        prompt = runtime.tokenizer.encode(text)[: arguments.context]
        bench = Bench(runtime, prompt)
        report: dict[str, Any] = {"benchmark": "long_context", "placement": runtime.placement}
        report["prefill"] = bench.prefill()
        _show("prefill", report["prefill"])
        report["windows"] = bench.windows(arguments.windows, arguments.passes, peak_gbps)
        for row in report["windows"]:
            _show("pass", row)
        proposer = runtime._proposers[0]
        assert isinstance(proposer, TriForceProposer)
        report["steps"] = bench.steps_ms(proposer)
        _show("steps", report["steps"])
        report["decoding"] = []
        for temperature in arguments.temperatures:
            params = SamplingParams(temperature, seed=1)
            plain = bench.decode(NoProposer(), params, 0, arguments.plain_tokens)
            _show("plain", plain)
            for gamma_draft, refresh_steps, gamma in arguments.variants:
                proposer._gamma, proposer._refresh_steps = gamma_draft, refresh_steps
                row = bench.decode(proposer, params, gamma, arguments.tokens)
                row |= {"gamma_draft": gamma_draft, "refresh_steps": refresh_steps}
                count = min(len(plain["text"]), len(row["text"]))
                row["identical_to_plain"] = row["text"][:count] == plain["text"][:count]
                row["times_plain"] = plain["s_per_token"] / row["s_per_token"]
                report["decoding"].append({**row, "plain_s_per_token": plain["s_per_token"]})
                _show("triforce", row)
        report["peak_vram_bytes"] = runtime._parts.budget.peak_bytes()
        report["pinned_bytes"] = runner_bytes(runtime)
    settings = {key: _setting(value) for key, value in vars(arguments).items() if key not in ("out", "commit")}
    return {**report, "settings": settings, **provenance(torch.device(arguments.device), commit=arguments.commit)}


def runner_bytes(runtime: Runtime) -> int:
    """Pinned bytes of weights and KV cache."""
    return runtime._parts.pinned_bytes + runtime._models.target.runner.cache.pinned_bytes


def _show(name: str, row: dict[str, Any]) -> None:
    shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items() if key != "text"}
    print(f"{name}: {json.dumps(shown)}", flush=True)


def _setting(value: Any) -> str:
    """A setting as text; of files the name alone."""
    if isinstance(value, list):
        return ", ".join(_setting(part) for part in value)
    return value.name if isinstance(value, Path) else str(value)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _triples(text: str) -> list[tuple[int, int, int]]:
    triples = []
    for part in text.split(","):
        first, second, third = (int(number) for number in part.split(":"))
        triples.append((first, second, third))
    return triples


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--delta", type=Path, nargs="*", default=[])
    parser.add_argument("--shape", default="llama2-7b", help="or none: the stretched source itself")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=122880)
    parser.add_argument("--kv", default="host")
    parser.add_argument("--vram")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--draft", default="model", choices=("model", "none"))
    parser.add_argument("--draft-cache", default="streaming")
    parser.add_argument("--recent", type=int, default=512)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--chunk-size", type=int, default=8)
    parser.add_argument("--policy", default="retrieval")
    parser.add_argument("--windows", type=_numbers, default=[1, 17, 64])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument(
        "--variants", type=_triples, default=[(4, 1, 24), (4, 4, 24)],
        help="of TriForce: gamma of the draft, steps between refreshes and gamma, like 4:1:24,4:4:24",
    )  # fmt: skip
    parser.add_argument("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.6])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--plain-tokens", type=int, default=8)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    try:
        emit(run(arguments), arguments.out)
    except OffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
