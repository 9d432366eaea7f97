"""Models that are here, in the hub's cache, ollama's and LM Studio's folders: listed, and named in place of paths."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers import engine
from tests.test_weights_gguf import build, write

REVISION = "0" * 40


def told(*words: str) -> Result:
    return CliRunner().invoke(app, [*words])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and a GGUF file."""
    directory = tmp_path_factory.mktemp("made")
    return engine.write_checkpoint(directory / "plain"), write(directory / "m.gguf", build(), kind="Q8_0")


@pytest.fixture
def home(made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a model or two of each program, and one of a family that does not run."""
    plain, file = made
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("org--plain", "org--files", "org--mamba", "org--described"):
        repository = tmp_path / "hub" / f"models--{name}"
        snapshot = repository / "snapshots" / REVISION
        shutil.copytree(plain, snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION)
        if name == "org--mamba":
            (snapshot / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
        if name in ("org--files", "org--described"):
            (snapshot / "model.safetensors").unlink()
        for tag in ("Q4_K_M", "Q8_0") if name == "org--files" else ():
            shutil.copy(file, snapshot / f"files-{tag}.gguf")
            shutil.copy(file, snapshot / "mmproj-F16.gguf")
    studio = tmp_path / ".lmstudio" / "models" / "maker" / "tiny-GGUF"
    studio.mkdir(parents=True)
    (studio / "tiny-Q8_0.gguf").write_bytes(file.read_bytes()[:-9])
    ollama = tmp_path / ".ollama" / "models"
    for path in ("registry.ollama.ai/library/small/1b", "registry.ollama.ai/library/small/latest", "hf.co/org/s/Q8_0"):
        manifest = ollama / "manifests" / path
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{manifest.name}"}
        manifest.write_text(json.dumps({"layers": [layer]}))
        (ollama / "blobs").mkdir(exist_ok=True)
        shutil.copy(file, ollama / "blobs" / f"sha256-{manifest.name}")
    return tmp_path


def test_models_of_all_programs_are_listed(home: Path, made: tuple[Path, Path]) -> None:
    found = {one["name"]: one for one in json.loads(told("list", "--profile", "rtx4090", "--json").stdout)["models"]}
    owners = {name: one["owner"] for name, one in found.items()}
    assert owners == {
        "org/plain": "hub", "org/files:Q4_K_M": "hub", "org/files:Q8_0": "hub", "org/mamba": "hub",
        "maker/tiny-GGUF:Q8_0": "LM Studio", "small:1b": "ollama", "small:latest": "ollama",
        "hf.co/org/s:Q8_0": "ollama",
    }  # fmt: skip
    runs = found["small:1b"]
    assert (runs["family"], runs["bytes"], runs["stored_as"]) == ("Llama", made[1].stat().st_size, ["Q8_0"])
    assert runs["tok_per_s"] > 10 and runs["refusal"] is None
    assert "Mamba layers" in found["org/mamba"]["refusal"] and found["org/mamba"]["tok_per_s"] is None
    assert "is truncated by 9 bytes" in found["maker/tiny-GGUF:Q8_0"]["refusal"]
    screen = told("list")
    assert screen.exit_code == 0 and "no profile of this machine is kept" in screen.stdout
    assert "org/mamba: " in screen.stdout and "does not run" in screen.stdout and "8 models, " in screen.stdout


@pytest.mark.parametrize(("name", "where"), [
    ("plain", "hub/models--org--plain"), ("Files:q8_0", "files-Q8_0.gguf"), ("files-Q4_K_M", "files-Q4_K_M.gguf"),
    ("small", "blobs/sha256-latest"), ("small:1b", "sha256-1b"), ("hf.co/org/s:Q8_0", "sha256-Q8_0"),
    ("maker/tiny-GGUF:Q8_0", r"tiny-Q8_0\.gguf is damaged"), ("nothing", "a name of `offload-runtime list`"),
    ("files", r"2 of the models that are here \(org/files:Q4_K_M, org/files:Q8_0\): give one's whole name"),
])  # fmt: skip
def test_a_name_stands_for_a_path(home: Path, name: str, where: str) -> None:
    if " " in where:
        with pytest.raises(CheckpointError, match=where):
            open_checkpoint(name)
    else:
        assert where in str(open_checkpoint(name).stored[0].path)


def test_commands_take_names(home: Path) -> None:
    planned = told("plan", "--target", "small", "--draft", "plain", "--profile", "rtx4090", "--json")
    assert planned.exit_code == 2 and "vocabulary" in planned.stderr  # both were found
    assert "Mamba layers" in told("plan", "--target", "mamba", "--profile", "rtx4090").stderr


def test_nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "nowhere"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "offload-runtime pull org/name:Q4_K_M" in told("list").stdout
