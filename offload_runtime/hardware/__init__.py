"""Machines: what their link, memories and processors can do, measured here or from a named file.

A `MachineProfile` is one frozen record, the same whether it was measured here (`hardware.measure`, which needs torch)
or comes from a file: the planner's input, before any token. Rates are GB/s with GB = 1e9; what is not known is None,
never a guess.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from offload_runtime.errors import OptionError, ProfileError
from offload_runtime.files import user_directory, write_atomically, writing
from offload_runtime.options import Option, option_fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPES = ("bf16", "fp16", "fp32")  # of models, whose matrix products are measured
_LONGEST_TEXT = 1000
# Keys that earlier versions measured and no plan reads: profiles that were saved then are read without them.
_FORMER_KEYS = {
    "link_both_gbps", "links_alone_gbps", "pcie_generation", "pcie_width", "launch_us", "pin_gbps", "disk_gbps", "cpu",
    "host_gbps_while_link_busy", "link_gbps_while_host_busy", "library_rows", "link_by_copy_mib", "host_by_threads",
    "transfer_us_by_kib",
}  # fmt: skip
_BYTES: dict[str, Any] = {"least": 1, "most": 1 << 50}
_GBPS: dict[str, Any] = {"least": 1e-6, "most": 1e6}
_US: dict[str, Any] = {"least": 1e-3, "most": 1e6}


def _figure(default: Any = None, *, gpu: bool = True, keys: str = "", **bounds: Any) -> Any:
    """Make a field of a profile, for a number or several within the same bounds. One of a `gpu` means nothing on a
    machine without one; `keys` is what keys of its table are, as a regular expression."""
    about = {"option": Option("", **bounds), "gpu": gpu, "keys": keys}
    if default == {}:
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class MachineProfile:
    """A machine's figures; those of a GPU are of one of its `gpus` equal cards. Validates itself when made.

    `source` says in words where the figures come from (measured when and how, or published where).

    GPU: `vram_bytes` is all of a card's memory, `vram_others_bytes` what of it the driver and other programs keep, a
    desktop above all, and `vram_reserved_bytes` what a run's CUDA context takes. `link_gbps` is host to device with
    large pinned copies, `link_back_gbps` device to host. Of several cards, in CUDA's order, `links_at_once_gbps` are
    host to device, each while all of them copy; from card to card a few rows take `transfer_us`, and many arrive at
    `transfer_gbps`. `hbm_gbps` counts bytes read and written, `tflops` are dense matrix products by element type,
    `graph_launch_us` is one small kernel within a CUDA graph. `decode_gweights_per_s` are weights that products of one
    row decode in registers, by how they are stored, in 1e9 a second, over a layer of an 8B; memory may bound them.

    Host: `ram_bytes` is all of the memory, `pinnable_bytes` what may be page-locked of it, `host_gbps` how fast all
    cores read it, and `staging_gbps` how fast the threads that stage copy within it while the link is busy.
    """

    name: str
    source: str
    gpus: int = _figure(MISSING, gpu=False, least=0, most=64)
    ram_bytes: int = _figure(MISSING, gpu=False, **_BYTES)
    gpu_name: str | None = _figure()
    vram_bytes: int | None = _figure(**_BYTES)
    vram_reserved_bytes: int | None = _figure(**_BYTES)
    vram_others_bytes: int | None = _figure(**_BYTES)
    link_gbps: float | None = _figure(**_GBPS)
    link_back_gbps: float | None = _figure(**_GBPS)
    links_at_once_gbps: tuple[float, ...] = _figure((), **_GBPS)
    transfer_us: float | None = _figure(**_US)
    transfer_gbps: float | None = _figure(**_GBPS)
    hbm_gbps: float | None = _figure(**_GBPS)
    graph_launch_us: float | None = _figure(**_US)
    pinnable_bytes: int | None = _figure(**_BYTES)
    host_gbps: float | None = _figure(gpu=False, **_GBPS)
    staging_gbps: float | None = _figure(**_GBPS)
    tflops: Mapping[str, float] = _figure({}, keys="|".join(DTYPES), **_GBPS)
    decode_gweights_per_s: Mapping[str, float] = _figure({}, keys=r"I?Q\d_\w+|INT[48]|FP8|12-bit BF16", **_US)

    def __post_init__(self) -> None:
        _check_values(self)
        of_gpu = [entry.name for entry in fields(self) if entry.metadata.get("gpu") and getattr(self, entry.name)]
        if self.gpus == 0 and of_gpu:
            raise ProfileError(f"a machine with gpus = 0 cannot have {', '.join(of_gpu)}: drop them, or set gpus")
        if self.gpus and (self.gpu_name is None or self.vram_bytes is None):
            raise ProfileError(f"gpus = {self.gpus} needs gpu_name and vram_bytes: add them, or set gpus = 0")
        if (rates := len(self.links_at_once_gbps)) and not 2 <= self.gpus == rates:
            one_each = "give one for each of several cards, or none"
            raise ProfileError(f"links_at_once_gbps has {rates} figures and gpus = {self.gpus}: {one_each}")
        parts = {"vram_others_bytes": "vram_bytes", "vram_reserved_bytes": "vram_bytes", "pinnable_bytes": "ram_bytes"}
        for part, whole in parts.items():
            part_bytes, whole_bytes = getattr(self, part), getattr(self, whole)
            if part_bytes is not None and part_bytes > whole_bytes:
                raise ProfileError(f"{part} = {part_bytes} exceeds {whole} = {whole_bytes}: lower it")

    def require_gpu(self) -> MachineProfile:
        """Return this profile, if it has all that predictions need. Raises `OptionError` for one without a GPU, or that
        leaves out a figure that cannot be done without."""
        if not self.gpus:
            raise OptionError(f"the profile {self.name} has no GPU to plan for: choose another with --profile")
        if missing := [name for name in ("link_gbps", "hbm_gbps") if getattr(self, name) is None]:
            raise OptionError(f"the profile {self.name} does not know {', '.join(missing)}: add it, or measure again")
        return self

    def flops(self, dtype: str) -> float:
        """Return the operations per second of matrix products; 16-bit types stand for each other. Raises `OptionError`
        where they are not known."""
        tflops = self.tflops.get(dtype, self.tflops.get({"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)))
        if tflops is None:
            raise OptionError(f"the profile {self.name} has no TFLOP/s for {dtype}: add tflops.{dtype} to it")
        return tflops * 1e12

    def link_ratios(self, names: Sequence[str]) -> tuple[float, ...]:
        """Return how fast the links of cards are, of the first one's, by their names: those with a number (`cuda:1`) by
        that, others in turn. All alike where nothing is known of one of them."""
        tails, rates = [name.partition(":")[2] for name in names], self.links_at_once_gbps
        numbers = [int(tail) if tail.isdecimal() else number for number, tail in enumerate(tails)]
        return tuple(rates[one] / rates[0] if max(numbers) < len(rates) else 1.0 for one in numbers)


def _check_values(profile: MachineProfile) -> None:
    """Check every value that is given, and each item of those that are several."""
    for one, entry in zip(option_fields(MachineProfile), fields(MachineProfile), strict=True):
        name, value = one.name, getattr(profile, one.name)
        if isinstance(value, list):  # as TOML has them
            object.__setattr__(profile, name, value := tuple(value))
        try:
            one.checked(name, value)
            if isinstance(value, str) and not (value.isprintable() and 0 < len(value.strip()) <= _LONGEST_TEXT):
                raise ProfileError(f"{name} must be one line of 1 to {_LONGEST_TEXT} characters, not {value!r}")
            items = dict(enumerate(value, 1)) if isinstance(value, tuple) else value
            for key, item in items.items() if isinstance(items, Mapping) else ():
                if not (isinstance(key, int) or re.fullmatch(entry.metadata["keys"], key)):
                    raise ProfileError(f"{name} has the key {key!r}, and each must be {entry.metadata['keys']}")
                entry.metadata["option"].require_within(f"{name}[{key!r}]", item)
        except OptionError as error:
            raise ProfileError(str(error)) from error


def _guess(word: str, allowed: Iterable[str]) -> str:
    """Return what a word may have been meant for, as the beginning of a sentence; empty where nothing is like it."""
    nearest = difflib.get_close_matches(word, allowed, n=1)
    return f"did you mean {nearest[0]}? " if nearest else ""


def profile_from_mapping(table: Mapping[str, Any]) -> MachineProfile:
    """Read a profile from the tables of a TOML file, of an earlier version's what is still a key.

    Raises:
        ProfileError: A key is unknown or missing, or a value is of the wrong type or out of range; names the key and
            what is allowed.
    """
    allowed = [entry.name for entry in fields(MachineProfile)]
    table = {key: value for key, value in table.items() if key not in _FORMER_KEYS}
    for key in table:
        if key not in allowed:
            remedy = f"{_guess(key, allowed)}allowed are {', '.join(allowed)}"
            raise ProfileError(f"{key} is not a key of a profile: {remedy}")
    needed = [one.name for one in fields(MachineProfile) if one.default is one.default_factory]  # both are MISSING
    if missing := [key for key in needed if key not in table]:
        raise ProfileError(f"{', '.join(missing)} missing: every profile needs {', '.join(needed)}")
    return MachineProfile(**table)


def profile_to_mapping(profile: MachineProfile) -> dict[str, Any]:
    """Return the profile as tables of TOML or JSON: what is not known is left out."""
    return {key: value for key, value in asdict(profile).items() if value not in (None, (), {})}


# --- where profiles are kept: shipped ones in a package of TOML files, the user's own in the configuration directory

_SHIPPED_PACKAGE = "offload_runtime_profiles"
_SUFFIX = ".toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def own_directory() -> Path:
    """Return where `save_profile` puts profiles: in OFFLOAD_RUNTIME_CONFIG, else in the platform's configuration
    directory.

    Raises:
        StorageError: The user has no home directory and no variable names another place.
    """
    return user_directory("config", holds="settings") / "profiles"


def shipped_directory() -> Path:
    """Return the folder of shipped profiles: the installed package, or the checkout's own when nothing is installed."""
    spec = importlib.util.find_spec(_SHIPPED_PACKAGE)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[2] / "profiles"


def list_profiles() -> dict[str, Path]:
    """Return the files of all profiles that can be loaded by name, sorted by it; one of the user's own, which lies in
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


def profile_of_gpu(name: str, dtype: str) -> MachineProfile | None:
    """Return a profile of a GPU of this name that says what a plan in `dtype` needs, the user's own before shipped
    ones; None where there is none."""
    for path in sorted(list_profiles().values(), key=lambda path: path.parent != own_directory()):
        with suppress(ProfileError, OptionError):  # nobody asked for this one
            if (found := load_profile(path)).gpu_name == name:
                found.require_gpu().flops(dtype)
                return found
    return None


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
    """Return the profile as the text of a TOML file."""
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
