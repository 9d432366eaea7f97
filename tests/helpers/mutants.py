"""Runs tests against copies of the packages, each in a process of its own.

Importing torch and transformers takes longer than the tests do, so it is done once: this file is also the program of a
process that has them loaded, knows nothing of our packages, and forks for every copy.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("offload_runtime", "kernels", "profiles", "tests", "pyproject.toml")
_PRELOADED = (
    "pytest", "hypothesis", "numpy", "torch", "triton", "triton.runtime.interpreter", "transformers",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2", "tokenizers",
)  # fmt: skip
_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """How tests ended: pytest's exit code, node ids by result, files of our modules that were imported, all output."""

    exit_code: int
    passed: list[str]
    failed: list[str]
    modules: list[str]
    output: str


def copy_of_packages(directory: Path, *, path: str = "", old: str = "", new: str = "") -> Path:
    """Copy packages and tests to `directory`, with one piece of one file replaced.

    Raises:
        ValueError: `old` does not occur exactly once in `path`.
    """
    if path:
        text = (ROOT / path).read_text()
        if (count := text.count(old)) != 1:
            raise ValueError(
                f"{old.strip()!r} occurs {count} times in {path} and must occur once: the code has changed, so change "
                "the mutation in tests/mutations.py with it"
            )
    for name in _COPIED:
        # With their compiled files, which the times of the sources, copied too, keep valid.
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name)
        else:
            shutil.copy2(ROOT / name, directory / name)
    (directory / "tools").symlink_to(ROOT / "tools")
    if path:
        broken = directory / path
        broken.write_text(text.replace(old, new))
        for compiled in (broken.parent / "__pycache__").glob(f"{broken.stem}.*"):
            compiled.unlink()
    return directory


class TestProcess:
    """The process that forks; started by the first run and ended by `close`."""

    __test__ = False

    def __init__(self) -> None:
        own = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        others = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH", "COV_"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT.anchor,
            env={**others, **own},
        )  # fmt: skip

    def run(self, directory: Path, tests: Sequence[str]) -> Outcome:
        """Run some tests of a copy."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(directory), list(tests)]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that runs the tests has died"
        return Outcome(**json.loads(line))

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def _serve() -> None:
    """For every line of stdin a fork that runs its tests, and a line on stdout with how they ended."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.freeze()  # what is loaded stays, so that no child has to look through it
    for line in sys.stdin:
        directory, tests = json.loads(line)
        output, result = Path(directory) / "output.txt", Path(directory) / "result.json"
        child = os.fork()
        if not child:
            _run_in_child(directory, tests, output, result)
        os.waitpid(child, 0)
        said = {"exit_code": -1, "passed": [], "failed": [], "modules": []}
        if result.exists():
            said = json.loads(result.read_text())
        print(json.dumps({**said, "output": output.read_text(errors="replace")}), flush=True)


def _run_in_child(directory: str, tests: list[str], output: Path, result: Path) -> None:
    """Run pytest in this process, write how it went, and end."""
    import signal

    import pytest

    signal.alarm(_SECONDS)  # a mutant may wait for ever; its process then ends without a result
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(directory)
    by_result: dict[str, list[str]] = {"passed": [], "failed": []}

    class Recorder:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed or (report.when == "call" and report.passed):
                by_result[report.outcome].append(report.nodeid)

    # Looking for what nobody caught collects all of torch's garbage thrice, which takes half a second.
    without = [word for name in ("cacheprovider", "xdist", "unraisableexception") for word in ("-p", f"no:{name}")]
    options = ["-q", "--hypothesis-profile=unshrunk", *without, "--disable-warnings", "--rootdir", directory]
    code = pytest.main([*options, "-c", "pyproject.toml", *tests], plugins=[Recorder()])
    modules = [str(module.__file__) for name, module in sys.modules.items() if name.startswith("offload_runtime")]
    result.write_text(json.dumps({"exit_code": int(code), **by_result, "modules": modules}))
    sys.stdout.flush()
    os._exit(0)  # without the parent's own endings


if __name__ == "__main__":
    sys.path.pop(0)  # this directory's modules are `tests.helpers`, not at the top
    _serve()
