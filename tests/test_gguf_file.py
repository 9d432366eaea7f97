"""Models written as one GGUF file: read by gguf's own reader and by ours, they are what was packed."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import widen_model
from widening.gguf_file import packed_kinds, write_gguf
from widening.shapes import SHAPES, WideShape
from widening.stored import stored_model

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError, StorageError
from offload_runtime.weights import CheckpointSource, checkpoint_tensors, open_checkpoint
from offload_runtime.weights.encoding import format_of
from offload_runtime.weights.neighbours import stored_kinds
from tests.helpers.widening import WidenedCheckpoint, tensors_of
from tests.test_tokenizers import metadata_of, written

pytestmark = pytest.mark.no_cover  # tools
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


@pytest.mark.parametrize(
    "shape", [WideShape(256, 512, 2, 4, 2, 64), SHAPES["tiny-hybrid"], SHAPES["tiny-gpt-oss"]],
    ids=["llama", "hybrid", "gpt-oss"],
)  # fmt: skip
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


def test_nothing_half_written_stays(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = WidenedCheckpoint(open_checkpoint(words), WIDE)
    kinds = packed_kinds(made.config(), "Q8_0")
    broken = made.as_source(fills={**made.fills, "lm_head.weight": lambda out: pytest.fail("no head")})
    with pytest.raises(pytest.fail.Exception, match="no head"):
        write_gguf(broken, tmp_path / "a.gguf", kinds, words=words)
    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("usage", "total used free")(10**9, 10**9, 10**4))
    with pytest.raises(StorageError, match=r"needs .* and 10\.0 kB is free"):
        write_gguf(made, tmp_path / "a.gguf", kinds, words=words)
    assert not any(tmp_path.iterdir())
    (tmp_path / "a.gguf").touch()
    with pytest.raises(OptionError, match="exists already"):
        write_gguf(made, tmp_path / "a.gguf", kinds, words=words)


def test_the_command_writes_one_file(words: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "tiny.gguf"
    command = ["--source", str(words), "--shape", "tiny", "--random", "--stored", "q4_k_m", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["widen_model.py", *command, "--out", str(out)])
    assert widen_model.main() == 0
    assert set(open_checkpoint(out).kinds.values()) == {"Q5_0", "Q8_0", "F32"}
