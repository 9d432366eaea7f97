"""Models of random numbers as files store them: blocks of GGUF's formats, squares of FP8 numbers, or heavy-tailed bf16
that a code has to work on. They cost what a real file's cost, on the link, on the card and to decode, and are made as
fast as memory is copied.

Of each kind one stretch of blocks is drawn, and every matrix is that stretch over and over from a place of its own on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock

import torch
from offload_runtime_kernels.gguf_blocks import FORMATS
from offload_runtime_kernels.scaled_rows import ScaledFormat, decode_scaled, pack_numbers
from widening.made import BY_TOPIC, UntrainedModel, fill_by_topic, fill_vector, named_generator
from widening.shapes import WideShape

from offload_runtime.errors import OptionError
from offload_runtime.stream.arena import Staging
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import format_of, scaled_bytes, scaled_rows
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.neighbours import MIXES, MXFP4, stored_kinds
from offload_runtime.weights.quantised import quantisation_of

BF16, FP8 = "bf16", "fp8"
_MIXES = (*MIXES, MXFP4)
STORED = (*(mix.lower() for mix in _MIXES), FP8, BF16)
_PLAIN_KIND = "BF16"
# As Qwen's have it: squares of 128 x 128 numbers share a scale, what makes decays is in bf16.
_FP8_SETTINGS = {
    "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["in_proj_a", "in_proj_b"]
}  # fmt: skip
_STD = 0.02
_STRETCH_BYTES = 64 << 20  # more than the caches of a GPU hold
_SAMPLE_BLOCKS = 256
_FP8_STD = 100.0  # E4M3 ends at 448
_DEGREES_OF_FREEDOM = 3


def mix_named(stored: str) -> str | None:
    """A mix of formats by the name that the command line has for it; None of what is not quantised.

    Raises:
        OptionError: There is none of that name.
    """
    if stored not in STORED:
        raise OptionError(f"--stored {stored!r} is not known: use one of {', '.join(STORED)}")
    return None if stored in (FP8, BF16) else next(mix for mix in _MIXES if mix.lower() == stored)


def random_blocks(kind: str, count: int, generator: torch.Generator) -> torch.Tensor:
    """Blocks of a GGUF format that decode to numbers of mean 0 and std 0.02: uint8 [count, bytes of a block].

    Every integer is as likely as any other. The numbers of 16 bits are none but finite ones, within a half of what the
    mean and the std ask for, and so are powers of two.
    """
    form = FORMATS[kind]
    places = form.file_halves or (0,)
    blocks = torch.randint(0, 256, (count, form.nbytes), dtype=torch.uint8, generator=generator)

    def put(at: int, numbers: torch.Tensor) -> None:
        if form.e2m1:
            mantissas, powers = numbers.frexp()  # exact, as a logarithm is not
            blocks[: len(numbers), at] = (127 + powers - (mantissas < math.sqrt(0.5)).int()).byte()
        else:
            blocks[: len(numbers), at : at + 2] = numbers.half().view(-1, 1).view(torch.uint8)

    def decoded(d: float, m: float) -> torch.Tensor:
        sample = blocks[:_SAMPLE_BLOCKS]
        for at, number in zip(places, (d, m), strict=False):
            put(at, torch.full((len(sample),), number))
        out = torch.empty(len(sample), form.weights)
        format_of(kind).decode_file_rows(sample, out)
        return out

    unit = decoded(1.0, 0.0)
    ratio = 0.0 if form.m is None else -float(unit.mean() / decoded(0.0, 1.0).mean())
    scale = _STD / float(decoded(1.0, ratio).std())
    spread = torch.rand(count, generator=generator) + 0.5
    if form.m is None and float(unit.mean()) > float(unit.std()) / 4:  # ternary numbers, stored as -1 to 2
        spread[::2] *= -1
    for at, number in zip(places, (scale, scale * ratio), strict=False):
        put(at, number * spread)
    return blocks


def heavy_tailed(count: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 [count] of Student's t with three degrees of freedom and std 0.02, as uint8 [count, 2]."""
    normal = torch.randn(1 + _DEGREES_OF_FREEDOM, count, generator=generator)
    t = normal[0] / normal[1:].square().mean(0).sqrt()
    scale = _STD / math.sqrt(_DEGREES_OF_FREEDOM / (_DEGREES_OF_FREEDOM - 2))
    return (t * scale).bfloat16().view(torch.uint8).view(count, 2)


def fp8_numbers(count: int, generator: torch.Generator) -> torch.Tensor:
    """E4M3 numbers that scales of 1 / `_FP8_STD` bring to std 0.02, as uint8 [count, 1]."""
    most = torch.finfo(torch.float8_e4m3fn).max  # beyond it torch makes NaN
    normal = torch.randn(count, generator=generator).mul_(_FP8_STD).clamp_(-most, most)
    return normal.to(torch.float8_e4m3fn).view(torch.uint8).view(count, 1)


class _Stretches:
    """What matrices are copied from, by kind, each drawn when it is first needed. Threads may share it.

    Args:
        seed: Of all of them.
        most_bytes: Of one of them.
    """

    def __init__(self, seed: int, most_bytes: int) -> None:
        self._seed, self._most_bytes = seed, most_bytes
        self._drawn: dict[str, torch.Tensor] = {}
        self._lock = Lock()

    def of(self, kind: str) -> torch.Tensor:
        """uint8 [blocks, bytes of a block]."""
        with self._lock:
            if kind not in self._drawn:
                generator = named_generator(torch.device("cpu"), self._seed, "stored", kind)
                weights = FORMATS[kind].weights if kind in FORMATS else 1
                count = max(1, self._most_bytes // (format_of(kind).file_bytes(weights) if kind != FP8 else 1))
                drawers = {_PLAIN_KIND: heavy_tailed, FP8: fp8_numbers}
                self._drawn[kind] = drawers.get(kind, partial(random_blocks, kind))(count, generator)
            return self._drawn[kind]

    def copy(self, kind: str, name: str, out: torch.Tensor) -> None:
        """Fill uint8 [rows, bytes of a file's row], contiguous, with the matrix of that name."""
        blocks, flat, done = self.of(kind), out.view(-1), 0
        start = int(torch.randint(len(blocks), (), generator=named_generator(torch.device("cpu"), self._seed, name)))
        source = blocks.view(-1)
        at = start * blocks.shape[1]
        while done < flat.numel():
            count = min(flat.numel() - done, source.numel() - at)
            flat[done : done + count] = source[at : at + count]
            done, at = done + count, 0


def stored_model(
    shape: WideShape, stored: str, seed: int = 0, *, vocab_size: int, context_tokens: int, reference: str,
    words: CheckpointSource | None = None, stretch_bytes: int = _STRETCH_BYTES, by_topic: bool = False,
) -> CheckpointSource:  # fmt: skip
    """Random weights as a file of a mix of formats stores them.

    Args:
        shape: What is made.
        stored: One of `STORED`.
        seed: The same bytes, whether they are kept as they are or decoded.
        vocab_size, context_tokens, reference, words: As of `UntrainedModel`.
        stretch_bytes: How much is drawn of each kind.
        by_topic: Whether tokens have topics, whose rows choose experts alike; embedding and head are in bf16 then.

    Raises:
        OptionError: Nothing is stored so, or rows of the shape are not whole blocks.
    """
    mix, stretches = mix_named(stored), _Stretches(seed, stretch_bytes)
    kinds = dict[str, str | ScaledFormat]()

    def fill(name: str, out: torch.Tensor, _: Staging | None = None) -> None:
        if by_topic and name in BY_TOPIC:
            fill_by_topic(name, out, seed)
            return
        if out.dim() == 1 and name not in kinds:
            fill_vector(name, out, named_generator(torch.device("cpu"), seed, name))
            return
        kind, shape = kinds.get(name, _PLAIN_KIND), shapes[name]
        if isinstance(kind, ScaledFormat):
            _fill_scaled(kind, shape, partial(stretches.copy, FP8, name), out)
            return
        if kind == _PLAIN_KIND and out.dtype == torch.bfloat16:
            stretches.copy(kind, name, out.view(torch.uint8))
            return
        out, columns = out.flatten(1), math.prod(shape[1:])
        matrix = torch.empty(len(out), format_of(kind).file_bytes(columns), dtype=torch.uint8)
        stretches.copy(kind, name, matrix)
        if out.dtype == torch.uint8:
            format_of(kind).store_rows(matrix.to(out.device), columns, out)
        else:
            format_of(kind).decode_file_rows(matrix.to(out.device), out)

    made = UntrainedModel(
        shape, fill, vocab_size=vocab_size, context_tokens=context_tokens, reference=reference, words=words
    )
    shapes = {name: to.shape for name, to in checkpoint_tensors(made.config()).items()}
    if mix is not None:
        kinds |= _checked(stored_kinds(made.config(), mix), made)
    elif stored == FP8:
        quantisation = quantisation_of({"quantization_config": _FP8_SETTINGS}, reference)
        assert quantisation is not None
        kinds |= quantisation.forms(made.config(), torch.float32)
    for name in BY_TOPIC if by_topic else ():
        kinds.pop(name, None)
    return made.as_source(kinds=kinds)


def _fill_scaled(
    form: ScaledFormat, shape: Sequence[int], copy: Callable[[torch.Tensor], None], out: torch.Tensor
) -> None:
    """Fill what is stored of a matrix [M, K], or decoded to a float dtype, with numbers that `copy` brings."""
    rows, columns = shape
    numbers = torch.empty(rows, columns, dtype=torch.uint8)
    copy(numbers)
    stored = torch.zeros(scaled_bytes(form, rows, columns), dtype=torch.uint8)
    parts = scaled_rows(stored, form, rows, columns)
    pack_numbers(numbers, form, parts.numbers)
    parts.scales.fill_(_STD / _FP8_STD)
    if out.dtype == torch.uint8:
        out.copy_(stored)
    else:
        decode_scaled(scaled_rows(stored.to(out.device), form, rows, columns), form, 0, out)


def _checked(kinds: Mapping[str, str], made: CheckpointSource) -> Mapping[str, str]:
    for name, to in checkpoint_tensors(made.config()).items():
        if name in kinds and to.shape[1] % FORMATS[kinds[name]].weights:
            raise OptionError(
                f"rows of {to.shape[1]} weights are not whole blocks of {kinds[name]}: take another --shape or --stored"
            )
    return kinds
