"""Weights are kept as a GGUF file stores them, or in 12 bits of 16: the bytes of the file, the bits of plain weights,
and logits and tokens of the decoded ones wherever they go."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from offload_runtime_kernels.coded_bf16 import CODED
from offload_runtime_kernels.gguf_blocks import FORMATS
from offload_runtime_kernels.linear import linear
from widening.shapes import MixtureShape
from widening.stored import stored_model

from offload_runtime.config import SpeculationOptions
from offload_runtime.core import TokenTree
from offload_runtime.engine import Runtime
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import Encoding, GgufBlocks
from offload_runtime.weights.layout import EMBEDDING, checkpoint_tensors
from offload_runtime.weights.loader import MatricesNotCodable, load_weights
from offload_runtime.weights.sources import describe_model, open_checkpoint
from tests.helpers.assembly import in_memory, make_runner, prefill, verify
from tests.helpers.engine import PROMPT, byte_level_tokenizer
from tests.helpers.models import assert_a_gpu_loads_the_same, load_plain, random_tokens, rows_of
from tests.helpers.quantising import random_llama
from tests.test_weights_gguf import write

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = 5
# By the beginning of a stored name: a mix as in Q4_K_M, one of everything else, one that is not quantised.
MIX = {
    "blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "blk.0": "Q4_K",
    "blk.1.attn_q": "IQ4_XS", "blk.1.attn_k": "Q8_0", "blk.1.attn_v": "F16", "blk.1.attn_output": "Q2_K",
    "blk.1.ffn_gate": "Q5_K", "blk.1.ffn_up": "Q3_K", "blk.1.ffn_down": "IQ4_NL",
    "blk.2.attn_q": "Q4_0", "blk.2.attn_k": "Q5_0", "blk.2.attn_v": "Q5_1", "blk.2.attn_output": "F32",
    "blk.2.ffn_gate": "MXFP4", "blk.2": "Q4_1", "blk.3": "BF16", "blk.4": "F32", "token_embd": "Q4_K", "output": "Q6_K",
}  # fmt: skip


def mix(name: str) -> str:
    return next(kind for start, kind in MIX.items() if name.startswith(start))


def llama(**overrides: Any) -> Any:
    """One whose rows are whole blocks of 256, for the tokenizer of the small checkpoints."""
    return random_llama(**{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, **overrides})


def write_llama(path: Path, kind: str | Callable[[str], str], **overrides: Any) -> Path:
    return write(path, llama(**overrides), kind=kind)


def opened(path: Path) -> CheckpointSource:
    tokenizer = byte_level_tokenizer()
    return replace(open_checkpoint(path), tokenizer=cache(lambda: tokenizer))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSource:
    """Layers of five sizes."""
    return opened(write_llama(tmp_path_factory.mktemp("mixed") / "m.gguf", mix))


@pytest.fixture(scope="module")
def decoded(source: CheckpointSource) -> CheckpointSource:
    """The same, decoded as it is read."""
    return replace(source, kinds={})


def by_package(path: Path, arch: str, config: Any) -> dict[str, torch.Tensor]:
    """What the gguf package makes of a file, by transformers' name, with rows of Q and K as transformers has them."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    found = {}
    for name in checkpoint_tensors(config):
        tensor = tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = (
                values.view(-1, config.attention.head_dim // 2, 2, values.shape[1])
                .transpose(1, 2)
                .reshape(values.shape)
            )
        found[name] = values
    return found


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_weights_are_those_of_the_gguf_package(source: CheckpointSource, dtype: torch.dtype) -> None:
    layout = source.layout(dtype)
    weights, seen = load_weights(source, layout), by_package(Path(source.reference), "llama", source.config())
    for name, to in checkpoint_tensors(source.config()).items():
        assert torch.equal(rows_of(to, weights), seen[name].to(dtype)), name
    plain = load_plain(source, dtype)
    for layer in (None, *range(LAYERS)):
        for name, weight in plain.views(layer).items():
            assert torch.equal(weights.views(layer)[name].dense, weight.dense)


def logits(
    source: CheckpointSource, *, buffers: int, resident: tuple[int, ...] | None, device: str = "cpu",
    dtype: torch.dtype = FP32, coded: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Of a prompt and a window behind it."""
    made = make_runner(
        source, buffers=buffers, resident=resident, layout=source.layout(dtype, coded=coded),
        device=torch.device(device), dtype=dtype,
    )  # fmt: skip
    tokens = random_tokens(30)
    last = prefill(made.runner, 0, tokens[:20])
    window = verify(made.runner, {0: TokenTree(tuple(tokens[20:]))})
    made.close()
    return torch.cat([last, window])


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_encoding_gives_the_logits_of_the_decoded_file(kind: str, tmp_path: Path) -> None:
    """With a head that is the embedding."""
    path = write_llama(tmp_path / "m.gguf", kind, num_hidden_layers=2, tie_word_embeddings=True)
    source = opened(path)
    assert source.layout(BF16).total_bytes < 0.6 * replace(source, kinds={}).layout(BF16).total_bytes
    found = logits(source, buffers=1, resident=(1,))
    assert bool(found.isfinite().all()) and len(found.unique()) > 1000
    assert torch.equal(found, logits(replace(source, kinds={}), buffers=0, resident=None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("buffers", "resident"), [(0, None), (2, None), (2, (0, 4))])
def test_logits_on_a_gpu_are_those_of_the_decoded_file(
    source: CheckpointSource, decoded: CheckpointSource, buffers: int, resident: tuple[int, ...] | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    found = logits(source, buffers=buffers, resident=resident, device="cuda", dtype=dtype)
    assert torch.equal(found, logits(decoded, buffers=0, resident=None, device="cuda", dtype=dtype))
    assert len(found.unique()) > 1000


@pytest.mark.gpu
def test_few_rows_and_many_have_the_bits_of_the_decoded_matrix() -> None:
    """Those that are multiplied with what is stored, and those whose matrix is decoded first; of stacked parts."""
    height, columns = 9600, 1024
    parts = (8704, GgufBlocks("Q4_K")), (512, GgufBlocks("Q6_K")), (384, GgufBlocks("Q8_0"))
    encoding = Encoding(BF16, parts)
    stored = torch.randint(60, (encoding.nbytes((height, columns)),), dtype=torch.uint8, device="cuda")
    bias = torch.randn(height, device="cuda", dtype=BF16)
    weight = encoding.weight(stored, (height, columns), bias, None)
    for rows in (1, 5, 8, 9, 16, 17, 32, 33):
        x = torch.randn(rows, columns, device="cuda", dtype=BF16) / columns
        residual = torch.randn(rows, height, device="cuda", dtype=BF16)
        for gated, added in ((None, None), ("silu", None), ("gelu", None), (None, residual)):
            before = None if added is None else added.clone()
            expected = linear(x, weight.dense, bias=bias, residual=before, gated=gated)
            assert torch.equal(weight.linear(x, residual=added, gated=gated), expected), (rows, gated)


SETUPS: dict[str, dict[str, Any]] = {
    "resident": {"draft": "none"},
    "streamed": {"draft": "none", "resident_layers": 0},
    "chains": {"gamma": 5, "tree_nodes": 0, "resident_layers": 2},
    "trees": {"gamma": 3, "tree_nodes": 24, "resident_layers": 1, "kv": "host"},
    "TriForce": {
        "gamma": 8, "speculation": SpeculationOptions("triforce", budget_tokens=64, chunk_size=8, gamma_draft=2)
    },
}  # fmt: skip


def tokens_of(runtime: Runtime, **sampling: Any) -> list[list[int]]:
    asked = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.8, "seed": 3, **sampling}
    prompts = [PROMPT, [5 + (3 * i * i + i // 7) % 280 for i in range(300)]]
    return [list(runtime.generate(prompt, **asked).tokens) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("setup", SETUPS)
def test_tokens_on_a_gpu_are_the_decoded_files(source: CheckpointSource, decoded: CheckpointSource, setup: str) -> None:
    """Captured passes and steps too; of twice the same text the second time by the graphs of the first."""
    with Runtime.load(decoded, device="cuda", draft="none", context=1024) as runtime:
        expected = tokens_of(runtime)
    options = {"draft": source, "weights": "stored", **SETUPS[setup]}
    with Runtime.load(source, device="cuda", context=1024, **options) as runtime:
        assert tokens_of(runtime) == tokens_of(runtime) == expected
        scratch_bytes = runtime.engine.budgets[0].reservations["target: decoded matrix"]
        layers = range(source.config().num_layers)
        assert scratch_bytes == source.layout(BF16).scratch_bytes("cuda", layers, head=True)


def test_encodings_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", "F32", num_hidden_layers=1, hidden_size=256)
    content = path.read_bytes()
    name = b"blk.0.attn_v.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and both of them
    number = int(gguf.GGMLQuantizationType.IQ2_XXS)
    path.write_bytes(content[:kind] + number.to_bytes(4, "little") + content[kind + 4 :])
    for door in (describe_model, open_checkpoint):
        with pytest.raises(CheckpointError, match=r"attn_v\.weight is quantised as IQ2_XXS, which is not read"):
            door(path)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "at", "scale"), [
    ("Q4_K", 2, np.float16("inf")), ("Q4_K", 2, np.float16("nan")), ("MXFP4", 0, np.uint8(255)),
])  # fmt: skip
def test_infinite_scales_are_refused(tmp_path: Path, kind: str, at: int, scale: np.generic, device: str) -> None:
    path = write_llama(tmp_path / "m.gguf", kind, num_hidden_layers=1)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    at += int(tensor.data_offset) + 100 * FORMATS[kind].nbytes
    content = path.read_bytes()
    path.write_bytes(content[:at] + scale.tobytes() + content[at + scale.nbytes :])
    source = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"scales of blk\.0\.ffn_up\.weight are infinite or no numbers"):
        load_weights(source, source.layout(BF16), coding_device=torch.device(device))
    with pytest.raises(CheckpointError, match=r"scales of blk\.0\.ffn_up\.weight are infinite or no numbers"):
        load_plain(source, BF16)


# Two parts of a packed matrix, and a whole one.
UNCODED = frozenset({"model.layers.1.self_attn.k_proj.weight", "model.layers.3.mlp.down_proj.weight"})


def heavy_tailed() -> Any:
    """Weights in bf16 of all magnitudes, and some that are zero."""
    model = llama()
    for name, parameter in model.state_dict().items():
        if "norm" not in name:
            heavy = torch.distributions.StudentT(3.0).sample(parameter.shape)
            parameter.copy_(heavy * (0.3 if "embed" in name else parameter.shape[-1] ** -0.5))
            parameter[torch.rand(parameter.shape) < 0.02] = 0.0
    return model.bfloat16()


@pytest.fixture(scope="module")
def dense() -> CheckpointSource:
    tokenizer = byte_level_tokenizer()
    return replace(in_memory(heavy_tailed()), tokenizer=cache(lambda: tokenizer))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


@pytest.mark.parametrize("uncoded", [frozenset(), UNCODED])
def test_every_bit_is_loaded(dense: CheckpointSource, uncoded: frozenset[str]) -> None:
    dense = replace(dense, uncoded=uncoded)
    layout, plain = dense.layout(BF16, coded=True), load_plain(dense, BF16)
    done: list[int] = []
    weights = load_weights(dense, layout, on_progress=lambda *pair: done.append(pair[0]))
    assert done == sorted(done) and done[-1] == layout.total_bytes < 0.83 * plain.layout.total_bytes
    for name, to in checkpoint_tensors(dense.config()).items():
        found, expected = (rows_of(to, each) for each in (weights, plain))
        assert torch.equal(bits(found), bits(expected)), name
    embedding, index = weights.views(EMBEDDING)["embedding"], torch.tensor([5, 0, 5, 300])
    assert torch.equal(embedding.rows(index), embedding.dense[index])
    kinds, raw_bytes = layout.bytes_by_kind, sum(rows * 2 * columns for rows, columns in [(128, 256), (256, 512)])
    vectors_bytes = (2 * LAYERS + 1) * 256 * 2
    assert set(kinds) == {CODED, "BF16"} and kinds["BF16"] == vectors_bytes + (raw_bytes if uncoded else 0)
    assert f"in {CODED}" in layout.stored_as


@pytest.mark.gpu
def test_a_gpu_codes_as_a_cpu_does(dense: CheckpointSource) -> None:
    dense = replace(dense, uncoded=UNCODED)
    assert_a_gpu_loads_the_same(dense, dense.layout(BF16, coded=True))


def without_room(dense: CheckpointSource, names: frozenset[str]) -> CheckpointSource:
    """The same with one row of each of these matrices of exponents from everywhere."""

    def scattered(name: str, out: torch.Tensor) -> None:
        dense.fills[name](out)
        if name in names:
            out[7] *= 2.0 ** torch.arange(-100, 100, 200 / out.shape[1])[: out.shape[1]]

    return replace(dense, fills={name: lambda out, _=None, name=name: scattered(name, out) for name in dense.fills})


def test_matrices_that_cannot_be_coded_are_all_named(dense: CheckpointSource) -> None:
    other = without_room(dense, UNCODED)
    with pytest.raises(MatricesNotCodable) as caught:
        load_weights(other, other.layout(BF16, coded=True))
    assert caught.value.names == UNCODED
    other = replace(other, uncoded=UNCODED)
    weights, plain = load_weights(other, other.layout(BF16, coded=True)), load_plain(other, BF16)
    for layer in (1, 3):
        for name, weight in plain.views(layer).items():
            assert torch.equal(bits(weights.views(layer)[name].dense), bits(weight.dense))


WHERE = [(0, None), (2, None), (1, (1, 2)), (2, (0, 4))]


@pytest.mark.few(2)
@pytest.mark.parametrize(("buffers", "resident"), WHERE)
def test_logits_are_plain_ones(dense: CheckpointSource, buffers: int, resident: tuple[int, ...] | None) -> None:
    dense = replace(dense, uncoded=UNCODED)
    found = logits(dense, dtype=BF16, buffers=buffers, resident=resident, coded=True)
    assert torch.equal(found, logits(dense, dtype=BF16, buffers=0, resident=None, coded=False))
    assert len(found.unique()) > 500


def test_biases_of_experts_are_not_coded() -> None:
    """Those of both matrices are needed at once, and what is decoded is gone with the next matrix."""
    shape = MixtureShape(256, 256, 1, 4, 2, 64, 4, 2, gpt_oss=True)
    sizes = {"vocab_size": 512, "context_tokens": 256, "stretch_bytes": 65536}
    dense = stored_model(shape, "bf16", reference="random gpt-oss", **sizes)
    plain, coded = (logits(dense, dtype=BF16, buffers=0, resident=None, coded=coded) for coded in (False, True))
    assert CODED in dense.layout(BF16, coded=True).bytes_by_kind and torch.equal(plain, coded)


@pytest.mark.gpu
@pytest.mark.parametrize(("buffers", "resident"), WHERE)
def test_logits_on_a_gpu(dense: CheckpointSource, buffers: int, resident: tuple[int, ...] | None) -> None:
    dense = replace(dense, uncoded=UNCODED)
    found = logits(dense, dtype=BF16, buffers=buffers, resident=resident, coded=True, device="cuda")
    assert torch.equal(found, logits(dense, dtype=BF16, buffers=0, resident=None, coded=False, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("setup", SETUPS)
def test_tokens_on_a_gpu_are_those_of_plain_weights(dense: CheckpointSource, setup: str) -> None:
    """Captured passes too; of twice the same text the second time by the graphs of the first."""
    with Runtime.load(dense, device="cuda", draft="none", context=1024) as runtime:
        expected = tokens_of(runtime)
    options = {"draft": dense, **SETUPS[setup]}
    with Runtime.load(dense, device="cuda", context=1024, encode="always", **options) as runtime:
        assert tokens_of(runtime) == tokens_of(runtime) == expected
