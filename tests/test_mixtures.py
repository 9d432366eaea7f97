"""Layers with experts: how files store them."""

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from offload_runtime import Runtime
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.engine import byte_level_tokenizer
from tests.helpers.families import family_model, write_family
from tests.helpers.models import load_plain


def _stack(tensors: dict[str, torch.Tensor]) -> None:
    """Experts that are stored one by one as transformers has them in memory."""
    for stem in {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        count = sum(name.startswith(f"{stem}.") and name.endswith("down_proj.weight") for name in tensors)
        for stack, ends in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            parts = [torch.cat([tensors.pop(f"{stem}.{n}.{end}.weight") for end in ends]) for n in range(count)]
            tensors[f"{stem}.{stack}"] = torch.stack(parts)


def _halve(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith(".gate_up_proj"))
    tensors[name] = tensors[name][:, ::2].contiguous()


def _change(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_experts_stored_as_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    family_model("qwen3_moe", 0).save_pretrained(tmp_path)
    apart = load_plain(open_checkpoint(tmp_path), torch.float32)
    _change(tmp_path, _stack)
    stacked = load_plain(open_checkpoint(tmp_path), torch.float32)
    assert all(torch.equal(apart.block(layer), stacked.block(layer)) for layer in apart.arenas)
    assert all(torch.equal(apart.experts_of(layer), stacked.experts_of(layer)) for layer in apart.experts)
    assert apart.experts
    _change(tmp_path, _halve)
    with pytest.raises(CheckpointError, match="has shape"):
        open_checkpoint(tmp_path)


# What is written over a file's header: a name, or the bytes behind one.
BROKEN: dict[str, tuple[str, bytes, bytes, str]] = {
    "no ups": ("mixtral", b"blk.1.ffn_up_exps", b"blk.1.ffn_uq_exps", r"lacks \d+ of .*blk\.1\.ffn_up_exps\.0\.weight"),
    "too few": (
        "mixtral", b"llama.expert_count\x04\0\0\0", b"llama.expert_count\x04\0\0\0\x03",
        r"blk\.0\.ffn_\w+\.weight is of \d experts, and the file says that there are 3",
    ),
    "unknown": ("mixtral", b"ffn_gate_exps.weight\x03", b"", "gate_exps.[0-7].weight is quantised as I8, which"),
    "too many chosen": (
        "gpt_oss", b"gpt-oss.expert_used_count\x04\0\0\0", b"gpt-oss.expert_used_count\x04\0\0\0\x7f",
        r"has gpt-oss\.expert_used_count 127, where at most the \d of expert_count is needed",
    ),
    "too many": (
        "gpt_oss", b"gpt-oss.expert_count\x04\0\0\0", b"gpt-oss.expert_count\x04\0\0\0\0\0\0\x40",
        r"has gpt-oss\.expert_count 1073741824, where an integer from 1 to 4096 is needed",
    ),
    "too many layers": (
        "mixtral", b"llama.block_count\x04\0\0\0", b"llama.block_count\x04\0\0\0\xff\xff",
        r"has llama\.block_count 65535, where an integer from 1 to 256 is needed",
    ),
    "no biases of ups": ("gpt_oss", b"blk.1.ffn_up_exps.bias", b"blk.1.ffn_uq_exps.bias", "no such biases of ups"),
    "no biases of downs": (
        "gpt_oss", b"blk.1.ffn_down_exps.bias", b"blk.1.ffn_dowm_exps.bias", r"lacks 1 of .*blk\.1\.ffn_down_exps\.bias"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "old", "new", "message"), BROKEN.values(), ids=BROKEN)
def test_a_file_of_other_experts_is_refused(family: str, old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    data = bytearray(write_family(tmp_path / "m.gguf", family, family_model(family, 0)).read_bytes())
    at = data.index(old)
    if not new:  # behind three dimensions, its kind
        at, new = at + len(old) + 3 + 3 * 8, bytes((gguf.GGMLQuantizationType.I8, 0, 0, 0))
    data[at : at + len(new)] = new
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_on_a_gpu_tokens_are_those_of_plain_decoding(family: str, tmp_path: Path) -> None:
    family_model(family, 1, max_position_embeddings=4096).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    prompts = [[5 + (3 * i * i + i // 7) % 280 for i in range(length)] for length in (11, 2600, 40)]
    found = []
    for ways in ({"draft": "none", "kv": "gpu"}, {"draft": "ngram", "gamma": 5, "kv": "host", "resident_layers": 0}):
        with Runtime.load(tmp_path, device="cuda:0", vram="8GB", context=2700, max_batch=3, **ways) as runtime:
            results = runtime.generate_batch(prompts, max_new_tokens=24, ignore_eos=True, temperature=0.0)
            found.append([result.tokens for result in results])
    assert found[0] == found[1]
