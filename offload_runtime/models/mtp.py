"""MTP: a layer of the target's own family, which models carry to guess the token after the next one.

Qwen3-Next and Qwen3.5 have it as `mtp.*`, and so may any other family; GLM-4.5 as a layer behind the last
(`model.layers.N`, of DeepSeek's layout), whose tensors have the names of the former once they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.heads import HeadConfig
from offload_runtime.models.layers import Attention, Tensor, Weights

PREFIX = "mtp."


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """What is kept of a row is the target's normed output, h:

        x = fc [norm(embedding), norm(h)], then the layers, then a norm of its own and the target's `lm_head`

    Attributes:
        keeps_normed: Whether rows about the tokens that follow read the normed output, and not the residual stream.
    """

    title: ClassVar[str] = "MTP"
    name: ClassVar[str] = "mtp"
    keeps_normed: bool = True

    @classmethod
    def of(cls, target: ModelConfig, *, keeps_normed: bool = True, owned: frozenset[str] = frozenset()) -> MtpConfig:
        """Return the head of a model: one more layer as its last one that attends to everything, or that attends."""
        attentions = {number: one for number, one in target.attentions.items() if one.window is None}
        layer = target.layers[max(attentions or target.attentions)]
        assert isinstance(layer.attention, Attention)
        around = {one.name: getattr(target, one.name) for one in fields(ModelConfig)}
        around |= {"layers": (layer,), "tie_word_embeddings": False}
        taps = (target.num_layers,)
        return cls(**around, target_size=target.hidden_size, taps=taps, keeps_normed=keeps_normed, owned=owned)

    def tap(self, number: int, x: torch.Tensor, shared: Weights, out: torch.Tensor) -> None:
        """Write the target's normed output."""
        self.attention.norm(x, shared["target_norm"].dense, out=out)

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor, shared: Weights) -> torch.Tensor:
        """Return both, normed, as one stream."""
        norm = self.attention.norm
        both = norm(embedded, shared["embedding_norm"].dense), norm(hidden, shared["hidden_norm"].dense)
        return shared["fc"].linear(torch.cat(both, dim=1))

    def leave(self, residual: torch.Tensor, shared: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normed rows, and what is kept."""
        normed = self.attention.norm(residual, shared["final_norm"].dense)
        return normed, normed if self.keeps_normed else residual

    def own_tensors(self) -> Iterator[Tensor]:
        """`fc` [H, 2H], whose first half is the embedding's, both norms before it and the `final_norm`."""
        size = self.hidden_size
        yield Tensor("fc", f"{PREFIX}fc.weight", (size, 2 * size))
        yield Tensor("embedding_norm", f"{PREFIX}pre_fc_norm_embedding.weight", (size,))
        yield Tensor("hidden_norm", f"{PREFIX}pre_fc_norm_hidden.weight", (size,))
        yield Tensor("final_norm", f"{PREFIX}norm.weight", (size,))

    def name_of(self, name: str) -> str:
        """Return the whole name of a tensor."""
        return PREFIX + name
