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
of some that a code may stumble over; all bits are decoded again and compared. Says figures as they come, then prints
one JSON line; exit code 1 when a bit was not what it had been.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import harness
import texts
import torch
from copies.quantise import METHODS, ROUNDED, WEIGHTED, CopyFormat, LowBitCopy, quantise
from copies.rest import decode, encode, entropy, patterns_of, sized_by_copy
from harness import check_out, emit, provenance, write_unfinished
from offload_runtime_kernels.gumbel_argmax import gumbel_noise, inverse_temperature
from torch import Tensor
from torch.nn import functional
from train_head import HeldOut, Target, held_out
from transformers import AttentionInterface
from widen_model import open_source
from widening.checkpoint import noisy_copy

from offload_runtime.errors import OptionError
from offload_runtime.stream import resolve_device

CHAINS = (8, 16, 48)
AGREEMENT, REST, OWN = "agreement", "rest", "own"
TEXTS, RANDOM = "texts", "random"
_ATTENTION = "copy_and_target"
_CALIBRATION_TOKENS = 1024  # of each text, trained on
_CALIBRATION_ROW = 256
_COLUMNS, _BROKEN_ROWS = 4096, 32  # of random matrices
_STD, _DEGREES = 0.02, 4
_E4M3_LARGEST, _FP8_BLOCK, _Q8_GROUP = 448.0, 128, 32
# A floor is a group's scale divided by this; no floor by None.
_FLOORS = (None, 16)
_FLOORS_OF_SIZED = (4, 16, 256)  # what is sized by the copy needs few exceptions


class Keys:
    """Attention over own keys and values in blocks of an answer, and over the target's in front of them.

    Attributes:
        block: Tokens of a block; None makes all keys own.
        first: The row that chooses an answer's first token, where the first block begins.
        of_target: By layer, what the target made: [B, H_kv, T, D] keys and values.
        records: Whether what comes by is the target's, and kept.
    """

    def __init__(self) -> None:
        self.block: int | None = None
        self.first = 0
        self.of_target: dict[int, tuple[Tensor, Tensor]] = {}
        self.records = False

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, **others: Any
    ) -> tuple[Tensor, None]:
        """transformers' attention: rotated queries [B, H, T, D], keys and values [B, H_kv, T, D] -> [B, T, H, D]."""
        if self.records:
            self.of_target[module.layer_idx] = key, value
        scale = others["scaling"]
        if self.block is None:
            # One row more than there are keys would be a cached step, which the target takes when it answers.
            causal = query.shape[2] == key.shape[2]
            found = functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=scale, enable_gqa=True
            )
            return found.transpose(1, 2), None
        rows = torch.arange(query.shape[2])
        blocks = torch.div(rows - self.first, self.block, rounding_mode="floor")
        earlier, same = blocks[None] < blocks[:, None], blocks[None] == blocks[:, None]
        visible = torch.cat((earlier, same & (rows[None] <= rows[:, None])), dim=1)
        keys, values = (
            torch.cat(pair, dim=2) for pair in zip(self.of_target[module.layer_idx], (key, value), strict=True)
        )
        found = functional.scaled_dot_product_attention(query, keys, values, visible, scale=scale, enable_gqa=True)
        return found.transpose(1, 2), None


@dataclass(frozen=True)
class Answers:
    """Answers of the target, with the noise that chose them.

    Attributes:
        noise: [places * T, V] fp32; None at T = 0.
        of_target: What `Keys` calls so, of these answers.
    """

    held: HeldOut
    noise: Tensor | None
    of_target: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, held: HeldOut, vocab_size: int) -> Answers:
        """Make the noise once: every copy is asked with it."""
        if held.temperature == 0:
            return cls(held, None)
        places, count = held.tokens.shape[0], held.tokens.shape[1] - held.prompt_tokens
        positions = torch.arange(held.prompt_tokens - 1, held.tokens.shape[1] - 1).repeat(places)
        slots = torch.arange(places).repeat_interleave(count)
        return cls(held, gumbel_noise(positions, slots, held.keys, vocab_size=vocab_size))

    @property
    def said(self) -> Tensor:
        """The answers' tokens, [places, T]."""
        return self.held.tokens[:, self.held.prompt_tokens :]

    def agreeing(self, model: Any) -> Tensor:
        """Where a model says the same behind the same tokens: [places, T] bool."""
        states = model.model(self.held.tokens[:, :-1], use_cache=False).last_hidden_state
        states = states[:, self.held.prompt_tokens - 1 :].flatten(0, 1)
        tokens = list[Tensor]()
        for at in range(0, len(states), 256):
            logits = model.lm_head(states[at : at + 256])
            if self.noise is not None:
                logits.mul_(inverse_temperature(self.held.temperature)).add_(self.noise[at : at + 256])
            tokens.append(logits.argmax(-1))
        return torch.cat(tokens).view_as(self.said) == self.said


def tokens_per_pass(agreeing: Tensor, chain: int) -> float | None:
    """The mean of passes whose chains begin where the one before has ended, by where answers [places, T] agree.

    Passes that begin so late that their chain would leave the answer are not counted, so that a pass's length decides
    nothing about its being counted. None where answers are shorter than a chain.
    """
    tokens = passes = 0
    for row in agreeing.tolist():
        at = 0
        while at + chain < len(row):
            accepted = next((depth for depth in range(chain) if not row[at + depth]), chain)
            tokens, passes, at = tokens + accepted + 1, passes + 1, at + accepted + 1
    return tokens / passes if passes else None


def agreement_of(agreeing: Tensor, held: HeldOut) -> dict[str, Any]:
    """Figures of one kind of text and temperature."""
    by_place = agreeing.double().mean(1)
    error = float(by_place.std() / math.sqrt(len(by_place))) if len(by_place) > 1 else None
    return {
        "text": held.text, "temperature": held.temperature, "agreement": float(by_place.mean()),
        "standard_error": error, "positions": agreeing.numel(),
        "tokens_per_pass": {str(chain): tokens_per_pass(agreeing, chain) for chain in CHAINS},
    }  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A copy: its format and how its scales are chosen."""

    form: CopyFormat
    method: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        form = self.form
        return {
            "bits": form.bits, "group": form.group, "symmetric": form.symmetric, "method": self.method,
            "bits_per_weight": form.bits_per_weight,
        }  # fmt: skip

    def __str__(self) -> str:
        form = self.form
        return f"{form.bits} bits, groups of {form.group}, {'symmetric, ' * form.symmetric}{self.method}"


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
            yield rest_of("target", variant, pairs)
        yield from measure_random(self._options)
        yield from measure_stored(self._options, list(kept.values()))


def copy_of(variant: Variant, weight: Tensor, importance: Tensor | None, shift: int) -> LowBitCopy:
    """A copy of a matrix whose columns have been shifted, which makes use of `importance` if it is to."""
    known = importance.roll(shift) if importance is not None and variant.method == WEIGHTED else None
    return quantise(weight.roll(shift, 1), variant.form, variant.method, known)


def floors_of(scales: Tensor, divisor: int | None, pattern_bits: int, exponent_step: int) -> Tensor:
    """Magnitudes of scales, given as patterns, divided by a power of two; 0 for no floor."""
    if divisor is None:
        return torch.zeros_like(scales)
    below = exponent_step * (divisor.bit_length() - 1)
    return ((scales & ((1 << (pattern_bits - 1)) - 1)) - below).clamp_min(0)


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Tensors of groups as one row."""
    return torch.cat([part.flatten() for part in parts])


def coded(
    patterns: Tensor, base: Tensor, scales: Tensor | None, widths: Sequence[int], pattern_bits: int, step: int
) -> Iterator[dict[str, Any]]:
    """Sizes of what is left in codes of fixed lengths with each of the floors, and whether all came back."""
    for width, divisor in product(widths, (None,) if scales is None else _FLOORS):
        floors = None if scales is None else floors_of(scales, divisor, pattern_bits, step)
        rest = encode(patterns, base, floors, width, pattern_bits)
        yield {
            "code_bits": width, "floor": divisor and 1 / divisor,
            "extended": rest.extended, "whole": rest.whole, "bits_per_weight": rest.bits_per_weight,
            "round_trip": bool(torch.equal(decode(rest, base, floors), patterns)),
        }  # fmt: skip


def smallest_sized(
    patterns: Tensor, low: Tensor, high: Tensor, scales: Tensor, pattern_bits: int, step: int
) -> dict[str, Any]:
    """The best floor of codes that are as long as the copy says."""
    sized = (
        (*sized_by_copy(patterns, low, high, floors_of(scales, divisor, pattern_bits, step), pattern_bits), divisor)
        for divisor in _FLOORS_OF_SIZED
    )
    bits, exceptions, divisor = min(sized)
    return {"bits_per_weight": bits, "exceptions": exceptions, "floor": 1 / divisor}


def by_level(residuals: Tensor, copies: Iterable[LowBitCopy], bits: int) -> float:
    """Entropy of what is left if each level of the copy has a code of its own."""
    levels = joined(one.codes for one in copies).int()
    return entropy(residuals.int() * (1 << bits) + levels) - entropy(levels)


def rest_of(weights: str, variant: Variant, pairs: Sequence[tuple[Tensor, LowBitCopy]]) -> dict[str, Any]:
    """What is left of bf16 matrices given their copies."""
    form = variant.form
    patterns = joined(patterns_of(weight) for weight, _ in pairs)
    decoded = [copy.decoded() for _, copy in pairs]
    base = joined(map(patterns_of, decoded))
    scales = joined(patterns_of(copy.scales).expand(copy.codes.shape) for _, copy in pairs)
    half = [copy.scales.float() / 2 for _, copy in pairs]
    low, high = (
        joined(patterns_of((c.float() + side * s).to(torch.bfloat16)) for c, s in zip(decoded, half, strict=True))
        for side in (-1, 1)
    )
    # The plain difference on the line of all patterns, without a gap between the zeros.
    line = [torch.where(one >= 0x8000, 0x7FFF - one, one) for one in (patterns, base)]
    residuals = line[0] - line[1]
    sized = smallest_sized(patterns, low, high, scales, 16, 128)
    in_byte = float(((residuals >= -127) & (residuals <= 127)).double().mean())
    codes = list(coded(patterns, base, scales, (7, 8), 16, 128))
    row = {
        "weights": weights, "stored": "bf16", "copy": variant.as_dict(), "stored_entropy_bits": entropy(patterns),
        "entropy_bits": entropy(residuals),
        "entropy_bits_by_level": by_level(residuals, (copy for _, copy in pairs), form.bits),
        # One of 256 says that there is an exception, which has 16 bits, beside 16 of its position or without them.
        "in_signed_byte": in_byte, "byte_and_exceptions_bits": 8 + 16 * (1 - in_byte),
        "byte_and_positions_bits": 8 + 32 * (1 - in_byte),
        "codes": codes,
        "sized_by_copy": sized,
    }  # fmt: skip
    best = min(codes, key=lambda one: one["bits_per_weight"])
    say(
        f"{weights}: {variant}: {row['entropy_bits']:.2f} bits, {row['entropy_bits_by_level']:.2f} by level, a byte "
        f"holds {in_byte:.3f}; code of {best['code_bits']} bits, floor {best['floor']}: {best['bits_per_weight']:.2f}, "
        f"sized by the copy {sized['bits_per_weight']:.2f}"
    )
    return row


def fp8_rest(weights: str, variant: Variant, matrices: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What is left of E4M3 numbers with a scale for each block of 128 x 128."""
    patterns, bases, lows, highs, steps = (list[Tensor]() for _ in range(5))
    copies = list[LowBitCopy]()
    for matrix in matrices:
        height, width = (min(size, _FP8_BLOCK) for size in matrix.shape)
        rows, columns = matrix.shape[0] // height * height, matrix.shape[1] // width * width
        blocks = matrix[:rows, :columns].float().unflatten(0, (-1, height)).unflatten(2, (-1, width))
        scale = blocks.abs().amax((1, 3), keepdim=True) / _E4M3_LARGEST
        stored = (blocks / scale).to(torch.float8_e4m3fn)
        copy = quantise((stored.float() * scale).view(rows, columns), variant.form, ROUNDED)
        in_blocks = scale.expand_as(blocks).reshape(copy.codes.shape)
        half = copy.scales.float() / 2
        for places, side in ((bases, 0), (lows, -1), (highs, 1)):
            relative = ((copy.decoded().float() + side * half) / in_blocks).clamp(-_E4M3_LARGEST, _E4M3_LARGEST)
            places.append(patterns_of(relative.to(torch.float8_e4m3fn)).reshape(-1))
        patterns.append(patterns_of(stored).reshape(-1))
        steps.append(patterns_of((copy.scales.float() / in_blocks).to(torch.float8_e4m3fn)).reshape(-1))
        copies.append(copy)
    stored_bits, base, scales = joined(patterns), joined(bases), joined(steps)
    line = [torch.where(one >= 0x80, 0x7F - one, one) for one in (stored_bits, base)]
    return [
        _stored_row(weights, "FP8", variant, stored_bits, line[0] - line[1], copies)
        | {
            "codes": list(coded(stored_bits, base, scales, (4, 5), 8, 8)),
            "sized_by_copy": smallest_sized(stored_bits, joined(lows), joined(highs), scales, 8, 8),
        }
    ]


def q8_rest(weights: str, variant: Variant, matrices: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What is left of Q8_0: signed bytes with an fp16 scale for each 32 columns."""
    numbers, bases, copies = list[Tensor](), list[Tensor](), list[LowBitCopy]()
    for matrix in matrices:
        groups = matrix.float().unflatten(1, (-1, _Q8_GROUP))
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
        stored = (groups / scale).round_().nan_to_num_(0.0)
        copy = quantise((stored * scale).flatten(1), variant.form, ROUNDED)
        of_copy = copy.decoded().float().view_as(groups)
        numbers.append(stored.int().flatten())
        bases.append((of_copy / scale).round_().nan_to_num_(0.0).clamp_(-127, 127).int().flatten())
        copies.append(copy)
    number, base = joined(numbers), joined(bases)
    return [
        _stored_row(weights, "Q8_0", variant, number, number - base, copies)
        | {"codes": list(coded(number, base, None, (4, 5), 8, 1))}
    ]


def _stored_row(
    weights: str, stored: str, variant: Variant, patterns: Tensor, residuals: Tensor, copies: Sequence[LowBitCopy]
) -> dict[str, Any]:
    """What rows of quantised weights have in common."""
    row = {
        "weights": weights, "stored": stored, "copy": variant.as_dict(), "stored_entropy_bits": entropy(patterns),
        "entropy_bits": entropy(residuals), "entropy_bits_by_level": by_level(residuals, copies, variant.form.bits),
    }  # fmt: skip
    say(
        f"{weights} in {stored}: {variant}: {row['entropy_bits']:.2f} bits, {row['entropy_bits_by_level']:.2f} by level"
    )
    return row


def random_matrices(seed: int, rows: int) -> dict[str, Tensor]:
    """Made-up weights [M, K] bf16 by what they are."""
    draw = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(rows, _COLUMNS, generator=draw) * _STD
    # Student's t: a Gaussian over the root of a chi-square, which is twice a gamma of half its degrees.
    squares = torch.randn(_DEGREES, rows, _COLUMNS, generator=draw).square().sum(0)
    broken = gaussian[:_BROKEN_ROWS].clone()
    broken[0], broken[1], broken[2] = torch.inf, -torch.inf, torch.nan
    broken[3, ::7], broken[4, 5], broken[5, ::2], broken[6], broken[7] = torch.nan, torch.inf, 3e38, 0.0, -0.0
    broken[8, ::2], broken[9] = -0.0, broken[9] * 1e38
    return {
        name: one.to(torch.bfloat16)
        for name, one in {
            "Gaussian": gaussian,
            "Student t": gaussian / (squares / _DEGREES).sqrt(),
            "constant": torch.full((_BROKEN_ROWS, _COLUMNS), _STD),
            "subnormal": gaussian[:_BROKEN_ROWS] * 1e-38,
            "not finite": broken,
        }.items()
    }


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
            yield from fp8_rest(name, variant, matrices)
            yield from q8_rest(name, variant, matrices)


def say(line: str) -> None:
    """For people who wait."""
    print(line, file=sys.stderr, flush=True)


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
    parser.add_argument("--places", type=int, default=8, help="of each text, held out")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each place")
    parser.add_argument("--new-tokens", type=int, default=144, help="of each answer")
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
        return 0 if all(code["round_trip"] for row in report["rest"] for code in row["codes"]) else 1
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
