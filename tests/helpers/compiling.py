"""Compiles Triton kernels for a GPU that need not be there, and says what each program takes of it.

    python -m tests.helpers.compiling 89 ["words of calls" ...]

The kernels' own wrappers are called with CPU tensors of the shapes of real models. A driver stands in for the GPU's,
and instead of launching, Triton's compiler and ptxas make what would be launched. It prints a JSON object a line: of
each binary, and of each call that failed. It is a process of its own, because
Triton decides when a kernel is decorated whether it is interpreted. A binary takes a second or more: what is in the
tables below differs in its code, and not only in its numbers.
"""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import offload_runtime_kernels
import torch
import triton
from offload_runtime_kernels.attention_sources import attend_sources_triton
from offload_runtime_kernels.attention_state import AttentionParams, KeySource, QueryRows
from offload_runtime_kernels.attention_triton import attention_triton
from offload_runtime_kernels.coded_bf16 import CodedRow
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.experts import ExpertShape, StoredMatrices, row_bytes
from offload_runtime_kernels.experts_triton import combine_experts_triton, expert_rows_triton
from offload_runtime_kernels.gguf_blocks import DTYPE_KINDS, FORMATS, BlockFormat
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.kv_blocks import KVBlocks
from offload_runtime_kernels.linear import TILE_ROWS, LinearTile, default_tile, linear_triton
from offload_runtime_kernels.router import choose_experts_triton
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows, decode_scaled_triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.jit import JITFunction

from tests.helpers.kernel_conditions import SHARED_BYTES

BF16, FP16, FP32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
# Query heads, KV heads and head dim.
HEADS = {
    "llama-3-8b": (32, 8, 128),
    "smollm2-135m": (9, 3, 64),
    "phi-2": (32, 32, 80),
    "gemma-2-2b": (8, 4, 256),
    "gemma-4": (32, 4, 512),
}
Call = Callable[[], object]
# Rows of an encoded matrix that is cut as large ones are, and of one as small ones are.
LARGE, SMALL = 14336, 4096


class Driver:
    """Stands in for the driver of a GPU of one compute capability."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(CudaDriver, name)  # how Python's types are called in C


def use(arch: int, launched: Callable[[str, Any], None]) -> None:
    """From now on launches on CPU tensors are compiled for `arch`, as if the tensors were there, and noted."""
    triton.runtime.driver.set_active(Driver(arch))
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(shared_memory_per_block_optin=SHARED_BYTES[arch])
    for module, name in product(modules(), ("is_roomy", "overlap_options")):
        if hasattr(module, name):
            ask = getattr(module, name)
            setattr(module, name, lambda device, ask=ask: ask(torch.device("cuda")))
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched(self.__name__, compiled)
        return compiled

    JITFunction.run = compile_only


def modules() -> list[Any]:
    """All files of kernels."""
    names = [module.name for module in pkgutil.iter_modules(offload_runtime_kernels.__path__)]
    return [import_module(f"{offload_runtime_kernels.__name__}.{name}") for name in names]


def usage(compiled: Any) -> dict[str, Any]:
    """Bytes of shared memory, of each thread registers and bytes of stack (where it spills), and how many elements
    along K that are neighbours a thread hands to the matrix units."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    used = {"shared": compiled.metadata.shared, "registers": int(found[1]), "stack": int(found[2])}
    return {**used, "k_widths": sorted({int(width) for width in re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])})}


def called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ints(*shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype, batch: int = 1) -> KVBlocks:
    return KVBlocks(torch.empty(batch, 5, 2, num_kv_heads, 256, head_dim, dtype=dtype))


def query_rows(count: int, **others: Any) -> QueryRows:
    return QueryRows(ints(1, count), ints(1), 1200, **others)


def product_of(rows: int, m: int, k: int, dtype: torch.dtype, tile: LinearTile, **fused: Any) -> None:
    x, weight = torch.empty(rows, k, dtype=dtype), torch.empty(m, k, dtype=dtype)
    bias = torch.empty(m, dtype=dtype) if fused.pop("bias", False) else None
    linear_triton(x, weight, torch.empty(rows, m, dtype=dtype), bias=bias, tile=tile, **fused)


def linear_calls() -> Iterator[tuple[str, Call]]:
    """Every tile with a gate; either order of operands with what else is fused, which took no more shared memory in any
    tile, and with a ragged last step along K."""
    for dtype, rows, m in product((BF16, FP32), TILE_ROWS, (22016, 4096)):
        name, tile = f"linear {rows} {m} {called(dtype)}", default_tile(rows, m, dtype)
        yield f"{name} gated", partial(product_of, rows, m, 4096, dtype, tile, gated="silu")
        if rows in (TILE_ROWS[0], TILE_ROWS[-1]):
            yield f"{name} added", partial(product_of, rows, m, 11008, dtype, tile, bias=True, add=True)
            yield f"{name} ragged", partial(product_of, rows, m, 576, dtype, tile)


def route(tokens: int, shape: ExpertShape, choices: int, dtype: torch.dtype, kind: str) -> None:
    """Experts without biases whose weights are one matrix, of which nothing is read."""
    chosen, y = ints(tokens, choices, dtype=torch.int64), torch.empty(tokens, choices, shape.hidden, dtype=dtype)
    gate_up, down = (
        StoredMatrices(ints(1, rows * row_bytes(kind, columns), dtype=torch.uint8), kind, rows, columns)
        for rows, columns in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    )
    expert_rows_triton(
        torch.empty(tokens, shape.hidden, dtype=dtype), chosen, gate_up, down, shape, buffers=ints(shape.num_experts),
        gate_up_bias=None, down_bias=None, out=y,
    )  # fmt: skip
    combine_experts_triton(y, torch.empty(tokens, choices))


def expert_calls() -> Iterator[tuple[str, Call]]:
    """Every tile, at the shapes of gpt-oss-120b and Qwen3-30B-A3B."""
    gpt_oss, qwen3 = ExpertShape(128, 2880, 2880, limit=7.0), ExpertShape(128, 2048, 768)
    for dtype, tokens in product((BF16, FP32), (1, 16, 64, 1024, 8192)):
        name, kind = f"experts {tokens} {called(dtype)}", DTYPE_KINDS[dtype]
        yield f"{name} gpt-oss", partial(route, tokens, gpt_oss, 4, dtype, kind)
        yield f"{name} qwen3", partial(route, tokens, qwen3, 8, dtype, kind)
    for tokens in (1, 16, 64, 1024, 8192):
        yield f"experts {tokens} MXFP4", partial(route, tokens, gpt_oss, 4, BF16, "MXFP4")
        for kind in ("Q4_K", "Q6_K", "Q8_0"):
            yield f"experts {tokens} {kind}", partial(route, tokens, qwen3, 8, BF16, kind)


def router_calls() -> Iterator[tuple[str, Call]]:
    """Of many experts a softmax, of fewer the chosen ones', and scores that are corrected."""
    options: dict[str, Any] = {"correction": None, "normed": True, "scale": 1.0, "dtype": BF16}
    for experts, chosen, how in (
        (512, 10, {"scores": "softmax"}), (128, 4, {"scores": "softmax of the chosen"}),
        (128, 8, {"scores": "sigmoid", "correction": torch.empty(128), "dtype": None}),
    ):  # fmt: skip
        logits = torch.empty(4, experts, dtype=BF16)
        yield f"router {experts}", partial(choose_experts_triton, logits, chosen, **{**options, **how})


def blocks(form: BlockFormat, rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, form.row_bytes(columns), dtype=torch.uint8)


def multiply_blocks(
    form: BlockFormat, rows: int, m: int, k: int, dtype: torch.dtype, *, bias: bool = False, add: bool = False
) -> None:
    x, out, added = (torch.empty(*shape, dtype=dtype) for shape in ((rows, k), (rows, m), (m,)))
    gguf_linear_triton(x, blocks(form, m, k), form, out, bias=added if bias else None, add=add)


def multiply_coded(rows: int, columns: int, *, bias: bool = False, add: bool = False) -> None:
    row = CodedRow.of(columns)
    assert row is not None
    x, out, added = (torch.empty(*shape, dtype=BF16) for shape in ((rows, columns), (rows, 4096), (4096,)))
    stored = torch.empty(4096, row.nbytes, dtype=torch.uint8)
    coded_linear_triton(x, stored, row, out, bias=added if bias else None, add=add)


def numbers_of(form: ScaledFormat, rows: int, columns: int) -> ScaledRows:
    (down, across), (_, zero_bytes) = form.scales(rows, columns), form.scale_row_bytes(columns)
    numbers, zeros = ints(rows, form.row_bytes(columns), dtype=torch.uint8), ints(down, zero_bytes, dtype=torch.uint8)
    return ScaledRows(numbers, torch.empty(down, across, dtype=form.scale), zeros, ints(columns))


def decode_numbers(form: ScaledFormat, rows: int, columns: int, dtype: torch.dtype) -> None:
    decode_scaled_triton(numbers_of(form, rows, columns), form, 0, torch.empty(rows, columns, dtype=dtype))


def multiply_numbers(
    form: ScaledFormat, rows: int, m: int, k: int, dtype: torch.dtype, *, bias: bool = False, add: bool = False
) -> None:
    x, out, added = (torch.empty(*shape, dtype=dtype) for shape in ((rows, k), (rows, m), (m,)))
    scaled_linear_triton(x, numbers_of(form, m, k), form, out, bias=added if bias else None, add=add)


# With a scale of all, of rows and of blocks, and of groups that are smaller than a word of a unit.
SCALED = (
    ScaledFormat("FP8", 4096, 4096, BF16), ScaledFormat("FP8", 1, 4096, FP16), ScaledFormat("FP8", 128, 128, FP32),
    ScaledFormat("E2M1", 1, 16, FP32),
)  # fmt: skip


def encoding_calls() -> Iterator[tuple[str, Call]]:
    yield "12-bit 8", partial(multiply_coded, 8, 4096)
    yield "12-bit 16 ragged", partial(multiply_coded, 16, 576, bias=True, add=True)
    for form in SCALED:
        name = f"decode {form.number} {form.rows}x{form.columns} {called(form.scale)} {form.zeros} {form.ordered}"
        yield name, partial(decode_numbers, form, 4096, 4096, FP32 if form.scale == FP32 else BF16)


def gguf_linear_calls() -> Iterator[tuple[str, Call]]:
    """Every format for few rows, one of each kind of scales for as many as there may be; with all that is fused, and a
    ragged last step along K, of a format with blocks of 256 weights and of one with smaller ones."""
    for rows, names in ((8, tuple(FORMATS)), (16, ("Q4_K", "Q5_1", "Q6_K"))):
        for name in names:
            yield f"gguf_linear {name} {rows}", partial(multiply_blocks, FORMATS[name], rows, LARGE, 4096, BF16)
        for name, k in (("Q5_0", 544), ("Q6_K", 768)):
            ragged = partial(multiply_blocks, FORMATS[name], rows, LARGE, k, FP16, bias=True, add=True)
            yield f"gguf_linear {name} {rows} ragged", ragged
    for name in ("Q4_K", "Q8_0"):
        yield f"gguf_linear {name} small", partial(multiply_blocks, FORMATS[name], 8, SMALL, 4096, BF16)


# Every number, and those of 4 bits with every way to multiply them; all sizes of groups.
MULTIPLIED = (
    ScaledFormat("FP8", 1, 4096, BF16), ScaledFormat("FP8", 128, 128, FP32), ScaledFormat("int8", 1, 4096, BF16),
    ScaledFormat("uint8", 1, 64, FP16, 1, zeros=True), ScaledFormat("uint4", 1, 128, FP16, 8),
    ScaledFormat("uint4", 1, 128, FP16, 1, zeros=True), ScaledFormat("uint4", 1, 32, BF16, zeros=True),
    ScaledFormat("uint4", 1, 4096, FP32, 8),
)  # fmt: skip


def scaled_linear_calls() -> Iterator[tuple[str, Call]]:
    """In both dtypes where numbers of 4 bits are multiplied in the scales' own; with all that is fused, and a ragged
    last step along K."""
    for form, dtype in product(MULTIPLIED, (BF16, FP16)):
        name = f"scaled_linear {form.number} {form.rows}x{form.columns} {called(form.scale)} {form.zeros}"
        if dtype == BF16 or form.number == "uint4":
            yield f"{name} {called(dtype)}", partial(multiply_numbers, form, 8, LARGE, 4096, dtype)
    yield "scaled_linear uint4 True bfloat16 small", partial(multiply_numbers, MULTIPLIED[5], 8, SMALL, 4096, BF16)
    for form in (MULTIPLIED[1], MULTIPLIED[5]):
        ragged = partial(multiply_numbers, form, 16, LARGE, 576, BF16, bias=True, add=True)
        yield f"scaled_linear {form.number} 16 ragged", ragged


def attend(
    heads: tuple[int, int, int], dtype: torch.dtype, count: int, *, window: int | None = None, tree: bool = False
) -> None:
    """A prompt, or a window of two splits, whose results are merged; of a tree the second split is each query's own."""
    num_heads, num_kv_heads, head_dim = heads
    tree_rows = {"committed": ints(1), "ancestors": ints(1, count, 24)} if tree else {}
    q, kv = torch.empty(1, count, num_heads, head_dim, dtype=dtype), caches(num_kv_heads, head_dim, dtype)
    # Gemma's caps, and sinks as gpt-oss has them.
    params = AttentionParams(0.1, window, *((50.0, torch.empty(num_heads, dtype=dtype)) if head_dim >= 256 else ()))
    attention_triton(q, kv, query_rows(count, **tree_rows), params, prefill=False if tree else count > 100)


# What of attention is compiled, of whom, and with which sliding window; fp16 takes what bf16 does.
ATTENTION = (
    ("window prefill tree", "llama-3-8b", BF16, None),
    ("window", "llama-3-8b", FP32, 100),
    ("window prefill", "smollm2-135m", BF16, None),
    ("prefill", "smollm2-135m", FP32, None),
    ("prefill", "phi-2", BF16, None),
    ("window prefill tree", "gemma-2-2b", BF16, 100),
    ("window prefill tree", "gemma-4", BF16, None),
)


def attention_calls() -> Iterator[tuple[str, Call]]:
    for kinds, model, dtype, window in ATTENTION:
        for kind in kinds.split():
            count, tree = {"window": 5, "prefill": 512, "tree": 24}[kind], kind == "tree"
            call = partial(attend, HEADS[model], dtype, count, window=window, tree=tree)
            yield f"attention {kind} {model} {called(dtype)} {window}", call


def attend_two(heads: tuple[int, int, int], dtype: torch.dtype, count: int, *, bounded: bool, parts: int) -> None:
    num_heads, num_kv_heads, head_dim = heads
    q, kv = torch.empty(1, count, num_heads, head_dim, dtype=dtype), caches(num_kv_heads, head_dim, dtype)
    sources = [KeySource(kv, range(4), 1000), KeySource(kv, range(1, 3), bounds=ints(1, 2) if bounded else None)]
    rows = query_rows(count)
    if bounded:  # as steps of a retrieval verifier, which checks trees
        rows = replace(rows, committed=ints(1), ancestors=ints(1, count, 5))
    attend_sources_triton(q, sources, rows, AttentionParams(0.1), enough_programs=parts)


def sources_calls() -> Iterator[tuple[str, Call]]:
    for model, dtype, count in (
        ("llama-3-8b", BF16, 5), ("llama-3-8b", BF16, 64), ("smollm2-135m", FP32, 5),
        ("gemma-2-2b", BF16, 64), ("gemma-2-2b", FP32, 64), ("gemma-4", BF16, 64), ("gemma-4", BF16, 5),
    ):  # fmt: skip
        call = partial(attend_two, HEADS[model], dtype, count, bounded=count == 5, parts=1000 if count == 5 else 1)
        yield f"sources {count} {model} {called(dtype)}", call


def calls(wanted: list[str]) -> Iterator[tuple[str, Call]]:
    """What is compiled: everything, or what has all the words of one of `wanted` in its name."""
    every = (
        linear_calls, encoding_calls, gguf_linear_calls, scaled_linear_calls, expert_calls, router_calls,
        attention_calls, sources_calls,
    )  # fmt: skip
    for name, call in (named for group in every for named in group()):
        if not wanted or any(set(words.split()) <= set(name.split()) for words in wanted):
            yield name, call


def main(arch: int, wanted: list[str]) -> None:
    torch.set_num_threads(1)
    launched: list[tuple[str, Any]] = []
    use(arch, lambda name, compiled: launched.append((name, compiled)))
    kept: dict[int, Any] = {}  # by their ids, which are theirs as long as they are kept
    for call_name, call in calls(wanted):
        launched.clear()
        try:
            call()
            assert launched, "nothing was launched"
        except Exception as error:
            print(json.dumps({"call": call_name, "failed": f"{type(error).__name__}: {error}"}), flush=True)
        for name, compiled in launched:
            if id(compiled) not in kept:
                kept[id(compiled)] = compiled
                print(json.dumps({"call": call_name, "kernel": name, **usage(compiled)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
