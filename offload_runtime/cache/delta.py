"""What gated delta layers keep of sequences: of each a state at the beginning of its open chunk, and rows since then.

Rolling back within the open chunk is a length, as of keys and values. Behind that stand *anchors*, states in host
memory of earlier beginnings of chunks: a sequence can be cut to one of those, and what came after it is read again.
A prefill works on a memory row of its own, which becomes the sequence's when it ends, so that one that breaks off
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from offload_runtime_kernels.gated_delta import CHUNK_TOKENS, DeltaMemory, DeltaRows, DeltaShape, fold

from offload_runtime.cache.saved_blocks import SavedBlock
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import Rows
from offload_runtime.stream import DeviceBudget, current_device, upload

# Anchors of a sequence; the oldest go first.
_MOST_ANCHORS = 16


@dataclass(frozen=True)
class _Anchor:
    """What layers have behind so many tokens of a sequence, on the host: the state [H_v, D_k, D_v] fp32, and the inputs
    of the convolution before there, [taps - 1, C]."""

    length: int
    layers: Mapping[int, Sequence[torch.Tensor]]


@dataclass(eq=False)
class _CardStates:
    """Those of a card's layers, stacked; which memory row each slot has, [slots] int32; and where the running pass's
    rows stand, once a layer has asked for that."""

    layers: tuple[int, ...]
    stack: DeltaMemory
    rows: torch.Tensor
    running: tuple[Rows, DeltaRows] | None = None


def memory_tokens(window_tokens: int, shape: DeltaShape) -> int:
    """Return the tokens whose rows memory has room for: an open chunk, those of a pass, and what the convolution of the
    first of them reads."""
    return -(-(CHUNK_TOKENS - 1 + window_tokens + shape.taps - 1) // CHUNK_TOKENS) * CHUNK_TOKENS


def state_bytes(config: ModelConfig, layers: Sequence[int], dtype: torch.dtype, window_tokens: int) -> int:
    """Return what some layers keep of a sequence on the device."""
    shapes = [config.deltas[layer].shape for layer in layers if layer in config.deltas]
    return sum(
        one.nbytes
        for shape in shapes
        for one in _parts(DeltaMemory.empty(shape, 1, memory_tokens(window_tokens, shape), dtype, "meta"))
    )


def _parts(memory: DeltaMemory) -> list[torch.Tensor]:
    return [getattr(memory, field.name) for field in fields(memory)]


class DeltaStates:
    """The states of a model's gated delta layers, which all have one shape.

    Args:
        config: The model's shape.
        dtype: Of the model.
        batch: Sequences.
        window_tokens: Most tokens that a decoding pass puts behind the committed ones.
        budgets: Ledgers of the cards.
        owners: The card of each layer by its number.
        name: What to call them in the ledgers.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, batch: int, window_tokens: int,
        budgets: Sequence[DeviceBudget], owners: Sequence[int], name: str,
    ) -> None:  # fmt: skip
        (self._shape,) = {one.shape for one in config.deltas.values()}
        self._tokens, self._cards = memory_tokens(window_tokens, self._shape), list[_CardStates]()
        self._of_layers = dict[int, tuple[_CardStates, DeltaMemory]]()
        for card, budget in enumerate(budgets):
            own = tuple(layer for layer in config.deltas if owners[layer] == card)
            if not own:
                continue
            parts = list[torch.Tensor]()
            for part in _parts(DeltaMemory.empty(self._shape, batch + 1, self._tokens, dtype, "meta")):
                nbytes = len(own) * part.nbytes
                memory = budget.allocate(name, nbytes).zero_()
                parts.append(memory[:nbytes].view(part.dtype).view(len(own), *part.shape))
            rows = torch.arange(batch, dtype=torch.int32, device=budget.device)
            self._cards.append(_CardStates(own, DeltaMemory(*parts), rows))
            for number, layer in enumerate(own):
                self._of_layers[layer] = self._cards[-1], DeltaMemory(*(part[number] for part in parts))
        self._rows, self._spare = list(range(batch)), batch
        self._lengths, self._anchors = [0] * batch, [list[_Anchor]() for _ in range(batch)]
        self._is_lost = [False] * batch  # blocks have been restored without the states behind them
        self._prefilled: int | None = None

    def of_layer(self, layer: int, rows: Rows) -> tuple[DeltaMemory, DeltaRows, bool]:
        """What `LayerCache.delta` says."""
        card, memory = self._of_layers[layer]
        if card.running is None or card.running[0] is not rows:
            query, keeps = rows.query, self._prefilled is not None
            starts = query.committed
            assert starts is not None, "rows say how many tokens come before them"
            table = card.rows[query.slots.long()] if not keeps else torch.full_like(starts, self._spare)
            counts = (query.positions >= 0).sum(1, dtype=torch.int32)
            at = DeltaRows(table, starts, starts // CHUNK_TOKENS, counts, query.positions, query.ancestors)
            card.running = rows, at
        return memory, card.running[1], self._prefilled is not None

    def begin_window(self) -> None:
        """The next pass is a window, which is committed behind it as far as that goes."""
        self._prefilled = None

    def begin_prefill(self, slot: int) -> None:
        """The next pass is a prefill behind a sequence's tokens."""
        for card in self._cards:
            for part in _parts(card.stack):
                part[:, self._spare].copy_(part[:, self._rows[slot]])
        self._prefilled = slot

    def commit(self, slot: int, length: int, rows: Sequence[int] = ()) -> None:
        """A sequence has so many tokens: those of its prefill, or of a window, where they are a path through a tree the
        newest are these rows of it."""
        before = self._lengths[slot]
        self._lengths[slot] = length
        if self._prefilled == slot:
            self._rows[slot], self._spare = self._spare, self._rows[slot]
            self._prefilled = None
            for card in self._cards:
                card.rows.copy_(upload(torch.tensor(self._rows, dtype=torch.int32), card.rows.device))
            self.keep_anchor(slot)
            return
        self._move(slot, before, rows)
        if length // CHUNK_TOKENS > before // CHUNK_TOKENS:
            self._fold(slot, before // CHUNK_TOKENS)

    def _move(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Bring rows of a window behind so many tokens to where their positions belong."""
        moved = [number for number, row in enumerate(rows) if number != row]
        for card in self._cards if moved else ():
            source, target = (
                upload(torch.tensor([(start + one) % self._tokens for one in places]), card.rows.device)
                for places in ([rows[number] for number in moved], moved)
            )
            for part in _parts(card.stack)[1:]:
                part[:, self._rows[slot], target] = part[:, self._rows[slot], source]

    def _fold(self, slot: int, base: int) -> None:
        """Bring a sequence's states from the beginning of a chunk on to that of its open one."""
        for card in self._cards:
            with current_device(card.rows.device):
                numbers = torch.tensor([[self._rows[slot]], [self._lengths[slot]], [base], [0]], dtype=torch.int32)
                row, start, first, none = upload(numbers, card.rows.device)
                at = DeltaRows(row, start, first, none, row.view(1, 1)[:, :0])
                for layer in card.layers:
                    fold(self._of_layers[layer][1], at, self._shape)

    def saves(self, slot: int, length: int) -> int:
        """How many of the first `length` tokens of a sequence have a state behind them."""
        anchors = (one.length for one in self._anchors[slot])
        return max(one for one in (0, self._base(slot), *anchors) if one <= length)

    def keeps(self, slot: int, length: int) -> int:
        """To how many of the first `length` tokens of a sequence it could be cut: all in its open chunk, else those
        before an anchor."""
        return length if not self._is_lost[slot] and length >= self._base(slot) else self.saves(slot, length)

    def _base(self, slot: int) -> int:
        return 0 if self._is_lost[slot] else self._lengths[slot] // CHUNK_TOKENS * CHUNK_TOKENS

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything behind the first `length` tokens of a sequence, which it `keeps`."""
        self._prefilled = None
        if self._is_lost[slot] or length < self._base(slot):
            anchor = next((one for one in self._anchors[slot] if one.length == length), None)
            for card in self._cards:
                card.stack.states[:, self._rows[slot]] = 0
            if anchor is not None:
                self._write(slot, anchor)
        self._lengths[slot], self._is_lost[slot] = length, False
        self._anchors[slot] = [one for one in self._anchors[slot] if one.length <= length]

    def keep_anchor(self, slot: int) -> None:
        """Make the beginning of a sequence's open chunk an anchor, in place of the oldest of many; waits for it."""
        base = self._base(slot)
        if base and all(one.length != base for one in self._anchors[slot]):
            anchors = [*self._anchors[slot], self._anchor(slot, base)]
            self._anchors[slot] = anchors[-_MOST_ANCHORS:]

    def save(self, slot: int, length: int, to: SavedBlock) -> None:
        """Copy the states behind so many tokens, which it `saves`, to host memory."""
        anchor: _Anchor | None = None
        for layer in to.keys() & self._of_layers.keys():
            if anchor is None:
                found = (one for one in self._anchors[slot] if one.length == length)
                anchor = next(found, None) or self._anchor(slot, length)
            for target, source in zip(to[layer], anchor.layers[layer], strict=True):
                target.copy_(source)

    def restore(self, slot: int, length: int, saved: SavedBlock) -> None:
        """A sequence has so many tokens now, behind which a saved block has the states; else they are lost."""
        layers = {layer: saved[layer] for layer in saved.keys() & self._of_layers.keys()}
        self._lengths[slot], self._is_lost[slot] = length, len(layers) < len(self._of_layers)
        if not self._is_lost[slot]:
            assert not length % CHUNK_TOKENS, "states stand at the beginning of a chunk"
            self._write(slot, _Anchor(length, layers))
            self.keep_anchor(slot)

    def _anchor(self, slot: int, length: int) -> _Anchor:
        """What there is behind so many tokens, the beginning of the open chunk, in memory of its own."""
        layers, row = dict[int, Sequence[torch.Tensor]](), self._rows[slot]
        for card in self._cards:
            inputs = card.stack.inputs[:, row, self._before(length, card)].cpu()
            states = card.stack.states[:, row].to("cpu", copy=True)
            layers |= {layer: [states[number], inputs[number]] for number, layer in enumerate(card.layers)}
        return _Anchor(length, layers)

    def _write(self, slot: int, anchor: _Anchor) -> None:
        for card in self._cards:
            before = self._before(anchor.length, card)
            for layer in card.layers:
                memory, (state, inputs) = self._of_layers[layer][1], anchor.layers[layer]
                memory.states[self._rows[slot]].copy_(state)
                memory.inputs[self._rows[slot]][before] = inputs.to(before.device)

    def _before(self, length: int, card: _CardStates) -> torch.Tensor:
        """Where the inputs of the tokens before there lie that a convolution reads behind it."""
        places = [one % self._tokens for one in range(length + 1 - self._shape.taps, length)]
        return upload(torch.tensor(places), card.rows.device)
