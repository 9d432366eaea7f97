"""What is published: an archive of the sources and a wheel that is built from it have all that they need, and install
and answer in clean environments of the oldest and the newest Python."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_runtime.engine import Runtime
from tests.helpers.engine import PROMPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[1]
LOCAL = (".*", "*.egg-info", "build", "dist", "__pycache__", "tests")


def ran(*words: object, **variables: str) -> str:
    """What a program prints, away from this checkout and from the user's files."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in words], env={**environment, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The archive of the sources, and the wheel that is made of what is in it."""
    home = tmp_path_factory.mktemp("archives")
    shutil.copytree(ROOT, home / "src", ignore=shutil.ignore_patterns(*LOCAL))
    ran(sys.executable, "-m", "venv", home / "venv")
    ran(home / "venv/bin/pip", "install", "--quiet", "build")
    ran(home / "venv/bin/python", "-m", "build", "--outdir", home / "dist", home / "src")
    return {path.suffix: path for path in (home / "dist").iterdir()}


def test_archives_have_the_packages_and_their_data(archives: dict[str, Path]) -> None:
    packages = {"offload_runtime": "offload_runtime", "kernels/offload_runtime_kernels": "offload_runtime_kernels",
                "profiles": "offload_runtime_profiles"}  # fmt: skip
    needed = {
        f"{name}/{path.relative_to(ROOT / folder)}": path.relative_to(ROOT).as_posix()
        for folder, name in packages.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(archives[".whl"]) as wheel:
        assert not needed.keys() - set(wheel.namelist())
        assert wheel.read("offload_runtime/py.typed") == b""
    with tarfile.open(archives[".gz"]) as sources:
        assert not set(needed.values()) - {name.partition("/")[2] for name in sources.getnames()}


@pytest.fixture
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter of a version: one that is found by its name, pyenv's, or uv's."""
    version = request.param
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [f"python{version}", *sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)]
    if uv := shutil.which("uv"):
        asked = subprocess.run([uv, "python", "find", "--no-python-downloads", version], capture_output=True, text=True)
        found += asked.stdout.split()
    for name in found:
        try:
            subprocess.run([name, "-c", "import ensurepip, ssl"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):  # not there, or pyenv's stand-in for one that is not chosen
            continue
        return str(name)
    pytest.skip(f"needs Python {version} with pip and ssl, by its name, in pyenv or in uv")


@pytest.fixture
def clean(python: str, tmp_path: Path) -> Iterator[Path]:
    """A new environment, deleted afterwards: with a GPU's libraries it takes five gigabytes."""
    ran(python, "-m", "venv", tmp_path / "venv")
    yield tmp_path / "venv/bin"
    shutil.rmtree(tmp_path / "venv")


@pytest.mark.installs
@pytest.mark.parametrize(("python", "kind"), [("3.10", ".gz"), ("3.13", ".whl")], indirect=["python"])
def test_it_installs_and_answers(
    clean: Path, kind: str, archives: dict[str, Path], two_layer_target: Path, tmp_path: Path
) -> None:
    ran(clean / "pip", "install", "--quiet", "--no-compile", f"{archives[kind]}[server]")
    ran(clean / "pip", "check")
    home = {"HOME": str(tmp_path), "OFFLOAD_RUNTIME_CONFIG": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = clean / "offload-runtime"
    version = ran(run, "--version", **home).split()[1]
    assert archives[kind].name.startswith(f"offload_runtime-{version}")
    words = ["--target", two_layer_target, "--device", "cpu", "--max-new-tokens", "8", "--ignore-eos", "--json"]
    said = json.loads(ran(run, "generate", "--prompt", PROMPT, *words, **home))
    with Runtime.load(two_layer_target, device="cpu") as runtime:
        assert said["tokens"] == runtime.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens
    assert "[serve]" in ran(run, "serve", "--target", two_layer_target, "--print-config", **home)
    ran(clean / "python", "-c", "from offload_runtime.server.app import Server", **home)
