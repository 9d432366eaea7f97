"""The middle level: the target's own weights over a small retrieved cache, as a step on the device.

A step feeds the newest known token and the draft's proposals behind it, samples with the shared noise, accepts by
equality, and moves the window's end, all without the host.
"""

from __future__ import annotations

from functools import partial

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from offload_runtime_kernels.window_steps import StepRotation

from offload_runtime.config import SamplingParams
from offload_runtime.kv_cache.retrieval_cache import RetrievalCache
from offload_runtime.model import Decoder, PassRows, RopeTable
from offload_runtime.runners.device_window import DeviceWindow
from offload_runtime.runners.passes import window_pass
from offload_runtime.runners.step_graph import StepGraphs
from offload_runtime.sampling import sample
from offload_runtime.streaming import ResidentLayers


class RetrievalTarget:
    """Runs the target over retrieved chunks and recent blocks (TriForce, arXiv 2404.11912, section 4).

    Args:
        decoder: The target's maths.
        layers: Its weights, all on the device.
        cache: What it sees.
        rope: Its rotary table.
        window: Where tokens come from and go.
        gamma: Most proposals a step verifies.
        sequence: Keys the noise; batch row in the caches.
    """

    def __init__(
        self, decoder: Decoder, layers: ResidentLayers, cache: RetrievalCache, rope: RopeTable, window: DeviceWindow,
        *, gamma: int, sequence: int = 0,
    ) -> None:  # fmt: skip
        device = window.tokens.device
        self.cache = cache
        self._window = window
        self._gamma = gamma
        self._rope = rope
        self._decoder = decoder
        self._layers = layers
        self._last_token = decoder.config.vocab_size - 1
        self._graphs = StepGraphs(device)
        self._params = SamplingParams()
        self._owners = torch.full((gamma + 1,), sequence, dtype=torch.int32, device=device)
        self._rotation = StepRotation(rope.frequencies(1).clone(), rope.scaling)
        self._frequency_set = 0
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # steps, accepted proposals

    @torch.inference_mode()
    def start(self, params: SamplingParams) -> None:
        """Choose tokens this way from now on, for another sequence."""
        self._params = params
        self.cache.forget()
        self._counts.zero_()

    @property
    def counts(self) -> tuple[int, int]:
        """Steps since `start`, and proposals that they accepted. Waits for the device."""
        steps, accepted = self._counts.tolist()
        return steps, accepted

    @torch.inference_mode()
    def begin(self, length: int, count: int) -> bool:
        """Steps will put up to `count` tokens behind `length`; whether the chunks must be chosen anew."""
        chosen = self._rope.frequency_set(length)
        if chosen != self._frequency_set:
            self._rotation.frequencies.copy_(self._rope.frequencies(length))
            self._frequency_set = chosen
        return self.cache.begin_window(count)

    @torch.inference_mode()
    def step(self, num_proposals: int, *, refresh: bool) -> None:
        """Enqueue one step that verifies `num_proposals` tokens behind the window's end; never waits.

        Args:
            num_proposals: At most `gamma`.
            refresh: Choose the chunks by this step's queries first.
        """
        assert num_proposals <= self._gamma
        self.cache.begin_pass(refresh=refresh)
        key = (num_proposals, refresh, self.cache.recent, self.cache.num_keys, self._params)
        self._graphs.run(key, partial(self._step, num_proposals, self._params))

    def _step(self, num_proposals: int, params: SamplingParams) -> None:
        """Captured: no tensor of the host."""
        window, count = self._window, num_proposals + 1
        step = window.rows(window.end, count, self._rotation, offset=-1, last_token=self._last_token)
        rows = PassRows.of_step(step, self._owners[:count], max_length=self.cache.recent.stop * BLOCK_TOKENS)
        # The middle level promises no bits, so its products only have to be quick.
        logits = window_pass(self._decoder, self._layers, self.cache, rows, None)[0]  # [T, V]
        window.accept(sample(logits, params, step.following, self._owners[:count]), self._counts)
