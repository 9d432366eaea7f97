"""Kernels compiled for GPUs that are not there: each binary fits, and hardly spills where that costs most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.kernel_conditions import SHARED_BYTES

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# What is compiled, as `tests.helpers.compiling` is asked for it, which compiles all where nothing is named: that takes
# minutes. 8.6, 8.9 and 12.0 have as much shared memory: of each kernel the largest speaks for the rest, and of the
# first two the second. GPU tests run on 9.0.
LARGEST = ("linear 22016", "prefill gemma-2-2b", "sources gemma-2-2b")
ENCODED = ("gguf_linear", "12-bit", "scaled_linear uint4")
OTHERS = ("tree", "router 512", "experts 16 BF16", "experts 128 Q4_K", "decode FP8", "decode rest BF16")
WANTED = {89: (*LARGEST, *ENCODED, *OTHERS), 120: (*LARGEST, *ENCODED)}
OF_ENCODED = ("_gguf_linear_kernel", "_coded_linear_kernel", "_scaled_linear_kernel")
# Most bytes of stack of a thread, where it keeps what registers do not hold. Measured at most, by Triton 3.9: products
# of matrices none; attention in 16 bits 368 (prompts, 256 channels, 8.9), in fp32 528 (windows, 128 channels, 9.0);
# several sources 160; products of encoded matrices none; experts in blocks 240, of four rows.
STACK_BYTES = {
    "_linear_kernel": 64, "_expert_kernel": 320, "prefill_kernel": 512, "split_kernel": 640, "_sources_kernel": 512,
    **dict.fromkeys(OF_ENCODED, 64),
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What `tests.helpers.compiling` says: `binaries`, and calls that failed."""

    binaries: list[dict[str, Any]]
    failed: list[dict[str, str]]

    @classmethod
    def of(cls, arch: int, *wanted: str) -> Compiled:
        """Made in a process of its own, as this one's kernels may be interpreted. What Triton has in its cache, by the
        source and the compiler, is as good as new."""
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-m", "tests.helpers.compiling", str(arch), *wanted]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        failed = [line for line in lines if "failed" in line]
        return cls([line for line in lines if "failed" not in line], failed)

    def too_large(self, arch: int) -> list[dict[str, Any]]:
        """Those that cannot be launched."""
        return [binary for binary in self.binaries if binary["shared"] > SHARED_BYTES[arch]]

    def out_of_order(self) -> list[dict[str, Any]]:
        """Products of encoded matrices that do not take columns as `linear` does: 16 bits an element, two at a time.
        With wider stretches of a thread's own, as Triton likes them of what is decoded, others are summed first."""
        return [b for b in self.binaries if b["kernel"] in OF_ENCODED and b["k_widths"] != [2]]

    def spilling(self) -> list[dict[str, Any]]:
        """Those that keep more on the stack than they did."""
        return [b for b in self.binaries if b["stack"] > STACK_BYTES.get(b["kernel"], b["stack"])]


@pytest.mark.parametrize("arch", WANTED)
def test_kernels_compile_and_fit(arch: int) -> None:
    compiled = Compiled.of(arch, *WANTED[arch])
    assert not compiled.failed
    wanted = {"_linear_kernel", "prefill_kernel", "_sources_kernel", *OF_ENCODED}
    assert wanted <= {binary["kernel"] for binary in compiled.binaries}
    assert not compiled.too_large(arch)
    assert not compiled.out_of_order()
    assert not compiled.spilling()
