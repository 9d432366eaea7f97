"""GGUF files: exact weights, the configuration from the metadata, and refusals."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from offload_runtime_kernels.gguf_blocks import FORMATS

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.sources import describe_model, open_checkpoint
from tests.helpers.families import interleaved
from tests.helpers.models import load_plain, rows_of

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
NO_VOCABULARY = {"tokens": [f"t{i}" for i in range(5000)], "eos_token_id": 3, "bos_token_id": 1}  # no kind of tokenizer


def build(**overrides) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def packed(values: np.ndarray, quant: gguf.GGMLQuantizationType) -> np.ndarray:
    """Values as a file holds them; where the package cannot pack them, random blocks of about their size."""
    with contextlib.suppress(NotImplementedError):
        return gguf.quantize(values, quant)
    form, rng = FORMATS[quant.name], np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.size // form.weights, form.nbytes), dtype=np.uint8)
    halves = [blocks[:, at : at + 2] for at in form.file_halves]
    for half in halves:
        half[:] = np.ones((len(blocks), 1), np.float16).view(np.uint8)
    scale = values.std() / gguf.dequantize(blocks, quant).std()
    for half in halves:
        half[:] = (scale * rng.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def write(
    path: Path, model: torch.nn.Module, *, kind: str | Callable[[str], str] = "F32", extra=None, arch: str = "llama",
    vocabulary: Mapping[str, Any] = NO_VOCABULARY, tensors_a_file: int = 0, tensors: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a Llama as llama.cpp's converter would; `extra(writer)` adds metadata, `vocabulary` is what stands under
    `tokenizer.ggml`. With `tensors_a_file` in several files. Matrices are of one `kind`, or what it says of a
    name; `tensors` come beside them."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_a_file)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = model.model.layers[0].self_attn.head_dim
    if head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    add = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in vocabulary.items():
        add[type(value)](f"tokenizer.ggml.{key}", value)
    if extra:
        extra(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = interleaved(values, head_dim)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind_of = kind if callable(kind) else lambda _: kind
        quant = gguf.GGMLQuantizationType[kind_of(stored) if values.ndim > 1 else "F32"]
        writer.add_tensor(stored, packed(values, quant), raw_dtype=quant)
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(f"{name}.weight", np.array(numbers, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_weights(path: Path, model: torch.nn.Module, dtype: torch.dtype) -> None:
    source = open_checkpoint(path)
    weights = load_plain(source, dtype)
    state = model.state_dict()
    table = checkpoint_tensors(source.config())
    assert set(table) == {name for name, _ in model.named_parameters()}
    for name, destination in table.items():
        assert torch.equal(rows_of(destination, weights), state[name].to(dtype)), name


def test_unsupported_models_are_refused(tmp_path):
    model = build()
    with pytest.raises(UnsupportedArchitectureError, match=r"'falcon' has layers of another kind.*Qwen3"):
        open_checkpoint(write(tmp_path / "a.gguf", model, arch="falcon"))
    with pytest.raises(UnsupportedArchitectureError, match=r"partial_rotary_factor is 0\.5"):
        open_checkpoint(write(tmp_path / "c.gguf", model, extra=lambda w: (
            w.add_rope_dimension_count(8), w.add_key_length(16))))  # fmt: skip
    with pytest.raises(UnsupportedArchitectureError, match="one of 3 files"):
        open_checkpoint(write(tmp_path / "d.gguf", model, extra=lambda w: w.add_uint16("split.count", 3)))


def test_a_model_in_several_files_is_opened_by_any_of_them(tmp_path):
    model = build(num_hidden_layers=2)
    write(tmp_path / "m.gguf", model, tensors_a_file=8)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for named in (*parts, tmp_path):
        assert_same_weights(named, model, torch.float32)
        assert describe_model(named).config() == open_checkpoint(parts[0]).config()
    parts[1].rename(tmp_path / "elsewhere")
    for named in (parts[0], parts[2], tmp_path):
        with pytest.raises(CheckpointError, match=rf"lacks 1 of 3 files of the model \({parts[1].name}\)"):
            open_checkpoint(named)
    (tmp_path / "elsewhere").rename(parts[1])
    parts[0].rename(tmp_path / "m-00001-of-00002.gguf")
    parts[1].rename(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(UnsupportedArchitectureError, match="one of 3 files by its content and of 2 by its name"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_an_unknown_quantisation_is_no_damage(tmp_path):
    """Q4_0_4_4, which llama.cpp has dropped, is number 31."""
    path = write(tmp_path / "m.gguf", build(num_hidden_layers=1))
    name = b"output_norm.weight"
    intact = path.read_bytes()
    kind = intact.index(name) + len(name) + 4 + 8  # behind the number of dimensions and the only one
    path.write_bytes(intact[:kind] + (31).to_bytes(4, "little") + intact[kind + 4 :])
    with pytest.raises(CheckpointError, match=r"'output_norm\.weight' is quantised as type 31, .*: use another file"):
        open_checkpoint(path)
