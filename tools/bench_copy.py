"""What a low-bit copy of a model is worth as its draft, and what is left of its weights given the copy.

    python tools/bench_copy.py agreement --source demo --text BOOK --out FILE
    python tools/bench_copy.py rest --source demo --text BOOK --bits 4 --groups 64 --symmetric no --methods weighted

The target is a small Llama with relative noise on its matrices, which so lie on no grid; a copy is of its layers alone,
embedding, head and norms are shared. At places of a novel and of Python's standard library that nothing is fitted on,
drawn by the seed, the target answers, greedy and at T = 0.6 with the runtime's noise; a copy reads these answers and
says at each of their places what it would say. Chains of so many tokens are followed from one miss to the next. Beside
it stands the model without the noise, a draft of the target's size. `weighted` copies know the mean squares of the
activations in a short piece of both texts. `own` keys and values are what the copy has made of the whole text; in
blocks of 16 they are the target's below the block, as they are where a pass has just committed them.

`rest` is another run: bits a weight of bf16, FP8 and Q8_0 given a copy, of the target's matrices, of random ones, and
of some that a code may stumble over; what the runtime keeps beside fitted or weighted copies of 4 bits in groups of 64
is decoded again, and all bits compared. Says figures as they come, then prints
one JSON line; exit code 1 when a bit was not what it had been.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import harness
import texts
import torch
from copies.agreement import Answers, Keys, agreement_of
from copies.quantise import METHODS, ROUNDED, WEIGHTED, CopyFormat, Variant, copy_of, quantise
from copies.rest import fp8_rest, q8_rest, random_matrices, rest_of
from harness import check_out, emit, provenance, say, write_unfinished
from torch import Tensor
from training.target import Target, held_out
from transformers import AttentionInterface
from widen_model import open_source
from widening.checkpoint import noisy_copy

from offload_runtime.errors import OptionError
from offload_runtime.stream.device import resolve_device

AGREEMENT, REST, OWN = "agreement", "rest", "own"
TEXTS, RANDOM = "texts", "random"
_ATTENTION = "copy_and_target"
_CALIBRATION_TOKENS = 1024  # of each text, trained on
_CALIBRATION_ROW = 256


def variants_of(options: argparse.Namespace) -> list[Variant]:
    """All that options ask for."""
    asked = product(options.bits, options.groups, options.symmetric, options.methods)
    return [Variant(CopyFormat(bits, group, symmetric), method) for bits, group, symmetric, method in asked]


class Bench:
    """The target, its answers, and the matrices of its layers.

    Attributes:
        matrices: By name, [M, K] bf16.
        agreement: Rows of figures.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        source = open_source(str(options.source))
        noisy = noisy_copy(source, options.noise)
        length = options.prompt_tokens + options.new_tokens
        self._target = Target.load(noisy, torch.device("cpu"), max(length, _CALIBRATION_ROW))
        self._model, self._keys = self._target.model, Keys()
        AttentionInterface.register(_ATTENTION, self._keys.attend)
        self._model.set_attn_implementation(_ATTENTION)
        self._source = source
        layers = dict(self._model.model.layers.named_parameters())
        self._parameters = {name: one for name, one in layers.items() if one.dim() == 2}
        self.matrices = {name: one.to(torch.bfloat16) for name, one in self._parameters.items()}
        columns = {one.shape[1] for one in self.matrices.values()}
        if wrong := [group for group in options.groups if any(count % group for count in columns)]:
            raise OptionError(
                f"matrices have {sorted(columns)} columns, no multiples of {wrong}: leave these --groups out"
            )
        self._answers = list[Answers]()
        self.agreement = list[dict[str, Any]]()

    def answer(self) -> None:
        """Let the target answer. Raises `OptionError`: there are fewer places, or they are short."""
        say("the target answers")
        vocab_size = self._model.lm_head.weight.shape[0]
        self._answers = [Answers.of(one, vocab_size) for one in held_out(self._options, self._target)]
        self._keys.first = self._options.prompt_tokens - 1

    @torch.no_grad()
    def importance(self) -> dict[str, Tensor]:
        """Mean squares [K] of what each matrix is multiplied with, in pieces of both texts that are not measured, or
        in as many tokens that are drawn from the vocabulary."""
        found, draw = dict[str, Tensor](), torch.Generator().manual_seed(self._options.seed)

        def hook(name: str) -> Any:
            def look(_: object, inputs: tuple[Tensor, ...]) -> None:
                squares = inputs[0].flatten(0, -2).square().sum(0)
                found[name] = found.get(name, 0) + squares

            return look

        hooks = [
            module.register_forward_pre_hook(hook(f"{name}.weight"))
            for name, module in self._model.model.layers.named_modules()
            if f"{name}.weight" in self.matrices
        ]
        encode_text, vocab_size = self._source.tokenizer().encode, self._model.lm_head.weight.shape[0]
        for text in texts.texts_of(self._options).values():
            blocks = texts.trained_on(text, self._options.seed)
            at = int(torch.randint(max(1, len(blocks) - 2), (), generator=draw))
            tokens = torch.tensor(encode_text("".join(blocks[at : at + 2]))[:_CALIBRATION_TOKENS])
            if self._options.calibration == RANDOM:
                tokens = torch.randint(vocab_size, tokens.shape, generator=draw)
            for row in tokens.split(_CALIBRATION_ROW):
                self._model.model(row[None], use_cache=False)
        for one in hooks:
            one.remove()
        return {name: squares / squares.mean() for name, squares in found.items()}

    @torch.no_grad()
    def measure_agreement(self, model: Any, draft: dict[str, Any], name: str, blocks: Iterable[int | None]) -> None:
        """Ask a model at all places of the answers."""
        for answers in self._answers:
            self._keys.of_target = answers.of_target
            for block in blocks:
                self._keys.block = block
                row = draft | {"keys": block or OWN} | agreement_of(answers.agreeing(model), answers.held)
                self.agreement.append(row)
                chains = " ".join(f"{count:.2f}" for count in row["tokens_per_pass"].values() if count)
                where = f"{row['text']:5} T {row['temperature']} keys {row['keys']}"
                say(f"{name}: {where}: {row['agreement']:.3f}, chains {chains}")
            self._keys.block = None

    def _use(self, matrices: dict[str, Tensor]) -> None:
        for name, one in self._parameters.items():
            one.data = matrices[name].float()

    def measure_others(self) -> None:
        """The target against itself, which nothing may come between, and the model without the noise."""
        self._keys.records = True
        self.measure_agreement(self._model, {"draft": "target"}, "the target itself", [None])
        self._keys.records = False
        clean = Target.load(self._source, torch.device("cpu"), 1).model
        self.measure_agreement(clean, {"draft": "without noise"}, "without noise", [None])

    def measure(self, variant: Variant, importance: dict[str, Tensor]) -> None:
        """Agreement of one copy."""
        shift = self._options.shift
        decoded = {
            name: copy_of(variant, one, importance.get(name), shift).decoded().flatten(1).roll(-shift, 1)
            for name, one in self.matrices.items()
        }
        errors = sum(float((decoded[name].float() - one.float()).square().sum()) for name, one in self.matrices.items())
        squares = sum(float(one.float().square().sum()) for one in self.matrices.values())
        draft = {"draft": "copy", "copy": variant.as_dict(), "relative_error": math.sqrt(errors / squares)}
        blocks: list[int | None] = [None]
        if variant.method == self._options.methods[-1] and not variant.form.symmetric:
            blocks += self._options.blocks
        self._use(decoded)
        self.measure_agreement(self._model, draft, str(variant), blocks)
        self._use(self.matrices)

    def measure_rest(self, importance: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
        """What is left of the target's middle layer, and of made-up weights."""
        middle = f"{len(self._model.model.layers) // 2}."
        kept = {name: one for name, one in self.matrices.items() if name.startswith(middle)}
        shift = self._options.shift
        for variant in variants_of(self._options):
            copies = (copy_of(variant, one, importance.get(name), shift) for name, one in kept.items())
            pairs = [(one.roll(shift, 1), copy) for one, copy in zip(kept.values(), copies, strict=True)]
            known = [importance[name].roll(shift) if variant.method == WEIGHTED else None for name in kept]
            yield rest_of("target", variant, pairs, known)
        yield from measure_random(self._options)
        yield from measure_stored(self._options, list(kept.values()))


def measure_random(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is left of made-up weights given rounded and fitted copies without and with a centre."""
    for (name, matrix), variant in product(
        random_matrices(options.seed, options.random_rows).items(), variants_of(options)
    ):
        if variant.method != WEIGHTED:
            yield rest_of(name, variant, [(matrix, quantise(matrix, variant.form, variant.method))])


def measure_stored(options: argparse.Namespace, target: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
    """What is left of FP8 and Q8_0 given rounded copies: of the target's matrices, Gaussian and heavy-tailed ones."""
    made = random_matrices(options.seed, options.random_rows)
    sets = {"target": target, "Gaussian": [made["Gaussian"]], "Student t": [made["Student t"]]}
    for (name, matrices), variant in product(sets.items(), variants_of(options)):
        if variant.method == ROUNDED:
            yield fp8_rest(name, variant, matrices)
            yield q8_rest(name, variant, matrices)


def yes_or_no(text: str) -> tuple[bool, ...]:
    """`no,yes` of the command line."""
    words = text.split(",")
    if not set(words) <= {"no", "yes"}:
        raise OptionError(f"--symmetric {text!r}: write no, yes or no,yes")
    return tuple(word == "yes" for word in words)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = harness.make_parser(__doc__)
    harness.add_report_options(parser)
    parser.add_argument("what", choices=(AGREEMENT, REST), help="what is measured")
    parser.add_argument("--source", type=Path, required=True, help="a plain Llama: directory, .gguf file, or demo")
    texts.add_options(parser)
    texts.add_place_options(parser, places=8, prompt_tokens=64, new_tokens=144)
    parser.add_argument("--noise", type=float, default=0.05, help="relative, on the target's matrices")
    parser.add_argument("--bits", type=harness.integers, default=(3, 4, 5), help="of a code, 2 to 8")
    parser.add_argument("--groups", type=harness.integers, default=(32, 64), help="columns that share a scale")
    parser.add_argument("--symmetric", type=yes_or_no, default=(False, True), help="no,yes: groups without a centre")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="how scales are chosen")
    parser.add_argument(
        "--calibration", choices=(TEXTS, RANDOM), default=TEXTS, help="what weighted copies know activations of"
    )
    parser.add_argument(
        "--shift",
        type=int,
        default=0,
        help="columns, so that groups are not those of a source whose grid they would find",
    )
    parser.add_argument("--blocks", type=harness.integers, default=(16,), help="of keys that are the copy's own")
    parser.add_argument("--random-rows", type=int, default=512, help="of 4096 columns, 16 or more")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes.

    Raises:
        OptionError: A number makes no sense; StorageError: `--out` cannot be written.
    """
    harness.require_all_positive(options, "groups", "blocks", "places", "prompt_tokens", "new_tokens")
    if options.random_rows < 16:
        raise OptionError(
            f"--random-rows {options.random_rows} is less than 16, which have all kinds of weights: raise it"
        )
    if not set(options.bits) <= set(range(2, 9)):
        raise OptionError(f"--bits {options.bits} are not all 2 to 8: leave the others out")
    check_out(options.out)


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print; returns the exit code."""
    options = parse(argv)
    check(options)
    bench = Bench(options)
    report: dict[str, Any] = {"benchmark": "copy", "settings": harness.settings_of(options)}
    report |= provenance(resolve_device("cpu"), commit=options.commit)
    importance = bench.importance() if WEIGHTED in options.methods else {}
    if options.what == REST:
        report |= {"rest": list(bench.measure_rest(importance))}
        emit(report, options.out)
        return 0 if all(row["runtime"]["round_trip"] for row in report["rest"] if "runtime" in row) else 1
    report |= {"agreement": bench.agreement}
    bench.answer()
    bench.measure_others()
    for variant in variants_of(options):
        bench.measure(variant, importance)
        write_unfinished(report, options.out)
    emit(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
