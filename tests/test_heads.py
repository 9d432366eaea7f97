"""Heads against what their definitions say, computed for a whole sequence at once; how they are read; and plans with
them."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import CheckpointError, OptionError, UnsupportedArchitectureError, VocabularyMismatchError
from offload_runtime.hardware import load_profile
from offload_runtime.models.eagle3 import Eagle3Config
from offload_runtime.models.mtp import MtpConfig
from offload_runtime.plan.report import forecast
from offload_runtime.plan.search import plan_run
from offload_runtime.plan.sizes import describe_models
from offload_runtime.sizes import GB
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.assembly import in_memory, make_runner
from tests.helpers.families import VOCABULARY, family_config, family_model, write_family
from tests.helpers.heads import Eagle3, Mtp, run_head, tapped, write_mtp
from tests.helpers.models import load_plain, model_config_from_transformers, rows_of
from tests.helpers.quantising import FORMATS, random_llama, write_quantised

TOKENS = torch.randint(VOCABULARY, (60,), generator=torch.Generator().manual_seed(0)).tolist()
# Family, layout, what says that there is a head.
MTP = [
    ("qwen3_5_text", "qwen", "mtp_num_hidden_layers"), ("qwen3_5_moe_text", "qwen", "mtp_num_hidden_layers"),
    ("qwen3_next", "qwen", "num_nextn_predict_layers"), ("llama", "qwen", "mtp_num_hidden_layers"),
    ("glm4_moe", "deepseek", "num_nextn_predict_layers"),
]  # fmt: skip


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless all that is finite is as good as equal, and the rest is."""
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    error = float((actual - expected)[finite].abs().max() / expected[finite].abs().max())
    assert error < 1e-4, f"relative error {error:.1e}"


def _streams(model: Any) -> list[torch.Tensor]:
    """The residual streams below all layers and behind the last, [T, H] each."""
    found = list[torch.Tensor]()
    read_by = (*model.model.layers, model.model.norm)
    hooks = [one.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0])) for one in read_by]
    with torch.no_grad():
        model.model(torch.tensor([TOKENS]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _check_mtp(source: CheckpointSource, mtp: Mtp) -> None:
    target, read = make_runner(source), source.read_mtp()
    assert isinstance(read, CheckpointSource)
    head = make_runner(read, target=target.runner)
    hidden = mtp.target_hidden(TOKENS)
    _close(tapped(head, _streams(mtp.target)), hidden)
    logits, normed = mtp.logits(TOKENS[1:], hidden[:-1])
    own, kept = run_head(head, TOKENS[1:], hidden[:-1])
    _close(own, logits)
    _close(kept, normed)
    _close(run_head(head, TOKENS[2:], kept[:-1])[0], mtp.logits(TOKENS[2:], kept[:-1])[0])
    head.close()
    target.close()


@pytest.mark.parametrize(("family", "layout", "key"), MTP)
def test_mtp_layers_say_what_their_definition_does(family: str, layout: str, key: str, tmp_path: Path) -> None:
    target = family_model(family, 0)
    mtp = Mtp.of(family, target, 0)
    source = open_checkpoint(write_mtp(tmp_path / "m", mtp, layout, key))
    _check_mtp(source, mtp)


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_5_text", "qwen"), ("qwen3_5_moe_text", "qwen"), ("glm4_moe", "deepseek")]
)
def test_mtp_layers_of_gguf_files_are_the_same(family: str, layout: str, tmp_path: Path) -> None:
    mtp = Mtp.of(family, family_model(family, 1), 1)
    file = write_family(tmp_path / "m.gguf", family, mtp.target, mtp=mtp.tensors("deepseek"))
    _check_mtp(open_checkpoint(file), mtp)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"draft_vocab": 90}, {"size": 40, "draft_vocab": 90}, {"norm_before_residual": True},
        {"attention_bias": True, "mlp_bias": True}, {"taps": (0, 2)}, {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
    ],
)  # fmt: skip
def test_eagle3_heads_say_what_their_definition_does(options: dict[str, Any], tmp_path: Path) -> None:
    model = family_model("llama", 0)
    eagle = Eagle3.of(model, **options)
    source = open_checkpoint(eagle.write(tmp_path / "e"), draft=True).fitted(in_memory(model))
    target = make_runner(model)
    head = make_runner(source, target=target.runner)
    hidden = eagle.joined(model, TOKENS)
    kept = tapped(head, _streams(model))
    of_rows = partial(normalize, dim=-1) if "norm_before_fc" in options else torch.clone  # which are normed again
    _close(of_rows(kept), of_rows(hidden))
    _close(run_head(head, TOKENS[1:], kept[:-1])[0], run_head(head, TOKENS[1:], hidden[:-1])[0])
    logits, residual = eagle.logits(model, TOKENS[1:], hidden[:-1])
    own, kept = run_head(head, TOKENS[1:], hidden[:-1])
    _close(own, logits)
    _close(kept, residual)
    head.close()
    target.close()


@pytest.mark.parametrize(
    ("form", "quantised"), [("FP8 of blocks", True), ("FP8 of blocks", False), ("packed 4 bits", True)]
)
def test_mtp_layers_of_quantised_checkpoints_are_quantised_or_not(form: str, quantised: bool, tmp_path: Path) -> None:
    model, generator = random_llama(), torch.Generator().manual_seed(0)
    needed = checkpoint_tensors(MtpConfig.of(model_config_from_transformers(model.config)))
    tensors = {name: torch.randn(to.shape, generator=generator) for name, to in needed.items()}
    decoded = write_quantised(tmp_path, FORMATS[form], model, others=tensors if quantised else {})
    if not quantised:
        decoded |= (stored := {name: one.to(FORMATS[form].dtype) for name, one in tensors.items()})
        save_file({**load_file(tmp_path / "model.safetensors"), **stored}, tmp_path / "model.safetensors")
    read = open_checkpoint(tmp_path).read_mtp()
    assert isinstance(read, CheckpointSource)
    weights = load_plain(read, torch.float32)
    for name, to in needed.items():
        torch.testing.assert_close(rows_of(to, weights), decoded[name].float(), rtol=0, atol=0)
    weights.close()
    shrinks = read.layout(torch.bfloat16).total_bytes / read.as_decoded.layout(torch.bfloat16).total_bytes
    assert (shrinks < 0.7) == quantised


def _without(directory: Path, *names: str, **settings: Any) -> Path:
    """A checkpoint without some tensors, whose configuration says other things."""
    file, config = directory / "model.safetensors", directory / "config.json"
    save_file({name: one for name, one in load_file(file).items() if name not in names}, file, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    return directory


def test_a_model_without_some_of_its_mtp_layer_opens_and_says_what_is_missing(tmp_path: Path) -> None:
    mtp = Mtp.of("llama", family_model("llama", 0), 0)
    directory = write_mtp(tmp_path / "m", mtp, "qwen", "mtp_num_hidden_layers")
    copy = shutil.copytree(directory, tmp_path / "elsewhere")
    one, other = (open_checkpoint(path).read_mtp() for path in (directory, copy))
    assert isinstance(one, CheckpointSource) and isinstance(other, CheckpointSource)
    assert one.fingerprint == other.fingerprint != open_checkpoint(directory).fingerprint
    source = open_checkpoint(_without(directory, "mtp.norm.weight"))
    with pytest.raises(CheckpointError, match=r"MTP layer lacks 1 of \d+ tensors \(mtp.norm.weight\)"):
        source.read_mtp()
    qwen = Mtp.of("qwen3_5_text", family_model("qwen3_5_text", 0), 0)
    lacking = {name: one for name, one in qwen.tensors("deepseek").items() if not name.endswith("hnorm.weight")}
    file = write_family(tmp_path / "m.gguf", "qwen3_5_text", qwen.target, mtp=lacking)
    with pytest.raises(CheckpointError, match=r"m.gguf's MTP layer lacks 1 of \d+ tensors .blk.\d.nextn.hnorm.weight."):
        open_checkpoint(file).read_mtp()
    whole = [name for name in load_file(directory / "model.safetensors") if name.startswith("mtp.")]
    assert open_checkpoint(_without(directory, *whole)).read_mtp() is None


@pytest.mark.parametrize(("of_head", "of_target", "error", "message"), [
    ({}, {"num_attention_heads": 2, "hidden_size": 64}, CheckpointError, "reads rows of 40 channels, and .* 64"),
    ({}, {"vocab_size": 500}, VocabularyMismatchError, "is about 320 tokens and the target has 500"),
    ({"taps": (2, 40)}, {}, CheckpointError, r"below layers \(2, 40\), .* up to 3"),
    ({"taps": (2, 1)}, {}, CheckpointError, r"below layers \(2, 1\), which have to be in order"),
])  # fmt: skip
def test_heads_of_other_models_are_refused(
    of_head: dict[str, Any], of_target: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    head = Eagle3.of(family_model("llama", 0), draft_vocab=90, **of_head).write(tmp_path / "e")
    with pytest.raises(error, match=message):
        open_checkpoint(head, draft=True).fitted(in_memory(family_model("llama", 0, **of_target)))


def test_damaged_heads_are_refused(tmp_path: Path) -> None:
    model = family_model("llama", 0)
    eagle = Eagle3.of(model, draft_vocab=90)
    with pytest.raises(UnsupportedArchitectureError, match=r"a draft head \(EAGLE-3\) and no model by itself"):
        open_checkpoint(eagle.write(tmp_path))
    with pytest.raises(CheckpointError, match=r"lacks 1 of \d+ tensors \(layers.0.self_attn.o_proj.weight\)"):
        open_checkpoint(_without(eagle.write(tmp_path), "midlayer.self_attn.o_proj.weight"), draft=True)
    with pytest.raises(CheckpointError, match=r"lacks 1 of \d+ tensors \(lm_head.weight\)"):
        open_checkpoint(_without(eagle.write(tmp_path), "lm_head.weight"), draft=True)
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[\d+, \d+\], expected"):
        open_checkpoint(_without(eagle.write(tmp_path), target_hidden_size=8), draft=True)
    eagle.tensors["d2t"][-1] = 400
    with pytest.raises(CheckpointError, match="d2t does not name tokens below 320"):
        open_checkpoint(eagle.write(tmp_path), draft=True)
    for name, value in (("use_last_layernorm", False), ("norm_before_fc", True)):
        with pytest.raises(CheckpointError, match=r"has use_last_layernorm False|has norm_before_residual False"):
            open_checkpoint(Eagle3.of(model, eagle_config={name: value}).write(tmp_path), draft=True)
    other = Eagle3.of(model)
    other.tensors |= {"verifier_norm.weight": torch.zeros(40), "fc_norm.weight": torch.zeros(120)}
    with pytest.raises(CheckpointError, match=r"has 1 tensors that EAGLE-3 heads have not \(fc_norm.weight\)"):
        open_checkpoint(other.write(tmp_path), draft=True)


def test_layer_ids_of_either_convention_are_the_same(tmp_path: Path) -> None:
    """One names layers below which the target is read, the other those whose output is."""
    model = family_model("llama", 0)
    eagle = Eagle3.of(model, taps=(1, 2, 3))
    del eagle.settings["eagle_aux_hidden_state_layer_ids"]
    eagle.settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = open_checkpoint(eagle.write(tmp_path / "e"), draft=True).fitted(in_memory(model)).config()
    assert isinstance(head, Eagle3Config) and head.taps == (1, 2, 3)


CONFIGS = Path(__file__).parent / "data" / "configs"
CARD = load_profile("rtx4090")
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 5120, "intermediate_size": 27648,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
    "vocab_size": 152064, "draft_vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def described(directory: Path, **settings: Any) -> str:
    """A directory with a configuration alone, by default Qwen2.5-32B's with an MTP layer."""
    usual = json.loads((CONFIGS / "qwen2.5-32b" / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings if "architectures" in settings else usual | settings))
    return str(directory)


def test_an_mtp_layer_takes_what_it_does_not_share(tmp_path: Path) -> None:
    target = described(tmp_path / "target")
    plan = plan_run(describe_models(RuntimeConfig(target, "mtp", context=8192, tree_nodes=0)), CARD)
    draft, size, layer_bytes = plan.draft, plan.target.config.hidden_size, plan.target.layout.layer_bytes[0]
    assert draft is not None
    fc_bytes, lm_head_bytes = 2 * size * size * 2, plan.target.layout.head.total_bytes
    assert 0 <= plan.device["draft weights"] - layer_bytes - fc_bytes < 1 << 20
    assert plan.device["draft KV cache"] == draft.kv_bytes_of((0,), 8192)
    assert plan.device["hidden states for the draft"] < 1 << 23, "those of a prompt are where its rows were"
    read_s = (layer_bytes + fc_bytes + lm_head_bytes) / (CARD.require_gpu().hbm_gbps or 0) / GB
    assert 1 < forecast(plan, CARD).draft_step_s / read_s < 1.4
    said = CliRunner().invoke(app, _plan(target, "mtp")).stdout
    assert "of what the MTP head proposes, which is assumed, not measured" in " ".join(said.split())


def _plan(target: str, *draft: str) -> list[str]:
    return ["plan", "--target", target, "--profile", "rtx4090", *(["--draft", *draft] if draft else [])]


def test_what_a_model_carries_drafts_by_itself(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, _plan(described(tmp_path / "target"), "auto"))
    assert "Drafting with the MTP layer that it carries, predicted to be" in result.stdout
    without = CliRunner().invoke(app, _plan(described(tmp_path / "without", mtp_num_hidden_layers=0), "auto"))
    assert without.exit_code == 0 and "MTP" not in without.stdout


def test_a_copy_without_what_its_model_has_says_what_would_be_better(tmp_path: Path) -> None:
    settings = family_config("qwen3_5_text", 0).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    result = CliRunner().invoke(app, _plan(described(tmp_path / "target", **settings), "auto"))
    assert "a copy of the model that has its MTP layers would draft better" in result.stdout


@pytest.mark.parametrize(("settings", "options", "error", "message"), [
    ({"mtp_num_hidden_layers": 0}, {}, OptionError, "carries no MTP layers, which copies"),
    ({}, {"mode": "triforce"}, OptionError, "triforce: the MTP head drafts from what passes of the target keep"),
    ({}, {"draft_cache": "retrieval"}, OptionError, "--draft-cache retrieval: the MTP head has few layers"),
    ({}, {"draft_cache": "streaming"}, OptionError, "--draft-cache streaming: the MTP head has few layers"),
    ({}, {"recent_tokens": 64}, OptionError, "--recent-tokens does nothing with the MTP head"),
    (
        {"draft": {"vocab_size": 151936}},
        {},
        VocabularyMismatchError,
        "head is about 151936 tokens and the target has 152064",
    ),
    ({"draft": {"hidden_size": 4096}}, {}, CheckpointError, "reads rows of 4096 channels, and the target's have"),
])  # fmt: skip
def test_what_a_head_cannot_do_is_refused(
    settings: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    draft = settings.pop("draft", None)
    named = "mtp" if draft is None else described(tmp_path / "head", **EAGLE3 | draft)
    asked = RuntimeConfig(described(tmp_path / "target", **settings), named, speculation=SpeculationOptions(**options))
    with pytest.raises(error, match=message):
        plan_run(describe_models(asked), CARD)


def test_ngrams_join_one_drafter_however_they_are_named() -> None:
    for named in ("mtp", "mtp,ngram", "ngram, mtp", "auto,ngram", "ngram,ngram", "a,b/c"):
        expected = {"auto,ngram": "auto", "ngram,ngram": "ngram", "a,b/c": "a,b/c"}.get(named, "mtp")
        assert RuntimeConfig("m", named).draft == expected
    for named in ("mtp,eagle3-head", "none,ngram", "ngram,mtp,auto"):
        with pytest.raises(OptionError, match=f"--draft {named}: one drafts, and n-grams join it"):
            RuntimeConfig("m", named)
