"""Where profiles are kept: shipped ones in a package of TOML files, the user's own in the configuration directory."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from offload_runtime.config import user_directory
from offload_runtime.errors import ProfileError, StorageError
from offload_runtime.hardware.profile import MachineProfile, profile_from_mapping, profile_to_mapping

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SHIPPED_PACKAGE = "offload_runtime_profiles"
_SUFFIX = ".toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ProfileEntry:
    """A profile that can be loaded by name; `shipped` tells it from the user's own."""

    name: str
    path: Path
    shipped: bool


def config_directory() -> Path:
    """Where the user's settings live: OFFLOAD_RUNTIME_CONFIG, else the platform's configuration directory.

    Raises:
        StorageError: The user has no home directory and no variable names another place.
    """
    return user_directory(
        "OFFLOAD_RUNTIME_CONFIG", windows="APPDATA", xdg="XDG_CONFIG_HOME", in_home=".config", holds="settings"
    )


def own_directory() -> Path:
    """Where `save_profile` puts profiles."""
    return config_directory() / "profiles"


def shipped_directory() -> Path:
    """The folder of shipped profiles: the installed package, or the checkout's own when nothing is installed."""
    spec = importlib.util.find_spec(_SHIPPED_PACKAGE)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[2] / "profiles"


def list_profiles() -> list[ProfileEntry]:
    """All profiles that can be loaded by name, sorted; one of the user's own hides a shipped one of its name."""
    found: dict[str, ProfileEntry] = {}
    for directory, shipped in ((shipped_directory(), True), (own_directory(), False)):
        with suppress(OSError):  # not there, or not to be read: it lists nothing
            for path in directory.glob(f"*{_SUFFIX}"):
                found[path.stem] = ProfileEntry(path.stem, path, shipped)
    return [found[name] for name in sorted(found)]


def load_profile(name_or_path: str | Path) -> MachineProfile:
    """Load a profile by name, the user's own before shipped ones, or from a TOML file by its path.

    What ends in `.toml` or has a directory in front is a path.

    Raises:
        ProfileError: There is no such profile, it cannot be read, or a key or value in it is wrong.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(_SUFFIX) or Path(text).name != text:
        return _read(Path(name_or_path).expanduser())
    entries = {entry.name: entry for entry in list_profiles()}
    if text not in entries:
        nearest = difflib.get_close_matches(text, entries, n=1)
        guess = f"did you mean {nearest[0]}? " if nearest else ""
        raise ProfileError(
            f"there is no profile {text!r}: {guess}there are {', '.join(entries) or 'none'}; "
            f"`offload-runtime profile --save {text}` measures this machine"
        )
    return _read(entries[text].path)


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
    text = profile_toml(replace(profile, name=name))
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{name}-", suffix=".part")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise StorageError(
            f"{path} cannot be written ({error.strerror or error}): free some space, or set OFFLOAD_RUNTIME_CONFIG to "
            "a directory that can be written"
        ) from error
    return path
