"""Experts on demand: whatever a pool has room for, and however a run asks for them, tokens are those of all of them."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from offload_runtime_kernels.expert_buffers import BufferTables

from offload_runtime.config import RuntimeConfig
from offload_runtime.core import Batch, TokenTree
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.params import GenerationParams
from offload_runtime.plan.cost import prefill_time
from offload_runtime.plan.report import forecast
from offload_runtime.plan.search import plan_run
from offload_runtime.runners.model_runner import HiddenTaps
from offload_runtime.sizes import parse_bytes
from offload_runtime.stream import expert_pool
from offload_runtime.weights.checkpoint import DescribedModel
from offload_runtime.weights.expert_hits import note_hits
from offload_runtime.weights.layout import ModelLayout, checkpoint_tensors
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.assembly import make_runner, prefill, verify
from tests.helpers.engine import byte_level_tokenizer, load, raising, refuse_weights
from tests.helpers.families import family_config, family_model, write_family, write_stored
from tests.helpers.heads import add_random_mtp
from tests.helpers.planning import made_up_machine

COUNT, CHOSEN, LAYERS = 8, 3, 3
EXPERT_BYTES = 12288  # with what lies between its matrices
SPARSE: dict[str, Any] = {
    "num_experts": COUNT, "num_experts_per_tok": CHOSEN, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
PROMPTS = [[5 + (3 * i * i + i // 7) % 280 for i in range(length)] for length in (11, 60, 30)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers of eight experts, three of which a token goes through."""
    path = tmp_path_factory.mktemp("mixture")
    sizes = {"num_hidden_layers": LAYERS, "max_position_embeddings": 1024}
    family_model("qwen3_moe", 1, **SPARSE, **sizes).save_pretrained(path)
    byte_level_tokenizer().save_pretrained(path)
    return path


def answers(runtime: Runtime, max_batch: int = 1) -> list[list[int]]:
    """The tokens of all requests, so many of them at once."""
    options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0.0}
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


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("buffers", [CHOSEN, COUNT, 2 * COUNT - 3, LAYERS * COUNT])
def test_tokens_do_not_depend_on_the_pool(way: str, buffers: int, mixture: Path, expected: list[list[int]]) -> None:
    ways = {"device": "cpu", **WAYS[way]}
    with Runtime.load(mixture, context=300, expert_pool=buffers * EXPERT_BYTES, **ways) as runtime:
        for _ in range(2):  # with what the first ones have left there
            assert answers(runtime, ways.get("max_batch", 1)) == expected


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@needs_compiler
@pytest.mark.few(2)
@pytest.mark.parametrize("way", ["batch", "windows", "cards"])
@pytest.mark.parametrize("buffers", [CHOSEN + 1, 2 * COUNT + 1])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_cpus_change_no_token(way: str, buffers: int, share: float, mixture: Path, expected: list[list[int]]) -> None:
    ways = {"device": "cpu", "cpu_share": share, **WAYS[way]}
    with Runtime.load(mixture, context=300, expert_pool=buffers * EXPERT_BYTES, **ways) as runtime:
        assert answers(runtime, ways.get("max_batch", 1)) == expected
        result = runtime.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True)
    stats = result.stats
    assert share < 1 or stats.expert_hit_rate is None or (stats.expert_cpu_share == 1 and stats.expert_cpu_gbps)


@pytest.fixture(scope="module")
def carrying(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a random MTP layer of as many experts."""
    return add_random_mtp(mixture, tmp_path_factory.mktemp("carrying") / "mixture")


def drafted(target: Path, **options: Any) -> list[tuple[Any, ...]]:
    """The tokens of all requests, at once, and how many proposals of what depth were right: half of them, since what is
    said so hot is decided by the noise, which head and target share, as much as by what either makes of the text."""
    asked: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 2.0, "seed": 3}
    with Runtime.load(target, context=300, max_batch=3, **options) as runtime:
        results = runtime.generate_batch(PROMPTS, **asked)
        is_whole = runtime.plan.placement.pool_buffers is None
    # Passes that bring whole layers count no hits.
    assert not is_whole or all(one.stats.expert_hit_rate is None for one in results)
    return [(list(one.tokens), one.stats.accepted_by_depth) for one in results]


HEADS: dict[str, dict[str, Any]] = {
    "chain": {"gamma": 4, "tree_nodes": 0}, "tree": {"gamma": 6, "tree_nodes": 24},
}  # fmt: skip
HEADS |= {"streamed": {"resident_layers": 1, **HEADS["tree"]}, "cards": {"device": "cpu,cpu", **HEADS["chain"]}}


@pytest.fixture(scope="module")
def of_all_experts(carrying: Path) -> dict[str, list[tuple[Any, ...]]]:
    """By way what is said where all experts are on the device, whose tokens are those of plain decoding."""
    said = {way: drafted(carrying, draft="mtp", device="cpu", **HEADS[way]) for way in ("chain", "tree")}
    plain = [tokens for tokens, _ in drafted(carrying, draft="none", device="cpu")]
    for found in said.values():
        assert [tokens for tokens, _ in found] == plain and min(sum(right) for _, right in found) > 5
    return said | {"streamed": said["tree"], "cards": said["chain"]}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("buffers", "way", "share"),
    [
        (CHOSEN + 1, "chain", 1.0), (COUNT, "tree", 0), ((LAYERS + 1) * COUNT, "streamed", 0),
        (CHOSEN, "streamed", 0), (2 * COUNT + 1, "cards", 0.4),
    ],
)  # fmt: skip
def test_a_head_says_the_same_whatever_of_its_experts_is_in_the_pool(
    buffers: int, way: str, share: float, carrying: Path, of_all_experts: dict[str, list[tuple[Any, ...]]]
) -> None:
    """How trees grow beside a pass that streams goes by the clock."""
    options: dict[str, Any] = {"device": "cpu", "cpu_share": share, **HEADS[way]}
    found = drafted(carrying, draft="mtp", expert_pool=buffers * EXPERT_BYTES, **options)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in of_all_experts[way]]
    assert found == of_all_experts[way] or way == "streamed"


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_same_bits_whatever_the_pool_and_the_share_of_the_cpu(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """By measured rates, too, with what the link brings meanwhile for later passes."""
    family_model("gpt_oss", 1, num_experts_per_tok=CHOSEN, num_local_experts=COUNT).save_pretrained(tmp_path)
    source, found = open_checkpoint(tmp_path), list[torch.Tensor]()
    shares = product((CHOSEN, COUNT - 1), (0, 1.0, None))
    for buffers, share in [(None, 0), *shares]:
        made = make_runner(source, pool_buffers=buffers, cpu_share=share, dtype=dtype)
        rows = [prefill(made.runner, 0, PROMPTS[0])]
        for first in range(14):
            rows.append(verify(made.runner, {0: TokenTree(tuple(range(first, first + 1 + first % 5)))}))
            made.runner.cache.commit_path(0, [0])
        found.append(torch.cat(rows))
        made.close()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("qwen3_moe", torch.float32, {"pool_buffers": CHOSEN}),
        ("gpt_oss", torch.bfloat16, {"pool_buffers": COUNT, "buffers": 2}),  # windows that slide, layers that stream
        ("qwen3_next", torch.bfloat16, {}),  # states, and pieces that end where these are kept
    ],
)  # fmt: skip
def test_pieces_of_prompts_go_through_experts_together(
    family: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit as one by one, with what a head reads; on a CPU, too, in these dtypes."""
    family_model(family, 1, **SPARSE, num_local_experts=COUNT).save_pretrained(tmp_path)
    source, found, brought = open_checkpoint(tmp_path), list[torch.Tensor](), list[int]()

    def tap(number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x if number == 0 else out + x)

    taps = HiddenTaps((1, 2), source.config().hidden_size, tap)
    for tokens in (0, 32, 1024):
        made = make_runner(source, chunk_tokens=16, dtype=dtype, **options)
        made.runner.expert_tokens, made.runner.taps = tokens, taps
        batches = [Batch(prompts={0: PROMPTS[1]})]
        batches.append(Batch({0: TokenTree((7, 8, 9), (-1, 0, 0))}, prompts={1: PROMPTS[2][:21], 2: PROMPTS[0]}))
        batches += [Batch(prompts={1: PROMPTS[2][21:]}), Batch({slot: TokenTree((5, 6)) for slot in range(3)})]
        with torch.inference_mode():
            for batch in batches:
                made.runner.forward(batch)
        brought.append(made.runner.streamer.bytes_begun)
        kept = [hidden for batch in batches for parts in batch.hidden.values() for hidden in parts]
        found.append(torch.cat([*(batch.logits.flatten() for batch in batches), *(one.flatten() for one in kept)]))
        made.close()
    assert all(torch.equal(one, found[0]) for one in found)
    assert brought[0] > brought[1] > brought[2] or options.get("pool_buffers") != CHOSEN


def test_an_answer_that_breaks_off_leaves_the_pool_fit(mixture: Path, expected: list[list[int]]) -> None:
    with load(mixture, context=300, draft="none", expert_pool=2 * COUNT * EXPERT_BYTES) as runtime:
        for layers in (0, 1):
            with pytest.raises(KeyboardInterrupt):
                runtime.generate(PROMPTS[1], max_new_tokens=4, on_prefill=raising(KeyboardInterrupt(), after=layers))
        result = runtime.generate(PROMPTS[1], max_new_tokens=6, ignore_eos=True, temperature=0.0)
        assert list(result.tokens) == expected[1]


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(("step", "share"), [("fetch_experts", 0), ("fetch_experts", 1.0), ("release_experts", 1.0)])
def test_an_answer_that_breaks_off_while_experts_come_leaves_the_pool_fit(
    step: str, share: float, mixture: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the tables have the expert already: it is to be fetched, now or in the background, or let go of."""
    whole = getattr(expert_pool, step)

    def broken(said: torch.Tensor | BufferTables, *others: Any, **options: Any) -> None:
        if (said.in_flight if isinstance(said, BufferTables) else said[0, 0]) > 0:
            monkeypatch.setattr(expert_pool, step, whole)
            raise KeyboardInterrupt
        whole(said, *others, **options)

    size = (2 * COUNT + 1) * EXPERT_BYTES
    with load(mixture, context=300, draft="none", expert_pool=size, cpu_share=share) as runtime:
        assert answers(runtime) == expected
        for _ in range(3):
            monkeypatch.setattr(expert_pool, step, broken)
            with pytest.raises(KeyboardInterrupt):
                answers(runtime)
        assert answers(runtime) == expected


def test_a_pool_too_small_for_a_token_is_refused_before_loading(mixture: Path) -> None:
    with pytest.raises(BudgetError, match=r"--expert-pool .* has no room for 3 experts of"):
        Runtime.load(mixture, device="cpu", expert_pool=2 * EXPERT_BYTES, on_progress=refuse_weights)


def test_a_share_of_a_cpu_without_a_compiler_is_refused(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OptionError, match=r"--cpu-share 0.5: .* no C\+\+ compiler found"):
        Runtime.load(mixture, device="cpu", expert_pool=COUNT * EXPERT_BYTES, cpu_share=0.5)


def test_a_share_of_experts_that_are_all_there_is_said_to_do_nothing(mixture: Path) -> None:
    with load(mixture, context=300, draft="none", cpu_share=0.5) as runtime:
        assert "--cpu-share does nothing, as no expert is missing" in runtime.placement


@pytest.mark.gpu
def test_on_a_gpu_the_link_brings_all_where_there_is_no_compiler(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    card: dict[str, Any] = {"device": "cuda:0", "dtype": "bf16", "vram": "8GB", "context": 300, "draft": "none"}
    with Runtime.load(mixture, expert_pool=COUNT * EXPERT_BYTES // 2, **card) as runtime:
        assert "the CPU takes no share of the experts: no C++ compiler found" in runtime.placement
        assert runtime.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True).stats.expert_cpu_gbps is None


def test_a_model_without_experts_has_no_pool(target: Path) -> None:
    for option, value in {"expert_pool": "1MB", "cpu_share": 0.5}.items():
        with pytest.raises(OptionError, match=f"--{option.replace('_', '-')} does nothing for a model without experts"):
            Runtime.load(target, device="cpu", **{option: value})


@pytest.mark.gpu
@pytest.mark.parametrize("buffers", [CHOSEN, COUNT, 2 * COUNT + 1, LAYERS * COUNT])
def test_on_a_gpu_tokens_do_not_depend_on_the_pool(buffers: int, mixture: Path) -> None:
    """Captured as graphs, and not, where the KV cache is on the host."""
    found = []
    for size in (None, buffers * EXPERT_BYTES // 2):
        for ways in (
            {"draft": "none", "max_batch": 2},
            {"draft": "none", "cpu_share": 0},
            {"draft": "ngram", "gamma": 6},
            {"draft": "none", "kv": "host"},
        ):
            options: dict[str, Any] = {"device": "cuda:0", "dtype": "bf16", "vram": "8GB", "context": 300, **ways}
            with Runtime.load(mixture, expert_pool=size, **options) as runtime:
                found += [answers(runtime, options.get("max_batch", 1)) for _ in range(3)]
    assert all(one == found[0] for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize("way", HEADS)
def test_on_a_gpu_a_head_says_the_same_whatever_of_its_experts_is_in_the_pool(way: str, carrying: Path) -> None:
    """How trees grow beside a pass, where nothing is fetched, goes by the clock."""
    card: dict[str, Any] = {"dtype": "bf16", "device": "cuda:0", "vram": "8GB"}
    if way == "cards":
        card |= {"device": "cuda:0,cuda:0", "vram": "4GB,4GB"}
    options = {"draft": "mtp", **HEADS[way], **card}
    said, plain = drafted(carrying, **options), [tokens for tokens, _ in drafted(carrying, draft="none", **card)]
    for buffers, share in ((CHOSEN, 0), (COUNT, 1.0), (2 * COUNT + 1, None)):
        found = drafted(carrying, **options, expert_pool=buffers * EXPERT_BYTES // 2, cpu_share=share)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in said] == plain
        assert found == said or HEADS[way]["tree_nodes"]


@pytest.mark.gpu
def test_pools_on_two_gpus_say_what_one_says(mixture: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here")
    options: dict[str, Any] = {"dtype": "bf16", "context": 300, "draft": "none", "max_batch": 3}
    found = []
    for device, vram, size in (("cuda:0", "4GB", None), ("cuda:0,cuda:1", "4GB,4GB", COUNT * EXPERT_BYTES // 2)):
        with Runtime.load(mixture, device=device, vram=vram, expert_pool=size, **options) as runtime:
            found += [answers(runtime, 3) for _ in range(2)]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("kind", [pytest.param("Q8_0", marks=pytest.mark.slow), "MXFP4"])
def test_experts_are_kept_and_multiplied_as_a_file_stores_them(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "norm_topk_prob": True}
    model = family_model("qwen3_moe", 1, **SPARSE, **sizes)
    source = open_checkpoint(write_family(tmp_path / "m.gguf", "qwen3_moe", model, kind=GGMLQuantizationType[kind]))
    layout = source.layout(torch.float32)
    decoded = ModelLayout.of(source.config(), torch.float32)
    block, plain = (one.experts[1].block.total_bytes for one in (layout, decoded))
    assert block < plain / 2 and kind in layout.bytes_by_kind
    found = []
    for one, buffers in ((decoded, None), (layout, None), (layout, CHOSEN)):
        made = make_runner(source, layout=one, pool_buffers=buffers)
        rows = [prefill(made.runner, 0, PROMPTS[2]), verify(made.runner, {0: TokenTree((7, 8, 9))})]
        found.append(torch.cat(rows))
        made.close()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_on_a_gpu_stored_experts_have_the_same_bits_wherever_they_are(family: str, tmp_path: Path) -> None:
    """Read to the card, fetched by prompts a layer at a time, and by tokens on demand."""
    sizes = {"gpt_oss": {"num_experts_per_tok": CHOSEN, "num_local_experts": COUNT}, "qwen3_moe": SPARSE}[family]
    model = family_model(family, 1, hidden_size=160, max_position_embeddings=1024, **sizes)
    source = open_checkpoint(write_stored(tmp_path, family, model))
    one = source.layout(torch.bfloat16).experts[0]
    card: dict[str, Any] = {"device": "cuda:0", "dtype": "bf16", "vram": "8GB", "context": 300, "draft": "none"}
    found, params = list[torch.Tensor](), GenerationParams(8, ignore_eos=True)
    for buffers in (None, COUNT + 1, CHOSEN):
        pool = buffers and buffers * one.block.total_bytes
        with Runtime.load(source, weights="stored", expert_pool=pool, **card) as runtime:
            rows = [runtime.replay(prompt, params, drafter=None)[1] for prompt in PROMPTS]
        found.append(torch.cat(rows))
    assert found[0].isfinite().all() and len(found[0].unique()) > 100
    assert all(torch.equal(one, found[0]) for one in found)


def test_plans_tell_what_the_pool_leaves_to_bring() -> None:
    settings = json.loads(family_config("mixtral", 0).to_json_string())
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_local_experts": 64, "num_hidden_layers": 12}
    config = model_config_from_json({**settings, **sizes}, "config.json")
    machine = made_up_machine(host_gbps=100.0)
    assert machine.link_gbps is not None
    request = RuntimeConfig(DescribedModel(config, torch.bfloat16), context=256, draft="none", kv="gpu", cpu_share=0)
    speeds = []
    for size in ("1GB", "3GB", "6GB", None):
        plan = plan_run(replace(request, expert_pool=size and parse_bytes(size)), machine)
        predicted = forecast(plan, machine)
        once, by_hits = predicted.plain, predicted.plain_tok_per_s_by_hits
        assert bool(by_hits) == (size is not None) and [*by_hits.values()] == sorted(by_hits.values())
        for hits, speed in by_hits.items():
            assert (hits > plan.target.expected_hits) == (speed > predicted.plain_tok_per_s)
        assert once.demand_s == pytest.approx(once.expert_bytes / (machine.link_gbps * 1e9))
        assert (once.expert_bytes == 0) == (size is None) == ("experts in host memory" not in plan.host)
        speeds.append(1 / once.seconds)
    assert speeds == sorted(speeds) and speeds[0] < speeds[-1] / 2
    both = plan_run(replace(request, expert_pool=10**9, cpu_share=None), machine)
    assert 1 / forecast(both, machine).plain.seconds > speeds[0]
    kinds = {name: "Q8_0" for name in checkpoint_tensors(config) if ".experts." in name}
    kinds |= {name: "Q4_0" for name in kinds if ".layers.3." in name and ".up_proj" in name}
    for mixed, words in (({}, ""), (kinds, ", those of 1 layer in bf16 and not as they are stored")):
        plan = plan_run(replace(request, target=DescribedModel(config, torch.bfloat16, kinds=mixed)), machine)
        assert plan.target.experts_in_words == f"all 768 experts on the device{words}"


def test_plans_have_memory_where_experts_of_long_prompts_are_decoded() -> None:
    """Those that are elements never are."""
    settings = json.loads(family_config("mixtral", 0).to_json_string())
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_local_experts": 64, "max_position_embeddings": 8192}
    config = model_config_from_json({**settings, **sizes}, "config.json")
    kinds = {name: "Q8_0" for name in checkpoint_tensors(config) if ".experts." in name}
    for mixed, context in ((kinds, 8192), (kinds, 256), ({}, 8192)):
        target = DescribedModel(config, torch.bfloat16, kinds=mixed)
        plan = plan_run(RuntimeConfig(target, context=context, draft="none", kv="gpu"), made_up_machine())
        assert (plan.device["decoded matrices"] > 200e6) == (bool(mixed) and context == 8192)


def test_a_pool_finds_about_what_its_plan_expects(mixture: Path) -> None:
    with load(mixture, context=300, draft="none", expert_pool=(2 * COUNT + 2) * EXPERT_BYTES) as runtime:
        result = runtime.generate(PROMPTS[2], max_new_tokens=60, ignore_eos=True)
        missed = runtime.plan.streamed_bytes / (LAYERS * CHOSEN * EXPERT_BYTES)
    assert result.stats.expert_hit_rate == pytest.approx(1 - missed, abs=0.1)


def test_measured_hits_count_by_their_number(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "own"))
    config = open_checkpoint(mixture).config()
    for wanted, share, expected in ((100, 0.9, 0.5), (30_000, 0.5, 1.0), (10_000, 0.5**3, 1.5)):
        note_hits(config, room=0.5, wanted=wanted, found=round(wanted * share))
        assert open_checkpoint(mixture).hit_exponent == pytest.approx(expected, abs=0.01)
    (tmp_path / "own" / "expert-hits.json").write_text('{"a": [')
    assert open_checkpoint(mixture).hit_exponent == 0.5


@pytest.mark.slow
def test_plans_expect_what_runs_have_measured(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "own"))
    kept, size = tmp_path / "own" / "expert-hits.json", (LAYERS * COUNT - 6) * EXPERT_BYTES

    def run(**options: Any) -> tuple[float, float]:
        """What was expected, and what was measured."""
        with load(mixture, context=300, draft="none", expert_pool=size, **options) as runtime:
            result = runtime.generate(PROMPTS[0], max_new_tokens=240, ignore_eos=True, temperature=0.0)
            return runtime.plan.target.expected_hits, result.stats.expert_hit_rate or 0.0

    expected, measured = run(forget_hits=True)
    assert not kept.exists() and abs(measured - expected) > 0.03
    assert run() == (expected, measured)
    assert run()[0] == pytest.approx(measured, abs=0.01)
    kept.unlink()
    kept.mkdir()
    assert run() == (expected, measured) and "how often experts were on the card is not kept" in caplog.text


def test_prompts_bring_a_heads_experts_once(carrying: Path) -> None:
    """Behind the target's, for all of its pieces; one more token then brings what it needs of each layer."""
    prompt = [5 + (3 * i * i + i // 7) % 280 for i in range(600)]
    with load(carrying, context=640, draft="mtp", tree_nodes=0, expert_pool=2 * COUNT * EXPERT_BYTES) as runtime:
        runtime.generate(prompt, max_new_tokens=2, ignore_eos=True)
        brought = runtime.engine.target.runner.streamer.bytes_begun / runtime.plan.target.expert_bytes
    assert 0 <= brought - (LAYERS + 1) * COUNT <= LAYERS * CHOSEN


@pytest.mark.parametrize("buffers", [COUNT - 1, 2 * COUNT + 1])
def test_prompts_bring_as_many_experts_as_planned(buffers: int, mixture: Path) -> None:
    prompt = [5 + (3 * i * i + i // 7) % 280 for i in range(600)]
    with load(mixture, context=640, draft="none", expert_pool=buffers * EXPERT_BYTES) as runtime:
        planned = prefill_time(runtime.plan, made_up_machine(tflops={"fp32": 1.0}), len(prompt))
        sizes = {"pool_buffers": runtime.plan.placement.pool_buffers, "chunk_tokens": runtime.plan.target.chunk_tokens}
    made = make_runner(open_checkpoint(mixture), capacity_tokens=640, **sizes)
    prefill(made.runner, 0, prompt)
    before = made.runner.streamer.bytes_begun
    prefill(made.runner, 1, prompt)
    assert made.runner.streamer.bytes_begun - before == planned.link_bytes
    made.close()


def test_windows_are_short_where_rows_bring_experts_of_their_own(mixture: Path) -> None:
    """Without a limit some of them have 96."""
    with load(mixture, context=600, draft="ngram", expert_pool=COUNT * EXPERT_BYTES) as runtime:
        result = runtime.generate(PROMPTS[2] * 6, max_new_tokens=60, ignore_eos=True, temperature=0.0)
    assert all(int(name.split()[1]) <= 15 for name in result.stats.windows if name != "plain")
