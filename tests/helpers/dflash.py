"""Random DFlash drafters: their configurations, their tensors, and what they say by the definitions alone."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.dflash import HEAD, DFlashConfig
from offload_runtime.weights.layout import checkpoint_tensors

Tensors = dict[str, torch.Tensor]
BLOCK_SIZE, MASK, TAPS = 6, 7, (1, 2, 3)


def settings(target: ModelConfig, *, second: bool = False, **stated: Any) -> dict[str, Any]:
    """The content of a `config.json` of a small drafter, of either version, for a target of three layers or more."""
    own = {
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK,
        "target_layer_ids": [tap - 1 for tap in TAPS if tap <= target.num_layers],
    }
    if second:
        own |= {
            "conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 12, "selector_top_k": 5,
            "output_multiplier": 0.4, "final_logit_softcapping": 3.0,
        }  # fmt: skip
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"], "model_type": "qwen3",
        "hidden_act": "silu", "hidden_size": target.hidden_size, "intermediate_size": 96, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 1024, "dtype": "float32",
        "num_target_layers": target.num_layers, "dflash_config": own, **stated,
    }  # fmt: skip


def config_of(stated: Mapping[str, Any]) -> DFlashConfig:
    """What the settings mean."""
    config = HEAD.config(Fields("config.json", stated), ())
    assert isinstance(config, DFlashConfig)
    return config


def dflash2_of(target: ModelConfig, **changes: Any) -> DFlashConfig:
    """A drafter of the second version, all of whose layers slide; with changes of what is its own."""
    stated = settings(target, second=True, layer_types=["sliding_attention"] * 2, sliding_window=9, is_causal=False)
    stated["dflash_config"] |= {"final_logit_softcapping": None, **changes}
    return config_of(stated)


def counting_dflash2(tensors: Tensors) -> None:
    """Makes a drafter of the second version right about a target that counts: by pairs alone."""
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    name = "candidate_selector."
    tensors[f"{name}hidden_projection.weight"].zero_()[:, MASK] = 1  # where all rows are but a block's first
    for codebook, by in (("predecessor", 0), ("successor", 37)):
        codes = tensors[f"{name}{codebook}_codebook"]
        codes.copy_(torch.eye(len(codes)).roll(by, dims=0))


def random_tensors(config: DFlashConfig, seed: int = 0) -> Tensors:
    """All tensors of a drafter, large enough for its answers to depend on each."""
    generator, found = torch.Generator().manual_seed(seed), Tensors()
    for name, to in checkpoint_tensors(config).items():
        one = torch.randn(to.shape, generator=generator)
        is_norm = len(to.shape) == 1 and name.endswith("norm.weight")
        found[name] = 1 + 0.2 * one if is_norm else one * (2 / math.sqrt(to.shape[-1]))
    return found


def write_dflash(directory: Path, stated: Mapping[str, Any], tensors: Tensors) -> Path:
    """A directory with a drafter."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(stated))
    return directory


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Heads [N, H, D] rotated by their positions, halves against each other."""
    half = x.shape[-1] // 2
    angle = positions[:, None].float() * 1e4 ** -(torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), dim=-1)


def _read(stated: Mapping[str, Any], tensors: Tensors, layer: int, past: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What attention gives the rows x [T, H] of a block behind a past [S, H], projected back."""
    own, prefix = stated["dflash_config"], f"layers.{layer}.self_attn."
    heads, kv_heads, size, known = stated["num_attention_heads"], stated["num_key_value_heads"], 16, len(past)
    rows, positions = torch.cat((past, x)), torch.arange(known + len(x))

    def projected(name: str, of: torch.Tensor) -> torch.Tensor:
        return F.linear(of, tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias"))

    q = _norm(projected("q_proj", x).view(-1, heads, size), tensors[f"{prefix}q_norm.weight"])
    k = _norm(projected("k_proj", rows).view(-1, kv_heads, size), tensors[f"{prefix}k_norm.weight"])
    v = projected("v_proj", rows).view(-1, kv_heads, size)
    q, k = _turned(q, positions[known:]), _turned(k, positions)
    slides = (stated.get("layer_types") or ["full_attention"] * 9)[layer] == "sliding_attention"
    causal = stated.get("is_causal", own.get("causal", slides))
    distance = positions[known:, None] - positions
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if slides:
        visible &= distance < stated["sliding_window"]
    k, v = (one.repeat_interleave(heads // kv_heads, dim=1) for one in (k, v))
    logits = torch.einsum("thd,shd->hts", q, k) * size**-0.5
    logits = logits.masked_fill(~visible, -torch.inf)
    sinks = tensors.get(f"{prefix}attention_sink_bias")
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None, None].expand(-1, len(x), 1)), dim=2)
    out = torch.einsum("hts,shd->thd", logits.softmax(-1)[..., : len(rows)], v)
    return projected("o_proj", out.flatten(1))


def _convolved(x: torch.Tensor, base: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Rows [T, H], convolved with learnt kernels [K, H] and made ones [T, K, groups], element by element."""
    out, group = torch.zeros_like(x), x.shape[1] // made.shape[2]
    for t in range(len(x)):
        for back in range(min(len(base), t + 1)):
            out[t] += (base[back] + made[t, back].repeat_interleave(group)) * x[t - back]
    return out


def block_logits(
    stated: Mapping[str, Any], tensors: Tensors, embedding: torch.Tensor, lm_head: torch.Tensor, taps: torch.Tensor,
    last: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The logits of the places of a block, [T - 1, V], and their normed rows [T - 1, H], all computed anew.

    Args:
        stated, tensors: The drafter.
        embedding, lm_head: The target's.
        taps: [S, taps, H], the target's residual streams of the tokens before the last one.
        last: The text's last token.
    """
    own = stated["dflash_config"]
    context = _norm(F.linear(taps.flatten(1), tensors["fc.weight"]), tensors["hidden_norm.weight"])
    x = embedding[torch.tensor([last] + [own["mask_token_id"]] * (own["block_size"] - 1))]
    second = "conv_kernel_size" in own
    for layer in range(stated["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        for part, norm in (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm")):
            rows = _norm(x, tensors[f"{prefix}{norm}.weight"])
            base = made = rows
            if second:
                base = tensors[f"{prefix}{part}_conv.base_kernel"]
                made = F.linear(rows, tensors[f"{prefix}{part}_conv.kernel_projection.weight"])
                made = made.view(len(x), 2, own["conv_kernel_size"], -1)
                rows = _convolved(rows, base[0], made[:, 0])
            if part == "attention":
                out = _read(stated, tensors, layer, context, rows)
            else:
                gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
                out = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
            x = x + (_convolved(out, base[1], made[:, 1]) if second else out)
    normed = _norm(x, tensors["norm.weight"])[1:]
    logits = F.linear(normed, lm_head) * own.get("output_multiplier", 1.0)
    cap = own.get("final_logit_softcapping")
    return logits if cap is None else torch.tanh(logits / cap) * cap, normed


def best_chain(
    stated: Mapping[str, Any], tensors: Tensors, logits: torch.Tensor, normed: torch.Tensor, last: int
) -> Sequence[int]:
    """The tokens that a drafter proposes greedily, as its version chooses them."""
    own = stated["dflash_config"]
    if "selector_rank" not in own:
        chosen: list[int] = logits.argmax(1).tolist()
        return chosen
    name, path = "candidate_selector.", list[int]()
    seen = F.linear(normed, tensors[f"{name}hidden_projection.weight"])
    for place, row in enumerate(logits):
        best, candidates = row.topk(own["selector_top_k"])
        before = tensors[f"{name}predecessor_codebook"][last] * seen[place]
        last = int(candidates[(best + tensors[f"{name}successor_codebook"][candidates] @ before).argmax()])
        path.append(last)
    return path
