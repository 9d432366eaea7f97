"""Which generations a measurement consists of, what each gave, round by round, and the figures that follow: the same
arithmetic for every system."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common import PeerOptions
from harness import percentile, percentiles

from offload_runtime.sizes import GB


@dataclass(frozen=True)
class Run:
    """One generation.

    Attributes:
        prompt: Which of the prompts.
        started_s: When it was asked for.
        stamps_s: When each round's tokens were there: plain decoding gives one a round, speculation several.
        counts: Tokens of each round. The first round ends the prefill.
        tokens: All of them.
        kv_bytes: Of keys and values that came to the device in all passes behind the prefill; None where that is not
            known.
    """

    prompt: int
    started_s: float
    stamps_s: tuple[float, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]
    kv_bytes: int | None = 0

    def __post_init__(self) -> None:
        assert len(self.stamps_s) == len(self.counts) and sum(self.counts) == len(self.tokens)

    @property
    def first_token_s(self) -> float:
        """From the call to the first token: mostly prefill."""
        return self.stamps_s[0] - self.started_s

    @property
    def passes(self) -> int:
        """Of the target behind the prefill."""
        return len(self.counts) - 1

    @property
    def decode_s(self) -> float:
        """From the first round's end to the last one's."""
        return self.stamps_s[-1] - self.stamps_s[0]

    @property
    def decoded(self) -> int:
        """Tokens after the first round."""
        return sum(self.counts[1:])

    @property
    def tok_per_s(self) -> float:
        """Tokens after the first round over the time after it."""
        return self.decoded / self.decode_s

    def link_bytes(self, weight_bytes: int) -> int:
        """Bytes that came to the device after the first round, `weight_bytes` of weights a pass."""
        return weight_bytes * self.passes + (self.kv_bytes or 0)

    def token_times_s(self) -> list[float]:
        """Seconds of every token after the first round: its round's time, shared among the round's tokens."""
        steps = [after - before for before, after in itertools.pairwise(self.stamps_s)]
        return [step / count for step, count in zip(steps, self.counts[1:], strict=True) for _ in range(count)]


def streamed_bytes(runs: Sequence[Run], weight_bytes: int) -> dict[str, int | None]:
    """Bytes of a pass over the link, the mean of all passes: of `weights`, and of keys and values (`kv`), None where
    these are not known of every run."""
    known = [run.kv_bytes for run in runs if run.kv_bytes is not None]
    passes = sum(run.passes for run in runs)
    return {"weights": weight_bytes, "kv": round(sum(known) / passes) if len(known) == len(runs) else None}


def typical(runs: Sequence[Run]) -> list[Run]:
    """Of every prompt the run with the median speed; the slower of the middle two where their number is even."""
    by_prompt: dict[int, list[Run]] = {}
    for run in runs:
        by_prompt.setdefault(run.prompt, []).append(run)
    return [sorted(same, key=lambda run: run.tok_per_s)[(len(same) - 1) // 2] for same in by_prompt.values()]


def figures(runs: Sequence[Run], *, weight_bytes: int, peak_gbps: float | None) -> dict[str, Any]:
    """The figures of measured runs, for a report.

    Rates are all tokens, passes and bytes over all time after the first rounds, of every prompt's median run, so that
    a slow prompt weighs as much as it lasts; percentiles are over the tokens of all runs. `bound` is the speed of a
    plain pinned memcpy, `peak_gbps` (GB/s; None without a GPU), and the share of it that was reached. `bytes_per_pass`
    are what `streamed` says to come to the device: `weight_bytes` and the known keys and values.
    """
    times_s = [seconds for run in runs for seconds in run.token_times_s()]
    streamed = streamed_bytes(runs, weight_bytes)
    bytes_per_pass = weight_bytes + (streamed["kv"] or 0)
    counted = typical(runs)
    decoded, seconds = sum(run.decoded for run in counted), sum(run.decode_s for run in counted)
    link_gbps = sum(run.link_bytes(weight_bytes) for run in counted) / seconds / GB
    bound = None
    if peak_gbps is not None and bytes_per_pass:
        bound = {
            "link_gbps": peak_gbps, "s_per_pass": bytes_per_pass / (peak_gbps * GB), "share": link_gbps / peak_gbps,
        }  # fmt: skip
    return {
        "tok_per_s": decoded / seconds, "s_per_token": percentiles(times_s),
        "token_s": {name: percentile(times_s, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "time_to_first_token_s": percentile([run.first_token_s for run in runs], 0.5),
        "tokens_per_pass": decoded / sum(run.passes for run in counted), "bytes_per_pass": bytes_per_pass,
        "streamed": streamed, "link_gbps": link_gbps, "bound": bound,
        "runs": [
            {name: getattr(run, name) for name in ("prompt", "tok_per_s", "first_token_s", "passes", "decoded")}
            for run in runs
        ],
    }  # fmt: skip


def answers(runs: Sequence[Run]) -> list[list[int]]:
    """The tokens of every prompt, in the order of the prompts: those of its first run."""
    first = {run.prompt: run for run in reversed(runs)}
    return [list(first[prompt].tokens) for prompt in sorted(first)]


def num_differing(runs: Sequence[Run]) -> int:
    """Runs unlike the first of their prompt. All have the same weights, prompt and seed, so there should be none."""
    expected = answers(runs)
    return sum(list(run.tokens) != expected[run.prompt] for run in runs)


@dataclass(frozen=True)
class Asked:
    """One generation: `new_tokens` after `tokens`, those of prompt number `prompt` or, of a warm-up, the first of them.

    `measured` says whether it counts.
    """

    prompt: int
    tokens: tuple[int, ...]
    new_tokens: int
    measured: bool


def asked_generations(options: PeerOptions) -> list[Asked]:
    """All of them in order: warm-ups, which take turns with the prompts, then every prompt, as often as is asked."""
    length, count = options.warmup_prompt_tokens, options.warmup_new_tokens
    warm = [run % len(options.prompts) for run in range(options.warmup)]
    return [
        *(Asked(p, options.prompts[p][:length], options.new_tokens if count is None else count, False) for p in warm),
        *(
            Asked(prompt, tokens, options.new_tokens, True)
            for _ in range(options.repeats)
            for prompt, tokens in enumerate(options.prompts)
        ),
    ]


def num_differing_of(options: PeerOptions, runs: Sequence[Run]) -> int:
    """Generations unlike the first that was asked the same, of all generations, warm-ups first.

    Shortened warm-ups answer another prompt, or end sooner: they are compared with each other only.
    """
    if not options.shortens_warmups:
        return num_differing(runs)
    return num_differing(runs[: options.warmup]) + num_differing(runs[options.warmup :])
