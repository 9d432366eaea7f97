"""Whether hybrids have the same bits whatever happens around them, on weights of random numbers in a real shape.

    python tools/check_hybrids.py --shape qwen3.6-27b --layers 16 --out exact-27b.json
    python tools/check_hybrids.py --shape qwen3.5-0.8b --out exact-0.8b.json

Four things are counted, by tokens and by the bits of the logits behind each: turns of conversations, some of them taken
back or answered anew, that differ from the same text read afresh; answers that differ between alone and in batches of 2
to 8, with and without n-grams; prompts that differ once they are read in pieces; and tokens that differ between plain
decoding and a script's proposals, which are right 9 times of 10, as chains and trees. Prompts have 20 to 600 tokens.
Prints a table, then one JSON line; exit code 1 on any difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import harness
import torch
from harness import DTYPES, check_out, emit, provenance, write_unfinished
from widening.made import random_model
from widening.shapes import SHAPES, HybridShape, shape_named

from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.speculation import Proposer
from offload_runtime.stream import resolve_device
from offload_runtime.verify.equality import ScriptedProposer

_CONTEXT_TOKENS, _BATCH = 1536, 8
_PROMPT_TOKENS, _ANSWER_TOKENS = (20, 600), (8, 16)
_LATER_TURN_TOKENS = (5, 90)
_UNDONE, _ANSWERED_ANEW = 0.15, 0.15  # of turns
_PIECES = 5  # of a prompt, at most
_SCRIPT_TOKENS, _ACCURACY = 200, 0.9
# By name, the rows of a window: in a row, and in all.
_WINDOWS = {"chain of 64": (64, 0), "tree of 64": (64, 64), "tree of 512": (64, 512)}
# Of all seconds, what each part may take.
_SHARES = {"turns": 0.5, "answers": 0.1, "prompts": 0.12, "tokens": 0.28}


class Answer(NamedTuple):
    """Tokens of an answer, the logits [N, V] that they were chosen from, the tokens of the prompt that were not read
    again, and tokens a pass."""

    tokens: list[int]
    logits: torch.Tensor
    kept_tokens: int = 0
    tokens_per_pass: float = 1.0

    def is_of(self, other: Answer) -> bool:
        """Whether another answer is the same to the bit."""
        return self.tokens == other.tokens and torch.equal(self.logits, other.logits)


class Asked(NamedTuple):
    """A prompt, and how it is answered."""

    prompt: list[int]
    params: GenerationParams


@dataclass
class Part:
    """What was compared and what differed; `about` says more."""

    name: str
    compared: int
    differing: int
    seconds: float
    about: dict[str, float]

    def __str__(self) -> str:
        more = ", ".join(f"{name} {value:.2f}" for name, value in self.about.items())
        return f"{self.name:12} {self.differing} of {self.compared} differ, {self.seconds:.1f} s: {more}"


class Checker:
    """Asks a runtime the same in several ways.

    Args:
        runtime: Loaded for batches, and for windows of all sizes.
        options: Of the command line.
    """

    def __init__(self, runtime: Runtime, options: argparse.Namespace) -> None:
        self._runtime, self._options = runtime, options
        self._draw, self._vocab_size = random.Random(options.seed), runtime.config.vocab_size
        self._turns = list[tuple[Asked, Answer]]()  # with what is said afresh

    def _tokens(self, bounds: tuple[int, int]) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(self._draw.randint(*bounds))]

    def _params(self) -> GenerationParams:
        sampling = SamplingParams(self._draw.choice((0.0, 0.8)), noise_id=self._draw.randrange(1 << 30))
        return GenerationParams(self._draw.randint(*_ANSWER_TOKENS), ignore_eos=True, sampling=sampling)

    def _answer(self, asked: Asked, owner: object | None = None, proposer: Proposer | None = None) -> Answer:
        result, logits = self._runtime.replay(*asked, proposer=proposer, owner=owner)
        return Answer(result.tokens, logits, result.stats.kept_tokens, result.stats.tokens_per_pass)

    def _left(self, name: str, count: int) -> Iterator[int]:
        """So many numbers, but no more than the seconds of a part allow."""
        share_s = self._options.seconds * _SHARES[name]
        started_s = time.perf_counter()
        for number in range(count):
            if time.perf_counter() - started_s > share_s:
                return
            yield number

    def turns(self) -> Part:
        """Conversations, each of them one after the other, then all of their turns afresh."""
        started_s, differing, kept_tokens, prompt_tokens = time.perf_counter(), 0, 0, 0
        anew = undone = 0
        text, texts, owner, pending = list[int](), list[list[int]](), object(), list[tuple[Asked, Answer]]()

        def settle() -> int:
            found = 0
            for asked, answer in pending:
                fresh = self._answer(asked)
                self._turns.append((asked, fresh))
                found += not answer.is_of(fresh)
            pending.clear()
            return found

        for _ in self._left("turns", self._options.turns):
            asked = Asked([*text, *self._tokens(_LATER_TURN_TOKENS if text else _PROMPT_TOKENS)], self._params())
            if pending and self._draw.random() < _ANSWERED_ANEW:
                asked, anew = Asked(pending[-1][0].prompt, asked.params), anew + 1
                texts.pop()
            elif len(texts) > 1 and self._draw.random() < _UNDONE:
                for _ in range(self._draw.randint(1, min(2, len(texts) - 1))):
                    texts.pop()
                undone += 1
                asked = asked._replace(prompt=[*texts[-1], *self._tokens(_LATER_TURN_TOKENS)])
            answer = self._answer(asked, owner)
            pending.append((asked, answer))
            kept_tokens, prompt_tokens = kept_tokens + answer.kept_tokens, prompt_tokens + len(asked.prompt)
            text = [*asked.prompt, *answer.tokens]
            texts.append(text)
            if len(text) > _PROMPT_TOKENS[1]:
                differing += settle()
                text, texts, owner = [], [], object()
        differing += settle()
        about = {"share kept": kept_tokens / max(1, prompt_tokens), "taken back": undone, "answered anew": anew}
        return Part("turns", len(self._turns), differing, time.perf_counter() - started_s, about)

    def answers(self) -> Part:
        """Those of the turns' prompts, in batches."""
        started_s, compared, differing, batches = time.perf_counter(), 0, 0, 0
        waiting = self._draw.sample(self._turns, min(len(self._turns), self._options.answers))
        for number in self._left("answers", len(waiting)):
            size = 2 + number % (_BATCH - 1)
            some, waiting = waiting[:size], waiting[size:]
            if not some:
                break
            for (_, alone), answer in zip(some, self._together([one for one, _ in some], number % 2 == 1), strict=True):
                differing += not answer.is_of(alone)
            compared, batches = compared + len(some), batches + 1
        return Part("answers", compared, differing, time.perf_counter() - started_s, {"batches": batches})

    def _together(self, some: Sequence[Asked], speculate: bool) -> list[Answer]:
        requests = [self._runtime.request(*one, speculate=speculate) for one in some]
        rows: dict[int, list[torch.Tensor]] = {id(one): [] for one in requests}
        with self._runtime.serving() as engine:
            for request in requests:
                engine.add(request)
            while engine.has_requests:
                for output in engine.step(with_logits=True):
                    if output.error is not None:
                        raise output.error
                    if output.logits is not None:
                        rows[id(output.request)].append(output.logits.to("cpu", copy=True))
        return [Answer(one.tokens, torch.cat(rows[id(one)])) for one in requests]

    def prompts(self) -> Part:
        """Prompts as a whole and in pieces, between which a token is drawn and dropped."""
        started_s, compared, differing, pieces = time.perf_counter(), 0, 0, 0
        for _ in self._left("prompts", self._options.prompts):
            asked, owner = Asked(self._tokens(_PROMPT_TOKENS), replace(self._params(), max_new_tokens=4)), object()
            whole = self._answer(asked)
            ends = sorted(self._draw.sample(range(1, len(asked.prompt)), self._draw.randint(1, _PIECES - 1)))
            for end in ends:
                self._answer(Asked(asked.prompt[:end], replace(asked.params, max_new_tokens=1)), owner)
            differing += not self._answer(asked, owner).is_of(whole)
            compared, pieces = compared + 1, pieces + len(ends) + 1
        return Part("prompts", compared, differing, time.perf_counter() - started_s, {"pieces": pieces})

    def tokens(self) -> Part:
        """Long answers, decoded plainly some at a time, which windows make once more."""
        started_s, compared, differing = time.perf_counter(), 0, 0
        per_pass: dict[str, list[float]] = {name: [] for name in _WINDOWS}
        length = min(_SCRIPT_TOKENS, self._options.tokens)
        waiting = list[tuple[Asked, Answer]]()
        for number in self._left("tokens", count := -(-self._options.tokens // (len(_WINDOWS) * length))):
            if not waiting:
                params = [replace(self._params(), max_new_tokens=length) for _ in range(min(_BATCH, count - number))]
                some = [Asked(self._tokens(_PROMPT_TOKENS), one) for one in params]
                waiting = [*zip(some, self._together(some, speculate=False), strict=True)]
            asked, plain = waiting.pop()
            for name, (in_row, in_all) in _WINDOWS.items():
                script = [*asked.prompt, *plain.tokens]
                proposer = ScriptedProposer(script, self._vocab_size, accuracy=_ACCURACY, seed=number)
                window = replace(asked.params, gamma=in_row - 1, tree_nodes=max(0, in_all - 1))
                answer = self._answer(Asked(asked.prompt, window), proposer=proposer)
                per_pass[name].append(answer.tokens_per_pass)
                pairs = zip(plain.tokens, answer.tokens, plain.logits, answer.logits, strict=True)
                differing += sum(one != other or not torch.equal(row, its) for one, other, row, its in pairs)
                compared += length
        about = {f"a pass, {name}": sum(found) / max(1, len(found)) for name, found in per_pass.items()}
        return Part("tokens", compared, differing, time.perf_counter() - started_s, about)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises `OptionError`."""
    parser = harness.bench_parser(__doc__)
    hybrids = [name for name, shape in SHAPES.items() if isinstance(shape, HybridShape)]
    parser.add_argument("--shape", choices=hybrids, default=hybrids[-1], help="of the model")
    parser.add_argument("--layers", type=int, help="cut the shape to so many (default: all)")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=1000, help="at most as many as turns, whose prompts they are to")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=20000, help="of all windows together")
    parser.add_argument("--seconds", type=float, default=300.0, help="beyond which less is compared, without loading")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--vram", help="of the device's memory (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, texts and scripts")
    options = parser.parse_args(argv)
    harness.require_all_positive(options, "vocab_size", "turns", "answers", "prompts", "tokens")
    if options.answers > options.turns:
        raise OptionError(f"--answers {options.answers} are to the prompts of turns, of which there are "
                          f"{options.turns}: raise --turns")  # fmt: skip
    harness.check_machine(options.vram, None)
    check_out(options.out)
    return options


def load(options: argparse.Namespace) -> Runtime:
    """The runtime, with room for all windows."""
    device, nodes = resolve_device(options.device), max(in_all for _, in_all in _WINDOWS.values())
    model = random_model(
        shape_named(options.shape, options.layers), options.seed, vocab_size=options.vocab_size,
        context_tokens=_CONTEXT_TOKENS, reference=f"random {options.shape}", device=device,
    )  # fmt: skip
    return Runtime.load(
        model, draft="ngram", device=str(device), vram=options.vram, dtype=options.dtype, context=_CONTEXT_TOKENS,
        max_batch=_BATCH, max_gamma=max(in_row for in_row, _ in _WINDOWS.values()) - 1, tree_nodes=nodes - 1,
    )  # fmt: skip


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    options = parse(argv)
    started_s = time.perf_counter()
    parts = list[Part]()
    report: dict[str, Any] = {"benchmark": "hybrids", "settings": harness.settings_of(options)}
    with load(options) as runtime:
        report |= {"loaded_s": time.perf_counter() - started_s, "placement": runtime.placement}
        print(f"{runtime.placement}, after {report['loaded_s']:.1f} s", file=sys.stderr, flush=True)
        checker = Checker(runtime, options)
        for compare in (checker.turns, checker.answers, checker.prompts, checker.tokens):
            parts.append(compare())
            print(parts[-1], flush=True)
            write_unfinished(report | {"parts": [vars(one) for one in parts]}, options.out)
        report |= {"parts": [vars(one) for one in parts], **provenance(*runtime.devices, commit=options.commit)}
    emit(report, options.out)
    return 1 if any(one.differing for one in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
