"""What tests share: Triton's interpreter where there is no GPU, no network, one GPU for all, small models."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # whatever the user has: nothing here asks a hub

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests.helpers.covering import few

# Nor what the user has set for runs of their own.
for name in [name for name in os.environ if name.startswith("OFFLOAD_RUNTIME_")]:
    del os.environ[name]
os.environ["OFFLOAD_RUNTIME_CONFIG"] = os.path.join(tempfile.gettempdir(), "no-settings-of-offload-runtime")

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it has to be set before the first kernel module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Every run draws the same examples, as what a change did not do must not refuse it; `--hypothesis-profile=search` draws
# many others. Time is not what is tested.
settings.register_profile(
    "short", max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("short"), derandomize=False, max_examples=1000)
settings.load_profile("short")
# Small tensors gain nothing from a second thread, and lose 30-fold where another process uses its core.
torch.set_num_threads(1)

# Shells without job control ignore Ctrl-C for what runs in the background, and so would all that tests start: whoever
# interrupts a process presses Ctrl-C in its foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_unfreeze = gc.unfreeze
# Imports and collected tests stay: looking through them again and again took a quarter of the time of collecting.
gc.disable()


def _written_once(directory: Path, write: Callable[[Path], Path]) -> Path:
    """A directory that the first worker to want it writes."""
    directory.parent.mkdir(exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            write(directory.with_suffix(".partial")).rename(directory)
    return directory


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints of all workers lie. Nobody changes them."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def _checkpoint(name: str, **shape: int) -> Callable[..., Path]:
    """A fixture of that name: a small random checkpoint, see `write_checkpoint`."""

    @pytest.fixture(scope="session", name=name)
    def written(models_dir: Path) -> Path:
        from tests.helpers.engine import write_checkpoint  # brings transformers, which tests of kernels do without

        # Alone in its directory: `--draft auto` would take a small one beside it.
        return _written_once(models_dir / f"{name}_alone" / name, partial(write_checkpoint, **shape))

    return written


short_target = _checkpoint("short_target")  # five layers, 512 tokens, two query heads a KV head
long_target = _checkpoint("long_target", context=16384)
deep_target = _checkpoint("deep_target", num_layers=10, context=4096)
wide_target = _checkpoint("wide_target", hidden_size=512, context=16384)
two_layer_target = _checkpoint("two_layer_target", num_layers=2, context=16384)
windowed_target = _checkpoint("windowed_target", num_layers=2, context=16384, window=40)
one_layer_draft = _checkpoint("one_layer_draft", num_layers=1, seed=1, context=16384)  # says something else


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> Path:
    """The checkpoint that the file's `TARGET` names."""
    path: Path = request.getfixturevalue(getattr(request.module, "TARGET", "short_target"))
    return path


@pytest.fixture
def copy(target: Path, tmp_path: Path) -> Path:
    """The file's target, to be changed."""
    return Path(shutil.copytree(target, tmp_path / "copy"))


@pytest.fixture(scope="session")
def noisy_copy_of() -> Callable[[Path], Path]:
    """Copies a checkpoint with so little noise that the copy is often right."""
    from tests.helpers.engine import write_noisy_copy

    return lambda target: _written_once(
        target.with_name(f"{target.name}-draft"), lambda path: write_noisy_copy(target, path, noise=0.03)
    )


@pytest.fixture(scope="module")
def draft(target: Path, noisy_copy_of: Callable[[Path], Path]) -> Path:
    """A noisy copy of the file's target."""
    return noisy_copy_of(target)


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Any]:
    """The file's target on the CPU, decoded plainly: what others are compared with."""
    from tests.helpers.engine import load

    with load(target, draft="none", max_batch=2) as runtime:
        yield runtime


@contextmanager
def _one_card(*, alone: bool) -> Iterator[None]:
    """Use the machine's GPU beside others who ask like this, or alone.

    Who wants it alone keeps nobody from taking it, and waits until nobody happens to.
    """
    import fcntl  # there is none where there is no fork

    with open(Path(tempfile.gettempdir()) / f"offload-runtime-gpu-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that outlives the test may have it, too


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around fixtures of every scope, and before time is counted
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Workers share a GPU, but for tests that measure its time or memory: they have it for themselves (`alone`)."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_available():
        return (yield)
    with _one_card(alone=item.get_closest_marker("alone") is not None):
        answer = yield
        gc.collect()
        torch.cuda.empty_cache()
    return answer


@pytest.hookimpl(wrapper=True, trylast=True)  # within what pytest-cov does around a test
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Take the tracer from tests that are `no_cover`: a worker has two, and pytest-cov stops only the one on top."""
    tracer = sys.gettrace()
    if tracer is None or item.get_closest_marker("no_cover") is None:
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


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
    """Leave out `slow` tests unless they are named or `-m` says what to run; those marked `early` come first.

    Of large grids of kernels (`few`) the interpreter runs a few rows, and a GPU all. Skip `gpu` tests, with the reason,
    on machines without CUDA; elsewhere those that want the GPU alone come last,
    as every one of them waits for what others are at. Tests of kernels are not traced: coverage is of the package,
    and the interpreter takes 2.6 times as long when it is.
    """
    grids: dict[str, list[pytest.Item]] = {}
    interpreted: set[pytest.Item] = set()
    for item in items:
        assert item.get_closest_marker("gpu") or not item.get_closest_marker("alone"), f"{item.name} needs no GPU"
        if item.path.parent.name == "kernels":
            item.add_marker(pytest.mark.no_cover)
        if item.get_closest_marker("few") is not None:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for grid in grids.values():
        often = few([vars(item)["callspec"].indices for item in grid], grid[0].get_closest_marker("few").args[0])
        for item in (item for at, item in enumerate(grid) if at not in often):
            if item.path.parent.name != "kernels":
                item.add_marker(pytest.mark.slow)
            elif not torch.cuda.is_available():
                interpreted.add(item)

    def is_left_out(item: pytest.Item) -> bool:
        if item not in interpreted and (config.option.markexpr or item.get_closest_marker("slow") is None):
            return False
        return not _is_named(item, config)

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
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
    gc.enable()
    if not torch.cuda.is_available():
        gc.unfreeze = lambda: None
    if "triton.runtime.interpreter" in sys.modules and not torch.cuda.is_available():
        from tests.helpers.interpreter import remember_types, replace_language_once_a_launch

        replace_language_once_a_launch()
        remember_types()
    if (testing := sys.modules.get("typer.testing")) is not None:
        # Reading the options of all commands took half of the time of a test that gives one.
        typer: Any = sys.modules["typer.main"]
        typer.get_command = testing._get_command = cache(typer.get_command)  # type: ignore[attr-defined]


def pytest_sessionfinish() -> None:
    """Give it back: what libraries look for when the process ends is then collected as ever."""
    _unfreeze()
