"""A small model embedded exactly into a larger Llama, as a checkpoint whose tensors are computed while they are read.

The residual stream is the small one padded with zeros. A norm over H instead of h channels then divides by a root that
is sqrt(h/H) times as large, which eps and the norm's weights make good:

    x / sqrt(sum(x^2)/H + eps*h/H) * (w * sqrt(h/H)) = x / sqrt(sum(x^2)/h + eps) * w

Attention divides scores by sqrt(D) instead of sqrt(d): the queries are multiplied by sqrt(D/d). All other rows and
columns hold random numbers, so that they cost what the large model costs, up to where they would reach the residual
stream: o_proj and down_proj are zero there, and so is all of them in the surplus layers.

An MTP layer that the small model carries is widened with it: fc reads two streams of H channels, which are padded so,
too. An EAGLE-3 head stays as small as it is, and so fast: of the large stream, which below each of the small model's
layers is the small one's, its fc reads the first channels.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial

import torch
import transformers
from widening.made import MadeCheckpoint, fill_gaussian, named_generator, transformers_config_of
from widening.rope import widened_rope
from widening.shapes import WideShape, check_architecture, check_fits, place_heads, shape_named

from offload_runtime.errors import OptionError, UnsupportedArchitectureError
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.eagle3 import Eagle3Config
from offload_runtime.models.mtp import QWEN_NAMES, MtpConfig
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.stream.arena import Staging
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import Fill
from offload_runtime.weights.layout import checkpoint_tensors

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class _Part:
    """How one kind of tensor holds the small one.

    `out[rows][:, columns] = small[sources] * scale`; None means the leading rows or columns, and all of the small
    tensor. `fill` is what the rest holds: the mean of random numbers of std 0.02, or None for zeros.
    """

    fill: float | None = 0.0
    scale: float = 1.0
    rows: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    silent_rows: torch.Tensor | None = None


class WidenedCheckpoint(MadeCheckpoint):
    """A `CheckpointSource` of the large shape that speaks the small model's language.

    Args:
        source: The small model, a plain Llama.
        shape: The large one's.
        noise: Relative standard deviation of Gaussian noise on the small model's matrices, w * (1 + noise * n), so
            that the small model drafts for the widened one without always being right. Norms are kept. SmolLM2-135M
            on prose, T=1, sum of min(p, q): 0.02 gives 0.93, 0.05 0.83, 0.1 0.66, 0.2 0.31; T=0.6 0.01 to 0.04 less.
        seed: Of the noise and of the surplus; each tensor is seeded by its name, in whatever order it is read.
        device: Where surplus random numbers are drawn. A GPU draws others, but the logits are the same: the noise
            always comes from the CPU.

    Raises:
        OptionError: The source does not fit the shape, or an option makes no sense.
        UnsupportedArchitectureError: The source is not a plain Llama, its RoPE scaling cannot be widened, or its MTP
            layer is not of Qwen's layout.
    """

    def __init__(
        self, source: CheckpointSource, shape: WideShape, noise: float = 0.0, seed: int = 0, *,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        if not (math.isfinite(noise) and noise >= 0):
            raise OptionError(f"noise must be 0 or a positive number, not {noise}")
        small = source.config()
        check_architecture(small)
        check_fits(small, shape)
        self._source, self._small, self._shape = source, small, shape
        self._noise, self._seed = noise, seed
        self._device = device or torch.device("cpu")
        mtp, sources, reference = source.read_mtp(), [source], f"{source.reference} (widened)"
        described = self._widened_config()
        config = model_config_from_json(described.to_dict(), "config.json")
        wide_mtp = None
        if isinstance(mtp, CheckpointSource):
            if getattr(mtp.config(), "names", None) != QWEN_NAMES:
                raise UnsupportedArchitectureError(f"{mtp.reference} is no `mtp.*`, and cannot be widened: take it out")
            sources.append(mtp)
            wide_mtp = CheckpointSource(
                MtpConfig.of(config), source.native_dtype, f"{reference}'s MTP layer", mtp.settings,
                self._fills_of(MtpConfig.of(config)), lambda: None,
            )  # fmt: skip
        self._small_fills = {name: fill for one in sources for name, fill in one.fills.items()}
        placed = (checkpoint_tensors(one.config()) for one in sources)
        self._small_shapes = {name: to.shape for one in placed for name, to in one.items()}
        super().__init__(reference, described, config, source, self._fills_of(config), mtp=wide_mtp)
        self._parts = self._make_parts()

    def _fills_of(self, config: ModelConfig) -> dict[str, Fill]:
        return {name: partial(self._fill, name) for name in checkpoint_tensors(config)}

    def _widened_config(self) -> transformers.LlamaConfig:
        small, shape, described = self._small, self._shape, transformers_config_of(self._source)
        return transformers.LlamaConfig(
            vocab_size=small.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            max_position_embeddings=small.max_position_embeddings,
            rms_norm_eps=small.attention.norm.eps * small.hidden_size / shape.hidden_size,
            rope_parameters=widened_rope(small, shape.head_dim), tie_word_embeddings=False,
            bos_token_id=described.bos_token_id, eos_token_id=described.eos_token_id,
            pad_token_id=getattr(described, "pad_token_id", None),
        )  # fmt: skip

    def _make_parts(self) -> dict[str, _Part]:
        """By the last words of a tensor's name, without `.weight`."""
        small, shape = self._small, self._shape
        places = place_heads(small, shape)
        norm, channels = _Part(fill=1.0, scale=math.sqrt(small.hidden_size / shape.hidden_size)), small.hidden_size
        both = torch.cat([torch.arange(channels), torch.arange(channels) + shape.hidden_size])
        of_mtp = {QWEN_NAMES.fc: _Part(fill=None, columns=both), **dict.fromkeys(QWEN_NAMES[2:], norm)}
        return of_mtp | {
            "model.embed_tokens": _Part(fill=None), "lm_head": _Part(), "model.norm": norm, "input_layernorm": norm,
            "post_attention_layernorm": norm,
            "self_attn.q_proj": _Part(
                scale=math.sqrt(shape.head_dim / small.attention.head_dim),
                rows=places.query_rows,
                silent_rows=places.silent_query_rows,
            ),
            "self_attn.k_proj": _Part(rows=places.key_rows, sources=places.key_sources),
            "self_attn.v_proj": _Part(rows=places.value_rows, sources=places.value_sources),
            "self_attn.o_proj": _Part(fill=None, columns=places.output_columns), "mlp.gate_proj": _Part(),
            "mlp.up_proj": _Part(), "mlp.down_proj": _Part(fill=None),
        }  # fmt: skip

    def _read_small(self, name: str) -> torch.Tensor | None:
        """The small model's tensor in fp32 with its noise; None for a layer that it does not have."""
        if name == _HEAD and self._small.tie_word_embeddings:
            name = _EMBEDDING  # noise and all: the noisy small model is tied too
        if name not in self._small_fills:
            return None
        small = torch.empty(self._small_shapes[name])
        self._small_fills[name](small)
        if self._noise and small.dim() > 1:
            generator = named_generator(small.device, self._seed, "noise", name)
            small *= torch.randn(small.shape, generator=generator).mul_(self._noise).add_(1.0)
        return small

    def _fill(self, name: str, out: torch.Tensor, _: Staging | None = None) -> None:
        """Compute one tensor of the large model into `out` (contiguous)."""
        part = self._parts[re.sub(r"^(?:model|mtp)\.layers\.\d+\.", "", name.removesuffix(".weight"))]
        if part.fill is None:
            out.zero_()
        else:
            fill_gaussian(out, named_generator(self._device, self._seed, "surplus", name), mean=part.fill)
        small = self._read_small(name)
        if small is None:
            return
        values = (small if part.sources is None else small[part.sources]).mul_(part.scale).to(out)
        if out.dim() == 1:
            out[: values.shape[0]] = values
            return
        width = small.shape[1]
        if part.silent_rows is not None:
            out[part.silent_rows, :width] = 0
        if part.columns is not None:
            out[: values.shape[0], part.columns] = values
        elif part.rows is not None:
            out[part.rows, :width] = values
        else:
            out[: values.shape[0], :width] = values


def in_shape(
    small: CheckpointSource, shape: str, noise: float = 0.0, *, layers: int | None = None,
    device: torch.device | None = None,
) -> CheckpointSource:  # fmt: skip
    """The small model in a shape by its name, cut to so many `layers`; the small model itself for `none`.

    Raises:
        OptionError: There is no such shape; errors as of `WidenedCheckpoint`.
    """
    return small if shape == "none" else WidenedCheckpoint(small, shape_named(shape, layers), noise, device=device)


def widened_head(head: CheckpointSource, shape: WideShape) -> CheckpointSource:
    """An EAGLE-3 head of a small model for that model in a large shape.

    Raises:
        OptionError: It is another head, or does not say which layers it reads the target below: in the large shape
            there are more of them.
    """
    config = head.config()
    if not isinstance(config, Eagle3Config) or not config.taps or config.target_size > shape.hidden_size:
        raise OptionError(
            f"{head.reference} is no EAGLE-3 head for a model of at most {shape.hidden_size} channels that names the "
            "layers below which it reads it: train one with train_head.py, or take --shape none"
        )

    def fill(out: torch.Tensor, _: Staging | None = None) -> None:
        small = torch.empty(config.hidden_size, len(config.taps) * config.target_size)
        head.fills["fc.weight"](small)
        out.zero_().unflatten(1, (len(config.taps), -1))[..., : config.target_size] = small.unflatten(
            1, (len(config.taps), -1)
        ).to(out)

    wide = replace(config, target_size=shape.hidden_size)
    return replace(head, model_config=wide, fills={**head.fills, "fc.weight": fill})


def noisy_copy(small: CheckpointSource, noise: float, *, device: torch.device | None = None) -> CheckpointSource:
    """The small model with noise on its matrices: a draft that is right less often."""
    same = WideShape.of(small.config())
    return WidenedCheckpoint(small, same, noise, device=device)
