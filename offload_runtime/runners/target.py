"""Runners: tokens in, logits or samples out. They join weights in motion, decoder and cache into passes.

A pass is layer-major: every piece of its rows goes through layer 0, then layer 1, …, so that each streamed layer
crosses the link once per pass, however long the prompt is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import torch
from offload_runtime_kernels.attention_triton import WORKSPACE_BYTES as SPLITS_WORKSPACE_BYTES
from offload_runtime_kernels.copy_words import copy_words

from offload_runtime.copy.schedule import LayerStreamer
from offload_runtime.grammar import token_masks
from offload_runtime.kv import KVCache
from offload_runtime.memory import (
    Card,
    LayerPartition,
    Transfer,
    aligned_bytes,
    current_device,
    pack,
    pack_words,
    packed_words,
    receive,
    send,
    transfer,
    unpack,
    upload,
)
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import LayerCache, Weights
from offload_runtime.models.rope import RowFrequencies
from offload_runtime.runners.decoder import Decoder
from offload_runtime.runners.graphs import CAPTURED_ROWS, StepGraphs, captured_pass_shape
from offload_runtime.runners.rows import PassRows, PassShape, RowBuilder, Window, paths_below_roots
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.trace import COMPUTE, TraceRecorder

Layers = Iterable[tuple[int, Weights]]  # of one pass: (layer index, its weights on the device), in order
OnLayer = Callable[[int, int], None]  # called with (layers done, layers) as the host enqueues them


# By kind of device: prompts are worked on in pieces of so many tokens, which bounds the activations and changes no bit.
PREFILL_CHUNK_TOKENS = {"cuda": 1024, "cpu": 256}
# Fragmentation of the allocator and rounding of its blocks, as a share of the workspace.
_WORKSPACE_MARGIN = 1.25
# cuBLAS takes 32 MiB a handle on Hopper, 8 MiB elsewhere; once for the compute stream, once for cublasLt.
_LIBRARY_WORKSPACE_BYTES = 72 << 20


def most_prompt_tokens(chunk_tokens: int, context_tokens: int) -> int:
    """Of all prompts that a pass reads, which has room for the longest one."""
    return max(chunk_tokens, context_tokens)


def workspace_bytes(
    config: ModelConfig, element_bytes: int, *, chunk_tokens: int, context_tokens: int, rows: int, sampled_rows: int,
    has_head: bool = True, mixes: bool = False,
) -> int:  # fmt: skip
    """Device bytes of the activations of the largest pass.

    Args:
        config: The model's shape.
        element_bytes: Of its dtype.
        chunk_tokens: Pieces of a prompt.
        context_tokens: Longest prompt (its residual stream is held through a layer-major prefill).
        rows: Of a decoding window.
        sampled_rows: Of these, rows that tokens are sampled from at once.
        has_head: Whether logits are made here.
        mixes: Whether a pass reads several prompts beside windows.
    """
    tokens = rows + most_prompt_tokens(chunk_tokens, context_tokens) if mixes else context_tokens
    stream = tokens * config.hidden_size
    chunk = max(min(chunk_tokens, context_tokens), rows) * config.row_elements
    angles = 4 * tokens * config.num_angles * 4  # cos, sin and their making, fp32
    # fp32 copies while sampling with filters
    logits = (rows * element_bytes + sampled_rows * 6 * 4) * config.vocab_size if has_head else 0
    passing = chunk * element_bytes + angles + logits + 2 * SPLITS_WORKSPACE_BYTES
    return stream * element_bytes + int(_WORKSPACE_MARGIN * passing) + _LIBRARY_WORKSPACE_BYTES


class Prompt(NamedTuple):
    """Tokens, at least one, that a pass puts behind the committed ones of a sequence; only the last one decides."""

    slot: int
    tokens: Sequence[int]


class Decision(NamedTuple):
    """What a pass over windows and prompts says, which has been enqueued.

    `logits` [at least N, V] are on the compute device, until the next pass begins. `firsts` are the rows of the
    windows' first tokens, behind which those of the others follow, and of the prompts' last ones. `tokens` waits
    for the current stream, and gives the one behind each row, -1 for NaN; it is to be called before the next pass.
    """

    logits: torch.Tensor
    firsts: Sequence[int]
    tokens: Callable[[], list[int]]


@dataclass(eq=False)
class ModelRunner:
    """Runs passes of one model.

    Attributes:
        decoder: The maths.
        streamer: The weights, resident or streamed.
        cache: Keys and values; the runner owns what is committed to it.
        rows: Builder of the pass's rows.
        chunk_tokens: Pieces that a prompt is worked on in.
        recorder: Whoever wants a trace of the passes sets it.
        captured: Runs windows as CUDA graphs; set where all that they need is on the device and there is room for it.
    """

    decoder: Decoder
    streamer: LayerStreamer
    cache: KVCache
    rows: RowBuilder
    chunk_tokens: int
    recorder: TraceRecorder | None = None
    captured: CapturedPasses | None = None

    @torch.inference_mode()
    def prefill(
        self, slot: int, tokens: Sequence[int], on_layer: OnLayer | None = None, *,
        layers: Layers | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Put a prompt, or the rest of one, into the cache and commit it.

        Args:
            sequence: Batch row in the cache; its committed tokens come before these.
            tokens: At least one.
            on_layer: Told of each layer.
            layers: The weights of the first layers, where the pass is to end there; None: of all.

        Returns:
            Logits of the last token, [1, V] on the compute device.

        Raises:
            ContextLengthError, BudgetError: The cache has no room. Nothing was committed.
        """
        if self.recorder is not None:
            self.recorder.begin_pass(self.streamer.bytes_begun)
        self.cache.begin_prefill(slot, len(tokens))
        pieces = self._pieces(Prompt(slot, tokens), row=0)
        (residual,) = self._run(pieces, [len(pieces) - 1], on_layer, layers)
        logits = self.decoder.head(residual[-1:])
        self.cache.end_prefill(slot, len(tokens))
        self._end([], [len(tokens)])
        return logits

    def _run(
        self, pieces: list[PassRows], kept: Sequence[int], on_layer: OnLayer | None, layers: Layers | None = None
    ) -> list[torch.Tensor]:
        """Residual streams behind the last layer, [N, H], of the pieces of these numbers."""
        in_blocks = layers is None and self.decoder.partition.in_blocks
        if in_blocks and not self.streamer.num_streamed and not self.cache.prefills_by_layer:
            with _over_cards(self.decoder.partition):
                return _run_blocks(self.decoder, self.streamer, self.cache, pieces, kept, on_layer)
        layers = self.streamer.layers() if layers is None else layers
        return _run_layers(self.decoder, layers, self.cache, pieces, kept, on_layer)

    def _pieces(self, prompt: Prompt, *, row: int) -> list[PassRows]:
        """The rows of a prompt, which the pass calls batch row `row` of the cache."""
        assert prompt.tokens
        start, step, tokens = self.cache.length(prompt.slot), self.chunk_tokens, prompt.tokens
        return [
            self.rows.build(
                [Window(tuple(tokens[at : at + step]))], [start + at], [row], prompt_length=start + len(tokens)
            )
            for at in range(0, len(tokens), step)
        ]  # fmt: skip

    @property
    def most_prompt_tokens(self) -> int:
        """Of all prompts that a pass reads."""
        return most_prompt_tokens(self.chunk_tokens, self.cache.capacity_tokens)

    @torch.inference_mode()
    def read(
        self, prompts: Sequence[Prompt], windows: Sequence[Window] = (), slots: Sequence[int] = (),
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """One pass that puts prompts into the cache and commits them, and over windows of other sequences, which it
        does not. More than one prompt alone takes a cache that `mixes`.

        Args:
            prompts: At least one; of several no more than `most_prompt_tokens`.
            windows: As of `verify`, and `sequences`.
            on_layer: As of `prefill`.

        Returns:
            Logits [N + P, V] on the compute device, a row for each token of the windows and for the last of each
            prompt.

        Raises:
            ContextLengthError, BudgetError: The cache has no room. Nothing was committed.
        """
        if len(prompts) == 1 and not windows:
            return self.prefill(*prompts[0], on_layer)
        assert self.cache.mixes
        widths, lengths = ([len(one.tokens) for one in many] for many in (windows, prompts))
        committed = self._begin([*slots, *(prompt.slot for prompt in prompts)], widths + lengths)
        pieces = [self._pieces(prompt, row=prompt.slot) for prompt in prompts]
        last = [count - 1 for count in accumulate(map(len, pieces))]
        if windows:
            pieces.append([self.rows.build(windows, committed[: len(windows)], slots)])
            last.append(last[-1] + 1)
        residuals = self._run([*chain(*pieces)], last, on_layer)
        decisive = [residual[-1:] for residual in residuals[: len(prompts)]]
        if windows:
            height = len(residuals[-1])
            decisive.insert(0, _present(residuals[-1], range(0, height, height // len(windows)), windows))
        logits = self.decoder.head(torch.cat(decisive))
        for prompt in prompts:
            self.cache.commit(prompt.slot, len(prompt.tokens))
        self._end(widths, lengths)
        return logits

    @torch.inference_mode()
    def verify(self, windows: Sequence[Window], slots: Sequence[int]) -> torch.Tensor:
        """One pass over a window per sequence; nothing is committed.

        Args:
            windows: Tokens behind each sequence's committed ones.
            sequences: Their batch rows in the cache, all different.

        Returns:
            Logits [N, V] on the compute device, a row for each token, those of one window behind those of the other.

        Raises:
            ContextLengthError, BudgetError: The cache has no room for a window.
        """
        lengths = [len(window.tokens) for window in windows]
        committed = self._begin(slots, lengths)
        captured, recorder = self.captured, self.recorder
        decision = None if captured is None else captured.run(windows, committed, slots, recorder=recorder)
        if decision is not None:
            logits = _present(decision.logits, decision.firsts, windows)
        else:
            logits = self.run_rows(self.rows.build(windows, committed, slots))
            if len(logits) > sum(lengths):
                logits = _present(logits, range(0, len(logits), len(logits) // len(windows)), windows)
        self._end(lengths, [])
        return logits

    def decide(
        self, windows: Sequence[Window], slots: Sequence[int], sampling: SlotSampling,
        prompts: Sequence[Prompt] = (), on_layer: OnLayer | None = None,
    ) -> Decision:  # fmt: skip
        """One pass over a window per sequence, and the token behind each of its rows; nothing of them is committed.
        Enqueued on the current stream; never waits. Prompts of other sequences may be read by the same pass, and the
        token behind each is decided.

        Arguments and errors as of `verify` and `read`, and:

        Args:
            sampling: How the tokens of every sequence are chosen; where there are penalties it has seen all tokens up
                to the first of each window, and so have the matchers of grammars. Where only temperature and noise
                count they are part of a captured pass; filters, penalties and masks are kernels of many kinds, each of
                which would need graphs of its own.
        """
        if prompts:
            logits = self.read(prompts, windows, slots, on_layer)
            committed = [self.cache.length(slot) for slot in slots]
            committed += [self.cache.length(prompt.slot) - 1 for prompt in prompts]
            windows, owners = [*windows, *(Window((0,)) for _ in prompts)], (prompt.slot for prompt in prompts)
            return decided(logits, sampling, windows, [*slots, *owners], committed)
        if self.captured is not None and sampling.is_plain:
            lengths = [len(window.tokens) for window in windows]
            committed = self._begin(slots, lengths)
            decision = self.captured.run(windows, committed, slots, sampling, self.recorder)
            if decision is not None:
                self._end(lengths, [])
                return decision
        logits = self.verify(windows, slots)
        return decided(logits, sampling, windows, slots, [self.cache.length(slot) for slot in slots])

    def _begin(self, slots: Sequence[int], lengths: list[int]) -> list[int]:
        """A pass of so many tokens behind sequences begins: the committed tokens of each."""
        if self.recorder is not None:
            self.recorder.begin_pass(self.streamer.bytes_begun)
        self.cache.begin_window(slots, lengths)
        return [self.cache.length(slot) for slot in slots]

    def _end(self, widths: list[int], prompts: list[int]) -> None:
        """It has been enqueued, with windows and prompts of so many tokens."""
        if self.recorder is not None:
            kind, tokens, others = ("verify", widths, prompts) if widths else ("prefill", prompts, [])
            self.recorder.end_pass(kind, tokens, self.streamer.bytes_begun, others)

    @torch.inference_mode()
    def run_rows(self, rows: PassRows) -> torch.Tensor:
        """One pass over prepared rows: logits [N, V]. Commits nothing and never waits for the device."""
        return window_pass(self.decoder, self.streamer.layers(), self.cache, rows)


def window_pass(decoder: Decoder, layers: Layers, cache: LayerCache, rows: PassRows) -> torch.Tensor:
    """One decoding pass over prepared rows. Commits nothing and never waits for the device.

    Args:
        decoder: The maths.
        layers: The weights, as one pass meets them.
        cache: Keys and values.
        rows: Which tokens, and where.

    Returns:
        Logits [B * T, V].
    """
    (residual,) = _run_layers(decoder, layers, cache, [rows], [0])
    return decoder.head(residual)


def decided(
    logits: torch.Tensor, sampling: SlotSampling, windows: Sequence[Window], slots: Sequence[int],
    committed: Sequence[int],
) -> Decision:  # fmt: skip
    """The token behind each row of logits [N, V] of windows behind so many committed tokens.

    A row's noise is that of the position behind it, so siblings share it, and its penalties and its grammar's mask are
    by the tokens of its own path. Of these `sampling` has seen all up to the first of each window, behind which the
    others are. Masks are computed now, while the device works on the logits.
    """
    positions = [start + 1 + depth for window, start in zip(windows, committed, strict=True) for depth in window.depths]
    owners = [slot for window, slot in zip(windows, slots, strict=True) for _ in window.tokens]
    below = paths_below_roots(windows) if sampling.adjustments.penalised else None
    parts = [positions, owners, *([] if below is None else [below])]
    rows = unpack(upload(pack(parts), logits.device), [len(part) for part in parts])
    paths = None if below is None else rows[2].view(len(positions), -1)
    firsts = [0, *accumulate(len(window.tokens) for window in windows[:-1])]
    matchers, masks = [sampling.matchers.get(slot) for slot in slots], None
    if any(matchers):
        masks = token_masks(matchers, [(window.tokens, window.all_parents) for window in windows], logits.device)
    return Decision(logits, firsts, sample(logits, sampling, rows[0], rows[1], paths, masks).tolist)


def _present(rows: torch.Tensor, firsts: Sequence[int], windows: Sequence[Window]) -> torch.Tensor:
    """A copy of the rows that windows have tokens for, [N, …] of [at least B * T, …], by their first rows."""
    pairs = zip(firsts, windows, strict=True)
    return torch.cat([rows[first : first + len(window.tokens)] for first, window in pairs])


class CapturedPasses:
    """Passes over windows of a model that has everything on the device, as CUDA graphs.

    Launched one by one, the kernels of a layer take a host longer than a layer of few rows takes the device. Each shape
    of a pass is a graph, and windows are filled up to the next one.

    Args:
        decoder: The maths.
        layers: The weights: (layer index, named weights), in order.
        cache: Keys and values, all on the device.
        rows: Builder of the passes' rows.
    """

    def __init__(self, decoder: Decoder, layers: Layers, cache: KVCache, rows: RowBuilder) -> None:
        self._decoder, self._layers, self._cache, self._rows = decoder, layers, cache, rows
        self._device, most = rows.rope.device, PassShape(CAPTURED_ROWS, 1, CAPTURED_ROWS, 0)
        self.graphs = StepGraphs(self._device)
        # What passes read and write; the tensors never move. A pass begins by fetching what the host has written to
        # page-locked memory, and ends by writing its tokens there.
        locked, words = self._device.type == "cuda", packed_words(most.sizes)
        self._words = torch.zeros(words, dtype=torch.int32, device=self._device)
        self._words_pinned = torch.zeros(words, dtype=torch.int32, pin_memory=locked)
        self._tokens_pinned = torch.zeros(CAPTURED_ROWS, dtype=torch.int64, pin_memory=locked)
        self._words_host, self._tokens_host = self._words_pinned.numpy(), self._tokens_pinned.numpy()
        self._is_running = False  # the last pass may not have fetched its words yet
        self._frequencies = RowFrequencies(rows.rope, CAPTURED_ROWS)
        self._logits = decoder.final_norm.new_empty(CAPTURED_ROWS, decoder.config.vocab_size)

    def run(
        self, windows: Sequence[Window], committed: Sequence[int], slots: Sequence[int],
        sampling: SlotSampling | None = None, recorder: TraceRecorder | None = None,
    ) -> Decision | None:  # fmt: skip
        """A pass over windows behind so many committed tokens, which the cache has room for. A trace has its layers as
        one span.

        Args:
            windows: As of `ModelRunner.verify`, and `sequences`.
            committed: Of each of the sequences.
            sampling: As of `ModelRunner.decide`; a plain one. None: no tokens are asked for.
            recorder: Of a trace, if there is one.

        Returns:
            Windows have rows of their own that fill them up; None for passes of more than `CAPTURED_ROWS`, which are
            not captured.
        """
        shape = captured_pass_shape(PassShape.of(windows, committed), self._cache.max_tokens_with_draft)
        if shape.num_rows > CAPTURED_ROWS:
            return None
        assert sampling is None or sampling.is_plain
        parts = shape.lay_out(windows, committed, slots)
        words = pack_words(parts)
        if self._is_running:  # nobody has asked for its tokens
            self._wait()
        self._is_running = True
        self._words_host[: len(words)] = words
        self._frequencies.set_rows(parts[1])
        with recorder.span("all layers", row=COMPUTE, layer=None, streamed=False) if recorder else nullcontext():
            self.graphs.run((shape, sampling), partial(self._pass, shape, sampling))
        firsts = range(0, shape.num_rows, shape.width)
        return Decision(self._logits, firsts, partial(self._tokens, shape.num_rows))

    @torch.inference_mode()
    def _pass(self, shape: PassShape, sampling: SlotSampling | None) -> None:
        """Captured: no tensor of the host but those that never move."""
        count, words = shape.num_rows, packed_words(shape.sizes)
        copy_words(self._words_pinned[:words], self._words[:words])
        rows = self._rows.rows(shape, self._words, self._frequencies.tensor[:count])
        logits = window_pass(self._decoder, self._layers, self._cache, rows)
        self._logits[:count].copy_(logits)
        if sampling is not None:
            tokens = sample(logits, sampling, rows.query.positions.view(-1) + 1, rows.rope.slots)
            copy_words(tokens.view(torch.int32), self._tokens_pinned[:count].view(torch.int32))

    def _tokens(self, count: int) -> list[int]:
        """Behind the first rows of the pass that was run last. Waits for it."""
        self._wait()
        found: list[int] = self._tokens_host[:count].tolist()
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._is_running = False


def _run_layers(
    decoder: Decoder, layers: Layers, cache: LayerCache, pieces: list[PassRows], kept: Sequence[int],
    on_layer: OnLayer | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Residual streams behind the last layer, [N, H], of the pieces of these numbers."""
    on_layer = on_layer or (lambda done, layers: None)
    if len(decoder.partition.cards) > 1:
        with _over_cards(decoder.partition):
            return _run_layers_on_cards(decoder, layers, cache, pieces, kept, on_layer)
    if len(pieces) == 1:
        residuals = [decoder.embed(pieces[0])]
    else:
        residuals = list(_embedded(decoder, pieces, _residual_buffers(decoder, pieces, decoder.final_norm.device)))
    for index, weights in layers:
        for residual, rows in zip(residuals, pieces, strict=True):
            decoder.layer(index, weights, residual, rows, cache)
        on_layer(index + 1, decoder.config.num_layers)
    return [residuals[piece] for piece in kept]


def _residual_buffers(decoder: Decoder, pieces: list[PassRows], device: torch.device) -> Sequence[torch.Tensor]:
    """Where the residual stream of each piece lies on a device, uint8: all of them one piece of memory, of which the
    allocator loses nothing in between."""
    row_bytes = decoder.config.hidden_size * decoder.final_norm.dtype.itemsize
    lengths = [aligned_bytes(len(rows.tokens) * row_bytes) for rows in pieces]
    return torch.empty(sum(lengths), dtype=torch.uint8, device=device).split(lengths)


def _embedded(decoder: Decoder, pieces: list[PassRows], destinations: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The residual streams of the pieces at the bottom, [N, H], one after the other in this memory."""
    for rows, destination in zip(pieces, destinations, strict=True):
        embedded = decoder.embed(rows)
        yield destination[: embedded.nbytes].view(embedded.dtype).view(embedded.shape).copy_(embedded)


def _run_layers_on_cards(
    decoder: Decoder, layers: Layers, cache: LayerCache, pieces: list[PassRows], kept: Sequence[int], on_layer: OnLayer
) -> list[torch.Tensor]:
    """The same where the layers are on several cards.

    Where the next layer is on another card a piece departs as soon as it is done and arrives just before that layer, so
    that both cards compute while there are more pieces than one. The first one arrives before the card waits for the
    layer's weights: what it then waits for is its link, and not the other cards as well.
    """
    partition, buffers = decoder.partition, decoder.partition.transfer_buffers
    rows_of, destinations, in_transit = _begin_on_cards(decoder, pieces)

    def received(piece: int) -> list[torch.Tensor]:
        return receive(in_transit[piece], destinations[in_transit[piece].target][piece])

    arrived = received(0)
    for index, weights in layers:
        card, following = partition.card_of(index), partition.card_of(index + 1)
        for piece, rows in enumerate(rows_of[card]):
            here = received(piece) if piece else arrived
            # A warm-up leaves layers out, so that the piece may be on its way to the card of one of those.
            (residual,) = transfer(here, in_transit[piece].target, card, buffers, piece)
            with current_device(card.device):
                decoder.layer(index, weights, residual, rows, cache)
            in_transit[piece] = send([residual], card, following, buffers, piece)
        if index + 1 < decoder.config.num_layers:
            arrived = received(0)
        on_layer(index + 1, decoder.config.num_layers)
    return [
        residual
        for piece in kept
        for residual in transfer(received(piece), in_transit[piece].target, partition.cards[0], buffers, piece)
    ]


def _run_blocks(
    decoder: Decoder, streamer: LayerStreamer, cache: LayerCache, pieces: list[PassRows],
    kept: Sequence[int], on_layer: OnLayer | None,
) -> list[torch.Tensor]:  # fmt: skip
    """The same where each card has one block of layers and nothing is streamed: a piece goes through all layers of a
    card before the next one, so that the next card has something to do."""
    partition, num_layers = decoder.partition, decoder.config.num_layers
    rows_of, destinations, in_transit = _begin_on_cards(decoder, pieces)
    streamer.begin_pass()
    for card, block in groupby(range(num_layers), key=partition.card_of):
        layers = list(block)
        for piece, rows in enumerate(rows_of[card]):
            (residual,) = receive(in_transit[piece], destinations[card][piece])
            with current_device(card.device):
                for index in layers:
                    with streamer.layer(index) as weights:
                        decoder.layer(index, weights, residual, rows, cache)
            following = partition.card_of(layers[-1] + 1)
            in_transit[piece] = send([residual], card, following, partition.transfer_buffers, piece)
        if on_layer is not None:
            on_layer(layers[-1] + 1, num_layers)
    last = destinations[partition.cards[0]]
    return [residual for piece in kept for residual in receive(in_transit[piece], last[piece])]


@contextmanager
def _over_cards(partition: LayerPartition) -> Iterator[None]:
    """Around a pass over several cards. Where it breaks off, what they still have to do is waited for: else one could
    write to a buffer of transfers behind what the next pass has written there."""
    try:
        yield
    except BaseException:
        for device in partition.devices:
            if device.type == "cuda":
                with suppress(torch.AcceleratorError):
                    torch.cuda.synchronize(device)
        raise


def _begin_on_cards(
    decoder: Decoder, pieces: list[PassRows]
) -> tuple[dict[Card, list[PassRows]], dict[Card, Sequence[torch.Tensor]], list[Transfer]]:
    """For every card the rows of each piece and where its residual stream lands there, uint8; and the streams, [N, H],
    on the way to the card of the first layer.

    If each stream that arrives took memory of its own, what leaves could not be used again until the device has sent
    it, and the host is layers ahead.
    """
    partition = decoder.partition
    first, buffers = partition.cards[0], partition.transfer_buffers
    rows_of, destinations = dict[Card, list[PassRows]](), dict[Card, Sequence[torch.Tensor]]()
    for card in partition.cards:
        rows_of[card] = [rows.to_card(first, card, buffers, (card.number, piece)) for piece, rows in enumerate(pieces)]
        with current_device(card.device):
            destinations[card] = _residual_buffers(decoder, pieces, card.device)
    in_transit = [
        send([residual], first, partition.card_of(0), buffers, piece)
        for piece, residual in enumerate(_embedded(decoder, pieces, destinations[first]))
    ]
    return rows_of, destinations, in_transit
