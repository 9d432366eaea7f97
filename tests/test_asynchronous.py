"""Answers in an event loop: the tokens of `stream`, several at once, and nothing goes on for a task that has ended."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import offload_runtime as rt
from offload_runtime.errors import ContextLengthError, OptionError, QueueFullError
from tests.helpers.engine import PROMPT, load

TARGET = "two_layer_target"
PROMPTS = [PROMPT, "a link, a layer, a slot", "on and on", "the lazy dog"]
ENDLESS = 3500
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def runtime(two_layer_target: Path) -> Iterator[rt.Runtime]:
    with load(two_layer_target, context=4096, max_batch=2, draft="ngram") as runtime:
        yield runtime


def endless(runtime: rt.Runtime | rt.Scheduler) -> rt.AsyncTokenStream:
    """An answer that nobody waits for."""
    return runtime.astream(PROMPT, max_new_tokens=ENDLESS, ignore_eos=True)


async def rest(stream: rt.AsyncTokenStream) -> rt.GenerationResult:
    """What an answer is, at its end."""
    async for _ in stream:
        pass
    return stream.result


def test_an_answer_is_that_of_a_stream_and_more_requests_than_slots_each_have_their_own(runtime: rt.Runtime) -> None:
    async def answer(prompt: str) -> tuple[str, rt.GenerationResult]:
        stream = runtime.astream(prompt, **OPTIONS)
        pieces = [piece async for piece in stream]
        assert all(pieces)
        return "".join(pieces), stream.result

    async def all_answers() -> list[tuple[str, rt.GenerationResult]]:
        return await asyncio.gather(*map(answer, PROMPTS))

    for prompt, (text, result) in zip(PROMPTS, asyncio.run(all_answers()), strict=True):
        alone = runtime.generate(prompt, **OPTIONS)
        assert (result.tokens, result.text, text) == (alone.tokens, alone.text, alone.text)


def test_tokens_come_with_their_texts_and_log_probabilities(runtime: rt.Runtime) -> None:
    async def tokens() -> list[rt.TokenEvent]:
        return [event async for event in runtime.astream(PROMPT, **OPTIONS, logprobs=2).tokens()]

    stream = runtime.stream(PROMPT, **OPTIONS, logprobs=2)
    events, heard = list(stream.tokens()), asyncio.run(tokens())
    assert [(one.token, one.text, one.logprobs) for one in events] == [
        (one.token, one.text, one.logprobs) for one in heard
    ]
    assert "".join(one.text for one in events) == stream.result.text
    for event, logprobs in zip(events, stream.result.logprobs or (), strict=True):
        assert event.logprobs == logprobs and logprobs.token == event.token
        assert logprobs.text == runtime.tokenizer.decode([event.token]) or "\\x" in logprobs.text
        assert len(logprobs.top_texts) == len(logprobs.top) == 2 and logprobs.top[0][1] >= logprobs.top[1][1]
        assert math.exp(logprobs.logprob) <= 1


async def cancelled(stream: rt.AsyncTokenStream, elsewhere_s: float) -> None:
    has_begun = asyncio.Event()

    async def consume() -> None:
        async for _ in stream:
            has_begun.set()
            if elsewhere_s:
                await asyncio.sleep(elsewhere_s)

    task = asyncio.create_task(consume())
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_while_waiting(stream: rt.AsyncTokenStream) -> None:
    await cancelled(stream, elsewhere_s=0)
    assert stream.result.finish_reason == "interrupted" and stream.result.tokens


async def cancelled_elsewhere(stream: rt.AsyncTokenStream) -> None:
    await cancelled(stream, elsewhere_s=3600)


async def cancelled_at_once(stream: rt.AsyncTokenStream) -> None:
    task = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def left(stream: rt.AsyncTokenStream) -> None:
    async for _ in stream:
        break


async def closed(stream: rt.AsyncTokenStream) -> None:
    await anext(stream)
    await stream.aclose()
    assert stream.result.finish_reason == "interrupted"
    assert [piece async for piece in stream] == []
    await stream.aclose()


@pytest.mark.parametrize("end", [cancelled_while_waiting, cancelled_elsewhere, cancelled_at_once, left, closed])
def test_what_ends_a_task_ends_its_request(
    runtime: rt.Runtime, end: Callable[[rt.AsyncTokenStream], Coroutine[Any, Any, None]]
) -> None:
    """Both slots of a scheduler are free for the next one, long before such an answer would have ended."""

    async def run(scheduler: rt.Scheduler) -> rt.GenerationResult:
        streams = []  # that somebody still has, but for those that were only left
        for _ in range(2):
            streams.append(endless(scheduler))
            await end(streams.pop() if end is left else streams[-1])
        return await rest(scheduler.astream(PROMPT, **OPTIONS))

    with rt.Scheduler(runtime) as scheduler:
        answered = asyncio.run(run(scheduler))
        assert scheduler.counters.tokens < ENDLESS
    assert answered.tokens == runtime.generate(PROMPT, **OPTIONS).tokens


def test_a_call_of_a_thread_waits_for_them(runtime: rt.Runtime) -> None:
    async def run() -> list[rt.GenerationResult]:
        stream = runtime.astream(PROMPT, **OPTIONS)
        await anext(stream)
        waiting = asyncio.create_task(asyncio.to_thread(runtime.generate, PROMPT, **OPTIONS))
        return [await rest(stream), await waiting]

    first, second = asyncio.run(run())
    assert first.tokens == second.tokens


def test_what_is_refused_is_raised_by_the_first_piece(runtime: rt.Runtime) -> None:
    with pytest.raises(OptionError, match="temperature"):
        runtime.astream(PROMPT, temperature=-1)
    too_long = runtime.astream(PROMPT, max_new_tokens=10_000)
    with pytest.raises(OptionError, match="has not ended"):
        _ = too_long.result

    async def first() -> None:
        with pytest.raises(ContextLengthError):
            await anext(too_long)
        with pytest.raises(StopAsyncIteration):
            await anext(too_long)

    asyncio.run(first())
    assert runtime.generate(PROMPT, max_new_tokens=1).tokens  # nobody has it any more


def test_a_scheduler_answers_in_an_event_loop_too(runtime: rt.Runtime) -> None:
    async def run(scheduler: rt.Scheduler) -> rt.GenerationResult:
        streams = [endless(scheduler) for _ in range(3)]
        for stream in streams[:2]:
            await anext(stream)
        with pytest.raises(QueueFullError):
            await anext(streams[2])
        with pytest.raises(OptionError, match="served by a scheduler"):
            runtime.generate(PROMPT)
        with pytest.raises(OptionError, match="served by a scheduler"):
            await runtime.agenerate(PROMPT)
        for stream in streams:
            await stream.aclose()
        answer = scheduler.astream(PROMPT, **OPTIONS)
        assert isinstance(answer, AsyncIterator)
        return await rest(answer)

    with rt.Scheduler(runtime, max_waiting=0) as scheduler:
        answer = asyncio.run(run(scheduler))
        assert scheduler.counters.finished == 3
    assert answer.tokens == runtime.generate(PROMPT, **OPTIONS).tokens


def test_closing_a_runtime_ends_what_is_under_way(two_layer_target: Path) -> None:
    async def run() -> rt.GenerationResult:
        with load(two_layer_target, context=4096) as runtime:
            stream = endless(runtime)
            await anext(stream)
        with pytest.raises(OptionError, match="closed"):
            await runtime.agenerate(PROMPT)
        return await rest(stream)

    result = asyncio.run(run())
    assert result.finish_reason == "interrupted" and 0 < len(result.tokens) < ENDLESS
