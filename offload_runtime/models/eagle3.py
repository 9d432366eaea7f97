"""EAGLE-3: a checkpoint of its own with a layer that reads three places of the target's residual stream at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from offload_runtime.models.heads import HeadConfig, join_tap
from offload_runtime.models.layers import DecoderLayer, LayerWeights, Rows, Tensor, Weights


@dataclass(frozen=True)
class FirstLayer(DecoderLayer):
    """The first layer, whose attention reads the embedded tokens beside the residual stream, 2H channels of a row.

    Attributes:
        normed_residual: Whether the residual stream itself is normed there, and not only what attention reads of it.
    """

    normed_residual: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """The norm of the residual stream before those of every layer: `input_layernorm` is the embedding's."""
        yield Tensor("hidden_norm", "hidden_norm.weight", (self.attention.hidden_size,))
        yield from super().tensors()

    @property
    def row_elements(self) -> int:
        """Elements that a row takes on its way: as in every layer, and both inputs, normed and joined."""
        return super().row_elements + 4 * self.attention.hidden_size

    def attention_input(self, residual: torch.Tensor, weights: LayerWeights, rows: Rows) -> torch.Tensor:
        """Return both, normed: [N, 2H]. The `embedding` is among the weights."""
        norm, embedded = self.attention.norm, weights["embedding"].rows(rows.tokens)
        hidden = norm(residual, weights["hidden_norm"].dense)
        if self.normed_residual:
            residual.copy_(hidden)
        return torch.cat((norm(embedded, weights["input_layernorm"].dense), hidden), dim=1)


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """What is kept of a row is h, in which all taps are joined; rows about the tokens that follow read the residual
    stream before the final norm in its place:

        h = fc [tap 0, tap 1, tap 2], from which the layers go on

    Attributes:
        fused: Whether there is such an `fc`; else h is the only tap.
        draft_vocab_size: Tokens that it has logits of; `d2t` says which.
    """

    title: ClassVar[str] = "EAGLE-3"
    name: ClassVar[str] = "eagle3"
    draft_vocab_size: int = field(kw_only=True)
    fused: bool = True

    def tap(self, number: int, x: torch.Tensor, shared: Weights, out: torch.Tensor) -> None:
        """Add this tap's product with its columns of `fc`."""
        if self.fused:
            join_tap(shared["fc"].dense, number, x, out)
        else:
            out.copy_(x)

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor, shared: Weights) -> torch.Tensor:
        """Return what is kept: layers add to it."""
        return hidden.clone()

    def leave(self, residual: torch.Tensor, shared: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normed rows, and the stream."""
        return self.attention.norm(residual, shared["final_norm"].dense), residual

    @property
    def logit_size(self) -> int:
        """Return how many tokens the head has logits of."""
        return self.draft_vocab_size

    def own_tensors(self) -> Iterator[Tensor]:
        """`fc` [H, taps * T], `final_norm` [H], and `d2t` [tokens that it has logits of], by how much the target's
        number of a token is larger than the head's."""
        if self.fused:
            yield Tensor("fc", "fc.weight", (self.hidden_size, len(self.taps) * self.target_size))
        yield Tensor("final_norm", "norm.weight", (self.hidden_size,))
        if self.draft_vocab_size != self.vocab_size:
            yield Tensor("d2t", "d2t", (self.draft_vocab_size,), torch.int64)
