"""What gated delta layers keep of sequences: of each a state at the beginning of its open chunk, and rows since then.

Rolling back within the open chunk is a length, as of keys and values. Behind that stand *anchors*, states in host
memory of earlier beginnings of chunks: a sequence can be cut to one of those, and what came after it is read again.
They are kept every 4096 tokens, where prompts end, and at the end of the last block of 256 tokens of each prompt and of
the newest answer, so that saved blocks have states. A prompt brings a sequence's states on as its pieces reach each
layer, and leaves anchors on the way; where it breaks off the sequence goes back to its last anchor.

Where rows are only guessed, by a draft or a retrieval verifier, *steps* write them, each behind what earlier ones have
written. Whatever a row is on the path of stands in memory by its inputs, a row of them for each cache position, and
the path is read again from the last committed row: it is never copied, and no node of a tree has a state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from offload_runtime_kernels.gated_delta import CHUNK_TOKENS, DeltaMemory, DeltaRows, DeltaShape, fold
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.cache.saved_blocks import BlockLayout, SavedBlock
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DeltaPass, DeltaPaths, Rows
from offload_runtime.stream.arena import HostArena, Registrar
from offload_runtime.stream.device import DeviceBudget, current_device, overwrite, upload

# A sequence keeps the anchors at multiples of this, which are few, and of the others so many, two a turn; the oldest of
# those go first.
ANCHOR_TOKENS, _MOST_OTHERS = 4096, 8


def anchors_within(start: int, end: int) -> list[int]:
    """Return where a prompt is to leave anchors that brings a sequence from `start` to `end` tokens: its last token is
    always read again, so there is none behind that."""
    every = range(-(-start // ANCHOR_TOKENS) * ANCHOR_TOKENS, end, ANCHOR_TOKENS)
    last = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return sorted({*every, *([last] if last >= start else ())} - {0})


@dataclass(frozen=True, eq=False)
class _Anchor:
    """What layers have behind so many tokens of a sequence, in host memory: by layer the state [H_v, D_k, D_v] fp32 and
    the inputs of the convolution before there, [taps - 1, C]. It may be `in_an_answer`, of which one is enough."""

    length: int
    in_an_answer: bool = False
    arenas: dict[int, HostArena] = field(default_factory=dict)


@dataclass(eq=False)
class _CardStates:
    """What a card keeps.

    Attributes:
        number: Of the card.
        layers: Its gated delta layers.
        stack: Their memory, stacked.
        numbers: Of each slot, as steps find them, its committed tokens and the chunk at whose beginning its state
            stands, [2, slots] int32.
        steps: What rows of steps brought, inputs and decays of all layers or one, each [L, slots * S + 1, C].
        running: Where the running pass's rows stand, once a layer has asked for that.
        free: Host memory of anchors that are gone, which copies on the card's stream may still read or write.
    """

    number: int
    layers: tuple[int, ...]
    stack: DeltaMemory
    numbers: torch.Tensor
    steps: list[torch.Tensor] = field(default_factory=list)
    running: tuple[Rows, DeltaRows, DeltaPaths | None] | None = None
    free: list[HostArena] = field(default_factory=list)


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


def step_bytes(
    config: ModelConfig, layers: Sequence[int], dtype: torch.dtype, window_tokens: int, *, batch: int,
    spare_positions: int | None,
) -> int:  # fmt: skip
    """Return what some layers keep of rows of steps: of each layer of a draft, or of one where there are no positions
    to spare."""
    shapes = [config.deltas[layer].shape for layer in layers if layer in config.deltas]
    return (
        sum(
            (batch * (memory_tokens(window_tokens, shape) + (spare_positions or 0)) + 1) * sum(_step_parts(shape))
            for shape in (shapes[:1] if spare_positions is None else shapes)
        )
        * dtype.itemsize
    )


def _step_parts(shape: DeltaShape) -> tuple[int, int]:
    """Elements of a row's inputs and of its decays."""
    return shape.channels, 2 * shape.value_heads


def anchor_bytes(config: ModelConfig, layers: Sequence[int], dtype: torch.dtype, capacity_tokens: int) -> int:
    """Return the host memory of the anchors that some layers keep of a sequence at most."""
    each = [_saved_layout(config, layer, dtype).nbytes for layer in layers if layer in config.deltas]
    return (capacity_tokens // ANCHOR_TOKENS + _MOST_OTHERS) * sum(map(HostArena.rounded, each))


def _saved_layout(config: ModelConfig, layer: int, dtype: torch.dtype) -> BlockLayout:
    """What an anchor has of a layer."""
    return BlockLayout({layer: config.deltas[layer].saved_tensors(dtype, whole=True)})


def _parts(memory: DeltaMemory) -> list[torch.Tensor]:
    return [getattr(memory, field.name) for field in fields(memory)]


class DeltaStates:
    """The states of a model's gated delta layers, which all have one shape.

    Args:
        config: The model's shape.
        dtype: Of the model.
        lengths: The committed tokens of every sequence, which the cache that these states belong to counts.
        window_tokens: Most tokens that a decoding pass, or steps one after the other, put behind the committed ones.
        budgets: Ledgers of the cards.
        owners: The card of each layer by its number.
        name: What to call them in the ledgers.
        spare_positions: Of a draft, those in its cache where nodes of trees are. All of its passes but prefills are
            steps, and what they have committed may be taken back until the next one begins. None: of no draft.
        registrar: Page-locks the anchors' memory, as it is made, so that no copy there keeps a pass waiting; what the
            system refuses stays pageable, and so does all of it where this is None.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, lengths: Sequence[int], window_tokens: int,
        budgets: Sequence[DeviceBudget], owners: Sequence[int], name: str, registrar: Registrar | None,
        spare_positions: range | None = None,
    ) -> None:  # fmt: skip
        (self._shape,) = {one.shape for one in config.deltas.values()}
        self._tokens, self._cards = memory_tokens(window_tokens, self._shape), list[_CardStates]()
        batch, self._lengths = len(lengths), lengths
        self._of_layers = dict[int, tuple[_CardStates, DeltaMemory]]()
        for card, budget in enumerate(budgets):
            own = tuple(layer for layer in config.deltas if owners[layer] == card)
            if not own:
                continue
            parts = list[torch.Tensor]()
            for part in _parts(DeltaMemory.empty(self._shape, batch, self._tokens, dtype, "meta")):
                nbytes = len(own) * part.nbytes
                memory = budget.allocate(name, nbytes).zero_()
                parts.append(memory[:nbytes].view(part.dtype).view(len(own), *part.shape))
            numbers = torch.zeros(2, batch, dtype=torch.int32, device=budget.device)
            self._cards.append(_CardStates(card, own, DeltaMemory(*parts), numbers))
            for number, layer in enumerate(own):
                self._of_layers[layer] = self._cards[-1], DeltaMemory(*(part[number] for part in parts))
        self._anchors = [list[_Anchor]() for _ in range(batch)]
        self._bases, self._numbers_host = [0] * batch, list[list[int]]()  # chunks at whose beginnings states stand
        self._registrar, self._arenas = registrar, list[HostArena]()
        self._saved = {layer: _saved_layout(config, layer, dtype) for layer in self._of_layers}
        # A prompt has broken off, or blocks have been restored without the states behind them.
        self._is_lost = [False] * batch
        # By slot whose prompt is read where that is to leave anchors, and those that it has left so far.
        self._wanted, self._left = dict[int, set[int]](), dict[int, list[_Anchor]]()
        self.lag = 0  # most chunks that the running pass' steps begin behind states
        self._spare_positions, self._dtype = spare_positions, dtype
        if spare_positions is not None:
            self.take_steps(budgets, f"{name} of steps", each_layer=True)

    @property
    def anchor_bytes(self) -> int:
        """Return the host memory that anchors have been given."""
        return sum(arena.nbytes for arena in self._arenas)

    @property
    def pinned_bytes(self) -> int:
        """Return what of it is page-locked."""
        return sum(arena.pinned_bytes for arena in self._arenas)

    def take_over(self, source: DeltaStates, slot: int) -> None:
        """Let a sequence have here what it has in `source`, which is of the same layers and as many tokens, and whose
        states stand at the beginning of its open chunk; enqueued on the current stream of each card."""
        self._bases[slot], self._is_lost[slot] = self._lengths[slot] // CHUNK_TOKENS, False
        for own, other in zip(self._cards, source._cards, strict=True):
            with current_device(own.numbers.device):
                for part, new in zip(_parts(own.stack), _parts(other.stack), strict=True):
                    part[:, slot].copy_(new[:, slot])

    def close(self) -> None:
        """Give host memory back, to or from which nothing is copied any more."""
        for arena in self._arenas:
            arena.close()

    def take_steps(self, budgets: Sequence[DeviceBudget], name: str, *, each_layer: bool) -> None:
        """Reserve what steps need: of each layer where a row may stand behind one of an earlier step."""
        positions = self._tokens + len(self._spare_positions or ())
        for card in self._cards:
            count, rows = len(card.layers) if each_layer else 1, card.numbers.shape[1] * positions + 1
            for elements in _step_parts(self._shape):
                nbytes = count * rows * elements * self._dtype.itemsize
                memory = budgets[card.number].allocate(name, nbytes).view(self._dtype).zero_()
                card.steps.append(memory.view(count, rows, elements))

    def of_layer(self, layer: int, rows: Rows, *, in_step: bool) -> DeltaPass:
        """Return what `LayerCache.delta` says. Rows `in_step` are guesses, whose paths are read again from the
        committed tokens."""
        card, memory = self._of_layers[layer]
        prompt = rows.prompt
        if card.running is None or card.running[0] is not rows:
            query, starts = rows.query, rows.query.committed
            if (in_step or self._spare_positions is not None) and prompt is None:
                card.running = rows, *self._paths(card, rows)
            else:
                assert starts is not None, "rows say how many tokens come before them"
                table = query.slots if prompt is None else torch.full_like(starts, prompt[0])
                counts = (query.positions >= 0).sum(1, dtype=torch.int32)
                at = DeltaRows(table, starts, starts // CHUNK_TOKENS, counts, query.positions, query.ancestors)
                card.running = rows, at, None
        if prompt is not None and prompt[1] in self._wanted[prompt[0]]:
            slot, start = prompt
            anchor = next((one for one in self._left[slot] if one.length == start), None)
            if anchor is None:
                anchor = self._make_room(slot, start)
                self._left[slot].append(anchor)
            self._copy(layer, slot, anchor)
        _, at, paths = card.running
        if paths is not None and paths.kept is not None:
            number = card.layers.index(layer) if len(card.steps[0]) > 1 else 0
            paths = replace(paths, memory=tuple(one[number] for one in card.steps))
        return DeltaPass(memory, at, prompt is not None, paths)

    def _paths(self, card: _CardStates, rows: Rows) -> tuple[DeltaRows, DeltaPaths | None]:
        """Where the rows of a step stand, which only the device knows. Captured: no tensor of the host."""
        query = rows.query
        positions, slots = query.positions, query.slots.long()
        (batch, width), device = positions.shape, positions.device
        table, (lengths, bases) = query.slots, card.numbers[:, slots]
        there, sequences = positions >= 0, torch.arange(batch, device=device)[:, None]
        if query.ancestors is None or query.committed is None:
            # In a row, with padding before it or behind it.
            counts, steps = there.sum(1, dtype=torch.int32), torch.arange(width, device=device)
            first = there.int().argmax(1, keepdim=True)
            starts, paths = positions.gather(1, first)[:, 0], None
            if width > 1:
                taken = (steps + first).clamp_max(width - 1) + sequences * width
                paths = DeltaPaths(taken.flatten(), ((steps - first).clamp_min(0) + sequences * width).flatten())
        else:
            # Each row at the end of its path from the last row on that is there for good, or an earlier step has
            # written where it belongs.
            starts, depth = torch.maximum(query.committed, lengths), query.ancestors.shape[2]
            steps, skipped = torch.arange(depth, device=device), (starts - query.committed).long()[:, None, None]
            places = query.ancestors.gather(2, (steps + skipped).clamp_max(depth - 1).expand(batch, width, depth))
            counts = (positions + 1 - starts[:, None]).where(there, 0).clamp(0, depth).flatten()
            own = torch.arange(batch * width, device=device) * depth + (counts - 1).clamp_min(0)
            taken = self._places(places, slots[:, None, None])
            kept = self._places(rows.rope.cache_positions.view(batch, width), slots[:, None])
            kept = kept.where(there, len(card.steps[0][0]) - 1)  # padding leaves nothing that is read
            paths = DeltaPaths(taken.flatten(), own, kept=kept.flatten())
            table, starts, bases = (one[:, None].expand(batch, width).flatten() for one in (table, starts, bases))
        starts, bases = (one.where(counts > 0, 0).contiguous() for one in (starts, bases))
        width = len(steps)
        of_rows = starts[:, None] + torch.arange(width, dtype=torch.int32, device=device)
        return DeltaRows(table.contiguous(), starts, bases, counts, of_rows, lag=self.lag), paths

    def _places(self, cache_positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Where what rows of steps brought lies, by their cache positions: int64 of the same shape."""
        size, places = self._tokens, cache_positions.long() % self._tokens
        if self._spare_positions:
            spare = cache_positions.long() - self._spare_positions.start
            size, places = size + len(self._spare_positions), (spare + size).where(spare >= 0, places)
        return slots * size + places

    def begin(self, ends: Mapping[int, int], prompts: Collection[int]) -> None:
        """The next pass brings some sequences to so many tokens: prompts, of which a piece begins at each anchor
        within, and windows, or steps do one after the other. What they have by now is theirs for good."""
        for left in self._left.values():  # of prompts that broke off
            self._release(left)
        for slot in ends:
            self._settle(slot)
        self.lag = max([0, *((end - 1) // CHUNK_TOKENS - self._bases[slot] for slot, end in ends.items())])
        self._wanted, self._left = {}, {slot: [] for slot in prompts}
        for slot in prompts:
            wanted = anchors_within(self._lengths[slot], ends[slot])
            self._wanted[slot] = {*wanted}.difference(one.length for one in self._anchors[slot])
            self._is_lost[slot] = True  # until all of it is there
        numbers = [[*self._lengths], [*self._bases]]
        if self._cards[0].steps and numbers != self._numbers_host:
            self._numbers_host = numbers
            for card in self._cards:
                with current_device(card.numbers.device):
                    overwrite(card.numbers, torch.tensor(numbers, dtype=torch.int32))

    def commit(self, slot: int, before: int, rows: Sequence[int] = ()) -> None:
        """A sequence has more tokens than `before`: those of its prompt, or of a window, where they are a path through
        a tree the newest are these rows of it."""
        if slot in self._left:
            self._anchors[slot] += self._left.pop(slot)
            self._bases[slot], self._is_lost[slot] = self._lengths[slot] // CHUNK_TOKENS, False
            self.keep_anchor(slot)
            return
        self._move(slot, before, rows)
        if self._spare_positions is None:
            self._settle(slot)

    def _settle(self, slot: int) -> None:
        """Bring a sequence's states on to the beginning of its open chunk."""
        length, end = self._lengths[slot], (self._bases[slot] * CHUNK_TOKENS // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        # A window may go on behind the ends of blocks, one of which may be where states are always kept.
        for until in (*range(end, length, BLOCK_TOKENS), length):
            if self._is_lost[slot] or until // CHUNK_TOKENS <= self._bases[slot]:
                continue
            self._fold(slot, until)
            if not until % BLOCK_TOKENS:
                others = (one for one in self._anchors[slot] if one.length % ANCHOR_TOKENS)
                self._drop(slot, [one for one in others if one.in_an_answer])
                self.keep_anchor(slot, in_an_answer=True)

    def _move(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Bring rows of a window behind so many tokens to where their positions belong."""
        moved = [number for number, row in enumerate(rows) if number != row]
        for card in self._cards if moved else ():
            source, target = (
                upload(torch.tensor([(start + one) % self._tokens for one in places]), card.numbers.device)
                for places in ([rows[number] for number in moved], moved)
            )
            for part in _parts(card.stack)[1:]:
                part[:, slot, target] = part[:, slot, source]

    def _fold(self, slot: int, until: int) -> None:
        """Bring a sequence's states on to the beginning of the chunk that its first `until` tokens end in."""
        base, self._bases[slot] = self._bases[slot], until // CHUNK_TOKENS
        for card in self._cards:
            with current_device(card.numbers.device):
                for chunk in range(base, self._bases[slot]):
                    numbers = [[slot], [(chunk + 1) * CHUNK_TOKENS], [chunk], [0]]
                    row, start, first, none = upload(torch.tensor(numbers, dtype=torch.int32), card.numbers.device)
                    at = DeltaRows(row, start, first, none, row.view(1, 1)[:, :0])
                    for layer in card.layers:
                        fold(self._of_layers[layer][1], at, self._shape)

    def saves(self, slot: int, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence have a state behind them."""
        anchors = (one.length for one in self._anchors[slot])
        return max(one for one in (0, self._base(slot), *anchors) if one <= length)

    def keeps(self, slot: int, length: int) -> int:
        """To how many of the first `length` tokens of a sequence it could be cut: all in its open chunk, else those
        before an anchor."""
        return length if not self._is_lost[slot] and length >= self._base(slot) else self.saves(slot, length)

    def _base(self, slot: int) -> int:
        return 0 if self._is_lost[slot] else self._bases[slot] * CHUNK_TOKENS

    def truncate(self, slot: int) -> None:
        """Forget everything behind a sequence's tokens, which have become fewer, as many as it `keeps`."""
        self._release(self._left.pop(slot, []))
        length = self._lengths[slot]
        if self._is_lost[slot] or length < self._base(slot):
            for card in self._cards:
                card.stack.states[:, slot] = 0
            if (anchor := self._anchor_at(slot, length)) is not None:
                self._write(slot, length, self._views(anchor), non_blocking=True)
            self._bases[slot] = length // CHUNK_TOKENS
        self._is_lost[slot] = False
        self._drop(slot, [one for one in self._anchors[slot] if one.length > length])

    def keep_anchor(self, slot: int, *, in_an_answer: bool = False) -> None:
        """Make where a sequence's states stand an anchor; waits for no device."""
        base = self._base(slot)
        if base and self._anchor_at(slot, base) is None:
            anchor = self._make_room(slot, base, in_an_answer=in_an_answer)
            for layer in self._of_layers:
                self._copy(layer, slot, anchor)
            self._anchors[slot].append(anchor)

    def save(self, slot: int, length: int, to: SavedBlock) -> None:
        """Copy the states behind so many tokens, which it `saves`, to host memory. Anchors have arrived there."""
        anchor, layers = self._anchor_at(slot, length), to.keys() & self._of_layers.keys()
        assert not layers or self.saves(slot, length) == length, "a whole block ends where there are states"
        kept = {} if anchor is None else self._views(anchor)
        for layer in layers:
            for target, source in zip(to[layer], kept.get(layer) or self._at(layer, slot, length), strict=True):
                target.copy_(source)

    def restore(self, slot: int, length: int, saved: SavedBlock) -> None:
        """A sequence is to have so many tokens, behind which a saved block has the states; else they are lost."""
        layers = {layer: saved[layer] for layer in saved.keys() & self._of_layers.keys()}
        self._is_lost[slot] = len(layers) < len(self._of_layers)
        self._bases[slot] = length // CHUNK_TOKENS
        if not self._is_lost[slot]:
            assert not length % CHUNK_TOKENS, "states stand at the beginning of a chunk"
            self._write(slot, length, layers)
            self.keep_anchor(slot)

    def _write(self, slot: int, length: int, layers: SavedBlock, *, non_blocking: bool = False) -> None:
        """Bring a sequence's states to those of the host that belong behind so many tokens."""
        for layer, sources in layers.items():
            for target, source in zip(self._at(layer, slot, length), sources, strict=True):
                target.copy_(source, non_blocking=non_blocking)

    def _at(self, layer: int, slot: int, length: int) -> list[torch.Tensor]:
        """What a slot has of a layer behind so many tokens, the beginning of a chunk: its state, and the inputs
        of the tokens before there that a convolution reads behind it."""
        memory, end = self._of_layers[layer][1], (length - 1) % self._tokens + 1  # a multiple of 64
        return [memory.states[slot], memory.inputs[slot, end + 1 - self._shape.taps : end]]

    # --- anchors

    def _anchor_at(self, slot: int, length: int) -> _Anchor | None:
        return next((one for one in self._anchors[slot] if one.length == length), None)

    def _make_room(self, slot: int, length: int, *, in_an_answer: bool = False) -> _Anchor:
        """A new anchor of a sequence, without memory yet, in place of the oldest one that has to go for it."""
        others = [one for one in (*self._anchors[slot], *self._left.get(slot, ())) if one.length % ANCHOR_TOKENS]
        if length % ANCHOR_TOKENS and len(others) == _MOST_OTHERS:
            self._drop(slot, others[:1])
        return _Anchor(length, in_an_answer)

    def _copy(self, layer: int, slot: int, anchor: _Anchor) -> None:
        """Copy a layer's state from a slot to an anchor, on the current stream of its card."""
        card = self._of_layers[layer][0]
        anchor.arenas[layer] = card.free.pop() if card.free else self._new_arena(layer, card)
        for target, source in zip(self._views(anchor)[layer], self._at(layer, slot, anchor.length), strict=True):
            target.copy_(source, non_blocking=True)

    def _new_arena(self, layer: int, card: _CardStates) -> HostArena:
        """Host memory for one layer of an anchor: of a small piece each, page-locking takes less than a layer does."""
        with torch.inference_mode(False), current_device(card.numbers.device):
            arena = HostArena(self._saved[layer].nbytes, name="states to go back to")
            self._arenas.append(arena)
            if self._registrar is not None:
                arena.lock(self._registrar)
        return arena

    def _views(self, anchor: _Anchor) -> SavedBlock:
        return {layer: self._saved[layer].views(arena.buffer)[layer] for layer, arena in anchor.arenas.items()}

    def _drop(self, slot: int, anchors: Sequence[_Anchor]) -> None:
        self._anchors[slot] = [one for one in self._anchors[slot] if one not in anchors]
        self._release(anchors)

    def _release(self, anchors: Sequence[_Anchor]) -> None:
        """Let other anchors have the memory of these."""
        for layer, arena in (pair for one in anchors for pair in one.arenas.items()):
            self._of_layers[layer][0].free.append(arena)
