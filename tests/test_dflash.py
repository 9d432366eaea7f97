"""DFlash drafters against their definition, whole and without a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.core import DraftBudget, TokenTree
from offload_runtime.errors import CheckpointError, VocabularyMismatchError
from offload_runtime.params import SamplingParams
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.model_runner import HiddenTaps
from offload_runtime.sampling import SlotSampling, perturbed_logits
from offload_runtime.speculation.dflash import DFlashDrafter, DFlashRunner
from offload_runtime.speculation.ngram import NgramDrafter
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers import dflash
from tests.helpers.assembly import in_memory, make_runner
from tests.helpers.families import family_model
from tests.helpers.models import VOCAB_SIZE, model_config_from_transformers
from tests.helpers.native_drafts import Decoding, counting_target, drafter_of

_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_ALL_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False}
GREEDY = SamplingParams()
KINDS: dict[str, dict[str, Any]] = {
    "first": {},
    "causal windows": _SLIDING,
    "windows with biases and sinks": {**_ALL_SLIDING, "attention_bias": True, "add_swa_attention_sink_bias": True},
    "second": {"second": True},
    "second with windows": {"second": True, **_ALL_SLIDING},
}


@dataclass
class Made:
    """A random drafter of a random target, and residual streams of texts, which nothing has computed."""

    stated: dict[str, Any]
    tensors: dflash.Tensors
    model: Any
    taps: dict[int, torch.Tensor]
    drafter: DFlashRunner
    decoder: HeadDecoder

    @classmethod
    def of(cls, kind: str, directory: Path, params: SamplingParams = GREEDY, device: str = "cpu") -> Made:
        model = family_model("llama", 0)
        stated = dflash.settings(model_config_from_transformers(model.config), **KINDS[kind])
        tensors = dflash.random_tensors(dflash.config_of(stated))
        source = open_checkpoint(dflash.write_dflash(directory, stated, tensors), draft=True).fitted(in_memory(model))
        on: Any = {"device": torch.device(device)}
        runner = make_runner(source, target=make_runner(model, **on).runner, batch=2, **on).runner
        drafter, generator = DFlashRunner(runner, batch=2), torch.Generator().manual_seed(7)
        for slot in range(2):
            drafter.join(slot, params)
        shape = 160, len(dflash.TAPS), stated["hidden_size"]
        taps = {slot: torch.randn(shape, generator=generator).to(device) for slot in range(2)}
        assert isinstance(runner.decoder, HeadDecoder)
        return cls(stated, tensors, model, taps, drafter, runner.decoder)

    def kept(self, slot: int, first: int, end: int) -> torch.Tensor:
        """What is kept of the target's rows of some tokens."""
        rows = self.taps[slot][first:end]
        kept = torch.full_like(rows[:, 0], torch.nan)
        for number in range(len(dflash.TAPS)):
            self.decoder.tap(number, rows[:, number], kept)
        return kept

    def keep(self, slot: int, first: int, end: int) -> None:
        """Let the drafter have it."""
        self.drafter.texts.observe(slot, first, (), self.kept(slot, first, end))

    def knowing(self, text: list[int]) -> DFlashDrafter:
        """A drafter to which slot 0 has joined with a text, of which all but the last token was shown."""
        drafter = DFlashDrafter(self.drafter, ngrams=NgramDrafter())
        drafter.join(0, GREEDY)
        drafter.prepare(0, text)
        drafter.observe(0, 0, text[1:], self.kept(0, 0, len(text) - 1))
        return drafter

    def defined(self, slot: int, end: int, last: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and normed rows of a block behind a context, by its definition."""
        of_target = self.model.model.embed_tokens.weight, self.model.lm_head.weight
        with torch.no_grad():
            return dflash.block_logits(self.stated, self.tensors, *of_target, self.taps[slot][first:end].cpu(), last)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_says_what_its_definition_says(kind: str, device: str, tmp_path: Path) -> None:
    made = Made.of(kind, tmp_path, device=device)

    def compare(ends: dict[int, int], first: int = 0) -> None:
        blocks = made.drafter.blocks(ends)
        for slot, end in ends.items():
            logits, normed = made.defined(slot, end, end, first)
            expected = dflash.best_chain(made.stated, made.tensors, logits, normed, end)
            assert blocks[slot].chain(end, 99) == list(expected)
            if not made.stated["dflash_config"].get("selector_rank"):
                scores = [blocks[slot].children(place, end).scores for place in range(len(expected))]
                assert torch.allclose(torch.tensor(scores), logits.topk(8).values, atol=2e-4)

    made.keep(0, 0, 3)
    compare({0: 3})
    made.keep(0, 3, 4)  # a token, a prompt in pieces, an accepted path
    for first, end in ((0, 16), (16, 32), (32, 33)):
        made.keep(1, first, end)
    compare({0: 4, 1: 33})
    made.keep(0, 4, 31)
    compare({0: 31})
    made.keep(1, 20, 22)  # another text that begins alike
    compare({1: 22})
    made.keep(1, 50, 57)  # a beginning that was restored: it is not known
    compare({1: 57}, first=50)


def test_its_context_is_the_text_however_that_has_grown(tmp_path: Path) -> None:
    """By a prompt in pieces, by chains and plain steps, and by paths of n-grams through trees, which are right here."""
    model = counting_target()  # whose layers add nothing to embeddings
    stated = dflash.settings(model_config_from_transformers(model.config), **KINDS["causal windows"])
    tensors = dflash.random_tensors(dflash.config_of(stated))
    target = make_runner(model, capacity_tokens=400).runner
    source = open_checkpoint(dflash.write_dflash(tmp_path, stated, tensors), draft=True).fitted(in_memory(model))
    head = make_runner(source, target=target, capacity_tokens=400).runner
    assert isinstance(head.decoder, HeadDecoder)
    target.taps = HiddenTaps(head.decoder.config.taps, stated["hidden_size"], head.decoder.tap)
    decoding = Decoding.of(target, drafter_of(head), {0: [(37 * at) % VOCAB_SIZE for at in range(130)]})
    chain, tree = DraftBudget("chain", 5), DraftBudget("tree", 9, 20)
    for budget in (chain, tree, tree, chain, DraftBudget("ngram", 4), chain, DraftBudget("plain", 0), tree, chain):
        text = list(decoding.texts[0])
        output = decoding.step({0: budget})[0]
        if budget is tree:
            assert len(output.path) == 9
        elif budget is chain:
            with torch.no_grad():
                taps = model.model.embed_tokens(torch.tensor(text[:-1]))[:, None].expand(-1, 2, -1)
                of_target = model.model.embed_tokens.weight, model.lm_head.weight
                logits, normed = dflash.block_logits(stated, tensors, *of_target, taps, text[-1])
            assert list(output.proposal.tokens) == list(dflash.best_chain(stated, tensors, logits, normed, text[-1]))


@pytest.mark.parametrize("kind", ["first", "second"])
def test_chooses_with_the_noise_of_the_target(kind: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=4.0, seed=5, noise_id=3)
    made, last = Made.of(kind, tmp_path, params), 17
    made.keep(1, 30, 49)  # positions are those of the text, wherever the context begins
    logits, normed = made.defined(1, 49, last, first=30)
    positions, slots = torch.arange(50, 50 + len(logits), dtype=torch.int32), torch.ones(len(logits), dtype=torch.int32)
    scores = perturbed_logits(logits, SlotSampling.of([GREEDY, params], torch.device("cpu")), positions, slots)
    if kind == "second":
        scores *= 4.0  # pairs are scored as the logits are, before the temperature
    expected = dflash.best_chain(made.stated, made.tensors, scores, normed, last)
    assert made.drafter.blocks({1: last})[1].chain(last, 99) == list(expected)


def test_proposes_the_most_probable_tree_and_what_ngrams_say(tmp_path: Path) -> None:
    made, text = Made.of("first", tmp_path), [*range(2, 30)]
    drafter = made.knowing(text)
    found = drafter.propose({0: text}, {0: DraftBudget("tree", 3, 9)})[0]
    logits, _ = made.defined(0, len(text) - 1, text[-1])
    best = [(row.topk(8).indices.tolist(), (row.topk(8).values.softmax(0) * 0.85).tolist()) for row in logits[:3]]
    paths = {}
    for depth in range(1, 4):
        for ranks in product(range(8), repeat=depth):
            path = tuple(best[place][0][rank] for place, rank in enumerate(ranks))
            paths[path] = math.prod(best[place][1][rank] for place, rank in enumerate(ranks))
    likeliest = set(sorted(paths, key=paths.__getitem__, reverse=True)[:9])
    assert set(_paths(found)) == likeliest and found.sources == ("dflash",) * 9
    # Where the text repeats itself its own continuation is among them, and joins what the block says.
    text = [*text, 5, 6, 7, 8]
    drafter.observe(0, 27, text[28:], made.kept(0, 27, len(text) - 1))
    found = drafter.propose({0: text}, {0: DraftBudget("tree", 3, 9)})[0]
    assert (9, 10, 11) in _paths(found) and {"ngram", "dflash"} == {*found.sources} and len(found) == 9


def _paths(tree: TokenTree) -> list[tuple[int, ...]]:
    found = list[tuple[int, ...]]()
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_proposes_nothing_where_it_knows_nothing(tmp_path: Path) -> None:
    made, chain = Made.of("second with windows", tmp_path), DraftBudget("chain", 4)
    drafter = DFlashDrafter(made.drafter, ngrams=NgramDrafter())
    text = [*range(40)]
    for slot in range(2):
        drafter.join(slot, GREEDY)
        drafter.prepare(slot, text)
    drafter.observe(0, 0, text[1:], made.kept(0, 0, 39))
    drafter.observe(
        1, 0, text[1:], torch.full((39, made.stated["hidden_size"]), torch.nan)
    )  # the target's own are NaN then
    found = drafter.propose(dict.fromkeys(range(2), text), dict.fromkeys(range(2), chain))
    assert len(found[0]) == 4 and not found[1]
    text = [*text, 1, 2]  # a token was decoded that nobody has shown
    assert not drafter.propose({0: text}, {0: chain})[0]
    assert drafter.modes({0: text}) == ("chain", "tree")
    longest = [0] * (256 - 5 + 1)  # the cache has whole blocks, and a block of the drafter has to fit
    assert drafter.modes({0: longest[:-1]}) and not drafter.modes({0: longest})


def test_keeps_what_two_texts_of_a_slot_have_in_common(tmp_path: Path) -> None:
    made, text = Made.of("first", tmp_path), [*range(40)]
    drafter = made.knowing(text)
    drafter.leave(0)
    for shared in (30, 20):  # as many as the target kept, or more than the texts share
        drafter.join(0, GREEDY)
        other = [*text[:shared], *[77] * (40 - shared)]
        drafter.prepare(0, other)
        drafter.observe(0, 30, other[31:], made.kept(0, 30, 39))
        chain = drafter.propose({0: other}, {0: DraftBudget("chain", 5)})[0]
        logits, _ = made.defined(0, 39, 77, first=0 if shared == 30 else 30)
        assert list(chain.tokens) == logits.argmax(1).tolist()


def test_reads_what_public_checkpoints_are_called_and_shaped() -> None:
    # Of the second version's for Muse Glimmer 30B, as its public code has them among its tests.
    stated = {
        "architectures": ["DFlash2DraftModel"], "attention_bias": False,
        "is_causal": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6656, "intermediate_size": 19968,
        "dflash_config": {
            "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0,
            "mask_token_id": 201818, "output_multiplier": 0.19611613513818404, "selector_rank": 256,
            "selector_top_k": 16, "target_layer_ids": [1, 13, 25, 37, 49],
        },
        "layer_types": ["sliding_attention"] * 5, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 52, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "sliding_window": 2048,
        "vocab_size": 202048,
    }  # fmt: skip
    config = dflash.config_of(stated)
    assert config.taps == (2, 14, 26, 38, 50) and config.block_size == 16
    shapes = {name: to.shape for name, to in checkpoint_tensors(config).items()}
    assert len(shapes) == 81
    assert shapes.items() >= {
        "candidate_selector.hidden_projection.weight": (256, 6656), "norm.weight": (6656,),
        "candidate_selector.predecessor_codebook": (202048, 256), "hidden_norm.weight": (6656,),
        "candidate_selector.successor_codebook": (202048, 256), "fc.weight": (6656, 33280),
        "layers.4.attention_conv.base_kernel": (2, 2, 6656), "layers.4.mlp_conv.base_kernel": (2, 2, 6656),
        "layers.4.attention_conv.kernel_projection.weight": (1664, 6656),
        "layers.4.mlp_conv.kernel_projection.weight": (1664, 6656), "layers.4.self_attn.k_norm.weight": (128,),
        "layers.4.self_attn.q_proj.weight": (4096, 6656), "layers.4.self_attn.v_proj.weight": (1024, 6656),
        "layers.4.self_attn.o_proj.weight": (6656, 4096), "layers.4.input_layernorm.weight": (6656,),
        "layers.4.post_attention_layernorm.weight": (6656,), "layers.4.mlp.gate_proj.weight": (19968, 6656),
    }.items()  # fmt: skip


@pytest.mark.parametrize(("stated", "error", "message"), [
    ({"num_target_layers": 36}, CheckpointError, "DFlash head was made for a target of 36 layers, and it has 3"),
    ({"vocab_size": 500}, VocabularyMismatchError, "is about 500 tokens and the target has 320"),
    ({"target_hidden_size": 64}, CheckpointError, "reads rows of 64 channels, and the target's have 40"),
    ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2, 1]}}, CheckpointError, "an ascending list"),
    ({"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1]}}, CheckpointError, "below vocab_size 320"),
    ({"transformer_layer_config": {}}, CheckpointError, "take one with a dflash_config, such as z-lab's"),
])  # fmt: skip
def test_others_are_refused(stated: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    model = family_model("llama", 0)
    found = dflash.settings(model_config_from_transformers(model.config))
    with pytest.raises(error, match=message):
        found |= stated
        dflash.write_dflash(tmp_path, found, dflash.random_tensors(dflash.config_of(found)))
        open_checkpoint(tmp_path, draft=True).fitted(in_memory(model))


def test_a_head_with_an_embedding_of_masks_is_refused(tmp_path: Path) -> None:
    stated = dflash.settings(model_config_from_transformers(family_model("llama", 0).config))
    dflash.write_dflash(tmp_path, stated, dflash.random_tensors(dflash.config_of(stated)))
    torch.save(torch.zeros(40), tmp_path / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=r"has a mask_embedding\.pt, which stands for masks"):
        open_checkpoint(tmp_path, draft=True)
