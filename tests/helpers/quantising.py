"""Small quantised checkpoints of every format that is read, packed here by the formats' own descriptions.

Nothing of this is shared with what reads them. Each packer returns a module's tensors and what the format's library
makes of them: fp32 that holds what it rounds to.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.engine import byte_level_tokenizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
# Of a module's name: its tensors by what is behind it, and its decoded matrix.
Packer = Callable[[torch.Tensor], Packed]


class Groups(NamedTuple):
    """A matrix [M, K] as integers from 0 on, with `scales` and `zeros` [M, G], and the group of each column."""

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    of: torch.Tensor

    @property
    def decoded(self) -> torch.Tensor:
        """(q - z) * s in the dtype of the scales."""
        of = self.of.long()
        return ((self.q - self.zeros[:, of]).to(self.scales.dtype) * self.scales[:, of]).float()


def rounded(
    w: torch.Tensor, size: int, bits: int, dtype: torch.dtype, *, symmetric: bool = False, ordered: bool = False
) -> Groups:
    """To the nearest integers, by the least and the largest of each group."""
    columns = w.shape[1]
    of = torch.arange(columns, dtype=torch.int32) // size
    if ordered:
        of = of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    least, largest = (
        torch.stack([getattr(w[:, of == group], name)(dim=1)[0] for group in range(int(of.max()) + 1)], dim=1)
        for name in ("min", "max")
    )
    top = (1 << bits) - 1
    if symmetric:
        scales = (2 * torch.maximum(-least, largest) / top).to(dtype)
        zeros = torch.full_like(least, 1 << (bits - 1))
    else:
        scales = ((largest - least) / top).to(dtype)
        zeros = (-least / scales.float()).round().clamp(1, top)
    q = (w / scales[:, of.long()].float()).round() + zeros[:, of.long()]
    return Groups(q.clamp(0, top).int(), scales, zeros.int(), of)


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Integers [R, N] in int32 [R, words], the first of each word (or of its order) in the lowest bits."""
    count = 32 // bits
    out = torch.zeros(len(values), -(-values.shape[1] // count), dtype=torch.int64)
    for column in range(out.shape[1]):
        for place, which in enumerate(order or range(count)):
            if column * count + which < values.shape[1]:
                out[:, column] |= values[:, column * count + which].long() << place * bits
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


# --- compressed-tensors


def packed_int(w: torch.Tensor, size: int, bits: int, *, symmetric: bool = True, ordered: bool = False) -> Packed:
    """pack-quantized: words along the rows, zeros' words down the columns."""
    groups = rounded(w, size, bits, BF16, symmetric=symmetric, ordered=ordered)
    out = {"weight_packed": words(groups.q, bits), "weight_scale": groups.scales, "weight_shape": torch.tensor(w.shape)}
    if not symmetric:
        out["weight_zero_point"] = words(groups.zeros.t(), bits).t()
    if ordered:
        out["weight_g_idx"] = groups.of
    return out, groups.decoded


def plain_int(w: torch.Tensor, *, symmetric: bool = True) -> Packed:
    """int-quantized, one scale a row."""
    groups = rounded(w, w.shape[1], 8, BF16, symmetric=symmetric)
    tensors = {"weight": (groups.q - 128).to(torch.int8), "weight_scale": groups.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (groups.zeros - 128).to(torch.int8)
    return tensors, groups.decoded


def fp8(w: torch.Tensor, rows: int, columns: int, scale_dtype: torch.dtype, name: str, *, in_fp32: bool) -> Packed:
    """One scale a block of rows x columns, which the last ones may not fill."""
    down, across = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
    scales = torch.empty(down, across, dtype=scale_dtype)
    stored, decoded = torch.empty(w.shape, dtype=torch.float8_e4m3fn), torch.empty(w.shape)
    for i in range(down):
        for j in range(across):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = w[block].abs().max() / 448
            stored[block] = (w[block] / scales[i, j].float()).to(torch.float8_e4m3fn)
            dtype = FP32 if in_fp32 else scale_dtype
            decoded[block] = (stored[block].to(dtype) * scales[i, j].to(dtype)).float()
    return {"weight": stored, name: scales}, decoded


def fp8_tensor(w: torch.Tensor, shape: tuple[int, ...]) -> Packed:
    """float-quantized, one scale of all, whose shape is told; with what says how inputs were quantised."""
    tensors, decoded = fp8(w, *w.shape, BF16, "weight_scale", in_fp32=False)
    tensors["weight_scale"] = tensors["weight_scale"].view(shape)
    return tensors | {"input_scale": torch.ones(1)}, decoded


def fp8_in_fp32_of_all(w: torch.Tensor) -> Packed:
    """One scale of all, without dimensions."""
    tensors, decoded = fp8(w, *w.shape, FP32, "weight_scale", in_fp32=True)
    return {**tensors, "weight_scale": tensors["weight_scale"].view(())}, decoded


def nvfp4(w: torch.Tensor, *, divided: bool) -> Packed:
    """Groups of 16 with scales in E4M3, and one of all, by which the scales of compressed-tensors were multiplied and
    those of ModelOpt divided; the even column in the lower half of a byte."""
    groups = w.view(len(w), -1, 16)
    largest = groups.abs().amax(2)
    of_all = (448 * 6 / largest.max()) if divided else largest.max() / (448 * 6)
    scales = (largest / 6 * of_all if divided else largest / 6 / of_all).to(torch.float8_e4m3fn)
    each = scales.float() / of_all if divided else scales.float() * of_all
    values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    numbers = (groups.abs() / each[..., None]).sub(values[:, None, None, None]).abs().argmin(0)
    decoded = (values[numbers] * each[..., None]).copysign(groups).view(w.shape)
    nibbles = (numbers + 8 * (groups < 0)).view(len(w), -1, 2).to(torch.uint8)
    packed = nibbles[..., 0] | nibbles[..., 1] << 4
    if divided:
        of_group = {"weight_packed": packed, "weight_global_scale": of_all.view(1), "input_global_scale": torch.ones(1)}
    else:
        of_group = {"weight": packed, "weight_scale_2": of_all, "input_scale": torch.ones(())}
    return {**of_group, "weight_scale": scales}, decoded


# --- GPTQ and AWQ: the transposed matrix


def gptq(w: torch.Tensor, size: int, bits: int, *, ordered: bool = False, less: int = 1) -> Packed:
    groups = rounded(w, size, bits, FP16, ordered=ordered)
    tensors = {
        "qweight": words(groups.q, bits).t(), "qzeros": words(groups.zeros.t() - less, bits),
        "scales": groups.scales.t(), "g_idx": groups.of,
    }  # fmt: skip
    return tensors, groups.decoded


def awq(w: torch.Tensor, size: int) -> Packed:
    cut, order = rounded(w, size, 4, FP16), (0, 2, 4, 6, 1, 3, 5, 7)
    out = {"qweight": words(cut.q.t(), 4, order), "qzeros": words(cut.zeros.t(), 4, order), "scales": cut.scales.t()}
    return out, cut.decoded


def compressed(form: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": others.pop("inputs", None)}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], **others,
    }  # fmt: skip


class Format(NamedTuple):
    config: dict[str, Any]
    pack: Packer
    dtype: torch.dtype  # of what is not quantised


_INT, _FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "num_bits": 8, "symmetric": True}
_GROUP = {**_INT, "num_bits": 4, "strategy": "group", "group_size": 64}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
_MIXED = ["lm_head", "model.layers.1.self_attn.v_proj", r"re:.*layers\.2\.mlp.*"]
_NVFP4 = {"type": "float", "num_bits": 4, "group_size": 16, "symmetric": True, "strategy": "tensor_group"}
FORMATS = {
    "FP8 of a tensor": Format(
        compressed("float-quantized", {**_FLOAT, "strategy": "tensor"}, inputs={**_FLOAT, "dynamic": True}),
        lambda w: fp8_tensor(w, (1,)), BF16,
    ),
    "FP8 of a tensor without dimensions": Format({"quant_method": "fp8"}, fp8_in_fp32_of_all, FP16),
    "FP8 of channels": Format(
        compressed("float-quantized", {**_FLOAT, "strategy": "channel"}),
        lambda w: fp8(w, 1, w.shape[1], FP16, "weight_scale", in_fp32=False), FP16,
    ),
    "FP8 of channels, fp32": Format(
        compressed("naive-quantized", {**_FLOAT, "strategy": "channel"}),
        lambda w: fp8(w, 1, w.shape[1], FP32, "weight_scale", in_fp32=True), BF16,
    ),
    "FP8 of blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"},
        lambda w: fp8(w, 128, 128, FP32, "weight_scale_inv", in_fp32=True), BF16,
    ),
    "FP8 of blocks, bf16": Format(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda w: fp8(w, 128, 128, BF16, "weight_scale_inv", in_fp32=True), BF16,
    ),
    "FP8 of compressed blocks": Format(
        compressed("float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [128, 64]}),
        lambda w: fp8(w, 128, 64, BF16, "weight_scale", in_fp32=False), BF16,
    ),
    "int8": Format(compressed("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel"}), plain_int, BF16),
    "int8 with zeros": Format(
        compressed("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel", "symmetric": False}),
        lambda w: plain_int(w, symmetric=False), BF16,
    ),
    "packed 4 bits": Format(compressed("pack-quantized", _GROUP), lambda w: packed_int(w, 64, 4), BF16),
    "packed 4 bits, mixed": Format(
        compressed("pack-quantized", _GROUP, ignore=_MIXED), lambda w: packed_int(w, 64, 4), BF16
    ),
    "packed 4 bits with zeros": Format(
        compressed("pack-quantized", {**_GROUP, "symmetric": False}), lambda w: packed_int(w, 64, 4, symmetric=False),
        BF16,
    ),
    "packed 4 bits, ordered": Format(
        compressed("pack-quantized", {**_GROUP, "actorder": "group"}), lambda w: packed_int(w, 64, 4, ordered=True),
        BF16,
    ),
    "packed 8 bits, head": Format(
        compressed("pack-quantized", {**_INT, "num_bits": 8, "strategy": "channel"}, ignore=[]),
        lambda w: packed_int(w, w.shape[1], 8), BF16,
    ),
    "packed 8 bits with zeros": Format(
        compressed("pack-quantized", {**_GROUP, "num_bits": 8, "symmetric": False}),
        lambda w: packed_int(w, 64, 8, symmetric=False), BF16,
    ),
    "GPTQ": Format(_GPTQ, lambda w: gptq(w, 64, 4), FP16),
    "GPTQ, ordered": Format({**_GPTQ, "desc_act": True}, lambda w: gptq(w, 64, 4, ordered=True), FP16),
    "GPTQ, rows": Format({**_GPTQ, "group_size": -1}, lambda w: gptq(w, w.shape[1], 4), FP16),
    "GPTQ 8 bits": Format({**_GPTQ, "bits": 8}, lambda w: gptq(w, 64, 8), FP16),
    "GPTQ v2": Format({**_GPTQ, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 64, 4, less=0), FP16),
    "NVFP4": Format(
        compressed("nvfp4-pack-quantized", _NVFP4, inputs={**_NVFP4, "dynamic": "local"}),
        lambda w: nvfp4(w, divided=True), BF16,
    ),
    "NVFP4 of ModelOpt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.1.self_attn.v_proj",
                                                                     "model.layers.2.mlp*"]},
        lambda w: nvfp4(w, divided=False), BF16,
    ),
    "AWQ": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        lambda w: awq(w, 64), FP16,
    ),
}  # fmt: skip


def is_quantised(name: str, form: Format) -> bool:
    """Whether a module is one that the configuration means."""
    ignored = form.config.get("ignore", form.config.get("modules_to_not_convert", ["lm_head"]))
    if name in ignored:
        return False
    if len(ignored) > 1 and (name == "model.layers.1.self_attn.v_proj" or "layers.2.mlp" in name):
        return False
    return "proj" in name or (name == "lm_head" and "lm_head" not in ignored)


def random_llama(**sizes: int) -> Any:
    """One whose next token depends on what it has read."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{
        "vocab_size": len(byte_level_tokenizer()), "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, **sizes,
    }))  # fmt: skip
    for name, parameter in model.state_dict().items():
        if "norm" not in name:
            parameter.normal_(std=0.5 if "embed" in name else 2.0 * parameter.shape[-1] ** -0.5)
    return model


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one by one, as quantised files have them, and not stacked as transformers has them in memory."""
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        stem, _, stack = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(stack, ()) if stem else ()
        for number, expert in enumerate(tensor if parts else ()):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{stem}.experts.{number}.{part}.weight"] = rows
        if not parts:
            found[name] = tensor
    return found


def write_quantised(
    directory: Path, form: Format, model: Any = None, *, others: Mapping[str, torch.Tensor] = MappingProxyType({}),
    **sizes: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A model, or a random Llama of some sizes, and other tensors; returns the decoded ones in fp32."""
    model = random_llama(**sizes) if model is None else model
    config, stored, decoded = model.config, dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    config.dtype = form.dtype
    for name, parameter in {**_apart(model.state_dict()), **others}.items():
        module = name.removesuffix(".weight")
        if is_quantised(module, form):
            tensors, decoded[name] = form.pack(parameter)
            stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
        else:
            stored[name] = parameter.to(form.dtype)
            decoded[name] = stored[name].float()
    settings = {**config.to_dict(), "architectures": [type(model).__name__], "quantization_config": form.config}
    settings["dtype"] = str(form.dtype).removeprefix("torch.")
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(stored, directory / "model.safetensors")
    byte_level_tokenizer().save_pretrained(directory)
    return decoded


def write_decoded(directory: Path, quantised: Path, decoded: dict[str, torch.Tensor]) -> Path:
    """The same in fp32, as a checkpoint that nothing has quantised."""
    settings = json.loads((quantised / "config.json").read_text())
    del settings["quantization_config"]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**settings, "dtype": "float32"}))
    save_file(decoded, directory / "model.safetensors")
    byte_level_tokenizer().save_pretrained(directory)
    return directory
