"""Loading into arenas: every element written, one copy in memory, nothing leaked on failure."""

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers

from offload_runtime.errors import CheckpointError
from offload_runtime.stream.arena import HostArena
from offload_runtime.weights.layout import ModelLayout, checkpoint_tensors
from offload_runtime.weights.loader import passing_bytes
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.engine import raising
from tests.helpers.models import assert_a_gpu_loads_the_same, load_plain
from tests.helpers.page_locking import LimitedRegistrar

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are constant when new
            parameter.normal_()
    model.save_pretrained(tmp_path / "model", max_shard_size="30kB")
    return tmp_path / "model"


def num_staging() -> int:
    """Arenas that hold pieces on their way."""
    arenas = [found for found in gc.get_objects() if isinstance(found, HostArena)]
    return sum(arena.name == "pieces of weights" and arena.buffer.nbytes > 0 for arena in arenas)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gets_the_bytes_of_a_cpu(directory, dtype):
    source = open_checkpoint(directory)
    assert_a_gpu_loads_the_same(source, ModelLayout.of(source.config(), dtype))


def test_loading_is_interrupted_between_tensors(directory):
    source, registrar = open_checkpoint(directory), LimitedRegistrar(1 << 60)
    interrupt = raising(KeyboardInterrupt(), after=19)
    with pytest.raises(KeyboardInterrupt):
        load_plain(source, torch.bfloat16, pin=range(3), registrar=registrar, on_progress=interrupt)
    assert not registrar.locked and num_staging() == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]


def test_file_cut_after_it_was_opened(directory):
    source, registrar = open_checkpoint(directory), LimitedRegistrar(1 << 60)
    largest = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{largest.name}.*truncated by 100 bytes"):
        load_plain(source, torch.bfloat16, pin=range(3), registrar=registrar)
    assert not registrar.locked


def test_progress_ends_at_the_total(directory):
    seen: list[tuple[int, int]] = []
    source = open_checkpoint(directory)
    weights = load_plain(source, torch.bfloat16, on_progress=lambda *pair: seen.append(pair))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (weights.layout.total_bytes, weights.layout.total_bytes)
    assert weights.layout.total_bytes == ModelLayout.of(source.config(), torch.bfloat16).total_bytes
    assert len(seen) > len(checkpoint_tensors(source.config()))
    assert weights.load_seconds > 0 and weights.load_gbps > 0


MEASURE = """
import sys, torch
from offload_runtime.weights.loader import load_weights
from offload_runtime.weights.sources import open_checkpoint
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))
source, stay = open_checkpoint(sys.argv[1]), int(sys.argv[2])
layout = source.layout(torch.bfloat16)
onto = {layer: torch.empty(nbytes, dtype=torch.uint8, device="meta") for layer, nbytes in enumerate(layout.layer_bytes)}
before = status("VmRSS")
weights = load_weights(source, layout, onto={layer: onto[layer] for layer in range(stay)})
print(before, status("VmHWM"), weights.layout.total_bytes)
"""


def measured(model: Path, stay: int = 0) -> tuple[int, int]:
    """By how many bytes a process grows that loads a model in bf16 of which the first `stay` layers do not stay in host
    memory, and how many its weights are."""
    command, root = [sys.executable, "-c", MEASURE, str(model), str(stay)], Path(__file__).parents[1]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    before, peak, total_bytes = map(int, result.stdout.split())
    return peak - before, total_bytes


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_peak_memory_is_one_copy_of_the_weights(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=16_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100MB")
    del model
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 70
    shard_bytes = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    grown, total_bytes = measured(tmp_path)
    assert total_bytes > 200e6
    assert 0.9 * total_bytes < grown <= 1.1 * total_bytes + shard_bytes
    layout = open_checkpoint(tmp_path).layout(torch.bfloat16)
    kept = layout.shared.total_bytes + layout.layer_bytes[7]
    grown, _ = measured(tmp_path, stay=7)
    assert 0.9 * kept < grown <= 1.1 * (kept + passing_bytes(open_checkpoint(tmp_path), layout))
