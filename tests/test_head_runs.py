"""Runtimes whose drafts are heads: the answers of no draft at all, whatever was kept of earlier texts, and proposals
that are as good behind those; and heads from the checkpoint to the answer."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from offload_runtime import Runtime
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers import engine as engines
from tests.helpers.dflash import config_of, random_tensors, settings, write_dflash
from tests.helpers.families import VOCABULARY, family_model
from tests.helpers.heads import Eagle3, Mtp, add_random_mtp, write_mtp
from tests.helpers.native_drafts import counting_head, counting_target
from tests.test_prefix_cache import SLOTS, alone, block_bytes, check, make_tasks
from tests.test_prefix_cache import say as answer
from tests.test_sessions import check_goes_on

TARGET = "two_layer_target"
CONTEXT = 900
SHAPES: dict[str, dict[str, Any]] = {"chain": {"gamma": 5, "tree_nodes": 0}, "tree": {"gamma": 12, "tree_nodes": 24}}
GPU = {"device": "cuda", "dtype": "bf16"}
DEVICES = [
    {"device": "cpu", "resident_layers": 1},
    pytest.param({**GPU, "resident_layers": "auto"}, marks=pytest.mark.gpu),
    pytest.param({**GPU, "resident_layers": 1}, marks=pytest.mark.gpu),
]
KINDS = [("mtp", "chain"), ("mtp", "tree"), ("dflash", "tree")]
ASKED: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [[3 + token * 37 % 290 for token in range(length)] for length in (150, 7, 60)]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token is a function of the last one, and which carries a head that knows it by the hidden
    states alone."""
    at, tokenizer = tmp_path_factory.mktemp("counting"), engines.byte_level_tokenizer()
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_right_head_is_believed(counting: Path, device: dict[str, Any], shape: str) -> None:
    """In batches, and in slots that other texts have left."""
    options = {"draft": "mtp", "context": CONTEXT, "max_batch": 3, **device, **SHAPES[shape]}
    with Runtime.load(counting, **options) as runtime:
        for prompts in (PROMPTS, PROMPTS[::-1], [[*prompt[:-5], 9, 9] for prompt in PROMPTS]):
            for result in runtime.generate_batch(prompts, **ASKED):
                # One more than whole windows take, where a wrong head takes 15.
                assert result.stats.passes <= 1 + -(-15 // (1 + SHAPES[shape]["gamma"]))


def _answers(target: Path, **options: Any) -> list[list[int]]:
    with Runtime.load(target, **{"device": "cpu", "context": CONTEXT, "max_batch": 3, **options}) as runtime:
        asked = {"max_new_tokens": 8, "ignore_eos": True, "seed": 3}
        answers = [runtime.generate_batch(PROMPTS, temperature=heat, **asked) for heat in (0.0, 0.8)]
        return [result.tokens for results in answers for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "shape"), [*KINDS, ("dflash", "chain")])
@pytest.mark.parametrize("resident", ["auto", 1])
def test_gpu_answers_are_those_without(
    carrying: Path, dflash: Path, resident: int | str, kind: str, shape: str
) -> None:
    """Where all is captured, and where the head drafts while the target's layers cross the link."""
    expected, draft = _answers(carrying, draft="none", **GPU), dflash if kind == "dflash" else kind
    assert _answers(carrying, draft=draft, resident_layers=resident, **GPU, **SHAPES[shape]) == expected


@pytest.fixture(scope="module")
def dflash(carrying: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DFlash drafter of it."""
    stated = settings(open_checkpoint(carrying).config(), second=True)
    return write_dflash(tmp_path_factory.mktemp("blocks") / "dflash", stated, random_tensors(config_of(stated)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), KINDS[1:])
def test_sessions_and_prefixes_with_a_head(carrying: Path, dflash: Path, tmp_path: Path, kind: str, shape: str) -> None:
    draft = dflash if kind == "dflash" else kind
    check_goes_on(
        carrying, tmp_path / "chat.json", draft=draft, device="cpu", kv="gpu", resident_layers=1, **SHAPES[shape]
    )
    options = {"draft": draft, "context": CONTEXT, "kv": "gpu", "max_batch": SLOTS, "resident_layers": 1}
    with engines.load(carrying, **options, **SHAPES[shape]) as runtime:
        tasks = make_tasks(4, seed=2)
        check(runtime, tasks, [alone(runtime, *task[:2]) for task in tasks], seed=2, stored_blocks=3)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "shape"), KINDS[1:])
def test_a_head_knows_prompts_that_were_scored(carrying: Path, dflash: Path, kind: str, shape: str) -> None:
    with engines.load(
        carrying, draft=dflash if kind == "dflash" else kind, context=CONTEXT, **SHAPES[shape]
    ) as runtime:
        assert runtime.engine.draft is not None
        for prompt in PROMPTS[:2]:
            plain, scored = (runtime.generate(prompt, max_new_tokens=4, **how) for how in ({}, {"prompt_logprobs": 0}))
            assert scored.tokens == plain.tokens
            assert runtime.engine.draft.runner.cache.length(0) >= len(prompt)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "shape"), KINDS[1:])
def test_stores_have_what_a_head_knows_of_prefixes(carrying: Path, dflash: Path, kind: str, shape: str) -> None:
    options: dict[str, Any] = {"draft": dflash if kind == "dflash" else kind, "context": CONTEXT, **SHAPES[shape]}
    with engines.load(carrying, **options) as runtime:
        assert runtime.engine.draft is not None
        texts = [[3 + (token * step) % 290 for token in range(600)] for step in (37, 41)]
        with runtime.serving(prefix_cache_bytes=20 * block_bytes(runtime)) as engine:
            for text in (*texts, texts[0]):
                kept = answer(runtime, engine, text).num_kept
        assert kept == 512 and runtime.engine.draft.runner.cache.length(0) > 590


MIXTURES = [("qwen3_5_moe_text", "qwen"), ("glm4_moe", "deepseek")]
TEXTS = [engines.PROMPT, "café, naïve, a link, a layer", "system user"]
PLACES: dict[str, dict[str, Any]] = {
    "resident": {}, "streamed": {"resident_layers": 2}, "two cards": {"device": "cpu,cpu", "resident_layers": 2},
    "host KV": {"kv": "host", "resident_layers": 1}, "chains": {"gamma": 4}, "trees": {"tree_nodes": 24, "gamma": 6},
    "together": {"max_batch": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory, short_target: Path) -> dict[str, Path]:
    """By who drafts the target, which carries an MTP layer, and what `--draft` says."""
    directory = tmp_path_factory.mktemp("heads")
    carrying = add_random_mtp(short_target, directory / "carrying")
    model = family_model("llama", 0, **_sizes(short_target))
    head = Eagle3.of(model, draft_vocab=200, taps=(1, 2, 5)).write(directory / "eagle3")
    with engines.load(short_target, draft="none") as runtime:
        of_blocks = settings(runtime.engine.target.config, second=True)
    dflash = write_dflash(directory / "dflash", of_blocks, random_tensors(config_of(of_blocks)))
    return {"target": carrying, "eagle3": head, "dflash": dflash}


def _sizes(target: Path) -> dict[str, int]:
    with engines.load(target, draft="none") as runtime:
        config = runtime.engine.target.config
        return {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": 2}


def answers(runtime: Runtime) -> list[list[int]]:
    """Greedy ones, of all texts at once where there is room for them, and a noisy one."""
    if runtime.plan.target.batch > 1:
        found = runtime.generate_batch(TEXTS, max_new_tokens=12)
    else:
        found = [runtime.generate(text, max_new_tokens=12) for text in TEXTS]
    return [
        one.tokens for one in (*found, runtime.generate(engines.PROMPT, max_new_tokens=12, temperature=0.8, seed=3))
    ]


@pytest.fixture(scope="module")
def plain(targets: dict[str, Path]) -> list[list[int]]:
    with engines.load(targets["target"], draft="none") as runtime:
        return answers(runtime)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *(("mtp", place) for place in PLACES),
        *(("eagle3", place) for place in ("streamed", "two cards", "host KV", "trees")),
        *(("dflash", place) for place in ("streamed", "host KV", "trees", "together")),
    ],
)  # fmt: skip
def test_answers_are_plain_decodings(kind: str, place: str, targets: dict[str, Path], plain: list[list[int]]) -> None:
    draft = targets.get(kind, kind)
    with Runtime.load(targets["target"], draft=draft, **{"device": "cpu", **PLACES[place]}) as runtime:
        assert answers(runtime) == plain
        stats = runtime.generate(engines.PROMPT, max_new_tokens=12, gamma=4).stats
        assert [level.proposed_by for level in stats.acceptance] == [kind]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("qwen3_5_text", "qwen"), *MIXTURES])
def test_hybrids_and_mixtures_draft_with_what_they_carry(family: str, layout: str, tmp_path: Path) -> None:
    """A head's experts, too, are in a pool."""
    mtp = Mtp.of(family, family_model(family, 1, max_position_embeddings=1024), 1)
    key = "num_nextn_predict_layers" if layout == "deepseek" else "mtp_num_hidden_layers"
    target = write_mtp(tmp_path / "m", mtp, layout, key)
    engines.byte_level_tokenizer(VOCABULARY).save_pretrained(target)
    with engines.load(target, draft="none", max_batch=3) as runtime:
        expected = answers(runtime)
    with engines.load(target, draft="mtp", resident_layers=1, max_batch=3, gamma=6, tree_nodes=12) as runtime:
        assert answers(runtime) == expected


def test_what_the_target_carries_is_taken_by_itself(targets: dict[str, Path], plain: list[list[int]]) -> None:
    with engines.load(targets["target"]) as runtime:
        assert "proposals from the MTP head" in runtime.placement
        assert "drafting with the MTP layer that it carries (--draft ngram goes without)" in runtime.placement
        assert answers(runtime) == plain


def test_a_head_beside_the_target_is_taken_where_it_fits(targets: dict[str, Path], tmp_path: Path) -> None:
    target = engines.write_checkpoint(tmp_path / "target")
    for name, changes in (("fits", {}), ("another's", {"vocab_size": 321})):
        shutil.copytree(targets["eagle3"], tmp_path / name)
        stated = json.loads((tmp_path / name / "config.json").read_text()) | changes
        (tmp_path / name / "config.json").write_text(json.dumps(stated))
    with engines.load(target) as runtime:
        assert "drafting with fits" in runtime.placement and "the EAGLE-3 head" in runtime.placement


def test_a_damaged_mtp_layer_is_done_without_unless_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = add_random_mtp(engines.write_checkpoint(tmp_path / "plain"), tmp_path / "damaged")
    stored = load_file(damaged / "model.safetensors")
    del stored["mtp.norm.weight"]
    save_file(stored, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of 13 tensors \(mtp.norm.weight\)"):
        Runtime.load(damaged, draft="mtp", device="cpu")
    with caplog.at_level(logging.WARNING), engines.load(damaged) as runtime:
        assert runtime.plan.draft is None
    assert "mtp.norm.weight" in caplog.text
