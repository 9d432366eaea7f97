"""What surrounds the pass of a step: the Triton kernels against plain torch and against lists of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from offload_runtime_kernels.window_steps import (
    WINDOW_HEADER_WORDS,
    StepRotation,
    StepRows,
    accept,
    accept_triton,
    put_token,
    put_token_triton,
    step_rows,
    step_rows_triton,
)

from tests.helpers.attention_cases import int32
from tests.helpers.kernel_conditions import KERNEL_DEVICE, assert_within, poisoned_outputs

BASE = 1000


def _window(tokens: list[int], end: int, base: int = BASE) -> torch.Tensor:
    return int32([end, base, base - WINDOW_HEADER_WORDS, 0, *tokens])


def _tokens(window: torch.Tensor) -> list[int]:
    return window[WINDOW_HEADER_WORDS:].tolist()


def _frequencies(half: int) -> torch.Tensor:
    return (10000.0 ** -(torch.arange(half) / half)).to(KERNEL_DEVICE)


versions = pytest.mark.parametrize("run", [step_rows, step_rows_triton], ids=["public", "triton"])


def _check_angles(rows: StepRows, rotated: list[int], rotation: StepRotation) -> None:
    positions = torch.tensor(rotated, device=KERNEL_DEVICE)
    # The angle is rounded to fp32, then its cosine taken: that angle is the reference's too.
    angle = (positions.float()[:, None] * rotation.frequencies).double()
    assert rows.cos.shape == rows.sin.shape == angle.shape and rows.cos.dtype == torch.float32
    assert_within(rows.cos, angle.cos() * rotation.scaling, atol=5e-7 * rotation.scaling)
    assert_within(rows.sin, angle.sin() * rotation.scaling, atol=5e-7 * rotation.scaling)


@versions
@pytest.mark.parametrize("half", [1, 5, 32, 48, 64])
@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_rows_before_and_behind_the_end(run: Callable[..., StepRows], half: int, scaling: float) -> None:
    window = _window([7, -1, 9, 40, 3, 5, 6], BASE + 3)
    before, rotation = window.clone(), StepRotation(_frequencies(half), scaling)
    with poisoned_outputs():
        rows = run(window, window[:1], 5, rotation, offset=-1, last_token=39)
    assert rows.tokens.tolist() == [9, 39, 3, 5, 6]
    assert rows.positions.tolist() == [1002, 1003, 1004, 1005, 1006]
    assert rows.following.tolist() == [1003, 1004, 1005, 1006, 1007]
    assert {tensor.dtype for tensor in (rows.tokens, rows.positions, rows.following)} == {torch.int32}
    _check_angles(rows, [1002, 1003, 1004, 1005, 1006], rotation)
    assert torch.equal(window, before)
    again = run(window, int32([BASE + 2]), 1, rotation, offset=-1, last_token=39)
    assert (again.tokens.tolist(), again.positions.tolist(), again.following.tolist()) == ([0], [1001], [1002])


@versions
def test_rows_of_a_cache_that_holds_a_part_of_the_sequence(run: Callable[..., StepRows]) -> None:
    window, rotation = _window([7, 8, 9], BASE + 3), StepRotation(_frequencies(8), 1.0)
    rows = run(window, window[:1], 2, rotation, offset=-2, last_token=99, place=int32([768, 256]))
    assert (rows.tokens.tolist(), rows.following.tolist()) == ([8, 9], [1002, 1003])
    assert rows.positions.tolist() == [233, 234]
    _check_angles(rows, [489, 490], rotation)


@versions
def test_the_row_before_a_sequence_of_one_token_is_padding(run: Callable[..., StepRows]) -> None:
    window = _window([5, 0], 1, base=0)
    rows = run(window, window[:1], 2, StepRotation(_frequencies(4), 1.0), offset=-2, last_token=9)
    assert rows.positions.tolist() == [-1, 0] and rows.tokens[1].item() == 5
    assert 0 <= rows.tokens[0].item() <= 9 and bool(rows.cos.isfinite().all())


@versions
def test_angles_far_into_a_long_context(run: Callable[..., StepRows]) -> None:
    window, rotation = _window([1, 2], 262144, base=262142), StepRotation(_frequencies(64), 1.0)
    _check_angles(run(window, window[:1], 2, rotation, offset=-2, last_token=9), [262142, 262143], rotation)


@pytest.mark.parametrize("run", [put_token, put_token_triton], ids=["public", "triton"])
def test_a_token_is_put_and_the_cursor_moves_behind_it(run: Callable[..., None]) -> None:
    window, cursor = _window([7, 8, 0, 0, 0], BASE + 2), int32([0])
    run(window, window[:1], torch.tensor([-1], device=KERNEL_DEVICE), cursor)
    assert cursor.tolist() == [1003] and window[0].item() == 1002
    run(window, cursor, torch.tensor([31999], device=KERNEL_DEVICE), cursor)
    assert cursor.tolist() == [1004]
    assert _tokens(window) == [7, 8, -1, 31999, 0] and window[:4].tolist() == [1002, 1000, 996, 0]


@pytest.mark.parametrize("run", [accept, accept_triton], ids=["public", "triton"])
@pytest.mark.parametrize("num_proposals", [0, 1, 2, 6, 16])
def test_proposals_are_accepted_up_to_the_first_that_differs(run: Callable[..., None], num_proposals: int) -> None:
    known, proposals = [7, 8, 9], [20 + index for index in range(num_proposals)]
    for wrong in range(num_proposals + 1):
        samples = [*proposals, 77]
        if wrong < num_proposals:
            samples[wrong] = -1 if wrong % 2 else 500
        window, counts = _window([*known, *proposals, 99, 98], BASE + 3), torch.tensor([10, 40], device=KERNEL_DEVICE)
        run(window, torch.tensor(samples, device=KERNEL_DEVICE), counts)
        said = known + proposals[:wrong] + [samples[wrong]]
        assert window[:4].tolist() == [BASE + len(said), BASE, BASE - WINDOW_HEADER_WORDS, 0]
        # What was rejected stays where it is, behind the end.
        rest = [*known, *proposals, 99, 98][len(said) :]
        assert _tokens(window) == said + rest
        assert counts.tolist() == [11, 40 + wrong]


@pytest.mark.parametrize("run", [accept, accept_triton], ids=["public", "triton"])
def test_what_agrees_behind_a_difference_is_not_accepted(run: Callable[..., None]) -> None:
    window, counts = _window([7, 1, 2, 3, 4, 0], BASE + 1), torch.zeros(2, dtype=torch.int64, device=KERNEL_DEVICE)
    run(window, torch.tensor([1, 5, 3, 4, 6], device=KERNEL_DEVICE), counts)
    assert _tokens(window) == [7, 1, 5, 3, 4, 0] and window[0].item() == BASE + 3 and counts.tolist() == [1, 1]


def test_what_is_no_row_of_integers_is_refused() -> None:
    window, rotation = _window([7, 8, 9], BASE + 3), StepRotation(_frequencies(4), 1.0)
    arguments: dict[str, Any] = {"offset": -1, "last_token": 9, "place": None}
    with pytest.raises(AssertionError):
        step_rows_triton(window.long(), window[:1].long(), 1, rotation, **arguments)
    with pytest.raises(AssertionError):
        accept_triton(window, int32([1, 2]), torch.zeros(2, dtype=torch.int64, device=KERNEL_DEVICE))
    with pytest.raises(AssertionError):
        put_token_triton(window, window[:1], int32([1]), window[:1].clone())


def _steps_of_two_levels(window: torch.Tensor, counts: torch.Tensor) -> list[Callable[[], None]]:
    """A draft of two tokens that says p - 900 at position p, and a check that wants something else at one position."""
    cursor, rotation = int32([0]), StepRotation(_frequencies(32), 1.0)

    def draft(first: bool) -> None:
        start = window[:1] if first else cursor
        rows = step_rows(window, start, 1, rotation, offset=-1, last_token=99)
        put_token(window, start, (rows.following - 900).long(), cursor)

    def check() -> None:
        rows = step_rows(window, window[:1], 3, rotation, offset=-1, last_token=99)
        accept(window, (rows.following - 900 - (rows.following == BASE + 6).int()).long(), counts)

    return [partial(draft, True), partial(draft, False), check]


def _check_rounds(window: torch.Tensor, counts: torch.Tensor) -> None:
    # Three tokens; two, of which the second was proposed wrongly; three.
    assert window[0].item() == BASE + 10 and counts.tolist() == [3, 5]
    assert _tokens(window)[:10] == [7, 7, 102, 103, 104, 105, 105, 107, 108, 109]


def test_levels_work_on_one_window_without_the_host() -> None:
    window, counts = _window([7] * 64, BASE + 2), torch.zeros(2, dtype=torch.int64, device=KERNEL_DEVICE)
    steps = _steps_of_two_levels(window, counts)
    for _ in range(3):
        for step in steps:
            step()
    _check_rounds(window, counts)


@pytest.mark.gpu
def test_levels_work_on_one_window_as_graphs() -> None:
    window, counts = _window([7] * 64, BASE + 2), torch.zeros(2, dtype=torch.int64, device=KERNEL_DEVICE)
    graphs = []
    for step in _steps_of_two_levels(window, counts):
        step()  # compiles
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            step()
    window[:1].fill_(BASE + 2)
    counts.zero_()
    for _ in range(3):
        for graph in graphs:
            graph.replay()
    _check_rounds(window, counts)
