"""Matrix products of any number of rows whose bits do not depend on that number.

    y = x W^T + b;    out = y   or   residual + y   or   activation(y_gate) * y_up

The rule: one element of y has one fp32 accumulator, and products are accumulated into it in ascending order of K by the
matrix units; nothing is split along K between programs, warps or lanes. So a row has the same bits alone, in a window,
in a batch and in a prompt, whatever the tile. What is fused rounds where separate kernels would: y, the
activation of the gate and the result each to the dtype of x.

Few rows cost what reading W costs: W's rows lie on the side of the matrix units that takes 16, x on the side of 8. Many
are multiplied by the library in slices of `LIBRARY_ROWS`, where that gives the bits of the rule.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from offload_runtime_kernels._jit import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    overlap_options,
    require_triton,
    tl,
    triton,
)

Activation = Literal["silu", "gelu"]
_GATED_BLOCK = 1024  # columns of a program of the gated product alone


def gated_product_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Plain torch version of `gated_product`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@jit
def gated_up(gate, up, dtype, GELU: tl.constexpr):
    """The gated product in fp32, with the activation rounded to `dtype`."""
    if GELU:
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        exponent = -gate
    return (gate / (1.0 + tl.exp(exponent))).to(dtype).to(tl.float32) * up


@jit
def _gated_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
    out = gated_up(gate.to(tl.float32), up.to(tl.float32), gate.dtype, GELU)
    tl.store(out_ptr + row * width + columns, out.to(gate.dtype), mask=inside)


def gated_product_triton(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Triton version of `gated_product`."""
    assert gate_up.is_contiguous() and gate_up.shape[-1] % 2 == 0
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _gated_kernel[(rows, triton.cdiv(width, _GATED_BLOCK))](
        gate_up, out, width, BLOCK=_GATED_BLOCK, GELU=activation == "gelu", num_warps=4
    )
    return out


def gated_product(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up [N, I] of a fused projection `gate_up` [N, 2I], gate first, contiguous.

        silu(x) = x / (1 + exp(-x));   gelu(x) = x / (1 + exp(-2u)),   u = sqrt(2/pi) (x + 0.044715 x^3)

    which is x (1 + tanh(u)) / 2. The activation is computed in fp32 and rounded to the dtype before the product,
    as two separate torch operations do.
    """
    return (gated_product_triton if gate_up.is_cuda else gated_product_reference)(gate_up, activation)


# Heights of products that the library may do, by kind of device: it chooses its kernel by the shape. At 512 rows cuBLAS
# had the rule's bits in every shape of models of 135M to 70B that was tried on an H100 and an H200; at 256 it splits
# the longest K, and at 128 it gains little.
LIBRARY_ROWS = {"cuda": (512, 256), "cpu": (64,)}
# On a CPU the rule is the library's product of so many rows: 1 to 3 it does in another order than more.
_CPU_ROWS = 8
# Programs whose W stays in the L2 cache while each multiplies rows of its own with it.
_GROUP = 8
# Most rows of each way to cut a product; the last way is for more too.
TILE_ROWS = (8, 16, 32, 64, 128, 255)
# A W of fewer rows has too few tall tiles to keep every multiprocessor busy.
_TALL = 8192


@dataclass(frozen=True)
class LinearTile:
    """How a product is cut: `block_n` rows of x by `block_m` of W, steps of `block_k`, `num_stages` steps ahead.

    With `w_first` the rows of W are those of the matrix units' first operand.
    """

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    w_first: bool


# By `TILE_ROWS`: of 30 to 60 that were tried with a 7B's matrices on an H200, the fastest over all of a layer.
_TALL_TILES = (
    LinearTile(8, 16, 128, 1, 6, True), LinearTile(16, 64, 128, 4, 3, True), LinearTile(32, 64, 128, 4, 4, True),
    LinearTile(64, 64, 64, 4, 4, False), LinearTile(128, 64, 64, 8, 4, True), LinearTile(128, 128, 64, 8, 3, False),
)  # fmt: skip
_SHORT_TILES = (
    LinearTile(8, 16, 128, 1, 6, True), LinearTile(16, 16, 128, 2, 6, True), LinearTile(32, 64, 128, 4, 4, True),
    LinearTile(64, 32, 128, 4, 4, False), LinearTile(32, 64, 128, 4, 3, True), LinearTile(64, 64, 128, 4, 3, False),
)  # fmt: skip


@jit
def _sums(
    x_ptrs, w_ptrs, real, k, sums, K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    W_FIRST: tl.constexpr,
):  # fmt: skip
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_ptrs + start)
            x = tl.load(x_ptrs + start, mask=real, other=0.0)
        else:
            inside = start + k < K
            w = tl.load(w_ptrs + start, mask=inside[None, :] if W_FIRST else inside[:, None], other=0.0)
            x = tl.load(x_ptrs + start, mask=real & (inside[:, None] if W_FIRST else inside[None, :]), other=0.0)
        a = w if W_FIRST else x
        b = x if W_FIRST else w
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@jit(do_not_specialize=("num_rows",))
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, width,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    W_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, OVERLAP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    blocks_n = tl.cdiv(num_rows, BLOCK_N)
    blocks_m = tl.num_programs(0) // blocks_n
    program = tl.program_id(0)
    # Programs that run at the same time share rows of x and of W, which come out of the L2 cache.
    group = program // (GROUP * blocks_n)
    group_m = tl.minimum(blocks_m - group * GROUP, GROUP)
    block_m = group * GROUP + program % (GROUP * blocks_n) % group_m
    block_n = program % (GROUP * blocks_n) // group_m
    lane = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # A gate and its up are neighbours in the tile. What lies behind the last row reads that row and stores nothing.
    column = lane // 2 if GATED else lane
    w_row = tl.minimum(column, width - 1)
    if GATED:
        w_row += (lane % 2) * width
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_start = w_row.to(tl.int64) * K
    x_start = row.to(tl.int64) * K
    real = row < num_rows
    if W_FIRST:
        x_ptrs, w_ptrs = x_ptr + x_start[None, :] + k[:, None], weight_ptr + w_start[:, None] + k[None, :]
        sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        y = _sums(x_ptrs, w_ptrs, real[None, :], k, sums, K, BLOCK_K, STAGES, True)
    else:
        x_ptrs, w_ptrs = x_ptr + x_start[:, None] + k[None, :], weight_ptr + w_start[None, :] + k[:, None]
        sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        y = _sums(x_ptrs, w_ptrs, real[:, None], k, sums, K, BLOCK_K, STAGES, False)
    if OVERLAP:
        gdc_launch_dependents()
    if HAS_BIAS:
        bias = tl.load(bias_ptr + w_row).to(tl.float32)
        y += bias[:, None] if W_FIRST else bias[None, :]
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if GATED:
        if W_FIRST:
            gate, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_M // 2, 2, BLOCK_N]), (0, 2, 1)))
        else:
            gate, up = tl.split(tl.reshape(y, [BLOCK_N, BLOCK_M // 2, 2]))
        y = gated_up(gate, up, x_ptr.dtype.element_ty, GELU)
        column = block_m * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
    out_row = row.to(tl.int64) * width
    if W_FIRST:
        out_ptrs = out_ptr + out_row[None, :] + column[:, None]
        written = real[None, :] & (column[:, None] < width)
    else:
        out_ptrs = out_ptr + out_row[:, None] + column[None, :]
        written = real[:, None] & (column[None, :] < width)
    if HAS_RESIDUAL:
        y += tl.load(out_ptrs, mask=written, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=written)


def default_tile(num_rows: int, m: int, dtype: torch.dtype) -> LinearTile:
    """How to cut a product of `num_rows` rows with W [m, K]; within the 99 KB of shared memory of consumer cards."""
    if dtype.itemsize == 4:
        return LinearTile(16, 32, 32, 4, 2, True)
    by_rows = _TALL_TILES if m >= _TALL else _SHORT_TILES
    return by_rows[min(bisect_left(TILE_ROWS, num_rows), len(by_rows) - 1)]


def linear_triton(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None = None, add: bool = False,
    gated: Activation | None = None, tile: LinearTile | None = None,
) -> None:  # fmt: skip
    """Triton version of the rule, into `out` or, with `add`, added to it; `tile` overrides how the product is cut."""
    require_triton("linear")
    (num_rows, k), m = x.shape, weight.shape[0]
    cut = tile or default_tile(num_rows, m, x.dtype)
    programs = triton.cdiv(m, cut.block_m) * triton.cdiv(num_rows, cut.block_n)
    with torch.cuda.device_of(x):
        # Triton wants a pointer for every argument; an unused one may point anywhere.
        _linear_kernel[(programs,)](
            x, weight, bias if bias is not None else x, out, num_rows, m // 2 if gated else m,
            K=k, BLOCK_N=cut.block_n, BLOCK_M=cut.block_m, BLOCK_K=cut.block_k, STAGES=cut.num_stages,
            W_FIRST=cut.w_first, HAS_BIAS=bias is not None, HAS_RESIDUAL=add, GATED=gated is not None,
            GELU=gated == "gelu", GROUP=_GROUP, num_warps=cut.num_warps, **overlap_options(x.device),
        )  # fmt: skip


def linear_library(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None = None, add: bool = False,
    gated: Activation | None = None,
) -> None:  # fmt: skip
    """The same by the library and kernels around it, which round where the rule does."""
    y = x.new_empty(x.shape[0], weight.shape[0]) if gated or add else out
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)
    if gated:
        out.copy_(gated_product(y, gated))
    elif add:
        out.add_(y)


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None = None, add: bool = False,
    gated: Activation | None = None,
) -> None:  # fmt: skip
    """The rule on a CPU: products of exactly `_CPU_ROWS` rows, the last of them filled up with zeros."""
    for start in range(0, x.shape[0], _CPU_ROWS):
        rows, result = x[start : start + _CPU_ROWS], out[start : start + _CPU_ROWS]
        padding = (0, 0, 0, _CPU_ROWS - rows.shape[0])
        rows, padded = (torch.nn.functional.pad(one, padding) if any(padding) else one for one in (rows, result))
        linear_library(rows, weight, padded, bias=bias, add=add, gated=gated)
        if any(padding):
            result.copy_(padded[: result.shape[0]])


_by_rule = {"cuda": linear_triton, "cpu": linear_reference}
# By height, device, dtype, shape, what is fused, and what a program allows the library: whether it has the bits of the
# rule.
_agrees: dict[tuple[object, ...], bool] = {}


def library_agrees(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: Activation | None) -> bool:
    """Whether the library's product of `num_rows` rows with a matrix of this shape has the bits of the rule.

    Found the first time by comparing the two on heavy-tailed rows, which waits for the device. What a program lets
    products be computed in (TF32 of fp32, less than fp32 of 16 bits) may change at any time: every setting is compared.
    """
    device, (m, k), allowed = weight.device, weight.shape, torch.backends.cuda.matmul
    key = (
        num_rows, device, weight.dtype, m, k, bias is not None, gated, allowed.fp32_precision,
        allowed.allow_fp16_accumulation, allowed.allow_fp16_reduced_precision_reduction,
        allowed.allow_bf16_reduced_precision_reduction,
    )  # fmt: skip
    if key not in _agrees:
        generator = torch.Generator().manual_seed(0)
        magnitude = torch.randn(num_rows, k, generator=generator).exp()
        x = (magnitude * torch.randn(num_rows, k, generator=generator)).to(device, weight.dtype)
        outs = [x.new_empty(num_rows, m // 2 if gated else m) for _ in range(2)]
        linear_library(x, weight, outs[0], bias=bias, gated=gated)
        _by_rule[device.type](x, weight, outs[1], bias=bias, gated=gated)
        _agrees[key] = torch.equal(*outs)
    return _agrees[key]


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    gated: Activation | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows with a matrix; a row's bits depend on nothing but the row.

    Args:
        x: [N, K], contiguous.
        weight: [M, K], contiguous, in the dtype of x; with `gated` M / 2 rows of gates and then as many of ups.
        bias: [M] or None.
        residual: [N, M], contiguous, updated in place; it must not overlap x. Excludes `gated`.
        gated: Return activation(gate) * up.

    Returns:
        [N, M], or [N, M / 2] with `gated`, in the dtype of x; `residual` itself where there is one.
    """
    (num_rows, k), m, device_type = x.shape, weight.shape[0], x.device.type
    assert weight.shape == (m, k) and not (gated and (m % 2 or residual is not None))
    assert x.is_contiguous() and weight.is_contiguous() and weight.dtype == x.dtype
    assert bias is None or (bias.shape == (m,) and bias.is_contiguous())
    if residual is not None:
        assert residual.shape == (num_rows, m) and residual.is_contiguous() and residual.data_ptr() != x.data_ptr()
    out = residual if residual is not None else x.new_empty(num_rows, m // 2 if gated else m)
    start, add = 0, residual is not None
    for height in LIBRARY_ROWS[device_type]:
        while num_rows - start >= height and library_agrees(height, weight, bias, gated=gated):
            rows = slice(start, start + height)
            linear_library(x[rows], weight, out[rows], bias=bias, add=add, gated=gated)
            start += height
    if start < num_rows:
        _by_rule[device_type](x[start:], weight, out[start:], bias=bias, add=add, gated=gated)
    return out
