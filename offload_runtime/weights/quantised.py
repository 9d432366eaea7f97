"""Quantised checkpoints of transformers: which matrices `quantization_config` means, what is stored of each, and how
that is brought to the one layout of `weights.encoding`, without loss.

    w = (q - z) * s, rounded to the dtype of the scales, then to that of the run

is what the formats' own libraries make of a stored matrix:

- compressed-tensors' `dequantize` converts to the scales' dtype, subtracts and multiplies there
  (`quantization/lifecycle/forward_helpers.py`); transformers then converts to the model's dtype.
- GPTQ: `scales[g_idx] * (qweight - (qzeros + 1)[g_idx])` in the scales' dtype, then that of the input (AutoGPTQ's
  `QuantLinear`, GPTQModel's `TorchLinear`). Files of `checkpoint_format` gptq_v2 have no 1 to add.
- AWQ: `(qweight - qzeros) * scales` in fp16 (AutoAWQ's `dequantize_gemm`).
- FP8 of DeepSeek and Qwen: in fp32, then the model's dtype (DeepSeek-V3's `weight_dequant`, transformers'
  `Fp8Dequantize`). Their scales are kept in fp32, whatever they are stored in.
- NVFP4: `q * (scale / weight_global_scale)` in fp32 (compressed-tensors' `nvfp4-pack-quantized`) or
  `q * (scale * weight_scale_2)` (ModelOpt's `NVFP4QTensor`), of scales in E4M3, each of 16 columns; then the model's
  dtype. What is in the parentheses is kept in fp32.
- MXFP4 of gpt-oss' experts: see `weights.mxfp4`.

Only weights are quantised here. Schemes that quantise activations too are run on their decoded weights, as transformers
does with `dequantize=True`: that is nearer to the model they were made of, and their logits are others.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from offload_runtime_kernels.scaled_rows import (
    BITS,
    LARGEST_SCALE,
    ScaledFormat,
    ScaledRows,
    decode_scaled,
    pack_numbers,
    rows_apart,
)

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import Fields, shown
from offload_runtime.models.config import ModelConfig
from offload_runtime.stream.arena import PIECE_BYTES, Staging, own_or
from offload_runtime.weights.encoding import aligned, scale_tensors, scaled_bytes
from offload_runtime.weights.header import StoredTensor, damaged
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.mxfp4 import EXPERTS, MXFP4, with_experts

# How elements are called in files, of which tensors may consist or parts of quantised ones.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
METHODS = ("compressed-tensors", "fp8", "gptq", "awq", "modelopt", "mxfp4")
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_EMBEDDING = "model.embed_tokens"
_SCALES = ("F16", "BF16", "F32")
# Which of eight neighbouring rows each number in a word of AWQ is of, from the lowest bits on, and where a row's is.
_AWQ_ORDER, _AWQ_PLACE = (0, 2, 4, 6, 1, 3, 5, 7), (0, 4, 1, 5, 2, 6, 3, 7)
_CACHED_BYTES = 1 << 18
_SQUARES = 64  # rows of squares that are transposed together, in the cache
_WORD_ROWS = 8  # whose numbers are in one word of AWQ


@dataclass(frozen=True)
class Scheme:
    """Says how a group of modules is stored.

    Attributes:
        layout: What a module's tensors are called and how they lie: one of `_NUMBERS`.
        number: One of the kernel's `BITS`.
        block: Rows and columns that share one scale; 0 for all.
        zero: What is subtracted, beside the stored zeros with `zeros`.
        ordered: Whether columns are told to be of groups in the order of activations; what is stored counts more.
        scale: What the scales are kept in; None for what they are stored in.
        scale_names: What they may be called.
    """

    layout: str
    number: str
    block: tuple[int, int]
    zero: int = 0
    zeros: bool = False
    ordered: bool = False
    scale: torch.dtype | None = None
    scale_names: tuple[str, ...] = ("weight_scale",)

    def form(self, shape: tuple[int, ...], scale: torch.dtype, ordered: bool) -> ScaledFormat:
        """Return the format of a matrix [M, K] whose scales are stored in a dtype."""
        rows, columns = (size or whole for size, whole in zip(self.block, shape, strict=True))
        return ScaledFormat(self.number, rows, columns, self.scale or scale, self.zero, self.zeros, ordered)


@dataclass(frozen=True)
class Quantisation:
    """Holds what a `quantization_config` says: schemes by what they are for (modules' names, `re:` and an expression
    for their beginning, or the class), which modules have none, and whether activations should be quantised too; or
    that experts are in MXFP4."""

    groups: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    ignored: tuple[str, ...] = ()
    activations: bool = False
    mxfp4: bool = False

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of the most exact words for a module; None if there are none."""
        fitting = [(words, scheme) for targets, scheme in self.groups for words in targets if _means(words, module)]
        exact = min(fitting, key=lambda pair: (pair[0] != module, pair[0][:3] != "re:"), default=(None, None))
        return exact[1]

    def forms(self, config: ModelConfig, scale: torch.dtype) -> dict[str, str | ScaledFormat]:
        """Return how matrices are stored as far as can be said without looking at them, by transformers' name."""
        found = dict[str, str | ScaledFormat]()
        for name, to in checkpoint_tensors(config).items():
            module = name.removesuffix(".weight")
            scheme = self.scheme(module) if len(to.shape) == 2 and module != _EMBEDDING else None
            if scheme is not None and not any(_means(words, module) for words in self.ignored):
                found[name] = scheme.form(to.shape, scale, scheme.ordered)
            elif self.mxfp4 and to.is_matrix and ".mlp.experts." in name:
                found[name] = MXFP4
        return found


def _means(words: str, module: str) -> bool:
    if words.startswith("re:"):
        return re.match(words[3:], module) is not None
    return words in (module, "Embedding" if module == _EMBEDDING else "Linear")


# --- the configuration


def _without_prefix(words: str) -> str:
    """Return words for modules as they are called here, without what comes before in models that read images, too."""
    return re.sub(r"language_model\\?\.(?![*+?{])", "", words)


def quantisation_of(settings: Mapping[str, Any], where: str) -> Quantisation | None:
    """Read the `quantization_config` of a `config.json`; None where there is none.

    Raises:
        CheckpointError: A method, format or number of bits that is not read, or a value that is no such thing.
    """
    stated = settings.get("quantization_config") or settings.get("quantization")  # the latter of MLX
    if not stated:
        return None
    fields = Fields(f"{where}'s quantization_config", stated if isinstance(stated, dict) else {})
    method = fields.values.get("quant_method", stated)
    if method not in METHODS:
        raise CheckpointError(
            f"{where} is quantised ({shown(method)}), which is not read: use a checkpoint of 16 bits or of one of "
            f"{', '.join(METHODS)}, or a GGUF file"
        )
    if method == "compressed-tensors":
        found = _compressed_tensors(fields)
    elif method == "mxfp4":
        found = Quantisation(mxfp4=True)
    else:
        inside = Fields(fields.where, fields.mapping("quantization") or fields.values)  # of a file of its own
        scheme = {"fp8": _fp8, "gptq": _gptq, "awq": _awq, "modelopt": _modelopt}[method](inside)
        names = [name for key in _IGNORED for name in inside.items(key, str)]
        parts = tuple(f"re:.*{re.escape(name)}".replace("\\*", ".*") for name in names)
        activations = method in ("fp8", "modelopt")
        found = Quantisation(((("Linear",), scheme),), (*parts, "lm_head"), activations)
    groups = tuple((tuple(map(_without_prefix, targets)), scheme) for targets, scheme in found.groups)
    found = replace(found, groups=groups, ignored=tuple(map(_without_prefix, found.ignored)))
    for words in (*found.ignored, *(words for targets, _ in found.groups for words in targets)):
        try:
            re.compile(words.removeprefix("re:") if words.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            what = f"{fields.where} has {shown(words)}, which is no expression ({shown(error)}): fix it"
            raise CheckpointError(what) from error
    return found


def _one_of(fields: Fields, name: str, values: tuple[Any, ...], default: Any = None) -> Any:
    """Return a value of a field, which must be one of these."""
    value = fields.values.get(name)
    value = default if value is None else value
    if type(value) is not type(values[0]) or value not in values:
        raise CheckpointError(
            f"{fields.where} has {name} {shown(value)}, and only {', '.join(map(str, values))} can be read: "
            "use another checkpoint, or a GGUF file"
        )
    return value


def _group_size(fields: Fields) -> int:
    """Return the columns of a group; 0 for all."""
    return max(0, fields.integer("group_size", 128, at_least=-1))


def _fp8(fields: Fields) -> Scheme:
    sizes = fields.items("weight_block_size", int, at_least=1, at_most=1 << 16) or [0, 0]
    if len(sizes) != 2:
        fields.refuse("weight_block_size", sizes, "two numbers")
    _one_of(fields, "fmt", ("e4m3",), "e4m3")
    names = ("weight_scale_inv", "weight_scale")
    return Scheme("plain", "FP8", (sizes[0], sizes[1]), scale=torch.float32, scale_names=names)


_NVFP4 = Scheme("nvfp4", "E2M1", (1, 16), scale=torch.float32)


def _modelopt(fields: Fields) -> Scheme:
    _one_of(fields, "quant_algo", ("NVFP4",))
    _one_of(fields, "group_size", (16,), 16)
    return replace(_NVFP4, layout="modelopt")


def _gptq(fields: Fields) -> Scheme:
    bits = _one_of(fields, "bits", (4, 8))
    version = _one_of(fields, "checkpoint_format", ("gptq", "gptq_v2"), fields.values.get("format") or "gptq")
    _one_of(fields, "is_marlin_format", (False,), False)
    if fields.mapping("dynamic"):
        raise CheckpointError(f"{fields.where} has modules of different bits (dynamic), which are not read")
    size, ordered = _group_size(fields), fields.flag("desc_act")
    return Scheme(
        "gptq", f"uint{bits}", (1, size), zero=int(version == "gptq"), zeros=True, ordered=ordered and size > 0,
        scale_names=("scales",),
    )  # fmt: skip


def _awq(fields: Fields) -> Scheme:
    _one_of(fields, "bits", (4,), 4)
    fields = Fields(fields.where, {**fields.values, "version": str(fields.values.get("version") or "gemm").lower()})
    _one_of(fields, "version", ("gemm",))
    return Scheme("awq", "uint4", (1, _group_size(fields)), zeros=True, scale_names=("scales",))


def _compressed_tensors(fields: Fields) -> Quantisation:
    if fields.mapping("sparsity_config").get("format", "dense") != "dense" or fields.mapping("transform_config"):
        raise CheckpointError(f"{fields.where} has sparse or transformed weights, which are not read: use another")
    groups, activations = list[tuple[tuple[str, ...], Scheme]](), "kv_cache_scheme" in fields
    stated = Fields(f"{fields.where}'s config_groups", fields.mapping("config_groups"))
    for name in stated.values:
        group = Fields(f"{fields.where}'s group {shown(name)}", stated.mapping(name))
        activations |= "input_activations" in group or "output_activations" in group
        if "weights" in group:
            kind = group.values.get("format") or fields.values.get("format")
            scheme = _compressed_scheme(Fields(group.where, {**group.mapping("weights"), "format": kind}))
            groups.append((tuple(group.items("targets", str)), scheme))
    return Quantisation(tuple(groups), tuple(fields.items("ignore", str)), activations)


def _compressed_scheme(weights: Fields) -> Scheme:
    """Return the scheme that the arguments for weights and the format mean."""
    forms = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized")
    form = _one_of(weights, "format", forms)
    if form == forms[-1]:
        for name, value in (("type", "float"), ("num_bits", 4), ("group_size", 16), ("symmetric", True)):
            _one_of(weights, name, (value,))
        return _NVFP4
    packed = form == "pack-quantized"
    kind = _one_of(weights, "type", ("int",) if packed else ("int", "float"), "int")
    bits = _one_of(weights, "num_bits", (4, 8) if kind == "int" else (8,), 8)
    symmetric = _one_of(weights, "symmetric", (True,) if kind == "float" else (True, False), True)
    size = weights.integer("group_size", 0, at_least=-1)
    guessed = "group" if size > 0 else "channel" if size < 0 else "tensor"
    zeros = not symmetric
    strategy = _one_of(
        weights, "strategy", ("channel", "group") + (() if packed and zeros else ("tensor", "block")), guessed
    )
    block = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size)}.get(strategy) or _block_structure(weights)
    if strategy == "group" and size <= 0:
        weights.refuse("group_size", size, "a size")
    ordered = weights.values.get("actorder") in ("group", "dynamic", True) and strategy == "group"
    if packed:
        half = 1 << (bits - 1)
        return Scheme("packed", f"uint{bits}", block, 0 if zeros else half, zeros, ordered)
    return Scheme("plain", "FP8" if kind == "float" else "int8", block, zeros=zeros, ordered=ordered)


def _block_structure(weights: Fields) -> tuple[int, int]:
    stated = weights.values.get("block_structure")
    found = re.fullmatch(r"\[?([1-9]\d{0,4})(?:x|, )([1-9]\d{0,4})\]?", str(stated))  # 128x128, or a list
    if found is None:
        weights.refuse("block_structure", stated, "two numbers")
    return int(found[1]), int(found[2])


# --- the tensors


@dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A matrix [M, K] of which several tensors are stored; its `dtype` is what its numbers are called."""

    form: ScaledFormat
    layout: str
    parts: Mapping[str, StoredTensor]

    def fill(self, out: torch.Tensor, staging: Staging | None = None) -> None:
        """Read it, some rows at a time, into uint8 [scaled_bytes], rows by themselves, uint8 [M, bytes of one], or
        decoded into `out` [M, K] of a float dtype.

        Raises:
            CheckpointError: A file ends too early, scales are not finite, or weights no numbers.
        """
        (height, columns), form, raw, apart = self.shape, self.form, out.dtype == torch.uint8, out.dim() == 2
        numbers_bytes = height * form.row_bytes(columns)
        kept = torch.zeros(scaled_bytes(form, height, columns) - aligned(numbers_bytes), dtype=torch.uint8)
        scales = scale_tensors(kept, form, height, columns)
        _read_scales(self.layout, self.parts, scales, BITS[form.number])
        read_rows = _row_reader(self.layout, self.parts["numbers"])
        if not bool((scales.scales.float().abs() < LARGEST_SCALE).all()):
            raise damaged(self.path, f"scales of {self.name} are infinite or no numbers, or beyond 2^100")
        if form.ordered:
            scales.groups.copy_(read_tensor(self.parts["groups"]))
        if raw and not apart:
            out[numbers_bytes : aligned(numbers_bytes)] = 0
            out[aligned(numbers_bytes) :].copy_(kept)
        rows = out if apart else out[:numbers_bytes].view(height, -1)
        # A piece begins with a row of scales, and of words; it has what is read, what is stored and what is made.
        together = math.lcm(form.rows if form.rows < height else 1, _WORD_ROWS)
        sizes = form.file_bytes(columns), form.row_bytes(columns), rows[0].nbytes
        step = max(1, (PIECE_BYTES - len(sizes) * aligned(1)) // (sum(sizes) * together)) * together
        with own_or(staging) as pieces, pieces.piece(sum(aligned(step * size) for size in sizes), out.device) as piece:
            for start, part in zip(range(0, height, step), rows.split(step), strict=True):
                numbers, stored, made = piece.cut(*(len(part) * size for size in sizes))
                numbers, stored = numbers.view(len(part), -1), stored.view(len(part), -1)
                read_rows(start, numbers)
                if form.number == "FP8" and _has_no_number(numbers):
                    raise damaged(self.path, f"weights of {self.name} are no numbers")
                to = part if out.is_cpu else made.view(part.dtype).view(part.shape)
                own = _behind(scales, start // form.rows, form)
                if raw and apart:
                    _put_apart(numbers, own, form, columns, to)
                else:
                    pack_numbers(numbers, form, to if raw else stored)
                if not raw:
                    decode_scaled(own._replace(numbers=stored), form, 0, to)
                if to is not part:
                    part.copy_(to)


def _behind(scales: ScaledRows, first: int, form: ScaledFormat) -> ScaledRows:
    """Return what lies from a row of scales on."""
    zeros = scales.zeros[first:] if form.zeros else scales.zeros
    return scales._replace(scales=scales.scales[first:], zeros=zeros)


def _put_apart(numbers: torch.Tensor, scales: ScaledRows, form: ScaledFormat, columns: int, out: torch.Tensor) -> None:
    """Write rows by themselves, uint8 [R, bytes of one]: numbers in the order of columns, and from the first on the
    scales of theirs."""
    to, own = rows_apart(out, form._replace(rows=1), columns), torch.arange(len(out)) // form.rows
    out[:, to.numbers.shape[1] :] = 0
    pack_numbers(numbers, form, to.numbers)
    to.scales.copy_(scales.scales[own])
    if form.zeros:
        to.zeros.copy_(scales.zeros[own])


def passing_bytes(form: ScaledFormat, shape: tuple[int, ...]) -> int:
    """Return host memory beside a piece that a matrix [M, K] passes through at the most: its scales, as a file has them
    and as they are kept, and all of its words where these may lie across the rows, as those of GPTQ and AWQ do."""
    height, columns = shape
    scales_bytes = scaled_bytes(form, height, columns) - aligned(height * form.row_bytes(columns))
    across = form.zeros and form.number.startswith("uint")
    return 2 * scales_bytes + (height * form.file_bytes(columns) if across else 0)


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return all of a tensor, as it is stored."""
    out = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    stored.read_into(out.view(-1).view(torch.uint8).numpy().data)
    return out


def _has_no_number(numbers: torch.Tensor) -> bool:
    """Return whether any of E4M3, uint8 [R, K], is none."""
    return any(int(some.bitwise_and(0x7F).amax()) == 0x7F for some in numbers.view(-1).split(_CACHED_BYTES))


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers without a sign of int32 [R, words], the lowest bits first: uint8 [R, N]."""
    stored = words.contiguous().view(torch.uint8)
    return stored if bits == 8 else torch.stack((stored & 15, stored >> 4), dim=-1).view(len(stored), -1)


def _read_scales(layout: str, parts: Mapping[str, StoredTensor], to: ScaledRows, bits: int) -> None:
    """Write the scales of a matrix and their zeros; of those of GPTQ and AWQ the transposed matrix is stored."""
    scales, across = read_tensor(parts["scales"]), layout in _TRANSPOSED
    if "of_all" in parts:
        of_all = read_tensor(parts["of_all"])
        scales = scales.float() / of_all if layout == "nvfp4" else scales.float() * of_all
    to.scales.copy_(scales.t() if across else scales.view(to.scales.shape))
    if "zeros" not in parts:
        return
    zeros = read_tensor(parts["zeros"])
    if layout == "plain":
        to.zeros.copy_(zeros.view(torch.uint8).view(to.zeros.shape))
        return
    numbers = _unpacked(zeros if across else zeros.t(), bits)
    if layout == "awq":
        numbers = numbers.view(len(numbers), -1, 8)[..., _AWQ_PLACE].view(numbers.shape)
    numbers = numbers[:, : len(to.zeros)].t()  # [rows, groups]
    to.zeros.copy_(numbers if bits == 8 else numbers[:, 0::2])
    if bits == 4:
        to.zeros[:, : numbers.shape[1] // 2] |= numbers[:, 1::2] << 4


def _row_reader(layout: str, stored: StoredTensor) -> Callable[[int, torch.Tensor], None]:
    """Return what reads rows of a matrix's numbers, from one on, as uint8 [R, file_bytes] in the order of columns."""
    if layout not in _TRANSPOSED:
        return lambda start, rows: stored.read_into(rows.view(-1).numpy().data, start * rows.shape[1])
    words = read_tensor(stored)

    def read(start: int, rows: torch.Tensor) -> None:
        """Words of GPTQ run down the columns: those of a row, one after the other, are its numbers."""
        end = start + len(rows)
        found = words[:, start:end] if layout == "gptq" else _gptq_words(words[:, start // 8 : end // 8])
        rows.view(torch.int32).copy_(found.t())

    return read


def _gptq_words(stored: torch.Tensor) -> torch.Tensor:
    """Words of AWQ run along the rows of the transposed matrix, each of eight numbers in an order of their
    own: squares of eight by eight numbers are transposed to GPTQ's words, by exchanging their quarters, and so on in
    these."""
    words = torch.empty(len(stored) // 8, stored.shape[1], 8, dtype=torch.int32)
    for square, out in zip(stored.view(len(words), 8, -1).split(_SQUARES), words.split(_SQUARES), strict=True):
        for half, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
            upper, lower = square.view(len(square), -1, 2, half, square.shape[2]).unbind(2)
            exchanged = (upper >> 4 * half).bitwise_xor_(lower).bitwise_and_(mask)
            lower ^= exchanged
            upper ^= exchanged.bitwise_left_shift_(4 * half)
        out[..., _AWQ_ORDER] = square.transpose(1, 2)
    return words.view(len(words), -1)


_TRANSPOSED = ("gptq", "awq")
_NUMBERS = {
    "plain": "weight", "packed": "weight_packed", "gptq": "qweight", "awq": "qweight", "nvfp4": "weight_packed",
    "modelopt": "weight",
}  # fmt: skip
_OF_ALL = {"nvfp4": "weight_global_scale", "modelopt": "weight_scale_2"}  # what scales a whole matrix beside its groups
_IN_WEIGHT = {"plain": ("F8_E4M3", "I8"), "modelopt": ("U8",)}  # what numbers are that go by the name of weights
_ZEROS = {"plain": "weight_zero_point", "packed": "weight_zero_point", "gptq": "qzeros", "awq": "qzeros"}
_GROUPS = {"plain": "weight_g_idx", "packed": "weight_g_idx", "gptq": "g_idx"}


def _shapes(scheme: Scheme, shape: tuple[int, ...]) -> dict[str, list[tuple[int, ...]]]:
    """Return which shapes each part may have."""
    (rows, columns), unit = shape, 32 // BITS[scheme.number]  # numbers in a word
    down, across = scheme.form(shape, torch.float32, False).scales(rows, columns)
    scales: list[tuple[int, ...]] = [(across, rows) if scheme.layout in _TRANSPOSED else (down, across)]
    if scheme.layout not in _TRANSPOSED:
        scales += [(down,)] * (across == 1) + [()] * (down * across == 1)
    if scheme.layout == "plain":
        return {"numbers": [shape], "scales": scales, "zeros": scales}
    if scheme.layout in _OF_ALL:
        return {"numbers": [(rows, columns // 2)], "scales": scales[:1], "of_all": [(1,), ()]}
    row_words, column_words = -(-rows // unit), -(-columns // unit)
    numbers, zeros = {
        "gptq": ((column_words, rows), (across, row_words)),
        "awq": ((columns, row_words), (across, row_words)),
        "packed": ((rows, column_words), (row_words, across)),
    }[scheme.layout]
    return {"numbers": [numbers], "scales": scales, "zeros": [zeros]}


def _is_ordered(stored: StoredTensor, form: ScaledFormat, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether the groups that columns say they are of are others than in their own order."""
    if (stored.dtype, stored.shape) != ("I32", shape[1:]):
        raise damaged(stored.path, f"{stored.name} is {stored.dtype} {list(stored.shape)}, expected I32 {[shape[1]]}")
    groups, count = read_tensor(stored), form.scales(*shape)[1]
    if bool((groups < 0).any()) and name == "weight_g_idx":
        return False  # what compressed-tensors means by -1
    if bool(((groups < 0) | (groups >= count)).any()):
        raise damaged(stored.path, f"{stored.name} names groups that {count} scales do not have")
    return not torch.equal(groups, torch.arange(shape[1], dtype=torch.int32) // form.columns)


def _quantised(module: str, shape: tuple[int, ...], scheme: Scheme, own: Mapping[str, StoredTensor]) -> QuantisedTensor:
    """Return a matrix out of its module's tensors, by what is behind its name; checks all that can be without reading
    them."""
    numbers = own[_NUMBERS[scheme.layout]]
    unit = 16 if scheme.layout in _OF_ALL else 32 // BITS[scheme.number] if scheme.layout != "plain" else 1
    if any(size % unit for size in (shape if scheme.layout in _TRANSPOSED else shape[1:])):
        raise CheckpointError(
            f"{numbers.path}: {module} has shape {list(shape)}, and only multiples of {unit} can be packed: use another"
        )
    names = {"numbers": (_NUMBERS[scheme.layout],), "scales": scheme.scale_names}
    names |= {"zeros": (_ZEROS.get(scheme.layout, ""),), "of_all": (_OF_ALL.get(scheme.layout, ""),)}
    dtypes = {"numbers": ("I32",), "scales": _SCALES, "zeros": ("I32",), "of_all": ("F32",)}
    if scheme.layout in _OF_ALL:
        dtypes |= {"numbers": ("U8",), "scales": ("F8_E4M3",)}
    if scheme.layout == "plain":
        dtypes |= {"numbers": ("F8_E4M3",) if scheme.number == "FP8" else ("I8",), "zeros": ("I8",)}
    parts = dict[str, StoredTensor]()
    for part, shapes in _shapes(scheme, shape).items():
        if part == "zeros" and not scheme.zeros:
            continue
        found = next((own[name] for name in names[part] if name in own), None)
        if found is None:
            raise CheckpointError(
                f"{numbers.path.parent} lacks {module}.{names[part][0]}: it is incomplete, download it again"
            )
        if found.dtype not in dtypes[part] or found.shape not in shapes:
            raise CheckpointError(
                f"{found.path}: {found.name} is {found.dtype} {list(found.shape)}, expected "
                f"{' or '.join(dtypes[part])} {list(shapes[0])}: the weights belong to another configuration, "
                "download them again"
            )
        parts[part] = found
    form, index = scheme.form(shape, DTYPES[parts["scales"].dtype], False), _GROUPS.get(scheme.layout, "")
    if index in own and _is_ordered(own[index], form, index, shape):
        parts["groups"], form = own[index], form._replace(ordered=True)
    return QuantisedTensor(
        numbers.path, f"{module}.weight", form.number, shape, numbers.offset_bytes, numbers.nbytes, form,
        scheme.layout, parts,
    )  # fmt: skip


def _refuse_unsaid(where: str, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse quantised matrices of a checkpoint whose configuration says nothing of them. Raises `CheckpointError`."""
    parts = (*_NUMBERS.values(), *_OF_ALL.values(), "weight_scale_inv")
    parts = tuple(f".{part}" for part in parts if part != "weight")
    named = next((name for name in stored if name.endswith(parts) or EXPERTS.fullmatch(name)), None)
    if named is not None:
        raise CheckpointError(
            f"{where} is quantised ({shown(named)}), and neither its config.json nor a quantize_config.json says how: "
            "add what its maker has of these, or use another checkpoint, or a GGUF file"
        )


def gather(
    where: str, stored: Mapping[str, StoredTensor], config: ModelConfig, quantisation: Quantisation | None
) -> Mapping[str, StoredTensor]:
    """Return the tensors of a checkpoint, in which one stands for all that is stored of a quantised matrix, and one for
    each matrix of an expert; what else a module has of its own than a bias says how its activations were quantised, and
    is left out.

    Raises:
        CheckpointError: Parts are missing, or of another shape or dtype; the embedding is quantised; or there are some
            without a configuration that says so.
    """
    if quantisation is None:
        _refuse_unsaid(where, stored)
        return stored
    modules = defaultdict[str, dict[str, StoredTensor]](dict)
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        modules[module][part] = tensor
    found = dict(stored)
    for name, to in checkpoint_tensors(config).items():
        module = name.removesuffix(".weight")
        scheme, own = quantisation.scheme(module), modules[module]
        if len(to.shape) != 2 or scheme is None or (numbers := own.get(_NUMBERS[scheme.layout])) is None:
            continue
        if numbers.dtype not in _IN_WEIGHT.get(scheme.layout, (numbers.dtype,)):
            continue
        if module == _EMBEDDING:
            raise CheckpointError(f"{numbers.path}: the embedding is quantised, which is not read: use another")
        for part in own:
            if part != "bias":
                del found[f"{module}.{part}"]
        found[name] = _quantised(module, to.shape, scheme, own)
    found = {name: tensor for name, tensor in found.items() if not name.endswith((".k_scale", ".v_scale"))}
    return with_experts(found) if quantisation.mxfp4 else found
