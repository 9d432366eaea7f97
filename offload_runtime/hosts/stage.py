"""Layers of other machines: the rows of a pass go from one rank to the next in pieces, and its last ones come back as
one message.

A `RemoteStage` is what a runner sees of the ranks behind it. There `serve_passes` runs the same passes through layers
of its own, which may have another `RemoteStage` behind them. Where the layers of all are in strides, rows go there and
back for each. The slots of all ranks hold the same tokens: an order says what was committed since the last one. Saved
blocks are those of one machine: of each the first rank asks for the layers that are not its own, or sends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from offload_runtime.cache.device import KVCache
from offload_runtime.cache.saved_blocks import BlockLayout, SavedBlock
from offload_runtime.core import Batch, TokenTree
from offload_runtime.errors import HostError, OffloadError
from offload_runtime.hosts.link import (
    CUT,
    DONE,
    FAILED,
    MAKE_ROOM,
    MORE,
    PASS,
    QUIT,
    RESTORE,
    ROWS,
    SAVE,
    STRIDE,
    Link,
    Message,
    Orders,
)
from offload_runtime.runners.model_runner import HiddenTaps, ModelRunner, RowsDecoder
from offload_runtime.stream.device import current_device


class RemoteStage:
    """The layers behind those of a runner, on other machines; a `NextStage`.

    Args:
        orders: To the next rank.
        runner: Whose layers they follow; its cache says what is committed.
    """

    def __init__(self, orders: Orders, runner: ModelRunner) -> None:
        self._orders, self._cache = orders, runner.cache
        self._paths = dict[int, list[int]]()  # of slots, since the last order
        self._like, self._width = runner.decoder.final_norm, runner.decoder.config.hidden_size
        self._own = runner.decoder.config
        runner.cache.on_path = self._commit
        runner.following = self

    def _commit(self, slot: int, rows: Sequence[int]) -> None:
        self._paths[slot] = [*rows]

    def run(
        self, batch: Batch, committed: Sequence[int], residuals: Iterable[torch.Tensor], num_kept: int
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Take a pass through them, as `NextStage.run` says. Raises `HostError`."""
        found = self.run_stride(len(self._own.strides) - 1, batch, committed, residuals)
        num_rows = _num_rows(batch)
        decisive, *kept = found.split([len(found) - num_kept * num_rows, *[num_rows] * num_kept])
        return decisive.to(self._like.device), kept

    def run_stride(
        self, number: int, batch: Batch, committed: Sequence[int], residuals: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """Take a pass through a stride of them, as `NextStage.run_stride` says, or give the order about the last one
        and return all rows of its answer. Raises `HostError`."""
        parts, says = map(_to_bytes, residuals), dict[str, Any]()
        first = next(parts)  # where this fails no order leaves, and the next one has these paths
        if not number:
            says = {
                **self._news(dict(zip(batch.slots, committed, strict=True))),
                "trees": [[slot, tree.parents] for slot, tree in batch.trees.items()],
                "prompts": [[slot, len(tokens)] for slot, tokens in batch.prompts.items()],
            }
        answer = self._orders.ask(STRIDE if number else PASS, says, first, parts)
        return _from_bytes(answer.rows, self._like.dtype, self._width)

    def _news(self, lengths: Mapping[int, int]) -> dict[str, Any]:
        """Return what was committed since the last order, and how many tokens slots have now."""
        paths, self._paths = self._paths, {}
        return {"paths": [*paths.items()], "committed": [*lengths.items()]}

    def _ask(self, kind: int, slot: int, says: Mapping[str, Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Give an order about a slot, with rows, uint8; return those of the answer. Raises `HostError`."""
        news = self._news({slot: self._cache.length(slot)})
        return self._orders.ask(kind, {**news, "slot": slot, **says}, rows).rows

    def save_block(self, slot: int, block: int, to: SavedBlock, *, length: int) -> None:
        """Copy their layers of a block, as `NextStage.save_block` says. Raises `HostError`."""
        if behind := self._behind(to):
            found = self._ask(SAVE, slot, {"block": block, "length": length, "layers": [*behind]})
            parts = _parts(behind)
            for part, as_found in zip(parts, found.split([len(part) for part in parts]), strict=True):
                part.copy_(as_found)

    def begin_restore(self, slot: int, length: int) -> None:
        """Let them make room, as `NextStage.begin_restore` says. Raises `HostError`."""
        self._ask(MAKE_ROOM, slot, {"length": length})

    def restore_block(self, slot: int, saved: SavedBlock, count: int) -> None:
        """Let them have their layers of a block, as `NextStage.restore_block` says. Raises `HostError`."""
        behind = self._behind(saved)
        rows = torch.cat(_parts(behind)) if behind else None
        self._ask(RESTORE, slot, {"count": count, "layers": [*behind]}, rows)

    def _behind(self, block: SavedBlock) -> SavedBlock:
        """Return their layers of a block."""
        return {layer: parts for layer, parts in block.items() if self._own.own_number(layer) < 0}


def serve_passes(link: Link, runner: ModelRunner) -> None:
    """Run the passes of the rank before through this one's layers, and save and restore these, until it says that there
    is no more to do.

    Raises:
        HostError: It is gone, or a rank behind.
        OffloadError: What failed here, which it was told.
    """
    assert isinstance(runner.decoder, RowsDecoder)
    cut = set[int]()  # slots of prompts that the rank before has given up, and which have begun here
    with link.beats():
        order = link.receive()
        while order.kind != QUIT:
            try:
                with link.at_work(), current_device(runner.decoder.final_norm.device):
                    _catch_up(runner.cache, order.says, cut)
                    if order.kind == PASS:
                        found = _run_pass(order, link, runner, runner.decoder)
                    else:
                        found = _move_block(order, runner, runner.decoder)
            except _CutError as error:
                cut.update(slot for slot, _ in order.says["prompts"])
                if error.following is not None:
                    order = error.following
                    continue
                found = []
            except (OffloadError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
                link.send(FAILED, {"error": error_text(link, error)})
                raise
            link.send(DONE, {}, found)
            order = link.receive()
    link.send(DONE, {})


def error_text(link: Link, error: BaseException) -> str:
    """Return what the rank before is told of an error here; of one of a rank behind, as it was told."""
    return str(error) if isinstance(error, HostError) else f"{link.own_name} has failed: {error}"


def streams_for(taps: tuple[int, ...], width: int) -> HiddenTaps:
    """Return what keeps the residual streams below layers, of so many channels, for a head of another machine."""

    def tap(number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        out[:, number * width :][:, :width].copy_(x)

    return HiddenTaps(taps, len(taps) * width, tap)


class _CutError(Exception):
    """The rank before has given up a pass: before it had sent all rows, or between two strides, when it gives the order
    that is `following`."""

    def __init__(self, following: Message | None = None) -> None:
        super().__init__()
        self.following = following


class _Arriving:
    """Holds the rows of a pass as they arrive, and asks for them.

    Args:
        link: Brings them.
        order: Brought the first ones: of a pass without prompts all.
        count: How many they are.
        room: Where they go if they are so few, [n, H].
    """

    def __init__(self, link: Link, order: Message, count: int, room: torch.Tensor) -> None:
        self._link, self._count, self._of = link, 0, count
        self._rows = room if self._of <= len(room) else room.new_empty(self._of, room.shape[1])  # [at least N, H]
        self._take(order)

    def __call__(self, count: int) -> torch.Tensor:
        """Wait until so many are there, or all; return the memory of all. Raises `_CutError`."""
        while self._count < min(count, self._of):
            self._link.send(MORE, {})
            message = self._link.receive()
            if message.kind != ROWS:
                assert message.kind == CUT
                raise _CutError
            self._take(message)
        return self._rows

    def _take(self, message: Message) -> None:
        found = _from_bytes(message.rows, self._rows.dtype, self._rows.shape[1])
        self._rows[self._count : self._count + len(found)].copy_(found)
        self._count += len(found)


def _num_rows(batch: Batch) -> int:
    """Return the rows of a pass."""
    return sum(map(len, batch.trees.values())) + sum(map(len, batch.prompts.values()))


def _catch_up(cache: KVCache, says: Mapping[str, Any], cut: set[int]) -> None:
    """Bring the slots that an order is about to what the rank before has in them. What was begun in slots that were
    `cut` is forgotten."""
    for slot, rows in says["paths"]:
        cache.commit_path(slot, rows)
    for slot, length in says["committed"]:
        # A pass that was interrupted has committed its prompts here, and not there.
        if cache.length(slot) > length or not length or slot in cut:
            cache.truncate(slot, length)
            cut.discard(slot)
        assert cache.length(slot) == length, "all ranks hold the same tokens"


def _move_block(order: Message, runner: ModelRunner, decoder: RowsDecoder) -> list[torch.Tensor]:
    """Save a block, or restore one, or make room for some; return the bytes of one that is saved."""
    says = order.says
    if order.kind == MAKE_ROOM:
        runner.begin_restore(says["slot"], says["length"])
        return []
    layers, dtype = decoder.config.complete.layers, decoder.final_norm.dtype
    layout = BlockLayout({one: layers[one].attention.saved_tensors(dtype, whole=True) for one in says["layers"]})
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    if order.kind == SAVE:
        runner.save_block(says["slot"], says["block"], layout.views(memory), length=says["length"])
        return [memory]
    assert order.kind == RESTORE
    runner.restore_block(says["slot"], layout.views(memory.copy_(order.rows)), says["count"])
    return []


def _run_pass(order: Message, link: Link, runner: ModelRunner, decoder: RowsDecoder) -> list[torch.Tensor]:
    """Return the rows that a pass gives back as bytes, [N, H] each: what `NextStage.run` returns. Raises
    `_CutError`."""
    batch = _batch(order.says)
    count = _num_rows(batch)

    def exchange(rows: torch.Tensor) -> torch.Tensor:
        given = _to_bytes(rows)
        with link.at_rest():
            link.send(DONE, {}, [given])
            following = link.receive()
        if following.kind != STRIDE:
            raise _CutError(following)
        return _Arriving(link, following, count, rows.new_empty(0, rows.shape[1], device="cpu"))(count)

    decoder.begin_pass(_Arriving(link, order, count, decoder.room), exchange)
    runner.forward(batch)
    kept = [part for parts in batch.hidden.values() for part in parts]
    streams = torch.cat(kept).split(decoder.config.hidden_size, dim=1) if kept else []
    return [_to_bytes(rows) for rows in (batch.logits, *streams)]


def _parts(block: SavedBlock) -> list[torch.Tensor]:
    """Return the memory of a block's tensors, uint8 each."""
    return [tensor.view(-1).view(torch.uint8) for tensor in chain(*block.values())]


def _batch(says: Mapping[str, Any]) -> Batch:
    """Return the batch of a pass: prompts, then trees, of the numbers of its rows."""
    prompts, trees, first = dict[int, Sequence[int]](), dict[int, TokenTree](), 0
    for slot, count in says["prompts"]:
        prompts[slot] = range(first, first + count)
        first += count
    for slot, parents in says["trees"]:
        trees[slot] = TokenTree(tuple(range(first, first + len(parents))), tuple(parents))
        first += len(parents)
    return Batch(trees, prompts)


def _to_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [N, H] as bytes on the host, uint8. Waits for them."""
    return rows.contiguous().view(-1).view(torch.uint8).cpu()


def _from_bytes(data: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return rows [N, H], on the host."""
    return data.clone().view(dtype).view(-1, width)
