"""Checkpoints that are computed while they are read: what they have in common, and models of random numbers."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import transformers
from widening.shapes import WideShape

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.stream.arena import Staging
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import Fill
from offload_runtime.weights.layout import checkpoint_tensors

_STD = 0.02
# Of biases of routers, whose products with rows have a std of about 1. Of 128 experts, 4 a row, a pool of 18, 28 and
# 36 % then has 0.50, 0.65 and 0.76 of those that are chosen; of 18 and 36 % of 512 experts 0.44 and 0.62 are published.
_ROUTER_SPREAD = 0.6
# Tokens of a text have a topic, which so much of them is, and the next one stays at it so often. Of 128 experts, 4 a
# row, 0.41 are then chosen by the token before, too, 0.80 by one of eight, and a pool of 18, 27, 36 and 40 % has 0.89,
# 0.91, 0.94 and 0.945. Of Qwen3-30B-A3B 0.45 and 0.80 are published, and 0.90 to 0.95 of 40 %: with such reuse no pool
# has as few as those above.
_TOPIC_TOKENS, _TOPIC_SHARE, _STAYS = 64, 0.7, 0.985
_LOUD = 16.0  # the std of an embedding that is most of what the last layer sees
_EMBEDDING, _HEAD = BY_TOPIC = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK_ELEMENTS = 1 << 22  # random numbers drawn at a time: 16 MiB of fp32


def named_generator(device: torch.device, *words: object) -> torch.Generator:
    """A generator seeded by words, so that each tensor's numbers depend on its name alone."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fill_gaussian(out: torch.Tensor, generator: torch.Generator, *, mean: float) -> None:
    """Numbers of std 0.02 around `mean`, made on the generator's device, into a tensor of any shape and dtype."""
    flat = out.view(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        numbers = torch.randn(part.numel(), generator=generator, device=generator.device)
        part.copy_(numbers.mul_(_STD).add_(mean).to(out.dtype))


def transformers_config_of(source: CheckpointSource) -> Any:
    """What transformers makes of a checkpoint's settings."""
    return transformers.AutoConfig.for_model(**source.settings)


class Wordless:
    """What a model without a language has as its tokenizer: tokens are numbers that mean nothing."""

    added_tokens_decoder: Mapping[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        """No words: the same of every such model."""
        return {}

    get_added_vocab = get_vocab

    def convert_ids_to_tokens(self, token: int) -> str:
        """A name for a token, where its log-probability is told."""
        return f"<{token}>"

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """No text."""
        return ""


class MadeCheckpoint(CheckpointSource):
    """A `CheckpointSource` whose tensors come from elsewhere.

    Args:
        reference: What it is, for messages.
        hf_config: The transformers configuration object.
        config: Shape and flags.
        words: Gives the tokenizer, the dtype and the tokens that end an answer; without it there is no text and no end.
        fills: As of `CheckpointSource`.
        tokenizer: Where it is not that of `words`.
        mtp: The MTP layer that it carries.
    """

    def __init__(
        self, reference: str, hf_config: Any, config: ModelConfig, words: CheckpointSource | None,
        fills: Mapping[str, Fill], *, tokenizer: Callable[[], Any] | None = None, mtp: CheckpointSource | None = None,
    ) -> None:  # fmt: skip
        dtype = torch.bfloat16 if words is None else words.native_dtype
        generation = {} if words is None else words.generation
        tokenizer = tokenizer or (words.tokenizer if words else Wordless)
        settings = hf_config.to_dict()
        super().__init__(config, dtype, reference, settings, fills, tokenizer, generation, read_mtp=lambda: mtp)

    def as_source(self, **changes: Any) -> CheckpointSource:
        """The same as a source like any other, of which a changed copy can be made; what is named is otherwise."""
        same = {field.name: getattr(self, field.name) for field in fields(CheckpointSource)}
        return CheckpointSource(**(same | changes))


def fill_vector(name: str, out: torch.Tensor, generator: torch.Generator) -> None:
    """Norms of ones; rates and time steps of gated delta layers by which heads forget over 1 to 1000 tokens, as in new
    models; biases around zero, by those of routers some experts are chosen more often than others."""
    if name.endswith("bias") and not name.endswith("dt_bias"):
        spread = _ROUTER_SPREAD if name.endswith("router.bias") else _STD
        out.copy_(torch.randn(out.shape, generator=generator, device=generator.device).mul_(spread))
        return
    if name.endswith(("A_log", "dt_bias")):
        low, high = (1.0, 16.0) if name.endswith("A_log") else (1e-3, 0.1)
        drawn = torch.rand(out.shape, generator=generator, device=generator.device) * math.log(high / low)
        drawn += math.log(low)
        out.copy_(drawn if name.endswith("A_log") else drawn.exp().expm1().log())
    else:
        out.fill_(1)


def fill_by_topic(name: str, out: torch.Tensor, seed: int) -> None:
    """Fill one of `BY_TOPIC`, [V, H]: tokens of a topic are embedded alike, and alike are what the head says next."""
    (vocab_size, width), cpu = out.shape, torch.device("cpu")
    topics, own = named_generator(cpu, seed, "topics"), named_generator(cpu, seed, name)
    stays = math.log(_STAYS / (1 - _STAYS) * max(1, vocab_size / _TOPIC_TOKENS - 1))
    shared, single = _LOUD * _TOPIC_SHARE**0.5, _LOUD * (1 - _TOPIC_SHARE) ** 0.5
    if name == _HEAD:
        shared, single = stays / (_TOPIC_SHARE**0.5 * width), _STD
    for rows in out.split(_TOPIC_TOKENS):
        topic = torch.randn(width, generator=topics) * shared
        rows.copy_(torch.randn(rows.shape, generator=own).mul_(single).add_(topic))


def text_by_topic(tokens: int, vocab_size: int, draw: random.Random) -> list[int]:
    """So many tokens as a model of `fill_by_topic` says them."""
    said = [draw.randrange(vocab_size)]
    while len(said) < tokens:
        first = said[-1] // _TOPIC_TOKENS * _TOPIC_TOKENS
        topic = range(first, min(vocab_size, first + _TOPIC_TOKENS)) if draw.random() < _STAYS else range(vocab_size)
        said.append(draw.choice(topic))
    return said


class UntrainedModel(MadeCheckpoint):
    """A `CheckpointSource` of which just the cost of passes is measured.

    Args:
        shape: Of the decoder.
        fill: Computes the tensor of a name into a tensor of its shape.
        vocab_size: Rows of embedding and head.
        context_tokens: Longest context.
        reference: What it is, for messages.
        words: As of `MadeCheckpoint`.
    """

    def __init__(
        self, shape: WideShape, fill: Callable[[str, torch.Tensor, Staging | None], None], *, vocab_size: int,
        context_tokens: int, reference: str, words: CheckpointSource | None = None,
    ) -> None:  # fmt: skip
        described = None if words is None else transformers_config_of(words)
        hf_config = transformers.AutoConfig.for_model(
            **shape.settings(), vocab_size=vocab_size, max_position_embeddings=context_tokens,
            bos_token_id=getattr(described, "bos_token_id", None),
            eos_token_id=getattr(described, "eos_token_id", None),
            pad_token_id=getattr(described, "pad_token_id", None),
        )  # fmt: skip
        config = model_config_from_json(hf_config.to_dict(), "config.json")
        fills = {name: partial(fill, name) for name in checkpoint_tensors(config)}
        super().__init__(reference, hf_config, config, words, fills)


def random_model(
    shape: WideShape, seed: int = 0, *, vocab_size: int, context_tokens: int, reference: str,
    words: CheckpointSource | None = None, device: torch.device | None = None,
) -> UntrainedModel:  # fmt: skip
    """Random weights: a target, or a draft whose steps cost what a known small model's cost.

    Args:
        shape: What is made.
        seed: Each tensor is seeded by its name, in whatever order it is read.
        vocab_size, context_tokens, reference, words: As of `UntrainedModel`.
        device: Where the numbers are drawn: a CPU core needs minutes for 7B of them. A GPU draws others.
    """

    def fill(name: str, out: torch.Tensor, _: Staging | None = None) -> None:
        generator = named_generator(device or torch.device("cpu"), seed, "random", name)
        if out.dim() == 1:
            fill_vector(name, out, generator)
        else:
            fill_gaussian(out, generator, mean=0.0)

    return UntrainedModel(
        shape, fill, vocab_size=vocab_size, context_tokens=context_tokens, reference=reference, words=words
    )
