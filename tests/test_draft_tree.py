"""Steps of a draft over trees: every node is answered as if the path to it were a plain sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from offload_runtime.kv import LayerCache
from offload_runtime.kv.device import StreamingDraftCache
from offload_runtime.model import Decoder, PassRows, Weights
from offload_runtime.params import SamplingParams
from offload_runtime.runners import Asked, Branch, Children, DraftTree, ModelRunner
from offload_runtime.weights.encoding import Weight
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.sampling import join_all, numbered
from tests.helpers.tree_drafts import BATCH, TreeDraft, make_tree_draft, scores_by_the_book

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, seed=5),
    SamplingParams(temperature=1.0, top_k=3, seed=6),
    SamplingParams(temperature=1.0, top_p=0.7, seed=(1 << 40) + 7),
]


@pytest.fixture(scope="module")
def draft() -> Iterator[TreeDraft]:
    made = make_tree_draft()
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


@pytest.mark.few(1)
@pytest.mark.parametrize(("params", "rounded"), [*((params, False) for params in PARAMS), (PARAMS[1], True)], ids=str)
def test_every_node_is_answered_as_a_plain_sequence(draft: TreeDraft, params: SamplingParams, rounded: bool) -> None:
    """Trees of three sequences that grow, of which paths come true, with more and less of the text still unknown."""
    _, tree = draft.parts(fixed_shapes=rounded)
    tree.warm_up()
    join_all(tree, numbered(params, BATCH))
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
def streaming() -> Iterator[TreeDraft]:
    """One layer, whose keys depend on nothing that has been let go of."""
    model = random_model("llama-gqa", seed=7)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    made = make_tree_draft(hf_model=model, kept=(4, 64))
    yield made
    made.made.close()


@pytest.mark.slow
@pytest.mark.parametrize(("params", "rounded"), [(PARAMS[0], False), (PARAMS[1], False), (PARAMS[1], True)], ids=str)
def test_every_node_is_answered_behind_first_and_newest_tokens(
    streaming: TreeDraft, params: SamplingParams, rounded: bool
) -> None:
    """Of a cache that lets go of the rest, while trees grow and come true, and while the text goes on otherwise."""
    _, tree = streaming.parts(fixed_shapes=rounded)
    join_all(tree, numbered(params, BATCH))
    cache, moved, chance = streaming.runner.cache, set[str](), random.Random(1)
    growing = {s: Growing(random_tokens(length, seed=s), s) for s, length in enumerate((322, 1, 578))}
    starts = dict.fromkeys(growing, 0)
    for request in range(30):
        taking_part = [sequence for sequence in growing if request < 2 or (request + sequence) % 3]
        ask(streaming, tree, {sequence: growing[sequence] for sequence in taking_part}, params)
        moved |= {"a step" for s in taking_part if cache.starts[s] != starts[s]}
        starts = {sequence: cache.starts[sequence] for sequence in growing}
        for sequence in taking_part:
            if request % 2:
                tree.adopt(sequence, *growing[sequence].go_on(2))
            elif request % 4 == 2:  # by few tokens, or by so many that they are read as a prompt
                new = random_tokens(chance.choice((3, 20, 90)), seed=request)
                growing[sequence] = Growing([*growing[sequence].text, *new], request)
        moved |= {"what came true" for s in taking_part if cache.starts[s] != starts[s] and growing[s].slots}
        starts = {sequence: cache.starts[sequence] for sequence in growing}
    assert moved == {"a step", "what came true"} and cache.rope_shifts[0] != cache.rope_shifts[2]
    assert tree.room(5 * cache.capacity_tokens) > 100, "however long a text is"


@pytest.mark.parametrize("recent_tokens", [2, 3, 64])
def test_sinks_are_not_fed_again(streaming: TreeDraft, recent_tokens: int) -> None:
    """By steps that are the first ones behind what has just been let go of."""
    draft = make_tree_draft(hf_model=streaming.hf_model, kept=(4, recent_tokens), tree_nodes=8)
    _, tree = draft.parts()
    text = random_tokens(256 + 4 + recent_tokens, seed=5)
    for _ in range(3):
        said = tree.expand({0: Asked(text, [Branch(text[-1])])})[0]
        assert draft.runner.cache.starts[0] == 256
        check(draft, text, [()], said, SamplingParams(), 0)
        text = [*text, *random_tokens(1, seed=len(text))]
    draft.made.close()


class InterruptedRunner(ModelRunner):
    """Ctrl-C comes with its next pass, once it is told."""

    is_next = False

    def run_rows(self, rows: PassRows) -> torch.Tensor:
        if self.is_next:
            self.is_next = False
            raise KeyboardInterrupt
        return super().run_rows(rows)


def test_a_cache_that_was_moving_when_it_was_interrupted_is_not_trusted(streaming: TreeDraft) -> None:
    plain = streaming.runner
    runner = InterruptedRunner(plain.decoder, plain.streamer, plain.cache, plain.rows, plain.chunk_tokens)
    _, tree = replace(streaming, runner=runner).parts()
    growing = Growing(random_tokens(322, seed=1), 1)
    chosen = growing.choose(8, tree.num_slots)
    tree.expand({0: Asked(growing.text, list(chosen.values()))})
    growing.answered(chosen)
    runner.is_next = True
    with pytest.raises(KeyboardInterrupt):
        tree.adopt(0, *growing.go_on(2))
    (said,) = tree.expand({0: Asked(growing.text, [Branch(growing.text[-1])])}).values()
    assert streaming.runner.cache.starts[0] == 256
    check(streaming, growing.text, [()], said, SamplingParams(), 0)


@pytest.mark.few(2)
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_first_children_are_what_a_chain_says_behind_first_and_newest_tokens(
    streaming: TreeDraft, params: SamplingParams
) -> None:
    chains, tree = streaming.parts()
    join_all(chains, numbered(params, BATCH))
    join_all(tree, numbered(params, BATCH))
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


@pytest.mark.few(2)
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_first_children_are_what_a_chain_says(draft: TreeDraft, params: SamplingParams) -> None:
    chains, tree = draft.parts()
    join_all(chains, numbered(params, BATCH))
    join_all(tree, numbered(params, BATCH))
    text = random_tokens(30, seed=2)
    chain = chains.model.propose({2: text}, {2: 9})[2]
    branch, said = Branch(text[-1]), []
    for slot in range(9):
        said.append(tree.expand({2: Asked(text, [branch])})[2][0].tokens[0])
        branch = Branch(said[-1], tuple(range(slot + 1)))
    assert said == chain
    # And the other way round: what trees have left in the cache, chains go on from.
    assert chains.model.propose({2: [*text, *chain[:4]]}, {2: 5})[2] == chain[4:]


def shared_weights(draft: TreeDraft) -> Weights:
    """Embedding, last norm and head, as its decoder has them."""
    weights = draft.made.weights
    return weights.layout.shared.views(weights.block(None))


def decoded_by(draft: TreeDraft, decoder: Decoder) -> TreeDraft:
    """The same draft with other maths."""
    runner = draft.runner
    return replace(draft, runner=ModelRunner(decoder, runner.streamer, runner.cache, runner.rows, runner.chunk_tokens))


def test_of_equal_scores_the_lowest_token_comes_first(draft: TreeDraft) -> None:
    decoder = draft.runner.decoder
    head = Weight(torch.zeros_like(decoder.lm_head.dense))
    _, tree = decoded_by(draft, Decoder(decoder.config, {**shared_weights(draft), "lm_head": head})).parts()
    (children,) = tree.expand({0: Asked([5, 6], [Branch(6)])})[0]
    assert children.tokens[0] == 0 and len(set(children.tokens)) == 8 and set(children.scores) == {0.0}


def test_tokens_beyond_either_vocabulary(draft: TreeDraft) -> None:
    _, tree = draft.parts(vocab_size=20)
    join_all(tree, numbered(PARAMS[1], BATCH))
    (children,) = tree.expand({0: Asked([5, VOCAB_SIZE + 9], [Branch(VOCAB_SIZE + 9)])})[0]
    assert len(children.tokens) == 8 and max(children.tokens) < 20


class DamagedDecoder(Decoder):
    """Its last layer makes NaN of the last node but one."""

    def attend(
        self, index: int, weights: Weights, qkv: torch.Tensor, rows: PassRows, cache: LayerCache
    ) -> torch.Tensor:
        mixed = super().attend(index, weights, qkv, rows, cache)
        if index + 1 == self.config.num_layers and rows.query.ancestors is not None:
            mixed = mixed.clone()
            mixed[-2] = float("nan")
        return mixed


def test_nodes_with_nan_have_no_children(draft: TreeDraft) -> None:
    _, tree = decoded_by(draft, DamagedDecoder(draft.runner.decoder.config, shared_weights(draft))).parts()
    text = random_tokens(12, seed=4)
    chosen = Growing(text, 4).choose(5, tree.num_slots)
    said = tree.expand({0: Asked(text, list(chosen.values()))})[0]
    assert [len(children.tokens) for children in said] == [8, 8, 8, 0, 8]
    check(draft, text, [path for n, path in enumerate(chosen) if n != 3], [*said[:3], said[4]], SamplingParams(), 0)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_warming_up_leaves_nothing(draft: TreeDraft, params: SamplingParams) -> None:
    _, tree = draft.parts(fixed_shapes=True)
    tree.warm_up()
    join_all(tree, numbered(params, BATCH))
    assert draft.runner.cache.length(0) == 0
    text = [0, 0, 0, 7]
    check(draft, text, [()], tree.expand({0: Asked(text, [Branch(7)])})[0], params, 0)


def spines(draft: TreeDraft, tree: DraftTree, params: SamplingParams) -> list[Children]:
    """What is said behind the roots of two texts and down their best children, then behind a worse child half-way down
    and on from there: every answer is as it should be."""
    texts = {0: random_tokens(250, seed=1), 2: random_tokens(9, seed=2)}
    first = tree.expand({s: Asked(text, [Branch(text[-1])], range(5)) for s, text in texts.items()})
    worse = {s: first[s][2].tokens[-1] for s in texts}
    second = tree.expand({s: Asked(text, [Branch(worse[s], (0, 1, 7))], (8, 9, 10)) for s, text in texts.items()})
    for s, text in texts.items():
        best = [children.tokens[0] for children in first[s]]
        check(draft, text, [tuple(best[:count]) for count in range(6)], first[s], params, s)
        behind = [*best[:2], worse[s], *(children.tokens[0] for children in second[s])]
        check(draft, text, [tuple(behind[:count]) for count in range(3, 7)], second[s], params, s)
    return [children for said in (first, second) for s in texts for children in said[s]]


@pytest.mark.few(1)
@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_nodes_of_a_spine_are_answered_as_plain_sequences(
    draft: TreeDraft, params: SamplingParams, fixed_shapes: bool
) -> None:
    _, tree = draft.parts(fixed_shapes=fixed_shapes)
    join_all(tree, numbered(params, BATCH))
    spines(draft, tree, params)


def assert_alike(some: Sequence[Children], others: Sequence[Children]) -> None:
    """The same tokens; their scores but for rounding."""
    for one, other in zip(some, others, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(torch.tensor(one.scores), torch.tensor(other.scores), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("params", "kept", "further"), [*((params, None, 0) for params in PARAMS), (PARAMS[1], (4, 64), 287)], ids=str
)
def test_replays_are_eager_steps(params: SamplingParams, kept: tuple[int, int] | None, further: int) -> None:
    """The same questions to a draft that captures its steps and to one that does not, often enough for replays; of one
    that keeps first and newest tokens, behind a text of which more is let go of on the way."""
    device = torch.device("cuda")
    answers = []
    for graphs in (True, False):
        draft = make_tree_draft(device=device, capacity_tokens=400, kept=kept)
        _, tree = draft.parts(graphs=graphs)
        if graphs:
            tree.warm_up()  # leaves nothing that an answer could depend on
        join_all(tree, numbered(params, BATCH))
        answers.append(list(_grow(tree, further)))
        cache = draft.runner.cache
        assert kept is None or (isinstance(cache, StreamingDraftCache) and cache.rope_shifts[2] > 0)
        if graphs:
            num_graphs = tree.graphs.num_graphs
            assert num_graphs > 0, "nothing was captured"
            join_all(tree, numbered(SamplingParams(temperature=0.3, seed=9), BATCH))
            answer = list(_grow(tree, further))
            assert params.filtered or tree.graphs.num_graphs == num_graphs, "of seed and temperature"
            join_all(tree, numbered(params, BATCH))
            again = list(_grow(tree, further))
            # Of what a text is rotated by nothing depends on other texts, unless some of it has been let go of.
            assert answer != again and (again == answers[0] or kept is not None)
            assert_alike(again, answers[0])
        draft.made.close()
    assert_alike(*answers)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [None, (4, 64)])
def test_all_steps_about_a_text_are_captured_at_load(kept: tuple[int, int] | None) -> None:
    """Behind a text that grows from one reach into the next, with prompts of other sequences read in between; the
    answers are those of a draft without graphs."""
    device, answers = torch.device("cuda"), []
    for graphs in (True, False):
        draft = make_tree_draft(device=device, capacity_tokens=2900, kept=kept)
        _, tree = draft.parts(graphs=graphs)
        tree.warm_up()
        join_all(tree, numbered(SamplingParams(temperature=0.6, seed=5), BATCH))
        num_graphs = tree.graphs.num_graphs
        assert (num_graphs > 0) == graphs
        texts = {sequence: Growing(random_tokens(995 + sequence, seed=sequence), 3) for sequence in range(BATCH)}
        said = list[Children]()
        for request in range(8):
            if not request:
                tree.texts.catch_up(2, random_tokens(40, seed=request))  # a prompt of another text
            chosen = {s: one.choose(4 + 5 * (request % 2), tree.num_slots) for s, one in texts.items()}
            asked = {s: Asked(texts[s].text, list(branches.values())) for s, branches in chosen.items()}
            for sequence, children in tree.expand(asked).items():
                said += children
                texts[sequence].answered(chosen[sequence])
            if request % 2:
                for sequence, one in texts.items():
                    tree.adopt(sequence, *one.go_on())
        assert len(texts[0].text) > 995 and tree.graphs.num_graphs == num_graphs
        answers.append(said)
        draft.made.close()
    for captured, eager in zip(*answers, strict=True):
        assert captured.tokens == eager.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_spines_of_replays_are_those_of_eager_steps(params: SamplingParams) -> None:
    device, answers = torch.device("cuda"), []
    for graphs in (True, False):
        draft = make_tree_draft(device=device)
        _, tree = draft.parts(graphs=graphs)
        tree.warm_up()
        join_all(tree, numbered(params, BATCH))
        answers.append(spines(draft, tree, params))
        draft.made.close()
    assert_alike(*answers)


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
