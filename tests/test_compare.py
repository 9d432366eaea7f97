"""compare.py as a whole, on a CPU: a tiny widened checkpoint, its draft, and every system that is installed."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate_offload
import compare
import pytest
import systems
from common import options_from, peer_parser
from measurement import measure, measure_peer
from models import load_draft

from offload_runtime.weights import open_checkpoint
from tests.helpers.engine import load, one_thread, write_checkpoint  # noqa: F401 (the first is an autouse fixture)
from tests.helpers.widening import GQA

NEW_TOKENS = 14
TEXTS = ("the quick brown fox jumps over the lazy dog and the quick", "a link, a layer, a slot; the pass streams on")
MEASURED = (
    "ours-plain",
    "ours",
    "ours-chains",
    "accelerate",
    "transformers-offloaded-cache",
    "resident",
    "resident-compiled",
)


@dataclass(frozen=True)
class Models:
    """A target, the small model that it was widened from, and texts."""

    target: Path
    draft: Path
    prompts: tuple[Path, ...]


@pytest.fixture(scope="module")
def models(short_target: Path, widened_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("prompts")
    prompts = tuple(folder / f"{number}.txt" for number in range(len(TEXTS)))
    for path, text in zip(prompts, TEXTS, strict=True):
        path.write_text(text)
    return Models(widened_target, short_target, prompts)


def arguments(models: Models, out: Path, *others: str) -> list[str]:
    """Of `compare.py`, for both prompts."""
    given = ["--target", str(models.target), "--draft", str(models.draft), "--out", str(out), "--repeats", "1"]
    given += [option for path in models.prompts for option in ("--prompt-file", str(path))]
    return [*given, "--new-tokens", str(NEW_TOKENS), "--commit", "abc", *others]


@dataclass(frozen=True)
class Outcome:
    """What a comparison left behind."""

    code: int
    printed: str
    out: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def outcome(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All systems on the CPU, DeepSpeed not installed."""
    out, printed = tmp_path_factory.mktemp("out") / "comparison.json", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setitem(sys.modules, "deepspeed", None)
        code = compare.main(arguments(models, out, "--device", "cpu", "--dtype", "fp32", "--gamma", "7"))
    return Outcome(code, printed.getvalue(), out, json.loads(out.read_text()))


@pytest.mark.slow
def test_every_installed_system_is_measured_and_a_missing_one_is_no_failure(outcome: Outcome) -> None:
    results = outcome.report["results"]
    assert outcome.code == 0 and tuple(results) == tuple(systems.SYSTEMS)
    assert tuple(name for name, result in results.items() if "tok_per_s" in result) == MEASURED
    for name in ("deepspeed", "deepspeed-assistant"):
        assert results[name]["missing"].startswith("deepspeed is not installed: DS_BUILD_OPS=0 pip install")
    for name in MEASURED:
        result = results[name]
        assert result["tok_per_s"] > 0 and 0 < result["token_s"]["p50"] <= result["token_s"]["p90"]
        assert result["token_s"]["p90"] <= result["token_s"]["p99"] and result["time_to_first_token_s"] > 0
        assert [run["prompt"] for run in result["runs"]] == [0, 1] and result["commit"] == "abc"
        assert [len(tokens) for tokens in result["tokens"]] == [NEW_TOKENS] * 2
        assert result["differing_generations"] == 0


@pytest.mark.slow
def test_all_systems_say_the_same_and_say_so(outcome: Outcome) -> None:
    agreement = outcome.report["agreement"]
    assert agreement["reference"] == "ours-plain" and set(agreement["systems"]) == set(MEASURED)
    for row in agreement["systems"].values():
        assert row == {"leading": [NEW_TOKENS] * 2, "of": [NEW_TOKENS] * 2}
    for name, shares in agreement["in_common"].items():
        result = outcome.report["results"][name]
        assert len(shares) == 2 and min(shares) > 0.999
        # Greedy answers begin with the likeliest token.
        assert [one["tokens"][0] for one in result["next_token"]] == [tokens[0] for tokens in result["tokens"]]
    first, second = outcome.report["results"]["resident"]["tokens"]
    assert first != second, "two prompts, two answers"


@pytest.mark.slow
def test_what_is_streamed_is_the_layers_and_the_draft_saves_passes(outcome: Outcome) -> None:
    results = outcome.report["results"]
    matrices = 80 * 24 * (2 * 16 + 2 * 4) + 3 * 80 * 130
    layers = 4 * GQA.num_layers * (matrices + 2 * 80)
    assert results["accelerate"]["bytes_per_pass"] == layers
    for name in ("ours", "ours-chains", "ours-plain"):
        assert layers <= results[name]["bytes_per_pass"] < 1.01 * layers
    for name in ("resident", "resident-compiled", "transformers-offloaded-cache"):
        assert results[name]["bytes_per_pass"] == 0
    assert results["ours-plain"]["tokens_per_pass"] == results["accelerate"]["tokens_per_pass"] == 1
    assert results["ours-chains"]["settings"]["tree_nodes"] == 0 and results["ours-chains"]["tokens_per_pass"] > 2
    assert results["ours"]["tokens_per_pass"] > 2 and results["ours"]["speculation"]["acceptance"] > 0.9
    assert any("offloaded cache needs CUDA" in note for note in results["transformers-offloaded-cache"]["notes"])


@pytest.mark.slow
def test_table_json_and_chart_are_there(outcome: Outcome) -> None:
    lines = outcome.printed.splitlines()
    assert json.loads(lines[-1]) == outcome.report
    assert [line.split()[0] for line in lines[1:10]] == list(systems.SYSTEMS)
    assert outcome.out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    drawn = outcome.out.with_suffix(".svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in MEASURED) and "<!-- deepspeed -->" not in drawn
    configuration = outcome.report["configuration"]
    assert configuration["prompt_file"] == ["0.txt", "1.txt"] and configuration["target"] == "widened_target"


@pytest.mark.slow
def test_a_report_names_no_directory_of_this_machine(outcome: Outcome, models: Models) -> None:
    written = outcome.out.read_text()
    assert str(models.target.parent) not in written and str(outcome.out.parent) not in written


@pytest.mark.slow
def test_random_weights_need_no_files(tmp_path: Path) -> None:
    given = ["--synthetic", "tiny", "--device", "cpu", "--dtype", "fp32", "--prompt-tokens", "9", "--new-tokens", "5"]
    out = tmp_path / "c.json"
    assert compare.main([*given, "--systems", "ours-plain,accelerate", "--no-chart", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["agreement"]["systems"]["accelerate"] == {"leading": [5], "of": [5]}
    assert report["results"]["accelerate"]["settings"]["prompt_tokens"] == [9]
    assert "for 270 tokens" in report["results"]["ours-plain"]["placement"], "room behind an answer"
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.slow
def test_a_shape_made_in_memory_speaks_a_small_models_language(tmp_path: Path) -> None:
    """It is what `widen_model.py` would have written: the small model is always right where there is no noise."""
    small = write_checkpoint(tmp_path / "small", num_layers=2, hidden_size=32)
    text, out = tmp_path / "text.txt", tmp_path / "c.json"
    text.write_text(TEXTS[0])
    given = ["--synthetic", "tiny", "--source", str(small), "--draft", str(small), "--prompt-file", str(text)]
    short = ["--new-tokens", "14", "--gamma", "3", "--repeats", "1", "--no-chart", "--device", "cpu", "--dtype", "fp32"]
    assert compare.main([*given, *short, "--systems", "ours,accelerate", "--context", "90", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (
        report["results"]["ours"]["tokens_per_pass"] > 3 and "for 90 tokens" in report["results"]["ours"]["placement"]
    )
    assert report["title"].startswith("tiny that speaks small,") and str(tmp_path) not in out.read_text()
    expected = tokens_of(small, TEXTS[0], 14)
    assert [report["results"][name]["tokens"] for name in ("ours", "accelerate")] == [[expected]] * 2


def tokens_of(model: Path, text: str, count: int) -> list[int]:
    """What the runtime says with this model."""
    with load(model, draft="none") as runtime:
        return list(runtime.generate(text, max_new_tokens=count, ignore_eos=True).tokens)


@pytest.mark.slow
def test_a_failing_system_fails_the_comparison_and_what_ran_is_kept(models: Models, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    code = compare.main(
        arguments(models, out, "--device", "cpu", "--dtype", "fp32", "--systems", "ours,resident", "--gamma", "2",
                  "--speculation", "triforce", "--resident-layers", "auto", "--no-chart")
    )  # fmt: skip
    results = json.loads(out.read_text())["results"]
    assert code == 1 and "tok_per_s" in results["resident"]
    assert "error" in results["ours"] and not results["ours"]["error"].startswith("error:")


def test_files_are_looked_at_before_anything_is_measured(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"a\xff")
    (tmp_path / "empty").write_text("")
    out = tmp_path / "c.json"
    capsys.readouterr()  # transformers shows how far it has written
    for words, told in (
        (("--draft", str(tmp_path / "bytes")), "is not a checkpoint"),
        (("--prompt-file", str(tmp_path / "gone")), "gone cannot be read (No such file or directory)"),
        (("--prompt-file", str(tmp_path)), "cannot be read (Is a directory)"),
        (("--prompt-file", str(tmp_path / "bytes")), "is not UTF-8 text (byte 0xff at offset 1)"),
        (("--prompt-file", str(tmp_path / "empty")), "a prompt has no tokens"),
        (("--prompt-tokens", "900"), "lower --prompt-tokens, or name a longer --prompt-file"),
        (("--context", "20"), "--context is 20: raise it, or lower --prompt-tokens"),
        (("--context", "900"), "is more than the 512 that the model was made for"),
        (("--gamma", "5000"), "5000 proposals in a window are more than the 512 tokens"),
        (("--tree-nodes", "5000"), "5000 proposals in a window are more than the 512 tokens"),
        (("--speculation", "triforce"), "layers on the device, --resident-layers is 0: take --resident-layers auto"),
        (("--target", ""), "--target is empty"),
    ):
        assert compare.main(arguments(models, out, "--device", "cpu", "--no-chart", *words)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and told in line
    assert not out.exists()


def peer_options(models: Models, *others: str) -> Any:
    """A peer's options, for one prompt on the CPU."""
    given = ["--target", str(models.target), "--device", "cpu", "--dtype", "fp32", "--prompt-tokens", "12"]
    return options_from(peer_parser("").parse_args([*given, "--new-tokens", "24", "--repeats", "1", *others]))


def prepare(options: Any) -> Any:
    return accelerate_offload.prepare(options, pin=True)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_the_best_of_all_assistants_is_reported(models: Models, temperature: str) -> None:
    pytest.importorskip("accelerate")
    plain = measure_peer(prepare, peer_options(models, "--temperature", temperature))
    given = ("--draft", str(models.draft), "--assistant-tokens", "auto,1,4", "--temperature", temperature)
    assisted = measure_peer(prepare, peer_options(models, *given))
    speeds = assisted["assistant"]["tok_per_s_by_tokens"]
    assert set(speeds) == {"auto", "1", "4"} and assisted["tok_per_s"] == max(speeds.values())
    assert speeds[str(assisted["assistant"]["tokens"])] == assisted["tok_per_s"]
    assert plain["assistant"] is None and plain["tokens_per_pass"] == 1 < assisted["tokens_per_pass"]
    assert assisted["differing_generations"] == plain["differing_generations"] == 0
    if temperature == "0":
        assert assisted["tokens"] == plain["tokens"]
    # The target's own, and neither the assistant's nor divided by the temperature.
    (one,), (other,) = plain["next_token"], assisted["next_token"]
    assert one["tokens"][:8] == other["tokens"][:8]
    assert one["probabilities"] == pytest.approx(other["probabilities"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.5", "2"])
def test_an_assistant_that_knows_the_target_is_always_accepted(models: Models, temperature: str) -> None:
    """Fair to the peer: the draft sees all of the prompt and samples at the target's temperature, not at its square."""
    pytest.importorskip("accelerate")
    options = peer_options(models, "--draft", str(models.draft), "--temperature", temperature)
    prepared, draft = prepare(options), load_draft(options)
    for tokens in (1, 4, 2):
        (run,) = measure(prepared, options, draft, tokens)[0].runs
        assert sum(run.counts) == len(run.tokens) == 24
        assert set(run.counts[:-1]) == {tokens + 1}, "as many as it is told, and the target's own"


@pytest.mark.parametrize("chunk", ["0", "4"])
def test_deepspeed_where_it_is_installed(models: Models, tmp_path: Path, chunk: str) -> None:
    pytest.importorskip("deepspeed")
    out = tmp_path / "c.json"
    given = (
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--systems",
        "ours-plain,deepspeed,deepspeed-assistant",
        "--no-chart",
    )
    short = (
        "--assistant-tokens",
        "3",
        "--prefill-chunk",
        chunk,
        "--warmup-prompt-tokens",
        "5",
        "--warmup-new-tokens",
        "4",
    )
    assert compare.main(arguments(models, out, *given, *short)) == 0
    report = json.loads(out.read_text())
    for name in ("deepspeed", "deepspeed-assistant"):
        assert report["agreement"]["systems"][name] == {"leading": [NEW_TOKENS] * 2, "of": [NEW_TOKENS] * 2}
        assert min(report["agreement"]["in_common"][name]) > 0.999
        assert report["results"][name]["settings"]["prefill_chunk"] == (int(chunk) or None)
        assert report["results"][name]["differing_generations"] == 0
    assert report["results"]["deepspeed-assistant"]["tokens_per_pass"] > 2


@pytest.mark.gpu
@pytest.mark.alone
def test_weights_keys_and_values_cross_the_link_of_a_gpu(long_target: Path, tmp_path: Path) -> None:
    """With chunks of a prompt that is longer than several blocks of the host's cache, and short warm-ups.

    Of ours, layers' keys and values stay on the device as far as it has room, which on a GPU it has.
    """
    text, out, prompt_tokens = tmp_path / "text.txt", tmp_path / "c.json", 600
    text.write_text(TEXTS[0] * 120)
    code = compare.main([
        "--target", str(long_target), "--prompt-file", str(text), "--prompt-tokens",
        str(prompt_tokens), "--dtype", "fp32", "--new-tokens", "6", "--warmup-prompt-tokens", "300",
        "--warmup-new-tokens", "3", "--repeats", "1", "--kv", "host", "--vram", "4GB", "--resident-layers", "0",
        "--prefill-chunk", "256", "--no-chart", "--out", str(out), "--commit", "abc",
        "--systems", "ours-plain,accelerate,transformers-offloaded-cache",  # each takes ten seconds
    ])  # fmt: skip
    report = json.loads(out.read_text())
    assert code == 0, report["results"]
    config = open_checkpoint(long_target).config()
    per_token = config.kv_bytes_per_token(4)
    for row in report["agreement"]["systems"].values():
        assert row == {"leading": [6], "of": [6]}
    assert min(share for shares in report["agreement"]["in_common"].values() for share in shares) > 0.99
    for name, result in report["results"].items():
        told = result["streamed"]
        assert result["differing_generations"] == 0 and result["bytes_per_pass"] == told["weights"] + told["kv"] > 0
        assert 0 < result["bound"]["share"] < 1 and 0 < result["peak_vram_bytes"]["driver"] <= 4_000_000_000
        if name == "ours-plain":
            layers, rest = divmod(told["kv"] * config.num_layers, prompt_tokens // 256 * 256 * per_token)
            assert rest == 0 and 0 <= layers <= config.num_layers and told["kv_to_host"] == 0
        else:  # passes of 600, 601, … 604 tokens before them
            assert told["kv"] == (prompt_tokens + 2) * per_token
            assert told["kv_to_host"] == (prompt_tokens + 3) * per_token
            assert result["settings"]["prefill_chunk"] == 256 and result["settings"]["kv_cache"] == "offloaded"
            assert not any("needs CUDA" in note for note in result["notes"])
        assert (told["weights"] > 0) == (name != "transformers-offloaded-cache")
        assert result["pinned_bytes"] >= told["weights"]
