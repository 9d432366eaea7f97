"""Several prompts at once: each gets the tokens of plain decoding, whatever the others accept."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offload_runtime import GenerationParams, SamplingParams
from offload_runtime.errors import BudgetError, ContextLengthError, OptionError
from offload_runtime.plan import RunPlan
from tests.helpers.engine import PROMPT, FailingRunner, load, one_thread  # noqa: F401 (an autouse fixture)

PROMPTS = [PROMPT, "the lazy dog", [5 + (3 * i * i) % 280 for i in range(300)], "and the quick brown fox jumps"]
COUNT = 40


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"params": [GenerationParams()]}, "1 params for 2 prompts: give one for each, or one for all"),
        ({"params": []}, "0 params for 2 prompts"),
        ({"params": SamplingParams(0.5)}, "params is a GenerationParams for all prompts, or a sequence"),
        ({"params": [GenerationParams(), SamplingParams()]}, "params is a GenerationParams"),
        ({"params": GenerationParams(), "temperature": 0.5}, "options are given twice, by name and as params"),
        ({"params": [GenerationParams()] * 2, "noise_ids": [1]}, "1 noise_ids for 2 prompts"),
        ({"params": [GenerationParams(), GenerationParams(gamma=1000)]}, "gamma 1000 exceeds the"),
    ],
)
def test_options_of_a_batch_that_make_no_sense(target: Path, asked: dict[str, Any], message: str) -> None:
    with load(target, max_batch=2) as runtime:
        with pytest.raises(OptionError, match=message):
            runtime.generate_batch(["a", "b"], **asked)
        long = [GenerationParams(3), GenerationParams(100_000)]
        with pytest.raises(ContextLengthError, match=r"prompt 2 of 2: .* 100000 new ones exceed the context"):
            runtime.generate_batch(["a", "b"], params=long)


@pytest.mark.slow
def test_a_batch_that_is_stopped_keeps_what_it_has(target: Path, draft: Path) -> None:
    """Before the third pass: one answer is done, the others are what they are, and the runtime goes on."""
    with load(target, draft=draft, max_batch=3, kv="host") as runtime:
        whole = runtime.generate_batch(PROMPTS[:3], max_new_tokens=COUNT, ignore_eos=True, gamma=2)
        first = whole[0].text[:4]
        layers: list[tuple[int, int]] = []
        passes: list[tuple[int, int]] = []
        stopped = runtime.generate_batch(
            PROMPTS[:3], max_new_tokens=COUNT, ignore_eos=True, gamma=2, stop=first,
            on_prefill=lambda done, total: layers.append((done, total)),
            on_progress=lambda done, total: passes.append((done, total)), should_stop=lambda: len(passes) == 3,
        )  # fmt: skip
        assert [result.finish_reason for result in stopped] == ["stop", "interrupted", "interrupted"]
        for result, other in zip(stopped[1:], whole[1:], strict=True):
            assert 1 <= len(result.tokens) <= 1 + 2 * 3
            assert result.tokens == other.tokens[: len(result.tokens)] and other.text.startswith(result.text)
            assert result.stats.passes == 2
        assert layers == [(done, 15) for done in range(1, 16)]
        nothing = runtime.generate_batch(PROMPTS[:2], max_new_tokens=COUNT, ignore_eos=True, should_stop=lambda: True)
        assert [len(result.tokens) for result in nothing] == [1, 1]
        again = runtime.generate_batch(PROMPTS[:3], max_new_tokens=COUNT, ignore_eos=True, gamma=2)
        assert [result.tokens for result in again] == [result.tokens for result in whole]


def test_batches_that_make_no_sense(target: Path) -> None:
    with load(target, max_batch=2) as runtime:
        with pytest.raises(OptionError, match="3 prompts for a runtime loaded for 1 to 2"):
            runtime.generate_batch(["a", "b", "c"])
        with pytest.raises(OptionError):
            runtime.generate_batch([])
        with pytest.raises(ContextLengthError, match="prompt 1 of 2: "):
            runtime.generate_batch(["a", "b"], max_new_tokens=100_000)
        with pytest.raises(OptionError, match=r"prompt 2 of 2: .*empty"):
            runtime.generate_batch(["a", ""], max_new_tokens=3)
        assert len(runtime.generate_batch(["a", "b"], max_new_tokens=3)) == 2


def test_as_many_sequences_as_stream_no_more_are_chosen(short_target: Path) -> None:
    """Where device memory is short of a layer with one sequence more; where it is not, 16."""

    def plan_of(count: int | str, vram: int | None) -> RunPlan:
        with load(short_target, draft="none", context=512, max_batch=count, vram=vram) as runtime:
            return runtime.plan

    assert plan_of("auto", None).target.batch == 16
    whole = plan_of(4, None)
    vram = whole.cards[0].device_bytes
    chosen = plan_of("auto", vram)
    assert not chosen.streamed_bytes and 4 <= chosen.target.batch < 16
    assert chosen.target.context_tokens == 512
    with suppress(BudgetError):
        assert plan_of(chosen.target.batch + 1, vram).streamed_bytes > 0
