"""SwiGLU on a fused gate/up projection:  out = silu(gate) * up,  silu(x) = x / (1 + exp(-x)).

silu is computed in fp32 and rounded to the model's dtype before the product, as two separate torch operations do.
"""

import torch
import torch.nn.functional as F

from offload_runtime_kernels._jit import jit, tl, triton

_BLOCK = 1024


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch version of `swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@jit
def gated_up(gate, up, dtype):
    """SwiGLU in fp32, with silu rounded to `dtype`."""
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@jit
def _swiglu_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
    out = gated_up(gate.to(tl.float32), up.to(tl.float32), gate.dtype)
    tl.store(out_ptr + row * width + columns, out.to(gate.dtype), mask=inside)


def swiglu_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Triton version of `swiglu`."""
    assert gate_up.is_contiguous() and gate_up.shape[-1] % 2 == 0
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _swiglu_kernel[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, width, BLOCK=_BLOCK, num_warps=4)
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Apply SwiGLU to `gate_up` [N, 2I] (gate first, contiguous); returns [N, I]."""
    return swiglu_triton(gate_up) if gate_up.is_cuda else swiglu_reference(gate_up)
