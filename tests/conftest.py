"""What tests share: Triton's interpreter where there is no GPU, no network, one GPU for all, two small models."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests.helpers.card import one_card
from tests.helpers.covering import few

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it has to be set before the first kernel module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Every run draws other examples, so that many runs see as many as long ones would. Time is not what is tested.
settings.register_profile("short", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("short")
# Workers share the cores, and small tensors lose 30-fold to many threads where anything else runs.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(4, os.cpu_count() or 1))

_unfreeze = gc.unfreeze


def _written_once(directory: Path, write: Callable[[Path], Path]) -> Path:
    """A directory that the first worker to want it writes."""
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            write(directory.with_suffix(".partial")).rename(directory)
    return directory


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint, for files whose tests need none of their own: one for all workers, never changed."""
    from tests.helpers.engine import write_checkpoint  # brings transformers, which tests of kernels do without

    base = tmp_path_factory.getbasetemp()
    return _written_once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "target", write_checkpoint)


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    """A copy of the file's target with so little noise that it is often right."""
    from tests.helpers.engine import write_noisy_copy

    return _written_once(
        target.parent / f"{target.name}-draft", lambda path: write_noisy_copy(target, path, noise=0.03)
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around fixtures of every scope, and before time is counted
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Workers share a GPU, but for tests that measure its time or memory: they have it for themselves (`alone`)."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_available():
        return (yield)
    with one_card(alone=item.get_closest_marker("alone") is not None):
        answer = yield
        gc.collect()
        torch.cuda.empty_cache()
    return answer


def _is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command line names this very test, its function or its class."""
    for argument in config.args:
        path, colons, name = argument.partition("::")
        if colons and (config.invocation_params.dir / path).resolve() == item.path.resolve():
            own = item.nodeid.partition("::")[2]
            if own == name or own.startswith((f"{name}[", f"{name}::")):
                return True
    return False


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `slow` tests unless they are named or `-m` says what to run.

    Skip `gpu` tests, with the reason, on machines without CUDA; elsewhere those that want the GPU alone come last,
    as every one of them waits for what others are at.
    """
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        assert item.get_closest_marker("gpu") or not item.get_closest_marker("alone"), f"{item.name} needs no GPU"
        if item.get_closest_marker("few") is not None:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for grid in grids.values():
        often = few([vars(item)["callspec"].indices for item in grid], grid[0].get_closest_marker("few").args[0])
        for item in (item for at, item in enumerate(grid) if at not in often):
            item.add_marker(pytest.mark.slow)
    if not config.option.markexpr:
        chosen: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            is_left_out = item.get_closest_marker("slow") and not _is_named(item, config)
            (left_out if is_left_out else chosen).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch sees none")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # "gpu" in its keywords may be a parameter's name as well
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Every worker begins with files of its own, whose models are then made once, and ends by taking from the others.

    xdist's default deals tests out one by one, and nearly every file's models were made by every worker.
    """
    if config.getoption("dist") != "load":
        return None  # somebody asked for another way
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
    """Take what imports have made out of the garbage collector's sight.

    Loading and closing a runtime collect, and would look through half a million objects of torch and transformers:
    0.2 s each, two fifths of the time of all tests. Closing one gives back what loading it took, so that without a GPU,
    whose memory would not come back, nothing is given back before the end.
    """
    gc.collect()
    gc.freeze()
    if not torch.cuda.is_available():
        gc.unfreeze = lambda: None


def pytest_sessionfinish() -> None:
    """Give it back: what libraries look for when the process ends is then collected as ever."""
    _unfreeze()
