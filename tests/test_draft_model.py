"""The draft's loop on the device: with any cache its guesses are those of dense attention over what the cache keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counting
from typing import Any

import pytest
import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from offload_runtime_kernels.window_steps import StepLayout, StepRotation

from offload_runtime.kv.device import StreamingDraftCache, kv_cache_bytes, streaming_capacity_tokens
from offload_runtime.memory import DeviceBudget
from offload_runtime.model import RopeTable, RowBuilder
from offload_runtime.params import SamplingParams
from offload_runtime.runners import (
    DeviceWindow,
    DraftModel,
    ModelRunner,
    StepGraphs,
    WindowInput,
    device_window_bytes,
)
from tests.helpers.assembly import CHUNK_TOKENS, CPU, Assembled, make_runner
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.sampling import join_all, numbered, sample

SINKS, RECENT, WINDOW, BATCH = 4, 100, 16, 3
NOISY = SamplingParams(temperature=0.8, seed=5)


@dataclass(frozen=True)
class Draft:
    """A draft with a streaming cache, and the transformers model that it was made of."""

    hf_model: Any
    made: Assembled
    cache: StreamingDraftCache
    runner: ModelRunner

    def model(self, params: SamplingParams, *, num_sequences: int = 1) -> DraftModel:
        """A loop that knows nothing yet."""
        model = DraftModel(self.runner, vocab_size=VOCAB_SIZE, batch=BATCH)
        join_all(model, numbered(params, num_sequences))
        return model


def propose(model: DraftModel, tokens: Sequence[int], count: int, *, sequence: int = 0) -> list[int]:
    """What a draft says behind one text, while all other sequences wait."""
    return model.propose({sequence: tokens}, {sequence: count})[sequence]


def make_draft(
    name: str, *, sinks: int = SINKS, recent: int = RECENT, window: int = WINDOW,
    device: torch.device = CPU,
) -> Draft:  # fmt: skip
    """A small random model that keeps `sinks` and at least `recent` tokens."""
    hf_model = random_model(name, seed=7)
    made = make_runner(hf_model, capacity_tokens=BLOCK_TOKENS, device=device)
    config = made.runner.decoder.config
    cache = StreamingDraftCache(
        config, torch.float32, sink_tokens=sinks, recent_tokens=recent, window_tokens=window, batch=BATCH,
        budget=DeviceBudget(device, None),
    )  # fmt: skip
    rope = RopeTable(config, device, fixed_length=cache.capacity_tokens)
    runner = ModelRunner(made.runner.decoder, made.runner.streamer, cache, RowBuilder(rope), CHUNK_TOKENS)
    return Draft(hf_model, made, cache, runner)


@pytest.fixture(scope="module")
def draft() -> Iterator[Draft]:
    made = make_draft("llama-gqa")
    yield made
    made.made.close()


def rotate(x: torch.Tensor, angle: torch.Tensor, scaling: float) -> torch.Tensor:
    """Rotate [T, H, D] by [T, D/2], as transformers does."""
    cos, sin = angle.cos().repeat(1, 2)[:, None] * scaling, angle.sin().repeat(1, 2)[:, None] * scaling
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class DenseStreaming:
    """StreamingLLM by the book: keys are stored before RoPE and rotated by their index among those that are kept.

    `window_length` chooses the frequencies where they depend on a length.
    """

    def __init__(self, hf_model: Any, *, sinks: int, recent: int, window_length: int, sequence: int = 0) -> None:
        self._model, self._sinks, self._recent, self._sequence = hf_model, sinks, recent, sequence
        rotary = hf_model.model.rotary_emb
        rotary(torch.zeros(1), position_ids=torch.tensor([[window_length - 1]]))  # lets it choose its frequencies
        self._frequencies, self._scaling = rotary.inv_freq.clone(), float(rotary.attention_scaling)
        layers = range(len(hf_model.model.layers))
        self._keys: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in layers]
        self._tokens: list[int] = []

    def kept(self, length: int) -> list[int]:
        """Positions that a sequence of `length` tokens keeps."""
        start = max(0, (length - self._sinks - self._recent) // BLOCK_TOKENS * BLOCK_TOKENS)
        return [p for p in range(length) if p < self._sinks or p >= start + self._sinks]

    def forget(self) -> None:
        """Compute everything anew next time."""
        self._tokens = []

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], count: int, params: SamplingParams) -> list[int]:
        """What the draft says behind `tokens`; it has seen `tokens` but for those it could not know."""
        length, said = len(tokens), list(tokens)
        kept = self.kept(length)  # stays as it is while it guesses
        same = next((i for i, (a, b) in enumerate(zip(self._tokens, tokens, strict=False)) if a != b), length)
        known = min(same, len(self._tokens), max(0, length - 2))
        unseen = [p for p in kept if known <= p < length - 2]
        if unseen:
            self._feed(said, unseen, kept)
        logits = self._feed(said, [p for p in (length - 2, length - 1) if p >= 0], kept)
        for position in range(length, length + count):
            place = torch.tensor([position])
            said += sample(logits, params, place, torch.full_like(place, self._sequence)).tolist()
            if len(said) < length + count:
                kept = [*kept, position]
                logits = self._feed(said, [position], kept)
        self._tokens = said[:-1]
        return said[length:]

    def _feed(self, tokens: Sequence[int], positions: list[int], kept: list[int]) -> torch.Tensor:
        """Logits [1, V] of the last of `positions`, all of which see what is kept up to them."""
        index = {position: at for at, position in enumerate(kept)}
        kept = [p for p in kept if p <= positions[-1]]
        query_angle = torch.tensor([index[p] for p in positions])[:, None] * self._frequencies
        key_angle = torch.tensor([index[p] for p in kept])[:, None] * self._frequencies
        hidden_keys = torch.tensor([[k > p for k in kept] for p in positions])
        x = self._model.model.embed_tokens(torch.tensor([tokens[p] for p in positions]))
        for layer, stored in zip(self._model.model.layers, self._keys, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            heads = (len(positions), -1, attention.head_dim)
            q, k, v = (
                project(normed).view(heads) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            stored.update(zip(positions, zip(k, v, strict=True), strict=True))
            k, v = (torch.stack([stored[p][part] for p in kept]) for part in (0, 1))
            q, k = rotate(q, query_angle, self._scaling), rotate(k, key_angle, self._scaling)
            group = q.shape[1] // k.shape[1]
            scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * attention.head_dim**-0.5
            weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(dim=-1)
            mixed = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1))
            x = x + attention.o_proj(mixed.reshape(len(positions), -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self._model.lm_head(self._model.model.norm(x[-1:]))


def dense_streaming(draft: Draft, *, sinks: int = SINKS, recent: int = RECENT, sequence: int = 0) -> DenseStreaming:
    return DenseStreaming(
        draft.hf_model, sinks=sinks, recent=recent, window_length=draft.cache.capacity_tokens, sequence=sequence
    )


def play(
    draft: Draft, reference: DenseStreaming, params: SamplingParams, tokens: list[int], *, until: int, sequence: int = 0
) -> list[int]:
    """Rounds whose guesses are accepted up to every place in turn; each must be the reference's. The whole sequence."""
    model, gamma = draft.model(params, num_sequences=sequence + 1), 7
    for request in counting():
        guesses = propose(model, tokens, gamma, sequence=sequence)
        assert guesses == reference.propose(tokens, gamma, params), f"behind {len(tokens)} tokens"
        accepted = 5 * request % (gamma + 1)
        other = (guesses[accepted] + 1) % VOCAB_SIZE if accepted < gamma else request % VOCAB_SIZE
        tokens = [*tokens, *guesses[:accepted], other]
        if len(tokens) > until:
            return tokens
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("params", [SamplingParams(), NOISY], ids=["greedy", "noisy"])
def test_streaming_guesses_are_dense_attention_over_sinks_and_recent(draft: Draft, params: SamplingParams) -> None:
    # The start moves at 360 and 616 tokens.
    play(draft, dense_streaming(draft), params, random_tokens(340, seed=1), until=630)
    assert draft.cache.starts[0] == 2 * BLOCK_TOKENS == draft.cache.rope_shifts[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [1, 2, 3, SINKS, SINKS + 1, SINKS + 2])
def test_prompts_about_as_long_as_the_sinks(draft: Draft, length: int) -> None:
    play(draft, dense_streaming(draft), NOISY, random_tokens(length, seed=length), until=40)


@pytest.mark.slow
@pytest.mark.parametrize("length", [359, 360, 361, 1000])
def test_of_a_long_prompt_only_what_is_kept_is_computed(draft: Draft, length: int) -> None:
    reference, tokens = dense_streaming(draft), random_tokens(length, seed=length)
    draft.cache.reset(0, 0)
    assert propose(draft.model(NOISY), tokens, 5) == reference.propose(tokens, 5, NOISY)
    assert draft.cache.length(0) == len(reference.kept(length)) + 4
    assert draft.cache.rope_shifts[0] == 0  # a prompt is rotated by its indices
    play(draft, dense_streaming(draft), NOISY, tokens, until=length + 30)


@pytest.mark.slow
@pytest.mark.parametrize(("sinks", "recent"), [(1, 2), (BLOCK_TOKENS, 30), (64, 300)])
def test_other_numbers_of_sinks_and_recent_tokens(sinks: int, recent: int) -> None:
    draft = make_draft("llama", sinks=sinks, recent=recent)
    first_move = sinks + recent + BLOCK_TOKENS
    tokens = random_tokens(first_move - 40, seed=2)
    play(draft, dense_streaming(draft, sinks=sinks, recent=recent), NOISY, tokens, until=first_move + 40)
    assert draft.cache.starts[0] == BLOCK_TOKENS
    draft.made.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-longrope", "llama-yarn"])
def test_frequencies_are_those_of_the_window(name: str) -> None:
    draft = make_draft(name)
    play(draft, dense_streaming(draft), NOISY, random_tokens(10, seed=3), until=60)
    play(draft, dense_streaming(draft), NOISY, random_tokens(330, seed=3), until=400)
    draft.made.close()


def test_a_sequence_that_jumps_is_computed_anew(draft: Draft) -> None:
    model, reference, tokens = draft.model(NOISY), dense_streaming(draft), random_tokens(1200, seed=4)
    # Far ahead, over the whole window, back behind the start, to another sequence, back to where nothing is let go of.
    for length, head in ((900, 0), (950, 0), (1190, 0), (700, 0), (700, 2), (703, 2), (200, 2), (800, 2)):
        shown = [*random_tokens(head, seed=head), *tokens[head:length]]
        if length != 703:
            model.join(0, NOISY)
            reference.forget()
        assert propose(model, shown, 6) == reference.propose(shown, 6, NOISY)


class Watched(list[int]):
    """A text that counts which of its tokens are asked for one by one."""

    asked = 0

    def __getitem__(self, index: Any) -> Any:
        self.asked += isinstance(index, int)
        return super().__getitem__(index)


def test_a_text_that_grows_is_compared_once(draft: Draft) -> None:
    model, tokens = draft.model(NOISY), random_tokens(900, seed=6)
    propose(model, tokens[:890], 4)
    watched = Watched(tokens)
    propose(model, watched, 4)
    assert watched.asked <= 8  # what was proposed, and nothing of what it stood behind
    model.join(0, NOISY)
    propose(model, watched, 4)
    assert watched.asked >= 890


def test_few_new_tokens_may_be_all_that_is_kept() -> None:
    draft = make_draft("llama", sinks=1, recent=2)
    model, reference, tokens = draft.model(NOISY), dense_streaming(draft, sinks=1, recent=2), random_tokens(262, seed=8)
    propose(model, tokens[:250], 2)
    assert propose(model, tokens, 4) == reference.propose(tokens, 4, NOISY)
    draft.made.close()


@pytest.mark.slow
def test_sequences_of_a_batch_have_their_own_rows_and_noise(draft: Draft) -> None:
    first = play(draft, dense_streaming(draft), NOISY, random_tokens(350, seed=5), until=380)
    place = draft.cache.starts[0], draft.cache.length(0)
    other = dense_streaming(draft, sequence=1)
    second = play(draft, other, NOISY, random_tokens(340, seed=5)[:340], until=380, sequence=1)
    assert (draft.cache.starts[0], draft.cache.length(0)) == place
    assert first[355:370] != second[355:370]


@pytest.mark.slow
def test_a_window_that_others_verify(draft: Draft) -> None:
    # Another level accepts on the device, moves `end` on, and lets the draft go on without the host.
    tokens = random_tokens(350, seed=6)
    expected = dense_streaming(draft).propose(tokens, 12, NOISY)
    model = draft.model(NOISY)
    model.texts.catch_up(0, tokens)
    model.window.upload({0: WindowInput(tokens[-3:], 350, 360, 364)})
    model.steps(5, longest={0: 350})
    model.window.end.add_(4)
    model.steps(8, longest={0: 355})
    said = model.window.read()[0]
    assert said.between(350, 362) == expected
    assert (said.end, said.between(347, said.end)) == (354, [*tokens[-3:], *expected[:4]])
    model.texts.learned(0, [*tokens[-2:], *expected[:4]])
    assert propose(model, [*tokens, *expected[:5]], 7) == expected[5:]


@pytest.mark.slow
def test_a_window_is_bounded(draft: Draft) -> None:
    tokens = random_tokens(300, seed=7)
    model = DraftModel(draft.runner, vocab_size=VOCAB_SIZE, window=DeviceWindow(CPU, capacity=9))
    assert model.room(300) == 7 and len(propose(model, tokens, 30)) == 7
    roomy = draft.model(NOISY)
    assert len(propose(roomy, tokens, 1000)) == roomy.room(300) == draft.cache.capacity_tokens - 300 + 1
    roomy.window.upload({0: WindowInput(tokens[-2:], 300, 1000, 1000)})
    with pytest.raises(AssertionError):
        roomy.steps(draft.cache.capacity_tokens, longest={0: 300})


def test_device_window_holds_tokens_at_absolute_positions() -> None:
    window = DeviceWindow(CPU, capacity=6, batch=3)
    for sequence in (0, 1):
        window.join(sequence)
    window.upload({1: WindowInput([7, 8, 9], 1003, 1005, 1006)})
    cursor = torch.zeros(2, dtype=torch.int32)
    for position, token in ((1003, -1), (1005, 11), (1006, 12)):
        window.put(torch.tensor([5, position], dtype=torch.int32), torch.tensor([[3], [token]]), cursor=cursor)
        assert cursor.tolist() == [0, min(position + 1, 1006)], "behind the last position nothing is put"
    rotation = StepRotation(torch.ones(2, 1), 1.0)
    rows = window.rows(window.end, StepLayout.chain(-2, 3, CPU), rotation, last_token=8)
    assert rows.tokens.tolist() == [0, 0, 0, 8, 8, 0]
    assert rows.positions.tolist() == [[-1, -1, -1], [1001, 1002, 1003]]
    assert window.end.tolist() == [0, 1003]
    (number, said), *others = window.read().items()
    assert (number, said.end, said.base, others) == (1, 1003, 1000, [])
    assert said.between(1000, 1006) == [7, 8, 9, -1, 0, 11]
    window.upload({0: WindowInput([1], 1, 2, 2)})
    assert window.read()[0].between(0, 1) == [1] and window.end.tolist() == [1, 0], "sequence 1 waits from now on"
    runners_up_bytes = 4 * 3 * 6
    assert device_window_bytes(6, batch=3) == window.end.untyped_storage().nbytes() + runners_up_bytes


def test_the_planner_knows_what_a_streaming_cache_takes(draft: Draft) -> None:
    budget = DeviceBudget(CPU, None)
    config = draft.runner.decoder.config
    sizes = {"sink_tokens": 4, "recent_tokens": 500, "window_tokens": 64}
    cache = StreamingDraftCache(config, torch.bfloat16, **sizes, batch=3, budget=budget)
    assert cache.capacity_tokens == streaming_capacity_tokens(**sizes) == 1024
    assert budget.reserved_bytes == kv_cache_bytes(config, torch.bfloat16, capacity_tokens=1024, batch=3)
    longest = max(length - cache.start_for(length) for length in range(3000))
    assert longest == 4 + 500 + 255 <= cache.capacity_tokens - 64


GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def gpu_draft() -> Iterator[Draft]:
    made = make_draft("llama-gqa", device=GPU)
    yield made
    made.made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=5)], ids=str)
def test_replays_say_what_eager_steps_say(gpu_draft: Draft, params: SamplingParams) -> None:
    graphed, eager = gpu_draft.model(params), gpu_draft.model(params)
    eager.graphs = StepGraphs(CPU)
    said: list[list[int]] = []
    for model in (graphed, eager):
        tokens = random_tokens(310, seed=1)
        for request in range(80):
            guesses = propose(model, tokens, 7)
            tokens = [*tokens, *guesses[: request % 8], request]
        said.append(tokens)
    assert said[0] == said[1]
    assert len(said[0]) > 616, "the start moved twice"
    # Its first and its other steps, over one and two blocks.
    assert graphed.graphs.num_graphs == 4


@pytest.mark.gpu
def test_steps_never_wait_and_leave_copies_alone(gpu_draft: Draft) -> None:
    model, tokens = gpu_draft.model(NOISY), random_tokens(350, seed=2)
    expected = propose(gpu_draft.model(NOISY), tokens, 12)
    source = torch.arange(1 << 24, dtype=torch.int32).pin_memory()
    target = torch.zeros(1 << 24, dtype=torch.int32, device=GPU)
    side = torch.cuda.Stream()
    model.texts.catch_up(0, tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            for _ in range(8):
                target.copy_(source, non_blocking=True)
        model.window.upload({0: WindowInput(tokens[-2:], 350, 362, 362)})
        model.steps(12, longest={0: 350})  # the first ones are captured meanwhile
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model.window.read()[0].between(350, 362) == expected
    side.synchronize()
    assert torch.equal(target.cpu(), source)


@pytest.mark.gpu
def test_the_oldest_graph_is_dropped() -> None:
    graphs, total = StepGraphs(GPU, most_graphs=2), torch.zeros(1, device=GPU)

    def add(amount: int) -> None:
        total.add_(torch.full_like(total, amount))

    # What ran once only takes no graph's place; the third graph takes that of the first.
    for amount in (1, 10, 100, 1, 10, 100, 1, 10):
        graphs.run(amount, lambda amount=amount: add(amount))
    assert total.item() == 3 + 30 + 200
    assert graphs.num_graphs == 2
