"""Prompt lookup: what followed earlier occurrences of the text's own ending, as by search, without searching; and a
text that copies itself is copied, whatever came of n-grams in the requests before."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from offload_runtime import EndEvent, GenerationParams, GenerationResult, SamplingParams, Scheduler
from offload_runtime.core import DraftBudget, TokenTree
from offload_runtime.speculation.ngram import NgramDrafter, NgramLookup
from tests.helpers.engine import load, write_checkpoint

MOST_OCCURRENCES = 32


def starts_by_search(tokens: Sequence[int]) -> dict[int, int]:
    """Where continuations begin, and of each how much matches: the newest occurrences of the last eight, three, two
    and one tokens."""
    found: set[int] = set()
    for size in (8, 3, 2, 1):
        ending = list(tokens[-size:])
        found |= set(
            [
                start + size
                for start in range(len(tokens) - size - 1, -1, -1)
                if len(ending) == size and list(tokens[start : start + size]) == ending
            ][:MOST_OCCURRENCES]
        )
    return {start: matched_by_search(tokens, start) for start in found}


def matched_by_search(tokens: Sequence[int], start: int) -> int:
    before, ending = list(tokens[:start]), list(tokens)
    return max(matched for matched in range(start + 1) if before[start - matched :] == ending[len(ending) - matched :])


def continued(tokens: Sequence[int], start: int, depth: int) -> tuple[int, ...]:
    """What follows a start; it repeats itself past the end."""
    text = list(tokens)
    for offset in range(depth):
        text.append(text[start + offset])
    return tuple(text[len(tokens) :])


@st.composite
def growing_sequences(draw: st.DrawFn) -> list[list[int]]:
    """The sequences that a drafter is shown: each the last one grown, cut, cut and grown, or another one."""
    token = st.integers(0, 3)
    shown = [draw(st.lists(token, min_size=1, max_size=20))]
    for _ in range(draw(st.integers(1, 8))):
        kept = draw(st.sampled_from([len(shown[-1]), draw(st.integers(0, len(shown[-1]))), 0]))
        shown.append(shown[-1][:kept] + draw(st.lists(token, min_size=int(kept == 0), max_size=9)))
    return shown


@given(growing_sequences(), st.integers(1, 12))
def test_a_chain_is_what_followed_the_longest_match(shown: list[list[int]], count: int) -> None:
    tokens = shown[-1]
    starts = starts_by_search(tokens)
    best = max(starts, key=lambda start: (starts[start], start), default=None)
    expected = () if best is None else continued(tokens, best, count)
    assert NgramLookup().chain(tokens, count) == TokenTree.chain(expected, "ngram")


def test_a_sequence_that_was_cut_between_generations_is_noticed() -> None:
    """Where its newest tokens do not show it."""
    drafter, params = NgramDrafter(), SamplingParams()
    before, after = [1, 2, 9, 1, 2, 5, 5, 5, 5, 5, 1, 2], [1, 2, 8, 1, 2, 7, 7, 5, 5, 5, 5, 1, 2]
    drafter.join(0, params)
    budgets = {0: DraftBudget("ngram", 1)}
    assert drafter.propose({0: before}, budgets)[0].tokens == (5,)
    drafter.join(0, params)
    assert drafter.propose({0: after}, budgets)[0].tokens == (7,)
    assert drafter.propose({0: after[:5]}, budgets)[0].tokens == (8,)


def test_every_sequence_is_looked_up_in_its_own_text() -> None:
    drafter, texts = NgramDrafter(), {2: [7, 8, 9, 7, 8], 0: [1, 2, 3, 1, 2]}
    drafter.prepare(2, texts[2][:3])
    one = DraftBudget("ngram", 1)
    proposals = drafter.propose(texts, {2: DraftBudget("ngram", 2), 0: one})
    assert {slot: proposal.tokens for slot, proposal in proposals.items()} == {2: (9, 7), 0: (3,)}
    assert drafter.propose(texts, {0: DraftBudget("ngram", 2, 9)})[0].tokens == (3, 1), "as deep as a turn says"
    others = drafter.propose({0: texts[2], 1: [7, 8, 9]}, {0: one, 1: one})
    assert [proposal.tokens for proposal in others.values()] == [(9,), ()]


FIRST, LAST = 2, 319


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says behind each token the one of the next number, whatever came before."""
    directory = write_checkpoint(tmp_path_factory.mktemp("counting"), num_layers=1)
    weights = load_file(directory / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].roll(1, dims=0).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def misleading(start: int, count: int) -> list[int]:
    """Every other pair of tokens that the answer will have, and something else behind it."""
    pairs = [[token, token + 1, FIRST + (7 * token) % 40] for token in range(start, start + count, 2)]
    return [token for pair in pairs for token in pair] + [start]


def copying(start: int, count: int) -> list[int]:
    """A text, and once more how it begins."""
    text = list(range(start, start + count))
    return [*text, LAST, 5, LAST, 9, *text[:10]]


def answer(scheduler: Scheduler, prompt: list[int], count: int) -> GenerationResult:
    ended, found = threading.Event(), list[GenerationResult]()

    def hear(event: object) -> None:
        if isinstance(event, EndEvent):
            found.append(event.result)
            ended.set()

    scheduler.submit(prompt, GenerationParams(count, ignore_eos=True), on_event=hear)
    assert ended.wait(60)
    return found[0]


def test_a_copying_request_is_copied_behind_seventy_in_which_n_grams_failed(counting: Path) -> None:
    with load(counting, draft="ngram", context=400, max_batch=2) as runtime, Scheduler(runtime) as scheduler:
        for start in range(60, 130):
            result = answer(scheduler, misleading(start, 8), 6)
            assert result.tokens == list(range(start + 1, start + 7))
        for start in (100, 130):
            result = answer(scheduler, copying(start, 60), 48)
            assert result.tokens == list(range(start + 10, start + 58))
            assert result.stats.accepted_by_source.get("ngram", 0) >= 1
