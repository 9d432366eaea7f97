"""Generation with a small random model: the same tokens whatever drafts, fits, streams or came before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.engine import Runtime
from tests.helpers.engine import NUM_LAYERS, PROMPT, load, one_thread  # noqa: F401

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4},
]
COUNT = 22


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Runtime]:
    """Plain decoding with everything resident: what all others are compared with."""
    with load(target, draft="none") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def speculative(target: Path, draft: Path) -> Iterator[Runtime]:
    """A draft model, and most layers streamed."""
    with load(target, draft=draft, resident_layers=1) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(plain: Runtime) -> list[list[int]]:
    """Plain tokens for each way of sampling."""
    tokens = [plain.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, **s).tokens for s in SAMPLINGS]
    assert all(len(said) == COUNT and len(set(said)) > 5 for said in tokens)
    return tokens


def test_stream_gives_what_generate_gives(speculative: Runtime) -> None:
    for sampling in SAMPLINGS:
        whole = speculative.generate(PROMPT, max_new_tokens=COUNT, **sampling)
        stream = speculative.stream(PROMPT, max_new_tokens=COUNT, **sampling)
        pieces = list(stream)
        assert "".join(pieces) == whole.text == stream.result.text
        assert all(pieces) and len(pieces) > 5
        assert (stream.result.tokens, stream.result.finish_reason) == (whole.tokens, whole.finish_reason)


def test_every_kind_of_prompt(plain: Runtime) -> None:
    tokens = plain.encode(PROMPT)
    assert plain.generate(tuple(tokens), max_new_tokens=5).tokens == plain.generate(PROMPT, max_new_tokens=5).tokens
    messages = [{"role": "system", "content": "slot"}, {"role": "user", "content": "fox"}]
    rendered = "<|im_start|>system\nslot<|im_end|>\n<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    assert plain.tokenizer.decode(plain.encode(messages)) == rendered


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9])
def test_exactly_as_many_tokens_as_asked(speculative: Runtime, expected: list[list[int]], count: int) -> None:
    for gamma in (1, 7, count):
        result = speculative.generate(PROMPT, max_new_tokens=count, gamma=gamma, ignore_eos=True)
        assert result.tokens == expected[0][:count]
        assert result.finish_reason == "length"
        assert result.stats.new_tokens == count


def test_figures_add_up(speculative: Runtime) -> None:
    engine = speculative.engine.target.cards[0].engine
    engine.drain()
    before = engine.bytes_copied
    result = speculative.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=7)
    engine.drain()
    stats = result.stats
    layer_bytes = speculative.engine.target.weights.layout.layer_bytes[0]
    assert stats.bytes_per_pass == (NUM_LAYERS - 1) * layer_bytes
    # The ring is full before and after, so every pass, prefill included, has moved exactly its own bytes.
    assert engine.bytes_copied - before == (stats.passes + 1) * stats.bytes_per_pass
    assert stats.prompt_tokens == len(speculative.encode(PROMPT))
    assert stats.new_tokens == COUNT == len(result.tokens)
    assert stats.tokens_per_pass == (COUNT - 1) / stats.passes
    assert stats.time_to_first_token_s > 0 and stats.tok_per_s > 0 and stats.stall_s >= 0
    assert stats.link_gbps is not None and stats.link_peak_gbps is not None
    (level,) = stats.acceptance
    assert level.accepted == COUNT - 1 - stats.passes and level.verifications <= stats.passes
    assert stats.accepted_by_source == {level.proposed_by: sum(stats.accepted_by_depth)}
    assert level.accepted == sum(stats.accepted_by_depth) > 0
    assert list(stats.accepted_by_depth) == sorted(stats.accepted_by_depth, reverse=True)
    # Both rates are over the same time: bytes a second over tokens a second is bytes a token.
    bytes_per_token = stats.passes * stats.bytes_per_pass / (COUNT - 1)
    assert stats.link_gbps * 1e9 / stats.tok_per_s == pytest.approx(bytes_per_token)
    assert stats.peak_vram_bytes == speculative.engine.budgets[0].reserved_bytes
    assert stats.pinned_bytes == 0
    assert stats.measured_s_per_pass == pytest.approx(stats.bytes_per_pass / stats.link_gbps / 1e9)
    assert stats.predicted_s_per_pass is None
    assert stats.link_idle_share is not None and 0 < stats.link_idle_share < 1
    assert stats.hidden_draft_share is None  # known with a trace only


def test_progress_of_loading_and_of_the_prompt(target: Path, draft: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    prefill: list[tuple[int, int]] = []
    with load(
        target, draft=draft, on_progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total))
    ) as runtime:
        runtime.generate(PROMPT, max_new_tokens=1, on_prefill=lambda done, total: prefill.append((done, total)))
    assert list(seen) == ["target weights", "draft weights"]
    for steps in seen.values():
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 0
    assert prefill == [(layer + 1, NUM_LAYERS) for layer in range(NUM_LAYERS)]


def test_closing_ends_the_copies_and_may_be_repeated(target: Path) -> None:
    before = threading.active_count()
    with load(target, resident_layers=0) as runtime:
        assert threading.active_count() == before + 1
        assert "5 streamed" in runtime.placement and "through 3 buffers" in runtime.placement
        assert runtime.load_report.startswith("loaded ")
        runtime.generate(PROMPT, max_new_tokens=2)
        runtime.close()
        assert threading.active_count() == before
