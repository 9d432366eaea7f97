"""Traces of whole runs: every copy once, in its place, and the same figures as the engine's own counters."""

import json
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.cache.host import HostKVCache
from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import GenerationResult, Runtime
from offload_runtime.errors import StorageError
from offload_runtime.stream.copy_engine import CopyEngine
from tests.helpers import traces
from tests.helpers.assembly import copying_threads
from tests.helpers.engine import NUM_LAYERS, load, raising
from tests.helpers.planning import load_streaming_kv

TARGET = "long_target"
CONTEXT, NEW_TOKENS = 1024, 16
PROMPTS = [[(7 * index) % 250 + 4 for index in range(500)], [(11 * index) % 250 + 4 for index in range(300)]]
ASKED: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.6, "seed": 3, "ignore_eos": True}
LEVELS = SpeculationOptions("triforce", "full", chunk_size=8, budget_tokens=96, gamma_draft=2)
RUNS: dict[str, dict[str, Any]] = {
    "weights": {"resident_layers": 2},
    "KV": {"kv": "host", "draft": "ngram"},
    "both": {"resident_layers": 1, "kv": "host"},
    "neither": {"kv": "gpu"},
    "plain": {"resident_layers": 0, "kv": "host", "draft": "none"},
    "TriForce": {"kv": "host", "speculation": LEVELS},
    "batch": {"resident_layers": 1, "kv": "host", "max_batch": 2},
}

STREAMED: dict[str, set[str]] = {
    "weights": {"weights"}, "KV": {"kv"}, "both": {"weights", "kv"}, "neither": set(), "plain": {"weights", "kv"},
    "TriForce": {"kv"}, "batch": {"weights", "kv"},
}  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A run that is over: its trace, and the queues that it was of."""

    rows: dict[str, list[traces.Bar]]
    results: Sequence[GenerationResult]
    engine: CopyEngine
    writeback: CopyEngine | None
    about: dict[str, Any]
    is_captured: bool


def traced(path: Path, target: Path, *, load: Callable[..., Runtime] = Runtime.load, **options: Any) -> Traced:
    """Generate for one prompt, or for as many as there is room for at once."""
    with load(target, trace=path, context=CONTEXT, **{"device": "cpu", **options}) as runtime:
        cache = runtime.engine.target.runner.cache
        writeback = cache.writes.engines[0] if isinstance(cache, HostKVCache) else None
        engine = runtime.engine.target.cards[0].engine
        batch = options.get("max_batch", 1)
        gamma = None if options.get("draft") == "none" else 7
        batched = batch > 1
        found = runtime.generate_batch(PROMPTS[:batch], gamma=gamma, **ASKED) if batched else [generate(runtime, gamma)]
        captured = runtime.plan.captured_bytes > 0
        assert not path.exists()
    return Traced(traces.rows_of(path), found, engine, writeback, json.loads(path.read_text())["otherData"], captured)


def generate(runtime: Runtime, gamma: int | None = None) -> GenerationResult:
    return runtime.generate(PROMPTS[0], gamma=gamma, **ASKED)


def assert_consistent(run: Traced, *, tolerance_s: float) -> None:
    """What holds for every trace."""
    rows, queues = run.rows, {"link": run.engine, "link back": run.writeback}
    assert list(rows) == ["passes", "link", "link back", "compute", "stalls", "draft", "host"]
    assert run.about["dropped_spans"] == 0
    for row, engine in queues.items():
        assert traces.total_bytes(rows[row]) == (engine.bytes_copied if engine is not None else 0)
        slack_s = tolerance_s * (1 + len(rows[row]))
        assert traces.total_s(rows[row]) == pytest.approx(engine.copy_seconds() if engine else 0.0, abs=slack_s)
    # Of what is staged the host waits for the staging as well.
    waits = [bar for bar in rows["stalls"] if bar.name == "wait for the link"]
    waits += [bar for bar in rows["host"] if bar.name == "staging for the link"]
    slack_s = tolerance_s * (1 + len(waits))
    assert traces.total_s(waits) == pytest.approx(run.engine.stall_seconds(), abs=slack_s)
    for row in ("passes", "link", "link back", "compute"):
        traces.assert_one_after_the_other(rows[row], tolerance_s=tolerance_s)
    traces.assert_layers_wait_for_their_copies(rows, tolerance_s=tolerance_s)
    # Every layer of every pass, or all as one where a window's pass is a CUDA graph, within it.
    num_bars = 0
    for number, one in enumerate(rows["passes"]):
        assert one.args["pass"] == number
        layers = [bar for bar in rows["compute"] if one.start_s - tolerance_s <= bar.start_s <= one.end_s]
        numbers = [bar.args["layer"] for bar in layers]
        assert numbers == ([None] if run.is_captured and one.args["kind"] == "verify" else list(range(NUM_LAYERS)))
        assert layers[-1].end_s <= one.end_s + tolerance_s
        num_bars += len(layers)
    assert len(rows["compute"]) == num_bars


def assert_figures(run: Traced) -> None:
    """The trace tells the same of the passes as the returned figures do."""
    passes = run.rows["passes"]
    prefills, rounds = ([bar for bar in passes if bar.args["kind"] == kind] for kind in ("prefill", "verify"))
    assert [bar.args["tokens"] for bar in prefills] == [[len(prompt)] for prompt in PROMPTS[: len(run.results)]]
    stats = [result.stats for result in run.results]
    assert len(rounds) == max(one.passes for one in stats)
    assert sum(len(bar.args["tokens"]) for bar in rounds) == sum(one.passes for one in stats)
    last_levels = [one.acceptance[-1] for one in stats if one.acceptance]
    assert sum(sum(bar.args["accepted"]) for bar in rounds) == sum(level.accepted for level in last_levels)
    assert sum(sum(bar.args["proposed"]) for bar in rounds) == sum(level.proposed for level in last_levels)
    for bar in rounds:
        assert bar.args["tokens"] == [1 + proposed for proposed in bar.args["proposed"]]
    for one in stats:  # which have begun together
        assert round(sum(bar.args["bytes"] for bar in rounds[: one.passes]) / one.passes) == one.bytes_per_pass
    proposals = [bar for bar in run.rows["draft"] if bar.name == "propose"]
    assert len([b for b in proposals if any(b.args["proposed"])]) == len([b for b in rounds if any(b.args["proposed"])])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", list(RUNS))
def test_a_trace_says_what_happened(target: Path, draft: Path, name: str, tmp_path: Path) -> None:
    options = {"draft": draft, "resident_layers": NUM_LAYERS, **RUNS[name]}
    run = traced(tmp_path / "trace.json", target, **options)
    assert_consistent(run, tolerance_s=traces.FILE_S)
    assert_figures(run)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    kinds = {bar.args["kind"] for bar in run.rows["link"]} - {"measurement"}
    assert kinds == STREAMED[name]
    back = [bar.args for bar in run.rows["link back"]]
    answers = range(len(run.results)) if "kv" in kinds else ()
    # One block of each prompt, and one that the first answer fills.
    full = {sequence: (len(PROMPTS[sequence]) + NEW_TOKENS - 1) // BLOCK_TOKENS for sequence in answers}
    assert {args["kind"] for args in back} == ({"kv"} if full else set())
    assert sorted((args["sequence"], args["block"], args["layer"]) for args in back) == [
        (sequence, block, layer)
        for sequence, blocks in full.items() for block in range(blocks) for layer in range(NUM_LAYERS)
    ]  # fmt: skip
    stats = run.results[0].stats
    assert (stats.link_idle_share is None) == (name == "neither")
    hidden = stats.hidden_draft_share  # on the CPU behind copies alone
    assert hidden is None if name == "plain" else hidden == 0.0 if name == "neither" else 0.0 <= (hidden or 0.0) <= 1.0
    steps = {bar.name for bar in run.rows["draft"]}
    assert ("draft steps" in steps) == (options["draft"] == draft)
    assert ("verifier step" in steps) == (name == "TriForce")
    with load(target, context=CONTEXT, **options) as runtime:
        asked = runtime.generate_batch(PROMPTS, **ASKED) if name == "batch" else [generate(runtime)]
    assert [result.tokens for result in asked] == [result.tokens for result in run.results]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("where", "after", "passes"), [("between passes", 3, 4), ("in prefill", 2, 0)], ids=["between passes", "in prefill"]
)
def test_interrupted_traces(target: Path, draft: Path, tmp_path: Path, where: str, after: int, passes: int) -> None:
    path, interrupt = tmp_path / "trace.json", raising(KeyboardInterrupt(), after=after)
    hooks = {"between passes": {"should_stop": interrupt}, "in prefill": {"on_prefill": interrupt}}
    with (
        pytest.raises(KeyboardInterrupt),
        load(target, draft=draft, resident_layers=1, context=CONTEXT, trace=path) as runtime,
    ):
        runtime.generate_batch(PROMPTS[:1], gamma=7, **ASKED, **hooks[where])
    rows = traces.rows_of(path)
    assert len(rows["passes"]) == passes
    assert all("accepted" in bar.args for bar in rows["passes"][1:])
    traces.assert_one_after_the_other(rows["link"])


def test_an_unwritable_place_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for place, words in (
        (tmp_path / "absent" / "t.json", "No such file"),
        (file / "t.json", "Not a directory"),
        (tmp_path, "is not a regular file"),
        (tmp_path / ("long" * 100), "File name too long"),
        (fifo, "is not a regular file"),
        (tmp_path / "a\0b", "null byte"),
        (tmp_path / "\ud800", "surrogates not allowed"),
    ):
        with pytest.raises(StorageError, match=words):
            Runtime.load(tmp_path / "no model", device="cpu", trace=place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "file"] and fifo.is_fifo()


def test_a_trace_that_cannot_be_written_is_said_and_memory_is_given_back(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    threads = copying_threads()
    runtime = Runtime.load(target, device="cpu", resident_layers=1, trace=folder / "trace.json")
    generate(runtime)
    decoder = weakref.ref(runtime.engine.target.runner.decoder)
    assert copying_threads() > threads
    folder.rmdir()
    with pytest.raises(StorageError, match=r"trace\.json cannot be written"):
        runtime.close()
    assert copying_threads() == threads and decoder() is None
    runtime.close()


@pytest.fixture(scope="module")
def of_a_gpu(target: Path) -> dict[int, list[list[int]]]:
    """By plain decoding, of which nobody keeps a trace, for the first prompts alone and for all at once."""
    options: dict[str, Any] = {"draft": "none", "dtype": "bf16", "device": "cuda", "max_batch": len(PROMPTS)}
    with Runtime.load(target, context=CONTEXT, **options) as runtime:
        together = {count: runtime.generate_batch(PROMPTS[:count], **ASKED) for count in (1, len(PROMPTS))}
    return {count: [result.tokens for result in results] for count, results in together.items()}


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", list(RUNS))
def test_on_a_gpu(target: Path, draft: Path, of_a_gpu: dict[int, list[list[int]]], name: str, tmp_path: Path) -> None:
    options = {"draft": draft, "resident_layers": NUM_LAYERS, "dtype": "bf16", "device": "cuda", **RUNS[name]}
    run = traced(tmp_path / "trace.json", target, load=load_streaming_kv, **options)
    assert [result.tokens for result in run.results] == of_a_gpu[len(run.results)]
    assert_consistent(run, tolerance_s=traces.EVENT_S)
    assert_figures(run)
    assert {bar.args["kind"] for bar in run.rows["link"]} - {"measurement"} == STREAMED[name]
    # On one clock: the device begins a pass after the host, and the host has its tokens after the device has.
    launches = {bar.args["pass"]: bar for bar in run.rows["host"] if bar.name == "launch"}
    accepted = {bar.args["pass"]: bar for bar in run.rows["host"] if bar.name == "wait and accept"}
    for one in run.rows["passes"]:
        number = one.args["pass"]
        assert one.start_s > launches[number].start_s - 50e-6
        if number in accepted:
            assert one.end_s < accepted[number].end_s + 50e-6
