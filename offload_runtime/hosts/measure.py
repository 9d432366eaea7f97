"""How long rows take to another rank and back: what plans of several machines add to their passes."""

from __future__ import annotations

import statistics
import time

import torch

from offload_runtime.hosts.group import HostGroup
from offload_runtime.hosts.link import DONE, ECHO, QUIT, Link, Message, Orders

# One row of a 70B in 16 bits, a window of 16, a tree of 256, and a prompt of 4096; and how often each is sent.
_SENT = {16 << 10: 50, 256 << 10: 50, 4 << 20: 10, 64 << 20: 3}
_TRIALS = 3  # before a run loads


def measure_round_trips(group: HostGroup) -> dict[int, dict[int, float]]:
    """Return of each other rank the median seconds that so many bytes take there and back as bytes. Ends these. Raises
    `HostError`."""
    found = dict[int, dict[int, float]]()
    for peer in range(1, group.size):
        link, found[peer] = Link(group, peer, group.timeout_s), {}
        for nbytes, count in _SENT.items():
            rows, seconds = torch.zeros(nbytes, dtype=torch.uint8), list[float]()
            for _ in range(1 + count):  # the first one opens connections and takes memory
                begun_s = time.perf_counter()
                link.send(ECHO, {}, [rows])
                link.receive()
                seconds.append(time.perf_counter() - begun_s)
            found[peer][nbytes] = statistics.median(seconds[1:])
        link.send(QUIT, {})
        link.receive()
    return found


def round_trip_s(orders: Orders, nbytes: int) -> float:
    """Return the seconds that so many bytes take to the next rank and back, where it has nothing else to do yet. Raises
    `HostError`."""
    rows, seconds = torch.zeros(nbytes, dtype=torch.uint8), list[float]()
    for _ in range(_TRIALS):
        begun_s = time.perf_counter()
        orders.ask(ECHO, {}, rows)
        seconds.append(time.perf_counter() - begun_s)
    return min(seconds)


def answer_round_trips(group: HostGroup) -> None:
    """Send back what the first rank sends until it ends this. Raises `HostError`."""
    link = Link(group, 0, None)
    answer_echoes(link)
    link.send(DONE, {})


def answer_echoes(link: Link) -> Message:
    """Send back what the rank before sends until it gives another order, which is returned. Raises `HostError`."""
    while (order := link.receive()).kind == ECHO:
        link.send(DONE, {}, [order.rows])
    return order
