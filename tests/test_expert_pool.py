"""Experts on demand: whatever a pool has room for, and however a run asks for them, tokens are those of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from offload_runtime.core import TokenTree
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.weights import ModelLayout, open_checkpoint
from tests.helpers.assembly import make_runner, prefill, verify
from tests.helpers.engine import byte_level_tokenizer, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.families import family_model, write_family

COUNT, CHOSEN, LAYERS = 8, 3, 3
EXPERT_BYTES = 12288  # with what lies between its matrices
PROMPTS = [[5 + (3 * i * i + i // 7) % 280 for i in range(length)] for length in (11, 150, 40)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers of eight experts, three of which a token goes through."""
    path = tmp_path_factory.mktemp("mixture")
    sizes = {"num_experts": COUNT, "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS}
    family_model("qwen3_moe", 1, max_position_embeddings=1024, **sizes).save_pretrained(path)
    byte_level_tokenizer().save_pretrained(path)
    return path


def answers(runtime: Runtime, max_batch: int = 1) -> list[list[int]]:
    """The tokens of all requests, so many of them at once."""
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.0}
    starts = range(0, len(PROMPTS), max_batch)
    results = [runtime.generate_batch(PROMPTS[start : start + max_batch], **options) for start in starts]
    return [list(one.tokens) for some in results for one in some]


@pytest.fixture(scope="module")
def expected(mixture: Path) -> list[list[int]]:
    with load(mixture, context=300, draft="none") as runtime:
        return answers(runtime)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "batch": {"draft": "none", "max_batch": 3},
    "windows": {"draft": "ngram", "gamma": 6, "max_batch": 2},
    "trees": {"draft": "ngram", "tree_nodes": 24},
    "streamed": {"draft": "ngram", "resident_layers": 1, "kv": "host"},
    "cards": {"draft": "ngram", "device": "cpu,cpu", "max_batch": 2},
}


@pytest.mark.few(7)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("buffers", [CHOSEN, COUNT, 2 * COUNT - 3, 2 * COUNT + 1, LAYERS * COUNT])
def test_tokens_do_not_depend_on_the_pool(way: str, buffers: int, mixture: Path, expected: list[list[int]]) -> None:
    ways = {"device": "cpu", **WAYS[way]}
    with Runtime.load(mixture, context=300, expert_pool=buffers * EXPERT_BYTES, **ways) as runtime:
        for _ in range(2):  # with what the first ones have left there
            assert answers(runtime, ways.get("max_batch", 1)) == expected


def test_an_answer_that_breaks_off_leaves_the_pool_fit(mixture: Path, expected: list[list[int]]) -> None:
    with load(mixture, context=300, draft="none", expert_pool=2 * COUNT * EXPERT_BYTES) as runtime:
        for stop in (1, 2):

            def break_off(done: int, of: int, stop: int = stop) -> None:
                if done == stop:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                runtime.generate(PROMPTS[1], max_new_tokens=4, on_prefill=break_off)
        result = runtime.generate(PROMPTS[1], max_new_tokens=20, ignore_eos=True, temperature=0.0)
        assert list(result.tokens) == expected[1]


def test_a_conversation_goes_on_with_what_is_in_the_pool(mixture: Path) -> None:
    found = []
    for size in (None, 5 * EXPERT_BYTES):
        with load(mixture, context=300, draft="ngram", expert_pool=size) as runtime:
            chat = runtime.conversation()
            for text in ("the quick brown fox", "and the lazy dog"):
                found.append("".join(chat.say(text, max_new_tokens=12, ignore_eos=True)))
    assert found[:2] == found[2:]


def test_a_pool_too_small_for_a_token_is_refused_before_loading(mixture: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    with pytest.raises(BudgetError, match=r"--expert-pool .* has no room for the 3 experts"):
        Runtime.load(mixture, device="cpu", expert_pool=2 * EXPERT_BYTES, on_progress=refuse)


def test_a_model_without_experts_has_no_pool(target: Path) -> None:
    with pytest.raises(OptionError, match="--expert-pool does nothing for a model without experts"):
        Runtime.load(target, device="cpu", expert_pool="1MB")


@pytest.mark.gpu
@pytest.mark.parametrize("buffers", [CHOSEN, COUNT, 2 * COUNT + 1, LAYERS * COUNT])
def test_on_a_gpu_tokens_do_not_depend_on_the_pool(buffers: int, mixture: Path) -> None:
    """Captured as graphs with the host between, and not, where the KV cache is on the host."""
    found = []
    for size in (None, buffers * EXPERT_BYTES // 2):
        for ways in (
            {"draft": "none", "max_batch": 2},
            {"draft": "ngram", "gamma": 6},
            {"draft": "none", "kv": "host"},
        ):
            options: dict[str, Any] = {"device": "cuda:0", "dtype": "bf16", "vram": "8GB", "context": 300, **ways}
            with Runtime.load(mixture, expert_pool=size, **options) as runtime:
                found += [answers(runtime, options.get("max_batch", 1)) for _ in range(3)]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
def test_experts_are_kept_and_multiplied_as_a_file_stores_them(kind: str, tmp_path: Path) -> None:
    sizes = {"num_experts": COUNT, "num_experts_per_tok": CHOSEN, "hidden_size": 128, "moe_intermediate_size": 64}
    sizes |= {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
    model = family_model("qwen3_moe", 1, **sizes)
    source = open_checkpoint(write_family(tmp_path / "m.gguf", "qwen3_moe", model, kind=GGMLQuantizationType[kind]))
    layout = source.layout(torch.float32)
    decoded = ModelLayout.of(source.config(), torch.float32)
    block, plain = (one.experts[1].block.total_bytes for one in (layout, decoded))
    assert block < plain / 2 and kind in layout.bytes_by_kind
    found = []
    for one, buffers in ((decoded, None), (layout, None), (layout, CHOSEN), (layout, COUNT)):
        made = make_runner(source, layout=one, pool_buffers=buffers)
        rows = [prefill(made.runner, 0, PROMPTS[2]), verify(made.runner, {0: TokenTree((7, 8, 9))})]
        found.append(torch.cat(rows))
        made.close()
    assert all(torch.equal(one, found[0]) for one in found)
