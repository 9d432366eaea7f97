"""A target's drafter of its own layers: copies in few bits of those that are streamed, and all else as the target has
it.

Copies are made while the target reads a few tokens, so that what each layer is multiplied with is known. Random tokens
weigh errors as well as text does: copies of SmolLM2 then say 0.85 and 0.93 of its tokens (prose and code), by text 0.85
and 0.92.

Layers in bf16, Q8_0 or FP8 are read from the checkpoint one by one meanwhile, through the ring's memory: what stays on
the host, and crosses the link in every pass, is what is left of them given their copies. Others pass through the ring
as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from offload_runtime.core import Batch
from offload_runtime.engine.load_model import LoadedModel, LoadProgress, OpenCard, through_scratch
from offload_runtime.models.layers import LayerWeights
from offload_runtime.plan.model import ModelPlan
from offload_runtime.runners.model_runner import Decoder, ModelRunner
from offload_runtime.stream.queue import CardRing, LayerStreamer
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.copies import make_copy, observed, store_left
from offload_runtime.weights.layout import ModelLayout
from offload_runtime.weights.loader import LayerReader, MatricesNotCodable

# By which errors of copies are weighed.
_READ_TOKENS = 256


def load_copies(
    source: CheckpointSource, target: LoadedModel, plan: ModelPlan, card: OpenCard, *, on_progress: LoadProgress | None
) -> tuple[LoadedModel, ModelRunner]:  # fmt: skip
    """Make the copies of a target's streamed layers and return the target, as it streams from now on, and what runs
    the copies, over the target's own KV cache.

    Args:
        source: The target's opened checkpoint.
        target: Loaded, nothing in its cache, which is empty afterwards. Where its plan has what is `left` of layers
            these have not been read.
        plan: Of the copy.
        card: That both are on.
        on_progress: As of `Runtime.load`.

    Raises:
        MatricesNotCodable: There is no room for what is left of some; says of which.
        CheckpointError: A file ended early.
    """
    runner, layout, streamed = target.runner, target.plan.copies, target.placement.streamed_layers
    assert layout is not None, "it is planned for"
    sizes = [layout.layer_bytes[layer] for layer in streamed]
    blocks = dict(zip(streamed, card.budget.allocate("draft: copies", sum(sizes)).split(sizes), strict=True))
    done_bytes = 0

    def report(layer: int) -> None:
        nonlocal done_bytes
        done_bytes += blocks[layer].nbytes
        if on_progress is not None:
            on_progress("copies of layers", done_bytes, sum(sizes))

    if target.plan.left is None:
        _make(runner, runner.streamer.layers, layout, blocks, report)
    else:
        target = _load_left(source, target, layout, blocks, report)
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
    cache = runner.cache.for_copy(target.config, plan.dtype, budgets=[card.budget], name="draft: states")
    return target, ModelRunner(decoder, streamer, cache, runner.rope, runner.chunk_tokens)


@torch.inference_mode()
def _make(
    runner: ModelRunner, pass_of: Callable[[int], Iterator[tuple[int, LayerWeights]]], layout: ModelLayout,
    blocks: Mapping[int, torch.Tensor], made: Callable[[int], None],
) -> None:  # fmt: skip
    """Make the copies of some layers in these blocks, one behind the other, while all layers go by of a pass over so
    many rows; `made` is called with the layer behind each."""
    count, draw = min(_READ_TOKENS, runner.cache.capacity_tokens), torch.Generator().manual_seed(0)
    tokens = torch.randint(runner.decoder.config.vocab_size, (count,), generator=draw).tolist()

    def layers() -> Iterator[tuple[int, LayerWeights]]:
        for layer, weights in pass_of(count):
            if layer not in blocks:
                yield layer, weights
                continue
            seen = LayerWeights(observed(weights, layout.layers[layer]))
            yield layer, seen
            make_copy(seen, layout.layers[layer], blocks[layer])
            made(layer)

    runner.forward(Batch(prompts={0: tokens}), layers=layers())
    runner.cache.truncate(0, 0)
    if runner.rope.device.type == "cuda":
        torch.cuda.synchronize(runner.rope.device)
        torch.cuda.empty_cache()  # of what passed through


def _load_left(
    source: CheckpointSource, target: LoadedModel, layout: ModelLayout, blocks: Mapping[int, torch.Tensor],
    report: Callable[[int], None],
) -> LoadedModel:  # fmt: skip
    """Make copies while layers are read, and stream what is left of these from now on; `report` is called behind each.
    Other arguments and errors as of `load_copies`."""
    started = time.perf_counter()
    runner, plan, card, host = target.runner, target.plan, target.cards[0], target.weights
    assert plan.left is not None and plan.whole is not None
    whole, left, resident = plan.whole, plan.left, runner.streamer.resident
    copies = {layer: layout.layers[layer].stored(block) for layer, block in blocks.items()}
    card.engine.drain()  # nothing but memory has crossed it yet, ahead of the first pass
    ring = card.buffers[0].as_strided((sum(buffer.nbytes for buffer in card.buffers),), (1,))
    found, refused = list(left.layers), set[str]()
    with LayerReader(source, whole, ring.device, card.staged.registrar) as reader:

        def layers(_: int) -> Iterator[tuple[int, LayerWeights]]:
            for layer in range(target.config.num_layers):
                yield (
                    layer,
                    resident[layer] if layer in resident else LayerWeights(reader.read(layer, ring, card.scratch)),
                )

        def made(layer: int) -> None:
            memory = host.layers[layer].buffer
            found[layer], none = store_left(whole.layers[layer], ring, copies[layer], left.layers[layer], memory)
            report(layer)
            refused.update(*(reader.packed_in(layer, packed) for packed in none))

        _make(runner, layers, layout, blocks, made)
    if refused:
        raise MatricesNotCodable(frozenset(refused))
    host.load_seconds += time.perf_counter() - started
    stored_left = replace(left, layers=tuple(found))
    plan, host.layout = replace(plan, stored_left=stored_left), plan.layout.with_layers(stored_left, blocks)
    nothing = torch.empty(0, dtype=torch.uint8)

    def make_views(layer: int, buffer: torch.Tensor) -> LayerWeights:
        if layer in resident:
            return resident[layer]
        return LayerWeights(host.layout.layers[layer].views(buffer, card.scratch, copies[layer]))

    runner.streamer = LayerStreamer(
        [nothing if layer in resident else host.block(layer) for layer in range(target.config.num_layers)],
        dict.fromkeys(resident, nothing), [CardRing(card.engine, card.buffers)], make_views=make_views,
    )  # fmt: skip
    return replace(target, plan=plan)
