"""Compiles Triton kernels for a GPU that need not be there, and says what each program takes of it.

    python -m tests.helpers.compiling 89 ["words of calls" ...]

The kernels' own wrappers are called with CPU tensors of the shapes of real models. A driver stands in for the GPU's,
and instead of launching, Triton's compiler and ptxas make what would be launched. It prints a JSON object a line: of
each binary, and of each call that failed. It is a process of its own, because
Triton decides when a kernel is decorated whether it is interpreted. A binary takes a second or more: what is in the
tables below differs in its code, and not only in its numbers.
"""

import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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
from offload_runtime_kernels.expert_buffers import (
    BufferTables,
    CpuShare,
    fetch_experts_triton,
    place_experts_triton,
    release_experts_triton,
)
from offload_runtime_kernels.experts import ExpertShape, StoredMatrices, row_bytes
from offload_runtime_kernels.experts_decoded import decoding_bytes, expert_rows_decoded
from offload_runtime_kernels.experts_triton import combine_experts_triton, expert_rows_triton
from offload_runtime_kernels.gguf_blocks import FORMATS
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.host_rows import take_host_rows_triton
from offload_runtime_kernels.kv_blocks import KVBlocks
from offload_runtime_kernels.linear import default_tile, linear_triton
from offload_runtime_kernels.low_bit_copy import COPY, quantise_triton
from offload_runtime_kernels.low_bit_encode import CodedRows, rest_words_triton
from offload_runtime_kernels.low_bit_rest import decode_rest_triton, rest_bytes
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


def ints(*shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype, batch: int = 1) -> KVBlocks:
    return KVBlocks(torch.empty(batch, 5, 2, num_kv_heads, 256, head_dim, dtype=dtype))


def query_rows(count: int, **others: Any) -> QueryRows:
    return QueryRows(ints(1, count), ints(1), 1200, **others)


def linear_calls() -> Iterator[tuple[str, Call]]:
    """The largest tile with a gate, which takes the most shared memory."""
    for m in (22016, 4096):
        x, weight, out = (torch.empty(*shape, dtype=BF16) for shape in ((128, 4096), (m, 4096), (128, m)))
        tile = default_tile(128, m, BF16)
        yield f"linear 128 {m}", partial(linear_triton, x, weight, out, tile=tile, gated="silu")


def route(
    tokens: int, shape: ExpertShape, choices: int, kind: str | ScaledFormat,
    run: Callable[..., None] = expert_rows_triton,
) -> None:  # fmt: skip
    """Experts without biases whose weights are one matrix, of which nothing is read."""
    chosen, y = ints(tokens, choices, dtype=torch.int64), torch.empty(tokens, choices, shape.hidden, dtype=BF16)
    gate_up, down = (
        StoredMatrices(ints(1, rows * row_bytes(kind, columns), dtype=torch.uint8), kind, rows, columns)
        for rows, columns in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    )
    run(
        torch.empty(tokens, shape.hidden, dtype=BF16), chosen, gate_up, down, shape, buffers=ints(shape.num_experts),
        gate_up_bias=None, down_bias=None, out=y,
    )  # fmt: skip
    combine_experts_triton(y, torch.empty(tokens, choices))


def expert_calls() -> Iterator[tuple[str, Call]]:
    """Every tile, at the shapes of gpt-oss-120b and Qwen3-30B-A3B."""
    gpt_oss, qwen3 = ExpertShape(128, 2880, 2880, limit=7.0), ExpertShape(128, 2048, 768)
    for tokens in (1, 16, 64, 1024, 8192):
        yield f"experts {tokens} BF16", partial(route, tokens, gpt_oss, 4, "BF16")
    yield "experts 8192 MXFP4", partial(route, 8192, gpt_oss, 4, "MXFP4")
    yield "experts 128 Q4_K", partial(route, 128, qwen3, 8, "Q4_K")
    numbers = (
        ScaledFormat("FP8", 1, 128, FP32),
        ScaledFormat("uint4", 1, 128, BF16, 8),
        ScaledFormat("E2M1", 1, 16, FP32),
    )
    for how, tokens in (*product(numbers, (128,)), (numbers[0], 8192)):
        yield f"experts {tokens} {how.number}", partial(route, tokens, qwen3, 8, how)
    rows = ints(4, gpt_oss.hidden // 2)
    yield "experts of the host", partial(take_host_rows_triton, ints(1), ints(1), ints(4), rows, rows)
    longs = partial(ints, dtype=torch.int64)
    tables = BufferTables(
        ints(36, 128), ints(999), longs(999), ints(128), ints(128), ints(2, 129), longs(1), ints(36, 2, 129),
        longs(36, 1), ints(1), longs(5), longs(5),
    )  # fmt: skip
    floats = torch.zeros(129)
    share = CpuShare(floats, floats[:1], ints(2), ints(128), longs(129))
    sizes = {"experts": 128, "room": 999, "unit_bytes": 4096}
    for cpu, is_first in ((share, True), (None, True), (None, False)):
        place = partial(place_experts_triton, longs(1, 4), tables, 0, cpu=cpu, is_first=is_first, **sizes)
        yield f"buffers of experts {is_first} {cpu is None}", place
    yield "experts that arrived", partial(release_experts_triton, tables, 0)
    units = ints(999, 4096, dtype=torch.uint8)
    yield "experts on demand", partial(fetch_experts_triton, tables.fetched, units, units)
    for shape, kind in ((gpt_oss, "MXFP4"), (qwen3, "Q4_K"), *((qwen3, how) for how in numbers)):
        scratch = ints(decoding_bytes(shape, 8192, 8, BF16.itemsize), dtype=torch.uint8)
        decoded, name = partial(expert_rows_decoded, scratch=scratch), getattr(kind, "number", kind)
        yield f"experts 8192 decoded {name}", partial(route, 8192, shape, 8, kind, decoded)


def router_calls() -> Iterator[tuple[str, Call]]:
    """Of many experts a softmax, of fewer the chosen ones', and scores that are corrected."""
    options: dict[str, Any] = {"correction": None, "normed": True, "scale": 1.0, "dtype": BF16}
    for experts, chosen, how in (
        (512, 10, {"scores": "softmax"}), (128, 4, {"scores": "softmax of the chosen"}),
        (128, 8, {"scores": "sigmoid", "correction": torch.empty(128), "dtype": None}),
    ):  # fmt: skip
        logits = torch.empty(4, experts, dtype=BF16)
        for positions in (None, ints(4)):
            named = {**options, **how, "positions": positions}
            yield f"router {experts} {positions is None}", partial(choose_experts_triton, logits, chosen, **named)


def numbers_of(form: ScaledFormat, rows: int, columns: int) -> ScaledRows:
    (down, across), (_, zero_bytes) = form.scales(rows, columns), form.scale_row_bytes(columns)
    numbers, zeros = ints(rows, form.row_bytes(columns), dtype=torch.uint8), ints(down, zero_bytes, dtype=torch.uint8)
    return ScaledRows(numbers, torch.empty(down, across, dtype=form.scale), zeros, ints(columns))


def encoding_calls() -> Iterator[tuple[str, Call]]:
    """Products of few rows with encoded matrices that are cut as large ones are, and one that is decoded."""
    row, large, form = CodedRow.of(4096), 14336, FORMATS["Q4_K"]
    assert row is not None
    x, out, coded = torch.empty(8, 4096, dtype=BF16), torch.empty(8, large, dtype=BF16), row.nbytes
    stored = ints(large, coded, dtype=torch.uint8)
    yield "12-bit", partial(coded_linear_triton, x, stored, row, out, bias=None, add=False)
    blocks = ints(large, form.row_bytes(4096), dtype=torch.uint8)
    behind = ints(0, FORMATS["Q6_K"].row_bytes(4096), dtype=torch.uint8), FORMATS["Q6_K"]
    for name, rest in (("gguf_linear", None), ("gguf_linear of two", behind)):
        yield name, partial(gguf_linear_triton, x, blocks, form, out, behind=rest, bias=None, add=False)
    squares = ScaledFormat("FP8", 128, 128, FP32)
    of_rows, of_groups = ScaledFormat("FP8", 1, 4096, BF16), ScaledFormat("uint4", 1, 128, FP16, 1, zeros=True)
    for how in (of_groups, of_rows, squares):
        numbers = numbers_of(how, large, 4096)
        yield f"scaled_linear {how.number}", partial(scaled_linear_triton, x, numbers, how, out, bias=None, add=False)
    copy = numbers_of(COPY, large, 4096)
    yield "scaled_linear copy", partial(scaled_linear_triton, x, copy, COPY, out, bias=None, add=False)
    decoded = torch.empty(4096, 4096, dtype=FP32)
    yield "decode FP8", partial(decode_scaled_triton, numbers_of(squares, 4096, 4096), squares, 0, decoded)
    yield "decode copy", partial(decode_scaled_triton, copy, COPY, 0, torch.empty(4096, 4096, dtype=BF16))
    rest = ints(rest_bytes(large, 4096), dtype=torch.uint8)
    out, scales = torch.empty(large, 4096, dtype=BF16), numbers_of(squares, large, 4096).scales
    for kind, own in (("BF16", ()), ("Q8_0", ()), ("FP8", (scales, squares))):
        yield f"decode rest {kind}", partial(decode_rest_triton, rest, copy, 0, out, kind, *own)
    values, alone = torch.empty(large, 4096, dtype=BF16), ScaledFormat("FP8", 1, 32, FP16)
    yield "make copy", partial(quantise_triton, values, copy, torch.empty(4096))
    q8, fp8 = ints(large, 4096, dtype=torch.int8), ints(large, 4096, dtype=torch.uint8)
    of_q8 = torch.empty(large, 128, dtype=FP16)
    for kind, given, own, form in (
        ("BF16", values.view(torch.int16), of_q8, alone), ("Q8_0", q8, of_q8, alone), ("FP8", fp8, scales, squares),
    ):  # fmt: skip
        yield f"code rest {kind}", partial(rest_words_triton, CodedRows(kind, given, copy, own, 0, form))


def attention_calls() -> Iterator[tuple[str, Call]]:
    """Prompts, and a tree of whose two splits the second is each query's own; several sources of a prompt."""
    for model, (num_heads, num_kv_heads, head_dim) in HEADS.items():
        # Gemma's caps, and sinks as gpt-oss has them.
        caps = (50.0, torch.empty(num_heads, dtype=BF16)) if head_dim >= 256 else ()
        params, kv = AttentionParams(0.1, 100 if head_dim == 256 else None, *caps), caches(num_kv_heads, head_dim, BF16)
        q, rows = torch.empty(1, 512, num_heads, head_dim, dtype=BF16), query_rows(512)
        yield f"prefill {model}", partial(attention_triton, q, kv, rows, params, prefill=True)
        if head_dim >= 128:
            sources, some = [KeySource(kv, range(4), 1000), KeySource(kv, range(1, 3))], q[:, :64].contiguous()
            call = partial(attend_sources_triton, some, sources, query_rows(64), AttentionParams(0.1))
            yield f"sources {model}", partial(call, enough_programs=1)
        if model == "llama-3-8b":
            tree = query_rows(24, committed=ints(1), ancestors=ints(1, 24, 24))
            yield "tree", partial(attention_triton, q[:, :24].contiguous(), kv, tree, params, prefill=False)


def calls(wanted: list[str]) -> Iterator[tuple[str, Call]]:
    """What is compiled: everything, or what has all the words of one of `wanted` in its name."""
    every = (linear_calls, encoding_calls, expert_calls, router_calls, attention_calls)
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
