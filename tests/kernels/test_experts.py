"""`experts`: against transformers' blocks, and bits that depend on a row, its choices and their experts alone."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from offload_runtime_kernels import experts as ops
from offload_runtime_kernels.experts import ExpertShape
from offload_runtime_kernels.experts_cpu import random_rows
from offload_runtime_kernels.experts_triton import BLOCK_TILES, combine_experts_triton, expert_rows_triton
from offload_runtime_kernels.gguf_blocks import FORMATS, pack_rows
from offload_runtime_kernels.scaled_rows import WHOLE_ROW, ScaledFormat
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.helpers.kernel_conditions import KERNEL_DEVICE, poisoned_outputs
from tests.kernels.test_gguf_blocks import blocks_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SILU = ExpertShape(num_experts=6, hidden=40, inner=24)
CLAMPED = replace(SILU, limit=7.0)


def random_blocks(kind: str | ScaledFormat, experts: int, rows: int, columns: int) -> ops.StoredMatrices:
    """Matrices of random blocks, or numbers, with ordinary scales."""
    if isinstance(kind, ScaledFormat):
        stored = random_rows(kind, experts * rows, columns, torch.Generator().manual_seed(rows)).to(KERNEL_DEVICE)
        return ops.StoredMatrices(stored.view(experts, -1), kind, rows, columns)
    form, scales = FORMATS[kind], (0x1A2B, 0x93C5, 0x9001, 0x1800)
    blocks = blocks_of(kind, experts * rows * columns // form.weights, scales)[256:].to(KERNEL_DEVICE)
    data = torch.empty(experts * rows, form.row_bytes(columns), dtype=torch.uint8, device=KERNEL_DEVICE)
    pack_rows(blocks.view(experts * rows, -1), form, columns, data)
    return ops.StoredMatrices(data.view(experts, -1), kind, rows, columns)


@dataclass(frozen=True)
class Problem:
    """Rows, their choices and experts."""

    shape: ExpertShape
    x: torch.Tensor
    choices: torch.Tensor
    weights: torch.Tensor
    gate_up: ops.StoredMatrices
    down: ops.StoredMatrices
    biases: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
    buffers: torch.Tensor | None = None

    @classmethod
    def random(cls, shape: ExpertShape, rows: int, chosen: int, dtype: torch.dtype, *, bias: bool = False) -> Problem:
        """Heavy-tailed values, whose sums differ in another order."""
        make = torch.Generator().manual_seed(rows)

        def normal(*sizes: int) -> torch.Tensor:
            return (torch.randn(sizes, generator=make) * torch.randn(sizes, generator=make).exp() / 3).to(dtype)

        number, hidden, inner = shape.num_experts, shape.hidden, shape.inner
        likely = torch.rand(rows, number, generator=make).topk(chosen, dim=1)
        order = likely.indices.sort(dim=1)
        weights = likely.values.gather(1, order.indices)
        gate_up, down = normal(number, 2 * inner, hidden), normal(number, hidden, inner)
        biases = (normal(number, 2 * inner), normal(number, hidden)) if bias else (None, None)
        x = normal(rows, hidden)
        return cls(shape, x, order.values, weights, ops.StoredMatrices.of(gate_up), ops.StoredMatrices.of(down), biases)

    @classmethod
    def encoded(
        cls, shape: ExpertShape, rows: int, chosen: int, dtype: torch.dtype,
        kinds: tuple[str | ScaledFormat, str | ScaledFormat],
    ) -> Problem:  # fmt: skip
        """With random blocks."""
        stored = (
            random_blocks(kind, shape.num_experts, *sizes)
            for kind, sizes in zip(kinds, ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)), strict=True)
        )
        one = cls.random(replace(shape, hidden=16, inner=16), rows, chosen, dtype)
        make = torch.Generator().manual_seed(rows)
        normal = [torch.randn(size, generator=make) for size in ((rows, shape.hidden), (shape.num_experts, 1))]
        x, bias = (normal[0] * normal[0].exp() / 64).to(dtype), normal[1].to(dtype)
        biases = (bias.repeat(1, 2 * shape.inner), bias.repeat(1, shape.hidden)) if shape.limit else (None, None)
        return cls(shape, x, one.choices, one.weights, *stored, biases)

    def decoded(self) -> Problem:
        """The same with decoded matrices."""
        every = torch.arange(self.shape.num_experts, device=self.x.device)
        stored = (ops.StoredMatrices.of(one.decoded(every, self.x.dtype)) for one in (self.gate_up, self.down))
        return replace(self, **dict(zip(("gate_up", "down"), stored, strict=True)))

    def of(self, rows: Sequence[int]) -> Problem:
        """The same of some rows."""
        index = list(rows)
        return replace(self, x=self.x[index], choices=self.choices[index], weights=self.weights[index])

    def on(self, device: torch.device | str) -> Problem:
        """The same on a device."""
        first, second = self.biases
        biases = (None, None) if first is None or second is None else (first.to(device), second.to(device))
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in ("x", "choices", "weights")}
        stored = {
            name: replace(matrices, data=matrices.data.to(device))
            for name, matrices in (("gate_up", self.gate_up), ("down", self.down))
        }
        buffers = None if self.buffers is None else self.buffers.to(device)
        return replace(self, biases=biases, buffers=buffers, **moved, **stored)

    def rows(self, by: Any = ops.expert_rows) -> torch.Tensor:
        """What a function makes of every choice."""
        out = self.x.new_full((*self.choices.shape, self.shape.hidden), torch.nan)
        options = {"gate_up_bias": self.biases[0], "down_bias": self.biases[1], "buffers": self.buffers}
        by(self.x, self.choices, self.gate_up, self.down, self.shape, out=out, **options)
        return out

    def solved(self) -> torch.Tensor:
        """What comes of it."""
        return ops.combine_experts(self.rows(), self.weights)


def test_is_what_transformers_computes() -> None:
    mixtral = MixtralConfig(hidden_size=SILU.hidden, intermediate_size=SILU.inner, num_local_experts=SILU.num_experts)
    theirs = MixtralExperts(mixtral)
    problem = Problem.random(SILU, 9, 3, FP32)
    every = torch.arange(SILU.num_experts)
    gate_up, down = (matrices.decoded(every, FP32) for matrices in (problem.gate_up, problem.down))
    theirs.load_state_dict({"gate_up_proj": gate_up, "down_proj": down})
    expected = theirs(problem.x, problem.choices, problem.weights).detach()
    torch.testing.assert_close(problem.solved(), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


def test_is_what_transformers_computes_of_gpt_oss() -> None:
    config = GptOssConfig(
        hidden_size=CLAMPED.hidden, intermediate_size=CLAMPED.inner, num_local_experts=CLAMPED.num_experts
    )
    theirs = GptOssExperts(config)
    problem = Problem.random(CLAMPED, 9, 3, FP32, bias=True)
    every = torch.arange(CLAMPED.num_experts)
    gate_up, down = (matrices.decoded(every, FP32) for matrices in (problem.gate_up, problem.down))
    gate_up_bias, down_bias = problem.biases
    # Gates and ups take turns there.
    in_turn = torch.arange(2 * CLAMPED.inner).view(2, -1).T.flatten()
    theirs.load_state_dict({
        "gate_up_proj": gate_up[:, in_turn].mT, "gate_up_proj_bias": gate_up_bias,
        "down_proj": down.mT, "down_proj_bias": down_bias,
    })  # fmt: skip
    expected = theirs(problem.x, problem.choices, problem.weights).detach()
    torch.testing.assert_close(problem.solved(), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [SILU, CLAMPED])
def test_a_row_has_the_same_bits_in_any_company(shape: ExpertShape, dtype: torch.dtype) -> None:
    problem = Problem.random(shape, 33, 3, dtype, bias=shape is CLAMPED)
    expected = problem.solved()
    for rows in ([5], range(7), range(32, -1, -1), [4, 4, 4, 4], range(0, 33, 2)):
        assert torch.equal(problem.of(rows).solved(), expected[list(rows)])


def pooled(problem: Problem, buffers: list[int]) -> Problem:
    """The same with experts in buffers of a pool, which are as long as an expert, or in none."""
    size = problem.gate_up.data.shape[1]
    pool = torch.full((max(buffers) + 1, size + problem.down.data.shape[1]), 255, dtype=torch.uint8)  # NaN
    for number, buffer in enumerate(buffers):
        if buffer >= 0:
            pool[buffer] = torch.cat([problem.gate_up.data[number], problem.down.data[number]])
    gate_up, down = replace(problem.gate_up, data=pool[:, :size]), replace(problem.down, data=pool[:, size:])
    return replace(problem, gate_up=gate_up, down=down, buffers=torch.tensor(buffers, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_experts_may_lie_in_a_pool_or_elsewhere(dtype: torch.dtype) -> None:
    problem = Problem.random(SILU, 5, 2, dtype)
    there = (problem.choices != 1) & (problem.choices != 5)
    found = pooled(problem, [6, -1, 0, 3, 5, -1]).rows()
    assert bool(there.any()) and torch.equal(found[there], problem.rows()[there])
    assert bool((~there).any()) and bool(found[~there].isnan().all())
    assert bool(pooled(problem, [-1, -1, -1, -1, -1, 0]).rows()[problem.choices != 5].isnan().all())


def _fmaf(values: torch.Tensor) -> torch.Tensor:
    """The C library's multiply-adds of the rows of [n, 3]."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return torch.tensor([library.fmaf(*row) for row in values.tolist()])


def test_multiply_adds_are_rounded_once() -> None:
    # The sum is just beside the middle of two numbers, nearer than fp64 can tell.
    near, small = 1 + 2.0**-15, 2.0**-24 * (1 - 2.0**-15)
    middles = [[a * near, small, sign * (1 + odd * 2.0**-23)] for a in (1, -1) for sign in (1, -1) for odd in (0, 1, 2)]
    values = torch.cat([torch.tensor(middles), torch.randn(2000, 3, generator=torch.Generator().manual_seed(1)).exp()])
    a, b, c = values.T
    expected = _fmaf(values)
    assert not torch.equal((a.double() * b + c).float(), expected)
    assert torch.equal(ops.fma_reference(a, b, c), expected)


def test_products_are_chains_over_ascending_columns() -> None:
    problem = Problem.random(SILU, 3, 2, FP32)
    choices = problem.choices[:, 0]
    expected = torch.zeros(3, 2 * SILU.inner)
    for row, number in enumerate(choices.tolist()):
        (matrix,) = problem.gate_up.decoded(torch.tensor([number]), FP32)
        for x, w in zip(problem.x[row], matrix.T, strict=True):
            expected[row] = _fmaf(torch.stack([x.expand_as(w), w, expected[row]], dim=1))
    assert torch.equal(ops.product_reference(problem.x, choices, problem.gate_up, None, None), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_in_16_bits_are_those_chains_too(dtype: torch.dtype) -> None:
    problem = Problem.random(ExpertShape(2, 512, 1024), 8, 1, dtype)
    choices = problem.choices[:, 0]
    exact = ops.StoredMatrices.of(problem.gate_up.decoded(torch.arange(2), FP32))
    expected = ops.product_reference(problem.x.float(), choices, exact, None, None).to(dtype)
    assert torch.equal(ops.product_reference(problem.x, choices, problem.gate_up, None, None), expected)


def test_exponentials_are_within_two_units_of_the_last_place() -> None:
    x = torch.linspace(-87, 88, 100_001)
    torch.testing.assert_close(ops.exp_reference(x).double(), x.double().exp(), atol=0.0, rtol=2.0**-22)


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("by", [ops.expert_rows_reference, expert_rows_triton])
def test_rows_that_only_fill_up_change_nothing(by: Any, rows: int) -> None:
    """Whatever lies where their results would be, which are 0."""
    problem = pooled(Problem.random(SILU, rows, 3, FP32), [2, 1, -1, 3, 5, 0])
    expected = problem.rows(by) if by is ops.expert_rows_reference else problem.on(KERNEL_DEVICE).rows(by).cpu()
    absent = torch.arange(rows) % 3 == 1
    filled = replace(
        problem, choices=problem.choices.masked_fill(absent[:, None], -1),
        weights=problem.weights.masked_fill(absent[:, None], 0.0),
    )  # fmt: skip
    filled = filled if by is ops.expert_rows_reference else filled.on(KERNEL_DEVICE)
    found = filled.rows(by)
    close = 0.0 if filled.x.is_cuda or by is ops.expert_rows_reference else 1e-5  # the interpreter's are a library's
    torch.testing.assert_close(found[~absent].cpu(), expected[~absent], atol=close, rtol=close, equal_nan=True)
    assert found[absent].isnan().all()
    combine = ops.combine_experts_reference if by is ops.expert_rows_reference else combine_experts_triton
    assert (combine(found, filled.weights)[absent] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("shape", [SILU, CLAMPED])
def test_kernel_matches_reference(shape: ExpertShape, rows: int) -> None:
    problem = pooled(Problem.random(shape, rows, 3, FP32, bias=shape is CLAMPED), [2, 1, -1, 3, 5, 0])
    there = problem.on(KERNEL_DEVICE)
    with poisoned_outputs():
        found = there.rows(expert_rows_triton)
        total = combine_experts_triton(found, there.weights)
        added = combine_experts_triton(found, there.weights, residual=there.x.clone())
    expected = problem.rows()
    for one, other in ((found, expected), (total, ops.combine_experts(expected, problem.weights))):
        torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(added, there.x + total, atol=0, rtol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "num_chosen", "dtype"), [
    (ExpertShape(32, 320, 96), 8, BF16), (ExpertShape(32, 320, 96, limit=7.0), 4, BF16), (SILU, 3, FP32),
])  # fmt: skip
def test_kernels_have_the_bits_of_the_reference(shape: ExpertShape, num_chosen: int, dtype: torch.dtype) -> None:
    problem = Problem.random(shape, 300, num_chosen, dtype, bias=shape.limit is not None)
    expected, there = problem.solved(), problem.on("cuda")
    for count in (1, 2, 7, 16, 17, 300):
        with poisoned_outputs():
            out = there.of(range(count)).solved()
        assert torch.equal(out.cpu(), expected[:count])


@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_may_be_blocks(kind: str) -> None:
    shape = ExpertShape(2, 256, 32 if FORMATS[kind].weights == 32 else 256)
    problem = Problem.encoded(shape, 2, 1, BF16, (kind, kind)).on("cpu")
    assert torch.equal(problem.rows(), problem.decoded().rows())


def check_kernels(problem: Problem) -> None:
    """Against the reference, but for roundings."""
    with poisoned_outputs():
        found = problem.on(KERNEL_DEVICE).rows(expert_rows_triton).cpu()
    expected = problem.on("cpu").rows()
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "rows"), [("MXFP4", 1), ("Q6_K", 3), ("Q4_K", 6), ("MXFP4", 20), ("Q8_0", 20)])
def test_kernels_decode_blocks(kind: str, rows: int) -> None:
    """A K that is no whole number of tiles, where blocks are that small."""
    small = FORMATS[kind].weights == 32
    shape = ExpertShape(2, 288 if small else 256, 32 if small else 256)
    check_kernels(Problem.encoded(shape, rows, 1, FP32, (kind, kind)))


FP8 = ScaledFormat("FP8", 1, 128, FP32)  # as Qwen's; then GPTQ, AWQ and compressed-tensors, and NVFP4
INT4, INT4_OF_ROWS = ScaledFormat("uint4", 1, 64, FP16, 1, zeros=True), ScaledFormat("uint4", 1, WHOLE_ROW, FP16, 8)
SYMMETRIC, NVFP4 = ScaledFormat("uint4", 1, 128, BF16, 8), ScaledFormat("E2M1", 1, 16, FP32)
INT8, UINT8 = ScaledFormat("int8", 1, 32, FP16, zeros=True), ScaledFormat("uint8", 1, 512, FP32, 128)


@pytest.mark.few(3)
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("form", [FP8, INT4, INT4_OF_ROWS, NVFP4, INT8, UINT8])  # without bf16: see `test_scaled_rows`
def test_kernels_decode_numbers(form: ScaledFormat, rows: int) -> None:
    """A K that is no whole number of steps."""
    check_kernels(Problem.encoded(ExpertShape(2, 288, 32), rows, 1, FP32, (form, form)))


# Of Qwen3-30B-A3B and gpt-oss-120b, with fewer experts.
LARGE = (
    (ExpertShape(32, 2048, 768), 8, ("Q4_K", "Q6_K"), FP16),
    (ExpertShape(32, 2880, 2880, limit=7.0), 4, ("MXFP4", "MXFP4"), BF16),
    (ExpertShape(32, 2048, 768), 8, (FP8, FP8), BF16),
    (ExpertShape(32, 2048, 768), 8, (INT4, INT4), FP16),
    (ExpertShape(32, 2048, 768), 8, (SYMMETRIC, SYMMETRIC), BF16),
    (ExpertShape(32, 2048, 768), 8, (NVFP4, NVFP4), BF16),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "num_chosen", "kinds", "dtype"), LARGE)
def test_blocks_have_the_bits_of_decoded_matrices(
    shape: ExpertShape, num_chosen: int, kinds: tuple[Any, Any], dtype: torch.dtype
) -> None:
    """Of every way to cut them."""
    problem = Problem.encoded(shape, 600, num_chosen, dtype, kinds).on("cuda")
    decoded = problem.decoded()
    expected = decoded.rows()
    every = [(count, None) for count in (1, 16, 40, 100, 600)]
    for count, tile in (*every, *((100, tile) for tile in BLOCK_TILES.values())):
        with poisoned_outputs():
            found = problem.of(range(count)).rows(partial(expert_rows_triton, tile=tile))
        assert torch.equal(found, expected[:count]), (count, tile)
    assert torch.equal(expected[:1].cpu(), decoded.of([0]).on("cpu").rows())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q5_K", "IQ4_XS", INT4, INT4_OF_ROWS, INT8, UINT8], ids=str
)
def test_other_formats_have_the_bits_of_what_they_are_decoded_to(kind: Any) -> None:
    problem = Problem.encoded(ExpertShape(4, 512, 512), 40, 2, BF16, (kind, kind)).on("cuda")
    expected = problem.decoded().rows()
    for count in (1, 40):
        assert torch.equal(problem.of(range(count)).rows(), expected[:count])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_graphs_hold_them_whatever_is_chosen(rows: int) -> None:
    problem = Problem.random(SILU, 2 * rows, 3, BF16).on("cuda")
    held, later = problem.of(range(rows)), problem.of(range(rows, 2 * rows))
    held.solved()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = held.solved()
    for name in ("x", "choices", "weights"):
        getattr(held, name).copy_(getattr(later, name))
    graph.replay()
    assert torch.equal(out, later.solved())
