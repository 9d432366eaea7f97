"""Heads of random small models, and what they say, computed for a whole sequence at once from their definitions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from offload_runtime.core import TokenTree
from offload_runtime.models.mtp import MtpConfig
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.sources import describe_model
from tests.helpers.assembly import Assembled
from tests.helpers.families import family_model

QWEN_MODULES = {"fc": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@dataclass
class Mtp:
    """The head of a model: `block` is a model of its family with the head's only layer, norm and the target's head, and
    the others [H, 2H], [H], [H]."""

    target: Any
    block: Any
    eh_proj: torch.Tensor
    enorm: torch.Tensor
    hnorm: torch.Tensor
    offset: float  # what is added to the weights of norms

    @classmethod
    def of(cls, family: str, target: Any, seed: int) -> Mtp:
        """One for a target of this family and seed."""
        generator, size = torch.Generator().manual_seed(seed + 1000), target.config.hidden_size
        changes: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
        if getattr(target.config, "layer_types", None):
            changes["layer_types"] = ["full_attention"]
        block = family_model(family, seed, **changes, tie_word_embeddings=False)
        block.lm_head.weight = target.lm_head.weight
        around = [
            scale * torch.randn(shape, generator=generator) + first
            for shape, scale, first in (((size, 2 * size), size**-0.5, 0), ((size,), 0.2, 1), ((size,), 0.2, 1))
        ]
        return cls(target, block, *around, offset=1.0 if family.startswith("qwen3_") and family != "qwen3_moe" else 0.0)

    def tensors(self, layout: str) -> dict[str, torch.Tensor]:
        """As a checkpoint has them: of Qwen's layout, or of DeepSeek's."""
        number = self.target.config.num_hidden_layers
        prefix, layer = ("mtp.", "mtp.layers.0.") if layout == "qwen" else (f"model.layers.{number}.",) * 2
        state = self.block.state_dict()
        found = {
            name.replace("model.layers.0.", layer): tensor
            for name, tensor in state.items()
            if name.startswith("model.layers.0.")
        }
        around = {"fc" if layout == "qwen" else "eh_proj": self.eh_proj, "enorm": self.enorm, "hnorm": self.hnorm}
        around["shared_head.norm"] = state["model.norm.weight"]
        for name, tensor in around.items():
            found[f"{prefix}{QWEN_MODULES[name] if layout == 'qwen' else name}.weight"] = tensor
        return found

    @torch.no_grad()
    def target_hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """The target's normed output, [T, H]."""
        return self.target.model(torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Behind tokens of which `hidden` [T, H] is about those before them: logits [T, V], and the layer's normed
        output."""
        eps = self.target.config.rms_norm_eps
        embedded = self.target.model.embed_tokens(torch.tensor(list(tokens)))
        e = _normed(embedded, self.enorm + self.offset, eps)
        h = _normed(hidden, self.hnorm + self.offset, eps)
        x = torch.cat((e, h), dim=-1) @ self.eh_proj.T
        out = self.block.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return self.target.lm_head(out), out


def write_mtp(directory: Path, mtp: Mtp, layout: str, key: str) -> Path:
    """A target and its head as a checkpoint of transformers, whose configuration says by `key` that there is one."""
    mtp.target.save_pretrained(directory)
    file = directory / "model.safetensors"
    stored = {name: tensor.contiguous() for name, tensor in mtp.tensors(layout).items()}
    save_file({**load_file(file), **stored}, file, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, key: 1}))
    return directory


@dataclass
class Eagle3:
    """A head of random tensors by their usual names, and what its configuration says."""

    tensors: dict[str, torch.Tensor]
    settings: dict[str, Any]

    @classmethod
    def of(cls, target: Any, seed: int = 0, *, size: int | None = None, taps: Sequence[int] = (0, 1, 2),
           draft_vocab: int | None = None, **options: Any) -> Eagle3:  # fmt: skip
        """One for a target. `size` is the head's own, `options` belong to its configuration."""
        config, generator = target.config, torch.Generator().manual_seed(seed)
        hidden, heads, kv_heads, head_dim, inner = size or config.hidden_size, 4, 2, 16, 72
        known = draft_vocab or config.vocab_size
        biased = {"attention_bias": "self_attn.", "mlp_bias": "mlp."}
        q, kv = heads * head_dim, kv_heads * head_dim
        of_layer = {
            "self_attn.q_proj": (q, 2 * hidden), "self_attn.k_proj": (kv, 2 * hidden),
            "self_attn.v_proj": (kv, 2 * hidden), "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (hidden,)),
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {f"midlayer.{name}": shape for name, shape in of_layer.items()}
        shapes |= {"norm": (hidden,), "fc": (hidden, len(taps) * config.hidden_size), "lm_head": (known, hidden)}
        if options.get("fc_norm"):
            shapes |= {f"fc_norm.{number}": (config.hidden_size,) for number in range(len(taps))}
        if options.get("norm_before_fc"):
            shapes["input_norm"] = (len(taps) * config.hidden_size,)
        if size is not None:
            shapes["embed_tokens"] = (config.vocab_size, hidden)
        tensors = dict[str, torch.Tensor]()
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            tensors[f"{name}.weight"] = 1 + 0.2 * noise if len(shape) == 1 else 1.5 * noise * shape[-1] ** -0.5
            if any(options.get(key) and part in name for key, part in biased.items()):
                tensors[f"{name}.bias"] = 0.5 * torch.randn(shape[:1], generator=generator)
        settings = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "vocab_size": config.vocab_size, "draft_vocab_size": known, "max_position_embeddings": 512,
            "torch_dtype": "float32", "eagle_aux_hidden_state_layer_ids": list(taps), **options,
        }  # fmt: skip
        if size is not None:
            settings["target_hidden_size"] = config.hidden_size
        if draft_vocab is not None:
            ids = torch.randperm(config.vocab_size, generator=generator)[:known].sort().values
            tensors["d2t"] = ids - torch.arange(known)
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        return cls(tensors, settings)

    def write(self, directory: Path) -> Path:
        """A directory with it."""
        directory.mkdir(exist_ok=True)
        save_file({name: one.contiguous() for name, one in self.tensors.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(self.settings))
        return directory

    @torch.no_grad()
    def joined(self, target: Any, tokens: Sequence[int]) -> torch.Tensor:
        """What the head reads of a target's residual stream: [T, H]."""
        found = target.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
        read = [found[tap][0] for tap in self.settings["eagle_aux_hidden_state_layer_ids"]]
        if self.settings.get("fc_norm"):
            read = [_normed(x, self.tensors[f"fc_norm.{number}.weight"], 1e-5) for number, x in enumerate(read)]
        together = torch.cat(read, dim=-1)
        if self.settings.get("norm_before_fc"):
            together = _normed(together, self.tensors["input_norm.weight"], 1e-5)
        return together @ self.tensors["fc.weight"].T

    @torch.no_grad()
    def logits(self, target: Any, tokens: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Behind tokens of which `hidden` is about those before them: logits [T, V] of the target's tokens, and the
        residual stream behind the layer, or what a head that says so gives on in its place."""
        own, eps, count = self.settings, self.settings["rms_norm_eps"], len(tokens)
        weight = {name.removesuffix(".weight"): tensor for name, tensor in self.tensors.items()}

        def projected(name: str, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, weight[name], self.tensors.get(f"{name}.bias"))

        def normed(name: str, x: torch.Tensor) -> torch.Tensor:
            return _normed(x, weight[name], eps)

        embedding = weight.get("embed_tokens", target.model.embed_tokens.weight)
        e, h = normed("midlayer.input_layernorm", embedding[list(tokens)]), normed("midlayer.hidden_norm", hidden)
        residual = h if own.get("norm_before_residual") else hidden
        x, heads, size = torch.cat((e, h), dim=-1), own["num_attention_heads"], own["head_dim"]
        q, k, v = (projected(f"midlayer.self_attn.{name}_proj", x).view(count, -1, size) for name in "qkv")
        angles = torch.arange(count)[:, None] * own["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def turned(x: torch.Tensor) -> torch.Tensor:
            one, other = x.chunk(2, dim=-1)
            return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)

        q, k, v = (turned(q), turned(k), v)
        k, v = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * size**-0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        attended = torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(count, -1)
        residual = residual + projected("midlayer.self_attn.o_proj", attended)
        x = normed("midlayer.post_attention_layernorm", residual)
        inner = functional.silu(projected("midlayer.mlp.gate_proj", x)) * projected("midlayer.mlp.up_proj", x)
        residual = residual + projected("midlayer.mlp.down_proj", inner)
        logits = normed("norm", residual) @ weight["lm_head"].T
        residual = normed("norm", residual) if own.get("norm_output") else residual
        if "d2t" not in weight:
            return logits, residual
        whole = torch.full((count, own["vocab_size"]), -torch.inf)
        whole[:, torch.arange(len(weight["d2t"])) + weight["d2t"]] = logits
        return whole, residual


def run_head(head: Assembled, tokens: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass of a head over tokens, from its first row on: logits [T, V], and what further rows read, [T, W]."""
    runner = head.runner
    decoder = runner.decoder
    assert isinstance(decoder, HeadDecoder)
    runner.cache.truncate(0, 0)
    runner.cache.begin_window([0], [len(tokens)])
    rows = replace(runner.rows([TokenTree(tuple(tokens))], [0], [0]), hidden=hidden)
    with torch.inference_mode():
        residual = decoder.embed(rows)
        for index, weights in runner.streamer.layers(len(tokens)):
            decoder.layer(index, weights, residual, rows, runner.cache)
        return decoder.outputs(residual)


def tapped(head: Assembled, streams: Sequence[torch.Tensor]) -> torch.Tensor:
    """What is kept of the residual streams below the layers that a head taps: [T, W]."""
    decoder = head.runner.decoder
    assert isinstance(decoder, HeadDecoder)
    out = torch.full((len(streams[0]), decoder.config.width), torch.nan)
    with torch.inference_mode():
        for number, tap in enumerate(decoder.config.taps):
            decoder.tap(number, streams[tap], out)
    return out


def add_random_mtp(directory: Path, out: Path, *, seed: int = 0) -> Path:
    """A copy of a checkpoint with an MTP layer, which is random."""
    shutil.copytree(directory, out)
    generator, file = torch.Generator().manual_seed(seed), out / "model.safetensors"
    tensors = {
        name: 1 + 0.2 * torch.randn(to.shape, generator=generator)
        if len(to.shape) == 1
        else torch.randn(to.shape, generator=generator) * to.shape[-1] ** -0.5
        for name, to in checkpoint_tensors(MtpConfig.of(describe_model(directory).config())).items()
    }
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "mtp_num_hidden_layers": 1}))
    return out
