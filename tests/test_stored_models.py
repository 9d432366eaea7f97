"""Models of random numbers as files store them: what is decoded is what is stored, whatever kept it, and it is sane."""

from __future__ import annotations

import pytest
import torch
from offload_runtime_kernels.coded_bf16 import CodedRow, encode_rows
from offload_runtime_kernels.gguf_blocks import FORMATS
from widening.shapes import WideShape, shape_named
from widening.stored import STORED, random_blocks, stored_llama

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.weights import CheckpointSource
from offload_runtime.weights.formats import format_of
from offload_runtime.weights.neighbours import stored_kinds

SMALL = WideShape(256, 512, 2, 4, 2, 64)
PLAIN = SpeculationOptions("none")


def model(stored: str, shape: WideShape = SMALL, *, seed: int = 0) -> CheckpointSource:
    return stored_llama(
        shape, stored, seed, vocab_size=512, context_tokens=256, reference="stored", stretch_bytes=1 << 17
    )


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_random_blocks_are_finite_and_of_the_size_of_weights(kind: str) -> None:
    blocks = random_blocks(kind, 512, torch.Generator().manual_seed(1))
    assert format_of(kind).has_finite_scales(blocks) and blocks.unique().numel() == 256
    columns = FORMATS[kind].weights
    rows, out = torch.empty(512, format_of(kind).row_bytes(columns), dtype=torch.uint8), torch.empty(512, columns)
    format_of(kind).store_rows(blocks, columns, rows)
    format_of(kind).decode_rows(rows, out)
    assert out.isfinite().all() and abs(float(out.mean())) < 3e-3 and 0.01 < float(out.std()) < 0.04


@pytest.mark.parametrize("stored", [name for name in STORED if name != "bf16"])
def test_stored_rows_decode_to_what_is_read_decoded(stored: str) -> None:
    source = model(stored)
    mix = stored.upper()
    assert source.kinds == stored_kinds(source.config(), mix)
    name = "model.layers.1.mlp.down_proj.weight"
    kind = str(source.kinds[name])
    rows, decoded = torch.empty(256, format_of(kind).row_bytes(512), dtype=torch.uint8), torch.empty(256, 512)
    source.fills[name](rows)
    source.fills[name](decoded)
    out = torch.empty_like(decoded)
    format_of(kind).decode_rows(rows, out)
    assert torch.equal(out, decoded)
    other = torch.empty_like(rows)
    source.fills["model.layers.0.mlp.down_proj.weight"](other)
    assert not torch.equal(rows, other)


def test_a_stored_model_says_the_same_as_its_decoded_copy() -> None:
    answers = {}
    for weights in ("stored", "decoded"):
        with Runtime.load(
            model("q4_k_m"), draft="none", device="cpu", dtype="fp32", context=64, speculation=PLAIN, weights=weights
        ) as runtime:
            answers[weights] = runtime.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True).tokens
    assert answers["stored"] == answers["decoded"] and len(answers["stored"]) == 3


def test_heavy_tailed_matrices_are_full_and_have_a_code() -> None:
    source = model("bf16")
    assert not source.kinds
    values = torch.empty(512, 256, dtype=torch.bfloat16)
    source.fills["model.layers.0.mlp.gate_proj.weight"](values)
    row = CodedRow.of(256)
    assert row is not None and values.count_nonzero() == values.numel()
    assert float(values.float().abs().max()) > 10 * float(values.float().std())
    assert encode_rows(values, row, torch.empty(512, row.nbytes, dtype=torch.uint8), torch.device("cpu")) == 0


def test_shapes_whose_rows_are_no_whole_blocks_take_smaller_ones_or_are_refused() -> None:
    tiny = model("q4_k_m", shape_named("tiny"))
    assert set(tiny.kinds.values()) == {"Q5_0", "Q8_0"}
    with pytest.raises(OptionError, match="rows of 48 weights are not whole blocks of Q8_0"):
        model("q8_0", WideShape(64, 48, 1, 4, 2, 16))
    with pytest.raises(OptionError, match="--stored 'q7' is not known"):
        model("q7")
