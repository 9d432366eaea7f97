"""The proposer of trees: the tokens stay those of plain decoding, and what was drafted ahead is not drafted again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from offload_runtime.copy.schedule import LayerStreamer
from offload_runtime.params import SamplingParams
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import DraftRequest, Proposal, Proposer, StepResult
from offload_runtime.speculation.calibration import MatchRates
from offload_runtime.speculation.step import Watch
from tests.helpers.assembly import make_runner
from tests.helpers.engine import one_thread, raising  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.sampling import Decoder, join_all, numbered, run_step
from tests.helpers.scripted_trees import SureModel, steps, sure_proposer
from tests.helpers.tree_drafts import BATCH, TreeDraft, make_tree_draft, path_of, scores_by_the_book
from tests.helpers.trees import Watched

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
def target() -> Iterator[ModelRunner]:
    made = make_runner(random_model("llama-gqa", seed=7), capacity_tokens=CONTEXT)
    yield made.runner
    made.close()


@pytest.fixture(scope="module")
def draft() -> Iterator[TreeDraft]:
    """One that is right about two times in three."""
    made = make_tree_draft(hf_model=noisy(1, 0.08), capacity_tokens=CONTEXT)
    yield made
    made.made.close()


@pytest.fixture(scope="module")
def short_draft() -> Iterator[TreeDraft]:
    made = make_tree_draft(hf_model=noisy(1, 0.08), capacity_tokens=48)
    yield made
    made.made.close()


def decode(
    target: ModelRunner, proposer: Proposer, params: SamplingParams, prompts: Sequence[Sequence[int]], *, gamma: int,
    tree_nodes: int | None, count: int, watch: Watch | None = None,
) -> tuple[list[list[int]], list[list[StepResult]]]:  # fmt: skip
    """`count` new tokens of every prompt, and the rounds that gave them."""
    watch = watch or steps(0)
    join_all(proposer, numbered(params, len(prompts)))
    texts, rounds = [], [list[StepResult]() for _ in prompts]
    for sequence, prompt in enumerate(prompts):
        target.cache.truncate(sequence, 0)
        decoder = Decoder(target, proposer, params, slot=sequence)
        texts.append([*prompt, decoder.first_token(target.prefill(sequence, prompt))])
        proposer.prepare(sequence, prompt)
    while True:
        requests = [
            DraftRequest(sequence, text, min(gamma, missing - 1), tree_nodes)
            for sequence, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
            if (missing := len(prompt) + count - len(text)) > 0
        ]
        if not requests:
            return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)], rounds
        for request, played in zip(requests, run_step(target, params, proposer, requests, watch=watch), strict=True):
            texts[request.slot] += played.tokens
            rounds[request.slot].append(played)


Plain = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def plain_texts(target: ModelRunner) -> Plain:
    """What plain decoding says to prompts, once for all tests: of params, prompts and how many tokens."""

    @cache
    def said(params: SamplingParams, prompts: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
        return decode(target, Proposer(), params, prompts, gamma=0, tree_nodes=None, count=count)[0]

    return lambda params, prompts, count: said(params, tuple(map(tuple, prompts)), count)


def mean_accepted(rounds: Sequence[Sequence[StepResult]]) -> float:
    played = [one for of_sequence in rounds for one in of_sequence]
    return sum(len(one.path) for one in played) / len(played)


@pytest.mark.few(1)
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
        plain = plain_texts(params, prompts, 14)
        proposer = draft.proposer(params, num_sequences=len(prompts), ngrams=len(prompts) > 1)
        said, rounds = decode(
            target, proposer, params, prompts, gamma=5, tree_nodes=tree_nodes, count=14, watch=steps(ahead)
        )
        assert said == plain
        accepted = {len(one.path) for of_sequence in rounds for one in of_sequence}
        assert len(accepted) > 1, "some are rejected, some accepted"
        if tree_nodes and tree_nodes > 5:
            assert any(not one.proposal.is_chain for one in rounds[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_first_path_is_the_chain(target: ModelRunner, draft: TreeDraft, params: SamplingParams) -> None:
    text = random_tokens(33, seed=3)
    chains, _ = draft.parts()
    join_all(chains, numbered(params, BATCH))
    chain = list(chains.propose([DraftRequest(0, text, 4)])[0].tokens)
    proposer = draft.proposer(params)
    proposal = proposer.propose([DraftRequest(0, text, 4, 200)])[0]
    assert len(proposal) == 200
    # Of every node the likeliest child was proposed first.
    path, last = [], -1
    while last in proposal.parents:
        last = proposal.parents.index(last)
        path.append(proposal.tokens[last])
    assert path == chain
    # And without a tree it is the chain itself, by the chain's own steps.
    assert draft.proposer(params).propose([DraftRequest(0, text, 4)])[0] == Proposal.chain(chain, "draft")


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS[:3], ids=str)
def test_a_tree_accepts_more_than_a_chain_of_its_depth(
    target: ModelRunner, draft: TreeDraft, params: SamplingParams
) -> None:
    prompts = [random_tokens(20, seed=seed) for seed in range(BATCH)]
    means = []
    for tree_nodes in (None, 8, 32):
        proposer = draft.proposer(params, num_sequences=BATCH)
        means.append(
            mean_accepted(decode(target, proposer, params, prompts, gamma=4, tree_nodes=tree_nodes, count=40)[1])
        )
    assert means == sorted(means) and means[2] > means[0]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 3, 12])
def test_whatever_came_before_nodes_are_scored_by_their_own_text(
    target: ModelRunner, draft: TreeDraft, ahead: int
) -> None:
    """Re-rooted trees, moved keys, slots that are taken again: what is known of a node is what the book says."""
    params, prompts = PARAMS[1], [random_tokens(length, seed=length) for length in (40, 9)]
    proposer, checked, kept = draft.proposer(params, num_sequences=2), 0, 0

    def watch(logits: torch.Tensor) -> Callable[[], bool]:
        nonlocal checked, kept
        for sequence, one in proposer.trees.items():
            kept += len(one.tree.slots) > 8
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
    assert all(len(one.path) == 0 for one in rounds[0]) and len(rounds[0][0].proposal) == 9


@pytest.mark.slow
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
        assert len(rounds[0][0].proposal) == 20


@pytest.mark.slow
def test_to_the_end_of_the_targets_context(target: ModelRunner, plain_texts: Plain, draft: TreeDraft) -> None:
    prompts, params = [random_tokens(CONTEXT - 25, seed=13)], PARAMS[1]
    plain = plain_texts(params, prompts, 25)
    said, _ = decode(
        target, draft.proposer(params), params, prompts, gamma=6, tree_nodes=20, count=25, watch=steps(9)
    )  # fmt: skip
    assert said == plain


class Interrupted:
    """Weights of a draft, one of whose passes fails once, after so many that went through."""

    def __init__(self, weights: LayerStreamer, error: BaseException, *, after: int) -> None:
        self.num_streamed = weights.num_streamed
        self.layers = raising(error, after=after, then=weights.layers)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("after", range(0, 48, 7))
def test_an_interruption_anywhere_changes_no_token(
    target: ModelRunner,
    plain_texts: Plain,
    draft: TreeDraft,
    error: BaseException,
    after: int,
) -> None:
    """Before a pass of the draft, of a window or ahead of it; then the same round is played again."""
    params, prompt = PARAMS[1], random_tokens(21, seed=1)
    plain = plain_texts(params, [prompt], 26)
    runner = draft.runner
    weights = Interrupted(runner.streamer, error, after=after)
    interrupted = ModelRunner(runner.decoder, weights, runner.cache, runner.rows, runner.chunk_tokens)
    proposer = replace(draft, runner=interrupted).proposer(params)
    target.cache.truncate(0, 0)
    decoder = Decoder(target, proposer, params, watch=steps(3))
    text, failed = [*prompt, decoder.first_token(target.prefill(0, prompt))], 0
    while len(text) < 47:
        try:
            text += decoder.step(text, 4, 12).tokens
        except type(error):
            assert not proposer.trees, "a tree that may be half made is not trusted"
            failed += 1
    assert failed == 1 and text[21:47] == plain[0]


def test_a_pass_that_is_over_when_it_returns_is_not_waited_for(target: ModelRunner, draft: TreeDraft) -> None:
    """On the CPU nothing is drafted ahead unless somebody says that the pass is still running."""
    params, prompts = PARAMS[0], [random_tokens(21, seed=1)]
    asked = list[bool]()

    class Asking(Watched):
        def ahead(self, pending: Callable[[], bool]) -> None:
            asked.append(pending())
            super().ahead(pending)

    proposer = Asking(draft.proposer(params))
    decoder = Decoder(target, proposer, params)
    target.cache.truncate(0, 0)
    text = [*prompts[0], decoder.first_token(target.prefill(0, prompts[0]))]
    decoder.step(text, 4, 8)
    assert asked == [False]


@pytest.mark.slow
def test_ngrams_join_the_tree(target: ModelRunner, draft: TreeDraft) -> None:
    text = [*random_tokens(12, seed=14), 50, 51, 52, 53, 54, 55, *random_tokens(9, seed=15), 50, 51, 52]
    proposer = draft.proposer(PARAMS[1], ngrams=True)
    proposal = proposer.propose([DraftRequest(0, text, 3, 30)])[0]
    path = [n for n, source in enumerate(proposal.sources) if source == "ngram"]
    assert [proposal.tokens[node] for node in path[:3]] == [53, 54, 55] and "draft" in proposal.sources
    lone = draft.proposer(PARAMS[1]).propose([DraftRequest(0, text, 3, 30)])[0]
    assert set(lone.sources) == {"draft"}
    # Those that never come true are soon not worth much.
    assert proposer.ngrams is not None and proposer.ngrams.rates.rate(3) > 0.4
    for request in range(150):
        text = [*(text if len(text) < 180 else text[:30]), *random_tokens(2, seed=request), 50, 51, 52]
        assert len(proposer.propose([DraftRequest(0, text, 3, 4)])[0]) == 4
    assert proposer.ngrams.rates.rate(3) < 0.1


def test_ngrams_that_hardly_ever_come_true_do_not_join(draft: TreeDraft) -> None:
    text = [said for token in range(1, 40) for said in (token, 50)]
    proposer = draft.proposer(PARAMS[0], ngrams=True)
    proposer.propose([DraftRequest(0, text, 12, 400)])
    tree = proposer.trees[0].tree
    guessed = [tree.log_probability(number) for number, node in tree.nodes.items() if node.source == "ngram"]
    assert guessed and min(guessed) > math.log(0.9e-4)


class SteadyRates(MatchRates):
    """Matches of any length come true equally often."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._steady = math.log(rate), math.log1p(-rate)

    def logs(self, matched: int) -> tuple[float, float]:
        return self._steady


@pytest.mark.slow
@pytest.mark.parametrize("ngram_rate", [0.2, 0.6])
def test_a_window_holds_the_most_probable_candidates(draft: TreeDraft, ngram_rate: float) -> None:
    """Where n-grams and draft say the same, too: nothing that waits to be expanded could give a better one."""
    both, full, proposer = 0, 0, draft.proposer(PARAMS[1], num_sequences=2, ngrams=True)
    assert proposer.ngrams is not None
    proposer.ngrams.rates = SteadyRates(ngram_rate)
    for seed in range(30):
        said = proposer.propose([DraftRequest(1, random_tokens(20, seed=seed), 8)])[0].tokens
        text = [*random_tokens(20, seed=seed), *said, 3, *random_tokens(20, seed=seed), *said[: seed % 5]]
        proposal = proposer.propose([DraftRequest(0, text, 4, 10)])[0]
        tree = proposer.trees[0].tree
        nodes, waiting = tree.best(10, 4)[1], tree.next_to_expand(1, 3)
        assert 4 <= len(proposal) == len(nodes) <= 10
        assert not waiting or tree.log_probability(waiting[0]) <= tree.log_probability(nodes[-1])
        both += {"ngram", "draft"} <= set(proposal.sources)
        full += len(proposal) == 10
    assert both > 15 and full > 15


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_on_a_stream_of_its_own_beside_a_pass(params: SamplingParams) -> None:
    """Streamed weights keep the pass running while trees grow; the tokens are those of plain decoding, bit for bit."""
    device = torch.device("cuda")
    made = make_runner(
        random_model("llama-gqa", seed=7), slots=2, capacity_tokens=CONTEXT,
        device=device,
    )  # fmt: skip
    draft = make_tree_draft(hf_model=noisy(1, 0.08), capacity_tokens=CONTEXT, device=device)
    prompts = [random_tokens(length, seed=length) for length in (30, 1, 77)]
    plain, _ = decode(made.runner, Proposer(), params, prompts, gamma=0, tree_nodes=None, count=40)
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
        made.runner, proposer, params, prompts, gamma=5, tree_nodes=24, count=40, watch=beside
    )  # fmt: skip
    assert said == plain and mean_accepted(rounds) > 0 and hogs
    draft.made.close()
    made.close()


@pytest.mark.slow
def test_chains_and_trees_may_take_turns(target: ModelRunner, plain_texts: Plain, draft: TreeDraft) -> None:
    params, prompt = PARAMS[2], random_tokens(21, seed=1)
    plain = plain_texts(params, [prompt], 40)
    proposer = draft.proposer(params)
    target.cache.truncate(0, 0)
    decoder = Decoder(target, proposer, params, watch=steps(2))
    text, request = [*prompt, decoder.first_token(target.prefill(0, prompt))], 0
    while len(text) < 61:
        text += decoder.step(text, 4, (None, 9, 9)[request % 3]).tokens
        request += 1
    assert text[21:61] == plain[0]
