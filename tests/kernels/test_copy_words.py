"""`copy_words`: every word arrives, nothing beside them is touched, and what is page-locked needs no copy engine."""

import pytest
import torch
from offload_runtime_kernels.copy_words import copy_words, copy_words_reference, copy_words_triton

from offload_runtime.stream.device import overwrite, upload
from tests.helpers.kernel_conditions import KERNEL_DEVICE

copies = pytest.mark.parametrize("copy", [copy_words_reference, copy_words_triton, copy_words])


def words(count: int) -> torch.Tensor:
    return torch.arange(7, 7 + count, dtype=torch.int32) * -(1 << 20)


@copies
@pytest.mark.parametrize("count", [1, 3, 1023, 1024, 1025, 70_000])
@pytest.mark.parametrize("offset", [0, 1])
def test_all_words_and_no_others(copy: object, count: int, offset: int) -> None:
    source, target = words(count), torch.full((count + 2,), 5, dtype=torch.int32, device=KERNEL_DEVICE)
    if KERNEL_DEVICE.type == "cuda":
        source = source.pin_memory()
    target = target[offset:]
    copy(source, target[:count])  # type: ignore[operator]
    assert torch.equal(target[:count].cpu(), words(count)) and (target[count:] == 5).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_there_and_back(dtype: torch.dtype) -> None:
    host = torch.arange(12, dtype=dtype).view(3, 4)
    there = upload(host, KERNEL_DEVICE)
    assert there.device == KERNEL_DEVICE and torch.equal(there.cpu(), host)
    wide = torch.zeros(3, 6, dtype=dtype, device=KERNEL_DEVICE)
    overwrite(wide[:, 1:5], host)  # rows of a larger tensor
    assert torch.equal(wide[:, 1:5].cpu(), host) and wide[:, 0].sum() == 0


@pytest.mark.gpu
def test_nothing_waits_for_copies_on_their_way() -> None:
    """Copies of two gigabytes in all are still running when the words have gone up and come back."""
    device = torch.device("cuda")
    large = torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)
    landing, small, back = torch.empty_like(large, device=device), words(9000), words(9000).zero_().pin_memory()
    copy_words(upload(small, device), back)  # compiles
    torch.cuda.synchronize()
    side, copying = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(copying):
        for _ in range(128):
            landing.copy_(large, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    back.zero_()
    with torch.cuda.stream(side):
        copy_words(upload(small, device), back)
        side.synchronize()
    assert not done.query(), "it was waited for"
    assert torch.equal(back, small)
    torch.cuda.synchronize()
