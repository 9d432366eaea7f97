"""What a runtime has learnt of one length of text, and begins with at another."""

from __future__ import annotations

import random

import pytest

from offload_runtime.config import SamplingParams
from offload_runtime.engine.learnt import Learnt
from offload_runtime.speculation import PLAIN, Choice, guessed_cost


def test_times_of_another_length_begin_with_those_of_the_nearest() -> None:
    """Longer texts take longer by what is foreseen, shorter ones in proportion; in proportion where nobody knows."""
    learnt = Learnt({"chain": 8}, lambda choice, sequences, tokens: 0.1 * sequences + tokens + choice.size)
    short, eight = learnt.times(1, 3000), Choice("chain", 8)
    assert learnt.times(1, 2100) is short and short.seconds(PLAIN) == 0.1 + 3072
    assert learnt.times(2, 3000).seconds(PLAIN) == 0.2 + 3072
    for seconds, choice in ((100.0, PLAIN), (120.0, eight)):
        for _ in range(3):
            short.observe(choice, seconds)
    long, shortest = learnt.times(1, 5000), learnt.times(1, 10)
    assert long is not short and long.knows_plain
    assert long.seconds(PLAIN) == pytest.approx(100 + 3072) and long.seconds(eight) == pytest.approx(120 + 3072)
    assert shortest.seconds(PLAIN) == pytest.approx(100 * 768.1 / 3072.1)
    long.observe(PLAIN, 3172 / 2)
    assert long.seconds(eight) == pytest.approx(3192 / 2)
    unknown = Learnt({"chain": 8})
    first = unknown.times(1, 10)
    assert not first.knows_plain and unknown.times(1, 5000).seconds(PLAIN) == guessed_cost(PLAIN)
    for seconds in (5.0, 5.0):
        first.observe(PLAIN, seconds)
    later = unknown.times(1, 70_000)
    assert later.seconds(eight) / later.seconds(PLAIN) == pytest.approx(guessed_cost(eight))


def round_s(choice: Choice, _: int, length_tokens: int) -> float:
    """Seconds of a round where a short pass takes as long as a few proposals, and a long one as long as hundreds."""
    return 0.0135 + 1e-5 * length_tokens + 0.0044 * choice.size


def answer(learnt: Learnt, length_tokens: int, chance: random.Random, *, num_tokens: int = 64) -> float:
    """Seconds of an answer, of a draft that is right 94 times of 100."""
    chooser, remaining, total_s = learnt.chooser(SamplingParams()), num_tokens, 0.0
    while remaining > 0:
        times, room = learnt.times(1, length_tokens), remaining - 1
        choice = chooser.choose(times, {"chain": min(63, room)}) if room else PLAIN
        accepted = next((depth for depth in range(choice.size) if chance.random() > 0.94), choice.size)
        seconds = round_s(choice, 1, length_tokens)
        paths = [range(accepted)] if choice != PLAIN else []
        chooser.learn(times, choice, paths, tokens=1 + accepted, seconds=seconds)
        remaining, total_s = remaining - 1 - accepted, total_s + seconds
    return total_s


def test_a_long_context_behind_short_ones_has_long_windows_at_once() -> None:
    afresh, behind = 0.0, 0.0
    for seed in range(20):
        afresh += answer(Learnt({"chain": 63}, round_s), 120_000, random.Random(seed))
        learnt, chance = Learnt({"chain": 63}, round_s), random.Random(seed)
        for _ in range(2):
            answer(learnt, 512, chance)
        behind += answer(learnt, 120_000, chance)
    assert behind < 1.1 * afresh < 20 * 64 * round_s(PLAIN, 1, 120_000) / 6


@pytest.mark.parametrize("known", [0.0, 1 / 3, 3.0])
@pytest.mark.parametrize("lengths", [(512, 4000, 30_000, 120_000), (30_000, 2000), (120_000, 512)])
def test_what_pays_is_not_off_for_good_at_another_length(lengths: tuple[int, ...], known: float) -> None:
    """Nor where nobody knows the machine, or the figures of its profile are far off."""
    *before, last = lengths
    plain_s = 64 * round_s(PLAIN, 1, last)
    for seed in range(20):
        foreseen = None if not known else lambda *asked: known * round_s(*asked)
        learnt, chance = Learnt({"chain": 63}, foreseen), random.Random(seed)
        for length in before:
            answer(learnt, length, chance, num_tokens=24)
        assert min(answer(learnt, last, chance) for _ in range(8)) < plain_s / 1.5
