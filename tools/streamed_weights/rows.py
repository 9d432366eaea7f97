"""Measures rows over streamed weights, each beside the bound that the machine's own speeds give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import percentiles
from long_context.internals import link_peak_gbps, runner_of
from long_context.session import Session
from streamed_weights.speeds import Bound, PassNeeds, Speeds, bound_of

from offload_runtime.config import GB, SamplingParams
from offload_runtime.engine import GenerationResult, GenerationStats, Runtime
from offload_runtime.speculation import NoProposer

_SEED = 1
# Before anything of a draft is timed: kernels are compiled, graphs captured, and windows chosen by what was measured.
_WARM_UP_TOKENS = 40


class RowMeasurement:
    """Measures rows of one runtime.

    Args:
        runtime: To work with.
        speeds: Of the machine.
        resident_layers: Layers of the target that stay on the device.
        prompt: Token ids.
    """

    def __init__(self, runtime: Runtime, speeds: Speeds, *, resident_layers: int, prompt: Sequence[int]) -> None:
        self._runtime, self._speeds, self._resident_layers = runtime, speeds, resident_layers
        self._prompt = list(prompt)

    def window(self, width: int, passes: int) -> dict[str, Any]:
        """Passes over windows of `width` tokens, each followed by reading their best tokens back."""
        times_s, _ = Session(self._runtime).pass_times_s([self._prompt], width, passes)
        seconds, bound = percentiles(times_s), self._bound(width)
        return {
            **self._about(), "window_tokens": width, "pass_s": seconds.as_dict(),
            # If the target agreed with everything that it is shown.
            "tok_per_s": width / seconds.median,
            "link_gbps": self._bytes_per_pass / seconds.median / GB,
            "bound_s": bound.seconds, "bound_by": bound.bound_by, "bound_tok_per_s": width / bound.seconds,
            "share_of_bound": bound.seconds / seconds.median,
        }  # fmt: skip

    def resident(self, *, temperature: float, plain_tokens: int, drafted_tokens: int | None) -> dict[str, Any]:
        """Plain decoding and, unless `drafted_tokens` is None, so many tokens with the draft and chosen windows."""
        params = SamplingParams(temperature, seed=_SEED)
        session = Session(self._runtime)
        plain = session.decode([self._prompt], NoProposer(), params, gamma=0, count=plain_tokens)
        bound = self._bound(1)
        row: dict[str, Any] = {
            **self._about(), "plain_s_per_token": plain.s_per_token, "plain_tokens": plain.num_tokens,
            "bound_s": bound.seconds, "bound_by": bound.bound_by, "share_of_bound": bound.seconds / plain.s_per_token,
        }  # fmt: skip
        if drafted_tokens is None:
            return row
        self._answer(temperature, min(_WARM_UP_TOKENS, drafted_tokens))
        found = self._answer(temperature, drafted_tokens)
        # Not what was timed: a session decodes the prompt's last token in a window, an answer begins with what reading
        # the prompt gave, in taller matrix products whose last bits are others.
        same = self._answer(temperature, plain_tokens, speculate=False).tokens
        common = min(len(found.tokens), len(same))
        return {
            **row, "drafted": self._drafted(found.stats, plain.s_per_token), "compared_tokens": common,
            "identical_to_plain": found.tokens[:common] == same[:common],
        }  # fmt: skip

    def _answer(self, temperature: float, count: int, *, speculate: bool = True) -> GenerationResult:
        """So many tokens behind the prompt."""
        return self._runtime.generate(
            self._prompt, max_new_tokens=count, temperature=temperature, seed=_SEED, ignore_eos=True,
            speculate=speculate,
        )  # fmt: skip

    def _drafted(self, stats: GenerationStats, plain_s: float) -> dict[str, Any]:
        """With the draft: the bound takes as many tokens a pass as were accepted, and no time for drafting."""
        bound_tok_per_s = stats.tokens_per_pass / self._bound(stats.tokens_per_pass).seconds
        return {
            "tokens": stats.new_tokens, "passes": stats.passes, "tokens_per_pass": stats.tokens_per_pass,
            "tok_per_s": stats.tok_per_s, "times_plain": stats.tok_per_s * plain_s,
            "bound_tok_per_s": bound_tok_per_s, "share_of_bound": stats.tok_per_s / bound_tok_per_s,
            "windows": stats.windows, "accepted_by_source": stats.accepted_by_source,
            "link_idle_share": stats.link_idle_share,
        }  # fmt: skip

    def _about(self) -> dict[str, Any]:
        speeds, num_layers = self._speeds, self._runtime.config.num_layers
        return {
            "resident_layers": self._resident_layers, "num_layers": num_layers,
            "resident_share": self._resident_layers / num_layers, "bytes_per_pass": self._bytes_per_pass,
            "link_peak_gbps": self._link_peak_gbps, "memory_gbps": speeds.memory_gbps, "tflops": speeds.flops / 1e12,
        }  # fmt: skip

    def _bound(self, window_tokens: float) -> Bound:
        needs = PassNeeds.of(
            self._runtime.config, self._runtime.dtype, resident_layers=self._resident_layers,
            window_tokens=window_tokens,
        )  # fmt: skip
        assert needs.link_bytes == self._bytes_per_pass, "a layout that is streamed as it was planned"
        return bound_of(needs, self._speeds, self._link_peak_gbps)

    @property
    def _bytes_per_pass(self) -> int:
        return runner_of(self._runtime).streamer.bytes_per_pass

    @property
    def _link_peak_gbps(self) -> float | None:
        """Of back-to-back copies into the ring, or of a plain one if that is faster; of an emulated link the former."""
        ring_gbps = link_peak_gbps(self._runtime)
        if ring_gbps is None or self._runtime.emulated is not None:
            return ring_gbps
        return max(ring_gbps, self._speeds.memcpy_gbps or 0.0)
