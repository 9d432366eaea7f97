"""What two neighbouring ranks say to each other: orders there and answers back, each a head and a body. The rows of a
pass come in parts: the first one with the order, and each further one as `ROWS`, unless the pass is `CUT`, when the
receiver asks for `MORE`. Where layers are in strides a `PASS` is an order about the first one, and each further one is
a `STRIDE`. So who has given an order always listens until it is answered: gloo's sends wait for their receiver, and one
that waited for a rank that computes would hear neither that it is busy nor that it has failed.

A head is three integers; a body is JSON and then rows, as bytes. Nothing of it is ever run or unpickled. What a head
has room for of a body comes with it: the rest waits until its receiver has said that it is ready. One that is at work
says so every second, so that a rank which is slow is told from one that is gone.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from offload_runtime.errors import HostError
from offload_runtime.hosts.group import HostGroup

LOAD, PASS, STRIDE, MORE, ROWS, CUT, QUIT, BUSY, DONE, FAILED, ECHO, SAVE, MAKE_ROOM, RESTORE = range(14)
_BEAT_S = 1.0
_FOR_EVER = timedelta(days=3650)  # for who waits for orders
_MOST_BYTES = 1 << 40
# Of a body that go with its head: a row of 8192 channels in 16 bits, and what is said of it. With 5 ms from rank to
# rank a row goes there and back in 13 ms so, and in 35 where bodies come by themselves.
_HEAD_BYTES, _FIRST_BYTES = 24, 24 << 10


class Message(NamedTuple):
    """An order or an answer as it has come: its kind, what it says, and rows as bytes, uint8 on the host."""

    kind: int
    says: Mapping[str, Any]
    rows: torch.Tensor


class Link:
    """The connection to one neighbour. One thread at a time may receive.

    Args:
        group: Of all ranks.
        peer: The neighbour's rank.
        wait_s: How long to wait for it; None: for ever, as one that waits for orders does.
    """

    def __init__(self, group: HostGroup, peer: int, wait_s: float | None) -> None:
        self.group, self.peer, self._wait_s = group, peer, wait_s
        self.own_name, self.peer_name = group.name(group.rank), group.name(peer)
        self._timeout = _FOR_EVER if wait_s is None else timedelta(seconds=wait_s)
        self._sending, self._is_at_work = threading.RLock(), False

    def send(self, kind: int, says: Mapping[str, Any], rows: Sequence[torch.Tensor] = ()) -> None:
        """Send a message, whose rows lie on the host, uint8 each. Raises `HostError`."""
        words = torch.frombuffer(bytearray(json.dumps(says).encode()), dtype=torch.uint8)
        body = torch.cat([words, *rows])
        first, rest = torch.zeros(_HEAD_BYTES + _FIRST_BYTES, dtype=torch.uint8), body[_FIRST_BYTES:]
        first[:_HEAD_BYTES] = torch.tensor([kind, len(words), len(body)], dtype=torch.int64).view(torch.uint8)
        first[_HEAD_BYTES : _HEAD_BYTES + len(body)] = body[:_FIRST_BYTES]
        with self._sending:
            try:
                for work in [dist.isend(part, self.peer) for part in ([first, rest] if len(rest) else [first])]:
                    assert work is not None
                    work.wait(self._timeout)
            except RuntimeError as error:
                raise self._failure(error) from error

    def receive(self) -> Message:
        """Wait for a message. Raises `HostError`."""
        first = self._received(torch.empty(_HEAD_BYTES + _FIRST_BYTES, dtype=torch.uint8))
        kind, num_words, size = first[:_HEAD_BYTES].view(torch.int64).tolist()
        assert 0 < num_words <= size < _MOST_BYTES
        body = torch.empty(size, dtype=torch.uint8)
        body[:_FIRST_BYTES] = first[_HEAD_BYTES : _HEAD_BYTES + size]
        if size > _FIRST_BYTES:
            self._received(body[_FIRST_BYTES:])
        return Message(kind, json.loads(bytes(body[:num_words].numpy())), body[num_words:])

    def _received(self, room: torch.Tensor) -> torch.Tensor:
        try:
            work = dist.irecv(room, self.peer)
            assert work is not None
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._failure(error) from error
        return room

    @contextmanager
    def beats(self) -> Iterator[None]:
        """Tell the neighbour every second, while within, that this rank is `at_work`, whenever it is."""
        is_over = threading.Event()

        def tell() -> None:
            try:
                while not is_over.wait(_BEAT_S):
                    with self._sending:
                        if self._is_at_work:
                            self.send(BUSY, {})
            except HostError:
                return  # who sends the answer sees it as well

        thread = threading.Thread(target=tell, name="at work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Be at work while within, and say nothing of it behind."""
        self._is_at_work = True
        try:
            yield
        finally:
            with self._sending:
                self._is_at_work = False

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Be not at work while within, in the middle of it: the neighbour is answered, and listens no more."""
        with self._sending:
            self._is_at_work = False
        try:
            yield
        finally:
            self._is_at_work = True

    def _failure(self, error: RuntimeError) -> HostError:
        """Return the error for a neighbour that has ended, by what it has said last, or is not heard from."""
        name, reason = self.peer_name, self.group.why_ended(self.peer)
        if reason is not None:
            what = f"{name} has ended: {reason}"
        elif "timed out" in str(error).lower() or "timeout" in str(error).lower():
            what = f"{name} has not been heard from for {self._wait_s:g} s (--host-timeout)"
        else:
            # Gloo names a line of its own source before, and says more than it knows behind.
            said = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).split(". ")[0]
            what = f"{name} is gone ({said})"
        return HostError(f"{what}: start all ranks again")


class _Order(NamedTuple):
    """What is sent: with it the first part of its rows, uint8, if it has any; the others come in a queue as they are
    made, and None where no more will be made."""

    kind: int
    says: Mapping[str, Any]
    first: torch.Tensor | None
    rest: SimpleQueue[torch.Tensor | None]


class Orders:
    """Gives a neighbour orders, and waits for its answers in a thread of its own: Ctrl-C may come at any time, and what
    is on its way then still arrives as a whole, or is cut, to be forgotten. After an error nothing is sent any more."""

    def __init__(self, link: Link) -> None:
        self._link, self._number = link, 0
        self.failure: HostError | None = None
        self._asked = SimpleQueue[tuple[int, _Order | None]]()
        self._answers = SimpleQueue[tuple[int, Message | HostError]]()
        self._thread = threading.Thread(target=self._run, name=f"rank {link.peer}", daemon=True)
        self._thread.start()

    def ask(
        self, kind: int, says: Mapping[str, Any], first: torch.Tensor | None = None, rest: Iterable[torch.Tensor] = ()
    ) -> Message:
        """Give an order, and wait for the answer.

        Args:
            kind: Of the order.
            says: Its words.
            first: The part of its rows that leaves with it, uint8 on the host.
            rest: The others, which leave as they are made and asked for.

        Raises:
            HostError: The neighbour is gone, or what it has failed by.
        """
        order, is_whole = _Order(kind, says, first, SimpleQueue()), False
        try:
            self._put(order)
            for part in rest:
                order.rest.put(part)
                if self.failure is not None:
                    break
            is_whole = True
        finally:
            if not is_whole:
                order.rest.put(None)
        return self._answer()

    def next_answer(self) -> Message:
        """Wait for a further answer to the last order. Raises as `ask`."""
        self._put(None)
        return self._answer()

    def close(self) -> None:
        """Give no more orders, and wait until the last one is answered, or its answer is given up."""
        self._number += 1
        self._asked.put((self._number, _Order(QUIT, {}, None, SimpleQueue())))
        self._thread.join()

    def _put(self, order: _Order | None) -> None:
        if self.failure is not None:
            raise HostError(str(self.failure)) from self.failure
        self._number += 1
        self._asked.put((self._number, order))

    def _answer(self) -> Message:
        while True:
            number, found = self._answers.get()
            if isinstance(found, HostError):  # be it to an order that nobody waits for any more: it was the last one
                raise found
            if number == self._number:
                return found

    def _run(self) -> None:
        while self.failure is None:
            number, order = self._asked.get()
            try:
                if order is not None:
                    self._link.send(order.kind, order.says, [] if order.first is None else [order.first])
                while (message := self._link.receive()).kind in (BUSY, MORE):
                    if message.kind == MORE:
                        assert order is not None
                        self._send_more(order)
                if message.kind == FAILED:
                    raise HostError(message.says["error"])
                self._answers.put((number, message))
                if order is not None and order.kind == QUIT:
                    return
            except HostError as error:
                self.failure, self._link.group.lost = error, str(error)
                self._answers.put((number, error))

    def _send_more(self, order: _Order) -> None:
        part = order.rest.get()
        if part is None:
            self._link.send(CUT, {})
        else:
            self._link.send(ROWS, {}, [part])
