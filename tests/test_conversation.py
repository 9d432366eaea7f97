"""A chat: only what is new goes through prefill, and the answers are those of a fresh start."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Conversation, GenerationResult, Runtime
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from tests.helpers.engine import load, raising

COUNT = 12
SAMPLED = {"temperature": 0.7, "seed": 9}


@pytest.fixture(scope="module", params=["ngram", "model", "triforce"])
def runtime(target: Path, draft: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    options: dict[str, Any] = {"draft": "ngram" if request.param == "ngram" else draft, "resident_layers": 2}
    if request.param == "triforce":
        speculation = SpeculationOptions("triforce", budget_tokens=64, gamma_draft=2)
        options |= {"kv": "host", "speculation": speculation, "resident_layers": "auto"}
    with load(target, **options) as runtime:
        yield runtime


def say(conversation: Conversation, text: str, **options: Any) -> GenerationResult:
    """A whole answer."""
    turn = conversation.say(text, **{"max_new_tokens": COUNT, "ignore_eos": True, **options})
    assert "".join(turn) == turn.result.text == conversation.messages[-1]["content"]
    assert conversation.messages[-2:][0] == {"role": "user", "content": text}
    return turn.result


def behind(runtime: Runtime, prompt: list[int], said: list[int], text: str) -> list[int]:
    """The prompt of a message behind an answer, whose tokens stay what they were."""
    return [*prompt, *said, *runtime.encode(f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")]


def assert_as_from_scratch(runtime: Runtime, prompt: list[int], tokens: list[int], **options: Any) -> None:
    """A plain generation of the whole prompt says the same."""
    fresh = runtime.generate(prompt, max_new_tokens=len(tokens), ignore_eos=True, speculate=False, **options)
    assert fresh.tokens == tokens and fresh.stats.kept_tokens == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_only_what_is_new_goes_through_prefill(runtime: Runtime, options: dict[str, Any]) -> None:
    conversation, texts = runtime.conversation("slot"), ("the fox", "and the dog", "on and on")
    said = [say(conversation, text, **options) for text in texts]
    prompts = [runtime.encode([{"role": "system", "content": "slot"}, {"role": "user", "content": texts[0]}])]
    for text, result in zip(texts[1:], said, strict=False):
        prompts.append(behind(runtime, prompts[-1], result.tokens, text))
    for turn, (prompt, result) in enumerate(zip(prompts, said, strict=True)):
        assert result.stats.prompt_tokens == len(prompt)
        # The last token of the answer before has not been through a pass yet.
        assert result.stats.kept_tokens == (len(prompts[turn - 1]) + COUNT - 1 if turn else 0)
    assert conversation.num_tokens == len(prompts[2]) + COUNT
    for prompt, result in zip(prompts, said, strict=True):
        assert_as_from_scratch(runtime, prompt, result.tokens, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("within", ["the prompt", "the answer"])
def test_a_turn_that_is_broken_off(runtime: Runtime, within: str) -> None:
    conversation = runtime.conversation()
    first = say(conversation, "the fox")
    hook = raising(KeyboardInterrupt(), after=2) if within == "the prompt" else None
    turn = conversation.say("dog", max_new_tokens=COUNT, ignore_eos=True, on_prefill=hook)
    if hook is None:
        next(turn)
    else:
        with pytest.raises(KeyboardInterrupt):
            next(turn)
    turn.close()
    broken = turn.result.tokens
    assert (len(broken) == 0) == (hook is not None)
    said = say(conversation, "slot")
    assert said.stats.kept_tokens >= first.stats.prompt_tokens + COUNT - 1
    prompt = runtime.encode([{"role": "user", "content": "the fox"}])
    prompt = behind(runtime, behind(runtime, prompt, first.tokens, "dog"), broken, "slot")
    assert_as_from_scratch(runtime, prompt, said.tokens)


@pytest.mark.few(1)
def test_going_back_reads_nothing_again(runtime: Runtime) -> None:
    conversation = runtime.conversation("slot")
    first, second = say(conversation, "the fox"), say(conversation, "and the dog")
    messages, prompt_tokens = list(conversation.messages), second.stats.prompt_tokens
    options = GenerationParams(COUNT, ignore_eos=True, sampling=SamplingParams(0.9, seed=3, noise_id=5))
    anew = conversation.regenerate(options)
    assert conversation.messages == messages  # until it ends
    assert "".join(anew) == anew.result.text != messages[-1]["content"]
    assert conversation.messages == [*messages[:-1], {"role": "assistant", "content": anew.result.text}]
    assert (anew.result.stats.prompt_tokens, anew.result.stats.kept_tokens) == (prompt_tokens, prompt_tokens - 1)
    again = say(conversation, "on and on")  # behind the new answer
    assert again.stats.kept_tokens == prompt_tokens + COUNT - 1
    assert (conversation.undo(), conversation.undo()) == ("on and on", "and the dog")
    assert conversation.messages == messages[:3] and conversation.num_tokens == first.stats.prompt_tokens + COUNT
    once_more = say(conversation, "and the dog")
    assert once_more.tokens == second.tokens and once_more.stats.kept_tokens == prompt_tokens - 1
    assert conversation.undo() and conversation.undo() == "the fox"
    assert conversation.messages == messages[:1] and conversation.num_tokens == 0
    for go_back in (conversation.undo, lambda: conversation.regenerate(options)):
        with pytest.raises(OptionError, match="no message yet"):
            go_back()
    assert say(conversation, "the fox").tokens == first.tokens
    prompt = behind(runtime, runtime.encode(messages[:2]), first.tokens, "and the dog")
    assert_as_from_scratch(runtime, prompt, anew.result.tokens, temperature=0.9, seed=3, noise_id=5)
    assert_as_from_scratch(runtime, behind(runtime, prompt, anew.result.tokens, "on and on"), again.tokens)


@pytest.mark.parametrize(
    "saved",
    [None, [], {}, {"version": 2, "messages": []}, {"version": 1}, {"version": 1, "messages": [{"role": "user"}]},
     {"version": 1, "messages": [{"role": "robot", "content": "x"}]}, {"version": 1, "messages": ["hi"]}],
    ids=str,
)  # fmt: skip
def test_nonsense_is_not_loaded(runtime: Runtime, tmp_path: Path, saved: Any) -> None:
    conversation, path = runtime.conversation("slot"), tmp_path / "chat.json"
    path.write_text(json.dumps(saved))
    with pytest.raises(OptionError):
        conversation.load(path)
    assert conversation.messages == [{"role": "system", "content": "slot"}]


@pytest.mark.slow
def test_a_full_context_is_an_error_and_no_end(target: Path) -> None:
    with load(target, context=100) as runtime:
        conversation = runtime.conversation()
        turn = conversation.say("fox", max_new_tokens=1000, ignore_eos=True)
        list(turn)
        assert turn.result.stats.prompt_tokens + len(turn.result.tokens) == 100  # it ends where the context does
        assert turn.result.finish_reason == "length"
        before = conversation.to_json()
        for _ in range(2):
            with pytest.raises(ContextLengthError, match=r"ends at 100.*/reset.*--context"):
                conversation.say("and the dog")
            assert conversation.to_json() == before
        conversation.reset()
        said = say(conversation, "fox")
        assert_as_from_scratch(runtime, runtime.encode([{"role": "user", "content": "fox"}]), said.tokens)
