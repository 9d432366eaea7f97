"""What passes keep of the residual stream for heads is the same for a row however it came into a pass; and captured
passes, in windows filled up to few shapes, have the bits of those whose kernels are launched one by one."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime import Runtime
from offload_runtime.core import Batch, TokenTree
from offload_runtime.params import SamplingParams
from offload_runtime.runners.graphs import CAPTURED_ROWS
from offload_runtime.runners.model_runner import CapturedPasses, HiddenTaps, ModelRunner
from offload_runtime.sampling import SlotSampling
from tests.helpers.assembly import RUNNERS, assemble, make_runner, prefill, reset, runner_of, same, verify
from tests.helpers.models import random_model, random_tokens
from tests.helpers.sampling import numbered

CAPACITY, TEXT = 400, [3 + number * 37 % 90 for number in range(330)]
# Some of a prompt; then a window and a tree, of each what is committed of it.
PROMPT_TOKENS = 300


def tapping(config: Any, layers: Sequence[int]) -> HiddenTaps:
    """Keeps all channels of the stream below each of these layers, beside those of the others."""
    size = config.hidden_size

    def tap(number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        out[:, number * size :] = torch.nan
        out[:, number * size : (number + 1) * size] = x
        if number:  # NaN unless they come in their order; no graph can be captured of an assert
            out[:, number * size : (number + 1) * size] += 0 * out[:, number * size - 1 : number * size]

    return HiddenTaps(tuple(layers), len(layers) * size, tap)


def doubling(config: Any) -> HiddenTaps:
    """Keeps twice the stream behind the last layer, in its place."""
    return HiddenTaps((config.num_layers,), config.hidden_size, lambda _, x, out: out.copy_(2 * x), in_place=True)


def kept(batch: Batch, slot: int) -> torch.Tensor:
    return torch.cat([*batch.hidden[slot]])


def in_one_pass(runner: ModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """Of all tokens, read as a prompt."""
    found = kept(runner.forward(Batch(prompts={0: tokens})), 0)
    runner.cache.truncate(0, 0)
    return found.clone()


def step_by_step(runner: ModelRunner) -> torch.Tensor:
    """The same of a prompt in two parts, a token, a window and a tree, beside which others are in the pass."""
    found, cache = [], runner.cache
    for part in (TEXT[:17], TEXT[17:PROMPT_TOKENS]):
        found.append(kept(runner.forward(Batch(prompts={0: part})), 0).clone())
    other = {1: TokenTree((9, 8, 7, 6, 5, 4, 3))}
    runner.forward(Batch(prompts={1: [*range(3, 60)]}))
    at = PROMPT_TOKENS
    branching = TokenTree((TEXT[at + 5], 90, TEXT[at + 6], 91, TEXT[at + 7]), (-1, 0, 0, 1, 2))
    for tree, path in (
        (TokenTree((TEXT[at],)), [0]),
        (TokenTree(tuple(TEXT[at + 1 : at + 5])), [0, 1, 2, 3]),
        (branching, [0, 2, 4]),
    ):
        batch = runner.forward(Batch({**other, 0: tree}))
        assert [len(batch.hidden[slot][0]) for slot in (0, 1)] == [len(tree), 7], "absent rows are nobody's"
        found.append(kept(batch, 0)[path])
        cache.commit_path(0, path)
    for slot in (0, 1):
        cache.truncate(slot, 0)
    return torch.cat(found)


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModelRunner]:
    made = runner_of(request.param, tmp_path, capacity_tokens=CAPACITY)
    yield made.runner
    made.close()


def assert_kept_alike(runner: ModelRunner) -> None:
    depth = runner.decoder.num_layers
    runner.taps = tapping(runner.decoder.config, (0, 1, depth - 1, depth))
    text = TEXT[: PROMPT_TOKENS + 8]
    expected, found = in_one_pass(runner, text), step_by_step(runner)
    assert found.shape == expected.shape and found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    at = 2 * runner.decoder.config.hidden_size
    assert not torch.equal(expected[:, :at], expected[:, at:]), "the stream is not the same everywhere"
    runner.taps = doubling(runner.decoder.config)
    torch.testing.assert_close(step_by_step(runner), 2 * expected[:, -at // 2 :], rtol=1e-5, atol=1e-5)


def test_what_is_kept_of_a_row_is_that_of_one_prompt(runner: ModelRunner) -> None:
    assert_kept_alike(runner)


@pytest.mark.parametrize("resident", [0, "auto"])
def test_rows_are_kept_on_the_first_card(target: Path, resident: int | str) -> None:
    """Layers by turns, and in a block a card."""
    found = []
    for device in ("cpu,cpu", "cpu"):
        with Runtime.load(target, draft="none", device=device, resident_layers=resident, max_batch=2) as runtime:
            runner = runtime.engine.target.runner
            assert_kept_alike(runner)
            found.append(in_one_pass(runner, TEXT))
    assert torch.equal(*found)


def test_a_captured_pass_keeps_what_another_does() -> None:
    made, random_ = make_runner(random_model("llama-gqa"), capacity_tokens=CAPACITY), random.Random(1)
    runner, found = made.runner, list[torch.Tensor]()
    runner.taps = tapping(runner.decoder.config, (1, 4))
    runner.forward(Batch(prompts={0: TEXT[:40], 1: TEXT[:30]}))
    trees: Mapping[int, TokenTree] = {
        slot: TokenTree(tuple(TEXT[:size]), tuple(random_.randrange(-1, node) for node in range(size)))
        for slot, size in ((0, 9), (1, 3))
    }
    for captured in (None, CapturedPasses(runner.decoder, runner.streamer, runner.cache, runner.rope, runner.taps)):
        runner.captured = captured
        batch = runner.forward(Batch(trees))
        found.append(torch.cat([kept(batch, slot) for slot in (0, 1)]).clone())
    made.close()
    assert torch.equal(*found) and found[0].isfinite().all() and len(found[0]) == 12


GPU = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
DEVICES = [pytest.param({}, id="cpu"), pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)]
PLAYS = 3 if torch.cuda.is_available() else 1  # of passes that are captured, most of which a GPU replays from then on
LENGTHS = (300, 41, 3)  # of the prompts; a block ends 256 - 44 tokens behind the first


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(params=["llama-gqa", "mistral-window", pytest.param("llama-dynamic", marks=pytest.mark.slow)])
def captured_by(request: pytest.FixtureRequest, device: dict[str, Any]) -> Iterator[ModelRunner]:
    made = assemble(request.param, batch=3, **device)
    yield made.runner
    made.close()


def captured(captured_by: ModelRunner) -> CapturedPasses:
    return CapturedPasses(
        captured_by.decoder, captured_by.streamer, captured_by.cache, captured_by.rope, captured_by.taps
    )


def read_prompts(captured_by: ModelRunner, lengths: Sequence[int] = LENGTHS) -> None:
    for sequence, length in enumerate(lengths):
        prefill(captured_by, sequence, random_tokens(length, seed=sequence))


def random_window(generator: random.Random, most: int) -> TokenTree:
    tokens = tuple(generator.randrange(100) for _ in range(generator.randint(1, most)))
    if generator.random() < 0.5:
        return TokenTree(tokens)
    return TokenTree(tokens, tuple(generator.randrange(-1, node) for node in range(len(tokens))))


def random_passes(seed: int) -> list[dict[int, TokenTree]]:
    generator, passes = random.Random(seed), []
    for _ in range(30):
        sequences = generator.sample(range(3), generator.randint(1, 3))
        passes.append({slot: random_window(generator, generator.choice((1, 3, 12))) for slot in sequences})
    return passes


def kv_of(captured_by: ModelRunner) -> list[torch.Tensor]:
    """Keys and values of everything that is committed."""
    found = []
    for layer in range(captured_by.decoder.config.num_layers):
        for sequence in range(3):
            positions = torch.arange(captured_by.cache.length(sequence), device=captured_by.rope.device)
            found += captured_by.cache.store(layer).at(positions.new_tensor([sequence]), positions)
    return [side.clone() for side in found]


def play(
    captured_by: ModelRunner, passes: Sequence[dict[int, TokenTree]], lengths: Sequence[int] = LENGTHS
) -> list[torch.Tensor]:
    """Logits of passes behind each of which a path is committed, and the keys and values that they leave."""
    reset(captured_by)
    read_prompts(captured_by, lengths)
    found = []
    for windows in passes:
        found.append(verify(captured_by, windows).clone())
        for sequence, window in windows.items():
            path, last = list[int](), 0
            for node, parent in enumerate(window.parents):
                if node == 0 or parent == last:
                    path, last = [*path, node], node
            captured_by.cache.commit_path(sequence, path)
    return [*found, *kv_of(captured_by)]


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_captured_passes_say_what_others_say(captured_by: ModelRunner, seed: int) -> None:
    passes = random_passes(seed)
    expected = play(captured_by, passes)
    captured_by.captured = captured(captured_by)
    for _ in range(PLAYS):  # the second time most of them are replayed
        assert all(map(same, expected, play(captured_by, passes)))
    if captured_by.rope.device.type == "cuda":
        assert captured_by.captured.graphs.num_graphs > 3


SAMPLINGS = [SamplingParams(), SamplingParams(temperature=1.0, seed=2**40), SamplingParams(temperature=0.8, top_k=30)]


@pytest.mark.few(1)
@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_captured_passes_choose_what_their_logits_say(device: dict[str, Any], params: SamplingParams) -> None:
    """Rows that fill up windows are between those of tokens, and each token has its position's noise."""
    made = assemble("llama-gqa", batch=3, **device)
    captured_by = made.runner
    sampling = SlotSampling.of(numbered(params, 3), captured_by.rope.device)
    read_prompts(captured_by)
    passes = [{2: TokenTree((7,))}, *random_passes(3), {1: TokenTree((3,) * (CAPTURED_ROWS + 1))}]

    def taken(windows: dict[int, TokenTree]) -> dict[int, tuple[list[int], torch.Tensor]]:
        batch = captured_by.forward(Batch(windows), sampling)
        assert batch.tokens is not None
        tokens, rows = batch.tokens(), zip(windows.items(), batch.firsts, strict=True)
        parts = {slot: slice(first, first + len(window)) for (slot, window), first in rows}
        return {slot: (tokens[part], batch.logits[part].clone()) for slot, part in parts.items()}

    expected = [taken(windows) for windows in passes]
    captured_by.captured = captured(captured_by)
    for _ in range(PLAYS):
        for windows, said in zip(passes, expected, strict=True):
            verify(captured_by, dict([*windows.items()][:1]))  # nobody asks for its tokens
            for slot, (tokens, logits) in taken(windows).items():
                assert tokens == said[slot][0] and same(logits, said[slot][1])
    made.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("params", SAMPLINGS[:2], ids=["greedy", "sampled"])
def test_passes_that_are_launched_ahead_change_nothing(captured_by: ModelRunner, params: SamplingParams) -> None:
    """Of all that may follow a pass: the one that was launched, one with another token or other sequences, a window, a
    sequence that was cut, a prompt; and over the end of a block. What a head reads stays there, too."""
    captured_by.taps = tapping(captured_by.decoder.config, (1, captured_by.decoder.num_layers))
    sampling = SlotSampling.of(numbered(params, 3), captured_by.rope.device)
    launched = 0

    def play_plainly(ahead: bool) -> list[object]:
        nonlocal launched
        reset(captured_by)
        read_prompts(captured_by)
        generator, found, last = random.Random(5), list[object](), [7, 8, 9]

        def step(slots: Sequence[int]) -> None:
            nonlocal launched
            batch = captured_by.forward(Batch({slot: TokenTree((last[slot],)) for slot in slots}), sampling)
            if ahead:
                launched += captured_by.go_ahead()
            assert batch.tokens is not None
            tokens = [batch.tokens()[first] for first in batch.firsts]
            found.extend([*tokens, *(kept(batch, slot).clone() for slot in slots)])
            for slot, token in zip(slots, tokens, strict=True):
                last[slot] = token
                captured_by.cache.commit_path(slot, [0])

        for _ in range(12):
            for _ in range(generator.randint(1, 5)):
                step((0, 1, 2))
            slot = generator.randrange(3)
            what = generator.randrange(5)
            if what == 0:
                last[slot] = 11
            elif what == 1:
                step((slot,))
            elif what == 2:
                found.append(verify(captured_by, {slot: TokenTree((last[slot], 5, 6))}).clone())
                captured_by.cache.commit_path(slot, [0, 1])
            elif what == 3:
                captured_by.cache.truncate(slot, captured_by.cache.length(slot) - 1)
            else:
                captured_by.cache.truncate(slot, 0)
                prefill(captured_by, slot, random_tokens(20, seed=generator.randrange(100)))
        return [*found, *kv_of(captured_by)]

    expected = play_plainly(False)
    captured_by.captured = captured(captured_by)
    for _ in range(PLAYS):  # the last time most of them are replayed
        for one, other in zip(play_plainly(True), expected, strict=True):
            assert (
                same(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else one == other
            )
    assert launched > 15 * PLAYS
