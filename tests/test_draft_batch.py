"""A draft that serves several texts in one step: each gets what it gets by the book, whatever the others do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.params import SamplingParams
from offload_runtime.runners import DraftModel, StepGraphs
from offload_runtime.runners.token_window import DeviceWindow
from tests.helpers.assembly import CPU, make_runner
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens
from tests.helpers.sampling import join_all, numbered
from tests.test_draft_model import BATCH, NOISY, Draft, dense_streaming, make_draft


@pytest.fixture(scope="module")
def draft() -> Iterator[Draft]:
    made = make_draft("llama-gqa")
    yield made
    made.made.close()


@pytest.fixture(scope="module")
def gpu_draft() -> Iterator[Draft]:
    made = make_draft("llama-gqa", device=torch.device("cuda"))
    yield made
    made.made.close()


class CountingWindow(DeviceWindow):
    """Has one entry in `steps` for every step of a draft: the sequences that went on in it."""

    def __init__(self) -> None:
        super().__init__(CPU, batch=BATCH)
        self.steps: list[int] = []

    def put(
        self, start: torch.Tensor, tokens: torch.Tensor, *, offset: int = 0, cursor: torch.Tensor | None = None
    ) -> None:
        assert cursor is not None
        if cursor.data_ptr() != start.data_ptr():  # a first step, which begins at the window's end
            cursor.fill_(-7)
        before = cursor.clone()
        super().put(start, tokens, offset=offset, cursor=cursor)
        self.steps.append(int((cursor != before).sum()))


@pytest.mark.slow
@pytest.mark.parametrize("params", [SamplingParams(), NOISY, SamplingParams(temperature=1.0, seed=6)], ids=str)
def test_all_sequences_are_drafted_in_the_same_steps(draft: Draft, params: SamplingParams) -> None:
    """Each as by the book, whatever the others do: other lengths, other counts, other acceptance, pauses, an end."""
    model = draft.model(params, num_sequences=BATCH)
    model.window = window = CountingWindow()
    join_all(model, numbered(params, BATCH))
    references = [dense_streaming(draft, sequence=sequence) for sequence in range(BATCH)]
    texts = {sequence: random_tokens(length, seed=sequence) for sequence, length in enumerate((345, 1, 600))}
    steps, moves = window.steps, set[int]()
    for request in range(18):
        asked = {sequence: tokens for sequence, tokens in texts.items() if (request + sequence) % 4}
        if request >= 14:
            asked.pop(0, None)  # it has ended
        counts = {sequence: 1 + (3 * request + 5 * sequence) % 8 for sequence in asked}
        steps.clear()
        guesses = model.propose(asked, counts)
        assert len(steps) == max(counts.values()), "the longest answer decides"
        assert steps == [sum(step < count for count in counts.values()) for step in range(len(steps))]
        for sequence, tokens in asked.items():
            expected = references[sequence].propose(tokens, counts[sequence], params)
            assert guesses[sequence] == expected, f"sequence {sequence} behind {len(tokens)} tokens"
            accepted = (request + sequence) % (counts[sequence] + 1)
            texts[sequence] = [*tokens, *expected[:accepted], *random_tokens(1 + 4 * sequence, seed=request)]
        moves.add(draft.cache.starts[2])
    assert len(moves) > 1, "a window moved on"


def test_sequences_without_room_or_turn_are_left_alone(draft: Draft) -> None:
    model = draft.model(NOISY, num_sequences=BATCH)
    texts = {sequence: random_tokens(300 + sequence, seed=sequence) for sequence in range(BATCH)}
    model.propose(texts, dict.fromkeys(texts, 4))
    stored = [draft.cache.store(layer).data[1:].clone() for layer in range(4)]
    lengths = [draft.cache.length(sequence) for sequence in (1, 2)]
    assert model.propose({0: texts[0], 2: texts[2]}, {0: 6, 2: 0})[2] == []
    assert [draft.cache.length(sequence) for sequence in (1, 2)] == lengths
    for layer, before in enumerate(stored):
        assert torch.equal(draft.cache.store(layer).data[1:], before)


def test_frequencies_of_a_length_are_each_sequences_own() -> None:
    """`dynamic` and `longrope` rotate by a sequence's length: a short one beside a long one."""
    for name in ("llama-dynamic", "llama-longrope"):
        hf_model = random_model(name, seed=7)
        made = make_runner(hf_model, capacity_tokens=2 * BLOCK_TOKENS)
        texts = {0: random_tokens(12, seed=1), 2: random_tokens(70, seed=2)}
        said = []
        for sequences in ((0,), (2,), (0, 2)):
            model = DraftModel(made.runner, vocab_size=VOCAB_SIZE, batch=BATCH)
            join_all(model, numbered(SamplingParams(), BATCH))
            said.append(model.propose({s: texts[s] for s in sequences}, dict.fromkeys(sequences, 7)))
        assert {**said[0], **said[1]} == said[2]
        assert not torch.equal(model.frequencies.tensor[0], model.frequencies.tensor[2])
        made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=5)], ids=str)
def test_replays_of_a_batch_say_what_eager_steps_say(gpu_draft: Draft, params: SamplingParams) -> None:
    said: list[dict[int, list[int]]] = []
    for graphed in (True, False):
        model = gpu_draft.model(params, num_sequences=BATCH)
        if not graphed:
            model.graphs = StepGraphs(CPU)
        texts = {sequence: random_tokens(length, seed=1) for sequence, length in enumerate((310, 40, 600))}
        for request in range(40):
            counts = {sequence: (request + 3 * sequence) % 8 for sequence in texts}  # none, now and then
            guesses = model.propose(texts, counts)
            texts = {
                sequence: [*tokens, *guesses[sequence][: (request + sequence) % 5], request]
                for sequence, tokens in texts.items()
            }
        said.append(texts)
        # First and other steps, over all blocks that the longest text keeps.
        assert 2 <= model.graphs.num_graphs <= 4 if graphed else model.graphs.num_graphs == 0
    assert said[0] == said[1]
