"""Families against transformers, on random configurations, from safetensors and from GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.weights import open_checkpoint
from tests.helpers.assembly import make_runner, prefill
from tests.helpers.families import ARCHITECTURES, CONFIGURATIONS, VOCABULARY, family_model, write_family
from tests.helpers.models import all_logits

OFTEN, ALL = 2, 30
PROMPT, ANSWER = 70, 64
GREEDY_MARGIN = 1e-4  # of the largest logit: by less two tokens are as good as equal

families = pytest.mark.parametrize("family", CONFIGURATIONS)
seeds = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < OFTEN else pytest.mark.slow) for seed in range(ALL)]
)


def _check(path: Path, model: Any, seed: int) -> None:
    """Greedy tokens behind a prompt; where one has just been said a random one takes its place, as texts of random
    models repeat themselves soon."""
    generator, made = torch.Generator().manual_seed(seed), make_runner(open_checkpoint(path), buffers=2)
    text, logits, chosen = torch.randint(VOCABULARY, (PROMPT,), generator=generator).tolist(), list[torch.Tensor](), []
    fed = text[:]
    for _ in range(ANSWER):
        logits.append(prefill(made.runner, 0, fed)[0])
        chosen.append(int(logits[-1].argmax()))
        fed = [int(torch.randint(VOCABULARY, (), generator=generator)) if chosen[-1] in text[-8:] else chosen[-1]]
        text += fed
    made.close()
    expected = all_logits(model, text)[PROMPT - 1 : -1]
    scale = expected.abs().max()
    assert float((torch.stack(logits) - expected).abs().max() / scale) < 2e-5
    of_chosen = expected.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    assert float(((expected.max(1).values - of_chosen) / scale).max()) < GREEDY_MARGIN


@families
@seeds
def test_matches_transformers(family: str, seed: int, tmp_path: Path) -> None:
    model = family_model(family, seed)
    model.save_pretrained(tmp_path)
    _check(tmp_path, model, seed)


@pytest.mark.parametrize("family", ARCHITECTURES)
@seeds
def test_a_gguf_file_is_the_same_model(family: str, seed: int, tmp_path: Path) -> None:
    model = family_model(family, seed)
    if family in ("gemma2", "gemma3_text"):  # llama.cpp knows it by the size of heads
        model.config.query_pre_attn_scalar = model.config.head_dim
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    _check(write_family(tmp_path / "m.gguf", family, model), model, seed)
