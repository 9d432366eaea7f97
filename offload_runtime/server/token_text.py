"""How tokens are spelled where their log-probabilities are told: by their own bytes, wherever they stand.

A decoder drops the first blank of a text, and a part of a character is no text by itself; what a token has to say is
neither. OpenAI's words for a part of a character are `bytes:\\xe2` in completions and `\\xe2` in chats.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte, as SentencePiece spells it


class TokenSpelling:
    """Spells a model's tokens.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._added = tokenizer, tokenizer.added_tokens_decoder

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The letters of byte-level vocabularies; empty for others."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        return {letter: byte for byte, letter in bytes_to_unicode().items()} if is_byte_level else {}

    def bytes_of(self, token: int) -> bytes:
        """A token's own bytes: those that it adds to a text behind others, of a control token those of its name."""
        if token in self._added:
            return str(self._added[token].content).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # padding of the vocabulary
            return b""
        if self._byte_of:
            fine = self._byte_of.keys() >= set(piece)  # DeepSeek's has letters that mean themselves
            return bytes(self._byte_of[letter] for letter in piece) if fine else str(piece).encode()
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        once, twice = (self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return str(twice[len(once) :]).encode()

    def text_of(self, token: int, *, prefix: str = "") -> str:
        """A token's text, or its bytes written out behind `prefix` where they are none."""
        own = self.bytes_of(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in own)

    def keys_of(self, tokens: Sequence[int]) -> list[str]:
        """Texts of different tokens by which completions tell them apart: `token_id:N`, as in vLLM, for one whose text
        another one before it has."""
        texts = [self.text_of(token, prefix="bytes:") for token in tokens]
        return [
            f"token_id:{token}" if text in texts[:place] else text
            for place, (token, text) in enumerate(zip(tokens, texts, strict=True))
        ]

    def is_shown(self, token: int) -> bool:
        """Whether an answer's text has this token: it has no control tokens."""
        return token not in self._added or not self._added[token].special


class TextOffsets:
    """Where in a text each of its tokens begins, in characters. Tokens that share one begin where it does.

    Args:
        spelling: Of the text's tokens.
    """

    def __init__(self, spelling: TokenSpelling) -> None:
        self._spelling, self._decoder = spelling, codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first, self._length = True, 0

    def push(self, token: int, text: str) -> int:
        """The place of the next token, of which `text` is shown, or of all behind it: a blank is not at the beginning
        of some answers."""
        begins_at, said = self._length, ""
        if self._spelling.is_shown(token):
            said = self._decoder.decode(self._spelling.bytes_of(token))
        if self._is_first and said:
            self._is_first = False
            said = said[1:] if said[0] == " " and text[:1] not in ("", " ") else said
        self._length += len(said)
        return begins_at
