"""Replicas of Ray Serve: `examples/ray_serve.py` as people run it, with a replica killed amid their requests."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import openai
import psutil
import pytest

from offload_runtime import Runtime
from tests.helpers.hosts import free_port
from tests.test_cli_process import ROOT, environment

pytest.importorskip("ray", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.slow
TARGET = "deep_target"
SUBJECTS = ["the quick brown fox", "a link, a layer", "on and on", "a ring of buffers"]
ASKED = 200


@pytest.fixture
def served(target: Path, tmp_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The endpoint of two replicas, and the process that has started them."""
    port = free_port()
    words = [str(ROOT / "examples" / "ray_serve.py"), str(target), "--device", "cpu", "--draft", "ngram"]
    words += ["--sessions", str(tmp_path / "sessions"), "--port", str(port)]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, env=environment(tmp_path)) as it:
        try:
            assert it.stdout is not None
            assert any(line.startswith("ready: ") for line in it.stdout)
            yield f"http://127.0.0.1:{port}/v1", psutil.Process(it.pid)
        finally:
            it.send_signal(signal.SIGINT)
            it.wait(60)


def replicas_of(process: psutil.Process) -> list[psutil.Process]:
    return [one for one in process.children(recursive=True) if "ServeReplica:default:Replica" in "".join(one.cmdline())]


@pytest.mark.timeout(600)
def test_a_replica_is_killed_amid_requests(served: tuple[str, psutil.Process], target: Path) -> None:
    """Every answer is the model's own but those that the replica was writing as a stream, which say that it is gone.
    There are two again afterwards, and a conversation goes where it was."""
    url, process = served
    texts = [f"{SUBJECTS[number % 4]} {number}" for number in range(20)]
    with Runtime.load(target, device="cpu", draft="none") as runtime:
        expected = [
            runtime.generate([{"role": "user", "content": text}], max_new_tokens=12, temperature=0.0).text
            for text in texts
        ]
    client, begun = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120), count()
    first = replicas_of(process)
    assert len(first) == 2

    def ask(number: int) -> tuple[int, str | None]:
        if next(begun) == ASKED // 2:
            os.kill(first[0].pid, signal.SIGKILL)
        stream, asked = number % 3 == 0, [{"role": "user", "content": texts[number % 20]}]
        try:
            given = client.chat.completions.create(
                model=target.name,
                messages=asked,
                max_tokens=12,
                temperature=0.0,
                stream=stream,  # type: ignore[call-overload]
            )
            if not stream:
                return number, given.choices[0].message.content
            return number, "".join(piece.choices[0].delta.content or "" for piece in given if piece.choices)
        except openai.APIError as error:
            assert stream and re.search("replica that was answering is gone", str(error)), error
            return number, None

    with ThreadPoolExecutor(8) as pool:
        answers = dict(pool.map(ask, range(ASKED)))
    lost = [number for number, answer in answers.items() if answer is None]
    assert len(lost) < 8  # those that were under way
    assert all(answers[number] == expected[number % 20] for number in answers if number not in lost)
    again = [
        client.chat.completions.create(
            model=target.name, messages=[{"role": "user", "content": texts[0]}], max_tokens=2, temperature=0.0
        )
        for _ in range(3)
    ]
    assert all(one.choices[0].x_stats["kept_tokens"] for one in again[1:])  # type: ignore[attr-defined]
    while len(replicas_of(process)) < 2:
        client.models.list()
