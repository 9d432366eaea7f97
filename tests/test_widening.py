"""A small model inside a large shape says the same, so does a sparse fine-tune, and files are whole or not there, of
safetensors, which transformers loads too, and of GGUF."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from widening.checkpoint import WidenedCheckpoint
from widening.convert import convert_to_safetensors
from widening.gguf_file import packed_kinds, write_gguf
from widening.shapes import SHAPES, WideShape
from widening.stored import stored_model

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import format_of
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.neighbours import stored_kinds
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.assembly import in_memory
from tests.helpers.models import VOCAB_SIZE, all_logits, random_tokens
from tests.test_tokenizers import metadata_of, written

MHA = WideShape(96, 160, 4, 12, 12, 32)
GQA = WideShape(80, 130, 5, 16, 4, 24)
SAME_HEADS = WideShape(64, 100, 3, 8, 8, 8)


def randomise(model: Any) -> Any:
    """Every parameter matters: attention that is not uniform, norms that differ, a residual stream that eps bends."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_((0.1 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5) * noise)
    return model.eval()


def small_model(**others: Any) -> Any:
    """Six query heads over two KV heads of eight channels, three layers, and an eps that is not negligible."""
    settings = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 42, "intermediate_size": 72, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-3, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    return randomise(LlamaForCausalLM(LlamaConfig(**(settings | others))))


class _NothingToSave:
    def save_pretrained(self, directory: Path) -> None:
        """These models have no tokenizer."""


def write(widened: WidenedCheckpoint, directory: Path) -> Path:
    """Write several fp32 shards, without a tokenizer."""
    return convert_to_safetensors(
        widened.as_source(tokenizer=_NothingToSave), directory, dtype=torch.float32, max_shard_bytes=200_000
    )


def tensors_of(source: CheckpointSource) -> dict[str, torch.Tensor]:
    """All tensors in fp32, by transformers' name; what no fill has written is NaN."""
    shapes = {name: to.shape for name, to in checkpoint_tensors(source.config()).items()}
    result = {}
    for name, fill in source.fills.items():
        result[name] = torch.full(shapes[name], float("nan"))
        fill(result[name])
    return result


TOKENS = random_tokens(40)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("shape", "tied"), [(MHA, True), (GQA, False), (SAME_HEADS, False)])
def test_the_logits_are_the_small_models(shape: WideShape, tied: bool, tmp_path: Path) -> None:
    model = small_model(tie_word_embeddings=tied)
    wide = AutoModelForCausalLM.from_pretrained(write(WidenedCheckpoint(in_memory(model), shape), tmp_path / "wide"))
    assert wide.config.hidden_size == shape.hidden_size and wide.config.num_hidden_layers == shape.num_layers
    assert error(all_logits(wide, TOKENS), all_logits(model, TOKENS)) < 1e-5


WIDE = WideShape(128, 192, 3, 8, 4, 16)
Q4_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama in a GGUF file, with a tokenizer."""
    return written(tmp_path_factory.mktemp("words"), metadata_of("smollm"))


def packed(values: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return gguf.quantize(values.bfloat16().float().numpy(), kind)


def test_packed_files_hold_what_gguf_makes_of_a_widened_model(words: Path, tmp_path: Path) -> None:
    small, seen = open_checkpoint(words), list[tuple[int, int]]()
    made = WidenedCheckpoint(small, WIDE, 0.1)
    kinds, values = packed_kinds(made.config(), "Q4_0"), tensors_of(made)
    out = write_gguf(
        made, tmp_path / "wide.gguf", kinds, words=words, on_progress=lambda *pair: seen.append(pair)
    )  # fmt: skip
    read = open_checkpoint(out)
    assert seen[-1][0] == seen[-1][1] and sorted(path.name for path in tmp_path.iterdir()) == ["wide.gguf"]
    assert read.tokenizer().get_vocab() == small.tokenizer().get_vocab()
    assert read.generation_eos() == small.generation_eos()
    assert read.config().layers == made.config().layers
    for name in ("vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(read.config(), name) == getattr(made.config(), name), name
    found = tensors_of(read)
    for name, value in values.items():
        if value.dim() == 2:
            kind = Q8_0 if name == "lm_head.weight" else Q4_0
            value = torch.from_numpy(gguf.dequantize(packed(value, kind), kind))
        assert torch.equal(found[name], value), name
    (rows,) = (one for one in gguf.GGUFReader(out).tensors if one.name == "blk.0.attn_q.weight")
    halves = packed(values["model.layers.0.self_attn.q_proj.weight"], Q4_0).reshape(8, 2, 8, -1)
    assert rows.tensor_type == Q4_0 and np.array_equal(rows.data.reshape(8, 8, 2, -1), halves.swapaxes(1, 2))


@pytest.mark.no_cover
@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [
    WideShape(256, 512, 2, 4, 2, 64), SHAPES["tiny-hybrid"], SHAPES["tiny-gpt-oss"],
], ids=["llama", "hybrid", "gpt-oss"])  # fmt: skip
@pytest.mark.parametrize("mix", ["Q4_K_M", "Q8_0", "MXFP4"])
def test_random_blocks_are_written_as_they_are(words: Path, tmp_path: Path, shape: WideShape, mix: str) -> None:
    source = open_checkpoint(words)
    vocab_size = source.config().vocab_size + 7
    made = stored_model(
        shape, mix.lower(), vocab_size=vocab_size, context_tokens=128, reference="r", words=source, stretch_bytes=65536
    )
    kinds = stored_kinds(made.config(), mix)
    read = open_checkpoint(write_gguf(made, tmp_path / "random.gguf", kinds, words=words))
    assert read.kinds == {**dict.fromkeys(read.kinds, "F32"), **kinds} and read.config().vocab_size == vocab_size
    for name in kinds:
        assert torch.equal(stored_rows(made, name), stored_rows(read, name)), name
    assert answer(made) == answer(read)


def stored_rows(source: CheckpointSource, name: str) -> torch.Tensor:
    rows, columns = checkpoint_tensors(source.config())[name].shape
    out = torch.empty(rows, format_of(str(source.kinds[name])).row_bytes(columns), dtype=torch.uint8)
    source.fills[name](out)
    return out


def answer(source: CheckpointSource) -> list[int]:
    plain = SpeculationOptions("none")
    with Runtime.load(source, draft="none", device="cpu", dtype="fp32", context=32, speculation=plain) as runtime:
        return list(runtime.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True).tokens)
