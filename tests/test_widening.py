"""A small model inside a large shape says the same, so does a sparse fine-tune, and files are whole or not there."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import widen_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from widening.convert import convert_to_safetensors
from widening.shapes import shape_named
from widening.stretched import StretchedCheckpoint

from offload_runtime.errors import CheckpointError, OptionError, StorageError, UnsupportedArchitectureError
from offload_runtime.weights import open_checkpoint
from tests.helpers.assembly import in_memory
from tests.helpers.engine import byte_level_tokenizer
from tests.helpers.models import all_logits, random_tokens
from tests.helpers.widening import (
    GQA,
    MHA,
    SAME_HEADS,
    WidenedCheckpoint,
    WideShape,
    rope,
    small_model,
    tensors_of,
    write,
)  # fmt: skip

TOKENS = random_tokens(40)
LONG = rope("yarn", factor=16.0, original_max_position_embeddings=8192) | {"rope_theta": 1e5}
HEADS_OF_128 = WideShape(96, 160, 4, 12, 12, 128)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


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
def delta(source_dir: Path, tmp_path: Path) -> Path:
    """New queries, keys and norms."""
    generator = torch.Generator().manual_seed(11)
    new = {
        name: old * (1 + 0.3 * torch.randn(old.shape, generator=generator)) * (0.5 if "q_proj" in name else 1.0)
        for name, old in tensors_of(open_checkpoint(source_dir)).items()
        if any(word in name for word in ("q_proj", "k_proj", "norm"))
    }
    save_file(new, tmp_path / "delta.safetensors")
    return tmp_path / "delta.safetensors"


@pytest.mark.parametrize(("shape", "tied"), [(MHA, True), (GQA, False), (SAME_HEADS, False)])
def test_the_logits_are_the_small_models(shape: WideShape, tied: bool, tmp_path: Path) -> None:
    model = small_model(tie_word_embeddings=tied)
    wide = AutoModelForCausalLM.from_pretrained(write(WidenedCheckpoint(in_memory(model), shape), tmp_path / "wide"))
    assert wide.config.hidden_size == shape.hidden_size and wide.config.num_hidden_layers == shape.num_layers
    assert error(all_logits(wide, TOKENS), all_logits(model, TOKENS)) < 1e-5


def test_noise_is_the_small_models_and_moderate(tmp_path: Path) -> None:
    """The shape does not matter to the noise, and more noise moves the logits further."""
    model = small_model()
    source, expected, found = in_memory(model), all_logits(model, TOKENS), dict[tuple[str, float], torch.Tensor]()
    for noise in (0.001, 0.02):
        for name, shape in (("mha", MHA), ("gqa", GQA)):
            out = write(WidenedCheckpoint(source, shape, noise), tmp_path / f"{name}-{noise}")
            found[name, noise] = all_logits(AutoModelForCausalLM.from_pretrained(out), TOKENS)
        assert error(found["mha", noise], found["gqa", noise]) < 1e-5
    assert 1e-4 < error(found["mha", 0.001], expected) < 0.05
    assert error(found["mha", 0.02], expected) > 3 * error(found["mha", 0.001], expected)


def test_a_fine_tune_is_applied_and_widened_up_to_128k(source_dir: Path, delta: Path, tmp_path: Path) -> None:
    source, new = open_checkpoint(source_dir), load_file(delta)
    stretched = StretchedCheckpoint(source, [delta], rope=LONG)
    old = tensors_of(source)
    for name, tensor in tensors_of(stretched).items():
        assert torch.equal(tensor, new.get(name, old[name])), name
    model = AutoModelForCausalLM.from_pretrained(source_dir)
    config = copy.deepcopy(model.config)
    config.rope_parameters, config.max_position_embeddings = dict(LONG), 131072
    tuned: Any = type(model)(config)
    tuned.load_state_dict(model.state_dict() | new)
    wide = AutoModelForCausalLM.from_pretrained(write(WidenedCheckpoint(stretched, HEADS_OF_128), tmp_path / "wide"))
    assert wide.config.max_position_embeddings == 131072

    @torch.no_grad()
    def logits(which: Any, positions: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = which(torch.tensor([TOKENS]), position_ids=positions[None], use_cache=False).logits[0]
        return found

    for last in (39, 8192, 131071):
        for positions in (torch.arange(last - 39, last + 1), torch.linspace(0, last, 40).long()):
            assert error(logits(wide, positions), logits(tuned.eval(), positions)) < 1e-5, positions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size 32, less than the source's 42"),
        ({"num_heads": 4, "num_kv_heads": 4}, "num_heads 4, less than the source's 6"),
        ({"head_dim": 20}, "heads of 8 channels do not divide heads of 20"),
        ({"num_heads": 6, "num_kv_heads": 3}, "need 4 KV heads of 2 query heads each, and the shape has 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        WidenedCheckpoint(in_memory(small_model()), replace(MHA, **changes))


def test_models_shapes_and_noise_that_make_no_sense_are_refused() -> None:
    dynamic = in_memory(small_model(rope_parameters=rope("dynamic", factor=2.0)))
    with pytest.raises(UnsupportedArchitectureError, match=r"'dynamic'.*from 8 to 32.*set yarn"):
        WidenedCheckpoint(dynamic, MHA)
    with pytest.raises(OptionError, match=r"llama9.*use one of llama2-7b"):
        shape_named("llama9")
    with pytest.raises(OptionError, match="noise must be 0 or a positive"):
        WidenedCheckpoint(in_memory(small_model()), MHA, float("nan"))


QUERY, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"transformer.h.0.attn.weight": torch.zeros(3)}, "belongs to another model"),
        ({UP: torch.zeros(42, 72)}, r"up_proj.weight has shape \[42, 72\], expected \[72, 42\]"),
        ({UP: torch.zeros(72, 42, dtype=torch.int8)}, "stored as I8, and only F64, F32, F16, BF16 are read"),
        ({QUERY: torch.zeros(384, 42)}, "give each tensor once"),
    ],
)
def test_deltas_of_another_model_are_refused(
    tensors: dict[str, torch.Tensor], message: str, source_dir: Path, delta: Path, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "wrong.safetensors")
    with pytest.raises(CheckpointError, match=message):
        StretchedCheckpoint(open_checkpoint(source_dir), [delta, tmp_path / "wrong.safetensors"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "yarm", "factor": 16.0}, "rope_type 'yarm' is not known: use one of default, linear"),
        ({"rope_type": "yarn", "factor": 16.0}, "needs original_max_position_embeddings too"),
        ({**LONG, "beta_fsat": 16.0}, "of type yarn knows no beta_fsat"),
        ({**LONG, "factor": "16"}, "no model has RoPE parameters"),
        ({**LONG, "factor": 0.5}, "no model has RoPE parameters"),
        ({**LONG, "beta_fast": "fast"}, "no model has RoPE parameters"),
    ],
)
def test_rope_parameters_that_make_no_sense_are_refused(
    parameters: dict[str, Any], message: str, source_dir: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        StretchedCheckpoint(open_checkpoint(source_dir), rope=parameters)


def test_too_little_disk_is_told_before_anything_is_computed(source_dir: Path, tmp_path: Path) -> None:
    """A shape of terabytes, of which nobody ever makes a number."""
    huge = replace(HEADS_OF_128, num_layers=200, intermediate_size=1 << 29)
    with pytest.raises(StorageError, match=r"needs \d+\.\d TB and .* is free on that disk"):
        convert_to_safetensors(WidenedCheckpoint(open_checkpoint(source_dir), huge), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def command(source_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command in this process."""

    def run(*words: str) -> int:
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of this process are pytest's
        return widen_model.main(
            ["--source", str(source_dir), "--device", "cpu", "--out", str(tmp_path / "out"), *words]
        )

    return run


def test_a_random_draft_has_the_shape_and_the_vocabulary(
    command: Callable[..., int], source_dir: Path, tmp_path: Path
) -> None:
    assert command("--shape", "llama-68m", "--random") == 0
    written, source = open_checkpoint(tmp_path / "out"), open_checkpoint(source_dir)
    found = written.config()
    heads = found.attention
    assert (found.hidden_size, found.num_layers, heads.num_heads, heads.head_dim) == (768, 2, 12, 64)
    assert written.tokenizer().get_vocab() == source.tokenizer().get_vocab()
    assert written.generation_eos() == source.generation_eos()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "llama9"], "shape 'llama9' is not known"),
        (["--shape", "llama-68m", "--random", "--noise", "0.1"], "--random has no use for --noise"),
        ([], "nothing would be made"),
        (["--rope", "{'rope_type': 'yarn'}"], "--rope is not valid JSON"),
        (["--max-position", "256", "--noise", "0.1"], "--noise and --random are of a --shape"),
    ],
)
def test_errors_of_the_command_are_one_line(
    words: Sequence[str], message: str, command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*words) == 2 and not (tmp_path / "out").exists()
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
