"""Gated products on a fused gate/up projection:  out = activation(gate) * up.

    silu(x) = x / (1 + exp(-x));   gelu(x) = x / (1 + exp(-2u)),   u = sqrt(2/pi) (x + 0.044715 x^3)

which is x (1 + tanh(u)) / 2. The activation is computed in fp32 and rounded to the model's dtype before the product, as
two separate torch operations do.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from offload_runtime_kernels._jit import jit, tl, triton

Activation = Literal["silu", "gelu"]
_BLOCK = 1024


def gated_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Plain torch version of `gated`."""
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


def gated_triton(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Triton version of `gated`."""
    assert gate_up.is_contiguous() and gate_up.shape[-1] % 2 == 0
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _gated_kernel[(rows, triton.cdiv(width, _BLOCK))](
        gate_up, out, width, BLOCK=_BLOCK, GELU=activation == "gelu", num_warps=4
    )
    return out


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Gate `gate_up` [N, 2I] (gate first, contiguous) with `silu` or `gelu` (by tanh); returns [N, I]."""
    return (gated_triton if gate_up.is_cuda else gated_reference)(gate_up, activation)
