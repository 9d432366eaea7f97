"""Answers bound to a schema or a grammar: plain decoding's tokens whatever proposes them, and how such answers end."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import ErrorEvent, Runtime, Scheduler
from offload_runtime.errors import GrammarError, OptionError
from offload_runtime.grammar import GrammarCompiler, GrammarMatcher, masked, token_masks
from offload_runtime.model import Window
from offload_runtime.params import MOST_GRAMMAR_CHARACTERS, GenerationParams, SamplingParams
from offload_runtime.runners import ModelRunner, decided
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import DraftRequest, PromptRequest, Proposal, Proposer, run_step
from offload_runtime.verify.equality import ScriptedProposer, transcribe
from offload_runtime.weights import open_checkpoint
from tests.helpers.engine import PROMPT, byte_level_tokenizer, load, one_thread, refuse_weights  # noqa: F401
from tests.helpers.kv_runners import assemble, require_tokens_of_captured_passes
from tests.helpers.models import random_tokens
from tests.helpers.schemas import SCHEMAS, assert_valid
from tests.test_tokenizers import EXPECTED, metadata_of, written

PERSON: dict[str, Any] = {
    "type": "object", "required": ["name", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["the quick brown fox", "lazy"]}, "minItems": 1, "maxItems": 2},
    },
}  # fmt: skip
# The second with filters, which choose among what the grammar allows; the third repeats what the prompt has.
WAYS: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"json_schema": PERSON, "temperature": 1.0, "seed": 5, "top_p": 0.9},
    {"json_schema": PERSON, "temperature": 0.8, "seed": 2, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
    {"grammar": 'start: ("the " WORD ", ")~2..4 "."\nWORD: /[a-z]{2,5}/', "temperature": 1.0, "seed": 3},
]
COUNT = 32
some_ways = pytest.mark.parametrize(
    "chosen", [pytest.param([1], id="one"), pytest.param([0, 2, 3], id="others", marks=pytest.mark.slow)]
)


def params_of(way: int, **more: Any) -> GenerationParams:
    return GenerationParams(COUNT, sampling=SamplingParams(**WAYS[way]), **more)


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Runtime]:
    with load(target, draft="none", max_batch=2) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(plain: Runtime) -> list[list[int]]:
    """Plain decoding's tokens for each of `WAYS`."""
    return [plain.generate(PROMPT, params=params_of(way)).tokens for way in range(len(WAYS))]


def assert_same(runtime: Runtime, expected: Sequence[Sequence[int]], chosen: Sequence[int], **windows: Any) -> float:
    """Compare some of the `WAYS`; returns the most tokens a pass."""
    results = [runtime.generate(PROMPT, params=params_of(way, **windows)) for way in chosen]
    assert [result.tokens for result in results] == [expected[way] for way in chosen]
    return max(result.stats.tokens_per_pass for result in results)


@some_ways
def test_a_draft_changes_no_token(target: Path, draft: Path, expected: list[list[int]], chosen: Sequence[int]) -> None:
    with load(target, resident_layers=1, draft=draft, tree_nodes=24) as runtime:
        assert assert_same(runtime, expected, chosen, gamma=5, tree_nodes=24 if 1 in chosen else 0) > 1


@some_ways
def test_n_grams_change_no_token(target: Path, expected: list[list[int]], chosen: Sequence[int]) -> None:
    with load(target) as runtime:
        assert_same(runtime, expected, chosen, gamma=7)
        assert_same(runtime, expected, chosen)


@pytest.mark.slow
def test_triforce_changes_no_token(target: Path, draft: Path, expected: list[list[int]]) -> None:
    options = SpeculationOptions("triforce", budget_tokens=64, gamma_draft=3)
    with load(target, draft=draft, speculation=options) as runtime:
        assert_same(runtime, expected, [1, 3], gamma=5)


@some_ways
def test_rows_of_deep_trees_have_the_masks_of_their_own_paths(
    plain: Runtime, target: Path, expected: list[list[int]], chosen: Sequence[int]
) -> None:
    """A proposer that is mostly right, with wrong branches, most of which the grammar forbids."""
    prompt = plain.encode(PROMPT)
    with load(target, tree_nodes=60) as runtime:
        for way in chosen:
            script = ScriptedProposer([*prompt, *expected[way], 0, 0], 320, accuracy=0.95, seed=3)
            found = transcribe(runtime, prompt, params_of(way, gamma=12, tree_nodes=40), script)
            assert found.tokens == expected[way] and found.passes < len(expected[way]) / 2


def test_answers_of_a_batch_have_their_own(plain: Runtime, expected: list[list[int]]) -> None:
    params = [params_of(1), GenerationParams(12, ignore_eos=True)]
    alone = plain.generate(PROMPT, params=params[1]).tokens
    for order in ([0, 1], [1, 0]):
        together = plain.generate_batch([PROMPT] * 2, params=[params[i] for i in order])
        assert [result.tokens for result in together] == [[expected[1], alone][i] for i in order]


class Forbidden(Proposer):
    """Proposes a tree behind the first token of an answer, of which a schema forbids two nodes."""

    name = "draft"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def modes(self, texts: Any) -> Sequence[str]:
        return ("chain", "tree")

    def propose(self, requests: Any) -> list[Proposal]:
        tokens = (300, self._answer[1], 301, self._answer[2])
        return [Proposal(tokens, (-1, -1, 1, 1), ("draft", "ngram", "draft", "retrieval")) for _ in requests]


def test_forbidden_proposals_count_as_rejected(plain: Runtime) -> None:
    """And the others as of those who proposed them."""
    schema = {"const": "ab"}
    answer = plain.generate(PROMPT, json_schema=schema)
    assert answer.text == '"ab"' and len(answer.tokens) == 4
    params = GenerationParams(9, gamma=3, tree_nodes=4, sampling=SamplingParams(json_schema=schema))
    found = transcribe(plain, plain.encode(PROMPT), params, Forbidden(answer.tokens))
    assert found.tokens == answer.tokens and found.passes == 1
    result = plain.replay(
        plain.encode(PROMPT), params, proposer=Forbidden(answer.tokens), on_logits=lambda slot, logits: None
    )
    assert result.stats.accepted_by_source == {"ngram": 1, "retrieval": 1}
    assert result.stats.accepted_by_depth == (1, 1) and result.stats.acceptance[-1].proposed == 4


class Watched:
    """A target whose windows are kept."""

    def __init__(self, runner: ModelRunner) -> None:
        self.cache, self.windows, self._runner = runner.cache, list[Window](), runner

    def decide(self, windows: Sequence[Window], *rest: Any) -> Any:
        self.windows += windows
        return self._runner.decide(windows, *rest)


def test_forbidden_proposals_are_not_verified(compiler: GrammarCompiler) -> None:
    made = assemble("llama-gqa", batch=1)
    prompt, sampling = random_tokens(30), SlotSampling.of([SamplingParams()], torch.device("cpu"))
    (first,) = run_step(made.runner, sampling, Proposer(), [], prompts=[PromptRequest(0, prompt)])[0].tokens
    allowed = byte_level_tokenizer().encode("t")
    sampling.assign(0, SamplingParams(), matcher_of(compiler, [], grammar='start: "a" | "tz"'))
    target = Watched(made.runner)
    request = DraftRequest(0, [*prompt, first], 3, 4)
    run_step(target, sampling, Forbidden([0, allowed[0], 5]), [request])  # type: ignore[arg-type]
    assert target.windows == [Window((first, allowed[0]))]
    sampling.release(0)
    assert sampling.is_plain
    made.close()


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
def test_what_cannot_be_followed_is_refused_before_weights_are_read(
    target: Path, asked: dict[str, Any], message: str
) -> None:
    params = GenerationParams(sampling=SamplingParams(**asked))
    with pytest.raises(OptionError, match=message):
        Runtime.load(target, device="cpu", on_progress=refuse_weights, check=lambda room: room.check(params))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[1]"}, "is not an object"),
        ({"json_schema": {"enum": {1, 2}}}, "json_schema is not JSON"),
        ({"json_schema": '{"const": "\ud800"}'}, "lone surrogate"),
        ({"json_schema": {"const": "x" * MOST_GRAMMAR_CHARACTERS}}, f"at most {MOST_GRAMMAR_CHARACTERS}"),
        ({"grammar": "\n" * (MOST_GRAMMAR_CHARACTERS + 1)}, f"at most {MOST_GRAMMAR_CHARACTERS}"),
        ({"json_schema": {}, "grammar": "start: /a/"}, "drop one"),
        ({"json_schema": '{"a":' * 20_000 + "{}" + "}" * 20_000}, "json_schema is not JSON"),
        ({"json_schema": '{"maximum": ' + "9" * 5000 + "}"}, "json_schema is not JSON"),
    ],
)
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


def test_captured_passes_have_masks_too(compiler: GrammarCompiler) -> None:
    """Of a slot with a grammar, windows that are captured otherwise."""
    params = [SamplingParams(0.8), SamplingParams(1.0, seed=3)]

    def bind(sampling: SlotSampling, *_: Any) -> None:
        sampling.assign(0, params[0], matcher_of(compiler, [], grammar=r"start: /(x|[%&]*y)z/"))

    require_tokens_of_captured_passes(params, bind)


def mask_behind(compiler: GrammarCompiler, answer: Sequence[int], device: str = "cpu", **asked: Any) -> torch.Tensor:
    """[W] of the row that plain decoding has behind an answer."""
    return token_masks([matcher_of(compiler, answer, **asked)], [((0,), (-1,))], torch.device(device))[0]


def allowed_by(mask: torch.Tensor) -> list[int]:
    return [token for token in range(333) if int(mask[token // 32]) >> token % 32 & 1]


def tree_behind(compiler: GrammarCompiler, chance: random.Random, asked: dict[str, Any]) -> tuple[list[int], Window]:
    """An answer so far, and a tree of what a grammar allows behind it."""
    answer, tokens, parents = list[int](), [0], [-1]

    def next_token(path: Sequence[int]) -> tuple[int, bool]:
        """One that may follow, and whether nothing may follow that."""
        token = chance.choice(allowed_by(mask_behind(compiler, path, **asked)))
        return token, matcher_of(compiler, path, **asked).advance(token)

    for _ in range(chance.randrange(12)):
        token, is_last = next_token(answer)
        answer += [] if is_last else [token]
    open_rows = [0]
    for row in range(1, chance.randrange(1, 6)):
        parents.append(chance.choice(open_rows))
        token, is_last = next_token([*answer, *path_of(tokens, parents, parents[-1])])
        tokens.append(token)
        open_rows += [] if is_last else [row]
    return answer, Window(tuple(tokens), tuple(parents))


def path_of(tokens: Sequence[int], parents: Sequence[int], row: int) -> list[int]:
    return [] if row <= 0 else [*path_of(tokens, parents, parents[row]), tokens[row]]


@settings(max_examples=12)
@given(st.integers(0, 1 << 30), st.sampled_from(range(len(SCHEMAS))), st.sampled_from([0.0, 0.7, 1.3]))
def test_each_row_has_the_mask_of_plain_decoding(
    compiler: GrammarCompiler, seed: int, number: int, temperature: float
) -> None:
    """Also of a slot beside one without a grammar; the tokens are the likeliest that the mask allows, and proposals of
    them are kept."""
    chance, asked = random.Random(seed), {"json_schema": SCHEMAS[number]}
    answer, window = tree_behind(compiler, chance, asked)
    parents = window.all_parents
    rows = [mask_behind(compiler, [*answer, *path_of(window.tokens, parents, row)], **asked)
            for row in range(len(parents))]  # fmt: skip
    matcher = matcher_of(compiler, answer, **asked)
    below = [parent - 1 for parent in parents[1:]]
    assert matcher.allowed(window.tokens[1:], below) == [*range(len(below))]
    found = token_masks([None, matcher], [((0, 1), (-1, 0)), (window.tokens, parents)], torch.device("cpu"))
    assert torch.equal(found, torch.stack([torch.full_like(rows[0], -1)] * 2 + rows))
    logits = torch.randn(2 + len(parents), 333, generator=torch.Generator().manual_seed(seed))
    kept = logits.clone()
    for row, mask in enumerate(rows, start=2):
        kept[row, sorted({*range(333)} - {*allowed_by(mask)})] = -torch.inf
    assert torch.equal(masked(logits, found), kept)
    params, windows = SamplingParams(temperature, seed=seed, top_k=5), [Window((0, 1)), window]
    bound, free = (SlotSampling.of([params, params], torch.device("cpu")) for _ in range(2))
    bound.assign(1, params, matcher)
    tokens = decided(logits, bound, windows, [0, 1], [9, 9]).tokens()
    assert tokens == decided(kept, free, windows, [0, 1], [9, 9]).tokens() and -1 not in tokens


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masks_of_many_rows_are_those_of_the_cpu(compiler: GrammarCompiler, device: str) -> None:
    """Of more rows than are filtered together, in bf16; behind each of a chain's rows the text goes on as it may."""
    text = byte_level_tokenizer().encode('{"name":"' + "fox" * 20)
    asked = {"json_schema": {"type": "object", "additionalProperties": {"type": "string"}}}
    matcher, window = matcher_of(compiler, text[:1], **asked), Window(tuple(text))
    logits = torch.randn(len(text), 333, generator=torch.Generator().manual_seed(1)).bfloat16()
    sampling = SlotSampling.of([SamplingParams(0.7, seed=3)], torch.device(device))
    sampling.assign(0, SamplingParams(0.7, seed=3), matcher)
    tokens = decided(logits.to(device), sampling, [window], [0], [9]).tokens()
    for row, token in enumerate(tokens):
        mask = mask_behind(compiler, text[: row + 1], device, **asked)
        alone = SlotSampling.of([SamplingParams(0.7, seed=3)], torch.device("cpu"))
        row_logits = masked(logits[row : row + 1], mask.cpu()[None])
        assert decided(row_logits, alone, [Window((0,))], [0], [9 + row]).tokens() == [token]


@pytest.mark.parametrize("name", [
    "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED["files"] if name != "llama")
])  # fmt: skip
def test_tokens_that_are_allowed_make_json_with_every_vocabulary(name: str, tmp_path: Path) -> None:
    """SentencePiece and byte-level ones: whatever is taken of them, and nothing that the vocabulary does not have."""
    tokenizer = open_checkpoint(written(tmp_path, metadata_of(name))).tokenizer()
    vocab_size, chance = len(tokenizer) + 40, random.Random(2)
    compiler = GrammarCompiler(tokenizer, vocab_size, frozenset({tokenizer.eos_token_id}))
    schema = {
        "type": "array",
        "prefixItems": [{"const": "naïve 日本\n</s><|im_end|><unk>"}, PERSON],
        "minItems": 2,
        "items": False,
    }
    matcher, tokens, is_complete = compiler.compile(SamplingParams(json_schema=schema)), list[int](), False
    while not is_complete:
        (mask,) = token_masks([matcher], [((0,), (-1,))], torch.device("cpu"))
        bits = mask[:, None].bitwise_right_shift(torch.arange(32, dtype=torch.int32)).bitwise_and(1).flatten()
        tokens.append(chance.choice(bits.nonzero().flatten().tolist()))
        is_complete = matcher.advance(tokens[-1])
    assert max(tokens) < len(tokenizer)
    assert_valid(tokenizer.decode(tokens, skip_special_tokens=True), schema)


def test_answers_to_one_schema_share_what_is_compiled_and_nothing_else(compiler: GrammarCompiler) -> None:
    """Also beyond as many as may share it."""
    params = SamplingParams(json_schema=json.dumps({"enum": ["ab", "cd"]}))
    found = [compiler.compile(params) for _ in range(150)]
    first, second = found[0], found[1]
    quote = next(token for token in range(300) if first.allowed([token], [-1]))
    first.advance(quote)
    assert second.allowed([quote], [-1]) and found[-1].allowed([quote], [-1]) and not first.allowed([quote], [-1])


def test_masks_take_no_more_memory_than_is_planned_for_a_row() -> None:
    """24 bytes a logit, of the rows that are sampled together."""
    from torch.profiler import ProfilerActivity, profile

    logits, masks = torch.randn(32, 4000).bfloat16(), torch.full((32, 125), -1, dtype=torch.int32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        masked(logits, masks)
    held = most = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 0 < most <= 24 * logits.numel()
