"""What is known of a machine: one frozen record, the same whether it was measured here or comes from a file.

The planner's input, before any token. Rates are GB/s with GB = 1e9; what is not known is None, never a guess.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from offload_runtime.errors import ProfileError

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
_MICROSECONDS = _number(1e-3, 1e6, " (microseconds)")
_BY_MIB = _table(_number(2**-20, 1 << 20, " (MiB of one copy)"), _RATE, '"0.25" = 12.0, "64" = 25.0')
_BY_THREADS = _table(_number(1, 8192, " (threads)", whole=True), _RATE, '"1" = 12.0, "8" = 60.0')
_BY_DTYPE = _table(
    _Rule(", ".join(DTYPES), lambda key: key in DTYPES), _number(1e-6, 1e6, " (TFLOP/s)"), "bf16 = 165.0"
)


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

    name: str = field(metadata=_key(_TEXT))
    source: str = field(metadata=_key(_TEXT))
    gpus: int = field(metadata=_key(_number(0, 64, whole=True)))
    ram_bytes: int = field(metadata=_key(_BYTES))
    gpu_name: str | None = field(default=None, metadata=_key(_TEXT, gpu=True))
    vram_bytes: int | None = field(default=None, metadata=_key(_BYTES, gpu=True))
    vram_reserved_bytes: int | None = field(default=None, metadata=_key(_BYTES, gpu=True))
    link_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    link_back_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
    link_both_gbps: float | None = field(default=None, metadata=_key(_RATE, gpu=True))
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
    cpu: CpuFigures | None = None
    tflops: Mapping[str, float] = field(default_factory=dict, metadata=_key(_BY_DTYPE, gpu=True))
    link_by_copy_mib: Mapping[float, float] = field(default_factory=dict, metadata=_key(_BY_MIB, gpu=True))
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
        given = [entry.name for entry in fields(self) if entry.metadata.get("gpu") and getattr(self, entry.name)]
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
