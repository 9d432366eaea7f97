"""Whether answers have the same bits whatever happens around them, on random weights in a real shape.

    python tools/check_exactness.py --shape qwen3.6-27b --layers 16 --out exact-27b.json
    python tools/check_exactness.py --shape gpt-oss-120b --layers 6 --stored mxfp4 --pools 1,0,0.3 \\
        --cpu-shares 0,auto,1 --seconds 45 --out exact-120b.json

Tokens are compared, and the bits of the logits behind each: turns of conversations, some of them taken back or answered
anew, with the same text read afresh; answers in batches of 2 to 8, with and without n-grams, with those alone; prompts
read in pieces with whole ones; and a script's proposals, which are right 9 times of 10, as chains and trees, with plain
decoding. Of a mixture of experts all of that is done once for each of `--pools`, the share of the experts that the
device has room for (0: what a row chooses; 1: all), and each of `--cpu-shares` of those that are missing; what is asked
alone and in plain decoding is then also compared between them. Prints a table, then one JSON line; exit code 1 on any
difference.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import harness
import torch
from harness import DTYPES, check_out, emit, floats, integers, provenance, write_unfinished
from widening.shapes import SHAPES, MixtureShape, shape_named
from widening.stored import STORED, stored_model

from offload_runtime.config import card_names
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.speculation.step import Drafter
from offload_runtime.verify.equality import ScriptedDrafter
from offload_runtime.weights.checkpoint import CheckpointSource

_CONTEXT_TOKENS, _BATCH = 1536, 8
_ANSWER_TOKENS = (8, 16)
_LATER_TURN_TOKENS = (5, 90)
_UNDONE, _ANSWERED_ANEW = 0.15, 0.15  # of turns
_PIECES = 5  # of a prompt, at most
_SCRIPT_TOKENS, _ACCURACY = 200, 0.9
# By name, the rows of a window: in a row, and in all.
_WINDOWS = {"chain of 8": (8, 0), "chain of 64": (64, 0), "tree of 64": (64, 64), "tree of 512": (64, 512)}
# Of all seconds, by when each part has to end: what one leaves is the next one's.
_ENDS = {"turns": 0.45, "answers": 0.65, "prompts": 0.77, "tokens": 1.0}


class Asked(NamedTuple):
    """A prompt, and how it is answered."""

    prompt: list[int]
    params: GenerationParams

    @property
    def key(self) -> tuple[tuple[int, ...], GenerationParams]:
        """What two that are alike have in common."""
        return tuple(self.prompt), self.params


class Answer(NamedTuple):
    """Tokens of an answer, a digest of the logits behind each, the tokens of the prompt that were not read again, and
    tokens a pass."""

    tokens: list[int]
    logits: list[bytes]
    kept_tokens: int = 0
    tokens_per_pass: float = 1.0

    def differing(self, other: Answer) -> int:
        """How many tokens of another answer are others, or have other bits behind them."""
        pairs = zip(self.tokens, self.logits, other.tokens, other.logits, strict=True)
        return sum((one, bits) != (its, its_bits) for one, bits, its, its_bits in pairs)


def digests(logits: torch.Tensor) -> list[bytes]:
    """What rows [N, V] have in common only if their bits are the same."""
    return [hashlib.sha256(row.numpy()).digest() for row in logits.cpu().contiguous().view(torch.uint8)]


@dataclass
class Part:
    """What was compared and what differed; `about` says more."""

    name: str
    answers: int = 0
    tokens: int = 0
    differing: int = 0  # of the tokens
    seconds: float = 0.0
    about: dict[str, float] = field(default_factory=dict)

    def compare(self, one: Answer, other: Answer) -> None:
        """Count what differs between two that have to be the same."""
        self.answers, self.tokens = self.answers + 1, self.tokens + len(one.tokens)
        self.differing += one.differing(other)

    def __str__(self) -> str:
        more = ", ".join(f"{name} {value:.2f}" for name, value in self.about.items())
        found = f"{self.differing} of {self.tokens} tokens differ, {self.answers} answers, {self.seconds:.1f} s"
        return f"  {self.name:10} {found}{': ' if more else ''}{more}"


class Checker:
    """Asks a runtime the same in several ways.

    Args:
        runtime: Loaded for batches, and for windows of all sizes.
        options: Of the command line.
        known: What other runtimes have said alone and in plain decoding; what this one says is added.
    """

    def __init__(self, runtime: Runtime, options: argparse.Namespace, known: dict[Any, Answer]) -> None:
        self._runtime, self._options, self._known = runtime, options, known
        self._draw = random.Random(options.seed)
        self._turns = list[tuple[Asked, Answer]]()  # with what is said afresh
        self._between = Part("runtimes")
        self._started_s = 0.0

    def parts(self) -> Iterator[Part]:
        """Compare, part by part."""
        self._started_s = time.perf_counter()
        for compare in (self._compare_turns, self._compare_answers, self._compare_prompts, self._compare_tokens):
            part, started_s = Part(compare.__name__.removeprefix("_compare_")), time.perf_counter()
            # Every runtime is asked the same, however far the others came in the part before.
            self._draw.seed(f"{self._options.seed} {part.name}")
            compare(part)
            part.seconds = time.perf_counter() - started_s
            yield part
        if self._between.answers:
            yield self._between

    def _tokens(self, bounds: Sequence[int]) -> list[int]:
        return [self._draw.randrange(self._options.vocab_size) for _ in range(self._draw.randint(*bounds))]

    def _params(self) -> GenerationParams:
        sampling = SamplingParams(self._draw.choice((0.0, 0.8)), noise_id=self._draw.randrange(1 << 30))
        return GenerationParams(self._draw.randint(*_ANSWER_TOKENS), ignore_eos=True, sampling=sampling)

    def _answer(self, asked: Asked, owner: object | None = None, drafter: Drafter | None = None) -> Answer:
        result, logits = self._runtime.replay(*asked, drafter=drafter, owner=owner)
        return Answer(result.tokens, digests(logits), result.stats.kept_tokens, result.stats.tokens_per_pass)

    def _note(self, asked: Asked, answer: Answer) -> Answer:
        """Compare with what other runtimes have said."""
        if asked.key in self._known:
            self._between.compare(answer, self._known[asked.key])
        else:
            self._known[asked.key] = answer
        return answer

    def _left(self, name: str, count: int) -> Iterator[int]:
        """So many numbers, but none when a part has to end."""
        end_s = self._started_s + self._options.seconds * _ENDS[name]
        for number in range(count):
            if time.perf_counter() > end_s:
                return
            yield number

    def _compare_turns(self, part: Part) -> None:
        """Conversations, each of them one after the other, then all of their turns afresh."""
        kept_tokens = prompt_tokens = anew = undone = 0
        text, texts, owner, pending = list[int](), list[list[int]](), object(), list[tuple[Asked, Answer]]()

        def settle() -> None:
            for asked, answer in pending:
                fresh = self._note(asked, self._answer(asked))
                self._turns.append((asked, fresh))
                part.compare(answer, fresh)
            pending.clear()

        for _ in self._left(part.name, self._options.turns):
            asked = Asked(
                [*text, *self._tokens(_LATER_TURN_TOKENS if text else self._options.prompt_tokens)], self._params()
            )
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
            if len(text) > self._options.prompt_tokens[1]:
                settle()
                text, texts, owner = [], [], object()
        settle()
        part.about = {
            "share kept": kept_tokens / max(1, prompt_tokens), "taken back": undone, "answered anew": anew
        }  # fmt: skip

    def _compare_answers(self, part: Part) -> None:
        """Those of the turns' prompts, in batches."""
        waiting = self._draw.sample(self._turns, min(len(self._turns), self._options.answers))
        for number in self._left(part.name, len(waiting)):
            size = 2 + number % (_BATCH - 1)
            some, waiting = waiting[:size], waiting[size:]
            if not some:
                break
            for (_, alone), answer in zip(some, self._together([one for one, _ in some], number % 2 == 1), strict=True):
                part.compare(answer, alone)
            part.about = {"batches": number + 1}

    def _together(self, some: Sequence[Asked], speculate: bool) -> list[Answer]:
        requests = [self._runtime.request(*one, speculate=speculate) for one in some]
        rows: dict[int, list[bytes]] = {id(one): [] for one in requests}
        with self._runtime.serving() as engine:
            for request in requests:
                engine.add(request)
            while engine.has_requests:
                for output in engine.step(with_logits=True):
                    if output.error is not None:
                        raise output.error
                    if output.logits is not None:
                        rows[id(output.request)] += digests(output.logits)
        return [Answer(one.tokens, rows[id(one)]) for one in requests]

    def _compare_prompts(self, part: Part) -> None:
        """Prompts as a whole and in pieces, between which a token is drawn and dropped."""
        pieces = 0
        for _ in self._left(part.name, self._options.prompts):
            asked, owner = (
                Asked(self._tokens(self._options.prompt_tokens), replace(self._params(), max_new_tokens=4)),
                object(),
            )
            whole = self._note(asked, self._answer(asked))
            ends = sorted(self._draw.sample(range(1, len(asked.prompt)), self._draw.randint(1, _PIECES - 1)))
            for end in ends:
                self._answer(Asked(asked.prompt[:end], replace(asked.params, max_new_tokens=1)), owner)
            part.compare(self._answer(asked, owner), whole)
            pieces += len(ends) + 1
        part.about = {"pieces": pieces}

    def _compare_tokens(self, part: Part) -> None:
        """Long answers, decoded plainly some at a time, which windows make once more."""
        per_pass: dict[str, list[float]] = {name: [] for name in _WINDOWS}
        length = min(_SCRIPT_TOKENS, self._options.tokens)
        waiting = list[tuple[Asked, Answer]]()
        for number in self._left(part.name, count := -(-self._options.tokens // (len(_WINDOWS) * length))):
            if not waiting:
                params = [replace(self._params(), max_new_tokens=length) for _ in range(min(_BATCH, count - number))]
                some = [Asked(self._tokens(self._options.prompt_tokens), one) for one in params]
                waiting = [*zip(some, self._together(some, speculate=False), strict=True)]
            asked, plain = waiting.pop()
            self._note(asked, plain)
            for name, (in_row, in_all) in _WINDOWS.items():
                script = [*asked.prompt, *plain.tokens]
                drafter = ScriptedDrafter(script, self._options.vocab_size, accuracy=_ACCURACY, seed=number)
                window = replace(asked.params, gamma=in_row - 1, tree_nodes=max(0, in_all - 1))
                answer = self._answer(Asked(asked.prompt, window), drafter=drafter)
                per_pass[name].append(answer.tokens_per_pass)
                part.compare(answer, plain)
        part.about = {f"a pass, {name}": sum(found) / max(1, len(found)) for name, found in per_pass.items()}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises `OptionError`."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.6-27b", help="of the model")
    parser.add_argument("--layers", type=int, help="cut the shape to so many (default: all)")
    parser.add_argument("--stored", choices=STORED, default="bf16", help="how weights are stored")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--pools", type=floats, default=(1.0,), help="shares of the experts that there is room for")
    parser.add_argument("--cpu-shares", default="auto", help="of missing experts, comma-separated, of each pool")
    parser.add_argument("--prompt-tokens", type=integers, default=(20, 600), help="fewest and most of a prompt")
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=1000, help="at most as many as turns, whose prompts they are to")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=20000, help="of all windows together")
    parser.add_argument("--seconds", type=float, default=300.0,
                        help="of each pool and share, beyond which less is compared, without loading")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--vram", help="of the device's memory (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, texts and scripts")
    options = parser.parse_args(argv)
    if len(options.prompt_tokens) != 2 or not 2 <= options.prompt_tokens[0] <= options.prompt_tokens[1] <= 600:
        raise OptionError("--prompt-tokens are the fewest and the most, from 2 to 600, such as 20,600")
    harness.require_all_positive(options, "vocab_size", "turns", "answers", "prompts", "tokens")
    if options.answers > options.turns:
        raise OptionError(f"--answers {options.answers} are to the prompts of turns, of which there are "
                          f"{options.turns}: raise --turns")  # fmt: skip
    if not options.pools or not all(0 <= share <= 1 for share in options.pools):
        raise OptionError("--pools are shares from 0 to 1 of the experts, such as 1,0,0.25")
    if set(options.pools) != {1.0} and not isinstance(SHAPES[options.shape], MixtureShape):
        raise OptionError(f"{options.shape} has no experts: drop --pools, or take a mixture's --shape")
    harness.check_machine(options.vram, None)
    check_out(options.out)
    return options


def model_of(options: argparse.Namespace) -> CheckpointSource:
    """Random weights as they are stored."""
    return stored_model(
        shape_named(options.shape, options.layers), options.stored, options.seed, vocab_size=options.vocab_size,
        context_tokens=_CONTEXT_TOKENS, reference=f"random {options.shape}",
    )  # fmt: skip


def pool_bytes(model: CheckpointSource, dtype: torch.dtype, share: float, cards: int) -> int:
    """Of the pool of each card, with room for a share of the experts together, and for what a row chooses at least."""
    experts = model.layout(dtype).experts.values()
    count, chosen = sum(one.num_experts for one in experts), max(one.chosen for one in experts)
    return max(round(share * count / cards), chosen) * max(one.block.total_bytes for one in experts)


def load(options: argparse.Namespace, pool: float, cpu_share: str) -> Runtime:
    """The runtime, with room for all windows."""
    model, nodes = model_of(options), max(in_all for _, in_all in _WINDOWS.values())
    of_pool: dict[str, Any] = {}
    if pool < 1:
        of_pool = {"expert_pool": pool_bytes(model, DTYPES[options.dtype], pool, len(card_names(options.device)))}
        of_pool["cpu_share"] = cpu_share if cpu_share == "auto" else float(cpu_share)
    return Runtime.load(
        model, draft="ngram", device=options.device, vram=options.vram, dtype=options.dtype, context=_CONTEXT_TOKENS,
        max_batch=_BATCH, max_gamma=max(in_row for in_row, _ in _WINDOWS.values()) - 1, tree_nodes=nodes - 1,
        weights="stored" if model.kinds else "auto", **of_pool,
    )  # fmt: skip


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    options = parse(argv)
    report: dict[str, Any] = {"benchmark": "exactness", "settings": harness.settings_of(options), "runtimes": []}
    known, parts = dict[Any, Answer](), list[Part]()
    pools = dict.fromkeys(
        (pool, "" if pool == 1 else one) for pool, one in product(options.pools, options.cpu_shares.split(","))
    )
    for pool, cpu_share in pools:
        started_s = time.perf_counter()
        with load(options, pool, cpu_share) as runtime:
            loaded = {"pool": pool, "cpu_share": cpu_share, "loaded_s": time.perf_counter() - started_s}
            report["runtimes"].append(loaded | {"placement": runtime.placement, "parts": []})
            print(f"{runtime.placement}, after {loaded['loaded_s']:.1f} s", flush=True)
            report |= provenance(*runtime.devices, commit=options.commit)
            for part in Checker(runtime, options, known).parts():
                parts.append(part)
                print(part, flush=True)
                report["runtimes"][-1]["parts"].append(asdict(part))
                report |= {"tokens": sum(one.tokens for one in parts), "differing": sum(one.differing for one in parts)}
                write_unfinished(report, options.out)
    print(f"{report['differing']} of {report['tokens']} tokens differ")
    emit(report, options.out)
    return 1 if report["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
