"""Drafting with a copy of the target's own streamed layers: tokens are the target's, an exact copy is never wrong
however trees and texts grow, and it takes the memory that was planned."""

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from offload_runtime import Runtime
from offload_runtime.cli.app import app
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.core import Batch, DraftBudget, TokenTree
from offload_runtime.engine.conversation import Conversation
from offload_runtime.errors import OptionError
from offload_runtime.hardware import load_profile
from offload_runtime.params import SamplingParams
from offload_runtime.plan.report import with_found_draft
from offload_runtime.plan.search import plan_run
from offload_runtime.speculation.ngram import WithNgrams, drafting
from offload_runtime.speculation.step import StepOutput
from offload_runtime.speculation.tree import ModelDrafter
from offload_runtime.weights.checkpoint import DescribedModel
from offload_runtime.weights.neighbours import stored_kinds
from offload_runtime.weights.sources import describe_model
from tests.helpers import native_drafts as natives
from tests.helpers.engine import NUM_LAYERS, PROMPT, byte_level_tokenizer, load, refuse_weights, write_checkpoint
from tests.helpers.families import family_model
from tests.helpers.planning import CONFIGS
from tests.helpers.quantising import FORMATS, write_quantised
from tests.test_weights_gguf import write

COUNT = 8
NOISY = {"temperature": 0.8, "seed": 5}
GROUP = 64


def on_a_grid(weight: torch.Tensor) -> torch.Tensor:
    """A matrix near another one that its copy in 4 bits is equal to: in groups of columns the numbers 0 to 15, of which
    the least and the largest are there, times a power of two."""
    groups = weight.float().view(len(weight), -1, GROUP)
    step = 2.0 ** math.ceil(math.log2(float(groups.std()) / 3))
    numbers = (groups / step + 7.5).round().clamp(0, 15)
    numbers[..., 0], numbers[..., 1] = 0, 15
    return ((numbers - 7.5) * step).view(weight.shape).to(weight.dtype)


def write_exact(directory: Path, *, hybrid: bool = False) -> Path:
    """A checkpoint whose copy is equal to it."""
    if hybrid:
        tokenizer = byte_level_tokenizer()
        sizes = {"vocab_size": len(tokenizer), "hidden_size": GROUP, "intermediate_size": 2 * GROUP}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        family_model("qwen3_5_text", 1, **sizes).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    else:
        write_checkpoint(directory, hidden_size=GROUP, context=1024)
    path = directory / "model.safetensors"
    weights = {name: on_a_grid(one) if "proj" in name else one for name, one in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def exact_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exact(tmp_path_factory.mktemp("exact") / "target")


@pytest.fixture(scope="module")
def exact_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of gated delta layers and attention."""
    return write_exact(tmp_path_factory.mktemp("exact") / "hybrid", hybrid=True)


def answers(runtime: Runtime, **asked: Any) -> list[list[int]]:
    """Of three prompts, of which one goes on from another."""
    prompts = [runtime.encode(PROMPT), [5 + (3 * i * i + i // 7) % 280 for i in range(270)]]
    prompts.append(prompts[1] + [7, 8, 9])
    asked = {"max_new_tokens": COUNT, "ignore_eos": True, **asked}
    if runtime.plan.target.batch == 1:
        return [runtime.generate(prompt, **asked).tokens for prompt in prompts]
    return [one.tokens for one in runtime.generate_batch(prompts[:2], **asked)]


WINDOWS: dict[str, dict[str, Any]] = {
    "trees": {"tree_nodes": 12}, "deep trees": {"tree_nodes": 20, "gamma": 20}, "chosen": {},
}  # fmt: skip


@pytest.mark.parametrize(("windows", "batch"), [
    ("trees", 2),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (("deep trees", 1), ("chosen", 2))),
])  # fmt: skip
def test_tokens_are_those_of_plain_decoding(short_target: Path, windows: str, batch: int) -> None:
    options = {"resident_layers": batch, "max_batch": batch}
    samplings: list[dict[str, Any]] = [{}, {**NOISY, "top_k": 40, "top_p": 0.9, "presence_penalty": 0.5}]
    with load(short_target, draft="none", **options) as runtime:
        expected = [answers(runtime, **asked) for asked in samplings]
    with load(short_target, draft="self", **options, **WINDOWS[windows]) as runtime:
        for asked, tokens in zip(samplings, expected, strict=True):
            assert answers(runtime, **asked) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("path", ["random_target", "exact_hybrid"])
def test_each_card_has_copies_of_its_own_layers(request: pytest.FixtureRequest, path: str) -> None:
    target = request.getfixturevalue(path)
    options = {"resident_layers": 1, "dtype": "fp32" if path == "exact_hybrid" else "bf16"}
    found = []
    for more in ({"draft": "none"}, {"draft": "self", "tree_nodes": 12, "device": "cpu,cpu"}):
        with Runtime.load(target, **{"device": "cpu", **options, **more}) as runtime:
            found.append([answers(runtime), answers(runtime, **NOISY)])
            for budget, own in zip(runtime.engine.budgets, runtime.plan.cards, strict=True):
                assert budget.reserved_bytes == own.device_bytes
            assert len(runtime.engine.budgets) == (2 if "device" in more else 1)
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("two") / "target", hidden_size=256, num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "bf16", "12 bits", "gemma2"])
def test_whatever_the_target_is(exact_target: Path, two_layers: Path, kind: str, tmp_path: Path) -> None:
    path, options = exact_target, {"dtype": "bf16" if kind in ("bf16", "12 bits") else "fp32"}
    if kind == "Q8_0":
        model = transformers.LlamaForCausalLM.from_pretrained(two_layers)
        path, options["weights"] = write(tmp_path / "model.gguf", model, kind=kind, vocabulary={}), "stored"
        byte_level_tokenizer().save_pretrained(tmp_path)
    elif kind == "12 bits":
        path, options["encode"] = two_layers, "always"
    elif kind != "bf16":
        family_model(kind, 1, hidden_size=256, intermediate_size=256).save_pretrained(tmp_path)
        byte_level_tokenizer().save_pretrained(tmp_path)
        path = tmp_path
    prompt, found = [3 + 7 * i % 90 for i in range(50)], []
    for draft in ({"draft": "none"}, {"draft": "self", "tree_nodes": 12}, {"draft": "self", "gamma": 4}):
        with load(path, resident_layers=1, context=500, **options, **draft) as runtime:
            result = runtime.generate(prompt, max_new_tokens=8, ignore_eos=True, **NOISY)
        found.append(result.tokens)
        assert draft["draft"] == "none" or result.stats.accepted_by_source
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module", params=["exact_target", pytest.param("exact_hybrid", marks=pytest.mark.slow)])
def exact(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    path = request.getfixturevalue(request.param)
    with load(path, draft="self", resident_layers=1, tree_nodes=24, max_batch=3) as runtime:
        drafter = drafting(runtime.engine.drafter)
        assert isinstance(drafter, ModelDrafter)
        drafter.runner.warm_up()  # as on a GPU
        assert runtime.engine.budgets[0].reserved_bytes == runtime.plan.device_bytes
        yield runtime


CHAIN, TREE = DraftBudget("chain", 5), DraftBudget("tree", 8, tree_nodes=12)
OTHERS = [DraftBudget("plain", 0), DraftBudget("tree", 4, tree_nodes=24), DraftBudget("ngram", 6)]
BUDGETS = [CHAIN, CHAIN, TREE, TREE, TREE, *OTHERS]


def was_wrong(output: StepOutput) -> bool:
    """Whether the copy has proposed something else behind what was accepted. At the end of a gated delta chunk what is
    right may not be, as one path alone leads over it."""
    last, proposal = output.path[-1] if output.path else -1, output.proposal
    nodes = zip(proposal.tokens, proposal.parents, proposal.sources, strict=True)
    behind = [token for token, parent, source in nodes if parent == last and source == "self"]
    return bool(behind) and output.tokens[-1] not in behind


def test_a_copy_that_is_exact_is_never_wrong(exact: Runtime) -> None:
    """Texts begin, grow by all kinds of budgets with steps ahead of passes, end and go on otherwise."""
    draw, params = random.Random(1), SamplingParams(temperature=0.8, seed=7)
    target, drafter = exact.engine.target.runner, exact.engine.drafter
    assert isinstance(drafter, WithNgrams)
    for slot in range(3):
        drafter.leave(slot)
        target.cache.truncate(slot, 0)
    prompts = {slot: [3 + (slot + i * i) % 280 for i in range(draw.choice((2, 40, 250)))] for slot in (0, 1)}
    expected = {slot: natives.plainly(target, prompt, 24, params) for slot, prompt in prompts.items()}
    slow = natives.SlowRunner(target, drafter, draw.choice((0, 1, 5)))
    decoding, accepted = natives.Decoding.of(slow, drafter, {}, params), 0
    for _ in range(30):
        for slot in {0, 1} - {*decoding.texts}:
            if draw.random() < 0.7:
                start = draw.randint(len(prompts[slot]), len(prompts[slot]) + 20)
                decoding.join({slot: expected[slot][:start]}, params)
        running = {slot for slot in decoding.texts if len(decoding.texts[slot]) < len(expected[slot])}
        if running:
            for output in decoding.step({slot: draw.choice(BUDGETS) for slot in sorted(running)}).values():
                assert not was_wrong(output)
                accepted += len(output.path)
        for slot, text in [*decoding.texts.items()]:
            most = min(len(text), len(expected[slot]))
            assert text[:most] == expected[slot][:most]
            if draw.random() < 0.15 or most == len(expected[slot]):
                decoding.leave(slot)
                target.cache.truncate(slot, draw.randint(0, len(prompts[slot]) - 1))
    assert accepted > 20


@pytest.mark.slow
def test_a_copy_brings_many_tokens_a_pass(exact: Runtime) -> None:
    for asked, least in (({"gamma": 7, "tree_nodes": 0}, 5.0), ({"tree_nodes": 24}, 4.0)):
        stats = exact.generate(PROMPT, max_new_tokens=41, ignore_eos=True, **NOISY, **asked).stats
        assert stats.tokens_per_pass >= least
        assert [(level.proposed_by, level.verified_by) for level in stats.acceptance] == [("self", "target")]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), [
    ("exact_target", "bf16"), ("exact_target", "fp16"), ("exact_target", "fp32"), ("exact_hybrid", "bf16"),
])  # fmt: skip
def test_on_a_gpu(request: pytest.FixtureRequest, kind: str, dtype: str) -> None:
    """Where it drafts while passes run."""
    path = request.getfixturevalue(kind)
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "kv": "gpu", "resident_layers": 1}
    for batch in (1, 2):
        with Runtime.load(path, draft="none", max_batch=batch, **options) as runtime:
            expected = [answers(runtime), answers(runtime, **NOISY)]
        with Runtime.load(path, draft="self", tree_nodes=24, max_batch=batch, **options) as runtime:
            for asked in ({"tree_nodes": 24}, {"gamma": 6, "tree_nodes": 0}, {}):
                assert [answers(runtime, **asked), answers(runtime, **asked, **NOISY)] == expected
            text = runtime.encode(PROMPT)
            for asked in ({"tree_nodes": 24}, {"gamma": 7, "tree_nodes": 0}):
                stats = runtime.generate(text, max_new_tokens=41, ignore_eos=True, **NOISY, **asked).stats
                assert stats.tokens_per_pass >= 4.0


@pytest.mark.slow
def test_a_conversation_goes_on_and_is_saved(exact_target: Path, tmp_path: Path) -> None:
    said = list[list[list[int]]]()

    def say(conversation: Conversation, text: str) -> list[int]:
        reply = conversation.say(text, max_new_tokens=6, ignore_eos=True, **NOISY)
        for _ in reply:
            pass
        return reply.result.tokens

    for draft in ({"draft": "none"}, {"draft": "self", "tree_nodes": 12}):
        path = tmp_path / str(draft["draft"])
        with load(exact_target, resident_layers=1, **draft) as runtime:
            conversation = runtime.conversation()
            said.append([say(conversation, text) for text in ("the quick " * 12, "brown fox")])
            conversation.save(path)
        with load(exact_target, resident_layers=1, **draft) as runtime:
            said[-1].append(say(runtime.load_conversation(path), "and on"))
    assert said[0] == said[1]


@pytest.mark.slow
def test_the_context_can_be_filled(exact_target: Path) -> None:
    for more in ({"tree_nodes": 12}, {"gamma": 9}):
        found = []
        for draft in ({"draft": "none"}, {"draft": "self", **more}):
            with load(exact_target, resident_layers=0, context=280, **draft) as runtime:
                found.append(runtime.generate([5 + i % 280 for i in range(240)], max_new_tokens=40, ignore_eos=True))
        assert found[0].tokens == found[1].tokens and len(found[1].tokens) == 40


def write_random(directory: Path, spread: str | None = None) -> Path:
    """A bf16 checkpoint of Gaussian matrices; those whose name has `spread` in it have magnitudes far apart."""
    write_checkpoint(directory, hidden_size=2 * GROUP, context=1024)
    path, draw = directory / "model.safetensors", torch.Generator().manual_seed(1)
    weights = {name: one.to(torch.bfloat16) for name, one in load_file(path).items()}
    for name, one in weights.items():
        if spread is not None and spread in name:
            one.mul_(torch.rand(one.shape, generator=draw).mul_(-60).exp2_())
    save_file(weights, path, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("random") / "target")


def logits_of(runtime: Runtime) -> torch.Tensor:
    """Of a prompt and of a tree behind it."""
    runner = runtime.engine.target.runner
    of_prompt = runner.forward(Batch(prompts={0: [3 + 7 * i % 250 for i in range(40)]})).logits
    of_tree = runner.forward(Batch({0: TokenTree((5, 6, 7), (-1, 0, 0))})).logits
    runner.cache.truncate(0, 0)
    return torch.cat((of_prompt, of_tree))


@pytest.mark.parametrize("options", [
    {"resident_layers": 1}, *(pytest.param(one, marks=pytest.mark.slow) for one in (
        {"resident_layers": 0}, {"resident_layers": NUM_LAYERS - 1}, {"resident_layers": 1, "encode": "always"},
    )),
])  # fmt: skip
def test_what_is_left_given_copies_has_every_bit(random_target: Path, options: dict[str, Any]) -> None:
    """And passes bring little more than half of the bytes."""
    options = {"dtype": "bf16", **options}
    found, brought = [], []
    for draft in ("none", "self"):
        with load(random_target, draft=draft, tree_nodes=12 if draft == "self" else 0, **options) as runtime:
            result = runtime.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True, **NOISY)
            stats = result.stats
            found.append([logits_of(runtime), result.tokens])
            brought.append(stats.bytes_per_pass)
            if draft == "self":
                assert stats.bytes_per_pass == runtime.engine.plan.streamed_bytes <= runtime.plan.streamed_bytes
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert brought[1] < (0.75 if "encode" in options else 0.55) * brought[0]


def assert_same_logits_of_fewer_bytes(path: Path, share: float) -> None:
    """With a copy passes bring less than this share of what they do without, and every bit."""
    found, brought = [], []
    for draft in ("none", "self"):
        with load(path, draft=draft, resident_layers=1, weights="stored") as runtime:
            found.append(logits_of(runtime))
            brought.append(runtime.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).stats.bytes_per_pass)
    assert torch.equal(*found)
    assert brought[1] < share * brought[0]


@pytest.mark.slow
def test_what_is_left_of_q8_0_has_every_bit(random_target: Path, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(random_target)
    path = write(tmp_path / "model.gguf", model, kind="Q8_0", vocabulary={})
    byte_level_tokenizer().save_pretrained(tmp_path)
    assert_same_logits_of_fewer_bytes(path, 0.68)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FP8 of blocks", "FP8 of channels", "FP8 of a tensor"])
def test_what_is_left_of_fp8_has_every_bit(name: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, FORMATS[name])
    assert_same_logits_of_fewer_bytes(tmp_path, 0.65)


def test_what_has_no_room_stays_as_it_is(tmp_path: Path) -> None:
    path, found = write_random(tmp_path / "target", "layers.1.self_attn.k_proj"), []
    for draft in ("none", "self"):
        with load(path, draft=draft, resident_layers=0, dtype="bf16") as runtime:
            found.append(logits_of(runtime))
            layers = runtime.engine.target.weights.layout.layer_bytes
    assert torch.equal(*found)
    assert layers[1] > layers[0]


def test_memory_beside_what_is_left(random_target: Path) -> None:
    with load(random_target, draft="self", dtype="bf16", resident_layers=1, context=600) as runtime:
        (budget,) = runtime.engine.budgets
        assert budget.reserved_bytes == runtime.plan.device_bytes
        held_bytes = sum(arena.nbytes for arena in runtime.engine.target.weights.layers.values())
        assert held_bytes == runtime.plan.host["streamed layers"]


def test_memory_is_what_was_planned(two_layers: Path) -> None:
    options: dict[str, Any] = {"resident_layers": 1}
    seen = list[tuple[str, int, int]]()
    with load(two_layers, draft="self", tree_nodes=24, on_progress=lambda *one: seen.append(one), **options) as runtime:
        plan, (budget,) = runtime.plan, runtime.engine.budgets
        shapes = [spec.shape for spec in plan.target.layout.layers[0].tensors]
        bits = 4.5 * sum(math.prod(shape) for shape in shapes if len(shape) == 2)
        assert bits / 8 <= budget.reservations["draft: copies"] == plan.device["draft weights"] <= 1.01 * bits / 8
        assert seen[-1] == ("copies of layers", *[plan.device["draft weights"]] * 2)
        assert budget.reserved_bytes == plan.device_bytes and not plan.device["draft KV cache"]
    with load(two_layers, draft="none", **options) as runtime:  # behind a text there is room for trees
        token_bytes = plan.target.kv_bytes_of(plan.target.layers, 1)
        more_bytes = plan.device["KV cache"] - runtime.plan.device["KV cache"]
        assert 4 * 24 * token_bytes <= more_bytes <= 512 * token_bytes


def test_a_plan_says_what_a_copy_takes_and_what_it_brings() -> None:
    command = ["plan", "--target", str(CONFIGS / "llama-2-13b"), "--profile", "rtx4090"]
    shown = CliRunner().invoke(app, [*command, "--draft", "self", "--explain"])
    assert shown.exit_code == 0
    assert "accepts 86% of what a copy of its streamed layers in 4 bits proposes, which is assumed" in shown.stdout
    said = re.search(
        r"proposals from a copy of its streamed layers in 4 bits \((.*) GB\); trees of up to", shown.stdout
    )
    listed = re.search(r"draft weights +(.*)", shown.stdout)
    assert said is not None and listed is not None and float(said[1]) == pytest.approx(float(listed[1]), abs=0.1)
    assert "--draft self, if as much is" in CliRunner().invoke(app, [*command, "--draft", "ngram"]).stdout


@pytest.mark.parametrize(("name", "kinds", "options", "draft"), [
    ("qwen2.5-32b", None, {}, "self"), ("qwen2.5-32b", None, {"kv": "host"}, "ngram"),
    ("qwen2.5-32b", "Q4_K_M", {"vram": 12 * 10**9}, "ngram"), ("llama-3.1-8b", None, {}, "ngram"),
])  # fmt: skip
def test_it_is_taken_where_bf16_must_be_streamed(
    name: str, kinds: str | None, options: dict[str, Any], draft: str
) -> None:
    described = describe_model(CONFIGS / name)
    config, dtype = described.config(), described.native_dtype
    target = DescribedModel(config, dtype, kinds=stored_kinds(config, kinds)) if kinds else described
    asked = RuntimeConfig(target, "ngram", context=4096, **options)
    found, note = with_found_draft(asked, str(CONFIGS / name), load_profile("rtx4090"))
    assert found.draft == draft and ("a copy of its streamed layers" in note) == (draft == "self")


@pytest.mark.parametrize(("options", "message"), [
    ({"resident_layers": 5}, "all layers are on the card as they are, and there is nothing to copy: lower"),
    ({}, "all layers are on the card as they are, and there is nothing to copy: take --draft auto"),
    ({"resident_layers": 1, "kv": "host"}, "reads the target's KV cache on the card, not in host memory: drop --kv"),
    ({"speculation": SpeculationOptions("triforce")}, "--draft self has no step over retrieved tokens"),
    ({"speculation": SpeculationOptions("none")}, "--speculation none would leave the draft model idle"),
    ({"speculation": SpeculationOptions("chain", "streaming")}, "a copy of the target shares its KV cache: drop it"),
    ({"speculation": SpeculationOptions(recent_tokens=64)}, "--recent-tokens does nothing with a copy of the target"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_loading(short_target: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Runtime.load(short_target, **{"draft": "self", "device": "cpu", "on_progress": refuse_weights, **options})


def test_a_copy_that_is_hardly_smaller_is_refused() -> None:
    described = describe_model(CONFIGS / "llama-3.1-70b")
    stored = DescribedModel(
        described.config(), described.native_dtype, kinds=stored_kinds(described.config(), "Q4_K_M")
    )
    with pytest.raises(OptionError, match="a copy in 4 bits would be 94% of the layers as they are"):
        plan_run(RuntimeConfig(stored, "self", context=4096), load_profile("rtx4090"))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_experts_are_refused(family: str, tmp_path: Path) -> None:
    path = tmp_path / "target"
    family_model(family, 1).save_pretrained(path)
    with pytest.raises(OptionError, match="--draft self: a copy of experts would be"):
        Runtime.load(path, draft="self", device="cpu", resident_layers=0)


def test_ngrams_join_it() -> None:
    assert RuntimeConfig("m", "self,ngram").draft == "self"
