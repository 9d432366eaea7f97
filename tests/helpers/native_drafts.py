"""Heads of small targets, made in memory, and what they say of a text when its rows are read one after the other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload_runtime.cache.device import KVCache
from offload_runtime.core import Batch, DraftBudget, TokenTree
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.dflash import DFlashConfig
from offload_runtime.models.eagle3 import Eagle3Config, FirstLayer
from offload_runtime.models.heads import HeadConfig
from offload_runtime.models.layers import Attention, Norms
from offload_runtime.models.mtp import MtpConfig
from offload_runtime.models.rope import RopeTable
from offload_runtime.params import SamplingParams
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.model_runner import HiddenTaps, ModelRunner, window_residual
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation.dflash import DFlashDrafter, DFlashRunner
from offload_runtime.speculation.draft import DraftRunner
from offload_runtime.speculation.ngram import NgramDrafter, WithNgrams
from offload_runtime.speculation.step import StepOutput, StepWorth, run_step
from offload_runtime.speculation.tree import ModelDrafter
from offload_runtime.stream.device import DeviceBudget
from offload_runtime.stream.queue import CardRing, LayerStreamer, make_copy_engine
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import Weight
from offload_runtime.weights.layout import ModelLayout, checkpoint_tensors
from offload_runtime.weights.loader import load_weights
from tests.helpers.models import VOCAB_SIZE

CPU = torch.device("cpu")
PLAIN = SamplingParams(temperature=0.0)
_SLOTS = 3
Change = Callable[[dict[str, torch.Tensor]], None]


def mtp_of(target: ModelConfig) -> MtpConfig:
    """The MTP layer of a model."""
    return MtpConfig.of(target)


def eagle_of(target: ModelConfig) -> Eagle3Config:
    """A head over three taps, of two layers, without a vocabulary of its own."""
    own = target.layers[max(target.attentions)]
    assert isinstance(own.attention, Attention)
    attention = replace(own.attention, window=None, qk_norm=None, gated=False, sinks=False)
    first = FirstLayer(replace(attention, input_size=2 * target.hidden_size), own.mlp, Norms())
    around = {name: getattr(target, name) for name in ("vocab_size", "max_position_embeddings", "ropes")}
    layers = (first, replace(own, attention=attention, norms=Norms()))
    return Eagle3Config(
        "eagle3", layers, tie_word_embeddings=False, target_size=target.hidden_size,
        taps=(0, target.num_layers // 2, target.num_layers), draft_vocab_size=target.vocab_size, **around,
    )  # fmt: skip


def _copy(tensor: torch.Tensor, out: torch.Tensor, _: Any = None) -> None:
    out.copy_(tensor)


def make_head(
    target: ModelRunner, kind: Callable[[ModelConfig], HeadConfig] = mtp_of, *, change: Change | None = None,
    batch: int = _SLOTS, capacity_tokens: int = 400, places: int = 120, seed: int = 5,
) -> ModelRunner:  # fmt: skip
    """A head of a target, which keeps for it what it reads: random, but for what `change` makes of its tensors."""
    config, generator = kind(target.decoder.config), torch.Generator().manual_seed(seed)
    tensors = dict[str, torch.Tensor]()
    for name, to in checkpoint_tensors(config).items():
        one = torch.randn(to.shape, generator=generator)
        tensors[name] = 1 + 0.2 * one if len(to.shape) == 1 else 1.5 * one / math.sqrt(to.shape[-1])
    if change is not None:
        change(tensors)
    fills = {name: partial(_copy, tensor) for name, tensor in tensors.items()}
    layout = ModelLayout.of(config, torch.float32)
    weights = load_weights(CheckpointSource(config, torch.float32, "memory", {}, fills, lambda: None), layout)
    layers = [weights.block(index) for index in range(config.num_layers)]
    streamer = LayerStreamer(
        layers, dict(enumerate(layers)), [CardRing(make_copy_engine(CPU), [], [], None)],
        make_views=lambda layer, buffer: layout.layers[layer].views(buffer, None), kv=None,
    )  # fmt: skip
    lent = target.decoder.embedding, target.decoder.lm_head, Weight(target.decoder.final_norm)
    shared = dict(zip(("embedding", "lm_head", "target_norm"), lent, strict=True))
    decoder = HeadDecoder(config, {**shared, **layout.shared.views(weights.block(None), None)})
    cache = KVCache(
        config, torch.float32, capacity_tokens=capacity_tokens, batch=batch, budgets=[DeviceBudget(CPU, None)],
        spare_positions=places, drafts=True,
    )  # fmt: skip
    target.taps = HiddenTaps(config.taps, config.width, decoder.tap, config.taps_in_place)
    return ModelRunner(decoder, streamer, cache, RopeTable(config, CPU), target.chunk_tokens)


def counting_target(*, size: int = 128, vocabulary: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A model whose next token is a function of the last one: embeddings are unit vectors, layers add nothing, and the
    head says another number."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=size, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    model, units = LlamaForCausalLM(config).eval(), torch.eye(vocabulary, size)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(units)
        model.lm_head.weight.copy_(units.roll(37, dims=0))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def counting_head(*, vocabulary: int = VOCAB_SIZE) -> Change:
    """Makes an MTP layer of such a model right everywhere, by the hidden states alone."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.startswith("mtp.") and (name.endswith("norm.weight") or "norm_" in name):
                tensor.fill_(1)
            elif name.startswith("mtp.") and ("o_proj" in name or "down_proj" in name):
                tensor.zero_()
        fc = tensors["mtp.fc.weight"].zero_()
        for token in range(vocabulary):
            fc[(token + 37) % vocabulary, len(fc) + token] = 1

    return change


class DrawnWorth(StepWorth):
    """Says by a seed what a clock says otherwise: whether steps pay, and how long they take."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def seconds(self, levels: int) -> float | None:
        return self._random.choice((None, self._random.random() * levels))

    def pays(self, gain: float, levels: int = 1) -> bool:
        return self._random.random() < 0.7


def drafter_of(head: ModelRunner, batch: int = _SLOTS, *, seed: int = 0) -> WithNgrams:
    """Drafts with a head, and n-grams beside it; by no clock."""
    config, ngrams = head.decoder.config, NgramDrafter()
    if isinstance(config, DFlashConfig):
        return WithNgrams(DFlashDrafter(DFlashRunner(head, batch=batch), ngrams=ngrams), ngrams)
    drafts = DraftRunner(head, vocab_size=config.vocab_size, batch=batch)
    return WithNgrams(ModelDrafter(drafts, ngrams=ngrams, worth=DrawnWorth(seed)), ngrams)


class SlowRunner(ModelRunner):
    """A target behind whose passes there is time for so many steps of drafting ahead."""

    def __init__(self, runner: ModelRunner, drafter: WithNgrams, steps: int) -> None:
        super().__init__(runner.decoder, runner.streamer, runner.cache, runner.rope, runner.chunk_tokens)
        self.taps, self._drafter, self._steps = runner.taps, drafter, steps

    def forward(self, batch: Batch, *args: Any, **options: Any) -> Batch:
        passed, left = super().forward(batch, *args, **options), [True] * self._steps
        if batch.trees:
            self._drafter.draft.ahead(lambda: bool(left and left.pop()))
        return passed


@dataclass
class Decoding:
    """Texts that grow step by step: by slot."""

    target: ModelRunner
    drafter: WithNgrams
    sampling: SlotSampling
    texts: dict[int, list[int]]

    @classmethod
    def of(
        cls, target: ModelRunner, drafter: WithNgrams, prompts: Mapping[int, Sequence[int]],
        params: SamplingParams = PLAIN,
    ) -> Decoding:  # fmt: skip
        """Read prompts."""
        made = cls(target, drafter, SlotSampling(_SLOTS, CPU), {})
        made.join(prompts, params)
        return made

    def join(self, prompts: Mapping[int, Sequence[int]], params: SamplingParams = PLAIN) -> None:
        """Read further prompts, each by itself, as far as the target's cache has not read them yet."""
        for slot, prompt in prompts.items():
            self.sampling.assign(slot, params)
            self.drafter.join(slot, params)
            self.texts[slot] = list(prompt)
            (output,) = self._step({slot: self.texts[slot]}, {}, [slot]).values()
            assert len(output.tokens) == 1

    def step(self, budgets: Mapping[int, DraftBudget]) -> dict[int, StepOutput]:
        """One step of some of them."""
        return self._step({slot: self.texts[slot] for slot in budgets}, budgets, [])

    def leave(self, slot: int) -> list[int]:
        """End a text, whose tokens the target's cache keeps, and return it."""
        self.drafter.leave(slot)
        self.sampling.release(slot)
        return self.texts.pop(slot)

    def _step(
        self, texts: Mapping[int, list[int]], budgets: Mapping[int, DraftBudget], prepared: Sequence[int]
    ) -> dict[int, StepOutput]:
        outputs = run_step(self.target, self.sampling, self.drafter, texts, budgets, prepared=prepared)
        for slot, output in outputs.items():
            self.texts[slot] += output.tokens
        return outputs


def plainly(target: ModelRunner, prompt: Sequence[int], count: int, params: SamplingParams = PLAIN) -> list[int]:
    """A prompt and so many tokens behind it, decoded one by one. The target's first slot must be free."""
    sampling, text = SlotSampling.of([params], CPU), list(prompt)
    batch = target.forward(Batch(prompts={0: prompt}), sampling)
    for number in range(count):
        assert batch.tokens is not None
        text += batch.tokens()
        if number + 1 < count:
            batch = target.forward(Batch({0: TokenTree((text[-1],))}), sampling)
            target.cache.commit_path(0, [0])
    target.cache.truncate(0, 0)
    return text


@torch.inference_mode()
def logits_behind(
    target: ModelRunner, head: ModelRunner, text: Sequence[int], paths: Iterable[Sequence[int]], *, start: int = 1
) -> list[torch.Tensor]:
    """The head's logits [V] behind each path of proposals behind a text, whose rows are read at once with the target's
    hidden states of one prompt pass, from that of token `start` on; those of a path one by one, with what the row
    before has given. The target's last slot must be free."""
    slot = _SLOTS - 1
    target.cache.truncate(slot, 0)
    known = torch.cat([*target.forward(Batch(prompts={slot: text[:-1]})).hidden[slot]])[start - 1 :]
    target.cache.truncate(slot, 0)
    config, decoder = head.decoder.config, head.decoder
    assert isinstance(decoder, HeadDecoder)
    cache = KVCache(config, torch.float32, capacity_tokens=512, batch=1, budgets=[DeviceBudget(CPU, None)])
    alone = ModelRunner(decoder, head.streamer, cache, head.rope, head.chunk_tokens)

    def read(tokens: Sequence[int], given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache.begin_window([0], [len(tokens)])
        rows = replace(alone.rows([TokenTree(tuple(tokens))], [cache.length(0)], [0]), hidden=given)
        logits, given = decoder.outputs(window_residual(decoder, head.streamer.layers(), cache, rows))
        cache.commit(0, len(tokens))
        return logits[-1], given[-1:]

    of_text, found = read(text[start:], known), list[torch.Tensor]()
    for path in paths:
        cache.truncate(0, len(text) - start)
        logits, given = of_text
        for token in path:
            logits, given = read([token], given)
        found.append(logits)
    return found
