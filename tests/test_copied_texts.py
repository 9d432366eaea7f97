"""A text that copies itself is copied, whatever came of n-grams in the requests before."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from offload_runtime import EndEvent, GenerationParams, GenerationResult, SamplingParams, Scheduler
from offload_runtime.core import DraftBudget
from offload_runtime.speculation import Controller
from tests.helpers.engine import load, one_thread, write_checkpoint  # noqa: F401 (an autouse fixture)

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


@pytest.mark.few(2)
@pytest.mark.parametrize("row_s", [0.002, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("known", [False, True])
def test_however_dear_a_row_is_a_copy_is_tried_at_once(row_s: float, known: bool) -> None:
    """Behind texts in which each proposal failed, by times that are what they are expected to be."""

    def seconds(choice: DraftBudget, *_: int) -> float:
        return 1 + row_s * choice.size

    controller = Controller(["ngram", "unigram", "copy"], seconds if known else None)

    def play(limits: dict[str, int], *, comes_true: bool) -> DraftBudget:
        choice = controller.choose(SamplingParams(), limits)
        path = range(choice.size) if comes_true else ()
        controller.observe(SamplingParams(), choice, [path], tokens=1.0 + len(path), seconds=seconds(choice))
        return choice

    for _ in range(70):
        controller.begin(SamplingParams())
        for step in range(20):
            play({"ngram" if step % 2 else "unigram": 63}, comes_true=False)
    controller.begin(SamplingParams())
    steps = [play({"copy": 63, "ngram": 63}, comes_true=True) for _ in range(12)]
    assert sum(choice.size for choice in steps[:2]) > 0 and sum(choice.size for choice in steps) >= 24
