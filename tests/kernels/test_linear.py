"""`linear`: every way to multiply against the formula in double precision, and bits that depend on the row alone; and
`gated`, against plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_runtime_kernels import linear as ops

from tests.helpers.kernel_conditions import KERNEL_DEVICE, UNIT_ROUNDOFF, assert_within, poisoned_outputs, random_tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Largest relative error of one rounding.
ROUNDOFF = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}
# What a block may have on consumer cards of compute capability 8.6, 8.9 and 12.0.


@dataclass(frozen=True)
class Problem:
    """Inputs of one product."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    gated: ops.Activation | None = None

    def rows(self, chosen: slice) -> Problem:
        """The same for some rows of x."""
        residual = None if self.residual is None else self.residual[chosen]
        return replace(self, x=self.x[chosen], residual=residual)

    @property
    def out(self) -> torch.Tensor:
        """Where a result goes: what it is added to, or NaN."""
        if self.residual is not None:
            return self.residual.clone()
        m = self.weight.shape[0]
        return self.x.new_full((self.x.shape[0], m // 2 if self.gated else m), float("nan"))

    def by_kernel(self, tile: ops.LinearTile | None = None) -> torch.Tensor:
        """What the kernel makes of it."""
        out, add = self.out, self.residual is not None
        ops.linear_triton(self.x, self.weight, out, bias=self.bias, add=add, gated=self.gated, tile=tile)
        return out

    def solved(self) -> torch.Tensor:
        """What a pass makes of it."""
        residual = None if self.residual is None else self.residual.clone()
        return ops.linear(self.x, self.weight, bias=self.bias, residual=residual, gated=self.gated)

    def check(self, out: torch.Tensor) -> None:
        """Raise unless every element is within what roundings can do of the formula in double precision."""
        roundoff, k = ROUNDOFF[self.x.dtype], self.x.shape[1]
        x, weight = self.x.double(), self.weight.double()
        y = x @ weight.t()
        error = (x.abs() @ weight.abs().t()) * (k + 16) * ROUNDOFF[FP32]
        if self.bias is not None:
            y = y + self.bias.double()
        error = error + roundoff * y.abs()
        if self.gated:
            (gate, up), (gate_error, up_error) = y.chunk(2, dim=-1), error.chunk(2, dim=-1)
            gate = gate * gate.sigmoid() if self.gated == "silu" else F.gelu(gate, approximate="tanh")
            # The derivatives are at most 1.13; it is rounded, and the fast exponential costs a few fp32 roundings.
            gate_error = 1.13 * gate_error + (roundoff + 32 * ROUNDOFF[FP32]) * gate.abs()
            error = gate_error * (up.abs() + up_error) + gate.abs() * up_error
            y = gate * up
        if self.residual is not None:
            y = y + self.residual.double()
        excess = (out.double() - y).abs() - (1.01 * (error + roundoff * y.abs()) + 1e-7)
        assert out.shape == y.shape and bool(out.isfinite().all())
        assert float(excess.max()) <= 0, f"{float(excess.max()):.2e} beyond what roundings can do"


def make_problem(
    rows: int, m: int, k: int, *, dtype: torch.dtype = FP32, bias: bool = False, residual: bool = False,
    gated: ops.Activation | None = None,
) -> Problem:  # fmt: skip
    """Random inputs with heavy tails: weights that keep the size of the rows."""
    return Problem(
        (random_tensor(rows, k, seed=1) * random_tensor(rows, k, seed=6).exp()).to(dtype),
        random_tensor(m, k, seed=2, dtype=dtype, scale=k**-0.5),
        random_tensor(m, seed=3, dtype=dtype) if bias else None,
        random_tensor(rows, m, seed=5, dtype=dtype) if residual else None,
        gated,
    )


def check_kernel(problem: Problem, tile: ops.LinearTile | None = None) -> None:
    """The kernel is right, writes everything it has to and nothing it reads."""
    before = problem.x.clone()
    problem.check(problem.by_kernel(tile))
    assert torch.equal(problem.x, before)
    with poisoned_outputs():
        problem.check(problem.solved())


FUSED = [
    {"bias": bias, "residual": end == "residual", "gated": end if end in ("silu", "gelu") else None}
    for bias, end in product((False, True), ("plain", "residual", "silu", "gelu"))
]


@pytest.mark.few(8)
@pytest.mark.parametrize("fused", FUSED, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17, 70])
def test_everything_that_can_be_fused(rows: int, fused: dict[str, Any]) -> None:
    check_kernel(make_problem(rows, 22, 69, **fused))


@pytest.mark.few(2)
@pytest.mark.parametrize(("m", "k"), [(2, 1), (16, 16), (4, 128), (48, 575), (66, 9)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_odd_shapes(rows: int, m: int, k: int) -> None:
    check_kernel(make_problem(rows, m, k, gated="silu", bias=True))
    check_kernel(make_problem(rows, m, k, residual=True))


# Whole and broken steps along K, either operand first, more tiles of W than programs of a group.
@pytest.mark.few(2)
@pytest.mark.parametrize("k", [128, 192, 200])
@pytest.mark.parametrize(("rows", "tile"), [
    (1, ops.LinearTile(16, 16, 64, 1, 2, True)), (7, ops.LinearTile(16, 32, 32, 4, 3, True)),
    (37, ops.LinearTile(16, 16, 64, 2, 3, False)), (20, ops.LinearTile(32, 32, 128, 8, 2, False)),
])  # fmt: skip
def test_every_way_to_cut(rows: int, tile: ops.LinearTile, k: int) -> None:
    check_kernel(make_problem(rows, 234, k, gated="silu"), tile)
    check_kernel(make_problem(rows, 234, k, bias=True, residual=True), tile)


@pytest.mark.parametrize("fused", FUSED, ids=str)
def test_products_of_many_rows(fused: dict[str, Any]) -> None:
    most = make_problem(2 * max(ops.LIBRARY_ROWS[KERNEL_DEVICE.type]) + 60, 64, 72, **fused)
    for rows in (most, most.rows(slice(0, 50)), most.rows(slice(3, 103))):
        rows.check(rows.solved())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_has_the_same_bits_in_every_company(dtype: torch.dtype) -> None:
    """Alone, in windows of every size, at every place and where the library does the most of it."""
    for fused in FUSED[::2]:
        most = make_problem(ops.LIBRARY_ROWS[KERNEL_DEVICE.type][0] + 70, 96, 200, dtype=dtype, **fused)
        expected = most.solved()
        for start, count in ((0, 1), (5, 1), (69, 2), (3, 7), (64, 9), (1, 20), (20, 40), (0, 64), (2, 65), (7, 127)):
            rows = slice(start, start + count)
            assert torch.equal(most.rows(rows).solved(), expected[rows]), f"{count} rows from {start}, {fused}"


def test_the_library_does_only_what_it_has_the_same_bits_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that sums in another order is found out the first time, and not used."""
    calls, height = [], ops.LIBRARY_ROWS[KERNEL_DEVICE.type][-1]
    problem = make_problem(2 * height + 1, 40, 168)
    honest = problem.solved()
    true_mm = torch.mm

    def other_order(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < height:
            return true_mm(x, w, out=out)
        calls.append(x.shape[0])
        return out.copy_(true_mm(x[:, :84], w[:84]) + true_mm(x[:, 84:], w[84:]))

    monkeypatch.setattr(torch, "mm", other_order)
    other = replace(problem, weight=problem.weight[:38].contiguous())  # a shape that was not checked yet
    assert torch.equal(other.solved(), honest[:, :38])
    assert not ops.library_agrees(height, other.weight, None, gated=None)
    before = len(calls)
    other.solved()
    assert len(calls) == before > 0


# Rows of W and K of Llama-2-7B's layers, and of SmolLM2-135M's.
REAL = [
    (12288, 4096, {}), (4096, 4096, {"residual": True, "bias": True}), (22016, 4096, {"gated": "silu"}),
    (4096, 11008, {"residual": True}), (960, 576, {"bias": True}), (576, 576, {"residual": True}),
    (3072, 576, {"gated": "silu"}), (576, 1536, {"residual": True}),
]  # fmt: skip
REAL_CASES = [(BF16, *shape) for shape in REAL] + [(FP16, *REAL[number]) for number in (2, 3, 4, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "m", "k", "fused"), REAL_CASES)
def test_real_shapes_have_one_arithmetic(dtype: torch.dtype, m: int, k: int, fused: dict[str, Any]) -> None:
    most = make_problem(1100, m, k, dtype=dtype, **fused)
    expected = most.solved()
    for rows in (slice(0, 3), slice(1000, 1030)):
        most.rows(rows).check(expected[rows])
    pieces = ((0, 1), (500, 1), (1099, 1), (3, 8), (600, 13), (2, 30), (64, 64), (9, 127), (0, 256), (7, 511))
    for start, count in pieces:
        rows = slice(start, start + count)
        assert torch.equal(most.rows(rows).solved(), expected[rows]), f"{count} rows from {start}"
        assert torch.equal(most.rows(rows).by_kernel(), expected[rows])
    # 256 bytes further in another allocation, as in another slot of the ring.
    moved = torch.empty(most.weight.numel() + 128, dtype=dtype, device=KERNEL_DEVICE)[128:].view_as(most.weight)
    assert torch.equal(replace(most, weight=moved.copy_(most.weight)).solved(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(FUSED)), ids=lambda number: str(FUSED[number]))
@pytest.mark.parametrize("rows", [1, 3, 17, 40, 100])
def test_half_precision(rows: int, number: int) -> None:
    """Ragged shapes in one dtype and even ones in the other: over all rows whatever is fused meets both in both."""
    dtypes = (BF16, FP16) if (rows + number) % 2 else (FP16, BF16)
    for dtype, (m, k) in zip(dtypes, ((70, 133), (256, 1024)), strict=True):
        check_kernel(make_problem(rows, m, k, dtype=dtype, **FUSED[number]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_in_a_graph_it_reads_what_is_there_and_gives_the_same_bits_again(rows: int) -> None:
    first = make_problem(rows, 4096, 4096, dtype=BF16, gated="silu")
    second = make_problem(rows, 4096, 2048, dtype=BF16, residual=True)
    x, residual = first.x.clone(), torch.zeros(rows, 4096, dtype=BF16, device=KERNEL_DEVICE)

    def run() -> None:
        ops.linear(ops.linear(x, first.weight, gated="silu"), second.weight, residual=residual)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seen = []
    for _ in range(3):
        x.copy_(first.x * 2)
        residual.copy_(second.residual)
        graph.replay()
        seen.append(residual.clone())
    activation = replace(first, x=first.x * 2).solved()
    expected = replace(second, x=activation).solved()
    assert all(torch.equal(residual, expected) for residual in seen)


SUBNORMAL_SPACING = 2.0**-24  # of fp16


def check_gated(rows: int, width: int, dtype: torch.dtype, activation: ops.Activation = "silu") -> None:
    gate_up = random_tensor(rows, 2 * width, seed=1, dtype=dtype, scale=4.0)
    expected = ops.gated_product_reference(gate_up, activation)
    with poisoned_outputs():
        out = ops.gated_product_triton(gate_up, activation)
    assert out.shape == (rows, width)
    # It may land on the other side of a rounding boundary, then the product is rounded: two of each. The fast
    # exponential adds a few fp32 roundings, which only fp32 can show. Below fp16's normal numbers the spacing, 6e-8,
    # is absolute; `up` of up to 20 multiplies it.
    roundings = 16 if dtype == torch.float32 else 2
    atol = 20 * SUBNORMAL_SPACING if dtype == torch.float16 else 1e-30
    if activation == "gelu":  # torch's 1 + tanh(u) loses what is small: a rounding of fp32 times gate and up
        atol += 300 * UNIT_ROUNDOFF[torch.float32]
    assert_within(out, expected, atol=atol, rtol=roundings * 2 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 77), (2, 1024), (2, 2500)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_matches_reference(rows: int, width: int, activation: ops.Activation) -> None:
    check_gated(rows, width, torch.float32, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (17, 77), (33, 1536), (5, 11008)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_in_half_precision(rows: int, width: int, dtype: torch.dtype, activation: ops.Activation) -> None:
    check_gated(rows, width, dtype, activation)


def test_large_gates_saturate_without_nan() -> None:
    gate_up = random_tensor(1, 8, seed=2)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -90.0, 0.0])
    up = gate_up[0, 4:]
    out = ops.gated_product_triton(gate_up, "gelu")
    assert_within(out[0], torch.stack((0 * up[0], 200 * up[1], 0 * up[2], 0 * up[3])), atol=1e-30, rtol=1e-6)


@pytest.mark.gpu
def test_row_bits_do_not_depend_on_the_number_of_rows() -> None:
    gate_up = random_tensor(256, 2 * 11008, seed=3, dtype=torch.bfloat16)
    together = ops.gated_product_triton(gate_up, "gelu")
    for start, count in ((0, 1), (100, 17), (255, 1), (3, 200)):
        rows = slice(start, start + count)
        assert torch.equal(ops.gated_product_triton(gate_up[rows].clone(), "gelu"), together[rows])
