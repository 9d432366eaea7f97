"""What a GGUF file says is done as llama.cpp does it, whatever the file is called; what is no model of ours says so."""

import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from offload_runtime import Runtime
from offload_runtime.errors import CheckpointError, HubError
from tests.test_weights_gguf import write as write_llama

SIZES = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.2, "rms_norm_eps": 1e-5,
}  # fmt: skip
HEAD_DIM, PAIRS, BASE = 32, 16, 10000.0
VOCABULARY = {
    "model": "gpt2", "pre": "gpt-2", "merges": [], "tokens": [*bytes_to_unicode().values(), "<|end|>", "<|x|>"],
    "token_type": [1] * 256 + [3, 3], "eos_token_id": 256,
}  # fmt: skip
PROMPT, ANSWER = list(range(60, 100)), [70, 65, 80]
Fields = Callable[[gguf.GGUFWriter], object]


def build(family: str = "Llama") -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**SIZES)).eval()


def write(path: Path, model: Any, fields: Fields = lambda w: None, *, arch: str = "llama", **tensors: Any) -> Path:
    """Save a model with a tokenizer, with more metadata and tensors."""
    return write_llama(path, model, extra=fields, arch=arch, vocabulary=VOCABULARY, tensors=tensors)


def ours(path: Path) -> torch.Tensor:
    with Runtime.load(path, draft="none", device="cpu", dtype="fp32") as runtime:
        return next(iter(runtime.logits(PROMPT, [ANSWER]))).clone()


def theirs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([PROMPT + ANSWER])).logits[0, len(PROMPT) - 1 : -1]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plain") / "m.gguf", build())


# --- rotations


FREQS = [1.0] * 6 + [2.0] * 4 + [8.0] * 6


def ramp(pair: int, original: int) -> float:
    """The share of the unscaled frequency in YaRN, as in ggml's `rope_yarn_ramp`."""
    low, high = (HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(BASE)) for turns in (32.0, 1.0))
    low, high = max(0, math.floor(low)), min(HEAD_DIM - 1, math.ceil(high))
    return 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))


def _type(w: gguf.GGUFWriter, kind: str, factor: float | None, attention: float | None = None) -> None:
    w.add_string("llama.rope.scaling.type", kind)
    if factor is not None:
        w.add_float32("llama.rope.scaling.factor", factor)
    if attention is not None:
        w.add_float32("llama.rope.scaling.attn_factor", attention)


YARN = [ramp(pair, 64) + (1 - ramp(pair, 64)) / 4 for pair in range(PAIRS)]
# What the file says, its tensor of divisors, what each frequency is multiplied by, and what cosines and sines are.
ROTATIONS: dict[str, tuple[Fields, list[float] | None, list[float], float]] = {
    "the old key": (lambda w: w.add_float32("llama.rope.scale_linear", 4.0), None, [1 / 4] * PAIRS, 1.0),
    "a factor without a type": (lambda w: w.add_float32("llama.rope.scaling.factor", 4.0), None, [1 / 4] * PAIRS, 1.0),
    "a factor below 1": (lambda w: w.add_float32("llama.rope.scaling.factor", 0.5), None, [2.0] * PAIRS, 1.0),
    "none with a factor": (lambda w: _type(w, "none", 4.0), None, [1.0] * PAIRS, 1.0),
    "a factor of zero": (lambda w: _type(w, "linear", 0.0), None, [1.0] * PAIRS, 1.0),
    "attention without yarn": (lambda w: _type(w, "linear", 2.0, 1.25), None, [1 / 2] * PAIRS, 1.25),
    "a tensor": (lambda w: None, FREQS, [1 / f for f in FREQS], 1.0),
    "a tensor and a factor": (lambda w: _type(w, "linear", 2.0), FREQS, [1 / f / 2 for f in FREQS], 1.0),
    "a tensor and the old key": (
        lambda w: w.add_float32("llama.rope.scale_linear", 2.0), FREQS, [1 / f / 2 for f in FREQS], 1.0),
    "yarn": (lambda w: (_type(w, "yarn", 4.0), w.add_rope_scaling_orig_ctx_len(64)), None, YARN,
             0.1 * math.log(4) + 1),
    "yarn, attention and a tensor": (
        lambda w: (_type(w, "yarn", 4.0, 1.5), w.add_rope_scaling_orig_ctx_len(64)), FREQS,
        [y / f for y, f in zip(YARN, FREQS, strict=True)], 1.5 * (0.1 * math.log(4) + 1)),
    "the context as original": (lambda w: _type(w, "yarn", 4.0), None, [
        ramp(pair, 256) + (1 - ramp(pair, 256)) / 4 for pair in range(PAIRS)], 0.1 * math.log(4) + 1),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "tensor", "scales", "attention"), ROTATIONS.values(), ids=ROTATIONS)
def test_rotations_are_llama_cpps(
    fields: Fields, tensor: list[float] | None, scales: list[float], attention: float, tmp_path: Path
) -> None:
    model = build()
    path = write(tmp_path / "m.gguf", model, fields, **({"rope_freqs": tensor} if tensor else {}))
    rotary = model.model.rotary_emb
    rotary.inv_freq.mul_(torch.tensor(scales))
    rotary.attention_scaling = attention
    close(ours(path), theirs(model))


@pytest.mark.parametrize(("fields", "tensors", "words"), [
    (lambda w: _type(w, "longrope", 4.0), {}, "longrope .with its factors"),
    (lambda w: _type(w, "ntk", 4.0), {}, "RoPE scaling 'ntk'"),
    (lambda w: w.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0), {}, "yarn_beta_fast is 16"),
    (lambda w: w.add_float32("llama.rope.scaling.yarn_log_multiplier", 0.1), {}, r"yarn_log_multiplier is 0\.1"),
    (lambda w: w.add_float32("llama.rope.scaling.factor", -2.0), {}, "factor"),
    (lambda w: None, {"rope_freqs": FREQS[:5]}, "5 numbers in rope_freqs.weight, expected 16"),
    (lambda w: None, {"rope_factors_long": FREQS}, "no rope_factors_short.weight"),
])  # fmt: skip
def test_others_are_refused(fields: Fields, tensors: dict[str, list[float]], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", build(), fields, **tensors)
    with pytest.raises(CheckpointError, match=words):
        ours(path)


def test_the_text_part_of_qwen2_vl_runs(tmp_path: Path) -> None:
    model = build("Qwen2")
    fields = lambda w: w.add_rope_dimension_sections([4, 6, 6, 0])  # noqa: E731
    close(ours(write(tmp_path / "m.gguf", model, fields, arch="qwen2vl")), theirs(model))


# --- files


@pytest.mark.parametrize("name", ["MODEL.GGUF", "sha256-0123456789abcdef", "model", "m-00001-of-00001.GGUF", "m.bin"])
def test_a_gguf_file_is_known_by_its_content(plain: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(plain, tmp_path / name)
    expected = ours(plain)
    assert torch.equal(ours(tmp_path / name), expected)
    if name.lower().endswith(".gguf"):
        assert torch.equal(ours(tmp_path), expected)


FILES: dict[str, tuple[bytes | Callable[[bytes], bytes], str]] = {
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "is a big-endian GGUF file"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1, .*converted lately"),
    "version 9": (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "version 9, .*upgrade"),
    "half of a file": (lambda data: data[: len(data) // 2], "truncated"),
    "half of a header": (lambda data: data[:400], "past the end"),
    "nothing": (b"", "is empty"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS"),
    "a web page": (b"<!DOCTYPE html><html>", "is a web page"),
    "torch": (b"PK\x03\x04\x00\x00\x08\x08", "torch.save.*safetensors"),
    "GGML": (b"tjgg\x03\x00\x00\x00", "before August 2023"),
    "text": (b"hello", "is not a GGUF file"),
}


@pytest.mark.parametrize(("content", "words"), FILES.values(), ids=FILES)
def test_other_files_say_what_they_are(content: Any, words: str, plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content(plain.read_bytes()))
    with pytest.raises(CheckpointError, match=words) as refusal:
        ours(path)
    assert "..." not in str(refusal.value)


@pytest.mark.parametrize(
    ("arch", "fields", "words"),
    [
        ("clip", lambda w: None, "'clip' makes images, sound or embeddings"),
        ("llama", lambda w: w.add_type("mmproj"), "turns images into tokens"),
        ("llama", lambda w: w.add_type("adapter"), "LoRA"),
        ("llama", lambda w: w.add_type("imatrix"), "importance matrix"),
        ("grok", lambda w: (w.add_expert_count(8), w.add_expert_used_count(2)), "mixture of experts.*Qwen3"),
        ("flux", lambda w: None, "makes images"),
        ("kimi-linear", lambda w: w.add_ssm_state_size(128), "linear attention of another kind"),
        ("deepseek2", lambda w: w.add_kv_lora_rank(512), "latent attention"),
        ("gemma3n", lambda w: w.add_uint32("gemma3n.embedding_length_per_layer_input", 256), "for each layer"),
        ("t5", lambda w: None, "encoder-decoder"),
        ("bloom", lambda w: None, "layers of another kind.*Qwen3-1.7B"),
    ],
)  # fmt: skip
def test_what_is_no_model_of_ours_says_why(arch: str, fields: Fields, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(2), w.add_embedding_length(32), w.add_feed_forward_length(64)
    fields(w)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    with pytest.raises(CheckpointError, match=words):
        ours(path)


@pytest.mark.parametrize(("reference", "repository", "what"), [
    ("hf.co/org/name:Q4_K_M", "org/name", "*[-._/][qQ]4_[kK]_[mM].[gG][gG][uU][fF]"),
    ("huggingface.co/org/name", "org/name", "config.json"),
    ("https://huggingface.co/org/name/tree/main", "org/name", "config.json"),
    ("https://huggingface.co/org/name/blob/main/a/m.gguf", "org/name", "a/m.gguf"),
    ("https://huggingface.co/org/name/resolve/main/m.gguf?download=true", "org/name", "m.gguf"),
])  # fmt: skip
def test_hub_addresses_are_names(reference: str, repository: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        raise huggingface_hub.errors.OfflineModeIsEnabled

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(HubError):
        Runtime.load(reference, draft="none", device="cpu")
    assert asked[0][0] == repository and what in asked[0][1]


# --- what a request leaves open


def test_sampling_of_the_makers(tmp_path: Path) -> None:
    def fields(w: gguf.GGUFWriter) -> None:
        w.add_float32("general.sampling.temp", 0.6), w.add_int32("general.sampling.top_k", 20)
        w.add_float32("general.sampling.top_p", 0.95), w.add_float32("general.sampling.min_p", 0.05)
        w.add_float32("general.sampling.penalty_repeat", 1.05), w.add_float32("general.sampling.xtc_threshold", 0.1)

    right = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    with Runtime.load(write(tmp_path / "m.gguf", build(), fields), draft="none", device="cpu") as runtime:
        assert dict(runtime.sampling_defaults) == right


@pytest.mark.parametrize("default", ["D {{ messages[0].content }}", ""])
def test_the_template_for_tools(default: str, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T {{ tools[0].function.name if tools else '' }}"}]
    named += [{"name": "default", "template": default}] if default else []
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    path = write(tmp_path / "m.gguf", build(), lambda w: w.add_chat_template(named))
    with Runtime.load(path, draft="none", device="cpu") as runtime:
        for options, text in (({"tools": tools}, "T weather"), ({}, "D hi" if default else "T ")):
            tokens = runtime.encode([{"role": "user", "content": "hi"}], template_options=options)
            assert runtime.tokenizer.decode(tokens) == text
