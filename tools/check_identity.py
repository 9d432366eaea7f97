"""The tokens and logits of this commit, to be compared bit by bit with another's.

    python tools/check_identity.py --out before.json
    python tools/check_identity.py --against before.json

Ten prompts of 1 to 700 tokens, greedily and at temperature 0.8, are answered in every way that tokens can be made:
plain, n-grams, chains, trees, TriForce, keys in host memory, several cards, one at a time and by twos; from bf16,
Q4_K_M as it is stored and decoded, FP8, and weights in a lossless code. Logits are those of one plain pass over the
answer, told by their SHA-256. Each way has to give the tokens of plain decoding of the same weights, and another commit
on the same kind of machine the same tokens and logits. Prints a line a way, then one JSON line; exit code 1 on any
difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from harness import check_out, emit, provenance
from safetensors.torch import save_file
from widening.checkpoint import noisy_copy
from widening.made import MadeCheckpoint, UntrainedModel, Wordless, named_generator
from widening.shapes import WideShape
from widening.stored import stored_model

from offload_runtime.cli.terminal import read_text
from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.sources import open_checkpoint

PROMPT_TOKENS = (1, 3, 17, 64, 65, 200, 256, 300, 520, 700)
TEMPERATURES = (0.0, 0.8)
_SHAPE, _VOCAB_SIZE, _CONTEXT_TOKENS = WideShape(256, 768, 4, 8, 4, 32), 2048, 1024
_SMALL: dict[str, Any] = {"budget_tokens": 64, "chunk_size": 8, "recent_tokens": 64}
_DRAFT = "noisy copy"  # of the plain weights
# By name: how weights are stored, and options of `Runtime.load`. The first way of each kind of weights is plain.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("bf16", {"draft": "none", "resident_layers": 0}),
    "n-grams": ("bf16", {"draft": "ngram", "resident_layers": 2}),
    "chains": ("bf16", {"draft": _DRAFT, "gamma": 5, "tree_nodes": 0}),
    "trees": ("bf16", {"draft": _DRAFT, "tree_nodes": 48, "resident_layers": 0}),
    "resident trees": ("bf16", {"draft": _DRAFT, "tree_nodes": 24}),
    "TriForce": (
        "bf16", {"draft": _DRAFT, "gamma": 8, "kv": "host", "speculation": SpeculationOptions("triforce", **_SMALL)},
    ),
    "host KV": ("bf16", {"draft": "none", "kv": "host", "resident_layers": 2}),
    "host KV, trees": ("bf16", {"draft": _DRAFT, "kv": "host", "tree_nodes": 24, "resident_layers": 0}),
    "cards": ("bf16", {"draft": "ngram", "cards": 2, "resident_layers": 2}),
    "cards, trees": ("bf16", {"draft": _DRAFT, "cards": 3, "tree_nodes": 24}),
    "cards, host KV": ("bf16", {"draft": "none", "cards": 2, "kv": "host", "resident_layers": 0}),
    "Q4_K_M": ("q4_k_m", {"draft": "none", "weights": "stored", "resident_layers": 0}),
    "Q4_K_M, n-grams": ("q4_k_m", {"draft": "ngram", "weights": "stored"}),
    "Q4_K_M decoded": ("q4_k_m", {"draft": "none", "weights": "decoded"}),
    "FP8": ("fp8", {"draft": "none", "weights": "stored", "resident_layers": 0}),
    "FP8, n-grams": ("fp8", {"draft": "ngram", "weights": "stored"}),
    "heavy tails": ("heavy", {"draft": "none", "resident_layers": 0}),
    "coded": ("heavy", {"draft": "ngram", "encode": "always", "resident_layers": 2}),
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Tokens by a seed, of which the second half of each prompt repeats the first: n-grams find something."""
    halves = {length: torch.empty(-(-length // 2), dtype=torch.int64) for length in PROMPT_TOKENS}
    for length, half in halves.items():
        half.random_(_VOCAB_SIZE, generator=named_generator(torch.device("cpu"), "prompt", length))
    return [(2 * half.tolist())[:length] for length, half in halves.items()]


def _fill(name: str, out: torch.Tensor, _: object = None) -> None:
    """Large matrices: with those of an untrained model the tokens would repeat themselves."""
    if out.dim() == 1:
        out.fill_(1)
        return
    scale = 0.5 if "embed" in name else 2.0 * out.shape[-1] ** -0.5
    out.copy_(scale * torch.randn(out.shape, generator=named_generator(torch.device("cpu"), name)))


def made_models(folder: Path) -> dict[str, CheckpointSource]:
    """A model for each kind of weights, and a draft."""
    sizes: dict[str, Any] = {"vocab_size": _VOCAB_SIZE, "context_tokens": _CONTEXT_TOKENS}
    plain = UntrainedModel(_SHAPE, _fill, reference="bf16", **sizes)
    return {
        "bf16": plain,
        _DRAFT: noisy_copy(plain, 0.02),
        "q4_k_m": stored_model(_SHAPE, "q4_k_m", reference="q4_k_m", **sizes),
        "heavy": stored_model(_SHAPE, "bf16", reference="heavy", **sizes),
        "fp8": _in_fp8(plain, folder),
    }


def _in_fp8(plain: MadeCheckpoint, directory: Path) -> CheckpointSource:
    """A model in squares of 128 x 128 FP8 numbers."""
    stored = dict[str, torch.Tensor]()
    for name, to in checkpoint_tensors(plain.config()).items():
        tensor = stored[name] = torch.empty(to.shape, dtype=torch.bfloat16)
        _fill(name, tensor)
        if "proj" in name:
            squares = tensor.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [R, 128, C, 128]
            scale = squares.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            numbers = (squares / scale[:, None, :, None]).flatten(2).flatten(0, 1)
            stored |= {name: numbers.to(torch.float8_e4m3fn), name.replace("weight", "weight_scale_inv"): scale}
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    settings = dict(plain.settings) | {"quantization_config": quantised, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(stored, directory / "model.safetensors")
    return replace(open_checkpoint(directory), tokenizer=Wordless)


def rows_of(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each way and temperature: the tokens of all prompts, and a hash of their logits."""
    models = made_models(folder)
    for way in options.ways:
        stored, given = WAYS[way][0], dict(WAYS[way][1])
        cards = given.pop("cards", 1)
        given |= {"draft": models.get(given["draft"], given["draft"]), "vram": ",".join(["8GB"] * cards)}
        device = ",".join([options.device] * cards)
        with Runtime.load(
            models[stored], device=device, dtype="bf16", context=_CONTEXT_TOKENS, max_batch=2, **given
        ) as runtime:
            for temperature in TEMPERATURES:
                asked = dict[str, Any](max_new_tokens=options.tokens, ignore_eos=True, temperature=temperature)
                (first, *others), digest = prompts(), hashlib.sha256()
                tokens = [runtime.generate(first, **asked).tokens]
                for at in range(0, len(others), 2):
                    tokens += [one.tokens for one in runtime.generate_batch(others[at : at + 2], **asked)]
                for prompt, answer in zip((first, *others), tokens, strict=True):
                    (logits,) = runtime.logits(prompt, [answer])
                    digest.update(logits.contiguous().view(torch.uint8).cpu().numpy().tobytes())
                found = {"way": way, "stored": stored, "temperature": temperature, "logits_sha256": digest.hexdigest()}
                yield found | {"tokens": tokens}


def differences(rows: Sequence[dict[str, Any]], against: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as plain decoding's in these rows, and not as in those of another commit."""
    plain = dict[tuple[str, float], dict[str, Any]]()
    before = {(row["way"], row["temperature"]): row for row in against}
    found = []
    for row in rows:
        where = f"{row['way']}, T = {row['temperature']}"
        expected = plain.setdefault((row["stored"], row["temperature"]), row)
        for length, tokens, others in zip(PROMPT_TOKENS, row["tokens"], expected["tokens"], strict=True):
            if (place := harness.leading_agreement(others, tokens)) < len(others):
                found.append(f"{where}, prompt of {length}: from token {place} on unlike plain decoding")
        other = before.get((row["way"], row["temperature"]), {} if not against else {"tokens": None})
        found += [f"{where}: other {name} than before" for name in other if other[name] != row.get(name)]
    return found


def read_rows(path: Path, settings: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of another commit. Raises `OptionError` where they are none, or of other settings."""
    text = read_text(path, option="--against")
    try:
        found = json.loads(text)
        rows, asked = [*found["rows"]], found["settings"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(f"{path} is no result of check_identity ({type(error).__name__})") from error
    if asked != settings:
        raise OptionError(f"{path} was made with other options, {asked}: give these, not {settings}")
    return rows


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare and print; returns the exit code."""
    parser = harness.bench_parser(__doc__, device="cpu")
    parser.add_argument("--tokens", type=int, default=16, help="of every answer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--against", type=Path, metavar="FILE", help="what --out has written at another commit")
    options = parser.parse_args(argv)
    check_out(options.out)
    harness.require_all_positive(options, "tokens")
    settings, rows = harness.settings_of(options, without=("out", "commit", "against")), list[dict[str, Any]]()
    against = read_rows(options.against, settings) if options.against else []
    device = resolve_device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(options, Path(folder)):
            rows.append(row)
            print(f"{row['way']}, T = {row['temperature']}: {row['logits_sha256'][:16]}", flush=True)
    found = differences(rows, against)
    print(*found, sep="\n")
    report = {"benchmark": "identity", "settings": settings, "rows": rows, "differences": found}
    emit(report | provenance(device, commit=options.commit), options.out)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
