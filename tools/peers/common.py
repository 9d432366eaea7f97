"""What the measured peers share before anything is measured: options, the VRAM cap, the synthetic Llama.

Each peer script builds the same random model (weights seeded by their names, so that two peers can be checked to emit
the same tokens), lets its system stream the decoder layers from host memory, and hands it to `measurement.run_peer`.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The peers are run as plain scripts, before or without an installation. The root comes last, so that nothing in it
# shadows an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from offload_runtime.config import format_bytes, parse_bytes, require_positive
from offload_runtime.errors import BudgetError, ContextLengthError, DeviceError, OptionError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama decoder; `num_layers` is what `--layers` may cut."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position_embeddings: int


SHAPES = {
    "tiny": Shape(64, 160, 4, 4, 2, 256, 1024),
    "llama-68m": Shape(768, 3072, 2, 12, 12, 32000, 2048),
    "llama2-7b": Shape(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama2-13b": Shape(5120, 13824, 40, 40, 40, 32000, 4096),
    "llama3-8b": Shape(4096, 14336, 32, 32, 8, 128256, 8192),
}


@dataclass(frozen=True)
class PeerOptions:
    """One measurement, as the command line asked for it."""

    shape_name: str
    layers: int
    prompt_tokens: int
    new_tokens: int
    warmup: int
    repeats: int
    dtype_name: str
    vram_bytes: int
    resident_layers: int
    device: torch.device
    seed: int
    commit: str | None
    out: Path | None

    def __post_init__(self) -> None:
        for name in ("layers", "prompt_tokens", "repeats"):
            require_positive(name, getattr(self, name))
        if self.new_tokens < 2:
            raise OptionError(f"new_tokens must be at least 2, not {self.new_tokens}: the first one times the prefill")
        if self.warmup < 2:
            raise OptionError(f"warmup must be at least 2, not {self.warmup}: the first two generations are cold")
        if not 0 <= self.resident_layers < self.layers:
            raise OptionError(
                f"resident_layers is {self.resident_layers} but must leave at least one of {self.layers} streamed"
            )
        needed, limit = self.prompt_tokens + self.new_tokens, self.shape.max_position_embeddings
        if needed > limit:
            raise ContextLengthError(
                f"prompt and new tokens need {needed} positions, {self.shape_name} has {limit}: lower --prompt-tokens"
            )

    @property
    def shape(self) -> Shape:
        """The dimensions named by `--shape`; the number of layers is `layers`, not the shape's."""
        return SHAPES[self.shape_name]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the KV cache."""
        return DTYPES[self.dtype_name]

    def as_settings(self) -> dict[str, Any]:
        """The options as JSON values, for the report."""
        return {
            "shape": self.shape_name, "layers": self.layers, "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens, "warmup": self.warmup, "repeats": self.repeats, "dtype": self.dtype_name,
            "vram_bytes": self.vram_bytes, "resident_layers": self.resident_layers, "seed": self.seed,
            "batch": 1, "sampling": "greedy", "attention": "sdpa", "eos": "disabled",
        }  # fmt: skip


def peer_parser(description: str) -> argparse.ArgumentParser:
    """The options that every peer takes; a script adds those of its own system."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama2-7b")
    parser.add_argument("--layers", type=int, help="cut the shape to so many decoder layers (default: all)")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="generations discarded before the measured ones")
    parser.add_argument("--repeats", type=int, default=3, help="measured generations")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--vram", default="24GB", help="cap of this process on the device, CUDA's context included")
    parser.add_argument("--resident-layers", type=int, default=0, help="layers kept on the device (default: none)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script without a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit to report when the tree has no git")
    parser.add_argument("--out", type=Path, help="also write the JSON line here")
    return parser


def options_from(arguments: argparse.Namespace) -> PeerOptions:
    """Check the common options. Raises `OptionError`, `ContextLengthError`."""
    try:
        device = torch.device(arguments.device)
    except RuntimeError as error:
        raise OptionError(f"--device {arguments.device!r} is not a device: use cuda, cuda:N or cpu") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    return PeerOptions(
        shape_name=arguments.shape,
        layers=SHAPES[arguments.shape].num_layers if arguments.layers is None else arguments.layers,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        dtype_name=arguments.dtype,
        vram_bytes=parse_bytes(arguments.vram),
        resident_layers=arguments.resident_layers,
        device=device,
        seed=arguments.seed,
        commit=arguments.commit,
        out=arguments.out,
    )


def open_device(options: PeerOptions) -> int:
    """Make the device current and cap torch's allocator so that the process as a whole stays within `vram_bytes`.

    Returns the bytes of VRAM already in use, CUDA's context above all (0 on the CPU).
    Raises `DeviceError` without the device, `BudgetError` when CUDA's context alone exceeds the cap.
    """
    if options.device.type == "cpu":
        return 0
    if options.device.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(f"{options.device} is not there: run on a machine with a CUDA GPU, or try with --device cpu")
    index, count = options.device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise DeviceError(f"{options.device} is not there: this machine has {count} CUDA devices, numbered from 0")
    torch.cuda.set_device(index)
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    in_use_bytes = total_bytes - free_bytes
    cap_bytes = min(options.vram_bytes, total_bytes) - in_use_bytes
    if cap_bytes <= 0:
        raise BudgetError(
            f"{format_bytes(in_use_bytes)} of VRAM is in use before any weight is loaded, the cap is "
            f"{format_bytes(options.vram_bytes)}: raise --vram or free the GPU"
        )
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total_bytes)
    return in_use_bytes


def llama_config(options: PeerOptions) -> LlamaConfig:
    """The shape as transformers' configuration, without an end-of-sequence token."""
    shape = options.shape
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=options.dtype,
        attn_implementation="sdpa",
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let modules built inside make parameters of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rotary_embedding(config: LlamaConfig, device: torch.device) -> LlamaRotaryEmbedding:
    """A fresh RoPE module on `device`, in fp32.

    One built on the meta device has no frequencies, and one built under DeepSpeed's `zero.Init` has them in bf16.
    """
    return LlamaRotaryEmbedding(config).to(device)


def random_weight(name: str, shape: Sequence[int], options: PeerOptions) -> torch.Tensor:
    """The weight `name`, `[*shape]` of `options.dtype` on `options.device`: N(0, 0.02^2), norms one.

    Seeded by the name, so it does not depend on the order in which a peer builds its model. Drawn on the GPU, because a
    CPU core needs minutes for 7B of them.
    """
    if len(shape) == 1:  # Llama's only vectors are norms
        return torch.ones(*shape, dtype=options.dtype, device=options.device)
    generator = torch.Generator(options.device).manual_seed(zlib.crc32(name.encode()) ^ options.seed)
    weight = torch.empty(*shape, dtype=options.dtype, device=options.device)
    return weight.normal_(0.0, WEIGHT_STD, generator=generator)


def prompt_ids(options: PeerOptions) -> torch.Tensor:
    """Random tokens `[1, prompt_tokens]` int64 on the device, the same ones for every peer and every machine."""
    generator = torch.Generator("cpu").manual_seed(options.seed)
    ids = torch.randint(options.shape.vocab_size, (1, options.prompt_tokens), generator=generator)
    return ids.to(options.device)
