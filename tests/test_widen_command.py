"""Widened checkpoints on disk: complete or not there at all, whatever stops the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import widen_model
from widening.convert import convert_to_safetensors

from offload_runtime.errors import OptionError, StorageError
from offload_runtime.weights import open_checkpoint
from tests.helpers.engine import byte_level_tokenizer
from tests.helpers.widening import GQA, WidenedCheckpoint, small_model, tensors_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def source_dir(tmp_path: Path) -> Path:
    """An untied model with a tokenizer."""
    directory = tmp_path / "source"
    tokenizer = byte_level_tokenizer()
    small_model(vocab_size=len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_written_files_are_complete_and_carry_the_tokenizer(source_dir, tmp_path):
    seen: list[tuple[int, int]] = []
    widened = WidenedCheckpoint(open_checkpoint(source_dir), GQA)
    out = convert_to_safetensors(widened, tmp_path / "out", on_progress=lambda *pair: seen.append(pair))
    written = open_checkpoint(out)
    assert written.config() == widened.config() and written.native_dtype == torch.bfloat16
    assert written.tokenizer().get_vocab() == open_checkpoint(source_dir).tokenizer().get_vocab()
    assert written.generation_eos() == open_checkpoint(source_dir).generation_eos()
    assert seen[-1][0] == seen[-1][1] == sum(2 * tensor.numel() for tensor in tensors_of(widened).values())
    with pytest.raises(OptionError, match="exists already"):
        convert_to_safetensors(widened, out)


def test_too_little_disk_is_told_before_anything_is_computed(source_dir, tmp_path, monkeypatch):
    source = open_checkpoint(source_dir)
    unread = replace(source, fills=dict.fromkeys(source.fills, lambda out: pytest.fail("computed a tensor")))
    widened = WidenedCheckpoint(unread, GQA)
    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("usage", "total used free")(10**9, 10**9, 10**6))
    with pytest.raises(StorageError, match=r"needs 6\d\.\d MB and 1\.0 MB is free"):
        convert_to_safetensors(widened, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# The command with a shape that this machine can hold, slowed down so that a signal meets it in the middle.
TINY_COMMAND = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
delay_s = float(sys.argv.pop(1))
from dataclasses import replace
from functools import partial
import widen_model
from offload_runtime.weights import open_checkpoint
from widening.shapes import SHAPES, WideShape
SHAPES["tiny"] = WideShape(80, 130, 5, 16, 4, 24)
def slowly(name, fill, out):
    print(name, flush=True)
    time.sleep(delay_s)
    fill(out)
def open_source(reference):
    source = open_checkpoint(reference)
    return replace(source, fills={name: partial(slowly, name, fill) for name, fill in source.fills.items()})
widen_model.open_source = open_source
sys.exit(widen_model.main())
"""


def command(source: Path, out: Path, *, delay_s: float = 0.0) -> list[str]:
    """`widen_model.py` as a process."""
    return [
        sys.executable, "-c", TINY_COMMAND, str(ROOT / "tools"), str(delay_s), "--source", str(source), "--shape",
        "tiny", "--device", "cpu", "--out", str(out), "--noise", "0.05",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no signals of that kind there")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_command_leaves_nothing(number, source_dir, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(source_dir, out, delay_s=0.2), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell starts us with it ignored
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline()
    assert any(path.name.startswith(".out.partial") for path in tmp_path.iterdir())
    process.send_signal(number)
    assert process.wait(60) != 0
    process.stdout.close()
    assert not out.exists()
    if number == signal.SIGKILL:  # nobody could clean up, and the next run goes through all the same
        subprocess.run(command(source_dir, out), check=True, capture_output=True)
        assert open_checkpoint(out).config().num_layers == GQA.num_layers
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.fixture
def refusal(
    source_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the command in this process with options that it must refuse; returns its last line."""

    def run(*words: str) -> str:
        given = ["--source", str(source_dir), "--device", "cpu", "--out", str(tmp_path / "out"), *words]
        monkeypatch.setattr(sys, "argv", ["widen_model.py", *given])
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of this process are pytest's
        assert widen_model.main() == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    return run


def test_errors_of_the_command_are_one_line(refusal):
    assert refusal("--shape", "llama9").startswith("error: shape 'llama9' is not known: use one of llama2-7b")


def test_a_random_draft_has_the_shape_and_the_vocabulary(source_dir, tmp_path, monkeypatch):
    """What costs time is there and finite, and it drafts for whatever has the source's tokenizer."""
    given = ["--source", str(source_dir), "--device", "cpu", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["widen_model.py", *given, "--shape", "llama-68m", "--random"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of this process are pytest's
    assert widen_model.main() == 0
    written, source = open_checkpoint(tmp_path / "out"), open_checkpoint(source_dir)
    found, asked = written.config(), source.config()
    assert (found.hidden_size, found.intermediate_size, found.num_layers) == (768, 3072, 2)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (12, 12, 64)
    assert (found.vocab_size, found.max_position_embeddings) == (asked.vocab_size, asked.max_position_embeddings)
    assert written.tokenizer().get_vocab() == source.tokenizer().get_vocab()
    assert written.generation_eos() == source.generation_eos()
    for name, tensor in tensors_of(written).items():
        mean, std = float(tensor.mean()), float(tensor.std())
        assert 0.018 < std < 0.022 and abs(mean - (tensor.dim() == 1)) < 0.005, name


def test_a_random_draft_ignores_no_option(refusal):
    for others in (("--noise", "0.1"), ("--max-position", "4096")):
        said = refusal("--shape", "llama-68m", "--random", *others)
        assert "--random has no use for --noise, --delta, --rope and --max-position" in said


def test_a_command_that_would_make_nothing_is_refused(refusal):
    assert "nothing would be made" in refusal()
    assert "--noise and --random are of a --shape" in refusal("--max-position", "256", "--noise", "0.1")
