"""bf16 weights in 12 bits: every bit comes back, and logits and tokens are those of plain weights wherever they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload_runtime.model import Window
from offload_runtime.weights import CheckpointSource, ModelLayout, checkpoint_tensors, load_weights
from offload_runtime.weights.encoding import Encoding
from offload_runtime.weights.encodings.coded_bf16 import CODED, CodedRows
from offload_runtime.weights.loader import MatricesNotCodable
from tests.helpers.assembly import in_memory, make_runner
from tests.helpers.engine import PROMPT, byte_level_tokenizer, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import load_plain, random_tokens, rows_of

BF16 = torch.bfloat16
LAYERS = 5
# Two parts of a packed matrix, and a whole one.
UNCODED = frozenset({"model.layers.1.self_attn.k_proj.weight", "model.layers.3.mlp.down_proj.weight"})


def llama(**overrides: Any) -> LlamaForCausalLM:
    """Of heavy-tailed weights in bf16, and some that are zero, for the tokenizer of the small checkpoints."""
    torch.manual_seed(0)
    config = LlamaConfig(**{
        "vocab_size": len(byte_level_tokenizer()), "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, **overrides,
    })  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                heavy = torch.distributions.StudentT(3.0).sample(parameter.shape)
                parameter.copy_(heavy * (0.3 if "embed" in name else parameter.shape[-1] ** -0.5))
                parameter[torch.rand(parameter.shape) < 0.02] = 0.0
    return model.bfloat16()


@pytest.fixture(scope="module")
def source() -> CheckpointSource:
    tokenizer = byte_level_tokenizer()
    return replace(in_memory(llama()), tokenizer=cache(lambda: tokenizer))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


@pytest.mark.parametrize("uncoded", [frozenset(), UNCODED])
def test_every_bit_is_loaded(source: CheckpointSource, uncoded: frozenset[str]) -> None:
    source = replace(source, uncoded=uncoded)
    layout, plain = source.layout(BF16, coded=True), load_plain(source, BF16)
    done: list[int] = []
    weights = load_weights(source, layout, on_progress=lambda *pair: done.append(pair[0]))
    assert done == sorted(done) and done[-1] == layout.total_bytes < 0.83 * plain.layout.total_bytes
    for name, to in checkpoint_tensors(source.config()).items():
        found, expected = (rows_of(to, each.views(to.layer)) for each in (weights, plain))
        assert torch.equal(bits(found), bits(expected)), name
    embedding, index = weights.views(None)["embedding"], torch.tensor([5, 0, 5, 300])
    assert torch.equal(embedding.rows(index), embedding.dense[index])
    kinds, raw_bytes = layout.bytes_by_kind, sum(rows * 2 * columns for rows, columns in [(128, 256), (256, 512)])
    vectors_bytes = (2 * LAYERS + 1) * 256 * 2
    assert set(kinds) == {CODED, "BF16"} and kinds["BF16"] == vectors_bytes + (raw_bytes if uncoded else 0)
    assert f"in {CODED}" in layout.stored_as


def test_what_is_coded(source: CheckpointSource) -> None:
    config = source.config()
    for dtype in (torch.float32, torch.float16):
        assert source.layout(dtype, coded=True) == ModelLayout.plain(config, dtype)
    assert source.layout(BF16) == ModelLayout.plain(config, BF16)
    assert CodedRows.of([(8, True), (4, True), (4, False)], 256) == CodedRows(BF16, ((12, CODED), (4, "BF16")))
    assert CodedRows.of([(8, False), (4, False)], 256) == CodedRows.of([(12, True)], 200) == Encoding(BF16)
    # 384 of two planes, 32 of exceptions, 128 up to the next multiple of 256.
    assert CodedRows.of([(12, True)], 256).nbytes((12, 256)) == 12 * 416 + 128


def without_room(source: CheckpointSource, names: frozenset[str]) -> CheckpointSource:
    """The same with one row of each of these matrices of exponents from everywhere."""

    def scattered(name: str, out: torch.Tensor) -> None:
        source.fills[name](out)
        if name in names:
            out[7] *= 2.0 ** torch.arange(-100, 100, 200 / out.shape[1])[: out.shape[1]]

    return replace(source, fills={name: lambda out, name=name: scattered(name, out) for name in source.fills})


def test_matrices_that_cannot_be_coded_are_all_named(source: CheckpointSource) -> None:
    other = without_room(source, UNCODED)
    with pytest.raises(MatricesNotCodable) as caught:
        load_weights(other, other.layout(BF16, coded=True))
    assert caught.value.names == UNCODED
    other = replace(other, uncoded=UNCODED)
    weights, plain = load_weights(other, other.layout(BF16, coded=True)), load_plain(other, BF16)
    for layer in (1, 3):
        for name, weight in plain.views(layer).items():
            assert torch.equal(bits(weights.views(layer)[name].dense), bits(weight.dense))


def logits(
    source: CheckpointSource, *, slots: int, resident: tuple[int, ...] | None, coded: bool, device: str = "cpu"
) -> torch.Tensor:
    """Of a prompt and a window behind it."""
    made = make_runner(
        source, slots=slots, resident=resident, layout=source.layout(BF16, coded=coded), device=torch.device(device),
        dtype=BF16,
    )  # fmt: skip
    tokens = random_tokens(30)
    prefill = made.runner.prefill(0, tokens[:20])
    window = made.runner.verify([Window(tuple(tokens[20:]))], [0])
    made.close()
    return torch.cat([prefill, window])


WHERE = [(0, None), (2, None), (1, (1, 2)), (2, (0, 4))]


@pytest.mark.parametrize(("slots", "resident"), WHERE)
def test_logits_are_those_of_plain_weights(
    source: CheckpointSource, slots: int, resident: tuple[int, ...] | None
) -> None:
    source = replace(source, uncoded=UNCODED)
    found = logits(source, slots=slots, resident=resident, coded=True)
    assert torch.equal(found, logits(source, slots=0, resident=None, coded=False))
    assert len(found.unique()) > 500


@pytest.mark.gpu
@pytest.mark.parametrize(("slots", "resident"), WHERE)
def test_logits_on_a_gpu_are_those_of_plain_weights(
    source: CheckpointSource, slots: int, resident: tuple[int, ...] | None
) -> None:
    source = replace(source, uncoded=UNCODED)
    found = logits(source, slots=slots, resident=resident, coded=True, device="cuda")
    assert torch.equal(found, logits(source, slots=0, resident=None, coded=False, device="cuda"))


def test_a_tied_head_is_coded_once() -> None:
    source = in_memory(llama(tie_word_embeddings=True, num_hidden_layers=2))
    found = logits(source, slots=1, resident=(1,), coded=True)
    assert torch.equal(found, logits(source, slots=0, resident=None, coded=False))
