"""Every tool: its help, a tiny run on a CPU that ends with a JSON line, and what the user has got wrong in one line;
and a head that a tool has trained guesses more than an untrained one."""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_streaming
import compare
import pytest
import torch
import train_head
from safetensors.torch import load_file, save_file

from tests.helpers.engine import PROMPT, load, write_book, write_checkpoint

pytestmark = pytest.mark.no_cover  # of the runtime it runs what others run
ROOT = Path(__file__).resolve().parents[1]
TARGET = "long_target"
TOOLS = (
    "bench_copy", "bench_drafters", "bench_experts", "bench_hosts", "bench_hybrids", "bench_kernels",
    "bench_long_context", "bench_models", "bench_serving", "bench_streaming", "check_exactness", "check_identity",
    "compare", "sweep", "timeline", "train_head", "widen_model",
)  # fmt: skip
ON_CPU, IN_BF16 = ("--device", "cpu", "--dtype", "fp32"), ("--dtype", "bf16")  # where experts take a third as long
TINY = ("--shape", "tiny", *ON_CPU, "--repeats", "1", "--prompt-tokens", "12", "--new-tokens", "6")
SHORT = ("--tokens", "6", "--plain-tokens", "4")


def call(name: str, *words: object, **others: Any) -> int:
    """A tool's `main`."""
    code: int = importlib.import_module(name).main([str(word) for word in words], **others)
    return code


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(chr(97 + 7 * number % 23) for number in range(900)))
    return path


@pytest.fixture(scope="module")
def models(target: Path, text: Path) -> list[object]:
    """The options of tools over a long context: a target that is the draft itself, and what it reads."""
    return ["--source", target, "--shape", "none", "--text", text, "--context", 300, "--budget", 64, *ON_CPU, *SHORT]


def here(system: Any, common: Sequence[str], own: dict[str, Sequence[str]], **_: object) -> dict[str, Any]:
    """Measure a system in this process."""
    given = [option for name in system.takes for option in own.get(name, ())]
    out = Path(common[common.index("--commit") + 1])
    module = importlib.import_module(system.script.removesuffix(".py"))
    before, sys.argv = sys.argv, [system.script, *common, *given, *system.options, "--out", str(out)]
    try:
        assert module.main() == 0
    finally:
        sys.argv = before
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON line that a tool ends with."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("name", TOOLS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(name, "--help")
    assert ended.value.code == 0 and f"python tools/{name}.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("bench_copy", ["rest", "--source", "a", "--text", "b", "--bits", "4,9"], "--bits (4, 9) are not all 2 to 8"),
        ("bench_drafters", ["--source", "a", "--text", "no-text", "--device", "cpu"], "no-text cannot be read"),
        ("bench_hosts", ["--device", "cpu", "--parts", "two"], "--parts 'two' is not known: choose of hosts, one"),
        ("bench_kernels", ["softmax"], "invalid choice: 'softmax'"),
        ("bench_kernels", ["experts_cpu", "--only", "Q9_K"], "--only 'Q9_K' is in the name of none of MXFP4, Q4_K"),
        ("bench_long_context", ["--source", "no-model", "--text", "no-text", "--device", "cpu"], "no-model"),
        ("bench_models", ["--models", "tiny", "--device", "cpu"], "--models are two or more different ones"),
        ("bench_serving", ["--shape", "tiny", "--device", "cpu", "--disconnects", "2"], "a share from 0 to 1"),
        ("bench_streaming", ["--systems", "theirs"], "unknown system 'theirs'"),
        ("check_identity", ["--against", "no-file.json"], "no-file.json cannot be read"),
        ("compare", ["--synthetic", "tiny", "--device", "cpu", "--timeout", "0"], "--timeout must be at least 1"),
        ("sweep", ["colour", "--source", "a", "--text", "b"], "invalid choice: 'colour'"),
        ("timeline", ["no-trace.json"], "no-trace.json cannot be read"),
        ("train_head", ["mtp", "--source", "no-model", "--text", "a", "--checkpoint", "x", "--taps", "1"], "of eagle3"),
        ("widen_model", ["--source", "no-model", "--shape", "tiny", "--out", "x"], "no-model"),
        ("widen_model", ["--shape", "tiny", "--random", "--out", "x"], "give --stored, --vocab-size, --max-position"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    name: str, words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if name == "timeline":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert call(name, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "given", "runtimes"), [
    ("tiny-hybrid", (), 1),
    ("tiny-gpt-oss", (*IN_BF16, "--layers", 1, "--stored", "mxfp4", "--pools", "1,0.5", "--cpu-shares", "1"), 2),
])  # fmt: skip
def test_exactness(shape: str, given: tuple[object, ...], runtimes: int, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--vocab-size", 256, "--turns", 1, "--answers", 1, "--prompts", 1, "--tokens", 2)
    sizes += ("--prompt-tokens", "20,40")
    assert call("check_exactness", "--shape", shape, *ON_CPU, *sizes, *given) == 0
    found = [[(part["name"], part["answers"]) for part in one["parts"]] for one in printed(capsys)["runtimes"]]
    alone = [("turns", 1), ("answers", 1), ("prompts", 1), ("tokens", 4)]
    assert found == [alone, [*alone, ("runtimes", 3)]][:runtimes]


@pytest.mark.slow
def test_pools_of_experts_are_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--prompts", 8, "--tokens", 4, "--warm-up", 2, "--context", 128)
    pools = ("--pools", "auto,300KB", "--cpu-shares", 0, "--trace", tmp_path / "trace.json")
    assert call("bench_experts", "--shape", "tiny-gpt-oss", *ON_CPU, *IN_BF16, *pools, *sizes) == 0
    assert {one.name for one in tmp_path.iterdir()} == {"0-trace.json", "1-trace.json"}
    whole, some = json.loads(capsys.readouterr().out.splitlines()[-1])["pools"]
    assert whole["expert_hit_rate"] is None and 0 == whole["bytes_per_pass"] < some["bytes_per_pass"]


def test_kernels_need_a_gpu_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert call("bench_kernels", "attention") == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_streaming_measures_windows_scripts_and_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*TINY, "--systems", "ours", "--windows", "1,4", "--passes", "1", "--scripted", "2"]
    given += ["--scripted-window", "4", "--commit", str(tmp_path / "ours.json"), "--out", str(tmp_path / "all.json")]
    bench_streaming.main(given, run=here)
    found = printed(capsys)
    assert found == json.loads((tmp_path / "all.json").read_text())
    ours = found["results"]["ours"]
    assert [row["window_tokens"] for row in ours["windows"]] == [1, 4]
    assert all(row["pass_bytes"] == ours["bytes_per_pass"] for row in ours["windows"])
    (scripted,) = ours["scripted"]
    assert scripted["identical_to_plain"] and scripted["tokens_per_pass"] == 2
    assert ours["start"]["peak_rss_bytes"] > 0 and ours["start"]["stages_s"]["target weights"] > 0
    assert ours["tokens_per_pass"] == 1 and len(ours["tokens"][0]) == 6 and not ours["differing_generations"]


@pytest.mark.slow
def test_systems_are_compared(target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", target, "--draft", target, "--gamma", 3, "--prompt-file", text, "--prompt-tokens", 20]
    given += [*ON_CPU, "--new-tokens", 8, "--repeats", 1, "--vram", "all", "--resident-layers", 1]
    given += ["--systems", "ours-plain,ours,resident"]
    words = [str(word) for word in (*given, "--commit", tmp_path / "one.json", "--out", tmp_path / "all.json")]
    assert compare.main(words, run=here) == 0
    found = printed(capsys)
    plain, ours, resident = (found["results"][name] for name in ("ours-plain", "ours", "resident"))
    assert plain["tokens"] == ours["tokens"] == resident["tokens"], "greedy tokens in fp32 are everyone's"
    assert found["agreement"]["systems"]["ours"]["leading"] == [8]
    assert plain["tokens_per_pass"] == resident["tokens_per_pass"] == 1 < ours["tokens_per_pass"]
    assert plain["streamed"]["weights"] > 0 == resident["bytes_per_pass"]
    assert ours["speculation"]["levels"][-1]["verified_by"] == "target"


@pytest.mark.slow
def test_systems_run_in_processes_of_their_own(tmp_path: Path) -> None:
    given = ["--synthetic", *TINY[1:], "--systems", "ours-plain", "--out", "out.json"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "compare.py"), *given], cwd=tmp_path, capture_output=True, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "out.json").read_text()), done.stderr
    assert found["results"]["ours-plain"]["tok_per_s"] > 0


@pytest.mark.slow
def test_a_load_is_held(target: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", target, "--text", text, "--draft", "none", *ON_CPU, "--vram", "all", "--requests", "1,2"]
    code = call("bench_serving", *given, "--minutes", 0.02, "--prompt-tokens", "8,16", "--new-tokens", 6)
    found = printed(capsys)
    assert code == 0 and [row["at_once"] for row in found["rows"]] == [1, 2]
    assert all(row["differing"] == 0 < row["finished"] and row["errors"] == [] for row in found["rows"])


@pytest.mark.slow
def test_models_take_turns(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--minutes", 0.1, "--prompt-tokens", 8, "--new-tokens", 4, "--context", 64, "--clients", 3)
    call("bench_models", "--models", target, "tiny", "tiny@q8_0", *ON_CPU, *sizes)  # memory is judged elsewhere
    found = printed(capsys)
    assert {note["model"] for note in found["turns"]} == {target.name, "tiny", "tiny@q8_0"} and not found["errors"]
    assert found["asked_again"] > 0 == found["unlike_first"] and found["left"] and found["growth"]["files"] <= 2


@pytest.mark.slow
def test_two_ranks_are_set_beside_one_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--shape", "tiny", "--layers", 2, "--stored", "q8_0", *ON_CPU, "--prompt-tokens", 12, "--new-tokens", 6]
    given += ["--requests", 2, "--accepted", 2, "--window", 3]
    call("bench_hosts", *given, "--out", tmp_path / "hosts.json")  # how fast they are is of no interest here
    found = printed(capsys)
    assert found == json.loads((tmp_path / "hosts.json").read_text())
    hosts, one = found["parts"]["hosts"], found["parts"]["one"]
    assert hosts["layers"] == [[[0, 1]], [[1, 2]]] and all(seconds > 0 for seconds in hosts["round_trip_s"].values())
    for what, count in (("plain", 1), ("at once", 2)):
        assert hosts[what]["tokens"] == one[what]["tokens"] and len(one[what]["tokens"]) == count
    assert hosts["script"]["identical_to_plain"] and hosts["script"]["tokens_per_pass"] == 2


@pytest.mark.slow
def test_drafters_are_compared(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = write_book(tmp_path / "book.txt")
    given = ["--source", target, "--shape", "none", "--text", book, "--code", book, "--context", 400, *ON_CPU]
    given += ["--drafters", "none", "ngram", "noise=0.01", "--gammas", 3, "--nodes", 8, "--places", 1, "--tokens", 12]
    given += ["--prompt-tokens", 20, "--plain-tokens", 8, "--temperatures", 0.6, "--trace", tmp_path / "trace.json"]
    assert call("bench_drafters", *given) == 0
    found = printed(capsys)
    assert len(found["rows"]) == len(found["summary"]) == 6 * 7
    assert all(row["identical"] and row["identical_tokens"] in (0, 8, 12) for row in found["rows"])
    fixed = [row for row in found["summary"] if row["drafter"] == "noise=0.01" and row["window"] == "chain 3"]
    assert len(fixed) == 6 and all(row["tokens_per_pass"] > 1 and row["times_plain"] > 0 for row in fixed)
    assert max(row["acceptance_by_depth"][0] for row in fixed) > 0.5
    assert found["loads"][2]["drafting_s_per_pass"] > 0 == found["loads"][0]["drafting_s_per_pass"]


@pytest.mark.slow
def test_a_long_context(models: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--kv", "host", "--windows", "1,3", "--passes", 1, "--variants", "4:1:6"]
    assert call("bench_long_context", *models, *given) == 0
    found = printed(capsys)
    (row,) = found["decoding"]
    assert row["identical_to_plain"] and row["kept_tokens"] > 250 and row["tokens_per_pass"] > 1
    assert found["prefill"]["tokens"] == 300 and [one["window_tokens"] for one in found["windows"]] == [1, 3]


@pytest.mark.slow
def test_a_commit_is_held_against_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, given = tmp_path / "before.json", ["--ways", "plain"]
    assert call("check_identity", *given, "--tokens", 2, "--out", before) == 0
    found = printed(capsys)
    assert len(found["rows"]) == 2
    found["rows"][1]["tokens"][0][-1] += 1
    found["rows"][0]["logits_sha256"] = "0" * 64
    before.write_text(json.dumps(found))
    assert call("check_identity", *given, "--tokens", 2, "--against", before) == 1
    assert len(printed(capsys)["differences"]) == 2
    assert call("check_identity", *given, "--tokens", 3, "--against", before) == 2


def test_passes_of_a_trace_are_drawn(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "trace.json"
    with load(target, draft=target, resident_layers=1, kv="host", trace=trace) as runtime:
        runtime.generate(PROMPT, max_new_tokens=12, ignore_eos=True, gamma=3)
    assert call("timeline", trace, "--passes", "1-2", "--out", tmp_path / "picture.svg") == 0
    drawn = (tmp_path / "picture.svg").read_text()
    assert "target computes" in drawn and "steps of the draft" in drawn
    assert call("timeline", trace, "--passes", "90") == 2
    assert "--passes 90: the trace has" in capsys.readouterr().err


DEPTHS, PROMPT_TOKENS, ANSWER = 3, 24, 24


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose next token depends above all on the last one: anything else would take long to learn."""
    directory = write_checkpoint(tmp_path_factory.mktemp("small") / "model", hidden_size=32, num_layers=3)
    file = directory / "model.safetensors"
    factors = {"o_proj": 0.02, "down_proj": 0.02, "lm_head": 2.0}
    tensors = load_file(file)
    for name, part in ((name, part) for name in tensors for part in factors if part in name):
        tensors[name] *= factors[part]
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}  # what heads are trained for
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_book(tmp_path_factory.mktemp("book") / "book.txt")


@pytest.mark.slow
def test_agreement_of_copies(small: Path, book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("agreement", "--source", small, "--text", book, "--code", book, "--places", 2, "--prompt-tokens", 8)
    sizes = ("--new-tokens", 12, "--bits", "2,6", "--groups", 32, "--blocks", 4, "--shift", 16)
    assert call("bench_copy", *given, *sizes, "--symmetric", "no", "--methods", "rounded", "weighted") == 0
    by_draft: dict[object, list[dict[str, Any]]] = {}
    for row in printed(capsys)["agreement"]:
        by_draft.setdefault((row["draft"], row.get("copy", {}).get("bits")), []).append(row)
    assert {row["agreement"] for row in by_draft["target", None]} == {1.0}
    assert {row["tokens_per_pass"]["8"] for row in by_draft["target", None]} == {9.0}
    coarse, fine = (sum(row["agreement"] for row in by_draft["copy", bits]) for bits in (2, 6))
    assert coarse < fine and {row["keys"] for row in by_draft["copy", 6]} == {"own", 4}


@pytest.mark.slow
def test_the_rest_given_copies(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_checkpoint(tmp_path / "model", hidden_size=64, num_layers=1)
    given = ("rest", "--source", target, "--text", book, "--code", book, "--random-rows", 16, "--symmetric", "no")
    assert call("bench_copy", *given, "--bits", 4, "--groups", 64, "--methods", "rounded", "fitted") == 0
    rows = printed(capsys)["rest"]
    assert {row["stored"] for row in rows} == {"bf16", "FP8", "Q8_0"} and len(rows) == 18
    assert [row["runtime"]["round_trip"] for row in rows if "runtime" in row] == 6 * [True]
    assert all(row["entropy_bits_by_level"] <= row["entropy_bits"] + 1e-9 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", train_head.KINDS)
def test_a_head_learns_to_guess(kind: str, small: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    given = f"{kind} --source {small} --text {book} --code {book} --checkpoint {tmp_path / 'head'} --out {out}"
    given += f" --device cpu --steps 100 --answers 64 --rows 4 --row-tokens 64 --depths {DEPTHS}"
    given += " --draft-vocab 200 --taps 0,1,2" if kind == "eagle3" else ""
    given += f" --rate 0.03 --places 2 --prompt-tokens {PROMPT_TOKENS} --new-tokens {ANSWER}"
    assert train_head.main(given.split()) == 0
    report = json.loads(out.read_text())
    curve = [step["loss_by_depth"] for step in report["training"]["curve"]]
    before, after = ([row["acceptance_by_depth"] for row in report[when]] for when in ("untrained", "trained"))
    assert all(first > other + 0.15 for (first, *_), (other, *_) in zip(after, before, strict=True))
    assert all(last < first for first, last in zip(curve[0], curve[-1], strict=True))
    if kind == "eagle3":
        written = load_file(tmp_path / "head" / "model.safetensors")
        assert written["t2d"].nonzero()[:, 0].tolist() == (written["d2t"] + torch.arange(200)).tolist()
