"""Rounds are chosen by what they bring and take: as good as the best fixed choice, and never much worse than none."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_runtime.speculation import PLAIN, Choice, Chooser, RoundTimes, guessed_cost
from offload_runtime.speculation.window_gains import Gains
from offload_runtime.speculation.window_sizes import SIZES, steps_within
from tests.helpers.round_models import ByProbability, Cost, InARow, Text, best_fixed, dear, play, resident, streamed

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
SEEDS = range(10)


def times_of(cost: Cost, known: str) -> RoundTimes:
    """What is foreseen: nothing but a guess, or the machine's figures, exactly or out of proportion."""
    if known == "unknown":
        return RoundTimes(lambda choice: guessed_cost(choice, streamed=cost is streamed))
    return RoundTimes(cost if known == "known" else lambda choice: cost(choice) ** 1.2, sure=True)


@pytest.mark.parametrize("known", ["unknown", "known", "wrong"])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("rate", TEXTS)
@pytest.mark.parametrize("cost", [resident, streamed])
def test_it_is_as_fast_as_the_best_fixed_choice(cost: Cost, rate: float, limits: str, known: str) -> None:
    """Within 5 % on average once 50 rounds were played, with times that are 10 % off and some far too long."""
    text, whole, settled = TEXTS[rate], [], []
    for seed in SEEDS:
        run = play([(text, 400)], cost, LIMITS[limits], seed=seed, times=times_of(cost, known))
        best = [best_fixed(text, cost, LIMITS[limits], idea_share=mean(run.ideas[first:])) for first in (0, 50)]
        whole.append(run.speed() / best[0])
        settled.append(run.speed(50) / best[1])
    assert mean(whole) > 0.94 and mean(settled) > 0.95
    assert min(whole) > 0.65


@pytest.mark.parametrize("known", ["unknown", "known", "wrong"])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("cost", [resident, streamed])
def test_a_useless_draft_costs_one_percent_at_most(cost: Cost, limits: str, known: str) -> None:
    for seed in SEEDS:
        run = play([(USELESS, 256)], cost, LIMITS[limits], seed=seed, times=times_of(cost, known))
        assert run.speed() > 0.99 / cost(PLAIN)
        assert run.share("chain", 64) + run.share("tree", 64) < (0.15 if cost is resident else 1)


def test_a_draft_whose_smallest_window_is_dear_is_tried_at_once() -> None:
    """If its failure is affordable at all: the first window may lose what three would otherwise."""
    text = Text({"chain": InARow(0.94)})
    runs = [play([(text, 25)], dear, {"chain": 63}, seed=seed, times=times_of(dear, "known")) for seed in range(40)]
    best = best_fixed(text, dear, {"chain": 63})
    assert mean(run.speed() for run in runs) > 0.85 * best > 2.5 / dear(PLAIN)
    assert {str(run.rounds[0][0]) for run in runs} == {"chain 1"}
    for limits in LIMITS.values():
        useless = [play([(USELESS, 256)], dear, limits, seed=seed, times=times_of(dear, "known")) for seed in range(20)]
        speeds = [run.speed() * dear(PLAIN) for run in useless]
        assert mean(speeds) > 0.99 and min(speeds) > 0.98


def test_finding_out_that_a_draft_is_useless_takes_half_a_round_of_a_short_answer() -> None:
    """On average of the first 25 rounds, where drafting costs; a round within 256. Passes that hide it hide this."""
    for count, rounds in ((25, 0.6), (256, 1.4)):
        runs = [
            play(
                [(USELESS, count)], resident, LIMITS["trees"], seed=seed, times=times_of(resident, "known"), noise=0.02
            )
            for seed in range(3 * len(SEEDS))
        ]
        lost = [sum(seconds for _, seconds, _ in run.rounds) / resident(PLAIN) - count for run in runs]
        assert 0 < mean(lost) < rounds and max(lost) < 2
    run = play([(USELESS, 25)], streamed, LIMITS["trees"], seed=1, times=times_of(streamed, "known"))
    assert run.speed() == pytest.approx(1 / streamed(PLAIN))


def test_one_window_without_a_hit_does_not_keep_the_best_family_off() -> None:
    """Seeds beyond those of the other tests, among them some whose first chain is rejected from its first token on."""
    text, unlucky = TEXTS[0.95], 0
    for seed in range(60):
        run = play([(text, 200)], streamed, LIMITS["trees"], seed=seed, times=times_of(streamed, "known"))
        chains = [said for (choice, *_), said in zip(run.rounds, run.said, strict=True) if choice.family == "chain"]
        unlucky += chains[0] == 1
        best = best_fixed(text, streamed, LIMITS["trees"], idea_share=mean(run.ideas[50:]))
        assert run.speed(50) > 0.9 * best
    assert unlucky > 0


@pytest.mark.parametrize("cost", [resident, streamed])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.3, 0.95), (0.95, 0.3), (0.0, 0.9)])
def test_another_text_is_followed(cost: Cost, before: float, after: float) -> None:
    texts = [Text({"chain": InARow(rate)}) for rate in (before, after)]
    limits = {"chain": 63}
    runs = [
        play([(texts[0], 250), (texts[1], 400)], cost, limits, seed=seed, times=times_of(cost, "known"))
        for seed in SEEDS
    ]
    best = [best_fixed(text, cost, limits) for text in texts]
    assert mean(run.speed(50, 250) for run in runs) > 0.95 * best[0]
    # What was off is looked at again 128 rounds later at the latest.
    assert mean(run.speed(450) for run in runs) > 0.85 * best[1]
    if after == 0:
        assert all(run.speed(250) > 0.97 * best[1] for run in runs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rates=st.tuples(*[st.floats(0, 1)] * 3), step=st.floats(0, 1), row=st.floats(0, 0.2), share=st.floats(0, 1),
    seed=st.integers(0, 1000), sure=st.booleans(),
)  # fmt: skip
def test_it_is_never_much_slower_than_plain_decoding(
    rates: tuple[float, float, float], step: float, row: float, share: float, seed: int, sure: bool
) -> None:
    """Whatever proposals cost and however seldom they are right."""

    def cost(choice: Choice) -> float:
        steps = {"chain": choice.size, "tree": choice.size / 16 + 1}.get(choice.family, 0)
        return 1 + row * choice.size + step * steps

    text = Text({"chain": InARow(rates[0]), "tree": ByProbability(rates[1]), "ngram": InARow(rates[2])}, share)
    times = RoundTimes(cost, sure=True) if sure else RoundTimes()
    run = play([(text, 400)], cost, LIMITS["trees"], seed=seed, times=times, noise=0.05)
    lost = sum(seconds for _, seconds, _ in run.rounds) - sum(run.said)
    # A size that nobody could foresee costs what it costs, and again until it is believed.
    dearest = max(seconds for _, seconds, _ in run.rounds)
    assert lost < 0.01 * 400 + (0 if sure else 3 * dearest) + 1


@pytest.mark.parametrize("step", [0.15, 0.3, 0.6])
@pytest.mark.parametrize("rate", [0.2, 0.45, 0.65])
def test_proposals_that_are_dearer_than_anyone_thought_cost_one_percent_at_most(step: float, rate: float) -> None:
    """A first window tells what the proposals of a larger one will take."""

    def cost(choice: Choice) -> float:
        return 1 + (step + 0.001) * choice.size

    text = Text({"chain": InARow(rate)})
    for seed in range(20):
        run = play([(text, 300)], cost, {"chain": 63}, seed=seed, times=RoundTimes(), noise=0.02, outliers=0.0)
        assert sum(run.said) > 0.985 * sum(seconds for _, seconds, _ in run.rounds)


def test_plain_rounds_are_played_where_nobody_has_an_idea() -> None:
    chooser, times = Chooser({"ngram": 16}), RoundTimes()
    for _ in range(5):
        assert chooser.choose(times, {}) == PLAIN
        chooser.learn(times, PLAIN, [], tokens=1, seconds=0.02)
    # And count as the time that others are held against.
    assert times.knows_plain and chooser.choose(times, {"ngram": 16}).family == "ngram"


def test_a_short_answer_is_not_spent_on_finding_out() -> None:
    """256 tokens are 25 rounds: within a tenth of the best choice, which nobody knows when they begin."""
    sources = ((0.78, 1.6, 0.2, 0.6), (0.92, 2.2, 0.2, 0.6), (0.85, 2.6, 0.5, 0.8), (0.4, 0.6, 0.2, 0.6))
    speeds = []
    for chain, tree, ngram, share in sources:
        text = Text({"chain": InARow(chain), "tree": ByProbability(tree), "ngram": InARow(ngram)}, share)
        for seed in range(2 * len(SEEDS)):
            times = RoundTimes(streamed, sure=True)
            run = play([(text, 25)], streamed, LIMITS["trees"], seed=seed, times=times, noise=0.05)
            speeds.append(run.speed() / best_fixed(text, streamed, LIMITS["trees"], idea_share=mean(run.ideas)))
    assert mean(speeds) > 0.9


def test_a_doubtful_time_is_measured_again_only_where_there_is_room() -> None:
    chooser, times = Chooser({"ngram": 64}), RoundTimes(lambda choice: 1.0, sure=True)
    for _ in range(2):
        chooser.learn(times, PLAIN, [], tokens=1, seconds=1.0)
    chooser.learn(times, Choice("ngram", 64), [[0]], tokens=2, seconds=9.0)
    assert times.doubts(Choice("ngram", 64)) and chooser.choose(times, {"ngram": 64}) == Choice("ngram", 64)
    assert chooser.choose(times, {"ngram": 16}).size <= 16


def test_no_window_is_larger_than_its_limit() -> None:
    for largest in (1, 5, 7, 63):
        run = play([(TEXTS[0.95], 200)], streamed, {"chain": largest}, seed=1, times=RoundTimes(streamed, sure=True))
        sizes = {choice.size for choice, *_ in run.rounds}
        assert max(sizes) == SIZES[steps_within(largest)] <= largest


def test_gains_of_larger_windows_follow_from_smaller_ones() -> None:
    chain = Gains(64, first=0.75, in_depth=True)
    tree = Gains(64, first=0.8, in_depth=False)
    for number in range(64):
        for gains, numbers in ((chain, range(4 if number % 2 else 0)), (tree, [0, 1] if number % 2 else [0])):
            gains.observe(4, [list(numbers)], number=number)
    assert chain.curve()[4] == pytest.approx(2.0, rel=0.1)
    # What is right four times in a row goes on being right, but not for ever.
    assert 4 < chain.curve()[steps_within(16)] < 8
    assert chain.curve()[steps_within(64)] < 20
    assert tree.curve()[4] == pytest.approx(1.5, rel=0.1) and 1.5 < tree.curve()[steps_within(64)] < 3


def test_windows_tell_about_all_smaller_ones() -> None:
    gains = Gains(16, first=0.5, in_depth=True)
    for number in range(40):
        gains.observe(16, [range(5)], number=number)
    assert gains.curve()[: steps_within(4) + 1] == pytest.approx([0, 1, 2, 3, 4], rel=0.02)
    assert gains.curve()[steps_within(16)] == pytest.approx(5, rel=0.1)


def test_what_changes_all_at_once_is_soon_believed() -> None:
    gains, number = Gains(8, first=0.5, in_depth=True), 0
    for before, after in ((0, 8), (8, 0), (0, 8)):
        for path in [range(before)] * 64 + [range(after)] * 14:
            gains.observe(8, [path], number=number)
            number += 1
        assert abs(gains.curve()[-1] - after) < 0.35 * 8


def test_of_a_batch_the_mean_counts() -> None:
    gains = Gains(4, first=0.5, in_depth=True)
    for number in range(40):
        gains.observe(2, [[0, 1], [], [0], []], number=number)
    assert gains.curve()[:3] == pytest.approx([0, 0.5, 0.75], abs=0.01)


def test_times_between_those_played_keep_the_proportion_foreseen_and_beyond_them_what_a_proposal_takes() -> None:
    times = RoundTimes(lambda choice: 1 + choice.size / 8, sure=True)
    assert times.seconds(Choice("chain", 8)) == 2.0
    for seconds, choice in ((3.0, PLAIN), (8.4, Choice("chain", 8))):
        times.observe(choice, seconds)
    curve = dict(zip(SIZES, times.curve("chain", 16), strict=False))
    assert (curve[0], curve[8], curve[16]) == (3.0, 8.4, pytest.approx(8.4 + 5.4))
    assert curve[4] == pytest.approx(1.5 * 3.6)
    assert times.curve("tree", 8)[0] == 3.0


def test_what_was_not_played_is_expected_in_proportion_to_what_was() -> None:
    """Plain decoding by the fastest of the others, and all else by plain decoding, until that is played."""
    times = RoundTimes(lambda choice: 1 + choice.size / 8)
    times.observe(Choice("chain", 16), 6.0)
    assert times.curve("tree", 8)[:2] == [2.0, 2.25] and times.seconds(PLAIN) == 2.0
    times.observe(Choice("tree", 8), 3.0)
    assert times.seconds(PLAIN) == 1.5 and times.seconds(Choice("ngram", 8)) == 3.0
    times.observe(PLAIN, 2.2)
    assert times.seconds(PLAIN) == 2.2 and times.seconds(Choice("ngram", 8)) == 4.4


def test_an_exceptional_first_time_is_not_believed() -> None:
    times = RoundTimes(lambda choice: 1.0, sure=True)
    for _ in range(4):
        times.observe(PLAIN, 0.1)
    choice = Choice("chain", 4)
    times.observe(choice, 5.0)
    assert times.seconds(choice) == pytest.approx(0.1)
    times.observe(choice, 0.12)
    assert times.seconds(choice) == pytest.approx(0.12)
    # Two of them are no exceptions.
    dear = Choice("tree", 4)
    for _ in range(2):
        assert not times.doubts(dear) or times.seconds(dear) == pytest.approx(0.1)
        times.observe(dear, 0.9)
    assert times.seconds(dear) == pytest.approx(0.9)
    # And one among others does not count.
    for seconds in (0.12, 7.0, 0.12, 9.0, 0.12):
        times.observe(choice, seconds)
    assert times.seconds(choice) == pytest.approx(0.12)


def test_larger_windows_never_take_less_time() -> None:
    times = RoundTimes(lambda choice: 1.0, sure=True)
    for size, seconds in ((0, 0.11), (1, 0.10), (8, 0.09), (16, 0.2)):
        for _ in range(3):
            times.observe(Choice("chain", size) if size else PLAIN, seconds)
    curve = times.curve("chain", 16)
    assert curve == sorted(curve)
    assert curve[:2] == pytest.approx([0.1, 0.1]) and curve[-1] == pytest.approx(0.2)
