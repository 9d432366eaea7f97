"""A target's drafter of its own layers: copies in few bits of those that are streamed, and all else as the target has
it.

Copies are made while the target reads a few tokens, so that each layer crosses the link once for its own and what it is
multiplied with is known. Random tokens weigh errors as well as text does: copies of SmolLM2 then say 0.85 and 0.93 of
its tokens (prose and code), by text 0.85 and 0.92.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from offload_runtime.core import Batch
from offload_runtime.engine.load_model import LoadedModel, LoadProgress, OpenCard, through_scratch
from offload_runtime.models.layers import LayerWeights
from offload_runtime.plan.model import ModelPlan
from offload_runtime.runners.model_runner import Decoder, ModelRunner
from offload_runtime.stream.queue import CardRing, LayerStreamer
from offload_runtime.weights.copies import make_copy, observed
from offload_runtime.weights.layout import ModelLayout

# By which errors of copies are weighed.
_READ_TOKENS = 256


def load_copies(
    target: LoadedModel, plan: ModelPlan, card: OpenCard, *, on_progress: LoadProgress | None
) -> ModelRunner:  # fmt: skip
    """Make the copies of a target's streamed layers and return what runs them, over the target's own KV cache.

    Args:
        target: Loaded, nothing in its cache, which is empty afterwards.
        plan: Of the copy.
        card: That both are on.
        on_progress: As of `Runtime.load`.
    """
    runner, layout, streamed = target.runner, target.plan.copies, target.placement.streamed_layers
    assert layout is not None, "it is planned for"
    sizes = [layout.layer_bytes[layer] for layer in streamed]
    blocks = dict(zip(streamed, card.budget.allocate("draft: copies", sum(sizes)).split(sizes), strict=True))
    _fill(runner, layout, blocks, on_progress)
    scratch_bytes = target.plan.copy_scratch_bytes(card.device.type, plan.step_rows or 0)
    # It drafts while the target's passes use theirs.
    scratch = card.budget.allocate("draft: decoded matrix", scratch_bytes) if scratch_bytes else None
    layers = {layer: LayerWeights(layout.layers[layer].views(block, scratch)) for layer, block in blocks.items()}
    for layer, weights in runner.streamer.resident.items():
        layers[layer] = LayerWeights(through_scratch(weights, scratch))
    nothing, ring = torch.empty(0, dtype=torch.uint8), CardRing(target.cards[0].engine, [])
    streamer = LayerStreamer(
        [nothing] * len(layers), dict.fromkeys(layers, nothing), [ring], make_views=lambda layer, _: layers[layer]
    )
    decoder = Decoder(target.config, through_scratch(runner.decoder.shared, scratch), runner.decoder.partition)
    return ModelRunner(decoder, streamer, runner.cache, runner.rope, runner.chunk_tokens)


@torch.inference_mode()
def _fill(
    runner: ModelRunner, layout: ModelLayout, blocks: Mapping[int, torch.Tensor], on_progress: LoadProgress | None
) -> None:
    """Make the copies of some layers in these blocks, one behind the other."""
    done_bytes, total_bytes = 0, sum(block.nbytes for block in blocks.values())
    count, draw = min(_READ_TOKENS, runner.cache.capacity_tokens), torch.Generator().manual_seed(0)
    tokens = torch.randint(runner.decoder.config.vocab_size, (count,), generator=draw).tolist()

    def layers() -> Iterator[tuple[int, LayerWeights]]:
        nonlocal done_bytes
        for layer, weights in runner.streamer.layers(count):
            if layer not in blocks:
                yield layer, weights
                continue
            seen = LayerWeights(observed(weights, layout.layers[layer]))
            yield layer, seen
            make_copy(seen, layout.layers[layer], blocks[layer])
            done_bytes += blocks[layer].nbytes
            if on_progress is not None:
                on_progress("copies of layers", done_bytes, total_bytes)

    runner.forward(Batch(prompts={0: tokens}), layers=layers())
    runner.cache.truncate(0, 0)
    if runner.rope.device.type == "cuda":
        torch.cuda.synchronize(runner.rope.device)
        torch.cuda.empty_cache()  # of what passed through
