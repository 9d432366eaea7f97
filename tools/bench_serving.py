"""A load that is held: how fast requests at once are, beside the same ones one at a time, and whether memory grows.

    python tools/bench_serving.py --target wide-13b --draft none --text emma.txt --emulate rtx4090 --out serving.json
    python tools/bench_serving.py --target wide-13b --text emma.txt --emulate rtx4090 --requests 8 --minutes 8
    python tools/bench_serving.py --target wide-7b --draft none --text emma.txt --kv host --second-question 60000
    python tools/bench_serving.py --shape gpt-oss-120b --layers 18 --stored mxfp4 --weights stored --emulate rtx4090 \\
        --requests 8 --minutes 8 --prompt-tokens 16,256,2048 --disconnects 0.2 --out serving-experts.json

In process: the scheduler that `offload-runtime serve` serves with, without HTTP. Each number of `--requests` is a
runtime loaded for so many, and as many clients, which ask, wait for the whole answer and ask again for `--minutes`.
Where 1 is among them, the others are set beside one at a time. Prompts are pieces of `--text` from anywhere, of
`--prompt-tokens`, or random tokens without one, and the same in every load. `--disconnects` is the share of requests
whose client leaves in the middle. Answers that differ from those one at a time are counted, and of some that are drawn
those that differ from plain decoding, once the load is over. Memory is that of the process and of the cards, and what
is page-locked as the last answer has it, every second. With `--second-question` a prompt of so many tokens is answered,
and then a question about it. By itself `--context` is what the longest prompt and its answer take.

Prints a table, each claim with its verdict, then one JSON line; exit code 1 when a claim is missed.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import random
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import psutil
import torch
from common import SHAPES, add_model_options, resident_layers, source_from
from emulation import emulated
from harness import Check, check_out, finish, percentile, provenance
from ours_runtime import OurOptions, add_our_options, our_options
from timing import timed_answer

from offload_runtime.engine import ErrorEvent, Runtime, Scheduler, TokenEvent
from offload_runtime.engine.events import Event
from offload_runtime.errors import OptionError, UnavailableError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource

# Of 8 requests at once, how many times the throughput of one at a time is claimed: of plain decoding, and of a draft.
BARS_AT, BAR_PLAIN, BAR_DRAFT = 8, 5.0, 3.0
_MOST_PASSES = 2.0  # until the first token of a second question
# Memory is judged where a load lasts so long, by its last three quarters.
_LEAST_MINUTES_OF_MEMORY, _MOST_MB_PER_MINUTE = 2.0, 2.0
_SAMPLE_S = 1.0
_WARM_UP_TOKENS = 24
_QUESTION_TOKENS, _SHORT_TOKENS = 32, 512
_DECODED_PLAINLY = 8  # answers of each load


@dataclass(frozen=True)
class Requests:
    """What clients ask for, by number: the same whoever asks, and when.

    Attributes:
        tokens: Of the text that prompts are pieces of.
        prompt_tokens: Lengths of prompts; each is drawn.
        new_tokens: Of every answer.
        temperature: Of sampling, by the request's number as its seed.
        seed: Of what is drawn.
        disconnects: Share of the clients that leave after some tokens.
    """

    tokens: Sequence[int]
    prompt_tokens: Sequence[int]
    new_tokens: int
    temperature: float
    seed: int
    disconnects: float = 0.0

    def params(self, number: int) -> GenerationParams:
        """Options of a request."""
        sampling = SamplingParams(self.temperature, seed=number)
        return GenerationParams(self.new_tokens, ignore_eos=True, sampling=sampling)

    def request(self, number: int) -> tuple[list[int], int | None]:
        """A prompt, and after how many tokens its client leaves, if it does."""
        chance = random.Random(f"{self.seed} {number}")
        count = chance.choice(self.prompt_tokens)
        start = chance.randrange(len(self.tokens) - count + 1)
        leaves = chance.randrange(1, self.new_tokens) if chance.random() < self.disconnects else None
        return list(self.tokens[start : start + count]), leaves


@dataclass
class Answer:
    """What a client has seen of a request: seconds of one clock, and how it ended: `finished`, `left`, as the client
    did, `cut`, as the load was over, or the error."""

    number: int
    asked_s: float
    token_s: array[float] = field(default_factory=lambda: array("d"))  # so small that they are no trend of memory
    tokens: array[int] = field(default_factory=lambda: array("q"))
    ended: str = ""
    pinned_bytes: int = 0


def ask(scheduler: Scheduler, requests: Requests, number: int) -> Answer:
    """Be a client: ask and wait for the answer, or leave. Raises `UnavailableError`."""
    events, (prompt, leaves) = queue.SimpleQueue[Event](), requests.request(number)
    answer = Answer(number, time.perf_counter())
    ticket = scheduler.submit(prompt, requests.params(number), on_event=events.put)
    while isinstance(event := events.get(), TokenEvent):
        answer.token_s.append(time.perf_counter())
        answer.tokens.append(event.token)
        if len(answer.tokens) == leaves:
            ticket.cancel()
    if event.result is not None:
        answer.pinned_bytes = event.result.stats.pinned_bytes
    if isinstance(event, ErrorEvent):
        answer.ended = f"{type(event.error).__name__}: {event.error}"
    elif event.result.finish_reason != "interrupted":
        answer.ended = "finished"
    else:
        answer.ended = "left" if leaves is not None and len(answer.tokens) >= leaves else "cut"
    return answer


class MemoryWatch(AbstractContextManager["MemoryWatch"]):
    """Looks at this process's memory and the cards', as the driver sees them, until it is closed.

    Args:
        devices: The cards; of a CPU only the process is looked at.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cards = [device for device in devices if device.type == "cuda"]
        self.samples: list[dict[str, float]] = []
        self.pinned_bytes = 0  # written by those who know
        self._over, self._started_s = threading.Event(), time.perf_counter()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        process = psutil.Process()
        while True:
            sample = {"s": time.perf_counter() - self._started_s, "rss_bytes": process.memory_info().rss}
            sample["pinned_bytes"] = self.pinned_bytes
            if self._cards:
                pairs = [torch.cuda.mem_get_info(card) for card in self._cards]
                sample["device_bytes"] = sum(total_bytes - free_bytes for free_bytes, total_bytes in pairs)
            self.samples.append(sample)
            if self._over.wait(_SAMPLE_S):
                return

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def mb_per_minute(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """The linear trend of each figure over the last three quarters of the samples."""
    late = samples[len(samples) // 4 :]
    minutes = [sample["s"] / 60 for sample in late]
    if len(late) < 2:
        return {}
    return {
        name: statistics.linear_regression(minutes, [sample[name] / 1e6 for sample in late]).slope
        for name in samples[0]
        if name != "s"
    }


def hold(runtime: Runtime, requests: Requests, width: int, seconds: float) -> dict[str, Any]:
    """A row: `width` clients for so long. `answers` are those of all requests that were asked."""
    # Kernels are compiled and graphs captured before.
    prompts = [requests.request(-1 - number)[0] for number in range(width)]
    runtime.generate_batch(prompts, max_new_tokens=min(_WARM_UP_TOKENS, requests.new_tokens), ignore_eos=True)
    numbers = itertools.count()
    with MemoryWatch(runtime.devices) as memory, ThreadPoolExecutor(width) as pool, Scheduler(runtime) as scheduler:
        started_s = time.perf_counter()
        end_s = started_s + seconds

        def client() -> list[Answer]:
            found = list[Answer]()
            while time.perf_counter() < end_s:
                try:
                    found.append(ask(scheduler, requests, next(numbers)))
                    memory.pinned_bytes = found[-1].pinned_bytes or memory.pinned_bytes
                except UnavailableError:  # the load is over, or an answer has the error
                    break
            return found

        clients = [pool.submit(client) for _ in range(width)]
        wait(clients, timeout=seconds)
        passes = scheduler.counters.passes
        scheduler.close()
        answers = [answer for found in clients for answer in found.result()]
    return {"at_once": width, **figures(answers, started_s, seconds), "passes": passes, "answers": answers,
            "mb_per_minute": mb_per_minute(memory.samples), "memory": memory.samples}  # fmt: skip


def unlike_plain(runtime: Runtime, requests: Requests, answers: Sequence[Answer]) -> dict[str, int]:
    """How many of some answers are not what plain decoding says to the same requests, alone."""
    whole = [answer for answer in answers if answer.ended == "finished"]
    drawn, differing = random.Random(requests.seed).sample(whole, min(len(whole), _DECODED_PLAINLY)), 0
    for answer in drawn:
        prompt, _ = requests.request(answer.number)
        plain, _ = runtime.replay(prompt, requests.params(answer.number), drafter=None)
        differing += plain.tokens != list(answer.tokens)
    return {"decoded_plainly": len(drawn), "unlike_plain": differing}


def figures(answers: Sequence[Answer], started_s: float, seconds: float) -> dict[str, Any]:
    """Of a load that was held for so long. Tokens of one pass come together, so the time between two tokens is that of
    none or of a pass; `s_per_token` is the mean of an answer."""
    stamps_s = [stamp for answer in answers for stamp in answer.token_s if stamp <= started_s + seconds]
    long = [answer for answer in answers if len(answer.token_s) > 1]
    means_s = [(answer.token_s[-1] - answer.token_s[0]) / (len(answer.token_s) - 1) for answer in long]
    ends = [answer.ended for answer in answers]
    known = ("finished", "left", "cut")
    return {
        "seconds": seconds, "tokens": len(stamps_s), "tok_per_s": len(stamps_s) / seconds,
        "each_tok_per_s": 1 / statistics.median(means_s) if means_s else None,
        "first_token_s": shares([answer.token_s[0] - answer.asked_s for answer in answers if answer.token_s]),
        "between_tokens_s": shares([b - a for one in long for a, b in itertools.pairwise(one.token_s)]),
        "s_per_token": shares(means_s), **{name: ends.count(name) for name in known},
        "errors": [end for end in ends if end not in known],
    }  # fmt: skip


def shares(samples: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile; None of no samples."""
    return {"p50": percentile(samples, 0.5), "p99": percentile(samples, 0.99)} if samples else None


def add_comparisons(rows: Sequence[dict[str, Any]]) -> None:
    """Set each row beside the one of one at a time, if there is one: its speed, and the tokens of the same requests.
    Takes the answers out."""
    asked = [row.pop("answers") for row in rows]
    if rows[0]["at_once"] != 1:
        return
    alone = {answer.number: answer.tokens for answer in asked[0]}
    for row, own in zip(rows, asked, strict=True):
        answers = [answer for answer in own if answer.number in alone]
        both = [list(zip(answer.tokens, alone[answer.number], strict=False)) for answer in answers]
        row["times_one"] = row["tok_per_s"] / rows[0]["tok_per_s"] if rows[0]["tok_per_s"] else None
        row["compared"] = len(both)
        row["differing"] = sum(any(one != other for one, other in pairs) for pairs in both)


def second_question(runtime: Runtime, requests: Requests, count: int) -> dict[str, Any]:
    """Ask about a prompt of `count` tokens twice: seconds to either first token, and what a pass of decoding takes."""
    params, prompt = requests.params(0), list(requests.tokens[:count])
    question = list(requests.tokens[count : count + _QUESTION_TOKENS])
    with Scheduler(runtime) as scheduler:
        said = timed_answer(scheduler, prompt, params).result
        prompt += [*said.tokens, *question]
        first, second = said.stats, timed_answer(scheduler, prompt, params).result.stats
    assert second.measured_s_per_pass is not None
    return {
        "prompt_tokens": count, "question_tokens": second.prompt_tokens - second.kept_tokens,
        "first_token_s": [first.time_to_first_token_s, second.time_to_first_token_s],
        "s_per_pass": second.measured_s_per_pass,
        "passes_to_first_token": second.time_to_first_token_s / second.measured_s_per_pass,
    }  # fmt: skip


def load(options: argparse.Namespace, own: OurOptions, source: CheckpointSource, *, width: int) -> Runtime:
    """The target, for `width` requests at once."""
    return Runtime.load(
        source, draft=own.draft, dtype=options.dtype,
        resident_layers="auto" if (layers := resident_layers(options.resident_layers, source)) is None else layers,
        context=options.context, kv=own.kv, weights=own.weights, encode=own.encode, speculation=own.as_speculation(),
        max_batch=width, gamma=own.gamma, tree_nodes=own.tree_nodes, expert_pool=options.expert_pool,
        cpu_share=options.cpu_share if options.cpu_share in (None, "auto") else float(options.cpu_share),
        **emulated(
            own.emulate, device=own.devices or options.device, vram=None if options.vram == "all" else options.vram,
            dtype=options.dtype,
        ),
    )  # fmt: skip


def text_tokens(options: argparse.Namespace, runtime: Runtime, needed: int) -> list[int]:
    """The text that prompts are cut from, at least `needed` tokens of it. Raises `OptionError`."""
    if options.text is None:
        chance = random.Random(options.seed)
        return [chance.randrange(runtime.config.vocab_size) for _ in range(4 * needed)]
    lower = "--second-question" if options.second_question else "--prompt-tokens"
    return harness.read_tokens(options.text, "--text", runtime.tokenizer, needed, lower=lower)


def measure(options: argparse.Namespace, own: OurOptions) -> dict[str, Any]:
    """Everything, as one dictionary."""
    source = source_from(options, resolve_device(options.device), context_tokens=options.context)
    rows, report = list[dict[str, Any]](), dict[str, Any]()
    longest = options.second_question or max(options.prompt_tokens)
    for width in [1] if options.second_question else sorted({*options.requests}):
        with load(options, own, source, width=width) as runtime:
            placed = {"placement": runtime.placement, "emulated": own.emulate}
            origin = {"settings": harness.settings_of(options), **provenance(*runtime.devices, commit=options.commit)}
            requests = Requests(
                text_tokens(options, runtime, longest + _QUESTION_TOKENS), options.prompt_tokens, options.new_tokens,
                options.temperature, options.seed, options.disconnects,
            )  # fmt: skip
            if options.second_question:
                second_question(runtime, requests, min(longest, _SHORT_TOKENS))  # compiles kernels
                report |= {"second_question": second_question(runtime, requests, longest), **placed}
            else:
                rows.append({**hold(runtime, requests, width, 60 * options.minutes), **placed})
                there = [{name: value for name, value in row.items() if name != "answers"} for row in rows]
                harness.write_unfinished({"benchmark": "serving", "rows": there, **origin}, options.out)
                rows[-1] |= unlike_plain(runtime, requests, rows[-1]["answers"])
    if rows:
        add_comparisons(rows)
    return {"benchmark": "serving", **report, "rows": rows, **origin}


def checks(report: dict[str, Any], *, plain: bool) -> list[Check]:
    """What is promised of a server, as far as this run can judge it."""
    found = []
    if question := report.get("second_question"):
        passes = question["passes_to_first_token"]
        found.append(Check("passes until a second question's first token", passes, _MOST_PASSES, at_least=False))
    for row in report["rows"]:
        width = row["at_once"]
        if width == BARS_AT and row.get("times_one") is not None:
            bar = BAR_PLAIN if plain else BAR_DRAFT
            found.append(Check(f"times the tokens/s of one at a time, {width} at once", row["times_one"], bar, True))
        found.append(Check(f"requests that failed, {width} at once", len(row["errors"]), 0, at_least=False))
        if "differing" in row:
            found.append(Check(f"answers set beside those one at a time, {width} at once", row["compared"], 1, True))
            unlike = row["differing"]
            found.append(Check(f"answers unlike those one at a time, {width} at once", unlike, 0, at_least=False))
        found.append(Check(f"answers decoded plainly again, {width} at once", row["decoded_plainly"], 1, True))
        unlike = row["unlike_plain"]
        found.append(Check(f"answers unlike plain decoding, {width} at once", unlike, 0, at_least=False))
        if row["seconds"] >= 60 * _LEAST_MINUTES_OF_MEMORY:
            for name, slope in row["mb_per_minute"].items():
                claim = f"MB a minute of {name.removesuffix('_bytes')}, {width} at once"
                found.append(Check(claim, slope, _MOST_MB_PER_MINUTE, at_least=False))
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """The figures for people."""
    found = []
    if question := report.get("second_question"):
        first_s, second_s = question["first_token_s"]
        found.append(
            f"first token of {question['prompt_tokens']} tokens after {first_s:.2f} s, of "
            f"{question['question_tokens']} more after {second_s:.2f} s; a pass takes {question['s_per_pass']:.3f} s"
        )
    if report["rows"]:
        head = ("at once", "tokens/s", "x one", "each", "first p50", "p99 s", "between p50", "p99 s", "asked", "failed")
        found.append(" ".join(f"{name:>11}" for name in (*head, "MB/min", "of cards")))
    for row in report["rows"]:
        ends = sum(row[name] for name in ("finished", "left", "cut")) + len(row["errors"])
        times = [
            (row[name] or {}).get(share) for name in ("first_token_s", "between_tokens_s") for share in ("p50", "p99")
        ]
        growth = [row["mb_per_minute"].get(name) for name in ("rss_bytes", "device_bytes")]
        cells = [row["at_once"], row["tok_per_s"], row.get("times_one"), row["each_tok_per_s"], *times, ends,
                 len(row["errors"]), *growth]  # fmt: skip
        found.append(" ".join(f"{'-' if cell is None else f'{cell:.4g}':>11}" for cell in cells))
    return found


def make_parser() -> harness.Parser:
    """The options."""
    parser = harness.make_parser(__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--target", help="checkpoint: a directory, a .gguf file or a hub id")
    model.add_argument("--shape", choices=sorted(SHAPES), help="made in memory: random weights of this shape")
    add_model_options(parser)
    add_our_options(parser)
    parser.set_defaults(resident_layers="auto")
    parser.add_argument("--text", type=Path, help="what prompts are cut from (default: random tokens)")
    parser.add_argument("--requests", type=harness.integers, default=(1, 4, 8, 16), help="at once")
    parser.add_argument("--minutes", type=float, default=1.0, help="of each of these loads")
    parser.add_argument("--prompt-tokens", type=harness.integers, default=(64, 128, 256), help="lengths of prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--disconnects", type=float, default=0.0, help="share of clients that leave, such as 0.2")
    parser.add_argument("--expert-pool", help="memory of the card for the experts of a mixture")
    parser.add_argument("--cpu-share", help="of missing experts, 0 to 1, that the CPU computes, or auto")
    parser.add_argument("--second-question", type=int, help="about a prompt of so many tokens, and no load")
    return parser


def check(options: argparse.Namespace) -> OurOptions:
    """Refuse before anything is loaded what makes no sense, and settle `--context`. Raises `OptionError`, and
    `StorageError` where `--out` cannot be written."""
    check_out(options.out)
    harness.require_all_positive(options, "requests", "prompt_tokens")
    if not options.requests or not options.prompt_tokens or options.new_tokens < 2:
        raise OptionError("--requests and --prompt-tokens name a number or more, and --new-tokens is at least 2")
    if not (options.minutes > 0 and 0 <= options.disconnects <= 1):
        raise OptionError("--minutes is more than 0, and --disconnects a share from 0 to 1")
    SamplingParams(options.temperature)
    if options.second_question is not None:
        harness.require_all_positive(options, "second_question")
        needed = options.second_question + 2 * options.new_tokens + _QUESTION_TOKENS
    else:
        needed = max(options.prompt_tokens) + options.new_tokens
    options.context = options.context or needed
    if options.context < needed:
        raise OptionError(f"prompts and answers take {needed} tokens, --context is {options.context}: raise it")
    return our_options(options)


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Hold the loads and print; returns the exit code."""
    options = make_parser().parse_args(argv)
    own = check(options)
    report = measure(options, own)
    print(*lines(report), sep="\n")
    return finish(report, checks(report, plain=own.draft == "none"), options.out)


if __name__ == "__main__":
    sys.exit(main())
