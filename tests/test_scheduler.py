"""Continuous batching: requests join and leave between passes, and each gets the tokens that it gets alone."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload_runtime as rt
from offload_runtime.config import SpeculationOptions
from tests.helpers.engine import PROMPT, FailingRunner, load

TARGET, CONTEXT = "two_layer_target", 900
SOURCES = {"ngram", "draft", "retrieval", "target"}
SLOTS = 3
SMALL: dict[str, Any] = {"budget_tokens": 96, "chunk_size": 8, "gamma_draft": 4, "refresh_steps": 1}
# By who proposes, how to load and what requests may ask for.
SPECULATION: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "none": ({"draft": "none", "resident_layers": 1}, [{}]),
    "ngram": ({"draft": "ngram"}, [{}, {"gamma": 3}, {"gamma": 6, "tree_nodes": 9}]),
    "chain": ({"tree_nodes": 0, "resident_layers": 1}, [{}, {"gamma": 2}, {"gamma": 5}]),
    "tree": ({"tree_nodes": 24, "resident_layers": 1}, [{}, {"gamma": 3, "tree_nodes": 0}, {"tree_nodes": 10}]),
    "triforce": ({"speculation": SpeculationOptions("triforce", **SMALL)}, [{}, {"gamma": 3}]),
}


loaded = partial(load, context=CONTEXT)


@dataclass
class Task:
    """A request, the answer that it gets alone, and after how many tokens it is cancelled, if at all."""

    prompt: list[int]
    params: rt.GenerationParams
    speculate: bool
    alone: rt.GenerationResult
    cancelled_after: int | None = None


@dataclass
class Heard:
    """What was said of a request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    sources: list[str] = field(default_factory=list)
    end: rt.EndEvent | rt.ErrorEvent | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: rt.TokenEvent | rt.EndEvent | rt.ErrorEvent) -> None:
        assert self.end is None, "nothing comes behind the end"
        if isinstance(event, rt.TokenEvent):
            self.tokens.append(event.token)
            self.sources.append(event.source)
            self.text += event.text
            return
        self.text += event.text if isinstance(event, rt.EndEvent) else ""
        self.end = event
        self.has_ended.set()

    @property
    def result(self) -> rt.GenerationResult:
        assert self.has_ended.wait(60) and isinstance(self.end, rt.EndEvent), self.end
        return self.end.result

    @property
    def error(self) -> BaseException:
        assert self.has_ended.wait(60) and isinstance(self.end, rt.ErrorEvent)
        return self.end.error


class Held(Heard):
    """Holds the scheduler's thread at its first token until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.let_go = threading.Event(), threading.Event()

    def __call__(self, event: rt.TokenEvent | rt.EndEvent | rt.ErrorEvent) -> None:
        super().__call__(event)
        self.is_held.set()
        assert self.let_go.wait(60)


def make_tasks(
    runtime: rt.Runtime, windows: Sequence[dict[str, Any]], count: int, seed: int, *, longest: int = 24
) -> list[Task]:  # fmt: skip
    """Requests of all kinds; some prompts reach over a block of the cache."""
    chance, words, tasks = random.Random(seed), runtime.encode(PROMPT), []
    for number in range(count):
        most = 290 if number % 4 == 3 else 40
        prompt = [words[chance.randrange(len(words))] for _ in range(chance.randint(1, most))]
        sampling = [
            rt.SamplingParams(),
            rt.SamplingParams(temperature=0.8, seed=number, noise_id=number),
            rt.SamplingParams(temperature=1.0, seed=2, top_k=40, noise_id=number),
            rt.SamplingParams(temperature=0.7, seed=number, top_p=0.9, min_p=0.02),
            rt.SamplingParams(presence_penalty=1.5, repetition_penalty=1.2, logit_bias={words[0]: 2.0}),
            rt.SamplingParams(temperature=0.6, seed=number, frequency_penalty=0.8, top_k=40),
            rt.SamplingParams(temperature=0.9, seed=number, json_schema={"type": "array", "items": {"type": "string"}}),
        ][chance.randrange(7)]
        stop = ("a",) if number % 5 == 4 else ()
        params = rt.GenerationParams(
            chance.randint(1, longest), stop, sampling=sampling,
            ignore_eos=number % 3 > 0 and not sampling.has_grammar,
            logprobs=chance.choice([None, None, 2]), **chance.choice(windows),
        )  # fmt: skip
        speculate = number % 7 != 5
        alone = runtime.generate(prompt, params=params, speculate=speculate)
        cut = chance.randint(0, len(alone.tokens) - 1) if chance.random() < 0.2 else None
        tasks.append(Task(prompt, params, speculate, alone, cut))
    return tasks


def assert_as_alone(task: Task, result: rt.GenerationResult) -> None:
    if result.finish_reason == "interrupted":
        assert task.cancelled_after is not None
        assert result.tokens == task.alone.tokens[: len(result.tokens)] and task.alone.text.startswith(result.text[:-3])
        return
    said = result.tokens, result.text, result.finish_reason
    assert said == (task.alone.tokens, task.alone.text, task.alone.finish_reason)
    wanted, found = task.params.logprobs, result.logprobs
    assert found is None if wanted is None else [one.token for one in found or ()] == result.tokens
    assert result.stats.new_tokens == len(result.tokens) and result.stats.prompt_tokens == len(task.prompt)


def play(runtime: rt.Runtime, tasks: Sequence[Task], seed: int) -> int:
    """Let requests join and leave at random, pass by pass; how many passes that took."""
    chance, coming = random.Random(seed), list(tasks)
    tokens: dict[Any, list[int]] = {}
    most = 0
    with runtime.serving() as engine:
        requests = {}
        while coming or engine.has_requests:
            for _ in range(min(len(coming), chance.choice([0, 1, 2]))):
                task = coming.pop(0)
                request = runtime.request(task.prompt, task.params, speculate=task.speculate)
                requests[request], tokens[request] = task, []
                engine.add(request)
                if task.cancelled_after == 0:
                    engine.cancel(request)
            for output in engine.step():
                request, cut = output.request, requests[output.request].cancelled_after
                assert output.error is None and {event.source for event in output.tokens} <= SOURCES
                tokens[request] += [event.token for event in output.tokens]
                most = max(most, len(engine.running))
                if cut is not None and len(tokens[request]) >= cut:
                    engine.cancel(request, keep=cut)
                    del tokens[request][cut:]
        passes = engine.passes
    assert 1 < most <= SLOTS
    for request, task in requests.items():
        assert_as_alone(task, request.result)
        assert request.result.tokens == tokens[request]
    return passes


@pytest.mark.few(1)
@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("proposals", SPECULATION)
def test_requests_that_come_and_go_say_what_they_say_alone(target: Path, draft: Path, proposals: str, kv: str) -> None:
    options, windows = SPECULATION[proposals]
    with loaded(target, **{"draft": draft, **options}, kv=kv, max_batch=SLOTS) as runtime:
        play(runtime, make_tasks(runtime, windows, 7, seed=len(proposals), longest=12), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("proposals", ["chain", "triforce"])
def test_a_slot_that_is_used_again_is_as_good_as_new(target: Path, draft: Path, proposals: str) -> None:
    """A draft that took one text for another would be right less often. Beside it somebody decodes plainly."""
    options, _ = SPECULATION[proposals]
    text = [3 + (7 * i * i + i // 5) % 290 for i in range(900)]
    prompts = [text[:760], text[100:850]]  # of which much is far away
    asked = rt.GenerationParams(10, gamma=4, ignore_eos=True)
    with loaded(target, **{"draft": draft, **options}, kv="gpu", max_batch=2) as runtime:
        # In the other order, so that what the one leaves behind for the other cannot make them alike.
        alone = [runtime.generate(prompt, params=asked) for prompt in reversed(prompts)][::-1]
        with runtime.serving() as engine:
            plain = runtime.request([5], replace(asked, max_new_tokens=60), speculate=False)
            requests = [runtime.request(prompt, asked) for prompt in prompts]
            engine.add(plain)
            for request in requests:
                engine.add(request)
                while request.result is None:
                    engine.step()
            engine.cancel(plain)
    for one, result in zip(alone, [request.result for request in requests], strict=True):
        assert result is not None
        assert (result.tokens, result.stats.acceptance) == (one.tokens, one.stats.acceptance)
        assert result.stats.accepted_by_depth == one.stats.accepted_by_depth and result.stats.acceptance[-1].rate > 0
    assert plain.result is not None and plain.result.stats.acceptance == ()


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("proposals", SPECULATION)
def test_requests_come_and_go_on_a_gpu(target: Path, draft: Path, proposals: str, kv: str) -> None:
    """Steps are graphs there, which are replayed for whoever holds the slots."""
    options, windows = SPECULATION[proposals]
    asked = {"draft": draft, **options}
    with rt.Runtime.load(target, **asked, device="cuda", dtype="bf16", kv=kv, context=CONTEXT, max_batch=SLOTS) as made:
        tasks = make_tasks(made, windows, 24, seed=11)
        play(made, tasks, seed=4)
        play(made, list(reversed(tasks)), seed=5)


@contextmanager
def scheduler(target: Path, *, max_waiting: int = 64, **options: Any) -> Iterator[rt.Scheduler]:
    with loaded(target, **{"max_batch": 1, **options}) as model, rt.Scheduler(model, max_waiting=max_waiting) as made:
        yield made


def params(count: int = 8, **options: Any) -> rt.GenerationParams:
    return rt.GenerationParams(count, ignore_eos=True, **options)


def unheard(event: object) -> None:
    """Of a request that was refused nobody is told."""
    raise AssertionError(event)


def test_threads_submit_and_cancel_as_they_please(target: Path) -> None:
    with loaded(target, max_batch=SLOTS) as runtime:
        tasks = make_tasks(runtime, [{}, {"gamma": 3}], 10, seed=3, longest=9)
        heard = [Heard() for _ in tasks]

        def submit(first: int) -> None:
            for task, one in list(zip(tasks, heard, strict=True))[first::2]:
                tickets: list[rt.Ticket] = []

                def on_event(event: Any, task: Task = task, one: Heard = one, tickets: Any = tickets) -> None:
                    one(event)
                    if isinstance(event, rt.TokenEvent) and len(one.tokens) == task.cancelled_after and tickets:
                        tickets[0].cancel()

                tickets.append(served.submit(task.prompt, task.params, on_event=on_event, speculate=task.speculate))
                if task.cancelled_after == 0:
                    tickets[0].cancel()

        with rt.Scheduler(runtime) as served:
            threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            served.close(grace_s=60)
        for task, one in zip(tasks, heard, strict=True):
            assert_as_alone(task, one.result)
            assert (one.tokens, one.text) == (one.result.tokens, one.result.text)
            assert len(one.sources) == len(one.tokens) and set(one.sources) <= SOURCES
            assert one.sources.count("target") <= 1 + one.result.stats.passes
        counters = served.counters
        assert (counters.running, counters.waiting, counters.finished) == (0, 0, len(tasks))
        assert counters.tokens == sum(len(one.tokens) for one in heard)
        assert 0 < counters.passes <= sum(one.result.stats.passes for one in heard)
        by_source: dict[str, int] = {}
        for one in heard:
            for source, number in one.result.stats.accepted_by_source.items():
                by_source[source] = by_source.get(source, 0) + number
        assert counters.accepted == by_source
        assert all(counters.proposed[source] >= number for source, number in by_source.items())


def test_a_queue_that_is_full_says_so(target: Path) -> None:
    first, second = Held(), Heard()
    with scheduler(target, max_waiting=1) as served:
        served.submit([5], params(), on_event=first)
        assert first.is_held.wait(60)
        served.submit([6], params(), on_event=second)
        with pytest.raises(
            rt.errors.QueueFullError, match=r"1 requests wait already \(max_waiting\): try again in"
        ) as caught:
            served.submit([7], params(), on_event=unheard)
        assert caught.value.retry_after_s > 0
        assert served.counters.waiting + served.counters.running == 2
        with pytest.raises(rt.errors.ContextLengthError, match="exceed the context"):
            served.submit([7], params(100_000), on_event=unheard)
        with pytest.raises(rt.errors.OptionError, match="outside the vocabulary"):
            served.submit([70_000], params(), on_event=unheard)
        with pytest.raises(rt.errors.OptionError, match="exceeds the"):
            served.submit([7], params(gamma=1000), on_event=unheard)
        first.let_go.set()
        assert len(first.result.tokens) == len(second.result.tokens) == 8
        third = Heard()
        served.submit([7], params(), on_event=third)
        assert third.result.finish_reason == "length"


def test_a_request_that_is_cancelled_makes_room(target: Path) -> None:
    first, second, third = Held(), Heard(), Heard()
    with scheduler(target) as served:
        running = served.submit([5], params(400), on_event=first)
        assert first.is_held.wait(60)
        waiting = served.submit([6], params(), on_event=second)
        served.submit([7], params(), on_event=third)
        running.cancel()
        waiting.cancel()
        first.let_go.set()
        assert third.result.finish_reason == "length"
        assert first.result.finish_reason == second.result.finish_reason == "interrupted"
        assert len(first.result.tokens) == 1 and second.result.tokens == []
        running.cancel()  # has ended
        assert served.counters.finished == 3


def test_a_callback_that_raises_costs_only_its_own_request(target: Path) -> None:
    calls: list[Any] = []

    def fails(event: Any) -> None:
        calls.append(event)
        raise ValueError("not my day")

    with scheduler(target, max_batch=2) as served:
        other = Heard()
        served.submit([5], params(400), on_event=fails)
        served.submit([6], params(), on_event=other)
        assert other.result.finish_reason == "length"
        served.close(grace_s=60)  # the first has been cancelled, else this would be long
        assert len(calls) == 1 and served.counters.finished == 2 and served.counters.tokens < 100


def test_a_request_without_numbers_ends_alone(copy: Path) -> None:
    """Of its prompt, and of a token of its own; whoever has its slot afterwards is not harmed."""
    with loaded(copy) as runtime:
        answers = {first: runtime.generate([first, 9], params=params(12)).tokens for first in (5, 6, 8)}
    poison = next(token for token in answers[5][2:9] if not {token} & {5, 6, 8, 9, *answers[6], *answers[8]})
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    for kv in ("gpu", "host"):
        heard = {name: Heard() for name in ("own token", "prompt", "beside", "behind", "last")}
        prompts = {"own token": [5, 9], "prompt": [poison], "beside": [6, 9], "behind": [8, 9], "last": [6, 9]}
        with scheduler(copy, max_batch=2, kv=kv) as served:
            for name, one in heard.items():
                served.submit(prompts[name], params(12), on_event=one)
            served.close(grace_s=60)
        for name in ("own token", "prompt"):
            assert isinstance(heard[name].error, rt.errors.NumericalError)
        assert heard["own token"].tokens == answers[5][: answers[5].index(poison) + 1]
        assert heard["beside"].result.tokens == heard["last"].result.tokens == answers[6]
        assert heard["behind"].result.tokens == answers[8]


def failing(runtime: rt.Runtime, error: Exception, *, after: int) -> None:
    loaded = runtime.engine.target
    runtime.engine.target = replace(loaded, runner=FailingRunner(loaded.runner, error, after=after))


@pytest.mark.parametrize(
    "error", [rt.errors.BudgetError("the host is full"), torch.OutOfMemoryError("tried to allocate")]
)
def test_a_pass_without_memory_ends_whoever_runs(target: Path, error: Exception) -> None:
    with loaded(target, max_batch=2) as runtime:
        alone = [runtime.generate([first], params=params(9), speculate=False).tokens for first in (5, 6, 7)]
        failing(runtime, error, after=2)
        heard = [Heard(), Heard(), Heard()]
        with rt.Scheduler(runtime) as served:
            for first, one in zip((5, 6, 7), heard, strict=True):
                served.submit([first], params(9), on_event=one, speculate=False)
            served.close(grace_s=60)
        failed = [one for one in heard if isinstance(one.end, rt.ErrorEvent)]
        assert failed and all(isinstance(one.error, rt.errors.BudgetError) for one in failed)
        for tokens, one in zip(alone, heard, strict=True):
            assert one.end is not None and one.end.result.tokens == tokens[: len(one.tokens)] == one.tokens
            assert one in failed or one.tokens == tokens
        assert heard[2] not in failed or len(failed) < 3


def test_a_device_that_fails_ends_everything(target: Path) -> None:
    with loaded(target, max_batch=1) as runtime:
        failing(runtime, rt.errors.DeviceError("it burns"), after=2)
        first, second = Heard(), Heard()
        with rt.Scheduler(runtime) as served:
            served.submit([5], params(), on_event=first, speculate=False)
            served.submit([6], params(), on_event=second, speculate=False)
            for one in (first, second):
                assert isinstance(one.error, rt.errors.DeviceError)
            assert len(first.tokens) == 3 and second.tokens == []
            with pytest.raises(rt.errors.OptionError, match=r"has stopped \(it burns\)"):
                served.submit([5], params(), on_event=unheard)
