"""A small model inside a large shape says the same, so does a sparse fine-tune, and files are whole or not there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import widen_model
from transformers import AutoModelForCausalLM
from widening.checkpoint import widened_head

from offload_runtime.weights import open_checkpoint
from tests.helpers.assembly import in_memory, make_runner
from tests.helpers.engine import byte_level_tokenizer
from tests.helpers.families import family_model
from tests.helpers.heads import Eagle3, Mtp, run_head, tapped, write_mtp
from tests.helpers.models import all_logits, random_tokens
from tests.helpers.widening import (
    GQA,
    MHA,
    OF_FAMILY,
    SAME_HEADS,
    WidenedCheckpoint,
    WideShape,
    small_model,
    write,
)  # fmt: skip

TOKENS = random_tokens(40)


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


@pytest.mark.parametrize(("shape", "tied"), [(MHA, True), (GQA, False), (SAME_HEADS, False)])
def test_the_logits_are_the_small_models(shape: WideShape, tied: bool, tmp_path: Path) -> None:
    model = small_model(tie_word_embeddings=tied)
    wide = AutoModelForCausalLM.from_pretrained(write(WidenedCheckpoint(in_memory(model), shape), tmp_path / "wide"))
    assert wide.config.hidden_size == shape.hidden_size and wide.config.num_hidden_layers == shape.num_layers
    assert error(all_logits(wide, TOKENS), all_logits(model, TOKENS)) < 1e-5


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether logits are as good as the same, with the same tokens left out."""
    known = other.isfinite()
    return torch.equal(one.isfinite(), known) and error(one[known], other[known]) < 1e-4


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_heads_guess_the_same_beside_the_widened_model(kind: str, tmp_path: Path) -> None:
    model = family_model("llama", 0)
    source = open_checkpoint(write_mtp(tmp_path / "small", Mtp.of("llama", model, 0), "qwen", "mtp_num_hidden_layers"))
    wide = open_checkpoint(write(WidenedCheckpoint(source, OF_FAMILY), tmp_path / "wide"))
    if kind == "mtp":
        heads = [source.read_mtp(), wide.read_mtp()]
    else:
        eagle = Eagle3.of(model, size=40, taps=(0, 1, 2), draft_vocab=30).write(tmp_path / "eagle")
        small_head = open_checkpoint(eagle, draft=True)
        heads = [small_head, widened_head(small_head, OF_FAMILY)]
    models = [model, AutoModelForCausalLM.from_pretrained(tmp_path / "wide")]
    said = list[list[torch.Tensor]]()
    for one, of_target, head_source in zip(models, (source, wide), heads, strict=True):
        target = make_runner(of_target)
        head = make_runner(head_source, target=target.runner)
        with torch.no_grad():
            states = one(torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False).hidden_states
        streams = [state[0] for state in states]
        kept = streams[-1] if kind == "mtp" else tapped(head, streams)
        logits, given = run_head(head, TOKENS[1:], kept[:-1])
        said.append([logits, run_head(head, TOKENS[2:], given[:-1])[0]])
        head.close()
        target.close()
    assert len(said[0][0]) == len(TOKENS) - 1
    assert all(close(ours, theirs) for ours, theirs in zip(*reversed(said), strict=True))


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
