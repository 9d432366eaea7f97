"""Loading plays every kind of step: it leaves nothing behind, and on a GPU no answer has to compile a kernel."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import offload_runtime_kernels
import pytest
import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from offload_runtime_kernels.select_chunks import different_counts, parts_of, select_chunks

from offload_runtime.config import SpeculationOptions
from offload_runtime.copy import CopyQueues, make_copy_engine
from offload_runtime.engine.build_proposer import warm_up_verifier
from offload_runtime.engine.load_model import OpenCard, load_model, warm_up
from offload_runtime.kv.retrieval import RetrievedDraftCache
from offload_runtime.memory import Card, DeviceBudget
from offload_runtime.model import PassRows
from offload_runtime.params import SamplingParams
from offload_runtime.runners import DraftModel, ModelRunner, StepGraphs, warm_up_batches, warm_up_lengths
from offload_runtime.runners.retrieval_verifier import RetrievalVerifier
from offload_runtime.sampling import DIFFERENT_WAYS
from offload_runtime.speculation import drafting
from tests.helpers.assembly import CPU, in_memory, make_runner
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.planning import load_streaming_kv
from tests.helpers.sampling import join_all, numbered
from tests.test_draft_model import BATCH, NOISY, make_draft
from tests.test_draft_retrieval import Base
from tests.test_triforce import CONTEXT, SMALL
from tests.test_triforce import PROMPT as LONG_PROMPT
from tests.test_weights_encoding import mixed, planned

LEVELS: dict[str, Any] = {"recent_tokens": 256, "budget_tokens": 512, "chunk_size": 8, "gamma_draft": 3}
TARGET = "wide_target"
# What a runtime is loaded with, and what its answers ask for.
RUNS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "plain, streamed": ({"draft": "none", "resident_layers": 1}, [{}]),
    "n-grams, all streamed": ({"draft": "ngram", "kv": "host", "resident_layers": 0}, [{"gamma": 5}, {}]),
    "n-grams, a short context": ({"draft": "ngram", "context": 40}, [{}]),
    "trees, a short context": (
        {"context": 300, "tree_nodes": 20, "speculation": SpeculationOptions("chain", "full", **LEVELS)}, [{}],
    ),
    "a draft that retrieves, a short context": (
        {"context": 1024, "speculation": SpeculationOptions("chain", "retrieval", **LEVELS)}, [{}],
    ),
    "TriForce without a draft": (
        {"draft": "none", "kv": "host", "speculation": SpeculationOptions("triforce", **LEVELS)},
        [{"gamma": 12}],
    ),
    "n-grams without trees": ({"draft": "ngram", "tree_nodes": 0}, [{}, {"tree_nodes": 7}]),
    "trees and chains": (
        {"tree_nodes": 96, "speculation": SpeculationOptions("chain", "full", **LEVELS)},
        [{"tree_nodes": 96}, {"tree_nodes": 7}, {"gamma": 6, "tree_nodes": 0}, {}],
    ),
    "trees for three": (
        {"tree_nodes": 96, "max_batch": 3, "speculation": SpeculationOptions("chain", "full", **LEVELS)},
        [{"tree_nodes": 96}, {"gamma": 6, "tree_nodes": 0}],
    ),
    "a draft that retrieves": (
        {"context": 9300, "speculation": SpeculationOptions("chain", "retrieval", **LEVELS)}, [{"gamma": 6}, {}],
    ),
    "a draft that streams": ({"speculation": SpeculationOptions("chain", "streaming", **LEVELS)}, [{"gamma": 6}, {}]),
    "TriForce, KV streamed": (
        {"context": 9300, "kv": "host", "speculation": SpeculationOptions("triforce", "streaming", **LEVELS)},
        [{"gamma": 12}, {}],
    ),
    "TriForce for two, odd budgets": (
        {
            "max_batch": 2, "kv": "gpu",
            "speculation": SpeculationOptions("triforce", "retrieval", **{**LEVELS, "budget_tokens": 520}),
        }, [{"gamma": 12}],
    ),
    "TriForce for three": (
        {"kv": "gpu", "max_batch": 3, "speculation": SpeculationOptions("triforce", "full", **LEVELS)}, [{"gamma": 12}],
    ),
}  # fmt: skip
LENGTHS = (1, 9, 20, 34, 300, 505, 1100, 2000, 9000)


class Played:
    """What a draft is asked, and what it plays for that."""

    def __init__(self) -> None:
        self.asked: set[tuple[int, int, SamplingParams]] = set()  # sequences, tokens of each, way of sampling
        self.firsts: set[bool] = set()  # of steps, whether they are the first behind a text
        self.fed: set[tuple[int, int]] = set()  # of passes that catch up, full blocks before them and tokens


class PlayedCache(RetrievedDraftCache):
    """Tells when what chooses is compiled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.choices, self._compile = 0, self.warm_up
        self.warm_up = self._choose

    def _choose(self) -> None:
        self.choices += 1
        self._compile()


class PlayedRunner(ModelRunner):
    """Tells of the passes that catch up."""

    def __init__(self, runner: ModelRunner, played: Played) -> None:
        super().__init__(runner.decoder, runner.streamer, runner.cache, runner.rows, runner.chunk_tokens)
        self._played = played

    def run_rows(self, rows: PassRows) -> torch.Tensor:
        self._played.fed.add((self.cache.length(0) // BLOCK_TOKENS, rows.query.positions.shape[1]))
        return super().run_rows(rows)


class PlayedGraphs(StepGraphs):
    """Tells of the steps."""

    def __init__(self, played: Played) -> None:
        super().__init__(CPU)
        self._played = played

    def run(self, key: Any, step: Callable[[], None]) -> None:
        self._played.firsts.add(key[1])
        super().run(key, step)


class PlayedDraft(DraftModel):
    """Tells what it is asked."""

    def __init__(self, runner: ModelRunner) -> None:
        self.played = Played()
        self._way = NOISY
        super().__init__(PlayedRunner(runner, self.played), vocab_size=VOCAB_SIZE, batch=BATCH)
        self.graphs = PlayedGraphs(self.played)

    def join(self, sequence: int, params: SamplingParams) -> None:
        self._way = params
        super().join(sequence, params)

    def propose(self, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> dict[int, list[int]]:
        self.played.asked |= {(len(texts), len(text), self._way) for text in texts.values()}
        return super().propose(texts, counts)


def small_draft(kind: str) -> tuple[PlayedDraft, Any, Any]:
    """A chain's draft over a cache of this kind, its cache, and what is to be closed."""
    if kind == "streaming":
        made = make_draft("llama-gqa")
        return PlayedDraft(made.runner), made.cache, made.made
    made = make_runner(random_model("llama-gqa", seed=7), capacity_tokens=BLOCK_TOKENS)
    runner = Base(made, CPU).draft(96 if kind == "retrieval" else None, retrieved=PlayedCache).runner
    return PlayedDraft(runner), runner.cache, made


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["streaming", "retrieval", "full"])
def test_warming_up_a_draft_plays_all_its_steps_and_leaves_nothing(kind: str) -> None:
    texts = {0: [0, 0, 0, *random_tokens(700, seed=3)], 2: [0] * 40}
    said = []
    for warm in (False, True):
        model, cache, made = small_draft(kind)
        if warm:
            model.warm_up()
            played = model.played
            longest = cache.capacity_tokens - 1
            every = {(1, 1, way) for way in DIFFERENT_WAYS} | {(number, 1, DIFFERENT_WAYS[0]) for number in (2, 3)}
            assert played.asked == every | {(1, min(length, longest), DIFFERENT_WAYS[0]) for length in (257, 1025)}
            blocks = (0, 1) if longest < 1024 else (0, 1, 4)  # full ones behind which it is fed
            assert played.firsts == {True, False}
            assert played.fed == {(behind, tokens) for behind in blocks for tokens in (1, 2, 4, 8, 16, 32)}
            assert kind != "retrieval" or cache.choices == 1
            assert [cache.length(sequence) for sequence in range(BATCH)] == [0] * BATCH
        join_all(model, numbered(NOISY, BATCH))
        said.append(model.propose(texts, {0: 9, 2: 5}))
        made.close()
    assert said[0] == said[1] and [len(said[0][sequence]) for sequence in (0, 2)] == [9, 5]


@pytest.mark.parametrize("resident", [0, 4, 10])
@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_warming_up_a_target_brings_few_layers_and_leaves_nothing(deep_target: Path, kv: str, resident: int) -> None:
    """Of ten that are alike: what waits for the next pass, and once more what each pass that is given up brings."""
    prompt = random_tokens(300, seed=1)
    options: dict[str, Any] = {"draft": "ngram", "kv": kv, "resident_layers": resident, "context": 1500}
    answers = []
    for warm in (False, True):
        with load_streaming_kv(deep_target, device="cpu", **options) as runtime:
            target = runtime.parts.target
            target.shares[0].engine.drain()
            before_bytes = target.shares[0].engine.bytes_copied
            if warm:
                warm_up(target, trees=True)
                target.shares[0].engine.drain()
                layer_bytes = target.weights.layout.layer_bytes[0]
                slots, passes = target.placement.num_slots, 4
                assert target.shares[0].engine.bytes_copied - before_bytes <= passes * (slots + 1) * layer_bytes + (
                    1 << 20
                )
                assert target.runner.cache.length(0) == 0
            result = runtime.generate(prompt, max_new_tokens=20, ignore_eos=True, temperature=0.7, seed=2)
            answers.append((result.tokens, result.stats.passes))
    assert answers[0] == answers[1]


class SeenDecoder:
    """A decoder that tells which layers it has run."""

    def __init__(self, decoder: Any) -> None:
        self.ran = set[int]()
        self._decoder = decoder

    def layer(self, index: int, *args: Any) -> None:
        self.ran.add(index)
        self._decoder.layer(index, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


@pytest.mark.parametrize(("halved", "expected"), [((), {0}), ((("down",), (), ("qkv", "down"), ()), {0, 1, 2})])
def test_warming_up_runs_a_layer_of_every_kind(halved: tuple[tuple[str, ...], ...], expected: set[int]) -> None:
    source = in_memory(random_model("llama"))
    plan = planned(source.config(), mixed(source.config(), halved)).target
    with ExitStack() as undo:
        card = OpenCard(Card(0, CPU), DeviceBudget(CPU, None), CopyQueues(make_copy_engine(CPU)))
        model = load_model(source, plan, [card], name="target", registrar=None, on_progress=None, undo=undo)
        model.runner.decoder = decoder = SeenDecoder(model.runner.decoder)  # type: ignore[assignment]
        warm_up(model)
        assert decoder.ran == expected


def test_what_needs_other_kernels() -> None:
    assert [warm_up_batches(batch) for batch in (1, 2, 3, 4, 9)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 9]]
    assert [warm_up_lengths(longest) for longest in (0, 1, 9, 700, 5000)] == [[], [], [9], [257, 700], [257, 1025]]


def test_choices_among_any_number_of_chunks_are_played() -> None:
    def kernels(count: int) -> tuple[int, int]:
        """What they are made for: chunks of a part, and parts rounded up to a power of two."""
        columns, parts = parts_of(count)
        return columns, 1 << (parts - 1).bit_length()

    for most in (1, 2, 511, 512, 513, 700, 5000, 40_000):
        played = different_counts(most)
        assert max(played) == most and len(played) < 10
        assert {kernels(count) for count in played} == {kernels(count) for count in range(1, most + 1)}


def played_by(
    verifier: RetrievalVerifier, monkeypatch: pytest.MonkeyPatch
) -> set[tuple[int, int, bool, SamplingParams]]:
    """What a retrieval verifier plays from now on: sequences, tokens of the longest, whether there are chunks to
    choose, and how tokens are."""
    played: set[tuple[int, int, bool, SamplingParams]] = set()
    join, begin, way = verifier.join, verifier.begin, DIFFERENT_WAYS[0]

    def joined(sequence: int, params: SamplingParams) -> None:
        nonlocal way
        way = params
        join(sequence, params)

    def begun(lengths: Mapping[int, int], counts: Mapping[int, int]) -> bool:
        answer = begin(lengths, counts)
        played.add((len(lengths), max(lengths.values()), verifier.cache.recent[0].start > 0, way))
        return answer

    monkeypatch.setattr(verifier, "join", joined)
    monkeypatch.setattr(verifier, "begin", begun)
    return played


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("context", [CONTEXT, 40])
def test_warming_up_the_retrieval_verifier_leaves_nothing(
    long_target: Path, monkeypatch: pytest.MonkeyPatch, kv: str, context: int
) -> None:
    options = SpeculationOptions("triforce", "streaming", **{**SMALL, "budget_tokens": 32, "recent_tokens": 16})
    loaded = {"draft": long_target, "context": context, "kv": kv, "max_batch": 2, "speculation": options}
    asked = {"max_new_tokens": 20, "ignore_eos": True, "gamma": 12, "temperature": 0.6, "seed": 5}
    prompts, answers = [LONG_PROMPT[: context - 30], [0] * 7], []
    for warm in (False, True):
        with load(long_target, **loaded) as runtime:
            if warm:
                proposer, runner = drafting(runtime.parts.proposer), runtime.parts.target.runner
                played = played_by(proposer.verifier, monkeypatch)  # type: ignore[union-attr]
                warm_up_verifier(proposer, runner, batch=2)  # type: ignore[arg-type]
                lengths = [(257, False), (context, True)] if context > 300 else [(context, False)]
                usual, *others = DIFFERENT_WAYS
                plays = {(1, 1, False), (2, 1, False), *((1, *text) for text in lengths)}
                assert played == {(*play, usual) for play in plays} | {(1, 1, False, way) for way in others}
                assert [runner.cache.length(sequence) for sequence in (0, 1)] == [0, 0]
                monkeypatch.undo()
            results = runtime.generate_batch(prompts, **asked)
            answers.append([(result.tokens, result.stats.passes, result.stats.acceptance) for result in results])
    assert answers[0] == answers[1]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are compiled from now on, as if none had been before in this process."""
    import triton

    kernels = [
        member
        for module in pkgutil.iter_modules(offload_runtime_kernels.__path__)
        for member in vars(importlib.import_module(f"offload_runtime_kernels.{module.name}")).values()
        if isinstance(member, triton.JITFunction)
    ]
    assert len(kernels) > 10
    for kernel in kernels:
        kernel.device_caches.clear()
    names: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name))
    yield names


@pytest.mark.gpu
def test_no_other_number_of_chunks_compiles_a_kernel(compiled: list[str]) -> None:
    def choose(count: int) -> None:
        select_chunks(torch.rand(1, 2, count, device="cuda"), count, budget_chunks=64)

    most = 40_000
    for count in different_counts(most):
        choose(count)
    assert compiled
    compiled.clear()
    for count in (1, 2, 511, 513, 700, 1025, 5000, 16_385, 20_000, 32_769, most - 1):
        choose(count)
        assert not compiled, f"{count} chunks"


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(RUNS))
def test_no_answer_compiles_a_kernel(target: Path, draft: Path, compiled: list[str], name: str) -> None:
    options, windows = RUNS[name]
    options = {"draft": draft, "device": "cuda", "dtype": "bf16", "context": 2400, **options}
    lengths = [length for length in LENGTHS if length <= options["context"] - 30]
    prompts = [[3 + (7 * i * i + i // 5) % 290 for i in range(length)] for length in lengths]
    batch = options.get("max_batch", 1)
    with load_streaming_kv(target, **options) as runtime:
        assert compiled, "loading compiles them"
        compiled.clear()
        for window in windows:
            for sampling in ({}, {"temperature": 0.7, "seed": 4}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}):
                for first in range(0, len(prompts), batch):
                    asked = {"max_new_tokens": 24, "ignore_eos": True, **window, **sampling}
                    if batch == 1:
                        runtime.generate(prompts[first], **asked)
                    else:
                        runtime.generate_batch(prompts[first : first + batch], **asked)
                    assert not compiled, f"{asked}, behind {lengths[first : first + batch]} tokens"
