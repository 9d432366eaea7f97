"""Low-bit copies of matrices and what is left of weights given them: every bit comes back, whatever the weights are,
and scales are as good as they are said to be."""

import pytest
import torch
from copies.quantise import FITTED, METHODS, ROUNDED, WEIGHTED, CopyFormat, quantise
from copies.rest import decode, encode, patterns_of
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.no_cover  # nothing of it is in the runtime
PATTERNS = st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64)


def bf16(patterns: list[int]) -> torch.Tensor:
    """[1, N], of any patterns there are."""
    return torch.tensor(patterns).to(torch.int16).view(torch.bfloat16)[None]


@given(PATTERNS, st.sampled_from([4, 7, 8]), st.integers(0, 0x7FFF), st.sampled_from(METHODS), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_bit_comes_back(patterns: list[int], bits: int, floor: int, method: str, symmetric: bool) -> None:
    weight, importance = bf16(patterns), torch.ones(64) if method == WEIGHTED else None
    copy = quantise(weight, CopyFormat(4, 32, symmetric), method, importance)
    base, floors = patterns_of(copy.decoded()).flatten(), torch.full((64,), floor, dtype=torch.int32)
    assert copy.decoded().isfinite().all()
    for below in (floors, torch.zeros_like(floors)):
        rest = encode(patterns_of(weight).flatten(), base, below, bits, 16)
        assert decode(rest, base, below).tolist() == patterns


@given(
    st.lists(st.integers(-128, 127), min_size=8, max_size=8), st.lists(st.integers(-127, 127), min_size=8, max_size=8)
)
def test_every_integer_comes_back(numbers: list[int], base: list[int]) -> None:
    rest = encode(torch.tensor(numbers).int(), torch.tensor(base).int(), None, 4, 8)
    assert decode(rest, torch.tensor(base).int(), None).tolist() == numbers


@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_have_the_least_error_that_is_asked_for(symmetric: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 128, generator=draw).pow(3).to(torch.bfloat16)
    importance = torch.rand(128, generator=draw).pow(4)
    errors = dict[str, list[float]]()
    for method in METHODS:
        copy = quantise(weight, CopyFormat(3, 64, symmetric), method, importance if method == WEIGHTED else None)
        squares = (copy.decoded().flatten(1).float() - weight.float()).square()
        errors[method] = [float(squares.sum()), float((squares * importance).sum())]
    assert errors[FITTED][0] == min(plain for plain, _ in errors.values()) < errors[ROUNDED][0]
    assert errors[WEIGHTED][1] == min(weighted for _, weighted in errors.values()) < errors[FITTED][1]


def test_a_copy_costs_what_its_format_says() -> None:
    assert CopyFormat(4, 64).bits_per_weight == 4.5 and CopyFormat(4, 64, symmetric=True).bits_per_weight == 4.25
    constant = quantise(torch.full((2, 64), 0.3).to(torch.bfloat16), CopyFormat(4, 64), ROUNDED)
    assert (constant.decoded() == torch.tensor(0.3).to(torch.bfloat16)).all()
