"""Settings: options that a TOML file or the environment has for all runs, where the command line does not say them.

A key of the file is an option as it is typed, without its dashes; what stands in the table of a command is for that
command alone. The variable of an option is its name in capitals behind `OFFLOAD_RUNTIME_`. The command line comes
first, then the environment, the command's table, and the rest of the file.
"""

from __future__ import annotations

import difflib
import os
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_origin

import tomli_w

from offload_runtime import __version__
from offload_runtime.cli.terminal import read_text
from offload_runtime.errors import OptionError, StorageError
from offload_runtime.files import user_directory
from offload_runtime.options import OptionField, require, require_type

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PREFIX = "OFFLOAD_RUNTIME_"
_DIRECTORIES = {f"{_PREFIX}{kind}" for kind in ("CONFIG", "CACHE", "STATE")}  # see `user_directory`
_OWN = ("config", "print_config")  # say which settings there are, and are none
_SWITCHES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass
class Settings:
    """Holds what file and environment say of the options of one command, by typer's names.

    Attributes:
        values: What stands in for what was not typed.
        origins: Where each of them is from, for messages.
        texts: What every option is by now, as it was written.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, context: Any, file: Path | None, kinds: Mapping[str, OptionField]) -> Settings:
        """Read the settings of a command.

        Args:
            context: The command's, of typer.
            file: Where they lie; None is `config.toml` in the user's directory, if it is there.
            kinds: Its options, by typer's names.

        Raises:
            OptionError: A file that cannot be read or is no TOML, a name that is no option, or a value that cannot be.
        """
        found, options = cls(), _options(context.command)
        every = {key for command in context.find_root().command.commands.values() for key in _options(command)}
        for key, name, value, is_for_this in [*_in_file(context, file, every), *_in_environment(every)]:
            param = options.get(key)
            if param is None or not is_for_this:
                continue
            if value == "" and name == _variable(key):  # as if nobody said anything
                found.values.pop(param.name, None)
            else:
                found.values[param.name] = _checked(kinds[param.name], name, value)
                found.origins[param.name] = name
        return found

    def name(self, context: Any, param: Any) -> str:
        """Say by what name an option was given, for messages."""
        is_set = context.get_parameter_source(param.name).name == "DEFAULT_MAP"
        return self.origins[param.name] if is_set else str(param.opts[0])

    def to_toml(self, context: Any, secrets: Iterable[str]) -> str:
        """Write the options of a command as a settings file: those that are by themselves what they are, and
        `secrets`, as comments, and behind the others where they are from."""
        command = context.info_name
        lines = [f"# offload-runtime {__version__}: every option of {command} as it is now", f"[{command}]"]
        group: str | None = None
        for key, param in _options(context.command, first_alone=True).items():
            if (heading := param.rich_help_panel) != group:
                lines, group = [*lines, "", f"# {heading}"], heading
            text, source = self.texts.get(param.name), context.get_parameter_source(param.name).name
            said = self.name(context, param)
            if param.name in secrets and text is not None:
                lines.append(f"# {key} is said by {said}, and not shown")
            elif text is None or text == []:
                lines.append(f"# {key} is not set")
            elif source == "DEFAULT":
                lines.append(f"# {_entry(key, text)}")
            else:
                lines.append(f"{_entry(key, text)}  # {said}")
        return "\n".join(lines) + "\n"


def _options(command: Any, *, first_alone: bool = False) -> dict[str, Any]:
    """Return a command's options by their names on the command line, without dashes; where they have several, perhaps
    by the first one alone."""
    named = [one for one in command.params if one.param_type_name == "option" and one.name not in _OWN]
    long = {one.name: [name[2:] for name in one.opts if name.startswith("--")] for one in named}
    return {name: one for one in named for name in (long[one.name][:1] if first_alone else long[one.name])}


def _variable(key: str) -> str:
    return f"{_PREFIX}{key.upper().replace('-', '_')}"


def _require_option(name: str, key: str, known: Mapping[str, str], where: str) -> None:
    """Refuse what is no option, and name what was perhaps meant: `known` are options with how they are spelled here."""
    if key not in known:
        close = difflib.get_close_matches(name.split()[0], known.values(), n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise OptionError(f"{name} is no option of {where}{meant}: correct it, or take it out")


_Said = tuple[str, str, Any, bool]  # an option, what it is called in messages, its value, whether it is of this command


def _in_file(context: Any, file: Path | None, every: Iterable[str]) -> Iterator[_Said]:
    """Return what the file says: what is for all commands, which have `every` option among them, first."""
    path, said = _read_file(file)
    everywhere, commands = {key: key for key in every}, context.find_root().command.commands
    for written, value in said.items():
        if not isinstance(value, dict):
            key, name = written.replace("_", "-"), f"{written} in {path}"
            _require_option(name, key, everywhere, "any command")
            yield key, name, value, True
    for command, table in said.items():
        for written, value in table.items() if isinstance(table, dict) else ():
            require(command in commands, f"[{command}] in {path} is no command: there are {', '.join(commands)}")
            key, name = written.replace("_", "-"), f"{written} in [{command}] of {path}"
            _require_option(name, key, {one: one for one in _options(commands[command])}, command)
            yield key, name, value, context.command is commands[command]


def _in_environment(every: Iterable[str]) -> Iterator[_Said]:
    """Return what variables say."""
    known = {key: _variable(key) for key in every}
    for variable, value in os.environ.items():
        if variable.startswith(_PREFIX) and variable not in _DIRECTORIES:
            key = variable.removeprefix(_PREFIX).lower().replace("_", "-")
            _require_option(variable, key, known, "any command")
            yield key, variable, value, True


def _read_file(file: Path | None) -> tuple[Path, Mapping[str, Any]]:
    """Return the file of settings and what it says."""
    path = file
    if path is None:
        try:
            path = user_directory("config", holds="settings") / "config.toml"
        except StorageError:  # nobody's home: nobody's settings
            return Path(), {}
        if not os.path.exists(path):  # False also where nobody may look
            return path, {}
    try:
        return path, tomllib.loads(read_text(path, option="" if file is None else "--config"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise OptionError(f"{path} is not TOML: {error}") from error


def _checked(one: OptionField, name: str, value: Any) -> Any:
    """Return a value as the command line would have it: a switch, a text, or several. What a text says is judged where
    that of the command line is, but for one of several words."""
    assert one.option is not None
    repeated = one.option.repeated
    if one.hint is bool:
        value = _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value
        require(isinstance(value, bool), f"{name} must be true or false, not {reprlib.repr(value)}")
        return value
    if repeated and isinstance(value, str) and value.startswith("["):  # of a variable
        try:
            value = tomllib.loads(f"values = {value}")["values"]
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise OptionError(f"{name} begins with [ and is no list of TOML: {error}") from error
    require(repeated or not isinstance(value, list), f"{name} takes one value, not a list")
    texts = list(_texts(name, value if isinstance(value, list) else [value]))
    if get_origin(one.hint) is Literal:
        require_type(name, texts[0], one.hint)
    return texts if repeated else texts[0]


def _texts(name: str, values: Iterable[Any]) -> Iterator[str]:
    """Write values as they would be typed."""
    for value in values:
        fine = isinstance(value, str | int | float) and not isinstance(value, bool)
        require(fine, f"{name} must be a text or a number, not {reprlib.repr(value)}")
        require("\0" not in str(value), f"{name} holds a NUL character: drop it")
        yield str(value)


def _entry(key: str, value: Any) -> str:
    """Write one line of a settings file; numbers as numbers."""

    def plain(text: Any) -> Any:
        for number in (int, float) if isinstance(text, str) else ():
            try:
                if str(number(text)) == text:
                    return number(text)
            except ValueError:
                pass
        return text

    def shown(item: Any) -> str:
        return tomli_w.dumps({"x": plain(item)}).strip().removeprefix("x = ")

    is_list = isinstance(value, list | tuple)
    return f"{key} = " + (f"[{', '.join(map(shown, value))}]" if is_list else shown(value))
