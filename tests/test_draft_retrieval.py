"""A draft that retrieves: what its passes attend to, from its first token on and after any cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import SpeculationOptions
from offload_runtime.errors import ContextLengthError
from offload_runtime.kv import DeviceKVCache
from offload_runtime.kv.retrieval import RetrievalPolicy, RetrievedDraftCache
from offload_runtime.memory import DeviceBudget
from offload_runtime.model import RopeTable, RowBuilder
from offload_runtime.params import SamplingParams
from offload_runtime.plan.memory import ModelPlan, all_resident
from offload_runtime.runners import DraftModel, ModelRunner, StepGraphs
from offload_runtime.weights.layout import ModelLayout
from tests.helpers.assembly import CHUNK_TOKENS, CPU, Assembled, make_runner
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.sampling import join_all, numbered
from tests.test_draft_model import propose

CAPACITY, CHUNK, FEW, ALL, BATCH = 1400, 8, 96, 1408, 3
NOISY = SamplingParams(temperature=0.8, seed=5)


@dataclass(frozen=True)
class Base:
    """A small random model."""

    made: Assembled
    device: torch.device

    def draft(
        self, budget_tokens: int | None, params: SamplingParams = NOISY, *, num_sequences: int = 1,
        retrieved: type[RetrievedDraftCache] = RetrievedDraftCache,
    ) -> Draft:  # fmt: skip
        """A loop over a new cache that retrieves so much, or over a full one."""
        config, budget = self.made.runner.decoder.config, DeviceBudget(self.device, None)
        cache: DeviceKVCache | RetrievedDraftCache
        if budget_tokens is None:
            cache = DeviceKVCache(config, torch.float32, capacity_tokens=CAPACITY, batch=BATCH, budget=budget)
        else:
            cache = retrieved(
                config, torch.float32, capacity_tokens=CAPACITY, budget_tokens=budget_tokens, chunk_size=CHUNK,
                batch=BATCH, budget=budget,
            )  # fmt: skip
        rows = RowBuilder(RopeTable(config, self.device))
        runner = ModelRunner(self.made.runner.decoder, self.made.runner.streamer, cache, rows, CHUNK_TOKENS)
        return Draft(runner, loop(runner, params, num_sequences=num_sequences))


@dataclass(frozen=True)
class Draft:
    """A runner with a cache of its own, and a loop over it."""

    runner: ModelRunner
    model: DraftModel


def loop(runner: ModelRunner, params: SamplingParams = NOISY, *, num_sequences: int = 1) -> DraftModel:
    """A loop that knows nothing yet."""
    model = DraftModel(runner, vocab_size=VOCAB_SIZE, batch=BATCH)
    join_all(model, numbered(params, num_sequences))
    return model


@pytest.fixture(scope="module")
def base() -> Iterator[Base]:
    hf_model = random_model("llama-gqa", seed=7)
    made = make_runner(hf_model, capacity_tokens=BLOCK_TOKENS)
    yield Base(made, CPU)
    made.close()


@dataclass(frozen=True)
class Attended:
    """One layer of a pass that is no prefill: what was asked, what the cache held before and after, the answer."""

    layer: int
    q: torch.Tensor  # [T, H, D]
    positions: torch.Tensor  # [T]
    first_recent: int
    keys_values: torch.Tensor  # [2, H_kv, S, D]
    held_before: torch.Tensor  # [H_kv, K] int32
    held: torch.Tensor  # the same
    out: torch.Tensor  # [T, H, D]

    def choice(self, policy: RetrievalPolicy) -> torch.Tensor:
        """[H_kv, K]: what its own queries choose."""
        available = self.first_recent // CHUNK
        return policy.select(
            self.layer, self.q[None], [available], scale=self.q.shape[2] ** -0.5, held=self.held_before[None]
        )[0]

    def expected(self) -> torch.Tensor:
        """[T, H, D]: attention to the chunks that were held, and to everything recent, in plain torch."""
        keys, values = self.keys_values
        place, out = torch.arange(keys.shape[1]), []
        for head in range(self.q.shape[1]):
            group = head * keys.shape[0] // self.q.shape[1]
            chosen = torch.isin(place // CHUNK, self.held[group]) & (place < self.first_recent)
            seen = (chosen | (place >= self.first_recent)) & (place <= self.positions[:, None])
            scores = (self.q[:, head] @ keys[group].T * self.q.shape[2] ** -0.5).masked_fill(~seen, -torch.inf)
            out.append(scores.softmax(-1) @ values[group])
        return torch.stack(out, 1)


class RecordedCache(RetrievedDraftCache):
    """Remembers what layers ask of sequence 0, other than in a prefill."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[Attended] = []
        self.prefilling = False

    def begin_prefill(self, sequence: int, count: int) -> None:
        self.prefilling = True
        super().begin_prefill(sequence, count)

    def end_prefill(self, sequence: int, count: int) -> None:
        self.prefilling = False
        super().end_prefill(sequence, count)

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        before = self.chunks.resident[layer, 0].clone()
        out = super().attend(layer, q, rows)
        if not self.prefilling:
            first_recent = max(0, self.length(0) // BLOCK_TOKENS - 1) * BLOCK_TOKENS
            stored = self.store(layer).data[0].permute(1, 2, 0, 3, 4).flatten(2, 3)
            held = self.chunks.resident[layer, 0].clone()
            positions = rows.positions[0].clone()
            one = Attended(layer, q[0].clone(), positions, first_recent, stored, before, held, out[0].clone())
            self.asked.append(one)
        return out


def test_steps_attend_to_chunks_of_their_first_ones_choice_and_to_recent_blocks(base: Base) -> None:
    draft = base.draft(FEW, retrieved=RecordedCache)
    tokens, stale, far = random_tokens(760, seed=1), [], set[int]()
    asked = draft.runner.cache.asked
    policy, layers, steps = draft.runner.cache.observers[0], base.made.runner.decoder.config.num_layers, 5
    for request in range(12):  # over 768 tokens, where the far part grows
        asked.clear()
        guesses = propose(draft.model, tokens, steps)
        assert len(asked) in (steps * layers, (steps + 1) * layers)  # with tokens that are fed before the steps
        for number, one in enumerate(asked, start=-len(asked)):
            far.add(one.first_recent)
            torch.testing.assert_close(one.out, one.expected(), atol=1e-5, rtol=1e-4)
            chosen = one.choice(policy)
            overlap = float((one.held[:, :, None] == chosen[:, None]).any(2).float().mean())
            if number < -(steps - 1) * layers:
                assert overlap > 0.95, "not its own choice"
            else:
                stale.append(overlap)
                assert torch.equal(one.held, asked[number + len(asked) - layers].held)
        tokens = [*tokens, *guesses[:2], *random_tokens(1 + 7 * (request % 3), seed=request)]
    assert sum(stale) / len(stale) < 0.75, "any choice would do"
    assert far == {BLOCK_TOKENS, 2 * BLOCK_TOKENS}


def play(draft: Draft, full: Draft, tokens: list[int], requests: int, *, sequence: int = 0) -> list[int]:
    """Rounds whose guesses, accepted up to every place in turn, must be the full cache's."""
    for request in range(requests):
        guesses = propose(draft.model, tokens, 7, sequence=sequence)
        assert guesses == propose(full.model, tokens, 7, sequence=sequence), f"behind {len(tokens)} tokens"
        tokens = [*tokens, *guesses[: 5 * request % 8], *random_tokens(1 + 3 * (request % 5), seed=request)]
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("params", [SamplingParams(), NOISY], ids=["greedy", "noisy"])
def test_a_budget_that_holds_everything_is_a_full_cache(base: Base, params: SamplingParams) -> None:
    draft, full = base.draft(ALL, params), base.draft(None, params)
    for start in (1, 2, 240, 500, 755):  # nothing far, then blocks that become far
        play(draft, full, random_tokens(start, seed=start), requests=8)


@pytest.mark.slow
def test_a_context_that_budget_and_recent_blocks_hold_is_a_full_cache(base: Base) -> None:
    play(base.draft(264), base.draft(None), random_tokens(505, seed=1), requests=12)


def test_layers_with_a_sliding_window_attend_to_it() -> None:
    hf_model = random_model("qwen2-window", seed=7)
    made = make_runner(hf_model, capacity_tokens=BLOCK_TOKENS)
    windows = Base(made, CPU)
    play(windows.draft(ALL), windows.draft(None), random_tokens(750, seed=1), requests=5)
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [0, 1])
def test_a_text_that_is_cut_and_goes_on_otherwise(base: Base, sequence: int) -> None:
    draft, full = (base.draft(budget, num_sequences=sequence + 1) for budget in (ALL, None))
    tokens = random_tokens(1300, seed=2)
    for length, new in ((1290, 0), (600, 0), (600, 20), (610, 500), (1290, 4), (300, 30), (300, 800), (1, 700)):
        play(draft, full, [*tokens[:length], *random_tokens(new, seed=length)], requests=2, sequence=sequence)


@pytest.mark.slow
def test_sequences_of_a_batch_do_not_disturb_each_other(base: Base) -> None:
    one, alone = base.draft(FEW), base.draft(FEW)
    other = loop(one.runner, num_sequences=2)
    tokens = random_tokens(770, seed=3)
    for request in range(6):
        assert len(propose(other, random_tokens(600 + 30 * request, seed=4), 5, sequence=1)) == 5
        guesses = propose(one.model, tokens, 6)
        assert guesses == propose(alone.model, tokens, 6)
        tokens = [*tokens, *guesses[:request], request]


@pytest.mark.slow
def test_all_sequences_in_one_step_are_each_alone(base: Base) -> None:
    """Chunks of few and of many blocks, and none; with pauses, and texts that end anywhere in their blocks."""
    together, alone, full = (base.draft(budget, num_sequences=BATCH) for budget in (FEW, FEW, ALL))
    everything = base.draft(None, num_sequences=BATCH)
    texts = {0: random_tokens(760, seed=5), 1: random_tokens(40, seed=6), 2: random_tokens(1040, seed=7)}
    for request in range(8):
        asked = {sequence: tokens for sequence, tokens in texts.items() if request % 3 != sequence}
        counts = {sequence: 2 + (request + 3 * sequence) % 6 for sequence in asked}
        guesses = together.model.propose(asked, counts)
        assert full.model.propose(asked, counts) == everything.model.propose(asked, counts)
        for sequence, tokens in asked.items():
            one = propose(alone.model, tokens, counts[sequence], sequence=sequence)
            assert guesses[sequence] == one, f"sequence {sequence} in turn {request}"
            texts[sequence] = [*tokens, *one[: request % 4], *random_tokens(1 + 2 * sequence, seed=request)]
    held = [draft.runner.cache.chunks.resident[layer] for draft in (together, alone) for layer in range(4)]
    assert all(torch.equal(left, right) for left, right in zip(held[:4], held[4:], strict=True))
    assert int(held[0][0].max()) > 0 and int(held[0][1].max()) == -1 and int(held[0][2].max()) > 0


def test_what_it_holds_is_reserved_as_planned_and_bounded(base: Base) -> None:
    config, budget = base.made.runner.decoder.config, DeviceBudget(CPU, None)
    sizes = {"capacity_tokens": 700, "budget_tokens": FEW, "chunk_size": CHUNK, "batch": 3}
    cache = RetrievedDraftCache(config, torch.bfloat16, **sizes, budget=budget)
    planned = ModelPlan(
        config, ModelLayout.plain(config, torch.bfloat16), CHUNK_TOKENS, context_tokens=sizes["capacity_tokens"],
        window_tokens=8, batch=3, placement=all_resident(config.num_layers),
        options=SpeculationOptions(budget_tokens=FEW, chunk_size=CHUNK), cache="retrieval",
    )  # fmt: skip
    assert budget.reserved_bytes == planned.kv_bytes
    assert budget.reserved_bytes > 3 * 768 * config.kv_bytes_per_token(2) and cache.pinned_bytes == 0
    cache.begin_window([2], [768])  # what is only tentative may use the rest of the last block
    with pytest.raises(ContextLengthError, match="769 tokens"):
        cache.begin_window([2], [769])
    with pytest.raises(ContextLengthError, match="701 tokens"):
        cache.begin_prefill(2, 701)


GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def gpu_base() -> Iterator[Base]:
    hf_model = random_model("llama-gqa", seed=7)
    made = make_runner(hf_model, capacity_tokens=BLOCK_TOKENS, device=GPU)
    yield Base(made, GPU)
    made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=5)], ids=str)
def test_replays_say_what_eager_steps_say(gpu_base: Base, params: SamplingParams) -> None:
    said: list[list[int]] = []
    num_graphs = []
    for graphed in (True, False):
        model = gpu_base.draft(FEW, params).model
        if not graphed:
            model.graphs = StepGraphs(CPU)
        tokens = random_tokens(500, seed=1)
        for request in range(110):
            guesses = propose(model, tokens, 7)
            tokens = [*tokens, *guesses[: request % 8], request % VOCAB_SIZE]
            if request == 80:
                tokens = tokens[:600]  # chunks that were held are written anew
        said.append(tokens)
        num_graphs.append(model.graphs.num_graphs)
    assert said[0] == said[1]
    assert num_graphs[0] >= 6 and num_graphs[1] == 0


@pytest.mark.gpu
def test_replays_of_a_budget_that_holds_everything_say_what_a_full_cache_says(gpu_base: Base) -> None:
    play(gpu_base.draft(ALL), gpu_base.draft(None), random_tokens(480, seed=1), requests=60)
