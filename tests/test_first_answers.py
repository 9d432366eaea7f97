"""What a new user meets first: refusals without torch, threads, `repr` and `dir`, help of examples, an early end."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from typer.testing import CliRunner

import offload_runtime
from offload_runtime import Runtime
from offload_runtime.cli.app import app
from offload_runtime.verify import QUICK, VerificationReport, verify
from tests.helpers.engine import PROMPT, raising

ROOT = Path(__file__).resolve().parents[1]
CONFIG = str(ROOT / "tests" / "data" / "configs" / "llama-3.1-8b")
# One process answers all of them: nothing heavy is imported by any.
ASKED = """
import json, runpy, sys
from offload_runtime.cli.app import app
for words in json.loads(sys.argv[1]):
    sys.argv = words
    try:
        app(words) if words[0] != "python" else runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        print("ended with", end.code)
print("HEAVY", sorted({"torch", "transformers", "prompt_toolkit"} & set(sys.modules)))
"""
UNKNOWN_FAMILY = {"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}
ANSWERS = {
    "--help": "Commands",
    "generate --help": "--threads",
    f"plan --target {CONFIG} --profile rtx9999": "there is no profile 'rtx9999'",
    f"generate --target {CONFIG} --prompt x --profile rtx9999": "there is no profile 'rtx9999'",
    f"plan --target {CONFIG} --contxt 3": "No such option",
    "plan --target UNKNOWN --profile rtx4090": "NoSuchForCausalLM",
    "generate --target UNKNOWN --prompt x": "NoSuchForCausalLM",
    "verify --target UNKNOWN": "NoSuchForCausalLM",
    "generate --target UNKNOWN/files/nosuch.gguf --prompt x": "model_type 'nosuch' has layers",
    f"plan --target {CONFIG} --draft UNKNOWN/files/nosuch.gguf --profile rtx4090": "nosuch.gguf: model_type 'nosuch'",
    "serve --target nowhere/there/is": "nowhere/there/is does not exist",
    "chat --target ./missing.gguf": "missing.gguf does not exist",
    "generate --target ./missing --prompt x --threads 0": "--threads 0 is not 1 to ",
    "generate --target ./missing --prompt x --threads 99999": "--threads 99999 is not 1 to ",
}


def test_what_needs_no_torch_is_answered_without_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(UNKNOWN_FAMILY))
    keys = b"".join(struct.pack("<Q", len(text)) + text for text in (b"general.architecture", b"nosuch"))
    keys = keys.replace(b"architecture", b"architecture\x08\0\0\0", 1)  # a string
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "nosuch.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + keys)
    asked = [words.replace("UNKNOWN", str(tmp_path)).split() for words in ANSWERS]
    examples = sorted((ROOT / "examples").glob("*.py"))
    asked += [["python", str(path), "--help"] for path in examples]
    command = [sys.executable, "-c", ASKED.replace("sys.argv = words", "sys.argv = words[words[0] == 'python':]")]
    result = subprocess.run([*command, json.dumps(asked)], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "HEAVY []"
    for said in ANSWERS.values():
        assert said in result.stdout + result.stderr
    ends = [line.split()[-1] for line in result.stdout.splitlines() if line.startswith("ended with")]
    assert ends == ["0" if "--help" in words else "2" for words in asked]
    assert result.stdout.count("usage: ") == len(examples) > 4


def test_threads_are_those_that_torch_computes_with(target: Path) -> None:
    before = torch.get_num_threads()
    command = ["generate", "--target", str(target), "--device", "cpu", "--prompt", "the quick", "--max-new-tokens", "2"]
    try:
        torch.set_num_threads(2)
        assert CliRunner().invoke(app, [*command, "--threads", "1"]).exit_code == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_what_is_printed_of_objects_is_short_and_says_what_they_are(target: Path) -> None:
    with Runtime.load(target, device="cpu") as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=3, ignore_eos=True)
        assert repr(runtime).startswith("<Runtime: LlamaForCausalLM of 5 layers") and "fp32 on cpu" in repr(runtime)
        assert "3 tokens (length)" in repr(result) and "tokens/s" in repr(result)
        assert "+ 3 tokens, first after " in repr(result.stats)
        assert all(len(repr(one)) < 200 for one in (runtime, result, result.stats))
    assert "closed" in repr(runtime)
    assert {"Runtime", "GenerationResult", "SamplingParams", "__version__"} <= set(dir(offload_runtime))


def test_verification_that_is_stopped_reports_what_there_is(target: Path) -> None:
    with Runtime.load(target, device="cpu", context=256) as runtime:
        report = verify(runtime, replace(QUICK, tokens=8), on_progress=raising(KeyboardInterrupt(), after=1))
    assert isinstance(report, VerificationReport) and report.interrupted
    assert len(report.runs) == 2 and not report.fits and report.verdict == "exact"
