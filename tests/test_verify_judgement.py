"""What `verify` judges by: near-ties and defects, and the chi-square test, on logits made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.verify import Fit, fit, fit_row, target_probabilities, total
from offload_runtime.verify.equality import Finding, Transcript, compare, resample

T1 = SamplingParams(temperature=1.0)


def transcript(rows: torch.Tensor, params: SamplingParams, position: int = 10) -> Transcript:
    """What an honest runtime would say from these rows of logits [N, V]."""
    return Transcript(resample(rows, params, position), rows, GenerationParams(sampling=params), position, passes=1)


def judge(plain: torch.Tensor, other: torch.Tensor, params: SamplingParams, *, bitwise: bool = False) -> Finding:
    return compare(transcript(plain, params), transcript(other, params), bitwise=bitwise)


def tied_rows(gap: float, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 400 logits whose best two, 5 and 6, change places: [1, V] each, moved all over by about `gap`."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1, 400, generator=generator).clamp_max(3.0)
    row[0, 5], row[0, 6] = 8.0, 8.0 - gap
    other = row + gap * torch.randn(1, 400, generator=generator)
    other[0, 5], other[0, 6] = 8.0 - gap, 8.0
    return row.to(dtype), other.to(dtype)


@pytest.mark.parametrize(
    ("gap", "dtype", "verdict"),
    [
        (1e-5, torch.float32, "near-tie"),
        (1e-3, torch.float32, "defect"),
        (0.0625, torch.bfloat16, "near-tie"),
        (0.0625, torch.float16, "defect"),
        (0.5, torch.bfloat16, "defect"),
    ],
)
def test_a_near_tie_is_what_the_dtype_explains(gap: float, dtype: torch.dtype, verdict: str) -> None:
    rows, other = tied_rows(gap, dtype)
    finding = judge(rows, other, SamplingParams())
    assert (finding.verdict, finding.first_difference, finding.differing_logit_rows) == (verdict, 0, 1)
    assert finding.mismatch is not None
    assert (finding.mismatch.plain_token, finding.mismatch.token) == (5, 6)
    assert finding.mismatch.swing == pytest.approx(2 * gap, rel=0.1)
    assert judge(rows, other, SamplingParams(), bitwise=True).verdict == "defect"


def test_a_wide_gap_is_no_near_tie_where_the_other_logits_hardly_moved() -> None:
    rows = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(2)).clamp_max(3.0)
    rows[0, 5], rows[0, 6] = 8.0, 7.5
    other = rows.clone()
    other[0, 5], other[0, 6] = 7.5, 8.0
    finding = judge(rows.to(torch.bfloat16), other.to(torch.bfloat16), SamplingParams())
    assert finding.mismatch is not None
    assert finding.mismatch.moved < finding.mismatch.rounding and finding.mismatch.swing == 1.0
    assert finding.verdict == "defect"


def test_logits_that_differ_are_a_defect_on_cuda_even_behind_the_same_token() -> None:
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    other = rows.clone()
    other[1, 49] = -other[1, 49]
    assert judge(rows, rows.clone(), SamplingParams(), bitwise=True).verdict == "identical"
    finding = judge(rows, other, SamplingParams(), bitwise=True)
    assert (finding.verdict, finding.first_difference, finding.differing_logit_rows) == ("defect", None, 1)
    assert judge(rows, other, SamplingParams()).verdict == "identical"


@pytest.mark.parametrize(
    "params",
    [T1, SamplingParams(0.6), SamplingParams(0.7, top_k=7), SamplingParams(1.3, top_p=0.8),
     SamplingParams(1.0, min_p=0.1), SamplingParams(0.9, top_k=20, top_p=0.9, min_p=0.02)],
)  # fmt: skip
def test_probabilities_are_those_of_transformers(params: SamplingParams) -> None:
    logits = 2 * torch.randn(120, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].softmax(0)
    torch.testing.assert_close(target_probabilities(logits, params), expected, rtol=1e-9, atol=1e-12)


def test_chi_square_by_hand() -> None:
    p = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04, 0.0], dtype=torch.float64)
    found = fit("hand", torch.tensor([60, 20, 10, 6, 4, 0]), p)
    # 50, 30 and, pooled because each is small, 20 are expected.
    assert (found.draws, found.freedom, found.impossible) == (100, 2, 0)
    assert found.statistic == pytest.approx(100 / 50 + 100 / 30)
    assert found.p_value == pytest.approx(math.exp(-found.statistic / 2))  # exact for two degrees of freedom
    assert fit("hand", torch.tensor([60, 20, 10, 6, 3, 1]), p).p_value == 0
    # What is pooled and still small joins the smallest cell, and a single cell tests nothing.
    sparse = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    found = fit("sparse", torch.tensor([66, 30, 4]), sparse)
    assert (found.freedom, found.statistic) == (1, pytest.approx(36 / 60 + 36 / 40))
    assert fit("one", torch.tensor([100, 0]), torch.tensor([1.0, 0.0])).p_value == 1
    assert fit("few", torch.tensor([4, 6]), torch.tensor([0.5, 0.5])).freedom == 0
    together = total("both", [Fit("a", 10, 3.0, 2, 0), Fit("b", 20, 4.0, 3, 1)])
    assert together == Fit("both", 30, 7.0, 5, 1)


def test_fit_of_other_probabilities_is_refused() -> None:
    generator = torch.Generator().manual_seed(8)
    row = 2 * torch.randn(300, generator=generator)
    honest = fit_row("", row, T1, position=0, seeds=range(64))
    assert honest.draws == 1024 and honest.p_value > 1e-3
    drawn = torch.multinomial(target_probabilities(row, T1), 1024, replacement=True, generator=generator)
    counts = torch.bincount(drawn, minlength=300)
    assert fit("", counts, target_probabilities(row, SamplingParams(temperature=1.3))).p_value < 1e-6


@pytest.mark.few(6)
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.25}, {"top_k": 3, "top_p": 0.99}])
@pytest.mark.parametrize("excluded_in_plain", [True, False])
@pytest.mark.parametrize(("gap", "verdict"), [(1e-5, "near-tie"), (0.02, "defect")])
def test_a_token_at_the_edge_of_a_filter(
    filters: dict[str, Any], excluded_in_plain: bool, gap: float, verdict: str
) -> None:
    """Rounding may also move a token over the threshold that decides whether it is allowed."""
    base = torch.full((1, 64), -30.0)
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    inside = base.clone()
    inside[0, :4] = probabilities.log()
    edge = {"top_k": 3, "top_p": 2, "min_p": 3}[next(iter(filters))]
    noise = gap * torch.randn(base.shape, generator=torch.Generator().manual_seed(5))
    rows, other = inside + noise, inside.clone()
    if "top_k" in filters:
        rows[0, edge], other[0, edge] = rows[0, 2] - gap, other[0, 2] + gap
    elif "top_p" in filters:
        rows[0, 0] = math.log(0.4 + 2 * 0.8 * gap + 0.1)
        other[0, 0] = math.log(0.4 - 2 * 0.8 * gap + 0.1)
        rows[0, 3] = other[0, 3] = math.log(1e-9)
        rows[0, 1], rows[0, 2], other[0, 1], other[0, 2] = (math.log(x) for x in (0.3, 0.2, 0.3, 0.2))
    else:
        rows[0, edge] = rows[0, 0] + math.log(0.25) - gap
        other[0, edge] = other[0, 0] + math.log(0.25) + gap
    if not excluded_in_plain:
        rows, other = other, rows
    for seed in range(400):
        params = SamplingParams(temperature=1.0, seed=seed, **filters)
        finding = judge(rows, other, params)
        if finding.first_difference == 0 and finding.mismatch is not None:
            chosen = {finding.mismatch.plain_token, finding.mismatch.token}
            if edge in chosen:
                assert finding.verdict == verdict, (seed, finding)
                return
    raise AssertionError("no seed chooses the token at the edge")
