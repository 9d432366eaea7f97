"""Hybrids: whatever a text's history, the states of gated delta layers are those of the text read at once."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_runtime import GenerationResult, Runtime
from offload_runtime.core import TokenTree
from offload_runtime.errors import CheckpointError, OptionError, UnsupportedArchitectureError
from offload_runtime.models.registry import model_config_from_json
from tests.helpers.assembly import make_runner, prefill, verify
from tests.helpers.engine import byte_level_tokenizer, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.families import VOCABULARY, family_model, write_family

FAMILY, GREEDY = "qwen3_5_text", {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0}
ASKED: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "context": 900}
LONG = "the quick brown fox jumps over the lazy dog, and then over another one. " * 10


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    family_model(FAMILY, 1, max_position_embeddings=1024).save_pretrained(path)
    byte_level_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runtime(hybrid: Path) -> Iterator[Runtime]:
    with Runtime.load(hybrid, draft="none", **ASKED) as loaded:
        yield loaded


def _say(conversation: Any, text: str) -> GenerationResult:
    reply = conversation.say(text, **GREEDY)
    for _ in reply:
        pass
    return reply.result


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


def test_a_path_alone_leads_over_the_end_of_a_chunk() -> None:
    #      0 - 1 - 2 - 3    and a path beside it: 4 - 5, which ends where the first goes on
    tree = TokenTree(tuple(range(8)), (-1, 0, 1, 2, 0, 4, 5, 3), ("x",) * 8)
    assert tree.through_gates(10, 64) == list(range(8))
    assert tree.through_gates(62, 64) == [0, 1, 2, 3, 4, 7]  # nodes 1 and 4 end a chunk
    assert tree.through_gates(63, 64) == list(range(8))  # the root does
    assert tree.through_gates(64, 64) == list(range(8))
    chain = TokenTree.chain(range(200), "x")
    assert chain.through_gates(5, 64) == list(range(200))


def test_undo_and_another_answer_are_as_if_nothing_had_been(runtime: Runtime) -> None:
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


def test_answers_do_not_know_of_their_neighbours(hybrid: Path, runtime: Runtime) -> None:
    prompts = [LONG[at : at + 10 + 60 * at] for at in range(6)]
    alone = [runtime.generate(prompt, **GREEDY).tokens for prompt in prompts]
    with Runtime.load(hybrid, draft="ngram", max_batch=6, kv="host", resident_layers=0, **ASKED) as other:
        assert [one.tokens for one in other.generate_batch(prompts, **GREEDY)] == alone


def test_a_session_goes_on_behind_its_last_state(hybrid: Path, runtime: Runtime, tmp_path: Path) -> None:
    chat = runtime.conversation()
    _say(chat, LONG)
    chat.save(tmp_path / "chat.json")
    expected = _say(chat, "and then?")
    with Runtime.load(hybrid, draft="none", **ASKED) as other:
        reply = _say(other.load_conversation(tmp_path / "chat.json"), "and then?")
    assert reply.tokens == expected.tokens
    assert reply.stats.kept_tokens > 300 and not reply.stats.kept_tokens % 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_a_gpu_every_way_gives_the_tokens_of_plain_decoding(dtype: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 1024}
    family_model(FAMILY, 1, **sizes).save_pretrained(tmp_path)
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
    for ways in ({"draft": "none"}, {"draft": "ngram"}, {"draft": "ngram", "kv": "host", "resident_layers": 0}):
        with Runtime.load(tmp_path, max_batch=6, **ways, **asked) as loaded:
            assert [one.tokens for one in loaded.generate_batch(prompts, **greedy)] == expected, ways
            assert [loaded.generate(prompt, **greedy).tokens for prompt in prompts] == expected, ways
            assert _say(loaded.conversation(), LONG).tokens == first.tokens


def test_what_such_models_cannot_do_is_refused_before_loading(hybrid: Path) -> None:
    with pytest.raises(OptionError, match="states that its guesses cannot be taken back from"):
        Runtime.load(hybrid, draft=hybrid, **ASKED)
    sizes = family_model(FAMILY, 1).config.to_dict() | {"model_type": FAMILY}
    with pytest.raises(CheckpointError, match="cannot share 2 of keys evenly"):
        model_config_from_json({**sizes, "linear_num_key_heads": 2, "linear_num_value_heads": 3}, "config.json")
    with pytest.raises(UnsupportedArchitectureError, match="only linear_attention and full_attention"):
        model_config_from_json({**sizes, "layer_types": ["mamba"] * sizes["num_hidden_layers"]}, "config.json")


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
