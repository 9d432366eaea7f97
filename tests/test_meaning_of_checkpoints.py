"""Which weights, end tokens and templates a directory means: what transformers makes of the same one, or a refusal."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from offload_runtime import Runtime
from offload_runtime.errors import CheckpointError
from tests.helpers.engine import byte_level_tokenizer

PROMPT, ANSWER = [5, 3, 80, 41, 7, 22, 90], [9, 8, 7, 6]
TEXT = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 2,
}  # fmt: skip
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    root = tmp_path_factory.mktemp("models")
    for tied in (True, False):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**TEXT, tie_word_embeddings=tied)
        transformers.LlamaForCausalLM(config).save_pretrained(root / str(tied))
        byte_level_tokenizer().save_pretrained(root / str(tied))
    return lambda tied: root / str(tied)


@pytest.fixture
def tied(originals: Callable[[bool], Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals(True), tmp_path / "model")


@pytest.fixture
def untied(originals: Callable[[bool], Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals(False), tmp_path / "model")


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def ours(directory: Path) -> torch.Tensor:
    with Runtime.load(directory, draft="none", device="cpu", dtype="fp32") as runtime:
        return next(iter(runtime.logits(PROMPT, [ANSWER]))).clone()


def theirs(directory: Path, kind: Any = transformers.AutoModelForCausalLM) -> torch.Tensor:
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([PROMPT + ANSWER])).logits[0, len(PROMPT) - 1 : -1]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


HEADS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "a head of its own": lambda t: t.update({HEAD: torch.randn(320, 32)}),
    "the same once more": lambda t: t.update({HEAD: t[EMBEDDING].clone()}),
    "the same in another dtype": lambda t: t.update({HEAD: t[EMBEDDING].double()}),
    "the head's name alone": lambda t: t.update({HEAD: t.pop(EMBEDDING)}),
}


@pytest.mark.parametrize("change", HEADS.values(), ids=HEADS)
def test_a_tied_head_is_what_is_stored(tied: Path, change: Any) -> None:
    rewrite(tied, change)
    close(ours(tied), theirs(tied))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", "model."),
        ("_orig_mod.model.", "_orig_mod."), ("language_model.", "language_model."),
    ],
)  # fmt: skip
def test_names_of_tensors_may_begin_otherwise(tied: Path, prefix: str, head: str) -> None:
    rewrite(tied, HEADS["a head of its own"])
    right = ours(tied)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            to = head + name if name == HEAD else prefix + name.removeprefix("model.")
            tensors[to] = tensors.pop(name)

    rewrite(tied, change)
    close(ours(tied), right)


def test_a_base_model_loads_where_its_head_is_tied(tied: Path) -> None:
    right = theirs(tied)
    transformers.AutoModel.from_pretrained(tied).save_pretrained(tied)
    assert json.loads((tied / "config.json").read_text())["architectures"] == ["LlamaModel"]
    close(ours(tied), right)


def test_a_base_model_without_a_head_is_refused(untied: Path) -> None:
    transformers.AutoModel.from_pretrained(untied).save_pretrained(untied)
    with pytest.raises(CheckpointError, match="saved without its head"):
        ours(untied)


@pytest.mark.parametrize("shards_are_there", [True, False])
def test_an_old_index_does_not_decide(untied: Path, shards_are_there: bool) -> None:
    old = untied.parent / "old"
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(old, max_shard_size="40kB")
    for path in old.glob("*.safetensors*" if shards_are_there else "*.index.json"):
        shutil.copy(path, untied)
    assert (untied / "model.safetensors.index.json").exists()
    close(ours(untied), theirs(untied))
    (untied / "model.safetensors").unlink()
    if shards_are_there:
        close(ours(untied), theirs(old))
    else:
        with pytest.raises(CheckpointError, match=r"(?s)lacks \d of \d shards .*delete its old"):
            ours(untied)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("adapter_config.json", {"base_model_name_or_path": "org/base"}, "adapter .LoRA. of org/base.*merge"),
        ("config.json", {"quantization": {"bits": 4, "group_size": 64}}, "quantised .*not read"),
        ("config.json", {"is_encoder_decoder": True, "model_type": "t5"}, "encoder-decoder.*Qwen3"),
        ("config.json", {"architectures": ["LlamaForSequenceClassification"]}, "another head"),
        ("config.json", {"model_type": "phimoe", "num_local_experts": 128, "num_experts_per_tok": 8,
                         "moe_intermediate_size": 768, "hidden_size": 2048, "num_hidden_layers": 48},
         "mixture of experts.*Qwen3-8B"),
        ("config.json", {"model_type": None}, "does not say what model it is"),
        ("config.json", {"model_type": "deepseek_v3", "kv_lora_rank": 512, "n_routed_experts": 256},
         "latent attention"),
        ("config.json", {"model_type": "glm4_moe", "n_group": 4}, "n_group is 4.*chosen by groups"),
        ("config.json", {"model_type": "blip-2", "text_config": {"model_type": "opt"}}, r"text part .opt. has layers"),
        ("config.json", {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "num_local_experts": 16}},
         "mixture of experts"),
    ],
)  # fmt: skip
def test_what_is_no_model_of_ours_is_refused_by_what_it_is(untied: Path, name: str, content: Any, words: str) -> None:
    (untied / name).touch()
    (untied / name).write_text((untied / name).read_text() or "{}")
    if "model_type" in content:
        content = {"architectures": None, **content}
    edit(untied / name, **content)
    with pytest.raises(CheckpointError, match=words):
        ours(untied)


@pytest.mark.parametrize(("files", "words"), [
    ({"config.json": b"{}", "pytorch_model.bin": b"PK\x03\x04"}, "as pytorch_model.bin, which is not read"),
    ({"consolidated.00.pth": b"PK\x03\x04", "params.json": b"{}"}, "makers' own format"),
    ({"model_index.json": b"{}"}, "makes images"), ({"snapshots/abc/config.json": b"{}"}, "snapshots/abc has one"),
    ({"model.safetensors": b"x"}, "no config.json beside model.safetensors"),
    ({"config.json": b"{}", "model-00001-of-00002.safetensors": b"x"}, "no model.safetensors.index.json"),
    ({"Q4_K_M/x.gguf": b"GGUF"}, r"in it Q4_K_M/x.gguf: give that"),
    ({"blobs/sha256-abc": b"GGUF"}, r"in it blobs/sha256-abc: give that"), ({}, "has no config.json"),
])  # fmt: skip
def test_other_directories_say_what_they_are(files: dict[str, bytes], words: str, tied: Path, tmp_path: Path) -> None:
    directory = tmp_path / "other"
    directory.mkdir()
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    if "config.json" in files:
        shutil.copy(tied / "config.json", directory)
    with pytest.raises(CheckpointError, match=words):
        ours(directory)


def test_a_file_that_is_not_the_directorys_model_is_not_taken_for_it(untied: Path) -> None:
    shutil.copy(untied / "model.safetensors", untied / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors is not what"):
        ours(untied / "consolidated.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pointers_of_git_lfs_are_named(untied: Path, name: str) -> None:
    (untied / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS"):
        ours(untied)


# --- text parts


def _mistral3() -> torch.nn.Module:
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    text = {"model_type": "mistral", "sliding_window": None, "head_dim": 8, **TEXT}
    config = transformers.Mistral3Config(vision_config=vision, text_config=text, tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config)


def _qwen2_5_vl() -> torch.nn.Module:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
              "fullatt_block_indexes": [0]}  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": rope})
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


@pytest.mark.parametrize("make", [_mistral3, _qwen2_5_vl])
def test_of_a_model_that_reads_images_the_text_part_runs(
    make: Callable[[], Any], untied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "images")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(untied / name, tmp_path / "images")
    edit(tmp_path / "images/tokenizer_config.json", chat_template=None)
    (tmp_path / "images/chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    close(ours(tmp_path / "images"), theirs(tmp_path / "images", transformers.AutoModelForImageTextToText))
    assert "only the text part" in caplog.text
    with Runtime.load(tmp_path / "images", draft="none", device="cpu") as runtime:
        assert runtime.tokenizer.decode(runtime.encode([{"role": "user", "content": "hi"}])) == "hi"


def test_old_configurations_of_qwen2_vl_are_flat(untied: Path) -> None:
    right = ours(untied)
    config = json.loads((untied / "config.json").read_text())
    edit(untied / "config.json", model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"],
         vision_config={"depth": 1}, use_sliding_window=False, rope_parameters=None, rms_norm_eps=1e-6,
         rope_theta=config["rope_parameters"]["rope_theta"], rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
         )  # fmt: skip
    rewrite(untied, lambda t: t.update({
        f"model.layers.{layer}.self_attn.{name}_proj.bias": torch.zeros(rows)
        for layer in range(2) for name, rows in (("q", 32), ("k", 16), ("v", 16))}))  # fmt: skip
    close(ours(untied), right)


# --- quantised, end tokens, templates


def test_quantised_tensors_that_nothing_speaks_of_are_refused(untied: Path) -> None:
    rewrite(untied, lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, 48, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"is quantised .*quantize_config\.json says how"):
        ours(untied)


@pytest.mark.parametrize(("name", "stated"), [
    ("quantize_config.json", {"bits": 4, "group_size": 16, "desc_act": False}),
    ("quant_config.json", {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}),
])  # fmt: skip
def test_old_tools_statements_are_read(untied: Path, name: str, stated: dict[str, Any]) -> None:
    """As those that stand in config.json today."""
    method = {"quantize_config.json": "gptq", "quant_config.json": "awq"}[name]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if "_proj." in key]:
            rows, columns = tensors.pop(key).shape
            packed = (columns // 8, rows) if method == "gptq" else (columns, rows // 8)
            module = key.removesuffix("weight")
            tensors[module + "qweight"] = torch.randint(-(2**31), 2**31 - 1, packed).to(torch.int32)
            tensors[module + "qzeros"] = torch.zeros(columns // 16, rows // 8, dtype=torch.int32)
            tensors[module + "scales"] = torch.full((columns // 16, rows), 0.01, dtype=torch.float16)

    rewrite(untied, change)
    (untied / name).write_text(json.dumps(stated))
    found = ours(untied)
    (untied / name).unlink()
    edit(untied / "config.json", quantization_config={"quant_method": method, "bits": 4, "group_size": 16})
    assert torch.equal(found, ours(untied))


def test_the_tokenizers_end_token_ends_an_answer_too(untied: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(untied)
    own = tokenizer.eos_token_id
    assert own not in (2, None)
    edit(untied / "generation_config.json", eos_token_id=2)
    with Runtime.load(untied, draft="none", device="cpu") as runtime:
        for token in (own, 2):
            result = runtime.generate(PROMPT, max_new_tokens=4, logit_bias={token: 100})
            assert (result.finish_reason, len(result.tokens)) == ("stop", 1)


@pytest.mark.parametrize("kept_as", ["a list", "a directory"])
def test_the_template_for_tools_is_used_where_there_are_tools(untied: Path, kept_as: str) -> None:
    templates = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ tools[0].function.name }}"}
    for path in untied.glob("*.jinja"):
        path.unlink()
    if kept_as == "a list":
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        edit(untied / "tokenizer_config.json", chat_template=listed)
    else:
        (untied / "chat_template.jinja").write_text(templates["default"])
        (untied / "additional_chat_templates").mkdir()
        (untied / "additional_chat_templates/tool_use.jinja").write_text(templates["tool_use"])
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    with Runtime.load(untied, draft="none", device="cpu") as runtime:
        for options, text in (({"tools": tools}, "T weather"), ({}, "D hi")):
            tokens = runtime.encode([{"role": "user", "content": "hi"}], template_options=options)
            assert runtime.tokenizer.decode(tokens) == text
