"""`choose_experts`: against torch's own softmax and order, ties, and bits that depend on the row alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_runtime_kernels.router import choose_experts, choose_experts_triton

from tests.helpers.kernel_conditions import KERNEL_DEVICE, poisoned_outputs

BF16, FP32 = torch.bfloat16, torch.float32
# As mixtures of Qwen3, gpt-oss, GLM-4.5 and Mixtral have them.
FAMILIES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qwen3": (128, 8, {"scores": "softmax", "normed": True, "dtype": BF16}),
    "gpt-oss": (32, 4, {"scores": "softmax of the chosen", "normed": False}),
    "glm": (96, 8, {"scores": "sigmoid", "normed": True, "scale": 2.5}),
    "mixtral": (8, 2, {"scores": "softmax", "normed": False}),
}


def chosen_by(
    choose: Callable[..., Any], family: str, logits: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function makes of logits; GLM's router has a correction."""
    experts, chosen, options = FAMILIES[family]
    if family == "glm":
        correction = torch.linspace(-0.3, 0.3, experts).roll(11).to(logits.device)
        options = {"correction": correction, **options}
    named = {"correction": None, "scale": 1.0, "dtype": None, "positions": positions, **options}
    numbers, weights = choose(logits, chosen, **named)
    return numbers, weights


def random_logits(family: str, rows: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return (3 * torch.randn(rows, FAMILIES[family][0], generator=torch.Generator().manual_seed(rows))).to(dtype)


def by_torch(family: str, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, chosen, options = FAMILIES[family]
    logits = logits.double()
    scores = logits.sigmoid() if family == "glm" else logits if family == "gpt-oss" else logits.softmax(-1)
    ranked = scores + torch.linspace(-0.3, 0.3, experts).roll(11) if family == "glm" else scores
    numbers = ranked.topk(chosen).indices.sort(dim=-1).values
    weights = scores.gather(1, numbers)
    if family == "gpt-oss":
        weights = weights.softmax(-1)
    if options["normed"]:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return numbers, options.get("scale", 1.0) * weights


@pytest.mark.parametrize("family", FAMILIES)
def test_is_what_torch_computes(family: str) -> None:
    logits = random_logits(family, 40)
    numbers, weights = chosen_by(choose_experts, family, logits)
    expected, their_weights = by_torch(family, logits)
    assert torch.equal(numbers, expected)
    tolerance = 2.0**-8 if FAMILIES[family][2].get("dtype") == BF16 else 1e-6
    torch.testing.assert_close(weights.double(), their_weights, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("choose", [choose_experts, choose_experts_triton])
def test_of_equal_ones_the_first_are_chosen(choose: Callable[..., Any]) -> None:
    logits = torch.tensor([[0.0] * 32, [-0.0, 0.0] * 16, [1.0, 2.0, 1.0, 1.0, 2.0] + 27 * [0.5]])
    numbers, weights = chosen_by(choose, "gpt-oss", logits.to(KERNEL_DEVICE))
    assert numbers.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 4]]
    assert weights[:2].tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize("choose", [choose_experts, choose_experts_triton])
def test_rows_that_only_fill_up_choose_nothing(choose: Callable[..., Any]) -> None:
    positions = torch.tensor([3, -1, 0, -1, 7], dtype=torch.int32, device=KERNEL_DEVICE)
    logits = random_logits("qwen3", 5).to(KERNEL_DEVICE)
    numbers, weights = chosen_by(choose, "qwen3", logits, positions)
    expected, their_weights = chosen_by(choose, "qwen3", logits)
    is_there = (positions >= 0).cpu()
    assert torch.equal(numbers[is_there], expected[is_there]) and torch.equal(
        weights[is_there], their_weights[is_there]
    )
    assert (numbers[~is_there] == -1).all() and (weights[~is_there] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_matches_reference(family: str) -> None:
    """In the interpreter, which rounds a multiply-add twice."""
    logits = random_logits(family, 5)
    with poisoned_outputs():
        numbers, weights = chosen_by(choose_experts_triton, family, logits.to(KERNEL_DEVICE))
    expected, their_weights = chosen_by(choose_experts, family, logits)
    assert torch.equal(numbers.cpu(), expected)
    tolerance = 2.0**-7 if FAMILIES[family][2].get("dtype") == BF16 else 1e-6
    torch.testing.assert_close(weights.cpu(), their_weights, rtol=tolerance, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_has_the_bits_of_the_reference(family: str, dtype: torch.dtype) -> None:
    logits = random_logits(family, 3000, dtype)
    expected = chosen_by(choose_experts, family, logits)
    for rows in (1, 7, 3000):
        for found, wanted in zip(chosen_by(choose_experts, family, logits[:rows].cuda()), expected, strict=True):
            assert torch.equal(found.cpu(), wanted[:rows])
