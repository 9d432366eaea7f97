"""Sweeps over long contexts on a tiny model: every row is plain decoding's text, and an interrupted sweep goes on."""

from __future__ import annotations

import gc
import io
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from long_context.command import stretches
from long_context.internals import Rig, proposer_of, target_cache, tell_again
from long_context.needle import NeedleTest
from long_context.rows import SWEEPS, Lengths, RowMeasurement, Setting, bound, points_of, starts_of
from long_context.session import Decoding, Session, compare, target_acceptance
from offload_runtime_kernels.kv_blocks import KVBlocks
from sweep import main

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.engine.load import load_runtime
from offload_runtime.errors import OptionError
from offload_runtime.params import SamplingParams
from offload_runtime.speculation import Proposal, StepResult
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.planning import finding_pieces

TARGET = "two_layer_target"
TEXT = "the quick brown fox jumps over the lazy dog and the pass streams on. a link, a layer, a slot; "
OPTIONS = SpeculationOptions(
    "triforce", "streaming", budget_tokens=128, chunk_size=8, recent_tokens=64, gamma_draft=3, refresh_steps=4
)
SHORT = {
    "--context": "900", "--budget": "128", "--chunk-size": "8", "--recent": "64", "--gamma": "7", "--gamma-draft": "3",
    "--tokens": "8", "--starts": "2",
}  # fmt: skip
OWN_OPTIONS = {
    "temperature": {"--temperature"}, "budget": {"--budget"}, "chunk": {"--chunk-size"}, "context": set(),
    "gamma": set(), "batch": {"--context"}, "policy": {"--policy"}, "needle": {"--policy", "--tokens", "--starts"},
}  # fmt: skip
TOKENS = [3 + (7 * i * i + i // 5) % 290 for i in range(900)]


@pytest.fixture
def sweep(target: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs the command on the tiny model."""
    text = tmp_path / "novel.txt"
    text.write_text(TEXT * 60)
    fixed = f"--source {target} --shape none --text {text} --device cpu --dtype fp32 --commit abc"

    def run(*words: str) -> int:
        swept = [word for word in words if word in OWN_OPTIONS]
        dropped = set.intersection(*(OWN_OPTIONS[name] for name in swept))
        if "none" in words:
            dropped |= {"--recent", "--gamma-draft"}
        short = [part for name, value in SHORT.items() if name not in dropped for part in (name, value)]
        return main([*words, *fixed.split(), *short])

    return run


@pytest.fixture(params=["gpu", "host"], ids=["kv-gpu", "kv-host"])
def runtime(request: pytest.FixtureRequest, target: Path, draft: Path) -> Iterator[Runtime]:
    with load(target, draft=draft, context=1024, kv=request.param, speculation=OPTIONS) as loaded:
        yield loaded


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["value"]: row for row in json.loads(path.read_text())["rows"]}


class Interrupted(io.StringIO):
    """What is printed to, until somebody presses Ctrl-C at the second row."""

    rows = 0

    def write(self, text: str) -> int:
        self.rows += "True" in text  # the last column
        if self.rows == 2:
            raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_stopped(
    sweep: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t.json"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sys, "stdout", Interrupted())
        sweep("temperature", "--values", "0,0.6,1", "--out", str(out))
    before = rows_of(out)
    assert list(before) == ["0", "0.6"]
    assert sweep("temperature", "--values", "0,0.6,1", "--out", str(out)) == 0
    rows = rows_of(out)
    assert list(rows) == ["0", "0.6", "1"]
    assert {value: rows[value] for value in before} == before, "measured again"
    for row in rows.values():
        assert row["identical_to_plain"] and row["compared_tokens"] >= 16
        assert 0 < row["accepted"] <= row["proposed"] and 0 < row["draft_acceptance"] <= 1
        assert row["tokens_per_pass"] == pytest.approx(row["tokens"] / row["passes"])
        assert row["accepted"] + row["passes"] == row["tokens"]
    assert sweep("temperature", "--values", "1", "--out", str(out), "--refresh-steps", "2") == 0
    again = rows_of(out)
    assert list(again) == ["1"] and again["1"] != rows["1"]  # of other settings nothing is kept


@pytest.mark.slow
def test_several_sweeps_share_a_runtime(
    sweep: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "budget": ("64", "512"), "chunk": ("16",), "context": ("900", "300"), "gamma": ("4", "d5"),
        "policy": ("topk", "chain"), "needle": ("0.9",),
    }  # fmt: skip
    for name, values in small.items():
        monkeypatch.setitem(SWEEPS, name, replace(SWEEPS[name], values=values))
    assert sweep(*small, "--out", str(tmp_path / "{sweep}.json")) == 0
    assert capsys.readouterr().out.count("loaded in") == 1
    found = {name: rows_of(tmp_path / f"{name}.json") for name in small}
    assert {name: tuple(rows) for name, rows in found.items()} == small
    assert all(row["identical_to_plain"] for rows in found.values() for row in rows.values())
    # 512 tokens hold all that is far, so the retrieval verifier is wrong only where rounding decides.
    assert found["budget"]["512"]["acceptance_judged"] > 0.95 > found["budget"]["64"]["acceptance_judged"]
    assert found["policy"]["chain"]["verifier_steps_per_pass"] == 0
    assert found["gamma"]["4"]["accepted"] <= found["gamma"]["4"]["passes"] * 4
    for row in found["needle"].values():
        assert row["prompt_tokens"] == 900 and row["number_log_probability"] < 0
        assert 0 <= row["policies"]["streaming"]["agreement"] < row["policies"]["topk"]["agreement"] <= 1


@pytest.mark.slow
def test_batches(sweep: Callable[..., int], tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    assert sweep("batch", "--values", "2x400,3x300", "--out", str(out), "--temperature", "0") == 0
    rows = rows_of(out)
    for label, batch in (("2x400", 2), ("3x300", 3)):
        assert rows[label]["identical_to_plain"]
        assert rows[label]["tokens"] >= 2 * 8 * batch
        assert rows[label]["tokens_per_pass"] > batch


class Lying(Session):
    """Says another sixth token than was decoded, where anybody proposes."""

    def decode(self, start: Any, proposer: Any, *rest: Any, **options: Any) -> Decoding:
        done = super().decode(start, proposer, *rest, **options)
        if proposer.name is None:
            return done
        return replace(done, texts=tuple((*text[:5], text[5] + 1, *text[6:]) for text in done.texts))


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["gpu"], indirect=True)
def test_a_row_says_where_it_is_not_plain_decoding(runtime: Runtime) -> None:
    rows = RowMeasurement(Lying(runtime), Rig(runtime), {"novel": [TOKENS]}, Lengths(8, 8, 2))
    row = rows.measure(Setting(OPTIONS, 0.6, 900, 9, 8))
    assert not row["identical_to_plain"] and row["first_difference"] == (0, 5)


@pytest.mark.slow
def test_places_are_drawn_from_several_texts(sweep: Callable[..., int], tmp_path: Path) -> None:
    other, outs = tmp_path / "other.txt", [tmp_path / f"{seed}.json" for seed in (1, 2)]
    other.write_text(TEXT[::-1] * 60)
    found = []
    for seed, out in zip((1, 2), outs, strict=True):
        words = ("--values", "9", "--other-text", str(other), "--draw", str(seed), "--out", str(out))
        assert sweep("gamma", *words) == 0
        (row,) = json.loads(out.read_text())["rows"]
        found.append([(place["text"], place["tokens"]) for place in row["places"]])
        times = [place["times_plain"] for place in row["places"]]
        assert min(times) <= row["times_plain"] <= max(times) and row["identical_to_plain"]
    assert [name for name, _ in found[0]] == ["novel.txt", "other.txt"] and found[0] != found[1]


@pytest.mark.slow
def test_a_row_that_is_not_plain_decoding_fails_the_command(sweep: Callable[..., int], tmp_path: Path) -> None:
    """Whenever it was measured."""
    out = tmp_path / "g.json"
    assert sweep("gamma", "--values", "9", "--out", str(out)) == 0
    report = json.loads(out.read_text())
    report["rows"][0]["identical_to_plain"] = False
    out.write_text(json.dumps(report))
    assert sweep("gamma", "--values", "9", "--out", str(out)) == 1  # the row is still there, and still wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["context", "--values", "4K"], "more than --context 900"),
        (["policy", "--values", "best"], "policy must be"),
        (["temperature", "budget", "--out", "x.json"], "put {sweep} in its name"),
        (["temperature", "budget", "--values", "1"], "--values belongs to one sweep"),
        (["gamma", "--draft", "none"], "varies the draft, and there is none"),
        (["temperature", "--temperature", "1"], "--temperature would be ignored by temperature: drop it"),
        (["batch", "--context", "400"], "--context would be ignored by batch"),
        (["needle", "--starts", "2"], "--starts would be ignored by needle"),
        (["gamma", "--chain-gamma", "2"], "--chain-gamma would be ignored by gamma: drop it; it is used by policy"),
        (["gamma", "--noise", "0.1"], "--noise would be ignored with --shape none"),
        (["gamma", "--draft-cache", "full"], "--recent would be ignored with --draft-cache full"),
        (["budget", "--draft", "none", "--gamma-draft", "2"], "--gamma-draft would be ignored with --draft none"),
        (["temperature", "--emulate", "rtx4090"], "unrecognized arguments: --emulate rtx4090"),
        (["temperature", "window"], "temperature and window take different models"),
        (["temperature", "--values", "warm"], "'warm' is not a number"),
        (["budget", "--values", "8K"], "8192 tokens is more than the context"),
        (["batch", "--values", "9x5K"], "lower --context, or name a longer --text"),
    ],
)
def test_what_makes_no_sense_is_refused(
    sweep: Callable[..., int], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert sweep(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--values", "-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--vram", "lots"], "'lots' is not a size"),
        (["--starts", "few"], "argument --starts: invalid int value: 'few'; --help lists the options"),
        (["--out", "/"], "--out / is a directory"),
        (["--out", "/proc/x.json"], "/proc/x.json cannot be written"),
        (["--plot", "/proc/x"], "/proc/x.png cannot be written (No such file or directory): name another --plot"),
        (["--plot", "."], "--plot . is a directory"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--context", "1100"], "novel.txt has 40 tokens and 1100 are needed"),
        (["--starts", "900"], "900 --starts are more places than there are in 900 tokens"),
        (["--text", "gone"], "gone cannot be read (No such file or directory): name another --text"),
        (["--text", "/"], "/ cannot be read (Is a directory)"),
    ],
)
def test_what_would_fail_after_minutes_is_refused_before_anything_is_loaded(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(TEXT)
    capsys.readouterr()
    given = f"temperature --source {target} --shape none --text novel.txt --device cpu --dtype fp32 --context 900"
    assert main([*given.split(), *words]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ") and told.err.count("\n") == 1 and message in told.err
    assert "loaded in" not in told.out
    assert [path.name for path in tmp_path.iterdir()] == ["novel.txt"]


def test_files_of_something_else_are_left_alone(
    sweep: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for content in ("{}", '{"benchmark": "sweep_long_context", "sweep": "budget", "rows": []}', "not json"):
        out = tmp_path / "other.json"
        out.write_text(content)
        assert sweep("temperature", "--out", str(out)) == 2
        assert "name another file" in capsys.readouterr().err and out.read_text() == content


@pytest.mark.slow
def test_a_rebuilt_hierarchy_chooses_as_one_that_saw_the_prefill(runtime: Runtime) -> None:
    """Its acceptance is that of the loaded one at every level, after other hierarchies have been there."""
    start, params = [TOKENS[:700]], SamplingParams(0.6, seed=3)
    session = Session(runtime)
    expected = session.decode(start, proposer_of(runtime), params, gamma=8, count=24)
    rig = Rig(runtime)
    others = [
        (replace(OPTIONS, chunk_size=16), "topk"),
        (OPTIONS, "streaming"),
        (replace(OPTIONS, mode="chain"), "topk"),
    ]
    for options, policy in (*others, (OPTIONS, "retrieval")):
        proposer = rig.build(options, policy)
        found = session.decode(start, proposer, params, gamma=8, count=24)
        assert compare(expected.texts, found.texts).identical
    assert found.rounds == expected.rounds
    assert (found.verifier_steps, found.draft_accepted) == (expected.verifier_steps, expected.draft_accepted)
    assert 0 < found.draft_accepted < found.draft_proposed  # both levels are put to the test
    assert any(len(played.path) < len(played.proposal) for played in found.rounds)


class Recorder:
    """An observer that keeps a copy of every block it is told about, and of which at once."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], torch.Tensor] = {}
        self.pieces: dict[int, list[range]] = {}  # by layer

    def on_blocks(self, layer: int, sequence: int, kv: KVBlocks, row: int, blocks: range) -> None:
        self.pieces.setdefault(layer, []).append(blocks)
        for block in blocks:
            self.blocks[layer, block] = kv.data[row, (block - kv.first_block) % kv.num_blocks].clone()


@pytest.mark.parametrize("kv", ["kv-gpu", "kv-host"])
def test_blocks_are_told_again_as_they_were(target: Path, kv: str) -> None:
    first, again = Recorder(), Recorder()
    config = RuntimeConfig(target, "none", device="cpu", context=2048, kv=kv.removeprefix("kv-"))
    with Runtime(load_runtime(config, find=finding_pieces(3))) as runtime:
        cache, session = target_cache(runtime), Session(runtime)
        cache.observers.append(first)
        # The last two of seven blocks lie elsewhere on the host, and the five before are more than a piece.
        for length in (1300, 1800):
            session.fill(0, [token % 290 + 3 for token in range(length)])
        cache.observers[:] = [again]
        tell_again(runtime)
    pieces = [range(7)] if kv == "kv-gpu" else [range(3), range(3, 5), range(5, 7)]
    assert again.pieces == dict.fromkeys(range(2), pieces)
    assert set(again.blocks) == {(layer, block) for layer in range(2) for block in range(7)} == set(first.blocks)
    assert all(torch.equal(again.blocks[key], data) for key, data in first.blocks.items())


@pytest.mark.slow
def test_a_cache_that_was_cut_back_serves_other_texts(runtime: Runtime) -> None:
    session, rig, params = Session(runtime), Rig(runtime), SamplingParams(1.0, seed=5)
    proposer = rig.build(OPTIONS)
    # At and off the ends of blocks, forth again, and another text that begins alike.
    texts = [TOKENS[:800], TOKENS[:513], TOKENS[:256], TOKENS[:700], [*TOKENS[:300], *TOKENS[100:400]]]
    found = [session.decode([text], proposer, params, gamma=10, count=20).texts[0][:20] for text in texts]
    fresh = [runtime.generate(text, max_new_tokens=20, temperature=1.0, seed=5, ignore_eos=True) for text in texts]
    assert [list(text) for text in found] == [result.tokens for result in fresh]


def test_a_text_is_read_again_once_a_warm_up_has_emptied_the_cache(runtime: Runtime) -> None:
    session = Session(runtime)
    expected = session.fill(0, TOKENS[:300])
    target_cache(runtime).truncate(0, 0)
    found = session.fill(0, TOKENS[:300])
    assert expected is not None and found is not None and torch.equal(expected, found)


def test_a_rig_lets_go_of_what_it_replaces(runtime: Runtime) -> None:
    loaded = weakref.ref(proposer_of(runtime))
    policies = [weakref.ref(observer) for observer in target_cache(runtime).observers]
    before = runtime.parts.budget.reserved_bytes
    rig = Rig(runtime)
    gc.collect()
    assert not any(ref() for ref in (loaded, *policies))
    without = runtime.parts.budget.reserved_bytes
    rig.build(OPTIONS, "topk")
    rig.build(OPTIONS)
    assert len(target_cache(runtime).observers) == 1
    assert without < before == runtime.parts.budget.reserved_bytes
    with pytest.raises(OptionError, match="more than the context"):
        rig.build(replace(OPTIONS, budget_tokens=2048))


def test_acceptance_is_counted_by_depth() -> None:
    def played(num_proposed: int, num_accepted: int) -> StepResult:
        proposal = Proposal.chain(range(num_proposed), "draft")
        return StepResult(list(range(num_accepted + 1)), proposal, tuple(range(num_accepted)))

    rounds = [played(3, 2), played(3, 3), played(2, 0), played(0, 0)]
    found = target_acceptance(rounds)
    assert (found["proposed"], found["accepted"]) == (8, 5)
    assert found["acceptance"] == 5 / 8 and found["acceptance_judged"] == 5 / 7
    assert found["accepted_by_depth"] == [2 / 3, 2 / 3, 1 / 2]
    assert target_acceptance([played(0, 0)])["acceptance"] is None


def test_the_bound_is_a_pass_and_its_steps() -> None:
    setting = Setting(replace(OPTIONS, refresh_steps=2), 0.6, 900, 9, 8)
    row = {
        "pass_s": 0.1, "verifier_steps_per_pass": 5.0, "verifier_step_ms": 4.0, "verifier_step_with_refresh_ms": 8.0,
        "draft_step_ms": 1.0, "draft_steps": 3, "tokens_per_pass": 8.0, "plain_s_per_token": 0.05, "s_per_token": 0.025,
        "draft_steps_per_pass": 6.0,
    }  # fmt: skip
    found = bound(row, setting)  # a pass of 100 ms and 5 steps of (4 + 8) / 2 + 3 * 1 ms, for 8 tokens
    assert found["bound_tok_per_s"] == pytest.approx(8 / 0.145)
    assert found["bound_times_plain"] == pytest.approx(8 * 0.05 / 0.145)
    assert found["share_of_bound"] == pytest.approx(0.145 / 8 / 0.025)
    chain = bound(row, replace(setting, options=replace(OPTIONS, mode="chain")))  # 6 steps of the draft
    assert chain["bound_tok_per_s"] == pytest.approx(8 / 0.106)


def test_starts_and_stretches() -> None:
    starts = starts_of([TOKENS], 800, 4)
    ends = [len(start[0]) for start in starts]
    assert ends == sorted(ends, reverse=True) and len(set(ends)) == 4 and 750 <= ends[-1] < ends[0] < 800
    drawn = [len(start[0]) for start in starts_of([TOKENS], 800, 4, 7)]
    assert drawn == sorted(set(drawn), reverse=True) and len(drawn) == 4 and 700 <= drawn[-1] < drawn[0] < 800
    assert drawn == [len(start[0]) for start in starts_of([TOKENS], 800, 4, 7)] != ends
    apart = stretches(TOKENS, 300, 3)
    assert [part[0] for part in apart] == [TOKENS[0], TOKENS[300], TOKENS[600]]
    overlapping = stretches(TOKENS, 800, 3)
    assert len({tuple(part) for part in overlapping}) == 3 and all(len(part) == 800 for part in overlapping)
    with pytest.raises(OptionError, match="need more text"):
        stretches(TOKENS, 900, 2)


def test_longer_contexts_come_first() -> None:
    base = Setting(OPTIONS, 0.6, 900, 9, 8)
    assert [point.label for point in points_of("context", base, ["4K", "120K", "300"])] == ["120K", "4K", "300"]
    assert [point.setting.context_tokens for point in points_of("context", base, None)][:2] == [122880, 65536]
    assert [point.label for point in points_of("needle", base, ["0.1", "0.9"])] == ["0.9", "0.1"], "and deeper needles"
    with pytest.raises(OptionError, match="starts must be at least 1"):
        Lengths(1, 1, 0)


@pytest.mark.slow
def test_agreement_with_itself_is_full(runtime: Runtime) -> None:
    """A needle's retrieval verifier that holds everything says what the full target says."""
    setting = Setting(replace(OPTIONS, budget_tokens=768, gamma_draft=3), 0.6, 800, 9, 8, depth=0.5)
    row = NeedleTest(Session(runtime), Rig(runtime), TOKENS, seeds=[1]).measure(setting)
    assert row["policies"]["retrieval"]["agreement"] == 1.0 == row["policies"]["streaming"]["agreement"]
    assert torch.isfinite(torch.tensor(row["answer_log_probability"])) and row["identical_to_plain"]
