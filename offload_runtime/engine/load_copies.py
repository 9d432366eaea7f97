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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from offload_runtime.core import Batch
from offload_runtime.engine.load_model import LoadedModel, LoadProgress, OpenCard, through_scratch
from offload_runtime.models.layers import LayerWeights
from offload_runtime.runners.model_runner import Decoder, ModelRunner
from offload_runtime.stream.device import LayerPartition
from offload_runtime.stream.queue import CardRing, LayerStreamer
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.copies import make_copy, observed, store_rest
from offload_runtime.weights.layout import ModelLayout
from offload_runtime.weights.loader import LayerReader, MatricesNotCodable

# By which errors of copies are weighed.
_READ_TOKENS = 256


def load_copies(
    source: CheckpointSource, target: LoadedModel, cards: Sequence[OpenCard], *, on_progress: LoadProgress | None
) -> LoadedModel:
    """Make the copies of a target's streamed layers and return the target, as it streams from now on, with what runs
    the copies, over the target's own KV cache. Each card has copies of its own layers.

    Args:
        source: The target's opened checkpoint.
        target: Loaded, nothing in its cache, which is empty afterwards. Where its plan streams the `rest` of
            layers these have not been read.
        cards: That it is on.
        on_progress: As of `Runtime.load`.

    Raises:
        MatricesNotCodable: There is no room for what is left of some; says of which.
        CheckpointError: A file ended early.
    """
    runner, layout, partition = target.runner, target.plan.copies, target.runner.decoder.partition
    assert layout is not None, "it is planned for"
    blocks, scratches, done_bytes = dict[int, torch.Tensor](), list[torch.Tensor | None](), 0
    for card, own in zip(cards, target.plan.cards, strict=True):
        sizes = [layout.layer_bytes[layer] for layer in own.placement.streamed_layers]
        memory = card.budget.allocate("draft: copies", sum(sizes)).split(sizes)
        blocks |= zip(own.placement.streamed_layers, memory, strict=True) if sizes else ()
    sum_bytes = sum(block.nbytes for block in blocks.values())

    def report(layer: int) -> None:
        nonlocal done_bytes
        done_bytes += blocks[layer].nbytes
        if on_progress is not None:
            on_progress("copies of layers", done_bytes, sum_bytes)

    if target.plan.rest is None:
        _make(runner, runner.streamer.layers, layout, blocks, report)
    else:
        target = _load_rest(source, target, layout, blocks, report)
    for card, own in zip(cards, target.plan.cards, strict=True):
        scratch_bytes = own.copy_scratch_bytes(card.device.type)
        # It drafts while the target's passes use theirs.
        scratches.append(card.budget.allocate("draft: decoded matrix", scratch_bytes) if scratch_bytes else None)
    of_layer = [scratches[owner] for owner in partition.owners]
    layers = {
        layer: LayerWeights(layout.layers[layer].views(block, of_layer[layer])) for layer, block in blocks.items()
    }
    for layer, weights in runner.streamer.resident.items():
        layers[layer] = LayerWeights(through_scratch(weights, of_layer[layer]))
    nothing, rings = torch.empty(0, dtype=torch.uint8), [CardRing(card.engine, []) for card in target.cards]
    streamer = LayerStreamer(
        [nothing] * len(layers), dict.fromkeys(layers, nothing), rings, owners=partition.owners,
        make_views=lambda layer, _: layers[layer],
    )  # fmt: skip
    # With buffers of its own for what crosses, as it drafts beside passes.
    partition = LayerPartition(partition.cards, partition.owners)
    decoder = Decoder(target.config, through_scratch(runner.decoder.shared, scratches[0]), partition)
    budgets = [card.budget for card in cards]
    cache = runner.cache.for_copy(target.config, target.plan.dtype, budgets=budgets, name="draft: states")
    return replace(target, copy_runner=ModelRunner(decoder, streamer, cache, runner.rope, runner.chunk_tokens))


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
            seen = observed(weights, layout.layers[layer])
            yield layer, seen
            make_copy(seen, layout.layers[layer], blocks[layer])
            made(layer)

    runner.forward(Batch(prompts={0: tokens}), layers=layers())
    runner.cache.truncate(0, 0)
    for device in runner.decoder.partition.devices if runner.rope.device.type == "cuda" else ():
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # of what passed through


def _load_rest(
    source: CheckpointSource, target: LoadedModel, layout: ModelLayout, blocks: Mapping[int, torch.Tensor],
    report: Callable[[int], None],
) -> LoadedModel:  # fmt: skip
    """Make copies while layers are read, and stream what is left of these from now on; `report` is called behind each.
    Other arguments and errors as of `load_copies`."""
    started = time.perf_counter()
    runner, plan, host, owners = target.runner, target.plan, target.weights, target.runner.decoder.partition.owners
    assert plan.rest is not None and plan.whole is not None
    whole, rest, resident = plan.whole, plan.rest, runner.streamer.resident
    copies = {layer: layout.layers[layer].stored(block) for layer, block in blocks.items()}
    scratches = [card.scratch for card in target.cards]
    found, refused, readers, rings = list(rest.layers), set[str](), list[LayerReader](), list[torch.Tensor]()
    with ExitStack() as undo:
        for card in target.cards:
            card.engine.drain()  # nothing but memory has crossed it yet, ahead of the first pass
            memory = card.buffers[0] if card.buffers else torch.empty(0, dtype=torch.uint8)
            rings.append(memory.as_strided((sum(buffer.nbytes for buffer in card.buffers),), (1,)))
            reader = LayerReader(source, whole, rings[-1].device, card.staged.registrar)
            readers.append(undo.enter_context(reader))

        def layers(_: int) -> Iterator[tuple[int, LayerWeights]]:
            for layer, owner in enumerate(owners):
                if layer in resident:
                    yield layer, resident[layer]
                else:
                    yield layer, LayerWeights(readers[owner].read(layer, rings[owner], scratches[owner]))

        def made(layer: int) -> None:
            reader, ring, memory = readers[owners[layer]], rings[owners[layer]], host.layers[layer].buffer
            found[layer], none = store_rest(whole.layers[layer], ring, copies[layer], rest.layers[layer], memory)
            report(layer)
            refused.update(*(reader.packed_in(layer, packed) for packed in none))

        _make(runner, layers, layout, blocks, made)
    if refused:
        raise MatricesNotCodable(frozenset(refused))
    host.load_seconds += time.perf_counter() - started
    stored_rest = replace(rest, layers=tuple(found))
    plan, host.layout = replace(plan, stored_rest=stored_rest), plan.layout.with_layers(stored_rest, blocks)
    nothing = torch.empty(0, dtype=torch.uint8)

    def make_views(layer: int, buffer: torch.Tensor) -> LayerWeights:
        if layer in resident:
            return resident[layer]
        return LayerWeights(host.layout.layers[layer].views(buffer, scratches[owners[layer]], copies[layer]))

    runner.streamer = LayerStreamer(
        [nothing if layer in resident else host.block(layer) for layer in range(target.config.num_layers)],
        dict.fromkeys(resident, nothing), [CardRing(card.engine, card.buffers) for card in target.cards],
        owners=owners, make_views=make_views,
    )  # fmt: skip
    return replace(target, plan=plan)
