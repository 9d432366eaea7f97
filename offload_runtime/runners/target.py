"""Runners: tokens in, logits out. They join weights in motion, decoder and cache into passes.

A pass is layer-major: every piece of its rows goes through layer 0, then layer 1, …, so that each streamed layer
crosses the link once per pass, however long the prompt is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from offload_runtime.config import GB, ModelConfig
from offload_runtime.copy.schedule import LayerStreamer
from offload_runtime.kv import KVCache, LayerCache
from offload_runtime.model import Decoder, PassRows, RowBuilder, Weights, Window, padded_rows
from offload_runtime.trace import TraceRecorder

Layers = Iterable[tuple[int, Weights]]  # of one pass: (layer index, its weights on the device), in order


@dataclass(frozen=True)
class PassShape:
    """Heights of the matrix products, the same for every pass of a run (see `Weight.linear`).

    `window_rows` are for decoding windows, `prefill_rows` for prompts; a prompt is worked on in pieces of
    `prefill_chunk_tokens`, a multiple of `prefill_rows`, which bounds the activations and changes no bit.
    """

    window_rows: int
    prefill_rows: int
    prefill_chunk_tokens: int

    def __post_init__(self) -> None:
        assert self.window_rows > 0 and self.prefill_rows > 0
        assert self.prefill_chunk_tokens % self.prefill_rows == 0


# Heights depend on nothing but the model and the kind of device, or the bits would depend on the placement. On a GPU 64
# rows cost what one costs (the products of a 7B model: 3.76 ms at 64 rows, 3.57 ms at 1, 5.6 ms at 256; H200). A model
# of 8 GB and more is streamed on the cards this is for, its passes take hundreds of milliseconds, and 256 rows keep a
# window of 1024 tokens at 26 launches a layer, which the launch queue of 1024 holds. On a CPU every row costs.
_SMALL_TARGET_SHAPE = PassShape(64, 512, 1024)
_LARGE_TARGET_SHAPE = PassShape(256, 512, 1024)
_LARGE_TARGET_BYTES = 8 * GB
_CPU_TARGET_SHAPE = PassShape(8, 64, 256)
# By kind of device. A draft promises no bits, so its heights only have to be quick.
DRAFT_SHAPES = {"cuda": PassShape(8, 256, 1024), "cpu": PassShape(1, 64, 256)}
# Fragmentation of the allocator and rounding of its blocks, as a share of the workspace.
_WORKSPACE_MARGIN = 1.25
# cuBLAS takes 32 MiB a handle on Hopper, 8 MiB elsewhere; once for the compute stream, once for cublasLt.
_LIBRARY_WORKSPACE_BYTES = 72 << 20


def target_shape(weight_bytes: int, device_type: str) -> PassShape:
    """Heights for a target of so many bytes on `cuda` or a `cpu`."""
    if device_type == "cpu":
        return _CPU_TARGET_SHAPE
    return _LARGE_TARGET_SHAPE if weight_bytes >= _LARGE_TARGET_BYTES else _SMALL_TARGET_SHAPE


def workspace_bytes(
    config: ModelConfig, element_bytes: int, shape: PassShape, *, context_tokens: int, rows: int, sampled_rows: int
) -> int:
    """Device bytes of the activations of the largest pass.

    Args:
        config: The model's shape.
        element_bytes: Of its dtype.
        shape: Heights of its passes.
        context_tokens: Longest prompt (its residual stream is held through a layer-major prefill).
        rows: Of a decoding window.
        sampled_rows: Of these, rows that tokens are sampled from at once.
    """
    chunk_rows = min(shape.prefill_chunk_tokens, padded_rows(context_tokens, shape.prefill_rows))
    window_rows = padded_rows(rows, shape.window_rows)
    stream = context_tokens * config.hidden_size
    row = 3 * config.hidden_size + config.qkv_size + 3 * config.q_size + 3 * config.intermediate_size
    chunk = max(chunk_rows, window_rows) * row
    angles = 4 * context_tokens * config.head_dim // 2 * 4  # cos, sin and their making, fp32
    # fp32 copies while sampling with filters
    logits = window_rows * config.vocab_size * element_bytes + sampled_rows * config.vocab_size * 6 * 4
    attention = 2 * (64 << 20)  # partial results of split attention, see kernels.attention.WORKSPACE_BYTES
    total = (stream + chunk) * element_bytes + angles + logits + attention
    return int(_WORKSPACE_MARGIN * total) + _LIBRARY_WORKSPACE_BYTES


@dataclass(eq=False)
class ModelRunner:
    """Runs passes of one model.

    Attributes:
        decoder: The maths.
        streamer: The weights, resident or streamed.
        cache: Keys and values; the runner owns what is committed to it.
        rows: Builder of the pass's rows.
        shape: Heights of the matrix products.
        recorder: Whoever wants a trace of the passes sets it.
    """

    decoder: Decoder
    streamer: LayerStreamer
    cache: KVCache
    rows: RowBuilder
    shape: PassShape
    recorder: TraceRecorder | None = None

    @torch.inference_mode()
    def prefill(
        self, sequence: int, tokens: Sequence[int], on_layer: Callable[[int, int], None] | None = None
    ) -> torch.Tensor:
        """Put a prompt, or the rest of one, into the cache and commit it.

        Args:
            sequence: Batch row in the cache; its committed tokens come before these.
            tokens: At least one.
            on_layer: Called with (layers done, layers) as the host enqueues them.

        Returns:
            Logits of the last token, [1, V] on the compute device.

        Raises:
            ContextLengthError, BudgetError: The cache has no room. Nothing was committed.
        """
        if self.recorder is not None:
            self.recorder.begin_pass(self.streamer.bytes_begun)
        self.cache.begin_prefill(sequence, len(tokens))
        start, step = self.cache.length(sequence), self.shape.prefill_chunk_tokens
        end = start + len(tokens)
        pieces = [
            self.rows.build([Window(tuple(tokens[at : at + step]))], [start + at], [0], prompt_length=end)
            for at in range(0, len(tokens), step)
        ]
        residual, delta = _run_layers(
            self.decoder, self.streamer.layers(), self.cache, pieces, self.shape.prefill_rows, on_layer
        )
        last = pieces[-1].num_rows - 1
        logits = self.decoder.head(residual, delta, self.shape.window_rows, select=slice(last, last + 1))
        self.cache.end_prefill(sequence, len(tokens))
        if self.recorder is not None:
            self.recorder.end_pass("prefill", [len(tokens)], self.streamer.bytes_begun)
        return logits

    @torch.inference_mode()
    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        """One pass over a window per sequence; nothing is committed.

        Args:
            windows: Tokens behind each sequence's committed ones.
            sequences: Their batch rows in the cache, all different.

        Returns:
            Logits [N, V] on the compute device, a row for each token, those of one window behind those of the other.

        Raises:
            ContextLengthError, BudgetError: The cache has no room for a window.
        """
        if self.recorder is not None:
            self.recorder.begin_pass(self.streamer.bytes_begun)
        lengths = [len(window.tokens) for window in windows]
        self.cache.begin_window(sequences, lengths)
        committed = [self.cache.length(sequence) for sequence in sequences]
        logits = self.run_rows(self.rows.build(windows, committed, sequences))
        if self.recorder is not None:
            self.recorder.end_pass("verify", lengths, self.streamer.bytes_begun)
        return logits

    @torch.inference_mode()
    def run_rows(self, rows: PassRows) -> torch.Tensor:
        """One pass over prepared rows: logits [N, V]. Commits nothing and never waits for the device."""
        return window_pass(self.decoder, self.streamer.layers(), self.cache, rows, self.shape.window_rows)


def window_pass(
    decoder: Decoder, layers: Layers, cache: LayerCache, rows: PassRows, tile_rows: int | None
) -> torch.Tensor:
    """One decoding pass over prepared rows. Commits nothing and never waits for the device.

    Args:
        decoder: The maths.
        layers: The weights, as one pass meets them.
        cache: Keys and values.
        rows: Which tokens, and where.
        tile_rows: Height of the matrix products; None takes the quickest way, whose bits depend on the number of rows.

    Returns:
        Logits [N, V] of the rows that are present.
    """
    if tile_rows is None:
        residual = decoder.fused_embed(rows)
        for index, weights in layers:
            decoder.fused_layer(index, weights, residual, rows, cache)
        return decoder.fused_head(residual)
    residual, delta = _run_layers(decoder, layers, cache, [rows], tile_rows, None)
    return decoder.head(
        residual, delta, tile_rows, select=slice(0, rows.num_rows) if rows.present is None else rows.present
    )


def _run_layers(
    decoder: Decoder, layers: Layers, cache: LayerCache, pieces: list[PassRows], tile_rows: int,
    on_layer: Callable[[int, int], None] | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Residual stream and last delta of the last piece, each [N, H].

    A prompt's deltas are added at once: holding them through the layer would take as much memory again as the residual
    streams do. Of the last layer only the last piece's is of use.
    """
    residuals = [decoder.embed(rows, tile_rows) for rows in pieces]
    last: torch.Tensor | None = None
    num_layers = decoder.config.num_layers
    for index, weights in layers:
        for residual, rows in zip(residuals, pieces, strict=True):
            delta = decoder.layer(index, weights, residual, last, rows, cache, tile_rows)
            if rows.prefill and index + 1 < num_layers:
                residual.add_(delta)
            elif rows is pieces[-1]:
                last = delta
        if on_layer is not None:
            on_layer(index + 1, num_layers)
    assert last is not None, "a model has at least one layer"
    return residuals[-1], last
