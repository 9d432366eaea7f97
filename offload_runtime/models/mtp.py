"""MTP: a layer of the target's own family, which models carry to guess the token after the next one.

Qwen3-Next and Qwen3.5 have it as `mtp.*`, and so may any other family; GLM-4.5, and GGUF files of all, as one more
layer behind the last (`model.layers.N`, DeepSeek's layout). Of several such layers the first one is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

from offload_runtime.models.config import ModelConfig
from offload_runtime.models.heads import HeadConfig
from offload_runtime.models.layers import Tensor, Weights


class MtpNames(NamedTuple):
    """Says what the tensors of MTP layers are called, but for their suffix; `prefix` stands before those of the
    layer."""

    prefix: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    final_norm: str

    @classmethod
    def behind(cls, num_layers: int) -> MtpNames:
        """Return those of a layer behind so many."""
        prefix = f"model.layers.{num_layers}."
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        return cls(prefix, *(prefix + name for name in names))


QWEN_NAMES = MtpNames("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """What is kept of a row is the target's normed output, h:

        x = fc [norm(embedding), norm(h)], then the layer, then a norm of its own and the target's `lm_head`

    Rows about the tokens that follow read its normed output in place of h: so Megatron trains such layers, and SGLang
    runs them all; vLLM feeds GLM's the residual stream.

    Attributes:
        names: What its tensors are called.
    """

    name: ClassVar[str] = "mtp"
    taps_in_place: ClassVar[bool] = True
    names: MtpNames = QWEN_NAMES

    @classmethod
    def of(cls, target: ModelConfig, names: MtpNames = QWEN_NAMES) -> MtpConfig:
        """Return the head of a model: one more layer as its last one that attends to everything, or that attends."""
        whole = [number for number, one in target.attentions.items() if one.window is None]
        layer = target.layers[max(whole or target.attentions)]
        around = {one.name: getattr(target, one.name) for one in fields(ModelConfig)}
        around |= {"layers": (layer,), "tie_word_embeddings": False}
        size, taps = target.hidden_size, (target.num_layers,)
        return cls(**around, target_size=size, taps=taps, names=names)

    def tap(self, number: int, x: torch.Tensor, shared: Weights, out: torch.Tensor) -> None:
        """Write the target's normed output."""
        self.attention.norm(x, shared["target_norm"].dense, out=out)

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor, shared: Weights) -> torch.Tensor:
        """Return both, normed, as one stream."""
        norm = self.attention.norm
        both = norm(embedded, shared["embedding_norm"].dense), norm(hidden, shared["hidden_norm"].dense)
        return shared["fc"].linear(torch.cat(both, dim=1))

    def own_tensors(self) -> Iterator[Tensor]:
        """`fc` [H, 2H], whose first half is the embedding's, both norms before it and the `final_norm`."""
        size = self.hidden_size
        for packed in self.names._fields[1:]:
            shape = (size, 2 * size) if packed == "fc" else (size,)
            yield Tensor(packed, f"{getattr(self.names, packed)}.weight", shape)

    def layer_prefix(self, number: int) -> str:
        """Return what stands before the names of the layer's tensors."""
        return self.names.prefix


def mtp_of(settings: Mapping[str, Any], target: ModelConfig, names: Collection[str]) -> MtpConfig | None:
    """Return the head that a model carries; None where it carries none.

    Args:
        settings: What `config.json` says, or would.
        target: The model.
        names: Of the tensors that are there, by transformers' names; none where only the configuration is known.
    """
    behind = MtpNames.behind(target.num_layers)
    keys = {"num_nextn_predict_layers": behind, "mtp_num_hidden_layers": QWEN_NAMES}
    found = [layout for key, layout in keys.items() if settings.get(key)]
    if names:
        found = [layout for layout in (QWEN_NAMES, behind) if any(name.startswith(f"{layout.fc}.") for name in names)]
    return MtpConfig.of(target, found[-1]) if found else None
