"""`select_chunks`: kernels and plain torch against sorting one head at a time."""

import math
from collections.abc import Callable

import pytest
import torch
from offload_runtime_kernels.chunk_scores import chunk_scores
from offload_runtime_kernels.select_chunks import select_chunks, select_chunks_reference, select_chunks_triton

from tests.helpers.kernel_conditions import KERNEL_DEVICE, poisoned_outputs, random_tensor

SCALE = 0.3


def score_bin(score: float) -> int:
    """Its bin: sixteenths of an octave, linear within it, from 2^-31 on; what is less is in the first of 512."""
    if score < 2.0**-31:
        return 0
    mantissa, exponent = math.frexp(score)  # mantissa in [0.5, 1)
    return min(511, (exponent + 30) * 16 + math.floor((2 * mantissa - 1) * 16))


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=KERNEL_DEVICE)


SELECTORS = [pytest.param(select_chunks_reference, id="reference"), pytest.param(select_chunks_triton, id="triton")]


def _chosen(scores: list[float], limit: int, budget: int) -> list[int]:
    candidates = sorted(range(1, min(limit, len(scores))), key=lambda chunk: (-score_bin(scores[chunk]), chunk))
    chosen = sorted(([0] if limit > 0 else []) + candidates[: budget - 1])
    return chosen + [-1] * (budget - len(chosen))


def _check_selection(scores: torch.Tensor, limits: list[int], budget: int, run: Callable[..., torch.Tensor]) -> None:
    with poisoned_outputs():
        selected = run(scores, _ints(*limits), budget_chunks=budget)
    assert selected.dtype == torch.int32 and selected.shape == (*scores.shape[:2], budget)
    for b, limit in enumerate(limits):
        for head in range(scores.shape[1]):
            assert selected[b, head].tolist() == _chosen(scores[b, head].tolist(), limit, budget)


@pytest.mark.few(2)
@pytest.mark.parametrize("run", SELECTORS)
@pytest.mark.parametrize(
    ("chunks", "budget"), [(1, 3), (40, 1), (40, 7), (20000, 700), (40, 40), (40, 64), (1030, 100)]
)
def test_selects_the_highest_scores(chunks: int, budget: int, run: Callable[..., torch.Tensor]) -> None:
    scores = random_tensor(3, 2, chunks, seed=3).softmax(-1)
    _check_selection(scores, [chunks, chunks // 2, 0], budget, run)
    _check_selection(scores, [chunks + 5, 1, 2], budget, run)


@pytest.mark.parametrize("run", SELECTORS)
def test_of_equal_scores_the_lower_chunk_wins(run: Callable[..., torch.Tensor]) -> None:
    few_values = (random_tensor(2, 3, 300, seed=4) * 1.5).round().clamp(0, 3) / 7
    for budget in (1, 2, 9, 150, 299):
        _check_selection(few_values.contiguous(), [300, 211], budget, run)
    _check_selection(torch.zeros(1, 1, 50, device=KERNEL_DEVICE), [50], 4, run)


@pytest.mark.parametrize("run", SELECTORS)
def test_odd_numbers_never_cost_a_place(run: Callable[..., torch.Tensor]) -> None:
    scores = torch.full((1, 4, 20), 0.05, device=KERNEL_DEVICE)
    scores[0, 0, 5:9] = float("nan")
    scores[0, 1] = float("nan")
    scores[0, 2, 3] = -1.0
    scores[0, 3, 4] = 1e-9  # more than nothing
    scores[0, 3, 5:] = 1e-42  # a denormal counts as nothing
    selected = run(scores, _ints(20), budget_chunks=6).tolist()
    assert selected[0][0] == [0, 5, 6, 7, 8, 1] or selected[0][0] == [0, 1, 5, 6, 7, 8]
    assert selected[0][1] == [0, 1, 2, 3, 4, 5]
    assert selected[0][2] == [0, 1, 2, 4, 5, 6]
    assert selected[0][3] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("run", SELECTORS)
def test_what_is_held_stays_unless_another_is_better_by_the_margin(run: Callable[..., torch.Tensor]) -> None:
    scores = torch.tensor([[[0.0, 0.1, 0.2, 0.3, 0.4, 0.5]] * 2], device=KERNEL_DEVICE)
    # The second head holds what may not be chosen, what is no chunk, and nothing.
    held = torch.tensor([[[1, 3, -1], [5, 90, -1]]], dtype=torch.int32, device=KERNEL_DEVICE)
    selected = run(scores.clone(), _ints(5), budget_chunks=3, held=held, held_margin=0.15)
    assert selected.tolist() == [[[0, 3, 4], [0, 3, 4]]]
    selected = run(scores.clone(), _ints(5), budget_chunks=3, held=held, held_margin=0.25)
    assert selected.tolist() == [[[0, 3, 4], [0, 3, 4]]]
    selected = run(scores.clone(), _ints(6), budget_chunks=3, held=held, held_margin=0.25)
    assert selected.tolist() == [[[0, 3, 5], [0, 4, 5]]]
    selected = run(scores.clone(), _ints(6), budget_chunks=3, held=held, held_margin=0.45)
    assert selected.tolist() == [[[0, 1, 3], [0, 4, 5]]]


@pytest.mark.gpu
def test_selection_at_full_length_and_in_a_graph() -> None:
    scores = random_tensor(1, 32, 30720, seed=6, scale=2.0).softmax(-1)
    _check_selection(scores, [30700], 1024, select_chunks_triton)
    q = random_tensor(1, 1, 32, 128, seed=1, dtype=torch.bfloat16)
    means = random_tensor(1, 32, 15360, 128, seed=2, dtype=torch.bfloat16)

    def run() -> torch.Tensor:  # capturing fails where anything waits for the device
        return select_chunks(chunk_scores(q, means, [15000], scale=SCALE), [15000], budget_chunks=512)

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert torch.equal(captured, expected)
