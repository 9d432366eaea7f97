"""Families against transformers, on random configurations, from safetensors and from GGUF, and on a GPU."""

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from offload_runtime import Runtime
from offload_runtime.config import SpeculationOptions
from offload_runtime.core import TokenTree
from offload_runtime.errors import OptionError
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.models.rope import RopeTable
from offload_runtime.runners.model_runner import ModelRunner
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers import families as cases
from tests.helpers import models
from tests.helpers.assembly import make_runner, prefill, verify
from tests.helpers.engine import byte_level_tokenizer, write_noisy_copy
from tests.test_conversation import say

# Configurations of each family by default, and asked for: FAMILY_SEEDS=30 before a family lands.
ALL = int(os.environ.get("FAMILY_SEEDS", 1))
PROMPT = 70
# Of the largest logit: what sums in another order may come to, more where attention is sharp (Gemma 4 does not scale
# it), and by less than what tokens are as good as equal. In gated delta layers both sides take decays from differences
# of sums of their logarithms, in fp32: where those came to -1283 in a chunk, each was 3e-5 off the rule in fp64.
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
LOGITS_ERROR = dict.fromkeys(("gemma4_text", *HYBRIDS), 1e-4)
GREEDY_MARGIN = dict.fromkeys(LOGITS_ERROR, 2e-4)

# Of those that no other file runs in every way these do each time: windows, and keys that layers share.
RUN_OFTEN, RUN_ELSEWHERE = ("gemma3_text", "gemma4_text"), ("llama", "qwen3_5_text", "qwen3_moe")
RUN = [one for one in cases.CONFIGURATIONS if one not in RUN_ELSEWHERE]

families = pytest.mark.parametrize("family", cases.CONFIGURATIONS)
run_families = pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in RUN_OFTEN else pytest.mark.slow) for one in RUN]
)
seeds = pytest.mark.parametrize("seed", range(ALL))


def _check(path: Path, family: str, model: Any, seed: int) -> None:
    """Greedy tokens behind a prompt; where one has just been said a random one takes its place, as texts of random
    models repeat themselves soon."""
    generator, made = torch.Generator().manual_seed(seed), make_runner(open_checkpoint(path), buffers=2)
    text = torch.randint(cases.VOCABULARY, (PROMPT,), generator=generator).tolist()
    fed, logits, chosen = text[:], list[torch.Tensor](), list[int]()
    for _ in range(64 if seed else 12):
        logits.append(prefill(made.runner, 0, fed)[0])
        chosen.append(int(logits[-1].argmax()))
        fed = [int(torch.randint(cases.VOCABULARY, (), generator=generator)) if chosen[-1] in text[-8:] else chosen[-1]]
        text += fed
    made.close()
    expected = models.all_logits(model, text)[PROMPT - 1 : -1]
    scale = expected.abs().max()
    assert float((torch.stack(logits) - expected).abs().max() / scale) < LOGITS_ERROR.get(family, 2e-5)
    of_chosen = expected.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    assert float(((expected.max(1).values - of_chosen) / scale).max()) < GREEDY_MARGIN.get(family, 1e-4)


@families
@seeds
def test_matches_transformers(family: str, seed: int, tmp_path: Path) -> None:
    model = cases.family_model(family, seed)
    model.save_pretrained(tmp_path)
    _check(tmp_path, family, model, seed)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid"])  # of which one keeps its decays in fp32
def test_weights_in_bf16_are_what_transformers_makes_of_them(family: str, tmp_path: Path) -> None:
    cases.family_model(family, 3).save_pretrained(tmp_path)
    state = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    weights = models.load_plain(source := open_checkpoint(tmp_path), torch.bfloat16)
    for name, to in checkpoint_tensors(source.config()).items():
        torch.testing.assert_close(models.rows_of(to, weights), state[name], rtol=0, atol=0)


@pytest.mark.parametrize("family", cases.ARCHITECTURES)
@seeds
def test_a_gguf_file_is_the_same_model(family: str, seed: int, tmp_path: Path) -> None:
    model = cases.family_model(family, seed, **cases.KNOWN.get(family, {}))
    if family in ("gemma2", "gemma3_text"):  # llama.cpp knows it by the size of heads
        model.config.query_pre_attn_scalar = model.config.head_dim
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    _check(cases.write_family(tmp_path / "m.gguf", family, model), family, model, seed)


@pytest.mark.parametrize(
    ("family", "outer", "prefix"),
    [
        ("gemma3_text", "Gemma3", "language_model.model."), ("gemma4_text", "Gemma4", "model.language_model."),
        ("ministral3", "Mistral3", "language_model.model."), ("cohere2", "AyaVision", "language_model.model."),
    ],
)  # fmt: skip
def test_the_text_part_of_what_reads_images_is_the_model(family: str, outer: str, prefix: str, tmp_path: Path) -> None:
    model = cases.family_model(family, 3)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": outer.lower(), "architectures": [f"{outer}ForConditionalGeneration"]}
    whole |= {"text_config": settings, "vision_config": {}, "tie_word_embeddings": settings["tie_word_embeddings"]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "vision_tower.patch": torch.ones(2)}, tmp_path / "model.safetensors")
    _check(tmp_path, family, model, 0)


OLD: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0, "cache_implementation": "hybrid"},
    "gemma3_text": {
        "num_hidden_layers": 7, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 500000.0,
        "rope_local_base_freq": 5000.0, "sliding_window_pattern": 3,
    },
    "glm4": {"partial_rotary_factor": 0.25, "rope_theta": 5000.0},
    "phi3": {
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64, "max_position_embeddings": 1024,
        "rope_scaling": {"type": "longrope", "long_factor": [3.0] * 12, "short_factor": [1.5] * 12},
    },
    "olmo3": {
        "rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2,
                                               "original_max_position_embeddings": 64},
    },
    "granite": {"attention_multiplier": 0.01, "rope_scaling": None, "rope_theta": 1e7},
}  # fmt: skip


@pytest.mark.parametrize("family", OLD)
def test_older_configurations_mean_what_transformers_makes_of_them(family: str) -> None:
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "head_dim": 32,
             "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 17}  # fmt: skip
    old = {"model_type": family, **sizes, **OLD[family]}
    ours = model_config_from_json(old, "config.json")
    theirs = models.model_config_from_transformers(transformers.AutoConfig.for_model(**json.loads(json.dumps(old))))
    assert ours.layers == theirs.layers and ours.logits_cap == theirs.logits_cap
    for length in (10, 200):
        mine, other = (RopeTable(config, torch.device("cpu")) for config in (ours, theirs))
        assert torch.equal(mine.frequencies(length), other.frequencies(length))
        assert torch.equal(mine.scaling, other.scaling)


COUNT = 5
PROMPTS = [[5 + (3 * i * i + i // 7) % 280 for i in range(length)] for length in (11, 280, 40)]
GREEDY: dict[str, Any] = {"max_new_tokens": COUNT, "ignore_eos": True, "temperature": 0.0}
# Weights that stream, keys and values on the host, trees in a batch; two devices; the text's own n-grams.
SETUPS: dict[str, dict[str, Any]] = {
    "streamed, host KV, trees": {"kv": "host", "resident_layers": 1, "gamma": 3, "tree_nodes": 24},
    "two cards": {"device": "cpu,cpu", "kv": "host", "resident_layers": 0, "draft": "ngram", "gamma": 5},
}


def _answers(target: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    with Runtime.load(target, **{"device": "cpu", "dtype": "fp32", "context": 500, "max_batch": 3, **options}) as made:
        return [result.tokens for result in made.generate_batch(prompts, **GREEDY)]


@run_families
def test_every_way_to_run_gives_the_tokens_of_plain_decoding(family: str, tmp_path: Path) -> None:
    tokenizer, target, noisy = byte_level_tokenizer(), tmp_path / "model", tmp_path / "noisy"
    model = cases.family_model(family, 1, max_position_embeddings=1024)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    write_noisy_copy(target, noisy, noise=0.02)
    expected, config = _answers(target, draft="none", kv="gpu"), open_checkpoint(target).config()
    assert len(set(map(tuple, expected))) == 3
    for name, options in SETUPS.items():
        assert _answers(target, **{"draft": noisy, **options}) == expected, name
    limited = any(window is not None for window in config.layer_windows)
    asked = {"gamma": 4, "speculation": SpeculationOptions("triforce", budget_tokens=64, chunk_size=8, gamma_draft=2)}
    with pytest.raises(OptionError, match=r"full attention|take a draft of") if limited else nullcontext():
        assert _answers(target, draft=noisy, **asked) == expected


@run_families
def test_a_session_goes_on_as_if_it_had_never_ended(family: str, tmp_path: Path) -> None:
    cases.family_model(family, 2, max_position_embeddings=1024).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    asked, path = {"device": "cpu", "dtype": "fp32", "context": 500, "draft": "none"}, tmp_path / "chat.json"
    with Runtime.load(tmp_path, kv="host", resident_layers=0, **asked) as runtime:
        first = runtime.conversation()
        say(first, "the quick brown fox jumps over the lazy dog, " * 14, **GREEDY)
        first.save(path)
        expected = say(first, "and then?", **GREEDY)
    with Runtime.load(tmp_path, kv="host", resident_layers=0, **asked) as runtime:
        reply = say(runtime.load_conversation(path), "and then?", **GREEDY)
    assert reply.tokens == expected.tokens and reply.stats.kept_tokens > 200


@pytest.mark.parametrize("family", [
    pytest.param(one, marks=[] if one in ("gemma4_text", "qwen3_5_text", "gpt_oss") else pytest.mark.slow)
    for one in cases.ARCHITECTURES
])  # fmt: skip
def test_a_quantised_file_streams_as_it_is_stored(family: str, tmp_path: Path) -> None:
    seed = 0
    while cases.family_config(family, seed).hidden_size % 32:
        seed += 1
    model = cases.family_model(family, seed, max_position_embeddings=1024, **cases.KNOWN.get(family, {}))
    path = cases.write_stored(tmp_path, family, model)
    decoded = _answers(path, PROMPTS[::2], draft="none", kv="gpu", weights="decoded")
    stored = _answers(path, PROMPTS[::2], draft="ngram", kv="host", resident_layers=0, weights="stored")
    assert stored == decoded


CUDA = torch.device("cuda")
# The oracle computes on the CPU: sums in another order, and the GPU's exponential is good to 2 units in the last place.
GPU_ERROR = 5e-5


def _assert_logits(actual: torch.Tensor, expected: torch.Tensor, *, most: float = 1e-5) -> None:
    """Raise unless the largest difference, relative to the largest logit, is below `most`."""
    assert actual.shape == expected.shape
    error = float((actual.cpu() - expected).abs().max() / expected.abs().max())
    assert error < most, f"relative error {error:.1e}"


def _window_logits(runner: ModelRunner, tokens: Sequence[int], sequence: int = 0) -> torch.Tensor:
    return verify(runner, {sequence: TokenTree(tuple(tokens))})


def _step_logits(runner: ModelRunner, tokens: Sequence[int], sequence: int = 0) -> torch.Tensor:
    """Logits of tokens decoded one by one, each committed: [T, V]."""
    logits = []
    for token in tokens:
        logits.append(_window_logits(runner, [token], sequence)[0])
        runner.cache.commit(sequence, 1)
    return torch.stack(logits)


@pytest.mark.parametrize("prompt_length", [models.SHORT_LENGTH - 4, models.SHORT_LENGTH, models.SHORT_LENGTH + 11])
@pytest.mark.parametrize("name", models.LENGTH_DEPENDENT_BUILDERS)
def test_length_dependent_rope_matches_transformers_across_the_boundary(name: str, prompt_length: int) -> None:
    model, tokens = models.random_model(name), models.random_tokens(prompt_length + 9)
    expected = models.cached_logits(model, [tokens[:prompt_length], *([token] for token in tokens[prompt_length:])])
    made = make_runner(model)
    _assert_logits(prefill(made.runner, 0, tokens[:prompt_length]), expected[:1])
    _assert_logits(_step_logits(made.runner, tokens[prompt_length:]), expected[1:])
    made.runner.cache.truncate(0, prompt_length)  # the same steps as one window
    _assert_logits(_window_logits(made.runner, tokens[prompt_length:]), expected[1:])
    made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", models.BUILDERS)
def test_matches_transformers_on_the_gpu(name: str) -> None:
    model, tokens = models.random_model(name), models.random_tokens(50)
    expected = models.all_logits(model, tokens)
    made = make_runner(model, buffers=2, device=CUDA)
    _assert_logits(prefill(made.runner, 0, tokens[:37]), expected[36:37], most=GPU_ERROR)
    _assert_logits(_window_logits(made.runner, tokens[37:]), expected[37:], most=GPU_ERROR)
    tree = verify(made.runner, {0: TokenTree((*tokens[37:46], 5), (-1, 0, 1, 2, 3, 4, 5, 6, 7, 7))})
    _assert_logits(tree[:9], expected[37:46], most=GPU_ERROR)
    made.close()
