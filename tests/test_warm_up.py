"""Loading plays every kind of step: it leaves nothing behind, and on a GPU no answer has to compile a kernel."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import offload_runtime_kernels
import pytest
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime, placing
from offload_runtime.engine.hierarchy import warm_up_middle
from offload_runtime.runners import DraftModel, warm_up_batches, warm_up_lengths
from offload_runtime.sampling import DIFFERENT_WAYS
from tests.helpers.assembly import CPU, make_runner
from tests.helpers.engine import load, one_thread, write_checkpoint  # noqa: F401 (the second is an autouse fixture)
from tests.helpers.models import random_model, random_tokens
from tests.test_draft_model import BATCH, NOISY, SHAPE, make_draft
from tests.test_draft_retrieval import Base
from tests.test_triforce import CONTEXT, SMALL
from tests.test_triforce import PROMPT as LONG_PROMPT

LEVELS: dict[str, Any] = {"recent_tokens": 256, "budget_tokens": 512, "chunk_size": 8, "gamma_draft": 3}
# What a runtime is loaded with, and what its answers ask for.
RUNS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "plain, streamed": ({"draft": "none", "resident_layers": 1}, [{}]),
    "n-grams, all streamed": ({"draft": "ngram", "kv": "host", "resident_layers": 0}, [{"gamma": 5}, {}]),
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
        [{"gamma": 12}],
    ),
    "TriForce for three": (
        {"kv": "gpu", "max_batch": 3, "speculation": SpeculationOptions("triforce", "full", **LEVELS)}, [{"gamma": 12}],
    ),
}  # fmt: skip
LENGTHS = (1, 3, 12, 20, 34, 200, 300, 505, 1100, 2000)


def small_draft(kind: str, directory: Path) -> tuple[DraftModel, Any, Any]:
    """A chain's draft over a cache of this kind, its cache, and what is to be closed."""
    if kind == "streaming":
        made = make_draft("llama-gqa", directory)
        return made.model(NOISY), made.cache, made.made
    made = make_runner(random_model("llama-gqa", seed=7), directory, shape=SHAPE, capacity_tokens=BLOCK_TOKENS)
    draft = Base(made, CPU).draft(96 if kind == "retrieval" else None)
    return draft.model, draft.runner.cache, made


@pytest.mark.parametrize("kind", ["streaming", "retrieval", "full"])
def test_warming_up_a_draft_plays_all_its_steps_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    texts = {0: [0, 0, 0, *random_tokens(700, seed=3)], 2: [0] * 40}
    said = []
    for warm in (False, True):
        model, cache, made = small_draft(kind, tmp_path / str(warm))
        played, run = set(), model.graphs.run

        def noted(key: Any, step: Any, played: set[Any] = played, run: Any = run) -> None:
            first, num_rows, *_, params = key
            played.add((first, num_rows, params))
            run(key, step)

        model.graphs.run = noted  # type: ignore[method-assign]
        if warm:
            model.warm_up()
            assert played == {
                *product((True, False), (1,), DIFFERENT_WAYS), *product((True, False), (2, 3), DIFFERENT_WAYS[:1])
            }  # fmt: skip
            assert [cache.length(sequence) for sequence in range(BATCH)] == [0] * BATCH
        model.start(NOISY, BATCH)
        said.append(model.propose(texts, {0: 9, 2: 5}))
        made.close()
    assert said[0] == said[1] and [len(said[0][sequence]) for sequence in (0, 2)] == [9, 5]


def test_what_needs_other_kernels() -> None:
    assert [warm_up_batches(batch) for batch in (1, 2, 3, 4, 9)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 9]]
    assert [warm_up_lengths(longest) for longest in (0, 1, 9, 700, 5000)] == [[], [], [9], [257, 700], [257, 1025]]


@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("context", [CONTEXT, 40])
def test_warming_up_the_middle_level_leaves_nothing(tmp_path: Path, kv: str, context: int) -> None:
    target = write_checkpoint(tmp_path / "target", context=1200)
    options = SpeculationOptions("triforce", "streaming", **{**SMALL, "budget_tokens": 32, "recent_tokens": 16})
    loaded = {"draft": target, "context": context, "kv": kv, "max_batch": 2, "speculation": options}
    asked = {"max_new_tokens": 20, "ignore_eos": True, "gamma": 12, "temperature": 0.6, "seed": 5}
    prompts, answers = [LONG_PROMPT[: context - 30], [0] * 7], []
    for warm in (False, True):
        with load(target, **loaded) as runtime:
            if warm:
                proposer, runner = runtime._parts.proposer, runtime._models.target.runner
                warm_up_middle(proposer, runner, gamma=3, batch=2)  # type: ignore[arg-type]
                assert [runner.cache.length(sequence) for sequence in (0, 1)] == [0, 0]
                ((steps, _), _) = proposer._middle.counts  # type: ignore[union-attr]
                assert steps == 1, "behind the longest text, too"
            results = runtime.generate_batch(prompts, **asked)
            answers.append([(result.tokens, result.stats.passes, result.stats.acceptance) for result in results])
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", context=9600, hidden_size=512)


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
@pytest.mark.parametrize("name", list(RUNS))
def test_no_answer_compiles_a_kernel(
    target: Path, draft: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, windows = RUNS[name]
    options = {"draft": draft, "device": "cuda", "dtype": "bf16", "context": 2400, **options}
    # No layer keeps its keys on the device only because there is room for all of them.
    monkeypatch.setattr(placing, "place_kv_layers", lambda needs, spare_bytes: ())
    lengths = (*LENGTHS, *(length for length in (5000, 9000) if length < options["context"]))
    prompts = [[3 + (7 * i * i + i // 5) % 290 for i in range(length)] for length in lengths]
    batch = options.get("max_batch", 1)
    with Runtime.load(target, **options) as runtime:
        assert compiled, "loading compiles them"
        compiled.clear()
        for window in windows:
            for sampling in ({}, {"temperature": 0.7, "seed": 4}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}):
                for first in range(0, len(prompts), batch):
                    asked = {"max_new_tokens": 24, "ignore_eos": True, **window, **sampling}
                    runtime.generate_batch(prompts[first : first + batch], **asked)
                    assert not compiled, f"{asked}, behind {lengths[first : first + batch]} tokens"
