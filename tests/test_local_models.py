"""Models that are here, in the hub's cache, ollama's and LM Studio's folders: listed, named in place of paths, fetched
and deleted."""

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import gguf
import httpx
import pytest
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.local import local_models
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers import engine
from tests.helpers.hosts import free_port
from tests.helpers.server import asked_and_stopped
from tests.test_weights_gguf import build, write

REVISION = "0" * 40


def run(*words: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [*words], input=input)


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
    demo = tmp_path / "cache" / "tiny.Q4_1.gguf"
    demo.parent.mkdir()
    shutil.copy(file, demo)
    monkeypatch.setenv("OFFLOAD_RUNTIME_CACHE", str(demo.parent))
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
    found = {one["name"]: one for one in json.loads(run("list", "--profile", "rtx4090", "--json").stdout)["models"]}
    owners = {name: one["owner"] for name, one in found.items()}
    assert owners == {
        "tiny.Q4_1": "demo",
        "org/plain": "hub", "org/files:Q4_K_M": "hub", "org/files:Q8_0": "hub", "org/mamba": "hub",
        "maker/tiny-GGUF:Q8_0": "LM Studio", "small:1b": "ollama", "small:latest": "ollama",
        "hf.co/org/s:Q8_0": "ollama",
    }  # fmt: skip
    runs = found["small:1b"]
    assert (runs["family"], runs["bytes"], runs["stored_as"]) == ("Llama", made[1].stat().st_size, ["Q8_0"])
    assert runs["tok_per_s"] > 10 and runs["refusal"] is None
    assert "Mamba layers" in found["org/mamba"]["refusal"] and found["org/mamba"]["tok_per_s"] is None
    assert "is truncated by 9 bytes" in found["maker/tiny-GGUF:Q8_0"]["refusal"]
    screen = run("list")
    assert screen.exit_code == 0 and "no profile of this machine is kept" in screen.stdout
    assert "org/mamba: " in screen.stdout and "does not run" in screen.stdout and "9 models, " in screen.stdout


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
    planned = run("plan", "--target", "small", "--draft", "plain", "--profile", "rtx4090", "--json")
    assert planned.exit_code == 2 and "vocabulary" in planned.stderr  # both were found
    assert "Mamba layers" in run("plan", "--target", "mamba", "--profile", "rtx4090").stderr


def test_nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "nowhere"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "offload-runtime pull org/name:Q4_K_M" in run("list").stdout


# --- fetched and deleted

_FAMILY = b"".join(struct.pack("<Q", len(word)) + word + kind for word, kind in (
    (b"general.architecture", struct.pack("<I", gguf.GGUFValueType.STRING)), (b"llama", b""),
))  # fmt: skip
# The hub's client writes pieces of 10 MiB.
CONTENT = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _FAMILY + bytes(23 << 20)


class Hub(BaseHTTPRequestHandler):
    """A server that speaks the hub's protocol and has one repository; the first answer with a large file stops in the
    middle of it."""

    files: ClassVar = {"m-Q4_K_M.gguf": CONTENT, "m-Q8_0.gguf": CONTENT, "README.md": b"small"}
    digests: ClassVar = {"m-Q4_K_M.gguf": sha256(CONTENT).hexdigest(), "m-Q8_0.gguf": "1" * 64}  # the last is wrong
    asked_for: ClassVar[list[tuple[str, str]]] = []  # large files, and from where on

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, start = self.path.partition("?")[0], 0
        if path.startswith("/api/"):
            listed = [self._described(name) for name in self.files]
            is_tree = "/tree/" in path
            of_repository = {"id": "org/files", "sha": REVISION, "siblings": listed}
            self._send(json.dumps(listed if is_tree else of_repository).encode(), {})
            return
        name = path.rpartition("/")[2]
        content, digest = self.files[name], self.digests.get(name, "2" * 40)
        if self.command == "GET" and name in self.digests:
            asked = self.headers.get("Range", "bytes=0-")
            start = int(asked.removeprefix("bytes=").split("-")[0])
            self.asked_for.append((name, asked))
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": REVISION, "X-Linked-Etag": f'"{digest}"'}
        self._send(content, headers, start, half=self.command == "GET" and len(self.asked_for) == 1)

    def _described(self, name: str) -> dict[str, object]:
        size, digest = len(self.files[name]), self.digests.get(name)
        lfs = {} if digest is None else {"lfs": {"sha256": digest, "oid": digest, "size": size, "pointerSize": 130}}
        return {"type": "file", "path": name, "rfilename": name, "size": size, "oid": "2" * 40, **lfs}

    def _send(self, content: bytes, headers: dict[str, str], start: int = 0, half: bool = False) -> None:
        self.send_response(206 if start else 200)
        total = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        for key, value in {**headers, **total, "Content-Length": str(len(content) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start : len(content) // 2 if half else None])
            if half:
                self.rfile.read(1)  # until the other side is gone

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def pull(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Begin `pull` in a process of its own, which fetches from a local hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*",
           "HF_HUB_CACHE": str(tmp_path / "hub"), "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip

    def begin(model: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "offload_runtime", "pull", model]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env={**os.environ, **own}, stdout=pipe, stderr=pipe, text=True)

    yield begin
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_pull_that_was_killed_goes_on(pull: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    first, partial = pull("org/files:Q4_K_M"), tmp_path / "hub/models--org--files/blobs"
    partial /= Hub.digests["m-Q4_K_M.gguf"] + ".part"
    while not (partial.exists() and partial.stat().st_size):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.kill()
    first.communicate()
    begun = partial.stat().st_size
    out, err = pull("https://hf.co/org/files:q4_k_m").communicate()
    assert Path(out.strip()).read_bytes() == CONTENT and "is here, 24.1 MB of weights" in err, err
    assert Hub.asked_for == [("m-Q4_K_M.gguf", "bytes=0-"), ("m-Q4_K_M.gguf", f"bytes={begun}-")] and begun > 0
    wrong = pull("org/files:Q8_0")
    out, err = wrong.communicate()
    assert wrong.returncode == 2 and out == "" and f"not {'1' * 64}, and was deleted: fetch it again" in err
    out, err = pull("org/files").communicate()
    assert "error: org/files has GGUF files, of Q4_K_M, Q8_0: name one, as org/files:Q4_K_M" in err


def test_models_of_the_hub_are_deleted(home: Path) -> None:
    hub = home / "hub"
    kept = run("rm", "org/plain", input="\n")
    assert kept.exit_code == 2 and "Delete org/plain, all that is here of it (" in kept.stderr
    assert "org/plain" in names() and run("rm", "plain", input="y\n").exit_code == 0
    assert run("rm", "files:q8_0", "--yes").exit_code == 0 and "org/files:Q4_K_M" in names()  # its neighbour stays
    assert run("rm", "https://huggingface.co/org/files", "-y").exit_code == 0
    assert run("rm", "org/described", "-y").exit_code == 0  # of which only a configuration is here
    assert sorted(path.name for path in hub.iterdir()) == ["models--org--mamba"]
    assert run("rm", "tiny.Q4_1", "-y").exit_code == 0 and not (home / "cache" / "tiny.Q4_1.gguf").exists()
    for name, why in (("small:1b", "`ollama rm small:1b`"), ("tiny-gguf", "LM Studio's: delete it there"),
                      ("org/plain", "no model that is here is called org/plain")):  # fmt: skip
        refused = run("rm", name, "-y")
        assert refused.exit_code == 2 and why in " ".join(refused.stderr.split())
    assert names() == {"org/mamba", "maker/tiny-GGUF:Q8_0", "small:1b", "small:latest", "hf.co/org/s:Q8_0"}


def names() -> set[str]:
    return {one.name for one in local_models()}


@pytest.mark.parametrize("named", [[], ["--target", "org/plain", "--keep-alive", "5m"]])
def test_a_server_has_what_is_named_or_all_that_run(home: Path, named: list[str]) -> None:
    port = free_port()
    listed = list[Any]()

    def ask(url: str) -> None:
        listed.extend(httpx.get(f"{url}/v1/models", trust_env=False).json()["data"])

    with asked_and_stopped(port, ask):
        result = run("serve", *named, "--device", "cpu", "--port", str(port))
    assert result.exit_code == 0, result.stderr
    assert "org/plain" in [one["id"] for one in listed] and {one["x_status"] for one in listed} == {"unloaded"}
    assert ("org/mamba is left out: " in result.stderr) == (not named)


def test_a_server_without_any_model_says_what_to_do(home: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "hub")
    shutil.rmtree(tmp_path / ".ollama", ignore_errors=True)
    for place in (".lmstudio", ".cache"):
        shutil.rmtree(tmp_path / place, ignore_errors=True)
    refused = run("serve", "--device", "cpu")
    assert refused.exit_code == 2 and "no model is here that runs: fetch one" in refused.stderr
