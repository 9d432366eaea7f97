"""bf16 weights in 12 bits: every bit comes back, and logits and tokens are those of plain weights wherever they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from offload_runtime_kernels.coded_bf16 import CODED
from transformers import LlamaConfig, LlamaForCausalLM
from widening.shapes import MixtureShape
from widening.stored import stored_model

from offload_runtime.engine import Runtime
from offload_runtime.weights import EMBEDDING, CheckpointSource, MatricesNotCodable, checkpoint_tensors, load_weights
from tests.helpers.assembly import in_memory
from tests.helpers.engine import PROMPT, byte_level_tokenizer, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import assert_a_gpu_loads_the_same, load_plain, rows_of
from tests.test_weights_gguf_rows import WAYS, tokens_of
from tests.test_weights_gguf_rows import logits as logits_in

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
        found, expected = (rows_of(to, each) for each in (weights, plain))
        assert torch.equal(bits(found), bits(expected)), name
    embedding, index = weights.views(EMBEDDING)["embedding"], torch.tensor([5, 0, 5, 300])
    assert torch.equal(embedding.rows(index), embedding.dense[index])
    kinds, raw_bytes = layout.bytes_by_kind, sum(rows * 2 * columns for rows, columns in [(128, 256), (256, 512)])
    vectors_bytes = (2 * LAYERS + 1) * 256 * 2
    assert set(kinds) == {CODED, "BF16"} and kinds["BF16"] == vectors_bytes + (raw_bytes if uncoded else 0)
    assert f"in {CODED}" in layout.stored_as


@pytest.mark.gpu
def test_a_gpu_codes_as_a_cpu_does(source: CheckpointSource) -> None:
    source = replace(source, uncoded=UNCODED)
    assert_a_gpu_loads_the_same(source, source.layout(BF16, coded=True))


def without_room(source: CheckpointSource, names: frozenset[str]) -> CheckpointSource:
    """The same with one row of each of these matrices of exponents from everywhere."""

    def scattered(name: str, out: torch.Tensor) -> None:
        source.fills[name](out)
        if name in names:
            out[7] *= 2.0 ** torch.arange(-100, 100, 200 / out.shape[1])[: out.shape[1]]

    return replace(source, fills={name: lambda out, _=None, name=name: scattered(name, out) for name in source.fills})


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


logits = partial(logits_in, dtype=BF16)
WHERE = [(0, None), (2, None), (1, (1, 2)), (2, (0, 4))]


@pytest.mark.few(2)
@pytest.mark.parametrize(("buffers", "resident"), WHERE)
def test_logits_are_the_plain_ones(source: CheckpointSource, buffers: int, resident: tuple[int, ...] | None) -> None:
    source = replace(source, uncoded=UNCODED)
    found = logits(source, buffers=buffers, resident=resident, coded=True)
    assert torch.equal(found, logits(source, buffers=0, resident=None, coded=False))
    assert len(found.unique()) > 500


def test_biases_of_experts_are_not_coded() -> None:
    """Those of both matrices are needed at once, and what is decoded is gone with the next matrix."""
    shape = MixtureShape(256, 256, 1, 4, 2, 64, 4, 2, gpt_oss=True)
    source = stored_model(shape, "bf16", vocab_size=512, context_tokens=256, reference="random gpt-oss")
    plain, coded = (logits(source, buffers=0, resident=None, coded=coded) for coded in (False, True))
    assert CODED in source.layout(BF16, coded=True).bytes_by_kind and torch.equal(plain, coded)


@pytest.mark.gpu
@pytest.mark.parametrize(("buffers", "resident"), WHERE)
def test_logits_on_a_gpu(source: CheckpointSource, buffers: int, resident: tuple[int, ...] | None) -> None:
    source = replace(source, uncoded=UNCODED)
    found = logits(source, buffers=buffers, resident=resident, coded=True, device="cuda")
    assert torch.equal(found, logits(source, buffers=0, resident=None, coded=False, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_tokens_on_a_gpu_are_those_of_plain_weights(source: CheckpointSource, way: str) -> None:
    """Captured passes too; of twice the same text the second time by the graphs of the first."""
    with Runtime.load(source, device="cuda", draft="none", context=1024) as runtime:
        expected = tokens_of(runtime)
    options = {"draft": source, **WAYS[way]}
    with Runtime.load(source, device="cuda", context=1024, encode="always", **options) as runtime:
        assert tokens_of(runtime) == tokens_of(runtime) == expected
