"""A draft that retrieves, in the whole engine: no guess changes a token, and where `auto` takes it."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload_runtime.cli.options import GenerateOptions
from offload_runtime.config import DRAFT_CACHES, ModelConfig, RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.plan import RunPlan, common_figures, find_plan
from offload_runtime.plan.cost import tok_per_s
from offload_runtime.plan.request import MemoryLimits
from offload_runtime.weights import DescribedModel
from tests.helpers.engine import byte_level_tokenizer, load, one_thread  # noqa: F401 (an autouse fixture)

CPU = torch.device("cpu")
CONTEXT, COUNT = 900, 16
TARGET = "long_target"
LONG = [3 + (7 * i * i + i // 5) % 290 for i in range(760)]
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
MODES = {
    "chain": SpeculationOptions("chain", "retrieval", budget_tokens=96),
    "triforce": SpeculationOptions("triforce", "retrieval", budget_tokens=96, gamma_draft=3),
}


def everything(runtime: Runtime) -> list[list[int]]:
    """Tokens of single prompts, long, short and long again, of a batch, and of a conversation."""
    said, asked = [], {"max_new_tokens": COUNT, "ignore_eos": True}
    for sampling in SAMPLINGS:
        for prompt in (LONG, LONG[100:120], LONG[:620]):
            said.append(runtime.generate(prompt, **asked, **sampling).tokens)
        said += [result.tokens for result in runtime.generate_batch([LONG[50:], LONG[90:700]], **asked, **sampling)]
        conversation = runtime.conversation()
        for text in ("the quick brown fox " * 70, "a link, a layer", "jumps over the lazy dog " * 9):
            request = conversation.say(text, max_new_tokens=12, **sampling)
            for _ in request:
                pass
            said.append(request.result.tokens)
            conversation_length = conversation.num_tokens
        assert conversation_length > 2 * 256, "nothing was far"
    return said


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    with load(target, draft="none", context=CONTEXT, max_batch=2) as runtime:
        return everything(runtime)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_tokens_are_those_of_plain_decoding(
    target: Path, draft: Path, expected: list[list[int]], mode: str
) -> None:
    kv = "host" if mode == "triforce" else "auto"
    with load(target, draft=draft, context=CONTEXT, max_batch=2, kv=kv, speculation=MODES[mode]) as runtime:
        assert "the draft retrieves 96 tokens a head of its own KV cache" in runtime.placement
        assert everything(runtime) == expected


NODES = range(100, 196)


def write_lookup(directory: Path) -> Path:
    """A model that says what it finds in its context: behind node n the node n + 1, if that is anywhere to be seen.

    One layer and one head. A node's key is its own unit vector and its query that of the next one, in channels that
    hardly rotate; the value is the token itself.
    """
    tokenizer, dim = byte_level_tokenizer(), 128
    channels = [*range(16, 64), *range(80, 128)]
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=4 * dim, intermediate_size=8, num_hidden_layers=1, head_dim=dim,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    parts = [slice(part * dim, (part + 1) * dim) for part in range(4)]  # own vector, the next one's, norm, output
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        embedding, layer = model.model.embed_tokens.weight, model.model.layers[0].self_attn
        embedding[:, parts[2].start] = 1.0  # others than nodes need a norm as well
        for index, node in enumerate(NODES):
            embedding[node, parts[0].start + channels[index]] = 1.0
            embedding[node, parts[1].start + channels[(index + 1) % len(NODES)]] = 1.0
            model.lm_head.weight[node, parts[3].start + channels[index]] = 1.0
        eye = torch.eye(dim)
        layer.q_proj.weight[:, parts[1]] = 3 * eye
        layer.k_proj.weight[:, parts[0]] = 3 * eye
        layer.v_proj.weight[:, parts[0]] = eye
        layer.o_proj.weight[parts[3]] = eye
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_only_a_draft_that_retrieves_finds_what_is_far_back(tmp_path: Path) -> None:
    lookup = write_lookup(tmp_path / "lookup")
    prompt = [5] * 160 + list(NODES) + [6] * 560 + [NODES[0]]
    asked = {"max_new_tokens": 60, "ignore_eos": True, "gamma": 7}
    passes = {}
    for cache in ("full", "retrieval", "streaming"):
        options = SpeculationOptions("chain", cache, budget_tokens=16, chunk_size=8, recent_tokens=64, sink_tokens=8)
        with load(lookup, draft=lookup, context=CONTEXT, speculation=options) as runtime:
            result = runtime.generate(prompt, **asked)
        assert result.tokens == list(NODES[1:61])
        passes[cache] = result.stats.passes
    # Seven guesses and a token of the target's own, all of one chunk; the other one of the budget is the text's first.
    assert passes == {"full": 8, "retrieval": 8, "streaming": 59}


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, longest: int) -> ModelConfig:
    """A plain Llama."""
    return ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, vocab_size=49152, max_position_embeddings=longest,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


LARGE, SMALL = llama(4096, 11008, 32, 32, 32, 128, 131072), llama(576, 1536, 30, 9, 3, 64, 65536)


FIGURES = common_figures()


def chosen(
    limit_bytes: int | None, context: int, draft_cache: str = "auto", *, resident: int | None = None, kv: str = "auto",
    budget_tokens: int = 4096,
) -> RunPlan:  # fmt: skip
    """A 7B and a 135M whose positions reach 65536, as they are placed on a card of 25 GB/s."""
    request = RuntimeConfig(
        DescribedModel(LARGE, torch.bfloat16), DescribedModel(SMALL, torch.bfloat16), context=context, kv=kv,
        resident_layers=resident, tree_nodes=0,
        speculation=SpeculationOptions("chain", draft_cache, budget_tokens=budget_tokens),
    )  # fmt: skip
    return find_plan(request, FIGURES, MemoryLimits(limit_bytes, 0, 10**13, "", "", None, ""))


def kind(plan: RunPlan) -> str:
    assert plan.draft is not None
    return plan.draft.cache


def test_auto_retrieves_where_positions_and_memory_allow_it() -> None:
    assert [kind(chosen(None, context)) for context in (8192, 8193, 65536, 65537)] == [
        "full", "retrieval", "retrieval", "streaming",
    ]  # fmt: skip
    draft = chosen(None, 65536).draft
    assert draft is not None and draft.kv_bytes > 65536 * SMALL.kv_bytes_per_token(2)
    assert kind(chosen(None, 65536)) == kind(chosen(100 * 10**9, 65536)) == "retrieval"
    assert kind(chosen(None, 65537)) == "streaming"


def test_auto_takes_the_cache_that_brings_more() -> None:
    """What the cache of a draft takes of the device, layers and the KV cache of the target lose."""
    kinds = []
    for limit_bytes in range(8 * 10**9, 56 * 10**9, 2 * 10**9):
        speeds = {cache: tok_per_s(chosen(limit_bytes, 65536, cache), FIGURES) for cache in ("retrieval", "streaming")}
        auto = chosen(limit_bytes, 65536)
        assert tok_per_s(auto, FIGURES) == max(speeds.values())
        assert speeds[kind(auto)] == max(speeds.values())
        kinds.append(kind(auto))
    assert set(kinds) == {"retrieval", "streaming"}
    assert kind(chosen(8 * 10**9, 65536, "retrieval")) == "retrieval"  # what is asked for is not overruled


def test_a_short_context_may_get_a_streaming_cache_too() -> None:
    """Where a full one does not fit, unless a streaming one would hold as much."""

    def least(context: int) -> int:
        return bisect_left(range(10**11), True, key=lambda limit: fits(limit, "full", context=context))

    assert kind(chosen(least(8192), 8192, resident=32, kv="gpu")) == "full"
    assert kind(chosen(least(8192) - 1, 8192, resident=32, kv="gpu")) == "streaming"
    assert not fits(least(512) - 1, "auto", context=512)


def fits(limit_bytes: int, draft_cache: str, *, context: int, resident: int = 32) -> bool:
    try:
        chosen(limit_bytes, context, draft_cache, resident=resident, kv="gpu")
    except BudgetError:
        return False
    return True


def test_auto_gives_way_where_a_streaming_cache_fits() -> None:
    def least(draft_cache: str) -> int:
        return bisect_left(range(100 * 10**9), True, key=lambda limit: fits(limit, draft_cache, context=32768))

    retrieval, streaming, draft = least("retrieval"), least("streaming"), chosen(None, 32768).draft
    assert draft is not None and retrieval > streaming + draft.kv_bytes / 2
    assert kind(chosen(retrieval, 32768, resident=32, kv="gpu")) == "retrieval"
    assert kind(chosen(retrieval - 1, 32768, resident=32, kv="gpu")) == "streaming"
    assert least("auto") == streaming


def test_a_draft_whose_positions_do_not_reach_is_refused() -> None:
    assert kind(chosen(None, 65536, "retrieval")) == "retrieval"
    with pytest.raises(OptionError, match=r"all 65537 tokens .* made for 65536: use --draft-cache streaming"):
        chosen(None, 65537, "retrieval")


def test_a_budget_larger_than_the_context_is_refused_and_not_reserved() -> None:
    def planned(context: int, draft_cache: str, budget_tokens: int) -> RunPlan:
        return chosen(None, context, draft_cache, budget_tokens=budget_tokens)

    assert kind(planned(4096, "retrieval", 4096)) == kind(planned(9000, "auto", 9000)) == "retrieval"
    with pytest.raises(OptionError, match=r"4100 of at most 4096 tokens .* lower --budget-tokens"):
        planned(4096, "retrieval", 4100)
    assert kind(planned(9000, "auto", 9004)) == "streaming"  # nobody asked for a cache of chunks


def test_the_runtime_says_what_auto_took(target: Path, one_layer_draft: Path) -> None:
    for vram, said in ((None, "the draft retrieves 4096 tokens a head"), ("259MB", "streaming draft cache of the 16")):
        chain = SpeculationOptions("chain")
        with load(one_layer_draft, draft=target, context=9000, vram=vram, tree_nodes=0, speculation=chain) as runtime:
            assert said in runtime.placement


def test_the_command_line_knows_every_cache() -> None:
    assert get_args(get_type_hints(GenerateOptions)["draft_cache"]) == DRAFT_CACHES
