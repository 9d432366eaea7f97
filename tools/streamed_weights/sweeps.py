"""What is swept over streamed weights: tokens in the window of a pass, and the share of layers that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from long_context.sweeps import tokens

from offload_runtime.errors import OptionError


@dataclass(frozen=True)
class Point:
    """One row.

    Attributes:
        label: Its value as on the command line.
        window_tokens: Tokens in the window of a pass; None where windows are chosen.
        resident_layers: Layers that stay on the device.
    """

    label: str
    window_tokens: int | None
    resident_layers: int


@dataclass(frozen=True)
class Sweep:
    """The values that are measured where nothing else is asked for."""

    axis: str
    values: tuple[str, ...]


SWEEPS = {
    "window": Sweep("tokens in the window of a pass", tuple(str(1 << power) for power in range(11))),
    "resident": Sweep(
        "share of the layers that stay on the GPU",
        ("0", "1/8", "1/4", "3/8", "1/2", "5/8", "3/4", "7/8", "1"),
    ),
}  # fmt: skip


def window_points(values: Sequence[str] | None, *, resident_layers: int, num_layers: int) -> list[Point]:
    """The rows of `window`.

    Raises:
        OptionError: A value is no number of tokens, or there are not that many layers.
    """
    check_layers(resident_layers, num_layers)
    points = [Point(text, tokens(text), resident_layers) for text in values or SWEEPS["window"].values]
    for point in points:
        if point.window_tokens is None or point.window_tokens < 1:
            raise OptionError(f"a window has at least the token that is known, not {point.label} tokens")
    return points


def resident_points(values: Sequence[str] | None, *, num_layers: int) -> list[Point]:
    """The rows of `resident`, the smallest share first: what does not fit the device any more comes last.

    Raises:
        OptionError: A value is no share, or two of them are the same number of layers.
    """
    points = sorted(
        (Point(text, None, round(share(text) * num_layers)) for text in values or SWEEPS["resident"].values),
        key=lambda point: point.resident_layers,
    )
    for point, following in pairwise(points):
        if point.resident_layers == following.resident_layers:
            raise OptionError(
                f"{point.label} and {following.label} of {num_layers} layers are both {point.resident_layers}: name "
                "other --values"
            )
    return points


def share(text: str) -> Fraction:
    """`3/8` or `0.375`.

    Raises:
        OptionError: It is no share from 0 to 1.
    """
    try:
        found = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise OptionError(f"{text!r} is no share of the layers: write it like 3/8 or 0.375") from None
    if not 0 <= found <= 1:
        raise OptionError(f"a share of the layers is from 0 to 1, not {text}")
    return found


def check_layers(resident_layers: int, num_layers: int) -> None:
    """Refuse more layers than there are.

    Raises:
        OptionError: There are fewer.
    """
    if not 0 <= resident_layers <= num_layers:
        raise OptionError(f"--resident-layers is from 0 to the {num_layers} layers of the model, not {resident_layers}")
