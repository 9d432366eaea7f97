"""`offload-runtime bench`: a row for each length and who answers, beside llama.cpp's benchmark, here one that only says
how it was asked."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from offload_runtime.cli.llama_bench import LlamaBench, fewest_on_cpu
from offload_runtime.cli.options import BenchOptions
from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import BudgetError, OffloadError
from tests.helpers.engine import byte_level_tokenizer
from tests.test_weights_gguf import write

ROOT = Path(__file__).resolve().parents[1]
SPEEDS = {"prompt": 1000.0, "answer": 10.0}
LLAMA_BENCH = f"""#!{sys.executable}
import json, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(__file__ + ".log", "a") as log:
    log.write(json.dumps(words) + chr(10))
tests = []
for prompt in words["-p"].split(","):
    for depth in words.get("-d", "0").split(","):
        about = {{"build_commit": "abc", "backends": "CPU", "gpu_info": ""}}
        about |= {{"n_prompt": int(prompt), "n_depth": int(depth)}}
        speed = {SPEEDS["prompt"]} if words["-n"] == "0" else {SPEEDS["answer"]}
        tests.append(about | {{"n_gen": int(words["-n"]), "avg_ts": speed + int(depth) / 1000}})
print(json.dumps(tests))
"""


@pytest.fixture(scope="module")
def model(short_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a GGUF file, with its tokenizer beside it."""
    directory = tmp_path_factory.mktemp("benched")
    tokenizer = byte_level_tokenizer()
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    target = transformers.LlamaForCausalLM.from_pretrained(short_target)
    write(directory / "m.gguf", target, vocabulary={"model": "none", "tokens": words})
    tokenizer.save_pretrained(directory)
    return directory / "m.gguf"


@pytest.fixture
def llama_bench(tmp_path: Path) -> Path:
    program = tmp_path / "llama-bench"
    program.write_text(LLAMA_BENCH)
    program.chmod(0o755)
    return program


def bench(model: Path, *words: object) -> Result:
    sizes = ["--device", "cpu", "--tokens", 3, "--repeats", 1, "--no-progress"]
    return CliRunner().invoke(app, [str(word) for word in ("bench", "--target", model, *sizes, *words)])


def test_it_measures_lengths_plainly_and_with_a_draft_beside_llama_cpp(
    model: Path, llama_bench: Path, tmp_path: Path
) -> None:
    out, profile = tmp_path / "bench.json", tmp_path / "card.toml"
    # A card's own figures say nothing of a CPU.
    profile.write_text((ROOT / "profiles" / "rtx4090.toml").read_text().replace("NVIDIA ", "Not "))
    words = ("--prompt-tokens", "40,16", "--compare", "--llama-bench", llama_bench, "--out", out)
    result = bench(model, *words, "--json", "--draft", "ngram", "--profile", profile, "--resident-layers", 2)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads(out.read_text())
    rows = [(row["prompt_tokens"], row["by"]) for row in found["rows"]]
    assert rows == [(length, by) for length in (16, 40) for by in ("plain", "n-grams", "llama.cpp")]
    for row in found["rows"]:
        assert row["prompt_tok_per_s"] > 0 and row["tok_per_s"] > 0
        known = ("predicted_prompt_tok_per_s", "predicted_tok_per_s", "tokens_per_pass", "link_share", "memory_share")
        assert all((row[name] is None) == (row["by"] == "llama.cpp") for name in known)
    assert [row["tok_per_s"] for row in found["rows"] if row["by"] == "llama.cpp"] == [10.016, 10.04]
    assert found["differing"] == 0 and found["context_tokens"] == 256 and found["peak_device_bytes"] > 0
    prompts, answers = map(json.loads, Path(f"{llama_bench}.log").read_text().splitlines())
    assert (prompts["-p"], prompts["-n"], prompts["-ngl"]) == ("16,40", "0", "0") and prompts["-m"] == str(model)
    assert (answers["-p"], answers["-n"], answers["-d"], answers["-r"]) == ("0", "3", "16,40", "1")


def test_its_table_has_what_was_measured(model: Path) -> None:
    result = bench(model, "--prompt-tokens", 16, "--draft", "none")
    (row,) = [line.split() for line in result.stdout.splitlines() if line.split()[:2] == ["16", "plain"]]
    assert len(row) == 5 and all(float(figure) > 0 for figure in row[2:]) and "n-grams" not in result.stdout


@pytest.mark.parametrize(("words", "message"), [
    (["--prompt-tokens", "0"], "--prompt-tokens 0 is no list of lengths"),
    (["--prompt-tokens", "16;32"], "--prompt-tokens 16;32 is no list of lengths"),
    (["--prompt-tokens", "2K"], "take 2051 tokens, and the model has 512: lower"),
    (["--context", "64"], "prompts and answers take 4099 tokens"),
    (["--llama-bench", "x"], "--llama-bench does nothing without --compare"),
    (["--compare", "--llama-bench", "no-such-program"], "no-such-program is no program"),
    (["--out", "/"], "is not a regular file"), (["--tokens", "1"], "--tokens must be at least 2"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(model: Path, words: list[str], message: str) -> None:
    result = bench(model, *words)
    assert result.exit_code == 2 and message in result.stderr and "loaded " not in result.stderr


def test_llama_cpp_reads_gguf_files_alone(short_target: Path, llama_bench: Path) -> None:
    result = bench(short_target, "--compare", "--llama-bench", llama_bench)
    assert result.exit_code == 2 and "llama.cpp reads GGUF files" in result.stderr


CPU: Any = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(num_layers=5))


@pytest.mark.parametrize("said", ["", "[]"])
def test_a_llama_bench_of_another_kind_is_told(model: Path, llama_bench: Path, said: str) -> None:
    llama_bench.write_text(f"#!/bin/sh\necho '{said}'\n")
    asked = BenchOptions(config=RuntimeConfig(str(model)), prompt_tokens="16", tokens=4)
    with pytest.raises(OffloadError, match="llama-bench printed"):
        LlamaBench.found(llama_bench, str(model)).measure(CPU, asked, 10**9)


@pytest.mark.parametrize(("fits", "options"), [(99, ["-ngl", "6"]), (2, ["-ngl", "2"])])
def test_a_run_that_fails_has_too_many_layers_on_the_card(
    model: Path, llama_bench: Path, fits: int, options: list[str]
) -> None:
    failing = f"if int(words['-ngl']) > {fits}: sys.exit('out of memory')\n"
    llama_bench.write_text(LLAMA_BENCH.replace("tests = []\n", f"{failing}tests = []\n"))
    asked = BenchOptions(config=RuntimeConfig(str(model)), prompt_tokens="16", tokens=4)
    found = LlamaBench.found(llama_bench, str(model)).measure(CPU, asked, 10**9)
    assert found.about["options"] == options and found.tok_per_s == {16: 10.016}
    llama_bench.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(BudgetError, match=r"llama\.cpp does not fit 1\.0 GB of device memory"):
        LlamaBench.found(llama_bench, str(model)).measure(CPU, asked, 10**9)


@pytest.mark.parametrize("fixed", [0, 3, 11, 40])
@pytest.mark.parametrize("each", [1, 7, 13])
@pytest.mark.parametrize("guess", [1, 7, 13])
def test_as_many_layers_are_on_the_card_as_fit(fixed: int, each: int, guess: int) -> None:
    """By what trying says, whatever was guessed of a layer's size."""
    count, limit = 10, 50
    asked = list[int]()

    def probe(on_cpu: int) -> int:
        asked.append(on_cpu)
        return fixed + each * (count - on_cpu)

    fits = [on_cpu for on_cpu in range(count + 1) if fixed + each * (count - on_cpu) <= limit]
    found: Any = fewest_on_cpu(probe, count, count, guess, limit)
    assert found in fits and len(asked) == len(set(asked)) <= 8
    assert found == fits[0] or guess != each
