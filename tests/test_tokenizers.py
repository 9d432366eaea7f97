"""Tokenizers of GGUF files: llama.cpp's token ids, what ends an answer, and refusals.

`data/tokenizers/expected.json.xz` has 540 strings (by hand: unicode, runs of blanks, digits, code, control tokens; the
rest drawn with seed 540 from alphabets and words) and six vocabularies with the ids that llama.cpp itself gives them:
its `llama_vocab::tokenize(text, add_special=true, parse_special=true)` as vendored by llama-cpp-python 0.3.36, on whole
files. These are llama.cpp's own `ggml-vocab-*.gguf` (llama-bpe, qwen2, deepseek-llm; llama: of SentencePiece), the
demonstration model's file (smollm), and mistral-common 1.13.1's `tekken_240718.json` written as a GGUF file, with the
merges that follow from its ranks (tekken).

The vocabularies are reduced to what can occur in these strings, so that the ids stay the same: tokens keep their ids in
`ids`, merges their order; merges are left out whose result is in no string, and tokens that no id and no merge needs.
"""

import json
import lzma
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from offload_runtime.errors import CheckpointError
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.engine import byte_level_tokenizer
from tests.test_weights_gguf import NO_VOCABULARY, build, write

EXPECTED = json.loads(lzma.decompress((Path(__file__).parent / "data/tokenizers/expected.json.xz").read_bytes()))
STRINGS: list[str] = EXPECTED["strings"]


def metadata_of(name: str, **changes: Any) -> dict[str, Any]:
    """What stands under `tokenizer.ggml` in the file of a reduced vocabulary."""
    file = EXPECTED["files"][name]
    place = {old: new for new, old in enumerate(file["ids"])}
    values = {key: place[value] if key.endswith("_id") else value for key, value in file["metadata"].items()}
    lists = {key: file[key] for key in ("tokens", "token_type", "merges", "scores") if key in file}
    return {key: value for key, value in {**values, **lists, **changes}.items() if value is not None}


def written(directory: Path, vocabulary: dict[str, Any]) -> Path:
    """A small model with this vocabulary."""
    directory.mkdir(exist_ok=True)
    model = build(num_hidden_layers=1, vocab_size=len(vocabulary.get("tokens", "")) or 64)
    return write(directory / "m.gguf", model, kind="F16", vocabulary=vocabulary)


@pytest.mark.parametrize("name", EXPECTED["files"])
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    expected = EXPECTED["files"][name]
    source = open_checkpoint(written(tmp_path, metadata_of(name)))
    tokenizer, ids = source.tokenizer(), expected["ids"]
    assert len(STRINGS) == len(set(STRINGS)) == 540
    found = {text: [ids[token] for token in tokenizer.encode(text)] for text in STRINGS}
    wanted = dict(zip(STRINGS, expected["expected"], strict=True))
    assert {text: found[text] for text in STRINGS if found[text] != wanted[text]} == {}
    ends = source.generation_eos()
    assert sorted(ids[token] for token in ends) == expected["end_ids"]
    assert ends[0] == tokenizer.eos_token_id
    for text in STRINGS[18:60]:  # what it says is what was said, but for the first blank of SentencePiece
        said = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert said == text


def test_marks_belong_to_words_where_qwen_3_5_cuts_text(tmp_path: Path) -> None:
    vocabulary = metadata_of("qwen2", pre="qwen35")
    ours = open_checkpoint(written(tmp_path, vocabulary)).tokenizer()
    ids = {token: index for index, token in enumerate(vocabulary["tokens"])}
    theirs = Qwen3_5Tokenizer(vocab=ids, merges=[tuple(merge.split(" ", 1)) for merge in vocabulary["merges"]])
    for text in STRINGS:  # transformers composes letters before, and knows no control tokens here
        if unicodedata.is_normalized("NFC", text) and "<|" not in text and "</s>" not in text:
            assert ours.encode(text) == theirs.encode(text), text


def test_merges_of_gemma_4_say_what_scores_say(tmp_path: Path) -> None:
    """SentencePiece's pieces in the order of their scores, written as merges; and no token spans the end of a line."""
    vocabulary = metadata_of("llama", add_space_prefix=False)
    scores, known = dict(zip(vocabulary["tokens"], vocabulary["scores"], strict=True)), set(vocabulary["tokens"])
    merges = [
        f"{token[:place]} {token[place:]}" for token in sorted(scores, key=lambda token: -scores[token])
        for place in range(1, len(token)) if {token[:place], token[place:]} <= known
    ]  # fmt: skip
    gemma = {name: value for name, value in vocabulary.items() if name != "scores"}
    by_score, by_merge = (
        open_checkpoint(written(tmp_path / name, changed)).tokenizer()
        for name, changed in (("a", vocabulary), ("b", gemma | {"model": "gemma4", "merges": merges}))
    )
    for text in STRINGS:
        if "\n" not in text:
            assert by_merge.encode(text) == by_score.encode(text), text
    assert by_merge.decode(by_merge.encode(" a  b\n\nc", add_special_tokens=False)) == " a  b\n\nc"


@pytest.mark.parametrize("text", ["ö ü ø", "Größe, façade"])
def test_letters_that_are_tokens_are_written_as_letters(text: str, tmp_path: Path) -> None:
    """DeepSeek's files have tokens of letters that stand for bytes in other tokens."""
    tokenizer = open_checkpoint(written(tmp_path, metadata_of("deepseek-llm"))).tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tokens_of_known_names_control_whatever_their_type(tmp_path: Path) -> None:
    """The answer of a model whose file names no end of turn went on past `<|endoftext|>`."""
    vocabulary = metadata_of("smollm")
    ends = [vocabulary["tokens"].index(name) for name in ("<|im_end|>", "<|endoftext|>")]
    vocabulary["token_type"] = [1] * len(vocabulary["tokens"])
    source = open_checkpoint(written(tmp_path, vocabulary))
    assert {*ends} <= {*source.generation_eos()}
    assert source.tokenizer().encode("<|im_end|><|endoftext|>") == ends
    assert source.tokenizer().decode(ends, skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<eos>", "</s>", "<end_of_turn>"], ["<eos>", "<end_of_turn>"]),  # Gemma's </s> is a tag
        (["<eos>", "<turn|>", "<|tool_response>"], ["<eos>", "<turn|>", "<|tool_response>"]),
        (["<|endoftext|>", "<|end|>", "<|user|>"], ["<|endoftext|>", "<|end|>"]),  # Phi's user does not end
        (["<|return|>", "<|call|>", "<|end|>"], ["<|return|>", "<|call|>"]),  # of several messages one ends
        (["</s>", "[INST]"], ["</s>"]), (["<|end_of_text|>", "<|end_of_role|>"], ["<|end_of_text|>"]),
    ],
)  # fmt: skip
def test_what_ends_an_answer_of_each_family(tokens: list[str], ends: list[str], tmp_path: Path) -> None:
    vocabulary = metadata_of("smollm")
    vocabulary["tokens"] = [*tokens, *vocabulary["tokens"][len(tokens) :]]
    vocabulary["token_type"] = [3] * len(tokens) + vocabulary["token_type"][len(tokens) :]
    found = open_checkpoint(written(tmp_path, {**vocabulary, "eos_token_id": 0})).generation_eos()
    assert {tokens[index] for index in found if index < len(tokens)} == set(ends)


def test_the_end_of_a_turn_that_a_glm_file_names_ends_an_answer(tmp_path: Path) -> None:
    vocabulary = metadata_of("smollm")
    vocabulary["tokens"] = ["<|endoftext|>", "<|user|>", "<|observation|>", *vocabulary["tokens"][3:]]
    source = open_checkpoint(written(tmp_path, {**vocabulary, "eos_token_id": 0, "eot_token_id": 1}))
    assert set(source.generation_eos()) >= {0, 1, 2}


@pytest.mark.parametrize(("changes", "message"), [
    ({"pre": "mystery"}, r"pre 'mystery'\).*default, gpt-2, smollm, .*\n.*tokenizer\.json"),
    ({"pre": None}, r"pre '\(missing\)'\).*default, gpt-2, smollm, .*\n.*tokenizer\.json"),
    ({"model": "bert"}, "model 'bert', pre 'smollm'"), ({"model": None}, r"model '\(missing\)'"),
    ({"tokens": ["a"] * 300}, "each once"), ({"tokens": ["a" * 5000]}, "each once"),
    ({"tokens": [1, 2, 3]}, "tokens 1, where a text"), ({"token_type": [1]}, "with a type"),
    ({"token_type": "x" * 5000}, "where a list"), ({"merges": ["x"]}, "no usable tokenizer"),
    ({"merges": ["never heard"]}, "no usable tokenizer"), ({"model": "llama"}, "no usable tokenizer .*argument"),
    ({"add_bos_token": "yes"}, "true or false"),
])  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, metadata_of("smollm", **changes))
    with pytest.raises(CheckpointError, match=message) as refusal:
        open_checkpoint(path).tokenizer()
    lines = str(refusal.value).splitlines()
    assert len(lines) <= 2 and max(map(len, lines)) <= 300


def test_sentencepiece_files_do_not_say_how_text_is_cut(tmp_path: Path) -> None:
    said, silent = (open_checkpoint(written(tmp_path, metadata_of("llama", pre=pre))) for pre in ("default", None))
    assert silent.tokenizer().encode(STRINGS[20]) == said.tokenizer().encode(STRINGS[20])


@pytest.mark.parametrize("pre", ["mystery", None])
def test_a_tokenizer_beside_it_is_a_way_out(pre: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = open_checkpoint(written(tmp_path, metadata_of("smollm"))).tokenizer()
    known.save_pretrained(tmp_path)
    assert not caplog.records
    found = open_checkpoint(written(tmp_path, metadata_of("smollm", pre=pre))).tokenizer()
    assert [found.encode(text) for text in STRINGS] == [known.encode(text) for text in STRINGS]
    assert "m.gguf has a tokenizer of a kind that is not read" in caplog.text
    assert "the tokenizer.json beside it is used" in caplog.text


@pytest.mark.parametrize("change", ["another", "shorter", "none at all"])
def test_a_tokenizer_of_another_model_beside_the_file_is_refused(change: str, tmp_path: Path) -> None:
    open_checkpoint(written(tmp_path, metadata_of("smollm"))).tokenizer().save_pretrained(tmp_path)
    tokens = metadata_of("smollm")["tokens"]
    swapped = [*tokens[:300], tokens[301], tokens[300], *tokens[302:]]
    changed = {"another": swapped, "shorter": tokens[:300], "none at all": None}[change]
    opened = open_checkpoint(written(tmp_path, metadata_of("smollm", pre="mystery", tokens=changed)))
    if change == "none at all":  # nothing to compare with
        assert opened.tokenizer().get_vocab()
        return
    with pytest.raises(CheckpointError, match=r"pre 'mystery'\) and .* tokens, .* of another vocabulary, of \d+: put"):
        opened.tokenizer()


@pytest.mark.parametrize(
    "part",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}},
        {"model": {"type": "Unigram", "vocab": [], "unk_id": None}},
        {"model": {"type": "x" * 5000}},
        {"model": None, "version": "\n\n\n"},
    ],
    ids=["panics reading text", "panics when loaded", "panics writing text", "reads nothing", "long", "lines"],
)
def test_a_damaged_tokenizer_of_transformers(part: dict[str, Any], tmp_path: Path) -> None:
    """Panics of the `tokenizers` library are no `Exception`s."""
    path = written(tmp_path, NO_VOCABULARY)
    byte_level_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    with pytest.raises(CheckpointError, match=r"has no usable tokenizer .*: add its tokenizer\.json") as refusal:
        open_checkpoint(path).tokenizer()
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) <= 300
