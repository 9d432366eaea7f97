"""How tokens are spelled beside their log-probabilities, and where they begin in the text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offload_runtime.server.protocol import TextOffsets, TokenSpelling
from tests.test_text import metaspace_tokenizer

WORDS = ["▁", "▁cat", "cat", "▁the", "A", "日"]


def sentencepiece() -> Any:
    made = metaspace_tokenizer(WORDS)
    made.backend_tokenizer.normalizer = None
    return made


def byte_level() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "Ġa", "Õ."])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.add_tokens([AddedToken("\n\n日", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
def test_a_tokens_bytes_are_those_that_it_adds_to_a_text(make: Any) -> None:
    """Whatever is encoded: the bytes of its tokens are those of the text, and places are those of its characters."""
    tokenizer = make()
    spelling, offsets = TokenSpelling(tokenizer), TextOffsets(TokenSpelling(tokenizer))
    text = "é日A" if make is sentencepiece else "é 日a\n\n日🙂"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(spelling.bytes_of, tokens)).decode() == text
    starts, before = list[int](), b""
    for token in tokens:
        starts.append(len(before.decode(errors="ignore")))
        before += spelling.bytes_of(token)
    assert [offsets.push(token, text) for token in tokens] == starts
    assert len(starts) > len(text) - 1 and starts[-1] < len(text)


def test_tokens_of_one_text_are_told_apart() -> None:
    spelling, byte = TokenSpelling(sentencepiece()), 3
    first = byte + 256
    assert [spelling.text_of(token) for token in (first, first + 1, first + 2)] == [" ", " cat", "cat"]
    letter = first + WORDS.index("A")
    assert spelling.keys_of([byte + 65, first + 1, letter]) == ["A", " cat", f"token_id:{letter}"]
    assert spelling.keys_of([byte + 0xE2, byte + 0xE3]) == ["bytes:\\xe2", "bytes:\\xe3"]
    assert spelling.text_of(byte + 0xE2) == "\\xe2" and spelling.bytes_of(byte + 0xE2) == b"\xe2"
    assert spelling.bytes_of(99_999) == b""  # padding of the vocabulary
    assert (spelling.text_of(2), spelling.is_shown(2), spelling.is_shown(first)) == ("</s>", False, True)


def test_a_blank_that_a_text_does_not_begin_with_is_not_counted() -> None:
    """Of an answer to no text at all, which SentencePiece begins without one."""
    cat = 3 + 256 + 1
    for text, expected in (("cat cat", [0, 3, 7]), (" cat cat", [0, 4, 8])):
        offsets = TextOffsets(TokenSpelling(sentencepiece()))
        assert [offsets.push(token, text) for token in (cat, cat, 2)] == expected
