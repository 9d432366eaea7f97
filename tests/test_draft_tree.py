"""Steps of a draft over trees: every node is answered as if the path to it were a plain sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.config import SamplingParams
from offload_runtime.kv import DeviceKVCache
from offload_runtime.kv.device import StreamingDraftCache
from offload_runtime.runners import Asked, Branch, Children, DraftTree
from offload_runtime.runners.graphs import MOST_DEPTH, StepShapes
from offload_runtime.weights import PlainWeight
from tests.helpers.engine import one_thread, raising  # noqa: F401 (the first is an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.sampling import numbered
from tests.helpers.tree_drafts import BATCH, TreeDraft, make_tree_draft, scores_by_the_book

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, seed=5),
    SamplingParams(temperature=1.0, top_k=3, seed=6),
    SamplingParams(temperature=1.0, top_p=0.7, seed=(1 << 40) + 7),
]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeDraft]:
    made = make_tree_draft(tmp_path_factory.mktemp("draft"))
    yield made
    made.made.close()


class Growing:
    """A tree that grows at random: paths as lists of tokens, and the slots of those that were expanded."""

    def __init__(self, text: Sequence[int], seed: int) -> None:
        self.text = list(text)
        self.slots: dict[tuple[int, ...], int] = {}
        self._random = random.Random(seed)
        self._root_expanded = False

    def choose(self, count: int, num_slots: int) -> dict[tuple[int, ...], Branch]:
        """Up to `count` nodes by their paths, of which some follow each other."""
        chosen: dict[tuple[int, ...], Branch] = {}
        slots = dict(self.slots)
        free = [slot for slot in range(num_slots) if slot not in slots.values()]
        self._random.shuffle(free)
        if not self._root_expanded:
            chosen[()] = Branch(self.text[-1])
        while len(chosen) < count:
            above = self._random.choice([(), *slots])
            path = (*above, self._random.randrange(VOCAB_SIZE))
            if path not in slots:
                slots[path] = free.pop()
                chosen[path] = Branch(path[-1], tuple(slots[path[: end + 1]] for end in range(len(path))))
        return chosen

    def answered(self, chosen: Mapping[tuple[int, ...], Branch]) -> None:
        """These have keys now."""
        self._root_expanded = True
        self.slots |= {path: branch.slots[-1] for path, branch in chosen.items() if path}

    def go_on(self, most: int | None = None) -> tuple[list[int], list[int]]:
        """The text becomes a path of expanded nodes, or `most` of them: the tokens, and their slots."""
        path = max(self.slots, key=len)[:most]
        slots = [self.slots[path[: end + 1]] for end in range(len(path))]
        self.slots = {other[len(path) :]: slot for other, slot in self.slots.items() if other[: len(path)] == path}
        self.slots.pop((), None)
        self.text += path
        return list(path), slots


def check(
    draft: TreeDraft, text: Sequence[int], paths: Sequence[tuple[int, ...]], said: Sequence[Children],
    params: SamplingParams, sequence: int,
) -> None:  # fmt: skip
    """Answers against transformers, node by node."""
    for path, children in zip(paths, said, strict=True):
        expected = scores_by_the_book(draft, [*text, *path], params, sequence=sequence)
        best = expected.topk(8)
        allowed = int((best.values > -torch.inf).sum())
        assert len(children.tokens) == allowed
        torch.testing.assert_close(torch.tensor(children.scores), best.values[:allowed], atol=2e-3, rtol=1e-4)
        torch.testing.assert_close(expected[children.tokens], best.values[:allowed], atol=2e-3, rtol=1e-4)


def ask(draft: TreeDraft, tree: DraftTree, growing: Mapping[int, Growing], params: SamplingParams) -> None:
    """A step about trees by their sequences, which grow by it: every answer is as it should be."""
    chosen = {sequence: one.choose(3 + 2 * sequence, tree.num_slots) for sequence, one in growing.items()}
    asked = {s: Asked(growing[s].text, list(branches.values())) for s, branches in chosen.items()}
    for sequence, said in tree.expand(asked).items():
        check(draft, growing[sequence].text, list(chosen[sequence]), said, params, sequence)
        growing[sequence].answered(chosen[sequence])


class Replays:
    """Graphs in all but speed: a step sees the cache as it was addressed when the step was captured."""

    def __init__(self, cache: DeviceKVCache) -> None:
        self._cache, self._captured = cache, dict[Hashable, slice]()
        self._eager = False

    @contextmanager
    def eager(self) -> Iterator[None]:
        self._eager = True
        try:
            yield
        finally:
            self._eager = False

    def capture(self, key: Hashable, step: Callable[[], None]) -> bool:
        if self._eager:
            return False
        new = key not in self._captured
        self._captured.setdefault(key, self._cache._rows)
        return new

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        now = self._cache._rows
        self._cache._rows = self._captured.get(key, now)
        step()
        self._cache._rows = now


def with_replays(draft: TreeDraft) -> tuple[DraftTree, Replays]:
    """A tree whose steps are as on CUDA."""
    _, tree = draft.parts()
    cache = draft.runner.cache
    replays = Replays(cache)
    tree._shapes, tree._graphs = StepShapes(tree.room(0), rounded=True), replays  # type: ignore[assignment]
    return tree, replays


@pytest.mark.parametrize(("params", "rounded"), [*((params, False) for params in PARAMS), (PARAMS[1], True)], ids=str)
def test_every_node_is_answered_as_a_plain_sequence(draft: TreeDraft, params: SamplingParams, rounded: bool) -> None:
    """Trees of three sequences that grow, of which paths come true, with more and less of the text still unknown."""
    tree = with_replays(draft)[0] if rounded else draft.parts()[1]
    tree.start(numbered(params, BATCH))
    growing = {
        sequence: Growing(random_tokens(length, seed=sequence), sequence)
        for sequence, length in enumerate((250, 1, 70))
    }
    for request in range(7):
        taking_part = [sequence for sequence in growing if request < 2 or (request + sequence) % 3]
        ask(draft, tree, {sequence: growing[sequence] for sequence in taking_part}, params)
        if request % 2:
            for sequence in taking_part:
                tree.adopt(sequence, *growing[sequence].go_on())


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeDraft]:
    """One layer, whose keys depend on nothing that has been let go of."""
    model = random_model("llama-gqa", seed=7)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    made = make_tree_draft(tmp_path_factory.mktemp("streaming"), hf_model=model, kept=(4, 64))
    yield made
    made.made.close()


@pytest.mark.parametrize(("params", "rounded"), [(PARAMS[0], False), (PARAMS[1], False), (PARAMS[1], True)], ids=str)
def test_every_node_is_answered_behind_first_and_newest_tokens(
    streaming: TreeDraft, params: SamplingParams, rounded: bool
) -> None:
    """Of a cache that lets go of the rest, while trees grow and come true, and while the text goes on otherwise."""
    tree = with_replays(streaming)[0] if rounded else streaming.parts()[1]
    tree.start(numbered(params, BATCH))
    cache, moved, chance = streaming.runner.cache, set[str](), random.Random(1)
    growing = {s: Growing(random_tokens(length, seed=s), s) for s, length in enumerate((322, 1, 578))}
    starts = dict.fromkeys(growing, 0)
    for request in range(30):
        taking_part = [sequence for sequence in growing if request < 2 or (request + sequence) % 3]
        ask(streaming, tree, {sequence: growing[sequence] for sequence in taking_part}, params)
        moved |= {"a step" for s in taking_part if cache.start(s) != starts[s]}
        starts = {sequence: cache.start(sequence) for sequence in growing}
        for sequence in taking_part:
            if request % 2:
                tree.adopt(sequence, *growing[sequence].go_on(2))
            elif request % 4 == 2:  # by few tokens, or by so many that they are read as a prompt
                new = random_tokens(chance.choice((3, 20, 90)), seed=request)
                growing[sequence] = Growing([*growing[sequence].text, *new], request)
        moved |= {"what came true" for s in taking_part if cache.start(s) != starts[s] and growing[s].slots}
        starts = {sequence: cache.start(sequence) for sequence in growing}
    assert moved == {"a step", "what came true"} and cache.rope_shift(0) != cache.rope_shift(2)
    assert tree.room(5 * cache.capacity_tokens) > 100, "however long a text is"


@pytest.mark.parametrize("recent_tokens", [2, 3, 64])
def test_sinks_are_not_fed_again(streaming: TreeDraft, tmp_path: Path, recent_tokens: int) -> None:
    """By steps that are the first ones behind what has just been let go of."""
    draft = make_tree_draft(tmp_path, hf_model=streaming.hf_model, kept=(4, recent_tokens), tree_nodes=8)
    _, tree = draft.parts()
    text = random_tokens(256 + 4 + recent_tokens, seed=5)
    for _ in range(3):
        said = tree.expand({0: Asked(text, [Branch(text[-1])])})[0]
        assert draft.runner.cache.start(0) == 256
        check(draft, text, [()], said, SamplingParams(), 0)
        text = [*text, *random_tokens(1, seed=len(text))]
    draft.made.close()


def test_a_cache_that_was_moving_when_it_was_interrupted_is_not_trusted(
    streaming: TreeDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tree = streaming.parts()
    growing = Growing(random_tokens(322, seed=1), 1)
    chosen = growing.choose(8, tree.num_slots)
    tree.expand({0: Asked(growing.text, list(chosen.values()))})
    growing.answered(chosen)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            streaming.runner, "run_rows", raising(KeyboardInterrupt(), after=0, then=streaming.runner.run_rows)
        )
        tree.adopt(0, *growing.go_on(2))
    (said,) = tree.expand({0: Asked(growing.text, [Branch(growing.text[-1])])}).values()
    assert streaming.runner.cache.start(0) == 256
    check(streaming, growing.text, [()], said, SamplingParams(), 0)


def test_steps_made_ready_are_about_what_is_kept(streaming: TreeDraft) -> None:
    tree, replays = with_replays(streaming)
    tree.expand({0: Asked([5, 6], [Branch(6)])})  # all kernels are there now
    text = random_tokens(700, seed=3)
    tree.texts.catch_up(0, text)
    replays._captured.clear()
    while tree.get_ready([len(text)], 0):
        pass
    num_captured = len(replays._captured)
    tree.expand({0: Asked(text, [Branch(text[-1])])})
    assert len(replays._captured) == num_captured > 0, "the step was expected"


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_first_children_are_what_a_chain_says_behind_first_and_newest_tokens(
    streaming: TreeDraft, params: SamplingParams
) -> None:
    chains, tree = streaming.parts()
    chains.start(numbered(params, BATCH))
    tree.start(numbered(params, BATCH))
    text = random_tokens(700, seed=2)
    for count in (9, 200):
        chain, branch, said = chains.model.propose({2: text}, {2: 9})[2], Branch(text[-1]), list[int]()
        for slot in range(9):
            said.append(tree.expand({2: Asked(text, [branch])})[2][0].tokens[0])
            branch = Branch(said[-1], tuple(range(slot + 1)))
        assert said == chain
        text += [*said, *random_tokens(count, seed=count)]


def test_a_step_answers_as_many_as_it_has_room_for(draft: TreeDraft) -> None:
    _, tree = draft.parts()
    growing = Growing(random_tokens(40, seed=1), 1)
    chosen = growing.choose(40, tree.num_slots)
    said = tree.expand({0: Asked(growing.text, list(chosen.values()))})[0]
    assert 28 <= len(said) <= tree.width(1) == 32
    check(draft, growing.text, list(chosen)[: len(said)], said, SamplingParams(), 0)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_first_children_are_what_a_chain_says(draft: TreeDraft, params: SamplingParams) -> None:
    chains, tree = draft.parts()
    chains.start(numbered(params, BATCH))
    tree.start(numbered(params, BATCH))
    text = random_tokens(30, seed=2)
    chain = chains.model.propose({2: text}, {2: 9})[2]
    branch, said = Branch(text[-1]), []
    for slot in range(9):
        said.append(tree.expand({2: Asked(text, [branch])})[2][0].tokens[0])
        branch = Branch(said[-1], tuple(range(slot + 1)))
    assert said == chain
    # And the other way round: what trees have left in the cache, chains go on from.
    assert chains.model.propose({2: [*text, *chain[:4]]}, {2: 5})[2] == chain[4:]


def test_of_equal_scores_the_lowest_token_comes_first(draft: TreeDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tree = draft.parts()
    head = PlainWeight(torch.zeros_like(draft.runner.decoder.lm_head.dense))
    monkeypatch.setattr(draft.runner.decoder, "lm_head", head)
    (children,) = tree.expand({0: Asked([5, 6], [Branch(6)])})[0]
    assert children.tokens[0] == 0 and len(set(children.tokens)) == 8 and set(children.scores) == {0.0}


def test_tokens_beyond_either_vocabulary(draft: TreeDraft) -> None:
    _, tree = draft.parts(vocab_size=20)
    tree.start(numbered(PARAMS[1], BATCH))
    (children,) = tree.expand({0: Asked([5, VOCAB_SIZE + 9], [Branch(VOCAB_SIZE + 9)])})[0]
    assert len(children.tokens) == 8 and max(children.tokens) < 20


def test_nodes_with_nan_have_no_children(draft: TreeDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tree = draft.parts()
    honest = draft.runner.decoder.attend
    text = random_tokens(12, seed=4)
    chosen = Growing(text, 4).choose(5, tree.num_slots)

    def attend(index: int, weights: Any, qkv: torch.Tensor, rows: Any, cache: Any) -> torch.Tensor:
        mixed = honest(index, weights, qkv, rows, cache)
        if index + 1 == draft.runner.decoder.config.num_layers and rows.query.ancestors is not None:
            mixed = mixed.clone()
            mixed[-2] = float("nan")
        return mixed

    monkeypatch.setattr(draft.runner.decoder, "attend", attend)
    said = tree.expand({0: Asked(text, list(chosen.values()))})[0]
    assert [len(children.tokens) for children in said] == [8, 8, 8, 0, 8]
    check(draft, text, [path for n, path in enumerate(chosen) if n != 3], [*said[:3], said[4]], SamplingParams(), 0)


def test_steps_made_ready_behind_prompts_are_about_all_sequences(draft: TreeDraft) -> None:
    """A prompt is read into one sequence of the cache, and a step of two is captured behind it."""
    tree, replays = with_replays(draft)
    first = {sequence: Asked([5, 6], [Branch(6)]) for sequence in (0, 1)}
    tree.expand(first)  # all kernels are there now
    replays._captured.clear()
    texts = {sequence: random_tokens(length, seed=sequence) for sequence, length in ((0, 50), (1, 60))}
    for sequence, text in texts.items():
        tree.texts.catch_up(sequence, text)
    while tree.get_ready([len(text) for text in texts.values()], 0):
        pass
    num_captured = len(replays._captured)
    said = tree.expand({sequence: Asked(text, [Branch(text[-1])]) for sequence, text in texts.items()})
    assert len(replays._captured) == num_captured > 0, "the step was expected"
    for sequence, text in texts.items():
        check(draft, text, [()], said[sequence], SamplingParams(), sequence)


def test_nothing_is_made_ready_for_texts_without_room(draft: TreeDraft) -> None:
    tree, replays = with_replays(draft)
    tree.expand({0: Asked([5, 6], [Branch(6)])})
    replays._captured.clear()
    capacity = tree.room(0)
    assert not tree.get_ready([capacity + 1], 9) and not tree.get_ready([capacity + 1, 5 * capacity], 0)
    assert tree.get_ready([capacity + 1, 2], 0), "only the other one can be asked about"
    assert {key.batch for key in replays._captured} == {1}  # type: ignore[attr-defined]


def test_warming_up_makes_the_kernels_of_all_steps_about_one_text(tmp_path: Path) -> None:
    draft = make_tree_draft(tmp_path, capacity_tokens=1400)
    tree, _ = with_replays(draft)
    tree.warm_up()
    for length in (1, 130, 256, 300, 900, 1023, 1024, 1399, 1400):
        for shape in tree._shapes.expected([length], 60, width=tree.width(1), deepest=MOST_DEPTH):
            assert shape.kind in tree._compiled
    assert draft.runner.cache.length(0) == 0
    draft.made.close()


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_warming_up_leaves_nothing(draft: TreeDraft, params: SamplingParams) -> None:
    """Behind the tokens that it was done with, too."""
    tree, replays = with_replays(draft)
    tree.warm_up()
    tree.start(numbered(params, BATCH))
    assert not replays._captured, "a graph of what hardly ever comes again"
    text = [0, 0, 0, 7]
    check(draft, text, [()], tree.expand({0: Asked(text, [Branch(7)])})[0], params, 0)


def assert_alike(some: Sequence[Children], others: Sequence[Children]) -> None:
    """The same tokens; their scores but for rounding."""
    for one, other in zip(some, others, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(torch.tensor(one.scores), torch.tensor(other.scores), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("params", "kept", "further"), [*((params, None, 0) for params in PARAMS), (PARAMS[1], (4, 64), 287)], ids=str
)
def test_replays_are_eager_steps(
    tmp_path_factory: pytest.TempPathFactory, params: SamplingParams, kept: tuple[int, int] | None, further: int
) -> None:
    """The same questions to a draft that captures its steps and to one that does not, often enough for replays; of one
    that keeps first and newest tokens, behind a text of which more is let go of on the way."""
    device = torch.device("cuda")
    answers = []
    for graphs in (True, False):
        draft = make_tree_draft(tmp_path_factory.mktemp("gpu"), device=device, capacity_tokens=400, kept=kept)
        _, tree = draft.parts(graphs=graphs)
        if graphs:
            tree.warm_up()  # leaves nothing that an answer could depend on
        tree.start(numbered(params, BATCH))
        answers.append(list(_grow(tree, further)))
        cache = draft.runner.cache
        assert kept is None or (isinstance(cache, StreamingDraftCache) and cache.rope_shift(2) > 0)
        if graphs:
            num_graphs = tree._graphs.num_graphs
            assert num_graphs > 0, "nothing was captured"
            tree.start(numbered(SamplingParams(temperature=0.3, top_k=7), BATCH))
            answer = list(_grow(tree, further))
            assert tree._graphs.num_graphs == num_graphs, "another way of sampling needs no other graphs"
            tree.start(numbered(params, BATCH))
            again = list(_grow(tree, further))
            # Of what a text is rotated by nothing depends on other texts, unless some of it has been let go of.
            assert answer != again and (again == answers[0] or kept is not None)
            assert_alike(again, answers[0])
        draft.made.close()
    assert_alike(*answers)


@pytest.mark.gpu
def test_steps_made_ready_behind_several_prompts_are_eager_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As the passes of the prompts have left the cache, of which each saw a sequence."""
    device, answers = torch.device("cuda"), []
    for graphs in (True, False):
        draft = make_tree_draft(tmp_path_factory.mktemp("gpu"), device=device, capacity_tokens=800)
        _, tree = draft.parts(graphs=graphs)
        tree.expand({sequence: Asked([5, 6], [Branch(6)]) for sequence in range(3)})
        texts = {sequence: random_tokens(60 + 20 * sequence, seed=sequence) for sequence in range(3)}
        for sequence, text in texts.items():
            tree.texts.catch_up(sequence, text)
        prepared = 0
        while tree.get_ready([len(text) for text in texts.values()], 0):
            prepared += 1
        assert (prepared > 0) == graphs
        said = tree.expand({sequence: Asked(text, [Branch(text[-1])]) for sequence, text in texts.items()})
        answers.append([said[sequence][0].tokens for sequence in texts])
        draft.made.close()
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [None, (4, 64)])
def test_steps_that_were_made_ready_are_eager_steps(
    tmp_path_factory: pytest.TempPathFactory, kept: tuple[int, int] | None
) -> None:
    """No step of these texts is captured when it is asked for, and the answers are those of a draft without graphs."""
    device, answers = torch.device("cuda"), []
    for graphs in (True, False):
        draft = make_tree_draft(tmp_path_factory.mktemp("gpu"), device=device, capacity_tokens=800, kept=kept)
        _, tree = draft.parts(graphs=graphs)
        tree.start(numbered(SamplingParams(temperature=0.6, seed=5), BATCH))
        tree.warm_up()
        one, said = Growing(random_tokens(490, seed=3), 3), []
        prepared = 0
        while tree.get_ready([len(one.text)], 40):
            prepared += 1
        assert (prepared > 1) == graphs
        num_graphs = tree._graphs.num_graphs
        for request in range(8):
            chosen = one.choose(6 + 20 * (request % 2), tree.num_slots)
            said += tree.expand({0: Asked(one.text, list(chosen.values()))})[0]
            one.answered(chosen)
            if request % 2:
                tree.adopt(0, *one.go_on())
        assert len(one.text) > 490 and tree._graphs.num_graphs == num_graphs
        answers.append(said)
        draft.made.close()
    for captured, eager in zip(*answers, strict=True):
        assert captured.tokens == eager.tokens


def _grow(tree: DraftTree, further: int = 0) -> Iterator[Children]:
    """Twelve steps over two sequences, of which one, behind 290 tokens and `further` ones, moves on now and then."""
    growing = {
        sequence: Growing(random_tokens(length, seed=sequence), sequence)
        for sequence, length in ((0, 200), (2, 290 + further))
    }
    for request in range(12):
        chosen = {sequence: one.choose(6, tree.num_slots) for sequence, one in growing.items()}
        asked = {s: Asked(growing[s].text, list(branches.values())) for s, branches in chosen.items()}
        for sequence, said in tree.expand(asked).items():
            growing[sequence].answered(chosen[sequence])
            yield from said
        if request % 4 == 3:
            tree.adopt(2, *growing[2].go_on())
