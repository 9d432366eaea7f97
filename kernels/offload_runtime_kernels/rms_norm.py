"""RMSNorm:  normed = weight * (x / sqrt(mean(x^2) + eps)); of a row less its mean it is LayerNorm without a bias.

Means are taken in fp32. The normalised row is rounded to the model's dtype before the weight multiplies it, as in
transformers' Llama; with an offset it is multiplied by offset + weight in fp32 and rounded once, as in Gemma (1), OLMo
and Cohere (0). One program per row, so a row's bits do not depend on how many rows there are.
"""

import torch

from offload_runtime_kernels._jit import gdc_launch_dependents, gdc_wait, jit, overlap_options, tl, triton


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float | None = None, *, centred: bool = False,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `rms_norm`, of any outer dimensions; without a weight it is one."""
    if gate is not None:
        normed = rms_norm_reference(x, weight, eps, offset, centred=centred).float()
        return (normed * (gate.double() * torch.sigmoid(gate.double())).float()).to(x.dtype)
    norm = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
    normed = norm(x.float(), x.shape[-1:], eps=eps)
    if weight is None or offset is None:
        return normed.to(x.dtype) if weight is None else weight * normed.to(x.dtype)
    return (normed * (offset + weight.float())).to(x.dtype)


@jit
def weighted(normed, weight, offset, dtype, ROUNDS_FIRST: tl.constexpr):
    """A normalised row times its weight, in fp32 of values of `dtype`."""
    factor = weight.to(tl.float32)
    if ROUNDS_FIRST:
        normed = normed.to(dtype).to(tl.float32)
    else:
        factor += offset
    return (normed * factor).to(dtype).to(tl.float32)


@jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, gate_ptr, x_stride, out_stride, width, eps, offset,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, ROUNDS_FIRST: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    out_ptrs = out_ptr + row * out_stride + columns
    if OVERLAP:
        gdc_launch_dependents()
    x32 = x.to(tl.float32)
    if CENTRED:
        x32 = tl.where(inside, x32 - tl.sum(x32, axis=0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / width + eps)
    normed = weighted(x32 * scale, weight, offset, x.dtype, ROUNDS_FIRST)
    if GATED:
        gate = tl.load(gate_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        normed *= gate / (1.0 + tl.exp(-gate))
    if ADDS:
        normed += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, normed.to(x.dtype), mask=inside)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float | None = None, centred: bool = False,
    gate: torch.Tensor | None = None, out: torch.Tensor | None = None, add: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `rms_norm`."""
    rows, width = x.shape
    out = torch.empty_like(x) if out is None else out
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(rows,)](
            x, weight, out, x if gate is None else gate, x.stride(0), out.stride(0), width, eps, offset or 0.0,
            BLOCK=block, CENTRED=centred, ROUNDS_FIRST=offset is None, ADDS=add, GATED=gate is not None,
            num_warps=min(16, max(1, block // 512)),
            **overlap_options(x.device),
        )  # fmt: skip
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float | None = None, centred: bool = False,
    gate: torch.Tensor | None = None, out: torch.Tensor | None = None, add: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Normalise rows.

    Args:
        x: [N, H], of any row stride.
        weight: [H].
        eps: Added to the mean square.
        offset: Added to the weight, in fp32; None: the normalised row is rounded before the weight multiplies it.
        centred: Whether each row's mean is taken off it first, as LayerNorm does.
        gate: [N, H], contiguous: its silu, in fp32, multiplies the normed rows.
        out: [N, H], of any row stride, written; it may be `x` itself. None: new memory.
        add: Whether the normed rows are added to what `out` has.

    Returns:
        [N, H] in the dtype of x: `out` where there is one.
    """
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert out is None or (out.stride(1) == 1 and out.shape == x.shape)
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps, offset=offset, centred=centred, gate=gate, out=out, add=add)
    normed = rms_norm_reference(x, weight, eps, offset, centred=centred, gate=gate)
    if out is None:
        return normed
    return out.add_(normed) if add else out.copy_(normed)
