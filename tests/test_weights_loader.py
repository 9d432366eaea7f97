"""Loading into arenas: every element written, one copy in memory, nothing leaked on failure."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload_runtime.errors import CheckpointError
from offload_runtime.memory import PAGE_BYTES, HostArena, Registrar
from offload_runtime.weights import ModelLayout, checkpoint_tensors, layer_layout, load_weights, open_checkpoint
from offload_runtime.weights.loader import HostWeights, passing_bytes
from offload_runtime.weights.staging import PIECE_BYTES, Staging
from tests.helpers.models import assert_a_gpu_loads_the_same, load_plain
from tests.helpers.page_locking import REFUSED, LimitedRegistrar
from tests.helpers.quantising import FORMATS, write_quantised
from tests.test_weights_gguf import write

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


class ReadingRegistrar(LimitedRegistrar):
    """Remembers what memory held when it was locked."""

    def __init__(self, most_bytes: int = 1 << 60) -> None:
        super().__init__(most_bytes)
        self.contents: list[bytes] = []

    def register(self, address: int, nbytes: int) -> int:
        self.contents.append(ctypes.string_at(address, nbytes))
        return super().register(address, nbytes)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_tensors_are_the_modules_weights_side_by_side(directory, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights = load_plain(open_checkpoint(directory), dtype)
    for index, layer in enumerate(model.model.layers):
        attention, mlp, views = layer.self_attn, layer.mlp, weights.views(index)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        expected = {
            "input_norm": layer.input_layernorm.weight,
            "qkv": torch.cat([p.weight for p in projections]),
            "qkv_bias": torch.cat([p.bias for p in projections]),
            "q_norm": attention.q_norm.weight,
            "k_norm": attention.k_norm.weight,
            "o": attention.o_proj.weight,
            "o_bias": attention.o_proj.bias,
            "post_norm": layer.post_attention_layernorm.weight,
            "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "down": mlp.down_proj.weight,
        }
        assert set(views) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(views[name].dense, tensor.to(dtype)), (index, name)
    shared = {name: weight.dense for name, weight in weights.views(None).items()}
    assert torch.equal(shared["embedding"], model.model.embed_tokens.weight.to(dtype))
    assert torch.equal(shared["final_norm"], model.model.norm.weight.to(dtype))
    assert torch.equal(shared["lm_head"], model.lm_head.weight.to(dtype))


def test_large_tensors_are_converted_in_pieces(tmp_path):
    """More elements than the staging buffer holds: the seams must not show."""
    config = transformers.LlamaConfig(**(SIZES | {"vocab_size": 70_001, "hidden_size": 64, "num_hidden_layers": 1}))
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    weights = load_plain(open_checkpoint(tmp_path), torch.bfloat16)
    assert torch.equal(weights.views(None)["embedding"].dense, model.model.embed_tokens.weight.bfloat16())


def test_blocks_are_locked_once_and_only_when_complete(directory):
    registrar = ReadingRegistrar()
    weights = load_plain(open_checkpoint(directory), torch.bfloat16, pin=[0, 2], registrar=registrar)
    assert [weights.arenas[layer].pinned for layer in (0, 1, 2, None)] == [True, False, True, False]
    complete = [bytes(weights.layers[index].buffer.numpy()) for index in (0, 2)]
    assert registrar.contents in (complete, complete[::-1])
    weights.close()
    assert not registrar.locked


def num_staging() -> int:
    """Arenas that hold pieces on their way."""
    arenas = [found for found in gc.get_objects() if isinstance(found, HostArena)]
    return sum(arena.name == "pieces of weights" and arena.buffer.nbytes > 0 for arena in arenas)


ORDERS = {
    "of the files": lambda name: 0,
    "by kind": lambda name: name.split(".")[-2],
    "layers behind each other, backwards": lambda name: [-ord(letter) for letter in name],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("onto", [(None, 0, 1, 2), (None, 1), (2,)], ids=["all", "some", "one"])
def test_blocks_that_do_not_stay_are_read_to_where_they_belong(directory, onto, order):
    source, registrar = open_checkpoint(directory), LimitedRegistrar(1 << 60)
    source = replace(source, fills={name: source.fills[name] for name in sorted(source.fills, key=ORDERS[order])})
    layout, plain = ModelLayout.plain(source.config(), torch.bfloat16), load_plain(source, torch.bfloat16)
    held = {layer: torch.zeros(layout.block(layer).total_bytes, dtype=torch.uint8) for layer in onto}
    weights = load_weights(source, layout, onto=held, pin={0, 2} - {*onto}, registrar=registrar)
    assert num_staging() == 0
    assert weights.arenas.keys() == {None, 0, 1, 2} - {*onto}
    for layer in (None, 0, 1, 2):
        block = held[layer] if layer in onto else weights.block(layer)
        for name, weight in layout.block(layer).views(block).items():
            assert torch.equal(weight.dense, plain.views(layer)[name].dense), (layer, name)
    assert all(arena.pinned == (layer in {0, 2}) for layer, arena in weights.layers.items())
    weights.close()
    assert not registrar.locked


class PieceRegistrar(LimitedRegistrar):
    """Counts the pieces that it is asked for, and refuses layers as long as one is locked where `exclusive`."""

    def __init__(self, most_bytes: int = 1 << 60, *, exclusive: bool = False) -> None:
        super().__init__(most_bytes)
        self.num_pieces, self._exclusive = 0, exclusive

    def register(self, address: int, nbytes: int) -> int:
        self.num_pieces += nbytes == PIECE_BYTES
        if self._exclusive and nbytes < PIECE_BYTES and PIECE_BYTES in self.locked.values():
            return REFUSED
        return super().register(address, nbytes)


def load_half_of(directory: Path, registrar: LimitedRegistrar, **options: Any) -> HostWeights:
    """Embedding, head and a layer belong on a device, which takes no CUDA; two layers are to be locked."""
    source = open_checkpoint(directory)
    layout = source.layout(torch.bfloat16)
    held = {
        layer: torch.empty(layout.block(layer).total_bytes, dtype=torch.uint8, device="meta") for layer in (None, 1)
    }
    return load_weights(source, layout, onto=held, pin={0, 2}, registrar=registrar, **options)


def test_pieces_on_their_way_to_a_device_are_locked_once_and_given_back(directory):
    registrar = PieceRegistrar()
    weights = load_half_of(directory, registrar)
    assert 1 <= registrar.num_pieces <= min(16, os.cpu_count())
    assert registrar.locked_bytes == sum(arena.pinned_bytes for arena in weights.layers.values())
    assert all(arena.pinned for arena in weights.layers.values()) and num_staging() == 0


def test_a_refused_piece_is_not_asked_for_again_and_costs_no_layer_its_lock(directory):
    registrar = PieceRegistrar(PIECE_BYTES - 1)
    weights = load_half_of(directory, registrar)
    assert registrar.num_pieces == 1
    assert all(arena.pinned for arena in weights.layers.values())


def test_layers_that_were_refused_beside_pieces_are_locked_when_these_are_gone(directory):
    weights = load_half_of(directory, PieceRegistrar(exclusive=True))
    assert all(arena.pinned for arena in weights.layers.values())


@pytest.mark.parametrize("pieces", [0, 1])
def test_pieces_are_within_what_may_be_locked(directory, pieces):
    registrar = PieceRegistrar()
    layers_bytes = 2 * HostArena.rounded(open_checkpoint(directory).layout(torch.bfloat16).layer_bytes[0])
    weights = load_half_of(directory, registrar, pinned_bytes=layers_bytes + pieces * PIECE_BYTES)
    assert registrar.num_pieces == pieces
    assert registrar.most_locked_bytes <= layers_bytes + pieces * PIECE_BYTES
    assert all(arena.pinned for arena in weights.layers.values())


@pytest.mark.gpu
def test_an_error_waits_for_what_copies_from_its_piece() -> None:
    device = torch.device("cuda", 0)
    out = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)

    def fail(stored: torch.Tensor, out: torch.Tensor) -> None:
        torch.cuda._sleep(100_000_000)
        out.copy_(stored)
        raise MemoryError

    with (
        Staging(device, Registrar()) as staging,
        pytest.raises(MemoryError),
        staging.piece(PIECE_BYTES, device) as piece,
    ):
        piece.convert(PIECE_BYTES, out, fail)
    assert torch.cuda.current_stream(device).query()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gets_the_bytes_of_a_cpu(directory, dtype):
    source = open_checkpoint(directory)
    assert_a_gpu_loads_the_same(source, ModelLayout.plain(source.config(), dtype))


def test_staging_memory_is_given_back_when_reading_fails(directory):
    source = open_checkpoint(directory)
    layout = ModelLayout.plain(source.config(), torch.bfloat16)  # of what is stored in fp32
    held = {layer: torch.zeros(layout.block(layer).total_bytes, dtype=torch.uint8) for layer in (None, 0, 1, 2)}
    largest = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="100 bytes are missing"):
        load_weights(source, layout, onto=held)
    assert num_staging() == 0


def test_loading_is_interrupted_between_tensors(directory):
    source, registrar, calls = open_checkpoint(directory), LimitedRegistrar(1 << 60), []

    def interrupt(*_: int) -> None:
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_plain(source, torch.bfloat16, pin=range(3), registrar=registrar, on_progress=interrupt)
    assert len(calls) == 20 and not registrar.locked and num_staging() == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]


@pytest.mark.parametrize("allowed", range(4))
def test_layers_that_may_not_be_locked_stay_pageable_and_are_not_asked_for_again(directory, allowed):
    config = open_checkpoint(directory).config()
    arena_bytes = -(-layer_layout(config, torch.bfloat16).total_bytes // PAGE_BYTES) * PAGE_BYTES
    registrar = LimitedRegistrar(allowed * arena_bytes)
    weights = load_plain(open_checkpoint(directory), torch.bfloat16, pin=range(3), registrar=registrar)
    assert sum(arena.pinned for arena in weights.layers.values()) == allowed
    assert registrar.locked_bytes == allowed * arena_bytes
    assert registrar.num_calls == min(allowed + 1, 3)
    plain = load_plain(open_checkpoint(directory), torch.bfloat16)
    for index in range(3):
        assert torch.equal(weights.layers[index].buffer, plain.layers[index].buffer)
    weights.close()
    assert not registrar.locked


@pytest.mark.parametrize(("moved_from", "moved_to"), [("model.norm.weight", None), (None, "model.other.weight")])
def test_sources_of_other_tensors_are_refused(directory, moved_from, moved_to):
    source, registrar = open_checkpoint(directory), LimitedRegistrar(1 << 60)
    fills = {name: fill for name, fill in source.fills.items() if name != moved_from}
    if moved_to is not None:
        fills[moved_to] = fills["model.norm.weight"]
    with pytest.raises(AssertionError, match="reads other tensors than the model has"):
        load_plain(replace(source, fills=fills), torch.bfloat16, pin=range(3), registrar=registrar)
    assert not registrar.locked


def test_file_cut_after_it_was_opened(directory):
    source, registrar = open_checkpoint(directory), LimitedRegistrar(1 << 60)
    largest = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{largest.name}.*100 bytes are missing"):
        load_plain(source, torch.bfloat16, pin=range(3), registrar=registrar)
    assert not registrar.locked


def test_progress_ends_at_the_total(directory):
    seen: list[tuple[int, int]] = []
    source = open_checkpoint(directory)
    weights = load_plain(source, torch.bfloat16, on_progress=lambda *pair: seen.append(pair))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (weights.layout.total_bytes, weights.layout.total_bytes)
    assert weights.layout.total_bytes == ModelLayout.plain(source.config(), torch.bfloat16).total_bytes
    assert len(seen) > len(checkpoint_tensors(source.config()))
    assert weights.load_seconds > 0 and weights.load_gbps > 0


MEASURE = """
import sys, torch
from dataclasses import replace
from offload_runtime.weights import load_weights, open_checkpoint
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))
source, stay = open_checkpoint(sys.argv[1]), int(sys.argv[2])
source = replace(source, decoded=len(sys.argv) > 3)
layout = source.layout(torch.bfloat16)
onto = {layer: torch.empty(nbytes, dtype=torch.uint8, device="meta") for layer, nbytes in enumerate(layout.layer_bytes)}
before = status("VmRSS")
weights = load_weights(source, layout, onto={layer: onto[layer] for layer in range(stay)})
print(before, status("VmHWM"), weights.layout.total_bytes)
"""


def measured(model: Path, stay: int = 0, *, decoded: bool = False) -> tuple[int, int]:
    """By how many bytes a process grows that loads a model in bf16 of which the first `stay` layers do not stay in host
    memory, and how many its weights are; `decoded`, whatever it is stored as."""
    command, root = [sys.executable, "-c", MEASURE, str(model), str(stay)], Path(__file__).parents[1]
    command += ["decoded"] if decoded else []
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


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_peak_memory_of_a_quantised_file_is_what_it_stores(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=16_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    path = write(tmp_path / "m.gguf", "llama", transformers.LlamaForCausalLM(config), kind="Q8_0")
    (grown, total_bytes), source = measured(path), open_checkpoint(path)
    assert 80e6 < total_bytes < 1.01 * path.stat().st_size
    # Of each thread what it reads at a time, before rows are put in order, and after.
    pieces_bytes = 3 * passing_bytes(source, source.layout(torch.bfloat16))
    assert 0.9 * total_bytes < grown <= 1.03 * total_bytes + pieces_bytes


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("name", ["FP8 of blocks", "AWQ"])
def test_peak_memory_of_a_quantised_checkpoint_is_what_passes_through(tmp_path, name):
    """All of whose matrices belong on a device: of those that rows of the file are parts of there are some rows."""
    write_quantised(
        tmp_path, FORMATS[name], num_hidden_layers=1, hidden_size=2048, intermediate_size=8192, num_attention_heads=16,
        num_key_value_heads=8,
    )  # fmt: skip
    for decoded in (False, True):
        source = replace(open_checkpoint(tmp_path), decoded=decoded)
        layout = source.layout(torch.bfloat16)
        passing, matrix_bytes = passing_bytes(source, layout), 2 * 2048 * 8192
        grown, _ = measured(tmp_path, stay=1, decoded=decoded)
        assert grown <= layout.shared.total_bytes + passing + (24 << 20), decoded  # of torch itself
        assert passing < 3 * matrix_bytes
