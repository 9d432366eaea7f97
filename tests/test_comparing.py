"""The parts of compare.py: figures of runs, agreement, the bound, the table, the chart, and how systems are run."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import bench_streaming
import compare
import pytest
import systems
import torch
from common import options_from, peer_parser
from harness import leading_agreement
from measurement import RoundClock
from models import fitting_layers, require_whole_model
from runs import NextToken, Run, answers, expectations, figures, num_differing

from offload_runtime.errors import BudgetError, ContextLengthError, OffloadError, OptionError, StorageError


def run(stamps: list[float], counts: list[int], *, prompt: int = 0, first_token: int = 0) -> Run:
    """A run that began at 0, with tokens that count up."""
    return Run(prompt, 0.0, tuple(stamps), tuple(counts), tuple(range(first_token, first_token + sum(counts))))


def expected(probabilities: dict[int, float]) -> dict[str, Any]:
    """What a peer reports of the token behind a prompt."""
    return {"tokens": list(probabilities), "probabilities": list(probabilities.values())}


def result(tok_per_s: float, tokens: list[list[int]] | None = None, **others: Any) -> dict[str, Any]:
    """What a peer reports, as far as a comparison reads it."""
    return {
        "system": "peer", "tok_per_s": tok_per_s, "token_s": {"p50": 0.5, "p90": 0.25, "p99": 0.125},
        "time_to_first_token_s": 3.0, "tokens_per_pass": 1.5, "link_gbps": 50.0, "bytes_per_pass": 10**9,
        "streamed": {"weights": 10**9, "kv": 0, "kv_to_host": 0},
        "peak_vram_bytes": None, "notes": [], "tokens": tokens or [[1, 2, 3]], "bound": {"link_gbps": 55.0},
        "next_token": [expected({1: 0.5, 2: 0.25})] * len(tokens or [[]]), **others,
    }  # fmt: skip


def test_a_rounds_time_is_shared_by_its_tokens_and_the_first_round_is_the_prefill() -> None:
    one = run([2.0, 3.0, 5.0], [2, 1, 4])
    assert one.first_token_s == 2.0 and one.passes == 2 and one.decode_s == 3.0
    assert one.token_times_s() == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert one.tok_per_s == 5 / 3


def test_figures_are_of_the_median_run_of_every_prompt_and_percentiles_of_all_tokens() -> None:
    runs = [run([1.0, 2.0, 4.0], [1, 1, 1]), run([2.0, 3.0, 4.0], [1, 1, 1]), run([3.0, 4.0, 4.5], [1, 1, 3])]
    found = figures(runs, weight_bytes=2 * 10**9, peak_gbps=8.0)
    assert found["tok_per_s"] == 1.0 and found["time_to_first_token_s"] == 2.0
    assert found["tokens_per_pass"] == 1.0 and found["link_gbps"] == pytest.approx(2.0)
    assert found["bound"] == {"link_gbps": 8.0, "s_per_pass": 0.25, "share": pytest.approx(0.25)}
    assert [one["decoded"] for one in found["runs"]] == [2, 2, 4]
    # Sorted: three times 1/6, four times 1, once 2.
    assert found["token_s"]["p50"] == 1.0 and found["s_per_token"]["median"] == 1.0
    assert found["token_s"]["p90"] == pytest.approx(1.3) and found["token_s"]["p99"] == pytest.approx(1.93)
    assert figures(runs, weight_bytes=0, peak_gbps=8.0)["bound"] is None
    assert figures(runs, weight_bytes=1, peak_gbps=None)["bound"] is None


def test_a_slow_prompt_weighs_as_much_as_it_lasts() -> None:
    slow, fast = run([0.0, 6.0], [1, 6]), run([1.0, 2.0], [1, 6], prompt=1)
    found = figures([slow, fast], weight_bytes=7 * 10**9, peak_gbps=8.0)
    assert found["tok_per_s"] == 12 / 7 and found["tokens_per_pass"] == 6.0
    assert found["link_gbps"] == 2.0 == found["tok_per_s"] / found["tokens_per_pass"] * 7
    slower = run([0.0, 12.0], [1, 6])
    for runs in ([slow, slower, fast], [fast, slower, slower, slow]):  # of two, the slower
        assert figures(runs, weight_bytes=1, peak_gbps=None)["tok_per_s"] == 12 / 13


def test_answers_are_by_prompt_and_other_answers_to_a_prompt_are_counted() -> None:
    runs = [run([1, 2], [1, 2], prompt=1, first_token=7), run([1, 2], [1, 2]), run([1, 2], [1, 2], first_token=3)]
    assert answers(runs) == [[0, 1, 2], [7, 8, 9]]
    assert num_differing(runs) == 1 and num_differing(runs[:2]) == 0


def test_a_clock_leaves_out_the_prompt_and_counts_the_tokens_of_a_round() -> None:
    clock = RoundClock(torch.device("cpu"), sample_memory=False)
    for tokens in (torch.ones(1, 5), torch.ones(1), torch.ones(1, 3)):
        clock.put(tokens.long())
    clock.end()
    assert clock.counts == [1, 3] and clock.stamps_s == sorted(clock.stamps_s) and len(clock.stamps_s) == 2


def test_what_is_expected_behind_a_prompt_is_said_for_every_prompt() -> None:
    logits = torch.arange(100.0).roll(7)  # token 6 has the highest, then 5, … 0, 99, …
    likeliest = NextToken.of(logits.bfloat16())
    assert likeliest.tokens[:8] == (6, 5, 4, 3, 2, 1, 0, 99) and len(likeliest.tokens) == 64
    assert likeliest.probabilities[:2] == pytest.approx([1 - math.exp(-1), (1 - math.exp(-1)) * math.exp(-1)])
    assert len(NextToken.of(torch.zeros(3)).tokens) == 3
    other = NextToken((1,), (0.75,))
    runs = [
        dataclasses.replace(run([1, 2], [1, 2], prompt=prompt), next_token=token)
        for prompt, token in ((1, other), (0, likeliest), (1, likeliest))
    ]
    assert expectations(runs) == [dataclasses.asdict(likeliest), dataclasses.asdict(other)]


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_system_that_expects_other_tokens_behind_a_prompt_is_suspect(temperature: float) -> None:
    """Whatever the noise: a peer whose keys arrive too late says something, and quickly."""
    said = {"ours-plain": {1: 0.5, 2: 0.25}, "near": {2: 0.5, 9: 0.3, 1: 0.125}, "far": {9: 0.5, 1: 0.25}}
    results = {
        name: result(2, system=name, next_token=[expected(said["ours-plain"]), expected(one)], tokens=[[1], [2]])
        for name, one in said.items()
    }
    found = systems.agreements(results, greedy=temperature == 0)
    assert found is not None
    assert found["in_common"] == {"ours-plain": [1, 1], "near": [1, 0.5], "far": [1, pytest.approx(1 / 3)]}
    lines = systems.table(make_report(results, greedy=temperature == 0)).splitlines()
    (suspect,) = (number for number, line in enumerate(lines) if "SUSPECT" in line)
    assert lines[suspect - 1].startswith("far ") and "it expects 33 % as ours-plain does" in lines[suspect]


@pytest.mark.parametrize(
    ("said", "count"), [([1, 2, 3], 3), ([1, 2, 9], 2), ([9, 2, 3], 0), ([1, 2], 2), ([1, 9, 3], 1), ([], 0)]
)
def test_leading_tokens_that_agree_are_counted(said: list[int], count: int) -> None:
    assert leading_agreement([1, 2, 3], said) == count


def test_the_reference_is_our_plain_decoding_or_else_the_resident_model() -> None:
    results = {"resident": result(9, [[1, 2], [3, 4]]), "ours": result(3, [[1, 9], [3, 4]]), "gone": {"missing": "x"}}
    found = systems.agreements(results, greedy=True)
    assert found is not None and found["reference"] == "resident"
    assert found["systems"]["ours"] == {"leading": [1, 2], "of": [2, 2]} and "gone" not in found["systems"]
    plain = {"ours-plain": result(2, [[1, 9], [3, 4]]), **results}
    found = systems.agreements(plain, greedy=True)
    assert found is not None and found["reference"] == "ours-plain"
    assert [sum(row["leading"]) for row in found["systems"].values()] == [4, 3, 4]
    assert systems.agreements({"ours": result(3)}, greedy=True) is None


def test_sampled_answers_are_compared_only_where_the_noise_is_the_same() -> None:
    results = {name: result(1, system="offload_runtime") for name in ("ours", "ours-plain")}
    found = systems.agreements({**results, "resident": result(1)}, greedy=False)
    assert found is not None and set(found["systems"]) == {"ours", "ours-plain"}


def test_the_bound_is_bytes_over_the_fastest_link_that_was_seen() -> None:
    results = {
        "ours-plain": result(9, bytes_per_pass=5 * 10**9), "deepspeed": result(8, bound={"link_gbps": 60.0}),
        "resident": result(30, bytes_per_pass=0, bound=None), "accelerate": {"error": "x"},
    }  # fmt: skip
    assert systems.link_bound(results) == {"bytes_per_pass": 5 * 10**9, "link_gbps": 60.0, "tok_per_s": 12.0}
    del results["ours-plain"]
    bound = systems.link_bound(results)
    assert bound is not None and bound["tok_per_s"] == 60.0
    assert systems.link_bound({"resident": results["resident"]}) is None


def make_report(results: dict[str, dict[str, Any]], *, greedy: bool = True) -> dict[str, Any]:
    return {
        "title": "a title", "results": results, "times_ours_over": systems.times_ours_over(results),
        "bound": systems.link_bound(results), "agreement": systems.agreements(results, greedy=greedy),
    }  # fmt: skip


def test_the_table_says_what_was_measured_and_why_something_was_not() -> None:
    results = {
        "ours-plain": result(2.0), "ours": result(8.0, peak_vram_bytes={"driver": 7_250_000_000}),
        "deepspeed": {"missing": "deepspeed is not installed: pip"}, "resident": {"skipped": "does not fit"},
        "accelerate": result(1.6, [[1, 9, 9]], notes=["SUSPECT: one", "another"]), "other": {"error": "first\nlast"},
    }  # fmt: skip
    lines = [line.split() for line in systems.table(make_report(results)).splitlines()]
    plain, ours, deepspeed, resident, accelerate, suspect, other, bound = lines[1:]
    assert plain == [
        "ours-plain",
        "2.000",
        "4.00",
        "x",
        "500.0",
        "250.0",
        "125.0",
        "3.00",
        "1.50",
        "50.0",
        "-",
        "reference",
    ]
    assert ours == ["ours", "8.000", "500.0", "250.0", "125.0", "3.00", "1.50", "50.0", "7.25", "3", "of", "3"]
    assert accelerate[:4] == ["accelerate", "1.600", "5.00", "x"] and accelerate[-3:] == ["1", "of", "3"]
    assert " ".join(deepspeed) == "deepspeed missing: deepspeed is not installed: pip"
    assert " ".join(resident) == "resident skipped: does not fit" and " ".join(other) == "other error: last"
    assert suspect == ["SUSPECT:", "one"]
    assert " ".join(bound) == "one token a pass: at most 55.000 tok/s, 1.00 GB over a link of 55.0 GB/s"


def test_only_a_failure_or_nothing_measured_is_no_success() -> None:
    assert systems.succeeded({"ours": result(1), "deepspeed": {"missing": "x"}, "resident": {"skipped": "x"}})
    assert not systems.succeeded({"ours": result(1), "accelerate": {"error": "x"}})
    assert not systems.succeeded({"deepspeed": {"missing": "x"}})


def test_the_chart_has_a_bar_for_each_speed_and_a_line_for_the_bound(tmp_path: Path) -> None:
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        save = matplotlib_figure.Figure.savefig
        patch.setattr(
            matplotlib_figure.Figure,
            "savefig",
            lambda self, *args, **options: (saved.append(self), save(self, *args, **options)),
        )
        results = {"ours": result(110.0), "accelerate": result(2.0), "deepspeed": {"missing": "x"}}
        paths = systems.draw(make_report(results), tmp_path / "new" / "bars.json")
    assert [path.name for path in paths] == ["bars.png", "bars.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG") and "<svg" in paths[1].read_text()
    (axes,) = saved[0].axes
    assert [bar.get_width() for bar in axes.patches] == [110.0, 2.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ours", "accelerate"]
    (line,) = axes.lines
    assert list(line.get_xdata()) == [55.0, 55.0]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be drawn"):
        systems.draw(make_report(results), tmp_path / "file" / "bars")


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"offload-runtime\[plots\]"):
        systems.require_matplotlib()


def test_what_cannot_run_is_left_out_with_the_reason() -> None:
    absent = systems.System(
        "none.py", package="a_package_that_is_not_there", install="pip install it", needs_draft=True
    )
    given: dict[str, Any] = {"draft": None, "timeout_s": 1.0}
    assert systems.run_system(absent, [], {}, **given) == {
        "missing": "a_package_that_is_not_there is not installed: pip install it"
    }
    drafted = systems.System("none.py", needs_draft=True)
    assert "name one with --draft" in systems.run_system(drafted, [], {}, **given)["skipped"]


@pytest.mark.slow
def test_a_script_that_fails_or_takes_too_long_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("import sys; print('error: no room', file=sys.stderr); sys.exit(3)")
    (tmp_path / "endless.py").write_text("import time; time.sleep(60)")
    (tmp_path / "echo.py").write_text(
        "import json, sys; open(sys.argv[-1], 'w').write(json.dumps({'tok_per_s': 1, 'argv': sys.argv[1:-2]}))"
    )
    given: dict[str, Any] = {"draft": "d", "timeout_s": 30.0}
    failing = str(tmp_path / "failing.py")
    assert systems.run_system(systems.System(failing), [], {}, **given) == {"error": "no room"}
    whole = systems.System(failing, whole_model=True)
    assert systems.run_system(whole, [], {}, **given) == {"skipped": "no room"}
    assert systems.run_script(str(tmp_path / "endless.py"), [], 0.5) == ({"error": "no result within 0 s"}, None)
    echo = systems.System(str(tmp_path / "echo.py"), ("--vram", "all"), takes=("gamma", "draft"))
    own = {"gamma": ("--gamma", "4"), "kv": ("--kv", "host")}
    assert systems.run_system(echo, ["--vram", "1GB"], own, **given)["argv"] == [
        "--vram", "1GB", "--gamma", "4", "--vram", "all",
    ]  # fmt: skip


def test_memory_decides_how_many_layers_stay() -> None:
    def options(vram: str, *others: str) -> Any:
        given = ["--shape", "llama2-7b", "--device", "cpu", "--prompt-tokens", "512", "--vram", vram, *others]
        return options_from(peer_parser("").parse_args(given))

    assert fitting_layers(options("2GB"), working_layers=0) == 0
    few = fitting_layers(options("6GB"), working_layers=0)
    assert 5 <= few <= 10 and fitting_layers(options("6GB"), working_layers=3) == few - 3
    assert fitting_layers(options("6GB", "--kv-cache", "offloaded"), working_layers=0) >= few


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--shape", "tiny", "--new-tokens", "1"], OptionError, "at least 2"),
        (["--shape", "tiny", "--resident-layers", "5"], OptionError, "has 4 layers"),
        (["--shape", "tiny", "--resident-layers", "x"], OptionError, "not a number"),
        (["--shape", "tiny", "--assistant-tokens", "4,0"], OptionError, "at least 1"),
        (["--shape", "tiny", "--prompt-tokens", "1020"], ContextLengthError, "1028 positions"),
        (["--shape", "tiny", "--target", "x"], OptionError, "whole model"),
        (["--shape", "tiny", "--temperature", "-1"], OptionError, "temperature"),
        (["--shape", "tiny", "--warmup", "1"], OptionError, "cold"),
    ],
)
def test_a_peer_refuses_what_makes_no_sense(arguments: list[str], error: type[OffloadError], words: str) -> None:
    with pytest.raises(error, match=words):
        options_from(peer_parser("").parse_args([*arguments, "--device", "cpu"]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--synthetic", "tiny", "--systems", "foo"], "unknown system 'foo'"),
        (["--synthetic", "tiny", "--systems", ","], "unknown system"),
        (["--synthetic", "tiny", "--draft", "d"], "has no language"),
        (["--synthetic", "tiny", "--systems", "accelerate", "--gamma", "2"], "--gamma is for none of accelerate"),
        (["--target", "x"], "needs a prompt"),
        (["--synthetic", "tiny", "--source", "x"], "needs a prompt"),
        (["--synthetic", "tiny", "--noise", "0.1"], "name one with --source"),
        (["--synthetic", "tiny", "--source", "/nowhere", "--prompt-file", "y"], "/nowhere does not exist"),
        (["--target", "x", "--prompt-file", "y", "--source", "z"], "leave it out with --target"),
        (["--target", "x", "--prompt-file", "y", "--layers", "2"], "leave it out with --target"),
        (["--target", "/nowhere", "--prompt-file", "y"], "/nowhere does not exist"),
        (["--synthetic", "tiny", "--systems", "ours,ours"], "names a system twice"),
        (["--synthetic", "tiny", "--gamma", "x"], "argument --gamma: invalid int value: 'x'; --help lists"),
        (["--synthetic", "tiny", "--target", "x"], "not allowed with"),
        (["--synthetic", "tiny", "--gamma", "0"], "gamma must be at least 1, not 0"),
        (["--synthetic", "tiny", "--tree-nodes", "-1"], "tree_nodes must be at least 0"),
        (["--synthetic", "tiny", "--tree-nodes", "4", "--speculation", "none"], "does nothing with --speculation none"),
        (
            ["--synthetic", "tiny", "--speculation", "triforce"],
            "does not draft with n-grams: name a model with --draft",
        ),
        (["--synthetic", "tiny", "--timeout", "nan"], "at least 1 second and finite, not nan"),
        (["--synthetic", "tiny", "--prompt-tokens", "0"], "--prompt-tokens must be at least 1, not 0"),
        (["--synthetic", "tiny", "--new-tokens", "1"], "new_tokens must be at least 2"),
        (["--synthetic", "tiny", "--new-tokens", "2000"], "lower --prompt-tokens or --new-tokens"),
        (["--synthetic", "tiny", "--temperature", "nan"], "temperature must be 0 (greedy) or a positive number"),
        (["--synthetic", "tiny", "--seed", "-1"], "seed must be in"),
        (["--synthetic", "tiny", "--vram", "lots"], "'lots' is not a size"),
        (["--synthetic", "tiny", "--resident-layers", "9"], "take 0 to 4, or auto"),
        (["--synthetic", "tiny", "--assistant-tokens", "4,x"], "'x' is not a number"),
        (["--synthetic", "tiny", "--out", "/proc/c.json"], "/proc/c.json cannot be written"),
        (["--synthetic", "tiny", "--out", "c.svg"], "would be the chart's name, too"),
        (["--synthetic", "tiny", "--out", "/"], "--out / is a directory"),
    ],
)
def test_compare_refuses_before_anything_is_measured(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert compare.main([*arguments, "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and not any(tmp_path.iterdir())


def timed_window(tokens: int, link_share: float, **others: Any) -> dict[str, Any]:
    """A pass of half a second over a link of 20 GB/s, of which nothing was predicted."""
    return {
        "window_tokens": tokens, "link_share": link_share, "link_gbps": 20 * link_share, "link_peak_gbps": 20.0,
        "pass_s": {"median": 0.5}, "host_launch_share": 0.05, "predicted_s": None, **others,
    }  # fmt: skip


def our_result(tok_per_s: float, windows: list[dict[str, Any]], kind: str = "BF16", **others: Any) -> dict[str, Any]:
    """What ours reports, with weights of 8e9 elements that are streamed."""
    weights = {"bytes_by_kind": {kind: 1}, "streamed_elements": 8 * 10**9, "read_bytes_per_pass": 3 * 10**9}
    weights["copy_gbps"] = 4.0
    settings = {"encode": others.pop("encode", "none")}
    return result(
        tok_per_s, windows=windows, vram_limit_bytes=24 * 10**9, differing_generations=0, weights=weights,
        settings=settings, placement="somewhere", **others,
    )  # fmt: skip


def test_the_bench_of_streaming_judges_what_was_measured() -> None:
    ours = our_result(4.0, [timed_window(1, 0.98)])
    results = {"ours": ours, "deepspeed": result(3.8), "accelerate": {"missing": "x"}}
    assert systems.times_ours_over(results) == {"deepspeed": 4.0 / 3.8}
    verdicts = {check.claim: check.holds for check in bench_streaming.checks(results)}
    assert verdicts == {
        "link share of the peak, window 1": True, "host launch share of a pass, window 1": True,
        "generations that differ": True, "times the tokens per second of deepspeed": False,
    }  # fmt: skip
    assert bench_streaming.checks({"ours": {"error": "x"}}) == []


def test_the_bench_of_streaming_judges_stored_and_coded_weights_by_their_bytes() -> None:
    scripted = {"accepted_per_pass": 10, "window_tokens": 64, "tok_per_s": 9.0, "bound_tok_per_s": None}
    predicted = timed_window(1, 0.98, predicted_s=0.47, share_off=0.0638)
    ours = our_result(
        1.0, [predicted, timed_window(256, 0.96)], "Q4_K", scripted=[{**scripted, "identical_to_plain": False}]
    )
    assert {check.claim: check.holds for check in bench_streaming.checks({"ours": ours})} == {
        "link share of the peak, window 1": True, "share off what was predicted, window 1": False,
        "host launch share of a pass, window 1": True, "times what the bytes take over the link, window 256": True,
        "host launch share of a pass, window 256": True, "answers unlike the script, 10 tokens a pass": False,
        "generations that differ": True,
    }  # fmt: skip
    lines = bench_streaming.window_lines({"ours": ours})
    assert "predicted 0.4700 s (+6.4%)" in lines[0] and "9.00 tok/s" in lines[2] and "somewhere" in lines[3]
    assert "weights at 2 GB/s = 50.0% of copies" in lines[4]
    resident = our_result(1.0, [timed_window(1, 0.0)], "Q4_K") | {"bytes_per_pass": 0}
    assert [check.claim for check in bench_streaming.checks({"ours": resident})] == ["generations that differ"]
    coded = our_result(1.0, [timed_window(1, 0.98), timed_window(256, 0.95)], "12-bit BF16", encode="always")
    verdicts = {check.claim: (check.measured, check.holds) for check in bench_streaming.checks({"ours": coded})}
    assert verdicts["times the link's bytes in 16 bits, window 1"] == (1.6, True)
    assert not verdicts["times what the bytes take over the link, window 256"][1]


def test_a_model_that_does_not_fit_is_no_error_of_memory_later() -> None:
    given = ["--shape", "llama2-7b", "--device", "cpu", "--vram", "6GB"]
    with pytest.raises(BudgetError, match="of 32 layers do"):
        require_whole_model(options_from(peer_parser("").parse_args(given)))
