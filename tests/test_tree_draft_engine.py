"""Trees of a draft model through `Runtime`: the same tokens, planned memory, and refusals that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.hardware import load_profile
from offload_runtime.kv import DeviceKVCache, block_bytes
from offload_runtime.kv.device import StreamingDraftCache
from offload_runtime.plan import RunPlan, machine_figures, plan_run
from offload_runtime.runners import tree_slots
from offload_runtime.speculation import DraftProposer, Proposer, TreeDraftProposer, WithNgrams
from offload_runtime.trace import TraceRecorder
from offload_runtime.weights import describe_model
from tests.helpers.engine import CONTEXT_TOKENS, PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.planning import load_streaming_kv
from tests.helpers.trees import Watched

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.6, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4},
]
PROMPTS = [PROMPT, "a link", "system user assistant: a layer, a slot; the pass streams on"]
COUNT, BRIEFLY = 20, 10
NEWEST = SpeculationOptions("chain", "streaming", sink_tokens=4, recent_tokens=64)


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Runtime]:
    with load(target, draft="none", max_batch=3) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def trees(target: Path, draft: Path) -> Iterator[Runtime]:
    """Most layers streamed, and room for trees of 24."""
    with load(target, draft=draft, resident_layers=1, tree_nodes=24, max_batch=3) as runtime:
        yield runtime


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(("gamma", "tree_nodes"), [(None, None), (6, 1), (3, 24)])
def test_trees_change_nothing_but_the_passes(
    plain: Runtime, trees: Runtime, sampling: dict[str, Any], gamma: int | None, tree_nodes: int | None
) -> None:
    options: dict[str, Any] = {"max_new_tokens": COUNT, "ignore_eos": True, **sampling}
    result = trees.generate(PROMPT, gamma=gamma, tree_nodes=tree_nodes, **options)
    assert result.tokens == plain.generate(PROMPT, **options).tokens
    assert set(result.stats.accepted_by_source) <= {"draft", "ngram"} and "draft" in result.stats.accepted_by_source
    said = trees.generate_batch(PROMPTS, gamma=gamma, tree_nodes=tree_nodes, **options)
    assert [one.tokens for one in said] == [one.tokens for one in plain.generate_batch(PROMPTS, **options)]


class StepCounter(TraceRecorder):
    """Counts the steps of whoever draws a tree up."""

    made = 0

    def span(self, name: str, **described: Any) -> Any:
        self.made += name == "tree step"
        return super().span(name, **described)


class RunningAhead(Watched):
    """Lets every pass last as long as so many steps, which on a CPU it never does.

    Attributes:
        beside: Of each pass the steps that were made beside it.
    """

    def __init__(self, inner: TreeDraftProposer, *, steps: int, device: torch.device) -> None:
        super().__init__(inner)
        self._steps, self._counter = steps, StepCounter(device)
        inner.model.recorder = self._counter
        self.beside: list[int] = []

    def ahead(self, pending: Callable[[], bool]) -> None:
        before, left = self._counter.made, iter(range(self._steps))
        super().ahead(lambda: next(left, None) is not None)
        self.beside.append(self._counter.made - before)


def run_ahead(runtime: Runtime, *, steps: int) -> list[int]:
    """Let the draft run ahead for so many steps; of each pass those made beside it."""
    both, proposer = runtime.parts.proposer, drafting(runtime)
    assert isinstance(both, WithNgrams) and isinstance(proposer, TreeDraftProposer)
    ahead = RunningAhead(proposer, steps=steps, device=runtime.device)
    runtime.parts = replace(runtime.parts, proposer=WithNgrams(ahead, both.ngrams))
    return ahead.beside


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def said_plainly(target: Path, device: str) -> list[list[list[int]]]:
    """By way of sampling, what plain decoding says to all prompts."""
    with Runtime.load(target, draft="none", device=device, dtype="fp32", max_batch=3) as runtime:
        return [say_briefly(runtime, sampling) for sampling in SAMPLINGS]


def say_briefly(runtime: Runtime, sampling: dict[str, Any]) -> list[list[int]]:
    results = runtime.generate_batch(PROMPTS, max_new_tokens=BRIEFLY, ignore_eos=True, **sampling)
    return [result.tokens for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("resident_layers", [1, None])
def test_running_ahead_changes_nothing(
    target: Path, draft: Path, said_plainly: list[list[list[int]]], device: str, kv: str, resident_layers: int | None,
) -> None:  # fmt: skip
    """With weights streamed, keys and values, both and neither."""
    options: dict[str, Any] = {"kv": kv, "resident_layers": resident_layers, "tree_nodes": 24, "max_batch": 3}
    with load_streaming_kv(target, draft=draft, device=device, dtype="fp32", **options) as runtime:
        beside = run_ahead(runtime, steps=4)
        for sampling, expected in zip(SAMPLINGS, said_plainly, strict=True):
            beside.clear()
            assert say_briefly(runtime, sampling) == expected
            assert sum(beside) > BRIEFLY / 2, "hardly any pass was used"


@pytest.mark.slow
def test_a_conversation_goes_on_behind_a_tree(plain: Runtime, trees: Runtime) -> None:
    """A second question is no sample of the target, and the cache of the draft goes on from the first answer."""
    answers = []
    for runtime in (plain, trees):
        talk = runtime.conversation()
        answers.append([
            "".join(talk.say(text, max_new_tokens=20, temperature=0.6, seed=5, ignore_eos=True)) for text in PROMPTS[:2]
        ])  # fmt: skip
    assert answers[0] == answers[1] and all(answers[0])


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "sampling"), [("gpu", SAMPLINGS[1]), ("host", SAMPLINGS[0])])
def test_a_draft_that_keeps_first_and_newest_tokens_grows_trees(
    long_target: Path, noisy_copy_of: Callable[[Path], Path], device: str, kv: str, sampling: dict[str, Any]
) -> None:
    """Behind texts that it lets go of parts of while they go on, and one longer than its cache; alone, in a batch."""
    prompts = [[5 + index * index % 300 for index in range(length)] for length in (314, 20, 570)]
    asked: dict[str, Any] = {"max_new_tokens": COUNT, "ignore_eos": True, **sampling}
    common: dict[str, Any] = {"device": device, "dtype": "fp32", "max_batch": 3, "context": 2 * CONTEXT_TOKENS}
    with Runtime.load(long_target, draft="none", **common) as plain:
        expected = [one.tokens for one in plain.generate_batch(prompts, **asked)]
    options: dict[str, Any] = {"kv": kv, "resident_layers": 1, "tree_nodes": 24, "speculation": NEWEST, **common}
    with load_streaming_kv(long_target, draft=noisy_copy_of(long_target), **options) as runtime:
        cache = runtime.parts.draft.runner.cache
        assert isinstance(cache, StreamingDraftCache)
        beside = run_ahead(runtime, steps=4)
        said = runtime.generate_batch(prompts, tree_nodes=24, **asked)
        assert [one.tokens for one in said] == expected and sum(beside) > 10
        assert [cache.starts[sequence] for sequence in range(3)] == [256, 0, 512]
        assert all(one.stats.accepted_by_source["draft"] > 2 for one in said)
        assert runtime.generate(prompts[0], **asked).tokens == expected[0]


def drafting(runtime: Runtime) -> Proposer:
    """Who drafts, leaving n-grams aside."""
    both = runtime.parts.proposer
    assert isinstance(both, WithNgrams)
    return both.draft


def test_who_proposes_is_decided_when_loading(target: Path, draft: Path, trees: Runtime) -> None:
    assert isinstance(drafting(trees), TreeDraftProposer)
    with load(target, draft=draft, tree_nodes=0) as runtime:
        assert isinstance(drafting(runtime), DraftProposer)
        cache = runtime.parts.draft.runner.cache
        assert isinstance(cache, DeviceKVCache) and not cache.spare_slots
        with pytest.raises(
            OptionError, match=r"tree_nodes 8 .*load a draft model with tree_nodes=8 \(--tree-nodes 8\)"
        ):
            runtime.generate(PROMPT, max_new_tokens=4, tree_nodes=8)
    with pytest.raises(OptionError, match="tree_nodes 99 exceeds the"):
        trees.generate(PROMPT, max_new_tokens=4, tree_nodes=99)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"speculation": SpeculationOptions(draft_cache="retrieval")},
            "trees of 8 nodes need a draft whose KV cache holds whole branches, .*use --draft-cache streaming or full",
        ),
        ({"speculation": SpeculationOptions("triforce")}, "--tree-nodes 8 does nothing with --speculation triforce"),
        ({"draft": "none"}, "--tree-nodes 8 does nothing with --draft none"),
        (
            {"draft": "none", "speculation": SpeculationOptions("none")},
            "--tree-nodes 8 does nothing with --speculation none",
        ),
    ],
)
def test_trees_that_nobody_would_grow_are_refused(
    target: Path, draft: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        Runtime.load(target, device="cpu", tree_nodes=8, **{"draft": draft, **options})


def planned(target: Path, draft: Path, tree_nodes: int, *, device: str = "cuda") -> RunPlan:
    """For a GPU that need not be here."""
    request = RuntimeConfig(
        describe_model(target), describe_model(draft), dtype="bf16", context=CONTEXT_TOKENS, max_batch=2,
        speculation=SpeculationOptions("chain", "full"), tree_nodes=tree_nodes, device=device,
    )  # fmt: skip
    return plan_run(request, machine_figures(load_profile("rtx4090")))


def test_what_trees_take_is_in_the_plan(target: Path, draft: Path) -> None:
    """Slots for the nodes, graphs of their own, and a workspace beside the target's, not in turns with it."""
    lean, full = planned(target, draft, 0), planned(target, draft, 500)
    assert lean.draft is not None and full.draft is not None
    config = full.draft.config
    blocks = -(-tree_slots(500) // BLOCK_TOKENS)
    slots_bytes = 2 * config.num_layers * blocks * block_bytes(config, torch.bfloat16)
    assert full.draft.kv_bytes - lean.draft.kv_bytes == slots_bytes
    assert full.graph_bytes > lean.graph_bytes + (32 << 20)
    assert lean.workspace_bytes == max(lean.target.workspace_bytes, lean.draft.workspace_bytes)
    assert full.workspace_bytes == full.target.workspace_bytes + full.draft.workspace_bytes
    assert planned(target, draft, 500, device="cpu").graph_bytes == 0


@pytest.mark.parametrize("options", [SpeculationOptions(), NEWEST], ids=["full", "streaming"])
def test_the_cache_takes_what_was_planned(target: Path, draft: Path, options: SpeculationOptions) -> None:
    plans: list[RunPlan] = []
    with load(target, draft=draft, tree_nodes=150, speculation=options, on_plan=plans.append) as runtime:
        runner = runtime.parts.draft.runner
        layers = range(runner.decoder.config.num_layers)
        held_bytes = sum(runner.cache.store(layer).data.nbytes for layer in layers)
        assert len(runner.cache.spare_slots) == tree_slots(150)
        capacity_tokens = runner.cache.capacity_tokens
        assert capacity_tokens == CONTEXT_TOKENS or options is NEWEST
    (part,) = (part for part in plans[-1].device if part.name == "draft KV cache")
    assert part.nbytes == held_bytes > 2 * capacity_tokens * runner.decoder.config.kv_bytes_per_token(4)
