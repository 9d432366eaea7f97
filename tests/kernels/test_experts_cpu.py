"""Experts on a CPU: the reference's bits of every encoding, by all instructions; and what keeps the CPU from it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from offload_runtime_kernels import experts_cpu as ops
from offload_runtime_kernels.experts import ExpertShape, StoredMatrices, expert_rows
from offload_runtime_kernels.gguf_blocks import FORMATS
from offload_runtime_kernels.host_rows import ENDED

from tests.helpers.kernel_conditions import NUMBERS, experts_library

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = Path("/proc/cpuinfo").read_text()
CORES = len(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture
def simple() -> ops.ExpertsLibrary:
    """One of two encodings, which is compiled fast."""
    return experts_library(FP32, ["F32", "F16"])


@dataclass(frozen=True)
class Problem:
    """Sixteen rows, with two of six experts each."""

    shape: ExpertShape
    x: torch.Tensor
    choices: torch.Tensor
    gate_up: StoredMatrices
    down: StoredMatrices
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @classmethod
    def random(
        cls, encoding: ops.Stored, dtype: torch.dtype, hidden: int, inner: int, *, limited: bool = False
    ) -> Problem:
        """With a limit there are biases too."""
        make, count = torch.Generator().manual_seed(hidden), 6
        shape = ExpertShape(count, hidden, inner, limit=2.0 if limited else None)
        first = ops.random_rows(encoding, count * 2 * inner, hidden, make).view(count, -1)
        second = ops.random_rows(encoding, count * hidden, inner, make).view(count, -1)
        gap, rest = (torch.zeros(count, -size % 16, dtype=torch.uint8) for size in (first.shape[1], second.shape[1]))
        pool = torch.cat([first, gap, second, rest], dim=1)
        end, start = first.shape[1], first.shape[1] + gap.shape[1]
        choices = torch.rand(16, count, generator=make).topk(2, dim=1).indices.sort(dim=1).values
        biases = [torch.randn(count, width, generator=make).to(dtype) for width in (2 * inner, hidden) if limited]
        return cls(
            shape, (torch.randn(16, hidden, generator=make) * 2).to(dtype), choices,
            StoredMatrices(pool[:, :end], encoding, 2 * inner, hidden),
            StoredMatrices(pool[:, start : start + second.shape[1]], encoding, hidden, inner), *biases,
        )  # fmt: skip

    @property
    def expected(self) -> torch.Tensor:
        """[16, 2, H]: what the reference gives."""
        out = self.x.new_empty(16, 2, self.shape.hidden)
        expert_rows(
            self.x, self.choices, self.gate_up, self.down, self.shape, gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias, out=out,
        )  # fmt: skip
        return out

    def layer(self, code: ops.ExpertsLibrary) -> ops.HostExperts:
        """The experts, for the CPU."""
        first, last = (ops.HostMatrix(m.encoding, m.data.storage_offset()) for m in (self.gate_up, self.down))
        return ops.HostExperts(code, self.shape, first, last, gate_up_bias=self.gate_up_bias, down_bias=self.down_bias)

    def blocks(self, *wanted: int) -> list[tuple[int, int]]:
        """Where experts lie."""
        return [(number, self.gate_up.data[number].data_ptr()) for number in wanted]

    def solved(self, cpu: ops.ExpertsCpu, rows: int = 16) -> torch.Tensor:
        """What threads give of the first rows."""
        out = self.x.new_full((rows, 2, self.shape.hidden), torch.nan)
        cpu.compute(self.layer(cpu.library), self.x[:rows], self.choices[:rows], out, self.blocks(*range(6)))
        return out


SINGLE = ops.ENCODINGS[::2]  # MXFP4 among them


@pytest.mark.slow  # seven encodings take half a minute to compile
@pytest.mark.parametrize(("instructions", "dtype", "encodings"), [
    ("native", FP32, SINGLE), ("native", FP16, ops.ENCODINGS[1::2]), ("native", BF16, NUMBERS),
    ("plain", BF16, ("F32", "MXFP4", NUMBERS[-1])), ("avx2", FP16, ("Q4_0", NUMBERS[3])),
])  # fmt: skip
def test_bits_are_expected(
    instructions: ops.Instructions, dtype: torch.dtype, encodings: tuple[ops.Stored, ...]
) -> None:
    if instructions == "avx2" and "avx2" not in CPU:
        pytest.skip("this processor has no avx2")
    with ops.ExpertsCpu(experts_library(dtype, encodings, instructions), threads=1) as cpu:
        for encoding, limited in product(encodings, (False, True)):
            unit = FORMATS[encoding].weights if encoding in FORMATS else 1
            sizes = {1: (44, 21), 32: (96, 160), 256: (256, 256)}[unit] if isinstance(encoding, str) else (200, 96)
            problem = Problem.random(encoding, dtype, *sizes, limited=limited)
            expected = problem.expected
            for rows in range(1, 17):
                assert torch.equal(problem.solved(cpu, rows), expected[:rows]), (encoding, limited, rows)


@pytest.mark.slow
def test_scales_and_rows_of_all_sizes_have_the_same_bits() -> None:
    problem = replace(Problem.random("MXFP4", FP32, 96, 160, limited=True), gate_up_bias=None, down_bias=None)
    draw = torch.Generator().manual_seed(0)
    for matrices in (problem.gate_up, problem.down):
        blocks = FORMATS["MXFP4"].num_blocks(matrices.columns)
        rows = matrices.data.view(6, matrices.rows, -1)
        numbers, scales = rows[..., : blocks * 16], rows[..., blocks * 16 : blocks * 17]
        numbers[1] = scales[1, :, 0] = 0
        scales[2] = torch.randint(60, 150, scales[2].shape, generator=draw, dtype=torch.uint8)
        scales[3] = torch.randint(94, 135, scales[3].shape, generator=draw, dtype=torch.uint8)
        scales[4] = torch.randint(124, 135, scales[4].shape, generator=draw, dtype=torch.uint8)
    problem.x[0] *= 2.0**-121  # sums of scaled weights are normal numbers, and others are none
    problem.x[1, 7] = 1e30
    problem.choices[:2] = torch.tensor([[1, 3], [2, 4]])
    expected = problem.expected
    assert expected.isfinite().all()
    with ops.ExpertsCpu(experts_library(FP32, SINGLE), threads=1) as cpu:
        for rows_together in (1, 2, 16):
            assert torch.equal(problem.solved(cpu, rows_together), expected[:rows_together])


def test_matrices_may_be_stored_in_different_ways(simple: ops.ExpertsLibrary) -> None:
    one, other = (Problem.random(encoding, FP32, 40, 24) for encoding in ("F32", "F16"))
    mixed = Problem(one.shape, one.x, one.choices, one.gate_up, other.down)
    size = one.gate_up.data.shape[1]
    blocks = torch.cat([one.gate_up.data, other.down.data], dim=1)
    layer = ops.HostExperts(simple, one.shape, ops.HostMatrix("F32", 0), ops.HostMatrix("F16", size))
    out = torch.empty(16, 2, 40)
    with ops.ExpertsCpu(simple, threads=1) as cpu:
        addresses = [(number, blocks[number].data_ptr()) for number in range(6)]
        work = cpu.compute(layer, one.x, one.choices, out, addresses)
    assert torch.equal(out, mixed.expected)
    assert work.nbytes == blocks.nbytes and work.seconds > 0


def test_rows_of_other_experts_stay(simple: ops.ExpertsLibrary) -> None:
    problem = Problem.random("F32", FP32, 40, 24)
    out, works = torch.full((16, 2, 40), torch.nan), list[ops.Work]()
    with ops.ExpertsCpu(simple, threads=1) as cpu:
        layer = problem.layer(simple)
        for wanted in ([], [4], [5, 1]):
            works.append(cpu.compute(layer, problem.x, problem.choices, out, problem.blocks(*wanted)))
    assert [one.nbytes for one in works] == [count * layer.expert_bytes for count in range(3)]
    written = torch.isin(problem.choices, torch.tensor([1, 4, 5]))
    assert torch.equal(out[written], problem.expected[written]) and out[~written].isnan().all()


class Device:
    """What asks threads as a device does."""

    def __init__(self, cpu: ops.ExpertsCpu, problem: Problem, row: int) -> None:
        self.cpu, self.problem, self.row, self.ticket = cpu, problem, row, 0
        (rows, chosen), width = problem.choices.shape, problem.shape.hidden
        self.report = torch.zeros(1 + rows * chosen, dtype=torch.int64)
        self.ready, self.y = torch.zeros(1, dtype=torch.int32), torch.empty(rows * chosen, width)
        self.mailbox = ops.Mailbox(3, self.report, problem.x, self.y, self.ready)
        self.mailbox.add(row, problem.layer(cpu.library), chosen, problem.gate_up.data)
        cpu.serve(self.mailbox)

    def ask(self, wanted: tuple[int, ...]) -> None:
        self.ticket += 1
        self.y.fill_(torch.nan)
        self.cpu.wake()
        words = [self.ticket << 32 | (one in wanted) << 31 | one for one in self.problem.choices.flatten().tolist()]
        self.report[1:] = torch.tensor(words)
        self.report[0] = self.ticket << 32 | self.row << 16 | len(self.problem.choices)

    def answer(self) -> torch.Tensor:
        while self.ready.item() != self.ticket:
            pass
        return self.y.view(*self.problem.choices.shape, -1)


def test_devices_are_served_side_by_side(simple: ops.ExpertsLibrary) -> None:
    problems = [Problem.random("F32", FP32, hidden, 120) for hidden in (200, 52)]
    with ops.ExpertsCpu(simple, threads=1) as cpu:
        devices = [Device(cpu, problem, row) for row, problem in enumerate(problems)]
        for turn in range(10):
            wanted = [(turn % 6, 5), (1, 4)]
            for device, some in zip(devices, wanted, strict=True):
                device.ask(some)
            for device, some in zip(devices, wanted, strict=True):
                found, expected = device.answer(), device.problem.expected
                written = torch.isin(device.problem.choices, torch.tensor(some))
                assert torch.equal(found[written], expected[written]) and found[~written].isnan().all()
    assert all(device.ready.item() == ENDED for device in devices)
    work = devices[1].mailbox.total
    assert work.nbytes == 20 * problems[1].layer(simple).expert_bytes and work.seconds > 0


def test_no_thread_is_left_behind(simple: ops.ExpertsLibrary) -> None:
    problem = Problem.random("F32", FP32, 40, 24)
    before = set(os.listdir("/proc/self/task"))
    cpu = ops.ExpertsCpu(simple, threads=1)
    assert len(set(os.listdir("/proc/self/task")) - before) == 2  # one looks at what devices ask for
    child = os.fork()
    if not child:
        cpu.close()  # where its threads are not
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(problem.solved(cpu), problem.expected)
    cpu.close()
    cpu.close()
    assert not set(os.listdir("/proc/self/task")) - before


def test_each_thread_has_a_core(simple: ops.ExpertsLibrary) -> None:
    with pytest.raises(ops.NoCpuShare, match=f"{CORES + 1} threads need a core each"):
        ops.ExpertsCpu(simple, threads=CORES + 1)


def test_threads_share_a_physical_core_last(tmp_path: Path) -> None:
    for core, siblings in enumerate(("0-1", "0-1", "2,6", "3", "", "5", "2,6")):
        if siblings:
            folder = tmp_path / f"cpu{core}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert ops.physical_first(range(7), tmp_path) == [0, 2, 3, 4, 5, 1, 6]
    assert ops.physical_first([1, 2, 6, 7], tmp_path) == [1, 2, 7, 6]


@pytest.mark.parametrize(("compiler", "message"), [
    ("no-such-compiler", r"no C\+\+ compiler found \(no-such-compiler\): install g\+\+"),
    ("false", "the compiler false fails: exit status 1"),
    ("g++ --no-such-option", "the compiler g.. fails: g.*no-such-option"),
])  # fmt: skip
def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, message: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ops.NoCpuShare, match=message):
        ops.load_experts_library(tmp_path, BF16, ["BF16"])


def test_unknown_encodings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ops.NoCpuShare, match="but not IQ4_XS"):
        ops.load_experts_library(tmp_path, BF16, ["IQ4_XS", "Q8_0"])


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ops.NoCpuShare, match=r"/dev/null/experts-.*cannot be written"):
        ops.load_experts_library(Path("/dev/null"), FP32, ["F32"])


@pytest.mark.slow
def test_code_with_other_bits_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '-D__builtin_fmaf(a,b,c)=((a)*(b)+(c))'")
    with pytest.raises(ops.NoCpuShare, match="other bits of F32"):
        ops.load_experts_library(tmp_path, FP32, ["F32"], "plain")


@pytest.mark.slow
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    ops.load_experts_library(tmp_path, FP32, ["F32"])
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for left in (0, -1):
        path.unlink()  # the one that is loaded stays as it was
        path.write_bytes(content[:left])
        library = ops.load_experts_library(tmp_path, FP32, ["F32"])
        assert [path] == list(tmp_path.iterdir()) and path.read_bytes()[:left] == content[:left]
    problem = Problem.random("F32", FP32, 40, 24)
    with ops.ExpertsCpu(library, threads=1) as cpu:
        assert torch.equal(problem.solved(cpu), problem.expected)
