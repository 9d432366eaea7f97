"""Safetensors directories: what is accepted, what is refused before loading, and how it is told."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from offload_runtime.errors import CheckpointError, HubError, UnsupportedArchitectureError
from offload_runtime.weights.checkpoint import sampling_defaults
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.sources import describe_model, open_checkpoint
from tests.helpers.models import load_plain, rows_of


def save_tiny(directory: Path, *, shard: str = "5GB", **overrides) -> torch.nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | overrides))).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", shard="20kB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    return tmp_path / "model"


def rewrite(file: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a file (names with `__` for dots), or drop them with None."""
    tensors = load_file(file)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, file)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shards_and_single_file_load_the_same(tmp_path):
    model = save_tiny(tmp_path / "one")
    save_tiny(tmp_path / "many", shard="20kB")
    for name in ("one", "many"):
        source = open_checkpoint(str(tmp_path / name))
        assert source.native_dtype == torch.bfloat16
        weights = load_plain(source, torch.bfloat16)
        state = model.state_dict()
        for key, destination in checkpoint_tensors(source.config()).items():
            assert torch.equal(rows_of(destination, weights), state[key]), (name, key)


@pytest.mark.parametrize("text", ["{", "[]", "\xff\xfe", "[" * 100_000])
def test_unreadable_config(single, text):
    (single / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json is not"):
        open_checkpoint(single)


def test_unsupported_model_is_refused_before_its_weights_are_looked_at(single):
    edit_config(single, model_type="mamba", architectures=["MambaForCausalLM"])
    (single / "model.safetensors").unlink()
    with pytest.raises(UnsupportedArchitectureError, match=r"MambaForCausalLM has Mamba layers, and .*Qwen3"):
        open_checkpoint(single)


def test_missing_shards_are_listed(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 1 of \d+ shards \({gone.name}\)"):
        open_checkpoint(sharded)


def test_index_may_not_leave_its_directory(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside its directory"):
        open_checkpoint(sharded)


def test_missing_tensors_are_counted(single):
    rewrite(single / "model.safetensors", model__layers__1__mlp__up_proj__weight=None, model__norm__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks 2 of 30 tensors \(model\.norm\.weight, model\.layers\.1"):
        open_checkpoint(single)


def test_wrong_shape_says_found_and_expected(single):
    rewrite(single / "model.safetensors", model__norm__weight=torch.ones(31, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[31\], expected \[32\]"):
        open_checkpoint(single)


def test_surplus_tensors_are_reported_but_known_leftovers_are_not(single, caplog):
    rewrite(single / "model.safetensors", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    open_checkpoint(single)
    assert not caplog.records
    rewrite(single / "model.safetensors", model__layers__0__self_attn__q_proj__bias=torch.ones(32))
    open_checkpoint(single)
    assert "self_attn.q_proj.bias" in caplog.text


def test_generation_settings_win_over_the_model_config(single):
    edit_config(single, eos_token_id=5)
    (single / "generation_config.json").unlink()
    assert open_checkpoint(single).generation_eos() == (5,)
    (single / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert open_checkpoint(single).generation_eos() == (7, 8)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": None}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05},
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"top_p": 0.9, "max_new_tokens": 5, "penalty_alpha": 0.6}, {"top_p": 0.9}),
    ],
)  # fmt: skip
def test_what_the_models_makers_say_about_sampling(single, settings, named):
    (single / "generation_config.json").write_text(json.dumps(settings))
    assert sampling_defaults(open_checkpoint(single).generation_fields) == named
    (single / "generation_config.json").unlink()
    assert sampling_defaults(open_checkpoint(single).generation_fields) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_p", 1.5), ("top_k", -1), ("top_k", 2.5),
     ("min_p", [0.1]), ("repetition_penalty", 0), ("do_sample", "yes")],
)  # fmt: skip
def test_sampling_of_the_models_makers_that_makes_no_sense_is_left_out(single, caplog, name, value):
    good = {"top_p": 0.9, "repetition_penalty": 1.1}
    good.pop(name, None)
    (single / "generation_config.json").write_text(json.dumps({**good, name: value}))
    assert sampling_defaults(open_checkpoint(single).generation_fields) == good
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"generation_config.json of {single}") and name.split("_")[0] in message
    assert message.endswith("; it is ignored")


def test_missing_tokenizer_is_a_typed_error(single):
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        open_checkpoint(single).tokenizer()


def test_a_configuration_that_transformers_refuses_is_no_fault_of_the_tokenizer(single):
    config = single / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_bias": None}))
    with pytest.raises(CheckpointError, match=r"config\.json that transformers does not read \(.*attention_bias"):
        open_checkpoint(single).tokenizer()


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/model", "nowhere", "a/b/c", "~/nowhere", "org/model.gguf", "a/b:"]
)
def test_what_looks_like_a_path_never_reaches_the_hub(name, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the hub was called")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(name)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(tmp_path / "weights.bin")


def test_hub_id_downloads_what_is_needed_and_no_more(single, monkeypatch):
    picked: list[str] = []
    repository = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja",
                  "merges.txt", "consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin",
                  "onnx/config.json"]  # fmt: skip

    def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert repo_id == "org/name-1.5B"
        picked.extend(filter_repo_objects(repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(single)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = open_checkpoint("org/name-1.5B")
    assert source.config().hidden_size == 32 and source.reference == "org/name-1.5B"
    assert picked == ["config.json", *repository[:6]]
    edit_config(single, model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedArchitectureError, match="Mamba layers"):
        open_checkpoint("org/name-1.5B")
    assert picked[7:] == ["config.json"]


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("org/name:Q4_K_M", "model-Q4_K_M.gguf"),
        ("org/name:q8_0", "Q8_0/model-Q8_0-00001-of-00002.gguf"),
        ("org/name:model-IQ4_K_M.gguf", "model-IQ4_K_M.gguf"),
        ("org/name:ud-q4_k_m", "model-UD-Q4_K_M.gguf"),
        ("org/name:Q5_0", "Q5_0/Q5_0.gguf"),
        ("org/name:f16", "model-f16.gguf"),
        ("org/name:Q4_K_XL", "no GGUF model for Q4_K_XL, and the local cache has F16, IQ4_K_M, Q2_K, Q4_K_M, "
                             "Q5_0, Q6_K, Q8_0, UD-Q4_K_M, UD-Q4_K_XL: write one of these"),
        ("org/name:Q6_K", r"2 GGUF models \(a-Q6_K.gguf, b-Q6_K.gguf\)"),
        ("org/name:Q2_K", r"lacks 1 of 2 files of the model \(model-Q2_K-00001-of-00002\.gguf\)"),
        ("org/other:Q4_K_M", "not in the local cache"),
    ],
)  # fmt: skip
def test_files_of_a_hub_repository(reference: str, found: str, tmp_path, monkeypatch):
    """Out of a cache of the hub's client, offline; what stands behind the colon is a quantisation or a file."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    names = ["model-Q4_K_M.gguf", "model-IQ4_K_M.gguf", "Q8_0/model-Q8_0-00001-of-00002.gguf", "a-Q6_K.gguf",
             "Q8_0/model-Q8_0-00002-of-00002.gguf", "b-Q6_K.gguf", "model-Q2_K-00002-of-00002.gguf",
             "model-UD-Q4_K_M.gguf", "UD-Q4_K_XL/model-UD-Q4_K_XL.gguf", "Q5_0/Q5_0.gguf", "model-f16.gguf",
             "mmproj-F16.gguf"]  # fmt: skip
    for name in names:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text("no GGUF")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = rf"{found} is not a GGUF file" if found in names else found
    for door in (open_checkpoint, describe_model):
        with pytest.raises((CheckpointError, HubError), match=message):
            door(reference)


def test_a_tag_downloads_no_other_mixture_and_no_projector(tmp_path, monkeypatch):
    """And where the hub can be reached, it is asked what there is."""
    picked: list[str] = []
    repository = ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "UD/m-UD-Q4_K_M-00001-of-00002.gguf", "mmproj-Q4_K_M.gguf"]

    def download(_: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        picked[:] = filter_repo_objects(repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda _: repository)
    for tag, wanted in (("Q4_K_M", repository[:1]), ("UD-Q4_K_M", repository[1:3]), ("Q8_0", [])):
        with pytest.raises(HubError, match=f"no GGUF model for {tag}, and the hub has Q4_K_M, UD-Q4_K_M: write one"):
            open_checkpoint(f"org/name:{tag}")
        assert picked == wanted


def test_other_failures_of_the_hub_are_typed_too(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("proxy said no")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(HubError, match="proxy said no"):
        open_checkpoint("org/name")


def test_directory_with_two_gguf_files_asks_which(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(__file__, tmp_path / name)
    with pytest.raises(CheckpointError, match="holds 2 GGUF models"):
        open_checkpoint(tmp_path)


def test_a_gguf_file_beside_other_files_of_its_repository(tmp_path):
    """Repositories of GGUF files often hold a `config.json` too, and what turns images into embeddings."""
    for name in ("model-Q4_0.gguf", "mmproj-F16.gguf", "imatrix.gguf", "model.Imatrix.gguf", "config.json"):
        shutil.copy(__file__, tmp_path / name)
    for door in (open_checkpoint, describe_model):
        with pytest.raises(CheckpointError, match=r"model-Q4_0\.gguf is not a GGUF file"):
            door(tmp_path)
    shutil.copy(__file__, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["imatrix.gguf", "mmproj-F16.gguf"])
def test_what_lies_beside_models_alone_is_named(tmp_path, name):
    shutil.copy(__file__, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a GGUF file"):
        open_checkpoint(tmp_path)


def test_a_configuration_of_gguf_files_leads_to_them(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    for door in (open_checkpoint, describe_model):
        with pytest.raises(CheckpointError, match=r"config\.json without sizes, .* org/name:Q4_K_M"):
            door("org/name")


def test_a_model_of_the_hub_is_not_what_else_is_in_the_cache(tmp_path, monkeypatch):
    shutil.copy(__file__, tmp_path / "model-Q4_0.gguf")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no config\.json: .*org/name:Q4_K_M"):
        open_checkpoint("org/name")


def test_unusable_paths_are_typed_errors(single, monkeypatch):
    with pytest.raises(CheckpointError, match="too long"):
        open_checkpoint("a" * 300)
    with pytest.raises(CheckpointError, match="without ~"):
        open_checkpoint("~no-such-user/model")
    exists = Path.exists

    def refuse(path: Path, **options: object) -> bool:
        if path.name.endswith(".index.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(CheckpointError, match=r"Permission denied.*permissions"):
        open_checkpoint(single)
