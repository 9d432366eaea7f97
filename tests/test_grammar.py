"""Answers bound to a schema or a grammar: plain decoding's tokens whatever proposes them, and how such answers end."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_runtime.core import TokenTree
from offload_runtime.engine import ErrorEvent, Runtime, Scheduler
from offload_runtime.errors import GrammarError, OptionError
from offload_runtime.grammar import GrammarCompiler, GrammarMatcher, masked, token_masks
from offload_runtime.params import MOST_GRAMMAR_CHARACTERS, GenerationParams, SamplingParams
from offload_runtime.sampling import SlotSampling
from offload_runtime.verify.equality import ScriptedDrafter, transcribe
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.assembly import tokens_behind
from tests.helpers.engine import PROMPT, byte_level_tokenizer, load, refuse_weights
from tests.helpers.schemas import assert_valid
from tests.test_tokenizers import EXPECTED, metadata_of, written

PERSON: dict[str, Any] = {
    "type": "object", "required": ["name", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["the quick brown fox", "lazy"]}, "minItems": 1, "maxItems": 2},
    },
}  # fmt: skip
# The second with filters, which choose among what the grammar allows; the third repeats what the prompt has.
SAMPLINGS: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"json_schema": PERSON, "temperature": 1.0, "seed": 5, "top_p": 0.9},
    {"json_schema": PERSON, "temperature": 0.8, "seed": 2, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
    {"grammar": 'start: ("the " WORD ", ")~2..4 "."\nWORD: /[a-z]{2,5}/', "temperature": 1.0, "seed": 3},
]
COUNT = 32
some_samplings = pytest.mark.parametrize(
    "chosen", [pytest.param([1], id="one"), pytest.param([0, 2, 3], id="others", marks=pytest.mark.slow)]
)


def params_of(index: int, **more: Any) -> GenerationParams:
    return GenerationParams(COUNT, sampling=SamplingParams(**SAMPLINGS[index]), **more)


@pytest.fixture(scope="module")
def expected(plain: Runtime) -> list[list[int]]:
    """Plain decoding's tokens for each of `SAMPLINGS`."""
    return [plain.generate(PROMPT, params=params_of(index)).tokens for index in range(len(SAMPLINGS))]


def assert_same(runtime: Runtime, expected: Sequence[Sequence[int]], chosen: Sequence[int], **windows: Any) -> float:
    """Compare some of the `SAMPLINGS`; returns the most tokens a pass."""
    results = [runtime.generate(PROMPT, params=params_of(index, **windows)) for index in chosen]
    assert [result.tokens for result in results] == [expected[index] for index in chosen]
    return max(result.stats.tokens_per_pass for result in results)


@some_samplings
def test_a_draft_changes_no_token(target: Path, draft: Path, expected: list[list[int]], chosen: Sequence[int]) -> None:
    with load(target, resident_layers=1, draft=draft, tree_nodes=24) as runtime:
        assert assert_same(runtime, expected, chosen, gamma=5, tree_nodes=24 if 1 in chosen else 0) > 1


@some_samplings
def test_rows_have_own_masks(plain: Runtime, target: Path, expected: list[list[int]], chosen: Sequence[int]) -> None:
    """A drafter that is mostly right, with wrong branches, most of which the grammar forbids."""
    prompt = plain.encode(PROMPT)
    with load(target, tree_nodes=60) as runtime:
        for index in chosen:
            script = ScriptedDrafter([*prompt, *expected[index], 0, 0], 320, accuracy=0.95, seed=3)
            found = transcribe(runtime, prompt, params_of(index, gamma=12, tree_nodes=40), script)
            assert found.tokens == expected[index] and found.passes < len(expected[index]) / 2


def test_how_an_answer_ends(plain: Runtime) -> None:
    """When nothing may follow, at the end token where the answer may end there, or cut."""
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 1}
    whole = plain.generate(PROMPT, json_schema=PERSON, **asked)
    assert_valid(whole.text, PERSON)
    assert whole.finish_reason == "stop" and whole.tokens[-1] != plain.tokenizer.eos_token_id
    for count, reason in ((len(whole.tokens), "stop"), (len(whole.tokens) - 1, "length")):
        cut = plain.generate(PROMPT, json_schema=PERSON, max_new_tokens=count, **asked)
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[:count], reason)
    stopped = plain.generate(PROMPT, json_schema=PERSON, stop='",', **asked)
    assert stopped.finish_reason == "stop" and stopped.text == whole.text.partition('",')[0]
    end = plain.tokenizer.eos_token_id
    number = plain.generate(PROMPT, json_schema={"type": "integer"}, logit_bias={end: 100})
    assert number.text.lstrip("-").isdigit() and number.finish_reason == "stop" and number.tokens[-1] == end


@pytest.mark.parametrize("schema", [{"const": "a<|im_end|>"}, {"type": "string", "pattern": r"^<\|im_end\|>$"}])
def test_what_spells_a_control_token_is_text(plain: Runtime, schema: dict[str, Any]) -> None:
    assert_valid(plain.generate(PROMPT, json_schema=schema).text, schema)
    by_number = plain.generate(PROMPT, params=GenerationParams(9, sampling=SamplingParams(grammar='start: <[0]> "x"')))
    assert by_number.tokens == [0, *plain.encode("x")] and by_number.text == "x"


def test_every_turn_of_a_conversation_is_bound(plain: Runtime) -> None:
    chat = plain.conversation()
    for schema in ({"enum": ["red", "blue"]}, {"type": "boolean"}, PERSON):
        reply = chat.say("the lazy dog", json_schema=schema)
        assert_valid("".join(reply), schema)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema cannot be followed.*uniqueItems"),
    ({"json_schema": {"oneOf": [{"minimum": 1}, {"maximum": 3}], "x-guidance": {"lenient": True}}}, "oneOf"),
    ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, 'Unimplemented keys: \\["not"\\]'),
    ({"json_schema": {"$ref": "https://example.com/x.json"}}, "example.com/x.json"),
    ({"json_schema": {"$ref": "file:///etc/passwd"}}, "file:///etc/passwd"),
    ({"json_schema": {"$ref": "#/$defs/none"}}, "does not exist"),
    ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
    ({"json_schema": '{"not":' * 500 + "{}" + "}" * 500}, "recursion limit exceeded"),
    ({"json_schema": {"type": "object", "required": ["\ud800"]}}, "json_schema cannot be followed"),
    ({"grammar": "start: missing"}, "grammar cannot be followed.*missing"),
    ({"grammar": ""}, "grammar cannot be followed"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_what_cannot_be_followed_is_refused(target: Path, asked: dict[str, Any], message: str) -> None:
    params = GenerationParams(sampling=SamplingParams(**asked))
    with pytest.raises(OptionError, match=message):
        Runtime.load(target, device="cpu", on_progress=refuse_weights, check=lambda room: room.check(params))


@pytest.mark.parametrize(("asked", "message"), [
    ({"json_schema": "{"}, "json_schema is not JSON"), ({"json_schema": "[1]"}, "is not an object"),
    ({"json_schema": {"enum": {1, 2}}}, "json_schema is not JSON"),
    ({"json_schema": '{"const": "\ud800"}'}, "lone surrogate"),
    ({"json_schema": {"const": "x" * MOST_GRAMMAR_CHARACTERS}}, f"at most {MOST_GRAMMAR_CHARACTERS}"),
    ({"grammar": "\n" * (MOST_GRAMMAR_CHARACTERS + 1)}, f"at most {MOST_GRAMMAR_CHARACTERS}"),
    ({"json_schema": {}, "grammar": "start: /a/"}, "drop one"),
    ({"json_schema": '{"a":' * 20_000 + "{}" + "}" * 20_000}, "json_schema is not JSON"),
    ({"json_schema": '{"maximum": ' + "9" * 5000 + "}"}, "json_schema is not JSON"),
])  # fmt: skip
def test_what_is_no_schema_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SamplingParams(**asked)


def test_an_end_that_is_ignored_is_refused() -> None:
    with pytest.raises(OptionError, match="ignore_eos does nothing"):
        GenerationParams(ignore_eos=True, sampling=SamplingParams(json_schema={}))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, plain: Runtime) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"pip install 'offload-runtime\[schemas\]'"):
        GrammarCompiler(byte_level_tokenizer(), 320, frozenset({1}))


def test_an_answer_that_cannot_go_on_ends_by_an_error_of_its_own(copy: Path) -> None:
    """Of a model whose tokens have no digits."""
    path = copy / "tokenizer.json"
    read = json.loads(path.read_text())
    for digit in "0123456789":
        read["model"]["vocab"]["z" * (20 + int(digit))] = read["model"]["vocab"].pop(digit)
    path.write_text(json.dumps(read))
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    params = GenerationParams(sampling=SamplingParams(json_schema=schema, logit_bias={220: -100.0}))
    with load(copy, max_batch=2) as runtime:
        with pytest.raises(GrammarError, match="the answer cannot go on as its schema or grammar demands"):
            runtime.generate(PROMPT, params=params)
        usual, prompt = runtime.generate(PROMPT, max_new_tokens=9, ignore_eos=True), runtime.encode(PROMPT)
        failed, fine = list[Any](), list[Any]()
        with Scheduler(runtime) as scheduler:
            scheduler.submit(prompt, params, on_event=failed.append)
            scheduler.submit(prompt, GenerationParams(9, ignore_eos=True), on_event=fine.append)
            scheduler.close(60)
        assert isinstance(failed[-1], ErrorEvent) and isinstance(failed[-1].error, GrammarError)
        assert fine[-1].result.tokens == usual.tokens


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """Of logits that have 13 tokens more than the tokenizer."""
    return GrammarCompiler(byte_level_tokenizer(), 333, frozenset({1}))


def matcher_of(compiler: GrammarCompiler, answer: Sequence[int], **asked: Any) -> GrammarMatcher:
    matcher = compiler.compile(SamplingParams(**asked))
    for token in answer:
        matcher.advance(token)
    return matcher


def mask_behind(compiler: GrammarCompiler, answer: Sequence[int], device: str = "cpu", **asked: Any) -> torch.Tensor:
    """[W] of the row that plain decoding has behind an answer."""
    return token_masks([matcher_of(compiler, answer, **asked)], [((0,), (-1,))], torch.device(device))[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masks_of_many_rows_are_those_of_the_cpu(compiler: GrammarCompiler, device: str) -> None:
    """Of more rows than are filtered together, in bf16; behind each of a chain's rows the text goes on as it may."""
    text = byte_level_tokenizer().encode('{"name":"' + "fox" * 20)
    asked = {"json_schema": {"type": "object", "additionalProperties": {"type": "string"}}}
    matcher, window = matcher_of(compiler, text[:1], **asked), TokenTree(tuple(text))
    logits = torch.randn(len(text), 333, generator=torch.Generator().manual_seed(1)).bfloat16()
    sampling = SlotSampling.of([SamplingParams(0.7, seed=3)], torch.device(device))
    sampling.assign(0, SamplingParams(0.7, seed=3), matcher)
    tokens = tokens_behind(logits.to(device), sampling, {0: window}, [9])
    for row, token in enumerate(tokens):
        mask = mask_behind(compiler, text[: row + 1], device, **asked)
        alone = SlotSampling.of([SamplingParams(0.7, seed=3)], torch.device("cpu"))
        row_logits = masked(logits[row : row + 1], mask.cpu()[None])
        assert tokens_behind(row_logits, alone, {0: TokenTree((0,))}, [9 + row]) == [token]


@pytest.mark.parametrize("name", [
    "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED["files"] if name != "llama")
])  # fmt: skip
def test_tokens_that_are_allowed_make_json_with_every_vocabulary(name: str, tmp_path: Path) -> None:
    """SentencePiece and byte-level ones: whatever is taken of them, and nothing that the vocabulary does not have."""
    tokenizer = open_checkpoint(written(tmp_path, metadata_of(name))).tokenizer()
    vocab_size, chance = len(tokenizer) + 40, random.Random(2)
    compiler = GrammarCompiler(tokenizer, vocab_size, frozenset({tokenizer.eos_token_id}))
    items = [{"const": "naïve 日本\n</s><|im_end|><unk>"}, PERSON]
    schema = {"type": "array", "prefixItems": items, "minItems": 2, "items": False}
    matcher, tokens, is_complete = compiler.compile(SamplingParams(json_schema=schema)), list[int](), False
    while not is_complete:
        (mask,) = token_masks([matcher], [((0,), (-1,))], torch.device("cpu"))
        bits = mask[:, None].bitwise_right_shift(torch.arange(32, dtype=torch.int32)).bitwise_and(1).flatten()
        tokens.append(chance.choice(bits.nonzero().flatten().tolist()))
        is_complete = matcher.advance(tokens[-1])
    assert max(tokens) < len(tokenizer)
    assert_valid(tokenizer.decode(tokens, skip_special_tokens=True), schema)
