"""Figures for Prometheus: what the scheduler has done so far, as of when they are asked for; how long requests took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from offload_runtime.engine import SchedulerCounters

_PREFIX = "offload_runtime_"
# A pass over a streamed model takes half a second, and a long prompt a minute.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 3600)


class _SchedulerCollector(Collector):
    """The scheduler's counters, as of now."""

    def __init__(self, read: Callable[[], SchedulerCounters | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield one family a counter; none before there is a scheduler."""
        counters = self._read()
        if counters is None:
            return
        yield GaugeMetricFamily(f"{_PREFIX}requests_running", "Requests that have a slot", counters.running)
        yield GaugeMetricFamily(f"{_PREFIX}requests_waiting", "Requests that wait for a slot", counters.waiting)
        for name, what, value in (
            ("requests_finished", "Requests that have ended", counters.finished),
            ("prompt_tokens", "Tokens of prompts that were read", counters.prompt_tokens),
            ("tokens", "Tokens of answers", counters.tokens),
            ("passes", "Passes of the target but those over prompts alone", counters.passes),
        ):
            yield CounterMetricFamily(_PREFIX + name, what, value)
        for name, what, by_source in (
            ("proposed_tokens", "Proposals that the target verified", counters.proposed),
            ("accepted_tokens", "Proposals that the target accepted", counters.accepted),
        ):
            family = CounterMetricFamily(_PREFIX + name, what, labels=["source"])
            for source, value in sorted(by_source.items()):
                family.add_metric([source], value)
            yield family


class Metrics:
    """All figures of one server.

    Args:
        read: Gives the scheduler's counters, or None while there is none.

    Attributes:
        registry: Has all of them.
        first: Takes the seconds until a request had its first token.
        whole: Takes the seconds until all answers of a request were there.
        refused: Counts requests that ended by an error, by its status.
    """

    def __init__(self, read: Callable[[], SchedulerCounters | None]) -> None:
        self.registry = registry = CollectorRegistry()  # its own: servers in one process do not add up
        registry.register(_SchedulerCollector(read))
        first, whole = "From a request to its first token, waiting included", "From a request to the end of its answers"
        self.first = Histogram(f"{_PREFIX}time_to_first_token_seconds", first, registry=registry, buckets=_SECONDS)
        self.whole = Histogram(f"{_PREFIX}request_seconds", whole, registry=registry, buckets=_SECONDS)
        self.refused = Counter(f"{_PREFIX}errors", "Requests that ended by an error", ["status"], registry=registry)
