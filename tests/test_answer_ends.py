"""When an answer may end, and at what, and how likely its prompt was: the same whatever is proposed, in Python and over
HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import Served, events_of, serving

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


@pytest.mark.few(4)
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


@pytest.mark.parametrize(("options", "message"), [
    ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is more than the 8"),
    ({"min_tokens": 1, "json_schema": {"type": "object"}}, "drop min_tokens"),
    ({"stop_token_ids": [100_000]}, "outside the vocabulary"), ({"stop_token_ids": [-1]}, "below 0"),
])  # fmt: skip
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


@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_log_probabilities_of_a_prompt_are_the_models(two_layer_target: Path, alone: Runtime, kv: str) -> None:
    prompt = alone.encode(PROMPT * 7)  # of several windows
    (logits,) = alone.logits(prompt[:1], [prompt[1:]])
    rows = logits.float().log_softmax(dim=1)
    expected = rows.gather(1, torch.tensor(prompt[1:])[:, None]).flatten().tolist()
    with load(two_layer_target, draft="ngram", kv=kv, context=1024, max_batch=2) as runtime:
        plain = runtime.generate(prompt, max_new_tokens=5)
        for _ in range(2):  # nothing that is kept of the first is taken for read
            result = runtime.generate(prompt, max_new_tokens=5, prompt_logprobs=2)
            assert result.tokens == plain.tokens and result.prompt_logprobs is not None
            assert [one.token for one in result.prompt_logprobs] == prompt[1:]
            assert [one.logprob for one in result.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
            assert [one.top[0][0] for one in result.prompt_logprobs] == rows.argmax(dim=1).tolist()
        assert runtime.generate(prompt[:1], max_new_tokens=1, prompt_logprobs=0).prompt_logprobs == ()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_has_the_prompt_and_its_log_probabilities(served: Served, alone: Runtime, max_tokens: int) -> None:
    """As lm-eval asks for them."""
    tokens = alone.encode(PROMPT)
    for prompt in (PROMPT, tokens):
        asked = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": 1, "temperature": 0}
        body = served.http.post("/v1/completions", json=asked).json()
        (choice,), usage = body["choices"], body["usage"]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(PROMPT) and (max_tokens == 1 or choice["text"] == PROMPT)
        assert usage["completion_tokens"] == max_tokens and len(logprobs["tokens"]) == len(tokens) + max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        expected = alone.generate(tokens, max_new_tokens=1, prompt_logprobs=1).prompt_logprobs or ()
        assert logprobs["token_logprobs"][1 : len(tokens)] == pytest.approx([one.logprob for one in expected], abs=1e-4)
        assert "".join(logprobs["tokens"][: len(tokens)]) == PROMPT
        starts = logprobs["text_offset"][: len(tokens)]
        assert starts == [len("".join(logprobs["tokens"][:number])) for number in range(len(tokens))]
    plain = served.http.post("/v1/completions", json={"prompt": PROMPT, "echo": True, "max_tokens": 2}).json()
    assert plain["choices"][0]["text"].startswith(PROMPT) and plain["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": 4, "n": 2}, {"logprobs": None, "max_tokens": 4}])
def test_an_echo_streams_as_it_comes_whole(served: Served, fields: dict[str, Any]) -> None:
    """The prompt first, with its log-probabilities where they are asked for, then the answer."""
    asked = {"prompt": [PROMPT, "a"], "echo": True, "logprobs": 1, "temperature": 1, "seed": 4, **fields}
    whole = served.http.post("/v1/completions", json=asked).json()
    usage = {"stream_options": {"include_usage": True}}
    with served.http.stream("POST", "/v1/completions", json={**asked, "stream": True, **usage}) as response:
        *chunks, last = events_of(response)
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert own[0]["text"].startswith(PROMPT if choice["index"] < len(whole["choices"]) / 2 else "a")
        assert "".join(one["text"] for one in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        parts = [one["logprobs"] for one in own if one["logprobs"]]
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for part in parts for value in part[name]] == values
        assert bool(parts) == (choice["logprobs"] is not None)


def test_no_answer_is_for_an_echo_alone(served: Served) -> None:
    assert served.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0}).status_code == 400


def test_a_stream_tells_places_of_tokens_within_its_text(served: Served) -> None:
    """As the whole answer does, also of tokens that turn out to be those of a stop string."""
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    whole = served.http.post("/v1/completions", json=asked).json()["choices"][0]
    places = whole["logprobs"]["text_offset"]
    for stop in (whole["text"][places[2] : places[6]], "no such text"):
        whole = served.http.post("/v1/completions", json={**asked, "stop": stop}).json()["choices"][0]
        response = served.http.post("/v1/completions", json={**asked, "stop": stop, "stream": True})
        parts = [event["choices"][0]["logprobs"] for event in events_of(response)]
        for name, values in whole["logprobs"].items():
            assert [value for part in parts if part is not None for value in part[name]] == values
