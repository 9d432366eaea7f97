"""Hybrids: whatever a text's history, the states of gated delta layers are those of the text read at once."""

import json
import random
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from offload_runtime import GenerationParams, Runtime, SamplingParams
from offload_runtime.cache.saved_blocks import BlockLayout
from offload_runtime.cli.app import app
from offload_runtime.config import SpeculationOptions
from offload_runtime.core import TokenTree
from offload_runtime.errors import CheckpointError, OptionError, UnsupportedArchitectureError
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.assembly import make_runner, prefill, verify
from tests.helpers.engine import byte_level_tokenizer, raising, write_noisy_copy
from tests.helpers.families import VOCABULARY, family_model, write_family
from tests.helpers.models import random_tokens
from tests.test_conversation import say

FAMILY, GREEDY = "qwen3_5_text", {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0}
ASKED: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "context": 900}
TWO_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}  # fmt: skip
LONG = "the quick brown fox jumps over the lazy dog, and then over another one. " * 10


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    family_model(FAMILY, 1, max_position_embeddings=1024, **TWO_LAYERS).save_pretrained(path)
    byte_level_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runtime(hybrid: Path) -> Iterator[Runtime]:
    with Runtime.load(hybrid, draft="none", **ASKED) as loaded:
        yield loaded


_say = partial(say, **GREEDY)


def test_cut_prompts_windows_and_branches_have_the_bits_of_one_prompt() -> None:
    draw, model = random.Random(4), family_model(FAMILY, 1)
    text = [draw.randrange(VOCABULARY) for _ in range(150)]
    made, cut = (make_runner(model, chunk_tokens=size, capacity_tokens=200) for size in (32, 41))
    expected = [prefill(made.runner, 0, text[:100])[0], *(prefill(made.runner, 0, [one])[0] for one in text[100:])]
    for until, start in ((30, 0), (64, 30), (100, 64)):
        logits = prefill(cut.runner, 1, text[start:until])
    assert (logits[0] == expected[0]).all()
    # Windows of which the first tokens come true, beside branches that do not, over the end of a chunk at 128.
    position = 100
    while position < 150:
        count = min(draw.randrange(1, 20), 150 - position)
        right, wrong = text[position : position + count], draw.randrange(VOCABULARY)
        branch = (wrong, wrong) if position // 64 == (position + count) // 64 else ()
        tree = TokenTree((*right, *branch), (*range(-1, count - 1), *((0, count) if branch else ())))
        rows = verify(cut.runner, {1: tree})
        for row in range(count):
            assert (rows[row] == expected[position - 100 + row + 1]).all(), position + row
        cut.runner.cache.commit_path(1, range(count))
        position += count
    for one in (made, cut):
        one.close()


def test_a_prompt_that_breaks_off_leaves_no_states() -> None:
    model, text = family_model(FAMILY, 1), _text(800, 6)
    broken, whole = (make_runner(model, chunk_tokens=256, capacity_tokens=900) for _ in range(2))
    prefill(broken.runner, 0, text[:300])
    with pytest.raises(KeyboardInterrupt):
        prefill(broken.runner, 0, text[300:600][::-1], raising(KeyboardInterrupt(), after=1))
    cache = broken.runner.cache
    assert [cache.saves(0, length) for length in (300, 600)] == [256, 256] and cache.truncate(0, 300) == 256
    prefill(broken.runner, 0, text[256:])
    assert cache.truncate(0, 790) == 790 and cache.truncate(0, 700) == 256  # the next one is at 768 tokens
    assert (prefill(broken.runner, 0, text[256:]) == prefill(whole.runner, 0, text)).all()
    for one in (broken, whole):
        one.close()


def _check_undo(runtime: Runtime) -> list[tuple[int, ...]]:
    """Return two answers, which are those of before when others were undone, and when the slot was another's."""
    chat = runtime.conversation()
    first = _say(chat, LONG)
    second = _say(chat, "and then?")
    chat.undo()
    _say(chat, "something else entirely")
    chat.undo()
    again = _say(chat, "and then?")
    assert again.tokens == second.tokens and again.stats.kept_tokens > 0
    fresh = runtime.conversation()
    runtime.generate("of other things " * 20, **GREEDY)  # takes the slot
    assert _say(fresh, LONG).tokens == first.tokens
    assert _say(fresh, "and then?").tokens == second.tokens
    return [first.tokens, second.tokens]


def test_undo_and_another_answer_are_as_if_nothing_had_been(runtime: Runtime) -> None:
    _check_undo(runtime)


@pytest.mark.parametrize("behind", ["undo", pytest.param("regenerate", marks=pytest.mark.slow)])
def test_a_session_behind_other_answers_goes_on(hybrid: Path, runtime: Runtime, tmp_path: Path, behind: str) -> None:
    chat = runtime.conversation()
    _say(chat, LONG[:130] if behind == "undo" else LONG)
    _say(chat, LONG[:40])
    if behind == "undo":
        chat.undo()
    else:
        for _ in (reply := chat.regenerate(replace(PARAMS, max_new_tokens=30))):
            pass
        assert reply.result.stats.kept_tokens > 256
    chat.save(tmp_path / "chat.json")
    expected = _say(chat, "and then?")
    with Runtime.load(hybrid, draft="none", **ASKED) as other:
        loaded = other.load_conversation(tmp_path / "chat.json")
        reply = _say(loaded, "and then?")
    assert reply.tokens == expected.tokens and reply.stats.kept_tokens > 0


SAMPLED = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.7, "seed": 3}
SHORT_AND_LONG = [LONG[:20], LONG[:500], "a"]
SEES_ALL = {"budget_tokens": 512, "chunk_size": 4}
DRAFTING: dict[str, dict[str, Any]] = {
    "chain": {"gamma": 6, "speculation": SpeculationOptions("chain")},
    "tree": {"gamma": 6, "tree_nodes": 12, "speculation": SpeculationOptions("chain")},
    "chunks": {"gamma": 6, "speculation": SpeculationOptions("chain", draft_cache="retrieval", **SEES_ALL)},
    "TriForce": {"gamma": 7, "speculation": SpeculationOptions("triforce", gamma_draft=8, **SEES_ALL)},
}


@pytest.fixture(scope="module")
def expected(hybrid: Path) -> list[list[int]]:
    with Runtime.load(hybrid, draft="none", max_batch=3, **ASKED) as loaded:
        return [result.tokens for result in loaded.generate_batch(SHORT_AND_LONG, **SAMPLED)]


def _check_drafts(runtime: Runtime, expected: Sequence[Sequence[int]], gamma: int) -> None:
    """Texts have the tokens of plain decoding, and what a draft says that is the target itself comes true."""
    for result, tokens in zip(runtime.generate_batch(SHORT_AND_LONG, **SAMPLED), expected, strict=True):
        passes, accepted = result.stats.passes, result.stats.accepted_by_depth
        assert result.tokens == tokens
        assert passes <= -(-len(tokens) // (gamma + 1)) + 1 and min(accepted[:gamma]) >= 0.6 * passes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "device"), [("tree", "cpu,cpu"), *product(("chain", "chunks", "TriForce"), ("cpu",))]
)  # fmt: skip
def test_a_hybrid_drafts_right_for_itself(hybrid: Path, expected: list[list[int]], how: str, device: str) -> None:
    with Runtime.load(hybrid, draft=hybrid, max_batch=3, **DRAFTING[how], **ASKED | {"device": device}) as loaded:
        _check_drafts(loaded, expected, DRAFTING[how]["gamma"])


def _agreement(draft: Path, prompt: list[int], answer: list[int]) -> list[bool]:
    """Whether a draft that has read all tokens before says each of an answer's but for the first."""
    one = make_runner(open_checkpoint(draft), capacity_tokens=400, window_tokens=100)
    prefill(one.runner, 0, prompt)
    logits = verify(one.runner, {0: TokenTree.chain(answer, "x")})
    one.close()
    positions = torch.arange(len(answer), dtype=torch.int32) + len(prompt) + 1
    sampling = SlotSampling.of([SamplingParams(temperature=0.7, seed=3)], logits.device)
    return [int(a) == b for a, b in zip(sample(logits, sampling, positions, 0 * positions), answer[1:], strict=False)]


def test_a_draft_that_was_wrong_goes_on_as_if_it_had_read_the_text(hybrid: Path, tmp_path: Path) -> None:
    noisy, gamma, prompt = write_noisy_copy(hybrid, tmp_path / "noisy", noise=0.03), 6, _text(50, 8)
    with Runtime.load(hybrid, draft=noisy, gamma=gamma, speculation=SpeculationOptions("chain"), **ASKED) as loaded:
        result = loaded.generate(prompt, **SAMPLED)
    agreement, found, known = _agreement(noisy, prompt, result.tokens), list[int](), 1
    while known < len(result.tokens):
        window = agreement[known - 1 :][: min(gamma, len(result.tokens) - known - 1)]
        found.append(next((place for place, agrees in enumerate(window) if not agrees), len(window)))
        known += 1 + found[-1]
    assert 8 < sum(found) < 45
    assert result.stats.accepted_by_depth == tuple(sum(one > depth for one in found) for depth in range(max(found)))


PARAMS = GenerationParams(6, ignore_eos=True, sampling=SamplingParams(temperature=0.0))


def _text(count: int, seed: int) -> list[int]:
    return [3 + token % 250 for token in random_tokens(count, seed=seed)]


def _fresh(runtime: Runtime, prompts: Sequence[list[int]], params: GenerationParams = PARAMS) -> list[torch.Tensor]:
    """The logits of answers to prompts of which nothing was kept."""
    return [runtime.replay(prompt, params, drafter=None)[1] for prompt in prompts]


def _check_kept(
    runtime: Runtime, prompts: Sequence[list[int]], fresh: Sequence[torch.Tensor], kept: Sequence[int],
    params: GenerationParams = PARAMS, **options: Any,
) -> None:  # fmt: skip
    """Prompts are answered one after the other with the bits of fresh runs, and so many tokens of each not read."""
    requests = [runtime.request(prompt, params) for prompt in prompts]
    with runtime.serving(**options) as engine:
        for request, expected in zip(requests, fresh, strict=True):
            engine.add(request)
            logits = list[torch.Tensor]()
            while request.result is None:
                logits += (one.logits.cpu() for one in engine.step(with_logits=True) if one.logits is not None)
            assert torch.equal(torch.cat(logits), expected)
    assert [request.num_kept for request in requests] == list(kept)


def _check_states_in_slots_and_stores(runtime: Runtime) -> None:
    text, short = _text(600, 3), _text(200, 4)
    prompts = [
        text,
        [*text[:599], 7],  # within the open chunk
        [*text[:560], 8],  # behind the last whole block before the end of the first one
        [*text[:300], 9, 9, 9],  # before all states of that
        text, short, [*short, 5],
    ]  # fmt: skip
    fresh = _fresh(runtime, prompts)
    # A text that is shorter than a block is not saved; a store has whole ones.
    for stored, kept in ((0, [0, 599, 512, 0, 300, 0, 200]), (6, [0, 599, 512, 0, 512, 0, 200])):
        store_bytes = stored * runtime.plan.target.kv_block_bytes
        _check_kept(runtime, prompts, fresh, kept, prefix_cache_bytes=store_bytes)


def test_a_prompt_goes_on_behind_the_last_state_that_it_shares(hybrid: Path) -> None:
    with Runtime.load(hybrid, draft="none", max_batch=1, **ASKED) as loaded:
        _check_states_in_slots_and_stores(loaded)


@pytest.mark.slow
def test_an_answer_leaves_a_state_at_its_last_whole_block(hybrid: Path) -> None:
    params, short = replace(PARAMS, max_new_tokens=10), _text(250, 4)
    with Runtime.load(hybrid, draft="none", max_batch=1, **ASKED) as loaded:
        answer = loaded.generate(short, params=params).tokens
        asked = [short, _text(300, 3), [*short, *answer, 5]]
        store_bytes = 6 * loaded.plan.target.kv_block_bytes
        _check_kept(loaded, asked, _fresh(loaded, asked, params), [0, 0, 256], params, prefix_cache_bytes=store_bytes)


@pytest.mark.slow
def test_a_store_that_a_text_does_not_fit_has_it_up_to_a_state(hybrid: Path) -> None:
    text, other = _text(800, 3), _text(600, 4)
    prompts, kept = [text[:600], text, other, [*text, 5]], [0, 600, 0, 512]
    with Runtime.load(hybrid, draft="none", max_batch=1, **ASKED) as loaded:
        plan = loaded.plan.target
        two_blocks = sum(BlockLayout.of(plan.config, plan.dtype, whole=whole).nbytes for whole in (False, True))
        _check_kept(loaded, prompts, _fresh(loaded, prompts), kept, prefix_cache_bytes=two_blocks)


@pytest.mark.slow
def test_a_window_that_goes_on_behind_ends_of_blocks_leaves_a_state_there() -> None:
    start, count, end = 180, 180, 256
    model, text = family_model(FAMILY, 1), _text(start + count, 7)
    sizes = {"capacity_tokens": start + count, "window_tokens": count, "chunk_tokens": 512}
    one, other = (make_runner(model, **sizes) for _ in range(2))
    prefill(one.runner, 0, text[:start])
    verify(one.runner, {0: TokenTree.chain(text[start:], "x")})
    one.runner.cache.commit_path(0, range(count))
    assert one.runner.cache.truncate(0, end + 40) == end
    assert (prefill(one.runner, 0, text[end:]) == prefill(other.runner, 0, text)).all()
    for made in (one, other):
        made.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_what_is_damaged_of_a_saved_state_is_read_again(hybrid: Path, tmp_path: Path, kv: str) -> None:
    prompt = _text(600, 3)
    with Runtime.load(hybrid, draft="ngram", max_batch=1, kv=kv, **ASKED) as loaded:
        fresh = _fresh(loaded, [prompt])
        for kept in (0, 512, 0, 512):
            _check_kept(loaded, [prompt], fresh, [kept], sessions=tmp_path / "kept")
            if kept:  # the block that has the states behind it
                file = max((tmp_path / "kept").glob("*.kv"), key=lambda one: one.stat().st_size)
                content = bytearray(file.read_bytes())
                content[-100] ^= 1
                file.write_bytes(content)


def test_a_plan_counts_all_states_and_a_run_takes_no_more(hybrid: Path) -> None:
    with Runtime.load(hybrid, draft="none", max_batch=2, **ASKED) as loaded:
        cache = loaded.engine.target.runner.cache
        assert loaded.plan.device["states"] == loaded.engine.budgets[0].reservations["target: KV cache: states"]
        for _ in range(12):
            for slot in (0, 1):
                prefill(loaded.engine.target.runner, slot, [5] * 70)
        assert cache.anchor_bytes == pytest.approx(loaded.plan.host["states to go back to"], rel=0.02)
    for how, taken in (("tree", ""), ("TriForce", "rows of the retrieval verifier")):
        with Runtime.load(hybrid, draft=hybrid, max_batch=2, **DRAFTING[how], **ASKED) as loaded:
            reserved, parts = loaded.engine.budgets[0].reservations, loaded.plan.device
            drafts = sum(nbytes for name, nbytes in reserved.items() if name.startswith("draft: KV cache"))
            assert drafts == parts["draft KV cache"]
            assert reserved["target: KV cache: states"] + reserved.get(taken, 0) == parts["states"]


@pytest.mark.slow
def test_states_of_a_long_context_take_host_memory_that_may_be_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64}
    sizes |= {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48}
    layers = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(64)]
    config = {**family_model(FAMILY, 1).config.to_dict(), **sizes, "model_type": FAMILY, "layer_types": layers}
    config |= {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config |= {"max_position_embeddings": 262144, "linear_conv_kernel_dim": 4, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["plan", "--target", str(tmp_path), "--profile", "rtx4090", "--context", "131072", "--batch", "1"]
    answer = CliRunner().invoke(app, [*command, "--json"])
    host = {part["name"]: part["nbytes"] for part in json.loads(answer.stdout)["host_memory"]["parts"]}
    kept = json.loads(answer.stdout)["layers"]
    assert sorted([*kept["kv_resident"], *kept["kv_streamed"]]) == [*range(3, 64, 4)]
    of_layer = 48 * 128 * 128 * 4 + 3 * (2 * 16 + 48) * 128 * 2
    assert host["states to go back to"] == pytest.approx((131072 // 4096 + 8) * 48 * of_layer, rel=0.01)
    refused = CliRunner().invoke(app, [*command, "--ram", "50GB"])
    assert refused.exit_code and "states to go back to 6.2 GB" in refused.output
    assert re.search(r"with --ram 5[01]\.\dGB it fits", refused.output)
    assert "with --context " in refused.output  # fewer states to go back to are kept


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "dtype", "channels"), [(FAMILY, "fp32", 64), (FAMILY, "bf16", 64), ("olmo_hybrid", "bf16", 96)]
)
def test_on_a_gpu_every_way_has_plain_decodings_tokens(family: str, dtype: str, channels: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"linear_key_head_dim": channels, "linear_value_head_dim": 2 * channels, "max_position_embeddings": 1024}
    family_model(family, 1, **sizes).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    prompts = [LONG[at : at + 10 + 60 * at] for at in range(6)]
    asked: dict[str, Any] = {**ASKED, "device": "cuda", "dtype": dtype}
    greedy = {**GREEDY, "max_new_tokens": 150}
    with Runtime.load(tmp_path, draft="none", **asked) as loaded:
        expected = [loaded.generate(prompt, **greedy).tokens for prompt in prompts]
        chat = loaded.conversation()
        first = _say(chat, LONG)
        again = _say(chat, "and then?")
        chat.undo()
        assert _say(chat, "and then?").tokens == again.tokens
    with Runtime.load(tmp_path, draft="none", max_batch=1, **asked) as loaded:
        _check_states_in_slots_and_stores(loaded)
    for options in ({"draft": "none"}, {"draft": "ngram"}, {"draft": "ngram", "kv": "host", "resident_layers": 0}):
        with Runtime.load(tmp_path, max_batch=6, **options, **asked) as loaded:
            assert [one.tokens for one in loaded.generate_batch(prompts, **greedy)] == expected, options
            assert [loaded.generate(prompt, **greedy).tokens for prompt in prompts] == expected, options
            assert _say(loaded.conversation(), LONG).tokens == first.tokens
    for how, options in DRAFTING.items():
        with Runtime.load(tmp_path, draft=tmp_path, max_batch=6, **options, **asked) as loaded:
            for _ in range(2):  # the second time steps are replays of graphs
                results = [*loaded.generate_batch(prompts, **greedy), loaded.generate(prompts[0], **greedy)]
                assert [one.tokens for one in results] == [*expected, expected[0]], how
                # What the draft says is what the target says, but for near-ties.
                assert all(one.stats.passes <= 1.3 * 150 / (1 + options["gamma"]) + 2 for one in results), how


def test_what_such_models_cannot_do_is_refused_before_loading(hybrid: Path) -> None:
    streaming = SpeculationOptions("chain", draft_cache="streaming")
    with pytest.raises(OptionError, match="cannot let go of tokens, which are in its states: use --draft-cache full"):
        Runtime.load(hybrid, draft=hybrid, speculation=streaming, **ASKED)
    sizes = family_model(FAMILY, 1).config.to_dict() | {"model_type": FAMILY}
    kinds = sizes["layer_types"]
    assert len(kinds) == 4
    for changes, message in (
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 3}, "3 heads of values cannot share 2 of keys evenly"),
        ({"linear_key_head_dim": 48}, "linear_key_head_dim 48, where a multiple of 32 is needed"),
        ({"layer_types": kinds[1:]}, "layer_types has 3 entries for 4 layers"),
        ({"layer_types": ["mamba"] * 4}, "only linear_attention and full_attention"),
        ({"layer_types": kinds[:1] * 4}, "none of 4 layers attends"),
        ({"full_attention_interval": 3}, r"layer 1 is full_attention by layer_types and linear_attention by .* 3"),
    ):
        with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=message):
            model_config_from_json({**sizes, **changes}, "config.json")


def test_a_convolution_in_parts_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    family_model("olmo_hybrid", 1).save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.linear_attn.k_conv1d.weight"
    tensors[name] = tensors[name][:, :, 1:].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_conv1d.weight \[\d+, 1, \d\] in F32"):
        open_checkpoint(tmp_path)


def _contradicting(data: bytes, key: str, value: int) -> bytes:
    """A GGUF file whose metadata say another number."""
    at = data.index(f"qwen35.ssm.{key}".encode()) + len(f"qwen35.ssm.{key}") + 4  # behind its type
    return data[:at] + struct.pack("<I", value) + data[at + 4 :]


def test_gguf_files_that_contradict_themselves_are_refused_before_loading(tmp_path: Path) -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 32}
    model = family_model(FAMILY, 1, **sizes)
    path, wrong = write_family(tmp_path / "m.gguf", FAMILY, model), tmp_path / "wrong.gguf"
    whole, name = path.read_bytes(), b"blk.0.ssm_conv1d.weight"
    for data, message in (
        (whole.replace(name, name[::-1]), r"lacks 1 of \d+ tensors \(blk.0.ssm_conv1d.weight"),
        (_contradicting(whole, "inner_size", 130), "ssm.inner_size 130 are no whole channels of 4 heads of values"),
        (_contradicting(whole, "group_count", 3), "4 heads of values cannot share 3 of keys evenly"),
        (_contradicting(whole, "group_count", 4), r"has shape \[.*, expected"),
        (_contradicting(whole, "conv_kernel", 7), r"ssm_conv1d.weight has shape \[.*, expected \[\d+, 1, 7\]"),
    ):
        wrong.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            Runtime.load(wrong, draft="none", **ASKED)
