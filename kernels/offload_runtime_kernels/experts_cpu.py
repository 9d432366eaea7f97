"""Routed experts that stay in host memory, computed there by C++ with the bits of `expert_rows_reference`.

`experts_cpu.cpp` is compiled when it is first wanted, for one dtype, some encodings and the machine's instructions, and
kept in a folder of the caller's. A library that does not give the bits of the reference is not used.

Weights are read as they are stored, row after row. A thread multiplies 64 rows at once, or 32 by AVX2, column by column
and decoded in registers, so that an output is still one chain over ascending columns; decoding them to a buffer in the
nearest cache first took half as long again. An instruction that waits for the one before it takes four cycles, in which
eight others could begin. On one core of a Xeon with AVX-512 at 3 GHz, which memory gives 18 GB/s, experts in MXFP4 come
at 11.6 GB/s for one row and 6.8 for four, in Q4_K at 7.3 and 4.9.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from offload_runtime_kernels.experts import (
    ExpertShape,
    StoredMatrices,
    expert_rows_reference,
    gates_first,
    row_bytes,
)
from offload_runtime_kernels.gguf_blocks import DTYPE_KINDS, FORMATS, KIND_DTYPES, pack_rows
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRow, rows_apart

Instructions = Literal["native", "avx2", "plain"]

Stored = str | ScaledFormat  # an encoding of `StoredMatrices`
ENCODINGS = (*DTYPE_KINDS.values(), "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
_SOURCE = Path(__file__).with_name("experts_cpu.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-w")
_TARGETS: dict[Instructions, tuple[str, ...]] = {
    "native": ("-march=native",), "avx2": ("-mavx2", "-mfma", "-mf16c"), "plain": (),
}  # fmt: skip
_DIGEST_BYTES = 32


class NoCpuShare(Exception):
    """Why the CPU computes no experts here, for the user to read."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the CPU takes no share of the experts: {reason}")


class HostMatrix(NamedTuple):
    """Where a matrix of every expert lies: from which byte of the expert's block on, and in which encoding, by the
    names of `StoredMatrices`."""

    encoding: Stored
    offset: int


class Work(NamedTuple):
    """What was computed: bytes of weights, and seconds."""

    nbytes: int
    seconds: float


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("offset", "row_bytes", "columns", "blocks")),
        *((name, ctypes.c_int64) for name in ("columns_of_scale", "scales_at", "zeros_at")),
        ("zero", ctypes.c_int32), ("encoding", ctypes.c_int32),
    )  # fmt: skip


class _Experts(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_int64), ("inner", ctypes.c_int64), ("gate_up", _Matrix), ("down", _Matrix),
        ("gate_up_bias", ctypes.c_void_p), ("down_bias", ctypes.c_void_p), ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float), ("limited", ctypes.c_int32),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        ("experts", _Experts), ("num_chosen", ctypes.c_int64), ("first", ctypes.c_void_p), ("step", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
    )  # fmt: skip


class _Mailbox(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("report", "x", "y", "ready", "layers", "total")),
        ("seen", ctypes.c_int32),
    )  # fmt: skip


# --- the library


def load_experts_library(
    folder: Path, dtype: torch.dtype, encodings: Iterable[Stored], instructions: Instructions = "native"
) -> ExpertsLibrary:
    """Compile the library, unless it is in `folder`, and compare its bits with those of the reference.

    Args:
        folder: Where libraries are kept; made if it is not there.
        dtype: Of rows and results.
        encodings: Of all weights, by the names of `StoredMatrices`.
        instructions: What it is compiled for; all but "native" is for tests.

    Raises:
        NoCpuShare: There is no compiler or it fails, an encoding is unknown, bits differ, or this is not Linux.
    """
    if sys.platform != "linux":
        raise NoCpuShare(f"its threads are pinned to cores as Linux does it, and this is {sys.platform}")
    wanted = {_name(one): one for one in encodings}
    names = sorted(wanted)
    if unknown := [name for name in names if wanted[name] == name and name not in ENCODINGS]:
        raise NoCpuShare(f"it decodes {', '.join(ENCODINGS)}, but not {', '.join(unknown)}")
    compiler, target = _compiler(), _TARGETS[instructions]
    formats = " ".join(f"X({name})" for name in names)
    command = [*compiler, *_FLAGS, *target, f"-DRUN={DTYPE_KINDS[dtype]}", f"-DFORMATS(X)={formats}"]
    # What the compiler says of itself and of the instructions that it compiles for.
    machine = _output([*compiler, *target, "-dM", "-E", "-x", "c++", os.devnull])
    key = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), " ".join(command).encode(), machine])).hexdigest()
    path = folder / f"experts-{key[:_DIGEST_BYTES]}.so"
    try:
        if not _is_whole(path):
            folder.mkdir(parents=True, exist_ok=True)
            _compile(command, path)
        library = ExpertsLibrary(ctypes.CDLL(str(path)), dtype, names)
    except OSError as error:
        raise NoCpuShare(f"{path} cannot be written or loaded ({error})") from error
    for name, encoding in wanted.items():
        if not _has_right_bits(library, encoding):
            raise NoCpuShare(f"{compiler[0]} makes code of {_SOURCE.name} that gets other bits of {name}")
    return library


def _name(encoding: Stored) -> str:
    """Return what code for an encoding is called."""
    return f"{encoding.number}_{DTYPE_KINDS[encoding.scale]}" if isinstance(encoding, ScaledFormat) else encoding


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    looked_for = named[0] if named else ", ".join(_COMPILERS)
    raise NoCpuShare(f"no C++ compiler found ({looked_for}): install g++, or name one in the variable CXX")


def _output(command: Sequence[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise NoCpuShare(f"the compiler {command[0]} fails: {said or f'exit status {done.returncode}'}")
    return done.stdout


def _compile(command: list[str], path: Path) -> None:
    """Write the library and, behind it, its SHA-256: to load a damaged one may kill the process."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as partial:
        made = Path(partial) / path.name
        _output([*command, str(_SOURCE), "-o", str(made)])
        with made.open("ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


class ExpertsLibrary:
    """Compiled code for rows of one dtype and weights of some encodings."""

    def __init__(self, code: Any, dtype: torch.dtype, encodings: Sequence[str]) -> None:
        self.code, self.dtype, self.encodings = code, dtype, tuple(encodings)
        address, integer = ctypes.c_void_p, ctypes.c_int64
        computed = [address] * 3 + [integer, address, integer, address, address, integer, address]
        for name, result, arguments in (
            ("instructions", ctypes.c_char_p, []), ("start", address, [ctypes.c_int, address]),
            ("stop", None, [address]), ("compute", ctypes.c_double, computed),
            ("add_mailbox", None, [address] * 2), ("wake", None, [address]),
        ):  # fmt: skip
            function = getattr(code, f"experts_{name}")
            function.restype, function.argtypes = result, arguments

    @property
    def instructions(self) -> str:
        """What it makes use of: "AVX-512", "AVX2" or "plain C++"."""
        return str(self.code.experts_instructions().decode())


def random_rows(encoding: Stored, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Weights about as large as those of models, uint8 [rows, row_bytes] on the generator's device, as
    `StoredMatrices` has them."""
    device = generator.device
    if isinstance(encoding, ScaledFormat):
        out = torch.zeros(rows, row_bytes(encoding, columns), dtype=torch.uint8, device=device)
        stored = rows_apart(out, encoding, columns)
        for part in (stored.numbers, stored.zeros):
            part.copy_(torch.randint(256, part.shape, generator=generator, dtype=torch.uint8, device=device))
        if encoding.number == "FP8":
            stored.numbers[stored.numbers & 0x7F == 0x7F] = 0  # are none
        size = {"FP8": 512, "E2M1": 4, "uint4": 8}.get(encoding.number, 128)
        scales = torch.randn(stored.scales.shape, generator=generator, device=device)
        stored.scales.copy_(scales / (columns**0.5 * size))
        return out
    if encoding not in FORMATS:
        weights = torch.randn(rows, columns, generator=generator, device=device) / columns**0.5
        return weights.to(KIND_DTYPES[encoding]).view(torch.uint8)
    form = FORMATS[encoding]
    sizes = rows, columns // form.weights, form.nbytes
    blocks = torch.randint(256, sizes, generator=generator, dtype=torch.uint8, device=device)
    if form.e2m1:
        blocks[..., 0] = blocks[..., 0] % 8 + 114
    for at in form.file_halves:
        scales = torch.randn(sizes[:2], generator=generator, device=device) / (columns**0.5 * 64)
        blocks[..., at : at + 2] = scales.half()[..., None].view(torch.uint8)
    out = torch.empty(rows, form.row_bytes(columns), dtype=torch.uint8, device=device)
    pack_rows(blocks.flatten(1), form, columns, out)
    return out


def _has_right_bits(library: ExpertsLibrary, encoding: Stored) -> bool:
    """Whether three random experts, of seven rows, two and one, give what the reference gives."""
    make, width = torch.Generator().manual_seed(0), 256
    shape = ExpertShape(num_experts=3, hidden=width, inner=width)
    gate_up = random_rows(encoding, 6 * width, width, make).view(3, -1)
    pool = torch.cat([gate_up, random_rows(encoding, 3 * width, width, make).view(3, -1)], dim=1)
    x = torch.randn(10, width, generator=make).to(library.dtype)
    choices = torch.tensor([0, 1, 0, 0, 2, 0, 0, 1, 0, 0])[:, None]
    found, expected = torch.zeros(2, 10, 1, width, dtype=library.dtype)
    size = gate_up.shape[1]
    layer = HostExperts(library, shape, HostMatrix(encoding, 0), HostMatrix(encoding, size))
    with ExpertsCpu(library, threads=1) as cpu:
        cpu.compute(layer, x, choices, found, [(number, pool[number].data_ptr()) for number in range(3)])
    first = StoredMatrices(pool[:, :size], encoding, 2 * width, width)
    second = StoredMatrices(pool[:, size:], encoding, width, width)
    expert_rows_reference(
        x, choices, first, second, shape, buffers=None, gate_up_bias=None, down_bias=None, out=expected
    )  # fmt: skip
    return torch.equal(found, expected)


# --- experts and threads


class HostExperts:
    """A layer's experts, each in a block of host memory.

    Args:
        library: What computes them.
        shape: Of these.
        gate_up: [2I, H] of an expert, gates first.
        down: [H, I].
        gate_up_bias: [E, 2I] by the expert's number, gates and ups in turn, in host memory, or None.
        down_bias: [E, H] or None.
    """

    def __init__(
        self, library: ExpertsLibrary, shape: ExpertShape, gate_up: HostMatrix, down: HostMatrix, *,
        gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.library, self.shape = library, shape
        first, second = (
            _described(where, columns, library.encodings.index(_name(where.encoding)))
            for where, columns in ((gate_up, shape.hidden), (down, shape.inner))
        )
        self.expert_bytes = 2 * shape.inner * first.row_bytes + shape.hidden * second.row_bytes
        biases = gate_up_bias if gate_up_bias is None else gates_first(gate_up_bias), down_bias
        self._biases = [b if b is None else b.float().contiguous() for b in biases]
        self.described = _Experts(
            shape.hidden, shape.inner, first, second, *(b if b is None else b.data_ptr() for b in self._biases),
            shape.limit or 0.0, shape.alpha, shape.limit is not None,
        )  # fmt: skip


def _described(where: HostMatrix, columns: int, code: int) -> _Matrix:
    how = where.encoding
    found = _Matrix(where.offset, row_bytes(how, columns), columns, encoding=code)
    if isinstance(how, ScaledFormat):
        row = ScaledRow.of(how, columns)
        assert row is not None
        found.columns_of_scale, found.scales_at = how.columns, row.numbers_bytes
        found.zeros_at = row.zeros_at if how.zeros else 0
        found.zero = how.zero + (12 if how.number == "E2M1" else 128 if how.number == "int8" and not how.zeros else 0)
    elif how in FORMATS:
        found.blocks = FORMATS[how].num_blocks(columns)
    return found


class Mailbox:
    """Memory through which a device asks the CPU to compute experts, as `expert_buffers.CpuShare` says, and is given
    the results; all of it is on the host.

    Args:
        num_layers: Of the pool's tables.
        report: Of the share.
        x: [N, H] in a library's dtype: rows of the layer that is asked for.
        y: [N k, H] likewise, by row and choice: what comes of those that are asked for.
        ready: [1] int32: becomes the ticket when it is there, and `host_rows.ENDED` when threads end.
    """

    def __init__(
        self, num_layers: int, report: torch.Tensor, x: torch.Tensor, y: torch.Tensor, ready: torch.Tensor
    ) -> None:
        assert x.is_contiguous() and y.is_contiguous() and x.shape[1] == y.shape[1] and x.dtype == y.dtype
        self._layers, total = (_Layer * num_layers)(), torch.zeros(2, dtype=torch.int64)
        self._total, self._held = total.numpy(), list[Any]([report, x, y, ready, total])
        places = (one.data_ptr() for one in (report, x, y, ready))
        self.described = _Mailbox(*places, ctypes.addressof(self._layers), total.data_ptr())

    def add(self, row: int, experts: HostExperts, num_chosen: int, host: torch.Tensor) -> None:
        """Let a layer be asked for, which is this row of the tables, with its experts in uint8 [E, bytes of one]."""
        self._held += [experts, host]
        where = host.data_ptr(), host.stride(0), experts.expert_bytes
        self._layers[row] = _Layer(experts.described, num_chosen, *where)

    @property
    def total(self) -> Work:
        """Return all that was computed."""
        return Work(int(self._total[0]), 1e-9 * int(self._total[1]))


def physical_first(cores: Sequence[int], folder: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return logical cores in ascending order, but behind all others those that share a physical one with an earlier
    one, as `folder` says, where Linux describes them; what it does not describe shares none."""

    def earlier(core: int) -> int:
        try:
            listed = (folder / f"cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            return 0
        siblings = set[int]()
        for part in listed.strip().split(","):
            first, _, last = part.partition("-")
            siblings.update(range(int(first), int(last or first) + 1))
        return sum(one < core for one in siblings.intersection(cores))

    return sorted(cores, key=lambda core: (earlier(core), core))


class ExpertsCpu:
    """Threads that compute experts, each pinned to a core, and one that looks at what devices ask for: they stay awake
    for five milliseconds behind a layer; then those sleep, and this one looks now and then. One layer at a time. In a
    process that was forked there are none, and it may not be used there.

    Args:
        library: What they run.
        threads: How many, on cores that this process may run on, physical ones of their own first.

    Raises:
        NoCpuShare: There are fewer cores than threads, or the system refuses threads.
    """

    def __init__(self, library: ExpertsLibrary, threads: int) -> None:
        cores = physical_first([*os.sched_getaffinity(0)])
        if len(cores) < threads:
            raise NoCpuShare(f"{threads} threads need a core each, of the {len(cores)} that this process may use")
        self.library = library
        self._threads = library.code.experts_start(threads, (ctypes.c_int32 * threads)(*cores[:threads]))
        if not self._threads:
            raise NoCpuShare(f"the system refuses {threads} threads")
        self._mailboxes = list[Mailbox]()  # whose memory stays as long as threads may use it
        self._stop = weakref.finalize(self, _stop, library.code, self._threads, self._mailboxes, os.getpid())

    def compute(
        self, layer: HostExperts, x: torch.Tensor, choices: torch.Tensor, out: torch.Tensor,
        experts: Sequence[tuple[int, int]],
    ) -> Work:  # fmt: skip
        """Compute some experts of a layer, before devices ask for any; other threads of Python run meanwhile.

        Args:
            layer: Their layer, of the same library.
            x: [N, H] in its dtype, contiguous and on the host, as all of these.
            choices: [N, k] int64: the experts of every row, none of them twice.
            out: [N, k, H] in the dtype of x: results of the experts that are wanted are written, and no others.
            experts: The number of each that is wanted, and the address of its block.
        """
        (tokens, num_chosen), count = choices.shape, len(experts)
        assert layer.library is self.library and not self._mailboxes
        assert x.shape == (tokens, layer.shape.hidden) and out.shape == (tokens, num_chosen, layer.shape.hidden)
        assert x.dtype == out.dtype == self.library.dtype and choices.dtype == torch.int64
        assert x.is_cpu and choices.is_cpu and out.is_cpu
        assert x.is_contiguous() and choices.is_contiguous() and out.is_contiguous()
        wanted = (ctypes.c_int64 * count)(*(number for number, _ in experts))
        blocks = (ctypes.c_void_p * count)(*(address for _, address in experts))
        seconds = self.library.code.experts_compute(
            self._threads, ctypes.byref(layer.described), x.data_ptr(), tokens, choices.data_ptr(), num_chosen, wanted,
            blocks, count, out.data_ptr(),
        )  # fmt: skip
        if seconds < 0:
            raise MemoryError(f"rows of {count} experts find no memory")
        return Work(count * layer.expert_bytes, seconds)

    def serve(self, mailbox: Mailbox) -> None:
        """Compute what a device asks for, from now on."""
        self._mailboxes.append(mailbox)
        self.library.code.experts_add_mailbox(self._threads, ctypes.byref(mailbox.described))

    def wake(self) -> None:
        """Look more often at what devices ask for, which they may soon do: without, they wait up to five
        milliseconds."""
        if self._stop.alive:
            self.library.code.experts_wake(self._threads)

    def close(self) -> None:
        """End the threads, which first finish what they compute."""
        self._stop()

    def __enter__(self) -> ExpertsCpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(code: Any, threads: int, mailboxes: list[Mailbox], process: int) -> None:
    if os.getpid() == process:  # a fork has none of them
        code.experts_stop(threads)
    mailboxes.clear()
