"""`generate`, `demo` and what all commands share, with a runtime that has no model."""

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import offload_runtime
from offload_runtime.cli.app import app
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import BudgetError
from offload_runtime.params import GenerationParams, SamplingParams
from tests.test_cli_fakes import FakeRuntime, full_host, invoke, make_stats, press_ctrl_c

NOISE = "a library that cannot keep quiet\n"


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


def generate(runtime: FakeRuntime, *arguments: str, stdin: str | bytes | None = None) -> Result:
    return invoke(["generate", "--target", "some/model", *arguments], {"Runtime": runtime}, input=stdin)


def demo(runtime: FakeRuntime, model: Path, *arguments: str) -> Result:
    stand_ins = {"Runtime": runtime, "fetch_demo_model": lambda **options: model}
    return invoke(["demo", *arguments], stand_ins, env={"COLUMNS": "100"})


def error_lines(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def test_text_goes_to_stdout_and_figures_to_stderr(runtime: FakeRuntime) -> None:
    result = generate(runtime, "--prompt", "Hi")
    assert (result.exit_code, result.stdout) == (0, NOISE + "Hello\n")
    last_line = result.stderr.splitlines()[-1]
    assert last_line == "12.5 tokens/s · draft 1.5 tokens/pass · link 80 % · first token 0.25 s"
    assert result.stderr.splitlines()[:2] == [runtime.load_report, runtime.placement]
    assert runtime.closed


def test_an_answer_says_what_of_its_experts_was_on_the_card_and_who_computed_the_others(runtime: FakeRuntime) -> None:
    brought = {"expert_hit_rate": 0.771, "expert_bytes_per_pass": 37_000_000}
    runtime.stats = make_stats(**brought)
    assert " · link 80 % · expert hits 77 % · first token" in generate(runtime, "--prompt", "Hi").stderr
    runtime.stats = make_stats(**brought, expert_cpu_share=0.5, expert_cpu_gbps=48.2)
    lines = generate(runtime, "--prompt", "Hi", "--explain").stderr.splitlines()
    assert any(" · expert hits 77 % · 50 % of misses on the CPU · first token" in line for line in lines)
    assert "  expert hits 77.1 %, 37.0 MB a pass over the link, 50 % of misses on the CPU at 48.2 GB/s" in lines


def test_json_is_one_object_and_nothing_else(runtime: FakeRuntime) -> None:
    result = generate(runtime, "--prompt", "Hi", "--json", "--seed", "5", "--draft", "none")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "tokens": [1, 2, 3], "text": "Hello", "finish_reason": "stop", "stop_string": None,
        "stats": make_stats().to_dict(),
        "target": "some/model", "draft": "none", "device": "cpu", "dtype": "fp32", "seed": 5,
    }  # fmt: skip
    assert NOISE in result.stderr


def test_options_reach_the_engine(runtime: FakeRuntime) -> None:
    options = {
        "temperature": "0.5", "top-k": "7", "top-p": "0.9", "min-p": "0.1", "seed": "3", "gamma": "90",
        "presence-penalty": "0.5", "frequency-penalty": "-1", "repetition-penalty": "1.2",
        "max-new-tokens": "11", "device": "cuda", "dtype": "bf16", "vram": "24GB", "resident-layers": "2",
        "context": "64", "draft": "some/draft", "kv": "host", "speculation": "triforce", "draft-cache": "streaming",
        "sink-tokens": "4", "recent-tokens": "100", "chunk-size": "16", "budget-tokens": "64", "gamma-draft": "3",
        "refresh-steps": "2", "profile": "rtx4090",
        "ram": "60GB", "pinned": "30GB", "trace": "t.json", "tree-nodes": "0", "weights": "stored", "encode": "auto",
    }  # fmt: skip
    arguments = [f"--{name}={text}" for name, text in options.items()]
    arguments += ["--stop", "a b", "--stop", "c", "--logit-bias", "7=-100", "--logit-bias", "5=+2.5"]
    arguments += ["--stop-token-ids", "5", "--stop-token-ids", "9", "--min-tokens", "2"]
    result = generate(runtime, *arguments, "--ignore-eos", "--prompt", "Hi", "--json", "--logprobs", "3")
    assert result.exit_code == 0, result.stderr
    sampling = SamplingParams(
        0.5, top_k=7, top_p=0.9, min_p=0.1, seed=3, presence_penalty=0.5, frequency_penalty=-1.0,
        repetition_penalty=1.2, logit_bias={5: 2.5, 7: -100.0},
    )  # fmt: skip
    params = GenerationParams(
        11, ("a b", "c"), gamma=90, ignore_eos=True, sampling=sampling, logprobs=3, min_tokens=2, stop_token_ids=(5, 9)
    )
    assert (runtime.requests, runtime.speculated) == ([("Hi", params)], [True])
    assert runtime.loads == [
        RuntimeConfig(
            "some/model", "some/draft", device="cuda", dtype="bf16", vram=24_000_000_000, ram=60_000_000_000,
            pinned=30_000_000_000, resident_layers=2, context=64, kv="host", weights="stored", max_gamma=90, gamma=90,
            speculation=SpeculationOptions("triforce", "streaming", 4, 100, 16, 64, 3, 2), encode="auto",
            tree_nodes=0, profile="rtx4090", trace=Path("t.json"),
        )
    ]  # fmt: skip


def test_control_tokens_in_messages_are_allowed_where_there_are_messages(runtime: FakeRuntime) -> None:
    for arguments, allowed in (((), False), (("--allow-special-tokens",), True)):
        assert generate(runtime, "--chat", "--prompt", "Hi", *arguments).exit_code == 0
        assert runtime.loads.pop().allow_special_tokens is allowed
    refused = generate(runtime, "--prompt", "Hi", "--allow-special-tokens")
    assert (refused.exit_code, runtime.loads) == (2, [])
    assert error_lines(refused) == [
        "error: --allow-special-tokens does nothing without --chat: a plain prompt always allows them"
    ]


def test_a_batch_that_runs_out_of_memory_shows_what_there_is(runtime: FakeRuntime, tmp_path: Path) -> None:
    runtime.memory_lasts_for = 1
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text("Hi")
    result = generate(runtime, *(f"--prompt-file={file}" for file in files))
    assert result.exit_code == 2 and "the host is full" in result.stderr.splitlines()[-1]
    assert "answer 0" in result.stdout and "half" in result.stdout
    assert [answer["finish_reason"] for answer in json.loads(
        generate(runtime, "--json", *(f"--prompt-file={file}" for file in files)).stdout
    )["results"]] == ["stop", "interrupted"]  # fmt: skip


def test_an_answer_that_runs_out_of_memory_shows_what_there_is(runtime: FakeRuntime) -> None:
    runtime.before_piece, runtime.held_back = full_host(at_piece=2), "p"
    result = generate(runtime, "--prompt", "Hi")
    assert result.exit_code == 2 and result.stdout == NOISE + "Help\n"
    assert result.stderr.splitlines()[-1] == "error: the host is full"
    whole = generate(runtime, "--prompt", "Hi", "--json")
    record = json.loads(whole.stdout)
    assert (record["text"], record["tokens"], record["finish_reason"]) == ("Help", [1, 2, 3], "interrupted")
    assert whole.exit_code == 2


def test_a_schema_is_read_from_its_file(runtime: FakeRuntime, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"type": "object"}')
    assert generate(runtime, "--prompt", "Hi", "--json-schema", str(tmp_path / "a.json")).exit_code == 0
    assert runtime.requests[0][1].sampling == SamplingParams(json_schema='{"type": "object"}')
    runtime.loads.clear()
    (tmp_path / "b.json").write_text("{")
    for name, words in (("b.json", "json_schema is not JSON"), ("none.json", "cannot be read: No such file")):
        refused = generate(runtime, "--prompt", "Hi", "--json-schema", str(tmp_path / name))
        (line,) = error_lines(refused)
        assert words in line and refused.exit_code == 2 and not runtime.loads


def test_prompts_are_checked_while_loading(runtime: FakeRuntime, tmp_path: Path) -> None:
    class Room:
        def check(self, params: GenerationParams) -> None:
            assert params.max_new_tokens in (7, 9)

        def fit_all(self, prompts: object, max_new_tokens: int) -> None:
            seen.append((prompts, max_new_tokens))

    seen: list[tuple[object, int]] = []
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text("Hi")
    generate(runtime, "--prompt", "Hi", "--chat", "--max-new-tokens", "7")
    generate(runtime, *(f"--prompt-file={file}" for file in files), "--max-new-tokens", "9")
    for check in runtime.checks:
        assert check is not None
        check(Room())
    assert seen == [([[{"role": "user", "content": "Hi"}]], 7), (["Hi", "Hi"], 9)]


@pytest.mark.parametrize(("arguments", "words"), [
    ("", "neither of --prompt and --prompt-file"), ("--prompt a --prompt-file b", "both of --prompt and --prompt-file"),
    ("--prompt a --prompt-file b --prompt-file c", "both of --prompt and --prompt-file"),
    ("--prompt-file - --prompt-file -", "--prompt-file - was given 2 times"),
    ("--prompt-file {tmp}/a --prompt-file {tmp}/absent", "{tmp}/absent cannot be read"),
    ("--prompt-file {tmp}/absent", "No such file"), ("--prompt-file {tmp}", "directory"),
    ("--prompt-file {tmp}/latin1", "not UTF-8 text: byte 0xe9 at offset 1"),
    ("--prompt a --chat --template-option a=1 --template-option a=2", "--template-option gives a twice"),
    ("--prompt a --gamma 3 --draft none", "--draft none"),
    ("--prompt a --gamma 3 --speculation none", "--speculation none"),
    ("--prompt a --context 0", "--context must be auto or a count of at least 1, not '0'"),
    ("--prompt a --resident-layers -1", "--resident-layers must be auto or a count of at least 0"),
    ("--prompt a --vram 24", "--vram '24' is 24 bytes: write 24GB, or 24B if that is meant"),
    ("--prompt a --stop-token-ids=-1", "--stop-token-ids must be at least 0, not -1"),
    ("--prompt a --top-k few", "--top-k must be a whole number, not 'few'"),
    ("--prompt a --target=", "--target is empty"),
    ("--prompt a --presence-penalty 2.5", "--presence-penalty must be in [-2, 2] (0 is off), not 2.5"),
    ("--prompt a --frequency-penalty -3", "--frequency-penalty must be in [-2, 2] (0 is off), not -3.0"),
    ("--prompt a --repetition-penalty 0", "--repetition-penalty must be in [0.1, 10] (1 is off), not 0.0"),
    ("--prompt a --logit-bias hello=3", "--logit-bias 'hello=3' is not a bias: write it like 1234=-100"),
    ("--prompt a --logit-bias 5=101", "logit_bias of token 5 must be in [-100, 100], not 101.0"),
    ("--prompt a --logit-bias 5=1 --logit-bias 5=2", "logit_bias names a token twice"),
    ("--prompt a --logprobs 21 --json", "--logprobs must be in [0, 20], not 21"),
    ("--prompt a --logprobs 3", "--logprobs 3 does nothing without --json, which prints them: add it, or drop it"),
    ("--prompt a --max-new-tokens 0", "--max-new-tokens must be at least 1, not 0"),
    ("--kv disk", "'disk' is not one of 'auto', 'gpu', 'host'; offload-runtime generate"),
    ("--drafft a", "No such option: --drafft"),
    ("qwen3:8b", "Got unexpected extra argument(s) (qwen3:8b), and a model is named with --target; "),
])  # fmt: skip
def test_wrong_options_end_before_loading(runtime: FakeRuntime, tmp_path: Path, arguments: str, words: str) -> None:
    (tmp_path / "latin1").write_bytes(b"d\xe9j\xe0 vu")
    (tmp_path / "a").write_text("a")
    result = generate(runtime, *(part.format(tmp=tmp_path) for part in arguments.split()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert words.format(tmp=tmp_path) in error_lines(result)[0]
    assert runtime.loads == []


VERIFIER = ("--budget-tokens 64", "--chunk-size 4", "--refresh-steps 2")
KEPT = ("--sink-tokens 4", "--recent-tokens 9")
IDLE = [
    *(("--speculation none --draft some/draft", option) for option in (*VERIFIER, "--gamma-draft 2")),
    *(("--speculation chain --draft some/draft --draft-cache streaming", option) for option in VERIFIER),
    *(("--speculation chain --draft some/draft", option) for option in (*VERIFIER[2:], "--gamma-draft 2")),
    *((f"--draft {draft}", option) for draft in ("ngram", "none") for option in (*VERIFIER, *KEPT, "--gamma-draft 2")),
    *((f"--draft some/draft --draft-cache {cache}", option) for cache in ("full", "retrieval") for option in KEPT),
    *(("--speculation triforce --draft none", option) for option in (*KEPT, "--gamma-draft 2", "--draft-cache full")),
    ("--draft ngram", "--draft-cache streaming"),
]


@pytest.mark.few(20)
@pytest.mark.parametrize(("mode", "option"), IDLE)
def test_options_that_would_do_nothing_are_refused(runtime: FakeRuntime, mode: str, option: str) -> None:
    result = generate(runtime, "--prompt", "a", *mode.split(), *option.split())
    assert (result.exit_code, result.stdout, runtime.loads) == (2, "", [])
    assert f"{option} does nothing with" in error_lines(result)[0]


def test_typed_errors_are_one_line_whatever_is_in_them(runtime: FakeRuntime) -> None:
    runtime.load_error = BudgetError("needs [bold]9 GB\nbut has 6 GB:\x1b[2J " + "long " * 60)
    result = generate(runtime, "--prompt", "a", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: needs [bold]9 GB but has 6 GB:[2J " + " ".join(["long"] * 60) + "\n"


def test_defects_are_not_hidden(runtime: FakeRuntime) -> None:
    runtime.answer_error = ZeroDivisionError("a defect")
    result = generate(runtime, "--prompt", "a")
    assert result.exception is runtime.answer_error
    assert error_lines(result) == []


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_keeps_what_is_there(runtime: FakeRuntime, presses: int) -> None:
    def interrupt(number: int) -> None:
        if number == 2:
            for _ in range(presses):
                press_ctrl_c()

    handler = signal.getsignal(signal.SIGINT)
    runtime.pieces, runtime.held_back, runtime.before_piece = ("one ", "two ", "three"), "held", interrupt
    # The second Ctrl-C does not wait for the piece under way.
    expected = "one two held" if presses == 1 else "one held"
    result = generate(runtime, "--prompt", "a")
    assert (result.exit_code, result.stdout) == (130, NOISE + expected + "\n")
    result = generate(runtime, "--prompt", "a", "--json")
    assert result.exit_code == 130
    record = json.loads(result.stdout)
    assert (record["text"], record["finish_reason"]) == (expected, "interrupted")
    assert signal.getsignal(signal.SIGINT) is handler
    assert runtime.closed


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three prompts, as arguments."""
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path in paths:
        path.write_text(f"the text of {path.name}")
    return [part for path in paths for part in ("--prompt-file", str(path))]


def test_several_files_are_one_batch(runtime: FakeRuntime, files: list[str]) -> None:
    result = generate(runtime, *files, "--temperature", "0.5", "--chat", "--stop", "x")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == NOISE + "".join(f"== {files[2 * i + 1]} ==\nanswer {i}\n" for i in range(3))
    assert runtime.loads[0].max_batch == 3
    asked = [prompt for prompt, _ in runtime.requests]
    assert asked == [[{"role": "user", "content": f"the text of {name}.txt"}] for name in "abc"]
    assert runtime.requests[0][1] == GenerationParams(256, ("x",), sampling=SamplingParams(0.5))
    lines = result.stderr.splitlines()
    assert [line.partition(": 12.5 tokens/s · ")[0] for line in lines[-3:]] == files[1::2]
    assert lines[0] == runtime.load_report and runtime.closed


def test_a_batch_as_json(runtime: FakeRuntime, files: list[str]) -> None:
    result = generate(runtime, *files[:2], "--prompt-file", "-", "--json", "--seed", "5", stdin="from a pipe")
    answer = {"tokens": [1, 2, 3], "finish_reason": "stop", "stop_string": None, "stats": make_stats().to_dict()}
    assert json.loads(result.stdout) == {
        "results": [
            {"name": files[1], "text": "answer 0", **answer}, {"name": "stdin", "text": "answer 1", **answer}
        ],
        "target": "some/model", "draft": "auto", "device": "cpu", "dtype": "fp32", "seed": 5,
    }  # fmt: skip
    assert [prompt for prompt, _ in runtime.requests] == ["the text of a.txt", "from a pipe"]


def test_ctrl_c_keeps_the_answers_that_are_done(runtime: FakeRuntime, files: list[str]) -> None:
    runtime.before_piece = lambda number: press_ctrl_c() if number == 2 else None
    out = generate(runtime, *files)
    assert out.exit_code == 130
    assert [x for x in out.stdout.splitlines() if not x.startswith("==")] == [NOISE.strip(), "answer 0", "half", "half"]
    assert [": stopped · " in line for line in out.stderr.splitlines()[-3:]] == [False, True, True]
    record = json.loads(generate(runtime, *files, "--json").stdout)
    assert [answer["finish_reason"] for answer in record["results"]] == ["stop", "interrupted", "interrupted"]


@pytest.mark.parametrize("presses", [[0], [1, 1], [1, 2]])
def test_ctrl_c_that_does_not_wait(runtime: FakeRuntime, files: list[str], presses: list[int]) -> None:
    """While the prompts are read, or pressed again."""

    def press(number: int) -> None:
        for _ in range(presses.count(number)):
            press_ctrl_c()

    runtime.before_piece = press
    result = generate(runtime, *files)
    assert (result.exit_code, result.stdout) == (130, NOISE)
    assert "Traceback" not in result.stderr and runtime.closed


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"offload-runtime {offload_runtime.__version__}\n")


@pytest.mark.parametrize("identical", [True, False])
def test_demo_compares_both_ways(runtime: FakeRuntime, tmp_path: Path, identical: bool) -> None:
    if not identical:
        runtime.speculative_tokens = [1, 2, 4]
    result = demo(runtime, tmp_path, "--prompt", "Hi", "--max-new-tokens", "9")
    assert result.exit_code == (0 if identical else 1), result.output
    assert result.stdout.rstrip().endswith("identical tokens: " + ("yes" if identical else "no"))
    (config,) = runtime.loads
    assert (config.target, config.resident_layers, config.draft) == (str(tmp_path), 0, "ngram")
    # One short warm-up each, so that neither of the compared runs pays for the first touch.
    assert runtime.speculated == [False, True, False, True]
    assert [params.max_new_tokens for _, params in runtime.requests] == [4, 4, 9, 9]
    assert all(prompt == [{"role": "user", "content": "Hi"}] for prompt, _ in runtime.requests)
    assert result.stdout.count("Hello\n") == 2
    for figure in ("plain", "speculative", "12.50", "1.50", "2.0 GB", "20.0 of 25.0 GB/s", "3.0 GB", "0.25 s"):
        assert figure in result.stdout
