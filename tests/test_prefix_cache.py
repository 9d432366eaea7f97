"""The prefix cache: the beginning of a prompt that is still held is not read again, and no bit tells the difference."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime import GenerationParams, GenerationResult, Runtime, SamplingParams, Scheduler
from offload_runtime.config import SpeculationOptions
from offload_runtime.engine.engine import Engine
from offload_runtime.engine.request import Request
from offload_runtime.errors import OptionError
from tests.helpers.engine import load
from tests.helpers.models import random_tokens

TARGET, CONTEXT, SLOTS = "two_layer_target", 900, 2
VOCABULARY = 290
SMALL: dict[str, Any] = {"budget_tokens": 96, "chunk_size": 8, "gamma_draft": 4, "refresh_steps": 1}
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none", "resident_layers": 1},
    "ngram": {"draft": "ngram", "resident_layers": 1},
    "chain": {"tree_nodes": 0, "resident_layers": 1},
    "tree": {"tree_nodes": 24, "resident_layers": 1},
    "triforce": {"speculation": SpeculationOptions("triforce", **SMALL)},
}
loaded = partial(load, context=CONTEXT)
TEXT = [3 + token % VOCABULARY for token in random_tokens(CONTEXT, seed=3)]


def params(count: int = 6, **options: Any) -> GenerationParams:
    return GenerationParams(count, ignore_eos=True, **options)


Task = tuple[list[int], GenerationParams, int]  # a prompt, what is asked for, after how many tokens it is cut off


@dataclass
class Seen:
    """What a request has left: the logits behind each of its tokens."""

    result: GenerationResult | None = None
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def said(self) -> GenerationResult:
        assert self.result is not None
        return self.result

    def assert_is_beginning_of(self, other: Seen) -> None:
        """Bit for bit, as far as it has come."""
        count = len(self.said.tokens)
        assert self.said.tokens == other.said.tokens[:count]
        assert self.said.finish_reason == "interrupted" or self.said.text == other.said.text
        for one, another in zip(torch.cat(self.logits)[:count], torch.cat(other.logits), strict=False):
            assert torch.equal(one, another)


def serve(runtime: Runtime, tasks: Sequence[Task], chance: random.Random, prefix_cache_bytes: int) -> list[Seen]:
    """Answer prompts, each cut off after so many tokens, which join and leave at random."""
    seen: dict[Request, Seen] = {}
    coming = [(runtime.request(prompt, asked), last) for prompt, asked, last in tasks]
    cut = dict(coming)

    with runtime.serving(prefix_cache_bytes=prefix_cache_bytes) as engine:
        while coming or engine.has_requests:
            for request, _ in (coming.pop(0) for _ in range(min(len(coming), chance.choice([0, 1, 1, 2])))):
                seen[request] = Seen()
                engine.add(request)
            for output in engine.step(with_logits=True):
                request = output.request
                assert output.error is None and output.logits is not None
                seen[request].logits.append(output.logits)
                if request.new_tokens >= cut[request]:
                    engine.cancel(request)
                seen[request].result = request.result
    return [seen[request] for request in cut]


def alone(runtime: Runtime, prompt: list[int], asked: GenerationParams) -> Seen:
    """The same with nothing kept, decoded plainly."""
    result, rows = runtime.replay(prompt, asked, drafter=None)
    return Seen(result, [rows.to(runtime.device)])


def make_tasks(count: int, seed: int) -> list[Task]:
    """Prompts that share beginnings of all lengths: one of a few texts, cut and gone on with otherwise."""
    chance, texts, tasks = random.Random(seed), [TEXT, TEXT[:40] + TEXT[400:], TEXT[::-1]], list[Task]()
    for number in range(count):
        prompt = list(chance.choice(texts)[: chance.choice([1, 30, 255, 256, 257, 300, 511, 513, 600])])
        prompt += random_tokens(chance.choice([0, 0, 1, 5, 40]), seed=number)
        sampling = SamplingParams(temperature=chance.choice([0.0, 0.8]), seed=number % 3, noise_id=number)
        tasks.append((prompt, params(chance.randint(2, 9), sampling=sampling), chance.choice([99, 99, 99, 2])))
    return tasks


def block_bytes(runtime: Runtime) -> int:
    """Of a block, all layers together."""
    return runtime.plan.target.kv_block_bytes


def check(runtime: Runtime, tasks: Sequence[Task], expected: Sequence[Seen], seed: int, *, stored_blocks: int) -> None:
    """That `tasks`, which come and go, leave what each leaves alone."""
    chance = random.Random(seed)
    found = serve(runtime, tasks, chance, stored_blocks * block_bytes(runtime))
    for one, another in zip(found, expected, strict=True):
        one.assert_is_beginning_of(another)
    assert sum(one.said.stats.kept_tokens for one in found) > 0
    assert not any(one.said.stats.kept_tokens for one in expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("setup", SETUPS)
def test_prompts_that_share_beginnings(target: Path, draft: Path, setup: str, kv: str) -> None:
    with loaded(target, **{"draft": draft, **SETUPS[setup]}, kv=kv, max_batch=SLOTS) as runtime:
        tasks = make_tasks(7, seed=len(setup))
        expected = [alone(runtime, prompt, asked) for prompt, asked, _ in tasks]
        check(runtime, tasks, expected, seed=len(setup), stored_blocks=3 if kv == "gpu" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["gpu", "host"])
@pytest.mark.parametrize("setup", SETUPS)
def test_prompts_that_share_beginnings_on_a_gpu(target: Path, draft: Path, setup: str, kv: str) -> None:
    options: dict[str, Any] = {"draft": draft, **SETUPS[setup], "kv": kv, "context": CONTEXT, "max_batch": SLOTS}
    with Runtime.load(target, device="cuda", dtype="bf16", **options) as runtime:
        tasks = make_tasks(20, seed=len(setup))
        expected = [alone(runtime, prompt, asked) for prompt, asked, _ in tasks]
        check(runtime, tasks, expected, seed=len(setup), stored_blocks=3 if kv == "gpu" else 0)


def say(runtime: Runtime, engine: Engine, prompt: list[int], count: int = 6) -> Request:
    """An answer of so many tokens, beside whoever runs."""
    request = runtime.request(prompt, params(count))
    engine.add(request)
    while request.result is None:
        engine.step()
    return request


def test_what_slots_lose_comes_back(target: Path) -> None:
    """In whole blocks, as many as the store holds; those that were used least recently go first."""
    one, two = TEXT[:600], TEXT[100:700]
    prompts = [one, two, one, two, one[:300], one, two, [*one, 5]]
    kept = {4: [0, 0, 512, 512, 256, 512, 512, 512], 1: [0, 0, 256, 256, 256, 300, 256, 256]}
    with loaded(target, draft="none", kv="gpu") as runtime:
        expected = [runtime.generate(prompt, params=params()).tokens for prompt in prompts]
        for blocks, of_prompts in kept.items():
            with runtime.serving(prefix_cache_bytes=blocks * block_bytes(runtime)) as engine:
                said = [say(runtime, engine, prompt) for prompt in prompts]
            assert [one.tokens for one in said] == expected
            assert [one.num_kept for one in said] == of_prompts


@pytest.mark.few(1)
@pytest.mark.parametrize(("setup", "kv"), [("plain", "gpu"), ("tree", "host")])
def test_beginnings_in_windows(
    windowed_target: Path, noisy_copy_of: Callable[[Path], Path], setup: str, kv: str
) -> None:
    draft = noisy_copy_of(windowed_target)
    with loaded(windowed_target, **{"draft": draft, **SETUPS[setup]}, kv=kv, max_batch=SLOTS) as runtime:
        tasks = make_tasks(9, seed=len(setup))
        expected = [alone(runtime, prompt, asked) for prompt, asked, _ in tasks]
        check(runtime, tasks, expected, seed=len(setup), stored_blocks=3 if kv == "gpu" else 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_slots_lose_of_windows_comes_back_at_its_end(windowed_target: Path, tmp_path: Path, on_disk: bool) -> None:
    """A slot has let go of what windows reach from further ahead, and so has the store; where a text ends earlier its
    last block takes the place of one that has less."""
    one, two = TEXT[:800], TEXT[100:850]
    prompts, kept = [one, two, one, one[:100], two, one[:300], [*one, 5]], [0, 0, 768, 0, 512, 0, 768]
    with loaded(windowed_target, draft="none", kv="gpu") as runtime:
        expected = [runtime.generate(prompt, params=params()).tokens for prompt in prompts]
        store: dict[str, Any] = {"sessions": tmp_path} if on_disk else {"prefix_cache_bytes": 8 * block_bytes(runtime)}
        with runtime.serving(**store) as engine:
            said = [say(runtime, engine, prompt) for prompt in prompts]
        assert [one.tokens for one in said] == expected
        assert [one.num_kept for one in said] == kept


def test_a_store_that_is_of_no_use_is_refused(target: Path) -> None:
    for kv, nbytes, message in (("gpu", -1, "negative"), ("gpu", 10, "holds none"), ("host", 1 << 30, "host memory")):
        with loaded(target, draft="none", kv=kv) as runtime:
            with pytest.raises(OptionError, match=message):
                Scheduler(runtime, prefix_cache_bytes=nbytes)
            assert runtime.generate([5], max_new_tokens=1).tokens  # it is not served


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_what_a_length_rotates_otherwise_is_read_again(copy: Path, rope_type: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_parameters"] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "longrope":
        factors = {"short_factor": [1.0] * half, "long_factor": [3.0 + index for index in range(half)]}
        config["rope_parameters"] |= {"original_max_position_embeddings": 84, **factors}
    else:
        config["max_position_embeddings"] = 84
    (copy / "config.json").write_text(json.dumps(config))
    with load(copy, draft="none", context=120) as runtime:
        prompts = [TEXT[:count] for count in (60, 82, 100, 90, 90, 70)]
        expected = [runtime.generate(prompt, params=params()).tokens for prompt in prompts]
        with runtime.serving() as engine:
            said = [say(runtime, engine, prompt) for prompt in prompts]
    assert [one.tokens for one in said] == expected
    assert [one.num_kept for one in said] == [0, 60, 0, 89 if rope_type == "longrope" else 0, 89, 0]
