"""Another rank of a run, as a process of its own that serves one run after the other."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from offload_runtime.config import RuntimeConfig
from offload_runtime.engine import Runtime

LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
_ANSWER_S = 60.0


def rank_environment(rank: int, size: int, port: int, *, has_store: bool = False) -> dict[str, str]:
    """What torchrun sets for a rank; as here, but where it `has_store` the first rank makes the store."""
    found = {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    return {**found, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"} if has_store else found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class OtherRank:
    """A process that is another rank than this one."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.helpers.hosts"]
        root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join([str(root), str(root / "kernels"), *sys.path])
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lines = SimpleQueue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def start(self, rank: int, size: int, port: int, *, has_store: bool = False, **options: Any) -> None:
        """Let it be a rank of a run."""
        assert self.process.stdin is not None
        about = rank_environment(rank, size, port, has_store=has_store)
        self.process.stdin.write(json.dumps([about, options]) + "\n")
        self.process.stdin.flush()

    def ended(self) -> str:
        """What it has said at the end of a run: nothing, or its error."""
        try:
            return self._lines.get(timeout=_ANSWER_S)
        except Empty:
            raise AssertionError("the other rank goes on") from None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def first_rank(
    others: list[OtherRank], target: Path, *, theirs: Any = None, size: int = 0, port: int = 0, **options: Any
) -> Iterator[Runtime]:
    """A runtime on the CPU that shares layers with other ranks, to which options of their own may be given."""
    size, port = size or len(others) + 1, port or free_port()
    common = {"device": "cpu", "interface": LOOPBACK, "host_timeout_s": 10.0, **options}
    own = {name: value for name, value in common.items() if name != "draft"}
    for rank, one in enumerate(others, 1):
        one.start(rank, size, port, **{"target": str(target), **own, **(theirs or {})})
    before = dict(os.environ)
    os.environ.update(rank_environment(0, size, port))
    try:
        with Runtime.load(target, **common) as runtime:
            yield runtime
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Be the rank that each line of stdin says, one after the other."""
    import torch

    from offload_runtime.engine.load import serve_own_layers
    from offload_runtime.errors import OffloadError

    torch.set_num_threads(1)
    for line in sys.stdin:
        environment, options = json.loads(line)
        os.environ.update(environment)
        said = ""
        try:
            serve_own_layers(RuntimeConfig(**options), say=lambda text: None)
        except OffloadError as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(said, flush=True)


if __name__ == "__main__":
    main()
