"""RMSNorm fused with the residual addition before it.

    residual += delta;   normed = weight * (residual / sqrt(mean(residual^2) + eps))

The mean is taken in fp32 and the normalised row is rounded to the model's dtype before the weight multiplies it, as in
transformers. One program per row, so a row's bits do not depend on how many rows there are.
"""

import torch

from offload_runtime_kernels._jit import jit, tl, triton


def add_rms_norm_reference(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Plain torch version of `add_rms_norm`."""
    if delta is not None:
        residual.add_(delta)
    row = residual.float()
    row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    return weight * row.to(residual.dtype)


@jit
def _add_rms_norm_kernel(
    residual_ptr, delta_ptr, weight_ptr, normed_ptr, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * width + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * width + columns, x, mask=inside)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = (x32 * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(normed_ptr + row * width + columns, normed.to(x.dtype), mask=inside)


def add_rms_norm_triton(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Triton version of `add_rms_norm`."""
    assert residual.is_contiguous() and weight.is_contiguous() and (delta is None or delta.is_contiguous())
    rows, width = residual.shape
    normed = torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(rows,)](
        residual, delta if delta is not None else residual, weight, normed, width, eps,
        HAS_DELTA=delta is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return normed


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `residual` in place and return the normalised rows.

    Args:
        residual: [N, H], contiguous; updated in place when there is a delta.
        delta: [N, H], contiguous, or None.
        weight: [H].
        eps: Added to the mean square.

    Returns:
        [N, H] in the dtype of `residual`.
    """
    run = add_rms_norm_triton if residual.is_cuda else add_rms_norm_reference
    return run(residual, delta, weight, eps)
