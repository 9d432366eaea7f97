"""Generation with a small random model: the same tokens whatever drafts, fits, streams or came before, of one prompt
and of several at once; and the path of a token, by calls before its first kernel and files that it enters."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from offload_runtime import GenerationParams, SamplingParams
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, ContextLengthError, OptionError
from offload_runtime.plan.sizes import RunPlan
from offload_runtime.speculation.draft import Asked
from offload_runtime.speculation.ngram import drafting
from offload_runtime.speculation.tree import ModelDrafter
from tests.helpers import engine as engines

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4},
]
COUNT = 14


@pytest.fixture(scope="module")
def speculative(target: Path, draft: Path) -> Iterator[Runtime]:
    """A draft model, and most layers streamed."""
    with engines.load(target, draft=draft, resident_layers=1) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(plain: Runtime) -> list[list[int]]:
    """Plain tokens for each way of sampling."""
    tokens = [plain.generate(engines.PROMPT, max_new_tokens=COUNT, ignore_eos=True, **s).tokens for s in SAMPLINGS]
    assert all(len(said) == COUNT and len(set(said)) > 5 for said in tokens)
    return tokens


def test_stream_gives_what_generate_gives(speculative: Runtime) -> None:
    for sampling in SAMPLINGS:
        whole = speculative.generate(engines.PROMPT, max_new_tokens=COUNT, **sampling)
        stream = speculative.stream(engines.PROMPT, max_new_tokens=COUNT, **sampling)
        pieces = list(stream)
        assert "".join(pieces) == whole.text == stream.result.text
        assert all(pieces) and len(pieces) > 5
        assert (stream.result.tokens, stream.result.finish_reason) == (whole.tokens, whole.finish_reason)


def test_every_kind_of_prompt(plain: Runtime) -> None:
    tokens = plain.encode(engines.PROMPT)
    assert (
        plain.generate(tuple(tokens), max_new_tokens=5).tokens
        == plain.generate(engines.PROMPT, max_new_tokens=5).tokens
    )
    messages = [{"role": "system", "content": "slot"}, {"role": "user", "content": "fox"}]
    rendered = "<|im_start|>system\nslot<|im_end|>\n<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    assert plain.tokenizer.decode(plain.encode(messages)) == rendered


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9])
def test_exactly_as_many_tokens_as_asked(speculative: Runtime, expected: list[list[int]], count: int) -> None:
    for gamma in (1, 7, count):
        result = speculative.generate(engines.PROMPT, max_new_tokens=count, gamma=gamma, ignore_eos=True)
        assert result.tokens == expected[0][:count]
        assert result.finish_reason == "length"
        assert result.stats.new_tokens == count


@pytest.mark.slow
def test_the_context_can_be_filled(plain: Runtime, target: Path, draft: Path, expected: list[list[int]]) -> None:
    for drafts in ("ngram", draft):
        with engines.load(target, context=len(plain.encode(engines.PROMPT)) + COUNT, draft=drafts) as runtime:
            result = runtime.generate(engines.PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=39)
        assert result.tokens == expected[0]


def test_figures_add_up(speculative: Runtime) -> None:
    engine = speculative.engine.target.cards[0].engine
    engine.drain()
    before = engine.bytes_copied
    result = speculative.generate(engines.PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=7)
    engine.drain()
    stats = result.stats
    layer_bytes = speculative.engine.target.weights.layout.layer_bytes[0]
    assert stats.bytes_per_pass == (engines.NUM_LAYERS - 1) * layer_bytes
    # The ring is full before and after, so every pass, prefill included, has moved exactly its own bytes.
    assert engine.bytes_copied - before == (stats.passes + 1) * stats.bytes_per_pass
    assert stats.prompt_tokens == len(speculative.encode(engines.PROMPT))
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
    with engines.load(
        target, draft=draft, on_progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total))
    ) as runtime:
        runtime.generate(engines.PROMPT, max_new_tokens=1, on_prefill=lambda done, total: prefill.append((done, total)))
    assert list(seen) == ["target weights", "draft weights"]
    for steps in seen.values():
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 0
    assert prefill == [(layer + 1, engines.NUM_LAYERS) for layer in range(engines.NUM_LAYERS)]


def test_closing_ends_the_copies_and_may_be_repeated(target: Path) -> None:
    before = threading.active_count()
    with engines.load(target, resident_layers=0) as runtime:
        assert threading.active_count() == before + 1
        assert "5 streamed" in runtime.placement and "through 3 buffers" in runtime.placement
        assert runtime.load_report.startswith("loaded ")
        runtime.generate(engines.PROMPT, max_new_tokens=2)
        runtime.close()
        assert threading.active_count() == before


PROMPTS = [engines.PROMPT, "the lazy dog", [5 + (3 * i * i) % 280 for i in range(300)], "and the quick brown fox jumps"]
LONG = 40


@pytest.mark.parametrize(("asked", "message"), [
    ({"params": [GenerationParams()]}, "1 params for 2 prompts: give one for each, or one for all"),
    ({"params": []}, "0 params for 2 prompts"),
    ({"params": SamplingParams(0.5)}, "params is a GenerationParams for all prompts, or a sequence"),
    ({"params": [GenerationParams(), SamplingParams()]}, "params is a GenerationParams"),
    ({"params": GenerationParams(), "temperature": 0.5}, "options are given twice, by name and as params"),
    ({"params": [GenerationParams()] * 2, "noise_ids": [1]}, "1 noise_ids for 2 prompts"),
    ({"params": [GenerationParams(), GenerationParams(gamma=1000)]}, "gamma 1000 exceeds the"),
])  # fmt: skip
def test_options_of_a_batch_that_make_no_sense(target: Path, asked: dict[str, Any], message: str) -> None:
    with engines.load(target, max_batch=2) as runtime:
        with pytest.raises(OptionError, match=message):
            runtime.generate_batch(["a", "b"], **asked)
        long = [GenerationParams(3), GenerationParams(100_000)]
        with pytest.raises(ContextLengthError, match=r"prompt 2 of 2: .* 100000 new ones exceed the context"):
            runtime.generate_batch(["a", "b"], params=long)


def test_batches_that_make_no_sense(target: Path) -> None:
    with engines.load(target, max_batch=2) as runtime:
        with pytest.raises(OptionError, match="3 prompts for a runtime loaded for 1 to 2"):
            runtime.generate_batch(["a", "b", "c"])
        with pytest.raises(OptionError):
            runtime.generate_batch([])
        with pytest.raises(ContextLengthError, match="prompt 1 of 2: "):
            runtime.generate_batch(["a", "b"], max_new_tokens=100_000)
        with pytest.raises(OptionError, match=r"prompt 2 of 2: .*empty"):
            runtime.generate_batch(["a", ""], max_new_tokens=3)
        assert len(runtime.generate_batch(["a", "b"], max_new_tokens=3)) == 2


def test_as_many_sequences_as_stream_no_more_are_chosen(short_target: Path) -> None:
    """Where device memory is short of a layer with one sequence more; where it is not, 16."""

    def plan_of(count: int | str, vram: int | None) -> RunPlan:
        with engines.load(short_target, draft="none", context=512, max_batch=count, vram=vram) as runtime:
            return runtime.plan

    assert plan_of("auto", None).target.batch == 16
    whole = plan_of(4, None)
    vram = whole.cards[0].device_bytes
    chosen = plan_of("auto", vram)
    assert not chosen.streamed_bytes and 4 <= chosen.target.batch < 16
    assert chosen.target.context_tokens == 512
    with suppress(BudgetError):
        assert plan_of(chosen.target.batch + 1, vram).streamed_bytes > 0


DESIGN = Path(__file__).resolve().parent.parent / "docs/design.md"
OURS = ("/offload_runtime/", "/offload_runtime_kernels/")


def traced(runtime: Runtime, note: Callable[[FrameType], None], count: int, **options: Any) -> None:
    """Generate so many tokens, with `note` called for each call of a Python function of this thread."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            note(frame)

    sys.setprofile(profile)
    try:
        runtime.generate(engines.PROMPT, max_new_tokens=count, ignore_eos=True, **options)
    finally:
        sys.setprofile(None)


def most(what: str) -> int:
    """What the design page says of the path of a token."""
    found = re.search(rf"^\| {re.escape(what)} \| (\d+) \|$", DESIGN.read_text(), re.MULTILINE)
    assert found, what
    return int(found[1])


def callers_of_kernels(runtime: Runtime) -> list[list[str]]:
    """The functions from `generate` on that each call of a layer's first kernel is behind, those of torch included."""
    found: list[list[str]] = []

    def note(frame: FrameType) -> None:
        code = frame.f_code
        if code.co_name != "rms_norm" or Path(code.co_filename).name != "rms_norm.py":
            return
        callers, caller = list[str](), frame.f_back
        while caller is not None:
            callers.append(f"{Path(caller.f_code.co_filename).name} {caller.f_code.co_name}")
            caller = None if caller.f_code is Runtime.generate.__code__ else caller.f_back
        found.append(callers[::-1])

    traced(runtime, note, 2)
    return found


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_the_first_kernel_is_close_to_generate(target: Path, draft: str) -> None:
    with engines.load(target, draft=draft, resident_layers=2) as runtime:
        found = callers_of_kernels(runtime)
    callers = max(found, key=len)
    assert callers[0] == "runtime.py generate", callers[0]
    assert len(callers) <= most("calls in front of a layer's first kernel"), "\n".join(callers)


@pytest.mark.parametrize(
    ("tree_nodes", "by"), [(0, "plain decoding, kernels included"), (16, "a tree")], ids=["plain", "tree"]
)
def test_a_token_enters_few_files(target: Path, draft: Path, tree_nodes: int, by: str) -> None:
    """Kernels are counted, as a CPU computes them; a layer is streamed."""
    files = set[str]()

    def note(frame: FrameType) -> None:
        name = frame.f_code.co_filename
        if any(part in name for part in OURS) and "/tests/" not in name:
            files.add(name.rpartition("/offload_runtime")[2])

    options: dict[str, Any] = {"gamma": 6, "tree_nodes": tree_nodes} if tree_nodes else {}
    with engines.load(target, draft=draft if tree_nodes else "none", resident_layers=2, **options) as runtime:
        traced(runtime, note, 8)
    assert len(files) <= most(f"files of ours entered by {by}"), "\n".join(sorted(files))


@pytest.mark.parametrize("read", [3, 40, 95, 130])
def test_a_draft_catches_up_with_what_plain_steps_have_said(read: int, target: Path, draft: Path) -> None:
    """By steps over trees or by a pass: what it says behind a text is what it says of one that it has read at once."""
    text, found = [3 + (7 * i * i + i // 5) % 290 for i in range(140)], list[Any]()
    with engines.load(target, draft=draft, context=400, tree_nodes=16) as runtime:
        drafter = drafting(runtime.engine.drafter)
        assert isinstance(drafter, ModelDrafter)
        steps = drafter.runner
        steps.join(0, SamplingParams(temperature=0.8, seed=7))
        for length in (len(text), read):
            steps.texts.catch_up(0, [])
            steps.texts.prepare(0, text[:length])
            with torch.inference_mode():
                (children,) = steps.expand({0: Asked(text, [(text[-1], ())])})[0]
                steps.texts.catch_up(0, [])
                steps.texts.prepare(0, text[:length])
                found.append((children.tokens, children.scores, steps.chains({0: text}, {0: 5})))
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)
