"""Runtimes whose drafts are heads: the answers of no draft at all, whatever was kept of earlier texts, and proposals
that are as good behind those."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offload_runtime import GenerationParams, Runtime
from offload_runtime.weights import open_checkpoint
from tests.helpers.dflash import config_of, random_tensors, settings, write_dflash
from tests.helpers.engine import byte_level_tokenizer, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.families import family_model
from tests.helpers.heads import Eagle3, Mtp, add_random_mtp, write_mtp
from tests.helpers.native_drafts import counting_head, counting_target
from tests.test_conversation import say
from tests.test_prefix_cache import SLOTS, alone, block_bytes, check, make_tasks
from tests.test_prefix_cache import say as answer
from tests.test_sessions import check_goes_on

TARGET = "two_layer_target"
CONTEXT = 900
WAYS: dict[str, dict[str, Any]] = {"chain": {"gamma": 5, "tree_nodes": 0}, "tree": {"gamma": 12, "tree_nodes": 24}}
GPU = {"device": "cuda", "dtype": "bf16"}
DEVICES = [
    {"device": "cpu", "resident_layers": 1},
    pytest.param({**GPU, "resident_layers": "auto"}, marks=pytest.mark.gpu),
    pytest.param({**GPU, "resident_layers": 1}, marks=pytest.mark.gpu),
]
KINDS = [("mtp", "chain"), ("mtp", "tree"), ("dflash", "tree")]
ASKED: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
PROMPTS = [[3 + token * 37 % 290 for token in range(length)] for length in (150, 7, 60)]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token is a function of the last one, and which carries a head that knows it by the hidden
    states alone."""
    at, tokenizer = tmp_path_factory.mktemp("counting"), byte_level_tokenizer()
    counting_target(size=len(tokenizer), vocabulary=len(tokenizer)).save_pretrained(at / "target")
    tokenizer.save_pretrained(at / "target")
    path = add_random_mtp(at / "target", at / "with a head")
    tensors = load_file(path / "model.safetensors")
    counting_head(vocabulary=len(tokenizer))(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def carrying(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file's target with a random MTP layer."""
    return add_random_mtp(target, tmp_path_factory.mktemp("carrying") / "target")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_right_head_is_believed(counting: Path, device: dict[str, Any], way: str) -> None:
    """In batches, and in slots that other texts have left."""
    options = {"draft": "mtp", "context": CONTEXT, "max_batch": 3, **device, **WAYS[way]}
    with Runtime.load(counting, **options) as runtime:
        for prompts in (PROMPTS, PROMPTS[::-1], [[*prompt[:-5], 9, 9] for prompt in PROMPTS]):
            for result in runtime.generate_batch(prompts, **ASKED):
                passes = result.stats.passes
                assert passes <= 1 + -(-30 // (1 + WAYS[way]["gamma"]))
                assert min(result.stats.accepted_by_depth[:5]) >= passes - 1


def _answers(target: Path, **options: Any) -> list[list[int]]:
    with Runtime.load(target, **{"device": "cpu", "context": CONTEXT, "max_batch": 3, **options}) as runtime:
        asked = {"max_new_tokens": 16, "ignore_eos": True, "seed": 3}
        answers = [runtime.generate_batch(PROMPTS, temperature=heat, **asked) for heat in (0.0, 0.8)]
        return [result.tokens for results in answers for result in results]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(*one, marks=[] if one == ("qwen3_5_text", "tree") else pytest.mark.slow)
        for one in product(("qwen3_5_text", "qwen3_5_moe_text"), WAYS)
    ],
)
def test_hybrids_and_mixtures_draft_with_what_they_carry(family: str, way: str, tmp_path: Path) -> None:
    write_mtp(
        tmp_path,
        Mtp.of(family, family_model(family, 1, max_position_embeddings=1024), 1),
        "qwen",
        "mtp_num_hidden_layers",
    )
    byte_level_tokenizer().save_pretrained(tmp_path)
    expected = _answers(tmp_path, draft="none")
    assert _answers(tmp_path, draft="mtp", resident_layers=1, **WAYS[way]) == expected


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"kv": "host", "resident_layers": 0}, "tree"),
        ({"device": "cpu,cpu", "resident_layers": 1}, "chain"),
        pytest.param({"device": "cpu,cpu", "resident_layers": 1}, "tree", marks=pytest.mark.slow),
    ],
)
def test_an_eagle3_head_of_some_tokens_drafts(target: Path, tmp_path: Path, options: dict[str, Any], way: str) -> None:
    head = Eagle3.of(AutoModelForCausalLM.from_pretrained(target), draft_vocab=70).write(tmp_path / "head")
    assert _answers(target, draft=head, **options, **WAYS[way]) == _answers(target, draft="none")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "way"), [*KINDS, ("dflash", "chain")])
@pytest.mark.parametrize("resident", ["auto", 1])
def test_answers_with_a_head_on_a_gpu_are_those_without(
    carrying: Path, dflash: Path, resident: int | str, kind: str, way: str
) -> None:
    """Where all is captured, and where the head drafts while the target's layers cross the link."""
    expected, draft = _answers(carrying, draft="none", **GPU), dflash if kind == "dflash" else kind
    assert _answers(carrying, draft=draft, resident_layers=resident, **GPU, **WAYS[way]) == expected


@pytest.fixture(scope="module")
def dflash(carrying: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DFlash drafter of it."""
    stated = settings(open_checkpoint(carrying).config(), second=True)
    return write_dflash(tmp_path_factory.mktemp("blocks") / "dflash", stated, random_tensors(config_of(stated)))


@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_sessions_and_prefixes_go_on_with_a_head(
    carrying: Path, dflash: Path, tmp_path: Path, kind: str, way: str
) -> None:
    draft = dflash if kind == "dflash" else kind
    check_goes_on(carrying, tmp_path / "chat.json", draft=draft, device="cpu", kv="gpu", resident_layers=1, **WAYS[way])
    options = {"draft": draft, "context": CONTEXT, "kv": "gpu", "max_batch": SLOTS, "resident_layers": 1}
    with load(carrying, **options, **WAYS[way]) as runtime:
        tasks = make_tasks(7, seed=2)
        check(runtime, tasks, [alone(runtime, *task[:2]) for task in tasks], seed=2, stored_blocks=3)


@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_a_head_keeps_what_it_has_read_of_a_conversation(
    carrying: Path, dflash: Path, tmp_path: Path, kind: str, way: str
) -> None:
    with load(carrying, draft=dflash if kind == "dflash" else kind, context=CONTEXT, **WAYS[way]) as runtime:
        assert runtime.engine.draft is not None
        held = runtime.engine.draft.runner.cache
        conversation = runtime.conversation("be brief")
        texts = ["the quick brown fox " * 8, "and then?", "and now?"]
        for text in texts[:2]:
            say(conversation, text)
        conversation.save(tmp_path / "chat.json")
        conversation.undo()
        for number in range(3):
            if number < 2:
                say(conversation, texts[1 + number])
            else:
                for _ in conversation.regenerate(GenerationParams(12, ignore_eos=True)):
                    pass
            assert held.length(0) > 0.8 * conversation.num_tokens > 100
        conversation = runtime.load_conversation(tmp_path / "chat.json")
        say(conversation, texts[2])
        assert held.length(0) > 0.8 * conversation.num_tokens > 100


@pytest.mark.parametrize(("kind", "way"), KINDS[1:])
def test_a_head_knows_prompts_that_were_scored(carrying: Path, dflash: Path, kind: str, way: str) -> None:
    with load(carrying, draft=dflash if kind == "dflash" else kind, context=CONTEXT, **WAYS[way]) as runtime:
        assert runtime.engine.draft is not None
        for prompt in PROMPTS[:2]:
            plain, scored = (
                runtime.generate(prompt, max_new_tokens=4, **asked) for asked in ({}, {"prompt_logprobs": 0})
            )
            assert scored.tokens == plain.tokens
            assert runtime.engine.draft.runner.cache.length(0) >= len(prompt)


@pytest.mark.parametrize(("kind", "way"), KINDS[1:])
def test_stores_have_what_a_head_knows_of_prefixes(carrying: Path, dflash: Path, kind: str, way: str) -> None:
    options: dict[str, Any] = {"draft": dflash if kind == "dflash" else kind, "context": CONTEXT, **WAYS[way]}
    with load(carrying, **options) as runtime:
        assert runtime.engine.draft is not None
        texts = [[3 + (token * step) % 290 for token in range(600)] for step in (37, 41)]
        with runtime.serving(prefix_cache_bytes=20 * block_bytes(runtime)) as engine:
            for text in (*texts, texts[0]):
                kept = answer(runtime, engine, text).num_kept
        assert kept == 512 and runtime.engine.draft.runner.cache.length(0) > 590
