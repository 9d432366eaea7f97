"""What somebody meets who plans for a model of their own: a draft to get, a card that others use, files as they lie."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from offload_runtime.weights import describe_model, usual_draft

CONFIGS = Path(__file__).parent / "data" / "configs"


def plan(target: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--target", str(target), "--profile", "rtx4090", *options])


def changed(tmp_path: Path, name: str, **settings: object) -> Path:
    """A configuration with other settings."""
    (tmp_path / "model").mkdir()
    stated = json.loads((CONFIGS / name / "config.json").read_text()) | settings
    (tmp_path / "model" / "config.json").write_text(json.dumps(stated))
    return tmp_path / "model"


QWEN_3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("base", "settings", "size", "name"),
    [
        ("llama-3.1-70b", {}, "1B", "Llama-3.2-1B-Instruct"),
        ("qwen2.5-32b", {}, "0.5B", "Qwen2.5-0.5B-Instruct"),
        ("qwen2.5-32b", QWEN_3, "0.6B", "Qwen3-0.6B"),
        ("llama-2-13b", {}, "1B", "TinyLlama-1.1B-Chat-v1.0"),
        ("llama-3.1-8b", {"vocab_size": 49152}, "0.1B", "SmolLM2-135M-Instruct"),
        ("llama-3.1-70b", {"vocab_size": 32768, **MISTRAL}, "7B", "Mistral-7B-Instruct-v0.3"),
        ("llama-3.1-8b", {"vocab_size": 32000}, "1B", None),  # Mistral-7B as GGUF, whose tokens are not Llama 2's
        ("qwen2.5-32b", {"vocab_size": 131072, **MISTRAL}, "1B", None),
    ],
)
def test_a_family_has_its_usual_draft(
    tmp_path: Path, base: str, settings: dict[str, object], size: str, name: str | None
) -> None:
    draft = usual_draft(describe_model(changed(tmp_path, base, **settings)))
    assert draft is not None and (draft.size, draft.name) == (size, name)
    assert usual_draft(describe_model(CONFIGS / "llama-3.2-1b")) is None  # no draft pays for a model that is small


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "1B such as Llama-3.2-1B-Instruct (1.3 GB)"),
        ({"vocab_size": 131072}, "1B of the same vocabulary (if any) (1.3 GB)"),
    ],
)
def test_the_note_and_the_gains_name_one_draft(tmp_path: Path, settings: dict[str, object], named: str) -> None:
    told = plan(changed(tmp_path, "llama-3.1-70b", num_hidden_layers=8, **settings), "--resident-layers", "4")
    assert told.exit_code == 0, told.output
    assert f"--draft MODEL, {named} " in told.stdout
    assert ("Llama-3.2-1B-Instruct beside the target" in told.stdout) == (not settings)


def cut(path: Path, content: bytes, *names: str) -> None:
    """Write a file as pieces of these names, with no header each."""
    size = -(-len(content) // len(names))
    for number, name in enumerate(names):
        path.with_name(name).write_bytes(content[number * size : (number + 1) * size])


@pytest.mark.parametrize(
    ("names", "given"),
    [
        (["m.gguf.part1of2", "m.gguf.part2of2"], "m.gguf.part1of2"),
        (["m.gguf.part1of2", "m.gguf.part2of2"], "m.gguf.part2of2"),
        (["m.gguf-split-a", "m.gguf-split-b"], "m.gguf"),
        (["m.gguf.aa", "m.gguf.ab", "m.gguf.ac"], "m.gguf.ab"),
        ([f"m.gguf.{number}" for number in range(8, 12)], "."),
    ],
)
def test_pieces_of_a_file_are_put_together_first(tmp_path: Path, names: list[str], given: str) -> None:
    cut(tmp_path / "m.gguf", b"GGUF" + bytes(range(200)), *names)
    told = plan(tmp_path / given)
    assert told.exit_code == 2 and f"`cd {tmp_path} && cat {' '.join(names)} > m.gguf`" in told.stderr


def test_pieces_that_are_not_there_are_counted(tmp_path: Path) -> None:
    (tmp_path / "m.gguf.part1of3").write_bytes(b"GGUF\3")
    assert "of which 2 are not there: finish the download" in plan(tmp_path / "m.gguf.part1of3").stderr
    (tmp_path / "n.gguf.1").write_bytes(b"GGUF\3")  # as wget calls what it fetches again
    assert "is damaged" in plan(tmp_path / "n.gguf.1").stderr


@pytest.mark.parametrize(
    "given", ["", "models", "models/blobs", "models/manifests/registry.ollama.ai/library/llama3.2/1b"]
)
def test_a_directory_of_ollama_says_which_file_is_a_model(tmp_path: Path, given: str) -> None:
    manifests, blobs = tmp_path / "models" / "manifests", tmp_path / "models" / "blobs"
    blobs.mkdir(parents=True)
    for maker, model, tag in (("library", "llama3.2", "1b"), ("someone", "mine", "latest")):
        directory = manifests / "registry.ollama.ai" / maker / model
        directory.mkdir(parents=True)
        layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{kind}{tag}"}
                  for kind in ("template", "model")]  # fmt: skip
        (directory / tag).write_text(json.dumps({"layers": layers}))
    for name, content in (("broken", "{"), ("without a model", '{"layers": []}')):
        (manifests / name).write_text(content)
    told = plan(tmp_path / given)
    assert told.exit_code == 2 and f"llama3.2:1b is {blobs / 'sha256-model1b'}" in told.stderr
    assert ("mine:latest is " in told.stderr) == (not given.endswith("1b"))


def test_what_a_draft_costs_is_compared_with_none(tmp_path: Path) -> None:
    """One that takes the layers' room makes a run slower than it would be by itself."""
    large, small = CONFIGS / "llama-3.1-8b", changed(tmp_path, "llama-3.2-1b", vocab_size=151936)
    told = plan(large, "--draft", str(large), "--context", "2048")
    assert told.exit_code == 0 and re.search(r"; (4\d|5\d) tokens/s without a draft\.", told.stdout), told.stdout
    assert re.search(r"^ ?--draft ngram +(4|5)\d ", told.stdout, flags=re.MULTILINE)
    assert "the draft's tokens are the target's is taken for granted" in told.stdout
    other = plan(large, "--draft", str(small))
    assert other.exit_code == 2 and "151936 logits and the target 128256" in other.stderr
