"""What a trace holds: its spans, which of them some passes are, and what these came to."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness  # noqa: F401 (finds the package, installed or not)

from offload_runtime.errors import OffloadError, OptionError
from offload_runtime.sizes import format_bytes
from offload_runtime.trace import (
    COMPUTE,
    DRAFT,
    LINK,
    OF_CARD,
    PASSES,
    STALLS,
    TRACE_VERSION,
    covered_seconds,
    union_seconds,
)

_GZIP = b"\x1f\x8b"
_MOST_BY_ITSELF = 3  # passes that are drawn where none are named
# What spans of a row say besides, and what is drawn and counted here.
_ARGUMENTS = {PASSES: ("pass", "kind", "tokens"), LINK: ("bytes", "kind"), COMPUTE: ("layer",)}


class TraceError(OffloadError):
    """A file is no trace of ours, or lacks the passes that were asked for."""


@dataclass(frozen=True)
class Event:
    """One span of a row, in seconds since the recording began. Of several cards each has rows of its own but for passes
    and drafting."""

    row: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]
    card: int = 0


@dataclass(frozen=True)
class TraceFile:
    """A trace as it was read: its spans, and what it says of the run."""

    events: Sequence[Event]
    about: Mapping[str, Any]

    def machine(self) -> str:
        """One line about what ran where, as far as the trace knows it."""
        cards = [card["device_name"] or card["device"] for card in self.about.get("cards", ())]
        device = " and ".join(cards) or self.about.get("device_name") or self.about.get("device")
        placement = str(self.about.get("placement", "")).split("; ")[0]
        parts = device, self.about.get("dtype"), placement
        return "; ".join(str(part).removeprefix("torch.") for part in parts if part)


@dataclass(frozen=True)
class CardTotals:
    """What a card and its link did between two moments, clipped there."""

    link_bytes: float
    link_s: float
    compute_s: float  # without the stalls in the middle of layers
    stall_s: float

    def caption(self, seconds: float) -> str:
        """Its shares of so many seconds, for people."""
        share = 100 / seconds
        gbps = self.link_bytes / self.link_s / 1e9 if self.link_s else 0.0
        link = f"link {format_bytes(self.link_bytes)} at {gbps:.3g} GB/s, idle {abs(100 - share * self.link_s):.1f} %"
        return (
            f"{link if self.link_s else 'nothing streamed'}; "
            f"compute {share * self.compute_s:.1f} %; stalls {share * self.stall_s:.1f} %"
        )


@dataclass(frozen=True)
class Totals:
    """What happened between two moments, clipped there."""

    seconds: float
    cards: tuple[CardTotals, ...]
    draft_s: float
    hidden_draft_s: float  # as `hidden_draft_share` has it: a pass was running, or a link brought what passes need
    checked_tokens: int
    accepted_tokens: int

    def caption(self) -> str:
        """Two lines for people; of several cards one about the time, one for each card, and one about drafting."""
        share = 100 / self.seconds
        hidden = f", {100 * self.hidden_draft_s / self.draft_s:.0f} % hidden" if self.draft_s else ""
        milliseconds = f"{1e3 * self.seconds:.3g}" if self.seconds < 0.1 else f"{1e3 * self.seconds:.0f}"
        cards = [card.caption(self.seconds) for card in self.cards]
        if len(cards) > 1:
            first = "\n".join([f"{milliseconds} ms", *(f"card {number}: {one}" for number, one in enumerate(cards))])
        else:
            first = f"{milliseconds} ms: {cards[0]}"
        return (
            f"{first}\ndrafting {share * self.draft_s:.1f} %{hidden}; "
            f"{self.checked_tokens} tokens checked, {self.accepted_tokens} proposals accepted"
        )


def read_trace(path: Path) -> TraceFile:
    """A trace, compressed by gzip or not.

    Raises:
        TraceError: The file cannot be read, or is no trace of ours.
    """
    try:
        content = path.read_bytes()
        record = json.loads(gzip.decompress(content) if content.startswith(_GZIP) else content)
    except (ValueError, EOFError, RecursionError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path} is no trace: not JSON ({error}); write one with --trace FILE") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        version = record["otherData"]["offload_runtime_trace"]
        if version != TRACE_VERSION:
            raise TraceError(f"{path} is a trace of version {version}, and this reads version {TRACE_VERSION} only")
        events = [_event(span) for span in record["traceEvents"] if span["ph"] == "X"]
        for event in events:
            _ = [event.args[name] for name in _ARGUMENTS.get(event.row, ())]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path} is no trace of offload-runtime ({type(error).__name__}: {error}); write one with --trace FILE"
        ) from error
    return TraceFile(events, record["otherData"])


def _event(span: Mapping[str, Any]) -> Event:
    row, _, card = str(span["cat"]).partition(OF_CARD)
    return Event(row, span["name"], span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6, span["args"], int(card or 0))


def num_cards(events: Iterable[Event]) -> int:
    """How many cards the layers were dealt out to: each has spans, as it computes."""
    return 1 + max((event.card for event in events), default=0)


def of_card(events: Iterable[Event], card: int) -> list[Event]:
    """What one of the cards did, beside the passes and the drafting that are of all."""
    return [event for event in events if event.card == card or event.row in (PASSES, DRAFT)]


def choose_passes(events: Sequence[Event], asked: str | None) -> list[list[Event]]:
    """Ranges of passes in the order in which they are named, `A-B` or `A`, or one of some decoding passes after the
    first.

    Raises:
        OptionError: `asked` is no list of ranges; TraceError: the trace has no such passes.
    """
    passes = [event for event in events if event.row == PASSES]
    if not passes:
        raise TraceError("the trace has no passes: nothing was generated while it was recorded")
    if asked is None:
        decoding = [one for one in passes if one.args["kind"] == "verify"]
        # Where there is a choice, not the first one: its copies were made while the prompt was sampled from.
        return [decoding[1 : 1 + _MOST_BY_ITSELF] or decoding or passes[:1]]
    return [_one_range(passes, part) for part in asked.split(",")]


def _one_range(passes: Sequence[Event], asked: str) -> list[Event]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", asked)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise OptionError(f"--passes {asked} is no range: write it like 4-6, 4 for a single pass, or 4-6,10-12")
    first, last = int(match[1]), int(match[2] or match[1])
    chosen = [one for one in passes if first <= one.args["pass"] <= last]
    if len(chosen) != last - first + 1:
        numbers = [one.args["pass"] for one in passes]
        raise TraceError(f"--passes {asked}: the trace has {len(numbers)} passes, {min(numbers)} to {max(numbers)}")
    return chosen


def window_of(events: Iterable[Event], passes: Sequence[Event]) -> tuple[float, float]:
    """From the proposals for the first of these passes to the end of the last: seconds."""
    start_s, number = passes[0].start_s, passes[0].args["pass"]
    before = [event for event in events if event.row == PASSES and event.args["pass"] == number - 1]
    earliest_s = before[0].end_s if before else 0.0
    for event in events:
        if event.row == DRAFT and earliest_s <= event.start_s < passes[0].start_s:
            start_s = min(start_s, event.start_s)
    return start_s, passes[-1].end_s


def clipped(events: Iterable[Event], row: str, window: tuple[float, float]) -> list[tuple[float, float]]:
    """The part of each span of a row that lies in the window."""
    start_s, end_s = window
    inside = [event for event in events if event.row == row and event.end_s > start_s and event.start_s < end_s]
    return [(max(event.start_s, start_s), min(event.end_s, end_s)) for event in inside]


def totals_of(events: Sequence[Event], passes: Sequence[Event], window: tuple[float, float]) -> Totals:
    """What these passes came to. A copy that is cut by the window counts with the share of its bytes inside."""
    drafting, copies = (clipped(events, row, window) for row in (DRAFT, LINK))
    return Totals(
        seconds=window[1] - window[0],
        cards=tuple(_totals_of_card(of_card(events, card), window) for card in range(num_cards(events))),
        draft_s=union_seconds(drafting),
        # The difference of sums may be a little less than nothing.
        hidden_draft_s=max(0.0, covered_seconds(drafting, [*clipped(events, PASSES, window), *copies])),
        checked_tokens=sum(sum(one.args["tokens"]) for one in passes),
        accepted_tokens=sum(sum(one.args.get("accepted", ())) for one in passes),
    )


def _totals_of_card(events: Sequence[Event], window: tuple[float, float]) -> CardTotals:
    compute, stalls, copies = (clipped(events, row, window) for row in (COMPUTE, STALLS, LINK))
    link_bytes = 0.0
    for event in events:
        inside_s = min(event.end_s, window[1]) - max(event.start_s, window[0])
        if event.row == LINK and inside_s > 0:
            link_bytes += event.args["bytes"] * inside_s / (event.end_s - event.start_s)
    return CardTotals(
        link_bytes=link_bytes, link_s=union_seconds(copies),
        compute_s=union_seconds(compute) - covered_seconds(compute, stalls), stall_s=union_seconds(stalls),
    )  # fmt: skip
