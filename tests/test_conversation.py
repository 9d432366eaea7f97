"""A chat: only what is new goes through prefill, and the answers are those of a fresh start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.config import SpeculationOptions
from offload_runtime.core import Batch
from offload_runtime.engine import Conversation, Runtime
from offload_runtime.engine.conversation import Reply
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.runners import Decoder, ModelRunner, decide
from offload_runtime.sampling import SlotSampling
from offload_runtime.weights import Weight
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.test_engine_endings import ctrl_c

COUNT = 12


@pytest.fixture(scope="module", params=["ngram", "model", "triforce"])
def runtime(target: Path, draft: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    options: dict[str, Any] = {"draft": "ngram" if request.param == "ngram" else draft, "resident_layers": 2}
    if request.param == "triforce":
        speculation = SpeculationOptions("triforce", budget_tokens=64, gamma_draft=2)
        options |= {"kv": "host", "speculation": speculation, "resident_layers": "auto"}
    with load(target, **options) as runtime:
        yield runtime


@contextmanager
def working_with(runtime: Runtime, **others: Any) -> Iterator[None]:
    """Generations that begin meanwhile work with other parts."""
    before = {name: getattr(runtime.engine, name) for name in others}
    vars(runtime.engine).update(others)
    try:
        yield
    finally:
        vars(runtime.engine).update(before)


class InterruptedDecoder(Decoder):
    """The maths of a model, with a hook of every layer, called before it."""

    def __init__(self, model: LoadedModel, hook: Callable[..., None]) -> None:
        own = model.runner.decoder
        shared = {"embedding": own.embedding, "lm_head": own.lm_head, "final_norm": Weight(own.final_norm)}
        super().__init__(model.config, shared)
        self._hook = hook

    def layer(self, *args: Any) -> None:
        self._hook()
        super().layer(*args)


def interrupted(model: LoadedModel, after: int) -> LoadedModel:
    """The same model, in which Ctrl-C comes once: within the layer that follows so many."""
    runner = model.runner
    decoder = InterruptedDecoder(model, ctrl_c(after))
    return replace(model, runner=ModelRunner(decoder, runner.streamer, runner.cache, runner.rope, runner.chunk_tokens))


class SpiedRunner(ModelRunner):
    """A target that remembers the tokens that go through its prefill, and which ends the text once if it is told to."""

    def __init__(self, runner: ModelRunner, end: int) -> None:
        super().__init__(runner.decoder, runner.streamer, runner.cache, runner.rope, runner.chunk_tokens)
        self.prefilled: list[list[int]] = []
        self.end, self.end_at = end, -1  # the token, and where in a sequence nothing else is likely

    def forward(self, batch: Batch, sampling: SlotSampling | None = None, **options: Any) -> Batch:
        self.prefilled += [list(tokens) for tokens in batch.prompts.values()]
        committed = [self.cache.length(slot) for slot in batch.trees]
        super().forward(batch, None if committed else sampling, **options)
        if committed:
            starts = zip(batch.trees.values(), committed, strict=True)
            behind = [start + 1 + depth for tree, start in starts for depth in tree.depths]
            ends = torch.tensor(behind)[:, None] == self.end_at
            likely = ends & (torch.arange(batch.logits.shape[1]) == self.end)
            batch.logits = batch.logits.masked_fill(likely, 1e9)
            assert sampling is not None
            decide(batch, sampling, committed)
        return batch


class Spy:
    """Conversations whose prompts are remembered, and the tokens that go through the target's prefill."""

    def __init__(self, runtime: Runtime) -> None:
        self.prompts: list[list[int]] = []
        self._runtime, self.room = runtime, runtime.room
        target = runtime.engine.target
        self.runner = SpiedRunner(target.runner, runtime.tokenizer.eos_token_id)
        runtime.engine.target = replace(target, runner=self.runner)

    @property
    def prefilled(self) -> list[list[int]]:
        return self.runner.prefilled

    def conversation(self, system: str | None = None) -> Conversation:
        """As of the runtime, but for whom it asks to start."""
        stand_in: Any = self
        return Conversation(stand_in, system)

    def start(self, tokens: list[int], *args: Any, **options: Any) -> Reply:
        self.prompts.append(list(tokens))
        return self._runtime.start(tokens, *args, **options)


@pytest.fixture
def spy(runtime: Runtime) -> Iterator[Spy]:
    before = runtime.engine.target
    yield Spy(runtime)
    runtime.engine.target = before


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


@pytest.mark.few(2)
def test_only_what_is_new_goes_through_prefill(runtime: Runtime, spy: Spy) -> None:
    conversation = spy.conversation("slot")
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


@pytest.mark.few(1)
def test_sampled_answers_are_those_of_a_fresh_start(runtime: Runtime, spy: Spy) -> None:
    conversation, options = spy.conversation(), {"temperature": 0.7, "seed": 9}
    said = [say(conversation, text, **options) for text in ("a link", "a layer")]
    assert len(spy.prefilled[1]) < len(spy.prompts[1])
    for prompt, tokens in zip(list(spy.prompts), said, strict=True):
        assert_as_from_scratch(runtime, prompt, tokens, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("after", [2, 7])
def test_ctrl_c_in_an_answer(runtime: Runtime, spy: Spy, after: int) -> None:
    conversation = spy.conversation()
    say(conversation, "the fox")
    with working_with(runtime, target=interrupted(runtime.engine.target, after)):  # 2: in prefill, 7: the first pass
        turn = conversation.say("dog", max_new_tokens=COUNT, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt):
            list(turn)
    turn.close()
    assert len(turn.result.tokens) == int(after == 7)
    said = say(conversation, "slot")
    assert len(spy.prefilled[-1]) < len(spy.prompts[2]) - len(spy.prompts[0])
    assert_as_from_scratch(runtime, list(spy.prompts[2]), said)


@pytest.mark.few(1)
def test_going_back_reads_nothing_again(runtime: Runtime, spy: Spy) -> None:
    conversation = spy.conversation("slot")
    first, second = say(conversation, "the fox"), say(conversation, "and the dog")
    messages = list(conversation.messages)
    options = GenerationParams(COUNT, ignore_eos=True, sampling=SamplingParams(0.9, seed=3, noise_id=5))
    anew = conversation.regenerate(options)
    assert conversation.messages == messages  # until it ends
    assert "".join(anew) == anew.result.text != messages[-1]["content"]
    assert conversation.messages == [*messages[:-1], {"role": "assistant", "content": anew.result.text}]
    assert spy.prompts[2] == spy.prompts[1] and spy.prefilled[2] == spy.prompts[1][-1:]
    again = say(conversation, "on and on")  # behind the new answer
    assert spy.prompts[3][: len(spy.prompts[1]) + COUNT] == spy.prompts[1] + anew.result.tokens
    assert (conversation.undo(), conversation.undo()) == ("on and on", "and the dog")
    assert conversation.messages == messages[:3] and conversation.num_tokens == len(spy.prompts[0]) + COUNT
    assert say(conversation, "and the dog") == second and spy.prompts[4] == spy.prompts[1]
    assert spy.prefilled[4] == spy.prompts[1][-1:]
    assert conversation.undo() and conversation.undo() == "the fox"
    assert conversation.messages == messages[:1] and conversation.num_tokens == 0
    for go_back in (conversation.undo, lambda: conversation.regenerate(options)):
        with pytest.raises(OptionError, match="no message yet"):
            go_back()
    assert say(conversation, "the fox") == first
    prompts = list(spy.prompts)
    assert_as_from_scratch(runtime, prompts[2], anew.result.tokens, temperature=0.9, seed=3, noise_id=5)
    assert_as_from_scratch(runtime, prompts[3], again)


@pytest.mark.few(1)
def test_save_and_restore(runtime: Runtime, spy: Spy) -> None:
    conversation = spy.conversation("slot")
    say(conversation, "the fox")
    saved = json.loads(json.dumps(conversation.to_json()))
    restored = spy.conversation()
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


@pytest.mark.slow
def test_a_full_context_is_an_error_and_no_end(target: Path) -> None:
    with load(target, context=100) as runtime:
        spy = Spy(runtime)
        conversation = spy.conversation()
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


@pytest.mark.slow
def test_a_conversation_that_outgrows_the_short_frequencies(copy: Path) -> None:
    """longrope rotates all keys otherwise once the text is long: what was cached before then is of no use."""
    config = json.loads((copy / "config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 84,
        "short_factor": [1.0] * half, "long_factor": [3.0 + index for index in range(half)],
    }  # fmt: skip
    (copy / "config.json").write_text(json.dumps(config))
    with load(copy, draft="ngram") as runtime:
        spy = Spy(runtime)
        conversation = spy.conversation()
        texts = ("the fox", "jumps over the lazy dog", "and the quick", "fox", "dog")
        said = [say(conversation, text) for text in texts]
        prompts, prefilled = list(spy.prompts), list(spy.prefilled)
        assert len(prompts[1]) < 84 - COUNT and len(prompts[-2]) > 84
        whole = [new == prompt for new, prompt in zip(prefilled, prompts, strict=True)]
        assert whole.count(True) == 2 and whole[0] and not whole[-1]
        for prompt, tokens in zip(prompts, said, strict=True):
            assert_as_from_scratch(runtime, prompt, tokens)
