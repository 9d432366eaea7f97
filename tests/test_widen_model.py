"""A small model inside a large shape: the same logits, random surplus that says nothing, noise, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from widening.rope import frequencies, widened_rope
from widening.shapes import SHAPES, check_fits, place_heads, rotary_channels, shape_named
from widening.stretched import StretchedCheckpoint

from offload_runtime.config import ModelConfig
from offload_runtime.errors import OptionError, UnsupportedArchitectureError
from offload_runtime.model import Window
from offload_runtime.weights import open_checkpoint
from tests.helpers.assembly import in_memory, make_runner
from tests.helpers.models import VOCAB_SIZE, all_logits, cached_logits, load_plain, random_tokens
from tests.helpers.widening import (
    GQA,
    MHA,
    SAME_HEADS,
    WidenedCheckpoint,
    randomise,
    rope,
    small_model,
    tensors_of,
    write,
)

TOKENS = random_tokens(40)
# SmolLM2-135M's attention, which the named shapes have to hold.
SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM", hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
)  # fmt: skip


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


def our_logits(directory: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of a window over all tokens from our loader and decoder, layers streamed: [T, V]."""
    made = make_runner(open_checkpoint(directory), slots=2)
    logits = made.runner.verify([Window(tuple(tokens))], [0]).clone()
    made.close()
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [MHA, GQA, SAME_HEADS])
def test_the_logits_are_the_small_models(shape, tied, tmp_path):
    model = small_model(tie_word_embeddings=tied)
    out = write(WidenedCheckpoint(in_memory(model), shape), tmp_path / "wide")
    expected = all_logits(model, TOKENS)
    wide = AutoModelForCausalLM.from_pretrained(out)
    assert {name: getattr(wide.config, name) for name in ("hidden_size", "intermediate_size", "head_dim")} == {
        name: getattr(shape, name) for name in ("hidden_size", "intermediate_size", "head_dim")
    }
    assert (wide.config.num_hidden_layers, wide.config.num_attention_heads, wide.config.num_key_value_heads) == (
        shape.num_layers, shape.num_heads, shape.num_kv_heads,
    )  # fmt: skip
    assert error(all_logits(wide, TOKENS), expected) < 1e-5
    assert error(our_logits(out, TOKENS), expected) < 1e-5


def test_multi_head_source_into_grouped_heads(tmp_path):
    """One query head per KV head goes into groups of four of which three say nothing."""
    model = small_model(num_attention_heads=3, num_key_value_heads=3)
    out = write(WidenedCheckpoint(in_memory(model), GQA), tmp_path / "wide")
    assert error(all_logits(AutoModelForCausalLM.from_pretrained(out), TOKENS), all_logits(model, TOKENS)) < 1e-5


SCALINGS = {
    "linear": rope("linear", factor=4.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=128),
    "yarn with its own attention factor": rope(
        "yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.4, beta_fast=16.0
    ),
    "longrope": rope(
        "longrope", factor=4.0, original_max_position_embeddings=24,
        short_factor=[1.0, 1.1, 1.2, 1.5], long_factor=[1.5, 2.0, 4.0, 8.0],
    ),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rotary_embeddings(name, tmp_path):
    model = small_model(rope_parameters=SCALINGS[name])
    out = write(WidenedCheckpoint(in_memory(model), MHA), tmp_path / "wide")
    wide = AutoModelForCausalLM.from_pretrained(out)
    # longrope's frequencies change behind token 24: in one pass over all tokens, and while they come one by one.
    assert error(all_logits(wide, TOKENS), all_logits(model, TOKENS)) < 1e-5
    pieces = [TOKENS[:20], *([token] for token in TOKENS[20:])]
    assert error(cached_logits(wide, pieces), cached_logits(model, pieces)) < 1e-5
    assert error(our_logits(out, TOKENS[:24]), all_logits(model, TOKENS[:24])) < 1e-5


def test_a_stretched_model_is_the_small_model_under_yarn(tmp_path):
    model = small_model()
    source = in_memory(model)
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=512)
    widened = WidenedCheckpoint(StretchedCheckpoint(source, rope=yarn), MHA)
    out = write(widened, tmp_path / "wide")
    stretched = small_model(rope_parameters=yarn, max_position_embeddings=2048)
    wide = AutoModelForCausalLM.from_pretrained(out)
    assert widened.config().max_position_embeddings == wide.config.max_position_embeddings == 2048
    assert error(all_logits(wide, TOKENS), all_logits(stretched, TOKENS)) < 1e-5
    assert error(all_logits(stretched, TOKENS), all_logits(model, TOKENS)) > 1e-3


YARNS = {
    "plain": {},
    "longer": {"factor": 64.0, "original_max_position_embeddings": 2048},
    "its own ramp": {"beta_fast": 16.0, "beta_slow": 2.0},
    "unrounded ramp": {"truncate": False, "beta_fast": 20.0},
    "ramp from the first pair on": {"original_max_position_embeddings": 128},
    "ramp past the last pair": {"beta_slow": 1e-9, "truncate": False},
    "own attention factor": {"attention_factor": 1.25},
    "mscale": {"mscale": 0.7, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("large_dim", [128, 256])
@pytest.mark.parametrize("name", YARNS)
def test_yarn_frequencies_of_smollm2_in_a_larger_head(name, large_dim):
    """To the last bit: at 128K tokens one rounding of a frequency of 1 would turn its pair by 0.008."""
    parameters = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 16.0, "original_max_position_embeddings": 8192}
    small = dataclasses.replace(SMOLLM2, rope_parameters=parameters | YARNS[name], max_position_embeddings=131072)
    wanted, scaling = frequencies(small)
    wide = dataclasses.replace(small, head_dim=large_dim, rope_parameters=widened_rope(small, large_dim))
    found, wide_scaling = frequencies(wide)
    assert torch.equal(found[:: large_dim // 64], wanted) and wide_scaling == scaling
    if name == "longer":  # what is tested: the small head's own parameters would scale other pairs
        kept, _ = frequencies(dataclasses.replace(small, head_dim=large_dim))
        assert not torch.allclose(kept[:: large_dim // 64], wanted, rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("llama-68m", "tiny")])
def test_named_shapes_hold_smollm2(name):
    """Each query head meets the keys and values of its own KV head, and no two share a place."""
    shape = shape_named(name)
    check_fits(SMOLLM2, shape)
    places = place_heads(SMOLLM2, shape)
    sources = torch.full((shape.num_kv_heads,), -1)
    sources[places.key_rows // 128] = places.key_sources // 64
    query_heads = places.query_rows.view(9, 64)[:, 0] // 128
    assert query_heads.unique().numel() == 9
    kv_heads = query_heads // (shape.num_heads // shape.num_kv_heads)
    assert sources[kv_heads].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert torch.equal(rotary_channels(64, 128)[:4], torch.tensor([0, 2, 4, 6]))
    silent = places.silent_query_rows.tolist()
    assert len(silent) == 9 * 64 and not set(silent) & set(places.query_rows.tolist())


def test_the_surplus_costs_time_and_says_nothing():
    tensors = tensors_of(WidenedCheckpoint(in_memory(small_model()), MHA))
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), name
    for layer in range(MHA.num_layers):

        def part(name: str, layer: int = layer) -> torch.Tensor:
            return tensors[f"model.layers.{layer}.{name}.weight"]

        for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            assert (part(name) != 0).float().mean() > 0.999
        assert (part("self_attn.q_proj") != 0).float().mean() > 0.7
        assert (part("self_attn.q_proj")[-32:] != 0).float().mean() > 0.999
        assert (part("input_layernorm") != 0).all() and (part("post_attention_layernorm") != 0).all()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert not part(name)[42:].any()
            assert part(name).any() == (layer < 3)
        surplus = part("mlp.gate_proj")[72:]
        assert 0.018 < float(surplus.std()) < 0.022
    assert not tensors["model.embed_tokens.weight"][:, 42:].any()


def test_every_tensor_is_seeded_by_its_name():
    source = in_memory(small_model())
    first = tensors_of(WidenedCheckpoint(source, GQA, 0.05, 7))
    again = WidenedCheckpoint(source, GQA, 0.05, 7)
    for name, fill in reversed(again.fills.items()):  # in another order
        out = torch.empty_like(first[name])
        fill(out)
        assert torch.equal(out, first[name]), name
    other = tensors_of(WidenedCheckpoint(source, GQA, 0.05, 8))
    assert {name for name in first if torch.equal(first[name], other[name])} == {
        f"model.layers.{layer}.{name}.weight" for layer in (3, 4) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    up = [first[f"model.layers.{layer}.mlp.up_proj.weight"][72:] for layer in range(5)]
    assert not any(torch.equal(up[0], later) for later in up[1:])


@pytest.mark.parametrize("tied", [False, True])
def test_noise_is_the_small_models_and_moderate(tied, tmp_path):
    """The shape does not matter to the noise, more noise moves the logits further, and a tied head stays tied."""
    model = small_model(tie_word_embeddings=tied)
    source = in_memory(model)
    expected, found = all_logits(model, TOKENS), {}
    for noise in (0.001, 0.02):
        for name, shape in (("mha", MHA), ("gqa", GQA)):
            out = write(WidenedCheckpoint(source, shape, noise), tmp_path / f"{name}-{noise}")
            found[name, noise] = all_logits(AutoModelForCausalLM.from_pretrained(out), TOKENS)
        assert error(found["mha", noise], found["gqa", noise]) < 1e-5
    assert 1e-4 < error(found["mha", 0.001], expected) < 0.05
    assert error(found["mha", 0.02], expected) > 3 * error(found["mha", 0.001], expected)
    wide = tensors_of(WidenedCheckpoint(source, MHA, 0.1))
    same = torch.equal(wide["lm_head.weight"][:, :42], wide["model.embed_tokens.weight"][:, :42])
    assert same == tied


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_arenas_are_filled_without_files(device, tmp_path):
    """What `load_weights` reads from the object has the logits of what is written, wherever the surplus is drawn."""
    source = in_memory(small_model())
    widened = WidenedCheckpoint(source, GQA, 0.05, 1, device=torch.device(device))
    out = write(WidenedCheckpoint(source, GQA, 0.05, 1), tmp_path / "wide")
    direct, read = (load_plain(each, torch.float32) for each in (widened, open_checkpoint(out)))
    assert direct.config == read.config and direct.layout.total_bytes == read.layout.total_bytes
    for layer in (None, *range(GQA.num_layers)):
        before, after = direct.views(layer), read.views(layer)
        for name in after:
            if device == "cpu" or name in ("embedding", "o", "down"):
                assert torch.equal(before[name].dense, after[name].dense), (layer, name)
    if device == "cuda":
        redrawn = write(widened, tmp_path / "redrawn")
        logits = [all_logits(AutoModelForCausalLM.from_pretrained(path), TOKENS) for path in (out, redrawn)]
        assert error(*logits) < 1e-5
    direct.close()
    read.close()


def qwen2() -> Any:
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=40, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return randomise(Qwen2ForCausalLM(config))


def test_models_that_cannot_be_widened_are_refused():
    with pytest.raises(UnsupportedArchitectureError, match="Qwen2ForCausalLM with biases"):
        WidenedCheckpoint(in_memory(qwen2()), MHA)
    dynamic = in_memory(small_model(rope_parameters=rope("dynamic", factor=2.0)))
    with pytest.raises(UnsupportedArchitectureError, match=r"'dynamic'.*from 8 to 32.*set yarn"):
        WidenedCheckpoint(dynamic, MHA)
    WidenedCheckpoint(dynamic, SAME_HEADS)  # with the same head dimension the scaling is the same


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size 32, less than the source's 42"),
        ({"intermediate_size": 71}, "intermediate_size 71, less than the source's 72"),
        ({"num_layers": 2}, "num_layers 2, less than the source's 3"),
        ({"num_heads": 4, "num_kv_heads": 4}, "num_heads 4, less than the source's 6"),
        ({"num_kv_heads": 1}, "num_kv_heads 1, less than the source's 2"),
        ({"head_dim": 4}, "head_dim 4, less than the source's 8"),
        ({"head_dim": 20}, "heads of 8 channels do not divide heads of 20"),
        ({"num_heads": 6, "num_kv_heads": 3}, "need 4 KV heads of 2 query heads each, and the shape has 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    source = in_memory(small_model())
    with pytest.raises(OptionError, match=message):
        WidenedCheckpoint(source, dataclasses.replace(MHA, **changes))


def test_a_drafts_shape_holds_no_target():
    with pytest.raises(OptionError, match="num_layers 2, less than the source's 30"):
        check_fits(SMOLLM2, shape_named("llama-68m"))


def test_options_that_make_no_sense_are_refused():
    source = in_memory(small_model(rope_parameters=SCALINGS["linear"]))
    with pytest.raises(OptionError, match=r"llama9.*use one of llama2-7b"):
        shape_named("llama9")
    for noise in (-0.1, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="noise must be 0 or a positive"):
            WidenedCheckpoint(source, MHA, noise)
