"""What is known of a machine: one frozen record, the same whether it was measured here or comes from a file.

The planner's input, before any token. Rates are GB/s with GB = 1e9; what is not known is None, never a guess.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from offload_runtime.errors import ProfileError

# Element types of models whose matrix products are measured.
DTYPES = ("bf16", "fp16", "fp32")
PCIE_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_LONGEST_TEXT = 1000


class _Rule(Protocol):
    """What a value must be."""

    @property
    def wanted(self) -> str:
        """The allowed values in words."""

    def admits(self, value: Any) -> bool:
        """Whether `value` is one of them."""


@dataclass(frozen=True)
class _Number:
    """A number of `least` to `most`, `whole` or not; `unit` is for the message."""

    least: float
    most: float
    unit: str
    whole: bool = False

    @property
    def wanted(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.least:g} to {self.most:g}{self.unit}"

    def admits(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        return self.least <= value <= self.most  # NaN and infinity are not


@dataclass(frozen=True)
class _OneOf:
    """One of a few whole numbers."""

    values: tuple[int, ...]

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"

    def admits(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value in self.values


@dataclass(frozen=True)
class _Text:
    """One line of text."""

    wanted: str = f'text in quotes: one line of 1 to {_LONGEST_TEXT} characters, such as "NVIDIA GeForce RTX 4090"'

    def admits(self, value: Any) -> bool:
        return isinstance(value, str) and value.isprintable() and 0 < len(value.strip()) <= _LONGEST_TEXT


@dataclass(frozen=True)
class _Texts:
    """A list of words."""

    wanted: str = 'a list of words, such as ["avx2", "avx512f"]'

    def admits(self, value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(_Text().admits(word) for word in value)


@dataclass(frozen=True)
class _Table:
    """Figures by key: the keys are numbers, or one of a few names."""

    keys: _Number | tuple[str, ...]
    values: _Number
    example: str

    @property
    def wanted(self) -> str:
        keys = f"keyed by {self.keys.wanted if isinstance(self.keys, _Number) else ', '.join(self.keys)}"
        return f"a table {keys}, with values that are {self.values.wanted}, such as {{{self.example}}}"

    def admits(self, value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        keys_fit = all(self.keys.admits(key) if isinstance(self.keys, _Number) else key in self.keys for key in value)
        return keys_fit and all(self.values.admits(figure) for figure in value.values())


_BYTES = _Number(1, 1 << 50, " (bytes)", whole=True)
_RATE = _Number(1e-6, 1e6, " (GB/s, GB = 1e9)")
_MICROSECONDS = _Number(1e-3, 1e6, " (microseconds)")
_BY_MIB = _Table(_Number(2**-20, 1 << 20, " (MiB of one copy)"), _RATE, '"0.25" = 12.0, "64" = 25.0')
_BY_THREADS = _Table(_Number(1, 8192, " (threads)", whole=True), _RATE, '"1" = 12.0, "8" = 60.0')
_BY_DTYPE = _Table(DTYPES, _Number(1e-6, 1e6, " (TFLOP/s)"), "bf16 = 165.0")


def _key(rule: _Rule) -> dict[str, Any]:
    return {"rule": rule}


def _gpu_key(rule: _Rule) -> dict[str, Any]:
    """A key that means nothing on a machine without a GPU."""
    return {"rule": rule, "gpu": True}


@dataclass(frozen=True)
class CpuFigures:
    """The host's processor.

    `cores` are the logical ones that a process may use, `features` the flags that matter to attention on the CPU.
    """

    name: str = field(metadata=_key(_Text()))
    cores: int = field(metadata=_key(_Number(1, 8192, " (logical cores)", whole=True)))
    features: tuple[str, ...] = field(default=(), metadata=_key(_Texts()))

    def __post_init__(self) -> None:
        _check_values(self, "cpu.")
        object.__setattr__(self, "features", tuple(self.features))


@dataclass(frozen=True)
class MachineProfile:
    """A machine's figures; those of a GPU are of one of its `gpus` equal cards. Validates itself when made.

    `source` says in words where the figures come from (measured when and how, or published where).

    GPU: `vram_bytes` is all of a card's memory, `vram_reserved_bytes` what of it nobody can have (the driver, the CUDA
    context, the desktop). `link_gbps` is host to device with large pinned copies, `link_back_gbps` device to host,
    `link_both_gbps` each direction while both run, `link_by_copy_mib` host to device by MiB of one copy.
    `pcie_generation` and `pcie_width` are the link's while it is busy. `hbm_gbps` counts bytes read and written.
    `tflops` are dense matrix products by element type, `launch_us` one small kernel launched from the host,
    `graph_launch_us` one within a CUDA graph.

    Host: `ram_bytes` is all of the memory, `pinnable_bytes` what may be page-locked of it, at `pin_gbps`. `host_gbps`
    is reading with as many threads as are best (`host_by_threads`), `host_gbps_while_link_busy` the same beside
    copies to the device, which keep `link_gbps_while_host_busy`. `disk_gbps` is one sequential reader.
    """

    name: str = field(metadata=_key(_Text()))
    source: str = field(metadata=_key(_Text()))
    gpus: int = field(metadata=_key(_Number(0, 64, "", whole=True)))
    ram_bytes: int = field(metadata=_key(_BYTES))
    gpu_name: str | None = field(default=None, metadata=_gpu_key(_Text()))
    vram_bytes: int | None = field(default=None, metadata=_gpu_key(_BYTES))
    vram_reserved_bytes: int | None = field(default=None, metadata=_gpu_key(_BYTES))
    link_gbps: float | None = field(default=None, metadata=_gpu_key(_RATE))
    link_back_gbps: float | None = field(default=None, metadata=_gpu_key(_RATE))
    link_both_gbps: float | None = field(default=None, metadata=_gpu_key(_RATE))
    pcie_generation: int | None = field(default=None, metadata=_gpu_key(_Number(1, 7, "", whole=True)))
    pcie_width: int | None = field(default=None, metadata=_gpu_key(_OneOf(PCIE_WIDTHS)))
    hbm_gbps: float | None = field(default=None, metadata=_gpu_key(_RATE))
    launch_us: float | None = field(default=None, metadata=_gpu_key(_MICROSECONDS))
    graph_launch_us: float | None = field(default=None, metadata=_gpu_key(_MICROSECONDS))
    pinnable_bytes: int | None = field(default=None, metadata=_gpu_key(_BYTES))
    pin_gbps: float | None = field(default=None, metadata=_gpu_key(_RATE))
    host_gbps: float | None = field(default=None, metadata=_key(_RATE))
    host_gbps_while_link_busy: float | None = field(default=None, metadata=_gpu_key(_RATE))
    link_gbps_while_host_busy: float | None = field(default=None, metadata=_gpu_key(_RATE))
    disk_gbps: float | None = field(default=None, metadata=_key(_RATE))
    cpu: CpuFigures | None = None
    tflops: Mapping[str, float] = field(default_factory=dict, metadata=_gpu_key(_BY_DTYPE))
    link_by_copy_mib: Mapping[float, float] = field(default_factory=dict, metadata=_gpu_key(_BY_MIB))
    host_by_threads: Mapping[int, float] = field(default_factory=dict, metadata=_key(_BY_THREADS))

    def __post_init__(self) -> None:
        _check_values(self, "")
        if self.gpus == 0:
            self._refuse_gpu_figures()
        elif self.gpu_name is None or self.vram_bytes is None:
            raise ProfileError(f"gpus = {self.gpus} needs gpu_name and vram_bytes: add them, or set gpus = 0")
        for part, whole in (("vram_reserved_bytes", "vram_bytes"), ("pinnable_bytes", "ram_bytes")):
            part_bytes, whole_bytes = getattr(self, part), getattr(self, whole)
            if part_bytes is not None and part_bytes > whole_bytes:
                raise ProfileError(f"{part} = {part_bytes} exceeds {whole} = {whole_bytes}: lower it")

    def _refuse_gpu_figures(self) -> None:
        given = [entry.name for entry in fields(self) if "gpu" in entry.metadata and getattr(self, entry.name)]
        if given:
            raise ProfileError(f"a machine with gpus = 0 cannot have {', '.join(given)}: drop them, or set gpus")


def _check_values(record: CpuFigures | MachineProfile, prefix: str) -> None:
    """Check every value that is given; `prefix` goes before the key in the message."""
    for entry in fields(record):
        value = getattr(record, entry.name)
        if "rule" not in entry.metadata or (value is None and entry.default is None):
            continue
        rule: _Rule = entry.metadata["rule"]
        if not rule.admits(value):
            raise ProfileError(f"{prefix}{entry.name} must be {rule.wanted}, not {value!r}")


def _check_keys(given: Mapping[str, Any], record: type[CpuFigures] | type[MachineProfile], prefix: str) -> None:
    """Refuse keys that the record does not have, and name those that it needs."""
    allowed = [entry.name for entry in fields(record)]
    for key in given:
        if key not in allowed:
            nearest = difflib.get_close_matches(key, allowed, n=1)
            guess = f"did you mean {prefix}{nearest[0]}? " if nearest else ""
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
        try:
            number: Any = kind(key)
        except ValueError:
            number = key
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
    if "cpu" in values:
        cpu = values["cpu"]
        if not isinstance(cpu, Mapping):
            raise ProfileError(f'cpu must be a table, such as [cpu] name = "…" cores = 16, not {cpu!r}')
        _check_keys(cpu, CpuFigures, "cpu.")
        values["cpu"] = CpuFigures(**cpu)
    for key, kind in (("link_by_copy_mib", float), ("host_by_threads", int)):
        if key in values:
            values[key] = _number_keys(values[key], kind)
    return MachineProfile(**values)


def profile_to_mapping(profile: MachineProfile) -> dict[str, Any]:
    """The profile as tables of TOML or JSON: what is not known is left out, keys are text."""
    table: dict[str, Any] = {}
    for entry in fields(profile):
        value = getattr(profile, entry.name)
        if isinstance(value, CpuFigures):
            table[entry.name] = {"name": value.name, "cores": value.cores, "features": list(value.features)}
        elif isinstance(value, Mapping):
            if value:
                table[entry.name] = {_key_text(key): figure for key, figure in sorted(value.items())}
        elif value is not None:
            table[entry.name] = value
    return table


def _key_text(key: str | float) -> str:
    """A key as text; sizes of whole MiB without a decimal point."""
    if isinstance(key, str):
        return key
    return str(int(key)) if key == int(key) else repr(key)
