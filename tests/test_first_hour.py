"""What somebody meets who plans for a model of their own: a draft to get, a card that others use, files as they lie."""

from __future__ import annotations

import json
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
        ({}, "1B such as Llama-3.2-1B-Instruct in Q8_0 (1.3 GB)"),
        ({"vocab_size": 131072}, "1B of the same vocabulary (if any) in Q8_0 (1.3 GB)"),
    ],
)
def test_the_note_and_the_gains_name_one_draft(tmp_path: Path, settings: dict[str, object], named: str) -> None:
    told = plan(changed(tmp_path, "llama-3.1-70b", num_hidden_layers=8, **settings), "--resident-layers", "4")
    assert told.exit_code == 0, told.output
    assert f"--draft MODEL, {named} " in told.stdout
    assert ("Llama-3.2-1B-Instruct beside the target" in told.stdout) == (not settings)
