"""The proposer of trees: the tokens stay those of plain decoding, and what was drafted ahead is not drafted again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import pytest
import torch

from offload_runtime.config import SamplingParams
from offload_runtime.runners import Asked, Children, ModelRunner
from offload_runtime.speculation import (
    NoProposer,
    Proposal,
    Proposer,
    Round,
    SpeculativeDecoder,
    StepWorth,
    TreeDraftProposer,
    Turn,
    play_round,
)
from offload_runtime.speculation.rounds import Watch
from tests.helpers.assembly import make_runner
from tests.helpers.engine import one_thread, raising  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.tree_drafts import BATCH, TreeDraft, make_tree_draft, path_of, scores_by_the_book

CONTEXT = 200
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, seed=5),
    SamplingParams(temperature=1.0, seed=6),
    SamplingParams(temperature=1.0, top_p=0.8, seed=7),
    SamplingParams(temperature=0.8, top_k=4, seed=8),
]


def noisy(seed: int, noise: float) -> torch.nn.Module:
    """The target's model with some noise on its weights."""
    model = random_model("llama-gqa", seed=7)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    made = make_runner(random_model("llama-gqa", seed=7), tmp_path_factory.mktemp("target"), capacity_tokens=CONTEXT)
    yield made.runner
    made.close()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeDraft]:
    """One that is right about two times in three."""
    made = make_tree_draft(tmp_path_factory.mktemp("draft"), hf_model=noisy(1, 0.08), capacity_tokens=CONTEXT)
    yield made
    made.made.close()


@pytest.fixture(scope="module")
def short_draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeDraft]:
    made = make_tree_draft(tmp_path_factory.mktemp("short"), hf_model=noisy(1, 0.08), capacity_tokens=48)
    yield made
    made.made.close()


def steps(count: int) -> Watch:
    """A pass that is still running as often as it is asked `count` times."""

    def watch(logits: torch.Tensor) -> Callable[[], bool]:
        left = iter([True] * count)
        return lambda: next(left, False)

    return watch


def decode(
    target: ModelRunner, proposer: Proposer, params: SamplingParams, prompts: Sequence[Sequence[int]], *, gamma: int,
    tree_nodes: int | None, count: int, watch: Watch | None = None,
) -> tuple[list[list[int]], list[list[Round]]]:  # fmt: skip
    """`count` new tokens of every prompt, and the rounds that gave them."""
    watch = watch or steps(0)
    proposer.start(params, len(prompts))
    texts, rounds = [], [list[Round]() for _ in prompts]
    for sequence, prompt in enumerate(prompts):
        target.cache.truncate(sequence, 0)
        decoder = SpeculativeDecoder(target, proposer, params, sequence=sequence)
        texts.append([*prompt, decoder.first_token(target.prefill(sequence, prompt))])
        proposer.prepare(sequence, prompt)
    while True:
        turns = [
            Turn(sequence, text, min(gamma, missing - 1), tree_nodes)
            for sequence, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
            if (missing := len(prompt) + count - len(text)) > 0
        ]
        if not turns:
            return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)], rounds
        for turn, played in zip(turns, play_round(target, params, proposer, turns, watch=watch), strict=True):
            texts[turn.sequence] += played.tokens
            rounds[turn.sequence].append(played)


Plain = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def plain_texts(target: ModelRunner) -> Plain:
    """What plain decoding says to prompts, once for all tests: of params, prompts and how many tokens."""

    @cache
    def said(params: SamplingParams, prompts: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
        return decode(target, NoProposer(), params, prompts, gamma=0, tree_nodes=None, count=count)[0]

    return lambda params, prompts, count: said(params, tuple(map(tuple, prompts)), count)


def mean_accepted(rounds: Sequence[Sequence[Round]]) -> float:
    played = [one for of_sequence in rounds for one in of_sequence]
    return sum(one.num_accepted for one in played) / len(played)


@pytest.mark.parametrize(
    ("tree_nodes", "ahead", "params"),
    [
        *((7, 9, params) for params in PARAMS),
        (1, 0, PARAMS[2]), (2, 1, PARAMS[0]), (2, 1, PARAMS[3]), (24, 2, PARAMS[0]), (24, 2, PARAMS[1]),
        (24, 2, PARAMS[4]), (64, 0, PARAMS[2]), (64, 0, PARAMS[3]), (None, 3, PARAMS[1]), (None, 3, PARAMS[4]),
    ],
    ids=str,
)  # fmt: skip
def test_the_tokens_are_those_of_plain_decoding(
    target: ModelRunner,
    plain_texts: Plain,
    draft: TreeDraft,
    params: SamplingParams,
    tree_nodes: int | None,
    ahead: int,
) -> None:
    """One text and three of other lengths, which accept other numbers and end at other times."""
    for prompts in ([random_tokens(21, seed=1)], [random_tokens(length, seed=length) for length in (30, 1, 77)]):
        plain = plain_texts(params, prompts, 20)
        proposer = draft.proposer(params, num_sequences=len(prompts), ngrams=len(prompts) > 1)
        said, rounds = decode(
            target, proposer, params, prompts, gamma=5, tree_nodes=tree_nodes, count=20, watch=steps(ahead)
        )
        assert said == plain
        accepted = {one.num_accepted for of_sequence in rounds for one in of_sequence}
        assert len(accepted) > 1, "some are rejected, some accepted"
        if tree_nodes and tree_nodes > 5:
            assert any(not one.proposal.is_chain for one in rounds[0])


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_first_path_is_the_chain(target: ModelRunner, draft: TreeDraft, params: SamplingParams) -> None:
    text = random_tokens(33, seed=3)
    chains, _ = draft.parts()
    chains.start(params)
    chain = list(chains.propose([Turn(0, text, 4)])[0].tokens)
    proposer = draft.proposer(params)
    proposal = proposer.propose([Turn(0, text, 4, 200)])[0]
    assert len(proposal) == 200
    # Of every node the likeliest child was proposed first.
    path, last = [], -1
    while last in proposal.parents:
        last = proposal.parents.index(last)
        path.append(proposal.tokens[last])
    assert path == chain
    # And without a tree it is the chain itself, by the chain's own steps.
    assert draft.proposer(params).propose([Turn(0, text, 4)])[0] == Proposal.chain(chain, "draft")


@pytest.mark.parametrize("params", PARAMS[:3], ids=str)
def test_a_tree_accepts_more_than_a_chain_of_its_depth(
    target: ModelRunner, draft: TreeDraft, params: SamplingParams
) -> None:
    prompts = [random_tokens(20, seed=seed) for seed in range(BATCH)]
    means = []
    for tree_nodes in (None, 8, 32):
        proposer = draft.proposer(params, num_sequences=BATCH)
        means.append(
            mean_accepted(decode(target, proposer, params, prompts, gamma=4, tree_nodes=tree_nodes, count=60)[1])
        )
    assert means == sorted(means) and means[2] > means[0]


def test_running_ahead_costs_no_acceptance(target: ModelRunner, draft: TreeDraft) -> None:
    """A window is filled with what is most probable, wherever the tree stood before."""
    params, prompts = PARAMS[1], [random_tokens(20, seed=seed) for seed in range(BATCH)]
    means = [
        mean_accepted(decode(
            target, draft.proposer(params, num_sequences=BATCH), params, prompts, gamma=4, tree_nodes=16, count=40,
            watch=steps(ahead),
        )[1]) for ahead in (0, 20)
    ]  # fmt: skip
    assert means[1] >= 0.9 * means[0]


class SureModel:
    """A tree model that says `script` first of all, whatever the path; counts its steps."""

    capacity_tokens, num_slots = 1000, 40

    def __init__(self, script: Sequence[int], *, unready: int = 0) -> None:
        self._script, self.steps, self._unready = list(script), 0, unready
        self.made_ready: list[tuple[list[int], int]] = []
        self._texts: dict[int, list[int]] = {}

    def width(self, num_sequences: int) -> int:
        return 8

    def start(self, params: SamplingParams) -> None:
        pass

    def holds(self, sequence: int, tokens: Sequence[int]) -> bool:
        return self._texts.get(sequence) == list(tokens)

    def adopt(self, sequence: int, tokens: Sequence[int], slots: Sequence[int]) -> None:
        self._texts[sequence] = [*self._texts[sequence], *tokens]

    def get_ready(self, lengths: Sequence[int], further: int) -> bool:
        self.made_ready.append((list(lengths), further))
        return len(self.made_ready) <= self._unready

    def expand(self, asked: Mapping[int, Asked]) -> dict[int, list[Children]]:
        self.steps += 1
        said = {}
        for sequence, one in asked.items():
            self._texts[sequence] = list(one.text)
            assert all(slot < self.num_slots for branch in one.branches for slot in branch.slots)
            places = [len(one.text) + len(branch.slots) for branch in one.branches]
            said[sequence] = [Children([self._script[place], 90, 91], [3.0, 0.0, 0.0]) for place in places]
        return said


def sure_proposer(model: SureModel) -> TreeDraftProposer:
    proposer = TreeDraftProposer(NoProposer(), model, device=torch.device("cpu"), ngrams=None)
    proposer.start(PARAMS[0])
    return proposer


def test_steps_are_made_ready_behind_passes_alone() -> None:
    script = random_tokens(200, seed=9)
    model = SureModel(script, unready=3)
    proposer = sure_proposer(model)
    proposer.prepare(0, script[:9])
    proposer.ahead(steps(0)(torch.empty(0)))
    assert model.made_ready == [], "no pass is running"
    proposer.ahead(steps(2)(torch.empty(0)))
    assert model.made_ready == [([10], 0)] * 2, "for as long as it runs"
    proposer.propose([Turn(0, script[:10], 4, 4)])
    assert model.steps == 4 and len(model.made_ready) == 2
    proposer.ahead(steps(3)(torch.empty(0)))
    assert model.made_ready[2:] == [([11], 4)] * 2, "until nothing is left to be made ready"
    assert model.steps == 6, "and then past the window"
    proposer.propose([Turn(0, script[:11], 4)])
    proposer.ahead(steps(5)(torch.empty(0)))
    assert len(model.made_ready) == 4 and model.steps == 6, "not for a chain"


def test_steps_are_made_ready_for_a_batch_when_all_of_it_has_been_read() -> None:
    model = SureModel(random_tokens(200, seed=9), unready=9)
    proposer = TreeDraftProposer(NoProposer(), model, device=torch.device("cpu"), ngrams=None)
    proposer.start(PARAMS[0], 3)
    for sequence, length in enumerate((9, 30, 4)):
        proposer.prepare(sequence, random_tokens(length, seed=sequence))
        proposer.ahead(steps(2)(torch.empty(0)))
    assert model.made_ready == [([10, 31, 5], 0)] * 2
    proposer.prepare(0, [])  # cut off before anything was proposed
    proposer.start(PARAMS[0], 1)
    proposer.ahead(steps(2)(torch.empty(0)))
    assert len(model.made_ready) == 2, "of the generation before nothing is left"
    proposer.prepare(0, random_tokens(7, seed=1))
    proposer.ahead(steps(1)(torch.empty(0)))
    assert model.made_ready[2:] == [([8], 0)]


def test_with_full_agreement_nothing_is_left_to_draft(target: ModelRunner) -> None:
    script = random_tokens(200, seed=9)
    model = SureModel(script)
    proposer, length = sure_proposer(model), 10
    for turn in range(6):
        before = model.steps
        proposal = proposer.propose([Turn(0, script[:length], 4, 4)])[0]
        assert list(proposal.tokens) == script[length : length + 4] and proposal.is_chain
        assert model.steps - before == (4 if turn == 0 else 0)
        proposer.ahead(steps(50)(torch.empty(0)))
        length += 5  # all four, and the target's own
    # Half of it: what was drafted past the rejection is gone, and one step says what follows.
    before = model.steps
    proposer.propose([Turn(0, script[:length], 4, 4)])
    text = [*script[: length + 2], 3]
    assert list(proposer.propose([Turn(0, text, 4, 4)])[0].tokens) == script[length + 3 : length + 7]
    assert model.steps - before == 4


def test_running_ahead_ends_with_the_pass_and_with_its_slots() -> None:
    script = random_tokens(200, seed=10)
    model = SureModel(script)
    proposer = sure_proposer(model)
    proposer.ahead(lambda: True)  # nothing has been proposed
    assert model.steps == 0
    proposer.propose([Turn(0, script[:10], 4, 4)])
    before, asked = model.steps, 0

    def pending() -> bool:
        nonlocal asked
        asked += 1
        assert model.steps == before + asked - 1, "asked between any two steps"
        return asked <= 3

    proposer.ahead(pending)
    assert (asked, model.steps) == (4, before + 3)
    proposer.ahead(lambda: True)  # and comes to an end by itself
    assert model.steps <= before + SureModel.num_slots


def test_a_rejected_window_leaves_the_other_branch(target: ModelRunner) -> None:
    """The second child comes true: it was expanded ahead, and its window needs fewer steps."""
    script = random_tokens(200, seed=11)
    model = SureModel(script)
    proposer = sure_proposer(model)
    proposer._probabilities.sharpness = 0.02  # nothing is sure
    proposer.propose([Turn(0, script[:10], 2, 12)])
    proposer.ahead(steps(1)(torch.empty(0)))
    before = model.steps
    proposal = proposer.propose([Turn(0, [*script[:10], 90], 1, 3)])[0]
    assert set(proposal.tokens) == {script[11], 90, 91} and model.steps == before


@pytest.mark.parametrize("ahead", [0, 3, 30])
def test_whatever_came_before_nodes_are_scored_by_their_own_text(
    target: ModelRunner, draft: TreeDraft, ahead: int
) -> None:
    """Re-rooted trees, moved keys, slots that are taken again: what is known of a node is what the book says."""
    params, prompts = PARAMS[1], [random_tokens(length, seed=length) for length in (40, 9)]
    proposer, checked, kept = draft.proposer(params, num_sequences=2), 0, 0

    def watch(logits: torch.Tensor) -> Callable[[], bool]:
        nonlocal checked, kept
        for sequence, one in proposer._grown.items():
            kept += len(one.tree) > 24
            for node in list(one.children)[:: max(1, len(one.children) // 4)]:
                path = path_of(one.tree, node)
                expected = scores_by_the_book(draft, [*one.text, *path], params, sequence=sequence)
                said = one.children[node]
                assert expected[said.tokens].tolist() == pytest.approx(said.scores, abs=5e-3)
                assert expected.topk(8).values.tolist() == pytest.approx(said.scores, abs=5e-3)
                checked += 1
        return steps(ahead)(logits)

    decode(target, proposer, params, prompts, gamma=4, tree_nodes=12, count=30, watch=watch)
    assert checked > 40 and kept > 0


@pytest.mark.parametrize("ahead", [0, 5])
def test_a_draft_that_is_always_wrong_costs_nothing_but_time(
    target: ModelRunner, plain_texts: Plain, ahead: int
) -> None:
    params, prompts = PARAMS[2], [random_tokens(21, seed=1)]
    plain = plain_texts(params, prompts, 20)
    # Nodes say 90 and 91 besides.
    wrong = [next(token for token in range(VOCAB_SIZE) if token not in (said, 90, 91)) for said in plain[0]]
    proposer = sure_proposer(SureModel([*prompts[0], *wrong, *wrong]))
    said, rounds = decode(target, proposer, params, prompts, gamma=4, tree_nodes=9, count=20, watch=steps(ahead))
    assert said == plain and 90 not in plain[0] and 91 not in plain[0]
    assert all(one.num_accepted == 0 for one in rounds[0]) and rounds[0][0].num_proposed == 9


def test_close_to_the_end_of_the_drafts_context(
    target: ModelRunner, plain_texts: Plain, short_draft: TreeDraft
) -> None:
    for params in PARAMS[:3]:
        prompts = [random_tokens(40, seed=12)]
        plain = plain_texts(params, prompts, 30)
        proposer = short_draft.proposer(params)
        said, rounds = decode(
            target, proposer, params, prompts, gamma=6, tree_nodes=20, count=30, watch=steps(9)
        )  # fmt: skip
        assert said == plain
        length = 41
        for one in rounds[0]:
            deepest = max(one.proposal.depths, default=0)
            assert deepest <= max(0, 48 - length + int(length <= 48)), f"behind {length} tokens"
            length += len(one.tokens)
        assert rounds[0][0].num_proposed == 20


def test_to_the_end_of_the_targets_context(target: ModelRunner, plain_texts: Plain, draft: TreeDraft) -> None:
    prompts, params = [random_tokens(CONTEXT - 25, seed=13)], PARAMS[1]
    plain = plain_texts(params, prompts, 25)
    said, _ = decode(
        target, draft.proposer(params), params, prompts, gamma=6, tree_nodes=20, count=25, watch=steps(9)
    )  # fmt: skip
    assert said == plain


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("after", range(0, 48, 7))
def test_an_interruption_anywhere_changes_no_token(
    target: ModelRunner,
    plain_texts: Plain,
    draft: TreeDraft,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    after: int,
) -> None:
    """Before a pass of the draft, of a window or ahead of it; then the same round is played again."""
    params, prompt = PARAMS[1], random_tokens(21, seed=1)
    plain = plain_texts(params, [prompt], 26)
    proposer = draft.proposer(params)
    honest = draft.runner.streamer.layers
    calls = raising(error, after=after, then=honest)
    monkeypatch.setattr(draft.runner.streamer, "layers", calls)
    target.cache.truncate(0, 0)
    decoder = SpeculativeDecoder(target, proposer, params, watch=steps(3))
    text, failed = [*prompt, decoder.first_token(target.prefill(0, prompt))], 0
    while len(text) < 47:
        try:
            text += decoder.round(text, 4, 12).tokens
        except type(error):
            assert not proposer._grown, "a tree that may be half made is not trusted"
            failed += 1
    assert failed == 1 and text[21:47] == plain[0]


def test_a_pass_that_is_over_when_it_returns_is_not_waited_for(target: ModelRunner, draft: TreeDraft) -> None:
    """On the CPU nothing is drafted ahead unless somebody says that the pass is still running."""
    params, prompts = PARAMS[0], [random_tokens(21, seed=1)]
    proposer, asked = draft.proposer(params), []
    honest = proposer.ahead

    def ahead(pending: Callable[[], bool]) -> None:
        asked.append(pending())
        honest(pending)

    proposer.ahead = ahead  # type: ignore[method-assign]
    decoder = SpeculativeDecoder(target, proposer, params)
    target.cache.truncate(0, 0)
    text = [*prompts[0], decoder.first_token(target.prefill(0, prompts[0]))]
    decoder.round(text, 4, 8)
    assert asked == [False]


def test_ngrams_join_the_tree(target: ModelRunner, draft: TreeDraft) -> None:
    text = [*random_tokens(12, seed=14), 50, 51, 52, 53, 54, 55, *random_tokens(9, seed=15), 50, 51, 52]
    proposer = draft.proposer(PARAMS[1], ngrams=True)
    proposal = proposer.propose([Turn(0, text, 3, 30)])[0]
    path = [n for n, source in enumerate(proposal.sources) if source == "ngram"]
    assert [proposal.tokens[node] for node in path[:3]] == [53, 54, 55] and "draft" in proposal.sources
    lone = draft.proposer(PARAMS[1]).propose([Turn(0, text, 3, 30)])[0]
    assert set(lone.sources) == {"draft"}
    # Those that never come true are soon not worth a place.
    for turn in range(60):
        text = [*text, 70 + turn % 7, 80 + turn % 5, 50, 51, 52]
        assert len(proposer.propose([Turn(0, text, 3, 4)])[0]) == 4
    assert proposer._hits.rate < 0.1


@pytest.mark.parametrize("ngram_rate", [0.2, 0.6])
def test_a_window_holds_the_most_probable_candidates(draft: TreeDraft, ngram_rate: float) -> None:
    """Where n-grams and draft say the same, too: nothing that waits to be expanded could give a better one."""
    both, full, proposer = 0, 0, draft.proposer(PARAMS[1], num_sequences=2, ngrams=True)
    for seed in range(30):
        proposer._hits.rate = ngram_rate
        said = proposer.propose([Turn(1, random_tokens(20, seed=seed), 8)])[0].tokens
        text = [*random_tokens(20, seed=seed), *said, 3, *random_tokens(20, seed=seed), *said[: seed % 5]]
        proposal = proposer.propose([Turn(0, text, 4, 10)])[0]
        tree = proposer._grown[0].tree
        nodes, waiting = tree.best(10, 4)[1], tree.next_to_expand(1, 3)
        assert 4 <= len(proposal) == len(nodes) <= 10
        assert not waiting or tree.log_probability(waiting[0]) <= tree.log_probability(nodes[-1])
        both += {"ngram", "draft"} <= set(proposal.sources)
        full += len(proposal) == 10
    assert both > 15 and full > 15


def test_all_that_the_target_says_is_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    script = random_tokens(200, seed=18)
    proposer, told = sure_proposer(SureModel(script)), list[int | None]()
    monkeypatch.setattr(proposer._probabilities, "observe", lambda scores, said: told.append(said))
    proposer.propose([Turn(0, script[:10], 4, 8)])
    proposer.propose([Turn(0, [*script[:13], 90], 4, 8)])  # three of the first children, then a second one
    assert told == [0, 0, 0, 1]
    proposer.propose([Turn(0, [*script[:13], 90, 5], 4, 8)])  # and one that nobody thought of
    assert told == [0, 0, 0, 1, None]
    proposer.start(PARAMS[0])
    proposer.propose([Turn(0, script[:40], 4, 8)])  # somebody else's text teaches nothing
    assert len(told) == 5


class Demanding(StepWorth):
    """One to which a step is worth its time from some gain on; keeps what it was asked."""

    def __init__(self, least_gain: float) -> None:
        super().__init__()
        self._least_gain, self.gains = least_gain, list[float]()

    def pays(self, gain: float) -> bool:
        self.gains.append(gain)
        return gain >= self._least_gain


def demanding(model: SureModel, least_gain: float) -> tuple[TreeDraftProposer, Demanding]:
    worth = Demanding(least_gain)
    proposer = TreeDraftProposer(NoProposer(), model, device=torch.device("cpu"), ngrams=None, worth=worth)
    proposer.start(PARAMS[0])
    return proposer, worth


def test_a_thrifty_turn_takes_the_steps_that_pay() -> None:
    script = random_tokens(200, seed=19)
    sizes = []
    for least_gain in (0.0, 0.8, 2.0):
        model = SureModel(script)
        proposer, worth = demanding(model, least_gain)
        sizes.append(len(proposer.propose([Turn(0, script[:10], 8, 30, thrifty=True)])[0]))
        assert worth.gains and model.steps == 1 + sum(gain >= least_gain for gain in worth.gains)
    assert sizes[0] == 30 > sizes[1] > sizes[2] == 3, "a first step is taken in any case"
    proposer, worth = demanding(SureModel(script), 2.0)
    assert len(proposer.propose([Turn(0, script[:10], 8, 30)])[0]) == 30 and not worth.gains, "what was asked for"


def test_what_a_smaller_window_held_does_not_end_a_larger_one() -> None:
    """Only the likeliest nodes are expanded at first; that they do not pay says nothing about all that there are."""
    script = random_tokens(200, seed=20)
    proposer, worth = demanding(SureModel(script), 0.7)
    proposer.propose([Turn(0, script[:10], 8, 1, thrifty=True)])  # a bar that few nodes reach
    proposer.propose([Turn(0, script[:40], 8, 30, thrifty=True)])
    refused = [gain for gain in worth.gains if gain < 0.7]
    assert len(refused) > 1 and worth.gains[-1] == refused[-1]
    later = worth.gains[worth.gains.index(refused[0]) :]
    assert any(gain >= 0.7 for gain in later), "more nodes at once were worth a step"


def test_chains_between_trees_are_not_held_against_them() -> None:
    script = random_tokens(200, seed=21)
    now_s = 0.0
    worth = StepWorth(clock=lambda: now_s)
    proposer = TreeDraftProposer(
        NoProposer(), SureModel(script), device=torch.device("cpu"), ngrams=None, worth=worth
    )  # fmt: skip
    proposer.start(PARAMS[0])
    for turn, nodes in enumerate([8, 8, 8, None, None, None, 8, 8]):
        proposer.propose([Turn(0, script[: 10 + 5 * turn], 4, nodes, thrifty=True)])
        if turn > 1:
            assert worth.tok_per_s == pytest.approx(5 / 0.2)
        now_s += 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_on_a_stream_of_its_own_beside_a_pass(tmp_path_factory: pytest.TempPathFactory, params: SamplingParams) -> None:
    """Streamed weights keep the pass running while trees grow; the tokens are those of plain decoding, bit for bit."""
    device = torch.device("cuda")
    made = make_runner(
        random_model("llama-gqa", seed=7), tmp_path_factory.mktemp("gpu-target"), slots=2, capacity_tokens=CONTEXT,
        device=device,
    )  # fmt: skip
    draft = make_tree_draft(
        tmp_path_factory.mktemp("gpu-draft"), hf_model=noisy(1, 0.08), capacity_tokens=CONTEXT, device=device
    )
    prompts = [random_tokens(length, seed=length) for length in (30, 1, 77)]
    plain, _ = decode(made.runner, NoProposer(), params, prompts, gamma=0, tree_nodes=None, count=60)
    hogs = list[torch.Tensor]()

    def beside(logits: torch.Tensor) -> Callable[[], bool]:
        # A pass of a toy is over before a step begins: keep its stream busy for some milliseconds.
        torch.cuda._sleep(20_000_000)
        hogs.append(logits)
        done = torch.cuda.Event()
        done.record()
        return lambda: not done.query()

    proposer = draft.proposer(params, num_sequences=BATCH)
    said, rounds = decode(
        made.runner, proposer, params, prompts, gamma=5, tree_nodes=24, count=60, watch=beside
    )  # fmt: skip
    assert said == plain and mean_accepted(rounds) > 0 and hogs
    draft.made.close()
    made.close()


def test_chains_and_trees_may_take_turns(target: ModelRunner, plain_texts: Plain, draft: TreeDraft) -> None:
    params, prompt = PARAMS[2], random_tokens(21, seed=1)
    plain = plain_texts(params, [prompt], 40)
    proposer = draft.proposer(params)
    target.cache.truncate(0, 0)
    decoder = SpeculativeDecoder(target, proposer, params, watch=steps(2))
    text, turn = [*prompt, decoder.first_token(target.prefill(0, prompt))], 0
    while len(text) < 61:
        text += decoder.round(text, 4, (None, 9, 9)[turn % 3]).tokens
        turn += 1
    assert text[21:61] == plain[0]
