"""Loading plays every kind of step: it leaves nothing behind, and on a GPU no answer has to compile a kernel."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import offload_runtime_kernels
import pytest
import torch
from offload_runtime_kernels.select_chunks import different_counts, select_chunks
from transformers import AutoConfig, LlamaForCausalLM

from offload_runtime import Runtime
from offload_runtime.config import SpeculationOptions
from offload_runtime.engine.load_model import warm_up
from offload_runtime.params import SamplingParams
from offload_runtime.runners.graphs import StepGraphs, graph_reach, warm_up_batches, warm_up_lengths
from offload_runtime.speculation.dflash import DFlashDrafter
from offload_runtime.speculation.draft import DraftRunner
from offload_runtime.speculation.ngram import drafting
from offload_runtime.speculation.tree import ModelDrafter
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers import native_drafts as natives
from tests.helpers.assembly import CPU, make_runner
from tests.helpers.dflash import config_of, random_tensors, settings, write_dflash
from tests.helpers.engine import byte_level_tokenizer, load
from tests.helpers.families import family_model
from tests.helpers.heads import Eagle3, add_random_mtp
from tests.helpers.models import VOCAB_SIZE, random_model
from tests.helpers.planning import load_streaming_kv

LEVELS: dict[str, Any] = {"recent_tokens": 256, "budget_tokens": 512, "chunk_size": 8, "gamma_draft": 3}
TARGET = "wide_target"
# What a runtime is loaded with, and what its answers ask for.
RUNS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "plain, streamed": ({"draft": "none", "resident_layers": 1}, [{}]),
    "n-grams, all streamed": ({"draft": "ngram", "kv": "host", "resident_layers": 0}, [{"gamma": 5}, {}]),
    "experts that are fetched": (
        {"target": "mixture", "draft": "ngram", "expert_pool": "1MB"}, [{"gamma": 3}, {}],
    ),
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
    "a head": (
        {"draft": "mtp", "tree_nodes": 96}, [{"tree_nodes": 96}, {"tree_nodes": 7}, {"gamma": 6, "tree_nodes": 0}, {}],
    ),
    "a head for three": (
        {"draft": "mtp", "tree_nodes": 96, "max_batch": 3}, [{"tree_nodes": 96}, {"gamma": 6, "tree_nodes": 0}],
    ),
    "a head's own checkpoint": (
        {"draft": "eagle3", "tree_nodes": 96, "context": 512}, [{"tree_nodes": 96}, {"gamma": 6, "tree_nodes": 0}, {}],
    ),
    "a head whose experts are fetched": (
        {"target": "mixture", "draft": "mtp", "tree_nodes": 96, "expert_pool": "1MB"},
        [{"tree_nodes": 96}, {"tree_nodes": 7}, {"gamma": 6, "tree_nodes": 0}, {}],
    ),
    "blocks": ({"draft": "dflash", "tree_nodes": 96}, [{"tree_nodes": 96}, {"gamma": 6, "tree_nodes": 0}, {}]),
    "blocks for three": (
        {"draft": "dflash", "tree_nodes": 96, "max_batch": 3}, [{"tree_nodes": 96}, {"gamma": 6, "tree_nodes": 0}],
    ),
    "a copy of its own": (
        {"draft": "self", "kv": "gpu", "resident_layers": 2, "tree_nodes": 96},
        [{"tree_nodes": 96}, {"tree_nodes": 7}, {"gamma": 6, "tree_nodes": 0}, {}],
    ),
    "a copy of its own for three": (
        {"draft": "self", "kv": "gpu", "resident_layers": 2, "tree_nodes": 96, "max_batch": 3},
        [{"tree_nodes": 96}, {"gamma": 6, "tree_nodes": 0}],
    ),
    "TriForce for three": (
        {"kv": "gpu", "max_batch": 3, "speculation": SpeculationOptions("triforce", "full", **LEVELS)}, [{"gamma": 12}],
    ),
}  # fmt: skip
LENGTHS = (1, 9, 20, 34, 70, 140, 250, 300, 505, 1100, 2000, 9000)


def with_head(target: Path, kind: str, directory: Path) -> tuple[Path, Path | str]:
    """A target, and what `draft` says of a random head of it."""
    if kind == "mtp":
        return add_random_mtp(target, directory / "carrying"), kind
    if kind == "eagle3":
        of_target = LlamaForCausalLM(AutoConfig.from_pretrained(target))
        return target, Eagle3.of(of_target, draft_vocab=200).write(directory / kind)
    stated = settings(open_checkpoint(target).config(), second=True)
    return target, write_dflash(directory / kind, stated, random_tensors(config_of(stated)))


def write_mixture(directory: Path) -> Path:
    """A target of so many experts that a head's steps of 16 and 24 rows are no steps that bring all of them."""
    experts = {"num_experts": 128, "num_experts_per_tok": 4, "mlp_only_layers": [], "decoder_sparse_step": 1}
    model = family_model("qwen3_moe", 1, **experts, num_hidden_layers=3, max_position_embeddings=16384)
    model.save_pretrained(directory)
    byte_level_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "cache", ["streaming", "retrieval", "of a head", "of a head of taps", "of blocks", "of the target"]
)
def test_no_traces(two_layer_target: Path, noisy_copy_of: Callable[[Path], Path], tmp_path: Path, cache: str) -> None:
    """On a CPU, where loading has nothing to warm up."""
    small: dict[str, Any] = {"recent_tokens": 64, "budget_tokens": 64, "chunk_size": 8}
    target, options = two_layer_target, {"resident_layers": 1, "context": 1500, "tree_nodes": 0}
    if cache == "of the target":
        options |= {"draft": "self", "tree_nodes": 20}
    elif cache.startswith("of"):
        kind = {"of a head": "mtp", "of a head of taps": "eagle3", "of blocks": "dflash"}[cache]
        target, draft = with_head(target, kind, tmp_path)
        options |= {"draft": draft, "context": 512}  # whole blocks
    else:
        options |= {"draft": noisy_copy_of(target), "speculation": SpeculationOptions("chain", cache, **small)}
    answers = []
    for warm in (False, True):
        with load(target, **options) as runtime:
            if warm:
                warm_up(runtime.engine.target, trees=True)
                drafter = drafting(runtime.engine.drafter)
                assert isinstance(drafter, ModelDrafter | DFlashDrafter)
                drafter.runner.warm_up()
            asked = {"max_new_tokens": 12, "ignore_eos": True, "gamma": 5, "temperature": 0.7, "seed": 2}
            result = runtime.generate([(7 * i * i) % 290 + 3 for i in range(150)], **asked)
            answers.append((result.tokens, result.stats.passes))
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
def test_no_answer_compiles_a_kernel(target: Path, draft: Path, tmp_path: Path, compiled: list[str], name: str) -> None:
    options, windows = RUNS[name]
    options = {"draft": draft, "device": "cuda", "dtype": "bf16", "context": 2400, **options}
    if options.pop("target", None) == "mixture":
        target = write_mixture(tmp_path / "mixture")
    if options["draft"] in ("mtp", "eagle3", "dflash"):
        target, options["draft"] = with_head(target, options["draft"], tmp_path)
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


@pytest.mark.parametrize("capacity_tokens", [40, 256, 700, 1024, 1500, 9000])
def test_loading_looks_as_far_as_ordinary_answers(capacity_tokens: int) -> None:
    """Steps behind a token and the texts of a warm-up look at as many tokens as those behind any of up to 2048, so that
    these find their graphs."""
    at_load = {graph_reach(length, capacity_tokens) for length in (1, *warm_up_lengths(capacity_tokens))}
    assert at_load == {graph_reach(length, capacity_tokens) for length in range(1, 1 + min(2048, capacity_tokens))}


def test_chains_about_any_slot_have_the_rows_of_a_warm_up() -> None:
    """A text that is alone takes the slot that was used least recently."""
    target = make_runner(random_model("llama-gqa"), capacity_tokens=64).runner
    runner = DraftRunner(natives.make_head(target, batch=6), vocab_size=VOCAB_SIZE, batch=6)
    for slot in range(6):
        runner.join(slot, SamplingParams())
        assert slot < runner.window.num_rows and runner.window.num_rows in warm_up_batches(6)
        runner.leave(slot)


def test_loading_captures_steps_about_one_text_last() -> None:
    """Where there are more graphs than are held, those of many texts are dropped first."""
    counts = list[int]()
    StepGraphs(CPU).warm_up(lambda slots, _: counts.append(len(slots)), batch=6, lengths=(1, 257))
    assert counts[-8:] == [6, 6, 4, 4, 2, 2, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "batch"), [("draft", 1), ("draft", 3), ("mtp", 1), ("mtp", 3), ("dflash", 1), ("dflash", 3), ("self", 1)]
)
def test_no_answer_captures_a_graph(target: Path, draft: Path, tmp_path: Path, kind: str, batch: int) -> None:
    """Answers about one text of ordinary length find all graphs, but for steps of drafts that filter tokens: in all
    slots, which they get in turn."""
    options: dict[str, Any] = {"draft": {"draft": draft}.get(kind, kind), "kv": "gpu", "max_batch": batch}
    if kind in ("mtp", "dflash"):
        target, options["draft"] = with_head(target, kind, tmp_path)
    if kind == "self":
        options["resident_layers"] = 2
    with Runtime.load(target, device="cuda", dtype="bf16", context=1500, **options) as runtime:
        drafter, captured = drafting(runtime.engine.drafter), runtime.engine.target.runner.captured
        assert isinstance(drafter, ModelDrafter | DFlashDrafter) and (captured is None) == (kind == "self")
        steps, passes = drafter.runner.graphs, None if captured is None else captured.graphs

        def held() -> list[int]:
            return [graphs.num_graphs for graphs in (steps, passes) if graphs is not None]

        def answer(length: int, **asked: Any) -> None:
            prompt = [3 + i * i % 290 for i in range(length)]
            runtime.generate(prompt, max_new_tokens=60, ignore_eos=True, **asked)

        before = held()
        assert passes is None or passes.num_graphs > 10
        for window in ({"gamma": 5}, {}, {"tree_nodes": 24}, {"gamma": 1}):
            for temperature in (0.0, 0.7):
                for length in (9, 230, 300, 990):
                    answer(length, temperature=temperature, **window)
                    assert held() == before, f"{window}, T = {temperature}, behind {length} tokens"
        if passes is not None:
            answer(990, temperature=0.7, top_p=0.9)
            answer(990, temperature=0.7, presence_penalty=0.5)
            assert passes.num_graphs == before[1]
