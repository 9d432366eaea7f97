"""A chat: only what is new goes through prefill, and the answers are those of a fresh start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.config import GenerationParams, SamplingParams, SpeculationOptions
from offload_runtime.engine import Conversation, Runtime
from offload_runtime.engine.generate import TokenStream
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.sampling import sample
from offload_runtime.speculation import step as rounds
from tests.helpers.engine import load, one_thread, raising, write_checkpoint, write_noisy_copy  # noqa: F401

COUNT = 12


@pytest.fixture(scope="module", params=["ngram", "model", "triforce"])
def runtime(target: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    draft = target.parent / "draft"
    if request.param != "ngram" and not draft.exists():
        write_noisy_copy(target, draft, noise=0.03)
    options: dict[str, Any] = {"draft": "ngram" if request.param == "ngram" else draft, "resident_layers": 2}
    if request.param == "triforce":
        speculation = SpeculationOptions("triforce", budget_tokens=64, gamma_draft=2)
        options |= {"kv": "host", "speculation": speculation, "resident_layers": "auto"}
    with load(target, **options) as runtime:
        yield runtime


class Spy:
    """Remembers the tokens that go through the target's prefill, and the prompts."""

    def __init__(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefilled: list[list[int]] = []
        self.prompts: list[list[int]] = []
        runner = runtime.parts.target.runner
        prefill, start = runner.prefill, runtime.start

        def spy_prefill(sequence: int, tokens: list[int], *args: Any) -> Any:
            self.prefilled.append(list(tokens))
            return prefill(sequence, tokens, *args)

        def spy_start(tokens: list[int], *args: Any, **options: Any) -> TokenStream:
            self.prompts.append(list(tokens))
            return start(tokens, *args, **options)

        monkeypatch.setattr(runner, "prefill", spy_prefill)
        monkeypatch.setattr(runtime, "start", spy_start)


@pytest.fixture
def spy(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(runtime, monkeypatch)


def say(conversation: Conversation, text: str, **options: Any) -> list[int]:
    """The tokens of a whole answer."""
    turn = conversation.say(text, **{"max_new_tokens": COUNT, "ignore_eos": True, **options})
    assert "".join(turn) == turn.result.text == conversation.messages[-1]["content"]
    assert conversation.messages[-2:][0] == {"role": "user", "content": text}
    return turn.result.tokens


def assert_as_from_scratch(runtime: Runtime, prompt: list[int], tokens: list[int], **options: Any) -> None:
    """A plain generation of the whole prompt says the same."""
    fresh = runtime.generate(prompt, max_new_tokens=len(tokens), ignore_eos=True, speculate=False, **options)
    assert fresh.tokens == tokens


def test_only_what_is_new_goes_through_prefill(runtime: Runtime, spy: Spy) -> None:
    conversation = runtime.conversation("slot")
    said = [say(conversation, text) for text in ("the fox", "and the dog", "on and on")]
    assert spy.prefilled[0] == spy.prompts[0] == runtime.encode([*conversation.messages[:2]])
    for turn in (1, 2):
        # The last token of the answer has not been through a pass yet.
        known = len(spy.prompts[turn - 1]) + len(said[turn - 1]) - 1
        assert spy.prompts[turn][: known + 1] == spy.prompts[turn - 1] + said[turn - 1]
        assert spy.prefilled[turn] == spy.prompts[turn][known:]
    text = runtime.tokenizer.decode(spy.prompts[2])
    assert text.startswith("<|im_start|>system\nslot<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n")
    assert text.endswith("<|im_end|>\n<|im_start|>user\non and on<|im_end|>\n<|im_start|>assistant\n")
    assert conversation.num_tokens == len(spy.prompts[2]) + COUNT
    for prompt, tokens in zip(list(spy.prompts), said, strict=True):
        assert_as_from_scratch(runtime, prompt, tokens)


def test_sampled_answers_are_those_of_a_fresh_start(runtime: Runtime, spy: Spy) -> None:
    conversation, options = runtime.conversation(), {"temperature": 0.7, "seed": 9}
    said = [say(conversation, text, **options) for text in ("a link", "a layer")]
    assert len(spy.prefilled[1]) < len(spy.prompts[1])
    for prompt, tokens in zip(list(spy.prompts), said, strict=True):
        assert_as_from_scratch(runtime, prompt, tokens, **options)


def test_an_answer_that_ends_by_itself_is_kept_too(runtime: Runtime, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    end, last = runtime.tokenizer.eos_token_id, len(runtime.encode([{"role": "user", "content": "the fox"}])) + 5

    def ending_sample(logits: Any, how: Any, positions: Any, slots: Any) -> Any:
        """The random model never ends by itself: it does in its sixth token here."""
        return sample(logits, how, positions, slots).masked_fill(positions == last, end)

    monkeypatch.setattr(rounds, "sample", ending_sample)
    conversation = runtime.conversation()
    turn = conversation.say("the fox", max_new_tokens=COUNT)
    list(turn)
    assert turn.result.finish_reason == "stop" and turn.result.tokens[5:] == [end]
    said = say(conversation, "dog")
    known = len(spy.prompts[0]) + 5
    assert spy.prompts[1][: known + 1] == spy.prompts[0] + turn.result.tokens
    assert spy.prefilled[1] == spy.prompts[1][known:]
    assert spy.prompts[1].count(end) == 3  # two messages of the user, one answer: not written twice
    assert_as_from_scratch(runtime, list(spy.prompts[1]), said)


def test_options_may_be_given_as_params(runtime: Runtime) -> None:
    params = GenerationParams(COUNT, ignore_eos=True, sampling=SamplingParams(0.7, seed=9))
    by_name: dict[str, Any] = {"max_new_tokens": COUNT, "ignore_eos": True, "temperature": 0.7, "seed": 9}
    turn = runtime.conversation().say("dog", params=params)
    assert list(turn) and turn.result.tokens == say(runtime.conversation(), "dog", **by_name)
    assert "".join(runtime.stream("dog", params=params)) == runtime.generate("dog", **by_name).text
    assert runtime.generate("dog", params=params).tokens == runtime.generate("dog", **by_name).tokens
    for start in (runtime.stream, runtime.generate, runtime.conversation().say):
        with pytest.raises(OptionError, match="options are given twice"):
            start("dog", params=params, seed=9)


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_interrupted_answer_stays_as_far_as_it_got(runtime: Runtime, spy: Spy, pieces: int) -> None:
    conversation = runtime.conversation()
    turn = conversation.say("the fox", max_new_tokens=COUNT, ignore_eos=True)
    shown = "".join(next(turn) for _ in range(pieces))
    turn.close()
    turn.close()
    assert turn.result.finish_reason == "interrupted"
    assert len(conversation.messages) == 2 and conversation.messages[-1]["content"].startswith(shown)
    said = say(conversation, "dog")
    kept = len(spy.prompts[0]) + len(turn.result.tokens)
    assert spy.prompts[1][:kept] == spy.prompts[0] + turn.result.tokens
    assert spy.prefilled[1] == spy.prompts[1][kept - 1 :]
    assert_as_from_scratch(runtime, list(spy.prompts[1]), said)


@pytest.mark.parametrize("after", [2, 7])
def test_ctrl_c_in_an_answer(runtime: Runtime, spy: Spy, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = runtime.conversation()
    say(conversation, "the fox")
    decoder = runtime.parts.target.runner.decoder
    with monkeypatch.context() as patch:  # 2: within prefill, 7: within the first pass
        patch.setattr(decoder, "layer", raising(KeyboardInterrupt(), after=after, then=decoder.layer))
        turn = conversation.say("dog", max_new_tokens=COUNT, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt):
            list(turn)
    turn.close()
    assert len(turn.result.tokens) == int(after == 7)
    said = say(conversation, "slot")
    assert len(spy.prefilled[2]) < len(spy.prompts[2]) - len(spy.prompts[0])
    assert_as_from_scratch(runtime, list(spy.prompts[2]), said)


def test_other_generations_in_between(runtime: Runtime, spy: Spy) -> None:
    first, second = runtime.conversation("a"), runtime.conversation("b")
    turns = []
    for text in ("the fox", "and the dog"):
        for conversation in (first, second):
            tokens = say(conversation, text)
            turns.append((spy.prompts[-1], spy.prefilled[-1], tokens))
        runtime.generate("quick", max_new_tokens=5)
    for prompt, prefilled, tokens in turns:
        assert prefilled == prompt
        assert_as_from_scratch(runtime, prompt, tokens)


def test_turns_that_were_never_asked_for_or_overtaken(runtime: Runtime, spy: Spy) -> None:
    conversation = runtime.conversation()
    say(conversation, "the fox")
    before = conversation.to_json()
    abandoned = conversation.say("never heard", max_new_tokens=COUNT)
    assert conversation.to_json() == before
    begun = conversation.say("half heard", max_new_tokens=COUNT, ignore_eos=True)
    next(begun)
    assert conversation.to_json() == before
    said = say(conversation, "dog")
    assert_as_from_scratch(runtime, list(spy.prompts[-1]), said)
    for turn in (abandoned, begun):
        with pytest.raises(OptionError, match="another generation"):
            list(turn)


def test_reset_and_another_system_message(runtime: Runtime, spy: Spy) -> None:
    conversation = runtime.conversation("slot")
    first = say(conversation, "the fox")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "slot"}] and conversation.num_tokens == 0
    assert say(conversation, "the fox") == first
    conversation.set_system(None)
    assert conversation.messages == []
    said = say(conversation, "the fox")
    assert "slot" not in runtime.tokenizer.decode(spy.prompts[-1])
    assert_as_from_scratch(runtime, list(spy.prompts[-1]), said)


def test_save_and_restore(runtime: Runtime, spy: Spy) -> None:
    conversation = runtime.conversation("slot")
    say(conversation, "the fox")
    saved = json.loads(json.dumps(conversation.to_json()))
    restored = runtime.conversation()
    restored.restore(saved)
    assert restored.messages == conversation.messages
    said = say(restored, "dog")
    assert spy.prompts[-1] == runtime.encode(restored.messages[:-1])
    assert_as_from_scratch(runtime, list(spy.prompts[-1]), said)
    assert len(saved["messages"]) == 3, "what was restored from is not changed by going on"


@pytest.mark.parametrize(
    "saved",
    [None, [], {}, {"version": 2, "messages": []}, {"version": 1}, {"version": 1, "messages": [{"role": "user"}]},
     {"version": 1, "messages": [{"role": "robot", "content": "x"}]}, {"version": 1, "messages": ["hi"]}],
    ids=str,
)  # fmt: skip
def test_nonsense_is_not_restored(runtime: Runtime, saved: Any) -> None:
    conversation = runtime.conversation("slot")
    with pytest.raises(OptionError):
        conversation.restore(saved)
    assert conversation.messages == [{"role": "system", "content": "slot"}]


def test_a_full_context_is_an_error_and_no_end(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(target, context=100) as runtime:
        spy = Spy(runtime, monkeypatch)
        conversation = runtime.conversation()
        turn = conversation.say("fox", max_new_tokens=1000, ignore_eos=True)
        list(turn)
        assert len(spy.prompts[0]) + len(turn.result.tokens) == 100  # an answer ends where the context does
        assert turn.result.finish_reason == "length"
        before = conversation.to_json()
        for _ in range(2):
            with pytest.raises(ContextLengthError, match=r"ends at 100.*/reset.*--context"):
                conversation.say("and the dog")
            assert conversation.to_json() == before
        conversation.reset()
        assert_as_from_scratch(runtime, list(spy.prompts[0]), say(conversation, "fox"))


def test_a_conversation_that_outgrows_the_short_frequencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """longrope rotates all keys otherwise once the text is long: what was cached before then is of no use."""
    path = write_checkpoint(tmp_path / "target")
    config = json.loads((path / "config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 84,
        "short_factor": [1.0] * half, "long_factor": [3.0 + index for index in range(half)],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    with load(path, draft="ngram") as runtime:
        spy, conversation = Spy(runtime, monkeypatch), runtime.conversation()
        texts = ("the fox", "jumps over the lazy dog", "and the quick", "fox", "dog")
        said = [say(conversation, text) for text in texts]
        prompts, prefilled = list(spy.prompts), list(spy.prefilled)
        assert len(prompts[1]) < 84 - COUNT and len(prompts[-2]) > 84
        whole = [new == prompt for new, prompt in zip(prefilled, prompts, strict=True)]
        assert whole.count(True) == 2 and whole[0] and not whole[-1]
        for prompt, tokens in zip(prompts, said, strict=True):
            assert_as_from_scratch(runtime, prompt, tokens)
