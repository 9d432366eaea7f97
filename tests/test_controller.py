"""Steps are chosen by what they bring and take: as good as the best fixed choice, and never much worse than none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_runtime.speculation import PLAIN, Choice, Controller
from offload_runtime.speculation.controller import AcceptanceModel, LatencyModel, guessed_cost
from tests.helpers.step_models import (
    WAY,
    ByProbability,
    Cost,
    InARow,
    Text,
    best_fixed,
    dear,
    play,
    resident,
    streamed,
)  # fmt: skip

LIMITS = {
    "n-grams": {"ngram": 256},
    "chains": {"ngram": 63, "chain": 63},
    "trees": {"ngram": 256, "chain": 63, "tree": 256},
}
# By how often the draft is right: what its trees bring, and in what share of the text n-grams have an idea.
TEXTS = {
    0.95: Text({"chain": InARow(0.95), "tree": ByProbability(1.6), "ngram": InARow(0.9)}, 0.3),
    0.8: Text({"chain": InARow(0.8), "tree": ByProbability(1.2), "ngram": InARow(0.9)}, 0.2),
    0.5: Text({"chain": InARow(0.5), "tree": ByProbability(0.6), "ngram": InARow(0.9)}, 0.1),
}
USELESS = Text({"chain": InARow(0.0), "tree": ByProbability(0.0), "ngram": InARow(0.0)}, 0.3)
SEEDS = range(8)


def controller_of(cost: Cost, known: str = "known") -> Controller:
    """What is foreseen: nothing but a guess, or the machine's figures, exactly or out of proportion."""
    modes = LIMITS["trees"]
    if known == "unknown":
        return Controller(modes, streamed=cost is streamed)
    return Controller(modes, lambda choice, *_: cost(choice) if known == "known" else cost(choice) ** 1.2)


@pytest.mark.few(1)
@pytest.mark.parametrize("known", ["unknown", "known", "wrong"])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("rate", TEXTS)
@pytest.mark.parametrize("cost", [resident, streamed])
def test_it_is_as_fast_as_the_best_fixed_choice(cost: Cost, rate: float, limits: str, known: str) -> None:
    """Within 5 % on average once 50 steps were played, with times that are 10 % off and some far too long."""
    text, whole, settled = TEXTS[rate], [], []
    for seed in SEEDS:
        run = play([(text, 300)], cost, LIMITS[limits], seed=seed, controller=controller_of(cost, known))
        best = [best_fixed(text, cost, LIMITS[limits], idea_share=mean(run.ideas[first:])) for first in (0, 50)]
        whole.append(run.speed() / best[0])
        settled.append(run.speed(50) / best[1])
    assert mean(whole) > 0.93 and mean(settled) > 0.95
    assert min(whole) > 0.65


@pytest.mark.few(2)
@pytest.mark.parametrize("known", ["unknown", "known", "wrong"])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("cost", [resident, streamed])
def test_a_useless_draft_costs_one_percent_at_most(cost: Cost, limits: str, known: str) -> None:
    for seed in SEEDS:
        run = play([(USELESS, 256)], cost, LIMITS[limits], seed=seed, controller=controller_of(cost, known))
        assert run.speed() > 0.99 / cost(PLAIN)
        assert run.share("chain", 64) + run.share("tree", 64) < (0.2 if cost is resident else 1)


@pytest.mark.slow
def test_a_draft_whose_smallest_window_is_dear_is_tried_at_once() -> None:
    """If its failure is affordable at all: the first window may lose what three would otherwise."""
    text = Text({"chain": InARow(0.94)})
    runs = [play([(text, 25)], dear, {"chain": 63}, seed=seed, controller=controller_of(dear)) for seed in range(40)]
    best = best_fixed(text, dear, {"chain": 63})
    assert mean(run.speed() for run in runs) > 0.8 * best > 2.5 / dear(PLAIN)
    for limits in LIMITS.values():
        useless = [play([(USELESS, 256)], dear, limits, seed=seed, controller=controller_of(dear)) for seed in SEEDS]
        speeds = [run.speed() * dear(PLAIN) for run in useless]
        assert mean(speeds) > 0.99 and min(speeds) > 0.98


def on_a_cpu(choice: Choice) -> float:
    """Seconds of a step with everything resident, where a draft's step is a third of a pass and every row costs."""
    steps = {"chain": choice.size, "tree": choice.size / 16 + 1}.get(choice.mode, 0)
    return 1 + 0.1 * choice.size + 0.35 * steps


@pytest.mark.few(1)
@pytest.mark.parametrize("known", ["unknown", "known"])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.9])
def test_a_draft_that_is_dear_on_a_cpu(rate: float, known: str) -> None:
    text = Text({"chain": InARow(rate), "tree": ByProbability(0.5 * rate), "ngram": InARow(0.0)}, 0.2)
    limits, speeds = LIMITS["trees"], []
    for seed in SEEDS:
        run = play([(text, 250)], on_a_cpu, limits, seed=seed, controller=controller_of(on_a_cpu, known), noise=0.05)
        speeds.append(run.speed() / best_fixed(text, on_a_cpu, limits))
    # What may be lost to proposals is bounded: two bad starts of what costs half a pass keep it off for a while.
    assert mean(speeds) > (0.94 if rate < 0.9 else 0.65)


@dataclass(frozen=True)
class Levels:
    """Each level of a tree right with the same probability, of one so large as many as `deepest`."""

    rate: float
    deepest: int

    def accepted(self, size: int) -> float:
        return sum(self.rate**depth for depth in range(1, self._depth(size) + 1))

    def draw(self, size: int, chance: random.Random) -> range:
        depth = self._depth(size)
        return range(next((level for level in range(depth) if chance.random() > self.rate), depth))

    def _depth(self, size: int) -> int:
        return min(self.deepest, size)


@pytest.mark.few(1)
@pytest.mark.parametrize(("first", "level"), [(0.94, 0.965), (0.84, 0.92), (0.71, 0.85)])
@pytest.mark.parametrize("tree_s", [0.30, 0.38])
def test_chains_and_trees_where_the_link_binds(first: float, level: float, tree_s: float) -> None:
    """Drafts whose first choice is right so often, and whose trees of up to 26 levels find more, for more time or none:
    whichever is the faster is played, on the whole."""

    def cost(choice: Choice) -> float:
        return tree_s if choice.mode == "tree" else 0.30 + 0.0002 * choice.size * (choice.mode == "chain")

    text = Text({"chain": InARow(first), "tree": Levels(level, 26), "ngram": InARow(0.3)}, 0.2)
    best, short, long = best_fixed(text, cost, LIMITS["trees"]), [], []
    for seed in range(20):
        run = play([(text, 200)], cost, LIMITS["trees"], seed=seed, controller=controller_of(cost), noise=0.03)
        short.append(run.speed(0, 40) / best)
        long.append(run.speed() / best)
    assert mean(short) > 0.83 and mean(long) > 0.94 and min(long) > 0.84


@pytest.mark.slow
def test_n_grams_are_looked_up_in_repetitive_text_only() -> None:
    """A pass with them costs a little: they are asked for where they come true."""

    def cost(choice: Choice) -> float:
        return 1 + 0.005 * choice.size

    prose, code = Text({"ngram": InARow(0.0)}, 1.0), Text({"ngram": InARow(0.9)}, 1.0)
    for seed in SEEDS:
        run = play([(prose, 300), (code, 300)], cost, {"ngram": 64}, seed=seed, controller=controller_of(cost))
        assert run.share("ngram", 0) > 0.3 and run.speed(0, 300) > 0.99
        assert run.speed(450) > 0.9 * best_fixed(code, cost, {"ngram": 64}, idea_share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("cost", [resident, streamed])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.3, 0.95), (0.95, 0.3), (0.0, 0.9)])
def test_another_text_is_followed(cost: Cost, before: float, after: float) -> None:
    texts = [Text({"chain": InARow(rate)}) for rate in (before, after)]
    limits = {"chain": 63}
    runs = [
        play([(texts[0], 250), (texts[1], 400)], cost, limits, seed=seed, controller=controller_of(cost))
        for seed in SEEDS
    ]
    best = [best_fixed(text, cost, limits) for text in texts]
    assert mean(run.speed(50, 250) for run in runs) > 0.95 * best[0]
    assert mean(run.speed(450) for run in runs) > 0.85 * best[1]
    if after == 0:
        assert all(run.speed(250) > 0.97 * best[1] for run in runs)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rates=st.tuples(*[st.floats(0, 1)] * 3), step=st.floats(0, 1), row=st.floats(0, 0.2), share=st.floats(0, 1),
    seed=st.integers(0, 1000), sure=st.booleans(),
)  # fmt: skip
def test_it_is_never_much_slower_than_plain_decoding(
    rates: tuple[float, float, float], step: float, row: float, share: float, seed: int, sure: bool
) -> None:
    """Whatever proposals cost and however seldom they are right."""

    def cost(choice: Choice) -> float:
        steps = {"chain": choice.size, "tree": choice.size / 16 + 1}.get(choice.mode, 0)
        return 1 + row * choice.size + step * steps

    text = Text({"chain": InARow(rates[0]), "tree": ByProbability(rates[1]), "ngram": InARow(rates[2])}, share)
    controller = controller_of(cost, "known" if sure else "unknown")
    run = play([(text, 400)], cost, LIMITS["trees"], seed=seed, controller=controller, noise=0.05)
    lost = sum(seconds for _, seconds, _ in run.rounds) - sum(run.said)
    # A size that nobody could foresee costs what it costs, and again until it is believed.
    dearest = max(seconds for _, seconds, _ in run.rounds)
    assert lost < 0.01 * 400 + (0 if sure else 3 * dearest) + 1


def test_plain_steps_are_played_where_nobody_has_an_idea() -> None:
    controller = Controller({"ngram": 16})
    for _ in range(5):
        assert controller.choose(WAY, {}) == PLAIN
        controller.observe(WAY, PLAIN, [], tokens=1, seconds=0.02)
    # And count as the time that others are held against.
    assert controller.choose(WAY, {"ngram": 16}).mode == "ngram"


def test_no_window_is_larger_than_its_limit() -> None:
    for largest, most in ((1, 1), (5, 4), (7, 6), (63, 48)):
        run = play([(TEXTS[0.95], 100)], streamed, {"chain": largest}, seed=1, controller=controller_of(streamed))
        assert max(choice.size for choice, *_ in run.rounds) == most


def test_acceptance_of_larger_windows_follows_from_smaller_ones() -> None:
    chain, tree = AcceptanceModel("chain"), AcceptanceModel("tree")
    for number in range(64):
        chain.observe(4, [range(4 if number % 2 else 0)])
        tree.observe(4, [[0, 1] if number % 2 else [0]])
    assert chain.curve()[4] == pytest.approx(2.0, rel=0.1) and chain.curve()[4] < chain.curve()[8] < 12
    assert tree.curve()[4] == pytest.approx(1.5, rel=0.1) and 1.5 < tree.curve()[12] < 3


def test_of_a_batch_the_mean_counts() -> None:
    chain = AcceptanceModel("chain")
    for _ in range(60):
        chain.observe(2, [[0, 1], [], [0], []])
    assert chain.curve()[1:3] == pytest.approx([0.5, 0.75], abs=0.03)


def test_times_are_as_foreseen_in_the_ratio_measured() -> None:
    latency = LatencyModel(lambda choice: 1 + choice.size / 8, sure=True)
    assert latency.seconds(Choice("chain", 8)) == 2.0
    for _ in range(16):
        latency.observe(PLAIN, 1.4)
    assert latency.seconds(Choice("tree", 8)) == pytest.approx(2.8) and latency.plain_s == pytest.approx(1.4)
    # The nearest size counts the most; what a larger one takes, a plain step never exceeds.
    latency.observe(Choice("chain", 16), 3.0)
    assert latency.seconds(Choice("chain", 24)) == pytest.approx(4.0, rel=0.1)
    latency.observe(Choice("chain", 1), 1.2)
    assert latency.plain_s == pytest.approx(1.2)


def test_an_exceptional_time_is_not_believed() -> None:
    latency, choice = LatencyModel(lambda choice: 1.0, sure=True), Choice("chain", 4)
    for _ in range(4):
        latency.observe(PLAIN, 1.0)
    latency.observe(choice, 50.0)
    assert latency.doubted == choice and latency.seconds(choice) == pytest.approx(1.0)
    latency.observe(choice, 1.2)
    assert latency.doubted is None and latency.seconds(choice) < 1.3
    # Two of them are no exceptions.
    dear_one = Choice("tree", 4)
    for _ in range(2):
        latency.observe(dear_one, 9.0)
    assert latency.seconds(dear_one) > 5
    # And one among enough others counts little.
    for _ in range(4):
        latency.observe(choice, 1.2)
    latency.observe(choice, 50.0)
    assert latency.seconds(choice) < 1.4


def step_s(choice: Choice, _: int, context_tokens: int) -> float:
    """Seconds of a step where a short pass takes as long as a few proposals, and a long one as long as hundreds."""
    return 0.0135 + 1e-5 * context_tokens + 0.0044 * choice.size


def slow_to_draft_s(choice: Choice, _: int, context_tokens: int) -> float:
    """The same where keys and values of long texts are streamed, and any step of the hierarchy takes a while."""
    drafting_s = 0.03 + 0.017 * -(-choice.size // 3) if choice.size else 0.0
    return (0.09 if context_tokens < 2000 else 0.87) + drafting_s


def answer(
    controller: Controller, context_tokens: int, chance: random.Random, *, num_tokens: int = 64, rate: float = 0.94,
    cost: Callable[[Choice, int, int], float] = step_s,
) -> float:  # fmt: skip
    """Seconds of an answer, of a draft that is right so often."""
    remaining, total_s = num_tokens, 0.0
    while remaining > 0:
        limits = {"chain": min(63, remaining - 1)} if remaining > 1 else {}
        choice = controller.choose(WAY, limits, context_tokens=context_tokens)
        accepted = next((depth for depth in range(choice.size) if chance.random() > rate), choice.size)
        seconds = cost(choice, 1, context_tokens)
        paths = [range(accepted)] if choice != PLAIN else []
        controller.observe(
            WAY, choice, paths, tokens=1 + accepted, seconds=seconds, context_tokens=context_tokens
        )  # fmt: skip
        remaining, total_s = remaining - 1 - accepted, total_s + seconds
    return total_s


@pytest.mark.few(3)
@pytest.mark.parametrize("known", [0.0, 1 / 3, 3.0])
@pytest.mark.parametrize("lengths", [(512, 4000, 30_000, 120_000), (30_000, 2000), (120_000, 512)])
def test_what_pays_is_not_off_for_good_at_another_length(lengths: tuple[int, ...], known: float) -> None:
    """Nor where nobody knows the machine, or the figures of its profile are far off."""
    *before, last = lengths
    plain_s = 64 * step_s(PLAIN, 1, last)
    for seed in range(10):
        controller = Controller({"chain": 63}, (lambda *asked: known * step_s(*asked)) if known else None)
        chance = random.Random(seed)
        for length in before:
            answer(controller, length, chance, num_tokens=24)
        assert min(answer(controller, last, chance) for _ in range(8)) < plain_s / 1.5


def test_what_short_passes_lost_is_not_earned_by_long_ones() -> None:
    """Where nobody knows the machine a draft that was wrong in a short text may have lost half of a short pass. Half of
    one percent of each long pass would earn that in dozens of them, though it is a twentieth of one."""
    for seed in range(10):
        controller, chance = Controller({"chain": 63}, streamed=True), random.Random(seed)
        for _ in range(2):
            answer(controller, 512, chance, num_tokens=8, rate=0.3, cost=slow_to_draft_s)
        plain_s = 64 * slow_to_draft_s(PLAIN, 1, 120_000)
        assert answer(controller, 120_000, chance, cost=slow_to_draft_s) < plain_s / 3


LENGTHS = (200, 1100, 2300, 4600, 9000, 20_000, 40_000)


def test_what_one_length_earned_may_be_lost_at_another() -> None:
    """A draft whose smallest window takes longer than what may be lost at first is not waited for at each length."""

    def dear_s(choice: Choice, *_: int) -> float:
        return 0.1 * (1 + (0.5 + 0.05 * choice.size if choice.size else 0.0))

    for seed in range(4):
        controller, chance = Controller({"chain": 63}, dear_s), random.Random(seed)
        times_s = [answer(controller, length, chance, num_tokens=128, cost=dear_s) for length in LENGTHS]
        assert mean(times_s[2:]) < 128 * 0.1 / 3


def test_a_useless_draft_of_which_nothing_is_known_loses_little_at_each_length() -> None:
    """Plain decoding is played at each, or the draft would be held against its own time."""

    def slow_s(choice: Choice, *_: int) -> float:
        return 0.1 * (1 + (0.3 + 0.05 * choice.size if choice.size else 0.0))

    for seed in range(4):
        controller, chance = Controller({"chain": 63}), random.Random(seed)
        for length in LENGTHS:
            lost = answer(controller, length, chance, num_tokens=128, rate=0.05, cost=slow_s) / 0.1 - 128
            assert lost < 5


def test_a_guess_of_what_steps_cost() -> None:
    assert guessed_cost(PLAIN) == 1 < guessed_cost(Choice("ngram", 8)) < guessed_cost(Choice("chain", 8))
    assert guessed_cost(Choice("chain", 8), streamed=True) < guessed_cost(Choice("chain", 8))
