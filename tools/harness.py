"""What every command of this folder shares: the package, installed or not, options, errors of one line, and reports.

A benchmark ends with one JSON line (`emit`) that says where its figures come from: machine, versions, commit and
configuration (`provenance`), medians with percentiles. So a run can be compared with another machine's or last month's.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import torch

_TOOLS = Path(__file__).resolve().parent
# Last: nothing in them shadows an installed package.
sys.path += [str(folder) for folder in (_TOOLS / "peers", _TOOLS.parent / "kernels", _TOOLS.parent)]

from offload_runtime.cli.terminal import read_text  # noqa: E402 (found where the lines above say)
from offload_runtime.errors import OffloadError, OptionError, StorageError  # noqa: E402
from offload_runtime.files import require_writable, write_atomically, writing  # noqa: E402
from offload_runtime.hardware import load_profile  # noqa: E402
from offload_runtime.hardware.bench import read_host_info, read_nvml  # noqa: E402
from offload_runtime.options import require_positive  # noqa: E402
from offload_runtime.sizes import parse_bytes  # noqa: E402

_Options = ParamSpec("_Options")
REPORTED_PACKAGES = ("torch", "transformers", "triton", "accelerate", "deepspeed", "offload-runtime")
_REMEDY = "name another --out"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Parser(argparse.ArgumentParser):
    """argparse's own, but for what it does about a wrong option: no page of usage, one line as of every other error."""

    def error(self, message: str) -> NoReturn:
        """Raise `OptionError`: a script's `main` says it."""
        raise OptionError(f"{message}; --help lists the options")


def make_parser(doc: str | None) -> Parser:
    """A parser that shows a script's docstring as it is written."""
    return Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark's report takes: `--commit` and `--out`."""
    parser.add_argument("--commit", help="commit to report where the tree has no git")
    parser.add_argument("--out", type=Path, help="also write the JSON here")


def bench_parser(doc: str | None, *, device: str = "cuda") -> Parser:
    """The parser of a benchmark: `make_parser` with `--device`, and the options of its report."""
    parser = make_parser(doc)
    parser.add_argument("--device", default=device)
    add_report_options(parser)
    return parser


def integers(text: str) -> tuple[int, ...]:
    """`1,17` of the command line; nothing is none."""
    return tuple(int(part) for part in text.split(",") if part)


def floats(text: str) -> tuple[float, ...]:
    """`0,0.6` of the command line; nothing is none."""
    return tuple(float(part) for part in text.split(",") if part)


def require_all_positive(options: argparse.Namespace, *names: str) -> None:
    """Refuse options, numbers or lists of them, that are not at least 1. Raises `OptionError`."""
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, Sequence) else (value,):
            require_positive(f"--{name.replace('_', '-')}", number)


def settings_of(options: argparse.Namespace, *, without: Sequence[str] = ("out", "commit")) -> dict[str, str]:
    """The options as text for a report, of files the name alone."""
    lists = {key: value if isinstance(value, list | tuple) else [value] for key, value in vars(options).items()}
    return {
        key: ", ".join(part.name if isinstance(part, Path) else str(part) for part in parts)
        for key, parts in lists.items()
        if key not in without
    }


def read_tokens(path: Path, option: str, tokenizer: Any, needed: int | None, *, lower: str) -> list[int]:
    """The token ids of a file that `option` names, at least `needed`, which an option to `lower` asks for.

    Raises:
        OptionError: It cannot be read, is no text, or is shorter.
    """
    found: list[int] = list(tokenizer.encode(read_text(path, option=option)))
    if needed is not None and len(found) < needed:
        raise OptionError(
            f"{path.name} has {len(found)} tokens and {needed} are needed: lower {lower}, or name a longer {option}"
        )
    return found


def leading_agreement(expected: Sequence[int], said: Sequence[int]) -> int:
    """How many tokens two answers begin with in common."""
    pairs = zip(expected, said, strict=False)
    shorter = min(len(expected), len(said))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)


def check_machine(vram: str | None, emulate: str | None) -> None:
    """Refuse before anything is loaded what `Runtime.load` would of these two; None is nothing.

    Raises:
        OptionError: `vram` is no size; ProfileError: there is no machine `emulate`.
    """
    if vram is not None:
        parse_bytes(vram)
    if emulate is not None:
        load_profile(emulate)


def one_line_errors(main: Callable[_Options, int]) -> Callable[_Options, int]:
    """A `main` that says in one line on stderr what the user can mend, and then returns 2."""

    @functools.wraps(main)
    def run(*args: _Options.args, **kwargs: _Options.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except OffloadError as error:
            print("error:", " ".join(str(error).split()), file=sys.stderr)
            return 2

    return run


@dataclass(frozen=True)
class Check:
    """One claim: what was measured, the bar, and on which side of it the figure must be."""

    claim: str
    measured: float
    bar: float
    at_least: bool

    @property
    def holds(self) -> bool:
        """Whether the claim holds in this run."""
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "holds": self.holds}

    def __str__(self) -> str:
        """One line for people."""
        return f"{'ok' if self.holds else 'MISSED':6} {self.claim}: {self.measured:.4g} (bar {self.bar:g})"


def finish(report: Mapping[str, Any], checks: Sequence[Check], out: Path | None) -> int:
    """Print checks and end with the report that has them (`emit`); returns the exit code, 0 where all hold."""
    print(*checks, sep="\n")
    emit({**report, "checks": [check.as_dict() for check in checks]}, out)
    return 0 if all(check.holds for check in checks) else 1


def percentile(samples: Sequence[float], share: float) -> float:
    """The `share` quantile (0 to 1) of `samples`, linearly interpolated between the two nearest ranks."""
    assert samples, "no samples to take a percentile of"
    return float(torch.tensor(samples, dtype=torch.float64).quantile(share))


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile of at least one sample, in its unit, under their names."""
    return {name: percentile(samples, share) for name, share in (("median", 0.5), ("p20", 0.2), ("p80", 0.8))}


def machine_info(*devices: torch.device) -> dict[str, Any]:
    """Host and, for CUDA devices, the GPUs: names, cores, bytes of memory, driver, link. Those of the first are beside
    the host's; several cards are all in `cards`."""
    host, cards = read_host_info(), [_card_info(device) for device in devices]
    info = {"cpu": host.cpu_name, "cpu_cores": host.cores, "ram_bytes": host.ram_bytes, "os": platform.platform()}
    return {**info, **cards[0], **({"cards": cards} if len(cards) > 1 else {})}


def _card_info(device: torch.device) -> dict[str, Any]:
    """A card, its driver and its PCIe link, or why NVML cannot say. An idle link drops to a lower generation, so the
    maximum is reported beside the current one."""
    info: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        nvml = read_nvml(str(card.uuid))
        info |= {"gpu": card.name, "gpu_vram_bytes": card.total_memory, "driver": nvml.driver}
        if nvml.link is None:
            return {**info, "nvml": nvml.reason}
        info |= {"pcie_generation": nvml.link.generation, "pcie_generation_max": nvml.link.generation_max}
        info["pcie_width"] = nvml.link.width
    return info


def package_versions(names: Sequence[str] = REPORTED_PACKAGES) -> dict[str, str]:
    """Installed version of each of `names` that is installed, with Python's and CUDA's."""
    versions = {"python": platform.python_version()}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str:
    """The commit of the checkout that this file belongs to, `+changes` when it was edited since.

    `unknown` where there is no git or no checkout, or one that does not know this file: copies of the tree are measured
    on machines without either, and in other checkouts.
    """

    def git(*words: str) -> str:
        asked = ["git", "-C", str(Path(__file__).resolve().parent), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", ".")
        return git("rev-parse", "--short=12", "HEAD") + (
            "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance(*devices: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Where a figure comes from: `machine` with its cards, `versions`, `commit` (the given one where the tree has no
    git)."""
    return {"machine": machine_info(*devices), "versions": package_versions(), "commit": commit or git_commit()}


def check_out(out: Path | None) -> None:
    """Refuse before anything is measured a file that could not be written then; None is no file.

    Raises `StorageError`. Missing directories are made; a file that is there stays as it is.
    """
    if out is not None:
        _make_folder(out)
        require_writable(out, remedy=_REMEDY)


def _make_folder(out: Path) -> None:
    with writing(out, _REMEDY):
        out.parent.mkdir(parents=True, exist_ok=True)


def write_report(result: Mapping[str, Any], out: Path, *, indent: int | None = None) -> None:
    """Write JSON to a file that is whole whenever we are stopped: either what it was before, or all of the new.

    Raises `ValueError` for NaN or infinity, and `StorageError` when `out` cannot be written.
    """
    _make_folder(out)
    write_atomically(out, json.dumps(result, indent=indent, allow_nan=False) + "\n", remedy=_REMEDY)


def write_unfinished(result: Mapping[str, Any], out: Path | None) -> None:
    """Write what a run has measured so far, marked as `incomplete`, should it never come to its end.

    A file that cannot be written costs nothing yet: it is said on standard error, and `emit` fails in the end.
    """
    if out is None:
        return
    try:
        write_report({**result, "incomplete": True}, out)
    except StorageError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)


def say(line: str) -> None:
    """For people who wait."""
    print(line, file=sys.stderr, flush=True)


def emit(result: Mapping[str, Any], out: Path | None = None) -> None:
    """Print `result` as one JSON line, the last thing a benchmark does, and write the same line to `out` if given.

    Raises `ValueError` for NaN or infinity, which are not JSON and mean that a measurement went wrong, and
    `StorageError` when `out` cannot be written; the line is printed all the same, for it may have cost minutes.
    """
    line = json.dumps(result, allow_nan=False)
    try:
        if out is not None:
            write_report(result, out)
    except StorageError as error:
        raise StorageError(f"{error}; the result is on standard output only") from error
    finally:
        print(line, flush=True)
