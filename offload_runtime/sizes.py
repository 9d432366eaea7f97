"""Sizes in bytes, counts and durations, as people write them and read them, and what the memory is called."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real

from offload_runtime.errors import OptionError

GB = 1_000_000_000
GIB = 1 << 30
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": GB, "tb": 10**12}
_SIZE_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": GIB}
_MOST_BYTES = 10**18  # no machine has as much memory
_LEAST_BARE = 1000  # fewer bytes nobody means: GB were
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}  # as Go has them
_COUNT_UNITS = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20}  # as vLLM has them


def parse_bytes(text: str | float, name: str = "") -> int:
    """Turn `"24GB"`, `"512MiB"` or a number of bytes into an integer; units are decimal unless written with an `i`.

    Raises:
        OptionError: It is no size, not positive, or so small a number without a unit that another one was meant; the
            message calls it `name`.
    """
    number, unit, shown = text, "", f"{name} {reprlib.repr(text)}".lstrip()  # a word may be of any length
    if not isinstance(number, Real):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
        if match is None or match[2].lower() not in _SIZE_UNITS:
            raise OptionError(f"{shown} is not a size: write it like 24GB, 512MiB or a number of bytes")
        number, unit = float(match[1]), match[2].lower()
    size = number * _SIZE_UNITS[unit]
    if not (size < _MOST_BYTES and round(size) > 0):
        bounds = f"{name or 'a size'} must be positive and less than {format_bytes(_MOST_BYTES)}"
        remedy = "write it like 24GB, or drop it for all that there is"
        raise OptionError(f"{bounds}, not {reprlib.repr(text)}: {remedy}")
    if not unit and size < _LEAST_BARE:
        raise OptionError(f"{shown} is {counted(number, 'byte')}: write {number:g}GB, or {number:g}B if that is meant")
    return round(size)  # 4.1 * 10**6 is a little less than what was meant


def parse_sizes(text: str | float | Sequence[str | float], name: str = "") -> int | tuple[int, ...]:
    """Do the same with one size, or with several: a sequence, or one text with commas such as `"22GB,24GB"`."""
    if isinstance(text, str):
        sizes = tuple(parse_bytes(one, name) for one in text.split(","))
        return sizes if len(sizes) > 1 else sizes[0]
    return tuple(parse_bytes(one, name) for one in text) if isinstance(text, Sequence) else parse_bytes(text, name)


def parse_count(text: str) -> int:
    """Turn `"4096"`, `"4K"` (of 1024) or `"128k"` (of 1000) into an integer. Raises `ValueError`."""
    match = re.fullmatch(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)([kKmM]?)\s*", text)
    number = Fraction(match[1]) * _COUNT_UNITS[match[2]] if match else Fraction(1, 2)
    if number.denominator != 1:
        raise ValueError("not a whole number")
    return number.numerator


def parse_duration_s(text: str | float, name: str = "") -> float:
    """Turn `"5m"`, `"1h30m"` or a number of seconds into seconds, as ollama reads them: what is negative is for ever,
    infinite here.

    Raises:
        OptionError: It is no duration; the message calls it `name`.
    """
    match = re.fullmatch(r"\s*(-?)((?:[0-9.]+[a-z\u00b5]*)+)\s*", str(text))
    parts = re.findall(r"([0-9.]+)([a-z\u00b5]*)", match[2]) if match and not isinstance(text, bool) else []
    try:
        number = sum(float(count) * _SECONDS[unit or "s"] for count, unit in parts)
    except (ValueError, KeyError):
        parts = []
    if not parts:
        shown = f"{name} {reprlib.repr(text)}".lstrip()
        raise OptionError(f"{shown} is not a duration: write it like 5m, 1h30m, 0, or -1 for ever")
    assert match is not None
    return math.inf if match[1] and number else number


def format_bytes(size_bytes: float) -> str:
    """Write bytes for people: `13.5 GB`, `256.0 MB`, in decimal units as the link's bandwidth is."""
    for unit, scale in (("TB", 10**12), ("GB", GB), ("MB", 10**6), ("kB", 10**3)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def counted(count: float, noun: str) -> str:
    """Write a count with what is counted: `1 layer`, `3 layers`."""
    return f"{count:.15g} {noun}{'s' * (count != 1)}"


def _last_digit(size_bytes: int) -> int:
    """Return the bytes that the last digit of `format_bytes` stands for."""
    return max(1, 10 ** (3 * ((len(str(size_bytes)) - 1) // 3) - 1))


def format_bytes_up(size_bytes: int) -> str:
    """Write bytes as `format_bytes` does, but never less than there are: a user types it back."""
    step = _last_digit(size_bytes)
    return format_bytes(-(-size_bytes // step) * step)


def size_option_down(size_bytes: int) -> str:
    """Write bytes as an option's value, `12.3GB`, never more than there are: the user types it as a limit."""
    step = _last_digit(size_bytes)
    return format_bytes(size_bytes // step * step).replace(" ", "")


def memory_name(device_type: str) -> str:
    """Return what the memory is called that a target on such a device works in: a CPU has no other one beside the
    host's."""
    return "device memory" if device_type == "cuda" else "memory"
