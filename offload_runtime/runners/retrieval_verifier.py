"""The retrieval verifier: the target's own weights over a small retrieved cache, as a step on the device.

A step feeds every sequence's newest known token and the tree of the draft's proposals behind it, samples with the
shared noise, accepts a path by equality, and moves the windows' ends, all without the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from offload_runtime_kernels.attention_sources import sources_workspace_bytes
from offload_runtime_kernels.chunk_scores import WORKSPACE_BYTES as SCORES_WORKSPACE_BYTES
from offload_runtime_kernels.window_steps import StepRotation

from offload_runtime.kv.retrieval import RetrievalCache
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import Rows, Weights
from offload_runtime.models.rope import RopeTable, RowFrequencies
from offload_runtime.params import SamplingParams
from offload_runtime.runners.decoder import Decoder
from offload_runtime.runners.graphs import StepGraphs, step_activation_bytes
from offload_runtime.runners.guess_tree import GuessTree
from offload_runtime.runners.target import window_pass
from offload_runtime.runners.token_window import DeviceWindow, device_window_bytes
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.trace import TraceRecorder


class RetrievalVerifier:
    """Runs the target over retrieved chunks and recent blocks (TriForce, arXiv 2404.11912, section 4).

    Args:
        decoder: The target's maths.
        layers: Its weights, all on the device: (layer index, named weights), in order.
        cache: What it sees.
        rope: Its rotary table.
        window: Where tokens come from and go.
        max_tokens_with_draft: Most tokens of a sequence, tentative ones included.
        batch: Sequences; their numbers are the batch rows in the caches.
    """

    def __init__(
        self, decoder: Decoder, layers: Sequence[tuple[int, Weights]], cache: RetrievalCache,
        rope: RopeTable, window: DeviceWindow, *, max_tokens_with_draft: int, batch: int = 1,
    ) -> None:  # fmt: skip
        device = window.device
        self.cache = cache
        self.window = window
        self._max_tokens_with_draft = max_tokens_with_draft
        self._decoder = decoder
        self._layers = layers
        self._last_token = decoder.config.vocab_size - 1
        self.graphs = StepGraphs(device, decoder.partition.devices[1:])
        self._sampling = SlotSampling(batch, device)
        self._slots = torch.arange(batch, dtype=torch.int32, device=device)
        self._frequencies = RowFrequencies(rope, batch)
        self._rotation = StepRotation(self._frequencies.tensor, rope.scaling)
        self._counts = torch.zeros(batch, 2, dtype=torch.int64, device=device)  # steps, accepted proposals
        self.recorder: TraceRecorder | None = None  # whoever wants a trace of the steps sets it

    @torch.inference_mode()
    def join(self, slot: int, params: SamplingParams) -> None:
        """From now on a sequence is another one, and its tokens are chosen so."""
        self._sampling.assign(slot, params)
        self.window.join(slot)
        self.cache.forget(slot)
        self._counts[slot].zero_()

    def leave(self, slot: int) -> None:
        """A sequence has ended, if there was one: steps go on without it."""
        self._sampling.release(slot)
        self.window.leave(slot)

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Of every sequence, its steps since it joined and the proposals that they accepted. Waits for the device."""
        return [(steps, accepted) for steps, accepted in self._counts.tolist()]

    @torch.inference_mode()
    def begin(self, lengths: Mapping[int, int], counts: Mapping[int, int]) -> bool:
        """Steps will put up to `counts[s]` tokens behind the `lengths[s]` of sequence s, while all others stand still;
        whether the chunks must be chosen anew."""
        for slot, length in lengths.items():
            self._frequencies.set(slot, length)
        return self.cache.begin_steps(range(self.window.num_rows), counts)

    @torch.inference_mode()
    def step(self, tree: GuessTree, *, refresh: bool) -> None:
        """Enqueue one step that verifies the tree behind every window's end; never waits.

        Args:
            tree: Of the proposals; the same object for the same shape.
            refresh: Choose the chunks by this step's queries first.
        """
        recorder = self.recorder
        with recorder.span("verifier step", proposals=len(tree), refresh=refresh) if recorder else nullcontext():
            key = tree, self.cache.begin_step(first=refresh), self._sampling.graph_key
            self.graphs.run(key, partial(self._step, tree))

    def _step(self, tree: GuessTree) -> None:
        """Captured: no tensor of the host."""
        window = self.window
        step = window.rows(window.end, tree.verified, self._rotation, last_token=self._last_token, skip_committed=True)
        rows = Rows.of_step(step, self._slots[: window.num_rows], max_length=self._max_tokens_with_draft)
        logits = window_pass(self._decoder, self._layers, self.cache, rows)  # [B*T, V]
        samples = sample(logits, self._sampling, step.following, step.slots)
        # Where the target says something else it mostly is what comes next here.
        without_samples = logits.scatter_(1, samples.clamp_min(0)[:, None], -torch.inf)
        second_samples = sample(without_samples, self._sampling, step.following, step.slots)
        rows_of = (window.num_rows, -1)
        window.accept(samples.view(rows_of), second_samples.view(rows_of), self._counts, tree.links)


def verifier_step_bytes(
    config: ModelConfig, element_bytes: int, *, batch: int, rows: int, far_chunks: int, has_head: bool = True
) -> int:
    """Device bytes of the window and of what a step of the verifier computes on its way, which its graphs keep.

    Args:
        config: The target's shape.
        element_bytes: Of its dtype.
        batch: Sequences.
        rows: Of all of them together.
        far_chunks: Most chunks of a sequence to choose from.
        has_head: Whether logits are made here.
    """
    scores = 4 * batch * config.num_kv_heads * far_chunks
    chunk_logits = 4 * rows * config.attention.num_heads * far_chunks
    workspace = max(sources_workspace_bytes(config.head_dim), scores + min(chunk_logits, SCORES_WORKSPACE_BYTES))
    activations = step_activation_bytes(config, element_bytes, rows=rows, has_head=has_head)
    return device_window_bytes(batch=batch) + activations + workspace
