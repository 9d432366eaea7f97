"""`few_row_linear`: the Triton kernel and the torch reference, both against the formula in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from offload_runtime_kernels.few_row_linear import (
    LANE_ROWS,
    MOST_ROWS,
    LinearConfig,
    RowNorm,
    default_config,
    few_row_linear,
    few_row_linear_reference,
    few_row_linear_triton,
)

from tests.helpers.kernel_conditions import KERNEL_DEVICE, poisoned_outputs, random_tensor

EPS = 1e-5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Largest relative error of one rounding.
ROUNDOFF = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}
# What a block may have on consumer cards of compute capability 8.6, 8.9 and 12.0.
CONSUMER_BYTES, ROOMY_BYTES = 99 << 10, 160 << 10


@dataclass(frozen=True)
class Problem:
    """Inputs of one product."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    norm: RowNorm | None = None
    residual: torch.Tensor | None = None
    gated: bool = False

    def first(self, rows: int) -> Problem:
        """The same for the first rows of x."""
        residual = None if self.residual is None else self.residual[:rows]
        return replace(self, x=self.x[:rows], residual=residual)

    def solve_by(self, run: Callable[..., torch.Tensor], config: LinearConfig | None = None) -> torch.Tensor:
        """What `run` returns; the residual is a copy's."""
        residual = None if self.residual is None else self.residual.clone()
        options = {} if config is None else {"config": config}
        out = run(self.x, self.weight, bias=self.bias, norm=self.norm, residual=residual, gated=self.gated, **options)
        assert residual is None or out is residual
        assert out.dtype == self.x.dtype
        return out

    def check(self, out: torch.Tensor) -> None:
        """Raise unless every element is within what roundings can do of the formula in double precision."""
        roundoff, k = ROUNDOFF[self.x.dtype], self.x.shape[1]
        x, weight = self.x.double(), self.weight.double()
        if self.norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + self.norm.eps).sqrt() * self.norm.weight.double()
        y = x @ weight.t()
        # What enters the matrix units behind a norm is rounded to the dtype; sums and the norm are fp32.
        error = (x.abs() @ weight.abs().t()) * (roundoff * (self.norm is not None) + (k + 16) * ROUNDOFF[FP32])
        if self.bias is not None:
            y = y + self.bias.double()
        if self.gated:
            (gate, up), (gate_error, up_error) = y.chunk(2, dim=-1), error.chunk(2, dim=-1)
            silu = gate * gate.sigmoid()
            y = silu * up
            # The derivative of silu is at most 1.1; the fast exponential costs a few more fp32 roundings.
            error = 1.1 * gate_error * (up.abs() + up_error) + silu.abs() * up_error + 32 * ROUNDOFF[FP32] * y.abs()
        if self.residual is not None:
            y = y + self.residual.double()
        excess = (out.double() - y).abs() - (1.01 * (error + roundoff * y.abs()) + 1e-7)
        assert out.shape == y.shape and bool(out.isfinite().all())
        assert float(excess.max()) <= 0, f"{float(excess.max()):.2e} beyond what roundings can do"


def make_problem(
    rows: int, m: int, k: int, *, dtype: torch.dtype = FP32, bias: bool = False, norm: bool = False,
    residual: bool = False, gated: bool = False, scale: float = 3.0,
) -> Problem:  # fmt: skip
    """Random inputs: weights that keep the size of the rows."""
    return Problem(
        random_tensor(rows, k, seed=1, dtype=dtype, scale=scale),
        random_tensor(m, k, seed=2, dtype=dtype, scale=k**-0.5),
        random_tensor(m, seed=3, dtype=dtype) if bias else None,
        RowNorm(random_tensor(k, seed=4, dtype=dtype), EPS) if norm else None,
        random_tensor(rows, m, seed=5, dtype=dtype) if residual else None,
        gated,
    )


def check_kernel(problem: Problem, config: LinearConfig | None = None) -> None:
    """Kernel and reference are both right, and the kernel writes everything it has to and nothing it reads."""
    before = problem.x.clone()
    with poisoned_outputs():
        problem.check(problem.solve_by(few_row_linear_triton, config))
    assert torch.equal(problem.x, before)
    problem.check(problem.solve_by(few_row_linear_reference))


FUSED = [
    {"bias": bias, "norm": norm, "residual": end == "residual", "gated": end == "gated"}
    for bias, norm, end in product((False, True), (False, True), ("plain", "residual", "gated"))
]


@pytest.mark.few(6)
@pytest.mark.parametrize("fused", FUSED, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_everything_that_can_be_fused(rows: int, fused: dict[str, bool]) -> None:
    check_kernel(make_problem(rows, 22, 69, **fused))


@pytest.mark.few(12)
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_every_number_of_rows(rows: int) -> None:
    check_kernel(make_problem(rows, 20, 48, norm=True, residual=True))


@pytest.mark.few(2)
@pytest.mark.parametrize(("m", "k"), [(2, 1), (16, 16), (4, 128), (48, 575), (66, 9)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_odd_shapes(rows: int, m: int, k: int) -> None:
    check_kernel(make_problem(rows, m, k, norm=True, gated=True, bias=True))
    check_kernel(make_problem(rows, m, k, residual=True))


# Whole and broken steps along K; warps side by side along W's rows, and splitting K between them.
@pytest.mark.few(2)
@pytest.mark.parametrize("k", [128, 192, 200])
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, LinearConfig(4, 64, 1, 1)),
        (2, LinearConfig(2, 128, 2, 3)),
        (7, LinearConfig(16, 64, 1, 2)),
        (7, LinearConfig(64, 32, 4, 3)),
        (7, LinearConfig(16, 64, 2, 3)),
        (20, LinearConfig(32, 128, 8, 2)),
    ],
)
def test_every_way_to_cut(rows: int, config: LinearConfig, k: int) -> None:
    check_kernel(make_problem(rows, 34, k, norm=True, gated=True), config)
    check_kernel(make_problem(rows, 34, k, bias=True, residual=True), config)


def test_eps_matters_for_tiny_rows() -> None:
    for rows in (1, 4):
        problem = make_problem(rows, 24, 40, norm=True, scale=1e-3)
        check_kernel(problem)
        assert problem.norm is not None
        with pytest.raises(AssertionError, match="roundings"):
            Problem(problem.x, problem.weight, norm=RowNorm(problem.norm.weight, 1e-6)).check(
                problem.solve_by(few_row_linear_triton)
            )


@pytest.mark.parametrize("rows", [1, 3])
def test_large_gates_saturate_without_nan(rows: int) -> None:
    problem = make_problem(rows, 16, 32, gated=True)
    problem.weight[:4].mul_(200)
    check_kernel(problem)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_nearly_fill_the_range_of_fp16(rows: int) -> None:
    """A norm's weight takes them out of it before their own size brings them back."""
    problem = make_problem(rows, 24, 64, dtype=FP16, norm=True, scale=1.0)
    problem.x[:, ::9] *= 16000
    assert problem.norm is not None
    problem.norm.weight.mul_(4)
    assert float((problem.x.float() * problem.norm.weight.float()).abs().max()) > 65504
    check_kernel(problem)


@pytest.mark.few(3)
@pytest.mark.parametrize("fused", FUSED[1::3], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fp16(rows: int, fused: dict[str, bool]) -> None:
    check_kernel(make_problem(rows, 34, 200, dtype=FP16, **fused))


def test_the_dispatcher_adds_in_place_and_refuses_what_does_not_fit() -> None:
    problem = make_problem(3, 24, 24, residual=True)
    assert problem.residual is not None
    residual = problem.residual.clone()
    assert few_row_linear(problem.x, problem.weight, residual=residual) is residual
    problem.check(residual)
    many = random_tensor(MOST_ROWS + 1, 24, seed=6)
    with pytest.raises(AssertionError):
        few_row_linear(many, problem.weight)
    with pytest.raises(AssertionError):
        few_row_linear(problem.x, problem.weight, residual=residual, gated=True)
    with pytest.raises(AssertionError):  # a program would read what another has written already
        few_row_linear(problem.x, problem.weight, residual=problem.x)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("roomy", "shared_bytes"), [(False, CONSUMER_BYTES), (True, ROOMY_BYTES)])
def test_default_cuts_fit_the_shared_memory(dtype: torch.dtype, normed: bool, roomy: bool, shared_bytes: int) -> None:
    for rows, m, k in product((3, 16, 17, 32), (576, 4096, 8192, 32000), (576, 11008)):
        cut = default_config(rows, m, k, dtype, normed=normed, roomy=roomy)
        padded = 16 if rows <= 16 else 32
        step_bytes = (cut.block_m + padded) * cut.block_k * dtype.itemsize
        normed_bytes = padded * cut.block_k * dtype.itemsize if normed else 0
        # One step less than there are stages is in shared memory, and what was normalised goes through it.
        assert (cut.num_stages - 1) * step_bytes + normed_bytes <= shared_bytes
        assert cut.block_k // cut.num_warps >= 16, "less than a matrix unit takes"
    for rows, k in product((1, LANE_ROWS), (48, 576, 1536, 4096)):
        cut = default_config(rows, 4096, k, dtype, normed=normed, roomy=roomy)
        accumulators = cut.block_m * cut.block_k * rows // (32 * cut.num_warps)
        assert accumulators <= 64 and cut.num_warps <= 16


# Rows of W and K of Llama-2-7B's layers, and of SmolLM2-135M's.
REAL = [
    (12288, 4096, {"norm": True}),
    (4096, 4096, {"residual": True, "bias": True}),
    (22016, 4096, {"norm": True, "gated": True}),
    (4096, 11008, {"residual": True}),
    (960, 576, {"norm": True, "bias": True}),
    (576, 576, {"residual": True}),
    (3072, 576, {"norm": True, "gated": True}),
    (576, 1536, {"residual": True}),
]


# Compiling is what takes long. In fp16 a long K and every kind of norm; what else differs is tried on smaller shapes.
REAL_CASES = [(BF16, *shape) for shape in REAL] + [(FP16, *REAL[number]) for number in (2, 3, 4, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "m", "k", "fused"), REAL_CASES)
def test_real_shapes(dtype: torch.dtype, m: int, k: int, fused: dict[str, bool]) -> None:
    most = make_problem(MOST_ROWS, m, k, dtype=dtype, **fused)
    for rows in (1, 2, 3, 5, 16, 17, MOST_ROWS):
        check_kernel(most.first(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(FUSED)), ids=lambda number: str(FUSED[number]))
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_half_precision(rows: int, number: int) -> None:
    """Ragged shapes in one dtype and even ones in the other: over all rows whatever is fused meets both in both."""
    dtypes = (BF16, FP16) if (rows + number) % 2 else (FP16, BF16)
    for dtype, (m, k) in zip(dtypes, ((70, 133), (256, 1024)), strict=True):
        check_kernel(make_problem(rows, m, k, dtype=dtype, **FUSED[number]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_in_a_graph_it_reads_what_is_there_and_gives_the_same_bits_again(rows: int) -> None:
    first = make_problem(rows, 4096, 4096, dtype=BF16, norm=True, gated=True)
    second = make_problem(rows, 4096, 2048, dtype=BF16, residual=True)
    x, residual = first.x.clone(), torch.zeros(rows, 4096, dtype=BF16, device=KERNEL_DEVICE)

    def run() -> None:
        activation = few_row_linear(x, first.weight, norm=first.norm, gated=True)
        few_row_linear(activation, second.weight, residual=residual)

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
    doubled = Problem(first.x * 2, first.weight, norm=first.norm, gated=True)
    activation = doubled.solve_by(few_row_linear_triton)
    doubled.check(activation)
    Problem(activation, second.weight, residual=second.residual).check(seen[0])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
