"""What is known of a machine: one frozen record, the same whether it was measured here or comes from a file.

The planner's input, before any token. Rates are GB/s with GB = 1e9; what is not known is None, never a guess.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from offload_runtime.errors import OptionError, ProfileError
from offload_runtime.files import user_directory, write_atomically, writing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Element types of models whose matrix products are measured.
DTYPES = ("bf16", "fp16", "fp32")
PCIE_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class _Rule:
    """What a value must be: `wanted` in words for the message, `admits` for the value."""

    wanted: str
    admits: Callable[[Any], bool]


def _number(least: float, most: float, unit: str = "", *, whole: bool = False) -> _Rule:
    """A number of `least` to `most`, `whole` or not; `unit` is for the message."""

    def admits(value: Any) -> bool:
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        return is_number and least <= value <= most  # NaN and infinity are not

    return _Rule(f"{'a whole number' if whole else 'a number'} from {least:g} to {most:g}{unit}", admits)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value.strip()) <= _LONGEST_TEXT


def _table(keys: _Rule, values: _Rule, example: str) -> _Rule:
    """Figures by key, with an `example` for the message."""

    def admits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            keys.admits(key) and values.admits(figure) for key, figure in value.items()
        )

    wanted = f"a table keyed by {keys.wanted}, with values that are {values.wanted}, such as {{{example}}}"
    return _Rule(wanted, admits)


_TEXT = _Rule(
    f'text in quotes: one line of 1 to {_LONGEST_TEXT} characters, such as "NVIDIA GeForce RTX 4090"', _is_text
)
_TEXTS = _Rule(
    'a list of words, such as ["avx2", "avx512f"]',
    lambda value: isinstance(value, list | tuple) and all(_is_text(word) for word in value),
)
_WIDTH = _Rule(f"one of {', '.join(map(str, PCIE_WIDTHS))}", lambda value: type(value) is int and value in PCIE_WIDTHS)
_BYTES = _number(1, 1 << 50, " (bytes)", whole=True)
_RATE = _number(1e-6, 1e6, " (GB/s, GB = 1e9)")
_RATES = _Rule(
    "a list of numbers from 1e-06 to 1e+06 (GB/s, GB = 1e9), such as [25.0, 12.5]",
    lambda value: isinstance(value, list | tuple) and all(map(_RATE.admits, value)),
)
_MICROSECONDS = _number(1e-3, 1e6, " (microseconds)")
_BY_KIB = _table(_number(2**-10, 1 << 30, " (KiB of one transfer)"), _MICROSECONDS, '"8" = 20.0, "8192" = 400.0')
_BY_MIB = _table(_number(2**-20, 1 << 20, " (MiB of one copy)"), _RATE, '"0.25" = 12.0, "64" = 25.0')
_BY_THREADS = _table(_number(1, 8192, " (threads)", whole=True), _RATE, '"1" = 12.0, "8" = 60.0')
_BY_DTYPE = _table(
    _Rule(", ".join(DTYPES), lambda key: key in DTYPES), _number(1e-6, 1e6, " (TFLOP/s)"), "bf16 = 165.0"
)
_BY_SHAPE = _table(
    _Rule("shapes of matrices", lambda key: isinstance(key, str) and re.fullmatch(r"\d+x\d+", key) is not None),
    _number(0, 4096, " (rows)", whole=True), '"4096x11008" = 512',
)  # fmt: skip
_KIND = re.compile(r"I?Q\d_\w+|INT[48]|FP8|12-bit BF16")
_BY_KIND = _table(
    _Rule("ways to store weights", lambda key: _KIND.fullmatch(str(key)) is not None),
    _number(1e-3, 1e6, " (Gweights/s)"), "Q4_K = 2343.0",
)  # fmt: skip
_CPU = _Rule('a table, such as [cpu] name = "…" cores = 16', lambda value: isinstance(value, CpuFigures))


def _key(rule: _Rule, *, gpu: bool = False) -> dict[str, Any]:
    """Metadata of a key of a profile; one of a `gpu` means nothing on a machine without one."""
    return {"rule": rule, "gpu": gpu}


@dataclass(frozen=True)
class CpuFigures:
    """The host's processor.

    `cores` are the logical ones that a process may use, `features` the flags that matter to attention on the CPU.
    """

    name: str = field(metadata=_key(_TEXT))
    cores: int = field(metadata=_key(_number(1, 8192, " (logical cores)", whole=True)))
    features: tuple[str, ...] = field(default=(), metadata=_key(_TEXTS))

    def __post_init__(self) -> None:
        _check_values(self, "cpu.")
        object.__setattr__(self, "features", tuple(self.features))


@dataclass(frozen=True)
class Emulation:
    """Cards to play, `cards` of them: `whole_vram_bytes` is all of the memory of each, `vram_bytes` what of it a
    program can have.

    `link_gbps` is host to device, `link_back_gbps` device to host, in GB/s.
    """

    name: str
    whole_vram_bytes: int
    vram_bytes: int
    link_gbps: float
    link_back_gbps: float
    cards: int = 1


@dataclass(frozen=True)
class MachineProfile:
    """A machine's figures; those of a GPU are of one of its `gpus` equal cards. Validates itself when made.

    `source` says in words where the figures come from (measured when and how, or published where).

    GPU: `vram_bytes` is all of a card's memory, `vram_others_bytes` what of it the driver and other programs keep, a
    desktop above all, and `vram_reserved_bytes` what a run's CUDA context takes. `link_gbps` is host to device with
    large pinned copies, `link_back_gbps` device to host, `link_both_gbps` each direction while both run,
    `link_by_copy_mib` host to device by MiB of one copy.
    Of several cards, in CUDA's order, `links_alone_gbps` are host to device, each while the others are idle, and
    `links_at_once_gbps` each while all of them copy. Rows take `transfer_us_by_kib` from card to card, by KiB of one
    transfer: a few of them `transfer_us`, and many arrive at `transfer_gbps`.
    `pcie_generation` and `pcie_width` are the link's while it is busy. `hbm_gbps` counts bytes read and written.
    `tflops` are dense matrix products by element type, `launch_us` one small kernel launched from the host,
    `graph_launch_us` one within a CUDA graph. `decode_gweights_per_s` are weights that products of one row
    decode in registers, by how they are stored, in 1e9 a second, over a layer of an 8B; memory may bound them.

    Host: `ram_bytes` is all of the memory, `pinnable_bytes` what may be page-locked of it, at `pin_gbps`. `host_gbps`
    is reading with as many threads as are best (`host_by_threads`), `host_gbps_while_link_busy` the same beside
    copies to the device, which keep `link_gbps_while_host_busy`. `disk_gbps` is one sequential reader.
    """

    name: str = field(metadata=_key(_TEXT))
    source: str = field(metadata=_key(_TEXT))
    gpus: int = field(metadata=_key(_number(0, 64, whole=True)))
    ram_bytes: int = field(metadata=_key(_BYTES))
    gpu_name: str | None = field(default=None, metadata=_key(_TEXT, gpu=True))
    vram_bytes: int | None = field(default=None, metadata=_key(_BYTES, gpu=True))
    vram_reserved_bytes: int | None = field(default=None, metadata=_key(_BYTES, gpu=True))
    vram_others_bytes: int | None = field(default=None, metadata=_key(_BYTES, gpu=True))
    link_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    link_back_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    link_both_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    links_alone_gbps: tuple[float, ...] = field(default=(), metadata=_key(_RATES, gpu=True))
    links_at_once_gbps: tuple[float, ...] = field(default=(), metadata=_key(_RATES, gpu=True))
    transfer_us: float | None = field(default=None, metadata=_key(_MICROSECONDS, gpu=True))
    transfer_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    pcie_generation: int | None = field(default=None, metadata=_key(_number(1, 7, whole=True), gpu=True))
    pcie_width: int | None = field(default=None, metadata=_key(_WIDTH, gpu=True))
    hbm_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    launch_us: float | None = field(default=None, metadata=_key(_MICROSECONDS, gpu=True))
    graph_launch_us: float | None = field(default=None, metadata=_key(_MICROSECONDS, gpu=True))
    pinnable_bytes: int | None = field(default=None, metadata=_key(_BYTES, gpu=True))
    pin_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    host_gbps: float | None = field(default=None, metadata=_key(_RATE))
    host_gbps_while_link_busy: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    link_gbps_while_host_busy: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    disk_gbps: float | None = field(default=None, metadata=_key(_RATE))
    cpu: CpuFigures | None = field(default=None, metadata=_key(_CPU))
    tflops: Mapping[str, float] = field(default_factory=dict, metadata=_key(_BY_DTYPE, gpu=True))
    library_rows: Mapping[str, int] = field(default_factory=dict, metadata=_key(_BY_SHAPE, gpu=True))
    decode_gweights_per_s: Mapping[str, float] = field(default_factory=dict, metadata=_key(_BY_KIND, gpu=True))
    link_by_copy_mib: Mapping[float, float] = field(default_factory=dict, metadata=_key(_BY_MIB, gpu=True))
    transfer_us_by_kib: Mapping[float, float] = field(default_factory=dict, metadata=_key(_BY_KIB, gpu=True))
    host_by_threads: Mapping[int, float] = field(default_factory=dict, metadata=_key(_BY_THREADS))

    def __post_init__(self) -> None:
        _check_values(self, "")
        of_gpu = [entry.name for entry in fields(self) if entry.metadata.get("gpu") and getattr(self, entry.name)]
        if self.gpus == 0 and of_gpu:
            raise ProfileError(f"a machine with gpus = 0 cannot have {', '.join(of_gpu)}: drop them, or set gpus")
        if self.gpus and (self.gpu_name is None or self.vram_bytes is None):
            raise ProfileError(f"gpus = {self.gpus} needs gpu_name and vram_bytes: add them, or set gpus = 0")
        for key in ("links_alone_gbps", "links_at_once_gbps"):
            object.__setattr__(self, key, rates := tuple(getattr(self, key)))
            if rates and not 2 <= self.gpus == len(rates):
                one_each = "give one for each of several cards, or none"
                raise ProfileError(f"{key} has {len(rates)} figures and gpus = {self.gpus}: {one_each}")
        parts = (
            ("vram_others_bytes", "vram_bytes"),
            ("vram_reserved_bytes", "vram_bytes"),
            ("pinnable_bytes", "ram_bytes"),
        )
        for part, whole in parts:
            part_bytes, whole_bytes = getattr(self, part), getattr(self, whole)
            if part_bytes is not None and part_bytes > whole_bytes:
                raise ProfileError(f"{part} = {part_bytes} exceeds {whole} = {whole_bytes}: lower it")

    def emulation(self) -> Emulation:
        """What to play of this machine; a link of unknown speed back is as fast as it is forth.

        Raises:
            OptionError: The profile says too little of a GPU.
        """
        if not self.gpus or self.vram_bytes is None or self.link_gbps is None:
            raise OptionError(
                f"the profile {self.name} cannot be emulated: it needs a GPU with vram_bytes and link_gbps: choose "
                "another with --emulate"
            )
        back_gbps = self.link_gbps if self.link_back_gbps is None else self.link_back_gbps
        # A run on a GPU counts its own context; a reserve that was measured holds one, and what others have.
        usable_bytes = self.vram_bytes - (self.vram_others_bytes or self.vram_reserved_bytes or 0)
        return Emulation(self.name, self.vram_bytes, usable_bytes, self.link_gbps, back_gbps, self.gpus)


def _check_values(record: CpuFigures | MachineProfile, prefix: str) -> None:
    """Check every value that is given; `prefix` goes before the key in the message."""
    for entry in fields(record):
        value = getattr(record, entry.name)
        rule: _Rule = entry.metadata["rule"]
        if not (rule.admits(value) or (value is None and entry.default is None)):
            raise ProfileError(f"{prefix}{entry.name} must be {rule.wanted}, not {value!r}")


def _guess(word: str, allowed: Iterable[str], prefix: str = "") -> str:
    """What a word may have been meant for, as the beginning of a sentence; empty where nothing is like it."""
    nearest = difflib.get_close_matches(word, allowed, n=1)
    return f"did you mean {prefix}{nearest[0]}? " if nearest else ""


def _check_keys(given: Mapping[str, Any], record: type[CpuFigures] | type[MachineProfile], prefix: str) -> None:
    """Refuse keys that the record does not have, and name those that it needs."""
    allowed = [entry.name for entry in fields(record)]
    for key in given:
        if key not in allowed:
            guess = _guess(key, allowed, prefix)
            raise ProfileError(f"{prefix}{key} is not a key of a profile: {guess}allowed are {', '.join(allowed)}")
    needed = ("name", "cores") if record is CpuFigures else ("name", "source", "gpus", "ram_bytes")
    missing = [prefix + key for key in needed if key not in given]
    if missing:
        raise ProfileError(f"{', '.join(missing)} missing: every profile needs {', '.join(prefix + k for k in needed)}")


def _number_keys(table: Any, kind: type[int] | type[float]) -> Any:
    """A table whose keys are read as numbers: keys of TOML are text. What is none stays, for the rules to refuse."""
    if not isinstance(table, Mapping):
        return table
    numbers: dict[Any, Any] = {}
    for key, value in table.items():
        number: Any = key
        with suppress(ValueError):
            number = kind(key)
        if number in numbers:
            raise ProfileError(f"two keys of one table mean {number}: keep one of them")
        numbers[number] = value
    return numbers


def profile_from_mapping(table: Mapping[str, Any]) -> MachineProfile:
    """Read a profile from the tables of a TOML file.

    Raises:
        ProfileError: A key is unknown or missing, or a value is of the wrong type or out of range; names the key and
            what is allowed.
    """
    _check_keys(table, MachineProfile, "")
    values = dict(table)
    if isinstance(cpu := values.get("cpu"), Mapping):
        _check_keys(cpu, CpuFigures, "cpu.")
        values["cpu"] = CpuFigures(**cpu)
    for key, kind in (("link_by_copy_mib", float), ("transfer_us_by_kib", float), ("host_by_threads", int)):
        if key in values:
            values[key] = _number_keys(values[key], kind)
    return MachineProfile(**values)


def profile_to_mapping(profile: MachineProfile) -> dict[str, Any]:
    """The profile as tables of TOML or JSON: what is not known is left out, keys are text."""
    table = {key: value for key, value in asdict(profile).items() if value not in (None, (), {})}
    for key in ("tflops", "link_by_copy_mib", "transfer_us_by_kib", "host_by_threads"):
        if key in table:
            # Whole sizes without a decimal point.
            table[key] = {str(name).removesuffix(".0"): figure for name, figure in sorted(table[key].items())}
    return table


# --- where profiles are kept: shipped ones in a package of TOML files, the user's own in the configuration directory

_SHIPPED_PACKAGE = "offload_runtime_profiles"
_SUFFIX = ".toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def own_directory() -> Path:
    """Where `save_profile` puts profiles: in OFFLOAD_RUNTIME_CONFIG, else in the platform's configuration directory.

    Raises:
        StorageError: The user has no home directory and no variable names another place.
    """
    return user_directory("config", holds="settings") / "profiles"


def shipped_directory() -> Path:
    """The folder of shipped profiles: the installed package, or the checkout's own when nothing is installed."""
    spec = importlib.util.find_spec(_SHIPPED_PACKAGE)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[2] / "profiles"


def list_profiles() -> dict[str, Path]:
    """The files of all profiles that can be loaded by name, sorted by it; one of the user's own, which lies in
    `own_directory`, hides a shipped one of its name."""
    found: dict[str, Path] = {}
    for directory in (shipped_directory(), own_directory()):
        with suppress(OSError):  # not there, or not to be read: it lists nothing
            found |= {path.stem: path for path in directory.glob(f"*{_SUFFIX}")}
    return dict(sorted(found.items()))


def load_profile(name_or_path: str | Path | MachineProfile) -> MachineProfile:
    """Load a profile by name, the user's own before shipped ones, or from a TOML file by its path.

    What ends in `.toml` or has a directory in front is a path; what is a profile already stays as it is.

    Raises:
        ProfileError: There is no such profile, it cannot be read, or a key or value in it is wrong.
    """
    if isinstance(name_or_path, MachineProfile):
        return name_or_path
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(_SUFFIX) or Path(text).name != text:
        return _read(Path(os.path.expanduser(name_or_path)))  # what ~ does not stand for is not found
    files = list_profiles()
    if text not in files:
        raise ProfileError(
            f"there is no profile {text!r}: {_guess(text, files)}there are {', '.join(files) or 'none'}; "
            f"`offload-runtime profile --save {text}` measures this machine"
        )
    return _read(files[text])


def _read(path: Path) -> MachineProfile:
    """Read and check one file; every message begins with its path."""
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:  # says the line and column itself
        raise ProfileError(f"{path} is not TOML: {error}") from error
    try:
        return profile_from_mapping(table)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def check_name(name: str) -> None:
    """Refuse names that could not be loaded again.

    Raises:
        ProfileError: The name is not one word that can be a file's name.
    """
    if not _NAME.fullmatch(name) or name.endswith(_SUFFIX):
        raise ProfileError(
            f"{name!r} is not a name for a profile: use 1 to 64 letters, digits, '-', '_' or '.', beginning with a "
            f"letter or digit and without {_SUFFIX} at the end"
        )


def profile_toml(profile: MachineProfile) -> str:
    """The profile as the text of a TOML file."""
    import tomli_w

    return tomli_w.dumps(profile_to_mapping(profile))


def save_profile(profile: MachineProfile, name: str) -> Path:
    """Write a profile among the user's own as `name`, in place of one that was there.

    Returns:
        The file.

    Raises:
        ProfileError: The name cannot be one.
        StorageError: The file cannot be written; an older one of this name is then still there.
    """
    check_name(name)
    path = own_directory() / f"{name}{_SUFFIX}"
    remedy = "free some space, or set OFFLOAD_RUNTIME_CONFIG to a directory that can be written"
    with writing(path, remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, profile_toml(replace(profile, name=name)), remedy=remedy)
    return path
