"""Under which conditions kernels are tested: where, in which dtypes, with poisoned outputs, how exactly."""

import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from offload_runtime_kernels.experts_cpu import ExpertsLibrary, Instructions, Stored, load_experts_library
from offload_runtime_kernels.scaled_rows import WHOLE_ROW, ScaledFormat

# Without a GPU the kernels run in Triton's interpreter, on CPU tensors.
KERNEL_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Half the distance between neighbouring numbers around 1: the largest relative error of one rounding.
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}
# Shared memory that a program may have, in bytes, by compute capability.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
# Of experts in safetensors; code for all of them is compiled at once, for rows in bf16.
NUMBERS = (
    ScaledFormat("FP8", 1, 128, torch.float32), ScaledFormat("E2M1", 1, 16, torch.float32),
    ScaledFormat("uint4", 1, 64, torch.float16, zeros=True), ScaledFormat("uint4", 1, 32, torch.bfloat16, 8),
    ScaledFormat("uint8", 1, 64, torch.float16, 128), ScaledFormat("int8", 1, WHOLE_ROW, torch.bfloat16, zeros=True),
)  # fmt: skip
_DRAWN_ON_CPU = 1 << 20


def experts_library(
    dtype: torch.dtype, encodings: Iterable[Stored], instructions: Instructions = "native"
) -> ExpertsLibrary:
    """Code for experts on the CPU, which the first test to want it compiles."""
    folder = Path(tempfile.gettempdir()) / "experts-of-tests"
    with FileLock(f"{folder}-{dtype}-{instructions}.lock"):
        return load_experts_library(folder, dtype, encodings, instructions)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill what torch allocates uninitialised with NaN, so that whatever a kernel fails to write is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        probe = torch.zeros(1, 8, device=KERNEL_DEVICE)
        empties = (probe.new_empty(2, 8), torch.empty_like(probe), torch.empty(8, device=KERNEL_DEVICE))
        assert all(bool(empty.isnan().all()) for empty in empties), "outputs are not poisoned"
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Gaussian values of `shape` on the kernel device; few of them are the same on every device."""
    # A CPU takes a second for what a GPU draws in a millisecond.
    device = KERNEL_DEVICE if math.prod(shape) > _DRAWN_ON_CPU else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(KERNEL_DEVICE, dtype)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, *, atol: float, rtol: float = 0.0) -> None:
    """Raise unless `actual`, of any dtype, is finite and close to `expected`, which has the higher precision."""
    assert bool(actual.isfinite().all()), "NaN or infinity in the result"
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)
