"""A draft model with room for trees, and what it should say by the book."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_runtime.kv import DeviceKVCache
from offload_runtime.kv.device import StreamingDraftCache, kept_positions
from offload_runtime.memory import DeviceBudget
from offload_runtime.model import RopeTable, RowBuilder
from offload_runtime.params import SamplingParams
from offload_runtime.runners import DraftTree, ModelRunner, tree_slots
from offload_runtime.speculation import CandidateTree, DraftProposer, NgramProposer, TreeDraftProposer
from tests.helpers.assembly import CHUNK_TOKENS, CPU, Assembled, make_runner
from tests.helpers.models import VOCAB_SIZE, all_logits, random_model
from tests.helpers.sampling import join_all, numbered, perturbed_logits

BATCH = 3


@dataclass(frozen=True)
class TreeDraft:
    """A small random model whose cache has spare slots, and the transformers model that it was made of."""

    hf_model: Any
    made: Assembled
    runner: ModelRunner

    def parts(
        self, *, graphs: bool = True, fixed_shapes: bool | None = None, vocab_size: int = VOCAB_SIZE
    ) -> tuple[DraftProposer, DraftTree]:
        """Chains and trees that know nothing yet."""
        for sequence in range(BATCH):
            self.runner.cache.truncate(sequence, 0)
        chains = DraftProposer(self.runner, vocab_size=vocab_size, batch=BATCH)
        tree = DraftTree(
            self.runner, chains.model.texts, vocab_size=vocab_size, batch=BATCH,
            graphs=graphs, fixed_shapes=fixed_shapes,
        )  # fmt: skip
        return chains, tree

    def proposer(self, params: SamplingParams, *, num_sequences: int = 1, ngrams: bool = False) -> TreeDraftProposer:
        """A proposer that has started."""
        chains, tree = self.parts()
        device = self.runner.cache.store(0).data.device
        proposer = TreeDraftProposer(chains, tree, device=device, ngrams=NgramProposer() if ngrams else None)
        join_all(proposer, numbered(params, num_sequences))
        return proposer


def make_tree_draft(
    *, name: str = "llama-gqa", seed: int = 7, capacity_tokens: int = 300, tree_nodes: int = 64,
    device: torch.device = CPU, dtype: torch.dtype = torch.float32, hf_model: Any = None,
    kept: tuple[int, int] | None = None,
) -> TreeDraft:  # fmt: skip
    """A draft whose trees may have `tree_nodes`; `kept` sinks and recent tokens, where its cache does not keep all."""
    hf_model = hf_model or random_model(name, seed=seed)
    made = make_runner(hf_model, capacity_tokens=capacity_tokens, device=device, dtype=dtype)
    config = made.runner.decoder.config
    options: dict[str, Any] = {
        "batch": BATCH, "budget": DeviceBudget(device, None), "spare_slots": tree_slots(tree_nodes)
    }  # fmt: skip
    cache: DeviceKVCache | StreamingDraftCache
    if kept is None:
        cache = DeviceKVCache(config, dtype, capacity_tokens=capacity_tokens, **options)
        rope = RopeTable(config, device)
    else:
        cache = StreamingDraftCache(
            config, dtype, sink_tokens=kept[0], recent_tokens=kept[1], window_tokens=tree_nodes + 1, **options
        )
        rope = RopeTable(config, device, fixed_length=cache.capacity_tokens)
    rows = RowBuilder(rope)
    return TreeDraft(hf_model, made, ModelRunner(made.runner.decoder, made.runner.streamer, cache, rows, CHUNK_TOKENS))


def scores_by_the_book(
    draft: TreeDraft, text: Sequence[int], params: SamplingParams, *, sequence: int = 0
) -> torch.Tensor:
    """[V] fp32: what decides on the token behind `text`, from transformers' logits of it as a plain sequence.

    Of a streaming cache, what it keeps is that sequence. That is right for a draft of one layer only: keys of others
    know what came before them and was let go of.
    """
    place, cache, seen = torch.tensor([len(text)]), draft.runner.cache, list(text)
    if isinstance(cache, StreamingDraftCache):
        seen = [text[position] for position in kept_positions(len(text), cache.starts[sequence], cache.sink_tokens)]
    logits = all_logits(draft.hf_model, seen)[-1:]
    return perturbed_logits(logits, params, place, torch.full_like(place, sequence))[0]


def path_of(tree: CandidateTree, node: int) -> tuple[int, ...]:
    """The tokens from below the root to a node."""
    path: tuple[int, ...] = ()
    while node != tree.root:
        path, node = (tree.nodes[node].token, *path), tree.nodes[node].parent
    return path
