"""Heads: small decoders that guess on, beside each token, from what the target made of the token before it.

A row of a head is about a token behind the first: it reads that token, and what was kept (`HeadConfig.tap`) of the
target's residual stream of the token before it. Its logits are about the token that follows; behind a token that is
only proposed the row reads what the head itself gives in place of the target (`HeadConfig.leave`). The first row is
about token 1 and stands in the head's cache, and rotates, as position 0.

What a head has no tensors of is the target's own: `embedding`, `lm_head`, and `target_norm`, its final norm, are among
the `shared` weights that it is given. A kind of heads is a file of this folder and a line of `registry.HEADS`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from typing_extensions import Self

from offload_runtime.config import SOURCES
from offload_runtime.errors import CheckpointError, VocabularyMismatchError
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import Tensor, Weights


@dataclass(frozen=True)
class HeadConfig(ModelConfig):
    """One head, which is never tied: its `vocab_size` is the target's, and what it has of its own it says.

    Attributes:
        target_size: Channels of the target's residual stream, T.
        taps: The layers of the target that the stream is read below; their number means behind the last.
        owned: Which of `embedding` and `lm_head` it has.
        taps_in_place: Whether the only tap is behind the last layer and may write over the rows that it reads.
    """

    is_head: ClassVar[bool] = True
    taps_in_place: ClassVar[bool] = False
    target_size: int = field(kw_only=True)
    taps: tuple[int, ...] = field(kw_only=True)
    owned: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    def title(self) -> str:
        """Return what people call such heads."""
        return SOURCES[self.name]

    @property
    def width(self) -> int:
        """Return the channels of what is kept of a row of the target, W."""
        return self.hidden_size

    def tap(self, number: int, x: torch.Tensor, shared: Weights, out: torch.Tensor) -> None:
        """Write what is kept of the target's rows, or add to it what the tap of this number has to say: its product
        with its columns of `fc` [W, taps * T], if the head does not say otherwise.

        Args:
            number: Index into `taps`, whose order is kept.
            x: [N, T], the residual stream; it is left as it is.
            shared: What lies around the layers.
            out: [N, W]; whatever it holds before the first tap, or `x` itself.
        """
        start = number * x.shape[1]
        part = shared["fc"].dense[:, start : start + x.shape[1]].t()
        if number:
            out.addmm_(x, part)
        else:
            torch.mm(x, part, out=out)

    @abstractmethod
    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor, shared: Weights) -> torch.Tensor:
        """Return the residual stream at the bottom, [N, H] in memory of its own, of embedded tokens [N, H] and what is
        kept of the tokens before them, [N, W]."""

    def leave(self, residual: torch.Tensor, shared: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of the residual stream behind the last layer, [N, H], the normed rows that the `lm_head` reads, [N,
        H], and what stands for the target's in rows about the tokens that follow, [N, W]: mostly the same."""
        normed = self.attention.norm(residual, shared["final_norm"].dense)
        return normed, normed

    @property
    def logit_size(self) -> int:
        """Return how many tokens the head has logits of; it proposes no others."""
        return self.vocab_size

    @abstractmethod
    def own_tensors(self) -> Iterator[Tensor]:
        """Return what lies around the layers by whole names, but for an embedding and a head of its own."""

    def shared_tensors(self) -> Iterator[Tensor]:
        """Return what lies around the layers that the head has itself."""
        if "embedding" in self.owned:
            yield Tensor("embedding", "embed_tokens.weight", (self.vocab_size, self.hidden_size))
        yield from self.own_tensors()
        if "lm_head" in self.owned:
            yield Tensor("lm_head", "lm_head.weight", (self.logit_size, self.hidden_size))

    def layer_prefix(self, number: int) -> str:
        """Return what stands before the names of a layer's tensors."""
        return f"layers.{number}."

    def fitted(self, target: ModelConfig) -> Self:
        """Return the head as it is beside its target.

        Raises:
            VocabularyMismatchError: It is about other tokens.
            CheckpointError: It is about another model, as a size says.
        """
        remedy = "take the head that was made for this target, or --draft auto"
        if self.vocab_size != target.vocab_size:
            raise VocabularyMismatchError(
                f"the {self.title} head is about {self.vocab_size} tokens and the target has {target.vocab_size}: "
                f"{remedy}"
            )
        size, count, own = target.hidden_size, target.num_layers, self.hidden_size
        lacks = " and ".join(part for part in ("embedding", "lm_head") if part not in self.owned)
        wrong = {
            f"reads rows of {self.target_size} channels, and the target's have {size}": self.target_size != size,
            f"has no {lacks}, rows of {own} channels, and the target's have {size}": own != size and bool(lacks),
            f"reads the target below layers {self.taps}, which have to be in order and up to {count}": (
                [*self.taps] != sorted(self.taps) or max(self.taps) > count
            ),
        }
        for what in (what for what, is_so in wrong.items() if is_so):
            raise CheckpointError(f"the {self.title} head {what}: {remedy}")
        return self
