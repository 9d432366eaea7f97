"""How much is proposed: of simulated answers, whose steps take what a seed says, none is much slower than plain."""

import random

import pytest

from offload_runtime.core import DraftBudget
from offload_runtime.params import SamplingParams
from offload_runtime.speculation.controller import PLAIN, Controller

COUNT, ANSWERS, PARAMS = 128, 24, SamplingParams()
LIMITS = {"tree": {"tree": 64, "chain": 12}, "n-grams, too": {"ngram": 16, "tree": 64, "chain": 12}}


def expected(choice: DraftBudget, num_sequences: int = 1, context_tokens: int = 0) -> float:
    """Seconds of a step by the figures of a machine, where a plain one takes a second."""
    return 1 + {"tree": 0.08 + 0.012 * choice.size, "chain": 0.05 * choice.size, "ngram": 0.004 * choice.size}.get(
        choice.mode, 0.0
    )


def answer(
    controller: Controller, limits: dict[str, int], *, right: float, longer: float, seed: int, between_s: float = 0.0
) -> float:
    """Tokens a second of an answer, each of whose proposals is right so often if those before it are, whose windows
    take so many times as long as is expected, and between whose passes the device waits for the host, but for plain
    ones that are known before."""
    chance, tokens, seconds, launched = random.Random(seed), 0, 0.0, False
    controller.begin(PARAMS)
    while tokens < COUNT:
        at = {"context_tokens": 100 + tokens}
        choice, accepted = controller.choose(PARAMS, {} if launched else limits, launched=launched, **at), 0
        assert choice == PLAIN or not launched
        while accepted < choice.size and chance.random() < right:
            accepted += 1
        took_s = expected(choice) * (1.0 if choice == PLAIN else longer) * chance.uniform(0.98, 1.02)
        took_s += 0.0 if launched else between_s
        launched = between_s > 0 and choice == PLAIN and controller.rests(PARAMS)
        controller.observe(PARAMS, choice, [range(accepted)], tokens=accepted + 1, seconds=took_s, **at)
        tokens, seconds = tokens + accepted + 1, seconds + took_s
    return tokens / seconds


@pytest.mark.few(2)
@pytest.mark.parametrize("knows", [True, False], ids=["known", "guessed"])
@pytest.mark.parametrize("modes", LIMITS)
def test_answers_are_hardly_slower_than_plain_ones_and_faster_where_proposals_are_right(
    modes: str, knows: bool
) -> None:
    """Whatever windows really take. Without figures of the machine more is tried."""
    for right, longer, least, mean in (
        (0.0, 1.0, 0.98, 0.985), (0.0, 1.3, 0.97, 0.98), (0.3, 1.3, 0.94, 0.985), (0.6, 1.0, 1.3, 1.8),
        (0.95, 1.3, 3.0, 6.0),
    ):  # fmt: skip
        found = list[float]()
        for first in range(0, ANSWERS, 4):
            controller = Controller(tuple(LIMITS[modes]), expected if knows else None)
            found += [
                answer(controller, LIMITS[modes], right=right, longer=longer, seed=seed)
                for seed in range(first, first + 4)
            ]
        assert min(found) > least and sum(found) / ANSWERS > mean, (right, longer)


def test_the_host_hardly_delays_answers_that_gain_nothing() -> None:
    """Where plain decoding without a draft never waits for it."""
    limits, found = LIMITS["n-grams, too"], list[float]()
    for first in range(0, ANSWERS, 4):
        controller = Controller(tuple(limits))
        found += [
            answer(controller, limits, right=0.2, longer=1.5, seed=seed, between_s=0.25)
            for seed in range(first, first + 4)
        ]
    assert min(found) > 0.93 and sum(found) / ANSWERS > 0.96, found
    assert answer(controller, limits, right=0.95, longer=1.0, seed=9, between_s=0.25) > 2


def test_a_text_that_becomes_easy_is_drafted_soon() -> None:
    """Though nothing was right before, and plain decoding was best."""
    controller, limits = Controller(("tree",), expected), {"tree": 64}
    for seed in range(8):
        answer(controller, limits, right=0.0, longer=1.0, seed=seed)
    assert answer(controller, limits, right=0.95, longer=1.0, seed=8) > 1.5


def test_looking_back_costs_nothing_where_nothing_matches_and_tells_where_something_does() -> None:
    """n-grams are held against what a plain step says, beside passes that were launched ahead."""
    controller = Controller(("unigram", "copy"))
    controller.begin(PARAMS)
    waits, windows, launched = 0, list[str](), False
    for tokens in range(400):
        at, copies = {"context_tokens": 100 + tokens}, tokens >= 200
        limits = {"copy": 48, "unigram": 48} if copies else {"unigram": 48}
        choice = controller.choose(PARAMS, {} if launched else limits, launched=launched, **at)
        if choice == PLAIN:
            controller.overlooked(PARAMS, "copy" if copies else "unigram", [copies])
        else:
            windows.append(choice.mode)
        waits += not launched and tokens < 200
        accepted = choice.size if copies else 0
        controller.observe(
            PARAMS, choice, [range(accepted)], tokens=accepted + 1, seconds=1.0 + 0.2 * (not launched), **at
        )
        launched = choice == PLAIN and controller.rests(PARAMS)
    assert waits + windows.count("unigram") < 8 and windows.count("copy") > 190
