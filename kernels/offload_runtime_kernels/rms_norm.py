"""RMSNorm:  normed = weight * (x / sqrt(mean(x^2) + eps)).

The mean is taken in fp32 and the normalised row is rounded to the model's dtype before the weight multiplies it, as in
transformers. One program per row, so a row's bits do not depend on how many rows there are.
"""

import torch

from offload_runtime_kernels._jit import gdc_launch_dependents, gdc_wait, jit, overlap_options, tl, triton


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain torch version of `rms_norm`."""
    return weight * torch.nn.functional.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)


@jit
def _rms_norm_kernel(x_ptr, weight_ptr, normed_ptr, width, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / width + eps)
    normed = (x32 * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(normed_ptr + row * width + columns, normed.to(x.dtype), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Triton version of `rms_norm`."""
    assert x.is_contiguous() and weight.is_contiguous()
    rows, width = x.shape
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(rows,)](
            x, weight, normed, width, eps, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            **overlap_options(x.device),
        )  # fmt: skip
    return normed


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise rows.

    Args:
        x: [N, H], contiguous.
        weight: [H].
        eps: Added to the mean square.

    Returns:
        [N, H] in the dtype of x.
    """
    run = rms_norm_triton if x.is_cuda else rms_norm_reference
    return run(x, weight, eps)
