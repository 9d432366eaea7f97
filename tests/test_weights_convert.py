"""Conversion to a directory that transformers loads too, all or nothing."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from widening.convert import convert_to_safetensors

from offload_runtime.errors import OptionError, StorageError
from offload_runtime.weights import open_checkpoint

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A float32 checkpoint with everything a chat model has."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=270, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=[2, 5],
    )  # fmt: skip
    directory = tmp_path / "source"
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["tell me a story, tell it well"], vocab_size=270, special_tokens=["<|end|>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    ).save_pretrained(directory)
    return directory


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("max_shard_bytes", [2e9, 80_000])
def test_transformers_loads_the_result_with_the_same_logits(model_dir, tmp_path, max_shard_bytes):
    out = convert_to_safetensors(
        open_checkpoint(model_dir), tmp_path / "deep" / "out", dtype=torch.float32, max_shard_bytes=max_shard_bytes
    )
    files = sorted(out.glob("*.safetensors"))
    if max_shard_bytes < 1e6:
        assert len(files) > 3
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        assert all(path.stat().st_size < max_shard_bytes + 4096 for path in files)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(
            p.numel() * 4 for p in transformers.AutoModelForCausalLM.from_pretrained(model_dir).parameters()
        )
    ids = torch.arange(20)[None]
    logits = [transformers.AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (model_dir, out)]
    assert torch.equal(*logits)


def test_existing_directories_are_left_alone(model_dir, tmp_path):
    (tmp_path / "out").mkdir()
    convert_to_safetensors(open_checkpoint(model_dir), tmp_path / "out")  # an empty one is fine
    before = entries(tmp_path / "out")
    with pytest.raises(OptionError, match="exists already"):
        convert_to_safetensors(open_checkpoint(model_dir), tmp_path / "out")
    assert entries(tmp_path / "out") == before


@pytest.mark.skipif(os.name == "nt", reason="no RLIMIT_FSIZE there")
def test_writes_the_system_refuses(model_dir, tmp_path):
    """A real failing write: the process may not make files of more than 100 kB."""
    import resource

    source = open_checkpoint(model_dir)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            convert_to_safetensors(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert entries(tmp_path) == {"source"}
