"""When an answer may end, and at what: the same tokens whatever is proposed, in Python and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import Served, serving

PROMPT = "the quick brown fox jumps over the lazy dog, the quick brown"
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"draft": "none"}, "ngram": {"draft": "ngram", "max_batch": 2}, "chain": {"gamma": 3},
    "tree": {"tree_nodes": 8},
}  # fmt: skip


@pytest.fixture(scope="module", params=DRAFTS)
def runtime(request: pytest.FixtureRequest, two_layer_target: Path) -> Iterator[Runtime]:
    with load(two_layer_target, **{"draft": two_layer_target, **DRAFTS[request.param]}) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def alone(two_layer_target: Path) -> Iterator[Runtime]:
    with load(two_layer_target, draft="none") as runtime:
        yield runtime


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_an_answer_before_min_tokens(runtime: Runtime, alone: Runtime, temperature: float) -> None:
    end = alone.tokenizer.eos_token_id
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 24, "logit_bias": {end: 100.0}}
    assert alone.generate(PROMPT, **options).tokens == [end]
    for count in (1, 9):
        result = runtime.generate(PROMPT, min_tokens=count, **options)
        assert end not in result.tokens[:-1] and result.tokens[-1] == end and len(result.tokens) == count + 1
        assert result.finish_reason == "stop"
        assert result.tokens == alone.generate(PROMPT, min_tokens=count, **options).tokens
        banned = {**options, "logit_bias": {end: -100.0}, "max_new_tokens": count}
        assert result.tokens[:-1] == alone.generate(PROMPT, **banned).tokens


def test_stop_tokens_end_an_answer_and_wait_as_long(runtime: Runtime, alone: Runtime) -> None:
    plain = alone.generate(PROMPT, max_new_tokens=16, ignore_eos=True).tokens
    at = next(place for place in range(4, 16) if plain[place] not in plain[:place])
    for ignoring in (False, True):
        result = runtime.generate(PROMPT, max_new_tokens=16, stop_token_ids=[plain[at]], ignore_eos=ignoring)
        assert result.tokens == plain[: at + 1] and result.finish_reason == "stop"
    assert result.text == alone.generate(PROMPT, max_new_tokens=at, ignore_eos=True).text
    asked: dict[str, Any] = {
        "max_new_tokens": 16,
        "min_tokens": at + 2,
        "stop_token_ids": [plain[at]],
        "ignore_eos": True,
    }
    result = runtime.generate(PROMPT, **asked)
    assert plain[at] not in result.tokens[: at + 2] and result.tokens == alone.generate(PROMPT, **asked).tokens


def test_a_stop_string_waits_as_well(alone: Runtime) -> None:
    plain = alone.generate(PROMPT, max_new_tokens=16, ignore_eos=True)
    assert len(alone.generate(PROMPT, max_new_tokens=16, ignore_eos=True, stop=plain.text[0]).tokens) < 8
    later = alone.generate(PROMPT, max_new_tokens=16, ignore_eos=True, stop=plain.text[0], min_tokens=8)
    assert later.tokens[:8] == plain.tokens[:8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is more than the 8"),
        ({"min_tokens": 1, "json_schema": {"type": "object"}}, "drop min_tokens"),
        ({"stop_token_ids": [100_000]}, "outside the vocabulary"),
        ({"stop_token_ids": [-1]}, "below 0"),
    ],
)
def test_what_makes_no_sense_is_refused(alone: Runtime, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        alone.generate(PROMPT, **options)


@pytest.fixture(scope="module")
def served(two_layer_target: Path) -> Iterator[Served]:
    with serving(two_layer_target, load_options={"context": 512}) as served:
        yield served


def test_a_request_may_say_so_as_well(served: Served, alone: Runtime) -> None:
    end = alone.tokenizer.eos_token_id
    asked = {"max_tokens": 24, "min_tokens": 9, "logit_bias": {str(end): 100}}
    assert served.chat(**asked).json()["usage"]["completion_tokens"] == 10
    first = alone.generate([{"role": "user", "content": "the quick brown fox"}], max_new_tokens=1).tokens
    ended = served.chat(max_tokens=8, stop_token_ids=first).json()
    assert ended["usage"]["completion_tokens"] == 1 and ended["choices"][0]["finish_reason"] == "stop"
