"""A sparse fine-tune applied to a checkpoint: the right tensors, the right rotary embedding, and widened exactly."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import widen_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from widen_model import parse_rope
from widening.convert import convert_to_safetensors
from widening.shapes import SHAPES
from widening.stretched import StretchedCheckpoint

from offload_runtime.errors import CheckpointError, OptionError
from offload_runtime.model import RopeTable, Window
from offload_runtime.weights import CheckpointSource, open_checkpoint
from tests.helpers.assembly import CPU, make_runner
from tests.helpers.engine import byte_level_tokenizer
from tests.helpers.models import all_logits, cached_logits, load_plain, random_tokens
from tests.helpers.widening import WidenedCheckpoint, WideShape, rope, small_model, tensors_of, write

ROOT = Path(__file__).resolve().parents[1]
YARN = rope("yarn", factor=16.0, original_max_position_embeddings=64)
# Of the heads of SmolLM2 and the 7B shapes, which make up the rotary embedding.
HEADS_OF_128 = WideShape(96, 160, 4, 12, 12, 128)


@pytest.fixture(scope="module")
def source_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with SmolLM2's head dimension and a tokenizer that knows of 64 tokens."""
    directory = tmp_path_factory.mktemp("source")
    tokenizer = byte_level_tokenizer()
    tokenizer.model_max_length = 64
    small_model(vocab_size=len(tokenizer), head_dim=64, max_position_embeddings=64).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def deltas(source_dir: Path, tmp_path: Path) -> list[Path]:
    """New queries, keys and norms, in two files of two dtypes."""
    generator = torch.Generator().manual_seed(11)
    parts: dict[torch.dtype, dict[str, torch.Tensor]] = {torch.float32: {}, torch.bfloat16: {}}
    for name, old in tensors_of(open_checkpoint(source_dir)).items():
        if any(word in name for word in ("q_proj", "k_proj", "norm")):
            dtype = torch.float32 if ".0." in name else torch.bfloat16
            # Weaker queries: the sharp attention of the random source would amplify roundings to 1e-5 of the logits.
            new = old * (1 + 0.3 * torch.randn(old.shape, generator=generator)) * (0.5 if "q_proj" in name else 1.0)
            parts[dtype][name] = new.to(dtype)
    paths = [tmp_path / "delta-0.safetensors", tmp_path / "delta-1.safetensors"]
    for path, part in zip(paths, parts.values(), strict=True):
        save_file(part, path)
    return paths


def values_of(paths: list[Path]) -> dict[str, torch.Tensor]:
    """What the delta files hold, in fp32, read by other code than ours."""
    from safetensors.torch import load_file

    return {name: value.float() for path in paths for name, value in load_file(path).items()}


def tuned_model(source_dir: Path, paths: list[Path], rope_parameters: dict[str, Any], length: int) -> Any:
    """The same fine-tune made by transformers."""
    model = AutoModelForCausalLM.from_pretrained(source_dir)
    config = copy.deepcopy(model.config)
    config.rope_parameters, config.max_position_embeddings = dict(rope_parameters), length
    tuned = type(model)(config)
    tuned.load_state_dict(model.state_dict() | values_of(paths))
    return tuned.eval()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


def our_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Logits of a window over all tokens from our loader and decoder: [T, V]."""
    made = make_runner(open_checkpoint(directory), slots=2, capacity_tokens=len(tokens), batch=1)
    logits = made.runner.verify([Window(tuple(tokens))], [0]).clone()
    made.close()
    return logits


@torch.no_grad()
def logits_at(model: Any, tokens: list[int], positions: torch.Tensor) -> torch.Tensor:
    """transformers' logits of tokens at any increasing positions: [T, V]."""
    return model(torch.tensor([tokens]), position_ids=positions[None], use_cache=False).logits[0]


def test_named_tensors_come_from_the_deltas_and_all_others_from_the_source(source_dir, deltas):
    source = open_checkpoint(source_dir)
    found, new, old = tensors_of(StretchedCheckpoint(source, deltas)), values_of(deltas), tensors_of(source)
    assert len(new) == 13 and set(found) == set(old)
    for name, tensor in found.items():
        assert torch.equal(tensor, new.get(name, old[name])), name
        assert (name in new) != torch.equal(tensor, old[name]), name


def test_written_files_are_the_fine_tuned_model(source_dir, deltas, tmp_path):
    stretched = StretchedCheckpoint(open_checkpoint(source_dir), deltas, rope=YARN)
    out = convert_to_safetensors(stretched, tmp_path / "out", dtype=torch.float32, max_shard_bytes=200_000)
    expected, written = tuned_model(source_dir, deltas, YARN, 1024), open_checkpoint(out)
    assert written.config() == stretched.config() and written.config().max_position_embeddings == 1024
    assert written.tokenizer().model_max_length == 1024
    assert written.generation_eos() == open_checkpoint(source_dir).generation_eos()
    tokens = random_tokens(100)
    logits = all_logits(expected, tokens)
    assert error(all_logits(AutoModelForCausalLM.from_pretrained(out), tokens), logits) < 1e-6
    assert error(our_logits(out, tokens), logits) < 1e-5
    assert error(all_logits(AutoModelForCausalLM.from_pretrained(source_dir), tokens), logits) > 1e-2


def test_host_arenas_are_filled_without_files(source_dir, deltas, tmp_path):
    stretched = StretchedCheckpoint(open_checkpoint(source_dir), deltas, rope=YARN)
    out = convert_to_safetensors(stretched, tmp_path / "out", dtype=torch.bfloat16)
    direct, read = (load_plain(each, torch.bfloat16) for each in (stretched, open_checkpoint(out)))
    assert direct.config == read.config and direct.layout.total_bytes == read.layout.total_bytes
    for layer in (None, *range(direct.config.num_layers)):
        before, after = direct.views(layer), read.views(layer)
        assert all(torch.equal(before[name].dense, after[name].dense) for name in after), layer
    direct.close()
    read.close()


def widened(source: CheckpointSource, out: Path) -> Path:
    """Written with heads of 128 channels in fp32."""
    return write(WidenedCheckpoint(source, HEADS_OF_128), out)


@pytest.mark.slow
def test_widened_logits_are_the_fine_tuned_models_at_any_length(source_dir, deltas, tmp_path):
    """Before, at and far behind the length that the model had before; at once, and token by token across it."""
    expected = tuned_model(source_dir, deltas, YARN, 1024)
    stretched = StretchedCheckpoint(open_checkpoint(source_dir), deltas, rope=YARN)
    out = widened(stretched, tmp_path / "wide")
    wide = AutoModelForCausalLM.from_pretrained(out)
    for length in (40, 64, 65, 400):
        tokens = random_tokens(length)
        logits = all_logits(expected, tokens)
        assert error(all_logits(wide, tokens), logits) < 1e-5, length
        assert error(our_logits(out, tokens), logits) < 1e-5, length
    tokens = random_tokens(80)
    pieces = [tokens[:50], *([token] for token in tokens[50:])]
    assert error(cached_logits(wide, pieces), cached_logits(expected, pieces)) < 1e-5


def test_widened_logits_are_the_fine_tuned_models_up_to_128k(source_dir, deltas, tmp_path):
    long = rope("yarn", factor=16.0, original_max_position_embeddings=8192) | {"rope_theta": 1e5}
    expected = tuned_model(source_dir, deltas, long, 131072)
    stretched = StretchedCheckpoint(open_checkpoint(source_dir), deltas, rope=long)
    wide = AutoModelForCausalLM.from_pretrained(widened(stretched, tmp_path / "wide"))
    tokens = random_tokens(96)
    for last in (8191, 8192, 131071):
        near, spread = torch.arange(last - 95, last + 1), torch.linspace(0, last, 96).long()
        for positions in (near, spread):
            logits = logits_at(expected, tokens, positions)
            assert error(logits_at(wide, tokens, positions), logits) < 1e-5, positions
    assert error(logits_at(expected, tokens, spread), logits_at(expected, tokens, near)) > 1e-2


def test_widened_angles_are_the_small_models_to_the_last_bit(source_dir, tmp_path):
    """Of our own decoder, whose frequencies do not change with the length, up to 128K tokens."""
    long = rope("yarn", factor=16.0, original_max_position_embeddings=8192) | {"rope_theta": 1e5}
    stretched = StretchedCheckpoint(open_checkpoint(source_dir), rope=long)
    small, wide = (RopeTable(each.config(), CPU) for each in (stretched, WidenedCheckpoint(stretched, HEADS_OF_128)))
    positions = torch.cat([torch.arange(0, 131072, 61), torch.tensor([8191, 8192, 131071])]).int()
    host = positions.tolist()
    for prompt_length in (0, 131072):
        wanted = small.angles(positions, small.row_frequencies(host, prompt_length))
        found = wide.angles(positions, wide.row_frequencies(host, prompt_length))
        assert all(torch.equal(wide_[:, ::2], small_) for wide_, small_ in zip(found, wanted, strict=True))
        assert all(angle.dtype == torch.float32 for angle in found)
    assert wide.frequency_set(131072) == wide.frequency_set(8192) == 0


def test_a_16_bit_checkpoint_keeps_its_frequencies_in_fp32(source_dir, tmp_path):
    stretched = StretchedCheckpoint(open_checkpoint(source_dir), rope=YARN)
    out = convert_to_safetensors(WidenedCheckpoint(stretched, HEADS_OF_128), tmp_path / "wide")
    wide = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    small = tuned_model(source_dir, [], YARN, 1024)
    found, wanted = wide.model.rotary_emb, small.model.rotary_emb
    assert wide.dtype == torch.bfloat16 and found.inv_freq.dtype == torch.float32
    assert torch.equal(found.inv_freq[::2], wanted.inv_freq)
    assert found.attention_scaling == wanted.attention_scaling > 1


def test_what_is_left_out_stays_the_sources(source_dir):
    source = open_checkpoint(source_dir)
    assert StretchedCheckpoint(source).config() == source.config()
    assert StretchedCheckpoint(source, max_position_embeddings=128).config().max_position_embeddings == 128
    theta = source.config().rope_parameters["rope_theta"]
    without_theta = {name: value for name, value in YARN.items() if name != "rope_theta"}
    assert StretchedCheckpoint(source, rope=without_theta).config().rope_parameters["rope_theta"] == theta
    linear = StretchedCheckpoint(source, rope={"rope_type": "linear", "factor": 4.0}).config()
    assert linear.max_position_embeddings == 64 and linear.rope_parameters["factor"] == 4.0
    asked = StretchedCheckpoint(source, rope=YARN, max_position_embeddings=512).config()
    assert asked.max_position_embeddings == 512
    assert source.config().rope_parameters["rope_type"] == "default"  # nothing of the source was touched
    assert source.hf_config.max_position_embeddings == 64


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.layers.3.self_attn.q_proj.weight": torch.zeros(384, 42)}, r"1 of 1 tensors are not in .*layers\.3"),
        ({"transformer.h.0.attn.weight": torch.zeros(3)}, "belongs to another model"),
        ({QUERY: torch.zeros(42, 384)}, r"q_proj.weight has shape \[42, 384\], expected \[384, 42\]"),
        ({QUERY: torch.zeros(384, 42, dtype=torch.int8)}, "stored as I8, and only F64, F32, F16, BF16 are read"),
    ],
)
def test_deltas_of_another_model_are_refused(tensors, message, source_dir, deltas, tmp_path):
    save_file(tensors, tmp_path / "wrong.safetensors")
    with pytest.raises(CheckpointError, match=message):
        StretchedCheckpoint(open_checkpoint(source_dir), [deltas[0], tmp_path / "wrong.safetensors"])


def test_a_tensor_in_two_deltas_is_refused(source_dir, deltas, tmp_path):
    save_file({QUERY: torch.zeros(384, 42)}, tmp_path / "again.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj.weight is in .*delta-1.safetensors and in .*again.safetensors"):
        StretchedCheckpoint(open_checkpoint(source_dir), [*deltas, tmp_path / "again.safetensors"])
    with pytest.raises(CheckpointError, match="give each tensor once"):
        StretchedCheckpoint(open_checkpoint(source_dir), [deltas[0], deltas[0]])


def test_damaged_deltas_are_refused(source_dir, deltas, tmp_path):
    deltas[1].write_bytes(deltas[1].read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="100 bytes are missing"):
        StretchedCheckpoint(open_checkpoint(source_dir), deltas)
    with pytest.raises(CheckpointError, match="cannot be read"):
        StretchedCheckpoint(open_checkpoint(source_dir), [tmp_path / "nowhere.safetensors"])


LONGROPE = rope("longrope", original_max_position_embeddings=64, short_factor=[1.0] * 32, long_factor=[2.0] * 32)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "yarm", "factor": 16.0}, "rope_type 'yarm' is not known: use one of default, linear"),
        ({"factor": 16.0}, "rope_type None is not known"),
        ({"rope_type": "yarn", "factor": 16.0}, "needs original_max_position_embeddings too"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "needs factor too"),
        ({**YARN, "beta_fsat": 16.0}, "of type yarn knows no beta_fsat"),
        ({**YARN, "partial_rotary_factor": 0.5}, "knows no partial_rotary_factor"),
        ({"rope_type": "linear", "factor": 4.0, "beta_fast": 2.0}, "of type linear knows no beta_fast"),
        ({**YARN, "factor": "16"}, "no model has RoPE parameters"),
        ({**YARN, "factor": 0.5}, "no model has RoPE parameters"),
        ({**YARN, "factor": float("inf")}, "no model has RoPE parameters"),
        ({**YARN, "original_max_position_embeddings": None}, "no model has RoPE parameters"),
        ({**YARN, "beta_fast": "fast"}, "no model has RoPE parameters"),
        ({**YARN, "attention_factor": "large"}, "no model has RoPE parameters"),
        ({**YARN, "rope_theta": -1.0}, "no model has RoPE parameters"),
        ({**LONGROPE, "short_factor": [1.0]}, "short_factor is 1 numbers, expected 32"),
    ],
)
def test_rope_parameters_that_make_no_sense_are_refused(parameters, message, source_dir):
    with pytest.raises(OptionError, match=message):
        StretchedCheckpoint(open_checkpoint(source_dir), rope=parameters)


@pytest.mark.parametrize("length", [0, -5])
def test_lengths_that_make_no_sense_are_refused(length, source_dir):
    with pytest.raises(OptionError, match=f"no model has .* {length} positions"):
        StretchedCheckpoint(open_checkpoint(source_dir), max_position_embeddings=length)


def test_rope_parameters_of_the_command_line():
    assert parse_rope(None) is None and parse_rope(json.dumps(YARN)) == YARN
    with pytest.raises(OptionError, match=r"--rope is not valid JSON .* write it like '\{"):
        parse_rope("{'rope_type': 'yarn'}")
    with pytest.raises(OptionError, match="not a JSON object but 16"):
        parse_rope("16")


def run_command(source: Path, out: Path, *others: str) -> subprocess.CompletedProcess[str]:
    """`widen_model.py` as a process."""
    command = [sys.executable, str(ROOT / "tools" / "widen_model.py"), "--source", str(source), "--out", str(out)]
    return subprocess.run([*command, *others], capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_writes_all_or_nothing(source_dir, deltas, tmp_path, monkeypatch, capsys):
    out, given = tmp_path / "out", ("--delta", *map(str, deltas))
    refused = (
        ((*given, "--rope", '{"rope_type": "yarn"}'), "error: a RoPE of type yarn needs factor, original_max_"),
        (("--delta", str(deltas[0]), str(deltas[0])), "give each tensor once"),
    )
    for others, words in refused:
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of this process are pytest's
        monkeypatch.setattr(sys, "argv", ["widen_model", "--source", str(source_dir), "--out", str(out), *others])
        assert widen_model.main() == 2
        assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert not any(path.name not in ("source", *(path.name for path in deltas)) for path in tmp_path.iterdir())

    done = run_command(source_dir, out, *given, "--rope", json.dumps(YARN), "--max-position", "512", "--dtype", "fp32")
    assert done.returncode == 0 and done.stdout.strip() == str(out)
    expected = StretchedCheckpoint(open_checkpoint(source_dir), deltas, rope=YARN, max_position_embeddings=512)
    written, found = tensors_of(open_checkpoint(out)), tensors_of(expected)
    assert open_checkpoint(out).config() == expected.config()
    assert all(torch.equal(written[name], found[name]) for name in found)


def test_what_was_stretched_on_disk_can_be_widened_on_disk(source_dir, deltas, tmp_path, monkeypatch, capsys):
    """The two commands of a benchmark of long contexts, one after the other: the same as both without files."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setitem(SHAPES, "tiny", HEADS_OF_128)
    small, wide = tmp_path / "small", tmp_path / "wide"
    given = ["--source", str(source_dir), "--delta", *map(str, deltas), "--rope", json.dumps(YARN), "--out", str(small)]
    monkeypatch.setattr(sys, "argv", ["widen_model", *given, "--max-position", "1024", "--dtype", "fp32"])
    assert widen_model.main() == 0
    given = ["--source", str(small), "--shape", "tiny", "--noise", "0.05", "--device", "cpu", "--out", str(wide)]
    monkeypatch.setattr(sys, "argv", ["widen_model", *given, "--dtype", "fp32"])
    assert widen_model.main() == 0 and capsys.readouterr().out.split() == [str(small), str(wide)]
    stretched = StretchedCheckpoint(open_checkpoint(source_dir), deltas, rope=YARN, max_position_embeddings=1024)
    expected, written = WidenedCheckpoint(stretched, HEADS_OF_128, 0.05), open_checkpoint(wide)
    assert written.config() == expected.config() and written.config().max_position_embeddings == 1024
    assert written.tokenizer().model_max_length == 1024
    found, wanted = tensors_of(written), tensors_of(expected)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted) and set(found) == set(wanted)
