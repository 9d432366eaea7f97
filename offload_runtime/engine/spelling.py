"""How tokens are spelled where each of them is told of, as with log-probabilities: by their own bytes, wherever they
stand. A decoder drops the first blank of a text, and a part of a character is no text by itself; what a token has to
say is neither."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from offload_runtime.sampling import TokenLogprobs

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte, as SentencePiece spells it


class TokenSpelling:
    """Spells a model's tokens.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._added = tokenizer, tokenizer.added_tokens_decoder
        self._texts: dict[int, str] = {}  # of tokens so far: the likeliest are the same again and again

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Return the letters of byte-level vocabularies; empty for others."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        return {letter: byte for byte, letter in bytes_to_unicode().items()} if is_byte_level else {}

    def bytes_of(self, token: int) -> bytes:
        """Return a token's own bytes: those that it adds behind others, of a control token those of its name."""
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
        """Return a token's text, or its bytes written out behind `prefix` where they are none."""
        own = self.bytes_of(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in own)

    def keys_of(self, tokens: Sequence[int]) -> list[str]:
        """Return texts of different tokens by which they are told apart: `token_id:N`, as in vLLM, for one whose text
        another one before it has."""
        texts = [self.text_of(token, prefix="bytes:") for token in tokens]
        return [
            f"token_id:{token}" if text in texts[:place] else text
            for place, (token, text) in enumerate(zip(tokens, texts, strict=True))
        ]

    def spelled(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        """Return log-probabilities with the texts of their tokens."""
        tokens = [logprobs.token, *(token for token, _ in logprobs.top)]
        for token in set(tokens) - self._texts.keys():
            self._texts[token] = self.text_of(token)
        text, *texts = (self._texts[token] for token in tokens)
        return replace(logprobs, text=text, top_texts=tuple(texts))

    def is_shown(self, token: int) -> bool:
        """Return whether an answer's text has this token: it has no control tokens."""
        return token not in self._added or not self._added[token].special
