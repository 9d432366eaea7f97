"""`--draft auto`: a small model beside the target or in the hub's cache drafts, where it would be faster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.cli.app import app
from tests.helpers.engine import (
    PROMPT,
    load,
    one_thread,  # noqa: F401 (an autouse fixture)
    write_checkpoint,
)

CONFIGS = Path(__file__).parent / "data" / "configs"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft of a fortieth, and a directory for both."""
    directory = tmp_path_factory.mktemp("family")
    write_checkpoint(directory / "large", hidden_size=256)
    write_checkpoint(directory / "small", num_layers=1)
    return directory


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's that holds nothing yet."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def placed(family: Path, tmp_path: Path, *, draft: str | None = None) -> Path:
    """The target alone, or with its draft by some name beside it."""
    shutil.copytree(family / "large", tmp_path / "models" / "large")
    if draft is not None:
        shutil.copytree(family / "small", tmp_path / "models" / draft)
    return tmp_path / "models" / "large"


def put_trouble_beside(target: Path, family: Path) -> None:
    """What may lie in a directory of models, and is none that could draft."""
    models = target.parent
    (models / "notes.txt").write_text("nothing")
    (models / "empty").mkdir()
    (models / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    for number in range(12):
        (models / f"half {number}.gguf").write_bytes(b"GGUF\x03")
    for name, file, content in (
        ("truncated", "model.safetensors", (family / "small" / "model.safetensors").read_bytes()[:-9]),
        ("no json", "config.json", b"{"),
        ("images", "config.json", b'{"architectures": ["CLIPModel"], "model_type": "clip"}'),
        ("other text", "tokenizer.json", b'{"model": {"vocab": {"a": 0, "b": 1}}}'),
    ):
        shutil.copytree(family / "small", models / name)
        (models / name / file).write_bytes(content)
    shutil.copytree(family / "large", models / "another of its size")
    (models / "dangling").symlink_to(models / "nowhere")


def test_a_small_model_beside_the_target_drafts(family: Path, tmp_path: Path) -> None:
    target = placed(family, tmp_path, draft="small")
    put_trouble_beside(target, family)
    with load(target) as runtime, load(target, draft="none") as plain:
        assert runtime.plan.draft is not None and "drafting with small" in runtime.placement
        assert runtime.generate(PROMPT, max_new_tokens=12).tokens == plain.generate(PROMPT, max_new_tokens=12).tokens
    with load(target, draft="ngram") as runtime:
        assert runtime.plan.draft is None


def test_a_small_model_in_the_cache_of_the_hub_drafts(family: Path, tmp_path: Path, hub: Path) -> None:
    repository = hub / "models--org--small"
    shutil.copytree(family / "small", repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    with load(placed(family, tmp_path)) as runtime:
        assert runtime.plan.draft is not None and "drafting with org/small" in runtime.placement


def test_nothing_that_lies_there_ends_the_loading(family: Path, tmp_path: Path, hub: Path) -> None:
    hub.mkdir()
    (hub / "models--org--half").write_text("no directory")
    target = placed(family, tmp_path)
    put_trouble_beside(target, family)
    with load(target) as runtime:
        assert runtime.plan.draft is None
        assert runtime.generate(PROMPT, max_new_tokens=3).finish_reason == "length"


def run_plan(capsys: pytest.CaptureFixture[str], target: Path, *options: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        app(["plan", "--target", str(target), "--profile", "rtx4090", "--context", "4096", "--json", *options])
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    assert "draft" not in told.err  # the answer comes first
    return json.loads(told.out)


@pytest.mark.slow
def test_a_plan_finds_it_too_and_says_what_it_brings(
    family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By configurations and tokenizers alone; without a vocabulary to compare nothing is taken."""
    for name in ("qwen2.5-32b", "qwen2.5-0.5b"):
        shutil.copytree(CONFIGS / name, tmp_path / name)
    record = run_plan(capsys, tmp_path / "qwen2.5-32b")
    assert record["draft_cache"] is None
    assert "from the text itself; Qwen2.5-0.5B-Instruct beside the target would draft better" in record["draft_note"]
    for name in ("qwen2.5-32b", "qwen2.5-0.5b"):
        shutil.copy(family / "small" / "tokenizer.json", tmp_path / name)
    record = run_plan(capsys, tmp_path / "qwen2.5-32b")
    assert record["draft_cache"] is not None and "drafting with qwen2.5-0.5b, predicted to be " in record["draft_note"]


@pytest.mark.parametrize("downloaded", [True, False])
def test_a_draft_without_its_weights_is_not_promised(
    downloaded: bool, family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = placed(family, tmp_path, draft="small")
    if not downloaded:
        (target.parent / "small" / "model.safetensors").unlink()
    note = run_plan(capsys, target, "--context", "64")["draft_note"]
    assert (note is not None and "small" in note) is downloaded
