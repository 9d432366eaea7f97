"""`encode_rows` and `decode_rows`: every bit comes back, by the reference and by the kernel."""

import pytest
import torch
from offload_runtime_kernels.coded_bf16 import CodedRow, decode_rows_reference, decode_rows_triton, encode_rows

from tests.helpers.kernel_conditions import KERNEL_DEVICE

BF16, I16 = torch.bfloat16, torch.int16


def drawn(distribution: torch.distributions.Distribution, rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(rows + columns)
    return (0.02 * distribution.sample((rows, columns))).bfloat16()


def bits(*values: int) -> torch.Tensor:
    """bf16 numbers by their bits."""
    return torch.tensor(values, dtype=torch.int32).to(I16).view(BF16)


# Of magnitudes far apart; zeros, subnormals, the least normal, ordinary, the largest, infinities, NaNs quiet and
# signalling with payloads.
SPECIAL = bits(
    0x1234, 0x9876, 0x2BCD, 0x5432, 0xE666,
    0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x80FF, 0x0080, 0x3F80, 0xBF81, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0,
    0xFFC1, 0x7F81, 0xFFBF, 0x7FFF,
)  # fmt: skip


def sprinkled(values: torch.Tensor, others: torch.Tensor, per_row: int) -> torch.Tensor:
    """`per_row` elements of each row replaced by what is in `others`, by turns, at any columns."""
    out, generator = values.clone(), torch.Generator().manual_seed(0)
    for number, row in enumerate(out):
        at = torch.randperm(len(row), generator=generator)[:per_row]
        row[at] = others[(torch.arange(per_row) + number) % len(others)]
    return out


def gaussian(rows: int, columns: int) -> torch.Tensor:
    return drawn(torch.distributions.Normal(0.0, 1.0), rows, columns)


MATRICES = {
    "Gaussian": gaussian,
    "heavy-tailed": lambda *shape: drawn(torch.distributions.StudentT(3.0), *shape),
    "constant": lambda *shape: torch.full(shape, -1.7, dtype=BF16),
    "zero": lambda *shape: torch.zeros(shape, dtype=BF16),
    "signed zeros": lambda *shape: gaussian(*shape).sign() * torch.zeros(shape, dtype=BF16),
    "subnormal": lambda *shape: gaussian(*shape) * 2.0**-130,
    "infinite": lambda *shape: torch.full(shape, float("-inf"), dtype=BF16),
    "NaN payloads": lambda *shape: (gaussian(*shape).view(I16) | 0x7F80).view(BF16),
    "rows of all scales": lambda *shape: (
        gaussian(*shape) * torch.logspace(-120, 120, shape[0], base=2)[:, None].to(BF16)
    ),
    "exceptions": lambda *shape: sprinkled(gaussian(*shape), SPECIAL, 10),
    "sparse": lambda *shape: gaussian(*shape) * (gaussian(*shape) > 0),
}
# Less than a tile, a quarter and a half of one behind others, and whole ones. More of them than ten are in
# `test_a_row_has_room_for_so_many_exceptions`: the interpreter takes 50 ms for each.
SHAPES = ((5, 192), (3, 576), (4, 640), (2, 1280), (1, 2560))


def coded(values: torch.Tensor) -> tuple[torch.Tensor, CodedRow]:
    row = CodedRow.of(values.shape[1])
    assert row is not None and row.nbytes % 16 == 0
    out = torch.full((len(values), row.nbytes), 255, dtype=torch.uint8, device=values.device)
    assert encode_rows(values, row, out, out.device) == 0
    return out, row


def by_reference(stored: torch.Tensor, row: CodedRow) -> torch.Tensor:
    out = torch.full((len(stored), row.columns), float("nan"), dtype=BF16, device=stored.device)
    decode_rows_reference(stored, row, out)
    return out


def by_kernel(stored: torch.Tensor, row: CodedRow) -> torch.Tensor:
    """What lies behind the result must stay as it is."""
    out = torch.full((len(stored) + 1, row.columns), 7.0, dtype=BF16, device=KERNEL_DEVICE)
    decode_rows_triton(stored.to(KERNEL_DEVICE), row, out[:-1])
    assert bool((out[-1] == 7.0).all())
    return out[:-1].cpu()


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape and torch.equal(found.view(I16), expected.view(I16))


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MATRICES)
def test_every_bit_comes_back(name: str, shape: tuple[int, int]) -> None:
    values = MATRICES[name](*shape)
    stored, row = coded(values)
    assert stored.nbytes < values.nbytes
    assert_same_bits(by_reference(stored, row), values)
    assert_same_bits(by_kernel(stored, row), values)
    assert_same_bits(by_kernel(stored[1:], row), values[1:])  # rows of a matrix by themselves


@pytest.mark.gpu
@pytest.mark.parametrize("name", MATRICES)
def test_coding_on_a_gpu_gives_the_same_bytes(name: str) -> None:
    values = MATRICES[name](130, 4096)
    stored, row = coded(values)
    assert torch.equal(coded(values.cuda())[0].cpu(), stored)
    on_device = torch.empty_like(stored, device=KERNEL_DEVICE)
    encode_rows(values.cuda(), row, on_device, KERNEL_DEVICE)
    assert torch.cuda.current_stream().query()  # all is written
    on_host = torch.empty_like(stored)
    assert encode_rows(values, row, on_host, KERNEL_DEVICE) == 0 and torch.equal(on_host, stored)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(4096, 11008), (57344, 8192), (128256, 4096)])
def test_matrices_of_real_models(rows: int, columns: int) -> None:
    """A few rows of all kinds, again and again."""
    once = torch.cat([make(16, columns) for make in MATRICES.values()])
    stored, row = coded(once)
    times = -(-rows // len(once))
    expected, out = once.to(KERNEL_DEVICE), torch.empty(times * len(once), columns, dtype=BF16, device=KERNEL_DEVICE)
    decode_rows_triton(stored.to(KERNEL_DEVICE).repeat(times, 1), row, out)
    assert all(torch.equal(part.view(I16), expected.view(I16)) for part in out.view(times, *once.shape))
