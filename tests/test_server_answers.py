"""OpenAI's own client against a real server: answers are those of `Runtime.generate`, streamed or not; and when an
answer may end, and at what, and how likely its prompt was: the same whatever is proposed, in Python and over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from tests.helpers.engine import PROMPT, load
from tests.helpers.server import MODEL, Served, events_of, serving

TARGET = "two_layer_target"
MESSAGES: Any = [{"role": "system", "content": "a link, a layer"}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def served(short_target: Path) -> Iterator[Served]:
    with serving(short_target, max_tokens=100) as served:
        yield served


@pytest.fixture(scope="module")
def alone(short_target: Path) -> Iterator[Runtime]:
    with load(short_target, draft="ngram") as runtime:
        yield runtime


def test_a_chat_gets_the_answer_that_generate_gives(served: Served, alone: Runtime) -> None:
    answer = served.ask(messages=MESSAGES, max_tokens=12, temperature=0.8, top_p=0.9, seed=7, user="somebody")
    expected = alone.generate(MESSAGES, max_new_tokens=12, temperature=0.8, top_p=0.9, seed=7)
    (choice,) = answer.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.stats.prompt_tokens
    assert answer.usage.completion_tokens == len(expected.tokens) == 12
    stats = answer.to_dict()["choices"][0]["x_stats"]  # type: ignore[index]
    assert (stats["seed"], stats["noise_id"], sum(stats["sources"].values())) == (7, 0, 12)
    assert stats["passes"] > 0 and stats["seconds"] > 0


def test_a_stream_says_the_same_as_a_whole_answer(served: Served) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 40}
    whole = served.openai.chat.completions.create(**asked)
    chunks = list(
        served.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert not chunks[-1].choices and chunks[-1].usage == whole.usage


def test_n_answers_draw_the_noise_ids_in_order(served: Served, alone: Runtime) -> None:
    answer = served.ask(messages=MESSAGES, max_tokens=8, temperature=1.0, seed=3, n=3)
    expected = [alone.generate(MESSAGES, max_new_tokens=8, temperature=1.0, seed=3, noise_id=i) for i in range(3)]
    assert [choice.message.content for choice in answer.choices] == [one.text for one in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected[0].stats.prompt_tokens
    assert answer.usage.completion_tokens == sum(len(one.tokens) for one in expected)


def test_penalties_and_biases_are_those_of_generate(served: Served, alone: Runtime) -> None:
    asked: dict[str, Any] = {
        "temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 1.5, "seed": 5,
    }  # fmt: skip
    usual = alone.generate(MESSAGES, max_new_tokens=16, temperature=1.0, seed=5)
    first, penalty = usual.tokens[0], {"repetition_penalty": 1.3}
    expected = alone.generate(MESSAGES, max_new_tokens=16, logit_bias={first: -100}, **penalty, **asked)
    answer = served.ask(messages=MESSAGES, max_tokens=16, logit_bias={str(first): -100}, extra_body=penalty, **asked)
    assert answer.choices[0].message.content == expected.text != usual.text


def test_a_random_seed_is_told_and_gives_the_answer_again(served: Served) -> None:
    first = served.chat(temperature=1.5, max_tokens=16).json()["choices"][0]
    other = served.chat(temperature=1.5, max_tokens=16).json()["choices"][0]
    seed = first["x_stats"]["seed"]
    assert seed != other["x_stats"]["seed"]
    again = served.chat(temperature=1.5, max_tokens=16, seed=seed).json()["choices"][0]
    assert again["message"] == first["message"]


def test_completions_take_texts_and_tokens(served: Served, alone: Runtime) -> None:
    tokens = alone.encode(PROMPT)
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    expected = alone.generate(PROMPT, max_new_tokens=6)
    for prompt in (PROMPT, tokens):
        answer = served.openai.completions.create(prompt=prompt, **asked)
        assert answer.choices[0].text == expected.text
    several = served.openai.completions.create(prompt=[PROMPT, "a slot"], n=2, **asked)
    texts = [choice.text for choice in several.choices]
    assert texts == [expected.text] * 2 + [alone.generate("a slot", max_new_tokens=6).text] * 2
    streamed = list(served.openai.completions.create(prompt=PROMPT, stream=True, **asked))
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text


def test_an_answer_ends_at_a_stop_string(served: Served, alone: Runtime) -> None:
    whole = alone.generate(MESSAGES, max_new_tokens=60)
    stop = next(letter for letter in whole.text if letter.isascii() and letter.isprintable())
    expected = alone.generate(MESSAGES, max_new_tokens=60, stop=stop)
    for given in (stop, [stop, "never said"]):
        answer = served.ask(messages=MESSAGES, temperature=0, max_tokens=60, stop=given)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == "stop"


def test_models_and_tokens_can_be_asked_for(served: Served, alone: Runtime) -> None:
    (model,) = served.openai.models.list()
    assert model.id == MODEL and served.openai.models.retrieve(MODEL).id == MODEL
    usual = served.http.post("/tokenize", json={"prompt": PROMPT}).json()
    assert usual["tokens"] == alone.encode(PROMPT) and usual["count"] == len(usual["tokens"])
    assert served.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == alone.encode(MESSAGES)
    assert served.http.post("/detokenize", json={"tokens": usual["tokens"]}).json() == {"prompt": PROMPT}
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("another")


def test_metrics_count_what_was_done(served: Served) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in served.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = read()
    served.chat(max_tokens=5, ignore_eos=True)
    after = read()
    for name, more in (
        ("tokens_total", 5), ("requests_finished_total", 1), ("request_seconds_count", 1),
        ("time_to_first_token_seconds_count", 1),
    ):  # fmt: skip
        assert after[f"offload_runtime_{name}"] - before[f"offload_runtime_{name}"] == more
    assert after["offload_runtime_passes_total"] > before["offload_runtime_passes_total"]
    assert after["offload_runtime_requests_running"] == after["offload_runtime_requests_waiting"] == 0


@pytest.mark.parametrize(("fields", "param"), [
    ({"frobnicate": 1}, "frobnicate"), ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"),
    ({"n": 0}, "n"), ({"n": 100}, "n"), ({"logprobs": 3}, "logprobs"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5000": 1}}, None), ({"presence_penalty": 3}, "presence_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"messages": []}, "messages"), ({"messages": [{"content": "no role"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"), ({"tools": [{"type": "function"}]}, "tools"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None),
    ({"chat_template_kwargs": {"tokenize": True}}, None), ({"x_sources": True}, "x_sources"), ({"stop": [""]}, None),
])  # fmt: skip
def test_what_is_refused_is_named(served: Served, fields: dict[str, Any], param: str | None) -> None:
    response = served.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and error["type"] == "invalid_request_error"


def test_log_probabilities_are_the_models(served: Served, alone: Runtime) -> None:
    """In a chat, in a stream of it, and in a plain completion, as OpenAI writes each."""
    expected = alone.generate(MESSAGES, max_new_tokens=9, temperature=0.8, seed=7, logprobs=3, stop="k").logprobs or ()
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, "temperature": 0.8, "seed": 7}
    asked |= {"logprobs": True, "top_logprobs": 3, "stop": "k"}
    whole = served.openai.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert [one.logprob for one in whole.content] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    for one, known in zip(whole.content, expected, strict=True):
        said = alone.tokenizer.decode([known.token])
        assert (one.token == said or "\ufffd" in said) and len(one.top_logprobs) == 3
        assert bytes(one.bytes or []).decode(errors="replace") == said
    streamed = served.openai.chat.completions.create(**asked, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices]
    assert [one for part in parts if part is not None for one in part.content or ()] == whole.content
    choice = served.openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2
    ).choices[0]  # fmt: skip
    usual, offsets = choice.logprobs, choice.logprobs and choice.logprobs.text_offset
    assert usual is not None and usual.tokens is not None and usual.top_logprobs is not None and offsets is not None
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(choice.text)
    assert [max(top.values()) for top in usual.top_logprobs] == usual.token_logprobs


WORDS = "the quick brown fox jumps over the lazy dog, the quick brown"
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"draft": "none"}, "ngram": {"draft": "ngram", "max_batch": 2}, "chain": {"gamma": 3},
    "tree": {"tree_nodes": 8},
}  # fmt: skip


@pytest.fixture(scope="module", params=DRAFTS)
def runtime(request: pytest.FixtureRequest, two_layer_target: Path) -> Iterator[Runtime]:
    with load(two_layer_target, **{"draft": two_layer_target, **DRAFTS[request.param]}) as runtime:
        yield runtime


@pytest.mark.few(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_an_answer_before_min_tokens(runtime: Runtime, plain: Runtime, temperature: float) -> None:
    end = plain.tokenizer.eos_token_id
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 24, "logit_bias": {end: 100.0}}
    assert plain.generate(WORDS, **options).tokens == [end]
    for count in (1, 9):
        result = runtime.generate(WORDS, min_tokens=count, **options)
        assert end not in result.tokens[:-1] and result.tokens[-1] == end and len(result.tokens) == count + 1
        assert result.finish_reason == "stop"
        assert result.tokens == plain.generate(WORDS, min_tokens=count, **options).tokens
        banned = {**options, "logit_bias": {end: -100.0}, "max_new_tokens": count}
        assert result.tokens[:-1] == plain.generate(WORDS, **banned).tokens


def test_stop_tokens_end_an_answer_and_wait_as_long(runtime: Runtime, plain: Runtime) -> None:
    said = plain.generate(WORDS, max_new_tokens=16, ignore_eos=True).tokens
    at = next(place for place in range(4, 16) if said[place] not in said[:place])
    for ignoring in (False, True):
        result = runtime.generate(WORDS, max_new_tokens=16, stop_token_ids=[said[at]], ignore_eos=ignoring)
        assert result.tokens == said[: at + 1] and result.finish_reason == "stop"
    assert result.text == plain.generate(WORDS, max_new_tokens=at, ignore_eos=True).text
    how: dict[str, Any] = {"max_new_tokens": 16, "min_tokens": at + 2, "stop_token_ids": [said[at]], "ignore_eos": True}
    result = runtime.generate(WORDS, **how)
    assert said[at] not in result.tokens[: at + 2] and result.tokens == plain.generate(WORDS, **how).tokens


def test_a_stop_string_waits_as_well(plain: Runtime) -> None:
    usual = plain.generate(WORDS, max_new_tokens=16, ignore_eos=True)
    assert len(plain.generate(WORDS, max_new_tokens=16, ignore_eos=True, stop=usual.text[0]).tokens) < 8
    later = plain.generate(WORDS, max_new_tokens=16, ignore_eos=True, stop=usual.text[0], min_tokens=8)
    assert later.tokens[:8] == usual.tokens[:8]


@pytest.mark.parametrize(("options", "message"), [
    ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is more than the 8"),
    ({"min_tokens": 1, "json_schema": {"type": "object"}}, "drop min_tokens"),
    ({"stop_token_ids": [100_000]}, "outside the vocabulary"), ({"stop_token_ids": [-1]}, "below 0"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(plain: Runtime, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plain.generate(WORDS, **options)


@pytest.fixture(scope="module")
def server(two_layer_target: Path) -> Iterator[Served]:
    with serving(two_layer_target, load_options={"context": 512}) as server:
        yield server


def test_a_request_may_say_so_as_well(server: Served, plain: Runtime) -> None:
    end = plain.tokenizer.eos_token_id
    asked = {"max_tokens": 24, "min_tokens": 9, "logit_bias": {str(end): 100}}
    assert server.chat(**asked).json()["usage"]["completion_tokens"] == 10
    first = plain.generate([{"role": "user", "content": "the quick brown fox"}], max_new_tokens=1).tokens
    ended = server.chat(max_tokens=8, stop_token_ids=first).json()
    assert ended["usage"]["completion_tokens"] == 1 and ended["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_log_probabilities_of_a_prompt_are_the_models(two_layer_target: Path, plain: Runtime, kv: str) -> None:
    prompt = plain.encode(WORDS * 7)  # of several windows
    (logits,) = plain.logits(prompt[:1], [prompt[1:]])
    rows = logits.float().log_softmax(dim=1)
    expected = rows.gather(1, torch.tensor(prompt[1:])[:, None]).flatten().tolist()
    with load(two_layer_target, draft="ngram", kv=kv, context=1024, max_batch=2) as runtime:
        usual = runtime.generate(prompt, max_new_tokens=5)
        for _ in range(2):  # nothing that is kept of the first is taken for read
            result = runtime.generate(prompt, max_new_tokens=5, prompt_logprobs=2)
            assert result.tokens == usual.tokens and result.prompt_logprobs is not None
            assert [one.token for one in result.prompt_logprobs] == prompt[1:]
            assert [one.logprob for one in result.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
            assert [one.top[0][0] for one in result.prompt_logprobs] == rows.argmax(dim=1).tolist()
        assert runtime.generate(prompt[:1], max_new_tokens=1, prompt_logprobs=0).prompt_logprobs == ()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_has_the_prompt_and_its_log_probabilities(server: Served, plain: Runtime, max_tokens: int) -> None:
    """As lm-eval asks for them."""
    tokens = plain.encode(WORDS)
    for prompt in (WORDS, tokens):
        asked = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": 1, "temperature": 0}
        body = server.http.post("/v1/completions", json=asked).json()
        (choice,), usage = body["choices"], body["usage"]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(WORDS) and (max_tokens == 1 or choice["text"] == WORDS)
        assert usage["completion_tokens"] == max_tokens and len(logprobs["tokens"]) == len(tokens) + max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        expected = plain.generate(tokens, max_new_tokens=1, prompt_logprobs=1).prompt_logprobs or ()
        assert logprobs["token_logprobs"][1 : len(tokens)] == pytest.approx([one.logprob for one in expected], abs=1e-4)
        assert "".join(logprobs["tokens"][: len(tokens)]) == WORDS
        starts = logprobs["text_offset"][: len(tokens)]
        assert starts == [len("".join(logprobs["tokens"][:number])) for number in range(len(tokens))]
    usual = server.http.post("/v1/completions", json={"prompt": WORDS, "echo": True, "max_tokens": 2}).json()
    assert usual["choices"][0]["text"].startswith(WORDS) and usual["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": 4, "n": 2}, {"logprobs": None, "max_tokens": 4}])
def test_an_echo_streams_as_it_comes_whole(server: Served, fields: dict[str, Any]) -> None:
    """The prompt first, with its log-probabilities where they are asked for, then the answer."""
    asked = {"prompt": [WORDS, "a"], "echo": True, "logprobs": 1, "temperature": 1, "seed": 4, **fields}
    whole = server.http.post("/v1/completions", json=asked).json()
    usage = {"stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/completions", json={**asked, "stream": True, **usage}) as response:
        *chunks, last = events_of(response)
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert own[0]["text"].startswith(WORDS if choice["index"] < len(whole["choices"]) / 2 else "a")
        assert "".join(one["text"] for one in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        parts = [one["logprobs"] for one in own if one["logprobs"]]
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for part in parts for value in part[name]] == values
        assert bool(parts) == (choice["logprobs"] is not None)


def test_no_answer_is_for_an_echo_alone(server: Served) -> None:
    assert server.http.post("/v1/completions", json={"prompt": WORDS, "max_tokens": 0}).status_code == 400


def test_a_stream_tells_places_of_tokens_within_its_text(server: Served) -> None:
    """As the whole answer does, also of tokens that turn out to be those of a stop string."""
    asked = {"prompt": WORDS, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    whole = server.http.post("/v1/completions", json=asked).json()["choices"][0]
    places = whole["logprobs"]["text_offset"]
    for stop in (whole["text"][places[2] : places[6]], "no such text"):
        whole = server.http.post("/v1/completions", json={**asked, "stop": stop}).json()["choices"][0]
        response = server.http.post("/v1/completions", json={**asked, "stop": stop, "stream": True})
        parts = [event["choices"][0]["logprobs"] for event in events_of(response)]
        for name, values in whole["logprobs"].items():
            assert [value for part in parts if part is not None for value in part[name]] == values
