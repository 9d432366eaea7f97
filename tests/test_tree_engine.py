"""Trees asked for of a runtime: the same tokens, room for them in every window, figures of what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.engine import Runtime
from offload_runtime.hardware import MachineProfile
from offload_runtime.speculation import (
    Acceptance,
    Choice,
    DraftRequest,
    NgramProposer,
    Proposal,
    Proposer,
    Tally,
)
from offload_runtime.trace import TraceRecorder
from tests.helpers.engine import load, one_thread  # noqa: F401
from tests.helpers.trees import TreeScript, Watched, pruned
from tests.test_chosen_windows import with_controller

PROMPTS = [[5 + (3 * i * i + i // 7) % 60 for i in range(length)] for length in (230, 30, 470)]
COUNT = 30
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.6, "seed": 2}, {"temperature": 1.0, "seed": 3, "top_k": 3}
]  # fmt: skip


def generate(runtime: Runtime, way: dict[str, Any], **options: Any) -> list[list[int]]:
    asked = {"max_new_tokens": COUNT, "ignore_eos": True, **way, **options}
    return [result.tokens for result in runtime.generate_batch(PROMPTS, **asked)]


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[list[int]]]:
    with load(target, draft="none", max_batch=3) as runtime:
        return [generate(runtime, way) for way in SAMPLINGS]


class Watch(TraceRecorder):
    """What is proposed to a runtime from now on, to batches and single answers, and how much of it is accepted.

    Args:
        runtime: Whose rounds are watched.
        proposer: Who proposes; None for the runtime's own.
    """

    def __init__(self, runtime: Runtime, proposer: Proposer | None = None) -> None:
        super().__init__(runtime.device)
        self.proposer = Watched(proposer or runtime.parts.proposer)
        self.accepted: list[int] = []  # of every request in every round
        runtime.parts = replace(runtime.parts, proposer=self.proposer, recorder=self)

    def decided(self, **outcome: Any) -> None:
        self.accepted += outcome["accepted"]

    @property
    def proposals(self) -> list[Proposal]:
        return self.proposer.proposals

    @property
    def num_trees(self) -> int:
        return sum(not proposal.is_chain for proposal in self.proposals)

    @property
    def deepest(self) -> int:
        return max(max(proposal.depths, default=0) for proposal in self.proposals)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("resident_layers", [2, "auto"])
def test_a_runtime_loaded_for_trees(
    target: Path, expected: list[list[list[int]]], kv: str, resident_layers: int | str
) -> None:
    """Of more nodes than the deepest chain, and than a block of the KV cache has tokens; some of their paths right."""
    options = {"kv": kv, "resident_layers": resident_layers, "max_batch": 3}
    # Every way of sampling where both weights and keys are streamed, one where not.
    both = kv == "host" and resident_layers == 2
    ways = list(zip(SAMPLINGS, expected, strict=True))[:: 1 if both else len(SAMPLINGS)]
    with load(target, tree_nodes=300, max_gamma=5, **options) as runtime:
        own = runtime.parts
        for way, answers in ways:
            truth = {number: PROMPTS[number] + answer for number, answer in enumerate(answers)}
            script = TreeScript(truth, seed=1, most_branches=90)
            for nodes, gamma in ((None, 5), (6, 3)):
                runtime.parts = own
                watch = Watch(runtime, script)
                assert generate(runtime, way, gamma=gamma, tree_nodes=nodes) == answers
                assert watch.num_trees and watch.deepest == gamma
                sizes = [len(proposal) for proposal in watch.proposals]
                assert 256 > max(sizes) > 100 if nodes is None else max(sizes) == nodes
                accepted = set(watch.accepted)
                assert accepted == set(range(gamma + 1)) if nodes is None else {0, 1} <= accepted
        runtime.parts = own
        watch = Watch(runtime)
        for way, answers in ways:
            assert generate(runtime, way) == answers
        asked = [request for played in watch.proposer.rounds for request, _ in played]
        # As many as it was loaded for, or as the context has room for.
        assert watch.num_trees and {request.tree_nodes for request in asked if len(request.tokens) < 200} == {300}


@pytest.mark.slow
def test_only_who_asks_for_trees_gets_them(target: Path, expected: list[list[list[int]]]) -> None:
    with load(target, max_batch=3, tree_nodes=0) as runtime:
        way, answers = SAMPLINGS[1], expected[1]
        watch = Watch(runtime)
        with_controller(runtime, Choice("ngram", 8))  # whatever the passes took; an answer's last windows are cut
        assert generate(runtime, way) == answers
        assert any(len(proposal) == 8 for proposal in watch.proposals) and not watch.num_trees
        assert generate(runtime, way, tree_nodes=40, gamma=4) == answers
        assert watch.num_trees
        watch.proposer.rounds.clear()
        asked = {"max_new_tokens": COUNT, "ignore_eos": True, "tree_nodes": 40, **way}
        assert runtime.generate(PROMPTS[0], **asked).tokens == answers[0] and watch.num_trees
        watch.proposer.rounds.clear()
        text = "one two one three one two one four one"
        asked = {"max_new_tokens": 24, "ignore_eos": True}
        trees = "".join(runtime.conversation().say(text, tree_nodes=40, gamma=3, **asked))
        assert watch.proposer.rounds[0][0][0].tree_nodes == 40
        assert trees == "".join(runtime.conversation().say(text, speculate=False, **asked))


class Oracle(NgramProposer):
    """Says what will be said, as far as it is asked; before each token another one if there are to be branches."""

    def __init__(self, truth: list[int], *, branches: bool) -> None:
        super().__init__()
        self._truth, self._branches = truth, branches

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        said = [self._truth[len(request.tokens) :][: request.gamma] for request in requests]
        if not self._branches:
            return [Proposal.chain(tokens, "script") for tokens in said]
        return [
            pruned(
                Proposal(
                    tuple(said for token in tokens for said in ((token + 1) % 50, token)),
                    tuple(parent for node in range(len(tokens)) for parent in (2 * node - 1, 2 * node - 1)),
                    ("script",) * (2 * len(tokens)),
                ),
                request.most_nodes,
            )
            for tokens, request in zip(said, requests, strict=True)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "resident_layers"), [("gpu", "auto"), ("host", 2)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_window_is_accepted_as_far_as_it_is_right(
    target: Path, kv: str, resident_layers: int | str, device: str
) -> None:
    """Further than the deepest chain, and than a block of the KV cache; with branches, too, for which there is less and
    less room in the context."""
    asked = {"max_new_tokens": 450, "ignore_eos": True}
    dtype = "fp32" if device == "cpu" else "bf16"
    with Runtime.load(
        target, device=device, dtype=dtype, tree_nodes=700, max_gamma=5, kv=kv, resident_layers=resident_layers
    ) as runtime:
        plain = runtime.generate(PROMPTS[1], speculate=False, **asked)
        for branches, nodes, passes, deepest in (
            (False, 350, 2, 350), (False, 100, 5, 100), (True, None, 4, 240), (True, 100, 10, 50)
        ):  # fmt: skip
            runtime.parts = replace(runtime.parts, proposer=Oracle(PROMPTS[1] + plain.tokens, branches=branches))
            found = runtime.generate(PROMPTS[1], tree_nodes=nodes, **asked)
            assert found.tokens == plain.tokens and found.stats.passes == passes
            assert len(found.stats.accepted_by_depth) == deepest


def test_room_for_trees_is_planned(target: Path) -> None:
    with load(target, tree_nodes=200, kv="host") as wide, load(target, kv="host", tree_nodes=0) as narrow:
        plans = [runtime.plan.target for runtime in (wide, narrow)]
    assert [plan.window_tokens for plan in plans] == [201, 64]
    assert plans[0].workspace_bytes > plans[1].workspace_bytes
    assert plans[0].open_kv_bytes >= plans[1].open_kv_bytes


def test_accepted_by_depth_and_source(target: Path, expected: list[list[list[int]]]) -> None:
    """As the rounds say that were played."""
    with load(target) as runtime:
        watch = Watch(runtime, TreeScript({0: PROMPTS[0] + expected[0][0]}, seed=2))
        stats = runtime.generate(PROMPTS[0], max_new_tokens=COUNT, ignore_eos=True, tree_nodes=30, gamma=4).stats
    depths = [sum(accepted > depth for accepted in watch.accepted) for depth in range(4)]
    assert stats.accepted_by_depth == tuple(depths) and depths[0] > depths[3] > 0
    assert stats.accepted_by_source == {"script": sum(depths)}
    (level,) = stats.acceptance
    assert (level.proposed, level.accepted) == (sum(map(len, watch.proposals)), sum(depths))
    record = stats.to_dict()
    assert record["accepted_by_depth"] == depths and record["accepted_by_source"] == stats.accepted_by_source


def test_a_tally_counts_depths_and_sources() -> None:
    tally = Tally()
    assert (tally.accepted_by_depth, tally.accepted_by_source) == ({}, {})
    for num_proposed, sources in ((5, ["draft", "ngram"]), (0, []), (3, []), (9, ["draft", "draft", "ngram"])):
        tally.add((["draft", "ngram"] * 5)[:num_proposed], sources, window="tree 9")
    assert (tally.accepted_by_depth, tally.accepted_by_source) == ({0: 2, 1: 2, 2: 1}, {"draft": 3, "ngram": 2})
    (level,) = tally.levels("draft", ())
    assert (level.verifications, level.proposed, level.accepted) == (3, 17, 5)


def test_a_hierarchy_answers_for_what_it_proposed_itself() -> None:
    tally = Tally()
    tally.add(["retrieval"] * 4 + ["ngram"] * 6, ["retrieval", "ngram", "ngram"], window="chain 10")
    tally.add(["retrieval"] * 4, ["retrieval"] * 4, window="chain 10")
    tally.add(["ngram"] * 3, [], window="chain 10")
    *_, level = tally.levels("retrieval", (Acceptance("draft", "retrieval", 3, 9, 5),))
    assert level == Acceptance("retrieval", "target", 2, 8, 5) and tally.accepted_by_depth.total() == 7


@pytest.mark.slow
def test_where_the_link_binds_trees_are_all_that_is_chosen(target: Path, draft: Path) -> None:
    slow = MachineProfile(
        "slow", "made up", 1, 10**9, gpu_name="slow", vram_bytes=10**9, link_gbps=0.02,
        link_back_gbps=0.02, hbm_gbps=1000.0, tflops={"fp32": 1.0},
    )  # fmt: skip
    with load(target, draft=draft, resident_layers=0, emulate=slow) as runtime:
        assert runtime.parts.windows.free > 0 and runtime.plan.tree_room > 0
        for prompt in PROMPTS:
            windows = runtime.generate(prompt, max_new_tokens=20, ignore_eos=True).stats.windows
            assert {window.split()[0] for window in windows} <= {"tree", "plain"} and sum(windows.values()) > 1
            chains = runtime.generate(prompt, max_new_tokens=20, ignore_eos=True, tree_nodes=0).stats.windows
            assert "tree" not in {window.split()[0] for window in chains}
