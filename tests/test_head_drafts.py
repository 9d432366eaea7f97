"""Heads that draft, from the checkpoint to the answer: the tokens are those of plain decoding."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from offload_runtime import Runtime
from offload_runtime.errors import CheckpointError
from tests.helpers.dflash import config_of, random_tensors, settings, write_dflash
from tests.helpers.engine import (
    PROMPT,
    byte_level_tokenizer,
    load,
    one_thread,  # noqa: F401 (an autouse fixture)
    write_checkpoint,
)
from tests.helpers.families import VOCABULARY, family_model
from tests.helpers.heads import Eagle3, Mtp, add_random_mtp, write_mtp

TEXTS = [PROMPT, "café, naïve, a link, a layer", "system user"]
WAYS: dict[str, dict[str, Any]] = {
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
    with load(short_target, draft="none") as runtime:
        of_blocks = settings(runtime.engine.target.config, second=True)
    dflash = write_dflash(directory / "dflash", of_blocks, random_tensors(config_of(of_blocks)))
    return {"target": carrying, "eagle3": head, "dflash": dflash}


def _sizes(target: Path) -> dict[str, int]:
    with load(target, draft="none") as runtime:
        config = runtime.engine.target.config
        return {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": 2}


def answers(runtime: Runtime) -> list[list[int]]:
    """Greedy ones, of all texts at once where there is room for them, and a noisy one."""
    if runtime.plan.target.batch > 1:
        found = runtime.generate_batch(TEXTS, max_new_tokens=24)
    else:
        found = [runtime.generate(text, max_new_tokens=24) for text in TEXTS]
    return [one.tokens for one in (*found, runtime.generate(PROMPT, max_new_tokens=24, temperature=0.8, seed=3))]


@pytest.fixture(scope="module")
def plain(targets: dict[str, Path]) -> list[list[int]]:
    with load(targets["target"], draft="none") as runtime:
        return answers(runtime)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("mtp", way) for way in WAYS), *(("eagle3", way) for way in ("streamed", "two cards", "trees")),
        *(("dflash", way) for way in ("streamed", "host KV", "trees", "together")),
    ],
)  # fmt: skip
def test_answers_are_those_of_plain_decoding(
    kind: str, way: str, targets: dict[str, Path], plain: list[list[int]]
) -> None:
    draft = targets.get(kind, kind)
    with Runtime.load(targets["target"], draft=draft, **{"device": "cpu", **WAYS[way]}) as runtime:
        assert answers(runtime) == plain
        stats = runtime.generate(PROMPT, max_new_tokens=24, gamma=4).stats
        assert [level.proposed_by for level in stats.acceptance] == [kind]


@pytest.mark.slow
def test_a_mixture_of_deepseeks_layout_drafts_with_what_it_carries(tmp_path: Path) -> None:
    """Its experts, too, are in the pool of the target."""
    mtp = Mtp.of("glm4_moe", family_model("glm4_moe", 2), 2)
    target = write_mtp(tmp_path / "m", mtp, "deepseek", "num_nextn_predict_layers")
    byte_level_tokenizer(VOCABULARY).save_pretrained(target)
    with load(target, draft="none") as runtime:
        expected = answers(runtime)
    for options in ({}, {"resident_layers": 1}):
        with load(target, draft="mtp", **options) as runtime:
            assert answers(runtime) == expected


def test_what_the_target_carries_is_taken_by_itself(targets: dict[str, Path], plain: list[list[int]]) -> None:
    with load(targets["target"]) as runtime:
        assert "proposals from the MTP head" in runtime.placement
        assert "drafting with the MTP layer that it carries (--draft ngram goes without)" in runtime.placement
        assert answers(runtime) == plain


def test_a_head_beside_the_target_is_taken_where_it_fits(targets: dict[str, Path], tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target")
    for name, changes in (("fits", {}), ("another's", {"vocab_size": 321})):
        shutil.copytree(targets["eagle3"], tmp_path / name)
        stated = json.loads((tmp_path / name / "config.json").read_text()) | changes
        (tmp_path / name / "config.json").write_text(json.dumps(stated))
    with load(target) as runtime:
        assert "drafting with fits" in runtime.placement and "the EAGLE-3 head" in runtime.placement


def test_a_damaged_mtp_layer_is_done_without_unless_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = add_random_mtp(write_checkpoint(tmp_path / "plain"), tmp_path / "damaged")
    stored = load_file(damaged / "model.safetensors")
    del stored["mtp.norm.weight"]
    save_file(stored, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of 13 tensors \(mtp.norm.weight\)"):
        Runtime.load(damaged, draft="mtp", device="cpu")
    with caplog.at_level(logging.WARNING), load(damaged) as runtime:
        assert runtime.plan.draft is None
    assert "mtp.norm.weight" in caplog.text
