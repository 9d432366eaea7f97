"""Windows that a runtime chooses by a clock of our own: the same tokens, useless drafts off, good ones on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.engine.steps import WindowLimits, WindowSize
from offload_runtime.hardware import MachineProfile
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.speculation import (
    PLAIN,
    Choice,
    Controller,
    NgramProposer,
    Proposer,
    WithNgrams,
    drafting,
    size_for,
    size_within,
)
from offload_runtime.trace import PASSES, Span
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.trees import Foreknown

PROMPTS = [PROMPT, "a link", "system user assistant: a layer, a slot; the pass streams on"]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.6, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}
]  # fmt: skip
COUNT = 26
PASS_S, ROW_S = 1.0, 0.001
# A link so slow that room for large trees pays as soon as anything is streamed.
SLOW_LINK = MachineProfile(
    "slow", "made up", 1, 10**9, gpu_name="none", vram_bytes=10**9, link_gbps=0.001, link_back_gbps=0.001,
    hbm_gbps=100.0, tflops={"fp32": 1.0},
)  # fmt: skip


class WorkClock:
    """Tells the time that the work done would have taken: passes of the target, steps of whoever drafts.

    Args:
        runtime: Loaded with a trace, which tells of the work. Its controller begins anew.
        step_s: Of a step of whoever drafts.
        controller: In place of one that knows nothing yet.
    """

    def __init__(self, runtime: Runtime, *, step_s: float, controller: Controller | None = None) -> None:
        own = runtime.parts
        assert own.recorder is not None, "load it with trace="
        self.draft_steps, self._pass_s, self._step_s = 0, 0.0, step_s
        self._recorder, self._seen = own.recorder, 0
        self._new_spans()  # what came before took no time
        runtime.parts = replace(own, clock=lambda: self.now_s, controller=controller or Controller(own.windows.by_mode))

    @property
    def now_s(self) -> float:
        """Until now."""
        for span in self._new_spans():
            if span.row == PASSES and span.args["kind"] == "verify":
                self._pass_s += PASS_S + ROW_S * (max(span.args["tokens"]) - 1)
            elif span.name in ("draft steps", "tree step", "verifier step"):
                self.draft_steps += span.args.get("steps", 1)
        return self._pass_s + self._step_s * self.draft_steps

    def _new_spans(self) -> Sequence[Span]:
        self._recorder.settle()
        new = self._recorder.spans[self._seen :]
        self._seen += len(new)
        return new


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Runtime]:
    with load(target, draft="none", max_batch=3) as runtime:
        yield runtime


def says(runtime: Runtime, sampling: dict[str, Any], **options: Any) -> list[list[int]]:
    """One prompt alone, and three together."""
    asked = {"max_new_tokens": COUNT, "ignore_eos": True, **sampling, **options}
    together = runtime.generate_batch(PROMPTS, **asked)
    return [runtime.generate(PROMPT, **asked).tokens, *(result.tokens for result in together)]


def converse(runtime: Runtime) -> list[str]:
    """The answers of a conversation of two turns."""
    talk = runtime.conversation()
    return ["".join(talk.say(text, max_new_tokens=12, ignore_eos=True, **SAMPLINGS[1])) for text in PROMPTS[:2]]


@dataclass(frozen=True)
class Expected:
    """What plain decoding says: of each way of sampling what `says` gives, and the answers of `converse`."""

    said: list[list[list[int]]]
    answers: list[str]


@pytest.fixture(scope="module")
def expected(plain: Runtime) -> Expected:
    return Expected([says(plain, sampling) for sampling in SAMPLINGS], converse(plain))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resident_layers", "kv", "step_s"),
    [(1, "gpu", 0.002), (1, "host", 0.002), (1, "host", 0.2), ("auto", "gpu", 0.002), ("auto", "host", 0.002)],
)
def test_whatever_is_chosen_the_tokens_are_the_same(
    target: Path, draft: Path, expected: Expected, kv: str, resident_layers: int | str, step_s: float, tmp_path: Path
) -> None:
    """With weights streamed, keys and values, both and neither; alone and in a batch; a turn of a conversation too."""
    options: dict[str, Any] = {"kv": kv, "resident_layers": resident_layers, "max_batch": 3, "profile": SLOW_LINK}
    with load(target, draft=draft, trace=tmp_path / "trace.json", **options) as runtime:
        WorkClock(runtime, step_s=step_s)
        room = runtime.plan.tree_room
        assert room == 256 or resident_layers == "auto"
        assert [says(runtime, sampling) for sampling in SAMPLINGS] == expected.said
        assert converse(runtime) == expected.answers
        stats = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True).stats
    assert sum(stats.windows.values()) == stats.passes
    modes = {name.split()[0] for name in stats.windows}
    if step_s < 0.1:  # drafting costs next to nothing, and the draft is good
        assert modes & {"chain", "tree"} and stats.tokens_per_pass > 1.4


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_chosen_windows_of_triforce(target: Path, draft: Path, expected: Expected, kv: str, tmp_path: Path) -> None:
    small = {"budget_tokens": 64, "chunk_size": 8, "recent_tokens": 64, "sink_tokens": 4, "gamma_draft": 3}
    options = SpeculationOptions("triforce", "streaming", **small)
    traced = {"speculation": options, "trace": tmp_path / "trace.json"}
    with load(target, draft=draft, kv=kv, max_batch=3, **traced) as runtime:
        clock = WorkClock(runtime, step_s=0.002)
        assert [says(runtime, sampling) for sampling in SAMPLINGS] == expected.said
        result = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True)
    assert {name.split()[0] for name in result.stats.windows} <= {"chain", "plain"}
    assert result.stats.tokens_per_pass > 1.4 and clock.draft_steps > COUNT


def window_widths(runtime: Runtime) -> list[int]:
    """Tokens of the windows that were verified so far, of a runtime that was loaded with a trace."""
    recorder = runtime.parts.recorder
    assert recorder is not None, "load it with trace="
    recorder.settle()
    passes = [span.args for span in recorder.spans if span.row == PASSES and span.args["kind"] == "verify"]
    return [tokens for args in passes for tokens in args["tokens"]]


@dataclass(frozen=True)
class Told:
    """What the controller was told of a step: see `Controller.observe`."""

    choice: Choice
    windows: Sequence[Sequence[int]]
    is_timed: bool
    num_sequences: int


class NotingController(Controller):
    """Notes the windows that it was offered and the steps that it was told of, as they come.

    Args:
        windows: Of the runtime that it is for.
        always: What it chooses, whatever there is room for; None for what is best.
    """

    def __init__(self, windows: WindowLimits, always: Choice | None = None) -> None:
        super().__init__(windows.by_mode)
        self._always = always
        self.offered, self.told = list[Mapping[str, int]](), list[Told]()

    def choose(self, sampling: SamplingParams, limits: Mapping[str, int], **sizes: int) -> Choice:
        self.offered.append(limits)
        if self._always is None:
            return super().choose(sampling, limits, **sizes)
        return self._always

    def observe(
        self, sampling: SamplingParams, choice: Choice, windows: Sequence[Sequence[int]], **figures: Any
    ) -> None:
        self.told.append(Told(choice, windows, figures["seconds"] is not None, figures["num_sequences"]))
        super().observe(sampling, choice, windows, **figures)


def with_controller(runtime: Runtime, always: Choice | None = None) -> NotingController:
    """Let a controller choose that notes what it is told."""
    controller = NotingController(runtime.parts.windows, always)
    runtime.parts = replace(runtime.parts, controller=controller)
    return controller


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_what_n_grams_add_to_chains_changes_no_token(
    target: Path, draft: Path, plain: Runtime, expected: Expected, size: int, tmp_path: Path
) -> None:
    """Of a draft that streams, over streamed weights, alone and in a batch; nor what is learnt of the chains."""
    options = SpeculationOptions("chain", "streaming", recent_tokens=64, sink_tokens=4)
    prompts = [plain.encode(text) for text in PROMPTS]
    traced = {"resident_layers": 1, "speculation": options, "trace": tmp_path / "trace.json"}
    with load(target, draft=draft, max_batch=3, **traced) as runtime:
        # As if the link took longer than windows of 20.
        runtime.parts = replace(runtime.parts, windows=replace(runtime.parts.windows, free=19))
        controller = with_controller(runtime, Choice("chain", size))
        own = runtime.parts
        for sampling, (alone, *together) in zip(SAMPLINGS, expected.said, strict=True):
            known = Foreknown([[*prompt, *answer] for prompt, answer in zip(prompts, together, strict=True)])
            runtime.parts = replace(own, proposer=WithNgrams(drafting(own.proposer), known))
            asked = {"max_new_tokens": COUNT, "ignore_eos": True, **sampling}
            results = [*runtime.generate_batch(PROMPTS, **asked), runtime.generate(PROMPT, **asked)]
            assert [result.tokens for result in results] == [*together, alone]
            assert all(result.stats.accepted_by_source["ngram"] > 0 for result in results)
            assert results[-1].stats.passes < 0.6 * COUNT
            assert max(window_widths(runtime)) == 20
            bare = runtime.generate(PROMPT, tree_nodes=0, **asked)
            assert bare.tokens == alone and "ngram" not in bare.stats.accepted_by_source
    accepted = [node < one.choice.size for one in controller.told for path in one.windows for node in path]
    assert accepted and all(accepted)


def with_room(runtime: Runtime) -> None:
    """Let windows be chosen in what a runtime was loaded to have room for: `tree_nodes`, whatever the figures of a
    machine would say of models as small as these."""
    own = runtime.parts
    assert own.windows.tree_nodes is not None
    windows = replace(own.windows, tree_nodes=None, tree_room=own.windows.tree_nodes)
    runtime.parts = replace(own, windows=windows)


@pytest.mark.slow
@pytest.mark.parametrize("trees", [False, True])
def test_a_useless_draft_is_switched_off(
    target: Path, one_layer_draft: Path, plain: Runtime, trees: bool, tmp_path: Path
) -> None:
    """At most 1 % slower than plain decoding, by the clock that rounds are timed with."""
    asked = {"max_new_tokens": 257, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    expected = plain.generate(PROMPT, **asked).tokens
    with load(target, draft=one_layer_draft, tree_nodes=32 if trees else 0, trace=tmp_path / "trace.json") as runtime:
        with_room(runtime)
        # A tree of many guesses is right now and then even so, and would be worth cheaper steps.
        clock = WorkClock(runtime, step_s=0.5 if trees else 0.05)
        result = runtime.generate(PROMPT, **asked)
        assert result.tokens == expected
        assert clock.now_s < 1.01 * 256 * PASS_S and clock.draft_steps > 0
        assert not trees or result.stats.windows["plain"] > 200
        # What was learnt stays: the next answer has less to find out.
        before_s = clock.now_s
        again = runtime.generate(PROMPTS[1], **{**asked, "seed": 6})
        assert clock.now_s - before_s < 1.01 * 256 * PASS_S
        assert not trees or again.stats.windows["plain"] > 220


@pytest.mark.slow
def test_a_good_draft_stays_on(target: Path, draft: Path, tmp_path: Path) -> None:
    asked = {"max_new_tokens": 121, "ignore_eos": True}
    with load(target, draft=draft, tree_nodes=0, trace=tmp_path / "trace.json") as runtime:
        clock = WorkClock(runtime, step_s=0.05)
        first = runtime.generate(PROMPT, **asked).stats
        seconds = clock.now_s
        stats = runtime.generate(PROMPT, **asked).stats
        fixed_s = []
        for gamma in (1, 2, 4, 8):
            before_s = clock.now_s
            runtime.generate(PROMPT, gamma=gamma, **asked)
            fixed_s.append(clock.now_s - before_s)
        before_s = clock.now_s
        runtime.generate(PROMPT, **asked)
    assert stats.windows.get("plain", 0) < 0.1 * stats.passes and first.passes < 90
    assert min(fixed_s) < 0.75 * 120 * PASS_S and seconds < 0.9 * 120 * PASS_S
    assert clock.now_s - before_s < 1.1 * min(fixed_s)


@pytest.mark.slow
def test_answers_too_short_for_proposals_do_not_speak_against_them(target: Path, draft: Path, tmp_path: Path) -> None:
    passes = []
    for short in (0, 40):
        with load(target, draft=draft, tree_nodes=0, trace=tmp_path / "trace.json") as runtime:
            WorkClock(runtime, step_s=0.05)
            for _ in range(short):
                stats = runtime.generate(PROMPT, max_new_tokens=2, ignore_eos=True).stats
                assert stats.windows == {"plain": 1}
            passes.append(runtime.generate(PROMPT, max_new_tokens=100, ignore_eos=True).stats.passes)
    assert passes[0] < 80 and passes[1] <= passes[0] + 2


def short_of_room(draft: Path, *, triforce: bool) -> dict[str, Any]:
    """Options of a runtime whose draft is always right, and has no room behind a text longer than its own context; or
    of a hierarchy whose context is whole blocks, so that its last tokens leave no room for a step."""
    if triforce:
        options = SpeculationOptions("triforce", "full", budget_tokens=64, chunk_size=8, gamma_draft=4)
        return {"draft": draft, "context": 256, "kv": "host", "speculation": options}
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    return {"draft": draft, "context": 256, "tree_nodes": 0, "speculation": SpeculationOptions("chain", "full")}


@pytest.mark.few(1)
@pytest.mark.parametrize("triforce", [False, True])
def test_what_there_is_no_room_for_does_not_speak_against_a_draft(
    target: Path, copy: Path, tmp_path: Path, triforce: bool
) -> None:
    options = short_of_room(copy, triforce=triforce)
    with load(target, trace=tmp_path / "trace.json", **options) as runtime:
        WorkClock(runtime, step_s=0.002)
        long = [5 + index * index % 300 for index in range(224)]
        for _ in range(2):
            runtime.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
        controller = runtime.parts.controller
        before = controller.first_rate(SamplingParams(), "chain")
        for _ in range(3):
            windows = runtime.generate(long, max_new_tokens=32, ignore_eos=True).stats.windows
            assert any(name.startswith("chain") for name in windows) == triforce and windows["plain"] >= 4
        # What is known becomes older, and no more.
        assert before > 0.95 and controller.first_rate(SamplingParams(), "chain") > 0.9


def test_a_text_of_a_batch_without_room_does_not_speak_for_the_others(target: Path, copy: Path) -> None:
    with load(target, max_batch=2, **short_of_room(copy, triforce=False)) as runtime:
        controller = with_controller(runtime, Choice("chain", 4))
        long = [5 + index * index % 300 for index in range(226)]
        runtime.generate_batch([long, PROMPT], max_new_tokens=30, ignore_eos=True)
    told = [one for one in controller.told if one.num_sequences == 2]
    assert len(told) > 4 and all(0 in window for one in told for window in one.windows)
    # The longest window decides how long a round takes.
    assert any(len(one.windows) == 1 and one.is_timed for one in told)


@pytest.mark.slow
def test_a_batch_does_not_wait_for_proposals_that_its_longest_answer_has_none_of(
    target: Path, copy: Path, tmp_path: Path
) -> None:
    options = {**short_of_room(copy, triforce=False), "context": 512, "trace": tmp_path / "trace.json"}
    with load(target, max_batch=2, **options) as runtime:
        clock = WorkClock(runtime, step_s=0.3)
        long = [5 + index * index % 300 for index in range(226)]
        for seed in range(4):
            runtime.generate_batch([long, PROMPT], max_new_tokens=60, ignore_eos=True, temperature=1.0, seed=seed)
    assert clock.draft_steps == 0 and clock.now_s < 1.001 * 4 * 59 * PASS_S


@pytest.mark.few(1)
@pytest.mark.parametrize("cut", [5, 20])
def test_a_chain_that_the_end_cuts_tells_about_smaller_ones(target: Path, draft: Path, cut: int) -> None:
    with load(target, draft=draft, tree_nodes=0) as runtime:
        controller = with_controller(runtime, Choice("chain", 24))
        runtime.generate(PROMPT, max_new_tokens=cut + 2, ignore_eos=True)
    first = controller.told[0]
    assert (first.choice.size, first.is_timed) == (size_within(cut), False)


@pytest.mark.slow
def test_the_last_chain_reaches_to_the_end_of_an_answer(target: Path, tmp_path: Path) -> None:
    assert [size_for(count) for count in (0, 1, 5, 8, 30, 1024, 3000)] == [0, 1, 6, 8, 32, 1024, 1024]
    with load(target, draft=target, tree_nodes=0, trace=tmp_path / "trace.json") as runtime:
        WorkClock(runtime, step_s=0.002)
        for _ in range(3):
            runtime.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
        stats = runtime.generate(PROMPT, max_new_tokens=32, ignore_eos=True).stats
    # One comes of the prompt, 31 of a pass over 30 proposals.
    assert stats.windows == {"chain 32": 1} and stats.acceptance[-1].accepted == 30


@pytest.mark.slow
def test_a_tree_is_as_large_as_there_is_room_for(target: Path, draft: Path, tmp_path: Path) -> None:
    """And what there is no room for is not learnt from."""
    room, traced = 256, {"resident_layers": 1, "trace": tmp_path / "trace.json"}
    # More than is planned unasked in so short a context.
    with load(target, draft=draft, context=250, tree_nodes=room, profile=SLOW_LINK, **traced) as runtime:
        with_room(runtime)
        controller = with_controller(runtime, Choice("tree", 64))
        tokens = len(runtime.generate([5] * 150, max_new_tokens=100, ignore_eos=True).tokens)
        rows = window_widths(runtime)
    offered = [limits["tree"] for limits in controller.offered]
    # The last round of an answer may have room for the target's own token alone, and asks for nothing.
    assert tokens == 100 and offered[0] == min(room, 256 - 151) and offered[-1] < 64 <= offered[0]
    assert all(width <= 1 + places for width, places in zip(rows, offered, strict=False))
    assert all(bool(one.windows) == one.is_timed for one in controller.told)
    cut = [not one.windows for one in controller.told[: len(offered)]]
    assert True in cut and all(cut[at] for at, places in enumerate(offered) if places < 64) and not cut[0]


@pytest.mark.slow
def test_what_is_fixed_is_not_chosen(target: Path, draft: Path, tmp_path: Path) -> None:
    asked = {"max_new_tokens": COUNT, "ignore_eos": True}
    with load(target, draft=draft, resident_layers=1, profile=SLOW_LINK, trace=tmp_path / "trace.json") as runtime:
        WorkClock(runtime, step_s=100.0)  # nobody would choose to draft
        for how, window in (
            ({"gamma": 5}, "chain 5"), ({"gamma": 3, "tree_nodes": 24}, "tree 24"), ({"tree_nodes": 30}, "tree 30"),
            ({"gamma": 5, "tree_nodes": 0}, "chain 5"), ({"speculate": False}, "plain"),
        ):  # fmt: skip
            windows = runtime.generate(PROMPT, **asked, **how).stats.windows
            assert set(windows) <= {window, "plain"} and windows[window] > windows.get("plain", 0) * (window != "plain")
        chains = runtime.generate(PROMPT, tree_nodes=0, **asked).stats.windows
        assert not any(name.startswith("tree") for name in chains)
    with load(target, draft="ngram", tree_nodes=12) as runtime:
        assert set(runtime.generate(PROMPT, **asked).stats.windows) <= {"ngram 12", "plain"}


def test_room_for_trees(target: Path, draft: Path) -> None:
    """As much as is predicted to be of use, and none where it would push layers out."""
    with load(target, draft=draft, resident_layers=2, profile=SLOW_LINK) as runtime:
        assert runtime.plan.tree_room == 256 and "trees of up to 256 tokens" in runtime.placement
        assert runtime.plan.target.window_tokens == 257
    with load(target, draft=draft, tree_nodes=0, profile=SLOW_LINK) as runtime:
        assert runtime.plan.tree_room == 0 and "trees" not in runtime.placement
        held_bytes = runtime.plan.device_bytes
    with load(target, draft=draft, vram=held_bytes, profile=SLOW_LINK) as runtime:
        assert runtime.plan.tree_room == 0 and len(runtime.plan.placement.streamed_layers) == 0
        assert "no trees: room for them would cost more than they bring" in runtime.placement
    with load(target, draft="ngram", resident_layers=2, profile=SLOW_LINK) as runtime:
        assert runtime.plan.tree_room == 256 and "trees of up to 256 tokens" in runtime.placement
    for less in ({"draft": "none"}, {"gamma": 5}, {"tree_nodes": 0}):
        with load(target, profile=SLOW_LINK, **less) as runtime:
            assert runtime.plan.tree_room == 0 and "trees" not in runtime.placement
            held_bytes = runtime.plan.device_bytes
    with load(target, vram=held_bytes, profile=SLOW_LINK) as runtime:
        assert runtime.plan.tree_room == 0 and len(runtime.plan.placement.streamed_layers) == 0


def test_room_for_copies_takes_nothing_from_anybody(target: Path) -> None:
    with load(target) as runtime:
        assert runtime.plan.tree_room == 256
        held = runtime.plan
    with load(target, tree_nodes=0) as runtime:
        lean = runtime.plan
    assert held.host_bytes > lean.host_bytes  # of a CPU, whose memory is the device's
    for ram_bytes, room in ((held.host_bytes, 256), (held.host_bytes - 1, 0)):
        with load(target, ram=ram_bytes) as runtime:
            assert runtime.plan.tree_room == room


def test_a_draft_that_retrieves_chunks_has_no_room_for_trees(target: Path, draft: Path) -> None:
    options = SpeculationOptions("chain", "retrieval", budget_tokens=64)
    with load(target, draft=draft, speculation=options) as runtime:
        assert runtime.plan.tree_room == 0
        assert "no trees: trees of 32 nodes need a draft whose KV cache holds whole branches" in runtime.placement


def test_limits_of_what_is_chosen() -> None:
    limits = WindowLimits(20, tree_room=256)
    ngrams = NgramProposer()
    assert limits.by_mode == {"ngram": 256, "unigram": 256, "chain": 20, "tree": 256}
    assert limits.settle(GenerationParams(), ngrams) == limits
    chains = limits.settle(GenerationParams(tree_nodes=0), ngrams)
    assert isinstance(chains, WindowLimits) and chains.by_mode == {"ngram": 20, "unigram": 20, "chain": 20}
    assert limits.settle(GenerationParams(gamma=3), ngrams) == WindowSize(3)
    assert limits.settle(GenerationParams(tree_nodes=30), ngrams) == WindowSize(30, 30)
    assert replace(limits, gamma=8).settle(GenerationParams(), ngrams) == WindowSize(8)
    assert replace(limits, gamma=8).settle(GenerationParams(gamma=3, tree_nodes=30), ngrams) == WindowSize(3, 30)
    assert limits.settle(GenerationParams(), Proposer()) == WindowSize(0)
    assert limits.window(PLAIN) == WindowSize(0)
    assert limits.window(Choice("chain", 8)) == WindowSize(8)
    for mode in ("tree", "ngram", "unigram"):
        assert limits.window(Choice(mode, 48)) == WindowSize(48, 48)
        assert chains.window(Choice(mode, 8)) == WindowSize(8)


class Named(Proposer):
    """Who could propose in these ways."""

    name = "draft"

    def __init__(self, *modes: str) -> None:
        self._families = modes

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return self._families


def test_chains_are_filled_where_rows_cost_nothing() -> None:
    limits = WindowLimits(20, tree_room=256)
    chains = WithNgrams(Named("chain"), NgramProposer(), alone=False)
    trees = WithNgrams(Named("chain", "tree"), NgramProposer())
    streamed = replace(limits, free=20)
    filled = streamed.settle(GenerationParams(), chains)
    assert isinstance(filled, WindowLimits)
    assert filled.window(Choice("chain", 8)) == WindowSize(8, extra_nodes=12)
    assert filled.window(Choice("chain", 20)) == WindowSize(20) and filled.window(PLAIN) == WindowSize(0)
    # Where branches were refused, or the window is fixed.
    bare = streamed.settle(GenerationParams(tree_nodes=0), chains)
    assert isinstance(bare, WindowLimits) and bare.window(Choice("chain", 8)) == WindowSize(8)
    assert streamed.settle(GenerationParams(gamma=3), chains) == WindowSize(3)
    of_trees = streamed.settle(GenerationParams(), trees)
    assert isinstance(of_trees, WindowLimits) and of_trees.window(Choice("tree", 64)) == WindowSize(64, 64)
