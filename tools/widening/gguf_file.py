"""Write any readable Llama as one GGUF file: its blocks where it has some, else packed by gguf's own quantiser. And
random numbers in the shape of gpt-oss or of a Qwen3.5, of which it does not matter that such a file has heads of values
in another order.

All or nothing, as a directory of safetensors: the file gets its name last.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from offload_runtime_kernels.gguf_blocks import FORMATS, unpack_rows
from widening.convert import check_space, storage_error
from widening.made import transformers_config_of

from offload_runtime.errors import OptionError
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.experts import Experts
from offload_runtime.models.layers import GatedMLP
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import format_of
from offload_runtime.weights.gguf_header import read_gguf_header
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.loader import Progress

PACKED = ("Q8_0", "Q4_0")  # that gguf packs, and llama.cpp's quantiser stores nearly everything of such a file as
_WRITERS = 16  # packing is what takes time, on one core each
_PACKED_ELEMENTS = 1 << 22  # at a time: 16 MiB of fp32
_PERMUTED = ("q_proj.weight", "k_proj.weight")  # of a Llama
_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35, "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
}  # fmt: skip
# Biases of gpt-oss' gates and ups take turns; a file has them apart.
_TURNS = "gate_up_proj_bias"
_SHIFTED = ("layernorm.weight", "_norm.weight", "model.norm.weight")  # norms of a Qwen3.5
_ROPE_KINDS = ("default", "linear", "yarn")


@dataclass(frozen=True)
class _Tensor:
    """What is written in one go: transformers' name of it, and where its bytes go, or of columns that take turns those
    of one `turn`. A matrix of an expert is a part of one entry of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int
    offset_bytes: int
    turn: int | None = None


def packed_kinds(config: ModelConfig, kind: str) -> dict[str, str]:
    """By transformers' name, how each matrix is packed: all in one format, but for a head that is more than that.

    Raises:
        OptionError: gguf packs no such format, or rows of the model are not whole blocks of it.
    """
    if kind not in PACKED:
        raise OptionError(f"{kind} cannot be packed here: take one of {', '.join(PACKED)}, or --random for other mixes")
    matrices = {name: to for name, to in checkpoint_tensors(config).items() if to.is_matrix}
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    for name, to in matrices.items():
        if to.shape[1] % block:
            raise OptionError(
                f"rows of {name} have {to.shape[1]} weights, no whole blocks of {block}: leave out --stored"
            )
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return {name: "Q8_0" if name == head else kind for name in matrices}


def write_gguf(
    source: CheckpointSource, out: Path, kinds: Mapping[str, str], *, words: Path | None,
    on_progress: Progress | None = None,
) -> Path:  # fmt: skip
    """Write a model.

    Args:
        source: What to write: a Llama, or random numbers in the shape of gpt-oss or of a Qwen3.5.
        out: New file; it appears only when it is complete.
        kinds: By transformers' name how matrices are stored. Those of the source itself are written as they are, and
            others packed; vectors are in fp32.
        words: The GGUF file that the tokenizer is of; None: its tokens are numbers that mean nothing.
        on_progress: Called with (bytes written, bytes of all weights).

    Raises:
        OptionError: `out` exists, or the source's family or rotary embedding has no place in such a file.
        StorageError: Not enough space or no permission; nothing half-written stays behind.
    """
    target = out.expanduser().absolute()
    if target.exists():
        raise OptionError(f"{out} exists already: choose a new file or remove it first")
    config, partial_file = source.config(), target.with_name(f".{target.name}.partial")
    writer, tensors = _described(source, kinds, words)
    total_bytes = sum(tensor.nbytes for tensor in tensors)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target.parent, total_bytes)
        start_bytes = _write_header(writer, partial_file)
        _write_tensors(source, config, tensors, partial_file, start_bytes, total_bytes, on_progress)
        partial_file.rename(target)
    except OSError as error:
        raise storage_error(error, target, total_bytes) from error
    finally:
        partial_file.unlink(missing_ok=True)
    return target


def _described(
    source: CheckpointSource, kinds: Mapping[str, str], words: Path | None
) -> tuple[gguf.GGUFWriter, list[_Tensor]]:
    """What the header says, and what is written, in the order of the file."""
    config = source.config()
    arch = _ARCHITECTURES.get(config.architecture)
    if arch is None:
        raise OptionError(f"{config.architecture} is not written as GGUF: leave out --stored, or take another --shape")
    writer, described = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[arch]), transformers_config_of(source)
    _add_shape(writer, config, described)
    if config.deltas:
        _add_deltas(writer, described)
    if words is None:
        writer.add_tokenizer_model("none")
    else:
        _add_words(writer, words)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    tensors, offset_bytes, of_experts = list[_Tensor](), 0, dict[str, int]()

    def add(called: str, shape: tuple[int, ...], kind: str, nbytes: int) -> int:
        """An entry of the file; returns where it begins."""
        nonlocal offset_bytes
        writer.add_tensor_info(called, shape, torch.float32, nbytes, raw_dtype=gguf.GGMLQuantizationType[kind])
        start_bytes = offset_bytes
        offset_bytes += gguf.GGUFWriter.ggml_pad(nbytes, writer.data_alignment)
        return start_bytes

    for name, to in checkpoint_tensors(config).items():
        kind = kinds.get(name, "F32")
        nbytes = math.prod(to.shape[:-1]) * format_of(kind).file_bytes(to.shape[-1])
        if to.expert is not None:
            assert to.layer is not None
            mlp = config.layers[to.layer].mlp
            assert isinstance(mlp, Experts)
            called = _called(names, name.replace(f".experts.{to.expert}.", ".experts."))
            if called not in of_experts:
                of_experts[called] = add(called, (mlp.num_experts, *to.shape), kind, mlp.num_experts * nbytes)
            tensors.append(_Tensor(name, to.shape, kind, nbytes, of_experts[called] + to.expert * nbytes))
        elif name.endswith(_TURNS):
            rows, columns = to.shape
            for turn, part in enumerate(("gate_proj.bias", "up_proj.bias")):
                start_bytes = add(_called(names, name.replace(_TURNS, part)), (rows, columns // 2), kind, nbytes // 2)
                tensors.append(_Tensor(name, to.shape, kind, nbytes // 2, start_bytes, turn))
        else:
            shape = tuple(size for size in to.shape if size > 1)  # taps have three dimensions
            tensors.append(_Tensor(name, to.shape, kind, nbytes, add(_called(names, name), shape, kind, nbytes)))
    return writer, tensors


def _called(names: gguf.TensorNameMap, name: str) -> str:
    """What llama.cpp calls a tensor, by transformers' name."""
    for end, bias in (("dt_bias", "dt_proj.bias"), ("_proj_bias", "_proj.bias"), (".sinks", ".sinks.weight")):
        name = name.removesuffix(end) + bias if name.endswith(end) else name
    called = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert called is not None, f"llama.cpp has no {name}"
    return called


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig, described: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    mlp = config.layers[0].mlp
    assert isinstance(mlp, GatedMLP | Experts)
    if isinstance(mlp, Experts):
        writer.add_expert_count(mlp.num_experts)
        writer.add_expert_used_count(mlp.chosen)
        writer.add_expert_feed_forward_length(mlp.expert.intermediate_size)
    writer.add_feed_forward_length(described.intermediate_size)
    if window := next(filter(None, config.layer_windows), None):
        writer.add_sliding_window(window)
    writer.add_head_count(config.attention.num_heads)
    writer.add_head_count_kv(config.attention.num_kv_heads)
    writer.add_key_length(config.attention.head_dim)
    writer.add_value_length(config.attention.head_dim)
    rotated = described.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(rotated * config.attention.head_dim))
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(described.rms_norm_eps)
    rope = described.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        raise OptionError(f"rotary embeddings of the kind {kind} are not written as GGUF: leave out --stored")
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_deltas(writer: gguf.GGUFWriter, described: Any) -> None:
    writer.add_full_attention_interval(described.layer_types.index("full_attention") + 1)
    writer.add_ssm_conv_kernel(described.linear_conv_kernel_dim)
    writer.add_ssm_state_size(described.linear_key_head_dim)
    writer.add_ssm_group_count(described.linear_num_key_heads)
    writer.add_ssm_time_step_rank(described.linear_num_value_heads)
    writer.add_ssm_inner_size(described.linear_value_head_dim * described.linear_num_value_heads)


def _add_words(writer: gguf.GGUFWriter, words: Path) -> None:
    """The tokenizer of another file, as it is there."""
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    for key, value in read_gguf_header(words).fields.values.items():
        if key.startswith("tokenizer.") and value != []:
            add[type(value)](key, value)


def _write_header(writer: gguf.GGUFWriter, path: Path) -> int:
    """Returns where the tensors begin."""
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return int(gguf.GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment))


def _write_tensors(
    source: CheckpointSource, config: ModelConfig, tensors: list[_Tensor], path: Path, start_bytes: int,
    total_bytes: int, on_progress: Progress | None,
) -> None:  # fmt: skip
    done_bytes, counting = 0, threading.Lock()
    handle = os.open(path, os.O_WRONLY)
    try:
        end_bytes = max(tensor.offset_bytes + tensor.nbytes for tensor in tensors)
        os.ftruncate(handle, start_bytes + end_bytes)

        def write(tensor: _Tensor) -> None:
            nonlocal done_bytes
            at = start_bytes + tensor.offset_bytes
            stored = _stored(source, tensor, config).view(-1).numpy().data.cast("B")
            while stored:
                count = os.pwrite(handle, stored, at)
                stored, at = stored[count:], at + count
            with counting:
                done_bytes += tensor.nbytes
                if on_progress is not None:
                    on_progress(done_bytes, total_bytes)

        with ThreadPoolExecutor(_WRITERS) as pool:
            try:
                list(pool.map(write, tensors))
            finally:
                pool.shutdown(cancel_futures=True)  # of the others where one has failed
    finally:
        os.close(handle)


def _stored(source: CheckpointSource, tensor: _Tensor, config: ModelConfig) -> torch.Tensor:
    """A tensor's bytes as they lie in the file: uint8 [rows, bytes of a row], or fp32 of a vector and of taps."""
    fill = source.fills[tensor.name]
    if len(tensor.shape) != 2 or tensor.kind == "F32":
        values = torch.empty(tensor.shape)
        fill(values)
        if tensor.name.endswith("A_log"):
            return -values.exp()
        values = values + 1 if config.deltas and tensor.name.endswith(_SHIFTED) else values
        return values if tensor.turn is None else values[..., tensor.turn :: 2].contiguous()
    rows, columns = tensor.shape
    if source.kinds.get(tensor.name) == tensor.kind:
        kept = torch.empty(rows, format_of(tensor.kind).row_bytes(columns), dtype=torch.uint8)
        fill(kept)
        out = unpack_rows(kept, FORMATS[tensor.kind], columns) if tensor.kind in FORMATS else kept
    else:
        out = torch.empty(rows, tensor.nbytes // rows, dtype=torch.uint8)
        values = torch.empty(tensor.shape, dtype=torch.bfloat16)
        fill(values)
        step = max(1, _PACKED_ELEMENTS // columns)
        for part, packed in zip(values.split(step), out.split(step), strict=True):
            found = gguf.quantize(part.float().numpy(), gguf.GGMLQuantizationType[tensor.kind])
            packed.copy_(torch.from_numpy(found))
    if tensor.name.endswith(_PERMUTED) and _ARCHITECTURES[config.architecture] is gguf.MODEL_ARCH.LLAMA:
        # llama.cpp rotates neighbouring channels: two halves are interleaved.
        head_dim = config.attention.head_dim
        halves = out.view(rows // head_dim, 2, head_dim // 2, -1)
        out = halves.transpose(1, 2).reshape(rows, -1)
    return out
